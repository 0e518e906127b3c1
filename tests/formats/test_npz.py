"""NumPy files (.npz and .npy), written by ``convert`` and by NumPy."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest

import transload
from transload.cli.main import main
from transload.converting import convert, parts
from transload.errors import BrokenFileError, ConvertError, FileWarning, LoadError, NotACheckpointError, RescueError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

ARRAYS: dict[str, Any] = {
    "fc.weight": np.arange(6, dtype="<f4").reshape(2, 3),
    "deep/fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(5, dtype=">i2"),
    "mask": np.array([True, False]),
    "one": np.array(7),
    "none": np.empty((0, 2), "f2"),
    "complex": np.arange(6, dtype="f4").view("c8"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_convert_files_saved_by_numpy(tmp_path: Path, save: Any, name: str) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    conversion = convert(tmp_path / "a.npz", tmp_path / name)
    assert (conversion.format, conversion.tensors, conversion.left, conversion.notes) == ("npz", len(ARRAYS), (), ())
    convert(tmp_path / name, tmp_path / "c.npz")
    with np.load(tmp_path / "c.npz") as arrays:
        assert set(arrays) == set(ARRAYS)
        for key, array in ARRAYS.items():
            assert arrays[key].dtype == array.dtype.newbyteorder("<")
            assert np.array_equal(arrays[key], array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_every_function_accepts_an_npz_archive(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "a.npz"
    save(path, **ARRAYS)
    checkpoint = transload.inspect(path, verify=True)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity) == ("npz", "data-only", "whole")
    assert {tensor.name: tensor.shape for tensor in checkpoint.tensors} == {
        key: array.shape for key, array in ARRAYS.items()
    }
    assert transload.verify(path).ok
    assert transload.check(path).ok
    for options in ({}, {"verify": True}, {"mmap": True}):
        state = transload.load(path, **options)
        assert {key: tensor.tolist() for key, tensor in state.items()} == {
            key: array.tolist() for key, array in ARRAYS.items()
        }
    with transload.open(path) as handle:
        assert handle.slice("fc.weight")[1].tolist() == [3, 4, 5]


def test_flipped_bit_is_found_with_verify() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(9), b=np.arange(1000.0))
    data = bytearray(stream.getvalue())
    data[3000] ^= 1
    assert transload.inspect(bytes(data), verify=True).integrity == "damaged"
    with pytest.raises(BrokenFileError, match="bytes of b have changed"):
        transload.load(bytes(data), verify=True)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_verify_names_the_damaged_array(save: Any) -> None:
    stream = io.BytesIO()
    save(stream, a=np.zeros(9), b=np.random.default_rng(5).random(1000), c=np.ones(3))
    assert transload.verify(stream.getvalue()).damaged == ()
    data = bytearray(stream.getvalue())
    data[3000] ^= 1
    assert [(tensor.name, tensor.kind) for tensor in transload.verify(bytes(data)).damaged] == [("b", "checksum")]


def test_truncated_archive_reports_the_remaining_bytes() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(9), b=np.arange(500.0))
    checkpoint = transload.inspect(stream.getvalue()[:2000])
    assert checkpoint.integrity == "damaged"
    first, second = checkpoint.storages
    assert first.stored == first.nbytes == 72
    assert second.offset is not None
    assert (second.stored, second.nbytes) == (2000 - second.offset, 4000)
    assert [problem.where for problem in checkpoint.problems if problem.code == "storage-cut"] == ["b"]
    assert "b" in {tensor.name for tensor in transload.verify(stream.getvalue()[:2000]).damaged}


class Unseekable(io.RawIOBase):
    """A pipe: ``zipfile`` then writes sizes and checksums after each record."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED], ids=["stored", "compressed"])
@pytest.mark.parametrize("seekable", [True, False], ids=["file", "pipe"])
def test_truncated_archive_is_damaged_unless_its_directory_has_begun(method: int, seekable: bool) -> None:
    """Without the directory, nothing shows how many arrays there were."""
    stream: Any = io.BytesIO() if seekable else Unseekable()
    with ZipFile(stream, "w", method) as archive:
        for name in "ab":
            member = io.BytesIO()
            np.save(member, np.random.default_rng(5).integers(0, 9, 1000))
            archive.writestr(f"{name}.npy", member.getvalue())
    data = bytes(stream.getvalue() if seekable else stream.data)
    second, directory = data.index(b"PK\3\4", 4), data.index(b"PK\1\2")
    for size in (second, second + 500, directory - 30, directory):
        assert transload.inspect(data[:size]).integrity == "damaged", size
    for size in (directory + 4, directory + 60, len(data) - 1):
        checkpoint = transload.inspect(data[:size])
        assert (checkpoint.integrity, len(checkpoint.tensors)) == ("repairable", 2)


def test_rescue_names_the_format_of_a_truncated_archive(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.random.default_rng(5).integers(0, 9, 1000))
    with pytest.raises(RescueError, match=r"does not accept files of this format \(numpy archive\)"):
        transload.rescue(stream.getvalue()[:500], tmp_path / "b.npz")


