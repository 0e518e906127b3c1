"""Unpacked archives: read in place, and never beyond the directory."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.formats import directory as unzipped
from transload.formats import read
from transload.formats.directory import read_unzipped

links = pytest.mark.skipif(os.name == "nt", reason="creating links needs privileges on Windows")


@pytest.fixture
def unpacked(data: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(data / "h200" / "state_dict_cuda0.pt") as archive:
        archive.extractall(tmp_path / "out")
    return tmp_path / "out" / "state_dict_cuda0"


def codes(checkpoint: Checkpoint) -> list[str]:
    return [problem.code for problem in checkpoint.problems]


def test_the_same_tensors_as_in_the_archive(data: Path, unpacked: Path) -> None:
    whole = (data / "h200" / "state_dict_cuda0.pt").read_bytes()
    before, after = read(whole), read_unzipped(str(unpacked))
    assert after.format == "torch-directory"
    assert codes(after) == []
    plain = [(t.name, t.dtype, t.shape, t.stride, t.device, t.storage, t.offset) for t in before.tensors]
    assert [(t.name, t.dtype, t.shape, t.stride, t.device, t.storage, t.offset) for t in after.tensors] == plain
    for old, new in zip(before.storages, after.storages, strict=True):
        assert old.offset is not None
        assert new.offset == 0
        assert new.crc32 is None
        assert (unpacked / new.file).read_bytes() == whole[old.offset : old.offset + old.nbytes]


def test_tensors_count_from_the_start_of_their_file(unpacked: Path) -> None:
    assert {tensor.file_offset for tensor in read_unzipped(str(unpacked)).tensors} == {0}


def test_the_folder_that_unzipping_made(unpacked: Path) -> None:
    checkpoint = read_unzipped(str(unpacked.parent))
    assert len(checkpoint.tensors) == 10
    assert all((unpacked.parent / storage.file).is_file() for storage in checkpoint.storages)


def test_programs_stay_programs(data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(data / "h200" / "torchscript_cuda0.pt") as archive:
        archive.extractall(tmp_path)
    checkpoint = read_unzipped(str(tmp_path))
    assert checkpoint.format == "torchscript"
    assert len(checkpoint.tensors) == 10
    assert "code/__torch__.py" in [part.name for part in checkpoint.parts]


@links
def test_a_link_out_of_the_directory_is_not_followed(unpacked: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(432))
    (unpacked / "data" / "0").unlink()
    (unpacked / "data" / "0").symlink_to(secret)
    checkpoint = read_unzipped(str(unpacked))
    assert codes(checkpoint) == ["link-outside", "storage-missing"]
    assert checkpoint.problems[0].where == "data/0"


@links
def test_a_linked_directory_is_not_entered(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"x")
    (unpacked / "more").symlink_to(tmp_path / "elsewhere")
    (unpacked / "round").symlink_to(unpacked)
    checkpoint = read_unzipped(str(unpacked))
    assert codes(checkpoint) == ["link-outside", "link-outside"]
    assert not any(record.name.startswith("more") for record in checkpoint.records)


@links
def test_a_link_inside_is_an_ordinary_file(unpacked: Path) -> None:
    (unpacked / "data" / "0").rename(unpacked / "data" / "real")
    (unpacked / "data" / "0").symlink_to("real")
    assert "storage-missing" not in codes(read_unzipped(str(unpacked)))


@links
def test_links_to_nowhere_and_pipes_are_told(unpacked: Path) -> None:
    (unpacked / "data" / "8").unlink()
    (unpacked / "data" / "8").symlink_to("nothing")
    os.mkfifo(unpacked / "pipe")
    assert codes(read_unzipped(str(unpacked)))[:2] == ["record-unreadable", "record-unreadable"]


def test_a_file_cut_short_is_told(unpacked: Path) -> None:
    (unpacked / "data" / "0").write_bytes(b"short")
    assert codes(read_unzipped(str(unpacked))) == ["storage-size"]


def test_the_listing_has_an_end(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unzipped, "MAX_UNPACKED_FILES", 3)
    assert "directory-too-long" in codes(read_unzipped(str(unpacked)))


def test_so_has_the_depth(unpacked: Path) -> None:
    deep = unpacked.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    assert "directory-too-long" in codes(read_unzipped(str(unpacked)))


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotReadError):
        read_unzipped(str(tmp_path / "nothing"))


def test_an_empty_directory_has_no_index(tmp_path: Path) -> None:
    assert "zip-no-pickle" in codes(read_unzipped(str(tmp_path)))
