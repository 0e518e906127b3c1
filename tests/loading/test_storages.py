"""Bytes into storages: read, inflated, mapped, turned round, verified; and told of."""

from __future__ import annotations

import io
import os
import struct
import sys
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from tests import forge
from tests.forge import Entry, archive, entries, legacy, remade
from tests.loading.equal import same
from tests.loading.zoo import saved

from transload.errors import BrokenFileError, DoesNotFitError
from transload.io.pool import Progress, progress_counter
from transload.loading import load

FLOATS = {"w0": torch.arange(4.0), "w1": torch.arange(4.0, 8.0)}


def values(made: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in made.items()}


EXPECTED = values(FLOATS)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- checksums


def flipped(data: bytes, part: bytes) -> bytes:
    """The file with one bit of some bytes in it turned over."""
    at = data.index(part)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_a_flipped_bit_is_found_when_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    sound = forge.checkpoint()
    path = written(tmp_path / "flipped.pt", flipped(sound, struct.pack("<4f", 4, 5, 6, 7)))
    assert values(load(path, **options)) != EXPECTED  # as torch.load, which never looks
    with pytest.raises(BrokenFileError, match="w1") as raised:
        load(path, verify=True, **options)
    assert "checksum" in raised.value.what
    assert values(load(written(tmp_path / "sound.pt", sound), verify=True, **options)) == EXPECTED


def test_a_flipped_bit_of_the_index_is_found_always() -> None:
    with pytest.raises(BrokenFileError):
        load(flipped(forge.checkpoint(), b"\x00\x00\x00w1"))


def test_a_file_without_checksums_can_be_verified() -> None:
    """There is nothing to compare: that is no damage."""
    data = archive(
        [Entry(entry.name, entry.data, crc32=0, descriptor=b"PK\x07\x08" + bytes(12)) for entry in entries()]
    )
    assert values(load(data, verify=True)) == EXPECTED


def test_storages_that_were_never_written_are_told_of() -> None:
    unwritten = remade(entries(), "data/1", crc32=0, descriptor=struct.pack("<4s3L", b"PK\x07\x08", 0, 16, 16))
    with pytest.warns(UserWarning, match="never written"):
        load(archive(unwritten))


# -- compression


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(out, "w", ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return out.getvalue()


@pytest.mark.parametrize("mmap", [False, True])
def test_deflated_storages_are_inflated_and_never_mapped(tmp_path: Path, *, mmap: bool) -> None:
    """Large enough to come in several parts, and of bytes that pack well and badly."""
    tensors = {"flat": torch.zeros(3_000_000), "noise": torch.randn(1_200_000), "none": torch.empty(0)}
    data = deflated(saved(tensors))
    path = written(tmp_path / "packed.pt", data)
    same(torch.load(io.BytesIO(saved(tensors))), load(path, mmap=mmap, verify=True))


def test_damaged_deflated_data_is_damage() -> None:
    sound = entries()
    packed = remade(sound, "data/1", method=8)
    assert values(load(archive(packed))) == EXPECTED
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(remade(packed, "data/1", raw=b"\xff" * 12)))
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(remade(packed, "data/1", raw=b"\x03\x00")))  # an end and nothing before it
    with pytest.raises(BrokenFileError):
        load(archive(remade(packed, "data/1", method=12)))


# -- byte order


def big(data: bytes) -> bytes:
    """The file as a big-endian machine would have written it: storages of floats turned round."""
    out = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(out, "w", ZIP_STORED) as new:
        for info in old.infolist():
            held = old.read(info)
            if "/data/" in info.filename:
                held = b"".join(held[i : i + 4][::-1] for i in range(0, len(held), 4))
            new.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else held)
    return out.getvalue()


@pytest.mark.skipif(sys.byteorder == "big", reason="needs a little-endian host")
@pytest.mark.parametrize("mmap", [False, True])
def test_files_of_the_other_byte_order(tmp_path: Path, *, mmap: bool) -> None:
    data = saved({"a": torch.randn(5), "b": torch.randn(3, dtype=torch.complex64)})
    path = written(tmp_path / "big.pt", big(data))
    same(torch.load(path), load(path, mmap=mmap))
    same(torch.load(io.BytesIO(data)), load(path))


