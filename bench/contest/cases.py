"""The checkpoints that contenders load: what each contains, how it is written, and how a result is checked.

Bytes come from one random block whose length is a prime number of words; each tensor starts at another place in it. So
a file is generated as fast as it can be written, no two places that a reader could mix up have the same content, and a
result is compared byte by byte with what was written, on its own device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1_000_003 * 8
STEP = 7919 * 8  # distance in the block between the starts of consecutive tensors
BATCH = 256 << 20  # bytes compared at once
FEW = 64  # a case whose tensors have at most so many elements is scaled by their number
ROW = 2048
NAMES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}  # name of a dtype in safetensors, and its size


class Spec(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * NAMES[self.dtype][1]


@dataclass(frozen=True)
class Case:
    """Tensors of one size, or a training checkpoint: that many layers, each a square weight of that size and a bias."""

    name: str
    tensors: int
    elements: int
    dtype: str = "bfloat16"
    training: bool = False

    def scaled(self, scale: float) -> Case:
        """The same kind of checkpoint with another size."""
        if self.elements <= FEW:
            return replace(self, tensors=max(1, round(self.tensors * scale)))
        return replace(self, elements=max(FEW, round(self.elements * scale)))

    def __str__(self) -> str:
        specs = layout(self)
        size = sum(spec.nbytes for spec in specs)
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
        kind = "a training checkpoint, " if self.training else ""
        return f"{self.name}: {kind}{amount} in {len(specs):,} tensor{'s' if len(specs) > 1 else ''}"


def layout(case: Case) -> list[Spec]:
    """Every tensor of a case, named by its path in the checkpoint."""
    if not case.training:
        return [Spec(f"layers.{i}.weight", _shape(case.elements), case.dtype) for i in range(case.tensors)]
    return list(_training(case))


def _shape(elements: int) -> tuple[int, ...]:
    """Two dimensions, like a weight, if there are enough elements."""
    return (elements // ROW, ROW) if elements >= 8 * ROW else (elements,)


def _training(case: Case) -> Iterator[Spec]:
    """A model and the state of Adam for each of its parameters."""
    width = math.isqrt(case.elements)
    shapes = [(f"layers.{i}.{kind}", (width, width)[: 2 - n]) for i in range(case.tensors) for n, kind in _KINDS]
    for name, shape in shapes:
        yield Spec(f"model.{name}", shape, case.dtype)
    for i, (_, shape) in enumerate(shapes):
        yield Spec(f"optimizer.state.{i}.step", (), "float32")
        yield Spec(f"optimizer.state.{i}.exp_avg", shape, case.dtype)
        yield Spec(f"optimizer.state.{i}.exp_avg_sq", shape, case.dtype)


_KINDS = ((0, "weight"), (1, "bias"))


def size(case: Case) -> int:
    """Total bytes of all tensors."""
    return sum(spec.nbytes for spec in layout(case))


def write(case: Case, folder: Path, suffixes: list[str]) -> None:
    """Write the files of a case and flush them to the disk, so that no writes are pending during measurements."""
    import torch

    pool = block("cpu")
    for suffix in suffixes:
        with (folder / f"{case.name}{suffix}").open("wb") as file:
            if suffix == ".pt":
                torch.save(_tree(case, pool), file)
            else:
                _write_safetensors(case, pool, file)
            file.flush()
            os.fsync(file.fileno())


def _write_safetensors(case: Case, pool: Any, file: BinaryIO) -> None:
    header, at = {}, 0
    for spec in layout(case):
        span = [at, at := at + spec.nbytes]
        header[spec.name] = {"dtype": NAMES[spec.dtype][0], "shape": spec.shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for index, spec in enumerate(layout(case)):
        file.writelines(memoryview(piece.numpy()) for piece in _content(pool, index, 0, spec.nbytes))


def _tree(case: Case, pool: Any) -> dict[str, Any]:
    """The checkpoint to pass to ``torch.save``."""
    import torch

    tensors = {
        spec.name: torch.cat([*_content(pool, index, 0, spec.nbytes)])
        .view(getattr(torch, spec.dtype))
        .reshape(spec.shape)
        for index, spec in enumerate(layout(case))
    }
    if not case.training:
        return tensors
    model = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
    parts = ("step", "exp_avg", "exp_avg_sq")
    state = {i: {part: tensors[f"optimizer.state.{i}.{part}"] for part in parts} for i in range(len(model))}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "params": list(state)}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3}


def block(device: str) -> Any:
    """The random bytes from which all content is taken."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=generator).to(device)


def _content(pool: Any, index: int, start: int, stop: int) -> Iterator[Any]:
    """Bytes ``start`` to ``stop`` of a tensor, as pieces of the block."""
    at = (index * STEP + start) % BLOCK
    while start < stop:
        take = min(stop - start, BLOCK - at)
        yield pool[at : at + take]
        start, at = start + take, 0


def check(case: Case, loaded: Any, device: str) -> None:
    """Raise AssertionError unless a result has the tensors of a case, byte for byte, on the device."""
    import torch

    tensors, specs = dict(_flat(loaded, "")), layout(case)
    assert tensors.keys() == {spec.name for spec in specs}, "the names differ from those written"
    pool, pending = block(device), 0
    loaded_parts: list[Any] = []
    expected_parts: list[Any] = []
    for index, spec in enumerate(specs):
        tensor = tensors[spec.name]
        actual = (tuple(tensor.shape), str(tensor.dtype), tensor.device.type)
        assert actual == (spec.shape, f"torch.{spec.dtype}", device), f"{spec.name} is {actual}"
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, spec.nbytes, BATCH):
            stop = min(start + BATCH, spec.nbytes)
            loaded_parts.append(raw[start:stop])
            expected_parts.extend(_content(pool, index, start, stop))
            pending += stop - start
            if pending >= BATCH or (stop == spec.nbytes and index == len(specs) - 1):
                assert torch.equal(torch.cat(loaded_parts), torch.cat(expected_parts)), (
                    f"the bytes differ from those written, near {spec.name}"
                )
                loaded_parts, expected_parts, pending = [], [], 0


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor in nested dictionaries, with its path."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
