"""Every way torch writes a tensor, read without torch and compared with what torch itself loads."""

from __future__ import annotations

import functools
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests import forge, makers
from tests.each import each
from tests.forge import call, name, number, ordered, pickled, rebuild_call, storage_id, tensor, tuple_of
from tests.release import RELEASE, SAVES_NEW_DTYPES, needs_torch
from torch import nn

from transload.checkpoint import Checkpoint, Tensor
from transload.formats import graph as walks
from transload.formats.pickle_machine import run
from transload.opening import inspect

FORMATS = each("zipped", [True, False], ids=["zip", "legacy"])


def saved(value: object, *, zipped: bool = True) -> bytes:
    return makers.saved(value, _use_new_zipfile_serialization=zipped)


def loaded(data: bytes, *, trust: bool = False) -> Any:
    return torch.load(io.BytesIO(data), weights_only=not trust)


def only_tensor(checkpoint: Checkpoint) -> Tensor:
    (result,) = checkpoint.tensors
    return result


def torch_facts(theirs: Any) -> tuple[object, ...]:
    """The properties of a torch tensor, as ``read_facts`` gives them."""
    return (
        str(theirs.dtype).removeprefix("torch."),
        tuple(theirs.shape),
        tuple(theirs.stride()),
        theirs.storage_offset(),
        theirs.requires_grad,
        str(theirs.device),
    )


def read_facts(ours: Tensor) -> tuple[object, ...]:
    return (ours.dtype, ours.shape, ours.stride, ours.offset, ours.requires_grad, ours.device)


BASE = torch.arange(24, dtype=torch.float32)
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)
NEW_DTYPES = [
    name
    for name in (
        *("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)  # an older torch has fewer
]

STRIDED: dict[str, Any] = {
    "plain": torch.ones(2, 3),
    "zero-dimensional": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty, of three dimensions": torch.empty(3, 0, 2),
    "a view": BASE[4:10],
    "a transpose": BASE.view(4, 6).t(),
    "every third": BASE[::3],
    "one column": BASE.view(4, 6)[:, 2],
    "expanded": torch.ones(1).expand(5, 4),
    "channels last": torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "with gradient": torch.ones(2, requires_grad=True),
    "a parameter": nn.Parameter(torch.ones(3)),
    "a frozen parameter": nn.Parameter(torch.ones(3), requires_grad=False),
    "an integer parameter": nn.Parameter(torch.arange(3), requires_grad=False),
    **({"a buffer": nn.Buffer(torch.ones(3))} if hasattr(nn, "Buffer") else {}),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "per tensor, qint8": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 3, torch.qint8),
    "per tensor, quint8": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 3, torch.quint8),
    "per tensor, qint32": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 3, torch.qint32),
    "per channel": torch.quantize_per_channel(
        torch.ones(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
    ),
    **{f"of {dtype}": BASE.to(getattr(torch, dtype)) for dtype in DTYPES},
}


@FORMATS
@each("kind", STRIDED)
def test_tensor_matches_what_torch_loads(kind: str, zipped: bool) -> None:
    data = saved(STRIDED[kind], zipped=zipped)
    checkpoint = inspect(data, verify=True)
    trust = RELEASE < (2, 6) and STRIDED[kind].is_quantized  # not allowed by weights_only=True there
    assert read_facts(only_tensor(checkpoint)) == torch_facts(loaded(data, trust=trust))
    assert (checkpoint.safety, checkpoint.problems) == ("data-only", ())


@pytest.mark.skipif(not SAVES_NEW_DTYPES, reason="needs a newer torch")
@each("dtype", NEW_DTYPES)
def test_newer_dtype_in_an_untyped_storage(dtype: str) -> None:
    data = saved(torch.zeros(8, dtype=torch.uint8).view(getattr(torch, dtype))[1:3])
    checkpoint = inspect(data, verify=True)
    assert read_facts(only_tensor(checkpoint)) == torch_facts(loaded(data))
    assert (checkpoint.safety, checkpoint.problems) == ("data-only", ())
    assert checkpoint.storages[0].nbytes == 8


