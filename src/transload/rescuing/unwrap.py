"""What is around a checkpoint, taken off: compression, an archive it was put into, a retag that was interrupted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any, BinaryIO

from transload.errors import RescueError
from transload.io.journal import has_journal, journal_of, names_of, state_of
from transload.io.sources import BytesSource, Slice, Source
from transload.rescuing.assembly import Assembly, Part, file_source, literal, repaired, temporary_file
from transload.rescuing.bitflips import DEFLATED, MAX_RATIO, check_records, inflated, repairs_of
from transload.rescuing.recover import looks_like_damaged_legacy
from transload.rescuing.result import Repair
from transload.rescuing.zip_recovery import claim_of
from transload.rescuing.zip_scan import FoundRecord, Scan, starts_record

__all__ = ["journal_undone", "unwrapped"]

_MAX_LAYERS = 3
"""A zip in a zip in a gzip is the most that occurs; a hostile file goes on for ever."""

_MAX_UNPACKED_RATIO = 200
_MIN_UNPACKED_LIMIT = 4 << 30
"""A packed file may unpack to so many times its size, or to this: a megabyte of zeros can become a gigabyte."""

_MAX_JOURNAL = 1 << 30
"""It holds an index and a directory twice, and may have been put beside the file by anybody."""

_CHUNK = 1 << 20
_PACKED_CHUNK = 1 << 16
_SIP = 1 << 10
_RECORDS = (
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
"""Records of an archive that is a checkpoint itself."""

_SUFFIXES = (b".pt", b".pth", b".ckpt", b".bin", b".safetensors", b".pt2", b".tar", b".gz", b".zip", b".pkl")


def unwrapped(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source:
    """What is inside a source, layer by layer; the source itself if there is nothing around it."""
    for _ in range(_MAX_LAYERS):
        inner = _decompressed(source, stack, notes) or _extracted(source, member, stack, notes)
        if inner is None:
            break
        source = inner
    return source


def journal_undone(path: str, source: Source, notes: list[str]) -> Source | None:
    """The file as it was before a retag that was interrupted, by the journal beside it."""
    descriptor = getattr(source, "descriptor", -1)
    if not has_journal(path) or descriptor < 0:
        return None
    from pathlib import Path  # which costs ten milliseconds

    file = Path(names_of(path).journal)
    try:
        journal = journal_of(file.read_bytes()) if file.stat().st_size <= _MAX_JOURNAL else None
    except OSError:
        return None
    if journal is None or state_of(descriptor, journal.changes) != "between":  # it has not begun, or is done
        return None
    parts: list[Part] = []
    at = 0
    for run in journal.changes.runs:
        if run.offset < at:
            return None
        parts += (Part(source, at, run.offset - at), literal(run.old))
        at = run.offset + len(run.old)
    parts.append(Part(source, at, max(0, journal.changes.old_size - at)))
    notes.append("a retag of the file was interrupted: it is read as it was before, using the journal beside it")
    return Assembly(parts, source.name)


def _unpacked_limit(source: Source) -> int:
    return max(_MIN_UNPACKED_LIMIT, _MAX_UNPACKED_RATIO * source.size)


# -- compression


class _Sips:
    """A decompressor that gives all it has at once, fed little at a time: a kilobyte can unpack to 32 MB."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._waiting = b""

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self._waiting

    @property
    def unconsumed_tail(self) -> bytes:
        return b"" if self.eof else self._waiting

    def decompress(self, data: bytes, _: int = -1) -> bytes:
        sip, self._waiting = data[:_SIP], data[_SIP:]
        return bytes(self._inner.decompress(sip))


def _zstd() -> Any:
    """A decompressor by Python's own module, or one of two others; ``None`` without any."""
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            made = import_module(name).ZstdDecompressor()
        except ImportError:
            continue
        return _Sips(made.decompressobj()) if name == "zstandard" else made
    return None


_COMPRESSIONS: tuple[tuple[bytes, str, Callable[[], Any]], ...] = (
    (b"\x1f\x8b\x08", "gzip", lambda: zlib.decompressobj(31)),
    (b"BZh", "bzip2", lambda: import_module("bz2").BZ2Decompressor()),
    (b"\xfd7zXZ\x00", "xz", lambda: import_module("lzma").LZMADecompressor()),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd),
)


def _decompressed(source: Source, stack: ExitStack, notes: list[str]) -> Source | None:
    """What a compressed source decompresses to, in a temporary file; ``None`` if it is not compressed."""
    head = source.read(0, 8)
    name, make = next(((name, make) for sign, name, make in _COMPRESSIONS if head.startswith(sign)), ("", None))
    if make is None:
        return None
    if make() is None:
        what = "the file is compressed with zstd, and no module that reads it is installed"
        raise RescueError(what, where=source.name, fix="pip install zstandard, or decompress it first: zstd -d FILE.")
    file = temporary_file(stack)
    whole = _decompress(source, make, file)
    unpacked = file_source(file, source.name)
    if not unpacked.size:
        raise RescueError(
            f"the file is compressed with {name}, and nothing of it can be decompressed", where=source.name
        )
    cut = "" if whole else "; the compressed data breaks off there"
    notes.append(f"decompressed from {name}: {unpacked.size:,} bytes{cut}")
    return unpacked if whole else _Damaged(unpacked, 0, unpacked.size, unpacked.name)


