"""``transload.load_into``: the weights of a file straight into the parameters of a model.

``find`` looks for the place in the file whose keys fit the model best, after undoing the changes that trainers and
wrappers make to all keys (``Rename``). ``fit`` compares every key, shape and dtype and lists the reading to do; what
does not fit is a ``Mismatch``, which finds words for it. ``_Loading`` does it all in order.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Tensor
from transload.errors import BrokenFileError, LoadError, TransloadError, UsageError
from transload.formats import no_collecting
from transload.frozen import facts
from transload.loading import check_settings
from transload.loading.engine import bring
from transload.loading.handles import (
    Destinations,
    build_node,
    caller,
    changed,
    check_one,
    fill,
    open_checkpoint,
    plain,
    read_one,
    straight,
)
from transload.loading.jobs import Ended, ReadRequest, Settings
from transload.nodes import Call, Dict

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Checkpoint, Key
    from transload.io.sources import SourceLike
    from transload.loading.handles import Opened
    from transload.tensors import Piece


class MismatchError(LoadError):
    """The file and the model do not fit. The text says how, in groups; every name is in the attributes."""

    def __init__(self, what: str, mismatch: Mismatch, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.missing_keys = list(mismatch.missing)
        self.unexpected_keys = list(mismatch.unexpected)
        self.shapes = mismatch.shapes
        self.dtypes = mismatch.dtypes


class KeysWarning(UserWarning):
    """Keys of a file were changed to fit the model, though nobody had asked for that."""


class _Keys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


class Loaded(_Keys):
    """What ``load_state_dict`` gives, and beside it where the state dict was found and what was done to its keys."""

    found: str
    """The place in the file, as ``prefix`` takes it; empty for the whole file."""
    notes: tuple[str, ...]
    """What was done that the caller may want to know of."""

    def __new__(  # noqa: PYI034 - typing.Self is newer than Python 3.10
        cls, missing_keys: list[str], unexpected_keys: list[str], found: str = "", notes: tuple[str, ...] = ()
    ) -> Loaded:
        """Two lists, to be unpacked; the rest are attributes."""
        made = super().__new__(cls, missing_keys, unexpected_keys)
        made.found = found
        made.notes = notes
        return made

    def __repr__(self) -> str:
        keys = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        head = keys if self.missing_keys or self.unexpected_keys else "All keys matched successfully"
        return f"<{'; '.join([head, *([f'found in {self.found}'] if self.found else []), *self.notes])}>"

    __str__ = __repr__


def load_into(
    model: torch.nn.Module,
    f: SourceLike,
    *,
    strict: bool = True,
    prefix: str | None = None,
    device: Any = None,
    cast: bool = False,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
) -> Loaded:
    """Read the weights in a file into a model, each tensor straight into its parameter, without a second copy.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"epoch": 3, "state_dict": torch.nn.Linear(2, 2).state_dict()}, file)
    >>> load_into(torch.nn.Linear(2, 2), file)
    <All keys matched successfully; found in state_dict>

    The state dict is looked for in the whole file (``prefix`` says where it is, if several would do), and ``module.``,
    ``_orig_mod.`` or ``model.`` is taken off its keys, or put before them, where that makes them the model's.
    Parameters stay where they are; those on the meta device are made on ``device``, or where ``transload.load`` would
    have put them. A dtype is converted only with ``cast``. ``threads``, ``pinned_mb`` and ``direct`` are as for
    ``transload.load``.

    Everything is compared before the first byte is written: if keys are missing or not expected (with ``strict``), or
    shapes or dtypes differ, ``MismatchError`` says how and the model is as it was. Only modules that load by code of
    their own, and hooks, have their say while it is loaded, as in torch.
    """
    settings = check_settings(threads, pinned_mb, direct)
    if not callable(getattr(model, "named_parameters", None)):
        fix = "For a dictionary of tensors there is transload.load."
        raise UsageError(f"expected a module, not {type(model).__name__}", fix=fix)
    opened = open_checkpoint(f)
    try:
        goal = Destinations(opened.checkpoint, "auto" if device is None else device)
        loaded = _Loading(model, opened, goal, settings, strict=strict, cast=cast).run(prefix)
        opened.check_unchanged()
        return loaded
    finally:
        opened.close()


_LEADING = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and trainers put before every key."""

