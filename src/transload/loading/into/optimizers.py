"""The state of optimizers in a file, and where it goes: the tensors of a parameter's state are sharded as it is.

A file has it as ``optimizer.state_dict()`` returns it, with a number for each parameter, or as
``torch.distributed.checkpoint.state_dict`` does, with its name; nested, or flattened to ``state.NAME.exp_avg``. The
optimizer gets what it would get from ``load_state_dict``, which also need not have made its state before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Key, Tensor
from transload.errors import DoesNotFitError, LoadError, UsageError
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.loading.handles import Index, TensorReader, build_node
from transload.loading.into.compare import SHOWN, Comparison, Slot
from transload.loading.into.shards import dtensor_classes, local_tensor, parts_of

if TYPE_CHECKING:
    import torch

Path = tuple[Key, ...]
_GROUPS = "param_groups"
_FLAGS = {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "initial_lr", "maximize"}
"""Settings that releases of torch have added to its optimizers, and the one that every scheduler adds."""


class StatePlace(NamedTuple):
    """Where a file has the state of an optimizer. Parameters are called by their names or numbers, as text."""

    path: Path
    states: dict[str, dict[str, Tensor | Path]]
    """By parameter, and by name of the state: a tensor, or the path of another value."""
    groups: dict[str, dict[str, Tensor | Path]]
    """The settings by number of the group; or by parameter, if they are flattened."""
    is_flattened: bool


class OptimizerPlan:
    """What to read for an optimizer; nothing in it changes before ``apply``.

    ``targets`` are the parameters that will be in the model, by the ids of those that are there now.
    """

    def __init__(self, optimizer: Any, comparison: Comparison, targets: dict[int, torch.Tensor]) -> None:
        self.items: list[tuple[Tensor, torch.Tensor, Index]] = []
        self.notes: list[str] = []
        self._optimizer, self._targets = optimizer, targets
        self._opened = comparison.opened
        self._state: dict[int, dict[str, Any]] = {}
        named = _parameter_slots(comparison)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strangers := sum(id(parameter) not in named for parameter in parameters):
            what = f"{strangers:,} of the {len(parameters):,} parameters of the optimizer are not in the model"
            raise UsageError(what, fix="Make the optimizer of the parameters of this model.")
        groups = [[named[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        keys = [[key for slots in group for key, _ in slots] for group in groups]
        if any(len(slots) > 1 for group in groups for slots in group):  # of FSDP1: numbers are the model's
            order = {key: place for place, key in enumerate(comparison.slots)}
            keys = [sorted(group, key=order.__getitem__) for group in keys]
        self._place, names = self._found(comparison, keys)
        states = self._place.states
        ignored = {mismatch.key for mismatch in comparison.ignored}
        self._refuse_another_order(comparison.slots, names, ignored)
        missing: list[str] = []
        for number, (parameter, slots) in enumerate(zip(parameters, chain(*groups), strict=True)):
            entries = [(slot, {} if key in ignored else states.get(names[key], {})) for key, slot in slots]
            # As in torch, only what the file has remains; but a parameter that keeps its value keeps its state.
            kept = all(key in ignored for key, _ in slots)
            self._state[number] = dict(optimizer.state.get(parameter, {})) if kept else {}
            for name in dict.fromkeys(name for _, entry in entries for name in entry):
                self._state[number][name] = self._value(parameter, name, entries)
            if parameter.requires_grad:
                missing += [key for (key, _), (_, entry) in zip(slots, entries, strict=True) if not entry]
        self._settings = [self._group_settings([names[key] for key in group], at) for at, group in enumerate(keys)]
        if states and not self._place.groups:
            self.notes.append("the file has no settings for the optimizer, which keeps its own")
        self._note_another_kind(getattr(optimizer, "defaults", {}))
        unused = states.keys() - set(names.values())
        if missing and len(missing) < len(names):
            self.notes.append(f"no optimizer state for {join_names(missing, SHOWN)}")
        if unused:
            self.notes.append(
                f"optimizer state of parameters that the optimizer does not have: {join_names(sorted(unused), SHOWN)}"
            )

    def apply(self) -> None:
        """Give the optimizer what was read, through its ``load_state_dict``."""
        numbers = iter(range(len(self._state)))
        groups = []
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group["params"] = [self._targets.get(id(parameter), parameter) for parameter in group["params"]]
            current = {name: value for name, value in group.items() if name != "params"}
            groups.append({**current, **settings, "params": [next(numbers) for _ in group["params"]]})
        state = {number: state for number, state in self._state.items() if state}
        self._optimizer.load_state_dict({"state": state, _GROUPS: groups})

    # -- finding it

    def _found(self, comparison: Comparison, groups: list[list[str]]) -> tuple[StatePlace, dict[str, str]]:
        """The place that fits best, and what it calls the parameters, by the model's keys."""
        checkpoint, slots = self._opened.checkpoint, comparison.slots
        found: list[tuple[int, StatePlace, dict[str, str]]] = []
        for place in _places(self._opened):
            names = self._names(place, comparison, groups)
            fitting = [key for key, name in names.items() if _fits(slots[key], place.states.get(name, {}))]
            if fitting or not place.states:
                found.append((len(fitting), place, names))
        most = max((count for count, _, _ in found), default=-1)
        best = [(place, names) for count, place, names in found if count == most]
        if not best:
            what = "it has no state of an optimizer for these parameters"
            fix = "Save it with the model: {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}."
            for place in _places(self._opened):
                saved = [len(self._built(group.get("params")) or ()) for group in place.groups.values()]
                if place.states and saved and saved != [*map(len, groups)]:
                    here, there = (" and ".join(map(str, sizes)) for sizes in (map(len, groups), saved))
                    what = f"the optimizer in it has groups of {there} parameters, this one of {here}"
                    fix = "Make the optimizer with the groups of parameters that the saved one had."
            raise LoadError(what, where=checkpoint.path, fix=fix)
        if len(best) > 1:
            places = join_names(["/".join(map(str, place.path)) or "the root" for place, _ in best], SHOWN)
            raise LoadError(f"several places have the state of such an optimizer: {places}", where=checkpoint.path)
        return best[0]

    def _names(self, place: StatePlace, comparison: Comparison, groups: list[list[str]]) -> dict[str, str]:
        """What a place calls each parameter: as the model does, or the model's state dict in the file, or by number."""
        keys = [key for group in groups for key in group]
        if not all(name.isdecimal() for name in place.states) or (not place.states and place.is_flattened):
            origins, states = comparison.match.origins, place.states
            return {key: key if key in states else origins.get(key, key) for key in keys}
        listed = [self._built(group.get("params")) or [] for group in place.groups.values()]
        if not listed:
            return {key: str(number) for number, key in enumerate(keys)}
        if [*map(len, listed)] != [*map(len, groups)]:
            return dict.fromkeys(keys, "")
        return dict(zip(keys, (str(number) for group in listed for number in group), strict=True))

    def _group_settings(self, names: list[str], at: int) -> dict[str, Any]:
        """The settings of the group of these parameters."""
        place = self._place
        chosen = place.groups.get(str(at), {})
        if place.is_flattened:
            chosen = next((place.groups[name] for name in names if name in place.groups), {})
        elif not all(name.isdecimal() for name in names):
            members = [(group, self._built(group.get("params")) or ()) for group in place.groups.values()]
            fitting = [group for group, params in members if not set(names).isdisjoint(params)]
            if len(fitting) > 1:
                self.notes.append(
                    f"the parameters of group {at} are in several groups of the file: it has the first's settings"
                )
            chosen = (fitting or [chosen])[0]
        return {name: self._built(value) for name, value in chosen.items() if name != "params"}

    def _refuse_another_order(self, slots: Mapping[str, Slot], names: dict[str, str], ignored: set[str]) -> None:
        """Raise if numbers lead to the states of other parameters: some have the shape of theirs, others not."""
        states = self._place.states
        entries = {key: states.get(name, {}) for key, name in names.items() if key not in ignored}
        usual = {name for key, entry in entries.items() for name in entry if _is_like(slots[key], entry[name])}
        for key, entry in entries.items():
            large = {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.numel > 1}
            if large.keys() <= usual and not _fits(slots[key], entry) and entry:
                name, value = next(iter(large.items()))
                shapes = f"{[*value.shape]}, not {[*(slots[key].shape or ())]}"
                what = f"{name} of the optimizer for {key} has the shape {shapes}"
                fix = "Make the optimizer of the parameters in the order in which the saved one had them."
                raise LoadError(what, where=self._opened.checkpoint.path, fix=fix)

    def _note_another_kind(self, defaults: dict[str, Any]) -> None:
        """Note if the file and the optimizer each have settings that the other lacks: torch would mix them."""
        saved = set().union(*self._settings)
        absent = defaults.keys() - saved - _FLAGS
        surplus = saved - defaults.keys() - _FLAGS
        if absent and surplus:
            theirs, ours = (join_names(sorted(names), SHOWN) for names in (surplus, absent))
            self.notes.append(f"the optimizer in the file may be of another kind: it has {theirs}, this one has {ours}")

    def _built(self, value: Tensor | Path | None) -> Any:
        """A value of the file that is not sharded."""
        if isinstance(value, Tensor):
            return self._opened.read(value)
        node = None if value is None else self._opened.node(value)
        return None if node is None else build_node(*node)

    # -- what to read

    def _value(self, parameter: torch.Tensor, name: str, entries: list[tuple[Slot, dict[str, Tensor | Path]]]) -> Any:
        """One state of a parameter; its tensors are listed to be read.

        A flat parameter of FSDP1 has several slots, each with a range of its elements.
        """
        import torch

        first = next(entry[name] for _, entry in entries if name in entry)
        if not isinstance(first, Tensor):
            return self._built(first)
        now = self._optimizer.state.get(parameter, {}).get(name)
        target = self._targets.get(id(parameter), parameter)
        try:
            if name != "step" and any(_is_like(slot, entry.get(name)) for slot, entry in entries):
                dtype = target.dtype if target.is_floating_point() else self._opened.dtype_of(first)
                is_made = isinstance(now, torch.Tensor) and now.shape == target.shape
                value = now if is_made else torch.zeros_like(target, dtype=dtype).detach()
                local = local_tensor(value)
                for slot, entry in entries:
                    tensor = entry.get(name)
                    if not isinstance(tensor, Tensor) or tensor.shape != slot.shape:
                        continue
                    if slot.parts is None:
                        self.items.append((tensor, local, ()))
                        continue
                    is_flat = slot.flat is not None and slot.flat[0] is parameter
                    own = local[slot.flat[1] :] if is_flat and slot.flat is not None else local
                    self.items += [(tensor, part.of(own), part.box) for part in slot.parts]
                return value
            if isinstance(now, dtensor_classes()) and tuple(now.shape) == first.shape:
                self.items += [(first, part.of(local_tensor(now)), part.box) for part in parts_of(now, name)]
                return now
            if entries[0][0].parts is not None and first.numel > 1:
                what = f"{name} of the optimizer, {list(first.shape)}, is for a sharded parameter of another shape"
                fix = "Take a step with the optimizer before: then its state says how it is sharded."
                raise LoadError(what, where=self._opened.checkpoint.path, fix=fix)
            device = "cpu" if first.numel == 1 else target.device
            value = torch.empty(first.shape, dtype=self._opened.dtype_of(first), device=device)
        except RuntimeError as error:
            if isinstance(error, LoadError):
                raise
            what = f"there is no memory for {name} of the optimizer: {error}"
            raise DoesNotFitError(what, where=self._opened.checkpoint.path) from error
        self.items.append((first, value, ()))
        return value


