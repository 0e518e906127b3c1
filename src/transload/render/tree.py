"""Tensor names as a tree, with what repeats folded: thirty-two equal layers are one line, and one of them is shown."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from re import compile as regex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.checkpoint import Tensor

__all__ = ["Row", "Twig", "opened", "tensor_tree", "tree_rows"]

_SEPARATOR = regex(r"(?=[./])")
_DIGITS = regex(r"[0-9]{1,18}")
_DEEPEST = 48  # a name of a million dots is one long name, not a million levels
_ALIKE = 2  # branches whose names differ only in a number fold from this many on,
_ALIKE_TENSORS = 3  # single tensors from this many,
_ALIKE_UNNUMBERED = 8  # and whatever has the same structure, under any names, from this many


@dataclass(frozen=True, slots=True)
class Twig:
    """A branch or a tensor of the tree; or several equal ones, of which ``children`` shows the first.

    ``label`` begins with the separator that joins it to its parent's. ``copies`` is how many equal ones there are;
    ``tensors`` and ``nbytes`` count all of them.
    """

    label: str
    tensor: Tensor | None
    children: tuple[Twig, ...]
    tensors: int
    nbytes: int
    copies: int = 1

    @property
    def name(self) -> str:
        """The label as it reads below its parent."""
        return self.label[1:] if self.label[:1] in ("/", ".") else self.label


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the drawn tree: the guide before it, and a twig; or how many siblings there is no room for."""

    guide: str
    twig: Twig | None
    more: int = 0
    closed: bool = False
    """The twig has children, which there is no room for."""


class _Branch:
    """The tree while it grows. ``step`` is a piece of a name with the separator before it.

    ``form`` is a number for the structure below: branches of equal form differ in nothing that is shown.
    """

    __slots__ = ("children", "form", "nbytes", "step", "tensors", "total")

    def __init__(self, step: str) -> None:
        self.step = step
        self.tensors: list[Tensor] = []
        self.children: dict[str, _Branch] = {}
        self.total = 0
        self.nbytes = 0
        self.form = 0

    @property
    def text(self) -> str:
        return self.step[1:] if self.step[:1] in ("/", ".") else self.step

    @property
    def separator(self) -> str:
        return self.step[: len(self.step) - len(self.text)]


def tensor_tree(tensors: Iterable[Tensor]) -> Twig:
    """The tree of all tensors, by their names split at dots and slashes.

    >>> from transload.checkpoint import Tensor
    >>> def tensor(name): return Tensor((name,), name, "float32", (2,), (1,), "cpu", None)
    >>> [(twig.label, twig.copies) for twig in tensor_tree(map(tensor, ["w.0.a", "w.1.a", "b"])).children]
    [('w.0 … 1', 2), ('b', 1)]
    """
    root = _Branch("")
    for tensor in tensors:
        branch = root
        for step in _SEPARATOR.split(tensor.name, _DEEPEST):
            below = branch.children.get(step)
            if below is None:
                below = branch.children[step] = _Branch(step)
            branch = below
        branch.tensors.append(tensor)
    _measure(root, {})
    return Twig("", None, _twigs(root), root.total, root.nbytes)


def _measure(branch: _Branch, forms: dict[object, int]) -> None:
    """Fill in totals and form, the deepest first."""
    for child in branch.children.values():
        _measure(child, forms)
    below = branch.children.values()
    branch.total = len(branch.tensors) + sum(child.total for child in below)
    branch.nbytes = sum(t.nbytes for t in branch.tensors) + sum(child.nbytes for child in below)
    looks = tuple((t.dtype, t.shape, t.device, t.kind, t.cls) for t in branch.tensors)
    form = (looks, tuple((child.step, child.form) for child in below))
    branch.form = forms.setdefault(form, len(forms))


