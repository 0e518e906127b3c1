"""What is converted and what is not: parts, names, ties, views, leftovers, dtypes, shards; and that nothing is lost."""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter, OrderedDict
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from tests import forge
from tests.each import each, for_each
from tests.release import RELEASE, SAVES_NEW_DTYPES

from transload.converting import convert, parts
from transload.errors import CannotReadError, ContentError, ConvertError, OverflowRefusedError, UsageError
from transload.formats.tensors import Budget
from transload.judge import inspect
from transload.nodes import Call, Global

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
    """``since`` which release ``weights_only=True`` allows what is in the file."""
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


def test_a_module_becomes_what_its_state_dict_is(tmp_path: Path) -> None:
    net = Tied()
    made = convert(save(net, tmp_path / "net.pt"), tmp_path / "a.pt")
    assert same(load(tmp_path / "a.pt"), dict(net.state_dict()))
    why = {each.name: each.why for each in made.left}
    assert why == {
        "rotary._buffers/inv_freq": "a buffer registered with persistent=False",
        "cache": "an attribute of a module, which state_dict() does not have",
    }
    assert made.complete
    rest = json.loads((tmp_path / "a.pt.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert rest["hidden"] == 3
    assert rest["modules"]["lm_head"]["in_features"] == 3
    assert rest["$class"].endswith("test_convert.Tied")


def test_ties_load_back_tied(tmp_path: Path) -> None:
    net = Tied()
    made = convert(save(net, tmp_path / "net.pt"), tmp_path / "a.safetensors")
    assert made.aliases == (("lm_head.weight", "embed.weight"),)
    other = Tied()
    assert safetensors_torch.load_model(other, tmp_path / "a.safetensors") == (set(), [])
    assert other.lm_head.weight.data_ptr() == other.embed.weight.data_ptr()
    assert same(dict(net.state_dict()), dict(other.state_dict()))
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    back = load(tmp_path / "b.pt")
    assert same(back, dict(net.state_dict()))
    assert back["lm_head.weight"].data_ptr() == back["embed.weight"].data_ptr()


def test_what_safetensors_itself_ties_is_tied_again(tmp_path: Path) -> None:
    net = Tied()
    safetensors_torch.save_model(net, tmp_path / "a.safetensors", metadata={"made": "here"})
    made = convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    back = load(tmp_path / "b.pt")
    assert same(back, dict(net.state_dict()))
    assert back["lm_head.weight"].data_ptr() == back["embed.weight"].data_ptr()
    assert json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["metadata"] == {"made": "here"}
    again = convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert dict(inspect(tmp_path / "c.safetensors").facts)["metadata.made"] == "here"
    assert len(again.aliases) == 1


def test_ties_keep_through_stripping(tmp_path: Path) -> None:
    shared = torch.rand(3)
    source = save({"module.a": shared, "module.b": shared}, tmp_path / "a.pt")
    convert(source, tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", strip="module.")
    assert made.aliases == (("b", "a"),)


def test_a_module_in_a_dictionary(tmp_path: Path) -> None:
    net = Tied()
    convert(save({"model": net, "epoch": 4}, tmp_path / "net.pt"), tmp_path / "a.pt")
    back = load(tmp_path / "a.pt")
    assert back["epoch"] == 4
    assert same(back["model"], dict(net.state_dict()))
    convert(tmp_path / "net.pt", tmp_path / "b.safetensors", key="model")
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"embed.weight", "rotary.scale"}


# -- parts and names


def test_the_parts_that_there_are(train: Path) -> None:
    found = {part.key: (part.kind, part.tensors) for part in parts(train)}
    assert found[""][1] == 3 + 3
    assert found["state_dict"] == ("state dict", 3)
    assert found["optimizer/state"] == ("nested", 3)
    assert not any(key.endswith("/0") for key in found)


@pytest.mark.parametrize("key", ["state_dict", "state_dict/"[:-1]])
def test_a_part(train: Path, tmp_path: Path, key: str) -> None:
    made = convert(train, tmp_path / "a.safetensors", key=key, strip="module.")
    assert {each.name for each in inspect(tmp_path / "a.safetensors").tensors} == {"embed.weight", "rotary.scale"}
    assert (made.tensors, made.others, made.leftovers) == (3, 3, "")


@pytest.mark.parametrize("key", ["a.b", "a/b"])
def test_a_key_with_steps(tmp_path: Path, key: str) -> None:
    source = save({"a": {"b": {"w": torch.ones(2)}, "c": torch.ones(3)}, "a.bc": torch.ones(1)}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt", key=key)
    assert same(load(tmp_path / "b.pt"), {"w": torch.ones(2)})


def test_a_key_that_is_a_tensor(tmp_path: Path) -> None:
    convert(save({"a": {"w": torch.ones(2)}}, tmp_path / "a.pt"), tmp_path / "b.npz", key="a.w")
    assert [each.name for each in inspect(tmp_path / "a.pt").tensors] == ["a/w"]
    numpy = pytest.importorskip("numpy")
    with numpy.load(tmp_path / "b.npz") as arrays:
        assert arrays.files == ["w"]


def test_a_training_checkpoint_names_its_parts(train: Path, tmp_path: Path) -> None:
    told = "it also holds an optimizer; --key converts one part alone: state_dict, optimizer"
    assert convert(train, tmp_path / "a.safetensors").notes.count(told) == 1
    assert not any("--key" in note for note in convert(train, tmp_path / "a.pt").notes)  # which keeps all in its place
    assert not any("--key" in note for note in convert(train, tmp_path / "b.safetensors", key="state_dict").notes)


def test_only_a_training_checkpoint_names_its_parts(tmp_path: Path) -> None:
    def check(value: Any) -> None:
        made = convert(save(value, tmp_path / "a.pt"), tmp_path / "a.safetensors", overwrite=True)
        assert not any("--key" in note for note in made.notes)

    weights = {"fc.weight": torch.ones(2)}
    several = {"unet": weights, "text_encoder": {"fc.bias": torch.zeros(2)}}
    alone = {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "epoch": 3}
    for_each(
        [weights, several, alone, {"model": weights, "epoch": 3}, {"optim.weight": torch.ones(1), **weights}], check
    )


def test_a_key_that_is_not_there(train: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="'state_dit'") as caught:
        convert(train, tmp_path / "a.safetensors", key="state_dit")
    assert "state_dict" in caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.ckpt"]


def test_names_that_would_collide(tmp_path: Path) -> None:
    source = save({"m.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="two tensors would be called 'a'"):
        convert(source, tmp_path / "b.safetensors", strip="m.")
    doubled = save(
        {1: torch.ones(1), "1": torch.zeros(2), "x": {"y": torch.ones(3)}, "x/y": torch.ones(4)}, tmp_path / "c.pt"
    )
    made = convert(doubled, tmp_path / "c.safetensors")
    assert made.renamed == (("1", "1#2"), ("x/y", "x/y#2"))
    assert made.tensors == 4


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((1.0, "1.0", None, "None"), id="of other types"),
        pytest.param((1 << 200, "a huge integer"), id="huge"),
    ],
)
def test_keys_that_look_alike_keep_their_own_numbers(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    source = save({key: torch.full((2,), float(at)) for at, key in enumerate(keys)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.pt")
    assert [float(each[0]) for each in load(tmp_path / "b.pt").values()] == list(range(len(keys)))
    assert len(made.renamed) == len(keys) // 2


_LONG, _ALIKE = "x" * 1500, "x" * 1499 + "y"


class LongNames(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(_LONG, torch.nn.Parameter(torch.zeros(2)))
        self.register_parameter(_ALIKE, torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({_LONG: torch.zeros(2), _ALIKE: torch.ones(2)}, [_LONG, _ALIKE], id="alike"),
        pytest.param(
            {"m": {_LONG: [{_ALIKE: torch.zeros(2)}]}, "e": torch.ones(2)}, [f"m/{_LONG}/0/{_ALIKE}", "e"], id="nested"
        ),
        pytest.param(
            {_LONG: {"w": torch.zeros(2)}, _ALIKE: {"w": torch.ones(2)}},
            [f"{_LONG}/w", f"{_ALIKE}/w"],
            id="alike above",
        ),
        pytest.param({_ALIKE: {"w": 2}, _LONG: {"w": torch.zeros(2)}}, [f"{_LONG}/w"], id="alike, without a tensor"),
        pytest.param(LongNames(), [_LONG, _ALIKE], id="module"),
        pytest.param({f"{'a' * 200}… (3000 characters)": torch.zeros(2)}, [f"{'a' * 200}… (3000 characters)"], id="no"),
    ],
)
def test_names_of_any_length_are_kept_whole(tmp_path: Path, value: Any, expected: list[str]) -> None:
    source = save(value, tmp_path / "a.pt")
    convert(source, tmp_path / "b.safetensors")
    back = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert {name: float(each[0]) for name, each in back.items()} == {name: at for at, name in enumerate(expected)}
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert sorted(load(tmp_path / "c.pt")) == sorted(expected)


def test_a_part_of_a_tensor_has_its_whole_name_too(tmp_path: Path) -> None:
    convert(save({_LONG: torch.eye(3).to_sparse()}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {f"{_LONG}/indices", f"{_LONG}/values"}


def test_long_keys_above_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "MAX_NAMES", 20_000)
    source = save({_LONG: [torch.ones(1)] * 20}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    assert not made.complete
    assert ["its names add up to more than" in each.why for each in made.left] == [True]


def test_tensors_under_keys_that_are_neither_strings_nor_numbers(tmp_path: Path) -> None:
    value = {b"abc": torch.ones(1), ("a", 1): {"w": torch.ones(2), "lr": 3}, 1 << 200: torch.ones(3)}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert made.tensors == 3
    assert [each.name for each in made.listed] == ["('a', 1)"]
    assert [note for note in made.notes if "neither a string nor a number" in note and "('a', 1)/w" in note]


def test_what_the_reader_has_not_seen_is_lost(tmp_path: Path) -> None:
    many = save({"w": torch.ones(2), "many": [[torch.ones(1)] * 300] * 300}, tmp_path / "a.pt")
    made = convert(many, tmp_path / "b.safetensors")
    assert not made.complete
    assert [each.why for each in made.left if "not all of it was searched" in each.why]


def test_parts_whose_names_are_taken(tmp_path: Path) -> None:
    source = save({"x": torch.eye(3).to_sparse(), "x/indices": torch.full((2, 3), 9)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    back = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert made.renamed == (("x/indices", "x/indices#2"),)
    assert torch.equal(back["x/indices"], torch.arange(3).repeat(2, 1))
    assert torch.equal(back["x/indices#2"], torch.full((2, 3), 9))
    convert(source, f"{tmp_path}/raw/")
    index = json.loads((tmp_path / "raw" / "index.json").read_text(encoding="utf-8"))
    assert list(index["tensors"]) == ["x/indices", "x/values", "x/indices#2"]


def test_a_second_name_that_the_metadata_needs(tmp_path: Path) -> None:
    """Loaders look there for ``format``."""
    weight = torch.arange(3.0)
    made = convert(save({"a": weight, "format": weight}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert made.aliases == ()
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"a", "format"}


def test_one_tensor_alone(tmp_path: Path) -> None:
    made = convert(save(torch.arange(3), tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert made.renamed == (("", "tensor"),)
    convert(tmp_path / "a.pt", tmp_path / "c.pt")
    assert torch.equal(load(tmp_path / "c.pt"), torch.arange(3))


NASTY = [
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


def test_names_are_never_paths(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    source = save({name: torch.full((2,), float(n)) for n, name in enumerate(NASTY)}, folder / "a.pt")
    for to in ("raw", "npz", "safetensors", "torch"):
        made = convert(source, folder / f"out-{to}", to=to)
        assert made.tensors == len(NASTY)
        # Only safetensors files have metadata of that name.
        assert ("__metadata__" in dict(made.renamed)) == (to == "safetensors")
    assert {path.name for path in folder.iterdir()} == {"a.pt", "out-raw", "out-npz", "out-safetensors", "out-torch"}
    assert {path.name for path in (folder / "out-raw").iterdir()} == {
        "index.json",
        *(f"{number:06d}.bin" for number in range(len(NASTY))),
    }
    index = json.loads((folder / "out-raw" / "index.json").read_text(encoding="utf-8"))
    assert index["tensors"]["../../etc/passwd"]["file"] == "000000.bin"
    assert len(safetensors_torch.load_file(folder / "out-safetensors")) == len(NASTY)
    numpy = pytest.importorskip("numpy")
    with numpy.load(folder / "out-npz") as arrays:
        assert len(arrays.files) == len(NASTY)
        assert not any(name.startswith("/") or ".." in name.split("/") or "\\" in name for name in arrays.files)


# -- what is left


def test_what_the_target_cannot_store_is_in_a_file_beside_it(train: Path, tmp_path: Path) -> None:
    made = convert(train, tmp_path / "a.safetensors")
    assert made.leftovers == str(tmp_path / "a.safetensors.leftovers.json")
    rest = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))
    assert rest["from"] == "train.ckpt"
    data = rest["data"]
    assert (data["epoch"], data["history"]) == (3, [0.5, "nan"])
    args = {"$class": "argparse.Namespace", "lr": 0.25, "name": "naïve", "device": "cuda:1", "size": [2, 3]}
    assert data["args"] == args
    assert data["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert not made.listed


def test_a_torch_zip_keeps_the_object(train: Path, tmp_path: Path) -> None:
    made = convert(train, tmp_path / "a.pt")
    before, after = torch.load(train, weights_only=False), load(tmp_path / "a.pt")
    assert list(after) == ["state_dict", "optimizer", "epoch", "history"]
    assert type(after["state_dict"]) is OrderedDict
    assert same(after["state_dict"], before["state_dict"])
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert list(after["optimizer"]["state"]) == [0]
    rest = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
    assert rest["args"]["lr"] == 0.25


class Strange:
    def __reduce__(self) -> Any:
        return print, ("this must never be seen",)


def test_what_is_no_plain_data_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save({"w": torch.ones(2), "odd": Strange(), "big": 1 << 5000, "fine": 1}, tmp_path / "a.pt")
    for name in ("b.safetensors", "b.pt"):
        made = convert(source, tmp_path / name)
        assert "odd" in {each.name for each in made.listed}
    assert capsys.readouterr() == ("", "")


def test_values_of_all_kinds_are_kept(tmp_path: Path) -> None:
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
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    data = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
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
    assert not made.listed
    convert(tmp_path / "a.pt", tmp_path / "c.pt")
    back = load(tmp_path / "c.pt", since=(2, 6))
    assert (back["bytes"], back["set"], back["tuple"], back[7]) == (b"\x00\xff", {3}, (1, "a", None), "seven")


def test_two_keys_of_one_text(tmp_path: Path) -> None:
    made = convert(save({"w": torch.ones(1), 2: 7, "2": 8}, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"] == {"2": 8}
    assert [(each.name, each.why) for each in made.listed] == [
        ("2", "int: 7, under a key that is written like another one")
    ]


def test_numbers_of_numpy_in_the_other_byte_order() -> None:
    from transload.writing.objects import Leftovers

    dtype = Call(Global("numpy", "dtype", 0), ("f8", False, True), "reduce", 0)
    dtype.states = [(3, ">", None, None, None, -1, -1, 0)]
    scalar = Call(Global("numpy._core.multiarray", "scalar", 0), (dtype, pack(">d", 0.25)), "reduce", 0)
    bad = Call(Global("_codecs", "encode", 0), ("\u20ac", "latin1"), "reduce", 0)
    leftovers = Leftovers([(("a",), scalar), (("b",), bad)], frozenset())
    assert leftovers.data == {"a": 0.25}
    assert [each.name for each in leftovers.listed] == ["b"]


def test_cycles_end(tmp_path: Path) -> None:
    value: dict[str, Any] = {"w": torch.ones(2), "list": []}
    value["self"] = value
    value["list"].append(value["list"])
    for name in ("b.safetensors", "b.pt", "b.npz"):
        made = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
        assert made.tensors == 1
        assert any("contains itself" in each.why for each in made.listed)


def test_what_is_shared_a_thousandfold_ends(tmp_path: Path) -> None:
    bomb: list[Any] = ["x" * 1000]
    for _ in range(40):
        bomb = [bomb, bomb]
    source = save({"w": torch.ones(2), "bomb": bomb}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    assert Path(made.leftovers).stat().st_size < 200 << 20
    assert any("shared too often" in each.why for each in made.listed)


def test_a_text_shared_a_thousandfold_ends(tmp_path: Path) -> None:
    value = {"w": torch.ones(2), "bytes": [b"x" * (1 << 19)] * 1000, "number": [1 << 4000] * 10_000}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert Path(made.leftovers).stat().st_size < 100 << 20
    assert len(made.listed) == 10_001
    assert made.listed[-1].why.startswith("and ")
    assert any("with more text than is kept" in each.why for each in made.listed)


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_a_long_history_of_numbers(tmp_path: Path, name: str) -> None:
    losses = [0.5 * number for number in range(20_000)]
    made = convert(save({"w": torch.ones(2), "losses": losses}, tmp_path / "a.pt"), tmp_path / name)
    kept = load(tmp_path / name) if name == "b.pt" else json.loads(Path(made.leftovers).read_text())["data"]
    assert kept["losses"] == losses


class Private(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._ready, self._step, self._nothing = False, 0, None
        self._words: dict[str, int] = {}


def test_attributes_that_are_empty_are_kept(tmp_path: Path) -> None:
    made = convert(save(Private(), tmp_path / "a.pt"), tmp_path / "b.safetensors")
    kept = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
    assert {key: kept[key] for key in kept if key != "$class"} == {
        "training": True,
        "_ready": False,
        "_step": 0,
        "_nothing": None,
        "_words": {},
    }


# -- numbers


def test_views_of_all_kinds(tmp_path: Path) -> None:
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
    back = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert same(back, value)
    convert(source, tmp_path / "b.pt")
    back = load(tmp_path / "b.pt")
    assert same(back, value)
    assert back["turned"].data_ptr() == back["base"].data_ptr()
    assert back["part"].stride() == value["part"].stride()
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size + 2000


def test_a_part_of_a_large_storage_is_cut_out(tmp_path: Path) -> None:
    large = torch.rand(100_000)
    source = save({"a": large[10:20], "b": large[15:30], "c": large[50_000:50_010]}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 5000
    back = load(tmp_path / "b.pt")
    assert torch.equal(back["b"], large[15:30])
    back["a"][5:] = -1
    assert back["b"][0] == -1
    assert back["c"].untyped_storage().nbytes() == 40


def test_bytes_of_sparse_tensors_are_counted_once(tmp_path: Path) -> None:
    source = save({"w": torch.ones(10), "sparse": torch.eye(100).to_sparse()}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.pt")
    assert made.nbytes == 40 + 100 * 4 + 2 * 100 * 8


def test_only_a_torch_zip_stores_sparse_and_quantized(tmp_path: Path) -> None:
    value = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
        "w": torch.ones(2),
    }
    source = save(value, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.pt")
    back = load(tmp_path / "b.pt", since=(2, 6))
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(back["quantized"].dequantize(), value["quantized"].dequantize())
    assert (made.complete, made.tensors) == (True, 3)
    rounded = convert(source, tmp_path / "c.pt", dtype="float16")
    assert (rounded.cast, rounded.notes) == (1, ("sparse keeps its dtype: it is sparse_coo",))
    other = convert(source, tmp_path / "b.safetensors")
    assert not other.complete
    assert [each.name for each in other.left] == ["quantized"]
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"w", "sparse/indices", "sparse/values"}


def test_a_sparse_tensor_over_a_part_of_a_storage(tmp_path: Path) -> None:
    """Only the oldest files have parts of storages, and nothing that is written has: its tensors are stored alone."""
    layout = forge.call(forge.name("torch.serialization", "_get_layout"), "torch.sparse_coo")
    part = forge.storage_id("0", 4, "FloatStorage", "cpu", forge.tuple_of("9", 1, 3))
    whole = forge.storage_id("1", 3, "LongStorage", "cpu", None)
    parts = (forge.tensor(storage=whole, shape=(1, 3), stride=(3, 1)), forge.tensor(storage=part, shape=(3,)), (3,))
    sparse = forge.call(forge.name("torch._utils", "_rebuild_sparse_tensor"), layout, forge.tuple_of(*parts))
    held = forge.pickled(forge.ordered({"s": sparse})), forge.pickled(forge.listing("0", "1"))
    storages = (pack("<q", 4) + forge.FLOATS, pack("<4q", 3, 0, 1, 2))
    (tmp_path / "a.pt").write_bytes(forge.legacy(object=held[0], keys=held[1], storages=storages))
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert load(tmp_path / "b.pt")["s/values"].tolist() == load(tmp_path / "a.pt")["s"].to_dense().tolist() == [2, 3, 4]


def test_a_tensor_that_claims_too_much(tmp_path: Path) -> None:
    source = save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
    for name in ("b.safetensors", "b.npz", "b/"):
        with pytest.raises(ContentError, match="claims 4,000,000,000,000 bytes"):
            convert(source, f"{tmp_path}/{name}")
    with pytest.raises(ContentError):
        convert(source, tmp_path / "c.pt", dtype="float16")
    convert(source, tmp_path / "d.pt")
    assert load(tmp_path / "d.pt")["w"].shape == (10**6, 10**6)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "d.pt"}


def test_one_storage_under_two_dtypes(tmp_path: Path) -> None:
    if not hasattr(torch, "uint16") or not hasattr(torch, "float8_e5m2"):
        pytest.skip("needs a newer torch")
    base = torch.arange(256, dtype=torch.uint8).view(torch.uint16)
    value = {"a": base[3:20], "b": base.view(torch.float8_e5m2)[20:60], "c": base[100:]}
    source = save(value, tmp_path / "a.pt")
    convert(source, tmp_path / "b.safetensors")
    convert(source, tmp_path / "b.pt")
    back = load(tmp_path / "b.pt")
    for found in (safetensors_torch.load_file(tmp_path / "b.safetensors"), back):
        assert all(torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)) for name, each in value.items())
    assert back["a"].untyped_storage().data_ptr() == back["b"].untyped_storage().data_ptr()
    assert back["c"].untyped_storage().nbytes() == 56


# -- dtypes


NEWER = [
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex64",
]


@each("name", NEWER)
def test_newer_dtypes(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None or ("float8" in name and not SAVES_NEW_DTYPES):
        pytest.skip("needs a newer torch")
    raw = torch.arange(64, dtype=torch.uint8)
    value = {"x": raw.view(dtype).reshape(2, -1)}
    convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    convert(tmp_path / "a.pt", tmp_path / "d.pt")
    for found in (
        safetensors_torch.load_file(tmp_path / "b.safetensors"),
        load(tmp_path / "c.pt"),
        load(tmp_path / "d.pt"),
    ):
        assert (found["x"].dtype, found["x"].shape) == (dtype, value["x"].shape)
        assert torch.equal(found["x"].view(torch.uint8).flatten(), raw)


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "raw"])
def test_dtypes_are_changed_on_the_way(tmp_path: Path, to: str) -> None:
    value = {"a": torch.randn(33, 7), "t": torch.randn(5, 6).t(), "i": torch.arange(3), "h": torch.randn(4).half()}
    source = save(value, tmp_path / "a.pt")
    made = convert(source, tmp_path / f"b.{to}", to=to, dtype="float16")
    assert (made.cast, made.verified) == (2, True)
    if to in ("safetensors", "torch"):
        back = (
            safetensors_torch.load_file(tmp_path / "b.safetensors")
            if to == "safetensors"
            else load(tmp_path / "b.torch")
        )
        assert same(
            back, {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in value.items()}
        )


def test_tied_ones_stay_tied_in_another_dtype(tmp_path: Path) -> None:
    shared = torch.randn(3)
    source = save({"a": shared, "b": shared}, tmp_path / "a.pt")
    convert(source, tmp_path / "b.pt", dtype="bfloat16")
    back = load(tmp_path / "b.pt")
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert torch.equal(back["b"], shared.bfloat16())


def test_what_would_overflow_is_refused(tmp_path: Path) -> None:
    source = save({"fine": torch.ones(3), "large": torch.tensor([1e5, -1e9, float("inf"), 2.0])}, tmp_path / "a.pt")
    with pytest.raises(OverflowRefusedError, match="2 of the 4 values of large are too large for float16"):
        convert(source, tmp_path / "b.safetensors", dtype="float16")
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt"}
    made = convert(source, tmp_path / "b.safetensors", dtype="float16", allow_inf=True)
    assert made.infinite == 2
    assert convert(source, tmp_path / "c.safetensors", dtype="bfloat16").infinite == 0


# -- shards


def test_shards(tmp_path: Path) -> None:
    value = {f"layer.{number}.w": torch.randn(100) for number in range(7)}
    value["tied"] = value["layer.3.w"]
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "m.safetensors", max_shard_size=1000)
    names = [f"m-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert [Path(name).name for name in made.files] == [*names, "m.safetensors.index.json"]
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": 2800}
    assert set(index["weight_map"]) == set(value) - {"tied"}
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors_torch.load_file(tmp_path / file)[name], value[name])
    convert(tmp_path / "m.safetensors.index.json", tmp_path / "b.pt")
    assert same(load(tmp_path / "b.pt"), value)
    assert not [each for each in inspect(tmp_path / "m.safetensors.index.json").findings if each.severity == "error"]


def test_one_shard_is_a_file(tmp_path: Path) -> None:
    source = save({"a": torch.ones(3)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "m.safetensors", max_shard_size="5GB")
    assert [Path(name).name for name in made.files] == ["m.safetensors"]
    with pytest.raises(UsageError, match="only safetensors"):
        convert(source, tmp_path / "m.pt", max_shard_size="5GB")


# -- sources


def test_sources_of_all_kinds(tmp_path: Path) -> None:
    source = save({"a": torch.randn(3)}, tmp_path / "a.pt")
    raw = source.read_bytes()
    with source.open("rb") as opened:
        sources: list[Any] = [str(source), raw, io.BytesIO(raw), opened]
        for number, each in enumerate(sources):
            convert(each, tmp_path / f"{number}.safetensors")
    made = {(tmp_path / f"{number}.safetensors").read_bytes() for number in range(4)}
    assert len(made) == 1


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("needs a newer torch")
    value = {"a": torch.randn(6, 4), "b": {"c": torch.arange(5)}}
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=str(tmp_path / "dcp"))
    convert(tmp_path / "dcp", tmp_path / "a.safetensors")
    found = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert sorted(map(tuple, (each.shape for each in found.values()))) == [(5,), (6, 4)]
    assert [(part.key, part.tensors) for part in parts(tmp_path / "dcp")] == [("", 2), ("b", 1)]
    convert(tmp_path / "dcp", tmp_path / "b.safetensors", key="b")
    assert list(safetensors_torch.load_file(tmp_path / "b.safetensors")) == ["c"]


def test_the_partitions_of_ranks_are_not_put_together_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step1")
    for name in ("mp_rank_00_model_states", "bf16_zero_pp_rank_0_mp_rank_00_optim_states"):
        torch.save({"module": {"w": torch.ones(2)}}, folder / f"{name}.pt")
    made = convert(tmp_path, tmp_path / "out.safetensors")
    assert made.format == "deepspeed"
    assert "parts of one tensor are not joined" in made.notes[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("target", ["out.safetensors", "out.pt"])
def test_values_of_a_distributed_checkpoint_are_kept_and_its_own_table_is_not(tmp_path: Path, target: str) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    value = {"w": torch.arange(6.0).view(2, 3), "epoch": 3, "args": {"lr": 0.1, "text": "x" * 500}}
    try:
        dcp.save(value, checkpoint_id=tmp_path / "dcp", no_dist=True)
    except TypeError:  # older releases
        dcp.save(value, checkpoint_id=tmp_path / "dcp")
    made = convert(tmp_path / "dcp", tmp_path / target)
    assert made.complete
    assert made.left == made.listed == ()
    beside = json.loads((tmp_path / f"{target}.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert beside["epoch"] == 3
    assert "x" * 500 in json.dumps(beside)
    assert "Metadata" not in json.dumps(beside)


def test_values_of_all_shards_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"a": torch.ones(2), "one": 1, "same": 1}, source / "1.bin")
    torch.save({"b": torch.ones(3), "epoch": 7}, source / "2.bin")
    torch.save({"c": torch.ones(3), "same": 3}, source / "3.bin")
    index = {"metadata": {}, "weight_map": {"a": "1.bin", "b": "2.bin", "c": "3.bin"}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="ascii")
    made = convert(source, tmp_path / "out.safetensors")
    assert made.listed == ()
    beside = json.loads((tmp_path / "out.safetensors.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert beside == {"": {"one": 1, "same": 1, "epoch": 7}, "#2": {"same": 3}}


def test_values_of_all_ranks_are_kept(tmp_path: Path) -> None:
    step = tmp_path / "ds" / "global_step1"
    step.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("global_step1", encoding="ascii")
    torch.save({"module": {"w": torch.ones(2)}, "epoch": 5}, step / "mp_rank_00_model_states.pt")
    torch.save({"x": torch.ones(4), "lr": 0.5}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    made = convert(tmp_path / "ds", tmp_path / "out.safetensors")
    assert made.listed == ()
    beside = (tmp_path / "out.safetensors.leftovers.json").read_text(encoding="utf-8")
    assert '"epoch": 5' in beside
    assert '"lr": 0.5' in beside


# -- notes


def test_a_prefix_that_no_name_has(tmp_path: Path) -> None:
    source = save({"module.a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors", strip=("module.", "_orig_mod."))
    assert made.notes == ("no name begins with the prefix '_orig_mod.'",)
    assert set(safetensors_torch.load_file(tmp_path / "b.safetensors")) == {"a", "b"}


@each(
    ("name", "dtype", "told"),
    [
        ("b.safetensors", "", "a, b, c"),
        ("b.npz", "", "a, b, c, tied"),
        ("b/", "", "a, b, c"),
        ("b.pt", "", ""),
        ("b.pt", "bfloat16", "a, b, c, tied"),
    ],
)
def test_views_that_are_none_any_more_are_named(tmp_path: Path, name: str, dtype: str, told: str) -> None:
    base = torch.arange(20.0)
    value = {"a": base[:8], "b": base[4:12], "c": base[11:13], "d": base[13:], "e": base[13:13], "tied": base[:8]}
    made = convert(save(value, tmp_path / "a.pt"), f"{tmp_path}/{name}", dtype=dtype)
    notes = [note.partition(": ")[2] for note in made.notes if note.startswith("views that shared memory")]
    assert [sorted(note.split(", ")) for note in notes] == ([told.split(", ")] if told else [])


@pytest.mark.skipif(not SAVES_NEW_DTYPES, reason="needs a newer torch")
def test_floating_dtypes_that_are_not_changed_are_reported(tmp_path: Path) -> None:
    source = save({"a": torch.ones(4).to(torch.float8_e4m3fn), "b": torch.ones(2)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors", dtype="bfloat16")
    assert made.notes == ("--dtype does not apply to float8_e4m3fn (tensors: 1)",)


def test_many_notes_of_a_kind_are_counted(tmp_path: Path) -> None:
    source = save({str(number): torch.eye(2).to_sparse() for number in range(23)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    assert len(made.notes) == 21
    assert made.notes[-1] == "… is stored as the tensors it consists of, and so are 3 more"


def test_a_key_inside_of_a_module(tmp_path: Path) -> None:
    made = convert(save({"net": Tied()}, tmp_path / "a.pt"), tmp_path / "b.pt", key="net.rotary")
    assert list(load(tmp_path / "b.pt")) == ["scale"]
    kept = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
    assert kept["net/_modules/rotary"]["$class"].endswith("Rotary")


def test_what_the_name_says_and_what_it_is(tmp_path: Path) -> None:
    source = save({"a": torch.ones(1)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.npz", to="safetensors")
    assert made.notes == ("it is safetensors, although its name says npz",)
    assert convert(source, tmp_path / "c", to="safetensors").notes == ()


def test_an_index_of_other_shards_is_reported(tmp_path: Path) -> None:
    source = save({"a": torch.ones(10), "b": torch.ones(10)}, tmp_path / "a.pt")
    assert convert(source, tmp_path / "b.safetensors", max_shard_size=50).notes == ()
    made = convert(source, tmp_path / "b.safetensors")
    shards = "b-00001-of-00002.safetensors, b-00002-of-00002.safetensors"
    assert [note.rpartition(": ")[2] for note in made.notes] == [str(tmp_path / "b.safetensors.index.json"), shards]
    assert convert(source, tmp_path / "b.safetensors", max_shard_size=50, overwrite=True).notes == ()


@pytest.mark.parametrize("name", ["b.safetensors", "b.npz", "b/"])
def test_a_target_that_could_store_nothing_is_not_created(tmp_path: Path, name: str) -> None:
    source = save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="cannot hold any of its tensors: q: it is quantized"):
        convert(source, f"{tmp_path}/{name}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_invented_names_give_way(tmp_path: Path) -> None:
    value = {"": torch.zeros(1), "tensor": torch.ones(1), "\ud800": torch.zeros(1), "\\ud800": torch.ones(1)}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert made.renamed == (("", "tensor#2"), ("\ud800", "\\ud800#2"))
    back = safetensors_torch.load_file(tmp_path / "b.safetensors")
    assert {name: float(each) for name, each in back.items()} == {
        "tensor#2": 0,
        "tensor": 1,
        "\\ud800#2": 0,
        "\\ud800": 1,
    }


def test_names_that_are_escaped_for_numpy_are_reported(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    value = {"a": torch.zeros(1), "a.npy": torch.ones(1), "../b": torch.full((1,), 2.0), "c/d": torch.full((1,), 3.0)}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.npz")
    assert made.renamed == (("a.npy", "a%2Enpy"), ("../b", "%2E%2E/b"))
    with numpy.load(tmp_path / "b.npz") as back:
        assert {name: float(back[name][0]) for name in back.files} == {"a": 0, "a%2Enpy": 1, "%2E%2E/b": 2, "c/d": 3}


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_what_is_set_on_tensors_is_kept(tmp_path: Path, name: str) -> None:
    tensor, net = torch.ones(1), torch.nn.Linear(1, 1)
    tensor.scale = 3
    net.weight.parallel = True
    value = {"t": tensor, "net": net, "counts": Counter("aab")}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
    kept = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
    flat = kept if name == "b.safetensors" else {**kept, "t": {"$attributes": kept["t/$attributes"]}}
    assert flat["t"] == {"$attributes": {"scale": 3}}
    assert flat["net"]["parameters"] == {"weight": {"$attributes": {"parallel": True}}}
    assert flat["counts"] == {"a": 2, "b": 1}
    assert made.tensors == 3


@pytest.mark.skipif(not hasattr(torch, "jagged"), reason="needs a newer torch")
def test_special_tensors_are_kept_beside_the_parts_of_others(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    packed = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    value = {"jagged": jagged, "packed": packed, "sparse": torch.eye(3).to_sparse()}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / "b.pt")
    assert made.left == ()
    back = load(tmp_path / "b.pt")
    assert back["packed"].dequantize().tolist() == [1, 1, 1]
    assert back["sparse"].to_dense().equal(torch.eye(3))
    assert back["jagged/values"].tolist() == [1] * 5


def test_one_rank_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(5)}, "iteration": 10}, folder / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    made = convert(tmp_path / "run", tmp_path / "out.safetensors")
    assert (made.tensors, made.listed) == (1, ())
    data = json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]
    assert data == {"iter_0000010/mp_rank_00/model_optim_rng.pt": {"iteration": 10}}


def test_a_source_that_is_not_there_comes_first(tmp_path: Path) -> None:
    """If somebody mixed the two up, the advice must not be to overwrite."""
    (tmp_path / "train.pt").write_bytes(b"x")
    with pytest.raises(CannotReadError, match="No such file"):
        convert(tmp_path / "model.safetensors", tmp_path / "train.pt")
