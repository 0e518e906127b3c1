"""A model as places to read into: every parameter and buffer under the key ``load_state_dict`` knows it by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["EXTRA", "Slot", "has_post_hooks", "modules", "own_way", "slots"]

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
    for prefix, module in modules(model):
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - as above
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                found[prefix + name] = Slot(module, name, parameter, _shape(parameter))
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and name not in unsaved:
                found[prefix + name] = Slot(module, name, buffer, _shape(buffer))
        if _has_extra(module):
            found[prefix + EXTRA] = Slot(module, EXTRA, None, None)
    return found


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if isinstance(tensor, _torch_parts().lazy) else tuple(tensor.shape)


def _has_extra(module: torch.nn.Module) -> bool:
    return type(module).set_extra_state is not _torch_parts().no_extra


def own_way(module: torch.nn.Module) -> bool:
    """Whether a module loads its state by code of its own: a hook before loading, or a method overridden.

    The norms override it only for the sake of files without ``num_batches_tracked``, which is seen to elsewhere.
    """
    known = _torch_parts().ways
    return type(module)._load_from_state_dict not in known or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001


class _Parts(NamedTuple):
    """What there is in torch to tell modules and parameters by."""

    lazy: type
    no_extra: object
    ways: frozenset[object]


@cache
def _torch_parts() -> _Parts:
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm
    from torch.nn.parameter import UninitializedTensorMixin

    kinds = (torch.nn.Module, _NormBase, _InstanceNorm)
    ways = frozenset(kind._load_from_state_dict for kind in kinds)  # noqa: SLF001 - they are compared, not called
    return _Parts(UninitializedTensorMixin, torch.nn.Module.set_extra_state, ways)


def has_post_hooks(model: torch.nn.Module) -> bool:
    """Whether some module wants to look at the keys afterwards, and may strike some off."""
    return any(module._load_state_dict_post_hooks for _, module in modules(model))  # noqa: SLF001
