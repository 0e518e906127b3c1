"""Programs in processes of their own, which begin with their imports done.

To import torch takes two seconds, and to fork a process that has imported it some milliseconds. So a server imports
once and forks for every program. What it makes is a process like any other: its arguments, folder, environment and
streams are its own. When it ends, its threads are waited for and what it registered is called, but its modules are not
torn down, which for torch takes half a second. What tests the start or the end of Python, or the import itself, takes
``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

SOURCE = Path(__file__).parent.parent / "src"
FORKS = sys.platform == "linux"
"""Elsewhere libraries may not survive a fork, and every program is started."""
PATIENCE = 300.0


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    imports: tuple[str, ...] = ("torch",),
) -> subprocess.CompletedProcess[str]:
    """What ``python SCRIPT``, ``python -m MODULE`` or ``python -c CODE`` does where these modules are imported."""
    command = [str(argument) for argument in arguments]
    environ = {**(os.environ if env is None else env), "PYTHONUTF8": "1"}
    if not FORKS:
        return subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=environ,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE,
            check=False,
        )
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as told:
        given.write(stdin.encode())
        given.seek(0)
        streams = [each.fileno() for each in (given, printed, told)]
        code = ask(server(*imports), Request(command, str(cwd or Path.cwd()), environ), streams)
        texts = []
        for each in (printed, told):
            each.seek(0)
            texts.append(each.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


class Request(NamedTuple):
    """A program to run."""

    arguments: list[str]
    cwd: str
    environ: dict[str, str]


@functools.cache
def server(*imports: str) -> str:
    """The address of a server, which has imported these when it first answers, and ends with this process."""
    folder = tempfile.mkdtemp(prefix="forks")  # an address has room for a hundred characters
    address = f"{folder}/socket"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        child = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), *imports],
            # No threads: it forks.
            env={**kept, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )

    def leave() -> None:
        child.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return address


def ask(address: str, request: Request, streams: list[int]) -> int:
    """Have a server run a program with these for its standard streams; its exit code, or minus the signal."""
    with asked(address, request, streams) as connection, connection.makefile() as answer:
        return int(answer.readline())


def asked(address: str, request: Request, streams: list[int]) -> socket.socket:
    """The connection over which the answer will come. A program is killed when its connection is closed."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    connection.connect(address)
    socket.send_fds(connection, [b"\n"], streams)
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


# -- the server --------------------------------------------------------------------------------------------------------


def serve(descriptor: int, imports: list[str]) -> Request:
    """Serve until the standard input ends. Only in the process of a program does it return, and what it is to run."""
    sys.path[:1] = [str(SOURCE), str(SOURCE.parent)]
    for module in imports:
        importlib.import_module(module)
    del sys.path[:2]
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # that it has threads; no program sees it
    gc.collect()
    gc.freeze()  # or each program would look through all that is imported, and copy it by that
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    ends, told = socket.socketpair()
    told.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told.fileno())
    running: dict[int, socket.socket] = {}
    while True:
        waited: list[int | socket.socket] = [0, listener, ends, *running.values()]
        ready, _, _ = select.select(waited, [], [])
        if ends in ready:
            ends.recv(1 << 16)
        for program, connection in [*running.items()]:
            if 0 in ready or connection in ready:  # nobody waits any more
                stop(program)
            else:
                ended, status = os.waitpid(program, os.WNOHANG)
                if not ended:
                    continue
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            running.pop(program).close()
        if 0 in ready:
            os._exit(0)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile() as lines:
            asked_for = lines.readline()
        program = os.fork() if asked_for else -1
        if not program:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for held in (listener, ends, told, connection, *running.values()):
                held.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return Request(*json.loads(asked_for))
        for stream in streams:
            os.close(stream)
        if asked_for:
            running[program] = connection


def stop(program: int) -> None:
    """Kill a program with all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
        os.killpg(program, signal.SIGKILL)
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)


def become(request: Request) -> None:
    """Run the program as the main module of this process."""
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    tempfile.tempdir = None  # it may be that of the server
    kind, *rest = request.arguments
    given = [path for path in request.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = "" if kind in ("-c", "-m") else str(Path(kind).resolve().parent)
    sys.path[:] = [first, *given, *sys.path]
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-c":
        text, *words = rest
        sys.argv[:] = ["-c", *words]
        code = compile(text, "<string>", "exec")
    else:
        sys.argv[:] = [kind, *rest]
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    exec(code, main.__dict__)  # noqa: S102


def end(program: Callable[[], None]) -> NoReturn:
    """Run it, and end the process as Python does, as far as programs can tell."""
    code: object = None
    try:
        program()
    except SystemExit as left:
        code = left.code
    except BaseException:  # noqa: BLE001 - this is the last
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    verb, where, *more = sys.argv[1:]
    if verb == "serve":
        end(functools.partial(become, serve(int(where), more)))
    else:  # as ``python MORE`` in a shell
        sys.exit(ask(where, Request(more, str(Path.cwd()), dict(os.environ)), [0, 1, 2]) % 256)
