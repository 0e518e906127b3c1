"""What a file records about where it was saved, compared with this machine."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import healthy
from tests.forge import checkpoint as forged

from transload.checking import checked
from transload.checkpoint import Checkpoint, Origin
from transload.diagnose.report import judge_machine
from transload.formats import read_source
from transload.io.sources import BytesSource
from transload.judge import judge


def notes(*recorded: tuple[str, str]) -> list[str]:
    parsed: Checkpoint = read_source(BytesSource(forged()))
    checkpoint = judge(replace(parsed, written_by=Origin(recorded=recorded)))
    findings = checked(checkpoint, judge_machine(healthy()), "auto", {}).findings
    return [line for finding in findings if finding.code == "saved-elsewhere" for line in finding.evidence]


def version() -> str:
    first = healthy().torch.first
    assert first is not None
    return first.version


def test_file_without_a_record_gives_no_note() -> None:
    assert notes() == []


def test_same_torch_gives_no_note() -> None:
    assert notes(("torch", version())) == []


def test_another_torch_and_another_gpu_are_reported() -> None:
    reported = notes(("torch", "1.13.1"), ("gpus", "Made Up 9000 (3.5)"))
    assert reported[0] == f"torch 1.13.1 there, {version()} here"
    assert reported[1].startswith("Made Up 9000 (3.5) there, ")
