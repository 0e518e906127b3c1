from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.render.words import cut, printable


@each(
    ("raw", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("重み", "重み"),
        ("naïve", "naïve"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\u3164", "\\u3164"),
        ("no\u00a0break", "no\\xa0break"),
        ("\ud800\udfff", "\\ud800\\udfff"),
        ("\x9b31m", "\\x9b31m"),
        ("o" + "\u0301" * 6, "o" + "\u0301" * 4 + "\\u0301" * 2),
    ],
)
def test_printable_escapes_invisible_characters(raw: str, shown: str) -> None:
    assert printable(raw) == shown


@given(st.text(st.characters(codec=None)), st.integers(1, 200))
def test_printable_has_no_control_characters_and_keeps_the_limit(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert all(unicodedata.category(char)[0] != "C" for char in shown)
    assert shown.isprintable()
    shown.encode()


@given(st.text(st.characters(codec=None)))
def test_printable_without_limit_cuts_nothing_and_is_idempotent(text: str) -> None:
    shown = printable(text, None)
    assert len(shown) >= len(text)
    assert printable(shown, None) == shown


def test_printable_cuts_a_huge_name_to_the_limit() -> None:
    shown = printable("\x1b" * 50_000_000, 40)
    assert len(shown) == 40


def test_cut_keeps_both_ends() -> None:
    assert cut("abcdefghij", 7) == "abc…hij"
    assert cut("abcdefghij", 10) == "abcdefghij"
    assert cut("abcdefghij", 1) == "…"
