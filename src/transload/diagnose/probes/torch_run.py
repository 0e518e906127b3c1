"""What happens when torch is imported and used, in a child process of the examined interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.diagnose.children import Question
from transload.machine import Step, TorchRun, Unknown

if TYPE_CHECKING:
    from transload.diagnose.children import Outcome
    from transload.diagnose.host import Host

__all__ = ["question", "torch_run"]

_NOISE = 20
"""Lines of what was printed that are kept."""


def question(host: Host, python: str = "") -> Question:
    """Torch in ``python``, by default the host's, with the user's environment and where the user stands.

    Nothing is added to the environment: what it does to torch is what we want to know.
    """
    return Question("ask_torch", host.at(python or host.python), host.outside(), host.at(host.cwd), ("-B",))


def torch_run(host: Host, outcome: Outcome) -> TorchRun:
    """What ``ask_torch`` told, as far as it came."""
    facts, answer = outcome.facts, outcome.answer
    return TorchRun(
        answer=answer,
        version=facts.get("version", ""),
        file=host.named(facts.get("file", "")),
        cuda=facts.get("cuda", ""),
        hip=facts.get("hip", ""),
        available=facts.get("available", Unknown(_untold(outcome))),
        count=facts.get("count", -1),
        architectures=tuple(facts.get("architectures", ())),
        devices=tuple(facts.get("devices", ())),
        cudnn=_cudnn(facts.get("cudnn", 0)),
        warnings=(*outcome.all("warning"), *_printed(outcome)),
        steps=tuple(_steps(outcome)),
        libraries=tuple(host.named(path) for path in facts.get("libraries", ())),
        backends=tuple(facts.get("backends", ())),
    )


def _untold(outcome: Outcome) -> str:
    failed = next((record["error"] for record in outcome.records if record.get("error")), "")
    return outcome.detail or failed or "not asked"


def _steps(outcome: Outcome) -> list[Step]:
    """The steps it took; last the one it did not come back from."""
    taken = [_step(record) for record in outcome.records if "step" in record]
    doing = outcome.facts.get("doing", "import")
    if outcome.state in {"hung", "crashed"} and doing not in {step.name for step in taken}:
        seconds = max(0.0, outcome.seconds - sum(step.seconds for step in taken))
        taken.append(Step(doing, ok=False, error=outcome.detail, seconds=round(seconds, 3)))
    return taken


def _step(record: dict[str, Any]) -> Step:
    return Step(record["step"], record["ok"], record["error"], record["seconds"])


def _printed(outcome: Outcome) -> tuple[str, ...]:
    lines = [line.strip() for line in outcome.printed.splitlines()]
    return tuple(line for line in lines if line)[-_NOISE:]


def _cudnn(number: int) -> str:
    """The version that a number of cuDNN means, whose form changed with 9.

    >>> _cudnn(91900), _cudnn(8907), _cudnn(0)
    ('9.19.0', '8.9.7', '')
    """
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}" if number else ""
