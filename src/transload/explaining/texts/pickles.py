"""Texts about the pickle in a file: what is none, what is cut off, and whose classes are not here."""

from __future__ import annotations

import re
from typing import Any

from transload.explaining.known import Known, Values
from transload.explaining.texts.archives import AGAIN, LOADING

__all__ = ["TABLE", "first_byte"]

_PICKLE = LOADING + r"|find_class|pickle\.load|joblib|\bunpickl"
_LAST = (
    r'(?:torch[/\\](?:serialization|_weights_only_unpickler)|pickle)\.py"?[^\n]*\n'
    r"(?:(?!  File )[ \t][^\n]*\n)*(?:\w+\.)*{error}\b"
)
_OTHER_PROCESS = r"multiprocessing[/\\](?:spawn|queues|connection|pool|reduction)\.py|multiprocessing\.spawn"
_INSPECT = "transload inspect FILE says what it is."
_WEIGHTS = "For the weights alone neither is needed: transload inspect FILE lists them, transload convert saves them."

# What a file that is no pickle begins with, and what it then is.
_BEGINNINGS: dict[int, tuple[str, tuple[str, ...]]] = {
    0x3C: (
        (
            "It begins with '<': it is an HTML or XML page, most often one that was downloaded in place of the file (a "
            "login, an error, a warning of the server's)."
        ),
        ("Look into it with a text editor, and download the real file: from the 'raw' or 'resolve' link, logged in.",),
    ),
    0x76: (
        (
            "It begins with 'v': it is most likely the pointer of Git LFS ('version https://git-lfs...'), a text of "
            "three lines in place of the file."
        ),
        ("Fetch the real file:", "$ git lfs install && git lfs pull"),
    ),
    0x7B: (
        (
            "It begins with '{{': it is a JSON text, such as an error of the server, a configuration or the index of a "
            "sharded checkpoint."
        ),
        ("Download the real file; of a sharded checkpoint load the directory, not its index.",),
    ),
    0x1F: (
        "It begins as a gzip file does: it is compressed as a whole.",
        ("Unpack it first: gunzip FILE, or transload rescue FILE OUT.",),
    ),
    0x0A: ("It begins with an empty line: it is a text, or a damaged file.", (_INSPECT,)),
    0x50: (
        (
            "It begins with 'P', as a zip archive does, and is none: only the first letters are there, or the rest is "
            "damaged."
        ),
        AGAIN,
    ),
    0x00: (
        "It begins with zeros: space was reserved for it and never written, or it is of another kind.",
        AGAIN,
    ),
}
_NEWER = range(0x80, 0x9C)
_OPCODES = frozenset(b"(.0123FIJKLMNQRSTUVXabcdeghijlopqrstu}]GBC)")
"""Letters that may stand in a pickle, of which weights_only knows a part."""


def first_byte(code: int) -> tuple[str, tuple[str, ...]]:
    """What a file is that begins with a byte no pickle begins with, and what to do."""
    if code in _BEGINNINGS:
        return _BEGINNINGS[code]
    if 0x20 < code < 0x7F and chr(code) not in "@ABCDEFGH":
        letter = chr(code).replace("{", "{{").replace("}", "}}")
        return f"It begins with '{letter}', and no pickle of torch.save does: it is a file of another kind.", (
            _INSPECT,
        )
    return (
        (
            "It does not begin as any file of torch.save does: it is of another kind, such as safetensors under a "
            "wrong name, or damaged."
        ),
        (_INSPECT, "A file of safetensors: safetensors.torch.load_file(path)."),
    )


def _load_key(values: Values, _: str) -> dict[str, Any]:
    key = values.get("key") or "\\xff"  # a byte that is no letter was lost on the way here
    hexadecimal = re.fullmatch(r"\\x([0-9a-fA-F]{2})", key)
    what, fix = first_byte(int(hexadecimal[1], 16) if hexadecimal else ord(key[0]) & 0xFF)
    return {"cause": f"The file is no pickle, or a damaged one. {what}", "fix": fix}


