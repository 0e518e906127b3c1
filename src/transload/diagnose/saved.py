"""Reads a machine from the JSON of another run, so that anyone can judge a report from a bug thread."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transload.errors import UsageError
from transload.machine import Machine, Unknown


def machine_in(text: str, where: str) -> Machine:
    """The machine in the output of ``transload doctor --json``; errors name ``where``."""
    try:
        document = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {error}", where=where, fix=_FIX) from None
    return machine_of(document, where)


def machine_of(document: object, where: str) -> Machine:
    """The machine in a report that is already parsed."""
    if not isinstance(document, dict) or not isinstance(document.get("machine"), dict):
        raise UsageError("it is not a report of transload doctor: it has no object 'machine'", where=where, fix=_FIX)
    if document.get("schema") != 1:
        raise UsageError(f"its schema is {document.get('schema')!r}, but this transload reads only 1", where=where)
    try:
        return machine_from(document["machine"])
    except (ValueError, RecursionError) as error:  # the latter while a deeply nested value is quoted
        raise UsageError(str(error), where=where, fix=_FIX) from None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


# How launchers label each line with its source: ``gpu01: `` of pdsh, clush and srun --label, ``[pod/doctor-x/main] ``
# of kubectl. srun splits lines of more than 1,024 bytes. mpirun --tag-output labels each chunk that it reads, which may
# begin within a line.
_LABEL = re.compile(r'[^\S\n]*(?:\[([^\]\s"]+)\]:?|([\w.@/-]+):)[^\S\n]?')
_TAG = re.compile(r'\[([^\[\]\s"]{1,300})\]<(std\w+)>:')
_LABELLED = re.compile(rf"^{_LABEL.pattern}\{{", re.MULTILINE)
_BLANK = re.compile(r"\s*")
_BEGIN = re.compile(r'\{\s*"(?:schema|node)":')


def reports_in(text: str) -> Iterator[tuple[str, object | ValueError]]:
    r"""The reports in a stream, each with the name of its source, empty if the stream has no labels.

    They follow each other, in an array or not; labelled lines of several sources may be mixed. What cannot be parsed is
    an error, and reading continues with the next report.

    >>> [(name, report["schema"]) for name, report in reports_in('b: {\na: {"schema": 1}\nb: "schema": 2}')]
    [('b', 2), ('a', 1)]
    """
    streams = {"": text}
    if text.lstrip()[:1] not in ("{", "") and (_TAG.search(text) or _LABELLED.search(text)):
        if _TAG.search(text):
            _, *split = _TAG.split(text)
            tagged = zip(split[::3], split[1::3], split[2::3], strict=True)
            pieces = [(who.rpartition(",")[2], piece) for who, stream, piece in tagged if stream == "stdout"]
        else:
            marked = ((_LABEL.match(line), line) for line in text.splitlines())
            pieces = [(match[1] or match[2], line[match.end() :]) for match, line in marked if match]
        by_label: dict[str, list[str]] = {}
        for label, piece in pieces:
            by_label.setdefault(label, []).append(piece)
        streams = {label: "".join(parts) for label, parts in by_label.items()}  # launchers add line breaks
    for label, stream in streams.items():
        name = f"rank {label}" if label.isdigit() else label
        documents = list(_parsed(stream))
        words = f", only: {stream.strip()[:200]}" if stream.strip() else ""
        yield from ((name, document) for document in documents or [ValueError(f"there is no report in it{words}")])


def _parsed(stream: str) -> Iterator[object | ValueError]:
    """The reports that follow each other in a text; anything between them is skipped."""
    decoder, at = json.JSONDecoder(parse_constant=_no_number), 0
    while (at := _BLANK.match(stream, at).end()) < len(stream):  # type: ignore[union-attr]  # it always matches
        if stream[at] in "{[":
            try:
                value, at = decoder.raw_decode(stream, at)
            except (ValueError, RecursionError) as error:
                yield ValueError(f"it is not JSON: {error}")
            else:
                yield from value if isinstance(value, list) else [value]
                continue
        begin = _BEGIN.search(stream, at + 1)
        at = begin.start() if begin else len(stream)


_NUMBERS, _COUNTS = 1 << 63, 1 << 16
"""Limits that no number of a report reaches, and no count of cards."""
_TEXT, _LIST = 1 << 14, 20_000
"""The most characters of a text and elements of a list: more than any probe writes, and still fast to judge."""

_FIX = "Give the file that 'transload doctor --json > machine.json' wrote."


def machine_from(data: dict[str, Any]) -> Machine:
    """The inverse of ``machine.to_dict``. Unknown keys are ignored, and missing ones get their defaults.

    A value of the wrong type raises ``ValueError`` with its place.
    """
    machine: Machine = _value(Machine, data, "machine")
    return machine


@cache  # else it takes most of the time of a comparison, which may read thousands of reports
def _form(kind: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
    """The origin of a type, its arguments, and the fields of a dataclass with their types."""
    hints = get_type_hints(kind) if isinstance(kind, type) and is_dataclass(kind) else {}
    members = {field.name: hints[field.name] for field in fields(kind)} if hints else None
    return get_origin(kind) or kind, get_args(kind), members


def _value(kind: Any, data: Any, where: str) -> Any:
    """The value of a field of this type; raises ``ValueError`` if ``data`` is something else."""
    if kind is str and type(data) is str:
        return data[:_TEXT]
    if kind is bool and type(data) is bool:
        return data
    origin, kinds, members = _form(kind)
    if origin in (Union, UnionType):  # exactly one of the types is neither ``Unknown`` nor ``None``
        if data is None and type(None) in kinds:
            return None
        if isinstance(data, dict) and set(data) == {"unknown"} and Unknown in kinds:
            return Unknown(str(data["unknown"])[:_TEXT])
        return _value(next(kind for kind in kinds if kind not in (Unknown, type(None))), data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_value(kinds[0], item, f"{where}[{index}]") for index, item in enumerate(data[:_LIST]))
    if origin is dict and isinstance(data, dict):
        given = list(data.items())[:_LIST]
        return {str(name)[:_TEXT]: _value(kinds[1], item, f"{where}.{name[:60]}") for name, item in given}
    if origin is Literal and data in kinds:
        return data
    if members is not None and isinstance(data, dict):
        values = {name: _value(members[name], data[name], f"{where}.{name}") for name in members if name in data}
        with suppress(TypeError):  # a field without a default is missing
            return kind(**values)
    limit = _COUNTS if where.endswith(".count") else _NUMBERS
    if kind in (int, float) and type(data) in (int, kind) and -limit < data < limit:
        return kind(data)
    raise ValueError(f"{where} cannot be {json.dumps(data)[:60]}")