@pytest.mark.skipif(sys.byteorder == "big" or not hasattr(torch, "uint32"), reason="needs a little-endian host")
def test_newer_dtypes_of_the_other_byte_order() -> None:
    """Their storages have no dtype: torch leaves them as they are, which is wrong."""
    data = saved({"a": torch.arange(4).to(torch.uint32)})
    assert load(big(data))["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(sys.byteorder == "big", reason="needs a little-endian host")
def test_the_default_order_of_torch_is_honoured() -> None:
    data = saved({"a": torch.arange(4.0)})
    silent = big(data).replace(b"archive/byteorder", b"archive/nothing_x")
    assert load(silent)["a"].tolist() != [0, 1, 2, 3]
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
    try:
        assert load(silent)["a"].tolist() == [0, 1, 2, 3]
    finally:
        torch.serialization.set_default_load_endianness(None)


# -- maps


def test_a_mapped_file_is_the_same_and_private(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(3)}, path)
    before = path.read_bytes()
    made = load(path, mmap=True)
    same(torch.load(str(path), mmap=True), made)
    made["a"].zero_()
    assert path.read_bytes() == before


def test_streams_are_mapped_where_their_bytes_are_aligned_and_read_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({str(i): torch.arange(i + 1.0) for i in range(8)}, path, _use_new_zipfile_serialization=False)
    same(torch.load(path), load(path, mmap=True))


def test_the_program_may_map_by_default(tmp_path: Path) -> None:
    serialization = pytest.importorskip("torch.utils.serialization")
    path = tmp_path / "x.pt"
    torch.save(torch.arange(1000.0), path)
    with serialization.config.patch("load.mmap", True):
        made = load(path)
        assert load(path.read_bytes()).tolist() == made.tolist()
    assert not made.untyped_storage().resizable()  # memory of its own could grow


# -- bounds


def test_a_file_that_is_cut_while_it_is_loaded(tmp_path: Path) -> None:
    """The file is cut after it was opened: an error, never memory that nobody wrote."""
    path = written(tmp_path / "x.pt", legacy())

    size = path.stat().st_size

    class Wish(dict[str, str]):
        def get(self, *given: Any) -> Any:
            os.truncate(path, size - 8)
            return super().get(*given)

    with pytest.raises(BrokenFileError, match="w1"):
        load(path, Wish({"cuda:0": "cpu"}))


def test_what_does_not_fit_is_said_before_a_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.loading.placement._LITTLE", 0)
    monkeypatch.setattr("transload.diagnose.host.memory", lambda _: (64, 16))
    with pytest.raises(DoesNotFitError) as raised:
        load(forge.checkpoint())
    assert isinstance(raised.value, MemoryError)
    assert "mmap" in raised.value.fix


# -- progress


class Told(list[tuple[int, int]]):
    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))


def test_progress_is_told_to_a_function(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.zeros(1000), torch.zeros(10), torch.zeros(20).to(torch.uint8)], path)
    for options in ({}, {"mmap": True}):
        told = Told()
        load(path, progress=told, **options)
        assert told[-1] == (4060, 4060)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_on_a_terminal_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(forge.checkpoint(), progress=True)
    assert capsys.readouterr() == ("", "")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(forge.checkpoint(), progress=True)
    assert terminal.getvalue().endswith("kB/s\x1b[K\n")


def test_progress_is_not_written_too_often() -> None:
    terminal = _Terminal()
    show = Progress(terminal)
    for done in range(1000):
        show(done, 1000)
    assert terminal.getvalue().count("\r") < 100
    assert progress_counter(progress=False, total=10) is None


# -- sharing


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_what_shares_memory_goes_on_sharing_it(form: str) -> None:
    base = torch.arange(12.0)
    made = load(saved({"base": base, "view": base[3:6], "turned": base.view(3, 4).t()}, form))
    made["base"][3] = -1.0
    assert made["view"][0] == -1
    assert made["turned"][3, 0] == -1
    assert len({tensor.untyped_storage().data_ptr() for tensor in made.values()}) == 1


def test_empty_storages_are_not_shared() -> None:
    """Growing one must not give memory to the others."""
    made = load(saved([torch.empty(0), torch.empty(0)]))
    made[0].resize_(4)
    assert made[1].untyped_storage().nbytes() == 0


def test_memory_that_is_not_in_the_file_is_not_made_up() -> None:
    short = remade(entries(), "data/1", data=b"\0" * 8)
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(short))
    missing = [entry for entry in entries() if not entry.name.endswith(b"data/1")]
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(missing))
