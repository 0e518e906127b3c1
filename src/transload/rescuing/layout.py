"""An archive as torch lays it out, from its records: every byte of it that is not a record's own is determined.

So of an archive that torch has written, a copy without its damage can be made as soon as the records are known, byte
for byte the one that was written; and what differs from it in the file is what was damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import pack_into
from typing import NamedTuple

from transload.formats.zip import ALIGNMENT, central_entry, descriptor, end_of_archive, local_header
from transload.rescuing.parts import Part, literal

__all__ = ["Item", "laid_out"]

_FOLLOWS = 8  # the flag that says that checksum and sizes follow the bytes
_FIELD = 4


class Item(NamedTuple):
    """A record to be laid out.

    ``stored`` and ``size`` differ if it is compressed. ``padding`` is that of its header, ``None`` for what brings its
    bytes to a multiple of the alignment. ``before`` are bytes in front of it that belong to no record. ``order`` is its
    place in the directory. ``header`` is where it was in the file, -1 if it was not there; ``origin`` its name there.
    """

    name: bytes
    content: tuple[Part, ...]
    size: int
    stored: int
    crc32: int
    method: int = 0
    flags: int = 0x0808
    time: int = 0
    date: int = 0
    padding: int | None = None
    before: tuple[Part, ...] = ()
    order: int = 0
    header: int = -1
    origin: bytes = b""


def laid_out(items: Sequence[Item], after: Iterable[Part] = ()) -> Iterator[tuple[Part, bool, Item | None]]:
    """The parts of the archive in order: each, whether it is one of ours, and the item whose bytes it is."""
    lines: list[tuple[int, bytes]] = []
    at = 0
    for item in items:
        for part in item.before:
            yield part, False, None
            at += part.length
        header = _header(item, at)
        lines.append((item.order, _line(item, at)))
        yield literal(header), True, None
        for part in item.content:
            yield part, False, item
        behind = _behind(item, at)
        yield literal(behind), True, None
        at += len(header) + item.stored + len(behind)
    for part in after:
        yield part, False, None
        at += part.length
    directory = b"".join(line for _, line in sorted(lines, key=lambda each: each[0]))
    yield literal(directory + end_of_archive(len(lines), at, len(directory))), True, None


def _header(item: Item, at: int) -> bytes:
    least = local_header(item.name, item.stored, at, 1)
    padding = -(at + len(least)) % ALIGNMENT if item.padding is None else item.padding
    out = bytearray(least[:-2] + padding.to_bytes(2, "little") + b"Z" * padding)
    extra = len(out) - 30 - len(item.name)
    pack_into("<5H", out, 4, _needed(item), item.flags, item.method, item.time, item.date)
    if not item.flags & _FOLLOWS and item.stored:
        pack_into("<3L", out, 14, item.crc32, item.stored & 0xFFFFFFFF, item.size & 0xFFFFFFFF)
    pack_into("<H", out, 28, extra & 0xFFFF)
    return bytes(out)


def _behind(item: Item, at: int) -> bytes:
    if not item.flags & _FOLLOWS:
        return b""
    out = bytearray(descriptor(item.stored, item.crc32, at))
    if item.size != item.stored and out:
        pack_into("<L" if len(out) == 16 else "<Q", out, len(out) - (len(out) - 8) // 2, item.size)
    return bytes(out)


def _line(item: Item, at: int) -> bytes:
    out = bytearray(central_entry(item.name, item.stored, item.crc32, at))
    pack_into("<5H", out, 6, _needed(item), item.flags, item.method, item.time, item.date)
    if item.size != item.stored:
        pack_into("<L", out, 24, item.size)
    return bytes(out)


def _needed(item: Item) -> int:
    return 20 if item.method else 0