@pytest.mark.skipif(not SAVES_NEW_DTYPES, reason="needs a newer torch")
@pytest.mark.parametrize("dtype", ["uint16", "float8_e5m2"])
def test_newer_dtype_in_the_legacy_format_is_repairable_but_torch_fails(dtype: str) -> None:
    data = saved(torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype)), zipped=False)
    checkpoint = inspect(data)
    assert (checkpoint.integrity, [problem.code for problem in checkpoint.problems]) == (
        "repairable",
        ["legacy-untyped"],
    )
    with pytest.raises(AttributeError):
        loaded(data, trust=True)


@FORMATS
def test_quantizer_parameters_have_their_own_storages(zipped: bool) -> None:
    checkpoint = inspect(saved(STRIDED["per channel"], zipped=zipped))
    assert len(checkpoint.storages) == 3
    assert checkpoint.tensors[0].kind == "quantized"


# -- tensors that consist of tensors -----------------------------------------------------------------------------------

EYE = torch.eye(4)
SPARSE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sparse_coo": (EYE.to_sparse(), ("indices", "values")),
    "sparse_csr": (EYE.to_sparse_csr(), ("crow_indices", "col_indices", "values")),
    "sparse_csc": (EYE.to_sparse_csc(), ("ccol_indices", "row_indices", "values")),
    "sparse_bsr": (EYE.to_sparse_bsr((2, 2)), ("crow_indices", "col_indices", "values")),
    "sparse_bsc": (EYE.to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices", "values")),
}


@FORMATS
@each("layout", SPARSE)
def test_sparse_tensor_lists_its_parts(layout: str, zipped: bool) -> None:
    value, methods = SPARSE[layout]
    data = saved({"s": value}, zipped=zipped)
    ours, theirs = only_tensor(inspect(data)), loaded(data)["s"]
    assert (ours.kind, ours.dtype, ours.shape) == (layout, "float32", tuple(theirs.shape))
    assert [part.shape for part in ours.parts] == [
        tuple(getattr(theirs, f"_{m}" if layout == "sparse_coo" else m)().shape) for m in methods
    ]
    assert ours.nbytes == sum(part.nbytes for part in ours.parts) > 0
    assert inspect(data).safety == "data-only"


@needs_torch(2, 2)  # torch 2.1 cannot save one
@FORMATS
def test_nested_tensor_lists_its_parts(zipped: bool) -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    checkpoint = inspect(saved(value, zipped=zipped))
    assert (only_tensor(checkpoint).kind, [part.name for part in only_tensor(checkpoint).parts]) == (
        "nested",
        ["buffer", "sizes", "strides", "offsets"],
    )
    assert only_tensor(checkpoint).parts[0].shape == (18,)
    assert checkpoint.safety == "data-only"


@pytest.mark.skipif(not hasattr(torch, "jagged"), reason="needs a newer torch")
@FORMATS
def test_jagged_tensor_lists_values_and_offsets_and_is_not_dangerous(zipped: bool) -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    checkpoint = inspect(saved(value, zipped=zipped))
    ours = only_tensor(checkpoint)
    assert (ours.kind, ours.cls) == ("nested", "NestedTensor")
    assert {part.name: part.shape for part in ours.parts if part.numel} == {"values": (6, 3), "offsets": (3,)}
    # torch 2.15 writes only data; earlier releases also write classes of the compiler's symbols.
    known = all(use.verdict == "data" for use in checkpoint.globals)
    assert checkpoint.safety == ("data-only" if known else "needs-trust")


