"""Manifests: written completely or not at all, compared by name, and checked before use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.file_server import serve

from transload.errors import CannotReadError, ManifestError, MissingFileError, UsageError
from transload.opening import inspect
from transload.opening.digests import Difference, TensorSum, hash_of_all
from transload.verifying import read_manifest, verify, write_manifest

VALUES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.ones(2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(VALUES, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def manifest(path: Path) -> Path:
    file = path.with_name("m.json")
    write_manifest(str(file), [verify(path, hashes=True)])
    return file


def test_manifest_is_json_and_can_be_read_back(path: Path, manifest: Path) -> None:
    content = json.loads(manifest.read_text(encoding="ascii"))
    assert [file["path"] for file in content["files"]] == [str(path)]
    assert content["files"][0]["tensors"][0]["shape"] == [2, 3]
    (file,) = read_manifest(str(manifest)).files
    result = verify(path, hashes=True)
    assert (file.sha256, file.tensors) == (result.sha256, tuple(t._replace(nbytes=0) for t in result.tensors))


def test_same_tensors_in_another_container_match(path: Path, manifest: Path) -> None:
    other = path.with_name("other.safetensors")
    save_file(VALUES, other)
    result = verify(other, against=manifest)
    assert (result.ok, result.differences, result.manifest) == (True, (), str(manifest))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({**VALUES, "b": torch.arange(4) + 1}, ("b", "changed"), id="changed"),
        pytest.param({**VALUES, "b": torch.arange(4).int()}, ("b", "retyped"), id="dtype"),
        pytest.param({**VALUES, "a": torch.arange(6.0)}, ("a", "retyped"), id="shape"),
        pytest.param({**VALUES, "d": torch.ones(1)}, ("d", "added"), id="added"),
        pytest.param({"a": VALUES["a"], "c": VALUES["c"]}, ("b", "missing"), id="missing"),
    ],
)
def test_difference_from_the_manifest_is_reported(
    values: dict[str, torch.Tensor], expected: tuple[str, str], path: Path, manifest: Path
) -> None:
    torch.save(values, path)
    result = verify(path, against=str(manifest))
    assert not result.ok
    assert result.integrity == "whole"
    assert [(difference.name, difference.what) for difference in result.differences] == [expected]


def test_two_tensors_with_the_same_name_are_compared(path: Path) -> None:
    """A key may contain the slash that joins keys."""
    values = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    torch.save(values, path)
    manifest_path = str(path.with_name("m.json"))
    write_manifest(manifest_path, [verify(path, hashes=True)])
    assert verify(path, against=manifest_path).ok
    torch.save({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, path)
    assert [difference.what for difference in verify(path, against=manifest_path).differences] == ["changed"]


def test_entries_of_several_files_are_found_by_path(path: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    other = tmp_path / "sub" / "model.pt"
    torch.save({"z": torch.ones(1)}, other)
    manifest_path = str(tmp_path / "both.json")
    write_manifest(manifest_path, [verify(path, hashes=True), verify(other, hashes=True)])
    assert verify(path, against=manifest_path).ok
    assert verify(other, against=manifest_path).ok
    third = tmp_path / "third.pt"
    torch.save(VALUES, third)
    with pytest.raises(ManifestError, match="has no entry for"):
        verify(third, against=manifest_path)


def test_manifest_needs_overwrite_and_an_intact_hashed_file(path: Path, manifest: Path) -> None:
    before = manifest.read_bytes()
    result = verify(path, hashes=True)
    with pytest.raises(ManifestError, match="already"):
        write_manifest(str(manifest), [result])
    data = bytearray(path.read_bytes())
    data[inspect(path).tensor("a").file_offset or 0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(manifest), [verify(path, hashes=True)], overwrite=True)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(manifest), [verify(path)], overwrite=True)
    assert manifest.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["m.json", "model.pt"]


MALFORMED: dict[str, Any] = {
    "empty": b"",
    "not JSON": b"PK\x03\x04",
    "a list": b"[]",
    "another schema": b'{"schema": 2, "files": []}',
    "no files": b'{"schema": 1}',
    "a number for a name": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": 1, "dtype": "", "shape": [], '
        b'"sha256": ""}]}]}'
    ),
    "a string for a shape": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": "", "dtype": "", "shape": "x", '
        b'"sha256": ""}]}]}'
    ),
    "an infinite shape": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": "", "dtype": "", "shape": [1e999], '
        b'"sha256": ""}]}]}'
    ),
    "NUL in a path": b'{"schema": 1, "files": [{"path": "a\\u0000b", "sha256": "", "tensors": []}]}',
    "lone surrogate in a path": b'{"schema": 1, "files": [{"path": "a\\ud800b", "sha256": "", "tensors": []}]}',
    "deep nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifest_is_refused(name: str, path: Path) -> None:
    if os.name == "nt" and "surrogate" in name:
        pytest.skip("Windows has such names")
    bad = path.with_name("bad.json")
    bad.write_bytes(MALFORMED[name])
    with pytest.raises(ManifestError, match="not a manifest"):
        verify(path, against=bad)


def test_a_directory_is_no_manifest(path: Path) -> None:
    with pytest.raises(ManifestError, match="not a manifest"):
        verify(path, against=path.parent)


def test_manifest_with_an_unhashed_tensor_is_not_written(path: Path) -> None:
    """Otherwise it would match any later content."""
    torch.save({"x": torch.zeros(1).expand(1 << 30, 1 << 10)}, path)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(path.with_name("m.json")), [verify(path, hashes=True)])


def test_manifest_at_a_url(path: Path, manifest: Path) -> None:
    with serve({"m.json": manifest.read_bytes(), "page.json": b"<html>", "model.pt": path.read_bytes()}) as server:
        url = f"{server.url.replace('//', '//me:pw@')}/m.json?sig=1"
        for file in (path, f"{server.url}/model.pt"):
            result = verify(file, against=url)
            assert (result.ok, result.sha256 != "", result.manifest) == (True, True, f"{server.url}/m.json")
        for name in ("page.json", "model.pt"):
            with pytest.raises(ManifestError, match="not a manifest"):
                verify(path, against=f"{server.url}/{name}")
        with pytest.raises(MissingFileError):
            verify(path, against=f"{server.url}/none.json")


def test_missing_manifest_is_an_error(path: Path) -> None:
    with pytest.raises(CannotReadError):
        verify(path, against="absent.json")
    with pytest.raises(UsageError, match="path of a manifest"):
        verify(path, against=3)  # type: ignore[arg-type]


def test_hash_of_all_follows_the_documented_definition() -> None:
    """docs/verify.md defines it, so that other programs can compute the same hash."""
    from hashlib import sha256

    tensors = [TensorSum("b", "int64", (2, 3), 48, "22"), TensorSum("ä", "float32", (), 4, "11")]
    text = '["b","int64",[2,3],"22"]\n["\\u00e4","float32",[],"11"]\n'
    assert hash_of_all(tensors) == hash_of_all(tensors[::-1]) == sha256(text.encode("ascii")).hexdigest()


def test_difference_converts_to_a_dict() -> None:
    assert Difference("a", "added").to_dict() == {"name": "a", "what": "added", "detail": ""}
