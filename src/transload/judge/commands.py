"""The commands that help with a file, with its own name in them: each told once, and only where it has something to do.

In the tables a command is written for a file called FILE, after the sentence that leads to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from transload.checkpoint import Checkpoint
from transload.findings import Finding

__all__ = ["CONVERT", "RESCUE", "RESCUED", "SETS", "WITHOUT_CODE", "command_lines", "convert_command", "with_commands"]

RESCUE = "$ transload rescue FILE NEW.pt"
CONVERT = "$ transload convert FILE NEW.safetensors"
WITHOUT_CODE = "This takes its tensors alone, without its code, so that no trust is needed."
"""What leads to the command that takes them out."""

_SEVERITIES = ("error", "warning", "note")
SETS = frozenset({"sharded", "dcp", "deepspeed", "megatron"})
"""The formats of several files."""

_ARCHIVES = frozenset({"torch-zip", "torchscript", "torch-export"})
RESCUED = SETS | _ARCHIVES | {"torch-legacy", "safetensors"}
"""The formats that a rescue takes."""

_CONVERTED = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory", "torchscript"})


def with_commands(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """The findings with real commands in their advice. What was advised once, in the order of reading, is not repeated.

    A command that would find nothing to do is left out, with the sentence before it.
    """
    found = tuple(_without_code(checkpoint, f) if f.code == "needs-trust" else f for f in checkpoint.findings)
    told: set[str] = set()
    advice = {
        index: tuple(_advice(found[index].fix, checkpoint, told))
        for index in sorted(range(len(found)), key=lambda index: _SEVERITIES.index(found[index].severity))
    }
    return tuple(f if f.fix == advice[index] else replace(f, fix=advice[index]) for index, f in enumerate(found))


def _without_code(checkpoint: Checkpoint, finding: Finding) -> Finding:
    """With the way that needs no trust: the tensors, without what the names stand for."""
    command = convert_command(checkpoint) if finding.fix else ""
    return replace(finding, fix=(*finding.fix, WITHOUT_CODE, command)) if command else finding


def _advice(fix: tuple[str, ...], checkpoint: Checkpoint, told: set[str]) -> Iterator[str]:
    lines = iter(zip(fix, (*fix[1:], ""), strict=False))
    for line, following in lines:
        if following in _COMMANDS:
            command = _COMMANDS[following](checkpoint)
            next(lines)
            if command and command not in told:
                told.add(command)
                yield from (line, command)
        elif line not in told or not line.endswith("."):
            told.add(line)
            yield line


def command_lines(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The first command advised, with the sentence that leads to it."""
    for finding in findings:
        for at, line in enumerate(finding.fix):
            if line.startswith("$ "):
                return finding.fix[max(0, at - 1) : at + 1]
    return ()


def convert_command(checkpoint: Checkpoint) -> str:
    """The command that takes the tensors out of a pickle; empty for attacks, and where none is whole."""
    sound = checkpoint.integrity not in ("damaged", "not-a-checkpoint") and checkpoint.safety != "dangerous"
    return _convert(checkpoint) if sound and checkpoint.format in _CONVERTED and checkpoint.storages else ""


def _rescue(checkpoint: Checkpoint) -> str:
    """Empty for what a rescue does not take, for attacks, and where nothing is left to save."""
    if checkpoint.format not in RESCUED or checkpoint.safety == "dangerous" or not _is_something_left(checkpoint):
        return ""
    from transload.formats.foreign import rescue_command

    formats = {checkpoint.format, *(dict(part.facts).get("format") for part in checkpoint.parts)}
    return rescue_command(checkpoint.path, ".safetensors" if "safetensors" in formats else ".pt")


def _is_something_left(checkpoint: Checkpoint) -> bool:
    """Whether a storage is whole; or the index of an archive is hurt, which has a checksum to mend it by."""
    if not checkpoint.storages:
        return checkpoint.format in _ARCHIVES and any(record.name.endswith(".pkl") for record in checkpoint.records)
    return any(storage.nbytes and storage.stored >= storage.nbytes for storage in checkpoint.storages)


def _convert(checkpoint: Checkpoint) -> str:
    """Into a file of the same name and the other ending."""
    from transload.formats.foreign import is_named, quoted

    if not is_named(checkpoint.path):
        return CONVERT
    stem, ending = os.path.splitext(checkpoint.path.rstrip("/"))  # noqa: PTH122 - pathlib is slow to import
    new = "NEW.safetensors" if ending == ".safetensors" else f"{stem}.safetensors"
    return f"$ transload convert {quoted(checkpoint.path)} {quoted(new)}"


_COMMANDS: dict[str, Callable[[Checkpoint], str]] = {RESCUE: _rescue, CONVERT: _convert}
