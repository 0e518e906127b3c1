"""The known error messages, and which of them occur in a log.

The messages are data: ``pages/*.md``, a file for each subject. ``pages/README.md`` describes how they are written.
``search`` looks for the messages in exceptions and logs; ``nearest`` compares an unknown message with all of them.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from math import fsum, log
from operator import itemgetter
from typing import Any

from transload.explaining.hooks import WITHOUT_BLANKS
from transload.explaining.logs import ErrorChain, FlatText, Line, RaisedError
from transload.findings import packaged
from transload.frozen import NamedTuple, Plain
from transload.steps import listed, sections

_BLANKS = {
    "": r".{1,400}?",
    "d": r"-?\d{1,20}",
    "w": r"[^\s'\"`,;()]{1,300}",
    "o": r"<[^<>]{1,300}>|torch\.Size\(\[[^\]]{0,200}\]\)|\([\d, ]{1,60}\)|[^\s,;]{1,300}",
    "rest": r".{1,400}",
}


_BLANK = re.compile(r"(?<!\{)\{[a-z]+(?::[a-z]+)?\}(?!\}(?!\}))")
_INNER_WORD = re.compile(r"(?<=[^A-Za-z])[A-Za-z]{4,}(?=[^A-Za-z])")


class Wording:
    """A message with blanks: ``{index:d}`` a number, ``{name:w}`` a word, ``{kind:o}`` an object, ``{x}`` anything.

    ``anchor`` is its longest literal: a text that does not contain it is not searched any further, so that few patterns
    are ever compiled. ``weight`` is the length of all literals. ``whole_line``: it counts only as a line of its own.

    >>> wording = Wording("device {index:d} but {count:d}")
    >>> wording.shown, wording.pattern.search("CUDA device 1 but 0").groupdict()
    ('device … but …', {'index': '1', 'count': '0'})
    """

    def __init__(self, text: str, *, whole_line: bool = False) -> None:
        self.text = text
        self.whole_line = whole_line
        literals = _BLANK.split(text) if "{" in text else [text]
        if "{{" in text:
            literals = [literal.replace("{{", "{").replace("}}", "}") for literal in literals]
        self.anchor = max((*literals[:-1], literals[-1].removesuffix(".")), key=len)
        self.weight = sum(map(len, literals))

    @property
    def shown(self) -> str:
        """The message with ``…`` for the blanks."""
        return _BLANK.sub("…", self.text).replace("{{", "{").replace("}}", "}")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A pattern for the message on one line, with a group for each blank."""
        from string import Formatter

        pieces: list[str] = []
        seen: set[str] = set()
        for literal, name, kind, _ in Formatter().parse(self.text):
            pieces.append(re.escape(literal))
            if name is not None:
                blank = _BLANKS[kind or ""]
                pieces.append(f"(?:{blank})" if name in seen else f"(?P<{name}>{blank})")
                seen.add(name)
        if pieces[-1].endswith(r"\."):  # people omit the final full stop when they copy a sentence
            pieces[-1] = f"{pieces[-1][:-2]}(?:\\.|(?<!\\.)$)"
        edge = r"(?!\d)" if pieces[-1].endswith(r"\d{1,20})") else ""
        return re.compile("".join(pieces) + edge)


class KnownError(NamedTuple):
    """An error message of PyTorch, or of something below it: what it means and what to do.

    ``pages/README.md`` describes the fields. In ``fix``, commands begin with ``$ `` and Python with ``| ``.
    ``sections`` are the ``###`` sections: by name, the fields that each replaces.
    """

    code: str
    says: tuple[Wording, ...] = ()
    cause: str = ""
    fix: tuple[str, ...] = ()
    wrong: str = ""
    torch: str = ""
    needs: tuple[str, ...] = ()
    doctor: tuple[str, ...] = ()
    context: str = ""
    unless: str = ""
    place: tuple[str, ...] = ()
    role: str = "cause"
    first: str = ""
    explains: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    hook: str = ""
    value: tuple[str, ...] = ()
    where: str = ""
    sections: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def rank(self) -> int:
        """A specific message comes before a family of messages (``place``), and that before a frame."""
        return 2 if self.role == "frame" else 1 if self.place else 0


class Page(NamedTuple):
    """A page that is not yet parsed: few of the thousands of wordings are ever in a text.

    ``subject`` is the title of its file. ``hints`` has a literal of each wording: a text that contains no hint contains
    no wording.
    """

    subject: str
    code: str
    text: str
    says: tuple[str, ...]
    hints: tuple[str, ...]


_SAID = re.compile("\n    (?:says|line|cuda): (.+)")


