"""Ordinary archives in one pass: storages from their ids and records, tensors only counted.

Nothing is reported here. Where anything is odd the answer is ``None``, and the archive is read the long way, which
knows what to say of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Storage
from transload.dtypes import ITEMSIZE, STORAGES
from transload.read.nodes import Global

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from transload.checkpoint import Record
    from transload.read.nodes import Pickle

__all__ = ["Counted", "counted"]

Counted = tuple[tuple[Storage, ...], tuple[tuple[str, int], ...]]
"""The storages, and how many tensors have each device tag."""

_PLAIN = frozenset(
    {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")}
)
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields


class _Odd(Exception):  # noqa: N818 - a signal inside this module
    """This is for the long way."""


def counted(records: Mapping[str, Record], notes: Collection[str], pickle: Pickle) -> Counted | None:
    """What an archive holds that has nothing but dictionaries of plain tensors, each record used or a known note."""
    try:
        storages, tags = _collected(records, pickle, _kinds(pickle))
    except _Odd:
        return None
    others = 1 + sum(name in records for name in notes)  # the index itself, and what is said beside it
    return (storages, tuple(Counter(tags).items())) if len(records) == len(storages) + others else None


def _kinds(pickle: Pickle) -> dict[Global, tuple[str, int]]:
    """The dtype, and the bytes of an element, of each storage class."""
    kinds: dict[Global, tuple[str, int]] = {}
    for (module, name), node in pickle.globals.items():
        if module == "torch" and name in STORAGES:
            kinds[node] = STORAGES[name], ITEMSIZE[STORAGES[name]]
        elif (module, name) not in _PLAIN:
            raise _Odd
    return kinds


def _collected(
    records: Mapping[str, Record], pickle: Pickle, kinds: Mapping[Global, tuple[str, int]]
) -> tuple[tuple[Storage, ...], list[str]]:
    """The storages that the ids in a pickle name, in its order, and the tag of every id."""
    found: dict[str, Storage] = {}
    ids: dict[str, Any] = {}
    tags: list[str] = []
    for node in pickle.persistent:
        pid: Any = node.id
        if type(pid) is not tuple or len(pid) != 5:
            raise _Odd
        mark, kind, key, tag, numel = pid
        known = kinds.get(kind) if type(kind) is Global else None
        if known is None or mark != "storage" or not (type(key) is type(tag) is str and type(numel) is int):
            raise _Odd
        tags.append(tag)
        if key not in found:
            found[key], ids[key] = _storage(records.get(f"data/{key}"), key, tag, known, numel), pid
        elif ids[key] != pid:  # named again, and otherwise
            raise _Odd
    return tuple(found.values()), tags


def _storage(record: Record | None, key: str, tag: str, kind: tuple[str, int], numel: int) -> Storage:
    if record is None:
        raise _Odd
    name, offset, size, stored, crc, method = record
    dtype, width = kind
    if offset is None or method or numel * width != size or size != stored or (not crc and size):
        raise _Odd
    return _new(Storage, (key, key, tag, dtype, size, size, offset, name, "", crc, False, False, ()))
