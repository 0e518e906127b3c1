"""What was given in place of a text: a checkpoint, something compressed, or bytes of any kind."""

from __future__ import annotations

from transload.errors import TransloadError, UsageError

__all__ = ["HEAD", "is_binary", "is_packed", "not_a_text"]

HEAD = 16
"""Bytes at the beginning of a file that tell what is surely no text."""
_MAGIC = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_SAMPLE = 1 << 16
_ODD = 0.03
"""The part of bytes which no text holds from which on it is none; of any bytes it is a tenth."""
_IN_TEXTS = bytes({*range(7, 14), 27, *range(32, 127), *range(128, 256)})
_PIPE = "python train.py 2>&1 | transload explain"
_UNPACK = {"gzip": "gzip -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "zstd": "zstd -dc"}


def is_packed(head: bytes) -> bool:
    """Whether a file that begins so is an archive, a pickle, or the like."""
    sized = head[8:9] == b"{" and head[5:8] == bytes(3)  # safetensors: the length of its header stands first
    return sized or head.startswith((*_MAGIC, *_PICKLES))


def is_binary(data: bytes) -> bool:
    """Whether bytes are no text in any encoding; what a log that was cut off while it was written holds is none.

    >>> is_binary(bytes(range(256))), is_binary("Fehler: größer".encode("latin-1"))
    (True, False)
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return False
    inner = data.strip(b"\0")
    sample = inner if len(inner) <= 2 * _SAMPLE else inner[:_SAMPLE] + inner[-_SAMPLE:]
    wide = sample[1::2].count(0) > len(sample) // 8 and 0 not in sample[::2]  # UTF-16 without a mark
    return not wide and len(sample.translate(None, _IN_TEXTS)) > _ODD * len(sample)


def not_a_text(path: str) -> UsageError:
    """What to say of a file that is no text, or of a stream of it, which has no path."""
    import shlex

    from transload.formats import FORMATS
    from transload.judge import inspect

    name = shlex.quote(path) if path else "FILE"
    fix = f"An error text is piped in, or a file that holds one is named: {_PIPE}"
    try:
        checkpoint = inspect(path) if path else None
    except TransloadError:
        checkpoint = None
    if checkpoint is None:
        return UsageError("this is no text", where=path, fix=f"{fix}. Of a checkpoint: transload inspect {name}")
    kind = FORMATS.get(checkpoint.format, "")
    if kind and checkpoint.integrity != "not-a-checkpoint":
        return UsageError(
            f"this is no text, but a checkpoint ({kind})", where=path, fix=f"What is in it: transload inspect {name}"
        )
    unpack = _UNPACK.get(checkpoint.format)
    fix = f"If it is a log, unpack it: {unpack} {name} | transload explain" if unpack else fix
    title = checkpoint.findings[0].title if checkpoint.findings else ""
    return UsageError(f"this is no text{f': {title}' if title else ''}", where=path, fix=fix)
