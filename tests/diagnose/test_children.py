"""Children that answer, print, crash and hang."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tests.each import each

from transload.diagnose import children
from transload.diagnose.children import Child, Outcome, Question, source
from transload.diagnose.host import Host

LONG = 60.0  # seconds that no test waits for
SCRIPTS = ("ask_driver", "ask_torch")
SRC = Path(children.__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and sessions")


def question(text: str, **environ: str) -> Question:
    """A child that runs ``text`` after what every child begins with."""
    whole = f"{source('ask')}\nimport os, sys, time\nreport = Report()\n{text}"
    return Question(whole, sys.executable, Host(environ={**os.environ, **environ}), flags=("-I", "-S", "-B"))


def outcome(text: str, seconds: float = LONG, **environ: str) -> Outcome:
    with Child(question(text, **environ), seconds) as child:
        return child.outcome()


def hangs_in(child: Child, record: dict[str, object]) -> Outcome:
    """Its end, once it has said so much: no machine is too slow for that."""
    while record not in child.records and not child.ended():
        time.sleep(0.01)
    child.end_by(time.monotonic())
    return child.outcome()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- answers -----------------------------------------------------------------------------------------------------------


def test_it_tells_facts_in_order() -> None:
    facts = {"a": 2, "b": ["x", True, None, (9, 0)], "c": {"d \n\"'": 0.25, "\x1e": -(1 << 64)}, "e": ()}
    told = outcome(f"report.say(a=1); report.say(**{facts!a}); report.done()")
    assert told.state == "answered"
    assert told.records == ({"a": 1}, facts, {"done": True})
    assert told.facts["a"] == 2
    assert told.values("a") == [1, 2]
    assert told.answer.detail == ""


def test_no_number_of_steps_hides_the_end() -> None:
    told = outcome("for n in range(9000): report.say(doing=n)\nreport.say(a=1); report.done()")
    assert (told.state, told.records) == ("answered", ({"doing": 8999}, {"a": 1}, {"done": True}))
    told = outcome("for n in range(9000): report.say(a=n)\nreport.done()")
    assert told.state == "answered"


def test_what_is_printed_is_kept_apart() -> None:
    text = """
