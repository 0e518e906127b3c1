"""Functions that pages name as their ``hook``, for what a pattern cannot express.

A hook gets the values in the blanks of a message; ``text`` is everything from the match on. It adds values that the
page uses, and returns the names of the ``###`` sections that apply, in the order in which they replace parts of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Values = dict[str, str]
Sections = Sequence[str]

WITHOUT_BLANKS = ("gpu_memory", "state_dict_keys")
"""Hooks that also work for the beginning of a message, which has no values in its blanks."""


def device_index(values: Values) -> Sections:
    """How many devices there are, counted from 0."""
    count, name = int(values["count"]), values["kind"].lower()
    last = f"{name}:{count - 1}"
    here = {0: "none", 1: f"one, {name}:0", 2: f"2, {name}:0 and {last}"}.get(count, f"{count}, {name}:0 to {last}")
    values |= {"here": here, "target": f"{name}:0" if count else "cpu"}
    return ()


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def gpu_memory(values: Values) -> Sections:
    """Whether much memory is reserved but fragmented, and whether another process holds some."""
    # Without the error of the next rank.
    message = values["text"].partition("out of memory")[2].partition("out of memory")[0]
    if re.search(r"Process \d+ has ", message):
        maybe = "" if "this process has" in message else ", or in a container this one under its number outside,"
        values["others"] = f"; the text also says that another process{maybe} holds memory of that GPU"
    sizes = re.findall(r"(?:allocate|and) (\d+(?:\.\d+)?) (bytes|[KMG]iB)(?:\.| is reserved by PyTorch but)", message)
    wanted, *reserved = [float(number) * _UNITS[unit] for number, unit in sizes] or [0.0]
    # A few unused MiB are always there: then the GPU is full.
    return ("gpu-memory-full/fragmented",) if reserved and reserved[0] >= max(wanted, _UNITS["GiB"]) else ()


# -- pickles

_BEGINNINGS = {60: "html", 118: "git-lfs", 123: "json", 0x1F: "gzip", 10: "empty-line", 80: "zip", 0: "zeros"}
"""By the first byte of a file."""
_NEWER_OPCODES = range(0x80, 0x9C)
_OPCODES = frozenset(b"(.0123FIJKLMNQRSTUVXabcdeghijlopqrstu}]GBC)")
"""Opcodes of any pickle; weights_only knows some of them."""


def load_key(values: Values) -> Sections:
    """What a file that begins with the given byte is; a byte that is not a character may be lost in the log."""
    key = values["key"] or "\\xff"
    hexadecimal = re.fullmatch(r"\\x([0-9a-fA-F]{2})", key)
    return (_beginning(values, int(hexadecimal[1], 16) if hexadecimal else ord(key[0]) & 0xFF),)


def operand(values: Values) -> Sections:
    """Which byte weights_only does not know; torch's advice is right only for opcodes of newer protocols."""
    code = int(values["operand"])
    if code in _NEWER_OPCODES:
        return ("operand/newer-protocol",)
    if code in _OPCODES:
        return ("operand/either",)
    return _beginning(values, code), "operand/not-a-pickle"


def _beginning(values: Values, code: int) -> str:
    values["letter"] = chr(code) if 0x20 < code < 0x7F and chr(code) not in "@ABCDEFGH" else ""
    return f"load-key/{_BEGINNINGS.get(code) or ('letter' if values['letter'] else 'other')}"


def class_name(values: Values) -> Sections:
    """The name is only the beginning of a torch name: the file was cut off within it."""
    return ("class-not-defined/cut-off",) if _cut_off(f"{values['module']}.{values['name']}") else ()


def refused_name(values: Values) -> Sections:
    """The name is dangerous, or was cut off with the file, or the user has to decide."""
    from transload.judge.names import PLAIN_VALUES, can_be_allowed, classify

    full = values["name"]
    if full in ("getattr", "builtins.getattr", "__builtin__.getattr"):
        return ("name-not-allowed/getattr",)
    module, _, name = full.rpartition(".")
    verdict, purpose = classify(module or "builtins", name)
    if verdict == "dangerous":
        return ("name-not-allowed/dangerous",)
    if _cut_off(full):
        return ("name-not-allowed/cut-off",)
    if not can_be_allowed(module or "builtins", name):
        return ("name-not-allowed/not-data",)
    values["purpose"] = f" ({purpose})" if purpose and not purpose.startswith("not known") else ""
    values["call"] = full if all(part.isidentifier() for part in full.split(".")) else "TheClass"
    if values["call"].startswith("numpy.core."):  # numpy 2 renamed it, and torch looks for the name in the file
        values["call"] = f'({full.replace("core", "_core", 1)}, "{full}")'
    values["loads"] = "is one of them" if full in PLAIN_VALUES else "is not one of them, and must be allowed there too"
    return ()


