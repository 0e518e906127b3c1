"""The opcodes of pickle that torch.save does not write by default, and the arguments of all opcodes.

``run_opcode`` runs those of other protocols, and of Python 2, for the machine. ``opcodes`` walks a pickle without
running it; ``read_by_frames`` reads it like a loader that respects frames.
"""

from __future__ import annotations

import _codecs
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

from transload.formats.pickle_state import LONG_FRAME, Broken, PickleMachine
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Set

# Longer integers are not computed: making an ``int`` of a megabyte of LONG4 and printing it is quadratic work.
MAX_INT_BYTES = 1024
MAX_TEXT_DIGITS = 4300  # the same for integers written as text; CPython has the same limit
# The opcodes that weights_only accepts in torch 2.1 to 2.15 (torch/_weights_only_unpickler.py).
WEIGHTS_ONLY = frozenset(b"\x80.cR\x81baesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr")
# The other opcodes, with their names in pickletools.
_NAMES = """\
POP POP_MARK DUP BINBYTES SHORT_BINBYTES FLOAT INT LONG PERSID STRING BINSTRING UNICODE DICT GET INST LIST OBJ
PUT EXT1 EXT2 EXT4 LONG4 SHORT_BINUNICODE BINUNICODE8 BINBYTES8 ADDITEMS FROZENSET NEWOBJ_EX STACK_GLOBAL MEMOIZE FRAME
BYTEARRAY8 NEXT_BUFFER READONLY_BUFFER"""
REFUSED = dict(
    zip((*b"012BCFILPSTVdgilop\x82\x83\x84\x8b\x8c\x8d\x8e", *range(0x90, 0x99)), _NAMES.split(), strict=True)
)