print("hello", flush=True)
os.write(2, b"no newline")
report.say(a=1)
os.write(1, b"\\x1enot a record\\n")
report.say(b=2)
report.done()
"""
    told = outcome(text)
    assert told.facts == {"a": 1, "b": 2, "done": True}
    assert told.noise == "hello\nno newline\x1enot a record"


def test_noise_without_end_is_cut() -> None:
    told = outcome("os.write(1, b'x' * 3_000_000 + b'y\\n' * 1000 + b'end'); report.say(a=1); report.done()")
    assert told.facts["a"] == 1
    assert len(told.noise) <= children._NOISE
    assert told.noise.endswith("y\nend")


def test_bytes_that_are_no_text() -> None:
    assert outcome("os.write(1, b'\\xff\\n'); report.say(name='\\udcff\\U0001f600'); report.done()").values("name") == [
        "\udcff\U0001f600"
    ]


def test_an_output_that_is_redirected_is_still_heard() -> None:
    told = outcome("os.dup2(os.open(os.devnull, os.O_WRONLY), 1); report.say(a=1); report.done()")
    assert told.state == "answered"
    assert told.facts["a"] == 1


def test_there_is_nothing_to_read() -> None:
    assert outcome("report.say(read=sys.stdin.read()); report.done()").facts["read"] == ""


def test_no_core_is_dumped() -> None:
    pytest.importorskip("resource")
    if sys.platform != "linux":
        pytest.skip("only Linux has prlimit")
    text = "sys.stdin.read()\nimport resource\nreport.say(core=resource.getrlimit(resource.RLIMIT_CORE)); report.done()"
    assert outcome(text).facts["core"] == (0, 0)


# -- ends --------------------------------------------------------------------------------------------------------------


@each(
    ("text", "end"),
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV in work"),
        ("os.abort()", "SIGABRT in work"),
        ("os._exit(3)", "exit status 3 in work"),
        ("sys.exit(0)", "exit status 0 in work"),
        ("os.write(2, b'a  loader\\nsays\\n'); os._exit(127)", "exit status 127 in work; it printed: a loader says"),
        ("os.closerange(0, 99); os._exit(4)", "exit status 4 in work"),
    ],
)
def test_a_crash_is_named_with_the_step(text: str, end: str) -> None:
    told = outcome(f"report.say(a=1); report.say(doing='work'); {text}")
    assert (told.state, told.detail) == ("crashed", end)
    assert told.facts["a"] == 1


def test_a_crash_before_the_first_step() -> None:
    assert outcome("os.kill(os.getpid(), 9)").answer.detail == "SIGKILL at its start"


def test_the_place_of_a_crash_is_found_in_pythons_stack() -> None:
    lines = [
        *("what(): no", "Thread 0x1 (most recent call first):", '  File "/old.py", line 1 in f', "more"),
        *(
            "partFatal Python error: Aborted",
            "",
            "Current thread 0x1 (most recent call first):",
            '  File "<string>", line 7',
        ),
        *('  File "/x/torch/a.py", line 3 in f', "", "Extension modules: a, b (total: 2)", ""),
    ]
    told = outcome(f"report.say(doing='import'); os.write(2, {chr(10).join(lines)!r}.encode()); os.abort()")
    assert told.detail == "SIGABRT in import at /x/torch/a.py:3; it printed: what(): no more part"


@pytest.mark.parametrize(
    "text",
    ["time.sleep(600)", "os.closerange(0, 99); time.sleep(600)", "os.fork() or time.sleep(600); time.sleep(600)"],
    ids=["asleep", "silent", "forked"],
)
def test_a_child_that_hangs_is_ended_at_its_deadline(text: str) -> None:
    with Child(question(f"report.say(doing='cuInit'); {text}"), LONG) as child:
        told = hangs_in(child, {"doing": "cuInit"})
        assert child._finished.wait(LONG)  # the pipe has no other end any more: all that held it are gone
    assert told.state == "hung"
    assert re.fullmatch(r"hung in cuInit after \d+\.\d s", told.detail)
    assert not alive(child.pid)


@each(
    "begun",
    [
        "",
        "Timeout (0:0",
        "Timeout (0:00:01)!\n",
        "Timeout (0:00:01)!\nThread 0x7 (most recent call first):\n  File ",
    ],
)
def test_a_child_that_is_killed_while_it_prints_its_stack_keeps_its_place(begun: str) -> None:
    stack = 'hello\nTimeout (0:00:01)!\nThread 0x7 (most recent call first):\n  File "/x/torch/a.py", line 3 in f\n'
    printed = f"{stack}{children.MARK.decode()}{{'doing': 'import'}}\n{begun}"
    text = f"os.write(1, {printed.encode()!r}); time.sleep(600)"
    with Child(question(text), LONG) as child:
        seen = hangs_in(child, {"doing": "import"})
    assert (seen.place, seen.noise) == ("/x/torch/a.py:3", "hello")


def test_it_ends_with_its_process_though_another_holds_the_pipe() -> None:
    text = """
import subprocess
report.say(pid=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid)
os._exit(3)
"""
    told = outcome(text)
    daemon = told.facts["pid"]
    assert told.detail == "exit status 3 at its start"
    assert alive(daemon)
    os.kill(daemon, signal.SIGKILL)


def test_one_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with Child(question("report.say(doing='cuInit'); time.sleep(600)"), LONG) as child:
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda *_: None)
            told = hangs_in(child, {"doing": "cuInit"})
        assert told.state == "hung"
        assert told.detail.startswith("hung, and could not be killed, in cuInit after ")
        assert alive(child.pid)
    assert not alive(child.pid)


def test_end_by_moves_the_deadline_forward() -> None:
    with Child(question("time.sleep(600)"), LONG) as child:
        child.end_by(child.begun + 2 * LONG)
        assert child.deadline == child.begun + LONG
        child.end_by(child.begun + 0.1)
        assert child.outcome().state == "hung"


def test_a_child_that_does_nothing_is_given_up_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_POLL", 0.05)
    monkeypatch.setattr(children, "_SLOW", 0.0)
    waited: list[str] = []
    with Child(question("report.say(doing='import'); time.sleep(600)"), LONG) as child:
        told = child.outcome(0.3, waited.append)
    if sys.platform == "linux":
        assert re.fullmatch(r"hung in import after \d\.\d s, idle for the last 0 s", told.detail)
    assert "import" in waited
    assert not alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_child_works_while_anything_that_it_started_does() -> None:
    text = "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with Child(question(text), LONG) as child:
        while children._work_done(child.pid) < 3 * children._IDLE_WORK and not child.ended():
            time.sleep(0.01)
        assert not child.ended()
    assert children._work_done(1 << 30) == -1  # there is no such session


def interrupted(child: Child) -> None:
    with child:
        assert not child.ended()
        raise KeyboardInterrupt


def test_leaving_ends_it() -> None:
    child = Child(question("time.sleep(600)"), LONG)
    with pytest.raises(KeyboardInterrupt):
        interrupted(child)
    assert not alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="tests how Linux signals a closed pipe")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_it_ends_with_its_parent(tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = f"""
