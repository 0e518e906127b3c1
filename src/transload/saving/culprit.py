"""Which part of an object it is that pickle refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

__all__ = ["culprit"]

_DEPTH = 12
_BREADTH = 10_000
"""Parts looked at on a level: an error need not take as long as the save would have."""


def culprit(obj: Any, attempt: Callable[[Any], object]) -> tuple[str, str]:
    """The place of the innermost part that fails by itself, and what to do about it."""
    place = "obj"
    for _ in range(_DEPTH):
        found = next(((name, part) for name, part in islice(_parts(obj), _BREADTH) if _fails(part, attempt)), None)
        if found is None:
            break
        place, obj = place + found[0], found[1]
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    hint = "Save a state_dict instead of the object that has it" if place.count(".") else "Leave it out"
    return f"{place} (a {kind})", f"{hint}, or give it a name at the top of a module: pickle refers to code by name."


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.80}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    held = getattr(obj, "__dict__", None)
    if isinstance(held, dict) and not isinstance(obj, type) and not callable(getattr(obj, "__code__", None)):
        yield from ((f".{name}", value) for name, value in held.items())


def _fails(part: Any, attempt: Callable[[Any], object]) -> bool:
    if isinstance(part, (str, bytes, int, float, bool, type(None))):
        return False
    try:
        attempt(part)
    except Exception:  # noqa: BLE001 - whatever it says: this is the one
        return True
    return False
