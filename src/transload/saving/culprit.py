"""Which part of an object it is that pickle refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

__all__ = ["culprit"]

_DEPTH = 12
_BREADTH = 10_000
"""Parts looked at on a level: an error need not take as long as the save would have."""


def culprit(obj: Any, attempt: Callable[[Any], object], error: Exception) -> tuple[str, str]:
    """The place of the innermost part that fails by itself, and for the same reason; and what to do about it."""
    place, kind = "obj", type(error)
    for _ in range(_DEPTH):
        parts = islice(_parts(obj), _BREADTH)
        found = next(((name, part) for name, part in parts if _fails(part, attempt, kind)), None)
        if found is None:
            break
        place, obj = place + found[0], found[1]
    return f"{place} (a {type(obj).__module__}.{type(obj).__qualname__})", _fix(place, obj, kind)


def _fix(place: str, obj: Any, kind: type[Exception]) -> str:
    import torch

    if issubclass(kind, RecursionError):
        return "It is nested too deep for pickle: make it flatter, or allow more by sys.setrecursionlimit()."
    if isinstance(obj, torch.Tensor):
        return "Save a plain tensor with the same numbers: to_dense() makes one of most kinds."
    hint = "Save a state_dict instead of the object that has it" if place.count(".") else "Leave it out"
    if isinstance(obj, torch.nn.Module):
        return f"{hint if place.count('.') else 'Save its state_dict() instead'}."
    return f"{hint}, or give it a name at the top of a module: pickle refers to code by name."


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.80}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    held = getattr(obj, "__dict__", None)
    if isinstance(held, dict) and not isinstance(obj, type) and not callable(getattr(obj, "__code__", None)):
        yield from ((f".{name}", value) for name, value in held.items())


def _fails(part: Any, attempt: Callable[[Any], object], kind: type[Exception]) -> bool:
    if isinstance(part, (str, bytes, int, float, bool, type(None))):
        return False
    try:
        attempt(part)
    except Exception as error:  # noqa: BLE001 - it may be any, and not the one that is looked for
        return isinstance(error, kind)
    return False
