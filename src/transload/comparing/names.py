"""Which tensor of one checkpoint is which of another: by name, by a prefix or suffix of all names, by equal bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix

from transload.checkpoint import Tensor
from transload.frozen import NamedTuple

_SAMPLES = 8  # names, and rules, that are tried
_SEPARATORS = "./"
_Key = tuple[str, int]


class Entry(NamedTuple):
    """A tensor that is compared. ``why`` is empty, or says why it has no elements of its own.

    ``name`` is unlike ``tensor.name`` if it is another name of a tied tensor.
    """

    name: str
    tensor: Tensor
    why: str = ""


class Pair(NamedTuple):
    """The places of two entries that are compared, and why, if their names differ."""

    a: int
    b: int
    evidence: str = ""


class Pairs(NamedTuple):
    """The pairs, in the order of ``a``, and the places of entries without a partner."""

    pairs: list[Pair]
    only_a: list[int]
    only_b: list[int]


def paired(
    a: Sequence[Entry], b: Sequence[Entry], digest_a: Callable[[int], str], digest_b: Callable[[int], str]
) -> Pairs:
    """Find the pairs; the digests of entries without a partner of the same name are requested if they can decide."""
    keys_a, keys_b = _keys(a), _keys(b)
    pairs = [Pair(place, keys_b[key]) for key, place in keys_a.items() if key in keys_b]
    left_a = {key[0]: place for key, place in keys_a.items() if key not in keys_b}
    left_b = {key[0]: place for key, place in keys_b.items() if key not in keys_a}
    rule = _rule(left_a, left_b, lambda one, two: a[left_a[one]].tensor.shape == b[left_b[two]].tensor.shape)
    if rule is not None:
        for name, other in rule.renamed(left_a, left_b):
            pairs.append(Pair(left_a.pop(name), left_b.pop(other), rule.words))
    kinds_a = {name: _kind(a[place]) for name, place in left_a.items()}
    kinds_b = {name: _kind(b[place]) for name, place in left_b.items()}
    both = {*kinds_a.values()} & {*kinds_b.values()} - {None}
    hashes_a = {name: digest_a(left_a[name]) for name, kind in kinds_a.items() if kind in both}
    hashes_b = {name: digest_b(left_b[name]) for name, kind in kinds_b.items() if kind in both}
    # Zeros are equal to other zeros: then the last part of the name decides, or nothing does.
    for key_of in (lambda name, digest: (digest, _last(name)), lambda _, digest: digest):
        single_a, single_b = _single(hashes_a, key_of), _single(hashes_b, key_of)
        for key in [key for key in single_a if key in single_b]:
            name, other = single_a[key], single_b[key]
            pairs.append(Pair(left_a.pop(name), left_b.pop(other), "equal bytes"))
            del hashes_a[name], hashes_b[other]
    used_a, used_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
    only_a = [place for place in range(len(a)) if place not in used_a]
    only_b = [place for place in range(len(b)) if place not in used_b]
    return Pairs(sorted(pairs), only_a, only_b)


def _keys(entries: Sequence[Entry]) -> dict[_Key, int]:
    """Entries by name, and number: two may have the same name, since a key may contain the slash that joins keys."""
    seen: Counter[str] = Counter()
    keys = {}
    for place, entry in enumerate(entries):
        keys[entry.name, seen[entry.name]] = place
        seen[entry.name] += 1
    return keys


def _kind(entry: Entry) -> object:
    """What equal bytes mean the same for; ``None`` if they prove nothing."""
    return None if entry.why or entry.tensor.numel < 2 else (entry.tensor.dtype, entry.tensor.shape)


def _last(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]


def _single(hashes: dict[str, str], key_of: Callable[[str, str], object]) -> dict[object, str]:
    """The names that have a key alone."""
    keys = {name: key_of(name, digest) for name, digest in hashes.items() if digest}
    counts = Counter(keys.values())
    return {key: name for name, key in keys.items() if counts[key] == 1}


class _Rule(NamedTuple):
    """All names begin with ``old`` in A and with ``new`` in B, or end with them."""

    old: str
    new: str
    at_end: bool

    def apply(self, name: str) -> str:
        if self.at_end:
            return name.removesuffix(self.old) + self.new if name.endswith(self.old) else ""
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else ""

    def renamed(self, names: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
        there = set(others)
        return [(name, other) for name in names if (other := self.apply(name)) in there]

    @property
    def words(self) -> str:
        where = "suffix" if self.at_end else "prefix"
        if self.old and self.new:
            return f"{where} {self.new!r} for {self.old!r}"
        return f"{where} {self.old!r} removed" if self.old else f"{where} {self.new!r} added"


def _rule(a: Iterable[str], b: Iterable[str], fits: Callable[[str, str], bool]) -> _Rule | None:
    """The rule by which most names differ, if there is one."""
    names, others = [*a], [*b]
    if not names or not others:
        return None
    found: Counter[_Rule] = Counter()
    for other in others[:: max(1, len(others) // _SAMPLES)][:_SAMPLES]:
        for name in names:
            if name[-1:] == other[-1:]:
                same = _whole(_common(name[::-1], other[::-1])[::-1], name, other, at_end=False)
                if same:
                    found[_Rule(name[: -len(same)], other[: -len(same)], at_end=False)] += 1
            if name[:1] == other[:1]:
                same = _whole(_common(name, other), name, other, at_end=True)
                if same:
                    found[_Rule(name[len(same) :], other[len(same) :], at_end=True)] += 1
    best, most = None, 0
    for rule, _ in found.most_common(_SAMPLES):
        count = sum(fits(*pair) for pair in rule.renamed(names, others))
        if count > most:
            best, most = rule, count
    if best is None or 2 * most <= min(len(names), len(others)) or (most == 1 and best.old and best.new):
        return None
    return best


def _common(name: str, other: str) -> str:
    return commonprefix([name, other])  # noqa: RUF071 - of characters, not of components


def _whole(same: str, name: str, other: str, *, at_end: bool) -> str:
    """What two names have in common, without a part of a component."""
    if same in (name, other):
        return same
    if at_end:
        return same[: max(same.rfind(mark) for mark in _SEPARATORS) + 1]
    if name[-len(same) - 1] in _SEPARATORS and other[-len(same) - 1] in _SEPARATORS:
        return same
    starts = [at + 1 for mark in _SEPARATORS if (at := same.find(mark)) >= 0]
    return same[min(starts) :] if starts else ""
