"""Tests in several processes, for ``pytest -n``: forks of one that has imported and collected everything.

Workers of pytest-xdist each import torch and all tests first, and agree on what they found. These take runs of tests
of one module, shorter ones towards the end, and send their reports. Where a worker dies, the test it ran has failed and
another takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from tests import forks


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Take ``-n`` from pytest-xdist, which keeps it where processes cannot be forked."""
    count = config.getoption("numprocesses", None)
    whole = config.getoption("--gpu", default=False) or config.option.usepdb
    if forks.FORKS and isinstance(count, int) and count and not whole:
        config.option.numprocesses = None
        workers = Workers(count)
        config.pluginmanager.register(workers)
        atexit.register(workers.leave)


class Worker:
    """A process that runs tests: ``held`` are those it was given and has not finished, by their places."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.held: deque[int] = deque()

    def end(self) -> int:
        """Kill it if it lives. Its exit code, or minus the signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Workers:
    """A plugin of pytest that runs the tests in so many forks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.session: pytest.Session | None = None
        self.todo: deque[int] = deque()
        self.live: dict[Connection[Any, Any], Worker] = {}

    def leave(self) -> None:
        """End this process as the last thing that is called at its end: to tear down all modules takes seconds."""
        if self.session is not None and not hasattr(sys, "last_value"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.session.exitstatus)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in forks.ONE_THREAD.items():
                patch.setenv(name, value)
            return (yield)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """As pytest's own, which also says what stops it before the first test."""
        self.session = session
        if session.testsfailed or session.config.option.collectonly:
            return None
        if "torch" in sys.modules:
            forks.server("torch")  # one for all workers
        with contextlib.suppress(ImportError):
            from hypothesis.internal.conjecture.providers import _get_local_constants

            _get_local_constants()  # of all sources; in each worker it would take seconds
        gc.freeze()
        self.todo.extend(range(len(session.items)))
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # the tests of several files come at once
        try:
            for _ in range(min(self.count, len(session.items))):
                self.start(session)
            while self.live:
                ready = wait(self.live)
                for connection in [each for each in self.live if each in ready]:
                    self.hear(session, connection)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self.live.values():
                worker.end()
        return True

    def start(self, session: pytest.Session) -> None:
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there may be threads
            pid = os.fork()
        if not pid:
            for connection in (ours, *self.live):
                connection.close()
            work(session, theirs, base / f"worker{os.getpid()}")
        theirs.close()
        self.live[ours] = Worker(pid)

    def share(self, items: list[pytest.Item]) -> list[int]:
        """The places of the next tests, all of one module, so that its fixtures are made once."""
        taken: list[int] = []
        size = max(1, len(self.todo) // (4 * self.count))
        while self.todo and len(taken) < size:
            if taken and items[self.todo[0]].path != items[taken[0]].path:
                break
            taken.append(self.todo.popleft())
        return taken

    def hear(self, session: pytest.Session, connection: Connection[Any, Any]) -> None:
        """Take one message of a worker: the reports of a test, or the question for more, which has none."""
        worker = self.live[connection]
        hook = session.config.hook
        try:
            told = connection.recv()
        except EOFError:
            del self.live[connection]
            code = worker.end()
            if worker.held:
                failed = session.items[worker.held.popleft()]
                words = f"the worker that ran it ended with exit code {code}"
                hook.pytest_runtest_logreport(
                    report=pytest.TestReport(failed.nodeid, failed.location, {}, "failed", words, "call")
                )
                self.todo.extendleft(reversed(worker.held))
                self.start(session)
            return
        if not told:
            given = self.share(session.items)
            worker.held.extend(given)
            with contextlib.suppress(OSError):  # it is dead; the next message is its end
                connection.send(given)
            return
        item = session.items[worker.held.popleft()]
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in told:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# -- in a worker -------------------------------------------------------------------------------------------------------


class Reporter:
    """A plugin that sends what the terminal would show."""

    def __init__(self, config: pytest.Config, connection: Connection[Any, Any]) -> None:
        self.config = config
        self.connection = connection
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self.connection.send(self.reports)
        self.reports.clear()


def work(session: pytest.Session, connection: Connection[Any, Any], folder: Any) -> NoReturn:
    """Run tests until there are no more, and end this process without what its parent does at its end."""
    code = 0
    try:
        atexit._clear()
        os.environ["PYTEST_XDIST_WORKER"] = folder.name
        folder.mkdir(mode=0o700)
        config = session.config
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture._global_capturing is not None:  # its files are the parent's
            capture._global_capturing.stop_capturing()
            capture._global_capturing = None
            capture.start_global_capturing()
            capture.suspend_global_capture()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Reporter(config, connection))
        run(session, connection)
    except (KeyboardInterrupt, BrokenPipeError):
        code = 2
    except BaseException:  # noqa: BLE001 - this is the last
        traceback.print_exc(file=sys.__stderr__)
        code = 3
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def run(session: pytest.Session, connection: Connection[Any, Any]) -> None:
    queue: deque[int] = deque()
    more = True
    while True:
        while more and len(queue) < 2:  # the fixtures that the next test needs are kept
            connection.send([])
            given = connection.recv()
            queue.extend(given)
            more = bool(given)
        if not queue:
            return
        item = session.items[queue.popleft()]
        following = session.items[queue[0]] if queue else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
