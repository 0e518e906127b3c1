"""What is in a checkpoint: plain, frozen facts, the same for every format.

A reader fills them in, ``judge`` adds the two verdicts and the findings, and everything else only reads them. Nothing
here touches a file or knows how it is shown; ``checkpoint.Checkpoint`` does.

A file can have tens of thousands of ``Tensor``, ``Storage`` and ``Record``. They are named tuples, which are four times
as fast to create as frozen dataclasses; those took a tenth of the time to read such a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import Any, Literal

from transload.dtypes import itemsize
from transload.findings import Finding, Integrity, Problem, Safety
from transload.format import Format, format_of
from transload.frozen import Frozen, NamedTuple, Plain
from transload.nodes import Dict, Pickle, nested

Key = str | int
"""A component of a path: a dictionary key, an attribute name, or an index. Other keys appear as text."""


class Item(NamedTuple):
    """Bytes of a file that are a checkpoint of their own; ``packed`` is how they are encoded, if they are."""

    offset: int
    length: int
    packed: str = ""


class Storage(NamedTuple):
    """Bytes that one or more tensors are views of, tagged with the device they were saved from.

    ``id`` is unique in the checkpoint; ``key`` is its name in the file. ``nbytes`` is the size that the index states,
    ``stored`` how many of these bytes the file really has. ``offset`` is the absolute position of the first byte in
    ``file``; ``None`` if there is none (a missing or compressed record, or the meta device). ``tensors`` are the names
    of the tensors; more than one means that they share memory. ``item`` is what its only tensor is in, if that was not
    opened: then where its bytes are, and in which order, is not known before ``ElementReader.located`` opens it.
    """

    id: str
    key: str
    device: str
    dtype: str
    nbytes: int
    stored: int
    offset: int | None
    record: str = ""
    file: str = ""
    crc32: int | None = None
    compressed: bool = False
    big_endian: bool = False
    item: Item | None = None
    tensors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        *first, crc32, compressed, big_endian, _, tensors = self
        return {
            **dict(zip(self._fields, first, strict=False)),
            "crc32": None if crc32 is None else f"{crc32:08x}",
            "compressed": compressed,
            "byteorder": "big" if big_endian else "little",
            "tensors": list(tensors),
        }


class Tensor(NamedTuple):
    """A tensor, as ``torch.load`` would build it.

    ``path`` leads to it from the root; ``name`` is the path joined by ``/``, or in a pickled module the key in its
    ``state_dict()``. ``offset`` is the offset in elements into the storage, as ``Tensor.storage_offset()``. ``kind``
    is ``strided`` for ordinary tensors, else ``quantized``, ``sparse_coo``, ``sparse_csr`` …, ``nested``, ``meta``,
    ``subclass``, ``device`` (bytes on the CPU, rebuilt on another device), or ``sharded`` (in pieces, over several
    files); tensors that consist of others have them as ``parts``, and no storage. A part of a sharded tensor is a box
    of it, and ``start`` the position of its first element in each dimension; or it is a run of its elements in
    row-major order: then it has one dimension, and ``start`` is one number, the position in the flattened tensor.
    ``cls`` is the class if it is not plain ``torch.Tensor``. ``flags`` are ``conj`` and ``neg``: the stored numbers
    still have to be conjugated or negated.
    """

    path: tuple[Key, ...]
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    storage: str | None
    offset: int = 0
    requires_grad: bool = False
    kind: str = "strided"
    cls: str = ""
    parts: tuple[Tensor, ...] = ()
    file_offset: int | None = None
    flags: tuple[str, ...] = ()
    start: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_sharded(self) -> bool:
        """Whether it is in pieces, over several files."""
        return self.kind == "sharded"

    @property
    def is_dense(self) -> bool:
        """Whether it is an array of numbers, in one piece or in several."""
        return self.kind == "strided" or self.is_sharded

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, or of its parts if it has parts."""
        if self.parts or self.is_sharded:  # a rank may have no part of it
            return sum(part.nbytes for part in self.parts)
        return 0 if self.kind == "meta" else itemsize(self.dtype, self.numel)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        out: dict[str, Any] = {
            "name": self.name,
            "path": list(self.path),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "device": self.device,
            "nbytes": self.nbytes,
            "storage": self.storage,
            "offset": self.offset,
            "file_offset": self.file_offset,
            "requires_grad": self.requires_grad,
            "kind": self.kind,
        }
        if self.cls:
            out["class"] = self.cls
        if self.flags:
            out["flags"] = list(self.flags)
        if self.parts:
            out["parts"] = [part.to_dict() for part in self.parts]
        return out


