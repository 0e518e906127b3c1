"""What commands have in common: the result goes to stdout, everything else to stderr; several files at once."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from errno import ENOMEM
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transload.errors import TransloadError
    from transload.render.lines import Block

    Report = Callable[[Any], Iterable[Block]]
    Folded = Iterable[tuple[str, Iterable[Block]]]


def keywords(arguments: Namespace, names: str) -> dict[str, Any]:
    """Some of the arguments, as keyword arguments of the same names."""
    return {name: getattr(arguments, name) for name in names.split()}


def show(blocks: Iterable[Block], colour: str) -> None:
    """Write a report to stdout."""
    from transload.render.lines import emit

    if sys.stdout is not None:  # None if the caller closed it, and wants only the exit code
        emit(blocks, sys.stdout, colour)


def show_result(
    result: Any, report: Report, arguments: Namespace, code: int, *, drawn: Report | None = None, folded: Folded = ()
) -> int:
    """Write the result of a command: as JSON if requested, else as a report; and as a page, if one is requested.

    ``drawn`` is the report for the page if it is another one, ``folded`` further reports there. Returns the exit code:
    ``code``, or 2 if the page cannot be written.
    """
    code, written = write_page((drawn or report)(result), arguments, code, folded)
    if arguments.json:
        write_json([result.to_dict()])
    else:
        show(chain(report(result), written), arguments.color)
    return code


def write_json(documents: Iterable[dict[str, Any]], *, several: bool = False) -> None:
    """Write one object to stdout, or a list of ``several``."""
    from transload.render.json import to_json

    if sys.stdout is not None:
        sys.stdout.writelines(to_json(documents, several=several))


def print_error(error: TransloadError) -> None:
    """Print one of our errors to stderr: where and what, and below it what to do, with commands indented."""
    from transload.render.lines import emit, style_of

    if sys.stderr is not None:
        # Into a pipe the lines stay whole, for programs that search them.
        emit(error_blocks(error, "transload: ", whole=not style_of(sys.stderr).cut), sys.stderr)


def error_blocks(error: TransloadError, before: str = "", *, whole: bool = False) -> Iterator[Block]:
    """One of our errors as a report."""
    from transload.render.lines import Prose
    from transload.render.words import path_text, printable
    from transload.steps import step_of

    where = f"{path_text(error.where, None)}: " if error.where else ""
    yield Prose(f"{before}{where}{printable(error.what, None)}", whole=whole)
    for line in error.fix.split("\n") if error.fix else ():
        command = step_of(line).kind == "command"
        yield Prose(printable(line, None), lead="    " if command else "  ", whole=command or whole)


def finish_retag(path: str) -> None:
    """Finish or undo an interrupted retag of a file before anything reads the file."""
    from transload.io.sources import has_journal

    if has_journal(path):
        from transload.io.journal import RECOVERED, recover
        from transload.render.words import path_text

        if outcome := recover(path):
            print(f"transload: {path_text(path)}: {RECOVERED[outcome]}", file=sys.stderr)


def as_ours(error: Exception, where: str = "") -> TransloadError:
    """The error to show for any other exception: a bug, unless there is no memory; ``TRANSLOAD_DEBUG`` shows where."""
    if os.environ.get("TRANSLOAD_DEBUG"):
        from traceback import print_exception

        print_exception(error)
    from transload.errors import TransloadError
    from transload.render.words import printable

    said = printable(str(error))
    if is_out_of_memory(error):
        error.__traceback__ = None  # its frames hold what has filled the memory
        return TransloadError(f"there is not enough memory{f': {said}' if said else ''}", where=where)
    what = f"this is a bug in transload: {type(error).__name__}: {said}"
    return TransloadError(what, where=where, fix="Please report it, with the output of TRANSLOAD_DEBUG=1.")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory has run out. An import that fails for this reason may raise anything because of it."""
    if error is None or isinstance(error, MemoryError) or getattr(error, "errno", None) == ENOMEM:
        return error is not None
    # For any other reason, the loader of the system says it at the end.
    unmapped = isinstance(error, ImportError) and str(error).endswith("failed to map segment from shared object")
    return unmapped or is_out_of_memory(error.__cause__ or error.__context__)


def expand_patterns(names: Iterable[str]) -> Iterator[str]:
    """The files that are named, also by patterns that no shell has expanded."""
    from transload.io.sources import is_url

    for name in names:
        if is_url(name) or os.path.lexists(name):
            yield name
        else:
            from glob import glob

            yield from sorted(glob(name)) or [name]


