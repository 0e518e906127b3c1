"""``inspect``, and what the commands for several files have in common. A file that fails does not stop the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from transload.cli.output import as_bug, finish_retag, print_error, show, write_json
from transload.errors import CannotReadError, TransloadError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transload.checkpoint import Checkpoint
    from transload.render.lines import Block


def for_each(
    arguments: Namespace,
    paths: Sequence[str],
    examine: Callable[[str], Any],
    report: Callable[[Any], Iterable[Block]],
    several: Callable[[Sequence[Any], int], Iterable[Block]],
    *,
    finish: bool = True,
) -> tuple[list[Any], int]:
    """Examine each file, print errors, and show the report of one file, a table of several, or JSON.

    Returns the results, and the exit code: 1 if something is wrong with a file, 2 if one could not be read.
    """
    results: list[Any] = []
    for path in paths:
        try:
            if finish:
                finish_retag(path)
            results.append(examine(path))
        except Exception as error:  # noqa: BLE001, PERF203  a bug with one file must not hide the others
            results.append(error if isinstance(error, TransloadError) else as_bug(error, path))
            print_error(results[-1])
    done = [each for each in results if not isinstance(each, TransloadError)]
    if arguments.json:
        from transload.render.json import error_to_dict

        documents = (
            error_to_dict(path, each) if isinstance(each, TransloadError) else each.to_dict()
            for path, each in zip(paths, results, strict=True)
        )
        write_json(documents, several=len(paths) > 1)
    elif len(results) > 1:
        show(several(done, len(results)), arguments.color)
    elif done:
        show(report(done[0]), arguments.color)
    return done, 2 if len(done) < len(results) else int(not all(getattr(each, "ok", True) for each in done))


def expand_paths(names: Iterable[str], *, parts: bool = False) -> list[str]:
    """Expand directories, and patterns that no shell has expanded, to the paths of checkpoints.

    A directory that is a checkpoint stands for itself and other checkpoints in it; any other for those in it. With
    ``parts``, a directory that is a checkpoint stands for the torch files it consists of.
    """
    from contextlib import suppress
    from glob import glob
    from os.path import isdir, isfile, join, lexists

    parts_of = ("shard", "rank file", "weights", "beside the checkpoint")
    found: list[str] = []
    for name in names:
        for path in [name] if lexists(name) else sorted(glob(name)) or [name]:
            kinds: dict[str, str] = {}
            if isdir(path):
                from transload.judge import inspect

                with suppress(CannotReadError):  # reported when it is opened
                    kinds = {join(path, part.name): part.kind for part in inspect(path).parts}
            inside = [file for file, kind in kinds.items() if kind == "looks like a checkpoint"]
            if parts and not inside:
                saved = [file for file, kind in kinds.items() if kind in parts_of and isfile(file)]
                inside = [file for file in saved if not file.endswith((".safetensors", ".distcp"))]
            beside = [file for file, kind in kinds.items() if kind == "beside the checkpoint"]
            found += inside or [path, *beside]
    return list(dict.fromkeys(found))


def add_options(_: str, option: Callable[..., object]) -> None:
    """Declare the options of ``inspect``."""
    option("paths", nargs="+", metavar="FILE", help="a checkpoint file, or the directory of one; - is stdin")
    option("--tensors", action="store_true", help="list every tensor, one a line")
    option("--globals", action="store_true", help="list every class and function the file asks for")
    option("--tree", action="store_true", help="show the whole structure of the saved object")
    option("--verify", action="store_true", help="read every byte and compare the checksums")


def run_inspect(arguments: Namespace) -> int:
    """Inspect all files, show the results, and return the worst exit code."""
    from transload.judge import inspect

    lists = {"tensors": arguments.tensors, "names": arguments.globals, "structure": arguments.tree}

    def report(checkpoint: Checkpoint) -> Iterator[Block]:
        from transload.render.checkpoint import report

        return report(checkpoint, **lists)

    def several(read: Sequence[Checkpoint], total: int) -> Iterator[Block]:
        from transload.render.checkpoint import files
        from transload.render.lines import BLANK

        yield from files(read, total)
        for checkpoint in read if any(lists.values()) else ():
            yield BLANK
            yield from report(checkpoint)

    def examine(path: str) -> Checkpoint:
        f: str | BinaryIO = path
        if path == "-":
            import io
            import sys

            if sys.stdin is None:
                raise CannotReadError("standard input is closed", where=path)

            class Piped(io.BytesIO):
                name = "<stdin>"

            f = sys.stdin.buffer if sys.stdin.seekable() else Piped(sys.stdin.buffer.read())
        return inspect(f, verify=arguments.verify)

    return for_each(arguments, arguments.paths, examine, report, several)[1]
