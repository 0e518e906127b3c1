"""A file as it shall be: what the one reader reads, and where it differs from the file that was given."""

from __future__ import annotations

from typing import NamedTuple

from transload.io.sources import Source
from transload.rescuing.layout import Item
from transload.rescuing.mending import Certainty

__all__ = ["Gone", "Lost", "Mend", "Mended"]


class Mend(NamedTuple):
    """A byte that was put right: its place in the file, what it was and what it is, and where that was in the file.

    ``record`` is empty for a byte that belongs to no record: one of a header, of the directory, of filling.
    """

    position: int
    old: int
    new: int
    record: str
    certainty: Certainty

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that differ; 0 is the lowest."""
        return tuple(bit for bit in range(8) if (self.old ^ self.new) >> bit & 1)


class Gone(NamedTuple):
    """A run of bytes of the mended file that are not those that were saved, and why."""

    start: int
    end: int
    why: str


class Lost(NamedTuple):
    """A record that is not in the mended file as it was saved, and why."""

    name: str
    why: str


class Mended(NamedTuple):
    """What the reader reads. ``exact`` is whether it is, as far as can be told, the very file that was saved.

    ``items`` are the records of an archive, of which another one can be laid out; ``unchecked`` are records without a
    checksum. ``touched`` are the places, in the mended file, of bytes of records that were mended;
    ``nbytes`` is how many bytes there were to begin with; ``warnings`` say what is not
    sure about them.
    """

    source: Source
    exact: bool
    gone: tuple[Gone, ...] = ()
    mends: tuple[Mend, ...] = ()
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    unchecked: frozenset[str] = frozenset()
    all_unchecked: bool = False
    touched: tuple[int, ...] = ()
    nbytes: int = 0
    warnings: tuple[str, ...] = ()
