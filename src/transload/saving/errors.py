"""What saving raises and warns of."""

from __future__ import annotations

from pickle import PicklingError

from transload.errors import TransloadError

__all__ = ["CannotPickleError", "SaveError", "SaveWarning"]


class SaveError(TransloadError, RuntimeError):
    """The object cannot be saved as asked."""


class CannotPickleError(SaveError, PicklingError, TypeError, AttributeError):
    """Something in the object has no form in a file; it is also each of the errors that ``pickle`` raises for that."""


class SaveWarning(UserWarning):
    """The file was saved, and is not what it could be."""
