"""The few calls of the CUDA driver that moving bytes takes, without torch between: each a microsecond, not ten.

Streams, events and memory of the driver are those of torch: both use the primary context of a device.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from transload.errors import LoadError

_PORTABLE = 1  # pinned for every device
_READ_ONLY = 8
_CAN_REGISTER_READ_ONLY = 113
_NON_BLOCKING = 1
_NO_TIMING = 2
_SOURCE_STREAM_ORDERED = 1
_MANY = 8  # copies from which one call for all of them is faster


class DriverError(LoadError):
    """A call of the driver that failed, and the number it answered."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """How copies of a batch may be done: ``CUmemcpyAttributes``."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The calls of libcuda that moving bytes takes. Handles of streams, events and contexts are integers."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        pointer = ctypes.POINTER(handle)
        self._primary = self._function("cuDevicePrimaryCtxRetain", pointer, ctypes.c_int)
        self._get_current = self._function("cuCtxGetCurrent", pointer)
        self._set_current = self._function("cuCtxSetCurrent", handle)
        self._attribute = self._function(
            "cuDeviceGetAttribute", ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int
        )
        self._stream_create = self._function("cuStreamCreate", pointer, number)
        self._stream_destroy = self._function("cuStreamDestroy_v2", handle)
        self._event_create = self._function("cuEventCreate", pointer, number)
        self._event_destroy = self._function("cuEventDestroy_v2", handle)
        self._register = self._function("cuMemHostRegister_v2", handle, size, number)
        self._unregister = self._function("cuMemHostUnregister", handle)
        self._copy = self._function("cuMemcpyAsync", handle, handle, size, handle)
        self._record = self._function("cuEventRecord", handle, handle)
        self._event_wait = self._function("cuEventSynchronize", handle)
        self._stream_wait = self._function("cuStreamWaitEvent", handle, handle, number)
        self._stream_finish = self._function("cuStreamSynchronize", handle)
        self._batch: Any = getattr(library, "cuMemcpyBatchAsync_v2", None)  # since CUDA 13

    def _function(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes = arguments
        return function

    def current(self) -> int:
        """What this thread speaks to: a context, to come back to."""
        out = ctypes.c_void_p()
        _check(self._get_current(ctypes.byref(out)), "cuCtxGetCurrent")
        return out.value or 0

    def enter(self, device: int) -> None:
        """Let this thread speak to a device."""
        if device not in self._contexts:
            self._contexts[device] = self._made(self._primary, device)
        self.back(self._contexts[device])

    def back(self, context: int) -> None:
        """Let this thread speak to what it spoke to before."""
        _check(self._set_current(context), "cuCtxSetCurrent")

    def _made(self, function: Any, argument: int) -> int:
        out = ctypes.c_void_p()
        _check(function(ctypes.byref(out), argument), function.__name__)
        return out.value or 0

    def stream(self) -> int:
        """A stream of its own on the device entered."""
        return self._made(self._stream_create, _NON_BLOCKING)

    def event(self) -> int:
        """An event on the device entered."""
        return self._made(self._event_create, _NO_TIMING)

    def discard(self, streams: Iterable[int], events: Iterable[int]) -> None:
        """Give streams and events of the device entered back, on which nothing is under way."""
        for stream in streams:
            _check(self._stream_destroy(stream), "cuStreamDestroy")
        for event in events:
            _check(self._event_destroy(event), "cuEventDestroy")

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Lock memory, so that devices can read it by themselves."""
        _check(self._register(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0)), "cuMemHostRegister")

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        _check(self._unregister(address), "cuMemHostUnregister")

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Start copies between pinned memory and the device: (target, source, bytes)."""
        if self._batch is None or len(copies) < _MANY:
            for target, source, nbytes in copies:
                _check(self._copy(target, source, nbytes, stream), "cuMemcpyAsync")
            return
        columns = [array("Q", column) for column in zip(*copies, strict=True)]
        targets, sources, sizes = (ctypes.c_void_p(column.buffer_info()[0]) for column in columns)
        attributes, first = _Attributes(_SOURCE_STREAM_ORDERED), ctypes.c_size_t(0)
        answer = self._batch(
            targets, sources, sizes, ctypes.c_size_t(len(copies)),
            ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        _check(answer, "cuMemcpyBatchAsync")

    def record(self, event: int, stream: int) -> None:
        """Let an event happen when all that was started on a stream so far is done."""
        _check(self._record(event, stream), "cuEventRecord")

    def wait(self, event: int) -> None:
        """Wait until an event has happened."""
        _check(self._event_wait(event), "cuEventSynchronize")

    def follow(self, stream: int, event: int) -> None:
        """Let what is started on a stream from now on wait for an event."""
        _check(self._stream_wait(stream, event, 0), "cuStreamWaitEvent")

    def finish(self, stream: int) -> None:
        """Wait until all that was started on a stream is done."""
        _check(self._stream_finish(stream), "cuStreamSynchronize")

    def can_pin_read_only(self, device: int) -> bool:
        """Whether pages of a file can be pinned without a right to write them."""
        out = ctypes.c_int()
        return self._attribute(ctypes.byref(out), _CAN_REGISTER_READ_ONLY, device) == 0 and bool(out.value)


def _check(answer: int, call: str) -> None:
    if answer:
        fix = "`transload doctor` looks for the cause; map_location='cpu' leaves the device alone."
        raise DriverError(f"the CUDA driver answered {answer} to {call}", fix=fix)


@cache
def cuda_driver() -> Driver | None:
    """The driver that torch uses; ``None`` where it is not NVIDIA's, or lacks what is needed."""
    import torch

    if sys.platform != "linux" or not torch.version.cuda:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
