from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.each import each

from transload.diagnose.children import in_fork
from transload.machine import Unknown

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
TIMED_OUT = Unknown("no answer within 1 s")


def hang() -> str:
    time.sleep(60)
    return "too late"


def exit_at_once() -> str:
    os._exit(3)


def raise_error() -> str:
    raise RuntimeError


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@each(
    ("questions", "seconds", "answers"),
    [
        ([], 5.0, ()),
        ([lambda: "", lambda: "\udcff\0"], 60.0, ("", "\udcff\0")),
        ([lambda: "first", hang, lambda: "never"], 1.0, ("first", TIMED_OUT, TIMED_OUT)),
    ],
)
def test_answers_come_in_order_until_one_hangs(
    questions: list[object], seconds: float, answers: tuple[object, ...]
) -> None:
    assert in_fork(questions, seconds) == answers  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [exit_at_once, raise_error])
def test_answers_before_a_crash_are_kept(last: object, capfd: pytest.CaptureFixture[str]) -> None:
    answers = in_fork([lambda: "first", last], 5.0)  # type: ignore[list-item]
    assert answers == ("first", Unknown("no answer within 5 s"))
    assert capfd.readouterr() == ("", "")


def answer_slowly() -> str:
    time.sleep(0.3)
    return "slow"


def test_fork_that_waits_for_a_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for waited, answer in ((0.0, Unknown("no answer within 0.01 s")), (60.0, "slow")):
        monkeypatch.setattr("transload.diagnose.children._waited", lambda _, waited=waited: waited)
        assert in_fork([answer_slowly], 0.01) == (answer,)


def test_answer_larger_than_the_pipe_buffer_is_complete() -> None:
    assert in_fork([lambda: "x" * 1_000_000], 5.0) == ("x" * 1_000_000,)


def test_child_is_a_separate_process_and_is_cleaned_up(tmp_path: Path) -> None:
    def write_pid() -> str:
        (tmp_path / "note").write_text(str(os.getpid()))
        return "noted"

    before = open_files()
    assert in_fork([write_pid], 5.0) == ("noted",)
    child = int((tmp_path / "note").read_text())
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert open_files() == before


def test_child_inherits_no_open_files() -> None:
    assert in_fork([lambda: str(open_files())], 5.0) == ("2",)  # its pipe, and the /proc folder that it lists


def test_answers_are_unknown_if_fork_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", failing_fork)
    before = open_files()
    assert in_fork([lambda: "x"], 1.0) == (Unknown("could not be asked: Resource temporarily unavailable"),)
    assert open_files() == before
