"""Values besides tensors: numpy arrays, dates, paths, arguments. They load as data; what may contain code does not."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import os
import pathlib
import pickle
import random
import types
import uuid
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from tests import forge, makers
from tests.each import each, for_each
from tests.loading.equal import assert_same
from tests.release import needs_torch

import transload
from transload.formats.arrays import NUMPY_CALLS, dtype_of
from transload.formats.pickle_machine import run
from transload.judge.names import ALSO_DATA, PLAIN_VALUES, TORCH_DEFAULT
from transload.loading.rebuild_tensors import VALUES, value_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:pickle_load_args only works if", "ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
)

ARRAYS: dict[str, Any] = {
    "matrix": np.arange(6, dtype="f4").reshape(2, 3),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "big-endian": np.arange(3, dtype=">i4"),
    "text": np.array(["ab", "c"]),
    "bytes": np.array([b"ab", b"c"]),
    "booleans": np.array([True, False]),
    "complex numbers": np.array([1j]),
    "empty": np.empty((0, 3)),
    "no dimensions": np.array(3.5),
    "number": np.float32(1.5),
    "integer": np.int64(7),
    "boolean": np.bool_(1),
    "dtype": np.dtype("<f8"),
    "dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "big-endian dates": np.arange(6).astype(">M8[ns]").reshape(2, 3).T,
    "spans of time": np.arange(2).astype("m8[5s]"),
    "spans without a unit": np.arange(2).astype("m8"),
    "date": np.datetime64("2020-01-01T00:00:01.5"),
    "span": np.timedelta64(3, "h"),
    "dtype of dates": np.dtype("M8[ms]"),
    "random state": np.random.RandomState(3).get_state(),
    "same array twice": [np.arange(3)] * 2,
}
PLAIN: dict[str, Any] = {
    "random state": random.Random(3).getstate(),  # noqa: S311 - as training runs save it
    "date": dt.date(2020, 1, 2),
    "time": dt.time(1, 2, 3),
    "date and time": dt.datetime(2020, 1, 2, 3, 4, 5),  # noqa: DTZ001 - people save naive ones too
    "with a zone": dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc),
    "with a named zone": dt.datetime(2020, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2), "x")),
    "with a zoneinfo zone": dt.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "zone": zoneinfo.ZoneInfo("UTC"),
    "timedelta": dt.timedelta(1, 2, 3),
    "path": pathlib.Path("/a/b"),
    "Windows path": pathlib.PureWindowsPath("c:/x"),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "identifier": uuid.UUID(int=5),
    "arguments": argparse.Namespace(a=1, b=[torch.ones(2)]),
    "namespace": types.SimpleNamespace(q=2),
    "slice": slice(1, None, 2),
    "range": range(1, 9, 3),
    "queue": collections.deque([1, torch.ones(1)], maxlen=3),
    "dictionaries": collections.ChainMap({"a": 1}, {"a": 2, "b": torch.ones(2)}),
    "UserDict": collections.UserDict({"a": torch.ones(2)}),
    "UserList": collections.UserList([1]),
    "UserString": collections.UserString("x"),
}
REFUSED: dict[str, Any] = {
    "objects": np.array([1, None], dtype=object),
    "structured": np.zeros(2, dtype=[("a", "f4")]),
    "masked": np.ma.array([1]),
    "a generator": np.random.default_rng(1),
    "a record": np.zeros(2, dtype=[("a", "f4")]).view(np.recarray),
}


def saved(value: Any, protocol: int) -> bytes:
    return makers.saved({"w": torch.ones(2), "value": value}, pickle_protocol=protocol)


def test_values_load_as_with_torch_and_trust() -> None:
    def check(case: tuple[Any, int]) -> None:
        data = saved(*case)
        theirs, ours = torch.load(io.BytesIO(data), weights_only=False), transload.load(data)
        if isinstance(case[0], pathlib.PurePath):
            assert theirs["value"] == ours["value"]
        else:
            assert_same(theirs, ours)

    for_each([(value, n) for value in (*ARRAYS.values(), *PLAIN.values()) for n in (2, 3, 4, 5)], check)


def test_inspect_predicts_torch_refuses_and_load_accepts_plain_values() -> None:
    def check(value: Any) -> None:
        report = transload.inspect(saved(value, 2))
        refused = [finding for finding in report.findings if finding.code == "needs-trust"]
        if report.safety == "data-only":  # the state of Python's generator is only numbers
            return
        assert "refuses it" in report.prediction
        assert report.prediction.endswith("; transload.load loads it as data")
        assert refused[0].evidence[-1].startswith("transload.load needs no trust")

    for_each([*ARRAYS.values(), *PLAIN.values()], check)
    for value in REFUSED.values():
        report = transload.inspect(saved(value, 2))
        assert (report.safety, "transload.load" in report.prediction) == ("needs-trust", False)
        assert not any("transload.load" in line for finding in report.findings for line in finding.evidence)


@each("name", REFUSED)
def test_arrays_that_may_contain_more_than_data_are_refused(name: str) -> None:
    for protocol in (2, 4, 5):
        with pytest.raises(transload.UnsafeError):
            transload.load(saved(REFUSED[name], protocol))


def test_dates_with_other_metadata_than_numpy_writes_are_refused() -> None:
    def is_plain(code: str, unit: bytes) -> bool:
        state = forge.tuple_of(4, "<", None, None, None, -1, -1, 0, unit)
        dtype = dtype_of(run(forge.call(forge.name("numpy", "dtype"), code, False, True) + state + b"b.").root)
        return dtype is not None and dtype.plain

    day = forge.tuple_of("D", 1, 1, 1)
    assert is_plain("M8", forge.tuple_of(None, day))
    for unit in (
        *(day, b"N", b"}", forge.tuple_of(None, "D"), forge.tuple_of(forge.dictionary({"a": 1}), day)),
        *(forge.tuple_of(None, forge.tuple_of(name, 1, 1, 1)) for name in ("Q", "D]", "", 3, forge.DANGEROUS)),
        *(forge.tuple_of(None, forge.tuple_of("D", *rest)) for rest in ((0, 1, 1), (1, 2, 1), (1 << 40, 1, 1), (1, 1))),
        *(forge.tuple_of(None, forge.tuple_of("D", forge.DANGEROUS, 1, 1)), forge.tuple_of(forge.DANGEROUS, day)),
    ):
        assert not is_plain("M8", unit), unit
    assert not is_plain("f8", forge.tuple_of(None, day))


def test_check_accepts_random_states(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rng_state.pth"
    torch.save({"python": random.getstate(), "numpy": np.random.RandomState(1).get_state()}, path)
    assert transload.check(path).ok


def test_path_of_another_system_becomes_a_pure_path() -> None:
    other, pure = ("WindowsPath", pathlib.PureWindowsPath) if os.name != "nt" else ("PosixPath", pathlib.PurePosixPath)
    assert value_of(f"pathlib.{other}", ("a", "b")) == pure("a", "b")


CRAFTED_ARRAYS: dict[str, Any] = {
    "a negative shape": (np.ndarray, (0,), b"b", (1, (-1,), np.dtype("f4"), False, b"")),
    "too few bytes": (np.ndarray, (0,), b"b", (1, (4,), np.dtype("f4"), False, b"1234")),
    "a list of objects": (np.ndarray, (0,), b"b", (1, (1,), np.dtype("f4"), False, [1])),
    "a state with two items": (np.ndarray, (0,), b"b", (1, (1,))),
    "another class": (list, (0,), b"b", None),
}


class CraftedArray:
    def __init__(self, case: tuple[Any, ...]) -> None:
        self.case = case

    def __reduce__(self) -> Any:
        *args, state = self.case
        function = np._core.multiarray._reconstruct if hasattr(np, "_core") else np.core.multiarray._reconstruct
        return (function, tuple(args), state) if state is not None else (function, tuple(args))


@each("name", CRAFTED_ARRAYS)
def test_arrays_that_numpy_does_not_write_are_refused(name: str) -> None:
    with pytest.raises((transload.BrokenFileError, transload.UnsafeError)):
        transload.load(saved(CraftedArray(CRAFTED_ARRAYS[name]), 2))


def test_states_and_zones_that_python_does_not_write_are_refused() -> None:
    for name, state in (("UserDict", {"data": [1]}), ("UserList", {"data": [1], "append": 2}), ("ChainMap", [1])):
        body = forge.name("collections", name) + b")R" + pickle.dumps(state, 2)[2:-1] + b"b"
        with pytest.raises(transload.BrokenFileError, match="does not write"):
            transload.load(forge.checkpoint(forge.pickled(body)))
    with pytest.raises(transload.LoadError, match="'Nowhere/Town' is not known here"):
        value_of("zoneinfo.ZoneInfo._unpickle", ("Nowhere/Town", True))
    with pytest.raises(Exception, match="fails"):
        value_of("zoneinfo.ZoneInfo._unpickle", ("../../etc/passwd", True))


def test_getattr_is_allowed_only_to_unpickle_time_zones() -> None:
    zone = forge.name("zoneinfo", "ZoneInfo") + forge.text("_unpickle")
    unpickle = forge.name("builtins", "getattr") + zone + b"\x86R"
    utc = unpickle + forge.text("UTC") + b"\x88\x86R"
    assert transload.load(forge.checkpoint(forge.pickled(utc))) == zoneinfo.ZoneInfo("UTC")
    other = unpickle.replace(forge.text("_unpickle"), forge.text("no_cache")) + forge.text("UTC") + b"\x85R"
    getattr_itself = forge.name("builtins", "getattr")
    for body in (unpickle, other, b"(" + utc + getattr_itself + b"t", getattr_itself, b"(" + utc + other + b"t"):
        with pytest.raises(transload.UnsafeError, match="Weights only load failed"):
            transload.load(forge.checkpoint(forge.pickled(body)))


def test_arguments_of_other_types_are_refused() -> None:
    with pytest.raises(Exception, match="unexpected arguments"):
        value_of("datetime.datetime", ("2020",))
    with pytest.raises(Exception, match="unexpected arguments"):
        value_of("builtins.range", (1, 2, 3, 4))
    with pytest.raises(Exception, match="fails"):
        value_of("decimal.Decimal", ("x",))


def test_buildable_values_are_the_plain_values_of_the_judge() -> None:
    basic = VALUES.keys() & (TORCH_DEFAULT | ALSO_DATA)
    buildable = {*VALUES, *NUMPY_CALLS, "numpy.ndarray", "zoneinfo.ZoneInfo"} - basic
    assert buildable == PLAIN_VALUES.keys()


# -- arguments of load


def test_python_2_strings_load_as_bytes(data: pathlib.Path) -> None:
    for path in sorted((data / "torch-releases").glob("*py2.7*/state_dict*cpu*.pt")):
        theirs = torch.load(path, weights_only=True, encoding="bytes")
        assert_same(theirs, transload.load(path, "cpu", encoding="bytes"))
        assert any(type(key) is bytes for key in theirs)


@needs_torch(2, 6)
@each(
    ("names", "weights_only", "trusts"),
    [
        (("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",), None, True),
        (("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",), True, False),
        (("TORCH_FORCE_WEIGHTS_ONLY_LOAD",), False, False),
        ((), None, False),
        ((), False, True),
    ],
)
def test_weights_only_environment_variables_work_as_with_torch(
    names: tuple[str, ...], weights_only: bool | None, trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(torch.nn.Linear(2, 2), 2)
    with monkeypatch.context() as patch:
        for name in names:
            patch.setenv(name, "1")
        for load in (torch.load, transload.load):
            if trusts:
                assert isinstance(load(io.BytesIO(data), weights_only=weights_only)["value"], torch.nn.Linear)
            else:
                with pytest.raises(pickle.UnpicklingError):
                    load(io.BytesIO(data), weights_only=weights_only)


@needs_torch(2, 6)
def test_both_weights_only_variables_are_an_error_as_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    for load in (torch.load, transload.load):
        with pytest.raises(RuntimeError, match="both"):
            load(io.BytesIO(saved(1, 2)))


class Raises:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("mine")

    def __getstate__(self) -> Any:
        return {"a": 1}


def test_exception_of_code_in_a_trusted_file_is_not_wrapped() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        transload.load(saved(Raises(), 2), weights_only=False)
    assert not isinstance(caught.value, transload.TransloadError)
    notes = getattr(caught.value, "__notes__", [])  # from Python 3.11 on
    assert not notes or "code that the file calls" in notes[0]
