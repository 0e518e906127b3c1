"""Files that appear completely or not at all: permissions, links, leftover files and system errors."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from transload.errors import CannotWriteError, ForbiddenWriteError, NoDirectoryError, TransloadError
from transload.io import atomic
from transload.io.atomic import AtomicFile, InPlaceFile, cannot_write, is_atomic, remove_leftovers

pytestmark = pytest.mark.usefixtures("disk_calls")  # files really are flushed
as_user = pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root can write anywhere")
posix = pytest.mark.skipif(os.name == "nt", reason="permissions and links work differently on Windows")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 warns about threads


def can_change_user() -> bool:
    """Whether this process can become any user; root in a container may not be able to."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if not child:
        exit_code = 1
        try:
            os.setgroups([2000])
            os.setresgid(1002, 1002, 1002)
            os.setresuid(65534, 65534, 65534)
            exit_code = 0
        finally:
            os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def write_atomically(path: Path, data: bytes) -> None:
    with AtomicFile(str(path)) as file:
        os.write(file.descriptor, data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_file_replaces_the_old_one_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with AtomicFile(str(path)) as file:
        os.write(file.descriptor, b"new")
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.pt"]


def test_exception_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), AtomicFile(str(path)) as file:  # noqa: PT012 - the test itself raises
        os.write(file.descriptor, b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.pt"]


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_mode_of_a_new_file_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a.pt", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o666 & ~mask


@posix
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o640], ids=oct)
def test_mode_of_the_old_file_is_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
@forks
def test_group_of_the_old_file_is_kept_by_another_user() -> None:
    """In a folder shared by a group, files keep the group, whichever member saves them."""
    if not can_change_user():
        pytest.skip("needs root and a second user")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        path.write_bytes(b"old")
        for shared in (Path(folder), path):
            os.chown(shared, 1001, 2000)
            shared.chmod(0o770)
        child = os.fork()
        if not child:
            exit_code = 1
            try:
                os.setgroups([2000])
                os.setresgid(1002, 1002, 1002)
                os.setresuid(1002, 1002, 1002)
                write_atomically(path, b"new")
                exit_code = 0
            finally:
                os._exit(exit_code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes() == b"new"
        assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (2000, 0o770)


@posix
def test_symlinks_are_kept_and_their_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, second = tmp_path / "there" / "true.pt", tmp_path / "link.pt", tmp_path / "second.pt"
    link.symlink_to("there/true.pt")
    second.symlink_to(link)
    for data in (b"first", b"then"):  # the link dangles before the first write
        write_atomically(second, data)
        assert target.read_bytes() == data
    assert link.is_symlink()
    assert second.is_symlink()
    assert names(target.parent) == ["true.pt"]


@posix
def test_circular_symlinks_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CannotWriteError, match="form a loop"):
        write_atomically(tmp_path / "a", b"")


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoDirectoryError, match="its directory does not exist") as caught:
        write_atomically(tmp_path / "gone" / "a.pt", b"")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path / "gone" / "a.pt") in str(caught.value)


def test_directory_where_no_file_can_be_created_is_not_called_missing(tmp_path: Path) -> None:
    error = cannot_write(FileNotFoundError(errno.ENOENT, ""), str(tmp_path / "a.pt"))  # as in /proc
    assert "no file can be created there" in error.what
    assert "mkdir" not in error.fix


def test_directory_as_target_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError, match="it is a directory"):
        write_atomically(tmp_path, b"")
    with pytest.raises(CannotWriteError, match="it is a directory"):
        InPlaceFile(str(tmp_path))


def test_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NoDirectoryError, match="is a file, not a directory"):
        write_atomically(tmp_path / "file" / "a.pt", b"")


@posix
def test_file_without_write_permission_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for any user but root
    with pytest.raises(ForbiddenWriteError, match="permission denied"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@as_user
def test_directory_without_write_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ForbiddenWriteError):
            write_atomically(tmp_path / "a.pt", b"new")
    finally:
        tmp_path.chmod(0o755)


