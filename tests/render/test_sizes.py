from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.render.words import count, plural, shape_text, size


@each(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (8192, "8.19 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (404_766_720, "405 MB"),
        (13_476_831_232, "13.5 GB"),
        (2 * 10**18, "2.00 EB"),
        (10**400, "2^1328 B"),
        (-5, "-5 B"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@each(
    ("number", "text"),
    [
        (0, "0"),
        (99_999, "99,999"),
        (100_000, "100 thousand"),
        (6_738_415_616, "6.74 billion"),
        pytest.param(10**5000, "2^16609", id="huge"),
    ],
)
def test_count(number: int, text: str) -> None:
    assert count(number) == text


def test_plural() -> None:
    assert [plural(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_shape_text() -> None:
    assert shape_text(()) == "[]"
    assert shape_text((4, 3, 3, 3)) == "[4, 3, 3, 3]"
    assert shape_text((1,) * 1000) == "[1, 1, 1, 1, 1, 1, 1, 1, … 992 more]"
    assert shape_text((10**5000, -1)) == "[2^16609, -1]"


@given(st.integers())
def test_text_of_any_number_is_short(number: int) -> None:
    scaled = number * 10**6000
    for text in (
        size(number),
        count(number),
        shape_text((number,)),
        size(scaled),
        count(scaled),
        shape_text((scaled,)),
    ):
        assert 0 < len(text) < 60
