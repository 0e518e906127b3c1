"""Facts to verdicts: pure functions from what a reader found to findings. Nothing here touches a file."""

from __future__ import annotations

from transload.checkpoint import Checkpoint
from transload.findings import Finding, Integrity, Safety, rescue_command, worst_integrity, worst_safety
from transload.frozen import replace
from transload.io.sources import SourceLike
from transload.judge.problems import judge_problems, rule_of, with_commands
from transload.judge.safety import judge_pickles

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
    is_plain = any(problem.code == "plain-pickle" for problem in checkpoint.problems)
    names = judge_pickles(checkpoint.pickles, load="transload.load" if is_plain else "torch.load")
    forced, findings = judge_problems(checkpoint.problems)
    base: Safety = "code" if checkpoint.format in _PROGRAMS else "data-only"
    judged = replace(
        checkpoint,
        safety=worst_safety(base, names.safety, forced),
        integrity=integrity_of(checkpoint),
        globals=names.globals,
        flavour=checkpoint.flavour or _flavour(checkpoint),
        findings=(
            # In what torch.load does not read, nobody has to allow any names.
            *(f for f in names.findings if f.code != "needs-trust" or checkpoint.format not in _NOT_LOADED),
            *findings,
            *_of_values(checkpoint),
        ),
    )
    judged = replace(judged, findings=with_commands(judged)) if judged.findings else judged
    if not told:
        return judged
    from transload.judge.origin import origin

    # torch.load passes over the other records of an archive, and the pickles in them.
    loaded = [pickle for pickle in checkpoint.pickles if pickle.main or checkpoint.format != "torch-zip"]
    part = names if len(loaded) == len(checkpoint.pickles) else judge_pickles(loaded)
    prediction = f"torch.load {_prediction(judged, worst_safety(part.safety, forced), as_data=part.as_data)}"
    return replace(judged, written_by=origin(checkpoint), prediction=prediction)


def integrity_of(checkpoint: Checkpoint) -> Integrity:
    """The verdict on the bytes alone, by what the reader met."""
    return worst_integrity(
        "whole" if checkpoint.checksummed else "unchecked",
        *(rule_of(problem.code).integrity for problem in checkpoint.problems),
    )


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


def _of_values(checkpoint: Checkpoint) -> list[Finding]:
    """Findings that no name and no problem of a reader leads to."""
    found = []
    rare = sorted({name for pickle in checkpoint.pickles if pickle.main for name in pickle.rare})
    if rare and checkpoint.format.startswith("torch-") and checkpoint.format not in _PROGRAMS:
        # Such a file loads only without weights_only, however harmless it is.
        title = "torch.load refuses it: weights_only=True does not know its pickle protocol"
        evidence = (f"opcodes {', '.join(rare[:_SHOWN])}",)
        fix = "Save it again without pickle_protocol, or pass weights_only=False if you trust the file."
        found.append(Finding("rare-opcodes", "warning", title, evidence, (fix,)))
    held = [f"{leaf.name}: {leaf.text}" for leaf in checkpoint.leaves if leaf.kind == "torch.device"]
    elsewhere = [text for text in held if not text.endswith(": cpu")]
    if elsewhere:
        title = "it holds torch.device values, which map_location does not move"
        more = [f"… and {len(elsewhere) - _SHOWN} more"] if len(elsewhere) > _SHOWN else []
        fix = "Set them yourself after loading."
        found.append(Finding("device-objects", "note", title, (*elsewhere[:_SHOWN], *more), (fix,)))
    return found


# -- what plain torch.load(path) will do, in a sentence or two

