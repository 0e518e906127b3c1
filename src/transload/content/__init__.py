"""The bytes of tensors, without torch: row-major, little-endian, in pieces of bounded size, from any checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.content.axes import EndedError, axes_of, is_run
from transload.content.reading import Place, read_run, read_view
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import ContentError, TransloadError
from transload.io.sources import BytesSource, FileSource, Source, SourceLike

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Record, Storage, Tensor
    from transload.loading.files import Files

__all__ = ["Allowance", "Content", "ContentError", "Run", "open_content"]

_PIECE = 4 << 20
_MOST_PACKED = 1032  # times its size that anything can be deflated
_LOST = "Fetch the file again; its other tensors can be read."


class Run(NamedTuple):
    """Bytes of a file; ``file`` is as in ``Storage.file``."""

    file: str
    offset: int
    nbytes: int


class Content:
    """The elements of the tensors of a checkpoint; ``open_file`` gives the source of a ``Storage.file``.

    ``parts`` are its files that are a checkpoint by themselves, by name: itself, or its shards, or none. As a context
    manager it calls ``close`` at the end. May be used from several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        open_file: Callable[[str], Source],
        close: Callable[[], None] | None = None,
        parts: tuple[tuple[str, Checkpoint], ...] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.open_file = open_file
        self.parts = (("", checkpoint),) if parts is None else parts
        self._close = close
        self._storages = {storage.id: storage for storage in checkpoint.storages}
        self._records: dict[str, dict[str, Record]] = {}

    def __enter__(self) -> Any:  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened for it."""
        if self._close is not None:
            self._close()

    def storage(self, tensor: Tensor) -> Storage | None:
        """The storage a tensor looks at."""
        return self._storages.get(tensor.storage or "")

    def pieces(self, tensor: Tensor, size: int = _PIECE) -> Iterator[memoryview]:
        """The elements of a tensor in row-major order, little-endian, without gaps, as numbers (``flags`` resolved).

        Each piece has ``size`` bytes at most, whole elements, and is valid until the next is asked for.
        ``ContentError`` where bytes are missing, and for what is no plain run of numbers: quantized, sparse, nested, a
        subclass.
        """
        try:
            yield from self._pieces(tensor, max(16, size - size % 16))
        except EndedError as end:
            raise self._lost(tensor, f"the file ends {end.missing:,} bytes before they do") from end
        except LookupError as error:
            raise self._lost(tensor, f"its parts do not cover it ({error.args[0]})") from error

    def missing(self, tensor: Tensor) -> str:
        """Why the elements of a tensor cannot all be there, as far as that is clear before they are read; else empty.

        Of one that is made of others, or has no bytes, those are asked.
        """
        for part in tensor.parts:
            if why := self.missing(part):
                return why
        if tensor.kind == "sharded" and sum(part.numel for part in tensor.parts) != tensor.numel:
            return f"{len(tensor.parts):,} of its parts are there, and they do not cover it"
        if tensor.parts or (tensor.kind not in ("strided", "quantized")):
            return ""
        try:
            self._place(tensor)
        except TransloadError as error:
            return error.what.removeprefix(_not_there(tensor))
        return ""

    def run(self, tensor: Tensor) -> Run | None:
        """Where exactly the bytes that ``pieces`` gives lie in a file, if they do."""
        if tensor.kind == "device" and _same(tensor):
            return self.run(tensor.parts[0])
        storage = self.storage(tensor)
        if tensor.kind != "strided" or storage is None or storage.offset is None or storage.compressed:
            return None
        try:
            place = self._place(tensor)
        except ContentError:
            return None
        nbytes = _nbytes(tensor)
        first = itemsize(tensor.dtype, tensor.offset)
        if place.changes(tensor) or not _is_run(tensor) or place.start + first + nbytes > place.source.size:
            return None
        return Run(storage.file, place.start + first, nbytes)

    def _pieces(self, tensor: Tensor, size: int) -> Iterator[memoryview]:
        if tensor.kind == "sharded":
            from transload.content.sharded import read_sharded

            self._refuse_dtype(tensor)
            return read_sharded(tensor, ITEMSIZE[tensor.dtype], size, self.pieces)
        if tensor.kind == "device" and _same(tensor):
            return self._pieces(tensor.parts[0], size)
        if tensor.kind != "strided":
            raise self._no_run(tensor)
        place = self._place(tensor)
        if not tensor.numel:
            return iter(())
        if _is_run(tensor):
            return read_run(place, tensor, itemsize(tensor.dtype, tensor.offset), _nbytes(tensor), size)
        return read_view(place, tensor, size)

    def _place(self, tensor: Tensor) -> Place:
        """Where to read a strided tensor; ``ContentError`` if it is clear now that its bytes are not all there."""
        storage = self.storage(tensor)
        self._refuse_dtype(tensor)
        if storage is None:
            raise self._lost(tensor, "the file does not say where they are")
        width = ITEMSIZE.get(tensor.dtype, 1)
        if not tensor.numel:
            return Place(BytesSource(b""), 0, storage, width)
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        end = itemsize(tensor.dtype, tensor.offset + last + 1)
        if end > storage.stored:
            raise self._lost(tensor, f"{storage.stored:,} of {storage.nbytes:,} bytes of its storage are in the file")
        if storage.offset is None and not storage.compressed:
            raise self._lost(tensor, "where its record begins, the file does not tell")
        if storage.offset is not None:
            return Place(self.open_file(storage.file), storage.offset, storage, width)
        return Place(self._inflating(tensor, storage), 0, storage, width)

    def _refuse_dtype(self, tensor: Tensor) -> None:
        whole = tensor.dtype in ITEMSIZE and itemsize(tensor.dtype, 8) == 8 * ITEMSIZE[tensor.dtype]
        if not whole and (tensor.dtype == "unknown" or tensor.offset or not _is_run(tensor) or tensor.flags):
            raise self._error(tensor, f"has elements of {tensor.dtype}, which are not read by themselves")

    def _inflating(self, tensor: Tensor, storage: Storage) -> Source:
        """A packed storage, unpacked as it is read; one for each reader, since going back begins anew."""
        from transload.opening.inflating import Inflating

        source = self.open_file(storage.file)
        record = self._record(storage, source)
        if record is None or record.offset is None or record.method != 8:  # deflated, as every zip tool does it
            raise self._error(tensor, f"lies in a record that is packed in a way not read here ({storage.record})")
        return Inflating(source, record.offset, record.stored, record.size)

    def _record(self, storage: Storage, source: Source) -> Record | None:
        from transload.formats.zip_index import read_index

        if storage.file not in self._records:
            known = {} if storage.file else {record.name: record for record in self.checkpoint.records}
            self._records[storage.file] = known or read_index(source).records
        return self._records[storage.file].get(storage.record)

    def _no_run(self, tensor: Tensor) -> ContentError:
        kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
        parts = f": it is made of {', '.join(part.name for part in tensor.parts[:4])}" if tensor.parts else ""
        return self._error(tensor, f"is {kind}, no plain run of numbers{parts}")

    def _lost(self, tensor: Tensor, why: str) -> ContentError:
        what = f"{_not_there(tensor)}{why}"
        return ContentError(what, where=self.checkpoint.path, fix=_LOST)

    def _error(self, tensor: Tensor, what: str) -> ContentError:
        return ContentError(f"{_named(tensor)} {what}", where=self.checkpoint.path)


class Allowance:
    """How many bytes may be made of a checkpoint: sixteen times what it holds, and a gigabyte in any case.

    A tensor can claim a trillion elements over a single number (an expanded one does), and so can fifty thousand.
    """

    TIMES = 16
    LEAST = 1 << 30

    def __init__(self, checkpoint: Checkpoint) -> None:
        packed = sum(storage.nbytes for storage in checkpoint.storages if storage.compressed)
        held = checkpoint.nbytes + min(packed, _MOST_PACKED * checkpoint.nbytes)
        self._path = checkpoint.path
        self._held = held
        self.left = max(self.LEAST, self.TIMES * held)

    def spend(self, tensor: Tensor) -> None:
        """Pay for the elements of a tensor; ``ContentError`` if it claims more than is left."""
        if tensor.nbytes > self.left:
            what = f"{_named(tensor)} claims {tensor.nbytes:,} bytes, of a file that holds {self._held:,}"
            raise ContentError(what, where=self._path)
        self.left -= tensor.nbytes


def open_content(f: SourceLike, *, tree: bool = True) -> Content:
    """Read and judge what a path, bytes or a file object holds, and keep it open; ``CannotReadError`` if it cannot be.

    ``tree`` is as for ``read_source``.

    >>> with open_content("model.pt") as content:  # doctest: +SKIP
    ...     for piece in content.pieces(content.checkpoint.tensor("weight")):
    ...         hash.update(piece)
    """
    from transload.formats import no_collecting
    from transload.loading.files import Files

    with no_collecting():
        files = Files(f, tree=tree)
    path = os.fspath(f) if isinstance(f, str | os.PathLike) else ""
    opened = _Opened(files, path)
    return Content(files.checkpoint, opened.file, opened.close, opened.parts())


class _Opened:
    """The files of a checkpoint, by the names storages give them."""

    def __init__(self, files: Files, path: str) -> None:
        is_folder = bool(path) and os.path.isdir(path)  # noqa: PTH112 - pathlib costs ten milliseconds
        several = is_folder or path.endswith(".index.json")
        self._files = files
        self._folder = (path if is_folder else os.path.dirname(path)) if several else None  # noqa: PTH120 - as above
        self._pieces = {piece.path: piece for piece in files.pieces}
        self._others: dict[str, Source] = {}

    def file(self, name: str) -> Source:
        if self._folder is None:
            return self._files.pieces[0].open(name)
        path = os.path.join(self._folder, name)  # noqa: PTH118 - as above
        piece = self._pieces.get(path)
        if piece is not None:
            return piece.open(name)
        if "" in self._pieces:  # an unpacked archive has a file for every tensor: too many to be held open
            return FileSource(path)
        if name not in self._others:
            self._others[name] = FileSource(path)
        return self._others[name]

    def parts(self) -> tuple[tuple[str, Checkpoint], ...]:
        """The files that are a checkpoint by themselves, under those names."""
        pieces = self._files.pieces
        if self._folder is None:
            return tuple(("", piece.checkpoint) for piece in pieces)
        folder = self._folder or "."
        return tuple((os.path.relpath(piece.path, folder), piece.checkpoint) for piece in pieces if piece.path)

    def close(self) -> None:
        for source in self._others.values():
            source.close()
        self._files.close()


def _named(tensor: Tensor) -> str:
    return tensor.name or "the tensor"


def _not_there(tensor: Tensor) -> str:
    return f"the bytes of {_named(tensor)} are not all there: "


def _nbytes(tensor: Tensor) -> int:
    return itemsize(tensor.dtype, tensor.numel)


def _is_run(tensor: Tensor) -> bool:
    return not tensor.numel or is_run(axes_of(tensor.shape, tensor.stride))


def _same(tensor: Tensor) -> bool:
    """Whether a tensor that is rebuilt on a device has the elements of its only part."""
    return len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype
