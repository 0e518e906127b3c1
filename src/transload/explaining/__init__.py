"""``transload.explain``: what an error message means, what to do about it, and whether this machine or file has it.

``logs`` splits a log into exceptions, ``matching`` finds known messages in them (described in ``pages``), and each
becomes an ``Answer``, for which ``hooks`` compute further values. Then this machine and the file that the message names
are examined: nothing is loaded, and torch is not run.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transload.errors import TransloadError, UsageError
from transload.explaining import hooks, matching
from transload.explaining.logs import BLOCK, ErrorChain, FlatText, decoded, flat, lines_of, pieces, split, unwrapped
from transload.explaining.matching import ErrorMatch, KnownError, Near
from transload.frozen import NamedTuple, Plain, replace
from transload.render import Reported
from transload.render.lines import BLANK, Block, Item, Prose
from transload.render.words import plural, printable
from transload.steps import for_windows, step_of

if TYPE_CHECKING:
    from transload.diagnose.report import Diagnosis

__all__ = ["Explanation", "explain", "explain_log", "report"]

_MOST_UNKNOWN = 5
_LONGEST = 2_000  # characters of an error that are quoted
_LONGEST_VALUE = 300
_MOST_NEAR = 100_000  # characters around an error that may name a file or an environment
_MOST_VARIANTS = 50  # answers for one code: a loop may print a text with a million different numbers


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
        from transload.judge.problems import rules

        if self.code.isupper():
            return f"docs/doctor/{self.code}.md"
        return f"docs/{'findings' if self.code in rules() else 'errors'}.md#{self.code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "values": dict(self.values), "doc": self.doc}


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

    ``shortened`` is always false: texts of any length are read completely.
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

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def doctor_steps(codes: Sequence[str]) -> tuple[str, ...]:
    """The ``fix`` for an answer without one: the advice of the doctor's pages on its ``causes``."""
    from transload.diagnose.tables import fix, title

    if len(codes) == 1:
        return (fix(codes[0]),)
    steps = (f"If {title(code)} [{code}]: {fix(code)}" for code in codes)
    return ("Most often it is one of these; transload doctor shows which:", *steps)


def explain(error: BaseException | str, *, checks: bool = True) -> Explanation:
    """The causes of the errors in a traceback, a log or an exception, and what to do about each.

    An exception is explained by the innermost known cause in its chain. With ``checks``, this machine is examined if
    the cause depends on it (torch is not run), and the file that the text names, if it exists here. Unknown errors are
    listed with the most similar known messages.

    >>> text = "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1."
    >>> answer = explain(text, checks=False).answers[0]
    >>> answer.code, dict(answer.values)["index"]
    ('device-index', '1')
    """
    if isinstance(error, BaseException):
        from traceback import format_exception

        files = tuple(_loaded_files(error))
        return _explained(format_exception(error), files, checks=checks, numbered=False)
    if not isinstance(error, str):
        raise UsageError(f"explain takes a text or an exception, not {type(error).__name__}")
    return _explained((error[at : at + BLOCK] for at in range(0, len(error), BLOCK)), checks=checks)


def explain_log(blocks: Iterable[bytes], *, checks: bool = True) -> Explanation:
    """As ``explain``, for the bytes of a log of any length, in any encoding."""
    return _explained(decoded(blocks), checks=checks)


