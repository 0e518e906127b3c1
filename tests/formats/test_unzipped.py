"""Unpacked archives: read in place, and no link leads outside the directory."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from tests.makers import codes

from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.formats import read_source
from transload.formats.sets import unpacked as unzipped
from transload.formats.sets.merger import Merger
from transload.io.folder import Folder
from transload.io.sources import FileSource
from transload.opening import inspect as read

needs_links = pytest.mark.skipif(os.name == "nt", reason="creating links needs privileges on Windows")


@pytest.fixture
def unpacked(data: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(data / "h200" / "state_dict_cuda0.pt") as archive:
        archive.extractall(tmp_path / "out")
    return tmp_path / "out" / "state_dict_cuda0"


def read_unzipped(path: str) -> Checkpoint:
    return unzipped.read(Merger(Folder(path).list(), read, FileSource, read_source))


def test_tensors_are_the_same_as_in_the_archive(data: Path, unpacked: Path) -> None:
    archive = (data / "h200" / "state_dict_cuda0.pt").read_bytes()
    before, after = read(archive), read_unzipped(str(unpacked))
    assert after.format == "torch-directory"
    assert codes(after) == []
    expected = [(t.name, t.dtype, t.shape, t.stride, t.device, t.storage, t.offset) for t in before.tensors]
    assert [(t.name, t.dtype, t.shape, t.stride, t.device, t.storage, t.offset) for t in after.tensors] == expected
    for old, new in zip(before.storages, after.storages, strict=True):
        assert old.offset is not None
        assert new.offset == 0
        assert new.crc32 is None
        assert (unpacked / new.file).read_bytes() == archive[old.offset : old.offset + old.nbytes]


def test_file_offsets_count_from_the_start_of_each_file(unpacked: Path) -> None:
    assert {tensor.file_offset for tensor in read_unzipped(str(unpacked)).tensors} == {0}


def test_parent_of_the_unpacked_folder_is_read(unpacked: Path) -> None:
    checkpoint = read_unzipped(str(unpacked.parent))
    assert len(checkpoint.tensors) == 10
    assert all((unpacked.parent / storage.file).is_file() for storage in checkpoint.storages)


def test_unpacked_torchscript_is_still_torchscript(data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(data / "h200" / "torchscript_cuda0.pt") as archive:
        archive.extractall(tmp_path)
    checkpoint = read_unzipped(str(tmp_path))
    assert checkpoint.format == "torchscript"
    assert len(checkpoint.tensors) == 10
    assert "code/__torch__.py" in [part.name for part in checkpoint.parts]


@needs_links
def test_link_out_of_the_directory_is_not_followed(unpacked: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(432))
    (unpacked / "data" / "0").unlink()
    (unpacked / "data" / "0").symlink_to(secret)
    checkpoint = read_unzipped(str(unpacked))
    assert codes(checkpoint) == ["link-outside", "storage-missing"]
    assert checkpoint.problems[0].where == "data/0"


@needs_links
def test_linked_directory_is_not_entered(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"x")
    (unpacked / "more").symlink_to(tmp_path / "elsewhere")
    (unpacked / "round").symlink_to(unpacked)
    checkpoint = read_unzipped(str(unpacked))
    assert codes(checkpoint) == ["link-outside", "link-outside"]
    assert not any(record.name.startswith("more") for record in checkpoint.records)


@needs_links
def test_link_inside_the_directory_is_followed(unpacked: Path) -> None:
    (unpacked / "data" / "0").rename(unpacked / "data" / "real")
    (unpacked / "data" / "0").symlink_to("real")
    assert "storage-missing" not in codes(read_unzipped(str(unpacked)))


@needs_links
def test_dangling_links_and_pipes_are_reported(unpacked: Path) -> None:
    (unpacked / "data" / "8").unlink()
    (unpacked / "data" / "8").symlink_to("nothing")
    os.mkfifo(unpacked / "pipe")
    assert codes(read_unzipped(str(unpacked)))[:2] == ["record-unreadable", "record-unreadable"]


def test_truncated_storage_is_reported(unpacked: Path) -> None:
    (unpacked / "data" / "0").write_bytes(b"short")
    assert codes(read_unzipped(str(unpacked))) == ["storage-size"]


def test_number_of_files_is_limited(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unzipped, "MAX_UNPACKED_FILES", 3)
    assert "directory-too-long" in codes(read_unzipped(str(unpacked)))


def test_depth_of_the_directory_is_limited(unpacked: Path) -> None:
    deep = unpacked.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    assert "directory-too-long" in codes(read_unzipped(str(unpacked)))


def test_folder_that_cannot_be_listed_is_reported(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.path.basename(path) == "data":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (problem, *others) = read_unzipped(str(unpacked)).problems
    assert (problem.code, problem.where) == ("directory-unreadable", "data")
    assert {other.code for other in others} == {"storage-missing"}


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotReadError):
        read_unzipped(str(tmp_path / "nothing"))


def test_empty_directory_has_no_index(tmp_path: Path) -> None:
    assert "zip-no-pickle" in codes(read_unzipped(str(tmp_path)))
