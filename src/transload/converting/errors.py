"""What converting raises."""

from __future__ import annotations

from transload.errors import TransloadError

__all__ = ["ConvertError", "OverflowRefusedError"]


class ConvertError(TransloadError, RuntimeError):
    """The checkpoint cannot be converted as asked; nothing was written."""


class OverflowRefusedError(ConvertError, OverflowError):
    """A number does not fit into the dtype that was asked for, and ``allow_inf`` was not."""
