"""The pickle machine gives what ``pickle`` would have made, as inert nodes, and no stream can hurt it.

That it misses no name a loader would ask for is in ``test_pickle_machine_soundness.py``. Ids such as P5 and CVE numbers
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

# What these make is data; anything else in a test is a mistake of the test.
REAL: dict[str, Callable[..., Any]] = {
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
    """Turns nodes back into the objects they describe."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}

    def __call__(self, node: Any) -> Any:
        if id(node) not in self.made:
            self.made[id(node)] = self._made(node)
        return self.made[id(node)]

    def _made(self, node: Any) -> Any:
        if type(node) is list:
            out: list[Any] = []
            self.made[id(node)] = out
            out += map(self, node)
            return out
        if type(node) is Dict:
            return self._filled(node, {}, node.items)
        if type(node) is Set:
            return (frozenset if node.frozen else set)(map(self, node.items))
        if type(node) is tuple:
            return tuple(map(self, node))
        if type(node) is Call:
            assert type(node.callee) is Global
            made = REAL[node.callee.full_name](*map(self, node.args))  # type: ignore[call-overload]
            made.extend(map(self, node.appended)) if node.appended else None
            return self._filled(node, made, node.items or [])
        return node

    def _filled(self, node: object, made: Any, items: list[Any]) -> Any:
        self.made[id(node)] = made
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[self(key)] = self(value)
        return made


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
def test_data_comes_out_as_it_went_in(value: object, protocol: int, dumps: Callable[[object, int], bytes]) -> None:
    data = dumps(value, protocol)
    found = run(data)
    assert (found.broken, found.irregular, found.ambiguous, found.end) == ("", [], [], len(data))
    assert Rebuilder()(found.root) == pickle.loads(data) == value


@each("protocol", PROTOCOLS)
def test_zeros_infinities_and_nan_keep_their_bits(protocol: int) -> None:
    root = run(pickle.dumps([0.0, -0.0, math.inf, -math.inf, math.nan, True, 1], protocol)).root
    assert repr(root) == "[0.0, -0.0, inf, -inf, nan, True, 1]"


@each("protocol", PROTOCOLS)
def test_sharing_and_cycles_are_kept(protocol: int) -> None:
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
def test_a_tuple_that_contains_itself(protocol: int) -> None:
    inner: list[Any] = []
    value = (inner,)
    inner.append(value)
    root: Any = run(pickle.dumps(value, protocol)).root
    assert root[0][0] is root


def test_the_machine_facts_written_by_python_2(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-1.0.0-py2.7.18" / "train_cuda0.ckpt").read_bytes()
    file = io.BytesIO(raw)
    pickles = run_all(raw)
    for index in range(3):
        assert Rebuilder()(pickles[index].root) == pickle.load(file)
        assert pickles[index].end == file.tell()
    assert pickles[2].python2


def test_text_of_python_2_is_text_where_it_can_be() -> None:
    found = run(b"(S'caf\\xc3\\xa9'\nU\x01aT\x01\x00\x00\x00\xfft.")
    assert found.root == ("café", "a", b"\xff")
    assert found.python2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"value": self.value}

    def __new__(cls, value: int = 0) -> Self:  # noqa: ARG004 - what __getnewargs_ex__ is for
        return object.__new__(cls)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_are_calls_with_their_state(protocol: int) -> None:
    root = run(pickle.dumps(Slotted(7), protocol)).root
    assert type(root) is Call
    assert root.kind == ("reduce" if protocol == 2 else "newobj_ex")
    assert root.states is not None
    assert type(root.states[0]) is tuple
    assert root.states[0][1].pairs() == [("value", 7)]


def test_a_buffer_outside_the_stream_is_named_as_such() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pickle.PickleBuffer(b"x"), 5, buffer_callback=buffers.append)
    assert type(run(data).root) is OutOfBand
    assert run(data).irregular


