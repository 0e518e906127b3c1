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
    assert rows

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            outcomes = [
                _outcome(functools.partial(test, **_values(row, parameters)), fixtures, at)
                for at, row in enumerate(rows)
            ]
            failed = {at: error for at, error in enumerate(outcomes) if isinstance(error, Exception | _FAILED)}
            if failed:
                case_names = _case_names(rows, parameters, ids)
                lines = [f"{case_names[at]:.200}: {type(error).__name__}: {error}" for at, error in failed.items()]
                message = "\n".join([f"{len(failed)} of {len(rows)} cases failed", *lines])
                raise AssertionError(message) from next(iter(failed.values()))
            if all(outcomes):
                pytest.skip(str(outcomes[0]))

        signature = inspect.signature(test)
        fixture_parameters = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        loop.__signature__ = signature.replace(parameters=fixture_parameters)  # type: ignore[attr-defined]
        return loop

    return decorate


_FAILED = pytest.fail.Exception
_SKIPPED = pytest.skip.Exception


def _outcome(test: Test, fixtures: dict[str, Any], number: int) -> BaseException | None:
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
    """Check every case, then raise one error that names every case that failed. A case may be skipped."""
    failed: list[str] = []
    first: BaseException | None = None
    for case in cases:
        try:
            check(case)
        except pytest.skip.Exception:  # noqa: PERF203  every case is checked by itself
            continue
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  after any error the others are checked
            failed.append(f"{case}: {type(error).__name__}: {error}")
            first = first or error
    if failed:
        raise AssertionError("\n".join((f"{len(failed)} failed", *failed))) from first


def parametrize_groups(name: str, cases: Iterable[Any], size: int = 10) -> pytest.MarkDecorator:
    """``parametrize`` with groups of cases, which processes can share out; a group has the name of its first case."""
    rows = list(cases)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return pytest.mark.parametrize(name, groups, ids=[_case_name(group[0]) for group in groups])


def _case_name(case: object) -> str:
    return f"{case.parent.name}/{case.name}" if isinstance(case, Path) else str(case)
