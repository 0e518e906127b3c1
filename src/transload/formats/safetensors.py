"""safetensors: a length, a JSON table, and the tensors' bytes.

The reference is the ``safetensors`` package (https://github.com/huggingface/safetensors). If it opens a file, names,
dtypes, shapes and byte ranges are the same here; if it refuses a file, that is read as far as possible, with a problem.
"""

from __future__ import annotations

from collections.abc import Container
from operator import attrgetter
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Storage, Tensor
from transload.dtypes import ITEMSIZE, SAFETENSORS
from transload.findings import LimitedProblems, join_names
from transload.frozen import NamedTuple
from transload.geometry import contiguous
from transload.io.sources import Source

PREFIX = 8
MAX_HEADER = 100_000_000  # the reference's limit; without one, a length of 2**60 would allocate as much memory
MAX_PLAUSIBLE = 1 << 40  # a file with a header of up to this length is still safetensors, with a problem
MAX_COUNT = 1 << 64  # the reference counts in 64 bits, and refuses what does not fit
# __metadata__ is text of any size: a report shows its beginning.
MAX_METADATA_SHOWN = 50
MAX_METADATA_TEXT = 500

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key of the metadata that says where the pieces of a rank begin."""

FIELDS = ("dtype", "shape", "data_offsets")
_FIELD_SET = frozenset(FIELDS)
_LAYOUT = ("safetensors-hole", "safetensors-overlap", "safetensors-truncated", "safetensors-trailing")
_new = tuple.__new__  # makes a named tuple without calling its __new__, which is a Python function
BITS = {name: 8 * ITEMSIZE[dtype] for name, dtype in SAFETENSORS.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class HeaderEntry(NamedTuple):
    """A checked entry of the header; the tensor is from ``begin`` to ``end`` of the data.

    A ``broken`` entry has a name, dtype and shape, but its offsets cannot be used.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    broken: bool = False


def looks_like_safetensors(source: Source) -> bool:
    """Whether the first bytes are a plausible header length and the beginning of a JSON object."""
    head = source.read(0, PREFIX + 64)
    length = int.from_bytes(head[:PREFIX], "little")
    if len(head) < PREFIX + 1 or length < 2:  # the shortest object is {}
        return False
    text = head[PREFIX : PREFIX + length]
    if length > MAX_HEADER:
        return length < MAX_PLAUSIBLE and text.startswith(b'{"')
    return text.lstrip(b" \t\r\n").startswith(b"{")


def read(source: Source) -> Checkpoint | None:
    """Read a safetensors file; ``None`` if it does not look like one."""
    return read_safetensors(source) if looks_like_safetensors(source) else None


