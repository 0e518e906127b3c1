"""What ``diff`` finds between two checkpoints, in the same format and across formats."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests import forge
from tests.each import each
from tests.loading.sharded_models import write_dcp
from tests.makers import saved
from tests.quantized import working_engine
from tests.rank_files import write_ranks
from tests.release import SAVES_NEW_DTYPES
from tests.schema import validate

import transload
from transload.comparing import Diff, diff
from transload.comparing.names import Entry, paired
from transload.contents import Tensor
from transload.errors import CannotReadError, LoadError, UsageError
from transload.render.lines import Style, layout, plain

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "diff.schema.json"


def state() -> dict[str, torch.Tensor]:
    torch.default_generator.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 8),
        "layers.0.weight": torch.randn(8, 8).bfloat16(),
        "layers.0.bias": torch.arange(8),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(33).half(),
        "small": torch.randn(33).to(torch.float8_e4m3fn if SAVES_NEW_DTYPES else torch.int8),
    }


def compared(a: object, b: object, **options: Any) -> Diff:
    """The difference of two objects as ``torch.save`` writes them; the JSON is valid, and there is a text."""
    return checked(diff(saved(a), saved(b), **options))


def checked(result: Diff) -> Diff:
    validate(json.loads(json.dumps(result.to_dict(), allow_nan=False)), SCHEMA)
    assert str(result).startswith("same: " if result.same else ("different: ", "not compared: "))
    assert '<div class="tl-head">' in result._repr_html_()
    return result


def statuses(result: Diff) -> dict[str, str]:
    return {tensor.name: tensor.status for tensor in result.tensors if tensor.status != "same"}


def test_equal_checkpoints_are_the_same() -> None:
    result = compared({"model": state(), "epoch": 3}, {"model": state(), "epoch": 3})
    assert (result.same, result.value_count, statuses(result)) == (True, 1, {})
    assert str(result).startswith("same: 8 tensors, equal in all numbers\n")


def test_every_kind_of_difference_has_its_name() -> None:
    a, b = state(), state()
    b["embed.weight"][3, 3] += 0.5
    b["layers.0.bias"] = b["layers.0.bias"].int()
    b["scalar"] = b["scalar"].reshape(1)
    b["new"], _ = torch.ones(3), b.pop("mask")
    result = compared(a, b)
    assert not result.same
    assert statuses(result) == {
        "embed.weight": "different",
        "layers.0.bias": "different",
        "scalar": "different",
        "mask": "removed",
        "new": "added",
    }
    differs = {tensor.name: tensor.differs for tensor in result.tensors if tensor.differs}
    assert differs == {"embed.weight": ("values",), "layers.0.bias": ("dtype",), "scalar": ("shape",)}
    (values,) = [tensor.values for tensor in result.tensors if tensor.name == "embed.weight"]
    assert values is not None
    apart = (a["embed.weight"].double() - b["embed.weight"].double()).abs()
    assert (values.numbers, values.different, values.max_abs) == (320, 1, apart.max().item())
    assert "5 of 9 tensors differ; most in embed.weight, by up to 0.5" in str(result)


def test_numbers_of_other_dtypes_are_compared_as_numbers() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    small = [torch.float8_e5m2] if SAVES_NEW_DTYPES else []
    for dtype in (torch.bfloat16, torch.float16, torch.float64, *small):
        (tensor,) = compared({"w": weights}, {"w": weights.to(dtype)}).tensors
        apart = (weights.double() - weights.to(dtype).double()).abs()
        assert tensor.values is not None
        assert tensor.values.max_abs == apart.max().item()
        assert tensor.differs == (("dtype",) if dtype == torch.float64 else ("dtype", "values"))
    (tensor,) = compared({"w": weights}, {"w": weights.to(torch.complex64)}).tensors
    assert (tensor.differs, tensor.note) == (("dtype",), "real and complex numbers are not compared")


def test_views_are_compared_element_by_element() -> None:
    base = torch.randn(700, 900)
    views = {"t": base.T, "rows": base[::3], "columns": base[:, 5:17], "e": base[:1].expand(50, 900)}
    copies = {name: view.contiguous() for name, view in views.items()}
    assert compared(views, copies).same
    copies["t"][899, 699] += 1
    result = compared(views, copies)
    assert statuses(result) == {"t": "different"}


def test_nan_equals_nan_at_the_same_place_and_zero_equals_minus_zero() -> None:
    a = torch.tensor([1.0, torch.nan, torch.inf, 0.0])
    result = compared({"w": a}, {"w": torch.tensor([1.0, torch.nan, torch.inf, -0.0])})
    assert result.same
    assert (result.tensors[0].a or result.tensors[0].b)._asdict()["nan"] == 1  # type: ignore[union-attr]
    result = compared({"w": a}, {"w": torch.tensor([torch.nan, 1.0, torch.inf, 0.0])})
    values = result.tensors[0].values
    assert values is not None
    assert (values.different, values.nonfinite, values.max_abs) == (2, 2, 0.0)
    assert not result.same


def test_first_difference_at_the_end_of_a_large_tensor_is_measured_over_all_of_it() -> None:
    a = torch.randn(700_000, generator=torch.Generator().manual_seed(1))
    b = a.clone()
    b[-1] += 1
    values = compared({"w": a}, {"w": b}).tensors[0].values
    assert values is not None
    assert (values.numbers, values.different) == (700_000, 1)
    cosine = torch.cosine_similarity(a.double(), b.double(), dim=0).item()
    assert values.cosine == pytest.approx(cosine, rel=1e-12)


def test_tolerance_decides_what_is_the_same() -> None:
    a, b = {"w": torch.ones(10)}, {"w": torch.ones(10) + 1e-4}
    assert not compared(a, b, rtol=1e-5).same
    result = compared(a, b, rtol=1e-3)
    assert result.same
    assert str(result).startswith("same: 1 tensor, equal within the tolerance")
    assert result.tensors[0].values is not None
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(UsageError, match="rtol must be a number"):
            diff(saved(a), saved(b), rtol=wrong)  # type: ignore[arg-type]


# -- names


def test_prefix_of_all_names_is_found() -> None:
    plain_names, a = state(), state()
    for old, new in (("", "module."), ("module.", ""), ("model.", "backbone."), ("", "_orig_mod.module.")):
        one = {old + name: tensor for name, tensor in plain_names.items()}
        two = {new + name: tensor for name, tensor in a.items()}
        result = compared(one, two)
        assert {tensor.status for tensor in result.tensors} == {"renamed"}, (old, new)
        assert {tensor.evidence for tensor in result.tensors} == {
            f"prefix {new!r} for {old!r}" if old and new else f"prefix {(old or new)!r} {'removed' if old else 'added'}"
        }
        assert not result.same
        assert "8 tensors with the same numbers, under other names" in str(result)


def test_suffix_of_all_names_is_found() -> None:
    one = {f"{name}.weight": torch.randn(3) for name in "abc"}
    two = {f"{name}.orig": tensor + 1 for name, tensor in zip("abc", one.values(), strict=True)}
    result = compared(one, two)
    assert [tensor.renamed for tensor in result.tensors] == ["a.orig", "b.orig", "c.orig"]
    assert {tensor.status for tensor in result.tensors} == {"different"}


def test_renamed_tensors_are_found_by_equal_bytes() -> None:
    values = [torch.randn(4, 3) for _ in range(4)]
    one = dict(zip(["q", "k", "v", "zero.bias"], [*values[:3], torch.zeros(9)], strict=True))
    two = dict(
        zip(
            ["attn_query", "attn_value", "x", "norm.bias"],
            [values[0], values[2], values[3], torch.zeros(9)],
            strict=True,
        )
    )
    result = compared(one, two)
    renamed = {tensor.name: (tensor.renamed, tensor.evidence) for tensor in result.tensors if tensor.renamed}
    assert renamed == {
        "q": ("attn_query", "equal bytes"),
        "v": ("attn_value", "equal bytes"),
        "zero.bias": ("norm.bias", "equal bytes"),
    }
    assert statuses(result) | {"q": "", "v": "", "zero.bias": ""} == {
        "q": "",
        "v": "",
        "zero.bias": "",
        "k": "removed",
        "x": "added",
    }


def test_equal_zeros_prove_nothing_if_there_are_several() -> None:
    one = {"a.x": torch.zeros(4), "b.y": torch.zeros(4)}
    two = {"c.z": torch.zeros(4), "d.w": torch.zeros(4)}
    assert [tensor.status for tensor in compared(one, two).tensors] == ["removed", "removed", "added", "added"]


def test_repeated_names_are_paired_in_order() -> None:
    tensor = Tensor((), "a/b", "float32", (2,), (1,), "cpu", "0")
    entries = [Entry("a/b", tensor), Entry("a/b", tensor)]
    found = paired(entries, entries[:1], lambda _: "", lambda _: "")
    assert ([(pair.a, pair.b) for pair in found.pairs], found.only_a, found.only_b) == ([(0, 0)], [1], [])


# -- across formats


def test_formats_of_the_same_tensors_are_the_same(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "model.pt")
    torch.save(state(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state(), tmp_path / "model.safetensors")
    (tmp_path / "shards").mkdir()
    transload.convert(tmp_path / "model.pt", tmp_path / "shards" / "model.safetensors", max_shard_size="1kB")
    write_dcp(state(), tmp_path / "dcp")
    for other in ("legacy.pt", "model.safetensors", "shards", "dcp"):
        result = checked(diff(tmp_path / "model.pt", tmp_path / other))
        assert result.same, f"{other}\n{result}"
        assert len(result.tensors) == 8
    changed = state()
    changed["half"][7] = 9
    write_dcp(changed, tmp_path / "changed")
    for other in ("model.pt", "shards", "dcp"):
        assert statuses(diff(tmp_path / other, tmp_path / "changed")) == {"half": "different"}


def test_files_of_ranks_are_compared_as_the_whole(tmp_path: Path) -> None:
    write_ranks(tmp_path / "two")
    whole = transload.load(tmp_path / "two")
    torch.save(whole, tmp_path / "whole.pt")
    result = checked(diff(tmp_path / "two", tmp_path / "whole.pt"))
    assert result.same, str(result)
    assert result.tensors


def test_device_tags_are_compared_where_both_have_them() -> None:
    data = Path(__file__).parent.parent / "data" / "h200"
    result = checked(diff(data / "state_dict_cuda0.pt", data / "state_dict_cuda1.pt"))
    assert not result.same
    assert {tensor.differs for tensor in result.tensors} == {("device",)}
    assert diff(data / "state_dict_cuda0.pt", data / "state_dict_cuda0_legacy.pth").same


def test_untied_tensors_are_reported() -> None:
    one, two = state(), state()
    one["head.weight"], two["head.weight"] = one["embed.weight"], two["embed.weight"].clone()
    result = compared(one, two)
    assert [(tie.names, tie.only) for tie in result.ties] == [(("embed.weight", "head.weight"), "a")]
    assert not result.same
    assert "other tensors are tied" in str(result)
    two["head.weight"] = two["embed.weight"]
    assert compared(one, two).same


def test_alias_of_a_safetensors_file_is_a_tensor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    result = checked(diff(tmp_path / "model.pt", tmp_path / "model.safetensors"))
    assert result.same, str(result)
    assert len(result.tensors) == 2


# -- values that are no tensors


def test_values_are_compared() -> None:
    one = {"epoch": 3, "lr": 0.1, "name": "a" * 300, "groups": [{"betas": (0.9, 0.999), "nan": float("nan")}], "old": 1}
    two = {"epoch": 4, "lr": 0.1, "name": "a" * 299 + "b", "groups": [{"betas": (0.9, 0.99), "nan": float("nan")}]}
    result = compared(one, two)
    assert {value.name: (value.status, value.a, value.b) for value in result.values if value.name != "name"} == {
        "epoch": ("different", "3", "4"),
        "groups/0/betas/1": ("different", "0.999", "0.99"),
        "old": ("removed", "1", None),
    }
    assert [value.status for value in result.values if value.name == "name"] == ["different"]
    assert not result.same
    same = {**one, "bytes": b"x" * 1000, "device": torch.device("cuda", 1), "big": 1 << 300}
    assert compared(same, same).same
    assert [value.name for value in compared(same, {**same, "bytes": b"y" * 1000}).values] == ["bytes"]


def test_report_tells_none_from_a_value_that_is_not_there() -> None:
    rows = [line.split() for line in str(compared({"fused": None}, {"lr": 1})).splitlines()]
    assert ["fused", "None", "not", "there"] in rows
    assert ["lr", "not", "there", "1"] in rows
    assert "the value itself" in str(compared(5, 6))


def test_values_that_are_not_listed_are_not_called_the_same() -> None:
    losses = {"losses": [float(number) for number in range(10_001)]}
    result = compared(losses, losses)
    assert (result.same, result.unlisted) == (False, True)
    assert "not all values were compared" in str(result)


def test_metadata_of_safetensors_files_is_compared(tmp_path: Path) -> None:
    for name, note in (("a", "x" * 500 + "1"), ("b", "x" * 500 + "2")):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors", metadata={"format": "pt", "note": note})
    result = checked(diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))
    assert [value.name for value in result.values] == ["__metadata__/note"]
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert diff(tmp_path / "w.pt", tmp_path / "a.safetensors").same


# -- what has no plain numbers, and what cannot be read


def test_parts_of_sparse_tensors_are_compared() -> None:
    one, two = torch.eye(4).to_sparse(), (2 * torch.eye(4)).to_sparse()
    assert statuses(compared({"s": one}, {"s": two})) == {"s/values": "different"}
    assert statuses(compared({"s": one}, {"s": torch.eye(4)}))["s"] == "different"


def test_scale_of_a_quantized_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not working_engine():
        pytest.skip("this torch has no engine for quantized tensors that works here")
    monkeypatch.setattr(torch.backends.quantized, "engine", working_engine())
    numbers = torch.arange(4.0)
    one = torch.quantize_per_tensor(numbers, 1.0, 0, torch.qint8)
    two = torch.quantize_per_tensor(2 * numbers, 2.0, 0, torch.qint8)
    assert compared({"q": one}, {"q": one}).same
    (tensor,) = compared({"q": one}, {"q": two}).tensors
    assert (tensor.status, tensor.differs) == ("different", ("quantizer",))
    channels = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    (tensor,) = compared({"q": channels}, {"q": channels}).tensors
    assert (tensor.status, tensor.note) == (
        "unread",
        "its integers are equal; the scales of its channels are not compared",
    )


def test_tensor_that_cannot_be_read_is_named_and_not_the_same() -> None:
    expanded = saved({"w": torch.zeros(1).expand(1 << 40), "v": torch.ones(2)})
    result = checked(diff(expanded, expanded))
    assert statuses(result) == {"w": "unread"}
    assert "claims" in result.tensors[0].note
    assert not result.same
    assert "not compared  1 tensor" in str(result)


@each("data", [b"<html>", b"", saved(state())[:2000], forge.archive(forge.entries())[:-60]])
def test_damaged_file_is_an_error(data: bytes) -> None:
    whole = saved(state())
    for pair in ((data, whole), (whole, data)):
        with pytest.raises((LoadError, CannotReadError)):
            diff(*pair)


def test_nothing_in_a_file_is_run() -> None:
    class Call:
        def __reduce__(self) -> Any:
            return print, ("run",)

    one, two = {"w": torch.ones(2), "x": Call()}, {"w": torch.ones(2), "x": Call()}
    assert compared(one, two).same


# -- many tensors, and narrow terminals


def test_many_small_tensors_are_compared_in_seconds() -> None:
    tensors = {f"layers.{index}.weight": torch.full((4,), float(index)) for index in range(5000)}
    data, begun = saved(tensors), time.process_time()
    result = diff(data, data)
    assert result.same
    assert time.process_time() - begun < 10
    moved = {f"module.{name}": tensor + 1 for name, tensor in tensors.items()}
    begun = time.process_time()
    result = diff(data, saved(moved))
    assert {tensor.evidence for tensor in result.tensors} == {"prefix 'module.' added"}
    assert time.process_time() - begun < 20


@each("width", [60, 80, 200])
def test_report_fits_the_terminal(width: int) -> None:
    from transload.comparing import report

    a, b = state(), state()
    a["a.very.long.name.of.a.tensor.in.a.deep.module.that.has.many.levels.of.nesting.weight"] = torch.ones(3)
    b["a.very.long.name.of.a.tensor.in.a.deep.module.that.has.many.levels.of.nesting.weight"] = torch.zeros(3)
    b["layers.0.bias"], b["scalar"] = b["layers.0.bias"].half(), b["scalar"].expand(4, 5)
    result = compared({**a, "note": "x" * 100}, {**b, "note": "y" * 100, "z": torch.ones(1)})
    lines = [plain(line) for line in layout(report(result), Style(width=width, cut=True))]
    assert max(map(len, lines)) <= width
    assert any("only in B" in line for line in lines)
