"""Draw the object tree of a checkpoint from inert nodes: shared nodes once, cycles marked, depth and lines limited."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from transload.nodes import Big, Call, Dict, Extension, Global, Persistent, Set, walk_nodes
from transload.render.lines import Block, Line, Prose, heading, note
from transload.render.words import plural, printable, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.contents import Contents, Key, Tensor

MAX_LINES = 2000
MAX_DEPTH = 100
"""Deeper than any checkpoint; a pickle of a megabyte can nest a million levels."""

_LONGEST_INT = 256  # bits
_SHORT = 8
_PLAIN = (str, int, float, bool, type(None))
_CONTAINERS = (Dict, Call, list, tuple, Set)
_Path = tuple["Key", ...]
_Child = tuple[str, "Key", object]


def structure(checkpoint: Contents, max_lines: int = MAX_LINES) -> Iterator[Block]:
    """The objects that the pickle would build, one on each line; for a file without a pickle, its values."""
    yield from heading("structure")
    if not any(pickle.main for pickle in checkpoint.pickles):
        for leaf in checkpoint.leaves[:max_lines]:
            yield Prose(((f"{printable(leaf.name)}: ", "dim"), (printable(leaf.text), "")), lead="  ")
        yield note("this format holds no pickled tree; --tensors lists what it holds")
        return
    shown = 0
    for line in _lines(checkpoint.root, {tensor.path: tensor for tensor in checkpoint.tensors}):
        shown += 1
        if shown <= max_lines:
            yield Prose(line, lead="  ")
    if shown > max_lines:
        yield note(f"… {shown - max_lines:,} more lines")


def _lines(root: object, tensors: dict[_Path, Tensor]) -> Iterator[Line]:
    """The lines of the tree. A shared node is marked ``#7`` where it is shown, and ``→ #7`` elsewhere."""
    seen = Counter(id(node) for node in walk_nodes([root]) if type(node) in _CONTAINERS and not _inline(node))
    numbers: dict[int, int] = {}
    stack: list[tuple[str, str, str, _Path, object]] = [("", "", "", (), root)]
    while stack:
        guide, below, label, path, node = stack.pop()
        lead: Line = ((guide, "dim"), (label, ""))
        if id(node) in numbers:
            yield (*lead, (f"→ #{numbers[id(node)]}", "dim"))
            continue
        tensor = tensors.get(path) if type(node) is Call else None
        mark = ""
        if seen[id(node)] > 1:
            numbers[id(node)] = len(numbers) + 1
            mark = f"  #{len(numbers)}"
        yield (*lead, *_words(node, tensor), (mark, "dim"))
        children = _children(node) if tensor is None else []
        if children and len(path) >= MAX_DEPTH:
            yield ((f"{below}└─ … deeper than {MAX_DEPTH} levels", "dim"),)
            continue
        last = len(children) - 1
        for place in range(last, -1, -1):
            name, step, child = children[place]
            corner, bar = ("└─ ", "   ") if place == last else ("├─ ", "│  ")
            stack.append((below + corner, below + bar, f"{name}: ", (*path, step), child))


def _words(node: Any, tensor: Tensor | None) -> Line:
    """What a node is, and how many items it has."""
    kind = type(node)
    if tensor is not None:
        device = "" if tensor.device == "cpu" else f" on {printable(tensor.device, 40)}"
        made = f" {printable(tensor.dtype, 40)} {shape_text(tensor.shape)}{device}"
        return ((printable(tensor.cls or "Tensor", 60), ""), (made, "dim"))
    if kind is Dict:
        return (("dict", ""), (f" of {len(node.items) // 2:,}", "dim"))
    if kind is Set:
        return (("frozenset" if node.frozen else "set", ""), (f" of {len(node.items):,}", "dim"))
    if kind is Call:
        name = "an object of no plain class"
        if type(node.callee) is Global:
            name = printable(node.callee.full_name, 80)
        args = node.args[:6] if type(node.args) is tuple and not _callee(node).startswith("_rebuild_") else ()
        plain = [_inline(arg) or _value(arg) for arg in args if type(arg) not in _CONTAINERS or _inline(arg)]
        words = f"({', '.join(plain)})" if plain else ""
        held = len(node.items or ()) // 2 + len(node.appended or ())
        return ((name, ""), (f"{words} of {held:,}" if held else words, "dim"))
    short = _inline(node)
    if kind in (list, tuple) and not short:
        return ((kind.__name__, ""), (f" of {len(node):,}", "dim"))
    return ((short or _value(node), ""),)


def _children(node: Any) -> list[_Child]:
    """The children of a node: the label, the path component as in ``Tensor.path``, and the child itself."""
    kind = type(node)
    if kind is Dict:
        return _pairs(node.items)
    if kind is list or kind is tuple:
        return [] if _inline(node) else _counted(node)
    if kind is Set:
        return _counted(node.items)
    if kind is not Call:
        return []
    # Containers among the arguments, then what was put into the object; with paths as in ``formats.tensors``.
    out: list[_Child] = []
    callee = _callee(node)
    if type(node.args) is tuple and not callee.startswith("_rebuild_"):
        out += [child for child in _counted(node.args) if type(child[2]) in _CONTAINERS and not _inline(child[2])]
    # The state of an OrderedDict is the ``_metadata`` of ``state_dict()``: versions of modules, of no interest here.
    if node.states and callee != "OrderedDict":
        state = node.states[-1]
        halves = state if type(state) is tuple and len(state) == 2 else (state,)  # __dict__ and __slots__
        if all(type(half) is Dict for half in halves):
            out += [child for half in halves for child in _pairs(half.items)]
        else:
            out.append(("state", "state", state))
    out += _pairs(node.items or [])
    return out + _counted(node.appended or [])


def _callee(call: Call) -> str:
    """The last component of the called name; empty if the callee is not a name."""
    return call.callee.name if type(call.callee) is Global else ""


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
    """A list or tuple of a few plain values as Python writes it; empty for any other node."""
    if type(node) not in (list, tuple) or len(node) > _SHORT or any(type(item) not in _PLAIN for item in node):
        return ""
    inside = ", ".join(map(_value, node))
    if len(inside) > 60:
        return ""
    return f"[{inside}]" if type(node) is list else f"({inside},)" if len(node) == 1 else f"({inside})"


def _value(node: Any) -> str:
    """A value that is not a container, in a few words."""
    kind = type(node)
    if kind is str:
        return f"'{printable(node, 80)}'"
    if kind is Big or (kind is int and node.bit_length() > _LONGEST_INT):
        return "a huge integer"
    if kind in _PLAIN:
        return repr(node)
    if kind is bytes or kind is bytearray:
        return f"{kind.__name__} of {plural(len(node), 'byte')}"
    if kind is Global:
        return printable(node.full_name, 80)
    if kind is Extension:
        return f"copyreg extension {node.code}"
    return "a storage" if kind is Persistent else f"a {kind.__name__.lower()}"