_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers put inside a key, where a part of the model is wrapped."""


class Rename(NamedTuple):
    """A change made to all keys of a file: ``strip`` goes from the front, ``add`` comes there, wrappers are cut out."""

    strip: str = ""
    add: str = ""
    inner: bool = False

    def __call__(self, key: str) -> str:
        """The key as the model may call it."""
        if self.inner:
            key = cut(key)
        return self.add + key[len(self.strip) :] if key.startswith(self.strip) else key

    def undone(self, key: str) -> str:
        """The key as the file may call it."""
        return self.strip + key[len(self.add) :] if key.startswith(self.add) else key

    def leaves_out(self, key: str) -> bool:
        """Whether a key is not one of the model's: trainers keep other things beside it, wrappers do not."""
        return self.strip.endswith("model.") and not key.startswith(self.strip)

    @property
    def cost(self) -> int:
        """The least change is the best, where several do."""
        return self.strip.count(".") + self.add.count(".") + self.inner


def has_inner(keys: Iterable[str]) -> bool:
    """Whether there are names of wrappers in some key."""
    return any(part in key for key in keys for part in _INNER)


def chains(keys: Iterable[str]) -> list[str]:
    """The leading parts that some key begins with: ``""``, ``module.``, ``module.model.``."""
    found = {""}
    for key in keys:
        if not key.startswith(_LEADING):
            continue
        lead = ""
        while part := next((part for part in _LEADING if key.startswith(part, len(lead))), ""):
            lead += part
            found.add(lead)
    return sorted(found, key=len)


def cut(key: str) -> str:
    """A key without the names of wrappers in it."""
    for part in _INNER:
        if part in key:
            key = key.replace(part, "")
    return key


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
        strip, add, inner = self.rename
        words = []
        if strip and add:
            words.append(f"put {add!r} for {strip!r} in")
        elif strip:
            words.append(f"took {strip!r} off")
        elif add:
            words.append(f"put {add!r} before")
        if inner:
            words.append("left out the names of wrappers in")
        beside = f", and left out {self.outside:,} that have none" if self.outside else ""
        return (f"{' and '.join(words)} {len(changed):,} keys{beside}",)


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
    matches = _matches(wanted, chosen)
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
        rivals.insert(0, equal[0])
        names = _listed(match.branch.name or "the root" for match in rivals)
        choices = [f"prefix={match.branch.name!r} for the {len(match.tensors):,} keys there" for match in rivals]
        raise UsageError(
            f"{len(rivals)} places of the file fit the model equally well: {names}",
            where=checkpoint.path,
            fix="\n".join(["Say which, by one of:", *choices]),
        )
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
    known = branches(checkpoint).values()
    named = {branch.name: branch for branch in known}
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
    # Those that hold tensors themselves, the largest first.
    held = sorted(known, key=lambda branch: len(branch.deep) - len(branch.tensors))
    there = _listed(branch.name or repr("") for branch in held if len(branch.tensors) > len(branch.deep))
    raise UsageError(f"no tensor is below {prefix!r}", where=checkpoint.path, fix=f"There are tensors below: {there}")


def _listed(names: Iterable[str], most: int = 8) -> str:
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")


