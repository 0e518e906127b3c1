"""One check over many cases in one test, where a test for each would cost more than the check itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


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
