"""The graph of a pickle into objects: shared, circular, deep; through a table whose arguments are checked."""

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
from typing import Any

import pytest
import torch
from tests import forge
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
    text,
    tuple_of,
)
from tests.loading.equal import same
from tests.loading.zoo import QUIET, saved

from transload.errors import BrokenFileError, LoadError, UnsafeError
from transload.loading import load

pytestmark = QUIET

FOUR = struct.pack("<4f", 1, 2, 3, 4)


def built(body: bytes, protocol: int = 2, **storages: bytes) -> Any:
    """What is made of a pickle, beside one storage of four floats."""
    return load(checkpoint(pickled(body, protocol), {"0": FOUR, **storages}))


def plain(value: Any, protocol: int = 2) -> Any:
    """A value of plain Python through a file of ours."""
    return load(checkpoint(pickle.dumps(value, protocol), {}))


# -- the graph


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_every_protocol(protocol: int) -> None:
    value = {
        "text": ["", "ü\n", "\ud800", "x" * 300],
        "numbers": (0, -1, 255, 256, 65536, -(2**31), 2**31, 2**70, -(2**200), 1.5, float("inf"), -0.0),
        "truth": [True, False, None, ()],
        "bytes": [b"", b"\xff\x00", bytearray(b"ab")],
        "sets": [{1, 2}, frozenset({3, "a"})],
        "complex": 1 - 2j,
        ("tuple", 1, (2,)): {1: {2: {3: {}}}},
    }
    same(value, plain(value, protocol))


