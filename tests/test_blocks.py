"""Every command and every piece of code in the manual does what the page says.

Blocks are run in a folder that has the files they name. A comment before a block, which readers do not see, says what
else is to be known: ``<!-- not run: needs a GPU -->``, ``<!-- exits with 1 -->``. What cannot be run, a
synopsis or a signature, is compared with the program in test_synopses.py.
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
    "needs a GPU",
    "needs two GPUs",
    "needs a cluster",
    "needs Docker",
    "needs Windows",
    "needs the network",
    "shows a broken machine",
)
AT_MOST_NOT_RUN = 8
AS_SHOWN = torch.version.cuda is None and sys.platform == "linux"
"""Whether reports read here as on the machine of the pages, which has no GPU and a torch for the CPU."""
EXITS = {("verify.md", "transload verify model.pt"): "1"}
"""For pages that say it in their words only."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with ``transload`` and ``python`` on the path.

    They are forked from a process that has imported torch; test_run.py starts programs anew.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    served = f' -S "{forks.__file__}" ask {forks.server("torch")}' if forks.FORKS else ""
    for name, call in (("python", served), ("python3", ""), ("transload", f"{served} -m transload")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{call} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("srun", "mpirun", "pdsh", "clush"):
        shutil.copyfile(Path(__file__).with_name("launcher.sh"), programs / name)
        (programs / name).chmod(0o755)
    environment = tmp_path / "here" / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return tmp_path / "here"


# -- a page ------------------------------------------------------------------------------------------------------------

PAGES_THAT_RUN = [page for page in PAGES if {block.kind for block in blocks_of(page)} & {"python", "shell"}]


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell")
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=[page.stem for page in PAGES_THAT_RUN])
def test_blocks_do_what_the_page_says(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examine, machine = transload.diagnose.doctor, healthy() if page.name == "api.md" else README_MACHINE
    monkeypatch.setattr(transload, "doctor", lambda *_, **__: judge_machine(machine))
    monkeypatch.setattr(transload.diagnose, "doctor", lambda python="", **_: examine(python, torch=False))
    names, section = prelude(), "none yet"
    for block in blocks_of(page):
        if block.section != section:
            section = block.section
            lay_out(folder, page.name, section)
        if block in NOT_RUN:
            continue
        clear(folder, page.name, block.kind)
        told = {"shell": shell, "python": python}[block.kind](block, names) if block.kind in ("shell", "python") else []
        assert [*told] == [], block.place
        for future in (value for value in names.values() if isinstance(value, Future)):
            future.result()  # before this folder is left


def prelude() -> dict[str, Any]:
    """The names that pages take for given."""
    torch.manual_seed(0)
    model = Net()
    checkpoint = {"model": model.state_dict(), "epoch": 3}
    names = {"transload": transload, "torch": torch, "hashlib": hashlib, "os": os, "Net": Net}
    return {**names, "model": model, "checkpoint": checkpoint, "tensor": torch.arange(4.0)}


# -- shell -------------------------------------------------------------------------------------------------------------


def shell(block: Block, _: object) -> Iterator[str]:
    """Run the commands of a block; what is not as the page says."""
    for step in steps_of(block):
        code, printed = run(step.command)
        if str(code) not in allowed(block, step.command):
            yield f"{step.command} exits with {code}: {printed}"
        if RELEASE < (2, 6) and "Unsupported operand" in step.output:
            continue  # that is what weights_only=True says, which is not the default there
        if step.output and AS_SHOWN and not like(step.output).fullmatch(loose(printed)):
            yield f"{step.command} prints {printed}"


def allowed(block: Block, command: str) -> list[str]:
    """The exit codes that are right: those of the comment, else 0; what the doctor finds depends on the machine."""
    if block.note.startswith("exits with "):
        return re.findall(r"\d+", block.note)
    return (
        ["0", "1"] if re.search(r"transload(\.pyz)? doctor", command) else [EXITS.get((block.page.name, command), "0")]
    )


def run(command: str) -> tuple[int, str]:
    """Run a line of shell, in this process where it only calls transload; its exit code and what it printed."""
    command = command.replace("…", "")
    words = shlex.split(command)
    if command == "make zipapp":
        command = shlex.join([sys.executable, str(ROOT / "scripts" / "build_zipapp.py"), "dist/transload.pyz"])
    elif words[0] == "make":
        return target(words)
    elif words[0] == "python" and words[1].startswith("bench/"):
        return measure(words)
    elif words[0] == "transload" and words[1] != "run" and not set("|&<$;*`") & set(command):
        return inside(words)
    command = re.sub(r"\bdoctor\b(?=$| --require)", "doctor --no-torch", command)  # to import torch takes seconds
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, encoding="utf-8", timeout=120)  # noqa: S607
    return done.returncode, done.stdout + done.stderr


