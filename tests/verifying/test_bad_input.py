"""Any bytes get a result, never an exception, and each flipped bit is attributed to its tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forge
from tests.each import each

from transload.checkpoint import Checkpoint, Tensor
from transload.opening import inspect
from transload.verifying import verify

DATA = Path(__file__).parent.parent / "data"
FILES = (
    "h200/mixed_cpu_cuda.pt",
    "h200/export_cuda0.pt2",
    "h200/state_dict_cuda0_legacy.pth",
    "h200/torchscript_cuda0.pt",
)
CASES = 40 * forge.FUZZ


def damaged_copy(data: bytes, rng: random.Random) -> bytes:
    """Truncated, overwritten, or with a piece copied elsewhere."""
    out, at = bytearray(data), rng.randrange(len(data))
    kind = rng.randrange(3)
    if kind == 0:
        return data[:at]
    if kind == 1:
        for _ in range(10):
            out[rng.randrange(len(out))] = rng.randrange(256)
    else:
        other = rng.randrange(len(data))
        out[at : at + 100] = data[other : other + 100]
    return bytes(out)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_get_a_result(name: str) -> None:
    data, rng = (DATA / name).read_bytes(), random.Random(name)  # noqa: S311 - not for cryptography
    for case in range(CASES):
        result = verify(damaged_copy(data, rng), hashes=case % 2 == 0, values=case % 3 == 0)
        assert str(result)
        assert result.to_dict()["ok"] is result.ok


def tensors_by_storage(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """The names of the tensors that use each storage."""
    out: dict[str, set[str]] = {}
    for tensor in checkpoint.tensors:
        for part in with_parts(tensor):
            out.setdefault(part.storage or "", set()).add(tensor.name)
    return out


def with_parts(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for part in tensor.parts:
        yield from with_parts(part)


@each("path", sorted(DATA.glob("torch-releases/torch-[12].*/zoo_cuda0.pt")), ids=lambda path: path.parent.name)
def test_flipped_bit_is_attributed_to_the_tensors_of_its_storage(path: Path) -> None:
    data, rng = path.read_bytes(), random.Random(7)  # noqa: S311 - not for cryptography
    if data[:2] != b"PK":
        pytest.skip("the format has no checksums")
    checkpoint = inspect(data)
    tensors_of = tensors_by_storage(checkpoint)
    for storage in checkpoint.storages:
        if storage.nbytes and storage.offset is not None:
            out = bytearray(data)
            out[storage.offset + rng.randrange(storage.nbytes)] ^= 1 << rng.randrange(8)
            for hashes in (False, True):
                result = verify(bytes(out), hashes=hashes)
                assert {damage.name for damage in result.damaged} == tensors_of[storage.id]
