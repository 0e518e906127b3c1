"""How a file fits a model: what goes where, what does not fit, and what to say about it.

Nothing is read but names, shapes and dtypes, and the model is not changed. So advice is tried out before it is given:
``_renaming`` makes the ``Comparison`` that the advice would lead to.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Tensor
from transload.errors import TransloadError, UsageError
from transload.findings import join_names, quoted
from transload.frozen import NamedTuple
from transload.loading.handles import Index, TensorReader, build_node
from transload.loading.into.keys import MARKERS, Renamed, Shape, find, likely_renames
from transload.loading.into.shards import WRAPPERS, Part, dtensor_classes, flat_parts, local_tensor, own_hooks, parts_of
from transload.nodes import Call, Dict
from transload.opening import CheckpointFile
from transload.opening.renaming import KeyFunction, Renaming
from transload.render.words import plural

if TYPE_CHECKING:
    import torch

    from transload.loading.into.adapters import AdapterKeys

_EXTRA = "_extra_state"
SHOWN = 8
_MOST = 12
_FEW = 6

# -- the model


class Slot(NamedTuple):
    """A parameter, a buffer, or (without a tensor) the place of a module's extra state."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor | None
    shape: Shape
    """``None`` if any fits: for extra state, and for uninitialized parameters of lazy modules."""
    parts: tuple[Part, ...] | None = None
    """What this rank has of it, if it is sharded; ``tensor`` is then a DTensor, or this rank's elements."""
    flat: tuple[torch.Tensor, int] | None = None
    """As of ``FlatPart``, if it is in a flat parameter of FSDP1."""

    @property
    def table(self) -> dict[str, Any]:
        """The dictionary of its module that contains it."""
        parameters: dict[str, Any] = self.module._parameters  # noqa: SLF001 - getattr and setattr may be the user's
        return parameters if self.name in parameters else self.module._buffers  # noqa: SLF001 - the same

    def takes_scalar(self, tensor: Tensor) -> bool:
        """Whether a one-element tensor fills a scalar, as in ``load_state_dict``: torch 0.3 had no 0-dim tensors."""
        return tensor.shape == (1,) and self.shape == ()


