from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest

import transload
from transload import patching
from transload.patching import replace, torch_patches, undo

KNOWN = (
    "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1. "
    "Please use torch.load with map_location to map your storages to an existing device."
)


def caught(action: Any) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def through_us(error: Exception) -> BaseException:
    """An exception that came up through a function of ours."""

    def real(**_: Any) -> None:
        raise error

    made = torch_patches._wrapped(real, torch_patches._make)
    return caught(lambda: made(size=1))


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_ours_are_taken_out() -> None:
    error = through_us(ValueError("no"))
    assert torch_patches.__file__ in files(error)
    patching.remove_our_frames(error)
    assert torch_patches.__file__ not in files(error)
    assert set(files(error)) == {__file__}


@pytest.fixture(autouse=True)
def plain_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts a hook of its own there when a process group begins, and leaves it."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


class Group(Exception):  # noqa: N818 - as Python 3.11 has it
    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def test_frames_of_ours_are_taken_out_of_causes_contexts_and_groups() -> None:
    inner, context, member = (through_us(ValueError(name)) for name in ("cause", "context", "member"))
    outer = through_us(Group(member))
    outer.__cause__ = inner
    inner.__context__ = context
    context.__context__ = outer  # a circle is no reason to hang
    patching.remove_our_frames(outer)
    for error in (outer, inner, context, member):
        assert torch_patches.__file__ not in files(error)


def test_the_traceback_comes_first_and_the_explanation_below(capsys: pytest.CaptureFixture[str]) -> None:
    error = through_us(RuntimeError(KNOWN))
    with transload.patch():
        sys.excepthook(type(error), error, error.__traceback__)
    told = capsys.readouterr().err
    trace, _, explanation = told.partition(f"RuntimeError: {KNOWN}\n")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert torch_patches.__file__ not in trace
    assert explanation.startswith("\n")
    assert "CUDA device 1" in explanation


def test_an_unknown_error_gets_its_traceback_and_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    error = caught(lambda: vars(sys)["x"])
    with transload.patch():
        sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.endswith("KeyError: 'x'\n")


def test_a_hook_of_the_program_is_called_first() -> None:
    seen: list[Any] = []
    hook = patching.explained(lambda *told: seen.append(told))
    error = caught(lambda: vars(sys)["x"])
    hook(KeyError, error, error.__traceback__)
    transload.patch()
    hook(KeyError, error, error.__traceback__)
    assert [(kind, value) for kind, value, _ in seen] == [(KeyError, error)] * 2


def test_a_failing_explanation_is_no_second_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transload.explaining", None)  # as if it could not be imported
    patching.print_explanation(RuntimeError(KNOWN))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("no")], ids=["interrupt", "exit"])
def test_leaving_is_not_explained(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    patching.print_explanation(error)
    assert capsys.readouterr().err == ""


def test_changes_that_somebody_changed_again_are_left() -> None:
    class Theirs:
        size = 1

    replace(Theirs, "size", 2)
    Theirs.size = 3
    undo()
    assert Theirs.size == 3
