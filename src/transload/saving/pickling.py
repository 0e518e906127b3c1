"""An object as the pickle that ``torch.save`` makes of it, and the storages it refers to.

For tensors on the CPU the pickle is the same to the byte. Plain tensors are reduced here, in a fifth of the time that
torch takes; all others by torch itself, and the result is only searched for what does not travel: a device, and a view
of a storage that is much larger. ``pickled`` is the front; ``_Reducer`` collects the storages and reduces tensors.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from math import prod
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

from transload.checkpoint import contiguous
from transload.errors import CannotPickleError, SaveError

__all__ = ["Stored", "merged", "pickled"]


class Run(NamedTuple):
    """Bytes of a storage, from ``start`` up to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Their number."""
        return self.end - self.start


class Geometry(NamedTuple):
    """The elements of its storage that a tensor shows; ``itemsize`` is the size of each in bytes."""

    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def run(self) -> Run:
        """From its first byte to its last; empty for a tensor without elements.

        >>> Geometry(4, 10, (2, 3), (100, 2)).run
        Run(start=40, end=460)
        """
        if 0 in self.size:
            return Run(0, 0)
        last = self.offset + sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return Run(self.offset * self.itemsize, (last + 1) * self.itemsize)

    @property
    def nbytes(self) -> int:
        """Its size without gaps, each element counted as often as it occurs."""
        return prod(self.size) * self.itemsize

    @property
    def is_sparse(self) -> bool:
        """Whether it leaves out at least half of the bytes between its first and its last."""
        return 2 * self.nbytes <= self.run.nbytes


def merged(runs: Iterable[Run], step: int = 1) -> list[Run]:
    """Runs with those that overlap or touch joined; each begins at a multiple of ``step``.

    Runs that do not overlap share no memory, so they can be written separately.

    >>> merged([Run(80, 100), Run(0, 10), Run(90, 120), Run(10, 12)])
    [Run(start=0, end=12), Run(start=80, end=120)]
    """
    out: list[Run] = []
    for start, end in sorted(runs):
        if end == start:
            continue
        first = start - start % step
        if out and first <= out[-1].end:
            out[-1] = Run(out[-1].start, max(end, out[-1].end))
        else:
            out.append(Run(first, end))
    return out


class _Ref:
    """A storage in what is pickled: its key, its class, and its number of elements of that class."""

    __slots__ = ("key", "kind", "numel", "storage")

    def __init__(self, key: str, kind: Any, numel: int, storage: Any) -> None:
        self.key = key
        self.kind = kind
        self.numel = numel
        self.storage = storage


class Stored(_Ref):
    """One record of the archive: bytes of a storage, all of them unless views were cut out of it.

    ``whole`` is whether a tensor uses all of them; if not, ``views`` are the tensors that use some.
    """

    __slots__ = ("nbytes", "start", "views", "whole")

    def __init__(self, key: str, kind: Any, itemsize: int, storage: Any, start: int, nbytes: int) -> None:
        self.key = key
        self.kind = kind
        self.numel = nbytes // itemsize
        self.storage = storage
        self.start = start
        self.nbytes = nbytes
        self.whole = True
        self.views: list[Geometry] | None = None


class _NoHooks:
    """Is pickled as the empty ``OrderedDict`` in which old releases of torch kept the hooks of a tensor."""

    __slots__ = ()
    reduced = OrderedDict, ()


# -- the front


def pickled(
    obj: Any, pickle_module: Any, protocol: int, *, portable: bool, compact: bool
) -> tuple[bytes, list[Stored]]:
    """The pickle of an object, and the storages it refers to, in the order of their keys.

    ``portable`` tags every storage ``cpu``; ``compact`` cuts views out of their storages.
    """
    reducer = _Reducer(protocol, None, portable=portable, exact=compact)
    data = _dump(obj, reducer, pickle_module)
    if compact:
        cuts = _Cuts(reducer.storages)
        reducer = _Reducer(protocol, cuts, portable=portable)
        data = _dump(obj, reducer, pickle_module)
    return data, reducer.storages


def _dump(obj: Any, reducer: _Reducer, pickle_module: Any) -> bytes:
    """The pickle; the error names the part that cannot be pickled."""
    try:
        return _stream(obj, reducer, pickle_module)
    except SaveError:
        raise
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:

        def attempt(part: Any) -> None:
            _stream(part, _Reducer(reducer.protocol, None, portable=True), pickle_module)

        place, fix = _culprit(obj, attempt, error)
        raise CannotPickleError(f"{place} cannot be pickled: {error}", fix=fix) from error


def _stream(obj: Any, reducer: _Reducer, pickle_module: Any) -> bytes:
    out = io.BytesIO()
    quick = pickle_module is None or pickle_module is pickle
    pickler = (_Pickler if quick else _any_pickler(pickle_module))(out, protocol=reducer.protocol)
    # On the pickler and not on its class: every class is part of a reference cycle, so what a class refers to, here the
    # storages, lives until the garbage collector runs.
    pickler.transload = reducer, _plain_reducer(reducer)
    if quick:
        pickler.dispatch_table = _Table(reducer)
    pickler.dump(obj)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """The pickler of the standard library, with a table of how to reduce tensors."""

    __slots__ = ("transload",)
    transload: tuple[_Reducer, Callable[[Any], Any]]

    def persistent_id(self, obj: Any) -> Any:
        reducer = self.transload[0]
        return reducer.persistent_id(obj) if type(obj) in reducer.storage_classes else None


class _Table(dict[type, Callable[[Any], Any]]):
    """How each class is reduced: as the program has registered it, as here, or as the class itself says."""

    def __init__(self, reducer: _Reducer) -> None:
        self._tensor = _torch_names().tensor
        super().__init__({self._tensor: _plain_reducer(reducer), **copyreg.dispatch_table})
        self[_NoHooks] = attrgetter("reduced")
        self._slow = reducer.reduce
        self._itself = methodcaller("__reduce_ex__", reducer.protocol)

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):  # a class with a metaclass is pickled by name
            raise KeyError(kind)
        self[kind] = self._slow if issubclass(kind, self._tensor) else self._itself
        return self[kind]


def _any_pickler(pickle_module: Any) -> Any:
    """The pickler of another module, which may treat everything but tensors in its own way."""
    base: Any = pickle_module.Pickler
    inherited = getattr(base, "reducer_override", None)
    tensor = _torch_names().tensor

    class Pickler(base):  # type: ignore[misc]
        __slots__ = ("transload",)

        def persistent_id(self, obj: Any) -> Any:
            reducer = self.transload[0]
            return reducer.persistent_id(obj) if type(obj) in reducer.storage_classes else None

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is _NoHooks:
                return _NoHooks.reduced
            reducer, plain = self.transload
            reduced = plain(obj) if kind is tensor else reducer.reduce(obj)
            return inherited(self, obj) if reduced is NotImplemented and inherited else reduced

    return Pickler


# -- tensors and storages


class _TorchNames(NamedTuple):
    """Parts of torch that are needed for each tensor."""

    kinds: dict[Any, tuple[Any, int]]  # dtype → the storage class that files name, bytes of an element
    tensor: Any
    parameter: Any
    strided: Any
    typed: Any
    untyped: Any
    parts: frozenset[Any]  # functions whose arguments begin with storage, offset, size, stride
    utils: Any
    cpu: Any


_CLASSES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
"""Complex tensors may be conjugated, so torch reduces them."""


@cache
def _torch_names() -> _TorchNames:
    import torch

    dtypes = {getattr(torch, name): getattr(torch, f"{word}Storage") for name, word in _CLASSES.items()}
    kinds = {dtype: (kind, torch.empty(0, dtype=dtype).element_size()) for dtype, kind in dtypes.items()}
    utils: Any = torch._utils  # noqa: SLF001 - the functions that files name
    names = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
    parts = frozenset(getattr(utils, name) for name in names if hasattr(utils, name))
    storages = torch.storage.TypedStorage, torch.storage.UntypedStorage
    return _TorchNames(
        kinds, torch.Tensor, torch.nn.Parameter, torch.strided, *storages, parts, utils, torch.device("cpu")
    )


class _Reducer:
    """Reduces the tensors of one object, and collects their storages.

    Nothing it refers to may refer to it: storages must be freed with the last reference, not by the garbage collector.
    """

    def __init__(self, protocol: int, cuts: _Cuts | None, *, portable: bool, exact: bool = False) -> None:
        self.storages: list[Stored] = []
        self.by_data: dict[Any, Stored] = {}
        self.dtypes: dict[int, Any] = {}
        self.cuts = cuts
        self.exact = exact  # whether each use of a storage is noted, since views are to be cut out of it
        self.protocol = protocol
        self.portable = portable
        self._torch = t = _torch_names()
        self.storage_classes: set[type] = {_Ref, Stored}
        todo = [t.typed, t.untyped]
        while todo:
            kind = todo.pop()
            self.storage_classes.add(kind)
            todo += kind.__subclasses__()

    def persistent_id(self, obj: Any) -> tuple[Any, ...]:
        """What the pickle has in place of a storage."""
        import torch

        ref = obj if isinstance(obj, _Ref) else self._use_of_torch(obj, None)[0]
        tag = "cpu" if self.portable else torch.serialization.location_tag(ref.storage)
        return ("storage", ref.kind, ref.key, tag, ref.numel)

    def _use_of_torch(self, obj: Any, geometry: Geometry | None) -> tuple[_Ref, int, tuple[int, ...]]:
        """As ``use``, for a storage as torch reduces a tensor to it."""
        import torch

        if obj.device.type == "meta":
            what = "a storage on the meta device has no bytes to save"
            raise CannotPickleError(what, fix="Save the tensor instead of its storage.")
        if isinstance(obj, self._torch.typed):
            kind = getattr(torch, obj._pickle_storage_type())  # noqa: SLF001 - as torch.save asks
            return self.use(obj._untyped_storage, obj.dtype, kind, obj.element_size(), geometry)  # noqa: SLF001 - as above
        return self.use(obj, torch.uint8, self._torch.untyped, 1, geometry)

    def use(
        self, storage: Any, dtype: Any, kind: Any, itemsize: int, geometry: Geometry | None
    ) -> tuple[_Ref, int, tuple[int, ...]]:
        """The reference to a storage; and the offset and stride of the tensor in what is written of it."""
        piece = self.cuts.piece(storage, geometry) if self.cuts else None
        if piece is None:
            offset, stride = (geometry.offset, geometry.stride) if geometry else (0, ())
            data = storage._cdata  # noqa: SLF001 - torch's identity of a storage
            stored = self.by_data.get(data) or self._add(data, Stored("", kind, itemsize, storage, 0, storage.nbytes()))
            if not stored.whole and stored.views is not None:
                if geometry is None or (geometry.nbytes == stored.nbytes == geometry.run.nbytes):
                    stored.whole = True
                else:
                    stored.views.append(geometry)
        else:
            name, part, start, nbytes, offset, stride = piece
            stored = self.by_data.get(name) or self._add(name, Stored("", kind, itemsize, part, start, nbytes))
        if stored.nbytes:
            self.check(stored.storage.data_ptr(), dtype)
        if stored.kind is kind:
            return stored, offset, stride
        return _Ref(stored.key, kind, stored.nbytes // itemsize, stored.storage), offset, stride

    def _add(self, name: Any, stored: Stored) -> Stored:
        stored.key = str(len(self.storages))
        stored.whole, stored.views = False, []
        self.by_data[name] = stored
        self.storages.append(stored)
        return stored

    def check(self, address: int, dtype: Any) -> None:
        """Refuse memory that is missing, or is used with two dtypes: a file has one for each storage."""
        if not address:
            raise SaveError("a storage says it has bytes, and has no memory", fix="Save a clone() of its tensor.")
        if self.dtypes.setdefault(address, dtype) != dtype:
            what = f"one storage is used as {self.dtypes[address]} and as {dtype}, which a file cannot hold"
            raise SaveError(what, fix="Save a clone() of one of the two tensors.")

    def reduce(self, obj: Any) -> Any:
        """How pickle must reduce an object that is not a plain tensor; ``NotImplemented``: as it does by itself."""
        kind = type(obj)
        t = self._torch
        if kind in copyreg.dispatch_table:
            return NotImplemented
        if kind is t.parameter and not obj.__dict__:
            return t.utils._rebuild_parameter, (obj.data, obj.requires_grad, _NoHooks())  # noqa: SLF001 - in files
        if isinstance(obj, t.tensor):
            return self._adapted(obj.__reduce_ex__(self.protocol))
        return NotImplemented

    def _adapted(self, reduced: Any) -> Any:
        """A tensor as torch reduced it, with devices and large storages replaced."""
        if not isinstance(reduced, tuple) or len(reduced) < 2 or not isinstance(reduced[1], tuple):
            return reduced
        function, arguments, *rest = reduced
        t = self._torch
        if function in t.parts:
            storage, offset, size, stride, *more = arguments
            itemsize = storage.element_size() if isinstance(storage, t.typed) else _itemsize(more)
            geometry = Geometry(itemsize, offset, tuple(size), tuple(stride))
            ref, offset, stride = self._use_of_torch(storage, geometry)
            return function, (ref, offset, size, stride, *more), *rest
        name = getattr(function, "__name__", "")
        if name == "_rebuild_from_type_v2" and len(arguments) == 4:
            inner, kind, inside, state = arguments
            inner, inside = self._adapted((inner, inside))
            return function, (inner, kind, inside, state), *rest
        if self.portable and name == "_rebuild_wrapper_subclass":
            cpu, device = t.cpu, type(t.cpu)
            moved = (cpu if isinstance(each, device) and each.type != "meta" else each for each in arguments)
            return function, tuple(moved), *rest
        if self.portable and name in _FROM_OTHER_DEVICES and len(arguments) == 4:
            return self._adapted(_FROM_OTHER_DEVICES[name](*arguments).__reduce_ex__(self.protocol))
        return reduced


def _itemsize(rest: list[Any]) -> int:
    """The size of the dtype that is among the arguments of a tensor whose storage has none."""
    import torch

    return next((torch.empty(0, dtype=each).element_size() for each in rest if isinstance(each, torch.dtype)), 1)


def _from_cpu(tensor: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:  # noqa: ARG001 - as the file has them
    return tensor.detach().to(dtype).requires_grad_(requires_grad)


def _from_numpy(array: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:
    import torch

    return _from_cpu(torch.from_numpy(array), dtype, device, requires_grad)


_FROM_OTHER_DEVICES = {
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_device_tensor_from_numpy": _from_numpy,
    "_rebuild_xla_tensor": _from_numpy,
}
"""Functions of tensors on devices without storages; their arguments name the device, which may not exist elsewhere."""


def _plain_reducer(reducer: _Reducer) -> Callable[[Any], Any]:
    """A function that reduces a tensor, without torch's help if it is nothing but numbers in memory.

    It runs for each tensor: saving 10,000 small ones takes three times as long without it.
    """
    kinds, tensor_class, _, strided, *_ = t = _torch_names()
    rebuild = t.utils._rebuild_tensor_v2  # noqa: SLF001 - the function that files name
    by_data, dtypes, storages = reducer.by_data, reducer.dtypes, reducer.storages
    cuts, exact, overridden = reducer.cuts, reducer.exact, tensor_class in copyreg.dispatch_table
    slow = reducer.reduce

    def plain(tensor: Any) -> Any:
        dtype, requires_grad = tensor.dtype, tensor.requires_grad
        if (
            dtype not in kinds
            or tensor.layout is not strided
            or tensor.__dict__
            or (requires_grad and tensor._backward_hooks is not None)  # noqa: SLF001 - torch warns of them
            or tensor.is_nested
            or tensor.is_neg()
            or not (tensor.is_cpu or tensor.is_cuda)
            or overridden
        ):
            return slow(tensor)
        kind, itemsize = kinds[dtype]
        storage = tensor.untyped_storage()
        data, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001 - torch's identity of a storage
        size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        ref: _Ref
        if (
            data not in by_data
            and tensor.nbytes == nbytes
            and cuts is None
            and not (exact and not tensor.is_contiguous())
        ):
            address = storage.data_ptr()
            if (not address or dtypes.setdefault(address, dtype) is not dtype) and nbytes:
                reducer.check(address, dtype)
            ref = by_data[data] = Stored(str(len(storages)), kind, itemsize, storage, 0, nbytes)
            storages.append(ref)
        else:
            geometry = Geometry(itemsize, offset, size, stride)
            ref, offset, stride = reducer.use(storage, dtype, kind, itemsize, geometry)
        return rebuild, (ref, offset, size, stride, requires_grad, _NoHooks())

    return plain


# -- views without the rest of their storage


class _Cuts:
    """For each storage the runs of bytes that its tensors use. It keeps the storages alive, so their ids stay unique.

    A run that is used by a single view, and mostly consists of what the view leaves out, is not written as it is: the
    elements of the view are, one after the other.
    """

    def __init__(self, storages: Iterable[Stored]) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._dense: dict[tuple[int, Geometry], Any] = {}
        self._storages: list[Any] = []
        for stored in storages:
            storage, views = stored.storage, stored.views or []
            if stored.whole or any(each.run.end > storage.nbytes() for each in views):
                continue  # all of it is used, or it was made smaller under its tensors
            self._storages.append(storage)
            data = storage._cdata  # noqa: SLF001 - torch's identity of a storage
            step = max((each.itemsize for each in views), default=1)
            runs = merged((each.run for each in views), step)
            distinct = set(views)
            for run in list(runs):
                inside = [each for each in distinct if each.run.nbytes and run.start <= each.run.start < run.end]
                if len(inside) == 1 and inside[0].is_sparse:
                    self._dense[data, inside[0]] = _dense(storage, inside[0])
                    runs.remove(run)
            self._runs[data] = runs

    def piece(
        self, storage: Any, geometry: Geometry | None
    ) -> tuple[tuple[int, int], Any, int, int, int, tuple[int, ...]] | None:
        """What to write for a tensor instead of its storage, and the tensor's offset and stride in it.

        The first four are a name, a storage, where the bytes begin in it, and how many they are. ``None``: all of it.
        """
        data = storage._cdata  # noqa: SLF001 - as above
        runs = self._runs.get(data)
        if runs is None or geometry is None:
            return None
        dense = self._dense.get((data, geometry))
        if dense is not None:
            return ((data, ~geometry.offset), dense, 0, dense.nbytes(), 0, contiguous(geometry.size))
        used = geometry.run
        if not used.nbytes:
            return ((data, -1 << 62), storage, 0, 0, 0, geometry.stride)
        for run in runs:
            if run.start <= used.start and used.end <= run.end:
                offset = geometry.offset - run.start // geometry.itemsize
                return ((data, run.start), storage, run.start, run.nbytes, offset, geometry.stride)
        return None


_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _dense(storage: Any, geometry: Geometry) -> Any:
    """A storage with the elements of a view, in order."""
    import torch

    with torch.no_grad():
        dtype = getattr(torch, _WORDS[geometry.itemsize])
        view = torch.empty(0, dtype=dtype, device=storage.device)
        view.set_(storage, geometry.offset, geometry.size, geometry.stride)
        return view.clone(memory_format=torch.contiguous_format).untyped_storage()


# -- the part of an object that cannot be pickled

_DEPTH = 12
_BREADTH = 10_000  # parts tried on a level: reporting an error should not take as long as the save would have


def _culprit(obj: Any, attempt: Callable[[Any], object], error: Exception) -> tuple[str, str]:
    """The place of the innermost part that fails by itself, for the same reason; and what to do about it."""
    place, kind = "obj", type(error)

    def fails(part: Any) -> bool:
        if isinstance(part, (str, bytes, int, float, bool, type(None))):
            return False
        try:
            attempt(part)
        except Exception as again:  # noqa: BLE001 - any may come, and it may not be the one searched for
            return isinstance(again, kind)
        return False

    for _ in range(_DEPTH):
        inner = next(((name, part) for name, part in islice(_parts(obj), _BREADTH) if fails(part)), None)
        if inner is None:
            break
        place, obj = place + inner[0], inner[1]
    return f"{place} (a {type(obj).__module__}.{type(obj).__qualname__})", _fix(place, obj, kind)


def _fix(place: str, obj: Any, kind: type[Exception]) -> str:
    import torch

    if issubclass(kind, RecursionError):
        return "It is nested too deep for pickle: make it flatter, or allow more by sys.setrecursionlimit()."
    if isinstance(obj, torch.Tensor):
        return "Save a plain tensor with the same numbers: to_dense() makes one of most kinds."
    hint = "Save a state_dict instead of the object that has it" if place.count(".") else "Leave it out"
    if isinstance(obj, torch.nn.Module):
        return f"{hint if place.count('.') else 'Save its state_dict() instead'}."
    return f"{hint}, or give it a name at the top of a module: pickle refers to code by name."


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.80}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(obj, type) and not callable(getattr(obj, "__code__", None)):
        yield from ((f".{name}", value) for name, value in attributes.items())
