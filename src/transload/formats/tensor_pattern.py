"""Reads the call that rebuilds an ordinary tensor in one step, by comparing its bytes with a template.

A large file has tens of thousands of these calls, of some twenty opcodes each, which differ in few places. In small
files this is not worth it, so the machine imports this module only once a pickle turns out to be large.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import compress
from struct import Struct
from typing import Any

from transload.formats.pickle_state import CONSTANTS, PickleMachine
from transload.nodes import Call, Persistent

_GET = rb"(?:h.|j....)"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J....)"  # BININT1, BININT2, BININT
_PUT = rb"r(....)"  # LONG_BINPUT, which all but the first thirty tensors use
_SIZE = rb"(" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"+t)"  # TUPLE1 to TUPLE3; or MARK and TUPLE
_CALL = re.compile(
    # MARK, the id of the storage: its key is BINUNICODE, or GET if it was seen before; TUPLE, BINPERSID
    rb"\((" + _GET + _GET + rb")(?:X(.)\0\0\0([0-9]+)" + _PUT + rb"|(" + _GET + rb"))(" + _GET + _INT + rb"N?)t" + _PUT
    + rb"Q(" + _INT + rb")(?:\)\)|" + _SIZE + _PUT + _SIZE + _PUT + rb")"  # offset; size and stride, or EMPTY_TUPLEs
    + rb"([\x88\x89]" + _GET + rb")\)R" + _PUT  # whether it requires gradients; its hooks, an empty OrderedDict
    + rb"t" + _PUT + rb"R" + _PUT, re.DOTALL
)  # fmt: skip
_TEXT, _AGAIN, _OFFSET = 3, 5, 8
_PUTS = (4, 7, 10, 12, 14, 15, 16)

_NUMBERS = {0x4A: Struct("<i"), 0x4B: Struct("<B"), 0x4D: Struct("<H")}
_GETS = {0x68: Struct("<B"), 0x6A: Struct("<I")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}

_MAX_TEMPLATES = 4096
_layout = lru_cache(maxsize=1024)(Struct)


class _Template:
    """The call of a tensor with gaps between ``pieces``: the text of a key after the first piece, then memo indexes.

    ``values`` are what the pieces stand for. A call can enter seven values into the memo; ``written`` says which ones
    this call does (not a key that was seen before, nor an empty size). ``named`` is where BINPERSID ends.
    """

    __slots__ = ("layout", "named", "pieces", "puts", "values", "written")

    def __init__(self, match: re.Match[bytes], memo: list[Any]) -> None:
        head, _, text, _, again, tail, _, first, size, _, stride, _, last, _, _, _ = match.groups()
        key = None if text else _decode(again, memo)[0]
        shape, steps = (_decode(size, memo), _decode(stride, memo)) if size else ([], [])
        kind, place, (offset,), (flag, ordered) = (_decode(raw, memo) for raw in (head, tail, first, last))
        self.values = (kind, key, place, offset, shape, steps, flag, ordered)
        self.named = match.start(_OFFSET) - match.start()
        self.written = [match.start(put) >= 0 for put in _PUTS]
        at, after = match.span(_TEXT) if text else (match.end(_AGAIN), match.end(_AGAIN))
        pieces, form = [match.string[match.start() : at]], f"<{at - match.start()}s{after - at}s"
        for put in compress(_PUTS, self.written):
            pieces.append(match.string[after : match.start(put)])
            form += f"{len(pieces[-1])}sI"
            after = match.end(put)
        self.pieces, self.puts, self.layout = tuple(pieces), len(pieces) - 1, _layout(form)


def _decode(raw: bytes, memo: list[Any]) -> list[Any]:
    """The values that GETs, numbers and constants push, or that the tuple at their end pops.

    ``LookupError`` if a GET finds nothing, or a tuple pops more or fewer values.
    """
    values: list[Any] = []
    position = 1 if raw[0] == 0x28 else 0
    while position < len(raw):
        code = raw[position]
        form = _NUMBERS.get(code) or _GETS.get(code)
        position += 1
        if form is not None:
            (value,) = form.unpack_from(raw, position)
            values.append(memo[value] if code in _GETS else value)
            position += form.size
        elif code in CONSTANTS:
            values.append(CONSTANTS[code])
        elif _TUPLES.get(code, len(values)) != len(values):
            raise LookupError
    return values


class TensorPattern:
    """Reads the calls of tensors in one run of a machine.

    Which template fits is guessed: layers repeat, so it is probably the one that came after the same template, for a
    name with the same last part. A wrong guess costs a match of the regular expression.
    """

    def __init__(self, vm: PickleMachine) -> None:
        self._data, self._size = vm.data, vm.size
        self._calls, self._persistent = vm.out.calls, vm.out.persistent
        self._templates: dict[tuple[bytes | None, ...], _Template] = {}
        self._guesses: dict[tuple[_Template | None, str], _Template] = {}
        self._last: _Template | None = None

    def read(self, pos: int, stack: list[Any], memo: list[Any]) -> int:
        """Read the call of a tensor after its first MARK; return where it ends, or 0 if it is not an ordinary one.

        The callee, whatever it is, is on top of the stack; the call replaces it.
        """
        if not stack:
            return 0
        name = stack[-2] if len(stack) > 1 else ""
        guess = (self._last, name.rpartition(".")[2] if type(name) is str else "")
        template = self._guesses.get(guess)
        if template is not None and (end := self._fill(template, pos, stack, memo)):
            self._last = template
            return end
        match = _CALL.match(self._data, pos)
        if match is None:
            return 0
        head, length, text, _, again, tail, _, first, size, _, stride, _, last, _, _, _ = match.groups()
        if text and length[0] != len(text):
            return 0
        pieces = (head, length, again, tail, first, size, stride, last)
        template = self._templates.get(pieces)
        if template is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            try:
                template = self._templates[pieces] = _Template(match, memo)
            except LookupError:
                return 0
        end = self._fill(template, pos, stack, memo)
        if end:
            if len(self._guesses) >= _MAX_TEMPLATES:
                self._guesses.clear()
            self._guesses[guess] = self._last = template
        return end

    def _fill(self, template: _Template, pos: int, stack: list[Any], memo: list[Any]) -> int:
        """Make the nodes of a call if the bytes fit the template; return where it ends, or 0."""
        layout, index = template.layout, len(memo)
        end = pos + layout.size
        if end > self._size:
            return 0
        if template.puts == 7:
            begin, text, p0, i0, p1, i1, p2, i2, p3, i3, p4, i4, p5, i5, p6, i6 = layout.unpack_from(self._data, pos)
            # Seven increasing numbers from ``index`` to ``index + 6`` are consecutive.
            if i0 != index or i6 != index + 6 or not i0 < i1 < i2 < i3 < i4 < i5 < i6:
                return 0
            pieces: tuple[bytes, ...] = (begin, p0, p1, p2, p3, p4, p5, p6)
        else:
            fields = layout.unpack_from(self._data, pos)
            text, pieces = fields[1], (fields[0], *fields[2::2])
            if fields[3::2] != (*range(index, index + template.puts),):
                return 0
        if pieces != template.pieces or (text and not text.isdigit()):
            return 0
        kind, key, place, offset, shape, steps, flag, ordered = template.values
        if text:
            key = text.decode()
        pid = (*kind, key, *place)
        storage = Persistent(pid, pos + template.named)
        hooks = Call(ordered, (), "reduce", end - 17)
        size, stride = tuple(shape), tuple(steps)  # new ones: code that walks the graph compares ids
        args = (storage, offset, size, stride, flag, hooks)
        call = stack[-1] = Call(stack[-1], args, "reduce", end - 5)
        self._persistent.append(storage)
        self._calls += (hooks, call)
        entries = (key, pid, size, stride, hooks, args, call)
        memo += entries if template.puts == 7 else compress(entries, template.written)
        return end
