"""The record of a file's origin, from us and from people who mean no good."""

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


def test_all_of_it_is_told() -> None:
    found = read(FULL)
    assert found["torch"] == "2.13.0+cu130"
    assert found["gpus"] == "2 × NVIDIA H200 (9.0)"
    assert found["saved from"] == "cuda:1 (5 storages), cpu (1 storage)"
    assert (found["run"], found["note"]) == ("7", "ü")


@each(
    "data",
    [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"[1]", b'"x"', b'{"schema": "1"}', b" " * (MAX_RECORD + 1)],
    ids=["empty", "no text", "deep", "no schema", "list", "text", "wrong schema", "long"],
)
def test_what_is_not_ours_is_nothing(data: bytes) -> None:
    assert read_recorded(data) == ()


@each("name", list(FULL))
@each("value", [None, 3, "x", [], [3], [[]], [["x"]], [["x", "y"]], {}, {"a": []}, [{}], [{"name": 3}]], ids=str)
def test_a_value_of_another_kind_is_left_out(name: str, value: Any) -> None:
    found = read({**FULL, name: value})
    assert all(isinstance(each, str) for pair in found.items() for each in pair)


def test_what_is_shown_is_bounded() -> None:
    many = {
        **FULL,
        "entries": {str(n): "x" * 10_000 for n in range(50)},
        "storages": [[f"d{n}", 1] for n in range(9999)],
    }
    found = read(many)
    assert found["saved from"].count("1 storage") == 64
    assert max(len(found[str(n)]) for n in range(50)) <= 201


def test_it_reads_what_is_saved() -> None:
    torch = pytest.importorskip("torch")
    from transload.saving import save

    held = io.BytesIO()
    save([torch.rand(3)], held, origin={"run": [1, 2]})
    with zipfile.ZipFile(held) as archive:
        found = dict(read_recorded(archive.read(f"archive/{RECORD}")))
    assert found["run"] == "[1, 2]"
    assert found["saved from"] == "cpu (1 storage)"
    assert found["torch"] == str(torch.__version__)
