"""What became of a damaged checkpoint, by tensor, and what ``transload rescue`` says about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from transload.frozen import Frozen, NamedTuple
from transload.render import Reported
from transload.render.lines import Block, Prose, Rows, Table, Words, row
from transload.render.words import path_text, plural, printable, size
from transload.rescuing.archive import LostRecord
from transload.rescuing.bitflips import Repair
from transload.steps import tables

Fill = Literal["zeros", "nan"]
_ROWS = 32
_SHORT = 36
_NOWHERE = "headers and directory"
_CERTAINTY = {"proven": "good", "probable": "trust", "ambiguous": "bad"}


class TensorOutcome(NamedTuple):
    """What became of one tensor.

    ``checked`` is whether a checksum confirms its bytes. ``why`` is the reason it is lost.
    """

    name: str
    state: Literal["whole", "repaired", "lost"]
    nbytes: int
    checked: bool
    why: str = ""


class Rescue(Frozen, Reported):
    """What became of a damaged file, by tensor.

    ``tensors`` are all tensors the file names, each ``whole``, ``repaired`` or ``lost``; ``records`` are other
    parts of it that are lost. ``repairs`` are the bytes that were repaired. ``how`` is what was written, or would be:
    ``exact`` (as far as is known, byte for byte the file that was saved), ``rebuilt`` (everything, in a new layout),
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
    repairs: tuple[Repair, ...] = ()
    fill: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[TensorOutcome, ...]:
        """Tensors whose bytes are those that were saved."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "whole")

    @property
    def repaired(self) -> tuple[TensorOutcome, ...]:
        """Tensors in which a flipped bit was repaired."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "repaired")

    @property
    def lost(self) -> tuple[TensorOutcome, ...]:
        """Tensors that are not in the new file, or only with some of their bytes filled."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "lost")

    @property
    def complete(self) -> bool:
        """Whether everything was recovered, without doubt."""
        sure = all(repair.certainty == "proven" for repair in self.repairs)
        return sure and self.how != "nothing" and not (self.lost or self.records or self.warnings)

    @property
    def exit_code(self) -> int:
        """0 if everything was recovered, 1 if part of it was or a repair is not proven, 2 if nothing."""
        return 2 if self.how == "nothing" else 0 if self.complete else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what ``--json`` prints, and the report beside the new file."""
        names = ("path", "out", "report", "format", "nbytes", "how", "done", "complete", "fill")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            **{name: getattr(self, name) or None for name in ("out", "report", "fill")},
            "counts": {"whole": len(self.whole), "repaired": len(self.repaired), "lost": len(self.lost)},
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "repairs": [
                {**repair._asdict(), "bits": list(repair.bits), "record": repair.record or None}
                for repair in self.repairs
            ],
            "records": [record._asdict() for record in self.records],
            "tensors": [{**outcome._asdict(), "why": outcome.why or None} for outcome in self.tensors],
        }

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def report_path(target: str) -> str:
    """The path of the report beside a new file."""
    return f"{target}.rescue.json" if target else ""


def report(rescue: Rescue) -> Iterator[Block]:
    """Everything ``transload rescue`` prints."""
    yield Prose(((path_text(rescue.path, None), "strong"),))
    for note in rescue.notes:
        yield row("found", printable(note, None))
    yield row("whole", _counted(rescue.whole), "good" if rescue.whole else "")
    if rescue.repairs:
        bits = sum(len(repair.bits) for repair in rescue.repairs)
        tensors = f", {plural(len(rescue.repaired), 'tensor')}" if rescue.repaired else ""
        yield row("repaired", f"{plural(bits, 'bit')} in {plural(len(rescue.repairs), 'byte')}{tensors}", "trust")
        yield Table(Rows(rescue.repairs, _repaired), right=(0, 1), dim=(1, 3), shrinks=(3,), indent=14, most=_ROWS)
    if rescue.lost:
        yield row("lost", _counted(rescue.lost), "bad")
        if all(len(tensor.why) <= _SHORT for tensor in rescue.lost[:_ROWS]):
            rows = Rows(rescue.lost, _lost)
            yield Table(rows, right=(1,), dim=(1, 2), shrinks=(0, 2), drops=(1,), indent=14, most=_ROWS)
        else:  # which rows are lost, which a table would truncate on a narrow terminal
            lost = map(_lost, rescue.lost[:_ROWS])
            yield from (Prose(((why, "dim"),), lead=((f"    {name}  ", ""),)) for name, _, why in lost)
            yield from _more(len(rescue.lost), "tensors")
    for record in rescue.records[:_ROWS]:
        yield row("lost", f"{printable(record.name)}: {printable(record.why, None)}", "bad")
    yield from _more(len(rescue.records), "records")
    words = tables(__package__, "names")["written"][rescue.how].format(fill=rescue.fill)
    if rescue.how == "nothing":
        yield row("written", words, "bad")
    else:
        yield row("written" if rescue.done else "would write", words, "" if rescue.done else "trust")
    if rescue.done:
        yield row("", path_text(rescue.out, None))
        yield row("report", path_text(rescue.report, None))
    for warning in rescue.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def _repaired(repair: Repair) -> tuple[Words, ...]:
    at, old, new, record, sure = repair
    return f"byte {at:,}", f"{old:#04x} → {new:#04x}", ((sure, _CERTAINTY[sure]),), printable(record) or _NOWHERE


def _lost(tensor: TensorOutcome) -> tuple[str, str, str]:
    return printable(tensor.name) or '""', size(tensor.nbytes) if tensor.nbytes else "", tensor.why


def _more(count: int, what: str) -> Iterator[Block]:
    if count > _ROWS:
        yield row("", f"… and {count - _ROWS:,} more {what}; --json and the report have all of them", "dim")


def _counted(outcomes: tuple[TensorOutcome, ...]) -> str:
    if not outcomes:
        return "no tensors"
    words = plural(len(outcomes), "tensor")
    if outcomes[0].state != "lost" or all(outcome.nbytes for outcome in outcomes):  # 0: in a shard that is missing
        words += f", {size(sum(outcome.nbytes for outcome in outcomes))}"
    checked = sum(outcome.checked for outcome in outcomes)
    if outcomes[0].state == "lost" or checked == len(outcomes):
        return words
    return words + (f", {checked} of them confirmed by checksums" if checked else "; the file has no checksums")
