"""Errors of other kinds are reported as unknown."""

from __future__ import annotations

import pytest
from tests.each import for_each
from tests.explaining.unrelated import PASTED, PROVOKED, SOURCES, provoked

import transload


@pytest.mark.filterwarnings("ignore")
def test_provoked_unrelated_errors_get_no_answer() -> None:
    def check(name: str) -> None:
        text = provoked(name)
        explanation = transload.explain(text, checks=False)
        assert explanation.answers == ()
        assert not explanation.known
        assert len(explanation.unknown) == 1
        assert explanation.unknown[0].said in " ".join(text.split())

    for_each(PROVOKED, check)


def test_pasted_unrelated_errors_get_no_answer() -> None:
    def check(name: str) -> None:
        explanation = transload.explain(PASTED[name], checks=False)
        assert explanation.answers == ()
        assert len(explanation.unknown) == (name != "empty-lines")

    for_each(PASTED, check)


def test_errors_of_other_libraries_get_no_answer() -> None:
    def check(name: str) -> None:
        assert transload.explain(SOURCES[name], checks=False).answers == ()

    assert len(SOURCES) > 300
    for_each(list(SOURCES), check)


def test_nearest_known_errors_are_named_as_not_the_same() -> None:
    explanation = transload.explain("ModuleNotFoundError: No module named 'pandas'", checks=False)
    (unknown,) = explanation.unknown
    assert unknown.nearest[0].code == "class-module-missing"
    assert "in another context" in unknown.nearest[0].why
    assert "not known" in str(explanation)
    assert "but not the same" in str(explanation)


def test_error_unlike_any_known_error_has_no_nearest() -> None:
    (unknown,) = transload.explain("ZeroDivisionError: division by zero", checks=False).unknown
    assert unknown.nearest == ()


def test_unknown_error_is_shown_with_next_steps() -> None:
    shown = str(transload.explain("ZeroDivisionError: division by zero", checks=False)).splitlines()
    assert "transload check FILE" in shown[2]
    assert "transload doctor" in shown[2]


def test_unknown_error_shows_what_a_bug_report_needs() -> None:
    explanation = transload.explain("ValueError: rank 3 at 10.0.0.7:2950 wants /home/me/run 2/x.bin", checks=False)
    shown = " ".join(str(explanation).split())
    assert "To report it, include all of the text" in shown
    assert "transload doctor --json" in shown
    (unknown,) = explanation.to_dict()["unknown"]
    assert unknown["normalised"] == "ValueError: rank … at …:… wants … …"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("E: 3 of 4", "E: 17 of 2,048"),
        ("E: C:\\Users\\me\\a.pt is bad", "E: /home/you/b_1.pt is bad"),
        ("E: <Thing at 0x7f00> has 1.5 GB", "E: <Thing at 0x12ab> has 20 GB"),
        ("E: see https://host/a?b=1 or ask", "E: see http://10.1.1.1:80/ or ask"),
        ("E: node 9f8a6c1d-aaaa-bbbb-cccc-0123456789ab gone", "E: node 00000000-1111-2222-3333-444444444444 gone"),
    ],
)
def test_normalised_texts_of_the_same_error_are_equal(one: str, other: str) -> None:
    first, second = (transload.explain(text, checks=False).unknown[0].normalised for text in (one, other))
    assert first == second
    assert "…" in first
