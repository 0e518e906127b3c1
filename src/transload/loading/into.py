"""``transload.load_into``: the weights of a file straight into the parameters of a model.

``find`` looks for the place in the file whose keys fit the model best, after undoing the changes that trainers and
wrappers make to all keys (``Rename``). A ``_Loading`` compares every key, shape and dtype, describes what does not fit,
and reads.
"""

from __future__ import annotations

import json
import re
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import accumulate, product, takewhile
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.errors import LandingWarning, LoadError, TransloadError, UsageError, warn
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.io import gc_paused
from transload.io.sources import SourceLike
from transload.loading import check_settings
from transload.loading.handles import TensorReader, build_node
from transload.nodes import Call, Dict
from transload.opening import CheckpointFile
from transload.opening.elements import is_constant
from transload.opening.jobs import Settings
from transload.render.words import plural

if TYPE_CHECKING:
    import torch

KeyFunction = Callable[[str], str | None]
"""The new name of a key, or ``None`` to leave it out."""
Shape = tuple[int, ...] | None
"""``None`` if any shape fits."""
Renamed = tuple[str, str, list[tuple[str, str]]]
"""A prefix in the file, the one in the model, and the pairs of keys that are equal after them."""
_Report = tuple[list[str], list[str], list[str]]
"""Missing keys, unexpected keys, and error messages."""

