"""Random-access bytes: of a path, an open file, a buffer, or a part of another source."""

from __future__ import annotations

import os
import stat
from _thread import allocate_lock  # threading takes a millisecond to import
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO

from transload.credentials import without_credentials
from transload.frozen import NamedTuple

if TYPE_CHECKING:  # a file that can be read needs no errors
    from typing import TypeGuard

    from transload.errors import BrokenFileError, CannotReadError, TransloadError
    from transload.io.cache import Following, Pace

_PIECE = 1 << 20
_LARGE = 16 << 20  # a smaller file has too few records to ask whether reading them is slow
_TIMED = 4  # first reads, at both ends of an archive, whose times say whether the disk may be slow
_LONGEST_NAME = 200  # file systems allow names of 255 bytes
_LONG_PATH = 190  # Windows allows 260 characters, and names beside a file are longer than its own
_SEEKING = allocate_lock()
_OPENING = allocate_lock()
SourceLike = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO  # what a checkpoint can be read from
# What the argument ``progress`` takes: ``True`` for a line on the terminal, or a function of bytes done and in all.
Progress = bool | Callable[[int, int], object] | None


class Source:
    """Bytes that can be read at any position.

    ``read`` returns exactly the bytes that exist in ``[offset, offset + count)``: fewer than ``count`` at the end, none
    beyond it, and none if ``offset`` is negative. It never allocates memory for bytes that do not exist, and may be
    called from several threads. ``close`` releases what the source has opened; most have opened nothing.

    A subclass has ``_read``, and ``_fill`` if it need not copy what that returns; both are called only for bytes that
    exist.
    """

    name: str
    size: int
    streams: int = 1
    """How many reads at once are faster than one after the other."""
    gap: int = 64 << 10
    """How many unrequested bytes are cheaper to read than another request. A system call costs about as much as copying
    this many."""
    stamp: tuple[int, ...] = ()
    """What a write to it changes; empty if that is not known."""
    far: bool = False
    """Whether each read waits for a network: what can be worked out is not read, and reads are asked for together."""
    pace: Pace = "quick"
    """How bytes come that are not cached. Unless they are quick, a load works out what it can, as for a ``far`` source,
    and checks the claims in the end."""

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        return self._read(offset, count) if offset >= 0 and count > 0 else b""

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:  # noqa: ARG002 - far sources need it
        """Fill a writable buffer from ``offset`` on; return the number of bytes read.

        With ``ahead``, a ``far`` source also reads what follows, if reads follow one another.
        """
        count = min(len(buffer), self.size - offset)
        return self._fill(offset, buffer[:count]) if offset >= 0 and count > 0 else 0

    def _read(self, offset: int, count: int) -> bytes:
        raise NotImplementedError

    def _fill(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            part = self.read(offset + done, min(_PIECE, len(buffer) - done))  # in pieces, to keep the copy small
            if not part:
                break
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """What ``read`` returns for each of several ranges."""
        return [self.read(offset, count) for offset, count in ranges]

    def holds(self, offset: int, count: int) -> bool:  # noqa: ARG002 - far sources need them
        """Whether bytes can be read without waiting for a network."""
        return True

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002 - far sources need them
        """Read small ranges that will be needed, at the same time, and keep them, if the source is ``far``."""
        return

    def expect(self, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - others need them
        """Check claims about bytes when bytes next to them are read, and raise ``BrokenFileError`` if one is wrong.

        Only a ``far`` source does. A file that is not quick keeps them for ``check_claims``; elsewhere, there are none.
        """
        return

    def check_claims(self) -> None:
        """Check the claims that were kept, when reading the bytes is no longer slow; raise ``BrokenFileError``."""
        return

    def is_changed(self) -> bool:
        """Whether the bytes were changed since the source was opened, as far as that is known."""
        return False

    def close(self) -> None:
        """Release what was opened here."""
        return


class Claim(NamedTuple):
    """What bytes must be if those from ``end`` to ``reach`` are to be read; ``wrong`` says what is wrong with them."""

    begin: int
    end: int
    reach: int
    wrong: Callable[[bytes], str]

    def check(self, raw: bytes, name: str) -> None:
        """Raise ``BrokenFileError`` if it is wrong."""
        if wrong := self.wrong(raw):
            from transload.errors import BrokenFileError

            fix = "Nothing that this file says can be relied on. Get it again from its author."
            raise BrokenFileError(wrong, where=name, fix=fix)


class FileSource(Source):
    """A file opened by path, and read through one descriptor, so that what was judged is what is read.

    ``opened`` is a descriptor of a file that does not have this name yet; it is left open. It is no copy of that, with
    which Windows could not remove the file.
    """

    descriptor = -1
    _hints = -1
    streams = 64  # as many as there are threads

    def __init__(self, path: str | os.PathLike[str], opened: int = -1) -> None:
        self.name = os.fspath(path)
        self._is_ours = opened < 0
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
            flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
            self.descriptor = os.open(system_path(self.name), flags) if opened < 0 else opened
        except (OSError, ValueError) as error:
            # A mistyped URL may have a password, which the system's error repeats.
            raise cannot_read(self.name, error) from error if shown(self.name) == self.name else None
        status = self._status()
        if not stat.S_ISREG(status.st_mode):
            from transload.errors import CannotReadError

            self.close()
            fix = "Copy the bytes to a file first."
            raise CannotReadError("not a regular file (a device, pipe or socket)", where=self.name, fix=fix)
        self.size = status.st_size
        self.stamp = _stamp(status)
        self._claims: list[Claim] = []
        self._pace: Pace | None = None if self.size >= _LARGE else "quick"
        self._waits: list[float] = []
        self._following: Following | None = None

    @property
    def pace(self) -> Pace:  # type: ignore[override]
        """How bytes come that are not cached; of a small file, this is not measured."""
        if self._pace is None:
            from transload.io.cache import pace

            self._pace = "quick"
            self._pace = pace(self.descriptor, 0, self.size, self._waits)
        return self._pace

    @property
    def hints(self) -> int:
        """The descriptor to ask for bytes with; a second one where each read waits.

        Linux takes what is asked for through a descriptor that has read in order for its own guess, and drops it while
        a network file system is busy. But to open a file again may remove what is cached of it: FUSE does.
        """
        with _OPENING, suppress(OSError):  # no /proc
            if self._hints < 0 <= self.descriptor and self.pace == "waiting":
                self._hints = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY)
        return self.descriptor if self._hints < 0 else self._hints

    def holds(self, offset: int, count: int) -> bool:  # noqa: ARG002
        """Whether bytes can be read without waiting."""
        return self.pace == "quick"

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the system for small ranges that will be needed, unless they come at once."""
        from transload.io.cache import ask_for

        for offset, count in ranges if self.pace != "quick" else ():
            ask_for(self.hints, min(offset, self.size), min(offset + count, self.size))  # a header may say anything

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        """Fill a writable buffer from ``offset`` on; with ``ahead``, ask for what follows, if each read waits."""
        if ahead and self.pace == "waiting":
            if self._following is None:
                from transload.io.cache import Following

                self._following = Following(self.hints, self.size)
            self._following.read(offset, offset + len(buffer))
        return super().readinto(offset, buffer)

    def expect(self, claims: Sequence[Claim]) -> None:
        """Keep claims about bytes for ``check_claims``."""
        self._claims += claims

    def check_claims(self) -> None:
        """Check the claims that were kept."""
        if not self._claims:
            return
        self.prepare([(claim.begin, claim.end - claim.begin) for claim in self._claims])
        while self._claims:
            claim = self._claims.pop()
            claim.check(self.read(claim.begin, claim.end - claim.begin), self.name)

    def is_changed(self) -> bool:
        """Whether the file was written to since it was opened; false once it is closed."""
        return self.descriptor >= 0 and _stamp(self._status()) != self.stamp

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self.descriptor)
        except OSError as error:  # a file system elsewhere may have lost it
            self.close()
            raise cannot_read(self.name, error) from error

    def is_same_file(self, path: str) -> bool:
        """Whether a path leads to this file, and the file has not become shorter."""
        try:
            status = os.stat(path)
            return os.path.samestat(status, os.fstat(self.descriptor)) and status.st_size >= self.size
        except OSError:  # it is gone, or closed here
            return False

    def _read(self, offset: int, count: int) -> bytes:
        begin = perf_counter()
        try:
            data = read_at(self.descriptor, offset, count)
        except OSError as error:
            raise cannot_read(self.name, error) from error
        if self._pace is None:  # soon to be measured
            self._waits = [*self._waits, perf_counter() - begin][:_TIMED]
        return data

    def _fill(self, offset: int, buffer: memoryview) -> int:
        try:
            return read_into(self.descriptor, buffer, offset)
        except OSError as error:
            raise cannot_read(self.name, error) from error

    _close = staticmethod(os.close)  # at interpreter shutdown, the names of this module may be gone

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        if self._hints >= 0:
            self._close(self._hints)
            self._hints = -1
        if self.descriptor >= 0:
            if self._is_ours:
                self._close(self.descriptor)
            self.descriptor = -1

    __del__ = close


def read_at(descriptor: int, offset: int, count: int) -> bytes:
    """Read from an open file; fewer bytes at its end."""
    data = b""
    while len(data) < count:  # a call reads at most 2 GiB on Linux, and less when interrupted
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


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a position of an open file; return the number of bytes read, fewer at its end."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        else:  # Windows, old macOS
            part = read_at(descriptor, offset + done, min(_PIECE, len(buffer) - done))
            count = len(part)
            buffer[done : done + count] = part
        if not count:
            break
        done += count
    return done


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """The size and time of a file, which a write changes."""
    return status.st_size, status.st_mtime_ns // 1_000_000  # network file systems round the time


class BytesSource(Source):
    """A buffer in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "<bytes>") -> None:
        try:
            self._view = memoryview(data).cast("B")
        except TypeError as error:  # view[::2], for example
            from transload.errors import NotAFileError

            fix = "Pass a copy: bytes(view)."
            raise NotAFileError(f"the memoryview is not a plain sequence of bytes ({error})", fix=fix) from error
        self.name = name
        self.size = len(self._view)

    def _read(self, offset: int, count: int) -> bytes:
        return bytes(self._view[offset : offset + count])

    def _fill(self, offset: int, buffer: memoryview) -> int:
        buffer[:] = self._view[offset : offset + len(buffer)]
        return len(buffer)