@FORMATS
def test_meta_tensor_has_no_bytes(zipped: bool) -> None:
    data = saved(torch.empty_strided((3, 4), (4, 1), device="meta", dtype=torch.float16), zipped=zipped)
    checkpoint = inspect(data)
    assert read_facts(only_tensor(checkpoint)) == torch_facts(loaded(data))
    assert (only_tensor(checkpoint).kind, only_tensor(checkpoint).nbytes, checkpoint.storages) == ("meta", 0, ())


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Wrapper(torch.Tensor):
    """A subclass without a storage, around another tensor."""

    @staticmethod
    def __new__(cls: Any, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl


@FORMATS
def test_tensor_subclass_keeps_its_name(zipped: bool) -> None:
    checkpoint = inspect(saved(torch.ones(3).as_subclass(Named), zipped=zipped))
    assert (only_tensor(checkpoint).cls, only_tensor(checkpoint).shape, checkpoint.safety) == (
        "Named",
        (3,),
        "needs-trust",
    )


@FORMATS
def test_wrapper_subclass_lists_the_tensors_in_its_state(zipped: bool) -> None:
    checkpoint = inspect(saved({"w": Wrapper(torch.ones(3, 2))}, zipped=zipped))
    ours = checkpoint.tensor("w")
    assert (ours.kind, ours.cls, ours.shape, ours.storage) == ("subclass", "Wrapper", (3, 2), None)
    assert [(part.name, part.shape) for part in ours.parts] == [("w/inner", (3, 2))]
    assert checkpoint.storages[0].tensors == ("w/inner",)
    assert checkpoint.safety == "needs-trust"


@needs_torch(2, 5)  # torch.distributed.tensor
def test_dtensor_lists_its_local_part() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        data = saved({"d": DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])})
    finally:
        distributed.destroy_process_group()
    checkpoint = inspect(data)
    ours = checkpoint.tensor("d")
    assert (ours.kind, ours.cls, ours.dtype, ours.shape) == ("sharded", "DTensor", "float32", (6, 4))
    assert [(part.start, part.shape) for part in ours.parts] == [((0, 0), (3, 4))]
    assert checkpoint.safety == "needs-trust"


def test_tensor_in_an_attribute_of_a_parameter_is_listed() -> None:
    value = nn.Parameter(torch.ones(3))
    value.scale = torch.ones(2)
    checkpoint = inspect(saved({"p": value}))
    assert [(t.name, t.shape, t.cls) for t in checkpoint.tensors] == [("p", (3,), "Parameter"), ("p/scale", (2,), "")]
    assert all(storage.tensors for storage in checkpoint.storages)


def test_tensor_with_an_attribute_is_read_as_a_plain_tensor() -> None:
    value = torch.ones(3)
    value.note = "hello"
    data = saved(value)
    assert read_facts(only_tensor(inspect(data))) == torch_facts(loaded(data))
    assert inspect(data).safety == "data-only"


@pytest.mark.parametrize("typed", [True, False])
def test_storage_saved_by_itself_is_listed_as_a_value(typed: bool) -> None:
    storage = torch.ones(3).storage() if typed else torch.ones(3).untyped_storage()
    checkpoint = inspect(saved({"s": storage}), verify=True)
    assert [(s.nbytes, s.stored, s.tensors) for s in checkpoint.storages] == [(12, 12, ())]
    assert [(leaf.name, leaf.kind) for leaf in checkpoint.leaves] == [("s", "storage")]
    assert (checkpoint.safety, checkpoint.integrity, checkpoint.tensors) == ("data-only", "whole", ())


# -- tensors on devices that have no storages, forged without such a device --------------------------------------------


def read(body: bytes, **storages: bytes) -> Checkpoint:
    return inspect(forge.checkpoint(pickled(ordered({"w": body})), storages))


def test_tensor_rebuilt_on_another_device_has_that_device() -> None:
    body = rebuild_call("_rebuild_device_tensor_from_cpu_tensor", tensor("0"), name("torch", "float16"), "xla:1", True)
    ours = only_tensor(read(body, **{"0": bytes(16)}))
    assert (ours.kind, ours.device, ours.dtype, ours.shape, ours.requires_grad) == (
        "device",
        "xla:1",
        "float16",
        (4,),
        True,
    )
    assert [(part.device, part.dtype) for part in ours.parts] == [("cpu", "float32")]


