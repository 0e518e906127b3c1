"""``transload.load_into``: the weights of a file straight into the parameters of a model.

``keys`` finds the place in the file that fits the model, a ``Comparison`` lists what to read and what does not fit;
nothing is written to the model before both are known.
"""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Tensor
from transload.errors import DoesNotFitError, LandingWarning, LoadError, TransloadError, UsageError, warn
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.io import gc_paused
from transload.io.sources import SourceLike
from transload.loading import check_settings
from transload.loading.handles import Prepared, TensorReader, build_node
from transload.loading.into.compare import SHOWN, Comparison, Unbuilt, described, lost_shards, modules_of
from transload.loading.into.ranks import Ranks, seen
from transload.loading.into.shards import gathers, local_tensor, meta_devices, own_hooks, reshard
from transload.loading.placement import Shortage, devices_here
from transload.loading.refusal import refuse_piece, refuse_unmerged
from transload.opening.jobs import Settings
from transload.opening.renaming import Renaming
from transload.render.words import plural

if TYPE_CHECKING:
    import torch

    from transload.loading.into.optimizers import OptimizerPlan

__all__ = ["KeysWarning", "Loaded", "MismatchError", "load_into"]


class MismatchError(LoadError):
    """The file and the model do not fit. The text says how, in groups; every name is in the attributes."""

    def __init__(self, comparison: Comparison, errors: list[str], intro: str = "") -> None:
        what, fix = described(comparison, errors)
        place = comparison.match.branch.name
        where = comparison.opened.checkpoint.path + (f" › {place}" if place else "")
        super().__init__(f"{intro}{what}", where=where, fix=fix)
        self.missing_keys = list(comparison.missing)
        self.unexpected_keys = list(comparison.unexpected)
        self.shapes = tuple(comparison.shapes)
        self.dtypes = tuple(comparison.dtypes)


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
    optimizer: Any = None,
    process_group: Any = None,
) -> Loaded:
    """Read the weights in a file into a model, each tensor straight into its parameter, without a second copy.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"epoch": 3, "state_dict": torch.nn.Linear(2, 2).state_dict()}, file)
    >>> load_into(torch.nn.Linear(2, 2), file.getvalue())
    <All keys matched successfully; found in state_dict>

    The state dict may be anywhere in the file (``prefix`` says where, if several places fit; the weights come before
    their moving average). ``module.``, ``_orig_mod.`` or ``model.`` is removed from its keys, or added to them, if they
    then match the model's. Before that, ``rename`` is applied to them: a mapping such as ``{"encoder.": "backbone."}``
    (of whole keys, or of prefixes that end with a dot; ``""`` is the prefix of every key), a regular expression with
    its replacement, a list of such pairs, or a function that returns the new key, or ``None`` to leave it out.

    Parameters stay on their devices; those on the meta device are made on ``device``, or where ``transload.load`` would
    put them. A dtype is converted only with ``cast``. With ``ignore_mismatched_sizes`` tensors of another shape are
    left as they are in the model, and a warning names them. Another warning names buffers on the meta device that are
    never saved: they stay there. ``threads``, ``pinned_mb`` and ``direct`` are as for ``transload.load``.

    Into a model of peft, a LoRA adapter is loaded as the adapter that the model has; its base model stays as it is.

    ``optimizer`` gets its state from the file, too: an optimizer, or several, of parameters of the model.

    Of a sharded model (DTensors of FSDP2 or tensor parallelism, or FSDP1) each rank reads only what it has; call it on
    every rank. They agree: if one cannot load, all raise, and no model is changed. ``process_group`` has the ranks that
    take part; by default all, as in ``dcp.load``.

    Everything is compared before the first byte is written: if keys are missing or not expected (with ``strict``), or
    shapes or dtypes differ, ``MismatchError`` says how, and the model is unchanged. Only modules with custom
    loading code, and hooks, can still raise while it is loaded, as in torch.
    """
    if not callable(getattr(model, "named_parameters", None)):
        fix = "For a dictionary of tensors there is transload.load."
        raise UsageError(f"expected a module, not {type(model).__name__}", fix=fix)
    ranks = Ranks(model, process_group)
    with ExitStack() as files:
        with ranks:
            settings = check_settings(threads, pinned_mb, direct)
            user_rename = None if rename is None else cache(Renaming(rename))
            opened = TensorReader(f, "auto" if device is None else device)
            files.enter_context(opened)
            refuse_unmerged(opened.checkpoint)
            refuse_piece(opened.checkpoint, "transload.load_into(model, {})")
            with gc_paused():
                reshard(model)
                ignore = ignore_mismatched_sizes
                comparison = Comparison(model, opened, prefix, user_rename, cast=cast, ignore_shapes=ignore)
                _refuse(comparison, strict=strict)
                devices = meta_devices(model) if device is None else {}
                targets = _targets(comparison, devices)
                items = [
                    (task.tensor, into, index)
                    for task, target in zip(comparison.tasks, targets, strict=True)
                    for index, into in zip(task.indices, task.targets(target), strict=True)
                ]
                plans = _optimizer_plans(optimizer, comparison, targets)
                items += [item for plan in plans for item in plan.items]
                prepared = opened.prepare(items)
            if ranks:
                ranks.seen = seen(opened, ((tensor, into.numel()) for tensor, into, _ in items))
        if ranks.overlap and direct is None:
            settings = settings._replace(direct=False)
        with ranks:
            ranks.is_writing = True
            loaded = _load(comparison, prepared, targets, settings, devices, strict=strict)
            for plan in plans:
                plan.apply()
                loaded.notes += tuple(plan.notes)
            opened.check_unchanged()
    if ranks.is_first:
        _warn(comparison, loaded)
    return loaded


