"""A log as it comes, made fit to be read: bounded, decoded, without colours, progress bars, boxes and prefixes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

__all__ = ["LIMIT", "Line", "lines_of", "read_end", "unwrapped"]

LIMIT = 8 << 20
"""Bytes of a log that are looked at, the last ones: what stopped a program stands at the end."""
_MOST = 200_000
"""Lines that are looked at, the last ones."""
_FOLDED = 20_000
"""Lines that may come out of tracebacks in one line, in all."""
_WIDEST = 500
"""Columns of a terminal."""
_PASTED = 1 << 20
"""Letters that somebody may have copied from one."""
_LONGEST = 20_000
"""Letters of a line, its beginning and its end: a tensor or a table in one line shall not take all the time."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]+")
_BOX = {**dict.fromkeys(map(ord, "│┃║"), " "), 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
"""The sides of a frame; and the quotes that word processors and forums make."""
_RULE = re.compile(r"^[\s╭╰┌└╔╚─━═╌┄]+|[\s╮╯┐┘╗╝─━═╌┄]+$")
_QUOTED = re.compile(r"^(?:> ?){1,3}")
_GROUP = re.compile(r"^\s*[|+](?:-\+-{4,}.*-{4,}$|-{4,}$| )")

# Whose line it is: several ranks or workers write into one log, line by line.
_STREAM = re.compile(
    r"^(?P<stream>\[?(?:rank|default|worker)_?\d{1,5}\]?:?|\((?:\w+ )?(?:pid|ip)=[^)]{1,60}\)|\d{1,4}:)[ \t]?", re.ASCII
)
_CLOCK = r"\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?"
_TIME = rf"\d{{4}}[-/]\d{{2}}[-/]\d{{2}}[T _]{_CLOCK}(?:Z|[+-]\d{{2}}:?\d{{2}})?|{_CLOCK}"
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|stderr [FP]|stdout [FP])"
_GLOG = r"[DIWEF]\d{4} \d{2}:\d{2}:\d{2}\.\d{1,9} +\d{1,9} [\w./<>-]{1,200}:\d{1,6}\]"
_SYSLOG = r"[A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2} \S{1,60} [\w./-]{1,60}(?:\[\d{1,8}\])?:"
_VLLM = rf"{_LEVEL} \d{{2}}-\d{{2}} {_CLOCK} \[[\w./-]{{1,200}}:\d{{1,6}}\]"
_STAMP = re.compile(
    rf"^(?:\[?\b(?:{_TIME})\]?(?:[ \t:,|-]{{0,3}}\[?{_LEVEL}\b\]?(?:[ \t]*[:|-])?)?"
    rf"|\[{_LEVEL}\](?:[ \t]*[:|-])?|\[\s*\d{{1,8}}\.\d{{6}}\]|{_GLOG}|{_VLLM}|NVRM:|{_SYSLOG})[ \t]?"
)


class Line(NamedTuple):
    """A line of a log. ``stream`` is the rank or worker it came from, ``stamped`` whether a time stood before it."""

    number: int
    text: str
    stream: str = ""
    stamped: bool = False


def read_end(file: BinaryIO, limit: int = LIMIT) -> tuple[bytes, bool]:
    """The last bytes of a file or of a pipe, and whether there were more; a pipe of gigabytes takes no memory."""
    if file.seekable():
        size = file.seek(0, 2)
        file.seek(max(0, size - limit))
        return file.read(limit), size > limit
    kept, size = bytearray(), 0
    for piece in _pieces(file):
        kept += piece
        size += len(piece)
        if len(kept) > 2 * limit:
            del kept[:-limit]
    return bytes(kept[-limit:]), size > limit


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """What is there, as it comes. After the end of a terminal's input nothing is asked for: it would have to end twice.

    A terminal gives whole lines; part of one means that Ctrl-D was pressed behind it.
    """
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    by_line = os.name == "posix" and file.isatty()
    while piece := read(1 << 16):
        yield piece
        if by_line and not piece.endswith(b"\n"):
            return


def lines_of(text: str) -> Iterator[Line]:
    r"""The lines of a text as a person would see them.

    >>> [line.text for line in lines_of("  3%|#\r100%|###\n\x1b[31m[rank0]: boom\x1b[0m")]
    ['100%|###', 'boom']
    """
    plain = _ANSI.sub("", text).replace("\r\n", "\n").replace("\x0b", "\n").replace("\x0c", "\n")
    lines = plain.split("\n")
    first = max(0, len(lines) - _MOST)
    folded = _FOLDED
    for number, raw in enumerate(lines[first:], first + 1):
        pieces = _unfolded(raw, folded)
        folded -= len(pieces) - 1
        for piece in pieces:
            line = piece.rstrip("\r").rpartition("\r")[2]  # a progress bar is written over itself
            if not line or line.isspace():
                yield Line(number, "")
            else:
                yield _line(number, _CONTROL.sub("", line if len(line) <= _LONGEST else _shortened(line)))


def _unfolded(line: str, most: int) -> Sequence[str]:
    """A traceback that a logger has put into one line, as JSON does."""
    if most > 0 and "\\n" in line and "Traceback (most recent call last)" in line:
        return line.replace('\\"', '"').split("\\n", most)
    return (line,)


def unwrapped(text: str) -> str:
    r"""A text as it was before a terminal broke its lines at its right edge; nothing where none did.

    >>> unwrapped("No CUDA GPUs a\nre available")
    'No CUDA GPUs are available'
    """
    lines = text.split("\n") if len(text) <= _PASTED else [text]
    width = max(map(len, lines))
    if len(lines) == 1 or width > _WIDEST:
        return ""
    return "".join(line if len(line) == width else f"{line}\n" for line in lines).removesuffix("\n")


def _shortened(line: str) -> str:
    return f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


def _line(number: int, text: str) -> Line:
    stream, stamped = "", False
    text = _QUOTED.sub("", text)  # of a thread, where somebody pasted it
    for _ in range(3):  # a time before the rank, and another after it
        found = _STAMP.match(text)
        if found:
            stamped = True
        else:
            found = _STREAM.match(text)
            if found is None:
                break
            stream = stream or found["stream"].strip("[]: ")
        text = text[found.end() :]
    if not text.isascii():
        text = _RULE.sub("", text.translate(_BOX)) if _RULE.match(text.lstrip()) else text.translate(_BOX)
    return Line(number, _GROUP.sub("", text).rstrip(), stream, stamped)
