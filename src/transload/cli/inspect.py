"""``transload inspect FILE…``: what is in a checkpoint. Nothing of it is run, imported or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import as_bug, complain, show, write
from transload.errors import TransloadError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

    from transload.checkpoint import Checkpoint
    from transload.render.lines import Block

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload inspect model.pt
  transload inspect model.pt --tensors | grep embed
  transload inspect --verify --json checkpoints/*.pt

exit codes:
  0  only data, and nothing wrong with it
  1  a file is damaged, or loading it needs trust
  2  a file could not be read
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``inspect``."""
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="FILE", help="a checkpoint file, or the directory of one")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, one a line")
    parser.add_argument("--globals", action="store_true", help="list every class and function the file asks for")
    parser.add_argument("--tree", action="store_true", help="show the whole structure of the saved object")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare the checksums")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Inspect all files, show what there is to show, return the worst exit code."""
    results = [_inspected(path, verify=arguments.verify) for path in arguments.paths]
    errors = [result for result in results if isinstance(result, TransloadError)]
    for error in errors:
        complain(error)
    if arguments.json:
        write(_json(arguments.paths, results))
    else:
        show(_blocks(results, arguments), arguments.color)
    if errors:
        return 2
    return int(any(not result.ok for result in results if not isinstance(result, TransloadError)))


def _inspected(path: str, *, verify: bool) -> Checkpoint | TransloadError:
    from transload.judge import inspect

    try:
        return inspect(path, verify=verify)
    except TransloadError as error:
        return error
    except Exception as error:  # noqa: BLE001  one file that we stumble over must not hide the others
        return as_bug(error, path)


def _json(paths: Sequence[str], results: Sequence[Checkpoint | TransloadError]) -> Iterator[str]:
    from transload.render.json import error_to_dict, to_json

    documents = (
        error_to_dict(path, result) if isinstance(result, TransloadError) else result.to_dict()
        for path, result in zip(paths, results, strict=True)
    )
    return to_json(documents, several=len(paths) > 1)


def _blocks(results: Sequence[Checkpoint | TransloadError], arguments: Namespace) -> Iterator[Block]:
    read = [result for result in results if not isinstance(result, TransloadError)]
    asked = arguments.tensors or arguments.globals or arguments.tree
    if len(results) == 1:
        for checkpoint in read:
            yield from _one(checkpoint, arguments, asked=asked)
        return
    from transload.render.lines import BLANK
    from transload.render.several import files

    yield from files(results)
    for checkpoint in read if asked else ():
        yield BLANK
        yield from _one(checkpoint, arguments, asked=asked)


def _one(checkpoint: Checkpoint, arguments: Namespace, *, asked: bool) -> Iterator[Block]:
    """The report on one file; the lists that were asked for take the place of the folded tree."""
    from transload.render.text import head, report

    if not asked:
        yield from report(checkpoint)
        return
    yield from head(checkpoint)
    if arguments.globals:
        from transload.render.listing import globals_by_verdict

        yield from globals_by_verdict(checkpoint)
    if arguments.tensors:
        from transload.render.listing import tensors_listed

        yield from tensors_listed(checkpoint)
    if arguments.tree:
        from transload.render.structure import structure

        yield from structure(checkpoint)
