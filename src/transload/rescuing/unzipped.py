"""An archive that was unpacked into a directory, put together again."""

from __future__ import annotations

import os
from zlib import crc32

from transload.checkpoint import Record
from transload.findings import Problem
from transload.formats.directory import open_directory
from transload.io.sources import FileSource, copied
from transload.rescuing.layout import Item, laid_out
from transload.rescuing.mended import Mended
from transload.rescuing.parts import Assembly, Part

__all__ = ["recover_directory"]

_CHUNK = 1 << 20
_NEEDED = ("data.pkl", "constants.pkl", "model.json", "archive_format", ".data/extern_modules")


class _Closed:
    """A file that is open only while it is read: an archive has more records than a process may have files open."""

    def __init__(self, path: str, size: int) -> None:
        self.name = path
        self.size = size

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        source = FileSource(self.name)
        try:
            return source.read(offset, min(count, self.size - offset))
        finally:
            source.close()

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""


def recover_directory(path: str) -> Mended | None:
    """The archive a directory was unpacked from; ``None`` if it was none. Its files have no checksums."""
    from transload.rescuing.small import with_version
    from transload.rescuing.tidy import tidied

    problems: list[Problem] = []
    archive = open_directory(path, problems)
    if not any(name.rpartition("/")[2] in _NEEDED or name in _NEEDED for name in archive.records):
        return None
    notes = [f"{problem.where}: {problem.detail}" for problem in problems[:8]]
    top = os.path.realpath(path)
    root = os.path.basename(top)  # noqa: PTH119 - texts throughout, as given
    items = [
        _item(f"{root}/{record.name}", _Closed(os.path.join(top, record.name), record.size), number)  # noqa: PTH118 - as above
        for number, record in enumerate(_in_order(list(archive.records.values())))
    ]
    items = with_version(tidied(items, notes), notes)
    whole = Assembly((part for part, _, _ in laid_out(items)), path)
    return Mended(whole, exact=False, notes=tuple(notes), items=tuple(items), all_unchecked=True)


def _in_order(records: list[Record]) -> list[Record]:
    """The index first, as torch writes it, so that a cut of the new file loses as little as can be."""
    return sorted(records, key=lambda record: not record.name.endswith("data.pkl"))


def _item(name: str, source: _Closed, order: int) -> Item:
    value = 0
    for start in range(0, source.size, _CHUNK):
        value = crc32(source.read(start, _CHUNK), value)
    raw = os.fsencode(name)
    flags = 0x0808 if source.size else 0x0800
    return Item(
        raw, (Part(source, 0, source.size),), source.size, source.size, value, flags=flags, order=order, origin=raw
    )
