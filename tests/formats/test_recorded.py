"""The origin record of a file: written by transload, malformed, or hostile."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
from tests.each import each

from transload.formats.origin_record import MAX_RECORD, read_recorded
from transload.formats.torch_zip import RECORD

FULL: dict[str, Any] = {
    "schema": 1,
    "transload": "0.1.0",
    "torch": "2.13.0+cu130",
    "python": "3.11.7",
    "cuda": "13.0",
    "system": "linux",
    "machine": "x86_64",
    "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "memory": 150_000_000_000}] * 2,
    "driver": "580.159.04",
    "time": "2026-11-15T09:37:18Z",
    "storages": [["cuda:1", 3], ["cpu", 1], ["cuda:1", 2]],
    "entries": {"run": 7, "note": "ü"},
}


def read(value: Any) -> dict[str, str]:
    return dict(read_recorded(json.dumps(value).encode()))


def test_all_fields_are_read() -> None:
    recorded = read(FULL)
    assert recorded["torch"] == "2.13.0+cu130"
    assert recorded["gpus"] == "2 × NVIDIA H200 (9.0)"
    assert recorded["saved from"] == "cuda:1 (5 storages), cpu (1 storage)"
    assert (recorded["run"], recorded["note"]) == ("7", "ü")


@each(
    "data",
    [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"[1]", b'"x"', b'{"schema": "1"}', b" " * (MAX_RECORD + 1)],
    ids=["empty", "not text", "deep", "no schema", "list", "text", "wrong schema", "long"],
)
def test_invalid_record_is_ignored(data: bytes) -> None:
    assert read_recorded(data) == ()


@each("name", list(FULL))
@each("value", [None, 3, "x", [], [3], [[]], [["x"]], [["x", "y"]], {}, {"a": []}, [{}], [{"name": 3}]], ids=str)
def test_fields_of_any_type_give_only_strings(name: str, value: Any) -> None:
    recorded = read({**FULL, name: value})
    assert all(isinstance(text, str) for pair in recorded.items() for text in pair)


def test_long_record_is_shortened() -> None:
    many = {
        **FULL,
        "entries": {str(n): "x" * 10_000 for n in range(50)},
        "storages": [[f"d{n}", 1] for n in range(9999)],
    }
    recorded = read(many)
    assert recorded["saved from"].count("1 storage") == 64
    assert max(len(recorded[str(n)]) for n in range(50)) <= 201


def test_record_written_by_save_is_read() -> None:
    torch = pytest.importorskip("torch")
    from transload.saving import save

    buffer = io.BytesIO()
    save([torch.rand(3)], buffer, origin={"run": [1, 2]})
    with zipfile.ZipFile(buffer) as archive:
        recorded = dict(read_recorded(archive.read(f"archive/{RECORD}")))
    assert recorded["run"] == "[1, 2]"
    assert recorded["saved from"] == "cpu (1 storage)"
    assert recorded["torch"] == str(torch.__version__)
