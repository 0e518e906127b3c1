"""Manifests: files with the hashes of tensors, to compare with later, in whatever container the tensors are then."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from shlex import quote
from typing import Any, NamedTuple

from transload.errors import ManifestError, TransloadError
from transload.io.sources import FileSource

_MAX = 1 << 30
_FIX = "Write it with transload verify FILE --write m.json."


class TensorSum(NamedTuple):
    """A tensor, with the hash of its elements, which docs/verify.md defines.

    ``sha256`` is empty if it was not requested, or if there are no elements to hash: ``note`` says why. ``nan`` and
    ``inf`` are ``None`` if they were not counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str = ""
    nan: int | None = None
    inf: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self._asdict(), "shape": list(self.shape), "sha256": self.sha256 or None}


class Difference(NamedTuple):
    """A tensor that differs from the manifest: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


def hash_of_all(tensors: Iterable[TensorSum]) -> str:
    """One sha256 for all tensors: of their names, dtypes, shapes and hashes, sorted by name.

    >>> hash_of_all([])
    'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    whole = sha256()
    for line in sorted([tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256] for tensor in tensors):
        whole.update(to_json(line).encode("ascii") + b"\n")
    return whole.hexdigest()


def to_json(value: object) -> str:
    """Compact JSON in ASCII."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


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
            return os.path.basename(os.path.normpath(path))  # noqa: PTH119 - pathlib costs ten milliseconds

        same = [entry for entry in self.files if os.path.normpath(entry.path) == os.path.normpath(path)]
        named = [entry for entry in self.files if name(entry.path) == name(path)]
        for entries in (same, named, self.files):
            if len(entries) == 1:
                return entries[0]
        what = f"it has {len(named)} files named {name(path)}" if named else f"it has no entry for {path}"
        raise ManifestError(what, where=self.path, fix="Name the file as it was named when the manifest was written.")


def refuse_target(path: str, *, overwrite: bool) -> None:
    """Refuse a path where no manifest can be written, before gigabytes are read for it."""
    if not overwrite and os.path.lexists(path):
        raise ManifestError("already exists", where=path, fix="Name another file, or pass --force to replace it.")
    if os.path.exists(path):  # noqa: PTH110 - pathlib costs ten milliseconds
        # It may be the checkpoint itself.
        try:
            read_manifest(path)
        except TransloadError:
            what = "it is not a manifest, and --force replaces only manifests"
            raise ManifestError(what, where=path, fix="Name another file.") from None
    folder = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - pathlib costs ten milliseconds
    if not os.path.isdir(folder):  # noqa: PTH112 - as above
        raise ManifestError("there is no such directory", where=folder, fix=f"mkdir -p {quote(folder)}")
    if not os.access(folder, os.W_OK):
        raise ManifestError("this directory is not writable", where=folder, fix="Name another place.")


def read_manifest(path: str) -> Manifest:
    """Read a manifest; ``ManifestError`` if it is something else, ``CannotReadError`` if it cannot be read."""
    source = FileSource(path)
    try:
        if source.size > _MAX:
            raise ManifestError(f"it is {source.size:,} bytes long, too long for a manifest", where=path, fix=_FIX)
        text = source.read(0, source.size)
    finally:
        source.close()
    try:
        return Manifest(path, _entries(json.loads(text)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        what = f"this is not a manifest ({type(error).__name__}: {error})"
        raise ManifestError(what, where=path, fix=_FIX) from error


def _entries(table: dict[str, Any]) -> tuple[ManifestEntry, ...]:
    if table["schema"] != 1:
        raise ValueError("it is of another version")
    files: list[ManifestEntry] = []
    for each in table["files"]:
        path = _text(each["path"])
        if b"\0" in os.fsencode(path):
            raise ValueError(f"{path!r:.40} cannot be the name of a file")
        tensors = tuple(
            TensorSum(_text(t["name"]), _text(t["dtype"]), tuple(map(int, t["shape"])), 0, _text(t["sha256"]))
            for t in each["tensors"]
        )
        files.append(ManifestEntry(path, _text(each["sha256"]), tensors))
    return tuple(files)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def compare(entry: ManifestEntry, tensors: Iterable[TensorSum]) -> tuple[Difference, ...]:
    """The differences between a manifest and the tensors of a checkpoint, by name."""

    def by_name(tensors: Iterable[TensorSum]) -> dict[str, list[TensorSum]]:
        """Two tensors may have the same name: a key may contain the slash that joins keys."""
        out: dict[str, list[TensorSum]] = {}
        for tensor in tensors:
            out.setdefault(tensor.name, []).append(tensor)
        return out

    def shown(tensors: list[TensorSum]) -> str:
        return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:2])

    before, now = by_name(entry.tensors), by_name(tensors)
    out = [Difference(name, "missing") for name in before if name not in now]
    out += [Difference(name, "added") for name in now if name not in before]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if Counter((t.dtype, t.shape) for t in old) != Counter((t.dtype, t.shape) for t in new):
            out.append(Difference(name, "retyped", f"{shown(new)}, was {shown(old)}"))
        elif sorted(t.sha256 for t in old) != sorted(t.sha256 for t in new):
            out.append(Difference(name, "changed", f"sha256 {new[0].sha256 or 'unknown'}, was {old[0].sha256}"))
    return tuple(sorted(out))
