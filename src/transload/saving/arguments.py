"""What ``save`` is asked for, checked before anything is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transload.errors import UsageError
from transload.formats.zip_writer import ALIGNMENT
from transload.saving.errors import SaveError

__all__ = [
    "Progressing",
    "alignment",
    "check_device",
    "check_module",
    "check_progress",
    "check_protocol",
    "check_skip",
    "path_of",
]

_MAX_ALIGNMENT = 1 << 16  # the padding that leads there has a length of 16 bits

Progressing = bool | Callable[[int, int], object] | None


def path_of(f: Any) -> str | None:
    """The path a target names; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        path = os.fsdecode(f)
        if "\0" in path:
            raise UsageError(f"no file can have the name {path!r:.80}", fix="Leave out the NUL.")
        return path
    if not callable(getattr(f, "write", None)):
        raise UsageError(f"cannot save to a {type(f).__name__}", fix="Give a path, or an object with write().")
    return None


def check_device(device: str) -> bool:
    """Whether every storage is to be tagged ``cpu``."""
    if device not in ("cpu", "keep"):
        what = f"device={device!r}: a file is saved with tags of the CPU ('cpu') or of the devices in use ('keep')"
        raise UsageError(what, fix="`transload retag` writes other tags into a file.")
    return device == "cpu"


def check_protocol(pickle_protocol: int | None) -> int:
    """A protocol with binary persistent ids, which storages need; ``None`` and -1 are those that ``pickle`` means."""
    import pickle

    if pickle_protocol is None or pickle_protocol == -1:
        return pickle.DEFAULT_PROTOCOL if pickle_protocol is None else pickle.HIGHEST_PROTOCOL
    if pickle_protocol not in range(2, pickle.HIGHEST_PROTOCOL + 1):
        what = f"pickle_protocol={pickle_protocol!r}: it is a number from 2 to {pickle.HIGHEST_PROTOCOL}"
        raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
    return int(pickle_protocol)


def check_module(pickle_module: Any) -> None:
    """Raise for what cannot pickle."""
    if pickle_module is not None and not callable(getattr(pickle_module, "Pickler", None)):
        raise UsageError(f"pickle_module={pickle_module!r:.80} has no Pickler", fix="Give a module as pickle is one.")


def check_progress(progress: Progressing) -> None:
    """Raise for what cannot be told anything."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise UsageError(f"progress={progress!r:.80}: it is True, or a function of two numbers")


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

        found = config.save.storage_alignment
    except (ImportError, AttributeError):  # before torch 2.7
        return ALIGNMENT
    if found not in range(1, _MAX_ALIGNMENT + 1):
        what = f"torch is set to a storage_alignment of {found!r:.80}: it is a number from 1 to {_MAX_ALIGNMENT}"
        raise SaveError(what, fix=f"torch.utils.serialization.config.save.storage_alignment = {ALIGNMENT}")
    return int(found)
