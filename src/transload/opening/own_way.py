"""Modules that load their state by code of their own: they get it, one tensor at a time, as they ask for it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Tensor
from transload.opening.one import read_one
from transload.opening.slots import modules, own_way
from transload.opening.subtree import build_node

if TYPE_CHECKING:
    import torch

    from transload.loading.files import Piece
    from transload.opening.destinations import Destinations
    from transload.opening.opened import Opened

__all__ = ["Held", "OwnWay", "Report", "State"]


class Held(NamedTuple):
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
        if isinstance(value, Held):
            return build_node(value.piece, value.node, self._goal.arrival)
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
        for prefix, module in modules(model):
            if own_way(module) and not self.covers(prefix):
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
