"""What was saved, loaded or converted is freed with its last reference, without the garbage collector."""

from __future__ import annotations

import gc
import io
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from tests.shared import open_elements
from torch.multiprocessing.reductions import StorageWeakRef

import transload
from transload.checkpoint import Storage
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.formats.zip_writer import Chunk, write_archive
from transload.io.atomic import FileObject
from transload.loading.placement import DeviceMap
from transload.nodes import Call, Dict
from transload.saving.background import background
from transload.writing import transfer
from transload.writing.transfer import ConversionJob

PYTHON_PICKLE = types.SimpleNamespace(Pickler=pickle._Pickler)  # the pickler in pure Python
CLASSES = (torch.UntypedStorage, torch.TypedStorage, torch.Tensor)


@pytest.fixture(scope="module", autouse=True)
def _freeze_imports() -> Iterator[None]:
    """Freeze what all other tests have imported, which the collector would otherwise scan a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _disable_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("transload.io._has_frozen", False)  # a read may set it; undone after the test
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_in_cycles(action: Callable[[], object], *kinds: type) -> list[type]:
    """The classes of the storages, tensors and ``kinds`` that only the garbage collector frees after a call."""
    with suppress(transload.TransloadError, OSError, KeyError):
        action()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [type(item) for item in gc.garbage if isinstance(item, (*CLASSES, *kinds))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def tensors() -> dict[str, Any]:
    return {"a": torch.rand(30_000), "b": torch.rand(3), "p": torch.nn.Parameter(torch.rand(300, 300))}


class FullDisk(io.RawIOBase):
    """A full disk."""

    def write(self, _: Any) -> int:
        raise OSError(28, "No space left on device")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"pickle_module": pickle},
    {"pickle_module": PYTHON_PICKLE},
    {"pickle_protocol": 5},
    {"compact": True},
    {"compact": True, "pickle_module": PYTHON_PICKLE},
    {"device": "keep"},
]


@pytest.mark.parametrize("module", ["cloudpickle", "dill"])
def test_save_with_another_pickler_leaves_no_cycles(module: str) -> None:
    pickle_module = pytest.importorskip(module)
    assert left_in_cycles(lambda: transload.save(tensors(), io.BytesIO(), pickle_module)) == []


@pytest.mark.parametrize("options", OPTIONS)
def test_save_keeps_no_reference_to_a_storage(options: dict[str, Any], tmp_path: Path) -> None:
    w = torch.rand(300, 300)
    storage = w.untyped_storage()
    before = sys.getrefcount(storage)
    for value in (w, [w[::3, ::3], w.T], {"w": torch.nn.Parameter(w)}, storage):
        transload.save(value, io.BytesIO(), **options)
        transload.save_async(value, tmp_path / "x.pt", **options).result(30)
    del value
    background.wait()
    assert sys.getrefcount(storage) == before


@pytest.mark.parametrize("options", OPTIONS)
def test_storages_of_thirty_saves_are_freed(options: dict[str, Any]) -> None:
    watched: list[StorageWeakRef] = []  # torch 2.1 crashes on a weakref.ref to a storage after a save, even torch.save
    for _ in range(30):
        state = tensors()
        watched += (StorageWeakRef(tensor.untyped_storage()) for tensor in state.values())
        transload.save(state, io.BytesIO(), **options)
        del state
    assert sum(not storage.expired() for storage in watched) == 0


def unpicklable() -> dict[str, Any]:
    return {**tensors(), "bad": lambda: 1}


FAILING_SAVES: dict[str, Callable[[Path], object]] = {
    "cannot be pickled": lambda _: transload.save(unpicklable(), io.BytesIO()),
    "cannot be pickled by another module": lambda _: transload.save(unpicklable(), io.BytesIO(), PYTHON_PICKLE),
    "cannot be pickled, in the background": lambda at: transload.save_async(unpicklable(), at / "x.pt"),
    "one storage, two dtypes": lambda _: transload.save([t := torch.rand(9), t.view(torch.int32)], io.BytesIO()),
    "disk full": lambda _: transload.save(tensors(), FullDisk()),
    "no directory": lambda at: transload.save(tensors(), at / "no" / "x.pt"),
    "disk full, in the background": lambda _: transload.save_async(tensors(), FullDisk()).result(30),
    "no directory, in the background": lambda at: transload.save_async(tensors(), at / "no" / "x.pt").result(30),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING_SAVES)
def test_failed_save_leaves_no_cycles(name: str, tmp_path: Path) -> None:
    assert left_in_cycles(lambda: FAILING_SAVES[name](tmp_path)) == []


def test_raised_error_of_save_async_does_not_keep_the_state_alive(tmp_path: Path) -> None:
    watched: list[weakref.ref[Any]] = []

    def step() -> None:
        state = tensors()
        watched.append(weakref.ref(state["a"]))
        transload.save_async(state, tmp_path / "no" / "x.pt").result(30)

    with pytest.raises(transload.TransloadError) as caught:
        step()
    del caught
    background.wait()
    assert watched[0]() is None


def test_future_whose_error_was_retrieved_is_freed(tmp_path: Path) -> None:
    future: Future[None] = transload.save_async(tensors(), tmp_path / "no" / "x.pt")
    future.exception(30)
    background.wait()
    watched = weakref.ref(future)
    del future
    assert watched() is None


def _fail(_: object) -> None:
    b"\xff".decode()


class NullFile(FileObject):
    def write(self, buffers: Sequence[object]) -> None: ...


@pytest.mark.parametrize("threads", [0, 2])
def test_failed_checksum_leaves_no_cycles(threads: int) -> None:
    def compute() -> None:
        owner = torch.rand(9)
        chunk = Chunk(memoryview(b"x"), partial(_fail, owner))
        records = [(name, 1, lambda: iter([chunk])) for name in (b"asked", b"unasked")]
        write_archive(NullFile(None), b"a", records, lambda _: [], threads=threads)

    def attempt() -> None:
        with pytest.raises(UnicodeDecodeError):
            compute()

    assert left_in_cycles(attempt) == []


READS: dict[str, Callable[[Path], object]] = {
    "load": lambda at: transload.load(at / "x.pt"),
    "load, verified": lambda at: transload.load(at / "x.pt", verify=True),
    "load, mmap": lambda at: transload.load(at / "x.pt", mmap=True),
    "load, trusted": lambda at: transload.load(at / "x.pt", weights_only=False),
    "load, map_location is a function": lambda at: transload.load(at / "x.pt", lambda s, _: s, weights_only=False),
    "load, legacy": lambda at: transload.load(at / "legacy.pt"),
    "load, legacy and trusted": lambda at: transload.load(at / "legacy.pt", weights_only=False),
    "load, truncated": lambda at: transload.load(at / "cut.pt"),
    "load, refused": lambda at: transload.load(at / "module.pt"),
    "load, safetensors": lambda at: transload.load(at / "x.safetensors"),
    "load, unpacked": lambda at: transload.load(at / "unpacked"),
    "open": lambda at: [(f["a"], f["p"][1:3]) for f in [transload.open(at / "x.pt")]],
    "open, missing key": lambda at: [f["nothing"] for f in [transload.open(at / "x.pt")]],
    "load_into": lambda at: transload.load_into(torch.nn.Linear(300, 300), at / "linear.pt"),
    "load_into, does not fit": lambda at: transload.load_into(torch.nn.Linear(3, 300), at / "linear.pt"),
    "convert": lambda at: transload.convert(at / "x.pt", at / "y.safetensors"),
    "convert to torch": lambda at: transload.convert(at / "legacy.pt", at / "y.pt"),
    "convert a module": lambda at: transload.convert(at / "module.pt", at / "y.npz"),
    "convert, truncated": lambda at: transload.convert(at / "cut.pt", at / "y.pt"),
    "rescue": lambda at: transload.rescue(at / "cut.pt", at / "y.pt"),
}


@pytest.mark.parametrize("name", READS)
def test_reading_leaves_no_cycles(name: str, tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "x.pt")
    torch.save(tensors(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(300, 300), tmp_path / "module.pt")
    torch.save(torch.nn.Linear(300, 300).state_dict(), tmp_path / "linear.pt")
    transload.convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    with ZipFile(tmp_path / "x.pt") as archive:
        archive.extractall(tmp_path / "unpacked")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-2000])
    gc.collect()
    assert left_in_cycles(lambda: READS[name](tmp_path), Storage, Call, Dict, DeviceMap) == []


def test_map_location_function_is_freed(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "x.pt")
    received: list[Any] = []

    def place(storage: Any, _: str) -> Any:
        received.append(storage)
        return storage

    transload.load(tmp_path / "x.pt", place, weights_only=False)
    watched = weakref.ref(place)
    del place
    assert watched() is None


def test_graph_that_cannot_be_pickled_is_freed() -> None:
    def write() -> None:
        with pytest.raises(CannotPickleGraphError):
            dumps([Dict(["a", [object()], "b", [1]])])

    assert left_in_cycles(write, Dict) == []


def test_failed_conversion_leaves_no_chunks_and_no_threads() -> None:
    """Every thread has an error, and one of them is raised."""

    def write_file() -> None:
        read_only = os.open(os.devnull, os.O_RDONLY)  # not for writing
        with open_elements(b"\2" + bytes(7) + b"{}") as content:
            try:
                transfer.write_file(read_only, bytes(64 << 20), [], ConversionJob(content), "x")
            finally:
                os.close(read_only)

    threads = threading.active_count()
    assert left_in_cycles(write_file, transfer.FileBuffer) == []
    assert threading.active_count() == threads
