"""The arguments of ``load``, checked, with torch's own meaning of what is left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from transload.errors import UsageError
from transload.loading.transfer.choice import SLOT_PAIR, Settings

__all__ = ["Progressing", "check_arguments", "check_mmap", "check_settings", "is_weights_only"]

Progressing = bool | Callable[[int, int], object] | None

_PICKLE_ARGUMENTS = frozenset({"encoding", "errors", "fix_imports", "buffers"})
_TRUE = ("1", "y", "yes", "true")


def is_weights_only(asked: bool | None, pickle_module: Any) -> bool:
    """torch's rule, with its two variables of the environment."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE:
        return True
    if asked is None:
        forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
        return pickle_module is None and not forced
    return bool(asked)


def check_arguments(given: Mapping[str, Any], pickle_module: Any, *, trusted: bool) -> None:
    """Raise for arguments that the way of loading does not take."""
    known = _PICKLE_ARGUMENTS if trusted else {"encoding"}
    odd = next((name for name in given if name not in known), None)
    if odd is not None:
        hint = " with weights_only=True" if odd in _PICKLE_ARGUMENTS else ""
        raise TypeError(f"load() got an unexpected keyword argument {odd!r}{hint}")
    if not trusted and pickle_module is not None:
        raise UsageError(
            "a pickle_module is used only with weights_only=False",
            fix="Leave it out; or pass weights_only=False, if you trust the file.",
        )
    _check_encoding(given.get("encoding", "utf-8"))


def _check_encoding(encoding: Any) -> None:
    import codecs

    try:
        if encoding != "bytes":
            codecs.lookup(encoding)
    except (LookupError, TypeError) as error:
        fix = "'utf-8', 'latin1' and 'bytes' are usual."
        raise UsageError(f"there is no encoding {encoding!r}", fix=fix) from error


def check_mmap(f: object, mmap: bool | None) -> bool:
    """Whether the file is mapped: as asked, else as the program has told torch; never what has no path."""
    is_path = isinstance(f, str | os.PathLike)
    if mmap and not is_path:
        raise UsageError("mmap=True needs a path", fix="Pass the path of the file instead of a file object or bytes.")
    return bool(mmap) if mmap is not None else is_path and _mapped_by_default()


def check_settings(threads: Any, pinned_mb: Any, direct: bool | None) -> Settings:
    """How bytes are moved, as far as the caller says."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads={threads!r} is no number of threads", fix="Pass 1 or more, or leave it out.")
    least = SLOT_PAIR >> 20
    if pinned_mb is not None and (not isinstance(pinned_mb, int) or pinned_mb < least):
        what = f"pinned_mb={pinned_mb!r} is too little to read into"
        raise UsageError(what, fix=f"Each thread takes {least} MiB: pass at least {least}, or leave it out.")
    return Settings(threads, None if pinned_mb is None else pinned_mb << 20, direct)


def _mapped_by_default() -> bool:
    """``torch.utils.serialization.config.load.mmap``, from torch 2.5 on."""
    import sys

    config = getattr(sys.modules.get("torch.utils.serialization"), "config", None)  # nobody can have set it before
    return bool(config is not None and config.load.mmap)
