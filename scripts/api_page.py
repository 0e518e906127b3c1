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
it is first used. Only `load`, `load_into`, `open`, `save`, `save_async` and the classes for other libraries import
torch.

Returned objects are frozen. `print` shows the report of the command, `to_dict()` returns its JSON.

In signatures, `SourceLike` is a path, bytes or a seekable binary file object. `Progress` is `True` for a line on the
terminal, or a function that is called with the number of bytes done and the total.

This page is written by `scripts/api_page.py` from the docstrings.
"""
PAGES = {"load": "loading.md#load", "open": "loading.md#open", "load_into": "loading.md#load_into"}
PAGES |= {"prefetch": "loading.md#prefetch"}
PAGES |= {"LightningCheckpointIO": "integrations.md#lightning"}
PAGES |= {"CheckpointReader": "ranks.md", "save": "save.md#save", "save_async": "save.md#save_async"}
COMMANDS = ("check", "convert", "diff", "doctor", "explain", "inspect", "rescue", "retag", "verify")
PAGES |= {name: f"{name}.md" for name in COMMANDS} | {"patch": "run.md", "unpatch": "run.md"}
PLUGINS = ("CheckpointReader", "LightningCheckpointIO")
"""Classes that users make, and pass to another library."""
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
    """Write the page; with ``--check`` only return 1 if it is out of date."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The complete page."""
    public = {name: getattr(transload, name) for name in dir(transload)}
    functions = {name: value for name, value in public.items() if isinstance(value, FunctionType)}
    classes = {name: value for name, value in public.items() if isinstance(value, type) and name not in PLUGINS}
    classes |= {value.__name__: value for value in map(returned, functions.values()) if value is not None}
    errors = {name: value for name, value in classes.items() if issubclass(value, BaseException)}
    results = {name: value for name, value in sorted(classes.items()) if name not in errors}
    lines = [HEAD, "## Functions\n", *map(function, functions.values())]
    lines += ["## For other libraries\n", *(function(public[name]) for name in PLUGINS)]
    lines += ["## What they return\n", *map(result, results.values())]
    warnings = {name: value for name, value in errors.items() if issubclass(value, Warning)}
    rows = [error(value) for name, value in errors.items() if name not in warnings]
    lines.append(ERRORS + TABLE + "".join(rows) + WARNINGS + TABLE + "".join(map(error, warnings.values())))
    return "\n".join(lines)


# -- one name ----------------------------------------------------------------------------------------------------------


def function(callee: Callable[..., Any]) -> str:
    """The section of a function."""
    name = callee.__name__
    more = f"\nMore: [{PAGES[name].partition('#')[0]}]({PAGES[name]}).\n" if name in PAGES else ""
    return f"### {name}\n\n```text\n{signature(callee)}\n```\n\n{contract(callee)}{more}"


def returned(callee: Callable[..., Any]) -> type | None:
    """The class of transload that a function returns, if it returns one."""
    cls = sys.modules[callee.__module__].__dict__.get(str(inspect.signature(callee).return_annotation))
    return cls if isinstance(cls, type) and cls.__module__.startswith("transload") else None


def result(cls: type) -> str:
    """The section of a class: its docstring, fields, properties and methods."""
    fields = [f"`{name}: {kind}`" for name, kind in fields_of(cls)]
    parts = [f"### {cls.__name__}\n\n{contract(cls)}"]
    if fields:
        parts.append(filled(f"Fields: {', '.join(fields)}.") + "\n")
    methods = [f"- {line}" for line in members_of(cls)]
    return "\n".join([*parts, *methods, ""] if methods else parts)


def error(cls: type) -> str:
    """The row of an error or a warning in its table."""
    implied = (transload.TransloadError, Exception, BaseException, object)
    bases = [base.__name__ for base in cls.__mro__[1:] if base not in implied and not base.__name__.startswith("_")]
    return f"| `{cls.__name__}` | {', '.join(f'`{name}`' for name in bases)} | {first_paragraph(cls)} |\n"


