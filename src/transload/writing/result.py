"""What a conversion wrote, and what it did not; and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transload.findings import join_names
from transload.frozen import Frozen, Reported
from transload.render.lines import Block, Prose, as_text, row
from transload.render.words import plural, printable, size
from transload.writing.objects import Omission


class Conversion(Frozen, Reported):
    """What was converted, and what was not.

    ``files`` are those written; the first contains the weights, or is the directory. ``nbytes`` is the size of all
    tensors; ``copied`` is always 0. ``aliases`` are further names of tensors that are stored once. ``left`` are tensors
    that are not in the target; those with ``lost`` because it cannot store them. ``listed`` is what else it cannot
    store and is not plain data, such as functions: it is written nowhere. Plain data is in the file ``leftovers``.
    ``others`` counts tensors outside the key. ``notes`` also names the tensors that are numpy arrays in the source.
    """

    path: str
    out: str
    format: str
    to: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    copied: int = 0
    cast: int = 0
    infinite: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    left: tuple[Omission, ...] = ()
    listed: tuple[Omission, ...] = ()
    leftovers: str = ""
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    verified: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every requested tensor is in the target."""
        return not any(each.lost for each in self.left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("path", "out", "format", "to", "complete", "verified", "files", "tensors", "nbytes", "copied", "cast")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in (*names, "infinite", "others")},
            "files": list(self.files),
            "seconds": round(self.seconds, 3),
            "aliases": dict(self.aliases),
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "left": [each._asdict() for each in self.left],
            "leftovers": self.leftovers or None,
            "listed": [{"name": each.name, "what": each.why} for each in self.listed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The report as the command line gives it, without colour."""
        return as_text(report(self))


# -- the report

_SHOWN = 16
_FORMATS = {"torch": "torch zip", "safetensors": "safetensors", "npz": "npz", "raw": "raw tensors"}


def report(conversion: Conversion) -> Iterator[Block]:
    """Everything ``transload convert`` says."""
    yield Prose(((printable(conversion.out, None), "strong"),))
    yield row("written", _written(conversion))
    if conversion.cast:
        infinite = f", {conversion.infinite:,} numbers became infinite" if conversion.infinite else ""
        rounded = f"{plural(conversion.cast, 'tensor')} to another dtype{infinite}"
        yield row("rounded", rounded, "trust" if infinite else "")
    if conversion.aliases:
        tied = [f"{printable(name)} is {printable(kept)}" for name, kept in conversion.aliases]
        yield row("tied", join_names(tied, _SHOWN, 1000))
    if conversion.renamed:
        renamed = [f"{printable(old) or 'the root'} → {printable(new)}" for old, new in conversion.renamed]
        yield row("renamed", join_names(renamed, _SHOWN, 1000), "trust")
    if conversion.others:
        yield row("not chosen", plural(conversion.others, "tensor") + " outside the key", "dim")
    yield from _omissions("lost", [each for each in conversion.left if each.lost], "bad")
    yield from _omissions("left out", [each for each in conversion.left if not each.lost], "")
    if conversion.leftovers:
        yield row("leftovers", f"everything else, as plain data: {printable(conversion.leftovers, None)}")
    yield from _omissions("not kept", conversion.listed, "bad", "; --json names them")
    for note in conversion.notes:
        yield row("note", printable(note, None), "dim")


def _written(conversion: Conversion) -> str:
    shards = sum(name.endswith(".safetensors") for name in conversion.files)
    files = f", {plural(shards, 'shard')} and an index" if shards > 1 else ""
    nbytes, seconds = conversion.nbytes, conversion.seconds
    speed = f", {size(round(nbytes / seconds))}/s" if nbytes >= 1e8 and seconds else ""
    checked = "read back and compared" if conversion.verified else "not read back"
    tensors = f"{plural(conversion.tensors, 'tensor')}, {size(nbytes)}"
    return f"{_FORMATS[conversion.to]}: {tensors}{files}{speed}; {checked}"


def _omissions(label: str, omissions: Sequence[Omission], role: str, hint: str = "") -> Iterator[Block]:
    for name, why, _ in omissions[:_SHOWN]:
        yield row(label, f"{printable(name) or 'the root'}: {printable(why)}", role)
        label = ""  # only before the first
    if len(omissions) > _SHOWN:
        yield row("", f"… and {len(omissions) - _SHOWN:,} more{hint}", "dim")
