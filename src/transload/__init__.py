"""Load any PyTorch checkpoint file on any machine, and explain why CUDA is unavailable.

>>> import transload
>>> transload.inspect("model.pt")  # doctest: +SKIP
>>> transload.load("model.pt")  # doctest: +SKIP
>>> print(transload.doctor())  # doctest: +SKIP

Importing this package costs next to nothing: each name is resolved when it is first used. Only in a program that has
imported torch, what a load needs is imported at once: 15 ms that its first load need not wait for.
"""

import sys

# Not typing.TYPE_CHECKING: importing typing would double the time `transload --version` takes.
TYPE_CHECKING = False
if TYPE_CHECKING:  # `as` with the same name makes a name public for type checkers
    from transload._version import __version__ as __version__
    from transload.checking import Check as Check
    from transload.checking import Compatibility as Compatibility
    from transload.checking import check as check
    from transload.checking import is_cuda_compatible as is_cuda_compatible
    from transload.checkpoint import Checkpoint as Checkpoint
    from transload.checkpoint import Storage as Storage
    from transload.checkpoint import Tensor as Tensor
    from transload.comparing import Diff as Diff
    from transload.comparing import diff as diff
    from transload.converting import Conversion as Conversion
    from transload.converting import convert as convert
    from transload.diagnose import doctor as doctor
    from transload.diagnose.report import Diagnosis as Diagnosis
    from transload.errors import *  # noqa: F403 - its __all__ are the public ones
    from transload.explaining import Explanation as Explanation
    from transload.explaining import explain as explain
    from transload.findings import Finding as Finding
    from transload.integrations.lightning import LightningCheckpointIO as LightningCheckpointIO
    from transload.loading import load as load
    from transload.loading.dcp_reader import CheckpointReader as CheckpointReader
    from transload.loading.handles import open as open  # noqa: A004 - transload.open, beside transload.load
    from transload.loading.into import KeysWarning as KeysWarning
    from transload.loading.into import MismatchError as MismatchError
    from transload.loading.into import load_into as load_into
    from transload.loading.placement import Plan as Plan
    from transload.machine import Machine as Machine
    from transload.opening import inspect as inspect
    from transload.opening.prefetch import Prefetch as Prefetch
    from transload.opening.prefetch import prefetch as prefetch
    from transload.patching import load_ipython_extension as load_ipython_extension
    from transload.patching import patch as patch
    from transload.patching import unload_ipython_extension as unload_ipython_extension
    from transload.patching import unpatch as unpatch
    from transload.rescuing import Rescue as Rescue
    from transload.rescuing import rescue as rescue
    from transload.retagging import Retag as Retag
    from transload.retagging import retag as retag
    from transload.saving import save as save
    from transload.saving import save_async as save_async
    from transload.verifying import Verification as Verification
    from transload.verifying import verify as verify

_NAMES = {
    "transload._version": "__version__",
    "transload.checking": "Check Compatibility check is_cuda_compatible",
    "transload.checkpoint": "Checkpoint Storage Tensor",
    "transload.comparing": "Diff diff",
    "transload.converting": "Conversion convert",
    "transload.diagnose": "doctor",
    "transload.diagnose.report": "Diagnosis",
    "transload.explaining": "Explanation explain",
    "transload.findings": "Finding",
    "transload.integrations.lightning": "LightningCheckpointIO",
    "transload.loading": "load",
    "transload.loading.dcp_reader": "CheckpointReader",
    "transload.loading.handles": "open",
    "transload.loading.into": "KeysWarning MismatchError load_into",
    "transload.loading.placement": "Plan",
    "transload.machine": "Machine",
    "transload.opening": "inspect",
    "transload.opening.prefetch": "Prefetch prefetch",
    "transload.patching": "load_ipython_extension patch unload_ipython_extension unpatch",
    "transload.rescuing": "Rescue rescue",
    "transload.retagging": "Retag retag",
    "transload.saving": "save save_async",
    "transload.verifying": "Verification verify",
}
"""The public names, by their modules; ``errors.__all__`` lists the errors."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_FIRST_LOAD = "transload.loading", "transload.judge", "transload.formats.torch_zip"


def _module(name: str) -> object:
    from importlib import import_module

    from transload.io import gc_paused

    with gc_paused():  # no code is garbage
        return import_module(name)


if "torch" in sys.modules:
    for _name in _FIRST_LOAD:
        _module(_name)

if not TYPE_CHECKING:  # a type checker must see the imports above, and call anything else a mistake

    def __getattr__(name: str) -> object:
        if name == "__all__":
            value = sorted((*_HOMES, *_module("transload.errors").__all__))
        elif name in _HOMES:
            value = getattr(_module(_HOMES[name]), name)
        elif name.endswith(("Error", "Warning")) and name in __getattr__("__all__"):
            value = getattr(_module("transload.errors"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return __getattr__("__all__")
