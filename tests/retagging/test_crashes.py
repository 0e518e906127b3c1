"""A retag interrupted at any point: after recovery the file is the old or the new one, byte for byte.

Three kinds of interruption: power loss (data not flushed may be lost, in any order), a killed process, a failing call.
Each is tested at every call that changes anything.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.retagging.makers import planned, save, state
from tests.retagging.power import Disk, DiskState, RecordingDisk, journals, possible_states

import transload
from transload.errors import CannotWriteError
from transload.io.journal import apply, recover, undo_changes
from transload.io.sources import has_journal
from transload.retagging import retag, undo

# Saved tag, new tag and options of torch.save: changed in place, appended to the archive, or in a legacy stream.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "patch": ("cuda:0", "cpu", {}),
    "append": ("cpu", "cuda:0", {}),
    "legacy": ("cuda:0", "cpu", {"_use_new_zipfile_serialization": False}),
}
every_case = pytest.mark.parametrize("case", [*CASES, "shrink"])
with_and_without_undo = pytest.mark.parametrize("keep", [False, True], ids=["without undo", "with undo"])


def prepare(case: str, folder: Path) -> tuple[Path, str]:
    """Save a file; return its path and the device to retag it to."""
    if case == "shrink":  # an appended index that gets one byte shorter, which cannot be done in place
        shared = "cuda:10"
        path = save({key: torch.ones(300) for key in "ab"}, folder / "model.pt", lambda _: shared)
        assert retag(path, "cuda:100").method == "append"
        return path, "cuda:10"
    tag, to, options = CASES[case]
    return save(state(1), folder / "model.pt", tag, **options), to


def content(folder: Path) -> DiskState:
    return {str(path): path.read_bytes() for path in folder.iterdir()}


def write_state(disk_state: DiskState, folder: Path) -> None:
    """Bring a folder into this state; existing files keep their inodes."""
    for path in folder.iterdir():
        if str(path) not in disk_state:
            path.unlink()
    for name, data in disk_state.items():
        Path(name).write_bytes(data)


def before_and_after(path: Path, to: str) -> tuple[bytes, bytes]:
    """The bytes of the file before and after a retag; the file itself is unchanged afterwards."""
    old = path.read_bytes()
    changes, seen = planned(path, to)
    apply(str(path), changes, seen)
    new = path.read_bytes()
    path.write_bytes(old)
    assert old != new
    return old, new


def test_cases_use_the_expected_methods(tmp_path: Path) -> None:
    def method_and_growth(case: str) -> tuple[str, int]:
        result = retag(*prepare(case, tmp_path))
        return result.method, result.grown

    assert method_and_growth("patch") == method_and_growth("legacy") == ("patch", 0)
    assert method_and_growth("append")[0] == method_and_growth("shrink")[0] == "append"
    assert method_and_growth("append")[1] > 0 > method_and_growth("shrink")[1]


@every_case
@with_and_without_undo
def test_power_loss_at_any_call_leaves_the_old_or_the_new_file(case: str, keep: bool, tmp_path: Path) -> None:
    path, to = prepare(case, tmp_path)
    old, new = before_and_after(path, to)
    before, disk = content(tmp_path), RecordingDisk()
    names = {name: disk.file_number(name) for name in before}
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen, keep=keep)
    points, outcomes = 0, set()
    for count in range(len(disk.calls) + 1):
        for disk_state in possible_states(before, names, disk.calls[:count]):
            write_state(disk_state, tmp_path)
            outcome = recover(path)
            assert path.read_bytes() in (old, new), f"after call {count}: {outcome}"
            assert not has_journal(path)
            assert outcome == {True: "finished", False: "restored"}[path.read_bytes() == new] or not outcome
            points += 1
            outcomes.add((outcome, path.read_bytes() == new))
    assert outcomes >= {("", False), ("restored", False), ("finished", True), ("", True)}
    sys.stdout.write(f"{case}: {len(disk.calls)} calls, {points} states after a loss of power\n")
    assert points > 2 * len(disk.calls)


@every_case
def test_power_loss_during_recovery_leaves_the_old_or_the_new_file(case: str, tmp_path: Path) -> None:
    path, to = prepare(case, tmp_path)
    old, new = before_and_after(path, to)
    first, disk = content(tmp_path), RecordingDisk()
    names = {name: disk.file_number(name) for name in first}
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen)
    points = 0
    for count in range(len(disk.calls) + 1):
        *_, crashed = possible_states(first, names, disk.calls[:count])
        write_state(crashed, tmp_path)
        before, second_disk = content(tmp_path), RecordingDisk()
        second_names = {name: second_disk.file_number(name) for name in before}
        with second_disk:
            recover(path)
        for second_count in range(len(second_disk.calls) + 1):
            for disk_state in possible_states(before, second_names, second_disk.calls[:second_count]):
                write_state(disk_state, tmp_path)
                recover(path)
                assert path.read_bytes() in (old, new)
                assert not has_journal(path)
                points += 1
    sys.stdout.write(f"{case}: {points} states after a second loss of power\n")
    assert points > len(disk.calls)


class Stopped(BaseException):
    """Stands for the end of the process."""


class StoppingDisk(Disk):
    """Stops before a call, or in the middle of a write; unless ``once`` is set, all later calls stop as well."""

    def __init__(self, calls: int, end: Callable[[], None], *, torn: bool = False, once: bool = False) -> None:
        self.left, self.end, self.torn, self.once = calls, end, torn, once

    def _next(self) -> bool:
        """Count a call; return whether it must stop."""
        self.left -= 1
        return self.left == -1 if self.once else self.left < 0

    def _call(self, work: Callable[[], Any]) -> Any:
        if self._next():
            self.end()
        return work()

    def change(self, path: str, flags: int) -> int:
        descriptor: int = self._call(lambda: Disk.change(self, path, flags))
        return descriptor

    def create(self, path: str, flags: int, mode: int) -> int:
        descriptor: int = self._call(lambda: Disk.create(self, path, flags, mode))
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        if self._next():
            if self.torn:
                super().write(descriptor, data[: len(data) // 2], offset)
            self.end()
        super().write(descriptor, data, offset)

    def ftruncate(self, descriptor: int, size: int) -> None:
        self._call(lambda: Disk.ftruncate(self, descriptor, size))

    def fsync(self, descriptor: int) -> None:
        self._call(lambda: Disk.fsync(self, descriptor))

    def sync_folder(self, folder: str) -> None:
        self._call(lambda: Disk.sync_folder(self, folder))

    def replace(self, old: str, new: str) -> None:
        self._call(lambda: Disk.replace(self, old, new))

    def unlink(self, path: str) -> None:
        self._call(lambda: Disk.unlink(self, path))


def stop() -> None:
    raise Stopped


def calls_of(path: Path, to: str, *, keep: bool) -> int:
    """The number of calls a retag makes."""
    old, disk = path.read_bytes(), StoppingDisk(10_000, stop)
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen, keep=keep)
    path.write_bytes(old)
    journals(path)[1].unlink(missing_ok=True)
    return 10_000 - disk.left


@every_case
@with_and_without_undo
@pytest.mark.parametrize("torn", [False, True], ids=["between", "torn"])
def test_process_stopped_at_any_call_leaves_the_old_or_the_new_file(
    case: str, keep: bool, torn: bool, tmp_path: Path
) -> None:
    path, to = prepare(case, tmp_path)
    old, new = before_and_after(path, to)
    count = calls_of(path, to, keep=keep)
    for point in range(count):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(Stopped), StoppingDisk(point, stop, torn=torn):
            apply(str(path), changes, seen, keep=keep)
        recover(path)
        assert path.read_bytes() in (old, new), f"at call {point} of {count}"
        assert not has_journal(path)
        retag(path, to)  # it can be repeated, whatever was left behind
        assert path.read_bytes() == new
        leftovers = {name.name for name in tmp_path.iterdir()} - {path.name}
        assert leftovers <= {journals(path)[1].name}
        for name in leftovers:
            (tmp_path / name).unlink()
    sys.stdout.write(f"{case}: {count} points\n")
    assert count >= 10


@every_case
@with_and_without_undo
@pytest.mark.parametrize("torn", [False, True], ids=["between", "torn"])
@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_failing_call_restores_the_file_or_reports_it_changed(
    case: str, keep: bool, torn: bool, code: str, tmp_path: Path
) -> None:
    """The file is restored at once and no other file is left, unless the error says that the file is changed."""
    number = getattr(errno, code)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    path, to = prepare(case, tmp_path)
    old, new = before_and_after(path, to)
    count = calls_of(path, to, keep=keep)
    for point in range(count):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(CannotWriteError) as caught, StoppingDisk(point, fail, torn=torn, once=True):
            apply(str(path), changes, seen, keep=keep)
        assert caught.value.errno == number
        assert ("the disk is full" if code == "ENOSPC" else os.strerror(number)) in caught.value.what
        if "the file itself is changed" in caught.value.what:
            assert path.read_bytes() == new
        else:
            assert path.read_bytes() == old
            assert {name.name for name in tmp_path.iterdir()} == {path.name}
        recover(path)
        assert not has_journal(path)
        journals(path)[1].unlink(missing_ok=True)


def test_file_is_recovered_later_if_restoring_fails_too(tmp_path: Path) -> None:
    """From some call on, all fail: the journal stays, and ``recover`` restores or completes the file."""
    path, to = prepare("append", tmp_path)
    old, new = before_and_after(path, to)

    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    outcomes = set()
    for point in range(calls_of(path, to, keep=False)):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(CannotWriteError) as caught, StoppingDisk(point, fail, torn=True):
            apply(str(path), changes, seen)
        outcomes.add(caught.value.what.partition("; ")[2])
        recover(path)
        assert path.read_bytes() in (old, new)
        Path(f"{journals(path)[0]}-new").unlink(missing_ok=True)
    assert len(outcomes) == 3  # unchanged; partly changed; changed, with the journal left


KILLED = """
import os, signal, sys
from transload.io import journal
from transload.retagging import retag
left = int(sys.argv[3])
class Deadly:
    def __getattr__(self, name):
        global left
        if name in ("open", "fsync", "ftruncate", "replace", "unlink", "pwrite"):
            left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)
