"""Bytes that are not stored as they are: compressed, written as text, or in several parts."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from transload.frozen import NamedTuple
from transload.io.sources import BytesSource, Source

MAX_RATIO = 1032
"""The most bytes that one deflated byte inflates to."""

_PIECE = 1 << 20
_INPUT = 1 << 10
"""Compressed bytes that are decompressed at a time. If they are damaged, most decompressors return nothing for them."""
_GZIP_INPUT = 32 << 10  # the same for zlib, where nothing is lost, and each step copies a window of 32 KB
_MAX_STREAMS = 1000  # of less than a kilobyte each: a file of empty ones would take seconds per megabyte
_LZMA_MEMORY = 128 << 20  # the most memory a stream may ask for: 1 KiB of xz can ask for 4 GiB

# By format: the first bytes of a file, the modules that may have a decompressor, its name there, and its arguments.
_FORMATS: dict[str, tuple[tuple[bytes, ...], str, str, dict[str, int]]] = {
    "gzip": ((b"\x1f\x8b\x08",), "zlib", "decompressobj", {"wbits": 31}),
    "bzip2": ((b"BZh",), "bz2", "BZ2Decompressor", {}),
    "xz": ((b"\xfd7zXZ\0",), "lzma", "LZMADecompressor", {"memlimit": _LZMA_MEMORY}),
    "lzma": ((b"\x5d\0\0",), "lzma", "LZMADecompressor", {"memlimit": _LZMA_MEMORY}),
    "zlib": ((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib", "decompressobj", {"wbits": 15}),
    "zstd": ((b"\x28\xb5\x2f\xfd",), "compression.zstd backports.zstd zstandard pyzstd", "ZstdDecompressor", {}),
}

UNWRAPPED = ("gzip", "bzip2", "xz", "zstd")
"""The formats that ``rescue`` decompresses. A damaged file may begin like one of the others by chance."""


class Unpacked(BytesSource):
    """The content of a compressed file, in memory; ``kind`` is its format, ``packed`` its compressed size."""

    def __init__(self, data: bytearray, name: str, kind: str, packed: int) -> None:
        super().__init__(data, name)
        self.kind, self.packed = kind, packed


def packed_as(head: bytes) -> str:
    """The compression format of a file that begins with ``head``; empty if it has none of these formats."""
    return next((kind for kind, (starts, *_) in _FORMATS.items() if head.startswith(starts)), "")


def unpack(source: Source, kind: str, limit: int) -> Iterator[bytes]:
    """The decompressed content, in pieces, at most ``limit`` bytes; it ends early if the stream is cut or damaged."""
    with suppress(EOFError, ImportError):
        yield from decompressed(source, kind, limit)


def decompressed(source: Source, kind: str, limit: int) -> Iterator[bytes]:
    """The content of a file of one or more compressed streams, in pieces, at most ``limit`` bytes.

    Raises ``EOFError`` where a stream is cut or damaged, or if there are too many with hardly any content, and
    ``ImportError`` if no module that has a decompressor is installed.
    """
    decoder, left, streams = _decompressor(kind), limit, 1
    step = _GZIP_INPUT if hasattr(decoder, "copy") else _INPUT
    for start in range(0, source.size, step):
        packed = source.read(start, step)
        while packed and left > 0:
            if decoder.eof:  # padding follows, or another stream
                packed = packed.lstrip(b"\0")
                if not packed:
                    break
                decoder = _decompressor(kind)
                streams += 1
                if streams > _MAX_STREAMS + (limit - left) // 1024:
                    raise EOFError("the compressed data has too many streams")
            try:
                # Other files may begin like zlib by chance, and what can be decompressed of them means nothing.
                for piece in _output(decoder, packed, left, to_damage=kind == "gzip"):
                    yield piece
                    left -= len(piece)
            except Exception as error:  # each module has other errors for a bad stream
                raise EOFError(f"the compressed data is damaged: {error}") from error
            packed = decoder.unused_data if decoder.eof else b""
        if left <= 0:
            return
    if not decoder.eof:
        raise EOFError("the compressed data breaks off")


def inflated(source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The content of a raw deflate stream of ``stored`` bytes, in pieces, at most ``limit`` bytes of it.

    Raises ``zlib.error`` where the stream is damaged.
    """
    from zlib import decompressobj

    decoder, left = decompressobj(-15), limit
    for start in range(0, stored, _PIECE):
        if left <= 0 or decoder.eof:
            return
        for piece in _output(decoder, source.read(offset + start, min(_PIECE, stored - start)), left):
            yield piece
            left -= len(piece)


def _decompressor(kind: str) -> Any:
    _, modules, name, arguments = _FORMATS[kind]
    for module in modules.split():
        with suppress(ImportError):
            decoder = getattr(import_module(module), name)(**arguments)
            return _Zstandard(decoder.decompressobj()) if module == "zstandard" else decoder
    raise ImportError(f"no module that decompresses {kind} is installed")


