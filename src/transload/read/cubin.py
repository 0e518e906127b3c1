"""The header of an ELF file: which processor it was compiled for and, for NVIDIA's (a cubin), which GPU.

The numbers are those of LLVM's ``BinaryFormat/ELF.h``; the two layouts of a cubin's flags were checked against what
ptxas of CUDA 12.8, 12.9 and 13 writes for sm_50 to sm_120.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HEADER", "Elf", "capability", "ptx_target", "read_elf"]

HEADER = 64
"""Bytes to read for ``read_elf``: the longer, 64-bit header."""

_CUDA = 190
_MACHINES: dict[int, str] = {
    3: "i386",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    _CUDA: "NVIDIA GPU",
    224: "AMD GPU",
    243: "riscv",
    258: "loongarch",
}

# EI_ABIVERSION 7 keeps the SM number in the low byte of e_flags and the "a" of sm_90a in bit 11. From 8 on (Blackwell,
# and everything CUDA 13 compiles) it is the second byte and bit 3; CUDA 13 leaves the bit out, so that its sm_90a reads
# as sm_90. That versions above 8 will keep this layout is a guess.
_SECOND_LAYOUT = 8


class Elf(NamedTuple):
    """What an ELF header says. ``sm`` is the GPU a cubin is for (``"sm_90"``), empty for anything else."""

    machine: str
    bits: int
    sm: str = ""


def read_elf(head: bytes) -> Elf | None:
    r"""The first ``HEADER`` bytes of a file as an ELF header; ``None`` if they are none.

    >>> read_elf(b"\x7fELF" + bytes([2, 1, 1, 0x41, 8]) + bytes(9) + b"\xbe" + bytes(30) + b"\x5a")
    Elf(machine='NVIDIA GPU', bits=64, sm='sm_90')
    """
    if head[:4] != b"\x7fELF" or len(head) < 20 or head[4] not in (1, 2) or head[5] not in (1, 2):
        return None
    order = "little" if head[5] == 1 else "big"
    machine = int.from_bytes(head[18:20], order)  # type: ignore[arg-type]
    name = _MACHINES.get(machine, f"ELF machine {machine}")
    bits = 64 if head[4] == 2 else 32
    at = 48 if bits == 64 else 36
    flags = int.from_bytes(head[at : at + 4], order)  # type: ignore[arg-type]
    return Elf(name, bits, _sm(flags, head[8]) if machine == _CUDA else "")


def _sm(flags: int, abi: int) -> str:
    if abi >= _SECOND_LAYOUT:
        number, special = flags >> 8 & 0xFF, flags & 0x8
    else:
        number, special = flags & 0xFF, flags & 0x800
    return f"sm_{number}{'a' if special else ''}" if number else ""


def capability(sm: str) -> str:
    """The compute capability of a target, however it is written; the text itself if it is no such number.

    >>> capability("sm_90a"), capability("120"), capability("gfx942")
    ('9.0', '12.0', 'gfx942')
    """
    digits = sm.removeprefix("sm_").removeprefix("compute_").rstrip("af")
    if not digits.isdecimal() or not 2 <= len(digits) <= 3:
        return sm
    return f"{digits[:-1]}.{digits[-1]}"


def ptx_target(text: bytes) -> str:
    r"""The GPU that PTX assembly asks for at least: ``"sm_80"``, or an empty text.

    >>> ptx_target(b".version 8.0\n.target sm_80, debug\n")
    'sm_80'
    """
    for line in text.splitlines():
        words = line.replace(b",", b" ").split()
        if words[:1] == [b".target"] and len(words) > 1:
            return words[1].decode("ascii", "backslashreplace")[:20]
    return ""
