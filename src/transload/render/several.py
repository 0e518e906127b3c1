"""Several files at a glance, then what was found in those that have a problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.errors import TransloadError
from transload.render.escape import printable
from transload.render.lines import Block, Line, Table, heading
from transload.render.sizes import count, plural, size
from transload.render.text import findings
from transload.render.words import INTEGRITY, SAFETY, format_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.checkpoint import Checkpoint

__all__ = ["files"]

_TITLES = ("file", "format", "tensors", "size", "devices", "safety", "integrity")


def files(results: Sequence[Checkpoint | TransloadError]) -> Iterator[Block]:
    """A table of several files, then what was found in those that have a problem."""
    seen = [result for result in results if not isinstance(result, TransloadError)]
    rows = [_file_row(result) for result in seen]
    if rows:
        title: tuple[Line, ...] = tuple(((word, "dim"),) for word in _TITLES)
        yield Table([title, *rows], right=frozenset({2, 3}), drops=(4, 1, 2), indent=0)
    for checkpoint in seen:
        if not checkpoint.ok and checkpoint.findings:
            yield from heading(printable(checkpoint.path, None))
            for finding in findings(checkpoint.findings):
                yield from finding
    yield from heading(_tally(seen, len(results)))


def _file_row(checkpoint: Checkpoint) -> tuple[Line, ...]:
    devices = [printable(use.device, 24) for use in checkpoint.devices]
    shown = ", ".join(devices[:2]) + (f" and {len(devices) - 2} more" if len(devices) > 2 else "")
    return (
        ((printable(checkpoint.path), ""),),
        ((format_words(checkpoint), "dim"),),
        ((count(len(checkpoint.tensors)), ""),),
        ((size(checkpoint.nbytes), ""),),
        ((shown, "dim"),),
        ((checkpoint.safety, SAFETY[checkpoint.safety][0]),),
        ((checkpoint.integrity, INTEGRITY[checkpoint.integrity][0]),),
    )


def _tally(seen: Sequence[Checkpoint], total: int) -> str:
    bad = sum(not checkpoint.ok for checkpoint in seen)
    words = [plural(total, "file"), f"{bad:,} with a problem" if bad else "no problem"]
    if len(seen) < total:
        words.append(f"{total - len(seen):,} not read")
    return ", ".join(words)
