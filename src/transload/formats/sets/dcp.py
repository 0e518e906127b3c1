"""``torch.distributed.checkpoint``: a pickled object, ``.metadata``, says which bytes of which file are a tensor."""

from __future__ import annotations

import os
from contextlib import closing
from math import prod
from typing import TypeGuard

from transload.checkpoint import Checkpoint, Part, Tensor
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, join_names
from transload.formats.pickle_machine import run
from transload.formats.safetensors import looks_like_safetensors
from transload.formats.sets.merger import Merger
from transload.formats.torch_zip import pickle_problems
from transload.geometry import contiguous
from transload.io.folder import Listing, relative_path
from transload.io.sources import Slice
from transload.nodes import Call, Dict, Global, short
from transload.render.words import plural

METADATA = ".metadata"
# Enough for a million tensors.
MAX_METADATA = 512 << 20
# Reading an item takes about a millisecond. Where some are left out, the safety verdict has to be "unknown".
MAX_ITEMS = 20_000
# torch allows 64. A million dimensions of 2**62 would take hours to multiply out.
MAX_DIMENSIONS = 64


def matches(listing: Listing) -> bool:
    """Whether a folder has the metadata, or files of ranks."""
    return any(name == METADATA or name.endswith(".distcp") for name in listing.files)


def folder_of_rank(path: str) -> str:
    """The folder of a rank's file, which is a sequence of archives that the metadata describes; else empty."""
    folder, name = os.path.split(path)
    return (folder or ".") if name.endswith(".distcp") and os.path.exists(os.path.join(folder, METADATA)) else ""


def read(merger: Merger) -> Checkpoint:
    """Read such a folder, and the state of Lightning's trainer beside it."""
    merger.format = "dcp"
    merge_items(merger)
    if "meta.pt" in merger.listing.files:  # Lightning's sharded form
        merger.read("meta.pt", "trainer state", steps=("meta.pt",), required=False)
        merger.flavour = "Lightning"
    return merger.merged()


def merge_items(merger: Merger) -> None:
    """Merge what ``.metadata`` lists."""
    folder, prefix, files = merger.listing.folder, merger.listing.prefix, merger.listing.files
    ranks = [name for name in files if name.endswith(".distcp")]
    merger.parts += [Part(prefix + name, "rank file", files[name]) for name in ranks]
    merger.facts.append(("rank files", f"{len(ranks):,}"))
    size = files.get(METADATA)
    if size is None:
        left = [name for name in files if name.endswith((".metadata", ".metadata.tmp"))]
        detail = f"only {join_names(left)} is there" if left else "it is written last, when every rank is done"
        merger.note("dcp-metadata-missing", detail, METADATA)
        return
    if size > MAX_METADATA:
        merger.note("dcp-metadata-too-large", f"{size:,} bytes; the limit is {MAX_METADATA:,}", METADATA)
        return
    data = b""
    try:
        with closing(folder.open(prefix + METADATA)) as source:
            data = source.read(0, source.size)
    except CannotReadError as error:
        merger.note("part-unreadable", error.what, METADATA)
    pickle = run(data, name=prefix + METADATA)
    pickle.main = True
    merger.pickles.append(pickle)
    merger.parts.append(Part(prefix + METADATA, "index", size, role="index"))
    merger.noted.extend(pickle_problems(pickle, len(data)))
    fields = _state(pickle.root, "Metadata")
    if not fields and not pickle.broken:
        merger.note("dcp-metadata-invalid", "it is a pickle, but not of the metadata of a checkpoint", METADATA)
    if not fields:
        return
    merger.checksummed = False  # nothing protects the names and places of all tensors
    # The items of each file: archives, each with a piece of a tensor or with an object. An entry is the item's name,
    # the position of the piece in its tensor, its offset and length in the file, and whether it is transformed. A path
    # that leads out of the directory is never opened.
    items: dict[str, list[tuple[str, tuple[int, ...], int, int, bool]]] = {}
    count = 0
    listed: set[str] = set()
    incomplete: list[str] = []
    for key, value in _pairs(fields.get("storage_data")):
        index, info = _state(key, "MetadataIndex"), _state(value, "StorageInfo")
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        file, fqn = relative_path(path), index.get("fqn")
        if path is None or not isinstance(fqn, str):
            incomplete.append(short(fqn)[:200])
        elif not file:
            merger.note("dcp-path-outside", f"{short(path)[:200]!r} was not opened", METADATA)
        elif type(offset) is int and type(length) is int and min(offset, length) >= 0:
            listed.add(fqn)
            count += 1
            if count <= MAX_ITEMS:
                at = _size(index.get("offset")) or ()
                item = (fqn, at, offset, length, bool(info.get("transform_descriptors")))
                items.setdefault(file, []).append(item)
    if count > MAX_ITEMS:
        merger.note("dcp-items-unread", f"{count - MAX_ITEMS:,} of {count:,}", METADATA)
    # The tensors found in the items: by name, then by their position in the whole tensor.
    pieces: dict[str, dict[tuple[int, ...], list[Tensor]]] = {}
    for file, file_items in sorted(items.items()):
        try:
            source = folder.open(prefix + file)
        except CannotReadError as error:
            names = join_names([fqn for fqn, *_ in file_items], 3)
            merger.note("dcp-file-missing", f"{error.what}; {len(file_items):,} entries need it: {names}", file)
            merger.add_missing(file, "rank file")
            continue
        with closing(source):
            cut = [fqn for fqn, _, offset, length, _ in file_items if offset + length > source.size]
            if cut:
                detail = f"it ends at byte {source.size:,}, before {len(cut):,} of its entries do: {join_names(cut, 3)}"
                merger.note("dcp-file-cut", detail, file)
            present = sum(max(0, min(length, source.size - offset)) for _, _, offset, length, _ in file_items)
            if present > source.size:
                # Verifying a thousand entries for the same gigabyte would read a terabyte.
                merger.note("dcp-items-overlap", f"{len(file_items):,} entries together are longer than the file", file)
                continue
            opaque: list[str] = []
            part = prefix + file
            for fqn, at, offset, length, transformed in file_items:
                if transformed or looks_like_safetensors(Slice(source, offset, source.size, "")):
                    opaque.append(fqn)
                elif offset < source.size:
                    checkpoint = merger.read_item(Slice(source, offset, length, f"{part} › {fqn}"))
                    # Two items of one file may both call their storage "0".
                    tensors = merger.merge(part, checkpoint, steps=(fqn,), shift=offset, label=f"{part}@{offset}")
                    pieces.setdefault(fqn, {})[at] = tensors
            if opaque:
                merger.note("dcp-transformed", f"{len(opaque):,} entries: {join_names(opaque, 3)}", file)
    # Assemble tensors from their pieces, under their own names; what is not a tensor stays as it was read.
    whole: list[Tensor] = []
    entries = {name: value for name, value in _pairs(fields.get("state_dict_metadata")) if type(name) is str}
    incomplete += sorted(listed - entries.keys())
    objects = 0
    for name, entry in entries.items():
        tensor_pieces = pieces.get(name, {})
        tensor = _assembled(name, _state(entry, "TensorStorageMetadata"), tensor_pieces, merger.noted)
        whole += [tensor] if tensor else [tensor for tensors in tensor_pieces.values() for tensor in tensors]
        objects += tensor is None
        if tensor is None and not (name in listed and _is_a(entry, "BytesStorageMetadata")):
            incomplete.append(name)
    if incomplete:
        detail = f"{len(incomplete):,} entries lack a description or a place: {join_names(incomplete, 3)}"
        merger.note("dcp-metadata-invalid", detail, METADATA)
    elif not entries and any(files[name] for name in ranks):
        merger.note("dcp-metadata-invalid", "it lists nothing, but the files of the ranks are not empty", METADATA)
    merger.tensors = whole
    count_words = f"{plural(len(entries) - objects, 'tensor')}, {plural(objects, 'other object')}"
    merger.facts.append(("entries", count_words))
    version = fields.get("version")
    if isinstance(version, str):
        merger.facts.append(("metadata version", version))


