"""An object as the pickle that ``torch.save`` makes of it, and the storages it refers to.

For tensors on the CPU the pickle is identical to the byte. Plain tensors are reduced here, in a fifth of the time that
torch takes. torch reduces all others, and devices and views of larger storages are replaced in the result. ``pickled``
is the entry point; ``_Reducer`` collects the storages and reduces tensors.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any

from transload.dtypes import ITEMSIZE, STORAGE_CLASSES
from transload.errors import CannotPickleError, SaveError
from transload.frozen import NamedTuple
from transload.geometry import View, contiguous


class Geometry(NamedTuple):
    """The elements of a storage that a tensor uses; ``itemsize`` is the size of each in bytes."""

    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def byte_range(self) -> tuple[int, int]:
        """Its first byte and the end of its last; (0, 0) for a tensor without elements.

        >>> Geometry(4, 10, (2, 3), (100, 2)).byte_range
        (40, 460)
        """
        extent = View(self.size, self.stride).extent
        return (self.offset * self.itemsize, (self.offset + extent) * self.itemsize) if extent else (0, 0)

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements, without gaps; of an expanded tensor, each element as often as it occurs."""
        return prod(self.size) * self.itemsize

    @property
    def is_sparse(self) -> bool:
        """Whether at least half of the bytes between its first and its last are gaps."""
        start, end = self.byte_range
        return 2 * self.nbytes <= end - start


def merged_ranges(views: Iterable[Geometry], step: int = 1) -> list[tuple[int, int]]:
    """The byte ranges that views use, each beginning at a multiple of ``step``.

    They do not overlap, so they can be written separately.

    >>> merged_ranges([Geometry(1, 80, (20,), (1,)), Geometry(1, 0, (10,), (1,)), Geometry(1, 90, (30,), (1,))])
    [(0, 10), (80, 120)]
    """
    out: list[tuple[int, int]] = []
    for start, end in sorted(view.byte_range for view in views):
        if end == start:
            continue
        first = start - start % step
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((first, end))
    return out


@dataclass(slots=True, eq=False)
class _Ref:
    """A reference to a storage in the pickle: its key, its class, and its number of elements of that class."""

    key: str
    kind: Any
    numel: int
    storage: Any


@dataclass(slots=True, eq=False)
class Stored(_Ref):
    """One record of the archive: the bytes of a storage, or with ``compact`` of the part that tensors use.

    ``whole`` is whether a tensor uses all of the storage; if not, ``views`` are the tensors that use parts.
    """

    start: int
    nbytes: int
    whole: bool = True
    views: list[Geometry] = field(default_factory=list)

    @property
    def record(self) -> bytes:
        """The name of the record."""
        return b"data/" + self.key.encode()


# -- the entry point


def pickled(
    obj: Any, pickle_module: Any, protocol: int, *, portable: bool, compact: bool, legacy: bool = False
) -> tuple[bytes, list[Stored]]:
    """The pickle of an object, and the storages it refers to, in the order of their keys.

    ``portable`` tags every storage ``cpu``; ``compact`` leaves out bytes that no tensor uses; ``legacy`` refers to
    storages and module classes as torch did before 1.6. The error names the part that cannot be pickled.
    """
    try:
        reducer = _Reducer(protocol, None, portable=portable, exact=compact, legacy=legacy)
        data = _dump(obj, reducer, pickle_module)
        if compact:
            reducer = _Reducer(protocol, _Cuts(reducer.storages), portable=portable, legacy=legacy)
            data = _dump(obj, reducer, pickle_module)
    except SaveError:
        raise
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        place, fix = _culprit(obj, protocol, pickle_module, type(error))
        raise CannotPickleError(f"{place} cannot be pickled: {error}", fix=fix) from error
    return data, reducer.storages


