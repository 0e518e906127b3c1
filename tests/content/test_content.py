"""The elements of tensors against torch itself: every layout, every dtype, every container."""

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

from transload.checkpoint import Tensor
from transload.errors import ContentError
from transload.tensors import content as axes
from transload.tensors.content import Allowance, Content, FileRange, open_content

DATA = Path(__file__).parent.parent / "data"


def saved(value: object, **how: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def taken(content: Content, tensor: Tensor, size: int = 4 << 20) -> bytes:
    return b"".join(bytes(piece) for piece in content.pieces(tensor, size))


def plain(value: torch.Tensor) -> bytes:
    """The bytes of a tensor as torch lays them out."""
    made = value.resolve_conj().resolve_neg().contiguous().clone()
    return bytes(made.reshape(-1).view(torch.uint8).numpy()) if made.numel() else b""


def truths() -> list[Any]:
    out = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, wanted in json.loads(index.read_text())["files"].items():
            out.append(pytest.param(index.parent / name, wanted["tensors"], id=f"{index.parent.name}/{name}"))
    return out


@each(("path", "wanted"), truths())
def test_every_release_has_the_bytes_it_had(path: Path, wanted: dict[str, Any]) -> None:
    with open_content(path) as content:
        for tensor in content.checkpoint.tensors:
            truth = wanted["/" + tensor.name]["sha256"]
            if tensor.kind == "strided" and truth is not None:
                assert hashlib.sha256(taken(content, tensor)).hexdigest() == truth, tensor.name


def base() -> torch.Tensor:
    return torch.arange(24 * 30, dtype=torch.float32).reshape(24, 30)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
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
    return saved({"x": value}), plain(value)


@each("many", [0, 1 << 40], ids=["numpy", "alone"])
@each("window", [16, 128, 4096, 16 << 20])
@each("view", VIEWS)
def test_views(view: str, window: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits into memory at once, and whoever moves the elements, the order is torch's."""
    monkeypatch.setattr(axes, "_MANY", many)
    monkeypatch.setattr(axes, "_LONG", many)
    monkeypatch.setattr(axes, "WINDOW", window)
    monkeypatch.setattr(axes, "_BLOCK", window)
    monkeypatch.setattr(axes, "_PAGE", 64)
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex128):
        data, expected = saved_view(view, dtype)
        with open_content(data) as content:
            tensor = content.checkpoint.tensor("x")
            for size in (16, 100, 4 << 20):
                assert taken(content, tensor, size) == expected, (dtype, size)


def test_pieces_are_of_the_size_asked_for() -> None:
    with open_content(saved({"x": base(), "y": base().t()})) as content:
        for tensor in content.checkpoint.tensors:
            assert [len(piece) for piece in content.pieces(tensor, 1024)] == [1024, 1024, 832]


DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


@each("name", [name for name in DTYPES if hasattr(torch, name)])
def test_dtypes(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(96, dtype=torch.uint8)
    value = raw.view(dtype) if dtype is not torch.bool else raw % 2 == 0
    value = value.reshape(-1, 3).t()
    try:
        data = saved({"x": value})
    except KeyError as error:
        pytest.skip(f"this torch cannot save it: {error}")
    with open_content(data) as content:
        assert taken(content, content.checkpoint.tensor("x")) == plain(value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.tensor([1 + 2j, -3 - 0.5j, 4j]).conj(), id="conjugated"),
        pytest.param(torch.tensor([1 + 2j, -3 - 0.5j]).conj().imag, id="negated"),
        pytest.param(torch._neg_view(torch.tensor([1 + 2j, 3 - 1j]).conj()), id="both"),
        pytest.param(torch._neg_view(torch.tensor([1, -2, 0, -(1 << 31)], dtype=torch.int32)), id="integers"),
    ],
)
def test_flags_are_resolved(value: torch.Tensor) -> None:
    with open_content(saved({"x": value})) as content:
        tensor = content.checkpoint.tensor("x")
        assert tensor.flags
        assert taken(content, tensor) == plain(value)
        assert content.file_range(tensor) is None