def _twigs(branch: _Branch) -> tuple[Twig, ...]:
    """The children of a branch, kin folded into the first of them."""
    children = branch.children.values()
    kin: dict[object, list[_Branch]] = {}
    for child in children:
        kin.setdefault(_kinship(child), []).append(child)
    out: list[Twig] = []
    for child in children:
        group = kin[_kinship(child)]
        if not _folds(group):
            out.extend(_twig([child]))
        elif group[0] is child:
            out.extend(_twig(group))
    return tuple(out)


def _kinship(branch: _Branch) -> object:
    pattern, numbers = _DIGITS.subn("#", branch.step)
    return (branch.form, pattern) if numbers else (branch.form, branch.separator)


def _folds(group: list[_Branch]) -> bool:
    if not _DIGITS.search(group[0].step):
        return len(group) >= _ALIKE_UNNUMBERED
    return len(group) >= (_ALIKE if group[0].children else _ALIKE_TENSORS)


def _twig(group: list[_Branch]) -> Iterator[Twig]:
    """The twig of some equal branches: usually one, but more if several tensors have the very same name."""
    first, copies = group[0], len(group)
    label = first.separator + _label([branch.text for branch in group])
    children = _twigs(first)
    for tensor in first.tensors:
        yield Twig(label, tensor, (), copies, tensor.nbytes * copies, copies)
    if len(children) == 1 and copies == 1:  # a chain of single branches reads better as one name
        only = children[0]
        yield Twig(label + only.label, only.tensor, only.children, only.tensors, only.nbytes, only.copies)
    elif children:
        total = copies * (first.total - len(first.tensors))
        yield Twig(label, None, children, total, copies * sum(child.nbytes for child in children), copies)


def _label(names: list[str]) -> str:
    """``0 … 31`` for a run of numbers, ``0, 2, 4 … 62`` for others, both in the order of the numbers."""
    if len(names) == 1:
        return names[0]
    names = sorted(names, key=_numbers)
    numbers = [_numbers(name) for name in names]
    run = all(len(a) == 1 and b == [a[0] + 1] for a, b in pairwise(numbers))
    if run:
        return f"{names[0]} … {names[-1]}"
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} … {names[-1]}"


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in _DIGITS.findall(name)]


def tree_rows(root: Twig, limit: int) -> list[Row]:
    """The tree drawn in about ``limit`` lines. Upper levels come first; what has no room stays closed."""
    shown = opened(root, limit)
    rows: list[Row] = []
    # Each entry: the guide of the twig's own line, that of the lines below it, and the twig.
    stack: list[tuple[str, str, Twig | int]] = [("", "", root)]
    while stack:
        guide, below, twig = stack.pop()
        if isinstance(twig, int):
            rows.append(Row(guide, None, more=twig))
            continue
        if twig is not root:
            rows.append(Row(guide, twig, closed=bool(twig.children) and id(twig) not in shown))
        stack.extend(reversed(_lines_below(twig, below, shown.get(id(twig), 0), top=twig is root)))
    return rows


def _lines_below(twig: Twig, below: str, count: int, *, top: bool) -> list[tuple[str, str, Twig | int]]:
    entries: list[Twig | int] = list(twig.children[:count])
    if count and count < len(twig.children):
        entries.append(len(twig.children) - count)
    if top:
        return [("", "", entry) for entry in entries]
    last = len(entries) - 1
    return [
        (f"{below}└─ ", f"{below}   ", entry) if place == last else (f"{below}├─ ", f"{below}│  ", entry)
        for place, entry in enumerate(entries)
    ]


def opened(root: Twig, limit: int) -> dict[int, int]:
    """By ``id()`` of a twig, how many of its children to show: breadth first, until ``limit`` are spent."""
    shown: dict[int, int] = {}
    queue = deque([root])
    while queue and limit > 0:
        twig = queue.popleft()
        count = len(twig.children)
        if count > limit:
            count = max(limit // 2, limit if twig is root else 0)
        if count:
            shown[id(twig)] = count
            limit -= count
            queue.extend(twig.children[:count])
    return shown
