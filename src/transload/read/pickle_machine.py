"""A pickle machine that builds inert nodes: all 68 opcodes of protocols 0 to 5, nothing imported, called or compared.

Three loaders read checkpoints: CPython's C unpickler, its Python twin, and torch's ``weights_only`` unpickler. They
differ on malformed streams, and every scanner that followed only one of them was fooled through another. The rule here:
read on wherever any of the three would, so that every global any of them asks for is seen; note the difference as
*irregular*; stop only where all three stop. So what they import is always a subset of what ``run`` reports (tested
against all three).

Time and memory are linear in the bytes given: no length in the stream is believed before it is compared with what is
left, nothing is hashed that a file could make collide, and values are shared, never copied.
"""

from __future__ import annotations

import _codecs
import re
from collections.abc import Callable, Iterator
from struct import Struct
from struct import error as struct_error
from typing import Any

from transload.read.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set

__all__ = ["MAX_INT_BYTES", "MAX_STREAM", "opcodes", "run", "run_all"]

MAX_STREAM = 512 << 20
"""Larger pickles are not read: 20,000 tensors take 2 MB, so this is room for five million."""

MAX_INT_BYTES = 1024
"""Longer integers stay opaque: turning a megabyte of LONG4 into an ``int`` and printing it is quadratic work."""

MAX_TEXT_DIGITS = 4300
"""The same for integers written as text; CPython refuses more digits than this as well."""

MAX_GAP = 64
"""Writers number the memo without gaps. Beyond this many (and a quarter of all entries) indexes are hashed with a
secret: integers hash to themselves, so a file could choose them to make every lookup walk over all the others."""

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_F64 = Struct(">d").unpack_from

# What weights_only understands (torch/_weights_only_unpickler.py, 2.13): it refuses a stream with any other opcode.
_WEIGHTS_ONLY = frozenset(b"\x80.cR\x81baesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr")


class _Broken(Exception):  # noqa: N818 - a signal inside this module, never seen outside
    """All loaders stop here."""


class _Cut(_Broken):
    """The data ends here: with more of it, reading could go on."""


class _Sparse(dict[Any, Any]):
    """A memo whose indexes are far apart: kept by their bytes, which Python hashes with a secret."""

    def __init__(self, dense: dict[int, Any]) -> None:
        super().__init__()
        for index, value in dense.items():
            self[index] = value

    def __setitem__(self, index: int, value: object) -> None:
        super().__setitem__(_bytes_of(index), value)

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(_bytes_of(index))
        except KeyError:
            raise KeyError(index) from None


