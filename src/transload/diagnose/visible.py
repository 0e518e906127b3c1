"""CUDA_VISIBLE_DEVICES as the CUDA driver reads it.

The grammar was determined value by value with driver 580.159 (Linux, one card); ``tests/diagnose/test_visible.py`` has
the results. torch has its own parser for ``device_count()``, which differs: it accepts no upper case in a UUID and no
UUID without dashes, does not truncate numbers to 32 bits, and treats a duplicate as an empty list even after the place
where the driver stops reading. Then ``is_available()`` is True and ``device_count()`` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from transload.frozen import Frozen

Why = Literal["", "empty", "negative", "not-a-number", "no-such-index", "twice", "no-such-uuid", "ambiguous", "mixed"]

NO_DEVICE, INVALID_DEVICE = 100, 101
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]*)(?<=[0-9])")
_DIGITS = 20  # more than a 64-bit number has
_UUID = re.compile(r"(?:-*[0-9A-Fa-f]){32}|[0-9A-Fa-f-]*\Z")  # the driver reads no further than 32 digits


class Visible(Frozen):
    """The devices that a process sees, and which part of the value was ignored.

    ``indices`` are positions among the GPUs, ``mig`` among the MIG devices. ``why`` is why reading stopped at ``token``
    (empty if everything was read), and ``dropped`` is the rest from there on. ``error`` is the result of ``cuInit``: 0,
    100 (no device) or 101 (a duplicate). ``known`` is false if it depends on an unknown UUID.
    """

    indices: tuple[int, ...] = ()
    mig: tuple[int, ...] = ()
    why: Why = ""
    token: str = ""
    dropped: tuple[str, ...] = ()
    error: int = 0
    known: bool = True

    @property
    def count(self) -> int:
        """How many devices are visible."""
        return len(self.indices) + len(self.mig)


def visible_devices(value: str, gpus: Sequence[str], mig: Sequence[str] = ()) -> Visible:
    """Which of the GPUs with these UUIDs a value of CUDA_VISIBLE_DEVICES shows; an empty UUID is unknown.

    The first element decides whether it is a list of numbers or of UUIDs. Reading stops at the first element that is of
    the other kind, invalid, or names no device. A number is what C's ``strtol`` reads at the start of the element,
    truncated to 32 bits. A UUID begins with ``GPU-`` or ``MIG-`` and may be a prefix that only one device has.

    >>> gpus = ("GPU-6e1b1a3c-0000-4000-8000-00000000000a", "GPU-77aa0000-0000-4000-8000-00000000000b")
    >>> visible_devices("1,7,0", gpus)
    Visible(indices=(1,), mig=(), why='no-such-index', token='7', dropped=('7', '0'), error=0, known=True)
    >>> visible_devices("GPU-77", gpus).indices, visible_devices("", gpus).error, visible_devices("0,0", gpus).error
    ((1,), 100, 101)
    """
    tokens = value.split(",")
    uuids = [_hex(uuid[4:]) for uuid in (*gpus, *mig)]
    by_uuid = value.startswith(("GPU-", "MIG-"))
    taken: list[int] = []  # positions among the GPUs and, after them, the MIG devices
    why: Why = ""
    rest: list[str] = []
    known = True
    for place, token in enumerate(tokens):
        found = _by_uuid(token, uuids) if by_uuid else _by_number(token, len(gpus))
        if isinstance(found, str):
            why, rest = found, tokens[place:]
            # Drivers before 470 named a MIG device ``MIG-GPU-…/1/0``, with numbers that NVML does not list.
            unknown = _hex(token[4:]) and not all(uuids)
            known = why != "no-such-uuid" or not (token.startswith("MIG-GPU-") or unknown)
            break
        if found in taken:
            return Visible(why="twice", token=token, dropped=tuple(tokens), error=INVALID_DEVICE)
        taken.append(found)
    return Visible(
        indices=tuple(index for index in taken if index < len(gpus)),
        mig=tuple(index - len(gpus) for index in taken if index >= len(gpus)),
        why=why,
        token=rest[0] if rest else "",
        dropped=tuple(rest),
        error=0 if taken or not known else NO_DEVICE,
        known=known,
    )


def _by_number(token: str, count: int) -> int | Why:
    """The device, or what is wrong with the token."""
    digits = _NUMBER.match(token)
    if digits is None:
        return "mixed" if token.startswith(("GPU-", "MIG-")) else "not-a-number" if token.strip() else "empty"
    number = int(f"{digits[1]}{digits[2][:_DIGITS] or 0}")
    low = max(min(number, 2**63 - 1), -(2**63)) & 0xFFFFFFFF  # strtol saturates; then a cast to int
    if low >= 2**31:
        return "negative"
    return low if low < count else "no-such-index"


def _by_uuid(token: str, uuids: Sequence[str]) -> int | Why:
    """The device, or what is wrong with the token."""
    if not token.startswith(("GPU-", "MIG-")):
        return "mixed"
    wanted = _hex(token[4:])
    found = [index for index, uuid in enumerate(uuids) if wanted and uuid.startswith(wanted)]
    return found[0] if len(found) == 1 else "ambiguous" if found else "no-such-uuid"


def _hex(text: str) -> str:
    """The hexadecimal digits that the driver reads, without dashes; empty if anything else is before the 32nd."""
    read = _UUID.match(text)
    return read[0].replace("-", "").lower() if read else ""
