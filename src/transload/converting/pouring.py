"""Large files written and read back in one pass: a chunk is filled, summed, written, read again and compared.

One thread fills chunks in the order of the file; others sum, write and compare them, in any order. On Linux the bytes
go to the disk and come back from it past the page cache where the file system allows it: what is compared is then what
the disk holds, no flush is left to wait for, and neither the source nor anybody else's file is pushed out of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.crew import Chunk, Crew, Part
from transload.tensors import ContentError

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry
    from transload.tensors import Run

__all__ = ["Poured", "can_pour", "pour"]


class Poured(NamedTuple):
    """What came of a file: CRC-32 of the bytes of each entry."""

    checksums: list[int]


def can_pour() -> bool:
    """Whether files can be written and read at any place here, by several threads."""
    return hasattr(os, "pwrite") and hasattr(os, "preadv")


def pour(  # noqa: PLR0913 - what, where to, and how
    descriptor: int,
    head: bytes,
    entries: list[Entry],
    data: Data,
    *,
    where: str,
    tell: Callable[[int], None] | None = None,
) -> Poured:
    """Write a file of ``head`` and the bytes of entries, and make sure that it is so; ``ConvertError`` if it is not."""
    size = len(head) + sum(entry.nbytes for entry in entries)
    filler = _Filler(Crew(descriptor, size, where), tell)
    with filler.crew:
        filler.put(head)
        for index, entry in enumerate(entries):
            filler.entry(index, entry, data)
        filler.finish()
    return Poured(filler.joined(len(entries)))


class _Filler:
    """Fills chunks one after the other, and takes back those that are done."""

    def __init__(self, crew: Crew, tell: Callable[[int], None] | None) -> None:
        self.crew = crew
        self._tell = tell
        self._chunk = crew.first()
        self._sums: list[tuple[int, int, int, int]] = []  # entry, place in the file, bytes, checksum

    def entry(self, index: int, entry: Entry, data: Data) -> None:
        """The bytes of an entry: read to where they are written from, if they lie in a file as they are."""
        run = data.run(entry)
        if run is not None:
            self._run(index, data.content.open_file(run.file), run)
            return
        came = 0
        for piece in data.pieces(entry):
            self.put(piece, index)
            came += len(piece)
        if came != entry.nbytes:
            raise ContentError(f"{entry.name} has {came:,} bytes, not {entry.nbytes:,}")

    def _run(self, index: int, source: Any, run: Run) -> None:
        done = 0
        while done < run.nbytes:
            room = self._room(run.nbytes - done)
            count = source.readinto(run.offset + done, room)
            if not count:
                raise ContentError("the file has become shorter while it was read", where=source.name)
            self._add(index, count)
            done += count

    def put(self, data: Any, index: int = -1) -> None:
        """Bytes that are here."""
        view = memoryview(data)
        while view:
            room = self._room(len(view))
            room[:] = view[: len(room)]
            self._add(index, len(room))
            view = view[len(room) :]

    def _room(self, nbytes: int) -> memoryview:
        chunk = self._chunk
        if chunk.filled == len(chunk.view):
            self.crew.give(chunk)
            chunk = self._chunk = self._next(chunk.offset + chunk.filled)
        return chunk.view[chunk.filled : chunk.filled + nbytes]

    def _add(self, index: int, nbytes: int) -> None:
        chunk = self._chunk
        if index >= 0:
            chunk.parts.append(Part(index, chunk.filled, nbytes))
        chunk.filled += nbytes

    def _next(self, offset: int) -> Chunk:
        chunk = self.crew.free()
        self._done(chunk)
        chunk.clear(offset)
        return chunk

    def _done(self, chunk: Chunk) -> None:
        for part, checksum in zip(chunk.parts, chunk.sums, strict=True):
            self._sums.append((part.entry, chunk.offset + part.start, part.nbytes, checksum))
        if self._tell is not None and chunk.filled:
            self._tell(chunk.filled)

    def finish(self) -> None:
        """Write the last chunk, and wait for all."""
        self.crew.give(self._chunk)
        for chunk in self.crew.finish():
            self._done(chunk)

    def joined(self, count: int) -> list[int]:
        """The checksums of all entries, from those of their parts."""
        from transload.io.checksums import combined

        found: list[int | None] = [None] * count
        for entry, _, nbytes, checksum in sorted(self._sums):
            before = found[entry]
            found[entry] = checksum if before is None else combined(before, checksum, nbytes)
        return [each or 0 for each in found]
