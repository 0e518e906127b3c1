"""``transload.CheckpointReader``: ``dcp.load`` from any file equals what torch reads from its own directories."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.each import for_each
from tests.loading.equal import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from transload import CheckpointReader
from transload.errors import (
    BrokenFileError,
    LoadError,
    MissingFileError,
    NotACheckpointError,
    TransloadError,
    UnsafeError,
    UsageError,
)

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
RANK_FILES = Path(__file__).parent.parent / "data" / "rank-files"
WEIGHTS = {"fc.weight": torch.arange(12.0).view(3, 4), "fc.bias": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16)}


class Planner(DefaultLoadPlanner):
    """A planner that does something before the first tensor is read."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action = action

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.action()
        return super().resolve_tensor(read_item)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        yield


def load(state: dict[str, Any], reader: CheckpointReader, planner: Any = None) -> None:
    """``dcp.load`` in one process, by the name this torch has for it; raises the error of the only rank."""
    try:
        if RELEASE < (2, 3):
            dcp.load_state_dict(state, reader, no_dist=True, planner=planner)
        else:
            dcp.load(state, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        raise error.failures[0][0] from None


def save(state: dict[str, Any], path: Path, planner: Any = None) -> None:
    writer = dcp.FileSystemWriter(str(path))
    if RELEASE < (2, 3):
        dcp.save_state_dict(state, writer, no_dist=True, planner=planner)
    else:
        dcp.save(state, storage_writer=writer, planner=planner)


def zeroed(value: Any) -> Any:
    """The same structure with zeros for numbers."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(member) for key, member in value.items()}
    if isinstance(value, list):
        return [zeroed(member) for member in value]
    return None


def training_state() -> dict[str, Any]:
    ordered = OrderedDict(WEIGHTS)
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "model": ordered,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}, 1: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "epoch": 3,
        "name": "first",
        "nothing": None,
        "losses": [1.5, 0.5],
        "pair": (torch.ones(2), 1),
        "tensors": [torch.ones(2), 7, {"inner": 2}],
        "counts": Counter(a=2),
        "defaults": defaultdict(int, b=1),
        "plain": {"a": {"b": 1, "c": [1, 2]}},
        "empty": {},
        "no elements": torch.empty(0, 3),
        "scalar": torch.tensor(4, dtype=torch.int64),
        "transposed": torch.arange(6).view(2, 3).t(),
    }


def test_names_paths_and_shapes_are_those_that_torch_gives_the_same_object(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    save(state, tmp_path / "dir")
    theirs = dcp.FileSystemReader(str(tmp_path / "dir")).read_metadata()
    ours = CheckpointReader(tmp_path / "a.pt").read_metadata()
    again = CheckpointReader(tmp_path / "dir").read_metadata()
    assert again.planner_data == theirs.planner_data
    assert again.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(entry), name
        if isinstance(entry, dcp.TensorStorageMetadata):
            assert (mine.size, mine.properties.dtype) == (entry.size, entry.properties.dtype)
            assert [(chunk.offsets, chunk.sizes) for chunk in mine.chunks] == [
                (chunk.offsets, chunk.sizes) for chunk in entry.chunks
            ]


def test_values_are_those_that_torch_reads_from_its_own_directory(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    save(state, tmp_path / "dir")
    expected = zeroed(state)
    if RELEASE < (2, 3):
        dcp.load_state_dict(expected, dcp.FileSystemReader(str(tmp_path / "dir")), no_dist=True)
    else:
        dcp.load(expected, storage_reader=dcp.FileSystemReader(str(tmp_path / "dir")))
    for name in ("zip.pt", "legacy.pt", "dir"):
        target = zeroed(state)
        load(target, CheckpointReader(tmp_path / name))
        assert_same(expected, target)


def test_every_format_of_weights(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "flat.pt")
    save_file(WEIGHTS, tmp_path / "flat.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    for index, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, shards / f"model-{index}.safetensors")
    places = {name: f"model-{index}.safetensors" for index, name in enumerate(WEIGHTS)}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    bins = tmp_path / "bins"
    bins.mkdir()
    for index, (name, tensor) in enumerate(WEIGHTS.items()):
        torch.save({name: tensor}, bins / f"pytorch_model-{index}.bin")
    places = {name: f"pytorch_model-{index}.bin" for index, name in enumerate(WEIGHTS)}
    (bins / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    model = torch.nn.Module()
    model.fc = torch.nn.Linear(4, 3)
    model.fc.bias = torch.nn.Parameter(WEIGHTS["fc.bias"])
    model.fc.weight = torch.nn.Parameter(WEIGHTS["fc.weight"])
    torch.save(model, tmp_path / "module.pt")
    torch.jit.script(model).save(str(tmp_path / "scripted.pt"))
    torch.save({"net": model, "epoch": 1}, tmp_path / "in a dict.pt")
    torch.save([WEIGHTS, 3], tmp_path / "list.pt")
    torch.save((WEIGHTS, 3), tmp_path / "tuple.pt")
    save(WEIGHTS, tmp_path / "dir")

    def check(case: tuple[str, str]) -> None:
        name, prefix = case
        target = zeroed(WEIGHTS)
        load(target, CheckpointReader(tmp_path / name, prefix=prefix))
        assert_same(WEIGHTS, target)

    whole = ["flat.pt", "flat.safetensors", "shards", "bins", "module.pt", "scripted.pt", "dir"]
    inside = [("in a dict.pt", "net"), ("list.pt", "0"), ("tuple.pt", "0")]
    for_each([*((name, "") for name in whole), *inside], check)


def test_files_of_ranks_are_read_as_one_checkpoint() -> None:
    def check(folder: Path) -> None:
        whole = torch.load(folder.with_name(f"{folder.name}-whole.pt"), weights_only=True)
        target = zeroed(whole)
        load(target, CheckpointReader(folder))
        assert [*flat(target)] == [*flat(whole)]

    def flat(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for key, member in value.items():
                yield key
                yield from flat(member)
        else:
            yield value.tolist() if isinstance(value, torch.Tensor) else value

    folders = sorted(path for path in RANK_FILES.glob("torch-*/*") if path.is_dir() and path.name != "fsdp1-local")
    for_each(folders, check)


def test_prefix_and_rename_make_names_fit(tmp_path: Path) -> None:
    torch.save({"state": {"model": WEIGHTS, "epoch": 3}}, tmp_path / "a.pt")
    save_file({f"model.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / "b.safetensors")

    def check(case: tuple[Any, ...]) -> None:
        name, options, expected = case
        target = zeroed(expected)
        load(target, CheckpointReader(tmp_path / name, **options))
        assert_same(expected, target)

    cases = [
        ("a.pt", {"prefix": "state/model"}, WEIGHTS),
        ("a.pt", {"prefix": "state.model."}, WEIGHTS),
        ("a.pt", {"prefix": "state"}, {"model": WEIGHTS, "epoch": 3}),
        ("b.safetensors", {"prefix": "model"}, WEIGHTS),
        ("b.safetensors", {"rename": {"model.": "net."}}, {"net": WEIGHTS}),
        ("b.safetensors", {"prefix": "model", "rename": {"": "a.b."}}, {"a": {"b": WEIGHTS}}),
        (
            "b.safetensors",
            {"rename": lambda name: name[6:] if "weight" in name else None},
            {"fc.weight": WEIGHTS["fc.weight"]},
        ),
    ]
    for_each(cases, check)
    if RELEASE >= (2, 4):  # a planner that makes the state dict from what is described
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        held = _load_state_dict_from_keys(
            {"fc.weight"}, storage_reader=CheckpointReader(tmp_path / "a.pt", prefix="state/model")
        )
        assert_same({"fc.weight": WEIGHTS["fc.weight"]}, held)

    def refused(case: tuple[Any, ...]) -> None:
        options, words = case
        with pytest.raises(UsageError, match=words):
            load(zeroed(WEIGHTS), CheckpointReader(tmp_path / "a.pt", **options))

    for_each(
        [
            ({"prefix": "weights"}, r"below the prefix 'weights'[^\0]*Names begin with: state"),
            ({"rename": lambda _: "same"}, "two values get the name 'same'"),
            ({"rename": lambda _: None}, "leaves nothing"),
        ],
        refused,
    )


def test_planners_work_as_with_torchs_reader(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": {"c": torch.ones(3)}}, tmp_path / "a.pt")
    reader = CheckpointReader(tmp_path / "a.pt")
    flat = {"a": torch.zeros(2), "b.c": torch.zeros(3)}
    load(flat, reader, DefaultLoadPlanner(flatten_state_dict=False))
    assert_same({"a": torch.ones(2), "b.c": torch.ones(3)}, flat)
    other = {"a": torch.zeros(2, dtype=torch.float64)}  # converted, and fewer names than the file has
    load(other, reader)
    assert_same({"a": torch.ones(2, dtype=torch.float64)}, other)
    with pytest.raises(RuntimeError if RELEASE >= (2, 4) else KeyError, match="x"):
        load({"x": torch.zeros(2)}, reader)
    if RELEASE >= (2, 6):
        with pytest.raises(ValueError, match="Size mismatch"):
            load({"a": torch.zeros(3)}, reader)
    if RELEASE >= (2, 4):
        partial = {"a": torch.zeros(2), "x": torch.zeros(2)}
        load(partial, reader, DefaultLoadPlanner(allow_partial_load=True))
        assert_same({"a": torch.ones(2), "x": torch.zeros(2)}, partial)


def test_tensors_that_are_not_dense_are_loaded_as_objects(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"sparse": sparse, "a": torch.ones(2)}, tmp_path / "a.pt")
    target = {"sparse": None, "a": torch.zeros(2)}
    load(target, CheckpointReader(tmp_path / "a.pt"))
    assert_same({"sparse": sparse, "a": torch.ones(2)}, target)


def test_an_object_that_needs_trust_is_refused_before_a_tensor_is_written(tmp_path: Path) -> None:
    class Stranger:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.getcwd, ()

    torch.save({"a": torch.ones(2), "z": Stranger()}, tmp_path / "a.pt")
    target = {"a": torch.zeros(2), "z": None}
    with pytest.raises(UnsafeError, match="getcwd"):
        load(target, CheckpointReader(tmp_path / "a.pt"))
    assert_same({"a": torch.zeros(2), "z": None}, target)
    alone = {"a": torch.zeros(2)}
    load(alone, CheckpointReader(tmp_path / "a.pt"))  # what is not asked for is not built
    assert_same({"a": torch.ones(2)}, alone)


def test_metadata_of_a_directory_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(WEIGHTS, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    target = zeroed(WEIGHTS)
    load(target, CheckpointReader(tmp_path))
    assert_same(WEIGHTS, target)


def test_what_cannot_be_read_raises_the_error_of_transload(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_bytes(b"<html>")
    torch.save(WEIGHTS, tmp_path / "whole.pt")
    torch.save({"w": torch.ones(4096)}, tmp_path / "cut.pt", _use_new_zipfile_serialization=False)
    cut = (tmp_path / "cut.pt").read_bytes()[:-100]
    (tmp_path / "cut.pt").write_bytes(cut)

    def check(case: tuple[str, type[TransloadError], dict[str, Any]]) -> None:
        name, kind, target = case
        before = zeroed(target)
        with pytest.raises(kind, match=name):
            load(target, CheckpointReader(tmp_path / name))
        assert_same(before, target)
        with pytest.raises(kind, match=name):
            _ = CheckpointReader(tmp_path / name).read_metadata().state_dict_metadata

    for_each([("none.pt", MissingFileError, {}), ("page.pt", NotACheckpointError, zeroed(WEIGHTS))], check)
    target = {"w": torch.zeros(4096)}
    with pytest.raises(LoadError, match="w are incomplete"):
        load(target, CheckpointReader(tmp_path / "cut.pt"))
    assert not target["w"].any()


def test_a_file_that_is_written_to_meanwhile_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(WEIGHTS, path)

    def write() -> None:
        with path.open("r+b") as file:
            file.write(b"P")
        os.utime(path, (1, 1))

    with pytest.raises(BrokenFileError, match=r"changed while it was read\s+The tensors .* may be partly filled"):
        load(zeroed(WEIGHTS), CheckpointReader(path), Planner(write))


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace or remove an open file")
def test_ranks_that_opened_different_files_raise(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "a.pt")
    readers = [CheckpointReader(tmp_path / "a.pt") for _ in range(3)]
    plan = dcp.LoadPlan([])
    plans = []
    for reader in readers:
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(plan))
    assert [each.items for each in readers[0].prepare_global_plan(plans)] == [[], [], []]
    torch.save({name: tensor + 1 for name, tensor in WEIGHTS.items()}, tmp_path / "b.pt")
    os.replace(tmp_path / "b.pt", tmp_path / "a.pt")
    readers[2].read_metadata()
    plans[2] = readers[2].prepare_local_plan(plan)
    with pytest.raises(BrokenFileError, match=r"rank 2 and rank 0 have opened different checkpoints"):
        readers[0].prepare_global_plan(plans)


def test_it_is_a_storage_reader_that_can_be_reset(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.ones(2) * 2}, tmp_path / "b.pt")
    reader = CheckpointReader(tmp_path / "a.pt")
    assert isinstance(reader, dcp.StorageReader)
    assert repr(reader) == f"CheckpointReader({tmp_path / 'a.pt'!r})"
    target = {"a": torch.zeros(2)}
    load(target, reader)
    reader.reset(tmp_path / "b.pt")
    load(target, reader)
    assert_same({"a": torch.ones(2) * 2}, target)
    assert CheckpointReader.validate_checkpoint_id(tmp_path)
    assert not CheckpointReader.validate_checkpoint_id(tmp_path / "none")
    with pytest.raises(UsageError, match="no checkpoint open"):
        reader.read_data(dcp.LoadPlan([]), DefaultLoadPlanner())
    reader.read_metadata()
    index = dcp.metadata.MetadataIndex("b")
    item = dcp.planner.ReadItem(dcp.planner.LoadItemType.BYTE_IO, index, index, index, index, index)
    with pytest.raises(UsageError, match="the plan asks for the object b, which it does not have"):
        reader.read_data(dcp.LoadPlan([item]), DefaultLoadPlanner())
    with pytest.raises(UsageError, match="threads"):
        CheckpointReader(tmp_path / "a.pt", threads=0)


def test_objects_that_are_shared_or_contain_themselves_or_are_deep(tmp_path: Path) -> None:
    looped: list[Any] = [torch.ones(1)]
    looped.append(looped)
    deep: Any = {"w": torch.ones(1)}
    for _ in range(300):
        deep = {"x": deep}
    torch.save({"loop": looped, "deep": deep, "a": torch.ones(2)}, tmp_path / "a.pt")
    target = {"a": torch.zeros(2)}
    load(target, CheckpointReader(tmp_path / "a.pt"))
    assert_same({"a": torch.ones(2)}, target)
    many: Any = [{}]
    for _ in range(40):
        many = [many, many]
    torch.save({"many": many, "a": torch.ones(2)}, tmp_path / "b.pt")
    with pytest.raises(BrokenFileError, match="shared"):
        load(target, CheckpointReader(tmp_path / "b.pt"))


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(LoadError, match=r"cannot be named: duplicated flatten key a\.b"):
        load({"a.b": torch.zeros(1)}, CheckpointReader(tmp_path / "a.pt"))


def test_a_directory_that_was_not_flattened(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "o": {"x": 1}}, tmp_path, DefaultSavePlanner(flatten_state_dict=False))
    target = {"a": torch.zeros(2), "o": None}
    load(
        target, CheckpointReader(tmp_path), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    )
    assert_same({"a": torch.ones(2), "o": {"x": 1}}, target)
    nested = {"a": torch.zeros(2), "o": {"x": None}}
    load(nested, CheckpointReader(tmp_path))
    assert_same({"a": torch.ones(2), "o": {"x": 1}}, nested)


def test_rank_files_that_form_no_object_are_refused() -> None:
    """Otherwise torch would say that a key is missing."""
    (folder,) = RANK_FILES.glob("torch-2.13-ranks-2/fsdp1-local")
    with pytest.raises(LoadError, match="LOCAL_STATE_DICT"):
        load({"fc.weight": torch.zeros(1)}, CheckpointReader(folder))
