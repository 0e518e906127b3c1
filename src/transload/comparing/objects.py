"""Whether two values that are no tensors are the same, as far as the inert nodes of pickles say; nothing is built."""

from __future__ import annotations

from math import isnan
from typing import Any

from transload.nodes import Big, Call, Dict, Global

_MOST = 100_000  # nodes compared for one value: shared tuples in tuples can stand for 2**60
_ATOMS = frozenset({int, float, str, bool, bytes, bytearray, type(None)})


def is_same(a: object, b: object) -> bool | None:
    """Whether they are the same; ``None`` if that is not known.

    >>> is_same((1, [2.0, float("nan")]), (1, [2.0, float("nan")])), is_same(1, True), is_same(Big(300), Big(300))
    (True, False, None)
    """
    unknown, compared = False, 0
    waiting: list[tuple[Any, Any]] = [(a, b)]
    while waiting:
        one, two = waiting.pop()
        compared += 1
        if type(one) is not type(two):
            return False
        kind = type(one)
        if kind in _ATOMS:
            if one != two and not (kind is float and isnan(one) and isnan(two)):
                return False
        elif kind is list or kind is tuple or kind is Dict:
            ones, twos = (one, two) if kind is not Dict else (one.items, two.items)
            if len(ones) != len(twos):
                return False
            waiting += zip(ones, twos, strict=True)
        elif kind is Global:
            if one.full_name != two.full_name:
                return False
        elif kind is Call:
            parts = ("callee", "args", "kwargs", "states", "items", "appended")
            waiting += [(getattr(one, part), getattr(two, part)) for part in parts]
        elif kind is Big and one.nbytes != two.nbytes:
            return False
        else:  # a storage or a huge number, whose bytes are not here, or a set, which has no order
            unknown = True
        if compared > _MOST or len(waiting) > _MOST:
            return None
    return None if unknown else True
