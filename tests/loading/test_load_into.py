"""``transload.load_into``: torch.load and load_state_dict in one call, with no second copy and clearer errors."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge, makers
from tests.each import each
from tests.loading.equal import assert_same
from tests.loading.sharded_models import write_dcp
from tests.loading.test_open import CountingFile, raw
from tests.quantized import working_engine
from torch import nn

from transload.devices import Device, Devices
from transload.errors import (
    BrokenFileError,
    DoesNotFitError,
    LandingWarning,
    LoadError,
    NotACheckpointError,
    UsageError,
)
from transload.loading.into import KeysWarning, Loaded, MismatchError, load_into

RELEASES = sorted((Path(__file__).parent.parent / "data" / "torch-releases").glob("torch-*"))


class Net(nn.Module):
    """Tied weights, the buffers of a norm, a non-contiguous parameter, a scalar, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.missing = None


def seeded_net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = Net()
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor)
        return net


def meta(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return kind()


def file_of(value: Any, **options: Any) -> io.BytesIO:
    return io.BytesIO(makers.saved(value, **options))


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def cloned_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


State = dict[str, torch.Tensor]


class TestFindingTheStateDict:
    @pytest.mark.parametrize(
        ("wrap", "path"),
        [
            (lambda state: state, ""),
            (lambda state: {"state_dict": state, "epoch": 3}, "state_dict"),
            (lambda state: {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}}}, "model"),
            (lambda state: {"model_state_dict": state, "loss": 0.5}, "model_state_dict"),
            (lambda state: {"ema": {"module": state}, "step": torch.tensor(7)}, "ema/module"),
            (lambda state: [{"net": dict(state)}, "note"], "0/net"),
            (lambda state: {"state_dict": state, "again": state}, "state_dict"),
            (lambda state: {"a": {"x": torch.ones(1)}, "b": {"c": {"d": state}}}, "b/c/d"),
        ],
    )
    def test_state_dict_is_found_at_any_depth(self, wrap: Callable[[State], Any], path: str) -> None:
        model = seeded_net(1)
        result = load_into(model, file_of(wrap(seeded_net().state_dict())))
        assert (result, result.found, result.notes) == (([], []), path, ())
        assert_same_state(model, seeded_net())

    def test_nested_dictionaries_are_joined_by_dots(self) -> None:
        model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 3)))
        tree = {"params": {"a": dict(nn.Linear(2, 2).state_dict()), "b": dict(nn.Linear(2, 3).state_dict())}}
        assert load_into(model, file_of(tree)).found == "params"
        assert torch.equal(model[1].weight, tree["params"]["b"]["weight"])

    def test_two_state_dicts_that_fit_equally_well_are_ambiguous(self) -> None:
        model, before = seeded_net(1), cloned_state(seeded_net(1))
        file = file_of({"student": seeded_net(2).state_dict(), "teacher": seeded_net(3).state_dict()})
        with pytest.raises(UsageError) as caught:
            load_into(model, file)
        assert str(caught.value) == (
            "<file object>: 2 places of the file fit the model equally well: student, teacher\n"
            "Choose one of them with:\n"
            "prefix='student' for the 12 keys there\n"
            "prefix='teacher' for the 12 keys there"
        )
        assert_untouched(model, before)
        assert load_into(model, file, prefix="teacher").found == "teacher"
        assert_same_state(model, seeded_net(3))

    def test_weights_are_used_and_not_their_moving_average(self) -> None:
        weights, average = seeded_net(2).state_dict(), seeded_net(3).state_dict()
        swa = "callbacks/StochasticWeightAveraging/average_model_state"
        files: list[tuple[Any, str, str]] = [
            ({"state_dict": weights, "state_dict_ema": average}, "state_dict", "state_dict_ema"),
            ({"params_ema": average, "params": weights}, "params", "params_ema"),
            ({"ema": seeded_net(3), "model": seeded_net(2)}, "model", "ema"),
            ({"ema": weights, "model": weights}, "model", "ema"),  # which share their storages
            (
                {"callbacks": {"StochasticWeightAveraging": {"average_model_state": average}}, "state_dict": weights},
                "state_dict",
                swa,
            ),
        ]
        for value, used, other in files:
            model = seeded_net(1)
            with pytest.warns(KeysWarning, match=f"took the weights in {used}, .* prefix='{other}' takes those$"):
                assert load_into(model, file_of(value)).found == used
            assert_same_state(model, seeded_net(2))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert load_into(model, file_of(value), prefix=other).found == other
        assert load_into(model, file_of({"ema": average})).found == "ema"

    def test_adapter_is_not_a_state_dict(self) -> None:
        state = {"base_model.model.head.lora_A.weight": torch.ones(2, 3)}
        with pytest.raises(MismatchError, match=r"LoRA adapter[\s\S]*PeftModel.from_pretrained[\s\S]*--lora"):
            load_into(seeded_net(1), file_of(state))

    def test_state_dict_that_fits_better_is_used(self) -> None:
        model, state = seeded_net(1), seeded_net(2).state_dict()
        part = {name: tensor for name, tensor in seeded_net(3).state_dict().items() if "running" not in name}
        assert load_into(model, file_of({"ema": part, "model": state})).found == "model"
        assert_same_state(model, seeded_net(2))

    def test_prefix_may_end_inside_a_key(self) -> None:
        model = nn.Linear(2, 2)
        state = {f"backbone.fc.{name}": tensor for name, tensor in nn.Linear(2, 2).state_dict().items()}
        for prefix in ("state_dict/backbone.fc.", "state_dict/backbone.fc"):
            assert load_into(model, file_of({"state_dict": state}), prefix=prefix) == ([], [])
            assert torch.equal(model.weight, state["backbone.fc.weight"])

    def test_unknown_prefix_is_an_error(self) -> None:
        with pytest.raises(UsageError) as caught:
            load_into(seeded_net(), file_of({"model": seeded_net().state_dict(), "x": [torch.ones(1)]}), prefix="nett")
        problem, hint = str(caught.value).split("\n")
        assert problem == "<file object>: no tensor name begins with the prefix 'nett'"
        assert hint == "There are tensors below: model, x"

    def test_empty_prefix_selects_the_root(self) -> None:
        file = file_of({**nn.Linear(2, 2).state_dict(), "inner": nn.Linear(2, 2).state_dict()})
        result = load_into(nn.Linear(2, 2), file, prefix="", strict=False)
        assert result.unexpected_keys == ["inner"]

    def test_pickled_module_is_read_without_unpickling(self, data: Path) -> None:
        expected = torch.load(data / "h200" / "whole_module_cuda0.pt", map_location="cpu", weights_only=False)
        model = type(expected)(
            *(type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in expected)
        )
        load_into(model, data / "h200" / "whole_module_cuda0.pt")
        assert_same_state(model, expected)

    def test_other_attributes_of_a_pickled_module_are_not_unexpected_keys(self) -> None:
        expected, model = seeded_net(1), seeded_net()  # with a non-persistent buffer
        expected.mask = torch.ones(3)
        for value in (expected, {"model": expected}):
            assert not load_into(model, file_of(value)).unexpected_keys
        assert_same_state(model, expected)


