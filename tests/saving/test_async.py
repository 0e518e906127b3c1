"""``transload.save_async``: it saves the state at the time of the call; order; errors; the end of the program."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks
from torch import nn

from transload import saving as module
from transload.errors import NoDirectoryError, SaveError, SaveWarning, UsageError
from transload.saving import save, save_async, snapshot_of
from transload.saving.background import MAX_IN_FLIGHT, Saving, background


@pytest.fixture(autouse=True)
def no_pending_saves() -> Iterator[None]:
    yield
    background.wait()
    background.take_unseen()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no file is written."""
    opened = threading.Event()
    original_run = Saving.run
    monkeypatch.setattr(Saving, "run", lambda self: (opened.wait(30), original_run(self)))
    yield opened
    opened.set()
    background.wait()


def test_changes_after_the_call_are_not_saved(tmp_path: Path, gate: threading.Event) -> None:
    torch.default_generator.manual_seed(0)
    model = nn.Linear(700, 800)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 700)).sum().backward()
    optimizer.step()
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": [1], "view": torch.rand(9)[2:4]}
    save(value, tmp_path / "now.pt")
    future = save_async(value, tmp_path / "later.pt")
    for _ in range(3):
        model(torch.rand(2, 700)).sum().backward()
        optimizer.step()
    value["log"].append(2)
    value["view"].zero_()
    assert not future.done()
    gate.set()
    assert future.result(300) is None
    one, two = ((tmp_path / name).read_bytes() for name in ("now.pt", "later.pt"))
    assert one[: one.index(b".transload")] == two[: two.index(b".transload")]


def test_storages_of_every_size_are_saved(tmp_path: Path) -> None:
    value = [torch.rand(size) for size in (0, 1, 4000, 5000, 100_000, 3_000_000, 20_000_000)]
    save_async(value, tmp_path / "a.pt").result(60)
    for one, two in zip(value, torch.load(tmp_path / "a.pt"), strict=True):
        assert torch.equal(one, two)


