"""Programs of ``torch.export``: their graphs, with devices and targets that no exporter writes, and their tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Checkpoint, Key, Origin, Part, Storage, Tensor
from transload.dtypes import SCALAR_TYPES
from transload.findings import Problem
from transload.formats.nested import (
    Budget,
    Described,
    complaints,
    device,
    entries,
    items,
    load_json,
    node,
    read_nested,
    text,
    typed,
)
from transload.formats.tensors import find_tensors
from transload.formats.torch_zip import Archive, check_storages, note, note_facts, storage_table, stray_records
from transload.formats.torchscript import OPERATORS
from transload.nodes import Call, Dict, Pickle

__all__ = ["Gathered", "gather", "graph_problems", "pt2_facts", "read_export"]


# What torch.export writes as the target of a node: operators, and Python's arithmetic on sizes. torch.export.load finds
# any other text that begins with "torch" by walking attributes from the package torch: "torch.os.system" is a function.
_TARGETS = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\._?sym_\w+|math\.(trunc|ceil|floor|sqrt|pow)|#[\w:.]+"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|lshift|rshift|getitem)"
)
# Sizes are expressions that sympy evaluates as Python, and guards are compiled and run.
_ODD_TEXT = re.compile(r"__\w+__|\b(eval|exec|open|import|compile|getattr|lambda)\b")
_SHOWN = 8


def graph_facts(program: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Schema and operator versions, and the size of the graph.

    >>> graph_facts({"schema_version": {"major": 8, "minor": 17}, "opset_version": {"aten": 10}})
    (('schema version', '8.17'), ('opset version', 'aten 10'), ('nodes', '0'))
    """
    schema = program.get("schema_version")
    parts = [schema] if type(schema) is int else [value for _, value in items(schema)]
    opsets = [f"{text(name)} {value}" for name, value in items(program.get("opset_version")) if type(value) is int]
    graph = dict(items(dict(items(program.get("graph_module"))).get("graph")))
    facts = (
        ("schema version", ".".join(str(part) for part in parts if type(part) is int)),
        ("opset version", ", ".join(opsets[:_SHOWN])),
        ("nodes", str(len(entries(graph.get("nodes"))))),
    )
    return tuple(fact for fact in facts if fact[1])


def graph_problems(name: str, program: dict[str, Any]) -> list[Problem]:
    """Devices, far-reaching operators and odd targets in a program, with the nodes they stand in."""
    devices: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for key, value, target in _walk(program):
        if key == "as_device" and type(value) is dict:
            devices[f"{device(value)} in {target or 'the graph'}"] += 1
        elif key == "target" and type(value) is str:
            targets[value[:200]] += 1
        elif key in ("expr_str", "guards_code") and type(value) is str and _ODD_TEXT.search(value):
            odd[value[:200]] += 1
    out = [Problem("export-device", name, _lines(devices))] if devices else []
    reaching = Counter({target: count for target, count in targets.items() if _reason(target)})
    reaching.update({f"{target}, which is Python": count for target, count in odd.items()})
    return [*out, Problem("export-dangerous-op", name, _lines(reaching))] if reaching else out


def _reason(target: str) -> str:
    """Why a target is one to refuse; empty if it is not.

    >>> _reason("torch.ops.aten.add.Tensor"), _reason("torch.os.system"), _reason("torch.ops.aten.save.default")
    ('', 'no operator', 'writes a file')
    """
    if not _TARGETS.fullmatch(target):
        return "no operator"
    parts = target.split(".")
    return OPERATORS.get("::".join(parts[2:4]), "") if parts[:2] == ["torch", "ops"] else ""


def _walk(program: dict[str, Any]) -> Iterable[tuple[str, Any, str]]:
    """Every entry of every object in the program, with the target of the node it stands in; not by recursion."""
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


