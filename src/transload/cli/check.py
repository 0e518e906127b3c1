"""``transload check FILE``: can it be loaded here, where would it land, what is missing. Nothing is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import show_result

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload check model.pt                 can it be loaded, and where to
  transload check model.pt --device cuda:1
  transload check model.pt --device none   each tensor where it was saved
  transload check model.pt --json | jq .plan

exit codes:
  0  the file can be loaded as asked
  1  it cannot
  2  the command could not do its job
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``check``."""
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="FILE", help="a checkpoint file, or the directory of one")
    parser.add_argument("--device", metavar="D", default="auto", help="where to: auto, none, cpu, cuda:1 and so on")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Check one file, print the result, return the exit code."""
    from transload.checking import check, report

    result = check(arguments.path, None if arguments.device == "none" else arguments.device)
    show_result(result, report, arguments)
    return int(not result.ok)
