"""``.pt2`` packages: programs of ``torch.export``, and those that AOTInductor has compiled.

Of a program its graph is read, with devices and targets that no exporter writes, and its tensors; of a compiled one
also its libraries and kernels, and which GPU they need. ``read_elf`` reads the machine that a library was compiled for
and, of a cubin, the GPU. The numbers are those of LLVM's ``BinaryFormat/ELF.h``; the two layouts of a cubin's flags
were checked with the output of ptxas of CUDA 12.8, 12.9 and 13 for sm_50 to sm_120.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Key, Origin, Part, Record
from transload.dtypes import SCALAR_TYPES
from transload.findings import Problem, Problems, first_lines
from transload.formats import pickle_machine
from transload.formats.programs import (
    OPERATORS,
    Program,
    entries,
    fields,
    looks_like_pickle,
    tensor_call,
    text,
)
from transload.formats.tensors import StorageTable, find_tensors, moved_storage, moved_tensor
from transload.formats.torch_zip import (
    Archive,
    check_storages,
    container_facts,
    needed_by,
    pickle_problems,
    read_torch_zip,
    record_text,
    storage_table,
)
from transload.formats.zip import DEFLATED, FOLDER_PROBLEMS, read_index, starts_like_zip
from transload.frozen import replace
from transload.io.sources import BytesSource, Slice, Source
from transload.nodes import Dict

# What torch.export writes as the target of a node: operators, and arithmetic on sizes. torch.export.load resolves any
# other text that begins with "torch" as attributes of the package torch: "torch.os.system" is a function.
_TARGETS = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\._?sym_\w+|math\.(trunc|ceil|floor|sqrt|pow)|#[\w:.]+"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|lshift|rshift|getitem)"
)
# sympy evaluates sizes as Python expressions, and guards are compiled and run.
_ODD_TEXT = re.compile(r"__\w+__|\b(eval|exec|open|import|compile|getattr|lambda)\b")
_SHOWN = 8


def _device(value: Any) -> str:
    """A device from the JSON of a program.

    >>> _device({"type": "cuda", "index": 1}), _device({"type": "cpu", "index": None})
    ('cuda:1', 'cpu')
    """
    index = fields(value).get("index")
    return (text(fields(value).get("type")) or "unknown") + (f":{index}" if type(index) is int else "")


def _graph_facts(program: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Schema and operator versions, and the size of the graph.

    >>> _graph_facts({"schema_version": {"major": 8, "minor": 17}, "opset_version": {"aten": 10}})
    (('schema version', '8.17'), ('opset version', 'aten 10'), ('nodes', '0'))
    """
    schema = program.get("schema_version")
    parts = [schema] if type(schema) is int else fields(schema).values()
    opsets = fields(program.get("opset_version")).items()
    graph = fields(fields(program.get("graph_module")).get("graph"))
    facts = {
        "schema version": ".".join(str(part) for part in parts if type(part) is int),
        "opset version": ", ".join([f"{text(name)} {n}" for name, n in opsets if type(n) is int][:_SHOWN]),
        "nodes": str(len(entries(graph.get("nodes")))),
    }
    return tuple((name, value) for name, value in facts.items() if value)


def graph_problems(name: str, program: dict[str, Any]) -> list[Problem]:
    """The devices, dangerous operators and odd targets in a program, with the nodes they are in."""
    devices: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for key, value, target in _walk(program):
        if key == "as_device" and type(value) is dict:
            devices[f"{_device(value)} in {target or 'the graph'}"] += 1
        elif key == "target" and type(value) is str:
            targets[value[:200]] += 1
        elif key in ("expr_str", "guards_code") and type(value) is str and _ODD_TEXT.search(value):
            odd[value[:200]] += 1
    reaching = Counter({target: count for target, count in targets.items() if _is_refused(target)})
    reaching.update({f"{target}, which is Python": count for target, count in odd.items()})
    out = Problems()
    for code, counts in (("export-device", devices), ("export-dangerous-op", reaching)):
        lines = [f"{what} {count}×" for what, count in counts.most_common()]
        if lines:
            out.add(code, name, "\n".join(first_lines(lines, _SHOWN)))
    return out


