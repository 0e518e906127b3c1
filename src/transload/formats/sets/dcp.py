"""``torch.distributed.checkpoint``: a pickled object, ``.metadata``, says which bytes of which file are a tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from math import prod
from typing import Any, TypeGuard

from transload.checkpoint import Checkpoint, Key, Part, Tensor, Value
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, join_names
from transload.formats.graph import call_items, last_pairs
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
# A path of a million steps would take as long to make for each of a million entries.
MAX_LEVELS = 100


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
        merge_beside(merger, "meta.pt", "trainer state")
        merger.flavour = "Lightning"
    return merger.merged()


def merge_beside(merger: Merger, name: str, kind: str) -> None:
    """Merge a file whose dictionary complements the object, and replaces what has the same key."""
    checkpoint = merger.read(name, kind, required=False)
    root = checkpoint.root if checkpoint else None
    pairs = last_pairs(call_items(root) if type(root) is Call else root.items if type(root) is Dict else [])
    file = merger.listing.prefix + name
    added = [Value((key,), node, file, len(merger.tensors)) for node, key, _ in pairs if type(key) in (str, int)]
    keys = {value.path[0] for value in added}
    merger.values = [*(value for value in merger.values if value.path[0] not in keys), *added]


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
    entries = {name: value for name, value in _pairs(fields.get("state_dict_metadata")) if type(name) is str}
    paths = _paths(fields.get("planner_data"), entries)
    # The tensors found in the items: by name, then by their position in the whole tensor.
    pieces: dict[str, dict[tuple[int, ...], list[Tensor]]] = {}
    nodes: dict[str, Value] = {}
    for file, file_items in sorted(items.items()):
        try:
            source = merger.open_file(prefix + file)
        except CannotReadError as error:
            names = join_names([fqn for fqn, *_ in file_items], 3)
            merger.note("dcp-file-missing", f"{error.what}; {len(file_items):,} entries need it: {names}", file)
            merger.add_missing(file, "rank file")
            continue
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
                archive = Slice(source, offset, length, f"{part} › {fqn}")
                checkpoint = merger.read_item(archive)
                # Two items of one file may both call their storage "0".
                tensors = merger.merge(
                    part,
                    checkpoint,
                    steps=paths.get(fqn, (fqn,)),
                    shift=offset,
                    label=f"{part}@{offset}",
                    named=(fqn,),
                )
                pieces.setdefault(fqn, {})[at] = tensors
                if any(pickle.main and not pickle.broken for pickle in checkpoint.pickles):
                    nodes[fqn] = Value(paths.get(fqn, (fqn,)), checkpoint.root, archive.name)
        if opaque:
            merger.note("dcp-transformed", f"{len(opaque):,} entries: {join_names(opaque, 3)}", file)
    # Assemble tensors from their pieces, under their own names; what is not a tensor stays as it was read.
    whole: list[Tensor] = []
    incomplete += sorted(listed - entries.keys())
    objects = 0
    for name, entry in entries.items():
        tensor_pieces = pieces.get(name, {})
        path = paths.get(name, (name,))
        tensor = _assembled(name, path, _state(entry, "TensorStorageMetadata"), tensor_pieces, merger.noted)
        if tensor is None and name in nodes:
            merger.values.append(nodes[name]._replace(position=len(whole)))
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


def _paths(planned: object, names: Iterable[str]) -> dict[str, tuple[Key, ...]]:
    """The path of each entry in the object that was saved; the name of one without a path is a key of the object.

    The name ``optim.param_groups.0.lr`` stands for ``("optim", "param_groups", 0, "lr")``.
    """
    pairs: list[Any] = _pairs(planned)
    paths: dict[str, tuple[Key, ...]] = {name: path for name, path in pairs if _joins_to(name, path)}
    taken = {paths.get(name, (name,)) for name in names}
    inside = any(path[:length] in taken for path in taken for length in range(1, len(path)))
    return {} if inside else paths  # no entry can be inside another


def _joins_to(name: Any, path: Any) -> bool:
    """Whether a path is one that DCP flattens to this name; a hostile one may be endless."""
    if type(name) is not str or type(path) is not tuple or not 0 < len(path) <= MAX_LEVELS or type(path[0]) is not str:
        return False
    if not all(type(step) is str or (type(step) is int and 0 <= step < 1 << 63) for step in path):
        return False
    steps = [str(step) for step in path]
    return sum(map(len, steps)) < len(name) + 1 and ".".join(steps) == name


def _assembled(
    name: str,
    path: tuple[Key, ...],
    fields: dict[str, object],
    pieces: dict[tuple[int, ...], list[Tensor]],
    noted: LimitedProblems,
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
            parts.append(part._replace(path=(*path, *at), start=at))
            if (part.dtype, part.shape) != (dtype, sizes):
                detail = f"{part.dtype} {list(part.shape)} where .metadata says {dtype} {list(sizes)}"
                noted.add("dcp-piece-mismatch", name, detail)
    if len(parts) < count or numel < prod(shape):
        noted.add("dcp-piece-missing", name, f"{len(parts):,} of {count:,} pieces were found")
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]._replace(path=path, name=name, start=None)
    return Tensor(path, name, dtype, shape, contiguous(shape), "cpu", None, kind="sharded", parts=tuple(parts))
