"""The fast path for ordinary tensors: it gives the same result as the general path, and never exceeds a storage."""

from __future__ import annotations

import gc
import io
import struct
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
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
    tuple_of,
)
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS
from tests.makers import saved

from transload.errors import LoadError
from transload.geometry import contiguous
from transload.loading import build as building
from transload.loading import load
from transload.loading.build import kind_of, ordinary, tensor_view
from transload.nodes import Call, Global, Persistent

pytestmark = IGNORED_WARNINGS

STORAGES = {key: struct.pack("<4f", *(float(key) + step for step in range(4))) for key in "01234"}


def file(body: bytes) -> bytes:
    """An archive with a pickle and five storages of four floats."""
    return checkpoint(pickled(body), STORAGES)


def tensor_v2(
    key: str = "0", size: object = (4,), stride: object = (1,), grad: object = False, hooks: bytes = b""
) -> bytes:
    return rebuild_call("_rebuild_tensor_v2", storage_id(key), 0, size, stride, grad, hooks or ordered())


def tensor_v3(key: str, dtype: str, size: object = (4,), stride: object = (1,)) -> bytes:
    return rebuild_call("_rebuild_tensor_v3", storage_id(key), 0, size, stride, False, ordered(), name("torch", dtype))


def parameter(data: bytes, *, grad: object = True, hooks: bytes = b"") -> bytes:
    return rebuild_call("_rebuild_parameter", data, grad, hooks or ordered())


@contextmanager
def recorded_fast_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Record for each node given to the fast path whether it built a tensor."""
    fast: list[bool] = []

    def recorded(*args: Any) -> Callable[..., Any]:
        build = ordinary(*args)

        def recording(node: Any, otherwise: Any = None) -> Any:
            result = build(node, otherwise)
            fast.append(result is not None)
            return result

        return recording

    with monkeypatch.context() as patch:
        patch.setattr(building, "ordinary", recorded)
        yield fast


@contextmanager
def fast_path_disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build every tensor on the general path."""
    with monkeypatch.context() as patch:
        patch.setattr(building, "ordinary", lambda *_: lambda *_: None)
        yield


PUT, GET = b"q\x07", b"h\x07"

