"""``transload retag FILE --to D``: change the device tags of a checkpoint in place. Nothing of it is run or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import show_result
from transload.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload retag model.pt --to cpu             torch.load works anywhere
  transload retag model.pt --to cpu --dry-run   show what would be done
  transload retag model.pt --map cuda:1=cuda:0 -o other.pt
  transload retag model.pt --to cuda:0 --keep-undo
  transload retag model.pt --undo               take the last one back

exit codes:
  0  the tags are as asked
  2  they are not, and the file is as it was
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``retag``."""
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="FILE", help="a file of torch.save, zip or legacy format")
    parser.add_argument("--to", metavar="D", default="", help="the device for all tags: cpu, cuda:0, mps and so on")
    parser.add_argument("--map", metavar="A=B", action="append", default=[], help="tag A becomes B; may be repeated")
    parser.add_argument("-o", "--out", metavar="COPY", help="write a copy and leave the file as it is")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--keep-undo", action="store_true", help="keep beside the file what --undo needs")
    parser.add_argument("--undo", action="store_true", help="take back the last retag, made with --keep-undo")
    parser.add_argument("--hard-links", action="store_true", help="also change a file that has other names")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Retag one file, say what was done, return the exit code."""
    from transload.retagging import report, retag, undo

    if arguments.undo:
        others = {"--to": arguments.to, "--map": arguments.map, "-o": arguments.out, "--keep-undo": arguments.keep_undo}
        given = [name for name, value in others.items() if value]
        if given:
            raise UsageError(f"--undo takes back what was done: {' and '.join(given)} cannot go with it")
        result = undo(arguments.path, dry_run=arguments.dry_run)
    else:
        result = retag(
            arguments.path,
            _tags(arguments),
            out=arguments.out,
            dry_run=arguments.dry_run,
            keep_undo=arguments.keep_undo,
            hard_links=arguments.hard_links,
        )
    show_result(result, report, arguments)
    return 0


def _tags(arguments: Namespace) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in arguments.map:
        old, equals, new = pair.rpartition("=")
        if not (old and equals and new):
            raise UsageError(f"--map takes two devices, such as cuda:1=cuda:0, not {pair!r}")
        if tags.setdefault(old, new) != new:
            raise UsageError(f"--map gives {old} two devices: {tags[old]} and {new}")
    if arguments.to and tags.setdefault("*", arguments.to) != arguments.to:
        raise UsageError(f"all others are given two devices: {tags['*']} and {arguments.to}")
    if not tags:
        raise UsageError("no device is named", fix="Say where to: --to cpu, or --map cuda:1=cuda:0.")
    return tags