class TestPrefixes:
    @pytest.mark.parametrize(
        ("rename", "note"),
        [
            ("module.{}", "removed 'module.' from 12 keys"),
            ("_orig_mod.{}", "removed '_orig_mod.' from 12 keys"),
            ("model.{}", "removed 'model.' from 12 keys"),
            ("module._orig_mod.{}", "removed 'module._orig_mod.' from 12 keys"),
            ("_orig_mod.module.model.{}", "removed '_orig_mod.module.model.' from 12 keys"),
        ],
    )
    def test_wrapper_prefix_is_removed_with_a_warning(self, rename: str, note: str) -> None:
        model = seeded_net(1)
        file = file_of(
            {"state_dict": {rename.format(name): t for name, t in seeded_net().state_dict().items()}, "epoch": 1}
        )
        with pytest.warns(KeysWarning, match=note) as caught:
            result = load_into(model, file)
        assert (result.found, result.notes) == ("state_dict", (note,))
        assert [warning.filename for warning in caught] == [__file__]
        assert repr(result) == f"<All keys matched successfully; found in state_dict; {note}>"
        assert_same_state(model, seeded_net())

    def test_keys_beside_the_model_are_left_out_with_a_warning(self) -> None:
        model = seeded_net(1)
        state = {f"model.{name}": tensor for name, tensor in seeded_net().state_dict().items()}
        file = file_of({"state_dict": {**state, "loss.weight": torch.ones(3), "steps_done": 4}})
        with pytest.warns(KeysWarning, match=r"removed 'model\.' from 12 keys, and left out 1 without it"):
            assert load_into(model, file) == ([], [])
        assert_same_state(model, seeded_net())

    def test_key_without_the_wrapper_prefix_is_unexpected(self) -> None:
        state = {f"module.{name}": tensor for name, tensor in seeded_net().state_dict().items()}
        with pytest.raises(MismatchError, match="only in the file: loss"):
            load_into(seeded_net(1), file_of({**state, "loss": torch.ones(3)}))

    def test_wrapper_prefix_is_added_for_a_wrapped_model(self) -> None:
        model = nn.DataParallel(seeded_net(1))
        with pytest.warns(KeysWarning, match=r"put 'module\.' before 12 keys"):
            load_into(model, file_of(seeded_net().state_dict()))
        assert_same_state(model.module, seeded_net())

    def test_wrapper_prefix_is_replaced_by_another(self) -> None:
        model = nn.DataParallel(seeded_net(1))
        with pytest.warns(KeysWarning, match=r"replaced '_orig_mod\.' by 'module\.' in 12 keys"):
            load_into(model, file_of({f"_orig_mod.{name}": t for name, t in seeded_net().state_dict().items()}))
        assert_same_state(model.module, seeded_net())

    def test_wrapper_name_of_a_compiled_submodule_is_removed(self) -> None:
        model = seeded_net(1)
        state = {name.replace("stem.", "stem._orig_mod."): tensor for name, tensor in seeded_net().state_dict().items()}
        with pytest.warns(KeysWarning, match="removed the names of wrappers from 7 keys"):
            load_into(model, file_of(state))
        assert_same_state(model, seeded_net())

    def test_wrapper_prefix_is_added_for_a_compiled_model(self) -> None:
        model = seeded_net(1)
        try:
            compiled = torch.compile(model, backend="eager")
        except RuntimeError as error:
            pytest.skip(str(error))  # this release does not support it on this Python
        with pytest.warns(KeysWarning, match=r"put '_orig_mod\.' before 12 keys"):
            load_into(compiled, file_of(seeded_net().state_dict()))
        assert_same_state(model, seeded_net())

    def test_prefix_that_the_model_also_has_is_kept(self) -> None:
        model = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        other = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        assert load_into(model, file_of(other.state_dict())).notes == ()
        assert_same_state(model, other)

    def test_prefix_is_added_for_a_model_around_the_saved_body(self) -> None:
        model = nn.ModuleDict({"model": nn.Linear(2, 2), "lm_head": nn.Linear(2, 3)})
        body = nn.Linear(2, 2)
        with pytest.warns(KeysWarning, match=r"put 'model\.' before 2 keys"):
            result = load_into(model, file_of(body.state_dict()), strict=False)
        assert result.missing_keys == ["lm_head.weight", "lm_head.bias"]
        assert torch.equal(model["model"].weight, body.weight)


