"""Many cases in one test: all of them are run, and each that fails is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, without a test to collect, set up and report for each case.

    It is not for tests with fixtures, which all cases would share.
    """
    single = isinstance(names, str)
    keys = (names,) if isinstance(names, str) else names
    given = [dict(zip(keys, (value,) if single else value, strict=True)) for value in values]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [each for name, each in signature.parameters.items() if name not in keys]

        @wraps(test)
        def run(**outer: Any) -> None:
            failed = []
            for case in given:
                try:
                    test(**case, **outer)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001, PERF203  said below
                    failed.append(f"{case}\n{type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(given)} cases:\n\n" + "\n\n".join(failed), pytrace=False)

        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
