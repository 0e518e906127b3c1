"""Land any PyTorch checkpoint on any machine, and say why CUDA is not there.

>>> import transload
>>> transload.inspect("model.pt")  # doctest: +SKIP
>>> print(transload.doctor())  # doctest: +SKIP

Importing this package costs next to nothing: each name is resolved when it is first used.
"""

# Not typing.TYPE_CHECKING: importing typing would double the time `transload --version` takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from transload._version import __version__
    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.diagnose import doctor
    from transload.diagnose.verdict import Diagnosis
    from transload.errors import CannotReadError, TransloadError, UsageError
    from transload.findings import Finding
    from transload.machine import Machine
    from transload.read import inspect

__all__ = [
    "CannotReadError",
    "Checkpoint",
    "Diagnosis",
    "Finding",
    "Machine",
    "Storage",
    "Tensor",
    "TransloadError",
    "UsageError",
    "__version__",
    "doctor",
    "inspect",
]

_HOMES = {
    "CannotReadError": "transload.errors",
    "Checkpoint": "transload.checkpoint",
    "Diagnosis": "transload.diagnose.verdict",
    "Finding": "transload.findings",
    "Machine": "transload.machine",
    "Storage": "transload.checkpoint",
    "Tensor": "transload.checkpoint",
    "TransloadError": "transload.errors",
    "UsageError": "transload.errors",
    "__version__": "transload._version",
    "doctor": "transload.diagnose",
    "inspect": "transload.read",
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
