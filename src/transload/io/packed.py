"""Compressed files: their format, and their content in pieces; for the compressors in Python's library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from transload.io.sources import BytesSource, Source, decompressed

_LZMA_MEMORY = 128 << 20
"""The most memory a stream may ask for: 1 KiB of xz can ask for 4 GiB."""


def _zlib(bits: int) -> Callable[[], Any]:
    return lambda: import_module("zlib").decompressobj(bits)


def _lzma() -> Any:
    return import_module("lzma").LZMADecompressor(memlimit=_LZMA_MEMORY)


_UNPACKERS: dict[str, tuple[tuple[bytes, ...], Callable[[], Any]]] = {
    "gzip": ((b"\x1f\x8b\x08",), _zlib(31)),
    "bzip2": ((b"BZh",), lambda: import_module("bz2").BZ2Decompressor()),
    "xz": ((b"\xfd7zXZ\0",), _lzma),
    "lzma": ((b"\x5d\0\0",), _lzma),
    "zlib": ((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), _zlib(15)),
}


class Unpacked(BytesSource):
    """The content of a compressed file, in memory; ``kind`` is its format, ``packed`` its compressed size."""

    def __init__(self, data: bytearray, name: str, kind: str, packed: int) -> None:
        super().__init__(data, name)
        self.kind, self.packed = kind, packed


def packed_as(head: bytes) -> str:
    """The compression format of a file that begins like this; empty if it has none of these."""
    return next((kind for kind, (signs, _) in _UNPACKERS.items() if head.startswith(signs)), "")


def unpack(source: Source, kind: str, limit: int) -> Iterator[bytes]:
    """The decompressed content, in pieces, at most ``limit`` bytes; it ends early if the stream is cut or damaged."""
    try:
        yield from decompressed(_UNPACKERS[kind][1](), source, 0, source.size, limit)
    except Exception:  # noqa: BLE001 - each module has other errors for a bad stream
        return
