"""What a rescue has found, and what it has written or would write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.frozen import facts

if TYPE_CHECKING:
    from transload.rescuing.fates import Fate
    from transload.rescuing.mended import Lost, Mend

__all__ = ["Rescue"]


@facts(frozen=True)
class Rescue:
    """What became of a damaged file, by tensor.

    ``tensors`` are all the file tells of, each ``whole``, ``mended`` or ``lost``; ``records`` are other things in it
    that are lost. ``mends`` are the bytes that were put right. ``how`` is what was written, or would be: ``exact`` (as
    far as can be told, byte for byte the file that was saved), ``rebuilt`` (all of it, laid out anew), ``filled``,
    ``left-out``, ``weights`` (a program's tensors, as a dictionary), or ``nothing``. ``notes`` say what else was done,
    ``warnings`` what is not sure.
    """

    path: str
    out: str
    report: str
    format: str
    nbytes: int
    how: str
    done: bool
    tensors: tuple[Fate, ...]
    records: tuple[Lost, ...] = ()
    mends: tuple[Mend, ...] = ()
    fill: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[Fate, ...]:
        """Tensors whose bytes are those that were saved."""
        return tuple(fate for fate in self.tensors if fate.state == "whole")

    @property
    def mended(self) -> tuple[Fate, ...]:
        """Tensors in which a flipped bit was undone."""
        return tuple(fate for fate in self.tensors if fate.state == "mended")

    @property
    def lost(self) -> tuple[Fate, ...]:
        """Tensors that are not in the new file, or only with some of their bytes filled."""
        return tuple(fate for fate in self.tensors if fate.state == "lost")

    @property
    def complete(self) -> bool:
        """Whether everything was recovered, and surely so."""
        sure = all(mend.certainty != "ambiguous" for mend in self.mends)
        return sure and self.how != "nothing" and not (self.lost or self.records or self.warnings)

    @property
    def exit_code(self) -> int:
        """0 if everything was recovered, 1 if part of it was, 2 if nothing."""
        if self.how == "nothing":
            return 2
        return 0 if self.complete else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what ``--json`` prints, and the report beside the new file."""
        return {
            "schema": 1,
            "path": self.path,
            "out": self.out or None,
            "report": self.report or None,
            "format": self.format,
            "nbytes": self.nbytes,
            "how": self.how,
            "done": self.done,
            "complete": self.complete,
            "fill": self.fill or None,
            "counts": {"whole": len(self.whole), "mended": len(self.mended), "lost": len(self.lost)},
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "mends": [
                {
                    "position": mend.position,
                    "bits": list(mend.bits),
                    "old": mend.old,
                    "new": mend.new,
                    "record": mend.record or None,
                    "certainty": mend.certainty,
                }
                for mend in self.mends
            ],
            "records": [{"name": lost.name, "why": lost.why} for lost in self.records],
            "tensors": [
                {
                    "name": fate.name,
                    "state": fate.state,
                    "nbytes": fate.nbytes,
                    "checked": fate.checked,
                    "why": fate.why or None,
                }
                for fate in self.tensors
            ],
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.render.rescue import as_text

        return as_text(self)
