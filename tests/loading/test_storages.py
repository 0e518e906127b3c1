"""Filling storages: reading, inflating, mapping, byte order, checksums and progress."""

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
from tests.forge import Entry, archive, entries, legacy, with_changes
from tests.loading.equal import assert_same
from tests.loading.zoo import saved

from transload.errors import BrokenFileError, DoesNotFitError
from transload.io.pool import ProgressLine, progress_counter
from transload.io.sources import BytesSource
from transload.loading import load, storages

FLOATS = {"w0": torch.arange(4.0), "w1": torch.arange(4.0, 8.0)}


def values(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


EXPECTED = values(FLOATS)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- checksums


def flipped(data: bytes, part: bytes) -> bytes:
    """The file with one bit of ``part`` flipped."""
    position = data.index(part)
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_flipped_bit_is_found_with_verify(tmp_path: Path, options: dict[str, Any]) -> None:
    intact = forge.checkpoint()
    path = written(tmp_path / "flipped.pt", flipped(intact, struct.pack("<4f", 4, 5, 6, 7)))
    assert values(load(path, **options)) != EXPECTED  # as with torch.load, which never checks
    with pytest.raises(BrokenFileError, match="w1") as raised:
        load(path, verify=True, **options)
    assert "checksum" in raised.value.what
    assert values(load(written(tmp_path / "sound.pt", intact), verify=True, **options)) == EXPECTED


def test_flipped_bit_in_the_pickle_is_found_without_verify() -> None:
    with pytest.raises(BrokenFileError):
        load(flipped(forge.checkpoint(), b"\x00\x00\x00w1"))


def test_file_without_checksums_passes_verify() -> None:
    """There is nothing to compare, which is not damage."""
    data = archive(
        [Entry(entry.name, entry.data, crc32=0, descriptor=b"PK\x07\x08" + bytes(12)) for entry in entries()]
    )
    assert values(load(data, verify=True)) == EXPECTED


def test_unwritten_storage_is_a_warning() -> None:
    unwritten = with_changes(entries(), "data/1", crc32=0, descriptor=struct.pack("<4s3L", b"PK\x07\x08", 0, 16, 16))
    with pytest.warns(UserWarning, match="never written"):
        load(archive(unwritten))


# -- compression


def deflated(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(buffer, "w", ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return buffer.getvalue()


@pytest.mark.parametrize("mmap", [False, True])
def test_deflated_storages_load_with_and_without_mmap(tmp_path: Path, *, mmap: bool) -> None:
    """Large enough to be read in several parts, with bytes that compress well and badly."""
    tensors = {"flat": torch.zeros(3_000_000), "noise": torch.randn(1_200_000), "none": torch.empty(0)}
    data = deflated(saved(tensors))
    path = written(tmp_path / "packed.pt", data)
    assert_same(torch.load(io.BytesIO(saved(tensors))), load(path, mmap=mmap, verify=True))


def test_damaged_deflated_data_is_a_broken_file_error() -> None:
    intact = entries()
    packed = with_changes(intact, "data/1", method=8)
    assert values(load(archive(packed))) == EXPECTED
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(with_changes(packed, "data/1", raw=b"\xff" * 12)))
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(with_changes(packed, "data/1", raw=b"\x03\x00")))  # an empty deflate stream
    with pytest.raises(BrokenFileError):
        load(archive(with_changes(packed, "data/1", method=12)))


# -- byte order


def big_endian(data: bytes) -> bytes:
    """The file as a big-endian machine would have written it: every 4 bytes of a storage swapped."""
    buffer = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(buffer, "w", ZIP_STORED) as new:
        for info in old.infolist():
            raw = old.read(info)
            if "/data/" in info.filename:
                raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            new.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else raw)
    return buffer.getvalue()


@pytest.mark.skipif(sys.byteorder == "big", reason="needs a little-endian host")
@pytest.mark.parametrize("mmap", [False, True])
def test_big_endian_file_loads_as_with_torch(tmp_path: Path, *, mmap: bool) -> None:
    data = saved({"a": torch.randn(5), "b": torch.randn(3, dtype=torch.complex64)})
    path = written(tmp_path / "big.pt", big_endian(data))
    assert_same(torch.load(path), load(path, mmap=mmap))
    assert_same(torch.load(io.BytesIO(data)), load(path))


@pytest.mark.skipif(sys.byteorder == "big" or not hasattr(torch, "uint32"), reason="needs a little-endian host")
def test_newer_dtypes_of_a_big_endian_file_are_swapped() -> None:
    """Their storages have no dtype: torch does not swap them, which is wrong."""
    data = saved({"a": torch.arange(4).to(torch.uint32)})
    assert load(big_endian(data))["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(sys.byteorder == "big", reason="needs a little-endian host")
def test_default_load_endianness_of_torch_is_honoured() -> None:
    data = saved({"a": torch.arange(4.0)})
    unmarked = big_endian(data).replace(b"archive/byteorder", b"archive/nothing_x")
    assert load(unmarked)["a"].tolist() != [0, 1, 2, 3]
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
    try:
        assert load(unmarked)["a"].tolist() == [0, 1, 2, 3]
    finally:
        torch.serialization.set_default_load_endianness(None)


# -- maps


def test_mapped_file_loads_as_with_torch_and_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(3)}, path)
    before = path.read_bytes()
    loaded = load(path, mmap=True)
    assert_same(torch.load(str(path), mmap=True), loaded)
    loaded["a"].zero_()
    assert path.read_bytes() == before


