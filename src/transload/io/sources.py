"""Random-access bytes, wherever they lie: a path, an open file, a buffer, or a part of another source."""

from __future__ import annotations

import os
import stat
from _thread import allocate_lock  # threading takes a millisecond to import
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Protocol, runtime_checkable

from transload.errors import CannotReadError, NotAFileError, UsageError
from transload.frozen import NamedTuple

_PIECE = 1 << 20
SourceLike = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


@runtime_checkable
class Source(Protocol):
    """Bytes that can be read at any position.

    ``read`` gives exactly the bytes that exist in ``[offset, offset + count)``: fewer than asked at the end,
    none beyond it. It never allocates for bytes that are not there, whatever a file claims, and may be
    called from several threads. ``close`` gives back what was opened here; most have opened nothing.
    """

    name: str
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        ...

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a writable buffer of bytes from ``offset`` on; how many there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Give back what was opened here."""
        return


class FileSource(Source):
    """A file opened by path, read through one descriptor: what is judged is what is read.

    ``opened`` is a descriptor of one that has no such name yet; it is left open.
    """

    def __init__(self, path: str | os.PathLike[str], opened: int = -1) -> None:
        self.name = os.fspath(path)
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
            flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
            self._fd = os.open(self.name, flags) if opened < 0 else os.dup(opened)
        except (OSError, ValueError) as error:
            raise cannot_read(self.name, error) from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            self._fd = -1
            raise CannotReadError(
                "not a regular file (a device, pipe or socket)", where=self.name, fix="Copy the bytes to a file first."
            )
        self.size = status.st_size
        self._stamp = _stamp(status)

    def is_changed(self) -> bool:
        """Whether somebody has written to it since it was opened; not known once it is closed."""
        return self._fd >= 0 and _stamp(os.fstat(self._fd)) != self._stamp

    def is_same_file(self, path: str) -> bool:
        """Whether the path leads to this very file, and to as much of it."""
        try:
            status, own = os.stat(path), os.fstat(self._fd)  # noqa: PTH116 - pathlib costs ten milliseconds
        except OSError:  # it is gone, or closed here
            return False
        return os.path.samestat(own, status) and status.st_size >= self.size

    @property
    def descriptor(self) -> int:
        """The open file, for those who read it in their own way."""
        return self._fd

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        try:
            return read_at(self._fd, offset, count)
        except OSError as error:
            raise cannot_read(self.name, error) from error

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        if not hasattr(os, "preadv"):  # Windows, old macOS
            return copied(self, offset, buffer)
        done, wanted = 0, max(0, min(len(buffer), self.size - offset))
        try:
            while done < wanted:
                count = os.preadv(self._fd, [buffer[done:wanted]], offset + done)
                if not count:
                    break
                done += count
        except OSError as error:
            raise cannot_read(self.name, error) from error
        return done

    _close = staticmethod(os.close)  # this module may have lost its names when a handle is closed at the very end

    def close(self) -> None:
        """Close the descriptor; twice does no harm."""
        if self._fd >= 0:
            self._close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


_SEEKING = allocate_lock()


def read_at(descriptor: int, offset: int, count: int) -> bytes:
    """The bytes of an open file, fewer at its end."""
    data = b""
    while len(data) < count:  # one call gives at most 2 GiB on Linux, and less when interrupted
        if hasattr(os, "pread"):
            part = os.pread(descriptor, count - len(data), offset + len(data))
        else:  # Windows has one position for all threads
            with _SEEKING:
                os.lseek(descriptor, offset + len(data), os.SEEK_SET)
                part = os.read(descriptor, count - len(data))
        if not part:
            break
        data = data + part if data else part
    return data


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """What differs once somebody has written to a file."""
    return status.st_size, status.st_mtime_ns // 1_000_000  # network file systems round it once it has reached them


class BytesSource(Source):
    """A buffer in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "<bytes>") -> None:
        self._view = memoryview(data).cast("B")
        self.name = name
        self.size = len(self._view)

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        return bytes(self._view[max(0, offset) : max(0, offset + count)])

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        part = self._view[max(0, offset) : max(0, offset + len(buffer))]
        buffer[: len(part)] = part
        return len(part)


class ObjectSource(Source):
    """A seekable binary file object. It is read from its beginning and left at ``home``, where it stood."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = allocate_lock()
        self.name = str(getattr(file, "name", "<file object>"))
        try:
            text = isinstance(file.read(0), str)
            self.home = file.tell()
            file.seek(0, os.SEEK_END)
            self.size = file.tell()  # what seek returns is None for some, such as mmap before Python 3.13
            file.seek(self.home)
        except (OSError, ValueError, AttributeError) as error:
            raise CannotReadError(
                f"the file object cannot be searched ({error})",
                where=self.name,
                fix="Read it into io.BytesIO first and pass that.",
            ) from error
        if text:
            raise UsageError("the file object gives text", fix="Open the file for bytes: open(path, 'rb').")

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        with self._lock:
            try:
                self._file.seek(offset)
                return self._file.read(count)
            except (OSError, ValueError) as error:
                raise cannot_read(self.name, error) from error

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on, straight where the object can do that; how many bytes there were."""
        into = getattr(self._file, "readinto", None)
        done = 0
        try:
            with self._lock:
                self._file.seek(offset)
                while into and done < len(buffer) and (count := into(buffer[done:])):
                    done += count
        except (OSError, ValueError):
            into = None
        return done if into else copied(self, offset, buffer)  # which also has words for what goes wrong

    def close(self) -> None:
        """Put the position back; the object stays the caller's."""
        if not getattr(self._file, "closed", False):  # not every object that reads and seeks has it
            self._file.seek(self.home)


