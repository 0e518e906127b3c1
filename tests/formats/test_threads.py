"""Tasks in threads: all of them done, errors told, nobody left behind."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from transload.io.pool import each, threads


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("tasks", [0, 1, 500])
def test_every_task_is_done_once(count: int, tasks: int) -> None:
    done: list[int] = []
    each(range(tasks), lambda: done.append, count)
    assert sorted(done) == list(range(tasks))


@pytest.mark.parametrize("count", [1, 4])
def test_an_error_is_raised_when_all_have_stopped(count: int) -> None:
    running = threading.active_count()
    done: list[int] = []

    def do(task: int) -> None:
        if task == 5:
            raise ValueError("the fifth")
        done.append(task)

    with pytest.raises(ValueError, match="the fifth"):
        each(range(100_000), lambda: do, count)
    assert len(done) < 100_000
    assert threading.active_count() == running


def test_an_interrupt_stops_all() -> None:
    running = threading.active_count()
    home = threading.current_thread()

    def do(_: int) -> None:
        if threading.current_thread() is home:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each(iter(int, 1), lambda: do, 3)  # tasks without end
    assert threading.active_count() == running


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send a signal to one thread")
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_while_waiting_waits_for_the_threads(times: int) -> None:
    home = threading.main_thread()
    both = threading.Barrier(2, timeout=30)
    ended: list[int] = []

    def do(task: int) -> None:
        if task < 2:
            both.wait()  # each thread has one of these, and this one has nothing else to do
        if threading.current_thread() is not home:
            for _ in range(times):
                time.sleep(0.2)
                signal.pthread_kill(home.ident or 0, signal.SIGINT)
            time.sleep(0.2)
            ended.append(task)

    with pytest.raises(KeyboardInterrupt):
        each(range(2), lambda: do, 2)
    assert len(ended) == 1


def test_each_thread_has_a_worker_of_its_own() -> None:
    made: list[int] = []
    together = threading.Barrier(3, timeout=30)

    def worker() -> Callable[[int], None]:
        made.append(threading.get_ident())
        together.wait()
        return lambda _: None

    each(range(10), worker, 3)
    assert len(set(made)) == 3


def test_without_threads_it_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    each(range(10), lambda: done.append, 4)
    assert done == list(range(10))


def test_there_is_at_least_one() -> None:
    assert 1 <= threads() <= 32
