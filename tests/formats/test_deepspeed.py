"""DeepSpeed directories: what the ranks wrote, put together as DeepSpeed does it, without DeepSpeed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from tests.each import each, for_each

from transload.checking import check
from transload.contents import with_parts
from transload.converting import convert
from transload.errors import BrokenFileError, ConvertError, LoadError
from transload.loading import load
from transload.loading.handles import open as open_
from transload.loading.into import load_into
from transload.opening import inspect
from transload.rescuing import rescue
from transload.verifying import verify

DATA = Path(__file__).parent.parent / "data" / "deepspeed"
CASES = ("stage1-bf16", "stage2-fp16", "stage3-bf16")
STEP = "global_step2"


def unpacked(factory: pytest.TempPathFactory) -> Path:
    """A folder with the directory of each case."""
    folder = factory.mktemp("deepspeed")
    for name in CASES:
        with ZipFile(DATA / f"{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory)


def expected(cases: Path, name: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed makes of a case; it leaves out frozen parameters of stage 1, which the model states have."""
    weights: dict[str, torch.Tensor] = torch.load(cases / name / "expected.pt")
    if name.startswith("stage1"):
        model = torch.load(cases / name / STEP / "mp_rank_00_model_states.pt", weights_only=False)
        weights |= {key: model["module"][key] for key in ("a.weight", "b.bias")}
    return weights


