"""Run Python programs in forks of a process that has already imported torch.

To import torch takes two seconds, to fork a process that has imported it a few milliseconds. So a server imports it
once and forks for every program. The fork is a process like any other, with its own arguments, folder, environment and
streams. At its end it waits for its threads and calls its exit handlers, but it does not tear down its modules, which
for torch takes half a second. Tests of the start or the end of Python, or of the import itself, use ``subprocess``.
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
"""On other systems libraries may not survive a fork, so each program gets a new interpreter."""
TIMEOUT = 300.0


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    imports: tuple[str, ...] = ("torch",),
) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT``, ``python -m MODULE`` or ``python -c CODE`` with these modules already imported."""
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
            timeout=TIMEOUT,
            check=False,
        )
    with (
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as stdout_file,
        tempfile.TemporaryFile() as stderr_file,
    ):
        stdin_file.write(stdin.encode())
        stdin_file.seek(0)
        streams = [file.fileno() for file in (stdin_file, stdout_file, stderr_file)]
        code = run_on_server(server(*imports), Request(command, str(cwd or Path.cwd()), environ), streams)
        texts = []
        for file in (stdout_file, stderr_file):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


class Request(NamedTuple):
    """A program to run."""

    arguments: list[str]
    cwd: str
    environ: dict[str, str]


@functools.cache
def server(*imports: str) -> str:
    """Start a server that imports these modules and ends with this process; return its address."""
    folder = tempfile.mkdtemp(prefix="forks")  # an address has at most about a hundred characters
    address = f"{folder}/socket"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        child = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), *imports],
            # It forks, so it must not have threads.
            env={**environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )

    def shut_down() -> None:
        child.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(shut_down)
    return address


def run_on_server(address: str, request: Request, streams: list[int]) -> int:
    """Run a program on a server with these standard streams; return its exit code, or minus the signal."""
    with send(address, request, streams) as connection, connection.makefile() as answer:
        return int(answer.readline())


def send(address: str, request: Request, streams: list[int]) -> socket.socket:
    """Send the request; return the connection for the answer. To close it kills the program."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT)
    connection.connect(address)
    socket.send_fds(connection, [b"\n"], streams)
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


# -- the server --------------------------------------------------------------------------------------------------------


def serve(descriptor: int, imports: list[str]) -> Request:
    """Serve until the standard input ends. It returns only in a fork: the program to run there."""
    sys.path[:1] = [str(SOURCE), str(SOURCE.parent)]
    for module in imports:
        importlib.import_module(module)
    del sys.path[:2]
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # about threads; programs do not see it
    gc.collect()
    gc.freeze()  # or the collector would visit, and so copy, all imported objects in every program
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    wakeup_reader, wakeup_writer = socket.socketpair()
    wakeup_writer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_writer.fileno())
    running: dict[int, socket.socket] = {}
    while True:
        watched: list[int | socket.socket] = [0, listener, wakeup_reader, *running.values()]
        ready, _, _ = select.select(watched, [], [])
        if wakeup_reader in ready:
            wakeup_reader.recv(1 << 16)
        for program, connection in [*running.items()]:
            if 0 in ready or connection in ready:  # the client is gone
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
            request_line = lines.readline()
        program = os.fork() if request_line else -1
        if not program:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (listener, wakeup_reader, wakeup_writer, connection, *running.values()):
                inherited.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return Request(*json.loads(request_line))
        for stream in streams:
            os.close(stream)
        if request_line:
            running[program] = connection


def stop(program: int) -> None:
    """Kill a program and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):  # it has not created its process group yet
        os.killpg(program, signal.SIGKILL)
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)


def become(request: Request) -> None:
    """Run the program as the main module of this process."""
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    tempfile.tempdir = None  # the server may have cached its own
    kind, *rest = request.arguments
    python_path = [path for path in request.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = "" if kind in ("-c", "-m") else str(Path(kind).resolve().parent)
    sys.path[:] = [first, *python_path, *sys.path]
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
    """Run the program, and end the process as Python does, as far as programs can see."""
    code: object = None
    try:
        program()
    except SystemExit as exiting:
        code = exiting.code
    except BaseException:  # noqa: BLE001 - there is no other handler
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
    verb, target, *more = sys.argv[1:]
    if verb == "serve":
        end(functools.partial(become, serve(int(target), more)))
    else:  # like ``python MORE`` in a shell
        sys.exit(run_on_server(target, Request(more, str(Path.cwd()), dict(os.environ)), [0, 1, 2]) % 256)
