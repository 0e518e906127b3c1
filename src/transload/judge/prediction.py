"""What plain ``torch.load(path)`` will do with a file, in a sentence or two."""

from __future__ import annotations

from collections.abc import Callable

from transload.checkpoint import Checkpoint
from transload.findings import Safety

__all__ = ["predict"]

_OTHER_LOADER: dict[str, str] = {
    "torchscript": "fails: this is a program, load it with torch.jit.load(path, map_location='cpu')",
    "torch-export": "fails: this is a program, load it with torch.export.load(path)",
    "aotinductor": "fails: this is compiled code, load it with torch._inductor.aoti_load_package(path)",
    "torch-package": "fails: this is a package of code, open it with torch.package.PackageImporter(path)",
    "torch-tar": "refuses this format unless weights_only=False; do that only if you trust the file",
    "sharded": "loads the shards one at a time only: read the index for which file holds what",
    "dcp": "fails on a directory: use torch.distributed.checkpoint.load, or make a file of it: transload convert DIR "
    "NEW.pt (flat names), or python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT (nested ones)",
    "deepspeed": "fails on a directory: gather it with the zero_to_fp32.py inside",
    "megatron": "fails on a directory: load it with Megatron",
    "directory": "fails on a directory",
    "safetensors": "loads it only from torch 2.13 on, if its name ends in .safetensors; "
    "else use safetensors.torch.load_file(path)",
}


def predict(checkpoint: Checkpoint, safety: Safety) -> str:
    """The outcome of ``torch.load(path)`` with a torch of today, on a machine with and without the devices it names.

    ``safety`` is that of the part torch reads, which may be better than that of the whole file.
    """
    first = next((text for applies, text in _AT_ONCE if applies(checkpoint)), None)
    if checkpoint.format == "safetensors" and _unreadable(checkpoint):
        first = "fails, and so does safetensors.torch.load_file(path): the file is damaged"
    elif checkpoint.format == "torch-directory":
        first = f"fails on a directory: {_packed(checkpoint)} makes a file of it"
    elif checkpoint.format in _OTHER_LOADER:
        first = _OTHER_LOADER[checkpoint.format]
    return f"torch.load {first or '; '.join(_steps(checkpoint, safety))}"


def _packed(checkpoint: Checkpoint) -> str:
    from transload.findings import rescue_command

    return rescue_command(checkpoint.path).removeprefix("$ ")


# Containers that torch reads as long as the part it looks at is in order.
_TWO_READINGS = frozenset(
    {
        "zip-directory-record",
        "zip-duplicate-name",
        "zip-headers-differ",
        "zip-inside",
        "zip-names-differ",
        "zip-nul-name",
        "zip-odd-name",
        "zip-overlap",
        "zip-shifted",
        "zip-two-ends",
        "zip-two-sizes",
    }
)

# Problems torch.load does not notice.
_UNNOTICED = frozenset(
    {
        "crc-mismatch",
        "legacy-trailing-bytes",
        "legacy-unlisted",
        "pickle-irregular",
        "pickle-trailing-bytes",
        "safetensors-duplicate-key",
        "storage-skipped",
        "zip-compressed",
        "zip-crc-differs",
        "zip-name-case",
        "zip-name-encoding",
        "zip-one-reader",
        "zip-trailing-bytes",
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


def _unreadable(checkpoint: Checkpoint) -> bool:
    from transload.judge.problems import rule_of

    codes = {problem.code for problem in checkpoint.problems} - _UNNOTICED
    return any(rule_of(code).integrity in ("repairable", "damaged") for code in codes)


# What decides before any name or device matters; the first that applies.
_AT_ONCE: tuple[tuple[Callable[[Checkpoint], bool], str], ...] = (
    (
        lambda checkpoint: checkpoint.path.endswith(".safetensors"),
        "fails from torch 2.13 on: its name says safetensors, and it is none; rename it",
    ),
    (lambda checkpoint: checkpoint.integrity == "not-a-checkpoint", "fails, with an error that does not say why"),
    (
        lambda checkpoint: any(storage.record.startswith("tensors/") for storage in checkpoint.storages),
        "fails: only torch 1.4 and 1.5 read this first form of the zip format",
    ),
    (
        lambda checkpoint: bool(_TWO_READINGS & {problem.code for problem in checkpoint.problems}),
        "may load it without a word, and something else than another program reads from the same file",
    ),
    (
        lambda checkpoint: {"sparse-outside"} == {problem.code for problem in checkpoint.problems} - _UNNOTICED,
        "refuses it, or loads it, and using it crashes: that depends on the release (2.6 and 2.15 refuse, 2.13 loads)",
    ),
    (_unreadable, "fails: the file is damaged"),
)


def _steps(checkpoint: Checkpoint, safety: Safety) -> list[str]:
    if safety == "dangerous":
        return [f"{_REFUSES}; with weights_only=False it would run its code"]
    rare = sorted({name for pickle in checkpoint.pickles[:5] for name in pickle.rare})
    if rare:
        first = [
            f"refuses it: weights_only=True does not know the opcode {rare[0]}, which torch.save writes only when asked"
        ]
    elif safety == "needs-trust":
        first = [f"{_REFUSES} until you allow the names below"]
    elif _NESTED & {use.full_name for use in checkpoint.globals}:
        first = ["loads it up to torch 2.14; from 2.15 on it refuses nested tensors until you allow them"]
    else:
        first = []
    devices = [use.device for use in checkpoint.devices if use.device not in ("cpu", "meta")]
    if not devices:
        return first or ["loads it anywhere"]
    names = ", ".join(devices)
    where = f"needs {names}: elsewhere pass map_location='cpu' (or a device you have)"
    return [*first, where if not first else f"it also {where}"]
