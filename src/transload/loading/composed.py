"""Loads a composed checkpoint: its tensors are read in one call, its values built, and both put into one object."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from transload.checkpoint import Checkpoint, Key
from transload.contents import Value, tie_of
from transload.errors import DoesNotFitError
from transload.formats.graph import node_at
from transload.formats.pieces import local_tensors
from transload.loading.build import is_fake_mode
from transload.loading.handles import TensorReader, build_node
from transload.loading.placement import DeviceMap
from transload.loading.storages import ReadOptions, read_storages
from transload.nodes import Call, nested


def load_composed(
    opened: TensorReader, device_map: DeviceMap, options: ReadOptions, trusted: dict[str, Any] | None
) -> Any:
    """The object that a composed checkpoint forms.

    ``trusted`` are arguments of ``load_trusted``, which then builds the values; ``None`` if they are not trusted.
    """
    import torch

    checkpoint = opened.checkpoint
    places = checkpoint.places
    tensors = {tensor.path: tensor for tensor in checkpoint.tensors}
    leaves: dict[tuple[str | int, ...], Any] = {}
    tied: dict[Any, torch.Tensor] = {}
    jobs = []
    # torch.serialization.skip_data: tensors are allocated, but not read.
    skips = bool(getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False))
    values = {value.path: value for value in checkpoint.values}
    inside = pieces_in(checkpoint)
    for path in (
        *(path for path in places if path not in values),
        *(path for each in inside.values() for path in each),
    ):
        tensor = tensors[path]
        device = device_map.device(tensor.device)
        if not tensor.is_dense:
            leaves[path] = opened.read(tensor, (), device)
            continue
        opened.check(tensor)
        tie = tie_of(tensor)
        if tie is not None and tie in tied:
            leaves[path] = tied[tie]
            continue
        try:
            leaf = leaves[path] = torch.empty(tensor.shape, dtype=opened.dtype_of(tensor), device=device)
        except RuntimeError as error:
            what = f"{device} has no memory for its {tensor.nbytes:,} bytes: {error}"
            raise DoesNotFitError(what, where=f"{checkpoint.path} › {tensor.name}") from error
        tied[tie] = leaf
        leaf._backward_hooks = OrderedDict()  # noqa: SLF001 - as torch.load leaves it
        if not (leaf.is_meta or skips or is_fake_mode()):
            jobs.append((tensor, leaf, ()))
    opened.fill(jobs, options.settings, options.report_progress)
    for path, value in values.items():
        made = {id(node): leaves[inner] for inner, node in inside.get(path, {}).items()}
        leaves[path] = _built(opened, value, device_map, options, trusted, made)
    return nested((path, leaves[path]) for path in places)


def pieces_in(checkpoint: Checkpoint) -> dict[tuple[Key, ...], dict[tuple[Key, ...], object]]:
    """The nodes of distributed tensors in the values of a composed checkpoint, by the path of the value, then by path.

    These tensors are read from the files of all ranks.
    """
    values = {value.path: value for value in checkpoint.values}
    members: dict[int, dict[Key, Any]] = {}
    out: dict[tuple[Key, ...], dict[tuple[Key, ...], object]] = {}
    for tensor in checkpoint.tensors if values else ():
        path = tensor.path
        depth = next((length for length in range(len(path) + 1) if path[:length] in values), None)
        if depth is not None:
            node = node_at(values[path[:depth]].node, path[depth:], members)
            if type(node) is Call and (tensor.is_sharded or local_tensors(node) is not None):
                out.setdefault(path[:depth], {})[path] = node
    return out


def _built(
    opened: TensorReader,
    value: Value,
    device_map: DeviceMap,
    options: ReadOptions,
    trusted: dict[str, Any] | None,
    made: dict[int, Any],
) -> Any:
    file = opened.part(value.file)
    if trusted is None or made:  # unpickling would make the pieces of one rank
        return build_node(file, value.node, device_map, options, made)
    from transload.loading.trusted import load_trusted

    node = None if value.node is file.checkpoint.root else value.node
    (storages,) = read_storages([file], device_map, options)
    return load_trusted(file, storages, device_map, node=node, **trusted)
