"""joblib files: array bytes are stored between pickle opcodes, and the file may be compressed."""

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
from tests.forge import call, list_of, name, pickled, text
from tests.loading.equal import assert_same
from tests.loading.zoo import save_with_tag

import transload
from transload.errors import BrokenFileError, NotACheckpointError, UnsafeError
from transload.opening import inspect

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
COMPRESSIONS = ["zlib", "gzip", "bz2", "lzma", "xz"]


def dumped(value: Any, *, tag: str = "cuda:0", **options: Any) -> bytes:
    buffer = io.BytesIO()
    with save_with_tag(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joblib.dump(value, buffer, **options)
    return buffer.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transload.load(io.BytesIO(data), **options)


EXPECTED = joblib.load(io.BytesIO(dumped(VALUE, tag="cpu")))


def check_inspect_and_load(data: bytes) -> None:
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity) == ("pickle", "needs-trust", "unchecked")
    assert [tensor.name for tensor in checkpoint.tensors] == ["w", "half"]
    assert {use.full_name for use in checkpoint.globals if use.verdict != "data"} <= {
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
    }
    for trusted in (False, True):
        assert_same(EXPECTED, loaded(data, weights_only=not trusted))


def test_arrays_and_tensors_in_every_protocol() -> None:
    for_each(range(6), lambda protocol: check_inspect_and_load(dumped(VALUE, protocol=protocol)))


@each("kind", COMPRESSIONS)
def test_compressed_files(kind: str) -> None:
    data = dumped(VALUE, compress=(kind, 1))
    check_inspect_and_load(data)
    checkpoint = inspect(data)
    assert dict(checkpoint.facts)["compression"] == kind.replace("bz2", "bzip2")
    assert checkpoint.nbytes == len(data)


def test_file_with_only_tensors_is_data_only() -> None:
    for compress in (0, 3):
        data = dumped({"w": VALUE["w"]}, compress=compress)
        assert inspect(data).safety == "data-only"
        assert_same({"w": EXPECTED["w"]}, loaded(data))


def test_file_with_only_arrays_is_loaded() -> None:
    arrays = {"a": VALUE["matrix"], "b": VALUE["large"]}
    assert_same(arrays, loaded(dumped(arrays)))
    big = loaded(dumped({"b": np.arange(3, dtype=">i4")}))["b"]
    assert (big.dtype.str, big.tolist()) == (">i4", [0, 1, 2])


@each("compress", [0, 3])
def test_open_and_convert(compress: int, tmp_path: Path) -> None:
    path = tmp_path / "model.joblib"
    path.write_bytes(
        dumped({key: VALUE[key] for key in ("w", "matrix", "column by column", "epoch")}, compress=compress)
    )
    with transload.open(path) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(opened["w"][1:], VALUE["w"][1:])
    transload.convert(path, tmp_path / "new.pt")
    converted = torch.load(tmp_path / "new.pt", map_location="cpu")
    assert converted["epoch"] == 3
    for key in ("w", "matrix", "column by column"):
        assert torch.equal(converted[key], torch.as_tensor(VALUE[key]))


class Outer:
    class Inner:
        pass


def test_object_of_a_nested_class() -> None:
    value = loaded(dumped({"of": Outer.Inner(), "a": np.arange(3)}), weights_only=False)
    assert type(value["of"]) is Outer.Inner


def test_lz4_compression_is_named_in_the_error() -> None:
    with pytest.raises(NotACheckpointError, match="compressed with lz4"):
        loaded(b"\x04\x22\x4d\x18" + bytes(40))


def test_truncated_file_is_damaged() -> None:
    data = dumped({"w": torch.ones(40), "a": np.arange(40), "b": np.arange(3)})
    for length in range(data.index(b"_load_from_bytes") + 40, len(data), 37):
        checkpoint = inspect(data[:length])
        assert (checkpoint.format, checkpoint.integrity) == ("pickle", "damaged"), length
        assert checkpoint.safety != "dangerous", length
        with pytest.raises(BrokenFileError):
            loaded(data[:length])
    compressed = dumped(VALUE, compress=("gzip", 1))
    assert inspect(compressed[:-400]).integrity == "damaged"


# -- arrays that may hold code


def test_object_arrays_are_inspected_and_need_trust() -> None:
    for value in (np.array([1, None], dtype=object), np.array([io.BytesIO], dtype=object)):
        data = dumped({"w": torch.ones(2), "value": value})
        checkpoint = inspect(data)
        assert checkpoint.safety == "needs-trust"
        with pytest.raises(UnsafeError):
            loaded(data)
        assert loaded(data, weights_only=False)["value"].tolist() == value.tolist()
    assert "_io.BytesIO" in [use.full_name for use in checkpoint.globals]


def test_structured_arrays_need_trust() -> None:
    data = dumped({"w": torch.ones(2), "value": np.zeros(2, dtype=[("a", "f4")]), "behind": np.arange(3)})
    assert inspect(data).safety == "needs-trust"
    with pytest.raises(UnsafeError):
        loaded(data)


