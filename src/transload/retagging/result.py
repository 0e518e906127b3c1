"""What a retag has done, or would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.frozen import facts

if TYPE_CHECKING:
    from transload.retagging.plan import TagChange

__all__ = ["Retag"]


@facts(frozen=True)
class Retag:
    """What was done to a file, or would be.

    ``method`` is ``none``, ``patch`` (as many bytes as before), ``append`` (a new index at the end of the archive),
    ``rewrite`` (into a copy) or ``undo``; ``tags`` are those in the file with what became of them. ``written`` counts
    bytes, ``grown`` by how many the file is longer. ``how`` is how a copy was made. ``recovered`` is what had to be
    done first about an earlier retag that was interrupted: ``restored`` or ``finished``.
    """

    path: str
    out: str
    format: str
    method: str
    tags: tuple[TagChange, ...]
    written: int
    grown: int
    done: bool
    undo: bool = False
    how: str = ""
    recovered: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any tag is another one than before."""
        return self.method != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "path": self.path,
            "out": self.out or None,
            "format": self.format,
            "method": self.method,
            "done": self.done,
            "undo": self.undo,
            "written": self.written,
            "grown": self.grown,
            "how": self.how,
            "recovered": self.recovered,
            "tags": [tag.to_dict() for tag in self.tags],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.render.retag import as_text

        return as_text(self)
