"""Small records of an archive without which torch does not load it, or not rightly: made anew where they are spoilt."""

from __future__ import annotations

from zlib import crc32

from transload.rescuing.layout import Item
from transload.rescuing.mended import Lost
from transload.rescuing.parts import Assembly, literal

__all__ = ["with_byteorder", "with_version"]

_VERSION = b"3\n"
_NUMBERS = {b"version": 3, b".data/version": 3, b".data/serialization_id": 40}
"""Records that torch reads as a number of so many digits, and fails to load a file where they are none."""

_ORDERS = {3: b"big", 6: b"little"}
"""What the record ``byteorder`` can hold, by its length: that is enough to make it anew."""


def with_version(items: list[Item], notes: list[str]) -> list[Item]:
    """The same records and, where it is missing, the one without which torch refuses an archive."""
    items = [item for item in items if not _is_spoilt(item)]
    below = {item.name.partition(b"/")[2]: item for item in items}
    index = below.get(b"data.pkl")
    if index is None or b"version" in below or b".data/version" in below:
        return items
    name = index.name[: -len(b"data.pkl")] + b"version"
    notes.append("the record `version` is missing, and was added: torch refuses an archive without it")
    order = 1 + max(item.order for item in items)
    return [*items, Item(name, (literal(_VERSION),), len(_VERSION), len(_VERSION), crc32(_VERSION), order=order)]


def _is_spoilt(item: Item) -> bool:
    """Whether it is a small record of digits, of other bytes: where there are no checksums, nothing else has told."""
    most = _NUMBERS.get(item.name.partition(b"/")[2], 0)
    text = Assembly(item.content, "").read(0, 64).strip() if most and not item.method else b"3"
    return not text.isdigit() or len(text) > max(most, 1)


def with_byteorder(items: list[Item], lost: list[Lost]) -> list[Item]:
    """The same records, with the one that names the order of bytes made anew if it is damaged; then it is not lost."""
    hurt = next((each for each in lost if each.name == "byteorder"), None)
    at = next((index for index, item in enumerate(items) if item.name.endswith(b"/byteorder")), None)
    if hurt is None or at is None or items[at].stored not in _ORDERS:
        return items
    lost.remove(hurt)
    right = _ORDERS[items[at].stored]
    made = items[at]._replace(content=(literal(right),), crc32=crc32(right), method=0, size=len(right), origin=b"")
    return [*items[:at], made, *items[at + 1 :]]
