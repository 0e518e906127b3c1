"""Reads an object that gets attributes in one step, by a pattern that an earlier object of its class has.

An index of many pieces has a hundred thousand objects of a few classes, of some twenty opcodes each, which differ in
numbers and texts. As for tensors, this is not worth it in small files, so the machine imports this module late.
"""

from __future__ import annotations

import re
from typing import Any

from transload.formats.pickle_state import CONSTANTS, PickleMachine
from transload.nodes import Call, Dict

_GET = rb"(?:h.|j....)"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"  # BININT1, BININT2, BININT, LONG1
_PLAIN = rb"(" + _GET + rb"|" + _INT + rb"|[N\x88\x89])"
_TEXT = rb"(\x8c.[ -~]*)\x94"  # SHORT_BINUNICODE, MEMOIZE
_TUPLE = rb"(" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"{1,64}t)"  # TUPLE1 to TUPLE3; or MARK and TUPLE
_CALLED = _TUPLE + rb"\x94\x85\x94R\x94"  # a call with that tuple: MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE
_ATTRIBUTE = re.compile(
    rb"(" + _GET + rb")(?:(" + _GET + rb")" + _CALLED + rb"|" + _TEXT + rb"|" + _PLAIN + rb")", re.DOTALL
)  # its name, then what is called and the tuple, a text, or another value
_BEGIN, _END = b"\x94}\x94(", b"ub"  # MEMOIZE, EMPTY_DICT, MEMOIZE, MARK; SETITEMS, BUILD
_NUMBER = re.compile(_INT, re.DOTALL)

# A hostile file can have a class of its own for each object, or attributes in another order.
_MAX_SHAPES = 64
_MAX_TRIES = 8  # for a class; the first object has the names of attributes as texts, and some cross a frame
_MAX_ATTRIBUTES = 16
_MAX_KNOWN = 4096


class _Shape:
    """The pattern of an object after NEWOBJ; ``items`` are the names of its attributes, with gaps for the values.

    ``entered`` are the values that enter the memo by themselves: the position, and what is called with it, or ``_TEXT``
    for a text.
    """

    __slots__ = ("entered", "items", "match")

    def __init__(self, pattern: bytes, items: list[Any], entered: list[tuple[int, Any]]) -> None:
        self.match = re.compile(pattern, re.DOTALL).match
        self.items, self.entered = items, tuple(entered)


class _Known(dict[bytes, Any]):
    """The values that opcodes push, decoded when first asked for; ``LookupError`` if the machine would refuse them.

    An entry of the memo never changes while the memo is a list. A tuple of numbers is kept in another, of arguments.
    """

    def __init__(self, vm: PickleMachine) -> None:
        super().__init__()
        self._memo: Any = vm.memo
        self._rare = vm.out.rare

    def __missing__(self, raw: bytes) -> Any:
        code = raw[0]
        value: Any
        if code in b"hj":
            value = self._memo[int.from_bytes(raw[1:], "little")]
        elif code in CONSTANTS:
            value = CONSTANTS[code]
        elif code == 0x8C:
            if raw[1] != len(raw) - 2 or "SHORT_BINUNICODE" not in self._rare:  # the machine notes the first one
                raise LookupError
            value = raw[2:].decode()
        else:
            numbers = _NUMBER.findall(raw, int(code == 0x28))
            if numbers != [raw] and code != 0x28 and len(numbers) != raw[-1] - 0x84:
                raise LookupError
            value = _int(raw) if numbers == [raw] else (tuple(map(_int, numbers)),)
        if len(self) < _MAX_KNOWN:
            self[raw] = value
        return value


def _int(raw: bytes) -> int:
    digits = raw[2:] if raw[0] == 0x8A else raw[1:]
    return int.from_bytes(digits, "little", signed=raw[0] in b"J\x8a")


class RecordPattern:
    """Reads the attributes of objects in one run of a machine."""

    def __init__(self, vm: PickleMachine) -> None:
        self._data, self._calls = vm.data, vm.out.calls
        self._decode = _Known(vm).__getitem__
        self._shapes: dict[int, list[_Shape]] = {}
        self._tries: dict[int, int] = {}
        self._left = _MAX_SHAPES

    def read(self, made: Call, pos: int, memo: list[Any]) -> int:
        """Read the attributes of an object that NEWOBJ has made; return where they end, or 0 if they are unusual.

        Nothing is changed unless all of them can be read.
        """
        callee = id(made.callee)  # the call keeps it alive, so its id stays unique
        shape: _Shape | None
        for shape in self._shapes.get(callee, ()):
            if match := shape.match(self._data, pos):
                break
        else:
            shape = self._learn(callee, pos)
            match = shape.match(self._data, pos) if shape else None
        if shape is None or match is None:
            return 0
        try:
            values = [*map(self._decode, match.groups())]
        except LookupError:
            return 0
        items = shape.items.copy()
        record = Dict(items)
        memo += (made, record)
        for position, function in shape.entered:
            value = values[position]
            if function is _TEXT:
                memo.append(value)
            else:
                call = values[position] = Call(function, value, "reduce", match.end(position + 1) + 4)
                self._calls.append(call)
                memo += (value[0], value, call)
        items[1::2] = values
        made.states = [record]
        return match.end()

    def _learn(self, callee: int, pos: int) -> _Shape | None:
        """The shape of the object at a position, which is kept for others of its class; ``None`` if it is unusual."""
        tries = self._tries[callee] = self._tries.get(callee, 0) + 1
        if tries > _MAX_TRIES or self._left <= 0 or self._data[pos : pos + 4] != _BEGIN:
            return None
        pattern, entered = re.escape(_BEGIN), []
        items: list[Any] = []
        pos += len(_BEGIN)
        while len(items) < 2 * _MAX_ATTRIBUTES and (match := _ATTRIBUTE.match(self._data, pos)):
            name, called, _, text, _ = match.groups()
            pos = match.end()
            try:
                items += [self._decode(name), None]
                function = self._decode(called) if called else _TEXT
            except LookupError:
                return None
            if type(items[-2]) is not str:
                return None
            if called or text:
                entered.append((len(items) // 2 - 1, function))
            pattern += re.escape(name) + (re.escape(called) + _CALLED if called else _TEXT if text else _PLAIN)
        if not items or self._data[pos : pos + 2] != _END:
            return None
        self._left -= 1
        shape = _Shape(pattern + _END, items, entered)
        self._shapes.setdefault(callee, []).append(shape)
        return shape