def _explained(texts: Iterable[str], files: Sequence[str] = (), *, checks: bool, numbered: bool = True) -> Explanation:
    """Explain a text, given in parts; ``files`` are paths that are known to be the files it is about."""

    @cache
    def diagnosis() -> Diagnosis:
        from transload.diagnose import doctor

        return doctor(torch=False)

    errors = _Errors()
    divided = pieces(texts)
    number, text = next(divided)
    for following in divided:
        if matching.is_quiet(text):
            errors.skip(number, text)
        else:
            errors.add(*split(lines_of(text, number)))
        number, text = following
    chains, loose = split(lines_of(text, number))
    errors.add(chains, loose)
    if not errors.matched and number == 1:  # a short text: what somebody has pasted
        whole = matching.search(*split(lines_of(unwrapped(text))))[0]
        errors.merge(whole or matching.beginning(chains, loose) or matching.named(chains, loose))
        numbered = numbered and not errors.matched
    answers = []
    for answer, evidence in errors.answers():
        needs = evidence.error.needs if checks and answer.kind != "remark" else ()
        machine = file = None
        if "machine" in needs:
            machine = _check_machine(diagnosis(), answer.causes, evidence.around)
        if "install" in needs:
            machine = _check_install(diagnosis(), answer.code, evidence)
            answer = replace(answer, fix=machine.fix) if machine and machine.fits and machine.fix else answer  # noqa: PLW2901
        if "file" in needs and (paths := (*files, *files_in(evidence.near))):
            file = _check_file(diagnosis(), paths[0], evidence.text)
        answers.append(replace(answer, line=answer.line if numbered else 0, machine=machine, file=file))
    unexplained = (error if numbered else replace(error, line=0) for error in errors.unexplained())
    return Explanation(tuple(answers), tuple(unexplained))


def _loaded_files(error: BaseException) -> Iterator[str]:
    """The paths that torch.load was called with, from the frames of an exception and of its causes."""
    from traceback import walk_tb

    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame, _ in walk_tb(current.__traceback__):
            name = frame.f_code.co_filename.replace("\\", "/")
            if name.endswith(("torch/serialization.py", "torch/jit/_serialization.py")):
                path = frame.f_locals.get("f")
                if isinstance(path, str | os.PathLike) and os.path.exists(path):  # Path may raise
                    yield os.fsdecode(path)
        current = current.__cause__ or current.__context__


class _Evidence(NamedTuple):
    """What the checks need of the first match of an answer."""

    error: KnownError
    text: str
    near: tuple[str, str]
    around: str


class _Errors:
    """The errors of a text, added piece by piece: one answer for each known one, and the last unknown ones."""

    def __init__(self) -> None:
        self.matched: dict[tuple[Any, ...], tuple[Answer, _Evidence]] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()
        self._unknown: dict[str, int] = {}
        self._framed: dict[str, int] = {}
        self._last: tuple[bool, int, str] = (False, 0, "")

    def add(self, chains: Iterable[ErrorChain], loose: Sequence[FlatText]) -> None:
        """Search a piece of the text."""
        matches, unknown, framed = matching.search(chains, loose)
        self.merge(matches)
        for lines, errors in ((self._unknown, unknown), (self._framed, framed)):
            first = {chain[0].words: chain[0].lines[0].number for chain in reversed(errors)}
            for words in sorted(first, key=first.__getitem__):
                lines.setdefault(words, first[words])
            for words in [*lines][:-_MOST_UNKNOWN]:
                del lines[words]
        if not self.matched:
            self._last = max(self._last, _last_line(loose))

    def skip(self, number: int, text: str) -> None:
        """Search a piece without known messages and tracebacks only for the last line that looks like an error."""
        if not self.matched and (places := [match.start() for match in _LIKE_AN_ERROR.finditer(text)]):
            start = text.rfind("\n", 0, places[-1]) + 1
            line_and_next = "\n".join(text[start : places[-1] + _LONGEST].split("\n", 2)[:2])
            lines = [*lines_of(line_and_next, number + text.count("\n", 0, start))]
            self._last = max(self._last, _last_line([FlatText(lines)]))

    def merge(self, matches: Iterable[ErrorMatch]) -> None:
        """Add known errors; those with the same answer are counted."""
        keys: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # an answer takes longer than a match
        for match in matches:
            error, source = match.error, match.source
            if error.role == "frame" and not error.fix:
                continue
            depends = error.hook or error.value or error.sections
            same = error.code, source.flat[match.start : match.end], match.text[:_LONGEST] if depends else ""
            if same not in keys:
                answer = _answer(match)
                keys[same] = key = error.code, answer.cause, answer.fix
                if key not in self.matched:
                    self._make_room(error.code)
                    near = match.near[0][:_MOST_NEAR], match.near[1][-_MOST_NEAR:]
                    around = (match.traceback or "".join(near))[-_MOST_NEAR:]
                    self.matched[key] = answer, _Evidence(error, match.text[:_LONGEST], near, around)
            self._times[keys[same]] += match.times

    def _make_room(self, code: str) -> None:
        """If an error occurs with very many values, count the second oldest with the oldest."""
        variants = [key for key in self.matched if key[0] == code]
        if len(variants) >= _MOST_VARIANTS:
            del self.matched[variants[1]]
            self._times[variants[0]] += self._times.pop(variants[1])

    def answers(self) -> list[tuple[Answer, _Evidence]]:
        """The answers, causes first."""
        errors = [evidence.error for _, evidence in self.matched.values()]
        causes = any(error.role == "cause" for error in errors)
        explained = {code for error in errors for code in error.explains}
        shown = [
            (replace(answer, times=self._times[key]), evidence)
            for key, (answer, evidence) in self.matched.items()
            if answer.code not in explained and not (causes and evidence.error.role == "frame")
        ]
        return sorted(shown, key=lambda pair: (pair[0].kind == "remark", not pair[1].error.first, pair[0].line))

    def unexplained(self) -> Iterator[Unexplained]:
        """The last unknown errors. If nothing was found, the last line that looks like an error, or just the last."""
        lines = self._unknown if self.matched else {**self._framed, **self._unknown}
        _, number, words = self._last
        if not lines and not self.matched and words:
            lines = {words: number}
        for words, number in sorted(lines.items(), key=lambda pair: pair[1])[-_MOST_UNKNOWN:]:
            yield Unexplained(words[:_LONGEST], number, matching.nearest(words), normalised(words[:_LONGEST]))