class _LazyStateDict(UserDict[str, Any]):
    """A state dict that reads a tensor, or builds another value, on each access, and does not keep it.

    With ``lands``, tensors are read onto the devices they go to, since they become the parameters themselves. For a
    DTensor of the model it reads a DTensor: this rank's part.
    """

    def __init__(self, entries: dict[str, Any], comparison: Comparison, devices: dict[int, str]) -> None:
        self.data = entries
        self.lands = False
        self._comparison, self._devices = comparison, devices

    def __getitem__(self, key: str) -> Any:
        value, opened, slot = self.data[key], self._comparison.opened, self._comparison.slots.get(key)
        if isinstance(value, Unbuilt):
            return build_node(value.file, value.node, opened.device_map)
        if not isinstance(value, Tensor):
            return value
        if slot is not None and slot.parts is not None and slot.tensor is not None and slot.shape == value.shape:
            import torch

            device = self._devices.get(id(slot.tensor)) or (opened.device(value.device) if self.lands else None)
            whole = torch.empty_like(slot.tensor, dtype=opened.dtype_of(value), device=device, requires_grad=False)
            targets = [part.of(local_tensor(whole)) for part in slot.parts]
            opened.fill([(value, into, part.box) for part, into in zip(slot.parts, targets, strict=True)])
            return whole
        return opened.read(value, device=opened.device(value.device) if self.lands else "cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.data))  # a hook may remove entries meanwhile

    def load(
        self, module: torch.nn.Module, prefix: str, versions: dict[str, dict[str, Any]], report: tuple[list[str], ...]
    ) -> None:
        """Let a module and its children load their entries, as ``load_state_dict`` does."""
        below = {key: value for key, value in self.data.items() if key.startswith(prefix)}
        state = _LazyStateDict(below, self._comparison, self._devices)
        state.lands = any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        metadata = {**versions.get(prefix[:-1], {}), **({"assign_to_params_buffers": True} if state.lands else {})}
        module._load_from_state_dict(state, prefix, metadata, True, *report)  # noqa: SLF001 - what load_state_dict calls
        for name, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                state.load(child, f"{prefix}{name}.", versions, report)


def _refuse(comparison: Comparison, *, strict: bool) -> None:
    """Raise for every mismatch that is known before a byte is read."""
    modules = modules_of(comparison.model)
    # Custom modules and hooks may still remove keys from the lists.
    later = comparison.custom or any(own_hooks(module._load_state_dict_post_hooks) for _, module in modules)  # noqa: SLF001
    keys_differ = (comparison.missing or comparison.unexpected) and strict and not later
    nothing = not comparison.match.tensors and not comparison.custom and bool(comparison.slots)
    if comparison.shapes or comparison.dtypes or keys_differ or nothing:
        raise MismatchError(comparison, [])
    custom = tuple(comparison.custom)
    if flat := [key for key, slot in comparison.slots.items() if slot.flat is not None and key.startswith(custom)]:
        what = f"FSDP1 has flattened {join_names(flat, SHOWN)}, which custom loading code of the module needs whole"
        raise LoadError(what, where=comparison.opened.checkpoint.path, fix="Load the model before it is wrapped.")


def _targets(comparison: Comparison, devices: dict[int, str]) -> list[torch.Tensor]:
    """The parameter of each task; for one on the meta device a new one, which is not in the model yet.

    ``DoesNotFitError`` if there is too little memory for them: of a sharded model, for what this rank has.
    """
    import torch

    opened = comparison.opened
    places: dict[int, str] = {}
    needed: Counter[str] = Counter()
    targets: list[Any] = [task.slots[0].tensor for task in comparison.tasks]
    for task, target in zip(comparison.tasks, targets, strict=True):
        if target.is_meta:
            name = devices.get(id(target)) or opened.device(task.tensor.device)
            places[id(target)] = name
            needed[name] += local_tensor(target).nbytes
    for name, nbytes in needed.items():
        device = devices_here([name], nbytes).get(name)
        if device is not None and 0 <= device.free < nbytes:
            raise DoesNotFitError(str(Shortage(device.name, nbytes, device.free)), where=opened.checkpoint.path)
    for number, (task, target) in enumerate(zip(comparison.tasks, targets, strict=True)):
        if target.is_meta:
            try:
                new = torch.empty_like(target, device=places[id(target)])
            except RuntimeError as error:  # torch has no OutOfMemoryError for the CPU
                what = f"{places[id(target)]} has no memory for {task.key}: {error}"
                raise DoesNotFitError(what, where=opened.checkpoint.path) from error
            if isinstance(target, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=target.requires_grad)
            vars(new).update(vars(target))
            targets[number] = new
    return targets


def _optimizer_plans(optimizer: Any, comparison: Comparison, targets: list[torch.Tensor]) -> list[OptimizerPlan]:
    """What to read for an optimizer, or for each of several."""
    if optimizer is None:
        return []
    from transload.loading.into.optimizers import OptimizerPlan

    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else optimizer
    made = {id(task.slots[0].tensor): target for task, target in zip(comparison.tasks, targets, strict=True)}
    return [OptimizerPlan(each, comparison, made) for each in optimizers]


def _load(
    comparison: Comparison,
    prepared: list[Prepared],
    targets: list[torch.Tensor],
    settings: Settings,
    devices: dict[int, str],
    *,
    strict: bool,
) -> Loaded:
    """Fill the model, and run its hooks, as ``load_state_dict`` does; ``devices`` are as of ``meta_devices``."""
    match, opened, model = comparison.match, comparison.opened, comparison.model
    missing, unexpected = comparison.missing, comparison.unexpected
    errors: list[str] = []
    extras = dict(_LazyStateDict(dict(comparison.extras), comparison, devices))
    if comparison.custom:
        _load_custom(comparison, devices, errors)
    try:
        opened.fill_prepared(prepared, settings)
    except TransloadError as error:
        error.fix = f"The model may be partly filled. {error.fix}".rstrip()
        raise
    for task, target in zip(comparison.tasks, targets, strict=True):
        for slot in task.slots:
            if slot.tensor is not target:
                slot.table[slot.name] = target
    for key, value in extras.items():
        comparison.slots[key].module.set_extra_state(value)
    loaded = Loaded(missing, unexpected)
    for _, module in reversed(list(modules_of(model))):  # children before their parents
        for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001 - as load_state_dict calls them
            if not gathers(hook):
                hook(module, loaded)
    if errors or (strict and (missing or unexpected)):
        raise MismatchError(comparison, errors, "loaded only in part: ")
    loaded.found = match.branch.name
    loaded.notes = (*match.notes, *lost_shards(comparison.opened.checkpoint))
    if comparison.adapter is not None:
        loaded.matched = f"All keys of the adapter {comparison.adapter.name!r}"
    if comparison.ignored:
        differing = [f"{key} ({file} in the file, {model} in the model)" for key, file, model in comparison.ignored]
        loaded.matched = "All other keys"
        which = join_names(differing, SHOWN, 1000)
        loaded.notes += (f"left {plural(len(differing), 'key')} of another shape as in the model: {which}",)
    return loaded


def _warn(comparison: Comparison, loaded: Loaded) -> None:
    """Warn of what was done to keys, and of tensors that have no values."""
    path = comparison.opened.checkpoint.path
    if loaded.notes:
        warn(f"{path}: {'; '.join(loaded.notes)}", KeysWarning)
    if unfilled := _unfilled(comparison):
        note = f"still on the meta device, since the file has no values for them: {join_names(unfilled, SHOWN)}"
        fix = "Compute them as the model does when it is made: until then it cannot be run."
        warn(f"{path}: {note}. {fix}", LandingWarning)
        loaded.notes += (note,)


def _load_custom(comparison: Comparison, devices: dict[int, str], errors: list[str]) -> None:
    """Let modules with custom loading code load their entries."""
    match, opened = comparison.match, comparison.opened
    entries: dict[str, Any] = {**match.rest, **match.tensors}
    for name in comparison.values:
        place, new = opened.node((*match.branch.path, name)), comparison.user_rename(name)
        if place and new is not None and match.rename(new) not in match.tensors:
            entries[match.rename(new)] = Unbuilt(*place)
    state = _LazyStateDict(entries, comparison, devices)
    for prefix, module in comparison.custom.items():
        state.load(module, prefix, comparison.versions, (comparison.missing, comparison.unexpected, errors))
    # If a module has replaced a parameter on the meta device, put the new one into its other slots, too.
    current = [(slot, slot.table.get(slot.name)) for slot in comparison.slots.values()]
    replaced = {id(slot.tensor): tensor for slot, tensor in current if tensor is not slot.tensor}
    for slot, _ in current:
        other = replaced.get(id(slot.tensor))
        if slot.tensor is not None and slot.tensor.is_meta and other is not None:
            slot.table[slot.name] = other


def _unfilled(comparison: Comparison) -> list[str]:
    """Keys on the meta device that get no values, but are not missing: buffers never saved, and ignored shapes.

    None if all of the model is on the meta device: it is meant to be.
    """
    ignored = {mismatch.key for mismatch in comparison.ignored}
    tensors = {
        prefix + name: tensor
        for prefix, module in modules_of(comparison.model)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001 - as above
        if tensor is not None
    }
    if all(tensor.is_meta for tensor in tensors.values()):
        return []
    return [key for key, t in tensors.items() if t.is_meta and (key not in comparison.slots or key in ignored)]
