"""What is asked for: which format, which part, which names, which dtype; each told apart or refused here."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from transload.errors import UsageError

__all__ = ["DTYPES", "FORMATS", "Wish", "dtype_of", "format_of", "named_format", "size_of"]

FORMATS: dict[str, str] = {
    "safetensors": "safetensors, one file or shards",
    "torch": "torch zip, as torch.save writes it",
    "npz": "numpy's archive of arrays",
    "raw": "a directory of raw tensors with a JSON index",
}

_SUFFIXES = {
    ".safetensors": "safetensors",
    ".safetensors.index.json": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "torch",
    ".bin": "torch",
    ".npz": "npz",
}

DTYPES = ("float64", "float32", "float16", "bfloat16")
_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}
_SHORT.update({"f64": "float64", "f32": "float32", "f16": "float16", "fp64": "float64", "double": "float64"})

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = ("", "K", "M", "G", "T")
_MOST = float(1 << 63)


class Wish(NamedTuple):
    """What a user may ask for; as ``convert`` has it."""

    key: str = ""
    strip: tuple[str, ...] = ()
    dtype: str = ""
    allow_inf: bool = False
    max_shard: int = 0


def format_of(dst: str, to: str = "") -> str:
    """The format to write: the one that is named, or what the name of the target says.

    >>> format_of("model.safetensors"), format_of("out/"), format_of("x", "npz")
    ('safetensors', 'raw', 'npz')
    """
    if to:
        if to not in FORMATS:
            raise UsageError(f"there is no format {to!r}", fix=f"It is one of {', '.join(FORMATS)}.")
        return to
    if found := named_format(dst):
        return found
    fix = "Let its name end in .safetensors, .pt, .npz or a slash, or say --to torch|safetensors|npz|raw."
    raise UsageError("the name of the target does not say which format it shall have", where=dst, fix=fix)


def named_format(dst: str) -> str:
    """The format that a name tells; empty if it tells none."""
    name = dst.lower()
    found = next((found for suffix, found in _SUFFIXES.items() if name.endswith(suffix)), "")
    return found or ("raw" if name.endswith(("/", os.sep)) else "")


def dtype_of(text: str) -> str:
    """The dtype that is named; empty for none.

    >>> dtype_of("bf16"), dtype_of("torch.float16")
    ('bfloat16', 'float16')
    """
    name = text.removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name and name not in DTYPES:
        raise UsageError(f"cannot convert to {text!r}", fix=f"The dtype is one of {', '.join(DTYPES)}.")
    return name


def size_of(size: str | int | None) -> int:
    """Bytes, of a number with or without a unit; 0 for none.

    >>> size_of("5GB"), size_of("1.5 MiB"), size_of(1000)
    (5000000000, 1572864, 1000)
    """
    if size is None or size == "":
        return 0
    found = _SIZE.fullmatch(str(size).strip())
    if not found or not 0 < float(found[1]) < _MOST or (found[3] and not found[2]):
        raise UsageError(f"{size!r} is no size", fix="Write it like 5GB, 500MB or 2GiB.")
    unit = 1024 if found[3] else 1000
    return max(1, int(float(found[1]) * unit ** _POWERS.index(found[2].upper())))
