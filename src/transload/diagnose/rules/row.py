"""What a rule is: a row of the table of causes, a pure function from a machine to what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transload.findings import Finding, Severity
from transload.machine import Machine

__all__ = ["LAYERS", "Check", "Layer", "Row", "Seen", "Table"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One link of the chain from the card to the kernel that runs on it.

    Faults of one chain follow from one another: the first broken layer is the cause of the others. Faults of
    different chains are independent.
    """

    name: str
    words: str
    chain: str


LAYERS: tuple[Layer, ...] = (
    Layer("python", "the Python environment", "torch"),
    Layer("build", "the torch that is installed", "torch"),
    Layer("torch-libraries", "the libraries torch loads", "torch"),
    Layer("hardware", "a GPU in the machine", "machine"),
    Layer("kernel", "its kernel driver", "machine"),
    Layer("surroundings", "container, scheduler, service", "machine"),
    Layer("nodes", "device nodes", "machine"),
    Layer("libraries", "driver libraries", "machine"),
    Layer("driver", "the CUDA driver starts", "machine"),
    Layer("variables", "environment variables", "variables"),
    Layer("fit", "driver and card fit the build", "fit"),
    Layer("run", "torch computes on the GPU", "run"),
    Layer("extensions", "packages beside torch", "extensions"),
)
"""In the order in which to fix them."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rule saw on one machine.

    ``fix`` are lines in order: a command begins with ``$ ``, anything else is a sentence. ``title`` stands in for the
    row's where the rule knows more. ``likely`` says that the evidence fits and does not prove.
    """

    evidence: tuple[str, ...]
    fix: tuple[str, ...] = ()
    title: str = ""
    severity: Severity = "error"
    likely: bool = False


Check = Callable[[Machine], Seen | None]


@dataclass(frozen=True, slots=True)
class Row:
    """A cause: its stable code, the layer it breaks, and the page that ``--explain`` prints.

    ``about`` says what it is and how it shows, in paragraphs; ``fix`` what to do in general; ``avoid`` what not to do.
    A ``symptom`` is only told where no fault explains it: it says what happened, not why. ``check`` is ``None`` for
    what a machine cannot show (a program's own fault, another system): the page is all there is. ``sources`` are
    public threads or pages.
    """

    code: str
    title: str
    about: str
    fix: str
    layer: str
    check: Check | None = None
    avoid: str = ""
    symptom: bool = False
    likely: bool = False
    sources: tuple[str, ...] = ()

    def finding(self, machine: Machine) -> Finding | None:
        """What it has to say about a machine."""
        seen = self.check(machine) if self.check else None
        if seen is None:
            return None
        likely = self.likely or seen.likely
        title = f"{'probably: ' if likely else ''}{seen.title or self.title}"
        return Finding(self.code, seen.severity, title, seen.evidence, seen.fix)


if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import NotRequired, Unpack  # of the type checker; nothing imports it at run time

    class _Page(TypedDict):
        about: str
        fix: str
        avoid: NotRequired[str]
        layer: NotRequired[str]
        symptom: NotRequired[bool]
        likely: NotRequired[bool]
        sources: NotRequired[tuple[str, ...]]


class Table:
    """The rows of one file, in the order in which they are asked.

    >>> rows = Table("nodes")
    >>> @rows.row("D99", "a node is missing", about="It is not there.", fix="Make it.")
    ... def missing(machine: Machine) -> Seen | None:
    ...     return Seen(("/dev/x is not there",))
    >>> rows.rows[0].finding(Machine()).evidence
    ('/dev/x is not there',)
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.rows: list[Row] = []

    def row(self, code: str, title: str, **rest: Unpack[_Page]) -> Callable[[Check], Check]:
        """Make the decorated function the check of a new row."""

        def add(check: Check) -> Check:
            rest.setdefault("layer", self.layer)
            self.rows.append(Row(code, title, check=check, **rest))
            return check

        return add

    def page(self, code: str, title: str, **rest: Unpack[_Page]) -> None:
        """A row that no machine shows by itself: only its page exists."""
        rest.setdefault("layer", self.layer)
        self.rows.append(Row(code, title, **rest))
