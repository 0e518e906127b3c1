"""The causes as a whole: their codes are promises, and each has its page."""

from __future__ import annotations

import re

from transload.diagnose.case import LAYERS
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import fix, page, parts, title

FAMILIES = {
    "A": 5,
    "C": 11,
    "D": 6,
    "E": 13,
    "H": 6,
    "J": 1,
    "K": 12,
    "L": 13,
    "M": 3,
    "N": 3,
    "P": 9,
    "R": 2,
    "S": 9,
    "T": 9,
    "U": 13,
    "V": 5,
    "W": 2,
    "X": 13,
}
PAGE_ONLY = ["C06", "E06", "E08", "N03", "S08", "S09", "V04", "X01", "X03"]


def test_every_code_exists() -> None:
    wanted = [f"{letter}{number:02}" for letter, last in FAMILIES.items() for number in range(1, last + 1)]
    assert sorted(BY_CODE) == sorted(wanted)
    assert [code for code, rule in sorted(BY_CODE.items()) if rule.check is None] == PAGE_ONLY
    assert [code for code, rule in BY_CODE.items() if rule.code != code] == []


def test_every_title_reads_on_after_a_colon() -> None:
    for code, rule in BY_CODE.items():
        assert rule.layer in LAYERS, code
        assert title(code) == title(code).strip(), code
        assert not title(code).endswith("."), code


def test_every_page_says_what_it_is_and_what_to_do() -> None:
    for code in BY_CODE:
        read = list(parts(page(code)))
        assert read[0] == ("title", f"{code}: {title(code)}"), code
        headings = [text for kind, text in read if kind == "heading"]
        assert headings == [each for each in ("Fix", "What not to do", "Sources") if each in headings], code
        about = " ".join(text for _, text in read[2 : read.index(("heading", "Fix"))])
        assert len(about) > 60, code
        assert about.endswith((".", '"')), code
        assert len(fix(code)) > 10, code
        assert not re.search(r"\bplease\b|simply|just\b", about + fix(code), re.IGNORECASE), code
        sources = [text for kind, text in read if kind == "item"]
        assert all(source.startswith("https://") for source in sources), code


def test_no_text_of_a_page_is_taken_for_emphasis() -> None:
    for code in BY_CODE:
        for paragraph in re.sub(r"`[^`]*`", "", page(code)).split("\n\n"):
            assert paragraph.count("*") < 2, code
            assert len(re.findall(r"(?<![\w`])_+\w", paragraph)) < 2, code


def test_symptoms_come_last_of_their_layer() -> None:
    for layer in LAYERS:
        symptoms = [rule.symptom for rule in BY_CODE.values() if rule.layer == layer and rule.check]
        assert symptoms == sorted(symptoms), layer
