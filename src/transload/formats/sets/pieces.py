"""What the files of several ranks have, put together without reading it.

A ``Composition`` is the object that the files form: tensors in pieces, and values. ``UnmergedError`` says why it cannot
be formed; then the files stay apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from transload.checkpoint import Checkpoint, Key, Leaf, Storage, Tensor, Value
from transload.contents import with_parts
from transload.formats.graph import members_of, node_at, short_key
from transload.formats.nested import joined
from transload.formats.pieces import part_of, size_of
from transload.formats.sets.merger import Merger
from transload.frozen import NamedTuple, replace
from transload.geometry import Box, Cover, box_words, boxes_of_run, contiguous, cover
from transload.nodes import Call, Dict, called

_SAME: Any = object()


class UnmergedError(Exception):
    """Why the files of the ranks cannot be put together."""


class MixedError(UnmergedError):
    """What shows that the files of the ranks do not belong together: they are of several runs, or steps."""


class RankFile(NamedTuple):
    """A file of a rank: what it is, the keys of its object, and its tensors by their path in it."""

    name: str
    kind: str
    root: dict[Key, object]
    tensors: dict[tuple[Key, ...], Tensor]
    leaves: dict[tuple[Key, ...], Leaf]
    checkpoint: Checkpoint

    def at(self, path: tuple[Key, ...]) -> object:
        """The node at a path; ``None`` if there is none."""
        return node_at(self.checkpoint.root, path)

    def run(self, path: tuple[Key, ...]) -> Tensor:
        """The one-dimensional tensor at a path."""
        tensor = self.tensors.get(path)
        if tensor is None or tensor.kind != "strided" or len(tensor.shape) != 1:
            raise UnmergedError(f"{self.name} has no vector at {joined(path)}")
        return tensor


class Composition:
    """The object that the files of a folder form, by path.

    ``tensors`` are those so far, and ``gaps`` the names of those that are not complete, each with what is missing:
    problems, unless the files stay apart.
    """

    def __init__(self, merger: Merger) -> None:
        self.merger = merger
        self._files: list[RankFile] = []
        self.tensors: list[Tensor] = []
        self._values: list[Value] = []
        self._leaves: list[Leaf] = []
        self.gaps: list[tuple[str, str]] = []

    def read(self, name: str, kind: str) -> RankFile | None:
        """Read a file of the folder; ``None``, with a problem, if that fails."""
        before = len(self.merger.tensors)
        checkpoint = self.merger.read(name, kind)
        if checkpoint is None:
            return None
        tensors = {tensor.path[1:]: tensor for tensor in self.merger.tensors[before:]}
        path = self.merger.listing.prefix + name
        leaves = {leaf.path: leaf for leaf in checkpoint.leaves}
        self._files.append(RankFile(path, kind, entries(checkpoint.root), tensors, leaves, checkpoint))
        return self._files[-1]

    def put(self, path: tuple[Key, ...], tensor: Tensor) -> None:
        """Put a tensor at a path of the object."""
        self.tensors.append(tensor._replace(path=path, name=joined(path), start=None, requires_grad=False))

    def put_copy(self, path: tuple[Key, ...], tensor: Tensor) -> None:
        """Put a tensor at a path that others have, too, but not its memory: an optimizer counts each one's steps."""
        part = tensor._replace(start=(0,) * len(tensor.shape))
        whole = tensor._replace(stride=contiguous(tensor.shape), storage=None, offset=0, file_offset=None, flags=())
        self.put(path, whole._replace(kind="sharded", parts=(part,)) if tensor.kind == "strided" else tensor)

    def put_node(self, path: tuple[Key, ...], file: RankFile, old: tuple[Key, ...], node: object = _SAME) -> None:
        """Put what is at a path of a file at another path of the object, or ``node`` instead of it."""
        if old in file.tensors:
            self.put(path, file.tensors[old])
            return
        node = file.at(old) if node is _SAME else node
        below = type(node) in (Call, Dict, list, tuple)  # nothing is below a number, of which there may be thousands
        leaves = file.leaves.values() if below else filter(None, [file.leaves.get(old)])
        self.put_value(Value(path, node, file.name, len(self.tensors)), leaves, old)
        for inner, tensor in file.tensors.items() if below else ():
            if inner[: len(old)] == old:
                self.put((*path, *inner[len(old) :]), tensor)

    def put_value(self, value: Value, leaves: Iterable[Leaf], old: tuple[Key, ...] = ()) -> None:
        """Put an object of a file, which was at the path ``old`` there, into the whole, without its tensors."""
        self._values.append(value)
        for leaf in leaves:
            if leaf.path[: len(old)] == old:
                path = (*value.path, *leaf.path[len(old) :])
                self._leaves.append(replace(leaf, path=path, name=joined(path)))

    @cached_property
    def storages(self) -> dict[str, Storage]:
        """The storages of the files that were read, by id."""
        return {storage.id: storage for storage in self.merger.storages}

    def assembled(self, path: tuple[Key, ...], shape: tuple[int, ...], parts: list[Tensor]) -> Tensor:
        """A tensor that consists of parts; notes what is missing. ``UnmergedError`` if they do not fit together."""
        name = joined(path)
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise UnmergedError(f"ranks have {' and '.join(sorted(dtypes))} for {name}")
        tensor, covered = assembled(path, shape, parts)
        if covered.twice:
            raise MixedError(f"the pieces of {name} overlap: {overlap_words(covered, shape)}")
        if covered.lost:
            self.gaps.append((name, f"no file has {lost_words(covered, shape)}"))
        return tensor

    def keep_apart(self, why: UnmergedError, classes: tuple[str, ...] = ()) -> None:
        """Leave the files as they are, each with its own object, in which those of some classes are plain."""
        mixed = isinstance(why, MixedError)
        if mixed:
            self.merger.note("ranks-differ", str(why))
        self.merger.note("ranks-unmerged", "the files do not belong together" if mixed else str(why))
        roots = [(file.name, plain(file.checkpoint.root, classes)) for file in self._files]
        self.merger.values = [Value((name,), root, name) for name, root in roots]

    def finish(self) -> None:
        """Make it the content of the checkpoint."""
        merger = self.merger
        for name, detail in self.gaps:
            merger.noted.add("dcp-piece-missing", name, detail)
        names: dict[str | None, dict[str, None]] = {}
        for tensor in self.tensors:
            for part in with_parts(tensor):
                names.setdefault(part.storage, {})[tensor.name] = None
        merger.tensors, merger.values, merger.leaves = self.tensors, self._values, self._leaves
        merger.storages = [one._replace(tensors=tuple(names.get(one.id, ()))) for one in merger.storages]


