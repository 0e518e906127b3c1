"""What a command has written survives a loss of power: bytes are flushed before they get their name, names afterwards.

``retagging/test_crashes.py`` derives from such calls in which states a loss of power can leave a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.each import each

import transload
from transload.io.atomic import AtomicFile

STATE = Path(__file__).parent / "data" / "h200" / "state_dict_cuda0.pt"
DiskCalls = list[tuple[str, int]]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows cannot flush a directory")


def assert_durable(path: Path, calls: DiskCalls) -> None:
    """The file was flushed, then renamed, and its folder flushed after that."""
    file, folder = path.stat().st_ino, path.parent.stat().st_ino
    flushed, renamed = calls.index(("fsync", file)), calls.index(("rename", file))
    assert flushed < renamed
    assert ("fsync", folder) in calls[renamed:]


def test_atomic_file_is_flushed_renamed_and_its_folder_flushed(tmp_path: Path, disk_calls: DiskCalls) -> None:
    with AtomicFile(str(tmp_path / "a")) as file:
        file.write([b"whole"])
    inode = (tmp_path / "a").stat().st_ino
    assert disk_calls == [("fsync", inode), ("rename", inode), ("fsync", tmp_path.stat().st_ino)]


WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda folder: transload.save({"w": torch.ones(3)}, folder / "new.pt"),
    "save_async": lambda folder: transload.save_async({"w": torch.ones(3)}, folder / "new.pt").result(),
    "retag": lambda folder: transload.retag(STATE, "cpu", out=folder / "new.pt"),
    "rescue": lambda folder: transload.rescue(STATE, folder / "new.pt"),
    "convert to safetensors": lambda folder: transload.convert(STATE, folder / "a.safetensors"),
    "convert to shards": lambda folder: transload.convert(STATE, folder / "a.safetensors", max_shard_size=64),
    "convert to npz": lambda folder: transload.convert(STATE, folder / "new.npz"),
    "convert to pt": lambda folder: transload.convert(STATE, folder / "new.pt"),
}


@each("writer", WRITERS)
def test_every_written_file_is_durable(writer: str, tmp_path: Path, disk_calls: DiskCalls) -> None:
    WRITERS[writer](tmp_path)
    files = list(tmp_path.iterdir())
    assert files
    for path in files:
        assert_durable(path, disk_calls)


def test_raw_folder_and_every_file_in_it_is_durable(tmp_path: Path, disk_calls: DiskCalls) -> None:
    transload.convert(STATE, tmp_path / "raw", to="raw")
    assert_durable(tmp_path / "raw", disk_calls)
    renamed = disk_calls.index(("rename", (tmp_path / "raw").stat().st_ino))
    inodes = {path.stat().st_ino for path in (tmp_path / "raw").iterdir()}
    assert len(inodes) > 2
    assert inodes <= {inode for _, inode in disk_calls[:renamed]}


def test_journal_is_durable_before_the_file_is_changed(tmp_path: Path, disk_calls: DiskCalls) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes((STATE).read_bytes())
    transload.retag(path, "cpu", keep_undo=True)
    (journal,) = [entry for entry in tmp_path.iterdir() if entry != path]
    journal_inode, folder = journal.stat().st_ino, ("fsync", tmp_path.stat().st_ino)
    written = [("fsync", journal_inode), ("rename", journal_inode), folder]
    assert disk_calls == [*written, ("fsync", path.stat().st_ino), ("rename", journal_inode), folder]
