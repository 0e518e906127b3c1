"""The report of ``transload check``: the verdict first, then where everything lands and what prevents it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transload.loading.placement import landing
from transload.render.escape import printable
from transload.render.lines import BLANK, Block, Prose, heading, layout, note, plain
from transload.render.sizes import plural, size
from transload.render.text import findings
from transload.render.words import format_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.checking import Check
    from transload.checking.torch_says import Said
    from transload.findings import Finding
    from transload.loading.placement import Plan

__all__ = ["as_text", "report"]


_BOLD, _PLAIN = "\033[1m", "\033[0m"
_LABEL = 12
_OUTCOMES = {
    "loads": "loads it",
    "raises": "fails, as shown below",
    "unknown": "",
}


def as_text(check: Check) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.style import Style

    return "\n".join(plain(line) for line in layout(report(check), Style()))


def report(check: Check) -> Iterator[Block]:
    """Everything ``transload check`` says."""
    yield Prose(((printable(check.checkpoint.path, None), "strong"),))
    for label, words, role in _summary(check):
        yield Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))
    if check.plan.moves:
        yield from heading("where it lands", _wish(check))
        yield from landing(check.plan)
    shown = [finding for finding in check.findings if finding.code not in ("no-such-device", "too-little-memory")]
    for finding in shown:
        yield BLANK
        yield from _finding(finding)
    yield from _said(check.torch)
    if check.diagnosis.status == "broken" and check.devices.absent and _wants_more(check.plan):
        yield BLANK
        yield note("transload doctor shows how to get the GPU to work")


def _wants_more(plan: Plan) -> bool:
    """Whether a tensor would land elsewhere than it wants to, or nowhere, for lack of a device."""
    return bool(plan.refused) or any(move.reason in ("absent", "lost") for move in plan.moves)


def _summary(check: Check) -> Iterator[tuple[str, str, str]]:
    verdict = "it loads" if check.ok else f"it cannot be loaded: {check.refusal}"
    yield "here", printable(verdict, None), "good" if check.ok else "bad"
    held = f"{format_words(check.checkpoint)}, {plural(len(check.checkpoint.tensors), 'tensor')}"
    yield "file", f"{held} of {size(check.checkpoint.tensor_nbytes)}", ""
    prediction = check.checkpoint.prediction.removeprefix("torch.load ")
    yield "torch.load", printable(_OUTCOMES[check.torch.outcome] or prediction or "cannot be predicted", None), ""
    if check.checkpoint.tensors or not check.cuda:
        yield "CUDA", printable(check.cuda.reason, None), "" if check.cuda else "bad"


def _wish(check: Check) -> str:
    return f"map_location={printable(repr(check.wish), 60)}"


def _said(said: Said) -> Iterator[Block]:
    """The very words of torch; they are never folded, since somebody may search for them."""
    if said.outcome != "raises" or not (said.text or said.exact):
        return
    how = "word for word" if said.exact else "or something like it"
    yield from heading("torch.load(FILE) says", f"torch {printable(said.torch, 40)}, {how}")
    told = f"{said.error}: {said.text}" if said.text else said.error
    for line in told.replace(_BOLD, "").replace(_PLAIN, "").replace("\t", "    ").split("\n"):
        yield Prose(((printable(line, None), ""),), lead=(("  ", ""),), whole=True)


def _finding(finding: Finding) -> Iterator[Block]:
    """As ``inspect`` shows one; commands stand by themselves, to be copied."""
    commands = [at for at, line in enumerate(finding.fix) if line.startswith("$ ")]
    if not commands:
        yield from next(findings([finding]))
        return
    from transload.diagnose.report import steps

    yield from next(findings([replace(finding, fix=finding.fix[: commands[0]])]))
    yield from steps(finding.fix[commands[0] :], "    ")
