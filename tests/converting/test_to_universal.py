"""``--to universal`` writes what DeepSpeed resumes from, with any number of ranks, and what its own tool writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.each import each
from tests.formats.test_deepspeed import CASES, Unpickled, assert_same, unpacked
from tests.makers import saved

from transload.converting import convert
from transload.errors import BrokenFileError, ConvertError, UsageError
from transload.loading import load
from transload.opening import inspect
from transload.writing import output

torch = pytest.importorskip("torch")

TAG = "global_step2_universal"
# Of frozen, tied and other weights the tool makes copies that no loader reads.
UNREAD = {"a.weight", "b.bias", "head.weight", "ids", "scale"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpacked(tmp_path_factory)
    for name in CASES:
        result = convert(folder / name, folder / f"{name}-new", to="universal")
        assert result.complete
        assert result.aliases == (("head.weight", "embed.weight"),)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def read(path: Path) -> Any:
    """What is in a file, which must be plain data."""
    return torch.load(path, weights_only=True)


def parameters(folder: Path) -> dict[str, Any]:
    """What each file of a parameter has, by name; one that is not where DeepSpeed looks for it is an error."""
    assert (folder / "latest_universal").read_text() == TAG
    zero = folder / TAG / "zero"
    out = {}
    for name in sorted(files(zero) - {"optimizer_state.pt"}):
        content = read(zero / name)
        assert not isinstance(content, dict) or content.pop("cat_dim", 0) == 0
        out[name] = content["param"] if isinstance(content, dict) else content
    return out


# -- from the files of many ranks


@each("name", ["stage1-bf16", "stage3-bf16"])
def test_parameters_are_those_of_ds_to_universal(cases: Path, name: str) -> None:
    tool, ours = parameters(cases / name / "universal"), parameters(cases / f"{name}-new")
    tool = {file: tensor for file, tensor in tool.items() if file.split("/")[0] not in UNREAD}
    assert len(tool) == (16 if name.startswith("stage1") else 12)
    steps = {f"{parameter}/step.pt" for parameter in ("embed.weight", "a.bias", "b.weight", "c.weight")}
    assert ours.keys() == tool.keys() | steps  # with stage 3, the tool has the step only in the common file
    for file, tensor in tool.items():
        assert ours[file].dtype == tensor.dtype
        # Stage 3 stores vectors.
        assert torch.equal(ours[file].flatten() if name.startswith("stage3") else ours[file], tensor.detach())


@each("name", ["stage1-bf16", "stage3-bf16"])
def test_the_rest_is_that_of_ds_to_universal_as_plain_data(cases: Path, name: str) -> None:
    folder = cases / f"{name}-new" / TAG
    ours = read(folder / "zero" / "optimizer_state.pt")
    tool = Unpickled.load(cases / name / "universal" / TAG / "zero" / "optimizer_state.pt")
    for key in ("dynamic_loss_scale", "overflow"):
        assert ours[key] == tool[key]
    for one, other in zip(ours["param_groups"], tool["param_groups"], strict=True):
        assert {**one, "params": []} == {**other, "params": []}
    assert float(ours["optimizer_state_dict"]["state"][0]["step"]) == 2  # where stage 3 looks
    assert ours["ds_version"] == "0.19.8"
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt" if name.startswith("stage3") else "mp_rank_00_model_states.pt"
    ours, tool = read(folder / model), Unpickled.load(cases / name / "universal" / TAG / model)
    assert tool.keys() - ours.keys() == {"frozen_param_fragments", "optimizer"}
    left = {"module", "frozen_param_fragments", "optimizer", "param_shapes"}
    assert_same({key: ours[key] for key in tool.keys() - left}, {key: tool[key] for key in tool.keys() - left})
    assert "loss_scaler" in (cases / f"{name}-new.leftovers.json").read_text()


@each("name", CASES)
def test_it_reads_as_the_same_object(cases: Path, name: str) -> None:
    ranks, universal = load(cases / name), load(cases / f"{name}-new")
    assert not inspect(cases / f"{name}-new").problems
    assert ranks.keys() == universal.keys()
    del ranks["optimizer"]["loss_scaler"]
    for part in ranks["optimizer"], universal["optimizer"]:
        part.pop("ds_version", None)
        part.pop("optimizer_state_dict", None)
    assert_same(universal["optimizer"], ranks["optimizer"])
    assert_same({**universal["module"]}, {**ranks["module"]})
    for key in ("note", "epoch", "global_steps", "shared_params", "buffer_names", "ds_config"):
        assert_same(universal[key], ranks[key])


def test_a_new_loss_scale_is_announced(cases: Path, tmp_path: Path) -> None:
    result = convert(cases / "stage2-fp16", tmp_path / "out", to="universal")
    assert any("loss scale" in note for note in result.notes)
    assert '"cur_scale": 16' in Path(result.leftovers).read_text()


@each("to", ["universal", "dcp"])
def test_progress_ends_with_the_total(cases: Path, to: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(cases / "stage1-bf16", tmp_path / to, to=to, progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)


def test_universal_checkpoint_is_written_again_from_itself(cases: Path, tmp_path: Path) -> None:
    convert(cases / "stage1-bf16-new", tmp_path / "again", to="universal")
    assert files(tmp_path / "again") == files(cases / "stage1-bf16-new")
    assert_same(parameters(tmp_path / "again"), parameters(cases / "stage1-bf16-new"))


def test_ranks_that_cannot_be_merged_are_refused(cases: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(cases / "stage1-bf16" / "global_step2", source)
    states = source / "mp_rank_00_model_states.pt"
    torch.save([1], states)
    with pytest.raises(ConvertError, match="cannot be merged: "):
        convert(source, tmp_path / "out", to="universal")
    states.unlink()
    with pytest.raises(BrokenFileError, match="missing: the model states"):
        convert(source, tmp_path / "out", to="universal")
    assert not (tmp_path / "out").exists()


# -- from one file


def trained(*, groups: int = 1, names: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model and an optimizer as scripts save them, and the states by name; the optimizer has only numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    parts = [[*model.named_parameters()][number::groups] for number in range(groups)]
    listed: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        listed.append({"lr": 0.1 + number, "params": [len(states) + at for at in range(len(part))]})
        if names:
            listed[-1]["param_names"] = [name for name, _ in part]
        for _, parameter in part:
            moments = {key: torch.randn(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
            states.append({"step": torch.tensor(3.0), **moments})
    optimizer = {"state": dict(enumerate(states)), "param_groups": listed}
    value = {"model": model.state_dict(), "optimizer": optimizer, "epoch": 2, "global_step": 40}
    return value, dict(zip([name for part in parts for name, _ in part], states, strict=True))


@each("groups, names", [(1, False), (1, True), (2, True)])
def test_states_of_an_optimizer_are_matched_with_weights(groups: int, names: bool, tmp_path: Path) -> None:
    value, states = trained(groups=groups, names=names)
    result = convert(saved(value), tmp_path / "out", to="universal")
    assert result.complete
    assert any("in order" in note for note in result.notes) == (not names)
    below = tmp_path / "out" / "global_step40_universal"
    assert {path.name for path in (below / "zero").iterdir()} == {*states, "optimizer_state.pt"}
    for name, state in states.items():
        assert torch.equal(read(below / "zero" / name / "fp32.pt")["param"], value["model"][name])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(read(below / "zero" / name / f"{key}.pt")["param"], state[key])
        assert torch.equal(read(below / "zero" / name / "step.pt"), state["step"])
    settings = read(below / "zero" / "optimizer_state.pt")
    assert [group["lr"] for group in settings["param_groups"]] == [0.1, 1.1][:groups]
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = read(below / file)  # what DeepSpeed looks up
        assert (model["dp_world_size"], model["mp_world_size"], model["skipped_steps"]) == (1, 1, 0)
        assert (model["epoch"], model["global_steps"]) == (2, 40)
    buffers = read(below / "mp_rank_00_model_states.pt")["module"]
    assert buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_states_whose_weights_are_not_known_are_lost_and_named(tmp_path: Path) -> None:
    value, states = trained(groups=2)
    result = convert(saved(value), tmp_path / "out", to="universal")
    assert not result.complete
    assert len([omission for omission in result.left if omission.lost]) == 3 * len(states)
    assert "what the optimizer calls 0" in result.left[0].why
    assert any("load_module_only=True" in note for note in result.notes)
    assert '"lr": 1.1' in Path(result.leftovers).read_text()
    zero = tmp_path / "out" / "global_step40_universal" / "zero"
    assert files(zero) == {"optimizer_state.pt", *(f"{name}/fp32.pt" for name in states)}
    # DeepSpeed loads as many groups as are here, with the settings of the new optimizer.
    settings = read(zero / "optimizer_state.pt")
    assert len(settings["param_groups"]) == 64
    assert all(group.keys() == {"params"} for group in settings["param_groups"])


def test_other_shapes_are_not_matched_by_order(tmp_path: Path) -> None:
    value, _ = trained()
    value["optimizer"]["state"][0]["exp_avg"] = torch.ones(4, 4)
    assert not convert(saved(value), tmp_path / "out", to="universal").complete


def test_weights_alone_are_float32_and_tied_ones_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(3, 2).bfloat16()
    value = {"module.a": weight, "module.b": weight, "module.steps": torch.tensor(3)}
    result = convert(saved(value), tmp_path / "out", to="universal", strip=["module."])
    assert (result.aliases, result.cast) == ((("b", "a"),), 1)
    below = tmp_path / "out" / "global_step0_universal"
    assert files(below / "zero") == {"a/fp32.pt", "optimizer_state.pt"}
    assert torch.equal(read(below / "zero" / "a" / "fp32.pt")["param"], weight.float())
    loaded = load(tmp_path / "out")["module"]
    assert loaded["b"] is loaded["a"]
    assert loaded["steps"] == 3


def test_weights_that_a_file_calls_tied_are_kept_if_they_are_not(tmp_path: Path) -> None:
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}
    value = {"model": {"w": torch.ones(2), "v": torch.zeros(2)}, "optimizer": optimizer, "shared_params": {"v": "w"}}
    result = convert(saved(value), tmp_path / "out", to="universal")
    assert result.aliases == ()
    assert load(tmp_path / "out")["module"]["v"].tolist() == [0, 0]


def test_states_that_deepspeed_has_no_place_for_are_named(tmp_path: Path) -> None:
    state = {"exp_avg": torch.ones(2), "row": torch.ones(1), "../x": torch.ones(2), "count": 7, "fp32": torch.ones(2)}
    value = {
        "model": {"w": torch.ones(2), "v": torch.ones(1)},
        "optimizer": {"state": {"w": state}, "param_groups": [{"params": ["w", "v", "w", ["x"]]}, {"params": ["w"]}]},
    }
    result = convert(saved(value), tmp_path / "out", to="universal")
    assert {omission.name.rpartition("w/")[2] for omission in result.left} == {"row", "../x", "fp32"}
    assert "count" in Path(result.leftovers).read_text()
    assert any("no state for these" in note and note.endswith("v") for note in result.notes)
    zero = tmp_path / "out" / "global_step0_universal" / "zero"
    assert files(zero) == {"optimizer_state.pt", "v/fp32.pt", "w/fp32.pt", "w/exp_avg.pt"}


# -- names and places


@each("name", ["../a", "a/b", "", ".", "..", "/a", "a\\b", "a\0b", "C:a", "x" * 256, "optimizer_state.pt", "\ud800"])
def test_a_name_that_no_directory_can_have_is_left_out(name: str, tmp_path: Path) -> None:
    value = {"model": {name: torch.ones(1), "fine": torch.ones(1)}}
    result = convert(saved(value), tmp_path / "out", to="universal")
    assert not result.complete
    assert "cannot be that of a directory" in result.left[0].why
    assert files(tmp_path) == {
        "out/latest_universal",
        *(f"out/global_step0_universal/{rank}mp_rank_00_model_states.pt" for rank in ("", "zero_pp_rank_0_")),
        *(f"out/global_step0_universal/zero/{file}" for file in ("optimizer_state.pt", "fine/fp32.pt")),
    }


def test_names_that_the_file_system_does_not_distinguish_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *mode: mkdir(os.fspath(path).replace("/A.w", "/a.w"), *mode))
    with pytest.raises(ConvertError, match=r"cannot tell 'A\.w' from another"):
        convert(saved({"a.w": torch.ones(1), "A.w": torch.ones(1)}), tmp_path / "out", to="universal")
    assert not [*tmp_path.iterdir()]


def test_only_a_universal_checkpoint_is_replaced(tmp_path: Path) -> None:
    source, out = saved({"model": {"w": torch.ones(1)}}), tmp_path / "out"
    convert(source, out, to="universal")
    with pytest.raises(UsageError, match="already exists"):
        convert(source, out, to="universal")
    convert(saved({"model": {"v": torch.ones(1)}}), out, to="universal", overwrite=True)
    zero = out / "global_step0_universal" / "zero"
    assert files(zero) == {"optimizer_state.pt", "v/fp32.pt"}
    with pytest.raises(UsageError, match="the source itself"):
        convert(out, out, to="universal", overwrite=True)
    (zero / "mine").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        convert(source, out, to="universal", overwrite=True)
    (zero / "mine").rmdir()
    (zero / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        convert(source, out, to="universal", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_conversion_left_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    left = output.AtomicFolder(str(tmp_path / "out"), overwrite=False)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("mine")
    hidden = Path(left.hidden)
    (hidden / "global_step0_universal" / "zero" / "w").mkdir(parents=True)
    (hidden / "global_step0_universal" / "zero" / "w" / "fp32.pt").write_text("half")
    (hidden / "link").symlink_to(tmp_path / "kept")
    os.close(left._lock)  # the process died
    convert(saved({"w": torch.ones(1)}), tmp_path / "out", to="universal")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "kept"}
    assert (tmp_path / "kept" / "mine").exists()


@each("value", [[torch.ones(1)], {"epoch": torch.ones(1), "model": {"inner": {"w": torch.ones(1)}}}])
def test_an_object_without_weights_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="there are no weights"):
        convert(saved(value), tmp_path / "out", to="universal")


def test_names_in_other_places_are_not_stripped(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be stripped"):
        convert(cases / "stage1-bf16", tmp_path / "out", to="universal", strip=["a."])
