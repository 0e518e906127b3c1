"""The engine of torch for quantized modules that works on this machine."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn


@functools.cache
def working_engine() -> str:
    """The default engine if it works, else the first that does, or ``""``. The default stays as it was.

    A build may list engines, and even default to one, that fail at their first use: those for x86 on aarch64.
    Select it with ``monkeypatch.setattr(torch.backends.quantized, "engine", working_engine())``.
    """
    backend = torch.backends.quantized
    default = backend.engine
    try:
        return next((engine for engine in (default, *backend.supported_engines) if _works(engine)), "")
    finally:
        backend.engine = default


def _works(engine: str) -> bool:
    if engine == "none":
        return False
    torch.backends.quantized.engine = engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
            module(torch.ones(1, 2))
        except RuntimeError:
            return False
    return True