class Encoder(nn.Module):
    """An encoder with an embedding, a norm and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


class Classifier(nn.Module):
    """A model around an Encoder, like BertForSequenceClassification around BertModel."""

    def __init__(self, labels: int = 2) -> None:
        super().__init__()
        self.bert = Encoder()
        self.classifier = nn.Linear(3, labels)


class TestRenaming:
    @pytest.mark.parametrize(
        "rename",
        [
            {"encoder.": "bert.", "head.weight": "classifier.weight", "head.bias": "classifier.bias"},
            {"encoder.": "bert.", "head.": "classifier.", "enc": "no such key", "e": "no prefix"},
            [(r"^encoder\.", "bert."), (r"^head", "classifier")],
            [(re.compile("encoder"), "bert"), ("(h)ead", "classifier")],
            lambda key: key.replace("encoder", "bert").replace("head", "classifier"),
        ],
        ids=["keys", "prefixes", "patterns", "compiled", "function"],
    )
    @pytest.mark.parametrize("nested", [False, True])
    def test_rename_in_every_form(self, rename: Any, nested: bool) -> None:
        saved, model = Classifier(), Classifier()
        state = saved.state_dict()
        for key in list(state):
            state[key.replace("bert", "encoder").replace("classifier", "head")] = state.pop(key)
        result = load_into(model, file_of({"state_dict": state, "epoch": 3} if nested else state), rename=rename)
        assert (result.found, result.notes) == ("state_dict" if nested else "", ())
        assert result == ([], [])
        assert_same_state(model, saved)

    def test_rename_with_one_pattern(self) -> None:
        model, saved = nn.Linear(2, 2), nn.Linear(2, 2)
        state = {f"old_{name}": tensor for name, tensor in saved.state_dict().items()}
        load_into(model, file_of(state), rename=("^old_(.*)", r"\1"))
        assert_same_state(model, saved)

    @pytest.mark.parametrize("rename", [{"loss.": None, "x": None}, lambda key: None if key[0] in "lx" else key])
    def test_rename_to_none_leaves_keys_out(self, rename: Any) -> None:
        model, saved = nn.Linear(2, 2), nn.Linear(2, 2)
        state = {**saved.state_dict(), "loss.weight": torch.ones(1), "x": 4}
        assert load_into(model, file_of(state), rename=rename) == ([], [])
        assert_same_state(model, saved)
        nested = {**saved.state_dict(), "loss": {"weight": torch.ones(1), "n": 1}, "x": 4}
        assert load_into(model, file_of(nested), rename=rename) == ([], [])

    def test_wrapper_prefix_is_removed_after_renaming(self) -> None:
        model, saved = nn.Linear(2, 2), nn.Linear(2, 2)
        state = {f"old.{name}": tensor for name, tensor in saved.state_dict().items()}
        with pytest.warns(KeysWarning, match=r"removed 'module\.' from 2 keys"):
            load_into(model, file_of(state), rename={"old.": "module."})
        assert_same_state(model, saved)

    def test_rename_below_a_prefix(self) -> None:
        model, saved = nn.ModuleDict({"b": nn.Linear(2, 2)}), nn.Linear(2, 2)
        file = file_of({"ema": {f"a.{name}": tensor for name, tensor in saved.state_dict().items()}, "model": {}})
        load_into(model, file, prefix="ema", rename={"a.": "b."})
        assert_same_state(model["b"], saved)

    def test_extra_state_is_renamed_too(self) -> None:
        model, saved = nn.ModuleDict({"b": Extra()}), Extra()
        saved.set_extra_state({"at": "renamed"})
        state = {f"a.{name}": value for name, value in saved.state_dict().items()}
        assert load_into(model, file_of(state), rename={"a.": "b."}) == ([], [])
        assert model["b"].get_extra_state() == saved.get_extra_state()

    def test_rename_for_a_module_with_custom_loading(self) -> None:
        model, saved = nn.ModuleDict({"b": Renaming()}), Renaming()
        state = {f"a.{name}": value for name, value in saved.state_dict().items()}
        assert load_into(model, file_of(state), rename={"a.": "b."}) == ([], [])
        assert_same_state(model["b"], saved)

    def test_rename_of_two_keys_to_one_name_is_an_error(self) -> None:
        state = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}
        with pytest.raises(UsageError, match="several keys of the file the same name: weight"):
            load_into(nn.Linear(2, 2, bias=False), file_of(state), rename=("^[ab].", ""))

    @pytest.mark.parametrize(
        ("rename", "message"),
        [
            (3, "rename is of type int"),
            ({1: "a"}, "rename has 1: 'a'"),
            ({"a": 2}, "rename has 'a': 2"),
            (("(", ""), "rename has .*, which cannot be used"),
            ([("a", "\\3")], "rename has .*, which cannot be used"),
            ([("a{99999999999999}", "")], "rename has .*, which cannot be used"),
            ([("(" * 3000 + ")" * 3000, "")], "rename has .*, which cannot be used"),
            ([("a", 1)], "rename has .*, which cannot be used"),
            (["abc"], "rename has 'abc', which cannot be used"),
            (lambda _: 7, "the function given as rename returned int for 'weight'"),
        ],
    )
    def test_invalid_rename_is_an_error(self, rename: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            load_into(nn.Linear(2, 2), file_of(nn.Linear(2, 2).state_dict()), rename=rename)


class TestEncoderIntoClassifier:
    def test_error_suggests_the_call_that_works(self) -> None:
        saved, model = Encoder(), Classifier()
        before = cloned_state(model)
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of(saved.state_dict()))
        assert_untouched(model, before)
        assert caught.value.fix == 'rename={"": "bert."}, strict=False loads 10 of 12 keys.'
        result = load_into(model, file_of(saved.state_dict()), rename={"": "bert."}, strict=False)
        assert result == (["classifier.weight", "classifier.bias"], [])
        assert_same_state(model.bert, saved)

    @pytest.mark.parametrize("prefix", ["module.", "deberta."])
    def test_suggestion_replaces_another_prefix_of_the_file(self, prefix: str) -> None:
        saved, model = Encoder(), Classifier()
        state = {prefix + name: tensor for name, tensor in saved.state_dict().items()}
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of({"model": state}), strict=False)
        assert f'rename={{"{prefix}": "bert."}}, strict=False' in caught.value.fix
        load_into(model, file_of({"model": state}), rename={prefix: "bert."}, strict=False)
        assert_same_state(model.bert, saved)

    def test_suggestion_keeps_names_that_already_fit(self) -> None:
        saved, model = Classifier(), Classifier()
        state = {name.removeprefix("bert."): tensor for name, tensor in saved.state_dict().items()}
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of(state))
        assert caught.value.fix == 'rename={"": "bert.", "classifier.": "classifier."} loads 12 of 12 keys.'
        load_into(model, file_of(state), rename={"": "bert.", "classifier.": "classifier."})
        assert_same_state(model, saved)

    def test_no_suggestion_that_gives_two_keys_one_name(self) -> None:
        state = Encoder().state_dict()
        state |= {f"bert.{name}": tensor for name, tensor in state.items() if name.startswith("layers.0")}
        with pytest.raises(MismatchError) as caught:
            load_into(Classifier(), file_of(state))
        assert caught.value.fix == "strict=False loads what fits."

    def test_suggestion_names_every_option_that_is_needed(self) -> None:
        saved, model = Encoder().half(), Classifier()
        state = {**saved.state_dict(), "embeddings.weight": torch.ones(7, 3, dtype=torch.float16)}
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of(state))
        call = 'rename={"": "bert."}, strict=False, ignore_mismatched_sizes=True, cast=True'
        assert caught.value.fix == f"{call} loads 9 of 12 keys."
        with pytest.warns(KeysWarning, match="left 1 key of another shape"):
            load_into(
                model, file_of(state), rename={"": "bert."}, strict=False, ignore_mismatched_sizes=True, cast=True
            )


class Rotary(nn.Module):
    """A module with a buffer that is computed and not saved, like the rotary embedding of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