def inside(words: list[str]) -> tuple[int, str]:
    """Call transload in this process; a name after ``>`` gets what it prints."""
    printed, told = io.StringIO(), io.StringIO()
    words, into = (words[:-2], words[-1]) if words[-2] == ">" else (words, "")
    with redirect_stdout(printed), redirect_stderr(told):
        code = main(words[1:])
    if into:
        Path(into).write_text(printed.getvalue(), encoding="utf-8")
    return code, printed.getvalue() + told.getvalue()


def target(words: list[str]) -> tuple[int, str]:
    """A target of make is there; what it does is for others to test."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = [word for word in words[1:] if "=" not in word and f"\n{word}:" not in makefile]
    return len(missing), f"no target {missing}"


def measure(words: list[str]) -> tuple[int, str]:
    """A benchmark takes minutes, so it is not run: it is there, and has the options."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py"))
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in sources]
    return len(missing) + (not (ROOT / words[1]).is_file()), f"no option {missing}"


def like(shown: str) -> re.Pattern[str]:
    """What a page shows as a pattern, in which ``…`` may be anything."""
    return re.compile(as_pattern(loose(shown)))


def as_pattern(shown: str) -> str:
    return ".*".join(map(re.escape, shown.split("…")))


def loose(text: str) -> str:
    """A text without its numbers and line breaks, which may differ between machines, terminals and releases."""
    text = text.replace("numpy.core.", "numpy._core.")  # as before numpy 2
    return " ".join(re.sub(r"\b[0-9a-f]{8}\b|\d[\d.,]*(\+cpu\b)?", "0", text).split())


# -- Python ------------------------------------------------------------------------------------------------------------


def python(block: Block, names: dict[str, Any]) -> list[str]:
    """Run the code of a block; what is not as the page says."""
    with redirect_stdout(io.StringIO()):
        return list(session(block, names) if ">>> " in block.text else program(block, names))


def session(block: Block, names: dict[str, Any]) -> Iterator[str]:
    """Run a session of the interpreter; what it prints that the page does not show."""
    for example in doctest.DocTestParser().get_examples(block.text):
        printed = io.StringIO()
        with warnings.catch_warnings(record=True) as told, redirect_stdout(printed):
            warnings.simplefilter("always")
            exec(compile(example.source, block.place, "single"), names)  # noqa: S102
        said = printed.getvalue() + "".join(f"{each.category.__name__}: {each.message}\n" for each in told)
        if example.want and AS_SHOWN and not re.fullmatch(as_pattern(flat(example.want)), flat(said)):
            yield f"{example.source} prints {said}"


def flat(text: str) -> str:
    return " ".join(re.sub(r"\d+\.\d+\.\d+[+\w]*", "VERSION", text).split())


def program(block: Block, names: dict[str, Any]) -> Iterator[str]:
    """Run a program line by line; values that differ from what stands behind them in a comment."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(block.text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.parse(block.text).body:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", transload.LandingWarning)
            if not isinstance(node, ast.Expr):
                exec(compile(ast.Module([node], []), block.place, "exec"), names)  # noqa: S102
                continue
            value = eval(compile(ast.Expression(node.value), block.place, "eval"), names)  # noqa: S307
        comment = comments.get(node.end_lineno or 0, "")
        if shows_a_value(comment) and AS_SHOWN and not like_value(comment, value):
            yield f"{ast.unparse(node)} is {value!r}, and not {comment}"


def shows_a_value(comment: str) -> bool:
    return re.match(r"[('\d\[]|device\(|True\b|False\b", comment) is not None


def like_value(comment: str, value: object) -> bool:
    """Whether a comment begins with the value; what it says then, after a colon or a comma, is for readers."""
    shown = as_pattern(comment.partition(": ")[0])
    return re.fullmatch(shown, repr(value)) is not None or comment.startswith(f"{value!r},")


# -- all pages ---------------------------------------------------------------------------------------------------------


def test_what_is_not_run_is_little_and_has_a_reason() -> None:
    assert [block.place for block in NOT_RUN if not block.note.removeprefix("not run: ").startswith(REASONS)] == []
    assert len(NOT_RUN) <= AT_MOST_NOT_RUN, "\n".join(f"{block.place}: {block.note}" for block in NOT_RUN)


def test_no_comment_is_lost() -> None:
    """A comment that is not right before a block, or says nothing of ours, would be one that nobody reads."""
    for page in PAGES:
        written = re.findall(r"^<!-- (.+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert written == [block.note for block in blocks_of(page) if block.note]
        assert [note for note in written if not note.startswith(("not run: ", "exits with "))] == []


def test_blocks_are_found() -> None:
    """Of what cannot be seen nothing is tested: so here is what must be seen."""
    found = {block.kind for block in BLOCKS}
    assert found == {"synopsis", "signature", "python", "shell", "other"}
    assert len(BLOCKS) > 40