def _matches(shapes: Mapping[str, Shape], branches: Sequence[Branch]) -> list[Match]:
    """Each branch over the model, in the same order, but for those that have too few tensors to be the best."""
    leads, wrapped = chains(shapes), has_inner(shapes)
    unwrapped: dict[str, str] = {}  # its keys by what they are without the names of wrappers
    found: dict[int, Match] = {}
    most = 0
    for place in sorted(range(len(branches)), key=lambda place: -len(branches[place].tensors)):
        branch = branches[place]
        if len(branch.tensors) < most:
            break
        # By the change of names that makes most keys fit; by the least that does.
        best = _laid(branch, shapes, Rename(), shapes)
        if len(best.tensors) < len(shapes):
            # Worth trying is what leads the keys on either side, with and without wrappers inside them.
            inside = wrapped or has_inner(branch.tensors)
            unwrapped = unwrapped or ({cut(name): name for name in shapes} if inside else {})
            for inner, strip, add in product((False, True) if inside else (False,), chains(branch.tensors), leads):
                if strip or add or inner:
                    rename = Rename(strip, add, inner)
                    match = _laid(branch, shapes, rename, unwrapped if inner else shapes)
                    if match.score > best.score or (match.score == best.score and rename.cost < best.rename.cost):
                        best = match
        found[place] = best
        most = max(most, best.score[0])
    return [found[place] for place in sorted(found)]


def _laid(branch: Branch, shapes: Mapping[str, Shape], rename: Rename, known: Mapping[str, Any]) -> Match:
    """A branch over the model by one change of names.

    ``known`` has the model's keys; where wrappers are cut out of keys, by what the model's are without them.
    """
    tensors: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    rest: dict[str, Tensor] = {}
    outside = 0
    for key, tensor in branch.tensors.items():
        new = rename(key)
        name = known.get(new) if rename.inner else new if new in known else None
        if name is not None and (name not in tensors or key == name):
            tensors[name] = tensor
            origins[name] = key
        elif rename.leaves_out(key):
            outside += 1
        else:
            rest[key if key in branch.deep else new] = tensor
    score = len(tensors), sum(shapes[name] in (None, tensor.shape) for name, tensor in tensors.items())
    return Match(branch, rename, tensors, origins, rest, outside, score)


EXTRA = "_extra_state"


class Slot(NamedTuple):
    """A parameter, a buffer, or (without a tensor) the place of a module's extra state."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor | None
    shape: tuple[int, ...] | None
    """``None`` where any will do: extra state, and parameters that are not made yet."""

    @property
    def now(self) -> torch.Tensor | None:
        """What is in the place at present."""
        held = self.module._parameters.get(self.name)  # noqa: SLF001 - getattr may be the user's
        return self.module._buffers.get(self.name) if held is None else held  # noqa: SLF001 - the same

    def put(self, tensor: torch.Tensor) -> None:
        """Let a tensor take the place."""
        held = self.module._parameters if self.name in self.module._parameters else self.module._buffers  # noqa: SLF001 - setattr may be the user's
        held[self.name] = tensor


def modules(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module with the prefix of its keys, parents first; one that is shared comes under each of its names."""
    yield prefix, model
    for name, child in model._modules.items():  # noqa: SLF001 - as load_state_dict goes through them
        if child is not None:
            yield from modules(child, f"{prefix}{name}.")


