"""Tensor names as a tree, with repetition folded: thirty-two equal layers become one line, followed by one of them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from re import compile as regex
from typing import TYPE_CHECKING

from transload.frozen import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.contents import Tensor

_SEPARATOR = regex(r"(?=[./])")
_DIGITS = regex(r"[0-9]{1,18}")
_DEEPEST = 48  # a name of a million dots is one long name, not a million levels
_ALIKE = 2  # this many branches are folded if their names differ only in a number,
_ALIKE_TENSORS = 3  # this many single tensors,
_ALIKE_UNNUMBERED = 8  # and this many branches or tensors of the same structure under any names


class Twig(NamedTuple):
    """A branch or a tensor of the tree; or several equal ones, with the ``children`` of the first.

    ``label`` begins with the separator after its parent's label. ``copies`` is the number of equal ones; ``tensors``
    and ``nbytes`` count all of them. ``branches`` counts the children, also those for which there is no room.
    """

    label: str
    tensor: Tensor | None
    children: list[Twig]
    branches: int
    tensors: int
    nbytes: int
    copies: int = 1

    @property
    def name(self) -> str:
        """The label without the separator."""
        return self.label[1:] if self.label[:1] in ("/", ".") else self.label

    @property
    def hidden(self) -> int:
        """The number of children for which there is no room."""
        return self.branches - len(self.children)


def tensor_tree(tensors: Iterable[Tensor], limit: int) -> Twig:
    """The tree of all tensors, by their names split at dots and slashes, with at most ``limit`` twigs.

    >>> from transload.contents import Tensor
    >>> def tensor(name): return Tensor((name,), name, "float32", (2,), (1,), "cpu", None)
    >>> [(twig.label, twig.copies) for twig in tensor_tree(map(tensor, ["w.0.a", "w.1.a", "b"]), 9).children]
    [('w.0 … 1', 2), ('b', 1)]
    """
    named = [(_SEPARATOR.split(tensor.name, _DEEPEST), tensor) for tensor in tensors]
    root = _branch("", _twigs(_grow(named, 0, {}).below))
    queue = deque([root])
    while queue:  # breadth first: upper levels take precedence
        twig = queue.popleft()
        count = len(twig.children)
        if count > limit:
            count = max(limit // 2, limit if twig is root else 0)
        limit -= count
        del twig.children[count:]
        queue.extend(twig.children)
    return root


def _branch(label: str, children: list[Twig], copies: int = 1) -> Twig:
    tensors, nbytes = sum(child.tensors for child in children), sum(child.nbytes for child in children)
    return Twig(label, None, children, len(children), copies * tensors, copies * nbytes, copies)


class _Branch(NamedTuple):
    """The tensors whose names begin with the same components: those with no further one, and branches by the next one.

    Branches with the same number ``form`` look the same.
    """

    form: int
    tensors: list[Tensor]
    below: dict[str, _Branch]


def _grow(named: list[tuple[list[str], Tensor]], depth: int, forms: dict[object, int]) -> _Branch:
    own: list[Tensor] = []
    inside: dict[str, list[tuple[list[str], Tensor]]] = {}
    for each in named:
        if len(each[0]) == depth:
            own.append(each[1])
        else:
            inside.setdefault(each[0][depth], []).append(each)
    below = {step: _grow(inner, depth + 1, forms) for step, inner in inside.items()}
    looks = [(t.dtype, t.shape, t.device, t.kind, t.cls) for t in own]
    form = (*looks, *below, *[branch.form for branch in below.values()])
    return _Branch(forms.setdefault(form, len(forms)), own, below)


def _twigs(below: dict[str, _Branch]) -> list[Twig]:
    """The children of a branch, in order; similar ones are folded into the first of them."""
    alike: dict[tuple[int, int, str], list[str]] = {}
    for step, branch in below.items():
        pattern, numbers = _DIGITS.subn("#", step)
        # Names without a number are grouped by form alone.
        alike.setdefault((branch.form, numbers, pattern if numbers else _separator(step)), []).append(step)
    groups: dict[str, list[str]] = {}
    for (_, numbers, _), group in alike.items():
        least = _ALIKE_UNNUMBERED if not numbers else _ALIKE if below[group[0]].below else _ALIKE_TENSORS
        groups |= {group[0]: group} if len(group) >= least else {each: [each] for each in group}
    twigs: list[Twig] = []
    for step in (each for each in below if each in groups):
        separator, copies, children = _separator(step), len(groups[step]), _twigs(below[step].below)
        label = separator + _label([each.removeprefix(separator) for each in groups[step]])
        # Usually one twig, but more if several tensors have the same name.
        twigs += [Twig(label, each, [], 0, copies, each.nbytes * copies, copies) for each in below[step].tensors]
        if len(children) == 1 and copies == 1:  # a chain of single branches reads better as one name
            twigs.append(children[0]._replace(label=label + children[0].label))
        elif children:
            twigs.append(_branch(label, children, copies))
    return twigs


def _separator(step: str) -> str:
    return step[:1] if step.startswith(("/", ".")) else ""


def _label(names: list[str]) -> str:
    """``0 … 31`` for consecutive numbers, ``0, 2, 4 … 62`` for others, in numerical order."""
    numbered = sorted(([int(digits) for digits in _DIGITS.findall(name)], place) for place, name in enumerate(names))
    names = [names[place] for _, place in numbered]
    if len(names) == 1:
        return names[0]
    if all(len(a) == 1 and b == [a[0] + 1] for (a, _), (b, _) in pairwise(numbered)):
        return f"{names[0]} … {names[-1]}"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} … {names[-1]}"


def tree_rows(twig: Twig, guide: str = "", *, top: bool = True) -> Iterator[tuple[str, Twig | int]]:
    """The lines of the drawn tree: a guide and a twig; or how many more siblings there is no room for."""
    below: list[Twig | int] = [*twig.children]
    below += [twig.hidden] if twig.hidden and twig.children else []
    for left, each in zip(range(len(below) - 1, -1, -1), below, strict=True):
        corner, bar = ("", "") if top else ("├─ ", "│  ") if left else ("└─ ", "   ")
        yield guide + corner, each
        if isinstance(each, Twig):
            yield from tree_rows(each, guide + bar, top=False)
