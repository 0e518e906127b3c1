"""``transload run`` behaves like ``python``: each program runs both ways, and the results are compared."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import pytest
from jsonschema import ValidationError
from tests import forks
from tests.schema import validate

import transload
from transload.cli.main import main

SOURCE = Path(transload.__file__).parent.parent
SCHEMA = Path(__file__).parent.parent.parent / "docs" / "run.schema.json"
ENV = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1", "NO_COLOR": "1"}
RUN = ("-m", "transload", "run")

PROBE = """\
import sys
import beside

for name in sorted(set(globals()) - {"__builtins__", "sys", "beside"}):
    value = globals()[name]
    if name == "__loader__":
        value = type(value).__name__
    if name == "__spec__" and value is not None:
        value = value.name, value.parent, value.origin
    print(name, value)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""
RELATIVE = "from . import sibling\nfrom .sibling import value\nprint(value, __package__)\n"


def start(*arguments: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env=ENV,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def same_as_python(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The result of a program, which must be the same with and without ``transload run``."""
    plain = start(*arguments, cwd=cwd, stdin=stdin)
    ours = start(*RUN, *arguments, cwd=cwd, stdin=stdin)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with programs."""
    files = {
        "probe.py": PROBE,
        "beside.py": "",
        "package/__init__.py": "",
        "package/__main__.py": PROBE,
        "package/relative.py": RELATIVE,
        "package/sibling.py": "value = 7\n",
        "other/probe.py": PROBE,
        "other/beside.py": "",
        "main/__main__.py": PROBE,
        "main/beside.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with ZipFile(tmp_path / "program.pyz", "w") as archive:
        archive.writestr("__main__.py", PROBE)
        archive.writestr("beside.py", "")
    return tmp_path


PROGRAMS = {
    "script": ["probe.py"],
    "arguments": ["probe.py", "a b", "--help", "-h", "-m", "--device", "x", "--", "-1", "", "--version"],
    "other-folder": ["other/probe.py", "x"],
    "path-with-dots": ["other/../probe.py"],
    "module": ["-m", "probe", "--help", "-m", "x"],
    "package": ["-m", "package", "x"],
    "relative-imports": ["-m", "package.relative"],
    "folder": ["main", "x"],
    "archive": ["program.pyz", "--x"],
}


@pytest.mark.parametrize("arguments", PROGRAMS.values(), ids=PROGRAMS)
def test_main_module_argv_and_path_are_as_in_python(folder: Path, arguments: list[str]) -> None:
    assert same_as_python(*arguments, cwd=folder).returncode == 0


def test_program_is_read_from_stdin(folder: Path) -> None:
    assert same_as_python("-", "x", "--help", cwd=folder, stdin=PROBE).returncode == 0
    assert same_as_python("-", cwd=folder, stdin="def f():\n    return 1 / 0\nf()\n").returncode == 1
    assert same_as_python("-", cwd=folder, stdin="def f(:\n").returncode == 1


def test_the_builtins_of_the_main_module_are_a_module(folder: Path) -> None:
    """Programs add names there, and look for names that a profiler has added."""
    (folder / "builtin.py").write_text(
        'print(type(__builtins__).__name__, "profile" in dir(__builtins__))\n__builtins__.mine = 1\nprint(mine)\n',
        encoding="utf-8",
    )
    assert same_as_python("builtin.py", cwd=folder).returncode == 0


def test_symlink_resolves_to_the_folder_of_the_script(folder: Path) -> None:
    try:
        (folder / "link.py").symlink_to(folder / "other" / "probe.py")
    except OSError:
        pytest.skip("this system cannot create symbolic links")
    assert str(folder / "other") in same_as_python("link.py", cwd=folder).stdout


def test_a_compiled_script_runs(folder: Path) -> None:
    import py_compile

    py_compile.compile(str(folder / "probe.py"), cfile=str(folder / "compiled.pyc"))
    ours = start(*RUN, "compiled.pyc", "x", cwd=folder)
    assert "['compiled.pyc', 'x']" in ours.stdout
    assert ours.returncode == 0, ours.stderr


ENDS = {
    "end": ("pass", 0),
    "exit": ("sys.exit()", 0),
    "code": ("sys.exit(7)", 7),
    "negative": ("sys.exit(-1)", 255 if os.name != "nt" else 0xFFFFFFFF),
    "word": ("sys.exit('a word')", 1),
    "object": ("sys.exit([1, 2])", 1),
    "raise": ("deep()", 1),
    "chain": ("\ntry:\n    deep()\nexcept ValueError as error:\n    raise KeyError('x') from error", 1),
    "own-hook": ("sys.excepthook = lambda *told: print(told[0], told[2].tb_frame.f_code.co_name); deep()", 1),
    "os-exit": ("os._exit(5)", 5),
    "syntax": ("compile('1 +', 'text', 'exec')", 1),
    "at-exit": ("atexit.register(lambda: print(deep.__module__, sys.modules['__main__'].deep is deep))", 0),
    "thread": ("threading.Thread(target=lambda: print(sys.modules['__main__'].deep is deep)).start()", 0),
    "stdin": ("print(sys.stdin.read().upper())", 0),
    "pickle": ("print(pickle.loads(pickle.dumps(Kind())).__class__ is Kind)", 0),
    "future": ("print(deep.__annotations__)", 0),
    "source": ("import inspect; print(inspect.getsource(deep))", 0),
}
POSIX_ENDS = {
    "interrupt": ("raise KeyboardInterrupt", -2),
    "signalled": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -2),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -15),
    "abort": ("os.abort()", -6),
}
TOP = """\
import atexit, os, pickle, signal, sys, threading, time

class Kind: pass

def deep(size: int = 1): raise ValueError("no")

"""


@pytest.mark.parametrize(("text", "code"), [*ENDS.values(), *POSIX_ENDS.values()], ids=[*ENDS, *POSIX_ENDS])
def test_program_ends_as_in_python(tmp_path: Path, text: str, code: int) -> None:
    if os.name != "posix" and (text, code) in POSIX_ENDS.values():
        pytest.skip("needs POSIX signals")
    (tmp_path / "program.py").write_text(TOP + text, encoding="utf-8")
    assert same_as_python("program.py", cwd=tmp_path, stdin="words").returncode == code


def error_class(result: subprocess.CompletedProcess[str]) -> str:
    """The class of the error that a program ended with."""
    return "".join(result.stderr.splitlines()[-1:]).partition(":")[0]


SOURCES = {
    "incomplete": "x = 1 +",
    "return-outside-function": "return",
    "latin": "# coding: latin-1\nprint('\xe4')",
    "not-utf8": "print('\xe4')",
    "unknown-coding": "# coding: nonsense",
}


@pytest.mark.parametrize("text", SOURCES.values(), ids=SOURCES)
def test_source_is_decoded_and_compiled_as_in_python(tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text(text, encoding="latin-1")
    plain, ours = (start(*how, "program.py", cwd=tmp_path) for how in ((), RUN))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert error_class(ours) == error_class(plain)


@contextmanager
def running(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, *RUN, *arguments], cwd=cwd, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_program_handles_its_signals(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    with running("program.py", cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(300) == 9


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_interrupted_program_shows_only_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint(1, flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    with running("program.py", cwd=tmp_path) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGINT
    assert "transload" not in stderr
    assert stderr.endswith("KeyboardInterrupt\n")


def test_a_missing_script_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "absent.py")]) == 2
    assert capsys.readouterr().err == f"transload: {tmp_path / 'absent.py'}: there is no such script\n"
    assert main(["run", "http"]) == 2
    assert "transload run -m http" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["-m", "no_such_module"], ["-m", "package.absent"], ["-m", "xml"], ["empty"]], ids=" ".join
)
def test_a_script_that_cannot_run_fails_as_in_python(folder: Path, arguments: list[str]) -> None:
    (folder / "empty").mkdir()
    plain, ours = (start(*how, *arguments, cwd=folder) for how in ((), RUN))
    assert (ours.returncode, ours.stdout) == (plain.returncode, "")
    assert plain.stderr.partition(": ")[2] == ours.stderr.partition(": ")[2]