def _lines(counts: Counter[str]) -> str:
    lines = [f"{what} {count}×" for what, count in counts.most_common(_SHOWN)]
    return "\n".join([*lines, f"… and {len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else lines)


_NOTES = ("archive_version", ".data/version", "version", "byteorder", ".data/serialization_id")
_OLD_PROGRAM = "serialized_exported_program.json"
# Python's zipfile wrote the old form, without a folder: there, that is how it should be.
_OLD_IS_SO = frozenset({"zip-no-folder", "zip-two-folders"})

_WEIGHTS, _CONSTANTS, _SAMPLES = "data/weights/", "data/constants/", "data/sample_inputs/"

# Where a program keeps its tensors, and what their paths begin with: tables in JSON, and nested torch.save archives, of
# which the oldest (2.1 and 2.2) are called JSON and are none.
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


class Gathered:
    """What the programs of an archive hold, collected record by record; ``known`` are the names of those looked at."""

    def __init__(self, archive: Archive, problems: list[Problem], budget: Budget) -> None:
        self.archive = archive
        self.problems = problems
        self.budget = budget
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.pickles: list[Pickle] = []
        self.parts: list[Part] = []
        self.facts: list[tuple[str, str]] = []
        self.recorded: list[tuple[str, str]] = []
        self.known: set[str] = set()
        names = [name for name in archive.records if name.startswith("models/") and name.endswith(".json")]
        self.models = [name[len("models/") : -len(".json")] for name in names]

    def lead(self, model: str, path: tuple[Key, ...]) -> tuple[Key, ...]:
        """What the paths of a model's tensors begin with: its name, if there are several."""
        return (model, *path) if len(self.models) > 1 else path

    def nested(self, name: str) -> Checkpoint | None:
        """The checkpoint in a record. Its pickles and problems are taken in; its tensors are the caller's business."""
        record = self.archive.find(name)
        if record is None or not record.size or record.name in self.known:
            return None
        self.known.add(record.name)
        if not self.budget.take(record, self.problems):
            return None
        inner = read_nested(self.archive, record)
        self.problems += inner.problems
        self.pickles += inner.pickles
        return inner

    def take(self, name: str, lead: tuple[Key, ...]) -> None:
        """Add the tensors of a nested checkpoint, with paths that begin with ``lead``."""
        inner = self.nested(name)
        if inner is None:
            return

        def full(inside: str) -> str:
            return "/".join(filter(None, (*map(str, lead), inside)))

        self.tensors += [t._replace(name=full(t.name), path=(*lead, *t.path)) for t in inner.tensors]
        self.storages += [s._replace(tensors=tuple(map(full, s.tensors))) for s in inner.storages]


def read_export(archive: Archive, problems: Iterable[Problem], *, path: str, nbytes: int) -> Checkpoint:
    """A checkpoint out of an exported program: weights as ``state_dict()`` has them, constants below ``constants``."""
    old = archive.find(_OLD_PROGRAM) is not None
    found = [problem for problem in problems if not (old and problem.code in _OLD_IS_SO)]
    facts = pt2_facts(archive, found)
    held = Gathered(archive, found, Budget(nbytes))
    gather(held)
    if not held.models and not old:
        found.append(Problem("export-no-program", "models/", "no program is in the archive"))
    return Checkpoint(
        path=path,
        format="torch-export",
        nbytes=nbytes,
        tensors=tuple(held.tensors),
        storages=tuple(held.storages),
        records=tuple(archive.records.values()),
        parts=tuple(held.parts),
        facts=(*facts, *held.facts),
        written_by=Origin(recorded=tuple(held.recorded)),
        problems=tuple(held.problems),
        pickles=tuple(held.pickles),
    )


def pt2_facts(archive: Archive, problems: list[Problem]) -> list[tuple[str, str]]:
    """What the small records of an archive say; the old form has no folder."""
    return [fact for fact in note_facts(archive, _NOTES, problems) if fact != ("folder", "")]


def gather(out: Gathered) -> None:
    """Take in every program: its graph, its weights and constants in whichever form, its sample inputs."""
    _read_graphs(out)
    _read_tables(out)
    for name, record in out.archive.records.items():
        for prefix, suffix, path in _NESTED:
            if name.startswith(prefix) and name.endswith(suffix):
                model = name.removeprefix(prefix).removesuffix(suffix)
                out.take(name, out.lead(model, path))
        if name.startswith((_SAMPLES, "serialized_example_inputs")):
            # Inputs somebody once traced the program with. They are no weights, but loading the program unpickles them.
            inner = out.nested(name)
            held = inner.tensors if inner else ()
            devices = ", ".join(sorted({tensor.device for tensor in held}))
            facts = (("tensors", str(len(held))), *([("devices", devices)] if devices else []))
            out.parts.append(Part(name, "sample inputs", record.size, facts))
        elif name.startswith(("extra/", "extra_files/")) and not name.endswith("/"):
            out.parts.append(Part(name, "extra file", record.size))
    for model in out.models:
        if not any(out.archive.find(f"{_WEIGHTS}{model}{end}") for end in ("_weights_config.json", ".pt")):
            detail = "its weights are not in the archive: neither a table of them nor a nested file"
            out.problems.append(Problem("export-no-program", f"models/{model}.json", detail))
    _read_rest(out)


def _read_rest(out: Gathered) -> None:
    """Records that no program speaks of: if they can be loaded all the same, what they name is seen."""
    for name in [*out.archive.records]:
        if name.startswith((_WEIGHTS, _CONSTANTS)) and name not in out.known:
            out.nested(name)
    ours = ("data/", "models/", "extra/", "extra_files/", "serialized_", ".data/")
    known = [name for name in out.archive.records if name.startswith(ours)]
    strays, pickles = stray_records(out.archive, (), (*known, *_NOTES, "archive_format"))
    out.problems += strays
    out.pickles += pickles


# -- the graph


def _read_graphs(out: Gathered) -> None:
    for name in (*(f"models/{model}.json" for model in out.models), _OLD_PROGRAM):
        record = out.archive.find(name)
        if record is None:
            continue
        program = load_json(out.archive, name, out.problems, out.budget)
        facts = graph_facts(program) if type(program) is dict else ()
        out.parts.append(Part(name, "program", record.size, facts))
        out.facts += [fact for fact in facts if fact not in out.facts]
        if type(program) is dict:
            out.problems += graph_problems(name, program)
            version = text(program.get("torch_version"))
            out.recorded += [("torch", version)] if version else []


# -- raw records described by JSON


def _read_tables(out: Gathered) -> None:
    """The tensors of all tables, read as one tree: programs may share records."""
    root = Dict([])
    for prefix, suffix, path in _TABLES:
        for name in [name for name in out.archive.records if name.startswith(prefix) and name.endswith(suffix)]:
            lead = out.lead(name.removeprefix(prefix).removesuffix(suffix), path)
            _inside(root, lead).items += _read_table(out, name, prefix, lead)
    table = storage_table(out.archive, forms=(("", ""),), big_endian=note(out.archive, "byteorder", []) == "big")
    tree = find_tensors(root, table)
    lost = [s for s in tree.storages if not s.record]
    empty = [s for s in tree.storages if s.record and s.nbytes and not out.archive.records[s.record].size]
    if empty:
        detail = f"{len(empty)} records of tensors hold no bytes; torch.export.load makes zeros of them"
        out.problems.append(Problem("export-no-bytes", empty[0].record, detail))
    out.problems += complaints(tree, [*lost, *empty])
    hollow = {storage.id for storage in empty}
    out.problems += check_storages([s for s in tree.storages if s.id not in hollow], out.archive)
    out.tensors += tree.tensors
    out.storages += typed(tree.storages, tree.tensors)


def _inside(root: Dict, path: tuple[Key, ...]) -> Dict:
    """The dictionary at a path, made where there is none."""
    for key in path:
        held = root.get(str(key))
        if type(held) is not Dict:
            held = Dict([])
            root.items += [key, held]
        root = held
    return root


def _read_table(out: Gathered, table: str, folder: str, lead: tuple[Key, ...]) -> list[object]:
    """Names and rebuild calls in turn, of the raw tensors in a table; pickled ones are taken in at once."""
    out.known.add(table)
    config = dict(items(load_json(out.archive, table, out.problems, out.budget))).get("config")
    found: list[object] = []
    for name, entry in items(config):
        fields = dict(items(entry))
        record = folder + text(fields.get("path_name"), 200)
        meta = fields.get("tensor_meta")
        if fields.get("use_pickle") is True or type(meta) is not dict:
            out.take(record, (*lead, name))
            continue
        out.known.add(record)
        found += [name, _described(record, meta, out.archive, parameter=fields.get("is_param") is True)]
    return found


def _described(record: str, meta: dict[str, Any], archive: Archive, *, parameter: bool) -> Call:
    kind = meta.get("dtype")
    what = Described(
        record=record,
        dtype=SCALAR_TYPES.get(kind, "") if type(kind) is int else "",
        device=device(meta.get("device")),
        offset=meta.get("storage_offset"),
        sizes=meta.get("sizes"),
        strides=meta.get("strides"),
        requires_grad=meta.get("requires_grad"),
        parameter=parameter,
    )
    return node(what, archive)
