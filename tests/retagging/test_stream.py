"""Pickles with other tags: what a loader makes of them, and that only the tags differ."""

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


class Held:
    """Stands for a storage: pickled by its persistent id."""

    def __init__(self, tag: str, key: str = "0", numel: int = 4, view: object = None, parts: int = 5) -> None:
        self.pid: tuple[Any, ...] = ("storage", dict, key, tag, numel, view)[:parts]


class Writer(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Held) else None


class Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid


def written(obj: object, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    Writer(out, protocol).dump(obj)
    return out.getvalue()


def loaded(data: bytes) -> Any:
    return Reader(io.BytesIO(data)).load()


def retagged(data: bytes, wish: TagMap) -> tuple[str, bytes]:
    """By which way, and what it gives; proven as a plan proves it."""
    pickled = run(data)
    edits = tag_edits(pickled, data, wish.new)
    assert edits is not None
    way = "rewrite" if any(edit.grown for edit in edits) else "patch"
    new = spliced(data, edits)
    assert same_but_tags(pickled, run(new), wish.new)
    return way, new


def expected(obj: Any, wish: TagMap) -> Any:
    """What a loader should make of it."""
    if isinstance(obj, Held):
        return (*obj.pid[:3], wish.new(obj.pid[3]), *obj.pid[4:])
    if isinstance(obj, list):
        return [expected(item, wish) for item in obj]
    if isinstance(obj, dict):
        return {key: expected(item, wish) for key, item in obj.items()}
    return obj


NUMELS = (0, 7, 255, 256, 65_535, 65_536, 1 << 31, 1 << 40)
each_protocol = each("protocol", [2, 3, 4, 5])


@each_protocol
@each("numel", NUMELS)
@each("before", [0, 300], ids=["short memo", "long memo"])
@each("parts", [5, 6], ids=["zip", "legacy"])
def test_cuda_becomes_cpu_in_as_many_bytes(protocol: int, numel: int, before: int, parts: int) -> None:
    """The common case always fits, whatever the numbers beside the tag are."""
    view = (fresh("v"), 0, 4) if numel == 7 else None
    held = [Held(fresh("cuda:0"), str(key), numel, view, parts) for key in range(3)]
    obj = [[f"text {i}" for i in range(before)], *held]
    data = written(obj, protocol)
    way, new = retagged(data, TagMap("cpu"))
    assert (way, len(new)) == ("patch", len(data))
    assert loaded(new) == expected(obj, TagMap("cpu"))


@each_protocol
def test_there_and_back_is_the_same_again(protocol: int) -> None:
    data = written([Held(fresh("cuda:0"), str(key), 12) for key in range(40)], protocol)
    _, new = retagged(data, TagMap("cpu"))
    assert new != data
    assert retagged(new, TagMap("cuda:0")) == ("patch", data)


@each_protocol
@each("first", ["user", "tag"])
def test_a_text_of_the_users_stays_where_it_shares_the_memo_entry_of_a_tag(protocol: int, first: str) -> None:
    tag = fresh("cuda:0")
    held = [Held(tag, "0"), Held(tag, "1"), Held(fresh("cuda:0"), "2")]
    obj = [tag, *held, tag, {"device": tag}] if first == "user" else [*held, tag, {"device": tag, tag: tag}]
    wish = TagMap("cpu")
    data = written(obj, protocol)
    way, new = retagged(data, wish)
    assert way == "rewrite"
    assert loaded(new) == expected(obj, wish)
    assert loaded(new)[-1]["device"] == "cuda:0"


@each_protocol
def test_one_text_for_all_tags_is_changed_once(protocol: int) -> None:
    tag = fresh("cuda:0")
    obj = [Held(tag, str(key)) for key in range(300)]
    data = written(obj, protocol)
    pickled = run(data)
    edits = tag_edits(pickled, data, TagMap("cpu").new)
    assert edits is not None
    assert len(edits) == 1
    assert loaded(spliced(data, edits)) == expected(obj, TagMap("cpu"))


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_are_as_long_as_what_they_hold(protocol: int) -> None:
    """The Python unpickler obeys them; this is more than one frame of 64 kB."""
    obj = [["x" * 100 for _ in range(900)], *(Held("cpu", str(key)) for key in range(3_000))]
    obj.append(["y" * 100 for _ in range(900)])
    way, new = retagged(written(obj, protocol), TagMap("privateuseone:10"))
    assert way == "rewrite"
    assert pickle._Unpickler is not None
    reader = type("Slow", (pickle._Unpickler,), {"persistent_load": lambda _, pid: pid})
    assert reader(io.BytesIO(new)).load() == expected(obj, TagMap("privateuseone:10"))
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
def test_whatever_there_is_only_the_tags_change(
    *, tags: Any, named: dict[str, str], others: str, protocol: int, before: int, users: list[str]
) -> None:
    shared = {tag: fresh(tag) for tag in TAGS}
    held = [Held(shared[t] if one else fresh(t), str(key), numel) for key, (t, numel, one) in enumerate(tags)]
    obj = [[str(i) for i in range(before)], *(shared[u] for u in users), *held, {shared[u]: shared[u] for u in users}]
    wish = TagMap("cpu")
    wish.clear()  # any tags, not only those of devices
    wish.update({**named, OTHERS: others} if others else named)
    data = written(obj, protocol)
    _, new = retagged(data, wish)
    assert loaded(new) == expected(obj, wish)


def test_an_id_that_is_made_in_another_way_is_unclear() -> None:
    """A tuple from the memo: a loader takes it, torch never writes it."""
    body = b"(X\x07\0\0\0storagec__builtin__\ndict\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tq\x01Qh\x01Q\x86."
    pickled = run(b"\x80\x02" + body)
    sites, _, _, unclear = find_sites(pickled, b"\x80\x02" + body)
    assert (len(sites), len(unclear)) == (1, 1)


DIFFERENCES: dict[str, tuple[object, object, bool]] = {
    "nothing": (["a", 1, 2.0, None, b"x"], ["a", 1, 2.0, None, b"x"], True),
    "a text": (["a"], ["b"], False),
    "a type": ([1], [True], False),
    "a sign": ([0.0], [-0.0], False),
    "no number": ([float("nan")], [float("nan")], True),
    "a length": ([1, 2], [1, 2, 3], False),
    "a value": ([{"k": 1}], [{"k": 2}], False),
    "a key": ([{"k": 1}], [{"j": 1}], False),
    "bytes": ([bytearray(b"a")], [bytearray(b"b")], False),
    "no tag": ([Held("cpu")], [Held("cpu")], False),
    "a tag": ([Held("cpu")], [Held("mps")], True),
    "the key of a storage": ([Held("cpu")], [Held("mps", "1")], False),
    "the size of a storage": ([Held("cpu", numel=4)], [Held("mps", numel=5)], False),
    "a class": ([io.BytesIO], [io.StringIO], False),
    "a tuple in a tuple": ([(1, (2, 3))], [(1, (2, 4))], False),
    "a set": ([{1, 2}], [{1, 3}], False),
}


@each(("left", "right", "equal"), DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_what_differs_is_seen(left: object, right: object, equal: bool) -> None:
    pair = run(written(left)), run(written(right))
    assert same_but_tags(*pair, lambda tag: "mps" if tag == "cpu" else tag) is equal


def test_what_was_one_object_must_stay_one() -> None:
    one: list[int] = []
    assert not same_but_tags(run(written([one, one])), run(written([[], []])), str)
    assert not same_but_tags(run(written([[], []])), run(written([one, one])), str)
    loop: list[object] = []
    loop.append(loop)
    assert same_but_tags(run(written(loop)), run(written(loop)), str)