def for_each(
    arguments: Namespace,
    paths: Sequence[str],
    examine: Callable[[str], Any],
    report: Callable[[Any], Iterable[Block]],
    several: Callable[[Sequence[Any], int], Iterable[Block]],
    *,
    finish: bool = True,
    write: Callable[[Sequence[Any], Mapping[str, TransloadError], int], tuple[int, list[Block]]] | None = None,
) -> tuple[list[Any], dict[str, TransloadError], int]:
    """Examine each file, print errors, and show the report of one file, a table of several, or JSON.

    A file that fails does not stop the others. Returns the results, the errors by path, and the exit code: 1 if
    something is wrong with a file, 2 if one could not be read. ``write`` writes the files that were requested, and
    returns what ``write_file`` does; otherwise the page is that of the reports.
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

            failed[place] = error if isinstance(error, TransloadError) else as_ours(error, path)
            print_error(failed[place])
    results = list(done.values())
    errors = {shown(paths[place]): error for place, error in failed.items()}
    code = 2 if failed else int(not all(getattr(result, "ok", True) for result in results))
    written: list[Block] = []
    if write is not None:
        code, written = write(results, errors, code)
    elif results and arguments.html is not None and len(paths) > 1:
        from transload.render.lines import Item

        unread = [Item("bad", [*error_blocks(error)]) for error in failed.values()]
        folded = [(shown(path), report(done[place])) for place, path in enumerate(paths) if place in done]
        code, written = write_page(chain(several(results, len(paths)), unread), arguments, code, folded)
    elif results:
        code, written = write_page(report(results[0]), arguments, code)
    if arguments.json:
        from transload.render.json import error_to_dict

        documents = [
            error_to_dict(path, failed[place]) if place in failed else done[place].to_dict()
            for place, path in enumerate(paths)
        ]
        if paths[1:] and [*arguments.paths] == paths[:1]:  # a directory, and what is beside the checkpoint in it
            documents = [{**documents[0], "beside": documents[1:]}]
        write_json(documents, several=len(documents) > 1)
    elif len(paths) > 1:
        show(chain(several(results, len(paths)), written), arguments.color)
    elif results:
        show(chain(report(results[0]), written), arguments.color)
    return results, errors, code


def refuse_page(path: str, is_report: Callable[[bytes], bool] | None = None, *, overwrite: bool) -> None:
    """Refuse a path where no report can be written. ``--force`` replaces only reports: it may be a checkpoint.

    ``is_report`` says whether a file that starts with some bytes is one; without it, of HTML.
    """
    from transload.errors import UsageError
    from transload.io.atomic import refuse_missing_directory, target_path
    from transload.io.sources import FileSource

    if path == "-" and is_report is None:
        raise UsageError("--html writes a file, not stdout", fix="Name one: --html OUT.html")
    target = target_path(path)
    if os.path.isdir(target):
        raise UsageError("it is a directory", where=path, fix="Add the name of a file.")
    if os.path.lexists(target):
        if not overwrite:
            raise UsageError("already exists", where=path, fix="Replace it with --force, or choose another name.")
        if os.path.exists(target):
            from transload.render.html_report import is_report as is_page

            source = FileSource(target)
            try:
                start = source.read(0, min(source.size, 256))
            finally:
                source.close()
            if not (is_report or is_page)(bytes(start)):
                what = "it is not a report, and --force replaces only reports"
                raise UsageError(what, where=path, fix="Choose another name.")
    refuse_missing_directory(target)


def write_page(
    blocks: Iterable[Block], arguments: Namespace, code: int, folded: Folded = ()
) -> tuple[int, list[Block]]:
    """Write the page that was requested, if one was; return what ``write_file`` returns."""
    if arguments.html is None:
        return code, []
    from transload.render.html_report import page_of

    return write_file(arguments.html, page_of(blocks, arguments.command, folded), arguments, code)


def write_file(
    path: str,
    pieces: Iterable[str],
    arguments: Namespace,
    code: int,
    is_report: Callable[[bytes], bool] | None = None,
) -> tuple[int, list[Block]]:
    """Write a page or another report, whole or not at all.

    Returns the exit code, which is 2 if that failed, and what to say below the report on the terminal. It is written
    before that is shown, since whoever reads it may close the pipe.
    """
    from transload.errors import TransloadError
    from transload.io.atomic import AtomicFile
    from transload.render.lines import BLANK, note
    from transload.render.words import path_text, size

    data = "".join(pieces).encode("utf-8")
    try:
        refuse_page(path, is_report, overwrite=arguments.force)  # the command may have written a file there
        with AtomicFile(path) as file:
            file.write([data])
    except TransloadError as error:  # not as JSON: with a second document, the output cannot be parsed
        print_error(error)
        return 2, []
    return code, [BLANK, note(f"{path_text(path, None)} written: {size(len(data))}")]
