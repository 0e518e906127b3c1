"""Child processes that answer, print, crash and hang."""

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

TIMEOUT = 300.0  # seconds; no test waits that long
SCRIPTS = ("ask_driver", "ask_torch")
SRC = Path(children.__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and sessions")


def question(text: str, **environ: str) -> Question:
    """A child that runs ``text`` after the code with which all scripts begin."""
    script = f"{source('ask')}\nimport os, sys, time\nreport = Report()\n{text}"
    return Question(script, sys.executable, Host(environ={**os.environ, **environ}), flags=("-I", "-S", "-B"))


def outcome(text: str, seconds: float = TIMEOUT, **environ: str) -> Outcome:
    with Child(question(text, **environ), seconds) as child:
        return child.outcome()


def end_after(child: Child, record: dict[str, object]) -> Outcome:
    """End a child once it has sent ``record``, however long that takes, and return its outcome."""
    while record not in child.records and not child.ended():
        time.sleep(0.01)
    child.end_by(time.monotonic())
    return child.outcome()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- answers -----------------------------------------------------------------------------------------------------------


def test_facts_are_reported_in_order() -> None:
    facts = {"a": 2, "b": ["x", True, None, (9, 0)], "c": {"d \n\"'": 0.25, "\x1e": -(1 << 64)}, "e": ()}
    result = outcome(f"report.say(a=1); report.say(**{facts!a}); report.done()")
    assert result.state == "answered"
    assert result.records == ({"a": 1}, facts, {"done": True})
    assert result.facts["a"] == 2
    assert result.values("a") == [1, 2]
    assert result.answer.detail == ""


def test_final_records_are_kept_after_thousands_of_steps() -> None:
    result = outcome("for n in range(9000): report.say(doing=str(n))\nreport.say(a=1); report.done()")
    assert (result.state, result.records) == ("answered", ({"doing": "8999"}, {"a": 1}, {"done": True}))
    result = outcome("for n in range(9000): report.say(a=n)\nreport.done()")
    assert result.state == "answered"


def test_printed_output_is_separated_from_records() -> None:
    text = """
print("hello", flush=True)
os.write(2, b"no newline")
report.say(a=1)
os.write(1, b"\\x1enot a record\\n")
report.say(b=2)
report.done()
"""
    result = outcome(text)
    assert result.facts == {"a": 1, "b": 2, "done": True}
    assert result.noise == "hello\nno newline\x1enot a record"


def test_only_the_end_of_long_output_is_kept() -> None:
    result = outcome("os.write(1, b'x' * 3_000_000 + b'y\\n' * 1000 + b'end'); report.say(a=1); report.done()")
    assert result.facts["a"] == 1
    assert len(result.noise) <= children._NOISE
    assert result.noise.endswith("y\nend")


def test_invalid_utf8_does_not_break_records() -> None:
    assert outcome("os.write(1, b'\\xff\\n'); report.say(name='\\udcff\\U0001f600'); report.done()").values("name") == [
        "\udcff\U0001f600"
    ]


def test_records_arrive_although_stdout_is_redirected() -> None:
    result = outcome("os.dup2(os.open(os.devnull, os.O_WRONLY), 1); report.say(a=1); report.done()")
    assert result.state == "answered"
    assert result.facts["a"] == 1


def test_answer_that_is_read_long_after_the_child_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread that reads the pipe may lag behind."""
    parse = ast.literal_eval

    def parse_slowly(text: str) -> object:
        time.sleep(0.02)
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", parse_slowly)
    result = outcome("for n in range(50): report.say(a=n)\nreport.done()")
    assert (result.state, len(result.records)) == ("answered", 51)


def test_stdin_is_empty() -> None:
    assert outcome("report.say(read=sys.stdin.read()); report.done()").facts["read"] == ""


def test_core_dumps_are_disabled() -> None:
    pytest.importorskip("resource")
    if sys.platform != "linux":
        pytest.skip("only Linux has prlimit")
    text = "sys.stdin.read()\nimport resource\nreport.say(core=resource.getrlimit(resource.RLIMIT_CORE)); report.done()"
    assert outcome(text).facts["core"] == (0, 0)


# -- crashes, hangs and deadlines --------------------------------------------------------------------------------------


@each(
    ("text", "detail"),
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV in work"),
        ("os.abort()", "SIGABRT in work"),
        ("os._exit(3)", "exit status 3 in work"),
        ("sys.exit(0)", "exit status 0 in work"),
        ("os.write(2, b'a  loader\\nsays\\n'); os._exit(127)", "exit status 127 in work; it printed: a loader says"),
        ("os.closerange(0, 99); os._exit(4)", "exit status 4 in work"),
    ],
)
def test_crash_is_reported_with_its_step(text: str, detail: str) -> None:
    result = outcome(f"report.say(a=1); report.say(doing='work'); {text}")
    assert (result.state, result.detail) == ("crashed", detail)
    assert result.facts["a"] == 1


def test_crash_before_the_first_step() -> None:
    assert outcome("os.kill(os.getpid(), 9)").answer.detail == "SIGKILL at its start"


def test_location_of_a_crash_is_read_from_the_python_stack() -> None:
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
    result = outcome(f"report.say(doing='import'); os.write(2, {chr(10).join(lines)!r}.encode()); os.abort()")
    assert result.detail == "SIGABRT in import at /x/torch/a.py:3; it printed: what(): no more part"


@pytest.mark.parametrize(
    "text",
    ["time.sleep(600)", "os.closerange(0, 99); time.sleep(600)", "os.fork() or time.sleep(600); time.sleep(600)"],
    ids=["asleep", "all files closed", "forked"],
)
def test_hanging_child_is_killed_at_its_deadline(text: str) -> None:
    with Child(question(f"report.say(doing='cuInit'); {text}"), TIMEOUT) as child:
        result = end_after(child, {"doing": "cuInit"})
        assert child._finished.wait(TIMEOUT)  # the pipe is closed: all processes that held it have ended
    assert result.state == "hung"
    assert re.fullmatch(r"hung in cuInit after \d+\.\d s", result.detail)
    assert not is_alive(child.pid)


@each(
    "partial",
    [
        "",
        "Timeout (0:0",
        "Timeout (0:00:01)!\n",
        "Timeout (0:00:01)!\nThread 0x7 (most recent call first):\n  File ",
    ],
)
def test_location_is_known_if_the_child_is_killed_while_printing_its_stack(partial: str) -> None:
    stack = 'hello\nTimeout (0:00:01)!\nThread 0x7 (most recent call first):\n  File "/x/torch/a.py", line 3 in f\n'
    printed = f"{stack}{children.MARK.decode()}{{'doing': 'import'}}\n{partial}"
    text = f"os.write(1, {printed.encode()!r}); time.sleep(600)"
    with Child(question(text), TIMEOUT) as child:
        result = end_after(child, {"doing": "import"})
    assert (result.place, result.noise) == ("/x/torch/a.py:3", "hello")


def test_child_ends_with_its_process_although_another_holds_the_pipe() -> None:
    text = """
import subprocess
report.say(pid=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid)
os._exit(3)
"""
    result = outcome(text)
    daemon = result.facts["pid"]
    assert result.detail == "exit status 3 at its start"
    assert is_alive(daemon)
    os.kill(daemon, signal.SIGKILL)


def test_unkillable_child_is_reported_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with Child(question("report.say(doing='cuInit'); time.sleep(600)"), TIMEOUT) as child:
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda *_: None)
            result = end_after(child, {"doing": "cuInit"})
        assert result.state == "hung"
        assert result.detail.startswith("hung, and could not be killed, in cuInit after ")
        assert is_alive(child.pid)
    assert not is_alive(child.pid)


def test_end_by_only_shortens_the_deadline() -> None:
    with Child(question("time.sleep(600)"), TIMEOUT) as child:
        child.end_by(child.begun + 2 * TIMEOUT)
        assert child.deadline == child.begun + TIMEOUT
        child.end_by(child.begun + 0.1)
        assert child.outcome().state == "hung"


def test_deadline_moves_by_the_time_that_the_child_waited_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = question("time.sleep(0.5); report.done()")
    monkeypatch.setattr(children, "_waited", lambda _: 60.0)
    with Child(slow, 0.01) as child:
        assert child.outcome().state == "answered"
    with Child(slow, 0.01) as child:
        child.end_by(child.begun)
        assert child.outcome().state == "hung"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_process_that_gets_no_processor_waits_for_one() -> None:
    """A process of the class SCHED_IDLE runs only while no other process wants its processor."""
    spin = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        try:
            text = f"os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); {spin}"
            with Child(question(text), TIMEOUT) as child:
                while children._waited(child.pid) < 0.2 and not child.ended():
                    time.sleep(0.01)
                assert not child.ended()
        finally:
            busy.kill()
    assert children._waited(1 << 30) == 0.0  # no such process


def test_idle_child_is_ended_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_POLL", 0.05)
    monkeypatch.setattr(children, "_SLOW", 0.0)
    steps: list[str] = []
    with Child(question("report.say(doing='import'); time.sleep(600)"), TIMEOUT) as child:
        result = child.outcome(0.3, steps.append)
    if sys.platform == "linux":
        assert re.fullmatch(r"hung in import after \d\.\d s, idle for the last 0 s", result.detail)
    assert "import" in steps
    assert not is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_work_of_its_subprocesses_counts_as_work_of_the_child() -> None:
    text = "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with Child(question(text), TIMEOUT) as child:
        while children._work_done(child.pid) < 3 * children._IDLE_WORK and not child.ended():
            time.sleep(0.01)
        assert not child.ended()
    assert children._work_done(1 << 30) == -1  # no such session


def interrupt_inside(child: Child) -> None:
    with child:
        assert not child.ended()
        raise KeyboardInterrupt


def test_leaving_the_context_ends_the_child() -> None:
    child = Child(question("time.sleep(600)"), TIMEOUT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_inside(child)
    assert not is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="tests how Linux signals a closed pipe")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_child_ends_with_its_parent(tmp_path: Path, number: str) -> None:
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
        parent.send_signal(getattr(signal, number))
        assert pipe.read() == b""  # closed when the child ended, before its alarm


def test_child_ends_itself_with_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_BACKSTOP", 1 - TIMEOUT - children._LATE)
    assert outcome("report.say(doing='work'); time.sleep(600)").detail == "SIGALRM in work"


# -- environment of the child ------------------------------------------------------------------------------------------


def test_environment_with_invalid_utf8() -> None:
    text = "report.say(value=os.environb[b'X'].hex()); report.done()"
    assert outcome(text, X=os.fsdecode(b"\xff\xfea")).facts["value"] == "fffe61"


def test_empty_environment() -> None:
    empty = Question(question("report.say(n=len(os.environ)); report.done()").script, sys.executable, Host(environ={}))
    with Child(empty, TIMEOUT) as child:
        assert child.outcome().facts["n"] <= 1  # LC_CTYPE, which Python sets


@each(
    ("python", "environ", "message"),
    [
        ("/nowhere/python", {}, "could not be started: /nowhere/python does not exist"),
        ("/dev", {}, "could not be started: /dev: permission denied"),
        (sys.executable, {"A": "\0"}, f"could not be started: {sys.executable}: embedded null byte"),
        (sys.executable, {"A=B": "1"}, f"could not be started: {sys.executable}: illegal environment variable name"),
    ],
)
def test_child_that_cannot_start_is_reported(python: str, environ: dict[str, str], message: str) -> None:
    with Child(Question(source("ask_driver"), python, Host(environ=environ)), TIMEOUT) as child:
        result = child.outcome()
    assert (result.state, result.detail.lower(), child.pid) == ("unasked", message.lower(), 0)
    assert child.ended()


def test_child_runs_in_the_current_directory_of_the_host(tmp_path: Path) -> None:
    text = question("report.say(cwd=os.getcwd()); report.done()").script
    for cwd, expected in ((str(tmp_path), tmp_path), (str(tmp_path / "gone"), Path.cwd()), ("", Path.cwd())):
        with Child(Question(text, sys.executable, Host(cwd=cwd)), TIMEOUT) as child:
            assert child.outcome().facts["cwd"] == str(expected)


def test_child_of_a_parent_without_open_files(tmp_path: Path) -> None:
    text = question("report.say(a=1); report.done()").script
    script = f"""
import os, sys
os.closerange(0, 3)
sys.path.insert(0, {str(SRC)!r})
from transload.diagnose.children import Child, Question
from transload.diagnose.host import Host
with Child(Question({text!r}, sys.executable, Host()), 60) as child:
    result = child.outcome()
open({str(tmp_path / "told")!r}, "w").write(f"{{result.state}} {{result.facts['a']}}")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (tmp_path / "told").read_text() == "answered 1"


# -- scripts -----------------------------------------------------------------------------------------------------------


@each("script", SCRIPTS)
def test_script_is_self_contained_for_any_python(script: str) -> None:
    text = source(script)
    tree = ast.parse(text, feature_version=(3, 7))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert text.isascii()  # it must pass through a command line in any locale
    assert len(text) < 30_000  # and through that of Windows, limited to 32,767 characters
    assert not any(str(module).startswith("transload") for module in modules)
    assert text.count("class Report:") == 1


def test_script_is_read_from_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as app:
        for file in sorted((SRC / "transload").rglob("*.py")):
            app.write(file, file.relative_to(SRC))
    script = "from transload.diagnose.children import source; print(source('ask_driver'))"
    process = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'app.pyz')!r}); {script}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout == source("ask_driver") + "\n"
