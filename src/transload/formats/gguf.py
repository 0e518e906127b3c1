"""GGUF: typed metadata, a table of tensors, and the tensors' bytes at multiples of an alignment.

Versions 2 and 3 in both byte orders (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). If ggml and the
``gguf`` package open a file, names, types, shapes and byte ranges are the same here; if they refuse it, it is read as
far as possible, with a problem. The dtype of a quantized tensor is ggml's name for it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from operator import attrgetter
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Leaf
from transload.dtypes import BLOCKS, GGML, itemsize
from transload.findings import LimitedProblems, join_names
from transload.formats.safetensors import MAX_HEADER, HeaderEntry, add_tensor, check_layout
from transload.io.sources import Source
from transload.nodes import short

_VERSIONS = {struct.pack(f"{order}I", version): (order, version) for version in (2, 3) for order in "<>"}
_STRUCTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The smallest size of a value: a count is compared with the size of the file before anything is read.
_LEAST = {**{kind: struct.calcsize(f"={code}") for kind, code in _STRUCTS.items()}, _STRING: 8, _ARRAY: 12}
_LEAST_PAIR, _LEAST_TENSOR = 13, 24

_FIRST = 1 << 16  # how much is read first: enough for a header without a vocabulary
_MAX_ENTRIES = 1 << 20  # the largest header could describe four million tensors, which would take gigabytes of memory
_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_NESTING = 4
_MAX_NUMEL = 1 << 63
_SHOWN = 8  # elements of an array
_LAYOUT = ("gguf-hole", "gguf-overlap", "gguf-truncated", "gguf-trailing")


class _BadHeaderError(Exception):
    """The header cannot be read further: a code, and why."""


class _Header:
    """Reads a header from its first count on; ``_BadHeaderError`` where it is invalid.

    It keeps the first ``keep`` elements of an array, or all if that is ``None``. The last array had ``total`` elements.
    """

    def __init__(self, source: Source, keep: int | None = None) -> None:
        self._source, self._keep = source, keep
        self._data = source.read(0, _FIRST)
        self.order, self.version = _VERSIONS[self._data[4:8]]
        self.at = 8
        self.total = 0

    def _skip(self, count: int) -> None:
        """Move forward without reading."""
        self.at += count
        if self.at > MAX_HEADER:
            raise _BadHeaderError("gguf-header-invalid", f"it is longer than {MAX_HEADER:,} bytes, the limit")
        if self.at > self._source.size:
            raise _BadHeaderError("gguf-header-cut", f"it goes on beyond the {self._source.size:,} bytes of the file")

    def _take(self, count: int) -> int:
        """Read the next bytes, and move past them; return where they begin."""
        begin = self.at
        self._skip(count)
        if self.at > len(self._data):
            self._data = self._source.read(0, min(MAX_HEADER, max(self.at, 8 * len(self._data))))
            if self.at > len(self._data):
                raise _BadHeaderError("gguf-header-cut", "the file became shorter while it was read")
        return begin

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """The next numbers; ``codes`` are their codes in ``struct``."""
        begin = self._take(struct.calcsize(self.order + codes))
        return struct.unpack_from(self.order + codes, self._data, begin)

    def count(self, number: int, least: int, what: str) -> range:
        """``range(number)``, checked: the file must have ``least`` bytes for each entry."""
        if number > _MAX_ENTRIES and what != "elements":
            raise _BadHeaderError("gguf-header-invalid", f"it claims {number:,} {what}; the limit is {_MAX_ENTRIES:,}")
        if number * least > self._source.size - self.at:
            raise _BadHeaderError("gguf-header-cut", f"it claims {number:,} {what}, more than the file has bytes for")
        return range(number)

    def text(self) -> str:
        """The next string; bytes that are not UTF-8 are escaped."""
        (length,) = self.numbers("Q")
        begin = self._take(length)
        return self._data[begin : self.at].decode("utf-8", "backslashreplace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value, which has the type ``kind``."""
        if kind == _STRING:
            return self.text()
        if kind in _STRUCTS:
            return self.numbers(_STRUCTS[kind])[0]
        if kind != _ARRAY or depth > _MAX_NESTING:
            raise _BadHeaderError("gguf-header-invalid", f"{kind} is not the type of a value")
        inner, count = self.numbers("IQ")
        self.count(count, _LEAST.get(inner, 0), "elements")
        kept = count if self._keep is None else min(count, self._keep)
        if inner in _STRUCTS:
            values = list(self.numbers(f"{kept}{_STRUCTS[inner]}"))
            self._skip((count - kept) * _LEAST[inner])
        elif inner == _STRING:
            values = [self.text() for _ in range(kept)]
            # Skip the others, fast: a vocabulary has hundreds of thousands.
            unpack = struct.Struct(f"{self.order}Q").unpack_from
            data, at = self._data, self.at
            for _ in range(count - kept):
                if at + 8 > len(data):
                    self.at = at
                    self._take(8)
                    data = self._data
                at += 8 + unpack(data, at)[0]
            self._skip(at - self.at)
        else:
            values = [self.value(inner, depth + 1) for _ in range(count)][:kept]
        self.total = count
        return values

    def pairs(self, number: int) -> Iterator[tuple[str, Any]]:
        """The next pairs of a key and a value."""
        for _ in self.count(number, _LEAST_PAIR, "values"):
            yield self.text(), self.value(*self.numbers("I"))