def read_safetensors(source: Source) -> Checkpoint:
    """Read the header of a safetensors file.

    Never raises for bad content. A truncated file also has all its tensors listed; those that are not complete have
    ``storage.stored < storage.nbytes``.
    """
    out, noted = Draft(source.name, "safetensors", source.size), LimitedProblems()
    length = int.from_bytes(source.read(0, PREFIX), "little")
    left = max(source.size - PREFIX, 0)
    header = b""
    if length > MAX_HEADER:
        noted.add("safetensors-header-too-large", "header", f"it claims {length:,} bytes; the limit is {MAX_HEADER:,}")
    elif length > left:
        noted.add("safetensors-header-cut", "header", f"it is {length:,} bytes long, but the file has {left:,}")
    else:
        header = source.read(PREFIX, length)
        if not header:
            noted.add("safetensors-header-invalid", "header", "it is empty")
        elif not header.startswith(b"{"):
            noted.add("safetensors-odd-header", "header", "it does not begin with {")
    table = _parse(header, noted) if header else {}
    out.facts.append(("header", f"{length:,} bytes"))
    metadata = table.pop("__metadata__", None)
    if isinstance(metadata, dict) and all(type(value) is str for value in metadata.values()):
        out.facts.append(("metadata", "1 entry" if len(metadata) == 1 else f"{len(metadata):,} entries"))
        shown = list(metadata.items())[:MAX_METADATA_SHOWN]
        out.facts += [(f"metadata.{_cut(key)}", _cut(value)) for key, value in shown]
        if SHARDING_INFO in metadata:
            who = "HuggingFaceStorageWriter saved one file for each rank"
            noted.add("rank-file", "", f"{who}; this one has the pieces that begin at {_cut(metadata[SHARDING_INFO])}")
    elif metadata is not None:
        noted.add("safetensors-metadata-invalid", "header › __metadata__", "it must map text to text")
    read = (_entry(name, raw, noted) for name, raw in table.items())
    entries = sorted((entry for entry in read if entry is not None), key=attrgetter("begin", "end"))
    start = PREFIX + length
    if header and not noted.has("safetensors-header-invalid"):
        check_layout(entries, source.size - start, noted)
    for entry in entries:
        kind, shape = entry.dtype, entry.shape
        dtype = SAFETENSORS.get(kind, kind)
        if kind == "F4" and shape and shape[-1] % 2 == 0:  # an element of torch's float4_e2m1fn_x2 is a pair
            shape = (*shape[:-1], shape[-1] // 2)
        elif kind == "F4" or (kind in BITS and kind not in SAFETENSORS):
            dtype = kind
            noted.add("safetensors-dtype-not-in-torch", _at(entry.name), f"{kind} {list(shape)[:8]}")
        add_tensor(out, entry, dtype, shape, start)
    return out.checkpoint(problems=noted.problems())


def header_metadata(source: Source) -> dict[str, str]:
    """All texts of ``__metadata__``; the facts of a checkpoint only have the beginning."""
    length = int.from_bytes(source.read(0, PREFIX), "little")
    metadata = _parse(source.read(PREFIX, min(length, MAX_HEADER)), LimitedProblems()).get("__metadata__")
    return {key: value for key, value in metadata.items() if type(value) is str} if isinstance(metadata, dict) else {}


def aliases_in(metadata: dict[str, str], names: Container[str]) -> dict[str, str]:
    """Further names of tied tensors, with those they are stored under, as ``safetensors.torch.save_model`` writes them.

    >>> aliases_in({"format": "pt", "lm_head.weight": "embed.weight"}, {"embed.weight"})
    {'lm_head.weight': 'embed.weight'}
    """
    pairs = metadata.items()
    return {alias: name for alias, name in pairs if name in names and alias not in names and alias != "format"}


def _parse(header: bytes, noted: LimitedProblems) -> dict[str, object]:
    """Parse JSON as the reference does, which is stricter than Python on numbers and surrogates."""
    import json

    repeated: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(items)
        if len(table) != len(items):
            seen: set[str] = set()
            for name, _ in items:
                (repeated.append if name in seen else seen.add)(name)
        return table

    try:
        # Only -0 needs the hook for integers, without which parsing is twice as fast.
        hooks: Any = {"parse_int": _number if b"-0" in header else int, "parse_float": _number}
        table = json.loads(header.decode("utf-8"), object_pairs_hook=pairs, parse_constant=_number, **hooks)
        if b"\\ud" in header.lower():
            # Python's parser accepts lone surrogates, which cannot be written to a terminal or file.
            json.dumps(table, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        noted.add("safetensors-header-invalid", "header", "its brackets are nested too deeply")
        return {}
    except ValueError as error:
        # Python's message for a number of 5,000 digits is for programmers.
        reason = "it is not JSON: " + ("a number is out of range" if "digits" in str(error) else str(error))
        if isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
            reason = f"it is not UTF-8: {error.reason}"
        noted.add("safetensors-header-invalid", "header", reason)
        return {}
    if repeated:
        noted.add("safetensors-duplicate-key", "header", f"given more than once: {join_names(repeated)}")
    if not isinstance(table, dict):
        noted.add("safetensors-header-invalid", "header", "it is not a JSON object")
        return {}
    return table


def _number(text: str) -> int | float:
    """A JSON number. For the reference, -0 is a float, which no field accepts."""
    if text.endswith(("NaN", "Infinity")):
        raise ValueError(f"{text} is not JSON")
    value = int(text) if text.removeprefix("-").isdecimal() and text != "-0" else float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is out of range")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_METADATA_TEXT else text[:MAX_METADATA_TEXT] + "…"


def _at(name: str) -> str:
    return f"header › {_cut(name)}"


def _entry(name: str, raw: Any, noted: LimitedProblems) -> HeaderEntry | None:
    """An entry, checked field by field; ``None`` if its dtype and shape are not valid."""
    is_array = type(raw) is list and len(raw) == len(FIELDS)  # one of two unusual forms that the reference accepts
    fields: dict[str, Any] = raw if type(raw) is dict else dict(zip(FIELDS, raw, strict=True)) if is_array else {}
    dtype: Any = fields.get("dtype")
    sizes: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if is_array or (fields is raw and not (type(dtype) is str and raw.keys() <= _FIELD_SET)):
        noted.add("safetensors-odd-header", _at(name), "no writer spells an entry like this")
        if type(dtype) is dict and list(dtype.values()) == [None]:  # the other form
            dtype = next(iter(dtype))
    fine = type(dtype) is str and type(sizes) is list and type(offsets) is list and len(offsets) == 2
    begin, end = offsets if fine else (0, 0)
    # isinstance would accept bool, which the format does not
    fine = fine and type(begin) is type(end) is int and 0 <= begin < MAX_COUNT and 0 <= end < MAX_COUNT
    numel = 1
    for size in sizes if fine else ():
        if type(size) is not int or not 0 <= size < MAX_COUNT:
            fine = False
        elif numel < MAX_COUNT:  # the reference refuses more, and products must not grow without bound
            numel *= size
    if not fine:
        detail = "it needs a dtype, a shape and two data_offsets, with numbers from 0 up"
        noted.add("safetensors-entry-invalid", _at(name), detail)
        return None
    shape, width = tuple(sizes), BITS.get(dtype)
    bits = numel * (width or 0)
    if width and bits == 8 * (end - begin) and bits < MAX_COUNT and numel < MAX_COUNT:
        return _new(HeaderEntry, (name, dtype, shape, begin, end, False))
    what = f"{dtype} {list(shape[:8])}"
    if width is None:
        noted.add("safetensors-dtype-unknown", _at(name), f"dtype {_cut(dtype)!r}")
    elif numel >= MAX_COUNT or bits >= MAX_COUNT:
        noted.add("safetensors-size-mismatch", _at(name), "its shape overflows 64 bits")
    elif bits % 8:
        noted.add("safetensors-size-mismatch", _at(name), f"{what} does not make whole bytes")
    else:
        detail = f"{what} needs {bits // 8:,} bytes; it is given {begin:,} to {end:,}"
        noted.add("safetensors-size-mismatch", _at(name), detail)
    return None if numel >= MAX_COUNT else HeaderEntry(name, _cut(dtype), shape, begin, max(begin, end), broken=True)


def check_layout(
    entries: list[HeaderEntry], size: int, noted: LimitedProblems, codes: tuple[str, ...] = _LAYOUT, align: int = 1
) -> None:
    """Note holes and overlaps between tensors, which are sorted by offset, and missing or extra bytes after the last.

    Each must begin at the next multiple of ``align``. ``size`` is that of the data, ``codes`` of the four problems.
    """
    hole, overlap, truncated, trailing = codes
    reached = padded = 0
    for entry in entries:
        if entry.begin > padded:
            noted.add(hole, _at(entry.name), f"{entry.begin - padded:,} bytes before it belong to no tensor")
        elif entry.begin < reached:
            detail = f"it begins {reached - entry.begin:,} bytes before the previous tensor ends"
            noted.add(overlap, _at(entry.name), detail)
        elif entry.begin < padded:
            noted.add(hole, _at(entry.name), f"byte {entry.begin:,} is not a multiple of {align:,}")
        reached = max(reached, entry.end)
        padded = -(-reached // align) * align
    if reached > size:
        whole = sum(entry.end <= size for entry in entries)
        lost = f"{reached - max(size, 0):,} bytes are missing at the end"
        noted.add(truncated, "", f"{lost}; {whole:,} of {len(entries):,} tensors are whole")
    elif padded < size:
        noted.add(trailing, "", f"{size - padded:,} bytes after the last tensor belong to nothing")


def add_tensor(
    out: Draft, entry: HeaderEntry, dtype: str, shape: tuple[int, ...], start: int, *, big_endian: bool = False
) -> None:
    """Add the tensor of an entry, with torch's dtype and shape, and its storage. The data begin at ``start``."""
    name, _, _, begin, end, broken = entry
    stride = (1,) if len(shape) == 1 else contiguous(shape)
    path = (name,)
    if broken:
        out.tensors.append(Tensor(path, name, dtype, shape, stride, "cpu", None))
        return
    nbytes, offset = end - begin, start + begin
    stored = nbytes if offset + nbytes <= out.nbytes else max(0, out.nbytes - offset)
    place = offset if stored or not nbytes else None
    tensor = (path, name, dtype, shape, stride, "cpu", name, 0, False, "strided", "", (), place, (), None)
    out.tensors.append(_new(Tensor, tensor))
    storage = (name, name, "cpu", dtype, nbytes, stored, place, "", "", None, False, big_endian, None, path)
    out.storages.append(_new(Storage, storage))