import signal
pipe = open({str(tmp_path / "pipe")!r}, "wb", 0)
signal.signal(signal.SIGALRM, lambda *_: (pipe.write(b" late"), os._exit(1)))
pipe.write(b"there")
time.sleep(600)
"""
    script = f"""
import sys
sys.path.insert(0, {str(SRC)!r})
from transload.diagnose.children import Child, Question
from transload.diagnose.host import Host
with Child(Question({question(text).script!r}, sys.executable, Host(environ={{}})), 10) as child:
    child.outcome()
"""
    with subprocess.Popen([sys.executable, "-c", script]) as parent, (tmp_path / "pipe").open("rb") as pipe:
        assert pipe.read(5) == b"there"
        parent.send_signal(number)
        assert pipe.read() == b""  # closed by its end, and before its own alarm


def test_it_ends_itself_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_BACKSTOP", 1 - LONG)
    assert outcome("report.say(doing='work'); time.sleep(600)").detail == "SIGALRM in work"


# -- worlds ------------------------------------------------------------------------------------------------------------


def test_an_environment_that_is_no_text() -> None:
    text = "report.say(value=os.environb[b'X'].hex()); report.done()"
    assert outcome(text, X=os.fsdecode(b"\xff\xfea")).facts["value"] == "fffe61"


def test_an_empty_environment() -> None:
    bare = Question(question("report.say(n=len(os.environ)); report.done()").script, sys.executable, Host(environ={}))
    with Child(bare, LONG) as child:
        assert child.outcome().facts["n"] <= 1  # LC_CTYPE, which Python sets


@each(
    ("python", "environ", "words"),
    [
        ("/nowhere/python", {}, "could not be started: /nowhere/python does not exist"),
        ("/dev", {}, "could not be started: /dev: permission denied"),
        (sys.executable, {"A": "\0"}, f"could not be started: {sys.executable}: embedded null byte"),
        (sys.executable, {"A=B": "1"}, f"could not be started: {sys.executable}: illegal environment variable name"),
    ],
)
def test_what_cannot_be_started_is_said(python: str, environ: dict[str, str], words: str) -> None:
    with Child(Question(source("ask_driver"), python, Host(environ=environ)), LONG) as child:
        told = child.outcome()
    assert (told.state, told.detail.lower(), child.pid) == ("unasked", words.lower(), 0)
    assert child.ended()


def test_it_stands_where_the_user_stands(tmp_path: Path) -> None:
    text = question("report.say(cwd=os.getcwd()); report.done()").script
    for cwd, seen in ((str(tmp_path), tmp_path), (str(tmp_path / "gone"), Path.cwd()), ("", Path.cwd())):
        with Child(Question(text, sys.executable, Host(cwd=cwd)), LONG) as child:
            assert child.outcome().facts["cwd"] == str(seen)


def test_a_parent_with_nothing_open(tmp_path: Path) -> None:
    text = question("report.say(a=1); report.done()").script
    script = f"""
import os, sys
os.closerange(0, 3)
sys.path.insert(0, {str(SRC)!r})
from transload.diagnose.children import Child, Question
from transload.diagnose.host import Host
with Child(Question({text!r}, sys.executable, Host()), 60) as child:
    told = child.outcome()
open({str(tmp_path / "told")!r}, "w").write(f"{{told.state}} {{told.facts['a']}}")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (tmp_path / "told").read_text() == "answered 1"


# -- the scripts -------------------------------------------------------------------------------------------------------


@each("script", SCRIPTS)
def test_a_script_is_one_text_for_any_python(script: str) -> None:
    text = source(script)
    tree = ast.parse(text, feature_version=(3, 7))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert text.isascii()  # it passes through a command line in any locale
    assert len(text) < 30_000  # and through that of Windows, which ends at 32,767
    assert not any(str(module).startswith("transload") for module in modules)
    assert text.count("class Report:") == 1


def test_a_script_is_found_inside_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as app:
        for file in sorted((SRC / "transload").rglob("*.py")):
            app.write(file, file.relative_to(SRC))
    script = "from transload.diagnose.children import source; print(source('ask_driver'))"
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'app.pyz')!r}); {script}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout == source("ask_driver") + "\n"
