"""Facts to verdicts: pure functions from what a reader found to findings. Nothing here touches a file."""

from __future__ import annotations

from dataclasses import replace

from transload.checkpoint import Checkpoint
from transload.findings import Finding, Integrity, Safety, worst_integrity, worst_safety
from transload.io.sources import SourceLike
from transload.judge.origin import origin
from transload.judge.prediction import predict
from transload.judge.problems import judge_problems, with_commands
from transload.judge.safety import judge_pickles
from transload.nodes import Pickle

__all__ = ["inspect", "integrity_of", "judge"]

_PROGRAMS = frozenset({"torchscript", "torch-export", "aotinductor", "torch-package"})
_NOT_LOADED = _PROGRAMS | {"dcp", "deepspeed", "megatron"}
_SHOWN = 8


def inspect(f: SourceLike, *, verify: bool = False) -> Checkpoint:
    """What is in a checkpoint, and whether it is safe and whole; nothing in it is run, and torch is not needed.

    ``f`` is a path (of a file or a directory), bytes, or a seekable binary file object. ``verify`` reads every byte
    and compares every checksum. Raises ``CannotReadError`` if there is nothing to read; bad content is a finding,
    never an exception.

    >>> inspect(b"<html>").integrity
    'not-a-checkpoint'
    """
    from transload.formats import no_collecting, read

    with no_collecting():
        return judge(read(f, verify=verify))


def judge(checkpoint: Checkpoint, *, told: bool = True) -> Checkpoint:
    """The same checkpoint with both verdicts, the findings, who wrote it, and what torch.load will do with it.

    The last two only if it is to be ``told``: they are for people.
    """
    names = judge_pickles(checkpoint.pickles)
    forced, harm, findings = judge_problems(checkpoint.problems)
    base: Safety = "code" if checkpoint.format in _PROGRAMS else "data-only"
    judged = replace(
        checkpoint,
        safety=worst_safety(base, names.safety, forced),
        integrity=_integrity(checkpoint, harm),
        globals=names.globals,
        written_by=origin(checkpoint) if told else checkpoint.written_by,
        flavour=checkpoint.flavour or _flavour(checkpoint),
        findings=(
            # In what torch.load does not read, nobody has to allow any names.
            *(f for f in names.findings if f.code != "needs-trust" or checkpoint.format not in _NOT_LOADED),
            *findings,
            *_rare_opcodes(checkpoint),
            *_device_objects(checkpoint),
        ),
    )
    judged = replace(judged, findings=with_commands(judged)) if judged.findings else judged
    if not told:
        return judged
    loaded = judge_pickles(read) if len(read := _loaded(checkpoint)) < len(checkpoint.pickles) else names
    return replace(judged, prediction=predict(judged, worst_safety(loaded.safety, forced)))


def integrity_of(checkpoint: Checkpoint) -> Integrity:
    """The verdict on the bytes alone, by what the reader met."""
    return _integrity(checkpoint, judge_problems(checkpoint.problems)[1])


def _integrity(checkpoint: Checkpoint, harm: Integrity) -> Integrity:
    return worst_integrity("whole" if checkpoint.checksummed else "unchecked", harm)


def _loaded(checkpoint: Checkpoint) -> tuple[Pickle, ...]:
    """The pickles torch.load itself reads; the others lie in records it passes over."""
    if checkpoint.format != "torch-zip":
        return checkpoint.pickles
    return tuple(pickle for pickle in checkpoint.pickles if pickle.main)


def _flavour(checkpoint: Checkpoint) -> str:
    """A tree that a known program writes."""
    paths = [tensor.path for tensor in checkpoint.tensors]
    top = {leaf.path[0] for leaf in checkpoint.leaves if leaf.path} | {path[0] for path in paths if path}
    if "pytorch-lightning_version" in top:
        return "Lightning checkpoint"
    if {"ds_version", "module"} <= top:
        return "DeepSpeed model states"
    if any("_parameters" in path or "_buffers" in path for path in paths):
        return "pickled module"
    return ""


def _rare_opcodes(checkpoint: Checkpoint) -> list[Finding]:
    """Opcodes that ``weights_only`` does not know: such a file loads only without it, however harmless it is."""
    rare = sorted({name for pickle in checkpoint.pickles if pickle.main for name in pickle.rare})
    if not rare or not checkpoint.format.startswith("torch-") or checkpoint.format in _PROGRAMS:
        return []
    title = "torch.load refuses it: weights_only=True does not know its pickle protocol"
    evidence = (f"opcodes {', '.join(rare[:_SHOWN])}",)
    fix = "Save it again without pickle_protocol, or pass weights_only=False if you trust the file."
    return [Finding("rare-opcodes", "warning", title, evidence, (fix,))]


def _device_objects(checkpoint: Checkpoint) -> list[Finding]:
    """``torch.device`` values in the tree: map_location does not reach them."""
    held = [f"{leaf.name}: {leaf.text}" for leaf in checkpoint.leaves if leaf.kind == "torch.device"]
    elsewhere = [text for text in held if not text.endswith(": cpu")]
    if not elsewhere:
        return []
    title = "it holds torch.device values, which map_location does not move"
    fix = "Set them yourself after loading."
    more = [f"… and {len(elsewhere) - _SHOWN} more"] if len(elsewhere) > _SHOWN else []
    return [Finding("device-objects", "note", title, (*elsewhere[:_SHOWN], *more), (fix,))]