def why_not(kind: str) -> str:
    """Why a format cannot be decompressed here; empty if it can."""
    try:
        _decompressor(kind)
    except ImportError as error:
        return str(error)
    return ""


class _Zstandard:
    """A decompressor of the package ``zstandard``, with the interface of the one in Python's own module.

    It cannot limit its output, but its input is limited: 4 bytes become at most 128 KiB, ``_INPUT`` at most 32 MiB.
    """

    needs_input = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decompress(self, data: bytes, _: int) -> bytes:
        return bytes(self._inner.decompress(data))


def _output(decoder: Any, packed: bytes, limit: int, *, to_damage: bool = False) -> Iterator[bytes]:
    """What a decompressor object returns for some input, in pieces, at most ``limit`` bytes.

    It returns nothing for input with damage. ``to_damage`` repeats that input byte by byte, with a copy from before.
    """
    while limit > 0 and not decoder.eof:
        most = min(_PIECE, limit)
        before: Any = decoder.copy() if to_damage else None
        try:
            piece = decoder.decompress(packed, most)[:limit]
        except Exception:
            for byte in packed if to_damage else b"":  # ends with the same error
                piece = before.decompress(bytes([byte]))[:limit]
                yield piece
                limit -= len(piece)
            raise
        yield piece
        limit -= len(piece)
        packed = getattr(decoder, "unconsumed_tail", b"")  # zlib's; the others keep it themselves
        # After a full piece, zlib may have more output even if it has consumed all input.
        if not packed and getattr(decoder, "needs_input", len(piece) < most):
            break


def from_text(encoding: str, source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """Bytes that are stored as text, one character each, in pieces, at most ``limit`` bytes.

    Raises ``UnicodeError`` if they are stored in another way.
    """
    from codecs import getincrementaldecoder

    decoder, left = getincrementaldecoder(encoding)(), limit
    for start in range(0, stored, _PIECE):
        text = decoder.decode(source.read(offset + start, min(_PIECE, stored - start)))
        yield text.encode("latin-1")[:left]
        left = max(0, left - len(text))


class SourceRange(NamedTuple):
    """``length`` bytes of a source from ``offset`` on."""

    source: Source
    offset: int
    length: int


class Assembly(Source):
    """Parts in sequence, as one source. It does not close their sources."""

    def __init__(self, parts: Iterable[SourceRange], name: str) -> None:
        self._parts = [part for part in parts if part.length > 0]
        self._starts: list[int] = []
        self.name = name
        self.size = 0
        for part in self._parts:
            self._starts.append(self.size)
            self.size += part.length

    def _read(self, offset: int, count: int) -> bytes:
        from bisect import bisect_right

        pieces: list[bytes] = []
        end = offset + count
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._parts[index]
            inside = offset - self._starts[index]
            data = part.source.read(part.offset + inside, min(part.length - inside, end - offset))
            if not data:
                break
            pieces.append(data)
            offset += len(data)
            index += inside + len(data) == part.length
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Inflating(Source):
    """The content of a compressed record. Reading on is cheap; seeking back starts over at the record's first byte."""

    def __init__(
        self, base: Source, offset: int, stored: int, size: int, unpack: Callable[..., Iterator[bytes]] = inflated
    ) -> None:
        self.name = base.name
        self.size = size
        self._begin = partial(unpack, base, offset, stored, size)
        self._lock = allocate_lock()
        self._rewind()

    def _rewind(self) -> None:
        self._pieces = self._begin()
        self._left = memoryview(b"")  # the unread rest of the last piece
        self._position = 0  # where that rest begins

    def _read(self, offset: int, count: int) -> bytes:
        out = bytearray(count)
        return bytes(out[: self._fill(offset, memoryview(out))])

    def _fill(self, offset: int, buffer: memoryview) -> int:
        from zlib import error

        end = offset + len(buffer)
        with self._lock:
            try:
                if offset < self._position:
                    self._rewind()
                while self._position < end:
                    while not self._left:
                        piece = next(self._pieces, None)
                        if piece is None:
                            return max(0, self._position - offset)
                        self._left = memoryview(piece)
                    at = self._position - offset
                    part = self._left[: end - self._position if at >= 0 else -at]
                    if at >= 0:
                        buffer[at : at + len(part)] = part
                    self._left = self._left[len(part) :]
                    self._position += len(part)
            except (error, EOFError, UnicodeError) as reason:
                self._rewind()
                from transload.errors import BrokenFileError, TransloadError

                if isinstance(reason, TransloadError):  # of what it is packed in
                    raise
                raise BrokenFileError(f"its compressed data is damaged ({reason})", where=self.name) from reason
            except BaseException:  # an interrupt may come between decoding bytes and counting them
                self._rewind()
                raise
        return len(buffer)