GRAPHS = {
    "a dictionary": dictionary({"a": tensor("0"), "b": tensor("1"), "n": 3, "t": (1, 2)}),
    "an ordered dictionary": ordered({"a": tensor("0"), "b": tensor("1")}),
    "an ordered dictionary with attributes": ordered({"a": tensor("0")})
    + dictionary({"_metadata": dictionary({"": 1})})
    + b"b",
    "a list": list_of(tensor("0"), 1, tensor("1")),
    "a tuple": tuple_of(tensor("0"), tensor("1")),
    "a tensor twice": dictionary({"a": tensor("0") + PUT, "b": GET, "c": list_of(GET)}),
    "a storage three times": list_of(tensor("0"), tensor("0", (2, 2), (2, 1)), tensor("0", (2,), (1,), 2)),
    "hooks shared by two tensors": dictionary(
        {"a": tensor_v2("0", hooks=ordered() + PUT), "b": tensor_v2("1", hooks=GET), "hooks": GET}
    ),
    "hooks that appear before the tensor": dictionary(
        {"hooks": ordered() + PUT, "a": tensor_v2("0", hooks=GET), "b": tensor("1")}
    ),
    "hooks that are not empty": dictionary({"a": tensor_v2("0", hooks=ordered({"x": 1})), "b": tensor("1")}),
    "hooks that are filled later": list_of(tensor_v2("0", hooks=ordered() + PUT), GET + b"K\x01K\x02s", tensor("1")),
    "a tensor that is changed later": list_of(
        tensor("0") + PUT, GET + tuple_of(storage_id("1"), 0, (2,), (1,)) + b"b", tensor("2")
    ),
    "another value between tensors": dictionary(
        {"a": tensor("0"), "b": call(name("torch", "Size"), (1, 2)), "c": tensor("1")}
    ),
    "a dictionary that contains itself": b"}" + PUT + b"(" + b"K\x01" + tensor("0") + b"K\x02" + GET + b"u",
    "equal keys": b"}(K\x01" + tensor("0") + b"K\x01" + tensor("1") + b"\x88" + tensor("2") + b"u",
    "keys of all kinds": b"}("
    + b"".join(key + tensor("0") for key in (b"N", b"K\x01", b"\x89", tuple_of(1, "a"), tensor("1")))
    + b"u",
    "requires_grad": dictionary({"a": tensor_v2(grad=True), "b": tensor_v2("1")}),
    "a transposed tensor": dictionary({"a": tensor_v2(size=(2, 2), stride=(1, 2)), "b": tensor("1")}),
    "an expanded tensor": dictionary({"a": tensor_v2(size=(3, 2), stride=(0, 1))}),
    "a tensor without dimensions": dictionary({"a": tensor_v2(size=(), stride=())}),
    "newer dtypes": dictionary(
        {
            "a": tensor_v3("0", "int32"),
            "b": tensor_v3("1", "uint8", (16,)),
            "c": tensor_v3("0", "bfloat16", (2, 4), (4, 1)),
        }
    ),
    "parameters": dictionary({"a": parameter(tensor("0")), "b": parameter(tensor_v2("1", grad=True), grad=False)}),
    "a parameter of an earlier tensor": list_of(tensor("0") + PUT, parameter(GET), parameter(GET)),
    "a parameter and then its tensor": list_of(parameter(tensor("0") + PUT), GET),
    "a parameter with hooks": list_of(parameter(tensor("0"), hooks=ordered({"x": 1})), tensor("1")),
    "hooks of a tensor and its parameter": list_of(
        parameter(tensor_v2("0", hooks=ordered() + PUT), hooks=GET), parameter(tensor("1"))
    ),
    "empty tensors": dictionary(
        {"a": tensor_v2(size=(0,)), "b": tensor_v2(size=(2, 0), stride=(1, 1)), "c": tensor("1")}
    ),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_fast_path_equals_general_path_and_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file(GRAPHS[case])
    with recorded_fast_path(monkeypatch) as fast:
        loaded = load(data)
    with fast_path_disabled(monkeypatch):
        assert_same(load(data), loaded)
    assert any(fast)
    if case != "newer dtypes" or hasattr(torch._utils, "_rebuild_tensor_v3"):
        assert_same(torch.load(io.BytesIO(data), weights_only=False), loaded)


def test_all_tensors_of_a_state_dict_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    data = saved({"model": model.state_dict(), "ema": [*model.parameters()]})
    with recorded_fast_path(monkeypatch) as fast:
        load(data)
    assert sum(fast) == len(model.state_dict()) + len([*model.parameters()])


def test_loaded_tensors_are_freed_without_the_garbage_collector() -> None:
    """The collector is paused during a load, and the caller may have disabled it."""
    gc.disable()
    try:
        loaded = load(file(dictionary({"a": tensor("0"), "b": parameter(tensor("1")), "c": tensor_v3("2", "int32")})))
        references = [weakref.ref(value) for value in loaded.values()]
        del loaded
        assert [ref() for ref in references] == [None] * 3
    finally:
        gc.enable()


def test_tensors_are_not_views_and_have_separate_version_counters() -> None:
    one, other = load(file(dictionary({"a": tensor("0"), "b": tensor("1", (2, 2), (2, 1))}))).values()
    assert (one._is_view(), other._is_view(), one._base, other._base) == (False, False, None, None)
    before = other._version
    one.add_(1)
    assert other._version == before


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"])
def test_default_dtype_and_device_do_not_affect_loaded_dtypes(dtype: str) -> None:
    value = {"w": torch.ones(3, 2, dtype=getattr(torch, dtype)), "b": torch.ones(5, dtype=getattr(torch, dtype))}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            loaded = load(buffer.getvalue())
    finally:
        torch.set_default_dtype(torch.float32)
    buffer.seek(0)
    assert_same(torch.load(buffer), loaded)


def test_map_location_function_may_use_several_devices_for_one_tag() -> None:
    body = dictionary({key: tensor(key) for key in STORAGES})
    turns = iter(range(len(STORAGES)))

    def choose(storage: Any, _: str) -> Any:
        return torch.UntypedStorage(storage.nbytes(), device="meta") if next(turns) % 2 else storage

    devices = {key: value.device.type for key, value in load(file(body), choose).items()}
    assert devices == {"0": "cpu", "1": "meta", "2": "cpu", "3": "meta", "4": "cpu"}


def test_map_location_function_returning_a_smaller_storage_is_an_error() -> None:
    with pytest.raises(LoadError, match="beyond its storage of 8 bytes"):
        load(file(dictionary({"a": tensor("0")})), lambda storage, _: storage[:8])


PERSISTENT_IDS = {
    "five items": (("storage", None, "0", "cpu", 4), True),
    "six items, as before torch 1.6": (("storage", None, "0", "cpu", 4, None), True),
    "a part of a storage": (("storage", None, "0", "cpu", 4, ("part", 1, 2)), False),
    "an unknown storage": (("storage", None, "1", "cpu", 4), False),
    "a numeric key": (("storage", None, 0, "cpu", 4), False),
    "not a storage": (("module", None, "0", "cpu", 4), False),
    "too short": (("storage", None, "0", "cpu"), False),
    "too long": (("storage", None, "0", "cpu", 4, None, None), False),
    "a string": ("storage", False),
}


@pytest.mark.parametrize("case", PERSISTENT_IDS)
def test_only_ids_of_full_known_storages_take_the_fast_path(case: str) -> None:
    pid, expected = PERSISTENT_IDS[case]
    v2_node, hooks_node = Global("torch._utils", "_rebuild_tensor_v2", 0), Global("collections", "OrderedDict", 0)
    storage = torch.UntypedStorage(16)
    known = {"0": (storage, 16, kind_of("float32", storage.device))}
    build = ordinary(known, {}, {node: node.full_name for node in (v2_node, hooks_node)})
    args = (Persistent(pid, 0), 0, (4,), (1,), False, Call(hooks_node, (), "reduce", 0))
    assert (build(Call(v2_node, args, "reduce", 0)) is not None) == expected


def test_call_without_a_callee_is_left_to_the_general_path() -> None:
    """Also if the file does not contain the global that rebuilds tensors."""
    storage = torch.UntypedStorage(16)
    build = ordinary({"0": (storage, 16, kind_of("float32", storage.device))}, {}, {})
    reference = Persistent(("storage", None, "0", "cpu", 4), 0)
    assert build(Call(None, (reference, 0, (4,), (1,), False, Call(None, (), "reduce", 0)), "reduce", 0)) is None


def test_repeated_key_of_a_counter_is_overwritten() -> None:
    counter = call(name("collections", "Counter")) + b"(" + b"".join(b"K\x01" + count for count in (b"K\x02", b"K\x03"))
    assert_same(load(file(counter + b"u")), Counter({1: 3}))


# -- invalid tensors


INVALID = {
    "a size beyond its storage": tensor_v2(size=(5,)),
    "strides beyond its storage": tensor_v2(size=(2, 2), stride=(3, 1)),
    "a boolean size": tensor_v2(size=(True,)),
    "a boolean stride": tensor_v2(size=(4,), stride=(True,)),
    "a float size": tensor_v2(size=tuple_of(b"G" + struct.pack(">d", 4))),
    "sizes in a list": tensor_v2(size=list_of(4)),
    "sizes in a string": tensor_v2(size="4"),
    "a negative size": tensor_v2(size=(-4,)),
    "a negative stride": tensor_v2(size=(2, 2), stride=(-1, 1)),
    "more sizes than strides": tensor_v2(size=(2, 2)),
    "too many elements": tensor_v2(size=(1 << 62, 1 << 62), stride=(0, 0)),
    "a stride of more than 64 bits": tensor_v2(size=(1, 1), stride=(1 << 70, 1)),
    "a size of more than 64 bits": tensor_v2(size=(1 << 70,), stride=(0,)),
    "requires_grad that is a number": tensor_v2(grad=1),
    "a boolean offset": rebuild_call("_rebuild_tensor_v2", storage_id(), True, (1,), (1,), False, ordered()),
    "a negative offset": rebuild_call("_rebuild_tensor_v2", storage_id(), -1, (1,), (1,), False, ordered()),
    "a newer dtype beyond its storage": tensor_v3("4", "int64"),
    "a dtype that is a storage class": tensor_v3("4", "FloatStorage"),
    "a parameter of a number": parameter(b"K\x01"),
    "a parameter beyond its storage": parameter(tensor_v2(size=(5,))),
    "a parameter whose requires_grad is a number": parameter(tensor_v2("4"), grad=1),
    "a parameter of integers": parameter(tensor_v3("4", "int32")),
    "requires_grad of an integer tensor": rebuild_call(
        "_rebuild_tensor_v2", storage_id("4", 2, "LongStorage"), 0, (2,), (1,), True, ordered()
    ),
}


def in_hooks(pairs: dict[str, bytes]) -> bytes:
    """A file with tensors where the reader does not look for them: in the hooks of another one."""
    return file(tensor_v2("3", hooks=ordered(pairs)))


@pytest.mark.parametrize("case", INVALID)
def test_invalid_tensor_raises_the_same_error_as_on_the_general_path(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also among valid tensors, and after a valid tensor with equal sizes."""
    data = in_hooks({"good": tensor("0"), "one": tensor_v2("1", (1,)), "bad": INVALID[case], "more": tensor("2")})
    with recorded_fast_path(monkeypatch) as fast, pytest.raises(LoadError) as raised:
        load(data)
    with fast_path_disabled(monkeypatch), pytest.raises(LoadError) as expected:
        load(data)
    assert sum(fast) >= 3
    assert type(raised.value) is type(expected.value)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize(
    ("first", "message"), [("size", "Size"), ("tensor", "beyond its storage")], ids=["size", "tensor"]
)
def test_first_of_two_invalid_values_is_reported(first: str, message: str) -> None:
    invalid = {"size": call(name("torch", "Size"), "no"), "tensor": tensor_v2(size=(5,))}
    with pytest.raises(LoadError, match=message):
        load(in_hooks({key: invalid[key] for key in sorted(invalid, reverse=first == "tensor")}))


# -- views


RANGE = (0, 1, 2, 4)
VIEWS = [
    (offset, size, stride)
    for rank in range(3)
    for offset, size, stride in product((0, 1, 4), product(RANGE, repeat=rank), product(RANGE, repeat=rank))
]


def test_tensor_view_accepts_only_contiguous_nonempty_views_within_the_storage() -> None:
    storage = torch.UntypedStorage(16)
    full = torch.empty(0).set_(storage).copy_(torch.arange(4.0))
    entry = (storage, 16, kind_of("float32", storage.device))
    for offset, size, stride in VIEWS:
        view = tensor_view(entry, offset, size, stride)
        within = 0 not in size and stride == contiguous(size) and offset + prod(size) <= 4
        assert (view is not None) == within, (offset, size, stride)
        if view is not None:
            assert torch.equal(view, full.as_strided(size, stride, offset))
            assert (view.stride(), view.storage_offset()) == (stride, offset)
            assert view.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == 16


def test_tensor_view_of_a_storage_with_a_partial_element_excludes_it() -> None:
    storage = torch.UntypedStorage(18)
    entry = (storage, 18, kind_of("float32", storage.device))
    view = tensor_view(entry, 0, (4,), (1,))
    assert view is not None
    assert view.shape == (4,)
    assert tensor_view(entry, 0, (5,), (1,)) is None


@pytest.mark.parametrize(
    ("dtype", "device"), [("qint8", "cpu"), ("float32", "meta"), ("float33", "cpu"), ("nn", "cpu")], ids=str
)
def test_kinds_that_are_left_to_the_general_path(dtype: str, device: str) -> None:
    kind = kind_of(dtype, torch.device(device))
    assert kind[0] is None
    assert tensor_view((torch.UntypedStorage(16), 16, kind), 0, (4,), (1,)) is None


def test_tensors_have_separate_empty_hooks() -> None:
    one, other = load(file(dictionary({"a": tensor("0"), "b": tensor("1")}))).values()
    assert type(one._backward_hooks) is OrderedDict
    assert one._backward_hooks is not other._backward_hooks
