"""The pinned memory that bytes of a device pass through, with a device that takes its time."""

from __future__ import annotations

import ctypes
import io
import threading
import time
import types
import weakref
import zipfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from transload import saving
from transload.errors import SaveError
from transload.formats.zip_writer import AHEAD, write_archive
from transload.io.atomic import FileObject
from transload.io.cuda_driver import DriverError
from transload.saving import CudaFetcher, records_of
from transload.saving.pickling import Stored


class Slot(bytearray):
    """Memory that can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment] # as for any object


class Device(CudaFetcher):
    """It has storages in a memory of its own, and copies them in the background, in order, not at once."""

    def __init__(self) -> None:
        self.slots = self.most = 0
        self.alive: weakref.WeakSet[Slot] = weakref.WeakSet()
        self.copies = 0
        self.asked: list[int] = []
        self.under_way: list[threading.Thread] = []

    def slot(self, nbytes: int) -> tuple[Any, int]:
        self.slots += 1
        made = Slot(nbytes)
        self.alive.add(made)
        self.most = max(self.most, len(self.alive))
        return memoryview(made), ctypes.addressof(ctypes.c_char.from_buffer(made))

    def fetch(self, slot: Any, parts: Sequence[tuple[Any, int, int]]) -> Any:
        self.copies += 1
        self.asked.append(len(parts))
        data = b"".join(storage.data[start : start + nbytes] for storage, start, nbytes in parts)
        slot[: len(data)] = b"\xee" * len(data)  # what was there is gone at once, what comes is there later
        before = self.under_way[-1] if self.under_way else None

        def copy() -> None:
            if before is not None:
                before.join()
            time.sleep(0.001)
            slot[: len(data)] = data

        thread = threading.Thread(target=copy)
        thread.start()
        self.under_way.append(thread)
        return thread.join

    def finish(self) -> None:
        for thread in self.under_way:
            thread.join()


class Far:
    """A storage of that device."""

    def __init__(self, data: bytes, device: str) -> None:
        self.data = data
        self.device = torch.device(device)

    def cpu(self) -> Any:
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).untyped_storage()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PIECE", 4096)
    monkeypatch.setattr(saving, "SMALL", 256)


def noise(count: int, seed: int) -> bytes:
    return (
        torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8).numpy().tobytes()
    )


SIZES = [0, 10, 256, 257, 30_000, 5, 5, 5, 4096, 100_000, 0, 1]


def stored(where: Sequence[str]) -> tuple[list[Stored], list[bytes]]:
    out, expected = [], []
    for number, (size, device) in enumerate(zip(SIZES, where, strict=True)):
        data = noise(size + 7, number)
        expected.append(data[7:])
        storage: Any = Far(data, device)
        if device == "cpu":
            storage = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        out.append(Stored(str(number), None, size, storage, 7, size))
    return out, expected


def through(storages: list[Stored], fetchers: dict[str, Any], threads: int) -> list[bytes]:
    held = io.BytesIO()
    write_archive(FileObject(held), b"archive", records_of(storages, fetchers), lambda _: [], threads=threads)
    with zipfile.ZipFile(held) as archive:
        assert archive.testzip() is None
        return [archive.read(f"archive/data/{number}") for number in range(len(storages))]


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize(
    "where",
    [
        ["cuda:0"] * 12,
        ["cuda:0", "cuda:1", "cpu"] * 4,
        ["cuda:0", "mps", "cuda:0", "cpu"] * 3,
        ["mps"] * 12,
        ["cpu"] * 12,
    ],
    ids=["one device", "two and the host", "one without a ring", "none with a ring", "the host"],
)
def test_bytes_of_devices_arrive(where: list[str], threads: int) -> None:
    storages, expected = stored(where)
    devices = {name: Device() for name in set(where) if name.startswith("cuda")}
    assert through(storages, devices, threads) == expected


@pytest.mark.parametrize("threads", [0, 3])
def test_pinned_memory_is_freed_when_it_is_written(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.formats.zip_writer.PIECE", 4096)
    storages, expected = stored(["cuda:0"] * 12)
    device = Device()
    assert through(storages, {"cuda:0": device}, threads) == expected
    assert device.slots > 30
    assert AHEAD < device.most <= AHEAD + 5, "so many writes, some of them of two chunks"


def few(count: int) -> list[Stored]:
    return [Stored(str(number), None, 1, Far(bytes([number]), "cuda:0"), 0, 1) for number in range(count)]


def test_small_storages_are_fetched_together() -> None:
    device = Device()
    assert through(few(200), {"cuda:0": device}, 0) == [bytes([number]) for number in range(200)]
    assert device.asked == [200]


@pytest.mark.parametrize("block", [100, 5000, 1 << 20])
def test_a_snapshot_of_a_device_has_its_bytes_later(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_BLOCK", block)
    monkeypatch.setattr(saving, "SMALL", 10)
    storages, expected = stored(["cuda:0"] * 12)
    device = Device()
    pairs: list[Any] = [([], each) for each in storages]
    saving.fetch_all(device, pairs)
    assert sum(device.asked) == sum(len(runs) for runs, _ in pairs)
    assert device.copies == device.slots == -(-sum(each.nbytes for each in storages) // block), "one for each block"
    held = io.BytesIO()
    names = [(b"data/" + each.key.encode(), each.nbytes) for each in storages]
    records = [(*name, partial(saving._run_chunks, runs)) for name, (runs, _) in zip(names, pairs, strict=True)]
    write_archive(FileObject(held), b"archive", records, lambda _: [], threads=2)
    with zipfile.ZipFile(held) as archive:
        assert [archive.read(f"archive/data/{number}") for number in range(12)] == expected


def test_a_snapshot_fetches_what_is_small_at_once() -> None:
    device = Device()
    pairs: list[Any] = [([], each) for each in few(200)]
    saving.fetch_all(device, pairs)
    assert device.asked == [200]
    device.finish()
    assert [ctypes.string_at(*runs[0][:2]) for runs, _ in pairs] == [bytes([number]) for number in range(200)]


class Unpinned(TorchFunctionMode):
    """While this lasts, memory can be had that is said to be pinned, on a machine that has nothing to pin it for."""

    def __torch_function__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        return function(*given, **{name: value for name, value in (named or {}).items() if name != "pin_memory"})


def test_the_default_device_is_not_where_memory_of_the_host_is_asked_for() -> None:
    """Nothing can be pinned elsewhere, and `torch.set_default_device("cuda")` is what many programs begin with."""
    with torch.device("meta"), Unpinned():
        slot, address = CudaFetcher.slot(CudaFetcher.__new__(CudaFetcher), 100)
    assert (slot.device.type, bool(address)) == ("cpu", True)


class Refusing:
    """A driver whose copies fail; it remembers what the thread speaks to."""

    context = 7

    def current_context(self) -> int:
        return self.context

    def set_device(self, device: int) -> None:
        self.context = device + 100

    def set_context(self, context: int) -> None:
        self.context = context

    def copy(self, _: object, __: int) -> None:
        raise DriverError("the device is gone")


def test_a_copy_that_fails_leaves_the_thread_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Refusing()
    monkeypatch.setattr(saving, "cuda_driver", lambda: driver)
    fetcher = CudaFetcher.__new__(CudaFetcher)
    fetcher._device, fetcher.stream = torch.device("cuda:1"), types.SimpleNamespace(cuda_stream=0)
    with pytest.raises(SaveError, match="the device is gone"):
        fetcher.fetch(torch.empty(8), [])
    assert driver.context == 7