def _is_a(node: object, kind: str) -> TypeGuard[Call]:
    """Whether a node is an object of a class whose name ends in ``kind``: Megatron has its own ``MCoreMetadata``."""
    return isinstance(node, Call) and isinstance(node.callee, Global) and node.callee.name.endswith(kind)


def _state(node: object, kind: str) -> dict[str, object]:
    """The attributes that a pickled object of a class gets: its last BUILD argument, if that is a dictionary."""
    if _is_a(node, kind) and node.states:
        return {key: value for key, value in _pairs(node.states[-1]) if isinstance(key, str)}
    return {}


def _pairs(node: object) -> list[tuple[object, object]]:
    return node.pairs() if isinstance(node, Dict) else []


def _size(node: object) -> tuple[int, ...] | None:
    """A ``torch.Size``, which pickles as a call with a tuple."""
    if _is_a(node, "Size") and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, tuple | list) or len(node) > MAX_DIMENSIONS:
        return None
    return tuple(node) if all(type(size) is int and 0 <= size < 1 << 63 for size in node) else None


def _assembled(
    name: str, fields: dict[str, object], pieces: dict[tuple[int, ...], list[Tensor]], noted: LimitedProblems
) -> Tensor | None:
    """A tensor that ``.metadata`` describes: its only piece under the name of the tensor, or all pieces as parts."""
    shape, raw = _size(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(raw, list):
        return None
    # ``TensorProperties`` pickles as a tuple that begins with the dtype; in old releases that is an attribute.
    properties = fields.get("properties")
    state = properties.states[-1] if _is_a(properties, "TensorProperties") and properties.states else None
    first = state[0] if isinstance(state, tuple) and state else _state(properties, "TensorProperties").get("dtype")
    dtype = first.name if isinstance(first, Global) and first.module == "torch" else "unknown"
    parts: list[Tensor] = []
    count = numel = 0
    for chunk in (_state(entry, "ChunkStorageMetadata") for entry in raw):
        at, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if at is None or sizes is None:
            continue
        count, numel = count + 1, numel + prod(sizes)
        for part in pieces.get(at, ())[:1]:
            parts.append(part._replace(path=(name, *at), start=at))
            if (part.dtype, part.shape) != (dtype, sizes):
                detail = f"{part.dtype} {list(part.shape)} where .metadata says {dtype} {list(sizes)}"
                noted.add("dcp-piece-mismatch", name, detail)
    if len(parts) < count or numel < prod(shape):
        noted.add("dcp-piece-missing", name, f"{len(parts):,} of {count:,} pieces were found")
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]._replace(path=(name,), name=name, start=None)
    return Tensor((name,), name, dtype, shape, contiguous(shape), "cpu", None, kind="sharded", parts=tuple(parts))
