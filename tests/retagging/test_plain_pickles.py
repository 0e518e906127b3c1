"""Retag of plain pickles: the tag of each tensor is in a stream inside the pickle."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.each import each, for_each
from tests.forge import pickled, text
from tests.formats.test_plain_pickles import as_bytes, plain, stream
from tests.loading.equal import assert_same
from tests.loading.zoo import save_with_tag

import transload
from transload.errors import RetagError
from transload.retagging import retag, undo

PROTOCOLS = range(6)


def checkpoint() -> dict[str, Any]:
    model = torch.nn.Linear(3, 4)
    return {"model": model.state_dict(), "note": "cuda:0", "large": torch.arange(30_000.0), "none": torch.zeros(0)}


def dump(obj: object, path: Path, protocol: int, tag: str = "cuda:0") -> Path:
    with save_with_tag(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(pickle.dumps(obj, protocol))
    return path


def tags(path: Path) -> set[str]:
    return {use.device for use in transload.inspect(path).devices}


@each("protocol", PROTOCOLS[1:])
def test_plain_pickle_is_patched_in_place_and_undone(protocol: int, tmp_path: Path) -> None:
    obj = checkpoint()
    path = dump(obj, tmp_path / "a.pkl", protocol)
    before = path.read_bytes()
    result = retag(path, "cpu", keep_undo=True)
    assert (result.method, result.grown, result.format) == ("patch", 0, "pickle")
    assert [(tag.old, tag.new, tag.storages) for tag in result.tags] == [("cuda:0", "cpu", 4)]
    assert tags(path) == {"cpu"}
    with path.open("rb") as file:
        assert_same(pickle.load(file), pickle.loads(pickle.dumps(obj)))
    assert undo(path).done
    assert path.read_bytes() == before


def test_longer_tag_in_a_plain_pickle_needs_a_copy(tmp_path: Path) -> None:
    def check(protocol: int) -> None:
        obj = checkpoint()
        path = dump(obj, tmp_path / f"{protocol}.pkl", protocol, "cpu")
        before = path.read_bytes()
        with pytest.raises(RetagError, match="plain pickle cannot grow"):
            retag(path, "cuda:12")
        copy = tmp_path / f"{protocol}.copy"
        result = retag(path, "cuda:12", out=copy)
        assert (result.method, result.grown > 0) == ("rewrite", True)
        assert path.read_bytes() == before
        assert tags(copy) == {"cuda:12"}
        assert retag(copy, "cpu", out=f"{copy}.2").changed
        copy = Path(f"{copy}.2")
        with copy.open("rb") as file:
            assert_same(pickle.load(file), pickle.loads(before))

    for_each(PROTOCOLS, check)


def test_tag_map_changes_only_the_named_tag(tmp_path: Path) -> None:
    path = dump({"a": torch.ones(3)}, tmp_path / "a.pkl", 4, "cuda:1")
    assert retag(path, {"cuda:0": "cpu"}).method == "none"
    assert retag(path, {"cuda:1": "cuda:0"}).method == "patch"
    assert tags(path) == {"cuda:0"}


def test_arrays_in_a_joblib_file_are_unchanged(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    obj = {"w": torch.ones(3), "a": np.arange(5.0), "v": torch.zeros(2)}
    path = tmp_path / "a.joblib"
    with save_with_tag("cuda:0"):
        joblib.dump(obj, path)
    assert retag(path, "cpu").method == "patch"
    assert joblib.load(path)["a"].tolist() == obj["a"].tolist()
    assert retag(path, "privateuseone:10", out=tmp_path / "copy").grown > 0
    assert tags(tmp_path / "copy") == {"privateuseone:10"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(joblib.load(path), transload.load(tmp_path / "copy"))
    packed = io.BytesIO()
    joblib.dump(obj, packed, compress=3)
    path.write_bytes(packed.getvalue())
    with pytest.raises(RetagError, match="zlib"):
        retag(path, "cpu")


def test_bytes_that_look_like_a_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    body = plain(stream())[2:-1]  # without PROTO and STOP
    path.write_bytes(pickled(b"(" + body + as_bytes(stream()) + text("x") + b"t", 3))
    before = path.read_bytes()
    with pytest.raises(RetagError, match="not named as torch names them"):
        retag(path, "cuda:0", out=tmp_path / "b.pkl")
    assert path.read_bytes() == before
