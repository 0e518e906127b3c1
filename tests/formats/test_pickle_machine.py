"""The pickle machine builds the structure that ``pickle`` would, from inert nodes, and withstands hostile streams.

``test_pickle_machine_soundness.py`` tests that it lists every name a loader would request. CVE numbers
are known attacks on other scanners.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.each import each

from transload.formats.pickle_machine import run
from transload.formats.pickle_streams import run_all
from transload.formats.rare_opcodes import MAX_INT_BYTES, opcodes
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Set

if TYPE_CHECKING:
    from typing_extensions import Self

FUZZ = int(os.environ.get("TRANSLOAD_FUZZ", "1"))
PROTOCOLS = range(6)

# -- the same structure as pickle.loads --------------------------------------------------------------------------------

# These create only data; any other name is an error in the test.
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": str.encode,
    "__builtin__.bytearray": bytearray,
    "__builtin__.bytes": bytes,
    "__builtin__.complex": complex,
    "__builtin__.frozenset": frozenset,
    "__builtin__.set": set,
    "__builtin__.xrange": range,
    "builtins.bytearray": bytearray,
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.range": range,
    "builtins.set": set,
    "collections.Counter": collections.Counter,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.deque": collections.deque,
}


class Rebuilder:
    """Builds the objects that nodes describe."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}

    def __call__(self, node: Any) -> Any:
        if id(node) not in self.objects:
            self.objects[id(node)] = self._build(node)
        return self.objects[id(node)]

    def _build(self, node: Any) -> Any:
        if type(node) is list:
            out: list[Any] = []
            self.objects[id(node)] = out
            out += map(self, node)
            return out
        if type(node) is Dict:
            return self._fill(node, {}, node.items)
        if type(node) is Set:
            return (frozenset if node.frozen else set)(map(self, node.items))
        if type(node) is tuple:
            return tuple(map(self, node))
        if type(node) is Call:
            assert type(node.callee) is Global
            value = CONSTRUCTORS[node.callee.full_name](*map(self, node.args))  # type: ignore[call-overload]
            value.extend(map(self, node.appended)) if node.appended else None
            return self._fill(node, value, node.items or [])
        return node

    def _fill(self, node: object, target: Any, items: list[Any]) -> Any:
        self.objects[id(node)] = target
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self(key)] = self(value)
        return target


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**4000), 2**4000),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=[])),  # lone surrogates too
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
hashables = st.recursive(
    scalars, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)), max_leaves=5
)
values = st.recursive(
    st.one_of(hashables, st.binary().map(bytearray), st.builds(range, st.integers(-9, 9))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner, inner),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(collections.deque),
    ),
    max_leaves=20,
)


def python_dumps(value: object, protocol: int) -> bytes:
    return pickle._dumps(value, protocol)  # type: ignore[attr-defined]


@settings(max_examples=150 * FUZZ, derandomize=FUZZ == 1)
@given(values, st.sampled_from(PROTOCOLS), st.sampled_from([pickle.dumps, python_dumps]))
def test_structure_equals_that_of_pickle_loads(
    value: object, protocol: int, dumps: Callable[[object, int], bytes]
) -> None:
    data = dumps(value, protocol)
    result = run(data)
    assert (result.broken, result.irregular, result.ambiguous, result.end) == ("", [], [], len(data))
    assert Rebuilder()(result.root) == pickle.loads(data) == value


@each("protocol", PROTOCOLS)
def test_special_floats_and_booleans_are_preserved(protocol: int) -> None:
    root = run(pickle.dumps([0.0, -0.0, math.inf, -math.inf, math.nan, True, 1], protocol)).root
    assert repr(root) == "[0.0, -0.0, inf, -inf, nan, True, 1]"


@each("protocol", PROTOCOLS)
def test_sharing_and_cycles_are_preserved(protocol: int) -> None:
    shared = ["x"]
    value: dict[str, Any] = {"first": shared, "second": shared}
    value["itself"] = value
    shared.append(value)  # type: ignore[arg-type]
    root = run(pickle.dumps(value, protocol)).root
    assert type(root) is Dict
    assert root.get("first") is root.get("second")
    assert root.get("itself") is root
    assert root.get("first")[1] is root  # type: ignore[index]


@each("protocol", PROTOCOLS)
def test_tuple_that_contains_itself(protocol: int) -> None:
    inner: list[Any] = []
    value = (inner,)
    inner.append(value)
    root: Any = run(pickle.dumps(value, protocol)).root
    assert root[0][0] is root


