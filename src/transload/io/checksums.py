"""The fastest CRC-32 there is here, and its combination from parts that were read in any order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from typing import NamedTuple
from zlib import crc32

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""The polynomial 1: the constant term of a polynomial over GF(2) is the highest bit."""

Crc32 = Callable[[memoryview, int], int]
"""Takes bytes, and the CRC of what came before them."""

_PACKAGES = ("isal.isal_zlib", "zlib_ng.zlib_ng")
_LEAST = 4096  # bytes from which a library is worth the call


@cache
def fastest_crc32() -> Crc32:
    """The fastest CRC-32 for large writable buffers; it releases the GIL.

    It is from a package with ``zlib``'s functions, or from a system library; these use carry-less multiplication where
    the CPU has it, and are eight times as fast as ``zlib``. Without any of them it is ``zlib``'s.
    """
    return next((found for found in _found() if _is_right(found)), crc32)


def _found() -> Iterator[Crc32]:
    for name in _PACKAGES:
        with suppress(Exception):  # not installed, or broken
            yield import_module(name).crc32
    for library in _LIBRARIES if sys.platform.startswith("linux") else ():
        for folder in _folders():
            with suppress(Exception):
                yield _of_library(f"{folder}/{library.file}", library)


def _is_right(found: Crc32) -> bool:
    """Whether a function agrees with ``zlib``, for several alignments."""
    noise = memoryview(bytearray(range(251)) * 80)
    try:
        return all(found(noise[at:-at], at) == crc32(noise[at:-at], at) for at in (1, 16, 3333))
    except Exception:  # noqa: BLE001 - any error disqualifies it
        return False


class _Library(NamedTuple):
    """A library, its function, and whether the CRC so far is the first argument of that, or the last."""

    file: str
    function: str
    before: bool
    version: str = ""
    least: int = 0


_LIBRARIES = (
    _Library("libdeflate.so.0", "libdeflate_crc32", before=True),  # comes with libtiff
    # On nearly every system, and in every conda environment; fast since 5.6. 5.6.0 and 5.6.1 had a backdoor.
    _Library("liblzma.so.5", "lzma_crc32", before=False, version="lzma_version_number", least=50_060_022),
)


def _folders() -> list[str]:
    """The folders of libraries: conda's, then the system's.

    Only absolute paths, since the loader may search the working directory, where files of strangers may be: an empty
    part of ``LD_LIBRARY_PATH``, as in ``$LD_LIBRARY_PATH:/usr/local/cuda/lib64``, means that.
    """
    multiarch = getattr(sys.implementation, "_multiarch", "")
    own = [f"{sys.base_prefix}/lib"] if sys.base_prefix.startswith("/") else []
    return list(dict.fromkeys((*own, f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib", "/usr/local/lib")))


def _of_library(path: str, library: _Library) -> Crc32:
    """The function of a library, through ctypes. Raises ``OSError`` or others if it is missing or too old."""
    from ctypes import CDLL, addressof, c_char, c_size_t, c_uint32, c_void_p

    loaded = CDLL(path)
    if library.version and loaded[library.version]() < library.least:
        raise ImportError(path)
    function = loaded[library.function]
    data_and_size = (c_void_p, c_size_t)
    function.argtypes = (c_uint32, *data_and_size) if library.before else (*data_and_size, c_uint32)
    function.restype = c_uint32

    def fast(data: memoryview, value: int = 0) -> int:
        if len(data) < _LEAST or data.readonly:  # from_buffer needs writable memory
            return crc32(data, value)
        held = (addressof(c_char.from_buffer(data)), len(data))
        return int(function(value, *held) if library.before else function(*held, value))

    fast.__name__ = library.file.partition(".")[0]
    return fast


def crc32_combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings in sequence, from that of each and the length of the second.

    >>> from zlib import crc32
    >>> crc32_combine(crc32(b"trans"), crc32(b"load"), 4) == crc32(b"transload")
    True
    """
    return times(power(8 * length), first) ^ second if first else second


def combined(parts: Iterable[tuple[int, int, int, int]]) -> dict[int, int]:
    """The CRC-32 of each of some byte strings, from their parts in any order.

    A part is the index of its byte string, its offset there, its length, and its CRC-32.
    """
    whole: dict[int, int] = {}
    for index, _, length, checksum in sorted(parts):
        whole[index] = crc32_combine(whole.get(index, 0), checksum, length)
    return whole


def times(left: int, right: int) -> int:
    """The product of two polynomials, modulo that of the CRC."""
    product = 0
    bit = ONE
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(256)  # parts of a record have few different lengths
def power(exponent: int) -> int:
    """The polynomial x to a power, modulo that of the CRC."""
    out, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            out = times(square, out)
        square = times(square, square)
        exponent >>= 1
    return out