@cache
def _pages() -> tuple[Page, ...]:
    out: list[Page] = []
    ((_, files),) = sections(packaged(__package__, "pages/README.md"))
    for name in files.replace("- ", "").split():
        file = packaged(__package__, f"pages/{name}.md")
        for code, text in sections(file):
            says = tuple(_SAID.findall(text))
            out.append(Page(file.partition("\n")[0].removeprefix("# "), code, text, says, tuple(map(_hint, says))))
    return tuple(out)


def _hint(wording: str) -> str:
    """The start or end of a wording, if it is long enough, else its longest literal. For a CUDA error, its words."""
    if "{" not in wording:
        return (wording.partition(" ")[2] if wording[0].isdigit() else wording).removesuffix(".")
    start, end = wording.partition("{")[0], wording.rpartition("}")[2].removesuffix(".")
    longer = start if len(start) > len(end) else end
    return longer if len(longer) >= 12 else Wording(wording).anchor


@cache
def _parsed(page: Page) -> KnownError:
    """Parse a page with its sections."""
    variants = tuple((name, _fields(text)) for name, text in sections(page.text, "### "))
    return KnownError(page.code, **_fields(page.text.partition("\n### ")[0]), sections=variants)


@cache
def _index() -> tuple[dict[str, list[tuple[int, str]]], list[tuple[str, int, str]]]:
    """The number of the page and the hint by a whole word of the hint; and, for hints without one, by letters of it."""
    by_word: dict[str, list[tuple[int, str]]] = {}
    others: list[tuple[str, int, str]] = []
    for number, page in enumerate(_pages()):
        for hint in page.hints:
            if word := max(_INNER_WORD.findall(hint), key=len, default=""):
                by_word.setdefault(word, []).append((number, hint))
            else:
                others.append((max(re.findall("[A-Za-z]+", hint), key=len, default=""), number, hint))
    return by_word, others


def mentioned(text: str, *, indexed: bool = False) -> Iterator[KnownError]:
    """The known errors that may have a wording in a text, in order. For many or long texts, an index is faster."""
    if not indexed and len(text) <= _LONG:
        yield from (_parsed(page) for page in _pages() if any(hint in text for hint in page.hints))
        return
    by_word, others = _index()
    # Most lines of a log differ only in their numbers.
    lines = {*text.encode("ascii", "replace").translate(_NO_NUMBERS).split(b"\n")}
    words = {*b" ".join(lines).translate(_ONLY_LETTERS).decode().split()}
    joined = " ".join(words)
    candidates = {entry for word in words for entry in by_word.get(word, ())}
    candidates |= {(number, hint) for letters, number, hint in others if letters in joined}
    text = text.replace("\n", " ")
    for number in sorted({number for number, hint in candidates if hint in text}):
        yield _parsed(_pages()[number])


_NO_NUMBERS = bytes(48 if 48 <= code < 58 else code for code in range(256))
_ONLY_LETTERS = bytes(code if chr(code).isalpha() and code < 128 else 32 for code in range(256))


def is_quiet(text: str) -> bool:
    """Whether a text contains no known message and no traceback."""
    return "Traceback" not in text and 'File "' not in text and not any(mentioned(text, indexed=True))


def known_errors() -> Iterator[tuple[str, KnownError]]:
    """Every known error with its subject, in order."""
    return ((page.subject, _parsed(page)) for page in _pages())


def variant(name: str) -> dict[str, Any]:
    """The fields of a known error that a ``###`` section replaces."""
    page = next(page for page in _pages() if page.code == name.partition("/")[0])
    return dict(_parsed(page).sections)[name]


_LISTS = ("needs", "doctor", "place", "explains", "names")  # fields of several words


def _fields(text: str) -> dict[str, Any]:
    """The fields in the text of a section; unknown ones make ``KnownError(...)`` fail."""
    fields: dict[str, Any] = {}
    says: list[Wording] = []
    for block in text.strip("\n").split("\n\n"):
        if block.startswith("- "):
            fields["fix"] = tuple(line for step in listed(block) for line in step.lines)
            continue
        if not block.startswith("    "):
            wrong = block.startswith("Wrong: ")
            fields["wrong" if wrong else "cause"] = block.removeprefix("Wrong: ").replace("\n", " ")
            continue
        for line in block.split("\n"):
            name, _, value = line[4:].partition(": ")
            if name in ("says", "line"):
                says.append(Wording(value, whole_line=name == "line"))
            elif name == "cuda":
                numbers, _, words = value.partition(" ")
                first, *earlier = numbers.split("/")
                forms = [f"CUDA error: {words}", f"Error {first}: {words}", f"Cuda failure {first} '{words}'"]
                forms += [f"cuda runtime error ({number}) : {words}" for number in (first, *earlier)]
                says += map(Wording, forms)
            elif name == "value":
                fields["value"] = (*fields.get("value", ()), value)
            else:
                fields[name] = tuple(value.split()) if name in _LISTS else value
    if says:
        fields["says"] = tuple(says)
    return fields


