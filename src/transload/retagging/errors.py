"""What retagging raises."""

from __future__ import annotations

from transload.errors import TransloadError

__all__ = ["BusyFileError", "RetagError"]


class RetagError(TransloadError, RuntimeError):
    """The tags of this file cannot be changed as asked; the file is as it was."""


class BusyFileError(RetagError):
    """Somebody else writes the file, or has just changed it."""
