"""Ordinary files, whose tensors are only counted during a load, not listed: nothing else about them may differ."""

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


def test_common_checkpoints_are_counted_without_a_tree() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for value in (STATE, model.state_dict(), {"state_dict": model.state_dict(), "epoch": 3, "lr": [0.1, 0.2]}):
        assert read_source(BytesSource(saved(value)), tree=False).counted


def test_storages_and_facts_are_the_same_without_a_tree() -> None:
    for_each(FILES, check_same_facts)


def check_same_facts(path: Path) -> None:
    light, full = read_source(FileSource(path), tree=False), read_source(FileSource(path))
    if not light.counted:
        assert light.to_dict() == full.to_dict()
        return
    assert [storage._replace(tensors=()) for storage in full.storages] == list(light.storages)
    assert not full.problems
    assert (light.format, light.facts, light.records) == (full.format, full.facts, full.records)


def test_placement_is_the_same_without_a_tree() -> None:
    for_each(FILES, check_same_placement)


def check_same_placement(path: Path) -> None:
    light, full = read_source(FileSource(path), tree=False), read_source(FileSource(path))
    for devices in (Devices((Device("cpu"),)), Devices((Device("cpu"), Device("mps", 1 << 40, 1 << 40)), "mps")):
        plans = [place(parsed, devices) for parsed in (light, full)]
        assert [(move.tag, move.device, move.nbytes, move.reason) for move in plans[0].moves] == [
            (move.tag, move.device, move.nbytes, move.reason) for move in plans[1].moves
        ]


def test_landing_warning_counts_the_tensors() -> None:
    path = DATA / "h200" / "state_dict_cuda0.pt"
    with pytest.warns(LandingWarning) as caught, warnings.catch_warnings():
        load(path)
    count = len(read_source(FileSource(path)).tensors)
    assert f"{count} tensors saved on cuda:0 land on cpu" in str(caught[0].message)


@pytest.mark.parametrize(
    "extra",
    [{"n": torch.float16}, {"s": torch.Size([1])}, {"o": torch.ones(2).to_sparse()}, {"z": {1, 2}}],
    ids=["dtype", "size", "sparse", "set"],
)
def test_values_other_than_plain_tensors_need_the_tree(extra: dict[str, object]) -> None:
    light = read_source(BytesSource(saved({**STATE, **extra})), tree=False)
    assert not light.counted
    assert light.tensors


def test_invalid_tensor_of_a_counted_file_is_reported_by_name() -> None:
    pickle = pickled(ordered({"w0": tensor("0"), "w1": tensor("1", shape=(64,))}))
    assert read_source(BytesSource(checkpoint(pickle)), tree=False).counted
    with pytest.raises(BrokenFileError, match="w1"):
        load(checkpoint(pickle))


@pytest.mark.parametrize("storage_class", [b"]", b"}", b"K\x01", b"N"], ids=["list", "dictionary", "number", "none"])
def test_storage_without_a_class_is_not_counted_and_is_a_broken_file_error(storage_class: bytes) -> None:
    storage = b"(" + text("storage") + storage_class + text("0") + text("cpu") + number(4) + b"tQ"
    data = checkpoint(pickled(ordered({"w0": tensor("0", storage=storage)})))
    assert not read_source(BytesSource(data), tree=False).counted
    with pytest.raises(BrokenFileError):
        load(data)


# Modules that read and describe unusual files. Importing them takes a third of the time of a first load.
MODULES_FOR_RARE_FILES = (
    *("formats.origin_record", "formats.rare_opcodes", "formats.record_pattern", "formats.tensor_pattern"),
    *(
        "judge.names",
        "judge.problems",
        "judge.safety",
        "loading.accelerators",
        "opening.engine",
        "loading.rebuild_tensors",
        "loading.refusal",
    ),
)


def test_ordinary_file_imports_no_modules_for_rare_files(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save({"model": model.state_dict(), "epoch": 3, "seed": 1 << 40, "lr": [0.1, None]}, path := tmp_path / "a.pt")
    for call in ("load(sys.argv[1], map_location='cpu')", "inspect(sys.argv[1])"):
        program = f"import sys, transload; transload.{call}; print(*sys.modules)"
        process = forks.run("-c", program, path, env={**os.environ, "PYTHONPATH": str(forks.SOURCE)})
        modules = process.stdout.split()
        assert "transload.formats.torch_zip" in modules, process.stderr
        assert [name for name in MODULES_FOR_RARE_FILES if f"transload.{name}" in modules] == []
