"""Argument shapes: an allowed name is data only when it is called the way checkpoints call it.

``weights_only`` checks names, not arguments, and several names on its list are too wide: ``bytearray(2**40)``
allocates, ``_codecs.encode`` imports any codec, ``_rebuild_from_type_v2`` calls what it is given. Each rule below looks
at one call and says nothing, or how bad it is and why. Sizes and bounds of tensors are checked where tensors are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transload.findings import Safety
from transload.judge.names import TORCH_DEFAULT, canonical
from transload.nodes import Call, Dict, Global, Persistent

__all__ = ["check_call", "full_name"]

# One shared object of a million items behind a million calls is a small file: what a rule looks through has an end.
_MAX_ITEMS = 100

Complaint = tuple[Safety, str] | None
Rule = Callable[[str, tuple[Any, ...], Call], Complaint]


def full_name(node: object) -> str:
    """The canonical dotted name of a global node; empty for anything else."""
    if type(node) is not Global:
        return ""
    return ".".join(canonical(node.module, node.name))


def check_call(name: str, call: Call) -> Complaint:
    r"""What is wrong with a call of an allowed name, if anything.

    >>> from transload.formats.pickle_machine import run
    >>> check_call("builtins.bytearray", run(b"cbuiltins\nbytearray\nJ\0\0\0\1\x85R.").root)[0]
    'dangerous'
    """
    args = call.args
    if type(args) is not tuple:
        return "unknown", f"{name} is called with arguments that are no tuple"
    if call.kwargs is not None and not (type(call.kwargs) is Dict and not call.kwargs.items):
        return "needs-trust", f"{name} is called with keyword arguments"
    rule = _RULES.get(name) or _by_family(name)
    complaint = rule(name, args, call)
    if complaint is None and (call.items or call.appended):
        complaint = _check_items(name, call)
    if complaint is None and call.states:
        complaint = _check_states(name, call.states)
    return complaint


def _by_family(name: str) -> Rule:
    if name.endswith("Storage"):
        return _storage
    if name in _TENSOR_CLASSES:
        return _tensor_class
    if name.startswith("torch.") and name.count(".") == 1:
        return _not_callable
    return _anything


_TENSOR_CLASSES = frozenset(name for name in TORCH_DEFAULT if name.endswith("Tensor") and "nested" not in name)


def _check_items(name: str, call: Call) -> Complaint:
    """SETITEM(S), APPEND(S) and ADDITEMS on the result."""
    if name in _MAPPINGS and not call.appended:
        return None
    if name.startswith("torch."):  # CVE-2026-24747: torch before 2.10 wrote wherever the key of a tensor said
        return "dangerous", f"items are put into the result of {name}"
    return "unknown", f"items are put into the result of {name}, which takes none"


_MAPPINGS = frozenset({"collections.OrderedDict", "collections.Counter"})


def _check_states(name: str, states: list[object]) -> Complaint:
    """BUILD on the result: what state may be put into it."""
    for state in states:
        if name == "collections.OrderedDict":
            keys = state.items[: 2 * _MAX_ITEMS : 2] if type(state) is Dict else [None]
            odd = [key for key in keys if key != "_metadata"]
            if odd:  # a key such as "items" shadows the method of that name
                return "needs-trust", f"an OrderedDict is given the attribute {str(odd[0])[:60]!r}"
            if len(keys) == _MAX_ITEMS:
                return "needs-trust", "an OrderedDict is given more attributes than it can have"
        elif name not in _BUILDABLE or not _is_tensor_state(state):
            return "needs-trust", f"the result of {name} is given a state"
    return None


_BUILDABLE = frozenset({"torch.nn.parameter.Parameter", *_TENSOR_CLASSES})


def _is_tensor_state(state: object) -> bool:
    """Flags and hooks, as torch up to 0.3 wrote them. The other state there is would make it another tensor."""
    return type(state) is tuple and len(state) == 3 and _no_hooks(state[2])


def _encode(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        fine = args[0].isascii() or max(args[0]) <= "\xff"
        return None if fine else ("unknown", "_codecs.encode is given text that latin1 does not have")
    return "dangerous", "_codecs.encode is asked for a codec other than latin1, which imports code"


def _bytearray(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if not args or (len(args) == 1 and _is_bytes(args[0])):
        return None
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return None
    return "dangerous", f"a byte array is made from {_kinds(args)}: a number here allocates that many bytes"


def _is_bytes(node: object) -> bool:
    """Bytes, or the call that protocol 2 writes for them."""
    return type(node) is bytes or (type(node) is Call and full_name(node.callee) == "_codecs.encode")


def _set(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    return None if len(args) <= 1 and all(type(a) in (list, tuple) for a in args) else ("needs-trust", "an odd set")


def _complex(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = len(args) <= 2 and all(type(a) in (float, int) for a in args)
    return None if fine else ("needs-trust", "an odd complex number")


def _mapping(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if not args or (len(args) == 1 and (type(args[0]) is Dict or _are_pairs(args[0]))):
        return None
    return "needs-trust", f"a dictionary is made from {_kinds(args)}"


def _are_pairs(node: object) -> bool:
    """``[[key, value], …]``: how Python 2 writes an ordered dictionary."""
    # Loaders refuse a later one that is no pair; nothing else depends on it.
    return type(node) is list and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in node[:_MAX_ITEMS])


def _device(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = 1 <= len(args) <= 2 and type(args[0]) in (str, int) and all(type(a) is int for a in args[1:])
    if fine and type(args[0]) is str:
        fine = args[0].partition(":")[0].isidentifier()
    return None if fine else ("needs-trust", "an odd torch.device")


def _size(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = not args or (len(args) == 1 and type(args[0]) is tuple and len(args[0]) <= _MAX_ITEMS)
    fine = fine and all(type(a) is int for a in (args[0] if args else ()))
    return None if fine else ("needs-trust", "an odd torch.Size")


def _layout(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    return None if len(args) == 1 and args[0] in _LAYOUTS else ("needs-trust", "an odd tensor layout")


_SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_LAYOUTS = ("torch.strided", *(f"torch.{name}" for name in _SPARSE))


def _storage(name: str, _: tuple[Any, ...], __: Call) -> Complaint:
    # A file's storages come through persistent ids; a number here is a size that nothing bounds.
    return "dangerous", f"{name} is called: unbounded, uninitialised memory"


def _tensor_class(name: str, args: tuple[Any, ...], _: Call) -> Complaint:
    if not args:
        return None
    # a number, a torch.Size, a tensor of one number
    if len(args) > _MAX_ITEMS or any(type(a) in (int, Call, Global, Persistent) for a in args):
        return "dangerous", f"{name} is called with a size: unbounded, uninitialised memory"
    return "needs-trust", f"{name} is called with {_kinds(args)}"


def _parameter(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = len(args) <= 2 and all(type(a) is Call for a in args[:1]) and all(type(a) is bool for a in args[1:])
    return None if fine else ("needs-trust", "an odd parameter")


class _Signature(NamedTuple):
    """How many arguments a rebuild function takes, and which of them could carry more than numbers."""

    least: int
    most: int
    flag: int = 99
    hooks: int = 99
    metadata: int = 99
    state: int = 99


_SIGNATURES = {
    "torch._utils._rebuild_tensor": _Signature(4, 4),
    "torch._utils._rebuild_tensor_v2": _Signature(6, 7, 4, 5, 6),
    "torch._utils._rebuild_tensor_v3": _Signature(7, 8, 4, 5, 7),
    "torch._utils._rebuild_parameter": _Signature(3, 3, 1, 2),
    "torch._utils._rebuild_parameter_with_state": _Signature(4, 4, 1, 2, state=3),
    "torch._utils._rebuild_qtensor": _Signature(7, 7, 5, 6),
    "torch._utils._rebuild_sparse_tensor": _Signature(2, 2),
    "torch._utils._rebuild_nested_tensor": _Signature(4, 4),
    "torch._utils._rebuild_meta_tensor_no_storage": _Signature(4, 4, 3),
    "torch._utils._rebuild_wrapper_subclass": _Signature(8, 8, 7),
    "torch._utils._rebuild_device_tensor_from_numpy": _Signature(4, 4, 3),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Signature(4, 4, 3),
}


def _rebuild(name: str, args: tuple[Any, ...], _: Call) -> Complaint:
    least, most, flag, hooks, metadata, state = _SIGNATURES[name]
    count = len(args)
    if not least <= count <= most:
        return "unknown", f"{name} is called with {count} arguments"
    if hooks < count and not _no_hooks(args[hooks]):
        return "needs-trust", "a tensor carries backward hooks, which run code"
    if flag < count and type(args[flag]) is not bool:
        return "needs-trust", f"{name} is given {_kinds(args[flag : flag + 1])} for requires_grad"
    if metadata < count and not _are_flags(args[metadata]):
        return "needs-trust", "a tensor carries metadata that is no flag"
    return _check_attributes(args[state]) if state < count else None


def _no_hooks(hooks: object) -> bool:
    if type(hooks) is Call:
        empty = not hooks.items and not hooks.states and not hooks.appended and (not hooks.args or hooks.args == ([],))
        return empty and type(hooks.callee) is Global and hooks.callee.full_name == "collections.OrderedDict"
    return hooks is None or (type(hooks) is Dict and not hooks.items)


def _are_flags(metadata: object) -> bool:
    """``{"conj": True}``, or nothing."""
    if type(metadata) is not Dict:
        return metadata is None
    return len(metadata.items) <= _MAX_ITEMS and all(type(flag) is bool for flag in metadata.items[1::2])


def _from_type(_: str, args: tuple[Any, ...], call: Call) -> Complaint:
    if len(args) != 4:
        return "unknown", "_rebuild_from_type_v2 has the wrong number of arguments"
    function, kind, inner, state = args
    name = full_name(function)
    if not name:
        return "dangerous", "_rebuild_from_type_v2 is given a computed function to call"
    if name not in _REBUILDERS:
        return "needs-trust", f"_rebuild_from_type_v2 is given {name} to call"
    if full_name(kind) not in _PLAIN_KINDS:
        return "needs-trust", f"a tensor of the class {full_name(kind) or 'nobody can name'}"
    return check_call(name, Call(function, inner, "reduce", call.position)) or _check_attributes(state)


_NJT = "torch.nested._internal.nested_tensor"
_REBUILDERS = frozenset({*_SIGNATURES, f"{_NJT}._rebuild_njt"})
_PLAIN_KINDS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", f"{_NJT}.NestedTensor"})


def _check_attributes(state: object) -> Complaint:
    """Attributes that are set on a tensor: a dictionary, or a pair of them where the class has slots."""
    parts = state if type(state) is tuple else (state,)
    if len(parts) > 2 or any(type(part) is Dict and len(part.items) > _MAX_ITEMS for part in parts):
        return "unknown", "a tensor is given a state of a size no tensor has"
    keys = [key for part in parts if type(part) is Dict for key in part.items[::2]]
    for key in keys:
        if type(key) is not str:
            return "unknown", "a tensor is given an attribute without a name"
        if key.startswith("__"):
            return "dangerous", f"a tensor is given the attribute {key[:60]}"
        if key in _SHADOWED:
            return "needs-trust", f"a tensor is given the attribute {key}, which it has already"
    if not all(type(part) is Dict or part is None for part in parts):
        return "needs-trust", "a tensor is given a state that names no attributes"
    return None


# Attributes of a tensor that loading code asks for; those of the file would stand in their place.
_SHADOWED = frozenset(
    {
        *(
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "_base",
            "_grad",
            "_version",
            "clone",
            "copy_",
            "cpu",
            "cuda",
        ),
        *(
            "data",
            "detach",
            "device",
            "dim",
            "dtype",
            "grad",
            "grad_fn",
            "is_cuda",
            "is_leaf",
            "is_meta",
            "item",
            "layout",
        ),
        *("nbytes", "numel", "numpy", "register_hook", "requires_grad", "requires_grad_", "retain_grad", "set_"),
        *("shape", "size", "storage", "storage_offset", "stride", "to", "tolist", "type", "untyped_storage", "view"),
    }
)


def _not_callable(name: str, _: tuple[Any, ...], __: Call) -> Complaint:
    return "unknown", f"{name} is called, and is nothing that can be"


def _anything(_: str, __: tuple[Any, ...], ___: Call) -> Complaint:
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
    **dict.fromkeys(_SIGNATURES, _rebuild),
}


def _kinds(args: tuple[Any, ...]) -> str:
    return ", ".join(type(a).__name__ for a in args[:8]) or "nothing"