def modules_of(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module with the prefix of its keys, parents first; a shared module under each of its names."""
    yield prefix, model
    for name, child in model._modules.items():  # noqa: SLF001 - as load_state_dict goes through them
        if child is not None:
            yield from modules_of(child, prefix if name in WRAPPERS else f"{prefix}{name}.")


def _slots_of(model: torch.nn.Module) -> dict[str, Slot]:
    """The slots of a model by key, in the order of its ``state_dict()``."""
    import torch
    from torch.nn.parameter import UninitializedTensorMixin

    slots: dict[str, Slot] = {}
    classes, flattened = dtensor_classes(), flat_parts(model)
    for prefix, module in modules_of(model):
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - as above
        buffers = [pair for pair in module._buffers.items() if pair[0] not in unsaved]  # noqa: SLF001
        flat = flattened.get(id(module), {})
        slots |= {prefix + name: Slot(module, name, *part) for name, part in flat.items()}
        for name, tensor in (*module._parameters.items(), *buffers):  # noqa: SLF001
            if tensor is not None and name not in flat and not (flattened and name == "_flat_param"):
                shape = None if isinstance(tensor, UninitializedTensorMixin) else tuple(tensor.shape)
                parts = parts_of(tensor, prefix + name) if isinstance(tensor, classes) else None
                slots[prefix + name] = Slot(module, name, tensor, shape, parts)
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            slots[prefix + _EXTRA] = Slot(module, _EXTRA, None, None)
    return slots


def _custom_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules with custom loading code, by prefix: a ``_load_from_state_dict``, or pre-hooks.

    The norms override theirs only for files without ``num_batches_tracked``, which a ``Comparison`` handles.
    """
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm

    custom: dict[str, torch.nn.Module] = {}
    kinds = (torch.nn.Module, _NormBase, _InstanceNorm)
    methods = {kind._load_from_state_dict for kind in kinds}  # noqa: SLF001 - they are compared, not called
    for prefix, module in modules_of(model):
        hooks = own_hooks(module._load_state_dict_pre_hooks)  # noqa: SLF001
        is_custom = type(module)._load_from_state_dict not in methods or bool(hooks)  # noqa: SLF001
        if is_custom and not prefix.startswith(tuple(custom)):
            custom[prefix] = module
    return custom


# -- the comparison


class KeyMismatch(NamedTuple):
    """A key whose shape or dtype differs between the file and the model."""

    key: str
    file: str
    model: str


class Unbuilt(NamedTuple):
    """A value that is built when it is needed: its file, and its node there."""

    file: CheckpointFile
    node: object


class Task(NamedTuple):
    """A tensor of the file, the part of it to read, and all slots of the one parameter it goes to."""

    key: str
    tensor: Tensor
    part: tuple[int, ...]
    slots: list[Slot]

    @property
    def indices(self) -> list[Index]:
        """What to read: of a sharded parameter, what this rank has."""
        parts = self.slots[0].parts
        return [self.part] if parts is None or self.part else [part.box for part in parts]

    def targets(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Where to read each of them to, in the parameter or the one in its place."""
        parts = self.slots[0].parts
        if parts is None:
            return [target]
        local = local_tensor(target)
        return [local] if self.part else [part.of(local) for part in parts]


class Comparison:
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
        self.model, self.opened, self.prefix = model, opened, prefix
        self.is_renamed = user_rename is not None
        self.user_rename: KeyFunction = user_rename or str
        self.slots = _slots_of(model)
        self.custom = _custom_modules(model)
        self.adapter: AdapterKeys | None = None
        """The adapter of the model that the file is for: then the weights of the base model are not expected."""
        if any("lora_" in key for key in self.slots):
            from transload.loading.into.adapters import adapter_keys

            self.adapter = adapter_keys(model, self.slots, opened.checkpoint.tensors)
        if self.adapter is not None:
            user_rename = self.user_rename = _chained(self.user_rename, self.adapter)
        shapes = {key: slot.shape for key, slot in self.slots.items()}
        self.match = find(opened.checkpoint, shapes, prefix, user_rename)
        names = Counter(map(self.user_rename, self.match.branch.tensors))
        if twice := [name for name, count in names.items() if name is not None and count > 1]:
            what = f"rename gives several keys of the file the same name: {join_names(twice, SHOWN)}"
            raise UsageError(what, where=opened.checkpoint.path, fix="Return None for all but one of them.")
        # Custom modules compare their own keys when they load them.
        custom = tuple(self.custom)
        slots = {key: slot for key, slot in self.slots.items() if not key.startswith(custom)}
        self.extras = self._extra_state(slots)
        self.shapes: list[KeyMismatch] = []
        self.ignored: list[KeyMismatch] = []
        """Keys of another shape that keep their values."""
        self.dtypes: list[KeyMismatch] = []
        for key, tensor in self.match.tensors.items():
            slot = slots.get(key)
            if slot is None or slot.tensor is None or slot.shape is None:
                continue
            if tensor.shape != slot.shape and not slot.takes_scalar(tensor):
                differing = self.ignored if ignore_shapes else self.shapes
                differing.append(KeyMismatch(key, str(list(tensor.shape)), str(list(slot.shape))))
                if ignore_shapes:
                    continue
            dtype = str(slot.tensor.dtype).removeprefix("torch.")
            if tensor.dtype != dtype and not cast:
                self.dtypes.append(KeyMismatch(key, tensor.dtype, dtype))
        tasks = self._tasks()
        self.tasks = sorted((task for task in tasks.values() if not task.key.startswith(custom)), key=self._place)
        self.missing = [
            key
            for key, slot in slots.items()
            if not (key in self.match.tensors or key in self.extras or id(slot.tensor) in tasks)
            and not self._is_newer(key, slot)
            and (self.adapter is None or self.adapter.has(key))
        ]
        self.unexpected = [key for key in self._leftovers() if not key.startswith(custom)]

    def _extra_state(self, slots: dict[str, Slot]) -> dict[str, Tensor | Unbuilt]:
        """What the file has for the extra state of modules."""
        extras: dict[str, Tensor | Unbuilt] = {}
        for key in (key for key, slot in slots.items() if slot.tensor is None):
            place = self.opened.node((*self.match.branch.path, self._entry(key)))
            if place is not None or key in self.match.tensors:
                extras[key] = self.match.tensors[key] if place is None else Unbuilt(*place)
        return extras

    def _tasks(self) -> dict[int, Task]:
        """One task per parameter, by its id; of two tensors for one parameter the last counts, as in torch."""
        tasks: dict[int, Task] = {}
        slots: defaultdict[int, list[Slot]] = defaultdict(list)
        ignored = {mismatch.key for mismatch in self.ignored}
        for key, slot in self.slots.items():
            if slot.tensor is not None:
                slots[id(slot.tensor)].append(slot)
                if key in self.match.tensors and key not in ignored:
                    tensor = self.match.tensors[key]
                    part = (0,) if slot.takes_scalar(tensor) else ()
                    tasks[id(slot.tensor)] = Task(key, tensor, part, slots[id(slot.tensor)])
        return tasks

    def _place(self, task: Task) -> tuple[str, int, int]:
        """Where a tensor is: tasks are in file order."""
        storage = self.opened.elements.storage(task.tensor)
        return storage.file if storage else "", task.tensor.file_offset or 0, task.tensor.offset

    def _is_newer(self, key: str, slot: Slot) -> bool:
        """Whether a file may lack a key, because the norms have it only since their version 2."""
        from torch.nn.modules.batchnorm import _NormBase

        if slot.name != "num_batches_tracked" or not isinstance(slot.module, _NormBase):
            return False
        version = self.versions.get(key.rpartition(".")[0], {}).get("version")
        return type(version) is not int or version < 2

    def _leftovers(self) -> list[str]:
        """As in torch, tensors that are left over (nested ones as the entry they are in) and other values."""
        match, deep = self.match, self.match.branch.deep
        entries = {self.user_rename(key): str(first) for key, first in deep.items()}
        extras = {self._entry(key) for key in self.extras}
        tensors = [key for key in dict.fromkeys(entries.get(k, k) for k in match.rest) if key not in extras]
        compared = {*match.branch.tensors, *map(str, deep.values()), *extras}
        values = [self.user_rename(key) for key in self.values if key not in compared]
        return tensors + [match.rename(key) for key in values if key is not None and not match.rename.leaves_out(key)]

    @cached_property
    def values(self) -> list[str]:
        """The file's keys of entries that are not tensors: an epoch, extra state."""
        checkpoint, branch = self.opened.checkpoint, self.match.branch
        path = branch.path
        modules = not all(MARKERS.isdisjoint(tensor.path[len(path) :]) for tensor in branch.tensors.values())
        if modules or checkpoint.traits.program:
            return []  # attributes of an object are not entries
        below = (leaf.path[len(path)] for leaf in checkpoint.leaves if leaf.path[: len(path)] == path != leaf.path)
        return [str(step) for step in dict.fromkeys((*below, *branch.deep.values()))]

    def _entry(self, key: str) -> str:
        """The file's key for a value of the model; empty if the caller's rename gives none."""
        name = self.match.rename.undone(key)
        return next((value for value in (*self.values, name) if self.user_rename(value) == name), "")

    @cached_property
    def versions(self) -> dict[str, dict[str, Any]]:
        """The ``_metadata`` of each module, such as its version, by the model's names of the modules."""
        place = self.opened.node(self.match.branch.path)
        node = place[1] if place else None
        state = node.states[-1] if type(node) is Call and node.states else None
        metadata: Any = None
        if place and type(state) is Dict:
            with suppress(TransloadError):
                metadata = build_node(place[0], state.get("_metadata"))
        metadata = metadata if isinstance(metadata, dict) else {}
        if self.is_renamed:  # the caller renames keys, not modules
            pairs = [(new.rpartition(".")[0], old.rpartition(".")[0]) for new, old in self.match.origins.items()]
        else:
            pairs = [(self.match.rename(f"{name}.")[:-1] if name else "", name) for name in map(str, metadata)]
        return {new: metadata[old] for new, old in pairs if isinstance(metadata.get(old), dict)}


def _chained(first: KeyFunction, second: KeyFunction) -> KeyFunction:
    def renamed(key: str) -> str | None:
        new = first(key)
        return None if new is None else second(new)

    return renamed


# -- what to say about it


def lost_shards(checkpoint: Checkpoint) -> list[str]:
    """A line about shards that are missing, if there are any."""
    lost = [problem.where for problem in checkpoint.problems if problem.code == "shard-missing"]
    return [f"shards are missing: {join_names(lost, SHOWN)}"] if lost else []


def described(comparison: Comparison, errors: Sequence[str]) -> tuple[str, str]:
    """What does not fit, in a few lines, and which arguments would help; ``errors`` are those of custom modules."""
    match, place, slots = comparison.match, comparison.match.branch.name, comparison.slots
    checkpoint, shapes, dtypes = comparison.opened.checkpoint, comparison.shapes, comparison.dtypes
    missing = {key: slots[key].shape if key in slots else None for key in comparison.missing}
    unexpected = {key: match.rest[key].shape if key in match.rest else None for key in comparison.unexpected}
    from transload.formats.adapters import adapter_in
    from transload.loading.into.adapters import adapters_of
    from transload.loading.into.adapters import described as described_adapter

    adapter = None if adapters_of(slots) else adapter_in(checkpoint.tensors)
    if adapter is not None:
        command = f"$ transload convert BASE --lora {quoted(checkpoint.path)} MERGED.safetensors"
        fix = "Load the weights of the base model first; then peft adds it: PeftModel.from_pretrained(model, FOLDER)"
        fix += f"\nOr merge the two into a file of whole weights:\n{command}"
        return described_adapter(adapter, checkpoint.facts), fix
    fits = f"it has {len(match.tensors):,} of the model's {len(slots):,} keys"
    lines = [f"it does not fit {type(comparison.model).__name__}: {fits}", *lost_shards(checkpoint)]
    renames = likely_renames(missing, unexpected)
    covered = {key for _, _, pairs in renames for pair in pairs for key in pair}
    if renames:
        lines.append("probably the same under other names:")
        lines += [f"  {a}* in the file ↔ {b}* in the model: {plural(len(pairs), 'key')}" for a, b, pairs in renames]
    lines += _group("missing in the file", [key for key in missing if key not in covered])
    root = match.rest.get("")  # if the file is a tensor, not a dictionary
    nameless = f"a tensor without a name, {root.dtype} {list(root.shape)}" if root else ""
    lines += _group("only in the file", [key or nameless for key in unexpected if key not in covered])
    if shapes:
        rows = [KeyMismatch("key", "file", "model"), *shapes[:_MOST]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(f"of another shape, {plural(len(shapes), 'key')}:")
        for row in rows:
            lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        if len(shapes) > _MOST:
            lines.append(f"  and {len(shapes) - _MOST:,} more")
    pairs = Counter((mismatch.file, mismatch.model) for mismatch in dtypes)
    for (file, model), count in pairs.most_common(_FEW):
        lines.append(f"of another dtype, {plural(count, 'key')}: {file} in the file, {model} in the model")
    if pairs:
        lines.append("cast=True converts them while they are read.")
    whole = next((theirs for theirs, ours, _ in renames if not ours), "")
    fix = ""
    if shapes and checkpoint.flavour == "DeepSpeed model states" and not checkpoint.traits.several:
        fix = "It is one of the files of a checkpoint, whose ranks may each have a part: name their folder."
    elif whole:
        prefix = f"{place}/{whole}" if place else whole
        fix = f"prefix={prefix!r} takes that part of the file."
    elif call := _renaming(comparison, renames):
        fix = call
    elif shapes and not dtypes and (match.tensors or comparison.custom):
        fix = "ignore_mismatched_sizes=True leaves them as they are in the model."
    elif match.tensors and not (shapes or dtypes or errors):
        fix = "strict=False loads what fits."
    return "\n".join([*lines, *errors]), fix


def _group(title: str, keys: Sequence[str]) -> list[str]:
    """Keys grouped by prefix, the largest groups first (``encoder.layers.* (96)``); a single key in full."""
    if len(keys) <= _FEW:
        return [f"{title}: {', '.join(keys)}"] if keys else []
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[key.partition(".")[0]].append(key)
    ordered = sorted(groups.values(), key=len, reverse=True)
    words = []
    for group in ordered[:_MOST]:
        columns = zip(*(key.split(".") for key in group), strict=False)
        common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]
        words.append(group[0] if len(group) == 1 else f"{'.'.join(common)}.* ({len(group):,})")
    more = sum(map(len, ordered[_MOST:]))
    return [f"{title}, {plural(len(keys), 'key')}: {', '.join(words)}" + (f" and {more:,} more" if more else "")]


def _renaming(before: Comparison, renames: Sequence[Renamed]) -> str:
    """The arguments that load keys under other names, found by trying them; empty if they would not help."""
    match = before.match
    table = {match.rename.undone(theirs): ours for theirs, ours, _ in renames}
    if not table or before.is_renamed:
        return ""
    for new, old in match.origins.items():  # keys that fit already keep their names
        theirs = next((prefix for prefix in table if old.startswith(prefix) and len(prefix) < len(old)), None)
        if theirs is not None and table[theirs] != match.rename(theirs):
            group = old[: old.find(".", len(theirs)) + 1] or old
            table[group] = new if group == old else match.rename(group)
    try:
        after = Comparison(before.model, before.opened, before.prefix, Renaming(table))
    except UsageError:  # several keys would get the same name, or several places fit
        return ""
    count = len(after.match.tensors)
    if count <= len(match.tensors):
        return ""
    words = [f"rename={json.dumps(table, ensure_ascii=False)}"]
    words += ["strict=False"] if after.missing or after.unexpected else []
    words += ["ignore_mismatched_sizes=True"] if after.shapes else []
    words += ["cast=True"] if after.dtypes else []
    return f"{', '.join(words)} loads {count - len(after.shapes):,} of {plural(len(before.slots), 'key')}."
