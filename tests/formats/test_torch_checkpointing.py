"""Folders of ``torch_checkpointing``: read as its own reader does, or said why not."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from tests.each import each
from tests.makers import codes
from tests.rank_files import named, whole, write_ranks
from tests.release import needs_torch

import transload
from transload import inspect
from transload.errors import BrokenFileError, RetagError
from transload.formats.sets import torch_checkpointing

torch = pytest.importorskip("torch")

DATA = Path(__file__).parent.parent / "data" / "torch-checkpointing"
CASES = ("2/pt", "2/safetensors", "4/pt", "4/safetensors")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    for ranks in ("2", "4"):
        with ZipFile(DATA / f"0.1.1-ranks-{ranks}.zip") as archive:
            archive.extractall(folder / ranks)
    return folder


def changed(case: Path, folder: Path, change: Callable[[Any], Any] = lambda index: index) -> Path:
    """A copy with another index."""
    shutil.copytree(case, folder / "copy")
    index = pickle.loads((case / "metadata.pkl").read_bytes())
    change(index)
    (folder / "copy" / "metadata.pkl").write_bytes(pickle.dumps(index))
    return folder / "copy"


def detail(folder: Path, code: str) -> str:
    return "; ".join(problem.detail for problem in inspect(folder).problems if problem.code == code)


@each("name", CASES)
def test_a_folder_loads_as_with_the_reader_of_the_package(cases: Path, name: str, tmp_path: Path) -> None:
    """Only its tensors are compared: in a list, that reader keeps the values of its target."""
    case = cases / name
    expected, loaded = dict(named(whole(case))), transload.load(case)
    assert {name: tensor.dtype for name, tensor in named(loaded)} == {
        name: each.dtype for name, each in expected.items()
    }
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named(loaded))
    checkpoint = inspect(case)
    assert (checkpoint.format, checkpoint.flavour) == ("rank-files", "torch_checkpointing")
    assert (checkpoint.integrity, codes(checkpoint)) == ("unchecked", [])
    assert transload.verify(case).ok
    with transload.open(case) as handle:
        assert torch.equal(handle.slice("model/rows")[3:5, 1:], expected["model/rows"][3:5, 1:])
    module = torch.nn.Module()
    for key in ("rows", "plain"):
        module.register_buffer(key, torch.zeros_like(expected[f"model/{key}"]))
    transload.load_into(module, case, strict=False)
    assert all(torch.equal(value, expected[f"model/{key}"]) for key, value in module.state_dict().items())
    transload.convert(case, tmp_path / "new.pt", key="model")
    written = torch.load(tmp_path / "new.pt", weights_only=True)
    assert all(torch.equal(tensor, expected[f"model/{name}"]) for name, tensor in named(written))


def test_values_of_items_are_those_of_the_first_rank(cases: Path) -> None:
    loaded = transload.load(cases / "4/pt")
    assert (loaded["step"], loaded["other"]) == (7, {"seen": [1, 2]})
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_the_first_version_of_the_index_lists_paths(cases: Path, tmp_path: Path) -> None:
    def older(index: Any) -> None:
        items = index["metadata"]
        paths = {
            f'["{item}",{path[1:]}': groups
            for item, fields in items.items()
            for path, groups in fields["nested_path_to_metadata"].items()
        }
        layouts = {
            str(rank): {item: fields["rank_to_layout_info"][rank] for item, fields in items.items()}
            for rank in range(4)
        }
        index.update(version="1.0", metadata=paths, rank_to_layout_info_mappings=layouts)

    loaded = transload.load(changed(cases / "4/safetensors", tmp_path, older))
    expected = dict(named(whole(cases / "4/safetensors")))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named(loaded))


def test_another_version_is_left_to_the_package(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases / "4/pt", tmp_path, lambda index: index.update(version="3.0"))
    assert detail(folder, "ranks-unmerged") == "metadata.pkl has version 3.0; 1.0 and 2.0 are known"


def test_safetensors_have_no_device_to_change(cases: Path) -> None:
    with pytest.raises(RetagError, match="carry no device"):
        transload.retag(cases / "2/safetensors", "cpu")


def test_a_missing_rank_is_named_with_its_rows(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases / "4/safetensors", tmp_path)
    (folder / "ranks" / "model-1.safetensors").unlink()
    assert "1 of 4 ranks: 1" in detail(folder, "rank-missing")
    assert "no file has [4:6] of [7, 2]" in detail(folder, "dcp-piece-missing")
    with pytest.raises(BrokenFileError, match="ranks: 1"):
        transload.load(folder)
    transload.rescue(folder, tmp_path / "rest.pt", fill="zeros")
    rows = torch.load(tmp_path / "rest.pt", weights_only=True)["model"]["rows"]
    assert rows[:, 1].tolist() == [1, 3, 5, 7, 0, 0, 13]
    shutil.rmtree(folder / "ranks")
    (missing,) = (problem for problem in inspect(folder).problems if problem.code == "rank-missing")
    assert (missing.where, missing.detail) == ("model", "4 of 4 ranks")


@each("name", CASES)
def test_a_file_of_another_run_is_refused(cases: Path, name: str, tmp_path: Path) -> None:
    def wider(index: Any) -> None:
        packed = index["metadata"]["model"]["nested_path_to_metadata"]['["rows"]'][0]["sharding_metadata"]
        packed["data"]["global_shape"] = [7, 3]

    folder = changed(cases / name, tmp_path, wider)
    assert "rows is float32" in detail(folder, "ranks-differ")
    with pytest.raises(BrokenFileError):
        transload.load(folder)


@needs_torch(2, 13)  # which wrote the DTensors; older ones refuse them
def test_a_divided_tensor_that_is_not_dense_is_not_merged(cases: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor")  # without it torch.load refuses DTensors
    folder = changed(cases / "2/pt", tmp_path)
    for file in folder.glob("model_*.pt"):
        content = torch.load(file, weights_only=True)
        torch.save({**content, "rows": content["rows"].to_local().to_sparse()}, file)
    assert detail(folder, "ranks-unmerged") == "how rows is divided among the ranks is not clear"


def _set(*path: Any) -> Callable[[Any], None]:
    *steps, last, value = path

    def change(index: Any) -> None:
        at = index["metadata"]["model"]
        for step in steps:
            at = at[step]
        at[last] = value

    return change


ROWS = ("nested_path_to_metadata", '["rows"]')
SPEC = (*ROWS, 0, "sharding_metadata", "data")


@each(
    "change",
    [
        _set(*ROWS, 7),
        _set(*ROWS, []),
        _set(*ROWS, 0, "ranks", (5, 6)),
        _set(*ROWS, 0, "sharding_metadata", "type", "Other"),
        _set(*ROWS, 0, "sharding_metadata", "type", "default_tensor_v1"),
        _set(*SPEC, "global_shape", "7"),
        _set(*SPEC, "global_shape", [7]),
        _set(*SPEC, "placements", []),
        _set(*SPEC, "placements", 0, {"type": "Partial"}),
        _set(*SPEC, "placements", 0, {"type": "Shard", "dim": 2}),
        _set(*SPEC, "placements", 0, {"type": "StridedShard", "dim": 0, "split_factor": 1 << 40}),
        _set(*SPEC, "mesh_spec", "mesh_shape", (1, 1)),
        _set(*SPEC, "mesh_spec", "mesh_data", None),
    ],
    ids=str,
)
def test_an_index_that_does_not_make_sense_is_a_problem(
    cases: Path, change: Callable[[Any], None], tmp_path: Path
) -> None:
    problems = codes(inspect(changed(cases / "4/safetensors", tmp_path, change)))
    assert "ranks-unmerged" in problems


def test_a_dictionary_that_is_used_a_million_times_takes_bounded_time(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_checkpointing, "_MAX_ENTRIES", 1000)

    def repeat(index: Any) -> None:
        item = index["metadata"]["model"]
        index["metadata"] |= {f"item{number}": item for number in range(300)}

    folder = changed(cases / "4/safetensors", tmp_path, repeat)
    assert detail(folder, "ranks-unmerged") == "metadata.pkl is too large"


def test_a_path_that_leads_outside_is_not_opened(cases: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(
        (cases / "4/safetensors" / "ranks" / "model-0.safetensors").read_bytes()
    )
    change = _set("rank_to_layout_info", 0, {"file_path": "../secret.safetensors"})
    assert "dcp-path-outside" in codes(inspect(changed(cases / "4/safetensors", tmp_path, change)))


def test_another_metadata_pkl_is_a_file_beside_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"metadata": 1}))
    write_ranks(tmp_path)
    assert inspect(tmp_path).flavour == ""
    assert inspect(tmp_path).tensor("w").shape == (4, 2)
