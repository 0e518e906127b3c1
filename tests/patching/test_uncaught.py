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


def raised_by(action: Any) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def raised_through_patch(error: Exception) -> BaseException:
    """An exception that was raised through a patched function."""

    def real(**_: Any) -> None:
        raise error

    wrapped = torch_patches._wrapped(real, torch_patches._make)
    return raised_by(lambda: wrapped(size=1))


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_transload_are_removed() -> None:
    error = raised_through_patch(ValueError("no"))
    assert torch_patches.__file__ in files(error)
    patching.remove_our_frames(error)
    assert torch_patches.__file__ not in files(error)
    assert set(files(error)) == {__file__}


@pytest.fixture(autouse=True)
def plain_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch installs a hook when a process group starts, and does not remove it."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


class Group(Exception):  # noqa: N818 - like ExceptionGroup of Python 3.11
    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def test_frames_of_transload_are_removed_from_causes_contexts_and_groups() -> None:
    inner, context, member = (raised_through_patch(ValueError(name)) for name in ("cause", "context", "member"))
    outer = raised_through_patch(Group(member))
    outer.__cause__ = inner
    inner.__context__ = context
    context.__context__ = outer  # a cycle must not hang
    patching.remove_our_frames(outer)
    for error in (outer, inner, context, member):
        assert torch_patches.__file__ not in files(error)


def test_explanation_is_printed_below_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised_through_patch(RuntimeError(KNOWN))
    with transload.patch():
        sys.excepthook(type(error), error, error.__traceback__)
    output = capsys.readouterr().err
    trace, _, explanation = output.partition(f"RuntimeError: {KNOWN}\n")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert torch_patches.__file__ not in trace
    assert explanation.startswith("\n")
    assert "CUDA device 1" in explanation


def test_unknown_error_gets_only_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised_by(lambda: vars(sys)["x"])
    with transload.patch():
        sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.endswith("KeyError: 'x'\n")


def test_previous_excepthook_is_called() -> None:
    seen: list[Any] = []
    hook = patching.explained(lambda *arguments: seen.append(arguments))
    error = raised_by(lambda: vars(sys)["x"])
    hook(KeyError, error, error.__traceback__)
    transload.patch()
    hook(KeyError, error, error.__traceback__)
    assert [(kind, value) for kind, value, _ in seen] == [(KeyError, error)] * 2


def test_failing_explanation_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transload.explaining", None)  # as if it could not be imported
    patching.print_explanation(RuntimeError(KNOWN))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("no")], ids=["interrupt", "exit"])
def test_exit_and_interrupt_are_not_explained(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    patching.print_explanation(error)
    assert capsys.readouterr().err == ""


def test_undo_keeps_an_attribute_that_was_changed_after_replace() -> None:
    class Target:
        size = 1

    replace(Target, "size", 2)
    Target.size = 3
    undo()
    assert Target.size == 3
