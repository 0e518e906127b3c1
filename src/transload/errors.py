"""The errors transload raises: what happened, where, why, and what to do."""

from __future__ import annotations

import errno as numbers
from _pickle import PicklingError, UnpicklingError  # the same as in pickle, which takes ten times as long to import
from io import UnsupportedOperation
from typing import Any

from transload.credentials import text_without_credentials, without_credentials

__all__ = ["BrokenFileError", "BusyFileError", "CannotPickleError", "CannotReadError", "CannotWriteError"]
__all__ += ["ConvertError", "DirectoryError", "DoesNotFitError", "FileWarning", "ForbiddenFileError"]
__all__ += ["ForbiddenWriteError", "FullDiskError", "LandingWarning", "LoadError", "ManifestError", "MissingClassError"]
__all__ += ["MissingFileError", "MissingModuleError", "NoDeviceError", "NoDirectoryError", "NoTorchError"]
__all__ += ["NotACheckpointDirectoryError", "NotACheckpointError", "NotAFileError", "NotSeekableError"]
__all__ += ["OverflowRefusedError", "RescueError", "RetagError", "SaveError", "SaveWarning", "TransloadError"]
__all__ += ["UnsafeError", "UsageError"]


class TransloadError(Exception):
    """The base of every error that transload raises on purpose; any other exception is a bug.

    ``what`` is one sentence, ``where`` the file or place, ``fix`` what the user can do. URLs lose their credentials.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        what, where = text_without_credentials(what), without_credentials(where)
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes exchange errors by pickle, whose default would pass ``args`` to ``__init__`` by position."""
        state = dict(vars(self))
        if isinstance(self, OSError):
            state["errno"] = self.errno  # OSError does not keep it in __dict__
        return _rebuild, (type(self), self.what, self.where, self.fix), state

    def __repr__(self) -> str:
        """The call that creates it; that of ``OSError`` would be empty."""
        return f"{type(self).__name__}({self.what!r}, where={self.where!r}, fix={self.fix!r})"

    def __str__(self) -> str:
        """Where and what, and the fix below."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n{self.fix}" if self.fix else head


def _rebuild(kind: type[TransloadError], what: str, where: str, fix: str) -> TransloadError:
    # With several built-in bases, only OSError.__new__ allocates the fields of OSError.
    error = OSError.__new__(kind) if issubclass(kind, OSError) else kind.__new__(kind)
    TransloadError.__init__(error, what, where=where, fix=fix)
    return error


class _SystemError(TransloadError, OSError):
    def __init__(self, what: str, *, where: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = errno


class CannotReadError(_SystemError):
    """The operating system could not read the bytes; ``errno`` is its error number.

    Like ``OSError``, it creates the subclass for the number:

    >>> raise CannotReadError("no such file", errno=numbers.ENOENT)
    Traceback (most recent call last):
    transload.errors.MissingFileError: no such file
    """

    def __new__(cls, *_: object, errno: int | None = None, **__: object) -> CannotReadError:  # noqa: PYI034 - it may be a subclass
        """Create the subclass that corresponds to what ``open`` would raise."""
        kind = _UNREADABLE.get(errno or 0, cls) if cls is CannotReadError else cls
        return super().__new__(kind)


class MissingFileError(CannotReadError, FileNotFoundError):
    """The file does not exist."""


class ForbiddenFileError(CannotReadError, PermissionError):
    """The system does not permit reading the file."""


class NotSeekableError(CannotReadError, UnsupportedOperation):
    """The file object is a pipe, a socket or the like, which cannot be read at any position."""


class DirectoryError(CannotReadError, IsADirectoryError):
    """The path is a directory where a file was expected."""


_UNREADABLE: dict[int, type[CannotReadError]] = {
    numbers.ENOENT: MissingFileError,
    numbers.EACCES: ForbiddenFileError,
    numbers.EPERM: ForbiddenFileError,
    numbers.EISDIR: DirectoryError,
}


class CannotWriteError(_SystemError, RuntimeError):
    """The operating system could not write the bytes; ``errno`` is its error number.

    It is also a ``RuntimeError``, since that is what ``torch.save`` raises.
    """


class UsageError(TransloadError, ValueError):
    """The arguments of the call are invalid."""


class NotAFileError(UsageError, AttributeError, TypeError):
    """The argument is neither a path nor a file object; torch raises either of these classes for it."""


class NoDirectoryError(CannotWriteError, FileNotFoundError):
    """The directory of the file does not exist."""


class ForbiddenWriteError(CannotWriteError, PermissionError):
    """The system does not permit writing there."""


class FullDiskError(CannotWriteError):
    """There is no space left on the disk or in the quota, or the file would exceed a limit."""


class RetagError(TransloadError, RuntimeError):
    """The tags of this file cannot be changed as requested; the file is unchanged."""


class BusyFileError(RetagError):
    """Another process is writing the file, or has just changed it."""


class ManifestError(TransloadError, ValueError):
    """The manifest cannot be used, or cannot be written."""


class ConvertError(TransloadError, RuntimeError):
    """The checkpoint cannot be converted as requested; nothing was written."""


class OverflowRefusedError(ConvertError, OverflowError):
    """A number does not fit into the requested dtype, and ``allow_inf`` was not set."""


class RescueError(TransloadError, ValueError):
    """There is nothing in the file to rescue, or it cannot be written to the requested file."""


class ContentError(TransloadError, ValueError):
    """Some elements of a tensor are not in the file, or are not plain numbers; the message names the tensor."""


class LoadError(TransloadError, RuntimeError):
    """The file cannot be loaded as requested."""


class MissingModuleError(LoadError, ModuleNotFoundError):
    """The file needs a module that cannot be imported here."""


class MissingClassError(LoadError, AttributeError):
    """The file needs a class or function that its module does not have here."""


class BrokenFileError(LoadError, UnpicklingError, EOFError):
    """The file is damaged; the message names the tensors that are lost, if that is known."""


class Malformed(BrokenFileError):  # noqa: N818 - short, since it is raised in many places
    """The file contains something that no checkpoint has; ``position`` is its byte in the pickle, if that is known."""

    position: int | None = None

    def __init__(self, what: str) -> None:
        super().__init__(f"it holds {what}", fix="No release of torch writes this. Get the file again from its author.")


class NotACheckpointError(LoadError, UnpicklingError, EOFError):
    """The file is not a checkpoint; the message says what it is."""


class NotACheckpointDirectoryError(NotACheckpointError, IsADirectoryError):
    """The directory is not a checkpoint of any kind; ``errno`` is ``EISDIR``, as with ``torch.load``."""

    errno = numbers.EISDIR


class UnsafeError(LoadError, UnpicklingError):
    """Loading would run code that the file asks for, which is not allowed."""


class NoDeviceError(LoadError):
    """A requested device is not available."""


class DoesNotFitError(LoadError, MemoryError):
    """A device has too little memory; the message says how much is missing, and what would fit."""


class NoTorchError(LoadError, ImportError):
    """torch cannot be imported."""


class LandingWarning(UserWarning):
    """Something was loaded to a different device than it was saved from, which was not requested, or stayed on meta."""


class FileWarning(UserWarning):
    """The file was loaded, but something in it is wrong or was left out."""


class SaveError(TransloadError, RuntimeError):
    """The object cannot be saved as requested."""


class CannotPickleError(
    SaveError, PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError, OverflowError, ValueError
):
    """Something in the object cannot be pickled; it is all of the errors that ``pickle`` and torch raise for that."""


class SaveWarning(UserWarning):
    """The file was saved, but not in the best possible way."""


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the user's line: the first frame outside torch and transload."""
    import sys
    import warnings

    level, frame, package = 1, sys._getframe(), "transload"  # noqa: SLF001 - warnings has no other way before 3.12
    while frame.f_back is not None and package in ("importlib", "torch", "transload"):
        frame = frame.f_back
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        level += package != "importlib"  # whose frames warnings does not count
    warnings.warn(text, category, stacklevel=level)
