"""safetensors: a length, a JSON table, and the tensors' bytes.

The rules are those of the ``safetensors`` package (https://github.com/huggingface/safetensors): what it opens is read
here to the same names, dtypes, shapes and byte ranges; what it refuses is read as far as it makes sense, and a problem
says so.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint, Storage, Tensor, contiguous
from transload.dtypes import ITEMSIZE, SAFETENSORS
from transload.findings import Noted, some
from transload.io.sources import Source

__all__ = ["header_metadata", "looks_like", "read_safetensors"]


PREFIX = 8
# The reference's own limit. Without one, a length field of 2**60 would ask for as much memory.
MAX_HEADER = 100_000_000
# A length beyond the limit is still called safetensors (with a problem) while its upper bytes are zero.
MAX_PLAUSIBLE = 1 << 40
# The reference counts in 64 bits and refuses what does not fit.
MAX_COUNT = 1 << 64
# __metadata__ is free text of any size: a report needs its beginning.
MAX_METADATA_SHOWN = 50
MAX_METADATA_TEXT = 500

FIELDS = ("dtype", "shape", "data_offsets")
BITS: dict[str, int] = {
    **{name: 8 * ITEMSIZE[dtype] for name, dtype in SAFETENSORS.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class _Entry(NamedTuple):
    """One line of the table, checked. ``broken`` entries have a name, dtype and shape but no bytes to trust."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    broken: bool = False


def looks_like(source: Source) -> bool:
    """Whether the first bytes are a plausible header length and the beginning of a JSON object.

    >>> from transload.io.sources import BytesSource
    >>> looks_like(BytesSource(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}"))
    True
    """
    head = source.read(0, PREFIX + 64)
    length = int.from_bytes(head[:PREFIX], "little")
    if len(head) < PREFIX + 1 or length < 2:  # the shortest object is {}
        return False
    text = head[PREFIX : PREFIX + length]
    if length > MAX_HEADER:
        return length < MAX_PLAUSIBLE and text.startswith(b'{"')
    return text.lstrip(b" \t\r\n").startswith(b"{")


def read_safetensors(source: Source, file: str = "") -> Checkpoint:
    """What a safetensors file holds, from its header alone; ``file`` is put into each storage.

    Never raises for bad content. A file cut short still lists every tensor; those that are not whole have
    ``storage.stored < storage.nbytes``.
    """
    noted = Noted()
    length = int.from_bytes(source.read(0, PREFIX), "little")
    header = _header(source, length, noted)
    table = _parse(header, noted) if header else {}
    facts = _metadata(table.pop("__metadata__", None), noted)
    read = ((_ordinary(name, raw) or _entry(name, raw, noted)) for name, raw in table.items())
    entries = sorted((entry for entry in read if entry is not None), key=attrgetter("begin", "end"))
    start = PREFIX + length
    if header and not noted.has("safetensors-header-invalid"):
        _check_layout(entries, source.size - start, noted)
    pairs = [_tensor(entry, start, source.size, file, noted) for entry in entries]
    return Checkpoint(
        path=source.name,
        format="safetensors",
        nbytes=source.size,
        tensors=tuple([tensor for tensor, _ in pairs]),
        storages=tuple([storage for _, storage in pairs if storage is not None]),
        facts=(("header", f"{length:,} bytes"), *facts),
        problems=noted.problems(),
    )


def header_metadata(source: Source) -> dict[str, str]:
    """All texts of ``__metadata__``; the facts of a checkpoint have what a report has room for."""
    import json

    length = int.from_bytes(source.read(0, PREFIX), "little")
    try:
        table = json.loads(source.read(PREFIX, min(length, MAX_HEADER)))
    except (ValueError, RecursionError):
        return {}
    held = table.get("__metadata__") if isinstance(table, dict) else None
    return {key: value for key, value in held.items() if type(value) is str} if isinstance(held, dict) else {}


def _header(source: Source, length: int, noted: Noted) -> bytes:
    """The table as bytes; empty, with a problem, if there is none to be had."""
    left = max(source.size - PREFIX, 0)
    if length > MAX_HEADER:
        noted.add("safetensors-header-too-large", "header", f"it claims {length:,} bytes; the limit is {MAX_HEADER:,}")
        return b""
    if length > left:
        noted.add("safetensors-header-cut", "header", f"it is {length:,} bytes long, the file holds {left:,}")
        return b""
    header = source.read(PREFIX, length)
    if not header:
        noted.add("safetensors-header-invalid", "header", "it is empty")
    elif not header.startswith(b"{"):
        noted.add("safetensors-odd-header", "header", "it does not begin with {")
    return header


