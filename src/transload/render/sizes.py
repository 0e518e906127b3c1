"""Numbers for people: sizes, counts and shapes. Every number may come from a hostile file, and be of any length."""

from __future__ import annotations

__all__ = ["count", "plural", "shape_text", "size"]

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "thousand", "million", "billion", "trillion")
_EXACT_BELOW = 100_000
_ABSURD = 10**21  # no disk holds it; and str() of an integer of over 4300 digits raises
_DIMENSIONS = 8


def size(nbytes: int) -> str:
    """Bytes in decimal units, three digits.

    >>> size(999), size(1_350_000_000), size(404_770_816)
    ('999 B', '1.35 GB', '405 MB')
    """
    if abs(nbytes) >= _ABSURD:
        return f"{_power(nbytes)} B"
    return _scaled(nbytes, _BYTES)


def count(number: int) -> str:
    """A count: exact while that is short, else three digits and a word.

    >>> count(290), count(12_345), count(6_738_415_616)
    ('290', '12,345', '6.74 billion')
    """
    if abs(number) >= _ABSURD:
        return _power(number)
    return f"{number:,}" if abs(number) < _EXACT_BELOW else _scaled(number, _COUNTS)


def plural(number: int, noun: str) -> str:
    """``number`` of ``noun``, which takes a plain s.

    >>> plural(1, "tensor"), plural(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as torch prints it; one of very many dimensions is cut.

    >>> shape_text((4, 3)), shape_text(())
    ('[4, 3]', '[]')
    """
    shown = [_power(n) if abs(n) >= _ABSURD else str(n) for n in shape[:_DIMENSIONS]]
    if len(shape) > _DIMENSIONS:
        shown.append(f"… {len(shape) - _DIMENSIONS:,} more")
    return f"[{', '.join(shown)}]"


def _scaled(number: int, units: tuple[str, ...]) -> str:
    """Three digits of ``number`` and the unit of thousands that fits."""
    value, unit = float(number), 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {units[unit]}".rstrip()


def _power(number: int) -> str:
    """An absurd number by its magnitude."""
    return f"{'-' if number < 0 else ''}2^{abs(number).bit_length() - 1}"
