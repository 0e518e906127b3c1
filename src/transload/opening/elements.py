"""The elements of a checkpoint's tensors, in row-major order; without torch.

``ElementReader.chunks`` is the entry point; ``ElementReader.elements`` finds the bytes of a strided tensor, or of a
view of it. Contiguous elements are read as they are, others are gathered, and a sharded tensor is assembled from its
parts.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, Literal

from transload.checkpoint import Checkpoint, Record, Storage, Tensor
from transload.contents import AS_ESCAPED, AS_TEXT, Item
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import ContentError, TransloadError
from transload.findings import quoted
from transload.formats import read_source
from transload.formats.nested import item_source, moved_storage, unpacked_item
from transload.frozen import NamedTuple
from transload.geometry import Axis, Box, View, axes_of, box_words, boxes, boxes_of_run, contiguous, cover
from transload.io.packed import MAX_RATIO, Inflating, from_text, inflated
from transload.io.sources import BytesSource, Source, refuse_fault
from transload.opening.jobs import file_ends

WINDOW = 16 << 20
"""Bytes of elements that are reordered in one step."""

_CHUNK = 4 << 20
_NOTHING: Source = BytesSource(b"")
_MOST_CUT = 8  # a tensor that is cut in many dimensions could have billions of corners

_UNPACK: dict[int, Callable[..., Iterator[bytes]]] = {
    8: inflated,  # deflate, as zip tools write it
    AS_TEXT: partial(from_text, "utf-8"),
    AS_ESCAPED: partial(from_text, "raw-unicode-escape"),
}


class FileRange(NamedTuple):
    """Bytes of a file; ``file`` is as in ``Storage.file``."""

    file: str
    offset: int
    nbytes: int


class ElementReader:
    """The elements of a checkpoint's tensors; ``open_file`` gives the source of a ``Storage.file``.

    ``files`` are those that are complete checkpoints, by name: the file itself, or the shards, or none. May be used
    from several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        open_file: Callable[[str], Source],
        files: tuple[tuple[str, Checkpoint], ...] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.open_file = open_file
        self.files = (("", checkpoint),) if files is None else files
        self._storages = {storage.id: storage for storage in checkpoint.storages}
        self._records: dict[str, dict[str, Record]] = {}
        self._located: dict[str, Tensor] = {}
        self._packed: dict[str, Inflating] = {}
        self._last = "", _NOTHING
        kept_apart = any(problem.code == "ranks-unmerged" for problem in checkpoint.problems)
        self.has_pieces = kept_apart or not checkpoint.traits.several
        """Whether what a rank has of a tensor is all that is expected: nothing puts it together with the rest."""

    def header_metadata(self) -> dict[str, str]:
        """The metadata of all files whose header has texts besides tensors; each shard may have that of all shards."""
        from transload.formats.safetensors import header_metadata

        texts = [file for file, part in self.files if part.traits.metadata == "text"]
        return {key: text for file in texts for key, text in header_metadata(self.open_file(file)).items()}

    def sources(self) -> Iterator[Source]:
        """One of the files that have its bytes, if there is any: the others are probably on the same disk."""
        for storage in self.checkpoint.storages[:1]:
            with suppress(TransloadError):  # whoever needs its bytes gets the error
                yield self.open_file(storage.file)

    def refuse_fault(self, error: TransloadError) -> None:
        """As the function of this name, for all files."""
        refuse_fault(error, self.checkpoint.path)

    def storages(self) -> Iterator[Storage]:
        """All storages; one in an item that was opened since the checkpoint was read, as it is there."""
        for storage in self.checkpoint.storages:
            found = self._located.get(storage.id) if storage.item and not storage.item.packed else None
            yield self._storages[found.storage or ""] if found else storage

    def storage(self, tensor: Tensor) -> Storage | None:
        """The storage of a tensor."""
        return self._storages.get(tensor.storage or "")

    def chunks(self, tensor: Tensor, size: int = _CHUNK) -> Iterator[memoryview]:
        """The elements of a tensor in row-major order, little-endian, with ``flags`` (conj, neg) resolved.

        Each chunk has at most ``size`` bytes, holds whole elements, and is valid until the next one is read.
        ``ContentError`` as for ``reads``, or if the file ends too early.
        """
        size = max(16, size - size % 16)
        reads = self.reads(tensor)
        shape, window = tensor.shape, WINDOW
        if len(reads) == 1:
            elements = reads[0].elements
            if elements.view.is_contiguous:  # a chunk need not begin with a row
                shape, window = (elements.nbytes // elements.itemsize,), size
                flat = elements._replace(view=View(shape, (1,), elements.view.offset))
                reads = [Read(flat, Box((0,), shape))]
        width = reads[0].elements.itemsize if reads else 1
        buffer = memoryview(bytearray(min(window, prod(shape) * width) if reads else 0))
        try:
            for box in boxes(shape, window // width) if reads else ():
                block = buffer[: prod(box.shape) * width]
                for read in reads:
                    read.fill(block, box)
                for at in range(0, len(block), size):
                    yield block[at : at + size]
        except MissingBytesError as end:
            raise self.incomplete(tensor, read.elements.ends_at(end.position)) from end

    def reads(self, tensor: Tensor, box: Box | None = None) -> list[Read]:
        """What to read for a tensor, or for a box of it: of a sharded one, only the shards that the box touches.

        ``ContentError`` if some elements are known to be missing, or if the tensor is not a dense array of numbers:
        quantized, sparse, nested, a subclass.
        """
        tensor = self.located(_stored(tensor))
        rank = len(tensor.shape)
        whole = Box((0,) * rank, tensor.shape)
        if tensor.kind == "strided":
            if box is None:
                return [Read(self.elements(tensor), whole)]
            view = View(tensor.shape, tensor.stride, tensor.offset).part(box)
            return [Read(self.elements(tensor, view), Box(whole.start, box.shape))]
        box = box or whole
        if not tensor.is_sharded:
            kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
            parts = f": it is made of {', '.join(part.name for part in tensor.parts[:4])}" if tensor.parts else ""
            raise self._error(tensor, f"is {kind}, not a dense array of numbers{parts}")
        self._refuse_dtype(tensor)
        reads, found = [], []
        try:
            placed = [(part, *each) for part in tensor.parts if part.numel for each in _placed(part, tensor.shape)]
        except LookupError:
            raise self.incomplete(tensor, self.missing(tensor)) from None
        for part, place, shard in placed:
            if (shared := box.intersection(place)) is not None:
                if why := self.missing(part) or _other_dtype(part, tensor):
                    raise self.incomplete(tensor, why)
                found.append(shared)
                inner = self.reads(shard, shared.within(place))
                into = shared.within(box).start
                reads += [read._replace(into=read.into.moved(into)) for read in inner]
        if not _are_filling(box, found):
            raise self.incomplete(tensor, self.missing(tensor))
        return reads

    def missing(self, tensor: Tensor) -> str:
        """Why some elements of a tensor are missing, as far as that is known before reading; empty if none are.

        For a tensor that consists of others, the reason of the first one with missing elements.
        """
        for part in tensor.parts:
            if why := self.missing(part) or (tensor.is_sharded and _other_dtype(part, tensor)):
                return why
        if tensor.is_sharded and not is_covered(tensor):
            lost = gaps_of(tensor, tensor.parts)
            who = "this file does not have" if self.has_pieces else "no file has"
            if [box.shape for box in lost] == [tensor.shape]:
                return f"{who} any of it"
            return f"{who} {box_words(lost, tensor.shape)}" if lost else "parts of it overlap"
        if tensor.parts or (tensor.kind not in ("strided", "quantized")):
            return ""
        try:
            self.elements(self.located(tensor))
        except TransloadError as error:
            self.refuse_fault(error)
            return error.what.removeprefix(_incomplete(tensor))
        return ""

    def located(self, tensor: Tensor) -> Tensor:
        """A tensor in an item that was not opened, as it is there; any other as it is.

        ``ContentError`` if the item cannot be read, or has another tensor.
        """
        storage = self.storage(tensor)
        if storage is None or storage.item is None:
            return tensor
        if storage.id not in self._located:
            self._located[storage.id] = self._open_item(tensor, storage, storage.item)
        found = self._located[storage.id]
        if found.path:  # one of several in an object
            return tensor._replace(storage=found.storage)
        if (found.kind, found.dtype, found.shape) != (tensor.kind, tensor.dtype, tensor.shape):
            kind = f"a {found.kind} " if found.kind != tensor.kind else ""
            described = f"{kind}{found.dtype} {list(found.shape)}, not {tensor.dtype} {list(tensor.shape)}"
            raise self.incomplete(tensor, f"{storage.file} has {described}")
        return tensor._replace(storage=found.storage, stride=found.stride, offset=found.offset, flags=found.flags)

    def _open_item(self, tensor: Tensor, storage: Storage, item: Item) -> Tensor:
        if storage.stored < storage.nbytes:
            raise self.incomplete(tensor, f"{storage.file} ends before they do")
        source = self.open_file(storage.file)
        try:
            inside = item_source(source, item, f"{storage.file} › {tensor.name}")
        except (EOFError, ImportError) as error:
            raise self._error(tensor, f"cannot be unpacked: {error}") from error
        checkpoint = read_source(inside)
        found = next((each for each in checkpoint.tensors if not each.path), None)
        # If it has a record, an object was read before: only where its bytes are is not known.
        key = found.storage if found else storage.key if storage.record else None
        place = next((each for each in checkpoint.storages if each.id == key), None)
        if place is None:
            why = checkpoint.problems[0].detail if checkpoint.problems else "it is an object"
            raise self.incomplete(tensor, f"{storage.file} has no tensor at byte {item.offset:,}: {why}")
        name = f"{storage.id}:{place.id}"
        if item.packed:
            self._packed[name] = Inflating(source, item.offset, item.length, inside.size, unpacked_item)
            self._storages[name] = place._replace(id=name, file=storage.file)
        else:
            moved = moved_storage(place, f"{storage.id}:", (), item.offset, storage.file)
            self._storages[name] = moved._replace(tensors=storage.tensors)
        return (found or tensor)._replace(storage=name)

    def file_range(self, tensor: Tensor) -> FileRange | None:
        """Where a file has exactly the bytes that ``chunks`` yields; ``None`` if it does not."""
        tensor = _stored(tensor)
        storage = self.storage(tensor)
        if tensor.kind != "strided" or storage is None or storage.offset is None or storage.compressed:
            return None
        try:
            elements = self.elements(tensor)
        except ContentError:
            return None
        is_cut = elements.offset + elements.nbytes > elements.source.size
        if elements.differ("little") or not elements.view.is_contiguous or is_cut:
            return None
        return FileRange(storage.file, storage.offset if elements.nbytes == 0 else elements.offset, elements.nbytes)

    def elements(self, tensor: Tensor, view: View | None = None) -> Elements:
        """The elements of a strided tensor, or of a view of its storage.

        ``ContentError`` if some of their bytes are known to be missing.
        """
        storage = self.storage(tensor)
        self._refuse_dtype(tensor)
        if storage is None:
            raise self.incomplete(tensor, "the file does not say where they are")
        view = view or View(tensor.shape, tensor.stride, tensor.offset)
        source, start, extent = _NOTHING, 0, view.extent
        if extent:
            if itemsize(tensor.dtype, view.offset + extent) > storage.stored:
                stored = f"{storage.stored:,} of {storage.nbytes:,}"
                raise self.incomplete(tensor, f"{stored} bytes of its storage are in the file")
            if storage.offset is None and not storage.compressed:
                raise self.incomplete(tensor, "the file does not say where its record begins")
            source, start = self._packed.get(storage.id) or self.open_file(storage.file), storage.offset or 0
            if storage.offset is None:
                # Tensors that share a storage are often read one after the other, and reading on is cheap.
                last, source = self._last
                if last != storage.id:
                    unpacked = self.unpacked(storage)
                    if unpacked is None:
                        raise self._error(tensor, f"is in a record with an unsupported compression ({storage.record})")
                    source = unpacked
                    self._last = storage.id, source
        width = ITEMSIZE.get(tensor.dtype, 1)
        swapped = storage.big_endian and component(tensor.dtype) > 1
        nbytes = itemsize(tensor.dtype, extent)
        return Elements(source, start, view, nbytes, tensor.dtype, width, swapped, tensor.flags)

    def unpacked(self, storage: Storage) -> Inflating | None:
        """A source that decodes a storage: deflated in a record, or text in a pickle. ``None`` if torch cannot read it.

        Each reader needs a separate source, since seeking back starts over.
        """
        from transload.formats.zip import read_index

        source = self.open_file(storage.file)
        if storage.file not in self._records:
            records = {} if storage.file else {record.name: record for record in self.checkpoint.records}
            self._records[storage.file] = records or read_index(source).records
        record = self._records[storage.file].get(storage.record)
        unpack = _UNPACK.get(record.method) if record else None
        if record is None or record.offset is None or unpack is None:
            return None
        return Inflating(source, record.offset, record.stored, record.size, unpack)

    def _refuse_dtype(self, tensor: Tensor) -> None:
        if tensor.dtype in ITEMSIZE and itemsize(tensor.dtype, 8) == 8 * ITEMSIZE[tensor.dtype]:
            return
        scattered = not View(tensor.shape, tensor.stride).is_contiguous
        if tensor.dtype == "unknown" or tensor.offset or scattered or tensor.flags:
            raise self._error(tensor, f"has elements of {tensor.dtype}, which cannot be read one by one")

    def incomplete(self, tensor: Tensor, why: str) -> ContentError:
        """The error for a tensor whose bytes are not all in the file."""
        fix = "Fetch the file again; its other tensors can be read."
        if tensor.is_sharded and self.checkpoint.traits.several and self.has_pieces:
            fix = "Nothing says how the pieces of the ranks are put together: load it with the library that wrote it."
        elif any(problem.code == "rank-file" for problem in self.checkpoint.problems):
            fix = "The files of the other ranks have the rest: name the folder with all of them."
        elif self.checkpoint.traits.several:
            command = f"$ transload verify {quoted(self.checkpoint.path)}"
            fix = f"Fetch its files again.\nThis names all that is lost.\n{command}"
        return ContentError(f"{_incomplete(tensor)}{why}", where=self.checkpoint.path, fix=fix)

    def _error(self, tensor: Tensor, what: str) -> ContentError:
        return ContentError(f"{_named(tensor)} {what}", where=self.checkpoint.path)


class Allowance:
    """A limit on the bytes produced from a checkpoint: 16 times its size, and at least 1 GiB.

    An expanded tensor can claim a trillion elements of a single stored number, and a file can have many of those.
    """

    TIMES = 16
    LEAST = 1 << 30

    def __init__(self, checkpoint: Checkpoint) -> None:
        packed = sum(storage.nbytes for storage in checkpoint.storages if storage.compressed)
        nbytes = checkpoint.nbytes + min(packed, MAX_RATIO * checkpoint.nbytes)
        self._path = checkpoint.path
        self._nbytes = nbytes
        self.left = max(self.LEAST, self.TIMES * nbytes)

    def spend(self, tensor: Tensor) -> None:
        """Subtract the bytes of a tensor; ``ContentError`` if it claims more than is left."""
        if tensor.nbytes > self.left:
            what = f"{_named(tensor)} claims {tensor.nbytes:,} bytes, and the file has {self._nbytes:,}"
            raise ContentError(what, where=self._path)
        self.left -= tensor.nbytes


def _named(tensor: Tensor) -> str:
    return tensor.name or "the tensor"


def _incomplete(tensor: Tensor) -> str:
    return f"the bytes of {_named(tensor)} are incomplete: "


def is_constant(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Whether a tensor of a program is a constant of its code, not a weight."""
    runs = checkpoint.traits.runs
    if runs == "torch.jit":
        return tensor.name.startswith("CONSTANTS.")
    return runs == "torch.export" and "constants" in tensor.path[:2]


def _stored(tensor: Tensor) -> Tensor:
    """The tensor that the file stores: for one that torch rebuilds on a device, its part, unless that is converted."""
    same = tensor.kind == "device" and len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype
    return _stored(tensor.parts[0]) if same else tensor


# -- boxes of sharded tensors


def _placed(part: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a sharded tensor that a part fills, each with the elements of the part that fill it."""
    if part.start is None or len(part.start) != len(part.shape):
        raise LookupError("a part without a place")
    if len(part.start) == len(shape):
        yield Box(part.start, part.shape), part
        return
    begin = part.start[0] if len(part.start) == 1 else -1
    end = begin + part.numel
    if not 0 <= begin <= end <= prod(shape):
        raise LookupError("a part with a place in another shape")
    part = _stored(part)
    offset, (step,) = part.offset, part.stride
    for box in boxes_of_run(shape, begin, end):
        stride = tuple(step * each for each in contiguous(box.shape))
        yield box, part._replace(shape=box.shape, stride=stride, offset=offset)
        offset += step * prod(box.shape)


def _other_dtype(part: Tensor, tensor: Tensor) -> str:
    """What to say if a part of a sharded tensor has another dtype, and so elements of another size; else empty."""
    return f"a part of it has elements of {part.dtype}, not {tensor.dtype}" if part.dtype != tensor.dtype else ""


def is_covered(tensor: Tensor) -> bool:
    """Whether each element of a sharded tensor is in exactly one part: where two overlap, either may be right."""
    shape, rank = tensor.shape, len(tensor.shape)
    if all(part.start is not None and len(part.start) == 1 for part in tensor.parts):  # runs need no boxes
        shape, rank = (tensor.numel,), 1
    try:
        parts = [box for part in tensor.parts if part.numel for box, _ in _placed(part, shape)]
    except LookupError:
        return False
    return _are_filling(Box((0,) * rank, shape), parts)


def _are_filling(whole: Box, parts: list[Box]) -> bool:
    """Whether boxes fill a larger one without overlap.

    Each corner of a box has a sign. If they do, the signs of equal corners cancel out, except at the corners of the
    larger box.
    """
    cut = [dim for dim in range(len(whole.shape)) if any(box.slices[dim] != whole.slices[dim] for box in parts)]
    if len(cut) > _MOST_CUT:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for box in (*parts, whole) if prod(whole.shape) else parts:
        edges = [((box.start[dim], 1), (box.start[dim] + box.shape[dim], -1)) for dim in cut]
        for corner in product(*edges):
            signs[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner) * (-1 if box is whole else 1)
    return not any(signs.values())


def gaps_of(tensor: Tensor, parts: Iterable[Tensor]) -> list[Box]:
    """The boxes of a sharded tensor that some of its parts do not fill."""
    covered: list[Box] = []
    for part in parts:
        with suppress(LookupError):
            covered += [box for box, _ in _placed(part, tensor.shape)]
    return cover(tensor.shape, covered).lost


# -- reading elements in order

FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""What ``memoryview.cast`` calls elements of these sizes."""

_BLOCK = 2 << 20  # bytes read at once to be reordered: they fit a CPU's cache
_PAGE = 4096
_SPARSE_RATIO = 4
_RUN = 4096  # bytes of a run that are worth a system call, if there are as many that are not wanted before the next run
_COPIED = 16  # copying a run of this many elements takes as long as copying a single one
_LINE = 64  # bytes of a cache line: without this padding, rows a power of two apart would compete for a few lines
_LONG = 1024
_MANY = 1 << 18
_OTHER_SIGN = bytes(value ^ 0x80 for value in range(256))
_COMPLEX = {"complex32", "bcomplex32", "complex64", "complex128"}


class MissingBytesError(Exception):
    """A source ends at ``position``, before the elements do."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _read_all(source: Source, position: int, out: memoryview) -> None:
    count = source.readinto(position, out)
    if count < len(out):
        raise MissingBytesError(position + count)


class Elements(NamedTuple):
    """The elements of a view of a storage that begins at ``start`` in a source."""

    source: Source
    start: int
    view: View
    nbytes: int
    """The bytes from the first element to the last, inclusive."""
    dtype: str
    itemsize: int
    swapped: bool
    """Whether they are big-endian."""
    flags: tuple[str, ...]

    @property
    def offset(self) -> int:
        """The position of the first element in the source."""
        return self.start + self.view.offset * self.itemsize

    def differ(self, order: str) -> bool:
        """Whether the bytes in the file differ from those of the numbers in a byte order."""
        return bool(self.flags) or (self.swapped != (order == "big") and self.itemsize > 1)

    def ends_at(self, position: int) -> str:
        """What to say if the source ends at a position, before the last element."""
        return file_ends(self.offset + self.nbytes - position)

    def read(self, box: Box, out: memoryview, order: str = "little") -> None:
        """Read the elements of a box of the view into a buffer of their size: in row-major order, as plain numbers."""
        view = self.view.part(box)
        if view.is_contiguous:
            _read_all(self.source, self.start + view.offset * self.itemsize, out)
        else:
            width, view = _as_integers(self.itemsize, view)
            gather = _Gather(self.source, self.start, width)
            gather.fill(axes_of(view.shape, view.stride), view.offset, out.cast(FORMATS[width]))
        width, flags = component(self.dtype), self.flags
        if self.swapped and (flags or order == "little"):
            swap_bytes(out, width)
        if self.dtype in _COMPLEX:
            if "neg" in flags:
                _change_sign(out, width - 1, 2 * width)
            if ("neg" in flags) != ("conj" in flags):
                _change_sign(out, 2 * width - 1, 2 * width)
        elif "neg" in flags and self.dtype.startswith(("float", "bfloat")):
            _change_sign(out, width - 1, width)
        elif "neg" in flags:
            mask = (1 << 8 * width) - 1
            values = (int.from_bytes(out[at : at + width], "little") for at in range(0, len(out), width))
            out[:] = b"".join((-value & mask).to_bytes(width, "little") for value in values)
        if order == "big" and (flags or not self.swapped):
            swap_bytes(out, width)


class Read(NamedTuple):
    """Elements in a file, and the box of what is wanted that they fill."""

    elements: Elements
    into: Box

    def fill(self, block: memoryview, box: Box) -> None:
        """Read what belongs into a box into the memory of that box, which is in row-major order."""
        if box == self.into:  # as of most tensors
            self.elements.read(box.within(box), block)
            return
        shared = box.intersection(self.into)
        if shared is None:
            return
        width, nbytes = self.elements.itemsize, prod(shared.shape) * self.elements.itemsize
        there = View(box.shape, contiguous(box.shape)).part(shared.within(box))
        if there.is_contiguous:
            at = there.offset * width
            self.elements.read(shared.within(self.into), block[at : at + nbytes])
        else:
            data = memoryview(bytearray(nbytes))
            self.elements.read(shared.within(self.into), data)
            _scatter(data, block, there, width)


def swap_bytes(data: memoryview, width: int) -> None:
    """Reverse the byte order of numbers, in place; bytes after the last whole number stay.

    >>> data = bytearray(b"abcde")
    >>> swap_bytes(memoryview(data), 2); data
    bytearray(b'badce')
    """
    data = data[: len(data) - len(data) % width]
    for at in range(0, len(data) if width > 1 else 0, WINDOW):
        numbers = array(FORMATS[width], data[at : at + WINDOW].tobytes())
        numbers.byteswap()
        data[at : at + WINDOW] = memoryview(numbers).cast("B")


def component(dtype: str) -> int:
    """The bytes of one number; a complex element is two numbers."""
    width = ITEMSIZE.get(dtype, 1)
    return width // 2 if dtype in _COMPLEX else width


def _change_sign(data: memoryview, first: int, every: int) -> None:
    """Flip the highest bit of the last byte of each number, which is its sign."""
    data[first::every] = data[first::every].tobytes().translate(_OTHER_SIGN)


def _as_integers(itemsize: int, view: View) -> tuple[int, View]:
    """The item size and view to copy elements as integers; those wider than 8 bytes are two integers each.

    >>> _as_integers(16, View((3,), (2,), 5))
    (8, View(shape=(3, 2), stride=(4, 1), offset=10))
    """
    if itemsize in FORMATS:
        return itemsize, view
    stride = (*(2 * step for step in view.stride), 1)
    return itemsize // 2, View((*view.shape, 2), stride, 2 * view.offset)


def _scatter(data: memoryview, block: memoryview, target: View, itemsize: int) -> None:
    """Copy row-major elements to a view of a block."""
    width, here = _as_integers(itemsize, View(target.shape, contiguous(target.shape)))
    _, there = _as_integers(itemsize, target)
    axes = [Axis(*each) for each in zip(here.shape, here.stride, there.stride, strict=True) if each[0] > 1]
    _Gather(BytesSource(data), 0, width).fill(axes, 0, block.cast(FORMATS[width]), there.offset)


class _Gather:
    """Reads views of a storage that begins at ``start`` in a source, and reorders their elements.

    ``itemsize`` is one of ``FORMATS``. Gaps between the elements are read too, unless they are large.
    """

    def __init__(self, source: Source, start: int, itemsize: int) -> None:
        self._source = source
        self._start = start
        self._itemsize = itemsize
        self._format = FORMATS[itemsize]
        self._window = memoryview(b"")  # kept: allocating memory for each read would cost as much as the read

    def fill(self, axes: list[Axis], first: int, out: memoryview, at: int = 0) -> None:
        """Copy the elements of a view that begins at element ``first`` into ``out``, from element ``at`` on."""
        width = self._itemsize
        outer = max(axes, key=lambda axis: axis.step, default=Axis(1, 1, 1))
        rest = [axis for axis in axes if axis is not outer]
        inner = 1 + sum((axis.size - 1) * axis.step for axis in rest)  # elements from the first of a row to its last
        whole = len(rest) == 1 and rest[0].step == rest[0].out_step == 1  # a row is one run on both sides
        if whole and min(inner, outer.step - inner) * width >= _RUN:
            for row in range(outer.size):
                place, start = at + row * outer.out_step, self._start + (first + row * outer.step) * width
                _read_all(self._source, start, out[place : place + inner].cast("B"))
            return
        # Where gaps are large, only the needed part of each row is read.
        scattered = outer.step * width >= _PAGE and inner * _SPARSE_RATIO <= outer.step
        step = inner + _LINE // width if scattered else outer.step
        most = (_BLOCK // width - inner) // max(1, step) + 1  # rows in a block
        if most < 2:
            for row in range(outer.size):
                self.fill(rest, first + row * outer.step, out, at + row * outer.out_step)
            return
        for row in range(0, outer.size, most):
            count, start = min(most, outer.size - row), self._start + (first + row * outer.step) * width
            nbytes = (inner + (count - 1) * step) * width
            if len(self._window) < nbytes:
                self._window = memoryview(bytearray(nbytes))
            window = self._window[:nbytes]
            if scattered:
                for each in range(count):
                    place = each * step * width
                    _read_all(self._source, start + each * outer.step * width, window[place : place + inner * width])
            else:
                _read_all(self._source, start, window)
            rows = Axis(count, step, outer.out_step)
            self._copy([rows, *rest], window.cast(self._format), out, at + row * outer.out_step)

    def _copy(self, axes: list[Axis], window: memoryview, out: memoryview, at: int) -> None:
        """Copy run by run, along a dimension that is contiguous on both sides, or else the longest."""
        longest = max(axes, key=lambda axis: axis.size * (_COPIED if axis.step == axis.out_step == 1 else 1))
        # numpy copies many elements ten times as fast, but gains too little on long runs to be worth its import.
        long_runs = longest.step == longest.out_step == 1 and longest.size >= _LONG
        much = len(out) >= _MANY and ("numpy" in sys.modules or not long_runs)
        if much and (numpy := numpy_or_none()) is not None:
            shape, kind, width = [axis.size for axis in axes], f"u{self._itemsize}", self._itemsize
            source = numpy.ndarray(shape, kind, window, 0, [axis.step * width for axis in axes])
            target = numpy.ndarray(shape, kind, out[at:], 0, [axis.out_step * width for axis in axes])
            target[...] = source
            return
        size, step, out_step = longest
        reach, into = (size - 1) * step + 1, (size - 1) * out_step + 1
        others = [axis for axis in axes if axis is not longest]
        for index in product(*(range(axis.size) for axis in others)):
            here = sum(number * axis.step for number, axis in zip(index, others, strict=True))
            there = at + sum(number * axis.out_step for number, axis in zip(index, others, strict=True))
            if step:
                run = window[here : here + reach : step]
            else:
                run = memoryview(window[here : here + 1].tobytes() * size).cast(self._format)
            out[there : there + into : out_step] = run


@cache
def numpy_or_none() -> Any:
    """The module numpy, if it is installed and works."""
    try:
        import numpy as np
    except Exception:  # noqa: BLE001 - an installation can be broken in any way
        return None
    return np
