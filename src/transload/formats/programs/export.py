"""Programs of ``torch.export``: the tensors are read, and the graph is searched for devices and odd targets.

A ``.pt2`` archive contains several programs; those that AOTInductor has compiled may be among them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Key, Origin, Part, Record
from transload.dtypes import SCALAR_TYPES
from transload.findings import Problem, Problems, first_lines
from transload.formats import torch_zip
from transload.formats.graph import find_tensors
from transload.formats.nested import moved_storage, moved_tensor
from transload.formats.pickle_streams import run_all
from transload.formats.programs import PICKLED, Program, entries, fields, tensor_call, text
from transload.formats.programs.torchscript import OPERATORS
from transload.formats.torch_zip import Archive, check_storages, storage_table
from transload.formats.zip import FOLDER_PROBLEMS, read_index, starts_like_zip
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

MAX_PACKED = 64 << 20  # the largest compressed record that is unpacked, since that needs memory; torch never compresses


def _device(value: Any) -> str:
    """A device from the JSON of a program: ``{"type": "cuda", "index": 1}`` is ``cuda:1``."""
    index = fields(value).get("index")
    return (text(fields(value).get("type")) or "unknown") + (f":{index}" if type(index) is int else "")


def graph_problems(name: str, program: dict[str, Any]) -> list[Problem]:
    """The devices, dangerous operators and odd targets in a program, with the nodes they are in."""
    devices: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    expressions: Counter[str] = Counter()
    stack: list[tuple[str, Any, str]] = [("", program, "")]
    while stack:  # not by recursion, since JSON may be deeply nested
        key, value, node = stack.pop()  # node: the target of the graph node that contains the value
        inside = [(key, child) for child in entries(value)]
        if type(value) is dict:
            inside, node = [*value.items()], text(value.get("target"), 200) or node
        for label, child in inside:
            if label == "as_device" and type(child) is dict:
                devices[f"{_device(child)} in {node or 'the graph'}"] += 1
            elif label == "target" and type(child) is str:
                targets[child[:200]] += 1
            elif label in ("expr_str", "guards_code") and type(child) is str and _ODD_TEXT.search(child):
                expressions[child[:200]] += 1
            stack.append((label, child, node))
    suspicious: Counter[str] = Counter()
    for target, count in targets.items():  # those that are not operators, or dangerous ones
        parts = target.split(".")
        if not _TARGETS.fullmatch(target) or (parts[:2] == ["torch", "ops"] and "::".join(parts[2:4]) in OPERATORS):
            suspicious[target] = count
    suspicious.update({f"{target}, which is Python": count for target, count in expressions.items()})
    out = Problems()
    for code, counts in (("export-device", devices), ("export-dangerous-op", suspicious)):
        lines = [f"{what} {count}×" for what, count in counts.most_common()]
        if lines:
            out.add(code, name, "\n".join(first_lines(lines, _SHOWN)))
    return out


class Package(Program):
    """The content of all programs of an archive; ``records_read`` are the names of those."""

    def __init__(self, archive: Archive, format_: str) -> None:
        super().__init__(archive, format_, _TEXT_RECORDS)
        self.facts = [fact for fact in self.facts if fact != ("folder", "")]  # the old form has none
        self.recorded: list[tuple[str, str]] = []
        self.records_read: set[str] = set()
        names = [name for name in archive.records if name.startswith("models/") and name.endswith(".json")]
        self.models = [name[len("models/") : -len(".json")] for name in names]

    def path_in(self, model: str, path: tuple[Key, ...]) -> tuple[Key, ...]:
        """The path of a model's tensors: it begins with the name of the model if there are several models."""
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
        if record is None or not record.size or record.name in self.records_read:
            return None
        self.records_read.add(record.name)
        if not self.affords(record):
            return None
        source = self.open(record)
        if starts_like_zip(source):
            inner = torch_zip.read(Archive.of_zip(source, read_index(source)))
        else:
            data = source.read(0, MAX_PACKED)
            bare = Draft(source.name, "pickle", source.size)
            bare.pickles = run_all(data, "pickle") if data.startswith(PICKLED) else []
            for pickle in bare.pickles:
                bare.problems += torch_zip.pickle_problems(pickle, pickle.end)
            inner = bare.checkpoint()
        for pickle in inner.pickles:
            pickle.main = False
            pickle.name = f"{record.name} › {pickle.name}"
        self.pickles += inner.pickles
        self.problems += [problem.within(record.name) for problem in inner.problems]
        base = record.offset if record.method == 0 else None
        prefix = f"{record.name}/"
        return replace(
            inner,
            tensors=tuple(moved_tensor(tensor, prefix, steps, base) for tensor in inner.tensors),
            storages=tuple(moved_storage(s, prefix, steps, base)._replace(record=record.name) for s in inner.storages),
        )

    def take_nested(self, name: str, steps: tuple[Key, ...]) -> None:
        """Add the tensors of a nested checkpoint, with paths that begin with ``steps``."""
        inner = self.nested(name, steps)
        if inner is not None:
            self.add_tree(inner.tensors, inner.storages, (), ())


