"""The options and arguments in the manual are those of the parsers and the functions."""

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
    """The options in a line, without those of a script or module that it runs."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r"(\w+\.py|(?:^| )-m [\w.]+).*", r"\1", text)))


def page_of(command: str) -> Path:
    return ROOT / "docs" / f"{command}.md"


@each("command", COMMANDS)
def test_page_of_a_command_names_all_its_options_and_no_others(command: str) -> None:
    text = page_of(command).read_text(encoding="utf-8")
    synopsis = next(blocks_of(page_of(command)))
    assert (synopsis.kind, text.partition("\n")[0]) == ("synopsis", f"# transload {command}")
    lines = [line for line in synopsis.text.split("\n") if line.startswith(("transload", " "))]
    assert options_in(" ".join(lines)) - options_of(command) == set()
    in_table = set().union(*map(options_in, re.findall(r"^\| `(-[^`]*)` \|", text, re.MULTILINE)))
    assert in_table - options_of(command) == set()
    mentioned = {*options_in(text), "--color", "--help"}
    assert [
        action.option_strings for action in options_only(command) if not mentioned & set(action.option_strings)
    ] == []


@each("command", COMMANDS)
def test_examples_in_the_help_use_options_that_exist(command: str) -> None:
    for line in re.findall(rf"transload {command} (.*)", parser_of(command).epilog or ""):
        assert options_in(re.split(r" {2,}| [|>&]", line)[0]) - options_of(command) == set(), line


@each("page", [*PAGES, *(ROOT / "docs" / "doctor").glob("*.md")], ids=lambda page: page.stem)
def test_commands_in_the_text_of_pages_exist(page: Path) -> None:
    for line in commands_in_text(page):
        for command in re.findall(r"transload ([a-z]+)([^|&>]*)", line):
            assert command[0] in COMMANDS, line
            assert options_in(command[1]) - options_of(command[0]) == set(), line


SIGNATURES = [block for page in PAGES for block in blocks_of(page) if block.kind == "signature"]


@pytest.mark.parametrize("block", SIGNATURES, ids=[block.place for block in SIGNATURES])
def test_signatures_in_the_manual_match_the_functions(block: Block) -> None:
    match = SIGNATURE.fullmatch(block.text)
    assert match is not None
    shown = parameters(f"def f({match[2].replace('…', '...')}): ...")
    real = inspect.signature(getattr(transload, match[1]))
    actual = parameters(f"def f{re.sub(r' *->.*', '', str(plain(real)))}: ...")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in real.parameters.values())
    shown = [pair for pair in shown if pair in actual or pair[1] != "..." or not takes_any]
    assert [name for name, _ in shown] == [name for name, _ in actual]
    assert [pair for pair in zip(shown, actual, strict=False) if pair[0] != pair[1] and pair[0][1] != "..."] == []


def plain(signature: inspect.Signature) -> inspect.Signature:
    """A signature without types."""
    untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=untyped, return_annotation=inspect.Signature.empty)


def parameters(source: str) -> list[tuple[str, str]]:
    """Names and default values of the parameters, in order."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(arg.arg, ast.unparse(default) if default else "") for arg, default in pairs]
