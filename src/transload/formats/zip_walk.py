"""An archive without its directory, read from the local headers: what is left of a cut-off checkpoint.

torch writes no sizes into local headers, so the walk has to know them: ``data.pkl`` ends where its pickle ends, a
storage is as long as the pickle says, and other records end where a descriptor with their own checksum begins.
torch.save writes ``data.pkl`` first (from 1.6 on), so a truncated file usually still tells what it held.
"""

from __future__ import annotations

from struct import Struct
from zlib import crc32, decompressobj
from zlib import error as zlib_error

from transload.checkpoint import Record
from transload.findings import Problems
from transload.formats.pickle_machine import run_at
from transload.formats.tensors import claimed
from transload.formats.zip import ALL32, LOCAL, ZipIndex, text_of, widen
from transload.io.sources import Source

_DESCRIPTOR = b"PK\x07\x08"
_TWO = Struct("<2L")
_CHUNK = 1 << 20
_BLOCK = 512
_PICKLE_WINDOW = 1 << 16

_MAX_SEARCH = 256 << 20
"""How far the end of a record is looked for; only TorchScript writes large records before it tells their sizes."""

_MAX_STEPS = 1_000_000
"""A gigabyte of empty headers would keep us for minutes; 20,000 tensors are 20,006 records."""


def walk_index(source: Source, broken: ZipIndex) -> ZipIndex:
    """The records that can be found by going from header to header; the problems of ``broken`` and what was lost."""
    walk = _Walk(source, Problems(broken.problems))
    for _ in range(_MAX_STEPS):
        if not walk.step():
            break
    reached = min(walk.position, source.size)
    detail = f"{len(walk.records)} records were found without it, up to byte {reached} of {source.size}"
    walk.problems.add("zip-walked", detail=detail)
    # Zero bytes at the end, as far as a megabyte tells: a full disk, or a download that was set up and never came.
    tail = source.read(max(0, source.size - (1 << 20)), 1 << 20)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= _BLOCK:
        walk.problems.add("zeros-at-end", detail=f"the file ends in at least {zeros} zero bytes")
    problems = tuple(walk.problems)
    return ZipIndex(walk.root, walk.records, problems, by_torch=True, end=walk.position, ok=bool(walk.records))


class _Walk:
    def __init__(self, source: Source, problems: Problems) -> None:
        self.source = source
        self.problems = problems
        self.position = 0
        self.root = ""
        self.records: dict[str, Record] = {}
        self.sizes: dict[str, int] = {}  # of the storages, by key

    def step(self) -> bool:
        """Take the record at the present position; false where there is none, or it is cut."""
        raw = self.source.read(self.position, LOCAL.size)
        if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
            return False
        _, _, flags, method, _, _, crc, stored, size, n_name, n_extra = LOCAL.unpack(raw)
        head = self.source.read(self.position + LOCAL.size, n_name + n_extra)
        if len(head) < n_name:
            return False
        name, extra = text_of(head[:n_name]), head[n_name:]
        if not self.records:
            self.root = name.partition("/")[0] if "/" in name else ""
        if self.root:
            name = name[len(self.root) + 1 :] if name.startswith(f"{self.root}/") else f"/{name}"
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
            # Its checksum is in the descriptor after it: 24 bytes where zip64 was needed, else 16.
            after = self.source.read(end, 24)
            crc = None
            if after[:4] == _DESCRIPTOR and len(after) >= 16:
                crc = int.from_bytes(after[4:8], "little")
                end += 24 if extra[:2] == b"\x01\x00" else 16
            elif end + 16 <= self.source.size:
                self.problems.add("zip-no-descriptor", name, f"none at byte {end}, where it should end")
        self._add(Record(name, offset, size, present, crc if present == stored else None, method))
        self.position = end
        return bool(present == stored and end < self.source.size)

    def _add(self, record: Record) -> None:
        """Enter a record; an earlier one of its name keeps a place under another, so that both are looked at."""
        earlier = self.records.pop(record.name, None)
        if earlier is not None:
            where = f"at byte {earlier.offset} and at byte {record.offset}"
            self.problems.add("zip-found-twice", record.name, where)
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
                self.sizes = {key: slot.nbytes for key, slot in claimed(pickle).items()}
            return end - offset
        key = name.partition("/")[2]
        if key in self.sizes and name.startswith(("data/", "tensors/")):
            return self.sizes[key]
        return self._search(offset)

    def _search(self, offset: int) -> int:
        """Length of a record that ends where a descriptor with its own checksum begins; -1 if there is none."""
        value = 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _CHUNK):
            window = self.source.read(start, _CHUNK + 11)  # a descriptor may begin in this chunk and end in the next
            done, at = 0, window.find(_DESCRIPTOR)
            while 0 <= at < _CHUNK:
                value, done = crc32(window[done:at], value), at
                length = start + at - offset
                if window[at + 4 : at + 12] == _TWO.pack(value, length & ALL32):
                    return length
                at = window.find(_DESCRIPTOR, at + 1)
            value = crc32(window[done:_CHUNK], value)
        return -1

    def _unpacked(self, offset: int) -> tuple[int, int]:
        """Both lengths of a deflated record, which tells its own end; -1 if it does not. TorchScript packs its code."""
        unpack, size = decompressobj(-15), 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _BLOCK):
            try:
                size += len(unpack.decompress(self.source.read(start, _BLOCK)))
            except zlib_error:
                break
            if unpack.eof:
                return start + _BLOCK - len(unpack.unused_data) - offset, size
        return -1, -1
