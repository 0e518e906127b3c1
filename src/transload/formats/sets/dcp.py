"""``torch.distributed.checkpoint``: a pickled object, ``.metadata``, says which bytes of which file are a tensor.

These bytes are an item: an archive of ``torch.save`` with one piece of a tensor, or with an object. Objects are always
read; the items of tensors only if there are few of them, or if each must be: see ``Storage.item``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import reduce
from glob import escape, glob
from itertools import accumulate
from math import prod
from typing import Any, TypeGuard

from transload.checkpoint import Checkpoint, Key, Leaf, Part, Storage, Tensor, Value
from transload.contents import Item
from transload.dtypes import itemsize
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, join_names
from transload.formats.graph import call_items, last_pairs
from transload.formats.nested import item_source, moved_tensor, why_packed
from transload.formats.pieces import size_of
from transload.formats.safetensors import looks_like_safetensors
from transload.formats.sets.merger import Merger, listed
from transload.formats.sets.pieces import assembled, lost_words, overlap_words
from transload.frozen import NamedTuple
from transload.geometry import contiguous
from transload.io.folder import MAX_MEMBERS, Listing, relative_path
from transload.io.sources import Slice, Source, is_url, refuse_fault
from transload.nodes import Call, Dict, Global, short
from transload.render.words import plural

METADATA = ".metadata"
# With ``use_collectives=False``, every rank writes one for its own pieces.
_RANK = re.compile(r"__(\d{1,6})_\d+\.distcp")
RANK_METADATA = re.compile(r"__(\d{1,6})\.metadata")
# Opening an item takes up to a millisecond. If there are more, those of tensors are opened when they are read.
FEW_ITEMS = 1_000
_ITEM_END = 2 << 10  # has the directory of the archive of a tensor; or its index
# Those that are not plain arrays are opened at once. A hostile index can say so of a million.
_MAX_ODD = 1_000
# A path of a million steps would take as long to make for each of a million entries.
MAX_LEVELS = 100
# The bytes of an index that describe a piece: at least so many. Tensors that share a long list would have more pieces.
_MIN_PIECE = 20
# Items that several ranks have are compared as far as this number of bytes at their ends tells.
_MAX_COMPARED = 1 << 14

_END = 22  # bytes of the last record of an archive

_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d{1,6})?")
_At = tuple[int, ...]


class _Place(NamedTuple):
    """Where an item is. ``at`` is the position of the piece in its tensor, empty for an object."""

    name: str
    at: _At
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class _Described(NamedTuple):
    """What an index says of a tensor: the position and the sizes of each piece.

    It is ``dense`` if it is neither sparse nor quantized.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[_At, tuple[int, ...]]
    dense: bool


def matches(listing: Listing) -> bool:
    """Whether a folder has the metadata, or files of ranks; or folders of accelerate that do."""
    return any(name == METADATA or name.endswith(".distcp") for name in listing.files) or bool(_inner_folders(listing))


def _inner_folders(listing: Listing) -> list[str]:
    """The folders of models and optimizers that accelerate and the Trainer of transformers save."""
    folders = [name for name in listing.folders if _ACCELERATE.fullmatch(name)]
    inner = {name: listed(listing.folder, listing.prefix + name, LimitedProblems()).files for name in folders}
    return [name for name, files in inner.items() if any(file.endswith((METADATA, ".distcp")) for file in files)]


def folder_of_rank(path: str) -> str:
    """The folder of a rank's file, or of the metadata, neither of which says anything by itself; else empty."""
    folder, name = os.path.split(path)
    if name.endswith(METADATA):
        return (folder or ".") if glob(os.path.join(escape(folder), "*.distcp")) else ""
    if not name.endswith(".distcp"):
        return ""
    here = os.path.exists(os.path.join(folder, METADATA)) or os.path.exists(os.path.join(folder, "__0.metadata"))
    if is_url(path):
        folder += "/"
    return (folder or ".") if here or _RANK.fullmatch(name) else ""


