"""Functions that pages name as their ``hook``, for what a pattern cannot say.

A hook gets the values in the blanks of a text, and the text from the match on. It adds values that the page uses, and
returns the names of the ``###`` sections of the page that apply, in the order in which they replace its parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["prefix_between"]

Values = dict[str, str]
Sections = Sequence[str]

# -- devices

_DEVICE_PACKAGES = {
    "npu": "torch_npu (Ascend)",
    "hpu": "habana_frameworks.torch (Gaudi)",
    "xla": "torch_xla",
    "ipu": "poptorch (Graphcore)",
    "mlu": "torch_mlu (Cambricon)",
    "dml": "torch_directml",
    "privateuseone": "the package of the device's maker",
}


def device_index(values: Values, _: str) -> Sections:
    """How many devices there are, counted from 0."""
    count, name = int(values["count"]), values["kind"].lower()
    last = f"{name}:{count - 1}"
    here = {0: "none", 1: f"one, {name}:0", 2: f"2, {name}:0 and {last}"}.get(count, f"{count}, {name}:0 to {last}")
    values |= {"here": here, "target": f"{name}:0" if count else "cpu"}
    return ()


def device_tag(values: Values, _: str) -> Sections:
    """Whether another package provides such a device, or the word is not a device at all."""
    kind = values["tag"].partition(":")[0]
    if kind in ("cpu", "gpu", "GPU", "CPU", "cuda0", "cuda1"):
        values["right"] = "cpu" if kind.lower() == "cpu" else "cuda:0"
        return ("device-tag-unknown/misspelled",)
    values["package"] = _DEVICE_PACKAGES.get(kind, "")
    return ("device-tag-unknown/package",) if values["package"] else ()


# -- files and pickles

_BEGINNINGS = {
    ord("<"): "html",
    ord("v"): "git-lfs",
    ord("{"): "json",
    0x1F: "gzip",
    ord("\n"): "empty-line",
    ord("P"): "zip",
    0: "zeros",
}
_NEWER_OPCODES = range(0x80, 0x9C)
_OPCODES = frozenset(b"(.0123FIJKLMNQRSTUVXabcdeghijlopqrstu}]GBC)")
"""Opcodes of any pickle; weights_only knows a part of them."""


def byte_sizes(values: Values, _: str) -> Sections:
    """Up to torch 2.14 the two numbers are printed one after the other, with nothing between."""
    if values["want"]:
        values["numbers"] = f"{values['have']} where {values['want']} were expected"
        return ()
    values["numbers"] = "another number than expected"
    return ("legacy-wrong-size/run-together",)


def load_key(values: Values, _: str) -> Sections:
    key = values["key"] or "\\xff"  # a byte that is not a character was lost on the way
    hexadecimal = re.fullmatch(r"\\x([0-9a-fA-F]{2})", key)
    return (_beginning(values, int(hexadecimal[1], 16) if hexadecimal else ord(key[0]) & 0xFF),)


def operand(values: Values, _: str) -> Sections:
    """Which byte weights_only does not know; torch's advice is right only if it is an opcode of a newer protocol."""
    code = int(values["operand"])
    if code in _NEWER_OPCODES:
        return ("operand/newer-protocol",)
    if code in _OPCODES:
        return ("operand/either",)
    return _beginning(values, code), "operand/not-a-pickle"


def _beginning(values: Values, code: int) -> str:
    """What a file is that begins with a byte that is not the beginning of a pickle."""
    values["letter"] = chr(code) if 0x20 < code < 0x7F and chr(code) not in "@ABCDEFGH" else ""
    return f"load-key/{_BEGINNINGS.get(code) or ('letter' if values['letter'] else 'other')}"


def class_name(values: Values, _: str) -> Sections:
    """A name that is the beginning of one of torch's own was cut off; otherwise another torch may have it."""
    from transload.judge.names import TORCH_DEFAULT

    full = f"{values['module']}.{values['name']}"
    if full not in TORCH_DEFAULT and any(name.startswith(full) for name in TORCH_DEFAULT):
        return ("class-not-defined/cut-off",)
    return ("class-not-defined/other-torch",) if values["module"].partition(".")[0] == "torch" else ()


def class_module(values: Values, _: str) -> Sections:
    section = {"numpy": "numpy", "__torch__": "torchscript"}.get(values["module"].partition(".")[0])
    return (f"class-module-missing/{section}",) if section else ()


