"""``assert_same`` reports every kind of difference between two objects, and none between equal ones."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS
from torch import nn

pytestmark = IGNORED_WARNINGS
needs_jagged = pytest.mark.skipif(not hasattr(torch, "jagged"), reason="this torch has no jagged tensors")


def tensor() -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3)


class Marked(torch.Tensor):
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: object, b: object = ...) -> None:
        self.a = a
        if b is not ...:
            self.b = b


def with_attributes(value: Any, **attributes: object) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def quantized(scale: float = 0.5, zero: int = 1) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor(), scale, zero, torch.qint8)


def per_channel(scale: float = 0.5, axis: int = 0) -> torch.Tensor:
    scales = torch.full((2 + axis,), scale, dtype=torch.float64)
    return torch.quantize_per_channel(tensor(), scales, torch.zeros(2 + axis, dtype=torch.int64), axis, torch.qint8)


def sparse(*, coalesced: bool = False, value: float = 1.0) -> torch.Tensor:
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([value, 2.0]), (2, 2))
    return matrix._coalesced_(coalesced)


def compressed(layout: str = "csr", value: float = 1.0) -> torch.Tensor:
    dense = torch.eye(4) * value
    return getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout in ("bsr", "bsc") else []))


def nested(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(length, dtype=torch.float32) for length in lengths])


def generator(seed: int, drawn: int = 0) -> torch.Generator:
    result = torch.Generator()
    result.manual_seed(seed)
    torch.rand(drawn, generator=result)
    return result


def model(*, train: bool = True, hook: bool = False, bias: bool = True) -> nn.Module:
    torch.default_generator.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2, bias=bias), nn.BatchNorm1d(2))
    if hook:
        module.register_forward_hook(print)
    return module.train(train)


def shared(count: int) -> list[torch.Tensor]:
    """Two equal tensors that share one storage, or have one each."""
    first = tensor()
    return [first, first.view(2, 3)] if count == 1 else [first, tensor()]


def two_lists(*, same_list: bool) -> list[list[int]]:
    first = [1]
    return [first, first if same_list else [1]]


def ring(length: int) -> list[Any]:
    outer: list[Any] = []
    inner = outer
    for _ in range(length):
        inner = [inner]
    outer.append(inner)
    return outer


def metadata(version: int | None) -> OrderedDict[str, int]:
    ordered: OrderedDict[str, int] = OrderedDict(a=1)
    return ordered if version is None else with_attributes(ordered, _metadata={"": {"version": version}})


def hooked() -> torch.Tensor:
    leaf = tensor().requires_grad_()
    leaf._backward_hooks = OrderedDict()
    return leaf


def default_dict(default: Any) -> defaultdict[str, Any]:
    return defaultdict(default, a=1)


DIFFERENT: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "type": (lambda: (1, 1.0), "type"),
    "bool is not int": (lambda: (True, 1), "type"),
    "value": (lambda: ({"a": [1, 2]}, {"a": [1, 3]}), r"\['a'\]\[1\]: value: 2 and 3"),
    "float zero": (lambda: (0.0, -0.0), "value"),
    "not a number": (lambda: (math.nan, -math.nan), "value"),
    "complex": (lambda: (complex(0.0, 0.0), complex(0.0, -0.0)), "value"),
    "order of keys": (lambda: ({"a": 1, "b": 2}, {"b": 2, "a": 1}), "keys"),
    "kind of key": (lambda: ({1: 1}, {True: 1}), "keys"),
    "kind of dictionary": (lambda: ({"a": 1}, OrderedDict(a=1)), "type"),
    "counter": (lambda: (Counter(a=1), Counter(a=2)), "value"),
    "default": (lambda: (default_dict(int), default_dict(list)), "default_factory"),
    "metadata": (lambda: (metadata(1), metadata(2)), r"_metadata\[''\]\['version'\]"),
    "metadata missing": (lambda: (metadata(1), metadata(None)), "attributes"),
    "list or tuple": (lambda: ([1], (1,)), "type"),
    "length": (lambda: ([1], [1, 1]), "length"),
    "maxlen": (lambda: (deque([1], 3), deque([1])), "maxlen"),
    "set": (lambda: ({1, 2}, {1, 3}), "value"),
    "set or frozen": (lambda: ({1}, frozenset({1})), "type"),
    "size": (lambda: (torch.Size([1]), torch.Size([2])), "value"),
    "size or tuple": (lambda: (torch.Size([1]), (1,)), "type"),
    "bytes": (lambda: (b"a", bytearray(b"a")), "type"),
    "bytearray": (lambda: (bytearray(b"a"), bytearray(b"b")), "bytes"),
    "dtype object": (lambda: (torch.float16, torch.bfloat16), "value"),
    "device object": (lambda: (torch.device("cpu"), torch.device("cuda", 0)), "value"),
    "function": (lambda: (print, len), "object"),
    "partial": (lambda: (functools.partial(print, 1), functools.partial(print, 2)), "args"),
    "method": (lambda: (nn.ReLU().forward, nn.GELU().forward), "__func__"),
    "slot": (lambda: (Slotted(1, 2), Slotted(1, 3)), r"\.b"),
    "slot missing": (lambda: (Slotted(1, 2), Slotted(1)), "has b"),
    "array": (lambda: (np.arange(3), np.arange(3) + 1), "bytes"),
    "array strides": (lambda: (np.ones((2, 2)), np.ones((2, 2), order="F")), "strides"),
    "array dtype": (lambda: (np.float64(1), np.float32(1)), "type"),
    "same list": (
        lambda: (two_lists(same_list=True), two_lists(same_list=False)),
        "object shared .* in the first only",
    ),
    "same list, reversed": (
        lambda: (two_lists(same_list=False), two_lists(same_list=True)),
        "object shared .* in the second only",
    ),
    "cycle": (lambda: (ring(2), ring(3)), "shared"),
    "tensor dtype": (lambda: (tensor(), tensor().double()), "dtype"),
    "tensor shape": (lambda: (tensor(), tensor().view(3, 2)), "shape"),
    "tensor stride": (lambda: (torch.zeros(2, 2), torch.zeros(2, 2).t()), "stride"),
    "tensor offset": (lambda: (torch.zeros(4)[:2], torch.zeros(4)[2:]), "storage_offset"),
    "tensor bytes": (lambda: (tensor(), tensor() + 1), "bytes: 0 and 128 at 2 of 24"),
    "bytes beyond the view": (lambda: (torch.zeros(4)[:2], torch.tensor([0.0, 0.0, 0.0, 1.0])[:2]), "bytes"),
    "storage size": (lambda: (torch.zeros(2), torch.zeros(4)[:2]), "size: 8 and 16"),
    "device": (lambda: (tensor(), tensor().to("meta")), "device"),
    "layout": (lambda: (torch.eye(2), torch.eye(2).to_sparse()), "layout"),
    "requires_grad": (lambda: (tensor(), tensor().requires_grad_()), "requires_grad"),
    "leaf": (lambda: (tensor().requires_grad_(), tensor().requires_grad_() * 1), "is_leaf"),
    "parameter": (lambda: (tensor(), nn.Parameter(tensor(), requires_grad=False)), "type"),
    "subclass": (lambda: (tensor(), tensor().as_subclass(Marked)), "type"),
    "attribute of a tensor": (lambda: (with_attributes(tensor(), a=1), with_attributes(tensor(), a=2)), r"\.a"),
    "attribute missing": (lambda: (with_attributes(tensor(), a=1), tensor()), "attributes"),
    "hooks": (lambda: (hooked(), tensor().requires_grad_()), "_backward_hooks"),
    "conj": (lambda: (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj()), "is_conj"),
    "neg": (lambda: (torch.zeros(2), torch._neg_view(torch.zeros(2))), "is_neg"),
    "quantizer": (lambda: (quantized(), quantized(scale=0.25)), "q_scale"),
    "zero point": (lambda: (quantized(), quantized(zero=2)), "q_zero_point"),
    "channels": (lambda: (per_channel(), per_channel(scale=0.25)), "q_per_channel_scales"),
    "axis": (lambda: (per_channel(), per_channel(axis=1)), "axis"),
    "coalesced": (lambda: (sparse(), sparse(coalesced=True)), "is_coalesced"),
    "sparse values": (lambda: (sparse(), sparse(value=3.0)), "_values.*bytes"),
    "csr values": (lambda: (compressed(), compressed(value=2.0)), "values.*bytes"),
    "bsr or bsc": (lambda: (compressed("bsr"), compressed("bsc")), "layout"),
    "nested": (lambda: (nested(1, 2), nested(2, 1)), "_nested_tensor_size"),
    "shared storage": (lambda: (shared(1), shared(2)), "storage shared .* in the first only"),
    "shared storage, reversed": (lambda: (shared(2), shared(1)), "storage shared .* in the second only"),
    "same tensor": (lambda: ([tensor()] * 2, shared(1)), "object shared .* in the first only"),
    "typed storage": (lambda: (torch.zeros(2).storage(), torch.zeros(2, dtype=torch.int32).storage()), "dtype"),
    "untyped storage": (lambda: (torch.zeros(2).untyped_storage(), torch.ones(2).untyped_storage()), "bytes"),
    "seed": (lambda: (generator(1), generator(2)), "seed"),
    "generator state": (lambda: (generator(1), generator(1, drawn=1)), "get_state.*bytes"),
    "module class": (lambda: (nn.ReLU(), nn.GELU()), "type"),
    "training": (lambda: (model(), model(train=False)), "training"),
    "module hooks": (lambda: (model(), model(hook=True)), "_forward_hooks"),
    "module parameter": (lambda: (model(), model(bias=False)), "bias"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_difference_is_reported(name: str) -> None:
    build, message = DIFFERENT[name]
    a, b = build()
    with pytest.raises(AssertionError, match=message):
        assert_same(a, b)
    with pytest.raises(AssertionError):
        assert_same(b, a)
    assert_same(a, a)
    assert_same(b, b)


def test_inference_tensor_differs_from_normal_tensor() -> None:
    with torch.inference_mode():
        inference = tensor()
    with pytest.raises(AssertionError, match="is_inference"):
        assert_same(tensor(), inference)


def test_overlap_of_distinct_storages_is_compared() -> None:
    def halves(step: int) -> list[torch.Tensor]:
        storage = torch.zeros(8).untyped_storage()
        return [torch.empty(0).set_(storage[start : start + 16]) for start in (0, step)]

    assert_same(halves(16), halves(16))
    assert_same(halves(8), halves(8))
    with pytest.raises(AssertionError, match="overlap"):
        assert_same(halves(16), halves(8))


@needs_jagged
def test_shared_offsets_of_jagged_tensors_are_compared() -> None:
    def pair(*, same_offsets: bool) -> list[torch.Tensor]:
        first = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
        other = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
        return [first, first * 1 if same_offsets else other]

    assert_same(pair(same_offsets=False), pair(same_offsets=False))
    with pytest.raises(AssertionError):
        assert_same(pair(same_offsets=True), pair(same_offsets=False))


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)


def scripted() -> Any:
    return torch.jit.script(nn.Linear(2, 2))


EQUAL: dict[str, Callable[[], Any]] = {
    "empty": lambda: torch.zeros(0),
    "not a number": lambda: [torch.tensor([math.nan, -0.0]), math.nan, complex(math.nan, 1)],
    "nested": lambda: nested(1, 2),
    "sparse": lambda: [sparse(), compressed("csr"), compressed("csc"), compressed("bsr"), compressed("bsc")],
    "quantized": lambda: [quantized(), per_channel()],
    "shared": lambda: [shared(1), two_lists(same_list=True)],
    "cycle": lambda: ring(2),
    "keys": lambda: {(1, "a"): 1, None: 2, 2.5: 3, b"x": 4, frozenset({1}): 5},
    "meta": lambda: [torch.zeros(3, device="meta"), torch.zeros(2, device="meta")[1:]],
    "generator": lambda: generator(3, drawn=5),
    "module": model,
    "objects": lambda: np.array([1, "a", None], dtype=object),
}


@needs_jagged
def test_equal_jagged_tensors_compare_equal() -> None:
    assert_same(jagged(), jagged())


@pytest.mark.parametrize("name", EQUAL)
def test_equal_objects_compare_equal(name: str) -> None:
    assert_same(EQUAL[name](), EQUAL[name]())


def test_scripted_modules_are_compared_by_weights() -> None:
    module = scripted()
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    first, second = (torch.jit.load(io.BytesIO(buffer.getvalue())) for _ in range(2))
    assert_same(first, second)
    with torch.no_grad():
        second.weight.add_(1)
    with pytest.raises(AssertionError, match=r"weight.*bytes"):
        assert_same(first, second)


def test_deep_nesting_is_compared_without_recursion() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert_same(deep, deep)
    for _ in range(20_000):  # taken apart step by step: the interpreter would free it recursively
        deep = deep.pop()


def test_comparison_changes_neither_object() -> None:
    a = model(hook=True)
    b = copy.deepcopy(a)
    before = torch.cat([value.flatten().double() for value in a.state_dict().values()])
    assert_same(a, b)
    assert torch.equal(before, torch.cat([value.flatten().double() for value in a.state_dict().values()]))