class TestLeftOnMeta:
    def test_buffers_missing_in_the_file_are_named(self) -> None:
        saved = nn.Sequential(Rotary(), Rotary())
        with torch.device("meta"):
            model = nn.Sequential(Rotary(), Rotary())
        note = "still on the meta device, since the file has no values for them: 0.inv_freq, 1.inv_freq"
        with pytest.warns(LandingWarning, match=note) as caught:
            result = load_into(model, file_of(saved.state_dict()))
        assert [warning.filename for warning in caught] == [__file__]
        assert (result, result.notes) == (([], []), (note,))
        assert model[0].inv_freq.is_meta

    def test_parameter_of_another_shape_is_named(self) -> None:
        with torch.device("meta"):
            model = Classifier(2)
        with pytest.warns(KeysWarning), pytest.warns(LandingWarning, match="meta device.*: classifier.weight"):
            load_into(model, file_of(Classifier(3).state_dict()), ignore_mismatched_sizes=True)

    def test_no_warning_for_a_real_model_or_a_requested_meta_device(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_into(Rotary(), file_of(Rotary().state_dict()))
            with torch.device("meta"):
                model = Rotary()
            load_into(model, file_of(Rotary().state_dict()), device="meta")


class TestMismatchedSizes:
    def test_mismatched_parameters_are_kept_and_named(self) -> None:
        saved, model = Classifier(3), Classifier(2)
        saved.classifier.bias = model.classifier.bias
        before = cloned_state(model.classifier)
        differing = "classifier.weight ([3, 3] in the file, [2, 3] in the model)"
        note = f"left 1 key of another shape as in the model: {differing}"
        with pytest.warns(KeysWarning, match=re.escape(note)):
            result = load_into(model, file_of(saved.state_dict()), ignore_mismatched_sizes=True)
        assert (result, result.notes) == (([], []), (note,))
        assert repr(result) == f"<All other keys matched successfully; {note}>"
        assert_same_state(model.bert, saved.bert)
        assert_untouched(model.classifier, before)

    def test_keys_and_dtypes_must_still_match(self) -> None:
        state = Classifier(3).state_dict()
        with pytest.raises(MismatchError, match="only in the file: x"):
            load_into(Classifier(), file_of({**state, "x": torch.ones(1)}), ignore_mismatched_sizes=True)
        with pytest.raises(MismatchError, match="of another dtype, 9 keys"):
            load_into(Classifier(), file_of(Classifier(3).half().state_dict()), ignore_mismatched_sizes=True)

    def test_tied_weight_is_loaded_under_the_name_that_fits(self) -> None:
        state = {**seeded_net().state_dict(), "head.weight": torch.ones(3, 4)}
        model = seeded_net(1)
        with pytest.warns(KeysWarning, match="head.weight"):
            load_into(model, file_of(state), ignore_mismatched_sizes=True)
        assert torch.equal(model.head.weight, seeded_net().embed.weight)


class TestTargets:
    def test_parameters_keep_their_identity_and_memory(self) -> None:
        model = seeded_net(1)
        before = {name: (id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
        load_into(model, file_of(seeded_net().state_dict()))
        assert {name: (id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == before
        assert_same_state(model, seeded_net())

    def test_autograd_detects_the_change(self) -> None:
        model = nn.Linear(2, 2)
        out = model(torch.ones(1, 2).requires_grad_()).pow(2).sum()
        load_into(model, file_of(nn.Linear(2, 2).state_dict()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()

    def test_every_layout_in_file_and_model(self) -> None:
        base = torch.arange(24.0).view(2, 3, 4)
        layouts = [base, base.permute(2, 0, 1).contiguous().permute(1, 2, 0), torch.arange(48.0)[::2].view(2, 3, 4)]
        layouts.append(torch.zeros(2, 3, 4).copy_(base)[:, :, :].transpose(0, 1).contiguous().transpose(0, 1))
        for in_model in layouts:
            for in_file in layouts:
                module = nn.ParameterDict({"w": nn.Parameter(torch.empty_strided(in_model.shape, in_model.stride()))})
                load_into(module, file_of({"w": in_file}))
                assert torch.equal(module["w"], in_file)
                assert module["w"].stride() == in_model.stride()

    def test_meta_parameters_are_materialized_and_stay_tied(self) -> None:
        model = meta()
        model.head.weight = model.embed.weight
        model.scale.requires_grad = False
        model.embed.weight.mark = "kept"
        with pytest.warns(LandingWarning, match="unsaved"):
            assert load_into(model, file_of(seeded_net().state_dict())) == ([], [])
        assert_same_state(model, seeded_net())
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.mark == "kept"
        assert (model.scale.requires_grad, model.turned.requires_grad) == (False, True)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert {str(t.device) for t in model.state_dict().values()} == {"cpu"}

    @pytest.mark.filterwarnings("ignore::transload.errors.LandingWarning")
    def test_real_parameters_are_filled_from_a_file_of_an_absent_device(self, data: Path) -> None:
        state = torch.load(data / "h200" / "state_dict_cuda1.pt", map_location="cpu")
        model = nn.Conv2d(*reversed(state["conv.weight"].shape[:2]), state["conv.weight"].shape[2:])
        assert load_into(model, data / "h200" / "state_dict_cuda1.pt", prefix="conv") == ([], [])
        assert torch.equal(model.weight, state["conv.weight"])

    def test_meta_parameters_filled_from_a_file_of_an_absent_device_warn(self, data: Path) -> None:
        state = torch.load(data / "h200" / "state_dict_cuda1.pt", map_location="cpu")
        size = state["fc.weight"].shape
        model = nn.Linear(size[1], size[0], device="meta")
        with pytest.warns(LandingWarning, match="saved on cuda:1"):
            load_into(model, data / "h200" / "state_dict_cuda1.pt", prefix="fc")
        quiet = nn.Linear(size[1], size[0], device="meta")
        load_into(quiet, data / "h200" / "state_dict_cuda1.pt", prefix="fc", device="cpu")
        assert torch.equal(quiet.weight, state["fc.weight"])

    def test_tied_weight_saved_under_one_name(self) -> None:
        model, state = seeded_net(1), seeded_net().state_dict()
        del state["head.weight"]
        assert load_into(model, file_of(state)) == ([], [])
        assert_same_state(model, seeded_net())

    def test_weight_tied_only_in_the_model_takes_the_last_value_like_torch(self) -> None:
        model, other, state = seeded_net(1), seeded_net(1), seeded_net().state_dict()
        state["embed.weight"], state["head.weight"] = torch.zeros(10, 4), torch.ones(10, 4)
        load_into(model, file_of(state))
        other.load_state_dict(state)
        assert_same_state(model, other)

    def test_weights_tied_only_in_the_file_stay_separate(self) -> None:
        weight = torch.randn(2, 2)
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        load_into(model, file_of({"0.weight": weight, "1.weight": weight}))
        assert torch.equal(model[0].weight, model[1].weight)
        assert model[0].weight is not model[1].weight

    def test_tied_weight_is_read_once(self) -> None:
        file = CountingFile()
        torch.save({"0.weight": torch.ones(1000, 1000), "1.weight": torch.ones(1000, 1000)}, file)
        file.seek(0)
        model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))
        model[1].weight = model[0].weight
        load_into(model, file)
        assert 4_000_000 <= file.count() < 4_200_000


class TestDtypes:
    def test_dtypes_are_converted_only_with_cast(self) -> None:
        model, before = seeded_net(1), cloned_state(seeded_net(1))
        file = file_of(
            {name: t.half() if t.is_floating_point() else t for name, t in seeded_net().state_dict().items()}
        )
        with pytest.raises(MismatchError) as caught:
            load_into(model, file)
        assert str(caught.value).splitlines()[1:] == [
            "of another dtype, 10 keys: float16 in the file, float32 in the model",
            "cast=True converts them while they are read.",
        ]
        assert_untouched(model, before)
        assert load_into(model, file, cast=True) == ([], [])
        for name, tensor in seeded_net().state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor.half().to(tensor.dtype))

    def test_dtypes_of_meta_parameters_are_converted_only_with_cast(self) -> None:
        model = nn.Linear(3, 3, device="meta", dtype=torch.bfloat16)
        state = nn.Linear(3, 3).state_dict()
        with pytest.raises(MismatchError, match="float32 in the file, bfloat16 in the model"):
            load_into(model, file_of(state))
        load_into(model, file_of(state), cast=True)
        assert torch.equal(model.weight, state["weight"].bfloat16())

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "bool", "complex64", "uint8", "int16", "float64"])
    def test_dtypes_of_every_size(self, name: str) -> None:
        dtype = getattr(torch, name)
        expected = torch.arange(12).view(3, 4).to(dtype)
        try:
            file = file_of({"w": expected})
        except KeyError:
            pytest.skip("this torch cannot save it")
        for stride in ((4, 1), (1, 3), (8, 2)):
            module = nn.Module()
            module.register_buffer("w", torch.empty_strided((3, 4), stride, dtype=dtype))
            load_into(module, file)
            assert raw(module.w) == raw(expected)
            assert module.w.stride() == stride


class TestMismatches:
    def mismatch_error(self, model: nn.Module, state: Any, **options: Any) -> MismatchError:
        before = cloned_state(model)
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of(state), **options)
        assert_untouched(model, before)
        assert isinstance(caught.value, RuntimeError)
        return caught.value

    def test_renamed_part_is_recognized(self) -> None:
        def net(name: str, deep: int) -> nn.Module:
            body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(deep)))
            return nn.ModuleDict({name: body, "head": nn.Linear(3, 2)})

        error = self.mismatch_error(net("backbone", 60), {"state_dict": net("encoder", 60).state_dict()})
        assert str(error) == (
            "<file object> › state_dict: it does not fit ModuleDict: it has 2 of the model's 122 keys\n"
            "probably the same under other names:\n"
            "  encoder.* in the file ↔ backbone.* in the model: 120 keys\n"
            'rename={"encoder.": "backbone."} loads 122 of 122 keys.'
        )
        assert len(error.missing_keys) == len(error.unexpected_keys) == 120
        assert error.missing_keys[0] == "backbone.0.weight"

    def test_part_of_a_larger_model_is_recognized(self) -> None:
        backbone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        state = {
            **{f"backbone.{name}": t for name, t in backbone.state_dict().items()},
            "head.weight": torch.ones(2, 5),
        }
        error = self.mismatch_error(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), {"state_dict": state})
        assert str(error).splitlines()[1:] == [
            "probably the same under other names:",
            "  backbone.* in the file ↔ * in the model: 4 keys",
            "only in the file: head.weight",
            "prefix='state_dict/backbone.' takes that part of the file.",
        ]
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        load_into(model, file_of({"state_dict": state}), prefix="state_dict/backbone.")
        assert_same_state(model, backbone)

    def test_shapes_are_shown_as_a_table(self) -> None:
        state = seeded_net().state_dict()
        state["stem.0.weight"], state["steps"] = torch.ones(4, 1, 3, 3), torch.ones(2, dtype=torch.int64)
        error = self.mismatch_error(seeded_net(1), state, strict=False)
        assert str(error).splitlines()[1:] == [
            "of another shape, 2 keys:",
            "  key            file          model",
            "  steps          [2]           []",
            "  stem.0.weight  [4, 1, 3, 3]  [4, 3, 3, 3]",
            "ignore_mismatched_sizes=True leaves them as they are in the model.",
        ]
        assert [tuple(mismatch) for mismatch in error.shapes] == [
            ("steps", "[2]", "[]"),
            ("stem.0.weight", "[4, 1, 3, 3]", "[4, 3, 3, 3]"),
        ]

    def test_file_with_a_single_tensor_is_described(self) -> None:
        assert str(self.mismatch_error(nn.Linear(2, 2), torch.eye(2))).splitlines()[1:] == [
            "missing in the file: weight, bias",
            "only in the file: a tensor without a name, float32 [2, 2]",
        ]

    def test_many_keys_are_grouped(self) -> None:
        model = nn.ModuleDict(
            {"encoder": nn.Sequential(*(nn.Linear(2, 2) for _ in range(200))), "head": nn.Linear(2, 2)}
        )
        state = {f"other.{i}.table": torch.ones(i + 1) for i in range(300)} | nn.Linear(2, 2).state_dict()
        error = self.mismatch_error(
            model, {f"head.{name}" if name in ("weight", "bias") else name: t for name, t in state.items()}
        )
        assert str(error).splitlines()[1:] == [
            "missing in the file, 400 keys: encoder.* (400)",
            "only in the file, 300 keys: other.* (300)",
            "strict=False loads what fits.",
        ]

    def test_many_shapes_are_abbreviated(self) -> None:
        model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(50))
        error = self.mismatch_error(model, {str(i): torch.ones(3) for i in range(50)})
        assert len(str(error).splitlines()) == 17
        assert str(error).splitlines()[-2] == "  and 38 more"
        assert len(error.shapes) == 50

    def test_no_common_key_is_an_error_even_when_not_strict(self) -> None:
        error = self.mismatch_error(seeded_net(), {"a": torch.ones(1), "b": torch.ones(2)}, strict=False)
        assert str(error).startswith("<file object>: it does not fit Net: it has 0 of the model's 12 keys\n")

    def test_file_without_tensors_is_an_error(self) -> None:
        assert len(self.mismatch_error(nn.Linear(1, 1), {"epoch": 3}).missing_keys) == 2

    def test_values_among_the_weights_are_unexpected_keys(self) -> None:
        state = {**nn.Linear(2, 2).state_dict(), "epoch": 3, "extra": {"a": [torch.ones(1)]}}
        error = self.mismatch_error(nn.Linear(2, 2), state)
        assert (error.missing_keys, sorted(error.unexpected_keys)) == ([], ["epoch", "extra"])

    def test_truncated_file_changes_nothing(self) -> None:
        data = forge.legacy()
        model = nn.ParameterDict({"w0": torch.zeros(4), "w1": torch.zeros(4)})
        with pytest.raises(BrokenFileError, match="the bytes of w1 are incomplete"):
            load_into(model, data[:-8])
        assert model["w0"].tolist() == [0.0] * 4

    def test_error_while_reading_says_that_the_model_may_be_partly_filled(self) -> None:
        model = nn.ParameterDict({"w0": torch.zeros(4), "w1": torch.zeros(4)})
        records = forge.with_changes(forge.entries(method=8), "data/1", raw=b"\xff" * 20)
        with pytest.raises(BrokenFileError, match="The model may be partly filled"):
            load_into(model, forge.archive(records))

    def test_file_that_is_not_a_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "x.pt").write_text("<html>")
        with pytest.raises(NotACheckpointError):
            load_into(seeded_net(), tmp_path / "x.pt")


