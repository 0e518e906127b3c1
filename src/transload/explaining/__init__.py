"""``transload.explain``: what an error message means, what to do about it, and whether this machine or file has it.

``logs`` splits a log into exceptions, ``matching`` finds known messages in them (described in ``pages``), and each
becomes an ``Answer`` (``result``): ``hooks`` compute further values, and ``local`` examines this machine and the file
that the message names.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transload.errors import UsageError
from transload.explaining import hooks
from transload.explaining.logs import LIMIT, ErrorChain, FlatText, lines_of, split, unwrapped
from transload.explaining.matching import Match, nearest, search, variant
from transload.explaining.result import Answer, Explanation, Unexplained, doctor_steps
from transload.frozen import replace

if TYPE_CHECKING:
    from transload.explaining.local import LocalChecks

_MOST_UNKNOWN = 5
_LONGEST = 2_000  # characters of an error that are quoted
_LONGEST_VALUE = 300


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
        return _explained("".join(format_exception(error)), files, checks=checks, numbered=False)
    if not isinstance(error, str):
        raise UsageError(f"explain takes a text or an exception, not {type(error).__name__}")
    return _explained(error[-LIMIT:], checks=checks, shortened=len(error) > LIMIT)


def explain_bytes(data: bytes, *, checks: bool = True, shortened: bool = False) -> Explanation:
    """As ``explain``, for the bytes of a log, in any encoding."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell redirects as UTF-16
    return _explained(data.decode(encoding, "replace"), checks=checks, shortened=shortened)


def _explained(
    text: str, files: Sequence[str] = (), *, checks: bool, shortened: bool = False, numbered: bool = True
) -> Explanation:
    """Explain a text; ``files`` are paths that are known to be the files it is about."""
    local = None
    if checks:
        from transload.explaining.local import LocalChecks

        local = LocalChecks()
    chains, loose = split(lines_of(text))
    found, unknown, framed = search(chains, loose)
    if answers := _answers(found, files, local):
        explanation = Explanation(answers, tuple(_unexplained(unknown)), shortened)
    elif answers := _answers(search(*split(lines_of(unwrapped(text))))[0], files, local):
        explanation, numbered = Explanation(answers, (), shortened), False
    else:
        explanation = Explanation((), tuple(_unexplained([*unknown, *framed], loose)), shortened)
    if numbered and not shortened:
        return explanation
    # Line numbers are meaningless for an exception, and for the end of a log.
    answers = tuple(replace(answer, line=0) for answer in explanation.answers)
    return replace(explanation, answers=answers, unknown=tuple(replace(each, line=0) for each in explanation.unknown))


def _loaded_files(error: BaseException) -> Iterator[str]:
    """The paths that torch.load was called with, from the frames of an exception and of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback = current.__traceback__
        while traceback is not None:
            name = traceback.tb_frame.f_code.co_filename.replace("\\", "/")
            if name.endswith(("torch/serialization.py", "torch/jit/_serialization.py")):
                path = traceback.tb_frame.f_locals.get("f")
                if isinstance(path, str | os.PathLike) and os.path.exists(path):  # noqa: PTH110 - slow to import
                    yield os.fsdecode(path)
            traceback = traceback.tb_next
        current = current.__cause__ or current.__context__


def _answers(found: Sequence[Match], files: Sequence[str], local: LocalChecks | None) -> tuple[Answer, ...]:
    """One answer for each error, with what this machine shows of it; causes first."""
    causes = any(each.known.role == "cause" for each in found)
    merged: dict[tuple[Any, ...], tuple[Answer, Match]] = {}
    for each in found:
        known = each.known
        if known.role == "frame" and (causes or not known.fix):
            continue
        answer = _answer(each)
        key = (answer.code, answer.cause, answer.fix)
        first, source = merged.get(key, (replace(answer, times=0), each))
        merged[key] = replace(first, times=first.times + 1), source

    def rank(pair: tuple[Answer, Match]) -> tuple[bool, bool, int]:
        return pair[0].kind == "remark", not pair[1].known.first, pair[0].line

    answers = []
    for answer, each in sorted(merged.values(), key=rank):
        needs = each.known.needs if local and answer.kind != "remark" else ()
        if local and "machine" in needs:
            answer = replace(answer, machine=local.machine(answer.causes, each.traceback or each.source.flat))  # noqa: PLW2901
        if local and "file" in needs:
            answer = replace(answer, file=local.file(files, each.near, each.text))  # noqa: PLW2901
        answers.append(answer)
    return tuple(answers)


def _answer(found: Match) -> Answer:
    known = found.known
    blanks = {name: value[:_LONGEST_VALUE] for name, value in found.values.items()}
    values = defaultdict(str, blanks, text=found.text)  # a blank that the wording does not have is empty

    def takes(name: str, pattern: str) -> bool:
        """Whether a value matches a pattern; if so, its groups become values."""
        match = re.search(pattern, values[name])
        values.update(match.groupdict("") if match else {})
        return match is not None

    sections = getattr(hooks, known.hook)(values) if known.hook else ()
    for line in known.value:
        name, place, pattern, words = line.split(" ", 3)
        if takes(place, pattern):
            values[name] = words.format_map(values)
    if not sections:
        conditions = ((name, fields["where"].split(" ", 1)) for name, fields in known.sections if "where" in fields)
        sections = next(((name,) for name, where in conditions if takes(*where)), ())
    for name in sections:
        known = known._replace(**variant(name))
    said, number = found.source.lines_at(found.start, found.end)
    return Answer(
        known.code,
        known.role,
        known.cause.format_map(values),
        tuple(line.format_map(values) for line in known.fix) or doctor_steps(known.doctor),
        known.wrong.format_map(values),
        said[:_LONGEST],
        number,
        torch=known.torch,
        causes=known.doctor,
        values=tuple((name, value) for name, value in found.values.items() if value),
    )


def _unexplained(chains: Sequence[ErrorChain], loose: Sequence[FlatText] = ()) -> Iterator[Unexplained]:
    """The unknown errors. If there are none, the last line outside tracebacks that looks like one, or just the last."""
    errors = {chain[0].words: chain[0].lines[0].number for chain in reversed(chains)}
    if not errors:
        lines = [line for text in loose for line in text.lines if line.text.strip()]
        like_errors = [line for line in lines if re.search(r"\b\w*(?:Error|Exception|error|fatal)\b", line.text)]
        for line in (like_errors or lines)[-1:]:
            below = lines[lines.index(line) + 1 :][:1] if line.text.endswith(":") else []
            errors[" ".join(" ".join(each.text for each in (line, *below)).split())] = line.number
    for said, number in sorted(errors.items(), key=lambda pair: pair[1])[-_MOST_UNKNOWN:]:
        yield Unexplained(said[:_LONGEST], number, nearest(said), normalised(said[:_LONGEST]))


_OWN = (
    r"\w+://\S+",  # addresses
    r"(?:[A-Za-z]:)?(?:[\w.@~+-]*[/\\])+[\w.@~+-]*\w",  # paths
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b",  # hosts, pointers, ids
    r"\d+(?:[.,]\d+)*",
)


def normalised(said: str) -> str:
    """A message with ``…`` for everything that differs from run to run.

    >>> normalised("OSError: /home/me/a.pt: 17 of 20 bytes at 0x7f12")
    'OSError: …: … of … bytes at …'
    """
    return re.sub("|".join(_OWN), "…", said)
