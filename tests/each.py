"""Many small cases in one test, where the overhead of a test per case would exceed the cost of its check."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

_Param = type(pytest.param())
Case = TypeVar("Case")
Test = Callable[..., None]
Ids = Callable[[Any], object] | list[str] | None


def each(names: str | Sequence[str], cases: Iterable[Any], ids: Ids = None) -> Callable[[Test], Test]:
    """A replacement for ``pytest.mark.parametrize`` for cases that need no isolation from each other.

    All cases run in one test, which names every case that failed, and is skipped if all cases were. They share its
    fixtures, but each case has its own folder as ``tmp_path``, and its use of ``monkeypatch`` is undone after it.
    """
    parameters = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(cases)
    assert rows, "there are no cases"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            outcomes = [
                _outcome(functools.partial(test, **_values(row, parameters)), fixtures, at)
                for at, row in enumerate(rows)
            ]
            _report(outcomes, lambda: _case_names(rows, parameters, ids))

        signature = inspect.signature(test)
        fixture_parameters = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        loop.__signature__ = signature.replace(parameters=fixture_parameters)  # type: ignore[attr-defined]
        return loop

    return decorate


_FAILED = pytest.fail.Exception
_SKIPPED = pytest.skip.Exception


def _outcome(test: Callable[..., object], fixtures: dict[str, Any], number: int = 0) -> BaseException | None:
    """The error that the case raised, or None."""
    if "tmp_path" in fixtures:
        folder = fixtures["tmp_path"] / str(number)
        folder.mkdir()
        fixtures = {**fixtures, "tmp_path": folder}
    if "capsys" in fixtures:
        fixtures["capsys"].readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            fixtures = {**fixtures, "monkeypatch": patch}
        try:
            test(**fixtures)
        except (Exception, _FAILED, _SKIPPED) as error:  # noqa: BLE001 - the test raises it later
            return error
    return None


def _report(outcomes: list[BaseException | None], case_names: Callable[[], list[str]]) -> None:
    """Raise an error that names every case that failed, or skip the test if every case was skipped."""
    failed = {at: error for at, error in enumerate(outcomes) if isinstance(error, Exception | _FAILED)}
    if failed:
        named = case_names()
        lines = [f"{named[at]:.200}: {type(error).__name__}: {error}" for at, error in failed.items()]
        message = "\n".join([f"{len(failed)} of {len(outcomes)} cases failed", *lines])
        raise AssertionError(message) from next(iter(failed.values()))
    if all(outcomes):
        pytest.skip(str(outcomes[0]))


def _values(row: Any, parameters: list[str]) -> dict[str, Any]:
    values = row.values if isinstance(row, _Param) else row if len(parameters) > 1 else [row]
    return dict(zip(parameters, values, strict=True))


def _case_names(rows: list[Any], parameters: list[str], ids: Ids) -> list[str]:
    if isinstance(ids, list):
        return ids
    name = ids or repr
    return [
        str(row.id)
        if isinstance(row, _Param) and row.id
        else "-".join(str(name(value)) for value in _values(row, parameters).values())
        for row in rows
    ]


def for_each(cases: Iterable[Case], check: Callable[[Case], object]) -> None:
    """Check every case, then raise one error that names every case that failed.

    It is an error if there are no cases. A case may be skipped; the test is skipped if all were.
    """
    rows = list(cases)
    assert rows, "there are no cases"
    outcomes = [_outcome(functools.partial(check, case), {}) for case in rows]
    _report(outcomes, lambda: list(map(str, rows)))


def parametrize_groups(name: str, cases: Iterable[Any], size: int = 10) -> pytest.MarkDecorator:
    """``parametrize`` with groups of cases, which processes can share out; a group has the name of its first case."""
    rows = list(cases)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return pytest.mark.parametrize(name, groups, ids=[_case_name(group[0]) for group in groups])


def _case_name(case: object) -> str:
    return f"{case.parent.name}/{case.name}" if isinstance(case, Path) else str(case)