def assert_same(left: Any, right: Any) -> None:
    """Compare two objects; only the memory of tensors may differ."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, False)
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def codes(path: Path) -> list[str]:
    return [problem.code for problem in inspect(path).problems]


def changed(cases: Path, name: str, tmp_path: Path) -> Path:
    """A copy of the files of a case, to be changed."""
    folder = tmp_path / name
    shutil.copytree(cases / name / STEP, folder)
    return folder


def rewrite(path: Path, change: Any) -> None:
    """Change the object in a file."""
    content = Unpickled.load(path)
    change(content)
    torch.save(content, path)


class Unpickled:
    """Loads a file without DeepSpeed: its three classes become the numbers and dictionaries that they hold."""

    @staticmethod
    def load(path: Path) -> Any:
        import pickle
        import types

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                if module.startswith("deepspeed"):
                    return int if name == "ZeroStageEnum" else types.SimpleNamespace
                return super().find_class(module, name)

        module: Any = types.ModuleType("unpickler")
        module.Unpickler, module.load, module.loads = Unpickler, pickle.load, pickle.loads
        content = torch.load(path, pickle_module=module, weights_only=False)
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"].pop("param_slice_mappings", None)
            content["optimizer_state_dict"]["loss_scaler"] = None
        return content


# -- what DeepSpeed itself wrote


@each("name", CASES)
def test_weights_are_those_of_zero_to_fp32(cases: Path, name: str) -> None:
    module = load(cases / name)["module"]
    wanted = expected(cases, name)
    assert_same(module, {key: tensor.detach() for key, tensor in wanted.items()})
    assert module["head.weight"] is module["embed.weight"]
    assert module["ids"].tolist() == [2**40 + 1, 7]


@each("name", ["stage1-bf16", "stage3-bf16"])
def test_states_of_the_optimizer_are_those_of_ds_to_universal(cases: Path, name: str) -> None:
    optimizer = load(cases / name)["optimizer"]
    zero = cases / name / "universal" / "global_step2_universal" / "zero"
    compared = 0
    for parameter, states in optimizer["state"].items():
        assert states.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert float(states["step"]) == 2
        for key in ("exp_avg", "exp_avg_sq"):
            saved = torch.load(zero / parameter / f"{key}.pt", weights_only=False)
            saved = saved["param"] if isinstance(saved, dict) else saved
            assert torch.equal(states[key], saved.view(states[key].shape))
            compared += 1
    assert compared == 8
    steps = [states["step"].data_ptr() for states in optimizer["state"].values()]
    assert len(set(steps)) == len(steps)  # an optimizer counts each of them
    assert [group["params"] for group in optimizer["param_groups"]] == [
        ["embed.weight", "b.weight", "c.weight"],
        ["a.bias"],
    ]


@each("name", ["stage1-bf16", "stage3-bf16"])
def test_universal_checkpoint_is_the_same_object(cases: Path, name: str) -> None:
    ranks, universal = load(cases / name), load(cases / name / "universal")
    assert ranks.keys() == universal.keys()
    for key in ("module", "optimizer", "note", "epoch"):
        assert_same(universal[key], ranks[key])


def test_everything_else_is_that_of_the_first_rank(cases: Path) -> None:
    loaded = load(cases / "stage2-fp16")
    assert (loaded["epoch"], loaded["global_steps"], loaded["note"]["x"].tolist()) == (3, 2, [0, 1, 2])
    assert loaded["ds_config"]["zero_optimization"]["stage"] == 2
    assert loaded["optimizer"]["loss_scaler"]["cur_scale"] == 16.0  # an object of DeepSpeed's, as a dictionary
    assert loaded["param_shapes"][0]["embed.weight"] == torch.Size([7, 5])


def test_inspect_needs_no_trust_for_what_belongs_to_a_rank(cases: Path) -> None:
    checkpoint = inspect(cases / "stage2-fp16")
    assert dict(checkpoint.facts)["ZeRO stage"] == "2"
    finding = next(finding for finding in checkpoint.findings if finding.code == "needs-trust")
    assert (finding.severity, checkpoint.safety, checkpoint.ok) == ("note", "data-only", True)
    assert "does not need" in finding.title
    assert inspect(cases / "stage1-bf16" / "universal").flavour == "universal checkpoint"
    assert checkpoint.tensor("module/embed.weight").shape == (7, 5)
    report = verify(cases / "stage2-fp16")
    assert report.ok


def test_a_class_that_is_not_on_the_list_needs_trust_though_it_is_not_loaded(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases, "stage2-fp16", tmp_path)
    for path in folder.glob("*optim_states.pt"):
        data = path.read_bytes()
        assert b"ZeroStageEnum" in data
        path.write_bytes(data.replace(b"ZeroStageEnum", b"ZeroStageEnum".swapcase()))
    assert inspect(folder).safety == "needs-trust"


def test_what_is_said_of_a_folder_whose_rank_is_lost_does_not_advise_to_load_it(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases, "stage2-fp16", tmp_path)
    next(folder.glob("*rank_1_*")).unlink()
    prediction = inspect(folder).prediction
    assert prediction == "torch.load fails on a directory, and transload.load refuses it: some of it is lost"


def test_converting_one_of_the_files_says_that_the_folder_has_more(cases: Path, tmp_path: Path) -> None:
    folder = cases / "stage2-fp16" / STEP
    for name, to in (("a", "universal"), ("a.safetensors", "")):
        result = convert(folder / "mp_rank_00_model_states.pt", tmp_path / name, to=to)
        assert any("name their folder" in note for note in result.notes)
    with pytest.raises(ConvertError, match="name the folder"):
        convert(next(folder.glob("*rank_1_*")), tmp_path / "b", to="universal")


@each("name", CASES)
def test_rows_of_a_weight_are_read_alone(cases: Path, name: str) -> None:
    wanted = expected(cases, name)
    with open_(cases / name) as handle:
        assert torch.equal(handle.slice("module/embed.weight")[2:5, 1:], wanted["embed.weight"][2:5, 1:])
        assert torch.equal(handle.slice("module/b.weight")[1], wanted["b.weight"][1])
        assert handle.metadata["epoch"] == 3


def test_load_into_a_model(cases: Path) -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(5, 6), "b": torch.nn.Linear(6, 5), "c": torch.nn.Linear(5, 3)})
    load_into(net, cases / "stage3-bf16", strict=False, cast=True)
    assert torch.equal(net["b"].weight, expected(cases, "stage3-bf16")["b.weight"])
    file = cases / "stage3-bf16" / STEP / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    with pytest.raises(LoadError, match="of another shape") as refusal:
        load_into(net, file, strict=False, cast=True)
    assert "name their folder" in refusal.value.fix


@each("name", CASES)
def test_convert_writes_the_weights(cases: Path, name: str, tmp_path: Path) -> None:
    result = convert(cases / name, tmp_path / "model.pt")
    assert any("--optimizer" in note for note in result.notes)
    written = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(written, load(cases / name)["module"])
    assert written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()
    convert(cases / name, tmp_path / "all.pt", optimizer=True)
    everything, loaded = torch.load(tmp_path / "all.pt", weights_only=True), load(cases / name)
    assert_same(everything, loaded)
    steps = [states["step"].data_ptr() for states in everything["optimizer"]["state"].values()]
    assert len(set(steps)) == len(steps)
    convert(cases / name, tmp_path / "state.pt", key="optimizer/state")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), loaded["optimizer"]["state"])


def test_convert_names_the_weights_as_the_model_does(cases: Path, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    convert(cases / "stage3-bf16", tmp_path / "model.safetensors", dtype="float32")
    written = load_file(tmp_path / "model.safetensors")
    wanted = expected(cases, "stage3-bf16")
    assert {**written, "head.weight": written["embed.weight"]}.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in written.items())


# -- files that do not fit together


@each("name", CASES)
def test_missing_rank_names_the_rows(cases: Path, name: str, tmp_path: Path) -> None:
    folder = changed(cases, name, tmp_path)
    next(folder.glob("*zero_pp_rank_1_*_optim_states.pt")).unlink()
    checkpoint = inspect(folder)
    assert {problem.code for problem in checkpoint.problems} == {"rank-missing", "dcp-piece-missing"}
    lost = {problem.where: problem.detail for problem in checkpoint.problems if problem.code == "dcp-piece-missing"}
    words = {"stage1-bf16": "[0:1, 4:6], [1:5]", "stage2-fp16": "[0:3], [3:4, 0:3]"}
    assert lost["module/b.weight"] == f"no file has {words.get(name, '[1:2, 4:6], [2:3], [3:4, 0:2]')} of [5, 6]"
    with pytest.raises(BrokenFileError, match="ranks: 1"):
        load(folder)


def test_rescue_keeps_what_other_ranks_have(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases, "stage2-fp16", tmp_path)
    next(folder.glob("*zero_pp_rank_2_*_optim_states.pt")).unlink()
    rescue(folder, tmp_path / "rest.pt")
    rest, whole = torch.load(tmp_path / "rest.pt", weights_only=True), load(cases / "stage2-fp16")
    assert torch.equal(rest["module"]["embed.weight"], whole["module"]["embed.weight"])
    kept = rest["optimizer"]["state"]["embed.weight"]
    assert torch.equal(kept["exp_avg"], whole["optimizer"]["state"]["embed.weight"]["exp_avg"])
    assert (rest["epoch"], rest["module"]["ids"].tolist()) == (3, [2**40 + 1, 7])


def test_rank_files_that_do_not_belong_together(cases: Path, tmp_path: Path) -> None:
    def fourth_rank(folder: Path) -> None:
        shutil.copy(
            folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
        )

    def other_step(folder: Path) -> None:
        rewrite(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(global_steps=3))

    def other_world(folder: Path) -> None:
        path = next(folder.glob("*zero_pp_rank_1_*_optim_states.pt"))
        rewrite(path, lambda content: content["optimizer_state_dict"].update(partition_count=[2, 2]))

    def longer(folder: Path) -> None:
        path = next(folder.glob("*zero_pp_rank_1_*_optim_states.pt"))
        flat = "fp32_flat_groups" if "stage3" in folder.name else "single_partition_of_fp32_groups"
        rewrite(path, lambda content: content["optimizer_state_dict"][flat].__setitem__(0, torch.zeros(50)))

    for name, change, says in (
        ("stage2-fp16", fourth_rank, "4 ranks have files, which 3 wrote"),
        ("stage3-bf16", other_step, "global_steps (rank 0: 2, rank 1: 3"),
        ("stage2-fp16", other_world, "their partitions (rank 0: 3, rank 1: 2"),
        ("stage2-fp16", longer, "have 80 elements, the vectors of the ranks"),
        ("stage3-bf16", longer, "each rank should have 29 elements"),
    ):
        folder = changed(cases, name, tmp_path / change.__name__)
        change(folder)
        checkpoint = inspect(folder)
        found = {problem.code: problem.detail for problem in checkpoint.problems}
        assert says in found["ranks-differ"], found
        with pytest.raises(BrokenFileError, match="do not belong together"):
            load(folder)


def test_tensor_parallel_slices_are_not_merged(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases, "stage2-fp16", tmp_path)
    for path in [*folder.iterdir()]:
        shutil.copy(path, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    checkpoint = inspect(folder)
    (problem,) = checkpoint.problems
    assert problem.code == "ranks-unmerged"
    assert "tensor-parallel ranks have slices of each parameter" in problem.detail
    with pytest.raises(LoadError, match="cannot be put together"):
        load(folder)
    assert {finding.code for finding in check(folder).findings} == {"not-loaded", "ranks-unmerged"}
    assert convert(folder, tmp_path / "ranks.pt").listed == ()
    result = convert(folder, tmp_path / "ranks.safetensors")
    assert any("parts of one tensor are not joined" in note for note in result.notes)


def test_without_the_model_states_the_weights_are_lost(cases: Path, tmp_path: Path) -> None:
    """Each vector of the optimizer is whole, but nothing says which parameters are in it, not even to DeepSpeed."""
    for number, case in enumerate(("stage2-fp16", "stage3-bf16")):
        folder = changed(cases, case, tmp_path / str(number))
        for path in folder.glob("*model_states.pt"):
            path.unlink()
        checkpoint = inspect(folder)
        assert checkpoint.integrity == "damaged"
        assert [finding.code for finding in checkpoint.findings][:1] == ["rank-missing"]
        assert not [finding for finding in checkpoint.findings if "Load it with" in " ".join(finding.fix)]
        assert [finding.code for finding in check(folder).findings] == ["rank-missing", "ranks-unmerged"]
        with pytest.raises(BrokenFileError, match="model states"):
            convert(folder, tmp_path / "new.pt")
        assert rescue(folder, tmp_path / f"{number}.pt").exit_code == 1


def test_broken_lists_of_parameters_are_a_problem(cases: Path, tmp_path: Path) -> None:
    def is_unmerged(number: int, shapes: Any) -> None:
        folder = changed(cases, "stage2-fp16", tmp_path / str(number))
        rewrite(folder / "mp_rank_00_model_states.pt", lambda content: content.update(param_shapes=shapes))
        assert set(codes(folder)) & {"ranks-unmerged", "ranks-differ"}

    wrong: list[Any] = [
        None,
        3,
        [],
        [{}],
        [{"a": None}],
        [{"a": [-1]}],
        [{"a": [2**62, 2**62]}],
        [{"a": (1,) * 100}],
        [[1, 2]],
    ]
    wrong += [[{"a": [10**9]}, {"b": [2]}], [{"a": ["x"]}, {}]]
    for_each(enumerate(wrong), lambda case: is_unmerged(*case))


# -- forms that only files made by hand show


def save_ranks(folder: Path, model: dict[str, Any], *optimizers: dict[str, Any], mp: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(model, folder / f"mp_rank_{mp:02d}_model_states.pt")
    for rank, optimizer in enumerate(optimizers):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)


def test_model_states_that_are_no_dictionary_are_not_merged(tmp_path: Path) -> None:
    for content in (torch.ones(2), [torch.ones(2)]):
        torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
        (problem,) = inspect(tmp_path).problems
        assert problem.code == "ranks-unmerged"
        assert "mp_rank_00_model_states.pt" in problem.detail


def test_universal_weight_that_is_sparse_stays_as_it_is(cases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "universal"
    shutil.copytree(cases / "stage3-bf16" / "universal", folder)
    file = next(folder.glob("*/zero/*.*/fp32.pt"))
    torch.save(torch.load(file).flatten().to_sparse(), file)
    (tensor,) = (tensor for tensor in inspect(folder).tensors if tensor.name == f"module/{file.parent.name}")
    assert tensor.kind == "sparse_coo"


def test_stages_of_a_pipeline_have_different_parameters(tmp_path: Path) -> None:
    for stage in range(2):
        shapes = [{f"{stage}.weight": torch.Size([2, 3]), "tied_modules.embed.weight": torch.Size([2])}]
        model = {"module": None, "param_shapes": shapes, "buffer_names": [f"{stage}.mean"], "dp_world_size": 2}
        flat = torch.arange(8.0) + 10 * stage
        halves = [{"single_partition_of_fp32_groups": [half], "partition_count": [2]} for half in flat.split(4)]
        save_ranks(tmp_path / STEP, model, *halves, mp=stage)
        layer = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16), "mean": torch.full((3,), float(stage))}
        torch.save(layer, tmp_path / STEP / f"layer_{stage:02d}-model_states.pt")
    module = load(tmp_path)["module"]
    assert module["1.weight"].tolist() == [[10, 11, 12], [13, 14, 15]]
    assert module["0.mean"].tolist() == [0, 0, 0]
    assert module["1.mean"].tolist() == [1, 1, 1]
    assert module["tied_modules.embed.weight"].tolist() == [6, 7]


def test_layers_of_a_pipeline_without_zero(tmp_path: Path) -> None:
    for stage in range(2):
        content = {"module": None, "param_shapes": None, "optimizer": {"lr": 0.5 + stage}}
        save_ranks(tmp_path / STEP, content, mp=stage)
    torch.save({"weight": torch.ones(2)}, tmp_path / STEP / "layer_03-model_00-model_states.pt")
    loaded = load(tmp_path)
    assert (loaded["module"]["3.weight"].tolist(), loaded["optimizer"]) == ([1, 1], {"lr": 0.5})
    assert loaded["optimizer of mp_rank_01"] == {"lr": 1.5}
    torch.save({"weight": torch.ones(2)}, tmp_path / STEP / "layer_03-model_01-model_states.pt")
    with pytest.raises(LoadError, match=r"tensor-parallel ranks have slices of each parameter.*: 3\.weight"):
        load(tmp_path)


def test_model_without_zero_that_is_split_is_not_merged(tmp_path: Path) -> None:
    for rank in range(2):
        save_ranks(tmp_path / STEP, {"module": {"w": torch.ones(2)}, "param_shapes": None}, mp=rank)
    with pytest.raises(LoadError, match="tensor-parallel"):
        load(tmp_path)


def test_each_set_of_ranks_has_a_vector_for_its_experts(tmp_path: Path) -> None:
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts"
    shapes = [{"fc": torch.Size([4])}, {f"{prefix}.0.w": torch.Size([3])}]
    model = {"module": {"fc": torch.zeros(4)}, "param_shapes": shapes, "buffer_names": []}
    flat = "single_partition_of_fp32_groups"
    # Four ranks, two experts: ranks 0 and 2 have the first, 1 and 3 the second.
    runs = [[0.0, 1.0], [10.0, 11.0], [2.0], [12.0]]
    ranks = [
        {flat: [torch.tensor([float(rank)]), torch.tensor(run)], "partition_count": [4, 2]}
        for rank, run in enumerate(runs)
    ]
    save_ranks(tmp_path / STEP, model, *ranks)
    with pytest.raises(LoadError, match="experts"):
        load(tmp_path)
    torch.save({"optimizer": 5}, tmp_path / STEP / "expp_rank_0_mp_rank_00_optim_states.pt")
    for expert in range(2):
        path = tmp_path / STEP / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
        torch.save({f"{prefix}.{expert}.w": torch.zeros(3, dtype=torch.bfloat16)}, path)
    loaded = load(tmp_path)
    assert {name: tensor.tolist() for name, tensor in loaded["module"].items()} == {
        "fc": [0, 1, 2, 3],
        f"{prefix}.0.w": [0, 1, 2],
        f"{prefix}.1.w": [10, 11, 12],
    }
    assert loaded["optimizer of experts"] == {"expp_rank_0_mp_rank_00_optim_states.pt": {"optimizer": 5}}
    # A file does not confirm the name of an expert: its weights are taken from the files as they are.
    torch.save({"expert": torch.ones(3)}, tmp_path / STEP / "layer_0_expert_1_mp_rank_00_model_states.pt")
    assert "experts" in dict(inspect(tmp_path).facts)["not merged"]
    assert load(tmp_path)["module"]["expert"].tolist() == [1, 1, 1]


def test_values_of_other_ranks_that_differ_are_named(cases: Path, tmp_path: Path) -> None:
    folder = changed(cases, "stage3-bf16", tmp_path)
    rewrite(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(epoch=4))
    assert dict(inspect(folder).facts)["values"] == "those of the first rank; others differ in epoch"


def test_each_set_of_ranks_of_mics_has_everything(tmp_path: Path) -> None:
    folder = tmp_path / STEP
    folder.mkdir()
    config = {"zero_optimization": {"mics_shard_size": 2}}
    for rank in range(4):
        model = {"module": {}, "param_shapes": [{"w": torch.Size([3])}], "ds_config": config, "buffer_names": []}
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = torch.tensor([[0.0, 1.0], [2.0, -1.0]][rank % 2])
        optimizer = {"fp32_flat_groups": [flat], "partition_count": 4}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert load(tmp_path)["module"]["w"].tolist() == [0, 1, 2]


def test_elastic_states_are_lists(tmp_path: Path) -> None:
    model = {"module": {}, "param_shapes": [{"w": torch.Size([3])}], "buffer_names": []}
    flat = "single_partition_of_fp32_groups"
    parts = [torch.tensor([0.0, 1.0]), torch.tensor([2.0])]
    ranks = [
        {flat: [part], "partition_count": [2], "base_optimizer_state": [{"exp_avg": part * 10, "step": 4}]}
        for part in parts
    ]
    save_ranks(tmp_path / STEP, model, *ranks)
    state = load(tmp_path)["optimizer"]["state"]["w"]
    assert (state["exp_avg"].tolist(), state["step"]) == ([0, 10, 20], 4)


def test_parts_lie_in_the_files_of_the_ranks(cases: Path) -> None:
    checkpoint = inspect(cases / "stage3-bf16")
    tensor = checkpoint.tensor("module/embed.weight")
    assert [part.start for part in tensor.parts] == [(0,), (12,), (24,)]
    files = {storage.id: storage.file for storage in checkpoint.storages}
    found = [files[part.storage] for part in with_parts(tensor) if part.storage]
    assert found == [f"{STEP}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]


def test_offsets_in_files_are_those_of_the_parts(cases: Path) -> None:
    checkpoint, weights = inspect(cases / "stage1-bf16"), load(cases / "stage1-bf16")["module"]
    files = {storage.id: cases / "stage1-bf16" / storage.file for storage in checkpoint.storages}
    for name in ("b.weight", "c.weight"):
        for part in with_parts(checkpoint.tensor(f"module/{name}")):
            if part.storage:
                first = weights[name].flatten()[part.start[0] if part.start else 0]
                raw = files[part.storage].read_bytes()[part.file_offset :][:4]
                assert torch.frombuffer(bytearray(raw), dtype=torch.float32)[0] == first
