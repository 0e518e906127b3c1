"""What is raised where the elements of a tensor cannot be had."""

from __future__ import annotations

from transload.errors import TransloadError

__all__ = ["ContentError"]


class ContentError(TransloadError, ValueError):
    """The elements of a tensor are not all in the file, or are no plain run of numbers; the text names the tensor."""