def slots(model: torch.nn.Module) -> dict[str, Slot]:
    """The places of a model by key, in the order of its ``state_dict()``."""
    found: dict[str, Slot] = {}
    lazy, no_extra, _ = _torch_parts()

    def add(key: str, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            found[key] = Slot(module, name, tensor, None if isinstance(tensor, lazy) else tuple(tensor.shape))

    for prefix, module in modules(model):
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - as above
        for name, parameter in module._parameters.items():  # noqa: SLF001
            add(prefix + name, module, name, parameter)
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if name not in unsaved:
                add(prefix + name, module, name, buffer)
        if type(module).set_extra_state is not no_extra:
            found[prefix + EXTRA] = Slot(module, EXTRA, None, None)
    return found


@cache
def _torch_parts() -> tuple[type, object, frozenset[object]]:
    """Uninitialized parameters, the method of modules without extra state, and the known ways to load a module.

    The norms override theirs only for the sake of files without ``num_batches_tracked``, which ``fit`` covers.
    """
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm
    from torch.nn.parameter import UninitializedTensorMixin

    kinds = (torch.nn.Module, _NormBase, _InstanceNorm)
    ways = frozenset(kind._load_from_state_dict for kind in kinds)  # noqa: SLF001 - they are compared, not called
    return UninitializedTensorMixin, torch.nn.Module.set_extra_state, ways


_MOST = 12
_FEW = 6


class Difference(NamedTuple):
    """A key whose tensor is another in the file than in the model."""

    key: str
    file: str
    model: str


@facts(frozen=True)
class Mismatch:
    """All that does not fit. Keys have their shapes beside them, ``None`` where they have none."""

    missing: Mapping[str, Shape] = field(default_factory=dict)
    unexpected: Mapping[str, Shape] = field(default_factory=dict)
    shapes: tuple[Difference, ...] = ()
    dtypes: tuple[Difference, ...] = ()
    others: tuple[str, ...] = ()
    """Sentences on what is none of these."""

    @cached_property
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
            rows = [f"  {r.theirs}* in the file ↔ {r.ours}* in the model: {_keys(len(r.pairs))}" for r in renames]
            lines += ["the same under other names, it seems:", *rows]
        lines += _group("missing in the file", [key for key in self.missing if key not in covered])
        lines += _group("only in the file", [key for key in self.unexpected if key not in covered])
        if self.shapes:
            rows_of = [Difference("key", "file", "model"), *self.shapes[:_MOST]]
            wide = [max(len(row[column]) for row in rows_of) for column in range(3)]
            lines.append(f"of another shape, {_keys(len(self.shapes))}:")
            for row in rows_of:
                lines.append("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip())
            if len(self.shapes) > _MOST:
                lines.append(f"  and {len(self.shapes) - _MOST:,} more")
        pairs = Counter((each.file, each.model) for each in self.dtypes)
        for (file, model), count in pairs.most_common(_FEW):
            lines.append(f"of another dtype, {_keys(count)}: {file} in the file, {model} in the model")
        if pairs:
            lines.append("cast=True converts them while they are read.")
        return "\n".join([*lines, *self.others])


class Renamed(NamedTuple):
    """Keys that begin with ``theirs`` in the file and ``ours`` in the model, and are equal after that."""

    theirs: str
    ours: str
    pairs: tuple[tuple[str, str], ...]


def _keys(count: int) -> str:
    return "1 key" if count == 1 else f"{count:,} keys"


def likely_renames(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> list[Renamed]:
    """Prefixes of the file, each with the model's that has the same keys with the same shapes below it.

    >>> likely_renames({"backbone.a.w": (2,), "backbone.a.b": ()}, {"encoder.a.w": (2,), "encoder.a.b": ()})[0][:2]
    ('encoder.', 'backbone.')
    """
    tails: dict[tuple[str, Shape], list[str]] = {}
    for key, shape in missing.items():
        for cut in _cuts(key):
            tails.setdefault((key[cut:], shape), []).append(key)
    votes: Counter[tuple[str, str]] = Counter()
    for key, shape in unexpected.items():
        for cut in _cuts(key):
            mates = tails.get((key[cut:], shape), ())
            if mates and len(mates) <= _FEW:  # more are no evidence: every model has its weights
                votes.update((key[:cut], mate[: len(mate) - len(key) + cut]) for mate in mates)
            if mates:
                break
    # The pairs of prefixes that explain most, none of whose keys is explained twice; a single key is no pattern.
    out: list[Renamed] = []
    wanted, free = set(missing), dict.fromkeys(unexpected)
    for (theirs, ours), _ in votes.most_common(_MOST * _FEW):
        renamed = {key: ours + key[len(theirs) :] for key in free if key.startswith(theirs)}
        pairs = tuple((key, to) for key, to in renamed.items() if to in wanted and missing[to] == unexpected[key])
        if len(pairs) < 2 or len(out) == _MOST:
            continue
        out.append(Renamed(theirs, ours, pairs))
        for key, to in pairs:
            del free[key]
            wanted.discard(to)
    return out


def _cuts(key: str) -> list[int]:
    """Where a prefix of a key may end, the shortest first."""
    return [0, *(place + 1 for place, letter in enumerate(key) if letter == ".")]


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


_PROGRAMS = frozenset({"torchscript", "torch-export", "aotinductor", "torch-package"})


class Task(NamedTuple):
    """One tensor of the file, what is wanted of it, and all places of the one parameter it goes to."""

    key: str
    tensor: Tensor
    part: tuple[int, ...]
    places: tuple[Slot, ...]


@dataclass(slots=True)
class Fit:
    """How a file fits a model. Keys are the model's."""

    tasks: list[Task] = field(default_factory=list)
    extras: dict[str, Tensor | tuple[Piece, object]] = field(default_factory=dict)
    """Extra state by key: a tensor, or the file it is in and its node there."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[Difference] = field(default_factory=list)
    dtypes: list[Difference] = field(default_factory=list)


def fit(match: Match, slots: dict[str, Slot], opened: Opened, *, cast: bool) -> Fit:
    """Compare every key, shape and dtype."""
    from torch.nn.modules.batchnorm import _NormBase

    out = Fit()
    for key in (key for key, slot in slots.items() if slot.tensor is None):
        held = opened.node((*match.branch.path, match.rename.undone(key))) or match.tensors.get(key)
        if held is not None:
            out.extras[key] = held
    names: dict[torch.dtype, str] = {}
    for key, tensor in match.tensors.items():
        slot = slots[key]
        if slot.tensor is None or slot.shape is None:
            continue
        if tensor.shape != slot.shape and not _is_old_scalar(tensor, slot):
            out.shapes.append(Difference(key, str(list(tensor.shape)), str(list(slot.shape))))
        dtype = slot.tensor.dtype
        mine = names.get(dtype) or names.setdefault(dtype, str(dtype).removeprefix("torch."))
        if tensor.dtype != mine and not cast:
            out.dtypes.append(Difference(key, tensor.dtype, mine))
    out.tasks = _tasks(match, slots, opened)
    filled = {id(slot.tensor) for task in out.tasks for slot in task.places}
    found = match.tensors.keys() | out.extras.keys()
    about = versions(match, opened)
    for key, slot in slots.items():
        if key in found or id(slot.tensor) in filled:
            continue
        if slot.name == "num_batches_tracked" and isinstance(slot.module, _NormBase):
            version = about.get(key.rpartition(".")[0], {}).get("version")
            if type(version) is not int or version < 2:  # files before version 2 of the norms do not have it
                continue
        out.missing.append(key)
    extras = {match.rename.undone(key) for key in out.extras}
    held_keys = {*match.branch.tensors, *map(str, match.branch.deep.values()), *extras}
    others = [key for key in values(match, opened.checkpoint) if key not in held_keys]
    out.unexpected = [key for key in match.unexpected if key not in extras]
    out.unexpected += [match.rename(key) for key in others if not match.rename.leaves_out(key)]
    return out


def _is_old_scalar(tensor: Tensor, slot: Slot) -> bool:
    """torch 0.3 had no tensors without dimensions, and wrote one element instead; load_state_dict takes it, too."""
    return tensor.shape == (1,) and slot.shape == ()


def _tasks(match: Match, slots: dict[str, Slot], opened: Opened) -> list[Task]:
    """One task for each parameter, in the order of the file; of two tensors for one the last counts, as in torch."""
    last: dict[int, str] = {}
    places: dict[int, list[Slot]] = {}
    for key, slot in slots.items():
        if slot.tensor is None:
            continue
        ident = id(slot.tensor)
        places.setdefault(ident, []).append(slot)
        if key in match.tensors:
            last[ident] = key
    tasks = []
    for ident, key in last.items():
        tensor, slot = match.tensors[key], slots[key]
        part = (0,) if slot.shape == () and _is_old_scalar(tensor, slot) else ()
        tasks.append(Task(key, tensor, part, tuple(places[ident])))

    def place(task: Task) -> tuple[str, int, int]:
        storage = opened.content.storage(task.tensor)
        return storage.file if storage else "", task.tensor.file_offset or 0, task.tensor.offset

    return sorted(tasks, key=place)


def values(match: Match, checkpoint: Checkpoint) -> list[str]:
    """Entries of the state dict that are not tensors, as the file calls them: an epoch, extra state."""
    path = match.branch.path
    apart = _MARKERS.isdisjoint
    modules = not all(apart(tensor.path[len(path) :]) for tensor in match.branch.tensors.values())
    if modules or checkpoint.format in _PROGRAMS:
        return []  # attributes of an object are not entries
    below = (leaf.path[len(path)] for leaf in checkpoint.leaves if leaf.path[: len(path)] == path != leaf.path)
    return [str(step) for step in dict.fromkeys((*below, *match.branch.deep.values()))]


def versions(match: Match, opened: Opened) -> dict[str, dict[str, Any]]:
    """What a state dict carries in ``_metadata`` of each module, by the model's names for them."""
    held = opened.node(match.branch.path)
    node = held[1] if held else None
    state = node.states[-1] if type(node) is Call and node.states else None
    table = plain(state.get("_metadata")) if type(state) is Dict else {}
    if not isinstance(table, dict):
        return {}
    return {
        match.rename(f"{name}.")[:-1] if name else "": about
        for name, about in table.items()
        if isinstance(name, str) and isinstance(about, dict)
    }


class _Unbuilt(NamedTuple):
    """A value that is not built yet: the file it is in, and its node there."""

    piece: Piece
    node: object


Report = tuple[list[str], list[str], list[str]]
"""Missing keys, unexpected ones, and messages of errors."""


class State(MutableMapping[str, Any]):
    """A state dict whose tensors are read whenever they are asked for, and not kept; other values are built then.

    ``lands`` says that tensors are going to be parameters themselves, on the device where they land.
    """

    def __init__(self, entries: dict[str, Any], opened: Opened, goal: Destinations) -> None:
        self._entries = entries
        self._opened = opened
        self._goal = goal
        self.lands = False

    def below(self, prefix: str) -> State:
        """Those whose keys begin so."""
        held = {key: value for key, value in self._entries.items() if key.startswith(prefix)}
        return State(held, self._opened, self._goal)

    def __getitem__(self, key: str) -> Any:
        value = self._entries[key]
        if isinstance(value, _Unbuilt):
            return build_node(value.piece, value.node, self._goal.device_map)
        if not isinstance(value, Tensor):
            return value
        return read_one(self._opened, value, device=self._goal.device(value.device) if self.lands else "cpu")

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def copy(self) -> dict[str, Any]:
        """As a plain dictionary, all of it read."""
        return dict(self)


class OwnWay:
    """The modules of a model, the outermost ones, that load what is below them by code of their own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        _, _, ways = _torch_parts()
        for prefix, module in modules(model):
            # By a method overridden, or a hook before loading.
            own = type(module)._load_from_state_dict not in ways or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001
            if own and not self.covers(prefix):
                self._modules[prefix] = module

    def __bool__(self) -> bool:
        return bool(self._modules)

    def covers(self, key: str) -> bool:
        """Whether a key is loaded in this way."""
        return key.startswith(tuple(self._modules))

    def load(self, state: State, versions: dict[str, dict[str, Any]], report: Report) -> None:
        """Let each module load what is below it."""
        for prefix, module in self._modules.items():
            _load(module, state.below(prefix), prefix, versions, report)


def _load(
    module: torch.nn.Module, state: State, prefix: str, versions: dict[str, dict[str, Any]], report: Report
) -> None:
    """As ``load_state_dict`` goes down a model."""
    meta = any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    about = {**versions.get(prefix[:-1], {}), **({"assign_to_params_buffers": True} if meta else {})}
    state.lands = meta
    module._load_from_state_dict(state, prefix, about, True, *report)  # noqa: SLF001 - what load_state_dict calls
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            _load(child, state.below(f"{prefix}{name}."), f"{prefix}{name}.", versions, report)


class _Loading:
    """One call of ``load_into``."""

    def __init__(
        self,
        model: torch.nn.Module,
        opened: Opened,
        goal: Destinations,
        settings: Settings,
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        self._model = model
        self._opened = opened
        self._strict = strict
        self._cast = cast
        self._slots = slots(model)
        self._goal = goal
        self._own = OwnWay(model)
        self._settings = settings

    def run(self, prefix: str | None) -> Loaded:
        """Match, compare, read."""
        checkpoint = self._opened.checkpoint
        with no_collecting():
            match = find(checkpoint, {key: slot.shape for key, slot in self._slots.items()}, prefix)
            found = fit(match, self._slots, self._opened, cast=self._cast)
            own = self._own
            if own:  # what modules load in their own way is left to them
                found.tasks = [task for task in found.tasks if not own.covers(task.key)]
                for listed in (found.missing, found.unexpected):
                    listed[:] = [key for key in listed if not own.covers(key)]
                for differences in (found.shapes, found.dtypes):
                    differences[:] = [each for each in differences if not own.covers(each.key)]
                found.extras = {key: node for key, node in found.extras.items() if not own.covers(key)}
            self._check(match, found)
        # Extra state is what transload.load would make of it.
        extras = {
            key: read_one(self._opened, held) if isinstance(held, Tensor) else build_node(*held, self._goal.device_map)
            for key, held in found.extras.items()
        }
        errors = self._let_own(match, found)
        self._read(found.tasks)
        for key, value in extras.items():
            self._slots[key].module.set_extra_state(value)
        keys = _Keys(found.missing, found.unexpected)
        for _, module in reversed(list(modules(self._model))):  # children before their parents
            for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001 - as load_state_dict calls them
                hook(module, keys)
        if errors or (self._strict and (found.missing or found.unexpected)):
            raise self._error(match, found, errors, "it was loaded as far as it fits: ")
        if match.notes:
            warnings.warn(f"{checkpoint.path}: {'; '.join(match.notes)}", KeysWarning, stacklevel=caller())
        return Loaded(found.missing, found.unexpected, match.branch.name, match.notes)

    def _check(self, match: Match, found: Fit) -> None:
        """Raise for all that can be known before a byte is read."""
        # Modules with hooks or code of their own may yet strike keys off.
        hooked = any(module._load_state_dict_post_hooks for _, module in modules(self._model))  # noqa: SLF001
        later = bool(self._own) or hooked
        keys = (found.missing or found.unexpected) and self._strict and not later
        nothing = not match.tensors and not self._own and bool(self._slots)
        if found.shapes or found.dtypes or keys or nothing:
            raise self._error(match, found)
        for task in found.tasks:
            check_one(self._opened, task.tensor)

    def _error(self, match: Match, found: Fit, errors: list[str] | None = None, lead: str = "") -> MismatchError:
        report = Mismatch(
            {key: slot.shape if (slot := self._slots.get(key)) else None for key in found.missing},
            {key: tensor.shape if (tensor := match.rest.get(key)) else None for key in found.unexpected},
            tuple(found.shapes),
            tuple(found.dtypes),
            tuple(errors or ()),
        )
        place = f" › {match.branch.name}" if match.branch.name else ""
        what = f"{lead}it does not fit {type(self._model).__name__}, of whose {len(self._slots):,} keys it has "
        what += f"{len(match.tensors):,}\n{report.text}"
        where = f"{self._opened.checkpoint.path}{place}"
        return MismatchError(what, report, where=where, fix=_advice(report, match))

    def _let_own(self, match: Match, found: Fit) -> list[str]:
        """Let modules that load by code of their own do so; what they complain of."""
        errors: list[str] = []
        if self._own:
            entries: dict[str, Any] = {**match.rest, **match.tensors}
            for name in values(match, self._opened.checkpoint):
                node, key = self._opened.node((*match.branch.path, name)), match.rename(name)
                if node and key not in match.tensors:
                    entries[key] = _Unbuilt(*node)
            state = State(entries, self._opened, self._goal)
            self._own.load(state, versions(match, self._opened), (found.missing, found.unexpected, errors))
            # A parameter that a module has made anew goes to the other places of the one that was described.
            made = {id(slot.tensor): slot.now for slot in self._slots.values() if slot.now is not slot.tensor}
            for slot in self._slots.values():
                new = made.get(id(slot.tensor))
                if slot.tensor is not None and slot.tensor.is_meta and new is not None:
                    slot.put(new)
        return errors

    def _read(self, tasks: list[Task]) -> None:
        """Fill every parameter. What was half done when reading failed is said."""
        goals = [task.places[0].tensor for task in tasks]
        made = {
            index: self._made(tasks[index]) for index, goal in enumerate(goals) if goal is not None and goal.is_meta
        }
        goals = [made.get(index, goal) for index, goal in enumerate(goals)]
        rest = self._read_straight(tasks, goals)
        done = before = len(tasks) - len(rest)
        try:
            for done, index in enumerate(rest, before):  # noqa: B007 - told below
                goal = goals[index]
                if goal is not None:
                    fill(self._opened, tasks[index].tensor, goal, index=tasks[index].part)
        except TransloadError as error:
            error.fix = f"{_half(done, len(tasks))}{error.fix}".rstrip()
            raise
        except (RuntimeError, NotImplementedError) as error:
            what = f"{tasks[index].key} does not take what was read for it: {error}"
            raise LoadError(what, where=self._opened.checkpoint.path, fix=_half(done, len(tasks))) from error
        for index, parameter in made.items():
            for place in tasks[index].places:
                place.put(parameter)

    def _read_straight(self, tasks: list[Task], goals: list[torch.Tensor | None]) -> list[int]:
        """Fill those whose bytes only have to be moved, all at once; the indexes of the others."""
        found = {
            index: straight(self._opened, task.tensor, goal, index=task.part)
            for index, (task, goal) in enumerate(zip(tasks, goals, strict=True))
            if goal is not None
        }
        ready = {index: way for index, way in found.items() if way is not None}
        if not ready:
            return list(range(len(tasks)))
        ways = list(ready.values())
        sources = list({id(way.source): way.source for way in ways}.values())
        numbers = {id(source): number for number, source in enumerate(sources)}
        wants = [ReadRequest(numbers[id(way.source)], way.offset, way.nbytes, way.device) for way in ways]
        try:
            bring(sources, wants, lambda index: ways[index].address, settings=self._settings, fresh=False)
        except Ended as end:
            key = tasks[list(ready)[end.want]].key
            what = f"the file ends {wants[end.want].nbytes - end.came:,} bytes before {key} does"
            fix = f"Some of the {len(tasks):,} tensors are in the model already."
            raise BrokenFileError(what, where=self._opened.checkpoint.path, fix=fix) from end
        for index in ready:
            changed(goals[index])
        return [index for index in range(len(tasks)) if index not in ready]

    def _made(self, task: Task) -> torch.Tensor:
        """A parameter in the place of one that is only described."""
        import torch

        target: Any = task.places[0].tensor
        made = torch.empty_like(target, device=self._goal.device(task.tensor.device))
        if isinstance(target, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=target.requires_grad)
        vars(made).update(vars(target))
        return made


def _half(done: int, count: int) -> str:
    return f"{done:,} of {count:,} tensors are in the model already. " if done else ""


def _advice(report: Mismatch, match: Match) -> str:
    """The one line that helps: a part of the file that fits, or not to insist where some of it does."""
    place = match.branch.name
    whole = next((renamed.theirs for renamed in report.renames if not renamed.ours), "")
    if whole:
        lead = f"{place}/" if place else ""
        return f"prefix={lead + whole!r} takes that part of the file."
    stuck = report.shapes or report.dtypes or report.others or not match.tensors
    return "" if stuck else "strict=False loads what fits."
