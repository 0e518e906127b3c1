"""Graphs written back: read again they are the same, and Python and torch make the same objects of them."""

from __future__ import annotations

import collections
import io
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.formats import read
from transload.formats.pickle_machine import run
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Set

FILES = sorted(
    path
    for path in (Path(__file__).parent.parent / "data").rglob("*")
    if path.suffix in {".pt", ".pth", ".ckpt", ".pkl"}
)


def same(first: object, second: object) -> bool:
    """Whether two graphs are the same: the same values, shared alike. Written and read calls for bytes are bytes."""
    pairs: dict[int, int] = {}
    todo = [(first, second)]
    while todo:
        a, b = todo.pop()
        if type(a) in (bytes, bytearray, Set):
            a = called(a)
        if type(b) in (bytes, bytearray, Set):
            b = called(b)
        if type(a) is not type(b):
            return False
        if type(a) in (Call, Dict, list, tuple) and a:
            if id(a) in pairs:
                if pairs[id(a)] != id(b):
                    return False
                continue
            pairs[id(a)] = id(b)
            keep.extend((a, b))
        inside = parts(a), parts(b)
        if inside[0] is None:
            if a != b and not (a != a and b != b):  # noqa: PLR0124 - not a number
                return False
        else:
            if len(inside[0]) != len(inside[1] or ()):
                return False
            todo += zip(inside[0], inside[1] or (), strict=True)
    return True


keep: list[object] = []


def called(node: Any) -> Call:
    if type(node) is bytes:
        return Call(Global("_codecs", "encode", 0), (node.decode("latin-1"), "latin1"), "reduce", 0)
    if type(node) is bytearray:
        return Call(Global("builtins", "bytearray", 0), (bytes(node),), "reduce", 0)
    return Call(Global("builtins", "frozenset" if node.frozen else "set", 0), (node.items,), "reduce", 0)


SIMPLE: dict[type, tuple[str, ...]] = {
    Persistent: ("id",),
    Global: ("module", "name"),
    Extension: ("code",),
    OutOfBand: (),
}


def parts(node: Any) -> list[Any] | None:
    if type(node) is Call:
        filled = [node.states or [], node.items or [], node.appended or []]
        kind = "obj" if node.kind == "inst" else node.kind
        return [node.callee, node.args, kind, node.kwargs, len(filled[0]), *filled[0], *filled[1], *filled[2]]
    if type(node) is Dict:
        return node.items
    if type(node) in (list, tuple):
        return list(node)
    fields = SIMPLE.get(type(node))
    return None if fields is None else [getattr(node, field) for field in fields]


@each("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_pickle_of_every_file_comes_back(path: Path) -> None:
    for stream in read(path).pickles:
        again = run(dumps(stream.root))
        assert not again.broken
        assert not again.ambiguous
        assert same(stream.root, again.root)
        assert same(again.root, run(dumps(again.root)).root)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
        | st.complex_numbers(allow_nan=False)
        | st.builds(collections.OrderedDict, st.lists(st.tuples(st.text(), inner)))
        | st.binary().map(bytearray)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 5))
def test_python_makes_the_same_of_it(value: Any, protocol: int) -> None:
    written = dumps(run(pickle.dumps(value, protocol)).root)
    assert pickle.loads(written) == value
    assert same(run(written).root, run(dumps(run(written).root)).root)


class Node:
    def __init__(self) -> None:
        self.other: Any = None


def test_what_is_shared_stays_shared() -> None:
    inner: list[Any] = []
    text = "shared text"
    made = pickle.loads(dumps([inner, inner, (inner,), text, text]))
    assert made[0] is made[1] is made[2][0]
    assert made[3] is made[4]


def test_cycles_stay_cycles() -> None:
    held: list[Any] = []
    held.append(held)
    table = Dict(["self", held])
    table.items += ["table", table]
    made = pickle.loads(dumps(table))
    assert made["self"][0] is made["self"]
    assert made["table"] is made


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_tuple_that_holds_itself(length: int) -> None:
    inner: list[Any] = []
    outer = (inner, *range(length - 1))
    inner += [outer, outer]
    made = pickle.loads(dumps([outer]))[0]
    assert made[0][0] is made
    assert made[0][1] is made


@each("protocol", range(6))
def test_an_object_that_holds_itself(protocol: int) -> None:
    node = Node()
    node.other = (node, [node])
    written = dumps(run(pickle.dumps(node, protocol)).root)
    made = pickle.loads(written)
    assert made.other[0] is made
    assert made.other[1][0] is made


