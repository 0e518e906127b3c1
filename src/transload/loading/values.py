"""Values that are saved beside weights: those that torch loads, and numpy arrays, dates, paths, arguments.

All of them are data. Each is made by a constructor listed here, after the types of its arguments were checked; nothing
that the file names is called. Arrays that could hold any object (of objects, structured ones) are not made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import pathlib
import types
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

from transload.errors import LoadError, Malformed, UnsafeError
from transload.formats.arrays import NUMPY_SCALARS, array_of, dtype_of, raw_bytes
from transload.formats.tensors import called
from transload.loading.refusal import weights_only_error
from transload.nodes import Call
from transload.tensors.content import numpy_or_none

Args = tuple[Any, ...]
_HELD: dict[type, tuple[str, type]] = {
    UserDict: ("data", dict),
    UserList: ("data", list),
    UserString: ("data", str),
    ChainMap: ("maps", list),
}
"""Classes with one attribute: its name and its type."""


def value_of(name: str, args: Args) -> Any:
    """A value by the name of its class or function; ``Malformed`` for arguments that Python never pickles."""
    maker, *kinds = VALUES[name]
    if len(args) > len(kinds) or any(not isinstance(*pair) for pair in zip(args, kinds, strict=False)):
        raise Malformed(f"a call of {name} with unexpected arguments")
    try:
        return maker(*args)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise Malformed(f"a call of {name} that fails: {error}") from error


def set_state(made: Any, state: Any) -> bool:
    """Set the state of a new object, as pickle would; ``False`` if it is not one of these values."""
    kind = type(made)
    if kind in (argparse.Namespace, types.SimpleNamespace):
        if type(state) is not dict or any(type(key) is not str for key in state):
            raise Malformed("a namespace whose values have no names")
        vars(made).update(state)
    elif kind in _HELD:
        name, held = _HELD[kind]
        if type(state) is not dict or [*state] != [name] or type(state[name]) is not held:
            raise Malformed(f"a {kind.__name__} with a state that Python does not write")
        vars(made).update(state)
    elif kind is uuid.UUID:
        number = state.get("int") if type(state) is dict else None
        if type(number) is not int or not 0 <= number < 1 << 128:
            raise Malformed("an identifier that is not a number of 128 bits")
        made.__setstate__({"int": number})
    else:
        return False
    return True


def from_numpy(node: Call) -> Any:
    """An array, number or dtype of numpy, by its description in the file."""
    np: Any = numpy_or_none()
    if np is None:
        raise LoadError("it holds numpy arrays, and numpy cannot be imported", fix="Install numpy.")
    name = called(node)
    array = None if name == "numpy.dtype" else array_of(node)
    dtype = dtype_of(node) if name == "numpy.dtype" else array and array.dtype
    if dtype is None or not dtype.plain:
        what = "it holds a numpy array of objects or records, or of a class of its own, which is more than plain data"
        fix = "Only if you trust its author: pass weights_only=False, which runs whatever the file says."
        raise UnsafeError(weights_only_error(what, node.callee), fix=fix)
    kind = np.dtype(dtype.code).newbyteorder(">" if dtype.big_endian else "<")
    if array is None:
        return kind
    raw = raw_bytes(array.data)
    if raw is None or not dtype.itemsize or len(raw) != prod(array.shape) * dtype.itemsize:
        raise Malformed("an array with more or fewer bytes than its shape has")
    steps = tuple(step * dtype.itemsize for step in array.stride)
    try:
        made = np.ndarray(array.shape, kind, raw or bytearray(), 0, steps)
        if raw:  # numpy.core.multiarray._reconstruct gives native byte order
            own = np.dtype(dtype.code) if name.endswith("._reconstruct") else kind
            made = made.astype(own, "K") if own != kind else made.copy("K")
    except ValueError as error:  # an empty array may claim any size in the other dimensions
        raise Malformed(f"an array that numpy cannot make: {error}") from error
    return made[()] if name in NUMPY_SCALARS else made


# -- constructors

_FACTORIES = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, OrderedDict, Counter)


def _latin(text: str, codec: str) -> bytes:
    if codec not in ("latin1", "latin-1"):
        raise ValueError(f"the codec is {codec!r}")
    return str.encode(text, "latin1")


def _bytearray(content: Any = b"", *codec: str) -> bytearray:
    return bytearray(_latin(content, *codec) if codec else content)


def _counter(content: Any = ()) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    dict.update(counted, content)  # Counter.update would count
    return counted


def _defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and factory not in _FACTORIES:
        raise ValueError("the factory does not make plain values")
    return defaultdict(factory)


def _size(sizes: tuple[Any, ...] = ()) -> Any:
    if any(type(size) is not int or not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise ValueError("a size is not an integer of 64 bits")
    return _late("torch", "Size", sizes)


def _layout(name: str) -> Any:
    import torch

    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"there is no layout {name[:80]!r}")  # noqa: TRY004 - the name is wrong, not its type
    return found


def _path(kind: str) -> Callable[..., Any]:
    """The class for a path; a pure one for paths of the other system."""
    windows = "Windows" in kind
    if not kind.startswith("Pure") and windows == (os.name == "nt"):
        return pathlib.Path
    return pathlib.PureWindowsPath if windows else pathlib.PurePosixPath


def _late(module: str, name: str, *args: Any) -> Any:
    """Call a class of a module that is imported only now."""
    return getattr(import_module(module), name)(*args)


def _zone(key: str, cached: object = True) -> Any:
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(key) if cached else ZoneInfo.no_cache(key)
    except (LookupError, OSError) as error:
        raise LoadError(f"the time zone {key[:80]!r} is not known here", fix="pip install tzdata") from error


def _bare(kind: Any) -> Callable[..., Any]:
    """A function that makes an object whose state is set later."""
    return lambda *_: kind.__new__(kind)


_ZONE = (dt.tzinfo, type(None))
_INDEX = (int, type(None))
_NUMBER = (float, int)
_LIST = (list, tuple)
_ITEMS = (dict, list)  # Python 2 writes a list of pairs
VALUES: dict[str, tuple[Any, ...]] = {
    "_codecs.encode": (_latin, str, str),  # bytes, as protocol 2 writes them
    "builtins.bytearray": (_bytearray, (bytes, str), str),
    "builtins.bytes": (bytes,),
    "builtins.complex": (complex, _NUMBER, _NUMBER),
    "builtins.frozenset": (frozenset, _LIST),
    "builtins.set": (set, _LIST),
    "collections.Counter": (_counter, _ITEMS),
    "collections.OrderedDict": (OrderedDict, _ITEMS),
    "collections.defaultdict": (_defaultdict, object),
    "torch.Size": (_size, tuple),
    "torch.device": (partial(_late, "torch", "device"), (str, int), int),
    "torch.serialization._get_layout": (_layout, str),
    "torch.torch_version.TorchVersion": (partial(_late, "torch.torch_version", "TorchVersion"), str),
    "argparse.Namespace": (argparse.Namespace,),
    "types.SimpleNamespace": (types.SimpleNamespace,),
    "builtins.range": (range, int, int, int),
    "builtins.slice": (slice, _INDEX, _INDEX, _INDEX),
    "collections.deque": (deque, _LIST, _INDEX),
    **{f"collections.{kind.__name__}": (_bare(kind), *((str,) if kind is UserString else ())) for kind in _HELD},
    "datetime.date": (dt.date, (bytes, int), int, int),
    "datetime.datetime": (dt.datetime, bytes, _ZONE),
    "datetime.time": (dt.time, bytes, _ZONE),
    "datetime.timedelta": (dt.timedelta, int, int, int),
    "datetime.timezone": (dt.timezone, dt.timedelta, str),
    "zoneinfo.ZoneInfo._unpickle": (_zone, str, (bool, int)),
    "decimal.Decimal": (partial(_late, "decimal", "Decimal"), str),
    "fractions.Fraction": (partial(_late, "fractions", "Fraction"), (str, int), int),
    "uuid.UUID": (_bare(uuid.UUID),),
    **{
        f"{module}.{kind}": (_path(kind), *(str,) * 64)
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""For each name the function to call, and the types of its arguments, of which there may be fewer."""
