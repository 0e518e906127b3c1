"""Questions asked in a child process: a driver or torch may hang, crash or print anything, and the doctor must not.

A child reports its findings step by step, so that the parent knows how far it got. A child ends when it is done, at its
deadline, when the ``with`` block is left, or with this process. Nothing here waits for a process that cannot be killed.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from math import inf
from time import monotonic
from typing import IO, Any

from transload.diagnose.host import Host, reason
from transload.findings import packaged
from transload.frozen import Frozen
from transload.machine import ChildAnswer, State, Unknown

MARK = b"\x1e"  # Marks each line that is meant for the parent; libraries print everything else.

_GRACE = 0.5  # Seconds without a line after which no more output of a dead child is expected.
_DYING = 1.0  # Seconds to wait after SIGKILL: the driver frees the GPU first, and a process inside it may never die.
_NOISE = 1 << 14  # Bytes of other output to keep, since it may be endless; enough for Python's stack.
_LINE = 1 << 16  # The longest line to keep, for the same reason.
_RECORDS = 4096
_LATE = 20.0
"""The most seconds that a deadline moves because the child waited for a processor: on a busy machine it is not hung."""
_BACKSTOP = 5
"""Seconds after the last deadline when a child ends itself if the parent is gone and the lifeline did not work."""
_STDERR = 2  # File descriptors up to this one are replaced in the child.
_POLL = 1.0  # Seconds between two checks of what a child is doing.
_SLOW = 1.0  # Seconds after which to report where a child is.
_IDLE_WORK = 10  # A child that uses fewer clock ticks and pages between two checks counts as idle.

_STACK = re.compile(
    rb"(Fatal Python error: .*|Timeout \([\d:.]+\)!|(?:Stack|(?:Current t|T)hread 0x.*) \(most recent call first\):)$"
)
"""What faulthandler prints before the stack of each thread, the main thread last."""
_CUT_OFF = (b"  File ", b"Timeout (", b"Thread 0x", b"Current thread 0x", b"Stack (")
"""The beginnings of its lines: the last one is incomplete if the child was killed while it printed the stack."""
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'File "([^"<][^"]*)", line (\d+)')
_STANDARD_LIBRARY = re.compile(
    r"/lib(?:64)?/python\d[^/]*/(?!(?:site|dist)-packages/)|^[A-Z]:\\(?:(?!site-packages).)*\\Lib\\(?!.*site-packages)"
)


class Question(Frozen):
    """A script, as ``source`` returns it, and how to run it: in the environment and current directory of ``host``."""

    script: str
    python: str
    host: Host
    flags: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    refusal: str = ""  # Why it cannot be asked; empty if it can.


class Outcome(Frozen):
    """What became of a child."""

    state: State  # ``answered`` only if it reported that it was done.
    records: tuple[dict[str, Any], ...] = ()  # Its reports, in order.
    noise: str = ""  # The end of what it and its libraries printed, without Python's stack.
    end: str = ""  # How it ended: ``SIGSEGV``, ``exit status 3``, ``hung``; empty if it was done.
    seconds: float = 0.0
    idle: float = 0.0  # Seconds without work after which it was killed before its deadline; else 0.
    place: str = ""  # The line of Python where it hung or crashed, if known.

    @property
    def facts(self) -> dict[str, Any]:
        """All records merged; later ones win."""
        return {name: value for record in self.records for name, value in record.items()}

    def fields_of(self, kind: type) -> dict[str, Any]:
        """The facts that are fields of a dataclass."""
        return {name: value for name, value in self.facts.items() if name in kind.__annotations__}

    def values(self, name: str) -> list[Any]:
        """The value of ``name`` in every record that has it."""
        return [record[name] for record in self.records if name in record]

    @property
    def answer(self) -> ChildAnswer:
        """The outcome as a fact: ``hung in cuInit after 5.0 s``."""
        return ChildAnswer(self.state, self.detail, round(self.seconds, 3))

    @property
    def detail(self) -> str:
        """Where it ended and why, and the end of its output."""
        if self.state in {"answered", "unasked"}:
            return self.end
        doing = self.facts.get("doing", "")
        step = f"in {doing}" if doing else "at its start"
        at = f" at {self.place}" if self.place else ""
        time = f" after {self.seconds:.1f} s" if self.state == "hung" else ""
        time += f", idle for the last {self.idle:.0f} s" if self.idle else ""
        words = " ".join(self.printed[-500:].split())
        return f"{self.end} {step}{at}{time}" + (f"; it printed: {words}" if words else "")

    @property
    def printed(self) -> str:
        """Its noise without Python's report of a crash."""
        return self.noise.partition(_FATAL)[0]


