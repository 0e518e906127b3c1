"""Compressed files, unpacked as far as it goes: into a file that has no name, never into memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, Any

from transload.errors import RescueError
from transload.io.sources import Source, copied

__all__ = ["Spool", "most_of", "unpacked"]

_MAX_RATIO = 200
_MAX_SMALL = 4 << 30
"""A packed file may unpack to so many times its size, or to this: a megabyte of zeros can become a gigabyte."""

_CHUNK = 1 << 20
_PACKED = 1 << 16
_SIP = 1 << 10


def most_of(source: Source) -> int:
    """How many bytes a source may unpack to."""
    return max(_MAX_SMALL, _MAX_RATIO * source.size)


class Spool:
    """Bytes in a file that has no name and is gone when it is closed. ``whole`` is whether they are all there were."""

    def __init__(self, name: str) -> None:
        from tempfile import TemporaryFile

        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed with the rescue
        self.name = name
        self.size = 0
        self.whole = True

    def write(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._file.write(data)
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Take the last bytes away again."""
        self._file.seek(size)
        self._file.truncate()
        self.size = size

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        self._file.flush()
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), count, offset)
        self._file.seek(offset)
        return self._file.read(count)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


def _gzip() -> Any:
    return zlib.decompressobj(31)


def _bzip2() -> Any:
    import bz2

    return bz2.BZ2Decompressor()


def _xz() -> Any:
    import lzma

    return lzma.LZMADecompressor()


def _zstd() -> Any:
    """By Python's own module, or one of two others; ``None`` without any."""
    for name in ("compression.zstd", "backports.zstd"):
        module = _module(name)
        if module is not None:
            return module.ZstdDecompressor()
    module = _module("zstandard")
    return None if module is None else _Sipping(module.ZstdDecompressor().decompressobj())


class _Sipping:
    """An unpacker that gives all it has at once, fed little at a time: a kilobyte can unpack to 32 MB."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._waiting = b""

    @property
    def eof(self) -> bool:
        """Whether the packed run has ended."""
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        """What follows it."""
        return bytes(self._inner.unused_data) + self._waiting

    @property
    def unconsumed_tail(self) -> bytes:
        """What is still to be unpacked."""
        return b"" if self.eof else self._waiting

    def decompress(self, data: bytes, _: int = -1) -> bytes:
        """Unpack a little; what is left waits."""
        sip, self._waiting = data[:_SIP], data[_SIP:]
        return bytes(self._inner.decompress(sip))


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        return None


_PACKERS: tuple[tuple[bytes, str, Callable[[], Any]], ...] = (
    (b"\x1f\x8b\x08", "gzip", _gzip),
    (b"BZh", "bzip2", _bzip2),
    (b"\xfd7zXZ\x00", "xz", _xz),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd),
)


def unpacked(source: Source, stack: ExitStack, notes: list[str]) -> Source | None:
    """What a compressed source unpacks to; ``None`` if it is not compressed."""
    head = source.read(0, 8)
    found = next(((name, make) for sign, name, make in _PACKERS if head.startswith(sign)), None)
    if found is None:
        return None
    name, make = found
    if make() is None:
        what = "it is packed with zstd, and no module to unpack that is installed"
        raise RescueError(what, where=source.name, fix="pip install zstandard, or unpack it first: zstd -d FILE.")
    spool = Spool(source.name)
    stack.callback(spool.close)
    spool.whole = _spooled(source, make, spool)
    if not spool.size:
        raise RescueError(f"it is packed with {name}, and nothing of it can be unpacked", where=source.name)
    notes.append(
        f"unpacked from {name}: {spool.size:,} bytes" + ("" if spool.whole else "; its packed data breaks off there")
    )
    return spool


def _spooled(source: Source, make: Callable[[], Any], spool: Spool) -> bool:
    """Unpack as far as it goes; whether that is all. Several packed runs may follow one another."""
    most = most_of(source)
    unpacker: Any = make()
    at = 0
    while at < source.size:
        data = source.read(at, _PACKED)
        at += len(data)
        while data:
            if not _fed(unpacker, data, spool, most):
                return False
            data = unpacker.unused_data if unpacker.eof else b""
            if unpacker.eof:
                if not data.strip(b"\0") and at >= source.size:
                    return True
                unpacker = make()
    return bool(unpacker.eof)


def _fed(unpacker: Any, data: bytes, spool: Spool, most: int) -> bool:
    """Unpack some bytes into the spool; false where they are damaged.

    An unpacker that meets damage gives nothing of what it was fed then. So what it was fed last is fed to it again,
    byte by byte, if it can be taken back to before.
    """
    before = unpacker.copy() if hasattr(unpacker, "copy") else None
    start = spool.size
    if _poured(unpacker, data, spool, most):
        return True
    if before is not None:
        spool.cut(start)
        for at in range(len(data)):
            if not _poured(before, data[at : at + 1], spool, most):
                break
    return False


def _poured(unpacker: Any, data: bytes, spool: Spool, most: int) -> bool:
    pieces = _pieces(unpacker, data)
    while True:
        try:
            piece = next(pieces, None)
        except Exception:  # noqa: BLE001 - each of the four modules has errors of its own
            return False
        if piece is None:
            return True
        spool.write(piece)
        if spool.size > most:
            raise RescueError(f"it unpacks to more than {most:,} bytes", where=spool.name)


def _pieces(unpacker: Any, data: bytes) -> Iterator[bytes]:
    """What some packed bytes unpack to, never much at once."""
    piece = unpacker.decompress(data, _CHUNK)
    yield piece
    while not unpacker.eof:
        tail = getattr(unpacker, "unconsumed_tail", b"")
        if not tail and getattr(unpacker, "needs_input", True) and len(piece) < _CHUNK:
            return
        piece = unpacker.decompress(tail, _CHUNK)
        if not piece and not tail:
            return
        yield piece