_OTHER_LOADER: dict[str, str] = {
    "torchscript": "fails: this is a program, load it with torch.jit.load(path, map_location='cpu')",
    "torch-export": "fails: this is a program, load it with torch.export.load(path)",
    "aotinductor": "fails: this is compiled code, load it with torch._inductor.aoti_load_package(path)",
    "torch-package": "fails: this is a package of code, open it with torch.package.PackageImporter(path)",
    "torch-tar": "refuses this format unless weights_only=False; do that only if you trust the file",
    "sharded": "loads the shards one at a time only: read the index for which file holds what",
    "dcp": "fails on a directory: use torch.distributed.checkpoint.load, or make a file of it: transload convert DIR "
    "NEW.pt (flat names), or python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT (nested ones)",
    "deepspeed": "fails on a directory: gather it with python -m deepspeed.utils.zero_to_fp32 DIR OUT",
    "megatron": "fails on a directory: load it with Megatron",
    "directory": "fails on a directory",
    "safetensors": "loads it only from torch 2.13 on, if its name ends in .safetensors; "
    "else use safetensors.torch.load_file(path)",
    "npz": "fails: read it with numpy.load(path), or with transload.load",
    "npy": "fails: read it with numpy.load(path), or with transload.load",
    "gguf": "fails, with an error that does not say why: it is a file of llama.cpp, and transload.load reads what is "
    "not quantized",
}
# Containers that torch reads as long as the part it looks at is in order.
_TWO_READINGS = frozenset(
    {
        *("zip-directory-record", "zip-duplicate-name", "zip-headers-differ", "zip-inside", "zip-names-differ"),
        *("zip-nul-name", "zip-odd-name", "zip-overlap", "zip-shifted", "zip-two-ends", "zip-two-sizes"),
    }
)
# Problems torch.load does not notice.
_UNNOTICED = frozenset(
    {
        *("crc-mismatch", "legacy-trailing-bytes", "legacy-unlisted", "pickle-irregular", "pickle-trailing-bytes"),
        *("safetensors-duplicate-key", "storage-skipped", "zip-compressed", "zip-crc-differs", "zip-name-case"),
        *("zip-name-encoding", "zip-one-reader", "zip-trailing-bytes"),
    }
)
_NESTED = frozenset(
    {
        "torch._utils._rebuild_nested_tensor",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
    }
)
_REFUSES = "refuses it (weights_only=True, the default from 2.6 on)"


def _prediction(checkpoint: Checkpoint, safety: Safety, *, as_data: bool) -> str:
    """The outcome with a torch of today, on a machine with and without the devices the file names.

    ``safety`` is that of the part torch reads, which may be better than that of the whole file; ``as_data`` is as in a
    ``Judgement``. What one release says on one machine, word for word, is in ``checking.torch_says``.
    """
    codes = {problem.code for problem in checkpoint.problems}
    noticed = codes - _UNNOTICED
    unreadable = any(rule_of(code).integrity in ("repairable", "damaged") for code in noticed)
    if checkpoint.format == "safetensors" and unreadable:
        return "fails, and so does safetensors.torch.load_file(path): the file is damaged"
    if checkpoint.format == "gguf" and unreadable:
        return "fails, and so does transload.load: the file is damaged"
    if checkpoint.format == "torch-directory":
        return f"fails on a directory: {rescue_command(checkpoint.path).removeprefix('$ ')} makes a file of it"
    if checkpoint.format in _OTHER_LOADER:
        return _OTHER_LOADER[checkpoint.format]
    if checkpoint.path.endswith(".safetensors"):
        return "fails from torch 2.13 on: its name says safetensors, and it is none; rename it"
    if checkpoint.integrity == "not-a-checkpoint":
        return "fails, with an error that does not say why"
    if "plain-pickle" in codes and safety != "dangerous" and not unreadable:
        reads = " with weights_only=False, if you trust it" if safety == "needs-trust" and not as_data else ""
        return (
            f"fails, with an error that does not say why: torch.save did not write it; transload.load reads it{reads}"
        )
    if any(storage.record.startswith("tensors/") for storage in checkpoint.storages):
        return "fails: only torch 1.4 and 1.5 read this first form of the zip format"
    if _TWO_READINGS & codes:
        return "may load it without a word, and something else than another program reads from the same file"
    if any(problem.code == "zip-unreadable-entry" and problem.title for problem in checkpoint.problems):
        return "fails: the archive is protected by a password, and torch has no way to give one"
    if noticed == {"sparse-outside"}:
        return (
            "refuses it, or loads it, and using it crashes: that depends on the release (2.6 and 2.15 refuse, "
            "2.13 loads)"
        )
    if unreadable:
        return "fails: the file is damaged"
    if safety == "dangerous":
        return f"{_REFUSES}; with weights_only=False it would run its code"
    rare = sorted({name for pickle in checkpoint.pickles[:5] for name in pickle.rare})
    first = ""
    if rare:
        first = (
            f"refuses it: weights_only=True does not know the opcode {rare[0]}, which torch.save writes only when asked"
        )
    elif safety == "needs-trust":
        first = f"{_REFUSES} until you allow the names below"
        first += "; transload.load loads it as data" if as_data else ""
    elif _NESTED & {use.full_name for use in checkpoint.globals}:
        first = "loads it up to torch 2.14"
        if any(part.name.startswith("_metadata_cache/") for tensor in checkpoint.tensors for part in tensor.parts):
            # The bounds of its lengths, without the class that older releases save with them and ask for.
            first = "fails up to torch 2.14, which cannot rebuild a jagged tensor that 2.15 saved"
        first += "; from 2.15 on it refuses nested tensors until you allow them"
    devices = [use.device for use in checkpoint.devices if use.device not in ("cpu", "meta")]
    if not devices:
        return first or "loads it anywhere"
    where = f"needs {', '.join(devices)}: elsewhere pass map_location='cpu' (or a device you have)"
    return f"{first}; it also {where}" if first else where
