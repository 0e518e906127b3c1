"""Read what is left of a damaged index: a ``data.pkl`` in which some bytes are destroyed.

Entries of a state dict are found by their opcodes (a name, then a persistent id inside the call that rebuilds a
tensor), and divide the pickle into parts. A machine runs part after part. If one breaks, or does not end as an entry
should, it is left out, and the machine continues with the next. The protocol that torch uses writes memo indexes
explicitly, so what follows the damage can still refer to what was defined before it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import islice
from typing import Any, TypeGuard

from transload.dtypes import STORAGES
from transload.formats.pickle_machine import run_part
from transload.formats.pickle_state import PickleMachine, Sparse
from transload.formats.rare_opcodes import opcodes
from transload.nodes import ORDINARY_CALLS, REBUILDS, Call, Dict, Global, Persistent, Unread, called

_MAX_NAME = 1024
_MAX_OPCODES = 32  # from the name of an entry to its persistent id: 18, and a few for each call around it
# All texts together may be this many times as long as the index: a hostile one has a long text every five bytes.
_MAX_OVERLAP = 4
_WINDOW = 4096  # bytes of an entry that are read: opcodes whose argument is a line search for its end
# Nested dictionaries; every entry saves the state of each, so the cost of a deep file would be quadratic.
_MAX_DEPTH = 100
_MAX_GAPS = 1000  # damaged entries; after each, the names before it are searched
_KEPT = 64  # values on top of the stack that are put back when a part is undone
_MAX_RETRIES = 16

_PUTS = re.compile(rb"[qr]")
_STORAGE_ID = rb"\([Xhj][chj][Xhj][Xhj][KMJ\x8a]N?tQ"
_ENTRY = re.compile(rb"[Xhj](?:[chj]\()+" + _STORAGE_ID)
_NAME = re.compile(rb"X[chj]\(")
_TEXT = re.compile(rb"X(?=(..)\0\0)", re.DOTALL)
_NAME_AGAIN = re.compile(rb"(?=(?:h.|j...\0)(?:h.|j...\0)\(\()", re.DOTALL)
_GLOBAL = re.compile(rb"c([\w.]{1,200}\n[\w.]{1,200})\n(?=q(.)|r(....))", re.DOTALL)
_MARK = re.compile(rb"\(")

_ORDERED, _REBUILD, _ = ORDINARY_CALLS
_EXPECTED = (*ORDINARY_CALLS, *(("torch", name) for name in STORAGES))


class _Memo(Sparse):
    """A memo that has ``Unread`` for every missing index."""

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except KeyError:
            return Unread(None, (), "reduce", 0)


def discard(call: Call) -> None:
    """Make the result of a call unread, in place: it is lost, and may be used in several places."""
    call.callee, call.args = Unread(None, (), "reduce", 0), ()
    call.kwargs = call.states = call.items = call.appended = None


def is_ordered(node: object) -> TypeGuard[Call]:
    """Whether a node is an ``OrderedDict``."""
    return type(node) is Call and called(node) == "collections.OrderedDict"


def read_damaged_index(data: bytes) -> tuple[object, list[Persistent], list[str]]:
    """Read as much of a damaged index as possible; at least an empty dictionary.

    Returns its object, all persistent ids, and the names of lost entries.
    """
    texts = _texts(data)
    vm = PickleMachine(data, 0, "data.pkl")
    vm.memo = memo = _definitions(data, texts)
    entries = sorted(
        start
        for start in {*texts, *(match.start() for match in _NAME_AGAIN.finditer(data))}
        if _ENTRY.match(_codes(data, start))
    )
    stop = len(data) - data.endswith(b".")
    broken: list[str] = []
    offsets, first = sorted(texts), entries[0] if entries else stop
    if not (run_part(vm, data[:first]) and _is_ready(vm)):
        vm.meta[:], vm.stack = [[Dict([])]], []
        _retry(vm, data, offsets[: bisect_left(offsets, first)], 0, first, _StackSnapshot(vm), last=False)
    # The stack of the dictionary with the last damage; that of one whose further entries may belong to another
    # dictionary; how many gaps there are; and the key of the last storage.
    gap, doubtful, gaps, last_key = list[Any](), list[Any](), 0, ""
    for start, end in zip(entries, [*entries, stop][1:], strict=True):
        length, name = texts.get(start, (0, ""))
        if not length:
            width = 1 if data[start] == ord("h") else 4
            name = memo[int.from_bytes(data[start + 1 : start + 1 + width], "little")]
        if len(vm.meta) > _MAX_DEPTH or gaps > _MAX_GAPS:
            break
        behind = min(_entry_end(data, start), end)
        entry = _run_alone(vm, data[start:behind])
        if len(entry) == 2 and entry[0] == name and type(entry[1]) is Call:
            start = behind  # noqa: PLW2901 - the entry is read
            storage: Any = vm.out.persistent[-1].id  # a tuple: ``_run_alone`` has checked it
            key = storage[2] if type(storage[2]) is str else ""
            if vm.stack is gap and not _is_continued(vm, name, last_key, key):
                doubtful = vm.stack
            gap, last_key = [], key
        if start == behind and vm.stack is not doubtful:
            vm.stack += entry
        elif type(name) is str:
            broken.append(name)
        state = _StackSnapshot(vm)
        if start == behind and _runs(vm, data[start:end]) and _is_ready(vm, last=end == stop):
            continue
        state.restore(vm)
        gap, gaps = vm.stack, gaps + 1
        part = data[start:end]
        for match in islice(_MARK.finditer(part), _MAX_RETRIES):  # the persistent ids in the damaged part
            if re.match(_STORAGE_ID, _codes(part, match.start())):
                last = next(at for at, code in opcodes(part, match.start()) if code == ord("Q"))
                _run_alone(vm, part[match.start() : last + 1])
        inside = offsets[bisect_left(offsets, start + (start < behind)) : bisect_left(offsets, end)]
        broken += [texts[text][1] for text in inside if _NAME.match(_codes(data, text))]
        _retry(vm, data, inside, start, end, state, last=end == stop)
    _repair_names(vm)
    return _closed(vm), vm.out.persistent, broken


# -- finding entries


def _texts(data: bytes) -> dict[int, tuple[int, str]]:
    """What may be short texts, by offset: the length and the text of each."""
    texts: dict[int, tuple[int, str]] = {}
    budget = _MAX_OVERLAP * len(data)
    for match in _TEXT.finditer(data):
        length = int.from_bytes(match[1], "little")
        raw = data[match.end() + 4 : match.end() + 4 + length] if length <= _MAX_NAME else b""
        budget -= len(raw)
        if budget < 0:
            break
        if length == len(raw) > 0:
            text = raw.decode("utf-8", "replace")
            if text.isprintable() and "\ufffd" not in text:
                texts[match.start()] = length, text
    return texts


def _definitions(data: bytes, texts: dict[int, tuple[int, str]]) -> _Memo:
    """A memo with the texts and globals that are followed by a memo index; the first for each index."""
    memo = _Memo({})
    values: list[tuple[int, object]] = [(start + 5 + length, text) for start, (length, text) in texts.items()]
    for match in _GLOBAL.finditer(data):
        module, _, name = match[1].decode("ascii", "replace").partition("\n")
        values.append((match.end(), Global(module, name, match.start())))
    for end, value in sorted(values, key=lambda definition: -definition[0]):
        width = {ord("q"): 1, ord("r"): 4}.get(data[end] if end < len(data) else 0)
        if width:
            memo[int.from_bytes(data[end + 1 : end + 1 + width], "little")] = value
    return memo


def _codes(data: bytes, start: int) -> bytes:
    """The next opcodes without their arguments, and without those that fill the memo."""
    return _PUTS.sub(b"", bytes(code for _, code in islice(opcodes(data[start : start + _WINDOW]), _MAX_OPCODES)))


def _entry_end(data: bytes, start: int) -> int:
    """Where the call of an entry ends, including the opcode that puts it into the memo."""
    depth, called = 0, False
    for position, code in opcodes(data[start : start + _WINDOW]):
        if called and code not in b"qr":
            return start + position
        depth += (code == ord("(")) - (code == ord("t"))
        called = called or (code == ord("R") and not depth)
    return len(data)


# -- running parts


def _runs(vm: PickleMachine, part: bytes) -> bool:
    """Run a part, and return whether it succeeds, calls only globals, and refers only to storages."""
    calls, ids = len(vm.out.calls), len(vm.out.persistent)
    return (
        run_part(vm, part)
        and all(type(call.callee) in (Global, Unread) for call in vm.out.calls[calls:])
        and all(type(node.id) is tuple and len(node.id) in (5, 6) for node in vm.out.persistent[ids:])
    )


def _run_alone(vm: PickleMachine, part: bytes) -> list[Any]:
    """Run a part with an empty stack, and return that stack; an empty one if the part is damaged."""
    other = PickleMachine(part, 0, "")
    other.memo, other.out = vm.memo, vm.out
    return other.stack if _runs(other, part) and not other.meta else []


class _StackSnapshot:
    """The stack of a machine, so that it can be restored."""

    def __init__(self, vm: PickleMachine) -> None:
        self._frames = [(frame, len(frame), frame[-_KEPT:]) for frame in (*vm.meta, vm.stack)]
        holders = [frame[-1] for frame, length, _ in self._frames if length]
        self._holders = [(holder, len(holder.items or ())) for holder in holders if type(holder) in (Dict, Call)]

    def restore(self, vm: PickleMachine) -> None:
        """Restore the stack; a failed part changes no more than its ``_KEPT`` topmost values."""
        for frame, length, top in self._frames:
            frame[max(0, length - len(top)) :] = top
        for holder, length in self._holders:
            if holder.items is not None:
                del holder.items[length:]
        vm.meta[:] = [frame for frame, _, _ in self._frames[:-1]]
        vm.stack = self._frames[-1][0]


def _is_continued(vm: PickleMachine, name: object, last_key: str, key: str) -> bool:
    """Whether an entry after a gap belongs to the dictionary that was open before it.

    In the gap, that dictionary may have ended, and another with the same names begun: an optimizer has the same names
    for every parameter. Then either a name is repeated, or the gap hides more entries than were read before it. torch
    numbers storages in the order of their entries.
    """
    below: Any = vm.meta[-1][-1] if vm.meta and vm.meta[-1] else None
    items = below.items if type(below) in (Dict, Call) else None
    names = [*vm.stack[::2], *(items or ())[::2]]
    if name in names:
        return False
    numbered = last_key.isdecimal() and key.isdecimal() and max(len(key), len(last_key)) < 20
    return len(vm.meta) <= 1 or (numbered and 0 <= int(key) - int(last_key) - 1 <= len(names))


def _is_ready(vm: PickleMachine, *, last: bool = False) -> bool:
    """Whether an entry of a dictionary can follow; after the ``last``, whether only the root is left."""
    stack, below = vm.stack, vm.meta[-1] if vm.meta else []
    if last:
        return len(stack) == 1 and not vm.meta
    if stack and (type(stack[-1]) is Dict or is_ordered(stack[-1])):
        return len(stack) % 2 == (0 if vm.meta and len(stack) > 1 else 1) or not vm.meta
    fillable = bool(below) and type(below[-1]) in (Dict, Call)
    return fillable and len(stack) % 2 == 0 and (not stack or type(stack[-2]) in (str, int))


def _retry(
    vm: PickleMachine, data: bytes, texts: list[int], start: int, end: int, state: _StackSnapshot, *, last: bool
) -> None:
    """Continue within a damaged part, after the damage: at a text that can be a key, or where a dictionary ends."""
    for text in texts[:_MAX_RETRIES]:
        at = text
        while at > start and data[at - 1] == ord("u"):
            at -= 1
        if _runs(vm, data[at:end]) and _is_ready(vm, last=last):
            return
        state.restore(vm)


def _closed(vm: PickleMachine) -> object:
    """The root object, with the items of unfinished containers added to them."""
    while vm.meta:
        items = vm.stack
        vm.stack = vm.meta.pop()
        target = vm.stack[-1] if vm.stack else None
        if type(target) is Dict:
            target.items += items[: len(items) // 2 * 2]
        elif type(target) is Call:
            target.items = [*(target.items or ()), *items[: len(items) // 2 * 2]]
        elif type(target) is list:
            target += items
    root, *others = vm.stack or [Dict([])]
    if type(root) is Dict:
        root.items += others[: len(others) // 2 * 2]
    return root


# -- names that every tensor uses


def _repair_names(vm: PickleMachine) -> None:
    """Repair torch's names in calls and persistent ids, where only one fits."""
    every = {id(call.callee): call.callee for call in vm.out.calls if type(call.callee) is Global}
    ids = [(node, node.id) for node in vm.out.persistent if type(node.id) is tuple and len(node.id) in (5, 6)]
    every |= {id(parts[1]): parts[1] for _, parts in ids if type(parts[1]) is Global}
    for node in every.values():
        if node.full_name in REBUILDS or node.name in STORAGES:
            continue
        near = [name for name in _EXPECTED if _is_near(node.full_name, ".".join(name))]
        if len(near) == 1:
            node.module, node.name = near[0]
            node.full_name = ".".join(near[0])
    for pid, (_, kind, key, device, *rest) in ids:
        pid.id = ("storage", kind, key, device if type(device) is str else "cpu", *rest)
    for call in vm.out.calls:
        args: Any = call.args
        name = called(call)
        if name in REBUILDS or is_ordered(call):  # nothing is appended to a dictionary, nor put into a tensor
            call.appended = None
            call.items = None if name in REBUILDS else call.items
            continue
        match args:
            case () if type(call.callee) is Unread:
                call.callee = Global(*_ORDERED, 0)
            case (Persistent(), int(), tuple(), tuple(), bool(), Call()):
                call.callee = Global(*_REBUILD, 0)
            case _ if type(call.callee) is Unread:
                discard(call)


def _is_near(one: str, other: str) -> bool:
    """Whether two names differ in one character."""
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1
