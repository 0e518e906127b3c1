"""Move the bytes of tensors from the source to the target, and verify them.

A ``ConversionJob`` yields the bytes of a ``TargetTensor`` as the target stores them, converted by ``cast`` if the dtype
changes. ``write_file`` writes a file and reads it back in one pass, with several threads. ``formats.zip_writer`` writes
archives, and ``read_back`` compares their checksums. ``check_source`` compares the checksums that the source was saved
with.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EINVAL
from math import copysign, frexp, inf, isfinite, isnan, ldexp, nan
from struct import calcsize, pack, unpack
from typing import TYPE_CHECKING, Any, TypeVar

from transload.checkpoint import Record, Tensor
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import ContentError, ConvertError, OverflowRefusedError
from transload.formats.record_checksums import checksums, verify_records
from transload.io.atomic import write_at
from transload.io.checksums import combined, fastest_crc32
from transload.io.memory import PAGE, Pages, is_equal, memory_at
from transload.io.pool import each
from transload.io.sources import Source, read_into
from transload.nodes import Call
from transload.opening.damage import records_of
from transload.opening.elements import ElementReader, FileRange, numpy_or_none
from transload.opening.numbers import decoded
from transload.render.words import plural
from transload.writing.output import Bundle

if TYPE_CHECKING:
    from transload.writing.lora import Delta

_T = TypeVar("_T")
_PIECE = 4 << 20
_CAST_PIECE = 256 << 10  # numpy makes several arrays from each piece: larger ones would get new memory every time
_DIFFERENT = "the bytes read back differ from those written"
_TRY_AGAIN = "Try again; if it happens again, the memory or the disk of this machine is failing."


@dataclass(slots=True, eq=False)
class TargetTensor:
    """A tensor of the target: its name, dtype and size there, and the source tensor.

    ``run`` is where a file of the source has exactly these bytes, ``crc32`` the checksum of the bytes written, if they
    are known; ``infinite`` counts finite numbers that became infinite.

    In a torch zip it is a view of storage number ``storage``, with ``offset`` and ``stride``; or it is carried over,
    and ``call`` rebuilds it. ``state``: it is in a module's state dict, where parameters are plain tensors. ``key`` is
    its new key in the dictionary that has it, if it gets one. ``delta`` is what an adapter adds to it.
    """

    name: str
    tensor: Tensor
    dtype: str
    run: FileRange | None = None
    crc32: int | None = None
    infinite: int = 0
    call: Call | None = None
    state: bool = True
    key: str | None = None
    delta: Delta | None = None
    storage: int = -1
    offset: int = 0
    stride: tuple[int, ...] = ()
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = itemsize(self.dtype, self.tensor.numel)

    @property
    def is_cast(self) -> bool:
        """Whether its dtype changes."""
        return self.dtype != self.tensor.dtype

    @property
    def is_changed(self) -> bool:
        """Whether its bytes are others than in the source."""
        return self.is_cast or self.delta is not None


@dataclass
class ConversionJob:
    """A conversion in progress. ``progress`` is called with the number of bytes that were written or compared."""

    reader: ElementReader
    dst: str = ""
    bundle: Bundle = field(default_factory=lambda: Bundle(overwrite=False))
    allow_inf: bool = False
    verify: bool = True
    progress: Callable[[int], None] = lambda _: None

    def chunks(self, entry: TargetTensor, size: int = _PIECE) -> Iterator[Any]:
        """The bytes, in chunks of at most ``size``, each valid until the next one is requested."""
        size = min(size, _CAST_PIECE) if entry.is_cast else size
        if entry.delta is not None:
            chunks = entry.delta.chunks(self.reader, entry.tensor, size, allow_inf=self.allow_inf)
        else:
            chunks = self.reader.chunks(entry.tensor, size)
        if not entry.is_cast:
            yield from chunks
            return
        for chunk in chunks:
            converted, infinite = cast(chunk, entry.tensor.dtype, entry.dtype)
            entry.infinite += infinite
            yield converted
        if entry.infinite and not self.allow_inf:
            values, path = f"{entry.infinite:,} of the {entry.tensor.numel:,} values", self.reader.checkpoint.path
            wider = "bfloat16 or float32" if entry.dtype == "float16" else "float64"
            fix = f"Choose {wider}, or add --allow-inf to store them as infinities."
            what = f"{values} of {entry.name} {'is' if entry.infinite == 1 else 'are'} too large for {entry.dtype}"
            raise OverflowRefusedError(what, where=path, fix=fix)


# -- archives that were just written


def read_back(source: Source, records: Sequence[Record], nbytes: int, job: ConversionJob) -> None:
    """Compare records with the checksums of what was written; ``ConvertError`` if any differs.

    ``nbytes`` is how many bytes progress counts.
    """
    left = nbytes

    def progress(count: int) -> None:
        nonlocal left
        count = min(count, left)  # the gaps between records are read with them, and do not count
        left -= count
        job.progress(count)

    for index, value in checksums(source, records, progress).items():
        if value != records[index].crc32:
            raise ConvertError(f"{records[index].name}: {_DIFFERENT}", where=job.dst, fix=_TRY_AGAIN)
    job.progress(left)


# -- written and read back in one pass

CHUNK = 4 << 20
_THREADS = 5  # may exceed the number of cores: the threads mostly wait for the disk
_DIRECT_FROM = 64 << 20  # bytes of a file from which O_DIRECT pays; smaller files may as well stay in the page cache


def write_file(descriptor: int, head: bytes, entries: Sequence[TargetTensor], job: ConversionJob, where: str) -> None:
    """Write ``head`` and the bytes of entries, read them back if the job asks for it, and set the CRC-32 of each.

    Chunks are filled in file order, by one thread at a time; the same thread then checksums, writes, reads back and
    compares its chunk, while others fill the next. Raises ``ConvertError`` if the file differs from what was written.
    Progress counts the bytes of each entry twice if they are also compared.
    """
    size = len(head) + sum(entry.nbytes for entry in entries)
    nbytes = min(CHUNK, -(-max(size, 1) // PAGE) * PAGE)
    count = _THREADS if size > CHUNK and hasattr(os, "preadv") else 1  # Windows has one position for all threads
    free = [FileBuffer(nbytes) for _ in range(count)]
    parts: list[tuple[int, int, int, int]] = []  # index of the entry, file offset, length and checksum

    def worker() -> Callable[[FileBuffer], None]:
        copy, compute = FileBuffer(nbytes), fastest_crc32()

        def process(chunk: FileBuffer) -> None:
            for index, at, length in chunk.parts:
                parts.append((index, chunk.offset + at, length, compute(chunk.view[at : at + length], 0)))
            whole = -(-chunk.filled // PAGE) * PAGE  # O_DIRECT needs whole pages; the file is truncated at the end
            _retry_cached(write_at, descriptor, chunk.view[:whole], chunk.offset)
            if job.verify:
                read = _retry_cached(read_into, descriptor, copy.view[:whole], chunk.offset)
                if read < whole or not is_equal(chunk.pages.address, copy.pages.address, whole):
                    raise ConvertError(_DIFFERENT, where=where, fix=_TRY_AGAIN)
            free.append(chunk)

        return process

    # Where the file system supports it, bypass the page cache: then the bytes on the disk are compared, there is no
    # flush to wait for at the end, and no other file is evicted from memory.
    direct = size >= _DIRECT_FROM and _set_direct(descriptor, on=True)
    try:
        each(_fill_chunks(head, entries, job, free), worker, count)
        os.ftruncate(descriptor, size)
    finally:
        if direct:
            _set_direct(descriptor, on=False)
    sums = combined(parts)
    for index, entry in enumerate(entries):
        entry.crc32 = sums.get(index, 0)


class FileBuffer:
    """A buffer for bytes from ``offset`` on in a file. ``parts`` are (index of the entry, start, length)."""

    def __init__(self, nbytes: int) -> None:
        self.pages = Pages(nbytes)
        self.view = memory_at(self.pages.address, nbytes)
        self.offset = self.filled = 0
        self.parts: list[tuple[int, int, int]] = []


def _fill_chunks(
    head: bytes, entries: Sequence[TargetTensor], job: ConversionJob, free: list[FileBuffer]
) -> Iterator[FileBuffer]:
    """The chunks of a file, in order. They are taken from ``free``; the caller must return them when written."""
    chunk = free.pop()
    for index, entry in enumerate((None, *entries), -1):
        name, nbytes = ("the header", len(head)) if entry is None else (entry.name, entry.nbytes)
        run = None
        if entry is not None and not entry.is_changed:
            run = entry.run = job.reader.file_range(entry.tensor)
        if run is not None:  # read directly into the chunk
            source = job.reader.open_file(run.file)
        else:
            pieces = filter(len, [head] if entry is None else job.chunks(entry))
            left = memoryview(b"")
        done = 0
        while True:
            if chunk.filled == len(chunk.view):
                end = chunk.offset + chunk.filled
                yield chunk
                chunk = free.pop()
                chunk.offset, chunk.filled, chunk.parts = end, 0, []
            room = chunk.view[chunk.filled :]
            if run is not None:
                count = source.readinto(run.offset + done, room[: nbytes - done])
            else:
                left = left or memoryview(next(pieces, b""))
                count = min(len(left), len(room))
                room[:count] = left[:count]
                left = left[count:]
            if not count:
                break
            chunk.filled += count
            if entry is not None:
                chunk.parts.append((index, chunk.filled - count, count))
                job.progress(2 * count if job.verify else count)
            done += count
        if done != nbytes:
            raise ContentError(f"{name} has {done:,} bytes, not {nbytes:,}", where=job.reader.checkpoint.path)
    yield chunk


def _retry_cached(call: Callable[[int, memoryview, int], _T], descriptor: int, buffer: memoryview, offset: int) -> _T:
    """Read or write; retry without O_DIRECT if the file system accepts the flag but refuses the call.

    Any thread that shares the descriptor may have cleared the flag already, so it is cleared without checking.
    """
    try:
        return call(descriptor, buffer, offset)
    except OSError as error:
        if error.errno != EINVAL:
            raise
    _set_direct(descriptor, on=False)
    return call(descriptor, buffer, offset)


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Set or clear O_DIRECT; return whether that worked."""
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        return True
    return False