def _answer(matched: ErrorMatch) -> Answer:
    error = matched.error
    blanks = {name: value[:_LONGEST_VALUE] for name, value in matched.values.items()}
    values = defaultdict(str, blanks, text=matched.text)  # a blank that the wording does not have is empty

    def takes(name: str, pattern: str) -> bool:
        """Whether a value matches a pattern; if so, its groups become values."""
        match = re.search(pattern, values[name])
        values.update(match.groupdict("") if match else {})
        return match is not None

    sections = getattr(hooks, error.hook)(values) if error.hook else ()
    for line in error.value:
        name, place, pattern, words = line.split(" ", 3)
        if takes(place, pattern):
            values[name] = words.format_map(values)
    if not sections:
        conditions = ((name, fields["where"].split(" ", 1)) for name, fields in error.sections if "where" in fields)
        sections = next(((name,) for name, where in conditions if takes(*where)), ())
    for name in sections:
        error = error._replace(**matching.variant(name))
    cause, wrong = error.cause.format_map(values), error.wrong.format_map(values)
    lines = tuple(line.format_map(values) for line in error.fix)
    fix = (tuple(for_windows(lines)) if os.name == "nt" else lines) or doctor_steps(error.doctor)
    said, number = matched.source.lines_at(matched.start, matched.end)
    main = error.code, error.role, cause, fix, wrong, said[:_LONGEST], number
    kept = tuple((name, value) for name, value in matched.values.items() if value.strip("…"))
    return Answer(*main, torch=error.torch, causes=error.doctor, values=kept)


_LIKE_AN_ERROR = re.compile(r"(?:Error|Exception|error|fatal)\b")


def _last_line(loose: Iterable[FlatText]) -> tuple[bool, int, str]:
    """The last line outside tracebacks that looks like an error, or just the last: whether it does, and its number."""
    lines = [line for text in loose for line in text.lines if line.text.strip()]
    like_errors = [line for line in lines if _LIKE_AN_ERROR.search(line.text)]
    if not lines:
        return False, 0, ""
    line = (like_errors or lines)[-1]
    below = lines[lines.index(line) + 1 :][:1] if line.text.endswith(":") else []
    return bool(like_errors), line.number, flat(" ".join(part.text for part in (line, *below)))


