"""Programs that AOTInductor has compiled: the libraries and kernels, which GPU they need, and the weights outside."""

from __future__ import annotations

import re
from typing import Any

from transload.checkpoint import Checkpoint, Origin, Part, Record
from transload.findings import Problem
from transload.formats.graph import find_tensors
from transload.formats.programs import entries, fields, tensor_call, text
from transload.formats.programs.export import Package, read_programs
from transload.formats.tensors import StorageTable
from transload.formats.torch_zip import Archive, needed_by
from transload.formats.zip import DEFLATED
from transload.nodes import Dict
from transload.steps import tables

FOLDER = "data/aotinductor/"

# Bytes of a shared library that are searched for GPU code: with weights inside, it can be as large as the model.
MAX_LIBRARY_SCAN = 64 << 20
_PTX_HEAD = 4096  # comments, .version and .target come first
_CUBIN_START = re.compile(rb"\x7fELF\x02\x01\x01[\x33\x41]")  # the two OS/ABI numbers of CUDA


def read(archive: Archive) -> Checkpoint:
    """Read a compiled package: what it was compiled for, and the weights outside its library."""
    out = Package(archive, "aotinductor")
    compiled = [name for name in archive.records if name.startswith(FOLDER) and not name.endswith("/")]
    _read_views(out, [name for name in compiled if name.endswith("/weights_config.json")])
    first_facts, out.facts = out.facts, []
    read_programs(out)
    kinds, labels = tables(__package__, "aotinductor").values()
    parts: list[Part] = []
    for record in [archive.records[name] for name in compiled]:
        kind, target = kinds.get(record.name.rpartition(".")[2].lower(), "file"), ""
        about: list[tuple[str, str]] = []
        if kind == "PTX":  # the oldest GPU that it runs on
            directive = re.search(rb"(?m)^[ \t]*\.target[ \t]+([^\s,]+)", archive.head(record, _PTX_HEAD))
            target = directive[1].decode("ascii", "backslashreplace")[:20] if directive else ""
        elif kind not in ("source", "metadata"):
            machine, target = read_elf(archive.head(record, HEADER)) or ("", "")
            if machine and not target:
                about.append(("machine", machine))
            if machine and kind == "library" and out.affords(record):
                # Look for GPU code inside the library, without parsing it.
                data = out.open(record).read(0, MAX_LIBRARY_SCAN)
                starts = [match.start() for match in _CUBIN_START.finditer(data)]
                elves = [read_elf(data[start : start + HEADER]) or ("", "") for start in starts]
                inside = ", ".join(sorted({sm for _, sm in elves if sm}))
                if inside or b".nv_fatbin" in data:
                    about.append(("GPU code inside", inside or "yes, packed (.nv_fatbin)"))
        if target:
            about[:0] = [("target", target), ("compute capability", capability(target))]
        parts.append(Part(record.name, kind, record.size, tuple(about)))
    out.parts = [*parts, *out.parts]
    # The environment of the compiler, with the values of all ``*_metadata.json``.
    environment: dict[str, list[str]] = {}
    for name in [name for name in compiled if name.endswith("_metadata.json")]:
        for key, value in fields(out.json(name)).items():
            label, words = labels.get(key), text(value)
            if label and words and words not in environment.setdefault(label, []):
                environment[label].append(capability(words) if label == "compute capability" else words)
    facts = [(label, ", ".join(dict.fromkeys(values))) for label, values in environment.items()]
    if any(part.kind == "library" for part in parts):
        whereabouts = "the library may contain more" if out.tensors else "inside the compiled library, not listed"
        facts.append(("weights", whereabouts))
    out.facts = [*first_facts, *facts, *out.facts]
    # Machine code for a GPU does not run on another architecture; PTX is compiled again where it is loaded.
    targets = sorted({value for part in parts if part.kind == "cubin" for key, value in part.facts if key == "target"})
    if targets:
        shown = ", ".join(f"{target} (compute capability {capability(target)})" for target in targets[:8])
        out.problems.add("aoti-architecture", FOLDER, f"its kernels are machine code for {shown}")
    return out.checkpoint(written_by=Origin(recorded=tuple(out.recorded)))