def test_bad_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert main(["run", "--nonsense", "x.py"]) == 2
    assert capsys.readouterr().out == ""


def test_run_imports_neither_torch_nor_heavy_modules(tmp_path: Path) -> None:
    heavy = {"torch", "typing", "dataclasses", "multiprocessing", "zipfile", "transload.loading"}
    heavy -= {"dataclasses"} if sys.version_info >= (3, 14) else set()  # argparse imports it there, for colours
    (tmp_path / "program.py").write_text(
        f"import sys\nprint(sorted({heavy} & set(sys.modules)))\n",
        encoding="utf-8",
    )
    assert start("-S", *RUN, "program.py", cwd=tmp_path).stdout == "[]\n"


def test_zipapp_runs_a_program(tmp_path: Path) -> None:
    build = SOURCE.parent / "scripts" / "build_zipapp.py"
    if not build.exists():
        pytest.skip("not run from a checkout")
    subprocess.run([sys.executable, build, tmp_path / "transload.pyz"], check=True, capture_output=True, timeout=300)
    (tmp_path / "program.py").write_text("import sys; print(sys.argv, sys.path[0])\n1 / 0\n", encoding="utf-8")
    result = start("-I", "transload.pyz", "run", "program.py", "x", cwd=tmp_path)
    assert result.stdout.startswith("['program.py', 'x']")
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "transload" not in result.stderr.replace(str(tmp_path), "")


