"""Argument shapes: an allowed name is data only when it is called the way checkpoints call it.

``weights_only`` checks names, not arguments, and several names on its list are too wide: ``bytearray(2**40)`` allocates,
``_codecs.encode`` imports any codec, ``_rebuild_from_type_v2`` calls what it is given. Each rule below looks at one call and says
nothing, or how bad it is and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.findings import Safety
from transload.judge.names import TORCH_DEFAULT, canonical
from transload.read.nodes import Call, Dict, Global, Persistent

__all__ = ["check_call", "full_name"]

Complaint = tuple[Safety, str] | None
Rule = Callable[[tuple[Any, ...], Call], Complaint]


def full_name(node: object) -> str:
    """The canonical dotted name of a global node; empty for anything else."""
    if type(node) is not Global:
        return ""
    return ".".join(canonical(node.module, node.name))


def check_call(name: str, call: Call) -> Complaint:
    """What is wrong with a call of an allowed name, if anything."""
    if type(call.args) is not tuple:
        return "unknown", f"{name} is called with arguments that are no tuple"
    if call.kwargs is not None and not (type(call.kwargs) is Dict and not call.kwargs.items):
        return "needs-trust", f"{name} is called with keyword arguments"
    rule = _RULES.get(name) or _by_family(name)
    complaint = rule(call.args, call)
    return complaint or (_check_state(name, call) if call.states else None)


def _by_family(name: str) -> Rule:
    if name.startswith("torch._utils._rebuild_"):
        return _rebuild
    if name.endswith(("Storage", "Tensor")):
        return _constructor
    if name.startswith("torch.") and name.count(".") == 1:
        return _not_callable
    return _anything


def _check_state(name: str, call: Call) -> Complaint:
    """BUILD on the result: what state may be put into it."""
    for state in call.states or ():
        if name == "collections.OrderedDict":
            keys = state.items[::2] if type(state) is Dict else [None]
            odd = [key for key in keys if key != "_metadata"]
            if odd:  # a key such as "items" shadows the method of that name
                return "needs-trust", f"an OrderedDict is given the attribute {str(odd[0])[:60]!r}"
        elif name not in _BUILDABLE:
            return "needs-trust", f"the result of {name} is given a state"
    return None


_BUILDABLE = frozenset({"torch.nn.parameter.Parameter", "torch.Tensor", "torch._tensor._rebuild_from_type_v2"})


def _encode(args: tuple[Any, ...], _: Call) -> Complaint:
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return None
    return "dangerous", "_codecs.encode is asked for a codec other than latin1, which imports code"


def _bytearray(args: tuple[Any, ...], _: Call) -> Complaint:
    if not args or (len(args) == 1 and type(args[0]) in (bytes, Call)):
        return None
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return None
    return "dangerous", f"a byte array is made from {_kinds(args)}: a number here allocates that many bytes"


def _set(args: tuple[Any, ...], _: Call) -> Complaint:
    return None if len(args) <= 1 and all(type(a) in (list, tuple) for a in args) else ("needs-trust", "an odd set")


def _complex(args: tuple[Any, ...], _: Call) -> Complaint:
    return None if all(type(a) in (float, int) for a in args) else ("needs-trust", "an odd complex number")


def _mapping(args: tuple[Any, ...], _: Call) -> Complaint:
    fine = len(args) <= 1 and all(type(a) in (list, tuple, Dict) for a in args)
    return None if fine else ("needs-trust", f"a dictionary is made from {_kinds(args)}")


def _device(args: tuple[Any, ...], _: Call) -> Complaint:
    return None if all(type(a) in (str, int) for a in args) else ("needs-trust", "an odd torch.device")


def _size(args: tuple[Any, ...], _: Call) -> Complaint:
    fine = len(args) == 1 and type(args[0]) in (tuple, list) and all(type(a) is int for a in args[0])
    return None if fine else ("needs-trust", "an odd torch.Size")


def _layout(args: tuple[Any, ...], _: Call) -> Complaint:
    return None if len(args) == 1 and type(args[0]) is str else ("needs-trust", "an odd tensor layout")


def _constructor(args: tuple[Any, ...], call: Call) -> Complaint:
    if any(type(a) is int for a in args):
        return "dangerous", "a tensor or storage of a stated size is made: unbounded, uninitialised memory"
    if args and not all(type(a) in (Persistent, Call, list, tuple) for a in args):
        return "needs-trust", "a tensor or storage is made directly"
    for state in call.states or ():
        if not (type(state) is tuple and state and type(state[0]) is Persistent):
            return "needs-trust", "a tensor is given an odd state"
    return None


def _parameter(args: tuple[Any, ...], _: Call) -> Complaint:
    return None if all(type(a) in (Call, bool) for a in args) else ("needs-trust", "an odd parameter")


_HOOKS_AT = {
    "torch._utils._rebuild_tensor_v2": 5,
    "torch._utils._rebuild_tensor_v3": 5,
    "torch._utils._rebuild_parameter": 2,
    "torch._utils._rebuild_parameter_with_state": 2,
    "torch._utils._rebuild_qtensor": 6,
}


def _rebuild(args: tuple[Any, ...], call: Call) -> Complaint:
    """Sizes and bounds are checked where tensors are read; here only what could carry code."""
    at = _HOOKS_AT.get(call.callee.full_name) if type(call.callee) is Global else None
    if at is None or len(args) <= at:
        return None
    hooks = args[at]
    if hooks is None or (type(hooks) is Dict and not hooks.items):
        return None
    if type(hooks) is Call and not hooks.items and not hooks.states and (not hooks.args or hooks.args == ([],)):
        return None
    return "needs-trust", "a tensor carries backward hooks, which run code"


def _from_type(args: tuple[Any, ...], _: Call) -> Complaint:
    if len(args) != 4:
        return "unknown", "_rebuild_from_type_v2 has the wrong number of arguments"
    function, kind, _inner, state = args
    name = full_name(function)
    if not name:
        return "dangerous", "_rebuild_from_type_v2 is given a computed function to call"
    if name not in TORCH_DEFAULT or "_rebuild_" not in name:
        return "needs-trust", f"_rebuild_from_type_v2 is given {name} to call"
    if full_name(kind) not in TORCH_DEFAULT:
        return "needs-trust", f"a tensor of the class {full_name(kind) or 'nobody can name'}"
    dunder = _dunder(state)
    return ("dangerous", f"a tensor is given the attribute {dunder}") if dunder else None


def _dunder(state: object) -> str:
    states = state if type(state) is tuple else (state,)
    keys = [key for part in states if type(part) is Dict for key in part.items[::2]]
    return next((key for key in keys if type(key) is str and key.startswith("__")), "")


def _not_callable(_: tuple[Any, ...], call: Call) -> Complaint:
    return "unknown", f"{full_name(call.callee)} is called, and is nothing that can be"


def _anything(_: tuple[Any, ...], __: Call) -> Complaint:
    return None


_RULES: dict[str, Rule] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.set": _set,
    "collections.Counter": _mapping,
    "collections.OrderedDict": _mapping,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}


def _kinds(args: tuple[Any, ...]) -> str:
    return ", ".join(type(a).__name__ for a in args) or "nothing"
