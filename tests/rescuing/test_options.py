"""Arguments of ``rescue``, files it refuses to overwrite, and its progress reports."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from tests.rescuing.makers import ROOT

from transload import NoDirectoryError, UsageError, rescue
from transload.findings import quoted

STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()


def test_report_replaces_other_files_only_with_overwrite_and_never_the_source(tmp_path: Path) -> None:
    """The report of an earlier rescue is replaced without ``overwrite``."""
    (tmp_path / "model.pt").write_bytes(STATE)
    report = tmp_path / "new.pt.rescue.json"
    report.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="exists"):
        rescue(tmp_path / "model.pt", tmp_path / "new.pt")
    assert report.read_text(encoding="utf-8") == "mine"
    assert rescue(tmp_path / "model.pt", tmp_path / "new.pt", overwrite=True).exit_code == 0
    (tmp_path / "new.pt").unlink()
    assert rescue(tmp_path / "model.pt", tmp_path / "new.pt").exit_code == 0
    source = (tmp_path / "model.pt").replace(report)
    before = source.read_bytes()
    with pytest.raises(UsageError, match="the target is the source itself"):
        rescue(source, tmp_path / "new.pt", overwrite=True)
    assert source.read_bytes() == before


def test_pipe_is_not_overwritten(tmp_path: Path) -> None:
    pipe = tmp_path / "new.pt"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="not a regular file"):
        rescue(STATE, pipe, overwrite=True)
    assert pipe.is_fifo()


def test_invalid_arguments_are_usage_errors(tmp_path: Path) -> None:
    for dst, options, message in (
        (tmp_path / "new.pt", {"fill": "ones"}, "fill must be"),
        (None, {}, "no output file"),
        ("a\0b.pt", {}, "no file can have the name"),
        (tmp_path, {}, "this is a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            rescue(STATE, dst, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_directory_at_the_path_of_the_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new.pt.rescue.json").mkdir()
    with pytest.raises(UsageError, match="exists"):
        rescue(STATE, tmp_path / "new.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["new.pt.rescue.json"]


def test_missing_directory_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(NoDirectoryError, match="its directory does not exist") as caught:
        rescue(STATE, tmp_path / "a b" / "new.pt")
    assert f"$ mkdir {'-p ' * (os.name != 'nt')}{quoted(str(tmp_path / 'a b'))}" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_file_size(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    rescue(STATE, tmp_path / "new.pt", progress=lambda done, total: reported.append((done, total)))
    assert reported[-1] == (len(STATE), len(STATE))


def test_unzipped_source_gets_no_new_files(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(STATE)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        archive.extractall(tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    index = folder / "data.pkl"
    before = index.read_bytes()
    for name in ("data.pkl", "new.pt"):
        with pytest.raises(UsageError, match="lies in the source"):
            rescue(folder, folder / name, overwrite=True)
    assert index.read_bytes() == before
    assert not (folder / "new.pt").exists()
