"""``torch.distributed.checkpoint`` directories: a pickle that says what there is, and files of small archives.

``.metadata`` is the pickle of ``torch.distributed.checkpoint.metadata.Metadata``; each ``.distcp`` file is a row of
complete ``torch.save`` archives, one for each piece of a tensor and each other object. torch unpickles ``.metadata``
and the other objects without any check, so all of them are read here.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from transload.checkpoint import Part, Tensor, contiguous
from transload.errors import CannotReadError
from transload.read.nodes import Call, Dict, Global
from transload.read.noted import Noted, some
from transload.read.parts import Listing, Merger, Readers, inner_name
from transload.read.safetensors import looks_like
from transload.read.source import FileSource, Slice

__all__ = ["read_dcp_into"]

METADATA = ".metadata"
# As for any pickle: this is room for a million tensors.
MAX_METADATA = 512 << 20
# Each item costs about a millisecond; beyond this the safety verdict has to be "unknown".
MAX_ITEMS = 20_000
# torch allows 64. A million dimensions of 2**62 would take hours to multiply out.
MAX_DIMENSIONS = 64


class _Item(NamedTuple):
    """One archive in a ``.distcp`` file."""

    fqn: str
    at: tuple[int, ...]
    file: str
    offset: int
    length: int
    transformed: bool


class _Entry(NamedTuple):
    """A tensor as ``.metadata`` describes it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class _Reading(NamedTuple):
    """A directory being read: where it goes, what it holds, how to read it, and its place below the root."""

    merger: Merger
    listing: Listing
    readers: Readers
    prefix: str

    def note(self, code: str, name: str, detail: str) -> None:
        """Note a problem with one of its files."""
        self.merger.noted.add(code, self.prefix + name, detail)


