"""Any bytes get an answer, never a foreign exception, and each flipped bit is attributed to its tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forge
from tests.each import each

from transload.checkpoint import Checkpoint, Tensor
from transload.judge import inspect
from transload.verifying import verify

DATA = Path(__file__).parent.parent / "data"
FILES = (
    "h200/mixed_cpu_cuda.pt",
    "h200/export_cuda0.pt2",
    "h200/state_dict_cuda0_legacy.pth",
    "h200/torchscript_cuda0.pt",
)
CASES = 40 * forge.FUZZ


def changed(data: bytes, dice: random.Random) -> bytes:
    """Cut, written over, or with a piece of itself somewhere else."""
    out, at = bytearray(data), dice.randrange(len(data))
    kind = dice.randrange(3)
    if kind == 0:
        return data[:at]
    if kind == 1:
        for _ in range(10):
            out[dice.randrange(len(out))] = dice.randrange(256)
    else:
        other = dice.randrange(len(data))
        out[at : at + 100] = data[other : other + 100]
    return bytes(out)


@pytest.mark.parametrize("name", FILES)
def test_changed_files(name: str) -> None:
    data, dice = (DATA / name).read_bytes(), random.Random(name)  # noqa: S311 - a test
    for case in range(CASES):
        found = verify(changed(data, dice), hashes=case % 2 == 0, values=case % 3 == 0)
        assert str(found)
        assert found.to_dict()["ok"] is found.ok


def owners(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """The tensors that look at each storage."""
    out: dict[str, set[str]] = {}
    for tensor in checkpoint.tensors:
        for part in flat(tensor):
            out.setdefault(part.storage or "", set()).add(tensor.name)
    return out


def flat(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for part in tensor.parts:
        yield from flat(part)


@each("path", sorted(DATA.glob("torch-releases/torch-[12].*/zoo_cuda0.pt")), ids=lambda path: path.parent.name)
def test_a_flipped_bit_of_any_storage(path: Path) -> None:
    data, dice = path.read_bytes(), random.Random(7)  # noqa: S311 - a test
    if data[:2] != b"PK":
        pytest.skip("the format has no checksums")
    whole = inspect(data)
    named = owners(whole)
    for storage in whole.storages:
        if storage.nbytes and storage.offset is not None:
            out = bytearray(data)
            out[storage.offset + dice.randrange(storage.nbytes)] ^= 1 << dice.randrange(8)
            for hashes in (False, True):
                found = verify(bytes(out), hashes=hashes)
                assert {damage.name for damage in found.damaged} == named[storage.id]
