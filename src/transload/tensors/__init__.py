"""The bytes of a checkpoint: the file or files behind it, open as long as anybody reads from them.

``OpenCheckpoint`` reads and judges what it is given and keeps it open: what was judged is what is read. ``load`` takes
the ``pieces`` that are built by themselves; others take the bytes of single storages, by the names that storages give
to files. The elements of a tensor, in order, are in ``tensors.content``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING

from transload.errors import BrokenFileError, UsageError
from transload.frozen import facts, replace
from transload.io.sources import (
    FileSource,
    ObjectSource,
    Slice,
    Source,
    SourceLike,
    has_journal,
    open_source,
)

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key


_WHOLE = "\0"
"""The name, which no file has, of a file object of which only what follows its position is read."""


class OpenCheckpoint:
    """Everything opened for one checkpoint.

    ``checkpoint`` is the judged whole, ``pieces`` what is built by itself, in order: the one file, or the shards.
    ``tree`` is as for ``read_source``. As a context manager it closes what it has opened. May be used from several
    threads.
    """

    def __init__(self, f: SourceLike, *, tree: bool = True) -> None:
        from transload.judge import judge

        self.closed = False
        self._open: dict[str, Source] = {}
        self._read_files: dict[str, Checkpoint] = {}
        self._tree = tree
        self._folder: str | None = None  # where the names of files begin, if there are several
        self._members: dict[int, dict[Key, object]] = {}
        self._lock = Lock()
        try:
            read, self.pieces = self._read(f)
            others = tuple(f"{part.name} › " for part in read.parts if part.kind == "beside the checkpoint")
            if others:  # files that lie beside the checkpoint may be damaged, or anything else
                problems = tuple(problem for problem in read.problems if not problem.where.startswith(others))
                pickles = tuple(pickle for pickle in read.pickles if pickle.main)
                read = replace(read, problems=problems, pickles=pickles)
            self.checkpoint = judge(read, told=tree)
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
            for source in self._open.values():
                source.close()
            self._open.clear()

    def check_open(self) -> None:
        """``UsageError`` if it was closed."""
        if self.closed:
            raise UsageError("this checkpoint was closed", where=self.checkpoint.path, fix="Open it again to read.")

    def check_unchanged(self) -> None:
        """``BrokenFileError`` if somebody wrote to a file while it was read: old and new may be mixed in what came."""
        for source in self._open.values():
            if isinstance(source, FileSource) and source.is_changed():
                fix = "Read it again when nobody writes to it; transload.save puts a new file in its place at once."
                raise BrokenFileError("it was changed while it was read", where=source.name, fix=fix)

    def leave_behind_content(self) -> None:
        """Leave a file object behind what was read of it: several objects can be written one after the other."""
        source, whole = self._open.get(""), self._open.get(_WHOLE)
        if isinstance(whole, ObjectSource) and self.checkpoint.format == "torch-legacy":
            last = max((s.offset + s.nbytes for s in self.checkpoint.storages if s.offset is not None), default=0)
            end = max(last, sum(pickle.end for pickle in self.checkpoint.pickles))
            whole.home = end + (source.offset if isinstance(source, Slice) else 0)

    def file(self, name: str = "") -> Source:
        """One of its files, by the name storages give it; it stays open until all are closed."""
        with self._lock:
            self.check_open()
            return self._open[""] if self._folder is None else self._beside(_join(self._folder, name))

    @property
    def parts(self) -> tuple[tuple[str, Checkpoint], ...]:
        """The files that are a checkpoint by themselves, under the names storages give them."""
        if self._folder is None:
            return tuple(("", piece.checkpoint) for piece in self.pieces)
        folder = self._folder or "."
        return tuple((os.path.relpath(piece.path, folder), piece.checkpoint) for piece in self.pieces if piece.path)

    def node(self, path: tuple[Key, ...]) -> tuple[Piece, object] | None:
        """The piece in which a path leads somewhere, and the inert node there; ``None`` if it leads nowhere."""
        for piece in self.pieces:
            node = piece.checkpoint.root
            for step in path:
                known = self._members.get(id(node))
                if known is None:  # each container is gone through once
                    from transload.formats.tensors import members

                    known = self._members[id(node)] = dict(members(node))
                if step not in known:
                    break
                node = known[step]
            else:
                return piece, node
        return None

    # -- opening

    def _read(self, f: SourceLike) -> tuple[Checkpoint, tuple[Piece, ...]]:
        if not isinstance(f, str | os.PathLike):
            self._open[_WHOLE] = whole = open_source(f)
            return self._single(_next_in_stream(whole), "")
        path = os.fspath(f)
        if has_journal(path):  # finish or undo a retag of the file that was interrupted
            from transload.io.journal import recover

            recover(path)
        is_directory = os.path.isdir(path)  # noqa: PTH112 - pathlib costs ten milliseconds
        if not is_directory and not path.endswith(".index.json"):
            return self._single(FileSource(path), path)
        from transload.formats import read_source
        from transload.formats.directory import read_directory, read_sharded

        self._folder = path if is_directory else os.path.dirname(path)  # noqa: PTH120 - the same
        read = self._read_file
        checkpoint = read_directory(path, read, read_source) if is_directory else read_sharded(path, read)
        sharded = not is_directory or checkpoint.format == "sharded"
        if sharded or "unpacked" not in dict(checkpoint.facts):
            kind = "shard" if sharded else "weights"
            files = [_join(self._folder, part.name) for part in checkpoint.parts if part.kind == kind]
            files = [file for file in files if file in self._read_files]
            return checkpoint, tuple(_piece(self._read_files[file], self._open[file], file) for file in files)
        index = "data.pkl"
        if not os.path.exists(_join(path, index)):  # noqa: PTH110 - the same
            index = _join(next(iter(os.listdir(path)), ""), index)  # noqa: PTH208 - in the folder unzipping has made
        return checkpoint, (Piece(checkpoint, lambda name: self._beside(_join(path, name)), index=index),)

    def _single(self, source: Source, path: str) -> tuple[Checkpoint, tuple[Piece, ...]]:
        from transload.formats import read_source, unpacked

        self._open[""] = source
        inner = unpacked(source)
        if inner is not source:  # it is in memory
            source.close()
            self._open[""], source, path = inner, inner, ""
        checkpoint = read_source(source, tree=self._tree)
        return checkpoint, (_piece(checkpoint, source, path),)

    def _read_file(self, path: str) -> Checkpoint:
        """Read a file of a directory, and keep it open."""
        from transload.formats import read_source

        checkpoint = self._read_files[path] = read_source(self._beside(path))
        return checkpoint

    def _beside(self, path: str) -> Source:
        """One of many files; kept open, unless so many others are already that the program would have none left."""
        if path not in self._open:
            most = 256
            if sys.platform != "win32":
                import resource

                # Half of the files that a process may have open: 512 of Linux' usual 1,024, 128 of macOS' 256.
                soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2
            self._open[path] = FileSource(path) if len(self._open) < most else ReopenedFile(path)
        return self._open[path]


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


def _piece(checkpoint: Checkpoint, source: Source, path: str) -> Piece:
    """A checkpoint that is one file."""
    return Piece(checkpoint, lambda _: source, path)


def _join(folder: str, name: str) -> str:
    from pathlib import Path

    return str(Path(folder, name))


# -- sources


class ReopenedFile(FileSource):
    """A file of the system that is opened for each reading: there are more of them than a process may have open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.close()

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        with closing(FileSource(self.name)) as file:
            return file.read(offset, count)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        with closing(FileSource(self.name)) as file:
            return file.readinto(offset, buffer)


def _next_in_stream(source: Source) -> Source:
    """What follows the position of a file object if that is a checkpoint, the next of several; else all of it."""
    if not isinstance(source, ObjectSource) or not source.home:
        return source
    from transload.formats.torch_legacy import looks_like_legacy
    from transload.formats.zip import starts_like_zip

    following = Slice(source, source.home, source.size - source.home, source.name)
    return following if starts_like_zip(following) or looks_like_legacy(following) else source
