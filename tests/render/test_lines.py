from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transload.render.lines import GLUE, Prose, Style, Table, cells, layout, plain


def wrapped(block: Prose | Table, width: int, *, cut: bool = True) -> list[str]:
    return [plain(line) for line in layout([block], Style(width=width, cut=cut))]


def test_wrapped_prose_is_indented_under_its_lead() -> None:
    block = Prose((("one two three", ""),), lead=(("label  ", "dim"),))
    assert wrapped(block, 15) == ["label  one two", "       three"]


def test_glue_holds_words_together_across_spans() -> None:
    block = Prose((("aa bb", ""), (f"{GLUE}cc", "dim")))
    assert wrapped(block, 6) == ["aa", "bb cc"]


def test_word_longer_than_the_line_is_broken_only_with_cut() -> None:
    block = Prose((("x" * 10, ""),), lead=(("  ", ""),))
    assert wrapped(block, 6) == ["  xxxx", "  xxxx", "  xx"]
    assert wrapped(block, 6, cut=False) == ["  " + "x" * 10]


def test_prose_marked_whole_is_never_wrapped() -> None:
    block = Prose(((f"some{GLUE}command " * 5, ""),), lead=(("  $ ", "dim"),), whole=True)
    assert wrapped(block, 12) == ["  $ " + ("some command " * 5).rstrip()]


def test_lead_wider_than_half_the_line_gets_a_separate_line() -> None:
    block = Prose((("one two three", ""),), lead=(("a long label  ", "dim"),))
    assert wrapped(block, 40) == ["a long label  one two three"]
    assert wrapped(block, 20) == ["a long label", "      one two three"]
    assert wrapped(block._replace(lead=((" " * 14, ""),)), 20) == ["      one two three"]


def test_table_aligns_columns_and_cuts_names_in_the_middle() -> None:
    rows = [((("a" * 20 + "z" * 20, ""),), (("1 B", ""),)), ((("b", ""),), (("100 B", ""),))]
    table = Table(rows, right=frozenset({1}))
    assert wrapped(table, 30) == ["  aaaaaaaaaa…zzzzzzzzzz    1 B", "  b                      100 B"]
    assert wrapped(table, 30, cut=False)[0] == "  " + "a" * 20 + "z" * 20 + "    1 B"


def test_narrow_table_drops_columns_to_keep_names_readable() -> None:
    row = ((("n" * 40, ""),), (("middle", ""),), (("last", ""),))
    assert wrapped(Table([row], drops=(1,)), 40) == ["  " + "n" * 16 + "…" + "n" * 15 + "  last"]


def test_table_without_columns_to_shrink_only_drops_some() -> None:
    row = ((("n" * 30, ""),), (("middle", ""),), (("last", ""),))
    assert wrapped(Table([row], shrinks=(), drops=(1, 2)), 40) == ["  " + "n" * 30 + "  last"]
    assert wrapped(Table([row], shrinks=(), drops=(1,)), 30) == ["  " + "n" * 30 + "  last"]


def test_the_number_of_further_rows_is_folded() -> None:
    assert wrapped(Table([("a",), ("b",), ("c",)], most=1), 30) == [
        "  a",
        "  … and 2 more; --json lists",
        "  all of them",
    ]


def test_one_huge_name_does_not_widen_the_other_rows() -> None:
    rows = [((("m" * 5000, ""),), (("1", ""),)), ((("b", ""),), (("2", ""),))]
    assert len(wrapped(Table(rows), 100, cut=False)[1]) < 120


def test_wide_characters_take_two_columns() -> None:
    assert cells("重み") == 4
    assert cells("e\u0301") == 1
    rows = [((("重み", ""),), (("1", ""),)), ((("abcd", ""),), (("2", ""),))]
    assert wrapped(Table(rows), 40) == ["  重み  1", "  abcd  2"]


@given(
    st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=60)), st.integers(40, 90)
)
def test_no_line_is_wider_than_the_terminal(words: list[str], width: int) -> None:
    prose = Prose(tuple((f"{word} ", "") for word in words), lead=(("  ", ""),))
    table = Table([(((word, ""),), (("12 B", ""),)) for word in words])
    for line in layout([prose, table], Style(width=width, cut=True)):
        assert cells(plain(line)) <= width


@given(st.text(max_size=80))
def test_wrapping_loses_no_word(text: str) -> None:
    lines = wrapped(Prose(((text, ""),)), 40, cut=False)
    assert "".join("".join(lines).split()) == "".join(text.split())
