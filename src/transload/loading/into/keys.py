"""Which keys of a file belong to which of a model: plain names and shapes, without torch and without reading.

``find`` looks for the place in the file whose keys fit the model best, after undoing the changes that trainers and
wrappers make to all keys (``Rename``). ``likely_renames`` explains the keys that are left over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, product

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.errors import UsageError
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.opening.elements import is_constant
from transload.opening.renaming import KeyFunction

Shape = tuple[int, ...] | None
"""``None`` if any shape fits."""
Renamed = tuple[str, str, list[tuple[str, str]]]
"""A prefix in the file, the one in the model, and the pairs of keys that are equal after them."""

MARKERS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a pickled module that have its weights."""
_SHOWN = 8
_MOST = 12
_FEW = 6
_PREFIX = re.compile(r"module\.|_orig_mod\.|model\.")
_PREFIXES = re.compile(rf"(?:{_PREFIX.pattern})+")
"""Prefixes that DataParallel, torch.compile and trainers add to every key."""
_INNER = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that wrappers add inside a key, where a part of the model is wrapped."""
_AVERAGED = re.compile(r"(?<![a-z])(?:ema|swa|avg|average[ds]?|shadow)(?![a-z])|callbacks$", re.IGNORECASE)
"""Places for a moving average of the weights, beside the weights themselves: ``state_dict_ema`` of timm,
``params_ema`` of BasicSR, ``ema`` of YOLO, the SWA callback of Lightning."""


class Rename(NamedTuple):
    """A change of all keys of a file: the prefix ``strip`` becomes ``add``; ``inner`` removes names of wrappers."""

    strip: str = ""
    add: str = ""
    inner: bool = False

    def __call__(self, key: str) -> str:
        """The model's key for a key of the file."""
        if self.inner:
            key = _INNER.sub("", key)
        return self.add + key[len(self.strip) :] if key.startswith(self.strip) else key

    def undone(self, key: str) -> str:
        """The file's key for a key of the model."""
        return self.strip + key[len(self.add) :] if key.startswith(self.add) else key

    def leaves_out(self, key: str) -> bool:
        """Whether a key does not belong to the model: trainers also save other things, wrappers do not."""
        return self.strip.endswith("model.") and not key.startswith(self.strip)

    @property
    def cost(self) -> int:
        """A measure of the change: of several that fit equally well, the smallest is used."""
        return self.strip.count(".") + self.add.count(".") + self.inner


def _prefixes_of(keys: Iterable[str]) -> list[str]:
    """The prefixes to try that some key begins with: ``""``, ``module.``, ``module.model.``."""
    chains = {match[0] for match in map(_PREFIXES.match, keys) if match}
    return sorted({"", *(prefix for chain in chains for prefix in accumulate(_PREFIX.findall(chain)))}, key=len)


class Branch(NamedTuple):
    """The tensors below one place of a checkpoint, by the keys they would have in a state dict."""

    path: tuple[Key, ...]
    tensors: dict[str, Tensor]
    deep: dict[str, Key]
    """Keys that are joined from several steps, because the tensor is nested deeper; each with its first step."""

    @property
    def name(self) -> str:
        """The ``prefix`` that selects it."""
        return "/".join(map(str, self.path))


class BranchMatch(NamedTuple):
    """A branch compared with a model: the tensor for each of the model's keys, and the tensors that are left over."""

    branch: Branch
    rename: Rename
    tensors: dict[str, Tensor]
    """By the model's keys."""
    origins: dict[str, str]
    """The file's key, by the model's."""
    rest: dict[str, Tensor]
    """The tensors that have no place in the model, by their renamed keys."""
    changed: int = 0
    """The number of keys that ``rename`` changed."""
    outside: int = 0
    """The number of tensors that ``rename`` leaves out."""
    score: tuple[int, int] = (0, 0)
    averages: tuple[str, ...] = ()
    """The places of averaged weights that fit as well, and were not taken."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen, and what was done to the keys, in words."""
        notes: list[str] = []
        if self.averages:
            place = self.branch.name or "the top level"
            notes.append(f"took the weights in {place}, not the averaged ones: prefix={self.averages[0]!r} takes those")
        if not self.changed:
            return tuple(notes)
        strip, add, inner = self.rename
        words = []
        if strip and add:
            words.append(f"replaced {strip!r} by {add!r} in")
        elif strip:
            words.append(f"removed {strip!r} from")
        elif add:
            words.append(f"put {add!r} before")
        if inner:
            words.append("removed the names of wrappers from")
        omitted = f", and left out {self.outside:,} without it" if self.outside else ""
        return (*notes, f"{' and '.join(words)} {self.changed:,} keys{omitted}")


