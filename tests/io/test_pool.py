"""Tasks in threads: every task runs, errors are raised, and no thread outlives the call."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from transload.io.pool import ThreadPool, aside, each, threads


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("tasks", [0, 1, 500])
def test_every_task_runs_once(count: int, tasks: int) -> None:
    done: list[int] = []
    each(range(tasks), lambda: done.append, count)
    assert sorted(done) == list(range(tasks))


@pytest.mark.parametrize("count", [1, 4])
def test_error_is_raised_after_all_threads_have_stopped(count: int) -> None:
    running = threading.active_count()
    done: list[int] = []

    def run_task(task: int) -> None:
        if task == 5:
            raise ValueError("the fifth")
        done.append(task)

    with pytest.raises(ValueError, match="the fifth"):
        each(range(100_000), lambda: run_task, count)
    assert len(done) < 100_000
    assert threading.active_count() == running


def test_keyboard_interrupt_stops_all_threads() -> None:
    running = threading.active_count()
    caller = threading.current_thread()

    def run_task(_: int) -> None:
        if threading.current_thread() is caller:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each(iter(int, 1), lambda: run_task, 3)  # endless tasks
    assert threading.active_count() == running


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send a signal to one thread")
@pytest.mark.parametrize("times", [1, 3])
def test_interrupt_while_waiting_still_waits_for_the_threads(times: int) -> None:
    main_thread = threading.main_thread()
    barrier = threading.Barrier(2, timeout=30)
    finished: list[int] = []

    def run_task(task: int) -> None:
        if task < 2:
            barrier.wait()  # each thread takes one task, then the main thread only waits
        if threading.current_thread() is not main_thread:
            for _ in range(times):
                time.sleep(0.2)
                signal.pthread_kill(main_thread.ident or 0, signal.SIGINT)
            time.sleep(0.2)
            finished.append(task)

    with pytest.raises(KeyboardInterrupt):
        each(range(2), lambda: run_task, 2)
    assert len(finished) == 1


def test_each_thread_has_its_own_worker() -> None:
    idents: list[int] = []
    barrier = threading.Barrier(3, timeout=30)

    def worker() -> Callable[[int], None]:
        idents.append(threading.get_ident())
        barrier.wait()
        return lambda _: None

    each(range(10), worker, 3)
    assert len(set(idents)) == 3


def test_all_tasks_run_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    done: list[int] = []
    each(range(10), lambda: done.append, 4)
    assert done == list(range(10))


def test_thread_count_is_between_1_and_32() -> None:
    assert 1 <= threads() <= 32


# -- code that notices nothing


def test_what_is_called_aside_returns_and_raises_as_ever() -> None:
    assert aside(lambda: (threading.current_thread() is threading.main_thread(), None)) == (False, None)
    with pytest.raises(ZeroDivisionError) as caught:
        aside(lambda: 1 // 0)
    assert "test_pool" in str(caught.traceback[-1].path)


@pytest.mark.skipif(sys.platform == "win32", reason="a signal to itself ends a process there")
def test_what_is_called_aside_is_left_alone_after_ctrl_c_and_after_an_error() -> None:
    ended = threading.Event()
    start = time.monotonic()
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        aside(lambda: ended.wait(20))

    def fail() -> None:
        raise EOFError

    def wait() -> None:
        aside(lambda: ended.wait(20))

    for works, here in (([wait], fail), ([fail], wait)):
        with pytest.raises(EOFError):
            ThreadPool().run(works, here)
    assert time.monotonic() - start < 5
    ended.set()


def test_what_is_called_aside_is_called_here_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert aside(threading.current_thread) is threading.main_thread()