def _decompress(source: Source, make: Callable[[], Any], file: BinaryIO) -> bool:
    """Unpack as far as it goes; whether that is all. Several compressed streams may follow one another."""
    unpacker, at = make(), 0
    while at < source.size:
        data = source.read(at, _PACKED_CHUNK)
        at += len(data)
        while data:
            before, start = unpacker.copy() if hasattr(unpacker, "copy") else None, file.tell()
            if not _feed(unpacker, data, file, source):
                # It gives nothing of what it was fed when it met the damage. So that is fed to it again byte by byte,
                # if it can be taken back.
                if before is not None:
                    file.seek(start)
                    file.truncate()
                    for byte in data:
                        if not _feed(before, bytes([byte]), file, source):
                            break
                return False
            if not unpacker.eof:
                break
            data = unpacker.unused_data
            if not data.strip(b"\0") and at >= source.size:
                return True
            unpacker = make()
    return bool(unpacker.eof)


def _feed(unpacker: Any, data: bytes, file: BinaryIO, source: Source) -> bool:
    """Unpack some bytes into a file; false where they are damaged."""
    pieces = _pieces(unpacker, data)
    while True:
        try:
            piece = next(pieces, None)
        except Exception:  # noqa: BLE001 - each of the four modules has errors of its own
            return False
        if piece is None:
            return True
        file.write(piece)
        limit = _unpacked_limit(source)
        if file.tell() > limit:
            raise RescueError(f"the file decompresses to more than {limit:,} bytes", where=source.name)


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


# -- an archive around a checkpoint


def _extracted(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source | None:
    """The checkpoint in an archive; ``None`` if the archive holds none or is one itself."""
    if not starts_record(source):
        return None
    records = [record for record in Scan(source).records if record.names and not record.replaced]
    if any(name == own or name.endswith(b"/" + own) for name in (r.names[0] for r in records) for own in _RECORDS):
        return None
    held = {record.header: record for record in records if _is_checkpoint(source, record)}
    names = {header: record.names[0].decode("utf-8", "backslashreplace") for header, record in held.items()}
    if member:
        names = {header: name for header, name in names.items() if name == member}
    if not names:
        return None
    if len(names) > 1:
        what = f"{len(names)} checkpoints are in the archive: {', '.join(list(names.values())[:8])}"
        raise RescueError(what, where=source.name, fix="Name one of them: --member NAME.")
    ((header, name),) = names.items()
    notes.append(f"extracted from an archive: {name}")
    return _extract(source, held[header], stack, notes)


def _is_checkpoint(source: Source, record: FoundRecord) -> bool:
    name = record.names[0]
    if name.startswith(b"__MACOSX/") or name.rpartition(b"/")[2].startswith(b"._"):
        return False
    head = _head(source, record)
    if starts_record(head) or looks_like_damaged_legacy(head):
        return True
    return name.lower().endswith(_SUFFIXES) and record.present > 64


def _method(record: FoundRecord) -> int:
    return record.entry.method if record.entry else record.local.method if record.local else 0


def _head(source: Source, record: FoundRecord) -> Source:
    """The first bytes of a record."""
    if _method(record) != DEFLATED:
        return Slice(source, record.payload, min(64, record.present), source.name)
    return BytesSource(next(_inflated(Slice(source, record.payload, record.present, source.name), record), b"")[:64])


def _inflated(packed: Source, record: FoundRecord) -> Iterator[bytes]:
    """What a deflated record inflates to, up to the first damage and to the size it declares."""
    size = record.entry.size if record.entry else record.descriptor.size if record.descriptor else 1 << 62
    left = min(size, MAX_RATIO * record.present + 64)
    with suppress(zlib.error):
        for piece in inflated(packed, 0, packed.size):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


class _Damaged(Slice):
    """What was taken out of something that is not as it was saved."""

    whole = False


def _extract(source: Source, record: FoundRecord, stack: ExitStack, notes: list[str]) -> Source:
    """The bytes of a record. If it has no checksums inside, its own tells of flipped bits and other damage."""
    repairs: list[Repair] = []
    damaged = False
    if not starts_record(_head(source, record)):
        (verdict,) = check_records(source, [claim_of(record, _method(record), summed=True)])
        repairs = repairs_of(source, verdict, "")
        if verdict.state == "mended":
            place = f"byte {repairs[0].position:,}"
            notes.append(f"a flipped bit in it was repaired, {verdict.certainty} by its checksum: {place}")
        damaged = verdict.state in ("damaged", "cut") or verdict.certainty == "ambiguous"
    content: Source = Assembly(repaired(source, record.payload, record.present, repairs), source.name)
    if _method(record) == DEFLATED:
        file, limit = temporary_file(stack), _unpacked_limit(source)
        for piece in _inflated(content, record):
            file.write(piece)
            if file.tell() >= limit:
                break
        content = file_source(file, source.name)
    return _Damaged(content, 0, content.size, content.name) if damaged else content
