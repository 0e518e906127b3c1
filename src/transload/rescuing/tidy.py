"""The records of an archive that some other program has packed, put where torch looks for them."""

from __future__ import annotations

from collections import Counter

from transload.rescuing.layout import Item

__all__ = ["root_of", "tidied"]

_MARKS = (b"data.pkl", b"constants.pkl", b"model.json", b"archive_format", b"version")
_ROOT = b"archive"


def tidied(items: list[Item], notes: list[str]) -> list[Item]:
    """The records below one folder, without those that archivers add; what was dropped is noted."""
    kept = [item for item in items if not _is_litter(item.name)]
    prefix = _prefix([item.name for item in kept])
    inside = [item for item in kept if item.name.startswith(prefix)]
    root = root_of(prefix)
    dropped = len(items) - len(inside)
    if dropped:
        some = next(item.name for item in items if item not in inside).decode("utf-8", "backslashreplace")
        notes.append(f"{dropped} records that are no part of the checkpoint were left out, such as {some[:80]}")
    if prefix != root + b"/":
        notes.append(
            f"the records were put into the folder {root.decode('utf-8', 'backslashreplace')}/, where torch looks"
        )
    return [item._replace(name=root + b"/" + item.name[len(prefix) :], header=-1) for item in inside]


def _is_litter(name: bytes) -> bool:
    """Folders, and what macOS puts into every archive."""
    last = name.rpartition(b"/")[2]
    return not last or name.startswith(b"__MACOSX/") or last == b".DS_Store" or last.startswith(b"._")


def _prefix(names: list[bytes]) -> bytes:
    """The folder of the records, with its slash: that of the index which lies highest."""
    for mark in _MARKS:
        found = [name for name in names if name.rpartition(b"/")[2].lower() == mark]
        if found:
            best = min(found, key=lambda name: (name.count(b"/"), len(name)))
            return best[: len(best) - len(mark)]
    tops = Counter(name.partition(b"/")[0] + b"/" for name in names if b"/" in name)
    return tops.most_common(1)[0][0] if tops else b""


def root_of(prefix: bytes) -> bytes:
    """The name of a folder, without what is above it.

    >>> root_of(b"backup/model/"), root_of(b"")
    (b'model', b'archive')
    """
    return prefix.rstrip(b"/").rpartition(b"/")[2] or _ROOT
