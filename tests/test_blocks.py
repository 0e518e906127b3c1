"""Every command and every piece of code in the manual does what the page says.

Blocks run in a folder with the files that they name. An HTML comment before a block, which readers do not see, holds
what else the test needs to know: ``<!-- not run: needs a GPU -->``, ``<!-- exits with 1 -->``, ``<!-- saved as a.py
-->``, or a package without which the block is left out, ``<!-- needs lightning -->``. Blocks that cannot be run, a
synopsis or a signature, are compared with the program in test_synopses.py.
"""

from __future__ import annotations

import ast
import doctest
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks
from tests.block_files import Net, clear, lay_out
from tests.blocks import PAGES, ROOT, Block, blocks_of, steps_of
from tests.diagnose.machines import healthy
from tests.release import RELEASE
from tests.test_doctor_pages import README_MACHINE

import transload
import transload.diagnose
from transload.cli.main import main
from transload.diagnose.report import judge_machine

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NOT_RUN = [block for block in BLOCKS if block.note.startswith("not run: ")]
REASONS = (
    "needs what DeepSpeed has saved",
    "needs a GPU",
    "needs two GPUs",
    "needs a cluster",
    "needs Docker",
    "needs Windows",
    "needs the network",
    "shows a broken machine",
)
AT_MOST_NOT_RUN = 10
AS_SHOWN = torch.version.cuda is None and sys.platform == "linux"
"""Whether reports read as on the machine of the pages, which has no GPU and a torch for the CPU."""
EXITS = {("verify.md", "transload verify model.pt"): "1"}
"""Exit codes that a page states only in its text."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with ``transload`` and ``python`` on the path.

    Both are forked from a process that has imported torch; test_run.py starts new interpreters.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    client = f' -S "{forks.__file__}" ask {forks.server("torch")}' if forks.FORKS else ""
    for name, options in (("python", client), ("python3", ""), ("transload", f"{client} -m transload")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{options} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    ranks = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    (programs / "torchrun").write_text(ranks, encoding="utf-8")
    (programs / "torchrun").chmod(0o755)
    for name in ("srun", "mpirun", "pdsh", "clush"):
        shutil.copyfile(Path(__file__).with_name("launcher.sh"), programs / name)
        (programs / name).chmod(0o755)
    environment = tmp_path / "here" / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or torchrun warns that it sets it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return tmp_path / "here"


# -- one page ----------------------------------------------------------------------------------------------------------

PAGES_THAT_RUN = [page for page in PAGES if {block.kind for block in blocks_of(page)} & {"python", "shell"}]


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell")
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=[page.stem for page in PAGES_THAT_RUN])
def test_blocks_do_what_the_page_says(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent: dict[str, None] = {}
    doctor, machine = transload.diagnose.doctor, healthy() if page.name == "api.md" else README_MACHINE
    monkeypatch.setattr(transload, "doctor", lambda *_, **__: judge_machine(machine))
    monkeypatch.setattr(transload.diagnose, "doctor", lambda python="", **_: doctor(python, torch=False))
    names, section = prelude(), "none yet"
    for block in blocks_of(page):
        if block.section != section:
            section = block.section
            lay_out(folder, page.name, section)
        if block in NOT_RUN or (RELEASE < (2, 3) and "dcp.load(" in block.text):
            continue
        if block.note.startswith("needs ") and find_spec(block.note.removeprefix("needs ")) is None:
            absent[block.note.removeprefix("needs ")] = None
            continue
        if block.note.startswith("saved as "):
            (folder / block.note.removeprefix("saved as ")).write_text(block.text, encoding="utf-8")
            continue
        clear(folder, page.name, block.kind)
        deviations = (
            {"shell": shell, "python": python}[block.kind](block, names) if block.kind in ("shell", "python") else []
        )
        assert [*deviations] == [], block.place
        for future in (value for value in names.values() if isinstance(value, Future)):
            future.result()  # before the test leaves this folder
    if absent:
        pytest.skip(f"the other blocks need {', '.join(absent)}: make test-integrations")


def prelude() -> dict[str, Any]:
    """The names that the pages assume to be defined."""
    torch.manual_seed(0)
    model = Net()
    checkpoint = {"model": model.state_dict(), "epoch": 3}
    names = {"transload": transload, "torch": torch, "hashlib": hashlib, "os": os, "Net": Net}
    return {**names, "model": model, "checkpoint": checkpoint, "tensor": torch.arange(4.0)}


# -- shell -------------------------------------------------------------------------------------------------------------


def shell(block: Block, _: object) -> Iterator[str]:
    """Run the commands of a block; yield every deviation from the page."""
    for step in steps_of(block):
        if step.command.startswith("torchrun ") and RELEASE < (2, 6):
            continue  # fully_shard has another name there
        code, output = run(step.command)
        if str(code) not in accepted_codes(block, step.command):
            yield f"{step.command} exits with {code}: {output}"
        if RELEASE < (2, 6) and "Unsupported operand" in step.output:
            continue  # the message of weights_only=True, which is not the default there
        if step.output and AS_SHOWN and not pattern_of(step.output).fullmatch(normalized(output)):
            yield f"{step.command} prints {output}"


def accepted_codes(block: Block, command: str) -> list[str]:
    """The exit codes to accept: those of the comment, else 0; the result of the doctor depends on the machine."""
    if block.note.startswith("exits with "):
        return re.findall(r"\d+", block.note)
    return (
        ["0", "1"] if re.search(r"transload(\.pyz)? doctor", command) else [EXITS.get((block.page.name, command), "0")]
    )


def run(command: str) -> tuple[int, str]:
    """Run a shell command, in this process if it only calls transload; return its exit code and its output."""
    command = command.replace("…", "")
    words = shlex.split(command)
    if command == "make zipapp":
        command = shlex.join([sys.executable, str(ROOT / "scripts" / "build_zipapp.py"), "dist/transload.pyz"])
    elif words[0] == "make":
        return check_make_target(words)
    elif words[0] == "python" and words[1].startswith("bench/"):
        return check_benchmark(words)
    elif words[0] == "transload" and words[1] != "run" and not set("|&<$;*`") & set(command):
        return call_in_process(words)
    command = re.sub(r"\bdoctor\b(?=$| --require)", "doctor --no-torch", command)  # to import torch takes seconds
    process = subprocess.run(["sh", "-c", command], check=False, capture_output=True, encoding="utf-8", timeout=300)  # noqa: S607
    return process.returncode, process.stdout + process.stderr


def call_in_process(words: list[str]) -> tuple[int, str]:
    """Call transload in this process; ``> NAME`` redirects its standard output."""
    stdout, stderr = io.StringIO(), io.StringIO()
    words, redirect = (words[:-2], words[-1]) if words[-2] == ">" else (words, "")
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = main(words[1:])
    if redirect:
        Path(redirect).write_text(stdout.getvalue(), encoding="utf-8")
    return code, stdout.getvalue() + stderr.getvalue()


def check_make_target(words: list[str]) -> tuple[int, str]:
    """Check that a target of make exists; other tests cover what it does."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = [word for word in words[1:] if "=" not in word and f"\n{word}:" not in makefile]
    return len(missing), f"no target {missing}"


