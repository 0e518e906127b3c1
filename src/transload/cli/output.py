"""What commands have in common: the result goes to stdout, everything else to stderr; several files at once."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transload.errors import TransloadError
    from transload.render.lines import Block


def keywords(arguments: Namespace, names: str) -> dict[str, Any]:
    """Some of the arguments, as keyword arguments of the same names."""
    return {name: getattr(arguments, name) for name in names.split()}


def show(blocks: Iterable[Block], colour: str) -> None:
    """Write a report to stdout."""
    from transload.render.lines import emit

    if sys.stdout is not None:  # None if the caller closed it, and wants only the exit code
        emit(blocks, sys.stdout, colour)


def show_result(result: Any, report: Callable[[Any], Iterable[Block]], arguments: Namespace) -> None:
    """Write the result of a command: as JSON if requested, else as a report."""
    if arguments.json:
        write_json([result.to_dict()])
    else:
        show(report(result), arguments.color)


def write_json(documents: Iterable[dict[str, Any]], *, several: bool = False) -> None:
    """Write one object to stdout, or a list of ``several``."""
    from transload.render.json import to_json

    if sys.stdout is not None:
        sys.stdout.writelines(to_json(documents, several=several))


def print_error(error: TransloadError) -> None:
    """Print one of our errors to stderr: where and what, and below it what to do, with commands indented."""
    from transload.render.lines import Prose, emit, style_of
    from transload.render.words import path_text, printable
    from transload.steps import step_of

    if sys.stderr is None:
        return
    piped = not style_of(sys.stderr).cut  # then the lines stay whole, for programs that search them
    where = f"{path_text(error.where, None)}: " if error.where else ""
    blocks = [Prose(f"transload: {where}{printable(error.what, None)}", whole=piped)]
    for line in error.fix.split("\n") if error.fix else ():
        command = step_of(line).kind == "command"
        blocks.append(Prose(printable(line, None), lead="    " if command else "  ", whole=command or piped))
    emit(blocks, sys.stderr)


def finish_retag(path: str) -> None:
    """Finish or undo an interrupted retag of a file before anything reads the file."""
    from transload.io.sources import has_journal

    if has_journal(path):
        from transload.io.journal import RECOVERED, recover
        from transload.render.words import path_text

        if outcome := recover(path):
            print(f"transload: {path_text(path)}: {RECOVERED[outcome]}", file=sys.stderr)


def as_bug(error: Exception, where: str = "") -> TransloadError:
    """The error to show for an exception that is a bug; ``TRANSLOAD_DEBUG`` also prints its traceback."""
    if os.environ.get("TRANSLOAD_DEBUG"):
        from traceback import print_exception

        print_exception(error)
    from transload.errors import TransloadError
    from transload.render.words import printable

    what = f"this is a bug in transload: {type(error).__name__}: {printable(str(error))}"
    return TransloadError(what, where=where, fix="Please report it, with the output of TRANSLOAD_DEBUG=1.")


def for_each(
    arguments: Namespace,
    paths: Sequence[str],
    examine: Callable[[str], Any],
    report: Callable[[Any], Iterable[Block]],
    several: Callable[[Sequence[Any], int], Iterable[Block]],
    *,
    finish: bool = True,
) -> tuple[list[Any], dict[str, TransloadError], int]:
    """Examine each file, print errors, and show the report of one file, a table of several, or JSON.

    A file that fails does not stop the others. Returns the results, the errors by path, and the exit code: 1 if
    something is wrong with a file, 2 if one could not be read.
    """
    done: dict[int, Any] = {}
    failed: dict[int, TransloadError] = {}
    from transload.io.sources import shown

    for place, path in enumerate(paths):
        try:
            if finish:
                finish_retag(path)
            done[place] = examine(path)
        except Exception as error:  # noqa: BLE001, PERF203  a bug with one file must not hide the others
            from transload.errors import TransloadError

            failed[place] = error if isinstance(error, TransloadError) else as_bug(error, shown(path))
            print_error(failed[place])
    results = list(done.values())
    if arguments.json:
        from transload.render.json import error_to_dict

        documents = [
            error_to_dict(shown(path), failed[place]) if place in failed else done[place].to_dict()
            for place, path in enumerate(paths)
        ]
        if paths[1:] and [*arguments.paths] == paths[:1]:  # a directory, and what is beside the checkpoint in it
            documents = [{**documents[0], "beside": documents[1:]}]
        write_json(documents, several=len(documents) > 1)
    elif len(paths) > 1:
        show(several(results, len(paths)), arguments.color)
    elif results:
        show(report(results[0]), arguments.color)
    errors = {shown(paths[place]): error for place, error in failed.items()}
    return results, errors, 2 if failed else int(not all(getattr(result, "ok", True) for result in results))


def refuse_page(path: str, is_report: Callable[[bytes], bool], *, overwrite: bool) -> None:
    """Refuse a path where no report can be written. ``--force`` replaces only reports: it may be a checkpoint."""
    from transload.errors import UsageError
    from transload.io.atomic import refuse_missing_directory, target_path
    from transload.io.sources import FileSource

    target = target_path(path)
    if os.path.isdir(target):
        raise UsageError("it is a directory", where=path, fix="Add the name of a file.")
    if os.path.lexists(target):
        if not overwrite:
            raise UsageError("already exists", where=path, fix="Replace it with --force, or choose another name.")
        if os.path.exists(target):
            source = FileSource(target)
            try:
                start = source.read(0, min(source.size, 256))
            finally:
                source.close()
            if not is_report(bytes(start)):
                what = "it is not a report, and --force replaces only reports"
                raise UsageError(what, where=path, fix="Choose another name.")
    refuse_missing_directory(target)


def write_page(path: str, pieces: Iterable[str], arguments: Namespace) -> None:
    """Write a report, whole or not at all, and say so."""
    from transload.io.atomic import AtomicFile
    from transload.render.lines import BLANK, note
    from transload.render.words import path_text, size

    data = "".join(pieces).encode("utf-8")
    with AtomicFile(path) as file:
        file.write([data])
    if not arguments.json and getattr(arguments, "sarif", None) != "-":
        show([BLANK, note(f"{path_text(path, None)} written: {size(len(data))}")], arguments.color)
