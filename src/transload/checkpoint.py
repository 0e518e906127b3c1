"""``Checkpoint``, what ``inspect`` returns: the facts of ``contents``, shown in a REPL and a notebook by ``render``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transload.contents import *
from transload.contents import Contents, Leaf, Part, Record, Storage, Tensor, Value
from transload.findings import Problem, Problems
from transload.nodes import Pickle


class Checkpoint(Contents):
    """Everything known about a checkpoint without running any of it.

    >>> import transload
    >>> checkpoint = transload.inspect("model.pt")        # doctest: +SKIP
    >>> checkpoint.safety, checkpoint.integrity           # doctest: +SKIP
    ('data-only', 'unchecked')

    ``format`` is one of the names in ``FORMATS``; ``flavour`` a known structure inside it (``"Lightning"``). ``facts``
    are further facts about the container (``("byteorder", "little")``). ``problems`` is what the reader found wrong,
    ``findings`` what that means. ``pickles`` are the graphs of inert nodes, for the parts of transload that rebuild
    objects; they are not in ``to_dict()``.
    """

    def __repr__(self) -> str:
        """At most ten lines: what it is, who wrote it, its size and devices, what is wrong."""
        from transload.render.checkpoint import summary_lines

        return "\n".join(summary_lines(self)[:10])

    def _repr_html_(self) -> str:
        """The notebook view: the same summary and the tensors, without scripts."""
        from transload.render.html import fragment

        return "".join(fragment(self))

    def to_html(self) -> str:
        """A report for a browser, as ``transload inspect --html`` writes it: one page that needs no network."""
        from transload.render.html_report import page

        return "".join(page([self]))


class Draft:
    """A checkpoint while it is read: what its reader has found so far."""

    def __init__(self, path: str, format_: str, nbytes: int, problems: Iterable[Problem] = ()) -> None:
        self.path, self.format, self.nbytes = path, format_, nbytes
        self.problems = Problems(problems)
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.leaves: list[Leaf] = []
        self.records: tuple[Record, ...] = ()
        self.parts: list[Part] = []
        self.facts: list[tuple[str, str]] = []
        self.pickles: list[Pickle] = []
        self.values: list[Value] = []

    def add_tree(
        self,
        tensors: Iterable[Tensor],
        storages: Iterable[Storage],
        leaves: Iterable[Leaf],
        problems: Iterable[Problem],
        facts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Add the contents of a tree of values."""
        self.tensors += tensors
        self.storages += storages
        self.leaves += leaves
        self.problems += problems
        self.facts += facts

    def checkpoint(self, **more: Any) -> Checkpoint:
        """The checkpoint so far; ``more`` adds or replaces fields."""
        own = vars(self)
        fields: dict[str, Any] = {name: own[name] for name in Contents.__match_args__ if name in own}
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return Checkpoint(**{**fields, **lists, **more})
