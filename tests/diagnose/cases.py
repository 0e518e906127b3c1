"""Many cases in one test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Like ``pytest.mark.parametrize``, but as one test.

    Every case is run, with a ``tmp_path`` of its own where it asks for one, and those that fail are named.
    """
    listed = list(values)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for number, case in enumerate(listed):
                arguments = {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
                given = dict(fixtures)
                if isinstance(folder := given.get("tmp_path"), Path):
                    given["tmp_path"] = folder / str(number)
                    given["tmp_path"].mkdir()
                try:
                    test(**given, **arguments)
                except Exception as error:  # noqa: BLE001  whatever it is, the other cases are run as well
                    failed.append(f"{arguments!r}: {type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(listed)} cases\n\n" + "\n\n".join(failed))

        own = (names,) if isinstance(names, str) else names
        signature = inspect.signature(test)
        kept = [each for each in signature.parameters.values() if each.name not in own]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
