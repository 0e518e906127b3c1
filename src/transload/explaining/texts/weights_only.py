"""Texts of ``weights_only``: names and opcodes that torch does not load by default, and what to make of its advice."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_ALL = "transload check FILE lists all such names at once (torch tells one at a time), and the lines that allow them."
_WEIGHTS = "For the weights alone nothing need be allowed: transload convert FILE OUT.safetensors saves them."
_LOAD = "transload.load(path) works with every torch from 2.1 on, and runs nothing of the file's."
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
_NO_NEED = (
    "weights_only=False is not the fix: it lets the file run any code. Allowing the names that it needs is enough."
)
_NEVER = (
    "Do not load it, and do not allow the name. Tell whoever you have it from.",
    (
        "transload inspect FILE shows what it would do; transload convert FILE OUT.safetensors saves its tensors "
        "without running anything."
    ),
)


_GETATTR: dict[str, Any] = {
    "cause": "The file calls getattr, as Python does for a method, a class within a class, or (Python 3.11) an "
    "enumeration: many honest files hold one, most of them whole models. An attack may use it, too.",
    "fix": (
        "Look what it asks for, and of what: transload check FILE.",
        _WEIGHTS,
        "If you trust the author: weights_only=False; then save model.state_dict() in its place.",
    ),
    "wrong": "Do not allow getattr itself: with it a file reaches whatever Python can do, as with weights_only=False.",
}


def _name(values: Values, _: str) -> dict[str, Any]:
    """A name is dangerous, or cut off with the file, or to be weighed."""
    from transload.judge.names import TORCH_DEFAULT, classify

    if values["name"] in ("getattr", "builtins.getattr", "__builtin__.getattr"):
        return _GETATTR
    module, _, name = values["name"].rpartition(".")
    verdict, purpose = classify(module or "builtins", name)
    if verdict == "dangerous":
        return {
            "cause": "The file asks torch to call {name}, which can run any code: no checkpoint needs it, and attacks "
            "look like that.",
            "fix": _NEVER,
            "wrong": "What torch advises, to allow the name or to pass weights_only=False, would run the attack.",
        }
    if any(full.startswith(values["name"]) and full != values["name"] for full in TORCH_DEFAULT):
        return {
            "cause": "The name {name} is the beginning of one that torch allows: the file is cut off in the middle of "
            "it.",
            "fix": (
                "Compare its size with the original's, and download or copy it again.",
                "If there is no other copy: transload rescue FILE OUT saves what is whole.",
            ),
            "wrong": "There is nothing to allow: no class of that name exists.",
        }
    told = f" ({purpose})" if purpose and not purpose.startswith("not known") else ""
    return {"values": {"purpose": told, "call": _call(values["name"])}}


def _since(values: Values, _: str) -> dict[str, Any]:
    """From which release on torch has it."""
    release = _SINCE.get(values["name"], "")
    return {"values": {"since": f" ({release} or newer has it)" if release else ""}}


def _parts(_: Values, text: str) -> dict[str, Any]:
    nested = text.startswith("``torch.nested``")
    return {"values": {"parts": "torch.nested, torch._dynamo" if nested else "torch.distributed.tensor"}}


def _call(full: str) -> str:
    """The name as Python writes it in the program that loads."""
    return full if all(part.isidentifier() for part in full.split(".")) else "TheClass"


_WEIGHTS_ONLY = r"[Ww]eights.?[Oo]nly|WeightsUnpickler|_weights_only_unpickler"

TABLE: tuple[Known, ...] = (
    Known(
        "name-not-allowed",
        (
            "Unsupported global: GLOBAL {name:w} was not an allowed global by default.",
            "Unsupported global: GLOBAL {name:w}",
        ),
        "The file holds more than tensors: it needs {name}{purpose}, which weights_only does not use unless you allow "
        "it.",
        (
            "If you trust the file's author, allow it, after importing it:",
            "| torch.serialization.add_safe_globals([{call}])",
            _ALL,
            _WEIGHTS,
        ),
        wrong=_NO_NEED,
        torch="2.4 and later",
        needs=("file",),
        work=_name,
    ),
    Known(
        "class-not-allowed",
        ("Unsupported class {name:w}",),
        "The file holds more than tensors: it needs {name}{purpose}, which weights_only does not use, and this "
        "torch (before 2.4) has no way to allow it.",
        ("Use torch 2.4 or newer, where names can be allowed; 2.6 also closes a hole of weights_only.", _ALL, _WEIGHTS),
        wrong=_NO_NEED,
        torch="1.13 to 2.3",
        needs=("file",),
        context=_WEIGHTS_ONLY,
        work=_name,
    ),
    Known(
        "name-blocked",
        ("Trying to load unsupported GLOBAL {name:w} whose module {module:w} is blocked.",),
        "The file asks torch to call {name}: that is very likely an attack. No checkpoint needs anything of {module}.",
        _NEVER,
        wrong="What torch adds, that weights_only=False will likely succeed, would run the attack.",
        torch="2.5 and later",
        needs=("file",),
    ),
    Known(
        "build-not-allowed",
        (
            "Can only build Tensor, {kinds} but got {kind:o}",
            "Can only build Tensor, parameter or dict objects, but got {kind:o}",
        ),
        "The file sets the inner state of an object that is no tensor ({kind}), which weights_only does not do unless "
        "its class is allowed.",
        (_ALL, _WEIGHTS),
        wrong=_NO_NEED,
        torch="1.13 and later",
        needs=("file",),
    ),
    Known(
        "call-not-allowed",
        ("Trying to call reduce for unrecognized function {name:o}",),
        "The file calls a function ({name}) that weights_only does not call.",
        (_ALL, _WEIGHTS),
        wrong=_NO_NEED,
        torch="1.13 and later",
        needs=("file",),
    ),
    Known(
        "new-not-allowed",
        (
            (
                "Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got "
                "{kind:o}"
            ),
            "Can only create new object for nn.Parameter or {kinds} but got {kind:o}",
            "Can only create new object for nn.Parameter, but got {kind:o}",
        ),
        "The file makes an object of a class that is not allowed ({kind}).",
        (_ALL, _WEIGHTS),
        wrong=_NO_NEED,
        torch="1.13 and later",
        needs=("file",),
    ),
    Known(
        "id-not-allowed",
        (
            "Only persistent_load of storage is allowed, but got {what:o}",
            "persistent_load id must be tuple or int, but got {what:o}",
        ),
        "The file refers to something that is no tensor's storage: it is an old file that holds whole modules with "
        "their source, or it was tampered with.",
        (
            "transload inspect FILE says which of the two it is.",
            "An old file of whole modules: weights_only=False, if you trust its author; then save its state_dict().",
        ),
        torch="1.13 and later",
        needs=("file",),
    ),
    Known(
        "import-first",
        (
            "``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)",
            "``torch.distributed.tensor`` must be imported to load DTensors",
        ),
        "The file holds tensors of a kind that a part of torch must be imported for.",
        ("Before torch.load:", "| import {parts}"),
        wrong="weights_only=False is not needed: the import is enough.",
        torch="2.6 and later",
        needs=("file",),
        work=_parts,
    ),
    Known(
        "protocol-warning",
        (
            (
                "Detected pickle protocol {protocol:d} in the checkpoint, which was not the default pickle protocol "
                "used by `torch.load` (2)."
            ),
        ),
        "The file was pickled with protocol {protocol}, of which weights_only knows a part. It is a warning: an error "
        "follows only where an opcode is not known.",
        ("transload.load(path) knows all protocols, and runs nothing of the file's either.",),
        torch="2.4 and later",
        role="remark",
    ),
    Known(
        "default-warning",
        ("You are using `torch.load` with `weights_only=False` (the current default value)",),
        "torch announces that its default will change. It is no error.",
        ("Pass weights_only=True, or False for files of your own that need it.",),
        torch="2.4 and 2.5",
        role="remark",
    ),
    Known(
        "pickle-module-given",
        (
            "Can not safely load weights when explicit pickle_module is specified",
            "Can not safely load weights when expiclit picke_module is specified",
        ),
        "torch.load was given weights_only=True and a pickle_module; only one of them can be. The variable "
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD counts as the former.",
        ("Drop pickle_module, or weights_only and the variable.",),
        torch="1.13 and later",
    ),
    Known(
        "torch-lacks-it",
        (
            "'{name:w}' is an invalid keyword argument for Unpickler()",
            "'{name:w}' is an invalid keyword argument for load()",
            "Unpickler() got an unexpected keyword argument '{name:w}'",
            "module 'torch.serialization' has no attribute '{name:w}'",
            "cannot import name '{name:w}' from 'torch.serialization'",
        ),
        "The program uses {name}, which this torch does not have: it is too old for it{since}.",
        ("Install a newer torch. Its default since 2.6, weights_only=True, needs no argument.", _LOAD),
        context=r"weights_only|mmap|safe_globals|_globals_in_checkpoint|skip_data|set_default_load",
        work=_since,
    ),
    Known(
        "weights-only",
        ("Weights only load failed.",),
        "weights_only, the default since torch 2.6, refused something in the file; the text says what only further on, "
        "behind 'WeightsUnpickler error'.",
        ("transload check FILE tells what it is, and whether it is to be trusted.",),
        wrong="That weights_only=False will likely succeed is said of every such file, also of pages of HTML, of "
        "cut-off files and of attacks.",
        torch="1.13 and later",
        needs=("file",),
        role="frame",
    ),
    Known(
        "torch-load-vulnerable",
        (
            (
                "Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require "
                "users to upgrade torch to at least v2.6"
            ),
            "Due to a serious vulnerability issue in torch.load",
        ),
        "transformers refuses to load files of torch.save with a torch before 2.6, whose weights_only has a hole "
        "(CVE-2025-32434).",
        (
            "Install torch 2.6 or newer, or use the model's safetensors files, to which it does not apply.",
            "transload convert FILE OUT.safetensors makes one of a file of torch.save, without loading it.",
        ),
        needs=("file",),
    ),
)
