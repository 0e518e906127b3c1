"""The safetensors reader against the ``safetensors`` package: the same reading, or a problem."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.each import each

from transload.checkpoint import Checkpoint
from transload.formats.safetensors import BITS, MAX_HEADER, looks_like_safetensors, read_safetensors
from transload.io.sources import BytesSource

safetensors = pytest.importorskip("safetensors")


def blob(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str = "F32", shape: object = (1,), at: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at, **more}


def read(data: bytes) -> Checkpoint:
    return read_safetensors(BytesSource(data))


def codes(data: bytes) -> set[str]:
    return {problem.code for problem in read(data).problems}


def torch_shape(dtype: str, shape: list[int]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" and shape and shape[-1] % 2 == 0 else tuple(shape)


def check_against_reference(data: bytes) -> bool:
    """The property that matters; gives back whether the reference opened the file."""
    ours = read(data)
    try:
        theirs = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        refused = True
    else:
        refused = False
    if refused:
        assert ours.problems
        return False
    assert {tensor.name for tensor in ours.tensors} == {name for name, _ in theirs}
    storages = {storage.id: storage for storage in ours.storages}
    for name, info in theirs:
        tensor, storage = ours.tensor(name), storages[name]
        assert tensor.shape == torch_shape(info["dtype"], info["shape"])
        assert BITS[info["dtype"]] * math.prod(info["shape"]) == 8 * storage.nbytes == 8 * storage.stored
        assert storage.offset is not None
        assert data[storage.offset : storage.offset + storage.nbytes] == bytes(info["data"])
        assert tensor.file_offset == storage.offset
    return True


def test_what_torch_saves_is_read_to_the_byte() -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
             "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")  # fmt: skip
    known = [name for name in names if hasattr(torch, name)]  # an older torch has fewer
    wanted = {name: torch.zeros(3, 2, dtype=torch.float32).to(getattr(torch, name)) for name in known}
    wanted["empty"], wanted["scalar"] = torch.empty(3, 0), torch.tensor(1.5)
    data = save(wanted, metadata={"format": "pt"})
    ours = read(data)
    assert ours.problems == ()
    assert ours.format == "safetensors"
    assert not ours.checksummed
    assert ("metadata.format", "pt") in ours.facts
    assert set(wanted) == {tensor.name for tensor in ours.tensors}
    for name, tensor in wanted.items():
        mine = ours.tensor(name)
        assert (mine.dtype, mine.shape, mine.stride) == (str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride())
        assert (mine.device, mine.nbytes) == ("cpu", tensor.nbytes)
    assert check_against_reference(data)


def test_four_bit_floats_count_pairs_as_torch_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("needs a newer torch")
    data = blob({"a": entry("F4", (2, 8), (0, 8))}, bytes(8))
    (tmp_path / "f4").write_bytes(data)
    ours, theirs = read(data).tensor("a"), load_file(tmp_path / "f4")["a"]
    assert (ours.dtype, ours.shape, ours.nbytes) == ("float4_e2m1fn_x2", tuple(theirs.shape), 8)
    assert theirs.dtype == torch.float4_e2m1fn_x2


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), [("F6_E2M3", (4,), 3), ("F6_E3M2", (8,), 6), ("F4", (2, 1), 1)])
def test_types_that_torch_lacks_are_listed_and_said(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    data = blob({"a": entry(dtype, shape, (0, nbytes))}, bytes(nbytes))
    assert codes(data) == {"safetensors-dtype-not-in-torch"}
    assert read(data).tensor("a").dtype == dtype
    assert check_against_reference(data)


# Files, the code of the problem, and whether the reference opens it all the same.
ODD: dict[str, tuple[bytes, str, bool]] = {
    "trailing bytes": (blob({"a": entry()}, b"12345"), "safetensors-trailing", False),
    "trailing bytes, no tensor": (blob({}, b"1"), "safetensors-trailing", False),
    "short": (blob({"a": entry()}, b"123"), "safetensors-truncated", False),
    "hole": (blob({"a": entry(at=(4, 8))}, bytes(8)), "safetensors-hole", False),
    "overlap": (blob({"a": entry(), "b": entry()}, bytes(4)), "safetensors-overlap", False),
    "empty tensor inside another": (
        blob({"a": entry(), "b": entry(shape=(0,), at=(2, 2))}, bytes(4)),
        "safetensors-overlap",
        False,
    ),
    "shape too large": (blob({"a": entry(shape=(2,))}, bytes(4)), "safetensors-size-mismatch", False),
    "end before begin": (blob({"a": entry(at=(4, 0))}, bytes(4)), "safetensors-size-mismatch", False),
    "64-bit overflow": (blob({"a": entry(shape=(1 << 62, 8), at=(0, 0))}), "safetensors-size-mismatch", False),
    "overflow before the zero": (
        blob({"a": entry(shape=(1 << 63, 1 << 63, 0), at=(0, 0))}),
        "safetensors-size-mismatch",
        False,
    ),
    "half a byte": (blob({"a": entry("F4", (3,), (0, 2))}, bytes(2)), "safetensors-size-mismatch", False),
    "negative": (blob({"a": entry(shape=(-1,))}, bytes(4)), "safetensors-entry-invalid", False),
    "minus zero": (
        blob(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "safetensors-entry-invalid",
        False,
    ),
    "float": (blob({"a": entry(shape=(1.0,))}, bytes(4)), "safetensors-entry-invalid", False),
    "bool": (blob({"a": entry(shape=(True,))}, bytes(4)), "safetensors-entry-invalid", False),
    "beyond 64 bits": (blob({"a": entry(at=(0, 1 << 64))}, bytes(4)), "safetensors-entry-invalid", False),
    "three offsets": (blob({"a": entry(at=(0, 4, 4))}, bytes(4)), "safetensors-entry-invalid", False),
    "no shape": (blob({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "safetensors-entry-invalid", False),
    "text for an entry": (blob({"a": "F32"}), "safetensors-entry-invalid", False),
    "unknown dtype": (blob({"a": entry("F128", at=(0, 16))}, bytes(16)), "safetensors-dtype-unknown", False),
    "lower-case dtype": (blob({"a": entry("f32")}, bytes(4)), "safetensors-dtype-unknown", False),
    "metadata of numbers": (blob({"__metadata__": {"a": 1}}), "safetensors-metadata-invalid", False),
    "metadata is a list": (blob({"__metadata__": []}), "safetensors-metadata-invalid", False),
    "not UTF-8": (blob(b'{"\xff":1}'), "safetensors-header-invalid", False),
    "byte-order mark": (blob(b"\xef\xbb\xbf{}"), "safetensors-header-invalid", False),
    "lone surrogate": (
        blob(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(4)),
        "safetensors-header-invalid",
        False,
    ),
    "control character": (blob(b'{"\x01":1}'), "safetensors-header-invalid", False),
    "NaN": (blob(b'{"a":NaN}'), "safetensors-header-invalid", False),
    "number out of range": (
        blob(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}}', bytes(4)),
        "safetensors-header-invalid",
        False,
    ),
    "a list": (blob(b"[]"), "safetensors-header-invalid", False),
    "deep": (blob(b'{"a":' + b"[" * 100_000), "safetensors-header-invalid", False),
    "many digits": (blob(b'{"a":' + b"9" * 5000 + b"}"), "safetensors-header-invalid", False),
    "padded with NUL": (blob(b"{}\0"), "safetensors-header-invalid", False),
    "no header": (blob(b""), "safetensors-header-invalid", False),
    "length beyond the file": (blob(b"{}", length=50), "safetensors-header-cut", False),
    "length beyond the limit": (blob(b"{}", length=MAX_HEADER + 1), "safetensors-header-too-large", False),
    "seven bytes": (b"1234567", "safetensors-header-too-large", False),
    "space in front": (blob(b" {}"), "safetensors-odd-header", True),
    "a field too many": (blob({"a": entry(extra=1)}, bytes(4)), "safetensors-odd-header", True),
    "entry as a list": (blob(b'{"a":["F32",[1],[0,4]]}', bytes(4)), "safetensors-odd-header", True),
    "dtype as an object": (blob({"a": {**entry(), "dtype": {"F32": None}}}, bytes(4)), "safetensors-odd-header", True),
    "twice, the same": (
        blob(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        "safetensors-duplicate-key",
        True,
    ),
    "field twice": (
        blob(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "safetensors-duplicate-key",
        False,
    ),
    "metadata twice": (blob(b'{"__metadata__":{},"__metadata__":{}}'), "safetensors-duplicate-key", False),
}


@each("name", ODD)
def test_what_is_odd_is_told_and_no_more(name: str) -> None:
    data, code, opens = ODD[name]
    assert code in codes(data)
    assert check_against_reference(data) is opens


@each(
    "data",
    [
        blob({}),
        blob({"__metadata__": None}),
        blob({"": entry()}, bytes(4)),
        blob({"a": entry(shape=())}, bytes(4)),
        blob({"a": entry(shape=(0, 1 << 63, 1 << 63), at=(0, 0))}),
        blob({"b": entry(at=(4, 8)), "a": entry(), "c": entry(shape=(0,), at=(8, 8))}, bytes(8)),
        blob(json.dumps({"a": entry()}).encode() + b"  \n\t", bytes(4)),
        blob(b'{"\\ud83d\\ude00-0":' + json.dumps(entry()).encode() + b"}", bytes(4)),
    ],
)
def test_what_is_unusual_but_right_has_no_problem(data: bytes) -> None:
    assert codes(data) == set()
    assert check_against_reference(data)
    assert looks_like_safetensors(BytesSource(data))


def test_a_file_cut_short_lists_what_is_whole() -> None:
    header = {name: entry(shape=(2,), at=(8 * n, 8 * n + 8)) for n, name in enumerate("abc")}
    whole = blob(header, bytes(24))
    cut = read(whole[:-12])
    assert [storage.stored for storage in cut.storages] == [8, 4, 0]
    assert [storage.offset is None for storage in cut.storages] == [False, False, True]
    (problem,) = cut.problems
    assert problem.code == "safetensors-truncated"
    assert "12 bytes" in problem.detail
    assert "1 of 3 tensors" in problem.detail


def test_a_tensor_whose_size_is_wrong_has_no_bytes_to_trust() -> None:
    checkpoint = read(blob({"a": entry(shape=(2,)), "b": entry(at=(4, 8))}, bytes(8)))
    assert checkpoint.tensor("a").storage is None
    assert checkpoint.tensor("a").file_offset is None
    assert [storage.id for storage in checkpoint.storages] == ["b"]


def test_metadata_is_shown_in_bounds() -> None:
    facts = read(blob({"__metadata__": {f"k{n}": "x" * 10_000 for n in range(1000)}})).facts
    assert ("metadata", "1,000 entries") in facts
    assert ("metadata", "1 entry") in read(blob({"__metadata__": {"format": "pt"}})).facts
    assert len(facts) < 100
    assert max(len(text) for _, text in facts) < 1000


@each(
    ("data", "answer"),
    [
        (b"", False),
        (b"PK\x03\x04" + bytes(100), False),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", False),
        (b'{"error": "not found"}', False),
        (bytes(100), False),
        (blob(b"{}"), True),
        (blob(b'{"a":', length=500), True),
        (blob(b'{"a":', length=1 << 34), True),
        (blob(b'{"a":', length=1 << 62), False),
        (blob(b"[1]"), False),
    ],
)
def test_recognition(data: bytes, answer: bool) -> None:
    assert looks_like_safetensors(BytesSource(data)) is answer


class _Watched(BytesSource):
    most = 0

    def read(self, offset: int, count: int) -> bytes:
        self.most = max(self.most, count)
        return super().read(offset, count)


def test_a_claimed_length_is_never_asked_for() -> None:
    for length in (MAX_HEADER + 1, 1 << 63, MAX_HEADER):
        source = _Watched(blob(b"{}", length=length))
        read_safetensors(source)
        assert source.most <= 100


def test_a_million_wrong_entries_make_a_short_report() -> None:
    checkpoint = read(blob({str(n): entry(at=(4, 8)) for n in range(2000)}, bytes(8)))
    assert len(checkpoint.problems) < 100
    assert any("more like this" in problem.detail for problem in checkpoint.problems)


def test_many_dimensions_do_not_multiply_out() -> None:
    huge = blob(
        {"a": entry(shape=[1 << 63] * 200_000, at=(0, 0)), "b": entry(shape=[0] + [1 << 63] * 200_000, at=(0, 0))}
    )
    start = time.process_time()
    assert [tensor.numel for tensor in read(huge).tensors] == [0]
    assert time.process_time() - start < 5


def test_twenty_thousand_tensors_are_quick() -> None:
    header = {f"model.layers.{n}.weight": entry(shape=(4, 5), at=(80 * n, 80 * n + 80)) for n in range(20_000)}
    data = blob(header, bytes(80 * 20_000))

    def taken(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    # Machines differ, their own JSON parser is the measure; about six times it is usual.
    parse = min(taken(lambda: json.loads(json.dumps(header))) for _ in range(3))
    assert any(taken(lambda: read(data)) < max(0.2, 15 * parse) for _ in range(3))


def _mutations() -> st.SearchStrategy[bytes]:
    """Headers near to right ones: each field may be replaced by something that some parser would take."""
    count = st.one_of(st.integers(0, 8), st.sampled_from([-1, 1 << 63, 1 << 64, 1.0, True, None, "1", [1]]))
    dtype = st.one_of(st.sampled_from(sorted(BITS)), st.sampled_from(["F128", "f32", "", None, 1, {"F32": None}]))
    offsets = st.one_of(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(list), st.lists(count, max_size=3))
    fields = st.fixed_dictionaries(
        {}, optional={"dtype": dtype, "shape": st.lists(count, max_size=3), "data_offsets": offsets}
    )
    right = st.builds(
        lambda dtype, n: entry(dtype, (8,), (8 * n, 8 * n + BITS[dtype])),
        st.sampled_from(sorted(BITS)),
        st.integers(0, 2),
    )
    value: st.SearchStrategy[Any] = st.one_of(fields, right, st.none(), st.lists(count, max_size=4))
    names = st.one_of(st.sampled_from(["a", "b", "__metadata__", ""]), st.text(max_size=3))
    header = st.dictionaries(names, value, max_size=3).map(lambda h: json.dumps(h).encode())
    return st.builds(blob, header, st.binary(max_size=24))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_mutations())
@example(blob({"a": entry("F4", (2, 1), (0, 1))}, b"1"))
def test_same_reading_as_the_reference_or_a_problem(data: bytes) -> None:
    check_against_reference(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_to_a_right_file_is_never_missed(data: st.DataObject) -> None:
    good = blob(
        {"a": entry(shape=(2,), at=(0, 8)), "b.w-0": entry("F16", (2, 2), (8, 16)), "__metadata__": {"k": "v"}},
        bytes(range(16)),
    )
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
    at = data.draw(st.integers(0, len(good) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    bad = {
        "flip": good[:at] + byte + good[at + 1 :],
        "cut": good[:at],
        "insert": good[:at] + byte + good[at:],
        "drop": good[:at] + good[at + 1 :],
    }[kind]
    check_against_reference(bad)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_nothing_raises(data: bytes) -> None:
    looks_like_safetensors(BytesSource(data))
    read(data)
