"""Building objects from a pickle: shared, circular and deep graphs, and known globals whose arguments are checked."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import struct
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.forge import (
    call,
    checkpoint,
    dictionary,
    list_of,
    name,
    ordered,
    pickled,
    rebuild_call,
    storage_id,
    tensor,
    text,
    tuple_of,
)
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS, saved

from transload.errors import BrokenFileError, LoadError, UnsafeError
from transload.loading import load

pytestmark = IGNORED_WARNINGS

FOUR_FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def built(body: bytes, protocol: int = 2, **storages: bytes) -> Any:
    """Load a file with this pickle body and a storage of four floats."""
    return load(checkpoint(pickled(body, protocol), {"0": FOUR_FLOATS, **storages}))


def round_trip(value: Any, protocol: int = 2) -> Any:
    """Pickle a plain Python value into a checkpoint and load it."""
    return load(checkpoint(pickle.dumps(value, protocol), {}))


# -- the graph


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_load_from_every_protocol(protocol: int) -> None:
    value = {
        "text": ["", "ü\n", "\ud800", "x" * 300],
        "numbers": (0, -1, 255, 256, 65536, -(2**31), 2**31, 2**70, -(2**200), 1.5, float("inf"), -0.0),
        "truth": [True, False, None, ()],
        "bytes": [b"", b"\xff\x00", bytearray(b"ab")],
        "sets": [{1, 2}, frozenset({3, "a"})],
        "complex": 1 - 2j,
        ("tuple", 1, (2,)): {1: {2: {3: {}}}},
    }
    assert_same(value, round_trip(value, protocol))


def test_nan_stays_nan() -> None:
    assert round_trip(float("nan")) != round_trip(float("nan"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_shared_objects_stay_shared(protocol: int) -> None:
    inner: list[Any] = [1]
    loaded = round_trip([inner, inner, {"a": inner}, (inner,)], protocol)
    loaded[0].append(2)
    assert loaded == [[1, 2], [1, 2], {"a": [1, 2]}, ([1, 2],)]


def circular() -> Iterator[Callable[[], Any]]:
    def in_list() -> Any:
        value: list[Any] = []
        value.append(value)
        return value

    def in_dict() -> Any:
        value: dict[str, Any] = {}
        value["self"] = [value]
        return value

    def in_tuple() -> Any:
        inner: list[Any] = []
        value = (inner, 1)
        inner += [value, (value, inner)]
        return value

    def in_ordered() -> Any:
        value: OrderedDict[str, Any] = OrderedDict()
        value["self"] = value
        return value

    def in_attributes() -> Any:
        value: Any = OrderedDict(a=1)
        value._metadata = {"of": value}
        return value

    def in_default() -> Any:
        value: defaultdict[str, Any] = defaultdict(list)
        value["self"] = (value,)
        return value

    yield from (in_list, in_dict, in_tuple, in_ordered, in_attributes, in_default)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("build", list(circular()), ids=lambda build: build.__name__)
def test_circular_objects_load(build: Callable[[], Any], protocol: int) -> None:
    assert_same(build(), round_trip(build(), protocol))


@pytest.mark.parametrize("opener", [b"]", b")", b"}"], ids=["lists", "tuples", "dictionaries"])
def test_deep_nesting_loads(opener: bytes) -> None:
    depth = 20_000
    bodies = {
        b"]": b"]" * depth + b"a" * (depth - 1),
        b")": b")" + b"\x85" * depth,
        b"}": b"}K\x01" * depth + b"N" + b"s" * depth,
    }
    loaded = built(bodies[opener])
    for _ in range(depth - 1):
        (loaded,) = loaded.values() if isinstance(loaded, dict) else loaded
    assert loaded in ([], ((),), {1: None})


def test_the_last_of_equal_keys_wins() -> None:
    assert built(b"}(K\x01K\x02K\x01K\x03u") == {1: 3}


@pytest.mark.parametrize("key", [b"]", b"}", b"\x8f", ordered(), b"(]t"], ids=repr)
def test_unhashable_key_is_a_broken_file_error(key: bytes) -> None:
    with pytest.raises(BrokenFileError):
        built(b"}" + key + b"Ns", 4)


# -- known globals and their arguments


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (ordered({"a": 1}), OrderedDict(a=1)),
        (call(name("collections", "OrderedDict"), list_of(list_of("a", 1), tuple_of("b", 2))), OrderedDict(a=1, b=2)),
        (call(name("collections", "Counter"), dictionary({"a": 2})), Counter(a=2)),
        (call(name("collections", "defaultdict"), name("builtins", "list")), defaultdict(list)),
        (call(name("collections", "defaultdict")), defaultdict()),
        (call(name("__builtin__", "set"), list_of(1, 2)), {1, 2}),
        (call(name("builtins", "frozenset"), list_of(1)), frozenset({1})),
        (call(name("builtins", "bytearray"), call(name("_codecs", "encode"), "\xff", "latin1")), bytearray(b"\xff")),
        (call(name("builtins", "bytearray")), bytearray()),
        (call(name("builtins", "bytes")), b""),
        (call(name("builtins", "complex"), b"G" + struct.pack(">d", 1), b"K\x02"), 1 + 2j),
        (call(name("torch", "Size"), tuple_of(2, 3)), torch.Size([2, 3])),
        (call(name("torch", "device"), "cuda", 1), torch.device("cuda:1")),
        (call(name("torch", "device"), "cpu"), torch.device("cpu")),
        (call(name("torch.serialization", "_get_layout"), "torch.sparse_coo"), torch.sparse_coo),
        (name("torch", "float8_e5m2"), torch.float8_e5m2),
        (name("torch", "per_tensor_affine"), torch.per_tensor_affine),
        (name("torch", "Tensor"), torch.Tensor),
        (name("collections", "OrderedDict"), OrderedDict),
        (name("torch._utils", "_rebuild_tensor_v2"), torch._utils._rebuild_tensor_v2),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value)[:40],
)
def test_known_global_with_usual_arguments_is_built(body: bytes, value: Any) -> None:
    assert_same(value, built(body))


UNUSUAL_USES = {
    "encode with another codec": call(name("_codecs", "encode"), "abc", "rot13"),
    "a byte array of a size": call(name("builtins", "bytearray"), 1 << 40),
    "a set of a string": call(name("builtins", "set"), "abc"),
    "a set of lists": call(name("builtins", "set"), list_of(list_of(1))),
    "complex of a string": call(name("builtins", "complex"), "1"),
    "a dictionary of a list": call(name("collections", "OrderedDict"), list_of(1, 2)),
    "a counter of a string": call(name("collections", "Counter"), "aab"),
    "a default factory that is not known": call(name("collections", "defaultdict"), name("torch", "device")),
    "bytes of a size": call(name("builtins", "bytes"), 1 << 40),
    "a size of strings": call(name("torch", "Size"), tuple_of("a")),
    "a device of lists": call(name("torch", "device"), list_of(1)),
    "an unknown layout": call(name("torch.serialization", "_get_layout"), "torch.os"),
    "a storage class with a size": call(name("torch", "FloatStorage"), 1 << 40),
    "a tensor class with a size": call(name("torch", "FloatTensor"), 1 << 40),
    "a call of a dtype": call(name("torch", "float32")),
    "a version of a number": call(name("torch.torch_version", "TorchVersion"), 1),
    "a list of a string": call(name("builtins", "list"), "abc"),
    "arguments that are not a tuple": name("collections", "OrderedDict") + b"]R",
    "a call of a value": b"K\x01)R",
    "state of a plain dictionary": b"}}b",
    "state that overrides a method": ordered() + dictionary({"items": 1}) + b"b",
    "state that is a list": ordered() + list_of(1) + b"b",
    "appended to a dictionary": ordered() + b"K\x01a",
    "an item set in a tensor": tensor() + b"K\x00K\x01s",
    "an extension opcode": b"\x82\x01",
}


@pytest.mark.parametrize("case", UNUSUAL_USES)
def test_unusual_arguments_and_operations_are_refused(case: str) -> None:
    with pytest.raises((BrokenFileError, UnsafeError)) as raised:
        built(UNUSUAL_USES[case])
    assert "<bytes>" in str(raised.value)


# -- tensors


def tensor_v2(*args: object) -> bytes:
    return rebuild_call("_rebuild_tensor_v2", storage_id(), *args)


INVALID_TENSORS = {
    "a size beyond its storage": tensor_v2(0, (5,), (1,), False, ordered()),
    "an offset beyond its storage": tensor_v2(1, (4,), (1,), False, ordered()),
    "strides beyond its storage": tensor_v2(0, (2, 2), (3, 1), False, ordered()),
    "a negative offset": tensor_v2(-1, (1,), (1,), False, ordered()),
    "a negative size": tensor_v2(0, (-1,), (1,), False, ordered()),
    "a negative stride": tensor_v2(3, (2,), (-1,), False, ordered()),
    "more strides than sizes": tensor_v2(0, (1,), (1, 1), False, ordered()),
    "sizes that are strings": tensor_v2(0, ("4",), (1,), False, ordered()),
    "more elements than 64 bits can count": tensor_v2(0, (1 << 62, 4), (0, 0), False, ordered()),
    "a number instead of a storage": rebuild_call("_rebuild_tensor_v2", 1, 0, (1,), (1,), False, ordered()),
    "a missing storage": tensor("7"),
    "too few arguments": rebuild_call("_rebuild_tensor_v2", storage_id()),
    "requires_grad that is a number": tensor_v2(0, (1,), (1,), 1, ordered()),
    "a conj flag that is a string": tensor_v2(0, (1,), (1,), False, ordered(), dictionary({"conj": "yes"})),
    "a parameter of a number": rebuild_call("_rebuild_parameter", 1, True, ordered()),
    "a dtype that is a number": rebuild_call("_rebuild_tensor_v3", storage_id(), 0, (1,), (1,), False, ordered(), 1),
    "a newer dtype beyond its storage": rebuild_call(
        "_rebuild_tensor_v3", storage_id(), 0, (3,), (1,), False, ordered(), name("torch", "int64")
    ),
    "a meta tensor whose shape is a string": rebuild_call(
        "_rebuild_meta_tensor_no_storage", name("torch", "float32"), "a", (1,), False
    ),
    "sparse without parts": rebuild_call(
        "_rebuild_sparse_tensor", call(name("torch.serialization", "_get_layout"), "torch.sparse_coo"), ()
    ),
    "nested of numbers": rebuild_call("_rebuild_nested_tensor", 1, 2, 3, 4),
    "a wrapper whose class is a number": rebuild_call(
        "_rebuild_wrapper_subclass", 1, name("torch", "float32"), (1,), (1,), 0, None, "cpu", False
    ),
    "a device tensor of a list": rebuild_call(
        "_rebuild_device_tensor_from_numpy", list_of(1), name("torch", "float32"), "cpu", False
    ),
    "quantized without a quantizer": rebuild_call(
        "_rebuild_qtensor", storage_id("0", 16, "QInt8Storage"), 0, (4,), (1,), (), False, ordered()
    ),
    "a dunder attribute": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        tuple_of(storage_id(), 0, (4,), (1,), False, ordered()),
        dictionary({"__class__": 1}),
    ),
    "a class that is not a tensor class": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("collections", "OrderedDict"),
        tuple_of(storage_id(), 0, (4,), (1,), False, ordered()),
        b"N",
    ),
    "a rebuild function that is a dictionary": call(
        name("torch._tensor", "_rebuild_from_type_v2"), ordered(), name("torch", "Tensor"), b")", b"N"
    ),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
@pytest.mark.parametrize("hidden", [False, True], ids=["at the root", "in hooks"])
def test_invalid_tensor_is_an_error(case: str, *, hidden: bool) -> None:
    """Also where the reader does not look for tensors: in the hooks of another one."""
    body = tensor_v2(0, (4,), (1,), False, ordered({"a": INVALID_TENSORS[case]})) if hidden else INVALID_TENSORS[case]
    with pytest.raises((BrokenFileError, UnsafeError)):
        built(body)


def test_storage_keeps_its_size() -> None:
    """torch.load enlarges a storage that is too small, which exposes uninitialized memory."""
    tensors = built(list_of(tensor("0"), tensor("0", (2,), (1,), 2)))
    assert tensors[0].untyped_storage().nbytes() == 16
    assert tensors[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        ((name("torch", "per_tensor_affine"), b"G" + struct.pack(">d", 0.5), 3), ""),
        ((name("torch", "per_tensor_affine"), 1, 3), "scale"),
        ((name("torch", "per_channel_affine"), list_of(1, 1), list_of(0, 0), 0), ""),
        ((name("torch", "per_channel_affine"), list_of(1), list_of(0, 0), 0), "channels"),
        ((name("torch", "per_channel_affine"), list_of(1, 1), list_of(0, 0), 5), "axis"),
        ((name("torch", "per_tensor_symmetric"), 1, 3), "scheme"),
    ],
    ids=["tensor", "no scale", "channel", "few scales", "no axis", "no scheme"],
)
def test_quantized_tensors_are_checked(quantizer: tuple[object, ...], message: str) -> None:
    storage = storage_id("0", 4, "QInt8Storage")
    body = rebuild_call("_rebuild_qtensor", storage, 0, (2, 2), (2, 1), tuple_of(*quantizer), False, ordered())
    data = checkpoint(pickled(body), {"0": bytes([1, 2, 3, 4])})
    if message:
        with pytest.raises(BrokenFileError, match=message):
            load(data)
    else:
        assert load(data).int_repr().tolist() == [[1, 2], [3, 4]]


def sparse(layout: str, *parts: object) -> bytes:
    return rebuild_call(
        "_rebuild_sparse_tensor",
        call(name("torch.serialization", "_get_layout"), f"torch.{layout}"),
        tuple_of(*parts),
    )


@pytest.mark.parametrize("index", [0, 1, 2, 1000, -1])
def test_indices_of_sparse_tensors_are_checked(index: int) -> None:
    """torch.load checks them only on request; an index out of range later reads other memory."""
    indices = tensor("1", (1, 1), (1, 1), storage=storage_id("1", 1, "LongStorage"))
    values = tensor("0", (1,), (1,))
    data = checkpoint(
        pickled(sparse("sparse_coo", indices, values, call(name("torch", "Size"), tuple_of(2)))),
        {"0": FOUR_FLOATS, "1": struct.pack("<q", index)},
    )
    if index in (0, 1):
        assert load(data).to_dense()[index] == 1
    else:
        with pytest.raises(BrokenFileError, match="sparse"):
            load(data)
    assert not sparse_tensors_to_validate()


def test_threads_loading_sparse_tensors_leave_global_state_unchanged() -> None:
    """The setting of torch for checking invariants applies to the entire process."""
    buffer = io.BytesIO()
    torch.save(torch.eye(3).to_sparse(), buffer)
    data, interval = buffer.getvalue(), sys.getswitchinterval()
    loaded: list[Any] = []

    def load_many() -> None:
        loaded.extend(load(data) for _ in range(60))

    threads = [threading.Thread(target=load_many) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(loaded) == 360
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    assert not sparse_tensors_to_validate()


def sparse_tensors_to_validate() -> list[Any]:
    getter = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    return list(getter() if getter else torch._utils._sparse_tensors_to_validate)


@pytest.mark.skipif(not hasattr(torch, "_nested_view_from_buffer"), reason="this torch cannot load nested tensors")
@pytest.mark.parametrize("offset", [0, 1, 3, 100])
def test_parts_of_nested_tensors_are_checked(offset: int) -> None:
    numbers = {
        "sizes": tensor(storage=storage_id("1", 1, "LongStorage"), shape=(1, 1), stride=(1, 1)),
        "strides": tensor(storage=storage_id("2", 1, "LongStorage"), shape=(1, 1), stride=(1, 1)),
        "offsets": tensor(storage=storage_id("3", 1, "LongStorage"), shape=(1,), stride=(1,)),
    }
    body = rebuild_call("_rebuild_nested_tensor", tensor("0"), *numbers.values())
    longs = {"1": struct.pack("<q", 3), "2": struct.pack("<q", 1), "3": struct.pack("<q", offset)}
    data = checkpoint(pickled(body), {"0": FOUR_FLOATS, **longs})
    if offset > 1:
        with pytest.raises(BrokenFileError, match="nested"):
            load(data)
    elif (
        torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
    ):  # older torch requires a buffer with nothing else in it
        assert load(data).unbind()[0].tolist() == [1 + offset, 2 + offset, 3 + offset]


def test_rebuild_tensor_v3_with_requires_grad_loads() -> None:
    """torch writes such a tensor but cannot load it."""
    body = rebuild_call("_rebuild_tensor_v3", storage_id(), 0, (4,), (1,), True, ordered(), name("torch", "float32"))
    assert built(body).requires_grad


def test_parameter_of_an_old_release_loads() -> None:
    parameter = name("torch.nn.parameter", "Parameter") + tuple_of(tensor(), True) + b"\x81"
    loaded = built(parameter + tuple_of(False, False, ordered()) + b"b")
    assert loaded.tolist() == [1, 2, 3, 4]
    assert not loaded.requires_grad
    with pytest.raises(BrokenFileError):
        built(parameter + tuple_of(1, 2) + b"b")
    with pytest.raises(BrokenFileError):
        built(parameter + tuple_of(tensor(), 0, 0, 0) + b"b")


def test_tensor_created_empty_and_filled_by_its_state_loads() -> None:
    empty = name("torch", "Tensor") + b")\x81"
    assert built(empty + tuple_of(storage_id(), 1, (2,), (1,)) + b"b").tolist() == [2, 3]
    with pytest.raises(BrokenFileError):
        built(empty + tuple_of(storage_id(), 1, (4,), (1,)) + b"b")


def test_storage_referenced_twice_is_one_object() -> None:
    loaded = built(list_of(storage_id(), storage_id(), tensor()))
    assert loaded[0] is loaded[1]
    assert loaded[0].dtype == torch.float32
    assert loaded[2].untyped_storage().data_ptr() == loaded[0]._untyped_storage.data_ptr()


def stream(*objects: bytes) -> bytes:
    return forge.legacy(object=pickled(list_of(*objects)))


def test_stream_with_storage_views_loads_as_with_torch() -> None:
    first = storage_id("0", 4, "FloatStorage", "cpu", None)
    second = storage_id("1", 4, "FloatStorage", "cpu", None)
    view = storage_id("0", 4, "FloatStorage", "cpu", tuple_of("9", 1, 2))
    data = stream(
        tensor(storage=first),
        tensor(storage=second),
        tensor(storage=view, shape=(2,)),
        tensor(storage=view, shape=(1,)),
    )
    loaded = load(data)
    assert_same(torch.load(io.BytesIO(data)), loaded)
    assert loaded[2].tolist() == [2, 3]
    with pytest.raises(BrokenFileError):
        load(stream(tensor(storage=first), tensor(storage=second), tensor(storage=view, shape=(3,))))


# -- classes that the program allows


class Colour(argparse.Namespace):
    """Stands in for a class of the program."""


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: int, b: int = 0) -> None:
        self.a, self.b = a, b


class Rejecting:
    def __setstate__(self, state: object) -> None:
        raise ValueError("not this one")


@contextmanager
def allowing(*classes: Any) -> Iterator[None]:
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("this torch has no safe_globals")
    with torch.serialization.safe_globals(list(classes)):
        yield


def test_allowed_classes_are_built_as_by_pickle() -> None:
    value = {
        "namespace": Colour(red=[1], tensor=torch.ones(2)),
        "slots": Slots(1, 2),
        "queue": collections.deque([1, 2], 5),
        "when": datetime(2026, 1, 2, tzinfo=timezone.utc),
    }
    for form in ("zip", "zip, protocol 4", "legacy"):
        data = saved(value, form)
        expected = torch.load(io.BytesIO(data), weights_only=False)
        with allowing(
            Colour, Slots, collections.deque, datetime, timezone, type(timezone.utc.utcoffset(None)), getattr
        ):
            assert_same(vars(expected["namespace"]), vars(load(data)["namespace"]))
            assert load(data)["slots"].b == 2
            assert load(data)["queue"] == expected["queue"]
            assert load(data)["when"] == expected["when"]


def test_class_is_allowed_only_inside_safe_globals() -> None:
    data = saved(Colour(red=1))
    with pytest.raises(UnsafeError):
        load(data)
    with allowing(Colour):
        assert load(data).red == 1
    with pytest.raises(UnsafeError):
        load(data)


def test_class_can_be_allowed_under_another_name() -> None:
    data = checkpoint(pickled(call(name("old.place", "Colour"))), {})
    with allowing((Colour, "old.place.Colour")):
        assert type(load(data)) is Colour


def test_class_of_the_result_of_an_allowed_function_must_be_allowed_too() -> None:
    """BUILD and similar opcodes call methods of the class of the result."""
    body = call(name("tests.somewhere", "make")) + dictionary({"a": 1}) + b"b"
    with allowing((Colour, "tests.somewhere.make")):
        assert load(checkpoint(pickled(body), {})).a == 1
    with allowing((lambda: Slots(1), "tests.somewhere.make")), pytest.raises(UnsafeError, match="Slots"):
        load(checkpoint(pickled(body), {}))


def test_exception_of_an_allowed_class_is_the_cause_of_the_load_error() -> None:
    data = saved(Rejecting.__new__(Rejecting))
    with allowing(Rejecting):
        loaded = load(data)
        assert type(loaded) is Rejecting
    body = name(__name__, "Rejecting") + b")\x81" + dictionary({"a": 1}) + b"b"
    with allowing((Rejecting, f"{__name__}.Rejecting")), pytest.raises(LoadError, match="not this one") as raised:
        load(checkpoint(pickled(body), {}))
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("module", ["os", "posix", "sys", "nt"])
def test_system_modules_are_never_allowed(module: str) -> None:
    data = checkpoint(pickled(call(name(module, "getcwd"))), {})
    with allowing((Colour, f"{module}.getcwd")), pytest.raises(UnsafeError):
        load(data)


# -- Python 2


def python_2_string(raw: bytes) -> bytes:
    return b"U" + bytes([len(raw)]) + raw


@pytest.mark.parametrize("raw", [b"\xc3\xa9", b"\xc3\xa9t\xc3\xa9", b"plain"], ids=str)
def test_encoding_also_applies_to_python_2_strings_that_are_utf_8(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(checkpoint(pickled(dictionary({python_2_string(raw): list_of("na\xefve", "unicode")})), {}))
    for encoding in ("utf-8", "latin1", "cp437", "bytes"):
        assert load(path, encoding=encoding) == torch.load(path, weights_only=True, encoding=encoding), encoding
    (key,) = load(path, encoding="latin1")
    assert key == raw.decode("latin1")


@pytest.mark.parametrize(("encoding", "value"), [("latin1", "\xe9t\xe9"), ("cp437", "ΘtΘ"), ("bytes", b"\xe9t\xe9")])
def test_python_2_strings_need_an_encoding(encoding: str, value: object) -> None:
    data = checkpoint(pickled(list_of(python_2_string(b"\xe9t\xe9"), "unicode")), {})
    with pytest.raises(LoadError, match="utf-8") as raised:
        load(data)
    assert "encoding='latin1'" in raised.value.fix
    assert load(data, encoding=encoding) == [value, "unicode"]


def test_python_2_module_names_are_known() -> None:
    loaded = built(
        list_of(
            call(name("__builtin__", "set"), list_of(1)),
            call(name("__builtin__", "complex"), 1, 2),
            call(name("torch.tensor", "_rebuild_from_type_v2"),
                 name("torch._utils", "_rebuild_tensor_v2"), name("torch", "Tensor"),
                 tuple_of(storage_id(), 0, (4,), (1,), False, ordered()), b"}"),
        )
    )  # fmt: skip
    assert loaded[:2] == [{1}, 1 + 2j]
    assert loaded[2].tolist() == [1, 2, 3, 4]


def test_lone_surrogate_stays_in_a_string() -> None:
    assert built(text("\ud800")) == "\ud800"
