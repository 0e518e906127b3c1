"""The report of ``transload explain``: of each error the cause, what to do, and what was seen here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.escape import printable
from transload.render.lines import BLANK, GLUE, Block, Prose, layout, note, plain
from transload.render.sizes import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.explaining.result import Answer, Explanation, FileHere, MachineHere, Unexplained

__all__ = ["as_text", "report"]

_SAID = 300
_SIGNS = {"cause": ("✗ ", "bad"), "frame": ("✗ ", "bad"), "remark": ("· ", "dim")}
_NEAR = 160
_NEXT = ("If it is about a file: transload check FILE. If it is about the GPU: transload doctor.",)


def as_text(explanation: Explanation) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.style import Style

    return "\n".join(plain(line) for line in layout(report(explanation), Style()))


def report(explanation: Explanation) -> Iterator[Block]:
    """Everything ``transload explain`` says."""
    first = True
    for answer in explanation.answers:
        if not first:
            yield BLANK
        first = False
        yield from _answer(answer)
    for each in explanation.unknown:
        if not first:
            yield BLANK
        first = False
        yield from _unknown(each)
    yield from _steps(_NEXT if explanation.unknown else ())
    if explanation.shortened:
        yield BLANK
        yield note("the text is long: only its end was looked at")


def _answer(answer: Answer) -> Iterator[Block]:
    from transload.explaining.steps import beyond

    sign, role = _SIGNS[answer.kind]
    yield Prose(((printable(answer.cause, None), "strong"), (f"  {answer.code}", "dim")), lead=((sign, role),))
    times = f"{plural(answer.times, 'time')}: " if answer.times > 1 else ""
    line = f"line {answer.line}: " if answer.line else ""
    yield Prose(((printable(answer.said, _SAID), "dim"),), lead=((f"    {line}{times}", "dim"),))
    if answer.wrong:
        yield Prose(((printable(answer.wrong, None), ""),), lead=(("  ! ", "trust"),))
    if answer.machine:
        yield from _machine(answer.machine)
    if answer.file:
        yield from _file(answer.file)
    yield from _steps(beyond(answer))


def _machine(machine: MachineHere) -> Iterator[Block]:
    """What the doctor found: the cause itself, another one, or none."""
    if machine.fits:
        words = f"this machine shows it: {machine.title}"
    elif machine.code:
        words = f"this machine has another fault: {machine.title}"
    else:
        words = machine.title
    code = f"  {machine.code}" if machine.code else ""
    yield Prose(
        ((printable(words, None), ""), (code, "dim")), lead=(("  here    ", "good" if machine.fits else "dim"),)
    )
    for text in machine.evidence[:3] if machine.code else ():
        yield Prose(((printable(text, 300), "dim"),), lead=(("          ", ""),))
    if machine.fits:
        yield from _steps(machine.fix)


def _file(file: FileHere) -> Iterator[Block]:
    same = "; torch.load of it says the same" if file.same else ""
    words = f"{printable(file.path, 200)}: {printable(file.verdict, None)}{same}"
    yield Prose(((words, ""),), lead=(("  here    ", "good" if file.ok else "bad"),))
    for title in file.findings:
        if title not in file.verdict:
            yield Prose(((printable(title, None), "dim"),), lead=(("          ", ""),))
    yield from _steps(file.fix if not file.ok else ())


def _steps(fix: Sequence[str]) -> Iterator[Block]:
    """Sentences with an arrow; commands and Python by themselves, never folded, to be copied."""
    for line in fix:
        if line.startswith(("$ ", "| ")):
            shown = line if line.startswith("$") else line[2:]
            yield Prose(((printable(shown, None).replace(" ", GLUE), ""),), lead=(("      ", ""),), whole=True)
        else:
            yield Prose(((printable(line, None), ""),), lead=(("  → ", "good"),))


def _unknown(each: Unexplained) -> Iterator[Block]:
    line = f"  line {each.line}" if each.line else ""
    yield Prose((("not known", "strong"), (line, "dim")), lead=(("? ", "trust"),))
    yield Prose(((printable(each.said, _SAID), "dim"),), lead=(("    ", ""),))
    if each.nearest:
        yield Prose((("The known texts that are most like it, and are not it:", ""),), lead=(("    ", ""),))
    for near in each.nearest:
        why = f" ({near.why})" if near.why else ""
        yield Prose(
            ((f"{printable(near.says, _NEAR)}{why}", "dim"), (f"  {near.code}", "dim")), lead=(("    · ", "dim"),)
        )
