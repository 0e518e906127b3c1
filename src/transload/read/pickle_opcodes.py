"""The rarer opcodes of a pickle, one function each: what an opcode does to the state of a ``Machine``."""

from __future__ import annotations

import _codecs
import re
from collections.abc import Callable
from struct import Struct
from typing import Any

from transload.read.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Set
from transload.read.pickle_state import Broken, Machine

__all__ = ["HANDLERS", "MAX_INT_BYTES"]

MAX_INT_BYTES = 1024
"""Longer integers stay opaque: turning a megabyte of LONG4 into an ``int`` and printing it is quadratic work."""

MAX_TEXT_DIGITS = 4300
"""The same for integers written as text; CPython refuses more digits than this as well."""

_F64 = Struct(">d").unpack_from


def _proto(vm: Machine) -> None:
    version = vm.take(1)[0]
    vm.out.protocol = max(vm.out.protocol, version)
    if version > 5:
        vm.odd(f"protocol {version} does not exist")


def _frame(vm: Machine) -> None:
    # The C unpickler ignored frame borders until 2026, the Python one obeys them: the same bytes could load as a call
    # in one and as text in the other (python/cpython#154848). A writer never nests, overlaps or overruns frames.
    length = int.from_bytes(vm.take(8), "little")
    if vm.pos - 9 < vm.frame_end:
        vm.ambiguous("a frame begins inside a frame")
    if length > vm.size - vm.pos:
        vm.ambiguous("a frame is longer than the data")
    vm.frame_end = vm.pos + length
    vm.frames.append(vm.frame_end)


def _global(vm: Machine) -> None:
    module, name = vm.line().decode(), vm.line().decode()
    vm.stack.append(vm.find(module, name))


def _stack_global(vm: Machine) -> None:
    name, module = vm.stack.pop(), vm.stack.pop()
    if type(name) is str and type(module) is str:
        vm.stack.append(vm.find(module, name))
        return
    for operand in (module, name):
        # A call, a constant of some module or a persistent id can turn out to be text, and so can a Python 2 text
        # that is not UTF-8 (encoding="latin1"): then loaders read on, with a name that is not in the file.
        if type(operand) not in _MAYBE_TEXT and not (type(operand) is bytes and vm.out.python2):
            raise Broken("STACK_GLOBAL wants two texts")
    vm.odd("a name that is computed")
    vm.stack.append(vm.call(None, (module, name), "stack_global"))


_MAYBE_TEXT = frozenset({str, Call, Extension, Global, Persistent})


def _inst(vm: Machine) -> None:
    module, name = vm.line().decode("ascii"), vm.line().decode("ascii")
    callee = vm.find(module, name)  # the Python unpickler asks for it before it looks for the MARK
    args = tuple(vm.pop_mark())
    vm.stack.append(vm.call(callee, args, "inst"))


