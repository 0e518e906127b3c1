"""Hashes of tensors in a file, to compare with later, whatever container the tensors are in by then."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.errors import ManifestError
from transload.verifying import Difference, TensorSum, Verification

if TYPE_CHECKING:
    from collections import Counter

__all__ = ["Manifest", "compare", "hash_of_all", "read_manifest", "refuse_target", "write_manifest"]

_MAX = 1 << 30
_FIX = "Write it with transload verify FILE --write m.json."


def hash_of_all(tensors: Iterable[TensorSum]) -> str:
    """One sha256 for all tensors: of their names, dtypes, shapes and hashes, in the order of the names.

    >>> hash_of_all([])
    'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    from hashlib import sha256

    whole = sha256()
    for line in sorted(_line(tensor) for tensor in tensors):
        whole.update(_json(line).encode("ascii") + b"\n")
    return whole.hexdigest()


def _line(tensor: TensorSum) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


class Held(NamedTuple):
    """What a manifest says of one checkpoint."""

    path: str
    sha256: str
    tensors: tuple[TensorSum, ...]


class Manifest(NamedTuple):
    """A file of hashes."""

    path: str
    files: tuple[Held, ...]

    def of(self, path: str) -> Held:
        """What it says of a file: the one of that path, or of that name, or the only one; ``ManifestError`` if none."""
        whole = [held for held in self.files if os.path.normpath(held.path) == os.path.normpath(path)]
        named = [held for held in self.files if _name(held.path) == _name(path)]
        for found in (whole, named, self.files):
            if len(found) == 1:
                return found[0]
        what = f"it knows {len(named)} files of the name {_name(path)}" if named else f"it says nothing of {path}"
        raise ManifestError(what, where=self.path, fix="Name the file as it was named when the manifest was written.")


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path))  # noqa: PTH119 - pathlib costs ten milliseconds


def refuse_target(path: str, *, overwrite: bool) -> None:
    """Refuse a place where no manifest may be written: asked before gigabytes are read for it."""
    if not overwrite and os.path.lexists(path):
        raise ManifestError("is there already", where=path, fix="Name another file, or pass --force to replace it.")
    folder = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - pathlib costs ten milliseconds
    if not os.path.isdir(folder):  # noqa: PTH112 - as above
        raise ManifestError("there is no such directory", where=folder, fix=f"mkdir -p {quote(folder)}")
    if not os.access(folder, os.W_OK):
        raise ManifestError("nothing may be written into this directory", where=folder, fix="Name another place.")


def write_manifest(path: str, verifications: Sequence[Verification], *, overwrite: bool = False) -> None:
    """Write the hashes of some checkpoints beside, then rename; ``ManifestError`` if one has none, or is damaged."""
    from transload._version import __version__
    from transload.io.atomic import AtomicFile

    for each in verifications:
        if not each.ok or not each.sha256:
            raise ManifestError("is not written: not every file is whole", where=path, fix=f"See {each.path}.")
    refuse_target(path, overwrite=overwrite)
    lines = [_file(each) for each in verifications]
    head = json.dumps({"schema": 1, "transload": __version__})
    text = f'{head[:-1]}, "files": [\n' + ",\n".join(lines) + "\n]}\n"
    with AtomicFile(path) as file, open(file.descriptor, "w", encoding="ascii", closefd=False) as out:
        out.write(text)


def _file(each: Verification) -> str:
    tensors = ",\n".join(
        _json({"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256}) for t in each.tensors
    )
    head = json.dumps({"path": each.path, "format": each.format, "nbytes": each.nbytes, "sha256": each.sha256})
    return f'{head[:-1]}, "tensors": [\n{tensors}\n]}}'


def read_manifest(path: str) -> Manifest:
    """The hashes in a file; ``ManifestError`` if it is something else, ``CannotReadError`` if it cannot be read."""
    from transload.io.sources import FileSource

    source = FileSource(path)
    try:
        if source.size > _MAX:
            raise ManifestError(f"it is {source.size:,} bytes long; no manifest is", where=path, fix=_FIX)
        text = source.read(0, source.size)
    finally:
        source.close()
    try:
        return Manifest(path, _files(json.loads(text)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ManifestError(f"this is no manifest ({type(error).__name__}: {error})", where=path, fix=_FIX) from error


def _files(table: dict[str, Any]) -> tuple[Held, ...]:
    if table["schema"] != 1:
        raise ValueError("it is of another version")
    return tuple(_held(each) for each in table["files"])


def _held(each: dict[str, Any]) -> Held:
    tensors = tuple(
        TensorSum(_text(t["name"]), _text(t["dtype"]), tuple(map(int, t["shape"])), 0, _text(t["sha256"]))
        for t in each["tensors"]
    )
    return Held(_path(each["path"]), _text(each["sha256"]), tensors)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _path(value: object) -> str:
    """A name that a file can have."""
    path = _text(value)
    if b"\0" in os.fsencode(path):
        raise ValueError(f"{path!r:.40} is no name of a file")
    return path


def compare(held: Held, tensors: Iterable[TensorSum]) -> tuple[Difference, ...]:
    """What differs between what a manifest has and what is there, by name."""
    before, now = _by_name(held.tensors), _by_name(tensors)
    out = [Difference(name, "missing") for name in before if name not in now]
    out += [Difference(name, "added") for name in now if name not in before]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if _types(old) != _types(new):
            out.append(Difference(name, "retyped", f"{_shown(new)}, was {_shown(old)}"))
        elif _hashes(old) != _hashes(new):
            out.append(Difference(name, "changed", f"sha256 {new[0].sha256 or 'unknown'}, was {old[0].sha256}"))
    return tuple(sorted(out))


def _by_name(tensors: Iterable[TensorSum]) -> dict[str, list[TensorSum]]:
    """Two tensors may bear one name: a key may hold the slash that joins keys."""
    out: dict[str, list[TensorSum]] = {}
    for tensor in tensors:
        out.setdefault(tensor.name, []).append(tensor)
    return out


def _types(tensors: list[TensorSum]) -> Counter[tuple[str, tuple[int, ...]]]:
    from collections import Counter

    return Counter((tensor.dtype, tensor.shape) for tensor in tensors)


def _hashes(tensors: list[TensorSum]) -> list[str]:
    return sorted(tensor.sha256 for tensor in tensors)


def _shown(tensors: list[TensorSum]) -> str:
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:2])
