"""The errors transload raises: what happened, where, why, and what to do."""

from __future__ import annotations

from typing import Any

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes by pickle, which would give all of ``args`` to ``__init__`` by position."""
        return _again, (type(self), self.what, self.where, self.fix), dict(vars(self))

    def __str__(self) -> str:
        """All three parts, on as many lines."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n{self.fix}" if self.fix else head


def _again(kind: type[TransloadError], what: str, where: str, fix: str) -> TransloadError:
    made = kind.__new__(kind)
    TransloadError.__init__(made, what, where=where, fix=fix)
    return made


class CannotReadError(TransloadError, OSError):
    """The operating system did not give us the bytes; ``errno`` is its number for the reason."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_again, (type(self), self.what, self.where, self.fix, self.errno)


def _read_again(kind: type[CannotReadError], what: str, where: str, fix: str, errno: int | None) -> CannotReadError:
    return kind(what, where=where, fix=fix, errno=errno)


class UsageError(TransloadError, ValueError):
    """The call itself makes no sense."""
