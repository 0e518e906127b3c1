"""Folders of the package ``torch_checkpointing``, as TorchTitan saves them: ``model_0.pt``, ``model_1.pt``, ….

Each rank has a file for each item, and ``metadata.pkl`` says how their tensors are divided. It is missing if no item
was to be loaded by another number of ranks; then the files are like any others of ranks. Files of items that it does
not describe are found by their usual names.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.findings import join_names
from transload.formats.graph import last_pairs
from transload.formats.nested import joined
from transload.formats.pieces import MAX_WORLD, cut_out, size_of
from transload.formats.sets import ranks
from transload.formats.sets.merger import Merger
from transload.formats.sets.pieces import MixedError, RankFile, UnmergedError, list_of
from transload.formats.sets.ranks import RankName
from transload.frozen import NamedTuple
from transload.geometry import MAX_BOXES, Box, Split, contiguous, hull, shards
from transload.io.folder import Listing, relative_path
from transload.nodes import Dict, short

_METADATA = "metadata.pkl"
_VERSIONS = ("1.0", "2.0")
_USUAL = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,6})\.pt")
# Keys and values of all dictionaries, however often each is used: a hostile file uses one a million times.
_MAX_ENTRIES = 20_000_000


def matches(listing: Listing) -> bool:
    """Whether a folder has the metadata."""
    return _METADATA in listing.files


def read(merger: Merger) -> Checkpoint | None:
    """Put the files of all ranks together as the metadata says; ``None`` if it is of another program."""
    pickle = merger.read_index(_METADATA)
    pairs = pickle.root.pairs() if pickle and type(pickle.root) is Dict else []
    root: dict[Key, Any] = {key: value for key, value in pairs if type(key) is str}
    if not {"metadata", "world_size"} <= root.keys():
        return None
    merger.flavour = "torch_checkpointing"
    index = _Index(merger, root)
    families: dict[str, dict[int, str]] = {item: {} for item in index.files}
    for file in merger.listing.files:
        if match := _USUAL.fullmatch(file):
            families.setdefault(match["item"], {})[int(match["rank"])] = file
    names: dict[str, list[RankName]] = {}
    for item, usual in families.items():
        files = {**usual, **index.files.get(item, {})}
        world = index.world if item in index.files else 0
        if files:
            names[item] = [RankName(files[rank], item, world, rank) for rank in sorted(files)]
        else:
            merger.note("rank-missing", f"{world:,} of {world:,} ranks", item)
    named = {name.file for files in names.values() for name in files}
    if others := [name for name in merger.listing.files if name not in named and name != _METADATA]:
        merger.facts.append(("also here, not read", join_names(others)))
    return ranks.merged(merger, names, index.adapt)


class _Index:
    """What the metadata says: ``files`` of the items, by rank, if they are not usual, and how tensors are divided."""

    def __init__(self, merger: Merger, root: dict[Key, Any]) -> None:
        self._merger = merger
        version, world = root.get("version", "1.0"), root["world_size"]
        self.world = world if type(world) is int and 0 < world <= MAX_WORLD else 0
        self.files: dict[str, dict[int, str]] = {}
        self._tensors: dict[str, dict[tuple[Key, ...], object]] = {}
        self._seen: dict[int, dict[int, int]] = {}
        self._groups: dict[int, list[_Group]] = {}
        self._budget = _MAX_ENTRIES
        self._wrong = ""
        if version not in _VERSIONS:
            self._wrong = f"{_METADATA} has version {short(version)[:20]}; 1.0 and 2.0 are known"
            return
        try:
            (self._add_paths if version == "1.0" else self._add_items)(root)
        except UnmergedError as error:
            self._wrong = str(error)

    def _add_items(self, root: dict[Key, Any]) -> None:
        """Add what version 2.0 says, item by item."""
        for item, node in self._table(root["metadata"]).items():
            fields = self._table(node)
            described = self._table(fields.get("nested_path_to_metadata"))
            self._tensors[str(item)] = {_path(path): groups for path, groups in described.items()}
            for rank, layout in self._table(fields.get("rank_to_layout_info")).items():
                self._add_file(str(item), rank, layout)

    def _add_paths(self, root: dict[Key, Any]) -> None:
        """Add what version 1.0 says, path by path."""
        for path, groups in self._table(root["metadata"]).items():
            item, *inner = _path(path) or ("",)
            self._tensors.setdefault(str(item), {})[tuple(inner)] = groups
        for rank, mapping in self._table(root.get("rank_to_layout_info_mappings")).items():
            for item, layout in self._table(mapping).items():
                if item in self._tensors:
                    self._add_file(str(item), rank, layout)

    def _add_file(self, item: str, rank: Key, layout: object) -> None:
        files, merger = self.files.setdefault(item, {}), self._merger
        path = self._table(layout).get("file_path")
        file = relative_path(path)
        if path is not None and not file:
            merger.note("dcp-path-outside", f"{short(path)[:200]!r} was not opened", _METADATA)
        elif file and str(rank).isdecimal() and merger.listing.folder.kind(merger.listing.prefix + file):
            files[int(rank)] = file

    def _table(self, node: object) -> dict[Key, Any]:
        """The entries of a dictionary with keys that are strings or integers; empty for anything else."""
        items = node.items if type(node) is Dict else []
        self._budget -= len(items) + 1
        if self._budget < 0:
            raise UnmergedError(f"{_METADATA} is too large")
        return {key: value for value, key, _ in last_pairs(items) if type(key) in (str, int)}

    def adapt(self, name: RankName, file: RankFile) -> RankFile:
        """A file of a rank, in which tensors that say nothing about themselves are the pieces that they are."""
        if self._wrong:
            raise UnmergedError(self._wrong)
        tensors: dict[tuple[Key, ...], Tensor] = {}
        described = self._tensors.get(name.family, {})
        flat = {".".join(map(str, path)): path for path in described} if not file.checkpoint.pickles else {}
        for old, tensor in file.tensors.items():
            path = flat.get(str(old[0]), old) if flat else old
            groups = described.get(path)
            tensors[path] = tensor if groups is None else self._divided(tensor, path, groups, name.rank)
        return file._replace(tensors=tensors)

    def _divided(self, tensor: Tensor, path: tuple[Key, ...], groups: object, rank: int) -> Tensor:
        """What a rank has of a tensor; ``UnmergedError`` if that is not what the metadata says."""
        name = joined(path)
        if id(groups) not in self._groups:
            self._groups[id(groups)] = [self._group(each) for each in list_of(groups)]
        group = next((each for each in self._groups[id(groups)] if rank in each.ranks), None)
        boxes = group.boxes(rank) if group else None
        divided = tensor.is_sharded or tensor.cls in ("DTensor", "ShardedTensor")  # it says so itself
        if group is None or boxes is None or not (divided or tensor.kind == "strided"):
            raise UnmergedError(f"how {name} is divided among the ranks is not clear")
        here = f"{tensor.dtype} {list(tensor.shape)}"
        told = f"{group.dtype} {list(group.shape if divided else hull(inner for _, inner in boxes))}"
        if here != told:
            raise MixedError(f"{name} is {here} on rank {rank}, where {_METADATA} says {told}")
        if divided or (len(boxes) == 1 and boxes[0][0].shape == group.shape):
            return tensor
        whole = tensor._replace(shape=group.shape, stride=contiguous(group.shape), kind="sharded", storage=None)
        return whole._replace(parts=tuple(cut_out(tensor, boxes, path)))

    def _group(self, node: object) -> _Group:
        """How some ranks have divided a tensor; one without ranks if that is not clear."""
        fields = self._table(node)
        packed = self._table(fields.get("sharding_metadata"))
        data = self._table(packed.get("data"))
        mesh = self._table(data.get("mesh_spec"))
        shape, sizes = size_of(data.get("global_shape")), size_of(mesh.get("mesh_shape"))
        splits: list[tuple[int, int] | None] = []
        for placement in map(self._table, list_of(data.get("placements"))):
            kind, dim, factor = placement.get("type"), placement.get("dim"), placement.get("split_factor", 1)
            if kind == "Replicate":
                splits.append(None)
            elif kind in ("Shard", "StridedShard") and type(dim) is int and type(factor) is int:
                splits.append((dim, factor))
        known = packed.get("type") == "DTensorShardingMetadata"  # a program may have others of its own
        if not known or shape is None or sizes is None or len(splits) != len(sizes):
            return _Group({}, (), "", (), {}, ())
        if not all(split is None or (0 <= split[0] < len(shape) and 0 < split[1] <= MAX_BOXES) for split in splits):
            return _Group({}, (), "", (), {}, ())
        dtype = str(data.get("dtype")).removeprefix("torch.")[:20]
        places = self._places(mesh.get("mesh_data"))
        return _Group(self._places(fields.get("ranks")), shape, dtype, sizes, places, tuple(splits))

    def _places(self, node: object) -> dict[int, int]:
        """Ranks, each with its place among them; the same tuple is used by many tensors."""
        if id(node) not in self._seen:
            self._seen[id(node)] = {rank: at for at, rank in enumerate(list_of(node)) if type(rank) is int}
        return self._seen[id(node)]


class _Group(NamedTuple):
    """How ``ranks`` have divided a tensor: its shape and dtype, the sizes of their mesh, and the place of each in it.

    ``splits`` has, for each dimension of the mesh, that of the tensor that it splits, with the factor, or ``None``.
    """

    ranks: dict[int, int]
    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...]
    places: dict[int, int]
    splits: tuple[tuple[int, int] | None, ...]

    def boxes(self, rank: int) -> list[tuple[Box, Box]] | None:
        """The boxes that a rank has, each with its box of the rank's own tensor; ``None`` if that is not clear."""
        place = self.places.get(rank, -1)
        if not 0 <= place < prod(self.sizes):
            return None
        splits: list[Split] = []
        for size, split in zip(reversed(self.sizes), reversed(self.splits), strict=True):
            place, at = divmod(place, size)
            if split is not None:
                splits.insert(0, Split(split[0], size, at, split[1]))
        try:
            return shards(self.shape, splits)
        except LookupError:
            return None


def _path(text: object) -> tuple[Key, ...]:
    """A path in an item, which is JSON; empty if it is none."""
    try:
        path = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        return ()
    return tuple(path) if type(path) is list and all(type(step) in (str, int) for step in path) else ()
