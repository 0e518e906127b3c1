"""Tensor names as a tree, with repetition folded: thirty-two equal layers become one line, followed by one of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from re import compile as regex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.contents import Tensor

_SEPARATOR = regex(r"(?=[./])")
_DIGITS = regex(r"[0-9]{1,18}")
_DEEPEST = 48  # a name of a million dots is one long name, not a million levels
_ALIKE = 2  # this many branches are folded if their names differ only in a number,
_ALIKE_TENSORS = 3  # this many single tensors,
_ALIKE_UNNUMBERED = 8  # and this many branches or tensors of the same structure under any names


@dataclass(frozen=True, slots=True)
class Twig:
    """A branch or a tensor of the tree; or several equal ones, with the ``children`` of the first.

    ``label`` begins with the separator after its parent's label. ``copies`` is the number of equal ones; ``tensors``
    and ``nbytes`` count all of them.
    """

    label: str
    tensor: Tensor | None
    children: tuple[Twig, ...]
    tensors: int
    nbytes: int
    copies: int = 1

    @property
    def name(self) -> str:
        """The label without the separator."""
        return self.label[1:] if self.label[:1] in ("/", ".") else self.label


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the drawn tree: a guide and a twig; or how many more siblings there is no room for."""

    guide: str
    twig: Twig | None
    more: int = 0
    closed: bool = False
    """There is no room for the children of the twig."""


class _Branch:
    """A node of the tree under construction. ``separator`` and ``text`` are a component of a name.

    ``form`` identifies the structure below: branches of equal form look the same.
    """

    __slots__ = ("children", "form", "separator", "tensors", "text")

    def __init__(self, step: str) -> None:
        self.separator = step[:1] if step.startswith(("/", ".")) else ""
        self.text = step[len(self.separator) :]
        self.tensors: list[Tensor] = []
        self.children: dict[str, _Branch] = {}
        self.form = 0

    def measure(self, forms: dict[object, int]) -> None:
        """Compute the form, from the bottom up."""
        for child in self.children.values():
            child.measure(forms)
        looks = tuple((t.dtype, t.shape, t.device, t.kind, t.cls) for t in self.tensors)
        form = (looks, tuple((step, child.form) for step, child in self.children.items()))
        self.form = forms.setdefault(form, len(forms))


def tensor_tree(tensors: Iterable[Tensor]) -> Twig:
    """The tree of all tensors, by their names split at dots and slashes.

    >>> from transload.contents import Tensor
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
    root.measure({})
    return _branch("", _twigs(root))


def _branch(label: str, children: tuple[Twig, ...], copies: int = 1) -> Twig:
    tensors, nbytes = sum(child.tensors for child in children), sum(child.nbytes for child in children)
    return Twig(label, None, children, copies * tensors, copies * nbytes, copies)


def _twigs(branch: _Branch) -> tuple[Twig, ...]:
    """The children of a branch, in order; similar ones are folded into the first of them."""
    alike: dict[tuple[int, str, str | None], list[_Branch]] = {}
    for child in branch.children.values():
        pattern, numbers = _DIGITS.subn("#", child.text)
        # Names without a number are grouped by form alone.
        alike.setdefault((child.form, child.separator, pattern if numbers else None), []).append(child)
    groups: dict[_Branch, list[_Branch]] = {}
    for (_, _, numbered), group in alike.items():
        least = _ALIKE_UNNUMBERED if numbered is None else _ALIKE if group[0].children else _ALIKE_TENSORS
        groups |= {group[0]: group} if len(group) >= least else {each: [each] for each in group}
    return tuple(twig for child in branch.children.values() if child in groups for twig in _twig(groups[child]))


def _twig(group: list[_Branch]) -> Iterator[Twig]:
    """The twig for some equal branches: usually one, but more if several tensors have the same name."""
    first, copies = group[0], len(group)
    label = first.separator + _label([branch.text for branch in group])
    children = _twigs(first)
    for tensor in first.tensors:
        yield Twig(label, tensor, (), copies, tensor.nbytes * copies, copies)
    if len(children) == 1 and copies == 1:  # a chain of single branches reads better as one name
        yield replace(children[0], label=label + children[0].label)
    elif children:
        yield _branch(label, children, copies)


def _label(names: list[str]) -> str:
    """``0 … 31`` for consecutive numbers, ``0, 2, 4 … 62`` for others, in numerical order."""
    numbered = sorted(([int(digits) for digits in _DIGITS.findall(name)], place) for place, name in enumerate(names))
    names = [names[place] for _, place in numbered]
    if len(names) == 1:
        return names[0]
    if all(len(a) == 1 and b == [a[0] + 1] for (a, _), (b, _) in pairwise(numbered)):
        return f"{names[0]} … {names[-1]}"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} … {names[-1]}"


def tree_rows(root: Twig, limit: int) -> Iterator[Row]:
    """The tree in about ``limit`` lines. Upper levels take precedence; branches without room stay closed."""
    return _rows(root, opened(root, limit), "", top=True)


def _rows(twig: Twig, shown: dict[int, int], guide: str, *, top: bool = False) -> Iterator[Row]:
    some = shown.get(id(twig), 0)
    left = len(twig.children) - some if some else 0
    for place, child in enumerate(twig.children[:some]):
        is_last = place == some - 1 and not left
        corner, bar = ("", "") if top else ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield Row(guide + corner, child, closed=bool(child.children) and id(child) not in shown)
        yield from _rows(child, shown, guide + bar)
    if left:
        yield Row(guide if top else f"{guide}└─ ", None, more=left)


def opened(root: Twig, limit: int) -> dict[int, int]:
    """How many children of each twig to show, by ``id()``: breadth first, up to ``limit`` in total."""
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