EXPLAINED = """\
import torch

def evaluate():
    torch.load("page.pt", weights_only=False)

evaluate()
"""


def test_an_uncaught_exception_is_explained_below_its_traceback(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "page.pt").write_text("<!DOCTYPE html><html>Not found</html>", encoding="utf-8")
    (tmp_path / "program.py").write_text(EXPLAINED, encoding="utf-8")
    result = forks.run(*RUN, "program.py", cwd=tmp_path, env=ENV)
    assert result.returncode == 1
    trace, _, explanation = result.stderr.partition("\n\n")
    assert trace.startswith('Traceback (most recent call last):\n  File "')
    assert trace.splitlines()[1].endswith('program.py", line 6, in <module>')
    assert "transload" not in trace.replace(sys.prefix, "")
    assert "page.pt: it cannot be loaded: a web page" in " ".join(explanation.split())


RANK = """\
import os, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["LOCAL_RANK"])
state = torch.load(sys.argv[1], map_location=f"cuda:{rank + 90}")
total = torch.full((1,), float(rank + 1), device=f"cuda:{rank + 90}").cpu()
dist.all_reduce(total)
assert total.item() == 3.0, total
print(f"{rank} of {dist.get_world_size()} {sys.argv[2:]} {len(state)}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_run_works_under_torchrun(tmp_path: Path, data: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or sys.platform != "linux":
        pytest.skip("needs torchrun")
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    if forks.FORKS:  # the ranks, too, start with torch imported
        launcher += ["--no-python", sys.executable, "-S", forks.__file__, "ask", forks.server("torch")]
    program = (str(data / "h200" / "state_dict_cuda1.pt"), "--fast")
    environ = {**ENV, "TMPDIR": str(tmp_path)}  # torchrun leaves folders behind
    result = forks.run(*launcher, *RUN, "rank.py", *program, cwd=tmp_path, env=environ)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n"))[-2:] == ["0 of 2 ['--fast'] 10", "1 of 2 ['--fast'] 10"]
    assert result.stderr.count("LandingWarning") == 2


def test_device_that_is_missing_here_is_refused_when_torch_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "x.py").write_text("print(1)\nimport torch\nprint(2)", encoding="utf-8")
    result = start(*RUN, "--device", "cuda:3", "x.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "1\n")
    assert "transload: there is no cuda:3 here, only cpu" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "gpu", "x.py"], "'gpu' is not a device"),
        (["python", "x.py"], "Leave it out: transload run SCRIPT."),
    ],
    ids=["device", "python"],
)
def test_usage_errors_are_reported(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print(1)", encoding="utf-8")
    result = start(*RUN, *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr


# -- in CI: --strict and --json

CHANGED = """\
import torch

torch.zeros(2, device="cuda:5")
torch.zeros(2, device="cuda:5")
"""
CHILD = """\
import atexit, multiprocessing, os, sys, threading, torch

def child():
    torch.zeros(1, device="cuda:6")
    os._exit(0)

def late():
    torch.zeros(1, device="cuda:7")

def later():
    torch.zeros(1, device="cuda:8")

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    atexit.register(later)
    threading.Timer(0.2, late).start()
"""


def run_program(text: str, *options: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program with torch under ``transload run``; further options of its own come after ``x.py``."""
    pytest.importorskip("torch")
    (cwd / "x.py").write_text(text, encoding="utf-8")
    program = () if "x.py" in options else ("x.py",)
    return forks.run(*RUN, *options, *program, cwd=cwd, env={**ENV, "CUDA_VISIBLE_DEVICES": "", **environ})


def test_strict_lists_what_was_changed_and_exits_with_1(tmp_path: Path) -> None:
    result = run_program(CHANGED, "--strict", cwd=tmp_path)
    assert result.returncode == 1
    expected = "transload run --strict: the program does not run here as it is:\n  x.py:3: cuda:5 → cpu\n"
    assert result.stderr.endswith(expected)
    asked = run_program("import torch\nprint(torch.cuda.is_available())", "--strict", "--pretend-cuda", cwd=tmp_path)
    assert (asked.returncode, asked.stdout) == (1, "True\n")
    assert "  x.py:2: torch.cuda.is_available() pretended that there is a GPU\n" in asked.stderr


