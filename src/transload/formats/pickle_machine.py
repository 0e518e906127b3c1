"""Runs a pickle without importing or calling anything: a graph of inert nodes, and what a loader would import and call.

``run`` reads one pickle, ``run_all`` those that follow one another, ``opcodes`` walks over one without running it.
``run_at`` reads one of unknown length from a source. ``_execute`` is the loop over the frequent opcodes, ``_rare`` runs
the others. ``TensorPattern`` reads the call that rebuilds an ordinary tensor in one step, by comparing its bytes with a
template.
"""

from __future__ import annotations

import _codecs
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import compress, takewhile
from struct import Struct
from struct import error as struct_error
from typing import Any, Protocol

from transload.io.sources import Source
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set

MAX_GAP = 64
"""Writers number the memo without gaps. Beyond this many (and a quarter of all entries) indexes are hashed with a
secret: integers hash to themselves, so a file could choose them to make every lookup walk over all the others."""

MAX_IRREGULAR = 100

LOADER = ("torch.storage", "_load_from_bytes")
"""What ``pickle.dump`` calls for the storage of each tensor: a checkpoint inside the pickle, as bytes."""

_NOBODY = object()
_LONG_FRAME = "a frame is longer than the data"


class Broken(Exception):  # noqa: N818 - a signal inside the machine, never seen outside
    """All loaders stop here."""


class Cut(Broken):
    """The data ends here: with more of it, reading could go on."""


class Sparse(dict[Any, Any]):
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


