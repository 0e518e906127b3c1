"""The whole tree of a checkpoint's root, drawn from inert nodes: shared once, cycles named, depth and lines bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.nodes import Big, Call, Dict, Extension, Global, Persistent, Set
from transload.render.escape import printable
from transload.render.lines import Block, Line, Prose, heading, note
from transload.render.sizes import plural, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transload.checkpoint import Checkpoint, Key, Tensor

__all__ = ["structure"]

MAX_LINES = 2000
MAX_DEPTH = 100
"""Deeper than any checkpoint; a pickle of a megabyte can nest a million levels."""

_LONGEST_INT = 256  # bits
_SHORT = 8
_PLAIN = (str, int, float, bool, type(None))
_CONTAINERS = (Dict, Call, list, tuple, Set)
_Path = tuple["Key", ...]
_Child = tuple[str, "Key", object]


def structure(checkpoint: Checkpoint, max_lines: int = MAX_LINES) -> Iterator[Block]:
    """The objects of the file as the pickle would build them, one a line, tensors by what they are."""
    yield from heading("structure")
    if not any(pickle.main for pickle in checkpoint.pickles):
        yield note("this format holds no pickled tree; --tensors lists what it holds")
        return
    drawing = _Drawing(checkpoint)
    shown = 0
    for line in drawing.lines(checkpoint.root):
        shown += 1
        if shown <= max_lines:
            yield Prose(line, lead=(("  ", ""),))
    if shown > max_lines:
        yield note(f"… {shown - max_lines:,} more lines")


class _Drawing:
    """One walk. A node that is met again is shown as ``→ #7``, and its first showing carries ``#7``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = {tensor.path: tensor for tensor in checkpoint.tensors}
        self.shared = _shared(checkpoint.root)
        self.numbers: dict[int, int] = {}

    def lines(self, root: object) -> Iterator[Line]:
        stack: list[tuple[str, str, str, _Path, object]] = [("", "", "", (), root)]
        while stack:
            guide, below, label, path, node = stack.pop()
            lead: Line = ((guide, "dim"), (label, ""))
            tensor = self.tensors.get(path) if type(node) is Call else None
            if id(node) in self.numbers:
                yield (*lead, (f"→ #{self.numbers[id(node)]}", "dim"))
                continue
            yield (*lead, *self._words(node, tensor), *self._mark(node))
            children = _children(node) if tensor is None else []
            if children and len(path) >= MAX_DEPTH:
                yield ((f"{below}└─ … deeper than {MAX_DEPTH} levels", "dim"),)
                continue
            last = len(children) - 1
            for place in range(last, -1, -1):
                name, step, child = children[place]
                corner, bar = ("└─ ", "   ") if place == last else ("├─ ", "│  ")
                stack.append((below + corner, below + bar, f"{name}: ", (*path, step), child))

    def _mark(self, node: object) -> Line:
        if id(node) not in self.shared:
            return ()
        self.numbers[id(node)] = len(self.numbers) + 1
        return ((f"  #{len(self.numbers)}", "dim"),)

    def _words(self, node: Any, tensor: Tensor | None) -> Line:
        if tensor is not None:
            device = "" if tensor.device == "cpu" else f" on {printable(tensor.device, 40)}"
            made = f" {printable(tensor.dtype, 40)} {shape_text(tensor.shape)}{device}"
            return ((printable(tensor.cls or "Tensor", 60), ""), (made, "dim"))
        kind = type(node)
        if kind is Dict:
            return (("dict", ""), (f" of {len(node.items) // 2:,}", "dim"))
        if kind is list or kind is tuple:
            short = _inline(node)
            return ((short, ""),) if short else ((kind.__name__, ""), (f" of {len(node):,}", "dim"))
        if kind is Set:
            return (("frozenset" if node.frozen else "set", ""), (f" of {len(node.items):,}", "dim"))
        if kind is Call:
            return ((_callee(node), ""), (_inside(node), "dim"))
        return ((_value(node), ""),)


def _shared(root: object) -> set[int]:
    """Ids of the containers that are met more than once."""
    seen: set[int] = set()
    again: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) not in _CONTAINERS or _inline(node):
            continue
        if id(node) in seen:
            again.add(id(node))
            continue
        seen.add(id(node))
        stack.extend(child for _, _, child in _children(node))
    return again


