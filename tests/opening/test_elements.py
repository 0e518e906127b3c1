"""The bytes of tensors, compared with torch: every layout, every dtype, every container."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import each
from tests.makers import saved
from tests.shared import open_elements

from transload.checkpoint import Tensor
from transload.errors import ContentError
from transload.opening import elements as content_module
from transload.opening.elements import Allowance, ElementReader, FileRange

DATA = Path(__file__).parent.parent / "data"


def read(content: ElementReader, tensor: Tensor, size: int = 4 << 20) -> bytes:
    return b"".join(bytes(piece) for piece in content.chunks(tensor, size))


def torch_bytes(value: torch.Tensor) -> bytes:
    """The bytes of the contiguous tensor, from torch."""
    contiguous = value.resolve_conj().resolve_neg().contiguous().clone()
    return bytes(contiguous.reshape(-1).view(torch.uint8).numpy()) if contiguous.numel() else b""


def recorded_hashes() -> list[Any]:
    cases = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, expected in json.loads(index.read_text())["files"].items():
            cases.append(pytest.param(index.parent / name, expected["tensors"], id=f"{index.parent.name}/{name}"))
    return cases


@each(("path", "expected"), recorded_hashes())
def test_bytes_match_the_recorded_hashes_of_every_release(path: Path, expected: dict[str, Any]) -> None:
    with open_elements(path) as content:
        for tensor in content.checkpoint.tensors:
            digest = expected["/" + tensor.name]["sha256"]
            if tensor.kind == "strided" and digest is not None:
                assert hashlib.sha256(read(content, tensor)).hexdigest() == digest, tensor.name


def base() -> torch.Tensor:
    return torch.arange(24 * 30, dtype=torch.float32).reshape(24, 30)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unchanged": lambda t: t,
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[3:9],
    "columns": lambda t: t[:, 4:7],
    "every third": lambda t: t[::3, ::2],
    "one column": lambda t: t[:, 5],
    "three dimensions": lambda t: t.reshape(4, 6, 30).permute(2, 0, 1),
    "expanded outside": lambda t: t[:1].expand(7, 30),
    "expanded inside": lambda t: t[:, :1].expand(24, 9),
    "expanded between": lambda t: t[:, None, :].expand(24, 3, 30),
    "expanded single": lambda t: t[0, 0].expand(5, 8),
    "overlapping": lambda t: t.reshape(-1).unfold(0, 7, 2),
    "scalar": lambda t: t[2, 2],
    "empty": lambda t: t[:0],
}


@functools.cache
def saved_view(view: str, dtype: torch.dtype) -> tuple[bytes, bytes]:
    value = VIEWS[view](base().to(dtype))
    return saved({"x": value}), torch_bytes(value)


@each("threshold", [0, 1 << 40], ids=["with numpy", "without numpy"])
@each("window", [16, 128, 4096, 16 << 20])
@each("view", VIEWS)
def test_views_are_read_in_the_order_of_torch(
    view: str, window: int, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any size of window, with and without numpy."""
    monkeypatch.setattr(content_module, "_MANY", threshold)
    monkeypatch.setattr(content_module, "_LONG", threshold)
    monkeypatch.setattr(content_module, "WINDOW", window)
    monkeypatch.setattr(content_module, "_BLOCK", window)
    monkeypatch.setattr(content_module, "_PAGE", 64)
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex128):
        data, expected = saved_view(view, dtype)
        with open_elements(data) as content:
            tensor = content.checkpoint.tensor("x")
            for size in (16, 100, 4 << 20):
                assert read(content, tensor, size) == expected, (dtype, size)


def test_pieces_have_the_requested_size() -> None:
    with open_elements(saved({"x": base(), "y": base().t()})) as content:
        for tensor in content.checkpoint.tensors:
            assert [len(piece) for piece in content.chunks(tensor, 1024)] == [1024, 1024, 832]


DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


@each("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_is_read(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(96, dtype=torch.uint8)
    value = raw.view(dtype) if dtype is not torch.bool else raw % 2 == 0
    value = value.reshape(-1, 3).t()
    try:
        data = saved({"x": value})
    except KeyError as error:
        pytest.skip(f"this torch cannot save it: {error}")
    with open_elements(data) as content:
        assert read(content, content.checkpoint.tensor("x")) == torch_bytes(value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.tensor([1 + 2j, -3 - 0.5j, 4j]).conj(), id="conjugated"),
        pytest.param(torch.tensor([1 + 2j, -3 - 0.5j]).conj().imag, id="negated"),
        pytest.param(torch._neg_view(torch.tensor([1 + 2j, 3 - 1j]).conj()), id="both"),
        pytest.param(torch._neg_view(torch.tensor([1, -2, 0, -(1 << 31)], dtype=torch.int32)), id="negated integers"),
    ],
)
def test_conjugate_and_negative_views_are_resolved(value: torch.Tensor) -> None:
    with open_elements(saved({"x": value})) as content:
        tensor = content.checkpoint.tensor("x")
        assert tensor.flags
        assert read(content, tensor) == torch_bytes(value)
        assert content.file_range(tensor) is None