def test_a_call_that_is_given_what_holds_it() -> None:
    given_list: list[Any] = []
    call = Call(Global("collections", "deque", 0), (given_list,), "reduce", 0)
    call.appended = [5]
    given_list += [call, 7]
    assert same(call, run(dumps(call)).root)
    assert run(dumps([call, call])).broken == ""


def test_tangles_end() -> None:
    lists: list[list[Any]] = [[] for _ in range(5000)]
    knot = tuple(lists)
    for one in lists:
        one.append(knot)
    with pytest.raises(CannotPickleGraphError, match="contains itself"):
        dumps(knot)


def test_depth_is_no_matter() -> None:
    deep: Any = ()
    for _ in range(50_000):
        deep = (deep, 1)
    again: Any = run(dumps(deep)).root
    depth = 0
    while again:
        again, depth = again[0], depth + 1
    assert depth == 50_000


KINDS = [
    pytest.param(b"\x80\x02\x82\x05.", id="ext1"),
    pytest.param(b"\x80\x02\x83\x05\x06.", id="ext2"),
    pytest.param(b"\x80\x02\x84\x05\x06\x07\x08.", id="ext4"),
    pytest.param(b"\x80\x05\x97.", id="next buffer"),
    pytest.param(b"(K\x01icollections\nOrderedDict\n.", id="inst"),
    pytest.param(b"(ccollections\nOrderedDict\nK\x01o.", id="obj"),
    pytest.param(b"ccollections\nOrderedDict\n)}\x92.", id="newobj_ex"),
    pytest.param(b"ccollections\nOrderedDict\n)\x81Nb}b.", id="two states"),
    pytest.param(b"cos\nsep\ncos\nsep\n\x93.", id="computed name"),
    pytest.param(b"X\x02\x00\x00\x00a\nX\x01\x00\x00\x00b\x93.", id="a name with a line end"),
    pytest.param(b"X\x03\x00\x00\x00\xed\xa0\x80X\x01\x00\x00\x00b\x93.", id="a name with half a letter"),
    pytest.param(b"P17\n.", id="persid"),
    pytest.param(b"X\x01\x00\x00\x00aQ.", id="binpersid"),
    pytest.param(b"U\x02\xff\xfe.", id="python 2"),
    pytest.param(pickle.dumps([1 << 2030, -1 << 2039, -129, 255, 256, 65535, 65536, -1, 1 << 31, -1 << 31]), id="ints"),
]


@each("stream", KINDS)
def test_every_kind_of_node(stream: bytes) -> None:
    root = run(stream).root
    assert same(root, run(dumps(root)).root)


def test_the_protocol_is_what_the_stream_says_of_itself() -> None:
    assert dumps(None, 4) == b"\x80\x04N."
    assert run(dumps(None)).protocol == 2


@pytest.mark.parametrize("node", [Big(2000), object(), {}, 1j], ids=["big", "object", "dict", "complex"])
def test_what_cannot_be_written_is_told(node: object) -> None:
    with pytest.raises(CannotPickleGraphError):
        dumps([node])


def test_the_longest_memo_has_wide_indexes() -> None:
    words = [f"w{number}" for number in range(70_000)]
    made = pickle.loads(dumps([words, words[0], words[300], words[69_999]]))
    assert made == [words, words[0], words[300], words[69_999]]
    assert made[0][300] is made[2]


def test_a_million_of_anything_takes_no_recursion() -> None:
    assert sys.getrecursionlimit() < 5000
    assert run(dumps([[] for _ in range(20_000)])).broken == ""


def rewritten(path: Path) -> io.BytesIO:
    """The archive with its pickle written anew."""
    out = io.BytesIO()
    root = read(path).root
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info.filename, dumps(root) if info.filename.endswith("/data.pkl") else content)
    out.seek(0)
    return out


ZIPS = [path for path in FILES if zipfile.is_zipfile(path) and "traced" not in path.name and "script" not in path.name]


@each("path", ZIPS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_torch_loads_equal_objects(path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights_only = not path.name.startswith(("whole", "zoo", "train"))
    if path.name.startswith("whole_custom"):
        pytest.skip("its class is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = torch.load(path, map_location="cpu", weights_only=weights_only)
        except Exception as error:  # noqa: BLE001 - what this torch cannot load at all
            pytest.skip(f"torch itself: {type(error).__name__}")
        made = torch.load(rewritten(path), map_location="cpu", weights_only=weights_only)
    held = io.BytesIO(), io.BytesIO()
    torch.save(expected, held[0])
    torch.save(made, held[1])
    assert held[0].getvalue() == held[1].getvalue()
