"""What was saved, loaded or converted is free when the caller lets go: nothing waits for the garbage collector."""

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

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import transload
from transload.checkpoint import Storage
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.formats.zip_writer import Chunk, write_archive
from transload.io.atomic import FileObject
from transload.loading.placement import DeviceMap
from transload.nodes import Call, Dict
from transload.saving.background import background
from transload.tensors.content import open_content
from transload.writing import transfer
from transload.writing.transfer import Job

OTHER = types.SimpleNamespace(Pickler=pickle._Pickler)  # the one in Python
CLASSES = (torch.UntypedStorage, torch.TypedStorage, torch.Tensor)


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """Freeze what all the other tests have imported: the collector would look through it a hundred times here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("transload.formats._has_frozen", False)  # what a read finds out here ends here
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_in_cycles(act: Callable[[], object], *kinds: type) -> list[type]:
    """The classes of storages and tensors, and of ``kinds``, of which only the collector frees objects after a call."""
    with suppress(transload.TransloadError, OSError, KeyError):
        act()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [type(each) for each in gc.garbage if isinstance(each, (*CLASSES, *kinds))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def tensors() -> dict[str, Any]:
    return {"a": torch.rand(30_000), "b": torch.rand(3), "p": torch.nn.Parameter(torch.rand(300, 300))}


class Full(io.RawIOBase):
    """A disk without room."""

    def write(self, _: Any) -> int:
        raise OSError(28, "No space left on device")


WAYS: list[dict[str, Any]] = [
    {},
    {"pickle_module": pickle},
    {"pickle_module": OTHER},
    {"pickle_protocol": 5},
    {"compact": True},
    {"compact": True, "pickle_module": OTHER},
    {"device": "keep"},
]


@pytest.mark.parametrize("module", ["cloudpickle", "dill"])
def test_a_save_with_another_pickler_holds_nothing(module: str) -> None:
    found = pytest.importorskip(module)
    assert left_in_cycles(lambda: transload.save(tensors(), io.BytesIO(), found)) == []


@pytest.mark.parametrize("ways", WAYS)
def test_a_save_holds_no_storage(ways: dict[str, Any], tmp_path: Path) -> None:
    w = torch.rand(300, 300)
    storage = w.untyped_storage()
    before = sys.getrefcount(storage)
    for value in (w, [w[::3, ::3], w.T], {"w": torch.nn.Parameter(w)}, storage):
        transload.save(value, io.BytesIO(), **ways)
        transload.save_async(value, tmp_path / "x.pt", **ways).result(30)
    del value
    background.wait()
    assert sys.getrefcount(storage) == before


@pytest.mark.parametrize("ways", WAYS)
def test_thirty_saves_do_not_grow(ways: dict[str, Any]) -> None:
    watched: list[StorageWeakRef] = []  # torch 2.1 crashes on a weakref.ref to a storage after any save, also its own
    for _ in range(30):
        state = tensors()
        watched += (StorageWeakRef(each.untyped_storage()) for each in state.values())
        transload.save(state, io.BytesIO(), **ways)
        del state
    assert sum(not each.expired() for each in watched) == 0


def unpicklable() -> dict[str, Any]:
    return {**tensors(), "bad": lambda: 1}


FAILS: dict[str, Callable[[Path], object]] = {
    "cannot be pickled": lambda _: transload.save(unpicklable(), io.BytesIO()),
    "cannot be pickled by another module": lambda _: transload.save(unpicklable(), io.BytesIO(), OTHER),
    "cannot be pickled, in the background": lambda at: transload.save_async(unpicklable(), at / "x.pt"),
    "one storage, two dtypes": lambda _: transload.save([t := torch.rand(9), t.view(torch.int32)], io.BytesIO()),
    "no room": lambda _: transload.save(tensors(), Full()),
    "no directory": lambda at: transload.save(tensors(), at / "no" / "x.pt"),
    "no room, in the background": lambda _: transload.save_async(tensors(), Full()).result(30),
    "no directory, in the background": lambda at: transload.save_async(tensors(), at / "no" / "x.pt").result(30),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_nor_does_one_that_fails(name: str, tmp_path: Path) -> None:
    assert left_in_cycles(lambda: FAILS[name](tmp_path)) == []


def test_an_error_that_was_seen_does_not_hold_the_frames_it_was_seen_in(tmp_path: Path) -> None:
    seen: list[weakref.ref[Any]] = []

    def step() -> None:
        state = tensors()
        seen.append(weakref.ref(state["a"]))
        transload.save_async(state, tmp_path / "no" / "x.pt").result(30)

    with pytest.raises(transload.TransloadError) as caught:
        step()
    del caught
    background.wait()
    assert seen[0]() is None


def test_an_error_that_was_seen_is_not_kept(tmp_path: Path) -> None:
    future: Future[None] = transload.save_async(tensors(), tmp_path / "no" / "x.pt")
    future.exception(30)
    background.wait()
    watched = weakref.ref(future)
    del future
    assert watched() is None


def _fail(_: object) -> None:
    b"\xff".decode()


class Nowhere(FileObject):
    def write(self, buffers: Sequence[object]) -> None: ...


@pytest.mark.parametrize("threads", [0, 2])
def test_a_checksum_that_fails_holds_no_chunk(threads: int) -> None:
    def compute() -> None:
        owner = torch.rand(9)
        chunk = Chunk(memoryview(b"x"), partial(_fail, owner))
        records = [(name, 1, lambda: iter([chunk])) for name in (b"asked", b"unasked")]
        write_archive(Nowhere(None), b"a", records, lambda _: [], threads=threads)

    def tried() -> None:
        with pytest.raises(UnicodeDecodeError):
            compute()

    assert left_in_cycles(tried) == []


READS: dict[str, Callable[[Path], object]] = {
    "load": lambda at: transload.load(at / "x.pt"),
    "load, checked": lambda at: transload.load(at / "x.pt", verify=True),
    "load, mapped": lambda at: transload.load(at / "x.pt", mmap=True),
    "load, trusted": lambda at: transload.load(at / "x.pt", weights_only=False),
    "load, by a function": lambda at: transload.load(at / "x.pt", lambda s, _: s, weights_only=False),
    "load, legacy": lambda at: transload.load(at / "legacy.pt"),
    "load, legacy and trusted": lambda at: transload.load(at / "legacy.pt", weights_only=False),
    "load, cut off": lambda at: transload.load(at / "cut.pt"),
    "load, refused": lambda at: transload.load(at / "module.pt"),
    "load, safetensors": lambda at: transload.load(at / "x.safetensors"),
    "open": lambda at: [(f["a"], f["p"][1:3]) for f in [transload.open(at / "x.pt")]],
    "open, no such key": lambda at: [f["nothing"] for f in [transload.open(at / "x.pt")]],
    "load_into": lambda at: transload.load_into(torch.nn.Linear(300, 300), at / "linear.pt"),
    "load_into, does not fit": lambda at: transload.load_into(torch.nn.Linear(3, 300), at / "linear.pt"),
    "convert": lambda at: transload.convert(at / "x.pt", at / "y.safetensors"),
    "convert to torch": lambda at: transload.convert(at / "legacy.pt", at / "y.pt"),
    "convert a module": lambda at: transload.convert(at / "module.pt", at / "y.npz"),
    "convert, cut off": lambda at: transload.convert(at / "cut.pt", at / "y.pt"),
    "rescue": lambda at: transload.rescue(at / "cut.pt", at / "y.pt"),
}


@pytest.mark.parametrize("name", READS)
def test_reading_leaves_nothing_in_cycles(name: str, tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "x.pt")
    torch.save(tensors(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(300, 300), tmp_path / "module.pt")
    torch.save(torch.nn.Linear(300, 300).state_dict(), tmp_path / "linear.pt")
    transload.convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-2000])
    gc.collect()
    assert left_in_cycles(lambda: READS[name](tmp_path), Storage, Call, Dict, DeviceMap) == []


def test_a_function_for_map_location_is_not_kept(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "x.pt")
    taken: list[Any] = []

    def place(storage: Any, _: str) -> Any:
        taken.append(storage)
        return storage

    transload.load(tmp_path / "x.pt", place, weights_only=False)
    watched = weakref.ref(place)
    del place
    assert watched() is None


def test_a_graph_that_cannot_be_written_is_free() -> None:
    def write() -> None:
        with pytest.raises(CannotPickleGraphError):
            dumps([Dict(["a", [object()], "b", [1]])])

    assert left_in_cycles(write, Dict) == []


def test_a_conversion_that_fails_holds_no_memory() -> None:
    """Each thread has an error, and one of them is asked for."""

    def write_file() -> None:
        reading = os.open(os.devnull, os.O_RDONLY)  # not for writing
        with open_content(b"\2" + bytes(7) + b"{}") as content:
            try:
                transfer.write_file(reading, bytes(64 << 20), [], Job(content), "x")
            finally:
                os.close(reading)

    threads = threading.active_count()
    assert left_in_cycles(write_file, transfer.Chunk) == []
    assert threading.active_count() == threads