def test_arrays_of_dates_are_data() -> None:
    dates = np.array(["2020-01-01"], dtype="M8[D]")
    value = loaded(dumped({"w": torch.ones(2), "value": dates, "behind": np.arange(3)}))
    assert (value["value"] == dates).all()
    assert value["behind"].tolist() == [0, 1, 2]


WRAPPER = name("joblib.numpy_pickle", "NumpyArrayWrapper")
DTYPE = name("numpy", "dtype")


def dtype(code: str, size: int = -1, flags: int = 0) -> bytes:
    numbers = b"".join(b"J" + struct.pack("<i", number) for number in (size, -1, flags))
    return call(DTYPE, text(code), b"\x89", b"\x88") + b"(K\x03" + text("<") + b"NNN" + numbers + b"tb"


def wrapped(content: bytes, kind: bytes = b"", more: bytes = b"", order: str = "C") -> bytes:
    """The wrapper of an array of four elements, as joblib pickles it, followed by the bytes of the array."""
    state = [text("subclass"), name("numpy", "ndarray"), text("shape"), b"K\x04\x85", text("order"), text(order)]
    state += [text("dtype"), kind or dtype("f4"), more]
    return WRAPPER + b")\x81}(" + b"".join(state) + b"ub" + content


NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
CALL = b"cos\ngetcwd\n)R"  # harmless stand-in for an attack


def test_handwritten_array_wrapper_is_loaded() -> None:
    data = pickled(list_of(wrapped(NUMBERS), text("behind")), 3)
    assert inspect(data).safety == "needs-trust"
    array, after = loaded(data)
    assert (array.tolist(), after) == ([1, 2, 3, 4], "behind")
    assert (
        loaded(pickled(wrapped(b"\x02\xff\xff" + NUMBERS, more=text("numpy_array_alignment_bytes") + b"K\x10"), 3)).size
        == 4
    )


def test_frame_that_extends_into_an_array_is_dangerous() -> None:
    for inside in (0, 5):
        body = wrapped(b"")
        framed = b"\x80\x04\x95" + struct.pack("<Q", len(body) + inside) + body + NUMBERS + b"."
        assert inspect(framed).safety == ("dangerous" if inside else "needs-trust")


def padded(opcodes: bytes) -> bytes:
    return opcodes + b"N" * (16 - len(opcodes))


HOSTILE = {
    "array bytes that are opcodes": wrapped(padded(b"0" + CALL)),
    "array bytes that end the pickle": wrapped(padded(b"0" + CALL + b".")),
    "array bytes that are an extension opcode": wrapped(padded(b"\x82\x01")),
    "a call after an array": b"(" + wrapped(NUMBERS) + CALL + b"t",
    "an object array that calls": wrapped(pickled(CALL), dtype("O8", flags=63)),
    "an object array by its flags only": wrapped(pickled(CALL), dtype("f4", flags=63)),
    "the wrapper class as a value": b"(" + wrapped(NUMBERS) + WRAPPER + b"t",
    "array bytes that call a loader": b"(" + WRAPPER + b"0" + wrapped(padded(b"0ctorch.load\nx\n)R")) + b"t",
}


@each("body", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_file_is_dangerous_and_not_loaded(body: bytes) -> None:
    data = pickled(body, 3)
    assert inspect(data).safety == "dangerous"
    with pytest.raises(transload.TransloadError):
        loaded(data)


MALFORMED = {
    "a state that numpy ignores": wrapped(pickled(b"N"), dtype("f4", flags=63).replace(b"\x89\x88", b"\x89\x89")),
    "a class that is not numpy's": wrapped(NUMBERS).replace(name("numpy", "ndarray"), name("torch", "Tensor")),
    "another size in the state of the dtype": wrapped(NUMBERS, dtype("V4", 8)),
    "an extra attribute": wrapped(NUMBERS, more=text("read") + name("builtins", "print")),
    "no shape": WRAPPER + b")\x81}b" + NUMBERS,
    "an unknown order": wrapped(NUMBERS, order="K"),
    "a second state": wrapped(NUMBERS)[: -len(NUMBERS)] + b"}b",
    "a wrapper made by a call": call(WRAPPER) + b"}b",
    "an alignment that is not a number": wrapped(NUMBERS, more=text("numpy_array_alignment_bytes") + text("x")),
    "a dtype that is a name": wrapped(NUMBERS, name("numpy", "float32")),
}


@each("body", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_wrapper_is_not_loaded(body: bytes) -> None:
    data = pickled(body, 3)
    assert not inspect(data).ok
    with pytest.raises(transload.TransloadError):
        loaded(data)


def test_impossible_shape_and_decompression_bomb_are_rejected() -> None:
    shape = b"J\xff\xff\xff\x7f" * 2 + b"\x86"
    data = pickled(wrapped(NUMBERS).replace(b"K\x04\x85", shape), 3)
    assert inspect(data).integrity in ("damaged", "not-a-checkpoint")
    bomb = dumped({"w": torch.zeros(1_000_000)}, compress=("bz2", 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transload.formats.plain_pickle._MIN_UNPACKED_LIMIT", 1 << 20)
        assert inspect(bomb).format == "bzip2"
