"""The helper that runs many cases in one test."""

from __future__ import annotations

import pytest
from tests.cases import cases

RUN: list[tuple[int, int]] = []


@cases("left", [1, 2])
@cases(("right", "sum_"), [(1, 2), (2, 3)])
def added(left: int, right: int, sum_: int) -> None:
    RUN.append((left, right))
    assert left + right == sum_


def test_every_case_is_run_and_those_that_fail_are_named() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        added()
    assert RUN == [(1, 1), (1, 2), (2, 1), (2, 2)]
    message = str(caught.value)
    assert "1 of 2 cases" in message
    assert "{'left': 2}" in message
    assert "{'right': 1, 'sum_': 2}" in message
    assert "{'left': 1}" not in message
