"""Files that are there whole or not at all: rights, links, debris, and every error the system can answer."""

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

as_user = pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root can write anywhere")
posix = pytest.mark.skipif(os.name == "nt", reason="permissions and links work differently on Windows")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, says Python 3.12


def is_everybody() -> bool:
    """Whether this process may become any user; root of a container may not be allowed to."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if not child:
        answer = 1
        try:
            os.setgroups([2000])
            os.setresgid(1002, 1002, 1002)
            os.setresuid(65534, 65534, 65534)
            answer = 0
        finally:
            os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def put(path: Path, data: bytes) -> None:
    with AtomicFile(str(path)) as file:
        os.write(file.descriptor, data)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with AtomicFile(str(path)) as file:
        os.write(file.descriptor, b"new")
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.pt"]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), AtomicFile(str(path)) as file:  # noqa: PT012 - the interrupt is the test's own
        os.write(file.descriptor, b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.pt"]


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_a_new_file_has_the_rights_of_any_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        put(tmp_path / "a.pt", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o666 & ~mask


@posix
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o640], ids=oct)
def test_rights_of_the_old_file_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    path.chmod(mode)
    put(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
@forks
def test_the_group_of_the_old_file_is_kept_by_who_does_not_own_it() -> None:
    """In a folder that a group shares, its files stay the group's, whoever of it has saved last."""
    if not is_everybody():
        pytest.skip("needs root and a second user")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        path.write_bytes(b"old")
        for each in (Path(folder), path):
            os.chown(each, 1001, 2000)
            each.chmod(0o770)
        child = os.fork()
        if not child:
            answer = 1
            try:
                os.setgroups([2000])
                os.setresgid(1002, 1002, 1002)
                os.setresuid(1002, 1002, 1002)
                put(path, b"new")
                answer = 0
            finally:
                os._exit(answer)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes() == b"new"
        assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (2000, 0o770)


@posix
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    true, link, second = tmp_path / "there" / "true.pt", tmp_path / "link.pt", tmp_path / "second.pt"
    link.symlink_to("there/true.pt")
    second.symlink_to(link)
    for data in (b"first", b"then"):  # it dangles before the first
        put(second, data)
        assert true.read_bytes() == data
    assert link.is_symlink()
    assert second.is_symlink()
    assert names(true.parent) == ["true.pt"]


@posix
def test_links_in_a_circle_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CannotWriteError, match="circle"):
        put(tmp_path / "a", b"")


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoDirectoryError, match="its directory does not exist") as caught:
        put(tmp_path / "gone" / "a.pt", b"")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path / "gone" / "a.pt") in str(caught.value)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError, match="it is a directory"):
        put(tmp_path, b"")
    with pytest.raises(CannotWriteError, match="it is a directory"):
        InPlaceFile(str(tmp_path))


def test_part_of_the_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NoDirectoryError, match="is a file, not a directory"):
        put(tmp_path / "file" / "a.pt", b"")


@posix
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the answer to anybody but root
    with pytest.raises(ForbiddenWriteError, match="permission denied"):
        put(path, b"new")
    assert path.read_bytes() == b"old"


@as_user
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ForbiddenWriteError):
            put(tmp_path / "a.pt", b"new")
    finally:
        tmp_path.chmod(0o755)


@posix
@forks
def test_without_rights_as_a_user_of_its_own() -> None:
    """root can write anywhere, so this runs as the user nobody."""
    if not is_everybody():
        pytest.skip("needs root and a second user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "a.pt"
        path.write_bytes(b"old")
        child = os.fork()
        if not child:
            answer = 1
            try:
                os.setresuid(65534, 65534, 65534)
                put(path, b"new")
            except PermissionError:
                answer = 0
            finally:
                os._exit(answer)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes() == b"old"


def test_a_long_name_still_fits(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125 + ".pt")  # 253 bytes
    put(path, b"new")
    put(path, b"newer")
    assert names(tmp_path) == [path.name]


def test_every_reason_of_the_system_is_our_error() -> None:
    for number in errno.errorcode:
        error = cannot_write(OSError(number, os.strerror(number)), "x.pt")
        assert isinstance(error, TransloadError)
        assert isinstance(error, RuntimeError)
        assert error.errno == number


@posix
def test_pipes_and_devices_are_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_atomic(str(pipe))
    assert not is_atomic(os.devnull)
    assert is_atomic(str(tmp_path / "nothing"))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with InPlaceFile(str(pipe)) as file:
        os.write(file.descriptor, b"through")
    reader.join()
    assert got == [b"through"]


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


def writer(path: Path, then: str) -> subprocess.Popen[bytes]:
    source = str(Path(atomic.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), then],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip


@posix
def test_what_a_killed_writer_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    for _ in range(2):
        with writer(path, "die") as process:
            assert process.wait() == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) >= 2
    put(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.pt"]


@posix
def test_a_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    """The lock shows that the writer lives, even if its process is not visible, as from another container."""
    path = tmp_path / "a.pt"
    with writer(path, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        remove_leftovers(str(path))
        put(path, b"first")
        assert len(names(tmp_path)) == 2
        process.communicate(b"")
        assert process.returncode == 0
    assert path.read_bytes() == b"half"
    assert names(tmp_path) == ["a.pt"]


@posix
def test_what_only_looks_like_debris_stays(tmp_path: Path) -> None:
    kept = [
        ".a.pt.part",
        ".a.pt.12-xyz.part",
        "a.pt.1-00000000.part",
        ".b.pt.1-00000000.part",
        ".a.pt.1-00000000.partial",
    ]
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    put(tmp_path / "a.pt", b"new")
    assert names(tmp_path) == sorted([*kept, "a.pt"])


@posix
def test_two_writers_at_once_both_finish(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    errors: list[BaseException] = []

    def many(data: bytes) -> None:
        try:
            for _ in range(50):
                put(path, data)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=many, args=(bytes([65 + number]) * 100,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(path.read_bytes())) == 1
    assert names(tmp_path) == ["a.pt"]


@posix
@pytest.mark.parametrize("short", [True, False], ids=["a full disk", "room enough"])
def test_a_large_file_that_is_replaced_is_given_back_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"the first, large")
    monkeypatch.setattr(atomic, "_LARGE", 8)
    if short:
        monkeypatch.setattr(atomic, "_free", lambda _: 20)
    begun, go_on = threading.Event(), threading.Event()
    close, closed = os.close, []

    def slowly(descriptor: int) -> None:
        if threading.current_thread().name == "transload replaced":
            begun.set()
            assert go_on.wait(30)
            closed.append(os.fstat(descriptor).st_nlink)
        close(descriptor)

    monkeypatch.setattr(os, "close", slowly)
    put(path, b"the second, large")
    assert path.read_bytes() == b"the second, large"  # there, while the first one is still being given back
    assert begun.wait(30)
    assert closed == []
    next_one = threading.Thread(target=put, args=(path, b"third"))
    next_one.start()
    next_one.join(0.05 if short else 30)
    assert path.read_bytes() == (b"the second, large" if short else b"third")  # it waits for the space, or does not
    go_on.set()
    next_one.join()
    assert path.read_bytes() == b"third"
    for thread in threading.enumerate():
        if thread.name == "transload replaced":
            thread.join()  # or the second would be closed by a function that is gone
    assert closed == [0, 0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


@posix
def test_without_threads_a_replaced_file_is_closed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_LARGE", 1)
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    before = open_files()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        put(path, b"new")
    assert path.read_bytes() == b"new"
    assert open_files() == before
