"""An object as the pickle that ``torch.save`` makes of it, and the storages it refers to.

For tensors on the CPU it is that pickle to the byte. Plain tensors are taken apart here, at a fifth of the time that
torch takes; all others by torch itself, and what comes out is only looked through for what does not travel: a
device, and a view that holds much more than it shows.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from math import prod
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

from transload.errors import CannotPickleError, SaveError

__all__ = [
    "Cuts",
    "Desk",
    "Geometry",
    "NoHooks",
    "Pickled",
    "Piece",
    "Ref",
    "Run",
    "Stored",
    "TorchNames",
    "Use",
    "culprit",
    "merged",
    "pickled",
    "torch_names",
]


class Run(NamedTuple):
    """Bytes of a storage, from ``start`` up to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.end - self.start


class Geometry(NamedTuple):
    """Which elements of its storage a tensor is; ``itemsize`` is the bytes of each."""

    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def run(self) -> Run:
        """From its first byte to its last; nothing for a tensor without elements.

        >>> Geometry(4, 10, (2, 3), (100, 2)).run
        Run(start=40, end=460)
        """
        if 0 in self.size:
            return Run(0, 0)
        last = self.offset + sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return Run(self.offset * self.itemsize, (last + 1) * self.itemsize)

    @property
    def nbytes(self) -> int:
        """What it would take without gaps, and each element written as often as it occurs."""
        return prod(self.size) * self.itemsize

    @property
    def is_sparse(self) -> bool:
        """Whether it leaves out at least half of the bytes between its first and its last."""
        return 2 * self.nbytes <= self.run.nbytes


def merged(runs: Iterable[Run], step: int = 1) -> Sequence[Run]:
    """Runs that overlap or touch, as one; each begins at a multiple of ``step``.

    What does not overlap shares no memory, so it can be kept apart.

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


class Piece(NamedTuple):
    """What is written for a tensor instead of its storage, and where in it, and how, the tensor lies."""

    name: tuple[int, int]
    storage: Any
    run: tuple[int, int]
    """Its first byte in the storage, and how many they are."""
    offset: int
    stride: tuple[int, ...]


class Cuts:
    """For each storage the runs of bytes that its tensors use. It keeps the storages alive: their numbers stay theirs.

    A run that a single view uses, and that mostly consists of what the view leaves out, is not written as it is: the
    elements of the view are, one after the other.
    """

    def __init__(self, uses: Iterable[tuple[Any, list[Geometry], bool]]) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._dense: dict[tuple[int, Geometry], Any] = {}
        self._held: list[Any] = []
        for storage, views, whole in uses:
            if not whole:
                self._cut(storage, views)

    def _cut(self, storage: Any, views: list[Geometry]) -> None:
        if any(each.run.end > storage.nbytes() for each in views):
            return  # of a storage that was made smaller under its tensors, there is nothing to cut
        self._held.append(storage)
        data = storage._cdata  # noqa: SLF001 - by which torch tells storages apart
        step = max((each.itemsize for each in views), default=1)
        runs = list(merged((each.run for each in views), step))
        distinct = set(views)
        for run in list(runs):
            inside = [each for each in distinct if each.run.nbytes and run.start <= each.run.start < run.end]
            if len(inside) == 1 and inside[0].is_sparse:
                self._dense[data, inside[0]] = _dense(storage, inside[0])
                runs.remove(run)
        self._runs[data] = runs

    def piece(self, storage: Any, geometry: Geometry | None) -> Piece | None:
        """What to write for a tensor; ``None``: the whole storage."""
        data = storage._cdata  # noqa: SLF001 - as above
        runs = self._runs.get(data)
        if runs is None or geometry is None:
            return None
        dense = self._dense.get((data, geometry))
        if dense is not None:
            return Piece((data, ~geometry.offset), dense, (0, dense.nbytes()), 0, _strides(geometry.size))
        used = geometry.run
        if not used.nbytes:
            return Piece((data, -1 << 62), storage, (0, 0), 0, geometry.stride)
        for run in runs:
            if run.start <= used.start and used.end <= run.end:
                offset = geometry.offset - run.start // geometry.itemsize
                return Piece((data, run.start), storage, (run.start, run.nbytes), offset, geometry.stride)
        return None


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a tensor of this size without gaps.

    >>> _strides((2, 3, 5))
    (15, 5, 1)
    """
    out, step = [], 1
    for count in reversed(size):
        out.append(step)
        step *= max(count, 1)
    return tuple(reversed(out))


_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _dense(storage: Any, geometry: Geometry) -> Any:
    """A storage with the elements of a view, in order."""
    import torch

    with torch.no_grad():
        dtype = getattr(torch, _WORDS[geometry.itemsize])
        view = torch.empty(0, dtype=dtype, device=storage.device)
        view.set_(storage, geometry.offset, geometry.size, geometry.stride)
        return view.clone(memory_format=torch.contiguous_format).untyped_storage()


_DEPTH = 12
_BREADTH = 10_000
"""Parts looked at on a level: an error need not take as long as the save would have."""


def culprit(obj: Any, attempt: Callable[[Any], object], error: Exception) -> tuple[str, str]:
    """The place of the innermost part that fails by itself, and for the same reason; and what to do about it."""
    place, kind = "obj", type(error)
    for _ in range(_DEPTH):
        parts = islice(_parts(obj), _BREADTH)
        found = next(((name, part) for name, part in parts if _fails(part, attempt, kind)), None)
        if found is None:
            break
        place, obj = place + found[0], found[1]
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
    held = getattr(obj, "__dict__", None)
    if isinstance(held, dict) and not isinstance(obj, type) and not callable(getattr(obj, "__code__", None)):
        yield from ((f".{name}", value) for name, value in held.items())


def _fails(part: Any, attempt: Callable[[Any], object], kind: type[Exception]) -> bool:
    if isinstance(part, (str, bytes, int, float, bool, type(None))):
        return False
    try:
        attempt(part)
    except Exception as error:  # noqa: BLE001 - it may be any, and not the one that is looked for
        return isinstance(error, kind)
    return False


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
