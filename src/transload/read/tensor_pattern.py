r"""The opcodes that every tensor repeats, read in one step.

``torch.save`` writes a tensor as a call, the same thirty opcodes ten thousand times over::

    ( ( 'storage' FloatStorage '17' 'cpu' 64 TUPLE BINPERSID 0 (64,) (1,) False OrderedDict() TUPLE REDUCE

of which only the key of the storage and the memo's indexes change, and a few numbers now and then. A ``_Mould`` is such
a run that was met before: its bytes, with holes where the key and the indexes are, and the values they stand for. Where
the bytes fit, the very nodes are made that the machine makes of them opcode by opcode; where anything is out of the
ordinary nothing is taken, and the machine goes on from where it stands. That the two agree is tested on files of torch
and on mutilated ones.

Why a mould is what the machine would have read: it is taken from a match of ``_CALL``, in which each alternative begins
with its opcode, different from those beside it, and is as long as the opcode's argument. So at each opcode at most one
alternative fits, and it ends where the opcode ends. The one argument of variable length, the text of a key, has the
length that is stated before it, which is among the bytes that have to fit. Equal bytes are equal opcodes and leave
equal values. That holds for GETs as well, because the memo is a list only as long as each entry is written once, in
order, and else no mould is used. The indexes written must be the next ones; so a GET of what the run itself writes
finds nothing when the mould is made, and is left to the machine.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import compress
from struct import Struct
from typing import Any

from transload.read.nodes import Call, Persistent
from transload.read.pickle_state import Machine

__all__ = ["TensorPattern"]

_GET = rb"(?:h.|j....)"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J....)"  # BININT1, BININT2, BININT
_PUT = rb"r(....)"  # LONG_BINPUT: all but the first thirty tensors
_SIZE = rb"(" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"+t)"  # TUPLE1 to TUPLE3; or MARK and TUPLE
_CALL = re.compile(
    # MARK, the id of the storage: its key is BINUNICODE, or GET where it was met before; TUPLE, BINPERSID
    rb"\((" + _GET + _GET + rb")(?:X(.)\0\0\0([0-9]+)" + _PUT + rb"|(" + _GET + rb"))(" + _GET + _INT + rb"N?)t" + _PUT
    + rb"Q(" + _INT + rb")(?:\)\)|" + _SIZE + _PUT + _SIZE + _PUT + rb")"  # offset; size and stride, or EMPTY_TUPLEs
    + rb"([\x88\x89]" + _GET + rb")\)R" + _PUT  # whether it requires gradients; its hooks, an empty OrderedDict
    + rb"t" + _PUT + rb"R" + _PUT,
    re.DOTALL,
).match  # fmt: skip

_TEXT, _AGAIN, _OFFSET = 3, 5, 8
_PUTS = (4, 7, 10, 12, 14, 15, 16)

_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_NUMBERS = {0x4A: Struct("<i"), 0x4B: Struct("<B"), 0x4D: Struct("<H")}
_GETS = {0x68: Struct("<B"), 0x6A: Struct("<I")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}

_MAX_MOULDS = 4096
_MAX_FOLLOWING = 64


class _Mould:
    """The call of a tensor with holes: ``pieces``, the text of a key after the first, a memo index after the others.

    ``values`` are what the pieces stand for; ``written`` says which of the seven values a call can enter into the memo
    it does (a key met before and an empty size are not entered). ``named`` is where BINPERSID ends.
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


@lru_cache(maxsize=1024)
def _layout(form: str) -> Struct:
    return Struct(form)


def _decode(raw: bytes, memo: list[Any]) -> list[Any]:
    """The values that GETs, numbers and constants leave on the stack, or that the tuple at their end takes from it.

    ``LookupError`` where a GET finds nothing, or a tuple takes more or fewer of them.
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
        elif code in _CONSTANTS:
            values.append(_CONSTANTS[code])
        elif _TUPLES.get(code, len(values)) != len(values):
            raise LookupError
    return values


class _Step:
    """The last two moulds that fitted, and the steps that came next, by the last part of the tensor's name."""

    __slots__ = ("following", "mould")

    def __init__(self, mould: _Mould | None) -> None:
        self.mould = mould
        self.following: dict[str, _Step] = {}