class Slice(Source):
    """A part of another source, as a source of its own: a checkpoint inside a package."""

    def __init__(self, base: Source, offset: int, size: int, name: str) -> None:
        self.base = base
        self.offset = offset
        self.size = max(0, min(size, base.size - offset))
        self.name = name

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        return self.base.read(self.offset + offset, min(count, self.size - offset))

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return self.base.readinto(self.offset + offset, buffer[: max(0, self.size - offset)])


def copied(source: Source, offset: int, buffer: memoryview) -> int:
    """``readinto`` for sources that only read, in pieces that keep the second copy small."""
    done = 0
    while done < len(buffer):
        part = source.read(offset + done, min(_PIECE, len(buffer) - done))
        if not part:
            break
        buffer[done : done + len(part)] = part
        done += len(part)
    return done


def open_source(f: SourceLike) -> Source:
    """A source for anything ``torch.load`` would take, or for bytes.

    >>> open_source(b"abc").read(1, 10)
    b'bc'
    """
    if isinstance(f, str | os.PathLike):
        return FileSource(f)
    if isinstance(f, bytes | bytearray | memoryview):
        return BytesSource(f)
    if hasattr(f, "read") and hasattr(f, "seek"):
        return ObjectSource(f)
    raise NotAFileError(f"expected a path, bytes or a binary file object, not {type(f).__name__}")


def cannot_read(name: str, error: OSError | ValueError) -> CannotReadError:
    """Our error for one of the system's."""
    reason, fix = getattr(error, "strerror", None) or str(error), ""
    if isinstance(error, FileNotFoundError):
        fix = "Check the spelling and the current directory."
    elif isinstance(error, PermissionError):
        fix = "Ask its owner for read permission (ls -l shows who that is)."
    return CannotReadError(reason, where=name, fix=fix, errno=getattr(error, "errno", None))


def inflated(source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The content of a raw deflate stream of ``stored`` bytes, in pieces, ``limit`` bytes of it at most.

    Raises ``zlib.error`` where the stream is damaged.
    """
    from zlib import decompressobj

    return decompressed(decompressobj(-15), source, offset, stored, limit)


def decompressed(machine: Any, source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """What a decompressor of one of Python's modules makes of ``stored`` bytes, in pieces, ``limit`` bytes at most."""
    left = limit
    for start in range(0, stored, _PIECE):
        packed = source.read(offset + start, min(_PIECE, stored - start))
        while left > 0 and not machine.eof:
            most = min(_PIECE, left)
            piece = machine.decompress(packed, most)
            yield piece
            left -= len(piece)
            packed = getattr(machine, "unconsumed_tail", b"")  # of zlib; the others keep it
            # A full piece of zlib's may have more behind it, also when all input is taken.
            if not packed and getattr(machine, "needs_input", len(piece) < most):
                break


def from_text(encoding: str, source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The bytes that ``stored`` bytes of text stand for, each as a character, in pieces, ``limit`` at most.

    Raises ``UnicodeError`` where that is something else.
    """
    from codecs import getincrementaldecoder

    machine, left = getincrementaldecoder(encoding)(), limit
    for start in range(0, stored, _PIECE):
        text = machine.decode(source.read(offset + start, min(_PIECE, stored - start)))
        yield text.encode("latin-1")[:left]
        left = max(0, left - len(text))


class Part(NamedTuple):
    """``length`` bytes of a source from ``offset`` on."""

    source: Source
    offset: int
    length: int


class Assembly(Source):
    """Parts one after the other, as a source. Their sources are closed by whoever opened them."""

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


_LONGEST_NAME = 200  # file systems take names of 255 bytes


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a change of this file was interrupted, or is in progress. Cheap: it looks for one name."""
    try:
        return os.path.lexists(journal_path(os.fspath(path)))
    except ValueError:  # no file can have such a name, which is reported when it is read
        return False


def journal_path(path: str) -> str:
    """Where ``io.journal`` keeps the journal of a change of this file, in the folder of the file a link leads to.

    It is here because every load looks for it, and importing ``io.journal`` takes longer than loading a small file.
    """
    folder, name = os.path.split(os.path.realpath(path))
    if len(os.fsencode(name)) > _LONGEST_NAME:
        from zlib import crc32

        name = f"{name[:40]}-{crc32(os.fsencode(name)):08x}"
    return os.path.join(folder, f".{name}.transload-retag")  # noqa: PTH118 - pathlib costs ten milliseconds to import