def check_source(entries: Sequence[TargetTensor], job: ConversionJob, paths: Sequence[str]) -> None:
    """Compare the checksums that the source was saved with; ``ConvertError`` names one of ``paths`` if one is wrong.

    Storages whose checksum was computed while they were written are not read again.
    """
    reader = job.reader
    tensors = (tensor for entry in entries for tensor in (entry.tensor, *entry.tensor.parts))
    unchecked = {reader.located(tensor).storage for tensor in tensors if tensor.storage}
    damaged: list[tuple[str, str]] = []
    for entry in entries:
        run, crc32, storage = entry.run, entry.crc32, reader.storage(entry.tensor)
        if crc32 is None or run is None or storage is None or storage.crc32 is None:
            continue
        if (storage.offset, storage.nbytes) == (run.offset, run.nbytes):  # else its checksum covers other bytes
            unchecked.discard(storage.id)
            if storage.crc32 != crc32:
                damaged.append(
                    (storage.file, f"checksum {crc32:08x}, saved with {storage.crc32:08x}; holds {entry.name}")
                )
    used = [s for s in reader.storages() if s.id in unchecked and s.crc32 is not None]
    # In a file of several archives, many records have the same name, and only the position tells them apart.
    places = {place for s in used for place in ((s.file, s.record), (s.file, s.record, s.offset))}
    for file, records in records_of(reader).items():
        names = Counter(record.name for record in records)
        of_storages = [
            record
            for record in records
            if ((file, record.name) if names[record.name] == 1 else (file, record.name, record.offset)) in places
        ]
        damaged += [(file, problem.detail) for problem in verify_records(reader.open_file(file), of_storages, used)]
    if damaged:
        file, detail = damaged[0]
        # Of several inputs, the files of each begin with its number.
        path = paths[int(file.partition(":")[0])] if len(paths) > 1 else paths[0]
        here = [detail for other, detail in damaged if other == file]
        what = f"it has {plural(len(here), 'damaged record')}: {detail}"
        raise ConvertError(what, where=path, fix="transload rescue saves what is intact.")


