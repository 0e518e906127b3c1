"""Texts about what was loaded and does not fit: names, shapes, optimizers."""

from __future__ import annotations

import re
from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE", "prefix_between"]

_QUOTED = re.compile(r'"([^"]{1,400})"')
_SECTION = r"{} key\(s\) in state_dict: (?P<names>(?:\"[^\"]*\"(?:, )?)+)"
_PREFIXES = {
    "module.": "DataParallel and DistributedDataParallel put it before every name",
    "_orig_mod.": "torch.compile puts it before every name",
    "model.": "Lightning and others keep the model under that name",
    "net.": "a wrapper keeps the model under that name",
    "state_dict.": "the whole checkpoint was given, not its state dict",
    "_forward_module.": "Lightning Fabric puts it before every name",
    "_fsdp_wrapped_module.": "FSDP puts it before every name",
}
_WRAPPERS = frozenset(
    {"state_dict", "model", "model_state_dict", "net", "ema", "optimizer", "epoch", "optimizer_states"}
)
_AS_MODEL = (
    r"OrderedDict|torch\.load\(|'dict' object has no attribute '(?:eval|train|state_dict|load_state_dict|parameters|"
    r"named_parameters|modules|named_modules|children|requires_grad_|zero_grad)'"
)
"""Where a dictionary stands for a model; a batch of data may be one, too, and be sent to a device."""
_LATER = (
    "padding_mode",
    "_reversed_padding_repeated_twice",
    "recompute_scale_factor",
    "approximate",
    "track_running_stats",
    "divisor_override",
    "activation_relu_or_gelu",
    "norm_first",
    "_qkv_same_embed_dim",
    "enable_nested_tensor",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
)
"""What torch's own modules got in later releases."""
_INTO = "transload.load_into(model, path) finds prefixes and wrappers by itself, and says what does not fit."


def _names(text: str, which: str) -> list[str]:
    found = re.search(_SECTION.format(which), text)
    return _QUOTED.findall(found["names"]) if found else []


def prefix_between(missing: list[str], unexpected: list[str]) -> tuple[str, bool]:
    """A prefix that all names of one list have before those of the other; whether it is the file that has it.

    >>> prefix_between(["weight"], ["module.weight"])
    ('module.', True)
    """
    for longer, shorter, in_file in ((unexpected, missing, True), (missing, unexpected, False)):
        if not longer or not shorter:
            continue
        ends = [name for name in shorter if longer[0].endswith(name)]
        for name in ends:
            prefix = longer[0].removesuffix(name)
            known = set(shorter)
            if prefix and all(each.startswith(prefix) and each.removeprefix(prefix) in known for each in longer[:50]):
                return prefix, in_file
    return "", False


def _infix(missing: list[str], unexpected: list[str]) -> str:
    """What a wrapper around a part of the model puts into the names of that part."""
    for infix in ("_orig_mod.", "module.", "_fsdp_wrapped_module."):
        inner = [name for name in unexpected if infix in name]
        if inner and all(name.replace(infix, "") in missing for name in inner):
            return infix
    return ""


def _keys(values: Values, text: str) -> dict[str, Any]:
    missing, unexpected = _names(text, "Missing"), _names(text, "Unexpected")
    prefix, in_file = prefix_between(missing, unexpected)
    if prefix:
        return _prefixed(values["model"], prefix, in_file=in_file)
    wrappers = [name for name in unexpected if name in _WRAPPERS]
    if wrappers and missing:
        inner = next(
            (name for name in ("state_dict", "model_state_dict", "model", "net", "ema") if name in wrappers), ""
        )
        example = (f'| model.load_state_dict(checkpoint["{inner}"])',) if inner else ()
        return {
            "values": {"wrappers": ", ".join(wrappers[:4])},
            "cause": "The file holds a whole checkpoint ({wrappers}), and all of it was given to {model} as its state "
            "dict.",
            "fix": ("Give it the part with the weights:", *example, _INTO),
        }
    infix = _infix(missing, unexpected)
    if infix:
        return {
            "values": {"infix": infix, "why": _PREFIXES[infix]},
            "cause": "The names in the file have '{infix}' in their middle, and those of {model} do not: {why}.",
            "fix": ("Take it out:", f'| state = {{{{k.replace("{infix}", ""): v for k, v in state.items()}}}}', _INTO),
        }
    mismatched = re.findall(r"size mismatch for ([^\s:]+):", text)
    return _other(missing, unexpected, mismatched)


def _prefixed(model: str, prefix: str, *, in_file: bool) -> dict[str, Any]:
    why = _PREFIXES.get(prefix, "the model was inside another one when it was saved, or is now")
    extra = {"prefix": prefix, "why": why, "model": model}
    if in_file:
        return {
            "values": extra,
            "cause": "The names in the file all begin with '{prefix}', and those of {model} do not: {why}.",
            "fix": (
                "Take it off:",
                f'| state = {{{{k.removeprefix("{prefix}"): v for k, v in state.items()}}}}',
                _INTO,
            ),
        }
    return {
        "values": extra,
        "cause": "The names of {model} all begin with '{prefix}', and those in the file do not: {why}.",
        "fix": (
            "Load into the inner model, or put the prefix on:",
            f'| state = {{{{"{prefix}" + k: v for k, v in state.items()}}}}',
            _INTO,
        ),
    }


