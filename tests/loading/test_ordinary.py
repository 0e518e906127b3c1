"""The ordinary tensor, made in one step: the same as by the general way, and never beyond its storage."""

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
    listing,
    name,
    ordered,
    pickled,
    rebuilt,
    storage_id,
    tensor,
    tuple_of,
)
from tests.loading.equal import same
from tests.loading.zoo import QUIET

from transload.checkpoint import contiguous
from transload.errors import LoadError
from transload.loading import build as building
from transload.loading import load
from transload.loading.build import kind_of, ordinary, tensor_view
from transload.nodes import Call, Global, Persistent

pytestmark = QUIET

STORAGES = {key: struct.pack("<4f", *(float(key) + step for step in range(4))) for key in "01234"}


def file(body: bytes) -> bytes:
    """An archive with a pickle and five storages of four floats."""
    return checkpoint(pickled(body), STORAGES)


def v2(key: str = "0", size: object = (4,), stride: object = (1,), grad: object = False, hooks: bytes = b"") -> bytes:
    return rebuilt("_rebuild_tensor_v2", storage_id(key), 0, size, stride, grad, hooks or ordered())


def v3(key: str, dtype: str, size: object = (4,), stride: object = (1,)) -> bytes:
    return rebuilt("_rebuild_tensor_v3", storage_id(key), 0, size, stride, False, ordered(), name("torch", dtype))


def parameter(data: bytes, *, grad: object = True, hooks: bytes = b"") -> bytes:
    return rebuilt("_rebuild_parameter", data, grad, hooks or ordered())


@contextmanager
def made_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each tensor that was tried in one step was made so."""
    tried: list[bool] = []

    def watched(*args: Any) -> Callable[..., Any]:
        make = ordinary(*args)

        def watching(node: Any, otherwise: Any = None) -> Any:
            made = make(node, otherwise)
            tried.append(made is not None)
            return made

        return watching

    with monkeypatch.context() as patch:
        patch.setattr(building, "ordinary", watched)
        yield tried


@contextmanager
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tensor is ordinary."""
    with monkeypatch.context() as patch:
        patch.setattr(building, "ordinary", lambda *_: lambda *_: None)
        yield


PUT, GET = b"q\x07", b"h\x07"

