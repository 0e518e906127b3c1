"""The one way to open a checkpoint: a path, a folder, a file object or bytes becomes an ``OpenCheckpoint``.

It reads and judges the checkpoint and keeps its files open, so that what was judged is what is read. ``inspect``
returns the judgement; ``load`` builds an object from each of the ``files``; everything else reads tensors through
``elements``.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock  # threading takes a millisecond to import
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from transload.checkpoint import Checkpoint, Key, Value
from transload.formats import read_source, unpacked
from transload.frozen import Frozen, replace
from transload.io import gc_paused
from transload.io.paths import Place, open_source, place_of
from transload.io.sources import ObjectSource, Source, SourceLike, has_journal, was_changed

if TYPE_CHECKING:
    from transload.io.folder import Folder
    from transload.opening.elements import ElementReader
    from transload.opening.jobs import AddressOf, Checksums, ReportProgress, Settings

__all__ = ["CheckpointFile", "OpenCheckpoint", "Range", "fill", "inspect"]

_ABSENT = object()  # no node: a node may be None


def inspect(f: SourceLike, *, verify: bool = False, stats: bool = False) -> Checkpoint:
    """What is in a checkpoint, and whether it is safe and whole; nothing in it is run, and torch is not needed.

    ``f`` is a path (of a file or a directory), a URL, bytes, or a seekable binary file object. ``verify`` reads every
    byte and compares every checksum; ``stats`` reads every tensor, for the statistics of its numbers in
    ``Checkpoint.stats``. Raises ``CannotReadError`` if there is nothing to read; bad content is a finding, never an
    exception.

    >>> inspect(b"<html>").integrity
    'not-a-checkpoint'
    """
    with OpenCheckpoint(f, verify=verify, neighbours=True, lazy=True) as opened:
        if not stats:
            return opened.checkpoint
        from transload.opening.stats import statistics

        counted = statistics(opened.elements)
        opened.check_unchanged()
        return replace(opened.checkpoint, stats=counted)


class OpenCheckpoint:
    """A checkpoint and its open files.

    ``f`` may also be what ``place_of`` returned. ``checkpoint`` is the judged whole. ``files`` are the complete
    checkpoints in it, in order: the one file, or the shards. ``tree``, ``verify`` and ``headers`` are as for
    ``read_source``; files next to the checkpoint count only for ``inspect``, with ``neighbours``. With ``lazy``, many
    small archives may stay unopened until they are read. As a context manager it closes what it opened. May be used
    from several threads.
    """

    def __init__(
        self,
        f: SourceLike | Place,
        *,
        tree: bool = True,
        verify: bool = False,
        headers: bool = False,
        neighbours: bool = False,
        lazy: bool = False,
    ) -> None:
        from transload.judge import judge

        self.closed = False
        self._open: dict[str, Source] = {}
        self._options: dict[str, bool] = {"tree": tree, "verify": verify, "headers": headers}
        self._lazy = lazy and not verify
        self._stream: ObjectSource | None = None  # the file object that it is read from
        self._folder: Folder | None = None  # the folder of its files, if there are several
        self._members: dict[int, dict[Key, object]] = {}
        self._parts: dict[str, CheckpointFile] = {}
        self._lock = allocate_lock()
        try:
            with gc_paused():
                read, self.files = self._read(f)
                beside = {part.name for part in read.parts if part.role == "beside"}
                if beside and not neighbours:  # they may be damaged, or not checkpoints at all
                    problems = tuple(each for each in read.problems if each.where.partition(" › ")[0] not in beside)
                    pickles = tuple(pickle for pickle in read.pickles if pickle.main)
                    read = replace(read, problems=problems, pickles=pickles)
                self.checkpoint = judge(read, describe=tree)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenCheckpoint:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; a file object is only moved. May be called twice."""
        with self._lock:
            self.closed = True
            for source in self._open.values():
                source.close()
            self._open.clear()
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def check_open(self) -> None:
        """Raise ``UsageError`` if it was closed."""
        if self.closed:
            from transload.errors import UsageError

            raise UsageError("this checkpoint was closed", where=self.checkpoint.path, fix="Open it again to read.")

    def check_unchanged(self, *, far: bool = True) -> None:
        """Raise ``BrokenFileError`` if a file was written to while it was read: old and new bytes may be mixed.

        Without ``far``, only of files here.
        """
        for source in [*self._open.values()]:  # another thread may open one
            if (far or not source.far) and source.is_changed():
                raise was_changed(source.name)

    def claims_hold(self) -> bool:
        """Whether files are what their directories say, as far as that was left to check."""
        from transload.errors import BrokenFileError

        try:
            for source in self._open.values():
                source.check_claims()
        except BrokenFileError:
            return False
        return True

    def stamps(self) -> dict[str, tuple[int, ...]]:
        """What a write to each of the files that are open would change, by their names in the checkpoint."""
        return {name: source.stamp for name, source in self._open.items()}

    def seek_past_content(self) -> None:
        """Make ``close`` leave a file object where ``torch.load`` does.

        That is after a stream, which another object may follow; in an archive, after the record that is read last.
        """
        if self._stream is None:
            return
        checkpoint, end = self.checkpoint, self._stream.size
        storages = [each.offset + each.stored for each in checkpoint.storages if each.offset and each.stored]
        container = checkpoint.traits.container
        if container == "stream":
            end = max(0, *storages, sum(pickle.end for pickle in checkpoint.pickles))
        elif container == "zip":
            pickles = {pickle.name for pickle in checkpoint.pickles if pickle.main}
            index = [each.offset + each.stored for each in checkpoint.records if each.name in pickles and each.offset]
            end = (storages or index or [end])[-1]
        self._stream.home = self._stream.start + end

    def file(self, name: str = "") -> Source:
        """One of its files, by ``Storage.file``; it stays open until ``close``."""
        with self._lock:
            self.check_open()
            return self._open[""] if self._folder is None else self._member(self._folder, name)

    def sources(self) -> list[Source]:
        """The files that its tensors are read from; none if some of them are not open yet."""
        with self._lock:
            self.check_open()
            if self._folder is None:
                return [self._open[""]]
            names = {storage.file for storage in self.checkpoint.storages}
            return [self._open[name] for name in names] if names <= self._open.keys() else []

    @cached_property
    def elements(self) -> ElementReader:
        """The elements of its tensors, without torch."""
        from transload.opening.elements import ElementReader

        complete = tuple((file.name, file.checkpoint) for file in self.files if not file.index)
        return ElementReader(self.checkpoint, self._weak_file(), complete)

    def _weak_file(self) -> Callable[[str], Source]:
        """``file``, for what this refers to: a reference cycle would keep files open until garbage is collected."""
        from weakref import proxy

        opened = proxy(self)
        return lambda name: opened.file(name)  # noqa: PLW0108 - opened.file is a strong reference

    def node(self, path: tuple[Key, ...]) -> tuple[CheckpointFile, object] | None:
        """The file that has a node at a path, and that node; ``None`` if there is none."""
        from transload.formats.graph import node_at

        for file in self.files:
            node = node_at(file.checkpoint.root, path, self._members, _ABSENT)
            if node is not _ABSENT:
                return file, node
        for length in range(len(path) + 1):
            value = self._values.get(path[:length])
            if value is not None:
                node = node_at(value.node, path[length:], self._members, _ABSENT)
                return None if node is _ABSENT else (self.part(value.file), node)
        return None

    @cached_property
    def _values(self) -> dict[tuple[Key, ...], Value]:
        return {value.path: value for value in self.checkpoint.values}

    def part(self, name: str) -> CheckpointFile:
        """The checkpoint that a value is built from, by ``Value.file``: one of the files, or one inside a file."""
        return self._parts[name]

    def list_tensors(self) -> None:
        """List the tensors if they were only counted, for a message that names them."""
        if not self._options["tree"] and not self.checkpoint.tensors:
            from transload.judge import judge

            self._options["tree"] = True
            with gc_paused():
                (file,) = self.files
                self.checkpoint = judge(read_source(self._open[""]))
                self.files = (replace(file, checkpoint=self.checkpoint),)
                vars(self).pop("elements", None)

    # -- opening

    def _read(self, f: SourceLike | Place) -> tuple[Checkpoint, tuple[CheckpointFile, ...]]:
        place = None
        if isinstance(f, Place):
            place, f = f, f.path
        if not isinstance(f, str | os.PathLike):
            source = open_source(f)
            self._stream = source if isinstance(source, ObjectSource) else None
            return self._single(source, "")
        path = os.fspath(f)
        if has_journal(path):  # finish or undo an interrupted retag of the file
            from transload.io.journal import recover

            recover(path)
        place = place or place_of(path)
        folder, index = place.folder, place.index
        if folder is None:
            source = open_source(path)
            return self._single(source, "" if source.far else path)
        from transload.formats import sets

        self._folder = folder
        files = self._parts
        verify, headers = self._options["verify"], self._options["headers"]

        def read(name: str) -> Checkpoint:
            source = self._member(folder, name)
            checkpoint = read_source(source, verify=verify, headers=headers)
            files[name] = CheckpointFile(checkpoint, lambda _: source, folder.path(name), name)
            return checkpoint

        def read_item(source: Source) -> Checkpoint:
            checkpoint = read_source(source, verify=verify, headers=headers)
            files[source.name] = CheckpointFile(checkpoint, lambda _: source, name=source.name)
            return checkpoint

        checkpoint = sets.read(folder, read, partial(self._member, folder), read_item, index=index, lazy=self._lazy)
        if checkpoint.index:
            return checkpoint, (CheckpointFile(checkpoint, self._weak_file(), index=checkpoint.index),)
        members = [part.name for part in checkpoint.parts if part.role == "member"]
        return checkpoint, tuple(files[name] for name in members if name in files)

    def _single(self, source: Source, path: str) -> tuple[Checkpoint, tuple[CheckpointFile, ...]]:
        self._open[""] = source
        inner = unpacked(source)
        if inner is not source:  # it was compressed, and is now in memory
            source.close()
            self._open[""], source, path = inner, inner, ""
        checkpoint = read_source(source, **self._options)
        return checkpoint, (CheckpointFile(checkpoint, lambda _: source, path),)

    def _member(self, folder: Folder, name: str) -> Source:
        """One of several files; kept open unless that would leave the program too few file descriptors."""
        if name not in self._open:
            most = 256
            if sys.platform != "win32":
                import resource

                # Half of the limit: 512 of the usual 1,024 on Linux, 128 of 256 on macOS.
                soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2
            self._open[name] = folder.open(name, keep=len(self._open) < most)
        return self._open[name]


