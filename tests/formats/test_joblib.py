"""Files of joblib: the bytes of an array lie between the opcodes, and the whole of it may be compressed."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.each import each, for_each
from tests.forge import call, listing, name, pickled, text
from tests.loading.equal import same
from tests.loading.zoo import tagged

import transload
from transload.errors import BrokenFileError, NotACheckpointError, UnsafeError
from transload.judge import inspect

joblib = pytest.importorskip("joblib")

VALUE: dict[str, Any] = {
    "w": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "matrix": np.arange(6, dtype="f4").reshape(2, 3),
    "column by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "axes in another order": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "empty": np.empty((0, 3)),
    "no dimensions": np.array(3.5),
    "text": np.array(["ab", "c"]),
    "truth values": np.array([True, False]),
    "number": np.float32(1.5),
    "large": np.arange(10_000),
    "the same twice": [np.arange(3)] * 2,
    "epoch": 3,
}
PACKED = ["zlib", "gzip", "bz2", "lzma", "xz"]


def dumped(value: Any, *, tag: str = "cuda:0", **options: Any) -> bytes:
    held = io.BytesIO()
    with tagged(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joblib.dump(value, held, **options)
    return held.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transload.load(io.BytesIO(data), **options)


EXPECTED = joblib.load(io.BytesIO(dumped(VALUE, tag="cpu")))


def check(data: bytes) -> None:
    told = inspect(data)
    assert (told.format, told.safety, told.integrity) == ("pickle", "needs-trust", "unchecked")
    assert [tensor.name for tensor in told.tensors] == ["w", "half"]
    assert {use.full_name for use in told.globals if use.verdict != "data"} <= {
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
    }
    for trusted in (False, True):
        same(EXPECTED, loaded(data, weights_only=not trusted))


def test_arrays_and_tensors_of_every_protocol() -> None:
    for_each(range(6), lambda protocol: check(dumped(VALUE, protocol=protocol)))


@each("kind", PACKED)
def test_compressed_files(kind: str) -> None:
    data = dumped(VALUE, compress=(kind, 1))
    check(data)
    told = inspect(data)
    assert dict(told.facts)["compression"] == kind.replace("bz2", "bzip2")
    assert told.nbytes == len(data)


def test_tensors_alone_are_only_data() -> None:
    for compress in (0, 3):
        data = dumped({"w": VALUE["w"]}, compress=compress)
        assert inspect(data).safety == "data-only"
        same({"w": EXPECTED["w"]}, loaded(data))


def test_arrays_alone_are_read() -> None:
    arrays = {"a": VALUE["matrix"], "b": VALUE["large"]}
    same(arrays, loaded(dumped(arrays)))
    big = loaded(dumped({"b": np.arange(3, dtype=">i4")}))["b"]
    assert (big.dtype.str, big.tolist()) == (">i4", [0, 1, 2])


@each("compress", [0, 3])
def test_it_is_opened_and_converted(compress: int, tmp_path: Path) -> None:
    path = tmp_path / "model.joblib"
    path.write_bytes(
        dumped({key: VALUE[key] for key in ("w", "matrix", "column by column", "epoch")}, compress=compress)
    )
    with transload.open(path) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(opened["w"][1:], VALUE["w"][1:])
    transload.convert(path, tmp_path / "new.pt")
    made = torch.load(tmp_path / "new.pt", map_location="cpu")
    assert made["epoch"] == 3
    for key in ("w", "matrix", "column by column"):
        assert torch.equal(made[key], torch.as_tensor(VALUE[key]))


class Outer:
    class Inner:
        pass


def test_an_object_of_a_nested_class() -> None:
    kept = loaded(dumped({"of": Outer.Inner(), "a": np.arange(3)}), weights_only=False)
    assert type(kept["of"]) is Outer.Inner


def test_what_lz4_packed_is_named() -> None:
    with pytest.raises(NotACheckpointError, match="compressed with lz4"):
        loaded(b"\x04\x22\x4d\x18" + bytes(40))


def test_a_file_that_is_cut_anywhere_is_damaged() -> None:
    whole = dumped({"w": torch.ones(40), "a": np.arange(40), "b": np.arange(3)})
    for length in range(whole.index(b"_load_from_bytes") + 40, len(whole), 37):
        told = inspect(whole[:length])
        assert (told.format, told.integrity) == ("pickle", "damaged"), length
        assert told.safety != "dangerous", length
        with pytest.raises(BrokenFileError):
            loaded(whole[:length])
    packed = dumped(VALUE, compress=("gzip", 1))
    assert inspect(packed[:-400]).integrity == "damaged"


# -- what may hold more than data


def test_arrays_of_objects_are_read_for_their_names_and_refused() -> None:
    for value in (np.array([1, None], dtype=object), np.array([io.BytesIO], dtype=object)):
        data = dumped({"w": torch.ones(2), "value": value})
        told = inspect(data)
        assert told.safety == "needs-trust"
        with pytest.raises(UnsafeError):
            loaded(data)
        assert loaded(data, weights_only=False)["value"].tolist() == value.tolist()
    assert "_io.BytesIO" in [use.full_name for use in told.globals]


@each(
    "value",
    [np.zeros(2, dtype=[("a", "f4")]), np.array(["2020-01-01"], dtype="M8[D]")],
    ids=["records", "dates"],
)
def test_other_arrays_are_refused(value: Any) -> None:
    data = dumped({"w": torch.ones(2), "value": value, "behind": np.arange(3)})
    assert inspect(data).safety == "needs-trust"
    with pytest.raises(UnsafeError):
        loaded(data)


WRAPPER = name("joblib.numpy_pickle", "NumpyArrayWrapper")
DTYPE = name("numpy", "dtype")


def dtype(code: str, size: int = -1, flags: int = 0) -> bytes:
    numbers = b"".join(b"J" + struct.pack("<i", number) for number in (size, -1, flags))
    return call(DTYPE, text(code), b"\x89", b"\x88") + b"(K\x03" + text("<") + b"NNN" + numbers + b"tb"


def wrapped(content: bytes, kind: bytes = b"", more: bytes = b"", order: str = "C") -> bytes:
    """A wrapper of sixteen bytes as joblib writes it, and what follows."""
    state = [text("subclass"), name("numpy", "ndarray"), text("shape"), b"K\x04\x85", text("order"), text(order)]
    state += [text("dtype"), kind or dtype("f4"), more]
    return WRAPPER + b")\x81}(" + b"".join(state) + b"ub" + content


NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
RUNS = b"cos\ngetcwd\n)R"  # a harmless stand-in


def test_one_by_hand() -> None:
    data = pickled(listing(wrapped(NUMBERS), text("behind")), 3)
    assert inspect(data).safety == "needs-trust"
    found, behind = loaded(data)
    assert (found.tolist(), behind) == ([1, 2, 3, 4], "behind")
    assert (
        loaded(pickled(wrapped(b"\x02\xff\xff" + NUMBERS, more=text("numpy_array_alignment_bytes") + b"K\x10"), 3)).size
        == 4
    )


def test_the_frame_ends_where_an_array_begins() -> None:
    for inside in (0, 5):
        body = wrapped(b"")
        framed = b"\x80\x04\x95" + struct.pack("<Q", len(body) + inside) + body + NUMBERS + b"."
        assert inspect(framed).safety == ("dangerous" if inside else "needs-trust")


def padded(opcodes: bytes) -> bytes:
    return opcodes + b"N" * (16 - len(opcodes))


HOSTILE = {
    "opcodes for pickle": wrapped(padded(b"0" + RUNS)),
    "a stop for pickle": wrapped(padded(b"0" + RUNS + b".")),
    "an extension": wrapped(padded(b"\x82\x01")),
    "behind an array": b"(" + wrapped(NUMBERS) + RUNS + b"t",
    "objects that are calls": wrapped(pickled(RUNS), dtype("O8", flags=63)),
    "objects by the flags alone": wrapped(pickled(RUNS), dtype("f4", flags=63)),
    "the wrapper elsewhere": b"(" + wrapped(NUMBERS) + WRAPPER + b"t",
    "a call of a loader that was read": b"(" + WRAPPER + b"0" + wrapped(padded(b"0ctorch.load\nx\n)R")) + b"t",
}


@each("body", HOSTILE.values(), ids=list(HOSTILE))
def test_both_readings_of_a_file_count(body: bytes) -> None:
    data = pickled(body, 3)
    assert inspect(data).safety == "dangerous"
    with pytest.raises(transload.TransloadError):
        loaded(data)


ODD = {
    "a state that numpy ignores": wrapped(pickled(b"N"), dtype("f4", flags=63).replace(b"\x89\x88", b"\x89\x89")),
    "a class that is not numpy's": wrapped(NUMBERS).replace(name("numpy", "ndarray"), name("torch", "Tensor")),
    "another size by the state": wrapped(NUMBERS, dtype("V4", 8)),
    "an attribute of its own": wrapped(NUMBERS, more=text("read") + name("builtins", "print")),
    "no shape": WRAPPER + b")\x81}b" + NUMBERS,
    "another order": wrapped(NUMBERS, order="K"),
    "a second state": wrapped(NUMBERS)[: -len(NUMBERS)] + b"}b",
    "a call": call(WRAPPER) + b"}b",
    "an alignment that is not a number": wrapped(NUMBERS, more=text("numpy_array_alignment_bytes") + text("x")),
    "a dtype that is a name": wrapped(NUMBERS, name("numpy", "float32")),
}


@each("body", ODD.values(), ids=list(ODD))
def test_what_joblib_does_not_write_is_not_loaded(body: bytes) -> None:
    data = pickled(body, 3)
    assert not inspect(data).ok
    with pytest.raises(transload.TransloadError):
        loaded(data)


def test_more_than_there_is_is_not_believed() -> None:
    shape = b"J\xff\xff\xff\x7f" * 2 + b"\x86"
    data = pickled(wrapped(NUMBERS).replace(b"K\x04\x85", shape), 3)
    assert inspect(data).integrity in ("damaged", "not-a-checkpoint")
    bomb = dumped({"w": torch.zeros(1_000_000)}, compress=("bz2", 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transload.formats.plain_pickle._MIN_UNPACKED_LIMIT", 1 << 20)
        assert inspect(bomb).format == "bzip2"