GRAPHS = {
    "a dictionary": dictionary({"a": tensor("0"), "b": tensor("1"), "n": 3, "t": (1, 2)}),
    "an ordered one": ordered({"a": tensor("0"), "b": tensor("1")}),
    "one with attributes": ordered({"a": tensor("0")}) + dictionary({"_metadata": dictionary({"": 1})}) + b"b",
    "a list": listing(tensor("0"), 1, tensor("1")),
    "a tuple": tuple_of(tensor("0"), tensor("1")),
    "a tensor twice": dictionary({"a": tensor("0") + PUT, "b": GET, "c": listing(GET)}),
    "a storage thrice": listing(tensor("0"), tensor("0", (2, 2), (2, 1)), tensor("0", (2,), (1,), 2)),
    "hooks of two": dictionary({"a": v2("0", hooks=ordered() + PUT), "b": v2("1", hooks=GET), "hooks": GET}),
    "hooks that were there": dictionary({"hooks": ordered() + PUT, "a": v2("0", hooks=GET), "b": tensor("1")}),
    "hooks with something in them": dictionary({"a": v2("0", hooks=ordered({"x": 1})), "b": tensor("1")}),
    "hooks that are filled later": listing(v2("0", hooks=ordered() + PUT), GET + b"K\x01K\x02s", tensor("1")),
    "a tensor that is changed later": listing(
        tensor("0") + PUT, GET + tuple_of(storage_id("1"), 0, (2,), (1,)) + b"b", tensor("2")
    ),
    "something odd between": dictionary({"a": tensor("0"), "b": call(name("torch", "Size"), (1, 2)), "c": tensor("1")}),
    "one that holds itself": b"}" + PUT + b"(" + b"K\x01" + tensor("0") + b"K\x02" + GET + b"u",
    "equal keys": b"}(K\x01" + tensor("0") + b"K\x01" + tensor("1") + b"\x88" + tensor("2") + b"u",
    "keys of all kinds": b"}("
    + b"".join(key + tensor("0") for key in (b"N", b"K\x01", b"\x89", tuple_of(1, "a"), tensor("1")))
    + b"u",
    "gradients": dictionary({"a": v2(grad=True), "b": v2("1")}),
    "a transposed one": dictionary({"a": v2(size=(2, 2), stride=(1, 2)), "b": tensor("1")}),
    "an expanded one": dictionary({"a": v2(size=(3, 2), stride=(0, 1))}),
    "one without dimensions": dictionary({"a": v2(size=(), stride=())}),
    "newer dtypes": dictionary(
        {"a": v3("0", "int32"), "b": v3("1", "uint8", (16,)), "c": v3("0", "bfloat16", (2, 4), (4, 1))}
    ),
    "parameters": dictionary({"a": parameter(tensor("0")), "b": parameter(v2("1", grad=True), grad=False)}),
    "a parameter of a tensor that is there": listing(tensor("0") + PUT, parameter(GET), parameter(GET)),
    "a parameter and then its tensor": listing(parameter(tensor("0") + PUT), GET),
    "a parameter with hooks": listing(parameter(tensor("0"), hooks=ordered({"x": 1})), tensor("1")),
    "hooks of a tensor and its parameter": listing(
        parameter(v2("0", hooks=ordered() + PUT), hooks=GET), parameter(tensor("1"))
    ),
    "empty ones": dictionary({"a": v2(size=(0,)), "b": v2(size=(2, 0), stride=(1, 1)), "c": tensor("1")}),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_as_by_the_general_way_and_by_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file(GRAPHS[case])
    with made_by(monkeypatch) as tried:
        made = load(data)
    with general(monkeypatch):
        same(load(data), made)
    assert any(tried)
    if case != "newer dtypes" or hasattr(torch._utils, "_rebuild_tensor_v3"):
        same(torch.load(io.BytesIO(data), weights_only=False), made)


def test_all_of_a_state_dict_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    held = io.BytesIO()
    torch.save({"model": model.state_dict(), "ema": [*model.parameters()]}, held)
    with made_by(monkeypatch) as tried:
        load(held)
    assert sum(tried) == len(model.state_dict()) + len([*model.parameters()])


def test_nothing_keeps_what_was_loaded() -> None:
    """The collector is held off while a file is loaded, and may be for long."""
    gc.disable()
    try:
        made = load(file(dictionary({"a": tensor("0"), "b": parameter(tensor("1")), "c": v3("2", "int32")})))
        kept = [weakref.ref(value) for value in made.values()]
        del made
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_tensor_is_no_view_and_has_its_own_counter() -> None:
    one, other = load(file(dictionary({"a": tensor("0"), "b": tensor("1", (2, 2), (2, 1))}))).values()
    assert (one._is_view(), other._is_view(), one._base, other._base) == (False, False, None, None)
    before = other._version
    one.add_(1)
    assert other._version == before


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"])
def test_of_every_dtype_whatever_is_the_default(dtype: str) -> None:
    value = {"w": torch.ones(3, 2, dtype=getattr(torch, dtype)), "b": torch.ones(5, dtype=getattr(torch, dtype))}
    held = io.BytesIO()
    torch.save(value, held)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made = load(held)
    finally:
        torch.set_default_dtype(torch.float32)
    held.seek(0)
    same(torch.load(held), made)


def test_a_function_may_put_storages_of_one_tag_on_several_devices() -> None:
    body = dictionary({key: tensor(key) for key in STORAGES})
    turns = iter(range(len(STORAGES)))

    def choose(storage: Any, _: str) -> Any:
        return torch.UntypedStorage(storage.nbytes(), device="meta") if next(turns) % 2 else storage

    devices = {key: value.device.type for key, value in load(file(body), choose).items()}
    assert devices == {"0": "cpu", "1": "meta", "2": "cpu", "3": "meta", "4": "cpu"}


def test_a_function_may_give_less_than_it_got() -> None:
    with pytest.raises(LoadError, match="beyond its storage of 8 bytes"):
        load(file(dictionary({"a": tensor("0")})), lambda storage, _: storage[:8])


IDS = {
    "five": (("storage", None, "0", "cpu", 4), True),
    "six, as before torch 1.6": (("storage", None, "0", "cpu", 4, None), True),
    "a part of one": (("storage", None, "0", "cpu", 4, ("part", 1, 2)), False),
    "another": (("storage", None, "1", "cpu", 4), False),
    "a number": (("storage", None, 0, "cpu", 4), False),
    "something else": (("module", None, "0", "cpu", 4), False),
    "too short": (("storage", None, "0", "cpu"), False),
    "too long": (("storage", None, "0", "cpu", 4, None, None), False),
    "a text": ("storage", False),
}


@pytest.mark.parametrize("case", IDS)
def test_only_the_id_of_a_whole_storage_is_ordinary(case: str) -> None:
    pid, expected = IDS[case]
    v2_node, hooks_node = Global("torch._utils", "_rebuild_tensor_v2", 0), Global("collections", "OrderedDict", 0)
    storage = torch.UntypedStorage(16)
    known = {"0": (storage, 16, kind_of("float32", storage.device))}
    make = ordinary(known, {}, {node: node.full_name for node in (v2_node, hooks_node)})
    args = (Persistent(pid, 0), 0, (4,), (1,), False, Call(hooks_node, (), "reduce", 0))
    assert (make(Call(v2_node, args, "reduce", 0)) is not None) == expected


def test_a_call_of_nothing_is_no_tensor() -> None:
    """Also where the file has no name for what makes tensors."""
    storage = torch.UntypedStorage(16)
    make = ordinary({"0": (storage, 16, kind_of("float32", storage.device))}, {}, {})
    held = Persistent(("storage", None, "0", "cpu", 4), 0)
    assert make(Call(None, (held, 0, (4,), (1,), False, Call(None, (), "reduce", 0)), "reduce", 0)) is None


def test_counts_are_set_and_not_added_up() -> None:
    counter = call(name("collections", "Counter")) + b"(" + b"".join(b"K\x01" + count for count in (b"K\x02", b"K\x03"))
    same(load(file(counter + b"u")), Counter({1: 3}))


# -- what is wrong


ODD = {
    "beyond": v2(size=(5,)),
    "strides beyond": v2(size=(2, 2), stride=(3, 1)),
    "a size of truth": v2(size=(True,)),
    "a stride of truth": v2(size=(4,), stride=(True,)),
    "a size of a fraction": v2(size=tuple_of(b"G" + struct.pack(">d", 4))),
    "a list": v2(size=listing(4)),
    "a text": v2(size="4"),
    "a negative size": v2(size=(-4,)),
    "a negative stride": v2(size=(2, 2), stride=(-1, 1)),
    "more sizes than strides": v2(size=(2, 2)),
    "no end of elements": v2(size=(1 << 62, 1 << 62), stride=(0, 0)),
    "a stride without end": v2(size=(1, 1), stride=(1 << 70, 1)),
    "a size without end": v2(size=(1 << 70,), stride=(0,)),
    "gradients of a number": v2(grad=1),
    "an offset of truth": rebuilt("_rebuild_tensor_v2", storage_id(), True, (1,), (1,), False, ordered()),
    "a negative offset": rebuilt("_rebuild_tensor_v2", storage_id(), -1, (1,), (1,), False, ordered()),
    "a newer dtype beyond": v3("4", "int64"),
    "a dtype that is none": v3("4", "FloatStorage"),
    "a parameter of a number": parameter(b"K\x01"),
    "a parameter of what is beyond": parameter(v2(size=(5,))),
    "a parameter that wants a number": parameter(v2("4"), grad=1),
    "a parameter of integers": parameter(v3("4", "int32")),
    "gradients of an integer": rebuilt(
        "_rebuild_tensor_v2", storage_id("4", 2, "LongStorage"), 0, (2,), (1,), True, ordered()
    ),
}


def hidden(pairs: dict[str, bytes]) -> bytes:
    """Where the reader does not look for tensors: as the hooks of another."""
    return file(v2("3", hooks=ordered(pairs)))


@pytest.mark.parametrize("case", ODD)
def test_what_is_wrong_is_told_as_by_the_general_way(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also among tensors that are right, and though one of equal numbers was right before."""
    data = hidden({"good": tensor("0"), "one": v2("1", (1,)), "bad": ODD[case], "more": tensor("2")})
    with made_by(monkeypatch) as tried, pytest.raises(LoadError) as told:
        load(data)
    with general(monkeypatch), pytest.raises(LoadError) as expected:
        load(data)
    assert sum(tried) >= 3
    assert type(told.value) is type(expected.value)
    assert str(told.value) == str(expected.value)


@pytest.mark.parametrize(
    ("first", "word"), [("size", "Size"), ("tensor", "beyond its storage")], ids=["size", "tensor"]
)
def test_of_two_that_are_wrong_the_first_is_told(first: str, word: str) -> None:
    odd = {"size": call(name("torch", "Size"), "no"), "tensor": v2(size=(5,))}
    with pytest.raises(LoadError, match=word):
        load(hidden({key: odd[key] for key in sorted(odd, reverse=first == "tensor")}))


# -- views


RANGE = (0, 1, 2, 4)
VIEWS = [
    (offset, size, stride)
    for rank in range(3)
    for offset, size, stride in product((0, 1, 4), product(RANGE, repeat=rank), product(RANGE, repeat=rank))
]


def test_a_view_is_made_if_it_is_contiguous_and_has_elements_within_the_storage() -> None:
    storage = torch.UntypedStorage(16)
    whole = torch.empty(0).set_(storage).copy_(torch.arange(4.0))
    entry = (storage, 16, kind_of("float32", storage.device))
    for offset, size, stride in VIEWS:
        made = tensor_view(entry, offset, size, stride)
        within = 0 not in size and stride == contiguous(size) and offset + prod(size) <= 4
        assert (made is not None) == within, (offset, size, stride)
        if made is not None:
            assert torch.equal(made, whole.as_strided(size, stride, offset))
            assert (made.stride(), made.storage_offset()) == (stride, offset)
            assert made.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == 16


def test_a_storage_of_an_odd_size_is_not_taken_whole() -> None:
    storage = torch.UntypedStorage(18)
    entry = (storage, 18, kind_of("float32", storage.device))
    made = tensor_view(entry, 0, (4,), (1,))
    assert made is not None
    assert made.shape == (4,)
    assert tensor_view(entry, 0, (5,), (1,)) is None


@pytest.mark.parametrize(
    ("dtype", "device"), [("qint8", "cpu"), ("float32", "meta"), ("float33", "cpu"), ("nn", "cpu")], ids=str
)
def test_kinds_that_are_left_to_the_general_way(dtype: str, device: str) -> None:
    kind = kind_of(dtype, torch.device(device))
    assert kind[0] is None
    assert tensor_view((torch.UntypedStorage(16), 16, kind), 0, (4,), (1,)) is None


def test_hooks_are_an_empty_dictionary_of_their_own() -> None:
    one, other = load(file(dictionary({"a": tensor("0"), "b": tensor("1")}))).values()
    assert type(one._backward_hooks) is OrderedDict
    assert one._backward_hooks is not other._backward_hooks
