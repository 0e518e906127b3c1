"""Many small cases in one test, where a test for each would cost more than what it checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str, cases: Iterable[Any], ids: Callable[[Any], object] = repr) -> Callable[[Test], Test]:
    """Use it like ``pytest.mark.parametrize`` where the cases need no isolation from each other.

    All of them run in one test, which names every case that failed. They share its fixtures, but each has a folder of
    its own as ``tmp_path``, and what it does with ``monkeypatch`` is undone after it.
    """
    parameters = [name.strip() for name in names.split(",")]
    rows = [_row(case, len(parameters), ids) for case in cases]
    assert rows

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            errors = [
                (name, _error_of(functools.partial(test, **dict(zip(parameters, values, strict=True))), fixtures, at))
                for at, (name, values) in enumerate(rows)
            ]
            failed = [(name, error) for name, error in errors if error]
            if failed:
                lines = [f"{name:.200}: {type(error).__name__}: {error}" for name, error in failed]
                message = "\n".join([f"{len(failed)} of {len(rows)} cases failed", *lines])
                raise AssertionError(message) from failed[0][1]

        signature = inspect.signature(test)
        needed = [each for name, each in signature.parameters.items() if name not in parameters]
        loop.__signature__ = signature.replace(parameters=needed)  # type: ignore[attr-defined]
        return loop

    return decorate


def _row(case: Any, width: int, ids: Callable[[Any], object]) -> tuple[str, tuple[Any, ...]]:
    """The name of a case and its values; ``pytest.param`` gives both."""
    name = getattr(case, "id", None) if (is_param := hasattr(case, "marks")) else None
    values = tuple(case.values) if is_param else tuple(case) if width > 1 else (case,)
    return str(name or ids(values if width > 1 else values[0])), values


def _error_of(test: Test, fixtures: dict[str, Any], number: int) -> BaseException | None:
    if "tmp_path" in fixtures:
        folder = fixtures["tmp_path"] / str(number)
        folder.mkdir()
        fixtures = {**fixtures, "tmp_path": folder}
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            fixtures = {**fixtures, "monkeypatch": patch}
        try:
            test(**fixtures)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - it will be named
            return error
    return None
