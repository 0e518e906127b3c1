"""Retagged pickles: loaders read the new tags, and nothing else differs."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.retagging.makers import fresh

from transload.formats.pickle_machine import run
from transload.retagging import OTHERS, TagMap
from transload.retagging.tags import find_sites, same_but_tags, spliced, tag_edits


class FakeStorage:
    """Stands for a storage: pickled by its persistent id."""

    def __init__(self, tag: str, key: str = "0", numel: int = 4, view: object = None, fields: int = 5) -> None:
        self.pid: tuple[Any, ...] = ("storage", dict, key, tag, numel, view)[:fields]


class Writer(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, FakeStorage) else None


class Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid


def pickle_of(obj: object, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    Writer(out, protocol).dump(obj)
    return out.getvalue()


def load(data: bytes) -> Any:
    return Reader(io.BytesIO(data)).load()


def retagged(data: bytes, tag_map: TagMap) -> tuple[str, bytes]:
    """The method and the new pickle, checked as ``plan_of`` checks it."""
    pickled = run(data)
    edits = tag_edits(pickled, data, tag_map.new)
    assert edits is not None
    method = "rewrite" if any(edit.grown for edit in edits) else "patch"
    new = spliced(data, edits)
    assert same_but_tags(pickled, run(new), tag_map.new)
    return method, new


def expected(obj: Any, tag_map: TagMap) -> Any:
    """What a loader must return."""
    if isinstance(obj, FakeStorage):
        return (*obj.pid[:3], tag_map.new(obj.pid[3]), *obj.pid[4:])
    if isinstance(obj, list):
        return [expected(item, tag_map) for item in obj]
    if isinstance(obj, dict):
        return {key: expected(item, tag_map) for key, item in obj.items()}
    return obj


NUMELS = (0, 7, 255, 256, 65_535, 65_536, 1 << 31, 1 << 40)
each_protocol = each("protocol", [2, 3, 4, 5])


@each_protocol
@each("numel", NUMELS)
@each("before", [0, 300], ids=["short memo", "long memo"])
@each("fields", [5, 6], ids=["zip", "legacy"])
def test_cuda_to_cpu_keeps_the_length(protocol: int, numel: int, before: int, fields: int) -> None:
    """The common case always fits in place, whatever numbers surround the tag."""
    view = (fresh("v"), 0, 4) if numel == 7 else None
    storages = [FakeStorage(fresh("cuda:0"), str(key), numel, view, fields) for key in range(3)]
    obj = [[f"text {i}" for i in range(before)], *storages]
    data = pickle_of(obj, protocol)
    method, new = retagged(data, TagMap("cpu"))
    assert (method, len(new)) == ("patch", len(data))
    assert load(new) == expected(obj, TagMap("cpu"))


@each_protocol
def test_retagging_back_restores_the_bytes(protocol: int) -> None:
    data = pickle_of([FakeStorage(fresh("cuda:0"), str(key), 12) for key in range(40)], protocol)
    _, new = retagged(data, TagMap("cpu"))
    assert new != data
    assert retagged(new, TagMap("cuda:0")) == ("patch", data)


@each_protocol
@each("first", ["user", "tag"])
def test_user_string_that_shares_a_memo_entry_with_a_tag_is_unchanged(protocol: int, first: str) -> None:
    tag = fresh("cuda:0")
    storages = [FakeStorage(tag, "0"), FakeStorage(tag, "1"), FakeStorage(fresh("cuda:0"), "2")]
    obj = [tag, *storages, tag, {"device": tag}] if first == "user" else [*storages, tag, {"device": tag, tag: tag}]
    tag_map = TagMap("cpu")
    data = pickle_of(obj, protocol)
    method, new = retagged(data, tag_map)
    assert method == "rewrite"
    assert load(new) == expected(obj, tag_map)
    assert load(new)[-1]["device"] == "cuda:0"


@each_protocol
def test_string_shared_by_all_tags_is_changed_once(protocol: int) -> None:
    tag = fresh("cuda:0")
    obj = [FakeStorage(tag, str(key)) for key in range(300)]
    data = pickle_of(obj, protocol)
    pickled = run(data)
    edits = tag_edits(pickled, data, TagMap("cpu").new)
    assert edits is not None
    assert len(edits) == 1
    assert load(spliced(data, edits)) == expected(obj, TagMap("cpu"))


@pytest.mark.parametrize("protocol", [4, 5])
def test_frame_lengths_are_updated(protocol: int) -> None:
    """The pure-Python unpickler relies on them; this pickle has more than one frame of 64 kB."""
    obj = [["x" * 100 for _ in range(900)], *(FakeStorage("cpu", str(key)) for key in range(3_000))]
    obj.append(["y" * 100 for _ in range(900)])
    method, new = retagged(pickle_of(obj, protocol), TagMap("privateuseone:10"))
    assert method == "rewrite"
    assert pickle._Unpickler is not None
    unpickler = type("Slow", (pickle._Unpickler,), {"persistent_load": lambda _, pid: pid})
    assert unpickler(io.BytesIO(new)).load() == expected(obj, TagMap("privateuseone:10"))
    assert not run(new).ambiguous


TAGS = ("cpu", "cuda:0", "cuda:1", "cuda:10", "mps", "xpu:0", "privateuseone:0")


@given(
    tags=st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(NUMELS), st.booleans()), min_size=1, max_size=12),
    named=st.dictionaries(st.sampled_from(TAGS), st.sampled_from(TAGS), max_size=3),
    others=st.sampled_from(("", *TAGS)),
    protocol=st.sampled_from((2, 3, 4, 5)),
    before=st.sampled_from((0, 250, 256)),
    users=st.lists(st.sampled_from(TAGS), max_size=3),
)
def test_only_the_mapped_tags_change(
    *, tags: Any, named: dict[str, str], others: str, protocol: int, before: int, users: list[str]
) -> None:
    shared = {tag: fresh(tag) for tag in TAGS}
    storages = [
        FakeStorage(shared[tag_] if is_shared else fresh(tag_), str(key), numel)
        for key, (tag_, numel, is_shared) in enumerate(tags)
    ]
    obj = [
        [str(i) for i in range(before)],
        *(shared[user] for user in users),
        *storages,
        {shared[user]: shared[user] for user in users},
    ]
    tag_map = TagMap("cpu")
    tag_map.clear()  # allow any tags, not only devices
    tag_map.update({**named, OTHERS: others} if others else named)
    data = pickle_of(obj, protocol)
    _, new = retagged(data, tag_map)
    assert load(new) == expected(obj, tag_map)


def test_persistent_id_from_the_memo_is_unclear() -> None:
    """Loaders accept a tuple from the memo, but torch never writes one."""
    body = b"(X\x07\0\0\0storagec__builtin__\ndict\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tq\x01Qh\x01Q\x86."
    pickled = run(b"\x80\x02" + body)
    sites, _, _, unclear = find_sites(pickled, b"\x80\x02" + body)
    assert (len(sites), len(unclear)) == (1, 1)


DIFFERENCES: dict[str, tuple[object, object, bool]] = {
    "nothing": (["a", 1, 2.0, None, b"x"], ["a", 1, 2.0, None, b"x"], True),
    "a text": (["a"], ["b"], False),
    "a type": ([1], [True], False),
    "the sign of zero": ([0.0], [-0.0], False),
    "NaN": ([float("nan")], [float("nan")], True),
    "a length": ([1, 2], [1, 2, 3], False),
    "a value": ([{"k": 1}], [{"k": 2}], False),
    "a key": ([{"k": 1}], [{"j": 1}], False),
    "bytes": ([bytearray(b"a")], [bytearray(b"b")], False),
    "an unchanged tag": ([FakeStorage("cpu")], [FakeStorage("cpu")], False),
    "a tag": ([FakeStorage("cpu")], [FakeStorage("mps")], True),
    "the key of a storage": ([FakeStorage("cpu")], [FakeStorage("mps", "1")], False),
    "the size of a storage": ([FakeStorage("cpu", numel=4)], [FakeStorage("mps", numel=5)], False),
    "a class": ([io.BytesIO], [io.StringIO], False),
    "a tuple in a tuple": ([(1, (2, 3))], [(1, (2, 4))], False),
    "a set": ([{1, 2}], [{1, 3}], False),
}


@each(("left", "right", "equal"), DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_same_but_tags_detects_other_differences(left: object, right: object, equal: bool) -> None:
    pair = run(pickle_of(left)), run(pickle_of(right))
    assert same_but_tags(*pair, lambda tag: "mps" if tag == "cpu" else tag) is equal


def test_same_but_tags_detects_lost_and_added_sharing() -> None:
    shared: list[int] = []
    assert not same_but_tags(run(pickle_of([shared, shared])), run(pickle_of([[], []])), str)
    assert not same_but_tags(run(pickle_of([[], []])), run(pickle_of([shared, shared])), str)
    cyclic: list[object] = []
    cyclic.append(cyclic)
    assert same_but_tags(run(pickle_of(cyclic)), run(pickle_of(cyclic)), str)