def big_endian(dtype: str, kind: str, numel: int, width: int) -> tuple[bytes, bytes]:
    """An archive of a big-endian tensor, and its bytes in little-endian order."""
    numbers = [bytes(range(width * i, width * (i + 1))) for i in range(numel)]
    parts = 2 if dtype.startswith("complex") else 1
    part_width = width // parts
    swapped = b"".join(number[p * part_width : (p + 1) * part_width][::-1] for number in numbers for p in range(parts))
    tensor = forge.tensor(shape=(numel // 2, 2), stride=(1, numel // 2), storage=forge.storage_id("0", numel, kind))
    entries = forge.entries(forge.pickled(forge.ordered({"x": tensor})), {"0": swapped})
    order = [numbers[row + numel // 2 * column] for row in range(numel // 2) for column in range(2)]
    return forge.archive(forge.with_changes(entries, "byteorder", data=b"big")), b"".join(order)


@each(
    ("dtype", "kind", "width"),
    [
        pytest.param("float32", "FloatStorage", 4, id="float32"),
        pytest.param("float64", "DoubleStorage", 8, id="float64"),
        pytest.param("bfloat16", "BFloat16Storage", 2, id="bfloat16"),
        pytest.param("int8", "CharStorage", 1, id="int8"),
        pytest.param("complex64", "ComplexFloatStorage", 8, id="complex64"),
        pytest.param("complex128", "ComplexDoubleStorage", 16, id="complex128"),
    ],
)
def test_big_endian_tensors_are_read(dtype: str, kind: str, width: int) -> None:
    data, expected = big_endian(dtype, kind, 12, width)
    with open_elements(data) as content:
        tensor = content.checkpoint.tensor("x")
        assert tensor.dtype == dtype
        assert read(content, tensor) == expected


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return out.getvalue()


def test_deflated_records_are_read() -> None:
    values = {"x": base(), "y": base().t(), "z": base()[5:]}
    with open_elements(deflated(saved(values))) as content:
        for tensor in content.checkpoint.tensors:
            assert content.file_range(tensor) is None
            assert read(content, tensor, 512) == torch_bytes(values[tensor.name])


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_file_range_locates_the_bytes(options: dict[str, Any]) -> None:
    value = base()
    data = saved({"whole": value, "rows": value[3:9], "columns": value[:, 2:4], "none": value[:0]}, **options)
    with open_elements(data) as content:
        for name in ("whole", "rows"):
            tensor = content.checkpoint.tensor(name)
            location = content.file_range(tensor)
            assert location is not None
            assert data[location.offset : location.offset + location.nbytes] == read(content, tensor)
        assert content.file_range(content.checkpoint.tensor("columns")) is None
        empty_range = content.file_range(content.checkpoint.tensor("none"))
        assert empty_range is not None
        assert not empty_range.nbytes


def test_shards_are_read_from_their_files(tmp_path: Path) -> None:
    values = {"a": torch.arange(5.0), "b": torch.arange(6).reshape(2, 3).t()}
    weights = {}
    for number, (name, value) in enumerate(values.items(), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: value}, tmp_path / file)
        weights[name] = file
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        with open_elements(path) as content:
            assert {t.name: read(content, t) for t in content.checkpoint.tensors} == {
                name: torch_bytes(value) for name, value in values.items()
            }
            location = content.file_range(content.checkpoint.tensor("a"))
            assert isinstance(location, FileRange)
            assert location.file == weights["a"]


def test_unpacked_archive_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"x": base(), "y": base().t().clone()}))) as archive:
        archive.extractall(tmp_path)
    with open_elements(tmp_path) as content:
        assert read(content, content.checkpoint.tensor("x")) == torch_bytes(base())
        assert read(content, content.checkpoint.tensor("y")) == torch_bytes(base().t())


def test_missing_bytes_are_an_error_that_names_the_tensor() -> None:
    data = saved({"one": torch.arange(50), "two": torch.arange(50)}, _use_new_zipfile_serialization=False)
    with open_elements(data[:-100]) as content:
        first, last = sorted(content.checkpoint.tensors, key=lambda tensor: tensor.file_offset or 0)
        assert read(content, first) == torch_bytes(torch.arange(50))
        assert content.missing(first) == ""
        with pytest.raises(ContentError, match=last.name):
            read(content, last)
        assert content.missing(last) == "300 of 400 bytes of its storage are in the file"
        assert content.file_range(last) is None


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": base(), "y": base().t()}, path)
    with open_elements(path) as content:
        path.write_bytes(path.read_bytes()[:1500])
        for name in ("x", "y"):
            with pytest.raises(ContentError, match=name):
                read(content, content.checkpoint.tensor(name))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensor_without_plain_bytes_is_an_error(value: Callable[[], torch.Tensor]) -> None:
    with open_elements(saved({"odd": value()})) as content:
        tensor = content.checkpoint.tensor("odd")
        assert content.file_range(tensor) is None
        with pytest.raises(ContentError, match="odd is "):
            read(content, tensor)


def test_tensor_that_claims_more_than_the_file_holds_is_refused() -> None:
    with open_elements(saved({"x": torch.zeros(1).expand(1 << 20, 1 << 20), "y": torch.ones(3)})) as content:
        allowance = Allowance(content.checkpoint)
        allowance.spend(content.checkpoint.tensor("y"))
        with pytest.raises(ContentError, match="x claims 4,398,046,511,104 bytes"):
            allowance.spend(content.checkpoint.tensor("x"))
        first = next(content.chunks(content.checkpoint.tensor("x")))
        assert bytes(first) == bytes(4 << 20)