class ObjectSource(Source):
    """A seekable binary file object, from its position ``start`` on. ``close`` moves it to ``home``: back to there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = allocate_lock()
        self.name = str(getattr(file, "name", "<file object>"))
        try:
            text = isinstance(file.read(0), str)
            self.start = self.home = file.tell()
            file.seek(0, os.SEEK_END)
            # seek() of some objects, such as mmap before Python 3.13, returns None.
            self.size = max(0, file.tell() - self.start)
            file.seek(self.start)
        except (OSError, ValueError, AttributeError) as error:
            from transload.errors import NotAFileError, NotSeekableError

            kind = NotAFileError if isinstance(error, AttributeError) else NotSeekableError
            fix = "Read it into io.BytesIO first and pass that."
            raise kind(f"the file object cannot seek ({error})", where=self.name, fix=fix) from error
        if text:
            from transload.errors import UsageError

            raise UsageError("the file object returns text", fix="Open it in binary mode: open(path, 'rb').")

    def _read(self, offset: int, count: int) -> bytes:
        with self._lock:
            try:
                self._file.seek(self.start + offset)
                data = self._file.read(count)
                while data and len(data) < count and (more := self._file.read(count - len(data))):
                    data += more  # an unbuffered object may return fewer bytes than there are
            except (OSError, ValueError) as error:
                raise cannot_read(self.name, error) from error
        return data

    def _fill(self, offset: int, buffer: memoryview) -> int:
        into = getattr(self._file, "readinto", None)
        done = 0
        try:
            with self._lock:
                self._file.seek(self.start + offset)
                while into and done < len(buffer) and (count := into(buffer[done:])):
                    done += count
        except (OSError, ValueError):
            into = None
        return done if into else super()._fill(offset, buffer)  # which raises our errors

    def close(self) -> None:
        """Move to ``home``; the object stays open."""
        if not getattr(self._file, "closed", False):  # not every file-like object has it
            self._file.seek(self.home)


class Slice(Source):
    """A part of another source, such as a checkpoint inside a package."""

    def __init__(self, base: Source, offset: int, size: int, name: str) -> None:
        self.base = base
        self.offset = offset
        self.size = max(0, min(size, base.size - offset))
        self.name = name
        self.far = base.far
        self.gap = base.gap

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """What ``read`` returns for each of several ranges."""
        inside = [(at, max(0, min(count, self.size - at))) if at >= 0 else (0, 0) for at, count in ranges]
        return self.base.read_all([(self.offset + at, count) for at, count in inside])

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read small ranges that will be needed, at the same time, and keep them, if the source is ``far``."""
        self.base.prepare([(self.offset + at, min(count, self.size - at)) for at, count in ranges if at >= 0])

    def holds(self, offset: int, count: int) -> bool:
        """Whether bytes can be read without waiting for a network."""
        return self.base.holds(self.offset + offset, count)

    def expect(self, claims: Sequence[Claim]) -> None:
        """Check claims about bytes when bytes next to them are read."""
        begin = self.offset
        self.base.expect(
            [Claim(begin + claim.begin, begin + claim.end, begin + claim.reach, claim.wrong) for claim in claims]
        )

    def _read(self, offset: int, count: int) -> bytes:
        return self.base.read(self.offset + offset, count)

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        """Fill a writable buffer from ``offset`` on; return the number of bytes read."""
        count = min(len(buffer), self.size - offset)
        return self.base.readinto(self.offset + offset, buffer[:count], ahead=ahead) if offset >= 0 and count > 0 else 0


