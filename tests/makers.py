"""What many tests make or ask for: the bytes of a saved object, the codes of what was found."""

from __future__ import annotations

import io
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
