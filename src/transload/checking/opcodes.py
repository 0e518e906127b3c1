"""Which opcodes an unpickler takes."""

from __future__ import annotations

__all__ = ["WEIGHTS_ONLY", "all_opcodes", "first_unknown"]

WEIGHTS_ONLY = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")
"""Those that torch's unpickler knows, in every release from 2.1 to 2.15."""


def all_opcodes() -> frozenset[int]:
    """Those that Python's own knows."""
    import pickletools

    return frozenset(ord(code.code) for code in pickletools.opcodes)


def first_unknown(data: bytes) -> tuple[int, int] | None:
    r"""Place and code of the first opcode in a pickle that ``weights_only`` does not know; ``None`` without one.

    >>> first_unknown(b"\x80\x02}."), first_unknown(b"\x80\x02I1\n.")
    (None, (2, 73))
    """
    import pickletools

    try:
        for _, _, at in pickletools.genops(data):
            if at is not None and data[at] not in WEIGHTS_ONLY:
                return at, data[at]
    except ValueError:  # it breaks off before
        return None
    return None