def fields_of(cls: type) -> Iterator[tuple[str, str]]:
    """Names and types of the fields of a frozen class."""
    if dataclasses.is_dataclass(cls):
        yield from ((field.name, plain(field.type)) for field in dataclasses.fields(cls) if field.name[0] != "_")
    elif hasattr(cls, "_fields"):
        kinds = {name: kind for base in cls.__mro__ for name, kind in getattr(base, "__annotations__", {}).items()}
        yield from ((name, plain(kinds.get(name, "Any"))) for name in cls._fields)


def members_of(cls: type) -> Iterator[str]:
    """Public properties and methods, except ``to_dict``, which every result has."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("transload.")]
    members = {name: member for base in bases for name, member in vars(base).items()}
    for name, member in members.items():
        doc = inspect.getdoc(member)
        if name.startswith("_") or name == "to_dict" or doc is None:
            continue
        if isinstance(member, FunctionType):
            yield filled(f"`{name}{argument_names(member)}`: {first_paragraph(member)}", 2)
        elif isinstance(member, property):
            yield filled(f"`{name}`: {first_paragraph(member)}", 2)


# -- text --------------------------------------------------------------------------------------------------------------


def signature(callee: Callable[..., Any]) -> str:
    """The signature of a function with types, wrapped between its arguments."""
    parsed = inspect.signature(callee)
    head, lines = f"transload.{callee.__name__}(", [""]
    arguments = [plain(str(item)) for item in parsed.replace(return_annotation=parsed.empty).parameters.values()]
    kinds = [item.kind for item in parsed.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    for argument in arguments:
        if lines[-1] and len(head) + len(lines[-1]) + len(argument) > WIDTH - 3:
            lines.append("")
        lines[-1] += f"{argument}, "
    text = ("\n" + " " * len(head)).join(line.rstrip(" ") for line in lines).rstrip(",")
    arrow = "" if isinstance(callee, type) else f" -> {plain(parsed.return_annotation)}"
    return f"{head}{text}){arrow}"


def argument_names(member: FunctionType) -> str:
    """The names of the arguments of a method."""
    names = [f"{'*' * (parameter.kind is parameter.VAR_POSITIONAL)}{name}" for name, parameter in parameters(member)]
    return f"({', '.join(names)})"


def parameters(member: FunctionType) -> list[tuple[str, inspect.Parameter]]:
    """All parameters but ``self``."""
    return [*inspect.signature(member).parameters.items()][1:]


def plain(kind: Any) -> str:
    """A type, or a parameter with its type, as written in the source."""
    text = kind if isinstance(kind, str) else getattr(kind, "__forward_arg__", getattr(kind, "__name__", "Any"))
    return re.sub(r": '([^']*)'", r": \1", str(text))


def contract(documented: Any) -> str:
    """A docstring as Markdown; examples become blocks that a test runs."""
    parts = (inspect.getdoc(documented) or "").split("\n\n")
    if isinstance(documented, type):  # examples of classes use private names, unless they call a function of transload
        parts = [part for part in parts if not part.startswith(">>> ") or "transload." in part]
    shown = (example(part, documented.__name__) if part.startswith(">>> ") else filled(part) for part in parts)
    return "\n\n".join(shown) + "\n"


def example(part: str, name: str) -> str:
    """An example as typed by a user who has imported transload."""
    text = re.sub(r" *# doctest:.*", "", part)
    text = re.sub(rf"(?<![\w.]){name}\(", f"transload.{name}(", text)
    return f"```python\n{text}\n```"


def filled(part: str, indent: int = 0) -> str:
    """A paragraph of a docstring, wrapped; inline code is not broken."""
    text = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), " ".join(single_backticks(part).split()))
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines).replace("\0", " ")


def single_backticks(text: str) -> str:
    """Turn the double backticks of reStructuredText into those of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def first_paragraph(documented: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(single_backticks((inspect.getdoc(documented) or "").split("\n\n")[0]).split())


if __name__ == "__main__":
    sys.exit(main())
