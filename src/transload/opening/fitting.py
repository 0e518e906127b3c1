"""A match between a file and a model, compared to the last shape and dtype before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.nodes import Call, Dict
from transload.opening.mismatch import Difference
from transload.opening.paths import plain
from transload.opening.slots import Slot

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Checkpoint, Tensor
    from transload.loading.files import Piece
    from transload.opening.keys import Match
    from transload.opening.opened import Opened

__all__ = ["Fit", "Task", "fit", "values", "versions"]

_MARKERS = frozenset({"_parameters", "_buffers", "_modules"})
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
    out = Fit()
    out.extras = _extras(match, slots, opened)
    _compare(out, match, slots, cast=cast)
    out.tasks = _tasks(match, slots, opened)
    filled = {id(slot.tensor) for task in out.tasks for slot in task.places}
    found = match.tensors.keys() | out.extras.keys()
    about = versions(match, opened)
    out.missing = [
        key
        for key, slot in slots.items()
        if key not in found and id(slot.tensor) not in filled and not _is_excused(key, slot, about)
    ]
    out.unexpected = _unexpected(match, opened.checkpoint, {match.rename.undone(key) for key in out.extras})
    return out


def _unexpected(match: Match, checkpoint: Checkpoint, known: set[str]) -> list[str]:
    """Keys that have no place in the model: tensors, and what is none."""
    held = {*match.branch.tensors, *map(str, match.branch.deep.values()), *known}
    others = (key for key in values(match, checkpoint) if key not in held and not match.rename.leaves_out(key))
    return [key for key in match.unexpected if key not in known] + [match.rename(key) for key in others]


def _extras(match: Match, slots: dict[str, Slot], opened: Opened) -> dict[str, Tensor | tuple[Piece, object]]:
    """Extra state by key: a tensor, or the file it is in and its node there."""
    out: dict[str, Tensor | tuple[Piece, object]] = {}
    for key in (key for key, slot in slots.items() if slot.tensor is None):
        held = opened.node((*match.branch.path, match.rename.undone(key))) or match.tensors.get(key)
        if held is not None:
            out[key] = held
    return out


def _compare(out: Fit, match: Match, slots: dict[str, Slot], *, cast: bool) -> None:
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
    tasks.sort(key=lambda task: _place(task.tensor, opened))
    return tasks


def _place(tensor: Tensor, opened: Opened) -> tuple[str, int, int]:
    storage = opened.storage(tensor.storage)
    return storage.file if storage else "", tensor.file_offset or 0, tensor.offset


def values(match: Match, checkpoint: Checkpoint) -> list[str]:
    """Entries of the state dict that are no tensors, as the file calls them: an epoch, extra state."""
    path = match.branch.path
    apart = _MARKERS.isdisjoint
    modules = not all(apart(tensor.path[len(path) :]) for tensor in match.branch.tensors.values())
    if modules or checkpoint.format in _PROGRAMS:
        return []  # attributes of an object are no entries
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


def _is_excused(key: str, slot: Slot, about: dict[str, dict[str, Any]]) -> bool:
    """Whether a key may be missing: files before version 2 of the norms have no ``num_batches_tracked``."""
    from torch.nn.modules.batchnorm import _NormBase

    if slot.name != "num_batches_tracked" or not isinstance(slot.module, _NormBase):
        return False
    version = about.get(key.rpartition(".")[0], {}).get("version")
    return type(version) is not int or version < 2
