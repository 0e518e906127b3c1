"""Manifests: written whole or not at all, compared by name, never trusted to be what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from transload.errors import CannotReadError, ManifestError, UsageError
from transload.judge import inspect
from transload.verifying import Difference, TensorSum, hash_of_all, read_manifest, verify, write_manifest

VALUES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.ones(2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(VALUES, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def manifest(path: Path) -> Path:
    made = path.with_name("m.json")
    write_manifest(str(made), [verify(path, hashes=True)])
    return made


def test_a_manifest_is_json_and_comes_back(path: Path, manifest: Path) -> None:
    held = json.loads(manifest.read_text(encoding="ascii"))
    assert [file["path"] for file in held["files"]] == [str(path)]
    assert held["files"][0]["tensors"][0]["shape"] == [2, 3]
    (file,) = read_manifest(str(manifest)).files
    found = verify(path, hashes=True)
    assert (file.sha256, file.tensors) == (found.sha256, tuple(t._replace(nbytes=0) for t in found.tensors))


def test_the_same_tensors_in_another_container(path: Path, manifest: Path) -> None:
    other = path.with_name("other.safetensors")
    save_file(VALUES, other)
    found = verify(other, against=manifest)
    assert (found.ok, found.differences, found.manifest) == (True, (), str(manifest))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        pytest.param({**VALUES, "b": torch.arange(4) + 1}, ("b", "changed"), id="changed"),
        pytest.param({**VALUES, "b": torch.arange(4).int()}, ("b", "retyped"), id="dtype"),
        pytest.param({**VALUES, "a": torch.arange(6.0)}, ("a", "retyped"), id="shape"),
        pytest.param({**VALUES, "d": torch.ones(1)}, ("d", "added"), id="added"),
        pytest.param({"a": VALUES["a"], "c": VALUES["c"]}, ("b", "missing"), id="missing"),
    ],
)
def test_differences(values: dict[str, torch.Tensor], wanted: tuple[str, str], path: Path, manifest: Path) -> None:
    torch.save(values, path)
    found = verify(path, against=str(manifest))
    assert not found.ok
    assert found.integrity == "whole"
    assert [(each.name, each.what) for each in found.differences] == [wanted]


def test_two_tensors_of_one_name(path: Path) -> None:
    """A key may hold the slash that joins keys."""
    values = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    torch.save(values, path)
    made = str(path.with_name("m.json"))
    write_manifest(made, [verify(path, hashes=True)])
    assert verify(path, against=made).ok
    torch.save({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, path)
    assert [each.what for each in verify(path, against=made).differences] == ["changed"]


def test_several_files_are_told_apart(path: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    other = tmp_path / "sub" / "model.pt"
    torch.save({"z": torch.ones(1)}, other)
    made = str(tmp_path / "both.json")
    write_manifest(made, [verify(path, hashes=True), verify(other, hashes=True)])
    assert verify(path, against=made).ok
    assert verify(other, against=made).ok
    third = tmp_path / "third.pt"
    torch.save(VALUES, third)
    with pytest.raises(ManifestError, match="has no entry for"):
        verify(third, against=made)


def test_nothing_is_overwritten_and_nothing_damaged_is_written(path: Path, manifest: Path) -> None:
    before = manifest.read_bytes()
    found = verify(path, hashes=True)
    with pytest.raises(ManifestError, match="already"):
        write_manifest(str(manifest), [found])
    data = bytearray(path.read_bytes())
    data[inspect(path).tensor("a").file_offset or 0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(manifest), [verify(path, hashes=True)], overwrite=True)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(manifest), [verify(path)], overwrite=True)
    assert manifest.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["m.json", "model.pt"]


BAD: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"PK\x03\x04",
    "a list": b"[]",
    "another": b'{"schema": 2, "files": []}',
    "no files": b'{"schema": 1}',
    "a number for a name": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": 1, "dtype": "", "shape": [], '
        b'"sha256": ""}]}]}'
    ),
    "a text for a shape": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": "", "dtype": "", "shape": "x", '
        b'"sha256": ""}]}]}'
    ),
    "an infinite shape": (
        b'{"schema": 1, "files": [{"path": "x", "sha256": "", "tensors": [{"name": "", "dtype": "", "shape": [1e999], '
        b'"sha256": ""}]}]}'
    ),
    "no name of a file": b'{"schema": 1, "files": [{"path": "a\\u0000b", "sha256": "", "tensors": []}]}',
    "half a letter": b'{"schema": 1, "files": [{"path": "a\\ud800b", "sha256": "", "tensors": []}]}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_manifest(name: str, path: Path) -> None:
    bad = path.with_name("bad.json")
    bad.write_bytes(BAD[name])
    with pytest.raises(ManifestError, match="not a manifest"):
        verify(path, against=bad)


def test_what_is_not_hashed_is_not_written(path: Path) -> None:
    """Else it would be equal to whatever is there later."""
    torch.save({"x": torch.zeros(1).expand(1 << 30, 1 << 10)}, path)
    with pytest.raises(ManifestError, match="not written"):
        write_manifest(str(path.with_name("m.json")), [verify(path, hashes=True)])


def test_no_manifest_at_all(path: Path) -> None:
    with pytest.raises(CannotReadError):
        verify(path, against="absent.json")
    with pytest.raises(UsageError, match="path of a manifest"):
        verify(path, against=3)  # type: ignore[arg-type]


def test_the_hash_of_all_is_defined_to_the_byte() -> None:
    """docs/verify.md says how; whoever makes it another way shall get the same."""
    from hashlib import sha256

    tensors = [TensorSum("b", "int64", (2, 3), 48, "22"), TensorSum("ä", "float32", (), 4, "11")]
    text = '["b","int64",[2,3],"22"]\n["\\u00e4","float32",[],"11"]\n'
    assert hash_of_all(tensors) == hash_of_all(tensors[::-1]) == sha256(text.encode("ascii")).hexdigest()


def test_a_difference_is_plain_data() -> None:
    assert Difference("a", "added").to_dict() == {"name": "a", "what": "added", "detail": ""}
