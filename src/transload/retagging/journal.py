"""The journal of a change, which lies beside the file while it is changed.

It is on the disk before the first byte of the file is touched, and gone after the last one is safe. Whoever finds one
beside a file knows that the file was left half changed, and can put it right.

A journal holds every byte that is to be overwritten and every byte that comes in its place. It is written under
another name and gets its own only when it is on the disk, so there is never half a journal.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Literal, NamedTuple

from transload.retagging.changes import Change, Changes
from transload.retagging.disk import read_at

__all__ = ["Journal", "State", "journal_of", "state_of"]

State = Literal["old", "new", "between", "foreign"]

_MAGIC = b"TLRETAG1"
_HEAD = Struct("<8s3Q?I")  # magic, inode, both sizes, whether to keep it, how many runs
_RUN = Struct("<3Q")
_DIGEST = 32


class Journal(NamedTuple):
    """What is being done to a file. ``keep`` is whether it can be undone afterwards.

    A journal speaks of one file on this machine, by its ``inode``: one that came with a download changes nothing.
    """

    changes: Changes
    inode: int = 0
    keep: bool = False

    def encoded(self) -> bytes:
        """The bytes of the journal."""
        from hashlib import sha256

        old_size, new_size = self.changes.old_size, self.changes.new_size
        runs = self.changes.runs
        head = _HEAD.pack(_MAGIC, self.inode, old_size, new_size, self.keep, len(runs))
        table = b"".join(_RUN.pack(run.offset, len(run.old), len(run.new)) for run in runs)
        body = b"".join((head, table, *(part for run in runs for part in (run.old, run.new))))
        return body + sha256(body).digest()


def journal_of(data: bytes) -> Journal | None:
    """The journal in some bytes, ``None`` if they are not all of one.

    >>> journal_of(Journal(Changes((Change(0, b"a", b"b"),), 1, 1)).encoded()).changes.runs
    (Change(offset=0, old=b'a', new=b'b'),)
    >>> journal_of(b"") is None
    True
    """
    from hashlib import sha256

    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if len(body) < _HEAD.size or body[:8] != _MAGIC or sha256(body).digest() != digest:
        return None
    _, inode, old_size, new_size, keep, count = _HEAD.unpack_from(body)
    position = _HEAD.size + count * _RUN.size
    runs: list[Change] = []
    for offset, n_old, n_new in _RUN.iter_unpack(body[_HEAD.size : position]):
        middle, end = position + n_old, position + n_old + n_new
        runs.append(Change(offset, body[position:middle], body[middle:end]))
        position = end
    return Journal(Changes(tuple(runs), old_size, new_size), inode, keep)


def state_of(descriptor: int, changes: Changes) -> State:
    """How far a file has got: it is as it was, as it shall be, or on the way; or it is another file altogether.

    A file is known by its size and by every byte that was to change.
    """
    size = os.fstat(descriptor).st_size
    here = [read_at(descriptor, run.offset, max(len(run.old), len(run.new))) for run in changes.runs]
    pairs = list(zip(here, changes.runs, strict=True))
    if size == changes.old_size and all(data[: len(run.old)] == run.old for data, run in pairs):
        return "old"
    if size == changes.new_size and all(data[: len(run.new)] == run.new for data, run in pairs):
        return "new"
    least, most = sorted((changes.old_size, changes.new_size))
    if least <= size <= most and all(_is_between(data, run) for data, run in pairs):
        return "between"
    return "foreign"


def _is_between(here: bytes, run: Change) -> bool:
    """Whether each byte is the old or the new one. What lies beyond the old end may be anything: it will be cut off."""
    return all(byte in pair for byte, *pair in zip(here, run.old, run.new))  # noqa: B905 - up to the shortest