def test_header_pickles_of_a_file_from_python_2(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-1.0.0-py2.7.18" / "train_cuda0.ckpt").read_bytes()
    file = io.BytesIO(raw)
    pickles = run_all(raw)
    for index in range(3):
        assert Rebuilder()(pickles[index].root) == pickle.load(file)
        assert pickles[index].end == file.tell()
    assert pickles[2].python2


def test_python_2_strings_are_decoded_if_they_are_utf8() -> None:
    result = run(b"(S'caf\\xc3\\xa9'\nU\x01aT\x01\x00\x00\x00\xfft.")
    assert result.root == ("café", "a", b"\xff")
    assert result.python2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"value": self.value}

    def __new__(cls, value: int = 0) -> Self:  # noqa: ARG004 - passed by __getnewargs_ex__
        return object.__new__(cls)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_are_calls_with_their_state(protocol: int) -> None:
    root = run(pickle.dumps(Slotted(7), protocol)).root
    assert type(root) is Call
    assert root.kind == ("reduce" if protocol == 2 else "newobj_ex")
    assert root.states is not None
    assert type(root.states[0]) is tuple
    assert root.states[0][1].pairs() == [("value", 7)]


def test_out_of_band_buffer_is_irregular() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pickle.PickleBuffer(b"x"), 5, buffer_callback=buffers.append)
    assert type(run(data).root) is OutOfBand
    assert run(data).irregular


