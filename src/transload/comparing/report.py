"""The result of ``transload diff``, and what it says about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from transload.format import format_of
from transload.frozen import Frozen, NamedTuple, Plain
from transload.opening.numbers import ValuesDiff
from transload.render import Reported
from transload.render.lines import Block, Prose, Rows, Table, Words, heading, note, row
from transload.render.words import count, path_text, plural, printable, shape_text

Status = Literal["same", "renamed", "different", "removed", "added", "unread"]

_MOST = 20  # lines of each list


class TensorSide(NamedTuple):
    """A tensor of one of the two; ``nan`` and ``inf`` are ``None`` where they were not counted."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    nan: int | None = None
    inf: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self._asdict(), "shape": list(self.shape)}


class TensorDiff(NamedTuple):
    """A tensor of A, of B, or of both: then ``name`` is that in A, and ``renamed`` that in B if it is another.

    ``status`` is ``same``, ``renamed`` (and the same otherwise), ``different``, ``removed`` (only A has it), ``added``
    (only B has it), or ``unread``: ``note`` says why it could not be compared. ``evidence`` says why a renamed tensor
    is the same one. ``differs`` is what differs: ``dtype``, ``shape``, ``device``, ``values``, ``quantizer``.
    ``values`` says how the numbers differ; it is ``None`` where all bytes are equal, or none were compared.
    """

    name: str
    status: Status
    renamed: str = ""
    evidence: str = ""
    differs: tuple[str, ...] = ()
    a: TensorSide | None = None
    b: TensorSide | None = None
    values: ValuesDiff | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        sides = {name: side.to_dict() if side is not None else None for name, side in (("a", self.a), ("b", self.b))}
        values = self.values._asdict() if self.values is not None else None
        return {**self._asdict(), "differs": list(self.differs), **sides, "values": values}


class ValueDiff(Plain):
    """A value that is no tensor and differs; ``a`` and ``b`` are short texts, ``None`` where it does not exist."""

    name: str
    status: Status
    a: str | None
    b: str | None


class Tie(Plain):
    """Tensors, by their names in A, that are one tensor in ``only`` one of the two: ``a`` or ``b``."""

    names: tuple[str, ...]
    only: str