def undecodable_byte(values: Values, _: str) -> Sections:
    return ("python-2-text/damaged",) if values["byte"].lower() == "80" else ()


# -- weights_only

_SINCE = {
    "weights_only": "1.13",
    "mmap": "2.1",
    "add_safe_globals": "2.4",
    "get_safe_globals": "2.4",
    "clear_safe_globals": "2.4",
    "safe_globals": "2.6",
    "skip_data": "2.6",
    "get_unsafe_globals_in_checkpoint": "2.6",
}


def refused_name(values: Values, _: str) -> Sections:
    """A name is dangerous, or was cut off with the file, or the user has to decide."""
    from transload.judge.names import TORCH_DEFAULT, classify

    full = values["name"]
    if full in ("getattr", "builtins.getattr", "__builtin__.getattr"):
        return ("name-not-allowed/getattr",)
    module, _, name = full.rpartition(".")
    verdict, purpose = classify(module or "builtins", name)
    if verdict == "dangerous":
        return ("name-not-allowed/dangerous",)
    if any(allowed.startswith(full) and allowed != full for allowed in TORCH_DEFAULT):
        return ("name-not-allowed/cut-off",)
    values["purpose"] = f" ({purpose})" if purpose and not purpose.startswith("not known") else ""
    values["call"] = full if all(part.isidentifier() for part in full.split(".")) else "TheClass"
    return ()


def parts_of_torch(values: Values, text: str) -> Sections:
    nested = text.startswith("``torch.nested``")
    values["parts"] = "torch.nested, torch._dynamo" if nested else "torch.distributed.tensor"
    return ()


def newer_argument(values: Values, _: str) -> Sections:
    """The first release of torch that has it."""
    release = _SINCE.get(values["name"], "")
    values["since"] = f" ({release} or newer has it)" if release else ""
    return ()


# -- state dicts

_QUOTED = re.compile(r'"([^"]{1,400})"')
_PREFIXES = {
    "module.": "DataParallel and DistributedDataParallel put it before every name",
    "_orig_mod.": "torch.compile puts it before every name",
    "model.": "Lightning and others keep the model under that name",
    "net.": "a wrapper keeps the model under that name",
    "state_dict.": "the whole checkpoint was given, not its state dict",
    "_forward_module.": "Lightning Fabric puts it before every name",
    "_fsdp_wrapped_module.": "FSDP puts it before every name",
}
_NEVER_MISSING = "num_batches_tracked"
_INFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")
_WEIGHTS = ("state_dict", "model_state_dict", "model", "net", "ema")
_WRAPPERS = frozenset({*_WEIGHTS, "optimizer", "epoch", "optimizer_states"})


def state_dict_keys(values: Values, text: str) -> Sections:
    """What the difference between the two lists of names shows: a prefix, a whole checkpoint, or another model."""

    def names(which: str) -> list[str]:
        found = re.search(rf"{which} key\(s\) in state_dict: (?P<names>(?:\"[^\"]*\"(?:, )?)+)", text)
        return _QUOTED.findall(found["names"]) if found else []

    missing, unexpected = names("Missing"), names("Unexpected")
    prefix, in_file = prefix_between(missing, unexpected)
    if prefix:
        why = _PREFIXES.get(prefix, "the model was inside another one when it was saved, or is now")
        values |= {"prefix": prefix, "why": why}
        return (f"state-dict-keys/prefix-in-{'file' if in_file else 'model'}",)
    wrappers = [name for name in unexpected if name in _WRAPPERS]
    if wrappers and missing:
        inner = next((name for name in _WEIGHTS if name in wrappers), "")
        values |= {"wrappers": ", ".join(wrappers[:4]), "inner": inner}
        return (f"state-dict-keys/whole{'-named' if inner else ''}",)
    for infix in _INFIXES:
        inside = [name for name in unexpected if infix in name and not name.endswith(_NEVER_MISSING)]
        if inside and all(name.replace(infix, "") in missing for name in inside):
            values |= {"infix": infix, "why": _PREFIXES[infix]}
            return ("state-dict-keys/infix",)
    counted = (
        (missing, "names missing in the file"),
        (unexpected, "names that only the file has"),
        (re.findall(r"size mismatch for ([^\s:]+):", text), "tensors of another shape"),
    )
    differences = [f"{words}: {len(found):,}" for found, words in counted if found]
    values["told"] = "; ".join(differences) or "names or shapes differ"
    return ()