class GlobalUse(Frozen):
    """A name that the file imports: a class, a function, a constant.

    ``verdict`` is ``data`` (part of plain checkpoints, harmless as used here), ``harmless`` (known, runs no code of the
    file's choosing, but torch refuses it by default), ``unknown``, or ``dangerous``. ``imported``, ``called`` and
    ``built`` count its uses. ``spelling`` is how the file writes it if that differs (Python 2 names). ``stream`` is the
    record it is in.
    """

    module: str
    name: str
    verdict: str
    purpose: str
    imported: int = 0
    called: int = 0
    built: int = 0
    spelling: str = ""
    stream: str = ""

    @property
    def full_name(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        out = {**vars(self), "name": self.full_name}
        del out["module"]
        return out


class Judgement(NamedTuple):
    """The safety verdict on some pickles, every global they name, and why.

    ``inside`` are names nested in those classes, as module and name. ``as_data`` is whether torch refuses some names,
    but ``transload.load`` builds their objects without importing them.
    """

    safety: Safety
    globals: tuple[GlobalUse, ...]
    findings: tuple[Finding, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    as_data: bool = False


class Leaf(Frozen):
    """A value in the tree that is not a tensor: an epoch, a learning rate, a ``torch.device``.

    ``kind`` is the name of its type; ``text`` a short, printable form of the value.
    """

    path: tuple[Key, ...]
    name: str
    kind: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "path": list(self.path), "kind": self.kind, "value": self.text}


AS_TEXT = 1 << 16
"""The ``method`` of a record that a plain pickle stores as a string, each byte as the character with that code."""

AS_ESCAPED = AS_TEXT + 1
"""The same in a pickle of protocol 0, which is text itself: some characters are escaped."""


class Record(NamedTuple):
    """A named run of bytes in a container. ``offset`` is where its payload begins, ``None`` if unknown.

    ``stored`` is the size in the file and ``size`` the size when unpacked; they differ only if it is compressed.
    ``method`` is the compression method of a zip archive, ``AS_TEXT`` or ``AS_ESCAPED``.
    """

    name: str
    offset: int | None
    size: int
    stored: int
    crc32: int | None = None
    method: int = 0


class Value(NamedTuple):
    """Something in a composed checkpoint that is no tensor of its own: a number, an object, or one that has tensors.

    ``path`` leads to it in the object that ``load`` returns. ``node`` is what a pickle says of it, to be built through
    the checkpoint ``file``, which ``OpenCheckpoint.part`` gives. ``position`` is the number of tensors before it.
    """

    path: tuple[Key, ...]
    node: object
    file: str
    position: int = 0


Role = Literal["", "member", "index", "beside", "candidate"]


class Part(Frozen):
    """A file of a directory checkpoint, a shard, or a compiled piece in a package.

    ``kind`` is what it is, in words; ``facts`` what is known about it, e.g. ``(("compute capability", "9.0"),)``.
    ``role`` is what it is for programs: a ``member`` is a complete checkpoint, such as a shard; ``beside`` the
    checkpoint are other files of its directory; a ``candidate`` looks like a checkpoint in a directory that is none.
    """

    name: str
    kind: str
    nbytes: int
    facts: tuple[tuple[str, str], ...] = ()
    role: Role = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "kind": self.kind, "nbytes": self.nbytes, "facts": dict(self.facts)}


class Origin(Plain):
    """Who wrote the file: the possible torch releases, the evidence, and the versions that the file records.

    ``oldest`` and ``newest`` are the bounds of the releases (``"1.13"``, ``"2.0"``); an empty ``newest`` means no upper
    bound, and if both are empty nothing is known. ``recorded`` are versions that somebody wrote into the file, e.g.
    ``(("torch", "2.13.0+cu130"),)``.
    """

    oldest: str = ""
    newest: str = ""
    evidence: tuple[str, ...] = ()
    recorded: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def text(self) -> str:
        """One phrase for a person: ``torch 2.1 to 2.6``."""
        exact = dict(self.recorded).get("torch")
        if exact:
            return f"torch {exact} (recorded in the file)"
        if self.oldest and self.newest:
            span = self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
            return f"torch {span}{self.note}"
        return f"torch {self.oldest} or later" if self.oldest else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        out = {"text": self.text, **super().to_dict(), "recorded": dict(self.recorded)}
        del out["note"]
        return out