def _read_views(out: Package, configs: list[str]) -> None:
    """Read weights outside the library: ``weights_config.json`` names views of tensors that were saved one by one."""
    bases: dict[str, Checkpoint | None] = {}
    root = Dict([])
    for config in configs:
        model: list[object] = []
        for name, view in fields(out.json(config)).items():
            # ``[record, shape, stride, offset]``: a tensor over the storage of the tensor saved in that record.
            file, sizes, strides, offset = [*entries(view), None, None, None, None][:4]
            record = f"data/weights/{text(file, 200)}"
            if record not in bases:
                bases[record] = out.nested(record)
            base = bases[record]
            first = base.tensors[0] if base and base.tensors else None
            dtype, device = (first.dtype, first.device) if first else ("", "unknown")
            nbytes = base.storages[0].nbytes if base and base.storages else None
            model += [name, tensor_call(out.archive, record, dtype, device, (offset, sizes, strides), nbytes=nbytes)]
        root.items += [config[len(FOLDER) :].rpartition("/")[0], Dict(model)] if len(configs) > 1 else model

    def locate(key: str, _: int) -> Record | None:
        base = bases.get(key)
        if base is None or not base.storages:
            return None
        storage = base.storages[0]
        method = DEFLATED if storage.compressed else 0
        return Record(storage.record, storage.offset, storage.stored, storage.stored, storage.crc32, method)

    tree = find_tensors(root, StorageTable(locate))
    lost = [storage for storage in tree.storages if not storage.record]
    out.take_tree(tree, lost)
    out.problems += [Problem("storage-missing", f"storage {s.key}", needed_by(s)) for s in lost]


# -- compiled code

HEADER = 64  # bytes to read for ``read_elf``: the longer, 64-bit header
_CUDA = 190
_MACHINES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv"}
_MACHINES |= {258: "loongarch", _CUDA: "NVIDIA GPU", 224: "AMD GPU"}


def read_elf(head: bytes) -> tuple[str, str] | None:
    """The machine of an ELF file with these first ``HEADER`` bytes, and the GPU of a cubin; ``None`` for another file.

    The numbers are those of LLVM's ``BinaryFormat/ELF.h``.
    """
    if head[:4] != b"\x7fELF" or len(head) < 20 or head[4] not in (1, 2) or head[5] not in (1, 2):
        return None
    order: Any = "little" if head[5] == 1 else "big"
    machine = int.from_bytes(head[18:20], order)
    at = 48 if head[4] == 2 else 36  # 64 or 32 bits
    flags = int.from_bytes(head[at : at + 4], order)
    # EI_ABIVERSION 7 has the SM number in the low byte of e_flags and the "a" of sm_90a in bit 11. From 8 on
    # (Blackwell, and everything CUDA 13 compiles) they are the second byte and bit 3; CUDA 13 does not set the bit, so
    # that its sm_90a reads as sm_90. It is a guess that versions above 8 keep this layout. Both were checked with the
    # output of ptxas of CUDA 12.8, 12.9 and 13 for sm_50 to sm_120.
    if head[8] >= 8:
        number, special = flags >> 8 & 0xFF, flags & 0x8
    else:
        number, special = flags & 0xFF, flags & 0x800
    sm = f"sm_{number}{'a' if special else ''}" if number and machine == _CUDA else ""
    return _MACHINES.get(machine, f"ELF machine {machine}"), sm


def capability(sm: str) -> str:
    """The compute capability of a target; the target itself if it has none.

    >>> capability("sm_90a"), capability("120"), capability("gfx942")
    ('9.0', '12.0', 'gfx942')
    """
    digits = sm.removeprefix("sm_").removeprefix("compute_").rstrip("af")
    if not digits.isdecimal() or not 2 <= len(digits) <= 3:
        return sm
    return f"{digits[:-1]}.{digits[-1]}"
