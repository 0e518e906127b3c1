"""Which part of a checkpoint is the state dict of a model, and how its keys become the model's. No torch, no bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from transload.errors import UsageError
from transload.opening.renaming import Rename, chains, cut, deed, has_inner

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Tensor

__all__ = ["Branch", "Match", "branches", "find"]

Shape = tuple[int, ...] | None
"""``None`` where the model does not mind."""

_MARKERS = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Branch:
    """What lies below one place of a checkpoint, by the keys it would have in a state dict."""

    path: tuple[Key, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    deep: dict[str, Key] = field(default_factory=dict)
    """Keys that are not directly there but joined out of several steps, each with the first of them."""

    @property
    def name(self) -> str:
        """What to pass as ``prefix`` for it."""
        return "/".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Match:
    """A branch laid over a model: the tensor for each of its keys, and the keys of the file that have no place."""

    branch: Branch
    rename: Rename
    tensors: dict[str, Tensor]
    """By the model's keys."""
    origins: dict[str, str]
    """The file's key, by the model's."""
    rest: dict[str, Tensor]
    """What has no place in the model, by its keys after the renaming."""
    outside: int = 0
    """How many tensors lie beside what was taken."""
    score: tuple[int, int] = (0, 0)

    @property
    def unexpected(self) -> list[str]:
        """The keys torch would not expect: of what lies deeper, the entry it lies in."""
        deep = self.branch.deep
        return list(dict.fromkeys(str(deep.get(key, key)) for key in self.rest))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the keys, in words."""
        changed = [old for new, old in self.origins.items() if new != old]
        if not changed:
            return ()
        beside = f", and left out {self.outside:,} that have none" if self.outside else ""
        return (f"{deed(self.rename)} {len(changed):,} keys{beside}",)


def branches(checkpoint: Checkpoint) -> dict[tuple[Key, ...], Branch]:
    """Every place of a checkpoint that has tensors below it.

    Of a pickled module the steps between are left out, so that its keys are those of its ``state_dict()``.
    """
    found: dict[tuple[Key, ...], Branch] = {}
    known: dict[tuple[Key, ...], list[_Above]] = {}
    for tensor in checkpoint.tensors:
        if checkpoint.format == "torchscript" and tensor.name.startswith("CONSTANTS."):
            continue  # of the code, not of the model
        steps = _steps(tensor)
        above = known.get(steps[:-1]) if steps else _above((), found)
        if above is None:
            above = known[steps[:-1]] = _above(steps, found)
        name = str(steps[-1]) if steps else ""
        for branch, lead, first in above:
            branch.tensors[lead + name] = tensor
            if first is not None:
                branch.deep[lead + name] = first
    return found


_Above = tuple[Branch, str, "Key | None"]
"""A branch, what keys below a place begin with in it, and the first step there if that is not the last, too."""


def _above(steps: tuple[Key, ...], found: dict[tuple[Key, ...], Branch]) -> list[_Above]:
    """All branches above what these steps lead to."""
    out: list[_Above] = []
    for depth in range(max(1, len(steps))):
        branch = found.setdefault(steps[:depth], Branch(steps[:depth]))
        between = steps[depth:-1]
        out.append((branch, "".join(f"{step}." for step in between), between[0] if between else None))
    return out


def _steps(tensor: Tensor) -> tuple[Key, ...]:
    if _MARKERS.isdisjoint(tensor.path):
        return tensor.path
    if "_parameters/" in tensor.name or "_buffers/" in tensor.name:  # a buffer that state_dict() leaves out
        return tensor.path
    steps = tuple(step for step in tensor.path if step not in _MARKERS)
    # A module: what stands behind its first marker is one key.
    lead = next(i for i, step in enumerate(tensor.path) if step in _MARKERS)
    return (*steps[:lead], ".".join(map(str, steps[lead:])))


def find(checkpoint: Checkpoint, wanted: Mapping[str, Shape], prefix: str | None = None) -> Match:
    """The branch that fits a model best, by keys and then by shapes.

    ``wanted`` are the model's keys with their shapes. ``UsageError`` if two branches fit equally well and are not the
    same tensors, or if nothing has the ``prefix``.
    """
    chosen = [_below(checkpoint, prefix)] if prefix is not None else list(branches(checkpoint).values())
    matches = _Model(wanted).matches(chosen)
    if not matches:
        return Match(Branch(()), Rename(), {}, {}, {})
    best = max(match.score for match in matches)
    if best == (0, 0):
        return max(
            matches, key=lambda match: (len(match.branch.tensors) - len(match.branch.deep), -len(match.branch.path))
        )
    equal = sorted(
        (m for m in matches if m.score == best), key=lambda m: (m.rename.cost, len(m.rest), len(m.branch.path))
    )
    rivals = [match for match in equal[1:] if not _same(equal[0], match)]
    if rivals:
        raise _ambiguous(checkpoint, [equal[0], *rivals])
    return equal[0]


def _same(one: Match, other: Match) -> bool:
    """Whether two matches would load the same bytes."""
    return all(
        tensor is (mate := other.tensors.get(key)) or (mate is not None and _bytes(tensor) == _bytes(mate))
        for key, tensor in one.tensors.items()
    )


def _bytes(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage, tensor.offset, tensor.stride, tensor.path if tensor.storage is None else ()


def _below(checkpoint: Checkpoint, prefix: str) -> Branch:
    """A place of the checkpoint by its name; or all tensors whose name begins so, by the rest of the name."""
    named = {branch.name: branch for branch in branches(checkpoint).values()}
    if prefix.rstrip("/") in named:
        return named[prefix.rstrip("/")]
    lead = prefix if prefix[-1:] in "./" else f"{prefix}."
    tensors = {
        tensor.name[len(lead) :].replace("/", "."): tensor
        for tensor in checkpoint.tensors
        if tensor.name.startswith(lead)
    }
    if tensors:
        return Branch((lead,), tensors)
    raise UsageError(
        f"no tensor is below {prefix!r}",
        where=checkpoint.path,
        fix=f"There are tensors below: {_listed(branch.name or repr('') for branch in _flat(checkpoint))}",
    )


def _flat(checkpoint: Checkpoint) -> list[Branch]:
    """The branches that hold tensors themselves, the largest first."""
    held = [branch for branch in branches(checkpoint).values() if len(branch.tensors) > len(branch.deep)]
    return sorted(held, key=lambda branch: len(branch.deep) - len(branch.tensors))


def _listed(names: Iterable[str], most: int = 8) -> str:
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")


def _ambiguous(checkpoint: Checkpoint, rivals: list[Match]) -> UsageError:
    names = [match.branch.name for match in rivals]
    fix = "\n".join(
        f"prefix={name!r} for the {len(m.tensors):,} keys there" for name, m in zip(names, rivals, strict=True)
    )
    what = (
        f"{len(names)} places of the file fit the model equally well: {_listed(name or 'the root' for name in names)}"
    )
    return UsageError(what, where=checkpoint.path, fix=f"Say which, by one of:\n{fix}")


class _Model:
    """The keys of a model, prepared for many comparisons."""

    def __init__(self, wanted: Mapping[str, Shape]) -> None:
        self.shapes = wanted

    @cached_property
    def chains(self) -> list[str]:
        """What leads its keys."""
        return chains(self.shapes)

    @cached_property
    def wrapped(self) -> bool:
        """Whether there are names of wrappers in its keys."""
        return has_inner(self.shapes)

    @cached_property
    def cut(self) -> dict[str, str]:
        """Its keys by what they are without those names."""
        return {cut(name): name for name in self.shapes}

    @cached_property
    def same(self) -> dict[str, str]:
        """Its keys by themselves."""
        return {name: name for name in self.shapes}

    def matches(self, branches: Sequence[Branch]) -> list[Match]:
        """Each branch over the model, in the same order, but for those that have too few tensors to be the best."""
        found: dict[int, Match] = {}
        most = 0
        for place in sorted(range(len(branches)), key=lambda place: -len(branches[place].tensors)):
            if len(branches[place].tensors) < most:
                break
            found[place] = self.lay(branches[place])
            most = max(most, found[place].score[0])
        return [found[place] for place in sorted(found)]

    def lay(self, branch: Branch) -> Match:
        """The branch over the model by the change of names that makes most keys fit; by the least that does."""
        best = self._as_is(branch)
        if len(best.tensors) == len(self.shapes):
            return best
        for rename in self._renames(branch.tensors):
            match = self._laid(branch, rename)
            if match.score > best.score or (match.score == best.score and rename.cost < best.rename.cost):
                best = match
        return best

    def _renames(self, keys: Collection[str]) -> Iterator[Rename]:
        """Changes worth trying: what leads the keys on either side, with and without wrappers inside them."""
        ours = chains(keys)
        for inner in (False, True) if self.wrapped or has_inner(keys) else (False,):
            for strip in ours:
                for add in self.chains:
                    if strip or add or inner:
                        yield Rename(strip, add, inner)

    def _as_is(self, branch: Branch) -> Match:
        """The branch with its own keys."""
        shapes = self.shapes
        tensors = {key: tensor for key, tensor in branch.tensors.items() if key in shapes}
        rest = {key: tensor for key, tensor in branch.tensors.items() if key not in shapes}
        return Match(branch, Rename(), tensors, dict(zip(tensors, tensors, strict=True)), rest, 0, self._score(tensors))

    def _score(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """How many keys fit, and how many shapes."""
        shapes = self.shapes
        return len(tensors), sum(shapes[name] in (None, tensor.shape) for name, tensor in tensors.items())

    def _laid(self, branch: Branch, rename: Rename) -> Match:
        names = self.cut if rename.inner else self.same
        tensors: dict[str, Tensor] = {}
        origins: dict[str, str] = {}
        rest: dict[str, Tensor] = {}
        outside = 0
        for key, tensor in branch.tensors.items():
            new = rename(key)
            name = names.get(new)
            if name is not None and (name not in tensors or key == name):
                tensors[name] = tensor
                origins[name] = key
            elif rename.leaves_out(key):
                outside += 1
            else:
                rest[key if key in branch.deep else new] = tensor
        return Match(branch, rename, tensors, origins, rest, outside, self._score(tensors))