def _other(missing: list[str], unexpected: list[str], mismatched: list[str]) -> dict[str, Any]:
    told = [
        f"{words}: {len(names):,}"
        for names, words in (
            (missing, "names missing in the file"),
            (unexpected, "names that only the file has"),
            (mismatched, "tensors of another shape"),
        )
        if names
    ]
    return {"values": {"told": "; ".join(told) or "names or shapes differ"}}


TABLE: tuple[Known, ...] = (
    Known(
        "state-dict-keys",
        (
            "Error(s) in loading state_dict for {model:w}: Missing key(s) in state_dict:",
            "Error(s) in loading state_dict for {model:w}: Unexpected key(s) in state_dict:",
            "Error(s) in loading state_dict for {model:w}: size mismatch for {name:w}: copying a param with shape",
            "Error(s) in loading state_dict for {model:w}: size mismatch for {name:w}: copying a param of",
        ),
        "The file's weights are not those of this {model} ({told}). The file itself was read without error.",
        (
            (
                "Build the model with the configuration it was trained with: another number of classes or layers, "
                "another version of its code."
            ),
            (
                "strict=False leaves out what is missing on either side, and leaves those weights as they were; it "
                "does not help against other shapes."
            ),
            _INTO,
        ),
        torch="1.0 and later",
        needs=("file",),
        work=_keys,
    ),
    Known(
        "state-dict-shape",
        (
            (
                "size mismatch for {name:w}: copying a param with shape {file:o} from checkpoint, the shape in current "
                "model is {shape:o}."
            ),
        ),
        "{name} has the shape {file} in the file and {shape} in the model: it is another architecture, or a piece of a "
        "sharded or flattened tensor.",
        ("Build the model with the configuration it was trained with.", _INTO),
        torch="1.0 and later",
        needs=("file",),
        unless=r"Error\(s\) in loading state_dict",
    ),
    Known(
        "copy-failed",
        (
            'While copying the parameter named "{name}", whose dimensions in the model are',
            "Error(s) in loading state_dict for {model:w}: While copying the parameter named",
        ),
        "load_state_dict could not copy a parameter; why stands behind 'an exception occurred'.",
        torch="1.0 and later",
        role="frame",
    ),
    Known(
        "meta-tensor",
        ("Cannot copy out of meta tensor; no data!",),
        "A tensor on the device 'meta' has a shape and no numbers, and was to be copied: the model or the file was "
        "loaded without data (low_cpu_mem_usage, init_empty_weights, map_location='meta').",
        (
            "Load the real weights into such a model with assign=True:",
            "| model.load_state_dict(state, assign=True)",
            "To move an empty model: model.to_empty(device=...), and load its weights afterwards.",
        ),
    ),
    Known(
        "state-dict-kind",
        ("Expected state_dict to be dict-like, got {kind:o}.", "object has no attribute 'copy'"),
        "What was given to load_state_dict is no state dict: the file holds a whole model, or something else.",
        ("| model.load_state_dict(loaded.state_dict())", _INTO),
        needs=("file",),
        context=r"load_state_dict|Expected state_dict",
    ),
    Known(
        "optimizer-group-size",
        ("loaded state dict contains a parameter group that doesn't match the size of optimizer's group",),
        "The saved optimizer had another number of parameters in a group than this one: layers were added, frozen or "
        "taken out.",
        (
            "Make the optimizer over the same parameters, in the same order, as when it was saved.",
            "Or start the optimizer anew, and load only the model.",
        ),
        torch="1.0 and later",
    ),
    Known(
        "optimizer-groups",
        ("loaded state dict has a different number of parameter groups",),
        "The saved optimizer had another number of parameter groups than this one.",
        (
            "Make the same groups as when it was saved.",
            "Or start the optimizer anew, and load only the model.",
        ),
        torch="1.0 and later",
    ),
    Known(
        "state-dict-is-no-model",
        (
            "'collections.OrderedDict' object has no attribute '{name:w}'",
            "'collections.OrderedDict' object is not callable",
            "'dict' object has no attribute '{name:w}'",
        ),
        "What torch.load gave is a dictionary of weights, and was used as a model: the file holds a state dict or a "
        "checkpoint, not the model itself.",
        (
            "Make the model, then give it the weights:",
            "| model = Net(...)",
            "| model.load_state_dict(loaded)",
            "Of a checkpoint give it the part with the weights; transload inspect FILE lists what is in it.",
            _INTO,
        ),
        needs=("file",),
        context=_AS_MODEL,
    ),
    Known(
        "module-of-older-torch",
        tuple(f"'{{kind:w}}' object has no attribute '{name}'" for name in _LATER),
        "The file holds a whole model that an older torch saved, and not only its weights: a {kind} of that time had "
        "less in it than one of this torch asks for. Loading it did not make it anew.",
        (
            "Make the model with its own code, and give it the weights of the old one:",
            "| model.load_state_dict(loaded.state_dict())",
            "Then save model.state_dict(), which does not grow old like that.",
            "Without its code: run it with the torch of that time, or take the weights out by transload convert.",
        ),
        needs=("file",),
        context=r"torch[/\\]nn[/\\]modules",
    ),
    Known(
        "lightning-not-its-own",
        ("KeyError: 'pytorch-lightning_version'",),
        "Lightning was given a file that is no checkpoint of its own, most likely a state dict of torch.save.",
        ("Load it into the model by hand:", '| model.load_state_dict(torch.load(path, map_location="cpu"))', _INTO),
        needs=("file",),
    ),
)
