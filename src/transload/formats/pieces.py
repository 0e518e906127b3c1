"""Which part of a distributed tensor a file has: what DTensor and ShardedTensor say about themselves in a pickle.

torch pickles only the local part of such a tensor, with a description: a DTensor its placements on a mesh of ranks,
a ShardedTensor the place of every shard. Nothing here is built: the nodes of the pickle are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from transload.checkpoint import Key, Tensor
from transload.dtypes import MAX_SIZE, itemsize
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.geometry import MAX_BOXES, MAX_DIMENSIONS, Box, Split, View, box_words, hull, shards
from transload.nodes import Call, Dict, Global, Pickle, called, dotted, walk_nodes
from transload.render.words import plural

# Ranks of a mesh: nobody trains on that many, and a file may claim 2**60.
MAX_WORLD = 1_000_000

_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")


class UnplacedError(Exception):
    """A distributed tensor of which the file does not say what part is in it; the text says why."""


class Local(NamedTuple):
    """A tensor that a rank has (its node), and the boxes of the whole that it fills, each with its box in it."""

    node: object
    boxes: tuple[tuple[Box, Box], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return hull(inner for _, inner in self.boxes)


class Piece(NamedTuple):
    """What one rank has of a distributed tensor.

    ``rank`` is -1 if the file does not say it: before 2.10, a DTensor only says where in its mesh of ``world`` ranks it
    is (``place``), which may be a part of all ranks. ``world`` is 0 if it is not known.
    """

    local: tuple[Local, ...]
    rank: int
    place: int
    world: int


def local_tensors(call: Call) -> list[object] | None:
    """The nodes of the tensors that a rank has of a distributed tensor; ``None`` if a call makes something else."""
    args: Any = call.args
    if called(call) not in _FROM_TYPE or type(args) is not tuple or len(args) != 4 or not class_of(args[1]):
        return None
    return local_nodes(class_of(args[1]), args[3])


def local_nodes(cls: str, state: object) -> list[object]:
    """The nodes of the tensors that a rank has of a distributed tensor with that class and state."""
    if cls == "DTensor":
        return [_attributes(state).get("_local_tensor")]
    shards = state[0] if type(state) is tuple and state and type(state[0]) is list else []
    return [_fields(shard).get("tensor") for shard in shards]


def is_parameter(call: Call) -> bool:
    """Whether a distributed tensor is a parameter."""
    args: Any = call.args
    return _attributes(args[3]).get("_is_param") is True


def class_of(node: object) -> str:
    """The class of distributed tensors that a node names; else empty."""
    name = dotted(node)
    last = name.rpartition(".")[2]
    return last if name.startswith("torch.distributed.") and last in ("DTensor", "ShardedTensor") else ""


def names_outside(pickle: Pickle) -> set[Global]:
    """The names that a pickle uses outside distributed tensors, and in the local parts of those."""
    return {node for node in walk_nodes((pickle.root,), local_tensors) if type(node) is Global}


def piece_of(cls: str, shape: tuple[int, ...], state: object) -> Piece:
    """The piece that the state of a DTensor or ShardedTensor describes; ``UnplacedError`` if that is not clear."""
    if len(shape) > MAX_DIMENSIONS:
        raise UnplacedError(f"it has {len(shape)} dimensions")
    return _dtensor(shape, _attributes(state)) if cls == "DTensor" else _sharded_tensor(shape, state)


def cut_out(tensor: Tensor, boxes: Sequence[tuple[Box, Box]], path: tuple[Key, ...]) -> list[Tensor]:
    """The parts of a distributed tensor that a rank's own tensor has: boxes of the whole, each with its box in that."""
    parts = []
    for box, inner in boxes:
        part = part_of(tensor, box.shape, View(tensor.shape, tensor.stride).part(inner).offset, box.start)
        parts.append(part._replace(path=(*path, *box.start), requires_grad=False, cls=""))
    return parts


def part_of(tensor: Tensor, shape: tuple[int, ...], offset: int, start: tuple[int, ...]) -> Tensor:
    """A box of a strided tensor that begins ``offset`` elements of the storage after it, as the part at ``start``."""
    at = tensor.file_offset
    at = None if at is None else at + itemsize(tensor.dtype, offset)
    return tensor._replace(shape=shape, offset=tensor.offset + offset, file_offset=at, start=start)


def share_words(tensors: Sequence[Tensor]) -> str:
    """Which pieces of some distributed tensors a file has, in a phrase."""
    pieces = []
    for tensor in tensors:
        boxes = [Box(part.start or (), part.shape) for part in tensor.parts if part.numel]
        pieces.append(f"{tensor.name or 'the root'} {box_words(boxes, tensor.shape)}")
    return f"{plural(len(tensors), 'tensor')}: {join_names(pieces, 3)}"


