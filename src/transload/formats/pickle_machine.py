"""Runs a pickle without importing or calling anything. Returns inert nodes, and what loaders would import and call.

``run`` reads one pickle; ``pickle_streams`` those of unknown length, and several that follow one another.
``_execute`` is the loop over the frequent opcodes, ``_common`` runs the others that torch.save writes, and
``rare_opcodes`` all the rest. ``tensor_pattern`` and ``record_pattern`` read many opcodes at once in large files.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Any

from transload.formats.pickle_state import CONSTANTS, LONG_FRAME, MAX_IRREGULAR, Broken, Cut, PickleMachine
from transload.nodes import Call, Dict, Persistent, Pickle, Set

MAX_STREAM = 512 << 20  # larger pickles are not read: 20,000 tensors take 2 MB, so this is room for five million
_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_F64 = Struct(">d").unpack_from
_COMMON = frozenset(b"N\x88\x87G]seacb\x80\x8f\x8a")
Reader = Callable[[PickleMachine], object] | None


def run(data: bytes, start: int = 0, name: str = "", reader: Reader = None) -> Pickle:
    r"""Read one pickle from ``start`` to its STOP, or to where it breaks.

    A ``reader`` sets the functions of the machine that read the storages and arrays in a plain pickle.

    >>> run(b"\x80\x02cos\ngetcwd\n)R.").calls
    [Call(Global(os.getcwd), reduce)]
    """
    vm = PickleMachine(data, start, name)
    out = vm.out
    if reader is not None:
        reader(vm)
    try:
        _execute(vm)
    except Broken as reason:
        out.broken = f"{reason} at byte {vm.pos}"
        out.cut |= type(reason) is Cut
    except IndexError:
        out.cut = vm.pos >= vm.size
        out.broken = f"{'it ends without STOP' if out.cut else 'it pops an empty stack'} at byte {vm.pos}"
    except KeyError as error:
        out.broken = f"it reads memo entry {error.args[0]!r}, which was never written, at byte {vm.pos}"
    except struct_error:
        out.cut = True
        out.broken = f"it is cut off inside an argument at byte {vm.size}"
    except UnicodeDecodeError:
        out.broken = f"its text is not valid UTF-8 at byte {vm.pos}"
    out.end = vm.pos
    if out.cut and reader is not None and [text for _, text in out.ambiguous] == [LONG_FRAME]:
        out.ambiguous.clear()  # the rest of the frame is missing: some loaders fail at its head, the others at its end
        vm.frames.pop()
    if vm.frames:  # a frame must end where an opcode ends
        from transload.formats.rare_opcodes import opcodes, read_by_frames

        crossed = {end for end in vm.frames if end < out.end} - {begin for begin, _ in out.raw}
        for position, _ in opcodes(data, start, out.raw) if crossed else ():
            if position >= out.end:
                break
            crossed.discard(position)
        out.ambiguous.extend((end, "an opcode crosses the end of a frame") for end in sorted(crossed)[:MAX_IRREGULAR])
        if not out.broken and vm.frames[-1] > out.end:
            out.ambiguous.append((out.end, "STOP comes before the end of its frame"))
        if out.ambiguous:  # both readings count
            add_uses(out, run(read_by_frames(data, start), name=name))
    return out


def run_part(vm: PickleMachine, data: bytes) -> bool:
    """Run the opcodes of a part of a pickle with the stack and memo of a machine; whether they end where the part does.

    If they do not, the stack may contain anything.
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


