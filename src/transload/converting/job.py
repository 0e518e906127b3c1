"""One conversion under way: where it goes, what was asked for, and what was done so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.converting.bundle import Bundle
    from transload.converting.wish import Wish

__all__ = ["Job"]


class Job:
    """``copied`` counts the bytes that the kernel copied by itself; ``summed`` are CRC-32 of entries, by their ``id``.

    ``verify`` is whether everything is to be compared.
    """

    def __init__(
        self, dst: str, wish: Wish, bundle: Bundle, tell: Callable[[int], None] | None, *, verify: bool
    ) -> None:
        self.dst = dst
        self.wish = wish
        self.bundle = bundle
        self.tell = tell
        self.verify = verify
        self.copied = 0
        self.summed: dict[int, int] = {}