def names_at(checkpoint: Checkpoint, place: str) -> list[str]:
    """The entries whose item is at a place, ``FILE@OFFSET``; each after the folder of the file, as in problems."""
    folder, slash, item = place.rpartition("/")
    file, _, at = item.rpartition("@")
    if not at.isdecimal():
        return []
    wanted, names = (file, int(at)), []
    for pickle in checkpoint.pickles:
        for key, value in _pairs(_state(pickle.root, "Metadata").get("storage_data")):
            info, name = _state(value, "StorageInfo"), _state(key, "MetadataIndex").get("fqn")
            if (info.get("relative_path"), info.get("offset")) == wanted and type(name) is str:
                names.append(f"{folder}{slash}{name}")
    return names


def read(merger: Merger) -> Checkpoint:
    """Read such a folder, and the state of Lightning's trainer beside it."""
    merger.format = "dcp"
    if folders := _inner_folders(merger.listing):
        merger.flavour = "accelerate"
        _merge_folders(merger, folders)
        return merger.merged()
    merge_items(merger)
    if '"torch_dist"' in merger.listing.text("metadata.json"):
        merger.flavour = "Megatron"
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


def _merge_folders(merger: Merger, folders: list[str]) -> None:
    """Merge several directories: each has a key of the object for itself, unless there is more than one of its kind."""
    top = merger.listing
    kinds = [name.rstrip("_0123456789") for name in folders]
    for name, kind in zip(folders, kinds, strict=True):
        tensors, values, leaves = len(merger.tensors), len(merger.values), len(merger.leaves)
        merger.listing = listed(top.folder, top.prefix + name, merger.noted, MAX_MEMBERS)
        merge_items(merger)
        if kinds.count(kind) > 1:
            merger.tensors[tensors:] = [moved_tensor(each, "", (name,)) for each in merger.tensors[tensors:]]
            merger.values[values:] = [each._replace(path=(name, *each.path)) for each in merger.values[values:]]
            merger.leaves[leaves:] = [
                Leaf((name, *leaf.path), f"{name}/{leaf.name}", leaf.kind, leaf.text) for leaf in merger.leaves[leaves:]
            ]
    merger.listing = top


def merge_items(merger: Merger) -> None:
    """Merge what the index lists."""
    before = len(merger.tensors)
    prefix, files = merger.listing.prefix, merger.listing.files
    ranks = [name for name in files if name.endswith(".distcp")]
    part, fact = len(merger.parts), len(merger.facts)
    merger.parts += [Part(prefix + name, "rank file", files[name]) for name in ranks]
    merger.facts.append(("rank files", f"{len(ranks):,}"))
    indexes = [METADATA] if METADATA in files else _rank_indexes(merger)
    if not indexes:
        left = [name for name in files if name.endswith((".metadata", ".metadata.tmp"))]
        detail = f"only {join_names(left)} is there" if left else "it is written last, when every rank is done"
        merger.note("dcp-metadata-missing", detail, METADATA)
        return
    tables = {name: fields for name in indexes if (fields := _read_index(merger, name))}
    if not tables:
        return
    merger.checksummed = False  # nothing protects the names and places of all tensors
    entries, incomplete = _entries(merger, tables)
    planned = [pair for fields in tables.values() for pair in _pairs(fields.get("planner_data"))]
    paths = _paths(planned, entries)
    items = _Items(merger, entries, paths)
    for name, fields in tables.items():
        incomplete += items.add(_pairs(fields.get("storage_data")), name)
    items.merge()
    # A web server does not list its folders: what is there are the files that the index names.
    if others := sorted(items.sources.keys() - files.keys()):
        merger.parts[part:part] = [Part(prefix + name, "rank file", items.sources[name].size) for name in others]
        merger.facts[fact] = "rank files", f"{len(ranks) + len(others):,}"
    # Assemble tensors from their pieces, under their own names; what is not a tensor stays as it was read.
    whole: list[Tensor] = []
    incomplete += sorted(items.listed - entries.keys())
    for name, described in entries.items():
        if described is not None:
            whole.append(_assembled(merger, name, paths.get(name, (name,)), described, items))
            continue
        if name in items.values:
            merger.values.append(items.values[name]._replace(position=before + len(whole)))
        elif name in items.listed and name not in items.opaque:
            merger.note("dcp-object-missing", "no file has it", name)
        whole += items.inside.get(name, ())
        if name not in items.listed:
            incomplete.append(name)
    if incomplete:
        detail = f"{len(incomplete):,} entries lack a description or a place: {join_names(incomplete, 3)}"
        merger.note("dcp-metadata-invalid", detail, indexes[0])
    elif not entries and any(files[name] for name in ranks):
        merger.note("dcp-metadata-invalid", "it lists nothing, but the files of the ranks are not empty", indexes[0])
    merger.tensors[before:] = whole
    objects = sum(described is None for described in entries.values())
    count_words = f"{plural(len(entries) - objects, 'tensor')}, {plural(objects, 'other object')}"
    merger.facts.append(("entries", count_words))
    version = next(iter(tables.values())).get("version")
    if isinstance(version, str):
        merger.facts.append(("metadata version", version))


