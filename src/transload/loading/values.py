"""Values that training runs keep beside their weights, and that torch refuses: numpy arrays, dates, paths, arguments.

All of them are data. Each is made by a constructor named here, from arguments whose types are checked first; nothing
that the file names is called. What could hold any object (an array of objects, a structured one) is not made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import types
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

from transload.errors import LoadError
from transload.loading.refusal import NeedsTrust, Wrong
from transload.tensors.content import numpy_or_none

Args = tuple[Any, ...]

_DTYPE = re.compile(r"(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SUV]\d{1,9})", re.ASCII)
_ENDIANS = ("<", ">", "|", "=")
_MAX_DIMENSIONS = 64


def has(name: str) -> bool:
    """Whether a value of this name can be made."""
    return name in _VALUES


def make(name: str, args: Args) -> Any:
    """A value by its name; ``Wrong`` if the arguments are not those that Python or numpy writes."""
    maker, *kinds = _VALUES[name]
    if len(args) > len(kinds) or any(not isinstance(*pair) for pair in zip(args, kinds, strict=False)):
        raise Wrong(f"a call of {name} with arguments that nobody writes")
    try:
        return maker(*args)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise Wrong(f"a call of {name} that fails: {error}") from error


def set_state(made: Any, state: Any) -> bool:
    """Give an object that was just made its state, as pickle would; ``False`` if it is not one of these."""
    kind = type(made)
    if kind in (argparse.Namespace, types.SimpleNamespace):
        if type(state) is not dict or any(type(key) is not str for key in state):
            raise Wrong("a namespace whose values have no names")
        vars(made).update(state)
    elif (kind.__module__, kind.__name__) == ("uuid", "UUID"):
        number = state.get("int") if type(state) is dict else None
        if type(number) is not int or not 0 <= number < 1 << 128:
            raise Wrong("an identifier that is not a number of 128 bits")
        made.__setstate__({"int": number})
    elif (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        _fill(made, state)
    elif _is_dtype(made):
        _set_byte_order(made, state)
    else:
        return False
    return True


# -- numpy


def _numpy() -> Any:
    np = numpy_or_none()
    if np is None:
        raise LoadError("it holds numpy arrays, and numpy cannot be imported", fix="Install numpy.")
    return np


def _is_dtype(made: object) -> bool:
    return any(kind.__name__ == "dtype" and kind.__module__ == "numpy" for kind in type(made).__mro__)


def _dtype(name: str, align: object = False, copy: object = True) -> Any:
    del align, copy
    if not _DTYPE.fullmatch(name):
        raise NeedsTrust(f"a numpy array or number of the dtype {name[:40]!r}")
    return _numpy().dtype(name, copy=True)


def _set_byte_order(made: Any, state: Any) -> None:
    """All that the state of a plain dtype says; one with fields, a shape or a unit says more."""
    if type(state) is not tuple or len(state) < 5 or state[1] not in _ENDIANS or any(state[2:5]):
        raise NeedsTrust("a structured numpy array")
    size = made.itemsize if made.kind in "SUV" else -1
    made.__setstate__((3, state[1], None, None, None, size, 4 if made.kind == "U" else 1 if size > 0 else -1, 0))


def _shape(shape: object) -> tuple[int, ...]:
    sizes = shape if type(shape) is tuple else (shape,)
    if len(sizes) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in sizes):
        raise Wrong("an array with an invalid shape")
    return sizes


def _check(dtype: Any, shape: tuple[int, ...], data: Any) -> None:
    if not _is_dtype(dtype) or dtype.hasobject or dtype.names or dtype.subdtype:
        raise NeedsTrust("a numpy array of something else than numbers or text")
    if not isinstance(data, (bytes, bytearray)) or len(data) != prod(shape) * dtype.itemsize:
        raise Wrong("an array with more or fewer bytes than its shape has")


def _empty(kind: type, shape: Args, code: object) -> Any:
    del code
    np = _numpy()
    if kind is not np.ndarray or shape != (0,):
        raise NeedsTrust("a numpy array of a class of its own")
    return np.ndarray((0,), "b")


def _fill(made: Any, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise Wrong("an array with a state that numpy does not write")
    _, shape, dtype, fortran, data = state
    if type(data) is list:
        raise NeedsTrust("a numpy array of objects")
    _check(dtype, _shape(shape), data)
    made.__setstate__((1, _shape(shape), dtype, bool(fortran), bytes(data)))


def _buffer(data: Any, dtype: Any, shape: Any, order: str, axes: Any = None) -> Any:
    """As ``numpy._core.numeric._frombuffer``: with the order ``K`` the axes are put into another order afterwards."""
    _check(dtype, _shape(shape), data)
    made = _numpy().frombuffer(bytearray(data), dtype).reshape(_shape(shape), order="F" if order == "F" else "C")
    if order != "K" or axes is None:
        return made
    if sorted(axes) != list(range(made.ndim)):
        raise Wrong("an array whose axes are not its own")
    return made.transpose(axes)


def _scalar(dtype: Any, data: Any = None) -> Any:
    _check(dtype, (), data)
    return _numpy().frombuffer(data, dtype)[0]


# -- Python


def _path(kind: str) -> Callable[..., Any]:
    def made(*parts: str) -> Any:
        import pathlib

        pure = "PureWindowsPath" if "Windows" in kind else "PurePosixPath"
        native = ("Windows" in kind) == (os.name == "nt") and not kind.startswith("Pure")
        return (pathlib.Path if native else getattr(pathlib, pure))(*parts)

    return made


def _of(module: str, name: str) -> Callable[..., Any]:
    """A class that is imported when it is needed."""

    def made(*args: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(module), name)(*args)

    return made


def _identifier() -> Any:
    from uuid import UUID

    return UUID.__new__(UUID)


_ZONE = (dt.tzinfo, type(None))
_INDEX = (int, type(None))
_NUMPY = ("numpy._core", "numpy.core")
_VALUES: dict[str, tuple[Any, ...]] = {
    "argparse.Namespace": (argparse.Namespace,),
    "types.SimpleNamespace": (types.SimpleNamespace,),
    "builtins.range": (range, int, int, int),
    "builtins.slice": (slice, _INDEX, _INDEX, _INDEX),
    "collections.deque": (deque, (list, tuple), _INDEX),
    "datetime.date": (dt.date, (bytes, int), int, int),
    "datetime.datetime": (dt.datetime, bytes, _ZONE),
    "datetime.time": (dt.time, bytes, _ZONE),
    "datetime.timedelta": (dt.timedelta, int, int, int),
    "datetime.timezone": (dt.timezone, dt.timedelta, str),
    "decimal.Decimal": (_of("decimal", "Decimal"), str),
    "fractions.Fraction": (_of("fractions", "Fraction"), (str, int), int),
    "uuid.UUID": (_identifier,),
    **{
        f"{module}.{kind}": (_path(kind), *(str,) * 64)
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    "numpy.dtype": (_dtype, str, (int, bool), (int, bool)),
    **{f"{core}.multiarray._reconstruct": (_empty, type, tuple, (bytes, str)) for core in _NUMPY},
    **{f"{core}.multiarray.scalar": (_scalar, object, object) for core in _NUMPY},
    **{
        f"{core}.numeric._frombuffer": (_buffer, (bytes, bytearray), object, (tuple, int), str, (tuple, type(None)))
        for core in _NUMPY
    },
}
"""The function that makes it, and the types of its arguments, which may be fewer."""
