"""numpy's arrays, scalars and dtypes in pickles, and its files; numpy is not needed.

``dtype_of`` and ``array_of`` read the calls of a pickle that make them. The caller compares their size with that of the
bytes, which ``raw_bytes`` returns.

A ``.npy`` file is a header and the numbers of one array, an ``.npz`` a zip archive of them. What is not an array of
plain numbers (objects, texts, fields) is listed with its kind and a problem, without a storage. An array of Python
objects is a pickle, which is judged and not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

from transload.checkpoint import Checkpoint, Draft, Record, Storage, Tensor
from transload.dtypes import FROM_NUMPY, ITEMSIZE
from transload.findings import LimitedProblems
from transload.formats.pickle_machine import MAX_STREAM
from transload.formats.pickle_state import LONG_FRAME
from transload.formats.pickle_streams import run_all
from transload.formats.torch_zip import Archive
from transload.formats.zip import DEFLATED, FOLDER_PROBLEMS, Payload, full_name, read_payload
from transload.frozen import NamedTuple
from transload.geometry import MAX_DIMENSIONS, contiguous
from transload.io.checksums import crc32_combine
from transload.io.sources import Source
from transload.nodes import Call, Dict, Pickle, called, calls_of, dotted

_CORES = ("numpy._core", "numpy.core")
_RECONSTRUCT = frozenset({f"{core}.multiarray._reconstruct" for core in _CORES})
_FROM_BUFFER = frozenset({f"{core}.numeric._frombuffer" for core in _CORES})
NUMPY_SCALARS = frozenset({f"{core}.multiarray.scalar" for core in _CORES})
# The functions that make arrays, scalars and dtypes.
NUMPY_CALLS = frozenset({"numpy.dtype", *_RECONSTRUCT, *_FROM_BUFFER, *NUMPY_SCALARS})
_CODE = re.compile(r"[biufcmMOSUV][0-9]{1,9}", re.ASCII)
_PLAIN_CODE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SUV][0-9]+", re.ASCII)
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_ENDIANS = ("<", ">", "|", "=")
_OBJECTS = 1  # a flag of a dtype: its elements are references
_MAX_SIZE = 1 << 62  # of a dimension: an empty array can have any size along the others
_BYTES = frozenset({"builtins.bytes", "__builtin__.bytes"})


class Dtype(NamedTuple):
    """A dtype: ``code`` is its kind and size (``f8``). A ``plain`` one has no fields, shape or objects.

    The code of dates and spans of time ends in their unit (``M8[5s]``).
    """

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
    sizes = (itemsize,) if code[0] in "SUV" else (itemsize, -1)
    if type(flags) is not int or size not in sizes or state[1] not in _ENDIANS:
        return None
    objects = bool(flags & _OBJECTS)
    plain = not any(state[2:5]) and not objects
    if code in ("M8", "m8"):
        unit = _unit(state[8]) if len(state) == 9 else ""
        code, plain = f"{code}[{unit}]" if unit else code, plain and bool(unit)
    else:
        plain = plain and not any(state[8:]) and _PLAIN_CODE.fullmatch(code) is not None
    return Dtype(code, state[1] == ">", itemsize, plain, objects)


def _unit(metadata: Any) -> str:
    """The unit of dates and spans of time, ``5s``; empty for metadata that numpy does not write for them."""
    match metadata:
        case None | Dict(items=[]), (unit, int(count), 1, 1) if 0 < count < 1 << 31:
            name = (raw_bytes(unit) or b"").decode("ascii", "replace")
            return f"{count}{name}" if name in _UNITS else name if (name, count) == ("generic", 1) else ""
    return ""


def are_plain(pickles: Iterable[Pickle]) -> bool:
    """Whether all arrays, scalars and dtypes in some pickles are plain: ``transload.load`` builds only such as data."""
    calls = (call for pickle in pickles for call in calls_of(pickle, NUMPY_CALLS))
    return all(dtype.plain if (dtype := dtype_of(call)) is not None else array_of(call) is not None for call in calls)


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
    if type(sizes) is not tuple or len(sizes) > MAX_DIMENSIONS:
        return None
    return sizes if all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes) else None


def raw_bytes(node: Any) -> bytes | bytearray | None:
    """Bytes, also in the form of protocol 2 (a Latin-1 text, or a call if they are empty); else ``None``."""
    if type(node) is Call and called(node) in _BYTES and node.args == ():
        return b""
    encoding = "utf-8"  # the machine decodes a text of Python 2 as UTF-8
    if type(node) is Call and called(node) == "_codecs.encode" and type(node.args) is tuple and node.args:
        node, encoding = node.args[0], "latin-1"
    if type(node) is str:
        try:
            return node.encode(encoding)
        except UnicodeEncodeError:
            return None
    return node if type(node) in (bytes, bytearray) else None


# -- files

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # numpy's limit
_SHAPE = rb"((?:\d{1,18}, ?)*(?:\d{1,18})?)"
_HEADER = rb"\{'descr': '([<>|=])(\w{1,9})', 'fortran_order': (True|False), 'shape': \(" + _SHAPE + rb"\), \} *\n"
# Headers of arrays that certainly contain no objects: of a plain type, or of fields with plain types. numpy evaluates
# the header as Python, so there are many other spellings.
_TYPE = rb"'[<>|=][SUVMmbiufc]\d*(?:\[\w+\])?'"
_FIELD = rb"\('[^'\\\"]*', " + _TYPE + rb"(?:, \([\d, ]*\))?\)"
_DESCRIPTION = rb"(?:" + _TYPE + rb"|\[" + _FIELD + rb"(?:, " + _FIELD + rb")*\])"
_NO_OBJECTS = rb"\{'descr': " + _DESCRIPTION + rb", 'fortran_order': (?:True|False), 'shape': \([\d, ]*\), \} *\n"
# What an array that does not consist of numbers contains, by the first letter of its type.
_OTHER_KINDS = {
    b"U": "strings",
    b"S": "byte strings",
    b"[": "records",
    b"M": "dates",
    b"m": "durations",
    b"V": "raw bytes",
}
_ESCAPED = r"%(2E|2F|5C|3A|25|22|[01][0-9A-F])"  # what writing.plan.member_name writes


def read(source: Source) -> Checkpoint | None:
    """Read a ``.npy`` file: one array, without a name; ``None`` if it does not begin with the header of an array."""
    head, noted = source.read(0, _MAX_HEADER), LimitedProblems()
    if not _split(head)[0]:
        return None
    out, record = Draft(source.name, "npy", source.size), Record("", 0, source.size, source.size)
    _add_array(out, (), record, head, noted, partial(read_payload, source, record, MAX_STREAM))
    return out.checkpoint(problems=noted.problems())


def read_npz(archive: Archive) -> Checkpoint:
    """Read the arrays of an archive; each has the name of its member."""
    noted = LimitedProblems()
    problems = [problem for problem in archive.problems if problem.code not in FOLDER_PROBLEMS]
    out = Draft(archive.path, "npz", archive.nbytes, problems)
    out.records = tuple(archive.records.values())
    for record in out.records:
        member = full_name(archive.root, record.name)
        name = re.sub(_ESCAPED, lambda escape: chr(int(escape[1], 16)), member.removesuffix(".npy"))
        head = archive.head(record, _MAX_HEADER) if member.endswith(".npy") else b""
        _add_array(out, (name,), record, head, noted, partial(archive.read_pickled, record))
    codes = {problem.code for problem in problems}
    if archive.source is not None and "zip-walked" in codes and "zip-record-cut" not in codes:
        # Only the directory lists all arrays. If at least its beginning follows the last one, none is missing.
        end = max(((record.offset or 0) + record.stored for record in out.records), default=0)
        if b"PK\1\2" not in archive.source.read(end, 64):  # a descriptor may come first
            out.problems.add("zip-record-cut", detail="arrays after the last one that was found may be missing")
    out.problems += noted.problems()
    return out.checkpoint()


def _split(head: bytes) -> tuple[bytes, int]:
    """The header of an array, empty if there is none, and where the numbers begin."""
    wide = 2 if head[6:7] == b"\1" else 4
    start = 8 + wide + int.from_bytes(head[8 : 8 + wide], "little")
    text = head[8 + wide : start]
    whole = head.startswith(_MAGIC) and text.startswith(b"{") and text.endswith(b"\n") and start <= len(head)
    return text if whole else b"", start


def _add_array(
    out: Draft, path: tuple[str, ...], record: Record, head: bytes, noted: LimitedProblems, read: Callable[[], Payload]
) -> None:
    """Add the array in a record, which begins with ``head``; ``read`` reads it whole."""
    name = "".join(path)
    text, start = _split(head)
    match = re.fullmatch(_HEADER, text)
    dtype = FROM_NUMPY.get(match[2].decode("ascii", "replace")) if match else None
    shape = tuple(int(size) for size in match[4].split(b",") if size.strip()) if match else ()
    width = ITEMSIZE.get(dtype or "", 1)
    available = record.size - start
    if match and dtype is not None and available == prod(shape) * width and start % width == 0:
        stride = contiguous(shape[::-1])[::-1] if match[3] == b"True" else contiguous(shape)
        offset, nbytes, crc, first = record.offset, record.size, record.crc32, 0
        stored, packed = nbytes, record.method == DEFLATED
        if packed:
            offset, first = None, start // width
        elif offset is not None:  # the numbers alone, and their checksum
            offset, nbytes, stored = offset + start, available, max(0, min(available, record.stored - start))
            crc = None if crc is None else crc32_combine(crc32(head[:start]), 0, available) ^ crc
        key, big_endian = record.name or "0", match[1] == b">"
        storage = (key, key, "cpu", dtype, nbytes, stored, offset, record.name, "", crc, packed, big_endian)
        out.tensors.append(Tensor(path, name, dtype, shape, stride, "cpu", key, first, file_offset=offset))
        out.storages.append(Storage(*storage, tensors=(name,)))
        if stored < nbytes:
            noted.add("storage-cut", name, f"{stored} of {nbytes} bytes are in the file")
        return
    problem, kind, shown = "npy-objects", "an array of Python objects", text.decode("ascii", "replace").strip()[:200]
    if match and dtype is not None:
        problem, kind = "npy-size", "not as long as its header says"
        shown = f"{dtype} {list(shape)[:8]} needs {prod(shape) * width:,} bytes, but it has {max(available, 0):,}"
    elif not head.startswith(_MAGIC) or re.fullmatch(_NO_OBJECTS, text):
        problem, kind = "npy-not-numbers", "not an array of plain numbers"
        letter = re.match(rb"\{'descr': (?:'.)?(.)", text)
        content = _OTHER_KINDS.get(letter[1]) if letter else None
        shown = f"an array of {content}" if content else shown
    noted.add(problem, name, shown)
    if problem == "npy-objects":
        payload = read()
        if payload.problem:
            noted.add("record-unseen", name, payload.problem)
        pickles = run_all(payload.data[start:], record.name)
        out.pickles += [pickle for pickle in pickles if pickle.globals or pickle.extensions]
        texts = [text for pickle in pickles for _, text in pickle.ambiguous if text != LONG_FRAME or not pickle.cut]
        if texts:
            noted.add("pickle-ambiguous", name, texts[0])
    out.tensors.append(Tensor(path, name, "uint8", (0,), (1,), "cpu", None, kind=kind))
