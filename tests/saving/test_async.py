"""``transload.save_async``: what is saved is what was there at the call; order; errors; the end of the program."""

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
def settled() -> Iterator[None]:
    yield
    background.wait()
    background.take_unseen()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is shut, no file is written."""
    opened = threading.Event()
    true = Saving.run
    monkeypatch.setattr(Saving, "run", lambda self: (opened.wait(30), true(self)))
    yield opened
    opened.set()
    background.wait()


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, gate: threading.Event) -> None:
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
    assert future.result(30) is None
    one, two = ((tmp_path / name).read_bytes() for name in ("now.pt", "later.pt"))
    assert one[: one.index(b".transload")] == two[: two.index(b".transload")]


def test_storages_of_every_size(tmp_path: Path) -> None:
    value = [torch.rand(size) for size in (0, 1, 4000, 5000, 100_000, 3_000_000, 20_000_000)]
    save_async(value, tmp_path / "a.pt").result(60)
    for one, two in zip(value, torch.load(tmp_path / "a.pt"), strict=True):
        assert torch.equal(one, two)


def test_views_are_cut_out_of_what_is_copied(tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    save_async({"a": base[5:9], "b": base[100_000:200_000]}, tmp_path / "a.pt", compact=True).result(30)
    again = torch.load(tmp_path / "a.pt")
    assert again["a"].tolist() == [5, 6, 7, 8]
    assert torch.equal(again["b"], base[100_000:200_000])
    assert (tmp_path / "a.pt").stat().st_size < 500_000


def test_the_last_of_many_to_one_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for number in range(10):
        future = save_async({"n": torch.tensor(number)}, path)
    future.result(30)
    assert int(torch.load(path)["n"]) == 9
    save_async({"n": torch.tensor(10)}, path)
    save({"n": torch.tensor(11)}, path)
    assert int(torch.load(path)["n"]) == 11
    assert os.listdir(tmp_path) == ["a.pt"]  # noqa: PTH208 - names only


def test_a_plain_save_waits_for_those_to_its_path_by_any_name(tmp_path: Path, gate: threading.Event) -> None:
    path, link = tmp_path / "a.pt", tmp_path / "link.pt"
    link.symlink_to(path)
    save_async({"n": torch.tensor(1)}, path)
    save({"n": torch.tensor(5)}, tmp_path / "other.pt")  # no need to wait
    threading.Timer(0.2, gate.set).start()
    save({"n": torch.tensor(2)}, link)
    assert int(torch.load(path)["n"]) == 2


def test_few_are_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    for number in range(MAX_IN_FLIGHT):
        save_async({}, tmp_path / f"{number}.pt")
    threading.Timer(0.3, gate.set).start()
    begun = time.monotonic()
    save_async({}, tmp_path / "last.pt").result(30)
    assert time.monotonic() - begun > 0.2
    assert len(list(tmp_path.iterdir())) == MAX_IN_FLIGHT + 1


def test_the_future_raises_what_went_wrong(tmp_path: Path) -> None:
    future = save_async({}, tmp_path / "gone" / "a.pt")
    with pytest.raises(NoDirectoryError):
        future.result(30)
    assert isinstance(future.exception(), NoDirectoryError)
    assert not future.cancel()
    save({}, tmp_path / "a.pt")  # it has been told


@pytest.mark.parametrize("call", [save, save_async], ids=["save", "save_async"])
def test_an_error_nobody_has_seen_is_raised_by_the_next_call(tmp_path: Path, call: Any) -> None:
    save_async({}, tmp_path / "gone" / "a.pt")
    background.wait()
    with pytest.raises(SaveError, match="an earlier save in the background failed") as caught:
        call({}, tmp_path / "b.pt")
    assert isinstance(caught.value.__cause__, NoDirectoryError)
    assert "gone" in caught.value.where
    call({}, tmp_path / "b.pt")
    background.wait()
    assert (tmp_path / "b.pt").exists()


def test_what_is_wrong_at_once_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_async({}, tmp_path / "a.pt", device="tpu")
    with pytest.raises(SaveError):
        save_async({"f": lambda: 1}, tmp_path / "a.pt")
    with pytest.warns(SaveWarning, match="compact=True"):
        save_async(torch.rand(1_000_000)[:3], tmp_path / "a.pt").result(30)


def test_to_a_file_object(tmp_path: Path) -> None:
    with (tmp_path / "a.pt").open("wb") as file:
        save_async({"n": torch.tensor(3)}, file).result(30)
    assert int(torch.load(tmp_path / "a.pt")["n"]) == 3


def test_a_plain_save_waits_for_those_to_its_file_object(gate: threading.Event) -> None:
    held = io.BytesIO()
    save_async({"n": torch.tensor(1)}, held)
    threading.Timer(0.2, gate.set).start()
    save({"n": torch.tensor(2)}, held)
    length = held.getvalue().rindex(b"PK\x05\x06") - held.getvalue().index(b"PK\x05\x06")
    assert torch.load(io.BytesIO(held.getvalue()[:-length]))["n"] == 1
    assert torch.load(io.BytesIO(held.getvalue()[-length:]))["n"] == 2


def test_a_function_that_is_called_when_a_save_is_done_may_save(tmp_path: Path, gate: threading.Event) -> None:
    """It runs in the thread that writes: what it waits for, nobody else would write."""
    called: list[str] = []
    first = save_async({"n": torch.tensor(0)}, tmp_path / "a.pt")
    save_async({"n": torch.tensor(1)}, tmp_path / "a.pt")

    def more(_: Any) -> None:
        for number in range(2, 5):
            save_async({"n": torch.tensor(number)}, tmp_path / "b.pt")
        save({"n": torch.tensor(5)}, tmp_path / "b.pt")
        save({"n": torch.tensor(6)}, tmp_path / "a.pt")
        called.append("done")

    first.add_done_callback(more)
    gate.set()
    background.wait()
    assert called == ["done"]
    assert (int(torch.load(tmp_path / "a.pt")["n"]), int(torch.load(tmp_path / "b.pt")["n"])) == (6, 5)


def test_a_function_that_is_told_the_progress_may_save(tmp_path: Path, gate: threading.Event) -> None:
    def more(_: int, __: int) -> None:
        save({"n": torch.tensor(2)}, tmp_path / "b.pt")

    save_async({"n": torch.tensor(0)}, tmp_path / "a.pt", progress=more)
    save_async({"n": torch.tensor(1)}, tmp_path / "b.pt")
    gate.set()
    background.wait()
    assert int(torch.load(tmp_path / "b.pt")["n"]) == 2


def test_a_save_that_failed_holds_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(list[Any]):
        """A list that can be referred to weakly."""

    made: list[weakref.ref[Copies]] = []

    def noted(storages: Any) -> Copies:
        found = Copies(snapshot_of(storages))
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(module, "snapshot_of", noted)
    gc.disable()
    try:
        future = save_async({"w": torch.rand(10)}, tmp_path / "gone" / "a.pt")
        assert isinstance(future.exception(30), NoDirectoryError)
        background.wait()
        assert made[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_function_that_fails_stops_nothing(kind: Any, tmp_path: Path, gate: threading.Event) -> None:
    def fail(_: Any) -> None:
        raise kind

    save_async({}, tmp_path / "a.pt").add_done_callback(fail)
    last = save_async({}, tmp_path / "b.pt")
    gate.set()
    last.result(30)


def test_without_threads_the_caller_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert save_async({"n": torch.arange(2_000_000)}, tmp_path / "a.pt").done()
    assert torch.load(tmp_path / "a.pt")["n"][-1] == 1_999_999
    with pytest.raises(NoDirectoryError):
        save_async({}, tmp_path / "gone" / "a.pt").result(0)


def test_no_thread_stays(tmp_path: Path) -> None:
    save_async({"n": torch.rand(3_000_000)}, tmp_path / "a.pt").result(30)
    background.wait()
    deadline = time.monotonic() + 10
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


def test_what_a_program_saves_is_there_when_it_has_ended(tmp_path: Path) -> None:
    """Before it ends, and while it does."""
    source = {**os.environ, "PYTHONPATH": str(forks.SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", f"{AT_EXIT}{ENDING}", "ending.pt", "at_exit.pt"],
        capture_output=True, text=True, check=False, timeout=120, env=source, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("ending.pt", "at_exit.pt"):
        assert float(torch.load(tmp_path / name)["w"][-1]) == 2.0


def test_a_program_that_ends_tells_what_failed(tmp_path: Path) -> None:
    """Before it ends, and while it does."""
    done = run(f"{AT_EXIT}save_async({{}}, sys.argv[1])", tmp_path / "gone" / "a.pt")
    assert done.stderr.count("an earlier save in the background failed") == 2
    assert done.stderr.count("its directory does not exist") == 2


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


def test_nothing_is_imported_in_a_thread(tmp_path: Path) -> None:
    """A child that is forked meanwhile would wait for ever where it imports the same."""
    done = run(IMPORTING, tmp_path / "a.pt")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_has_a_background_of_its_own(tmp_path: Path, gate: threading.Event) -> None:
    save_async({"n": torch.tensor(1)}, tmp_path / "parent.pt")
    child = os.fork()
    if not child:
        answer = 1
        try:
            gate.set()
            save_async({"n": torch.tensor(2)}, tmp_path / "child.pt").result(20)
            answer = 0
        finally:
            os._exit(answer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    background.wait()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["child.pt", "parent.pt"]


def test_a_path_is_meant_from_where_the_program_is_when_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    future = save_async({"w": torch.arange(3)}, "a.pt")
    monkeypatch.chdir(tmp_path / "other")
    future.result()
    assert torch.equal(torch.load(tmp_path / "one" / "a.pt")["w"], torch.arange(3))
    assert list((tmp_path / "other").iterdir()) == []
