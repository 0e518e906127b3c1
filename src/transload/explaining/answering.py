"""From known texts that were found to answers: values put in, checks of this machine and file added, order made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.explaining.known import Known, Values
from transload.explaining.result import Answer
from transload.explaining.steps import pages

if TYPE_CHECKING:
    from transload.explaining.finding import Found
    from transload.explaining.here import Here

__all__ = ["answers"]

_SAID = 2_000
_VALUE = 300
_WHY_NO_CUDA = frozenset(
    {"driver-too-old", "no-driver", "cuda-unknown-error", "no-cuda-build", "driver-start", "system-not-ready"}
    | {"driver-mix", "forward-compatibility", "stub-library", "mps-daemon", "driver-insufficient", "library-missing"}
    | {"os-call-failed", "smi-mismatch", "smi-unknown", "smi-no-driver", "no-hip-gpus"}
)


def answers(found: Sequence[Found], files: Sequence[str], here: Here | None) -> tuple[Answer, ...]:
    """One answer to each error, the causes first; ``files`` are paths that the caller knows to be meant."""
    told = [(_answer(each), each) for each in _kept(found)]
    merged: dict[tuple[Any, ...], tuple[Answer, Found]] = {}
    for answer, each in told:
        key = (answer.code, answer.cause, answer.fix)
        first, source = merged.get(key, (answer, each))
        merged[key] = (replace(first, times=first.times + 1) if key in merged else first, source)
    looked = (_looked(answer, each, files, here) for answer, each in merged.values())
    return tuple(sorted(looked, key=_order))


def _kept(found: Sequence[Found]) -> Iterator[Found]:
    """What is told: a frame only where no cause is, and where it can say what to do."""
    causes = [each for each in found if each.hit.known.role == "cause"]
    for each in found:
        if each.hit.known.role != "frame" or (not causes and each.hit.known.fix):
            yield each


def _order(answer: Answer) -> tuple[bool, bool, int]:
    """Why there is no CUDA before what fails for it; remarks last; else as in the text."""
    return answer.kind == "remark", answer.code not in _WHY_NO_CUDA, answer.line


def _answer(found: Found) -> Answer:
    known, values = _worked(found.hit.known, found.hit.values, found.text)
    fix = tuple(line.format_map(values) for line in known.fix) or pages(known.causes)
    return Answer(
        known.code,
        known.role,
        known.cause.format_map(values),
        fix,
        known.wrong.format_map(values),
        found.said[:_SAID],
        found.line,
        torch=known.torch,
        causes=known.causes,
        values=tuple((name, value) for name, value in found.hit.values.items() if value),
    )


class _Blanks(dict[str, str]):
    """A wording without one of the blanks that another has: nothing stands there."""

    def __missing__(self, name: str) -> str:
        return ""


def _worked(known: Known, taken: Values, text: str) -> tuple[Known, _Blanks]:
    values = _Blanks({name: value[:_VALUE] for name, value in taken.items()})
    if known.work is None:
        return known, values
    better = dict(known.work(values, text))
    values.update(better.pop("values", {}))
    return known._replace(**better), values


def _looked(answer: Answer, found: Found, files: Sequence[str], here: Here | None) -> Answer:
    """The answer with what can be seen here."""
    needs = found.hit.known.needs
    if here is None or answer.kind == "remark":
        return answer
    if "machine" in needs:
        answer = replace(answer, machine=here.machine(answer.causes, found.surroundings))
    if "file" in needs:
        from transload.explaining.naming import files_in

        path = next(iter((*files, *files_in(found.near))), "")
        answer = replace(answer, file=here.file(path, found.text) if path else None)
    return answer
