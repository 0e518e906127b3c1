"""numpy's archives as a source: each ``.npy`` in one is a tensor, stored or deflated; numpy is not needed."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from transload.checkpoint import Storage, Tensor, contiguous
from transload.dtypes import ITEMSIZE
from transload.formats.zip import read_index
from transload.judge import judge
from transload.tensors import PackedStorages
from transload.tensors.content import Content
from transload.writing.arrays import NUMPY_DTYPES

if TYPE_CHECKING:
    from transload.checkpoint import Record

_DTYPES = {code[1:]: dtype for dtype, code in NUMPY_DTYPES.items()}
_MAX_HEADER = 10_000  # numpy's own limit: longer ones could take it long to parse
_SHAPE = rb"((?:\d{1,18}, ?)*(?:\d{1,18})?)"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=])(\w{1,9})', 'fortran_order': (True|False), 'shape': \(" + _SHAPE + rb"\), \} *\n"
)
_ESCAPED = re.compile(r"%(2E|2F|5C|3A|25|22|[01][0-9A-F])")  # what writing.plan.member_name writes


def as_checkpoint(content: Content) -> Content:
    """An archive of numpy as a checkpoint of its arrays; anything else as it is.

    A member that is not an array of plain numbers is a tensor of a kind that no format holds, so that it is named.
    """
    checkpoint = content.checkpoint
    if checkpoint.format != "npz":
        return content
    packed, source = PackedStorages(checkpoint), content.open_file("")
    root = read_index(source).root
    tensors: list[Tensor] = []
    storages: list[Storage] = []
    for record in checkpoint.records:
        storage = _storage(record)
        inflated = packed.open(storage, source) if storage.compressed else None
        if inflated is not None:
            head = inflated.read(0, _MAX_HEADER)
        else:
            head = b"" if storage.offset is None else source.read(storage.offset, min(record.stored, _MAX_HEADER))
        # The index gives names below the first folder, and those outside of it with a slash before them.
        inside = root and not record.name.startswith("/")
        tensor, big_endian = _tensor(f"{root}/{record.name}" if inside else record.name.removeprefix("/"), record, head)
        tensors.append(tensor)
        storages.append(storage._replace(dtype=tensor.dtype, tensors=(tensor.name,), big_endian=big_endian))
    problems = tuple(problem for problem in checkpoint.problems if problem.code != "not-a-checkpoint")
    read = replace(checkpoint, tensors=tuple(tensors), storages=tuple(storages), problems=problems, findings=())
    return Content(judge(replace(read, integrity="unchecked")), content.open_file, None, content.parts)


def _storage(record: Record) -> Storage:
    """All of a member, with its header."""
    name, size, deflated = record.name, record.size, record.method == 8
    offset = None if deflated or record.method else record.offset
    return Storage(name, name, "cpu", "uint8", size, size, offset, name, "", record.crc32, compressed=deflated)


def _tensor(member: str, record: Record, head: bytes) -> tuple[Tensor, bool]:
    """The array in a member, which begins where its header ends, and whether it is big-endian."""
    name = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), member.removesuffix(".npy"))
    nothing = Tensor((name,), name, "uint8", (0,), (1,), "cpu", None, kind="not an array of plain numbers")
    wide = 2 if head[6:7] == b"\1" else 4
    start = 8 + wide + int.from_bytes(head[8 : 8 + wide], "little")
    match = _HEADER.fullmatch(head[8 + wide : start])
    dtype = _DTYPES.get(match[2].decode("ascii", "replace")) if match else None
    if not match or dtype is None or not member.endswith(".npy") or not head.startswith(b"\x93NUMPY"):
        return nothing, False
    shape = tuple(int(size) for size in match[4].split(b",") if size.strip())
    width = ITEMSIZE[dtype]
    if start % width or record.size - start != prod(shape) * width:
        return nothing, False
    stride = contiguous(shape[::-1])[::-1] if match[3] == b"True" else contiguous(shape)
    return Tensor((name,), name, dtype, shape, stride, "cpu", record.name, start // width), match[1] == b">"
