"""Inert nodes as text: the names they bear, and values short enough to show."""

from __future__ import annotations

from transload.checkpoint import Key
from transload.read.nodes import Big, Call, Global, module_class

__all__ = ["called", "device_text", "dotted", "leaf_kind", "scalar", "short", "short_key", "text_of"]

_MAX_TEXT = 200
_MAX_KEY = 1000


def called(node: Call) -> str:
    """The dotted name of what a call calls; empty where that is no name."""
    callee = node.callee
    if type(callee) is Global:
        return callee.full_name
    return dotted(module_class(callee))


def dotted(node: object) -> str:
    """The dotted name of a global; empty for anything else."""
    return node.full_name if type(node) is Global else ""


def device_text(node: object) -> str:
    """``torch.device("cuda", 1)`` as ``cuda:1``."""
    if type(node) is Call and called(node) == "torch.device" and type(node.args) is tuple:
        return ":".join(str(part) for part in node.args if type(part) in (str, int)) or "unknown"
    return text_of(node)


def text_of(node: object) -> str:
    """A text, or ``unknown``."""
    return node if type(node) is str else "unknown"


def short_key(key: object) -> Key:
    """A dictionary key as a step of a path: itself, or a short text where it is neither text nor number, or huge."""
    if type(key) is str:
        return key if len(key) <= _MAX_KEY else short(key)
    return key if type(key) is int and key.bit_length() < 64 else short(key)


def leaf_kind(node: object) -> str:
    """The name of a value's type."""
    if type(node) is Call:
        return called(node) or "call"
    if type(node) is Global:
        return "global"
    return type(node).__name__ if node is not None else "None"


def short(node: object) -> str:
    """A value in at most a few hundred characters, never deeper than one call and its plain arguments."""
    if type(node) is str:
        return node if len(node) <= _MAX_TEXT else f"{node[:_MAX_TEXT]}… ({len(node)} characters)"
    if type(node) is Global:
        return node.full_name[:_MAX_TEXT]
    if type(node) is Call:
        if called(node) == "torch.device":
            return device_text(node)
        args = node.args if type(node.args) is tuple else ()
        inner = ", ".join(scalar(a) for a in args[:4])
        return f"{called(node) or 'call'}({inner})"[:_MAX_TEXT]
    if type(node) is tuple or type(node) is list:
        inner = ", ".join(scalar(a) for a in node[:8]) + (", …" if len(node) > 8 else "")
        return f"({inner})" if type(node) is tuple else f"[{inner}]"
    return scalar(node)


def scalar(node: object) -> str:
    """A plain value in a few dozen characters."""
    if type(node) is str:
        return repr(node[:40])
    if type(node) is bytes or type(node) is bytearray:
        return f"{len(node)} bytes"
    if (type(node) is int and node.bit_length() > 128) or type(node) is Big:
        return "a huge integer"
    if node is None or type(node) in (bool, int, float):
        return repr(node)
    if type(node) is Global:
        return node.full_name[:80]
    return f"<{type(node).__name__.lower()}>"
