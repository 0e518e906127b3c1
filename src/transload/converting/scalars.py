"""Values without parts as JSON has them (numbers, texts, bytes, devices, paths), and what is set on tensors."""

from __future__ import annotations

from base64 import b64encode
from math import isfinite
from typing import Any

from transload.formats.tensors import called, device_text
from transload.nodes import Call, Dict, Global

__all__ = ["MAX_BITS", "NOTHING", "Nothing", "attributes", "simple"]

MAX_BITS = 4096
"""Of an integer: Python takes long to write out longer ones."""

_MAX_BYTES = 1 << 20
_TEXTS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "TorchVersion"})
_WITH_STATE = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")
_SCALARS = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})


class Nothing:
    """Where there is nothing to keep: a tensor, which is kept elsewhere, or what was listed."""


NOTHING = Nothing()


def attributes(node: Any) -> Dict:
    """What somebody has set on a tensor: plain attributes, which ``torch.save`` keeps beside it."""
    args = node.args if type(node) is Call and called(node) in _WITH_STATE else ()
    state = args[3] if type(args) is tuple and len(args) == 4 else None
    pairs = state.pairs() if type(state) is Dict else []
    return Dict([part for pair in pairs if not _is_tensor(pair[1]) for part in pair])


def _is_tensor(node: object) -> bool:
    return type(node) is Call and called(node).startswith(("torch._utils._rebuild", "torch._tensor._rebuild"))


def simple(node: Any) -> Any:
    """A value without parts."""
    kind = type(node)
    if node is None or kind in (bool, str):
        return node
    if kind is int:
        return node if node.bit_length() <= MAX_BITS else NOTHING
    if kind is float:
        return node if isfinite(node) else str(node)
    if kind in (bytes, bytearray):
        return {"$bytes": b64encode(node).decode()} if len(node) <= _MAX_BYTES else NOTHING
    if kind is Global and node.module == "torch":
        return node.full_name
    return _simple_call(node) if kind is Call else NOTHING


def _simple_call(node: Call) -> Any:
    """A value that is written as a call: a device, a path, bytes, a number of numpy."""
    name, args = called(node), node.args
    if type(args) is not tuple:
        return NOTHING
    if name == "torch.device":
        return device_text(node)
    if name == "_codecs.encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
        return NOTHING if (raw := _latin(args[0])) is None else simple(raw)
    if name.rpartition(".")[2] in _TEXTS and all(type(part) is str for part in args):
        return "/".join(args).replace("//", "/", 1)
    if name in ("builtins.complex", "__builtin__.complex") and all(type(part) is float for part in args):
        return [simple(part) for part in args]
    return _number(args) if name in _SCALARS and len(args) == 2 else NOTHING


_FORMS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?"}
_FORMS |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B"}


def _number(args: tuple[Any, ...]) -> Any:
    """A scalar of numpy: a dtype and its bytes."""
    from struct import calcsize, unpack

    dtype, held = args
    code = dtype.args[0] if type(dtype) is Call and type(dtype.args) is tuple and dtype.args else None
    form = _FORMS.get(code) if type(code) is str else None
    raw = _bytes(held)
    if form is None or raw is None or len(raw) != calcsize(f"<{form}"):
        return NOTHING
    state = dtype.states[-1] if dtype.states else None
    big = type(state) is tuple and state[1:2] == (">",)
    return simple(unpack(f">{form}" if big else f"<{form}", raw)[0])


def _bytes(node: Any) -> bytes | None:
    if type(node) is Call and called(node) == "_codecs.encode" and type(node.args) is tuple and node.args:
        node = node.args[0]
    if type(node) is str:
        return _latin(node)
    return node if type(node) is bytes else None


def _latin(text: str) -> bytes | None:
    """Bytes that are written as a text; ``None`` if it holds what is no byte."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None
