from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forks

IMPORTS: tuple[str, ...] = ("json",)


def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return forks.run(*arguments, imports=IMPORTS, **options)  # type: ignore[arg-type]


def test_program_has_its_own_arguments_streams_folder_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), dict(os.environ)); sys.stderr.write('!')"
    process = run("-c", code, "a", "b c", cwd=tmp_path, env={"NAME": "ä"}, stdin="wörds")
    environ = "{'NAME': 'ä', 'PYTHONUTF8': '1'}"
    assert (process.returncode, process.stdout, process.stderr) == (
        0,
        f"['-c', 'a', 'b c'] wörds {tmp_path} {environ}\n",
        "!",
    )


def test_scripts_and_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\nif __name__ == '__main__': print('main')\n", encoding="utf-8")
    (tmp_path / "script.py").write_text("import beside, sys; print(sys.argv, beside.value, __file__)", encoding="utf-8")
    assert run("script.py", "x", cwd=tmp_path).stdout == "['script.py', 'x'] 7 script.py\n"
    assert run("-m", "beside", cwd=tmp_path).stdout == "main\n"
    env = {"PYTHONPATH": str(tmp_path)}
    assert run("-c", "import beside; print(beside.value)", env=env).stdout == "7\n"


def test_changes_in_one_program_are_invisible_to_others() -> None:
    assert run("-c", "import json; json.mine = 1").returncode == 0
    assert run("-c", "import json; print(hasattr(json, 'mine'))").stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a word')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()", 0),
    ],
)
def test_exit_status_and_output_are_those_of_a_plain_process(code: str, status: int) -> None:
    process = run("-c", code)
    assert process.returncode == status
    assert process.stdout == ("last\n" if "last" in code else "")
    assert ("a word\n" in process.stderr) == ("a word" in code)
    assert ("ZeroDivisionError" in process.stderr) == ("/ 0" in code)


@pytest.mark.skipif(not forks.FORKS, reason="needs os.fork")
def test_modules_are_imported_and_a_shell_can_run_programs() -> None:
    address = forks.server(*IMPORTS)
    shell = f'"{sys.executable}" "{forks.__file__}" ask {address} -c \'import sys; print("json" in sys.modules)\' | cat'
    process = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)  # noqa: S607
    assert process.stdout == "True\n"
    status = forks.run_on_server(
        address, forks.Request(["-c", "import sys; sys.exit('tarfile' in sys.modules)"], "/", {}), [0, 1, 2]
    )
    assert status == 0


@pytest.mark.skipif(not forks.FORKS, reason="needs os.fork")
def test_program_is_killed_when_its_connection_closes() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    read_end, write_end = os.pipe()
    with forks.send(forks.server(*IMPORTS), forks.Request(["-c", code], "/", {}), [0, write_end, 2]):
        os.close(write_end)
        pid = int(os.read(read_end, 100))
        os.close(read_end)
        assert is_running(pid)
    deadline = time.monotonic() + forks.TIMEOUT
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