def _operand(values: Values, _: str) -> dict[str, Any]:
    """Which byte weights_only stumbled over; torch's advice is only right where it is one of a newer protocol."""
    code = int(values["operand"])
    if code in _NEWER:
        return {
            "cause": "The pickle in the file was written with a newer protocol than 2, and weights_only does not know "
            "its opcode {operand}.",
            "fix": (
                "transload.load(path) knows all protocols, and runs nothing of the file's either.",
                (
                    "With torch alone: weights_only=False, only if you trust its author; then save it with torch's own "
                    "protocol."
                ),
            ),
        }
    if code in _OPCODES:
        return {
            "cause": "Either the pickle in the file has an opcode ({operand}) that weights_only does not know, or the "
            "file is no pickle, or is damaged.",
            "fix": (_INSPECT, *AGAIN),
            "wrong": "weights_only=False is of no use unless the file is a pickle, and runs its code if it is one.",
        }
    what, fix = first_byte(code)
    return {
        "cause": f"The file is no pickle, or a damaged one. {what}",
        "fix": fix,
        "wrong": "weights_only=False does not help: there is no pickle in it that could be loaded.",
    }


def _codec(values: Values, _: str) -> dict[str, Any]:
    if values["byte"].lower() != "80":
        return {}
    return {
        "cause": "The first bytes of the file are not those of an archive, so that torch takes it for a file of the "
        "old format, and stumbles: they are damaged, or something stands before them.",
        "fix": AGAIN,
    }


def _attribute(values: Values, _: str) -> dict[str, Any]:
    """A name that is the beginning of one of torch's own is one that was cut; else torch has it in another release."""
    from transload.judge.names import TORCH_DEFAULT

    full = f"{values['module']}.{values['name']}"
    if full in TORCH_DEFAULT or not any(name.startswith(full) for name in TORCH_DEFAULT):
        return _OTHER_TORCH if values["module"].partition(".")[0] == "torch" else {}
    return {
        "cause": "The name {name} is the beginning of one that every checkpoint has: the file is cut off, or damaged "
        "there.",
        "fix": AGAIN,
    }


_OTHER_TORCH: dict[str, Any] = {
    "cause": "The file needs {name} of {module}, a part of torch that the torch here does not have: the file was saved "
    "by a newer one, or holds whole modules of an old one.",
    "fix": ("Install a torch as new as the one that saved it: transload inspect FILE tells what it needs.", _WEIGHTS),
}


def _module(values: Values, _: str) -> dict[str, Any]:
    top = values["module"].partition(".")[0]
    if top == "numpy":
        return {
            "cause": "The file was saved with numpy 2, whose modules have other names than those of the numpy here.",
            "fix": ("Install numpy 2 or newer, or save the file anew with the numpy that is here.", _WEIGHTS),
        }
    if top == "__torch__":
        return {
            "cause": "The file holds a TorchScript module that was saved with torch.save, which cannot be loaded so.",
            "fix": ("Save it with torch.jit.save(model, path), or only its model.state_dict().", _WEIGHTS),
        }
    return {}