class Diff(Frozen, Reported):
    """How checkpoint ``b`` differs from checkpoint ``a``.

    ``tensors`` are all tensors, ``values`` those of ``value_count`` values of other kinds that differ, ``ties`` the
    groups of tensors that are one in only one of the two. ``unlisted`` is whether there are so many values that not all
    were compared.
    """

    a: str
    b: str
    a_format: str
    b_format: str
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    value_count: int
    unlisted: bool
    ties: tuple[Tie, ...]
    rtol: float
    atol: float
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs, within the tolerance, and all was compared: the condition for exit code 0."""
        return not (self.values or self.ties or self.unlisted) and all(t.status == "same" for t in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what ``--json`` prints."""
        counts = Counter(tensor.status for tensor in self.tensors)
        statuses: tuple[Status, ...] = ("same", "renamed", "different", "removed", "added", "unread")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in ("a", "b", "a_format", "b_format", "same")},
            "tolerance": {"rtol": self.rtol, "atol": self.atol},
            "counts": {status: counts[status] for status in statuses},
            "value_count": self.value_count,
            "unlisted": self.unlisted,
            "seconds": round(self.seconds, 6),
            "ties": [tie.to_dict() for tie in self.ties],
            "values": [value.to_dict() for value in self.values],
            "tensors": [tensor.to_dict() for tensor in self.tensors],
        }

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def report(diff: Diff) -> Iterator[Block]:
    """Everything ``transload diff`` says: the verdict, counts, the most different tensors, and the rest by kind."""
    by_status: dict[str, list[TensorDiff]] = {}
    for tensor in diff.tensors:
        by_status.setdefault(tensor.status, []).append(tensor)
    different, renamed = by_status.get("different", []), by_status.get("renamed", [])
    yield Prose(_verdict(diff, different), whole=False)
    yield row("A", f"{path_text(diff.a, None)}, {printable(format_of(diff.a_format).words)}")
    yield row("B", f"{path_text(diff.b, None)}, {printable(format_of(diff.b_format).words)}")
    counts = [f"{count(len(by_status.get('same', [])))} the same"]
    counts += [f"{count(len(found))} {words}" for status, words in _WORDS.items() if (found := by_status.get(status))]
    yield row("tensors", ", ".join(counts))
    kinds = Counter(kind for tensor in diff.tensors for kind in tensor.differs)
    if kinds:
        yield row("changed", ", ".join(f"{kind} in {count(number)}" for kind, number in kinds.most_common()))
    if diff.value_count:
        changed = f"{count(len(diff.values))} of {count(diff.value_count)} differ" if diff.values else "the same"
        yield row("values", changed if diff.values else f"{count(diff.value_count)}, all {changed}")
    if diff.unlisted:
        yield row("unlisted", "there are more values than are listed, which were not compared", "trust")
    if diff.rtol or diff.atol:
        yield row("tolerance", f"|a - b| <= {diff.atol:g} + {diff.rtol:g} * |a| counts as equal")
    special = [t for t in diff.tensors if any(side is not None and (side.nan or side.inf) for side in (t.a, t.b))]
    if special:
        yield row("NaN or inf", f"in {plural(len(special), 'tensor')}", "trust")
    if different:
        yield from _different(different)
    if unread := by_status.get("unread"):
        yield from heading("not compared", plural(len(unread), "tensor"))
        for tensor in unread[:_MOST]:
            yield Prose(((printable(tensor.note, 400), "dim"),), lead=((f"  {_named(tensor)}  ", "bad"),))
        yield from _more(unread)
    if moved := [tensor for tensor in diff.tensors if tensor.evidence]:
        yield from _renamed(moved, complete=len(moved) == len(renamed))
    for status, title in (("removed", "only in A"), ("added", "only in B")):
        if found := by_status.get(status):
            yield from heading(title, plural(len(found), "tensor"))
            yield Table(Rows(found, _one_sided), dim=(1,), most=_MOST)
    if diff.ties:
        yield from heading("tied", "one tensor in only one of the two")
        lines = [(f"only in {tie.only.upper()}", ", ".join(printable(name) for name in tie.names)) for tie in diff.ties]
        yield Table(lines, dim=(0,), shrinks=(1,), most=_MOST)
    if diff.values:
        yield from heading("values", plural(len(diff.values), "difference"))
        yield Table(Rows(diff.values, _value), titles=("value", "A", "B", ""), shrinks=(0, 1, 2), dim=(3,), most=_MOST)


_WORDS: dict[str, str] = {
    "different": "different",
    "renamed": "renamed",
    "removed": "only in A",
    "added": "only in B",
    "unread": "not compared",
}


def _verdict(diff: Diff, different: Sequence[TensorDiff]) -> Words:
    """The first line: are they the same, and if not, where they differ most."""
    total = len(diff.tensors)
    if diff.same:
        within = any(tensor.values is not None and tensor.values.different for tensor in diff.tensors)
        words = "within the tolerance" if within else "in all numbers"
        return ("same", "good"), (f": {plural(total, 'tensor')}, equal {words}", "")
    changed = [tensor for tensor in diff.tensors if tensor.status not in ("same", "renamed")]
    if not changed:
        what = [f"{plural(total, 'tensor')} with the same numbers"] if total else []
        what += ["under other names"] if any(tensor.evidence for tensor in diff.tensors) else []
        what += (
            [f"{plural(len(diff.values), 'value')} {'differs' if len(diff.values) == 1 else 'differ'}"]
            if diff.values
            else []
        )
        what += ["other tensors are tied"] if diff.ties else []
        what += ["not all values were compared"] if diff.unlisted else []
        return ("different", "bad"), (f": {', '.join(what)}", "")
    unread = sum(tensor.status == "unread" for tensor in changed)
    if unread == len(changed):
        return ("not compared", "bad"), (f": {count(unread)} of {plural(total, 'tensor')}", "")
    words = f": {count(len(changed) - unread)} of {plural(total, 'tensor')} "
    words += "differs" if len(changed) - unread == 1 else "differ"
    words += f", {count(unread)} could not be compared" if unread else ""
    most, worst = max(((_most(tensor), _named(tensor)) for tensor in different), default=(0.0, ""))
    words += f"; most in {worst}, by up to {most:.3g}" if most else ""
    return ("different", "bad"), (words, "")


