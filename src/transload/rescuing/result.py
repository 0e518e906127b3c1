"""What a rescue found, and what it wrote or would write."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from transload.frozen import facts

__all__ = ["Certainty", "Fill", "LostRecord", "Repair", "Rescue", "TensorOutcome"]

Fill = Literal["zeros", "nan"]
Certainty = Literal["proven", "probable", "ambiguous"]


class TensorOutcome(NamedTuple):
    """What became of one tensor.

    ``checked`` is whether a checksum vouches for its bytes. ``why`` is the reason it is lost.
    """

    name: str
    state: Literal["whole", "mended", "lost"]
    nbytes: int
    checked: bool
    why: str = ""


class LostRecord(NamedTuple):
    """A record that could not be recovered as it was saved, and why."""

    name: str
    why: str


class Repair(NamedTuple):
    """A corrected byte: its offset in the damaged file, its old and new value, and the record it belongs to.

    ``record`` is empty for a byte outside all records: in a header, the directory or padding.
    """

    position: int
    old: int
    new: int
    record: str
    certainty: Certainty

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that differ; 0 is the lowest."""
        return tuple(bit for bit in range(8) if (self.old ^ self.new) >> bit & 1)


@facts(frozen=True)
class Rescue:
    """What became of a damaged file, by tensor.

    ``tensors`` are all tensors the file names, each ``whole``, ``mended`` (repaired) or ``lost``; ``records`` are other
    parts of it that are lost. ``mends`` are the bytes that were repaired. ``how`` is what was written, or would be:
    ``exact`` (as far as can be told, byte for byte the file that was saved), ``rebuilt`` (everything, in a new layout),
    ``filled``, ``left-out``, ``weights`` (a program's tensors, as a dictionary), or ``nothing``. ``notes`` say what
    else was done, ``warnings`` what is uncertain.
    """

    path: str
    out: str
    report: str
    format: str
    nbytes: int
    how: str
    done: bool
    tensors: tuple[TensorOutcome, ...]
    records: tuple[LostRecord, ...] = ()
    mends: tuple[Repair, ...] = ()
    fill: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[TensorOutcome, ...]:
        """Tensors whose bytes are those that were saved."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "whole")

    @property
    def mended(self) -> tuple[TensorOutcome, ...]:
        """Tensors in which a flipped bit was repaired."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "mended")

    @property
    def lost(self) -> tuple[TensorOutcome, ...]:
        """Tensors that are not in the new file, or only with some of their bytes filled."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "lost")

    @property
    def complete(self) -> bool:
        """Whether everything was recovered, without doubt."""
        sure = all(repair.certainty != "ambiguous" for repair in self.mends)
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
                {**repair._asdict(), "bits": list(repair.bits), "record": repair.record or None}
                for repair in self.mends
            ],
            "records": [record._asdict() for record in self.records],
            "tensors": [{**outcome._asdict(), "why": outcome.why or None} for outcome in self.tensors],
        }

    def __str__(self) -> str:
        """The report as the command line prints it."""
        from transload.rescuing.report import as_text

        return as_text(self)