class TestNotStrict:
    @pytest.mark.parametrize("drop", ["stem.0.bias", "scale", "head.weight embed.weight", "steps"])
    def test_missing_and_unexpected_keys_equal_torch(self, drop: str) -> None:
        state = seeded_net().state_dict()
        for name in drop.split():
            del state[name]
        state["new.weight"], state["other"] = torch.ones(1), torch.ones(2)
        model, other = seeded_net(1), seeded_net(1)
        result, expected = load_into(model, file_of(state), strict=False), other.load_state_dict(state, strict=False)
        assert (sorted(result.missing_keys), sorted(result.unexpected_keys)) == tuple(map(sorted, expected))
        assert_same_state(model, other)

    def test_result_unpacks_as_a_pair(self) -> None:
        missing, unexpected = load_into(
            nn.Linear(2, 2), file_of({"weight": torch.ones(2, 2), "x": torch.ones(1)}), strict=False
        )
        assert (missing, unexpected) == (["bias"], ["x"])
        assert repr(Loaded(missing, unexpected)) == "<missing_keys=['bias'], unexpected_keys=['x']>"

    def test_batch_norm_of_an_old_file(self) -> None:
        state = seeded_net().state_dict()
        del state["stem.1.num_batches_tracked"]
        model, other = seeded_net(1), seeded_net(1)
        with pytest.raises(
            MismatchError, match=r"num_batches_tracked"
        ):  # its version metadata says that the key must be there
            load_into(model, file_of(state))
        plain = dict(state)
        assert load_into(model, file_of(plain)) == other.load_state_dict(plain) == ([], [])
        assert_same_state(model, other)

    def test_one_element_tensor_of_torch_0_3_fills_a_scalar(self) -> None:
        state = {**seeded_net().state_dict(), "scale": torch.tensor([5.0])}
        model = seeded_net(1)
        load_into(model, file_of(state))
        assert model.scale.item() == 5.0


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Uncopyable(torch.Tensor):
    """A tensor that cannot be written into."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "copy_":
            raise RuntimeError("nobody writes into me")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_buffer_that_rejects_copy_is_an_error() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    model.register_buffer("b", torch.zeros(2).as_subclass(Uncopyable))
    with pytest.raises(LoadError, match="what was read for b cannot be copied into it: nobody writes into me"):
        load_into(model, file_of({"a": torch.ones(2), "b": torch.ones(2)}))


class TestExtraState:
    @pytest.mark.parametrize(
        "value",
        [7, "text", None, b"raw", {"a": [1, 2.5], "t": torch.arange(3)}, torch.ones(3), OrderedDict(x=(1, 2)), {}, []],
    )
    def test_extra_state_equals_torch(self, value: Any) -> None:
        source, target = nn.Sequential(Extra(), Extra()), nn.Sequential(Extra(), Extra())
        source[1].extra = value
        file = file_of({"model": source.state_dict()})
        assert load_into(target, file) == ([], [])
        assert target[0].extra is None
        assert_same(target[1].extra, torch.load(io.BytesIO(file.getvalue()))["model"]["1._extra_state"])

    def test_extra_state_below_a_prefix(self) -> None:
        source, target = Extra(), Extra()
        source.extra = {"a": 1}
        assert load_into(target, file_of({"x": {"y": source.state_dict()}}), prefix="x/y") == ([], [])
        assert target.extra == {"a": 1}

    def test_missing_extra_state_is_an_error(self) -> None:
        with pytest.raises(MismatchError, match="missing in the file: _extra_state"):
            load_into(Extra(), file_of(nn.Linear(2, 2).state_dict()))

    def test_extra_state_that_needs_trust_is_refused_before_any_change(self) -> None:
        source, target = Extra(), Extra()
        source.extra = io.BytesIO(b"x")
        before = target.weight.clone()
        with pytest.raises(LoadError, match=r"_io\.BytesIO, which is not allowed"):
            load_into(target, file_of(source.state_dict()))
        assert torch.equal(target.weight, before)


class Renaming(nn.Module):
    """A module with custom code that loads its older files."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2 and prefix + "linear.weight" in state_dict:
            for name in ("weight", "bias"):
                state_dict[f"{prefix}proj.{name}"] = state_dict.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class TestModulesWithCustomLoading:
    def test_older_key_names(self) -> None:
        source = Renaming()
        state = {name.replace("proj", "linear"): tensor for name, tensor in source.state_dict().items()}
        model, other = nn.Sequential(nn.Linear(2, 2), Renaming()), nn.Sequential(nn.Linear(2, 2), Renaming())
        full_state = {
            **{f"0.{n}": t for n, t in nn.Linear(2, 2).state_dict().items()},
            **{f"1.{n}": t for n, t in state.items()},
        }
        assert load_into(model, file_of(full_state)) == other.load_state_dict(full_state) == ([], [])
        assert_same_state(model, other)

    def test_current_key_names(self) -> None:
        model, source = nn.Sequential(Renaming()), nn.Sequential(Renaming())
        assert load_into(model, file_of(source.state_dict())) == ([], [])
        assert_same_state(model, source)

    def test_custom_loading_on_the_meta_device(self) -> None:
        source = nn.Sequential(Renaming())
        with torch.device("meta"):
            model = nn.Sequential(Renaming())
        assert load_into(model, file_of(source.state_dict())) == ([], [])
        assert_same_state(model, source)

    def test_errors_of_custom_loading_are_reported(self) -> None:
        model = nn.Sequential(Renaming())
        state = model.state_dict()
        del state["0.norm.bias"]
        state["0.norm.weight"] = torch.ones(3)
        with pytest.raises(MismatchError) as caught:
            load_into(model, file_of(state))
        assert caught.value.missing_keys == ["0.norm.bias"]
        assert "size mismatch for 0.norm.weight" in str(caught.value)

    def test_load_state_dict_pre_hook(self) -> None:
        def rename(module: Any, state: Any, prefix: str, *_: Any) -> None:  # noqa: ARG001 - as torch calls it
            for key in list(state):
                if key.startswith(f"{prefix}old_"):
                    state[prefix + key[len(prefix) + 4 :]] = state.pop(key)

        model, source = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
        model[0]._register_load_state_dict_pre_hook(rename, with_module=True)
        load_into(model, file_of({f"0.old_{name}": tensor for name, tensor in source.state_dict().items()}))
        assert_same_state(model[0], source)

    def test_weight_norm_with_key_names_of_older_releases(self) -> None:
        model, source = (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))) for _ in range(2))
        state = source.state_dict()
        state["0.weight_g"] = state.pop("0.parametrizations.weight.original0")
        state["0.weight_v"] = state.pop("0.parametrizations.weight.original1")
        assert load_into(model, file_of(state)) == ([], [])
        assert_same_state(model, source)

    def test_weight_tied_to_a_module_with_custom_loading(self) -> None:
        def net() -> nn.Module:
            model = nn.ModuleDict({"body": Renaming(), "head": nn.Linear(2, 2)})
            model["head"].weight = model["body"].proj.weight
            return model

        source = net()
        with torch.device("meta"):
            model = net()
        assert load_into(model, file_of(source.state_dict())) == ([], [])
        assert_same_state(model, source)
        assert model["head"].weight is model["body"].proj.weight

    @pytest.mark.filterwarnings("ignore")
    def test_quantized_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def net() -> nn.Module:
            plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)

        if not working_engine():
            pytest.skip("this torch has no quantized engine")
        monkeypatch.setattr(torch.backends.quantized, "engine", working_engine())
        model, source = net(), net()
        assert load_into(model, file_of({"model": source.state_dict()})) == ([], [])
        assert torch.equal(model[0].weight().int_repr(), source[0].weight().int_repr())
        assert torch.equal(model(torch.ones(1, 4)), source(torch.ones(1, 4)))

    def test_lazy_parameters(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        source = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        load_into(model, file_of(source.state_dict()))
        assert_same_state(model, source)

    def test_load_state_dict_post_hook_may_clear_missing_keys(self) -> None:
        seen: list[Any] = []

        def clear_missing_keys(module: nn.Module, keys: Any) -> None:
            seen.append(module)
            keys.missing_keys.clear()

        model = nn.Sequential(nn.Linear(2, 2))
        model.register_load_state_dict_post_hook(clear_missing_keys)
        assert load_into(model, file_of({"0.weight": torch.ones(2, 2)})) == ([], [])
        assert seen == [model]
        assert model[0].weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


class TestFormats:
    @pytest.mark.parametrize("legacy", [False, True])
    def test_zip_and_legacy(self, legacy: bool) -> None:
        model = seeded_net(1)
        load_into(model, file_of(seeded_net().state_dict(), _use_new_zipfile_serialization=not legacy))
        assert_same_state(model, seeded_net())

    def test_safetensors(self, tmp_path: Path) -> None:
        save_model = pytest.importorskip("safetensors.torch").save_model
        save_model(seeded_net(), str(tmp_path / "x.safetensors"))  # without the second name of the tied weight
        model = seeded_net(1)
        load_into(model, tmp_path / "x.safetensors")
        assert_same_state(model, seeded_net())

    def test_sharded_checkpoint(self, tmp_path: Path) -> None:
        state = seeded_net().state_dict()
        names = list(state)
        for number in (1, 2):
            shard = {name: state[name] for name in names[number - 1 :: 2]}
            torch.save(shard, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
        weights = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
        index = {"metadata": {"total_size": 1}, "weight_map": weights}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        model = seeded_net(1)
        load_into(model, tmp_path)
        assert_same_state(model, seeded_net())

    def test_distributed_checkpoint(self, tmp_path: Path) -> None:
        if not hasattr(dcp := pytest.importorskip("torch.distributed.checkpoint"), "save"):
            pytest.skip("this torch has no dcp.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": seeded_net().state_dict(), "step": 1}, checkpoint_id=tmp_path / "x")
        model = seeded_net(1)
        load_into(model, tmp_path / "x")
        assert_same_state(model, seeded_net())

    def test_extracted_archive(self, tmp_path: Path) -> None:
        torch.save(seeded_net().state_dict(), tmp_path / "x.zip")
        shutil.unpack_archive(tmp_path / "x.zip", tmp_path / "out", "zip")
        model = seeded_net(1)
        load_into(model, tmp_path / "out")
        assert_same_state(model, seeded_net())

    @pytest.mark.parametrize("name", ["torchscript_cuda0.pt", "export_cuda0.pt2"])
    def test_torchscript_and_exported_program(self, data: Path, name: str) -> None:
        state = torch.load(data / "h200" / "state_dict_cuda0.pt", map_location="cpu")
        model = Fixture(state)
        result = load_into(model, data / "h200" / name, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], [])
        for key, tensor in state.items():
            assert torch.equal(model.state_dict()[key], tensor)

    def test_constants_of_a_program_are_not_unexpected_keys(self) -> None:
        model, expected, program = nn.Linear(2, 2), nn.Linear(2, 2), io.BytesIO()
        with zipfile.ZipFile(program, "w") as archive:
            archive.writestr("serialized_exported_program.json", "{}")
            archive.writestr("serialized_state_dict.pt", file_of(dict(expected.state_dict())).getvalue())
            archive.writestr("serialized_constants.pt", file_of({"k": torch.ones(2)}).getvalue())
        assert not load_into(model, program.getvalue()).unexpected_keys
        assert_same_state(model, expected)

    def test_bytes(self) -> None:
        model = nn.ParameterDict({"w0": torch.zeros(4), "w1": torch.zeros(4)})
        load_into(model, forge.checkpoint())
        assert model["w1"].tolist() == list(struct.unpack("<4f", struct.pack("<4f", 4, 5, 6, 7)))