def test_npy_file(tmp_path: Path) -> None:
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


class Hostile:
    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return os.getcwd, ()


def test_pickles_in_object_arrays_are_judged(tmp_path: Path) -> None:
    for value, safety in ((Hostile(), "dangerous"), (Counter("a"), "needs-trust"), (Path("x"), "needs-trust")):
        objects = np.array([value], object)
        np.save(tmp_path / "a.npy", objects)
        np.savez(tmp_path / "b.npz", w=np.ones(1), o=objects)
        np.savez_compressed(tmp_path / "c.npz", w=np.ones(1), o=objects)
        (tmp_path / "d.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
        for name in ("a.npy", "b.npz", "c.npz", "d.npy"):
            checkpoint = transload.inspect(tmp_path / name)
            assert checkpoint.safety == safety, (name, value)
            assert any(use.name in ("getcwd", "Counter", "PosixPath", "WindowsPath") for use in checkpoint.globals)
            trust = [line for finding in checkpoint.findings for line in finding.fix if "numpy.load" in line]
            assert bool(trust) == (safety == "needs-trust")
    limited = np.array([bytes(40 << 20)], object)
    np.savez_compressed(tmp_path / "long.npz", o=limited)  # a megabyte of it takes a kilobyte
    assert transload.inspect(tmp_path / "long.npz").safety == "unknown"


def test_object_arrays_need_trust_and_are_not_loaded(tmp_path: Path) -> None:
    objects = np.array([None], object)
    np.save(tmp_path / "a.npy", objects)
    np.savez(tmp_path / "b.npz", w=np.ones(1), o=objects, f=np.zeros(1, [("x", object)]))
    for name in ("a.npy", "b.npz"):
        assert transload.inspect(tmp_path / name).safety == "needs-trust"
    data = (tmp_path / "a.npy").read_bytes()
    for spelling in (b'"|O"', b"'\\x4f'", b"'i4,O'", b"'object'"):  # numpy treats them all alike
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


def test_arrays_that_are_not_numbers_are_named_in_words() -> None:
    stream = io.BytesIO()
    dates, records = np.arange(2).astype("M8[D]"), np.zeros(1, [("a", "f4"), ("b", "i4")])
    np.savez(stream, a=np.array(["x", "y"]), b=np.array([b"x"]), c=dates, d=dates - dates, e=records)
    (finding,) = transload.inspect(stream.getvalue()).findings
    kinds = ["strings", "byte strings", "dates", "durations", "records"]
    assert list(finding.evidence) == [f"{name}: an array of {kind}" for name, kind in zip("abcde", kinds, strict=True)]


def test_tensor_names_survive_a_round_trip(tmp_path: Path) -> None:
    value = {name: torch.ones(2) for name in ("a:b", "../a", "/b", "c.npy", "%41", "50%")}
    torch.save(value, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.npz")
    convert(tmp_path / "b.npz", tmp_path / "c.pt")
    assert list(torch.load(tmp_path / "c.pt", weights_only=True)) == list(value)


def test_convert_reports_what_is_not_a_numeric_array(tmp_path: Path) -> None:
    odd = {"text": np.array(["a"]), "objects": np.array([None]), "raw": np.zeros(2, "V2")}
    np.savez(tmp_path / "a.npz", w=np.ones(2), fields=np.zeros(1, [("a", "i4")]), **odd)
    with ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
        archive.writestr("bad.npy", "hello")
    conversion = convert(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert not conversion.complete
    assert {leftover.name for leftover in conversion.left} == {*odd, "fields", "notes.txt", "bad"}
    assert conversion.tensors == 1
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "c.pt")]) == 1


def test_convert_refuses_a_damaged_archive(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(1000.0))
    data = bytearray(stream.getvalue())
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        convert(bytes(data[:-30]), tmp_path / "b.pt")
    data[3000] ^= 1
    with pytest.raises(ConvertError, match="damaged"):
        convert(bytes(data), tmp_path / "b.pt")
    assert list(tmp_path.iterdir()) == []


def test_convert_reports_an_array_longer_than_its_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    with ZipFile(tmp_path / "a.npz") as archive:
        text = archive.read("w.npy")
    with ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("w.npy", text.replace(b"(2,), }  ", b"(200,), }"))
        archive.writestr("v.npy", text)
    conversion = convert(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert [(leftover.name, leftover.lost) for leftover in conversion.left] == [("w", True)]


def test_parts_are_found_by_name_prefix(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"model/w": np.ones(2), "other/w": np.ones(2)})
    assert [part.key for part in parts(tmp_path / "a.npz")] == ["", "model", "other"]
    conversion = convert(tmp_path / "a.npz", tmp_path / "b.safetensors", key="other")
    assert (conversion.tensors, conversion.others) == (1, 1)
    np.savez(tmp_path / "c.npz", **{"model/v": np.ones(2), "model/w": np.ones(2)})
    assert [part.key for part in parts(tmp_path / "c.npz")] == ["", "model"]
