"""Files whose tags cannot be changed, each with what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.errors import RetagError
from transload.formats.foreign import quoted, rescue_command
from transload.judge.commands import command_lines

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Record

__all__ = ["data_pickle", "refuse_file"]

_AGAIN = "Load it with transload.load and save it again."

# By format: why not, and what to do; {each} is what to do with each file of a directory.
_OTHERS: dict[str, tuple[str, str]] = {
    "torchscript": (
        "it is a TorchScript program: devices stand in its code, too",
        "Move it with torch: torch.jit.load(path, map_location='cpu').save(other)",
    ),
    "torch-export": (
        "it is a torch.export program: devices stand in its graph, too",
        "Move it so: torch.export.save(transload.load(path, weights_only=False), other)",
    ),
    "aotinductor": (
        "it is a compiled AOTInductor package, for one kind of device",
        "Compile it for the other device.",
    ),
    "torch-package": ("it is a torch.package archive, with code that may name devices", "Export the package again."),
    "safetensors": ("a safetensors file carries no device", "There is nothing to change: it loads anywhere."),
    "torch-tar": ("it has the tar format of torch 0.1", _AGAIN),
    "torch-directory": (
        "it is an unpacked archive",
        "Make a file of it, and retag that.",
    ),
    "sharded": ("it is a checkpoint of several files", "{each}"),
    "dcp": ("torch.distributed.checkpoint names no device to load to", "There is nothing to change."),
    "deepspeed": ("it is a directory of several files", "{each}"),
    "megatron": ("it is a directory of several files", "{each}"),
    "directory": ("it is a directory", "Name a file in it."),
    "pickle": ("it is a plain pickle, which holds no storages of torch", ""),
}


def refuse_file(checkpoint: Checkpoint) -> None:
    """Refuse a file that has no tags to change, or that is not whole."""
    path, kind = checkpoint.path, checkpoint.format
    if checkpoint.integrity == "not-a-checkpoint":
        raise RetagError(f"it is no checkpoint: {_worst(checkpoint)}", where=path, fix=_mended(checkpoint))
    if kind not in ("torch-zip", "torch-legacy"):
        why, fix = _OTHERS.get(kind, (f"its format is {kind}", _AGAIN))
        if kind == "torch-directory":
            fix = f"{fix}\n{rescue_command(path)}"
        raise RetagError(why, where=path, fix=fix.replace("{each}", _each(checkpoint)))
    packed = any(record.method for record in checkpoint.records)
    if packed:
        raise RetagError("it was zipped again with compression", where=path, fix=_mended(checkpoint) or _AGAIN)
    if checkpoint.integrity not in ("whole", "unchecked"):
        raise RetagError(
            f"it is not whole: {_worst(checkpoint)}",
            where=path,
            fix=_mended(checkpoint) or f"See all of it: transload inspect {quoted(path)}",
        )


def _each(checkpoint: Checkpoint) -> str:
    """What to do with the files of a directory."""
    from pathlib import Path

    folder = checkpoint.path if Path(checkpoint.path).is_dir() else str(Path(checkpoint.path).parent)
    endings = {Path(part.name).suffix for part in checkpoint.parts} - {"", ".json"}
    if endings == {".safetensors"}:
        return "Its files are safetensors, which carry no device: they load anywhere."
    ending = min(endings - {".safetensors"}, default=".bin")
    loop = f'for f in {quoted(folder.rstrip("/"))}/*{ending}; do transload retag "$f" --to cpu; done'
    return f"Retag each of its files: {loop}"


def _mended(checkpoint: Checkpoint) -> str:
    """The command that makes a sound file of it, after the sentence that leads to it; empty if there is none."""
    return "\n".join(command_lines(checkpoint.findings))


def _worst(checkpoint: Checkpoint) -> str:
    for severity in ("error", "warning", "note"):
        for finding in checkpoint.findings:
            if finding.severity == severity:
                return finding.title
    return "it is damaged"


def data_pickle(checkpoint: Checkpoint) -> Record:
    """The record ``data.pkl``, which is there and not compressed."""
    for record in checkpoint.records:
        if record.name.lower() == "data.pkl" and record.offset is not None:
            return record
    raise RetagError("its data.pkl is missing", where=checkpoint.path)
