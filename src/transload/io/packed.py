"""Compressed files: which compressor wrote one, and what it holds, in pieces; those that Python has the modules for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from transload.io.sources import BytesSource, Source, decompressed

_LZMA_MEMORY = 128 << 20
"""What the window of a stream may take: 1 KiB of xz can ask for 4 GiB."""


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
    """What a compressed file holds, in memory: ``kind`` is how it was packed, into so many bytes."""

    def __init__(self, data: bytearray, name: str, kind: str, packed: int) -> None:
        super().__init__(data, name)
        self.kind, self.packed = kind, packed


def packed_as(head: bytes) -> str:
    """How a file was packed that begins like this; empty for what is not packed, or in another way."""
    return next((kind for kind, (signs, _) in _UNPACKERS.items() if head.startswith(signs)), "")


def unpack(source: Source, kind: str, limit: int) -> Iterator[bytes]:
    """What a source holds, in pieces, ``limit`` bytes at most; it ends early where the stream is cut or damaged."""
    try:
        yield from decompressed(_UNPACKERS[kind][1](), source, 0, source.size, limit)
    except Exception:  # noqa: BLE001 - each module has errors of its own for a stranger's stream
        return
