"""The commands that call one function, for one file or for each of several, and show its result."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from transload.cli.output import (
    expand_patterns,
    finish_retag,
    for_each,
    keywords,
    print_error,
    show,
    show_result,
    write_json,
    write_page,
)
from transload.devices import refuse_unknown
from transload.errors import CannotReadError, TransloadError, UsageError
from transload.findings import quoted
from transload.io.sources import shown

_REGEX = frozenset("\\^$*+?()[]{}|")


def _rename_of(text: str) -> object:
    """What ``--rename A=B`` means for ``convert``: a name or a prefix, or a regular expression."""
    old, equals, new = text.rpartition("=")
    if not equals or not (old or new):
        raise UsageError(f"--rename takes A=B, such as encoder.=backbone., not {text!r}")
    if _REGEX.isdisjoint(old):
        return {old: new}
    try:
        re.sub(old, new, "")
    except (LookupError, re.error) as error:
        raise UsageError(f"--rename {text!r} is no regular expression and its replacement: {error}") from error
    return old, new


def run_convert(arguments: Namespace) -> int:
    """Convert, or list the parts that ``--key`` can choose."""
    from transload.converting import convert, listing, parts, report

    paths = [arguments.path, *arguments.more]
    if arguments.list:
        if arguments.more or arguments.only or arguments.drop or arguments.rename or arguments.lora:
            fix = "Name only SRC, without options that choose, rename or merge tensors."
            raise UsageError("--list shows the parts of one checkpoint", fix=fix)
        finish_retag(arguments.path)
        candidates = parts(arguments.path)
        blocks = [*listing(arguments.path, candidates)]
        code, written = write_page(blocks, arguments, 0)
        if arguments.json:
            write_json([{"schema": 1, "path": shown(arguments.path), "parts": [part._asdict() for part in candidates]}])
        else:
            show([*blocks, *written], arguments.color)
        return code
    if not arguments.more:
        raise UsageError("DST is missing", fix="Say where to write: transload convert SRC DST; or add --list.")
    out = paths.pop()
    for path in paths:
        finish_retag(path)
    names = "to key strip only drop lora dtype optimizer allow_inf max_shard_size verify"
    options = keywords(arguments, names)
    options["rename"] = [_rename_of(text) for text in arguments.rename] or None
    result = convert(paths, out, **options, overwrite=arguments.force, progress=not arguments.json)
    return show_result(result, report, arguments, 0 if result.complete and not result.listed else 1)


def run_diff(arguments: Namespace) -> int:
    """Compare two checkpoints."""
    from transload.comparing import diff, report

    for path in (arguments.a, arguments.b):
        finish_retag(path)
    tolerance = keywords(arguments, "rtol atol")
    result = diff(arguments.a, arguments.b, **tolerance, progress=not arguments.json)
    return show_result(result, report, arguments, 0 if result.same else 1)


def run_explain(arguments: Namespace) -> int:
    """Explain one text."""
    from transload.explaining import explain_log, report
    from transload.explaining.logs import is_binary, is_packed, not_a_text

    blocks = _log_blocks(arguments.log)
    first = next(blocks, b"")
    path = "" if arguments.log == "-" else arguments.log
    if is_packed(first):
        raise not_a_text(path)
    binary = is_binary(first)
    explanation = explain_log([first] if binary else chain([first], blocks), checks=not arguments.no_checks)
    if binary and not explanation.answers:
        raise not_a_text(path)
    if not explanation.answers and not explanation.unknown:
        raise UsageError("there is no text to explain", fix="Pipe a log in, or name a file that holds one.")
    return show_result(explanation, report, arguments, int(not explanation.known))


_LOGS = (".txt", ".log", ".err", ".out")
_FILES = (
    *_LOGS,
    *(".json", ".jsonl", ".csv", ".html", ".gz", ".xz", ".zst", ".zip"),
    *(".pt", ".pth", ".ckpt", ".bin", ".safetensors"),
)
"""How the names of files end. A code may have a dot, too: torch.OutOfMemoryError."""


def _log_blocks(path: str) -> Iterator[bytes]:
    """The bytes of a log, or of the text itself."""
    from transload.explaining.logs import read_blocks

    try:
        if path != "-":
            with open(path, "rb") as file:
                yield from read_blocks(file)
        elif sys.stdin is not None:
            if sys.stdin.isatty():
                print("transload: paste the text, then press Ctrl-D (Ctrl-Z on Windows)", file=sys.stderr)
            yield from read_blocks(sys.stdin.buffer)
    except OSError as error:
        if not path.strip():
            raise UsageError("TEXT is empty", fix="Name a log file, or put the error message in quotes.") from error
        if len(path.split()) == 1:
            names_a_file = path.lower().endswith(_FILES) or "/" in path or os.sep in path
        else:
            names_a_file = path.endswith(_LOGS) and "\n" not in path and ": " not in path
        if not names_a_file and not os.path.lexists(path):  # it is the text itself
            yield path.encode("utf-8", "surrogateescape")
            return
        fix = ""
        if isinstance(error, IsADirectoryError):
            fix = f"Name a log file in it. For a checkpoint in a folder: transload inspect {quoted(path)}"
        elif isinstance(error, FileNotFoundError):
            fix = (
                "Name a file that holds a log or a traceback, or pipe one in: python train.py 2>&1 | transload explain"
            )
        what = f"cannot be read: {error.strerror or error}"
        raise CannotReadError(what, where=path, fix=fix, errno=error.errno) from error


def run_rescue(arguments: Namespace) -> int:
    """Rescue a checkpoint."""
    from transload.rescuing import report, rescue

    if arguments.dst is None and not arguments.dry_run:
        raise UsageError("no output file is named", fix="transload rescue SRC DST, or --dry-run to only see the plan.")
    options = keywords(arguments, "fill dry_run member")
    result = rescue(arguments.src, arguments.dst, **options, overwrite=arguments.force, progress=not arguments.json)
    return show_result(result, report, arguments, result.exit_code)


def expand_paths(
    names: Iterable[str], examine: Callable[[str], object], *, parts: bool = False
) -> tuple[list[str], Callable[[str], object]]:
    """Expand directories and unexpanded patterns to paths of checkpoints; return these, and a function for each.

    A directory that is a checkpoint becomes its own path and those of other checkpoints in it; any other directory, the
    checkpoints in it. With ``parts``, a directory that is a checkpoint becomes the torch files it consists of. The
    returned function calls ``examine``. For a directory that could not be read it raises that error instead: otherwise
    files in it would be left out.
    """
    from os.path import isfile, join, normpath

    from transload.io.paths import place_of
    from transload.io.sources import is_url

    paths: list[str] = []
    errors: dict[str, CannotReadError] = {}
    for path in expand_patterns(names):
        roles: dict[str, str] = {}
        try:
            place = place_of(path)
            if place.folder is not None and not place.index:
                from transload.opening import OpenCheckpoint

                with OpenCheckpoint(place, neighbours=True, lazy=True) as opened:
                    checkpoint = opened.checkpoint
                here = f"{path.rstrip('/')}/{{}}".format if is_url(path) else partial(join, path)
                for problem in checkpoint.problems if parts else ():
                    if problem.code == "directory-unreadable":
                        errors[path] = CannotReadError(problem.detail, where=here(problem.where))
                roles = {here(normpath(part.name)): part.role for part in checkpoint.parts}
        except CannotReadError as error:
            errors[path] = error
        inside = [file for file, role in roles.items() if role == "candidate"]
        if parts and not inside:
            # Also files that exist but count as missing: they cannot be read, and opening them says why.
            saved = [file for file, role in roles.items() if role in ("member", "beside", "") and isfile(file)]
            inside = [file for file in saved if not file.endswith(".safetensors")]
        beside = [file for file, role in roles.items() if role == "beside"]
        paths += [path] if path in errors else inside or [path, *beside]

    def unless_unread(path: str) -> object:
        if path in errors:
            raise errors[path]
        return examine(path)

    return list(dict.fromkeys(paths)), unless_unread


def run_verify(arguments: Namespace) -> int:
    """Verify all files, show the results, write the manifest if all is well, and return the worst exit code."""
    from transload.verifying import read_manifest, refuse_target, report, several, verify, write_manifest, written

    if arguments.write:  # before anything is read
        refuse_target(arguments.write, overwrite=arguments.force)
    manifest = read_manifest(arguments.against) if arguments.against else None
    named = arguments.paths or [entry.path for entry in (manifest.files if manifest else ())]
    if not named:
        raise UsageError("no file is named", fix="transload verify FILE…")
    hashes = arguments.hash or bool(arguments.write)
    one = partial(verify, hashes=hashes, values=arguments.values, against=manifest, progress=True)
    paths, examine = expand_paths(named, one)
    lists = {"hashes": arguments.hash}
    done, _, code = for_each(arguments, paths, examine, partial(report, **lists), partial(several, **lists))
    if arguments.write and code:
        print_error(TransloadError("not written, since a file has a problem (see above)", where=arguments.write))
    elif arguments.write:
        try:
            write_manifest(arguments.write, done, overwrite=arguments.force)
        except TransloadError as error:  # not as JSON: with a second document, the output cannot be parsed
            print_error(error)
            return 2
        if not arguments.json:
            show([written(arguments.write, sum(len(file.tensors) for file in done))], arguments.color)
    return code


def run_check(arguments: Namespace) -> int:
    """Check all files, show the results, and return the worst exit code."""
    from transload.checking import check_here, report, several
    from transload.diagnose import doctor

    names = [name.strip() for name in arguments.device.split(",")]
    for name in names:
        if name != "auto" and arguments.device != "none":
            refuse_unknown(name, "auto, none")
    device = None if arguments.device == "none" else names if len(names) > 1 else names[0]
    model = None
    if arguments.model is not None:
        from transload.loading.into.fitting import built

        model = built(arguments.model)
    examine = partial(check_here, device=device, diagnosis=doctor(torch=False), model=model)
    return for_each(arguments, *expand_paths(arguments.paths, examine), report, several)[2]


def run_retag(arguments: Namespace) -> int:
    """Retag all files, or undo their last retag; a file that fails does not stop the others."""
    from transload.retagging import report, retag, several, undo

    tags: dict[str, str] = {}
    if arguments.undo:
        others = {"--to": arguments.to, "--map": arguments.map, "-o": arguments.out, "--keep-undo": arguments.keep_undo}
        if combined := [name for name, value in others.items() if value]:
            raise UsageError(f"--undo cannot be combined with {' and '.join(combined)}")
        change = partial(undo, dry_run=arguments.dry_run)
    else:
        for pair in arguments.map:
            old, equals, new = pair.rpartition("=")
            if not (old and equals and new):
                raise UsageError(f"--map takes two devices, such as cuda:1=cuda:0, not {pair!r}")
            if tags.setdefault(old, new) != new:
                raise UsageError(f"--map gives {old} two devices: {tags[old]} and {new}")
        if arguments.to and tags.setdefault("*", arguments.to) != arguments.to:
            raise UsageError(f"--to and --map give all other tags two devices: {tags['*']} and {arguments.to}")
        if not tags:
            raise UsageError("no device is named", fix="Name one: --to cpu, or --map cuda:1=cuda:0.")
        change = partial(retag, to=tags, **keywords(arguments, "out dry_run keep_undo hard_links"))
    paths, examine = expand_paths(arguments.paths, change, parts=True)
    if arguments.out and len(paths) > 1:
        raise UsageError("-o names one copy, but there are several files", fix="Retag them one by one, or in place.")
    # retag finishes an interrupted retag itself, and reports it
    return for_each(arguments, paths, examine, report, several, finish=False)[2]
