"""Which elements: views of a storage, boxes of a tensor. Plain numbers, in elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from transload.frozen import NamedTuple

_MAX_STRIDE = 1 << 64
_SHOWN = 4
# Comparing two boxes takes some microseconds, and a hostile index lists millions of them.
_MAX_COMPARED = 1_000_000
# Boxes of one local tensor: a strided shard has one for each of its strides, and FSDP writes a single one.
MAX_BOXES = 256
MAX_DIMENSIONS = 64
"""Those of a tensor in torch, and of an array in numpy 2.0. A million of 2**62 would take hours to multiply out."""
_Run = tuple[int, int]  # the first row and the row after the last


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as in torch.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step = min(step * max(size, 1), _MAX_STRIDE)  # a zero-sized tensor may claim any other sizes
    return tuple(reversed(strides))


class View(NamedTuple):
    """Sizes, strides and storage offset of a tensor, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """The number of storage elements from its first to its last, inclusive.

        >>> View((2, 3), (10, 1)).extent
        13
        """
        if 0 in self.shape:
            return 0
        return 1 + sum([(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)])

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are adjacent and in row-major order."""
        axes = axes_of(self.shape, self.stride)
        return not axes or 0 in self.shape or (len(axes) == 1 and axes[0].step == 1)

    def part(self, box: Box) -> View:
        """The view of a box of its elements.

        >>> View((4, 6), (6, 1), 100).part(Box((1, 2), (2, 3)))
        View(shape=(2, 3), stride=(6, 1), offset=108)
        """
        first = sum([start * step for start, step in zip(box.start, self.stride, strict=True)])
        return View(box.shape, self.stride, self.offset + first)

    def has_layout(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape and stride has the same memory layout, and neither has gaps."""
        expected = 1
        for step, size, other in sorted(zip(self.stride, self.shape, stride, strict=False)):
            if size > 1 and not step == other == expected:  # the stride of a dimension of size 1 means nothing
                return False
            expected *= size
        return self.shape == shape


class Box(NamedTuple):
    """A rectangular part of a tensor: its start in each dimension, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def cut(self, dim: int, start: int, size: int) -> Box:
        """The box with another extent in one dimension."""
        after = dim + 1
        return Box((*self.start[:dim], start, *self.start[after:]), (*self.shape[:dim], size, *self.shape[after:]))

    def within(self, other: Box) -> Box:
        """The same box, counted from the start of another."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape)

    def moved(self, by: tuple[int, ...]) -> Box:
        """The box further on in each dimension."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The part that it shares with another; ``None`` if there is none."""
        edges = zip(self.start, self.shape, other.start, other.shape, strict=True)
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
        if any(end <= begin for begin, end in spans):
            return None
        return Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def box_words(parts: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Which boxes of a shape, as indices in Python: ``[2:4] of [10, 6]``.

    >>> box_words([Box((2, 0), (2, 6))], (10, 6)), box_words([Box((0, 3), (10, 3))], (10, 6)), box_words([], (10,))
    ('[2:4] of [10, 6]', '[:, 3:6] of [10, 6]', 'nothing of [10]')
    """
    texts = []
    for box in parts[:_SHOWN]:
        spans = [(at.start, at.stop) for at in box.slices]
        full = [span == (0, size) for span, size in zip(spans, shape, strict=True)]
        last = max((dim for dim, whole in enumerate(full) if not whole), default=0)
        indices = [":" if full[dim] else f"{spans[dim][0]}:{spans[dim][1]}" for dim in range(last + 1)[: len(spans)]]
        texts.append(f"[{', '.join(indices)}]")
    more = f" and {len(parts) - _SHOWN:,} more" if len(parts) > _SHOWN else ""
    return f"{', '.join(texts) or 'nothing'}{more} of {list(shape)}"


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Split a shape into boxes of at most ``most`` elements, in row-major order.

    >>> [box.start for box in boxes((3, 4), 8)]
    [(0, 0), (2, 0)]
    """
    if prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
        return
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= most)
    many, rest = most // prod(shape[dim + 1 :]), shape[dim + 1 :]
    for outer in product(*map(range, shape[:dim])):
        for index in range(0, shape[dim], many):
            size = min(many, shape[dim] - index)
            yield Box((*outer, index, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest))


def boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Split a run of the elements of a shape, counted in row-major order, into boxes: at most two per dimension.

    The elements of each box are consecutive, and the boxes are in order.

    >>> list(boxes_of_run((3, 4), 2, 9))
    [Box(start=(0, 2), shape=(1, 2)), Box(start=(1, 0), shape=(1, 4)), Box(start=(2, 0), shape=(1, 1))]
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    size = prod(shape[1:])
    first, last = -(-begin // size), end // size  # whole rows
    if first > begin // size:
        row = first - 1
        inner = boxes_of_run(shape[1:], begin - row * size, min(end - row * size, size))
        yield from (Box((row, *box.start), (1, *box.shape)) for box in inner)
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last >= first and end > last * size:
        inner = boxes_of_run(shape[1:], 0, end - last * size)
        yield from (Box((last, *box.start), (1, *box.shape)) for box in inner)


class Split(NamedTuple):
    """A dimension of a tensor, split over ``ranks`` ranks as ``torch.chunk`` splits it; ``rank`` has one of the parts.

    ``factor`` is the ``split_factor`` of torch's ``_StridedShard``: into so many parts the dimension was split before,
    by splits that are listed after this one.
    """

    dim: int
    ranks: int
    rank: int
    factor: int = 1


def shards(shape: tuple[int, ...], splits: Sequence[Split]) -> list[tuple[Box, Box]]:
    """The boxes of a tensor that a rank has, each with its box of the rank's own tensor.

    There is one split for each dimension of the device mesh that shards the tensor. If a factor does not follow from
    the splits after it, the rank has its share of each of so many parts. ``LookupError`` if it has too many boxes.
    The shard of FSDP2 over tensor parallelism, and one that is scattered:

    >>> shards((8,), [Split(0, ranks=2, rank=1, factor=2), Split(0, ranks=2, rank=0)])
    [(Box(start=(2,), shape=(2,)), Box(start=(0,), shape=(2,)))]
    >>> [box.start for box, _ in shards((8,), [Split(0, ranks=2, rank=1, factor=2)])]
    [(2,), (6,)]
    """
    order: list[Split] = []
    for split in reversed(splits):
        at, parts = 0, 1
        while parts < split.factor and at < len(order):
            parts *= order[at].ranks if order[at].dim == split.dim else 1
            at += 1
        follows = parts == split.factor
        order.insert(at if follows else 0, split._replace(factor=1) if follows else split)
    runs: list[list[_Run]] = [[(0, size)] for size in shape]
    for dim, ranks, rank, factor in order:
        outer = (_chunk(runs[dim], factor, index) for index in range(factor))
        runs[dim] = _joined([run for part in outer for run in _chunk(part, ranks, rank)])
    if prod(map(len, runs)) > MAX_BOXES:
        raise LookupError("scattered over too many places")
    pairs = []
    for combination in product(*map(_with_places, runs)):
        sizes = tuple([run[1] - run[0] for run, _ in combination])
        start, place = tuple([run[0] for run, _ in combination]), tuple([at for _, at in combination])
        pairs.append((Box(start, sizes), Box(place, sizes)))
    return pairs


def _chunk(runs: list[_Run], count: int, index: int) -> list[_Run]:
    """The rows of one of ``count`` chunks of some rows, by the rule of ``torch.chunk``: the last ones may be empty.

    >>> _chunk([(0, 4), (6, 12)], 4, 1)
    [(3, 4), (6, 8)]
    """
    total = sum(end - begin for begin, end in runs)
    step = -(-total // count)
    first, last = min(total, index * step), min(total, (index + 1) * step)
    out = []
    for begin, end in runs:
        low, high = max(0, first), min(end - begin, last)
        if low < high:
            out.append((begin + low, begin + high))
        first, last = first - (end - begin), last - (end - begin)
    return out


def _joined(runs: list[_Run]) -> list[_Run]:
    """The same rows, with adjacent runs joined."""
    out: list[_Run] = []
    for begin, end in runs:
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        else:
            out.append((begin, end))
    return out


def _with_places(runs: list[_Run]) -> list[tuple[_Run, int]]:
    """Runs, each with its place in the local tensor; for none, an empty one."""
    out, at = [], 0
    for begin, end in runs:
        out.append(((begin, end), at))
        at += end - begin
    return out or [((0, 0), 0)]


def hull(boxes: Iterable[Box]) -> tuple[int, ...]:
    """The smallest shape that contains some boxes.

    >>> hull([Box((0, 2), (3, 1)), Box((2, 0), (2, 2))])
    (4, 3)
    """
    ends = ([at + size for at, size in zip(*box, strict=True)] for box in boxes)
    return tuple(map(max, zip(*ends, strict=True)))


class Cover(NamedTuple):
    """What some boxes leave open of a shape, and those that overlap others or are not inside it.

    If more than a thousand boxes are lost, or finding them would take too long, the whole shape is, and ``many`` true.
    """

    lost: list[Box]
    twice: list[Box]
    many: bool = False


def cover(shape: tuple[int, ...], boxes: Iterable[Box], most: int = 1000) -> Cover:
    """How boxes cover a shape.

    >>> cover((8, 3), [Box((0, 0), (2, 3)), Box((4, 0), (4, 3))]).lost
    [Box(start=(2, 0), shape=(2, 3))]
    """
    whole = Box((0,) * len(shape), shape)
    ordered = sorted([box for box in boxes if 0 not in box.shape])
    row, columns = 0, (whole.start[1:], shape[1:])
    for at, sizes in ordered if shape else ():  # most have rows, one after another; this is fast
        if at[0] != row or (at[1:], sizes[1:]) != columns:
            break
        row += sizes[0]
    else:
        if shape and row == shape[0]:
            return Cover([], [])
    left, twice = [whole] if prod(shape) else [], list[Box]()
    compared = 0
    for box in ordered:
        rest: list[Box] = []
        compared += len(left)
        row, after = (box.start[0], box.start[0] + box.shape[0]) if shape else (0, 1)
        new = 0
        for gap in left:
            apart = shape and (gap.start[0] >= after or gap.start[0] + gap.shape[0] <= row)  # most are; this is fast
            shared = None if apart else gap.intersection(box)
            if shared is None:
                rest.append(gap)
                continue
            new += shared.numel
            # Cut off what is before and after the shared part in each dimension, and go on with what is between.
            for dim, (low, size) in enumerate(zip(shared.start, shared.shape, strict=True)):
                start, end = gap.start[dim], gap.start[dim] + gap.shape[dim]
                for first, last in ((start, low), (low + size, end)):
                    if first < last:
                        rest.append(gap.cut(dim, first, last - first))
                gap = gap.cut(dim, low, size)  # noqa: PLW2901 - what is left of it
        left = rest
        if new < box.numel:
            twice.append(box)
        if len(left) > most or compared > _MAX_COMPARED:
            full = sum([box.numel for box in ordered]) > prod(shape)
            return Cover([whole], twice or ([whole] if full else []), many=True)
    return Cover(left, twice)


class Axis(NamedTuple):
    """A dimension: its size, and its stride in the storage and in the result, in elements."""

    size: int
    step: int
    out_step: int


def axes_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Axis]:
    """The dimensions of a view that is copied into row-major order, merged into as few as possible.

    >>> axes_of((4, 1, 5), (5, 7, 1))
    [Axis(size=20, step=1, out_step=1)]
    """
    axes: list[Axis] = []
    out_step = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        last = axes[-1] if axes else None
        if last is not None and step == last.step * last.size:
            axes[-1] = Axis(last.size * size, last.step, last.out_step)
        else:
            axes.append(Axis(size, step, out_step))
        out_step *= size
    return axes[::-1]
