"""Conversion: parts, names, ties, views, leftovers, dtypes and shards, without silent loss."""

from __future__ import annotations

import argparse
import io
import json
import os
from collections import Counter, OrderedDict
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from tests import forge
from tests.each import each, for_each
from tests.release import RELEASE, SAVES_NEW_DTYPES

from transload import converting
from transload.converting import Conversion, convert, parts
from transload.errors import (
    BrokenFileError,
    CannotReadError,
    ContentError,
    ConvertError,
    OverflowRefusedError,
    UsageError,
)
from transload.formats import sets
from transload.formats.tensors import Budget
from transload.nodes import Call, Global
from transload.opening import inspect
from transload.opening.elements import ElementReader
from transload.writing import write_content

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")


class Rotary(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.ones(2))


class Tied(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.rotary = Rotary()
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight
        self.cache = torch.zeros(7)
        self.hidden = 3


def save(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def load(path: Path | str, since: tuple[int, ...] = ()) -> Any:
    """``since``: the first torch release whose ``weights_only=True`` accepts the file."""
    return torch.load(path, weights_only=since <= RELEASE)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    net = Tied()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    net.lm_head(net.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    value = {
        "state_dict": OrderedDict((f"module.{name}", tensor) for name, tensor in net.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.25, name="naïve", device=torch.device("cuda:1"), size=torch.Size([2, 3])),
        "history": [0.5, float("nan")],
    }
    return save(value, tmp_path / "train.ckpt")


# -- modules


def test_a_source_that_changes_meanwhile_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "model.pt"
    safetensors_torch.save_file({f"w{index}": torch.ones(1 << 18) for index in range(8)}, source)

    def rewrite(*_: int) -> None:
        source.write_bytes(source.read_bytes()[: -1 << 20] + bytes(1 << 20))  # in the same file, of which w7 is the end
        os.utime(source, ns=(0, 0))

    with pytest.raises(BrokenFileError, match="was changed while it was read"):
        convert(source, target, progress=rewrite)
    assert [*tmp_path.iterdir()] == [source]


def test_pickled_module_becomes_its_state_dict(tmp_path: Path) -> None:
    net = Tied()
    result = convert(save(net, tmp_path / "net.pt"), tmp_path / "a.pt")
    assert same(load(tmp_path / "a.pt"), dict(net.state_dict()))
    reasons = {item.name: item.why for item in result.left}
    assert reasons == {
        "rotary._buffers/inv_freq": "a buffer registered with persistent=False",
        "cache": "an attribute of a module, which state_dict() does not have",
    }
    assert result.complete
    leftovers = json.loads((tmp_path / "a.pt.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert leftovers["hidden"] == 3
    assert leftovers["modules"]["lm_head"]["in_features"] == 3
    assert leftovers["$class"].endswith("test_convert.Tied")


def test_tied_weights_stay_tied_through_safetensors(tmp_path: Path) -> None:
    net = Tied()
    result = convert(save(net, tmp_path / "net.pt"), tmp_path / "a.safetensors")
    assert result.aliases == (("lm_head.weight", "embed.weight"),)
    other = Tied()
    assert safetensors_torch.load_model(other, tmp_path / "a.safetensors") == (set(), [])
    assert other.lm_head.weight.data_ptr() == other.embed.weight.data_ptr()
    assert same(dict(net.state_dict()), dict(other.state_dict()))
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt")
    assert same(loaded, dict(net.state_dict()))
    assert loaded["lm_head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


def test_ties_recorded_by_safetensors_save_model_are_restored(tmp_path: Path) -> None:
    net = Tied()
    safetensors_torch.save_model(net, tmp_path / "a.safetensors", metadata={"made": "here"})
    result = convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt")
    assert same(loaded, dict(net.state_dict()))
    assert loaded["lm_head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["metadata"] == {"made": "here"}
    again = convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert dict(inspect(tmp_path / "c.safetensors").facts)["metadata.made"] == "here"
    assert len(again.aliases) == 1


def test_ties_survive_prefix_stripping(tmp_path: Path) -> None:
    shared = torch.rand(3)
    source = save({"module.a": shared, "module.b": shared}, tmp_path / "a.pt")
    convert(source, tmp_path / "a.safetensors")
    result = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", strip="module.")
    assert result.aliases == (("b", "a"),)


def test_module_inside_a_dict_becomes_its_state_dict(tmp_path: Path) -> None:
    net = Tied()
    convert(save({"model": net, "epoch": 4}, tmp_path / "net.pt"), tmp_path / "a.pt")
    loaded = load(tmp_path / "a.pt")
    assert loaded["epoch"] == 4
    assert same(loaded["model"], dict(net.state_dict()))
    convert(tmp_path / "net.pt", tmp_path / "b.safetensors", key="model")
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"embed.weight", "rotary.scale"}


# -- parts and names


def test_bytes_of_a_part_count_ties_once(tmp_path: Path) -> None:
    tied = torch.zeros(2, 4)
    torch.save({"a": {"x": tied, "y": tied}, "b": torch.zeros(3)}, tmp_path / "a.pt")
    assert [(part.key, part.tensors, part.nbytes) for part in parts(tmp_path / "a.pt")] == [("", 3, 44), ("a", 2, 32)]


def test_parts_lists_keys_with_kind_and_tensor_count(train: Path) -> None:
    kinds = {part.key: (part.kind, part.tensors) for part in parts(train)}
    assert kinds[""][1] == 3 + 3
    assert kinds["state_dict"] == ("state dict", 3)
    assert kinds["optimizer/state"] == ("nested", 3)
    assert not any(key.endswith("/0") for key in kinds)


@pytest.mark.parametrize("key", ["state_dict", "state_dict/"[:-1]])
def test_key_converts_one_part_alone(train: Path, tmp_path: Path, key: str) -> None:
    result = convert(train, tmp_path / "a.safetensors", key=key, strip="module.")
    assert {tensor.name for tensor in inspect(tmp_path / "a.safetensors").tensors} == {"embed.weight", "rotary.scale"}
    assert (result.tensors, result.others, result.leftovers) == (3, 3, "")


@pytest.mark.parametrize("key", ["a.b", "a/b"])
def test_key_accepts_dots_and_slashes(tmp_path: Path, key: str) -> None:
    source = save({"a": {"b": {"w": torch.ones(2)}, "c": torch.ones(3)}, "a.bc": torch.ones(1)}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt", key=key)
    assert same(load(tmp_path / "b.pt"), {"w": torch.ones(2)})


def test_key_may_name_a_single_tensor(tmp_path: Path) -> None:
    convert(save({"a": {"w": torch.ones(2)}}, tmp_path / "a.pt"), tmp_path / "b.npz", key="a.w")
    assert [tensor.name for tensor in inspect(tmp_path / "a.pt").tensors] == ["a/w"]
    numpy = pytest.importorskip("numpy")
    with numpy.load(tmp_path / "b.npz") as arrays:
        assert arrays.files == ["w"]


def test_note_names_the_parts_of_a_training_checkpoint(train: Path, tmp_path: Path) -> None:
    expected = "it also holds an optimizer; --key converts one part alone: state_dict, optimizer"
    assert convert(train, tmp_path / "a.safetensors").notes.count(expected) == 1
    convert(train, tmp_path / "dcp", to="dcp")
    assert convert(tmp_path / "dcp", tmp_path / "c.safetensors").notes.count(expected) == 1
    assert not any(
        "--key" in note for note in convert(train, tmp_path / "a.pt").notes
    )  # a torch target keeps everything in place
    assert not any("--key" in note for note in convert(train, tmp_path / "b.safetensors", key="state_dict").notes)


def test_no_note_about_parts_for_other_checkpoints(tmp_path: Path) -> None:
    def check(value: Any) -> None:
        result = convert(save(value, tmp_path / "a.pt"), tmp_path / "a.safetensors", overwrite=True)
        assert not any("--key" in note for note in result.notes)

    weights = {"fc.weight": torch.ones(2)}
    several_models = {"unet": weights, "text_encoder": {"fc.bias": torch.zeros(2)}}
    optimizer_only = {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "epoch": 3}
    for_each(
        [
            weights,
            several_models,
            optimizer_only,
            {"model": weights, "epoch": 3},
            {"optim.weight": torch.ones(1), **weights},
        ],
        check,
    )


def test_unknown_key_is_an_error_that_lists_the_keys(train: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="'state_dit'") as caught:
        convert(train, tmp_path / "a.safetensors", key="state_dit")
    assert "state_dict" in caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.ckpt"]


def test_colliding_names_are_refused_or_numbered(tmp_path: Path) -> None:
    source = save({"m.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="two tensors would be called 'a'"):
        convert(source, tmp_path / "b.safetensors", strip="m.")
    ambiguous = save(
        {1: torch.ones(1), "1": torch.zeros(2), "x": {"y": torch.ones(3)}, "x/y": torch.ones(4)}, tmp_path / "c.pt"
    )
    result = convert(ambiguous, tmp_path / "c.safetensors")
    assert result.renamed == (("1", "1#2"), ("x/y", "x/y#2"))
    assert result.tensors == 4


def test_torch_zip_keeps_the_keys_that_other_formats_rename(tmp_path: Path) -> None:
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "": torch.ones(3), "\ud800": torch.ones(4)}
    source = save(value, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt")
    assert result.renamed == ()
    assert list(loaded) == list(value)
    assert torch.equal(loaded["a"]["b"], torch.zeros(2))


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((1.0, "1.0", None, "None"), id="other types"),
        pytest.param((1 << 200, "a huge integer"), id="huge integer"),
    ],
)
def test_keys_with_the_same_text_keep_their_own_values(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    source = save({key: torch.full((2,), float(at)) for at, key in enumerate(keys)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.pt")
    assert [float(tensor[0]) for tensor in load(tmp_path / "b.pt").values()] == list(range(len(keys)))
    assert len(result.renamed) == len(keys) // 2


_LONG, _SIMILAR = "x" * 1500, "x" * 1499 + "y"


class LongNames(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(_LONG, torch.nn.Parameter(torch.zeros(2)))
        self.register_parameter(_SIMILAR, torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({_LONG: torch.zeros(2), _SIMILAR: torch.ones(2)}, [_LONG, _SIMILAR], id="similar"),
        pytest.param(
            {"m": {_LONG: [{_SIMILAR: torch.zeros(2)}]}, "e": torch.ones(2)},
            [f"m/{_LONG}/0/{_SIMILAR}", "e"],
            id="nested",
        ),
        pytest.param(
            {_LONG: {"w": torch.zeros(2)}, _SIMILAR: {"w": torch.ones(2)}},
            [f"{_LONG}/w", f"{_SIMILAR}/w"],
            id="similar parents",
        ),
        pytest.param(
            {_SIMILAR: {"w": 2}, _LONG: {"w": torch.zeros(2)}}, [f"{_LONG}/w"], id="similar, without a tensor"
        ),
        pytest.param(LongNames(), [_LONG, _SIMILAR], id="module"),
        pytest.param(
            {f"{'a' * 200}… (3000 characters)": torch.zeros(2)},
            [f"{'a' * 200}… (3000 characters)"],
            id="looks truncated",
        ),
    ],
)
def test_long_names_are_not_truncated(tmp_path: Path, value: Any, expected: list[str]) -> None:
    source = save(value, tmp_path / "a.pt")
    convert(source, tmp_path / "b.safetensors")
    loaded = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert {name: float(tensor[0]) for name, tensor in loaded.items()} == {name: at for at, name in enumerate(expected)}
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert sorted(load(tmp_path / "c.pt")) == sorted(expected)


def test_long_names_of_sparse_components_are_not_truncated(tmp_path: Path) -> None:
    convert(save({_LONG: torch.eye(3).to_sparse()}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {f"{_LONG}/indices", f"{_LONG}/values"}


def test_names_beyond_the_total_length_limit_make_the_result_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "MAX_NAMES", 20_000)
    source = save({_LONG: [torch.ones(1)] * 20}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    assert not result.complete
    assert ["its names add up to more than" in item.why for item in result.left] == [True]


def test_tensors_under_bytes_tuple_and_huge_integer_keys_are_converted(tmp_path: Path) -> None:
    value = {b"abc": torch.ones(1), ("a", 1): {"w": torch.ones(2), "lr": 3}, 1 << 200: torch.ones(3)}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert result.tensors == 3
    assert [item.name for item in result.listed] == ["('a', 1)"]
    assert [note for note in result.notes if "neither a string nor a number" in note and "('a', 1)/w" in note]


def test_unsearched_part_of_a_checkpoint_makes_the_result_incomplete(tmp_path: Path) -> None:
    many = save({"w": torch.ones(2), "many": [[torch.ones(1)] * 300] * 300}, tmp_path / "a.pt")
    result = convert(many, tmp_path / "b.safetensors")
    assert not result.complete
    assert [item.why for item in result.left if "not all of it was searched" in item.why]


def test_tensor_named_like_a_sparse_component_is_renamed(tmp_path: Path) -> None:
    source = save({"x": torch.eye(3).to_sparse(), "x/indices": torch.full((2, 3), 9)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    loaded = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert result.renamed == (("x/indices", "x/indices#2"),)
    assert torch.equal(loaded["x/indices"], torch.arange(3).repeat(2, 1))
    assert torch.equal(loaded["x/indices#2"], torch.full((2, 3), 9))
    convert(source, f"{tmp_path}/raw/")
    index = json.loads((tmp_path / "raw" / "index.json").read_text(encoding="utf-8"))
    assert list(index["tensors"]) == ["x/indices", "x/values", "x/indices#2"]


def test_tied_tensor_named_format_is_stored_twice(tmp_path: Path) -> None:
    """Loaders read the metadata key ``format``, so it cannot hold an alias."""
    weight = torch.arange(3.0)
    result = convert(save({"a": weight, "format": weight}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert result.aliases == ()
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"a", "format"}


def test_bare_tensor_is_converted(tmp_path: Path) -> None:
    result = convert(save(torch.arange(3), tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert result.renamed == (("", "tensor"),)
    assert 'renamed     "" → tensor\n' in f"{result}\n"  # as inspect shows it
    convert(tmp_path / "a.pt", tmp_path / "c.pt")
    assert torch.equal(load(tmp_path / "c.pt"), torch.arange(3))


HOSTILE_NAMES = [
    "../../etc/passwd",
    "/abs",
    "a/../b",
    "..",
    ".",
    "a\\b",
    "nul\0",
    "c:d",
    "\ud800",
    "",
    "__metadata__",
    "x" * 300,
]


def test_tensor_names_are_never_used_as_paths(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    source = save({name: torch.full((2,), float(n)) for n, name in enumerate(HOSTILE_NAMES)}, folder / "a.pt")
    for to in ("raw", "npz", "safetensors", "torch"):
        result = convert(source, folder / f"out-{to}", to=to)
        assert result.tensors == len(HOSTILE_NAMES)
        # Only safetensors reserves that name.
        assert ("__metadata__" in dict(result.renamed)) == (to == "safetensors")
    assert {path.name for path in folder.iterdir()} == {"a.pt", "out-raw", "out-npz", "out-safetensors", "out-torch"}
    assert {path.name for path in (folder / "out-raw").iterdir()} == {
        "index.json",
        *(f"{number:06d}.bin" for number in range(len(HOSTILE_NAMES))),
    }
    index = json.loads((folder / "out-raw" / "index.json").read_text(encoding="utf-8"))
    assert index["tensors"]["../../etc/passwd"]["file"] == "000000.bin"
    assert len(safetensors_torch.load_file(folder / "out-safetensors")) == len(HOSTILE_NAMES)
    numpy = pytest.importorskip("numpy")
    with numpy.load(folder / "out-npz") as arrays:
        assert len(arrays.files) == len(HOSTILE_NAMES)
        assert not any(name.startswith("/") or ".." in name.split("/") or "\\" in name for name in arrays.files)


# -- leftovers


def test_values_that_safetensors_cannot_store_go_to_a_leftovers_file(train: Path, tmp_path: Path) -> None:
    result = convert(train, tmp_path / "a.safetensors")
    assert result.leftovers == str(tmp_path / "a.safetensors.leftovers.json")
    leftovers = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))
    assert leftovers["from"] == "train.ckpt"
    data = leftovers["data"]
    assert (data["epoch"], data["history"]) == (3, [0.5, "nan"])
    args = {"$class": "argparse.Namespace", "lr": 0.25, "name": "naïve", "device": "cuda:1", "size": [2, 3]}
    assert data["args"] == args
    assert data["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert not result.listed


def test_torch_zip_keeps_the_object_structure(train: Path, tmp_path: Path) -> None:
    result = convert(train, tmp_path / "a.pt")
    before, after = torch.load(train, weights_only=False), load(tmp_path / "a.pt")
    assert list(after) == ["state_dict", "optimizer", "epoch", "history"]
    assert type(after["state_dict"]) is OrderedDict
    assert same(after["state_dict"], before["state_dict"])
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert list(after["optimizer"]["state"]) == [0]
    leftovers = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    assert leftovers["args"]["lr"] == 0.25


class Printing:
    def __reduce__(self) -> Any:
        return print, ("this must never be seen",)


def test_opaque_object_is_listed_and_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save({"w": torch.ones(2), "odd": Printing(), "big": 1 << 5000, "fine": 1}, tmp_path / "a.pt")
    for name in ("b.safetensors", "b.pt"):
        result = convert(source, tmp_path / name)
        assert "odd" in {item.name for item in result.listed}
    assert capsys.readouterr() == ("", "")


def test_plain_values_of_many_types_are_kept(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    value = {
        "w": torch.ones(1),
        "bytes": b"\x00\xff",
        "set": {3},
        "tuple": (1, "a", None),
        "path": Path("/a/b"),
        "complex": 1 - 2j,
        "number": numpy.float64(0.5),
        "count": numpy.int64(-7),
        "dtype": torch.bfloat16,
        "mixed": [torch.ones(2), 5],
        7: "seven",
    }
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    data = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    assert data == {
        "bytes": {"$bytes": "AP8="},
        "set": [3],
        "tuple": [1, "a", None],
        "path": "/a/b",
        "complex": [1.0, -2.0],
        "number": 0.5,
        "count": -7,
        "dtype": "torch.bfloat16",
        "mixed": [None, 5],
        "7": "seven",
    }
    assert not result.listed
    convert(tmp_path / "a.pt", tmp_path / "c.pt")
    loaded = load(tmp_path / "c.pt", since=(2, 6))
    assert (loaded["bytes"], loaded["set"], loaded["tuple"], loaded[7]) == (b"\x00\xff", {3}, (1, "a", None), "seven")


def test_value_under_a_key_with_the_same_text_is_listed(tmp_path: Path) -> None:
    result = convert(save({"w": torch.ones(1), 2: 7, "2": 8}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"] == {"2": 8}
    assert [(item.name, item.why) for item in result.listed] == [
        ("2", "int: 7, under a key that is written like another one")
    ]


def test_big_endian_numpy_scalar_is_decoded_and_bad_text_listed() -> None:
    from transload.writing.objects import Leftovers

    dtype = Call(Global("numpy", "dtype", 0), ("f8", False, True), "reduce", 0)
    dtype.states = [(3, ">", None, None, None, -1, -1, 0)]
    scalar = Call(Global("numpy._core.multiarray", "scalar", 0), (dtype, pack(">d", 0.25)), "reduce", 0)
    undecodable = Call(Global("_codecs", "encode", 0), ("\u20ac", "latin1"), "reduce", 0)
    leftovers = Leftovers([(("a",), scalar), (("b",), undecodable)], frozenset())
    assert leftovers.data == {"a": 0.25}
    assert [item.name for item in leftovers.listed] == ["b"]


def test_cyclic_objects_are_converted_and_the_cycle_listed(tmp_path: Path) -> None:
    value: dict[str, Any] = {"w": torch.ones(2), "list": []}
    value["self"] = value
    value["list"].append(value["list"])
    for name in ("b.safetensors", "b.pt", "b.npz"):
        result = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
        assert result.tensors == 1
        assert any("contains itself" in item.why for item in result.listed)


def test_exponentially_shared_list_is_cut_off(tmp_path: Path) -> None:
    bomb: list[Any] = ["x" * 1000]
    for _ in range(40):
        bomb = [bomb, bomb]
    source = save({"w": torch.ones(2), "bomb": bomb}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    assert Path(result.leftovers).stat().st_size < 200 << 20
    assert any("shared too often" in item.why for item in result.listed)


def test_repeated_large_values_are_cut_off(tmp_path: Path) -> None:
    value = {"w": torch.ones(2), "bytes": [b"x" * (1 << 19)] * 1000, "number": [1 << 4000] * 10_000}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert Path(result.leftovers).stat().st_size < 100 << 20
    assert len(result.listed) == 10_001
    assert result.listed[-1].why.startswith("and ")
    assert any("with more text than is kept" in item.why for item in result.listed)


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_long_list_of_numbers_is_kept(tmp_path: Path, name: str) -> None:
    losses = [0.5 * number for number in range(20_000)]
    result = convert(save({"w": torch.ones(2), "losses": losses}, tmp_path / "a.pt"), tmp_path / name)
    kept = load(tmp_path / name) if name == "b.pt" else json.loads(Path(result.leftovers).read_text())["data"]
    assert kept["losses"] == losses


class PrivateAttributes(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._ready, self._step, self._nothing = False, 0, None
        self._words: dict[str, int] = {}


def test_falsy_attributes_of_a_module_are_kept(tmp_path: Path) -> None:
    result = convert(save(PrivateAttributes(), tmp_path / "a.pt"), tmp_path / "b.safetensors")
    kept = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    assert {key: kept[key] for key in kept if key != "$class"} == {
        "training": True,
        "_ready": False,
        "_step": 0,
        "_nothing": None,
        "_words": {},
    }


# -- views and storages


def test_views_keep_their_values_and_share_storage_in_torch(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    value = {
        "base": base,
        "turned": base.permute(2, 0, 1),
        "part": base[1:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
    }
    source = save(value, tmp_path / "a.pt")
    convert(source, tmp_path / "b.safetensors")
    loaded = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert same(loaded, value)
    convert(source, tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt")
    assert same(loaded, value)
    assert loaded["turned"].data_ptr() == loaded["base"].data_ptr()
    assert loaded["part"].stride() == value["part"].stride()
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size + 2000


def test_only_the_used_part_of_a_large_storage_is_written(tmp_path: Path) -> None:
    large = torch.rand(100_000)
    source = save({"a": large[10:20], "b": large[15:30], "c": large[50_000:50_010]}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 5000
    loaded = load(tmp_path / "b.pt")
    assert torch.equal(loaded["b"], large[15:30])
    loaded["a"][5:] = -1
    assert loaded["b"][0] == -1
    assert loaded["c"].untyped_storage().nbytes() == 40


def test_bytes_of_sparse_tensors_are_counted_once(tmp_path: Path) -> None:
    source = save({"w": torch.ones(10), "sparse": torch.eye(100).to_sparse()}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.pt")
    assert result.nbytes == 40 + 100 * 4 + 2 * 100 * 8


def test_sparse_and_quantized_tensors_are_stored_as_such_only_in_torch_zip(tmp_path: Path) -> None:
    value = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
        "w": torch.ones(2),
    }
    source = save(value, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt", since=(2, 6))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["quantized"].dequantize(), value["quantized"].dequantize())
    assert (result.complete, result.tensors) == (True, 3)
    cast = convert(source, tmp_path / "c.pt", dtype="float16")
    assert (cast.cast, cast.notes) == (1, ("sparse keeps its dtype: it is sparse_coo",))
    as_safetensors = convert(source, tmp_path / "b.safetensors")
    assert not as_safetensors.complete
    assert [item.name for item in as_safetensors.left] == ["quantized"]
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"w", "sparse/indices", "sparse/values"}


def test_sparse_tensor_over_a_storage_view_is_split_into_components(tmp_path: Path) -> None:
    """Only legacy files have storage views; no target does, so the component tensors are stored alone."""
    layout = forge.call(forge.name("torch.serialization", "_get_layout"), "torch.sparse_coo")
    storage_view = forge.storage_id("0", 4, "FloatStorage", "cpu", forge.tuple_of("9", 1, 3))
    full_storage = forge.storage_id("1", 3, "LongStorage", "cpu", None)
    components = (
        forge.tensor(storage=full_storage, shape=(1, 3), stride=(3, 1)),
        forge.tensor(storage=storage_view, shape=(3,)),
        (3,),
    )
    sparse = forge.call(forge.name("torch._utils", "_rebuild_sparse_tensor"), layout, forge.tuple_of(*components))
    pickles = forge.pickled(forge.ordered({"s": sparse})), forge.pickled(forge.list_of("0", "1"))
    storages = (pack("<q", 4) + forge.FLOATS, pack("<4q", 3, 0, 1, 2))
    (tmp_path / "a.pt").write_bytes(forge.legacy(object=pickles[0], keys=pickles[1], storages=storages))
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert load(tmp_path / "b.pt")["s/values"].tolist() == load(tmp_path / "a.pt")["s"].to_dense().tolist() == [2, 3, 4]


def test_expanded_tensor_of_terabytes_is_refused_unless_stored_as_a_view(tmp_path: Path) -> None:
    source = save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
    for name in ("b.safetensors", "b.npz", "b/"):
        with pytest.raises(ContentError, match="claims 4,000,000,000,000 bytes"):
            convert(source, f"{tmp_path}/{name}")
    with pytest.raises(ContentError):
        convert(source, tmp_path / "c.pt", dtype="float16")
    convert(source, tmp_path / "d.pt")
    assert load(tmp_path / "d.pt")["w"].shape == (10**6, 10**6)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "d.pt"}


def test_views_of_one_storage_with_two_dtypes_keep_their_bytes(tmp_path: Path) -> None:
    if not hasattr(torch, "uint16") or not hasattr(torch, "float8_e5m2"):
        pytest.skip("needs a newer torch")
    base = torch.arange(256, dtype=torch.uint8).view(torch.uint16)
    value = {"a": base[3:20], "b": base.view(torch.float8_e5m2)[20:60], "c": base[100:]}
    source = save(value, tmp_path / "a.pt")
    convert(source, tmp_path / "b.safetensors")
    convert(source, tmp_path / "b.pt")
    loaded = load(tmp_path / "b.pt")
    for tensors in (safetensors_torch.load_file(tmp_path / "b.safetensors"), loaded):
        assert all(
            torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in value.items()
        )
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()
    assert loaded["c"].untyped_storage().nbytes() == 56


# -- dtypes


NEWER_DTYPES = [
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex64",
]


@each("name", NEWER_DTYPES)
def test_newer_dtypes_survive_conversion(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None or ("float8" in name and not SAVES_NEW_DTYPES):
        pytest.skip("needs a newer torch")
    raw = torch.arange(64, dtype=torch.uint8)
    value = {"x": raw.view(dtype).reshape(2, -1)}
    convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    convert(tmp_path / "a.pt", tmp_path / "d.pt")
    for loaded in (
        safetensors_torch.load_file(tmp_path / "b.safetensors"),
        load(tmp_path / "c.pt"),
        load(tmp_path / "d.pt"),
    ):
        assert (loaded["x"].dtype, loaded["x"].shape) == (dtype, value["x"].shape)
        assert torch.equal(loaded["x"].view(torch.uint8).flatten(), raw)


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "raw"])
def test_dtype_option_casts_floating_tensors(tmp_path: Path, to: str) -> None:
    value = {"a": torch.randn(33, 7), "t": torch.randn(5, 6).t(), "i": torch.arange(3), "h": torch.randn(4).half()}
    source = save(value, tmp_path / "a.pt")
    result = convert(source, tmp_path / f"b.{to}", to=to, dtype="float16")
    assert (result.cast, result.verified) == (2, True)
    if to in ("safetensors", "torch"):
        loaded = (
            safetensors_torch.load_file(tmp_path / "b.safetensors")
            if to == "safetensors"
            else load(tmp_path / "b.torch")
        )
        assert same(
            loaded, {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in value.items()}
        )


def test_tied_tensors_stay_tied_after_a_cast(tmp_path: Path) -> None:
    shared = torch.randn(3)
    source = save({"a": shared, "b": shared}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt", dtype="bfloat16")
    loaded = load(tmp_path / "b.pt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["b"], shared.bfloat16())


def test_overflowing_cast_is_refused_unless_allowed(tmp_path: Path) -> None:
    source = save({"fine": torch.ones(3), "large": torch.tensor([1e5, -1e9, float("inf"), 2.0])}, tmp_path / "a.pt")
    with pytest.raises(OverflowRefusedError, match="1 of the 2 values of one is too large for float16"):
        convert(save({"one": torch.tensor([1.0, 1e30])}, tmp_path / "one.pt"), tmp_path / "one.npz", dtype="float16")
    with pytest.raises(OverflowRefusedError, match="2 of the 4 values of large are too large for float16"):
        convert(source, tmp_path / "b.safetensors", dtype="float16")
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "one.pt"}
    result = convert(source, tmp_path / "b.safetensors", dtype="float16", allow_inf=True)
    assert result.infinite == 2
    assert convert(source, tmp_path / "c.safetensors", dtype="bfloat16").infinite == 0


# -- shards


def test_max_shard_size_writes_shards_and_an_index(tmp_path: Path) -> None:
    value = {f"layer.{number}.w": torch.randn(100) for number in range(7)}
    value["tied"] = value["layer.3.w"]
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "m.safetensors", max_shard_size=1000)
    names = [f"m-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert [Path(name).name for name in result.files] == [*names, "m.safetensors.index.json"]
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": 2800}
    assert set(index["weight_map"]) == set(value) - {"tied"}
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors_torch.load_file(tmp_path / file)[name], value[name])
    convert(tmp_path / "m.safetensors.index.json", tmp_path / "b.pt")
    assert same(load(tmp_path / "b.pt"), value)
    assert not [
        finding for finding in inspect(tmp_path / "m.safetensors.index.json").findings if finding.severity == "error"
    ]


def test_single_shard_is_written_as_a_plain_file(tmp_path: Path) -> None:
    source = save({"a": torch.ones(3)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "m.safetensors", max_shard_size="5GB")
    assert [Path(name).name for name in result.files] == ["m.safetensors"]
    with pytest.raises(UsageError, match="only safetensors"):
        convert(source, tmp_path / "m.pt", max_shard_size="5GB")


# -- sources


def test_path_bytes_and_file_objects_give_the_same_result(tmp_path: Path) -> None:
    source = save({"a": torch.randn(3)}, tmp_path / "a.pt")
    raw = source.read_bytes()
    with source.open("rb") as opened:
        sources: list[Any] = [str(source), raw, io.BytesIO(raw), opened]
        for number, variant in enumerate(sources):
            convert(variant, tmp_path / f"{number}.safetensors")
    outputs = {(tmp_path / f"{number}.safetensors").read_bytes() for number in range(4)}
    assert len(outputs) == 1


def test_distributed_checkpoint_is_converted(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("needs a newer torch")
    value = {"a": torch.randn(6, 4), "b": {"c": torch.arange(5)}}
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=str(tmp_path / "dcp"))
    convert(tmp_path / "dcp", tmp_path / "a.safetensors")
    loaded = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert sorted(map(tuple, (tensor.shape for tensor in loaded.values()))) == [(5,), (6, 4)]
    assert [(part.key, part.tensors) for part in parts(tmp_path / "dcp")] == [("", 2), ("b", 1)]
    convert(tmp_path / "dcp", tmp_path / "b.safetensors", key="b")
    assert list(safetensors_torch.load_file(tmp_path / "b.safetensors")) == ["c"]


def test_note_says_that_deepspeed_partitions_are_not_joined(tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step1")
    for name in ("mp_rank_00_model_states", "bf16_zero_pp_rank_0_mp_rank_00_optim_states"):
        torch.save({"module": {"w": torch.ones(2)}}, folder / f"{name}.pt")
    result = convert(tmp_path, tmp_path.with_suffix(".safetensors"))
    assert result.format == "deepspeed"
    assert "parts of one tensor are not joined" in result.notes[0]


def save_distributed(value: Any, folder: Path) -> Path:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    try:
        dcp.save(value, checkpoint_id=folder, no_dist=True)
    except TypeError:  # older releases
        dcp.save(value, checkpoint_id=folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_values_of_a_distributed_checkpoint_are_kept_without_its_metadata_table(tmp_path: Path) -> None:
    value = {"w": torch.arange(6.0).view(2, 3), "epoch": 3, "args": {"lr": 0.1, "text": "x" * 500}}
    result = convert(save_distributed(value, tmp_path / "dcp"), tmp_path / "out.safetensors")
    assert result.complete
    assert result.left == result.listed == ()
    leftovers = json.loads((tmp_path / "out.safetensors.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert leftovers["epoch"] == 3
    assert "x" * 500 in json.dumps(leftovers)
    assert "Metadata" not in json.dumps(leftovers)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_distributed_checkpoint_becomes_the_nested_object_it_was_saved_from(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    value = {"step": 5, "optim": optimizer.state_dict(), "model": net.state_dict(), "more": [torch.ones(1), {"a": "b"}]}
    source = save_distributed(value, tmp_path / "dcp")
    result = convert(source, tmp_path / "out.pt")
    assert (result.complete, result.leftovers, result.left, result.listed) == (True, "", (), ())
    loaded = load(tmp_path / "out.pt")
    assert loaded["step"] == 5
    assert loaded["more"] == value["more"]
    assert same(loaded["model"], net.state_dict())
    new = torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(new.parameters())
    # DCP makes strings of the keys of dictionaries.
    loaded["optim"]["state"] = {int(key): entry for key, entry in loaded["optim"]["state"].items()}
    again.load_state_dict(loaded["optim"])
    assert again.param_groups[0]["lr"] == 0.25
    assert same(again.state_dict()["state"][0], optimizer.state_dict()["state"][0])
    convert(source, tmp_path / "part.pt", key="optim")
    assert load(tmp_path / "part.pt")["param_groups"] == loaded["optim"]["param_groups"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_distributed_checkpoint_whose_paths_conflict_keeps_its_flat_names(tmp_path: Path) -> None:
    source = save_distributed({"a": {"b": torch.ones(1), "c": 2}, "d": torch.zeros(2)}, tmp_path / "dcp")
    metadata = source / ".metadata"
    raw = metadata.read_bytes()
    assert raw.count(b"\x8c\x03a.c") == 1  # later it is in the memo
    metadata.write_bytes(raw.replace(b"\x8c\x03a.c", b"\x8c\x03d.c"))
    convert(source, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert (loaded["a"], loaded["d.c"], loaded["d"].tolist()) == ({"b": torch.ones(1)}, 2, [0, 0])


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_items_of_a_distributed_checkpoint_are_opened_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{i}": torch.arange(9.0) + 100 * i for i in range(5)}
    source = save_distributed({**tensors, "step": 7}, tmp_path / "dcp")
    convert(source, tmp_path / "few.safetensors")
    monkeypatch.setattr(sets.dcp, "FEW_ITEMS", -1)
    pickles: list[int] = []

    def noting(reader: ElementReader, *args: Any, **options: Any) -> Conversion:
        pickles.append(len(reader.checkpoint.pickles))
        return write_content(reader, *args, **options)

    monkeypatch.setattr(converting, "write_content", noting)
    convert(source, tmp_path / "many.safetensors")
    assert pickles == [2]  # of the index and of the only object
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "few.safetensors").read_bytes()
    convert(source, tmp_path / "many.pt")
    loaded = load(tmp_path / "many.pt")
    assert (loaded.pop("step"), same(loaded, tensors)) == (7, True)
    assert [(part.key, part.tensors) for part in parts(source)] == [("", 5)]
    (file,) = source.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(pack("<f", 304), pack("<f", 305)))
    with pytest.raises(ConvertError, match=r"1 damaged record: checksum .*w3"):
        convert(source, tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_values_of_all_shards_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"a": torch.ones(2), "one": 1, "same": 1}, source / "1.bin")
    torch.save({"b": torch.ones(3), "epoch": 7}, source / "2.bin")
    torch.save({"c": torch.ones(3), "same": 3}, source / "3.bin")
    index = {"metadata": {}, "weight_map": {"a": "1.bin", "b": "2.bin", "c": "3.bin"}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="ascii")
    result = convert(source, tmp_path / "out.safetensors")
    assert result.listed == ()
    leftovers = json.loads((tmp_path / "out.safetensors.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert leftovers == {"": {"one": 1, "same": 1, "epoch": 7}, "#2": {"same": 3}}


def test_values_of_all_ranks_are_kept(tmp_path: Path) -> None:
    step = tmp_path / "ds" / "global_step1"
    step.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("global_step1", encoding="ascii")
    torch.save({"module": {"w": torch.ones(2)}, "epoch": 5}, step / "mp_rank_00_model_states.pt")
    torch.save({"x": torch.ones(4), "lr": 0.5}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    result = convert(tmp_path / "ds", tmp_path / "out.safetensors")
    assert result.listed == ()
    leftovers = (tmp_path / "out.safetensors.leftovers.json").read_text(encoding="utf-8")
    assert '"epoch": 5' in leftovers
    assert '"lr": 0.5' in leftovers


# -- notes


def test_unused_prefix_is_reported(tmp_path: Path) -> None:
    source = save({"module.a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors", strip=("module.", "_orig_mod."))
    assert result.notes == ("no name begins with the prefix '_orig_mod.'",)
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"a", "b"}


@each(
    ("name", "dtype", "named"),
    [
        ("b.safetensors", "", "a, b, c"),
        ("b.npz", "", "a, b, c, tied"),
        ("b/", "", "a, b, c"),
        ("b.pt", "", ""),
        ("b.pt", "bfloat16", "a, b, c, tied"),
    ],
)
def test_note_names_views_that_no_longer_share_memory(tmp_path: Path, name: str, dtype: str, named: str) -> None:
    base = torch.arange(20.0)
    value = {"a": base[:8], "b": base[4:12], "c": base[11:13], "d": base[13:], "e": base[13:13], "tied": base[:8]}
    result = convert(save(value, tmp_path / "a.pt"), f"{tmp_path}/{name}", dtype=dtype)
    notes = [note.partition(": ")[2] for note in result.notes if note.startswith("views that shared memory")]
    assert [sorted(note.split(", ")) for note in notes] == ([named.split(", ")] if named else [])


@pytest.mark.skipif(not SAVES_NEW_DTYPES, reason="needs a newer torch")
def test_floating_dtypes_that_are_not_cast_are_reported(tmp_path: Path) -> None:
    source = save({"a": torch.ones(4).to(torch.float8_e4m3fn), "b": torch.ones(2)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors", dtype="bfloat16")
    assert result.notes == ("--dtype does not apply to float8_e4m3fn (tensors: 1)",)


def test_repeated_notes_are_summarised(tmp_path: Path) -> None:
    source = save({str(number): torch.eye(2).to_sparse() for number in range(23)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    assert len(result.notes) == 21
    assert result.notes[-1] == "… is split into its component tensors, and so are 3 more"


def test_key_may_name_a_submodule(tmp_path: Path) -> None:
    result = convert(save({"net": Tied()}, tmp_path / "a.pt"), tmp_path / "b.pt", key="net.rotary")
    assert list(load(tmp_path / "b.pt")) == ["scale"]
    kept = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    assert kept["net/_modules/rotary"]["$class"].endswith("Rotary")


def test_file_name_that_suggests_another_format_is_reported(tmp_path: Path) -> None:
    source = save({"a": torch.ones(1)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.npz", to="safetensors")
    assert result.notes == ("it is safetensors, although its name says npz",)
    assert convert(source, tmp_path / "c", to="safetensors").notes == ()
    assert convert(source, f"{tmp_path}/d/", to="dcp").notes == ()


def test_index_and_shards_left_from_an_earlier_conversion_are_reported(tmp_path: Path) -> None:
    source = save({"a": torch.ones(10), "b": torch.ones(10)}, tmp_path / "a.pt")
    assert convert(source, tmp_path / "b.safetensors", max_shard_size=50).notes == ()
    result = convert(source, tmp_path / "b.safetensors")
    shards = "b-00001-of-00002.safetensors, b-00002-of-00002.safetensors"
    assert [note.rpartition(": ")[2] for note in result.notes] == [str(tmp_path / "b.safetensors.index.json"), shards]
    assert convert(source, tmp_path / "b.safetensors", max_shard_size=50, overwrite=True).notes == ()


@pytest.mark.parametrize("name", ["b.safetensors", "b.npz", "b/"])
def test_target_that_can_store_no_tensor_is_not_created(tmp_path: Path, name: str) -> None:
    source = save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="cannot hold any of its tensors: q: it is quantized"):
        convert(source, f"{tmp_path}/{name}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_generated_names_avoid_existing_names(tmp_path: Path) -> None:
    value = {"": torch.zeros(1), "tensor": torch.ones(1), "\ud800": torch.zeros(1), "\\ud800": torch.ones(1)}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert result.renamed == (("", "tensor#2"), ("\ud800", "\\ud800#2"))
    loaded = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert {name: float(tensor) for name, tensor in loaded.items()} == {
        "tensor#2": 0,
        "tensor": 1,
        "\\ud800#2": 0,
        "\\ud800": 1,
    }


def test_names_escaped_for_npz_are_reported(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    value = {"a": torch.zeros(1), "a.npy": torch.ones(1), "../b": torch.full((1,), 2.0), "c/d": torch.full((1,), 3.0)}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.npz")
    assert result.renamed == (("a.npy", "a%2Enpy"), ("../b", "%2E%2E/b"))
    with numpy.load(tmp_path / "b.npz") as loaded:
        assert {name: float(loaded[name][0]) for name in loaded.files} == {
            "a": 0,
            "a%2Enpy": 1,
            "%2E%2E/b": 2,
            "c/d": 3,
        }


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_attributes_set_on_tensors_go_to_leftovers(tmp_path: Path, name: str) -> None:
    tensor, net = torch.ones(1), torch.nn.Linear(1, 1)
    tensor.scale = 3
    net.weight.parallel = True
    value = {"t": tensor, "net": net, "counts": Counter("aab")}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
    kept = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    flat = kept if name == "b.safetensors" else {**kept, "t": {"$attributes": kept["t/$attributes"]}}
    assert flat["t"] == {"$attributes": {"scale": 3}}
    assert flat["net"]["parameters"] == {"weight": {"$attributes": {"parallel": True}}}
    assert flat["counts"] == {"a": 2, "b": 1}
    assert result.tensors == 3


@pytest.mark.skipif(not hasattr(torch, "jagged"), reason="needs a newer torch")
def test_quantized_and_sparse_tensors_are_kept_beside_the_components_of_a_jagged_one(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    packed = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    value = {"jagged": jagged, "packed": packed, "sparse": torch.eye(3).to_sparse()}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.pt")
    assert result.left == ()
    loaded = load(tmp_path / "b.pt")
    assert loaded["packed"].dequantize().tolist() == [1, 1, 1]
    assert loaded["sparse"].to_dense().equal(torch.eye(3))
    assert loaded["jagged/values"].tolist() == [1] * 5


def test_values_of_a_single_megatron_rank_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(5)}, "iteration": 10}, folder / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    result = convert(tmp_path / "run", tmp_path / "out.safetensors")
    assert (result.tensors, result.listed) == (1, ())
    data = json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]
    assert data == {"iter_0000010/mp_rank_00/model_optim_rng.pt": {"iteration": 10}}


def test_missing_source_is_reported_before_an_existing_target(tmp_path: Path) -> None:
    """With swapped arguments, the advice must not be to overwrite."""
    (tmp_path / "train.pt").write_bytes(b"x")
    with pytest.raises(CannotReadError, match="No such file"):
        convert(tmp_path / "model.safetensors", tmp_path / "train.pt")
