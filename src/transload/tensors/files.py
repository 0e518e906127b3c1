"""An open checkpoint: the file or files behind it, open as long as anybody reads from them.

``OpenCheckpoint`` reads and judges what it is given and keeps it open: what was judged is what is read. ``load`` takes
the ``pieces`` that are built by themselves; lazy handles and the readers of elements take the bytes of single storages,
by the names that storages give to files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, cast

from transload.errors import BrokenFileError, LoadError, UsageError
from transload.frozen import facts
from transload.io.sources import BytesSource, FileSource, ObjectSource, Slice, Source, SourceLike, journal_path

if TYPE_CHECKING:
    from zlib import _Decompress

    from transload.checkpoint import Checkpoint, Key, Record, Storage
    from transload.tensors.paths import Paths

__all__ = ["Inflating", "OpenCheckpoint", "PackedStorages", "Piece"]


class OpenCheckpoint:
    """Everything opened for one checkpoint.

    ``checkpoint`` is the judged whole, ``pieces`` what is built by itself, in order: the one file, or the shards.
    ``tree`` is as for ``read_source``. As a context manager it closes what it has opened. May be used from several
    threads.
    """

    def __init__(self, f: SourceLike, *, tree: bool = True) -> None:
        from transload.judge import judge

        self.closed = False
        self._open: dict[str, tuple[Source, Checkpoint | None]] = {}
        self._tree = tree
        self._folder: str | None = None  # where the names of files begin, if there are several
        self._inflating: dict[str, Source] = {}
        self._lock = Lock()
        try:
            read, self.pieces = self._read(f)
            self.checkpoint = judge(_without_neighbours(read), told=tree)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenCheckpoint:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, and put a file object back to where it stood; twice does no harm."""
        with self._lock:
            self.closed = True
            for source, _ in self._open.values():
                source.close()
            self._open.clear()
            self._inflating.clear()

    def check_open(self) -> None:
        """``UsageError`` if it was closed."""
        if self.closed:
            raise UsageError("this checkpoint was closed", where=self.checkpoint.path, fix="Open it again to read.")

    def check_unchanged(self) -> None:
        """``BrokenFileError`` if somebody wrote to a file while it was read: old and new may be mixed in what came."""
        for source, _ in self._open.values():
            if isinstance(source, _File) and source.changed:
                fix = "Read it again when nobody writes to it; transload.save puts a new file in its place at once."
                raise BrokenFileError("it was changed while it was read", where=source.name, fix=fix)

    def stay_behind(self) -> None:
        """Leave a file object behind what was read of it: several objects can be written one after the other."""
        source = self._open.get("", (None, None))[0]
        if isinstance(source, _Object | _Leftovers) and self.checkpoint.format == "torch-legacy":
            last = max((s.offset + s.nbytes for s in self.checkpoint.storages if s.offset is not None), default=0)
            source.leave_at(max(last, sum(pickle.end for pickle in self.checkpoint.pickles)))

    # -- bytes of storages

    def storage(self, id: str | None) -> Storage | None:
        """The storage of that id."""
        return self._storages.get(id or "")

    @cached_property
    def _storages(self) -> dict[str, Storage]:
        return {storage.id: storage for storage in self.checkpoint.storages}

    def file(self, name: str = "") -> Source:
        """One of its files, by the name storages give it; it stays open until all are closed."""
        with self._lock:
            self.check_open()
            if self._folder is None:
                return self.pieces[0].open(name)
            path = os.path.join(self._folder, name)  # noqa: PTH118 - pathlib costs ten milliseconds
            piece = self._by_path.get(path) or self._by_path.get("")
            return self._beside(path) if piece is None else piece.open(name)

    @cached_property
    def _by_path(self) -> dict[str, Piece]:
        return {piece.path: piece for piece in self.pieces}

    @property
    def parts(self) -> tuple[tuple[str, Checkpoint], ...]:
        """The files that are a checkpoint by themselves, under the names storages give them."""
        if self._folder is None:
            return tuple(("", piece.checkpoint) for piece in self.pieces)
        folder = self._folder or "."
        return tuple((os.path.relpath(piece.path, folder), piece.checkpoint) for piece in self.pieces if piece.path)

    def bytes_of(self, storage: Storage) -> tuple[Source, int]:
        """Where to read a storage, and the position of its first byte; ``LoadError`` if there is no such place."""
        if storage.offset is None and not storage.compressed:
            raise BrokenFileError(f"storage {storage.key} is not in the file", where=self.checkpoint.path)
        source = self.file(storage.file)
        if storage.offset is not None:
            return source, storage.offset
        with self._lock:
            known = self._inflating.get(storage.id) or self._packed.open(storage, source)
            if known is None:
                what = f"storage {storage.key} lies in a record packed in a way torch does not read ({storage.record})"
                raise LoadError(what, where=self.checkpoint.path)
            self._inflating[storage.id] = known
        return known, 0

    @cached_property
    def _packed(self) -> PackedStorages:
        return PackedStorages(self.checkpoint)

    # -- values

    def node(self, path: tuple[Key, ...]) -> tuple[Piece, object] | None:
        """The piece in which a path leads somewhere, and the inert node there; ``None`` if it leads nowhere."""
        from transload.tensors.paths import NOWHERE

        for piece, paths in zip(self.pieces, self._paths, strict=True):
            found = paths.at(path)
            if found is not NOWHERE:
                return piece, found
        return None

    @cached_property
    def _paths(self) -> list[Paths]:
        from transload.tensors.paths import Paths

        return [Paths(piece.checkpoint.root) for piece in self.pieces]

    # -- opening

    def _read(self, f: SourceLike) -> tuple[Checkpoint, tuple[Piece, ...]]:
        if not isinstance(f, str | os.PathLike):
            return self._single(_opened(f), "")
        path = os.fspath(f)
        _finish_retag(path)
        if os.path.isdir(path):  # noqa: PTH112 - as above
            self._folder = path
            return self._directory(path)
        if path.endswith(".index.json"):
            from transload.formats.directory import read_sharded

            self._folder = os.path.dirname(path)  # noqa: PTH120 - as above
            checkpoint = read_sharded(path, self._read_file)
            return checkpoint, self._kept(checkpoint, "shard")
        return self._single(_File(path), path)

    def _single(self, source: Source, path: str) -> tuple[Checkpoint, tuple[Piece, ...]]:
        from transload.formats import read_source

        self._open[""] = (source, None)
        checkpoint = read_source(source, tree=self._tree)
        return checkpoint, (Piece(checkpoint, lambda _: source, path),)

    def _read_file(self, path: str) -> Checkpoint:
        """Read a file of a directory, and keep it open."""
        from transload.formats import read_source

        source = self._beside(path)
        checkpoint = read_source(source)
        self._open[path] = (source, checkpoint)
        return checkpoint

    def _directory(self, path: str) -> tuple[Checkpoint, tuple[Piece, ...]]:
        from transload.formats import read_source
        from transload.formats.directory import read_directory

        checkpoint = read_directory(path, self._read_file, read_source)
        if checkpoint.format == "sharded":
            return checkpoint, self._kept(checkpoint, "shard")
        if "unpacked" not in dict(checkpoint.facts):
            return checkpoint, self._kept(checkpoint, "weights")
        index = "data.pkl"
        if not os.path.exists(_join(path, index)):  # noqa: PTH110 - as above
            index = _join(next(iter(os.listdir(path)), ""), index)  # noqa: PTH208 - in the folder unzipping has made
        return checkpoint, (Piece(checkpoint, lambda name: self._beside(_join(path, name)), index=index),)

    def _kept(self, checkpoint: Checkpoint, kind: str) -> tuple[Piece, ...]:
        """The files of a directory that were read, each as a piece of its own."""
        pieces = []
        for part in checkpoint.parts:
            if part.kind == kind:
                path = _join(self._folder or "", part.name)
                source, read = self._open[path]
                if read is not None:
                    pieces.append(Piece(read, lambda _, source=source: source, path))  # type: ignore[misc]
        return tuple(pieces)

    def _beside(self, path: str) -> Source:
        """One of many files; kept open, unless so many others are already that the program would have none left."""
        if path not in self._open:
            source = _File(path) if len(self._open) < _most_open() else _Unkept(path)
            self._open[path] = (source, None)
        return self._open[path][0]


def _finish_retag(path: str) -> None:
    """Finish or undo a retag of the file that was interrupted."""
    try:
        if not os.path.lexists(journal_path(path)):
            return
    except ValueError:  # no file can have such a name, which whoever reads it will say
        return
    from transload.io.journal import recover

    recover(path)


@facts(frozen=True)
class Piece:
    """A checkpoint that is built by itself, and where its bytes lie: the whole of it, or a shard.

    ``open`` gives the source for the ``file`` of a storage; ``path`` is set where it is one plain file of the system,
    ``index`` is the file of its pickle where it is unpacked into many.
    """

    checkpoint: Checkpoint
    open: Callable[[str], Source]
    path: str = ""
    index: str = ""


class _File(FileSource):
    """A file of the system."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._written = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns // 1_000_000  # network file systems round it once it has reached them

    @property
    def changed(self) -> bool:
        """Whether somebody has written to it since it was opened."""
        return self._now() != self._written

    def is_still(self, path: str) -> bool:
        """Whether the path leads to this very file, and to as much of it."""
        try:
            status = os.stat(path)  # noqa: PTH116 - pathlib costs ten milliseconds
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._fd), status) and status.st_size >= self.size


class _Unkept:
    """A file of the system that is opened for each reading: there are more of them than a process may have open."""

    def __init__(self, path: str) -> None:
        self.name = path
        with closing(FileSource(path)) as file:
            self.size = file.size

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        with closing(FileSource(self.name)) as file:
            return file.read(offset, count)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        with closing(FileSource(self.name)) as file:
            return file.readinto(offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""


def _most_open() -> int:
    """Half of the files that a process may have open: 512 of Linux' usual 1,024, 128 of macOS' 256."""
    try:
        import resource
    except ImportError:  # Windows
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


class _Object(ObjectSource):
    """A file object, read into memory that exists already where the object can do that."""

    def leave_at(self, position: int) -> None:
        """Where the file object is left when it is closed here."""
        self._home = position

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        into = getattr(self._file, "readinto", None)
        done = 0
        try:
            with self._lock:
                self._file.seek(offset)
                while into and done < len(buffer) and (count := into(buffer[done:])):
                    done += count
        except (OSError, ValueError):
            into = None
        return done if into else super().readinto(offset, buffer)  # which also has words for what goes wrong


class _Leftovers(Slice):
    """What follows the position of a file object: the next of several checkpoints in one stream."""

    def leave_at(self, position: int) -> None:
        """Where the file object is left when it is closed here, counted from where this begins."""
        cast(_Object, self._base).leave_at(self._offset + position)

    def close(self) -> None:
        """Put the position back."""
        self._base.close()


def _without_neighbours(checkpoint: Checkpoint) -> Checkpoint:
    """What is loaded of a directory: files that lie beside the checkpoint may be damaged, or anything else."""
    others = tuple(f"{part.name} › " for part in checkpoint.parts if part.kind == "beside the checkpoint")
    if not others:
        return checkpoint
    problems = tuple(problem for problem in checkpoint.problems if not problem.where.startswith(others))
    pickles = tuple(pickle for pickle in checkpoint.pickles if pickle.main)
    return replace(checkpoint, problems=problems, pickles=pickles)


def _join(folder: str, name: str) -> str:
    from pathlib import Path

    return str(Path(folder, name))


def _opened(f: object) -> Source:
    if isinstance(f, bytes | bytearray | memoryview):
        return BytesSource(f)
    if not (hasattr(f, "read") and hasattr(f, "seek")):
        raise UsageError(f"expected a path, bytes or a binary file object, not {type(f).__name__}")
    if isinstance(f.read(0), str):
        raise UsageError("the file object gives text", fix="Open the file for bytes: open(path, 'rb').")
    source = _Object(cast(BinaryIO, f))
    home = f.tell() if hasattr(f, "tell") else 0
    leftovers = _Leftovers(source, home, source.size - home, source.name)
    return leftovers if home and _begins(leftovers) else source


def _begins(source: Source) -> bool:
    """Whether a checkpoint begins here: else what lies before the position of a file object is meant, too."""
    from transload.formats.torch_legacy import looks_like_legacy
    from transload.formats.zip import starts_like_zip

    return starts_like_zip(source) or looks_like_legacy(source)


_STEP = 1 << 20


class PackedStorages:
    """The storages of a checkpoint that lie in deflated records."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._records: dict[str, dict[str, Record]] = {}

    def open(self, storage: Storage, source: Source) -> Inflating | None:
        """The content of a packed storage, of the file ``source``; ``None`` if it is packed in a way torch cannot read.

        Each reader needs its own, since going back begins anew.
        """
        from transload.formats.zip import read_index

        if storage.file not in self._records:
            known = {} if storage.file else {record.name: record for record in self._checkpoint.records}
            self._records[storage.file] = known or read_index(source).records
        record = self._records[storage.file].get(storage.record)
        if record is None or record.offset is None or record.method != 8:  # deflated, as every zip tool does it
            return None
        return Inflating(source, record.offset, record.stored, record.size)


