"""numpy arrays in a checkpoint: numeric arrays become tensors, all others are listed by name."""

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


def leftovers(result: Conversion) -> Any:
    return json.loads(Path(result.leftovers).read_text(encoding="utf-8"))["data"]


def rng_state() -> dict[str, Any]:
    """The RNG state that the ``Trainer`` of transformers saves."""
    numpy_state = np.random.get_state()
    return {"python": random.getstate(), "numpy": numpy_state, "cpu": torch.get_rng_state()}


NUMERIC = [
    np.arange(6, dtype="<f8").reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype="<f4").reshape(2, 3)),
    np.arange(24, dtype="<i2").reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(5, dtype=">i4"),
    np.arange(6, dtype=">f8").view(">c16"),
    np.array([True, False]),
    np.arange(200, dtype="u1"),
    np.array(7, "i8"),
    np.empty((0, 3), "f2"),
    np.array([1, -2], "f4").view("c8")[0],
]


def test_numeric_arrays_become_tensors_for_any_memory_order_and_protocol(tmp_path: Path) -> None:
    def check(protocol: int) -> None:
        value = {"w": torch.ones(2), "all": [*NUMERIC]}
        source = save(value, tmp_path / f"{protocol}.pt", protocol)
        result = convert(source, tmp_path / f"{protocol}.npz")
        assert result.listed == result.left == ()
        assert result.notes == (NOTE + ", ".join(f"all/{index}" for index in range(len(NUMERIC))),)
        arrays = arrays_of(result.out)
        for index, array in enumerate(NUMERIC):
            converted = arrays[f"all/{index}"]
            assert (converted.shape, converted.dtype) == (array.shape, array.dtype.newbyteorder("<")), index
            assert np.array_equal(converted, array), index

    for_each((2, 4, 5), check)


def test_rng_state_is_complete_in_every_format(tmp_path: Path) -> None:
    source = save(rng_state(), tmp_path / "rng_state.pth")
    for name in ("a.safetensors", "a.npz", "a/", "a.pt"):
        result = convert(source, f"{tmp_path}/{name}")
        assert (result.tensors, result.listed, result.left) == (2, (), ())
        assert result.notes == (NOTE + "numpy/1",)
    state = rng_state()
    assert np.array_equal(arrays_of(tmp_path / "a.npz")["numpy/1"], state["numpy"][1])
    plain = json.loads((tmp_path / "a.npz.leftovers.json").read_text(encoding="utf-8"))["data"]
    assert plain["numpy"] == [state["numpy"][0], None, *state["numpy"][2:]]
    assert main(["convert", str(source), str(tmp_path / "b.safetensors")]) == 0


@UNSIGNED
def test_torch_zip_keeps_rng_arrays_in_place(tmp_path: Path) -> None:
    state = rng_state()
    result = convert(save(state, tmp_path / "rng_state.pth"), tmp_path / "a.pt")
    assert not result.leftovers
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["python"] == state["python"]
    assert torch.equal(loaded["cpu"], state["cpu"])
    random.seed(1)
    np.random.seed(1)
    np.random.set_state(loaded["numpy"])
    for first, second in zip(np.random.get_state(), state["numpy"], strict=True):
        assert np.array_equal(first, second)


def test_arrays_keep_names_and_values_through_two_conversions(tmp_path: Path) -> None:
    value = {"mean": np.arange(3.0), "nested": OrderedDict(a=[np.arange(4)]), "w": torch.ones(2)}
    save(value, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "c.npz")
    assert {name: array.tolist() for name, array in arrays_of(tmp_path / "c.npz").items()} == {
        "w": [1, 1],
        "mean": [0, 1, 2],
        "nested/a/0": [0, 1, 2, 3],
    }
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(loaded["nested"]["a"][0], torch.arange(4))


def test_checkpoint_with_only_arrays_is_converted(tmp_path: Path) -> None:
    result = convert(save({"a": np.arange(3.0)}, tmp_path / "a.pt"), tmp_path / "b.npz")
    assert (result.tensors, result.nbytes, result.leftovers) == (1, 24, "")


