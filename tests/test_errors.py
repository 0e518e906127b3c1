"""Errors: their fields survive pickling, and all functions raise the same ones."""

from __future__ import annotations

import pickle
from errno import ENOENT
from pathlib import Path

import pytest
import torch
from tests.each import each

import transload
from transload import errors
from transload.errors import (
    BrokenFileError,
    CannotReadError,
    DoesNotFitError,
    MissingFileError,
    TransloadError,
    UsageError,
)


@each("kind", [TransloadError, UsageError, CannotReadError, BrokenFileError, DoesNotFitError])
def test_error_fields_survive_pickling(kind: type[TransloadError]) -> None:
    error = kind("what", where="where", fix="fix")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.fix, str(copy)) == ("what", "where", "fix", str(error))


def test_errno_of_a_missing_file_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(MissingFileError("no such file", where="x", errno=2)))
    assert isinstance(copy, FileNotFoundError)
    assert copy.errno == 2


@each("function", ["check", "convert", "inspect", "load", "load_into", "open", "rescue", "retag", "verify"])
def test_missing_file_raises_a_file_not_found_error(function: str, tmp_path: Path) -> None:
    """Every function raises it."""
    call = getattr(transload, function)
    path = tmp_path / "absent.pt"
    arguments: list[object] = [torch.nn.Linear(1, 1), path] if function == "load_into" else [path]
    if function in ("convert", "rescue", "retag"):
        arguments.append("cpu" if function == "retag" else tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError) as caught:
        call(*arguments)
    assert isinstance(caught.value, transload.CannotReadError)
    assert caught.value.errno == ENOENT


def test_every_public_error_is_exported() -> None:
    internal = {"ContentError", "Malformed"}  # open and verify convert the first; the second is a BrokenFileError
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    public = {name for name in classes if not name.startswith("_")} - internal
    assert public == set(errors.__all__)  # for type checkers
    assert public <= set(dir(transload))


def test_every_error_shows_what_it_says() -> None:
    """That of ``OSError`` shows nothing, since its own fields are empty."""
    for kind in (MissingFileError, UsageError):
        assert repr(kind("no", where="x", fix="y")) == f"{kind.__name__}('no', where='x', fix='y')"
