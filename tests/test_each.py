from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.each import each, for_each


@each("word, length", [("a", 1), ("bc", 2), pytest.param("def", 4, id="wrong"), ("g", 2)])
def lengths(word: str, length: int) -> None:
    assert len(word) == length


@each("error", [ValueError, None, KeyError], ids=str)
def raises(error: type[Exception] | None) -> None:
    with pytest.raises(error or LookupError):
        raise error or ValueError


@each("word", ["no GPU", "no GPU either"], ids=["first", "second"])
def skips(word: str) -> None:
    pytest.skip(word)


def test_every_failed_case_is_named() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^2 of 4 cases failed\nwrong: .*\n'g'-2: ") as caught:
        lengths()
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(AssertionError, match=r"^1 of 3 cases failed\nNone: ValueError"):
        raises()


def test_skipped_only_if_every_case_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^no GPU$"):
        skips()

    @each("number", [1, 2, 3], ids=["first", "second", "third"])
    def some(number: int) -> None:
        if number == 2:
            pytest.skip("no GPU")
        assert number != 3

    with pytest.raises(AssertionError, match=r"^1 of 3 cases failed\nthird: "):
        some()


def test_empty_list_of_cases_is_an_error() -> None:
    with pytest.raises(AssertionError):
        each("x", [])


def test_for_each_names_every_case_that_failed() -> None:
    with pytest.raises(
        AssertionError, match=r"^2 of 3 cases failed\n0: ZeroDivisionError: .*\n4: Failed: odd$"
    ) as caught:
        for_each([0, 1, 4], lambda number: 1 % number == 0 or pytest.fail("odd"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_for_each_must_check_a_case() -> None:
    with pytest.raises(AssertionError, match=r"^there are no cases"):
        for_each([], print)
    with pytest.raises(pytest.skip.Exception, match=r"^no GPU$"):
        for_each(["no GPU", "no GPU either"], pytest.skip)
    for_each([True, False], lambda skipped: skipped and pytest.skip("no GPU"))


def test_cases_share_neither_folder_nor_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @each("case", ["first", "second"])
    def cases(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert list(tmp_path.iterdir()) == []
        assert "EACH" not in os.environ
        (tmp_path / "file").touch()
        monkeypatch.setenv("EACH", case)
        seen.append(case)

    cases(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert seen == ["first", "second"]


def test_each_can_be_nested() -> None:
    seen = []

    @each("left", [1, 2])
    @each("right", [3, 4])
    def cases(left: int, right: int) -> None:
        seen.append((left, right))

    cases()
    assert seen == [(1, 3), (1, 4), (2, 3), (2, 4)]


@each("number", [1, 2])
def test_fixtures_are_passed_and_parameters_are_not_fixtures(
    number: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert request.fixturenames.count("tmp_path") == 1
    assert "number" not in request.fixturenames
    assert tmp_path.name == str(number - 1)
