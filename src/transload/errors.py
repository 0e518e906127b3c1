"""The errors transload raises: what happened, where, why, and what to do."""

from __future__ import annotations

import errno as numbers
import os
from _pickle import PicklingError, UnpicklingError  # those of pickle, which takes ten times as long to import
from typing import Any


class TransloadError(Exception):
    """Base of every error transload raises on purpose; anything else that escapes is a bug.

    ``what`` is one sentence, ``where`` the file or place, ``fix`` what the user can do.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes by pickle, which would give all of ``args`` to ``__init__`` by position."""
        state = dict(vars(self))
        if isinstance(self, OSError):
            state["errno"] = self.errno  # which OSError keeps elsewhere
        return _again, (type(self), self.what, self.where, self.fix), state

    def __str__(self) -> str:
        """All three parts, on as many lines."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n{self.fix}" if self.fix else head


def _again(kind: type[TransloadError], what: str, where: str, fix: str) -> TransloadError:
    # Of several built-in bases, only the __new__ of OSError makes what has its fields.
    made = OSError.__new__(kind) if issubclass(kind, OSError) else kind.__new__(kind)
    TransloadError.__init__(made, what, where=where, fix=fix)
    return made


class _SystemError(TransloadError, OSError):
    def __init__(self, what: str, *, where: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = errno


class CannotReadError(_SystemError):
    """The operating system did not give us the bytes; ``errno`` is its number for the reason.

    As ``OSError`` does, it becomes the class that stands for the number:

    >>> raise CannotReadError("no such file", errno=numbers.ENOENT)
    Traceback (most recent call last):
    transload.errors.MissingFileError: no such file
    """

    def __new__(cls, *_: object, errno: int | None = None, **__: object) -> CannotReadError:  # noqa: PYI034 - not of the class that was called
        """The class that ``open`` would raise for this number."""
        kind = _UNREADABLE.get(errno or 0, cls) if cls is CannotReadError else cls
        return super().__new__(kind)


class MissingFileError(CannotReadError, FileNotFoundError):
    """There is no such file."""


class ForbiddenFileError(CannotReadError, PermissionError):
    """The system does not let us read the file."""


class DirectoryError(CannotReadError, IsADirectoryError):
    """There is a directory where a file was expected."""


_UNREADABLE: dict[int, type[CannotReadError]] = {
    numbers.ENOENT: MissingFileError,
    numbers.EACCES: ForbiddenFileError,
    numbers.EPERM: ForbiddenFileError,
    numbers.EISDIR: DirectoryError,
}


class CannotWriteError(_SystemError, RuntimeError):
    """The operating system did not take the bytes; ``errno`` is its number for the reason.

    It is a ``RuntimeError`` too, since that is what ``torch.save`` raises.
    """


class UsageError(TransloadError, ValueError):
    """The call itself makes no sense."""


class NotAFileError(UsageError, AttributeError, TypeError):
    """What was given is neither a path nor a file object; torch raises the one class or the other."""


class NoDirectoryError(CannotWriteError, FileNotFoundError):
    """The directory of the file does not exist."""


class ForbiddenWriteError(CannotWriteError, PermissionError):
    """The system does not let us write there."""


class FullDiskError(CannotWriteError):
    """There is no room: on the disk, in a quota, or below a limit for files."""


_ROOM = "Make room there, or write to another place."
_RIGHT = "Write to another place, or ask for the right to write there."
_REASONS: dict[int, tuple[type[CannotWriteError], str, str]] = {
    numbers.ENOSPC: (FullDiskError, "the disk is full", _ROOM),
    numbers.EDQUOT: (FullDiskError, "the quota on this disk is used up", _ROOM),
    numbers.EFBIG: (FullDiskError, "the file would be larger than this system allows", "`ulimit -f` shows the limit."),
    numbers.ENOENT: (NoDirectoryError, "its directory does not exist", "Make the directory first."),
    numbers.ENOTDIR: (NoDirectoryError, "part of its path is a file, not a directory", "Check the path."),
    numbers.EACCES: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EPERM: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EROFS: (ForbiddenWriteError, "the file system is read-only", "Write to another place."),
    numbers.EISDIR: (CannotWriteError, "it is a directory", "Add the name of a file."),
    numbers.EBUSY: (CannotWriteError, "it is a mount point, or in use by the system", "Write to another place."),
    numbers.ENAMETOOLONG: (CannotWriteError, "its name is too long", "Choose a shorter one."),
    numbers.ELOOP: (CannotWriteError, "its symbolic links point in a circle", "Check the path."),
}


def cannot_write(error: OSError, where: str, *, outcome: str = "") -> CannotWriteError:
    """Our error for one of the system's; ``outcome`` is what has become of the file.

    >>> isinstance(cannot_write(OSError(2, "No such file or directory"), "x.pt"), FileNotFoundError)
    True
    """
    if isinstance(error, CannotWriteError):
        return error
    known = _REASONS.get(error.errno or 0)
    kind, what, fix = known or (CannotWriteError, os.strerror(error.errno) if error.errno else str(error), "")
    what = f"cannot be written: {what}" + (f"; {outcome}" if outcome else "")
    return kind(what, where=where, fix=fix, errno=error.errno)


class RetagError(TransloadError, RuntimeError):
    """The tags of this file cannot be changed as asked; the file is as it was."""


class BusyFileError(RetagError):
    """Somebody else writes the file, or has just changed it."""


class ManifestError(TransloadError, ValueError):
    """The file with the hashes to compare with cannot be used."""


class ConvertError(TransloadError, RuntimeError):
    """The checkpoint cannot be converted as asked; nothing was written."""


class OverflowRefusedError(ConvertError, OverflowError):
    """A number does not fit into the dtype that was asked for, and ``allow_inf`` was not."""


class RescueError(TransloadError, ValueError):
    """There is nothing in the file that could be rescued, or it cannot be put into the file that was asked for."""


class ContentError(TransloadError, ValueError):
    """The elements of a tensor are not all in the file, or not a plain run of numbers; the text names the tensor."""


class LoadError(TransloadError, RuntimeError):
    """The file cannot be loaded as asked."""


class MissingModuleError(LoadError, ModuleNotFoundError):
    """The file names a module that cannot be imported here."""


class MissingClassError(LoadError, AttributeError):
    """The file names a class or function that its module does not have here."""


class BrokenFileError(LoadError, UnpicklingError, EOFError):
    """The file is damaged; which of its tensors are lost is said where it is known."""


class NotACheckpointError(LoadError, UnpicklingError, EOFError):
    """The file is something else; the text says what."""


class NotACheckpointDirectoryError(NotACheckpointError, IsADirectoryError):
    """The directory is not a checkpoint of any kind; ``errno`` is ``EISDIR``, as in what ``torch.load`` raises."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = numbers.EISDIR


class UnsafeError(LoadError, UnpicklingError):
    """Loading would run what the file asks for, and nobody has allowed that."""


class NoDeviceError(LoadError):
    """A device that was asked for is not here."""


class DoesNotFitError(LoadError, MemoryError):
    """A device has too little memory; the text says by how much, and what would fit."""


class NoTorchError(LoadError, ImportError):
    """torch itself cannot be imported."""


class LandingWarning(UserWarning):
    """Something landed on another device than it was saved on, or stayed on meta, though nobody had asked for that."""


class FileWarning(UserWarning):
    """The file was loaded, and something in it is not as it should be."""


class SaveError(TransloadError, RuntimeError):
    """The object cannot be saved as asked."""


class CannotPickleError(
    SaveError, PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError, OverflowError, ValueError
):
    """Something in the object has no form in a file; it is each of the errors that ``pickle`` and torch raise."""


class SaveWarning(UserWarning):
    """The file was saved, and is not what it could be."""
