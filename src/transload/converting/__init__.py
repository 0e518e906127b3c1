"""``transload.convert``: a checkpoint of any format written as another, without torch, and read back to be sure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transload.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transload.converting.candidates import Candidate
    from transload.converting.result import Conversion
    from transload.io.sources import SourceLike

__all__ = ["convert", "parts"]


def convert(  # noqa: PLR0913 - what a user may ask for
    src: SourceLike,
    dst: str | os.PathLike[str],
    *,
    to: str = "",
    key: str = "",
    strip: str | tuple[str, ...] | list[str] = (),
    dtype: str = "",
    allow_inf: bool = False,
    max_shard_size: str | int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], object] | None = None,
) -> Conversion:
    """Write the tensors of a checkpoint as another format; nothing of it is run, and torch is not needed.

    ``src`` is a path (of a file or a directory), bytes, or a file object. The format of ``dst`` is told by its name, or
    by ``to``: ``torch``, ``safetensors``, ``npz``, or ``raw`` (a directory). ``key`` chooses a part (``"model"``),
    ``strip`` takes prefixes off the names (``"module."``), ``dtype`` is for floating tensors, and a number that does
    not fit is an error unless ``allow_inf``. ``max_shard_size`` (``"5GB"``) cuts safetensors into shards. ``verify``
    checks the source's own checksums and reads the target back, byte for byte, before it gets its name. ``progress``
    is a function of the bytes done and of all bytes, or ``True`` for a line on a terminal.

    >>> transload.convert("model.pt", "model.safetensors")  # doctest: +SKIP
    >>> transload.convert("train.ckpt", "out/", key="model", strip="module.", dtype="bfloat16")  # doctest: +SKIP
    """
    from transload.converting.running import run
    from transload.converting.wish import Wish, dtype_of, format_of, size_of

    target = _path(dst)
    prefixes = (strip,) if isinstance(strip, str) else tuple(strip)
    wish = Wish(key, tuple(filter(None, prefixes)), dtype_of(dtype), allow_inf, size_of(max_shard_size))
    format_ = format_of(target, to)
    if wish.max_shard and format_ != "safetensors":
        raise UsageError("only safetensors is cut into shards", fix="Leave the largest size out.")
    return run(src, target, format_, wish, verify=verify, overwrite=overwrite, progress=progress)


def parts(src: SourceLike) -> tuple[Candidate, ...]:
    """The parts of a checkpoint that ``key`` can choose, the whole first."""
    from transload.converting.candidates import candidates
    from transload.judge import inspect
    from transload.loading.refusal import refuse_broken

    checkpoint = inspect(src)
    refuse_broken(checkpoint)
    return candidates(checkpoint)


def _path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}")
    if not name:
        raise UsageError("the target has no name")
    if not _is_possible(name):
        raise UsageError("no file can have the name of the target", where=name)
    return name


def _is_possible(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half a letter
        return False
