from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forks

PLAIN: tuple[str, ...] = ("json",)


def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return forks.run(*arguments, imports=PLAIN, **options)  # type: ignore[arg-type]


def test_a_program_has_its_own_arguments_streams_folder_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), dict(os.environ)); sys.stderr.write('!')"
    done = run("-c", code, "a", "b c", cwd=tmp_path, env={"NAME": "ä"}, stdin="wörds")
    kept = "{'NAME': 'ä', 'PYTHONUTF8': '1'}"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"['-c', 'a', 'b c'] wörds {tmp_path} {kept}\n", "!")


def test_a_script_and_a_module_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\nif __name__ == '__main__': print('main')\n", encoding="utf-8")
    (tmp_path / "script.py").write_text("import beside, sys; print(sys.argv, beside.value, __file__)", encoding="utf-8")
    assert run("script.py", "x", cwd=tmp_path).stdout == "['script.py', 'x'] 7 script.py\n"
    assert run("-m", "beside", cwd=tmp_path).stdout == "main\n"
    env = {"PYTHONPATH": str(tmp_path)}
    assert run("-c", "import beside; print(beside.value)", env=env).stdout == "7\n"


def test_what_one_program_does_no_other_sees() -> None:
    assert run("-c", "import json; json.mine = 1").returncode == 0
    assert run("-c", "import json; print(hasattr(json, 'mine'))").stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a word')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()", 0),
    ],
)
def test_a_program_ends_as_it_ends(code: str, answer: int) -> None:
    done = run("-c", code)
    assert done.returncode == answer
    assert done.stdout == ("last\n" if "last" in code else "")
    assert ("a word\n" in done.stderr) == ("a word" in code)
    assert ("ZeroDivisionError" in done.stderr) == ("/ 0" in code)


@pytest.mark.skipif(not forks.FORKS, reason="needs os.fork")
def test_modules_are_there_and_a_shell_can_ask() -> None:
    address = forks.server(*PLAIN)
    shell = f'"{sys.executable}" "{forks.__file__}" ask {address} -c \'import sys; print("json" in sys.modules)\' | cat'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)  # noqa: S607
    assert done.stdout == "True\n"
    code = forks.ask(
        address, forks.Request(["-c", "import sys; sys.exit('tarfile' in sys.modules)"], "/", {}), [0, 1, 2]
    )
    assert code == 0


@pytest.mark.skipif(not forks.FORKS, reason="needs os.fork")
def test_a_program_that_nobody_waits_for_is_killed() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    taken, given = os.pipe()
    with forks.asked(forks.server(*PLAIN), forks.Request(["-c", code], "/", {}), [0, given, 2]):
        os.close(given)
        pid = int(os.read(taken, 100))
        os.close(taken)
        assert there(pid)
    deadline = time.monotonic() + forks.PATIENCE
    while there(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