class Inflating:
    """The content of a deflated record. Reading on is cheap; going back begins again at the record's first byte."""

    def __init__(self, base: Source, offset: int, stored: int, size: int) -> None:
        self.name = base.name
        self.size = size
        self._base = base
        self._offset = offset
        self._stored = stored
        self._lock = Lock()
        self._rewind()

    def _rewind(self) -> None:
        from zlib import decompressobj

        self._machine: _Decompress = decompressobj(-15)
        self._taken = 0  # packed bytes given to it
        self._position = 0  # unpacked bytes it has given

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        out = bytearray(max(0, min(count, self.size - offset)))
        got = self.readinto(offset, memoryview(out))
        return bytes(out[:got])

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        with self._lock:
            try:
                return self._fill(offset, buffer[: max(0, self.size - offset)])
            except BaseException:  # an interrupt, perhaps between unpacking some bytes and counting them
                self._rewind()
                raise

    def _fill(self, offset: int, buffer: memoryview) -> int:
        done = 0
        if offset < self._position:
            self._rewind()
        while self._position < offset and self._next(min(_STEP, offset - self._position)):
            pass
        while done < len(buffer) and (part := self._next(min(_STEP, len(buffer) - done))):
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def _next(self, most: int) -> bytes:
        """The next bytes, ``most`` at most; none at the end."""
        from zlib import error

        packed = self._machine.unconsumed_tail
        while True:
            if not packed and self._taken < self._stored:
                packed = self._base.read(self._offset + self._taken, min(_STEP, self._stored - self._taken))
                self._taken += len(packed)
            try:
                part = self._machine.decompress(packed, most)
            except error as reason:
                raise BrokenFileError(f"its compressed data is damaged ({reason})", where=self.name) from reason
            if part or self._machine.eof or (not packed and not self._machine.unconsumed_tail):
                self._position += len(part)
                return part
            packed = self._machine.unconsumed_tail

    def close(self) -> None:
        """Nothing to give back: the base is closed by its owner."""
