"""Where the records of a damaged archive lie: by the directory, by the headers, and by what follows each record.

Everything that is known of a record is there twice: its name in its header and in the directory, its size in the
directory and, twice, behind its bytes, its place by the directory and by the end of the record before. Where two
disagree, the place that most of what is known agrees on is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from transload.io.sources import Source
from transload.rescuing.directory import Directory, find_directory, read_directory
from transload.rescuing.headers import (
    CENTRAL,
    LOCAL,
    Line,
    Local,
    is_plausible,
    is_sign,
    local_at,
)
from transload.rescuing.measure import Measure
from transload.rescuing.placing import Clues, Found, Places

__all__ = ["Survey", "survey"]

_MAX_STEPS = 300_000
"""A gigabyte of empty headers would keep us for minutes; 20,000 tensors are 20,006 records."""

_MAX_GAP = 1 << 30
"""How far the next header is looked for, all searches of one file together."""

_CHUNK = 1 << 20
_ALIGNMENT = 64


class Survey(NamedTuple):
    """All records in the order they lie in, the directory, and lines of it for which there is no record.

    ``reached`` is where the walk ended; ``measure`` knows the keys of storages.
    """

    records: list[Found]
    directory: Directory
    missing: list[Line]
    reached: int
    measure: Measure


def survey(source: Source) -> Survey:
    """Find every record of an archive that begins at byte 0 of a source."""
    directory = find_directory(source)
    if not _belongs(source, directory):
        directory = Directory([], -1, -1)
    walk = _Walk(source, directory)
    walk.run()
    if not directory.lines and is_sign(source.read(walk.position, 4), CENTRAL):
        directory = read_directory(source, walk.position)
        walk = _Walk(source, directory)
        walk.run()
    return walk.finished()


def _belongs(source: Source, directory: Directory) -> bool:
    """Whether a directory is that of this archive, and not of one that lies in it: it knows one of its records."""
    first = local_at(source, 0)
    if first is not None and any(line.name == first.name for line in directory.lines):
        return True
    return any(_points_well(source, line) for line in directory.lines)


def _points_well(source: Source, line: Line) -> bool:
    """Whether a line points to a header of the same name."""
    local = local_at(source, line.header) if is_sign(source.read(line.header, 4), LOCAL) else None
    return local is not None and local.name == line.name


class _Walk:
    def __init__(self, source: Source, directory: Directory) -> None:
        self.source = source
        self.directory = directory
        self.position = 0
        self.records: list[Found] = []
        self.measure = Measure(source)
        self._by_header: dict[int, Line] = {}
        for line in directory.lines:
            if line.header not in self._by_header or _points_well(source, line):
                self._by_header[line.header] = line
        self._by_name = {line.name: line for line in directory.lines}
        self._headers = sorted(header for header in self._by_header if self._is_header(header))
        self._budget = _MAX_GAP
        self._places = Places(source, self.measure)

    def _is_header(self, offset: int) -> bool:
        return is_sign(self.source.read(offset, 4), LOCAL)

    def run(self) -> None:
        """Go from record to record."""
        for _ in range(_MAX_STEPS):
            if not self._step():
                break

    def finished(self) -> Survey:
        """What was found."""
        taken = {record.line.position for record in self.records if record.line}
        missing = [line for line in self.directory.lines if line.position not in taken]
        records = self.records
        if self.directory.complete and not missing and self.directory.told == len(self.directory.lines):
            records = [record if record.line else record._replace(dead=True) for record in records]
        return Survey(records, self.directory, missing, self.position, self.measure)

    def _step(self) -> bool:
        """Take the record at the present position; false where there is none."""
        position = self.position
        if position == self.directory.start or position >= self.source.size:
            return False
        line = self._by_header.get(position)
        local = local_at(self.source, position)
        signed = local is not None and self._is_header(position)
        if line is None and not signed:
            return self._leap()
        if line is None or (signed and local and local.name != line.name):
            line = self._line_for(local, line)
        record = self._places.settled(Clues(position, local if signed else None, line, self._following(position)))
        if record is None:
            return not signed and self._leap()
        self.records.append(record)
        self.measure.learn(record.names, record.payload, record.present, record.stored, _checksum(record))
        if record.endless:
            self.position = record.payload
            return self._leap()
        self.position = record.end
        return record.present == record.stored

    def _line_for(self, local: Local | None, here: Line | None) -> Line | None:
        """The line of a header: the one that points to it, unless that is one of another record, or one of its name."""
        named = self._by_name.get(local.name) if local else None
        if named is None or _points_well(self.source, named):
            return here
        return named if here is None or not _near(here.name, named.name) else here

    def _leap(self) -> bool:
        """Go on at the next header: the next the directory knows, or the next that looks like one."""
        following = self._next(self.position)
        found = self._search(following)
        if found is None and following is None:
            return False
        self.position = following if found is None else found  # type: ignore[assignment]
        return True

    def _next(self, position: int) -> int | None:
        index = bisect_right(self._headers, position)
        return self._headers[index] if index < len(self._headers) else None

    def _following(self, position: int) -> int | None:
        """Where the next record begins, or the directory, by what the directory says."""
        following = self._next(position)
        if following is None and self.directory.complete and self.directory.start > position:
            return self.directory.start
        return following

    def _search(self, before: int | None) -> int | None:
        """The next header that looks like one of an archive; bytes like its signature occur in weights."""
        if is_sign(self.source.read(self.position, 4), CENTRAL):
            return None
        at, stop = self.position + 1, before or (self.directory.start if self.directory.start > 0 else self.source.size)
        while at < stop and self._budget > 0:
            window = self.source.read(at, _CHUNK + 3)
            found = window.find(LOCAL)
            while found >= 0:
                if at + found < stop and is_plausible(local_at(self.source, at + found)):
                    return at + found
                found = window.find(LOCAL, found + 1)
            at += _CHUNK
            self._budget -= _CHUNK
        return None


def _near(one: bytes, other: bytes) -> bool:
    """Whether two names differ in one bit."""
    if len(one) != len(other):
        return False
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count() <= 1


def _checksum(record: Found) -> int | None:
    return record.line.crc32 if record.line else record.described.crc32 if record.described else None
