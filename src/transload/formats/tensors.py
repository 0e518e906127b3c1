"""The storages that a pickle names, and the tensors that torch's rebuild functions would make over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from transload.checkpoint import Key, Record, Storage, Tensor
from transload.dtypes import BLOCKS, ITEMSIZE, MAX_SIZE, STORAGES, itemsize
from transload.findings import LimitedProblems
from transload.nodes import REBUILDS, Call, Dict, Global, Persistent, called, device_text, dotted, short, text_of

MAX_RANK = 1024  # dimensions; a million tensors could share a shape of a million dimensions, for two bytes each
# Tensors inside tensors: a parameter with a subclass with a quantized tensor with its scales has four levels.
MAX_NESTED = 16
_MAX_SHOWN = 120
_NO_RECORD = Record("", None, 0, 0)
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields

Args = tuple[Any, ...]
Locate = Callable[[str, int], Record | None]
Place = tuple[tuple[Key, ...], str]  # the path and the name of a tensor


class TooMuch(Exception):  # noqa: N818 - a signal between the walk and its parts, never seen outside
    """A file asks for more work than its size can justify; the text says what."""


class Budget:
    """What reading a graph may cost beyond its own size.

    A graph can share an object under any number of names for two bytes each. The first visit to an object is paid for
    by the bytes that made it; further visits are counted, and so is the text of all names, since a long key near the
    root is part of every name below it.
    """

    MAX_REPEATS = 50_000
    MAX_NAMES = 128 << 20

    def __init__(self) -> None:
        self.objects: set[int] = set()  # the ids of those seen so far
        self._repeats = 0
        self._names = 0

    def seen(self, ident: int) -> bool:
        """Return whether an object was seen before, and mark it as seen."""
        if ident in self.objects:
            self.repeat()
            return True
        self.objects.add(ident)
        return False

    def spend(self, size: int, *, again: bool) -> None:
        """Pay for a name of that size; ``again`` if its object was seen before."""
        self._names += size
        if self._names > self.MAX_NAMES:
            raise TooMuch(f"its names add up to more than {self.MAX_NAMES >> 20} MiB")
        if again:
            self.repeat()

    def repeat(self, count: int = 1) -> None:
        """Pay for further visits to objects."""
        self._repeats += count
        if self._repeats > self.MAX_REPEATS:
            raise TooMuch(f"its objects are shared under more than {self.MAX_REPEATS:,} further names")


class StorageTable:
    """The storages seen so far, by key. ``locate`` finds the record of one by its key and size, or returns ``None``.

    Each key counts once: torch restores a storage when it is first used, and shares it afterwards. Without ``locate``,
    all bytes count as stored, at an unknown offset.
    """

    def __init__(self, locate: Locate | None = None, *, big_endian: bool = False) -> None:
        self._locate = locate or (lambda _, nbytes: Record("", None, nbytes, nbytes))
        self._big_endian = big_endian
        self.storages: dict[str, Storage] = {}
        self.users: defaultdict[str, list[str]] = defaultdict(list)  # the names of the tensors over each
        self.noted = LimitedProblems()
        self.budget = Budget()
        self.shares: list[tuple[int, int, int]] = []  # of each distributed tensor: ``world``, ``rank`` and ``place``
        self._seen: dict[int, tuple[Storage, int, str] | None] = {}
        self._views: dict[str, tuple[str, int, int]] = {}

    def enter(self, nodes: Iterable[Persistent]) -> None:
        """Add the storages of a pickle, in the order in which it names them."""
        storages, locate, seen = self.storages, self._locate, self._seen
        for node in nodes:
            seen[id(node)] = None  # and stays so if the id is odd
            pid: Any = node.id
            if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
                continue
            _, kind, key, device, numel = pid[:5]
            dtype = STORAGES.get(kind.name.rpartition(".")[2]) if type(kind) is Global else None
            if type(key) is int:
                key = str(key)
            if dtype is None or type(key) is not str or type(device) is not str or type(numel) is not int:
                self.noted.add("storage-malformed", "", "a storage id of the wrong shape")
                continue
            nbytes = numel * ITEMSIZE[dtype]
            storage = storages.get(key)
            if storage is None:
                if 0 <= nbytes < MAX_SIZE:
                    record = locate(key, nbytes)
                else:
                    detail = f"{short(nbytes)} bytes are claimed"
                    self.noted.add("storage-size-absurd", f"storage {key[:_MAX_SHOWN]}", detail)
                    nbytes, record = 0, None
                name, offset, size, stored, crc, method = record or _NO_RECORD
                packed = method != 0
                if packed:
                    offset, stored = None, size
                elif not stored == size == nbytes:
                    stored = min(stored, size, nbytes)
                place = (nbytes, stored, offset, name, "", crc, packed, self._big_endian, None, ())
                storage = storages[key] = _new(Storage, (key, key, device, dtype, *place))
            elif storage.nbytes != nbytes or storage.device != device or (nbytes and storage.dtype != dtype):
                # torch uses the first one. An empty storage may have several dtypes.
                detail = f"named again with {short(nbytes)} bytes of {dtype} on {device[:_MAX_SHOWN]}, "
                detail += f"first with {storage.nbytes} of {storage.dtype} on {storage.device[:_MAX_SHOWN]}"
                self.noted.add("storage-conflict", f"storage {key[:_MAX_SHOWN]}", detail)
            if len(pid) == 5 or pid[5] is None:
                seen[id(node)] = storage, 0, dtype
                continue
            match pid[5]:  # a view: (key, offset, size) of a part of the storage
                case (str() as name, int() as first, int() as size) if 0 <= first <= first + size <= numel:
                    view = self._views.setdefault(name, (key, first, size))
                    if view == (key, first, size) and (name == key or name not in storages):
                        seen[id(node)] = storage, first, dtype
                    else:
                        detail = "its view has the name of another storage"
                        self.noted.add("storage-conflict", f"storage {key[:_MAX_SHOWN]}", detail)
                case _:
                    self.noted.add("storage-malformed", "", "a view beyond its storage")

    def resolve(self, node: object) -> tuple[Storage, int, str] | None:
        """The storage a persistent id names, the element a view of it begins at, and the dtype it is read as."""
        if type(node) is not Persistent:
            return None
        if id(node) not in self._seen:
            self.enter((node,))
        return self._seen[id(node)]


def declared_storages(nodes: Iterable[Persistent]) -> dict[str, Storage]:
    """The storages that some persistent ids name, by key, with the sizes they claim."""
    table = StorageTable()
    table.enter(nodes)
    return table.storages


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


class RebuildReader(ABC):
    """Makes the tensors that torch's rebuild functions would make; each function has a method of its name.

    ``depth`` counts tensors inside tensors, and ``attributes`` are the nodes of the attributes of the last one.
    """

    def __init__(self, table: StorageTable) -> None:
        self.table = table
        self.depth = 0
        self.attributes: list[object] = []

    def rebuild(self, function: str, args: object, at: Place) -> Tensor:
        """The tensor that a rebuild function would make of some arguments; ``BadTensor`` if it would make none."""
        rebuild = REBUILDS.get(function)
        if rebuild is None:
            raise BadTensor(f"it is rebuilt by {function or 'no function'}")
        if type(args) is not tuple or not rebuild.least <= len(args) <= rebuild.most:
            raise BadTensor("its rebuild call has the wrong number of arguments")
        if self.depth >= MAX_NESTED:
            raise BadTensor("it is made of tensors that are nested too deeply")
        self.depth += 1
        try:
            tensor: Tensor = getattr(self, _METHODS[function])(args, at)
            return tensor
        finally:
            self.depth -= 1

    @abstractmethod
    def tensors_in(self, node: object, at: Place) -> tuple[Tensor, ...]:
        """The tensors inside an object; ``BadTensor`` if one of them is broken."""

    def _rebuild(self, node: object, at: Place, part: str = "") -> Tensor:
        """The tensor of a call inside another call: a ``part`` of its tensor, or the same tensor in another class."""
        if type(node) is not Call:
            raise BadTensor("it should contain a tensor, but does not")
        self.table.budget.seen(id(node))
        if part:
            at = (*at[0], part), f"{at[1]}/{part}" if at[1] else part
        return self.rebuild(called(node), node.args, at)

    def _strided(self, args: Args, at: Place, *, dtype: str = "", grad_at: int = 4, flags_at: int = 6) -> Tensor:
        """A tensor over a storage: (storage, offset, size, stride, …); the positions of other arguments vary."""
        resolved = self.table.resolve(args[0])
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
        self.table.users[key].append(name)
        if offset and begin is not None:
            begin += itemsize(dtype, offset)
        flags: tuple[str, ...] = ()
        if len(args) > flags_at and type(args[flags_at]) is Dict:  # {"conj": True}
            flags = tuple(flag for flag in ("conj", "neg") if args[flags_at].get(flag) is True)
        fields = (path, name, dtype, shape, stride, device, key, offset, grad, "strided", "", (), begin, flags, None)
        return _new(Tensor, fields)

    _rebuild_tensor = _rebuild_tensor_v2 = _strided

    def _rebuild_tensor_v3(self, args: Args, at: Place) -> Tensor:
        # torch 2.13 writes it but cannot load it, since it sets the storage of a leaf that requires gradients. (Tensors
        # of other formats have no hooks here, and are loaded in another way.)
        if args[4] is True and args[5] is not None:
            detail = "a tensor of a newer dtype that requires gradients and is not a Parameter"
            self.table.noted.add("tensor-unloadable", at[1] or "the root", detail)
        return self._strided(args, at, dtype=_dtype(args[6]), flags_at=7)

    def _rebuild_qtensor(self, args: Args, at: Place) -> Tensor:
        tensor = self._strided(args, at, grad_at=5, flags_at=7)._replace(kind="quantized")
        if type(args[4]) is not tuple or len(args[4]) > 4:
            raise BadTensor("its quantizer is not valid")
        for index, part in enumerate(part for part in args[4] if type(part) is Call):
            self._rebuild(part, at, f"quantizer.{index}")
        return tensor

    def _rebuild_parameter(self, args: Args, at: Place) -> Tensor:
        inner = self._rebuild(args[0], at)
        if args[1] is True:
            _check_grad(inner.dtype)
        self.attributes += args[3:]
        return inner._replace(requires_grad=args[1] is True, cls=inner.cls or "Parameter")

    _rebuild_parameter_with_state = _rebuild_parameter

    def _parameter(self, args: Args, at: Place) -> Tensor:
        inner = self._rebuild(args[0], at)
        return inner._replace(requires_grad=args[1:2] != (False,), cls="Parameter")

    def _rebuild_meta_tensor_no_storage(self, args: Args, at: Place) -> Tensor:
        shape, stride = _ints(args[1], "size"), _ints(args[2], "stride")
        reach(0, shape, stride)
        return Tensor(*at, _dtype(args[0]), shape, stride, "meta", None, 0, args[3] is True, "meta")

    def _rebuild_sparse_tensor(self, args: Args, at: Place) -> Tensor:
        # The layout is ``torch.serialization._get_layout("torch.sparse_coo")``.
        text = args[0].args[0] if type(args[0]) is Call and type(args[0].args) is tuple and args[0].args else ""
        layout = text.removeprefix("torch.") if type(text) is str else "sparse_coo"
        names = ("indices", "values") if layout == "sparse_coo" else ("compressed_indices", "plain_indices", "values")
        if type(args[1]) is not tuple or len(args[1]) < len(names) + 1:
            raise BadTensor("its sparse parts are missing")
        return self._composite(args[1], at, layout, names, sized=True)

    _rebuild_sparse_csr_tensor = _rebuild_sparse_tensor

    def _rebuild_nested_tensor(self, args: Args, at: Place) -> Tensor:
        return self._composite(args, at, "nested", ("buffer", "sizes", "strides", "offsets"))

    def _composite(self, args: Args, at: Place, kind: str, names: tuple[str, ...], *, sized: bool = False) -> Tensor:
        """A tensor made of others. If ``sized``: the dtype of the last, and the size after it; else as the first."""
        parts = tuple([self._rebuild(part, at, label) for label, part in zip(names, args, strict=False)])
        like = parts[-1 if sized else 0]
        shape = _ints(args[len(names)], "size") if sized else like.shape
        return Tensor(*at, like.dtype, shape, (), parts[0].device, None, kind=kind, parts=parts)

    def _rebuild_from_type(self, args: Args, at: Place) -> Tensor:
        function, kind, inner_args, state = args
        inner = self.rebuild(dotted(function), inner_args, at)
        cls = dotted(kind).rpartition(".")[2]
        inner = inner._replace(cls="" if cls == "Tensor" else cls)
        if inner.kind == "subclass":
            if dotted(kind).startswith("torch.distributed."):
                from transload.formats.pieces import class_of

                if class_of(kind):
                    return self._piece(inner, class_of(kind), state, at)
            return inner._replace(parts=self.tensors_in(state, at))
        if not inner.parts:  # a jagged one repeats its parts there
            self.attributes.append(state)
        return inner

    _rebuild_from_type_v2 = _rebuild_from_type

    def _piece(self, whole: Tensor, cls: str, state: object, at: Place) -> Tensor:
        """A distributed tensor: the boxes of it that the file has; a problem, if that is not clear."""
        from transload.formats.pieces import UnplacedError, cut_out, local_nodes, piece_of

        table, parts, wrong = self.table, [], ""
        try:
            piece = piece_of(cls, whole.shape, state)
        except UnplacedError as reason:
            piece, wrong = None, str(reason)
        for local in piece.local if piece else ():
            table.budget.repeat(max(0, len(local.boxes) - 1))
            tensor = self._rebuild(local.node, at)
            if (tensor.kind, tensor.dtype, tensor.shape) != ("strided", whole.dtype, local.shape):
                here, share = f"{tensor.dtype} {list(tensor.shape)}", f"{whole.dtype} {list(local.shape)}"
                wrong = f"{here} is here, where its share would be {share}"
                continue
            parts += cut_out(tensor, local.boxes, at[0])
        if wrong or piece is None:
            table.noted.add("piece-unplaced", at[1] or "the root", wrong)
            nodes = local_nodes(cls, state)
            return whole._replace(parts=tuple([self._rebuild(node, at, "_local_tensor") for node in nodes]))
        table.shares.append((piece.world, piece.rank, piece.place))
        if len(parts) == 1 and parts[0].shape == whole.shape:
            return parts[0]._replace(path=at[0], start=None, requires_grad=whole.requires_grad, cls=whole.cls)
        return whole._replace(kind="sharded", parts=tuple(parts))

    def _rebuild_wrapper_subclass(self, args: Args, at: Place) -> Tensor:
        kind, dtype, shape, stride, _offset, _layout, device, grad = args
        sizes, steps, cls = _ints(shape, "size"), _ints(stride, "stride"), dotted(kind).rpartition(".")[2]
        where = device_text(device)
        return Tensor(*at, _dtype(dtype), sizes, steps, where, None, 0, grad is True, "subclass", cls)

    def _rebuild_njt(self, args: Args, at: Place) -> Tensor:
        parts = self.tensors_in(args[0], at)
        if not parts:
            raise BadTensor("it contains no tensors")
        return Tensor(*at, parts[0].dtype, parts[0].shape, (), parts[0].device, None, kind="nested", parts=parts)

    def _rebuild_device_tensor_from_cpu_tensor(self, args: Args, at: Place) -> Tensor:
        # The storage is tagged cpu: the device it came from, and goes back to, is an argument.
        moved = self._composite(args, at, "device", ("data",))
        dtype, inner = _dtype(args[1]), moved.parts[0]
        storage = self.table.storages.get(inner.storage or "")
        if storage is not None and itemsize(dtype, inner.numel) > max(16 * storage.nbytes, 4096):
            raise BadTensor("it would be copied from a few bytes to a great many")
        return moved._replace(dtype=dtype, device=text_of(args[2]), requires_grad=args[3] is True)

    def _rebuild_device_tensor_from_numpy(self, args: Args, at: Place) -> Tensor:
        from transload.geometry import contiguous

        array, dtype, device, grad = args
        shape: tuple[int, ...] = ()
        if type(array) is Call and array.states and type(array.states[0]) is tuple and len(array.states[0]) > 1:
            shape = _ints(array.states[0][1], "size")
        steps, where = contiguous(shape), text_of(device)
        return Tensor(*at, _dtype(dtype), shape, steps, where, None, 0, grad is True, "device")

    _rebuild_xla_tensor = _rebuild_mlc_tensor = _rebuild_device_tensor_from_numpy