def _attributes(state: object) -> Dict:
    """The attributes in the state of an object: a dictionary, or two of them if its class has slots."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    dicts = [part for part in parts if type(part) is Dict]
    return dicts[0] if len(dicts) == 1 else Dict([item for part in dicts for item in part.items])


def _fields(node: object) -> Dict:
    return _attributes(node.states[-1] if type(node) is Call and node.states else None)


def size_of(node: object) -> tuple[int, ...] | None:
    """A ``torch.Size``, which pickles as a call with a tuple, or another sequence of sizes; ``None`` if it is none."""
    if type(node) is Call and called(node) == "torch.Size" and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if type(node) not in (tuple, list) or len(node) > MAX_DIMENSIONS:  # type: ignore[arg-type]
        return None
    sizes: tuple[int, ...] = tuple(node)  # type: ignore[arg-type]
    whole = {int}.issuperset(map(type, sizes)) and (not sizes or 0 <= min(sizes) <= max(sizes) < MAX_SIZE)
    return sizes if whole else None


def _numbers(node: object, what: str) -> tuple[int, ...]:
    if (numbers := size_of(node)) is None:
        raise UnplacedError(f"{what} is not a list of sizes")
    return numbers


# -- ShardedTensor: the state is (local shards, metadata, process group, sharding, …)


def _sharded_tensor(shape: tuple[int, ...], state: Any) -> Piece:
    if type(state) is not tuple or len(state) < 3 or type(state[0]) is not list or len(state[0]) > MAX_BOXES:
        raise UnplacedError("its state is not that of a ShardedTensor")
    local: list[Local] = []
    for shard in state[0]:
        fields = _fields(shard)
        place = _fields(fields.get("metadata"))
        start = _numbers(place.get("shard_offsets"), "the place of a shard")
        sizes = _numbers(place.get("shard_sizes"), "the size of a shard")
        if not len(start) == len(sizes) == len(shape):
            raise UnplacedError("the place of a shard has other dimensions")
        if any(at + size > most for at, size, most in zip(start, sizes, shape, strict=True)):
            raise UnplacedError("the place of a shard is outside the tensor")
        local.append(Local(fields.get("tensor"), ((Box(start, sizes), Box((0,) * len(shape), sizes)),)))
    group = _fields(state[2])
    rank, world = group.get("global_rank"), group.get("global_world_size")
    known = type(rank) is int and type(world) is int and 0 <= rank < world <= MAX_WORLD
    return Piece(tuple(local), *((rank, rank, world) if known else (-1, -1, 0)))  # type: ignore[arg-type]


# -- DTensor: a local tensor, a mesh of ranks, and for each dimension of the mesh a placement


def _dtensor(shape: tuple[int, ...], state: Dict) -> Piece:
    spec = _fields(state.get("_spec"))
    sizes, coordinate, rank = _mesh(spec.get("mesh"))
    place = 0
    for size, at in zip(sizes, coordinate, strict=True):
        place = place * size + at
    placements: Any = spec.get("placements")
    if type(placements) not in (tuple, list) or len(placements) != len(sizes):
        raise UnplacedError("it has no placement for each dimension of its mesh")
    splits: list[Split] = []
    for axis in _order(spec, len(sizes)):
        kind = called(placements[axis]).rpartition(".")[2] if type(placements[axis]) is Call else ""
        fields = _fields(placements[axis])
        if kind in ("Shard", "_StridedShard"):
            dim, factor = fields.get("dim"), fields.get("split_factor") if kind == "_StridedShard" else 1
            if type(dim) is not int or not 0 <= dim < len(shape):
                raise UnplacedError("it is split along a dimension that it does not have")
            if type(factor) is not int or not 0 < factor <= MAX_BOXES:
                raise UnplacedError("it is split into an impossible number of parts")
            splits.append(Split(dim, sizes[axis], coordinate[axis], factor))
        elif kind.endswith("Partial"):
            raise UnplacedError(
                "each rank has a summand of it (its placement is Partial), which cannot be put together"
            )
        elif kind != "Replicate":
            raise UnplacedError(f"its placement {kind[:60] or 'on a dimension of the mesh'} is not known")
    try:
        boxes = shards(shape, splits)
    except LookupError as error:
        raise UnplacedError(f"its local part is {error}") from error
    return Piece((Local(state.get("_local_tensor"), tuple(boxes)),), rank, place, prod(sizes))


def _mesh(node: object) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The sizes of a mesh, the coordinate of the rank that saved it, and that rank, -1 if it is not known."""
    state = _fields(node)
    mesh: Any = state.get("mesh")  # up to 2.9, a tensor of ranks
    if type(mesh) is Call and type(mesh.args) is tuple and len(mesh.args) > 2:
        sizes = _numbers(mesh.args[2], "the size of its mesh")
    else:
        layout = _fields(state.get("_layout"))
        axes: Any = layout.get("axes")
        shapes = [_fields(axis).get("shape") for axis in axes[:MAX_DIMENSIONS]] if type(axes) in (tuple, list) else None
        given: Any = layout.get("shape") if shapes is None else tuple(shapes)
        given = (given,) if type(given) is int else given
        if type(given) is not tuple or len(given) > MAX_DIMENSIONS:
            raise UnplacedError("it does not say how large its mesh is")
        # A dimension may consist of several.
        sizes = tuple(
            [prod(_numbers(each if type(each) is tuple else (each,), "the size of its mesh")) for each in given]
        )
    coordinate = _numbers(state.get("_coordinate_on_dim"), "its place in the mesh")
    inside = len(coordinate) == len(sizes) and all(at < size for at, size in zip(coordinate, sizes, strict=True))
    if not inside or prod(sizes) > MAX_WORLD:
        raise UnplacedError("its place in the mesh is not inside it")
    rank: Any = state.get("_rank")
    rank = rank if type(rank) is int and 0 <= rank < MAX_WORLD else -1
    return sizes, coordinate, rank


def _order(spec: Dict, count: int) -> list[int]:
    """The dimensions of the mesh in the order in which they divide the tensor; only 2.10 or newer may change it."""
    entries: Any = spec.get("shard_order")
    order: list[int] = []
    for entry in entries[:MAX_DIMENSIONS] if type(entries) is tuple else ():
        args = entry.args if type(entry) is Call else None
        if type(args) is not tuple or len(args) != 2:
            raise UnplacedError("the order in which it was split is not clear")
        order += _numbers(args[1], "the order in which it was split")
    if len(set(order)) != len(order) or any(axis >= count for axis in order):
        raise UnplacedError("the order in which it was split is not clear")
    return order + [axis for axis in range(count) if axis not in order]