def _dump(obj: Any, reducer: _Reducer, pickle_module: Any) -> bytes:
    """Pickle an object with a module's ``Pickler``, which handles everything but tensors."""
    base: Any = (pickle_module or pickle).Pickler
    inherited = getattr(base, "reducer_override", None)
    with_id = reducer.with_id  # not looked up on the reducer: persistent_id is called for each part of each tensor

    class Pickler(base):  # type: ignore[misc]
        __slots__ = ("transload",)

        def persistent_id(self, obj: Any) -> Any:
            return self.transload.persistent_id(obj) if type(obj) in with_id else None

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = self.transload.reduce(obj)
        return inherited(self, obj) if reduced is NotImplemented and inherited else reduced

    out = io.BytesIO()
    pickler = Pickler(out, protocol=reducer.protocol)
    # On the pickler, not on its class: a class is always part of a reference cycle, so the storages it refers to would
    # live until the garbage collector runs.
    pickler.transload = reducer
    if base is pickle.Pickler:
        pickler.dispatch_table = _Table(reducer)
    else:
        Pickler.reducer_override = reducer_override
    pickler.dump(obj)
    return out.getvalue()


class _Table(dict[type, Callable[[Any], Any]]):
    """The dispatch table of the standard library's pickler, which is faster than ``reducer_override``."""

    def __init__(self, reducer: _Reducer) -> None:
        super().__init__({reducer.tensor: reducer.plain, **copyreg.dispatch_table})
        self[_NoHooks] = attrgetter("reduced")
        self._tensor, self._reduce = reducer.tensor, reducer.reduce
        self._itself = methodcaller("__reduce_ex__", reducer.protocol)

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):  # a class with a metaclass is pickled by name
            raise KeyError(kind)
        self[kind] = self._reduce if issubclass(kind, self._tensor) else self._itself
        return self[kind]


class _NoHooks:
    """Pickles as the empty ``OrderedDict`` of hooks that torch writes for a tensor."""

    __slots__ = ()
    reduced = OrderedDict, ()


# -- tensors and storages

_WITH_STORAGE = frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"})
"""Functions whose arguments begin with storage, offset, size, stride."""

_FROM_OTHER_DEVICES = frozenset(
    {"_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor"}
)
"""Functions for tensors on devices without storages. An argument names the device, which may not exist elsewhere."""


