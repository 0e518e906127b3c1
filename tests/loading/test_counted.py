"""Ordinary files, whose tensors a load counts and does not list: nothing else about them may differ."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from tests import forks
from tests.each import for_each
from tests.forge import checkpoint, number, ordered, pickled, tensor, text
from tests.loading.zoo import saved

from transload.devices import Device, Devices
from transload.errors import BrokenFileError, LandingWarning
from transload.formats import read_source
from transload.io.sources import BytesSource, FileSource
from transload.loading import load
from transload.loading.placement import place

DATA = Path(__file__).parents[1] / "data"
FILES = sorted(path for path in DATA.rglob("*") if path.suffix in (".pt", ".pth", ".ckpt", ".bin"))
STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.float64)}


def test_most_of_what_is_saved_is_ordinary() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for each in (STATE, model.state_dict(), {"state_dict": model.state_dict(), "epoch": 3, "lr": [0.1, 0.2]}):
        assert read_source(BytesSource(saved(each)), tree=False).counted


def test_the_rest_of_a_checkpoint_is_the_same() -> None:
    for_each(FILES, is_the_same)


def is_the_same(path: Path) -> None:
    light, full = read_source(FileSource(path), tree=False), read_source(FileSource(path))
    if not light.counted:
        assert light.to_dict() == full.to_dict()
        return
    assert [storage._replace(tensors=()) for storage in full.storages] == list(light.storages)
    assert not full.problems
    assert (light.format, light.facts, light.records) == (full.format, full.facts, full.records)


def test_it_is_placed_alike() -> None:
    for_each(FILES, is_placed_alike)


def is_placed_alike(path: Path) -> None:
    light, full = read_source(FileSource(path), tree=False), read_source(FileSource(path))
    for devices in (Devices((Device("cpu"),)), Devices((Device("cpu"), Device("mps", 1 << 40, 1 << 40)), "mps")):
        plans = [place(each, devices) for each in (light, full)]
        assert [(move.tag, move.device, move.nbytes, move.reason) for move in plans[0].moves] == [
            (move.tag, move.device, move.nbytes, move.reason) for move in plans[1].moves
        ]


def test_tensors_are_counted_in_the_warning() -> None:
    path = DATA / "h200" / "state_dict_cuda0.pt"
    with pytest.warns(LandingWarning) as told, warnings.catch_warnings():
        load(path)
    count = len(read_source(FileSource(path)).tensors)
    assert f"{count} tensors saved on cuda:0 land on cpu" in str(told[0].message)


@pytest.mark.parametrize(
    "odd",
    [{"n": torch.float16}, {"s": torch.Size([1])}, {"o": torch.ones(2).to_sparse()}, {"z": {1, 2}}],
    ids=["dtype", "size", "sparse", "set"],
)
def test_other_names_than_those_of_plain_tensors_get_the_tree(odd: dict[str, object]) -> None:
    light = read_source(BytesSource(saved({**STATE, **odd})), tree=False)
    assert not light.counted
    assert light.tensors


def test_a_tensor_that_is_wrong_is_named() -> None:
    pickle = pickled(ordered({"w0": tensor("0"), "w1": tensor("1", shape=(64,))}))
    assert read_source(BytesSource(checkpoint(pickle)), tree=False).counted
    with pytest.raises(BrokenFileError, match="w1"):
        load(checkpoint(pickle))


@pytest.mark.parametrize("kind", [b"]", b"}", b"K\x01", b"N"], ids=["list", "dictionary", "number", "none"])
def test_a_storage_of_no_class_is_for_the_long_way(kind: bytes) -> None:
    held = b"(" + text("storage") + kind + text("0") + text("cpu") + number(4) + b"tQ"
    data = checkpoint(pickled(ordered({"w0": tensor("0", storage=held)})))
    assert not read_source(BytesSource(data), tree=False).counted
    with pytest.raises(BrokenFileError):
        load(data)


# What there is to say of odd files, and what reads them; it takes a third of the time of a first load to import.
FOR_OTHERS = (
    *("formats.origin_record", "formats.rare_opcodes", "formats.tensor_pattern", "judge.names", "judge.problems"),
    *("judge.safety", "loading.accelerators", "loading.engine", "loading.rebuild", "loading.refusal"),
)


def test_nothing_is_imported_for_other_files(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save({"model": model.state_dict(), "epoch": 3, "seed": 1 << 40, "lr": [0.1, None]}, path := tmp_path / "a.pt")
    for look in ("load(sys.argv[1], map_location='cpu')", "inspect(sys.argv[1])"):
        program = f"import sys, transload; transload.{look}; print(*sys.modules)"
        done = forks.run("-c", program, path, env={**os.environ, "PYTHONPATH": str(forks.SOURCE)})
        found = done.stdout.split()
        assert "transload.formats.torch_zip" in found, done.stderr
        assert [name for name in FOR_OTHERS if f"transload.{name}" in found] == []