_OWN = (
    r"\w+://\S+",  # addresses
    r"(?:[A-Za-z]:)?(?:[\w.@~+-]*[/\\])+[\w.@~+-]*\w",  # paths
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b",  # hosts, pointers, ids
    r"\d+(?:[.,]\d+)*",
)


def normalised(message: str) -> str:
    """A message with ``…`` for everything that differs from run to run.

    >>> normalised("OSError: /home/me/a.pt: 17 of 20 bytes at 0x7f12")
    'OSError: …: … of … bytes at …'
    """
    return re.sub("|".join(_OWN), "…", message)


# -- this machine, and the file that a text names

_MOST_FINDINGS = 4
_SAME = 60  # characters that torch's message and the text must share to be the same error
_WITHOUT_TORCH = frozenset(
    (
        *("P01", "P03", "P04", "P07", "P08", "P09", "T09", "W02", "L04", "L10", "L12", "L13", "X10"),
        *("W10", "W11", "W12", "W13", "W14", "W15"),
    )
)
"""Faults that prevent torch from printing anything."""
_LAYERS_OF_A_PYTHON = frozenset({"python", "build", "torch-libraries", "fit", "run", "extensions"})
"""The doctor's layers that differ between the Pythons of a machine."""


def _check_machine(diagnosis: Diagnosis, causes: Sequence[str], text: str) -> MachineCheck:
    """Whether this machine has one of the causes; without causes, whether it has any fault.

    ``text`` is everything around the error. It may come from a different Python than the one examined: then the faults
    of the examined one are not the cause.
    """
    from transload.diagnose.rules import BY_CODE
    from transload.diagnose.rules.dlls import commit_lines

    machine, cause, fits, title = diagnosis.machine, diagnosis.cause, False, ""
    if "[WinError " in text and machine.platform.system != "Windows":
        title = "the text comes from Windows: run transload doctor there"
        return MachineCheck(diagnosis.status, fits=False, title=title)
    other = _other_torch(text, {os.path.realpath(install.location) for install in machine.torch.installs or ()})
    faults = [finding for finding in diagnosis.findings if finding.severity == "error"]
    possible = [fault for fault in faults if fault.code in causes or fault.code not in _WITHOUT_TORCH]
    if other:
        possible = [fault for fault in possible if BY_CODE[fault.code].layer not in _LAYERS_OF_A_PYTHON]
    gpu = machine.hardware.present or machine.accelerators
    if possible:
        wanted = [fault for fault in possible if fault.code in causes]
        cause, fits = (wanted or possible)[0], bool(wanted) or not causes
    elif other:
        import shlex

        torch = Path(other)  # ENVIRONMENT/lib/python3.12/site-packages/torch; on Windows without the version
        above = 2 if torch.parent.parent.name.lower() == "lib" else 3
        environment = shlex.quote(str(torch.parents[min(above, len(torch.parents) - 1)]))
        without = "" if gpu else "there is no GPU in this machine; "
        title = f"{without}the text comes from another Python: transload doctor --python {environment}"
    elif faults:  # if torch printed the text, some Python on some machine has a torch that works at least that far
        rest = "nothing else is broken on this machine" if gpu else "there is no GPU in this machine"
        examined = machine.python.executable or "the Python that was examined"
        why = f"torch does not work in {examined}, so what torch says comes from another Python"
        title = f"{rest}; {why}: transload doctor --python PYTHON"
    elif diagnosis.status == "ok" and cause is None:
        title = "nothing is broken on this machine now, as far as can be seen without running torch"
    elif cause is None:
        title = "there is no GPU in this machine, and nothing is broken"
    if "W16" in causes and not fits:  # the limit was reached once, not necessarily now
        title = ", and ".join(commit_lines(machine)) or title
    if title or cause is None:
        return MachineCheck(diagnosis.status, fits=False, title=title)
    return MachineCheck(diagnosis.status, fits, cause.code, cause.title, cause.evidence, cause.fix)