# -- nodes


def entries(node: object) -> dict[Key, object]:
    """The entries of a dictionary, or the attributes of an object; empty for anything else."""
    return {short_key(key): child for key, child in members_of(node)} if type(node) in (Dict, Call) else {}


def leaves_of(file: RankFile, without: frozenset[str]) -> set[tuple[tuple[Key, ...], str]]:
    """The values in a file by path, as text, except for those below some keys."""
    return {(path, leaf.text) for path, leaf in file.leaves.items() if path and path[0] not in without}


def list_of(node: object) -> list[Any]:
    """A list or tuple; empty for anything else."""
    return [*node] if isinstance(node, list | tuple) else []


def number_of(node: object) -> int | None:
    """An integer, or that of an enumeration."""
    if type(node) is Call and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int and 0 <= node < 1 << 63 else None


def plain(node: object, classes: tuple[str, ...], depth: int = 4) -> object:
    """A value in which objects of some classes are dictionaries of their attributes, or what an enumeration stands for.

    ``classes`` are the beginnings of their names.
    """
    if not depth:
        return node
    if type(node) is Call and called(node).startswith(classes):
        state = node.states[-1] if node.states else None
        if type(state) is Dict:
            return plain(state, classes, depth - 1)
        return node.args[0] if type(node.args) is tuple and len(node.args) == 1 else node
    inside = node.items if type(node) is Dict else node if isinstance(node, list | tuple) else ()
    new = [plain(part, classes, depth - 1) for part in inside]
    if all(one is other for one, other in zip(new, inside, strict=True)):
        return node
    return Dict(new) if type(node) is Dict else tuple(new) if type(node) is tuple else new


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a parameter; ``UnmergedError`` if it is none."""
    if (shape := size_of(node)) is None:
        raise UnmergedError("the shape of a parameter is not one")
    return shape


# -- tensors


class Vector:
    """A vector that is spread over several files: its runs, each a one-dimensional tensor, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: list[Tensor] = []

    def add(self, begin: int, run: Tensor) -> None:
        """Add a run that begins at a position, after all others."""
        if run.numel:
            self._starts.append(begin)
            self._runs.append(run)

    def cut(self, begin: int, numel: int, start: int = 0) -> list[Tensor]:
        """The elements from ``begin`` on, as parts of a tensor in which they begin at ``start``."""
        parts = []
        end = begin + numel
        for index in range(max(0, bisect_right(self._starts, begin) - 1), len(self._runs)):
            first, run = self._starts[index], self._runs[index]
            if first >= end:
                break
            low, high = max(begin, first), min(end, first + run.numel)
            if low < high:
                parts.append(part_of(run, (high - low,), (low - first) * run.stride[0], (start + low - begin,)))
        return parts


