"""Where a command's words go: the result to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from transload.errors import TransloadError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable
    from typing import Any

    from transload.render.lines import Block

begun = False
"""Whether a document was written to stdout: a second one would make neither readable."""


def given(arguments: Namespace, names: str) -> dict[str, Any]:
    """The arguments of these names, to be passed on under the same names."""
    return {name: getattr(arguments, name) for name in names.split()}


def show(blocks: Iterable[Block], colour: str) -> None:
    """Write a report to stdout."""
    from transload.render.lines import emit

    if sys.stdout is not None:  # closed by the caller: the exit code is all that is wanted
        emit(blocks, sys.stdout, colour)


def show_result(result: Any, report: Callable[[Any], Iterable[Block]], arguments: Namespace) -> None:
    """What a command has found out: as JSON if that was asked for, else as a report."""
    if arguments.json:
        from transload.render.json import to_json

        write(to_json([result.to_dict()], several=False))
    else:
        show(report(result), arguments.color)


def write(pieces: Iterable[str]) -> None:
    """Write text to stdout as it is."""
    global begun  # noqa: PLW0603 - there is one stdout, too
    if sys.stdout is not None:
        begun = True
        sys.stdout.writelines(pieces)


def complain(error: TransloadError) -> None:
    """Tell one of our errors on stderr: where and what, and below what to do, commands set off."""
    from transload.render.words import printable

    where = f"{printable(error.where, None)}: " if error.where else ""
    print(f"transload: {where}{printable(error.what, None)}", file=sys.stderr)
    for line in error.fix.split("\n") if error.fix else ():
        print(f"{'    ' if line.startswith('$ ') else '  '}{printable(line, None)}", file=sys.stderr)


_RECOVERED = {
    "restored": "an interrupted retag was taken back",
    "finished": "an interrupted retag was finished",
    "stale": "beside it lies the journal of an interrupted retag of another file; see docs/retag.md",
}


def finish_retag(path: str) -> None:
    """Finish an interrupted retag of a file, or take it back, before anything looks at the file."""
    from transload.io.sources import has_journal

    if has_journal(path):
        from transload.io.journal import recover
        from transload.render.words import printable

        if outcome := recover(path):
            print(f"transload: {printable(path)}: {_RECOVERED[outcome]}", file=sys.stderr)


def as_bug(error: Exception, where: str = "") -> TransloadError:
    """What to say of an exception that should never have got so far; ``TRANSLOAD_DEBUG`` also shows where it arose."""
    if os.environ.get("TRANSLOAD_DEBUG"):
        from traceback import print_exception

        print_exception(error)
    from transload.render.words import printable

    return TransloadError(
        f"this is a bug in transload: {type(error).__name__}: {printable(str(error))}",
        where=where,
        fix="Please report it with what TRANSLOAD_DEBUG=1 shows.",
    )