# -- floating-point conversion, rounded once, to nearest, ties to even; little-endian throughout
#
# numpy does it at the speed of memory. Without numpy, ``cast_slowly`` converts number by number; the tests compare the
# two. torch rounds float64 to bfloat16 in two steps, through float32; this rounds once.

_STRUCT = {"float64": "<d", "float32": "<f", "float16": "<e", "bfloat16": "<f"}
_EXPONENT = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}  # bits of the exponent
_MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_INFINITE = {dtype: (1 << _EXPONENT[dtype]) - 1 << bits for dtype, bits in _MANTISSA.items()}
# The quiet NaN that processors produce; it gets the sign of the number it came from.
_NAN = {dtype: _INFINITE[dtype] | 1 << bits - 1 for dtype, bits in _MANTISSA.items()}
_SIGN = {dtype: 1 << _EXPONENT[dtype] + bits for dtype, bits in _MANTISSA.items()}
CASTABLE = tuple(_MANTISSA)


def cast_dtype(dtype: str, wanted: str) -> str:
    """The dtype of a tensor in the target if ``wanted`` is requested: only floating-point dtypes change."""
    return wanted if wanted and dtype in CASTABLE else dtype


def cast(data: memoryview, dtype: str, wanted: str) -> tuple[bytes, int]:
    r"""The numbers in another dtype, and how many finite ones became infinite.

    >>> from struct import pack
    >>> cast(memoryview(pack("<2f", 1.0, 65520.0)), "float32", "float16")
    (b'\x00<\x00|', 1)
    """
    numpy = numpy_or_none()
    if numpy is None:
        return cast_slowly(bytes(data), dtype, wanted)
    with numpy.errstate(all="ignore"):
        values = decoded(data, dtype)
        if wanted != "bfloat16":
            numbers = values.astype(f"<f{ITEMSIZE[wanted]}").view(f"<u{ITEMSIZE[wanted]}")
        else:
            near = values.astype("<f4")
            bits = near.view("<u4")
            if dtype == "float64":
                # Round to odd: truncate, and set the last bit if that lost anything. Then rounding again is exact.
                back = near.astype("<f8")
                inexact = (back != values) & ~numpy.isnan(values)
                bits = bits - (inexact & (numpy.abs(back) > numpy.abs(values))).astype("<u4")
                bits |= inexact.astype("<u4")
            # The upper half of each float32, after adding what makes the lower half round it.
            numbers = ((bits + ((bits >> 16) & 1) + numpy.uint32(0x7FFF)) >> 16).astype("<u2")
        exact = numbers.dtype.type  # numpy 1 would promote uint64 and Python integers to floats
        nans = numpy.isnan(values)
        if nans.any():
            negative, positive = exact(_SIGN[wanted] | _NAN[wanted]), exact(_NAN[wanted])
            numbers[nans] = numpy.where(numpy.signbit(values[nans]), negative, positive)
        infinite = numbers & exact(_SIGN[wanted] - 1) == _INFINITE[wanted]
        count = int(numpy.count_nonzero(infinite & numpy.isfinite(values))) if infinite.any() else 0
    return numbers.tobytes(), count


def cast_slowly(data: bytes, dtype: str, wanted: str) -> tuple[bytes, int]:
    """The same as ``cast``, without numpy. A bfloat16 is the upper half of a float32."""
    width, out, count = ITEMSIZE[dtype], bytearray(), 0
    fraction, most = _MANTISSA[wanted], 1 << _EXPONENT[wanted] - 1  # 2**most is the first power that is infinite
    for at in range(0, len(data), width):
        (value,) = unpack(_STRUCT[dtype], data[at : at + width].rjust(calcsize(_STRUCT[dtype]), b"\0"))
        number = copysign(nan, value) if isnan(value) else value
        if isfinite(value):
            last = max(frexp(value)[1] - 1, 2 - most) - fraction  # the exponent of the last digit
            digits = round(ldexp(value, -last))  # to the nearest, ties to even
            infinite = digits.bit_length() + last > most
            number = copysign(inf if infinite else ldexp(digits, last), value)
            count += infinite
        out += pack(_STRUCT[wanted], number)[-ITEMSIZE[wanted] :]
    return bytes(out), count
