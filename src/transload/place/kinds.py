"""The kinds of devices whose tags torch, or a package that extends it, restores."""

from __future__ import annotations

__all__ = ["KINDS", "near_kind"]

KINDS = frozenset(
    {
        *("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "meta", "xla", "privateuseone"),
        *("npu", "musa", "mlu", "gcu", "maia", "ipu", "hip", "vulkan", "lazy"),  # packages name theirs
    }
)
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "amd": "cuda", "metal": "mps", "tpu": "xla", "intel": "xpu"}


def near_kind(kind: str) -> str:
    """The kind that somebody may have meant; empty where none is near.

    >>> near_kind("gpu"), near_kind("cdua"), near_kind("abacus")
    ('cuda', 'cuda', '')
    """
    from difflib import get_close_matches

    return _MEANT.get(kind.lower()) or next(iter(get_close_matches(kind.lower(), sorted(KINDS), 1, 0.7)), "")