@pytest.mark.parametrize("text", ["import torch\ntorch.zeros(2, device='cpu')", "import sys\nsys.exit()", "print(1)"])
def test_strict_accepts_a_program_that_runs_as_it_is(text: str, tmp_path: Path) -> None:
    result = run_program(text, "--strict", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_program_that_fails_keeps_its_exit_code(tmp_path: Path) -> None:
    for end, code in {"import sys; sys.exit(3)": 3, "raise ValueError": 1, "import sys; sys.exit('no')": 1}.items():
        (tmp_path / "out.json").unlink(missing_ok=True)
        result = run_program(f"{CHANGED}{end}\n", "--strict", "--json", "out.json", cwd=tmp_path)
        assert result.returncode == code
        assert "  x.py:3: cuda:5 → cpu\n" in result.stderr
        expected = None if "raise" in end else code
        assert json.loads((tmp_path / "out.json").read_text(encoding="ascii"))["exit_code"] == expected


def test_a_change_whose_record_is_cut_off_still_counts(tmp_path: Path) -> None:
    """As a full disk leaves it."""
    text = """
import glob, os, tempfile
for record in glob.glob(os.path.join(tempfile.gettempdir(), "transload-*.jsonl")):
    with open(record, "a") as file:
        file.write('["device", "cu')
"""
    (tmp_path / "temporary").mkdir()
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp_path / "temporary"))
    result = run_program(text, "--strict", cwd=tmp_path, **temporary)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False), result.stderr
    assert "  a child process: something whose record is cut off\n" in result.stderr
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize("how", multiprocessing.get_all_start_methods())
def test_changes_in_children_and_at_the_end_are_listed(how: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # a short path: that of a socket below it is limited
        names = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temporary)
        result = run_program(CHILD, "--strict", "--json", "-", "x.py", how, cwd=tmp_path, **names)
        left = [name for name in os.listdir(temporary) if name.endswith(".jsonl")]
    assert result.returncode == 1, result.stderr
    changes = json.loads(result.stdout.splitlines()[-1])["changes"]
    assert sorted((row["what"], row["where"]) for row in changes) == [
        ("cuda:6", "x.py:4"),
        ("cuda:7", "x.py:8"),
        ("cuda:8", "x.py:11"),
    ]
    assert left == []


def test_json_has_what_was_changed(tmp_path: Path) -> None:
    result = run_program(f"{CHANGED}torch.cuda.get_device_name()", "--json", "out.json", cwd=tmp_path)
    assert result.returncode == 0
    document = json.loads((tmp_path / "out.json").read_text(encoding="ascii"))
    validate(document, SCHEMA)
    assert document == {
        "schema": 1,
        "path": "x.py",
        "ok": False,
        "exit_code": 0,
        "changes": [
            {"kind": "device", "what": "cuda:5", "instead": "cpu", "where": "x.py:3"},
            {"kind": "device", "what": "cuda", "instead": "cpu", "where": "x.py:5"},
            {"kind": "answered", "what": "torch.cuda.get_device_name", "instead": "", "where": "x.py:5"},
        ],
    }
    with pytest.raises(ValidationError):
        validate({**document, "error": {}}, SCHEMA)
    result = run_program("print('no newline', end='\\n')", "--json", "-", "--quiet", cwd=tmp_path)
    first, last = result.stdout.splitlines()
    assert (first, json.loads(last)["ok"]) == ("no newline", True)


def test_each_rank_of_a_launcher_writes_its_own_json(tmp_path: Path) -> None:
    run_program("import os; os.chdir('/')", "--json", "out.json", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert [path.name for path in tmp_path.glob("out*")] == ["out.rank1.json"]


def test_json_replaces_only_earlier_reports_and_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program("print(1)", "--json", "out.json", cwd=tmp_path).returncode == 0
    assert run_program("print(1)", "--json", "out.json", "--force", cwd=tmp_path).returncode == 0
    for arguments, expected in {
        ("out.json",): "already exists",
        ("x.py", "--force"): "is not a report",
        ("absent/out.json",): "$ mkdir ",
        ("absent/out.json", "--force"): "$ mkdir ",
        (".",): "it is a directory",
    }.items():
        assert main(["run", "--json", *arguments, "x.py"]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert expected in output.err
    assert main(["run", "--json", "-", "absent.py"]) == 2
    validate(json.loads(capsys.readouterr().out), SCHEMA)


def test_a_report_that_cannot_be_written_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = run_program("import os; os.rmdir('folder')", "--json", "folder/out.json", cwd=tmp_path)
    assert result.returncode == 2
    assert "$ mkdir " in result.stderr
