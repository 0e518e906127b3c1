"""The fixtures of ``tests/data/rank-files``, and distributed tensors that a test describes byte by byte."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import forge

FOLDER = Path(__file__).parent / "data" / "rank-files"
CASES = sorted(path for path in FOLDER.glob("torch-*/*") if path.is_dir())
"""Folders of rank files."""

_MESH, _TENSOR = "torch.distributed.device_mesh", "torch.distributed.tensor"


def whole(case: Path) -> Any:
    """What rank 0 gathered."""
    import torch

    return torch.load(case.parent / f"{case.name}-whole.pt", weights_only=True)


def named(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of an object, with their names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named(child, f"{name}/{key}" if name else str(key))


def state(module: str, name: str, fields: Mapping[str, object]) -> bytes:
    """An object of a class, with attributes."""
    return forge.name(module, name) + b")\x81" + forge.dictionary(fields) + b"b"


def placement(name: str, **fields: object) -> bytes:
    """A placement of a DTensor."""
    return state(f"{_TENSOR}.placement_types", name, fields)


def mesh(sizes: object = (2,), coordinate: object = (0,), **fields: object) -> bytes:
    """A mesh as torch up to 2.9 writes it."""
    ranks = forge.tensor("1", sizes, (1,) * len(sizes) if isinstance(sizes, tuple) else (), numel=0)
    return state(_MESH, "DeviceMesh", {"mesh": ranks, "_coordinate_on_dim": coordinate, **fields})


def dtensor(local: bytes, shape: tuple[int, ...], placements: object, on: object, **fields: object) -> bytes:
    """A DTensor of float32."""
    kind = forge.name(_TENSOR, "DTensor")
    spec = state(f"{_TENSOR}._dtensor_spec", "DTensorSpec", {"mesh": on, "placements": placements, **fields})
    layout = forge.call(forge.name("torch.serialization", "_get_layout"), "torch.strided")
    device = forge.call(forge.name("torch", "device"), "cpu")
    inner = forge.tuple_of(kind, forge.name("torch", "float32"), shape, (1,) * len(shape), 0, layout, device, False)
    attributes = forge.tuple_of(None, forge.dictionary({"_local_tensor": local, "_spec": spec}))
    function = forge.name("torch._utils", "_rebuild_wrapper_subclass")
    return forge.call(forge.name("torch._tensor", "_rebuild_from_type_v2"), function, kind, inner, attributes)


def rank_file(
    rank: int,
    world: int = 2,
    *,
    rows: int = 4,
    more: Mapping[str, object] = MappingProxyType({}),
    storages: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """The file of a rank with its share of a tensor ``w`` of float32, of shape ``[rows, 2]``: numbers of rows."""
    step = -(-rows // world)
    first, last = min(rows, rank * step), min(rows, (rank + 1) * step)
    values = array("f", [float(row) for row in range(first, last) for _ in range(2)])
    local = forge.tensor("0", (last - first, 2), (2, 1), numel=len(values))
    whole = dtensor(local, (rows, 2), (placement("Shard", dim=0),), mesh((world,), (rank,), _rank=rank))
    body = forge.dictionary({"w": whole, **more})
    return forge.checkpoint(forge.pickled(body), {"0": values.tobytes(), "1": b"", **storages})


def write_ranks(folder: Path, world: int = 2, name: str = "model_rank_{}.pt", **options: Any) -> None:
    """A folder with the files of all ranks."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        (folder / name.format(rank)).write_bytes(rank_file(rank, world, **options))