def _parameter_slots(comparison: Comparison) -> dict[int, list[tuple[str, Slot]]]:
    """The model's keys and slots of each parameter, by its id; a flat one of FSDP1 has several."""
    named: dict[int, list[tuple[str, Slot]]] = {}
    for key, slot in comparison.slots.items():
        own = slot.module._parameters.get(slot.name)  # noqa: SLF001 - with FSDP1, slot.tensor is another
        if own is not None:
            named.setdefault(id(own), [(key, slot)])
        elif slot.flat is not None:
            several = named.setdefault(id(slot.flat[0]), [])
            if all(slot.tensor is not other.tensor for _, other in several):  # a shared one is there once
                several.append((key, slot))
    return named


def _is_like(slot: Slot, tensor: Tensor | Path | None) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == slot.shape


def _fits(slot: Slot, entry: dict[str, Tensor | Path]) -> bool:
    """Whether the state is one of a parameter of this shape; some optimizers have only numbers for it."""
    return bool(entry) and (
        any(_is_like(slot, value) for value in entry.values())
        or not any(isinstance(value, Tensor) and value.numel > 1 for value in entry.values())
    )


def _places(opened: TensorReader) -> Iterator[StatePlace]:
    """Every place of a checkpoint that has the state of an optimizer."""
    found: dict[tuple[Path, bool], StatePlace] = {}

    def place(path: Path, *, flat: bool) -> StatePlace:
        return found.setdefault((path, flat), StatePlace(path, {}, {}, flat))

    checkpoint = opened.checkpoint
    pairs: list[tuple[Path, Tensor | Path]] = [(tensor.path, tensor) for tensor in checkpoint.tensors]
    pairs += [(leaf.path, leaf.path) for leaf in checkpoint.leaves]
    for path, value in pairs:
        if len(path) >= 3 and path[-3] == "state":
            states = place(path[:-3], flat=False).states
            states.setdefault(str(path[-2]), {})[str(path[-1])] = value
        for at, step in enumerate(path):
            if step == _GROUPS and len(path) > at + 2:
                group = place(path[:at], flat=False).groups.setdefault(str(path[at + 1]), {})
                group[str(path[at + 2])] = value if len(path) == at + 3 else path[: at + 3]
                break
            if isinstance(step, str) and step.startswith(("state.", f"{_GROUPS}.")) and step.count(".") > 1:
                kind, _, rest = step.partition(".")
                key, _, name = rest.rpartition(".")
                here = place(path[:at], flat=True)
                table = here.states if kind == "state" else here.groups
                table.setdefault(key, {})[name] = value if len(path) == at + 1 else path[: at + 1]
                break
    yield from found.values()
