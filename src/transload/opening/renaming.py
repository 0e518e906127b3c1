"""Other names for the tensors of a file: what ``rename`` of ``load_into`` and ``convert`` may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transload.errors import UsageError

KeyFunction = Callable[[str], str | None]
"""The new name of a key, or ``None`` to leave it out."""
_FIX = "Pass {'encoder.': 'backbone.'}, [(r'^encoder\\.', 'backbone.')], or a function of a key."


class Renaming:
    r"""One function for all forms of ``rename``; ``UsageError`` for anything else.

    ``unused`` are the names, prefixes and patterns that no key has matched so far.

    >>> rename = Renaming({"encoder.": "backbone.", "head.bias": None})
    >>> rename("encoder.weight"), rename("head.bias"), rename("head.weight")
    ('backbone.weight', None, 'head.weight')
    >>> Renaming([(r"layer(\d+)", r"layers.\1"), {"layers.3.": "last."}])("layer3.weight")
    'last.weight'
    """

    def __init__(self, rename: Any) -> None:
        self._steps: list[KeyFunction] = []
        self.unused: dict[str, None] = {}
        several = isinstance(rename, list | tuple)
        if several and len(rename) == 2 and isinstance(rename[0], str | re.Pattern):
            several = False
        for step in rename if several else [rename]:
            if isinstance(step, Mapping):
                self._steps.append(self._table(step))
            elif callable(step):
                self._steps.append(_function(step))
            elif several or isinstance(step, list | tuple):
                self._steps.append(self._substitution(step))
            else:
                raise UsageError(f"rename is of type {type(rename).__name__}", fix=_FIX)

    def __call__(self, key: str) -> str | None:
        """The new name of a key."""
        new: str | None = key
        for step in self._steps:
            if new is not None:
                new = step(new)
        return new

    def _table(self, table: Mapping[Any, Any]) -> KeyFunction:
        for old, new in table.items():
            if not isinstance(old, str) or not isinstance(new, str | None):
                raise UsageError(f"rename has {old!r}: {new!r}, which does not map one key to another", fix=_FIX)
        self.unused.update(dict.fromkeys(table))
        prefixes = sorted((old for old in table if not old or old.endswith((".", "/"))), key=len, reverse=True)

        def renamed(key: str) -> str | None:
            old = key if key in table else next((old for old in prefixes if key.startswith(old)), None)
            if old is None:
                return key
            self.unused.pop(old, None)
            new: str | None = table[old]
            return None if new is None else new + key[len(old) :]

        return renamed

    def _substitution(self, pair: Any) -> KeyFunction:
        try:
            old, new = pair
            pattern = re.compile(old)
            re.sub(old, new, "")
        except (TypeError, ValueError, LookupError, OverflowError, RecursionError, re.error) as error:
            raise UsageError(f"rename has {pair!r}, which cannot be used: {error}", fix=_FIX) from error
        self.unused[pattern.pattern] = None

        def renamed(key: str) -> str:
            key, count = pattern.subn(new, key)
            if count:
                self.unused.pop(pattern.pattern, None)
            return key

        return renamed


def _function(rename: Callable[[str], Any]) -> KeyFunction:
    def renamed(key: str) -> str | None:
        new = rename(key)
        if isinstance(new, str | None):
            return new
        what = f"the function given as rename returned {type(new).__name__} for {key!r}"
        raise UsageError(what, fix="Return the new key, or None to leave it out.")

    return renamed
