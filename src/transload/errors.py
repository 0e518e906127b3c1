"""The errors transload raises: what happened, where, why, and what to do."""

from __future__ import annotations

__all__ = ["CannotReadError", "TransloadError", "UsageError"]


class TransloadError(Exception):
    """Base of every error transload raises on purpose; anything else that escapes is a bug.

    ``what`` is one sentence, ``where`` the file or place, ``fix`` what the user can do.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        """All three parts, on as many lines."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n{self.fix}" if self.fix else head


class CannotReadError(TransloadError, OSError):
    """The operating system did not give us the bytes; ``errno`` is its number for the reason."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = errno


class UsageError(TransloadError, ValueError):
    """The call itself makes no sense."""