def prefix_between(missing: list[str], unexpected: list[str]) -> tuple[str, bool]:
    """A prefix that all names of one list have before those of the other; and whether the file is the one that has it.

    torch never reports a missing ``num_batches_tracked`` (of BatchNorm), so those are in one of the lists only.

    >>> prefix_between(["weight"], ["module.weight"])
    ('module.', True)
    """
    missing = [name for name in missing if not name.endswith(_NEVER_MISSING)]
    unexpected = [name for name in unexpected if not name.endswith(_NEVER_MISSING)]
    for longer, shorter, in_file in ((unexpected, missing, True), (missing, unexpected, False)):
        known = set(shorter)
        for name in shorter if longer else ():
            prefix = longer[0].removesuffix(name) if longer[0].endswith(name) else ""
            if prefix and all(each.startswith(prefix) and each.removeprefix(prefix) in known for each in longer[:50]):
                return prefix, in_file
    return "", False


# -- other formats


def safetensors_dtype(values: Values, _: str) -> Sections:
    unknown = re.search(r"unknown variant `(\w{1,40})`", values["why"])
    values["dtype"] = unknown[1] if unknown else ""
    return ("safetensors-header-json/dtype",) if unknown else ()


def checkpoint_folder(values: Values, _: str) -> Sections:
    values["folder"] = values["folder"] or "to load"  # torch 2.11 does not name it
    return ()


# -- drivers and GPUs

_WHEELS = {"13": "cu130", "12": "cu126", "11": "cu118"}
_REMARKS = {"11": " (torch 2.7 is the last one)", "12": " (for a Blackwell card cu128 in place of cu126)"}
_GENERATIONS = ((100, "blackwell"), (75, "turing"), (50, "maxwell"), (0, "older"))
_HOST_FAULTS = {
    "driver not loaded": "driver-not-loaded",
    "load library failed": "no-library",
    "no adapters were found": "wsl",
    "version mismatch": "version-mismatch",
    "unknown error": "unknown-error",
    "permission": "permission",
}


def driver_version(values: Values, _: str) -> Sections:
    """12080 is CUDA 12.8: which torch goes with it."""
    version = int(values["version"])
    if version < 1000:
        return ("driver-too-old/no-version",)
    major, minor = str(version // 1000), version % 1000 // 10
    index = _WHEELS.get(major, "")
    values |= {"cuda": f"{major}.{minor}", "major": major, "index": index, "remark": _REMARKS.get(major, "")}
    return ("driver-too-old/wheel" if index else "driver-too-old/no-wheel",)


def compute_capability(values: Values, _: str) -> Sections:
    """Whether the card is too new for an old torch, or too old for the usual ones."""
    major, dot, minor = values["capability"].partition(".")
    digits = f"{major}{minor}" if dot else major
    if not digits.isdecimal() or len(digits) < 2:
        values["dotted"] = values["capability"]
        return ()
    values["dotted"] = f"{digits[:-1]}.{digits[-1]}"
    return (f"card-without-code/{next(name for least, name in _GENERATIONS if int(digits) >= least)}",)


def application(values: Values, text: str) -> Sections:
    """Some programs ask for a certain GPU, and print what torch has; one advises not to ask."""
    counted = re.search(r"torch\.cuda\.device_count\(\): (\d{1,4})", text)
    if "torch.cuda.is_available(): True" in text and counted:
        values["count"] = counted[1]
        return ("app-no-gpu/device-index",)
    return ("app-no-gpu/skip-test",) if "--skip-torch-cuda-test" in text else ()


def memory_size(values: Values, _: str) -> Sections:
    size, unit = values["size"], values["unit"].rstrip(".")
    values["wanted"] = f"{size} {unit}" if size and unit else "what was asked for"
    return ()


def library(values: Values, _: str) -> Sections:
    """The driver's own libraries come with the driver, the others with torch."""
    drivers = values["library"] in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")
    return ("library-missing/driver",) if drivers else ()


def container_host(values: Values, _: str) -> Sections:
    """The last few words say what is wrong with the host."""
    why = values["why"].lower()
    return [f"container-start/{name}" for sign, name in _HOST_FAULTS.items() if sign in why][:1]
