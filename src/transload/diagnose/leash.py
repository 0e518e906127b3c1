"""What makes a child end with us, however we end: SIGTERM and SIGKILL leave no time to end it ourselves."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["Leash"]

_STANDARD = 2
"""Files up to this one are the child's standard ones."""


class Leash:
    """A pipe of which we hold the one end and the child the other: when ours closes, by our end too, it is told."""

    def __init__(self) -> None:
        self.theirs, self.ours = -1, -1
        with suppress(OSError):  # no file is left: then it has the backstop
            self.theirs, self.ours = os.pipe()

    def handed(self) -> tuple[int, ...]:
        """What the child is to inherit; nothing on Windows, which has no signal for it, nor what it needs otherwise."""
        return (self.theirs,) if self.theirs > _STANDARD and os.name == "posix" else ()

    def give(self) -> None:
        """Leave the child's end to it."""
        self.theirs = _closed(self.theirs)

    def let_go(self) -> None:
        """Close both ends."""
        self.give()
        self.ours = _closed(self.ours)


def _closed(number: int) -> int:
    if number >= 0:
        with suppress(OSError):
            os.close(number)
    return -1
