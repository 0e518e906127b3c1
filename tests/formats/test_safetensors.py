"""The safetensors reader against the ``safetensors`` package: it reads the same, or reports a problem."""

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
    """Check that we read what the reference reads, or report a problem. Returns whether the reference opens it."""
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


def test_file_saved_by_torch_is_read_like_the_reference() -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
             "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")  # fmt: skip
    known = [name for name in names if hasattr(torch, name)]  # an older torch has fewer
    expected = {name: torch.zeros(3, 2, dtype=torch.float32).to(getattr(torch, name)) for name in known}
    expected["empty"], expected["scalar"] = torch.empty(3, 0), torch.tensor(1.5)
    data = save(expected, metadata={"format": "pt"})
    ours = read(data)
    assert ours.problems == ()
    assert ours.format == "safetensors"
    assert not ours.checksummed
    assert ("metadata.format", "pt") in ours.facts
    assert set(expected) == {tensor.name for tensor in ours.tensors}
    for name, tensor in expected.items():
        actual = ours.tensor(name)
        assert (actual.dtype, actual.shape, actual.stride) == (
            str(tensor.dtype)[6:],
            tuple(tensor.shape),
            tensor.stride(),
        )
        assert (actual.device, actual.nbytes) == ("cpu", tensor.nbytes)
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
def test_dtypes_missing_in_torch_are_listed_and_reported(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    data = blob({"a": entry(dtype, shape, (0, nbytes))}, bytes(nbytes))
    assert codes(data) == {"safetensors-dtype-not-in-torch"}
    assert read(data).tensor("a").dtype == dtype
    assert check_against_reference(data)


# The file, the code of the problem, and whether the reference opens the file anyway.
MALFORMED: dict[str, tuple[bytes, str, bool]] = {
    "trailing bytes": (blob({"a": entry()}, b"12345"), "safetensors-trailing", False),
    "trailing bytes, no tensor": (blob({}, b"1"), "safetensors-trailing", False),
    "too short": (blob({"a": entry()}, b"123"), "safetensors-truncated", False),
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
    "entry is a string": (blob({"a": "F32"}), "safetensors-entry-invalid", False),
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
    "header is a list": (blob(b"[]"), "safetensors-header-invalid", False),
    "deeply nested": (blob(b'{"a":' + b"[" * 100_000), "safetensors-header-invalid", False),
    "many digits": (blob(b'{"a":' + b"9" * 5000 + b"}"), "safetensors-header-invalid", False),
    "padded with NUL": (blob(b"{}\0"), "safetensors-header-invalid", False),
    "no header": (blob(b""), "safetensors-header-invalid", False),
    "length beyond the file": (blob(b"{}", length=50), "safetensors-header-cut", False),
    "length beyond the limit": (blob(b"{}", length=MAX_HEADER + 1), "safetensors-header-too-large", False),
    "seven bytes": (b"1234567", "safetensors-header-too-large", False),
    "leading space": (blob(b" {}"), "safetensors-odd-header", True),
    "extra field": (blob({"a": entry(extra=1)}, bytes(4)), "safetensors-odd-header", True),
    "entry as a list": (blob(b'{"a":["F32",[1],[0,4]]}', bytes(4)), "safetensors-odd-header", True),
    "dtype as an object": (blob({"a": {**entry(), "dtype": {"F32": None}}}, bytes(4)), "safetensors-odd-header", True),
    "duplicate entry": (
        blob(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        "safetensors-duplicate-key",
        True,
    ),
    "duplicate field": (
        blob(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "safetensors-duplicate-key",
        False,
    ),
    "duplicate metadata": (blob(b'{"__metadata__":{},"__metadata__":{}}'), "safetensors-duplicate-key", False),
}


@each("name", MALFORMED)
def test_malformed_file_is_reported(name: str) -> None:
    data, code, opens = MALFORMED[name]
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
def test_unusual_but_valid_file_has_no_problems(data: bytes) -> None:
    assert codes(data) == set()
    assert check_against_reference(data)
    assert looks_like_safetensors(BytesSource(data))


def test_truncated_file_lists_the_bytes_left_of_each_tensor() -> None:
    header = {name: entry(shape=(2,), at=(8 * n, 8 * n + 8)) for n, name in enumerate("abc")}
    complete = blob(header, bytes(24))
    cut = read(complete[:-12])
    assert [storage.stored for storage in cut.storages] == [8, 4, 0]
    assert [storage.offset is None for storage in cut.storages] == [False, False, True]
    (problem,) = cut.problems
    assert problem.code == "safetensors-truncated"
    assert "12 bytes" in problem.detail
    assert "1 of 3 tensors" in problem.detail


def test_tensor_of_wrong_size_has_no_storage() -> None:
    checkpoint = read(blob({"a": entry(shape=(2,)), "b": entry(at=(4, 8))}, bytes(8)))
    assert checkpoint.tensor("a").storage is None
    assert checkpoint.tensor("a").file_offset is None
    assert [storage.id for storage in checkpoint.storages] == ["b"]


def test_long_metadata_is_shortened() -> None:
    facts = read(blob({"__metadata__": {f"k{n}": "x" * 10_000 for n in range(1000)}})).facts
    assert ("metadata", "1,000 entries") in facts
    assert ("metadata", "1 entry") in read(blob({"__metadata__": {"format": "pt"}})).facts
    assert len(facts) < 100
    assert max(len(text) for _, text in facts) < 1000


@each(
    ("data", "expected"),
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
def test_looks_like_safetensors(data: bytes, expected: bool) -> None:
    assert looks_like_safetensors(BytesSource(data)) is expected


class _RecordingSource(BytesSource):
    largest = 0

    def read(self, offset: int, count: int) -> bytes:
        self.largest = max(self.largest, count)
        return super().read(offset, count)


def test_claimed_header_length_is_not_read() -> None:
    for length in (MAX_HEADER + 1, 1 << 63, MAX_HEADER):
        source = _RecordingSource(blob(b"{}", length=length))
        read_safetensors(source)
        assert source.largest <= 100


def test_thousands_of_wrong_entries_are_summarised() -> None:
    checkpoint = read(blob({str(n): entry(at=(4, 8)) for n in range(2000)}, bytes(8)))
    assert len(checkpoint.problems) < 100
    assert any("more like this" in problem.detail for problem in checkpoint.problems)


def test_shape_with_many_dimensions_is_read_quickly() -> None:
    huge = blob(
        {"a": entry(shape=[1 << 63] * 200_000, at=(0, 0)), "b": entry(shape=[0] + [1 << 63] * 200_000, at=(0, 0))}
    )
    start = time.process_time()
    assert [tensor.numel for tensor in read(huge).tensors] == [0]
    assert time.process_time() - start < 5


def test_twenty_thousand_tensors_are_read_quickly() -> None:
    header = {f"model.layers.{n}.weight": entry(shape=(4, 5), at=(80 * n, 80 * n + 80)) for n in range(20_000)}
    data = blob(header, bytes(80 * 20_000))

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    # Compared with the JSON parser, since machines differ; about six times its time is usual.
    parse = min(seconds(lambda: json.loads(json.dumps(header))) for _ in range(3))
    assert any(seconds(lambda: read(data)) < max(0.2, 15 * parse) for _ in range(3))


def _mutations() -> st.SearchStrategy[bytes]:
    """Almost valid headers: each field may be replaced by a value that some parser would accept."""
    count = st.one_of(st.integers(0, 8), st.sampled_from([-1, 1 << 63, 1 << 64, 1.0, True, None, "1", [1]]))
    dtype = st.one_of(st.sampled_from(sorted(BITS)), st.sampled_from(["F128", "f32", "", None, 1, {"F32": None}]))
    offsets = st.one_of(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(list), st.lists(count, max_size=3))
    fields = st.fixed_dictionaries(
        {}, optional={"dtype": dtype, "shape": st.lists(count, max_size=3), "data_offsets": offsets}
    )
    valid = st.builds(
        lambda dtype, n: entry(dtype, (8,), (8 * n, 8 * n + BITS[dtype])),
        st.sampled_from(sorted(BITS)),
        st.integers(0, 2),
    )
    value: st.SearchStrategy[Any] = st.one_of(fields, valid, st.none(), st.lists(count, max_size=4))
    names = st.one_of(st.sampled_from(["a", "b", "__metadata__", ""]), st.text(max_size=3))
    header = st.dictionaries(names, value, max_size=3).map(lambda h: json.dumps(h).encode())
    return st.builds(blob, header, st.binary(max_size=24))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_mutations())
@example(blob({"a": entry("F4", (2, 1), (0, 1))}, b"1"))
def test_almost_valid_file_is_read_like_the_reference_or_reported(data: bytes) -> None:
    check_against_reference(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_file_is_read_like_the_reference_or_reported(data: st.DataObject) -> None:
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
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    looks_like_safetensors(BytesSource(data))
    read(data)