_PREFIX = re.compile(r"module\.|_orig_mod\.|model\.")
_PREFIXES = re.compile(rf"(?:{_PREFIX.pattern})+")
"""Prefixes that DataParallel, torch.compile and trainers add to every key."""
_INNER = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that wrappers add inside a key, where a part of the model is wrapped."""
_AVERAGED = re.compile(r"(?<![a-z])(?:ema|swa|avg|average[ds]?|shadow)(?![a-z])|callbacks$", re.IGNORECASE)
"""Places for a moving average of the weights, beside the weights themselves: ``state_dict_ema`` of timm,
``params_ema`` of BasicSR, ``ema`` of YOLO, the SWA callback of Lightning."""
_LORA = re.compile(r"lora[_.](?:[AB]|down|up)\b|lora_(?:embedding_|magnitude)", re.IGNORECASE)
_MARKERS = frozenset({"_parameters", "_buffers", "_modules"})
_EXTRA = "_extra_state"
_FIX = "Pass {'encoder.': 'backbone.'}, [(r'^encoder\\.', 'backbone.')], or a function of a key."
_SHOWN = 8
_MOST = 12
_FEW = 6


class MismatchError(LoadError):
    """The file and the model do not fit. The text says how, in groups; every name is in the attributes."""

    def __init__(self, what: str, loading: _Loading, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.missing_keys = list(loading.missing)
        self.unexpected_keys = list(loading.unexpected)
        self.shapes = tuple(loading.shapes)
        self.dtypes = tuple(loading.dtypes)


class KeysWarning(UserWarning):
    """Keys of a file were changed to fit the model, which the caller did not ask for; or tensors were left out."""


class _Keys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


class Loaded(_Keys):
    """What ``load_state_dict`` returns, and where the state dict was found and what was done to its keys."""

    found = ""
    """The place in the file, as ``prefix`` takes it; empty for the whole file."""
    notes: tuple[str, ...] = ()
    """What was done that the caller may want to know."""
    matched = "All keys"
    """Which keys have their values from the file, if none is missing or unexpected."""

    def __repr__(self) -> str:
        keys = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        head = keys if self.missing_keys or self.unexpected_keys else f"{self.matched} matched successfully"
        return f"<{'; '.join([head, *([f'found in {self.found}'] if self.found else []), *self.notes])}>"


def load_into(
    model: torch.nn.Module,
    f: SourceLike,
    *,
    strict: bool = True,
    prefix: str | None = None,
    rename: Any = None,
    device: Any = None,
    cast: bool = False,
    ignore_mismatched_sizes: bool = False,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
) -> Loaded:
    """Read the weights in a file into a model, each tensor straight into its parameter, without a second copy.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"epoch": 3, "state_dict": torch.nn.Linear(2, 2).state_dict()}, file)
    >>> load_into(torch.nn.Linear(2, 2), file.getvalue())
    <All keys matched successfully; found in state_dict>

    The state dict may be anywhere in the file (``prefix`` says where, if several places fit; the weights come before
    their moving average). ``module.``,
    ``_orig_mod.`` or ``model.`` is removed from its keys, or added to them, if they then match the model's. Before
    that, ``rename`` is applied to them: a mapping such as ``{"encoder.": "backbone."}`` (of whole keys, or of prefixes
    that end with a dot; ``""`` is the prefix of every key), a regular expression with its replacement, a list of such
    pairs, or a function that returns the new key, or ``None`` to leave it out.

    Parameters stay on their devices; those on the meta device are made on ``device``, or where ``transload.load`` would
    put them. A dtype is converted only with ``cast``. With ``ignore_mismatched_sizes`` tensors of another shape are
    left as they are in the model, and a warning names them. Another warning names buffers on the meta device that are
    never saved: they stay there. ``threads``, ``pinned_mb`` and ``direct`` are as for ``transload.load``.

    Everything is compared before the first byte is written: if keys are missing or not expected (with ``strict``), or
    shapes or dtypes differ, ``MismatchError`` says how, and the model is unchanged. Only modules with custom
    loading code, and hooks, can still raise while it is loaded, as in torch.
    """
    settings = check_settings(threads, pinned_mb, direct)
    if not callable(getattr(model, "named_parameters", None)):
        fix = "For a dictionary of tensors there is transload.load."
        raise UsageError(f"expected a module, not {type(model).__name__}", fix=fix)
    user_rename = None if rename is None else cache(key_function(rename))
    opened = TensorReader(f, "auto" if device is None else device)
    with opened:
        with gc_paused():
            loading = _Loading(model, opened, prefix, user_rename, cast=cast, ignore_shapes=ignore_mismatched_sizes)
            loading.refuse(strict=strict)
        loaded = loading.read(settings, strict=strict)
        opened.check_unchanged()
        return loaded


def key_function(rename: Any) -> KeyFunction:
    r"""One function for all forms of ``rename``; ``UsageError`` for anything else.

    >>> rename = key_function({"encoder.": "backbone.", "head.bias": None})
    >>> rename("encoder.weight"), rename("head.bias"), rename("head.weight")
    ('backbone.weight', None, 'head.weight')
    >>> key_function((r"layer(\d+)", r"layers.\1"))("layer3.weight")
    'layers.3.weight'
    """
    if isinstance(rename, Mapping):
        for old, new in rename.items():
            if not isinstance(old, str) or not isinstance(new, str | None):
                raise UsageError(f"rename has {old!r}: {new!r}, which does not map one key to another", fix=_FIX)
        prefixes = sorted((old for old in rename if not old or old.endswith(".")), key=len, reverse=True)

        def renamed(key: str) -> str | None:
            old = key if key in rename else next((old for old in prefixes if key.startswith(old)), None)
            new = key if old is None else rename[old]
            return new if old is None or new is None else new + key[len(old) :]
    elif callable(rename):

        def renamed(key: str) -> str | None:
            new = rename(key)
            if isinstance(new, str | None):
                return new
            what = f"the function given as rename returned {type(new).__name__} for {key!r}"
            raise UsageError(what, fix="Return the new key, or None to leave it out.")
    elif isinstance(rename, list | tuple):
        single = len(rename) == 2 and isinstance(rename[0], str | re.Pattern)
        steps: list[tuple[re.Pattern[str], str]] = []
        try:
            for pair in [rename] if single else rename:
                old, new = pair
                steps.append((re.compile(old), new))
                re.sub(old, new, "")
        except (TypeError, ValueError, LookupError, re.error) as error:
            raise UsageError(f"rename has {pair!r}, which cannot be used: {error}", fix=_FIX) from error

        def renamed(key: str) -> str | None:
            for pattern, new in steps:
                key = pattern.sub(new, key)
            return key
    else:
        raise UsageError(f"rename is of type {type(rename).__name__}", fix=_FIX)
    return renamed


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
    whole = {match[0] for match in map(_PREFIXES.match, keys) if match}
    return sorted({"", *(prefix for each in whole for prefix in accumulate(_PREFIX.findall(each)))}, key=len)


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
        found: tuple[str, ...] = ()
        if self.averages:
            place = self.branch.name or "the top level"
            found = (f"took the weights in {place}, not the averaged ones: prefix={self.averages[0]!r} takes those",)
        if not self.changed:
            return found
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
        return (*found, f"{' and '.join(words)} {self.changed:,} keys{omitted}")


def branches(checkpoint: Checkpoint) -> dict[tuple[Key, ...], Branch]:
    """Every place of a checkpoint that has tensors below it; of a pickled module, the keys of its ``state_dict()``."""
    found: dict[tuple[Key, ...], Branch] = {}
    # How many steps of a weight's path lead to the pickled module that has it. The names of attributes and of buffers
    # that are never saved contain their whole path.
    module_depths = {
        tensor.path: next(place for place, step in enumerate(tensor.path) if step in _MARKERS)
        for tensor in checkpoint.tensors
        if not (_MARKERS.isdisjoint(tensor.path) or "_parameters/" in tensor.name or "_buffers/" in tensor.name)
    }
    modules = {path[:split] for path, split in module_depths.items()}
    for tensor in checkpoint.tensors:
        steps = tensor.path
        if is_constant(checkpoint, tensor):
            continue
        if steps in module_depths:  # what follows the module is one key
            split = module_depths[steps]
            steps = (*steps[:split], ".".join(str(step) for step in steps[split:] if step not in _MARKERS))
        elif modules and any(steps[:depth] in modules for depth in range(len(steps))):
            continue  # an attribute, or a buffer that is never saved
        for depth in range(len(steps) or 1):
            branch = found.get(steps[:depth]) or found.setdefault(steps[:depth], Branch(steps[:depth], {}, {}))
            key = ".".join(map(str, steps[depth:]))
            branch.tensors[key] = tensor
            if depth + 1 < len(steps):
                branch.deep[key] = steps[depth]
    return found


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
            known = [branch.name or "''" for branch in ordered if len(branch.tensors) > len(branch.deep)]
            fix = f"There are tensors below: {join_names(known, _SHOWN)}"
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
    known = {_INNER.sub("", key) if rename.inner else key: key for key in shapes}
    for (original, tensor), key in zip(branch.tensors.items(), keys.values(), strict=True):
        if key is None:
            continue
        new = rename(key)
        name = known.get(new)
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


# -- the model


class _Slot(NamedTuple):
    """A parameter, a buffer, or (without a tensor) the place of a module's extra state."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor | None
    shape: Shape
    """``None`` if any fits: for extra state, and for uninitialized parameters of lazy modules."""

    @property
    def table(self) -> dict[str, Any]:
        """The dictionary of its module that contains it."""
        parameters: dict[str, Any] = self.module._parameters  # noqa: SLF001 - getattr and setattr may be the user's
        return parameters if self.name in parameters else self.module._buffers  # noqa: SLF001 - the same

    def takes_scalar(self, tensor: Tensor) -> bool:
        """Whether a one-element tensor fills a scalar, as in ``load_state_dict``: torch 0.3 had no 0-dim tensors."""
        return tensor.shape == (1,) and self.shape == ()


