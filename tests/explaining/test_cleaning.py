"""Raw logs: colours, progress bars, prefixes, junk, and too much text."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest

import transload
from transload.explaining import explain_log
from transload.explaining.logs import BLOCK, is_binary, is_packed, lines_of, pieces, read_blocks, split

CUT_OFF = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"


class Pipe(io.RawIOBase):
    """A stream that cannot seek and returns its bytes in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, _: int = -1) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


@pytest.mark.parametrize(
    ("raw", "text", "stream"),
    [
        ("plain", "plain", ""),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07text", "red text", ""),
        (" 10%|#    | 1/9\r 90%|#### | 8/9\rdone", "done", ""),
        ("[rank3]:   File", "  File", "rank3"),
        ("[default0]:boom", "boom", "default0"),
        ("(RayTrainWorker pid=123, ip=10.0.0.1) boom", "boom", "(RayTrainWorker pid=123, ip=10.0.0.1)"),
        ("12: boom", "boom", "12"),
        ("2026-01-02 03:04:05,678 - ERROR - boom", "boom", ""),
        ("[2026-01-02 03:04:05] [ERROR] boom", "boom", ""),
        ("2026-01-02T03:04:05.123456789Z stderr F   File", "  File", ""),
        ("Jan  2 03:04:05 host python[42]: boom", "boom", ""),
        ("E1115 11:40:36.068000 18367 torch/export/__init__.py:348]   File", "  File", ""),
        ("ERROR 03-02 19:49:00 [executor.py:783]   File", "  File", ""),
        ("[   12.345678] NVRM: boom", "boom", ""),
        ("[rank0]:[2026-01-02 03:04:05] boom", "boom", "rank0"),
        ("│ /home/me/run.py:8 in <module>      │", "  /home/me/run.py:8 in <module>", ""),
        ("> quoted", "quoted", ""),
        ("  | RuntimeError: boom", "RuntimeError: boom", ""),
        ("nul\x00 and \x08 bell\x07", "nul and  bell", ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_prefixes_and_control_codes_are_removed(raw: str, text: str, stream: str) -> None:
    (line,) = lines_of(raw)
    assert (line.text, line.stream) == (text, stream)


def test_unterminated_title_sequence_hides_no_other_line() -> None:
    assert [line.text for line in lines_of("\x1b]0;title\nRuntimeError: boom")] == ["", "RuntimeError: boom"]


def test_pipe_is_read_as_it_comes() -> None:
    blocks = [b"one\n", b"two", b"three\n"]
    assert [*read_blocks(Pipe([*blocks]))] == blocks  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("typed", [f"{CUT_OFF}\n\x04", f"first\n{CUT_OFF}\x04"], ids=["after a line", "within a line"])
def test_pasted_text_ends_with_one_ctrl_d(typed: str) -> None:
    ours, theirs = os.openpty()
    try:
        os.write(ours, typed.encode())
        command = [sys.executable, "-m", "transload", "explain", "--no-checks"]
        result = subprocess.run(command, stdin=theirs, capture_output=True, check=False, timeout=300)
    finally:
        os.close(theirs)
        os.close(ours)
    assert result.returncode == 0
    assert b"archive-cut-off" in result.stdout


@pytest.mark.parametrize(
    ("data", "binary"),
    [
        (b"plain\n", False),
        ("größer".encode("latin-1"), False),
        ("错误 内存不足".encode("gbk"), False),
        ("größer".encode("utf-16"), False),
        ("plain text".encode("utf-16-le"), False),
        (b"\x1b[31mred\x1b[0m 10%\r20%\x08\x07\n", False),
        (bytes(1_000) + b"a log that was cut off\n", False),
        (bytes(1_000), False),
        (bytes(range(256)), True),
        (random.Random(1).randbytes(1_000), True),  # noqa: S311
        (b"PK" + bytes(1_000) + b"PK", True),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_is_binary_accepts_text_in_any_encoding(data: bytes, *, binary: bool) -> None:
    assert is_binary(data) is binary


@pytest.mark.parametrize(
    ("head", "packed"),
    [
        (b"PK\x03\x04", True),
        (b"\x1f\x8b\x08", True),
        (b"\x80\x02}q", True),
        (b"\x40\0\0\0\0\0\0\0{}", True),
        (b"PK is text", False),
        (b"Traceback (most", False),
        (b"12345678{", False),
        (b"", False),
    ],
)
def test_is_packed_recognizes_the_first_bytes(head: bytes, *, packed: bool) -> None:
    assert is_packed(head) is packed


QUIET = "2026-01-02 03:04:05 INFO step 12 loss 0.1234 lr 1e-4\n"
TRACEBACK = f"Traceback (most recent call last):\n  File 'a.py', line 1, in f\n    g()\n{CUT_OFF}\n"


def log_blocks(count: int, *ends: str) -> Iterator[bytes]:
    """A log of ``count`` blocks without an error, after the first text and before the second."""
    yield ends[0].encode()
    for _ in range(count):
        yield (QUIET * (BLOCK // len(QUIET))).encode()
    yield ends[1].encode()


def test_error_far_from_the_end_of_a_long_log_is_found() -> None:
    explanation = explain_log(log_blocks(9, TRACEBACK, "cleanup ok\n"), checks=False)
    assert [(answer.code, answer.line, answer.times) for answer in explanation.answers] == [("archive-cut-off", 4, 1)]
    assert not explanation.shortened


def test_every_error_of_a_long_log_is_counted_with_the_line_of_the_first() -> None:
    (answer,) = explain_log(log_blocks(3, QUIET + TRACEBACK, TRACEBACK * 2), checks=False).answers
    assert (answer.code, answer.line, answer.times) == ("archive-cut-off", 5, 3)


@pytest.mark.parametrize("error", [TRACEBACK, f"{CUT_OFF}\n"], ids=["tracebacks", "lines"])
def test_repeated_error_is_counted_across_all_blocks(error: str) -> None:
    count = 5 * BLOCK // len(error) // 2
    (answer,) = transload.explain(error * count, checks=False).answers
    assert (answer.code, answer.times) == ("archive-cut-off", count)


def test_unknown_error_far_from_the_end_is_named() -> None:
    unknown = TRACEBACK.replace(CUT_OFF, "ValueError: no such option")
    explanation = explain_log(log_blocks(2, unknown, "cleanup ok\n"), checks=False)
    assert [(each.said, each.line) for each in explanation.unknown] == [("ValueError: no such option", 4)]
    explanation = explain_log(log_blocks(2, "the disk made an error\n", "cleanup ok\n"), checks=False)
    assert [(each.said, each.line) for each in explanation.unknown] == [("the disk made an error", 1)]


def test_long_log_takes_little_memory() -> None:
    explain_log([TRACEBACK.encode()], checks=False)  # what is read once
    tracemalloc.start()
    try:
        assert explain_log(log_blocks(24, TRACEBACK, TRACEBACK), checks=False).answers[0].times == 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * BLOCK


def test_values_of_one_error_are_listed_up_to_a_limit_and_all_counted() -> None:
    text = "\n".join(f"RuntimeError: Invalid device string: 'gpu{number}'" for number in range(200))
    answers = transload.explain(text, checks=False).answers
    assert len(answers) == 50
    assert sum(answer.times for answer in answers) == 200
    assert "gpu0'" in answers[0].said
    assert "gpu199'" in answers[-1].said


@pytest.mark.parametrize("offset", range(0, 200, 23))
def test_exception_is_not_divided_between_pieces(offset: int) -> None:
    quiet = QUIET * (BLOCK // len(QUIET))
    text = f"{quiet[: BLOCK - offset]}\n{TRACEBACK}{quiet}"
    at = errors = 0
    for number, part in pieces([text]):
        assert text.startswith(part, at)
        assert number == 1 + text.count("\n", 0, at)
        errors += TRACEBACK in part
        at += len(part)
    assert (at, errors) == (len(text), 1)


def test_line_longer_than_a_block_is_divided() -> None:
    parts = [*pieces(["x" * (3 * BLOCK) + f"\n{CUT_OFF}"])]
    assert all(len(text) <= BLOCK for _, text in parts)
    assert transload.explain("x" * (3 * BLOCK) + f"\n{CUT_OFF}", checks=False).answers[0].line == 2


def test_utf_16_and_crlf_are_read() -> None:
    assert explain_log([CUT_OFF.encode("utf-16")], checks=False).known
    assert explain_log([f"a\r\n{CUT_OFF}\r\n".encode()], checks=False).answers[0].line == 2


@pytest.mark.parametrize("seed", range(20))
def test_random_junk_gets_no_answer(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    fragments = [
        *"abc \n\r\t:'\"{}()[]<>/\\|│╭─%\x00\x1b\ufffd",
        "Traceback (most recent call last):",
        "  File ",
        "Error: ",
    ]
    text = "".join(rng.choices(fragments, k=5_000))
    assert not transload.explain(text, checks=False).answers
    assert not explain_log([rng.randbytes(5_000)], checks=False).answers


@pytest.mark.parametrize("seed", range(10))
def test_known_error_is_found_in_junk(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    junk = "".join(rng.choices("abc \n:'{}()\x1b", k=2_000))
    explanation = transload.explain(f"{junk}\n{CUT_OFF}\n{junk}", checks=False)
    assert [answer.code for answer in explanation.answers] == ["archive-cut-off"]


def test_a_traceback_in_one_line_of_json_is_unfolded() -> None:
    line = (
        '{"level": "error", "exc": "Traceback (most recent call last):\\n  File \\"run.py\\", line 1, in <module>\\n'
        f'    main()\\n{CUT_OFF}"}}'
    )
    (answer,) = transload.explain(f"start\n{line}\nend", checks=False).answers
    assert (answer.code, answer.line) == ("archive-cut-off", 2)


@pytest.mark.parametrize("width", [30, 44, 80])
def test_lines_wrapped_by_a_terminal_are_joined(width: int) -> None:
    text = "\n".join(CUT_OFF[at : at + width] for at in range(0, len(CUT_OFF), width))
    (answer,) = transload.explain(f"$ python run.py\n{text}\n", checks=False).answers
    assert (answer.code, answer.line) == ("archive-cut-off", 0)


def test_incomplete_traceback_is_reported_as_unknown() -> None:
    explanation = transload.explain("Traceback (most recent call last):", checks=False)
    assert [unknown.said for unknown in explanation.unknown] == ["Traceback (most recent call last):"]


def test_message_on_the_line_below_the_class_is_joined() -> None:
    (unknown,) = transload.explain("RuntimeError:\nthe sky is falling\n", checks=False).unknown
    assert unknown.said == "RuntimeError: the sky is falling"


def test_number_of_lines_unfolded_from_one_line_is_bounded() -> None:
    line = "Traceback (most recent call last):" + "\\nx" * 5_000
    assert sum(1 for _ in lines_of(f"{line}\n" * 20)) < 30_000


def test_number_of_separate_ranks_is_bounded() -> None:
    lines = lines_of("\n".join(f"[rank{number}]: x" for number in range(3_000)))
    assert len(split(lines)[1]) == 1_001
