"""Errors: they travel between processes whole."""

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
def test_an_error_survives_pickle(kind: type[TransloadError]) -> None:
    error = kind("what", where="where", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.where, again.fix, str(again)) == ("what", "where", "fix", str(error))


def test_the_number_of_a_system_error_survives_too() -> None:
    again = pickle.loads(pickle.dumps(MissingFileError("no such file", where="x", errno=2)))
    assert isinstance(again, FileNotFoundError)
    assert again.errno == 2


@each("function", ["check", "convert", "inspect", "load", "load_into", "open", "rescue", "retag", "verify"])
def test_what_cannot_be_read_is_the_error_that_open_raises(function: str, tmp_path: Path) -> None:
    """Whatever function meets it."""
    ask = getattr(transload, function)
    path = tmp_path / "absent.pt"
    arguments: list[object] = [torch.nn.Linear(1, 1), path] if function == "load_into" else [path]
    if function in ("convert", "rescue", "retag"):
        arguments.append("cpu" if function == "retag" else tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError) as caught:
        ask(*arguments)
    assert isinstance(caught.value, transload.CannotReadError)
    assert caught.value.errno == ENOENT


def test_every_error_a_user_can_meet_is_exported() -> None:
    internal = {"ContentError", "Malformed"}  # which open and verify turn into others; a BrokenFileError
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    public = {name for name in classes if not name.startswith("_")} - internal
    assert public == set(errors.__all__)  # for type checkers
    assert public <= set(vars(transload)["__all__"])
