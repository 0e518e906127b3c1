"""What ``load_into`` takes as ``rename``: a mapping, regular expressions or a function, as one function of a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transload.errors import UsageError

KeyFunction = Callable[[str], str | None]
"""The new name of a key, or ``None`` to leave it out."""

_FIX = "Pass {'encoder.': 'backbone.'}, [(r'^encoder\\.', 'backbone.')], or a function of a key."


def key_function(rename: Any) -> KeyFunction:
    r"""One function for all forms of ``rename``; ``UsageError`` for anything else.

    >>> rename = key_function({"encoder.": "backbone.", "head.bias": None})
    >>> rename("encoder.weight"), rename("head.bias"), rename("head.weight")
    ('backbone.weight', None, 'head.weight')
    >>> key_function((r"layer(\d+)", r"layers.\1"))("layer3.weight")
    'layers.3.weight'
    """
    if isinstance(rename, Mapping):
        return _by_table(rename)
    if callable(rename):
        return _by_function(rename)
    if isinstance(rename, list | tuple):
        pairs = [rename] if len(rename) == 2 and isinstance(rename[0], str | re.Pattern) else rename
        return _by_patterns(pairs)
    raise UsageError(f"rename is of type {type(rename).__name__}", fix=_FIX)


def _by_table(table: Mapping[Any, Any]) -> KeyFunction:
    """Whole keys, then prefixes, the longest first."""
    for old, new in table.items():
        if not isinstance(old, str) or not isinstance(new, str | None):
            raise UsageError(f"rename has {old!r}: {new!r}, which is not one key for another", fix=_FIX)
    prefixes = sorted((old for old in table if not old or old.endswith(".")), key=len, reverse=True)

    def renamed(key: str) -> str | None:
        if key in table:
            return table[key]  # type: ignore[no-any-return]
        old = next((old for old in prefixes if key.startswith(old)), None)
        if old is None:
            return key
        return None if table[old] is None else table[old] + key[len(old) :]

    return renamed


def _by_patterns(pairs: Sequence[Any]) -> KeyFunction:
    """Regular expressions, each with what replaces it, one after the other."""
    steps = [_step(pair) for pair in pairs]

    def renamed(key: str) -> str | None:
        for pattern, new in steps:
            key = pattern.sub(new, key)
        return key

    return renamed


def _step(pair: Any) -> tuple[re.Pattern[str], str]:
    try:
        old, new = pair
        pattern = re.compile(old)
        pattern.sub(new, "")
    except (TypeError, ValueError, LookupError, re.error) as error:
        raise UsageError(f"rename has {pair!r}, which cannot be used: {error}", fix=_FIX) from error
    return pattern, new


def _by_function(function: Callable[[str], Any]) -> KeyFunction:
    def renamed(key: str) -> str | None:
        new = function(key)
        if isinstance(new, str | None):
            return new
        what = f"the function given as rename returned {type(new).__name__} for {key!r}"
        raise UsageError(what, fix="Return the new key, or None to leave it out.")

    return renamed
