"""The report of ``transload explain``: the cause of each error, what to do, and what was seen on this machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.render.lines import BLANK, GLUE, Block, Prose, layout, note, plain
from transload.render.words import plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.explaining.result import Answer, Explanation, FileHere, MachineHere, Unexplained

__all__ = ["as_text", "remaining_steps", "report"]


_SAID = 300
_SIGNS = {"cause": ("✗ ", "bad"), "frame": ("✗ ", "bad"), "remark": ("· ", "dim")}
_NEAR = 160
_NEXT = ("If it is about a file: transload check FILE. If it is about the GPU: transload doctor.",)


def as_text(explanation: Explanation) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(report(explanation), Style()))


def report(explanation: Explanation) -> Iterator[Block]:
    """Everything ``transload explain`` says."""
    parts = (*map(_answer, explanation.answers), *map(_unknown, explanation.unknown))
    for index, part in enumerate(parts):
        if index:
            yield BLANK
        yield from part
    yield from _steps(_NEXT if explanation.unknown else ())
    if explanation.shortened:
        yield BLANK
        yield note("the text is long: only its end was read")


def _answer(answer: Answer) -> Iterator[Block]:
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
    yield from _steps(remaining_steps(answer))


_ALIKE = 0.75
"""The share of the shorter sentence's words that must be in the other one for both to ask for the same."""
_FEWEST = 3
_SMALL = frozenset(("the", "and", "with", "its", "for", "from", "that", "this", "are", "not", "where", "into", "then"))


def remaining_steps(answer: Answer) -> tuple[str, ...]:
    """The steps of an answer that what was seen on this machine does not ask for already.

    The doctor's pages are left out where this machine shows the cause: one of them is it, and says more about itself.
    """
    from transload.explaining.result import doctor_steps

    machine = answer.machine.fix if answer.machine and answer.machine.fits else ()
    if machine and answer.causes and answer.fix == doctor_steps(answer.causes):
        return ()
    shown = (*machine, *(answer.file.fix if answer.file and not answer.file.ok else ()))
    groups: list[list[str]] = []  # each sentence with the commands and the Python below it
    for line in answer.fix:
        if groups and line.startswith(("$ ", "| ")):
            groups[-1].append(line)
        else:
            groups.append([line])
    return tuple(
        line
        for sentence, *commands in groups
        if not (all(command in shown for command in commands) and any(_alike(sentence, other) for other in shown))
        for line in (sentence, *commands)
    )


def _alike(one: str, other: str) -> bool:
    if one == other:
        return True
    first, second = (
        {word.removesuffix("s") for word in re.findall(r"[a-z_]{3,}", line.lower())} - _SMALL for line in (one, other)
    )
    common = len(first & second)
    return common >= _FEWEST and common >= _ALIKE * min(len(first), len(second))


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
    same = "; torch.load gives the same error for it" if file.same else ""
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
        yield Prose((("The known texts that are most similar, but not the same:", ""),), lead=(("    ", ""),))
    for near in each.nearest:
        why = f" ({near.why})" if near.why else ""
        yield Prose(
            ((f"{printable(near.says, _NEAR)}{why}", "dim"), (f"  {near.code}", "dim")), lead=(("    · ", "dim"),)
        )
