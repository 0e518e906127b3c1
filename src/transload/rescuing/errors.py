"""What a rescue raises where there is nothing to rescue."""

from __future__ import annotations

from transload.errors import TransloadError

__all__ = ["RescueError"]


class RescueError(TransloadError, ValueError):
    """There is nothing in the file that could be rescued, or it cannot be put into the file that was asked for."""
