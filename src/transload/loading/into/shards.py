"""Models whose parameters are spread over ranks: which boxes of a parameter this rank has, and where they are.

A DTensor (of FSDP2, of tensor parallelism) says how it is split over a device mesh. FSDP1 puts the parameters of a
module into a flat one, of which each rank has a range.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from transload.errors import LoadError
from transload.frozen import NamedTuple
from transload.geometry import Box, Split, boxes_of_run, hull, shards

if TYPE_CHECKING:
    import torch

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes of torch's wrappers that have the module; ``state_dict()`` leaves them out of its keys."""
_WRAPPING = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.distributed.algorithms._checkpoint.")
"""Modules whose hooks undo, for ``load_state_dict``, what the wrappers do."""


class Part(NamedTuple):
    """A box of a parameter, and the box of this rank's tensor that has its elements."""

    box: Box
    into: Box

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The elements in this rank's tensor, in the shape of the box."""
        return local if local.shape == self.box.shape else local[self.into.slices].view(self.box.shape)


class FlatPart(NamedTuple):
    """A parameter in the flat one of FSDP1: this rank's elements, the shape of all, and where these belong in it."""

    elements: torch.Tensor
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    flat: tuple[torch.Tensor, int]
    """The flat parameter, and where in this rank's part of it the elements begin."""


# -- DTensors


def dtensor_classes() -> tuple[Any, ...]:
    """The class of DTensors, if it was imported: else there are none."""
    names = ("torch.distributed.tensor", "torch.distributed._tensor")  # before torch 2.5
    kinds = {getattr(sys.modules.get(name), "DTensor", None) for name in names}
    return tuple(kind for kind in kinds if kind is not None)


def local_tensor(tensor: Any) -> torch.Tensor:
    """The tensor in this rank's memory: of a DTensor, its shard; else the tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # to_local() would take ten times as long
    return local


def parts_of(tensor: Any, key: str) -> tuple[Part, ...]:
    """What this rank has of a DTensor, if anything: one box, or several. ``LoadError`` if it is not clear."""
    mesh, local = tensor.device_mesh, tuple(local_tensor(tensor).shape)
    coordinate, splits = mesh.get_coordinate(), []
    if coordinate is None:  # another rank's
        return ()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            fix = "Redistribute it to Replicate() or Shard() before."
            raise LoadError(f"{key} is a sum over ranks ({placement}), which cannot be loaded", fix=fix)
        if (split := getattr(placement, "dim", None)) is not None:
            factor = getattr(placement, "split_factor", 1)
            splits.append(Split(split % tensor.ndim, mesh.size(dim), coordinate[dim], factor))
    try:
        boxes = shards(tuple(tensor.shape), splits)
        share = hull(inner for _, inner in boxes)
    except LookupError:
        share = (-1,)
    if 0 in local and 0 in share:
        return ()
    if share != local:
        words = f"{list(local)} of {list(tensor.shape)}, which {tensor.placements} does not explain"
        raise LoadError(f"the shard of {key} is {words}")
    return tuple(Part(*pair) for pair in boxes)


def meta_devices(model: torch.nn.Module) -> dict[int, str]:
    """Where the tensors of a sharded model that are on the meta device belong, by their ids."""
    classes = dtensor_classes()
    tensors = [*model.parameters(), *model.buffers()] if classes else []
    kinds = [str(each.device_mesh.device_type) for each in tensors if isinstance(each, classes)]
    if not kinds or not any(each.is_meta for each in tensors):
        return {}
    devices = {id(each): kinds[0] for each in tensors if each.is_meta}
    for module in model.modules():  # FSDP2 may keep parameters on the CPU
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # noqa: SLF001 - no public way
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        every = [each for group in groups for each in getattr(group, "fsdp_params", ())]
        devices |= {id(each.sharded_param): "cpu" for each in every if each.offload_to_cpu}
    return devices


# -- FSDP1, and the hooks of wrappers


def _is_wrapping(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(_WRAPPING)


def own_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """The hooks of a module that are not those of torch's wrappers."""
    return [hook for hook in hooks.values() if not _is_wrapping(hook)]


def gathers(hook: Any) -> bool:
    """Whether it is the hook of FSDP1 that ends what another began before loading: gathering the parameters."""
    return _is_wrapping(hook) and getattr(hook, "__name__", "") == "_post_load_state_dict_hook"


def _wrapped_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module, if FSDP was imported; else none has anything to do with it."""
    yield from model.modules() if "torch.distributed.fsdp" in sys.modules else ()


def _handles(model: torch.nn.Module) -> Iterator[Any]:
    """The flat parameters of FSDP1."""
    for module in _wrapped_modules(model):
        handle = vars(module).get("_handle")
        if handle is not None and hasattr(handle, "flat_param"):
            yield handle


def reshard(model: torch.nn.Module) -> None:
    """Give up parameters that were gathered from all ranks; no values change.

    ``LoadError`` if they are in use.
    """
    for module in _wrapped_modules(model):
        for hook in module._load_state_dict_pre_hooks.values():  # noqa: SLF001 - as load_state_dict calls them
            if _is_wrapping(hook) and hook.hook.__name__ == "to_sharded_hook":  # of FSDP2; it takes anything
                hook({}, "", {}, True, [], [], [])
    for handle in _handles(model):
        if handle._training_state.name != "IDLE":  # noqa: SLF001 - FSDP1 has no public way to ask
            what = "the parameters are gathered from all ranks, by summon_full_params or in a forward pass"
            raise LoadError(what, fix="Load after that.")
        # After a forward pass, FSDP1 may keep all of a flat parameter for the next.
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            handle.reshard(free_unsharded_flat_param=True)
            handle.post_reshard()
            handle._prefetched = False  # noqa: SLF001 - as FSDP1 does


def flat_parts(model: torch.nn.Module) -> dict[int, dict[str, FlatPart]]:
    """The parameters that FSDP1 has put into flat ones, by the id of their module, and by name."""
    modules: dict[int, dict[str, FlatPart]] = {}
    for handle in _handles(model):
        flat = handle.flat_param
        memory = getattr(flat, "_local_shard", flat).detach()
        contiguous = getattr(flat, "_contiguities", None) or (True,) * len(flat._param_infos)  # noqa: SLF001
        rows = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, contiguous, strict=True)  # noqa: SLF001
        for (name, module, place), size, shard, plain in rows:
            shape, start, count, first = tuple(size), shard.offset_in_shard, shard.numel_in_shard, 0
            if shard.in_shard and not plain:
                what = f"{place}.{name} was not contiguous when FSDP flattened it, so its elements are in another order"
                raise LoadError(what, fix="Make it contiguous before it is wrapped.")
            parts: list[Part] = []
            begin, end = shard.intra_param_start_idx or 0, (shard.intra_param_end_idx or 0) + 1
            for box in boxes_of_run(shape, begin, end) if shard.in_shard else ():
                numel = prod(box.shape)
                parts.append(Part(box, Box((first,), (numel,))))
                first += numel
            elements = memory[start : start + count] if shard.in_shard else memory[:0]
            modules.setdefault(id(module), {})[name] = FlatPart(elements, shape, tuple(parts), (flat, start or 0))
        for name, module, _, owner_name, owner, _ in flat._shared_param_infos:  # noqa: SLF001
            modules.setdefault(id(module), {})[name] = modules[id(owner)][owner_name]
    return modules
