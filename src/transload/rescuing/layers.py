"""What lies around a checkpoint, taken off: compression, and an archive it was put into."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, Any

from transload.read.source import BytesSource, Source, copied
from transload.rescuing.errors import RescueError
from transload.rescuing.headers import LOCAL, is_sign
from transload.rescuing.legacy import looks_like_a_stream
from transload.rescuing.placing import Found
from transload.rescuing.survey import survey

__all__ = ["MAX_LAYERS", "Spool", "peeled"]

MAX_LAYERS = 3
"""A zip in a zip in a gzip is the most that ever was; a hostile file goes on for ever."""

_MAX_RATIO = 200
_MAX_SMALL = 4 << 30
"""A packed file may unpack to so many times its size, or to this: a megabyte of zeros can become a gigabyte."""

_CHUNK = 1 << 20
_MARKS = (
    b"data.pkl",
    b"constants.pkl",
    b"model.json",
    b"archive_format",
    b"data/0",
    b"tensors/0",
    b"byteorder",
    b"version",
    b".data/extern_modules",
    b".data/python_version",
)
_ENDINGS = (b".pt", b".pth", b".ckpt", b".bin", b".safetensors", b".pt2", b".tar", b".gz", b".zip", b".pkl")


class Spool:
    """Bytes in a file that has no name and is gone when it is closed."""

    def __init__(self, name: str) -> None:
        from tempfile import TemporaryFile

        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed with the rescue
        self.name = name
        self.size = 0

    def write(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._file.write(data)
        self.size += len(data)

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


def peeled(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source:
    """What is inside a source, layer by layer; the source itself if there is nothing around it."""
    for _ in range(MAX_LAYERS):
        inner = _unpacked(source, stack, notes) or _inside(source, member, stack, notes)
        if inner is None:
            break
        source = inner
    return source


# -- compression


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
    return None if module is None else module.ZstdDecompressor().decompressobj()


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


def _unpacked(source: Source, stack: ExitStack, notes: list[str]) -> Source | None:
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
    whole = _spooled(source, make, spool)
    if not spool.size:
        raise RescueError(f"it is packed with {name}, and nothing of it can be unpacked", where=source.name)
    notes.append(
        f"unpacked from {name}: {spool.size:,} bytes" + ("" if whole else "; its packed data breaks off there")
    )
    return spool


def _spooled(source: Source, make: Callable[[], Any], spool: Spool) -> bool:
    """Unpack as far as it goes; whether that is all. Several packed runs may follow one another."""
    most = max(_MAX_SMALL, _MAX_RATIO * source.size)
    unpacker: Any = make()
    at = 0
    while at < source.size:
        data = source.read(at, _CHUNK)
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
    """Unpack some bytes into the spool; false where they are damaged."""
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
    """What some packed bytes unpack to, never much at once where the unpacker can be asked for that."""
    try:
        piece = unpacker.decompress(data, _CHUNK)
    except TypeError:  # zstandard's has no such argument
        yield unpacker.decompress(data)
        return
    yield piece
    while not unpacker.eof:
        tail = getattr(unpacker, "unconsumed_tail", b"")
        if not tail and getattr(unpacker, "needs_input", True) and len(piece) < _CHUNK:
            return
        piece = unpacker.decompress(tail, _CHUNK)
        if not piece and not tail:
            return
        yield piece


# -- an archive around it


def _inside(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source | None:
    """The checkpoint in an archive that is none itself."""
    if not is_sign(source.read(0, 4), LOCAL):
        return None
    records = [record for record in survey(source).records if record.names and not record.dead]
    names = [record.names[0] for record in records]
    if any(name == mark or name.endswith(b"/" + mark) for name in names for mark in _MARKS):
        return None
    held = [record for record in records if _is_checkpoint(source, record)]
    if member:
        held = [record for record in held if record.names[0].decode("utf-8", "backslashreplace") == member]
    if not held:
        return None
    if len(held) > 1:
        shown = ", ".join(record.names[0].decode("utf-8", "backslashreplace") for record in held[:8])
        what = f"{len(held)} checkpoints are in it: {shown}"
        raise RescueError(what, where=source.name, fix="Name one of them: --member NAME.")
    notes.append(f"taken out of an archive: {held[0].names[0].decode('utf-8', 'backslashreplace')}")
    return _taken(source, held[0], stack)


def _plain(source: Source, record: Found) -> Source:
    from transload.read.source import Slice
    from transload.rescuing.inflated import Inflated

    packed = Slice(source, record.payload, record.present, source.name)
    method = record.line.method if record.line else record.local.method if record.local else 0
    if method != 8:
        return packed
    size = record.line.size if record.line else record.described.size if record.described else 1 << 62
    return Inflated(packed, min(size, 1032 * record.present + 64), source.name)


def _is_checkpoint(source: Source, record: Found) -> bool:
    name = record.names[0]
    if name.startswith(b"__MACOSX/") or name.rpartition(b"/")[2].startswith(b"._"):
        return False
    head = BytesSource(_plain(source, record).read(0, 64))
    if is_sign(head.read(0, 4), LOCAL) or looks_like_a_stream(head):
        return True
    return name.lower().endswith(_ENDINGS) and record.present > 64


def _taken(source: Source, record: Found, stack: ExitStack) -> Source:
    plain = _plain(source, record)
    if not hasattr(plain, "_packed"):
        return plain
    spool = Spool(source.name)
    stack.callback(spool.close)
    most = max(_MAX_SMALL, _MAX_RATIO * source.size)
    while spool.size < most and (data := plain.read(spool.size, _CHUNK)):
        spool.write(data)
    return spool
