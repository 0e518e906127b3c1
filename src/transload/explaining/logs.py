"""Read a raw log, and find the exceptions in it.

``read_blocks``, ``decoded`` and ``pieces`` divide a log of any length; ``is_packed``, ``is_binary`` and ``not_a_text``
handle input that is not a log. ``lines_of`` removes colours, progress bars, boxes and prefixes. ``split`` then
separates chains of exceptions from the lines between them.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO, Literal

from transload.errors import TransloadError, UsageError
from transload.findings import quoted
from transload.frozen import NamedTuple

BLOCK = 1 << 20
"""Characters of a log that are examined at a time: a log of any length takes a bounded amount of memory."""
_TAIL = 1 << 16  # characters at the end of a block in which an exception may begin that the next block completes


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file or a pipe, in blocks."""
    read: Callable[[int], bytes] = file.read if file.seekable() else getattr(file, "read1", file.read)
    # A terminal delivers whole lines. A partial one means that Ctrl-D was pressed after it: if we read on, the user
    # would have to press it again.
    by_line = os.name == "posix" and file.isatty()
    while data := read(BLOCK):
        yield data
        if by_line and not data.endswith(b"\n"):
            break


def decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    """The text of a log in any encoding."""
    decode: Callable[[bytes], str] | None = None
    for data in blocks:
        if decode is None:
            encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell writes UTF-16
            decode = getincrementaldecoder(encoding)("replace").decode
        yield decode(data)


