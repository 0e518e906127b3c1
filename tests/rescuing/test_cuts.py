"""A file that ends early: exactly the tensors are found whose bytes are all there, and the new file has them."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from tests.forge import FUZZ
from tests.rescuing.makers import ARCHIVES, ROOT, hashes, ident, index_end, there

from transload.errors import TransloadError
from transload.judge import inspect
from transload.rescuing import rescue

PLACES = 6 * FUZZ
DESCRIPTOR = 16
STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()
TRAIN = (ROOT / "h200" / "train_cuda0.ckpt").read_bytes()


def found_at(data: bytes, cut: int) -> list[str]:
    try:
        made = rescue(data[:cut], dry_run=True)
    except TransloadError:
        return []
    return [] if made.how == "nothing" else sorted(fate.name for fate in made.tensors if fate.state != "lost")


def wanted_at(data: bytes, cut: int) -> list[str]:
    checkpoint = inspect(data)
    names = there(data, cut) if cut >= index_end(data) else []
    return names if any(checkpoint.tensor(name).nbytes for name in names) else []


@pytest.mark.parametrize("path", ARCHIVES, ids=ident)
def test_exactly_what_is_there(path: Path) -> None:
    data = path.read_bytes()
    rng = random.Random(path.name)  # noqa: S311 - no secret
    for cut in sorted(rng.randrange(1, len(data)) for _ in range(PLACES)):
        if index_end(data) <= cut < index_end(data) + DESCRIPTOR:
            continue  # whether the index is whole cannot always be told then
        assert found_at(data, cut) == wanted_at(data, cut), cut


def test_a_generated_file() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5000, generator=generator)
    state = {f"w{n}": torch.randn(100 * n, generator=generator) for n in range(40)}
    out = io.BytesIO()
    torch.save(
        {**state, "base": base, "head": base[:50], "tail": base[-50:], "turned": base[:100].view(10, 10).t()}, out
    )
    data = out.getvalue()
    rng = random.Random(3)  # noqa: S311 - no secret
    for cut in sorted(rng.randrange(1, len(data)) for _ in range(20 * FUZZ)):
        assert found_at(data, cut) == wanted_at(data, cut), cut


@pytest.mark.parametrize("fill", [None, "zeros", "nan"])
@pytest.mark.parametrize("data", [STATE, TRAIN], ids=["state dict", "training"])
def test_the_new_file(data: bytes, fill: str | None, tmp_path: Path) -> None:
    for cut in range(index_end(data) + 16, len(data), 997):
        want = wanted_at(data, cut)
        made = rescue(data[:cut], tmp_path / "out.pt", fill=fill, overwrite=True)  # type: ignore[arg-type]
        assert made.exit_code == (0 if len(want) == len(inspect(data).tensors) else 1 if want else 2), cut
        if not want:
            continue
        out = (tmp_path / "out.pt").read_bytes()
        assert inspect(out, verify=True).integrity == "whole"
        kept = hashes(out)
        assert {name: kept[name] for name in want} == {name: hashes(data)[name] for name in want}
        assert sorted(kept) == (sorted(hashes(data)) if fill else want)


@pytest.mark.parametrize("fill", ["zeros", "nan"])
def test_what_is_filled(fill: str, tmp_path: Path) -> None:
    weight = torch.arange(100, dtype=torch.float32)
    out = io.BytesIO()
    torch.save({"w": weight, "n": torch.arange(4), "z": torch.ones(3, dtype=torch.bfloat16)}, out)
    data = out.getvalue()
    storage = inspect(data).storages[0]
    made = rescue(data[: (storage.offset or 0) + 42], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert made.exit_code == 2, "not one tensor is whole"
    head = rescue(data[: (inspect(data).storages[1].offset or 0) + 9], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert head.exit_code == 1
    loaded = torch.load(tmp_path / "o.pt")
    assert torch.equal(loaded["w"], weight)
    assert loaded["n"].tolist() == [0, 0, 0, 0]
    assert loaded["z"].isnan().all() if fill == "nan" else loaded["z"].eq(0).all()


def test_torch_loads_what_is_left(tmp_path: Path) -> None:
    cut = inspect(TRAIN).tensor("optimizer/state/3/exp_avg").file_offset or 0
    made = rescue(TRAIN[:cut], tmp_path / "out.pt")
    whole = torch.load(ROOT / "h200" / "train_cuda0.ckpt", map_location="cpu", weights_only=False)
    loaded = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=False)
    assert made.lost
    assert loaded["epoch"] == whole["epoch"]
    assert sorted(loaded["model"]) == sorted(whole["model"])
    assert "exp_avg" not in loaded["optimizer"]["state"][3]
    assert loaded["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]


def test_the_weights_of_half_a_program(tmp_path: Path) -> None:
    path = ROOT / "h200" / "torchscript_cuda0.pt"
    data = path.read_bytes()
    made = rescue(data[: index_end(data) + 100], tmp_path / "out.pt")
    assert (made.how, made.exit_code) == ("weights", 1)
    loaded = torch.load(tmp_path / "out.pt")
    whole = torch.jit.load(str(path), map_location="cpu").state_dict()
    assert sorted(loaded) == sorted(whole)
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_lost_members_of_lists_are_none(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save([torch.ones(2), (torch.ones(3), 7), {"k": [torch.ones(4)]}], out)
    data = out.getvalue()
    cut = inspect(data).storages[1].offset
    rescue(data[:cut], tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded[0].tolist() == [1, 1]
    assert loaded[1:] == [(None, 7), {"k": [None]}]


def test_an_index_that_is_damaged_beyond_a_bit(tmp_path: Path) -> None:
    """Its names may be wrong: that is said, and it is not called complete."""
    place = TRAIN.index(b"conv.weight")
    made = rescue(TRAIN[:place] + b"CONW" + TRAIN[place + 4 :], tmp_path / "out.pt")
    assert made.exit_code == 1
    assert made.warnings


def test_what_lies_in_a_record_is_not_taken_for_the_file() -> None:
    """An exported program keeps its sample inputs as an archive of their own."""
    data = (ROOT / "h200" / "export_cuda0.pt2").read_bytes()
    record = next(record for record in inspect(data).records if record.name == "data/sample_inputs/model.pt")
    for cut in range(record.size - 300, record.size, 25):
        assert found_at(data, (record.offset or 0) + cut) == []
