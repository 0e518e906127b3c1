"""Raw logs: colours, progress bars, prefixes, junk, and too much text."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys

import pytest

import transload
from transload.explaining import explain_bytes
from transload.explaining.logs import LIMIT, is_binary, is_packed, lines_of, read_end, split

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


def test_only_the_end_of_a_long_file_is_read() -> None:
    data = bytes(1000) + b"the end"
    assert read_end(io.BytesIO(data), 7) == (b"the end", True)
    assert read_end(io.BytesIO(b"short"), 7) == (b"short", False)


def test_only_the_end_of_a_long_pipe_is_returned() -> None:
    pieces = [bytes([number % 256]) * 100 for number in range(1000)]
    expected = b"".join(pieces)[-250:]
    assert read_end(Pipe(pieces), 250) == (expected, True)  # type: ignore[arg-type]
    assert read_end(Pipe([b"short"]), 250) == (b"short", False)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("typed", [f"{CUT_OFF}\n\x04", f"first\n{CUT_OFF}\x04"], ids=["after a line", "within a line"])
def test_pasted_text_ends_with_one_ctrl_d(typed: str) -> None:
    ours, theirs = os.openpty()
    try:
        os.write(ours, typed.encode())
        command = [sys.executable, "-m", "transload", "explain", "--no-checks"]
        result = subprocess.run(command, stdin=theirs, capture_output=True, check=False, timeout=60)
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


def test_error_at_the_end_of_a_long_text_is_found_without_line_number() -> None:
    explanation = transload.explain("x" * 100 + "\n" * LIMIT + CUT_OFF, checks=False)
    assert [(answer.code, answer.line) for answer in explanation.answers] == [("archive-cut-off", 0)]
    assert explanation.shortened
    assert "only its end was read" in str(explanation)


def test_utf_16_and_crlf_are_read() -> None:
    assert explain_bytes(CUT_OFF.encode("utf-16"), checks=False).known
    assert explain_bytes(f"a\r\n{CUT_OFF}\r\n".encode(), checks=False).answers[0].line == 2


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
    assert not explain_bytes(rng.randbytes(5_000), checks=False).answers


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
