"""An object as the pickle that ``torch.save`` makes of it, and the storages it refers to.

For tensors on the CPU it is that pickle to the byte. Plain tensors are taken apart here, at a fifth of the time that
torch takes; all others by torch itself, and what comes out is only looked through for what does not travel: a
device, and a view that holds much more than it shows.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

from transload.saving.compact import Cuts
from transload.saving.desk import Desk, NoHooks, Ref, Stored, Use, torch_names
from transload.saving.errors import CannotPickleError, SaveError
from transload.saving.views import Geometry

__all__ = ["Pickled", "pickled"]


class Pickled(NamedTuple):
    """The pickle, and what it refers to, in the order of the keys."""

    data: bytes
    storages: list[Stored]


def pickled(obj: Any, pickle_module: Any, protocol: int, *, portable: bool, compact: bool) -> Pickled:
    """The pickle of an object. ``portable`` says ``cpu`` of every storage; ``compact`` cuts views out of theirs."""
    desk = Desk(protocol, None, portable=portable, exact=compact)
    data = _dump(obj, desk, pickle_module)
    if compact:
        cuts = Cuts((each.storage, each.views or [], each.whole) for each in desk.storages)
        desk = Desk(protocol, cuts, portable=portable)
        data = _dump(obj, desk, pickle_module)
    return Pickled(data, desk.storages)


def _dump(obj: Any, desk: Desk, pickle_module: Any) -> bytes:
    """The pickle; what has none is named."""
    try:
        return _stream(obj, desk, pickle_module)
    except SaveError:
        raise
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        from transload.saving.culprit import culprit

        def attempt(part: Any) -> None:
            _stream(part, Desk(desk.protocol, None, portable=True), pickle_module)

        place, fix = culprit(obj, attempt, error)
        raise CannotPickleError(f"{place} cannot be pickled: {error}", fix=fix) from error


def _stream(obj: Any, desk: Desk, pickle_module: Any) -> bytes:
    held = io.BytesIO()
    quick = pickle_module is None or pickle_module is pickle
    pickler = (_Pickler if quick else _any_pickler(pickle_module))(held, protocol=desk.protocol)
    pickler.transload = _Job(desk)
    if quick:
        pickler.dispatch_table = _Table(desk)
    pickler.dump(obj)
    return held.getvalue()


class _Job:
    """What the picklers below need for one object.

    It belongs to the pickler and not to its class: every class is part of a reference cycle, and what it refers to
    lives until the garbage collector finds that.
    """

    __slots__ = ("known", "named", "plain", "reduce")

    def __init__(self, desk: Desk) -> None:
        self.known, self.named = _storage_classes(), _persistent_ids(desk)
        self.plain, self.reduce = _plain_tensors(desk), desk.reduce


class _Pickler(pickle.Pickler):
    """The pickler of the standard library, told by a table how to take tensors apart."""

    __slots__ = ("transload",)
    transload: _Job

    def persistent_id(self, obj: Any) -> Any:
        job = self.transload
        return job.named(obj) if type(obj) in job.known else None


class _Table(dict[type, Callable[[Any], Any]]):
    """How each class is taken apart: as the program has registered it, as here, or as the class itself says."""

    def __init__(self, desk: Desk) -> None:
        plain, slow, tensor = _plain_tensors(desk), desk.reduce, torch_names().tensor
        super().__init__({tensor: plain, **copyreg.dispatch_table})
        self[NoHooks] = attrgetter("reduced")
        self._slow = slow
        self._tensor = tensor
        self._itself = methodcaller("__reduce_ex__", desk.protocol)

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):  # a class of its own kind is named, not taken apart
            raise KeyError(kind)
        self[kind] = self._slow if issubclass(kind, self._tensor) else self._itself
        return self[kind]


def _any_pickler(pickle_module: Any) -> Any:
    """That of another module, which may have ideas of its own about everything but tensors."""
    base: Any = pickle_module.Pickler
    inherited = getattr(base, "reducer_override", None)
    tensor = torch_names().tensor

    class Pickler(base):  # type: ignore[misc]
        __slots__ = ("transload",)

        def persistent_id(self, obj: Any) -> Any:
            return self.transload.named(obj) if type(obj) in self.transload.known else None

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is NoHooks:
                return NoHooks.reduced
            made = self.transload.plain(obj) if kind is tensor else self.transload.reduce(obj)
            return inherited(self, obj) if made is NotImplemented and inherited else made

    return Pickler


def _storage_classes() -> frozenset[type]:
    """Every class of storages that there is, and what stands for them here."""
    found: set[type] = {Ref, Stored}
    todo = [torch_names().typed, torch_names().untyped]
    while todo:
        kind = todo.pop()
        found.add(kind)
        todo += kind.__subclasses__()
    return frozenset(found)


def _persistent_ids(desk: Desk) -> Callable[[Any], tuple[Any, ...]]:
    """What the file says instead of a storage."""
    import torch

    location_tag = torch.serialization.location_tag

    def portable(obj: Any) -> tuple[Any, ...]:
        ref = obj if isinstance(obj, Ref) else desk.of_storage(obj)
        return ("storage", ref.kind, ref.key, "cpu", ref.numel)

    def kept(obj: Any) -> tuple[Any, ...]:
        ref = obj if isinstance(obj, Ref) else desk.of_storage(obj)
        return ("storage", ref.kind, ref.key, location_tag(ref.storage), ref.numel)

    return portable if desk.portable else kept


def _plain_tensors(desk: Desk) -> Callable[[Any], Any]:
    """A function that takes apart a tensor, at once if it is nothing but numbers in memory.

    It runs for each tensor there is: everything it needs is at hand.
    """
    kinds, tensor_class, _, strided, *_ = t = torch_names()
    rebuild = t.utils._rebuild_tensor_v2  # noqa: SLF001 - the function that files name
    by_data, dtypes, storages = desk.by_data, desk.dtypes, desk.storages
    cuts, exact, overridden = desk.cuts, desk.exact, tensor_class in copyreg.dispatch_table
    slow = desk.reduce

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
        data, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001 - by which torch tells storages apart
        size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        ref: Ref
        if (
            data not in by_data
            and tensor.nbytes == nbytes
            and cuts is None
            and not (exact and not tensor.is_contiguous())
        ):
            address = storage.data_ptr()
            if (not address or dtypes.setdefault(address, dtype) is not dtype) and nbytes:
                desk.check(address, dtype)
            ref = by_data[data] = Stored(str(len(storages)), kind, itemsize, storage, 0, nbytes)
            storages.append(ref)
        else:
            use = Use(dtype, kind, itemsize, Geometry(itemsize, offset, size, stride))
            ref, offset, stride = desk.use(storage, use)
        return rebuild, (ref, offset, size, stride, requires_grad, NoHooks())

    return plain
