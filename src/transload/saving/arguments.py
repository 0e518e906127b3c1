"""What ``save`` is asked for, checked before anything is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transload.errors import UsageError
from transload.saving.errors import SaveError

__all__ = ["Progressing", "alignment", "check_device", "check_protocol", "check_skip", "path_of"]

Progressing = bool | Callable[[int, int], object] | None


def path_of(f: Any) -> str | None:
    """The path a target names; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        return os.fsdecode(f)
    if not callable(getattr(f, "write", None)):
        raise UsageError(f"cannot save to a {type(f).__name__}", fix="Give a path, or an object with write().")
    return None


def check_device(device: str) -> bool:
    """Whether every storage is to be tagged ``cpu``."""
    if device not in {"cpu", "keep"}:
        what = f"device={device!r}: a file is saved with tags of the CPU ('cpu') or of the devices in use ('keep')"
        raise UsageError(what, fix="`transload retag` writes other tags into a file.")
    return device == "cpu"


def check_protocol(pickle_protocol: int) -> int:
    """A protocol with binary persistent ids, which storages need."""
    import pickle

    if not 2 <= pickle_protocol <= pickle.HIGHEST_PROTOCOL:
        what = f"pickle_protocol={pickle_protocol!r}: it is a number from 2 to {pickle.HIGHEST_PROTOCOL}"
        raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
    return pickle_protocol


def check_skip() -> None:
    """Raise where torch was told to write files without contents."""
    import torch

    state = getattr(torch.serialization, "_serialization_tls", None)
    if getattr(state, "skip_data", False):
        raise SaveError(
            "torch.serialization.skip_data() is in force", fix="Use torch.save for a file without contents."
        )


def alignment() -> int:
    """Where records begin: at multiples of what torch is set to."""
    try:
        from torch.utils.serialization import config

        return int(config.save.storage_alignment)
    except (ImportError, AttributeError):  # before torch 2.7
        return 64