# -- searching

_SPEAKS_FOR_ITSELF = 40  # literal characters of a wording that no other program is likely to print
_MANY = 50  # exceptions for which the index of all messages is worth building
_LONG = 100_000  # characters of a text whose set of words is built first: searching it for every anchor is slower
_AROUND = 1_000  # characters before and after an anchor that are searched for the rest of the wording
_BESIDE = 400  # characters before and after an error in a log that may name its file
_PLACED = re.compile(r"\s*File |Cell In|<ipython-input|/\S+ in ")  # the line of a frame that names its file


class ErrorMatch(NamedTuple):
    """A known error in a text, with the values in the blanks of its wording.

    ``traceback`` is the whole text of the chain of exceptions; empty for an error between the lines of a log. ``times``
    is how often an equal chain occurs.
    """

    error: KnownError
    start: int
    end: int
    values: dict[str, str]
    weight: int
    source: FlatText
    traceback: str
    times: int = 1

    @property
    def text(self) -> str:
        """Everything from the match on, as far as it may matter."""
        return self.source.flat[self.start : self.end + _LONG]

    @property
    def near(self) -> tuple[str, str]:
        """Texts that may name the file it is about: all of a traceback, but only a few lines of a log.

        A log has other errors nearby: a file that is named further away belongs to one of them.
        """
        if self.traceback:
            return self.text, self.traceback
        flat = self.source.flat
        return flat[self.start : self.end + _BESIDE], flat[max(0, self.start - _BESIDE) : self.start]


def search(
    chains: Iterable[ErrorChain], loose: Iterable[FlatText]
) -> tuple[list[ErrorMatch], list[ErrorChain], list[ErrorChain]]:
    """The known errors in a log, the chains without any, and those that only wrap another error.

    Of each chain of exceptions, the innermost cause is found.
    """
    matches: list[ErrorMatch] = []
    unknown: list[ErrorChain] = []
    framed: list[ErrorChain] = []
    counted: dict[str, tuple[ErrorChain, int]] = {}  # a loop may raise the same error a million times
    for chain in chains:
        traceback = "\n".join(line.text for raised in chain for line in (*raised.frames, *raised.lines))
        first, times = counted.get(traceback, (chain, 0))
        counted[traceback] = first, times + 1
    for traceback, (chain, times) in counted.items():
        reported = [_main(raised, traceback, indexed=len(counted) > _MANY) for raised in chain]
        # Specific messages take precedence over words that many programs print: programs try one thing after another,
        # and print what failed before.
        mains = [main for main, _ in reported if main]
        causes = [main for main in mains if main.error.role == "cause"]
        specific = [main for main in causes if not (main.error.context or main.error.place)]
        if chosen := specific or causes or [main for main in mains if main.error.fix]:
            matches.append(chosen[0]._replace(times=times))
        elif all(main and main.error.role == "frame" for main, _ in reported):
            framed.append(chain)
        else:
            unknown.append(chain)
        matches += [match._replace(times=times) for _, below in reported for match in below]
    for text in loose:
        matches += _matches(text)
    return matches, unknown, framed


def _main(raised: RaisedError, traceback: str, *, indexed: bool = False) -> tuple[ErrorMatch | None, list[ErrorMatch]]:
    """The error that an exception itself reports, and other causes printed below it before the next exception."""
    frames = (line.text for line in reversed(raised.frames) if _PLACED.match(line.text))
    matches = _matches(raised.text, traceback, next(frames, "").rpartition("File ")[2], indexed=indexed)
    head = [match for match in matches if match.start < len(raised.first)]
    causes = [match for match in head if match.error.role == "cause"]
    if causes:
        main = min(causes, key=lambda match: (match.error.rank, -match.weight))
    elif head:
        main = next((match for match in matches if match.error.role == "cause"), head[0])
    else:
        # Search the first paragraph, even if its first line has only the class of the exception.
        empty = (at for at, line in enumerate(raised.lines) if at > 1 and not line.text)
        edge = len(FlatText(raised.lines[: next(empty, None)]).flat)
        if not matches or matches[0].start >= edge:
            return None, matches
        main = matches[0]
    beyond = max(main.end, len(raised.first))
    below = (match for match in matches if match.start >= beyond and match.error.role == "cause")
    return main, [match for match in below if match.error.rank == 0 and match.error.code != main.error.code]


