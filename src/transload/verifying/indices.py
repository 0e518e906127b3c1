"""Sparse tensors whose indices point outside of them: the bytes are as saved, and using them touches foreign memory.

Some releases of torch look at this when they load (2.6, and 2.15 under ``weights_only``), others do not (2.13).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from transload.content import Allowance
from transload.errors import TransloadError

if TYPE_CHECKING:
    from transload.checkpoint import Tensor
    from transload.content import Content

__all__ = ["misplaced"]

_PIECE = 1 << 20
_CODES = {"int64": "q", "int32": "i"}
_COMPRESSED = {"sparse_csr": 1, "sparse_bsr": 1, "sparse_csc": 0, "sparse_bsc": 0}  # the axis plain indices run along


class _OutsideError(Exception):
    """What is wrong with the indices."""


def misplaced(content: Content) -> dict[str, tuple[str, str]]:
    """The sparse tensors, by name, whose parts do not go together, and why. Those that cannot be read are not here."""
    allowance = Allowance(content.checkpoint)
    found = ((tensor.name, _wrong(content, tensor, allowance)) for tensor in _sparse(content.checkpoint.tensors))
    return {name: ("broken", why) for name, why in found if why}


def _wrong(content: Content, tensor: Tensor, allowance: Allowance) -> str:
    try:
        for part in tensor.parts[:-1]:
            allowance.spend(part)
        _check(content, tensor)
    except _OutsideError as error:
        return str(error)
    except TransloadError:  # a matter of the bytes, which are looked at as of any other tensor
        return ""
    return ""


def _sparse(tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.kind == "sparse_coo" or tensor.kind in _COMPRESSED:
            yield tensor
        elif tensor.parts:
            yield from _sparse(tensor.parts)


def _check(content: Content, tensor: Tensor) -> None:
    if any(part.dtype not in _CODES for part in tensor.parts[:-1]):
        raise _OutsideError("its indices are no whole numbers")
    if tensor.kind == "sparse_coo":
        _check_coordinates(content, tensor)
    else:
        _check_compressed(content, tensor)


def _check_coordinates(content: Content, tensor: Tensor) -> None:
    indices, values = tensor.parts
    size = tensor.shape
    if len(indices.shape) != 2 or indices.shape[0] > len(size):
        raise _OutsideError(f"its indices have the shape {indices.shape}, and it the shape {size}")
    axes, count = indices.shape
    if values.shape != (count, *size[axes:]):
        raise _OutsideError(f"it has {count:,} indices, and values of the shape {values.shape}")
    numbers = _numbers(content, indices)
    for axis in range(axes):
        _check_range(islice(numbers, count), size[axis], axis)


def _check_range(numbers: Iterator[int], size: int, axis: int) -> None:
    odd = next((number for number in numbers if not 0 <= number < size), None)
    if odd is not None:
        raise _OutsideError(f"an index is {odd}, and axis {axis} has {size:,} places")


def _check_compressed(content: Content, tensor: Tensor) -> None:
    """Rows of a CSR tensor; of the others what stands for them: columns, or rows and columns of blocks."""
    compressed, plain, values = tensor.parts
    batch, count = plain.shape[:-1], plain.shape[-1] if plain.shape else 0
    rank = len(batch)
    along = _COMPRESSED[tensor.kind]
    size = tensor.shape[rank : rank + 2]
    block = values.shape[rank + 1 : rank + 3] if tensor.kind in ("sparse_bsr", "sparse_bsc") else (1, 1)
    if len(size) != 2 or len(block) != 2 or 0 in block or values.shape[: rank + 1] != plain.shape:
        raise _OutsideError("its parts do not fit together")
    rows, columns = size[1 - along] // block[1 - along], size[along] // block[along]
    if compressed.shape != (*batch, rows + 1):
        raise _OutsideError(f"it has {rows:,} rows, and their ends have the shape {compressed.shape}")
    ends, places = _numbers(content, compressed), _numbers(content, plain)
    for _ in range(prod(batch)):
        _check_rows(islice(ends, rows + 1), islice(places, count), count, columns)


def _check_rows(ends: Iterator[int], places: Iterator[int], count: int, columns: int) -> None:
    begin = next(ends)
    if begin:
        raise _OutsideError(f"its first row begins at {begin}")
    for end in ends:
        if not begin <= end <= min(begin + columns, count):
            raise _OutsideError(
                f"a row reaches from {begin:,} to {end:,}, with {columns:,} columns and {count:,} values"
            )
        last = -1
        for place in islice(places, end - begin):
            if not last < place < columns:
                raise _OutsideError(f"an index is {place}, after {last}, in a row of {columns:,}")
            last = place
        begin = end
    if begin != count:
        raise _OutsideError(f"its rows have {begin:,} values of {count:,}")


def _numbers(content: Content, tensor: Tensor) -> Iterator[int]:
    for piece in content.pieces(tensor, _PIECE):
        held = array(_CODES[tensor.dtype], bytes(piece))
        if sys.byteorder == "big":
            held.byteswap()
        yield from held
