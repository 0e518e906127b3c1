"""The commands that take several files: inspect, verify, check and retag. One that fails does not stop them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from transload.cli.output import as_bug, complain, finish_retag, given, show, write
from transload.errors import TransloadError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transload.checkpoint import Checkpoint
    from transload.render.lines import Block
    from transload.retagging import Retag
    from transload.verifying import Verification


def _for_each(
    arguments: Namespace,
    paths: Sequence[str],
    look: Callable[[str], Any],
    report: Callable[[Any], Iterable[Block]],
    several: Callable[[Sequence[Any], int], Iterable[Block]],
    *,
    finish: bool = True,
) -> tuple[list[Any], int]:
    """Look at each file and show the report of one, the table of several, or the JSON; errors are told.

    Returns what was found out, and the exit code: 1 if something is wrong with a file, 2 if one could not be read.
    """
    results: list[Any] = []
    for path in paths:
        try:
            if finish:
                finish_retag(path)
            results.append(look(path))
        except TransloadError as error:  # noqa: PERF203
            results.append(error)
        except Exception as error:  # noqa: BLE001  a bug with one file must not hide the others
            results.append(as_bug(error, path))
    done = []
    for result in results:
        if isinstance(result, TransloadError):
            complain(result)
        else:
            done.append(result)
    if arguments.json:
        from transload.render.json import error_to_dict, to_json

        told = (
            error_to_dict(path, each) if isinstance(each, TransloadError) else each.to_dict()
            for path, each in zip(paths, results, strict=True)
        )
        write(to_json(told, several=len(paths) > 1))
    elif len(results) > 1:
        show(several(done, len(results)), arguments.color)
    elif done:
        show(report(done[0]), arguments.color)
    return done, 2 if len(done) < len(results) else int(not all(getattr(each, "ok", True) for each in done))


_PARTS = ("shard", "rank file", "weights", "beside the checkpoint")


def expanded(names: Iterable[str], *, parts: bool = False) -> list[str]:
    """The files that names on the command line stand for: patterns that no shell has expanded, and directories.

    A directory stands for itself and other checkpoints in it, or, where it is not one itself, for those in it alone.
    With ``parts``, one that is a checkpoint stands for the files of torch that it consists of.
    """
    from glob import glob
    from os.path import isdir, isfile, join, lexists

    from transload.errors import CannotReadError

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
                saved = [file for file, kind in kinds.items() if kind in _PARTS and isfile(file)]
                inside = [file for file in saved if not file.endswith((".safetensors", ".distcp"))]
            beside = [file for file, kind in kinds.items() if kind == "beside the checkpoint"]
            found += inside or [path, *beside]
    return list(dict.fromkeys(found))


# -- inspect


def inspect_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``inspect``: nothing of a file is run, imported or loaded."""
    option = parser.add_argument
    option("paths", nargs="+", metavar="FILE", help="a checkpoint file, or the directory of one; - is stdin")
    option("--tensors", action="store_true", help="list every tensor, one a line")
    option("--globals", action="store_true", help="list every class and function the file asks for")
    option("--tree", action="store_true", help="show the whole structure of the saved object")
    option("--verify", action="store_true", help="read every byte and compare the checksums")


def run_inspect(arguments: Namespace) -> int:
    """Inspect all files, show what there is to show, return the worst exit code."""
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

    def look(path: str) -> Checkpoint:
        return inspect(_named(path), verify=arguments.verify)

    return _for_each(arguments, arguments.paths, look, report, several)[1]


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
    option = parser.add_argument
    option("paths", nargs="*", metavar="FILE", help="a checkpoint file, or the directory of one")
    option("--hash", action="store_true", help="sha256 of each tensor and of all, whatever the container")
    option("--values", action="store_true", help="count NaN and infinite numbers in each tensor")
    option("--write", metavar="M.json", help="write the hashes to a manifest")
    option("--against", metavar="M.json", help="compare with a manifest; without FILE, all files in it")
    option("--force", action="store_true", help="let --write replace a manifest that is there")