def _children(node: Any) -> list[_Child]:
    """What lies directly in a node: its words, the step of a tensor's path that leads there, and the child."""
    kind = type(node)
    if kind is Dict:
        return _pairs(node.items)
    if kind is list or kind is tuple:
        return [] if _inline(node) else _counted(node)
    if kind is Set:
        return _counted(node.items)
    if kind is Call:
        return _call_children(node)
    return []


def _call_children(call: Call) -> list[_Child]:
    """Containers among the arguments, then what was put into the object; paths as ``read.tensors`` makes them."""
    out: list[_Child] = []
    if type(call.args) is tuple and not _is_rebuild(call):
        out += [child for child in _counted(call.args) if type(child[2]) in _CONTAINERS and not _inline(child[2])]
    if call.states and not _is_ordered(call):
        out += _state_children(call.states[-1])
    out += _pairs(call.items or [])
    return out + _counted(call.appended or [])


def _state_children(state: object) -> list[_Child]:
    if type(state) is Dict:
        return _pairs(state.items)
    if type(state) is tuple and len(state) == 2 and all(type(half) is Dict for half in state):
        return [child for half in state for child in _pairs(half.items)]  # attributes, and those in slots
    return [("state", "state", state)]


def _counted(items: list[object] | tuple[object, ...]) -> list[_Child]:
    return [(f"[{index}]", index, child) for index, child in enumerate(items)]


def _pairs(items: list[object]) -> list[_Child]:
    out: list[_Child] = []
    for index in range(0, len(items) - 1, 2):
        key = items[index]
        step = key if isinstance(key, str) else key if type(key) is int else f"#{index}"
        out.append((printable(key, 80) if isinstance(key, str) else _value(key), step, items[index + 1]))
    return out


def _inline(node: Any) -> str:
    """A list or tuple of a few plain values as Python writes it, and empty for any other node."""
    if type(node) not in (list, tuple) or len(node) > _SHORT or any(type(item) not in _PLAIN for item in node):
        return ""
    inside = ", ".join(map(_value, node))
    if len(inside) > 60:
        return ""
    return f"[{inside}]" if type(node) is list else f"({inside},)" if len(node) == 1 else f"({inside})"


def _is_ordered(call: Call) -> bool:
    """An OrderedDict, whose state is ``state_dict()``'s ``_metadata``: versions of modules, of no interest here."""
    return type(call.callee) is Global and call.callee.name == "OrderedDict"


def _is_rebuild(call: Call) -> bool:
    return type(call.callee) is Global and call.callee.name.startswith("_rebuild_")


def _callee(call: Call) -> str:
    if type(call.callee) is Global:
        return printable(f"{call.callee.module}.{call.callee.name}", 80)
    return "an object of no plain class"


def _inside(call: Call) -> str:
    held = len(call.items or ()) // 2 + len(call.appended or ())
    args = call.args[:6] if type(call.args) is tuple and not _is_rebuild(call) else ()
    plain = [_inline(arg) or _value(arg) for arg in args if type(arg) not in _CONTAINERS or _inline(arg)]
    words = f"({', '.join(plain)})" if plain else ""
    return f"{words} of {held:,}" if held else words


def _value(node: object) -> str:
    """A value that holds nothing else, in a few words."""
    words = _WORDS.get(type(node))
    return words(node) if words else f"a {type(node).__name__.lower()}"


def _number(node: int) -> str:
    return repr(node) if node.bit_length() <= _LONGEST_INT else "a huge integer"


def _bytes(node: bytes | bytearray) -> str:
    return f"{type(node).__name__} of {plural(len(node), 'byte')}"


_WORDS: dict[type, Callable[[Any], str]] = {
    str: lambda node: f"'{printable(node, 80)}'",
    int: _number,
    float: repr,
    bool: repr,
    type(None): repr,
    bytes: _bytes,
    bytearray: _bytes,
    Big: lambda _: "a huge integer",
    Global: lambda node: printable(f"{node.module}.{node.name}", 80),
    Persistent: lambda _: "a storage",
    Extension: lambda node: f"copyreg extension {node.code}",
}