class DeviceUse(Plain):
    """How much of a checkpoint is tagged with one device."""

    device: str
    tensors: int
    nbytes: int


class TensorStats(NamedTuple):
    """Statistics of the numbers in a tensor; a complex element counts as two ``numbers``.

    ``min``, ``max``, ``mean`` and ``std`` (as ``torch.std``, by n - 1) are of the finite ones, and ``None`` if there
    are too few, or float64 cannot hold the result. ``histogram`` counts magnitudes: ``(-3, 5)`` for five numbers from
    1/8 up to 1/4. ``overflow`` and ``underflow`` say how many finite numbers would become infinite (NaN in
    ``float8_e4m3fn``), and how many that are not zero would become zero, if rounded to a smaller dtype. Where there are
    no numbers to count, ``numbers`` is 0 and ``note`` says why.
    """

    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    numbers: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    histogram: tuple[tuple[int, int], ...] = ()
    overflow: tuple[tuple[str, int], ...] = ()
    underflow: tuple[tuple[str, int], ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        tables = {"overflow": dict(self.overflow), "underflow": dict(self.underflow)}
        pairs = [list(pair) for pair in self.histogram]
        return {**self._asdict(), "shape": list(self.shape), "histogram": pairs, **tables}


class Contents(Frozen):
    """The fields of a ``Checkpoint``, described there, without its views."""

    path: str
    format: str
    nbytes: int
    flavour: str = ""
    tensors: tuple[Tensor, ...] = ()
    storages: tuple[Storage, ...] = ()
    globals: tuple[GlobalUse, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    records: tuple[Record, ...] = ()
    parts: tuple[Part, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    written_by: Origin = Origin()
    problems: tuple[Problem, ...] = ()
    pickles: tuple[Pickle, ...] = ()
    values: tuple[Value, ...] = ()
    index: str = ""
    """The file with the pickle, if it is an archive that was unpacked into a folder."""
    counted: tuple[tuple[str, int], ...] = ()
    """The number of tensors by device tag, if they were only counted: see ``formats.read_source``."""
    checksummed: bool = False
    """The container has checksums, and all of them were compared and match."""
    safety: Safety = "unknown"
    integrity: Integrity = "unchecked"
    findings: tuple[Finding, ...] = ()
    prediction: str = ""
    """What plain ``torch.load`` will do with it, in a sentence or two."""
    stats: tuple[TensorStats, ...] | None = None
    """Statistics of every tensor, if they were requested."""
    refused: tuple[str, ...] | None = None
    """What ``inspect --refuse`` refuses it for, if that was requested."""

    @property
    def ok(self) -> bool:
        """Whether it contains only data and nothing is wrong with it: the condition for exit code 0.

        With ``--refuse``, whether it is not refused.
        """
        if self.refused is not None:
            return not self.refused
        return self.safety == "data-only" and self.integrity in ("whole", "unchecked")

    @property
    def traits(self) -> Format:
        """What is known about its format, for the parts of transload."""
        return format_of(self.format)

    @property
    def devices(self) -> tuple[DeviceUse, ...]:
        """Tensors and bytes by device tag, most bytes first; shared storages count once."""
        tensors = Counter(map(attrgetter("device"), self.tensors))
        nbytes: dict[str, int] = dict.fromkeys(tensors, 0)
        for device, size in map(attrgetter("device", "nbytes"), self.storages):
            nbytes[device] = nbytes.get(device, 0) + size
        uses = (DeviceUse(device, tensors[device], size) for device, size in nbytes.items())
        return tuple(sorted(uses, key=lambda use: (-use.nbytes, use.device)))

    @property
    def dtypes(self) -> tuple[tuple[str, int, int], ...]:
        """``(dtype, tensors, bytes)``, most bytes first; shared storages count once."""
        counts: dict[str, list[int]] = {}
        for tensor in self.tensors:
            counts.setdefault(tensor.dtype, [0, 0])[0] += 1
        owners = {tensor.storage: tensor.dtype for tensor in reversed(self._all_tensors)}
        for storage in self.storages:
            counts.setdefault(owners.get(storage.id, storage.dtype), [0, 0])[1] += storage.nbytes
        rows = ((name, tensors, nbytes) for name, (tensors, nbytes) in counts.items())
        return tuple(sorted(rows, key=lambda row: (-row[2], row[0])))

    @property
    def _all_tensors(self) -> list[Tensor]:
        return [part for tensor in self.tensors for part in with_parts(tensor)]

    @property
    def tensor_nbytes(self) -> int:
        """The bytes of all storages, each counted once."""
        return sum(map(attrgetter("nbytes"), self.storages))

    @property
    def dead_nbytes(self) -> int:
        """Storage bytes that belong to no tensor: saving a view saves its whole base."""
        sizes: dict[str | None, int] = {storage.id: storage.nbytes for storage in self.storages}
        spans: dict[str | None, list[tuple[int, int]]] = {}
        for tensor in self._all_tensors:
            if sizes.get(tensor.storage) and tensor.numel:
                low, high = byte_span(tensor)
                if low <= 0 and high >= sizes[tensor.storage]:
                    sizes[tensor.storage] = 0  # as nearly always: nothing of it is dead
                else:
                    spans.setdefault(tensor.storage, []).append((low, high))
        dead = 0
        for storage, size in sizes.items():
            covered = end = 0  # the length and the end of the union of spans so far
            for low, high in sorted(spans.get(storage, ())):
                covered += max(0, high - max(low, end))
                end = max(end, high)
            dead += max(0, size - covered)
        return dead

    @property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """The names of tensors that share a storage, in groups."""
        return tuple(storage.tensors for storage in self.storages if len(storage.tensors) > 1)

    @property
    def root(self) -> object:
        """The pickled object, as inert nodes; ``None`` if there is no pickle.

        In the object that a composed checkpoint forms, ``None`` stands for each tensor.
        """
        if self.traits.composed:
            nodes = {value.path: value.node for value in self.values}
            return nested(((path, nodes.get(path)) for path in self.places), Dict.of)
        return next((pickle.root for pickle in self.pickles if pickle.main), None)

    @property
    def places(self) -> tuple[tuple[Key, ...], ...]:
        """The paths of the tensors and values that a composed checkpoint consists of, in order.

        Tensors inside a value are left out.
        """
        values = {value.path: value.position for value in self.values}
        tensors = [
            (tensor.path, position)
            for position, tensor in enumerate(self.tensors)
            if not any(tensor.path[:length] in values for length in range(len(tensor.path) + 1))
        ]
        ordered = sorted([*values.items(), *tensors], key=itemgetter(1))  # values first, where positions are equal
        return tuple([path for path, _ in ordered])

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; ``KeyError`` with similar names if there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        from difflib import get_close_matches

        near = get_close_matches(name, [tensor.name for tensor in self.tensors], 3)
        raise KeyError(f"no tensor {name!r}" + (f"; close: {', '.join(near)}" if near else ""))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; this is what ``--json`` prints."""
        names = ("path", "format", "flavour", "nbytes", "safety", "integrity", "ok", "prediction")
        lists = ("findings", "globals", "parts", "leaves", "storages", "tensors")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            "written_by": self.written_by.to_dict(),
            "devices": [use.to_dict() for use in self.devices],
            "dtypes": [{"dtype": d, "tensors": n, "nbytes": b} for d, n, b in self.dtypes],
            "tensor_nbytes": self.tensor_nbytes,
            "dead_nbytes": self.dead_nbytes,
            "facts": dict(self.facts),
            **{name: [each.to_dict() for each in getattr(self, name)] for name in lists},
            **({} if self.stats is None else {"stats": [each.to_dict() for each in self.stats]}),
            **({} if self.refused is None else {"refused": list(self.refused)}),
        }


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that a tensor with elements covers."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=False))
    return itemsize(tensor.dtype, tensor.offset), itemsize(tensor.dtype, tensor.offset + last + 1)


def with_parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor and all its parts, recursively."""
    yield tensor
    for part in tensor.parts:
        yield from with_parts(part)


def tie_of(tensor: Tensor) -> Any:
    """A key that is equal for tied tensors; ``None`` for a tensor that cannot be tied to another.

    One that consists of a single piece is a copy of that: each rank of a parallel run had its own.
    """
    if len(tensor.parts) > 1 and all(part.start is not None for part in tensor.parts):
        return (tensor.shape, *((tie_of(part), part.start) for part in tensor.parts))
    if tensor.kind != "strided" or tensor.storage is None or not tensor.numel:
        return None
    steps = [(size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1]
    return (tensor.storage, tensor.offset, tensor.shape, tuple(steps), tensor.dtype, tensor.flags)