@posix
@forks
def test_user_without_permission_cannot_replace_a_file() -> None:
    """root can write anywhere, so this runs as the user ``nobody``."""
    if not can_change_user():
        pytest.skip("needs root and a second user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "a.pt"
        path.write_bytes(b"old")
        child = os.fork()
        if not child:
            exit_code = 1
            try:
                os.setresuid(65534, 65534, 65534)
                write_atomically(path, b"new")
            except PermissionError:
                exit_code = 0
            finally:
                os._exit(exit_code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes() == b"old"


def test_long_file_name_works(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125 + ".pt")  # 253 bytes
    write_atomically(path, b"new")
    write_atomically(path, b"newer")
    assert names(tmp_path) == [path.name]


def test_every_errno_becomes_a_transload_error() -> None:
    for number in errno.errorcode:
        error = cannot_write(OSError(number, os.strerror(number)), "x.pt")
        assert isinstance(error, TransloadError)
        assert isinstance(error, RuntimeError)
        assert error.errno == number


@posix
def test_pipes_and_devices_are_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_atomic(str(pipe))
    assert not is_atomic(os.devnull)
    assert is_atomic(str(tmp_path / "nothing"))
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    with InPlaceFile(str(pipe)) as file:
        os.write(file.descriptor, b"through")
    reader.join()
    assert received == [b"through"]


KILLED = """
import os, signal, sys
from transload.io.atomic import AtomicFile
with AtomicFile(sys.argv[1]) as file:
    os.write(file.descriptor, b"half")
    print("there", flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def start_writer(path: Path, action: str) -> subprocess.Popen[bytes]:
    source = str(Path(atomic.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), action],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip


@posix
def test_next_writer_removes_the_files_of_killed_writers(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    for _ in range(2):
        with start_writer(path, "die") as process:
            assert process.wait() == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) >= 2
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.pt"]


@posix
def test_temporary_file_of_a_running_writer_is_kept(tmp_path: Path) -> None:
    """The lock shows that the writer is alive, even if its process is in another container and not visible."""
    path = tmp_path / "a.pt"
    with start_writer(path, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        remove_leftovers(str(path))
        write_atomically(path, b"first")
        assert len(names(tmp_path)) == 2
        process.communicate(b"")
        assert process.returncode == 0
    assert path.read_bytes() == b"half"
    assert names(tmp_path) == ["a.pt"]


@posix
def test_files_that_only_resemble_leftovers_are_kept(tmp_path: Path) -> None:
    kept = [
        ".a.pt.part",
        ".a.pt.12-xyz.part",
        "a.pt.1-00000000.part",
        ".b.pt.1-00000000.part",
        ".a.pt.1-00000000.partial",
    ]
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    write_atomically(tmp_path / "a.pt", b"new")
    assert names(tmp_path) == sorted([*kept, "a.pt"])


@posix
def test_concurrent_writers_all_finish(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    errors: list[BaseException] = []

    def write_repeatedly(data: bytes) -> None:
        try:
            for _ in range(50):
                write_atomically(path, data)
        except BaseException as error:  # noqa: BLE001 - checked by the test
            errors.append(error)

    threads = [threading.Thread(target=write_repeatedly, args=(bytes([65 + number]) * 100,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(path.read_bytes())) == 1
    assert names(tmp_path) == ["a.pt"]


@posix
@pytest.mark.parametrize("low_space", [True, False], ids=["little space", "enough space"])
def test_large_replaced_file_is_closed_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low_space: bool
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"the first, large")
    monkeypatch.setattr(atomic, "_LARGE", 8)
    if low_space:
        monkeypatch.setattr(atomic, "_free", lambda _: 20)
    closing, proceed = threading.Event(), threading.Event()
    close, closed = os.close, []

    def close_slowly(descriptor: int) -> None:
        if threading.current_thread().name == "transload replaced":
            closing.set()
            assert proceed.wait(30)
            closed.append(os.fstat(descriptor).st_nlink)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_slowly)
    write_atomically(path, b"the second, large")
    assert path.read_bytes() == b"the second, large"  # while the first file is still being closed
    assert closing.wait(30)
    assert closed == []
    next_writer = threading.Thread(target=write_atomically, args=(path, b"third"))
    next_writer.start()
    next_writer.join(0.05 if low_space else 30)
    assert path.read_bytes() == (b"the second, large" if low_space else b"third")  # waits only if space is short
    proceed.set()
    next_writer.join()
    assert path.read_bytes() == b"third"
    for thread in threading.enumerate():
        if thread.name == "transload replaced":
            thread.join()  # before the patched os.close is undone
    assert closed == [0, 0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


@posix
def test_replaced_file_is_closed_at_once_when_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_LARGE", 1)
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    before = open_files()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert open_files() == before
