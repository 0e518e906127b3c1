"""Changes that were made to a whole file, undone: a retag that was interrupted, and a copy made as if it were text."""

from __future__ import annotations

from contextlib import ExitStack

from transload.io.journal import Journal, has_journal, journal_of, names_of, state_of
from transload.io.sources import Source
from transload.rescuing.parts import Assembly, Part, literal
from transload.rescuing.unpacking import Spool

__all__ = ["as_text_undone", "journal_undone"]

_CHUNK = 1 << 20
_MAX_JOURNAL = 1 << 30
"""It holds an index and a directory twice, and lies beside the file whoever put it there."""


def journal_undone(path: str, source: Source, notes: list[str]) -> Source | None:
    """The file as it was before a retag that was interrupted, out of the journal beside it."""
    descriptor = getattr(source, "descriptor", -1)
    if not has_journal(path) or descriptor < 0:
        return None
    journal = _journal(names_of(path).journal)
    if journal is None or state_of(descriptor, journal.changes) != "between":  # it has not begun, or is done
        return None
    parts: list[Part] = []
    at = 0
    for run in journal.changes.runs:
        if run.offset < at:
            return None
        parts += (Part(source, at, run.offset - at), literal(run.old))
        at = run.offset + len(run.old)
    parts.append(Part(source, at, max(0, journal.changes.old_size - at)))
    notes.append("a retag of it was interrupted: it is taken as it was before, by the journal beside it")
    return Assembly(parts, source.name)


def _journal(path: str) -> Journal | None:
    from pathlib import Path

    try:
        return journal_of(Path(path).read_bytes()) if Path(path).stat().st_size <= _MAX_JOURNAL else None
    except OSError:
        return None


def as_text_undone(source: Source, stack: ExitStack) -> Source | None:
    """A file without the CR that a program put before every LF, taking it for text; ``None`` if it did not."""
    spool = Spool(source.name)
    stack.callback(spool.close)
    ends = 0
    carried = b""
    for at in range(0, source.size, _CHUNK):
        data = carried + source.read(at, _CHUNK)
        carried = b"\r" if data.endswith(b"\r") and at + _CHUNK < source.size else b""
        data = data[: len(data) - len(carried)]
        found = data.count(b"\r\n")
        if found != data.count(b"\n"):
            return None
        ends += found
        spool.write(data.replace(b"\r\n", b"\n"))
    return spool if ends else None
