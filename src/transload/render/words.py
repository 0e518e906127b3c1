"""Names, sizes, counts and shapes as text. They come from untrusted files, so they are escaped and truncated."""

from __future__ import annotations

from transload.credentials import without_credentials

LIMIT = 160
"""The longest name that is shown completely by default. A pickle may have a key of a gigabyte."""

_MARKS_IN_A_ROW = 4  # more than any language needs; a stack of hundreds would cover the lines above and below

# Invisible, although str.isprintable() is true: two names could look the same.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "thousand", "million", "billion", "trillion")
_EXACT_BELOW = 100_000
_ABSURD = 10**21  # no disk holds it; and str() of an integer of over 4300 digits raises
_DIMENSIONS = 8


def printable(text: str, limit: int | None = LIMIT) -> str:
    r"""``text`` with everything invisible escaped as in Python, truncated in the middle to ``limit`` characters.

    Control characters, terminal sequences, line ends, direction marks, invisible characters and lone surrogates become
    backslash escapes; ``limit=None`` truncates nothing.

    >>> printable("a\x1b[31m\n")
    'a\\x1b[31m\\n'
    >>> printable("abcdefghij", limit=5)
    'ab…ij'
    """
    if limit is not None and len(text) > 2 * limit:  # escape only what may be seen
        text = text[:limit] + text[-limit:]
    if not (text.isascii() and text.isprintable()):
        from unicodedata import category

        out: list[str] = []
        marks = 0
        for char in text:
            marks = marks + 1 if category(char).startswith("M") else 0
            hidden = not char.isprintable() or char in _INVISIBLE or marks > _MARKS_IN_A_ROW
            # repr() would not escape the printable ones among these.
            out.append(char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else char)
        text = "".join(out)
    return text if limit is None else cut(text, limit)


def path_text(path: str, limit: int | None = LIMIT) -> str:
    r"""A path as ``printable`` shows it, or as a shell reads it if its bytes are not UTF-8; a URL without credentials.

    >>> path_text("my model.pt"), path_text("\udcff.pt")
    ('my model.pt', "$'\\xff.pt'")
    """
    path = without_credentials(path)
    if not path.isascii() and any("\udc80" <= char <= "\udcff" for char in path):
        from transload.findings import quoted

        path = quoted(path)
    return printable(path, limit)


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters: the start and the end, which say most about a name, with ``…`` between."""
    if len(text) <= limit:
        return text
    tail = max(0, limit - 1) // 2
    head = max(0, limit - 1 - tail)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def size(nbytes: int) -> str:
    """A number of bytes in decimal units, with three digits.

    >>> size(999), size(1_350_000_000), size(404_770_816)
    ('999 B', '1.35 GB', '405 MB')
    """
    return f"{_power(nbytes)} B" if abs(nbytes) >= _ABSURD else _scaled(nbytes, _BYTES)


def count(number: int) -> str:
    """A count: exact if that is short, else three digits and a word.

    >>> count(290), count(12_345), count(6_738_415_616)
    ('290', '12,345', '6.74 billion')
    """
    if abs(number) >= _ABSURD:
        return _power(number)
    return f"{number:,}" if abs(number) < _EXACT_BELOW else _scaled(number, _COUNTS)


def plural(number: int, noun: str) -> str:
    """``number`` and ``noun``, with an s for the plural.

    >>> plural(1, "tensor"), plural(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as torch prints it, truncated if it has many dimensions.

    >>> shape_text((4, 3)), shape_text(())
    ('[4, 3]', '[]')
    """
    shown = [_power(n) if abs(n) >= _ABSURD else str(n) for n in shape[:_DIMENSIONS]]
    if len(shape) > _DIMENSIONS:
        shown.append(f"… {len(shape) - _DIMENSIONS:,} more")
    return f"[{', '.join(shown)}]"


def _scaled(number: int, units: tuple[str, ...]) -> str:
    """Three digits of ``number``, with a unit for the power of 1000."""
    value, unit = float(number), 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {units[unit]}".rstrip()


def _power(number: int) -> str:
    """An absurd number by its magnitude."""
    return f"{'-' if number < 0 else ''}2^{abs(number).bit_length() - 1}"