def _matches(source: FlatText, traceback: str = "", frame: str = "", *, indexed: bool = False) -> list[ErrorMatch]:
    """Every known message in a text, in order; of two that overlap, the one with the better rank, then weight.

    Only the surroundings of anchors are searched, never the whole text. Without a traceback, the ``place`` of a wording
    must be near it: a log has lines of many programs.
    """
    matches: list[ErrorMatch] = []
    text = source.flat
    for error in mentioned(text, indexed=indexed):
        if error.unless and re.search(error.unless, traceback or text):
            continue
        if error.context and not re.search(error.context, traceback or text):
            continue
        for wording in error.says:
            at, beyond = text.find(wording.anchor), 0
            while at >= 0:
                after = at + len(wording.anchor)
                around = traceback or text[max(0, at - _BESIDE) : after + _BESIDE]
                placed = not error.place or wording.weight >= _SPEAKS_FOR_ITSELF
                if not placed:
                    places = ((place, frame or around if "/" in place else around) for place in error.place)
                    placed = any(place in where.replace("\\", "/") for place, where in places)
                hit = wording.pattern.search(text, max(beyond, at - _AROUND), after + _AROUND) if placed else None
                beyond = hit.end() if hit else beyond
                if hit and not (wording.whole_line and source.lines_at(*hit.span())[0] != hit[0]):
                    values = hit.groupdict("")
                    matches.append(ErrorMatch(error, *hit.span(), values, wording.weight, source, traceback))
                at = text.find(wording.anchor, max(after, beyond))
    kept: list[tuple[int, int, ErrorMatch]] = []  # in order: no two of them overlap
    for match in sorted(matches, key=lambda match: (match.error.rank, -match.weight, match.start)):
        at = bisect_left(kept, match.end, key=itemgetter(0))
        if not at or kept[at - 1][1] <= match.start:
            kept.insert(at, (match.start, match.end, match))
    return [match for _, _, match in kept]


# -- beginnings of messages

_SHORTEST_BEGINNING = 16
_TERMS = re.compile(r"cuda|nccl|gpu|torch|kernel|tensor|weight|state_dict|checkpoint|collective|mismatch for|pickle")
"""What a beginning must name: that of ``No such file or directory: '…/.metadata'`` is printed by every program."""


@cache
def _lower_case() -> list[tuple[Page, str, str]]:
    return [(page, wording, Wording(wording).shown.lower()) for page in _pages() for wording in page.says]


def beginning(chains: Iterable[ErrorChain], loose: Iterable[FlatText]) -> list[ErrorMatch]:
    """The known error of which a text of one line is the beginning, in upper or lower case: people cut and type them.

    If the last word is where the message has a blank, it is the value of that blank; the other blanks get ``…``. One
    line has no context, so the beginning of a message that needs context must be longer.
    """
    lines = [text for text in loose if text.flat]
    if any(chains) or len(lines) != 1 or len(lines[0].starts) != 1:
        return []
    message = re.sub(r"^[\w.]+(?:Error|Exception): ", "", lines[0].flat).rstrip(" .:…")
    start, _, last = message.rpartition(" ")
    matches: list[ErrorMatch] = []
    for begun, value in ((message.lower(), ""), (f"{start.lower()} …", last)):
        if len(begun) < _SHORTEST_BEGINNING or not _TERMS.search(begun):
            continue
        pattern = re.compile(rf"(?:^{'' if value else '|…: '}){re.escape(begun)}(?!\w)")
        for page, text, lower in _lower_case():
            if begun in lower and pattern.search(lower):
                error, wording = _parsed(page), Wording(text)
                speaks = len(begun) >= _SPEAKS_FOR_ITSELF or not (error.context or error.place)
                if speaks and error.hook in ("", *WITHOUT_BLANKS):
                    values = dict.fromkeys(wording.pattern.groupindex, "…")
                    values |= dict.fromkeys([*values][:1], value) if value else {}
                    matches.append(ErrorMatch(error, 0, len(message), values, wording.weight, lines[0], ""))
    return sorted(matches, key=lambda match: match.weight)[:1]  # the wording that has the least more to say


