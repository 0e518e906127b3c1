"""Manifests: files with the hashes of tensors, with which they can be compared later, in any container."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from transload._version import __version__
from transload.errors import ManifestError, TransloadError
from transload.format import FORMATS
from transload.frozen import NamedTuple
from transload.io.atomic import AtomicFile, refuse_missing_directory, target_path
from transload.io.paths import is_folder, open_source
from transload.io.sources import real_path, shown
from transload.opening import inspect
from transload.opening.digests import TensorSum
from transload.verifying.report import Verification

_MAX = 1 << 30
_FIX = "This writes one: transload verify FILE --write m.json"


class ManifestEntry(NamedTuple):
    """The hashes of a checkpoint in a manifest."""

    path: str
    sha256: str
    tensors: tuple[TensorSum, ...]


class Manifest(NamedTuple):
    """A file of hashes."""

    path: str
    files: tuple[ManifestEntry, ...]

    def of(self, path: str) -> ManifestEntry:
        """The entry of a file, by its path, else by its file name, else the only one; ``ManifestError`` if unclear."""

        def name(path: str) -> str:
            return os.path.basename(os.path.normpath(path))

        same = [entry for entry in self.files if os.path.normpath(entry.path) == os.path.normpath(path)]
        named = [entry for entry in self.files if name(entry.path) == name(path)]
        for entries in (same, named, self.files):
            if len(entries) == 1:
                return entries[0]
        what = f"it has {len(named)} files named {name(path)}" if named else f"it has no entry for {path}"
        raise ManifestError(what, where=self.path, fix="Name the file as it was named when the manifest was written.")


def refuse_target(path: str, *, overwrite: bool) -> None:
    """Refuse a path where no manifest can be written, before gigabytes are read for it."""
    path = target_path(path)
    if not overwrite and os.path.lexists(path):
        raise ManifestError("already exists", where=path, fix="Replace it: --force (overwrite=True in Python).")
    if os.path.exists(path):
        # It may be the checkpoint itself.
        try:
            read_manifest(path)
        except TransloadError:
            what = "it is not a manifest, and --force replaces only manifests"
            raise ManifestError(what, where=path, fix="Name another file.") from None
    refuse_missing_directory(path)
    folder = os.path.dirname(real_path(path))
    if not os.access(folder, os.W_OK):
        raise ManifestError("this directory is not writable", where=folder, fix="Name another place.")


def read_manifest(path: str) -> Manifest:
    """Read a manifest; ``ManifestError`` if it is something else, ``CannotReadError`` if it cannot be read."""
    if is_folder(path):
        raise _not_a_manifest(path, "it is a directory")
    source = open_source(path)
    try:
        if source.size > _MAX:
            raise _not_a_manifest(path, f"it has {source.size:,} bytes")
        text = source.read(0, source.size)
    finally:
        source.close()
    try:
        return Manifest(shown(path), tuple(_entries(json.loads(text))))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        invalid = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        why = "it is not JSON" if invalid else f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise _not_a_manifest(path, why) from error


def _not_a_manifest(path: str, why: str) -> ManifestError:
    form = FORMATS.get(inspect(path).format)
    what = f"this is a checkpoint ({form.words}), not a manifest" if form else f"this is not a manifest: {why}"
    return ManifestError(what, where=path, fix=_FIX)


def _entries(table: dict[str, Any]) -> Iterator[ManifestEntry]:
    if table["schema"] != 1:
        raise ValueError("it has another schema version")
    for file in table["files"]:
        path = _text(file["path"])
        if b"\0" in os.fsencode(path):
            raise ValueError(f"{path!r:.40} cannot be the name of a file")
        tensors = tuple(
            TensorSum(_text(t["name"]), _text(t["dtype"]), tuple(map(int, t["shape"])), 0, _text(t["sha256"]))
            for t in file["tensors"]
        )
        yield ManifestEntry(path, _text(file["sha256"]), tensors)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value


def write_manifest(path: str, verifications: Sequence[Verification], *, overwrite: bool = False) -> None:
    """Write the hashes of checkpoints atomically; ``ManifestError`` if one of them is damaged or has no hash."""
    for verification in verifications:
        if not verification.ok or not verification.sha256:
            raise ManifestError("not written, since a file has a problem", where=path, fix=f"See {verification.path}.")
    refuse_target(path, overwrite=overwrite)
    files = []
    for verification in verifications:
        entries = (
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256} for t in verification.tensors
        )
        tensors = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        head = json.dumps({name: getattr(verification, name) for name in ("path", "format", "nbytes", "sha256")})
        files.append(f'{head[:-1]}, "tensors": [\n{tensors}\n]}}')
    head = json.dumps({"schema": 1, "transload": __version__})
    text = f'{head[:-1]}, "files": [\n' + ",\n".join(files) + "\n]}\n"
    with AtomicFile(path) as file:
        file.write([text.encode("ascii")])
