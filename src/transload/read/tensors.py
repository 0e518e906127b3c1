"""torch's rebuild calls, read as tensors and storages.

A pickle machine gives a graph; this module finds in it what torch's own rebuild functions would make and says what that is:
dtype, shape, device, storage. Nothing is rebuilt. The functions and their arguments are in docs/formats.md; an unknown one
stays an opaque node whose inside is searched like any other object's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transload.checkpoint import Key, Leaf, Storage, Tensor
from transload.dtypes import ITEMSIZE, STORAGES, itemsize
from transload.findings import Problem
from transload.read.nodes import Big, Call, Dict, Global, Persistent, Set, module_class

__all__ = ["MAX_DEPTH", "MAX_LEAVES", "Place", "Slot", "StorageTable", "Tree", "contiguous", "find_tensors"]

MAX_DEPTH = 1000
"""Nesting of a hostile file: a million nested tuples are a megabyte. No checkpoint goes beyond a few dozen levels."""

MAX_LEAVES = 10_000
"""Values kept beside the tensors; a loss history of a million floats is counted, not listed."""

_MAX_SIZE = 1 << 63


class Place(NamedTuple):
    """Where a container keeps a storage. ``offset`` is ``None`` when the bytes cannot be read in place."""

    offset: int | None
    stored: int
    record: str = ""
    crc32: int | None = None
    compressed: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """What a pickle's root holds."""

    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]


class Slot:
    """A storage being read: the claims of the index, the place in the container, the names of tensors met so far."""

    __slots__ = ("device", "dtype", "key", "names", "nbytes", "place")

    def __init__(self, key: str, device: str, dtype: str, nbytes: int, place: Place) -> None:
        self.key = key
        self.device = device
        self.dtype = dtype
        self.nbytes = nbytes
        self.place = place
        self.names: list[str] = []


class StorageTable:
    """The storages met so far, by key. ``locate`` asks the container where one lies.

    Each key counts once: torch restores a storage the first time it meets it and shares it afterwards.
    """

    def __init__(self, locate: Callable[[str, int], Place], *, big_endian: bool = False, file: str = "") -> None:
        self._locate = locate
        self._big_endian = big_endian
        self._file = file
        self.slots: dict[str, Slot] = {}
        self.problems: list[Problem] = []
        self._seen: dict[int, tuple[Slot, int, str] | None] = {}

    def resolve(self, node: object) -> tuple[Slot, int, str] | None:
        """The storage a persistent id names, the element a view of it begins at, and the dtype it is read as."""
        if type(node) is not Persistent:
            return None
        key = id(node)
        if key not in self._seen:
            self._seen[key] = self._parse(node.id)
        return self._seen[key]

    def _parse(self, pid: object) -> tuple[Slot, int, str] | None:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            return None
        _, kind, key, device, numel = pid[:5]
        dtype = STORAGES.get(kind.name.rpartition(".")[2]) if type(kind) is Global else None
        if type(key) is int:
            key = str(key)
        if dtype is None or type(key) is not str or type(device) is not str or type(numel) is not int:
            self.problems.append(Problem("storage-malformed", detail="a storage id of the wrong shape"))
            return None
        nbytes = numel * ITEMSIZE[dtype]
        slot = self.slots.get(key)
        if slot is None:
            slot = self._add(key, device, dtype, nbytes)
        elif slot.nbytes != nbytes or slot.device != device:
            detail = f"named again with {_scalar(nbytes)} bytes on {device}, first with {slot.nbytes} on {slot.device}"
            self.problems.append(Problem("storage-conflict", f"storage {key}", detail))
        view = pid[5] if len(pid) == 6 else None
        first = view[1] if type(view) is tuple and len(view) == 3 and type(view[1]) is int else 0
        return slot, first, dtype

    def _add(self, key: str, device: str, dtype: str, nbytes: int) -> Slot:
        if 0 <= nbytes < _MAX_SIZE:
            place = self._locate(key, nbytes)
        else:
            self.problems.append(Problem("storage-size-absurd", f"storage {key}", f"{_scalar(nbytes)} bytes are claimed"))
            place, nbytes = Place(None, 0), 0
        slot = self.slots[key] = Slot(key, device, dtype, nbytes, place)
        return slot

    def finish(self) -> tuple[Storage, ...]:
        """All storages, each with the names of its tensors."""
        return tuple(self._storage(slot) for slot in self.slots.values())

    def _storage(self, slot: Slot) -> Storage:
        place = slot.place
        stored = place.stored if place.compressed else min(place.stored, slot.nbytes)
        return Storage(
            slot.key,
            slot.key,
            slot.device,
            slot.dtype,
            slot.nbytes,
            stored,
            place.offset,
            place.record,
            self._file,
            place.crc32,
            place.compressed,
            self._big_endian,
            tuple(slot.names),
        )


