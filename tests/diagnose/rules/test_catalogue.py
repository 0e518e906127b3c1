"""The catalogue of rules: their codes are stable, and each has a title and a page."""

from __future__ import annotations

import re

from transload.diagnose.case import LAYERS
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import fix, page, parts, title

FAMILIES: dict[str, int | tuple[int, ...]] = {
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
    "W": (*range(1, 9), *range(10, 17)),
    "X": 13,
    "Y": 2,
}
PAGE_ONLY = ["C06", "E06", "E08", "N03", "S08", "S09", "V04", "X01", "X03"]


def test_every_code_exists() -> None:
    numbers = {letter: range(1, last + 1) if isinstance(last, int) else last for letter, last in FAMILIES.items()}
    expected = [f"{letter}{number:02}" for letter, family in numbers.items() for number in family]
    assert sorted(BY_CODE) == sorted(expected)
    assert [code for code, rule in sorted(BY_CODE.items()) if rule.check is None] == PAGE_ONLY
    assert [code for code, rule in BY_CODE.items() if rule.code != code] == []


def test_titles_are_stripped_and_have_no_full_stop() -> None:
    for code, rule in BY_CODE.items():
        assert rule.layer in LAYERS, code
        assert title(code) == title(code).strip(), code
        assert not title(code).endswith("."), code


def test_every_page_has_a_description_and_a_fix() -> None:
    for code in BY_CODE:
        blocks = list(parts(page(code)))
        assert blocks[0] == ("title", f"{code}: {title(code)}"), code
        headings = [text for kind, text in blocks if kind == "heading"]
        assert headings == [heading for heading in ("Fix", "What not to do", "Sources") if heading in headings], code
        about = " ".join(text for _, text in blocks[2 : blocks.index(("heading", "Fix"))])
        assert len(about) > 60, code
        assert about.endswith((".", '"')), code
        assert len(fix(code)) > 10, code
        assert not re.search(r"\bplease\b|simply|just\b", about + fix(code), re.IGNORECASE), code
        sources = [text for kind, text in blocks if kind == "item"]
        assert all(source.startswith("https://") for source in sources), code


def test_pages_contain_no_accidental_markdown_emphasis() -> None:
    for code in BY_CODE:
        for paragraph in re.sub(r"`[^`]*`", "", page(code)).split("\n\n"):
            assert paragraph.count("*") < 2, code
            assert len(re.findall(r"(?<![\w`])_+\w", paragraph)) < 2, code


def test_symptoms_come_last_in_their_layer() -> None:
    for layer in LAYERS:
        symptoms = [rule.symptom for rule in BY_CODE.values() if rule.layer == layer and rule.check]
        assert symptoms == sorted(symptoms), layer