def read_dcp_into(merger: Merger, listing: Listing, readers: Readers, prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Read a directory with ``.metadata`` into ``merger``; facts come back. ``prefix`` is its place below the root."""
    reading = _Reading(merger, listing, readers, prefix)
    ranks = [name for name in listing.files if name.endswith(".distcp")]
    merger.parts += [Part(prefix + name, "rank file", listing.files[name]) for name in ranks]
    fields = _state(_metadata(reading))
    if not fields:
        return (("rank files", f"{len(ranks):,}"),)
    entries = _entries(fields.get("state_dict_metadata"))
    pieces = _read_items(_items(fields.get("storage_data"), reading), reading)
    _assemble(entries, pieces, merger)
    version = fields.get("version")
    objects = sum(entry is None for entry in entries.values())
    return (
        ("rank files", f"{len(ranks):,}"),
        ("entries", f"{len(entries) - objects:,} tensors, {objects:,} other objects"),
        *((("metadata version", version),) if isinstance(version, str) else ()),
    )


def _metadata(reading: _Reading) -> object:
    """The root of ``.metadata``; ``None``, with a problem, if there is none."""
    files = reading.listing.files
    size = files.get(METADATA)
    if size is None:
        left = [name for name in files if name.endswith((".metadata", ".metadata.tmp"))]
        detail = f"only {some(left)} is there" if left else "it is written last, when every rank is done"
        reading.note("dcp-metadata-missing", METADATA, detail)
        return None
    if size > MAX_METADATA:
        reading.note("dcp-metadata-too-large", METADATA, f"{size:,} bytes; the limit is {MAX_METADATA:,}")
        return None
    from transload.read.torch_zip import pickle_problems

    data = _contents(reading)
    pickle = reading.readers.pickle(data, reading.prefix + METADATA)
    pickle.main = True
    reading.merger.pickles.append(pickle)
    reading.merger.parts.append(Part(reading.prefix + METADATA, "index", size))
    reading.merger.noted.extend(tuple(pickle_problems(pickle, len(data))))
    if not _state(pickle.root) and not pickle.broken:
        reading.note("dcp-metadata-invalid", METADATA, "it is a pickle, but not of the metadata of a checkpoint")
    return pickle.root


def _contents(reading: _Reading) -> bytes:
    try:
        source = FileSource(reading.listing.join(METADATA))
    except CannotReadError as error:
        reading.note("part-unreadable", METADATA, error.what)
        return b""
    try:
        return source.read(0, source.size)
    except CannotReadError as error:
        reading.note("part-unreadable", METADATA, error.what)
        return b""
    finally:
        source.close()


def _state(node: object) -> dict[str, object]:
    """The attributes that a pickled object gets: its last BUILD argument, if that is a dictionary."""
    if isinstance(node, Call) and node.states and isinstance(node.states[-1], Dict):
        return {key: value for key, value in node.states[-1].pairs() if isinstance(key, str)}
    return {}


def _size(node: object) -> tuple[int, ...] | None:
    """A ``torch.Size``, which pickles as a call with a tuple."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, tuple | list) or len(node) > MAX_DIMENSIONS:
        return None
    return tuple(node) if all(type(size) is int and 0 <= size < 1 << 63 for size in node) else None


def _pairs(node: object) -> list[tuple[object, object]]:
    return node.pairs() if isinstance(node, Dict) else []


def _entries(node: object) -> dict[str, _Entry | None]:
    """What the state dict held: a description for each tensor, ``None`` for any other object."""
    entries: dict[str, _Entry | None] = {}
    for name, value in _pairs(node):
        if isinstance(name, str):
            entries[name] = _entry(_state(value))
    return entries


def _entry(fields: dict[str, object]) -> _Entry | None:
    shape, chunks = _size(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(chunks, list):
        return None
    pieces = []
    for chunk in map(_state, chunks):
        at, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if at is not None and sizes is not None:
            pieces.append((at, sizes))
    return _Entry(_dtype(fields.get("properties")), shape, tuple(pieces))


def _dtype(node: object) -> str:
    """The dtype: first of the tuple that ``TensorProperties`` pickles to, in old releases an attribute."""
    state: object = None
    if isinstance(node, Call) and node.states:
        state = node.states[-1]
    first = state[0] if isinstance(state, tuple) and state else _state(node).get("dtype")
    return first.name if isinstance(first, Global) and first.module == "torch" else "unknown"


def _items(node: object, reading: _Reading) -> list[_Item]:
    """Where each piece lies. A path that leads out of the directory is noted and never opened."""
    items: list[_Item] = []
    for key, value in _pairs(node):
        index, info = _state(key), _state(value)
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        file, fqn = inner_name(name), index.get("fqn")
        if not file:
            reading.note("dcp-path-outside", METADATA, f"{str(name)[:200]!r} was not opened")
        elif type(offset) is int and type(length) is int and isinstance(fqn, str) and min(offset, length) >= 0:
            at = _size(index.get("offset")) or ()
            items.append(_Item(fqn, at, file, offset, length, bool(info.get("transform_descriptors"))))
    return items


_Pieces = dict[str, dict[tuple[int, ...], tuple[Tensor, ...]]]
"""Tensors found in the items: by name, then by where in the whole they belong."""


def _read_items(items: list[_Item], reading: _Reading) -> _Pieces:
    """Read every item, file by file, as far as the files reach."""
    pieces: _Pieces = {}
    files: dict[str, list[_Item]] = {}
    for item in items[:MAX_ITEMS]:
        files.setdefault(item.file, []).append(item)
    if len(items) > MAX_ITEMS:
        reading.note("dcp-items-unread", METADATA, f"{len(items) - MAX_ITEMS:,} of {len(items):,}")
    for file, held in sorted(files.items()):
        try:
            source = FileSource(reading.listing.join(file))
        except CannotReadError as error:
            names = some([item.fqn for item in held], 3)
            reading.note("dcp-file-missing", file, f"{error.what}; {len(held):,} entries need it: {names}")
            reading.merger.lost(reading.prefix + file, "rank file")
            continue
        try:
            _read_file(source, held, reading, pieces)
        finally:
            source.close()
    return pieces


def _read_file(source: FileSource, held: list[_Item], reading: _Reading, pieces: _Pieces) -> None:
    file = held[0].file
    cut = [item.fqn for item in held if item.offset + item.length > source.size]
    if cut:
        detail = f"it ends at byte {source.size:,}, before {len(cut):,} of its entries do: {some(cut, 3)}"
        reading.note("dcp-file-cut", file, detail)
    elif sum(item.length for item in held) > source.size:
        # A thousand entries that are all the same gigabyte would be a thousand gigabytes to verify.
        reading.note("dcp-items-overlap", file, f"{len(held):,} entries are longer together than the file")
        return
    opaque: list[str] = []
    for item in held:
        if item.transformed or looks_like(Slice(source, item.offset, source.size, "")):
            opaque.append(item.fqn)
        elif item.offset < source.size:
            pieces.setdefault(item.fqn, {})[item.at] = _read_item(source, item, reading)
    if opaque:
        reading.note("dcp-transformed", file, f"{len(opaque):,} entries: {some(opaque, 3)}")


def _read_item(source: FileSource, item: _Item, reading: _Reading) -> tuple[Tensor, ...]:
    file = reading.prefix + item.file
    found = reading.readers.item(Slice(source, item.offset, item.length, f"{file} › {item.fqn}"))
    # Two items of one file may both call their storage "0".
    return reading.merger.take(file, found, steps=(item.fqn,), shift=item.offset, label=f"{file}@{item.offset}")


def _assemble(entries: dict[str, _Entry | None], pieces: _Pieces, merger: Merger) -> None:
    """Tensors by their own names, put together from their pieces; what is no tensor stays as it was read."""
    whole: list[Tensor] = []
    for name, entry in entries.items():
        found = pieces.get(name, {})
        if entry is None:
            whole += [tensor for tensors in found.values() for tensor in tensors]
        else:
            whole.append(_joined(name, entry, found, merger.noted))
    merger.tensors = whole


def _joined(name: str, entry: _Entry, found: dict[tuple[int, ...], tuple[Tensor, ...]], noted: Noted) -> Tensor:
    """One tensor: its only piece under its own name, or all its pieces as parts."""
    parts: list[Tensor] = []
    for at, sizes in entry.chunks:
        for part in found.get(at, ())[:1]:
            parts.append(part._replace(path=(name, *at)))
            if (part.dtype, part.shape) != (entry.dtype, sizes):
                detail = f"{part.dtype} {list(part.shape)} where .metadata says {entry.dtype} {list(sizes)}"
                noted.add("dcp-piece-mismatch", name, detail)
    if len(parts) < len(entry.chunks) or sum(prod(sizes) for _, sizes in entry.chunks) < prod(entry.shape):
        noted.add("dcp-piece-missing", name, f"{len(parts):,} of {len(entry.chunks):,} pieces were found")
    if len(parts) == 1 and parts[0].shape == entry.shape:
        return parts[0]._replace(path=(name,), name=name)
    stride = contiguous(entry.shape)
    return Tensor((name,), name, entry.dtype, entry.shape, stride, "cpu", None, kind="sharded", parts=tuple(parts))