journal.os = Deadly()
write_at = journal.write_at
journal.write_at = lambda *args: journal.os.pwrite and write_at(*args)
retag(sys.argv[1], sys.argv[2])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("case", ["patch", "append"])
def test_killed_process_leaves_the_old_or_the_new_file(case: str, tmp_path: Path) -> None:
    path, to = prepare(case, tmp_path)
    old, new = before_and_after(path, to)
    source = str(Path(transload.__file__).parent.parent)
    outcomes = set()
    for point in (0, 3, 5, 6, 7, 9, 10, 11, 99):
        path.write_bytes(old)
        command = [sys.executable, "-S", "-c", KILLED, str(path), to, str(point)]
        process = subprocess.run(command, env={"PYTHONPATH": source}, timeout=300, check=False, capture_output=True)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        outcomes.add((recover(path), path.read_bytes() == new))
        assert path.read_bytes() in (old, new)
        assert not has_journal(path)
    assert outcomes >= {("", False), ("restored", False), ("", True)}


@every_case
def test_interrupted_undo_can_be_repeated(case: str, tmp_path: Path) -> None:
    """An undo is a change like any other."""
    path, to = prepare(case, tmp_path)
    old = path.read_bytes()
    retag(path, to, keep_undo=True)
    new, undo_journal = path.read_bytes(), journals(path)[1]
    undo_bytes = undo_journal.read_bytes()
    for point in range(40):
        changes, seen = undo_changes(str(path))
        try:
            with StoppingDisk(point, stop, torn=True):
                apply(str(path), changes, seen)
        except Stopped:
            recover(path)
            assert path.read_bytes() in (old, new)
            if undo_journal.exists():
                undo(path)
            assert path.read_bytes() == old
        else:
            break
        path.write_bytes(new)
        undo_journal.write_bytes(undo_bytes)
    assert path.read_bytes() == old
    assert 9 < point < 39
