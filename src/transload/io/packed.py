"""Compressed files: their format, and their content in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from transload.io.sources import BytesSource, Source, decompressed

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
"""What ``rescue`` decompresses. A damaged file may begin like one of the others by chance."""


class Unpacked(BytesSource):
    """The content of a compressed file, in memory; ``kind`` is its format, ``packed`` its compressed size."""

    def __init__(self, data: bytearray, name: str, kind: str, packed: int) -> None:
        super().__init__(data, name)
        self.kind, self.packed = kind, packed


def packed_as(head: bytes) -> str:
    """The compression format of a file that begins like this; empty if it has none of these."""
    return next((kind for kind, (signs, *_) in _FORMATS.items() if head.startswith(signs)), "")


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
