"""What a file records of where it was saved, beside what is here."""

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
    read: Checkpoint = read_source(BytesSource(forged()))
    held = judge(replace(read, written_by=Origin(recorded=recorded)))
    found = checked(held, judge_machine(healthy()), "auto", {}).findings
    return [line for finding in found if finding.code == "saved-elsewhere" for line in finding.evidence]


def version() -> str:
    first = healthy().torch.first
    assert first is not None
    return first.version


def test_a_file_without_a_record_says_nothing() -> None:
    assert notes() == []


def test_the_same_torch_is_not_worth_a_word() -> None:
    assert notes(("torch", version())) == []


def test_another_torch_and_another_gpu_are_reported() -> None:
    told = notes(("torch", "1.13.1"), ("gpus", "Made Up 9000 (3.5)"))
    assert told[0] == f"torch 1.13.1 there, {version()} here"
    assert told[1].startswith("Made Up 9000 (3.5) there, ")
