"""What was found out about the bytes of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from transload.frozen import facts

if TYPE_CHECKING:
    from transload.findings import Finding, Integrity

__all__ = ["Damage", "Difference", "TensorSum", "Verification"]


class Damage(NamedTuple):
    """A tensor whose bytes are not what they were, by its name, and how that shows.

    ``kind`` is ``checksum`` (its record is not what was saved), ``unreadable`` (the disk does not give it), ``cut``
    (its bytes are not all there), ``missing`` (an index names it, and it is not there) or ``broken`` (what describes it
    makes no sense, or its indices point outside of it).
    """

    name: str
    kind: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "kind": self.kind, "detail": self.detail}


class TensorSum(NamedTuple):
    """A tensor, and what was made of its elements; docs/verify.md defines the hash.

    ``sha256`` is empty where it was not asked for, or there are no elements to hash: ``note`` says why. ``nan`` and
    ``inf`` are ``None`` where they were not counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str = ""
    nan: int | None = None
    inf: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "sha256": self.sha256 or None,
            "nan": self.nan,
            "inf": self.inf,
            "note": self.note,
        }


class Difference(NamedTuple):
    """A tensor that is not as a manifest has it: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "what": self.what, "detail": self.detail}


@facts(frozen=True)
class Verification:
    """Whether the bytes of a checkpoint are those that were saved, as far as that can be known.

    ``integrity`` is the verdict: ``whole`` if every record has the checksum it was saved with, ``unchecked`` if there
    are none to compare and nothing else is wrong. ``damaged`` are the tensors that are not what they were.
    ``checksums`` counts the records that were compared, ``unsummed`` those that have none; ``nbytes_read`` is how much
    was read, in ``seconds``. ``sha256`` is that of all tensors; ``tensors`` is filled where hashes or values were asked
    for. ``manifest`` is what it was compared with, ``differences`` what came of that.
    """

    path: str
    format: str
    nbytes: int
    integrity: Integrity
    tensor_count: int
    checksums: int
    unsummed: int
    nbytes_read: int
    seconds: float
    damaged: tuple[Damage, ...] = ()
    findings: tuple[Finding, ...] = ()
    tensors: tuple[TensorSum, ...] = ()
    sha256: str = ""
    manifest: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong with it, and nothing differs from the manifest: the condition of exit code 0."""
        return self.integrity in ("whole", "unchecked") and not self.damaged and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """The whole of it as plain data; this is what ``--json`` prints."""
        return {
            "schema": 1,
            "path": self.path,
            "format": self.format,
            "nbytes": self.nbytes,
            "ok": self.ok,
            "integrity": self.integrity,
            "tensor_count": self.tensor_count,
            "checksums": self.checksums,
            "unsummed": self.unsummed,
            "nbytes_read": self.nbytes_read,
            "seconds": round(self.seconds, 6),
            "damaged": [each.to_dict() for each in self.damaged],
            "findings": [finding.to_dict() for finding in self.findings],
            "sha256": self.sha256 or None,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "manifest": self.manifest or None,
            "differences": [each.to_dict() for each in self.differences],
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.render.verify import as_text

        return as_text(self)