def _modules(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module with the prefix of its keys, parents first; a shared module under each of its names."""
    yield prefix, model
    for name, child in model._modules.items():  # noqa: SLF001 - as load_state_dict goes through them
        if child is not None:
            yield from _modules(child, f"{prefix}{name}.")


def _slots(model: torch.nn.Module) -> dict[str, _Slot]:
    """The slots of a model by key, in the order of its ``state_dict()``."""
    import torch
    from torch.nn.parameter import UninitializedTensorMixin

    found: dict[str, _Slot] = {}
    for prefix, module in _modules(model):
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - as above
        buffers = [pair for pair in module._buffers.items() if pair[0] not in unsaved]  # noqa: SLF001
        for name, tensor in (*module._parameters.items(), *buffers):  # noqa: SLF001
            if tensor is not None:
                shape = None if isinstance(tensor, UninitializedTensorMixin) else tuple(tensor.shape)
                found[prefix + name] = _Slot(module, name, tensor, shape)
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            found[prefix + _EXTRA] = _Slot(module, _EXTRA, None, None)
    return found


class _Unbuilt(NamedTuple):
    """A value that is built when it is needed: its file, and its node there."""

    file: CheckpointFile
    node: object


class _LazyStateDict(UserDict[str, Any]):
    """A state dict that reads a tensor, or builds another value, on each access, and does not keep it.

    With ``lands``, tensors are read onto the devices they go to, since they become the parameters themselves.
    """

    def __init__(self, entries: dict[str, Any], opened: TensorReader) -> None:
        self.data = entries
        self.lands = False
        self._opened = opened

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, _Unbuilt):
            return build_node(value.file, value.node, self._opened.device_map)
        if not isinstance(value, Tensor):
            return value
        return self._opened.read(value, device=self._opened.device(value.device) if self.lands else "cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.data))  # a hook may remove entries meanwhile

    def load(self, module: torch.nn.Module, prefix: str, versions: dict[str, dict[str, Any]], report: _Report) -> None:
        """Let a module and its children load their entries, as ``load_state_dict`` does."""
        below = {key: value for key, value in self.data.items() if key.startswith(prefix)}
        state = _LazyStateDict(below, self._opened)
        state.lands = any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        metadata = {**versions.get(prefix[:-1], {}), **({"assign_to_params_buffers": True} if state.lands else {})}
        module._load_from_state_dict(state, prefix, metadata, True, *report)  # noqa: SLF001 - what load_state_dict calls
        for name, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                state.load(child, f"{prefix}{name}.", versions, report)


# -- what does not fit


class KeyMismatch(NamedTuple):
    """A key whose shape or dtype differs between the file and the model."""

    key: str
    file: str
    model: str


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


def _group(title: str, keys: Sequence[str]) -> list[str]:
    """Keys grouped by prefix, the largest groups first (``encoder.layers.* (96)``); a single key in full."""
    if len(keys) <= _FEW:
        return [f"{title}: {', '.join(keys)}"] if keys else []
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(key.partition(".")[0], []).append(key)
    shown = sorted(groups.values(), key=len, reverse=True)
    words = []
    for group in shown[:_MOST]:
        columns = zip(*(key.split(".") for key in group), strict=False)
        common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]
        words.append(group[0] if len(group) == 1 else f"{'.'.join(common)}.* ({len(group):,})")
    more = sum(map(len, shown[_MOST:]))
    return [f"{title}, {plural(len(keys), 'key')}: {', '.join(words)}" + (f" and {more:,} more" if more else "")]


# -- one call of load_into


class _Task(NamedTuple):
    """A tensor of the file, the part of it to read, and all slots of the one parameter it goes to."""

    key: str
    tensor: Tensor
    part: tuple[int, ...]
    places: list[_Slot]


class _Loading:
    """A model, a file, how they fit, and what to read. Keys are the model's."""

    def __init__(
        self,
        model: torch.nn.Module,
        opened: TensorReader,
        prefix: str | None,
        user_rename: KeyFunction | None = None,
        *,
        cast: bool = False,
        ignore_shapes: bool = False,
    ) -> None:
        import torch
        from torch.nn.modules.batchnorm import _NormBase
        from torch.nn.modules.instancenorm import _InstanceNorm

        self._model = model
        self._opened = opened
        self._prefix = prefix
        self._renames = user_rename is not None
        self._user_rename: KeyFunction = user_rename or (lambda key: key)
        self._slots = _slots(model)
        # The outermost modules with custom loading code: a ``_load_from_state_dict``, or pre-hooks. The norms override
        # theirs only for files without ``num_batches_tracked``, which is handled below.
        self._custom: dict[str, torch.nn.Module] = {}
        kinds = (torch.nn.Module, _NormBase, _InstanceNorm)
        methods = {kind._load_from_state_dict for kind in kinds}  # noqa: SLF001 - they are compared, not called
        for module_prefix, module in _modules(model):
            is_custom = type(module)._load_from_state_dict not in methods or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001
            if is_custom and not module_prefix.startswith(tuple(self._custom)):
                self._custom[module_prefix] = module
        shapes = {key: slot.shape for key, slot in self._slots.items()}
        self._match = find(opened.checkpoint, shapes, prefix, user_rename)
        names = Counter(map(self._user_rename, self._match.branch.tensors))
        if twice := [name for name, count in names.items() if name is not None and count > 1]:
            what = f"rename gives several keys of the file the same name: {join_names(twice, _SHOWN)}"
            raise UsageError(what, where=opened.checkpoint.path, fix="Return None for all but one of them.")
        self._extras: dict[str, Tensor | _Unbuilt] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.shapes: list[KeyMismatch] = []
        self.dtypes: list[KeyMismatch] = []
        self._ignored: list[KeyMismatch] = []
        self._errors: list[str] = []
        self._compare(cast=cast, ignore_shapes=ignore_shapes)

    def _compare(self, *, cast: bool, ignore_shapes: bool) -> None:
        """Compare every key, shape and dtype, and list what to read."""
        from torch.nn.modules.batchnorm import _NormBase

        match, opened, custom = self._match, self._opened, tuple(self._custom)
        slots = {key: slot for key, slot in self._slots.items() if not key.startswith(custom)}  # without custom modules
        for key in (key for key, slot in slots.items() if slot.tensor is None):
            found = opened.node((*match.branch.path, self._entry(key)))
            if found is not None or key in match.tensors:
                self._extras[key] = match.tensors[key] if found is None else _Unbuilt(*found)
        for key, tensor in match.tensors.items():
            slot = slots.get(key)
            if slot is None or slot.tensor is None or slot.shape is None:
                continue
            if tensor.shape != slot.shape and not slot.takes_scalar(tensor):
                differing = self._ignored if ignore_shapes else self.shapes
                differing.append(KeyMismatch(key, str(list(tensor.shape)), str(list(slot.shape))))
                if ignore_shapes:
                    continue
            dtype = str(slot.tensor.dtype).removeprefix("torch.")
            if tensor.dtype != dtype and not cast:
                self.dtypes.append(KeyMismatch(key, tensor.dtype, dtype))
        # One task per parameter, in file order; of two tensors for one parameter the last counts, as in torch.
        tasks: dict[int, _Task] = {}
        places: defaultdict[int, list[_Slot]] = defaultdict(list)
        ignored = {each.key for each in self._ignored}
        for key, slot in self._slots.items():
            if slot.tensor is not None:
                places[id(slot.tensor)].append(slot)
                if key in match.tensors and key not in ignored:
                    part = (0,) if slot.takes_scalar(match.tensors[key]) else ()
                    tasks[id(slot.tensor)] = _Task(key, match.tensors[key], part, places[id(slot.tensor)])

        def place(task: _Task) -> tuple[str, int, int]:
            storage = opened.elements.storage(task.tensor)
            return storage.file if storage else "", task.tensor.file_offset or 0, task.tensor.offset

        self._tasks = sorted((task for task in tasks.values() if not task.key.startswith(custom)), key=place)
        for key, slot in slots.items():
            if key in match.tensors or key in self._extras or id(slot.tensor) in tasks:
                continue
            if slot.name == "num_batches_tracked" and isinstance(slot.module, _NormBase):
                version = self._versions.get(key.rpartition(".")[0], {}).get("version")
                if type(version) is not int or version < 2:  # version 2 of the norms added it
                    continue
            self.missing.append(key)
        # As in torch, leftover tensors (nested ones as the entry they are in) and other values are unexpected.
        rename, deep = match.rename, match.branch.deep
        entries = {self._user_rename(key): str(first) for key, first in deep.items()}
        extras = {self._entry(key) for key in self._extras}
        self.unexpected = [key for key in dict.fromkeys(entries.get(k, k) for k in match.rest) if key not in extras]
        known = {*match.branch.tensors, *map(str, deep.values()), *extras}
        others = [self._user_rename(key) for key in self._values if key not in known]
        self.unexpected += [rename(key) for key in others if key is not None and not rename.leaves_out(key)]
        self.unexpected = [key for key in self.unexpected if not key.startswith(custom)]

    def refuse(self, *, strict: bool) -> None:
        """Raise for every mismatch that is known before a byte is read."""
        # Custom modules and hooks may still remove keys from the lists.
        later = self._custom or any(module._load_state_dict_post_hooks for _, module in _modules(self._model))  # noqa: SLF001
        keys_differ = (self.missing or self.unexpected) and strict and not later
        nothing = not self._match.tensors and not self._custom and bool(self._slots)
        if self.shapes or self.dtypes or keys_differ or nothing:
            raise self._error()
        for task in self._tasks:
            self._opened.check(task.tensor)

    @cached_property
    def _values(self) -> list[str]:
        """The file's keys of entries that are not tensors: an epoch, extra state."""
        checkpoint, branch = self._opened.checkpoint, self._match.branch
        path = branch.path
        modules = not all(_MARKERS.isdisjoint(tensor.path[len(path) :]) for tensor in branch.tensors.values())
        if modules or checkpoint.traits.program:
            return []  # attributes of an object are not entries
        below = (leaf.path[len(path)] for leaf in checkpoint.leaves if leaf.path[: len(path)] == path != leaf.path)
        return [str(step) for step in dict.fromkeys((*below, *branch.deep.values()))]

    def _entry(self, key: str) -> str:
        """The file's key for a value of the model; empty if the caller's rename gives none."""
        name = self._match.rename.undone(key)
        return next((each for each in (*self._values, name) if self._user_rename(each) == name), "")

    @cached_property
    def _versions(self) -> dict[str, dict[str, Any]]:
        """The ``_metadata`` of each module, such as its version, by the model's names of the modules."""
        found = self._opened.node(self._match.branch.path)
        node = found[1] if found else None
        state = node.states[-1] if type(node) is Call and node.states else None
        known: Any = None
        if found and type(state) is Dict:
            with suppress(TransloadError):
                known = build_node(found[0], state.get("_metadata"))
        known = known if isinstance(known, dict) else {}
        if self._renames:  # the caller renames keys, not modules
            pairs = [(new.rpartition(".")[0], old.rpartition(".")[0]) for new, old in self._match.origins.items()]
        else:
            pairs = [(self._match.rename(f"{name}.")[:-1] if name else "", name) for name in map(str, known)]
        return {new: known[old] for new, old in pairs if isinstance(known.get(old), dict)}

    def _error(self, intro: str = "") -> MismatchError:
        """The error that says in a few lines what does not fit, and which arguments would help."""
        match, place = self._match, self._match.branch.name
        missing = {key: slot.shape if (slot := self._slots.get(key)) else None for key in self.missing}
        unexpected = {key: tensor.shape if (tensor := match.rest.get(key)) else None for key in self.unexpected}
        what = f"{intro}it does not fit {type(self._model).__name__}"
        lines = [f"{what}: it has {len(match.tensors):,} of the model's {len(self._slots):,} keys"]
        renames = likely_renames(missing, unexpected)
        covered = {key for _, _, pairs in renames for pair in pairs for key in pair}
        if renames:
            lines.append("probably the same under other names:")
            lines += [f"  {a}* in the file ↔ {b}* in the model: {plural(len(pairs), 'key')}" for a, b, pairs in renames]
        lines += _group("missing in the file", [key for key in missing if key not in covered])
        root = match.rest.get("")  # if the file is a tensor, not a dictionary
        nameless = f"a tensor without a name, {root.dtype} {list(root.shape)}" if root else ""
        lines += _group("only in the file", [key or nameless for key in unexpected if key not in covered])
        if self.shapes:
            rows = [KeyMismatch("key", "file", "model"), *self.shapes[:_MOST]]
            wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines.append(f"of another shape, {plural(len(self.shapes), 'key')}:")
            for row in rows:
                lines.append("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip())
            if len(self.shapes) > _MOST:
                lines.append(f"  and {len(self.shapes) - _MOST:,} more")
        pairs = Counter((each.file, each.model) for each in self.dtypes)
        for (file, model), count in pairs.most_common(_FEW):
            lines.append(f"of another dtype, {plural(count, 'key')}: {file} in the file, {model} in the model")
        if pairs:
            lines.append("cast=True converts them while they are read.")
        whole = next((theirs for theirs, ours, _ in renames if not ours), "")
        fix = ""
        if any(map(_LORA.search, match.branch.tensors)) and not any(map(_LORA.search, self._slots)):
            lines.insert(0, "it is a LoRA adapter, which changes the weights of a base model and does not replace them")
            fix = "peft loads it: PeftModel.from_pretrained(model, FOLDER), after the weights of the base model."
        elif whole:
            prefix = f"{place}/{whole}" if place else whole
            fix = f"prefix={prefix!r} takes that part of the file."
        elif call := self._renaming(renames):
            fix = call
        elif self.shapes and not self.dtypes and (match.tensors or self._custom):
            fix = "ignore_mismatched_sizes=True leaves them as they are in the model."
        elif match.tensors and not (self.shapes or self.dtypes or self._errors):
            fix = "strict=False loads what fits."
        where = f"{self._opened.checkpoint.path}{f' › {place}' if place else ''}"
        return MismatchError("\n".join([*lines, *self._errors]), self, where=where, fix=fix)

    def _renaming(self, renames: Sequence[Renamed]) -> str:
        """The arguments that load keys under other names, found by trying them; empty if they would not help."""
        before = self._match
        table = {before.rename.undone(theirs): ours for theirs, ours, _ in renames}
        if not table or self._renames:  # by the caller already
            return ""
        for new, old in before.origins.items():  # keys that fit already keep their names
            theirs = next((each for each in table if old.startswith(each) and len(each) < len(old)), None)
            if theirs is not None and table[theirs] != before.rename(theirs):
                group = old[: old.find(".", len(theirs)) + 1] or old
                table[group] = new if group == old else before.rename(group)
        try:
            trial = _Loading(self._model, self._opened, self._prefix, key_function(table))
        except UsageError:  # several keys would get the same name, or several places fit
            return ""
        after = trial._match.tensors
        if len(after) <= len(before.tensors):
            return ""
        words = [f"rename={json.dumps(table, ensure_ascii=False)}"]
        words += ["strict=False"] if trial.missing or trial.unexpected else []
        words += ["ignore_mismatched_sizes=True"] if trial.shapes else []
        words += ["cast=True"] if trial.dtypes else []
        return f"{', '.join(words)} loads {len(after) - len(trial.shapes):,} of {plural(len(self._slots), 'key')}."

    def read(self, settings: Settings, *, strict: bool) -> Loaded:
        match, path = self._match, self._opened.checkpoint.path
        extras = dict(_LazyStateDict(dict(self._extras), self._opened))
        if self._custom:
            entries: dict[str, Any] = {**match.rest, **match.tensors}
            for name in self._values:
                node, new = self._opened.node((*match.branch.path, name)), self._user_rename(name)
                if node and new is not None and match.rename(new) not in match.tensors:
                    entries[match.rename(new)] = _Unbuilt(*node)
            state = _LazyStateDict(entries, self._opened)
            for prefix, module in self._custom.items():
                state.load(module, prefix, self._versions, (self.missing, self.unexpected, self._errors))
            # If a module has replaced a parameter on the meta device, put the new one into its other slots, too.
            current = [(slot, slot.table.get(slot.name)) for slot in self._slots.values()]
            replaced = {id(slot.tensor): tensor for slot, tensor in current if tensor is not slot.tensor}
            for slot, _ in current:
                other = replaced.get(id(slot.tensor))
                if slot.tensor is not None and slot.tensor.is_meta and other is not None:
                    slot.table[slot.name] = other
        self._fill(settings)
        for key, value in extras.items():
            self._slots[key].module.set_extra_state(value)
        loaded = Loaded(self.missing, self.unexpected)
        for _, module in reversed(list(_modules(self._model))):  # children before their parents
            for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001 - as load_state_dict calls them
                hook(module, loaded)
        if self._errors or (strict and (self.missing or self.unexpected)):
            raise self._error("loaded only in part: ")
        notes = match.notes
        if self._ignored:
            differing = [f"{key} ({file} in the file, {model} in the model)" for key, file, model in self._ignored]
            count = plural(len(differing), "key")
            loaded.matched = "All other keys"
            notes += (f"left {count} of another shape as in the model: {join_names(differing, _SHOWN, 1000)}",)
        if notes:
            warn(f"{path}: {'; '.join(notes)}", KeysWarning)
        # Keys that get no values but are not missing: buffers that are never saved, and ignored shapes.
        ignored = {each.key for each in self._ignored}
        present = {
            prefix + name: tensor
            for prefix, module in _modules(self._model)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001 - as above
            if tensor is not None
        }
        unfilled = [key for key, t in present.items() if t.is_meta and (key not in self._slots or key in ignored)]
        if unfilled and not all(tensor.is_meta for tensor in present.values()):  # a model all on meta is meant to be
            note = f"still on the meta device, since the file has no values for them: {join_names(unfilled, _SHOWN)}"
            fix = "Compute them as the model does when it is made: until then it cannot be run."
            warn(f"{path}: {note}. {fix}", LandingWarning)
            notes += (note,)
        loaded.found, loaded.notes = match.branch.name, notes
        return loaded

    def _fill(self, settings: Settings) -> None:
        """Fill every parameter; a new one in place of one on the meta device."""
        import torch

        filled: list[tuple[_Task, Any]] = []
        for task in self._tasks:
            target: Any = task.places[0].tensor
            if target.is_meta:
                made = torch.empty_like(target, device=self._opened.device(task.tensor.device))
                if isinstance(target, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, requires_grad=target.requires_grad)
                vars(made).update(vars(target))
                target = made
            filled.append((task, target))
        try:
            self._opened.fill([(task.tensor, target, task.part) for task, target in filled], settings)
        except TransloadError as error:
            error.fix = f"The model may be partly filled. {error.fix}".rstrip()
            raise
        for task, target in filled:
            for slot in task.places:
                if slot.tensor is not target:
                    slot.table[slot.name] = target
