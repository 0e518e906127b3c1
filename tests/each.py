"""Many small cases in one test, where a test for each would cost more than what it checks."""

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
    """Use it like ``pytest.mark.parametrize`` where the cases need no isolation from each other.

    All of them run in one test, which names every case that failed, and is skipped where all were. They share its
    fixtures, but each has a folder of its own as ``tmp_path``, and what it does with ``monkeypatch`` is undone.
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
                named = _names(rows, parameters, ids)
                lines = [f"{named[at]:.200}: {type(error).__name__}: {error}" for at, error in failed.items()]
                message = "\n".join([f"{len(failed)} of {len(rows)} cases failed", *lines])
                raise AssertionError(message) from next(iter(failed.values()))
            if all(outcomes):
                pytest.skip(str(outcomes[0]))

        signature = inspect.signature(test)
        needed = [each for name, each in signature.parameters.items() if name not in parameters]
        loop.__signature__ = signature.replace(parameters=needed)  # type: ignore[attr-defined]
        return loop

    return decorate


_FAILED = pytest.fail.Exception
_SKIPPED = pytest.skip.Exception


def _outcome(test: Test, fixtures: dict[str, Any], number: int) -> BaseException | None:
    """What the case raised."""
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
        except (Exception, _FAILED, _SKIPPED) as error:  # noqa: BLE001 - the test will raise it
            return error
    return None


def _values(row: Any, parameters: list[str]) -> dict[str, Any]:
    values = row.values if isinstance(row, _Param) else row if len(parameters) > 1 else [row]
    return dict(zip(parameters, values, strict=True))


def _names(rows: list[Any], parameters: list[str], ids: Ids) -> list[str]:
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
    """Check every case, and then raise one error that names all that failed. A case may be skipped."""
    failed: list[str] = []
    first: BaseException | None = None
    for case in cases:
        try:
            check(case)
        except pytest.skip.Exception:  # noqa: PERF203  each by itself, that is the point
            continue
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  whatever it is, the others are checked too
            failed.append(f"{case}: {type(error).__name__}: {error}")
            first = first or error
    if failed:
        raise AssertionError("\n".join((f"{len(failed)} failed", *failed))) from first


def grouped(name: str, cases: Iterable[Any], size: int = 10) -> pytest.MarkDecorator:
    """``parametrize`` with groups of cases, of which processes can each take some; a group is named by its first."""
    held = list(cases)
    groups = [held[at : at + size] for at in range(0, len(held), size)]
    return pytest.mark.parametrize(name, groups, ids=[_named(group[0]) for group in groups])


def _named(case: object) -> str:
    return f"{case.parent.name}/{case.name}" if isinstance(case, Path) else str(case)
