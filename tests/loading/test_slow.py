"""Loads from disks whose first bytes take long to come: a spinning one, and file systems elsewhere."""

from __future__ import annotations

import os
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import slow_disk
from tests.each import for_each
from tests.loading.equal import assert_same

import transload
from transload.errors import LoadError
from transload.formats import read_source
from transload.io import cache, sources
from transload.io.sources import FileSource
from transload.loading import load
from transload.opening import engine, prefetch

DATA = Path(__file__).parents[1] / "data"
FILES = sorted(path for path in DATA.rglob("*") if path.suffix in (".pt", ".pth", ".ckpt", ".bin"))
STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.float64), "n": torch.arange(3)}

# -- a load reads no headers before the bytes, and its result is the same


def on_slow_disks(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A file is loaded with the same result from any disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(path)
        with monkeypatch.context() as patch:
            patch.setattr(FileSource, "pace", "seeking")
            found = outcome(path)
    if isinstance(expected, LoadError):
        assert (type(found), str(found)) == (type(expected), str(expected))
    else:
        assert_same(found, expected)


def outcome(path: Path) -> Any:
    try:
        return load(path)
    except LoadError as error:
        return error


def test_every_file_is_loaded_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for_each(FILES, lambda path: on_slow_disks(monkeypatch, path))


def test_every_changed_byte_of_every_header_has_the_same_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    sound = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        headers = [info.header_offset for info in archive.infolist()]
    for header in headers:
        lengths = struct.unpack_from("<HH", sound, header + 26)
        for position in range(header, header + 30 + sum(lengths)):
            path.write_bytes(sound[:position] + bytes([sound[position] ^ 4]) + sound[position + 1 :])
            on_slow_disks(monkeypatch, path)


def with_gaps(value: Any) -> bytes:
    """An archive as torch reads it, although no program writes such: with bytes between its records."""
    out, plain = BytesIO(), BytesIO()
    torch.save(value, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(out, "w") as gaps:
        for info in archive.infolist():
            gaps.writestr(zipfile.ZipInfo(info.filename), archive.read(info))
            out.write(bytes(37))
            gaps.start_dir = out.tell()
    return out.getvalue()


def test_records_that_are_not_where_the_directory_suggests_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(with_gaps(STATE))
    assert_same(load(path), torch.load(path))
    on_slow_disks(monkeypatch, path)


def test_headers_are_read_after_the_bytes_by_a_load_and_before_by_all_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    torch.save([torch.ones(100_000), torch.zeros(100_000), torch.ones(100_000)], path)
    monkeypatch.setattr(FileSource, "pace", "waiting")
    for tree, is_read in ((False, False), (True, True)):
        reads: list[tuple[int, int]] = []
        with monkeypatch.context() as patch:
            patch.setattr(FileSource, "_read", recording(reads))
            source = FileSource(path)
            second = read_source(source, tree=tree).storages[1]
            source.close()
        assert second.offset is not None
        assert any(at < second.offset < at + count + 64 for at, count in reads) == is_read


def recording(reads: list[tuple[int, int]]) -> Callable[[FileSource, int, int], bytes]:
    def read(source: FileSource, offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return os.pread(source.descriptor, count, offset)

    return read


# -- with real waits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MiB in 96 tensors, so that reading each header would be a seek."""
    folder = tmp_path_factory.mktemp("slow")
    torch.save({f"layer.{index}.weight": torch.randn(256, 256) for index in range(96)}, folder / "a.pt")
    transload.convert(folder / "a.pt", folder / "a.safetensors")
    return folder


real_choose = engine.choose  # before a test replaces it
# Slower than real ones, so that other work on this machine does not make one look like the other.
SPINNING = slow_disk.SPINNING._replace(seek=0.04)
NETWORK = slow_disk.NETWORK._replace(latency=0.05)
can_mount = pytest.mark.skipif(not slow_disk.CAN_MOUNT, reason="needs Linux, /dev/fuse and root")


@contextmanager
def mounted(folder: Path, kind: slow_disk.Kind) -> Iterator[tuple[Path, Callable[[], dict[str, int]]]]:
    try:
        with slow_disk.mounted(folder, kind) as both:
            yield both
    except slow_disk.CannotMountError:
        pytest.skip("may not mount file systems")


@can_mount
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize(("kind", "waits"), [(SPINNING, False), (NETWORK, True)], ids=["spinning", "network"])
def test_load_asks_a_network_for_many_bytes_at_once_and_a_disk_seldom_seeks(
    kind: slow_disk.Kind, waits: bool, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[engine.Choice] = []

    def choose(*arguments: Any) -> engine.Choice:
        choices.append(real_choose(*arguments))
        return choices[-1]

    monkeypatch.setattr(engine, "choose", choose)
    with mounted(folder, kind) as (mount, end):
        loaded = transload.load(mount / name)
        counted = end()
    assert_same(loaded, transload.load(folder / name))
    if waits:  # else it depends on how busy this machine is: asking a disk does no harm
        assert choices[0].ahead
        assert counted["most at once"] > 32
    assert counted["seeks"] < 20
    assert counted["reads"] < (24 << 20) / (128 << 10) + 30  # nothing that was asked for was dropped, and read again


@can_mount
def test_file_that_streams_is_read_once_and_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops what it holds of such a file when it is opened again, so that a prefetch would be in vain."""
    for module in (cache, prefetch):
        monkeypatch.setattr(module, "file_system", lambda _: "fuse.rclone")
    with mounted(folder, SPINNING._replace(forgets=1)) as (mount, end):
        assert transload.prefetch(mount / "a.pt").wait(60)
        loaded = transload.load(mount / "a.pt")
        counted = end()
    assert_same(loaded, transload.load(folder / "a.pt"))
    assert counted["seeks"] < 5
    assert counted["reads"] < (24 << 20) / (128 << 10) + 10


@can_mount
def test_inspect_asks_for_all_headers_at_once(folder: Path) -> None:
    with mounted(folder, NETWORK) as (mount, end):
        found = transload.inspect(mount / "a.pt")
        counted = end()
    assert found.to_dict()["tensors"] == transload.inspect(folder / "a.pt").to_dict()["tensors"]
    assert counted["most at once"] > 8


@can_mount
def test_prefetch_reads_a_network_file_with_many_threads(folder: Path) -> None:
    with mounted(folder, NETWORK) as (mount, end):
        assert transload.prefetch(mount / "a.pt").wait(60)
        loaded = transload.load(mount / "a.pt")
        counted = end()
    assert counted["reads"] < 1.5 * (24 << 20) / (128 << 10)  # all of it was cached when it was loaded
    assert counted["most at once"] >= 3  # pieces of 8 MiB
    assert_same(loaded, torch.load(folder / "a.pt"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says")
def test_name_of_the_file_system() -> None:
    descriptor = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert cache.file_system(descriptor) == "proc"
    finally:
        os.close(descriptor)


def test_small_files_are_not_asked_whether_they_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    monkeypatch.setattr("transload.io.cache.pace", lambda *_: "waiting")
    assert FileSource(path).pace == "quick"
    monkeypatch.setattr(sources, "_LARGE", 0)
    assert FileSource(path).pace == "waiting"
