"""The words a person reads for what the data classes name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.checkpoint import FORMATS
from transload.render.escape import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transload.checkpoint import Checkpoint

__all__ = ["INTEGRITY", "SAFETY", "SEVERITY", "format_words", "integrity_reason", "safety_reason", "steps"]

# Verdict → (role, reason). The verdict itself is shown as it stands in the JSON and in the manual, to be searched for.
SAFETY: dict[str, tuple[str, str]] = {
    "data-only": ("good", "loading it runs no code"),
    "needs-trust": ("trust", "it asks for what torch does not load by default"),
    "code": ("trust", "it is a program: use it only if you trust who made it"),
    "unknown": ("bad", "it may do more than transload can see"),
    "dangerous": ("bad", "loading it would run code of the file's choosing"),
}

INTEGRITY: dict[str, tuple[str, str]] = {
    "whole": ("good", "every byte is there and every checksum agrees"),
    "unchecked": ("good", "every tensor has its bytes"),
    "repairable": ("trust", "something is wrong, but no tensor is lost"),
    "damaged": ("bad", "some of it is lost"),
    "not-a-checkpoint": ("bad", "torch cannot load it as it is"),
}

SEVERITY: dict[str, tuple[str, str]] = {
    "error": ("bad", "✗"),
    "warning": ("trust", "!"),
    "note": ("dim", "·"),
}

# The verdicts on single names that make the verdict on the file.
_BLAMED = {
    "needs-trust": ("unknown", "harmless"),
    "unknown": ("unknown",),
    "dangerous": ("dangerous",),
}


def format_words(checkpoint: Checkpoint) -> str:
    """The format in words, with the flavour if it has one."""
    words = FORMATS.get(checkpoint.format, checkpoint.format)
    return printable(f"{words}, {checkpoint.flavour}" if checkpoint.flavour else words)


def steps(fix: Iterable[str]) -> list[list[str]]:
    """What to do, step by step: a sentence or a command is one, lines of code that follow each other are one.

    >>> steps(["Ask who made it.", "import torch", "torch.load(path)"])
    [['Ask who made it.'], ['import torch', 'torch.load(path)']]
    """
    out: list[list[str]] = []
    for line in fix:
        command = line.startswith("$ ") or bool(out and out[-1][-1].startswith("$ "))
        if out and not command and not line.endswith(".") and not out[-1][-1].endswith("."):
            out[-1].append(line)
        else:
            out.append([line])
    return out


def safety_reason(checkpoint: Checkpoint) -> str:
    """Why the safety verdict is what it is, with the names that make it so."""
    reason = SAFETY[checkpoint.safety][1]
    if checkpoint.safety == "unknown" and checkpoint.integrity == "not-a-checkpoint":
        return "not judged, since it is not a checkpoint"
    blamed = _BLAMED.get(checkpoint.safety, ())
    names = list(dict.fromkeys(use.full_name for use in checkpoint.globals if use.verdict in blamed))
    if not names:
        return reason
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{reason} ({', '.join(printable(name, 60) for name in names[:2])}{more})"


def integrity_reason(checkpoint: Checkpoint) -> str:
    """Why the integrity verdict is what it is; for an unchecked file also what would check it."""
    reason = INTEGRITY[checkpoint.integrity][1]
    if checkpoint.integrity != "unchecked":
        return reason
    summed = any(record.crc32 for record in checkpoint.records)
    if summed or any(storage.crc32 for storage in checkpoint.storages):
        return f"{reason}; --verify compares their checksums"
    return f"{reason}; there are no checksums to compare"