def branches(checkpoint: Checkpoint) -> dict[tuple[Key, ...], Branch]:
    """Every place of a checkpoint that has tensors below it; of a pickled module, the keys of its ``state_dict()``."""
    by_path: dict[tuple[Key, ...], Branch] = {}
    # How many steps of a weight's path lead to the pickled module that has it. The names of attributes and of buffers
    # that are never saved contain their whole path.
    module_depths = {
        tensor.path: next(place for place, step in enumerate(tensor.path) if step in MARKERS)
        for tensor in checkpoint.tensors
        if not (MARKERS.isdisjoint(tensor.path) or "_parameters/" in tensor.name or "_buffers/" in tensor.name)
    }
    modules = {path[:split] for path, split in module_depths.items()}
    for tensor in checkpoint.tensors:
        steps = tensor.path
        if is_constant(checkpoint, tensor):
            continue
        if steps in module_depths:  # what follows the module is one key
            split = module_depths[steps]
            steps = (*steps[:split], ".".join(str(step) for step in steps[split:] if step not in MARKERS))
        elif modules and any(steps[:depth] in modules for depth in range(len(steps))):
            continue  # an attribute, or a buffer that is never saved
        for depth in range(len(steps) or 1):
            path = steps[:depth]
            branch = by_path.get(path) or by_path.setdefault(path, Branch(path, {}, {}))
            key = ".".join(map(str, steps[depth:]))
            branch.tensors[key] = tensor
            if depth + 1 < len(steps):
                branch.deep[key] = steps[depth]
        # Where a format has no nested names, those that convert wrote have their places before slashes.
        name = str(steps[0]) if len(steps) == 1 else ""
        for slash in re.finditer("(?<=.)/", name):
            path = tuple(name[: slash.start()].split("/"))
            branch = by_path.get(path) or by_path.setdefault(path, Branch(path, {}, {}))
            branch.tensors[name[slash.end() :]] = tensor
    return by_path


def find(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Shape],
    prefix: str | None = None,
    user_rename: KeyFunction | None = None,
) -> BranchMatch:
    """The branch that fits a model best, by keys and then by shapes.

    ``wanted`` are the model's keys with their shapes; ``user_rename`` renames those of the file. Of the weights and
    their moving average, the weights are used. ``UsageError`` if two other branches with different tensors fit equally
    well, or if nothing has the ``prefix``.
    """
    chosen = list(branches(checkpoint).values())
    if prefix is not None:  # the branch of this name; else all tensors whose names begin with it
        start = prefix if prefix[-1:] in "./" else f"{prefix}."
        tensors = {t.name[len(start) :].replace("/", "."): t for t in checkpoint.tensors if t.name.startswith(start)}
        named = [branch for branch in chosen if branch.name == prefix.rstrip("/")]
        if not named and not tensors:
            # The places that have tensors as direct members, largest first.
            ordered = sorted(chosen, key=lambda branch: len(branch.deep) - len(branch.tensors))
            places = [branch.name or "''" for branch in ordered if len(branch.tensors) > len(branch.deep)]
            fix = f"There are tensors below: {join_names(places, _SHOWN)}"
            raise UsageError(f"no tensor name begins with the prefix {prefix!r}", where=checkpoint.path, fix=fix)
        chosen = named[-1:] or [Branch((start,), tensors, {})]
    prefixes, wrapped = _prefixes_of(wanted), any(map(_INNER.search, wanted))
    matches: list[BranchMatch] = []
    most = 0
    for branch in sorted(chosen, key=lambda branch: -len(branch.tensors)):
        if len(branch.tensors) < most:  # too few to be the best, as are those that follow
            break
        keys = {key: key if user_rename is None else user_rename(key) for key in branch.tensors}
        best = _match_with(branch, keys, wanted, Rename())
        if len(best.tensors) < len(wanted):
            # Try all pairs of prefixes from both sides, with and without wrappers inside the keys.
            theirs = [key for key in keys.values() if key is not None]
            inside = (False, True) if wrapped or any(map(_INNER.search, theirs)) else (False,)
            tries = [Rename(strip, add, inner) for inner, strip, add in product(inside, _prefixes_of(theirs), prefixes)]
            tried = [_match_with(branch, keys, wanted, rename) for rename in tries]
            best = max(tried, key=lambda match: (match.score, -match.rename.cost))
        matches.append(best)
        most = max(most, best.score[0])
    if not matches:
        return BranchMatch(Branch((), {}, {}), Rename(), {}, {}, {})
    score = max(match.score for match in matches)
    if score == (0, 0):
        return max(matches, key=lambda m: (len(m.branch.tensors) - len(m.branch.deep), -len(m.branch.path)))
    equal = [match for match in matches if match.score == score]
    equal.sort(key=lambda match: (match.rename.cost, len(match.rest), len(match.branch.path)))
    main = [match for match in equal if not any(_AVERAGED.search(str(step)) for step in match.branch.path)]
    if main and len(main) < len(equal):
        averages = tuple(match.branch.name for match in equal if match not in main)
        equal = [main[0]._replace(averages=averages), *main[1:]]
    rivals = [match for match in equal[1:] if _bytes(match) != _bytes(equal[0])]
    if rivals:
        rivals.insert(0, equal[0])
        names = join_names([match.branch.name or "the root" for match in rivals], _SHOWN)
        choices = [f"prefix={match.branch.name!r} for the {len(match.tensors):,} keys there" for match in rivals]
        what = f"{len(rivals)} places of the file fit the model equally well: {names}"
        raise UsageError(what, where=checkpoint.path, fix="\n".join(["Choose one of them with:", *choices]))
    return equal[0]


