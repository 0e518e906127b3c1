"""numpy's files: a ``.npy`` is a header and the numbers of one array, an ``.npz`` a zip archive of them.

numpy is not needed. What is not an array of plain numbers (objects, texts, fields) is listed with its kind and a
problem, without a storage. An array of Python objects is a pickle, which is not read.
"""

from __future__ import annotations

import re
from math import prod
from zlib import crc32

from transload.checkpoint import Checkpoint, Draft, Record, Storage, Tensor, contiguous
from transload.dtypes import FROM_NUMPY, ITEMSIZE
from transload.findings import LimitedProblems
from transload.formats.torch_zip import Archive
from transload.formats.zip import DEFLATED, FOLDER_PROBLEMS, full_name
from transload.io.checksums import crc32_combine
from transload.io.sources import Source

MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # numpy's limit
_SHAPE = rb"((?:\d{1,18}, ?)*(?:\d{1,18})?)"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=])(\w{1,9})', 'fortran_order': (True|False), 'shape': \(" + _SHAPE + rb"\), \} *\n"
)
# Headers of arrays that certainly contain no objects: of a plain type, or of fields with plain types. numpy evaluates
# the header as Python, so there are many other spellings.
_TYPE = rb"'[<>|=][SUVMmbiufc]\d*(?:\[\w+\])?'"
_FIELD = rb"\('[^'\\\"]*', " + _TYPE + rb"(?:, \([\d, ]*\))?\)"
_NO_OBJECTS = re.compile(
    rb"\{'descr': (?:" + _TYPE + rb"|\[" + _FIELD + rb"(?:, " + _FIELD + rb")*\]), "
    rb"'fortran_order': (?:True|False), 'shape': \([\d, ]*\), \} *\n"
)
_ESCAPED = re.compile(r"%(2E|2F|5C|3A|25|22|[01][0-9A-F])")  # what writing.plan.member_name writes


def read_npy(source: Source) -> Checkpoint | None:
    """Read a ``.npy`` file: one array, without a name; ``None`` if it does not begin with the header of an array."""
    head, noted = source.read(0, _MAX_HEADER), LimitedProblems()
    if not _split(head)[0]:
        return None
    out = Draft(source.name, "npy", source.size)
    _add_array(out, (), Record("", 0, source.size, source.size), head, noted)
    return out.checkpoint(problems=noted.problems())


def read_npz(archive: Archive) -> Checkpoint:
    """Read the arrays of an archive; each has the name of its member."""
    noted = LimitedProblems()
    problems = [problem for problem in archive.problems if problem.code not in FOLDER_PROBLEMS]
    out = Draft(archive.path, "npz", archive.nbytes, problems)
    out.records = tuple(archive.records.values())
    for record in out.records:
        member = full_name(archive.root, record.name)
        name = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), member.removesuffix(".npy"))
        head = archive.head(record, _MAX_HEADER) if member.endswith(".npy") else b""
        _add_array(out, (name,), record, head, noted)
    out.problems += noted.problems()
    return out.checkpoint()


def _split(head: bytes) -> tuple[bytes, int]:
    """The header of an array, empty if there is none, and where the numbers begin."""
    wide = 2 if head[6:7] == b"\1" else 4
    start = 8 + wide + int.from_bytes(head[8 : 8 + wide], "little")
    text = head[8 + wide : start]
    whole = head.startswith(MAGIC) and text.startswith(b"{") and text.endswith(b"\n") and start <= len(head)
    return text if whole else b"", start


def _add_array(out: Draft, path: tuple[str, ...], record: Record, head: bytes, noted: LimitedProblems) -> None:
    """Add the array in a record, which begins with ``head``."""
    name = "".join(path)
    text, start = _split(head)
    match = _HEADER.fullmatch(text)
    dtype = FROM_NUMPY.get(match[2].decode("ascii", "replace")) if match else None
    shape = tuple(int(size) for size in match[4].split(b",") if size.strip()) if match else ()
    width = ITEMSIZE.get(dtype or "", 1)
    held = record.size - start
    problem = ""
    if not match or dtype is None:
        plain = not head.startswith(MAGIC) or _NO_OBJECTS.fullmatch(text)
        problem = "npy-not-numbers" if plain else "npy-objects"
        kind = "an array of Python objects" if problem == "npy-objects" else "not an array of plain numbers"
        shown = text.decode("ascii", "replace").strip()[:200]
    elif held != prod(shape) * width or start % width:
        problem, kind = "npy-size", "not as long as its header says"
        shown = f"{dtype} {list(shape)[:8]} has {prod(shape) * width:,} bytes, and {max(held, 0):,} are there"
    if problem or not match or dtype is None:
        noted.add(problem, name, shown)
        out.tensors.append(Tensor(path, name, "uint8", (0,), (1,), "cpu", None, kind=kind))
        return
    stride = contiguous(shape[::-1])[::-1] if match[3] == b"True" else contiguous(shape)
    offset, nbytes, crc, first = record.offset, record.size, record.crc32, 0
    packed = record.method == DEFLATED
    if packed:
        offset, first = None, start // width
    elif offset is not None:  # the numbers alone, and their checksum
        offset, nbytes = offset + start, held
        crc = None if crc is None else crc32_combine(crc32(head[:start]), 0, held) ^ crc
    key, big_endian = record.name or "0", match[1] == b">"
    storage = (key, key, "cpu", dtype, nbytes, nbytes, offset, record.name, "", crc, packed, big_endian, (name,))
    out.tensors.append(Tensor(path, name, dtype, shape, stride, "cpu", key, first, file_offset=offset))
    out.storages.append(Storage(*storage))