def was_changed(name: str) -> BrokenFileError:
    """The error for a file whose old and new bytes may be mixed."""
    from transload.errors import BrokenFileError

    fix = "Read it again when no program writes to it; transload.save replaces a file in one step."
    return BrokenFileError("it was changed while it was read", where=name, fix=fix)


def refuse_fault(error: TransloadError, name: str) -> None:
    """Raise an error again that says nothing of the content: what is elsewhere could not be reached, or changed.

    ``name`` is that of a source, a folder or a checkpoint.
    """
    if is_url(name):
        from transload.errors import ContentError, MissingFileError

        if not isinstance(error, ContentError | MissingFileError):
            raise error


def cannot_read(name: str, error: OSError | ValueError) -> CannotReadError:
    """Our error for an error of the system."""
    from transload.errors import CannotReadError

    reason, fix = getattr(error, "strerror", None) or str(error), ""
    if isinstance(error, FileNotFoundError):
        fix = "Check the spelling and the current directory."
        if os.path.islink(name):  # as in a Hugging Face cache, part of which was removed
            reason = f"a link to {os.readlink(name)}, which does not exist"
            fix = "Get that file again, or correct the link."
        if name == "-":
            fix = "Name a file: only transload inspect reads a checkpoint from standard input."
    elif isinstance(error, PermissionError):
        fix = "Ask its owner for read permission (ls -l shows who that is)."
        if os.name == "nt":
            fix = "Close it in the program that has it open, or ask its owner for read permission."
    return CannotReadError(reason, where=name, fix=fix, errno=getattr(error, "errno", None))