def _bytes(match: BranchMatch) -> dict[str, tuple[object, ...]]:
    """Which bytes a match would load, by the model's keys."""
    return {key: (t.storage or t.path, t.offset, t.stride) for key, t in match.tensors.items()}


def _match_with(
    branch: Branch, keys: Mapping[str, str | None], shapes: Mapping[str, Shape], rename: Rename
) -> BranchMatch:
    """Compare a branch with the model after one rename; ``keys`` are the caller's renames, by key of the branch."""
    tensors: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    rest: dict[str, Tensor] = {}
    outside = 0
    names = {_INNER.sub("", key) if rename.inner else key: key for key in shapes}
    for (original, tensor), key in zip(branch.tensors.items(), keys.values(), strict=True):
        if key is None:
            continue
        new = rename(key)
        name = names.get(new)
        if name is not None and (name not in tensors or key == name):
            tensors[name] = tensor
            origins[name] = original
        elif rename.leaves_out(key):
            outside += 1
        else:
            rest[key if original in branch.deep else new] = tensor
    score = len(tensors), sum(shapes[name] in (None, tensor.shape) for name, tensor in tensors.items())
    changed = sum(keys[original] != name for name, original in origins.items())
    return BranchMatch(branch, rename, tensors, origins, rest, changed, outside, score)


def likely_renames(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> list[Renamed]:
    """Prefixes of the file, each with the model's prefix that has the same keys with the same shapes below it.

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
            candidates = tails.get((key[cut:], shape), ())
            if candidates and len(candidates) <= _FEW:  # more prove nothing: every layer has a weight
                votes.update((key[:cut], candidate[: len(candidate) - len(key) + cut]) for candidate in candidates)
            if candidates:
                break
    # The pairs of prefixes that explain the most keys, each key once; a single key is not a pattern.
    out: list[Renamed] = []
    wanted, free = set(missing), dict.fromkeys(unexpected)
    for (theirs, ours), _ in votes.most_common(_MOST * _FEW):
        renamed = {key: ours + key[len(theirs) :] for key in free if key.startswith(theirs)}
        pairs = [(key, to) for key, to in renamed.items() if to in wanted and missing[to] == unexpected[key]]
        if len(pairs) < 2 or len(out) == _MOST:
            continue
        out.append((theirs, ours, pairs))
        for key, to in pairs:
            del free[key]
            wanted.discard(to)
    return out


def _cuts(key: str) -> list[int]:
    """Where a prefix of a key may end, shortest first."""
    return [0, *(place + 1 for place, letter in enumerate(key) if letter == ".")]