def _cut_off(full: str) -> bool:
    from transload.judge.names import TORCH_DEFAULT

    return full not in TORCH_DEFAULT and any(name.startswith(full) for name in TORCH_DEFAULT)


# -- state dicts

_QUOTED = re.compile(r'"([^"]{1,400})"')
_NEVER_MISSING = "num_batches_tracked"
_INFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_forward_module.")
_WEIGHTS = ("state_dict", "model_state_dict", "model", "net", "ema")
_WRAPPERS = frozenset({*_WEIGHTS, "optimizer", "epoch", "optimizer_states"})


def state_dict_keys(values: Values) -> Sections:
    """Why the two lists of names differ: a prefix, a whole checkpoint instead of a state dict, or another model."""

    def names(which: str) -> list[str]:
        match = re.search(rf"{which} key\(s\) in state_dict: (?P<names>(?:\"[^\"]*\"(?:, )?)+)", values["text"])
        return _QUOTED.findall(match["names"]) if match else []

    missing, unexpected = names("Missing"), names("Unexpected")
    shapes = set(re.findall(r"size mismatch for ([^\s:]+):", values["text"]))
    if shapes:
        values["ignoring"] = ", ignore_mismatched_sizes=True"
        values["also"] = f" Besides, the model differs: tensors of another shape: {len(shapes):,}."
    values["prefix"], in_file = prefix_between(missing, unexpected)
    if unexpected and not missing:  # people paste only the end; no model names its own parts like a wrapper
        values["prefix"] = next((infix for infix in _INFIXES if all(name.startswith(infix) for name in unexpected)), "")
        in_file = True
    if values["prefix"]:
        return (f"state-dict-keys/prefix-in-{'file' if in_file else 'model'}",)
    wrappers = [name for name in unexpected if name in _WRAPPERS]
    if wrappers and missing:
        inner = next((name for name in _WEIGHTS if name in wrappers), "")
        values |= {"wrappers": ", ".join(wrappers[:4]), "inner": inner}
        return (f"state-dict-keys/whole{'-named' if inner else ''}",)
    for infix in _INFIXES:
        inside = [name for name in unexpected if infix in name and not name.endswith(_NEVER_MISSING)]
        if inside and (not missing or all(name.replace(infix, "") in missing for name in inside)):
            values["prefix"] = infix
            return ("state-dict-keys/infix",)
    counted = (
        (missing, "names missing in the file"),
        (unexpected, "names that only the file has"),
        (shapes, "tensors of another shape"),
    )
    differences = [f"{words}: {len(differing):,}" for differing, words in counted if differing]
    values["told"] = "; ".join(differences) or "names or shapes differ"
    return ()


def prefix_between(missing: list[str], unexpected: list[str]) -> tuple[str, bool]:
    """The prefix by which most names of one list differ from those of the other, and whether the file has it.

    torch never reports a missing ``num_batches_tracked`` (of BatchNorm), so such names are only in one list. A few
    names without a counterpart (a new last layer, the weights of a loss) do not matter.

    >>> prefix_between(["weight"], ["module.weight"])
    ('module.', True)
    """
    missing = [name for name in missing if not name.endswith(_NEVER_MISSING)]
    unexpected = [name for name in unexpected if not name.endswith(_NEVER_MISSING)]
    for longer, shorter, in_file in ((unexpected, missing, True), (missing, unexpected, False)):
        shorter_names = set(shorter)
        ends = ((name, dot.end()) for name in longer for dot in re.finditer(r"\.", name))
        prefixes = Counter(name[:end] for name, end in ends if name[end:] in shorter_names)
        for prefix, count in prefixes.most_common(1):
            if count > len(longer) / 2:
                return prefix, in_file
    return "", False
