"""Questions asked in a child process: a driver or torch may hang, crash and print, and the doctor may not.

A child tells what it finds step by step, so that it is known how far it came. Every child ends: by itself, at its
deadline, when the ``with`` block is left, or with us; nothing here waits for a process that cannot be killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from transload.diagnose.host import reason
from transload.diagnose.leash import Leash
from transload.diagnose.scripts import source
from transload.machine import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from typing_extensions import Self

    from transload.machine import State

__all__ = ["MARK", "Child", "Outcome", "Question"]

MARK = b"\x1e"
"""Before each line that is said to us; everything else was printed by a library."""

_GRACE = 0.2
"""Seconds to die in after SIGKILL, or to say where it hangs. One that waits inside a driver may never do either."""
_NOISE = 1 << 14
"""Bytes kept of what is printed, which may be without end; enough for Python's stack."""
_LINE = 1 << 16
"""The longest line kept, for the same reason."""
_RECORDS = 4096
_BACKSTOP = 5
"""Seconds after its deadline at which a child ends itself, should its parent be gone and the leash not have held."""

_STACK = re.compile(r"Fatal Python error: |(?:Current thread|Stack).*\(most recent call first\)")
_PLACE = re.compile(r'File "([^"<][^"]*)", line (\d+)')


@dataclass(frozen=True)
class Question:
    """A script of ``probes`` and the world it is to be run in."""

    script: str
    """``ask_cuda``"""
    python: str
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    flags: tuple[str, ...] = ()
    text: str = ""
    """A source of its own, in place of a script of ``probes``."""
    arguments: tuple[str, ...] = ()
    refusal: str = ""
    """Why it is not asked at all; empty where it is."""


@dataclass(frozen=True)
class Outcome:
    """What became of a child."""

    state: State
    """``answered`` only where it said that it was done."""
    records: tuple[dict[str, Any], ...] = ()
    """What it told, in order."""
    noise: str = ""
    """The last of what it and its libraries printed."""
    end: str = ""
    """Why there is no more: ``SIGSEGV``, ``exit status 3``, ``hung``; empty where it was done."""
    seconds: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """All records in one; a later one wins."""
        return {name: value for record in self.records for name, value in record.items()}

    def all(self, name: str) -> list[Any]:
        """What every record with that name says."""
        return [record[name] for record in self.records if name in record]

    @property
    def answer(self) -> Answer:
        """The outcome as a fact: ``hung in cuInit after 5.0 s``."""
        return Answer(self.state, self.detail, round(self.seconds, 3))

    @property
    def detail(self) -> str:
        """Where it ended and why, and its own last words."""
        if self.state in {"answered", "unasked"}:
            return self.end
        place = _PLACE.search(self.noise, len(self.printed))
        at = f" at {place[1]}:{place[2]}" if place else ""
        time = f" after {self.seconds:.1f} s" if self.state == "hung" else ""
        words = " ".join(self.printed[-500:].split())
        return f"{self.end} {self.step}{at}{time}" + (f"; it printed: {words}" if words else "")

    @property
    def printed(self) -> str:
        """Its noise up to Python's stack, which is printed last."""
        stack = _STACK.search(self.noise)
        return self.noise[: stack.start()] if stack else self.noise

    @property
    def step(self) -> str:
        """``in cuInit``, or ``at its start``."""
        doing = self.facts.get("doing", "")
        return f"in {doing}" if doing else "at its start"


