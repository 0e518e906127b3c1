"""numpy arrays in a checkpoint: plain ones become tensors, and every other one is named."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from tests.each import for_each
from tests.release import RELEASE

from transload.cli.main import main
from transload.converting import Conversion, convert
from transload.formats.arrays import Array, Dtype
from transload.nodes import Call, Dict, Global
from transload.writing.objects import numeric_array

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

UNSIGNED = pytest.mark.skipif(RELEASE < (2, 3), reason="this torch has no uint32")
NOTE = "numpy arrays in the source, now tensors: "


def save(value: Any, path: Path, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol)
    return path


def arrays_of(path: Path | str) -> dict[str, Any]:
    with np.load(path) as opened:
        return dict(opened)


def leftovers(made: Conversion) -> Any:
    return json.loads(Path(made.leftovers).read_text(encoding="utf-8"))["data"]


def rng_state() -> dict[str, Any]:
    """What the Trainer of transformers saves."""
    numbers = np.random.get_state()
    return {"python": random.getstate(), "numpy": numbers, "cpu": torch.get_rng_state()}


PLAIN = [
    np.arange(6, dtype="<f8").reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype="<f4").reshape(2, 3)),
    np.arange(24, dtype="<i2").reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(5, dtype=">i4"),
    np.arange(3, dtype=">c16") * 1j,
    np.array([True, False]),
    np.arange(200, dtype="u1"),
    np.array(7, "i8"),
    np.empty((0, 3), "f2"),
    np.complex64(1 - 2j),
]


def test_plain_arrays_of_any_order_and_protocol(tmp_path: Path) -> None:
    def check(protocol: int) -> None:
        value = {"w": torch.ones(2), "all": [*PLAIN]}
        source = save(value, tmp_path / f"{protocol}.pt", protocol)
        made = convert(source, tmp_path / f"{protocol}.npz")
        assert made.listed == made.left == ()
        assert made.notes == (NOTE + ", ".join(f"all/{index}" for index in range(len(PLAIN))),)
        back = arrays_of(made.out)
        for index, array in enumerate(PLAIN):
            found = back[f"all/{index}"]
            assert (found.shape, found.dtype) == (array.shape, array.dtype.newbyteorder("<")), index
            assert np.array_equal(found, array), index

    for_each((2, 4, 5), check)


def test_a_random_state_is_whole_in_every_format(tmp_path: Path) -> None:
    source = save(rng_state(), tmp_path / "rng_state.pth")
    for name in ("a.safetensors", "a.npz", "a/", "a.pt"):
        made = convert(source, f"{tmp_path}/{name}")
        assert (made.tensors, made.listed, made.left) == (2, (), ())
        assert made.notes == (NOTE + "numpy/1",)
    state = rng_state()
    assert np.array_equal(arrays_of(tmp_path / "a.npz")["numpy/1"], state["numpy"][1])
    plain = json.loads((tmp_path / "a.npz.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert plain["numpy"] == [state["numpy"][0], None, *state["numpy"][2:]]
    assert main(["convert", str(source), str(tmp_path / "b.safetensors")]) == 0


@UNSIGNED
def test_a_torch_zip_has_them_in_their_places(tmp_path: Path) -> None:
    state = rng_state()
    made = convert(save(state, tmp_path / "rng_state.pth"), tmp_path / "a.pt")
    assert not made.leftovers
    back = torch.load(tmp_path / "a.pt", weights_only=True)
    assert back["python"] == state["python"]
    assert torch.equal(back["cpu"], state["cpu"])
    random.seed(1)
    np.random.seed(1)
    np.random.set_state(back["numpy"])
    for first, second in zip(np.random.get_state(), state["numpy"], strict=True):
        assert np.array_equal(first, second)


def test_there_and_back(tmp_path: Path) -> None:
    value = {"mean": np.arange(3.0), "nested": OrderedDict(a=[np.arange(4)]), "w": torch.ones(2)}
    save(value, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "c.npz")
    assert {name: each.tolist() for name, each in arrays_of(tmp_path / "c.npz").items()} == {
        "w": [1, 1],
        "mean": [0, 1, 2],
        "nested/a/0": [0, 1, 2, 3],
    }
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(back["nested"]["a"][0], torch.arange(4))


def test_a_file_of_arrays_alone(tmp_path: Path) -> None:
    made = convert(save({"a": np.arange(3.0)}, tmp_path / "a.pt"), tmp_path / "b.npz")
    assert (made.tensors, made.nbytes, made.leftovers) == (1, 24, "")


def test_what_is_shared_is_tied(tmp_path: Path) -> None:
    shared = np.arange(3.0)
    source = save({"a": shared, "b": [shared]}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    assert made.aliases == (("b/0", "a"),)
    assert made.notes == (NOTE + "a, b/0",)
    convert(source, tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["a"].data_ptr() == back["b"][0].data_ptr()


def test_arrays_are_rounded_like_tensors(tmp_path: Path) -> None:
    source = save({"a": np.arange(3.0), "n": np.arange(3)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.npz", dtype="float32")
    assert made.cast == 1
    assert {name: str(each.dtype) for name, each in arrays_of(made.out).items()} == {"a": "float32", "n": "int64"}


def test_a_key_chooses_arrays(tmp_path: Path) -> None:
    source = save({"model": {"w": torch.ones(2)}, "rng": {"a": np.arange(3.0)}}, tmp_path / "a.pt")
    assert list(arrays_of(convert(source, tmp_path / "b.npz", key="rng").out)) == ["a"]
    made = convert(source, tmp_path / "c.npz", key="model")
    assert (made.others, made.notes, made.listed) == (0, (), ())


class Grid(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.grid = np.arange(4.0)


class Named(np.ndarray):  # type: ignore[name-defined]
    pass


OTHERS = {
    "objects": np.array([1, "a", None], dtype=object),
    "fields": np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "text": np.array(["a", "bc"]),
    "dates": np.zeros(2, "M8[s]"),
    "class": np.arange(3).view(Named),
}


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_arrays_of_anything_else_are_named(tmp_path: Path, name: str) -> None:
    source = save({"w": torch.ones(2), **OTHERS}, tmp_path / "a.pt")
    made = convert(source, tmp_path / name)
    assert {each.name for each in made.listed} == set(OTHERS)
    assert (made.tensors, made.notes) == (1, ())
    assert main(["convert", str(source), str(tmp_path / name), "--force"]) == 1


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt"])
def test_arrays_of_a_module_are_not_in_its_state_dict(tmp_path: Path, name: str) -> None:
    made = convert(save({"model": Grid(), "mean": np.ones(2)}, tmp_path / "a.pt"), tmp_path / name)
    assert [each.name for each in made.listed] == ["model/grid"]
    assert made.notes[0] == NOTE + "mean"


def test_arrays_of_objects(tmp_path: Path) -> None:
    source = save({"w": torch.ones(2), "args": argparse.Namespace(mean=np.ones(3), lr=0.5)}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.npz")
    assert set(arrays_of(made.out)) == {"w", "args/mean"}
    assert leftovers(made) == {"args": {"$class": "argparse.Namespace", "lr": 0.5}}
    made = convert(source, tmp_path / "b.pt")  # which has no objects
    assert [each.name for each in made.listed] == ["args/mean"]
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == {"w"}


@pytest.mark.parametrize("name", ["b.npz", "b.pt"])
def test_values_under_keys_that_look_alike_are_not_hidden(tmp_path: Path, name: str) -> None:
    value = {"w": torch.ones(1), "1.0": np.ones(2), 1.0: "kept", 2: np.ones(3), "2": "too", "3": np.ones(4)}
    made = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
    assert made.notes == (NOTE + "3",)
    assert {each.name for each in made.listed} == {"1.0", "2"}
    if name == "b.pt":
        back = torch.load(tmp_path / name, weights_only=True)
        assert (back[1.0], back["2"]) == ("kept", "too")
    else:
        assert leftovers(made) == {"1.0": "kept", "2": "too"}


def test_numbers_of_numpy_stay_in_their_places(tmp_path: Path) -> None:
    numbers = {"loss": np.float64("nan"), "step": np.int32(-5), "best": np.bool_(True), "half": np.float16(0.5)}
    source = save({"w": torch.ones(1), **numbers}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.pt")
    assert made.notes == ("numpy numbers in the source, now Python numbers: loss, step, best, half",)
    assert not made.leftovers
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (repr(back["loss"]), back["step"], back["best"], back["half"]) == ("nan", -5, True, 0.5)
    made = convert(source, tmp_path / "b.safetensors")
    assert leftovers(made) == {"loss": "nan", "step": -5, "best": True, "half": 0.5}


def test_an_array_shared_a_millionfold_ends(tmp_path: Path) -> None:
    shared = [np.ones(1)] * 200
    source = save({"w": torch.ones(1), "all": [shared] * 600}, tmp_path / "a.pt")
    made = convert(source, tmp_path / "b.safetensors")
    assert 1 < made.tensors < 60_000
    assert made.listed  # the others


class Same:
    """An array of bytes that others are made of, too."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        make = np.arange(1).__reduce_ex__(5)[0]  # where this numpy has it
        return make, (self.data, np.dtype("u1"), (len(self.data),), "C")


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_many_arrays_of_the_same_bytes_are_written_once(tmp_path: Path, name: str) -> None:
    large, small = bytes(1 << 20), b"\1"
    value = {"large": [Same(large) for _ in range(3000)], "small": [Same(small) for _ in range(2)]}
    source = save(value, tmp_path / "a.pt")
    made = convert(source, tmp_path / name)
    assert made.tensors == 3002
    assert (tmp_path / name).stat().st_size < 3 << 20
    if name == "b.pt":
        first, second = torch.load(tmp_path / name, weights_only=True)["small"]
        assert first.data_ptr() != second.data_ptr()  # Python has each byte once


