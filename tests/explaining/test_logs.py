"""Whole logs: errors wrapped in others, printed by several ranks, prefixed, boxed, quoted, cut, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from tests.explaining.wordings import sections

import transload

LOGS = dict(sections(Path(__file__).with_name("logs.txt")))
HEADER = "Traceback (most recent call last):\n"
CUT_OFF = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"


def codes(text: str) -> list[str]:
    return [answer.code for answer in transload.explain(text, checks=False).answers]


@pytest.mark.parametrize("head", LOGS)
def test_the_innermost_true_cause_is_told(head: str) -> None:
    explanation = transload.explain(LOGS[head], checks=False)
    assert [answer.code for answer in explanation.answers] == head.rpartition(" | ")[2].split()
    lines = LOGS[head].splitlines()
    for answer in explanation.answers:
        assert answer.said.split()[-1] in lines[answer.line - 1] or answer.said[:20] in lines[answer.line - 1]


def test_the_same_error_of_several_ranks_is_told_once() -> None:
    text = "\n".join(f"[rank{rank}]: {CUT_OFF}" for rank in range(8))
    (answer,) = transload.explain(text, checks=False).answers
    assert (answer.code, answer.times) == ("archive-cut-off", 8)
    assert "8 times" in str(transload.explain(text, checks=False))


def test_an_unknown_error_beside_a_known_one_is_named() -> None:
    text = f"{HEADER}  File 'a', line 1\nValueError: no such option\n\n{HEADER}  File 'b', line 1\n{CUT_OFF}\n"
    explanation = transload.explain(text, checks=False)
    assert [answer.code for answer in explanation.answers] == ["archive-cut-off"]
    assert [each.said for each in explanation.unknown] == ["ValueError: no such option"]


def test_what_only_tells_of_another_error_is_unknown_alone() -> None:
    text = f"{HEADER}  File 'a', line 1\nsubprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.\n"
    explanation = transload.explain(text, checks=False)
    assert not explanation.known
    assert [each.said[:30] for each in explanation.unknown] == ["subprocess.CalledProcessError:"]


def test_an_error_inside_that_is_not_known_is_said_to_be_unknown() -> None:
    text = (
        f"{HEADER}  File 'a', line 1\nRuntimeError: Caught ValueError in DataLoader worker process 0.\n"
        f"Original {HEADER}  File 'b', line 1\nValueError: a label is missing\n"
    )
    explanation = transload.explain(text, checks=False)
    assert explanation.answers == ()
    assert [each.said for each in explanation.unknown] == ["ValueError: a label is missing"]


def test_what_is_printed_long_after_an_error_is_still_seen() -> None:
    error = f"{HEADER}  File 'a', line 1\nValueError: no such option\n"
    explanation = transload.explain(error + "step\n" * 1000 + CUT_OFF, checks=False)
    assert [(answer.code, answer.line) for answer in explanation.answers] == [("archive-cut-off", 1004)]


def test_a_message_of_thousands_of_lines_is_one_error() -> None:
    shape = "copying a param with shape torch.Size([3]) from checkpoint, the shape in current model is torch.Size([2])."
    lines = "".join(f"\tsize mismatch for layer{number}.bias: {shape}\n" for number in range(3000))
    text = f"{HEADER}  File 'a', line 1\nRuntimeError: Error(s) in loading state_dict for Net:\n{lines}{CUT_OFF}\n"
    assert codes(text) == ["state-dict-keys", "archive-cut-off"]


def test_a_harmless_remark_does_not_explain_a_crash() -> None:
    warned = "UserWarning: 'torch.load' received a zip file that looks like a TorchScript archive dispatching to"
    remark = f"{warned} 'torch.jit.load' (call 'torch.jit.load' directly to silence this warning)\n"
    assert transload.explain(remark, checks=False).known
    crashed = transload.explain(f"{remark}{HEADER}  File 'a', line 1\nValueError: no such option\n", checks=False)
    assert [answer.kind for answer in crashed.answers] == ["remark"]
    assert not crashed.known


def wrapped() -> None:
    try:
        fail(RuntimeError(CUT_OFF.partition(": ")[2]))
    except RuntimeError:
        fail(OSError("Unable to load weights from pytorch checkpoint file for 'x' at 'y'. If"))


def fail(error: Exception) -> NoReturn:
    raise error


def test_of_an_exception_its_own_chain_counts() -> None:
    with pytest.raises(OSError, match="Unable") as caught:
        wrapped()
    assert codes_of(caught.value) == ["archive-cut-off"]
    caught.value.__suppress_context__ = True
    assert codes_of(caught.value) == ["transformers-load"]


def codes_of(error: BaseException) -> list[str]:
    explanation = transload.explain(error, checks=False)
    assert all(answer.line == 0 for answer in explanation.answers)
    return [answer.code for answer in explanation.answers]


def test_an_exception_that_cannot_be_printed_is_unknown() -> None:
    class Odd(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError("no words")

    assert not transload.explain(Odd(), checks=False).known


@pytest.mark.parametrize("value", [3, None, b"bytes"])
def test_only_texts_and_exceptions_are_taken(value: object) -> None:
    with pytest.raises(transload.UsageError, match="a text or an exception"):
        transload.explain(value)  # type: ignore[arg-type]
