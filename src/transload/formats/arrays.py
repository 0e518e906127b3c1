"""Arrays, scalars and dtypes of numpy in pickles; numpy is not needed.

``dtype_of`` and ``array_of`` read the calls that make them. The caller compares their size with that of the bytes,
which ``raw_bytes`` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transload.checkpoint import contiguous
from transload.formats.tensors import called, dotted
from transload.frozen import NamedTuple
from transload.nodes import Call, Pickle

_CORES = ("numpy._core", "numpy.core")
_RECONSTRUCT = frozenset({f"{core}.multiarray._reconstruct" for core in _CORES})
_FROM_BUFFER = frozenset({f"{core}.numeric._frombuffer" for core in _CORES})
NUMPY_SCALARS = frozenset({f"{core}.multiarray.scalar" for core in _CORES})
NUMPY_CALLS = frozenset({"numpy.dtype", *_RECONSTRUCT, *_FROM_BUFFER, *NUMPY_SCALARS})
"""The functions that make arrays, scalars and dtypes."""

_CODE = re.compile(r"[biufcmMOSUV][0-9]{1,9}", re.ASCII)
_PLAIN_CODE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SUV][0-9]+", re.ASCII)
_ENDIANS = ("<", ">", "|", "=")
_OBJECTS = 1  # a flag of a dtype: its elements are references
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62  # of a dimension: an empty array can have any size along the others
_BYTES = frozenset({"builtins.bytes", "__builtin__.bytes"})


class Dtype(NamedTuple):
    """A dtype: ``code`` is its kind and size (``f8``). A ``plain`` one has no fields, shape, unit or objects."""

    code: str
    big_endian: bool
    itemsize: int
    plain: bool
    objects: bool


class Array(NamedTuple):
    """An array; ``stride`` is in elements, ``data`` is the node with its bytes."""

    dtype: Dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: Any


def dtype_of(node: Any) -> Dtype | None:
    """The dtype that a call makes; ``None`` for a call that numpy does not write, whose result is uncertain."""
    if type(node) is not Call or called(node) != "numpy.dtype" or node.kind != "reduce" or node.items or node.appended:
        return None
    args: Any = node.args if type(node.args) is tuple and len(node.args) <= 3 else ()
    code = args[0] if args else None
    if type(code) is not str or not _CODE.fullmatch(code) or len(node.states or ()) > 1:
        return None
    itemsize = int(code[1:]) * (4 if code[0] == "U" else 1)
    state: Any = (3, "=", None, None, None, itemsize, -1, 0)
    if node.states:
        # numpy ignores the state of a dtype that is not a copy. The size in it counts for some kinds, and its flags
        # show whether there are objects.
        state = node.states[0]
        if args[1:] != (False, True) or type(state) is not tuple or not 5 <= len(state) <= 9:
            return None
    size, flags = (*state[5:6], -1)[0], (*state[7:8], 0)[0]
    if type(flags) is not int or size not in ((itemsize,) if code[0] in "SUV" else (itemsize, -1)):
        return None
    if state[1] not in _ENDIANS:
        return None
    objects = bool(flags & _OBJECTS)
    plain = not any(state[2:5]) and not any(state[8:]) and not objects and _PLAIN_CODE.fullmatch(code) is not None
    return Dtype(code, state[1] == ">", itemsize, plain, objects)


def are_plain(pickles: Iterable[Pickle]) -> bool:
    """Whether all arrays, scalars and dtypes in some pickles are plain: ``transload.load`` makes no others as data."""
    for call in (call for pickle in pickles for call in pickle.calls if called(call) in NUMPY_CALLS):
        dtype = dtype_of(call)
        if not (dtype.plain if dtype is not None else array_of(call) is not None):
            return False
    return True


def array_of(node: Call) -> Array | None:
    """The plain array that a call makes; a scalar has no dimensions. ``None`` for any other call."""
    name, args = called(node), node.args
    if type(args) is not tuple or node.items or node.appended or node.kind != "reduce":
        return None
    described: Any
    axes: Any = None
    if name in _RECONSTRUCT and len(args) == 3 and dotted(args[0]) == "numpy.ndarray":
        state = node.states[0] if node.states and len(node.states) == 1 else None
        if type(state) is not tuple or len(state) != 5:
            return None
        _, shape, described, fortran, data = state
    elif name in _FROM_BUFFER and len(args) in (4, 5) and args[3] in ("C", "F", "K") and not node.states:
        data, described, shape, order, axes = (*args, None)[:5]
        fortran = order == "F"
        if (order == "K") != (type(axes) is tuple):
            return None
    elif name in NUMPY_SCALARS and len(args) == 2 and not node.states:
        shape, fortran, (described, data) = (), False, args
    else:
        return None
    dtype, sizes = dtype_of(described), shape_of(shape)
    if dtype is None or not dtype.plain or sizes is None:
        return None
    axes = tuple(range(len(sizes))) if axes is None else axes
    if any(type(axis) is not int for axis in axes) or sorted(axes) != [*range(len(sizes))]:
        return None
    stride = contiguous(sizes[::-1])[::-1] if fortran else contiguous(sizes)
    return Array(dtype, tuple(sizes[axis] for axis in axes), tuple(stride[axis] for axis in axes), data)


def shape_of(shape: Any) -> tuple[int, ...] | None:
    """The shape of an array, which may be a single number; ``None`` if it is not valid."""
    sizes = (shape,) if type(shape) is int else shape
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMENSIONS:
        return None
    return sizes if all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes) else None


def raw_bytes(node: Any) -> bytes | bytearray | None:
    """Bytes, also in the form of protocol 2 (a Latin-1 text, or a call if they are empty); else ``None``."""
    if type(node) is Call and called(node) in _BYTES and node.args == ():
        return b""
    encoding = "utf-8"  # as which a text that Python 2 wrote was decoded
    if type(node) is Call and called(node) == "_codecs.encode" and type(node.args) is tuple and node.args:
        node, encoding = node.args[0], "latin-1"
    if type(node) is str:
        try:
            return node.encode(encoding)
        except UnicodeEncodeError:
            return None
    return node if type(node) in (bytes, bytearray) else None