class TensorPattern:
    """Reads the calls of tensors in one run of a machine.

    Which mould will fit is guessed: layers repeat one another, so it is the one that came after the same two moulds,
    under a name with the same last part. A wrong guess costs a match of the regular expression.
    """

    def __init__(self, vm: Machine) -> None:
        self._data, self._size = vm.data, vm.size
        self._calls, self._persistent = vm.out.calls, vm.out.persistent
        self._moulds: dict[tuple[bytes | None, ...], _Mould] = {}
        self._steps: dict[tuple[_Mould | None, _Mould], _Step] = {}
        self._step = _Step(None)

    def read(self, pos: int, stack: list[Any], memo: list[Any]) -> int:
        """Read the call of a tensor from behind its first MARK on; where it ends, or 0 if it is no ordinary one.

        What is called, whatever it is, lies on top of the stack, and the call takes its place.
        """
        if not stack:
            return 0
        name = stack[-2] if len(stack) > 1 else ""
        name = name.rpartition(".")[2] if type(name) is str else ""
        step = self._step.following.get(name)
        if step is not None and (end := self._fill(step.mould, pos, stack, memo)):
            self._step = step
            return end
        mould = self._mould(pos, memo)
        end = self._fill(mould, pos, stack, memo) if mould is not None else 0
        if mould is not None and end:
            self._learn(mould, name)
        return end

    def _mould(self, pos: int, memo: list[Any]) -> _Mould | None:
        """The mould of what stands there, if it is the call of a tensor."""
        match = _CALL(self._data, pos)
        if match is None:
            return None
        head, length, text, _, again, tail, _, first, size, _, stride, _, last, _, _, _ = match.groups()
        if text and length[0] != len(text):
            return None
        pieces = (head, length, again, tail, first, size, stride, last)
        mould = self._moulds.get(pieces)
        if mould is None:
            if len(self._moulds) >= _MAX_MOULDS:
                self._moulds.clear()
            try:
                mould = self._moulds[pieces] = _Mould(match, memo)
            except LookupError:
                return None
        return mould

    def _learn(self, mould: _Mould, name: str) -> None:
        """Take the step that was not guessed, and remember it."""
        if len(self._steps) >= _MAX_MOULDS:
            self._steps.clear()
        key = (self._step.mould, mould)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(mould)
        if len(self._step.following) >= _MAX_FOLLOWING:
            self._step.following.clear()
        self._step.following[name] = step
        self._step = step

    def _fill(self, mould: Any, pos: int, stack: list[Any], memo: list[Any]) -> int:
        """Make the nodes of a call if the bytes fit the mould; where it ends, or 0."""
        layout, index = mould.layout, len(memo)
        end: int = pos + layout.size
        if end > self._size:
            return 0
        if mould.puts == 7:
            begin, text, p0, i0, p1, i1, p2, i2, p3, i3, p4, i4, p5, i5, p6, i6 = layout.unpack_from(self._data, pos)
            # Seven numbers that rise from the next index to the sixth after it are those between.
            if i0 != index or i6 != index + 6 or not i0 < i1 < i2 < i3 < i4 < i5 < i6:
                return 0
            pieces = (begin, p0, p1, p2, p3, p4, p5, p6)
        else:
            found = layout.unpack_from(self._data, pos)
            text, pieces = found[1], (found[0], *found[2::2])
            if found[3::2] != (*range(index, index + mould.puts),):
                return 0
        if pieces != mould.pieces or (text and not text.isdigit()):
            return 0
        kind, key, place, offset, shape, steps, flag, ordered = mould.values
        if text:
            key = text.decode()
        pid = (*kind, key, *place)
        storage = Persistent(pid, pos + mould.named)
        hooks = Call(ordered, (), "reduce", end - 17)
        size, stride = tuple(shape), tuple(steps)  # new ones: who walks the graph knows things by their identity
        args = (storage, offset, size, stride, flag, hooks)
        call = stack[-1] = Call(stack[-1], args, "reduce", end - 5)
        self._persistent.append(storage)
        self._calls += (hooks, call)
        entries = (key, pid, size, stride, hooks, args, call)
        memo += entries if mould.puts == 7 else compress(entries, mould.written)
        return end