@pytest.mark.parametrize("kind", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"], ids=["EXT1", "EXT2", "EXT4"])
def test_p9_an_extension_is_a_name_that_is_not_in_the_file(kind: bytes) -> None:
    found = run(kind + b")R.")
    assert type(found.root) is Call
    assert type(found.root.callee) is Extension
    assert [extension.code for extension in found.extensions] == [1]


# -- calls are events --------------------------------------------------------------------------------------------------

CALLS = {
    "reduce": b"cos\ngetcwd\n)R",
    "newobj": b"cos\ngetcwd\n)\x81",
    "newobj_ex": b"cos\ngetcwd\n)}\x92",
    "obj": b"(cos\ngetcwd\no",
    "inst": b"(ios\ngetcwd\n",
}


@each("kind", CALLS)
@each("after", [b".", b"0N.", b"", b"\xff", b"0."], ids=["kept", "popped", "no STOP", "broken", "underflow"])
def test_p3_p5_p10_a_call_counts_in_every_form_whatever_comes_after_it(kind: str, after: bytes) -> None:
    """GHSA-mxhj-88fx-4pcv: the result is popped. GHSA-9gvj-pp9x-gcfr: the stream breaks after the call."""
    found = run(CALLS[kind] + after)
    assert [(call.kind, repr(call.callee)) for call in found.calls] == [(kind, "Global(os.getcwd)")]
    assert bool(found.broken) == (after not in (b".", b"0N."))


def test_p1_the_memo_is_a_memo() -> None:
    """picklescan#14: a name that was PUT, not the one that stands before STACK_GLOBAL."""
    decoy = b"\x8c\x0bcollections\x8c\x0bOrderedDict"
    found = run(b"\x8c\x02os\x94\x8c\x06getcwd\x94" + decoy + b"00h\x00h\x01\x93)R.")
    assert list(found.globals) == [("os", "getcwd")]


def test_p1_memoize_counts_what_is_there_and_put_may_have_numbered_otherwise() -> None:
    found = run(b"\x8c\x02osr\x01\x00\x00\x00\x8c\x06getcwd\x94h\x01\x8c\x06getcwd\x93.")
    assert list(found.globals) == [("getcwd", "getcwd")]


@each("operand", [b"K\x01", b"C\x02os", b"\x96\x02\x00\x00\x00\x00\x00\x00\x00os", b"N", b")"])
def test_p2_an_operand_that_is_no_text_breaks_the_stream_and_findings_stay(operand: bytes) -> None:
    """picklescan#52, modelscan#338."""
    found = run(CALLS["reduce"] + operand + b"\x8c\x01x\x93.")
    assert found.broken.startswith("STACK_GLOBAL needs two texts")
    assert list(found.globals) == [("os", "getcwd")]


@each("operand", [b"cstring\nhexdigits\n", b"cbuiltins\nstr\n)R", b"NQ", b"U\x01\xff", b"\x82\x01"])
def test_p2_an_operand_that_may_turn_out_to_be_text_does_not_hide_what_follows(operand: bytes) -> None:
    found = run(operand + b"\x8c\x01x\x93" + CALLS["reduce"] + b".")
    assert ("os", "getcwd") in found.globals
    assert [call.kind for call in found.calls][-2:] == ["stack_global", "reduce"]
    assert found.irregular


def test_p2_a_missing_memo_entry_breaks_the_stream_and_findings_stay() -> None:
    found = run(CALLS["reduce"] + b"h\x07.")
    assert found.broken == "it reads memo entry 7, which was never written, at byte 14"
    assert len(found.calls) == 1


def test_p4_every_pickle_of_a_stream_is_read() -> None:
    found = run_all(b"N." * 3 + CALLS["reduce"] + b".")
    assert [list(pickle.globals) for pickle in found] == [[], [], [], [("os", "getcwd")]]


def test_p4_no_number_of_pickles_hides_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.formats.pickle_streams.MAX_KEPT", 10)
    found = run_all(b"N." * 50 + CALLS["reduce"] + b"." + CALLS["inst"] + b".\xff")
    assert len(found) == 10
    assert list(found[-1].globals) == [("os", "getcwd")]
    assert [call.kind for call in found[-1].calls] == ["reduce", "inst"]
    assert found[-1].broken.startswith("byte 0xff is not a pickle opcode")


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
def test_p6_frames_that_loaders_read_differently_are_ambiguous(case: str) -> None:
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
def test_p6_frames_as_they_are_written_are_not(data: bytes) -> None:
    found = run(data)
    assert (found.broken, found.ambiguous, found.irregular) == ("", [], [])


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
def test_p7_numbers_are_read_as_any_loader_reads_them(text: bytes) -> None:
    """python/cpython#126992, #135241."""
    assert run(text + b".").root == NUMBERS[text]
    assert type(run(text + b".").root) is type(NUMBERS[text])


@pytest.mark.parametrize("data", [b"NN.", b"(N.", b"NN(N."], ids=["an item", "a MARK", "both"])
def test_p7_what_is_left_at_stop_is_noted(data: bytes) -> None:
    """python/cpython#127079."""
    found = run(data)
    assert found.broken == ""
    assert found.irregular == [(len(data), "values are left on the stack at STOP")]


@pytest.mark.parametrize("data", [b"T\xff\xff\xff\xffx", b"\x8b\xff\xff\xff\xffx"], ids=["BINSTRING", "LONG4"])
def test_p7_a_negative_length_breaks_the_stream(data: bytes) -> None:
    """python/cpython#135321."""
    found = run(data)
    assert found.broken.startswith("a length of -1 bytes")
    assert not found.cut


def test_p8_a_byte_that_is_no_opcode_breaks_the_stream() -> None:
    known = {code for code in range(256) if not run(bytes([code])).broken.startswith("byte 0x")}
    assert len(known) == 68


@each(
    "put",
    [b"K\x00Ns", b"(K\x00Nu", b"Na", b"(Ne", b"(N\x90"],
    ids=["SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS"],
)
def test_p13_items_put_into_a_global_are_a_change_of_it(put: bytes) -> None:
    """Kin of CVE-2026-24747 and of BUILD on a global: ``some.module.TABLE[key] = value``."""
    found = run(b"cm\nTABLE\n" + put + b".")
    assert [repr(target) for target, _ in found.built] == ["Global(m.TABLE)"]


@each("put", [b"K\x00Ns", b"(K\x00Nu"], ids=["SETITEM", "SETITEMS"])
@each("target", [b"]", b")", b"K\x01", b"\x8f", b"NQ"], ids=["list", "tuple", "int", "set", "persistent"])
def test_p13_items_put_into_what_is_no_dictionary_are_noted(target: bytes, put: bytes) -> None:
    """CVE-2026-24747: torch up to 2.9.1 set items on tensors."""
    assert run(target + put + b".").irregular


UNHASHABLE = [b"]", b"}", b"\x8f", b"]\x85", b"]\x85N\x86", b"\x96" + bytes(8), b"ccollections\nOrderedDict\n)R"]


@each("key", UNHASHABLE)
def test_keys_that_no_loader_can_use_are_noted(key: bytes) -> None:
    assert run(b"}" + key + b"Ns.").irregular
    assert run(b"}(" + key + b"Nu.").irregular
    assert run(b"(" + key + b"Nd.").irregular


@each("key", [b"N", b")", b"(\x91", b"(\x91\x85", b"cm\nn\n", b"cm\nn\n)R", b"K\x01\x85", b"C\x00"])
def test_keys_that_loaders_can_use_are_not(key: bytes) -> None:
    assert run(b"}" + key + b"Ns.").irregular == []


@pytest.mark.parametrize("escape", [rb"'\q\8'", rb"'\x6fs\157\\\'\n\t\a'", rb"'\777'"])
def test_escapes_are_those_of_python_2(escape: bytes, recwarn: pytest.WarningsRecorder) -> None:
    import codecs

    mine = run(b"S" + escape + b"\n.").root
    assert len(recwarn) == 0
    theirs = codecs.escape_decode(escape[1:-1])[0]
    assert mine == (theirs.decode() if theirs.isascii() else theirs)


@each("text", [b"'\\x6'", b"'\\'", b"'", b"'a", b"a", b"'a'b"])
def test_a_text_with_broken_quotes_or_escapes_breaks_the_stream(text: bytes) -> None:
    assert run(b"S" + text + b"\n.").broken.startswith("a text with")


def test_positions_and_codes_of_opcodes() -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps({"a": [1, 2.5, "x" * 300, b"y", {3}], "b": OSError}, protocol)
        import pickletools

        theirs = [(position, ord(opcode.code)) for opcode, _, position in pickletools.genops(data)]
        assert list(opcodes(data)) == theirs


# -- no stream can hurt it ---------------------------------------------------------------------------------------------


@settings(max_examples=300 * FUZZ, derandomize=FUZZ == 1)
@given(
    st.one_of(st.binary(), st.lists(st.sampled_from([bytes([code]) for code in range(256)]), max_size=60).map(b"".join))
)
def test_any_bytes_are_read_to_an_end(data: bytes) -> None:
    found = run_all(data)
    assert all(pickle.start < pickle.end <= len(data) for pickle in found)
    assert not data or found[-1].broken or found[-1].end == len(data)


def test_a_checkpoint_cut_anywhere_says_that_it_is_cut(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-2.13.0-py3.11.7" / "whole_custom_cuda0.pt").read_bytes()
    start = raw.index(b"\x80\x02c__main__")
    whole = raw[start : start + run(raw, start).end - start]
    for cut in range(len(whole)):
        found = run(whole[:cut])
        assert found.cut, cut
        assert found.broken, cut


ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
N = 10_000
NAME = b"cm\nn\nq\x00"
STORMS: dict[str, Callable[[int], bytes]] = {
    "nested tuples": lambda n: b"N" + b"\x85" * n + b".",
    "nested lists": lambda n: b"]" * n + b"a" * (n - 1) + b".",
    "nested dictionaries": lambda n: b"}N" * n + b"N" + b"s" * n + b".",
    "nested frozen sets": lambda n: b"(" * n + b"N" + b"\x91" * n + b".",
    "marks": lambda n: b"(" * n,
    "calls of calls": lambda n: NAME + b")R" * n + b".",
    "calls with calls": lambda n: NAME + b"h\x00" * n + b")" + b"\x85R" * n + b".",
    "states with states": lambda n: NAME + b")R" + b"h\x00)R" * n + b"b" * n + b".",
    "keywords with keywords": lambda n: NAME + b"h\x00)" * n + b"N" + b"\x92" * n + b".",
    "ids of ids": lambda n: b"N" + b"Q" * n + b".",
    "DUP": lambda n: b"]" + b"2" * n + b"(" + b"2" * 0 + b"t.",
    "DUP and APPEND": lambda n: b"]" + b"2a" * n + b".",
    "GET": lambda n: b"Nq\x00" + b"h\x00" * n + b".",
    "MEMOIZE": lambda n: b"N" + b"\x94" * n + b".",
    "PUT far apart": lambda n: (
        b"N" + b"".join(b"r" + (i * 4001 % 2**32).to_bytes(4, "little") for i in range(n)) + b"."
    ),
    "names": lambda n: b"".join(b"cm\nn%d\n" % i for i in range(n)) + b".",
    "one name": lambda n: b"cm\nn\n" * n + b".",
    "extensions": lambda n: b"\x82\x01" * n + b".",
    "frames": lambda n: (b"\x95" + b"\xff" * 8) * n + b"N.",
    "frames of nothing": lambda n: (b"\x95" + bytes(8)) * n + b"N.",
    "oddities": lambda n: b"N" * n + b"(" * 0 + b"Na" * 0 + b"K\x01" + b"Na" * n + b".",
    "keys that cannot be hashed": lambda n: b"}(" + b"]N" * n + b"u.",
    "pickles": lambda n: b"N." * n,
    "shared pairs": lambda n: b"N" + b"2\x86" * n + b".",
    "texts": lambda n: b"U\x01a" * n + b".",
}


def count_instructions(work: Callable[[], object]) -> int:
    """Bytecode instructions, which unlike seconds are the same on every machine."""
    count = 0

    def call(frame: FrameType, *_: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return instruction

    def instruction(*_: object) -> Any:
        nonlocal count
        count += 1  # a return counts, too
        return instruction

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("storm", STORMS)
def test_work_grows_with_the_stream_and_no_faster(storm: str) -> None:
    small, large = STORMS[storm](N // 50), STORMS[storm](N // 5)
    ratio = len(large) / len(small)
    assert count_instructions(lambda: run_all(large)) <= 1.2 * ratio * count_instructions(lambda: run_all(small))


@pytest.mark.parametrize("storm", STORMS)
def test_memory_grows_with_the_stream_and_no_faster(storm: str) -> None:
    data = STORMS[storm](N)
    tracemalloc.start()
    try:
        found = run_all(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The dearest byte makes a node with its list: a dictionary, a call, a MARK. Pickles come at two bytes each.
    assert peak < (1 << 20) + 260 * len(data)
    assert found


NESTINGS = ["nested tuples", "nested lists", "nested dictionaries", "calls of calls", "calls with calls", "ids of ids"]


@pytest.mark.parametrize("storm", [*NESTINGS, "states with states"])
def test_two_hundred_thousand_levels_come_and_go(storm: str) -> None:
    """Freeing what is nested must not recurse: a stack that overflows there takes the interpreter down."""
    script = """
import gc, sys
from transload.formats.pickle_machine import run
gc.disable()
found = run(sys.stdin.buffer.read())
gc.collect()
root = found.root
found.calls.clear()  # so that only the nesting itself holds the nodes
found.persistent.clear()
del found
del root
print("done")
"""
    stream = STORMS[storm](200_000)
    done = subprocess.run(
        [sys.executable, "-c", script], input=stream, capture_output=True, check=False, timeout=300, env=ENV
    )
    assert (done.returncode, done.stdout) == (0, b"done\n"), done.stderr


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
def test_a_length_is_not_believed(opcode: str) -> None:
    tracemalloc.start()
    try:
        found = run(LENGTHS[opcode])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.broken
    assert found.cut
    assert peak < 1 << 16


@pytest.mark.parametrize(
    "data",
    [b"\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20), b"I" + b"7" * (1 << 20) + b"\n", b"L" + b"7" * (1 << 20) + b"L\n"],
    ids=["LONG4", "INT", "LONG"],
)
def test_a_megabyte_of_integer_is_not_computed(data: bytes) -> None:
    root = run(data + b".").root
    assert type(root) is Big
    assert root.nbytes == 1 << 20


def test_an_integer_is_computed_up_to_the_limit() -> None:
    value = 1 << 8 * MAX_INT_BYTES - 2
    assert run(pickle.dumps(value, 2)).root == value
    assert type(run(pickle.dumps(value << 8, 2)).root) is Big


@pytest.mark.parametrize("text", [b"L0x%sL\n", b"I0x%s\n"], ids=["LONG", "INT"])
def test_an_integer_in_hexadecimal_has_the_same_limit(text: bytes) -> None:
    """It has fewer digits than the number that is printed, and Python refuses to print one of over 4300."""
    assert run(text % (b"f" * 2 * MAX_INT_BYTES) + b".").root == (1 << 8 * MAX_INT_BYTES) - 1
    assert type(run(text % (b"f" * 4290) + b".").root) is Big


def test_memo_indexes_may_be_anything() -> None:
    """CVE-2018-20406: the C unpickler made its array as large as the index."""
    far = 2**32 - 1
    found = run(
        b"]r"
        + far.to_bytes(4, "little")
        + b"p123456789012345678901234567890\nq\x01"
        + b"g%d\n" % far
        + b"j\x01\x00\x00\x00\x86."
    )
    assert found.broken == ""
    root: Any = found.root
    assert root[0] is root[1]


def put_all(indexes: list[int]) -> bytes:
    return b"N" + b"".join(b"p%d\n" % index for index in indexes) + b"."


def test_memo_indexes_that_collide_cost_no_more_than_others() -> None:
    """All multiples of 2**61 - 1 have the same hash: a plain dictionary would compare each with all before it."""

    def seconds(data: bytes) -> float:
        start = time.process_time()
        assert run(data).broken == ""
        return time.process_time() - start

    prime = (1 << 61) - 1
    colliding = put_all([i * prime for i in range(1, 10_000)])
    ordinary = put_all([i * (prime - 1) for i in range(1, 10_000)])
    assert min(seconds(colliding) for _ in range(2)) < 10 * min(seconds(ordinary) for _ in range(3))


def test_nothing_is_imported_called_or_opened() -> None:
    """An audit hook cannot be removed, so a child process gets it."""
    script = """
import sys
import transload.formats.rare_opcodes  # which the machine imports when it meets one
from transload.formats.pickle_machine import run
data = b"cthis\\ns\\n)R\\x8c\\x0bantigravity\\x8c\\x03fly\\x93)R(iturtle\\nTurtle\\n\\x82\\x01P0\\n."
before = set(sys.modules)
seen = []
sys.addaudithook(lambda event, args: seen.append(event))
found = run(data)
print(len(found.globals), *seen, *set(sys.modules) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300, env=ENV
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_persistent_ids_are_kept_as_they_are() -> None:
    found = run(b"Pabc\n(Vstorage\nK\x01tQ\x86.")
    assert [type(node) for node in found.persistent] == [Persistent, Persistent]
    assert [node.id for node in found.persistent] == ["abc", ("storage", 1)]