def test_compact_saves_only_the_bytes_of_the_views(tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    save_async({"a": base[5:9], "b": base[100_000:200_000]}, tmp_path / "a.pt", compact=True).result(300)
    loaded = torch.load(tmp_path / "a.pt")
    assert loaded["a"].tolist() == [5, 6, 7, 8]
    assert torch.equal(loaded["b"], base[100_000:200_000])
    assert (tmp_path / "a.pt").stat().st_size < 500_000


def test_last_of_many_saves_to_one_path_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for number in range(10):
        future = save_async({"n": torch.tensor(number)}, path)
    future.result(300)
    assert int(torch.load(path)["n"]) == 9
    save_async({"n": torch.tensor(10)}, path)
    save({"n": torch.tensor(11)}, path)
    assert int(torch.load(path)["n"]) == 11
    assert os.listdir(tmp_path) == ["a.pt"]


def test_save_waits_for_background_saves_to_the_same_file(tmp_path: Path, gate: threading.Event) -> None:
    path, link = tmp_path / "a.pt", tmp_path / "link.pt"
    link.symlink_to(path)
    save_async({"n": torch.tensor(1)}, path)
    save({"n": torch.tensor(5)}, tmp_path / "other.pt")  # no need to wait
    threading.Timer(0.2, gate.set).start()
    save({"n": torch.tensor(2)}, link)
    assert int(torch.load(path)["n"]) == 2


def test_number_of_saves_in_flight_is_limited(tmp_path: Path, gate: threading.Event) -> None:
    for number in range(MAX_IN_FLIGHT):
        save_async({}, tmp_path / f"{number}.pt")
    threading.Timer(0.3, gate.set).start()
    started = time.monotonic()
    save_async({}, tmp_path / "last.pt").result(300)
    assert time.monotonic() - started > 0.2
    assert len(list(tmp_path.iterdir())) == MAX_IN_FLIGHT + 1


def test_future_raises_the_error(tmp_path: Path) -> None:
    future = save_async({}, tmp_path / "gone" / "a.pt")
    with pytest.raises(NoDirectoryError):
        future.result(300)
    assert isinstance(future.exception(), NoDirectoryError)
    assert not future.cancel()
    save({}, tmp_path / "a.pt")  # the error has been seen


@pytest.mark.parametrize("call", [save, save_async], ids=["save", "save_async"])
def test_unseen_error_is_raised_by_the_next_call(tmp_path: Path, call: Any) -> None:
    save_async({}, tmp_path / "gone" / "a.pt")
    background.wait()
    with pytest.raises(SaveError, match="an earlier save in the background failed") as caught:
        call({}, tmp_path / "b.pt")
    assert isinstance(caught.value.__cause__, NoDirectoryError)
    assert "gone" in caught.value.where
    call({}, tmp_path / "b.pt")
    background.wait()
    assert (tmp_path / "b.pt").exists()


def test_usage_and_pickling_errors_are_raised_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_async({}, tmp_path / "a.pt", device="tpu")
    with pytest.raises(SaveError):
        save_async({"f": lambda: 1}, tmp_path / "a.pt")
    with pytest.warns(SaveWarning, match="compact=True"):
        save_async(torch.rand(1_000_000)[:3], tmp_path / "a.pt").result(300)


def test_save_async_to_a_file_object(tmp_path: Path) -> None:
    with (tmp_path / "a.pt").open("wb") as file:
        save_async({"n": torch.tensor(3)}, file).result(300)
    assert int(torch.load(tmp_path / "a.pt")["n"]) == 3


def test_save_waits_for_background_saves_to_the_same_file_object(gate: threading.Event) -> None:
    file = io.BytesIO()
    save_async({"n": torch.tensor(1)}, file)
    threading.Timer(0.2, gate.set).start()
    save({"n": torch.tensor(2)}, file)
    length = file.getvalue().rindex(b"PK\x05\x06") - file.getvalue().index(b"PK\x05\x06")
    assert torch.load(io.BytesIO(file.getvalue()[:-length]))["n"] == 1
    assert torch.load(io.BytesIO(file.getvalue()[-length:]))["n"] == 2


def test_done_callback_may_save(tmp_path: Path, gate: threading.Event) -> None:
    """It runs in the writing thread, so no other thread would write what it waits for."""
    called: list[str] = []
    first = save_async({"n": torch.tensor(0)}, tmp_path / "a.pt")
    save_async({"n": torch.tensor(1)}, tmp_path / "a.pt")

    def save_more(_: Any) -> None:
        for number in range(2, 5):
            save_async({"n": torch.tensor(number)}, tmp_path / "b.pt")
        save({"n": torch.tensor(5)}, tmp_path / "b.pt")
        save({"n": torch.tensor(6)}, tmp_path / "a.pt")
        called.append("done")

    first.add_done_callback(save_more)
    gate.set()
    background.wait()
    assert called == ["done"]
    assert (int(torch.load(tmp_path / "a.pt")["n"]), int(torch.load(tmp_path / "b.pt")["n"])) == (6, 5)


def test_progress_callback_may_save(tmp_path: Path, gate: threading.Event) -> None:
    def save_more(_: int, __: int) -> None:
        save({"n": torch.tensor(2)}, tmp_path / "b.pt")

    save_async({"n": torch.tensor(0)}, tmp_path / "a.pt", progress=save_more)
    save_async({"n": torch.tensor(1)}, tmp_path / "b.pt")
    gate.set()
    background.wait()
    assert int(torch.load(tmp_path / "b.pt")["n"]) == 2


def test_failed_save_keeps_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(list[Any]):
        """A list that can be referenced weakly."""

    references: list[weakref.ref[Copies]] = []

    def recording_snapshot_of(storages: Any) -> Copies:
        copies = Copies(snapshot_of(storages))
        references.append(weakref.ref(copies))
        return copies

    monkeypatch.setattr(module, "snapshot_of", recording_snapshot_of)
    gc.disable()
    try:
        future = save_async({"w": torch.rand(10)}, tmp_path / "gone" / "a.pt")
        assert isinstance(future.exception(30), NoDirectoryError)
        background.wait()
        assert references[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_failing_done_callback_does_not_stop_other_saves(error: Any, tmp_path: Path, gate: threading.Event) -> None:
    def fail(_: Any) -> None:
        raise error

    save_async({}, tmp_path / "a.pt").add_done_callback(fail)
    last = save_async({}, tmp_path / "b.pt")
    gate.set()
    last.result(300)


def test_caller_saves_when_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert save_async({"n": torch.arange(2_000_000)}, tmp_path / "a.pt").done()
    assert torch.load(tmp_path / "a.pt")["n"][-1] == 1_999_999
    with pytest.raises(NoDirectoryError):
        save_async({}, tmp_path / "gone" / "a.pt").result(0)


def test_no_thread_remains_after_saving(tmp_path: Path) -> None:
    save_async({"n": torch.rand(3_000_000)}, tmp_path / "a.pt").result(300)
    background.wait()
    deadline = time.monotonic() + 100
    while any("transload" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    return forks.run("-c", program, path, env={**os.environ, "PYTHONPATH": str(forks.SOURCE)})


ENDING = """
import sys, torch
from transload.saving import save_async
for number in range(3):
    save_async({"w": torch.full((2_000_000,), float(number))}, sys.argv[1])
"""
AT_EXIT = """
import atexit, sys, torch
from transload.saving import save_async
atexit.register(lambda: save_async({"w": torch.full((2_000_000,), 2.0)}, sys.argv[-1]))
"""


def test_saves_before_and_during_exit_are_completed(tmp_path: Path) -> None:
    """Saves started before exit, and by a function registered with atexit."""
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE)}
    process = subprocess.run(
        [sys.executable, "-c", f"{AT_EXIT}{ENDING}", "ending.pt", "at_exit.pt"],
        capture_output=True, text=True, check=False, timeout=300, env=env, cwd=tmp_path,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    for name in ("ending.pt", "at_exit.pt"):
        assert float(torch.load(tmp_path / name)["w"][-1]) == 2.0


def test_failures_before_and_during_exit_are_printed(tmp_path: Path) -> None:
    """Saves started before exit, and by a function registered with atexit."""
    process = run(f"{AT_EXIT}save_async({{}}, sys.argv[1])", tmp_path / "gone" / "a.pt")
    assert process.stderr.count("an earlier save in the background failed") == 2
    assert process.stderr.count("its directory does not exist") == 2


IMPORTING = """
import builtins, sys, threading, torch
from transload.saving import save_async
true, found = builtins.__import__, []
def watched(name, *rest, **more):
    if name not in sys.modules and threading.current_thread() is not threading.main_thread():
        found.append(name)
    return true(name, *rest, **more)
builtins.__import__ = watched
save_async({"w": torch.rand(3_000_000), "b": torch.rand(3)}, sys.argv[1]).result()
save_async({"w": torch.rand(3)}, sys.argv[1]).result()
print(*found)
"""


def test_background_threads_import_nothing(tmp_path: Path) -> None:
    """A child forked meanwhile would wait forever when it imports the same module."""
    process = run(IMPORTING, tmp_path / "a.pt")
    assert (process.returncode, process.stderr, process.stdout) == (0, "", "\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_saves_in_its_own_background(tmp_path: Path, gate: threading.Event) -> None:
    save_async({"n": torch.tensor(1)}, tmp_path / "parent.pt")
    child = os.fork()
    if not child:
        exit_code = 1
        try:
            gate.set()
            save_async({"n": torch.tensor(2)}, tmp_path / "child.pt").result(20)
            exit_code = 0
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    background.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child.pt", "parent.pt"]


def test_relative_path_is_resolved_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    future = save_async({"w": torch.arange(3)}, "a.pt")
    monkeypatch.chdir(tmp_path / "other")
    future.result()
    assert torch.equal(torch.load(tmp_path / "one" / "a.pt")["w"], torch.arange(3))
    assert list((tmp_path / "other").iterdir()) == []
