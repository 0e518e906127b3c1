"""What does not fit between a file and a model, in a few lines: groups, likely renames, a table of shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Difference", "Mismatch", "Renamed", "likely_renames"]

Shape = tuple[int, ...] | None

_MOST = 12
_FEW = 6


class Difference(NamedTuple):
    """A key whose tensor is another in the file than in the model."""

    key: str
    file: str
    model: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """All that does not fit. Keys have their shapes beside them, ``None`` where they have none."""

    missing: Mapping[str, Shape] = field(default_factory=dict)
    unexpected: Mapping[str, Shape] = field(default_factory=dict)
    shapes: tuple[Difference, ...] = ()
    dtypes: tuple[Difference, ...] = ()
    others: tuple[str, ...] = ()
    """Sentences on what is none of these."""

    @property
    def renames(self) -> list[Renamed]:
        """What seems to be the same under another name."""
        return likely_renames(self.missing, self.unexpected)

    @property
    def text(self) -> str:
        """The report, in a few lines."""
        lines: list[str] = []
        renames = self.renames
        covered = {key for rename in renames for pair in rename.pairs for key in pair}
        if renames:
            lines += ["the same under other names, it seems:", *map(_renaming, renames)]
        lines += _group("missing in the file", [key for key in self.missing if key not in covered])
        lines += _group("only in the file", [key for key in self.unexpected if key not in covered])
        lines += _shapes(self.shapes)
        lines += _dtypes(self.dtypes)
        return "\n".join([*lines, *self.others])


class Renamed(NamedTuple):
    """Keys that begin with ``theirs`` in the file and ``ours`` in the model, and are equal after that."""

    theirs: str
    ours: str
    pairs: tuple[tuple[str, str], ...]


def _renaming(renamed: Renamed) -> str:
    return f"  {renamed.theirs}* in the file ↔ {renamed.ours}* in the model: {_keys(len(renamed.pairs))}"


def _keys(count: int) -> str:
    return "1 key" if count == 1 else f"{count:,} keys"


def likely_renames(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> list[Renamed]:
    """Prefixes of the file, each with the model's that has the same keys with the same shapes below it.

    >>> likely_renames({"backbone.a.w": (2,), "backbone.a.b": ()}, {"encoder.a.w": (2,), "encoder.a.b": ()})[0][:2]
    ('encoder.', 'backbone.')
    """
    tails = _tails(missing)
    votes: Counter[tuple[str, str]] = Counter()
    for key, shape in unexpected.items():
        for cut in _cuts(key):
            mates = tails.get((key[cut:], shape), ())
            if mates and len(mates) <= _FEW:  # more are no evidence: every model has its weights
                votes.update((key[:cut], mate[: len(mate) - len(key) + cut]) for mate in mates)
            if mates:
                break
    return _settled(votes, missing, unexpected)


def _cuts(key: str) -> list[int]:
    """Where a prefix of a key may end, the shortest first."""
    return [0, *(place + 1 for place, letter in enumerate(key) if letter == ".")]


def _tails(keys: Mapping[str, Shape]) -> dict[tuple[str, Shape], list[str]]:
    tails: dict[tuple[str, Shape], list[str]] = {}
    for key, shape in keys.items():
        for cut in _cuts(key):
            tails.setdefault((key[cut:], shape), []).append(key)
    return tails


def _settled(
    votes: Counter[tuple[str, str]], missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]
) -> list[Renamed]:
    """The pairs of prefixes that explain most, none of whose keys is explained twice; a single key is no pattern."""
    out: list[Renamed] = []
    wanted, free = set(missing), dict.fromkeys(unexpected)
    for (theirs, ours), _ in votes.most_common(_MOST * _FEW):
        mates = {key: ours + key[len(theirs) :] for key in free if key.startswith(theirs)}
        pairs = tuple((key, mate) for key, mate in mates.items() if mate in wanted and missing[mate] == unexpected[key])
        if len(pairs) < 2 or len(out) == _MOST:
            continue
        out.append(Renamed(theirs, ours, pairs))
        for key, mate in pairs:
            del free[key]
            wanted.discard(mate)
    return out


def _group(title: str, keys: Sequence[str]) -> list[str]:
    """Keys by their first names, the largest groups first; a lone key by its whole name."""
    if not keys:
        return []
    if len(keys) <= _FEW:
        return [f"{title}: {', '.join(keys)}"]
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(key.partition(".")[0], []).append(key)
    shown = sorted(groups.values(), key=len, reverse=True)
    words = [_named(group) for group in shown[:_MOST]]
    more = sum(map(len, shown[_MOST:]))
    return [f"{title}, {_keys(len(keys))}: {', '.join(words)}" + (f" and {more:,} more" if more else "")]


def _named(group: Sequence[str]) -> str:
    """``encoder.layers.* (96)``: the names all keys of a group begin with, and how many they are."""
    if len(group) == 1:
        return group[0]
    split = [key.split(".") for key in group]
    common: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return f"{'.'.join(common)}.* ({len(group):,})"


def _shapes(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    rows = [Difference("key", "file", "model"), *differences[:_MOST]]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
    more = len(differences) - _MOST
    return [f"of another shape, {_keys(len(differences))}:", *lines, *([f"  and {more:,} more"] if more > 0 else [])]


def _dtypes(differences: Sequence[Difference]) -> list[str]:
    counts = Counter((each.file, each.model) for each in differences)
    lines = [
        f"of another dtype, {_keys(count)}: {file} in the file, {model} in the model"
        for (file, model), count in counts.most_common(_FEW)
    ]
    return [*lines, *(["cast=True converts them while they are read."] if lines else [])]
