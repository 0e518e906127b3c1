"""Errors: they travel between processes whole."""

from __future__ import annotations

import pickle

from tests.each import each

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