def read(source: Source) -> Checkpoint | None:
    """Read the header of a GGUF file; never raises for bad content. ``None`` if the version is not 2 or 3.

    A truncated file also has all its tensors listed; if it ends within its header, those with a complete entry.
    """
    if source.read(4, 4) not in _VERSIONS:
        return None
    noted, header = LimitedProblems(), _Header(source, _SHOWN + 1)
    leaves: dict[str, Leaf] = {}
    entries: dict[str, HeaderEntry] = {}
    align, whole = 32, False
    try:
        tensors, pairs = header.numbers("QQ")
        for key, value in header.pairs(pairs):
            if key in leaves:
                noted.add("gguf-duplicate-name", f"header › {key}", "another value already has this name")
            more = f" ({header.total:,} in all)" if type(value) is list and header.total > _SHOWN else ""
            leaves[key] = Leaf((key,), key, type(value).__name__, short(value) + more)
            align = _alignment(value) if key == "general.alignment" else align
        for _ in header.count(tensors, _LEAST_TENSOR, "tensors"):
            entry = _entry(header, noted)
            if entry.name in entries:
                noted.add("gguf-duplicate-name", f"header › {entry.name}", "another tensor already has this name")
            entries[entry.name] = entry
        whole = True
    except _BadHeaderError as error:
        code, detail = error.args
        noted.add(code, f"header › byte {min(header.at, source.size):,}", detail)
    ordered = sorted(entries.values(), key=attrgetter("begin", "end"))
    start = -(-header.at // align) * align if whole else 0
    if whole:
        check_layout([entry for entry in ordered if not entry.broken], source.size - start, noted, _LAYOUT, align)
    else:  # the start of the data is not known
        ordered = [entry._replace(broken=True) for entry in ordered]
    if quantized := [entry for entry in ordered if entry.dtype in BLOCKS]:
        counts = Counter(entry.dtype for entry in quantized).most_common()
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts)
        names = join_names([entry.name for entry in quantized])
        noted.add("gguf-quantized", "", f"{len(quantized):,} of {len(ordered):,} tensors ({kinds}): {names}")
    big = header.order == ">"
    out = Draft(source.name, "gguf", source.size, noted.problems())
    order = "big" if big else "little"
    out.facts += [("GGUF", f"version {header.version}"), ("byteorder", order), ("alignment", str(align))]
    for entry in ordered:
        add_tensor(out, entry, entry.dtype, entry.shape, start, big_endian=big)
    return out.checkpoint(leaves=tuple(leaves.values()))


def header_values(source: Source) -> dict[str, Any]:
    """All metadata; the leaves of a checkpoint have only the beginning of long values."""
    header = _Header(source)
    values: dict[str, Any] = {}
    with suppress(_BadHeaderError):  # what was read before it is kept
        values.update(header.pairs(header.numbers("QQ")[1]))
    return values


def _alignment(value: Any) -> int:
    if type(value) is not int or value < 1 or value & (value - 1):
        raise _BadHeaderError("gguf-header-invalid", "general.alignment is not a power of two")
    return value


def _entry(header: _Header, noted: LimitedProblems) -> HeaderEntry:
    """The next entry in the table of tensors. ggml lists the innermost dimension first, torch last."""
    name = header.text()
    (rank,) = header.numbers("I")
    if rank > _MAX_DIMENSIONS:
        raise _BadHeaderError("gguf-header-invalid", f"a tensor has {rank:,} dimensions; ggml has {_MAX_DIMENSIONS}")
    shape = header.numbers(f"{rank}Q")[::-1]
    kind, begin = header.numbers("IQ")
    dtype = GGML.get(kind, f"type {kind}")
    numel = prod(shape)
    row, (block, _) = shape[-1] if shape else 1, BLOCKS.get(dtype, (1, 0))
    if kind not in GGML:
        noted.add("gguf-type-unknown", f"header › {name}", f"type {kind}")
    elif numel >= _MAX_NUMEL or row % block:
        blocks = f"its rows of {row:,} are not whole blocks of {block}"
        detail = blocks if row % block else "its shape overflows 64 bits"
        noted.add("gguf-size-mismatch", f"header › {name}", f"{dtype} {list(shape)}: {detail}")
    else:
        return HeaderEntry(name, dtype, shape, begin, begin + itemsize(dtype, numel))
    return HeaderEntry(name, dtype, shape, begin, begin, broken=True)