# -- the rebuild functions ---------------------------------------------------------------------------------------------


class _Bad(Exception):  # noqa: N818 - a signal inside this module
    """Arguments that no torch would have written; the text says what is wrong."""


class _Context:
    """What a rebuild reader needs: the storages, and where in the tree the call stands. One serves a whole walk."""

    __slots__ = ("depth", "name", "path", "table")

    def __init__(self, table: StorageTable, path: tuple[Key, ...], name: str, depth: int) -> None:
        self.table = table
        self.path = path
        self.name = name
        self.depth = depth


_Reader = Callable[[_Context, tuple[Any, ...], Call], Tensor]


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _ints(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Call and _called(value) == "torch.Size":
        value = value.args[0] if type(value.args) is tuple and value.args else ()
    if type(value) not in (tuple, list):
        raise _Bad(f"its {what} is no list of numbers")
    numbers: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MAX_SIZE:
            raise _Bad(f"its {what} {_short(value)} holds what is no size")
    return numbers


def _strided(
    ctx: _Context, args: tuple[Any, ...], *, dtype: str = "", requires_grad: object = False, kind: str = "strided"
) -> Tensor:
    """A tensor over a storage: (storage, offset, size, stride, …)."""
    found = ctx.table.resolve(args[0])
    if found is None:
        raise _Bad("its storage is no storage")
    slot, first, tagged = found
    dtype = dtype or tagged
    offset, shape, stride = args[1], args[2], args[3]
    if type(offset) is not int or not 0 <= offset < _MAX_SIZE:
        raise _Bad(f"its offset {_short(offset)} is no position")
    if type(shape) is not tuple:
        shape = _ints(shape, "size")
    if type(stride) is not tuple:
        stride = _ints(stride, "stride")
    offset += first
    if _end(offset, shape, stride, dtype) > slot.nbytes:
        raise _Bad(f"it reaches to byte {_end(offset, shape, stride, dtype)} of a storage of {slot.nbytes}")
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


def _end(offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...], dtype: str) -> int:
    """The byte after the last one a view reaches; 0 for an empty one."""
    if len(shape) != len(stride):
        raise _Bad(f"it has {len(shape)} sizes and {len(stride)} strides")
    last, empty = offset, False
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int or not (0 <= size < _MAX_SIZE and 0 <= step < _MAX_SIZE):
            raise _Bad(f"its size {_short(shape)} or stride {_short(stride)} holds what is no size")
        if size:
            last += (size - 1) * step
        else:
            empty = True
    return 0 if empty else itemsize(dtype, last + 1)


