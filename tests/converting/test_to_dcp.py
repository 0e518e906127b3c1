"""From one file to a cluster: ``--to dcp`` writes what torch.distributed.checkpoint loads, in pieces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.makers import saved

from transload.converting import convert
from transload.errors import ConvertError, UsageError
from transload.writing import to_dcp

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils", reason="torch 2.1 and 2.2 lack it")


def read_by_torch(folder: Path) -> Any:
    """The object in a directory, as torch puts it together."""
    out = folder.with_suffix(".pt")
    format_utils.dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == [str(key) for key in expected]
        for found, wanted in zip(actual.values(), expected.values(), strict=True):
            assert_equal(found, wanted)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for found, wanted in zip(actual, expected, strict=True):
            assert_equal(found, wanted)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def test_torch_reads_the_object_that_was_saved(tmp_path: Path) -> None:
    shared = torch.arange(35.0).reshape(5, 7)
    value = {
        "model": {"a.weight": shared, "tied": shared, "view": shared.t(), "empty": torch.empty(0, 3)},
        "optim": {"state": {0: {"step": torch.tensor(2.5), "exp_avg": torch.ones(3).bfloat16()}}},
        "groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": []}],
        "mixed": [torch.ones(3, dtype=torch.complex64), [torch.tensor([True])], "text"],
        "history": [0.5, [0.25]],
        "nothing": {},
        "pair": (torch.arange(4), "x", {"y": torch.zeros(2)}),
        "epoch": 3,
    }
    written = convert(saved(value), tmp_path / "dcp", to="dcp")
    assert written.complete
    assert written.tensors == 10
    assert_equal(read_by_torch(tmp_path / "dcp"), value)


def test_rows_are_split_into_a_power_of_two_of_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_dcp, "SPLIT", 100)
    value = {
        "even": torch.randn(16, 5),
        "uneven": torch.randn(7, 11),
        "row": torch.randn(1, 60),
        "flat": torch.randn(65),
    }
    convert(saved(value), tmp_path / "dcp", to="dcp", dtype="float64")
    assert_equal(read_by_torch(tmp_path / "dcp"), {name: tensor.double() for name, tensor in value.items()})
    metadata = dcp.FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    rows = {name: [chunk.sizes[0] for chunk in entry.chunks] for name, entry in metadata.items()}
    assert rows == {"even": [2] * 8, "uneven": [1] * 7, "row": [1], "flat": [9, 9, 9, 9, 9, 9, 9, 2]}


def test_a_key_chooses_what_is_written(tmp_path: Path) -> None:
    value = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": torch.ones(2)}}
    written = convert(saved(value), tmp_path / "dcp", to="dcp", key="model")
    assert_equal(read_by_torch(tmp_path / "dcp"), dict(value["model"]))
    assert written.others == 1
    assert any("_metadata" in note for note in written.notes)


def test_what_the_format_cannot_store_is_refused_or_reported(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="not a dictionary"):
        convert(saved([torch.ones(1)]), tmp_path / "list", to="dcp")
    with pytest.raises(ConvertError, match=r"two values would be called 'a\.b'"):
        convert(saved({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}), tmp_path / "twice", to="dcp")
    assert not [*tmp_path.iterdir()]
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    written = convert(saved({"q": quantized, "w": torch.ones(2)}), tmp_path / "lossy", to="dcp")
    assert not written.complete
    assert [omission.name for omission in written.left] == ["q"]


def test_only_such_a_directory_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    convert(saved({"w": torch.ones(2)}), folder, to="dcp")
    with pytest.raises(UsageError, match="already exists"):
        convert(saved({"w": torch.zeros(2)}), folder, to="dcp")
    convert(saved({"w": torch.zeros(2)}), folder, to="dcp", overwrite=True)
    assert_equal(read_by_torch(folder), {"w": torch.zeros(2)})
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        convert(saved({"w": torch.ones(2)}), folder, to="dcp", overwrite=True)


def test_a_disk_that_changes_bytes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def spoil(descriptor: int) -> None:
        fsync(descriptor)
        (data,) = tmp_path.glob(".dcp*/__0_0.distcp")
        raw = bytearray(data.read_bytes())
        at = raw.find(torch.full((100,), 0.5).numpy().tobytes())
        raw[at] ^= 1
        data.write_bytes(raw)
        monkeypatch.setattr(os, "fsync", fsync)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(ConvertError, match="differ from what was written"):
        convert(saved({"w": torch.full((100,), 0.5)}), tmp_path / "dcp", to="dcp")
    assert not [*tmp_path.iterdir()]