def test_nan_is_nan() -> None:
    assert plain(float("nan")) != plain(float("nan"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner: list[Any] = [1]
    made = plain([inner, inner, {"a": inner}, (inner,)], protocol)
    made[0].append(2)
    assert made == [[1, 2], [1, 2], {"a": [1, 2]}, ([1, 2],)]


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
        held: list[Any] = []
        value = (held, 1)
        held += [value, (value, held)]
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
@pytest.mark.parametrize("make", list(circular()), ids=lambda make: make.__name__)
def test_what_contains_itself(make: Callable[[], Any], protocol: int) -> None:
    same(make(), plain(make(), protocol))


@pytest.mark.parametrize("opener", [b"]", b")", b"}"], ids=["lists", "tuples", "dictionaries"])
def test_depth_is_no_limit(opener: bytes) -> None:
    depth = 20_000
    bodies = {
        b"]": b"]" * depth + b"a" * (depth - 1),
        b")": b")" + b"\x85" * depth,
        b"}": b"}K\x01" * depth + b"N" + b"s" * depth,
    }
    made = built(bodies[opener])
    for _ in range(depth - 1):
        (made,) = made.values() if isinstance(made, dict) else made
    assert made in ([], ((),), {1: None})


def test_the_last_of_equal_keys_wins() -> None:
    assert built(b"}(K\x01K\x02K\x01K\x03u") == {1: 3}


@pytest.mark.parametrize("key", [b"]", b"}", b"\x8f", ordered(), b"(]t"], ids=repr)
def test_a_key_that_cannot_be_one(key: bytes) -> None:
    with pytest.raises(BrokenFileError):
        built(b"}" + key + b"Ns", 4)


# -- known names with their only arguments


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (ordered({"a": 1}), OrderedDict(a=1)),
        (call(name("collections", "OrderedDict"), listing(listing("a", 1), tuple_of("b", 2))), OrderedDict(a=1, b=2)),
        (call(name("collections", "Counter"), dictionary({"a": 2})), Counter(a=2)),
        (call(name("collections", "defaultdict"), name("builtins", "list")), defaultdict(list)),
        (call(name("collections", "defaultdict")), defaultdict()),
        (call(name("__builtin__", "set"), listing(1, 2)), {1, 2}),
        (call(name("builtins", "frozenset"), listing(1)), frozenset({1})),
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
def test_a_name_with_what_checkpoints_call_it_with(body: bytes, value: Any) -> None:
    same(value, built(body))


ODD = {
    "encode by another codec": call(name("_codecs", "encode"), "abc", "rot13"),
    "a byte array of a size": call(name("builtins", "bytearray"), 1 << 40),
    "a set of a text": call(name("builtins", "set"), "abc"),
    "a set of lists": call(name("builtins", "set"), listing(listing(1))),
    "a complex text": call(name("builtins", "complex"), "1"),
    "a dictionary of a list": call(name("collections", "OrderedDict"), listing(1, 2)),
    "a counter of a text": call(name("collections", "Counter"), "aab"),
    "a default that is called": call(name("collections", "defaultdict"), name("torch", "device")),
    "bytes of a size": call(name("builtins", "bytes"), 1 << 40),
    "a size of texts": call(name("torch", "Size"), tuple_of("a")),
    "a device of lists": call(name("torch", "device"), listing(1)),
    "an unknown layout": call(name("torch.serialization", "_get_layout"), "torch.os"),
    "a storage class": call(name("torch", "FloatStorage"), 1 << 40),
    "a tensor class with a size": call(name("torch", "FloatTensor"), 1 << 40),
    "a dtype": call(name("torch", "float32")),
    "a version of a number": call(name("torch.torch_version", "TorchVersion"), 1),
    "a list": call(name("builtins", "list"), "abc"),
    "arguments that are not a tuple": name("collections", "OrderedDict") + b"]R",
    "a call of a value": b"K\x01)R",
    "attributes of a dictionary": b"}}b",
    "methods of a dictionary": ordered() + dictionary({"items": 1}) + b"b",
    "attributes without names": ordered() + listing(1) + b"b",
    "appended to a dictionary": ordered() + b"K\x01a",
    "an item of a tensor": tensor() + b"K\x00K\x01s",
    "an extension": b"\x82\x01",
}


@pytest.mark.parametrize("case", ODD)
def test_a_name_with_anything_else_is_refused(case: str) -> None:
    with pytest.raises((BrokenFileError, UnsafeError)) as raised:
        built(ODD[case])
    assert "<bytes>" in str(raised.value)


# -- tensors


def v2(*args: object) -> bytes:
    return rebuilt("_rebuild_tensor_v2", storage_id(), *args)


OUTSIDE = {
    "beyond its storage": v2(0, (5,), (1,), False, ordered()),
    "an offset beyond": v2(1, (4,), (1,), False, ordered()),
    "strides beyond": v2(0, (2, 2), (3, 1), False, ordered()),
    "a negative offset": v2(-1, (1,), (1,), False, ordered()),
    "a negative size": v2(0, (-1,), (1,), False, ordered()),
    "a negative stride": v2(3, (2,), (-1,), False, ordered()),
    "more strides than sizes": v2(0, (1,), (1, 1), False, ordered()),
    "sizes that are texts": v2(0, ("4",), (1,), False, ordered()),
    "more elements than there are numbers": v2(0, (1 << 62, 4), (0, 0), False, ordered()),
    "no storage": rebuilt("_rebuild_tensor_v2", 1, 0, (1,), (1,), False, ordered()),
    "a storage that is not there": tensor("7"),
    "too few arguments": rebuilt("_rebuild_tensor_v2", storage_id()),
    "gradients of a number": v2(0, (1,), (1,), 1, ordered()),
    "flags that are none": v2(0, (1,), (1,), False, ordered(), dictionary({"conj": "yes"})),
    "a parameter of a number": rebuilt("_rebuild_parameter", 1, True, ordered()),
    "a dtype that is none": rebuilt("_rebuild_tensor_v3", storage_id(), 0, (1,), (1,), False, ordered(), 1),
    "a newer dtype beyond": rebuilt(
        "_rebuild_tensor_v3", storage_id(), 0, (3,), (1,), False, ordered(), name("torch", "int64")
    ),
    "meta of a text": rebuilt("_rebuild_meta_tensor_no_storage", name("torch", "float32"), "a", (1,), False),
    "sparse without parts": rebuilt(
        "_rebuild_sparse_tensor", call(name("torch.serialization", "_get_layout"), "torch.sparse_coo"), ()
    ),
    "nested of numbers": rebuilt("_rebuild_nested_tensor", 1, 2, 3, 4),
    "a wrapper of no class": rebuilt(
        "_rebuild_wrapper_subclass", 1, name("torch", "float32"), (1,), (1,), 0, None, "cpu", False
    ),
    "a device tensor of no array": rebuilt(
        "_rebuild_device_tensor_from_numpy", listing(1), name("torch", "float32"), "cpu", False
    ),
    "quantized without a quantizer": rebuilt(
        "_rebuild_qtensor", storage_id("0", 16, "QInt8Storage"), 0, (4,), (1,), (), False, ordered()
    ),
    "an attribute of a dunder": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        tuple_of(storage_id(), 0, (4,), (1,), False, ordered()),
        dictionary({"__class__": 1}),
    ),
    "a class that is none": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("collections", "OrderedDict"),
        tuple_of(storage_id(), 0, (4,), (1,), False, ordered()),
        b"N",
    ),
    "a function that is computed": call(
        name("torch._tensor", "_rebuild_from_type_v2"), ordered(), name("torch", "Tensor"), b")", b"N"
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("hidden", [False, True], ids=["found", "hidden"])
def test_a_tensor_that_cannot_be_is_damage(case: str, *, hidden: bool) -> None:
    """Also where the reader does not look for tensors: as the hooks of another."""
    body = v2(0, (4,), (1,), False, ordered({"a": OUTSIDE[case]})) if hidden else OUTSIDE[case]
    with pytest.raises((BrokenFileError, UnsafeError)):
        built(body)


def test_memory_is_never_enlarged() -> None:
    """torch.load grows a storage that is too small, and shows what was in memory before."""
    made = built(listing(tensor("0"), tensor("0", (2,), (1,), 2)))
    assert made[0].untyped_storage().nbytes() == 16
    assert made[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("quantizer", "text_of"),
    [
        ((name("torch", "per_tensor_affine"), b"G" + struct.pack(">d", 0.5), 3), ""),
        ((name("torch", "per_tensor_affine"), 1, 3), "scale"),
        ((name("torch", "per_channel_affine"), listing(1, 1), listing(0, 0), 0), ""),
        ((name("torch", "per_channel_affine"), listing(1), listing(0, 0), 0), "channels"),
        ((name("torch", "per_channel_affine"), listing(1, 1), listing(0, 0), 5), "axis"),
        ((name("torch", "per_tensor_symmetric"), 1, 3), "scheme"),
    ],
    ids=["tensor", "no scale", "channel", "few scales", "no axis", "no scheme"],
)
def test_quantized_tensors_are_checked(quantizer: tuple[object, ...], text_of: str) -> None:
    held = storage_id("0", 4, "QInt8Storage")
    body = rebuilt("_rebuild_qtensor", held, 0, (2, 2), (2, 1), tuple_of(*quantizer), False, ordered())
    data = checkpoint(pickled(body), {"0": bytes([1, 2, 3, 4])})
    if text_of:
        with pytest.raises(BrokenFileError, match=text_of):
            load(data)
    else:
        assert load(data).int_repr().tolist() == [[1, 2], [3, 4]]


def sparse(layout: str, *parts: object) -> bytes:
    return rebuilt(
        "_rebuild_sparse_tensor",
        call(name("torch.serialization", "_get_layout"), f"torch.{layout}"),
        tuple_of(*parts),
    )


@pytest.mark.parametrize("index", [0, 1, 2, 1000, -1])
def test_indices_of_sparse_tensors_are_checked(index: int) -> None:
    """torch.load looks at them only when told to; an index outside reads other memory later."""
    indices = tensor("1", (1, 1), (1, 1), storage=storage_id("1", 1, "LongStorage"))
    values = tensor("0", (1,), (1,))
    data = checkpoint(
        pickled(sparse("sparse_coo", indices, values, call(name("torch", "Size"), tuple_of(2)))),
        {"0": FOUR, "1": struct.pack("<q", index)},
    )
    if index in (0, 1):
        assert load(data).to_dense()[index] == 1
    else:
        with pytest.raises(BrokenFileError, match="sparse"):
            load(data)
    assert not sparse_left_over()


def test_loading_sparse_tensors_at_a_time_leaves_nothing_behind() -> None:
    """torch's switch for looking at them belongs to the whole process."""
    buffer = io.BytesIO()
    torch.save(torch.eye(3).to_sparse(), buffer)
    data, interval = buffer.getvalue(), sys.getswitchinterval()
    made: list[Any] = []

    def load_many() -> None:
        made.extend(load(data) for _ in range(60))

    threads = [threading.Thread(target=load_many) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 360
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    assert not sparse_left_over()


def sparse_left_over() -> list[Any]:
    ask = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    return list(ask() if ask else torch._utils._sparse_tensors_to_validate)


@pytest.mark.skipif(not hasattr(torch, "_nested_view_from_buffer"), reason="this torch cannot load nested tensors")
@pytest.mark.parametrize("offset", [0, 1, 3, 100])
def test_parts_of_nested_tensors_are_checked(offset: int) -> None:
    numbers = {
        "sizes": tensor(storage=storage_id("1", 1, "LongStorage"), shape=(1, 1), stride=(1, 1)),
        "strides": tensor(storage=storage_id("2", 1, "LongStorage"), shape=(1, 1), stride=(1, 1)),
        "offsets": tensor(storage=storage_id("3", 1, "LongStorage"), shape=(1,), stride=(1,)),
    }
    body = rebuilt("_rebuild_nested_tensor", tensor("0"), *numbers.values())
    longs = {"1": struct.pack("<q", 3), "2": struct.pack("<q", 1), "3": struct.pack("<q", offset)}
    data = checkpoint(pickled(body), {"0": FOUR, **longs})
    if offset > 1:
        with pytest.raises(BrokenFileError, match="nested"):
            load(data)
    elif (
        torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
    ):  # before, torch wants a buffer that holds nothing else
        assert load(data).unbind()[0].tolist() == [1 + offset, 2 + offset, 3 + offset]


def test_a_tensor_of_a_newer_dtype_may_want_gradients() -> None:
    """torch writes it and fails on it."""
    body = rebuilt("_rebuild_tensor_v3", storage_id(), 0, (4,), (1,), True, ordered(), name("torch", "float32"))
    assert built(body).requires_grad


def test_parameters_of_old_releases() -> None:
    whole = name("torch.nn.parameter", "Parameter") + tuple_of(tensor(), True) + b"\x81"
    made = built(whole + tuple_of(False, False, ordered()) + b"b")
    assert made.tolist() == [1, 2, 3, 4]
    assert not made.requires_grad
    with pytest.raises(BrokenFileError):
        built(whole + tuple_of(1, 2) + b"b")
    with pytest.raises(BrokenFileError):
        built(whole + tuple_of(tensor(), 0, 0, 0) + b"b")


def test_a_tensor_that_was_made_empty_and_then_filled() -> None:
    empty = name("torch", "Tensor") + b")\x81"
    assert built(empty + tuple_of(storage_id(), 1, (2,), (1,)) + b"b").tolist() == [2, 3]
    with pytest.raises(BrokenFileError):
        built(empty + tuple_of(storage_id(), 1, (4,), (1,)) + b"b")


def test_a_storage_by_itself_is_the_same_each_time() -> None:
    made = built(listing(storage_id(), storage_id(), tensor()))
    assert made[0] is made[1]
    assert made[0].dtype == torch.float32
    assert made[2].untyped_storage().data_ptr() == made[0]._untyped_storage.data_ptr()


def stream(*objects: bytes) -> bytes:
    return forge.legacy(object=pickled(listing(*objects)))


def test_views_of_storages_in_a_stream() -> None:
    whole = storage_id("0", 4, "FloatStorage", "cpu", None)
    other = storage_id("1", 4, "FloatStorage", "cpu", None)
    view = storage_id("0", 4, "FloatStorage", "cpu", tuple_of("9", 1, 2))
    data = stream(
        tensor(storage=whole), tensor(storage=other), tensor(storage=view, shape=(2,)), tensor(storage=view, shape=(1,))
    )
    made = load(data)
    same(torch.load(io.BytesIO(data)), made)
    assert made[2].tolist() == [2, 3]
    with pytest.raises(BrokenFileError):
        load(stream(tensor(storage=whole), tensor(storage=other), tensor(storage=view, shape=(3,))))


# -- what the program allows


class Colour(argparse.Namespace):
    """Stands for a class of the program's own."""


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


def test_allowed_classes_are_made_as_pickle_makes_them() -> None:
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
            same(vars(expected["namespace"]), vars(load(data)["namespace"]))
            assert load(data)["slots"].b == 2
            assert load(data)["queue"] == expected["queue"]
            assert load(data)["when"] == expected["when"]


def test_names_are_allowed_for_as_long_as_the_program_says() -> None:
    data = saved(Colour(red=1))
    with pytest.raises(UnsafeError):
        load(data)
    with allowing(Colour):
        assert load(data).red == 1
    with pytest.raises(UnsafeError):
        load(data)


def test_a_name_can_be_allowed_under_another_spelling() -> None:
    data = checkpoint(pickled(call(name("old.place", "Colour"))), {})
    with allowing((Colour, "old.place.Colour")):
        assert type(load(data)) is Colour


def test_what_an_allowed_function_returns_is_not_thereby_allowed() -> None:
    """BUILD and the like call methods of the result's class."""
    given = call(name("tests.somewhere", "make")) + dictionary({"a": 1}) + b"b"
    with allowing((Colour, "tests.somewhere.make")):
        assert load(checkpoint(pickled(given), {})).a == 1
    with allowing((lambda: Slots(1), "tests.somewhere.make")), pytest.raises(UnsafeError, match="Slots"):
        load(checkpoint(pickled(given), {}))


def test_what_an_allowed_class_raises_is_the_cause() -> None:
    data = saved(Rejecting.__new__(Rejecting))
    with allowing(Rejecting):
        made = load(data)
        assert type(made) is Rejecting
    body = name(__name__, "Rejecting") + b")\x81" + dictionary({"a": 1}) + b"b"
    with allowing((Rejecting, f"{__name__}.Rejecting")), pytest.raises(LoadError, match="not this one") as raised:
        load(checkpoint(pickled(body), {}))
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("module", ["os", "posix", "sys", "nt"])
def test_some_modules_are_never_allowed(module: str) -> None:
    data = checkpoint(pickled(call(name(module, "getcwd"))), {})
    with allowing((Colour, f"{module}.getcwd")), pytest.raises(UnsafeError):
        load(data)


# -- Python 2


def python2(raw: bytes) -> bytes:
    return b"U" + bytes([len(raw)]) + raw


@pytest.mark.parametrize(("encoding", "value"), [("latin1", "\xe9t\xe9"), ("cp437", "ΘtΘ"), ("bytes", b"\xe9t\xe9")])
def test_texts_of_python_2(encoding: str, value: object) -> None:
    data = checkpoint(pickled(listing(python2(b"\xe9t\xe9"), "unicode")), {})
    with pytest.raises(LoadError, match="utf-8") as raised:
        load(data)
    assert "encoding='latin1'" in raised.value.fix
    assert load(data, encoding=encoding) == [value, "unicode"]


def test_names_of_python_2() -> None:
    made = built(
        listing(
            call(name("__builtin__", "set"), listing(1)),
            call(name("__builtin__", "complex"), 1, 2),
            call(name("torch.tensor", "_rebuild_from_type_v2"),
                 name("torch._utils", "_rebuild_tensor_v2"), name("torch", "Tensor"),
                 tuple_of(storage_id(), 0, (4,), (1,), False, ordered()), b"}"),
        )
    )  # fmt: skip
    assert made[:2] == [{1}, 1 + 2j]
    assert made[2].tolist() == [1, 2, 3, 4]


def test_text_is_text() -> None:
    assert built(text("\ud800")) == "\ud800"