def _execute(vm: PickleMachine) -> None:  # one loop, opcodes by frequency: 0.2 µs each
    data, size, meta = vm.data, vm.size, vm.meta
    calls, persistent = vm.out.calls, vm.out.persistent
    memo: Any = vm.memo
    read_tensor: Callable[[int, list[Any], list[Any]], int] | None = None
    read_record: Callable[[Call, int, list[Any]], int] | None = None
    rare: Callable[[PickleMachine, int], None] | None = None
    stack = vm.stack
    push = stack.append
    pos = vm.pos
    loader = vm.loader
    put = len(memo) if type(memo) is list else -1  # the next memo index; -1 once there was a gap
    memoized = False
    items: Any
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
            elif op == 0x94 and memoized and put >= 0:  # MEMOIZE; the first one is noted as rare
                memo.append(stack[-1])
                put += 1
            elif op == 0x28:  # MARK
                # The pattern requires LONG_BINPUT, which no pickler writes below 256.
                if put > 0xFF and data[pos : pos + 1] == b"(":
                    if read_tensor is None:
                        from transload.formats.tensor_pattern import TensorPattern

                        read_tensor = TensorPattern(vm).read
                    if end := read_tensor(pos, stack, memo):
                        pos, put = end, len(memo)
                        continue
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
                if stack[-1] is loader and (storage := vm.read_storage(args, pos)) is not None:
                    stack[-1] = storage
                    continue
                node = stack[-1] = Call(stack[-1], args, "reduce", pos)
                calls.append(node)
                if type(args) is tuple and args and type(args[0]) is list:
                    vm.given.add(id(args[0]))  # the call keeps it alive, so its id stays unique
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
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                node = stack[-1] = Call(stack[-1], args, "newobj", pos)
                calls.append(node)
                if memoized and put > 0xFFF and vm.read_array is None:  # a large index
                    if read_record is None:
                        from transload.formats.record_pattern import RecordPattern

                        read_record = RecordPattern(vm).read
                    if end := read_record(node, pos, memo):
                        pos, put = end, len(memo)
            elif op == 0x7D:  # EMPTY_DICT
                push(Dict([]))
            elif op == 0x75:  # SETITEMS
                items, stack, vm.pos = stack, meta.pop(), pos
                push = stack.append
                if len(items) % 2:
                    vm.irregular("a key without a value")
                    items.pop()
                vm.update(stack[-1], items)
            elif op == 0x2E:  # STOP
                vm.out.root = stack.pop()
                if stack or meta:
                    vm.pos = pos
                    vm.irregular("values are left on the stack at STOP")
                break
            else:
                vm.pos, vm.stack = pos, stack
                if op in _COMMON:
                    _common(vm, op)
                else:
                    if rare is None:
                        from transload.formats.rare_opcodes import run_opcode

                        rare = run_opcode
                    rare(vm, op)
                    memoized = memoized or op == 0x94
                pos, stack, memo, loader = vm.pos, vm.stack, vm.memo, vm.loader
                push = stack.append
                put = len(memo) if type(memo) is list else -1
    finally:
        vm.pos = max(vm.pos, pos)  # a handler that raised may have read further than the loop knows


def _common(vm: PickleMachine, op: int) -> None:
    """Run an opcode that torch.save writes and ``_execute`` does not run, by frequency."""
    items = vm.pop_mark() if op == 0x65 else []  # APPENDS
    stack = vm.stack
    if op in CONSTANTS:
        stack.append(CONSTANTS[op])
    elif op == 0x87:  # TUPLE3
        third, second = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], second, third)
    elif op == 0x47:  # BINFLOAT
        stack.append(_F64(vm.take(8))[0])
    elif op == 0x5D:  # EMPTY_LIST
        stack.append([])
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        vm.update(stack[-1], [key, value])
    elif op == 0x65:  # APPENDS
        vm.extend(stack[-1], items)
    elif op == 0x61:  # APPEND
        value = stack.pop()
        vm.extend(stack[-1], [value])
    elif op == 0x63:  # GLOBAL
        module, name = vm.line().decode(), vm.line().decode()
        stack.append(vm.find(module, name))
    elif op == 0x62:  # BUILD
        state = stack.pop()
        target = stack[-1]
        if type(target) is Call:
            if target.states is None:
                target.states = []
            target.states.append(state)
            if vm.read_array is not None and (array := vm.read_array(target)) is not None:
                stack[-1] = array
        else:
            vm.out.built.append((target, state))
    elif op == 0x80:  # PROTO
        version = vm.take(1)[0]
        vm.out.protocol = max(vm.out.protocol, version)
        if version > 5:
            vm.irregular(f"protocol {version} does not exist")
    elif op == 0x8F:  # EMPTY_SET
        stack.append(Set([]))
    elif op == 0x8A:  # LONG1
        stack.append(int.from_bytes(vm.take(vm.take(1)[0]), "little", signed=True))