class Machine:
    """The state of one run. ``stack`` is the part above the last MARK, ``meta`` the parts below it, outermost first.

    ``memo`` is a list while each entry is written once and in order, as all writers but Python 2's number them; then a
    dictionary. ``loader`` is the global ``LOADER`` once it was met, if ``held`` reads what it is given.
    """

    def __init__(self, data: bytes, start: int, name: str) -> None:
        self.data = data
        self.size = len(data)
        self.pos = start
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.memo: list[Any] | dict[int, Any] = []
        self.frame_end = 0
        self.frames: list[int] = []
        self.given: set[int] = set()
        self.held: Held | None = None
        self.loader: object = _NOBODY
        self.out = Pickle(name, start)

    # -- reading arguments

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes, only if they are there."""
        end = self.pos + count
        if count < 0:
            raise Broken(f"a length of {count} bytes")
        if end > self.size:
            raise Cut(f"it needs {count} more bytes, {self.size - self.pos} are left")
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
        if len(self.out.irregular) < MAX_IRREGULAR:
            self.out.irregular.append((self.pos, text))

    def ambiguous(self, text: str) -> None:
        """Loaders see different streams in the bytes from here on."""
        if len(self.out.ambiguous) < MAX_IRREGULAR:
            self.out.ambiguous.append((self.pos, text))

    # -- the memo

    def remember(self, index: int, value: object) -> None:
        """Enter a value into the memo, which becomes another one where the index is not the next."""
        memo = self.memo
        if type(memo) is list:
            if index == len(memo):
                memo.append(value)
                return
            memo = self.memo = dict(enumerate(memo))
        if type(memo) is dict and index > len(memo) * 5 // 4 + MAX_GAP:
            memo = self.memo = Sparse(memo)
        memo[index] = value

    # -- building

    def find(self, module: str, name: str) -> Global:
        """The node of a global: one for each name."""
        node = self.out.globals.get((module, name))
        if node is None:
            node = self.out.globals[module, name] = Global(module, name, self.pos)
            if self.held is not None and (module, name) == LOADER:
                self.loader = node
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


class Held(Protocol):
    """Reads what a plain pickle holds beside its opcodes. Both give ``None`` for anything else."""

    def storage(self, args: Any, end: int) -> Persistent | None:
        """The storage in the arguments of a call of ``LOADER``, which ends there."""

    def array(self, made: Call) -> Any:
        """What joblib makes of an object that was given its state: an array, whose bytes follow and are passed over."""


_GET = rb"(?:h.|j....)"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J....)"  # BININT1, BININT2, BININT
_PUT = rb"r(....)"  # LONG_BINPUT: all but the first thirty tensors
_SIZE = rb"(" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"+t)"  # TUPLE1 to TUPLE3; or MARK and TUPLE
_CALL = (
    # MARK, the id of the storage: its key is BINUNICODE, or GET where it was met before; TUPLE, BINPERSID
    rb"\((" + _GET + _GET + rb")(?:X(.)\0\0\0([0-9]+)" + _PUT + rb"|(" + _GET + rb"))(" + _GET + _INT + rb"N?)t" + _PUT
    + rb"Q(" + _INT + rb")(?:\)\)|" + _SIZE + _PUT + _SIZE + _PUT + rb")"  # offset; size and stride, or EMPTY_TUPLEs
    + rb"([\x88\x89]" + _GET + rb")\)R" + _PUT  # whether it requires gradients; its hooks, an empty OrderedDict
    + rb"t" + _PUT + rb"R" + _PUT
)  # fmt: skip


@cache
def _call_pattern() -> re.Pattern[bytes]:
    return re.compile(_CALL, re.DOTALL)  # takes as long as reading many a small file, which needs none


_TEXT, _AGAIN, _OFFSET = 3, 5, 8
_PUTS = (4, 7, 10, 12, 14, 15, 16)

_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_NUMBERS = {0x4A: Struct("<i"), 0x4B: Struct("<B"), 0x4D: Struct("<H")}
_GETS = {0x68: Struct("<B"), 0x6A: Struct("<I")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}

_MAX_TEMPLATES = 4096


class _Template:
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


_layout = lru_cache(maxsize=1024)(Struct)


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


class TensorPattern:
    """Reads the calls of tensors in one run of a machine.

    Which template will fit is guessed: layers repeat one another, so it is the one that came after the same template,
    under a name with the same end. A wrong guess costs a match of the regular expression.
    """

    def __init__(self, vm: Machine) -> None:
        self._data, self._size = vm.data, vm.size
        self._calls, self._persistent = vm.out.calls, vm.out.persistent
        self._templates: dict[tuple[bytes | None, ...], _Template] = {}
        self._guesses: dict[tuple[_Template | None, str], _Template] = {}
        self._last: _Template | None = None

    def read(self, pos: int, stack: list[Any], memo: list[Any]) -> int:
        """Read the call of a tensor from behind its first MARK on; where it ends, or 0 if it is no ordinary one.

        What is called, whatever it is, lies on top of the stack, and the call takes its place.
        """
        if not stack:
            return 0
        name = stack[-2] if len(stack) > 1 else ""
        guess = (self._last, name.rpartition(".")[2] if type(name) is str else "")
        template = self._guesses.get(guess)
        if template is not None and (end := self._fill(template, pos, stack, memo)):
            self._last = template
            return end
        match = _call_pattern().match(self._data, pos)
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
        """Make the nodes of a call if the bytes fit the template; where it ends, or 0."""
        layout, index = template.layout, len(memo)
        end = pos + layout.size
        if end > self._size:
            return 0
        if template.puts == 7:
            begin, text, p0, i0, p1, i1, p2, i2, p3, i3, p4, i4, p5, i5, p6, i6 = layout.unpack_from(self._data, pos)
            # Seven numbers that rise from the next index to the sixth after it are those between.
            if i0 != index or i6 != index + 6 or not i0 < i1 < i2 < i3 < i4 < i5 < i6:
                return 0
            pieces: tuple[bytes, ...] = (begin, p0, p1, p2, p3, p4, p5, p6)
        else:
            found = layout.unpack_from(self._data, pos)
            text, pieces = found[1], (found[0], *found[2::2])
            if found[3::2] != (*range(index, index + template.puts),):
                return 0
        if pieces != template.pieces or (text and not text.isdigit()):
            return 0
        kind, key, place, offset, shape, steps, flag, ordered = template.values
        if text:
            key = text.decode()
        pid = (*kind, key, *place)
        storage = Persistent(pid, pos + template.named)
        hooks = Call(ordered, (), "reduce", end - 17)
        size, stride = tuple(shape), tuple(steps)  # new ones: who walks the graph knows things by their identity
        args = (storage, offset, size, stride, flag, hooks)
        call = stack[-1] = Call(stack[-1], args, "reduce", end - 5)
        self._persistent.append(storage)
        self._calls += (hooks, call)
        entries = (key, pid, size, stride, hooks, args, call)
        memo += entries if template.puts == 7 else compress(entries, template.written)
        return end


MAX_INT_BYTES = 1024
"""Longer integers stay opaque: turning a megabyte of LONG4 into an ``int`` and printing it is quadratic work."""

MAX_TEXT_DIGITS = 4300
"""The same for integers written as text; CPython refuses more digits than this as well."""

MAX_STREAM = 512 << 20
"""Larger pickles are not read: 20,000 tensors take 2 MB, so this is room for five million."""

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_F64 = Struct(">d").unpack_from

# What weights_only understands (torch/_weights_only_unpickler.py, 2.13): it refuses a stream with any other opcode.
_WEIGHTS_ONLY = frozenset(b"\x80.cR\x81baesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr")
# The others, with the names that pickletools gives them.
_NAMES = """\
POP POP_MARK DUP BINBYTES SHORT_BINBYTES FLOAT INT LONG PERSID STRING BINSTRING UNICODE DICT GET INST LIST OBJ
PUT EXT1 EXT2 EXT4 LONG4 SHORT_BINUNICODE BINUNICODE8 BINBYTES8 ADDITEMS FROZENSET NEWOBJ_EX STACK_GLOBAL MEMOIZE FRAME
BYTEARRAY8 NEXT_BUFFER READONLY_BUFFER"""
_REFUSED = dict(
    zip((*b"012BCFILPSTVdgilop\x82\x83\x84\x8b\x8c\x8d\x8e", *range(0x90, 0x99)), _NAMES.split(), strict=True)
)

# Arguments in the stream: so many lines, or so many bytes, which for the counted opcodes are the length of the rest.
_LINES = {**dict.fromkeys(b"FILPSVgp", 1), **dict.fromkeys(b"ci", 2)}
_COUNTED = frozenset(b"BCTUX\x8a\x8b\x8c\x8d\x8e\x96")
_WIDTHS = {
    **dict.fromkeys(b"CU\x8a\x8cKhq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"BTX\x8bJjr\x84", 4),
    **dict.fromkeys(b"\x8d\x8e\x96\x95G", 8),
}
_STEPS = {code: 1 + _WIDTHS.get(code, 0) for code in (_WEIGHTS_ONLY | {*_REFUSED}) - {*b".", *_LINES, *_COUNTED}}
"""From an opcode to the next one, where that is always as far."""

_MARKED = frozenset(b"1uedlo\x90\x91")
"""Opcodes that take what is above the last MARK: POP_MARK, SETITEMS, APPENDS, DICT, LIST, OBJ, ADDITEMS, FROZENSET."""

_MAYBE_TEXT = frozenset({str, Call, Extension, Global, Persistent})
_MAX_KEY_PARTS = 16
_UNHASHABLE = frozenset({list, bytearray, Dict})
_UNHASHABLE_CLASSES = frozenset({"OrderedDict", "Counter", "set", "bytearray"})

# As codecs.escape_decode does it, which warns on unknown escapes: a warning may be an error somewhere.
_ESCAPE = rb"(?s)\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(x|$)|(.))"
_ESCAPES = dict(
    zip(b"\\'\"abfnrtv\n", (b"\\", b"'", b'"', b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v", b""), strict=True)
)


def run(data: bytes, start: int = 0, name: str = "", reader: Callable[[Machine], Held] | None = None) -> Pickle:
    r"""Read one pickle from ``start`` to its STOP, or to where it breaks.

    Where a ``reader`` finds a storage in what ``LOADER`` is given, the storage stands in the place of the call.

    >>> run(b"\x80\x02cos\ngetcwd\n)R.").calls
    [Call(Global(os.getcwd), reduce)]
    """
    vm = Machine(data, start, name)
    out = vm.out
    vm.held = reader(vm) if reader is not None else None
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
    if out.cut and reader is not None and [text for _, text in out.ambiguous] == [_LONG_FRAME]:
        out.ambiguous.clear()  # the rest of the frame is missing: some loaders fail at its head, the others at its end
        vm.frames.pop()
    if vm.frames:  # a frame must end where an opcode ends
        crossed = {end for end in vm.frames if end < out.end} - {begin for begin, _ in out.raw}
        for position, _ in opcodes(data, start, out.raw):
            if position >= out.end:
                break
            crossed.discard(position)
        out.ambiguous.extend((end, "an opcode crosses the end of a frame") for end in sorted(crossed)[:MAX_IRREGULAR])
        if not out.broken and vm.frames[-1] > out.end:
            out.ambiguous.append((out.end, "STOP comes before the end of its frame"))
        if out.ambiguous:  # both readings of it count
            add_uses(out, run(_read_by_frames(data, start), name=name))
    return out


def run_part(vm: Machine, data: bytes) -> bool:
    """Run the opcodes of a part of a pickle on the stack and memo of a machine; whether they end where the part does.

    If they do not, the stack is in no particular state.
    """
    vm.data = data + b"\xff"  # not an opcode: the machine stops there
    vm.size, vm.pos = len(vm.data), 0
    try:
        _execute(vm)
    except Broken:
        return vm.pos == vm.size
    except (IndexError, KeyError, UnicodeDecodeError, struct_error):
        return False
    return False


def add_uses(into: Pickle, other: Pickle) -> None:
    """Add what another pickle would import, call and change."""
    for key, node in other.globals.items():
        into.globals.setdefault(key, node)
    into.calls += other.calls
    into.built += other.built
    into.extensions += other.extensions


def _read_by_frames(data: bytes, start: int) -> bytes:
    """The pickle at ``start`` without its frames, as CPython's C unpickler reads it from a file that cannot peek.

    It keeps a whole frame in its buffer. For an argument that does not lie in there whole it reads anew from behind the
    frame, and what was left in the buffer is lost (python/cpython#154848). So ``cmac`` in a frame and ``os`` behind it
    are the module ``os``, where a reader that does not heed frames finds ``macos``.
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
                break  # which it does not begin to read
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
            if op in b"BC\x8e\x96":  # bytes are put together from both places
                end = max(end, position + length)
            read(length)
        elif op in _STEPS:
            read(_STEPS[op] - 1)
        else:
            break
    return bytes(out)


def run_at(
    source: Source,
    offset: int,
    name: str,
    window: int = 1 << 20,
    most: int = MAX_STREAM,
    reader: Callable[[Machine], Held] | None = None,
) -> tuple[Pickle, int]:
    """Run the pickle at an offset without knowing its length; the pickle, and where it ends in the source.

    The window grows until the pickle fits, so a pickle costs twice its size at most, and never the size of the file;
    nor more than ``most``, where it may be none at all.
    """
    while True:
        data = source.read(offset, min(window, most))
        pickle = run(data, name=name, reader=reader)
        if not pickle.cut or len(data) < window or window >= most:
            return pickle, offset + pickle.end
        window *= 4


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
            # Add one pickle to another: its names, calls and oddities, not its value.
            into = pickles[-1]
            into.end, into.broken, into.cut = pickle.end, pickle.broken, pickle.cut
            into.protocol = max(into.protocol, pickle.protocol)
            into.python2 |= pickle.python2
            into.python2_texts |= pickle.python2_texts
            into.undecoded += pickle.undecoded
            into.rare |= pickle.rare
            add_uses(into, pickle)
            into.persistent += pickle.persistent
            into.irregular += pickle.irregular[: MAX_IRREGULAR - len(into.irregular)]
            into.ambiguous += pickle.ambiguous[: MAX_IRREGULAR - len(into.ambiguous)]
        if pickle.broken:
            break
        position = pickle.end
    return pickles


def opcodes(data: bytes, start: int = 0, raw: Iterable[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
    r"""Position and code of each opcode of the pickle at ``start``, until STOP, the end of the data, or an unknown one.

    ``raw`` are where bytes that are no opcodes begin and end.

    >>> [chr(code) for _, code in opcodes(b"K\x01q\x00.")]
    ['K', 'q', '.']
    """
    for begin, end in raw:
        yield from takewhile(lambda each: each[0] < begin, opcodes(data, start))  # noqa: B023 - used up at once
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


def _execute(vm: Machine) -> None:  # one loop, the opcodes by frequency: 0.2 µs each
    data, size, meta = vm.data, vm.size, vm.meta
    calls, persistent = vm.out.calls, vm.out.persistent
    memo: Any = vm.memo
    read_tensor = TensorPattern(vm).read
    stack = vm.stack
    push = stack.append
    pos = vm.pos
    loader = vm.loader
    put = len(memo) if type(memo) is list else -1  # the memo index that comes next, and -1 once there was a gap
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
                # Below 256 no pickler writes LONG_BINPUT, which all of the pattern is.
                if data[pos : pos + 1] == b"(" and put > 0xFF and (end := read_tensor(pos, stack, memo)):
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
                if stack[-1] is loader and vm.held is not None and (held := vm.held.storage(args, pos)) is not None:
                    stack[-1] = held
                    continue
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
                _rare(vm, op)
                pos, stack, memo, loader = vm.pos, vm.stack, vm.memo, vm.loader
                push = stack.append
                put = len(memo) if type(memo) is list else -1
    finally:
        vm.pos = max(vm.pos, pos)  # a handler that raised may have read further than the loop knows


def _rare(vm: Machine, op: int) -> None:
    """Run an opcode that ``_execute`` does not: the more frequent ones first."""
    if op in _REFUSED:
        vm.out.rare.add(_REFUSED[op])
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
        elif op in b"\x8a\x8b":  # LONG1, LONG4
            stack.append(int.from_bytes(raw, "little", signed=True) if len(raw) <= MAX_INT_BYTES else Big(len(raw)))
        else:  # BYTEARRAY8; BINBYTES, SHORT_BINBYTES, BINBYTES8
            stack.append(bytearray(raw) if op == 0x96 else raw)
    elif op in _CONSTANTS:
        stack.append(_CONSTANTS[op])
    elif op == 0x87:  # TUPLE3
        third, second = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], second, third)
    elif op == 0x47:  # BINFLOAT
        stack.append(_F64(vm.take(8))[0])
    elif op == 0x7D:  # EMPTY_DICT
        stack.append(Dict([]))
    elif op == 0x5D:  # EMPTY_LIST
        stack.append([])
    elif op == 0x75:  # SETITEMS
        if len(items) % 2:
            vm.odd("a key without a value")
            items.pop()
        _update(vm, stack[-1], items)
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        _update(vm, stack[-1], [key, value])
    elif op == 0x65:  # APPENDS
        _extend(vm, stack[-1], items)
    elif op == 0x61:  # APPEND
        value = stack.pop()
        _extend(vm, stack[-1], [value])
    elif op == 0x63:  # GLOBAL
        module, name = vm.line().decode(), vm.line().decode()
        stack.append(vm.find(module, name))
    elif op == 0x81:  # NEWOBJ
        args = stack.pop()
        stack[-1] = vm.call(stack[-1], args, "newobj")
    elif op == 0x62:  # BUILD
        state = stack.pop()
        target = stack[-1]
        if type(target) is Call:
            if target.states is None:
                target.states = []
            target.states.append(state)
            if vm.held is not None and (array := vm.held.array(target)) is not None:
                stack[-1] = array
        else:
            vm.out.built.append((target, state))
    elif op == 0x80:  # PROTO
        version = vm.take(1)[0]
        vm.out.protocol = max(vm.out.protocol, version)
        if version > 5:
            vm.odd(f"protocol {version} does not exist")
    elif op == 0x95:  # FRAME
        # The C unpickler ignored frame borders until 2026, the Python one obeys them: the same bytes could load as a
        # call in one and as text in the other (python/cpython#154848). A writer never nests, overlaps or overruns
        # frames.
        length = int.from_bytes(vm.take(8), "little")
        if vm.pos - 9 < vm.frame_end:
            vm.ambiguous("a frame begins inside a frame")
        if length > vm.size - vm.pos:
            vm.ambiguous(_LONG_FRAME)
        vm.frame_end = vm.pos + length
        vm.frames.append(vm.frame_end)
    elif op == 0x93:  # STACK_GLOBAL
        name, module = stack.pop(), stack.pop()
        if type(name) is str and type(module) is str:
            stack.append(vm.find(module, name))
            return
        for operand in (module, name):
            # A call, a constant of some module or a persistent id can turn out to be text, and so can a Python 2 text
            # that is not UTF-8 (encoding="latin1"): then loaders read on, with a name that is not in the file.
            if type(operand) not in _MAYBE_TEXT and not (type(operand) is bytes and vm.out.python2):
                raise Broken("STACK_GLOBAL wants two texts")
        vm.odd("a name that is computed")
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
            raise Broken("a float that is no number") from None
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
        made = Dict([])
        stack.append(made)
        if len(items) % 2:
            raise Broken("a key without a value")
        _update(vm, made, items)
    elif op == 0x6C:  # LIST
        stack.append(items)
    elif op == 0x69:  # INST
        module, name = vm.line().decode("ascii"), vm.line().decode("ascii")
        callee = vm.find(module, name)  # the Python unpickler asks for it before it looks for the MARK
        arguments = tuple(vm.pop_mark())
        vm.stack.append(vm.call(callee, arguments, "inst"))
    elif op == 0x6F:  # OBJ
        stack.append(vm.call(items[0], tuple(items[1:]), "obj"))
    elif op == 0x92:  # NEWOBJ_EX
        kwargs, args = stack.pop(), stack.pop()
        call = vm.call(stack[-1], args, "newobj_ex")
        call.kwargs = kwargs
        stack[-1] = call
    elif op == 0x8F:  # EMPTY_SET
        stack.append(Set([]))
    elif op == 0x91:  # FROZENSET
        stack.append(Set(items, frozen=True))
    elif op == 0x90:  # ADDITEMS
        target = stack[-1]
        if type(target) is Set and not target.frozen:
            target.items.extend(items)
        elif type(target) is Call:
            _extend(vm, target, items)
        else:
            _changed(vm, target, items, "members are added to")
    elif op in b"\x82\x83\x84":  # EXT1, EXT2, EXT4
        code = int.from_bytes(vm.take(_WIDTHS[op]), "little", signed=op == 0x84)
        if code <= 0:
            raise Broken(f"extension code {code} is not above zero")
        extension = Extension(code)
        vm.out.extensions.append(extension)
        stack.append(extension)
    elif op == 0x97:  # NEXT_BUFFER
        vm.odd("a buffer from outside the stream")
        stack.append(OutOfBand())
    elif op == 0x98:  # READONLY_BUFFER
        if not stack:
            raise IndexError
    elif op != 0x31:  # POP_MARK: it has done its work
        raise Broken(f"byte 0x{op:02x} is no pickle opcode")


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


def _changed(vm: Machine, target: object, items: list[Any], how: str) -> None:
    """Items put into something that was not made here: into a dictionary of some module it is BUILD by another name."""
    vm.odd(f"{how} " + ("a global" if type(target) is Global else f"a {type(target).__name__.lower()}"))
    if type(target) is Global or type(target) is Extension:
        vm.out.built.append((target, items))


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


def _c_text(vm: Machine) -> bytes:
    """A line that holds a number. C reads it up to a NUL, and takes no digits before it for 0; blanks do not count."""
    text, nul, _ = vm.line().partition(b"\0")
    if nul:
        vm.odd("a number with a NUL in it")
    return text.strip() if text or not nul else b"0"


def _memo_index(vm: Machine) -> int:
    text = _c_text(vm)
    try:
        return int(text if len(text) - text.count(b"_") <= MAX_TEXT_DIGITS + 1 else b"")
    except ValueError:
        raise Broken("a memo index that is no number") from None


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


def _python2_text(vm: Machine, raw: bytes) -> None:
    """A ``str`` of Python 2: text for torch, which decodes it as UTF-8; bytes where that cannot be."""
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
