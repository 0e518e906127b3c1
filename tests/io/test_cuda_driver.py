"""The calls to libcuda, made to a fake library that records them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from transload.errors import TransloadError
from transload.io.cuda_driver import CudaDriver, DriverError, cuda_driver

NAMES = (
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyAsync",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
)


class _Function:
    def __init__(self, library: Library, name: str) -> None:
        self.__name__ = name
        self.argtypes: tuple[Any, ...] = ()
        self._library = library

    def __call__(self, *arguments: Any) -> int:
        assert not self.argtypes or len(arguments) == len(self.argtypes)
        first = getattr(arguments[0], "_obj", None)
        if first is not None:
            first.value = self._library.outputs.get(self.__name__, 0)
        self._library.calls.append(
            (self.__name__, tuple(_plain(argument) for argument in arguments if not hasattr(argument, "_obj")))
        )
        return self._library.return_codes.get(self.__name__, 0)


def _plain(argument: Any) -> Any:
    return getattr(argument, "value", argument)


class Library:
    """``outputs``: what calls write to where their first argument points; ``return_codes``: what they return."""

    def __init__(self, *extra: str, without: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.outputs: dict[str, int] = {}
        self.return_codes: dict[str, int] = {}
        for name in (*NAMES, *extra):
            if name != without:
                setattr(self, name, _Function(self, name))


@pytest.fixture
def library() -> Library:
    return Library()


def test_context_is_set_and_restored(library: Library) -> None:
    cuda = CudaDriver(library)
    library.outputs.update(cuCtxGetCurrent=0x77, cuDevicePrimaryCtxRetain=0x100)
    before = cuda.current_context()
    cuda.set_device(1)
    cuda.set_device(1)
    cuda.set_context(before)
    assert [call for call in library.calls if call[0] != "cuCtxGetCurrent"] == [
        ("cuDevicePrimaryCtxRetain", (1,)),  # once: libcuda counts references
        ("cuCtxSetCurrent", (0x100,)),
        ("cuCtxSetCurrent", (0x100,)),
        ("cuCtxSetCurrent", (0x77,)),
    ]


def test_streams_and_events_are_created_and_destroyed(library: Library) -> None:
    cuda = CudaDriver(library)
    library.outputs.update(cuStreamCreate=0x10, cuEventCreate=0x20)
    cuda.destroy([cuda.create_stream()], [cuda.create_event(), cuda.create_event()])
    assert library.calls == [
        ("cuStreamCreate", (1,)),  # it does not wait for the default stream
        ("cuEventCreate", (2,)),  # without timing
        ("cuEventCreate", (2,)),
        ("cuStreamDestroy_v2", (0x10,)),
        ("cuEventDestroy_v2", (0x20,)),
        ("cuEventDestroy_v2", (0x20,)),
    ]


def test_current_context_of_a_thread_without_one_is_zero(library: Library) -> None:
    assert CudaDriver(library).current_context() == 0


def test_memory_is_pinned_for_all_devices_and_unpinned(library: Library) -> None:
    cuda = CudaDriver(library)
    cuda.pin(4096, 8192)
    cuda.pin(1 << 40, 4096, read_only=True)
    cuda.unpin(4096)
    assert library.calls == [
        ("cuMemHostRegister_v2", (4096, 8192, 1)),
        ("cuMemHostRegister_v2", (1 << 40, 4096, 9)),
        ("cuMemHostUnregister", (4096,)),
    ]


def test_copies_events_and_waits_call_the_driver(library: Library) -> None:
    cuda = CudaDriver(library)
    cuda.stream_wait_event(7, 8)
    cuda.copy([(1 << 45, 2, 3), (4, 5, 6)], 7)
    cuda.record_event(9, 7)
    cuda.wait_event(9)
    cuda.wait_stream(7)
    assert library.calls == [
        ("cuStreamWaitEvent", (7, 8, 0)),
        ("cuMemcpyAsync", (1 << 45, 2, 3, 7)),
        ("cuMemcpyAsync", (4, 5, 6, 7)),
        ("cuEventRecord", (9, 7)),
        ("cuEventSynchronize", (9,)),
        ("cuStreamSynchronize", (7,)),
    ]


@pytest.mark.parametrize("count", [1, 7, 8, 500])
def test_many_copies_of_one_size_are_one_batch_call_if_available(count: int) -> None:
    arrays: list[list[int]] = []
    library = Library("cuMemcpyBatchAsync_v2")

    def batch(*arguments: Any) -> int:
        arrays.extend(list((ctypes.c_uint64 * arguments[3]).from_address(each)) for each in arguments[:3])
        assert (arguments[5]._obj.value, *arguments[6:]) == (0, 1, 77)
        assert bytes(arguments[4]._obj) == (1).to_bytes(24, "little")
        return 0

    library.cuMemcpyBatchAsync_v2 = batch  # type: ignore[attr-defined]
    copies = [((1 << 45) + index, 100 + index, 64) for index in range(count)]
    others = [(index, index, 1 + index) for index in range(20)]
    CudaDriver(library).copy([*copies, *others] if count >= 8 else copies, 77)
    if count >= 8:
        assert [tuple(each) for each in zip(*arrays, strict=True)] == copies
        assert [call[1][:3] for call in library.calls] == others
    else:
        assert [call[1][:3] for call in library.calls] == copies


def test_copy_of_nothing_makes_no_call(library: Library) -> None:
    CudaDriver(library).copy([], 1)
    assert library.calls == []


@pytest.mark.parametrize(("code", "value", "expected"), [(0, 1, True), (0, 0, False), (3, 1, False)])
def test_can_pin_read_only_queries_the_device_attribute(
    code: int, value: int, library: Library, *, expected: bool
) -> None:
    library.return_codes["cuDeviceGetAttribute"] = code
    library.outputs["cuDeviceGetAttribute"] = value
    assert CudaDriver(library).can_pin_read_only(1) is expected
    assert library.calls == [("cuDeviceGetAttribute", (113, 1))]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cuDeviceGetAttribute"])
def test_nonzero_return_code_is_a_driver_error(name: str, library: Library) -> None:
    library.return_codes[name] = 700
    cuda = CudaDriver(library)
    with pytest.raises(DriverError, match="700") as raised:
        _call_all(cuda)
    assert isinstance(raised.value, TransloadError)
    assert isinstance(raised.value, RuntimeError)
    assert name.removesuffix("_v2") in str(raised.value)


def _call_all(cuda: CudaDriver) -> None:
    cuda.current_context()
    cuda.set_device(0)
    cuda.destroy([cuda.create_stream()], [cuda.create_event()])
    cuda.pin(1, 2)
    cuda.unpin(1)
    cuda.copy([(1, 2, 3)], 4)
    cuda.record_event(1, 2)
    cuda.wait_event(1)
    cuda.stream_wait_event(1, 2)
    cuda.wait_stream(1)


class TestCudaDriver:
    @pytest.fixture(autouse=True)
    def _clear_cache(self) -> Any:
        cuda_driver.cache_clear()
        yield
        cuda_driver.cache_clear()

    def test_none_if_torch_is_built_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("libcuda is not needed"))
        assert cuda_driver() is None

    @pytest.mark.parametrize("platform", ["win32", "darwin"])
    def test_none_on_other_systems_than_linux(self, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(sys, "platform", platform)
        assert cuda_driver() is None

    def test_none_if_libcuda_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        def missing(_: str) -> None:
            raise OSError("libcuda.so.1: cannot open shared object file")

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(ctypes, "CDLL", missing)
        assert cuda_driver() is None

    @pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuCtxGetCurrent"])
    def test_none_if_libcuda_lacks_a_function(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(without=name))
        assert cuda_driver() is None
        cuda_driver.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
        assert cuda_driver() is cuda_driver() is not None
