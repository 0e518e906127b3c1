"""A plan of landing in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.loading.placement import UNDECIDED, listed
from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.words import plural, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.loading.placement import Move, Plan, Shortage

__all__ = ["as_text", "landing", "shortage_words"]


_TAGS = 16


def as_text(plan: Plan) -> str:
    """A line for each tag, and what stands against it, as a pipe gets it."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(landing(plan), Style()))


def landing(plan: Plan) -> Iterator[Block]:
    """The same as blocks."""
    if not plan.moves:
        yield Prose((("there is nothing to place", "dim"),), lead=(("  ", ""),))
    yield Table([_row(move) for move in plan.moves[:_TAGS]], right=frozenset({4}), drops=(3, 4))
    if len(plan.moves) > _TAGS:
        yield Prose(((f"… and {len(plan.moves) - _TAGS:,} more devices", "dim"),), lead=(("  ", ""),))
    if plan.how and plan.ok:
        yield Prose(((f"read by {plan.how}", "dim"),), lead=(("  ", ""),))
    if plan.refused:
        yield _against(plan.refused)
    for short in plan.shortages:
        yield _against(shortage_words(short))
        for words in short.instead:
            yield _fix(words)
    for words in plan.fix:
        yield _fix(words)


def shortage_words(short: Shortage) -> str:
    """What a device lacks, in a phrase.

    >>> from transload.loading.placement import Shortage
    >>> shortage_words(Shortage("cuda:0", 14_000_000_000, 10_000_000_000))
    'cuda:0 has 10.0 GB free and would need 14.0 GB: 4.00 GB too little'
    """
    lack = f"{size(short.missing)} too little"
    return f"{short.device} has {size(short.free)} free and would need {size(short.needed)}: {lack}"


def _row(move: Move) -> tuple[Line, ...]:
    """The cells of one tag: where from, where to, why, how much."""
    lost = not move.device
    target = "nowhere" if lost else "undecided" if move.device == UNDECIDED else printable(move.device, 24)
    role = "bad" if lost else "trust" if move.moved else "good"
    return (
        ((listed([move.tag]), ""),),
        (("→ ", "dim"), (target, role)),
        ((printable(move.why, None), "dim" if not move.moved else ""),),
        ((plural(move.tensors, "tensor"), "dim"),),
        ((size(move.nbytes), ""),),
    )


def _against(text: str) -> Block:
    return Prose(((printable(text, None), "strong"),), lead=(("✗ ", "bad"),))


def _fix(text: str) -> Block:
    return Prose(((printable(text, None), ""),), lead=(("  → ", "good"),))