class Child:
    """A script at work in another process; ``outcome()`` waits for it, and leaving ``with`` ends it.

    It gets a session of its own, so that Ctrl-C is ours alone and everything it starts can be ended with it; nothing to
    read; and no room for a core dump. Where it cannot be started, that is its outcome.
    """

    def __init__(self, question: Question, seconds: float) -> None:
        self.begun = monotonic()
        self.deadline = self.begun + seconds
        self._last = self.begun
        self._hearing = _Hearing()
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._leash = Leash()
        self._refusal = question.refusal
        if question.refusal:
            return
        try:
            self._process = _start(question, seconds, self._leash)
            threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        except (OSError, ValueError, RuntimeError) as error:  # no such file, a NUL in a variable, no more threads
            self._refusal = f"could not be started: {reason(question.python, error)}"
            self.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process, 0 where it was not started."""
        return self._process.pid if self._process else 0

    def hurry(self, deadline: float) -> None:
        """Let it end by ``deadline``, by the monotonic clock, if that is sooner."""
        self.deadline = min(self.deadline, deadline)

    def ended(self) -> bool:
        """Whether it is done or gone, without waiting."""
        return self._process is None or self._over.is_set() or self._process.poll() is not None

    def outcome(self) -> Outcome:
        """What became of it, at its deadline at the latest."""
        if self._process is None:
            return Outcome("unasked", end=self._refusal)
        while not self.ended() and (left := self.deadline - monotonic()) > 0:
            self._over.wait(min(left, 0.05))
        state, end = self._end(self._process)
        seconds = (monotonic() if state == "hung" else self._last) - self.begun
        if state == "hung":
            self._where(self._process)
        if not self.close():
            end += ", and could not be killed,"
        return Outcome(state, tuple(self._hearing.records), self._hearing.noise(), end, seconds)

    def close(self) -> bool:
        """End it and all it started. False where it does not die: then it is left to itself."""
        ended = self._ended()
        self._leash.let_go()  # not before: what it started would outlive it
        return ended

    def _ended(self) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            return True
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        return process.poll() is not None

    def _listen(self, stream: IO[bytes]) -> None:
        with stream, suppress(OSError, ValueError):
            while data := stream.read(_LINE):
                self._hearing.take(data)
                if self._hearing.done:
                    self._finish()
        self._finish()

    def _finish(self) -> None:
        self._last = self._last if self._over.is_set() else monotonic()
        self._over.set()

    def _end(self, process: subprocess.Popen[bytes]) -> tuple[State, str]:
        if process.poll() is not None and not self._over.wait(_GRACE):  # its last words may still be in the pipe
            self._finish()
        if self._hearing.done:
            return "answered", ""
        with suppress(subprocess.TimeoutExpired):  # it may have closed its output and live on
            return "crashed", _status(process.wait(max(0.0, self.deadline - monotonic())))
        return "hung", "hung"

    def _where(self, process: subprocess.Popen[bytes]) -> None:
        """Have a child that can do so print Python's stack, to be found in its noise."""
        if any("traced" in record for record in self._hearing.records):
            with suppress(OSError):
                process.send_signal(signal.SIGUSR1)
            self._over.wait(_GRACE)


class _Hearing:
    """What a child says, told apart from what is printed around it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.done = False
        self._noise = b""
        self._rest = b""

    def take(self, data: bytes) -> None:
        """The next bytes, cut anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _LINE:
            self._rest = self._note(self._rest)

    def noise(self) -> str:
        """The last of what is no record."""
        return (self._noise + self._rest).decode("utf-8", "replace").strip()

    def _line(self, line: bytes) -> None:
        before, _, text = line.partition(MARK)
        record = _record(text)
        self._note(before if record else line + b"\n")
        if record and len(self.records) < _RECORDS:
            self.records.append(record)
            self.done = self.done or "done" in record

    def _note(self, noise: bytes) -> bytes:
        self._noise = (self._noise + noise)[-_NOISE:]
        return b""


def _record(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _start(question: Question, seconds: float, leash: Leash) -> subprocess.Popen[bytes]:
    command = [question.python, *question.flags, "-c", question.text or source(question.script)]
    process = subprocess.Popen(  # noqa: S603  the interpreter that the user names is what is examined
        [*command, str(round(seconds + _BACKSTOP)), *map(str, leash.handed() or (-1,)), *question.arguments],
        bufsize=0,
        stdin=subprocess.PIPE,  # and closed at once: /dev/null may be missing where devices are hidden
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(question.environ),
        cwd=question.cwd if os.path.isdir(question.cwd) and os.access(question.cwd, os.X_OK) else None,
        start_new_session=True,
        pass_fds=leash.handed(),
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    leash.give()
    _without_core(process.pid)
    if process.stdin:
        process.stdin.close()
    return process


def _without_core(pid: int) -> None:
    """Nothing is written where the user stands, should it crash."""
    with suppress(ImportError, AttributeError, OSError, ValueError):
        from resource import RLIMIT_CORE, prlimit

        prlimit(pid, RLIMIT_CORE, (0, 0))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # its session is its own, and it is not yet waited for
        else:
            process.kill()


def _status(code: int) -> str:
    """What an exit code says.

    >>> _status(-11), _status(3), _status(0xC0000005)
    ('SIGSEGV', 'exit status 3', 'exit status 0xc0000005')
    """
    if code >= 0:
        return f"exit status {code if code < 256 else hex(code)}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
