"""The release of the installed torch: older ones lack functions that tests use, newer ones behave differently."""

from __future__ import annotations

import pytest
import torch

__all__ = ["RELEASE", "SAVES_NEW_DTYPES", "needs_torch"]

RELEASE = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])

SAVES_NEW_DTYPES = hasattr(torch.storage, "_new_dtypes")
"""torch 2.1 has float8, complex32 and bits, but its ``torch.save`` does not support them."""


def needs_torch(*release: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(release > RELEASE, reason=f"needs torch {'.'.join(map(str, release))} or newer")
