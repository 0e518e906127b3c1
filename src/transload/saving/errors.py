"""What saving raises and warns of."""

from __future__ import annotations

from pickle import PicklingError

from transload.errors import TransloadError

__all__ = ["CannotPickleError", "SaveError", "SaveWarning"]


class SaveError(TransloadError, RuntimeError):
    """The object cannot be saved as asked."""


class CannotPickleError(
    SaveError, PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError, OverflowError, ValueError
):
    """Something in the object has no form in a file; it is each of the errors that ``pickle`` and torch raise."""


class SaveWarning(UserWarning):
    """The file was saved, and is not what it could be."""