def test_tensor_rebuilt_from_numpy_has_the_shape_of_the_array() -> None:
    array = call(name("numpy._core.multiarray", "_reconstruct"), name("numpy", "ndarray"), tuple_of(0), forge.text("b"))
    state = tuple_of(1, tuple_of(2, 3), call(name("numpy", "dtype"), "f4", False, True), False, forge.text("x" * 24))
    body = rebuild_call(
        "_rebuild_device_tensor_from_numpy", array + state + b"b", name("torch", "float32"), "maia:0", False
    )
    ours = only_tensor(read(body))
    assert (ours.kind, ours.device, ours.dtype, ours.shape, ours.stride) == (
        "device",
        "maia:0",
        "float32",
        (2, 3),
        (3, 1),
    )


def test_oldest_rebuild_function_is_read() -> None:
    ours = only_tensor(read(rebuild_call("_rebuild_tensor", storage_id("0", 4), 1, (3,), (1,)), **{"0": bytes(16)}))
    assert read_facts(ours) == ("float32", (3,), (1,), 1, False, "cpu")


# -- sharing -----------------------------------------------------------------------------------------------------------


@FORMATS
def test_storages_are_shared_as_in_torch(zipped: bool) -> None:
    weight = torch.ones(4, 4)
    data = saved({"a": weight, "b": weight, "row": weight[1], "c": weight.clone()}, zipped=zipped)
    checkpoint, theirs = inspect(data), loaded(data)
    assert checkpoint.shared == (("a", "b", "row"),)
    for one in theirs:
        for other in theirs:
            same = theirs[one].untyped_storage().data_ptr() == theirs[other].untyped_storage().data_ptr()
            assert (checkpoint.tensor(one).storage == checkpoint.tensor(other).storage) is same


@FORMATS
def test_bytes_that_no_view_uses_are_counted_as_dead(zipped: bool) -> None:
    checkpoint = inspect(saved(torch.ones(1000)[:10], zipped=zipped))
    assert (checkpoint.tensor_nbytes, checkpoint.dead_nbytes) == (4000, 3960)


# -- modules -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Everything a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.register_buffer("gone", None)
        self.note = "text"