def assembled(
    path: tuple[Key, ...], shape: tuple[int, ...], parts: Sequence[Tensor], *, name: str = "", dtype: str = ""
) -> tuple[Tensor, Cover]:
    """A tensor that consists of parts, and how they cover it; a plain one if a single part is all of it.

    A part begins at a position in each dimension; or all are runs, each at a position in the flattened tensor. ``name``
    is the path, joined, unless given, and ``dtype`` that of the parts.
    """
    name = name or joined(path)
    boxes = [Box(part.start or (), part.shape) for part in parts]
    flat = len(shape) != 1 and bool(boxes) and len(boxes[0].start) == 1
    found = cover((prod(shape),) if flat else shape, boxes)
    if flat:
        lost = (boxes_of_run(shape, gap.start[0], gap.start[0] + gap.shape[0]) for gap in found.lost)
        twice = (boxes_of_run(shape, run.start[0], run.start[0] + run.shape[0]) for run in found.twice)
        found = Cover([box for run in lost for box in run], [box for run in twice for box in run], found.many)
    if len(parts) == 1 and parts[0].numel == prod(shape) and not any(found):
        stride = tuple(parts[0].stride[0] * step for step in contiguous(shape)) if flat else parts[0].stride
        return parts[0]._replace(path=path, name=name, shape=shape, stride=stride, start=None), found
    like = parts[0] if parts else None
    dtype, device = dtype or (like.dtype if like else "float32"), like.device if like else "cpu"
    whole = Tensor(path, name, dtype, shape, contiguous(shape), device, None, kind="sharded", parts=tuple(parts))
    return whole, found


def lost_words(covered: Cover, shape: tuple[int, ...]) -> str:
    """What no part of a tensor covers."""
    return f"very many parts of {list(shape)}" if covered.many else box_words(covered.lost, shape)


def overlap_words(covered: Cover, shape: tuple[int, ...]) -> str:
    """Which parts of a tensor others have, too."""
    return f"{box_words(covered.twice, shape)} overlaps other pieces, or is not inside the tensor"


def concatenated(path: tuple[Key, ...], slices: Sequence[Tensor], dim: int, stacks: int = 1) -> Tensor:
    """The tensor whose slices along a dimension the ranks have.

    Each slice may be a stack of several tensors, all of the same size along that dimension, which is then the first:
    the slices of the first of them come before those of the next one.
    """
    parts, at, shape = list[Tensor](), 0, slices[0].shape
    for number, each in product(range(stacks), slices):
        size = each.shape[dim] // stacks
        start = tuple(at if axis == dim else 0 for axis in range(len(shape)))
        rows = (*shape[:dim], size, *shape[dim + 1 :])
        parts.append(part_of(each, rows, number * size * each.stride[dim], start))
        at += size
    return assembled(path, (*shape[:dim], at, *shape[dim + 1 :]), parts)[0]


def can_be_joined(slices: Sequence[Tensor], dim: int) -> bool:
    """Whether tensors are dense, and have the same dtype and the same shape in all other dimensions."""
    if any(each.kind != "strided" for each in slices):
        return False
    shapes = {(len(each.shape), *each.shape[:dim], -1, *each.shape[dim + 1 :]) for each in slices}
    return len(shapes) == 1 and len({each.dtype for each in slices}) == 1 and 0 <= dim < len(slices[0].shape)