def system_path(path: str) -> str:
    """The path for a call of the system: on Windows, a long one in the form that has no limit of 260 characters."""
    if os.name == "nt" and len(full := os.path.abspath(path)) >= _LONG_PATH:
        return extended(full)
    return path


def real_path(path: str) -> str:
    """The path for a call of the system, of the file that links lead to."""
    try:
        return system_path(os.path.realpath(path))
    except OSError:  # some drives of Windows do not tell
        return system_path(path)


def extended(path: str) -> str:
    r"""The form of an absolute path of Windows that may have more than 260 characters; a short one stays as it is.

    >>> extended("C:\\a.pt"), extended("C:\\" + "a" * 250)[:10], extended("\\\\host\\share\\" + "a" * 250)[:18]
    ('C:\\a.pt', '\\\\?\\C:\\aaa', '\\\\?\\UNC\\host\\share')
    """
    if len(path) < _LONG_PATH or path.startswith("\\\\?\\"):
        return path
    return "\\\\?\\UNC" + path[1:] if path.startswith("\\\\") else "\\\\?\\" + path


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is a URL. Cheap: every load asks.

    >>> is_url("s3://bucket/model.pt"), is_url("models/a.pt"), is_url("C://models/a.pt")
    (True, False, False)
    """
    return isinstance(path, str) and path.find("://", 2) > 0 and path[0].isalpha() and "/" not in path.partition(":")[0]


def shown(path: str | os.PathLike[str]) -> str:
    """A path for messages: a URL without passwords and signatures.

    >>> shown("https://me:secret@host/a.pt?X-Amz-Signature=1f")
    'https://host/a.pt'
    """
    return without_credentials(os.fspath(path))


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a change of this file was interrupted, or is in progress. Cheap: it checks for one name."""
    try:
        return not is_url(path) and os.path.lexists(journal_path(os.fspath(path)))
    except (OSError, ValueError):  # no current folder, or an invalid name, which is reported when it is read
        return False


def journal_path(path: str) -> str:
    """The path of the journal for this file, beside the file that a link leads to.

    It is here because every load checks for it, and importing ``io.journal`` takes longer than loading a small file.
    """
    folder, name = os.path.split(real_path(path))
    if len(os.fsencode(name)) > _LONGEST_NAME:
        from zlib import crc32

        name = f"{name[:40]}-{crc32(os.fsencode(name)):08x}"
    return os.path.join(folder, f".{name}.transload-retag")
