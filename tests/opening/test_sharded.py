"""Sharded tensors: assembled box by box, however they are cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.each import each

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.errors import ContentError
from transload.geometry import Box, boxes, boxes_of_run, contiguous
from transload.io.sources import BytesSource
from transload.opening.elements import ElementReader, is_covered


def sharded(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], width: int, *, swapped: bool = False
) -> ElementReader:
    """A tensor whose elements count up from 0, cut at these positions in each dimension, with a file for each part."""
    dtype = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[width]
    parts, storages, files = [], [], {}
    for number, box in enumerate(itertools.product(*map(spans, shape, cuts))):
        first, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        numbers = [flat_index(index, shape) for index in itertools.product(*(range(a, b) for a, b in box))]
        data = b"".join(element(value, width, swapped=swapped) for value in numbers)
        name = f"part{number}"
        files[name] = BytesSource(b"??" + data)
        storages.append(Storage(name, "0", "cpu", dtype, len(data), len(data), 2, file=name, big_endian=swapped))
        parts.append(Tensor(("x", *first), f"x{first}", dtype, sizes, contiguous(sizes), "cpu", name, start=first))
    tensor = Tensor(("x",), "x", dtype, shape, contiguous(shape), "cpu", None, kind="sharded", parts=tuple(parts))
    return ElementReader(Checkpoint("x", "dcp", 0, tensors=(tensor,), storages=tuple(storages)), files.__getitem__)


def in_runs(shape: tuple[int, ...], cuts: tuple[int, ...], step: int = 1) -> ElementReader:
    """A tensor whose elements count up from 0, cut at these positions of the flattened tensor; all parts in a file.

    ``step`` is the stride of the parts.
    """
    parts = []
    for begin, end in spans(prod(shape), cuts):
        size = (end - begin,)
        parts.append(Tensor(("x",), "x", "int32", size, (step,), "cpu", "0", begin * step, start=(begin,)))
    tensor = Tensor(("x",), "x", "int32", shape, contiguous(shape), "cpu", None, kind="sharded", parts=tuple(parts))
    data = b"".join(value.to_bytes(4, "little") * step for value in range(prod(shape)))
    storage = Storage("0", "0", "cpu", "int32", len(data), len(data), 0)
    source = BytesSource(data)
    return ElementReader(Checkpoint("x", "dcp", 0, tensors=(tensor,), storages=(storage,)), lambda _: source)


def spans(size: int, cuts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise((0, *cuts, size))


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(i * step for i, step in zip(index, contiguous(shape), strict=True))


def element(value: int, width: int, *, swapped: bool = False) -> bytes:
    if width == 16:
        return element(value % 256, 8, swapped=swapped) * 2
    return (value % 256).to_bytes(width, "big" if swapped else "little")


@each("window", [16, 64, 1 << 20])
@each("width", [1, 4, 16])
@each(
    ("shape", "cuts"),
    [
        pytest.param((9, 4), ((3, 6), ()), id="rows"),
        pytest.param((5, 8), ((), (2, 5)), id="columns"),
        pytest.param((4, 5, 6), ((2,), (1, 4), (3,)), id="three dimensions"),
        pytest.param((), (), id="scalar"),
    ],
)
def test_assembled_elements_are_in_order(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], width: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transload.opening.elements.WINDOW", window)
    for swapped in (False, True):
        content = sharded(shape, cuts, width, swapped=swapped)
        result = b"".join(bytes(piece) for piece in content.chunks(content.checkpoint.tensors[0]))
        assert result == b"".join(element(value, width) for value in range(prod(shape)))


def test_missing_or_repeated_part_is_an_error() -> None:
    content = sharded((9, 4), ((3, 6), ()), 4)
    (tensor,) = content.checkpoint.tensors
    for parts in (tensor.parts[:2], (*tensor.parts, tensor.parts[0])):
        with pytest.raises(ContentError, match="x are incomplete"):
            list(content.chunks(tensor._replace(parts=parts)))


def test_repeated_part_does_not_replace_a_missing_one() -> None:
    content = sharded((9, 4), ((3, 6), ()), 4)
    (tensor,) = content.checkpoint.tensors
    twice = (tensor.parts[0], tensor.parts[1], tensor.parts[0])
    with pytest.raises(ContentError, match=r"no file has \[6:9\] of \[9"):
        list(content.chunks(tensor._replace(parts=twice)))


@each("shape", [(), (0, 3), (5,), (2, 2)], ids=str)
def test_parts_cover_a_tensor_if_each_element_is_in_exactly_one(shape: tuple[int, ...]) -> None:
    intervals = [tuple(itertools.combinations(range(size + 2), 2)) for size in shape]
    for count in range(3):
        for chosen in itertools.combinations(itertools.product(*intervals), count):
            parts, seen = [], Counter[tuple[int, ...]]()
            for spans in chosen:
                start, sizes = tuple(first for first, _ in spans), tuple(end - first for first, end in spans)
                parts.append(Tensor(("x", *start), "x", "uint8", sizes, contiguous(sizes), "cpu", "0", start=start))
                seen.update(itertools.product(*(range(*span) for span in spans)))
            tensor = Tensor(
                ("x",), "x", "uint8", shape, contiguous(shape), "cpu", None, kind="sharded", parts=(*parts,)
            )
            expected = Counter(itertools.product(*map(range, shape)))
            assert is_covered(tensor) == (seen == expected), chosen


@each("limit", [1, 2, 7, 24, 1000])
@each("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (1, 1, 24)], ids=str)
def test_boxes_are_in_row_major_order(shape: tuple[int, ...], limit: int) -> None:
    seen = []
    for box in boxes(shape, limit):
        assert prod(box.shape) <= limit
        ranges = (range(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
        seen += list(itertools.product(*ranges))
    assert seen == list(itertools.product(*map(range, shape)))


shapes = some.lists(some.integers(1, 5), max_size=4).map(tuple)


def below(size: int, most: int = 4) -> some.SearchStrategy[tuple[int, ...]]:
    return some.lists(some.integers(0, size), max_size=most).map(lambda cuts: tuple(sorted(cuts)))


@given(some.data(), shapes, some.integers(1, 3), some.sampled_from([16, 48, 1 << 20]))
def test_any_box_of_a_tensor_in_runs_has_its_elements(
    data: some.DataObject, shape: tuple[int, ...], step: int, window: int
) -> None:
    content = in_runs(shape, data.draw(below(prod(shape))), step)
    (tensor,) = content.checkpoint.tensors
    ends = [sorted(data.draw(some.tuples(some.integers(0, size), some.integers(0, size)))) for size in shape]
    box = Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))
    block = memoryview(bytearray(4 * prod(box.shape)))
    whole = Box((0,) * len(shape), box.shape)
    for read in content.reads(tensor, box):
        read.fill(block, whole)
    wanted = [flat_index(index, shape) for index in itertools.product(*(range(*span) for span in ends))]
    assert list(block.cast("i")) == wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transload.opening.elements.WINDOW", window)
        everything = b"".join(bytes(chunk) for chunk in content.chunks(tensor))
    assert list(memoryview(everything).cast("i")) == list(range(prod(shape)))


@given(shapes.flatmap(lambda shape: some.tuples(some.just(shape), below(prod(shape), 2))))
def test_a_run_is_few_boxes_in_order(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, cuts = case
    begin, end = (0, *cuts)[-2:] if cuts else (0, prod(shape))
    found = list(boxes_of_run(shape, begin, end))
    elements = [
        flat_index(index, shape)
        for box in found
        for index in itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape, strict=True)))
    ]
    assert elements == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_runs_cover_a_tensor_if_each_element_is_in_exactly_one() -> None:
    content = in_runs((3, 4), (2, 7))
    (tensor,) = content.checkpoint.tensors
    first, second, third = tensor.parts
    assert is_covered(tensor)
    rows = second._replace(shape=(2, 4), stride=(4, 1), start=(1, 0))
    assert is_covered(tensor._replace(parts=(first, first._replace(start=(2,)), rows)))  # runs and boxes
    for parts in (
        (first, third),
        (first, second, second, third),
        (first, second, third._replace(start=(8,))),
        (first, second, third._replace(start=(-5,))),
        (first, second, third._replace(start=None)),
        (first, second, third._replace(start=(1, 3))),
        (first, second, third, rows._replace(start=(1,))),
    ):
        assert not is_covered(tensor._replace(parts=parts)), parts


def test_parts_of_whole_rows_are_read_in_one_piece() -> None:
    content = in_runs((6, 8), (16, 24))
    source = content.open_file("")
    calls: list[int] = []
    read = source.readinto

    def counted(position: int, out: memoryview) -> int:
        calls.append(len(out))
        return read(position, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "readinto", counted)
        assert len(list(content.chunks(content.checkpoint.tensors[0]))) == 1
    assert calls == [64, 32, 96]
