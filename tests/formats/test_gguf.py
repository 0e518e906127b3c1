"""The GGUF reader on forged files, and against the ``gguf`` package where it is installed."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from tests.each import each, for_each

import transload
from transload.checkpoint import Checkpoint
from transload.cli.main import main
from transload.dtypes import BLOCKS, GGML, ITEMSIZE
from transload.errors import FileWarning, LoadError, RescueError
from transload.formats import read_source
from transload.formats.gguf import header_values
from transload.io.sources import BytesSource

Value = tuple[str, int, bytes]
"""A key, its type, and its bytes."""
TYPE_NUMBERS = {name: number for number, name in GGML.items()}


def text(value: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(value)) + value


def number(code: str, value: float, order: str = "<") -> bytes:
    return struct.pack(order + code, value)


class Forged:
    """A small GGUF file, and the length of its header."""

    def __init__(
        self,
        tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
        values: tuple[Value, ...] = (),
        *,
        order: str = "<",
        version: int = 3,
        align: int = 32,
        offsets: dict[str, int] | None = None,
    ) -> None:
        head = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(values))
        for key, kind, value in values:
            head += text(key.encode(), order) + number("I", kind, order) + value
        body = b""
        for name, (dtype, shape, data) in tensors.items():
            body += bytes(-len(body) % align)
            offset = (offsets or {}).get(name, len(body))
            sizes = shape[::-1]
            head += text(name.encode(), order) + struct.pack(f"{order}I{len(sizes)}Q", len(sizes), *sizes)
            head += struct.pack(f"{order}IQ", TYPE_NUMBERS.get(dtype, 99), offset)
            body += data
        self.header = len(head)
        self.data = head + bytes(-len(head) % align) + body


def floats(*values: float, order: str = "<") -> bytes:
    return struct.pack(f"{order}{len(values)}f", *values)


def vocabulary(count: int, order: str = "<") -> bytes:
    words = b"".join(text(b"token %d" % index, order) for index in range(count))
    return struct.pack(f"{order}IQ", 8, count) + words


def small(order: str = "<", version: int = 3, align: int = 32) -> Forged:
    """Tensors of two dtypes and a quantized one, and values of several types."""
    values = [
        ("general.architecture", 8, text(b"llama", order)),
        ("general.alignment", 4, number("I", align, order)),
        ("rope", 6, number("f", 0.5, order)),
        ("big", 11, number("q", -(2**40), order)),
        ("yes", 7, b"\1"),
        ("tokens", 9, vocabulary(20, order)),
        ("ids", 9, struct.pack(f"{order}IQ3H", 2, 3, 7, 8, 9)),
        ("nested", 9, struct.pack(f"{order}IQ", 9, 1) + struct.pack(f"{order}IQ2b", 1, 2, -1, 1)),
    ]
    tensors = {
        "blk.0.weight": ("float32", (2, 3), floats(0, 1, 2, 3, 4, 5, order=order)),
        "blk.0.bias": ("int16", (3,), struct.pack(f"{order}3h", 1, -2, 3)),
        "blk.1.weight": ("Q8_0", (2, 32), bytes(range(68))),
    }
    return Forged(tensors, tuple(values), order=order, version=version, align=align)


def read(data: bytes) -> Checkpoint:
    return read_source(BytesSource(data))


def codes(data: bytes) -> set[str]:
    return {problem.code for problem in read(data).problems}


@each("order, version, align", [("<", 3, 32), (">", 3, 32), ("<", 2, 8), ("<", 3, 256)])
def test_tensors_and_values_are_read(order: str, version: int, align: int) -> None:
    forged = small(order, version, align)
    checkpoint = transload.inspect(forged.data)
    assert checkpoint.format == "gguf"
    assert checkpoint.ok
    assert [finding.code for finding in checkpoint.findings] == ["gguf-quantized"]
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in checkpoint.tensors] == [
        ("blk.0.weight", "float32", (2, 3), 24),
        ("blk.0.bias", "int16", (3,), 6),
        ("blk.1.weight", "Q8_0", (2, 32), 68),
    ]
    assert dict(checkpoint.facts)["GGUF"] == f"version {version}"
    values = {leaf.name: (leaf.kind, leaf.text) for leaf in checkpoint.leaves}
    assert values["general.architecture"] == ("str", "llama")
    assert values["rope"] == ("float", "0.5")
    assert values["ids"] == ("list", "[7, 8, 9]")
    assert values["tokens"][1].startswith("['token 0', ")
    assert values["tokens"][1].endswith(", …] (20 in all)")
    with transload.open(forged.data, device="cpu") as handle:
        assert handle["blk.0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert handle.slice("blk.0.bias")[1:].tolist() == [-2, 3]
        assert handle.metadata["tokens"] == [f"token {index}" for index in range(20)]
        assert (handle.metadata["big"], handle.metadata["yes"], handle.metadata["nested"]) == (
            -(2**40),
            True,
            [[-1, 1]],
        )
        with pytest.raises(LoadError, match=r"blk\.1\.weight has the dtype Q8_0"):
            handle["blk.1.weight"]


def test_tree_shows_all_metadata_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small().data)
    assert main(["inspect", "--tree", str(path)]) == 0
    output = capsys.readouterr().out
    assert "  general.architecture: llama\n" in output
    assert "  big: -1099511627776\n" in output


@each("order", ["<", ">"])
def test_load_skips_quantized_tensors_with_a_warning(order: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small(order).data)
    for mmap in (False, True):
        with pytest.warns(FileWarning, match=r"left out.*1 of 3 tensors \(Q8_0 1\): blk\.1\.weight"):
            state = transload.load(path, mmap=mmap)
        assert {name: tensor.tolist() for name, tensor in state.items()} == {
            "blk.0.weight": [[0, 1, 2], [3, 4, 5]],
            "blk.0.bias": [1, -2, 3],
        }


def test_file_with_only_quantized_tensors_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(Forged({"w": ("Q4_0", (32,), bytes(18))}).data)
    with pytest.raises(LoadError, match="nothing in it is a tensor to torch: its quantized"):
        transload.load(path)
    assert not transload.check(path).ok


@each("ending", [".safetensors", ".pt", ".npz"])
def test_convert_reports_quantized_tensors_as_lost(ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"out{ending}"
    conversion = transload.convert(small().data, out)
    assert not conversion.complete
    assert [(leftover.name, leftover.lost) for leftover in conversion.left] == [("blk.1.weight", True)]
    metadata = json.loads(Path(conversion.leftovers).read_text(encoding="utf-8"))["data"]["gguf/metadata"]
    assert (metadata["general.architecture"], metadata["tokens"][19], metadata["nested"]) == (
        "llama",
        "token 19",
        [[-1, 1]],
    )
    with transload.open(out) as handle:
        assert {name: handle[name].tolist() for name in handle} == {
            "blk.0.weight": [[0, 1, 2], [3, 4, 5]],
            "blk.0.bias": [1, -2, 3],
        }


def test_metadata_key_may_equal_a_tensor_name(tmp_path: Path) -> None:
    conversion = transload.convert(
        Forged({"w": ("int8", (1,), b"a")}, (("w", 8, text(b"hello")),)).data, tmp_path / "a.pt"
    )
    assert "hello" in Path(conversion.leftovers).read_text(encoding="utf-8")


def test_every_prefix_of_a_file_is_inspected() -> None:
    """No prefix raises an error or passes as intact, and complete tensors can still be read."""
    forged = small()
    for end in range(len(forged.data)):
        checkpoint = transload.inspect(forged.data[:end])
        if end < 8:
            assert checkpoint.integrity == "not-a-checkpoint"
            continue
        assert checkpoint.integrity == "damaged", end
        cut = "gguf-header-cut" if end < forged.header else "gguf-truncated"
        assert cut in {problem.code for problem in checkpoint.problems}, end
        assert bool(checkpoint.storages) == (end >= forged.header)
        assert "so does transload.load" in checkpoint.prediction
    with transload.open(forged.data[:-1], device="cpu") as handle:
        assert handle["blk.0.bias"].tolist() == [1, -2, 3]


def with_value(kind: int, value: bytes, count: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + text(b"key") + number("I", kind) + value


def with_offsets(**offsets: int) -> bytes:
    return Forged({name: ("float32", (8,), bytes(32)) for name in "abc"}, offsets=offsets).data


def with_shape(dtype: str, *shape: int) -> bytes:
    return Forged({"a": (dtype, shape, b"")}).data


HOSTILE: dict[str, tuple[bytes, str]] = {
    "more tensors than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0) + bytes(99), "gguf-header-cut"),
    "a billion tensors": (b"GGUF" + struct.pack("<IQQ", 3, 10**9, 0), "gguf-header-invalid"),
    "2**63 values": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "gguf-header-invalid"),
    "a name of 2**62 bytes": (with_value(8, struct.pack("<Q", 2**62)), "gguf-header-invalid"),
    "an array of 2**63 bytes": (with_value(9, struct.pack("<IQ", 0, 2**63)), "gguf-header-cut"),
    "an array of 2**40 strings": (with_value(9, struct.pack("<IQ", 8, 2**40)), "gguf-header-cut"),
    "strings that end beyond the file": (
        with_value(9, struct.pack("<IQ", 8, 12) + text(b"a") * 11 + struct.pack("<Q", 500)),
        "gguf-header-cut",
    ),
    "arrays in arrays": (with_value(9, struct.pack("<IQ", 9, 1) * 9 + bytes(12)), "gguf-header-invalid"),
    "unknown type of a value": (with_value(13, bytes(8)), "gguf-header-invalid"),
    "unknown type in an array": (with_value(9, struct.pack("<IQ", 77, 2**40)), "gguf-header-invalid"),
    "duplicate key": (with_value(0, b"\1", 2) + text(b"key") + number("I", 0) + b"\2", "gguf-duplicate-name"),
    "five dimensions": (with_shape("float32", 1, 1, 1, 1, 1), "gguf-header-invalid"),
    "2**64 elements": (with_shape("float32", 2**32, 2**32), "gguf-size-mismatch"),
    "half a block": (with_shape("Q4_0", 16), "gguf-size-mismatch"),
    "unknown type of a tensor": (with_shape("float3", 4), "gguf-type-unknown"),
    "outside the file": (with_offsets(c=2**40), "gguf-truncated"),
    "a hole": (with_offsets(c=128) + bytes(64), "gguf-hole"),
    "not aligned": (with_offsets(b=33, c=96) + bytes(32), "gguf-hole"),
    "overlapping": (with_offsets(b=0), "gguf-overlap"),
    "trailing bytes": (with_offsets() + bytes(64), "gguf-trailing"),
    "an alignment of 3": (
        small().data.replace(struct.pack("<2I", 4, 32), struct.pack("<2I", 4, 3)),
        "gguf-header-invalid",
    ),
}  # fmt: skip


def test_hostile_file_is_reported_quickly() -> None:
    def check(case: str) -> None:
        data, code = HOSTILE[case]
        started = time.process_time()
        checkpoint = transload.inspect(data)
        assert time.process_time() - started < 1
        assert code in {problem.code for problem in checkpoint.problems}
        assert (checkpoint.integrity == "damaged") == (code not in ("gguf-hole", "gguf-trailing"))
        if checkpoint.integrity == "damaged":
            with pytest.raises(LoadError):
                transload.load(data)

    for_each(HOSTILE, check)


def test_duplicate_tensor_name_is_reported() -> None:
    data = Forged({"a": ("int8", (4,), b"abcd"), "b": ("int8", (4,), b"efgh")}).data.replace(text(b"b"), text(b"a"))
    assert codes(data) >= {"gguf-duplicate-name"}


def test_tensor_name_that_is_not_utf8_is_escaped() -> None:
    data = Forged({"a": ("int8", (1,), b"a")}).data.replace(text(b"a"), text(b"\xff"))
    assert read(data).tensors[0].name == "\\xff"


def test_large_vocabulary_is_skipped_quickly() -> None:
    data = Forged({}, (("tokens", 9, vocabulary(100_000)), ("last", 0, b"\5"))).data
    started = time.process_time()
    checkpoint = read(data)
    assert time.process_time() - started < 0.5
    assert checkpoint.leaves[0].text.endswith("(100,000 in all)")
    assert checkpoint.leaves[1].text == "5"
    assert len(header_values(BytesSource(data))["tokens"]) == 100_000


def test_rescue_and_retag_reject_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small().data)
    with pytest.raises(RescueError, match="GGUF"):
        transload.rescue(path, tmp_path / "new.pt")
    with pytest.raises(transload.RetagError, match="carries no device"):
        transload.retag(path, "cpu")


def test_verify_hashes_quantized_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small().data)
    hashes = {tensor.name: tensor.sha256 for tensor in transload.verify(path, hashes=True).tensors}
    assert all(hashes.values())
    path.write_bytes(small().data[:-1] + b"\0")
    changed = {tensor.name: tensor.sha256 for tensor in transload.verify(path, hashes=True).tensors}
    assert {name for name in hashes if hashes[name] != changed[name]} == {"blk.1.weight"}


# -- against the gguf package


def write(gguf: Any, path: Path, *, big: bool) -> dict[str, Any]:
    """Write a file with the package, and return its arrays."""
    import numpy as np

    endian = gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_name("tiny")
    writer.add_float64("x.float", 1.5)
    writer.add_array("x.words", ["a", "b", "ü"])
    arrays = {
        name: np.arange(-7, 8).reshape(3, 5).astype(name)
        for name in TYPE_NUMBERS
        if name in ITEMSIZE and name != "bfloat16"
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array.copy())  # the writer swaps its bytes in place
    if not big:  # the writer does not swap the bytes of these
        wide = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
        for kind in (gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q6_K):
            try:
                data = gguf.quants.quantize(wide, kind)
            except NotImplementedError:
                block, nbytes = gguf.GGML_QUANT_SIZES[kind]
                data = np.zeros((2, 256 // block * nbytes), np.uint8)
            writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@each("big", [False, True])
def test_reader_agrees_with_the_gguf_package(big: bool, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    arrays = write(gguf, path, big=big)
    reference = gguf.GGUFReader(path)
    checkpoint = transload.inspect(path)
    assert checkpoint.ok
    assert [tensor.name for tensor in checkpoint.tensors] == [tensor.name for tensor in reference.tensors]
    for ours, expected in zip(checkpoint.tensors, reference.tensors, strict=True):
        assert (ours.shape, ours.nbytes) == (tuple(expected.shape.tolist()[::-1]), expected.n_bytes)
        assert ours.file_offset == expected.data_offset
    with transload.open(path, device="cpu") as handle:
        for name, array in arrays.items():
            assert handle[name].tolist() == array.tolist()
        assert handle.metadata["x.words"] == ["a", "b", "ü"]
        assert (handle.metadata["general.name"], handle.metadata["x.float"]) == ("tiny", 1.5)


def test_tensor_types_match_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    ours = {number: BLOCKS.get(name) or (1, ITEMSIZE[name]) for number, name in GGML.items()}
    assert ours == {kind.value: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    assert {
        GGML[kind.value] for kind in gguf.GGMLQuantizationType if kind.name in BLOCKS
    } == BLOCKS.keys() & GGML.values()