def pieces(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """A long text in pieces of whole lines, each with the number of its first line.

    A piece ends before a traceback that may go on, or before a line that does not continue another one.
    """
    number, kept = 1, ""
    for text in texts:
        kept += text
        while len(kept) > BLOCK:
            end = _end_of_piece(kept[:BLOCK])
            yield number, kept[:end]
            number += kept.count("\n", 0, end)
            kept = kept[end:]
    yield number, kept


def _end_of_piece(text: str) -> int:
    tail = len(text) - min(_TAIL, len(text) // 2)
    for header in re.finditer(re.escape(_HEADER), text[tail:]):
        start = text.rfind("\n", 0, tail + header.start()) + 1
        before = text[max(0, start - 200) : start]
        if start and _HANDLING not in before and _CAUSE not in before:
            return start
    ends = [line_end.end() for line_end in re.finditer(r"\n(?=\S)", text[tail:])]
    return tail + ends[-1] if ends else text.rfind("\n") + 1 or text.rfind("\r") + 1 or len(text)


_MAGIC = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_SAMPLE = 1 << 16
_MOST_ODD = 0.03  # with a larger share of bytes that never occur in text, data is binary; random bytes have a tenth
_IN_TEXTS = bytes({*range(7, 14), 27, *range(32, 127), *range(128, 256)})
_UNPACK = {"gzip": "gzip -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "zstd": "zstd -dc"}


def is_packed(head: bytes) -> bool:
    """Whether a file with these first 16 bytes is an archive, a pickle, or similar."""
    sized = head[8:9] == b"{" and head[5:8] == bytes(3)  # safetensors begins with the length of its header
    return sized or head.startswith((*_MAGIC, *_PICKLES))


def is_binary(data: bytes) -> bool:
    """Whether bytes are not text in any encoding; zeros around a text (a log cut off by a crash) do not count.

    >>> is_binary(bytes(range(256))), is_binary("Fehler: größer".encode("latin-1"))
    (True, False)
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return False
    inner = data.strip(b"\0")
    sample = inner if len(inner) <= 2 * _SAMPLE else inner[:_SAMPLE] + inner[-_SAMPLE:]
    wide = sample[1::2].count(0) > len(sample) // 8 and 0 not in sample[::2]  # UTF-16 without a BOM
    return not wide and len(sample.translate(None, _IN_TEXTS)) > _MOST_ODD * len(sample)


def not_a_text(path: str) -> UsageError:
    """The error for a file that is not text, or for a stream, which has no path."""
    from transload.format import FORMATS
    from transload.opening import inspect

    name = quoted(path) if path else "FILE"
    fix = "Pipe an error text in, or name a file that holds one: python train.py 2>&1 | transload explain"
    try:
        checkpoint = inspect(path) if path else None
    except TransloadError:
        checkpoint = None
    if checkpoint is None:
        return UsageError("this is not text", where=path, fix=f"{fix}. For a checkpoint: transload inspect {name}")
    form = FORMATS.get(checkpoint.format)
    if form and checkpoint.integrity != "not-a-checkpoint":
        fix = f"See what is in it: transload inspect {name}"
        return UsageError(f"this is not text but a checkpoint ({form.words})", where=path, fix=fix)
    unpack = _UNPACK.get(checkpoint.format)
    fix = f"If it is a log, unpack it: {unpack} {name} | transload explain" if unpack else fix
    title = checkpoint.findings[0].title if checkpoint.findings else ""
    return UsageError(f"this is not text{f': {title}' if title else ''}", where=path, fix=fix)


# -- lines

_MOST_FOLDED = 20_000  # lines in total that may come from tracebacks within a single line
_WIDEST = 500  # columns of a terminal
_PASTED = 1 << 20  # characters that somebody may copy from a terminal
_LONGEST = 20_000  # characters kept of a line, from both ends: a tensor on one line must not take all the time

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]+")
# The sides of a box, and the quotes that word processors and forums insert.
_BOX = {**dict.fromkeys(map(ord, "│┃║"), " "), 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
_RULE = re.compile(r"^[\s╭╰┌└╔╚─━═╌┄]+|[\s╮╯┐┘╗╝─━═╌┄]+$")
_QUOTED = re.compile(r"^(?:> ?){1,3}")
_GROUP = re.compile(r"^\s*[|+](?:-\+-{4,}.*-{4,}$|-{4,}$| )")

# The source of a line: several ranks or workers write their lines into one log.
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
    """A line of a log. ``stream`` is the rank or worker that wrote it; ``stamped``: it began with a time."""

    number: int
    text: str
    stream: str = ""
    stamped: bool = False


def lines_of(text: str, first: int = 1) -> Iterator[Line]:
    r"""The lines of a text as a person sees them; ``first`` is the number of the first one. Blank lines count as one.

    >>> [line.text for line in lines_of("  3%|#\r100%|###\n\x1b[31m[rank0]: boom\x1b[0m")]
    ['100%|###', 'boom']
    """
    plain = _ANSI.sub("", text).replace("\r\n", "\n").replace("\x0b", "\n").replace("\x0c", "\n")
    folded, blank = _MOST_FOLDED, False
    for number, raw in enumerate(plain.split("\n"), first):
        pieces = [raw]
        if folded > 0 and "\\n" in raw and _HEADER in raw:  # a traceback on one line, as JSON loggers write it
            pieces = raw.replace('\\"', '"').split("\\n", folded)
            folded -= len(pieces) - 1
        for piece in pieces:
            line = piece.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites itself
            if not line or line.isspace():
                if not blank:
                    yield Line(number, "")
                blank = True
                continue
            blank = False
            if len(line) > _LONGEST:
                line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
            line = _QUOTED.sub("", _CONTROL.sub("", line))  # pasted from a mail or a thread
            stream, stamped = "", False
            for _ in range(3):  # a time before the rank, and another one after it
                if prefix := _STAMP.match(line):
                    stamped = True
                elif prefix := _STREAM.match(line):
                    stream = stream or prefix["stream"].strip("[]: ")
                else:
                    break
                line = line[prefix.end() :]
            if not line.isascii():
                framed = _RULE.match(line.lstrip())
                line = _RULE.sub("", line.translate(_BOX)) if framed else line.translate(_BOX)
            yield Line(number, _GROUP.sub("", line).rstrip(), stream, stamped)


def unwrapped(text: str) -> str:
    r"""A text as it was before a terminal wrapped its lines; empty if none was wrapped.

    >>> unwrapped("No CUDA GPUs a\nre available")
    'No CUDA GPUs are available'
    """
    lines = text.split("\n") if len(text) <= _PASTED else [text]
    width = max(map(len, lines))
    if len(lines) == 1 or width > _WIDEST:
        return ""
    return "".join(line if len(line) == width else f"{line}\n" for line in lines).removesuffix("\n")


# -- exceptions

_HEADER = "Traceback (most recent call last)"
_HANDLING = "During handling of the above exception, another exception occurred"
_CAUSE = "The above exception was the direct cause of the following exception"
_NESTED = re.compile(
    r"Original Traceback|terminated with the following error|RemoteTraceback|_RemoteTraceback|RayTaskError|"
    r"CheckpointException|Caught \w+ in |\(RANK \d"
)
_EXCEPTION = re.compile(
    r"(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z_a-z]\w*)(?:\((?:[\w.]+)\))?(?::(?:\s|$)|$)(?P<message>.*)", re.ASCII
)
_CLASS = re.compile(r"(?:Error|Exception|Interrupt|Exit|Warning|Group|Timeout|Failure|Fault)$|\.|^[A-Z]\w*[a-z]\w*$")
_FRAME = re.compile(r"\s|File [\"~/<\w]|Cell In|<ipython-input|-+>|/\S+ in |$")
_MOST_MESSAGE = 400  # lines of a message that are kept: load_state_dict may name thousands of tensors
_BEFORE = 12  # lines before a traceback that may say that it belongs to the message above
_MOST_FRAMES = 2_000
_MOST_STREAMS = 1_000  # ranks that are distinguished; the lines of all others are read as one stream

Link = Literal["", "after", "inside"]


def flat(text: str) -> str:
    """The text on one line, with single spaces."""
    return " ".join(text.split())


class FlatText:
    """Several lines joined into one, with single spaces; ``starts`` are the offsets and numbers of the lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.starts: list[tuple[int, int]] = []
        pieces, at = [], 0
        for line in lines:
            text = flat(line.text)
            if text:
                self.starts.append((at, line.number))
                pieces.append(text)
                at += len(text) + 1
        self.flat = " ".join(pieces)

    def lines_at(self, start: int, end: int) -> tuple[str, int]:
        """The whole lines from an offset in ``flat`` to a later one, and the number of the first."""
        first, following = (bisect_right(self.starts, (place, 1 << 60)) for place in (start, end - 1))
        beyond = self.starts[following][0] - 1 if following < len(self.starts) else len(self.flat)
        begin, number = self.starts[first - 1]
        return self.flat[begin:beyond], number


@dataclass
class RaisedError:
    """An exception in a log: the lines of its class and message, and the frames of its traceback.

    ``link`` is its relation to the previous exception in its chain: it was raised ``after`` that one, while handling it
    or from it, or it is printed ``inside`` its message.
    """

    lines: list[Line] = field(default_factory=list)
    frames: list[Line] = field(default_factory=list)
    link: Link = ""

    @cached_property
    def text(self) -> FlatText:
        """The class and the message, and everything printed below them."""
        return FlatText(self.lines)

    @property
    def first(self) -> str:
        """The first line."""
        return flat(self.lines[0].text)

    @property
    def words(self) -> str:
        """The first line; or all of it if that line has only the class."""
        return self.text.flat if self.first.endswith(":") else self.first


ErrorChain = list[RaisedError]
"""Exceptions that belong together, the innermost first."""


def split(lines: Iterable[Line]) -> tuple[list[ErrorChain], list[FlatText]]:
    """The chains of exceptions in a log, and all other lines by rank."""
    streams: dict[str, list[Line]] = {}
    for line in lines:
        name = line.stream if line.stream in streams or len(streams) < _MOST_STREAMS else ""
        streams.setdefault(name, []).append(line)
    chains: list[ErrorChain] = []
    loose: list[FlatText] = []
    for stream in streams.values():
        errors, others = _parsed(stream)
        in_stream: list[ErrorChain] = []
        for error in errors:
            if not error.lines:  # its end is missing, or inside a box drawn around it
                others += error.frames
            elif not error.link or not in_stream:
                in_stream.append([error])
            else:
                in_stream[-1].insert(0 if error.link == "inside" else len(in_stream[-1]), error)
        chains += in_stream
        loose.append(FlatText(sorted(others, key=lambda line: line.number)))
    chains.sort(key=lambda chain: chain[0].lines[0].number)
    return chains, loose


def _parsed(stream: Iterable[Line]) -> tuple[list[RaisedError], list[Line]]:
    """The exceptions in the lines of one rank, and its other lines. An exception whose end is missing has no lines."""
    errors: list[RaisedError] = []
    others: list[Line] = []
    current: RaisedError | None = None
    link: Link = ""
    for line in stream:
        text = line.text
        headless = current is None and text.startswith('  File "')  # the header was cut off
        if _HEADER in text or headless:
            before = current.lines[-_BEFORE:] if current else []
            if before and _NESTED.search("\n".join(above.text for above in (*before, line))):
                link = "inside"
            current = RaisedError(frames=[line], link=link)
            errors.append(current)
            link = ""
        elif _HANDLING in text or _CAUSE in text:
            current, link = None, "after"
        elif current is None:
            others.append(line)
        elif not current.lines:
            match = _EXCEPTION.match(text)
            if _FRAME.match(text):
                if len(current.frames) < _MOST_FRAMES:
                    current.frames.append(line)
            elif match and _CLASS.search(match["kind"]) and not match["kind"].isupper():
                current.lines.append(line)
            else:
                others.append(line)  # another process wrote in between, or the end of the traceback is missing
        else:
            full = len(current.lines) >= _MOST_MESSAGE
            if text and (line.stamped != current.lines[0].stamped or (full and not text[0].isspace())):
                current = None  # the program logs something else now
                others.append(line)
            elif not full:
                current.lines.append(line)
    return errors, others
