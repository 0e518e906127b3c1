"""The report of ``transload doctor``: the verdict and the fix first, then everything that led to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose.rules.rule import LAYERS
from transload.machine import Unknown
from transload.render.doctor_chain import ORDER, Link, cards, chain, devices, torch_words
from transload.render.escape import printable
from transload.render.lines import BLANK, GLUE, Block, Line, Prose, heading, layout, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transload.diagnose.verdict import Diagnosis
    from transload.findings import Finding

__all__ = ["as_text", "headline", "page", "report", "steps"]

_WORDS = {layer.name: layer.words for layer in LAYERS}
_WIDTH = max(map(len, _WORDS.values()))
_MARKS = {"ok": ("✓", "good"), "broken": ("✗", "bad"), "idle": ("–", "dim"), "unknown": ("?", "trust")}
_SIGNS = {"warning": ("!", "trust"), "note": ("·", "dim")}
_EVIDENCE = 8
_ROLE = {"ok": "good", "no-gpu": "good", "degraded": "trust", "broken": "bad"}


def as_text(diagnosis: Diagnosis) -> str:
    """The report as a pipe gets it: redacted but for what a fix says to type, without colour."""
    from transload.diagnose.redact import names_here, redacted
    from transload.render.style import Style

    blocks = report(redacted(diagnosis, names_here(), runnable=True))
    return "\n".join(plain(line) for line in layout(blocks, Style()))


def report(diagnosis: Diagnosis) -> Iterator[Block]:
    """Everything ``transload doctor`` says when nothing special is asked for."""
    yield Prose(headline(diagnosis))
    causes = [finding for finding in diagnosis.findings if finding.severity == "error"]
    rest = [finding for finding in diagnosis.findings if finding.severity != "error"]
    if diagnosis.cause is not None:
        first, *more = (*causes, *rest)
        yield from _explained(first)
        causes, rest = [f for f in more if f in causes], [f for f in more if f not in causes]
    for place, finding in enumerate(causes, 2):
        yield BLANK
        yield Prose((*_titled(finding), _code(finding)), lead=((f"Then {place}: ", "bad"),))
        yield from _explained(finding)
    for finding in rest:
        yield BLANK
        yield from _remark(finding)
    yield from _links(diagnosis)
    yield from _unknown(diagnosis)
    yield from _hints(diagnosis)


def headline(diagnosis: Diagnosis) -> Line:
    """The verdict in one sentence."""
    role = _ROLE[diagnosis.status]
    if diagnosis.cause is None:
        return ((_well(diagnosis), role),)
    errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    subject = f"{_subject(diagnosis)}{f', for {errors} reasons; the first' if errors > 1 else ''}"
    joint = ", " if diagnosis.cause.title.startswith("probably: ") else ": "
    return ((subject, role), (joint, role), *_titled(diagnosis.cause), _code(diagnosis.cause))


def _subject(diagnosis: Diagnosis) -> str:
    """What does not work, by what was seen and not by what was concluded."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    if run.cuda_works:
        return "CUDA works, but there is a problem"
    if diagnosis.status == "degraded":
        return "torch works, but there is a problem" if run.answer.answered else "There is a problem"
    if _is_unexamined(diagnosis):
        return "It is unknown whether CUDA works"
    imported = run.step("import")
    absent = machine.torch.first is None and not isinstance(machine.torch.installs, Unknown)
    if absent or machine.torch.shadow or (run.answer.state != "unasked" and not (imported and imported.ok)):
        return "torch does not work"
    if machine.driver.cuda.works or not machine.hardware.present:
        return "torch cannot use the GPU" if machine.hardware.present else "torch does not work as it should"
    return "CUDA does not work"


def _is_unexamined(diagnosis: Diagnosis) -> bool:
    """Whether the cause is that nothing could be asked."""
    return diagnosis.cause is not None and diagnosis.cause.code == "X13"


