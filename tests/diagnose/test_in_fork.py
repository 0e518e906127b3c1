from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.each import each

from transload.diagnose.children import in_fork
from transload.machine import Unknown

LATE = Unknown("no answer within 1 s")


def hang() -> str:
    time.sleep(60)
    return "too late"


def end() -> str:
    os._exit(3)


def raising() -> str:
    raise RuntimeError


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@each(
    ("questions", "seconds", "answers"),
    [
        ([], 5.0, ()),
        ([lambda: "", lambda: "\udcff\0"], 60.0, ("", "\udcff\0")),
        ([lambda: "first", hang, lambda: "never"], 1.0, ("first", LATE, LATE)),
    ],
)
def test_answers_come_in_order_until_one_hangs(
    questions: list[object], seconds: float, answers: tuple[object, ...]
) -> None:
    assert in_fork(questions, seconds) == answers  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [end, raising])
def test_a_child_that_dies_has_said_what_it_said(last: object, capfd: pytest.CaptureFixture[str]) -> None:
    told = in_fork([lambda: "first", last], 5.0)  # type: ignore[list-item]
    assert told == ("first", Unknown("no answer within 5 s"))
    assert capfd.readouterr() == ("", "")


def test_an_answer_longer_than_a_pipe_comes_whole() -> None:
    assert in_fork([lambda: "x" * 1_000_000], 5.0) == ("x" * 1_000_000,)


def test_the_child_is_another_process_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def note() -> str:
        (tmp_path / "note").write_text(str(os.getpid()))
        return "noted"

    before = open_files()
    assert in_fork([note], 5.0) == ("noted",)
    child = int((tmp_path / "note").read_text())
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert open_files() == before


def test_the_child_holds_nothing_open_of_ours() -> None:
    assert in_fork([lambda: str(open_files())], 5.0) == ("2",)  # its pipe, and the folder it looks into


def test_where_no_process_can_be_made_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none)
    before = open_files()
    assert in_fork([lambda: "x"], 1.0) == (Unknown("could not be asked: Resource temporarily unavailable"),)
    assert open_files() == before