@pytest.mark.parametrize("kind", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"], ids=["EXT1", "EXT2", "EXT4"])
def test_extension_code_is_listed(kind: bytes) -> None:
    result = run(kind + b")R.")
    assert type(result.root) is Call
    assert type(result.root.callee) is Extension
    assert [extension.code for extension in result.extensions] == [1]


# -- names and calls are listed ----------------------------------------------------------------------------------------

CALLS = {
    "reduce": b"cos\ngetcwd\n)R",
    "newobj": b"cos\ngetcwd\n)\x81",
    "newobj_ex": b"cos\ngetcwd\n)}\x92",
    "obj": b"(cos\ngetcwd\no",
    "inst": b"(ios\ngetcwd\n",
}


@each("kind", CALLS)
@each("after", [b".", b"0N.", b"", b"\xff", b"0."], ids=["kept", "popped", "no STOP", "broken", "underflow"])
def test_call_is_listed_whatever_follows_it(kind: str, after: bytes) -> None:
    """GHSA-mxhj-88fx-4pcv: the result is popped. GHSA-9gvj-pp9x-gcfr: the stream breaks after the call."""
    result = run(CALLS[kind] + after)
    assert [(call.kind, repr(call.callee)) for call in result.calls] == [(kind, "Global(os.getcwd)")]
    assert bool(result.broken) == (after not in (b".", b"0N."))


def test_stack_global_takes_strings_from_the_memo() -> None:
    """picklescan#14: STACK_GLOBAL takes the strings from the memo, not those written just before it."""
    decoy = b"\x8c\x0bcollections\x8c\x0bOrderedDict"
    result = run(b"\x8c\x02os\x94\x8c\x06getcwd\x94" + decoy + b"00h\x00h\x01\x93)R.")
    assert list(result.globals) == [("os", "getcwd")]


def test_memoize_may_overwrite_an_entry_of_put() -> None:
    result = run(b"\x8c\x02osr\x01\x00\x00\x00\x8c\x06getcwd\x94h\x01\x8c\x06getcwd\x93.")
    assert list(result.globals) == [("getcwd", "getcwd")]


@each("operand", [b"K\x01", b"C\x02os", b"\x96\x02\x00\x00\x00\x00\x00\x00\x00os", b"N", b")"])
def test_operand_that_is_not_text_breaks_the_stream_but_names_are_kept(operand: bytes) -> None:
    """picklescan#52, modelscan#338."""
    result = run(CALLS["reduce"] + operand + b"\x8c\x01x\x93.")
    assert result.broken.startswith("STACK_GLOBAL needs two texts")
    assert list(result.globals) == [("os", "getcwd")]


@each("operand", [b"cstring\nhexdigits\n", b"cbuiltins\nstr\n)R", b"NQ", b"U\x01\xff", b"\x82\x01"])
def test_operand_that_may_be_text_does_not_hide_what_follows(operand: bytes) -> None:
    result = run(operand + b"\x8c\x01x\x93" + CALLS["reduce"] + b".")
    assert ("os", "getcwd") in result.globals
    assert [call.kind for call in result.calls][-2:] == ["stack_global", "reduce"]
    assert result.irregular


def test_missing_memo_entry_breaks_the_stream_but_calls_are_kept() -> None:
    result = run(CALLS["reduce"] + b"h\x07.")
    assert result.broken == "it reads memo entry 7, which was never written, at byte 14"
    assert len(result.calls) == 1


def test_every_pickle_of_a_stream_is_read() -> None:
    result = run_all(b"N." * 3 + CALLS["reduce"] + b".")
    assert [list(pickle.globals) for pickle in result] == [[], [], [], [("os", "getcwd")]]


def test_pickles_beyond_the_limit_are_listed_with_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.formats.pickle_streams.MAX_KEPT", 10)
    result = run_all(b"N." * 50 + CALLS["reduce"] + b"." + CALLS["inst"] + b".\xff")
    assert len(result) == 10
    assert list(result[-1].globals) == [("os", "getcwd")]
    assert [call.kind for call in result[-1].calls] == ["reduce", "inst"]
    assert result[-1].broken.startswith("byte 0xff is not a pickle opcode")


FRAMED = b"\x8c\x02os\x94."
FRAMES = {
    "an opcode crosses the end": b"\x95\x02\x00\x00\x00\x00\x00\x00\x00" + FRAMED,
    "an argument crosses the end": b"\x95\x03\x00\x00\x00\x00\x00\x00\x00" + FRAMED,
    "a frame in a frame": b"\x95\x10\x00\x00\x00\x00\x00\x00\x00\x95\x06\x00\x00\x00\x00\x00\x00\x00" + FRAMED,
    "longer than the data": b"\x95\xff\x00\x00\x00\x00\x00\x00\x00" + FRAMED,
    "longer than any data": b"\x95" + b"\xff" * 8 + FRAMED,
    "STOP before the end": b"\x95\x08\x00\x00\x00\x00\x00\x00\x00" + FRAMED + b"NN",
}


@each("case", FRAMES)
def test_frames_that_loaders_read_differently_are_ambiguous(case: str) -> None:
    """python/cpython#154848."""
    assert run(b"\x80\x04" + FRAMES[case]).ambiguous


@pytest.mark.parametrize(
    "data",
    [
        b"\x95\x06\x00\x00\x00\x00\x00\x00\x00" + FRAMED,
        b"\x95" + bytes(8) + FRAMED,
        pickle.dumps(["x" * 70_000, b"y" * 70_000], 4),
    ],
)
def test_regular_frames_are_not_ambiguous(data: bytes) -> None:
    result = run(data)
    assert (result.broken, result.ambiguous, result.irregular) == ("", [], [])


NUMBERS = {
    b"I0x10\n": 16,
    b"I+0\n": 0,
    b"I 0\n": 0,
    b"I010\n": 8,
    b"I1_0\n": 10,
    b"I00\n": False,
    b"I01\n": True,
    b"I1\x00junk\n": 1,
    b"L0x10L\n": 16,
    b"L12\n": 12,
    b"F 1_0.5\n": 10.5,
    b"\x8a\x00": 0,
    b"\x8b\x01\x00\x00\x00\xff": -1,
}


@each("text", NUMBERS)
def test_numbers_in_unusual_notation_are_read(text: bytes) -> None:
    """python/cpython#126992, #135241."""
    assert run(text + b".").root == NUMBERS[text]
    assert type(run(text + b".").root) is type(NUMBERS[text])


@pytest.mark.parametrize("data", [b"NN.", b"(N.", b"NN(N."], ids=["a value", "a MARK", "both"])
def test_values_left_on_the_stack_at_stop_are_irregular(data: bytes) -> None:
    """python/cpython#127079."""
    result = run(data)
    assert result.broken == ""
    assert result.irregular == [(len(data), "values are left on the stack at STOP")]


@pytest.mark.parametrize("data", [b"T\xff\xff\xff\xffx", b"\x8b\xff\xff\xff\xffx"], ids=["BINSTRING", "LONG4"])
def test_negative_length_breaks_the_stream(data: bytes) -> None:
    """python/cpython#135321."""
    result = run(data)
    assert result.broken.startswith("a length of -1 bytes")
    assert not result.cut


def test_unknown_opcode_breaks_the_stream() -> None:
    known = {code for code in range(256) if not run(bytes([code])).broken.startswith("byte 0x")}
    assert len(known) == 68


@each(
    "put",
    [b"K\x00Ns", b"(K\x00Nu", b"Na", b"(Ne", b"(N\x90"],
    ids=["SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS"],
)
def test_setting_items_of_a_global_is_recorded(put: bytes) -> None:
    """Related to CVE-2026-24747 and to BUILD on a global: ``some.module.TABLE[key] = value``."""
    result = run(b"cm\nTABLE\n" + put + b".")
    assert [repr(target) for target, _ in result.built] == ["Global(m.TABLE)"]


@each("put", [b"K\x00Ns", b"(K\x00Nu"], ids=["SETITEM", "SETITEMS"])
@each("target", [b"]", b")", b"K\x01", b"\x8f", b"NQ"], ids=["list", "tuple", "int", "set", "persistent"])
def test_setting_items_of_a_non_dictionary_is_irregular(target: bytes, put: bytes) -> None:
    """CVE-2026-24747: torch up to 2.9.1 set items on tensors."""
    assert run(target + put + b".").irregular


UNHASHABLE = [b"]", b"}", b"\x8f", b"]\x85", b"]\x85N\x86", b"\x96" + bytes(8), b"ccollections\nOrderedDict\n)R"]


@each("key", UNHASHABLE)
def test_unhashable_keys_are_irregular(key: bytes) -> None:
    assert run(b"}" + key + b"Ns.").irregular
    assert run(b"}(" + key + b"Nu.").irregular
    assert run(b"(" + key + b"Nd.").irregular


@each("key", [b"N", b")", b"(\x91", b"(\x91\x85", b"cm\nn\n", b"cm\nn\n)R", b"K\x01\x85", b"C\x00"])
def test_hashable_keys_are_not_irregular(key: bytes) -> None:
    assert run(b"}" + key + b"Ns.").irregular == []


@pytest.mark.parametrize("escape", [rb"'\q\8'", rb"'\x6fs\157\\\'\n\t\a'", rb"'\777'"])
def test_string_escapes_are_those_of_python_2(escape: bytes, recwarn: pytest.WarningsRecorder) -> None:
    import codecs

    result = run(b"S" + escape + b"\n.").root
    assert len(recwarn) == 0
    expected = codecs.escape_decode(escape[1:-1])[0]
    assert result == (expected.decode() if expected.isascii() else expected)


@each("text", [b"'\\x6'", b"'\\'", b"'", b"'a", b"a", b"'a'b"])
def test_string_with_broken_quotes_or_escapes_breaks_the_stream(text: bytes) -> None:
    assert run(b"S" + text + b"\n.").broken.startswith("a text with")


def test_opcodes_match_pickletools() -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps({"a": [1, 2.5, "x" * 300, b"y", {3}], "b": OSError}, protocol)
        import pickletools

        expected = [(position, ord(opcode.code)) for opcode, _, position in pickletools.genops(data)]
        assert list(opcodes(data)) == expected


# -- hostile streams ---------------------------------------------------------------------------------------------------


@settings(max_examples=300 * FUZZ, derandomize=FUZZ == 1)
@given(
    st.one_of(st.binary(), st.lists(st.sampled_from([bytes([code]) for code in range(256)]), max_size=60).map(b"".join))
)
def test_any_bytes_are_read_to_an_end(data: bytes) -> None:
    result = run_all(data)
    assert all(pickle.start < pickle.end <= len(data) for pickle in result)
    assert not data or result[-1].broken or result[-1].end == len(data)


def test_every_prefix_of_a_pickle_is_reported_as_cut(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-2.13.0-py3.11.7" / "whole_custom_cuda0.pt").read_bytes()
    start = raw.index(b"\x80\x02c__main__")
    complete = raw[start : start + run(raw, start).end - start]
    for cut in range(len(complete)):
        result = run(complete[:cut])
        assert result.cut, cut
        assert result.broken, cut


ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
N = 10_000
NAME = b"cm\nn\nq\x00"
HEAVY_STREAMS: dict[str, Callable[[int], bytes]] = {
    "nested tuples": lambda n: b"N" + b"\x85" * n + b".",
    "nested lists": lambda n: b"]" * n + b"a" * (n - 1) + b".",
    "nested dictionaries": lambda n: b"}N" * n + b"N" + b"s" * n + b".",
    "nested frozen sets": lambda n: b"(" * n + b"N" + b"\x91" * n + b".",
    "marks": lambda n: b"(" * n,
    "calls of calls": lambda n: NAME + b")R" * n + b".",
    "calls with calls": lambda n: NAME + b"h\x00" * n + b")" + b"\x85R" * n + b".",
    "states with states": lambda n: NAME + b")R" + b"h\x00)R" * n + b"b" * n + b".",
    "keywords with keywords": lambda n: NAME + b"h\x00)" * n + b"N" + b"\x92" * n + b".",
    "nested persistent ids": lambda n: b"N" + b"Q" * n + b".",
    "DUP": lambda n: b"]" + b"2" * n + b"(" + b"2" * 0 + b"t.",
    "DUP and APPEND": lambda n: b"]" + b"2a" * n + b".",
    "GET": lambda n: b"Nq\x00" + b"h\x00" * n + b".",
    "MEMOIZE": lambda n: b"N" + b"\x94" * n + b".",
    "PUT with distant indexes": lambda n: (
        b"N" + b"".join(b"r" + (i * 4001 % 2**32).to_bytes(4, "little") for i in range(n)) + b"."
    ),
    "names": lambda n: b"".join(b"cm\nn%d\n" % i for i in range(n)) + b".",
    "one name": lambda n: b"cm\nn\n" * n + b".",
    "extensions": lambda n: b"\x82\x01" * n + b".",
    "frames": lambda n: (b"\x95" + b"\xff" * 8) * n + b"N.",
    "empty frames": lambda n: (b"\x95" + bytes(8)) * n + b"N.",
    "irregularities": lambda n: b"N" * n + b"(" * 0 + b"Na" * 0 + b"K\x01" + b"Na" * n + b".",
    "keys that cannot be hashed": lambda n: b"}(" + b"]N" * n + b"u.",
    "pickles": lambda n: b"N." * n,
    "shared pairs": lambda n: b"N" + b"2\x86" * n + b".",
    "strings": lambda n: b"U\x01a" * n + b".",
}


def count_instructions(work: Callable[[], object]) -> int:
    """Count bytecode instructions, which, unlike seconds, are the same on every machine."""
    count = 0

    def call(frame: FrameType, *_: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return instruction

    def instruction(*_: object) -> Any:
        nonlocal count
        count += 1  # returns count as well
        return instruction

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("case", HEAVY_STREAMS)
def test_work_grows_at_most_linearly_with_the_stream(case: str) -> None:
    small, large = HEAVY_STREAMS[case](N // 50), HEAVY_STREAMS[case](N // 5)
    ratio = len(large) / len(small)
    assert count_instructions(lambda: run_all(large)) <= 1.2 * ratio * count_instructions(lambda: run_all(small))


@pytest.mark.parametrize("case", HEAVY_STREAMS)
def test_memory_grows_at_most_linearly_with_the_stream(case: str) -> None:
    data = HEAVY_STREAMS[case](N)
    tracemalloc.start()
    try:
        result = run_all(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The most expensive byte creates a node with its list: a dictionary, a call, a MARK. A pickle takes two bytes.
    assert peak < (1 << 20) + 260 * len(data)
    assert result


NESTED = [
    "nested tuples",
    "nested lists",
    "nested dictionaries",
    "calls of calls",
    "calls with calls",
    "nested persistent ids",
]


@pytest.mark.parametrize("case", [*NESTED, "states with states"])
def test_two_hundred_thousand_nested_nodes_are_freed_without_a_crash(case: str) -> None:
    """Freeing nested nodes must not recurse: a stack overflow there would crash the interpreter."""
    script = """
import gc, sys
from transload.formats.pickle_machine import run
gc.disable()
result = run(sys.stdin.buffer.read())
gc.collect()
root = result.root
result.calls.clear()  # so that only the nesting itself holds the nodes
result.persistent.clear()
del result
del root
print("done")
"""
    stream = HEAVY_STREAMS[case](200_000)
    process = subprocess.run(
        [sys.executable, "-c", script], input=stream, capture_output=True, check=False, timeout=300, env=ENV
    )
    assert (process.returncode, process.stdout.strip()) == (0, b"done"), process.stderr


LENGTHS = {
    "BINUNICODE": b"X\xff\xff\xff\xffabc",
    "BINUNICODE8": b"\x8d" + b"\xff" * 7 + b"\x7fabc",
    "SHORT_BINUNICODE": b"\x8c\xffabc",
    "BINSTRING": b"T\xff\xff\xff\x7fabc",
    "BINBYTES": b"B\xff\xff\xff\xffabc",
    "BINBYTES8": b"\x8e" + b"\xff" * 8 + b"abc",
    "BYTEARRAY8": b"\x96\x00\x00\x00\x00\x40\x00\x00\x00abc",
    "LONG4": b"\x8b\xff\xff\xff\x7fabc",
}


@each("opcode", LENGTHS)
def test_claimed_length_is_not_allocated(opcode: str) -> None:
    tracemalloc.start()
    try:
        result = run(LENGTHS[opcode])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.broken
    assert result.cut
    assert peak < 1 << 16


@pytest.mark.parametrize(
    "data",
    [b"\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20), b"I" + b"7" * (1 << 20) + b"\n", b"L" + b"7" * (1 << 20) + b"L\n"],
    ids=["LONG4", "INT", "LONG"],
)
def test_integer_of_a_megabyte_is_not_computed(data: bytes) -> None:
    root = run(data + b".").root
    assert type(root) is Big
    assert root.nbytes == 1 << 20


def test_integer_is_computed_up_to_the_limit() -> None:
    value = 1 << 8 * MAX_INT_BYTES - 2
    assert run(pickle.dumps(value, 2)).root == value
    assert type(run(pickle.dumps(value << 8, 2)).root) is Big


@pytest.mark.parametrize("text", [b"L0x%sL\n", b"I0x%s\n"], ids=["LONG", "INT"])
def test_hexadecimal_integer_has_the_same_limit(text: bytes) -> None:
    """Python refuses to print more than 4300 decimal digits, and fewer hexadecimal digits give as many."""
    assert run(text % (b"f" * 2 * MAX_INT_BYTES) + b".").root == (1 << 8 * MAX_INT_BYTES) - 1
    assert type(run(text % (b"f" * 4290) + b".").root) is Big


def test_huge_memo_indexes_are_read() -> None:
    """CVE-2018-20406: the C unpickler allocated an array as large as the index."""
    huge = 2**32 - 1
    result = run(
        b"]r"
        + huge.to_bytes(4, "little")
        + b"p123456789012345678901234567890\nq\x01"
        + b"g%d\n" % huge
        + b"j\x01\x00\x00\x00\x86."
    )
    assert result.broken == ""
    root: Any = result.root
    assert root[0] is root[1]


def put_all(indexes: list[int]) -> bytes:
    return b"N" + b"".join(b"p%d\n" % index for index in indexes) + b"."


def test_memo_indexes_with_colliding_hashes_are_not_slow() -> None:
    """All multiples of 2**61 - 1 have the same hash: a plain dictionary would compare each with all previous ones."""

    def seconds(data: bytes) -> float:
        start = time.process_time()
        assert run(data).broken == ""
        return time.process_time() - start

    prime = (1 << 61) - 1
    colliding = put_all([i * prime for i in range(1, 10_000)])
    ordinary = put_all([i * (prime - 1) for i in range(1, 10_000)])
    assert min(seconds(colliding) for _ in range(2)) < 10 * min(seconds(ordinary) for _ in range(3))


def test_nothing_is_imported_called_or_opened() -> None:
    """An audit hook cannot be removed, so it is installed in a child process."""
    script = """
import sys
import transload.formats.rare_opcodes  # the machine imports it on demand
from transload.formats.pickle_machine import run
data = b"cthis\\ns\\n)R\\x8c\\x0bantigravity\\x8c\\x03fly\\x93)R(iturtle\\nTurtle\\n\\x82\\x01P0\\n."
before = set(sys.modules)
seen = []
sys.addaudithook(lambda event, args: seen.append(event))
result = run(data)
print(len(result.globals), *seen, *set(sys.modules) - before)
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300, env=ENV
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "3\n", "")


def test_persistent_ids_are_listed() -> None:
    result = run(b"Pabc\n(Vstorage\nK\x01tQ\x86.")
    assert [type(node) for node in result.persistent] == [Persistent, Persistent]
    assert [node.id for node in result.persistent] == ["abc", ("storage", 1)]
