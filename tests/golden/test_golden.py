"""The answers of every command equal the recorded ones. ``record.py`` says what is recorded, and how to update it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.each import for_each
from tests.golden.record import ANSWERS, PARTS, TEXTS, WORDS, differences, read, recorded, text_difference, transcript

UPDATE = "python tests/golden/record.py --full DIR shows the outputs, --update records them"


@pytest.mark.parametrize("part", PARTS)
def test_every_command_answers_as_recorded(part: str) -> None:
    """Exit codes, JSON and written files come first: they must not change. The wording may change."""
    answers, words = recorded(part)
    assert differences(read(ANSWERS)[part], answers) == [], UPDATE
    assert differences(read(WORDS)[part], words) == [], f"only the wording differs: {UPDATE}"


def test_every_text_is_as_recorded() -> None:
    def check(path: Path) -> None:
        difference = text_difference(path)
        assert not difference, f"{difference}\n{UPDATE}"

    for_each(sorted(TEXTS.iterdir()), check)


def test_transcript_keeps_comments_and_commands_and_replaces_what_they_printed() -> None:
    lines = transcript("# A comment.\n$ transload explain no-such-code\nold output\nexit 0\n").splitlines()
    assert lines[:2] == ["# A comment.", "$ transload explain no-such-code"]
    assert "old output" not in lines
    assert lines[-1] == "exit 1"


def test_changed_added_and_removed_cases_are_differences() -> None:
    before = {"a": {"inspect json": "0 1234", "verify": "1"}}
    assert differences(before, before) == []
    assert differences(before, {"a": {"inspect json": "1 1234"}, "b": {"verify": "0"}}) == [
        "a: inspect json: was 0 1234, is 1 1234",
        "a: verify: was 1, is gone",
        "b: verify: was not there, is 0",
    ]
