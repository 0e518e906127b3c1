"""Where an archive goes: a file of the system, or anything that has ``write``."""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Sequence
from errno import EAGAIN, EIO
from functools import cache
from typing import Any

__all__ = ["FileObject", "SystemFile"]

_AT_ONCE = 1000  # buffers: the system takes 1024
_BEHIND = 16 << 20  # bytes after which the system is asked to begin to write them to the disk
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class SystemFile:
    """A file by its descriptor. What is written goes on to the disk at once, so that a flush has little left to do."""

    def __init__(self, descriptor: int, *, push: bool) -> None:
        self._descriptor = descriptor
        self._push = push
        self._written = self._pushed = 0

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all of them, in this order."""
        for start in range(0, len(buffers), _AT_ONCE):
            self._write(list(buffers[start : start + _AT_ONCE]))
        if self._push and self._written - self._pushed >= _BEHIND:
            _begin_writing(self._descriptor, self._pushed, self._written - self._pushed)
            self._pushed = self._written

    def _write(self, buffers: list[Any]) -> None:
        while buffers:
            count = _write_some(self._descriptor, buffers)
            self._written += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = memoryview(buffers[0])[count:]


def _write_some(descriptor: int, buffers: list[Any]) -> int:
    """Bytes written: the system may take fewer than there are."""
    if hasattr(os, "writev"):
        return os.writev(descriptor, buffers)
    return os.write(descriptor, buffers[0])


class FileObject:
    """A file object of the caller, or a buffer."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all of them, in this order."""
        for buffer in buffers:
            view = memoryview(buffer)
            while view.nbytes:
                count = self._file.write(view)
                if count is None and isinstance(self._file, io.RawIOBase):
                    raise BlockingIOError(EAGAIN, "it takes no more bytes for now, and does not wait")
                if type(count) is not int or count >= len(view):  # those who do not tell have written all
                    break
                if count < 1:
                    raise OSError(EIO, "it takes no more bytes")
                view = view[count:]


@cache
def _call() -> Any:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def _begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Only a hint: what the system answers does not matter."""
    call = _call()
    if call is not None:
        call(descriptor, offset, nbytes, _BEGIN_WRITING)
