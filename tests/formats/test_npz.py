"""numpy's files: those that ``convert`` writes, and those that numpy writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import transload
from transload.cli.main import main
from transload.converting import convert, parts
from transload.errors import BrokenFileError, ConvertError, FileWarning, LoadError, NotACheckpointError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

ARRAYS: dict[str, Any] = {
    "fc.weight": np.arange(6, dtype="<f4").reshape(2, 3),
    "deep/fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(5, dtype=">i2"),
    "mask": np.array([True, False]),
    "one": np.array(7),
    "none": np.empty((0, 2), "f2"),
    "complex": np.arange(3, dtype="c8"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_what_numpy_has_saved(tmp_path: Path, save: Any, name: str) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    made = convert(tmp_path / "a.npz", tmp_path / name)
    assert (made.format, made.tensors, made.left, made.notes) == ("npz", len(ARRAYS), (), ())
    convert(tmp_path / name, tmp_path / "c.npz")
    with np.load(tmp_path / "c.npz") as back:
        assert set(back) == set(ARRAYS)
        for key, array in ARRAYS.items():
            assert back[key].dtype == array.dtype.newbyteorder("<")
            assert np.array_equal(back[key], array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_every_function_takes_an_archive(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "a.npz"
    save(path, **ARRAYS)
    checkpoint = transload.inspect(path, verify=True)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity) == ("npz", "data-only", "whole")
    assert {each.name: each.shape for each in checkpoint.tensors} == {key: each.shape for key, each in ARRAYS.items()}
    assert transload.verify(path).ok
    assert transload.check(path).ok
    for options in ({}, {"verify": True}, {"mmap": True}):
        state = transload.load(path, **options)
        assert {key: each.tolist() for key, each in state.items()} == {
            key: each.tolist() for key, each in ARRAYS.items()
        }
    with transload.open(path) as handle:
        assert handle.slice("fc.weight")[1].tolist() == [3, 4, 5]


def test_a_changed_bit_is_found() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(9), b=np.arange(1000.0))
    data = bytearray(stream.getvalue())
    data[3000] ^= 1
    assert transload.inspect(bytes(data), verify=True).integrity == "damaged"
    with pytest.raises(BrokenFileError, match="bytes of b have changed"):
        transload.load(bytes(data), verify=True)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_a_damaged_array_is_named(save: Any) -> None:
    stream = io.BytesIO()
    save(stream, a=np.zeros(9), b=np.random.default_rng(5).random(1000), c=np.ones(3))
    assert transload.verify(stream.getvalue()).damaged == ()
    data = bytearray(stream.getvalue())
    data[3000] ^= 1
    assert [(each.name, each.kind) for each in transload.verify(bytes(data)).damaged] == [("b", "checksum")]


def test_a_cut_archive_has_what_is_left() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(9), b=np.arange(500.0))
    told = transload.inspect(stream.getvalue()[:2000])
    assert told.integrity == "damaged"
    first, second = told.storages
    assert first.stored == first.nbytes == 72
    assert second.offset is not None
    assert (second.stored, second.nbytes) == (2000 - second.offset, 4000)
    assert [problem.where for problem in told.problems if problem.code == "storage-cut"] == ["b"]
    assert "b" in {each.name for each in transload.verify(stream.getvalue()[:2000]).damaged}


def test_a_single_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, ARRAYS["big"])
    assert transload.inspect(path).ok
    assert transload.load(path).tolist() == [0, 1, 2, 3, 4]
    assert convert(path, tmp_path / "b.safetensors").renamed == (("", "tensor"),)
    assert transload.inspect(path.read_bytes()[:60]).integrity == "not-a-checkpoint"
    path.write_bytes(path.read_bytes()[:-1])
    assert transload.inspect(path).integrity == "damaged"
    with pytest.raises(LoadError, match="not as long as its header says"):
        transload.load(path)


def test_python_objects_are_not_looked_into(tmp_path: Path) -> None:
    objects = np.array([None], object)
    np.save(tmp_path / "a.npy", objects)
    np.savez(tmp_path / "b.npz", w=np.ones(1), o=objects, f=np.zeros(1, [("x", object)]))
    for name in ("a.npy", "b.npz"):
        assert transload.inspect(tmp_path / name).safety == "needs-trust"
    data = (tmp_path / "a.npy").read_bytes()
    for spelling in (b'"|O"', b"'\\x4f'", b"'i4,O'", b"'object'"):  # which numpy takes for the same
        with ZipFile(tmp_path / "c.npz", "w") as archive:
            odd = data.replace(b"'|O'", spelling)
            archive.writestr("a.npy", odd[:8] + (len(odd) - len(data) + data[8]).to_bytes(2, "little") + odd[10:])
        assert transload.inspect(tmp_path / "c.npz").safety == "needs-trust", spelling
    np.savez(tmp_path / "d.npz", text=np.array(["a"]), fields=np.zeros(2, [("O", "<i4"), ("b", "S3", (2, 2))]))
    assert transload.inspect(tmp_path / "d.npz").safety == "data-only"
    with pytest.raises(LoadError, match="arrays of Python objects"):
        transload.load(tmp_path / "a.npy")
    with pytest.warns(FileWarning, match=r"left out: o: .*; f: "):
        assert transload.load(tmp_path / "b.npz").keys() == {"w"}


def test_names_come_back(tmp_path: Path) -> None:
    value = {name: torch.ones(2) for name in ("a:b", "../a", "/b", "c.npy", "%41", "50%")}
    torch.save(value, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.npz")
    convert(tmp_path / "b.npz", tmp_path / "c.pt")
    assert list(torch.load(tmp_path / "c.pt", weights_only=True)) == list(value)


def test_what_is_not_an_array_of_numbers_is_lost(tmp_path: Path) -> None:
    odd = {"text": np.array(["a"]), "objects": np.array([None]), "raw": np.zeros(2, "V2")}
    np.savez(tmp_path / "a.npz", w=np.ones(2), fields=np.zeros(1, [("a", "i4")]), **odd)
    with ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
        archive.writestr("bad.npy", "hello")
    made = convert(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert not made.complete
    assert {each.name for each in made.left} == {*odd, "fields", "notes.txt", "bad"}
    assert made.tensors == 1
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "c.pt")]) == 1


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(1000.0))
    data = bytearray(stream.getvalue())
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        convert(bytes(data[:-30]), tmp_path / "b.pt")
    data[3000] ^= 1
    with pytest.raises(ConvertError, match="damaged"):
        convert(bytes(data), tmp_path / "b.pt")
    assert list(tmp_path.iterdir()) == []


def test_an_array_that_claims_more_than_there_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    with ZipFile(tmp_path / "a.npz") as archive:
        text = archive.read("w.npy")
    with ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("w.npy", text.replace(b"(2,), }  ", b"(200,), }"))
        archive.writestr("v.npy", text)
    made = convert(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert [(each.name, each.lost) for each in made.left] == [("w", True)]


def test_the_parts_of_an_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"model/w": np.ones(2), "other/w": np.ones(2)})
    assert [part.key for part in parts(tmp_path / "a.npz")] == ["", "model", "other"]
    made = convert(tmp_path / "a.npz", tmp_path / "b.safetensors", key="other")
    assert (made.tensors, made.others) == (1, 1)
    np.savez(tmp_path / "c.npz", **{"model/v": np.ones(2), "model/w": np.ones(2)})
    assert [part.key for part in parts(tmp_path / "c.npz")] == ["", "model"]
