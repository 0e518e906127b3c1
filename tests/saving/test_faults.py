"""A save that fails or is killed at any of its system calls leaves the old or the new file intact."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks

from transload import saving
from transload.errors import CannotWriteError, FullDiskError, NoDirectoryError, TransloadError
from transload.formats import zip_writer as archive
from transload.saving import save

WRITE = "writev" if hasattr(os, "writev") else "write"  # on Windows
CALLS = ("open", "fstat", "fchmod", "fchown", WRITE, "fsync", "replace", "close")
"""The system calls of a save, from opening the hidden file to flushing the directory."""


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step)), "b": torch.full((3,), float(step)), "v": torch.full((20_000,), step)}


def intact_step(path: Path) -> int:
    """Which of the two files is there; every number of it is checked."""
    loaded = torch.load(path)
    step = int(loaded["b"][0])
    for name, value in state(step).items():
        assert torch.equal(loaded[name], value)
    return step


class Faults:
    """Counts the system calls; the one with number ``at`` fails, or the process is killed."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        self.count = 0
        self.at = at
        self.then = then

    def into(self, monkeypatch: Any, *, half: bool = False) -> None:
        for name in filter(partial(hasattr, os), CALLS):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name), half=half))

    def _wrapped(self, name: str, original: Any, *, half: bool) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if half and name == WRITE:
                    data = bytes(arguments[1] if name == "write" else arguments[1][0])
                    part = data[: len(data) // 2]
                    original(arguments[0], part if name == "write" else [part])
                self.then()
            return original(*arguments, **options)

        return call


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that a few kilobytes need many writes."""
    for module, name, value in (
        (archive, "PIECE", 4096), (archive, "SMALL", 1024), (saving, "PIECE", 4096), (saving, "SMALL", 1024),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def count_calls(tmp_path: Path) -> int:
    """The number of system calls of a save over an old file."""
    path = tmp_path / "counted.pt"
    save(state(1), path)
    faults = Faults(-1, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        faults.into(patch)
        save(state(2), path)
    path.unlink()
    return faults.count


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("half", [False, True], ids=["nothing written", "half written"])
def test_failure_at_any_system_call_leaves_an_intact_file(tmp_path: Path, half: bool) -> None:
    path = tmp_path / "a.pt"
    save(state(1), path)
    count = count_calls(tmp_path)
    print(f"{count} system calls")  # noqa: T201 - shown by pytest -s
    assert count > 40
    for at in range(1, count + 1):
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, disk_full).into(patch, half=half)
            try:
                save(state(2), path)
                failed = False
            except CannotWriteError:
                failed = True
        step = intact_step(path)
        assert step == 1 or not failed or at >= count - 3, at  # after the rename, it is the new file
        assert [entry.name for entry in tmp_path.iterdir() if "part" in entry.name] == [] or at == 1
        save(state(1), path)
        assert os.listdir(tmp_path) == ["a.pt"]


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
def test_kill_at_any_system_call_leaves_an_intact_file(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    count = count_calls(tmp_path)
    path = tmp_path / "there" / "a.pt"
    path.parent.mkdir()
    save(state(1), path)
    environ = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    process = forks.run("-c", KILL_AT_EACH, path, str(count), env=environ)
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines()]
    print(f"killed at {len(lines)} calls")  # noqa: T201 - shown by pytest -s
    assert len(lines) == count
    assert {line[1] for line in lines[:-1]} == {"True"}
    steps = [int(line[2]) for line in lines]
    assert steps == sorted(steps)  # first the old one, from the rename on the new one
    assert set(steps) == {1, 2}
    assert max(int(line[3]) for line in lines) == 2  # the hidden file beside the old one


# -- real errors of the system -----------------------------------------------------------------------------------------


@pytest.fixture
def limit_file_size() -> Any:
    """Limits the size of the files that this process writes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_size_limit_keeps_the_old_file(tmp_path: Path, limit_file_size: Any) -> None:
    path = tmp_path / "a.pt"
    save(state(1), path)
    limit_file_size(50_000)
    with pytest.raises(FullDiskError, match="larger than this system allows") as caught:
        save(state(2), path)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EFBIG
    limit_file_size(-1)
    assert intact_step(path) == 1
    assert os.listdir(tmp_path) == ["a.pt"]


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "small disk"
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if not mount or not umount:
        pytest.skip("needs mount(8)")
    command = [mount, "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        path = folder / "a.pt"
        save({"w": torch.zeros(40_000)}, path)
        with pytest.raises(FullDiskError, match="the disk is full"):
            save({"w": torch.ones(60_000)}, path)
        assert not torch.load(path)["w"].any()
        assert os.listdir(folder) == ["a.pt"]
        save({"w": torch.ones(10_000)}, path)
    finally:
        subprocess.run([umount, str(folder)], check=True)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not remove a directory of an open file")
def test_directory_removed_while_writing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    original_fsync = os.fsync

    def fsync_and_remove_folder(descriptor: int) -> None:
        original_fsync(descriptor)
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()

    monkeypatch.setattr(os, "fsync", fsync_and_remove_folder)
    with pytest.raises(NoDirectoryError):
        save(state(1), folder / "a.pt")


def test_non_atomic_save_raises_transload_errors(tmp_path: Path) -> None:
    with pytest.raises(NoDirectoryError):
        save(state(1), tmp_path / "gone" / "a.pt", atomic=False)
    if os.path.exists("/dev/full"):
        with pytest.raises(FullDiskError) as caught:
            save(state(1), "/dev/full")
        assert isinstance(caught.value, TransloadError)
