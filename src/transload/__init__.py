"""Land any PyTorch checkpoint on any machine, and say why CUDA is not there.

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
    from transload.checking.compatibility import Compatibility, is_cuda_compatible
    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.diagnose import doctor
    from transload.diagnose.verdict import Diagnosis
    from transload.errors import CannotReadError, TransloadError, UsageError
    from transload.findings import Finding
    from transload.loading import load
    from transload.loading.errors import (
        BrokenFileError,
        DoesNotFitError,
        LandingWarning,
        LoadError,
        NoDeviceError,
        NotACheckpointError,
        NoTorchError,
        UnsafeError,
    )
    from transload.machine import Machine
    from transload.opening import open  # noqa: A004 - transload.open, beside transload.load
    from transload.opening.into import MismatchError, load_into
    from transload.place import Plan
    from transload.read import inspect
    from transload.retagging import retag
    from transload.retagging.errors import BusyFileError, RetagError
    from transload.retagging.result import Retag
    from transload.saving import save, save_async
    from transload.saving.errors import CannotPickleError, SaveError, SaveWarning
    from transload.writing.errors import CannotWriteError

__all__ = [
    "BrokenFileError",
    "BusyFileError",
    "CannotPickleError",
    "CannotReadError",
    "CannotWriteError",
    "Check",
    "Checkpoint",
    "Compatibility",
    "Diagnosis",
    "DoesNotFitError",
    "Finding",
    "LandingWarning",
    "LoadError",
    "Machine",
    "MismatchError",
    "NoDeviceError",
    "NoTorchError",
    "NotACheckpointError",
    "Plan",
    "Retag",
    "RetagError",
    "SaveError",
    "SaveWarning",
    "Storage",
    "Tensor",
    "TransloadError",
    "UnsafeError",
    "UsageError",
    "__version__",
    "check",
    "doctor",
    "inspect",
    "is_cuda_compatible",
    "load",
    "load_into",
    "open",
    "retag",
    "save",
    "save_async",
]

_HOMES = {
    "BrokenFileError": "transload.loading.errors",
    "BusyFileError": "transload.retagging.errors",
    "CannotPickleError": "transload.saving.errors",
    "CannotReadError": "transload.errors",
    "CannotWriteError": "transload.writing.errors",
    "Check": "transload.checking",
    "Checkpoint": "transload.checkpoint",
    "Compatibility": "transload.checking.compatibility",
    "Diagnosis": "transload.diagnose.verdict",
    "DoesNotFitError": "transload.loading.errors",
    "Finding": "transload.findings",
    "LandingWarning": "transload.loading.errors",
    "LoadError": "transload.loading.errors",
    "Machine": "transload.machine",
    "MismatchError": "transload.opening.into",
    "NoDeviceError": "transload.loading.errors",
    "NoTorchError": "transload.loading.errors",
    "NotACheckpointError": "transload.loading.errors",
    "Plan": "transload.place",
    "Retag": "transload.retagging.result",
    "RetagError": "transload.retagging.errors",
    "SaveError": "transload.saving.errors",
    "SaveWarning": "transload.saving.errors",
    "Storage": "transload.checkpoint",
    "Tensor": "transload.checkpoint",
    "TransloadError": "transload.errors",
    "UnsafeError": "transload.loading.errors",
    "UsageError": "transload.errors",
    "__version__": "transload._version",
    "check": "transload.checking",
    "doctor": "transload.diagnose",
    "inspect": "transload.read",
    "is_cuda_compatible": "transload.checking.compatibility",
    "load": "transload.loading",
    "load_into": "transload.opening.into",
    "open": "transload.opening",
    "retag": "transload.retagging",
    "save": "transload.saving",
    "save_async": "transload.saving",
}

if not TYPE_CHECKING:  # a type checker shall see the imports above, and call anything else a mistake

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
