"""What plain ``torch.load(path)`` will do with a file, in a sentence or two."""

from __future__ import annotations

from transload.checkpoint import Checkpoint
from transload.findings import Safety, rescue_command

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


def prediction(checkpoint: Checkpoint, safety: Safety, *, as_data: bool) -> str:
    """The outcome with a torch of today, on a machine with and without the devices the file names.

    ``safety`` is that of the part torch reads, which may be better than that of the whole file; ``as_data`` is as in a
    ``Judgement``. What one release says on one machine, word for word, is in ``checking.torch_says``.
    """
    codes = {problem.code for problem in checkpoint.problems}
    noticed = codes - _UNNOTICED
    unreadable = False
    if noticed:
        from transload.judge.problems import rule_of

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
