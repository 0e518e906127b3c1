"""Load any PyTorch checkpoint on any machine, and explain why CUDA is unavailable.

>>> import transload
>>> transload.inspect("model.pt")  # doctest: +SKIP
>>> transload.load("model.pt")  # doctest: +SKIP
>>> print(transload.doctor())  # doctest: +SKIP

Importing this package costs next to nothing: each name is resolved when it is first used.
"""

# Not typing.TYPE_CHECKING: importing typing would double the time `transload --version` takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from transload._version import __version__
    from transload.checking import Check, check
    from transload.checking.needs import Compatibility, is_cuda_compatible
    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.converting import Conversion, convert
    from transload.diagnose import doctor
    from transload.diagnose.report import Diagnosis
    from transload.errors import (
        BrokenFileError,
        BusyFileError,
        CannotPickleError,
        CannotReadError,
        CannotWriteError,
        ConvertError,
        DirectoryError,
        DoesNotFitError,
        FileWarning,
        ForbiddenFileError,
        ForbiddenWriteError,
        FullDiskError,
        LandingWarning,
        LoadError,
        ManifestError,
        MissingClassError,
        MissingFileError,
        MissingModuleError,
        NoDeviceError,
        NoDirectoryError,
        NotACheckpointDirectoryError,
        NotACheckpointError,
        NotAFileError,
        NoTorchError,
        OverflowRefusedError,
        RescueError,
        RetagError,
        SaveError,
        SaveWarning,
        TransloadError,
        UnsafeError,
        UsageError,
    )
    from transload.explaining import explain
    from transload.explaining.result import Explanation
    from transload.findings import Finding
    from transload.judge import inspect
    from transload.loading import load
    from transload.loading.handles import open  # noqa: A004 - transload.open, beside transload.load
    from transload.loading.into import MismatchError, load_into
    from transload.loading.placement import Plan
    from transload.machine import Machine
    from transload.patching import load_ipython_extension, patch, unload_ipython_extension, unpatch
    from transload.rescuing import Rescue, rescue
    from transload.retagging import Retag, retag
    from transload.saving import save, save_async
    from transload.verifying import Verification, verify

__all__ = [
    "BrokenFileError",
    "BusyFileError",
    "CannotPickleError",
    "CannotReadError",
    "CannotWriteError",
    "Check",
    "Checkpoint",
    "Compatibility",
    "Conversion",
    "ConvertError",
    "Diagnosis",
    "DirectoryError",
    "DoesNotFitError",
    "Explanation",
    "FileWarning",
    "Finding",
    "ForbiddenFileError",
    "ForbiddenWriteError",
    "FullDiskError",
    "LandingWarning",
    "LoadError",
    "Machine",
    "ManifestError",
    "MismatchError",
    "MissingClassError",
    "MissingFileError",
    "MissingModuleError",
    "NoDeviceError",
    "NoDirectoryError",
    "NoTorchError",
    "NotACheckpointDirectoryError",
    "NotACheckpointError",
    "NotAFileError",
    "OverflowRefusedError",
    "Plan",
    "Rescue",
    "RescueError",
    "Retag",
    "RetagError",
    "SaveError",
    "SaveWarning",
    "Storage",
    "Tensor",
    "TransloadError",
    "UnsafeError",
    "UsageError",
    "Verification",
    "__version__",
    "check",
    "convert",
    "doctor",
    "explain",
    "inspect",
    "is_cuda_compatible",
    "load",
    "load_into",
    "load_ipython_extension",
    "open",
    "patch",
    "rescue",
    "retag",
    "save",
    "save_async",
    "unload_ipython_extension",
    "unpatch",
    "verify",
]

_NAMES = {
    "transload._version": "__version__",
    "transload.checking": "Check check",
    "transload.checking.needs": "Compatibility is_cuda_compatible",
    "transload.checkpoint": "Checkpoint Storage Tensor",
    "transload.converting": "Conversion convert",
    "transload.diagnose": "doctor",
    "transload.diagnose.report": "Diagnosis",
    "transload.errors": """
        BrokenFileError BusyFileError CannotPickleError CannotReadError CannotWriteError
        ConvertError DirectoryError DoesNotFitError FileWarning ForbiddenFileError ForbiddenWriteError
        FullDiskError LandingWarning LoadError ManifestError MissingClassError MissingFileError MissingModuleError
        NoDeviceError NoDirectoryError NoTorchError NotACheckpointDirectoryError NotACheckpointError NotAFileError
        OverflowRefusedError RescueError RetagError SaveError SaveWarning TransloadError UnsafeError UsageError
    """,
    "transload.explaining": "explain",
    "transload.explaining.result": "Explanation",
    "transload.findings": "Finding",
    "transload.judge": "inspect",
    "transload.loading": "load",
    "transload.loading.handles": "open",
    "transload.loading.into": "MismatchError load_into",
    "transload.loading.placement": "Plan",
    "transload.machine": "Machine",
    "transload.patching": "load_ipython_extension patch unload_ipython_extension unpatch",
    "transload.rescuing": "Rescue rescue",
    "transload.retagging": "Retag retag",
    "transload.saving": "save save_async",
    "transload.verifying": "Verification verify",
}
"""The public names, by their modules."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker must see the imports above, and call anything else a mistake

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
