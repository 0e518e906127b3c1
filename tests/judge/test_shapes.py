"""Argument shapes: a call that ``weights_only`` allows is data only with arguments as in real checkpoints.

Each case is opcodes of a protocol 2 pickle in a torch archive. Payloads are harmless, and sizes are small.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import pytest
import torch
from tests.each import each
from tests.forge import name, text
from tests.release import RELEASE

from transload.checkpoint import Checkpoint
from transload.formats.pickle_machine import run
from transload.formats.tensors import RebuildReader
from transload.judge.names import SHADOWED, TORCH_DEFAULT
from transload.judge.safety import _REBUILDS, check_call, judge_pickles
from transload.nodes import REBUILDS, Call, Dict, Global


class InspectZip(Protocol):
    def __call__(self, body: bytes, storages: dict[str, bytes] | None = None, *, protocol: int = 2) -> Checkpoint: ...


def call(full: str, *args: bytes) -> bytes:
    module, _, attribute = full.rpartition(".")
    return name(module, attribute) + b"(" + b"".join(args) + b"tR"


def dictionary(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


NO, YES, NONE = b"\x89", b"\x88", b"N"
NESTED = b")" + b"\x85" * 100_000
HOOKS = name("collections", "OrderedDict") + b")R"
SOME_HOOKS = name("collections", "OrderedDict") + b")RK\x01" + name("torch", "Size") + b"s"
STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
LAYOUT = STORAGE + b"K\x00K\x02\x85K\x01\x85"
UTILS = "torch._utils._rebuild_"
TENSOR = call(UTILS + "tensor_v2", LAYOUT, NO, HOOKS)
BYTES = call("_codecs.encode", text("x"), text("latin1"))
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
V2 = name("torch._utils", "_rebuild_tensor_v2")
V2_ARGS = b"(" + LAYOUT + NO + HOOKS + b"t"
PLAIN = name("torch", "Tensor")
TEN = b"J\x0a\x00\x00\x00"

SHAPES: dict[str, dict[str, bytes]] = {
    "data-only": {
        "encode latin1": BYTES,
        "encode latin-1": call("_codecs.encode", text("x"), text("latin-1")),
        "empty bytearray": call("builtins.bytearray"),
        "bytearray of bytes": call("builtins.bytearray", BYTES),
        "bytearray of Python 2": call("__builtin__.bytearray", text("x"), text("latin-1")),
        "set of a list": call("builtins.set", b"](K\x01K\x02e"),
        "complex": call("builtins.complex", b"G?\xf0\x00\x00\x00\x00\x00\x00", b"G?\xf0\x00\x00\x00\x00\x00\x00"),
        "Counter of counts": call("collections.Counter", dictionary(a=b"K\x01")),
        "OrderedDict": call("collections.OrderedDict"),
        "OrderedDict of pairs": call("collections.OrderedDict", b"](](K\x01K\x02eK\x01K\x02\x86e"),
        "OrderedDict with items": call("collections.OrderedDict") + b"(" + text("a") + b"K\x01u",
        "OrderedDict with _metadata": call("collections.OrderedDict") + dictionary(_metadata=HOOKS) + b"b",
        "Size": call("torch.Size", b"K\x01K\x02\x86"),
        "device": call("torch.device", text("cuda"), b"K\x01"),
        "device by text": call("torch.device", text("cpu")),
        "layout": call("torch.serialization._get_layout", text("torch.strided")),
        "dtype": name("torch", "float16"),
        "tensor v1": call(UTILS + "tensor", LAYOUT),
        "tensor v2": TENSOR,
        "tensor v2 with empty pairs for hooks": call(
            UTILS + "tensor_v2", LAYOUT, NO, call("collections.OrderedDict", b"]")
        ),
        "tensor v2 with no hooks": call(UTILS + "tensor_v2", LAYOUT, NO, NONE),
        "tensor v2 with flags": call(UTILS + "tensor_v2", LAYOUT, NO, HOOKS, dictionary(neg=YES)),
        "parameter": call(UTILS + "parameter", TENSOR, YES, HOOKS),
        "parameter with state": call(UTILS + "parameter_with_state", TENSOR, YES, HOOKS, dictionary(mine=YES)),
        "old parameter": call("torch.nn.parameter.Parameter", TENSOR, YES),
        "tensor with attributes": call(FROM_TYPE, V2, PLAIN, V2_ARGS, dictionary(mine=YES)),
        "parameter with attributes": call(
            FROM_TYPE, V2, name("torch.nn.parameter", "Parameter"), V2_ARGS, dictionary(mine=YES)
        ),
    },
    "needs-trust": {
        "set of text": call("builtins.set", text("abc")),
        "set of two": call("builtins.set", b"]", b"]"),
        "complex of text": call("builtins.complex", text("1j")),
        "Counter of text": call("collections.Counter", text("aab")),
        "OrderedDict of a tensor": call("collections.OrderedDict", TENSOR),
        "OrderedDict with its methods shadowed": call("collections.OrderedDict") + dictionary(items=b"]") + b"b",
        "OrderedDict with a nested key": call("collections.OrderedDict") + b"}(" + NESTED + b"Nub",
        "OrderedDict with a slot state": call("collections.OrderedDict") + NONE + dictionary(_metadata=b"}") + b"\x86b",
        "OrderedDict with a method shadowed behind many keys": call("collections.OrderedDict")
        + b"}("
        + (text("_metadata") + NONE) * 1000
        + text("items")
        + NONE
        + b"ub",
        "Size of text": call("torch.Size", text("12")),
        "device of a tensor": call("torch.device", TENSOR),
        "layout of a number": call("torch.serialization._get_layout", b"K\x01"),
        "hooks": call(UTILS + "tensor_v2", LAYOUT, NO, SOME_HOOKS),
        "hooks of a parameter": call(UTILS + "parameter", TENSOR, YES, SOME_HOOKS),
        "hooks that are not a dictionary": call(UTILS + "tensor_v2", LAYOUT, NO, call("torch.Size", b")")),
        "requires_grad of text": call(UTILS + "tensor_v2", LAYOUT, text("yes"), HOOKS),
        "metadata of text": call(UTILS + "tensor_v2", LAYOUT, NO, HOOKS, dictionary(conj=text("yes"))),
        "metadata of a list": call(UTILS + "tensor_v2", LAYOUT, NO, HOOKS, b"]"),
        "BUILD of a tensor with a layout": TENSOR + b"(" + LAYOUT + b"tb",
        "BUILD of a tensor with attributes": TENSOR + dictionary(mine=YES) + b"b",
        "a tensor class of a list": call("torch.FloatTensor", b"](K\x01e"),
        "a layout for a tensor of torch 0.1": name("torch", "FloatTensor") + b")\x81(" + LAYOUT + b"tb",
        "an odd state of torch 0.1": name("torch", "FloatTensor") + b")\x81" + dictionary(a=b"N") + b"b",
        "an attribute that already exists": call(FROM_TYPE, V2, PLAIN, V2_ARGS, dictionary(data=TENSOR)),
        "a parameter with data as attribute": call(
            UTILS + "parameter_with_state", TENSOR, YES, HOOKS, dictionary(data=TENSOR)
        ),
        "from_type with another class": call(FROM_TYPE, V2, name("nobody", "Knows"), V2_ARGS, b"}"),
        "from_type with a class that is not a tensor": call(
            FROM_TYPE, V2, name("collections", "OrderedDict"), V2_ARGS, b"}"
        ),
        "from_type with hooks inside": call(FROM_TYPE, V2, PLAIN, b"(" + LAYOUT + NO + SOME_HOOKS + b"t", b"}"),
        "from_type with a list for a state": call(FROM_TYPE, V2, PLAIN, V2_ARGS, b"]"),
    },
    "unknown": {
        "a dtype that is called": call("torch.float32"),
        "too few arguments": call(UTILS + "tensor_v2", LAYOUT, NO),
        "too many arguments": call(UTILS + "parameter", TENSOR, YES, HOOKS, NONE),
        "from_type with too few arguments": call(FROM_TYPE, V2, PLAIN, V2_ARGS),
        "from_type with too few arguments inside": call(FROM_TYPE, V2, PLAIN, b")", b"}"),
        "from_type with another function": call(
            FROM_TYPE, name("torch.serialization", "_get_layout"), PLAIN, b"(" + text("torch.strided") + b"t", b"}"
        ),
        "arguments that are not a tuple": name("collections", "OrderedDict") + b"]R",
        "items in a set": call("builtins.set", b"]") + b"(K\x01e",
        "values appended to an OrderedDict": call("collections.OrderedDict") + b"K\x01a",
        "keys in bytes": BYTES + b"K\x00K\x01s",
        "attributes of a list": b"]}b",
        "attributes of a storage": STORAGE + b"}b",
        "attributes of a dictionary": b"}}b",
        "a call of a number": b"K\x01)R",
        "a call of a dictionary": b"})R",
    },
    "dangerous": {
        "another codec": call("_codecs.encode", text("x"), text("rot13")),
        "no codec": call("_codecs.encode", text("x")),
        "a computed codec": call("_codecs.encode", text("x"), BYTES),
        "bytearray of a number": call("builtins.bytearray", TEN),
        "bytearray of a huge number": call("builtins.bytearray", b"\x8a\x06" + bytes(5) + b"\x01"),
        "bytearray of a list": call("builtins.bytearray", b"](K\x01e"),
        "bytearray of a tensor": call("builtins.bytearray", TENSOR),
        "FloatTensor(n)": call("torch.FloatTensor", TEN),
        "FloatTensor(a, b)": call("torch.FloatTensor", TEN, TEN),
        "FloatTensor(Size)": call("torch.FloatTensor", call("torch.Size", b"K\x01\x85")),
        "Tensor(n)": call("torch.Tensor", TEN),
        "cuda": call("torch.cuda.FloatTensor", TEN),
        "sparse": call("torch.sparse.FloatTensor", TEN),
        "NEWOBJ": name("torch", "FloatTensor") + TEN + b"\x85\x81",
        "UntypedStorage(n)": call("torch.storage.UntypedStorage", TEN),
        "TypedStorage()": call("torch.storage.TypedStorage"),
        "FloatStorage(n)": call("torch.FloatStorage", TEN),
        "CVE-2026-24747 SETITEM on a tensor": TENSOR + b"K\x00K\x01s",
        "CVE-2026-24747 SETITEMS on a tensor": TENSOR + b"(K\x00K\x01u",
        "APPEND on a tensor": TENSOR + b"K\x01a",
        "SETITEM on a parameter": call(UTILS + "parameter", TENSOR, YES, HOOKS) + b"K\x00K\x01s",
        "SETITEM on a size": call("torch.Size", b")") + b"K\x00K\x01s",
        "from_type with a computed function": call(FROM_TYPE, call("torch.Size", b")"), PLAIN, V2_ARGS, b"}"),
        "from_type with a class attribute": call(FROM_TYPE, V2, PLAIN, V2_ARGS, dictionary(__class__=PLAIN)),
        "from_type with a class attribute in slots": call(
            FROM_TYPE, V2, PLAIN, V2_ARGS, NONE + dictionary(__class__=PLAIN) + b"\x86"
        ),
        "from_type in from_type": call(FROM_TYPE, name("builtins", "print"), PLAIN, V2_ARGS, b"}"),
        "a parameter with a class attribute": call(
            UTILS + "parameter_with_state", TENSOR, YES, HOOKS, dictionary(__class__=PLAIN)
        ),
    },
}
CASES = [(verdict, case) for verdict, cases in SHAPES.items() for case in cases]


@each(("verdict", "case"), CASES, ids=[case for _, case in CASES])
def test_verdict_depends_on_the_arguments_of_a_call(verdict: str, case: str, inspect_zip: InspectZip) -> None:
    checkpoint = inspect_zip(SHAPES[verdict][case], {"0": bytes(16)})
    evidence = [line for finding in checkpoint.findings if finding.severity != "note" for line in finding.evidence]
    assert checkpoint.safety == verdict, evidence
    assert (evidence == []) == (verdict == "data-only")


@each("case", SHAPES["data-only"])
def test_torch_loads_the_data_only_cases(case: str, archive_of: Callable[[bytes, dict[str, bytes]], bytes]) -> None:
    raw = archive_of(b"\x80\x02" + SHAPES["data-only"][case] + b".", {"0": bytes(16)})
    try:
        torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if RELEASE >= (2, 6) or "Unsupported class" not in str(error):
            raise
        pytest.skip("this torch does not allow the name")


@pytest.mark.parametrize(
    "kwargs", [b"}(" + text("errors") + text("strict") + b"u", b"K\x01"], ids=["keywords", "a number"]
)
def test_keyword_arguments_need_trust(kwargs: bytes) -> None:
    parsed = run(name("_codecs", "encode") + b"(" + text("x") + text("latin1") + b"t" + kwargs + b"\x92.")
    complaint = check_call("_codecs.encode", parsed.calls[0])
    assert complaint == ("needs-trust", "_codecs.encode is called with keyword arguments")


SHARED = {
    "arguments": (call("torch.FloatTensor"), b"(" + b"N" * 3000 + b"tq\x00", b"h\x00R0"),
    "pairs": (call("collections.OrderedDict"), b"](" + b"NN\x86" * 3000 + b"e\x85q\x00", b"h\x00R0"),
    "a state": (call("collections.OrderedDict"), b"}(" + (text("_metadata") + NONE) * 3000 + b"uq\x00", b")Rh\x00b0"),
    "a state in slots": (name("nobody", "Knows"), b"N}(" + (text("a") + NONE) * 3000 + b"u\x86q\x00", b")Rh\x00b0"),
    "attributes": (V2, b"(" + V2 + PLAIN + V2_ARGS + b"}(" + (text("a") + NONE) * 3000 + b"utq\x00", b"h\x00R0"),
    "bytes of a loader": (name("pickle", "loads"), b"(" + b"C\x01N" * 3000 + b"tq\x00", b"h\x00R0"),
}


@each("case", SHARED)
def test_object_shared_by_many_calls_is_not_scanned_for_each_call(case: str) -> None:
    """A small file can hold a million calls that share one object of a million items."""
    callee, shared, use = SHARED[case]
    callee = name(FROM_TYPE.rpartition(".")[0], "_rebuild_from_type_v2") if case == "attributes" else callee
    callee = callee.removesuffix(b"(tR")

    def work(calls: int) -> int:
        parsed = run(b"\x80\x02" + shared + b"0" + (callee + use) * calls + b"N.")
        assert len(parsed.calls) >= calls
        return count_instructions(lambda: judge_pickles([parsed]))

    assert work(220) - work(20) < 200 * 3000


def count_instructions(work: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "opcode"
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_every_allowed_name_has_a_rule_that_checks_its_calls() -> None:
    """An allowed name without a rule would be a hole: a call with a number must be rejected for each of them."""
    unchecked = set()
    for full in TORCH_DEFAULT:
        module, _, attribute = full.rpartition(".")
        node = Call(Global(module, attribute, 0), (1 << 40, Dict([])), "reduce", 0)
        if check_call(full, node) is None:
            unchecked.add(full)
    # Their arguments are judged where tensors are read, or they are only ever reached with a class that needs trust.
    assert unchecked == {
        "torch._utils._rebuild_sparse_tensor",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
    }


def test_table_of_rebuild_functions_matches_torchs_signatures() -> None:
    import inspect

    for full, rebuild in _REBUILDS.items():
        function = getattr(torch._utils, full.rpartition(".")[2], None)
        if function is None:
            assert RELEASE < (2, 6), full
            continue
        parameters = list(inspect.signature(function).parameters.values())
        required = [p for p in parameters if p.default is p.empty]
        assert (len(required), len(parameters)) == rebuild[:2], full
        for expected, index in list(rebuild._asdict().items())[2:]:
            assert index == 99 or parameters[index].name == expected, full
    assert {n for n in TORCH_DEFAULT if n.startswith("torch._utils._rebuild_")} == set(_REBUILDS)
    assert all(hasattr(RebuildReader, f"_{name.rpartition('.')[2].lstrip('_').lower()}") for name in REBUILDS)


def test_attributes_that_must_not_be_shadowed_exist_on_tensors() -> None:
    tensor = torch.ones(1)
    optional = {"_grad", "_post_accumulate_grad_hooks", "_backward_hooks"}
    assert [attribute for attribute in SHADOWED - optional if not hasattr(tensor, attribute)] == []
