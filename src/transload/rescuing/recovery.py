"""A damaged file, whatever it is, as the file it was or as much of it as there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from transload.formats.safetensors import looks_like as looks_like_safetensors
from transload.formats.torch_legacy import looks_like_legacy
from transload.io.sources import Slice, Source
from transload.rescuing.archive import recover_archive
from transload.rescuing.directory import find_directory
from transload.rescuing.headers import LOCAL, is_plausible, is_sign, local_at
from transload.rescuing.legacy import looks_like_a_stream, recover_legacy
from transload.rescuing.mended import Mend, Mended
from transload.rescuing.safetensors import recover_safetensors
from transload.rescuing.survey import survey
from transload.rescuing.undoing import as_text_undone

__all__ = ["recovered"]

_SEARCH = 64 << 20
"""How far the beginning of a checkpoint is looked for behind what is none."""

_STREAM = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class _Attempt(NamedTuple):
    offset: int
    mended: Mended

    @property
    def worth(self) -> tuple[bool, int, int]:
        """What makes one attempt better than another."""
        mended = self.mended
        kept = len(mended.items) - len(mended.lost)
        return not mended.lost and not mended.gone, kept, -self.offset


def recovered(source: Source, stack: ExitStack) -> Mended | None:
    """The best that can be made of a source; ``None`` if no checkpoint can be seen in it."""
    best = max(_attempts(source), key=lambda attempt: attempt.worth, default=None)
    if best is None or best.mended.lost or best.mended.gone:
        text = as_text_undone(source, stack)
        other = max(_attempts(text), key=lambda attempt: attempt.worth, default=None) if text is not None else None
        if other is not None and (best is None or other.worth > best.worth):
            note = "it was copied as text, with a CR before every LF: those were taken out"
            return other.mended._replace(exact=False, notes=(note, *other.mended.notes))
    return None if best is None else _told(source, best)


def _told(source: Source, attempt: _Attempt) -> Mended:
    """The attempt with its places counted from the beginning of the file."""
    offset, mended = attempt
    if not offset:
        return mended
    mends = tuple(Mend(m.position + offset, m.old, m.new, m.record, m.certainty) for m in mended.mends)
    kind = "another archive" if is_sign(source.read(0, 4), LOCAL) else "something else"
    note = f"the checkpoint begins at byte {offset:,}; before it is {kind}"
    return mended._replace(mends=mends, notes=(note, *mended.notes))


def _attempts(source: Source) -> Iterator[_Attempt]:
    found = False
    first: Mended | None = None
    for offset in _archive_starts(source):
        if first is not None and _is_within(source, offset, first):
            continue
        mended = recover_archive(Slice(source, offset, source.size - offset, source.name) if offset else source)
        if mended is not None:
            found, first = True, first or mended
            yield _Attempt(offset, mended)
    for looks_like, recover in _STREAMS:
        if not found and looks_like(source):
            mended = recover(source)
            if mended is not None:
                found = True
                yield _Attempt(0, mended)
    if not found:
        yield from _searched(source)


_STREAMS: tuple[tuple[Callable[[Source], bool], Callable[[Source], Mended | None]], ...] = (
    (lambda source: looks_like_legacy(source) or looks_like_a_stream(source), recover_legacy),
    (lambda source: looks_like_safetensors(source) or source.read(8, 2) == b'{"', recover_safetensors),
)


def _is_within(source: Source, offset: int, outer: Mended) -> bool:
    """Whether a place is in a whole record of an archive, or where a record begins: what is there is a part of it."""
    lost = {lost.name for lost in outer.lost}
    for item in outer.items:
        if item.name.partition(b"/")[2].decode("utf-8", "backslashreplace") in lost:
            continue
        if any(part.source is source and part.offset <= offset < part.offset + part.length for part in item.content):
            return True
    return any(record.payload == offset for record in survey(source).records)


def _archive_starts(source: Source) -> list[int]:
    """Where archives may begin: at the beginning, and where a directory would be right about its place."""
    starts = [0] if is_sign(source.read(0, 4), LOCAL) else []
    directory = find_directory(source)
    if directory.lines and directory.stated >= 0:
        shift = directory.start - directory.stated
        if shift > 0 and is_sign(source.read(shift, 4), LOCAL):
            starts.append(shift)
    if not starts and directory.lines:
        starts.append(0)  # its beginning was overwritten
    return starts


def _searched(source: Source) -> Iterator[_Attempt]:
    """What begins somewhere in a file that begins with something else."""
    head = source.read(0, _SEARCH)
    for sign, recover in ((LOCAL, recover_archive), (_STREAM, recover_legacy)):
        at = head.find(sign)
        while at >= 0 and sign == LOCAL and not is_plausible(local_at(source, at)):
            at = head.find(sign, at + 1)
        if at > 0:
            mended = recover(Slice(source, at, source.size - at, source.name))
            if mended is not None:
                yield _Attempt(at, mended)
                return
    at = head.find(b'{"', 9)
    if 8 < at < 1 << 20:
        mended = recover_safetensors(Slice(source, at - 8, source.size - at + 8, source.name))
        if mended is not None:
            yield _Attempt(at - 8, mended)