def check_benchmark(words: list[str]) -> tuple[int, str]:
    """Check that a benchmark exists and has the options; it is not run, because that takes minutes."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py"))
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in sources]
    return len(missing) + (not (ROOT / words[1]).is_file()), f"no option {missing}"


def pattern_of(shown: str) -> re.Pattern[str]:
    """A pattern for what a page shows, in which ``…`` matches anything."""
    return re.compile(as_pattern(normalized(shown)))


def as_pattern(shown: str) -> str:
    return ".*".join(map(re.escape, shown.split("…")))


def normalized(text: str) -> str:
    """A text without numbers and line breaks, which may differ between machines, terminals and releases."""
    text = text.replace("numpy.core.", "numpy._core.")  # the name before numpy 2
    return " ".join(re.sub(r"\b[0-9a-f]{8}\b|\d[\d.,]*(\+cpu\b)?", "0", text).split())


# -- Python ------------------------------------------------------------------------------------------------------------


def python(block: Block, names: dict[str, Any]) -> list[str]:
    """Run the code of a block; return every deviation from the page."""
    with redirect_stdout(io.StringIO()):
        return list(session(block, names) if ">>> " in block.text else program(block, names))


def session(block: Block, names: dict[str, Any]) -> Iterator[str]:
    """Run a session of the interpreter; yield every output that differs from the page."""
    for example in doctest.DocTestParser().get_examples(block.text):
        stdout = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(stdout):
            warnings.simplefilter("always")
            exec(compile(example.source, block.place, "single"), names)  # noqa: S102
        output = stdout.getvalue() + "".join(f"{warning.category.__name__}: {warning.message}\n" for warning in caught)
        if example.want and AS_SHOWN and not re.fullmatch(as_pattern(one_line(example.want)), one_line(output)):
            yield f"{example.source} prints {output}"


def one_line(text: str) -> str:
    return " ".join(re.sub(r"\d+\.\d+\.\d+[+\w]*", "VERSION", text).split())


def program(block: Block, names: dict[str, Any]) -> Iterator[str]:
    """Run a program statement by statement; yield every value that differs from the comment after it."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(block.text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.parse(block.text).body:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", transload.LandingWarning)
            warnings.filterwarnings("ignore", "torch.distributed is")  # not initialized: there is one process
            if block.note.startswith("needs "):  # the package gives advice by warnings
                warnings.simplefilter("ignore")
            if not isinstance(node, ast.Expr):
                exec(compile(ast.Module([node], []), block.place, "exec"), names)  # noqa: S102
                continue
            value = eval(compile(ast.Expression(node.value), block.place, "eval"), names)  # noqa: S307
        comment = comments.get(node.end_lineno or 0, "")
        if shows_a_value(comment) and AS_SHOWN and not matches_value(comment, value):
            yield f"{ast.unparse(node)} is {value!r}, and not {comment}"


def shows_a_value(comment: str) -> bool:
    return re.match(r"[('\d\[]|device\(|True\b|False\b", comment) is not None


def matches_value(comment: str, value: object) -> bool:
    """Whether a comment begins with the value; the text after a colon or a comma is for readers."""
    shown = as_pattern(comment.partition(": ")[0])
    return re.fullmatch(shown, repr(value)) is not None or comment.startswith(f"{value!r},")


# -- all pages ---------------------------------------------------------------------------------------------------------


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    assert [block.place for block in NOT_RUN if not block.note.removeprefix("not run: ").startswith(REASONS)] == []
    assert len(NOT_RUN) <= AT_MOST_NOT_RUN, "\n".join(f"{block.place}: {block.note}" for block in NOT_RUN)


def test_every_comment_is_right_before_a_block_and_understood() -> None:
    """Any other comment would be ignored."""
    for page in PAGES:
        notes = re.findall(r"^<!-- (.+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert notes == [block.note for block in blocks_of(page) if block.note]
        assert [
            note for note in notes if not note.startswith(("not run: ", "needs ", "exits with ", "saved as "))
        ] == []


def test_blocks_of_every_kind_are_found() -> None:
    """Blocks that the parser misses are not tested, so this is what it must find."""
    kinds = {block.kind for block in BLOCKS}
    assert kinds == {"synopsis", "signature", "python", "shell", "other"}
    assert len(BLOCKS) > 40
