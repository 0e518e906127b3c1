"""``transload verify FILE…``: whether every byte is the one that was saved. Nothing of a file is run or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import as_bug, complain, show, write
from transload.errors import TransloadError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

    from transload.verifying import Verification
    from transload.verifying.manifest import Manifest

__all__ = ["add_arguments", "run"]

_EPILOG = """\
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


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``verify``."""
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="*", metavar="FILE", help="a checkpoint file, or the directory of one")
    parser.add_argument("--hash", action="store_true", help="sha256 of each tensor and of all, whatever the container")
    parser.add_argument("--values", action="store_true", help="count NaN and infinite numbers in each tensor")
    parser.add_argument("--write", metavar="M.json", help="write the hashes to a manifest")
    parser.add_argument("--against", metavar="M.json", help="compare with a manifest; without FILE, all files in it")
    parser.add_argument("--force", action="store_true", help="let --write replace a manifest that is there")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Verify all files, show what there is to show, return the worst exit code."""
    manifest = None
    if arguments.write or arguments.against:
        from transload.verifying.manifest import read_manifest, refuse_target

        if arguments.write:  # refused before anything is read
            refuse_target(arguments.write, overwrite=arguments.force)
        manifest = read_manifest(arguments.against) if arguments.against else None
    paths = _paths(arguments, manifest)
    results = [_verified(path, arguments, manifest) for path in paths]
    errors = [result for result in results if isinstance(result, TransloadError)]
    done = [result for result in results if not isinstance(result, TransloadError)]
    for error in errors:
        complain(error)
    if arguments.json:
        write(_json(paths, results))
    else:
        from transload.verifying import report, several

        hashes = arguments.hash
        blocks = report(done[0], hashes=hashes) if len(done) == len(results) == 1 else ()
        show(several(done, len(results), hashes=hashes) if len(results) > 1 else blocks, arguments.color)
    if errors:
        return 2
    return _write_manifest(arguments, done)


def _paths(arguments: Namespace, manifest: Manifest | None) -> list[str]:
    from transload.verifying import files_in

    named = arguments.paths or [entry.path for entry in (manifest.files if manifest else ())]
    if not named:
        raise UsageError("no file is named", fix="transload verify FILE…")
    return list(dict.fromkeys(found for path in named for found in files_in(path)))


def _verified(path: str, arguments: Namespace, manifest: Manifest | None) -> Verification | TransloadError:
    from transload.verifying import verify

    try:
        return verify(
            path,
            hashes=arguments.hash or bool(arguments.write),
            values=arguments.values,
            against=manifest,
            progress=True,
        )
    except TransloadError as error:
        return error
    except Exception as error:  # noqa: BLE001  a bug with one file must not hide the others
        return as_bug(error, path)


def _json(paths: Sequence[str], results: Sequence[Verification | TransloadError]) -> Iterator[str]:
    from transload.render.json import error_to_dict, to_json

    documents = (
        error_to_dict(path, result) if isinstance(result, TransloadError) else result.to_dict()
        for path, result in zip(paths, results, strict=True)
    )
    return to_json(documents, several=len(paths) > 1)


def _write_manifest(arguments: Namespace, done: Sequence[Verification]) -> int:
    """Write the manifest, if all is well; the exit code."""
    code = int(any(not verification.ok for verification in done))
    if arguments.write and not code:
        from transload.verifying import write_manifest, written

        write_manifest(arguments.write, done, overwrite=arguments.force)
        if not arguments.json:
            show([written(arguments.write, sum(len(each.tensors) for each in done))], arguments.color)
    elif arguments.write:
        fix = "Repair it first: transload rescue FILE NEW."
        complain(TransloadError("is not written, since not every file is whole", where=arguments.write, fix=fix))
    return code