def _bytes_of(index: int) -> bytes:
    return index.to_bytes(index.bit_length() // 8 + 1, "little", signed=True)


class _Machine:
    """The state of one run. ``stack`` is the part above the last MARK, ``meta`` the parts below it, outermost first."""

    __slots__ = ("data", "frame_end", "frames", "given", "memo", "meta", "out", "pos", "size", "stack")

    def __init__(self, data: bytes, start: int, name: str) -> None:
        self.data = data
        self.size = len(data)
        self.pos = start
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.frame_end = 0
        self.frames: list[int] = []
        self.given: set[int] = set()
        self.out = Pickle(name, start)

    # -- reading arguments

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes, only if they are there."""
        end = self.pos + count
        if count < 0:
            raise _Broken(f"a length of {count} bytes")
        if end > self.size:
            raise _Cut(f"it needs {count} more bytes, {self.size - self.pos} are left")
        chunk = self.data[self.pos : end]
        self.pos = end
        return chunk

    def line(self) -> bytes:
        """Bytes up to the next newline.

        At the end of the data the Python unpicklers take what is there and cut its last byte; so do we, and note it.
        """
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            text = self.data[self.pos : -1] if self.pos < self.size else b""
            self.pos = self.size
            self.out.cut = True
            self.odd("a line without its end")
            return text
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def odd(self, text: str) -> None:
        """Loaders differ on this, or refuse it."""
        if len(self.out.irregular) < _MAX_IRREGULAR:
            self.out.irregular.append((self.pos, text))

    def ambiguous(self, text: str) -> None:
        """Loaders see different streams in the bytes from here on."""
        if len(self.out.ambiguous) < _MAX_IRREGULAR:
            self.out.ambiguous.append((self.pos, text))

    # -- building

    def remember(self, index: int, value: object) -> None:
        """Enter a value into the memo."""
        self.reach(index)
        self.memo[index] = value

    def reach(self, index: int) -> int:
        """Make room in the memo for an index; up to which others need not ask."""
        reach = len(self.memo) * 5 // 4 + MAX_GAP
        if index > reach and type(self.memo) is dict:
            self.memo = _Sparse(self.memo)
        return reach

    def find(self, module: str, name: str) -> Global:
        """The node of a global: one for each name."""
        node = self.out.globals.get((module, name))
        if node is None:
            node = self.out.globals[module, name] = Global(module, name, self.pos)
        else:
            node.count += 1
        return node

    def call(self, callee: object, args: object, kind: str) -> Call:
        """Record a call; nothing is called."""
        node = Call(callee, args, kind, self.pos)
        self.out.calls.append(node)
        return node

    def pop_mark(self) -> list[Any]:
        """Everything above the last MARK, which goes away."""
        items = self.stack
        self.stack = self.meta.pop()
        return items


_MAX_IRREGULAR = 100


def run(data: bytes, start: int = 0, name: str = "") -> Pickle:
    r"""Read one pickle from ``start`` to its STOP, or to where it breaks.

    >>> run(b"\x80\x02cos\ngetcwd\n)R.").calls
    [Call(Global(os.getcwd), reduce)]
    """
    vm = _Machine(data, start, name)
    out = vm.out
    try:
        _execute(vm)
    except _Broken as reason:
        out.broken = f"{reason} at byte {vm.pos}"
        out.cut |= type(reason) is _Cut
    except IndexError:
        out.cut = vm.pos >= vm.size
        out.broken = (
            f"it ends without STOP at byte {vm.size}" if out.cut else f"it takes from an empty stack at byte {vm.pos}"
        )
    except KeyError as error:
        out.broken = f"it reads memo entry {error.args[0]!r}, which was never written, at byte {vm.pos}"
    except struct_error:
        out.cut = True
        out.broken = f"it is cut off inside an argument at byte {vm.size}"
    except UnicodeDecodeError:
        out.broken = f"its text is not valid UTF-8 at byte {vm.pos}"
    out.end = vm.pos
    if vm.frames:
        _check_frames(vm)
    return out


def _check_frames(vm: _Machine) -> None:
    """A frame must end where an opcode ends."""
    crossed = {end for end in vm.frames if end < vm.out.end}
    for start, _ in opcodes(vm.data, vm.out.start):
        if start >= vm.out.end:
            break
        crossed.discard(start)
    vm.out.ambiguous.extend((end, "an opcode crosses the end of a frame") for end in sorted(crossed)[:_MAX_IRREGULAR])
    if not vm.out.broken and vm.frames[-1] > vm.out.end:
        vm.out.ambiguous.append((vm.out.end, "STOP comes before the end of its frame"))


def opcodes(data: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    r"""Position and code of each opcode of the pickle at ``start``, until STOP, the end of the data, or an unknown one.

    >>> [chr(code) for _, code in opcodes(b"K\x01q\x00.")]
    ['K', 'q', '.']
    """
    position, size = start, len(data)
    while position < size:
        code = data[position]
        yield position, code
        position += 1
        if code == 0x2E or (_HANDLERS[code] is None and code not in _HOT):
            return
        if code in _LINES:
            for _ in range(_LINES[code]):
                position = data.find(b"\n", position) + 1 or size
        else:
            width = _WIDTHS.get(code, 0)
            counted = int.from_bytes(data[position : position + width], "little") if code in _COUNTED else 0
            position += width + counted


# Arguments in the stream, for walking over it without running it: so many lines, or so many bytes, which for the
# counted opcodes are the length of what follows.
_LINES = {0x46: 1, 0x49: 1, 0x4C: 1, 0x50: 1, 0x53: 1, 0x56: 1, 0x63: 2, 0x67: 1, 0x69: 2, 0x70: 1}
_COUNTED = frozenset(b"BCTUX\x8a\x8b\x8c\x8d\x8e\x96")
_WIDTHS = {
    **dict.fromkeys(b"CU\x8a\x8cKhq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"BTX\x8bJjr\x84", 4),
    **dict.fromkeys(b"\x8d\x8e\x96\x95G", 8),
}
_HOT = frozenset(b"hqrK(tXRjQM\x86\x85\x89)J.")


def run_all(data: bytes, name: str = "", limit: int = 1000) -> list[Pickle]:
    """All pickles that follow one another from the start of ``data``, until one breaks or the data ends.

    Of those beyond ``limit`` only what they would do is kept, in the last one.
    """
    pickles: list[Pickle] = []
    position = 0
    while position < len(data):
        pickle = run(data, position, name)
        if len(pickles) < limit:
            pickles.append(pickle)
        else:
            _absorb(pickles[-1], pickle)
        if pickle.broken:
            break
        position = pickle.end
    return pickles


def _absorb(into: Pickle, pickle: Pickle) -> None:
    """Add one pickle to another: its names, calls and oddities, not its value."""
    into.end, into.broken, into.cut = pickle.end, pickle.broken, pickle.cut
    into.protocol = max(into.protocol, pickle.protocol)
    into.python2 |= pickle.python2
    into.undecoded += pickle.undecoded
    into.rare |= pickle.rare
    for key, node in pickle.globals.items():
        into.globals.setdefault(key, node)
    into.calls += pickle.calls
    into.built += pickle.built
    into.extensions += pickle.extensions
    into.persistent += pickle.persistent
    into.irregular += pickle.irregular[: _MAX_IRREGULAR - len(into.irregular)]
    into.ambiguous += pickle.ambiguous[: _MAX_IRREGULAR - len(into.ambiguous)]


def _execute(vm: _Machine) -> None:  # one loop, the opcodes by frequency: 0.2 µs each
    data, size, memo, meta = vm.data, vm.size, vm.memo, vm.meta
    calls, persistent = vm.out.calls, vm.out.persistent
    stack = vm.stack
    push = stack.append
    pos, reach = vm.pos, MAX_GAP
    try:
        while True:
            op = data[pos]
            pos += 1
            if op == 0x72:  # LONG_BINPUT
                index = _U32(data, pos)[0]
                if index > reach:
                    reach = vm.reach(index)
                    memo = vm.memo
                memo[index] = stack[-1]
                pos += 4
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif op == 0x28:  # MARK
                meta.append(stack)
                stack = []
                push = stack.append
            elif op == 0x74:  # TUPLE
                items = tuple(stack)
                stack = meta.pop()
                push = stack.append
                push(items)
                if data[pos] == 0x72 and (index := _U32(data, pos + 1)[0]) <= reach:  # as nearly always: LONG_BINPUT
                    memo[index] = items
                    pos += 5
            elif op == 0x58:  # BINUNICODE
                end = pos + 4 + _U32(data, pos)[0]
                if end > size:
                    raise _Cut(f"a text of {end - pos - 4} bytes is announced, {size - pos - 4} are left")
                text = data[pos + 4 : end].decode("utf-8", "surrogatepass")
                push(text)
                pos = end
                if data[pos] == 0x72 and (index := _U32(data, pos + 1)[0]) <= reach:  # as nearly always: LONG_BINPUT
                    memo[index] = text
                    pos += 5
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                callee = stack[-1]
                node = stack[-1] = Call(callee, args, "reduce", pos)
                calls.append(node)
                if type(args) is tuple and args and type(args[0]) is list:
                    vm.given.add(id(args[0]))  # the call keeps it alive, so nothing else gets its number
                if data[pos] == 0x72 and (index := _U32(data, pos + 1)[0]) <= reach:  # as nearly always: LONG_BINPUT
                    memo[index] = node
                    pos += 5
            elif op == 0x6A:  # LONG_BINGET
                push(memo[_U32(data, pos)[0]])
                pos += 4
            elif op == 0x51:  # BINPERSID
                pid = stack[-1] = Persistent(stack[-1], pos)
                persistent.append(pid)
            elif op == 0x4D:  # BININT2
                push(_U16(data, pos)[0])
                pos += 2
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                pair = stack[-1] = (stack[-1], last)
                if data[pos] == 0x72 and (index := _U32(data, pos + 1)[0]) <= reach:  # as nearly always: LONG_BINPUT
                    memo[index] = pair
                    pos += 5
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif op == 0x71:  # BINPUT
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == 0x4A:  # BININT
                push(_I32(data, pos)[0])
                pos += 4
            elif op == 0x2E:  # STOP
                vm.out.root = stack.pop()
                if stack or meta:
                    vm.pos = pos
                    vm.odd("values are left on the stack at STOP")
                break
            else:
                vm.pos, vm.stack = pos, stack
                handler = _HANDLERS[op]
                if handler is None:
                    raise _Broken(f"byte 0x{op:02x} is no pickle opcode")
                if op not in _WEIGHTS_ONLY:
                    vm.out.rare.add(handler.__name__.strip("_").upper())
                handler(vm)
                pos, stack, memo = vm.pos, vm.stack, vm.memo
                push = stack.append
    finally:
        vm.pos = max(vm.pos, pos)  # a handler that raised may have read further than the loop knows


# -- the rarer opcodes, one function each ------------------------------------------------------------------------------


def _proto(vm: _Machine) -> None:
    version = vm.take(1)[0]
    vm.out.protocol = max(vm.out.protocol, version)
    if version > 5:
        vm.odd(f"protocol {version} does not exist")


def _frame(vm: _Machine) -> None:
    # The C unpickler ignored frame borders until 2026, the Python one obeys them: the same bytes could load as a call
    # in one and as text in the other (python/cpython#154848). A writer never nests, overlaps or overruns frames.
    length = int.from_bytes(vm.take(8), "little")
    if vm.pos - 9 < vm.frame_end:
        vm.ambiguous("a frame begins inside a frame")
    if length > vm.size - vm.pos:
        vm.ambiguous("a frame is longer than the data")
    vm.frame_end = vm.pos + length
    vm.frames.append(vm.frame_end)


def _global(vm: _Machine) -> None:
    module, name = vm.line().decode(), vm.line().decode()
    vm.stack.append(vm.find(module, name))


def _stack_global(vm: _Machine) -> None:
    name, module = vm.stack.pop(), vm.stack.pop()
    if type(name) is str and type(module) is str:
        vm.stack.append(vm.find(module, name))
        return
    for operand in (module, name):
        # A call, a constant of some module or a persistent id can turn out to be text, and so can a Python 2 text
        # that is not UTF-8 (encoding="latin1"): then loaders read on, with a name that is not in the file.
        if type(operand) not in _MAYBE_TEXT and not (type(operand) is bytes and vm.out.python2):
            raise _Broken("STACK_GLOBAL wants two texts")
    vm.odd("a name that is computed")
    vm.stack.append(vm.call(None, (module, name), "stack_global"))


_MAYBE_TEXT = frozenset({str, Call, Extension, Global, Persistent})


def _inst(vm: _Machine) -> None:
    module, name = vm.line().decode("ascii"), vm.line().decode("ascii")
    callee = vm.find(module, name)  # the Python unpickler asks for it before it looks for the MARK
    args = tuple(vm.pop_mark())
    vm.stack.append(vm.call(callee, args, "inst"))


def _obj(vm: _Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(vm.call(items[0], tuple(items[1:]), "obj"))


def _newobj(vm: _Machine) -> None:
    args = vm.stack.pop()
    vm.stack[-1] = vm.call(vm.stack[-1], args, "newobj")


def _newobj_ex(vm: _Machine) -> None:
    kwargs, args = vm.stack.pop(), vm.stack.pop()
    node = vm.call(vm.stack[-1], args, "newobj_ex")
    node.kwargs = kwargs
    vm.stack[-1] = node


def _extension(width: int) -> Callable[[_Machine], None]:
    def ext(vm: _Machine) -> None:
        code = int.from_bytes(vm.take(width), "little", signed=width == 4)
        if code <= 0:
            raise _Broken(f"extension code {code} is not above zero")
        node = Extension(code)
        vm.out.extensions.append(node)
        vm.stack.append(node)

    return ext


def _build(vm: _Machine) -> None:
    state = vm.stack.pop()
    target = vm.stack[-1]
    if type(target) is Call:
        if target.states is None:
            target.states = []
        target.states.append(state)
    else:
        vm.out.built.append((target, state))


def _changed(vm: _Machine, target: object, items: list[Any], how: str) -> None:
    """Items put into something that was not made here: into a dictionary of some module it is BUILD by another name."""
    vm.odd(f"{how} {_kind(target)}")
    if type(target) is Global or type(target) is Extension:
        vm.out.built.append((target, items))


def _append(vm: _Machine) -> None:
    value = vm.stack.pop()
    _extend(vm, vm.stack[-1], [value])


def _appends(vm: _Machine) -> None:
    items = vm.pop_mark()
    _extend(vm, vm.stack[-1], items)


def _extend(vm: _Machine, target: object, items: list[Any]) -> None:
    if type(target) is list:
        if id(target) in vm.given:
            vm.odd("a list is changed after a call was given it")
        target.extend(items)
    elif type(target) is Call:
        if target.appended is None:
            target.appended = []
        target.appended.extend(items)
    else:
        _changed(vm, target, items, "values are appended to")


def _additems(vm: _Machine) -> None:
    items = vm.pop_mark()
    target = vm.stack[-1]
    if type(target) is Set and not target.frozen:
        target.items.extend(items)
    elif type(target) is Call:
        _extend(vm, target, items)
    else:
        _changed(vm, target, items, "members are added to")


def _setitem(vm: _Machine) -> None:
    value, key = vm.stack.pop(), vm.stack.pop()
    _update(vm, vm.stack[-1], [key, value])


def _setitems(vm: _Machine) -> None:
    items = vm.pop_mark()
    if len(items) % 2:
        vm.odd("a key without a value")
        items.pop()
    _update(vm, vm.stack[-1], items)


def _update(vm: _Machine, target: object, items: list[Any]) -> None:
    if type(target) is Dict:
        target.items.extend(items)
    elif type(target) is Call:
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:  # a list and a bytearray take SETITEM too, and torch up to 2.9 a tensor (CVE-2026-24747)
        _changed(vm, target, items, "keys are set on")
    for key in items[::2]:
        if type(key) is not str and _is_unhashable(key):
            vm.odd("a key that cannot be hashed")


def _is_unhashable(key: object) -> bool:
    """Whether a loader cannot use it as a key; of a tuple with many parts, only the first are looked at."""
    parts = [key]
    for part in parts:
        if type(part) in _UNHASHABLE or (type(part) is Set and not part.frozen):
            return True
        if type(part) is Call and type(part.callee) is Global and part.callee.name in _UNHASHABLE_CLASSES:
            return True
        if type(part) is tuple and len(parts) < _MAX_KEY_PARTS:
            parts += part[:_MAX_KEY_PARTS]
    return False


_MAX_KEY_PARTS = 16
_UNHASHABLE = frozenset({list, bytearray, Dict})
_UNHASHABLE_CLASSES = frozenset({"OrderedDict", "Counter", "set", "bytearray"})


def _kind(target: object) -> str:
    return "a global" if type(target) is Global else f"a {type(target).__name__.lower()}"


def _dict(vm: _Machine) -> None:
    items = vm.pop_mark()
    node = Dict([])
    vm.stack.append(node)
    if len(items) % 2:
        raise _Broken("a key without a value")
    _update(vm, node, items)


def _empty_dict(vm: _Machine) -> None:
    vm.stack.append(Dict([]))


def _empty_list(vm: _Machine) -> None:
    vm.stack.append([])


def _list(vm: _Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(items)


def _empty_set(vm: _Machine) -> None:
    vm.stack.append(Set([]))


def _frozenset(vm: _Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(Set(items, frozen=True))


def _tuple3(vm: _Machine) -> None:
    third, second = vm.stack.pop(), vm.stack.pop()
    vm.stack[-1] = (vm.stack[-1], second, third)


def _pop(vm: _Machine) -> None:
    if vm.stack:
        vm.stack.pop()
    else:
        vm.pop_mark()


def _pop_mark(vm: _Machine) -> None:
    vm.pop_mark()


def _dup(vm: _Machine) -> None:
    vm.stack.append(vm.stack[-1])


def _none(vm: _Machine) -> None:
    vm.stack.append(None)


def _newtrue(vm: _Machine) -> None:
    vm.stack.append(True)


def _memoize(vm: _Machine) -> None:
    vm.remember(len(vm.memo), vm.stack[-1])


def _put(vm: _Machine) -> None:
    index = _decimal(vm)
    if index < 0:
        raise _Broken("a negative memo index")
    vm.remember(index, vm.stack[-1])


def _get(vm: _Machine) -> None:
    vm.stack.append(vm.memo[_decimal(vm)])


def _c_text(vm: _Machine) -> bytes:
    """A line that holds a number. C reads it up to a NUL, and takes no digits before it for 0; blanks do not count."""
    text, nul, _ = vm.line().partition(b"\0")
    if nul:
        vm.odd("a number with a NUL in it")
    return text.strip() if text or not nul else b"0"


def _decimal(vm: _Machine) -> int:
    text = _c_text(vm)
    try:
        return int(text if len(text) - text.count(b"_") <= MAX_TEXT_DIGITS + 1 else b"")
    except ValueError:
        raise _Broken("a memo index that is no number") from None


def _int(vm: _Machine) -> None:
    text = _c_text(vm)
    special = {b"00": False, b"01": True}.get(text)
    vm.stack.append(_number(vm, text) if special is None else special)


def _long(vm: _Machine) -> None:
    vm.stack.append(_number(vm, _c_text(vm).removesuffix(b"L")))


def _number(vm: _Machine, text: bytes) -> int | Big:
    if len(text) > MAX_TEXT_DIGITS:
        vm.odd("an integer of thousands of digits")
        return Big(len(text))
    for base in (0, 8):  # C's strtol reads "010" as octal where Python refuses it
        try:
            value = int(text, base)
        except ValueError:
            continue
        if base:
            vm.odd("an octal integer")
        return value
    raise _Broken("an integer that is no number")


def _long1(vm: _Machine) -> None:
    vm.stack.append(_little(vm, vm.take(1)[0]))


def _long4(vm: _Machine) -> None:
    vm.stack.append(_little(vm, int.from_bytes(vm.take(4), "little", signed=True)))


def _little(vm: _Machine, count: int) -> int | Big:
    raw = vm.take(count)
    return int.from_bytes(raw, "little", signed=True) if count <= MAX_INT_BYTES else Big(count)


def _float(vm: _Machine) -> None:
    text = _c_text(vm)
    try:
        vm.stack.append(float(text))
    except ValueError:
        raise _Broken("a float that is no number") from None


def _binfloat(vm: _Machine) -> None:
    vm.stack.append(_F64(vm.take(8))[0])


def _python2_text(vm: _Machine, raw: bytes) -> None:
    """A ``str`` of Python 2: text for torch, which decodes it as UTF-8; bytes where that cannot be."""
    vm.out.python2 = True
    try:
        vm.stack.append(raw.decode())
    except UnicodeDecodeError:
        vm.out.undecoded += 1
        vm.stack.append(raw)


def _string(vm: _Machine) -> None:
    text = vm.line()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in b"'\"":
        raise _Broken("a text without quotes")
    _python2_text(vm, _ESCAPE.sub(_unescape, text[1:-1]))


# As codecs.escape_decode does it, which warns on unknown escapes: a warning may be an error somewhere.
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(x|$)|(.))", re.DOTALL)
_ESCAPES = dict(
    zip(b"\\'\"abfnrtv\n", (b"\\", b"'", b'"', b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v", b""), strict=True)
)


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, broken, letter = match.groups()
    if broken is not None:
        raise _Broken("a text with a broken escape")
    if letter is not None:
        return _ESCAPES.get(letter[0], b"\\" + letter)
    return bytes([int(octal, 8) & 255 if octal is not None else int(hexadecimal, 16)])


def _short_binstring(vm: _Machine) -> None:
    _python2_text(vm, vm.take(vm.take(1)[0]))


def _binstring(vm: _Machine) -> None:
    _python2_text(vm, vm.take(int.from_bytes(vm.take(4), "little", signed=True)))


def _unicode(vm: _Machine) -> None:
    vm.stack.append(_codecs.raw_unicode_escape_decode(vm.line())[0])


def _counted(width: int, convert: Callable[[bytes], object]) -> Callable[[_Machine], None]:
    def counted(vm: _Machine) -> None:
        vm.stack.append(convert(vm.take(int.from_bytes(vm.take(width), "little"))))

    return counted


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _persid(vm: _Machine) -> None:
    node = Persistent(vm.line().decode("ascii", "replace"), vm.pos)
    vm.out.persistent.append(node)
    vm.stack.append(node)


def _next_buffer(vm: _Machine) -> None:
    vm.odd("a buffer from outside the stream")
    vm.stack.append(OutOfBand())


def _readonly_buffer(vm: _Machine) -> None:
    if not vm.stack:
        raise IndexError


def _named(name: str, handler: Callable[[_Machine], None]) -> Callable[[_Machine], None]:
    handler.__name__ = name
    return handler


_RARE: dict[int, Callable[[_Machine], None]] = {
    0x30: _pop,
    0x31: _pop_mark,
    0x32: _dup,
    0x42: _named("binbytes", _counted(4, bytes)),
    0x43: _named("short_binbytes", _counted(1, bytes)),
    0x46: _float,
    0x47: _binfloat,
    0x49: _int,
    0x4C: _long,
    0x4E: _none,
    0x50: _persid,
    0x53: _string,
    0x54: _binstring,
    0x55: _short_binstring,
    0x56: _unicode,
    0x5D: _empty_list,
    0x61: _append,
    0x62: _build,
    0x63: _global,
    0x64: _dict,
    0x65: _appends,
    0x67: _get,
    0x69: _inst,
    0x6C: _list,
    0x6F: _obj,
    0x70: _put,
    0x73: _setitem,
    0x75: _setitems,
    0x7D: _empty_dict,
    0x80: _proto,
    0x81: _newobj,
    0x82: _named("ext1", _extension(1)),
    0x83: _named("ext2", _extension(2)),
    0x84: _named("ext4", _extension(4)),
    0x87: _tuple3,
    0x88: _newtrue,
    0x8A: _long1,
    0x8B: _long4,
    0x8C: _named("short_binunicode", _counted(1, _utf8)),
    0x8D: _named("binunicode8", _counted(8, _utf8)),
    0x8E: _named("binbytes8", _counted(8, bytes)),
    0x8F: _empty_set,
    0x90: _additems,
    0x91: _frozenset,
    0x92: _newobj_ex,
    0x93: _stack_global,
    0x94: _memoize,
    0x95: _frame,
    0x96: _named("bytearray8", _counted(8, bytearray)),
    0x97: _next_buffer,
    0x98: _readonly_buffer,
}

_HANDLERS: list[Callable[[_Machine], None] | None] = [_RARE.get(code) for code in range(256)]
