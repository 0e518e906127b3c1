"""How the parts of an object are taken apart: storages once each, tensors as torch does it, devices made portable."""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from functools import cache
from typing import Any, NamedTuple

from transload.saving.compact import Cuts
from transload.saving.errors import CannotPickleError, SaveError
from transload.saving.views import Geometry

__all__ = ["Desk", "NoHooks", "Ref", "Stored", "TorchNames", "Use", "torch_names"]


class Ref:
    """What stands for a storage in what is pickled: its key, and of which class, and of how many elements, it is."""

    __slots__ = ("key", "kind", "numel", "storage")

    def __init__(self, key: str, kind: Any, numel: int, storage: Any) -> None:
        self.key = key
        self.kind = kind
        self.numel = numel
        self.storage = storage


class Stored(Ref):
    """One record of the archive: some bytes of a storage, all of them unless views were cut out of it.

    ``whole`` is whether something uses all of them; if not, ``views`` is what uses some.
    """

    __slots__ = ("nbytes", "start", "views", "whole")

    def __init__(self, key: str, kind: Any, itemsize: int, storage: Any, start: int, nbytes: int) -> None:  # noqa: PLR0913, PLR0917
        self.key = key
        self.kind = kind
        self.numel = nbytes // itemsize
        self.storage = storage
        self.start = start
        self.nbytes = nbytes
        self.whole = True
        self.views: list[Geometry] | None = None


class NoHooks:
    """What stands for the empty ``OrderedDict`` in which tensors once had hooks."""

    __slots__ = ()
    reduced = OrderedDict, ()


class TorchNames(NamedTuple):
    """What of torch is asked for again and again."""

    kinds: dict[Any, tuple[Any, int]]  # dtype → the storage class that files name, bytes of an element
    tensor: Any
    parameter: Any
    strided: Any
    typed: Any
    untyped: Any
    parts: frozenset[Any]  # functions whose arguments begin with storage, offset, size, stride
    utils: Any


_CLASSES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
"""Complex tensors can be conjugated ones, so torch takes them apart."""


@cache
def torch_names() -> TorchNames:
    """Them, looked up once."""
    import torch

    dtypes = {getattr(torch, name): getattr(torch, f"{word}Storage") for name, word in _CLASSES.items()}
    kinds = {dtype: (kind, torch.empty(0, dtype=dtype).element_size()) for dtype, kind in dtypes.items()}
    utils: Any = torch._utils  # noqa: SLF001 - the functions that files name
    names = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
    parts = frozenset(getattr(utils, name) for name in names if hasattr(utils, name))
    storages = torch.storage.TypedStorage, torch.storage.UntypedStorage
    return TorchNames(kinds, torch.Tensor, torch.nn.Parameter, torch.strided, *storages, parts, utils)


class Use(NamedTuple):
    """How a tensor, or whoever has the storage itself, uses it: as elements of this class."""

    dtype: Any
    kind: Any
    itemsize: int
    geometry: Geometry | None


