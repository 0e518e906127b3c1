"""Tensors that are not ordinary: what torch's rebuild functions would make of the arguments in a pickle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from transload.checkpoint import Key, Storage, Tensor
from transload.dtypes import BLOCKS, ITEMSIZE, MAX_SIZE, itemsize
from transload.findings import LimitedProblems, Problem
from transload.nodes import REBUILDS, Call, Dict, Global, called, device_text, dotted, short, text_of

# Dimensions of a tensor. A million tensors could share a shape of a million dimensions, for two bytes each.
MAX_RANK = 1024
# Tensors inside tensors: a parameter with a subclass with a quantized tensor with its scales has four levels.
MAX_NESTED = 16

_new = tuple.__new__  # as in tensors

_Args = tuple[Any, ...]
Place = tuple[tuple[Key, ...], str]
"""The path and the name of a tensor."""
Search = Callable[[object, Place, int], tuple[list[Tensor], Iterable[Problem]]]


class Storages(Protocol):
    """The part of a ``StorageTable`` that rebuild functions use."""

    storages: dict[str, Storage]
    users: defaultdict[str, list[str]]
    noted: LimitedProblems
    budget: Any

    def resolve(self, node: object) -> tuple[Storage, int, str] | None:
        """The storage of a persistent id, the element where it begins, and its dtype."""


class BadTensor(Exception):  # noqa: N818 - a signal between readers and the walk, never seen outside
    """Arguments that no torch would have written; the text says what is wrong."""


def _ints(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Call and called(value) == "torch.Size":
        value = value.args[0] if type(value.args) is tuple and value.args else ()
    if type(value) is not tuple:  # not even a list: it could change after torch has used it
        raise BadTensor(f"its {what} is not a tuple of numbers")
    numbers: tuple[Any, ...] = value
    if len(numbers) > MAX_RANK:
        raise BadTensor(f"its {what} has {len(numbers)} dimensions")
    for number in numbers:
        if type(number) is not int or not 0 <= number < MAX_SIZE:
            raise BadTensor(f"its {what} {short(value)} contains something that is not a size")
    return numbers


def _check_grad(dtype: str) -> None:
    if not dtype.startswith(("float", "bfloat", "complex", "unknown")):
        raise BadTensor(f"it requires gradients, which {dtype} does not support")


def reach(offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> int:
    """The index after the last element of a view; 0 for an empty view."""
    if len(shape) != len(stride) or len(shape) > MAX_RANK:
        raise BadTensor(f"it has {len(shape)} sizes and {len(stride)} strides")
    last, numel = offset, 1
    for size, step in zip(shape, stride):  # noqa: B905 - of equal length, and the keyword takes as long as a pair
        if type(size) is not int or type(step) is not int or not (0 <= size < MAX_SIZE and 0 <= step < MAX_SIZE):
            raise BadTensor(f"its size {short(shape)} or stride {short(stride)} contains something that is not a size")
        numel *= size
        if numel >= MAX_SIZE:
            raise BadTensor(f"its size {short(shape)} has more elements than torch can count")
        last += (size - 1) * step
    return last + 1 if numel else 0


def _dtype(node: object) -> str:
    return node.name if type(node) is Global and node.module == "torch" and node.name in ITEMSIZE else "unknown"


_METHODS = {function: f"_{function.rpartition('.')[2].lstrip('_').lower()}" for function in REBUILDS}


class RebuildReader:
    """Makes the tensors that torch's rebuild functions would make; each function has a method of its name.

    ``search`` finds the tensors inside an object, and ``depth`` counts tensors inside tensors.
    """

    def __init__(self, table: Storages, search: Search, depth: int) -> None:
        self._table = table
        self._search = search
        self._depth = depth
        self._attributes: list[object] = []

    def tensor(self, function: str, args: object, at: Place) -> tuple[Tensor | None, list[object], str]:
        """The tensor that a call would make, and the nodes of its attributes; or none, and what is wrong."""
        self._attributes = []
        try:
            return self._apply(function, args, at), self._attributes, ""
        except BadTensor as reason:
            return None, [], str(reason)
        except (IndexError, ValueError, TypeError):
            return None, [], "its rebuild call has arguments of a wrong kind"

    def _apply(self, function: str, args: object, at: Place) -> Tensor:
        """The tensor that a rebuild function would make of some arguments; ``BadTensor`` if it would make none."""
        rebuild = REBUILDS.get(function)
        if rebuild is None:
            raise BadTensor(f"it is rebuilt by {function or 'no function'}")
        if type(args) is not tuple or not rebuild.least <= len(args) <= rebuild.most:
            raise BadTensor("its rebuild call has the wrong number of arguments")
        if self._depth >= MAX_NESTED:
            raise BadTensor("it is made of tensors that are nested too deeply")
        self._depth += 1
        try:
            tensor: Tensor = getattr(self, _METHODS[function])(args, at)
            return tensor
        finally:
            self._depth -= 1

    def _rebuild(self, node: object, at: Place, part: str = "") -> Tensor:
        """The tensor of a call inside another call: a ``part`` of its tensor, or the same tensor in another class."""
        if type(node) is not Call:
            raise BadTensor("it should contain a tensor, but does not")
        self._table.budget.seen(id(node))
        if part:
            at = (*at[0], part), f"{at[1]}/{part}" if at[1] else part
        return self._apply(called(node), node.args, at)

    def _inside(self, node: object, at: Place) -> tuple[Tensor, ...]:
        """The tensors inside an object that is itself a tensor: a subclass keeps them in its state."""
        tensors, problems = self._search(node, at, self._depth)
        for problem in problems:
            raise BadTensor(f"inside it, {problem.where}: {problem.detail}")
        return tuple(tensors)

    def _strided(self, args: _Args, at: Place, *, dtype: str = "", grad_at: int = 4, flags_at: int = 6) -> Tensor:
        """A tensor over a storage: (storage, offset, size, stride, …); the positions of other arguments vary."""
        resolved = self._table.resolve(args[0])
        if resolved is None:
            raise BadTensor("its storage is not a storage")
        storage, first, tagged = resolved
        path, name = at
        dtype = dtype or tagged
        offset, shape, stride = args[1:4]
        if type(offset) is not int or not 0 <= offset < MAX_SIZE:
            raise BadTensor(f"its offset {short(offset)} is not a position")
        if type(shape) is not tuple:
            shape = _ints(shape, "size")
        if type(stride) is not tuple:
            stride = _ints(stride, "stride")
        grad = len(args) > grad_at and args[grad_at] is True
        if grad:
            _check_grad(dtype)
        offset += first
        end = reach(offset, shape, stride)
        end = itemsize(dtype, end) if dtype in BLOCKS else end * ITEMSIZE.get(dtype, 1)
        if end > storage.nbytes:
            raise BadTensor(f"it needs {end} bytes of a storage of {storage.nbytes}")
        key, device, begin = storage.key, storage.device, storage.offset
        self._table.users[key].append(name)
        if offset and begin is not None:
            begin += itemsize(dtype, offset)
        flags: tuple[str, ...] = ()
        if len(args) > flags_at and type(args[flags_at]) is Dict:  # {"conj": True}
            flags = tuple(flag for flag in ("conj", "neg") if args[flags_at].get(flag) is True)
        fields = (path, name, dtype, shape, stride, device, key, offset, grad, "strided", "", (), begin, flags, None)
        return _new(Tensor, fields)

    _rebuild_tensor = _rebuild_tensor_v2 = _strided

    def _rebuild_tensor_v3(self, args: _Args, at: Place) -> Tensor:
        # torch 2.13 writes it but cannot load it, since it sets the storage of a leaf that requires gradients. (Tensors
        # of other formats have no hooks here, and are loaded in another way.)
        if args[4] is True and args[5] is not None:
            detail = "a tensor of a newer dtype that requires gradients and is not a Parameter"
            self._table.noted.add("tensor-unloadable", at[1] or "the root", detail)
        return self._strided(args, at, dtype=_dtype(args[6]), flags_at=7)

    def _rebuild_qtensor(self, args: _Args, at: Place) -> Tensor:
        tensor = self._strided(args, at, grad_at=5, flags_at=7)._replace(kind="quantized")
        if type(args[4]) is not tuple or len(args[4]) > 4:
            raise BadTensor("its quantizer is not valid")
        for index, part in enumerate(part for part in args[4] if type(part) is Call):
            self._rebuild(part, at, f"quantizer.{index}")
        return tensor

    def _rebuild_parameter(self, args: _Args, at: Place) -> Tensor:
        inner = self._rebuild(args[0], at)
        if args[1] is True:
            _check_grad(inner.dtype)
        self._attributes += args[3:]
        return inner._replace(requires_grad=args[1] is True, cls=inner.cls or "Parameter")

    _rebuild_parameter_with_state = _rebuild_parameter

    def _parameter(self, args: _Args, at: Place) -> Tensor:
        inner = self._rebuild(args[0], at)
        return inner._replace(requires_grad=args[1:2] != (False,), cls="Parameter")

    def _rebuild_meta_tensor_no_storage(self, args: _Args, at: Place) -> Tensor:
        shape, stride = _ints(args[1], "size"), _ints(args[2], "stride")
        reach(0, shape, stride)
        return Tensor(*at, _dtype(args[0]), shape, stride, "meta", None, 0, args[3] is True, "meta")

    def _rebuild_sparse_tensor(self, args: _Args, at: Place) -> Tensor:
        # The layout is ``torch.serialization._get_layout("torch.sparse_coo")``.
        text = args[0].args[0] if type(args[0]) is Call and type(args[0].args) is tuple and args[0].args else ""
        layout = text.removeprefix("torch.") if type(text) is str else "sparse_coo"
        names = ("indices", "values") if layout == "sparse_coo" else ("compressed_indices", "plain_indices", "values")
        if type(args[1]) is not tuple or len(args[1]) < len(names) + 1:
            raise BadTensor("its sparse parts are missing")
        return self._composite(args[1], at, layout, names, sized=True)

    _rebuild_sparse_csr_tensor = _rebuild_sparse_tensor

    def _rebuild_nested_tensor(self, args: _Args, at: Place) -> Tensor:
        return self._composite(args, at, "nested", ("buffer", "sizes", "strides", "offsets"))

    def _composite(self, args: _Args, at: Place, kind: str, names: tuple[str, ...], *, sized: bool = False) -> Tensor:
        """A tensor made of others. If ``sized``: the dtype of the last, and the size after it; else as the first."""
        parts = tuple([self._rebuild(part, at, label) for label, part in zip(names, args, strict=False)])
        like = parts[-1 if sized else 0]
        shape = _ints(args[len(names)], "size") if sized else like.shape
        return Tensor(*at, like.dtype, shape, (), parts[0].device, None, kind=kind, parts=parts)

    def _rebuild_from_type(self, args: _Args, at: Place) -> Tensor:
        function, kind, inner_args, state = args
        inner = self._apply(dotted(function), inner_args, at)
        cls = dotted(kind).rpartition(".")[2]
        inner = inner._replace(cls="" if cls == "Tensor" else cls)
        if inner.kind == "subclass":
            return inner._replace(parts=self._inside(state, at))
        if not inner.parts:  # a jagged one repeats its parts there
            self._attributes.append(state)
        return inner

    _rebuild_from_type_v2 = _rebuild_from_type

    def _rebuild_wrapper_subclass(self, args: _Args, at: Place) -> Tensor:
        kind, dtype, shape, stride, _offset, _layout, device, grad = args
        sizes, steps, cls = _ints(shape, "size"), _ints(stride, "stride"), dotted(kind).rpartition(".")[2]
        where = device_text(device)
        return Tensor(*at, _dtype(dtype), sizes, steps, where, None, 0, grad is True, "subclass", cls)

    def _rebuild_njt(self, args: _Args, at: Place) -> Tensor:
        parts = self._inside(args[0], at)
        if not parts:
            raise BadTensor("it contains no tensors")
        return Tensor(*at, parts[0].dtype, parts[0].shape, (), parts[0].device, None, kind="nested", parts=parts)

    def _rebuild_device_tensor_from_cpu_tensor(self, args: _Args, at: Place) -> Tensor:
        # The storage is tagged cpu: the device it came from, and goes back to, is an argument.
        moved = self._composite(args, at, "device", ("data",))
        dtype, inner = _dtype(args[1]), moved.parts[0]
        storage = self._table.storages.get(inner.storage or "")
        if storage is not None and itemsize(dtype, inner.numel) > max(16 * storage.nbytes, 4096):
            raise BadTensor("it would be copied from a few bytes to a great many")
        return moved._replace(dtype=dtype, device=text_of(args[2]), requires_grad=args[3] is True)

    def _rebuild_device_tensor_from_numpy(self, args: _Args, at: Place) -> Tensor:
        array, dtype, device, grad = args
        shape: tuple[int, ...] = ()
        if type(array) is Call and array.states and type(array.states[0]) is tuple and len(array.states[0]) > 1:
            shape = _ints(array.states[0][1], "size")
        from transload.geometry import contiguous

        steps, where = contiguous(shape), text_of(device)
        return Tensor(*at, _dtype(dtype), shape, steps, where, None, 0, grad is True, "device")

    _rebuild_xla_tensor = _rebuild_mlc_tensor = _rebuild_device_tensor_from_numpy