# Arguments of opcodes: a number of lines, or of bytes, which for the counted opcodes are the length of what follows.
_LINES = {**dict.fromkeys(b"FILPSVgp", 1), **dict.fromkeys(b"ci", 2)}
_COUNTED = frozenset(b"BCTUX\x8a\x8b\x8c\x8d\x8e\x96")
_WIDTHS = {
    **dict.fromkeys(b"CU\x8a\x8cKhq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"BTX\x8bJjr\x84", 4),
    **dict.fromkeys(b"\x8d\x8e\x96\x95G", 8),
}
# The distance to the next opcode, where it is fixed.
_STEPS = {code: 1 + _WIDTHS.get(code, 0) for code in (WEIGHTS_ONLY | {*REFUSED}) - {*b".", *_LINES, *_COUNTED}}
# Opcodes that pop everything above the last MARK: POP_MARK, DICT, LIST, OBJ, ADDITEMS, FROZENSET.
_MARKED = frozenset(b"1dlo\x90\x91")
_MAYBE_TEXT = frozenset({str, Call, Extension, Global, Persistent})

# Like codecs.escape_decode, which warns about unknown escapes; warnings may be errors in the program.
_ESCAPE = rb"(?s)\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(x|$)|(.))"
_ESCAPES = dict(
    zip(b"\\'\"abfnrtv\n", (b"\\", b"'", b'"', b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v", b""), strict=True)
)


def opcodes(data: bytes, start: int = 0, raw: Iterable[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
    """Position and code of each opcode of the pickle at ``start``, until STOP, the end of the data, or an unknown one.

    ``raw`` are the starts and ends of bytes that are not opcodes.
    """
    for begin, end in raw:
        yield from takewhile(lambda opcode: opcode[0] < begin, opcodes(data, start))  # noqa: B023 - used up at once
        start = end
    position, size = start, len(data)
    while position < size:
        code = data[position]
        yield position, code
        step = _STEPS.get(code)
        if step is not None:
            position += step
        elif code in _LINES:
            position += 1
            for _ in range(_LINES[code]):
                position = data.find(b"\n", position) + 1 or size
        elif code in _COUNTED:
            end = position + 1 + _WIDTHS[code]
            position = end + int.from_bytes(data[position + 1 : end], "little")
        else:
            return


def read_by_frames(data: bytes, start: int) -> bytes:
    """The pickle at ``start`` without its frames, as CPython's C unpickler reads it from a file without ``peek``.

    It buffers a whole frame. An argument that is not completely in the buffer is read from after the frame, and the
    rest of the buffer is lost (python/cpython#154848). So ``cmac`` in a frame and ``os`` after it are the module
    ``os``, where a reader that ignores frames finds ``macos``.
    """
    out = bytearray()
    position = end = start  # end of the buffer

    def read(count: int) -> bytes:
        nonlocal position, end
        if position + count > end:
            position, end = end, end + count
        raw = data[position : position + count]
        position += count
        out.extend(raw)
        return raw

    while code := read(1):
        if code == b".":
            break
        op = code[0]
        if op == 0x95:  # FRAME
            length = int.from_bytes(read(8), "little")
            del out[-9:]
            if position + length > end:
                position, end = end, end + length
            if end > len(data):
                break  # it refuses an incomplete frame
        elif op in _LINES:
            for _ in range(_LINES[op]):
                stop = data.find(b"\n", position, end)
                if stop < 0:
                    position = end
                    stop = data.find(b"\n", position)
                    end = stop + 1 or len(data)
                read((stop + 1 or len(data)) - position)
        elif op in _COUNTED:
            length = int.from_bytes(read(_WIDTHS[op]), "little", signed=op in b"T\x8b")
            if not 0 <= length <= len(data):
                break
            if op in b"BC\x8e\x96":  # bytes are read from the buffer, then from after the frame
                end = max(end, position + length)
            read(length)
        elif op in _STEPS:
            read(_STEPS[op] - 1)
        else:
            break
    return bytes(out)


def run_opcode(vm: PickleMachine, op: int) -> None:
    """Run an opcode that the machine itself does not handle; the more frequent ones come first."""
    if op in REFUSED:
        vm.out.rare.setdefault(REFUSED[op], vm.pos - 1)
    items = vm.pop_mark() if op in _MARKED else []
    stack = vm.stack
    if op == 0x94:  # MEMOIZE
        vm.remember(len(vm.memo), stack[-1])
    elif op in _COUNTED:
        raw = vm.take(int.from_bytes(vm.take(_WIDTHS[op]), "little", signed=op in b"T\x8b"))
        if op in b"\x8c\x8d":  # SHORT_BINUNICODE, BINUNICODE8
            stack.append(raw.decode("utf-8", "surrogatepass"))
        elif op in b"TU":  # BINSTRING, SHORT_BINSTRING
            _python2_text(vm, raw)
        elif op == 0x8B:  # LONG4
            stack.append(int.from_bytes(raw, "little", signed=True) if len(raw) <= MAX_INT_BYTES else Big(len(raw)))
        else:  # BYTEARRAY8; BINBYTES, SHORT_BINBYTES, BINBYTES8
            stack.append(bytearray(raw) if op == 0x96 else raw)
    elif op == 0x95:  # FRAME
        # The C unpickler ignored the ends of frames until 2026, the Python one respects them: the same bytes could be a
        # call in one and text in the other (python/cpython#154848). A pickler never nests or overlaps frames.
        length = int.from_bytes(vm.take(8), "little")
        if vm.pos - 9 < vm.frame_end:
            vm.ambiguous("a frame begins inside a frame")
        if length > vm.size - vm.pos:
            vm.ambiguous(LONG_FRAME)
        if vm.frames and vm.frames[-1] == vm.pos - 9:  # the last one ends where an opcode does
            vm.frames.pop()
        vm.frame_end = vm.pos + length
        vm.frames.append(vm.frame_end)
    elif op == 0x93:  # STACK_GLOBAL
        name, module = stack.pop(), stack.pop()
        if type(name) is str and type(module) is str:
            stack.append(vm.find(module, name))
            return
        for operand in (module, name):
            # A call, a constant of a module or a persistent id can be text, and so can a Python 2 text that is not
            # UTF-8 (encoding="latin1"): then loaders continue with a name that is not in the file.
            if type(operand) not in _MAYBE_TEXT and not (type(operand) is bytes and vm.out.python2):
                raise Broken("STACK_GLOBAL needs two texts")
        vm.irregular("a name that is computed")
        stack.append(vm.call(None, (module, name), "stack_global"))
    elif op == 0x67:  # GET
        index = _memo_index(vm)
        if type(vm.memo) is list and not 0 <= index < len(vm.memo):
            raise KeyError(index)
        stack.append(vm.memo[index])
    elif op == 0x70:  # PUT
        index = _memo_index(vm)
        if index < 0:
            raise Broken("a negative memo index")
        vm.remember(index, stack[-1])
    elif op == 0x49:  # INT
        text = _c_text(vm)
        special = {b"00": False, b"01": True}.get(text)
        stack.append(_number(vm, text) if special is None else special)
    elif op == 0x4C:  # LONG
        stack.append(_number(vm, _c_text(vm).removesuffix(b"L")))
    elif op == 0x46:  # FLOAT
        text = _c_text(vm)
        try:
            stack.append(float(text))
        except ValueError:
            raise Broken("a float that is not a number") from None
    elif op == 0x53:  # STRING
        text = vm.line()
        if len(text) < 2 or text[0] != text[-1] or text[:1] not in b"'\"":
            raise Broken("a text without quotes")
        _python2_text(vm, re.sub(_ESCAPE, _unescape, text[1:-1]))
    elif op == 0x56:  # UNICODE
        stack.append(_codecs.raw_unicode_escape_decode(vm.line())[0])
    elif op == 0x50:  # PERSID
        node = Persistent(vm.line().decode("ascii", "replace"), vm.pos)
        vm.out.persistent.append(node)
        stack.append(node)
    elif op == 0x30:  # POP
        if stack:
            stack.pop()
        else:
            vm.pop_mark()
    elif op == 0x32:  # DUP
        stack.append(stack[-1])
    elif op == 0x64:  # DICT
        dictionary = Dict([])
        stack.append(dictionary)
        if len(items) % 2:
            raise Broken("a key without a value")
        vm.update(dictionary, items)
    elif op == 0x6C:  # LIST
        stack.append(items)
    elif op == 0x69:  # INST
        module, name = vm.line().decode("ascii"), vm.line().decode("ascii")
        callee = vm.find(module, name)  # the Python unpickler imports it before it looks for the MARK
        call = vm.call(callee, tuple(vm.pop_mark()), "inst")
        vm.stack.append(call)
    elif op == 0x6F:  # OBJ
        stack.append(vm.call(items[0], tuple(items[1:]), "obj"))
    elif op == 0x92:  # NEWOBJ_EX
        kwargs, args = stack.pop(), stack.pop()
        call = vm.call(stack[-1], args, "newobj_ex")
        call.kwargs = kwargs
        stack[-1] = call
    elif op == 0x91:  # FROZENSET
        stack.append(Set(items, frozen=True))
    elif op == 0x90:  # ADDITEMS
        target = stack[-1]
        if type(target) is Set and not target.frozen:
            target.items.extend(items)
        elif type(target) is Call:
            vm.extend(target, items)
        else:
            vm.changed(target, items, "members are added to")
    elif op in b"\x82\x83\x84":  # EXT1, EXT2, EXT4
        code = int.from_bytes(vm.take(_WIDTHS[op]), "little", signed=op == 0x84)
        if code <= 0:
            raise Broken(f"extension code {code} is not above zero")
        extension = Extension(code)
        vm.out.extensions.append(extension)
        stack.append(extension)
    elif op == 0x97:  # NEXT_BUFFER
        vm.irregular("a buffer from outside the stream")
        stack.append(OutOfBand())
    elif op == 0x98:  # READONLY_BUFFER
        if not stack:
            raise IndexError
    elif op != 0x31:  # POP_MARK is already done
        raise Broken(f"byte 0x{op:02x} is not a pickle opcode")


def _c_text(vm: PickleMachine) -> bytes:
    """A line with a number, stripped. C reads up to a NUL, and reads 0 if nothing is before it."""
    text, nul, _ = vm.line().partition(b"\0")
    if nul:
        vm.irregular("a number with a NUL in it")
    return text.strip() if text or not nul else b"0"


def _memo_index(vm: PickleMachine) -> int:
    text = _c_text(vm)
    try:
        return int(text if len(text) - text.count(b"_") <= MAX_TEXT_DIGITS + 1 else b"")
    except ValueError:
        raise Broken("a memo index that is not a number") from None


def _number(vm: PickleMachine, text: bytes) -> int | Big:
    if len(text) > MAX_TEXT_DIGITS:
        vm.irregular("an integer of thousands of digits")
        return Big(len(text))
    for base in (0, 8):  # C's strtol reads "010" as octal where Python refuses it
        try:
            value = int(text, base)
        except ValueError:
            continue
        if base:
            vm.irregular("an octal integer")
        # str() of a number written in hexadecimal digits can have more digits than Python prints.
        return value if value.bit_length() <= 8 * MAX_INT_BYTES else Big(len(text))
    raise Broken("an integer that is not a number")


def _python2_text(vm: PickleMachine, raw: bytes) -> None:
    """Push a ``str`` of Python 2: text if it is UTF-8, since torch decodes it as that; otherwise bytes."""
    vm.out.python2 = True
    try:
        text = raw.decode()
        vm.out.python2_texts.add(id(text))
        vm.stack.append(text)
    except UnicodeDecodeError:
        vm.out.undecoded += 1
        vm.stack.append(raw)


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, broken, letter = match.groups()
    if broken is not None:
        raise Broken("a text with a broken escape")
    if letter is not None:
        return _ESCAPES.get(letter[0], b"\\" + letter)
    return bytes([int(octal, 8) & 255 if octal is not None else int(hexadecimal, 16)])
