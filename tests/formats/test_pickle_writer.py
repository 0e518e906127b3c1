"""Object graphs written as pickles: reading them gives the same graph, and Python and torch load equal objects."""

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

from transload.formats.pickle_machine import run
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Set
from transload.opening import inspect as read

FILES = sorted(
    path
    for path in (Path(__file__).parent.parent / "data").rglob("*")
    if path.suffix in {".pt", ".pth", ".ckpt", ".pkl"}
)


def same(first: object, second: object) -> bool:
    """Whether two graphs have the same values and sharing. Bytes and sets equal the calls that create them."""
    pairs: dict[int, int] = {}
    todo = [(first, second)]
    while todo:
        a, b = todo.pop()
        if type(a) in (bytes, bytearray, Set):
            a = as_call(a)
        if type(b) in (bytes, bytearray, Set):
            b = as_call(b)
        if type(a) is not type(b):
            return False
        if type(a) in (Call, Dict, list, tuple) and a:
            if id(a) in pairs:
                if pairs[id(a)] != id(b):
                    return False
                continue
            pairs[id(a)] = id(b)
            kept_alive.extend((a, b))
        inner = children(a), children(b)
        if inner[0] is None:
            if a != b and not (a != a and b != b):  # noqa: PLR0124 - NaN
                return False
        else:
            if len(inner[0]) != len(inner[1] or ()):
                return False
            todo += zip(inner[0], inner[1] or (), strict=True)
    return True


kept_alive: list[object] = []


def as_call(node: Any) -> Call:
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


def children(node: Any) -> list[Any] | None:
    if type(node) is Call:
        contents = [node.states or [], node.items or [], node.appended or []]
        kind = "obj" if node.kind == "inst" else node.kind
        return [node.callee, node.args, kind, node.kwargs, len(contents[0]), *contents[0], *contents[1], *contents[2]]
    if type(node) is Dict:
        return node.items
    if type(node) in (list, tuple):
        return list(node)
    fields = SIMPLE.get(type(node))
    return None if fields is None else [getattr(node, field) for field in fields]