def _most(tensor: TensorDiff) -> float:
    return (tensor.values.max_abs or 0.0) if tensor.values is not None else 0.0


def _order(tensor: TensorDiff) -> tuple[bool, float]:
    """Other shapes, dtypes and NaN first, then the largest difference of numbers."""
    other = bool({*tensor.differs} - {"device", "values"})
    return other or (tensor.values is not None and tensor.values.nonfinite > 0), _most(tensor)


def _different(different: Sequence[TensorDiff]) -> Iterator[Block]:
    yield from heading("different", f"{plural(len(different), 'tensor')}, the largest difference first")
    rows = Rows(sorted(different, key=_order, reverse=True), _difference)
    titles = ("tensor", "differ", "max", "mean", "cosine", "")
    yield Table(rows, right=(1, 2, 3, 4), titles=titles, drops=(4, 3, 1), most=_MOST)


def _difference(tensor: TensorDiff) -> tuple[Words, ...]:
    a, b, values = tensor.a, tensor.b, tensor.values
    what = []
    if a is not None and b is not None:
        what += [f"{printable(a.dtype, 40)} → {printable(b.dtype, 40)}"] if "dtype" in tensor.differs else []
        what += [f"{shape_text(a.shape)} → {shape_text(b.shape)}"] if "shape" in tensor.differs else []
        what += [f"{printable(a.device, 24)} → {printable(b.device, 24)}"] if "device" in tensor.differs else []
    what += ["quantizer"] if "quantizer" in tensor.differs else []
    what += [f"{count(values.nonfinite)} NaN or inf"] if values is not None and values.nonfinite else []
    what += ["other bytes"] if values is None and "values" in tensor.differs else []
    numbers = ("", "", "", "")
    if values is not None:
        share = 100 * values.different / max(1, values.numbers)
        most, mean = (_number(number) for number in (values.max_abs, values.mean_abs))
        numbers = f"{share:.3g} %", most, mean, f"{values.cosine:.6f}" if values.cosine is not None else ""
    return _named(tensor), *numbers, ", ".join(what)


def _one_sided(tensor: TensorDiff) -> tuple[Words, ...]:
    side = tensor.a or tensor.b
    return (
        (_named(tensor), printable(side.dtype, 40), shape_text(side.shape)) if side is not None else (_named(tensor),)
    )


def _value(value: ValueDiff) -> tuple[Words, ...]:
    old, new = (printable(text, 60) if text is not None else (("not there", "dim"),) for text in (value.a, value.b))
    return printable(value.name) or "the value itself", old, new, "not compared" if value.status == "unread" else ""


def _renamed(moved: Sequence[TensorDiff], *, complete: bool) -> Iterator[Block]:
    yield from heading("renamed", plural(len(moved), "tensor") + ("" if complete else ", some of which differ, too"))
    by_evidence: dict[str, list[TensorDiff]] = {}
    for tensor in moved:
        by_evidence.setdefault(tensor.evidence, []).append(tensor)
    for evidence, tensors in by_evidence.items():
        if evidence == "equal bytes":
            yield Prose(((f"{evidence}:", "dim"),), lead="  ")
            yield Table(Rows(tensors, _renaming), shrinks=(0, 2), indent=4, most=_MOST)
        else:
            first = f"{_named(tensors[0])} → {printable(tensors[0].renamed)}"
            yield Prose(
                ((f"{plural(len(tensors), 'tensor')}, such as {first}", "dim"),), lead=f"  {printable(evidence)}: "
            )


def _renaming(tensor: TensorDiff) -> tuple[Words, ...]:
    return _named(tensor), (("→", "dim"),), printable(tensor.renamed)


def _more(items: Sequence[object]) -> Iterator[Block]:
    if len(items) > _MOST:
        yield note(f"… and {len(items) - _MOST:,} more; --json lists all of them")


def _named(tensor: TensorDiff) -> str:
    return printable(tensor.name) or "the tensor itself"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"
