"""A retag that is interrupted at any point: the file is the old one or the new one, byte for byte, after the next look.

Three kinds of end: the power fails (what was not flushed may be lost, in any order), the process is killed, a call
fails. Each at every call that changes anything.
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
from tests.retagging.power import Disk, Noting, World, journals, worlds

import transload
from transload.errors import CannotWriteError
from transload.io.journal import apply, recover, undo_changes
from transload.io.sources import has_journal
from transload.retagging import retag, undo

# How the file is saved, and where it goes: in as many bytes, behind its records, over what was appended, in a stream.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "patch": ("cuda:0", "cpu", {}),
    "append": ("cpu", "cuda:0", {}),
    "legacy": ("cuda:0", "cpu", {"_use_new_zipfile_serialization": False}),
}
every_case = pytest.mark.parametrize("case", [*CASES, "shrink"])
every_end = pytest.mark.parametrize("keep", [False, True], ids=["forget", "keep"])


def made(case: str, folder: Path) -> tuple[Path, str]:
    """A file, and the device to retag it to."""
    if case == "shrink":  # an appended index, which gets shorter by a byte, for which there is no form
        shared = "cuda:10"
        path = save({key: torch.ones(300) for key in "ab"}, folder / "model.pt", lambda _: shared)
        assert retag(path, "cuda:100").method == "append"
        return path, "cuda:10"
    tag, to, options = CASES[case]
    return save(state(1), folder / "model.pt", tag, **options), to


def content(folder: Path) -> World:
    return {str(path): path.read_bytes() for path in folder.iterdir()}


def lay_out(world: World, folder: Path) -> None:
    """The files as they are found; those that are there already are the same files, with other bytes."""
    for path in folder.iterdir():
        if str(path) not in world:
            path.unlink()
    for name, data in world.items():
        Path(name).write_bytes(data)


def both(path: Path, to: str) -> tuple[bytes, bytes]:
    """The file before and after."""
    old = path.read_bytes()
    changes, seen = planned(path, to)
    apply(str(path), changes, seen)
    new = path.read_bytes()
    path.write_bytes(old)
    assert old != new
    return old, new


def test_the_cases_are_what_they_are_called(tmp_path: Path) -> None:
    def grown(case: str) -> tuple[str, int]:
        made_of = retag(*made(case, tmp_path))
        return made_of.method, made_of.grown

    assert grown("patch") == grown("legacy") == ("patch", 0)
    assert grown("append")[0] == grown("shrink")[0] == "append"
    assert grown("append")[1] > 0 > grown("shrink")[1]


@every_case
@every_end
def test_the_power_fails_at_any_call(case: str, keep: bool, tmp_path: Path) -> None:
    path, to = made(case, tmp_path)
    old, new = both(path, to)
    before, disk = content(tmp_path), Noting()
    names = {name: disk.known(name) for name in before}
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen, keep=keep)
    points, ends = 0, set()
    for count in range(len(disk.calls) + 1):
        for world in worlds(before, names, disk.calls[:count]):
            lay_out(world, tmp_path)
            outcome = recover(path)
            assert path.read_bytes() in (old, new), f"after call {count}: {outcome}"
            assert not has_journal(path)
            assert outcome == {True: "finished", False: "restored"}[path.read_bytes() == new] or not outcome
            points += 1
            ends.add((outcome, path.read_bytes() == new))
    assert ends >= {("", False), ("restored", False), ("finished", True), ("", True)}
    sys.stdout.write(f"{case}: {len(disk.calls)} calls, {points} states after a loss of power\n")
    assert points > 2 * len(disk.calls)


@every_case
def test_the_power_fails_again_while_the_file_is_put_right(case: str, tmp_path: Path) -> None:
    path, to = made(case, tmp_path)
    old, new = both(path, to)
    first, disk = content(tmp_path), Noting()
    names = {name: disk.known(name) for name in first}
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen)
    points = 0
    for count in range(len(disk.calls) + 1):
        *_, crashed = worlds(first, names, disk.calls[:count])
        lay_out(crashed, tmp_path)
        before, again = content(tmp_path), Noting()
        numbers = {name: again.known(name) for name in before}
        with again:
            recover(path)
        for upto in range(len(again.calls) + 1):
            for world in worlds(before, numbers, again.calls[:upto]):
                lay_out(world, tmp_path)
                recover(path)
                assert path.read_bytes() in (old, new)
                assert not has_journal(path)
                points += 1
    sys.stdout.write(f"{case}: {points} states after a second loss of power\n")
    assert points > len(disk.calls)


class Stopped(BaseException):
    """The process is gone: nothing of it runs any more."""


class Stopping(Disk):
    """Stops before a call, or in the middle of a write; and all calls afterwards fail as well, as those of the dead."""

    def __init__(self, calls: int, end: Callable[[], None], *, torn: bool = False, once: bool = False) -> None:
        self.left, self.end, self.torn, self.once = calls, end, torn, once

    def _next(self) -> bool:
        """Whether this call is the last."""
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
    """How many calls a retag takes."""
    old, disk = path.read_bytes(), Stopping(10_000, stop)
    changes, seen = planned(path, to)
    with disk:
        apply(str(path), changes, seen, keep=keep)
    path.write_bytes(old)
    journals(path)[1].unlink(missing_ok=True)
    return 10_000 - disk.left


@every_case
@every_end
@pytest.mark.parametrize("torn", [False, True], ids=["between", "torn"])
def test_the_process_ends_at_any_call(case: str, keep: bool, torn: bool, tmp_path: Path) -> None:
    path, to = made(case, tmp_path)
    old, new = both(path, to)
    count = calls_of(path, to, keep=keep)
    for point in range(count):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(Stopped), Stopping(point, stop, torn=torn):
            apply(str(path), changes, seen, keep=keep)
        recover(path)
        assert path.read_bytes() in (old, new), f"at call {point} of {count}"
        assert not has_journal(path)
        retag(path, to)  # and it can be done again, over whatever is left
        assert path.read_bytes() == new
        leftovers = {name.name for name in tmp_path.iterdir()} - {path.name}
        assert leftovers <= {journals(path)[1].name}
        for name in leftovers:
            (tmp_path / name).unlink()
    sys.stdout.write(f"{case}: {count} points\n")
    assert count >= 10


@every_case
@every_end
@pytest.mark.parametrize("torn", [False, True], ids=["between", "torn"])
@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_a_call_fails(case: str, keep: bool, torn: bool, code: str, tmp_path: Path) -> None:
    """On a full or failing disk the file is restored immediately, and nothing is left beside it."""
    number = getattr(errno, code)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    path, to = made(case, tmp_path)
    old, new = both(path, to)
    count = calls_of(path, to, keep=keep)
    for point in range(count):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(CannotWriteError) as caught, Stopping(point, fail, torn=torn, once=True):
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


def test_not_even_going_back_works(tmp_path: Path) -> None:
    """All calls fail from one on: the journal stays, and the next command puts the file back."""
    path, to = made("append", tmp_path)
    old, new = both(path, to)

    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    outcomes = set()
    for point in range(calls_of(path, to, keep=False)):
        path.write_bytes(old)
        changes, seen = planned(path, to)
        with pytest.raises(CannotWriteError) as caught, Stopping(point, fail, torn=True):
            apply(str(path), changes, seen)
        outcomes.add(caught.value.what.partition("; ")[2])
        recover(path)
        assert path.read_bytes() in (old, new)
        Path(f"{journals(path)[0]}-new").unlink(missing_ok=True)
    assert len(outcomes) == 3  # nothing changed; left half changed; changed, with its journal


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
def test_a_process_is_killed(case: str, tmp_path: Path) -> None:
    path, to = made(case, tmp_path)
    old, new = both(path, to)
    source = str(Path(transload.__file__).parent.parent)
    ends = set()
    for point in (0, 3, 5, 6, 7, 9, 10, 11, 99):
        path.write_bytes(old)
        command = [sys.executable, "-S", "-c", KILLED, str(path), to, str(point)]
        done = subprocess.run(command, env={"PYTHONPATH": source}, timeout=300, check=False, capture_output=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        ends.add((recover(path), path.read_bytes() == new))
        assert path.read_bytes() in (old, new)
        assert not has_journal(path)
    assert ends >= {("", False), ("restored", False), ("", True)}


@every_case
def test_undo_is_as_safe(case: str, tmp_path: Path) -> None:
    """Undoing is a change like any other; if it is interrupted it can be done again."""
    path, to = made(case, tmp_path)
    old = path.read_bytes()
    retag(path, to, keep_undo=True)
    new, kept = path.read_bytes(), journals(path)[1]
    saved = kept.read_bytes()
    for point in range(40):
        changes, seen = undo_changes(str(path))
        try:
            with Stopping(point, stop, torn=True):
                apply(str(path), changes, seen)
        except Stopped:
            recover(path)
            assert path.read_bytes() in (old, new)
            if kept.exists():
                undo(path)
            assert path.read_bytes() == old
        else:
            break
        path.write_bytes(new)
        kept.write_bytes(saved)
    assert path.read_bytes() == old
    assert 9 < point < 39
