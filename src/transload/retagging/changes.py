"""What is to be changed in a file: runs of bytes, old and new."""

from __future__ import annotations

from typing import NamedTuple

from transload.frozen import facts

__all__ = ["Change", "Changes"]


class Change(NamedTuple):
    """Bytes in place of others. They differ in number only where the old ones reach to the end of the file."""

    offset: int
    old: bytes
    new: bytes


@facts(frozen=True)
class Changes:
    """All of them, in order, and the size of the file before and after."""

    runs: tuple[Change, ...]
    old_size: int
    new_size: int

    def undone(self) -> Changes:
        """What turns the new file into the old one."""
        runs = tuple(Change(run.offset, run.new, run.old) for run in self.runs)
        return Changes(runs, self.new_size, self.old_size)
