"""Bytes that are not stored as they are: compressed, written as text, or in several parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from transload.frozen import NamedTuple
from transload.io.sources import BytesSource, Source

_PIECE = 1 << 20
_LZMA_MEMORY = 128 << 20  # the most memory a stream may ask for: 1 KiB of xz can ask for 4 GiB

# By format: the first bytes of a file, the modules that may have a decompressor, its name there, and its arguments.
_FORMATS: dict[str, tuple[tuple[bytes, ...], str, str, dict[str, int]]] = {
    "gzip": ((b"\x1f\x8b\x08",), "zlib", "decompressobj", {"wbits": 31}),
    "bzip2": ((b"BZh",), "bz2", "BZ2Decompressor", {}),
    "xz": ((b"\xfd7zXZ\0",), "lzma", "LZMADecompressor", {"memlimit": _LZMA_MEMORY}),
    "lzma": ((b"\x5d\0\0",), "lzma", "LZMADecompressor", {"memlimit": _LZMA_MEMORY}),
    "zlib": ((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib", "decompressobj", {"wbits": 15}),
    "zstd": ((b"\x28\xb5\x2f\xfd",), "compression.zstd backports.zstd zstandard", "ZstdDecompressor", {}),
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


def decompressor(kind: str) -> Any:
    """A new decompressor object for a format; ``ImportError`` if no module that has one is installed."""
    _, modules, name, arguments = _FORMATS[kind]
    for module in modules.split():
        with suppress(ImportError):
            made = getattr(import_module(module), name)(**arguments)
            return made.decompressobj() if module == "zstandard" else made
    raise ImportError(f"no module that decompresses {kind} is installed")


def unpack(source: Source, kind: str, limit: int) -> Iterator[bytes]:
    """The decompressed content, in pieces, at most ``limit`` bytes; it ends early if the stream is cut or damaged."""
    try:
        yield from decompressed(decompressor(kind), source, 0, source.size, limit)
    except Exception:  # noqa: BLE001 - each module has other errors for a bad stream
        return


def inflated(source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The content of a raw deflate stream of ``stored`` bytes, in pieces, at most ``limit`` bytes of it.

    Raises ``zlib.error`` where the stream is damaged.
    """
    from zlib import decompressobj

    return decompressed(decompressobj(-15), source, offset, stored, limit)


def decompressed(decoder: Any, source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The output of a decompressor object for ``stored`` bytes, in pieces, at most ``limit`` bytes."""
    left = limit
    for start in range(0, stored, _PIECE):
        packed = source.read(offset + start, min(_PIECE, stored - start))
        while left > 0 and not decoder.eof:
            most = min(_PIECE, left)
            piece = decoder.decompress(packed, most)
            yield piece
            left -= len(piece)
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


class Part(NamedTuple):
    """``length`` bytes of a source from ``offset`` on."""

    source: Source
    offset: int
    length: int


class Assembly(Source):
    """Parts in sequence, as one source. It does not close their sources."""

    def __init__(self, parts: Iterable[Part], name: str) -> None:
        self._parts = [part for part in parts if part.length > 0]
        self._starts: list[int] = []
        self.name = name
        self.size = 0
        for part in self._parts:
            self._starts.append(self.size)
            self.size += part.length

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        from bisect import bisect_right

        found: list[bytes] = []
        end = min(offset + count, self.size)
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._parts[index]
            inside = offset - self._starts[index]
            data = part.source.read(part.offset + inside, min(part.length - inside, end - offset))
            if not data:
                break
            found.append(data)
            offset += len(data)
            index += inside + len(data) == part.length
        return found[0] if len(found) == 1 else b"".join(found)
