"""Plain objects of a checkpoint: each allowed name with the only arguments that checkpoints call it with."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["BUILDERS", "Args", "Wrong", "set_attributes"]

Args = tuple[Any, ...]

_LATIN = ("latin1", "latin-1")
_MAX_RANK = 1024


class Wrong(Exception):  # noqa: N818 - a signal inside this room, never seen outside
    """A call that no checkpoint makes; the text says what is wrong with it, ``node`` where that was met."""

    node: object = None


def _ordered_dict(args: Args) -> OrderedDict[Any, Any]:
    return OrderedDict(_content(args, "an OrderedDict"))


def _counter(args: Args) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, _content(args, "a Counter"))
    return made


def _content(args: Args, what: str) -> Any:
    """Nothing, a dictionary, or a list of pairs as Python 2 writes it."""
    if not args:
        return ()
    if len(args) == 1 and (type(args[0]) is dict or _are_pairs(args[0])):
        return args[0]
    raise Wrong(f"{what} that is made from what is no dictionary")


def _are_pairs(value: object) -> bool:
    return type(value) is list and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in value)


def _set(args: Args) -> set[Any]:
    if len(args) > 1 or any(type(arg) not in (list, tuple) for arg in args):
        raise Wrong("a set that is made from what is no list")
    try:
        return set(*args)
    except TypeError as error:
        raise Wrong(f"a set of what cannot be in one: {error}") from error


def _bytearray(args: Args) -> bytearray:
    match args:
        case ():
            return bytearray()
        case (bytes() as data,):
            return bytearray(data)
        case (str() as text, str() as codec) if codec in _LATIN:
            return bytearray(_latin(text))
    raise Wrong("a byte array that is made from what are no bytes")


def _bytes(args: Args) -> bytes:
    if args:  # protocol 2 writes only the empty ones so
        raise Wrong("bytes that are made from something")
    return b""


def _frozenset(args: Args) -> frozenset[Any]:
    return frozenset(_set(args))


def _defaultdict(args: Args) -> defaultdict[Any, Any]:
    if len(args) > 1 or any(factory is not None and factory not in _FACTORIES for factory in args):
        raise Wrong("a defaultdict that makes something else than plain values")
    return defaultdict(*args)


_FACTORIES = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, OrderedDict, Counter)


def _version(args: Args) -> Any:
    from torch.torch_version import TorchVersion

    if len(args) != 1 or type(args[0]) is not str:
        raise Wrong("a version that is no text")
    return TorchVersion(args[0])


def _encode(args: Args) -> bytes:
    match args:
        case (str() as text, str() as codec) if codec in _LATIN:
            return _latin(text)
    raise Wrong("a call of _codecs.encode for another codec than latin1")


def _latin(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise Wrong("bytes that are written as text which latin1 does not have") from None


def _complex(args: Args) -> complex:
    if len(args) > 2 or any(type(arg) not in (float, int) for arg in args):
        raise Wrong("a complex number that is made from what are no numbers")
    return complex(*args)


def _size(args: Args) -> Any:
    import torch

    if len(args) > 1 or any(type(arg) is not tuple or len(arg) > _MAX_RANK for arg in args):
        raise Wrong("a torch.Size that is made from what is no tuple")
    if args and any(type(size) is not int or not -(1 << 63) <= size < 1 << 63 for size in args[0]):
        raise Wrong("a torch.Size of what are no numbers")
    return torch.Size(*args)


def _device(args: Args) -> Any:
    import torch

    match args:
        case (str() | int(),) | (str(), int()):
            return torch.device(*args)
    raise Wrong("a torch.device that is made from what is no name and index")


def _layout(args: Args) -> Any:
    import torch

    if len(args) != 1 or type(args[0]) is not str:
        raise Wrong("a layout without its name")
    found = getattr(torch, args[0].removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise Wrong(f"the layout {args[0][:80]}, which there is not")
    return found


BUILDERS: dict[str, Callable[[Args], Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.frozenset": _frozenset,
    "builtins.set": _set,
    "collections.Counter": _counter,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _defaultdict,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.torch_version.TorchVersion": _version,
}


def set_attributes(made: OrderedDict[Any, Any], state: object) -> None:
    """Attributes of an ordered dictionary, such as the ``_metadata`` of a state dict; none that it has already."""
    if not isinstance(state, Mapping):
        raise Wrong("an OrderedDict that is given a state which names no attributes")
    for name in state:
        if type(name) is not str or hasattr(OrderedDict, name):
            raise Wrong(f"an OrderedDict that is given the attribute {str(name)[:60]!r}, which it has already")
    vars(made).update(state)
