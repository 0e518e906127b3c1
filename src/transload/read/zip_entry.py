"""The entries of a zip directory by their names: which are the same to some reader, which are odd, what folder it is.

An archive has tens of thousands of them, nearly always in order: all names together are looked at first, joined by
newlines, and one by one only if there is anything to tell.
"""

from __future__ import annotations

from typing import NamedTuple

from transload.findings import Problem

__all__ = ["Entry", "check_names", "find_root", "names_below", "text_of"]


class Entry(NamedTuple):
    """One line of the central directory."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    header: int


def text_of(raw: bytes) -> str:
    """A name as text; bytes that are none are spelled out."""
    return raw.decode("utf-8", "backslashreplace")


def _joined(entries: list[Entry]) -> bytes:
    r"""All names, a newline before each; empty if a name has one itself.

    >>> _joined([Entry(b"a/b", 0, 0, 0, 0, 0, 0), Entry(b"a/c", 0, 0, 0, 0, 0, 0)])
    b'\na/b\na/c'
    """
    joined = b"\n".join([b"", *[entry[0] for entry in entries]])
    return joined if joined.count(b"\n") == len(entries) else b""


def check_names(entries: list[Entry], problems: list[Problem]) -> None:
    """Names that readers take for the same, or read in different ways."""
    if not _are_plain(_joined(entries), len(entries)):
        _check_each(entries, problems)


def _are_plain(joined: bytes, count: int) -> bool:
    """Whether all names differ and none is one that ``_check_each`` has a word for."""
    odd = not joined.isascii() or b"\0" in joined or b"\\" in joined or b".." in joined or b"\n/" in joined
    return not odd and len(set(joined.lower().split(b"\n")[1:])) == count


def _check_each(entries: list[Entry], problems: list[Problem]) -> None:
    seen: dict[bytes, Entry] = {}
    for entry in entries:
        raw = entry[0]
        folded = raw.lower()  # miniz compares ASCII letters without case, over an unstable sort
        before = seen.get(folded)
        # torch 1.1 wrote the code of a shared submodule once for each of its names.
        if before is not None and not (b"/code/" in raw and before[:6] == entry[:6]):
            detail = f"again, after {text_of(before[0])}: which of them torch reads is chance"
            problems.append(Problem("zip-duplicate-name", text_of(raw), detail))
        seen[folded] = entry
        if b"\0" in raw:
            problems.append(Problem("zip-nul-name", text_of(raw), "zipfile cuts a name at a NUL byte, torch does not"))
        if b"\\" in raw or raw[:1] == b"/" or (b".." in raw and b".." in raw.split(b"/")):
            problems.append(Problem("zip-odd-name", text_of(raw), "not a plain path below one folder"))
        if not raw.isascii() and not _is_utf8(raw):
            problems.append(Problem("zip-name-encoding", text_of(raw), "it is not UTF-8"))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def find_root(entries: list[Entry], problems: list[Problem]) -> str | None:
    """The folder torch takes all records from, that of the first entry; where it holds no index, one that does.

    ``None`` if the records lie in no folder.
    """
    first = entries[0].raw_name
    folder, slash, _ = first.partition(b"/")
    if not slash:
        detail = "records lie at the top; torch wants them in one folder"
        problems.append(Problem("zip-no-folder", text_of(first), detail))
        return None
    lead = folder + b"/"
    if _joined(entries).count(b"\n" + lead) == len(entries):
        return text_of(folder)
    outside = [entry.raw_name for entry in entries if not entry.raw_name.startswith(lead)]
    if outside:
        detail = f"{len(outside)} records lie outside the folder {text_of(folder)}/"
        problems.append(Problem("zip-two-folders", text_of(outside[0]), detail))
        indexed = [raw[:-9] for raw in outside if raw.count(b"/") == 1 and raw.endswith(b"/data.pkl")]
        if indexed and folder + b"/data.pkl" not in {entry.raw_name for entry in entries}:
            return text_of(indexed[0])
    return text_of(folder)


def names_below(entries: list[Entry], prefix: str) -> list[str]:
    """Each name as its path below ``prefix``; those outside it whole, with a slash before them."""
    names = text_of(_joined(entries)).split(f"\n{prefix}")
    if len(names) == len(entries) + 1:
        return names[1:]
    names = [text_of(entry.raw_name) for entry in entries]
    cut = len(prefix)
    return [name[cut:] if name.startswith(prefix) else f"/{name}" for name in names] if cut else names