TABLE: tuple[Known, ...] = (
    Known(
        "operand",
        ("Unsupported operand {operand:d}",),
        "",
        needs=("file",),
        torch="1.13 and later",
        context=r"[Ww]eights.?[Oo]nly|WeightsUnpickler|_weights_only_unpickler",
        work=_operand,
    ),
    Known(
        "load-key",
        ("invalid load key, '{key}'", "invalid load key, ''."),
        "",
        needs=("file",),
        unless=_OTHER_PROCESS,
        work=_load_key,
    ),
    Known(
        "pickle-damaged",
        (
            "unpickling stack underflow",
            "UnpicklingError: could not find MARK",
            "UnpicklingError: unexpected MARK found",
            "STACK_GLOBAL requires str",
            "pickle exhausted before end of frame",
        ),
        "What was read as a pickle is none: a file of another kind whose first letters happen to mean something, or a "
        "damaged one.",
        (_INSPECT, *AGAIN),
        needs=("file",),
        unless=_OTHER_PROCESS,
    ),
    Known(
        "pickle-protocol",
        ("unsupported pickle protocol: {protocol:d}",),
        "The file was pickled with protocol {protocol}, by a newer Python than the one that loads it: 4 came with "
        "Python 3.4, 5 with 3.8.",
        ("Load it with a newer Python, or save it again with pickle_protocol=2.", _WEIGHTS),
        needs=("file",),
        unless=_OTHER_PROCESS,
    ),
    Known(
        "pickle-cut-off",
        ("pickle data was truncated", "Ran out of input", "unexpected end of data while unpickling"),
        "The file is empty or cut off: its pickle ends before its end.",
        AGAIN,
        needs=("file",),
        unless=_OTHER_PROCESS,
    ),
    Known(
        "pickle-cut-off-silent",
        ("EOFError",),
        "The file is empty or cut off: its pickle ends before its end.",
        AGAIN,
        needs=("file",),
        context=_LAST.format(error="EOFError"),
        unless=_OTHER_PROCESS,
    ),
    Known(
        "class-not-defined",
        ("Can't get attribute '{name:w}' on <module '{module:w}'",),
        "The file holds an object, not only tensors, of the class {name}, and pickle looks for that class in the "
        "module {module}, where it was when the file was saved. A class of the script itself is only there while that "
        "same script runs.",
        (
            "Define the class, or import it, in the program that loads, under the same name.",
            "Where you can still load it: save model.state_dict() in its place, which needs no class.",
            _WEIGHTS,
        ),
        needs=("file",),
        unless=_OTHER_PROCESS,
        work=_attribute,
    ),
    Known(
        "class-module-missing",
        ("No module named '{module:w}'",),
        "The file holds an object whose class is in the module {module}, and there is no such module here. It is the "
        "code of the project that saved the file (from its own folder, if the name is a short one such as models or "
        "utils), or a package.",
        (
            (
                "Run it from that project's folder, or put the folder on PYTHONPATH; install the package if it is "
                "one. A package that only happens to have the name is of no use, and may be a trap."
            ),
            "Where you can load it: save model.state_dict() in its place, which needs no class.",
            _WEIGHTS,
        ),
        needs=("file",),
        context=_PICKLE,
        unless=_OTHER_PROCESS,
        work=_module,
    ),
    Known(
        "python-2-text",
        (
            "'ascii' codec can't decode byte 0x{byte:w} in position {position:d}: ordinal not in range(128)",
            "'utf-8' codec can't decode byte 0x{byte:w} in position {position:d}",
        ),
        "The file was most likely pickled by Python 2, whose texts are bytes.",
        (
            "If you trust its author:",
            '| obj = torch.load(path, encoding="latin1", weights_only=False)',
            "transload inspect FILE shows what is in it without running anything.",
        ),
        needs=("file",),
        context=_LAST.format(error="UnicodeDecodeError"),
        work=_codec,
    ),
    Known(
        "beginning-damaged",
        ("KeyError: {number:d}",),
        "The pickle refers to something that it never defined: the first bytes of the file are damaged, or something "
        "stands before them, so that torch takes an archive for a file of the old format.",
        AGAIN,
        needs=("file",),
        context=r'torch[/\\]_weights_only_unpickler\.py"?[^\n]*\n(?:(?!  File )[ \t][^\n]*\n)*KeyError\b',
    ),
    Known(
        "plain-unpickler",
        (
            "persistent IDs in protocol 0 must be ASCII strings",
            "A load persistent id instruction was encountered, but no persistent_load function was specified.",
        ),
        "A file of torch.save was given to pickle.load, which does not know where its tensors are.",
        ("Load it with torch.load(path).",),
        needs=("file",),
    ),
)
