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

from collections.abc import Iterator
from struct import Struct
from struct import error as struct_error
from typing import Any

from transload.read.nodes import Call, Persistent, Pickle
from transload.read.pickle_opcodes import HANDLERS, MAX_INT_BYTES
from transload.read.pickle_state import MAX_IRREGULAR, Broken, Cut, Machine
from transload.read.tensor_pattern import TensorPattern

__all__ = ["MAX_INT_BYTES", "MAX_STREAM", "opcodes", "run", "run_all"]

MAX_STREAM = 512 << 20
"""Larger pickles are not read: 20,000 tensors take 2 MB, so this is room for five million."""

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from

# What weights_only understands (torch/_weights_only_unpickler.py, 2.13): it refuses a stream with any other opcode.
_WEIGHTS_ONLY = frozenset(b"\x80.cR\x81baesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr")


def run(data: bytes, start: int = 0, name: str = "") -> Pickle:
    r"""Read one pickle from ``start`` to its STOP, or to where it breaks.

    >>> run(b"\x80\x02cos\ngetcwd\n)R.").calls
    [Call(Global(os.getcwd), reduce)]
    """
    vm = Machine(data, start, name)
    out = vm.out
    try:
        _execute(vm)
    except Broken as reason:
        out.broken = f"{reason} at byte {vm.pos}"
        out.cut |= type(reason) is Cut
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


def _check_frames(vm: Machine) -> None:
    """A frame must end where an opcode ends."""
    crossed = {end for end in vm.frames if end < vm.out.end}
    for start, _ in opcodes(vm.data, vm.out.start):
        if start >= vm.out.end:
            break
        crossed.discard(start)
    vm.out.ambiguous.extend((end, "an opcode crosses the end of a frame") for end in sorted(crossed)[:MAX_IRREGULAR])
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
        if code == 0x2E or (HANDLERS[code] is None and code not in _HOT):
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
    into.irregular += pickle.irregular[: MAX_IRREGULAR - len(into.irregular)]
    into.ambiguous += pickle.ambiguous[: MAX_IRREGULAR - len(into.ambiguous)]


def _execute(vm: Machine) -> None:  # one loop, the opcodes by frequency: 0.2 µs each
    data, size, meta = vm.data, vm.size, vm.meta
    calls, persistent = vm.out.calls, vm.out.persistent
    memo: Any = vm.memo
    read_tensor = TensorPattern(vm).read
    stack = vm.stack
    push = stack.append
    pos = vm.pos
    put = 0  # the memo index that comes next, and -1 once there was a gap
    try:
        while True:
            op = data[pos]
            pos += 1
            if op == 0x58:  # BINUNICODE
                end = pos + 4 + _U32(data, pos)[0]
                if end > size:
                    raise Cut(f"a text of {end - pos - 4} bytes is announced, {size - pos - 4} are left")
                text = data[pos + 4 : end].decode("utf-8", "surrogatepass")
                push(text)
                pos = end
                if data[pos] == 0x72 and _U32(data, pos + 1)[0] == put:  # as nearly always: LONG_BINPUT
                    memo.append(text)
                    put += 1
                    pos += 5
            elif op in (0x68, 0x6A):  # BINGET, LONG_BINGET
                index = data[pos] if op == 0x68 else _U32(data, pos)[0]
                try:
                    push(memo[index])
                except IndexError:
                    raise KeyError(index) from None
                pos += 1 if op == 0x68 else 4
            elif op == 0x28:  # MARK
                if data[pos : pos + 1] == b"(" and put >= 0 and (end := read_tensor(pos, stack, memo)):
                    pos, put = end, len(memo)
                else:
                    meta.append(stack)
                    stack = []
                    push = stack.append
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op in (0x72, 0x71):  # LONG_BINPUT, BINPUT
                index = data[pos] if op == 0x71 else _U32(data, pos)[0]
                if index == put:
                    memo.append(stack[-1])
                    put += 1
                else:
                    vm.remember(index, stack[-1])
                    memo = vm.memo
                    put = len(memo) if type(memo) is list else -1
                pos += 1 if op == 0x71 else 4
            elif op == 0x74:  # TUPLE
                items = tuple(stack)
                stack = meta.pop()
                push = stack.append
                push(items)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                node = stack[-1] = Call(stack[-1], args, "reduce", pos)
                calls.append(node)
                if type(args) is tuple and args and type(args[0]) is list:
                    vm.given.add(id(args[0]))  # the call keeps it alive, so nothing else gets its number
            elif op == 0x51:  # BINPERSID
                pid = stack[-1] = Persistent(stack[-1], pos)
                persistent.append(pid)
            elif op == 0x4D:  # BININT2
                push(_U16(data, pos)[0])
                pos += 2
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
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
                handler = HANDLERS[op]
                if handler is None:
                    raise Broken(f"byte 0x{op:02x} is no pickle opcode")
                if op not in _WEIGHTS_ONLY:
                    vm.out.rare.add(handler.__name__.strip("_").upper())
                handler(vm)
                pos, stack, memo = vm.pos, vm.stack, vm.memo
                push = stack.append
                put = len(memo) if type(memo) is list else -1
    finally:
        vm.pos = max(vm.pos, pos)  # a handler that raised may have read further than the loop knows