# -- indexes


def _rank_indexes(merger: Merger) -> list[str]:
    """The indexes of all ranks, in order; notes those that are missing."""
    numbered = {int(match[1]): match[0] for name in merger.listing.files if (match := RANK_METADATA.fullmatch(name))}
    if not numbered:
        return []
    ranks = {int(match[1]) for name in merger.listing.files if (match := _RANK.fullmatch(name))}
    most = max(*numbered, *ranks, 0) + 1
    missing = [f"__{rank}{METADATA}" for rank in range(most) if rank not in numbered]
    if missing:
        merger.note("rank-missing", f"{len(missing):,} of {most:,} ranks: {join_names(missing)}")
    merger.facts.append(("indexes", f"one for each of {plural(len(numbered), 'rank')}"))
    return [numbered[rank] for rank in sorted(numbered)]


def _read_index(merger: Merger, name: str) -> dict[str, object]:
    """The attributes of the ``Metadata`` in an index; empty if it is not one."""
    pickle = merger.read_index(name)
    fields = _state(pickle.root, "Metadata") if pickle else {}
    if pickle and not fields and not pickle.broken:
        merger.note("dcp-metadata-invalid", "it is a pickle, but not of the metadata of a checkpoint", name)
    return fields


def _entries(merger: Merger, tables: dict[str, dict[str, object]]) -> tuple[dict[str, _Described | None], list[str]]:
    """What the indexes describe, by name, ``None`` for an object; and the names that they describe in no known way."""
    entries: dict[str, _Described | None] = {}
    owners: dict[str, str] = {}
    unknown: list[str] = []
    sizes = _Sizes()
    room = sum(merger.listing.files[name] for name in tables)
    for index, fields in tables.items():
        for name, node in _pairs(fields.get("state_dict_metadata")):
            if type(name) is not str:
                continue
            described = _described(_state(node, "TensorStorageMetadata"), sizes)
            room -= len(described.chunks) * _MIN_PIECE if described else 0
            if room < 0:
                merger.note("dcp-metadata-invalid", "several tensors have the same list of pieces", index)
                return entries, unknown
            before = entries.get(name)
            if described is None and not _is_a(node, "BytesStorageMetadata"):
                unknown.append(name)
            if name in entries and (before is None) != (described is None):
                kinds = ["an object" if each is None else "a tensor" for each in (before, described)]
                merger.noted.add("dcp-piece-mismatch", name, f"{kinds[0]} in {owners[name]}, {kinds[1]} in {index}")
                continue
            if before is not None and described is not None:
                if before[:2] != described[:2]:  # two runs, or two steps
                    what = f"{described.dtype} {list(described.shape)} in {index}, {before.dtype} {list(before.shape)}"
                    merger.note("dcp-piece-mismatch", f"{what} in that of another rank", name)
                    continue
                before.chunks.update(described.chunks)
                continue
            if name not in entries:
                entries[name], owners[name] = described, index
    return entries, unknown


