"""A file that the caller trusts: its own pickle, run by the standard unpickler, over storages that are already placed.

This runs whatever the file asks for. It is reached by ``weights_only=False`` alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from struct import Struct
from typing import TYPE_CHECKING, Any

from transload.errors import TransloadError, UsageError
from transload.io.sources import Slice, Source
from transload.loading.errors import BrokenFileError, LoadError
from transload.loading.streams import as_file
from transload.loading.trusted_names import class_of, storage_dtype, unpickler_of

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Checkpoint

__all__ = ["load_trusted"]

StorageOf = Callable[[str], "torch.UntypedStorage"]
_Persistent = Callable[[Any], Any]


def load_trusted(
    source: Source,
    checkpoint: Checkpoint,
    storage_of: StorageOf,
    *,
    device_of: Callable[[str], str] = str,
    pickle_module: Any = None,
    **arguments: Any,
) -> Any:
    """What ``torch.load(weights_only=False)`` makes of a file, with the storages it is given.

    ``source`` holds the bytes that ``checkpoint`` was read from; for an unpacked archive, those of its pickle.
    ``storage_of`` gives the storage with an id of ``checkpoint.storages``. ``device_of`` says where a device lands, for
    the few tensors that name one apart from their storage. ``pickle_module`` and ``arguments`` (``encoding``,
    ``errors``, ``fix_imports``) are those of ``torch.load``. The file's code may raise anything: it comes as a
    ``LoadError`` with the original as its cause.
    """
    import pickle

    _check_module(pickle_module)
    arguments.setdefault("encoding", "utf-8")
    load = _Load(source, checkpoint, storage_of, device_of, unpickler_of(pickle_module or pickle), arguments)
    with _in_our_words(checkpoint.path):
        return load.run()


def _check_module(pickle_module: Any) -> None:
    """Raise if a module is none that can unpickle; torch needs a recent dill."""
    import torch

    if pickle_module is not None and not hasattr(pickle_module, "Unpickler"):
        raise UsageError(f"pickle_module has no Unpickler: {pickle_module!r}")
    try:
        getattr(torch.serialization, "_check_dill_version", bool)(pickle_module)
    except ValueError as error:
        raise UsageError(str(error)) from error


class _Load:
    """One load: the storages met so far, as torch's functions want them."""

    def __init__(  # noqa: PLR0913, PLR0917 - what load_trusted is given
        self,
        source: Source,
        checkpoint: Checkpoint,
        storage_of: StorageOf,
        device_of: Callable[[str], str],
        unpickler: type[Any],
        arguments: dict[str, Any],
    ) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._storage_of = storage_of
        self._device_of = device_of
        self._unpickler = unpickler
        self._arguments = arguments
        self._typed: dict[Any, Any] = {}

    def run(self) -> Any:
        """The object in the file."""
        if self._checkpoint.format == "torch-tar":
            return self._tar()
        if self._checkpoint.format == "torch-legacy":
            return self._legacy()
        return self._unpickle(io.BytesIO(_pickle_of(self._source, self._checkpoint)), self.by_tuple)

    def _unpickle(self, file: Any, persistent: _Persistent | None = None) -> Any:
        """One pickle; the file stands behind it afterwards."""
        unpickler = self._unpickler(file, **self._arguments)
        unpickler.device_of = self._device_of
        if persistent is not None:
            unpickler.persistent_load = persistent
        return unpickler.load()

    def _legacy(self) -> Any:
        file = as_file(self._source)
        for _ in range(3):  # the magic number, the protocol version and facts on the machine have been read
            self._unpickle(file)
        return self._unpickle(file, self.by_tuple)

    def by_tuple(self, pid: tuple[Any, ...]) -> Any:
        """What a persistent id stands for: a storage, or in streams also a class with its source."""
        if _text(pid[0]) == "module":
            return class_of(*pid[1:])
        if _text(pid[0]) != "storage":
            raise BrokenFileError(f"a persistent id of unknown kind: {pid[0]!r}", where=self._checkpoint.path)
        _, kind, key, _, _, *view = pid
        whole = self._wrapped(_text(key), storage_dtype(kind))
        return self._part(whole, *view[0]) if view and view[0] is not None else whole

    def _wrapped(self, key: str, dtype: torch.dtype) -> Any:
        """The storage of a key, always the same one; an empty one can be of several types."""
        known = self._typed.get(key)
        if known is not None and (known.dtype == dtype or known._untyped_storage.nbytes()):  # noqa: SLF001 - see _typed
            return known
        try:
            storage = self._storage_of(key)
        except KeyError as error:
            raise BrokenFileError(
                f"it names a storage {key!r} that is not in it", where=self._checkpoint.path
            ) from error
        made = self._typed[key] = _typed(storage, dtype)
        return made

    def _part(self, whole: Any, key: Any, first: int, count: int) -> Any:
        """A part of a storage as a storage of its own, over the same memory."""
        if ("view", key) not in self._typed:
            size, untyped = whole.dtype.itemsize, whole._untyped_storage  # noqa: SLF001 - see _typed
            self._typed["view", key] = _typed(untyped[first * size : (first + count) * size], whole.dtype)
        return self._typed["view", key]

    # -- the tar format

    def _tar(self) -> Any:
        from transload.formats.torch_tar import members

        parts = {
            member.name.removeprefix("./"): Slice(self._source, member.offset, member.size, member.name)
            for member in members(self._source)[0]
        }
        objects: dict[int, Any] = {}
        self._tar_storages(as_file(parts["storages"]), objects)
        self._tar_tensors(as_file(parts["tensors"]), objects)

        def persistent(pid: Any) -> Any:
            return class_of(*pid) if isinstance(pid, tuple) else objects[int(pid)]

        return self._unpickle(as_file(parts["pickle"]), persistent)

    def _tar_storages(self, file: Any, objects: dict[int, Any]) -> None:
        for _ in range(self._unpickle(file)):
            key, _, kind = self._unpickle(file)
            dtype = storage_dtype(kind)
            (count,) = _numbers(file, 1)
            file.seek(count * dtype.itemsize, io.SEEK_CUR)
            objects[int(key)] = self._wrapped(_text(key), dtype)
        for key, root, first, count in self._unpickle(file):
            objects[int(key)] = self._part(objects[int(root)], key, first, count)

    def _tar_tensors(self, file: Any, objects: dict[int, Any]) -> None:
        import torch

        for _ in range(self._unpickle(file)):
            key, storage_key, _ = self._unpickle(file)
            storage = objects[int(storage_key)]
            rank = _numbers(file, 1)[0] & 0xFFFFFFFF
            size, stride, (first,) = _numbers(file, rank), _numbers(file, rank), _numbers(file, 1)
            empty = torch.empty(0, dtype=storage.dtype, device=storage.device)
            objects[int(key)] = empty.set_(storage._untyped_storage, first, size, stride)  # noqa: SLF001 - see _typed


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """What torch's rebuilding functions take for a storage. That class is going away, and has no public constructor."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _text(value: Any) -> str:
    """An internal name; with ``encoding="bytes"`` those that Python 2 wrote are bytes."""
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _numbers(file: Any, count: int) -> tuple[int, ...]:
    shape = Struct(f"<{count}q")
    return shape.unpack(file.read(shape.size))


# -- reading -----------------------------------------------------------------------------------------------------------


def _pickle_of(source: Source, checkpoint: Checkpoint) -> bytes:
    """The record ``data.pkl``, which torch finds without regard to case."""
    from transload.formats.zip_index import read_payload

    named = {record.name.lower(): record for record in checkpoint.records}
    named |= {record.name: record for record in checkpoint.records}
    if "data.pkl" not in named:
        raise BrokenFileError("the record data.pkl, which says what the file holds, is missing", where=checkpoint.path)
    record = named["data.pkl"]
    payload = read_payload(source, record, max(record.size, record.stored))
    if payload.problem:
        raise BrokenFileError(f"data.pkl cannot be read: {payload.problem}", where=checkpoint.path)
    return payload.data


@contextmanager
def _in_our_words(path: str) -> Iterator[None]:
    """Whatever goes wrong, as an error of ours that says where."""
    try:
        yield
    except TransloadError as error:
        error.where = error.where or path
        raise
    except UnicodeDecodeError as error:
        what = f"a text that Python 2 wrote is not {error.encoding}: {error.reason}"
        raise LoadError(what, where=path, fix="Pass encoding='latin1', or encoding='bytes'.") from error
    except (UnpicklingError, EOFError) as error:
        raise BrokenFileError(f"its pickle breaks off: {error}", where=path) from error
    except Exception as error:
        what = f"code that the file calls failed with {type(error).__name__}: {error}"
        raise LoadError(what, where=path) from error
