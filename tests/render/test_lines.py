from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transload.render.lines import GLUE, Prose, Style, Table, cells, layout, plain


def folded(block: Prose | Table, width: int, *, cut: bool = True) -> list[str]:
    return [plain(line) for line in layout([block], Style(width=width, cut=cut))]


def test_prose_folds_under_its_lead() -> None:
    block = Prose((("one two three", ""),), lead=(("label  ", "dim"),))
    assert folded(block, 15) == ["label  one two", "       three"]


def test_glue_holds_words_together_across_spans() -> None:
    block = Prose((("aa bb", ""), (f"{GLUE}cc", "dim")))
    assert folded(block, 6) == ["aa", "bb cc"]


def test_a_word_longer_than_the_line_is_broken_for_eyes_only() -> None:
    block = Prose((("x" * 10, ""),), lead=(("  ", ""),))
    assert folded(block, 6) == ["  xxxx", "  xxxx", "  xx"]
    assert folded(block, 6, cut=False) == ["  " + "x" * 10]


def test_what_is_to_be_copied_is_never_broken() -> None:
    block = Prose(((f"some{GLUE}command " * 5, ""),), lead=(("  $ ", "dim"),), whole=True)
    assert folded(block, 12) == ["  $ " + ("some command " * 5).rstrip()]


def test_a_lead_of_more_than_half_the_width_gets_a_line_of_its_own() -> None:
    block = Prose((("one two three", ""),), lead=(("a long label  ", "dim"),))
    assert folded(block, 40) == ["a long label  one two three"]
    assert folded(block, 20) == ["a long label", "      one two three"]
    assert folded(block._replace(lead=((" " * 14, ""),)), 20) == ["      one two three"]


def test_a_table_aligns_and_cuts_names_in_the_middle() -> None:
    rows = [((("a" * 20 + "z" * 20, ""),), (("1 B", ""),)), ((("b", ""),), (("100 B", ""),))]
    table = Table(rows, right=frozenset({1}))
    assert folded(table, 30) == ["  aaaaaaaaaa…zzzzzzzzzz    1 B", "  b                      100 B"]
    assert folded(table, 30, cut=False)[0] == "  " + "a" * 20 + "z" * 20 + "    1 B"


def test_a_narrow_table_leaves_out_columns_before_it_cuts_names_to_nothing() -> None:
    row = ((("n" * 40, ""),), (("middle", ""),), (("last", ""),))
    assert folded(Table([row], drops=(1,)), 40) == ["  " + "n" * 16 + "…" + "n" * 15 + "  last"]


def test_one_monstrous_name_does_not_push_the_others_away() -> None:
    rows = [((("m" * 5000, ""),), (("1", ""),)), ((("b", ""),), (("2", ""),))]
    assert len(folded(Table(rows), 100, cut=False)[1]) < 120


def test_wide_letters_take_two_columns() -> None:
    assert cells("重み") == 4
    assert cells("e\u0301") == 1
    rows = [((("重み", ""),), (("1", ""),)), ((("abcd", ""),), (("2", ""),))]
    assert folded(Table(rows), 40) == ["  重み  1", "  abcd  2"]


@given(
    st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=60)), st.integers(40, 90)
)
def test_nothing_for_eyes_is_wider_than_the_screen(words: list[str], width: int) -> None:
    prose = Prose(tuple((f"{word} ", "") for word in words), lead=(("  ", ""),))
    table = Table([(((word, ""),), (("12 B", ""),)) for word in words])
    for line in layout([prose, table], Style(width=width, cut=True)):
        assert cells(plain(line)) <= width


@given(st.text(max_size=80))
def test_no_word_is_lost(text: str) -> None:
    lines = folded(Prose(((text, ""),)), 40, cut=False)
    assert "".join("".join(lines).split()) == "".join(text.split())
