"""Write docs/api.md: every public name of transload with its signature and its contract, from the docstrings.

Usage: python scripts/api_page.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import transload

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
WIDTH = 118
HEAD = """\
# Python API

The public names of transload; all other names may change. Importing transload is fast, since each name is loaded when
it is first used. Only `load`, `load_into`, `open`, `save` and `save_async` import torch.

Returned objects are frozen. `print` shows the report of the command, `to_dict()` returns its JSON.

This page is written by `scripts/api_page.py` from the docstrings.
"""
PAGES = {"load": "loading.md#load", "open": "loading.md#open", "load_into": "loading.md#load_into"}
PAGES |= {"save": "save.md#save", "save_async": "save.md#save_async"}
COMMANDS = ("check", "convert", "doctor", "explain", "inspect", "rescue", "retag", "verify")
PAGES |= {name: f"{name}.md" for name in COMMANDS} | {"patch": "run.md", "unpatch": "run.md"}
ERRORS = """\
## Errors

All derive from `TransloadError`, and say what happened, where, why and what to do. Each also derives from an exception
that users of torch or Python already catch.
"""
WARNINGS = """
## Warnings
"""
TABLE = """
| class | is also | when |
|---|---|---|
"""


def main() -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    every = {name: getattr(transload, name) for name in sorted(vars(transload)["__all__"])}
    functions = {name: each for name, each in every.items() if isinstance(each, FunctionType)}
    classes = {name: each for name, each in every.items() if isinstance(each, type)}
    classes |= {each.__name__: each for each in map(returned, functions.values()) if each is not None}
    errors = {name: each for name, each in classes.items() if issubclass(each, BaseException)}
    results = {name: each for name, each in sorted(classes.items()) if name not in errors}
    lines = [HEAD, "## Functions\n", *map(function, functions.values())]
    lines += ["## What they return\n", *map(result, results.values())]
    warnings = {name: each for name, each in errors.items() if issubclass(each, Warning)}
    rows = [error(each) for name, each in errors.items() if name not in warnings]
    lines.append(ERRORS + TABLE + "".join(rows) + WARNINGS + TABLE + "".join(map(error, warnings.values())))
    return "\n".join(lines)


# -- one name ----------------------------------------------------------------------------------------------------------


def function(each: Callable[..., Any]) -> str:
    """The section of a function."""
    name = each.__name__
    more = f"\nMore: [{PAGES[name].partition('#')[0]}]({PAGES[name]}).\n" if name in PAGES else ""
    return f"### {name}\n\n```text\n{signature(each)}\n```\n\n{contract(each)}{more}"


def returned(each: Callable[..., Any]) -> type | None:
    """The class of transload that a function returns, if it returns one."""
    found = sys.modules[each.__module__].__dict__.get(str(inspect.signature(each).return_annotation))
    return found if isinstance(found, type) and found.__module__.startswith("transload") else None


def result(each: type) -> str:
    """The section of a class: what it means, its fields, properties and methods."""
    fields = [f"`{name}: {kind}`" for name, kind in fields_of(each)]
    parts = [f"### {each.__name__}\n\n{contract(each)}"]
    if fields:
        parts.append(filled(f"Fields: {', '.join(fields)}.") + "\n")
    methods = [f"- {line}" for line in members_of(each)]
    return "\n".join([*parts, *methods, ""] if methods else parts)


def error(each: type) -> str:
    """The row of an error."""
    implied = (transload.TransloadError, Exception, BaseException, object)
    own = [base.__name__ for base in each.__mro__[1:] if base not in implied and not base.__name__.startswith("_")]
    return f"| `{each.__name__}` | {', '.join(f'`{name}`' for name in own)} | {first_words(each)} |\n"


def fields_of(each: type) -> Iterator[tuple[str, str]]:
    """Names and types of the fields of a frozen class."""
    if dataclasses.is_dataclass(each):
        yield from ((field.name, plain(field.type)) for field in dataclasses.fields(each) if field.name[0] != "_")
    elif hasattr(each, "_fields"):
        kinds = {name: kind for base in each.__mro__ for name, kind in getattr(base, "__annotations__", {}).items()}
        yield from ((name, plain(kinds.get(name, "Any"))) for name in each._fields)


def members_of(each: type) -> Iterator[str]:
    """Public properties and methods, except ``to_dict``, which every result has."""
    ours = [base for base in each.__mro__ if base.__module__.startswith("transload.")]
    own = {name: member for base in ours for name, member in vars(base).items()}
    for name, member in own.items():
        about = inspect.getdoc(member)
        if name.startswith("_") or name == "to_dict" or about is None:
            continue
        if isinstance(member, FunctionType):
            yield filled(f"`{name}{short(member)}`: {first_words(member)}", 2)
        elif isinstance(member, property):
            yield filled(f"`{name}`: {first_words(member)}", 2)


# -- words -------------------------------------------------------------------------------------------------------------


def signature(each: Callable[..., Any]) -> str:
    """How a function is called, with types, in lines that fit and break between arguments."""
    own = inspect.signature(each)
    head, lines = f"transload.{each.__name__}(", [""]
    arguments = [plain(str(one)) for one in own.replace(return_annotation=own.empty).parameters.values()]
    if star := next((at for at, one in enumerate(own.parameters.values()) if one.kind is one.KEYWORD_ONLY), 0):
        arguments.insert(star, "*")
    for argument in arguments:
        if lines[-1] and len(head) + len(lines[-1]) + len(argument) > WIDTH - 3:
            lines.append("")
        lines[-1] += f"{argument}, "
    text = ("\n" + " " * len(head)).join(line.rstrip(" ") for line in lines).rstrip(",")
    return f"{head}{text}) -> {plain(own.return_annotation)}"


def short(member: FunctionType) -> str:
    """The arguments of a method, by name."""
    own = [f"{'*' * (each.kind is each.VAR_POSITIONAL)}{name}" for name, each in parameters(member)]
    return f"({', '.join(own)})"


def parameters(member: FunctionType) -> list[tuple[str, inspect.Parameter]]:
    """All parameters but ``self``."""
    return [*inspect.signature(member).parameters.items()][1:]


def plain(kind: Any) -> str:
    """A type, or a signature with types, as it is written in the source."""
    text = kind if isinstance(kind, str) else getattr(kind, "__forward_arg__", getattr(kind, "__name__", "Any"))
    return re.sub(r": '([^']*)'", r": \1", str(text))


def contract(each: Any) -> str:
    """A docstring as Markdown; its examples as blocks that a test runs."""
    parts = (inspect.getdoc(each) or "").split("\n\n")
    if isinstance(each, type):  # their examples use private names, unless they call a function of transload
        parts = [part for part in parts if not part.startswith(">>> ") or "transload." in part]
    shown = (example(part, each.__name__) if part.startswith(">>> ") else filled(part) for part in parts)
    return "\n\n".join(shown) + "\n"


def example(part: str, name: str) -> str:
    """An example as a user types it who has imported transload."""
    text = re.sub(r" *# doctest:.*", "", part)
    text = re.sub(rf"(?<![\w.]){name}\(", f"transload.{name}(", text)
    return f"```python\n{text}\n```"


def filled(part: str, indent: int = 0) -> str:
    """A paragraph of a docstring, in lines that fit; code stays on its line."""
    text = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), " ".join(single(part).split()))
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines).replace("\0", " ")


def single(text: str) -> str:
    """Turn the double backticks of reStructuredText into those of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def first_words(each: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(single((inspect.getdoc(each) or "").split("\n\n")[0]).split())


if __name__ == "__main__":
    sys.exit(main())