def _described(fields: dict[str, object], sizes: _Sizes) -> _Described | None:
    shape, raw = sizes.of(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(raw, list):
        return None
    # ``TensorProperties`` pickles as a tuple that begins with dtype and layout; in old releases these are attributes.
    properties = fields.get("properties")
    state = properties.states[-1] if _is_a(properties, "TensorProperties") and properties.states else None
    old = _state(properties, "TensorProperties")
    first, second = (*state, None)[:2] if type(state) is tuple and state else (old.get("dtype"), old.get("layout"))
    dtype = first.name if isinstance(first, Global) and first.module == "torch" else "unknown"
    sparse = type(second) is Call and type(second.args) is tuple and str(second.args[:1]).startswith("('torch.sparse_")
    chunks: dict[_At, tuple[int, ...]] = {}
    for entry in raw:
        chunk = _state(entry, "ChunkStorageMetadata")
        at, box = sizes.of(chunk.get("offsets")), sizes.of(chunk.get("sizes"))
        if at is not None and box is not None and len(at) == len(box) == len(shape):
            chunks[at] = box
    return _Described(dtype, shape, chunks, not sparse and not dtype.startswith("q"))


def _is_a(node: object, kind: str) -> TypeGuard[Call]:
    """Whether a node is an object of a class whose name ends in ``kind``: Megatron has its own ``MCoreMetadata``."""
    return type(node) is Call and type(node.callee) is Global and node.callee.name.endswith(kind)


def _state(node: object, kind: str) -> dict[str, object]:
    """The attributes that a pickled object of a class gets: its last BUILD argument, if that is a dictionary."""
    if _is_a(node, kind) and node.states:
        state = node.states[-1]
        items = state.items if type(state) is Dict else []
        names = items[::2]
        if {str}.issuperset(map(type, names)):
            return dict(zip(names, items[1::2], strict=False))  # type: ignore[arg-type]
        return {key: value for key, value in zip(names, items[1::2], strict=False) if type(key) is str}
    return {}


class _Sizes:
    """The numbers of each ``torch.Size``. In a large index many have the same tuple, which is checked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def of(self, node: object) -> tuple[int, ...] | None:
        if type(node) is not Call:
            return size_of(node)
        key = id(node.callee), id(node.args)  # the graph keeps them alive
        if key not in self._known:
            self._known[key] = size_of(node)
        return self._known[key]


def _pairs(node: object) -> list[tuple[object, object]]:
    return node.pairs() if isinstance(node, Dict) else []


def _paths(planned: Iterable[tuple[Any, Any]], names: Iterable[str]) -> dict[str, tuple[Key, ...]]:
    """The path of each entry in the object that was saved; the name of one without a path is a key of the object.

    The name ``optim.param_groups.0.lr`` stands for ``("optim", "param_groups", 0, "lr")``.
    """
    last = {name: path for name, path in planned if type(name) is str}  # a hostile index may repeat a long one
    paths: dict[str, tuple[Key, ...]] = {name: path for name, path in last.items() if _joins_to(name, path)}
    # No entry can be inside another. Slices of a path of a hundred steps would have five thousand.
    taken = {paths.get(name, (name,)) for name in names}
    ends = {reduce(_hash, path, 0): path for path in taken}
    for path in taken:
        for end in accumulate(path[:-1], _hash, initial=0):
            if end in ends and path[: len(ends[end])] == ends[end]:
                return {}
    return paths


def _hash(before: int, step: Key) -> int:
    return hash((before, step))


def _joins_to(name: str, path: Any) -> bool:
    """Whether a path is one that DCP flattens to this name; a hostile one may be endless."""
    if type(path) is not tuple or not 0 < len(path) <= min(MAX_LEVELS, len(name) + 1) or type(path[0]) is not str:
        return False
    if not all(type(step) is str or (type(step) is int and 0 <= step < 1 << 63) for step in path):
        return False
    steps = [str(step) for step in path]
    return sum(map(len, steps)) < len(name) + 1 and ".".join(steps) == name


# -- items


class _Items:
    """The items that indexes list: opened, or only placed.

    ``pieces`` are those of tensors, by name and position; ``values`` the objects, and ``inside`` the tensors in them.
    ``opaque`` are the names of those that cannot be decompressed here. ``sources`` are the files that were opened.
    """

    def __init__(
        self, merger: Merger, entries: dict[str, _Described | None], paths: dict[str, tuple[Key, ...]]
    ) -> None:
        self._merger, self._entries, self._paths = merger, entries, paths
        self._places: dict[tuple[str, _At], _Place] = {}
        self._copies: list[tuple[_Place, _Place]] = []
        self._sizes = _Sizes()
        self._layouts: dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        self._odd = 0
        self.listed: set[str] = set()
        self.opaque: set[str] = set()
        self.pieces: dict[str, dict[_At, Tensor]] = {}
        self.inside: dict[str, list[Tensor]] = {}
        self.values: dict[str, Value] = {}
        self.sources: dict[str, Source] = {}

    def add(self, pairs: Iterable[tuple[object, object]], index: str) -> list[str]:
        """Add the places in an index; return the names of entries without a place.

        What several ranks have is listed once. A path that leads out of the directory is never opened.
        """
        merger, incomplete = self._merger, []
        files: dict[object, str] = {}
        for key, value in pairs:
            position, info = _state(key, "MetadataIndex"), _state(value, "StorageInfo")
            path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
            name = position.get("fqn")
            file = files.get(path) if type(path) is str else ""
            if file is None:
                file = files[path] = relative_path(path)
            if path is None or not isinstance(name, str):
                incomplete.append(short(name)[:200])
            elif not file:
                merger.note("dcp-path-outside", f"{short(path)[:200]!r} was not opened", index)
            elif type(offset) is int and type(length) is int and offset >= 0 and length >= 0:
                self.listed.add(name)
                raw = info.get("transform_descriptors")
                transforms = tuple(str(each)[:80] for each in raw) if isinstance(raw, list | tuple) else ()
                at = self._sizes.of(position.get("offset")) or ()
                place = _Place(name, at, file, offset, length, transforms)
                first = self._places.setdefault((name, at), place)
                if first is not place:
                    self._copies.append((first, place))
        return incomplete

    def merge(self) -> None:
        """Merge the items of each file."""
        merger, prefix = self._merger, self._merger.listing.prefix
        by_file: dict[str, list[_Place]] = {}
        for place in self._places.values():
            by_file.setdefault(place.file, []).append(place)
        tensors = sum(self._entries.get(place.name) is not None for place in self._places.values())
        opens = tensors <= FEW_ITEMS or not merger.lazy
        merger.listing.folder.prepare([prefix + file for file in sorted(by_file)])
        for file, places in sorted(by_file.items()):
            try:
                source = self.sources[file] = merger.open_file(prefix + file)
            except CannotReadError as error:
                refuse_fault(error, merger.listing.folder.name)
                names = join_names([place.name for place in places], 3)
                merger.note("dcp-file-missing", f"{error.what}; {len(places):,} entries need it: {names}", file)
                merger.add_missing(file, "rank file")
                continue
            self._merge_file(source, prefix + file, places, opens=opens)
        if not opens:
            merger.note("dcp-items-unread", f"{tensors:,} pieces of tensors; objects and the index were read")
        differ: dict[str, list[str]] = {}
        for first, other in self._copies[:FEW_ITEMS] if merger.lazy else self._copies:
            if first.file in self.sources and self._differ(first, other):
                kind = "objects" if self._entries.get(first.name) is None else "pieces of tensors"
                differ.setdefault(kind, []).append(f"{first.name} in {first.file} and {other.file}")
        for kind, found in differ.items():
            merger.note("dcp-objects-differ", f"{len(found):,} {kind}: {join_names(found, 3)}")

    def _differ(self, first: _Place, other: _Place) -> bool:
        """Whether two ranks have saved different items under one name, as far as their ends tell.

        The last bytes of an archive are its directory, with the checksums of all records.
        """
        if other.file not in self.sources:
            try:
                self.sources[other.file] = self._merger.open_file(self._merger.listing.prefix + other.file)
            except CannotReadError as error:
                refuse_fault(error, self._merger.listing.folder.name)
                return False
        ends = []
        for place in (first, other):
            size = min(place.length, _MAX_COMPARED)
            ends.append(self.sources[place.file].read(place.offset + place.length - size, size))
        return first.length != other.length or ends[0] != ends[1]

    def _merge_file(self, source: Source, part: str, places: list[_Place], *, opens: bool) -> None:
        merger, size = self._merger, source.size
        file = part.removeprefix(merger.listing.prefix)
        objects = [place for place in places if self._entries.get(place.name) is None]
        # A file of the format safetensors follows its objects; all its tensors are said to be at its beginning.
        after = max((place.offset + place.length for place in objects), default=0)
        header = Slice(source, after, size, part)
        if len(objects) < len(places) and looks_like_safetensors(header):
            checkpoint = merger.read_item(header)
            named = {tensor.name: tensor for tensor in merger.merge(part, checkpoint, shift=after)}
            for place in places:
                if place.name in named and self._entries.get(place.name) is not None:
                    self.pieces.setdefault(place.name, {})[place.at] = named[place.name]
            places = objects
        if lost := _misplaced(source, places):
            detail = (
                f"it is of another save: {join_names([place.name for place in lost], 3)} is not where .metadata says"
            )
            merger.note("dcp-piece-mismatch", detail, file)
            return
        cut = [place.name for place in places if place.offset + place.length > size]
        if cut:
            detail = f"it ends at byte {size:,}, before {len(cut):,} of its entries do: {join_names(cut, 3)}"
            merger.note("dcp-file-cut", detail, file)
        if sum([max(0, min(place.length, size - place.offset)) for place in places]) > size:
            # Verifying a thousand entries for the same gigabyte would read a terabyte.
            merger.note("dcp-items-overlap", f"{len(places):,} entries together are longer than the file", file)
            return
        opaque: dict[str, list[str]] = {}
        if source.far:  # an item is an archive: its directory is at its end, its index at its beginning
            items = [place for place in places if opens or self._entries.get(place.name) is None]
            ends = [(place.offset + max(0, place.length - _ITEM_END), _ITEM_END) for place in items]
            source.prepare([*((place.offset, _ITEM_END) for place in items), *ends])
        for place in places:
            described = self._entries.get(place.name)
            if place.transforms and (why := why_packed(", ".join(place.transforms))):
                opaque.setdefault(why, []).append(place.name)
            if described is not None and (place.transforms or not opens) and self._place(part, place, described, size):
                continue
            if place.offset < size:
                try:
                    self._open(source, part, place)
                except EOFError as error:
                    merger.note("part-unreadable", f"{place.name}: {error}", file)
                except ImportError:  # noted above
                    continue
        for why, names in opaque.items():
            self.opaque.update(names)
            merger.note("dcp-transformed", f"{why}: {len(names):,} entries: {join_names(names, 3)}", file)

    def _place(self, part: str, place: _Place, described: _Described, size: int) -> bool:
        """List a piece of a tensor whose item is opened when it is read; false if it must be opened now.

        That is one that is not a plain array: it is sparse or quantized, or too short, as on the meta device.
        """
        name, at, _, offset, length, transforms = place
        dtype, _, chunks, dense = described
        sizes = chunks.get(at)
        if sizes is None:
            return True
        layout = self._layouts.get((dtype, sizes))
        if layout is None:
            layout = self._layouts[dtype, sizes] = itemsize(dtype, prod(sizes)), contiguous(sizes)
        nbytes, stride = layout
        if not transforms and (length < nbytes or not dense) and self._odd < _MAX_ODD:
            self._odd += 1
            return False
        storage = f"{part}@{offset}:0"
        stored = nbytes if offset + length <= size else 0
        item = Item(offset, length, ", ".join(transforms))
        self._merger.storages.append(
            Storage(storage, "0", "cpu", dtype, nbytes, stored, None, "", part, tensors=(name,), item=item)
        )
        self.pieces.setdefault(name, {})[at] = Tensor((), name, dtype, sizes, stride, "cpu", storage)
        return True

    def _open(self, source: Source, part: str, place: _Place) -> None:
        """Read and merge an item."""
        name, at, merger = place.name, place.at, self._merger
        item = Item(place.offset, place.length, ", ".join(place.transforms))
        checkpoint = merger.read_item(item_source(source, item, f"{part} › {name}"))
        path = self._paths.get(name, (name,))
        label = f"{part}@{place.offset}"  # two items of one file may both call their storage "0"
        found = merger.merge(part, checkpoint, steps=path, shift=place.offset, label=label, named=(name,))
        if item.packed and checkpoint.storages:
            packed = merger.storages[-len(checkpoint.storages) :]
            merger.storages[-len(packed) :] = [storage._replace(offset=None, item=item) for storage in packed]
        if self._entries.get(name) is not None:
            for tensor in found:
                if tensor.path == path:  # the item is a tensor, and not an object that has one
                    self.pieces.setdefault(name, {})[at] = tensor
            return
        self.inside.setdefault(name, []).extend(found)
        if any(pickle.main and not pickle.broken for pickle in checkpoint.pickles):
            self.values[name] = Value(path, checkpoint.root, f"{part} › {name}")


def _misplaced(source: Source, places: list[_Place]) -> list[_Place]:
    """The items of a file that are no archives, if the file is of another save: it has another size, too.

    That of this save ends where its last item does, unless it is cut off; then items before that are intact.
    """
    size = source.size
    inside = [place for place in places if place.offset + place.length <= size and not place.transforms]
    if not inside or size == max(place.offset + place.length for place in places):
        return []
    lost = []
    for place in sorted(inside):
        begin, end = source.read(place.offset, 4), source.read(place.offset + place.length - _END, 4)
        if (begin, end) != (b"PK\3\4", b"PK\5\6"):
            lost.append(place)
    last = max(inside, key=lambda place: place.offset)
    return lost if last in lost else []


# -- tensors


def _assembled(merger: Merger, name: str, path: tuple[Key, ...], described: _Described, items: _Items) -> Tensor:
    """A tensor that an index describes: its only piece under the name of the tensor, or all pieces as parts."""
    dtype, shape, chunks, _ = described
    found = items.pieces.pop(name, {})
    parts: list[Tensor] = []
    for at, sizes in chunks.items():
        part = found.get(at)
        if part is None:
            continue
        if len(part.shape) == len(shape):
            parts.append(part._replace(path=(*path, *at), start=at))
        if (part.dtype, part.shape) != (dtype, sizes):
            detail = f"{part.dtype} {list(part.shape)} where .metadata says {dtype} {list(sizes)}"
            merger.noted.add("dcp-piece-mismatch", name, detail)
    tensor, covered = assembled(path, shape, parts, name=name, dtype=dtype)
    if covered.lost or len(parts) < len(chunks):
        detail = f"{len(parts):,} of {len(chunks):,} pieces were found; missing: {lost_words(covered, shape)}"
        merger.noted.add("dcp-piece-missing", name, detail)
    if covered.twice:
        merger.noted.add("dcp-pieces-overlap", name, overlap_words(covered, shape))
    return tensor