class Child(AbstractContextManager["Child"]):
    """A script that runs in another process; ``outcome()`` waits for it, and leaving ``with`` kills it.

    It runs in its own session: Ctrl-C reaches only this process, and whatever the child starts is killed with it. Its
    standard input is empty and it writes no core dump. If it cannot be started, that is its outcome.
    """

    def __init__(self, question: Question, seconds: float) -> None:
        self.begun = monotonic()
        self.deadline = self.begun + seconds
        self._late = _LATE
        self.records: list[dict[str, Any]] = []
        self._last_output = self.begun
        self._done = False
        self._noise = self._rest = b""
        self._lines = 0  # read so far
        self._frames: list[bytes] = []
        self._place = ""  # the innermost line of the previous stack
        self._in_stack = False
        self._finished = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._refusal = question.refusal
        if question.refusal:
            return
        # It inherits one end of a pipe, the lifeline. The other end closes however this process ends, and the kernel
        # then signals the child: SIGKILL leaves this process no time to do so. Windows has no such signal.
        theirs = -1
        with suppress(OSError):  # out of file descriptors: then it has only the backstop
            theirs, self._lifeline = os.pipe()
        inherited = (theirs,) if theirs > _STDERR and os.name == "posix" else ()
        command = [question.python, *question.flags, "-c", question.script]
        cwd = question.host.real(question.host.cwd)
        try:
            self._process = process = subprocess.Popen(  # noqa: S603  the interpreter that the user names is examined
                [*command, str(round(seconds + _LATE + _BACKSTOP)), str(*inherited or (-1,)), *question.arguments],
                bufsize=0,
                stdin=subprocess.PIPE,  # and closed at once: /dev/null may be missing where devices are hidden
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(question.host.environ),
                cwd=cwd if os.path.isdir(cwd) and os.access(cwd, os.X_OK) else None,
                start_new_session=True,
                pass_fds=inherited,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            with suppress(ImportError, AttributeError, OSError, ValueError):  # no core file in the user's folder
                from resource import RLIMIT_CORE, prlimit

                prlimit(process.pid, RLIMIT_CORE, (0, 0))
            if process.stdin:
                process.stdin.close()
            threading.Thread(target=self._read_output, args=(process.stdout,), daemon=True).start()
        except (OSError, ValueError, RuntimeError) as error:  # no such file, a NUL in a variable, out of threads
            self._refusal = f"could not be started: {reason(question.python, error)}"
            self.close()
            self._process = None
        finally:
            with suppress(OSError):
                os.close(theirs)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id, 0 if it was not started."""
        return self._process.pid if self._process else 0

    def end_by(self, deadline: float) -> None:
        """Bring its deadline forward to ``deadline``, on the monotonic clock, if that is sooner."""
        if deadline < self.deadline:
            self.deadline, self._late = deadline, 0.0

    def _left(self) -> float:
        """Seconds until its deadline, or until a later one if it had to wait for a processor."""
        left = self.deadline - monotonic()
        return left if left > 0 else left + min(_waited(self.pid), self._late)

    def ended(self) -> bool:
        """Whether it is done or dead, without waiting."""
        return self._process is None or self._finished.is_set() or self._process.poll() is not None

    def outcome(self, patience: float = inf, waiting: Callable[[str], object] = lambda _: None) -> Outcome:
        """Wait until it ends, its deadline passes, or it has been idle for ``patience`` seconds.

        It is idle if it uses no CPU time, reads no files and stays at one line (Linux only). Once it is slow,
        ``waiting`` is called each second with the step and the line where it is.
        """
        process = self._process
        if process is None:
            return Outcome("unasked", end=self._refusal)
        idle, checked = 0.0, monotonic()
        active, work, place = checked, -1, ""  # when it was last seen at work, how much it had done, and where
        while not self.ended() and (left := self._left()) > 0:
            self._finished.wait(min(left, 0.05))
            if (now := monotonic()) - checked < _POLL:
                continue
            checked, here = now, _innermost_line(self._frames) or self._place
            done = _work_done(process.pid) if patience < inf else -1
            if now - self.begun > _SLOW:
                doing = [record["doing"] for record in list(self.records) if "doing" in record]
                waiting(", at ".join(filter(None, (*doing[-1:], here))))
            if work < 0 or done < 0 or done - work >= _IDLE_WORK or "" != place != here != "":
                active, work = now, done
            elif now - active >= patience:
                idle = now - active
                break
            place = here or place
        if process.poll() is not None:
            # Its last output may still be in the pipe, which something that it started may hold open.
            lines = -1
            while not self._finished.wait(_GRACE):
                if lines == self._lines or self._left() <= 0:
                    self._finish()
                lines = self._lines
        state: State = "answered" if self._done else "hung"
        end = "" if self._done else "hung"
        if not self._done:
            with suppress(subprocess.TimeoutExpired):  # it may have closed its output and still run
                state, end = "crashed", _status(process.wait(0.0 if idle else max(0.0, self._left())))
        seconds = (monotonic() if state == "hung" else self._last_output) - self.begun
        if not self.close():
            end += ", and could not be killed,"
        rest = b"" if self._rest.startswith(_CUT_OFF) else self._rest
        noise = (self._noise + rest).decode("utf-8", "replace").strip()
        place = ""
        if state == "hung" or _FATAL in noise:
            place = _innermost_line(self._frames) or self._place  # it may have been killed while it printed a stack
        return Outcome(state, tuple(self.records), noise, end, seconds, idle if state == "hung" else 0.0, place)

    def close(self) -> bool:
        """Kill it and everything it started. Return ``False`` if it does not die and is left behind."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(OSError):  # the group is its session's, and its id cannot be reused before it is reaped
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DYING)
        ended = process is None or process.poll() is not None
        lifeline, self._lifeline = self._lifeline, -1
        with suppress(OSError):
            os.close(lifeline)  # only now: a child ended by its lifeline would leave its own children behind
        return ended

    def _read_output(self, stream: IO[bytes]) -> None:
        with stream, suppress(OSError, ValueError):
            while data := stream.read(_LINE):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:  # a record or noise
                    self._lines += 1
                    before, _, text = line.partition(MARK)
                    try:
                        record = ast.literal_eval(text.decode("ascii")) if text else {}
                    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                        record = {}
                    record = record if isinstance(record, dict) else {}
                    self._noise = (self._noise + (before if record else self._without_stack(line)))[-_NOISE:]
                    self._done = self._done or "done" in record
                    if "doing" in record and self.records and "doing" in self.records[-1]:
                        self.records[-1] = record  # only the last step before it stops is of interest
                    elif record and len(self.records) < _RECORDS:
                        self.records.append(record)
                if len(self._rest) > _LINE:
                    self._noise, self._rest = (self._noise + self._rest)[-_NOISE:], b""
                if self._done:
                    self._finish()
        self._finish()

    def _without_stack(self, line: bytes) -> bytes:
        """The line without any part of Python's stack. The frames of the last stack go to ``_frames``."""
        begins = _STACK.search(line)
        if begins:
            self._place = _innermost_line(self._frames) or self._place
            self._frames, self._in_stack = [], True
            return line + b"\n" if begins[1].startswith(b"Fatal") else line[: begins.start()]
        self._in_stack = self._in_stack and (not line or line.startswith(b"  "))
        self._frames += [line] if self._in_stack else []
        return b"" if self._in_stack else line + b"\n"

    def _finish(self) -> None:
        self._last_output = self._last_output if self._finished.is_set() else monotonic()
        self._finished.set()


