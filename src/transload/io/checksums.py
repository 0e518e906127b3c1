"""The fastest CRC-32 on this machine, and the CRC-32 of a whole from those of parts that were read in any order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from zlib import crc32

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31  # the polynomial 1: the constant term of a polynomial over GF(2) is the highest bit
Crc32 = Callable[[memoryview, int], int]  # takes bytes, and the CRC of what came before them
_LEAST = 4096  # bytes from which a library is worth the call
_LEAST_LZMA = 50_060_022  # version 5.6.2


@cache
def fastest_crc32() -> Crc32:
    """The fastest CRC-32 for large writable buffers; it releases the GIL.

    It comes from a package with ``zlib``'s functions, or from a system library. These use carry-less multiplication
    where the CPU has it, and are eight times as fast as ``zlib``, which is the fallback.
    """
    noise = memoryview(bytearray(range(251)) * 80)
    for candidate in _candidates():
        with suppress(Exception):  # any error disqualifies it, as does a wrong sum for one of several alignments
            if all(candidate(noise[at:-at], at) == crc32(noise[at:-at], at) for at in (1, 16, 3333)):
                return candidate
    return crc32


def _candidates() -> Iterator[Crc32]:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        with suppress(Exception):  # not installed, or broken
            yield import_module(name).crc32
    for library in ("libdeflate.so.0", "liblzma.so.5") if sys.platform.startswith("linux") else ():
        for folder in _folders():
            with suppress(Exception):
                yield _of_library(f"{folder}/{library}")


def _folders() -> list[str]:
    """The folders of libraries: conda's, then the system's.

    Only absolute paths, since the loader may search the working directory, where anybody may have put files: it does
    if ``LD_LIBRARY_PATH`` has an empty element, as in ``$LD_LIBRARY_PATH:/usr/local/cuda/lib64``.
    """
    multiarch = getattr(sys.implementation, "_multiarch", "")
    conda = [f"{sys.base_prefix}/lib"] if sys.base_prefix.startswith("/") else []
    return list(dict.fromkeys((*conda, f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib", "/usr/local/lib")))


def _of_library(path: str) -> Crc32:
    """The function of libdeflate or liblzma, through ctypes. Raises an error if it is missing or too old.

    libdeflate comes with libtiff. liblzma is on nearly every system, and in every conda environment; it is fast since
    5.6, and 5.6.0 and 5.6.1 had a backdoor.
    """
    from ctypes import CDLL, addressof, c_char, c_size_t, c_uint32, c_void_p

    library, name = CDLL(path), path.rpartition("/")[2].partition(".")[0]
    value_first = name == "libdeflate"  # the CRC so far
    if not value_first and library.lzma_version_number() < _LEAST_LZMA:
        raise ImportError(path)
    function = library.libdeflate_crc32 if value_first else library.lzma_crc32
    data_and_size = (c_void_p, c_size_t)
    function.argtypes = (c_uint32, *data_and_size) if value_first else (*data_and_size, c_uint32)
    function.restype = c_uint32

    def fast(data: memoryview, value: int = 0) -> int:
        if len(data) < _LEAST or data.readonly:  # from_buffer needs writable memory
            return crc32(data, value)
        buffer = (addressof(c_char.from_buffer(data)), len(data))
        return int(function(value, *buffer) if value_first else function(*buffer, value))

    fast.__name__ = name
    return fast


def crc32_combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings in sequence, from that of each and the length of the second."""
    return times(power(8 * length), first) ^ second if first else second


def combined(parts: Iterable[tuple[int, int, int, int]]) -> dict[int, int]:
    """The CRC-32 of each of some byte strings, from their parts in any order.

    A part is the index of its byte string, its offset in that string, its length, and its CRC-32.
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
