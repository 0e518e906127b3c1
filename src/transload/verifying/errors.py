"""What verifying raises."""

from __future__ import annotations

from transload.errors import TransloadError

__all__ = ["ManifestError"]


class ManifestError(TransloadError, ValueError):
    """The file with the hashes to compare with cannot be used."""
