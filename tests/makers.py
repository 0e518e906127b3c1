"""What many tests make or ask for: the bytes of a saved object, the codes of what was found."""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint


def saved(value: object, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    import torch  # some tests run without it

    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def codes(checkpoint: Checkpoint) -> list[str]:
    """The codes of the problems of a checkpoint, in order."""
    return [problem.code for problem in checkpoint.problems]


class ZstdStandIn:
    """A decompressor with the interface of ``pyzstd``, of data that zlib has compressed."""

    needs_input = True

    def __init__(self) -> None:
        self._inner = zlib.decompressobj()

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:  # noqa: ARG002 - returns everything
        return self._inner.decompress(data.removeprefix(b"\x28\xb5\x2f\xfd"))
