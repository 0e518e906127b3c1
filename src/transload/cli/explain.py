"""``transload explain [FILE]``: what an error text means, and what to do. Nothing is loaded, and torch is not run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from transload.cli.output import show_result
from transload.errors import CannotReadError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  python train.py 2>&1 | transload explain   the cause, and what to do
  transload explain train.log
  transload explain                          paste a traceback, then Ctrl-D
  transload explain train.log --json | jq .answers[].cause

exit codes:
  0  an error in the text is explained
  1  no error in it is known
  2  the command could not do its job
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``explain``."""
    parser.epilog = _EPILOG
    parser.add_argument("log", metavar="FILE", nargs="?", default="-", help="a traceback or a log; - or none is stdin")
    parser.add_argument("--no-checks", action="store_true", help="do not examine this machine or the files it names")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Explain one text, return the exit code."""
    from transload.explaining import explain_bytes
    from transload.explaining.logs import is_binary, not_a_text

    data, shortened = _read(arguments.log)
    explanation = explain_bytes(data, checks=not arguments.no_checks, shortened=shortened)
    if not explanation.answers and is_binary(data):
        raise not_a_text("" if arguments.log == "-" else arguments.log)
    if not explanation.answers and not explanation.unknown:
        raise UsageError("there is no text to explain", fix="Pipe a log in, or name a file that holds one.")
    from transload.explaining.report import report

    show_result(explanation, report, arguments)
    return int(not explanation.known)


def _read(path: str) -> tuple[bytes, bool]:
    """The end of the log, and whether there is more of it."""
    from transload.explaining.logs import HEAD, is_packed, not_a_text, read_end

    try:
        if path != "-":
            with open(path, "rb") as file:  # noqa: PTH123
                if file.seekable() and is_packed(file.read(HEAD)):
                    raise not_a_text(path)
                return read_end(file)
        if sys.stdin is None:
            return b"", False
        if sys.stdin.isatty():
            print("transload: paste the text, then press Ctrl-D (Ctrl-Z on Windows)", file=sys.stderr)
        return read_end(sys.stdin.buffer)
    except OSError as error:
        raise CannotReadError(
            f"cannot be read: {error.strerror or error}", where=path, fix=_instead(path, error), errno=error.errno
        ) from error


def _instead(path: str, error: OSError) -> str:
    """What to do if a file cannot be read."""
    if " " in path:
        return "To explain a text itself, pipe it in: echo '...' | transload explain."
    if isinstance(error, IsADirectoryError):
        return f"Name the log in it. For a checkpoint in a folder: transload inspect {path}"
    if isinstance(error, FileNotFoundError):
        return "Name a file that holds a log or a traceback, or pipe one in: python train.py 2>&1 | transload explain"
    return ""
