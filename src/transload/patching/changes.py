"""Attributes of other people's modules and classes that were replaced, and the way back."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Changes"]

_ABSENT = object()


class Changes:
    """Replacements in the order they were made.

    >>> class Theirs:
    ...     size = 1
    >>> changes = Changes()
    >>> changes.set(Theirs, "size", 2)
    >>> changes.set(Theirs, "colour", "red")
    >>> changes.undo()
    >>> Theirs.size, hasattr(Theirs, "colour")
    (1, False)
    """

    def __init__(self) -> None:
        self._undone: list[Callable[[], None]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute. What an owner has inherited is laid over, and bared again."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def undone() -> None:
            if vars(owner).get(name) is not value:
                return  # somebody has replaced it since, and may hold ours: it does nothing any more
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undone.append(undone)

    def then(self, undone: Callable[[], None]) -> None:
        """Also do this when all is undone."""
        self._undone.append(undone)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undone:
            self._undone.pop()()