def _check_install(diagnosis: Diagnosis, code: str, evidence: _Evidence) -> MachineCheck | None:
    """Why torch cannot be installed on this machine; ``None`` if nothing is known about it."""
    from transload.explaining.installing import check
    from transload.steps import fix_of

    reason = check(code, diagnosis.machine, evidence.text, evidence.near[1])
    if reason is None:
        return None
    fix = fix_of(reason.fix)
    return MachineCheck(diagnosis.status, reason.fits, reason.code, reason.title, reason.evidence, fix)


def _check_file(diagnosis: Diagnosis, path: str, text: str) -> FileCheck | None:
    """What loading a file would do; ``None`` if unknown."""
    from transload.checking import check_here
    from transload.judge.problems import command_lines
    from transload.loading.placement import AUTO

    try:
        check = check_here(path, AUTO, diagnosis)
    except TransloadError:
        return None
    verdict = f"it cannot be loaded: {check.refusal}"
    if check.ok:
        devices = sorted({move.device for move in check.plan.moves})
        verdict = f"transload.load loads it{', onto ' + ' and '.join(devices) if devices else ''}"
    same = bool(check.torch.text) and flat(check.torch.text)[:_SAME] in text
    findings = [finding for finding in check.findings if finding.severity != "note"][:_MOST_FINDINGS]
    advised = next((finding for finding in findings if finding.fix), None)
    fix = advised.fix if advised else ()
    about_names = any(word in text.lower() for word in ("weights", "global"))
    if advised and advised.code == "needs-trust" and not about_names:
        fix = command_lines((advised,))
    python = ("import ", "from ", "torch.serialization.")
    fix = tuple(f"| {line}" if line.startswith(python) else line for line in fix)
    return FileCheck(path, check.ok, verdict, same, tuple(finding.title for finding in findings), fix)


_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch(?=[/\\])")
_LONGEST_PATH = 400
_MOST_PATHS = 50  # paths that are looked up: a log may be full of them


def _other_torch(text: str, examined: set[str]) -> str:
    """The directory of the torch in the frames of a text, if it exists here and is not one of those examined."""
    for torch in islice(_TORCH.finditer(text), _MOST_PATHS):
        before = text[max(0, torch.start() - _LONGEST_PATH) : torch.start()]
        for start in (before.rpartition('"')[2].strip(), *before.split()[-1:]):
            # Absolute, and never a path on another machine.
            if Path(start).is_absolute() and not start.startswith(("//", "\\\\")):
                folder = start + torch[0]
                if Path(folder).is_dir() and os.path.realpath(folder) not in examined:
                    return folder
                break
    return ""


_SUFFIXES = r"pt|pth|ckpt|bin|pt2|ptl|pkl|pickle|safetensors|tar|th|t7|model|distcp|npz|joblib|weights|mar"
_QUOTED = re.compile(r"""["'`]([^"'`\n]{1,1000})["'`]""")
_BARE = re.compile(rf"(?<![\w./\\~-])((?:[A-Za-z]:)?[\w./\\~+@%=-]{{1,1000}}\.(?:{_SUFFIXES}))(?![\w/])")
_CHECKPOINT_NAME = re.compile(rf"\.(?:{_SUFFIXES})$", re.IGNORECASE)
_OF_A_CHECKPOINT = (".distcp", ".index.json", "_optim_states.pt", "_model_states.pt", ".safetensors")
_MOST_NAMES = 200  # names that are looked up: a log may be full of them