class _Reducer:
    """Reduces the tensors of one object, and collects their storages.

    Nothing it refers to may refer to it: storages must be freed by reference counting, not by the garbage collector.
    """

    def __init__(
        self, protocol: int, cuts: _Cuts | None, *, portable: bool, exact: bool = False, legacy: bool = False
    ) -> None:
        import torch

        self.storages: list[Stored] = []
        self._by_data: dict[Any, Stored] = {}
        self._dtypes: dict[int, Any] = {}
        self._cuts = cuts
        self._exact = exact  # whether to record each use of a storage, for ``compact``
        self.protocol = protocol
        self._portable = portable
        self.legacy = legacy
        self._classes: set[type] = set()  # module classes whose id was written (legacy form)
        self._torch: Any = torch
        self.tensor, self._strided = torch.Tensor, torch.strided
        # For each dtype of plain tensors: the storage class in files, and the bytes of an element.
        self._kinds = {
            getattr(torch, dtype): (getattr(torch, name), ITEMSIZE[dtype])
            for dtype, name in STORAGE_CLASSES.items()
            if not dtype.startswith(("complex", "q"))  # complex tensors may be conjugated, so torch reduces them
        }
        self._rebuild: Any = torch._utils._rebuild_tensor_v2  # the function that files name
        # The classes of objects that may have a persistent id: storages, in the legacy form also classes.
        self.with_id: set[type] = {_Ref, Stored}
        kinds = [torch.storage.TypedStorage, torch.storage.UntypedStorage, *([type] if legacy else [])]
        for kind in kinds:  # grows by their subclasses
            self.with_id.add(kind)
            kinds += type.__subclasses__(kind)

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """The persistent id of a storage, or of a module class at its first use."""
        if not isinstance(obj, _Ref):
            if isinstance(obj, type):  # in the legacy form
                if not issubclass(obj, self._torch.nn.Module) or obj in self._classes:
                    return None
                self._classes.add(obj)
                # torch.load compares the source with that of the class it finds, and warns if it has changed. The file
                # name is written without its folders, which are private.
                try:
                    file, source = (inspect.getsourcefile(obj) or "").rpartition(os.sep)[2], inspect.getsource(obj)
                except (OSError, TypeError):  # its source is not available; torch accepts that, too
                    return ("module", obj, None, None)
                return ("module", obj, file, source)
            obj = self._use_of_torch(obj, None)[0]
        tag = "cpu" if self._portable else self._torch.serialization.location_tag(obj.storage)
        stored = ("storage", obj.kind, obj.key, tag, obj.numel)
        return (*stored, None) if self.legacy else stored  # None: it is not a part of another storage

    def _use_of_torch(self, obj: Any, geometry: Geometry | None) -> tuple[_Ref, int, tuple[int, ...]]:
        """As ``_use``, for a storage object from torch's reduction of a tensor."""
        torch = self._torch
        typed = isinstance(obj, torch.storage.TypedStorage)
        storage = obj._untyped_storage if typed else obj  # the public way warns
        if storage.device.type == "meta":
            what = "a storage on the meta device has no bytes to save"
            raise CannotPickleError(what, fix="Save the tensor instead of its storage.")
        if typed:
            kind = getattr(torch, obj._pickle_storage_type())  # as torch.save asks
            return self._use(storage, obj.dtype, kind, obj._element_size(), geometry)
        return self._use(storage, torch.uint8, torch.storage.UntypedStorage, 1, geometry)

    def _use(
        self, storage: Any, dtype: Any, kind: Any, itemsize: int, geometry: Geometry | None
    ) -> tuple[_Ref, int, tuple[int, ...]]:
        """The reference to a storage, and the offset and stride of the tensor in its record."""
        name = storage._cdata  # torch's identity of a storage
        start, nbytes = 0, storage.nbytes()
        offset, stride = (geometry.offset, geometry.stride) if geometry else (0, ())
        piece = self._cuts.piece(storage, geometry) if self._cuts else None
        if piece is not None:
            name, storage, start, nbytes, offset, stride = piece
        stored = self._by_data.get(name)
        if stored is None:
            stored = Stored(str(len(self.storages)), kind, nbytes // itemsize, storage, start, nbytes, whole=False)
            self._by_data[name] = stored
            self.storages.append(stored)
        if not stored.whole and piece is None:
            if geometry is None or (geometry.nbytes == nbytes and geometry.byte_range == (0, nbytes)):
                stored.whole = True
            else:
                stored.views.append(geometry)
        if stored.nbytes:
            self._check(stored.storage.data_ptr(), dtype)
        if stored.kind is kind:
            return stored, offset, stride
        return _Ref(stored.key, kind, stored.nbytes // itemsize, stored.storage), offset, stride

    def _check(self, address: int, dtype: Any) -> None:
        """Refuse a storage without memory, or one used with two dtypes: a file has one dtype for each."""
        if not address:
            raise SaveError("a storage claims to have bytes, but has no memory", fix="Save a clone() of its tensor.")
        if self._dtypes.setdefault(address, dtype) != dtype:
            what = f"one storage is used as {self._dtypes[address]} and as {dtype}, which a file cannot hold"
            raise SaveError(what, fix="Save a clone() of one of the two tensors.")

    def reduce(self, obj: Any) -> Any:
        """The reduction of an object; ``NotImplemented`` leaves it to pickle."""
        kind = type(obj)
        if kind in copyreg.dispatch_table:  # the program has registered a function for it
            return NotImplemented
        if kind is self.tensor:
            return self.plain(obj)
        if kind is _NoHooks:
            return _NoHooks.reduced
        if kind is self._torch.nn.Parameter and not obj.__dict__:
            return self._torch._utils._rebuild_parameter, (obj.data, obj.requires_grad, _NoHooks())
        if issubclass(kind, self.tensor):
            return self._adapted(obj.__reduce_ex__(self.protocol))
        return NotImplemented

    def plain(self, tensor: Any) -> Any:
        """Reduce a tensor; without torch if it is nothing but numbers in memory.

        It runs for each tensor: saving 10,000 small ones would take three times as long without it.
        """
        dtype, requires_grad = tensor.dtype, tensor.requires_grad
        if (
            dtype not in self._kinds
            or tensor.layout is not self._strided
            or tensor.__dict__
            or (requires_grad and tensor._backward_hooks is not None)  # torch warns of them
            or tensor.is_nested
            or tensor.is_neg()
            or not (tensor.is_cpu or tensor.is_cuda)
        ):
            return self._adapted(tensor.__reduce_ex__(self.protocol))
        kind, itemsize = self._kinds[dtype]
        storage = tensor.untyped_storage()
        data, nbytes = storage._cdata, storage.nbytes()  # torch's identity of a storage
        size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        ref: _Ref
        if (
            data not in self._by_data
            and tensor.nbytes == nbytes
            and self._cuts is None
            and (not self._exact or tensor.is_contiguous())
        ):
            address = storage.data_ptr()
            if (not address or self._dtypes.setdefault(address, dtype) is not dtype) and nbytes:
                self._check(address, dtype)
            ref = self._by_data[data] = Stored(str(len(self.storages)), kind, nbytes // itemsize, storage, 0, nbytes)
            self.storages.append(ref)
        else:
            ref, offset, stride = self._use(storage, dtype, kind, itemsize, Geometry(itemsize, offset, size, stride))
        return self._rebuild, (ref, offset, size, stride, requires_grad, _NoHooks())

    def _adapted(self, reduced: Any) -> Any:
        """Torch's reduction of a tensor, with devices and storages replaced."""
        if not isinstance(reduced, tuple) or len(reduced) < 2 or not isinstance(reduced[1], tuple):
            return reduced
        torch = self._torch
        function, arguments, *rest = reduced
        name = getattr(function, "__name__", "")
        if name in _WITH_STORAGE and function is getattr(torch._utils, name, None):
            storage, offset, size, stride, *more = arguments
            if isinstance(storage, torch.storage.TypedStorage):
                itemsize = storage._element_size()
            else:  # its dtype is among the other arguments
                dtypes = (argument for argument in more if isinstance(argument, torch.dtype))
                itemsize = next((torch.empty(0, dtype=dtype).element_size() for dtype in dtypes), 1)
            geometry = Geometry(itemsize, offset, tuple(size), tuple(stride))
            ref, offset, stride = self._use_of_torch(storage, geometry)
            return function, (ref, offset, size, stride, *more), *rest
        if name == "_rebuild_from_type_v2" and len(arguments) == 4:
            inner, kind, inside, state = arguments
            inner, inside = self._adapted((inner, inside))
            return function, (inner, kind, inside, state), *rest
        if self._portable and name == "_rebuild_wrapper_subclass":
            cpu, device = torch.device("cpu"), torch.device
            moved = tuple(cpu if isinstance(item, device) and item.type != "meta" else item for item in arguments)
            return function, moved, *rest
        if self._portable and name in _FROM_OTHER_DEVICES and len(arguments) == 4:
            data, dtype, _, requires_grad = arguments
            tensor = data if isinstance(data, self.tensor) else torch.from_numpy(data)
            here = tensor.detach().to(dtype).requires_grad_(requires_grad)
            return self._adapted(here.__reduce_ex__(self.protocol))
        return reduced


# -- views without the rest of their storage


class _Cuts:
    """The byte ranges of each storage that its tensors use. It keeps the storages alive, so that their ids stay unique.

    If a range is used by a single view, and is mostly gaps, only the elements of the view are written, contiguously.
    """

    def __init__(self, storages: Iterable[Stored]) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}
        self._dense: dict[tuple[int, Geometry], Any] = {}
        self._storages: list[Any] = []
        for stored in storages:
            storage, views = stored.storage, stored.views
            if stored.whole or any(view.byte_range[1] > storage.nbytes() for view in views):
                continue  # all of it is used, or it was resized under its tensors
            self._storages.append(storage)
            data = storage._cdata  # torch's identity of a storage
            step = max((view.itemsize for view in views), default=1)
            distinct = set(views)
            self._runs[data] = []
            for start, end in merged_ranges(views, step):
                inside = [view for view in distinct if view.nbytes and start <= view.byte_range[0] < end]
                if len(inside) == 1 and inside[0].is_sparse:
                    self._dense[data, inside[0]] = _dense(storage, inside[0])
                else:
                    self._runs[data].append((start, end))

    def piece(
        self, storage: Any, geometry: Geometry | None
    ) -> tuple[tuple[int, int], Any, int, int, int, tuple[int, ...]] | None:
        """What to write for a tensor instead of its whole storage; ``None`` to write all of it.

        A key for the piece, the storage, the first byte and the number of bytes to write, and the tensor's offset and
        stride in them.
        """
        data = storage._cdata
        runs = self._runs.get(data)
        if runs is None or geometry is None:
            return None
        dense = self._dense.get((data, geometry))
        if dense is not None:
            return ((data, ~geometry.offset), dense, 0, dense.nbytes(), 0, contiguous(geometry.size))
        first, last = geometry.byte_range
        if first == last:
            return ((data, -1 << 62), storage, 0, 0, 0, geometry.stride)
        for start, end in runs:
            if start <= first and last <= end:
                offset = geometry.offset - start // geometry.itemsize
                return ((data, start), storage, start, end - start, offset, geometry.stride)
        return None


_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _dense(storage: Any, geometry: Geometry) -> Any:
    """A new storage with the elements of a view, contiguously."""
    import torch

    with torch.no_grad():
        dtype = getattr(torch, _WORDS[geometry.itemsize])
        view = torch.empty(0, dtype=dtype, device=storage.device)
        view.set_(storage, geometry.offset, geometry.size, geometry.stride)
        return view.clone(memory_format=torch.contiguous_format).untyped_storage()


# -- the part of an object that cannot be pickled

_DEPTH = 12
_BREADTH = 10_000  # parts tried per level: finding the culprit must not take longer than the save


def _culprit(obj: Any, protocol: int, pickle_module: Any, kind: type[Exception]) -> tuple[str, str]:
    """The place of the innermost part that alone raises this kind of error; and what to do about it."""
    import torch

    place = "obj"

    def fails(part: Any) -> bool:
        if isinstance(part, (str, bytes, int, float, bool, type(None))):
            return False
        try:
            _dump(part, _Reducer(protocol, None, portable=True), pickle_module)
        except Exception as again:  # noqa: BLE001 - it may raise anything, perhaps another error
            return isinstance(again, kind)
        return False

    for _ in range(_DEPTH):
        inner = next(((name, part) for name, part in islice(_parts(obj), _BREADTH) if fails(part)), None)
        if inner is None:
            break
        place, obj = place + inner[0], inner[1]
    fix = "Save a state_dict instead of the object that has it" if "." in place else "Leave it out"
    if issubclass(kind, RecursionError):
        fix = "It is nested too deep for pickle: make it flatter, or allow more by sys.setrecursionlimit()."
    elif isinstance(obj, torch.Tensor):
        how = "clone()" if obj._is_zerotensor() else "to_dense()"  # there is no other way to ask
        fix = f"Save a plain tensor with the same numbers: {how} makes one."
    elif isinstance(obj, torch.nn.Module):
        fix = f"{fix}." if "." in place else "Save its state_dict() instead."
    elif (callable(obj) and hasattr(obj, "__name__")) or "<locals>" in type(obj).__qualname__:
        fix = f"{fix}, or give it a name at the top of a module: pickle refers to code by name."
    else:  # it stands for something outside: a file, a lock, a connection
        kinds = {"_IOBase": "file objects", "module": "modules", "generator": "generators", "socket": "sockets"}
        kinds |= {"lock": "locks", "RLock": "locks", "Thread": "threads"}
        named = (kinds[base.__name__] for base in type(obj).__mro__ if base.__name__ in kinds)
        fix = f"{fix}: {next(named, 'objects of this class')} cannot be pickled."
    return f"{place} (a {type(obj).__module__}.{type(obj).__qualname__})", fix


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.80}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    attributes = getattr(obj, "__dict__", None)
    is_code = isinstance(obj, type | ModuleType) or callable(getattr(obj, "__code__", None))
    if isinstance(attributes, dict) and not is_code:
        yield from ((f".{name}", value) for name, value in attributes.items())
