"""What the recognisers share: the answer, and a bounded look at the bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from transload.read.source import Source

__all__ = [
    "LEGACY_MAGIC",
    "SCAN",
    "Foreign",
    "View",
    "clean",
    "is_named",
    "listed",
    "match",
    "quoted",
    "rescue_command",
    "taken_out",
]

# Everything is decided from these few bytes, so that a file of a terabyte costs what a small one does.
HEAD = 64 * 1024
TAIL = 64 * 1024
# A checkpoint behind foreign bytes is looked for this far, and no farther.
SCAN = 1 << 20

LONGEST_TEXT = 160
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a file is that is no checkpoint.

    ``format`` is a short, stable name; ``title`` completes "this is …"; ``details`` are what was seen; ``fix``
    is what to do, each a sentence or a command. ``holds`` is the ending of the checkpoint that is, or lies inside, it;
    empty if there is none.

    >>> Foreign("html", "a web page (title: 404 Not Found), not a checkpoint").format
    'html'
    """

    format: str
    title: str
    details: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    holds: str = ""


class View:
    """The first and last bytes of a source. ``whole`` is false for the unpacked beginning of something longer."""

    def __init__(self, source: Source, *, depth: int = 0, whole: bool = True) -> None:
        self.source = source
        self.size = source.size
        self.depth = depth
        self.whole = whole
        self.head = source.read(0, HEAD)

    @cached_property
    def tail(self) -> bytes:
        """The last bytes; they overlap the head in a small file."""
        return self.source.read(max(0, self.size - TAIL), TAIL)

    @cached_property
    def wide(self) -> bytes:
        """The first ``SCAN`` bytes, for those who must search."""
        return self.head if self.size <= len(self.head) else self.source.read(0, SCAN)

    @property
    def path(self) -> str:
        """Where the bytes lie; ``FILE`` if they have no path that a shell would know."""
        return self.source.name if is_named(self.source.name) else "FILE"

    @property
    def file(self) -> str:
        """The path as a shell takes it."""
        return quoted(self.path)

    def beside(self, suffix: str) -> str:
        """A new path next to this one, as a shell takes it."""
        return quoted(self.path + suffix)


def quoted(path: str) -> str:
    """A path as a shell takes it, and no command takes for an option.

    >>> quoted("my model.pt"), quoted("-x.pt")
    ("'my model.pt'", './-x.pt')
    """
    import shlex

    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def is_named(name: str) -> bool:
    """Whether the name of a source is a path; bytes and streams have none."""
    return not name.startswith("<")


def rescue_command(path: str, ending: str = ".pt", member: str = "") -> str:
    """The command that saves a checkpoint out of what it lies in, or what is left of it.

    >>> rescue_command("my model.pt.gz")
    "$ transload rescue 'my model.pt.gz' NEW.pt"
    """
    file = quoted(path) if is_named(path) else "FILE"
    return f"$ transload rescue {file} NEW{ending}{f' --member {quoted(member)}' if member else ''}"


def taken_out(path: str, ending: str, member: str = "") -> tuple[str, ...]:
    """What to do about a checkpoint inside something else."""
    which = "This takes one of them out." if member else "This takes the checkpoint out, as far as it is there."
    return (which, rescue_command(path, ending, member))


def clean(text: str | bytes, limit: int = LONGEST_TEXT) -> str:
    r"""A stranger's text on one line, without control characters, cut.

    >>> clean("404\x1b[31m  Not\nFound")
    '404[31m Not Found'
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "" for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def listed(names: list[str], most: int = 5) -> str:
    """A few cleaned names."""
    shown = ", ".join(clean(name, 80) for name in names[:most])
    return f"{shown}, …" if len(names) > most else shown


def match(pattern: str, text: str) -> str:
    """The first group of the first match, cleaned; empty if there is none."""
    found = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
    return clean(found[1]) if found else ""