def files_in(texts: Iterable[str]) -> Iterator[str]:
    """Checkpoints that some texts name and that exist here, each once, the likeliest first.

    A path on another machine (``//host/share``) is not touched: looking it up would contact that machine.
    """
    names = (name for text in texts for name in (*_BARE.findall(text), *_QUOTED.findall(text)))
    for name in islice(dict.fromkeys(names), _MOST_NAMES):
        if name.startswith(("//", "\\\\")):
            continue
        with suppress(OSError, ValueError, RuntimeError):  # a NUL, a name too long, or an unknown user
            path = Path(name).expanduser()
            if path.is_dir():
                with os.scandir(path) as entries:
                    inside = [entry.name for entry in islice(entries, 1000)]
                is_checkpoint = any(file == ".metadata" or file.endswith(_OF_A_CHECKPOINT) for file in inside)
            else:
                is_checkpoint = path.is_file() and _CHECKPOINT_NAME.search(name) is not None
            if is_checkpoint:
                yield str(path)


# -- the report

_SAID = 300
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
        yield Item(_SIGNS[answer.kind][1], [*_answered(answer)])
    for index, error in enumerate(explanation.unknown):
        if index or explanation.answers:
            yield BLANK
        yield Item("trust", [*_unexplained(error)])
    if explanation.unknown:
        yield from _steps(_NEXT)


def _answered(answer: Answer) -> Iterator[Block]:
    cause = ((printable(answer.cause, None), "strong"), (f"  [{answer.code}]", "dim"))
    yield Prose(cause, lead=(_SIGNS[answer.kind],))
    times = f"{plural(answer.times, 'time')}: " if answer.times > 1 else ""
    line = f"line {answer.line}: " if answer.line else ""
    yield Prose(((printable(answer.said, _SAID), "dim"),), lead=((f"{_MARGIN}{line}{times}", "dim"),))
    if answer.wrong:
        yield Prose(printable(answer.wrong, None), lead=(("  ! ", "trust"),))
    if machine := answer.machine:  # what the doctor found: the cause itself, another one, or none
        another = "this machine has another fault: " if machine.code else ""
        which = "this machine has this fault: " if machine.fits else another
        code = f"  [{machine.code}]" if machine.code else ""
        words = (printable(which + machine.title, None), ""), (code, "dim")
        yield Prose(words, lead=(("  here    ", "good" if machine.fits else "dim"),))
        for text in machine.evidence[:3]:
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


def _unexplained(error: Unexplained) -> Iterator[Block]:
    line = f"  line {error.line}" if error.line else ""
    yield Prose((("not known", "strong"), (line, "dim")), lead=(("? ", "trust"),))
    yield Prose(((printable(error.said, _SAID), "dim"),), lead=_MARGIN)
    if error.nearest:
        yield Prose("The known texts that are most similar, but not the same:", lead=_MARGIN)
    for near in error.nearest:
        why = f" ({near.why})" if near.why else ""
        yield Prose(((f"{printable(near.says)}{why}  [{near.code}]", "dim"),), lead=(("    · ", "dim"),))


def _steps(fix: Sequence[str]) -> Iterator[Block]:
    """Sentences with an arrow; commands and Python on their own lines, never folded, to be copied."""
    for line in fix:
        step = step_of(line)
        if step.copied:
            lead = f"      {'$ ' if step.kind == 'command' else ''}"
            yield Prose(printable(step.text, None), lead=lead, whole=True)
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
        if groups and step_of(line).copied:
            groups[-1].append(line)
        else:
            groups.append([line])
    kept: list[str] = []
    for sentence, *commands in groups:
        if not (all(command in shown for command in commands) and any(_alike(sentence, other) for other in shown)):
            kept += (sentence, *commands)
    return tuple(kept)


def _alike(one: str, other: str) -> bool:
    first, second = (
        {word.removesuffix("s") for word in re.findall(r"[a-z_]{3,}", line.lower())} - _SMALL for line in (one, other)
    )
    common = len(first & second)
    return one == other or (common >= _FEWEST and common >= _ALIKE * min(len(first), len(second)))