def big_endian(dtype: str, kind: str, numel: int, width: int) -> tuple[bytes, bytes]:
    """An archive of a tensor in the other order, and the bytes the tensor has."""
    numbers = [bytes(range(width * i, width * (i + 1))) for i in range(numel)]
    parts = 2 if dtype.startswith("complex") else 1
    half = width // parts
    turned = b"".join(number[p * half : (p + 1) * half][::-1] for number in numbers for p in range(parts))
    held = forge.tensor(shape=(numel // 2, 2), stride=(1, numel // 2), storage=forge.storage_id("0", numel, kind))
    made = forge.entries(forge.pickled(forge.ordered({"x": held})), {"0": turned})
    order = [numbers[row + numel // 2 * column] for row in range(numel // 2) for column in range(2)]
    return forge.archive(forge.remade(made, "byteorder", data=b"big")), b"".join(order)


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
def test_the_other_byte_order(dtype: str, kind: str, width: int) -> None:
    data, wanted = big_endian(dtype, kind, 12, width)
    with open_content(data) as content:
        tensor = content.checkpoint.tensor("x")
        assert tensor.dtype == dtype
        assert taken(content, tensor) == wanted


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return out.getvalue()


def test_deflated_records() -> None:
    values = {"x": base(), "y": base().t(), "z": base()[5:]}
    with open_content(deflated(saved(values))) as content:
        for tensor in content.checkpoint.tensors:
            assert content.file_range(tensor) is None
            assert taken(content, tensor, 512) == plain(values[tensor.name])


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_a_run_is_where_the_bytes_lie(how: dict[str, Any]) -> None:
    value = base()
    data = saved({"whole": value, "rows": value[3:9], "columns": value[:, 2:4], "none": value[:0]}, **how)
    with open_content(data) as content:
        for name in ("whole", "rows"):
            tensor = content.checkpoint.tensor(name)
            run = content.file_range(tensor)
            assert run is not None
            assert data[run.offset : run.offset + run.nbytes] == taken(content, tensor)
        assert content.file_range(content.checkpoint.tensor("columns")) is None
        empty = content.file_range(content.checkpoint.tensor("none"))
        assert empty is not None
        assert not empty.nbytes


def test_shards_are_read_from_their_files(tmp_path: Path) -> None:
    values = {"a": torch.arange(5.0), "b": torch.arange(6).reshape(2, 3).t()}
    weights = {}
    for number, (name, value) in enumerate(values.items(), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: value}, tmp_path / file)
        weights[name] = file
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        with open_content(path) as content:
            assert {t.name: taken(content, t) for t in content.checkpoint.tensors} == {
                name: plain(value) for name, value in values.items()
            }
            run = content.file_range(content.checkpoint.tensor("a"))
            assert isinstance(run, FileRange)
            assert run.file == weights["a"]


def test_an_unpacked_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"x": base(), "y": base().t().clone()}))) as archive:
        archive.extractall(tmp_path)
    with open_content(tmp_path) as content:
        assert taken(content, content.checkpoint.tensor("x")) == plain(base())
        assert taken(content, content.checkpoint.tensor("y")) == plain(base().t())


def test_missing_bytes_are_an_error_that_names_the_tensor() -> None:
    data = saved({"one": torch.arange(50), "two": torch.arange(50)}, _use_new_zipfile_serialization=False)
    with open_content(data[:-100]) as content:
        first, last = sorted(content.checkpoint.tensors, key=lambda tensor: tensor.file_offset or 0)
        assert taken(content, first) == plain(torch.arange(50))
        assert content.missing(first) == ""
        with pytest.raises(ContentError, match=last.name):
            taken(content, last)
        assert content.missing(last) == "300 of 400 bytes of its storage are in the file"
        assert content.file_range(last) is None


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": base(), "y": base().t()}, path)
    with open_content(path) as content:
        path.write_bytes(path.read_bytes()[:1500])
        for name in ("x", "y"):
            with pytest.raises(ContentError, match=name):
                taken(content, content.checkpoint.tensor(name))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_run_of_numbers_is_said(value: Callable[[], torch.Tensor]) -> None:
    with open_content(saved({"odd": value()})) as content:
        tensor = content.checkpoint.tensor("odd")
        assert content.file_range(tensor) is None
        with pytest.raises(ContentError, match="odd is "):
            taken(content, tensor)


def test_what_claims_more_than_the_file_holds() -> None:
    with open_content(saved({"x": torch.zeros(1).expand(1 << 20, 1 << 20), "y": torch.ones(3)})) as content:
        allowance = Allowance(content.checkpoint)
        allowance.spend(content.checkpoint.tensor("y"))
        with pytest.raises(ContentError, match="x claims 4,398,046,511,104 bytes"):
            allowance.spend(content.checkpoint.tensor("x"))
        first = next(content.pieces(content.checkpoint.tensor("x")))
        assert bytes(first) == bytes(4 << 20)
