from __future__ import annotations

import pytest
from tests.each import each

from transload.errors import UsageError
from transload.writing.plan import dtype_of, size_of, target_format


@each(
    ("name", "format_"),
    [
        ("a.safetensors", "safetensors"),
        ("a.SafeTensors", "safetensors"),
        ("a.safetensors.index.json", "safetensors"),
        ("a.pt", "torch"),
        ("b/a.pth", "torch"),
        ("a.ckpt", "torch"),
        ("pytorch_model.bin", "torch"),
        ("a.npz", "npz"),
        ("a/", "raw"),
    ],
)
def test_format_follows_from_the_file_name(name: str, format_: str) -> None:
    assert target_format(name) == format_


def test_explicit_format_overrides_the_file_name() -> None:
    assert target_format("a.pt", "npz") == "npz"
    with pytest.raises(UsageError, match="ONNX cannot be written"):
        target_format("a.pt", "onnx")
    with pytest.raises(UsageError, match="does not say"):
        target_format("a.xyz")


@each(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("5gib", 5 << 30),
        ("1.5 MB", 1_500_000),
        ("200", 200),
        (7, 7),
        (None, 0),
        ("", 0),
        ("3k", 3000),
    ],
)
def test_size_of_parses_units(text: str | int | None, nbytes: int) -> None:
    assert size_of(text) == nbytes


@each("text", ["0", "-5GB", "5XB", "GB", "1iB", "5 GB GB", "1e9", -3, "9" * 400])
def test_size_of_refuses_anything_else(text: str | int) -> None:
    with pytest.raises(UsageError, match="not a size"):
        size_of(text)


def test_dtype_of_accepts_aliases_of_floating_dtypes_only() -> None:
    assert [dtype_of(text) for text in ("bf16", "torch.float16", "FP32", "half", "")] == [
        "bfloat16",
        "float16",
        "float32",
        "float16",
        "",
    ]
    with pytest.raises(UsageError, match="'int8'"):
        dtype_of("int8")


def test_dtype_of_accepts_dtypes_of_torch_only() -> None:
    torch = pytest.importorskip("torch")
    assert (dtype_of(torch.float16), dtype_of(None)) == ("float16", "")
    for value in (torch.int8, float, 16, ["float16"]):
        with pytest.raises(UsageError, match="cannot convert to"):
            dtype_of(value)