def test_shared_array_becomes_tied_tensors(tmp_path: Path) -> None:
    shared = np.arange(3.0)
    source = save({"a": shared, "b": [shared]}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    assert result.aliases == (("b/0", "a"),)
    assert result.notes == (NOTE + "a, b/0",)
    convert(source, tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"][0].data_ptr()


def test_dtype_option_casts_only_float_arrays(tmp_path: Path) -> None:
    source = save({"a": np.arange(3.0), "n": np.arange(3)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.npz", dtype="float32")
    assert result.cast == 1
    assert {name: str(array.dtype) for name, array in arrays_of(result.out).items()} == {"a": "float32", "n": "int64"}


def test_key_selects_arrays(tmp_path: Path) -> None:
    source = save({"model": {"w": torch.ones(2)}, "rng": {"a": np.arange(3.0)}}, tmp_path / "a.pt")
    assert list(arrays_of(convert(source, tmp_path / "b.npz", key="rng").out)) == ["a"]
    result = convert(source, tmp_path / "c.npz", key="model")
    assert (result.others, result.notes, result.listed) == (0, (), ())


class Grid(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.grid = np.arange(4.0)


class Subclass(np.ndarray):  # type: ignore[name-defined]
    pass


UNSUPPORTED = {
    "objects": np.array([1, "a", None], dtype=object),
    "fields": np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "text": np.array(["a", "bc"]),
    "dates": np.zeros(2, "M8[s]"),
    "class": np.arange(3).view(Subclass),
}


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_unsupported_arrays_are_listed(tmp_path: Path, name: str) -> None:
    source = save({"w": torch.ones(2), **UNSUPPORTED}, tmp_path / "a.pt")
    result = convert(source, tmp_path / name)
    assert {item.name for item in result.listed} == set(UNSUPPORTED)
    assert (result.tensors, result.notes) == (1, ())
    assert main(["convert", str(source), str(tmp_path / name), "--force"]) == 1


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt"])
def test_array_attribute_of_a_module_is_listed(tmp_path: Path, name: str) -> None:
    result = convert(save({"model": Grid(), "mean": np.ones(2)}, tmp_path / "a.pt"), tmp_path / name)
    assert [item.name for item in result.listed] == ["model/grid"]
    assert result.notes[0] == NOTE + "mean"


def test_array_inside_an_object_is_converted_to_npz_but_only_listed_for_torch(tmp_path: Path) -> None:
    source = save({"w": torch.ones(2), "args": argparse.Namespace(mean=np.ones(3), lr=0.5)}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.npz")
    assert set(arrays_of(result.out)) == {"w", "args/mean"}
    assert leftovers(result) == {"args": {"$class": "argparse.Namespace", "lr": 0.5}}
    result = convert(source, tmp_path / "b.pt")  # a torch target does not store objects
    assert [item.name for item in result.listed] == ["args/mean"]
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == {"w"}


@pytest.mark.parametrize("name", ["b.npz", "b.pt"])
def test_arrays_under_ambiguous_keys_are_listed_and_other_values_kept(tmp_path: Path, name: str) -> None:
    value = {"w": torch.ones(1), "1.0": np.ones(2), 1.0: "kept", 2: np.ones(3), "2": "too", "3": np.ones(4)}
    result = convert(save(value, tmp_path / "a.pt"), tmp_path / name)
    assert result.notes == (NOTE + "3",)
    assert {item.name for item in result.listed} == {"1.0", "2"}
    if name == "b.pt":
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert (loaded[1.0], loaded["2"]) == ("kept", "too")
    else:
        assert leftovers(result) == {"1.0": "kept", "2": "too"}


def test_numpy_scalars_become_python_numbers(tmp_path: Path) -> None:
    scalars = {"loss": np.float64("nan"), "step": np.int32(-5), "best": np.bool_(True), "half": np.float16(0.5)}
    source = save({"w": torch.ones(1), **scalars}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.pt")
    assert result.notes == ("numpy numbers in the source, now Python numbers: loss, step, best, half",)
    assert not result.leftovers
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (repr(loaded["loss"]), loaded["step"], loaded["best"], loaded["half"]) == ("nan", -5, True, 0.5)
    result = convert(source, tmp_path / "b.safetensors")
    assert leftovers(result) == {"loss": "nan", "step": -5, "best": True, "half": 0.5}


def test_array_shared_120000_times_is_converted_up_to_a_limit(tmp_path: Path) -> None:
    shared = [np.ones(1)] * 200
    source = save({"w": torch.ones(1), "all": [shared] * 600}, tmp_path / "a.pt")
    result = convert(source, tmp_path / "b.safetensors")
    assert 1 < result.tensors < 60_000
    assert result.listed  # the rest


class BytesArray:
    """Pickles as a uint8 array over a bytes object that other arrays may share."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        make = np.arange(1).__reduce_ex__(5)[0]  # in the module where this numpy defines it
        return make, (self.data, np.dtype("u1"), (len(self.data),), "C")


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_arrays_over_the_same_bytes_are_written_once(tmp_path: Path, name: str) -> None:
    large, small = bytes(1 << 20), b"\1"
    value = {"large": [BytesArray(large) for _ in range(3000)], "small": [BytesArray(small) for _ in range(2)]}
    source = save(value, tmp_path / "a.pt")
    result = convert(source, tmp_path / name)
    assert result.tensors == 3002
    assert (tmp_path / name).stat().st_size < 3 << 20
    if name == "b.pt":
        first, second = torch.load(tmp_path / name, weights_only=True)["small"]
        assert first.data_ptr() != second.data_ptr()  # although CPython has only one object per byte


def array_from_state(state: Any, *, kind: str = "numpy.ndarray") -> Array | None:
    module, _, name = kind.rpartition(".")
    node = Call(Global("numpy._core.multiarray", "_reconstruct", 0), (Global(module, name, 0), (0,), b"b"), "reduce", 0)
    node.states = [state]
    return numeric_array(node, {})


def dtype_call(code: Any, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    node = Call(Global("numpy", "dtype", 0), (code, False, True), "reduce", 0)
    node.states = [state]
    return node


def test_malformed_array_pickles_are_not_arrays() -> None:
    data, dtype = b"\0" * 8, dtype_call("f4")
    assert array_from_state((1, (2,), dtype, False, data)) == Array(
        Dtype("f4", False, 4, True, False), (2,), (1,), data
    )
    malformed: list[Any] = [
        None,
        (1, (2,), dtype, False),
        (1, (3,), dtype, False, data),
        (1, (-2,), dtype, False, data),
        (1, (1 << 80, 0), dtype, False, b""),
        (1, (True, 2), dtype, False, data),
        (1, [2], dtype, False, data),
        (1, (2,) + (1,) * 64, dtype, False, data),
        (1, (2,), dtype, False, "\u20ac" * 8),
        (1, (2,), dtype, False, [1, 2]),
        (1, (2,), "f4", False, data),
        (1, (2,), dtype_call("O8"), False, data),
        (1, (2,), dtype_call(None), False, data),
        (1, (2,), dtype_call("f4", (3, "<", None, ("a",), Dict([]), 4, 4, 0)), False, data),
        (1, (2,), dtype_call("f4", "<"), False, data),
    ]
    assert [state for state in malformed if array_from_state(state) is not None] == []
    assert array_from_state((1, (2,), dtype, False, data), kind="numpy.matrix") is None

    def array_from_buffer(*args: Any) -> Array | None:
        return numeric_array(
            Call(Global("numpy._core.numeric", "_frombuffer", 0), (data, dtype, *args), "reduce", 0), {}
        )

    assert array_from_buffer((1, 2), "K", (1, 0)) == Array(Dtype("f4", False, 4, True, False), (2, 1), (1, 2), data)
    malformed_arguments: list[Any] = [
        ((2,), "K"),
        ((2,), "C", (0,)),
        ((2,), "A"),
        ((2,), "K", (1,)),
        ((1, 2), "K", (0, 0)),
    ]
    assert [
        args for args in [*malformed_arguments, ((2,), "K", (False,))] if array_from_buffer(*args) is not None
    ] == []


_WITHOUT_LIBRARIES = """
import sys
for name in ("torch", "numpy"):
    sys.modules[name] = None
from transload.converting import convert
result = convert(*sys.argv[1:])
assert result.tensors == 2 and not result.listed, result
"""


def test_rng_state_is_converted_without_numpy_and_torch(tmp_path: Path) -> None:
    source = save(rng_state(), tmp_path / "rng_state.pth")
    for name in ("a.safetensors", "a.pt"):
        subprocess.run([sys.executable, "-c", _WITHOUT_LIBRARIES, source, tmp_path / name], check=True)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True) if RELEASE >= (2, 3) else {}
    assert len(loaded) in (0, 3)
