"""The predicted outcome of torch.load compared with the real one, on a machine without a GPU."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from tests.each import each
from tests.judge.conftest import FILES, Alone
from tests.makers import saved
from tests.release import RELEASE, needs_torch

import transload

# Predictions have been compared with torch from this release on.
pytestmark = needs_torch(2, 11)


def file_id(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@each("path", FILES, ids=file_id)
def test_prediction_matches_torch(path: Path, alone: Alone) -> None:
    prediction = transload.inspect(path).prediction.removeprefix("torch.load ")
    plain, on_cpu = alone.outcomes[str(path)]
    if prediction.startswith("loads it anywhere"):
        assert (plain, on_cpu) == ("loads", "loads")
    elif prediction.startswith("needs cuda:"):
        assert (plain, on_cpu) == ("needs", "loads")
    elif prediction.startswith("refuses it"):
        assert plain in ("refuses", "needs")  # whichever comes first in the file
        assert on_cpu == "refuses"
        assert ("needs cuda:" in prediction) == ("cuda" in path.name)
    else:
        assert prediction.startswith("fails")
        assert plain not in ("loads", "needs")
        assert on_cpu != "loads"


def test_fixtures_cover_every_outcome(alone: Alone) -> None:
    plain = [first for first, _ in alone.outcomes.values()]
    for outcome in ("loads", "needs", "refuses"):
        assert plain.count(outcome) > 3, outcome


def test_prediction_says_that_torch_2_15_refuses_nested_tensors() -> None:
    data = saved(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert "from 2.15 on" in transload.inspect(data).prediction
    assert transload.inspect(saved(torch.ones(2))).prediction == "torch.load loads it anywhere"


def test_prediction_says_that_older_torch_fails_on_new_jagged_tensors() -> None:
    values, offsets = torch.ones(6, 3), torch.tensor([0, 2, 6])
    plain = torch.nested.nested_tensor_from_jagged(values, offsets)
    bounded = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=4)
    for bound in bounded._metadata_cache.values():
        vars(bound).pop("_dynamo_dynamic_range", None)  # as torch 2.15 saves it
    for value, fails in ((plain, False), (bounded, True)):
        file = io.BytesIO()
        torch.save(value, file)
        prediction = transload.inspect(file.getvalue()).prediction
        assert prediction.startswith(
            "torch.load fails up to torch 2.14" if fails else "torch.load loads it up to torch 2.14"
        )
        file.seek(0)
        if RELEASE < (2, 15) and fails:
            with pytest.raises(AttributeError, match="_dynamo_dynamic_range"):
                torch.load(file)
        elif RELEASE < (2, 15):
            torch.load(file)


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "truncated header": lambda data: data[:60],
    "trailing bytes": lambda data: data + b"junk",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_prediction_says_that_a_damaged_safetensors_file_fails(damage: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"a": torch.ones(300)}, path)
    assert "load_file" in transload.inspect(path).prediction
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(Exception, match="deserializing header"):
        safetensors.load_file(path)
    assert transload.inspect(path).prediction.startswith("torch.load fails, and so does safetensors")
