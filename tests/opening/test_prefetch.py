"""Reading into the page cache before a load."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import transload
from transload.io.memory import libc
from transload.opening import engine, prefetch

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv, and nothing is read")
DEADLINE = 60.0
MIB = 1 << 20


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file counts as cached, whatever the file system says."""
    monkeypatch.setattr(prefetch, "_helps", lambda _: True)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in small pieces, each of which takes a while."""
    skim = prefetch._skim

    def slow(*args: Any) -> int:
        time.sleep(0.2)
        return skim(*args)

    monkeypatch.setattr(prefetch, "_PIECE", MIB)
    monkeypatch.setattr(prefetch, "_skim", slow)


def saved(path: Path, mib: int = 20) -> Path:
    torch.save({"w": torch.arange(mib * MIB // 4, dtype=torch.float32)}, path)
    return path


def cached(path: Path) -> float:
    """The fraction of a file in the page cache; reading a sample would make the system read more."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc().mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
        del first  # or the mapping could not be closed
    assert not failed
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.usefixtures("disk_calls")  # only what is on the disk can be dropped
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops a file from the page cache")
def test_cold_file_is_cached_afterwards(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) > 0:
        pytest.skip("this file system keeps the file in memory")
    assert transload.prefetch(path).wait(DEADLINE)
    assert cached(path) == 1
    again = transload.prefetch(str(path))
    assert again.wait(DEADLINE)
    assert again.nbytes == 0, "it is cached already"


