"""The plan of a landing: what goes where and why, whether it fits, and the one warning that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from transload.frozen import facts
from transload.place.devices import split

__all__ = ["UNDECIDED", "Move", "Plan", "Reason", "Shortage", "listed"]

Reason = Literal["saved", "here", "absent", "lost", "rank", "float64", "asked", "function"]

UNDECIDED = "?"
"""The device of what a function of the caller's will decide on."""

_WORDS: dict[Reason, str] = {
    "saved": "it was saved there",
    "here": "it is here",
    "absent": "there is no {tag} here{detail}",
    "lost": "there is no {detail} here",
    "rank": "this process has local rank {detail}",
    "float64": "{detail} cannot hold float64",
    "asked": "you asked for it",
    "function": "your function decides",
}
_SHOWN = 8
_LONGEST = 40


@facts(frozen=True)
class Move:
    """All storages of one tag: where they were, where they go, and why."""

    tag: str
    device: str
    """Empty where nothing here can take them; ``UNDECIDED`` where a function of the caller's decides."""
    reason: Reason
    tensors: int = 0
    nbytes: int = 0
    detail: str = ""
    """What the reason alone does not tell."""

    @property
    def moved(self) -> bool:
        """Whether it lands elsewhere than it was: ``cuda`` names any of its kind, and ``mps:0`` is ``mps``.

        >>> Move("cuda", "cuda:0", "here").moved, Move("cuda:1", "cuda:0", "absent").moved
        (False, True)
        """
        if self.tag == self.device:
            return False
        (kind, _), (before, index) = split(self.device), split(self.tag)
        same = self.tag == kind or (index == 0 and before == self.device)
        return not same and self.device != UNDECIDED

    @property
    def why(self) -> str:
        """The reason in a phrase.

        >>> Move("cuda:1", "cpu", "absent").why
        'there is no cuda:1 here'
        """
        return _why(self.reason, listed([self.tag]), self.detail)


@facts(frozen=True)
class Shortage:
    """A device that has too little memory."""

    device: str
    needed: int
    free: int
    instead: tuple[str, ...] = ()
    """What would fit, in words."""

    @property
    def missing(self) -> int:
        """Bytes it lacks."""
        return self.needed - self.free


@facts(frozen=True)
class Plan:
    """Where a checkpoint lands.

    >>> plan = Plan((Move("cuda:1", "cpu", "absent", 2, 1024),), surprising=True)
    >>> plan.device_of("cuda:1"), plan.device_of("cpu")
    ('cpu', 'cpu')
    >>> plan.warning
    '2 tensors saved on cuda:1 land on cpu: there is no cuda:1 here'
    """

    moves: tuple[Move, ...] = ()
    """One for each tag, that of the most bytes first."""
    shortages: tuple[Shortage, ...] = ()
    refused: str = ""
    """Why it cannot land as wished, in a sentence; empty where it can."""
    fix: tuple[str, ...] = ()
    surprising: bool = False
    """Whether something lands elsewhere than its tag says though the caller did not ask for it."""
    how: str = ""
    """How its bytes would be moved, in a phrase; empty where nobody has looked."""

    @property
    def ok(self) -> bool:
        """Whether it lands, and fits."""
        return not self.refused and not self.shortages

    def device_of(self, tag: str) -> str:
        """Where storages of a tag go; a tag the plan does not know stays what it is."""
        return next((move.device for move in self.moves if move.tag == tag), tag)

    @property
    def warning(self) -> str:
        """The one sentence on what was moved and why; empty where nothing was that the caller did not ask for."""
        if not self.surprising:
            return ""
        groups: dict[tuple[str, Reason, str], list[Move]] = {}
        for move in self.moves:
            if move.moved:
                groups.setdefault((move.device, move.reason, move.detail), []).append(move)
        return "; ".join(_told(together) for together in groups.values())

    def __str__(self) -> str:
        """The plan as ``transload check`` shows it, without colour."""
        from transload.render.landing import as_text

        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "refused": self.refused,
            "fix": list(self.fix),
            "warning": self.warning,
            "how": self.how,
            "moves": [
                {
                    "tag": move.tag,
                    "device": move.device,
                    "reason": move.reason,
                    "why": move.why,
                    "tensors": move.tensors,
                    "nbytes": move.nbytes,
                }
                for move in self.moves
            ],
            "shortages": [
                {
                    "device": short.device,
                    "needed": short.needed,
                    "free": short.free,
                    "missing": short.missing,
                    "instead": list(short.instead),
                }
                for short in self.shortages
            ],
        }


def listed(names: Sequence[str], joint: str = "and") -> str:
    r"""Some names as people write them. A tag is a stranger's text: it may be of any length, and unprintable.

    >>> listed(["cuda:0", "cuda:1", "cpu"]), listed(["a", "b"], "or"), listed(["no\nsuch"])
    ('cuda:0, cuda:1 and cpu', 'a or b', "'no\\nsuch'")
    """
    shown = [_printable(name) for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        shown.append(f"{len(names) - _SHOWN:,} more")
    *most, last = shown
    return f"{', '.join(most)} {joint} {last}" if most else last


def _printable(name: str) -> str:
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    return short if short.isprintable() and short else ascii(short)


def _why(reason: Reason, tag: str, detail: str) -> str:
    detail = f"; {detail}" if reason == "absent" and detail else detail
    return _WORDS[reason].format(tag=tag, detail=detail)


def _told(together: Sequence[Move]) -> str:
    """What to say of tags that go the same way for the same reason."""
    count = sum(move.tensors for move in together)
    tensors = "1 tensor" if count == 1 else f"{count:,} tensors"
    tags = [move.tag for move in together]
    first = together[0]
    why = _why(first.reason, listed(tags, "or"), first.detail)
    return f"{tensors} saved on {listed(tags)} land on {first.device}: {why}"
