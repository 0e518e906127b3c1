"""``transload inspect`` and ``transload verify``: they take several files, and one that fails does not stop them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from transload.cli.output import as_bug, complain, show, write
from transload.errors import TransloadError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transload.render.lines import Block

T = TypeVar("T")


def _each(paths: Sequence[str], look: Callable[[str], T]) -> list[T | TransloadError]:
    """The result for each file, or the error that kept us from one; errors are told."""
    results: list[T | TransloadError] = []
    for path in paths:
        try:
            results.append(look(path))
        except TransloadError as error:  # noqa: PERF203
            results.append(error)
        except Exception as error:  # noqa: BLE001  a bug with one file must not hide the others
            results.append(as_bug(error, path))
    for result in results:
        if isinstance(result, TransloadError):
            complain(result)
    return results


def _write_json(paths: Sequence[str], results: Iterable[Any]) -> None:
    from transload.render.json import error_to_dict, to_json

    documents = (
        error_to_dict(path, result) if isinstance(result, TransloadError) else result.to_dict()
        for path, result in zip(paths, results, strict=True)
    )
    write(to_json(documents, several=len(paths) > 1))


# -- inspect


def inspect_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``inspect``: nothing of a file is run, imported or loaded."""
    parser.epilog = """\
examples:
  transload inspect model.pt
  transload inspect model.pt --tensors | grep embed
  transload inspect --verify --json checkpoints/*.pt

exit codes:
  0  only data, and nothing wrong with it
  1  a file is damaged, or loading it needs trust
  2  a file could not be read
"""
    option = parser.add_argument
    option("paths", nargs="+", metavar="FILE", help="a checkpoint file, or the directory of one; - is stdin")
    option("--tensors", action="store_true", help="list every tensor, one a line")
    option("--globals", action="store_true", help="list every class and function the file asks for")
    option("--tree", action="store_true", help="show the whole structure of the saved object")
    option("--verify", action="store_true", help="read every byte and compare the checksums")


def run_inspect(arguments: Namespace) -> int:
    """Inspect all files, show what there is to show, return the worst exit code."""
    from transload.judge import inspect

    results = _each(arguments.paths, lambda path: inspect(_named(path), verify=arguments.verify))
    read = [result for result in results if not isinstance(result, TransloadError)]
    if arguments.json:
        _write_json(arguments.paths, results)
    else:
        from transload.render.checkpoint import files, report
        from transload.render.lines import BLANK

        lists = {"tensors": arguments.tensors, "names": arguments.globals, "structure": arguments.tree}

        def blocks() -> Iterator[Block]:
            if len(results) > 1:
                yield from files(results)
            for checkpoint in read if len(results) == 1 or any(lists.values()) else ():
                yield from (BLANK,) if len(results) > 1 else ()
                yield from report(checkpoint, **lists)

        show(blocks(), arguments.color)
    if len(read) < len(results):
        return 2
    return int(any(not checkpoint.ok for checkpoint in read))


def _named(path: str) -> str | BinaryIO:
    """What a path names; ``-`` is standard input, which is kept in memory where it is a pipe."""
    if path != "-":
        return path
    import io
    import sys

    class Piped(io.BytesIO):
        name = "<stdin>"

    stdin = sys.stdin.buffer
    return stdin if stdin.seekable() else Piped(stdin.read())


# -- verify


def verify_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``verify``: nothing of a file is run or loaded."""
    parser.epilog = """\
examples:
  transload verify model.pt                  compare every checksum
  transload verify checkpoints/*.pt --json
  transload verify model.pt --write m.json   keep the hashes of its tensors
  transload verify model.safetensors --against m.json
  transload verify model.pt --values         count NaN and infinities

exit codes:
  0  nothing is wrong; where a format has no checksums, that is said
  1  a tensor is damaged, or differs from the manifest; each is named
  2  a file could not be read
"""
    option = parser.add_argument
    option("paths", nargs="*", metavar="FILE", help="a checkpoint file, or the directory of one")
    option("--hash", action="store_true", help="sha256 of each tensor and of all, whatever the container")
    option("--values", action="store_true", help="count NaN and infinite numbers in each tensor")
    option("--write", metavar="M.json", help="write the hashes to a manifest")
    option("--against", metavar="M.json", help="compare with a manifest; without FILE, all files in it")
    option("--force", action="store_true", help="let --write replace a manifest that is there")


def run_verify(arguments: Namespace) -> int:
    """Verify all files, show what there is to show, write the manifest if all is well, return the worst exit code."""
    from transload.verifying import files_in, verify

    manifest = None
    if arguments.write or arguments.against:
        from transload.verifying.manifest import read_manifest, refuse_target

        if arguments.write:  # refused before anything is read
            refuse_target(arguments.write, overwrite=arguments.force)
        manifest = read_manifest(arguments.against) if arguments.against else None
    named = arguments.paths or [entry.path for entry in (manifest.files if manifest else ())]
    if not named:
        raise UsageError("no file is named", fix="transload verify FILE…")
    paths = list(dict.fromkeys(found for path in named for found in files_in(path)))
    hashes = arguments.hash or bool(arguments.write)
    results = _each(
        paths, lambda path: verify(path, hashes=hashes, values=arguments.values, against=manifest, progress=True)
    )
    done = [result for result in results if not isinstance(result, TransloadError)]
    if arguments.json:
        _write_json(paths, results)
    elif len(results) > 1:
        from transload.verifying import several

        show(several(done, len(results), hashes=arguments.hash), arguments.color)
    elif done:
        from transload.verifying import report

        show(report(done[0], hashes=arguments.hash), arguments.color)
    if len(done) < len(results):
        return 2
    code = int(any(not verification.ok for verification in done))
    if arguments.write and code:
        fix = "Repair it first: transload rescue FILE NEW."
        complain(TransloadError("is not written, since not every file is whole", where=arguments.write, fix=fix))
    elif arguments.write:
        from transload.verifying import write_manifest, written

        write_manifest(arguments.write, done, overwrite=arguments.force)
        if not arguments.json:
            show([written(arguments.write, sum(len(each.tensors) for each in done))], arguments.color)
    return code
