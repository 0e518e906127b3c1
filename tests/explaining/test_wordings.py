"""Every known text in every wording: found bare, at the end of a traceback, and between the lines of a log."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tests.explaining.wordings import WORDINGS, Wording

import transload
from transload.cli import COMMANDS
from transload.diagnose.rules.catalogue import BY_CODE as DOCTOR
from transload.explaining.known import Known, template
from transload.explaining.texts import BY_CODE, TABLE

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/run.py", line 3, in <module>\n    main()\n'


every_wording = pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: f"{wording.code}: {wording.where}")
every_row = pytest.mark.parametrize("known", TABLE, ids=lambda known: known.code)


def codes(text: str) -> list[str]:
    return [answer.code for answer in transload.explain(text, checks=False).answers]


@every_wording
def test_each_wording_is_explained_by_its_row(wording: Wording) -> None:
    assert codes(wording.text) == [wording.code]


def is_exception(wording: Wording) -> bool:
    return re.match(r"[\w.]+(?:Error|Exception): ", wording.text) is not None


@pytest.mark.parametrize(
    "wording", [each for each in WORDINGS if is_exception(each)], ids=lambda each: f"{each.code}: {each.where}"
)
def test_each_is_found_at_the_end_of_a_traceback_with_lines_around(wording: Wording) -> None:
    before = "2026-01-02 03:04:05 INFO epoch 3, loss 0.12\n"
    assert codes(f"{before}{TRACEBACK}{wording.text}\n") == [wording.code]


@every_row
def test_every_row_has_a_wording_or_is_only_around_others(known: Known) -> None:
    printed = Counter(wording.code for wording in WORDINGS)
    assert printed[known.code] or (known.role == "frame" and not known.fix)


@every_row
def test_every_row_is_sound(known: Known) -> None:
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", known.code)
    assert all(template(wording).weight >= 8 for wording in known.says)
    assert set(known.causes) <= DOCTOR.keys()
    if known.context or known.unless:
        re.compile(known.context + known.unless)
    assert known.cause or known.work


def test_codes_are_unique() -> None:
    assert len(BY_CODE) == len(TABLE)


@every_wording
def test_what_is_said_is_whole(wording: Wording) -> None:
    """Every blank of a sentence is filled, and there is something to do about every fault."""
    (answer,) = transload.explain(wording.text, checks=False).answers
    told = (answer.cause, *answer.fix, answer.wrong)
    assert answer.cause.endswith((".", ")"))
    assert answer.fix
    for text in told:
        assert not re.search(r"\{[a-z]+\}| \(\)|''|  |\bNone\b", text.removeprefix("| ").removeprefix("$ ")), text


def test_commands_in_fixes_exist() -> None:
    told = "\n".join(
        line
        for wording in WORDINGS
        for answer in transload.explain(wording.text, checks=False).answers
        for line in answer.fix
    )
    named = set(re.findall(r"\btransload ([a-z]+)\b", told))
    assert {"inspect", "check", "retag", "doctor"} <= named
    assert named <= COMMANDS.keys()


def test_python_in_fixes_compiles() -> None:
    for wording in WORDINGS:
        (answer,) = transload.explain(wording.text, checks=False).answers
        for line in answer.fix:
            if line.startswith("| "):
                compile(line[2:], wording.code, "exec")