class Net(nn.Module):
    """Modules in modules, one of them under two names, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.blocks = nn.ModuleList([Block(), nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))])
        self.named = nn.ModuleDict({"in_out": nn.Linear(1, 1), "x": nn.Identity()})
        self.held = nn.ParameterList([torch.ones(2), torch.ones(1)])
        self.table = nn.ParameterDict({"k": torch.ones(2)})
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight


MODULES: dict[str, Any] = {
    "a linear layer": functools.partial(nn.Linear, 2, 3),
    "a sequence": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)),
    "a recurrent network": functools.partial(nn.LSTM, 2, 3, 2),
    "attention": functools.partial(nn.MultiheadAttention, 4, 2),
    "a transformer layer": functools.partial(nn.TransformerEncoderLayer, 4, 2, 8),
    "everything": Net,
}


@FORMATS
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@each("kind", MODULES)
def test_pickled_module_has_the_names_of_its_state_dict(kind: str, zipped: bool) -> None:
    module = MODULES[kind]()
    checkpoint = inspect(saved(module, zipped=zipped))
    expected = module.state_dict(keep_vars=True)
    ours = {t.name: t for t in checkpoint.tensors if t.name in expected}
    assert list(ours) == list(expected)
    for title, theirs in expected.items():
        assert read_facts(ours[title]) == torch_facts(theirs)
    assert checkpoint.safety == "needs-trust"


@pytest.mark.parametrize("zipped", [True])
def test_tensors_outside_the_state_dict_are_listed_under_other_names(zipped: bool) -> None:
    checkpoint = inspect(saved(Net(), zipped=zipped))
    others = {t.name for t in checkpoint.tensors} - set(Net().state_dict())
    assert "blocks.0._buffers/hidden" in others
    tied = next(storage.tensors for storage in checkpoint.storages if "tied.weight" in storage.tensors)
    assert set(tied) == {"first.weight", "again.weight", "tied.weight"}


def test_module_in_a_dictionary_has_the_key_in_its_names() -> None:
    checkpoint = inspect(saved({"model": nn.Linear(2, 2), "ema": {"model": nn.Linear(2, 2)}}))
    assert [t.name for t in checkpoint.tensors] == ["model/weight", "model/bias", "ema/model/weight", "ema/model/bias"]


def test_optimizer_state_is_named_by_its_keys() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint = inspect(saved(optimizer.state_dict()))
    assert {t.name for t in checkpoint.tensors} == {
        f"state/{i}/{k}" for i in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")
    }
    assert ("param_groups/0/lr", "0.001") in {(leaf.name, leaf.text) for leaf in checkpoint.leaves}


# -- unknown and broken tensors ----------------------------------------------------------------------------------------


def test_tensor_argument_of_an_unknown_rebuild_function_is_listed() -> None:
    checkpoint = read(rebuild_call("_rebuild_tensor_v9", tensor("0"), "more"), **{"0": bytes(16)})
    assert [t.name for t in checkpoint.tensors] == ["w/0"]
    assert checkpoint.safety == "needs-trust"


def rebuilt_v2(storage: object = None, offset: object = 0, shape: object = (4,), stride: object = (1,)) -> bytes:
    stored = storage_id("0", 4) if storage is None else storage
    return call(name("torch._utils", "_rebuild_tensor_v2"), stored, offset, shape, stride, False, ordered())


AFFINE = name("torch", "per_tensor_affine")
BROKEN: dict[str, bytes] = {
    "negative size": rebuilt_v2(shape=(-4,)),
    "negative stride": rebuilt_v2(stride=(-1,)),
    "negative offset": rebuilt_v2(offset=-1),
    "beyond its storage": rebuilt_v2(shape=(5,)),
    "beyond its storage by its offset": rebuilt_v2(offset=1),
    "beyond its storage by its stride (pytorch#184652)": rebuilt_v2(shape=(2,), stride=(4,)),
    "more sizes than strides": rebuilt_v2(shape=(2, 2)),
    "a huge size": rebuilt_v2(shape=(1 << 64,)),
    "a huge stride": rebuilt_v2(shape=(1,), stride=(1 << 64,)),
    "a huge offset": rebuilt_v2(offset=1 << 64),
    "a string as a size": rebuilt_v2(shape=("4",)),
    "a bool as a size": rebuilt_v2(shape=(True,)),
    "a number as the shape": rebuilt_v2(shape=number(4)),
    "no storage": rebuilt_v2(storage=number(4)),
    "a tensor as the storage": rebuilt_v2(storage=tensor("0")),
    "too few arguments": rebuild_call("_rebuild_tensor_v2", storage_id("0", 4)),
    "too many arguments": rebuild_call("_rebuild_tensor", storage_id("0", 4), 0, (4,), (1,), 5, 6),
    "arguments that are not a tuple": name("torch._utils", "_rebuild_tensor_v2") + b"]R",
    "a parameter of None": rebuild_call("_rebuild_parameter", None, True, ordered()),
    "a parameter of a parameter of a number": rebuild_call(
        "_rebuild_parameter", rebuild_call("_rebuild_parameter", 4, True, ordered()), True, ordered()
    ),
    "sparse parts that are not tensors": rebuild_call(
        "_rebuild_sparse_tensor", call(name("torch.serialization", "_get_layout"), "torch.sparse_coo"), (1, 2, (3,))
    ),
    "a quantized tensor beyond its storage": rebuild_call(
        "_rebuild_qtensor", storage_id("0", 4, "QInt8Storage"), 0, (9,), (1,), (AFFINE, 1, 0), False, ordered()
    ),
}


@each("kind", BROKEN)
def test_broken_tensor_is_reported_and_left_out(kind: str) -> None:
    checkpoint = read(BROKEN[kind], **{"0": bytes(16)})
    assert checkpoint.tensors == ()
    assert [(p.code, p.where) for p in checkpoint.problems if p.code == "tensor-broken"] == [("tensor-broken", "w")]
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")


@pytest.mark.parametrize("kind", ["a wrapper", "attributes"])
def test_broken_tensor_inside_a_tensor_is_damage(kind: str) -> None:
    inner = rebuilt_v2(shape=(5,))
    state = b"}" + forge.text("inner") + inner + b"s"
    plain = call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        tuple_of(storage_id("0", 4), 0, (4,), (1,), False, ordered()),
        state,
    )
    wrapper = call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_wrapper_subclass"),
        name("m", "Wrapper"),
        tuple_of(name("m", "Wrapper"), name("torch", "float32"), (4,), (1,), 0, None, "cpu", False),
        state,
    )
    checkpoint = read(wrapper if kind == "a wrapper" else plain, **{"0": bytes(16)})
    assert checkpoint.integrity == "damaged"


@each("view", [("9", -1, 3), ("9", 0, 5), ("9", 4, 1), ("9", 1), "9"], ids=str)
def test_storage_view_beyond_its_storage_is_damage(view: object) -> None:
    pid = tuple_of("storage", name("torch", "FloatStorage"), "0", "cpu", 4, view) + b"Q"
    checkpoint = inspect(forge.legacy(object=pickled(ordered({"w": rebuilt_v2(storage=pid, shape=(1,))}))))
    assert checkpoint.integrity == "damaged"


def test_storage_with_two_dtypes_is_a_conflict() -> None:
    """torch uses the type it meets first. No release of torch writes such a file."""
    two = pickled(ordered({"f": tensor("0"), "i": rebuilt_v2(storage=storage_id("0", 4, "IntStorage"))}))
    checkpoint = inspect(forge.checkpoint(two, {"0": bytes(16)}))
    assert checkpoint.safety == "unknown"
    assert "storage-conflict" in {problem.code for problem in checkpoint.problems}


def test_keys_of_every_type_become_names() -> None:
    state: dict[Any, Any] = {
        1: torch.ones(1),
        "a": torch.ones(1),
        (1, 2): torch.ones(1),
        None: torch.ones(1),
        1.5: torch.ones(1),
    }
    checkpoint = inspect(saved(OrderedDict(state)))
    assert [t.name for t in checkpoint.tensors] == ["1", "a", "(1, 2)", "None", "1.5"]
    assert all(isinstance(step, (str, int)) for t in checkpoint.tensors for step in t.path)


def test_node_at_ends_on_cyclic_and_long_chains_of_states() -> None:
    thing = call(name("somebody", "Thing"))
    cyclic = forge.dictionary({"a": thing + b"q\x00h\x00b", "b": thing + forge.dictionary({"c": 1}) + b"b"})
    chain = thing * 5000 + b"b" * 4999
    for body, path, expected in ((cyclic, ("a", "x"), None), (cyclic, ("b", "c"), 1), (chain, ("x",), None)):
        assert walks.node_at(run(pickled(body)).root, path) == expected


def test_node_at_finds_attributes_in_slots() -> None:
    slots = forge.dictionary({"a": 1}) + forge.dictionary({"b": 2}) + b"\x86"
    root = run(pickled(call(name("somebody", "Thing")) + slots + b"b")).root
    assert [walks.node_at(root, (key,)) for key in "ab"] == [1, 2]


def test_tensors_in_the_argument_of_an_ordered_dict_are_found() -> None:
    """Python never pickles one like this, but torch loads it."""
    mapping = call(name("collections", "OrderedDict"), forge.dictionary({"a": tensor("0")}))
    data = forge.checkpoint(pickled(mapping), {"0": bytes(16)})
    assert [listed.name for listed in inspect(data).tensors] == list(loaded(data)) == ["a"]
