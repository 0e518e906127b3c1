"""Complete logs: errors wrapped in others, from several ranks, prefixed, boxed, quoted, cut, one after another."""

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
def test_innermost_cause_is_reported(head: str) -> None:
    explanation = transload.explain(LOGS[head], checks=False)
    assert [answer.code for answer in explanation.answers] == head.rpartition(" | ")[2].split()
    lines = LOGS[head].splitlines()
    for answer in explanation.answers:
        assert answer.said.split()[-1] in lines[answer.line - 1] or answer.said[:20] in lines[answer.line - 1]


def test_same_error_of_several_ranks_is_reported_once() -> None:
    text = "\n".join(f"[rank{rank}]: {CUT_OFF}" for rank in range(8))
    (answer,) = transload.explain(text, checks=False).answers
    assert (answer.code, answer.times) == ("archive-cut-off", 8)
    assert "8 times" in str(transload.explain(text, checks=False))


def test_every_occurrence_on_lines_close_together_is_counted() -> None:
    text = "\n".join(f"RuntimeError: Invalid device string: 'gpu{number % 2}'" for number in range(200))
    answers = transload.explain(text, checks=False).answers
    assert [(answer.line, answer.times) for answer in answers] == [(1, 100), (2, 100)]


def test_word_counts_only_as_a_line_of_its_own() -> None:
    assert codes("epoch 1\nKilled\n") == ["killed"]
    assert codes("epoch 1\nKilled workers: 0\n") == []


def test_an_unknown_error_beside_a_known_one_is_named() -> None:
    text = f"{HEADER}  File 'a', line 1\nValueError: no such option\n\n{HEADER}  File 'b', line 1\n{CUT_OFF}\n"
    explanation = transload.explain(text, checks=False)
    assert [answer.code for answer in explanation.answers] == ["archive-cut-off"]
    assert [unknown.said for unknown in explanation.unknown] == ["ValueError: no such option"]


def test_wrapper_error_alone_is_unknown() -> None:
    text = f"{HEADER}  File 'a', line 1\nsubprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.\n"
    explanation = transload.explain(text, checks=False)
    assert not explanation.known
    assert [unknown.said[:30] for unknown in explanation.unknown] == ["subprocess.CalledProcessError:"]


def test_unknown_inner_error_is_reported_as_unknown() -> None:
    text = (
        f"{HEADER}  File 'a', line 1\nRuntimeError: Caught ValueError in DataLoader worker process 0.\n"
        f"Original {HEADER}  File 'b', line 1\nValueError: a label is missing\n"
    )
    explanation = transload.explain(text, checks=False)
    assert explanation.answers == ()
    assert [unknown.said for unknown in explanation.unknown] == ["ValueError: a label is missing"]


def test_error_long_after_another_error_is_found() -> None:
    error = f"{HEADER}  File 'a', line 1\nValueError: no such option\n"
    explanation = transload.explain(error + "step\n" * 1000 + CUT_OFF, checks=False)
    assert [(answer.code, answer.line) for answer in explanation.answers] == [("archive-cut-off", 1004)]


def test_a_message_of_thousands_of_lines_is_one_error() -> None:
    shape = "copying a param with shape torch.Size([3]) from checkpoint, the shape in current model is torch.Size([2])."
    lines = "".join(f"\tsize mismatch for layer{number}.bias: {shape}\n" for number in range(3000))
    text = f"{HEADER}  File 'a', line 1\nRuntimeError: Error(s) in loading state_dict for Net:\n{lines}{CUT_OFF}\n"
    assert codes(text) == ["state-dict-keys", "archive-cut-off"]


def test_harmless_warning_does_not_explain_a_crash() -> None:
    start = "UserWarning: 'torch.load' received a zip file that looks like a TorchScript archive dispatching to"
    remark = f"{start} 'torch.jit.load' (call 'torch.jit.load' directly to silence this warning)\n"
    assert transload.explain(remark, checks=False).known
    crashed = transload.explain(f"{remark}{HEADER}  File 'a', line 1\nValueError: no such option\n", checks=False)
    assert [answer.kind for answer in crashed.answers] == ["remark"]
    assert not crashed.known


def raise_wrapped() -> None:
    try:
        raise_error(RuntimeError(CUT_OFF.partition(": ")[2]))
    except RuntimeError:
        raise_error(OSError("Unable to load weights from pytorch checkpoint file for 'x' at 'y'. If"))


def raise_error(error: Exception) -> NoReturn:
    raise error


def test_exception_context_counts_unless_suppressed() -> None:
    with pytest.raises(OSError, match="Unable") as caught:
        raise_wrapped()
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
def test_only_strings_and_exceptions_are_accepted(value: object) -> None:
    with pytest.raises(transload.UsageError, match="a text or an exception"):
        transload.explain(value)  # type: ignore[arg-type]
