"""Results as JSON: complete, with each tensor on one line, in ASCII, and always valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from transload.credentials import without_credentials

if TYPE_CHECKING:
    from transload.errors import TransloadError

_SAFE_BITS = 4096  # int.__str__ refuses numbers of over 4300 digits


def to_json(documents: Iterable[dict[str, Any]], *, several: bool) -> Iterator[str]:
    r"""Pieces of one JSON text: an object, or an array of objects for ``several`` files.

    Long lists have one element on each line, so that the C encoder does most of the work and ``grep`` is useful.

    >>> "".join(to_json([{"schema": 1, "tensors": [{"name": "w"}]}], several=False))
    '{\n"schema": 1,\n"tensors": [\n{"name": "w"}\n]\n}\n'
    """
    yield "[" if several else ""
    for place, document in enumerate(documents):
        yield ",\n" if place else "\n" if several else ""
        yield "{\n"
        for number, (key, value) in enumerate(document.items()):
            yield (",\n" if number else "") + _text(key) + ": "
            if isinstance(value, list) and value and isinstance(value[0], dict):
                yield "[\n"
                for index, element in enumerate(value):
                    yield (",\n" if index else "") + _text(element)
                yield "\n]"
            else:
                yield _text(value)
        yield "\n}"
    yield "\n]\n" if several else "\n"


def error_to_dict(path: str, error: TransloadError) -> dict[str, Any]:
    """The object for a file that could not be read."""
    detail = {"what": error.what, "where": error.where, "fix": error.fix, "errno": getattr(error, "errno", None)}
    return {"schema": 1, "path": without_credentials(path), "ok": False, "error": detail}


def _text(value: object) -> str:
    """Strict JSON; what JSON cannot represent becomes a string."""
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    except (ValueError, TypeError):
        text = "\\ud"
    # A surrogate: half of a pair, or one that stands for a byte of a name that is not UTF-8, which few parsers accept.
    return json.dumps(strict(value), ensure_ascii=True, allow_nan=False) if "\\ud" in text else text


def strict(value: object) -> object:
    """The value as JSON can represent it, for every parser."""
    if isinstance(value, dict):
        return {_whole(str(key)): strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _whole(value)
    if isinstance(value, int):
        return value if value.bit_length() <= _SAFE_BITS else hex(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    return str(value)


def _whole(text: str) -> str:
    r"""``text`` with ``\xff`` for the byte that a lone surrogate stands for, or else its escape.

    >>> _whole("\udcff.pt"), _whole("\ud800"), _whole("é")
    ('\\xff.pt', '\\ud800', 'é')
    """
    escaped = text.encode("utf-8", "backslashreplace").decode()
    return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", escaped) if escaped != text else text