Range = tuple[Source, int, int, str]
"""Bytes to read: a source, an offset in it, their number, and the device of the memory they go to."""


def fill(
    ranges: Iterable[Range],
    address_of: AddressOf,
    settings: Settings | None = None,
    report_progress: ReportProgress | None = None,
    checksums: Checksums | None = None,
) -> None:
    """Read bytes of sources into memory, as ``engine.read_ranges`` does: every tensor and storage is read through this.

    Few bytes for host memory are read in this thread, without importing the engine.
    """
    from transload.opening.jobs import FEW_BYTES, File, HostLane, ReadRequest, Settings, jobs

    settings = settings or Settings()
    numbers: dict[Source, int] = {}
    requests: list[ReadRequest] = [
        tuple.__new__(ReadRequest, (numbers.setdefault(source, len(numbers)), offset, nbytes, device))
        for source, offset, nbytes, device in ranges
    ]
    few = sum([request[2] for request in requests]) < FEW_BYTES and not any(source.far for source in numbers)
    if not few or settings != Settings() or {request[3] for request in requests} != {"cpu"}:
        from transload.opening.engine import read_ranges

        read_ranges([*numbers], requests, address_of, settings, report_progress, checksums)
        return
    addresses: dict[int, int] = {}
    lane = HostLane([File(source, ahead=True) for source in numbers], addresses, checksums)
    for job in jobs(requests, gap=max([source.gap for source in numbers], default=0)):
        for _, index, _, _ in job.runs:
            if index not in addresses:
                addresses[index] = address_of(index)
        lane.read(job)
        if report_progress is not None:
            report_progress(job.wanted)


class CheckpointFile(Frozen):
    """A complete checkpoint, the whole or a shard, and how to open its files.

    ``open`` gives the source for a ``Storage.file`` of its checkpoint. ``path`` is set if it is one regular file, and
    ``name`` is its ``Storage.file`` in the whole; ``index`` is the file of its pickle if it is an archive unpacked into
    a folder.
    """

    checkpoint: Checkpoint
    open: Callable[[str], Source]
    path: str = ""
    name: str = ""
    index: str = ""
