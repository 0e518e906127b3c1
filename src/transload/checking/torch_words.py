"""What ``torch.load`` says, word for word, in the releases from 2.1 to 2.15; a test holds them against the real one."""

from __future__ import annotations

import re

__all__ = [
    "BLOCKED",
    "REGISTERED_TEXTS",
    "SAFETENSORS_TEXTS",
    "SCRIPT_WARNING",
    "blocked",
    "device_error",
    "foreign_id",
    "implicit_pickle",
    "load_key",
    "no_directory",
    "no_record",
    "protocol_warning",
    "refusal",
    "unsafe",
    "unsupported_global",
]

Version = tuple[int, ...]

BLOCKED = frozenset({"sys", "os", "posix", "nt"})
SCRIPT_WARNING = (
    "'torch.load' received a zip file that looks like a TorchScript archive dispatching to 'torch.jit.load' "
    "(call 'torch.jit.load' directly to silence this warning)"
)
# What safetensors 0.8 says of a file, by the problem found in it.
_HEADER = "Error while deserializing header:"
SAFETENSORS_TEXTS = {
    "safetensors-header-too-large": f"{_HEADER} header too large",
    "safetensors-header-cut": f"{_HEADER} invalid header length",
    "safetensors-truncated": f"{_HEADER} incomplete metadata, file not fully covered",
    "safetensors-trailing": f"{_HEADER} incomplete metadata, file not fully covered",
}
_UNSAFE = (
    "In PyTorch 2.6, we changed the default value of the `weights_only` argument in `torch.load` from `False` to "
    "`True`. Re-running `torch.load` with `weights_only` set to `False` will likely succeed, but it can result in "
    "arbitrary code execution. Do it only if you got the file from a trusted source."
)
_OPTIONS = (
    "Weights only load failed. This file can still be loaded, to do so you have two options, "
    "\033[1mdo those steps only if you trust the source of the checkpoint\033[0m. "
    f"\n\t(1) {_UNSAFE}\n\t(2) Alternatively, to load with `weights_only=True` please check the recommended steps in "
    "the following error message.\n\tWeightsUnpickler error: "
)
_DOCS = (
    "\n\nCheck the documentation of torch.load to learn more about types accepted by default with weights_only "
    "https://pytorch.org/docs/stable/generated/torch.load.html."
)
_ISSUE = (
    "Please file an issue with the following so that we can make `weights_only=True` compatible with your use case: "
    "WeightsUnpickler error: "
)
_IMPLICIT = (
    "You are using `torch.load` with `weights_only=False` (the current default value), which uses the default pickle "
    "module implicitly. It is possible to construct malicious pickle data which will execute arbitrary code during "
    "unpickling (See https://github.com/pytorch/pytorch/blob/main/SECURITY.md#untrusted-models for more details). In a "
    "future release, the default value for `weights_only` will be flipped to `True`. This limits the functions that "
    "could be executed during unpickling. Arbitrary objects will no longer be allowed to be loaded via this mode "
    "unless they are explicitly allowlisted by the user via `torch.serialization.add_safe_globals`. We recommend you "
    "start setting `weights_only=True` for any use case where you don't have full control of the loaded file. Please "
    "open an issue on GitHub for any issues related to this experimental feature."
)
_MINIZ = (
    ". This is an internal miniz error. If you are seeing this error, there is a high likelihood that your checkpoint "
    "file is corrupted. This can happen if the checkpoint was not saved properly, was transferred incorrectly, or the "
    "file was modified after saving."
)
_TO_CPU = (
    "If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your "
    "storages to the CPU."
)

_DTENSOR = "``torch.distributed.tensor`` must be imported to load DTensors"
REGISTERED_TEXTS: dict[str, str] = {
    **dict.fromkeys(
        (
            "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
            "torch.distributed.tensor.DTensor",
            "torch.distributed.tensor.placement_types.Partial",
            "torch.distributed.tensor.placement_types.Replicate",
            "torch.distributed.tensor.placement_types.Shard",
        ),
        _DTENSOR,
    ),
    "torch._dynamo.decorators._DimRange": (
        "``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)"
    ),
}
"""Names that another module allows when it is imported, and what is said where it was not."""


# -- weights_only


def unsafe(what: str) -> str:
    """A kind of file that is refused as a whole."""
    return f"Cannot use ``weights_only=True`` with {what}. {_UNSAFE}"


def refusal(message: str, version: Version) -> str:
    """The frame torch 2.6 and later put around the unpickler's own words."""
    if "was not an allowed global by default." in message:
        return f"{_OPTIONS}{message}{_DOCS}"
    if re.search(r"(\S+) must be (\S+) to load", message):
        return f"Weights only load failed. {message}\n {_UNSAFE}\n"
    asked = "" if "is blocked" in message else _ISSUE
    gap = "\n\n" if version >= (2, 9) else ""
    return f"Weights only load failed. {_UNSAFE}\n{asked}{gap}{message}{_DOCS}"