def run_verify(arguments: Namespace) -> int:
    """Verify all files, show what there is to show, write the manifest if all is well, return the worst exit code."""
    from functools import partial

    from transload.verifying import report, several, verify

    manifest = None
    if arguments.write or arguments.against:
        from transload.verifying.manifest import read_manifest, refuse_target

        if arguments.write:  # refused before anything is read
            refuse_target(arguments.write, overwrite=arguments.force)
        manifest = read_manifest(arguments.against) if arguments.against else None
    named = arguments.paths or [entry.path for entry in (manifest.files if manifest else ())]
    if not named:
        raise UsageError("no file is named", fix="transload verify FILE…")
    paths = expanded(named)

    def look(path: str) -> Verification:
        hashes = arguments.hash or bool(arguments.write)
        return verify(path, hashes=hashes, values=arguments.values, against=manifest, progress=True)

    shown = {"hashes": arguments.hash}
    done, code = _for_each(arguments, paths, look, partial(report, **shown), partial(several, **shown))
    if code == 2:
        return code
    if arguments.write and code:
        fix = "Repair it first: transload rescue FILE NEW."
        complain(TransloadError("is not written, since not every file is whole", where=arguments.write, fix=fix))
    elif arguments.write:
        from transload.verifying import write_manifest, written

        write_manifest(arguments.write, done, overwrite=arguments.force)
        if not arguments.json:
            show([written(arguments.write, sum(len(each.tensors) for each in done))], arguments.color)
    return code


# -- check


def check_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``check``: can it be loaded here, where would it land. Nothing is loaded."""
    parser.add_argument("paths", nargs="+", metavar="FILE", help="a checkpoint file, or a directory of some")
    parser.add_argument("--device", metavar="D", default="auto", help="where to: auto, none, cpu, cuda:1 and so on")


def run_check(arguments: Namespace) -> int:
    """Check all files, and return the worst exit code."""
    from transload.checking import check_here, diagnosis_here, report, several

    paths = expanded(arguments.paths)
    device = None if arguments.device == "none" else arguments.device
    if "," in arguments.device:
        device = [name.strip() for name in arguments.device.split(",")]
    diagnosis = diagnosis_here()

    return _for_each(arguments, paths, lambda path: check_here(path, device, diagnosis), report, several)[1]


# -- retag


def retag_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``retag``: nothing of the checkpoint is run or loaded."""
    option = parser.add_argument
    option(
        "paths", nargs="+", metavar="FILE", help="a file of torch.save, zip or legacy format, or a directory of some"
    )
    option("--to", metavar="D", default="", help="the device for all tags: cpu, cuda:0, mps and so on")
    option("--map", metavar="A=B", action="append", default=[], help="tag A becomes B; may be repeated")
    option("-o", "--out", metavar="COPY", help="write a copy and leave the file as it is")
    option("--dry-run", action="store_true", help="say what would be done, and do nothing")
    option("--keep-undo", action="store_true", help="keep beside the file what --undo needs")
    option("--undo", action="store_true", help="take back the last retag, made with --keep-undo")
    option("--hard-links", action="store_true", help="also change a file that has other names")


def run_retag(arguments: Namespace) -> int:
    """Retag all files, or take that back; a file that fails does not stop it."""
    from transload.retagging import report, retag, several, undo

    tags: dict[str, str] = {}
    if arguments.undo:
        others = {"--to": arguments.to, "--map": arguments.map, "-o": arguments.out, "--keep-undo": arguments.keep_undo}
        if beside := [name for name, value in others.items() if value]:
            raise UsageError(f"--undo takes back what was done: {' and '.join(beside)} cannot go with it")
    else:
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
    paths = expanded(arguments.paths, parts=True)
    if arguments.out and len(paths) > 1:
        raise UsageError("-o names one copy, and there are several files", fix="Retag them one by one, or in place.")

    def change(path: str) -> Retag:
        if arguments.undo:
            return undo(path, dry_run=arguments.dry_run)
        return retag(path, tags, **given(arguments, "out dry_run keep_undo hard_links"))

    # retag finishes an interrupted one itself, and says more
    return _for_each(arguments, paths, change, report, several, finish=False)[1]
