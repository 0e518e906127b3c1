"""Every known text in every wording: found bare, at the end of a traceback, and between the lines of a log."""

from __future__ import annotations

import functools
import re

from tests.each import for_each
from tests.explaining.wordings import WORDINGS, Wording

import transload
from transload.cli import COMMANDS
from transload.diagnose.rules.catalogue import BY_CODE as DOCTOR
from transload.explaining.known import Known, template
from transload.explaining.result import Answer
from transload.explaining.texts import BY_CODE, TABLE

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/run.py", line 3, in <module>\n    main()\n'


@functools.cache
def answers(text: str) -> tuple[Answer, ...]:
    return tuple(transload.explain(text, checks=False).answers)


def codes(text: str) -> list[str]:
    return [answer.code for answer in answers(text)]


def test_each_wording_is_explained_by_its_row() -> None:
    def check(wording: Wording) -> None:
        assert codes(wording.text) == [wording.code]

    for_each(WORDINGS, check)


def is_exception(wording: Wording) -> bool:
    return re.match(r"[\w.]+(?:Error|Exception): ", wording.text) is not None


def test_each_is_found_at_the_end_of_a_traceback_with_lines_around() -> None:
    before = "2026-01-02 03:04:05 INFO epoch 3, loss 0.12\n"

    def check(wording: Wording) -> None:
        assert codes(f"{before}{TRACEBACK}{wording.text}\n") == [wording.code]

    for_each([each for each in WORDINGS if is_exception(each)], check)


def test_every_row_has_a_wording_or_is_only_around_others() -> None:
    printed = {wording.code for wording in WORDINGS}
    unseen = [known for known in TABLE if known.code not in printed]
    assert [known.code for known in unseen if known.role != "frame" or known.fix] == []


def test_every_row_is_sound() -> None:
    def check(known: Known) -> None:
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", known.code)
        assert all(template(wording).weight >= 8 for wording in known.says)
        assert set(known.causes) <= DOCTOR.keys()
        if known.context or known.unless:
            re.compile(known.context + known.unless)
        assert known.cause or known.work

    for_each(TABLE, check)


def test_codes_are_unique() -> None:
    assert len(BY_CODE) == len(TABLE)


def test_what_is_said_is_whole() -> None:
    """Every blank of a sentence is filled, and there is something to do about every fault."""
    for_each(WORDINGS, is_whole)


def is_whole(wording: Wording) -> None:
    (answer,) = answers(wording.text)
    told = (answer.cause, *answer.fix, answer.wrong)
    assert answer.cause.endswith((".", ")"))
    assert answer.fix
    for text in told:
        assert not re.search(r"\{[a-z]+\}| \(\)|''|  |\bNone\b", text.removeprefix("| ").removeprefix("$ ")), text


def test_commands_in_fixes_exist() -> None:
    told = "\n".join(line for wording in WORDINGS for answer in answers(wording.text) for line in answer.fix)
    named = set(re.findall(r"\btransload ([a-z]+)\b", told))
    assert {"inspect", "check", "retag", "doctor"} <= named
    assert named <= COMMANDS.keys()


def test_python_in_fixes_compiles() -> None:
    for wording in WORDINGS:
        (answer,) = answers(wording.text)
        for line in answer.fix:
            if line.startswith("| "):
                compile(line[2:], wording.code, "exec")
