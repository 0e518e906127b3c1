"""Compare two loaded objects: types, order, bits of all numbers, and which objects share storage or identity."""

from __future__ import annotations

import enum
import functools
import struct
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

Compare = Callable[["_Comparison", str, Any, Any], None]

_PLAIN = (str, bytes, int, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice)
_SAME_OBJECT = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_EQUAL = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)
_MAX_SHOWN = 200


def assert_same(a: Any, b: Any) -> None:
    """Raise an ``AssertionError`` that names the path of the first difference between two loaded objects.

    Neither is changed. Compared are: the exact type of every object; keys and their order; attributes; each tensor's
    metadata and the bytes of its entire storage; which tensors share a storage; and which places refer to the same
    object. Storages without memory (empty, or on ``meta``) may or may not be shared.
    """
    _Comparison().run(a, b)


class _Comparison:
    """Walks two object graphs in parallel. ``todo`` is a stack: the first difference in reading order is reported."""

    def __init__(self) -> None:
        self.todo: list[tuple[str, Any, Any]] = []
        self.children: list[tuple[str, Any, Any]] = []
        self.partners: tuple[dict[object, object], dict[object, object]] = ({}, {})
        self.alive: list[Any] = []  # an id identifies an object only while it is alive
        self.memory: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])

    def run(self, a: Any, b: Any) -> None:
        self.todo.append(("", a, b))
        while self.todo:
            self.step(*self.todo.pop())
            self.todo += reversed(self.children)
            self.children.clear()
        self.check("memory", "which storages overlap", *map(_memory_overlaps, self.memory))

    def step(self, path: str, a: Any, b: Any) -> None:
        self.check(path, "type", type(a), type(b))
        compare = next((function for kinds, function in _COMPARE if isinstance(a, kinds)), _instance)
        if compare not in (_plain, _number, _equal) and not self.is_new(path, a, b, compare):
            return
        compare(self, path, a, b)

    def is_new(self, path: str, a: Any, b: Any, compare: Compare) -> bool:
        """Whether this pair has not been compared yet. Fails if either object is already paired with another."""
        self.alive += (a, b)
        if isinstance(a, (tuple, frozenset)):  # identity does not matter; skip a pair already compared
            key = ("tuple", id(a), id(b))
            known = key in self.partners[0]
            self.partners[0][key] = key
            return not known
        if compare in (_untyped_storage, _typed_storage):
            if not a.data_ptr() or not b.data_ptr():
                return True
            if compare is _untyped_storage:  # one storage can have several Python objects
                return self.pair(path, "storage", a._cdata, b._cdata)
        return self.pair(path, "object", id(a), id(b))

    def pair(self, path: str, kind: str, a: object, b: object) -> bool:
        """Record two identities as partners; return whether the pair is new."""
        one, other = self.partners
        partners = one.setdefault((kind, a), b) == b and other.setdefault((kind, b), a) == a
        if not partners:
            seen = "first" if one[kind, a] != b else "second"
            self.fail(path, f"{kind} shared with another place in the {seen} only")
        is_new = (kind, a, b) not in one
        one[kind, a, b] = True
        return is_new

    def later(self, path: str, a: Any, b: Any) -> None:
        self.children.append((path, a, b))

    def check(self, path: str, what: str, a: Any, b: Any) -> None:
        if type(a) is not type(b) or a != b:
            self.fail(path, f"{what}: {_shown(a)} and {_shown(b)}")

    def fail(self, path: str, difference: str) -> None:
        raise AssertionError(f"{path or 'the root'}: {difference}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _memory_overlaps(memory: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each memory range: the index of the first range of its overlapping group, and its offset from that one."""
    overlaps = [(i, 0) for i in range(len(memory))]
    end, leader = 0, 0
    for start, length, i in sorted((start, length, i) for i, (start, length) in enumerate(memory)):
        if start >= end:
            leader = i
        end = max(end, start + length)
        overlaps[i] = (leader, start - memory[leader][0])
    return overlaps


# -- plain values and containers ---------------------------------------------------------------------------------------


def _plain(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "value", a, b)


def _number(walk: _Comparison, path: str, a: complex, b: complex) -> None:
    walk.check(path, "value", *(struct.pack("<dd", complex(x).real, complex(x).imag).hex() for x in (a, b)))


def _equal(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "value", a, b)


def _identical(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    if isinstance(a, types.BuiltinFunctionType) and not isinstance(a.__self__, types.ModuleType):
        walk.check(path, "method", a.__name__, b.__name__)
        walk.later(f"{path}.__self__", a.__self__, b.__self__)
    elif a is not b:
        walk.fail(path, f"object: {_shown(a)} and {_shown(b)}")


def _mapping(walk: _Comparison, path: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> None:
    walk.check(path, "keys", *([_name(key) for key in mapping] for mapping in (a, b)))
    if isinstance(a, defaultdict):
        walk.later(f"{path}.default_factory", a.default_factory, b.default_factory)  # type: ignore[attr-defined]
    for one, other in zip(a, b, strict=True):
        walk.later(f"{path}.keys()[{_name(one)}]", one, other)
        walk.later(f"{path}[{_name(one)}]", a[one], b[other])
    _attributes(walk, path, a, b)


def _name(key: object) -> str:
    """A key as shown in a path; objects whose repr contains an address are named by their type."""
    return _shown(key) if isinstance(key, (*_PLAIN, float, complex, tuple, frozenset)) else type(key).__name__


def _sequence(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "length", len(a), len(b))
    if isinstance(a, deque):
        walk.check(path, "maxlen", a.maxlen, b.maxlen)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        walk.later(f"{path}[{i}]", one, other)
    _attributes(walk, path, a, b)


def _size(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "rank", len(a), len(b))
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        walk.later(f"{path}[{i}]", one, other)


def _ragged(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    """The length of a jagged dimension: not a number, but equal for tensors with the same offsets."""
    walk.pair(path, "ragged size", str(a), str(b))


def _set(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "length", len(a), len(b))
    members = (sorted(items, key=lambda item: (type(item).__name__, repr(item))) for items in (a, b))
    for one, other in zip(*members, strict=True):
        walk.later(f"{path}{{{_name(one)}}}", one, other)
    _attributes(walk, path, a, b)


def _bytearray(walk: _Comparison, path: str, a: bytearray, b: bytearray) -> None:
    walk.check(path, "bytes", bytes(a).hex(), bytes(b).hex())


def _partial(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for part in ("func", "args", "keywords"):
        walk.later(f"{path}.{part}", getattr(a, part), getattr(b, part))
    _attributes(walk, path, a, b)


def _method(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for part in ("__func__", "__self__"):
        walk.later(f"{path}.{part}", getattr(a, part), getattr(b, part))


def _weak(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.later(f"{path}()", a(), b())


def _attributes(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    attributes = [_instance_attributes(value) for value in (a, b)]
    walk.check(path, "attributes", *(list(value) for value in attributes))
    for name in attributes[0]:
        walk.later(f"{path}.{name}", attributes[0][name], attributes[1][name])
    for name in _slots(type(a)):
        walk.check(path, f"has {name}", *(hasattr(value, name) for value in (a, b)))
        if hasattr(a, name):
            walk.later(f"{path}.{name}", getattr(a, name), getattr(b, name))


def _instance_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an instance, without the capsules that torch caches once a size has been read."""
    return {
        name: attribute
        for name, attribute in getattr(value, "__dict__", {}).items()
        if type(attribute).__name__ != "PyCapsule"
    }


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _instance(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    """Any other object, modules included: compared by attributes, or by equality if it has none."""
    if hasattr(a, "__dict__") or _slots(type(a)):
        _attributes(walk, path, a, b)
    else:
        walk.check(path, "value", a, b)


# -- numpy -------------------------------------------------------------------------------------------------------------


def _array(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for what in ("dtype", "shape", "strides"):
        walk.check(path, what, getattr(a, what), getattr(b, what))
    if a.dtype.hasobject:
        walk.later(f"{path}.tolist()", a.tolist(), b.tolist())
    else:
        walk.check(path, "bytes", a.tobytes(), b.tobytes())
    walk.check(path, "writeable", a.flags.writeable, b.flags.writeable)


# -- torch -------------------------------------------------------------------------------------------------------------


def _untyped_storage(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "device", a.device, b.device)
    walk.check(path, "size", a.nbytes(), b.nbytes())
    if not a.nbytes() or a.device.type == "meta":
        return
    one, other = (torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in (a, b))
    if not torch.equal(one, other):
        first = int((one != other).nonzero()[0])
        walk.fail(path, f"bytes: {int(one[first])} and {int(other[first])} at {first} of {a.nbytes()}")
    for memory, storage in zip(walk.memory, (a, b), strict=True):
        memory.append((storage.data_ptr(), storage.nbytes()))


def _typed_storage(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "dtype", a.dtype, b.dtype)
    walk.later(f"{path}.untyped()", a._untyped_storage, b._untyped_storage)


def _generator(walk: _Comparison, path: str, a: torch.Generator, b: torch.Generator) -> None:
    walk.check(path, "device", a.device, b.device)
    walk.check(path, "seed", a.initial_seed(), b.initial_seed())
    walk.later(f"{path}.get_state()", a.get_state(), b.get_state())


def _script(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for what in ("original_name", "training"):
        walk.check(path, what, getattr(a, what), getattr(b, what))
    walk.check(path, "code", str(getattr(a, "code", "")), str(getattr(b, "code", "")))
    walk.later(f"{path}.state_dict()", a.state_dict(), b.state_dict())


def _exported(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "graph", a.graph_module.code, b.graph_module.code)
    walk.check(path, "signature", str(a.graph_signature), str(b.graph_signature))
    walk.later(f"{path}.state_dict", a.state_dict, b.state_dict)
    walk.later(f"{path}.constants", *(getattr(program, "constants", None) for program in (a, b)))  # since torch 2.2


_FLAGS = (
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_quantized",
    "is_sparse",
    "is_nested",
    "is_inference",
    "is_conj",
    "is_neg",
)

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _tensor(walk: _Comparison, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for flag in _FLAGS:
            walk.check(path, flag, *(_property(tensor, flag) for tensor in (a, b)))
        is_parameter = (isinstance(tensor, torch.nn.Parameter) for tensor in (a, b))
        walk.check(path, "is a Parameter", *is_parameter)
        _comparison_for(a)(walk, path, a, b)
        walk.later(f"{path}._backward_hooks", a._backward_hooks, b._backward_hooks)
        _attributes(walk, path, a, b)


def _property(tensor: torch.Tensor, flag: str) -> Any:
    value = getattr(tensor, flag)
    return value() if callable(value) else value


def _comparison_for(tensor: torch.Tensor) -> Compare:
    if hasattr(tensor, "__tensor_flatten__"):
        return _wrapper
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return _uninitialized
    if tensor.is_nested:
        return _nested
    if tensor.layout == torch.sparse_coo:
        return _coo
    return _compressed if tensor.layout in _COMPRESSED else _strided


def _strided(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for what in ("shape", "stride", "storage_offset"):
        walk.check(path, what, *(_property(tensor, what) for tensor in (a, b)))
    if a.is_quantized:
        _quantizer(walk, path, a, b)
    try:
        storages = a.untyped_storage(), b.untyped_storage()
        storages[0].data_ptr(), storages[1].data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper, which has no storage
        return
    walk.later(f"{path}.storage", *storages)


def _uninitialized(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    """A parameter of a lazy module: it has no shape yet, and its flags have been compared."""


def _quantizer(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "qscheme", a.qscheme(), b.qscheme())
    if a.qscheme() == torch.per_tensor_affine:
        walk.later(f"{path}.q_scale()", a.q_scale(), b.q_scale())
        walk.check(path, "q_zero_point", a.q_zero_point(), b.q_zero_point())
        return
    walk.check(path, "q_per_channel_axis", a.q_per_channel_axis(), b.q_per_channel_axis())
    for part in ("q_per_channel_scales", "q_per_channel_zero_points"):
        walk.later(f"{path}.{part}()", getattr(a, part)(), getattr(b, part)())


def _coo(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for what in ("shape", "is_coalesced", "sparse_dim", "dense_dim"):
        walk.check(path, what, *(_property(tensor, what) for tensor in (a, b)))
    for part in ("_indices", "_values"):
        walk.later(f"{path}.{part}()", getattr(a, part)().detach(), getattr(b, part)().detach())


def _compressed(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    walk.check(path, "shape", a.shape, b.shape)
    for part in _COMPRESSED[a.layout]:
        walk.later(f"{path}.{part}()", getattr(a, part)().detach(), getattr(b, part)().detach())


def _nested(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    for part in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"):
        walk.later(f"{path}.{part}()", getattr(a, part)(), getattr(b, part)())
    walk.later(f"{path}.storage", a.untyped_storage(), b.untyped_storage())


def _wrapper(walk: _Comparison, path: str, a: Any, b: Any) -> None:
    """A subclass that names the tensors it holds in ``__tensor_flatten__``."""
    (names, context), (other_names, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
    walk.check(path, "inner tensors", list(names), list(other_names))
    walk.later(f"{path}.shape", a.shape, b.shape)
    walk.later(f"{path}.__tensor_flatten__()[1]", context, other_context)
    for name in names:
        walk.later(f"{path}.{name}", getattr(a, name), getattr(b, name))


def _optional() -> list[tuple[Any, Compare]]:
    """Comparisons of classes that some environments or releases lack."""
    comparisons: list[tuple[Any, Compare]] = []
    try:
        import numpy as np
    except ImportError:  # pragma: no cover (torch then has no arrays either)
        pass
    else:
        comparisons.append(((np.ndarray, np.generic), _array))
    try:
        from torch.distributed.device_mesh import DeviceMesh
    except ImportError:  # pragma: no cover (torch 2.1, or one built without distributed)
        pass
    else:
        comparisons.append((DeviceMesh, _equal))
    return comparisons


# The first match wins. numpy's scalars come before the Python types they derive from.
_COMPARE: list[tuple[Any, Compare]] = [
    (_SAME_OBJECT, _identical),
    *_optional(),
    (torch.Tensor, _tensor),
    (torch.UntypedStorage, _untyped_storage),
    (torch.storage.TypedStorage, _typed_storage),
    (torch.Generator, _generator),
    (torch.jit.ScriptModule, _script),
    (torch.export.ExportedProgram, _exported),
    (torch.Size, _size),
    (torch.SymInt, _ragged),
    (_EQUAL, _equal),
    (_PLAIN, _plain),
    ((float, complex), _number),
    (Mapping, _mapping),
    ((list, tuple, deque), _sequence),
    ((set, frozenset), _set),
    (bytearray, _bytearray),
    (functools.partial, _partial),
    (types.MethodType, _method),
    (weakref.ref, _weak),
]