def named(chains: Iterable[ErrorChain], loose: Iterable[FlatText]) -> list[ErrorMatch]:
    """The error that a text of one word names: a code of ours, of the doctor or of a finding, a result, or a class."""
    words = [word for text in loose for word in text.flat.split()]
    if any(chains) or len(words) != 1:
        return []
    word = words[0].strip("[]'\"`.,:;()")
    error = _of_the_doctor(word.upper()) or _of_a_finding(word) or _result_of_cuda(word)
    for page in _pages() if error is None and word else ():
        if word == page.code or word in page.text:
            candidate = _parsed(page)
            if word in candidate.names or (word == candidate.code and candidate.hook in ("", *WITHOUT_BLANKS)):
                error = candidate
    if error is None:
        return []
    values = dict.fromkeys((name for wording in error.says for name in wording.pattern.groupindex), "…")
    return [ErrorMatch(error, 0, len(words[0]), values, 0, FlatText([Line(1, words[0])]), "")]


def _of_the_doctor(code: str) -> KnownError | None:
    from transload.diagnose.rules import BY_CODE
    from transload.diagnose.tables import fix, title

    if code not in BY_CODE:
        return None
    more = f"More about it: transload doctor --explain {code}."
    return _without_blanks(code, title(code), fix(code), more)._replace(needs=("machine",), doctor=(code,))


def _of_a_finding(code: str) -> KnownError | None:
    from transload.judge.problems import rules

    rule = rules().get(code)
    return _without_blanks(code, rule.title, *rule.fix, f"More about it: docs/findings.md#{code}") if rule else None


def _without_blanks(code: str, *texts: str) -> KnownError:
    """A known error with this cause and fix, whose braces are not blanks."""
    cause, *fix = (text.replace("{", "{{").replace("}", "}}") for text in texts)
    return KnownError(code, cause=cause, fix=tuple(fix))


def _result_of_cuda(word: str) -> KnownError | None:
    """The known error for the number or the name of a result; cudaErrorNoDevice is CUDA_ERROR_NO_DEVICE."""
    from transload.diagnose.tables import table

    plain = word.replace("_", "").lower()
    for number, result in table("results")["cuda"].items():
        if word == number or plain == result["name"].replace("_", "").lower():
            matches = _matches(FlatText([Line(1, f"CUDA error: {result['text']}")]))
            return matches[0].error if matches else None
    return None


# -- unknown messages

_LETTERS = bytes(ord(c.lower()) if c.isalpha() or c in "_\n" else 32 for c in map(chr, range(128))) + b" " * 128
_SHORTEST = 3
_LEAST = 0.5
_FEWEST = 3
_COMPARED = 400  # characters of an unknown message: in a longer one more words match by chance


def _only_words(text: str) -> bytes:
    """The text in lower case, with spaces for everything but letters and line ends."""
    return text.encode(errors="replace").translate(_LETTERS)


@cache
def _rows() -> tuple[list[tuple[Page, str, list[bytes]]], dict[bytes, float]]:
    """The page and words of every wording, except internal checks of libraries; and the weight of each word."""
    rows = [(page, wording) for page in _pages() if not page.code.endswith("-internal") for wording in page.says]
    lines = _only_words(re.sub(r"\{[a-z:]+\}", "", "\n".join(wording for _, wording in rows)))
    words = [line.split() for line in lines.split(b"\n")]
    counts = Counter(itertools.chain.from_iterable(words)).items()
    weights = {word: log(1 + len(rows) / count) for word, count in counts if len(word) >= _SHORTEST}
    return [(*row, row_words) for row, row_words in zip(rows, words, strict=True)], weights


class Near(Plain):
    """A known message that is similar to an unknown one; if the words agree, ``why`` says what differs."""

    code: str
    says: str
    likeness: float
    why: str = ""


def nearest(text: str, most: int = 3) -> tuple[Near, ...]:
    """The known messages that share the most words with a text, often none; rare words weigh more.

    A message that matches, but not in its context, comes first.
    """
    near: dict[str, Near] = {}
    for error in mentioned(text):
        for wording in error.says if (error.context or error.place) and error.role == "cause" else ():
            if wording.anchor in text and wording.pattern.search(text):
                near[error.code] = Near(error.code, wording.shown, 1.0, "the same words, in another context")
    rows, weights = _rows()
    present = {word for word in _only_words(text[:_COMPARED]).split() if word in weights}
    similar: dict[str, Near] = {}
    for page, message, words in rows:
        common = present.intersection(words)
        if len(common) >= _FEWEST:
            likeness = fsum(weights[word] for word in common)
            likeness /= fsum(weights[word] for word in {*words} if word in weights)
            code = page.code
            if likeness > (similar[code].likeness if code in similar else _LEAST):
                similar[code] = Near(code, Wording(message).shown, round(likeness, 2))
    near |= {other.code: other for other in sorted(similar.values(), key=lambda other: -other.likeness)}
    return tuple(near.values())[:most]