def _innermost_line(stack: Iterable[bytes]) -> str:
    r"""The innermost line in a stack; one of the standard library only if there is no other.

    >>> lines = b'File "/usr/lib/python3.11/threading.py", line 327 in wait', b'File "/x/torch/a.py", line 3 in f'
    >>> _innermost_line(lines)
    '/x/torch/a.py:3'
    >>> print(_innermost_line([rb'File "C:\Python\Lib\threading.py", line 3', rb'File "C:\x\torch\a.py", line 3']))
    C:\x\torch\a.py:3
    """
    frames = (_FRAME.search(line.decode("utf-8", "replace")) for line in stack)
    lines = [":".join(frame.groups()) for frame in frames if frame]
    return next((line for line in lines if not _STANDARD_LIBRARY.search(line)), lines[0] if lines else "")


def _work_done(session: int) -> int:
    """CPU time in clock ticks plus major page faults of all processes of a session; -1 if unknown."""
    done: list[int] = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
                if int(fields[3]) == session:
                    done += map(int, fields[9:15])
    return sum(done) if done else -1


def _waited(pid: int) -> float:
    """Seconds that the main thread of a process was ready to run but had no processor; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as stream:
            return int(stream.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _status(code: int) -> str:
    """An exit code in words.

    >>> _status(-11), _status(-40), _status(3), _status(0xC0000005)
    ('SIGSEGV', 'signal 40', 'exit status 3', 'exit status 0xc0000005')
    """
    if code >= 0:
        return f"exit status {code if code < 256 else hex(code)}"
    return {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")


# -- the scripts -------------------------------------------------------------------------------------------------------


@cache
def source(script: str) -> str:
    """The text of a script of ``probes`` for ``python -c``, after that of ``ask``, which it imports.

    So the other interpreter needs no transload on its path, and the script is also found inside a zip.
    """
    texts = [packaged(__package__, f"probes/{name}.py") for name in dict.fromkeys(("ask", script))]
    dropped = ("from __future__ import", "from transload.", "from typing import")  # annotations are not evaluated
    lines = [line for text in texts for line in text.splitlines() if not line.startswith(dropped)]
    return "\n".join(("from __future__ import annotations", *lines))


# -- calls in a fork of this process -----------------------------------------------------------------------------------

_FILES = 1 << 12


def in_fork(questions: Sequence[Callable[[], str]], seconds: float) -> tuple[str | Unknown, ...]:
    """Call the functions one after the other in a fork. Return the results, ``Unknown`` for those not done in time.

    A call into a broken driver may never return. A process that waits inside a kernel driver cannot be killed, and a
    thread that does so keeps its process from ending; a forked child can be left behind.
    """
    if not questions:
        return ()
    import select

    try:
        ours, theirs = os.pipe()
        try:
            with warnings.catch_warnings():  # about a fork with threads: the child takes none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
    except OSError as error:  # out of processes or file descriptors
        return (Unknown(f"could not be asked: {error.strerror}"),) * len(questions)
    if not child:
        try:  # the child must never return into the caller's code
            os.closerange(0, theirs)  # or whoever reads our output would wait for a child that hangs
            os.closerange(theirs + 1, _FILES)
            gc.disable()  # finalizers are for the parent to run
            for question in questions:
                os.write(theirs, ascii(question()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(theirs)
    data, ended, begun = b"", False, monotonic()
    try:
        while not ended and (left := begun + seconds + min(_waited(child), _LATE) - monotonic()) > 0:
            if select.select([ours], [], [], left)[0]:
                piece = os.read(ours, _LINE)
                data, ended = data + piece, not piece
    finally:
        os.close(ours)
    with suppress(OSError):  # another thread has reaped it
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0 if ended else os.WNOHANG)  # without waiting for one that hangs in the kernel

    answers = [ast.literal_eval(line.decode()) for line in data.split(b"\n")[:-1]]
    late = Unknown(f"no answer within {seconds:g} s")
    return (*answers, *(late for _ in questions[len(answers) :]))
