from __future__ import annotations

from pathlib import Path

import pytest
from tests.each import each


def test_every_case_is_run_and_those_that_fail_are_named(tmp_path: Path) -> None:
    seen = []

    @each(("one", "two"), [(1, 1), (2, 3), (4, 4), (5, 6)])
    def test(tmp_path: Path, one: int, two: int) -> None:
        seen.append((tmp_path.name, tmp_path.is_dir(), one))
        assert one == two

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 4 cases.*'one': 2, 'two': 3.*'one': 5, 'two': 6"):
        test(tmp_path=tmp_path)
    assert seen == [("0", True, 1), ("1", True, 2), ("2", True, 4), ("3", True, 5)]
