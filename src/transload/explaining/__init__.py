"""``transload.explain``: what an error text means, what to do about it, and whether this machine or file shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from transload.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from transload.explaining.finding import Search
    from transload.explaining.result import Explanation, Unexplained
    from transload.explaining.splitting import Chain, Text

__all__ = ["explain", "explain_bytes"]

_UNKNOWN = 5
_LINE = 2_000


def explain(error: BaseException | str, *, checks: bool = True) -> Explanation:
    """The causes in a traceback, a log or an exception, and what to do about each.

    Of an exception the chain of causes counts, and the innermost that is known. With ``checks``, this machine is looked
    at where the cause depends on it (torch is not run), and the file that the text names, where it is here. What is
    not known is said to be so, with the nearest known texts.

    >>> text = "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1."
    >>> answer = explain(text, checks=False).answers[0]
    >>> answer.code, dict(answer.values)["index"]
    ('device-index', '1')
    """
    if isinstance(error, BaseException):
        from traceback import format_exception

        return _unnumbered(_explained("".join(format_exception(error)), tuple(_loaded(error)), checks=checks))
    if not isinstance(error, str):
        raise UsageError(f"explain takes a text or an exception, not {type(error).__name__}")
    from transload.explaining.cleaning import LIMIT

    explanation = _explained(error[-LIMIT:], (), checks=checks, shortened=len(error) > LIMIT)
    return _unnumbered(explanation) if explanation.shortened else explanation


def explain_bytes(data: bytes, *, checks: bool = True, shortened: bool = False) -> Explanation:
    """The same of a log as it was read, in whatever encoding."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # what PowerShell redirects
    explanation = _explained(data.decode(encoding, "replace"), (), checks=checks, shortened=shortened)
    return _unnumbered(explanation) if shortened else explanation


def _explained(text: str, files: Sequence[str], *, checks: bool, shortened: bool = False) -> Explanation:
    from transload.explaining.answering import answers
    from transload.explaining.cleaning import unwrapped
    from transload.explaining.here import Here
    from transload.explaining.result import Explanation

    search, loose = _searched(text)
    here = Here() if checks else None
    told = answers(search.found, files, here)
    if told:
        return Explanation(told, tuple(_unexplained(search.unknown, loose, known=True)), shortened)
    told = answers(_searched(unwrapped(text))[0].found, files, here)
    if told:
        return _unnumbered(Explanation(told, (), shortened))
    return Explanation((), tuple(_unexplained([*search.unknown, *search.framed], loose, known=False)), shortened)


def _searched(text: str) -> tuple[Search, list[Text]]:
    from transload.explaining.cleaning import lines_of
    from transload.explaining.finding import found_in
    from transload.explaining.splitting import split
    from transload.explaining.texts import TABLE

    chains, loose = split(lines_of(text))
    return found_in(chains, loose, TABLE), loose


def _unnumbered(explanation: Explanation) -> Explanation:
    """Of an exception, or of the end of a log, there are no lines to count."""
    from dataclasses import replace

    answers = tuple(replace(answer, line=0) for answer in explanation.answers)
    return replace(explanation, answers=answers, unknown=tuple(replace(each, line=0) for each in explanation.unknown))


def _unexplained(chains: Sequence[Chain], loose: Sequence[Text], *, known: bool) -> Iterator[Unexplained]:
    """The errors that are not known. Without any traceback, the last line that looks like one, or just the last."""
    from transload.explaining.nearest import nearest
    from transload.explaining.result import Unexplained
    from transload.explaining.texts import TABLE

    told = {chain.raised[0].words: chain.raised[0].lines[0].number for chain in reversed(chains)}
    if not told and not known:
        told = dict(_last_lines(loose))
    for said, line in sorted(told.items(), key=lambda pair: pair[1])[-_UNKNOWN:]:
        yield Unexplained(said[:_LINE], line, nearest(said, TABLE))


def _last_lines(loose: Sequence[Text]) -> Iterator[tuple[str, int]]:
    import re

    lines = [line for rest in loose for line in rest.lines if line.text.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(?:Error|Exception|error|fatal)\b", line.text)]
    for line in (errors or lines)[-1:]:
        below = lines[lines.index(line) + 1 :][:1] if line.text.endswith(":") else []
        yield " ".join(" ".join(each.text for each in (line, *below)).split()), line.number


def _loaded(error: BaseException) -> Iterator[str]:
    """The paths that torch.load was called with in the frames of an exception, and of those it came from."""
    import os
    from pathlib import Path

    seen: set[int] = set()
    this: BaseException | None = error
    while this is not None and id(this) not in seen:
        seen.add(id(this))
        for frame in _frames(this.__traceback__):
            name = frame.tb_frame.f_code.co_filename.replace("\\", "/")
            if name.endswith(("torch/serialization.py", "torch/jit/_serialization.py")):
                path = frame.tb_frame.f_locals.get("f")
                if isinstance(path, str | os.PathLike) and Path(os.fsdecode(path)).exists():
                    yield os.fsdecode(path)
        this = this.__cause__ or this.__context__


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
