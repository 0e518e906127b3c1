"""Pinned memory for storages on a device, tested with a fake device that copies slowly."""

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
    """Memory that can be referenced weakly."""

    __hash__ = object.__hash__  # type: ignore[assignment] # as for any object


class SlowDevice(CudaFetcher):
    """A fake device with separate memory, which copies in the background, in order and with a delay."""

    def __init__(self) -> None:
        self.slots = self.max_alive = 0
        self.alive: weakref.WeakSet[Slot] = weakref.WeakSet()
        self.copies = 0
        self.part_counts: list[int] = []
        self.threads: list[threading.Thread] = []

    def slot(self, nbytes: int) -> tuple[Any, int]:
        self.slots += 1
        memory = Slot(nbytes)
        self.alive.add(memory)
        self.max_alive = max(self.max_alive, len(self.alive))
        return memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def fetch(self, slot: Any, parts: Sequence[tuple[Any, int, int]]) -> Any:
        self.copies += 1
        self.part_counts.append(len(parts))
        data = b"".join(storage.data[start : start + nbytes] for storage, start, nbytes in parts)
        slot[: len(data)] = b"\xee" * len(data)  # the old bytes are lost at once, the new ones arrive later
        before = self.threads[-1] if self.threads else None

        def copy() -> None:
            if before is not None:
                before.join()
            time.sleep(0.001)
            slot[: len(data)] = data

        thread = threading.Thread(target=copy)
        thread.start()
        self.threads.append(thread)
        return thread.join

    def finish(self) -> None:
        for thread in self.threads:
            thread.join()


class DeviceStorage:
    """A storage on a device."""

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


def storages_on(device_names: Sequence[str]) -> tuple[list[Stored], list[bytes]]:
    out, expected = [], []
    for number, (size, device) in enumerate(zip(SIZES, device_names, strict=True)):
        data = noise(size + 7, number)
        expected.append(data[7:])
        storage: Any = DeviceStorage(data, device)
        if device == "cpu":
            storage = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        out.append(Stored(str(number), None, size, storage, 7, size))
    return out, expected


def write_and_read(storages: list[Stored], fetchers: dict[str, Any], threads: int) -> list[bytes]:
    file = io.BytesIO()
    write_archive(FileObject(file), b"archive", records_of(storages, fetchers), lambda _: [], threads=threads)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return [archive.read(f"archive/data/{number}") for number in range(len(storages))]


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize(
    "device_names",
    [
        ["cuda:0"] * 12,
        ["cuda:0", "cuda:1", "cpu"] * 4,
        ["cuda:0", "mps", "cuda:0", "cpu"] * 3,
        ["mps"] * 12,
        ["cpu"] * 12,
    ],
    ids=["one device", "two devices and the host", "one without pinned memory", "none with pinned memory", "the host"],
)
def test_bytes_on_devices_are_written(device_names: list[str], threads: int) -> None:
    storages, expected = storages_on(device_names)
    devices = {name: SlowDevice() for name in set(device_names) if name.startswith("cuda")}
    assert write_and_read(storages, devices, threads) == expected


@pytest.mark.parametrize("threads", [0, 3])
def test_pinned_memory_is_freed_after_it_is_written(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.formats.zip_writer.PIECE", 4096)
    storages, expected = storages_on(["cuda:0"] * 12)
    device = SlowDevice()
    assert write_and_read(storages, {"cuda:0": device}, threads) == expected
    assert device.slots > 30
    assert AHEAD < device.max_alive <= AHEAD + 5, "one slot for each write in flight, and some writes have two chunks"


def tiny_storages(count: int) -> list[Stored]:
    return [Stored(str(number), None, 1, DeviceStorage(bytes([number]), "cuda:0"), 0, 1) for number in range(count)]


def test_small_storages_are_fetched_together() -> None:
    device = SlowDevice()
    assert write_and_read(tiny_storages(200), {"cuda:0": device}, 0) == [bytes([number]) for number in range(200)]
    assert device.part_counts == [200]


@pytest.mark.parametrize("block", [100, 5000, 1 << 20])
def test_snapshot_of_a_device_is_written_correctly(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_BLOCK", block)
    monkeypatch.setattr(saving, "SMALL", 10)
    storages, expected = storages_on(["cuda:0"] * 12)
    device = SlowDevice()
    pairs: list[Any] = [([], storage) for storage in storages]
    saving.fetch_all(device, pairs)
    assert sum(device.part_counts) == sum(len(runs) for runs, _ in pairs)
    assert device.copies == device.slots == -(-sum(storage.nbytes for storage in storages) // block), (
        "one copy for each block"
    )
    file = io.BytesIO()
    names = [(b"data/" + storage.key.encode(), storage.nbytes) for storage in storages]
    records = [(*name, partial(saving._run_chunks, runs)) for name, (runs, _) in zip(names, pairs, strict=True)]
    write_archive(FileObject(file), b"archive", records, lambda _: [], threads=2)
    with zipfile.ZipFile(file) as archive:
        assert [archive.read(f"archive/data/{number}") for number in range(12)] == expected


def test_snapshot_fetches_small_storages_together() -> None:
    device = SlowDevice()
    pairs: list[Any] = [([], storage) for storage in tiny_storages(200)]
    saving.fetch_all(device, pairs)
    assert device.part_counts == [200]
    device.finish()
    assert [ctypes.string_at(*runs[0][:2]) for runs, _ in pairs] == [bytes([number]) for number in range(200)]


class Unpinned(TorchFunctionMode):
    """Drops ``pin_memory``, which fails on a machine without a GPU."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def test_pinned_memory_is_on_the_host_whatever_the_default_device() -> None:
    """Only host memory can be pinned, and many programs begin with `torch.set_default_device("cuda")`."""
    with torch.device("meta"), Unpinned():
        slot, address = CudaFetcher.slot(CudaFetcher.__new__(CudaFetcher), 100)
    assert (slot.device.type, bool(address)) == ("cpu", True)


class FailingDriver:
    """A driver whose copies fail; it remembers the current context."""

    context = 7

    def current_context(self) -> int:
        return self.context

    def set_device(self, device: int) -> None:
        self.context = device + 100

    def set_context(self, context: int) -> None:
        self.context = context

    def copy(self, _: object, __: int) -> None:
        raise DriverError("the device is gone")


def test_failed_copy_restores_the_context_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FailingDriver()
    monkeypatch.setattr(saving, "cuda_driver", lambda: driver)
    fetcher = CudaFetcher.__new__(CudaFetcher)
    fetcher._device, fetcher.stream = torch.device("cuda:1"), types.SimpleNamespace(cuda_stream=0)
    with pytest.raises(SaveError, match="the device is gone"):
        fetcher.fetch(torch.empty(8), [])
    assert driver.context == 7