class Fixture(nn.Module):
    """The model saved in the fixture files."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        conv, fc = state["conv.weight"].shape, state["fc.weight"].shape
        self.conv = nn.Conv2d(conv[1], conv[0], conv[2:])
        self.bn = nn.BatchNorm2d(conv[0])
        self.fc = nn.Linear(fc[1], fc[0])
        self.head = nn.Linear(fc[1], fc[0])
        self.head.weight = self.fc.weight


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("file", ["state_dict_cuda7.pt", "train_cuda0.ckpt", "whole_custom_cuda0.pt"])
def test_files_of_every_release_load_like_torch(folder: Path, file: str) -> None:
    state = torch.load(folder / "state_dict_cuda7.pt", map_location="cpu")
    model, other = Fixture(state), Fixture(state)
    other.load_state_dict(state, strict=False)
    result = load_into(model, folder / file, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.bias"] if "head.bias" not in state else [], [])
    for name in state:
        assert torch.equal(model.state_dict()[name], other.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_load_into_allocates_no_second_copy() -> None:
    """Reading into a model in memory allocates nothing as large as a tensor."""
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))
    file = file_of({"state_dict": model.state_dict()})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        load_into(model, file)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) < 100_000


def test_dictionary_is_not_a_module(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    target: Any = {"w": torch.zeros(2)}
    with pytest.raises(UsageError, match="expected a module, not dict"):
        load_into(target, tmp_path / "model.pt")


def test_the_memory_of_parameters_on_the_meta_device_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, free = meta(), Devices((Device("cpu", 100, 100),))
    monkeypatch.setattr("transload.loading.into.devices_here", lambda *_: free)
    with pytest.raises(DoesNotFitError, match="cpu has 100 B free and would need"):
        load_into(model, file_of(seeded_net().state_dict()))
    assert all(tensor.is_meta for tensor in model.parameters())
    load_into(seeded_net(1), file_of(seeded_net().state_dict()))  # which has its memory


# -- the state of optimizers


def trained(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer in two groups, after two steps."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = kind([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], **options)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


@each("kind, options", OPTIMIZERS)
def test_an_optimizer_goes_on_where_it_was_saved(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = trained(kind, **options)
    optimizer.param_groups[1]["lr"] = 0.5
    forms: dict[str, Any] = {"numbers": optimizer.state_dict()}
    if find_spec("torch.distributed.checkpoint.state_dict"):  # since torch 2.2
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        forms["names"] = get_optimizer_state_dict(model, optimizer)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        if optimizer.state:  # torch can only flatten what there is
            forms["flat"] = get_optimizer_state_dict(model, optimizer, options=flat)
    before, forms = copy.deepcopy((model.state_dict(), forms))
    step(model, optimizer)
    for name, form in forms.items():
        saved = {"model": before, "optim": form, "epoch": 3}
        torch.save(saved, tmp_path / name)
        write_dcp(saved, tmp_path / f"{name}-dcp")
        for path in (tmp_path / name, tmp_path / f"{name}-dcp"):
            for steps in (0, 1):  # whether the optimizer has made its state
                other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
                groups = [{"params": other[0].parameters()}, {"params": other[1].parameters()}]
                fresh = kind(groups, lr=0.3, **{key: value for key, value in options.items() if key != "lr"})
                for _ in range(steps):
                    step(other, fresh)
                load_into(other, path, optimizer=fresh)
                assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.5], path
                step(other, fresh)
                assert_same_state(other, model)


def test_an_optimizer_of_a_model_on_the_meta_device_gets_the_new_parameters() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    file = file_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fresh = torch.optim.AdamW([{"params": other[0].parameters()}, {"params": other[1].parameters()}])
    load_into(other, file, optimizer=fresh)
    step(other, fresh)
    assert_same_state(other, model)


@pytest.mark.parametrize("wanted", [torch.optim.AdamW, torch.optim.SGD])
def test_state_of_another_kind_of_optimizer_is_noted(wanted: Any) -> None:
    """torch loads it without a word, and the optimizer begins anew with settings that are not its own."""
    model, optimizer = trained(torch.optim.AdamW)
    for group in optimizer.param_groups:  # as an older release, with a scheduler, saved it
        del group["maximize"]
        group["initial_lr"] = 1.0
    file = file_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = wanted([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_into(model, file, optimizer=fresh)
    expected = "the file may be of another kind: it has amsgrad, betas, eps, this one has dampening, momentum"
    assert [expected in str(warning.message) for warning in caught] == ([True] if wanted is torch.optim.SGD else [])


def test_state_before_the_first_step_replaces_what_there_is() -> None:
    """As in torch: moments of other weights would be used with those that were loaded."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    file = file_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    assert optimizer.state
    load_into(model, file, optimizer=optimizer)
    assert not optimizer.state
    step(model, optimizer)
    without = {"model": model.state_dict(), "optimizer": {"state": optimizer.state_dict()["state"]}}
    with pytest.warns(KeysWarning, match="no settings for the optimizer, which keeps its own"):
        load_into(model, file_of(without), optimizer=optimizer)


