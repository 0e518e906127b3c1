"""A rule: a cause with a stable code, and a pure function that looks for it on a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from transload.findings import Finding, Severity

if TYPE_CHECKING:
    from transload.diagnose.case import Case

__all__ = ["LAYERS", "RULES", "Layer", "Lines", "Match", "Rule", "page_only", "rule"]

Lines = tuple[str, ...]


class Layer(NamedTuple):
    """One link of the chain from the card to the kernel that runs on it.

    Faults of one chain follow from one another: the first broken layer is the cause of the others. Faults of
    different chains are independent.
    """

    name: str
    words: str
    chain: str


LAYERS: tuple[Layer, ...] = (
    Layer("python", "Python environment", "torch"),
    Layer("build", "installed torch", "torch"),
    Layer("torch-libraries", "libraries torch loads", "torch"),
    Layer("hardware", "GPU", "machine"),
    Layer("kernel", "kernel driver", "machine"),
    Layer("surroundings", "container, scheduler, service", "machine"),
    Layer("nodes", "device nodes", "machine"),
    Layer("libraries", "driver libraries", "machine"),
    Layer("driver", "CUDA driver", "machine"),
    Layer("variables", "environment variables", "variables"),
    Layer("fit", "compatibility", "fit"),
    Layer("run", "running torch", "run"),
    Layer("extensions", "packages using torch", "extensions"),
)
"""In the order in which to fix them."""


class Match(NamedTuple):
    """What a rule saw on one machine. Empty lines are left out.

    ``fix`` are lines in order: a command begins with ``$ ``, anything else is a sentence. ``title`` replaces the
    rule's if the check knows more. ``likely`` says that the evidence fits but does not prove it.
    """

    evidence: Lines
    fix: Lines = ()
    title: str = ""
    severity: Severity = "error"
    likely: bool = False


Check = Callable[["Case"], Match | None]


class Rule(NamedTuple):
    """A cause: its stable code and the layer it breaks. Its page is docs/doctor/CODE.md.

    A ``symptom`` is reported only if no fault explains it: it says what happened, not why. ``check`` is ``None`` for
    what a machine cannot show (a program's own fault, another system): the page is all there is.
    """

    code: str
    layer: str
    title: str
    check: Check | None = None
    symptom: bool = False
    likely: bool = False

    @property
    def fix(self) -> str:
        """What its page says to do."""
        from transload.diagnose.pages import section

        return section(self.code, "Fix")

    def finding(self, case: Case) -> Finding | None:
        """What it says about a machine."""
        match = case.match(self)
        if match is None:
            return None
        title = f"{'probably: ' if self.likely or match.likely else ''}{match.title or self.title}"
        evidence, fix = (tuple(filter(None, lines)) for lines in (match.evidence, match.fix))
        return Finding(self.code, match.severity, title, evidence, fix)


RULES: dict[str, Rule] = {}
"""Every rule by its code, in the order in which they are checked: ``catalogue`` imports the modules that fill it."""


def rule(code: str, layer: str, title: str, *, symptom: bool = False, likely: bool = False) -> Callable[[Check], Check]:
    """Make the decorated function the check of a new rule. In a layer the first that matches is the cause."""

    def add(check: Check) -> Check:
        RULES[code] = Rule(code, layer, title, check, symptom, likely)
        return check

    return add


def page_only(code: str, layer: str, title: str) -> None:
    """Add a cause that the facts of a machine cannot show: only its page exists."""
    RULES[code] = Rule(code, layer, title)