def _is_refused(target: str) -> bool:
    """Whether a target is not an operator, or a dangerous one.

    >>> [_is_refused(f"torch.{target}") for target in ("ops.aten.add.Tensor", "os.system", "ops.aten.save.default")]
    [False, True, True]
    """
    parts = target.split(".")
    return not _TARGETS.fullmatch(target) or (parts[:2] == ["torch", "ops"] and "::".join(parts[2:4]) in OPERATORS)


def _walk(program: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Every key and value in the program, with the target of its node; not by recursion, since JSON may nest deep."""
    stack: list[tuple[str, Any, str]] = [("", program, "")]
    while stack:
        key, value, target = stack.pop()
        if type(value) is dict:
            target = text(value.get("target"), 200) or target
            for inner, held in value.items():
                yield inner, held, target
                stack.append((inner, held, target))
        elif type(value) is list:
            for held in value:
                if type(held) is str:
                    yield key, held, target
                else:
                    stack.append((key, held, target))


_TEXT_RECORDS = ("archive_version", ".data/version", "version", "byteorder", ".data/serialization_id")
_OLD_PROGRAM = "serialized_exported_program.json"

_WEIGHTS, _CONSTANTS, _SAMPLES = "data/weights/", "data/constants/", "data/sample_inputs/"

# Where a program keeps its tensors, and the start of their paths: tables in JSON, and nested torch.save archives (those
# of 2.1 and 2.2 have names that end in .json).
_TABLES: tuple[tuple[str, str, tuple[Key, ...]], ...] = (
    (_WEIGHTS, "_weights_config.json", ()),
    (_CONSTANTS, "_constants_config.json", ("constants",)),
)
_NESTED: tuple[tuple[str, str, tuple[Key, ...]], ...] = (
    (_WEIGHTS, ".pt", ()),
    (_CONSTANTS, ".pt", ("constants",)),
    ("serialized_state_dict", "", ()),
    ("serialized_constants", "", ("constants",)),
)

MAX_PACKED = 64 << 20
"""The largest compressed record that is unpacked, since that needs memory; torch never compresses."""


class _Package(Program):
    """The content of all programs of an archive; ``known`` are the names of the records that were read."""

    def __init__(self, archive: Archive, format_: str) -> None:
        super().__init__(archive, format_)
        # The old form has no folder.
        self.facts = [fact for fact in container_facts(archive, _TEXT_RECORDS, self.problems) if fact != ("folder", "")]
        self.recorded: list[tuple[str, str]] = []
        self.known: set[str] = set()
        names = [name for name in archive.records if name.startswith("models/") and name.endswith(".json")]
        self.models = [name[len("models/") : -len(".json")] for name in names]

    def lead(self, model: str, path: tuple[Key, ...]) -> tuple[Key, ...]:
        """The path of a model's tensors: it begins with the name of the model if there are several."""
        return (model, *path) if len(self.models) > 1 else path

    def open(self, record: Record) -> Source:
        """The content of a record as a source; an uncompressed one is read in place."""
        if record.method or self.archive.source is None:
            return BytesSource(self.archive.read(record, MAX_PACKED).data, record.name)
        size = 0 if record.offset is None else min(record.size, record.stored)
        return Slice(self.archive.source, record.offset or 0, size, record.name)

    def nested(self, name: str, steps: tuple[Key, ...] = ()) -> Checkpoint | None:
        """The checkpoint in a record: a ``torch.save`` archive, or bare pickles. Its paths begin with ``steps``.

        Its offsets are those of the outer file. Its pickles and problems are added here; its tensors are not.
        """
        record = self.archive.find(name)
        if record is None or not record.size or record.name in self.known:
            return None
        self.known.add(record.name)
        if not self.affords(record):
            return None
        source = self.open(record)
        if starts_like_zip(source):
            found = read_torch_zip(Archive.of_zip(source, read_index(source)))
        else:
            data = source.read(0, MAX_PACKED)
            bare = Draft(source.name, "pickle", source.size)
            bare.pickles = pickle_machine.run_all(data, "pickle") if looks_like_pickle(data[:2]) else []
            bare.problems += [problem for pickle in bare.pickles for problem in pickle_problems(pickle, pickle.end)]
            found = bare.checkpoint()
        for pickle in found.pickles:
            pickle.main = False
            pickle.name = f"{record.name} › {pickle.name}"
        self.pickles += found.pickles
        self.problems += [problem.within(record.name) for problem in found.problems]
        base = record.offset if record.method == 0 else None
        lead = f"{record.name}/"
        return replace(
            found,
            tensors=tuple(moved_tensor(tensor, lead, steps, base) for tensor in found.tensors),
            storages=tuple(moved_storage(s, lead, steps, base)._replace(record=record.name) for s in found.storages),
        )

    def take_nested(self, name: str, steps: tuple[Key, ...]) -> None:
        """Add the tensors of a nested checkpoint, with paths that begin with ``steps``."""
        inner = self.nested(name, steps)
        if inner is not None:
            self.add_tree(inner.tensors, inner.storages, (), ())


def read_export(archive: Archive) -> Checkpoint:
    """Read an exported program: weights by their names in ``state_dict()``, constants below ``constants``."""
    out = _Package(archive, "torch-export")
    old = archive.find(_OLD_PROGRAM) is not None
    if old:  # Python's zipfile wrote it, without a folder
        out.problems = Problems(problem for problem in out.problems if problem.code not in FOLDER_PROBLEMS)
    _read_programs(out)
    if not out.models and not old:
        out.problems.add("export-no-program", "models/", "no program is in the archive")
    return out.checkpoint(written_by=Origin(recorded=tuple(out.recorded)))


def _read_programs(out: _Package) -> None:
    """Read every program: its graph, its weights and constants in any form, its sample inputs."""
    archive = out.archive
    seen: list[tuple[str, str]] = []
    for name in (*(f"models/{model}.json" for model in out.models), _OLD_PROGRAM):
        record = archive.find(name)
        if record is None:
            continue
        program = fields(out.json(name))
        facts = _graph_facts(program) if program else ()
        out.parts.append(Part(name, "program", record.size, facts))
        seen += [fact for fact in facts if fact not in seen]
        out.problems += graph_problems(name, program)
        version = text(program.get("torch_version"))
        out.recorded += [("torch", version)] if version else []
    out.facts += seen
    _read_tables(out)
    for name, record in archive.records.items():
        for prefix, suffix, path in _NESTED:
            if name.startswith(prefix) and name.endswith(suffix):
                out.take_nested(name, out.lead(name.removeprefix(prefix).removesuffix(suffix), path))
        if name.startswith((_SAMPLES, "serialized_example_inputs")):
            # The inputs a program was traced with. They are not weights, but loading the program unpickles them.
            inner = out.nested(name)
            held = inner.tensors if inner else ()
            devices = ", ".join(sorted({tensor.device for tensor in held}))
            about = (("tensors", str(len(held))), *([("devices", devices)] if devices else []))
            out.parts.append(Part(name, "sample inputs", record.size, about))
        elif name.startswith(("extra/", "extra_files/")) and not name.endswith("/"):
            out.parts.append(Part(name, "extra file", record.size))
    for model in out.models:
        if not any(archive.find(f"{_WEIGHTS}{model}{end}") for end in ("_weights_config.json", ".pt")):
            detail = "its weights are not in the archive: neither a table of them nor a nested file"
            out.problems.add("export-no-program", f"models/{model}.json", detail)
    # Records that no program refers to are read, too, so that their pickles are judged.
    for name in [*archive.records]:
        if name.startswith((_WEIGHTS, _CONSTANTS)) and name not in out.known:
            out.nested(name)
    ours = ("data/", "models/", "extra/", "extra_files/", "serialized_", ".data/")
    known = [name for name in archive.records if name.startswith(ours)]
    out.note_strays((*known, *_TEXT_RECORDS, "archive_format"))


def _read_tables(out: _Package) -> None:
    """Read the raw tensors of all tables as one tree, since programs may share records, and add the pickled ones."""
    root = Dict([])
    for prefix, suffix, path in _TABLES:
        for table in [name for name in out.archive.records if name.startswith(prefix) and name.endswith(suffix)]:
            lead = out.lead(table.removeprefix(prefix).removesuffix(suffix), path)
            into = root
            for key in lead:  # find or make the dictionary at that path
                held = into.get(str(key))
                if type(held) is not Dict:
                    held = Dict([])
                    into.items += [key, held]
                into = held
            out.known.add(table)
            for name, raw in fields(fields(out.json(table)).get("config")).items():
                entry = fields(raw)
                record, meta = prefix + text(entry.get("path_name"), 200), entry.get("tensor_meta")
                if entry.get("use_pickle") is True or type(meta) is not dict:
                    out.take_nested(record, (*lead, name))
                    continue
                out.known.add(record)
                kind, device = meta.get("dtype"), _device(meta.get("device"))
                dtype = SCALAR_TYPES.get(kind, "") if type(kind) is int else ""
                layout = meta.get("storage_offset"), meta.get("sizes"), meta.get("strides")
                flags: Any = {"requires_grad": meta.get("requires_grad"), "parameter": entry.get("is_param") is True}
                into.items += [name, tensor_call(out.archive, record, dtype, device, layout, **flags)]
    big_endian = record_text(out.archive, "byteorder", Problems()) == "big"
    tree = find_tensors(root, storage_table(out.archive, forms=(("", ""),), big_endian=big_endian))
    lost = [s for s in tree.storages if not s.record]
    empty = [s for s in tree.storages if s.record and s.nbytes and not out.archive.records[s.record].size]
    if empty:
        detail = f"{len(empty)} records of tensors are empty; torch.export.load makes zeros of them"
        out.problems.add("export-no-bytes", empty[0].record, detail)
    out.take_tree(tree, [*lost, *empty])
    hollow = {storage.id for storage in empty}
    out.problems += check_storages([s for s in tree.storages if s.id not in hollow], out.archive)


# -- compiled code

HEADER = 64
"""Bytes to read for ``read_elf``: the longer, 64-bit header."""

_CUDA = 190
_MACHINES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv"}
_MACHINES |= {258: "loongarch", _CUDA: "NVIDIA GPU", 224: "AMD GPU"}

# EI_ABIVERSION 7 has the SM number in the low byte of e_flags and the "a" of sm_90a in bit 11. From 8 on (Blackwell,
# and everything CUDA 13 compiles) they are the second byte and bit 3; CUDA 13 does not set the bit, so that its sm_90a
# reads as sm_90. It is a guess that versions above 8 keep this layout.
_SECOND_LAYOUT = 8


def read_elf(head: bytes) -> tuple[str, str] | None:
    r"""The machine of an ELF file with these first ``HEADER`` bytes, and the GPU of a cubin; ``None`` for another file.

    >>> read_elf(b"\x7fELF" + bytes([2, 1, 1, 0x41, 8]) + bytes(9) + b"\xbe" + bytes(30) + b"\x5a")
    ('NVIDIA GPU', 'sm_90')
    """
    if head[:4] != b"\x7fELF" or len(head) < 20 or head[4] not in (1, 2) or head[5] not in (1, 2):
        return None
    order: Any = "little" if head[5] == 1 else "big"
    machine = int.from_bytes(head[18:20], order)
    at = 48 if head[4] == 2 else 36  # 64 or 32 bits
    flags = int.from_bytes(head[at : at + 4], order)
    if head[8] >= _SECOND_LAYOUT:
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


def ptx_target(text: bytes) -> str:
    r"""The oldest GPU that PTX assembly runs on: ``"sm_80"``, or an empty text.

    >>> ptx_target(b".version 8.0\n.target sm_80, debug\n")
    'sm_80'
    """
    found = re.search(rb"(?m)^[ \t]*\.target[ \t]+([^\s,]+)", text)
    return found[1].decode("ascii", "backslashreplace")[:20] if found else ""


# -- AOTInductor

FOLDER = "data/aotinductor/"

MAX_LIBRARY_SCAN = 64 << 20
"""Bytes of a shared library that are searched for GPU code: with weights inside, it can be as large as the model."""

_PTX_HEAD = 4096  # comments, .version and .target come first
_CUBIN_START = re.compile(rb"\x7fELF\x02\x01\x01[\x33\x41]")  # the two OS/ABI numbers of CUDA

_KINDS: dict[str, str] = {
    "cubin": "cubin",
    "fatbin": "GPU code for several architectures",
    "hsaco": "AMD GPU code",
    "ptx": "PTX",
    "spv": "Intel GPU code",
    **dict.fromkeys(("so", "dll", "pyd", "dylib"), "library"),
    "o": "object file",
    **dict.fromkeys(("c", "cpp", "cu", "h", "py"), "source"),
    "json": "metadata",
}
# Keys of *_metadata.json (torch/_inductor/codecache.py), and the names of the facts.
_METADATA: dict[str, str] = {
    "AOTI_DEVICE_KEY": "device",
    "AOTI_COMPUTE_CAPABILITY": "compute capability",
    "AOTI_PLATFORM": "platform",
    "AOTI_MACHINE": "machine",
    "AOTI_CPU_ISA": "CPU instructions",
}


def read_aotinductor(archive: Archive) -> Checkpoint:
    """Read a compiled package: what it was compiled for, and the weights outside its library."""
    out = _Package(archive, "aotinductor")
    compiled = [name for name in archive.records if name.startswith(FOLDER) and not name.endswith("/")]
    _read_views(out, [name for name in compiled if name.endswith("/weights_config.json")])
    first_facts, out.facts = out.facts, []
    _read_programs(out)
    parts = [_compiled_part(out, archive.records[name]) for name in compiled]
    out.parts = [*parts, *out.parts]
    # The environment of the compiler, with the values of all ``*_metadata.json``.
    environment: dict[str, list[str]] = {}
    for name in [name for name in compiled if name.endswith("_metadata.json")]:
        for key, value in fields(out.json(name)).items():
            label, words = _METADATA.get(key), text(value)
            if label and words and words not in environment.setdefault(label, []):
                environment[label].append(capability(words) if label == "compute capability" else words)
    facts = [(label, ", ".join(dict.fromkeys(values))) for label, values in environment.items()]
    if any(part.kind == "library" for part in parts):
        there = "the library may contain more" if out.tensors else "inside the compiled library, not listed"
        facts.append(("weights", there))
    out.facts = [*first_facts, *facts, *out.facts]
    # Machine code for a GPU does not run on another architecture; PTX is compiled again where it is loaded.
    targets = sorted({value for part in parts if part.kind == "cubin" for key, value in part.facts if key == "target"})
    if targets:
        shown = ", ".join(f"{target} (compute capability {capability(target)})" for target in targets[:8])
        out.problems.add("aoti-architecture", FOLDER, f"its kernels are machine code for {shown}")
    return out.checkpoint(written_by=Origin(recorded=tuple(out.recorded)))


def _compiled_part(out: _Package, record: Record) -> Part:
    """A compiled file, and what it was compiled for."""
    kind = _KINDS.get(record.name.rpartition(".")[2].lower(), "file")
    facts: list[tuple[str, str]] = []
    target = ""
    if kind == "PTX":
        target = ptx_target(out.archive.head(record, _PTX_HEAD))
    elif kind not in ("source", "metadata"):
        machine, target = read_elf(out.archive.head(record, HEADER)) or ("", "")
        if machine and not target:
            facts.append(("machine", machine))
        if machine and kind == "library" and out.affords(record):
            # Look for GPU code inside the library, without parsing it.
            data = out.open(record).read(0, MAX_LIBRARY_SCAN)
            starts = [match.start() for match in _CUBIN_START.finditer(data)]
            elves = [read_elf(data[start : start + HEADER]) or ("", "") for start in starts]
            inside = ", ".join(sorted({sm for _, sm in elves if sm}))
            if inside or b".nv_fatbin" in data:
                facts.append(("GPU code inside", inside or "yes, packed (.nv_fatbin)"))
    if target:
        facts[:0] = [("target", target), ("compute capability", capability(target))]
    return Part(record.name, kind, record.size, tuple(facts))


def _read_views(out: _Package, configs: list[str]) -> None:
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
        held = base.storages[0]
        method = DEFLATED if held.compressed else 0
        return Record(held.record, held.offset, held.stored, held.stored, held.crc32, method)

    tree = find_tensors(root, StorageTable(locate))
    lost = [storage for storage in tree.storages if not storage.record]
    out.take_tree(tree, lost)
    out.problems += [Problem("storage-missing", f"storage {s.key}", needed_by(s)) for s in lost]