def unsupported_global(full: str, name: str, version: Version) -> str:
    """A name that is not allowed; 2.6 tells to allow it by its last part only."""
    if version >= (2, 7):
        full = full.removeprefix("builtins.")
        name = full
    return (
        f"Unsupported global: GLOBAL {full} was not an allowed global by default. "
        f"Please use `torch.serialization.add_safe_globals([{name}])` or the "
        f"`torch.serialization.safe_globals([{name}])` context manager to allowlist this global "
        "if you trust this class/function."
    )


def blocked(full: str, module: str) -> str:
    """A name out of a module that nothing allows."""
    return f"Trying to load unsupported GLOBAL {full} whose module {module} is blocked."


def foreign_id(first: object, version: Version) -> str:
    """A persistent id that is no storage's."""
    return f"Only persistent_load of storage is allowed, but got {type(first) if version >= (2, 10) else first}"


def protocol_warning(protocol: int) -> str:
    """Said of every protocol but torch's own."""
    return (
        f"Detected pickle protocol {protocol} in the checkpoint, which was not the default pickle protocol used by "
        "`torch.load` (2). The weights_only Unpickler might not support all instructions implemented by this protocol, "
        "please file an issue for adding support if you encounter this."
    )


def load_key(byte: int) -> str:
    r"""What Python's own unpickler says of a byte that is no opcode.

    >>> load_key(0x3C), load_key(0x1F)
    ("invalid load key, '<'.", "invalid load key, '\\x1f'.")
    """
    shown = chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
    return f"invalid load key, '{shown}'."


def implicit_pickle(version: Version) -> tuple[str, ...]:
    """What 2.4 and 2.5 said of their default."""
    return (_IMPLICIT,) if (2, 4) <= version < (2, 6) else ()


# -- archives and devices


def no_directory(version: Version) -> str:
    """An archive without its end."""
    return f"PytorchStreamReader failed reading zip archive: failed finding central directory{_miniz(version)}"


def _miniz(version: Version) -> str:
    return _MINIZ if version >= (2, 11) else ""


def no_record(name: str, version: Version) -> str:
    """A record that is not in the archive."""
    return f"PytorchStreamReader failed locating file {name}: file not found{_miniz(version)}"


def device_error(tag: str, version: Version, counts: dict[str, int]) -> tuple[str, str]:
    """The error of restoring a storage to a tag: its class and words; both empty where it is restored.

    ``counts`` are the devices torch has of each kind; none of a kind means that its ``is_available()`` is false.

    >>> device_error("cuda:1", (2, 13), {"cuda": 1})[1][:66]
    'Attempting to deserialize object on CUDA device 1 but torch.cuda.d'
    >>> device_error("cuda:0", (2, 13), {"cuda": 1})
    ('', '')
    """
    if tag in ("cpu", "meta"):
        return "", ""
    if tag.startswith("mps"):
        text = "" if counts.get("mps") else "torch.UntypedStorage(): Storage device not recognized: mps"
        return ("RuntimeError", text) if text else ("", "")
    kind = next((kind for kind, since in _SINCE.items() if version >= since and _meant(tag, kind, version)), "")
    if not kind:
        lost = f"don't know how to restore data location of torch.storage.UntypedStorage (tagged with {tag})"
        return "RuntimeError", lost
    text = _validated(tag, kind, version, counts.get(kind, 0))
    return (("AssertionError" if version < (2, 4) and kind == "hpu" else "RuntimeError"), text) if text else ("", "")


_SINCE: dict[str, Version] = {"cuda": (2, 1), "privateuseone": (2, 1), "hpu": (2, 1), "xpu": (2, 5), "mtia": (2, 10)}
"""Kinds of devices that storages are restored to, and since when."""


def _meant(tag: str, kind: str, version: Version) -> bool:
    if version >= (2, 11):
        return tag == kind or re.match(f"{kind}(:|[0-9]+)", tag) is not None
    return tag.startswith(kind)


def _validated(tag: str, kind: str, version: Version, count: int) -> str:
    if kind in ("hpu", "privateuseone") and not count:
        return (
            f"The {kind.upper()} device module is not registered. {_TO_CPU}"
            if version >= (2, 4)
            else "HPU device module is not loaded"
        )
    if not re.fullmatch(rf"{kind}(:(0|[1-9][0-9]*))?", tag):
        return f"Invalid device string: '{tag}'"
    if not count:
        tried = f"Attempting to deserialize object on a {kind.upper()} device"
        return f"{tried} but torch.{kind}.is_available() is False. {_TO_CPU}"
    index = int(tag.partition(":")[2][:4] or 0)
    if index < count:
        return ""
    return (
        f"Attempting to deserialize object on {kind.upper()} device {index} but "
        f"torch.{kind}.device_count() is {count}. "
        "Please use torch.load with map_location to map your storages to an existing device."
    )
