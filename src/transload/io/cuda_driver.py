"""The few calls of the CUDA driver that moving bytes takes, without torch between: each a microsecond, not ten.

Streams, events and memory of the driver are those of torch: both use the primary context of a device.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NoReturn

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


def _call(library: Any, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of the driver that raises where the driver answers with anything but 0."""
    function = getattr(library, name)
    function.argtypes = arguments

    def call(*values: Any) -> None:
        if answer := function(*values):
            _refuse(answer, name.removesuffix("_v2"))

    return call


def _refuse(answer: int, call: str) -> NoReturn:
    fix = "`transload doctor` looks for the cause; map_location='cpu' leaves the device alone."
    raise DriverError(f"the CUDA driver answered {answer} to {call}", fix=fix)


def _made(call: Callable[..., None], *arguments: int) -> int:
    """What a call writes to where its first argument points."""
    out = ctypes.c_void_p()
    call(ctypes.byref(out), *arguments)
    return out.value or 0


class Driver:
    """The calls of libcuda that moving bytes takes. Handles of streams, events and contexts are integers.

    ``back`` lets this thread speak to a context; ``unpin`` undoes ``pin``. ``record`` lets an event happen when all
    that was started on a stream so far is done; ``wait`` waits for an event, ``finish`` for all of a stream.
    """

    def __init__(self, library: Any) -> None:
        handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        pointer = ctypes.POINTER(handle)
        self._contexts: dict[int, int] = {}
        self._primary = _call(library, "cuDevicePrimaryCtxRetain", pointer, ctypes.c_int)
        self._get_current = _call(library, "cuCtxGetCurrent", pointer)
        self.back = _call(library, "cuCtxSetCurrent", handle)
        self._stream_create = _call(library, "cuStreamCreate", pointer, number)
        self._stream_destroy = _call(library, "cuStreamDestroy_v2", handle)
        self._event_create = _call(library, "cuEventCreate", pointer, number)
        self._event_destroy = _call(library, "cuEventDestroy_v2", handle)
        self._register = _call(library, "cuMemHostRegister_v2", handle, size, number)
        self.unpin = _call(library, "cuMemHostUnregister", handle)
        self._copy = _call(library, "cuMemcpyAsync", handle, handle, size, handle)
        self.record = _call(library, "cuEventRecord", handle, handle)
        self.wait = _call(library, "cuEventSynchronize", handle)
        self._stream_wait = _call(library, "cuStreamWaitEvent", handle, handle, number)
        self.finish = _call(library, "cuStreamSynchronize", handle)
        self._attribute = library.cuDeviceGetAttribute
        self._attribute.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
        self._batch: Any = getattr(library, "cuMemcpyBatchAsync_v2", None)  # since CUDA 13

    def current(self) -> int:
        """What this thread speaks to: a context, to come back to."""
        return _made(self._get_current)

    def enter(self, device: int) -> None:
        """Let this thread speak to a device."""
        if device not in self._contexts:
            self._contexts[device] = _made(self._primary, device)
        self.back(self._contexts[device])

    def stream(self) -> int:
        """A stream of its own on the device entered."""
        return _made(self._stream_create, _NON_BLOCKING)

    def event(self) -> int:
        """An event on the device entered."""
        return _made(self._event_create, _NO_TIMING)

    def discard(self, streams: Iterable[int], events: Iterable[int]) -> None:
        """Give streams and events of the device entered back, on which nothing is under way."""
        for stream in streams:
            self._stream_destroy(stream)
        for event in events:
            self._event_destroy(event)

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Lock memory, so that devices can read it by themselves."""
        self._register(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Start copies between pinned memory and the device: (target, source, bytes)."""
        if self._batch is None or len(copies) < _MANY:
            for target, source, nbytes in copies:
                self._copy(target, source, nbytes, stream)
            return
        columns = [array("Q", column) for column in zip(*copies, strict=True)]
        targets, sources, sizes = (ctypes.c_void_p(column.buffer_info()[0]) for column in columns)
        attributes, first = _Attributes(_SOURCE_STREAM_ORDERED), ctypes.c_size_t(0)
        answer = self._batch(
            targets, sources, sizes, ctypes.c_size_t(len(copies)),
            ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        if answer:
            _refuse(answer, "cuMemcpyBatchAsync")

    def follow(self, stream: int, event: int) -> None:
        """Let what is started on a stream from now on wait for an event."""
        self._stream_wait(stream, event, 0)

    def can_pin_read_only(self, device: int) -> bool:
        """Whether pages of a file can be pinned without a right to write them."""
        out = ctypes.c_int()
        return self._attribute(ctypes.byref(out), _CAN_REGISTER_READ_ONLY, device) == 0 and bool(out.value)


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