def made_of(state: Any, *, kind: str = "numpy.ndarray") -> Array | None:
    module, _, name = kind.rpartition(".")
    node = Call(Global("numpy._core.multiarray", "_reconstruct", 0), (Global(module, name, 0), (0,), b"b"), "reduce", 0)
    node.states = [state]
    return numeric_array(node, {})


def dtype_of(code: Any, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    node = Call(Global("numpy", "dtype", 0), (code, False, True), "reduce", 0)
    node.states = [state]
    return node


def test_arrays_that_nobody_writes() -> None:
    data, real = b"\0" * 8, dtype_of("f4")
    assert made_of((1, (2,), real, False, data)) == Array(Dtype("f4", False, 4, True, False), (2,), (1,), data)
    wrong: list[Any] = [
        None,
        (1, (2,), real, False),
        (1, (3,), real, False, data),
        (1, (-2,), real, False, data),
        (1, (1 << 80, 0), real, False, b""),
        (1, (True, 2), real, False, data),
        (1, [2], real, False, data),
        (1, (2,) + (1,) * 64, real, False, data),
        (1, (2,), real, False, "\u20ac" * 8),
        (1, (2,), real, False, [1, 2]),
        (1, (2,), "f4", False, data),
        (1, (2,), dtype_of("O8"), False, data),
        (1, (2,), dtype_of(None), False, data),
        (1, (2,), dtype_of("f4", (3, "<", None, ("a",), Dict([]), 4, 4, 0)), False, data),
        (1, (2,), dtype_of("f4", "<"), False, data),
    ]
    assert [state for state in wrong if made_of(state) is not None] == []
    assert made_of((1, (2,), real, False, data), kind="numpy.matrix") is None

    def buffer(*args: Any) -> Array | None:
        return numeric_array(
            Call(Global("numpy._core.numeric", "_frombuffer", 0), (data, real, *args), "reduce", 0), {}
        )

    assert buffer((1, 2), "K", (1, 0)) == Array(Dtype("f4", False, 4, True, False), (2, 1), (1, 2), data)
    several: list[Any] = [((2,), "K"), ((2,), "C", (0,)), ((2,), "A"), ((2,), "K", (1,)), ((1, 2), "K", (0, 0))]
    assert [args for args in [*several, ((2,), "K", (False,))] if buffer(*args) is not None] == []


_BARE = """
import sys
for name in ("torch", "numpy"):
    sys.modules[name] = None
from transload.converting import convert
made = convert(*sys.argv[1:])
assert made.tensors == 2 and not made.listed, made
"""


def test_without_numpy_and_torch(tmp_path: Path) -> None:
    source = save(rng_state(), tmp_path / "rng_state.pth")
    for name in ("a.safetensors", "a.pt"):
        subprocess.run([sys.executable, "-c", _BARE, source, tmp_path / name], check=True)
    back = torch.load(tmp_path / "a.pt", weights_only=True) if RELEASE >= (2, 3) else {}
    assert len(back) in (0, 3)