def _parse(header: bytes, noted: Noted) -> dict[str, object]:
    """JSON as the reference understands it: stricter than Python on numbers and surrogates."""
    import json

    repeated: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(items)
        if len(made) != len(items):
            repeated.extend(_repeated([name for name, _ in items]))
        return made

    try:
        table = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=pairs,
            # Only -0 and what has more digits than 64 bits need a look; without the hook parsing is twice as fast.
            parse_int=_integer if b"-0" in header else int,
            parse_float=_real,
            parse_constant=_refuse,
        )
        if b"\\ud" in header.lower():
            # A lone surrogate passes Python's parser, and then no terminal or file can take the name.
            json.dumps(table, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # RecursionError: brackets nested a thousand deep.
        noted.add("safetensors-header-invalid", "header", _reason(error))
        return {}
    if repeated:
        noted.add("safetensors-duplicate-key", "header", f"given more than once: {some(repeated)}")
    if not isinstance(table, dict):
        noted.add("safetensors-header-invalid", "header", "it is not a JSON object")
        return {}
    return table


def _repeated(names: list[str]) -> list[str]:
    """Those that were there before; ``names`` may be long, so no counting one by one."""
    seen: set[str] = set()
    again: list[str] = []
    for name in names:
        (again.append if name in seen else seen.add)(name)
    return again


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its brackets are nested too deep"
    if isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
        return f"it is not UTF-8: {error.reason}"
    # Python's own words for a number of 5,000 digits are advice to a programmer.
    return "it is not JSON: " + ("a number is out of range" if "digits" in str(error) else str(error))


def _integer(text: str) -> int | float:
    """A JSON integer. To the reference -0 is a float, which no field accepts."""
    return _real(text) if text == "-0" else int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is out of range")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _metadata(raw: object, noted: Noted) -> tuple[tuple[str, str], ...]:
    """``__metadata__`` as facts, cut to what a report can show."""
    if raw is None:
        return ()
    if not isinstance(raw, dict) or not all(type(value) is str for value in raw.values()):
        noted.add("safetensors-metadata-invalid", "header › __metadata__", "it must map text to text")
        return ()
    shown = [(f"metadata.{_cut(key)}", _cut(value)) for key, value in list(raw.items())[:MAX_METADATA_SHOWN]]
    return (("metadata", f"{len(raw):,} entries"), *shown)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_METADATA_TEXT else text[:MAX_METADATA_TEXT] + "…"


def _ordinary(name: str, raw: Any) -> _Entry | None:
    """An entry that is in order, as every writer spells it; ``None`` for any other, right or wrong."""
    if type(raw) is not dict or raw.keys() != _FIELD_SET or type(raw["dtype"]) is not str:
        return None
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if type(shape) is not list or len(shape) > 8 or type(offsets) is not list or len(offsets) != 2:
        return None
    bits = BITS.get(dtype, 0)
    begin, end = offsets
    for size in shape:
        if type(size) is not int or not 0 <= size < MAX_COUNT:
            return None
        bits *= size
        if bits >= MAX_COUNT:
            return None
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < MAX_COUNT or dtype not in BITS:
        return None
    return _new(_Entry, (name, dtype, tuple(shape), begin, end, False)) if bits == 8 * (end - begin) else None


_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields


def _entry(name: str, raw: object, noted: Noted) -> _Entry | None:
    """One entry, checked field by field; ``None`` if it does not even say what the tensor is."""
    fields = _fields(name, raw, noted)
    shape, offsets, dtype = _counts(fields.get("shape")), _counts(fields.get("data_offsets")), fields.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or type(dtype) is not str:
        detail = "it needs dtype, shape and two data_offsets, counted from 0 up"
        noted.add("safetensors-entry-invalid", _at(name), detail)
        return None
    begin, end = offsets
    code, detail = _wrong(dtype, shape, begin, end)
    if not code:
        return _Entry(name, dtype, shape, begin, end)
    noted.add(code, _at(name), detail)
    if _numel(shape) is None:
        return None
    return _Entry(name, _cut(dtype), shape, begin, max(begin, end), broken=True)


def _at(name: str) -> str:
    return f"header › {_cut(name)}"


def _fields(name: str, raw: object, noted: Noted) -> dict[str, object]:
    """The entry as a dictionary, also in the two other spellings that the reference's parser lets through."""
    if isinstance(raw, dict) and raw.keys() <= _FIELD_SET and type(raw.get("dtype")) is str:
        return raw
    if isinstance(raw, list) and len(raw) == len(FIELDS):
        raw = dict(zip(FIELDS, raw, strict=True))
    if not isinstance(raw, dict):
        return {}
    noted.add("safetensors-odd-header", _at(name), "no writer spells an entry like this")
    dtype = raw.get("dtype")
    if isinstance(dtype, dict) and list(dtype.values()) == [None]:
        return {**raw, "dtype": next(iter(dtype))}
    return raw


_FIELD_SET = frozenset(FIELDS)


def _counts(raw: object) -> tuple[int, ...] | None:
    if type(raw) is not list:
        return None
    # bool is an int to isinstance, and not to the format
    return tuple(raw) if not raw or (set(map(type, raw)) == {int} and min(raw) >= 0 and max(raw) < MAX_COUNT) else None


@lru_cache(maxsize=4096)
def _numel(shape: tuple[int, ...]) -> int | None:
    """Elements of a shape; ``None`` if counting them leaves 64 bits on the way, which the reference refuses.

    Also what keeps later products short: a million dimensions of 2**63 would take hours to multiply out.
    """
    total = 1
    for size in shape:
        total *= size
        if total >= MAX_COUNT:
            return None
    return total


def _wrong(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> tuple[str, str]:
    """Problem code and detail if the bytes cannot be that tensor; empty if they are."""
    bits, count = BITS.get(dtype), _numel(shape)
    if bits is None:
        return "safetensors-dtype-unknown", f"dtype {_cut(dtype)!r}"
    if count is None or count * bits >= MAX_COUNT:
        return "safetensors-size-mismatch", "its shape overflows 64 bits"
    needed, odd = divmod(count * bits, 8)
    if needed == end - begin and not odd:
        return "", ""
    what = f"{dtype} {list(shape[:8])}"
    if odd:
        return "safetensors-size-mismatch", f"{what} does not make whole bytes"
    return "safetensors-size-mismatch", f"{what} needs {needed:,} bytes; it is given {begin:,} to {end:,}"


def _check_layout(entries: list[_Entry], held: int, noted: Noted) -> None:
    """The tensors must cover the data exactly, one after the other: holes hide bytes, and overlaps share them."""
    reached = 0
    for entry in entries:
        if entry.begin > reached:
            detail = f"{entry.begin - reached:,} bytes before it belong to no tensor"
            noted.add("safetensors-hole", _at(entry.name), detail)
        elif entry.begin < reached:
            detail = f"it begins {reached - entry.begin:,} bytes before the one ahead of it ends"
            noted.add("safetensors-overlap", _at(entry.name), detail)
        reached = max(reached, entry.end)
    if reached > held:
        whole = sum(entry.end <= held for entry in entries)
        lost = f"{reached - max(held, 0):,} bytes are missing at the end"
        noted.add("safetensors-truncated", "", f"{lost}; {whole:,} of {len(entries):,} tensors are whole")
    elif reached < held:
        noted.add("safetensors-trailing", "", f"{held - reached:,} bytes after the last tensor belong to nothing")


def _tensor(entry: _Entry, start: int, size: int, file: str, noted: Noted) -> tuple[Tensor, Storage | None]:
    """The entry as torch would see it, and the bytes it looks at."""
    name, _, _, begin, end, broken = entry
    dtype, shape = _as_torch(entry, noted)
    stride = (1,) if len(shape) == 1 else contiguous(shape)
    path = (name,)
    if broken:
        return Tensor(path, name, dtype, shape, stride, "cpu", None), None
    nbytes, offset = end - begin, start + begin
    stored = nbytes if offset + nbytes <= size else max(0, size - offset)
    place = offset if stored or not nbytes else None
    return (
        _new(Tensor, (path, name, dtype, shape, stride, "cpu", name, 0, False, "strided", "", (), place, ())),
        _new(Storage, (name, name, "cpu", dtype, nbytes, stored, place, "", file, None, False, False, path)),
    )


def _as_torch(entry: _Entry, noted: Noted) -> tuple[str, tuple[int, ...]]:
    """torch's dtype and shape. Its four-bit float counts pairs, so the last dimension is half as long."""
    dtype, shape = entry.dtype, entry.shape
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        return SAFETENSORS[dtype], (*shape[:-1], shape[-1] // 2)
    if dtype in SAFETENSORS and dtype != "F4":
        return SAFETENSORS[dtype], shape
    if dtype in BITS:
        noted.add("safetensors-dtype-not-in-torch", _at(entry.name), f"{dtype} {list(shape)[:8]}")
    return dtype, shape