def test_stream_with_aligned_and_unaligned_storages_loads_with_mmap(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({str(i): torch.arange(i + 1.0) for i in range(8)}, path, _use_new_zipfile_serialization=False)
    assert_same(torch.load(path), load(path, mmap=True))


def test_mmap_default_of_torch_is_honoured(tmp_path: Path) -> None:
    serialization = pytest.importorskip("torch.utils.serialization")
    path = tmp_path / "x.pt"
    torch.save(torch.arange(1000.0), path)
    with serialization.config.patch("load.mmap", True):
        loaded = load(path)
        assert load(path.read_bytes()).tolist() == loaded.tolist()
    assert not loaded.untyped_storage().resizable()  # memory that is not mapped could be resized


# -- bounds


def test_file_truncated_during_load_is_a_broken_file_error(tmp_path: Path) -> None:
    """The file is truncated after it was opened: that is an error, never uninitialized memory."""
    path = written(tmp_path / "x.pt", legacy())

    size = path.stat().st_size

    class TruncatingMap(dict[str, str]):
        def get(self, *args: Any) -> Any:
            os.truncate(path, size - 8)
            return super().get(*args)

    with pytest.raises(BrokenFileError, match="w1"):
        load(path, TruncatingMap({"cuda:0": "cpu"}))


def test_checkpoint_larger_than_free_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.loading.placement._LITTLE", 0)
    monkeypatch.setattr("transload.io.limits.memory", lambda: (64, 16))
    with pytest.raises(DoesNotFitError) as raised:
        load(forge.checkpoint())
    assert isinstance(raised.value, MemoryError)
    assert "mmap" in raised.value.fix


# -- progress


class Reported(list[tuple[int, int]]):
    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))


def test_progress_is_reported_to_a_function(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.zeros(1000), torch.zeros(10), torch.zeros(20).to(torch.uint8)], path)
    for options in ({}, {"mmap": True}):
        reported = Reported()
        load(path, progress=reported, **options)
        assert reported[-1] == (4060, 4060)
        assert [done for done, _ in reported] == sorted(done for done, _ in reported)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(forge.checkpoint(), progress=True)
    assert capsys.readouterr() == ("", "")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(forge.checkpoint(), progress=True)
    assert terminal.getvalue().endswith("kB/s\x1b[K\n")


def test_progress_line_is_not_updated_too_often() -> None:
    terminal = _Terminal()
    show = ProgressLine(terminal)
    for done in range(1000):
        show(done, 1000)
    assert terminal.getvalue().count("\r") < 100
    for _ in range(2):  # the last bytes may be reported in two parts, one of which is empty
        show(1000, 1000)
    assert terminal.getvalue().count("\n") == 1
    assert progress_counter(progress=False, total=10) is None


# -- sharing


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_views_share_memory_after_loading(form: str) -> None:
    base = torch.arange(12.0)
    loaded = load(saved({"base": base, "view": base[3:6], "turned": base.view(3, 4).t()}, form))
    loaded["base"][3] = -1.0
    assert loaded["view"][0] == -1
    assert loaded["turned"][3, 0] == -1
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1


def test_empty_storages_are_not_shared() -> None:
    """Resizing one must not resize the others."""
    loaded = load(saved([torch.empty(0), torch.empty(0)]))
    loaded[0].resize_(4)
    assert loaded[1].untyped_storage().nbytes() == 0


def test_short_or_missing_storage_is_a_broken_file_error() -> None:
    short = with_changes(entries(), "data/1", data=b"\0" * 8)
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(short))
    missing = [entry for entry in entries() if not entry.name.endswith(b"data/1")]
    with pytest.raises(BrokenFileError, match="w1"):
        load(archive(missing))


# -- memory of CUDA devices, which torch takes from the driver for many storages together


def test_groups_are_as_large_as_their_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow the file, a device has its own, and what torch has enough of, unused, needs none."""
    unused = {"cuda:0": 0, "cuda:1": 0, "cuda:2": 300 << 20}
    monkeypatch.setattr(storages, "_unused", unused.__getitem__)
    mib, a, b = 1 << 20, BytesSource(b""), BytesSource(b"")
    ranges = [
        (a, 900 * mib, 100 * mib, "cuda:0"),  # after the other storages of its file
        (a, 0, 100 * mib + 1, "cuda:0"),
        (a, 200 * mib, 500 * mib, "cpu"),
        (a, 100 * mib, 100 * mib, "cuda:0"),
        (b, 0, 100 * mib, "cuda:0"),
        (b, 500 * mib, mib, "cuda:0"),  # a small one
        (a, 300 * mib, 300 * mib, "cuda:1"),
        (a, 600 * mib, 300 * mib, "cuda:2"),
    ]
    assert storages._groups(ranges) == {1: 200 * mib + 512, 0: 200 * mib, 6: 300 * mib}
    assert storages._groups([(a, 0, 5 * mib, "cpu")]) == {}