def read(archive: Archive) -> Checkpoint:
    """Read an exported program: weights by their names in ``state_dict()``, constants below ``constants``."""
    out = Package(archive, "torch-export")
    old = archive.find(_OLD_PROGRAM) is not None
    if old:  # Python's zipfile wrote it, without a folder
        out.problems = Problems(problem for problem in out.problems if problem.code not in FOLDER_PROBLEMS)
    read_programs(out)
    if not out.models and not old:
        out.problems.add("export-no-program", "models/", "the archive contains no program")
    return out.checkpoint(written_by=Origin(recorded=tuple(out.recorded)))


def read_programs(out: Package) -> None:
    """Read every program: its graph, its weights and constants in any form, its sample inputs."""
    archive = out.archive
    seen: list[tuple[str, str]] = []
    for name in (*(f"models/{model}.json" for model in out.models), _OLD_PROGRAM):
        record = archive.find(name)
        if record is None:
            continue
        program = fields(out.json(name))
        schema = program.get("schema_version")
        versions = [schema] if type(schema) is int else fields(schema).values()
        opsets = fields(program.get("opset_version")).items()
        graph = fields(fields(program.get("graph_module")).get("graph"))
        texts = {
            "schema version": ".".join(str(part) for part in versions if type(part) is int),
            "opset version": ", ".join([f"{text(opset)} {n}" for opset, n in opsets if type(n) is int][:_SHOWN]),
            "nodes": str(len(entries(graph.get("nodes")))) if program else "",
        }
        facts = tuple((label, value) for label, value in texts.items() if value)
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
                out.take_nested(name, out.path_in(name.removeprefix(prefix).removesuffix(suffix), path))
        if name.startswith((_SAMPLES, "serialized_example_inputs")):
            # The inputs a program was traced with. They are not weights, but loading the program unpickles them.
            inner = out.nested(name)
            tensors = inner.tensors if inner else ()
            devices = ", ".join(sorted({tensor.device for tensor in tensors}))
            about = (("tensors", str(len(tensors))), *([("devices", devices)] if devices else []))
            out.parts.append(Part(name, "sample inputs", record.size, about))
        elif name.startswith(("extra/", "extra_files/")) and not name.endswith("/"):
            out.parts.append(Part(name, "extra file", record.size))
    for model in out.models:
        if not any(archive.find(f"{_WEIGHTS}{model}{end}") for end in ("_weights_config.json", ".pt")):
            detail = "its weights are not in the archive: neither a table of them nor a nested file"
            out.problems.add("export-no-program", f"models/{model}.json", detail)
    # Records that no program refers to are read, too, so that their pickles are judged.
    for name in [*archive.records]:
        if name.startswith((_WEIGHTS, _CONSTANTS)) and name not in out.records_read:
            out.nested(name)
    ours = ("data/", "models/", "extra/", "extra_files/", "serialized_", ".data/")
    listed = [name for name in archive.records if name.startswith(ours)]
    out.note_strays((*listed, *_TEXT_RECORDS, "archive_format"))


def _read_tables(out: Package) -> None:
    """Read the raw tensors of all tables as one tree, since programs may share records, and add the pickled ones."""
    root = Dict([])
    for prefix, suffix, path in _TABLES:
        for table in [name for name in out.archive.records if name.startswith(prefix) and name.endswith(suffix)]:
            steps = out.path_in(table.removeprefix(prefix).removesuffix(suffix), path)
            into = root
            for key in steps:  # find or make the dictionary at that path
                inner = into.get(str(key))
                if type(inner) is not Dict:
                    inner = Dict([])
                    into.items += [key, inner]
                into = inner
            out.records_read.add(table)
            for name, raw in fields(fields(out.json(table)).get("config")).items():
                entry = fields(raw)
                record, meta = prefix + text(entry.get("path_name"), 200), entry.get("tensor_meta")
                if entry.get("use_pickle") is True or type(meta) is not dict:
                    out.take_nested(record, (*steps, name))
                    continue
                out.records_read.add(record)
                kind, device = meta.get("dtype"), _device(meta.get("device"))
                dtype = SCALAR_TYPES.get(kind, "") if type(kind) is int else ""
                layout = meta.get("storage_offset"), meta.get("sizes"), meta.get("strides")
                flags: Any = {"requires_grad": meta.get("requires_grad"), "parameter": entry.get("is_param") is True}
                into.items += [name, tensor_call(out.archive, record, dtype, device, layout, **flags)]
    tree = find_tensors(root, storage_table(out.archive, forms=(("", ""),), big_endian=out.big_endian))
    lost = [s for s in tree.storages if not s.record]
    empty = [s for s in tree.storages if s.record and s.nbytes and not out.archive.records[s.record].size]
    if empty:
        detail = f"{len(empty)} records of tensors are empty; torch.export.load makes the tensors all zeros"
        out.problems.add("export-no-bytes", empty[0].record, detail)
    out.take_tree(tree, [*lost, *empty])
    hollow = {storage.id for storage in empty}
    out.problems += check_storages([s for s in tree.storages if s.id not in hollow], out.archive)
