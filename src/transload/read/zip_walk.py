"""A zip archive without its directory, read from the local headers: what is left of a cut-off checkpoint.

torch writes no sizes into local headers, so the walk has to know them: ``data.pkl`` ends where its pickle ends, a storage is as long as
the pickle says, and small records end at their descriptor. torch.save writes ``data.pkl`` first (from 1.6 on), so a truncated file
usually still tells what it held.
"""

from __future__ import annotations

from struct import Struct
from zlib import crc32

from transload.checkpoint import Record
from transload.findings import Problem
from transload.read.source import Source
from transload.read.tensors import Slot
from transload.read.torch_legacy import claimed, run_at
from transload.read.zip_index import ZipIndex

__all__ = ["walk_index"]

_LOCAL = Struct("<4s5H3L2H")
_MAX_SMALL = 1 << 16
_MAX_RECORDS = 10_000_000


def walk_index(source: Source, broken: ZipIndex) -> ZipIndex:
    """The records that can be found by going from header to header; the problems of ``broken`` and what was lost."""
    walk = _Walk(source)
    while len(walk.records) < _MAX_RECORDS and walk.step():
        pass
    detail = f"{len(walk.records)} records were found without it, up to byte {walk.position} of {source.size}"
    problems = [*broken.problems, Problem("zip-walked", detail=detail)]
    tail = _zeros_at_end(source)
    if tail:
        problems.append(Problem("zeros-at-end", detail=f"the file ends in at least {tail} zero bytes"))
    return ZipIndex(walk.root, walk.records, tuple(problems), by_torch=True, end=walk.position, ok=bool(walk.records))


class _Walk:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self.root = ""
        self.records: dict[str, Record] = {}
        self.sizes: dict[str, Slot] = {}

    def step(self) -> bool:
        """Take the record at the present position; false where there is none, or it is cut."""
        raw = self.source.read(self.position, _LOCAL.size)
        if len(raw) < _LOCAL.size or raw[:4] != b"PK\x03\x04":
            return False
        _, _, flags, method, _, _, crc, stored, size, n_name, n_extra = _LOCAL.unpack(raw)
        full = self.source.read(self.position + _LOCAL.size, n_name).decode("utf-8", "backslashreplace")
        extra = self.source.read(self.position + _LOCAL.size + n_name, n_extra)
        if not self.records:
            self.root = full.partition("/")[0]
        name = full.removeprefix(f"{self.root}/")
        offset = self.position + _LOCAL.size + n_name + n_extra
        if flags & 8 and not stored:
            stored = size = self._measure(name, offset)
        if stored < 0:
            return False
        present = max(0, min(stored, self.source.size - offset))
        end = offset + stored
        if flags & 8 and (stored or flags != 0x0800):
            crc, width = self._descriptor(end, extra)
            end += width
        self.records[name] = Record(name, offset, size, present, crc if present == stored else None, method)
        self.position = end
        return present == stored and end < self.source.size

    def _measure(self, name: str, offset: int) -> int:
        """How long a record must be; -1 where nothing tells."""
        if name.endswith(".pkl"):
            pickle, end = run_at(self.source, offset, name)
            if pickle.broken:
                return max(0, self.source.size - offset)
            if name == "data.pkl":
                self.sizes = claimed(pickle)
            return end - offset
        key = name.partition("/")[2]
        if name.startswith(("data/", "tensors/")) and key in self.sizes:
            return self.sizes[key].nbytes
        return self._search(offset)

    def _search(self, offset: int) -> int:
        """A small record ends where a descriptor with its own checksum begins."""
        window = self.source.read(offset, _MAX_SMALL)
        at = window.find(b"PK\x07\x08")
        while at >= 0:
            if window[at + 4 : at + 8] == crc32(window[:at]).to_bytes(4, "little"):
                return at
            at = window.find(b"PK\x07\x08", at + 1)
        return 0 if window[:4] == b"PK\x03\x04" else -1

    def _descriptor(self, end: int, extra: bytes) -> tuple[int | None, int]:
        """Checksum and length of the descriptor after a payload: 24 bytes where zip64 was needed, else 16."""
        raw = self.source.read(end, 24)
        if raw[:4] != b"PK\x07\x08":
            return None, 0
        return int.from_bytes(raw[4:8], "little"), 24 if extra[:2] == b"\x01\x00" else 16


def _zeros_at_end(source: Source) -> int:
    """Zero bytes at the end, as far as a megabyte tells: a disk that ran full, or a download that was set up and never came."""
    tail = source.read(max(0, source.size - (1 << 20)), 1 << 20)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    return zeros if zeros >= _BLOCK else 0


_BLOCK = 512