@pytest.mark.usefixtures("cold")
def test_all_bytes_are_read_in_any_number_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PIECE", 3 * MIB + 77)
    monkeypatch.setattr(prefetch, "_SCRATCH", 100_000)
    path = saved(tmp_path / "model.pt")
    reading = transload.prefetch(path)
    assert reading.wait(DEADLINE)
    assert reading.nbytes == path.stat().st_size
    assert repr(reading) == f"<Prefetch of {str(path)!r}: ended, {path.stat().st_size:,} bytes>"


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_shards_are_read_and_what_is_beside_them_is_not(tmp_path: Path, name: str) -> None:
    for index in range(2):
        saved(tmp_path / f"pytorch_model-{index + 1:05}-of-00002.bin", 1)
        (tmp_path / f"pytorch_model-{index + 1:05}-of-00002.bin").rename(tmp_path / f"shard{index}.bin")
    weights = {"weight_map": {"w": "shard0.bin", "v": "shard1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(weights), "utf-8")
    (tmp_path / "other.bin").write_bytes(bytes(5 * MIB))
    reading = transload.prefetch(tmp_path / (name and "pytorch_model.bin.index.json"))
    assert reading.wait(DEADLINE)
    sizes = [(tmp_path / f"shard{index}.bin").stat().st_size for index in range(2)]
    index_size = (tmp_path / "pytorch_model.bin.index.json").stat().st_size
    assert reading.nbytes in (sum(sizes), sum(sizes) + index_size)


@pytest.mark.usefixtures("cold")
def test_few_of_many_shards_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load needs descriptors, too."""
    names = {f"w{index}": f"shard{index}.bin" for index in range(60)}
    for key, name in names.items():
        torch.save({key: torch.ones(3)}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}), "utf-8")
    before, most = len(os.listdir("/dev/fd")), 0
    skim = prefetch._skim

    def count(*args: Any) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/dev/fd")))
        return skim(*args)

    monkeypatch.setattr(prefetch, "_skim", count)
    reading = transload.prefetch(tmp_path)
    assert reading.wait(DEADLINE)
    assert reading.nbytes == sum((tmp_path / name).stat().st_size for name in names.values())
    assert before < most < before + 40


@pytest.mark.parametrize(
    "path",
    ["missing.pt", "", "https://127.0.0.1:1/model.pt", "\0", os.devnull],
    ids=["missing", "empty folder", "URL", "no path", "device"],
)
def test_nothing_is_raised_and_nothing_printed(path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reading = transload.prefetch(path if ":" in path or path == os.devnull else f"{tmp_path}/{path}")
    assert reading.wait(DEADLINE)
    assert reading.nbytes == 0
    assert capfd.readouterr() == ("", "")


def test_path_may_be_bytes_and_a_password_is_not_shown(tmp_path: Path) -> None:
    as_bytes: Any = os.fsencode(tmp_path)
    assert transload.prefetch(as_bytes).path == str(tmp_path)
    assert "https://host/a.pt" in repr(transload.prefetch("https://me:secret@host/a.pt?sign=secret"))
    assert "secret" not in repr(transload.prefetch("https://me:secret@host/a.pt?sign=secret"))


def test_nothing_is_left_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    transload.prefetch(saved(tmp_path / "model.pt"))
    assert prefetch._running == {}


@pytest.mark.usefixtures("cold")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_takes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read are in the parent."""
    path = saved(tmp_path / "model.pt")
    slow_down(monkeypatch)
    reading = transload.prefetch(path)
    while not reading.nbytes:
        time.sleep(0.01)
    with path.open("rb") as file:
        child = os.fork()
        if not child:
            os._exit(prefetch.take_over(file.fileno()))
        assert os.waitpid(child, 0)[1] == 0
        assert prefetch.take_over(file.fileno())
    assert reading.wait(DEADLINE)


FORK = """
import os, signal, sys, threading, time
import transload
import transload.opening.prefetch as prefetch
files = prefetch._files
entered = threading.Event()
def slow(path):
    import importlib.machinery
    # What an import in the thread does: it holds the lock of a module for a while.
    class Slow:
        create_module = staticmethod(lambda *_: None)
        exec_module = staticmethod(lambda *_: (entered.set(), time.sleep(0.3)))
    class Finder:
        def find_spec(name, *_):
            return importlib.machinery.ModuleSpec(name, Slow()) if name == "slowly" else None
    sys.meta_path.append(Finder)
    import slowly
    return files(path)
prefetch._files = slow
reading = transload.prefetch(sys.argv[1])
entered.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    import slowly
    transload.prefetch(sys.argv[1]).wait(10)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not reading.wait(20))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_the_imports_of_the_thread(tmp_path: Path) -> None:
    """The child would wait for ever for the lock of a module."""
    path = saved(tmp_path / "model.pt", 1)
    assert subprocess.run([sys.executable, "-c", FORK, str(path)], timeout=60, check=False).returncode == 0


@pytest.mark.usefixtures("cold")
def test_the_current_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "model.pt", 1)
    monkeypatch.chdir(tmp_path)
    with prefetch._preparing:
        reading = transload.prefetch("model.pt")
        monkeypatch.chdir("/")
    assert reading.wait(DEADLINE)
    assert reading.nbytes == path.stat().st_size
    assert reading.path == "model.pt"


@pytest.mark.usefixtures("cold")
def test_at_most_half_of_the_memory_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "model.pt")
    monkeypatch.setattr(prefetch, "_PIECE", MIB)
    monkeypatch.setattr(prefetch, "memory", lambda: (9 * MIB, -1))
    reading = transload.prefetch(path)
    assert reading.wait(DEADLINE)
    assert reading.nbytes == 4 * MIB


@pytest.mark.usefixtures("cold")
def test_load_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prefetch reads at the moment is not read a second time past the page cache."""
    path = saved(tmp_path / "model.pt", 40)
    slow_down(monkeypatch)
    monkeypatch.setattr(engine, "cached_fraction", lambda *_: 0.0)
    choices: list[engine.Choice] = []
    choose = engine.choose

    def record(*args: Any) -> engine.Choice:
        choices.append(choose(*args))
        return choices[-1]

    monkeypatch.setattr(engine, "choose", record)
    reading = transload.prefetch(path)
    while not reading.nbytes:
        time.sleep(0.01)
    loaded = transload.load(path, map_location="cpu")
    assert torch.equal(loaded["w"], torch.arange(10 * MIB, dtype=torch.float32))
    assert reading.wait(DEADLINE)
    assert reading.nbytes < path.stat().st_size
    transload.load(path, map_location="cpu")
    assert [choice.direct for choice in choices] == [False, True]


@pytest.mark.usefixtures("cold")
def test_cancelled_prefetch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    reading = transload.prefetch(saved(tmp_path / "model.pt", 40))
    assert not reading.wait(0)
    reading.cancel()
    assert reading.wait(DEADLINE)
    assert reading.nbytes <= prefetch._THREADS * MIB
    assert not prefetch._running


EXIT = """
import sys, time
import transload
from transload.io.memory import libc
from transload.opening import prefetch
assert not {"torch", "transload.opening.engine", "transload.judge.problems"} & {*sys.modules}
prefetch._helps = lambda _: True
prefetch._skim = lambda *_: time.sleep(100)
transload.prefetch(sys.argv[1])
time.sleep(0.3)
print("ended")
"""


def test_process_ends_while_it_prefetches(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT, str(saved(tmp_path / "model.pt"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


def test_run_prefetches(tmp_path: Path) -> None:
    program = "import sys\nprint('transload.opening.prefetch' in sys.modules, 'torch' in sys.modules)\n"
    (tmp_path / "program.py").write_text(program, "utf-8")
    command = [sys.executable, "-m", "transload", "run", "--prefetch", str(saved(tmp_path / "model.pt"))]
    ended = subprocess.run([*command, "program.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True False\n"), ended.stderr
    command[-1] = "missing.pt"
    ended = subprocess.run([*command, "program.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "missing.pt: there is no such file to prefetch" in ended.stderr
    command[-1] = "https://host/model.pt"
    ended = subprocess.run([*command, "program.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "transload: https://host/model.pt: --prefetch needs a file on this machine, not a URL\n"
