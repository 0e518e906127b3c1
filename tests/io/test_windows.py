"""Files on Windows: open elsewhere, long paths, names of devices, consoles, line ends. Other systems stand in for it
where they can; ``make test-windows`` runs these tests under Wine.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import each, for_each
from tests.makers import saved

import transload
from transload.cli.main import COMMANDS, main
from transload.errors import ForbiddenWriteError, FullDiskError, TransloadError, UsageError
from transload.io import atomic
from transload.io.atomic import AtomicFile, refused_by_windows
from transload.io.sources import extended

STATE = {"w": torch.arange(6.0), "b": torch.ones(2)}
on_windows = pytest.mark.skipif(os.name != "nt", reason="needs Windows")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    transload.save(STATE, path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_intact(path: Path) -> None:
    assert names(path.parent) == [path.name]
    assert torch.equal(transload.load(path)["w"], STATE["w"])


# -- names -------------------------------------------------------------------------------------------------------------

DEVICES = [
    "aux.pt",
    "nul.safetensors",
    "con",
    "CON",
    "NUL.tar.gz",
    "prn .pt",
    "com1.pt",
    "Lpt9",
    "COM\xb2.pt",
    "CONOUT$",
]
OTHERS = ["a.pt.", "a.pt ", "a.", "a.pt:stream", "a*.pt", "what?.pt", "a\tb.pt", "aux/a.pt", r"C:\runs.\a.pt"]
FILES = [
    "auxiliary.pt",
    "null.pt",
    "com10.pt",
    "com.pt",
    "a b.pt",
    ".hidden",
    "a..pt",
    r"..\a.pt",
    "./a.pt",
    r"C:\a.pt",
]
FILES += [r"\\host\share\a.pt", r"\\?\C:\aux.pt", "nul", "модель.pt"]


def test_names_that_windows_would_change_or_give_to_a_device_are_known() -> None:
    for_each([*DEVICES, *OTHERS], lambda name: _assert_equal(bool(refused_by_windows(name)), expected=True))
    for_each(FILES, lambda name: _assert_equal(refused_by_windows(name), expected=""))


def _assert_equal(found: object, *, expected: object) -> None:
    assert found == expected


@on_windows
@each("name", DEVICES + OTHERS[:-2])
def test_nothing_is_written_under_a_name_that_windows_would_change(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    source = tmp_path / "model.pt"
    transload.save(STATE, source)
    target = os.path.join(str(folder), name)
    record = ["verify", str(source), "--write", target]
    for write in (
        lambda: transload.save(STATE, target),
        lambda: transload.convert(source, target),
        lambda: transload.retag(source, "cuda:0", out=target),
        lambda: transload.rescue(source, target),
    ):
        with pytest.raises(UsageError, match="Windows cannot store a file under this name"):
            write()
    assert main(record) == 2
    assert names(folder) == []
    assert names(tmp_path) == ["model.pt", "runs"]


@on_windows
def test_reading_a_device_is_an_error_and_not_a_wait(path: Path) -> None:
    for name in ("con", "nul", str(path.with_name("aux.pt"))):
        with pytest.raises(TransloadError):
            transload.inspect(name)


def test_file_is_found_by_a_name_in_other_case_where_the_system_does(path: Path) -> None:
    other = path.with_name("MODEL.PT")
    if not other.exists():
        pytest.skip("names are case-sensitive here")
    transload.save({"w": torch.zeros(1)}, other)
    assert len(names(path.parent)) == 1
    with pytest.raises(UsageError, match="the source itself"):
        transload.convert(path, path.with_name("Model.PT"), overwrite=True)


# -- open elsewhere ----------------------------------------------------------------------------------------------------


class DeniedError(PermissionError):
    """What Windows answers to a rename over a file that is open."""

    winerror = 5

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "Access is denied", "new", None, "old")


def deny(monkeypatch: pytest.MonkeyPatch, times: float) -> list[float]:
    """Let that many renames fail as on Windows; return the waits between them."""
    waits: list[float] = []
    rename = os.replace

    def replace(old: str, new: str) -> None:
        if len(waits) < times:
            raise DeniedError
        rename(old, new)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(atomic, "sleep", waits.append)
    return waits


def test_save_over_a_file_that_stays_open_is_an_error_and_keeps_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, path.open("rb"):
        if os.name != "nt":
            deny(patch, float("inf"))
        with pytest.raises(ForbiddenWriteError, match="a program has the file open") as caught:
            transload.save({"w": torch.zeros(9)}, path)
    assert str(path) in str(caught.value)
    assert "Close it there" in caught.value.fix
    assert_intact(path)
    transload.save({"w": torch.zeros(9)}, path)


def test_save_over_a_file_that_a_scanner_has_open_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = deny(monkeypatch, 3)
    transload.save({"w": torch.zeros(9)}, path)
    assert len(waits) == 3
    assert sum(waits) < 1
    assert names(path.parent) == ["model.pt"]
    assert len(transload.load(path)["w"]) == 9


def test_other_errors_of_the_rename_are_not_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(atomic, "sleep", lambda _: pytest.fail("waits"))
    with pytest.raises(ForbiddenWriteError, match="permission denied"):
        transload.save({"w": torch.zeros(9)}, path)
    monkeypatch.undo()
    assert_intact(path)


def test_save_over_a_mapped_file_replaces_it_or_keeps_it_whole(path: Path) -> None:
    mapped = transload.load(path, mmap=True)
    try:
        transload.save({"w": torch.zeros(6)}, path)
        saved_anew = True
    except ForbiddenWriteError as error:  # Windows
        saved_anew = False
        assert "load(mmap=True)" in error.fix  # noqa: PT017 - it is raised on one system only
    assert torch.equal(mapped["w"], STATE["w"])
    assert torch.equal(transload.load(path)["w"], torch.zeros(6) if saved_anew else STATE["w"])
    assert names(path.parent) == ["model.pt"]
    del mapped
    transload.save({"w": torch.zeros(6)}, path)
    assert torch.equal(transload.load(path)["w"], torch.zeros(6))


def test_directory_that_a_killed_conversion_had_moved_is_put_back_unless_its_writer_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    transload.convert(saved(STATE), f"{out}/")
    out.rename(tmp_path / ".out.999999999-0123abcd.part.old")
    (tmp_path / ".out.999999998-0123abcd.part").mkdir()
    if os.name == "nt":
        (tmp_path / f".out.{os.getpid()}-0123abcd.part").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        transload.convert(saved({"w": torch.zeros(1)}), f"{out}/")
    assert names(tmp_path) == [f".out.{os.getpid()}-0123abcd.part"] * (os.name == "nt") + ["out"]
    assert (out / "index.json").is_file()


# -- long paths --------------------------------------------------------------------------------------------------------


@each("prefix", ["", "\\\\?\\"] if os.name == "nt" else [""])
def test_paths_of_more_than_260_characters_are_read_and_written(tmp_path: Path, prefix: str) -> None:
    folder = os.path.join(str(tmp_path), "d" * 120, "e" * 120)
    os.makedirs(extended(folder) if os.name == "nt" else folder)
    path, other = (prefix + os.path.join(folder, name) for name in ("model.pt", "model.safetensors"))
    assert len(path) > 260
    for _ in range(2):
        transload.save(STATE, path)
    assert torch.equal(transload.load(path)["w"], STATE["w"])
    assert transload.inspect(path).ok
    assert transload.retag(path, "cuda:0").changed
    assert transload.inspect(path).devices[0].device == "cuda:0"
    transload.convert(path, other)
    assert transload.verify(other).ok
    transload.rescue(path, f"{path}.again.pt")
    assert transload.inspect(other).ok
    listed = os.listdir(extended(folder) if os.name == "nt" else folder)
    assert sorted(listed) == ["model.pt", "model.pt.again.pt", "model.pt.again.pt.rescue.json", "model.safetensors"]


def test_prefix_for_long_paths_is_used_only_where_a_path_may_be_too_long() -> None:
    assert extended("C:\\" + "a" * 100) == "C:\\" + "a" * 100
    assert extended("C:\\" + "a" * 230) == "\\\\?\\C:\\" + "a" * 230  # a hidden file beside it has a longer name
    assert extended("\\\\?\\C:\\" + "a" * 300) == "\\\\?\\C:\\" + "a" * 300
    assert extended("\\\\host\\share\\" + "a" * 300) == "\\\\?\\UNC\\host\\share\\" + "a" * 300


# -- consoles and text files -------------------------------------------------------------------------------------------


@each("encoding", ["cp1252", "cp437", "cp932"])
def test_no_command_fails_on_a_console_that_lacks_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    path = tmp_path / "модель-模型-é.pt"
    path.write_bytes(saved({"вес-重み-é": torch.ones(2), "f": {"x": 1}}))
    short = tmp_path / "короткий.pt"
    short.write_bytes(path.read_bytes()[:-100])
    code = tmp_path / "code.pt"
    code.write_bytes(b"cbuiltins\nprint\n(V\\u0434\ntR.")
    log = tmp_path / "журнал.txt"
    log.write_text("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB – ошибка\n", encoding="utf-8")
    calls = [[name, "--help"] for name in COMMANDS]
    calls += [[], ["--help"], ["--version"], ["дела"], ["inspect", "нет.pt"], ["doctor", "--explain", "U04"]]
    for file in (path, short, code):
        calls += [["inspect", str(file)], ["inspect", "--tree", "--tensors", "--globals", str(file)]]
        calls += [["verify", "--hash", str(file)], ["check", str(file)], ["check", "--json", str(file)]]
        calls += [["rescue", str(file), str(tmp_path / f"{file.stem}-новый.pt")]]
    calls += [["inspect", str(path), str(short)], ["retag", str(path), "--to", "cuda:0"], ["explain", str(log)]]
    calls += [["convert", str(path), str(tmp_path / "ж.safetensors")], ["verify", str(path), "--write", f"{path}.json"]]
    for call in calls:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors) for errors in ("strict", "backslashreplace")]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        assert main(call) in (0, 1, 2)
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert out or err, call
        for text in (out, err):
            assert "UnicodeEncodeError" not in text, call
            assert "bug in transload" not in text, call


def test_text_files_with_the_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    transload.convert(saved(STATE), path, max_shard_size=30)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes().replace(b"\n", b"\r\n"))
    assert b"\r\n" in index.read_bytes()
    assert torch.equal(transload.load(index)["w"], STATE["w"])
    assert not transload.inspect(index).problems
    single = tmp_path / "single.pt"
    single.write_bytes(saved(STATE))
    record = tmp_path / "record.json"
    assert main(["verify", str(single), "--write", str(record)]) == 0
    text = json.dumps(json.loads(record.read_text(encoding="utf-8")), indent=1).replace("\n", "\r\n")
    for encoding in ("utf-8", "utf-8-sig"):
        record.write_bytes(text.encode(encoding))
        assert main(["verify", str(single), "--against", str(record)]) == 0, encoding


# -- no space ----------------------------------------------------------------------------------------------------------


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@each("call", ["write", "fsync"])
def test_drive_without_free_space_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "model.pt"
    transload.save(STATE, path)
    name = "writev" if call == "write" and hasattr(os, "writev") else call
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full_disk)
        with pytest.raises(FullDiskError, match="the disk is full"):
            transload.save({"w": torch.zeros(99)}, path)
    assert_intact(path)
    with monkeypatch.context() as patch, pytest.raises(FullDiskError), AtomicFile(str(path)):
        patch.setattr(os, "fsync", full_disk)
    assert_intact(path)
