"""The bytes of a tensor, from any open checkpoint.

``files`` opens a checkpoint once for everybody who reads from it; ``content`` gives the elements of a tensor in
row-major order, through the strided views of ``views``. A load needs the first of these only, so the names of the
second are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transload.tensors.content import Allowance, Content, ContentError, Run, boxes, open_content

__all__ = ["Allowance", "Content", "ContentError", "Run", "boxes", "open_content"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("transload.tensors.content"), name)
