"""What loading raises and warns of. Each error is also one of those that users of ``torch.load`` catch already."""

from __future__ import annotations

from pickle import UnpicklingError

from transload.errors import CannotReadError, TransloadError

__all__ = [
    "BrokenFileError",
    "DoesNotFitError",
    "FileWarning",
    "ForbiddenFileError",
    "LandingWarning",
    "LoadError",
    "MissingFileError",
    "NoDeviceError",
    "NoTorchError",
    "NotACheckpointError",
    "UnsafeError",
    "os_error",
]


class LoadError(TransloadError, RuntimeError):
    """The file cannot be loaded as asked."""


class BrokenFileError(LoadError, UnpicklingError, EOFError):
    """The file is damaged; which of its tensors are lost is said where it is known."""


class NotACheckpointError(LoadError, UnpicklingError, EOFError):
    """The file is something else; the text says what."""


class UnsafeError(LoadError, UnpicklingError):
    """Loading would run what the file asks for, and nobody has allowed that."""


class NoDeviceError(LoadError):
    """A device that was asked for is not here."""


class DoesNotFitError(LoadError, MemoryError):
    """A device has too little memory; the text says by how much, and what would fit."""


class NoTorchError(LoadError, ImportError):
    """torch itself cannot be imported."""


class MissingFileError(CannotReadError, FileNotFoundError):
    """There is no such file."""


class ForbiddenFileError(CannotReadError, PermissionError):
    """The system does not let us read the file."""


class LandingWarning(UserWarning):
    """Something was loaded onto another device than it was saved on, though nobody had asked for that."""


class FileWarning(UserWarning):
    """The file was loaded, and something in it is not as it should be."""


def os_error(error: CannotReadError) -> CannotReadError:
    """The same error as the class that ``open`` would have raised.

    >>> from errno import ENOENT
    >>> isinstance(os_error(CannotReadError("no such file", errno=ENOENT)), FileNotFoundError)
    True
    """
    from errno import EACCES, ENOENT, EPERM

    kind = {ENOENT: MissingFileError, EACCES: ForbiddenFileError, EPERM: ForbiddenFileError}.get(error.errno or 0)
    return kind(error.what, where=error.where, fix=error.fix, errno=error.errno) if kind else error