def _obj(vm: Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(vm.call(items[0], tuple(items[1:]), "obj"))


def _newobj(vm: Machine) -> None:
    args = vm.stack.pop()
    vm.stack[-1] = vm.call(vm.stack[-1], args, "newobj")


def _newobj_ex(vm: Machine) -> None:
    kwargs, args = vm.stack.pop(), vm.stack.pop()
    node = vm.call(vm.stack[-1], args, "newobj_ex")
    node.kwargs = kwargs
    vm.stack[-1] = node


def _extension(width: int) -> Callable[[Machine], None]:
    def ext(vm: Machine) -> None:
        code = int.from_bytes(vm.take(width), "little", signed=width == 4)
        if code <= 0:
            raise Broken(f"extension code {code} is not above zero")
        node = Extension(code)
        vm.out.extensions.append(node)
        vm.stack.append(node)

    return ext


def _build(vm: Machine) -> None:
    state = vm.stack.pop()
    target = vm.stack[-1]
    if type(target) is Call:
        if target.states is None:
            target.states = []
        target.states.append(state)
    else:
        vm.out.built.append((target, state))


def _changed(vm: Machine, target: object, items: list[Any], how: str) -> None:
    """Items put into something that was not made here: into a dictionary of some module it is BUILD by another name."""
    vm.odd(f"{how} {_kind(target)}")
    if type(target) is Global or type(target) is Extension:
        vm.out.built.append((target, items))


def _append(vm: Machine) -> None:
    value = vm.stack.pop()
    _extend(vm, vm.stack[-1], [value])


def _appends(vm: Machine) -> None:
    items = vm.pop_mark()
    _extend(vm, vm.stack[-1], items)


def _extend(vm: Machine, target: object, items: list[Any]) -> None:
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


def _additems(vm: Machine) -> None:
    items = vm.pop_mark()
    target = vm.stack[-1]
    if type(target) is Set and not target.frozen:
        target.items.extend(items)
    elif type(target) is Call:
        _extend(vm, target, items)
    else:
        _changed(vm, target, items, "members are added to")


def _setitem(vm: Machine) -> None:
    value, key = vm.stack.pop(), vm.stack.pop()
    _update(vm, vm.stack[-1], [key, value])


def _setitems(vm: Machine) -> None:
    items = vm.pop_mark()
    if len(items) % 2:
        vm.odd("a key without a value")
        items.pop()
    _update(vm, vm.stack[-1], items)


def _update(vm: Machine, target: object, items: list[Any]) -> None:
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


def _dict(vm: Machine) -> None:
    items = vm.pop_mark()
    node = Dict([])
    vm.stack.append(node)
    if len(items) % 2:
        raise Broken("a key without a value")
    _update(vm, node, items)


def _empty_dict(vm: Machine) -> None:
    vm.stack.append(Dict([]))


def _empty_list(vm: Machine) -> None:
    vm.stack.append([])


def _list(vm: Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(items)


def _empty_set(vm: Machine) -> None:
    vm.stack.append(Set([]))


def _frozenset(vm: Machine) -> None:
    items = vm.pop_mark()
    vm.stack.append(Set(items, frozen=True))


def _tuple3(vm: Machine) -> None:
    third, second = vm.stack.pop(), vm.stack.pop()
    vm.stack[-1] = (vm.stack[-1], second, third)


def _pop(vm: Machine) -> None:
    if vm.stack:
        vm.stack.pop()
    else:
        vm.pop_mark()


def _pop_mark(vm: Machine) -> None:
    vm.pop_mark()


def _dup(vm: Machine) -> None:
    vm.stack.append(vm.stack[-1])


def _none(vm: Machine) -> None:
    vm.stack.append(None)


def _newtrue(vm: Machine) -> None:
    vm.stack.append(True)


def _memoize(vm: Machine) -> None:
    vm.remember(len(vm.memo), vm.stack[-1])


def _put(vm: Machine) -> None:
    index = _decimal(vm)
    if index < 0:
        raise Broken("a negative memo index")
    vm.remember(index, vm.stack[-1])


def _get(vm: Machine) -> None:
    vm.stack.append(vm.recall(_decimal(vm)))


def _c_text(vm: Machine) -> bytes:
    """A line that holds a number. C reads it up to a NUL, and takes no digits before it for 0; blanks do not count."""
    text, nul, _ = vm.line().partition(b"\0")
    if nul:
        vm.odd("a number with a NUL in it")
    return text.strip() if text or not nul else b"0"


def _decimal(vm: Machine) -> int:
    text = _c_text(vm)
    try:
        return int(text if len(text) - text.count(b"_") <= MAX_TEXT_DIGITS + 1 else b"")
    except ValueError:
        raise Broken("a memo index that is no number") from None


def _int(vm: Machine) -> None:
    text = _c_text(vm)
    special = {b"00": False, b"01": True}.get(text)
    vm.stack.append(_number(vm, text) if special is None else special)


def _long(vm: Machine) -> None:
    vm.stack.append(_number(vm, _c_text(vm).removesuffix(b"L")))


def _number(vm: Machine, text: bytes) -> int | Big:
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
    raise Broken("an integer that is no number")


def _long1(vm: Machine) -> None:
    vm.stack.append(_little(vm, vm.take(1)[0]))


def _long4(vm: Machine) -> None:
    vm.stack.append(_little(vm, int.from_bytes(vm.take(4), "little", signed=True)))


def _little(vm: Machine, count: int) -> int | Big:
    raw = vm.take(count)
    return int.from_bytes(raw, "little", signed=True) if count <= MAX_INT_BYTES else Big(count)


def _float(vm: Machine) -> None:
    text = _c_text(vm)
    try:
        vm.stack.append(float(text))
    except ValueError:
        raise Broken("a float that is no number") from None


def _binfloat(vm: Machine) -> None:
    vm.stack.append(_F64(vm.take(8))[0])


def _python2_text(vm: Machine, raw: bytes) -> None:
    """A ``str`` of Python 2: text for torch, which decodes it as UTF-8; bytes where that cannot be."""
    vm.out.python2 = True
    try:
        vm.stack.append(raw.decode())
    except UnicodeDecodeError:
        vm.out.undecoded += 1
        vm.stack.append(raw)


def _string(vm: Machine) -> None:
    text = vm.line()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in b"'\"":
        raise Broken("a text without quotes")
    _python2_text(vm, _ESCAPE.sub(_unescape, text[1:-1]))


# As codecs.escape_decode does it, which warns on unknown escapes: a warning may be an error somewhere.
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(x|$)|(.))", re.DOTALL)
_ESCAPES = dict(
    zip(b"\\'\"abfnrtv\n", (b"\\", b"'", b'"', b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v", b""), strict=True)
)


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, broken, letter = match.groups()
    if broken is not None:
        raise Broken("a text with a broken escape")
    if letter is not None:
        return _ESCAPES.get(letter[0], b"\\" + letter)
    return bytes([int(octal, 8) & 255 if octal is not None else int(hexadecimal, 16)])


def _short_binstring(vm: Machine) -> None:
    _python2_text(vm, vm.take(vm.take(1)[0]))


def _binstring(vm: Machine) -> None:
    _python2_text(vm, vm.take(int.from_bytes(vm.take(4), "little", signed=True)))


def _unicode(vm: Machine) -> None:
    vm.stack.append(_codecs.raw_unicode_escape_decode(vm.line())[0])


def _counted(width: int, convert: Callable[[bytes], object]) -> Callable[[Machine], None]:
    def counted(vm: Machine) -> None:
        vm.stack.append(convert(vm.take(int.from_bytes(vm.take(width), "little"))))

    return counted


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _persid(vm: Machine) -> None:
    node = Persistent(vm.line().decode("ascii", "replace"), vm.pos)
    vm.out.persistent.append(node)
    vm.stack.append(node)


def _next_buffer(vm: Machine) -> None:
    vm.odd("a buffer from outside the stream")
    vm.stack.append(OutOfBand())


def _readonly_buffer(vm: Machine) -> None:
    if not vm.stack:
        raise IndexError


def _named(name: str, handler: Callable[[Machine], None]) -> Callable[[Machine], None]:
    handler.__name__ = name
    return handler


_RARE: dict[int, Callable[[Machine], None]] = {
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

HANDLERS: list[Callable[[Machine], None] | None] = [_RARE.get(code) for code in range(256)]
