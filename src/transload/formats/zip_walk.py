"""A zip archive without its directory, read from the local headers: what is left of a cut-off checkpoint.

torch writes no sizes into local headers, so the walk has to know them: ``data.pkl`` ends where its pickle ends, a
storage is as long as the pickle says, and other records end where a descriptor with their own checksum begins.
torch.save writes ``data.pkl`` first (from 1.6 on), so a truncated file usually still tells what it held.
"""

from __future__ import annotations

import struct
import zlib

from transload.checkpoint import Record
from transload.findings import Problem
from transload.formats.pickle_machine import run_at
from transload.formats.tensors import Slot, claimed
from transload.formats.zip import ALL32, LOCAL, ZipIndex, text_of, widen
from transload.io.sources import Source

__all__ = ["walk_index"]


_DESCRIPTOR = b"PK\x07\x08"
_CHUNK = 1 << 20
_BLOCK = 512
_PICKLE_WINDOW = 1 << 16

_MAX_SEARCH = 256 << 20
"""How far the end of a record is looked for; only TorchScript writes large records before it tells their sizes."""

_MAX_STEPS = 1_000_000
"""A gigabyte of empty headers would keep us for minutes; 20,000 tensors are 20,006 records."""


def walk_index(source: Source, broken: ZipIndex) -> ZipIndex:
    """The records that can be found by going from header to header; the problems of ``broken`` and what was lost."""
    walk = _Walk(source, [*broken.problems])
    for _ in range(_MAX_STEPS):
        if not walk.step():
            break
    reached = min(walk.position, source.size)
    detail = f"{len(walk.records)} records were found without it, up to byte {reached} of {source.size}"
    walk.problems.append(Problem("zip-walked", detail=detail))
    # Zero bytes at the end, as far as a megabyte tells: a full disk, or a download that was set up and never came.
    tail = source.read(max(0, source.size - (1 << 20)), 1 << 20)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= _BLOCK:
        walk.problems.append(Problem("zeros-at-end", detail=f"the file ends in at least {zeros} zero bytes"))
    problems = tuple(walk.problems)
    return ZipIndex(walk.root, walk.records, problems, by_torch=True, end=walk.position, ok=bool(walk.records))


class _Walk:
    def __init__(self, source: Source, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        self.position = 0
        self.root = ""
        self.records: dict[str, Record] = {}
        self.sizes: dict[str, Slot] = {}

    def step(self) -> bool:
        """Take the record at the present position; false where there is none, or it is cut."""
        raw = self.source.read(self.position, LOCAL.size)
        if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
            return False
        _, _, flags, method, _, _, crc, stored, size, n_name, n_extra = LOCAL.unpack(raw)
        head = self.source.read(self.position + LOCAL.size, n_name + n_extra)
        if len(head) < n_name:
            return False
        name, extra = self._name(text_of(head[:n_name])), head[n_name:]
        if len(extra) < n_extra:
            if not self.records:  # all that is left, and it tells what the file was
                self._add(Record(name, None, 0, 0, None, method))
            return False
        offset = self.position + LOCAL.size + n_name + n_extra
        if ALL32 in (stored, size):
            size, stored = widen(extra, size, stored)
        if flags & 8 and not stored:
            stored, size = self._unpacked(offset) if method == 8 else (self._measure(name, offset),) * 2
        if stored < 0:
            return False
        present = max(0, min(stored, self.source.size - offset))
        end = offset + stored
        if flags & 8:
            crc, width = self._descriptor(end, extra)
            end += width
            if not width and end + 16 <= self.source.size:
                self.problems.append(Problem("zip-no-descriptor", name, f"none at byte {end}, where it should end"))
        self._add(Record(name, offset, size, present, crc if present == stored else None, method))
        self.position = end
        return bool(present == stored and end < self.source.size)

    def _name(self, full: str) -> str:
        if not self.records:
            self.root = full.partition("/")[0] if "/" in full else ""
        if not self.root:
            return full
        return full[len(self.root) + 1 :] if full.startswith(f"{self.root}/") else f"/{full}"

    def _add(self, record: Record) -> None:
        """Enter a record; an earlier one of its name keeps a place under another, so that both are looked at."""
        earlier = self.records.pop(record.name, None)
        if earlier is not None:
            where = f"at byte {earlier.offset} and at byte {record.offset}"
            self.problems.append(Problem("zip-found-twice", record.name, where))
            aside = f"{earlier.name}@{earlier.offset}"
            self.records[aside] = earlier._replace(name=aside)
        self.records[record.name] = record

    def _measure(self, name: str, offset: int) -> int:
        """How long a record must be; -1 where nothing tells."""
        if name.endswith(".pkl"):
            pickle, end = run_at(self.source, offset, name, _PICKLE_WINDOW)
            if pickle.broken:
                return max(0, self.source.size - offset)
            if name == "data.pkl":
                self.sizes = claimed(pickle)
            return end - offset
        key = name.partition("/")[2]
        slot = self.sizes.get(key) if name.startswith(("data/", "tensors/")) else None
        if slot is not None:
            return slot.nbytes
        return self._search(offset)

    def _search(self, offset: int) -> int:
        """Length of a record that ends where a descriptor with its own checksum begins; -1 if there is none."""
        value = 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _CHUNK):
            window = self.source.read(start, _CHUNK + 11)  # a descriptor may begin in this chunk and end in the next
            done, at = 0, window.find(_DESCRIPTOR)
            while 0 <= at < _CHUNK:
                value, done = zlib.crc32(window[done:at], value), at
                length = start + at - offset
                if window[at + 4 : at + 12] == struct.pack("<2L", value, length & ALL32):
                    return length
                at = window.find(_DESCRIPTOR, at + 1)
            value = zlib.crc32(window[done:_CHUNK], value)
        return -1

    def _unpacked(self, offset: int) -> tuple[int, int]:
        """Both lengths of a deflated record, which tells its own end; -1 if it does not. TorchScript packs its code."""
        unpack, size = zlib.decompressobj(-15), 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _BLOCK):
            try:
                size += len(unpack.decompress(self.source.read(start, _BLOCK)))
            except zlib.error:
                break
            if unpack.eof:
                return start + _BLOCK - len(unpack.unused_data) - offset, size
        return -1, -1

    def _descriptor(self, end: int, extra: bytes) -> tuple[int | None, int]:
        """Checksum and length of the descriptor after a payload: 24 bytes where zip64 was needed, else 16."""
        raw = self.source.read(end, 24)
        if raw[:4] != _DESCRIPTOR or len(raw) < 16:
            return None, 0
        return int.from_bytes(raw[4:8], "little"), 24 if extra[:2] == b"\x01\x00" else 16
