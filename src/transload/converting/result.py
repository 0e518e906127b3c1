"""What a conversion has done, or would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.frozen import facts

if TYPE_CHECKING:
    from transload.converting.selection import Left

__all__ = ["Conversion"]


@facts(frozen=True)
class Conversion:
    """What was converted, and what was not.

    ``files`` were written, the first of them holds the weights (or is the directory). ``nbytes`` are those of all
    tensors, ``copied`` those of them that the kernel moved by itself. ``aliases`` are second names of tensors that are
    held once. ``left`` are tensors that are not in the target: those with ``lost`` because it cannot hold them.
    ``listed`` is what else it cannot hold and is no plain data, such as numpy arrays: it is written nowhere. Plain data
    are in the file ``leftovers``. ``others`` counts tensors outside of the key.
    """

    path: str
    out: str
    format: str
    to: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    copied: int = 0
    cast: int = 0
    infinite: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    left: tuple[Left, ...] = ()
    listed: tuple[Left, ...] = ()
    leftovers: str = ""
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    verified: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tensor that was asked for is in the target."""
        return not any(each.lost for each in self.left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "path": self.path,
            "out": self.out,
            "format": self.format,
            "to": self.to,
            "complete": self.complete,
            "verified": self.verified,
            "files": list(self.files),
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "copied": self.copied,
            "cast": self.cast,
            "infinite": self.infinite,
            "others": self.others,
            "seconds": round(self.seconds, 3),
            "aliases": dict(self.aliases),
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "left": [{"name": each.name, "why": each.why, "lost": each.lost} for each in self.left],
            "leftovers": self.leftovers or None,
            "listed": [{"name": each.name, "what": each.why} for each in self.listed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.render.convert import as_text

        return as_text(self)
