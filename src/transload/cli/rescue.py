"""``transload rescue SRC DST``: save what is left of a damaged checkpoint. Nothing in it is run or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import show_result
from transload.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload rescue broken.pt repaired.pt           everything that can be saved
  transload rescue broken.pt --dry-run             only report what that is
  transload rescue half.pt whole.pt --fill zeros   keep lost tensors, as zeros
  transload rescue model.pt.gz model.pt            also from bz2, xz, zst, zip
  transload rescue unzipped/ model.pt              an unzipped checkpoint
  transload rescue shards/ new.safetensors         the whole tensors of shards

exit codes:
  0  everything was recovered
  1  part of it was recovered; the report says what is lost
  2  nothing was recovered, and nothing was written
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``rescue``."""
    parser.epilog = _EPILOG
    # Not `path`: other commands finish an interrupted retag of their `path`; the source of a rescue is never written.
    parser.add_argument("src", metavar="SRC", help="a damaged checkpoint: a file or directory, never written to")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the new file; DST.rescue.json reports what is in it")
    parser.add_argument("--dry-run", action="store_true", help="report what would be written, and write nothing")
    parser.add_argument("--fill", choices=("zeros", "nan"), help="fill lost tensors instead of leaving them out")
    parser.add_argument(
        "--member", metavar="NAME", default="", help="which checkpoint to take if an archive holds several"
    )
    parser.add_argument("--force", action="store_true", help="overwrite DST if it exists")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Rescue a checkpoint, print the report, return the exit code."""
    from transload.rescuing import rescue

    if arguments.dst is None and not arguments.dry_run:
        raise UsageError("no output file is named", fix="transload rescue SRC DST, or --dry-run to only see the plan.")
    result = rescue(
        arguments.src,
        arguments.dst,
        fill=arguments.fill,
        dry_run=arguments.dry_run,
        member=arguments.member,
        overwrite=arguments.force,
        progress=not arguments.json,
    )
    from transload.rescuing.result import report

    show_result(result, report, arguments)
    return result.exit_code
