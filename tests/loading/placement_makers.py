"""Checkpoints and machines for the placement tests, with only the parts that placement uses."""

from __future__ import annotations

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.devices import Device, Devices

GB = 10**9


def checkpoint(*tagged: tuple[str, int], dtype: str = "float32", format: str = "torch-zip") -> Checkpoint:  # noqa: A002
    """One storage, and one tensor over it, for each ``(tag, bytes)``."""
    storages, tensors = [], []
    for key, (tag, nbytes) in enumerate(tagged):
        name = f"t{key}"
        storages.append(Storage(str(key), str(key), tag, dtype, nbytes, nbytes, 64 * key, tensors=(name,)))
        tensors.append(Tensor((name,), name, dtype, (nbytes // 4,), (1,), tag, str(key)))
    return Checkpoint("model.pt", format, 1000, tensors=tuple(tensors), storages=tuple(storages))


def gpus(*free: int, rank: int | None = None, current: int = 0, cpu: int = 1000 * GB) -> Devices:
    """A machine with a GPU for each number of free bytes."""
    cards = (Device(f"cuda:{index}", nbytes, 80 * GB, "NVIDIA A100") for index, nbytes in enumerate(free))
    return Devices((Device("cpu", cpu, 2000 * GB), *cards), f"cuda:{current}" if free else "", rank)
