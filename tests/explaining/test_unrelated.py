"""Errors of other kinds are not claimed: they are told to be unknown."""

from __future__ import annotations

import pytest
from tests.each import for_each
from tests.explaining.unrelated import PASTED, PROVOKED, provoked

import transload


@pytest.mark.filterwarnings("ignore")
def test_a_provoked_error_is_not_claimed() -> None:
    def check(name: str) -> None:
        text = provoked(name)
        explanation = transload.explain(text, checks=False)
        assert explanation.answers == ()
        assert not explanation.known
        assert len(explanation.unknown) == 1
        assert explanation.unknown[0].said in " ".join(text.split())

    for_each(PROVOKED, check)


def test_a_pasted_error_is_not_claimed() -> None:
    def check(name: str) -> None:
        explanation = transload.explain(PASTED[name], checks=False)
        assert explanation.answers == ()
        assert len(explanation.unknown) == (name != "empty-lines")

    for_each(PASTED, check)


def test_the_nearest_known_texts_are_named_and_said_not_to_be_it() -> None:
    explanation = transload.explain("ModuleNotFoundError: No module named 'pandas'", checks=False)
    (unknown,) = explanation.unknown
    assert unknown.nearest[0].code == "class-module-missing"
    assert "where a checkpoint is loaded" in unknown.nearest[0].why
    assert "not known" in str(explanation)
    assert "but not the same" in str(explanation)


def test_what_is_like_nothing_has_nothing_near() -> None:
    (unknown,) = transload.explain("ZeroDivisionError: division by zero", checks=False).unknown
    assert unknown.nearest == ()


def test_what_is_not_known_ends_with_what_to_do_next() -> None:
    shown = str(transload.explain("ZeroDivisionError: division by zero", checks=False)).splitlines()
    assert "transload check FILE" in shown[-1]
    assert "transload doctor" in shown[-1]
