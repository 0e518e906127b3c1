"""AOTInductor packages: compiled libraries and kernels, which GPU they need, and the weights beside them.

``read_elf`` reads which processor a library was compiled for and, for NVIDIA's (a cubin), which GPU. The numbers are
those of LLVM's ``BinaryFormat/ELF.h``; the two layouts of a cubin's flags were checked against what ptxas of CUDA 12.8,
12.9 and 13 writes for sm_50 to sm_120.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint, Origin, Part, Record
from transload.findings import Problem
from transload.formats.nested import (
    Budget,
    Described,
    complaints,
    entries,
    head,
    items,
    load_json,
    node,
    open_record,
    text,
    typed,
)
from transload.formats.tensors import Place, StorageTable, find_tensors
from transload.formats.torch_export import Gathered, gather, pt2_facts
from transload.formats.torch_zip import Archive, needed_by
from transload.nodes import Call, Dict

__all__ = ["HEADER", "capability", "ptx_target", "read_aotinductor", "read_elf"]


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


FOLDER = "data/aotinductor/"

MAX_LIBRARY_SCAN = 64 << 20
"""Bytes of a shared library searched for GPU code: with its weights inside, one can be as large as the model."""

_PTX_HEAD = 4096  # comments, .version and .target come first
_CUBIN_STARTS = (b"\x7fELF\x02\x01\x01\x33", b"\x7fELF\x02\x01\x01\x41")  # the two OS/ABI numbers of CUDA

_KINDS: dict[str, str] = {
    ".cubin": "cubin",
    ".fatbin": "GPU code for several architectures",
    ".hsaco": "AMD GPU code",
    ".ptx": "PTX",
    ".spv": "Intel GPU code",
    ".so": "library",
    ".dll": "library",
    ".pyd": "library",
    ".dylib": "library",
    ".o": "object file",
    ".c": "source",
    ".cpp": "source",
    ".cu": "source",
    ".h": "source",
    ".py": "source",
    ".json": "metadata",
}
# Keys of *_metadata.json (torch/_inductor/codecache.py), and what they are here.
_METADATA: dict[str, str] = {
    "AOTI_DEVICE_KEY": "device",
    "AOTI_COMPUTE_CAPABILITY": "compute capability",
    "AOTI_PLATFORM": "platform",
    "AOTI_MACHINE": "machine",
    "AOTI_CPU_ISA": "CPU instructions",
}


def read_aotinductor(archive: Archive, problems: Iterable[Problem], *, path: str, nbytes: int) -> Checkpoint:
    """A checkpoint out of a compiled package: what it was compiled for, and the weights beside its library."""
    found = list(problems)
    facts = pt2_facts(archive, found)
    held = Gathered(archive, found, Budget(nbytes))
    _read_weights(held)
    gather(held)
    parts = [_part(held, name, record) for name, record in archive.records.items() if _is_compiled(name)]
    facts += _metadata(held)
    facts += _where_weights_are(held, parts)
    found += _gpu_needed(parts)
    return Checkpoint(
        path=path,
        format="aotinductor",
        nbytes=nbytes,
        tensors=tuple(held.tensors),
        storages=tuple(held.storages),
        records=tuple(archive.records.values()),
        parts=(*parts, *held.parts),
        facts=(*facts, *held.facts),
        written_by=Origin(recorded=tuple(held.recorded)),
        problems=tuple(held.problems),
        pickles=tuple(held.pickles),
    )


def _is_compiled(name: str) -> bool:
    return name.startswith(FOLDER) and not name.endswith("/")


# -- the compiled pieces


def _part(held: Gathered, name: str, record: Record) -> Part:
    kind = _KINDS.get("." + name.rpartition(".")[2].lower(), "file")
    facts: tuple[tuple[str, str], ...] = ()
    if kind == "PTX":
        target = ptx_target(head(held.archive, record, _PTX_HEAD))
        facts = _gpu(target) if target else ()
    elif kind not in ("source", "metadata"):
        elf = read_elf(head(held.archive, record, HEADER))
        if elf is not None:
            facts = _elf_facts(elf) + (_embedded(held, record) if kind == "library" else ())
    return Part(name, kind, record.size, facts)


def _elf_facts(elf: Elf) -> tuple[tuple[str, str], ...]:
    return _gpu(elf.sm) if elf.sm else (("machine", elf.machine),)


def _gpu(target: str) -> tuple[tuple[str, str], ...]:
    return (("target", target), ("compute capability", capability(target)))


def _embedded(held: Gathered, record: Record) -> tuple[tuple[str, str], ...]:
    """GPU code inside a library, as far as it can be found without taking the library apart."""
    if not held.budget.take(record, held.problems):
        return ()
    data = open_record(held.archive, record).read(0, MAX_LIBRARY_SCAN)
    targets = {elf.sm for start in _CUBIN_STARTS for elf in _elves(data, start) if elf.sm}
    if targets:
        return (("GPU code inside", ", ".join(sorted(targets))),)
    return (("GPU code inside", "yes, packed (.nv_fatbin)"),) if b".nv_fatbin" in data else ()


def _elves(data: bytes, start: bytes) -> Iterable[Elf]:
    at = data.find(start)
    while at >= 0:
        elf = read_elf(data[at : at + HEADER])
        if elf is not None:
            yield elf
        at = data.find(start, at + 1)


# -- what it was compiled for


def _metadata(held: Gathered) -> list[tuple[str, str]]:
    """The environment of the compiler, from every ``*_metadata.json``; several values of a key are all told."""
    told: dict[str, list[str]] = {}
    for name in [name for name in held.archive.records if _is_compiled(name) and name.endswith("_metadata.json")]:
        for key, value in items(load_json(held.archive, name, held.problems, held.budget)):
            label = _METADATA.get(key)
            words = text(value)
            if label and words and words not in told.setdefault(label, []):
                told[label].append(capability(words) if label == "compute capability" else words)
    return [(label, ", ".join(dict.fromkeys(values))) for label, values in told.items()]


def _gpu_needed(parts: list[Part]) -> list[Problem]:
    """Machine code of a GPU does not run on another architecture; that of PTX is made anew where it is loaded."""
    targets = sorted({value for part in parts if part.kind == "cubin" for key, value in part.facts if key == "target"})
    if not targets:
        return []
    shown = ", ".join(f"{target} (compute capability {capability(target)})" for target in targets[:8])
    return [Problem("aoti-architecture", FOLDER, f"its kernels are machine code for {shown}")]


# -- weights


def _read_weights(held: Gathered) -> None:
    """Weights kept beside the library: ``weights_config.json`` names views of tensors that were saved one by one."""
    configs = [name for name in held.archive.records if _is_compiled(name) and name.endswith("/weights_config.json")]
    bases: dict[str, Checkpoint | None] = {}
    root = Dict([])
    for config in configs:
        views = items(load_json(held.archive, config, held.problems, held.budget))
        model = Dict([part for name, view in views for part in (name, _view(held, entries(view), bases))])
        root.items += [config[len(FOLDER) :].rpartition("/")[0], model] if len(configs) > 1 else model.items
    tree = find_tensors(root, StorageTable(lambda key, _: _place(bases.get(key))))
    held.tensors += tree.tensors
    held.storages += typed(tree.storages, tree.tensors)
    lost = [storage for storage in tree.storages if not storage.record]
    held.problems += complaints(tree, lost)
    held.problems += [Problem("storage-missing", f"storage {s.key}", needed_by(s)) for s in lost]


def _view(held: Gathered, view: list[Any], bases: dict[str, Checkpoint | None]) -> Call:
    """``[record, shape, stride, offset]`` as a tensor over the storage of the tensor saved in that record."""
    file, sizes, strides, offset = [*view, None, None, None, None][:4]
    record = f"data/weights/{text(file, 200)}"
    if record not in bases:
        bases[record] = held.nested(record)
    base = bases[record]
    first = base.tensors[0] if base and base.tensors else None
    what = Described(
        record=record,
        dtype=first.dtype if first else "",
        device=first.device if first else "unknown",
        offset=offset,
        sizes=sizes,
        strides=strides,
        nbytes=base.storages[0].nbytes if base and base.storages else None,
    )
    return node(what, held.archive)


def _place(base: Checkpoint | None) -> Place:
    if base is None or not base.storages:
        return Place(None, 0)
    storage = base.storages[0]
    return Place(storage.offset, storage.stored, storage.record, storage.crc32, storage.compressed)


def _where_weights_are(held: Gathered, parts: list[Part]) -> list[tuple[str, str]]:
    if not any(part.kind == "library" for part in parts):
        return []
    return [("weights", "inside the compiled library, not listed" if not held.tensors else "the library may hold more")]