@each("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pickles_of_all_fixtures_survive_a_rewrite(path: Path) -> None:
    for stream in read(path).pickles:
        result = run(dumps(stream.root))
        assert not result.broken
        assert not result.ambiguous
        assert same(stream.root, result.root)
        assert same(result.root, run(dumps(result.root)).root)


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
def test_python_loads_the_same_value(value: Any, protocol: int) -> None:
    written = dumps(run(pickle.dumps(value, protocol)).root)
    assert pickle.loads(written) == value
    assert same(run(written).root, run(dumps(run(written).root)).root)


class Node:
    def __init__(self) -> None:
        self.other: Any = None


def test_shared_objects_stay_shared() -> None:
    inner: list[Any] = []
    text = "shared text"
    loaded = pickle.loads(dumps([inner, inner, (inner,), text, text]))
    assert loaded[0] is loaded[1] is loaded[2][0]
    assert loaded[3] is loaded[4]


def test_cycles_stay_cycles() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    table = Dict(["self", cyclic])
    table.items += ["table", table]
    loaded = pickle.loads(dumps(table))
    assert loaded["self"][0] is loaded["self"]
    assert loaded["table"] is loaded


@pytest.mark.parametrize("length", [1, 3, 4])
def test_tuple_that_contains_itself_is_written(length: int) -> None:
    inner: list[Any] = []
    outer = (inner, *range(length - 1))
    inner += [outer, outer]
    loaded = pickle.loads(dumps([outer]))[0]
    assert loaded[0][0] is loaded
    assert loaded[0][1] is loaded


@each("protocol", range(6))
def test_object_that_contains_itself_is_written(protocol: int) -> None:
    node = Node()
    node.other = (node, [node])
    written = dumps(run(pickle.dumps(node, protocol)).root)
    loaded = pickle.loads(written)
    assert loaded.other[0] is loaded
    assert loaded.other[1][0] is loaded


def test_call_whose_arguments_contain_it_is_written() -> None:
    arguments: list[Any] = []
    call = Call(Global("collections", "deque", 0), (arguments,), "reduce", 0)
    call.appended = [5]
    arguments += [call, 7]
    assert same(call, run(dumps(call)).root)
    assert run(dumps([call, call])).broken == ""


def test_tuple_in_5000_cycles_is_refused() -> None:
    lists: list[list[Any]] = [[] for _ in range(5000)]
    cyclic = tuple(lists)
    for item in lists:
        item.append(cyclic)
    with pytest.raises(CannotPickleGraphError, match="contains itself"):
        dumps(cyclic)


def test_deeply_nested_tuples_are_written() -> None:
    deep: Any = ()
    for _ in range(50_000):
        deep = (deep, 1)
    node: Any = run(dumps(deep)).root
    depth = 0
    while node:
        node, depth = node[0], depth + 1
    assert depth == 50_000


STREAMS = [
    pytest.param(b"\x80\x02\x82\x05.", id="ext1"),
    pytest.param(b"\x80\x02\x83\x05\x06.", id="ext2"),
    pytest.param(b"\x80\x02\x84\x05\x06\x07\x08.", id="ext4"),
    pytest.param(b"\x80\x05\x97.", id="next buffer"),
    pytest.param(b"(K\x01icollections\nOrderedDict\n.", id="inst"),
    pytest.param(b"(ccollections\nOrderedDict\nK\x01o.", id="obj"),
    pytest.param(b"ccollections\nOrderedDict\n)}\x92.", id="newobj_ex"),
    pytest.param(b"ccollections\nOrderedDict\n)\x81Nb}b.", id="two states"),
    pytest.param(b"cos\nsep\ncos\nsep\n\x93.", id="computed name"),
    pytest.param(b"X\x02\x00\x00\x00a\nX\x01\x00\x00\x00b\x93.", id="name with a newline"),
    pytest.param(b"X\x03\x00\x00\x00\xed\xa0\x80X\x01\x00\x00\x00b\x93.", id="name with a lone surrogate"),
    pytest.param(b"P17\n.", id="persid"),
    pytest.param(b"X\x01\x00\x00\x00aQ.", id="binpersid"),
    pytest.param(b"U\x02\xff\xfe.", id="python 2"),
    pytest.param(pickle.dumps([1 << 2030, -1 << 2039, -129, 255, 256, 65535, 65536, -1, 1 << 31, -1 << 31]), id="ints"),
]


@each("stream", STREAMS)
def test_every_kind_of_node_survives_a_rewrite(stream: bytes) -> None:
    root = run(stream).root
    assert same(root, run(dumps(root)).root)


def test_protocol_is_written_to_the_stream() -> None:
    assert dumps(None, 4) == b"\x80\x04N."
    assert run(dumps(None)).protocol == 2


@pytest.mark.parametrize("node", [Big(2000), object(), {}, 1j], ids=["big", "object", "dict", "complex"])
def test_unsupported_nodes_are_refused(node: object) -> None:
    with pytest.raises(CannotPickleGraphError):
        dumps([node])


def test_large_memo_uses_wide_indexes() -> None:
    words = [f"w{number}" for number in range(70_000)]
    loaded = pickle.loads(dumps([words, words[0], words[300], words[69_999]]))
    assert loaded == [words, words[0], words[300], words[69_999]]
    assert loaded[0][300] is loaded[2]


def test_many_lists_need_no_recursion() -> None:
    assert sys.getrecursionlimit() < 5000
    assert run(dumps([[] for _ in range(20_000)])).broken == ""


def rewritten(path: Path) -> io.BytesIO:
    """The archive with its pickle rewritten by ``dumps``."""
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
def test_torch_loads_equal_objects_after_a_rewrite(path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights_only = not path.name.startswith(("whole", "zoo", "train"))
    if path.name.startswith("whole_custom"):
        pytest.skip("its class is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = torch.load(path, map_location="cpu", weights_only=weights_only)
        except Exception as error:  # noqa: BLE001 - this torch cannot load the file at all
            pytest.skip(f"torch itself: {type(error).__name__}")
        actual = torch.load(rewritten(path), map_location="cpu", weights_only=weights_only)
    buffers = io.BytesIO(), io.BytesIO()
    torch.save(expected, buffers[0])
    torch.save(actual, buffers[1])
    assert buffers[0].getvalue() == buffers[1].getvalue()
