"""The few CUDA driver calls that are needed to copy bytes. Without torch in between, each takes 1 µs instead of 10.

torch and this module share streams, events and memory, since both use the primary context of a device.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from transload.errors import LoadError

_PORTABLE = 1  # pinned for every device
_READ_ONLY = 8
_CAN_REGISTER_READ_ONLY = 113
_NON_BLOCKING = 1
_NO_TIMING = 2
_SOURCE_STREAM_ORDERED = 1
_BATCH = 8  # copies from which one call for all of them is faster


class DriverError(LoadError):
    """A call of the driver failed."""


def _call(library: Any, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of the driver that raises ``DriverError`` unless it returns 0."""
    function = getattr(library, name)
    function.argtypes = arguments

    def call(*values: Any) -> None:
        if code := function(*values):
            fix = "`transload doctor` looks for the cause; map_location='cpu' leaves the device alone."
            raise DriverError(f"the CUDA driver returned error {code} for {name.removesuffix('_v2')}", fix=fix)

    return call


def _getter(library: Any, name: str, *arguments: Any) -> Callable[..., int]:
    """A function of the driver that writes a handle through its first argument, as one that returns the handle."""
    call = _call(library, name, ctypes.POINTER(ctypes.c_void_p), *arguments)

    def get(*values: int) -> int:
        out = ctypes.c_void_p()
        call(ctypes.byref(out), *values)
        return out.value or 0

    return get


class CudaDriver:
    """The libcuda calls that are needed to copy bytes. Handles of streams, events and contexts are integers.

    ``current_context`` returns the context of this thread, or 0; ``set_context`` makes another one current.
    ``create_stream`` and ``create_event`` are for the current device; a stream does not wait for the default stream.
    ``record_event`` records an event on a stream; ``wait_event`` and ``wait_stream`` block the host until an event, or
    all work on a stream, has completed.
    """

    def __init__(self, library: Any) -> None:
        handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._contexts: dict[int, int] = {}
        self._primary = _getter(library, "cuDevicePrimaryCtxRetain", ctypes.c_int)
        self.current_context = _getter(library, "cuCtxGetCurrent")
        self.set_context = _call(library, "cuCtxSetCurrent", handle)
        self.create_stream = partial(_getter(library, "cuStreamCreate", number), _NON_BLOCKING)
        self._stream_destroy = _call(library, "cuStreamDestroy_v2", handle)
        self.create_event = partial(_getter(library, "cuEventCreate", number), _NO_TIMING)
        self._event_destroy = _call(library, "cuEventDestroy_v2", handle)
        self._register = _call(library, "cuMemHostRegister_v2", handle, size, number)
        self.unpin = _call(library, "cuMemHostUnregister", handle)
        self._copy = _call(library, "cuMemcpyAsync", handle, handle, size, handle)
        self.record_event = _call(library, "cuEventRecord", handle, handle)
        self.wait_event = _call(library, "cuEventSynchronize", handle)
        self._stream_wait = _call(library, "cuStreamWaitEvent", handle, handle, number)
        self.wait_stream = _call(library, "cuStreamSynchronize", handle)
        self._attribute = library.cuDeviceGetAttribute
        self._attribute.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
        self._batch: Callable[..., None] | None = None
        if hasattr(library, "cuMemcpyBatchAsync_v2"):  # since CUDA 13
            arguments = (handle, handle, handle, size, handle, handle, size, handle)
            self._batch = _call(library, "cuMemcpyBatchAsync_v2", *arguments)

    def set_device(self, device: int) -> None:
        """Make the primary context of a device current for this thread."""
        if device not in self._contexts:
            self._contexts[device] = self._primary(device)
        self.set_context(self._contexts[device])

    def destroy(self, streams: Iterable[int], events: Iterable[int]) -> None:
        """Destroy idle streams and events of the current device."""
        for stream in streams:
            self._stream_destroy(stream)
        for event in events:
            self._event_destroy(event)

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin memory, so that devices can read it by DMA; ``unpin`` undoes it."""
        self._register(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Start copies between pinned memory and the device, each (target, source, bytes)."""
        # By size: driver 580 fails (error 719) if several threads start batches with copies of different sizes.
        by_size: dict[int, list[tuple[int, int, int]]] = {}
        if self._batch is not None and len(copies) >= _BATCH:
            for copy in copies:
                by_size.setdefault(copy[2], []).append(copy)
        for alike in by_size.values() or [copies]:
            if self._batch is None or len(alike) < _BATCH:
                for target, source, nbytes in alike:
                    self._copy(target, source, nbytes, stream)
                continue
            columns = [array("Q", column) for column in zip(*alike, strict=True)]
            addresses = (column.buffer_info()[0] for column in columns)
            # CUmemcpyAttributes is six numbers: the order, two locations, flags. They apply from the first copy on.
            attributes, first = (ctypes.c_int * 6)(_SOURCE_STREAM_ORDERED), ctypes.c_size_t(0)
            self._batch(*addresses, len(alike), ctypes.byref(attributes), ctypes.byref(first), 1, stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work on a stream wait for an event."""
        self._stream_wait(stream, event, 0)

    def can_pin_read_only(self, device: int) -> bool:
        """Whether a device can read pinned pages that are mapped read-only, such as those of a file."""
        out = ctypes.c_int()
        return self._attribute(ctypes.byref(out), _CAN_REGISTER_READ_ONLY, device) == 0 and bool(out.value)


@cache
def cuda_driver() -> CudaDriver | None:
    """The driver that torch uses; ``None`` if it is not NVIDIA's, or lacks a function used here."""
    import torch

    if sys.platform != "linux" or not torch.version.cuda:
        return None
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def event_now(device: str) -> Any:
    """An event of torch, recorded on its current stream of a device; ``cuda_event`` is its handle."""
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(torch.device(device)))
    return event