def _v1(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    return _strided(ctx, args)


def _v2(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    return _strided(ctx, args, requires_grad=args[4])


def _v3(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    return _strided(ctx, args, dtype=_dtype(args[6]), requires_grad=args[4])


def _quantized(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    tensor = _strided(ctx, args, requires_grad=args[5], kind="quantized")
    scales = [part for part in args[4] if type(part) is Call] if type(args[4]) is tuple else []
    for index, part in enumerate(scales):
        _rebuild(_inner(ctx, f"quantizer.{index}"), part)
    return tensor


def _parameter(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    inner = _rebuild(ctx, args[0])
    return replace(inner, requires_grad=args[1] is True, cls=inner.cls or "Parameter")


def _old_parameter(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    inner = _rebuild(ctx, args[0])
    return replace(inner, requires_grad=args[1:2] != (False,), cls="Parameter")


def _meta(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    shape, stride = _ints(args[1], "size"), _ints(args[2], "stride")
    return Tensor(ctx.path, ctx.name, _dtype(args[0]), shape, stride, "meta", None, 0, args[3] is True, "meta")


def _sparse(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    layout = _layout(args[0])
    names = {"sparse_coo": ("indices", "values")}.get(layout, ("compressed_indices", "plain_indices", "values"))
    data = args[1]
    if type(data) is not tuple or len(data) < len(names) + 1:
        raise _Bad("its sparse parts are missing")
    parts = tuple(_rebuild(_inner(ctx, n), part) for n, part in zip(names, data, strict=False))
    return _composite(ctx, layout, parts, parts[-1].dtype, _ints(data[len(names)], "size"))


def _sparse_csr(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    names = ("compressed_indices", "plain_indices", "values")
    parts = tuple(_rebuild(_inner(ctx, n), part) for n, part in zip(names, args, strict=False))
    return _composite(ctx, "sparse_csr", parts, parts[-1].dtype, _ints(args[3], "size"))


def _nested(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    names = ("buffer", "sizes", "strides", "offsets")
    parts = tuple(_rebuild(_inner(ctx, n), part) for n, part in zip(names, args, strict=False))
    return _composite(ctx, "nested", parts, parts[0].dtype, parts[0].shape)


def _from_type(ctx: _Context, args: tuple[Any, ...], call: Call) -> Tensor:
    function, kind, inner_args, state = args
    if _READERS.get(_dotted(function)) is None:
        raise _Bad(f"it is rebuilt by {_dotted(function) or 'something that is no function'}")
    inner = _rebuild(ctx, Call(function, inner_args, "reduce", call.position))
    name = _dotted(kind).rpartition(".")[2]
    inner = replace(inner, cls="" if name == "Tensor" else name)
    if inner.kind == "subclass":
        inner = replace(inner, parts=_parts_of(ctx, state))
    return inner


def _wrapper(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    kind, dtype, shape, stride, _offset, _layout_arg, device, requires_grad = args[:8]
    name = _dotted(kind).rpartition(".")[2]
    sizes, steps = _ints(shape, "size"), _ints(stride, "stride")
    where = _device(device)
    return Tensor(ctx.path, ctx.name, _dtype(dtype), sizes, steps, where, None, 0, requires_grad is True, "subclass", name)


def _jagged(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    parts = _parts_of(ctx, args[0])
    if not parts:
        raise _Bad("it holds no tensors")
    return _composite(ctx, "nested", parts, parts[0].dtype, parts[0].shape)


def _from_cpu(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    # The storage is tagged cpu: the device it came from, and goes back to, is an argument.
    inner = _rebuild(_inner(ctx, "data"), args[0])
    moved = _composite(ctx, "device", (inner,), _dtype(args[1]), inner.shape)
    return replace(moved, device=_text(args[2]), requires_grad=args[3] is True)


def _from_numpy(ctx: _Context, args: tuple[Any, ...], _: Call) -> Tensor:
    array = args[0]
    shape: tuple[int, ...] = ()
    if type(array) is Call and array.states and type(array.states[0]) is tuple and len(array.states[0]) > 1:
        shape = _ints(array.states[0][1], "size")
    steps = contiguous(shape)
    return Tensor(ctx.path, ctx.name, _dtype(args[1]), shape, steps, _text(args[2]), None, 0, args[3] is True, "device")


def _composite(ctx: _Context, kind: str, parts: tuple[Tensor, ...], dtype: str, shape: tuple[int, ...]) -> Tensor:
    device = parts[0].device if parts else "cpu"
    return Tensor(ctx.path, ctx.name, dtype, shape, (), device, None, kind=kind, parts=parts)


def _inner(ctx: _Context, part: str) -> _Context:
    return _Context(ctx.table, (*ctx.path, part), f"{ctx.name}/{part}" if ctx.name else part, ctx.depth + 1)


def _parts_of(ctx: _Context, state: object) -> tuple[Tensor, ...]:
    """The tensors a subclass wraps: those in its state."""
    found = find_tensors(state, ctx.table, prefix=ctx, depth=ctx.depth + 1)
    return found.tensors


_READERS: dict[str, tuple[_Reader, int, int]] = {
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


def _rebuild(ctx: _Context, node: object) -> Tensor:
    """The tensor a call would make."""
    if type(node) is not Call:
        raise _Bad("it should hold a tensor where there is none")
    if ctx.depth > MAX_DEPTH:
        raise _Bad("it is nested too deeply")
    entry = _READERS.get(_called(node))
    if entry is None:
        raise _Bad(f"it is rebuilt by {_called(node) or 'no function'}")
    reader, least, most = entry
    if type(node.args) is not tuple or not least <= len(node.args) <= most:
        raise _Bad("its rebuild call has the wrong number of arguments")
    return reader(ctx, node.args, node)


def _called(node: Call) -> str:
    callee = node.callee
    if type(callee) is Global:
        return callee.full_name
    return _dotted(module_class(callee))


def _dotted(node: object) -> str:
    return node.full_name if type(node) is Global else ""


def _dtype(node: object) -> str:
    return node.name if type(node) is Global and node.module == "torch" else "unknown"


def _layout(node: object) -> str:
    """``torch.serialization._get_layout("torch.sparse_coo")``."""
    text = node.args[0] if type(node) is Call and type(node.args) is tuple and node.args else ""
    return text.removeprefix("torch.") if type(text) is str else "sparse_coo"


def _device(node: object) -> str:
    """``torch.device("cuda", 1)`` as ``cuda:1``."""
    if type(node) is Call and _called(node) == "torch.device" and type(node.args) is tuple:
        return ":".join(str(part) for part in node.args if type(part) in (str, int)) or "unknown"
    return _text(node)


def _text(node: object) -> str:
    return node if type(node) is str else "unknown"


# -- the walk ----------------------------------------------------------------------------------------------------------


class _Walk:
    """One search of a graph for tensors and leaves: iterative, cycle-safe, bounded."""

    def __init__(self, table: StorageTable, separator: str) -> None:
        self.table = table
        self.separator = separator
        self.tensors: list[Tensor] = []
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.skipped_leaves = 0
        self.expanded: dict[int, int] = {}
        self.repeats = 0
        self.told: set[str] = set()

    def tell(self, code: str, where: str, detail: str) -> None:
        """A problem of the walk itself, once each."""
        if code not in self.told:
            self.told.add(code)
            self.problems.append(Problem(code, where, detail))

    def leaf(self, path: tuple[Key, ...], name: str, node: object) -> None:
        """Note a value that is no tensor, unless there are very many."""
        if len(self.leaves) >= MAX_LEAVES:
            self.skipped_leaves += 1
            return
        self.leaves.append(Leaf(path, name, _leaf_kind(node), _short(node)))


_MAX_REPEATS = 100_000
"""Visits spent on objects already seen under another name (tied modules). Sixty levels of shared pairs would ask for 2**60."""

_Step = tuple[Any, tuple[Key, ...], str, Any]


def find_tensors(
    root: object,
    table: StorageTable,
    *,
    separator: str = "/",
    prefix: _Context | None = None,
    depth: int = 0,
    outside: dict[str, tuple[Any, ...]] | None = None,
) -> Tree:
    """All tensors and leaves below ``root``, in the order a reader of the file would meet them.

    ``separator`` joins attribute names of objects that are no modules. ``outside`` are tensors described elsewhere in the
    container, by persistent id: storage, offset, size and stride. A tensor with impossible arguments becomes a problem, with its
    name, and is left out.
    """
    walk = _Walk(table, separator)
    path, name = ((), "") if prefix is None else (prefix.path, prefix.name)
    stack: list[_Step] = [(root, path, name, None)]
    on_path: set[int] = set()
    context = _Context(table, path, name, depth)
    while stack:
        node, path, name, leave = stack.pop()
        if type(node) is Persistent and outside and str(node.id) in outside:
            node = Call(_PLAIN, outside[str(node.id)], "reduce", 0)  # described elsewhere
        if type(node) is Call and _called(node) in _READERS:
            context.path, context.name = path, name
            _take_tensor(walk, context, node)
            continue
        if leave is not None:
            on_path.discard(leave)
            continue
        children = _children(node, path, name, separator)
        if children is None:
            walk.leaf(path, name, node)
            continue
        if not children or not _enter(walk, id(node), path, name, on_path):
            continue
        stack.append((None, path, name, id(node)))
        children.reverse()
        stack += children
    if walk.skipped_leaves:
        walk.problems.append(Problem("leaves-uncounted", detail=f"{walk.skipped_leaves} further values are not listed"))
    storages = table.finish() if prefix is None else ()
    return Tree(tuple(walk.tensors), storages, tuple(walk.leaves), (*walk.problems, *(table.problems if prefix is None else ())))


def _enter(walk: _Walk, key: int, path: tuple[Key, ...], name: str, on_path: set[int]) -> bool:
    """Whether to look into a container: not in itself, not too deep, and not for ever again."""
    if key in on_path:
        return False
    if len(path) >= MAX_DEPTH:
        walk.tell("tree-too-deep", name, f"nested deeper than {MAX_DEPTH} levels; what lies below is not shown")
        return False
    if key in walk.expanded:
        walk.repeats += 1
        if walk.repeats > _MAX_REPEATS:
            walk.tell("tree-too-shared", name, "objects shared so often that not every name is listed")
            return False
    walk.expanded[key] = 1
    on_path.add(key)
    return True


def _take_tensor(walk: _Walk, ctx: _Context, node: Call) -> None:
    try:
        walk.tensors.append(_rebuild(ctx, node))
    except _Bad as reason:
        walk.problems.append(Problem("tensor-broken", ctx.name or "the root", str(reason)))
    except (IndexError, ValueError, TypeError):
        walk.problems.append(Problem("tensor-broken", ctx.name or "the root", "its rebuild call has arguments of a wrong kind"))


_PLAIN = Global("torch._utils", "_rebuild_tensor", 0)
_Child = tuple[Any, tuple[Key, ...], str, None]


def _children(node: Any, path: tuple[Key, ...], name: str, separator: str) -> list[_Child] | None:
    """What lies directly in a node, with path and name; ``None`` for a leaf."""
    kind = type(node)
    if kind is Dict:
        return _dict_children(node.items, path, name)
    if kind is list or kind is tuple:
        return _indexed(node, path, name)
    if kind is Set:
        return _indexed(node.items, path, name)
    if kind is Call:
        return _call_children(node, path, name, separator)
    return None


def _dict_children(items: list[Any], path: tuple[Key, ...], name: str, separator: str = "/") -> list[_Child]:
    lead = f"{name}{separator}" if name else ""
    out: list[_Child] = []
    for index in range(0, len(items) - 1, 2):
        key = _short_key(items[index])
        out.append((items[index + 1], (*path, key), f"{lead}{key}", None))
    return out


def _indexed(values: list[Any] | tuple[Any, ...], path: tuple[Key, ...], name: str) -> list[_Child]:
    lead = f"{name}/" if name else ""
    return [(child, (*path, i), f"{lead}{i}", None) for i, child in enumerate(values)]


def _call_children(node: Call, path: tuple[Key, ...], name: str, separator: str) -> list[_Child] | None:
    called = _called(node)
    if called in _PLAIN_CALLS:
        return None
    if called == "collections.OrderedDict" and node.args:
        return _dict_children([*(_items(node) or []), *(node.items or [])], path, name)
    out: list[_Child] = []
    if type(node.args) is tuple and node.args and called not in _RECONSTRUCTORS:
        out += [child for child in _indexed(node.args, path, name) if _holds(child[0])]
    state = node.states[-1] if node.states else None
    if type(state) is tuple and len(state) == 2 and type(state[0]) is Dict and type(state[1]) is Dict:
        state = Dict([*state[0].items, *state[1].items])  # attributes, and those in slots
    if type(state) is Dict and called not in _METADATA_STATE:
        module = module_parts(state)
        out += _module_children(state, module, path, name) if module else _dict_children(state.items, path, name, separator)
    elif state is not None and called not in _METADATA_STATE:
        out += _dict_children(["state", state], path, name)
    if node.items:
        out += _dict_children(node.items, path, name)
    if node.appended:
        out += _indexed(node.appended, path, name)
    return out


def _holds(argument: object) -> bool:
    """Constructor arguments worth a look: containers and objects, which may hold tensors; not classes and constants."""
    return type(argument) in (Call, Dict, list, tuple, Set, Persistent)


# Calls whose result is a value, shown as a leaf.
_PLAIN_CALLS = frozenset(
    {
        "torch.device",
        "torch.Size",
        "torch.serialization._get_layout",
        "_codecs.encode",
        "torch.torch_version.TorchVersion",
        "builtins.complex",
        "__builtin__.complex",
        "builtins.bytearray",
        "__builtin__.bytearray",
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "datetime.datetime",
        "datetime.date",
        "datetime.timedelta",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "uuid.UUID",
    }
)
_RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
_METADATA_STATE = frozenset({"collections.OrderedDict"})  # its state is state_dict()'s _metadata

_MODULE_KEYS = ("_parameters", "_buffers", "_modules")


def module_parts(state: Dict) -> tuple[list[Any], list[Any], list[Any]] | None:
    """The items of ``_parameters``, ``_buffers`` and ``_modules`` if the state is that of an ``nn.Module``."""
    found = [_items(state.get(key)) for key in _MODULE_KEYS]
    if any(items is None for items in found):
        return None
    return found[0], found[1], found[2]  # type: ignore[return-value]


def _items(node: object) -> list[Any] | None:
    """Keys and values in turn of a dictionary or an ordered one."""
    if type(node) is Dict:
        return node.items
    if type(node) is Call and _called(node) == "collections.OrderedDict":
        if node.items is None and type(node.args) is tuple and node.args and type(node.args[0]) is list:
            pairs = [pair for pair in node.args[0] if type(pair) in (list, tuple) and len(pair) == 2]
            return [part for pair in pairs for part in pair]  # how Python 2 writes it
        return node.items or []
    return None


def _module_children(
    state: Dict, parts: tuple[list[Any], list[Any], list[Any]], path: tuple[Key, ...], name: str
) -> list[_Child]:
    """A module's children under the names its ``state_dict()`` would give: joined by dots, values that are ``None`` left out."""
    hidden = state.get("_non_persistent_buffers_set")
    unsaved = set(filter(lambda m: type(m) is str, hidden.items)) if type(hidden) is Set else _set_call(hidden)
    # The name so far ends in the module's own: "model" + "/" for a module in a dictionary, "fc" + "." for one in a module.
    joiner = "." if path[-2:-1] == ("_modules",) else "/"
    lead = f"{name}{joiner}" if name else ""
    out: list[_Child] = []
    for where, items in zip(_MODULE_KEYS, parts, strict=True):
        for index in range(0, len(items) - 1, 2):
            key, child = items[index], items[index + 1]
            if child is None:
                continue
            listed = not (where == "_buffers" and key in unsaved)
            label = f"{lead}{_short_key(key)}" if listed else f"{lead}{where}/{_short_key(key)}"
            out.append((child, (*path, where, _short_key(key)), label, None))
    rest = [part for i in range(0, len(state.items) - 1, 2) if state.items[i] not in _MODULE_KEYS for part in state.items[i : i + 2]]
    return out + [child for child in _dict_children(rest, path, name) if _holds(child[0])]


def _set_call(node: object) -> set[str]:
    """``builtins.set([...])``, which is how protocol 2 writes a set."""
    if type(node) is Call and type(node.args) is tuple and node.args and type(node.args[0]) is list:
        return {member for member in node.args[0] if type(member) is str}
    return set()


def _short_key(key: object) -> Key:
    if type(key) is str or (type(key) is int and key.bit_length() < 64):
        return key
    return _short(key)


# -- values as text ----------------------------------------------------------------------------------------------------

_MAX_TEXT = 200


def _leaf_kind(node: object) -> str:
    if type(node) is Call:
        return _called(node) or "call"
    if type(node) is Global:
        return "global"
    return type(node).__name__ if node is not None else "None"


def _short(node: object) -> str:
    """A value in at most a few hundred characters, never deeper than one call and its plain arguments."""
    if type(node) is str:
        return node if len(node) <= _MAX_TEXT else f"{node[:_MAX_TEXT]}… ({len(node)} characters)"
    if type(node) is Global:
        return node.full_name[:_MAX_TEXT]
    if type(node) is Call:
        if _called(node) == "torch.device":
            return _device(node)
        args = node.args if type(node.args) is tuple else ()
        inner = ", ".join(_scalar(a) for a in args[:4])
        return f"{_called(node) or 'call'}({inner})"[:_MAX_TEXT]
    if type(node) is tuple or type(node) is list:
        inner = ", ".join(_scalar(a) for a in node[:8]) + (", …" if len(node) > 8 else "")
        return f"({inner})" if type(node) is tuple else f"[{inner}]"
    return _scalar(node)


def _scalar(node: object) -> str:
    if type(node) is str:
        return repr(node[:40])
    if type(node) is bytes or type(node) is bytearray:
        return f"{len(node)} bytes"
    if type(node) is int and node.bit_length() > 128 or type(node) is Big:
        return "a huge integer"
    if node is None or type(node) in (bool, int, float):
        return repr(node)
    if type(node) is Global:
        return node.full_name[:80]
    return f"<{type(node).__name__.lower()}>"
