"""A save that fails, or is killed, at every call of the system it makes: the old file or the new one is whole."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks

from transload import saving
from transload.errors import CannotWriteError, FullDiskError, NoDirectoryError, TransloadError
from transload.formats import zip_writer as archive
from transload.saving import save

CALLS = ("open", "fstat", "fchmod", "fchown", "writev", "fsync", "replace", "close")
"""What the system is asked for, from the hidden file to the flushed directory."""


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step)), "b": torch.full((3,), float(step)), "v": torch.full((20_000,), step)}


def whole(path: Path) -> int:
    """Which of the two files is there, every number of it."""
    found = torch.load(path)
    step = int(found["b"][0])
    for name, value in state(step).items():
        assert torch.equal(found[name], value)
    return step


class Faults:
    """The calls of the system, counted; at a number it fails, or the process is killed."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        self.count = 0
        self.at = at
        self.then = then

    def into(self, monkeypatch: Any, *, half: bool = False) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name), half=half))

    def _wrapped(self, name: str, true: Any, *, half: bool) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if half and name == "writev":
                    true(arguments[0], [bytes(arguments[1][0])[: len(arguments[1][0]) // 2]])
                self.then()
            return true(*arguments, **options)

        return call


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a few kilobytes were many megabytes, so that there are many writes."""
    for module, name, value in (
        (archive, "PIECE", 4096), (archive, "SMALL", 1024), (saving, "PIECE", 4096), (saving, "SMALL", 1024),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def points(tmp_path: Path) -> int:
    """Calls that a save to a place with an old file makes."""
    path = tmp_path / "counted.pt"
    save(state(1), path)
    faults = Faults(-1, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        faults.into(patch)
        save(state(2), path)
    path.unlink()
    return faults.count


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("half", [False, True], ids=["nothing of it done", "half of it done"])
def test_a_failure_at_every_call(tmp_path: Path, half: bool) -> None:
    path = tmp_path / "a.pt"
    save(state(1), path)
    count = points(tmp_path)
    print(f"{count} calls of the system")  # noqa: T201 - shown by pytest -s
    assert count > 40
    for at in range(1, count + 1):
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, no_room).into(patch, half=half)
            try:
                save(state(2), path)
                failed = False
            except CannotWriteError:
                failed = True
        step = whole(path)
        assert step == 1 or not failed or at >= count - 3, at  # once it is renamed, it is the new file
        assert [each.name for each in tmp_path.iterdir() if "part" in each.name] == [] or at == 1
        save(state(1), path)
        assert os.listdir(tmp_path) == ["a.pt"]  # noqa: PTH208 - names only


KILL_AT_EACH = """
import os, signal, sys
import pytest, torch
from tests.saving.test_faults import Faults, save, small_writes, state
from transload import saving
from transload.formats import zip_writer as archive
from transload.io import atomic as sinks

archive.PIECE = saving.PIECE = 4096
archive.SMALL = saving.SMALL = 1024
torch.set_num_threads(1)
patch = pytest.MonkeyPatch()
path, count = sys.argv[1], int(sys.argv[2])
new = state(2)
for at in range(1, count + 1):
    child = os.fork()
    if not child:
        Faults(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).into(patch, half=True)
        try:
            save(new, path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    found = torch.load(path)
    step = int(found["b"][0])
    for name, value in state(step).items():
        assert torch.equal(found[name], value), (at, name)
    print(at, os.WIFSIGNALED(status), step, len(os.listdir(os.path.dirname(path))), flush=True)
    save(state(1), path)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], at
"""


@pytest.mark.skipif(os.name == "nt", reason="needs os.fork")
def test_a_kill_at_every_call(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    count = points(tmp_path)
    path = tmp_path / "there" / "a.pt"
    path.parent.mkdir()
    save(state(1), path)
    environ = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = forks.run("-c", KILL_AT_EACH, path, str(count), env=environ)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    print(f"killed at {len(lines)} calls")  # noqa: T201 - shown by pytest -s
    assert len(lines) == count
    assert {line[1] for line in lines[:-1]} == {"True"}
    steps = [int(line[2]) for line in lines]
    assert steps == sorted(steps)  # first the old one, from the rename on the new one
    assert set(steps) == {1, 2}
    assert max(int(line[3]) for line in lines) == 2  # the hidden file beside the old one


# -- real refusals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_more_than() -> Any:
    """A limit for files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_becomes_too_large(tmp_path: Path, no_more_than: Any) -> None:
    path = tmp_path / "a.pt"
    save(state(1), path)
    no_more_than(50_000)
    with pytest.raises(FullDiskError, match="larger than this system allows") as caught:
        save(state(2), path)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EFBIG
    no_more_than(-1)
    assert whole(path) == 1
    assert os.listdir(tmp_path) == ["a.pt"]  # noqa: PTH208 - names only


def test_a_full_disk(tmp_path: Path) -> None:
    there = tmp_path / "small disk"
    there.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if not mount or not umount:
        pytest.skip("needs mount(8)")
    made = [mount, "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(there)]
    if subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        path = there / "a.pt"
        save({"w": torch.zeros(40_000)}, path)
        with pytest.raises(FullDiskError, match="the disk is full"):
            save({"w": torch.ones(60_000)}, path)
        assert not torch.load(path)["w"].any()
        assert os.listdir(there) == ["a.pt"]  # noqa: PTH208 - names only
        save({"w": torch.ones(10_000)}, path)
    finally:
        subprocess.run([umount, str(there)], check=True)


def test_a_directory_that_goes_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    true = os.fsync

    def gone(descriptor: int) -> None:
        true(descriptor)
        for each in there.iterdir():
            each.unlink()
        there.rmdir()

    monkeypatch.setattr(os, "fsync", gone)
    with pytest.raises(NoDirectoryError):
        save(state(1), there / "a.pt")


def test_errors_are_ours_without_atomicity_too(tmp_path: Path) -> None:
    with pytest.raises(NoDirectoryError):
        save(state(1), tmp_path / "gone" / "a.pt", atomic=False)
    if os.path.exists("/dev/full"):  # noqa: PTH110 - not a path to look into
        with pytest.raises(FullDiskError) as caught:
            save(state(1), "/dev/full")
        assert isinstance(caught.value, TransloadError)
