"""What the manual says of options and arguments is what the parsers and the functions have."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import Action
from pathlib import Path

import pytest
from tests.blocks import PAGES, ROOT, SIGNATURE, Block, blocks_of, commands_in_text
from tests.each import each

import transload
from transload.cli.main import COMMANDS, parser_of


def options_only(command: str) -> list[Action]:
    return [action for action in parser_of(command)._actions if action.option_strings]


def options_of(command: str) -> set[str]:
    return {option for action in options_only(command) for option in action.option_strings}


def options_in(text: str) -> set[str]:
    """The options in a line; those of a script or module that it names are not ours."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r"(\w+\.py|(?:^| )-m [\w.]+).*", r"\1", text)))


def page_of(command: str) -> Path:
    return ROOT / "docs" / f"{command}.md"


@each("command", COMMANDS)
def test_the_page_of_a_command_has_all_its_options_and_no_others(command: str) -> None:
    text = page_of(command).read_text(encoding="utf-8")
    synopsis = next(blocks_of(page_of(command)))
    assert (synopsis.kind, text.partition("\n")[0]) == ("synopsis", f"# transload {command}")
    lines = [line for line in synopsis.text.split("\n") if line.startswith(("transload", " "))]
    assert options_in(" ".join(lines)) - options_of(command) == set()
    in_table = set().union(*map(options_in, re.findall(r"^\| `(-[^`]*)` \|", text, re.MULTILINE)))
    assert in_table - options_of(command) == set()
    named = {*options_in(text), "--color", "--help"}
    assert [action.option_strings for action in options_only(command) if not named & set(action.option_strings)] == []


@each("command", COMMANDS)
def test_examples_of_the_help_name_options_that_exist(command: str) -> None:
    for line in re.findall(rf"transload {command} (.*)", parser_of(command).epilog or ""):
        assert options_in(re.split(r" {2,}| [|>&]", line)[0]) - options_of(command) == set(), line


@each("page", [*PAGES, *(ROOT / "docs" / "doctor").glob("*.md")], ids=lambda page: page.stem)
def test_commands_between_the_words_exist(page: Path) -> None:
    for line in commands_in_text(page):
        for call in re.findall(r"transload ([a-z]+)([^|&>]*)", line):
            assert call[0] in COMMANDS, line
            assert options_in(call[1]) - options_of(call[0]) == set(), line


SIGNATURES = [block for page in PAGES for block in blocks_of(page) if block.kind == "signature"]


@pytest.mark.parametrize("block", SIGNATURES, ids=[block.place for block in SIGNATURES])
def test_signatures_are_those_of_the_functions(block: Block) -> None:
    found = SIGNATURE.fullmatch(block.text)
    assert found is not None
    shown = parameters(f"def f({found[2].replace('…', '...')}): ...")
    real = inspect.signature(getattr(transload, found[1]))
    made = parameters(f"def f{re.sub(r' *->.*', '', str(plain(real)))}: ...")
    open_ended = any(each.kind is each.VAR_KEYWORD for each in real.parameters.values())
    shown = [each for each in shown if each in made or each[1] != "..." or not open_ended]
    assert [name for name, _ in shown] == [name for name, _ in made]
    assert [each for each in zip(shown, made, strict=False) if each[0] != each[1] and each[0][1] != "..."] == []


def plain(signature: inspect.Signature) -> inspect.Signature:
    """A signature without types."""
    kept = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=kept, return_annotation=inspect.Signature.empty)


def parameters(source: str) -> list[tuple[str, str]]:
    """Names and default values, in order."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    own = node.args
    positional = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(positional) - len(own.defaults)) + list(own.defaults)
    every = [*zip(positional, defaults, strict=True), *zip(own.kwonlyargs, own.kw_defaults, strict=True)]
    return [(arg.arg, ast.unparse(default) if default else "") for arg, default in every]