def _well(diagnosis: Diagnosis) -> str:
    """What to say of a machine that has nothing to repair."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    first = machine.torch.first
    torch = f"torch {printable(run.version)}" if run.version else torch_words(first) if first else "torch"
    if run.cuda_works:
        return f"CUDA works: {torch} computed on {devices(machine)}"
    if diagnosis.status == "no-gpu":
        unread = isinstance(machine.hardware.pci, Unknown)
        given = "was given to this process" if machine.hardware.present else ""
        where = given or ("was found" if unread else "in this machine")
        works = f"; {torch} works on the CPU" if run.answer.answered else f"; {torch} is installed" if first else ""
        return f"No GPU {where}{works}. Nothing to repair."
    if machine.driver.cuda.works:
        return f"The CUDA driver works, on {cards(machine)}; torch was not run"
    return _elsewhere(diagnosis, torch)


def _elsewhere(diagnosis: Diagnosis, torch: str) -> str:
    """What to say where there is an accelerator, and CUDA is not what works on it."""
    run = diagnosis.machine.torch_run
    others = ", ".join(printable(each.name or each.kind) for each in diagnosis.machine.accelerators if each.usable)
    if run.backends:
        return f"{torch} works with {' and '.join(map(printable, run.backends))}{f', on {others}' if others else ''}"
    if others:
        return f"No NVIDIA GPU, but {others}; no problem found with {torch}"
    return "No cause was found"


def _titled(finding: Finding) -> Line:
    return ((printable(finding.title, None), "strong"),)


def _code(finding: Finding) -> tuple[str, str]:
    return (f"{GLUE}{GLUE}[{finding.code}]", "dim")


def _explained(finding: Finding) -> Iterator[Block]:
    """The evidence for a cause, and how to repair it."""
    yield from _evidence(finding, "  ")
    if finding.fix:
        yield BLANK
        yield Prose((("Fix", "strong"),))
        yield from steps(finding.fix)


def _evidence(finding: Finding, indent: str) -> Iterator[Block]:
    for text in finding.evidence[:_EVIDENCE]:
        yield Prose(((printable(text, 400), ""),), lead=((indent, ""),))
    if len(finding.evidence) > _EVIDENCE:
        yield Prose(((f"… and {len(finding.evidence) - _EVIDENCE:,} more, in --json", "dim"),), lead=((indent, ""),))


def steps(fix: Sequence[str], indent: str = "  ") -> Iterator[Block]:
    """What to do, line by line. Commands and what belongs into a file are never folded: they are there to be copied."""
    for line in fix:
        copied = line.startswith(("$ ", "| "))
        mark = line[:2] if copied else ""
        text = printable(line.removeprefix(mark), None)
        yield Prose(((text, "strong" if mark == "$ " else ""),), lead=((indent, ""), (mark, "dim")), whole=copied)


def _remark(finding: Finding) -> Iterator[Block]:
    """A warning or a note, smaller than a cause."""
    sign, role = _SIGNS[finding.severity]
    yield Prose((*_titled(finding), _code(finding)), lead=((f"{sign} ", role),))
    yield from _evidence(finding, "    ")
    yield from steps(finding.fix, "    ")


def _links(diagnosis: Diagnosis) -> Iterator[Block]:
    """The chain of layers, each with what was seen of it and what follows from the cause."""
    layers = _layers(diagnosis)
    yield from heading("From the card to torch")
    for link in _complete(chain(diagnosis.machine), layers):
        yield from _link(link, layers.get(link.layer, ()), diagnosis)


def _layers(diagnosis: Diagnosis) -> Mapping[str, Sequence[Finding]]:
    """The findings of each layer."""
    from transload.diagnose.rules.catalogue import BY_CODE

    out: dict[str, list[Finding]] = {}
    for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
        if finding.code in BY_CODE:
            out.setdefault(BY_CODE[finding.code].layer, []).append(finding)
    return out


def _complete(links: Sequence[Link], layers: Mapping[str, Sequence[Finding]]) -> list[Link]:
    """The links, and those that only a finding mentions."""
    by_layer = {link.layer: link for link in links}
    told = {layer for layer, found in layers.items() if any(finding.severity != "note" for finding in found)}
    return [by_layer.get(layer, Link(layer, "idle")) for layer in ORDER if layer in by_layer or layer in told]


def _link(link: Link, found: Sequence[Finding], diagnosis: Diagnosis) -> Iterator[Block]:
    muted = {each.finding.code: each.because for each in diagnosis.muted}
    own = [finding for finding in found if finding.code not in muted and finding.severity != "note"]
    mark, role = _mark(link, own, diagnosis)
    codes = "".join(_code(finding)[0] for finding in own)
    words = f"{_WORDS[link.layer]:<{_WIDTH}}  "
    dim = "dim" if mark == "–" else ""
    yield Prose(((link.text, dim), (codes, "dim")), lead=(("  ", ""), (f"{mark} ", role), (words, dim)))
    for finding in found:
        if finding.code in muted:
            words = "" if _is_symptom(finding) else f": {printable(finding.title, None)}"
            text = f"because of {muted[finding.code]}{words}"
            yield Prose(((text, "dim"), _code(finding)), lead=((" " * (_WIDTH + 6), ""),))


def _mark(link: Link, own: Sequence[Finding], diagnosis: Diagnosis) -> tuple[str, str]:
    severities = {finding.severity for finding in own}
    if own and link.state == "unknown" and all(map(_is_symptom, own)):
        return _MARKS["unknown"]
    if "error" in severities:
        return _MARKS["broken"]
    if "warning" in severities:
        return _SIGNS["warning"]
    if link.state == "broken":  # by the cause; or where nobody needs it
        return ("–" if diagnosis.ok else "✗"), "dim"
    return _MARKS[link.state]


def _unknown(diagnosis: Diagnosis) -> Iterator[Block]:
    """What could not be found out and would have helped."""
    told = [f"{probe}: {why}" for probe, why in diagnosis.machine.problems.items()]
    log, cause = diagnosis.machine.kernel.log, diagnosis.cause
    if cause is not None and isinstance(log, Unknown) and _unsure(cause) and log.reason not in " ".join(cause.evidence):
        told.append(f"the kernel log: {log.reason}")
    if told:
        yield BLANK
        yield Prose(((printable("; ".join(told), 600), ""),), lead=(("Unknown  ", "trust"),))


def _unsure(cause: Finding) -> bool:
    return cause.title.startswith("probably: ") or _is_symptom(cause)


def _is_symptom(finding: Finding) -> bool:
    """Whether it says what happened and not why."""
    from transload.diagnose.rules.catalogue import BY_CODE

    return finding.code in BY_CODE and BY_CODE[finding.code].symptom


def _hints(diagnosis: Diagnosis) -> Iterator[Block]:
    more = f"transload doctor --explain {diagnosis.cause.code} explains more; " if diagnosis.cause else ""
    yield BLANK
    yield Prose(((f"{more}--verbose shows all facts; --json is for a bug report", "dim"),))


def page(markdown: str) -> Iterator[Block]:
    """The page of a cause, from its Markdown: prose folds, what is there to be copied does not."""
    from transload.diagnose.pages import parts

    before = ""
    for kind, text in parts(markdown):
        if kind == "heading":
            yield from heading(text)
        elif kind == "title":
            code, _, title = text.partition(": ")
            yield Prose(((code, "dim"), (f"  {title}", "strong")))
        else:
            if before not in ("title", "heading", "item"):
                yield BLANK
            copied = kind == "code"
            for line in text.split("\n"):
                role = "dim" if before == "title" else ""  # the layer
                yield Prose(((line, role),), lead=(("  ", ""),) if copied else (), whole=kind != "prose")
        before = kind
