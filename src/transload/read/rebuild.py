"""torch's rebuild functions, read as tensors: dtype, shape, device, storage. Nothing is rebuilt.

The functions and their arguments are in docs/formats.md. One that is not in the table makes no tensor here: it is an
object like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.checkpoint import Key, Tensor, contiguous
from transload.dtypes import ITEMSIZE, itemsize
from transload.read.nodes import Call, Dict, Global
from transload.read.storages import MAX_SIZE, StorageTable
from transload.read.values import called, device_text, dotted, short, text_of

__all__ = ["MAX_NESTED", "READERS", "BadTensor", "Context", "apply", "ordinary", "rebuild"]

MAX_RANK = 1024
"""Dimensions of a tensor; a shape of a million, shared by a million tensors, costs its maker two bytes each."""

MAX_NESTED = 16
"""A parameter around a subclass around a quantized tensor around its scales is four."""


class BadTensor(Exception):  # noqa: N818 - a signal between readers and the walk, never seen outside
    """Arguments that no torch would have written; the text says what is wrong."""


class Context:
    """What a reader needs: the storages, where in the tree the call stands, and how to search an object for tensors.

    One serves a whole walk; ``path`` and ``name`` change from call to call.
    """

    __slots__ = ("beside", "depth", "name", "path", "search", "table")

    def __init__(self, table: StorageTable, path: tuple[Key, ...], name: str, search: _Search, depth: int = 0) -> None:
        self.beside: list[Tensor] = []  # tensors that others carry as attributes
        self.table = table
        self.path = path
        self.name = name
        self.search = search
        self.depth = depth

    def copy(self) -> Context:
        """The same place, for a walk of its own."""
        return Context(self.table, self.path, self.name, self.search, self.depth)

    def inner(self, part: str) -> Context:
        """The place of a part of this tensor."""
        name = f"{self.name}/{part}" if self.name else part
        inner = Context(self.table, (*self.path, part), name, self.search, self.depth)
        inner.beside = self.beside
        return inner


_Search = Callable[[Context, object], tuple[Tensor, ...]]
_Reader = Callable[[Context, tuple[Any, ...]], Tensor]


def _ints(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Call and called(value) == "torch.Size":
        value = value.args[0] if type(value.args) is tuple and value.args else ()
    if type(value) is not tuple:  # nor a list: one that grows after the call would show another size than torch made
        raise BadTensor(f"its {what} is no tuple of numbers")
    numbers: tuple[Any, ...] = value
    if len(numbers) > MAX_RANK:
        raise BadTensor(f"its {what} has {len(numbers)} dimensions")
    for number in numbers:
        if type(number) is not int or not 0 <= number < MAX_SIZE:
            raise BadTensor(f"its {what} {short(value)} holds what is no size")
    return numbers


def ordinary(ctx: Context, node: Call, path: tuple[Key, ...], name: str, again: bool) -> Tensor | None:
    """The tensor of a call as nearly all are, paid for; ``None`` for any other call, right or wrong.

    What ``rebuild`` does with a ``_rebuild_tensor_v2`` that is in order, without its detours.
    """
    args, callee = node.args, node.callee
    if type(callee) is not Global or callee.full_name != _ORDINARY or type(args) is not tuple or len(args) != 6:
        return None
    held, offset, shape, stride, requires_grad, _ = args
    found = ctx.table.resolve(held)
    if found is None or type(shape) is not tuple or type(stride) is not tuple or type(offset) is not int:
        return None
    slot, first, dtype = found
    width, rank = _WHOLE.get(dtype), len(shape)
    if width is None or requires_grad is not False or offset < 0 or rank != len(stride) or rank > 8 or ctx.depth:
        return None
    last = offset = offset + first
    numel = 1
    for size, step in zip(shape, stride):  # noqa: B905 - as long as each other, and a keyword costs as much as a pair
        if type(size) is not int or type(step) is not int or size < 1 or not 0 <= step < MAX_SIZE:
            return None
        numel *= size
        last += (size - 1) * step
    if numel >= MAX_SIZE or (last + 1) * width > slot.nbytes:
        return None
    ctx.table.budget.meet(id(node), len(name) + 8 * len(path), again=again)
    slot.names.append(name)
    begin = slot.place[0]
    begin = None if begin is None else begin + offset * width
    fields = (path, name, dtype, shape, stride, slot.device, slot.key, offset, False, "strided", "", (), begin, ())
    return _new(Tensor, fields)


_ORDINARY = "torch._utils._rebuild_tensor_v2"
_WHOLE = {dtype: width for dtype, width in ITEMSIZE.items() if itemsize(dtype, 8) == 8 * width}
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields


def _strided(
    ctx: Context, args: tuple[Any, ...], *, dtype: str = "", requires_grad: object = False, kind: str = "strided"
) -> Tensor:
    """A tensor over a storage: (storage, offset, size, stride, …)."""
    found = ctx.table.resolve(args[0])
    if found is None:
        raise BadTensor("its storage is no storage")
    slot, first, tagged = found
    dtype = dtype or tagged
    offset, shape, stride = args[1], args[2], args[3]
    if type(offset) is not int or not 0 <= offset < MAX_SIZE:
        raise BadTensor(f"its offset {short(offset)} is no position")
    if type(shape) is not tuple:
        shape = _ints(shape, "size")
    if type(stride) is not tuple:
        stride = _ints(stride, "stride")
    _check_grad(dtype, requires_grad)
    offset += first
    if _end(offset, shape, stride, dtype) > slot.nbytes:
        raise BadTensor(f"it reaches to byte {_end(offset, shape, stride, dtype)} of a storage of {slot.nbytes}")
    slot.names.append(ctx.name)
    begin = slot.place.offset
    return Tensor(
        ctx.path,
        ctx.name,
        dtype,
        shape,
        stride,
        slot.device,
        slot.key,
        offset,
        requires_grad is True,
        kind,
        "",
        (),
        None if begin is None else begin + itemsize(dtype, offset),
    )


def _check_grad(dtype: str, requires_grad: object) -> None:
    if requires_grad is True and not dtype.startswith(("float", "bfloat", "complex", "unknown")):
        raise BadTensor(f"it asks for gradients, which {dtype} does not have")


def _end(offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...], dtype: str) -> int:
    """The byte after the last one a view reaches; 0 for an empty one."""
    if len(shape) != len(stride) or len(shape) > MAX_RANK:
        raise BadTensor(f"it has {len(shape)} sizes and {len(stride)} strides")
    last, empty, numel = offset, False, 1
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int or not (0 <= size < MAX_SIZE and 0 <= step < MAX_SIZE):
            raise BadTensor(f"its size {short(shape)} or stride {short(stride)} holds what is no size")
        numel *= size
        if numel >= MAX_SIZE:
            raise BadTensor(f"its size {short(shape)} is more than torch can count")
        if size:
            last += (size - 1) * step
        else:
            empty = True
    return 0 if empty else itemsize(dtype, last + 1)


def _v1(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    return _strided(ctx, args)


def _v2(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    return _flagged(_strided(ctx, args, requires_grad=args[4]), args[6:])


def _flagged(tensor: Tensor, metadata: tuple[Any, ...]) -> Tensor:
    """``{"conj": True}``, the last argument where there is one."""
    if not metadata or type(metadata[0]) is not Dict:
        return tensor
    return tensor._replace(flags=tuple(flag for flag in ("conj", "neg") if metadata[0].get(flag) is True))


def _v3(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    # torch 2.13 writes it and fails on it: it sets the storage of a leaf that asks for gradients. (What other formats
    # describe comes here without hooks, and is loaded otherwise.)
    if args[4] is True and args[5] is not None:
        detail = "a tensor of a newer dtype that asks for gradients and is no Parameter"
        ctx.table.noted.add("tensor-unloadable", ctx.name or "the root", detail)
    return _flagged(_strided(ctx, args, dtype=_dtype(args[6]), requires_grad=args[4]), args[7:])


def _quantized(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    tensor = _strided(ctx, args, requires_grad=args[5], kind="quantized")
    if type(args[4]) is not tuple or len(args[4]) > 4:
        raise BadTensor("its quantizer is none")
    scales = [part for part in args[4] if type(part) is Call]
    for index, part in enumerate(scales):
        rebuild(ctx.inner(f"quantizer.{index}"), part)
    return tensor


def _parameter(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    inner = rebuild(ctx, args[0])
    _check_grad(inner.dtype, args[1])
    ctx.beside += ctx.search(ctx, args[3]) if len(args) > 3 else ()
    return inner._replace(requires_grad=args[1] is True, cls=inner.cls or "Parameter")


def _old_parameter(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    inner = rebuild(ctx, args[0])
    return inner._replace(requires_grad=args[1:2] != (False,), cls="Parameter")


def _meta(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    shape, stride = _ints(args[1], "size"), _ints(args[2], "stride")
    _end(0, shape, stride, "uint8")
    return Tensor(ctx.path, ctx.name, _dtype(args[0]), shape, stride, "meta", None, 0, args[3] is True, "meta")


def _sparse(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    layout = _layout(args[0])
    names = {"sparse_coo": ("indices", "values")}.get(layout, ("compressed_indices", "plain_indices", "values"))
    data = args[1]
    if type(data) is not tuple or len(data) < len(names) + 1:
        raise BadTensor("its sparse parts are missing")
    parts = tuple(rebuild(ctx.inner(n), part) for n, part in zip(names, data, strict=False))
    return _composite(ctx, layout, parts, parts[-1].dtype, _ints(data[len(names)], "size"))


def _sparse_csr(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    names = ("compressed_indices", "plain_indices", "values")
    parts = tuple(rebuild(ctx.inner(n), part) for n, part in zip(names, args, strict=False))
    return _composite(ctx, "sparse_csr", parts, parts[-1].dtype, _ints(args[3], "size"))


def _nested(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    names = ("buffer", "sizes", "strides", "offsets")
    parts = tuple(rebuild(ctx.inner(n), part) for n, part in zip(names, args, strict=False))
    return _composite(ctx, "nested", parts, parts[0].dtype, parts[0].shape)


def _from_type(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    function, kind, inner_args, state = args
    inner = apply(ctx, dotted(function), inner_args)
    name = dotted(kind).rpartition(".")[2]
    inner = inner._replace(cls="" if name == "Tensor" else name)
    held = () if inner.parts else ctx.search(ctx, state)  # a jagged one repeats its parts there
    if inner.kind == "subclass":
        return inner._replace(parts=held)
    ctx.beside += held
    return inner


def _wrapper(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    kind, dtype, shape, stride, _offset, _layout_arg, device, requires_grad = args[:8]
    name = dotted(kind).rpartition(".")[2]
    sizes, steps = _ints(shape, "size"), _ints(stride, "stride")
    where = device_text(device)
    return Tensor(
        ctx.path, ctx.name, _dtype(dtype), sizes, steps, where, None, 0, requires_grad is True, "subclass", name
    )


def _jagged(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    parts = ctx.search(ctx, args[0])
    if not parts:
        raise BadTensor("it holds no tensors")
    return _composite(ctx, "nested", parts, parts[0].dtype, parts[0].shape)


def _from_cpu(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    # The storage is tagged cpu: the device it came from, and goes back to, is an argument.
    inner = rebuild(ctx.inner("data"), args[0])
    slot = ctx.table.slots.get(inner.storage or "")
    if slot is not None and itemsize(_dtype(args[1]), inner.numel) > max(16 * slot.nbytes, 4096):
        raise BadTensor("it would be copied from a few bytes to a great many")
    moved = _composite(ctx, "device", (inner,), _dtype(args[1]), inner.shape)
    return moved._replace(device=text_of(args[2]), requires_grad=args[3] is True)


def _from_numpy(ctx: Context, args: tuple[Any, ...]) -> Tensor:
    array = args[0]
    shape: tuple[int, ...] = ()
    if type(array) is Call and array.states and type(array.states[0]) is tuple and len(array.states[0]) > 1:
        shape = _ints(array.states[0][1], "size")
    steps = contiguous(shape)
    return Tensor(
        ctx.path, ctx.name, _dtype(args[1]), shape, steps, text_of(args[2]), None, 0, args[3] is True, "device"
    )


def _composite(ctx: Context, kind: str, parts: tuple[Tensor, ...], dtype: str, shape: tuple[int, ...]) -> Tensor:
    device = parts[0].device if parts else "cpu"
    return Tensor(ctx.path, ctx.name, dtype, shape, (), device, None, kind=kind, parts=parts)


READERS: dict[str, tuple[_Reader, int, int]] = {
    # function: reader, least and most arguments
    "torch._utils._rebuild_tensor": (_v1, 4, 4),
    "torch._utils._rebuild_tensor_v2": (_v2, 6, 7),
    "torch._utils._rebuild_tensor_v3": (_v3, 7, 8),
    "torch.nn.parameter.Parameter": (_old_parameter, 1, 2),
    "torch._utils._rebuild_parameter": (_parameter, 3, 3),
    "torch._utils._rebuild_parameter_with_state": (_parameter, 4, 4),
    "torch._utils._rebuild_qtensor": (_quantized, 7, 7),
    "torch._utils._rebuild_sparse_tensor": (_sparse, 2, 2),
    "torch._utils._rebuild_sparse_csr_tensor": (_sparse_csr, 4, 5),
    "torch._utils._rebuild_nested_tensor": (_nested, 4, 4),
    "torch._utils._rebuild_meta_tensor_no_storage": (_meta, 4, 4),
    "torch._utils._rebuild_wrapper_subclass": (_wrapper, 8, 8),
    "torch._utils._rebuild_device_tensor_from_numpy": (_from_numpy, 4, 4),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (_from_cpu, 4, 4),
    "torch._utils._rebuild_xla_tensor": (_from_numpy, 4, 4),
    "torch._utils._rebuild_mlc_tensor": (_from_numpy, 4, 4),
    "torch._tensor._rebuild_from_type": (_from_type, 4, 4),
    "torch._tensor._rebuild_from_type_v2": (_from_type, 4, 4),
    "torch.tensor._rebuild_from_type": (_from_type, 4, 4),
    "torch.nested._internal.nested_tensor._rebuild_njt": (_jagged, 1, 1),
}


def rebuild(ctx: Context, node: object) -> Tensor:
    """The tensor a call would make; ``BadTensor`` if it would make none."""
    if type(node) is not Call:
        raise BadTensor("it should hold a tensor where there is none")
    ctx.table.budget.seen(id(node))
    return apply(ctx, called(node), node.args)


def apply(ctx: Context, function: str, args: object) -> Tensor:
    """The tensor a rebuild function would make of some arguments."""
    entry = READERS.get(function)
    if entry is None:
        raise BadTensor(f"it is rebuilt by {function or 'no function'}")
    reader, least, most = entry
    if type(args) is not tuple or not least <= len(args) <= most:
        raise BadTensor("its rebuild call has the wrong number of arguments")
    if ctx.depth >= MAX_NESTED:
        raise BadTensor("it is made of tensors made of tensors without end")
    ctx.depth += 1
    try:
        return reader(ctx, args)
    finally:
        ctx.depth -= 1


def _dtype(node: object) -> str:
    return node.name if type(node) is Global and node.module == "torch" and node.name in ITEMSIZE else "unknown"


def _layout(node: object) -> str:
    """``torch.serialization._get_layout("torch.sparse_coo")``."""
    text = node.args[0] if type(node) is Call and type(node.args) is tuple and node.args else ""
    return text.removeprefix("torch.") if type(text) is str else "sparse_coo"