def test_state_of_parameters_in_another_order_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    file = file_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    swapped = torch.optim.AdamW([model[0].weight, model[1].weight, model[0].bias, model[1].bias])
    with pytest.raises(LoadError, match=r"exp_avg of the optimizer for 1.weight has the shape \[3\], not \[3, 3\]"):
        load_into(model, file, optimizer=swapped)
    assert not swapped.state


def test_what_does_not_fit_an_optimizer_is_said() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(UsageError, match="2 of the 2 parameters of the optimizer are not in the model"):
        load_into(model, file_of(saved), optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(LoadError, match="the optimizer in it has groups of 2 and 2 parameters, this one of 4"):
        load_into(model, file_of(saved), optimizer=one_group)
    with pytest.raises(LoadError, match="no state of an optimizer"):
        load_into(model, file_of({"model": model.state_dict()}), optimizer=one_group)
    with pytest.raises(LoadError, match="several places have the state of such an optimizer: optimizer, again"):
        load_into(model, file_of({**saved, "again": optimizer.state_dict()}), optimizer=optimizer)
    assert not one_group.state
    state = optimizer.state_dict()
    del state["state"][1]
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    with pytest.warns(KeysWarning, match=r"no optimizer state for 0\.bias"):
        load_into(model, file_of({**saved, "optimizer": state}), optimizer=optimizer)