class Desk:
    """The work on one object: which storages were met, and how each object is to be taken apart."""

    def __init__(self, protocol: int, cuts: Cuts | None, *, portable: bool, exact: bool = False) -> None:
        self.storages: list[Stored] = []
        self.by_data: dict[Any, Stored] = {}
        self.dtypes: dict[int, Any] = {}
        self.cuts = cuts
        self.exact = exact
        self.protocol = protocol
        self.portable = portable
        self._torch = torch_names()

    # -- storages ------------------------------------------------------------------------------------------------------

    def of_storage(self, obj: Any) -> Ref:
        """What stands for a storage that torch gives."""
        return self._of_storage(obj, None)[0]

    def _of_storage(self, obj: Any, geometry: Geometry | None) -> tuple[Ref, int, tuple[int, ...]]:
        import torch

        if obj.device.type == "meta":
            what = "a storage on the meta device has no bytes to save"
            raise CannotPickleError(what, fix="Save the tensor instead of its storage.")
        if isinstance(obj, self._torch.typed):
            kind = getattr(torch, obj._pickle_storage_type())  # noqa: SLF001 - as torch.save asks
            use = Use(obj.dtype, kind, obj.element_size(), geometry)
            return self.use(obj._untyped_storage, use)  # noqa: SLF001 - as above
        return self.use(obj, Use(torch.uint8, self._torch.untyped, 1, geometry))

    def use(self, storage: Any, use: Use) -> tuple[Ref, int, tuple[int, ...]]:
        """What stands for a storage; and where in it, and how, the tensor lies."""
        geometry = use.geometry
        piece = self.cuts.piece(storage, geometry) if self.cuts else None
        if piece is not None:
            stored = self.by_data.get(piece.name) or self._met(piece.name, piece.storage, piece.run, use)
            return self._as(stored, use), piece.offset, piece.stride
        data = storage._cdata  # noqa: SLF001 - by which torch tells storages apart
        stored = self.by_data.get(data) or self._met(data, storage, (0, storage.nbytes()), use)
        _note(stored, geometry)
        return self._as(stored, use), geometry.offset if geometry else 0, geometry.stride if geometry else ()

    def _met(self, name: Any, storage: Any, run: tuple[int, int], use: Use) -> Stored:
        start, nbytes = run
        if nbytes:
            self.check(storage.data_ptr(), use.dtype)
        stored = Stored(str(len(self.storages)), use.kind, use.itemsize, storage, start, nbytes)
        stored.whole, stored.views = False, []
        self.by_data[name] = stored
        self.storages.append(stored)
        return stored

    def _as(self, stored: Stored, use: Use) -> Ref:
        if stored.kind is use.kind:
            return stored
        if stored.nbytes:
            self.check(stored.storage.data_ptr(), use.dtype)
        return Ref(stored.key, use.kind, stored.nbytes // use.itemsize, stored.storage)

    def check(self, address: int, dtype: Any) -> None:
        """Refuse memory that is not there, or is used as two kinds of number: a file has one for each storage."""
        if not address:
            raise SaveError("a storage says it has bytes, and has no memory", fix="Save a clone() of its tensor.")
        if self.dtypes.setdefault(address, dtype) != dtype:
            what = f"one storage is used as {self.dtypes[address]} and as {dtype}, which a file cannot hold"
            raise SaveError(what, fix="Save a clone() of one of the two tensors.")

    # -- tensors -------------------------------------------------------------------------------------------------------

    def reduce(self, obj: Any) -> Any:
        """How pickle shall take something apart that is no plain tensor; ``NotImplemented`` for the usual way."""
        kind = type(obj)
        t = self._torch
        if kind in copyreg.dispatch_table:
            return NotImplemented
        if kind is t.parameter and not obj.__dict__:
            return t.utils._rebuild_parameter, (obj.data, obj.requires_grad, NoHooks())  # noqa: SLF001 - in files
        if isinstance(obj, t.tensor):
            return self._adapted(obj.__reduce_ex__(self.protocol))
        return NotImplemented

    def _adapted(self, reduced: Any) -> Any:
        """What torch made of a tensor, with what does not travel replaced."""
        if not isinstance(reduced, tuple) or len(reduced) < 2 or not isinstance(reduced[1], tuple):
            return reduced
        function, arguments, *rest = reduced
        t = self._torch
        if function in t.parts:
            return function, self._parts(arguments), *rest
        name = getattr(function, "__name__", "")
        if name == "_rebuild_from_type_v2" and len(arguments) == 4:
            inner, kind, inside, state = arguments
            inner, inside = self._adapted((inner, inside))
            return function, (inner, kind, inside, state), *rest
        if self.portable and name == "_rebuild_wrapper_subclass":
            return function, tuple(map(_at_home, arguments)), *rest
        if self.portable and name in _FROM_AFAR and len(arguments) == 4:
            return self._adapted(_FROM_AFAR[name](*arguments).__reduce_ex__(self.protocol))
        return reduced

    def _parts(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        storage, offset, size, stride, *rest = arguments
        itemsize = storage.element_size() if isinstance(storage, self._torch.typed) else _itemsize(rest)
        ref, offset, stride = self._of_storage(storage, Geometry(itemsize, offset, tuple(size), tuple(stride)))
        return (ref, offset, size, stride, *rest)


def _note(stored: Stored, geometry: Geometry | None) -> None:
    if stored.whole or stored.views is None:
        return
    if geometry is None or (geometry.nbytes == stored.nbytes == geometry.run.nbytes):
        stored.whole = True
    else:
        stored.views.append(geometry)


def _itemsize(rest: list[Any]) -> int:
    """Of the dtype among the last arguments of a tensor whose storage has none."""
    import torch

    return next((torch.empty(0, dtype=each).element_size() for each in rest if isinstance(each, torch.dtype)), 1)


def _at_home(value: Any) -> Any:
    import torch

    return torch.device("cpu") if isinstance(value, torch.device) and value.type != "meta" else value


def _from_cpu(tensor: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:  # noqa: ARG001 - as the file has them
    return tensor.detach().to(dtype).requires_grad_(requires_grad)


def _from_numpy(array: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:
    import torch

    return _from_cpu(torch.from_numpy(array), dtype, device, requires_grad)


_FROM_AFAR = {
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_device_tensor_from_numpy": _from_numpy,
    "_rebuild_xla_tensor": _from_numpy,
}
"""How tensors of devices without storages are written: with the name of the device, which is not everywhere."""
