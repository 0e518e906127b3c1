"""The names in a trusted file: what each stands for here, and words for those that stand for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.loading.errors import LoadError
from transload.loading.rebuild import sparse_tensor, validate

if TYPE_CHECKING:
    import torch

__all__ = ["MissingClassError", "MissingModuleError", "class_of", "storage_dtype", "unpickler_of"]

_RENAMED = {"torch.tensor": "torch._tensor"}
"""Modules that torch has moved: https://github.com/pytorch/pytorch/pull/51633."""

_DEVICE_AT = {
    "_rebuild_wrapper_subclass": 6,
    "_rebuild_device_tensor_from_numpy": 2,
    "_rebuild_device_tensor_from_cpu_tensor": 2,
    "_rebuild_xla_tensor": 2,
}
"""Functions of ``torch._utils`` that get a device by itself, not through a storage, and as which argument."""


class MissingModuleError(LoadError, ModuleNotFoundError):
    """The file names a module that cannot be imported here."""


class MissingClassError(LoadError, AttributeError):
    """The file names a class or function that its module does not have here."""


def unpickler_of(pickle_module: Any) -> type[Any]:
    """The unpickler of a module, which finds storages and what has moved.

    Its objects get a ``device_of``. The class has none: it is part of a reference cycle, as every class is, and what it
    refers to lives until the garbage collector finds that.
    """

    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            kind = _storage_kind(name)
            if kind is not None:
                return kind
            module = _RENAMED.get(module, module)
            if (module, name) == ("torch._utils", "_rebuild_sparse_tensor"):
                return _sparse
            found = _imported(super().find_class, module, name)
            at = _DEVICE_AT.get(name) if module == "torch._utils" else None
            return found if at is None else _landing(found, at, self.device_of)

    return Unpickler


def _storage_kind(name: str) -> Any:
    """What torch takes for a class of storages, whatever module it is said to be in; ``None`` if it is none."""
    import torch

    if "Storage" not in name:
        return None
    try:
        return torch.serialization.StorageType(name)
    except KeyError:
        return torch.UntypedStorage if name in ("UntypedStorage", "_UntypedStorage") else None


def storage_dtype(kind: Any) -> torch.dtype:
    """The dtype that a class of storages stands for."""
    import torch

    made: torch.dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
    return made


def _imported(find: Callable[[str, str], Any], module: str, name: str) -> Any:
    try:
        return find(module, name)
    except ImportError as error:
        older = _older_numpy(module)
        if older:
            return _imported(find, older, name)
        raise _no_module(module, name, error) from error
    except AttributeError as error:
        raise _no_class(module, name) from error


def _older_numpy(module: str) -> str:
    """Where numpy 1 keeps what files written with numpy 2 name.

    >>> _older_numpy("numpy._core.multiarray"), _older_numpy("numpy.core")
    ('numpy.core.multiarray', '')
    """
    return f"numpy.core{module.removeprefix('numpy._core')}" if f"{module}.".startswith("numpy._core.") else ""


def _no_module(module: str, name: str, error: ImportError) -> MissingModuleError:
    missing = error.name or module
    what = f"the file needs {module}.{name}, and `import {module}` fails here: {error}"
    fix = f"Make `import {missing}` work: install its package, or add the folder of its source to PYTHONPATH."
    made = MissingModuleError(what, fix=fix)
    made.name = missing
    return made


def _no_class(module: str, name: str) -> MissingClassError:
    if module in ("__main__", "__mp_main__"):
        what = f"the file needs {name}, which was defined in the script that saved it"
        return MissingClassError(what, fix=f"Define or import {name} in the script that loads the file.")
    what = f"the file needs {module}.{name}, and {module} has no {name} here"
    return MissingClassError(
        what, fix=f"Install the version of {module.partition('.')[0]} that the file was saved with."
    )


def _landing(function: Callable[..., Any], at: int, device_of: Callable[[str], str]) -> Callable[..., Any]:
    """The function, with a device among its arguments replaced by the one where it lands."""

    def rebuild(*args: Any) -> Any:
        device = args[at]
        return function(*args[:at], type(device)(device_of(str(device))), *args[at + 1 :])

    return rebuild


def _sparse(layout: Any, data: Any) -> Any:
    """A sparse tensor, looked at as soon as it is made: its bytes are there already."""
    made = sparse_tensor(layout, data)
    validate(made)
    return made


def class_of(cls: Any, file: Any, source: Any) -> Any:
    """A class that a stream keeps with its source; a difference from the source here is told, as by torch."""
    import inspect
    import warnings

    import torch

    try:
        here = inspect.getsource(cls)
    except (OSError, TypeError):
        here = source
    if file and source and here != source:
        text = f"source code of class '{torch.typename(cls)}' has changed since the file was saved"
        warnings.warn(text, torch.serialization.SourceChangeWarning, stacklevel=2)
    return cls
