"""What ``explain`` returns: the causes in a text, what to do about each, what this machine shows; and its report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transload.frozen import Plain, Reported
from transload.render.lines import BLANK, Block, Prose, as_text, note
from transload.render.words import plural, printable


class FileCheck(Plain):
    """A check of the file that the text names. ``same``: ``torch.load`` of this file raises the same error."""

    path: str
    ok: bool
    verdict: str
    same: bool
    findings: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


class MachineCheck(Plain):
    """The doctor's diagnosis of this machine. ``fits``: it can be the cause of the error."""

    status: str
    fits: bool
    code: str = ""
    title: str = ""
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


class Answer(Plain):
    """A known error. ``said`` is its line in the text, ``line`` the number of that line, ``times`` how often it occurs.

    ``cause`` is what it means, ``fix`` what to do; lines that begin with ``$ `` are commands, with ``| `` Python.
    ``wrong`` says which advice in the message is wrong. ``causes`` are codes of the doctor's pages on possible causes.
    ``values`` are the numbers and names in the message.
    """

    code: str
    kind: str
    cause: str
    fix: tuple[str, ...] = ()
    wrong: str = ""
    said: str = ""
    line: int = 0
    times: int = 1
    torch: str = ""
    causes: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    machine: MachineCheck | None = None
    file: FileCheck | None = None

    @property
    def doc(self) -> str:
        """Where the documentation explains it."""
        return f"docs/errors.md#{self.code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "values": dict(self.values), "doc": self.doc}


class Near(Plain):
    """A known message that is similar to an unknown one; if the words agree, ``why`` says what differs."""

    code: str
    says: str
    likeness: float
    why: str = ""


class Unexplained(Plain):
    """An unknown error, and the most similar known ones.

    ``normalised`` is ``said`` with ``…`` for paths, addresses and numbers: it is the same in two reports of an error,
    and reveals nothing about the machine.
    """

    said: str
    line: int
    nearest: tuple[Near, ...] = ()
    normalised: str = ""


class Explanation(Plain, Reported):
    """What a text means: ``answers`` for the known errors, and the ``unknown`` errors.

    ``shortened``: only the end of the text was read.
    """

    answers: tuple[Answer, ...] = ()
    unknown: tuple[Unexplained, ...] = ()
    shortened: bool = False

    @property
    def known(self) -> bool:
        """Whether any of its errors is known; a harmless remark counts only if there is nothing else."""
        return any(answer.kind != "remark" for answer in self.answers) or bool(self.answers and not self.unknown)

    def __bool__(self) -> bool:
        return self.known

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {"schema": 1, "known": self.known, **super().to_dict()}

    def __str__(self) -> str:
        """The answer as ``transload explain`` prints it, without colour."""
        return as_text(report(self))


def doctor_steps(codes: Sequence[str]) -> tuple[str, ...]:
    """The ``fix`` for an answer without one: the advice of the doctor's pages on its ``causes``."""
    from transload.diagnose.tables import fix, title

    if len(codes) == 1:
        return (fix(codes[0]),)
    steps = (f"If {title(code)} [{code}]: {fix(code)}" for code in codes)
    return ("Most often it is one of these; transload doctor shows which:", *steps)


# -- the report

_SAID = 300
_NEAR = 160
_MARGIN = "    "
_DEEPER = "          "
_SIGNS = {"cause": ("✗ ", "bad"), "frame": ("✗ ", "bad"), "remark": ("· ", "dim")}
_NEXT = (
    "If it is about a file: transload check FILE. If it is about the GPU: transload doctor.",
    (
        "To report it, include all of the text, from its first line on; transload doctor --json, which has the "
        "versions and no names; and, if it is about a file, transload inspect FILE --json. If the text is private, "
        'transload explain --json has it without paths and numbers, as "normalised".'
    ),
)


def report(explanation: Explanation) -> Iterator[Block]:
    """Everything ``transload explain`` says."""
    for index, answer in enumerate(explanation.answers):
        if index:
            yield BLANK
        yield from _answer(answer)
    for index, each in enumerate(explanation.unknown):
        if index or explanation.answers:
            yield BLANK
        line = f"  line {each.line}" if each.line else ""
        yield Prose((("not known", "strong"), (line, "dim")), lead=(("? ", "trust"),))
        yield Prose(((printable(each.said, _SAID), "dim"),), lead=_MARGIN)
        if each.nearest:
            yield Prose("The known texts that are most similar, but not the same:", lead=_MARGIN)
        for near in each.nearest:
            why = f" ({near.why})" if near.why else ""
            yield Prose(((f"{printable(near.says, _NEAR)}{why}  {near.code}", "dim"),), lead=(("    · ", "dim"),))
    if explanation.unknown:
        yield from _steps(_NEXT)
    if explanation.shortened:
        yield BLANK
        yield note("the text is long: only its end was read")


def _answer(answer: Answer) -> Iterator[Block]:
    yield Prose(((printable(answer.cause, None), "strong"), (f"  {answer.code}", "dim")), lead=(_SIGNS[answer.kind],))
    times = f"{plural(answer.times, 'time')}: " if answer.times > 1 else ""
    line = f"line {answer.line}: " if answer.line else ""
    yield Prose(((printable(answer.said, _SAID), "dim"),), lead=((f"{_MARGIN}{line}{times}", "dim"),))
    if answer.wrong:
        yield Prose(printable(answer.wrong, None), lead=(("  ! ", "trust"),))
    if machine := answer.machine:  # what the doctor found: the cause itself, another one, or none
        another = "this machine has another fault: " if machine.code else ""
        which = "this machine shows it: " if machine.fits else another
        words = ((printable(which + machine.title, None), ""), (f"  {machine.code}" if machine.code else "", "dim"))
        yield Prose(words, lead=(("  here    ", "good" if machine.fits else "dim"),))
        for text in machine.evidence[:3] if machine.code else ():
            yield Prose(((printable(text, 300), "dim"),), lead=_DEEPER)
        yield from _steps(machine.fix if machine.fits else ())
    if file := answer.file:
        same = "; torch.load gives the same error for it" if file.same else ""
        text = f"{printable(file.path, 200)}: {printable(file.verdict, None)}{same}"
        yield Prose(text, lead=(("  here    ", "good" if file.ok else "bad"),))
        for title in file.findings:
            if title not in file.verdict:
                yield Prose(((printable(title, None), "dim"),), lead=_DEEPER)
        yield from _steps(file.fix if not file.ok else ())
    yield from _steps(remaining_steps(answer))


def _steps(fix: Sequence[str]) -> Iterator[Block]:
    """Sentences with an arrow; commands and Python on their own lines, never folded, to be copied."""
    for line in fix:
        if line.startswith(("$ ", "| ")):
            yield Prose(printable(line.removeprefix("| "), None), lead="      ", whole=True)
        else:
            yield Prose(printable(line, None), lead=(("  → ", "good"),))


_ALIKE = 0.75  # two sentences ask for the same if they share this part of the shorter one's words
_FEWEST = 3
_SMALL = frozenset(("the", "and", "with", "its", "for", "from", "that", "this", "are", "not", "where", "into", "then"))


def remaining_steps(answer: Answer) -> tuple[str, ...]:
    """The steps of an answer that the checks of this machine and file do not already ask for.

    If this machine has the cause, the advice for all possible causes is left out: the diagnosis says more.
    """
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
    first, second = (
        {word.removesuffix("s") for word in re.findall(r"[a-z_]{3,}", line.lower())} - _SMALL for line in (one, other)
    )
    common = len(first & second)
    return one == other or (common >= _FEWEST and common >= _ALIKE * min(len(first), len(second)))
