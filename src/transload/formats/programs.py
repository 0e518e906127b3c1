"""Archives that contain programs: TorchScript, ``torch.package``, and what their readers share with ``torch_export``.

TorchScript code is searched for devices and for operators that reach beyond tensors. It is neither run nor compiled,
but split into tokens as TorchScript's lexer does; where the two could differ, it rather finds too much than too little.
Opening a package runs its Python source; here that is only listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Origin, Part, Record, Storage
from transload.dtypes import ITEMSIZE, itemsize, named
from transload.findings import Problem, Problems, join_names
from transload.formats import pickle_machine
from transload.formats.tensors import Tree, find_tensors, moved_storage, moved_tensor
from transload.formats.torch_zip import (
    Archive,
    check_storages,
    container_facts,
    read_pickle,
    read_tree,
    record_text,
    storage_table,
    stray_records,
)
from transload.nodes import Call, Dict, Global, Persistent, Pickle, walk_nodes

ALLOWANCE = 256 << 20
"""Bytes to unpack beyond the size of the file. A megabyte of deflated records, or a thousand directory entries for the
same bytes, would otherwise cost gigabytes of work."""

MAX_JSON = 128 << 20
"""The graph of a program of ten thousand layers has tens of megabytes; as objects it takes twenty times as much."""

MAX_PACKED_JSON = 16 << 20
"""torch does not compress JSON, and half a megabyte can unpack to half a gigabyte."""

MAX_CODE = 32 << 20
"""Source searched in one archive. Ten thousand operators are a megabyte, and a second is enough for five megabytes."""


class Program(Draft):
    """A checkpoint while its archive is read: of the records no more bytes than the file has, and ``ALLOWANCE``."""

    def __init__(self, archive: Archive, format_: str) -> None:
        super().__init__(archive.path, format_, archive.nbytes, archive.problems)
        self.archive = archive
        self.records = tuple(archive.records.values())
        self.left = {"records": archive.nbytes + ALLOWANCE, "code": MAX_CODE}  # bytes that may still be read

    def affords(self, record: Record, budget: str = "records") -> bool:
        """Whether to read a record. After the first that is too large, which is noted, no other is read."""
        before = self.left[budget]
        self.left[budget] = left = before - record.size
        if before >= 0 > left:
            detail = "the file unpacks to far more than its size: this record and others were not read"
            self.problems.add("record-unseen", record.name, detail)
        return left >= 0

    def json(self, name: str) -> Any:
        """The value of a JSON record; ``None`` if it does not exist or, with a problem, cannot be read."""
        import json

        record = self.archive.find(name)
        if record is None or not self.affords(record):
            return None
        changed = "it does not have the checksum it was saved with"
        raw = self.bytes_of(record, name, MAX_PACKED_JSON if record.method else MAX_JSON, changed)
        try:
            return None if raw is None else json.loads(raw)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            self.problems.add("json-broken", name, "it is nested too deeply" if deep else str(error)[:200])
            return None

    def bytes_of(self, record: Record, name: str, limit: int, changed: str) -> bytes | None:
        """The bytes of a record; ``None``, with a problem, if they cannot be read."""
        payload = self.archive.read(record, limit)
        if payload.problem:
            self.problems.add("record-unreadable", name, payload.problem)
            return None
        if not payload.intact:
            self.problems.add("crc-mismatch", name, changed)
        return payload.data

    def take_tree(self, tree: Tree, hollow: Iterable[Storage]) -> None:
        """Add the content of a tree. Each of its storages gets the dtype of the first tensor that uses it.

        The size of a ``hollow`` storage, which has no bytes, is only derived from each of its tensors, so conflicts
        about it are ignored.
        """
        dtypes: dict[str | None, str] = {}
        for tensor in tree.tensors:
            dtypes.setdefault(tensor.storage, tensor.dtype)
        storages = [storage._replace(dtype=dtypes.get(storage.id, storage.dtype)) for storage in tree.storages]
        guessed = {f"storage {storage.key}" for storage in hollow}
        problems = [p for p in tree.problems if p.code != "storage-conflict" or p.where not in guessed]
        self.add_tree(tree.tensors, storages, tree.leaves, problems)

    def note_strays(self, known: Iterable[str]) -> None:
        """Note records that are neither ``known`` nor storages; keep those that are pickles."""
        strays, pickles = stray_records(self.archive, self.storages, known)
        self.problems += strays
        self.pickles += pickles


def looks_like_pickle(start: bytes) -> bool:
    """Whether a record begins like a pickle of protocol 2 or later."""
    return len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5


# -- values of JSON, and the tensors they describe


def fields(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    return value if type(value) is dict else {}


def entries(value: Any) -> list[Any]:
    """A JSON array; an empty one for anything else."""
    return value if type(value) is list else []


def text(value: Any, longest: int = 80) -> str:
    """A JSON string, cut to ``longest`` characters; empty for anything else."""
    return value[:longest] if type(value) is str else ""


def _number(value: Any) -> Any:
    """An integer, which these files also write as ``{"as_int": 3}`` or as text. Anything else is returned unchanged.

    >>> _number(3), _number({"as_int": 3}), _number("3"), _number({"as_expr": "s0"})
    (3, 3, 3, {'as_expr': 's0'})
    """
    if type(value) is dict and "as_int" in value:
        return value["as_int"]
    if type(value) is str and value.isdecimal() and len(value) < 20:
        return int(value)
    return value


_UNTYPED = Global("torch.storage", "UntypedStorage", 0)
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)
_GET_LAYOUT = Global("torch.serialization", "_get_layout", 0)


def tensor_call(
    archive: Archive,
    name: str,
    dtype: str,
    device: str,
    layout: tuple[Any, Any, Any],
    *,
    requires_grad: Any = False,
    parameter: bool = False,
    nbytes: int | None = None,
) -> Call:
    """The rebuild call for a tensor that JSON describes, over the record ``name``, or over ``nbytes`` bytes of it.

    ``layout`` is its offset, sizes and strides. A storage without bytes gets the size that the tensor needs.
    """
    shape, steps = (tuple(_number(n) for n in entries(part)) for part in layout[1:])
    first = _number(layout[0])
    record = archive.find(name)
    if nbytes is None:
        nbytes = record.size if record is not None else 0
    if not nbytes and 0 not in shape and all(type(n) is int and 0 <= n < 1 << 63 for n in (first, *shape, *steps)):
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=False))
        nbytes = itemsize(dtype, first + last + 1)
    storage = Persistent(("storage", _UNTYPED, name, device, nbytes), 0)
    kind = Global("torch", dtype or "unknown", 0)
    call = Call(_REBUILD_V3, (storage, first, shape, steps, requires_grad, None, kind), "reduce", 0)
    return Call(_PARAMETER, (call, requires_grad, None), "reduce", 0) if parameter else call


# -- what TorchScript code shows

OPERATORS: dict[str, str] = {
    # From the operator registry of torch 2.13: those that take a file name or call something elsewhere. With the first
    # two a program can read or write any file, already inside torch.jit.load if they are in a __setstate__.
    "aten::from_file": "reads or maps a file",
    "aten::save": "writes a file",
    "prim::PythonOp": "calls back into Python",
    "prim::rpc_async": "calls a function on another machine",
    "prim::rpc_remote": "calls a function on another machine",
    "prim::rpc_sync": "calls a function on another machine",
    # Registered by torchvision and torchaudio.
    "image::read_file": "reads a file",
    "image::write_file": "writes a file",
    "torchaudio::sox_effects_apply_effects_file": "reads a file",
    "torchaudio::sox_io_get_info": "reads a file",
    "torchaudio::sox_io_load_audio_file": "reads a file",
    "torchaudio::sox_io_save_audio_file": "writes a file",
}
_HIDDEN = "a module of operators under another name, which hides what is called"

_DEVICE = re.compile(r"""torch\s*\.\s*device\s*\(\s*["']([\w:]{1,40})["']""")
# Comments and strings as in torch/csrc/jit/frontend/lexer.h: no prefixes, newlines only inside triple quotes.
_QUOTED = re.compile(
    r"""#[^\n]*|"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
_DOTTED = re.compile(r"(?<![\w.])(?:torch|ops)\b(?:\s*\.\s*[A-Za-z_]\w*)*")


def code_problems(name: str, code: str) -> list[Problem]:
    """The devices and the dangerous operators in one source file.

    >>> [problem.code for problem in code_problems("a.py", 'torch.save(x, "f"); torch.device("cuda:0")')]
    ['script-dangerous-op', 'script-device']
    """
    found = _operator_problems(name, operators(code))
    devices = Counter(_DEVICE.findall(code)).most_common(8)
    shown = ", ".join(f'torch.device("{device}") {count}×' for device, count in devices)
    return [*found, Problem("script-device", name, shown)] if devices else found


def operators(code: str) -> Counter[str]:
    """The operators of ``OPERATORS`` that a program names, and tricks to hide the name of one.

    The compiler accepts ``torch.save``, ``ops.aten.save``, ``t = torch`` and then ``t.save``, ``(torch).save`` and
    ``getattr(torch, "save")``. In what torch itself writes, a dot always follows ``torch`` and ``ops``.

    >>> operators("t = torch; t.save(x, name)")
    Counter({'torch': 1})
    """
    bare = _QUOTED.sub(" ", code)
    if '"' in bare or "'" in bare:  # a quote is left over: strings may end elsewhere
        bare = code
    found: Counter[str] = Counter()
    for match in _DOTTED.finditer(bare.replace("\\\n", " ")):
        top, *parts = [part.strip() for part in match[0].split(".")]
        symbol = top
        if top == "torch" and parts:
            symbol = f"aten::{parts[0]}"
        elif top == "ops" and len(parts) > 1:
            symbol = f"{parts[0]}::{parts[1]}"
        if symbol in OPERATORS or symbol == top:
            found[symbol] += 1
    return found


def _operator_problems(where: str, called: Counter[str]) -> list[Problem]:
    lines = [f"{name} {count}×: {OPERATORS.get(name, _HIDDEN)}" for name, count in called.most_common()]
    return [Problem("script-dangerous-op", where, "\n".join(lines))] if called else []


# -- TorchScript

MAX_OPERATOR_VERSION = 10
"""The newest operator version that torch 2.13 reads (``caffe2/serialize/versions.h``)."""

_MAIN = ("data.pkl", "constants.pkl", "attributes.pkl")
_SCRIPT_IDS: dict[str, tuple[int, ...]] = {"storage": (5, 6)}  # up to 1.5 with the view of another storage, always None


def read_torchscript(archive: Archive) -> Checkpoint:
    """Read a TorchScript archive. Its code is searched, never run."""
    out = Program(archive, "torchscript")
    found = out.problems
    notes = container_facts(archive, ("version", "byteorder", ".data/serialization_id"), found)
    out.facts += [("operator version" if name == "version" else name, value) for name, value in notes]
    version = dict(out.facts).get("operator version")
    if version is None:
        found.add("zip-no-version", detail="torch.jit.load needs the record `version`")
    elif not version.isdecimal() or int(version[:9]) > MAX_OPERATOR_VERSION:
        detail = f"it says {version[:40]!r}; torch reads up to {MAX_OPERATOR_VERSION}"
        found.add("zip-bad-version", "version", detail)
    old = archive.find("data.pkl") is None and archive.find("model.json") is not None
    trees = [_read_old(out)] if old else _read_new(out)
    # Further pickles: bytecode, debug information, traced inputs; not the user's files in ``extra/``.
    names = (name for name in archive.records if name.endswith((".pkl", ".debug_pkl")) and name not in _MAIN)
    others = [name for name in names if not name.startswith("extra/")]
    affordable = [name for name in others if out.affords(archive.records[name])]
    out.pickles += [read_pickle(archive, name, found, _SCRIPT_IDS) for name in affordable]
    for name, record in archive.records.items():
        if name.startswith("extra/") and not name.endswith("/"):
            out.parts.append(Part(name, "extra file", record.size))
        elif name.startswith("code/") and name.endswith(".py"):
            out.parts.append(Part(name, "source", record.size))
            if out.affords(record, "code"):
                raw = out.bytes_of(record, name, MAX_CODE, "its text is not the one that was saved")
                found += code_problems(name, (raw or b"").decode("utf-8", "replace"))
    if archive.find("constants.pkl") and not any(part.kind == "source" for part in out.parts):
        detail = "for its `constants.pkl` torch takes it for a program, and there is no code: a state dict in disguise?"
        found.add("script-no-code", "code/", detail)
    root = out.pickles[0].root if out.pickles else None
    if type(root) is Call and type(root.callee) is Global:
        out.facts.append(("class", f"{root.callee.module}.{root.callee.name}"[:200]))
    bytecode = next((pickle for pickle in reversed(out.pickles) if pickle.name == "bytecode.pkl"), None)
    if bytecode is not None:
        root = bytecode.root
        number = root[0] if type(root) is tuple and root and type(root[0]) is int else "unknown"
        out.facts.append(("lite interpreter", f"bytecode version {number}"))
        named_in_it = Counter(word for word in walk_nodes([root]) if type(word) is str and word in OPERATORS)
        found += _operator_problems(bytecode.name, named_in_it)
    for tree in trees:
        out.take_tree(tree, [s for s in tree.storages if old and not s.record])
    found += check_storages(out.storages, archive)
    # Storages of the inputs a program was traced with: torch writes empty ones and never reads them.
    samples = [name for name in archive.records if name.startswith(("traced_inputs/", "bytecode/"))]
    out.note_strays({*others, *_MAIN, "model.json", *(part.name for part in out.parts), *samples})
    return out.checkpoint()


def _read_new(out: Program) -> list[Tree]:
    """Read ``data.pkl`` and ``constants.pkl``, which torch writes from 1.3 on."""
    archive = out.archive
    big_endian = record_text(archive, "byteorder", Problems()) == "big"
    main = read_pickle(archive, "data.pkl", out.problems, _SCRIPT_IDS)
    main.main = True
    out.pickles.append(main)
    tree = read_tree(_as_torch_save(archive, "data.pkl"), storage_table(archive, big_endian=big_endian), separator=".")
    if archive.find("constants.pkl") is None:
        return [tree]
    out.pickles.append(read_pickle(archive, "constants.pkl", out.problems, _SCRIPT_IDS))
    held = _as_torch_save(archive, "constants.pkl")
    held.root = Dict([part for i, value in enumerate(_members(held.root)) for part in (f"CONSTANTS.c{i}", value)])
    more = read_tree(held, storage_table(archive, forms=(("constants/", ""),), big_endian=big_endian), separator=".")
    # The storages of constants are also numbered from zero, so they get other ids.
    lead = "constants/"
    tensors = tuple(moved_tensor(tensor, lead) for tensor in more.tensors)
    storages = tuple(moved_storage(s, lead)._replace(key=f"{lead}{s.key}") for s in more.storages)
    return [tree, more._replace(tensors=tensors, storages=storages)]


def _members(root: object) -> list[Any]:
    return list(root) if type(root) in (tuple, list) else []  # type: ignore[call-overload]


# -- the dialect of torch's C++ pickler

_WRAPPERS = frozenset(
    f"torch.jit._pickle.{name}"
    for name in ("restore_type_tag", "build_intlist", "build_tensorlist", "build_doublelist", "build_boollist")
)
_STORAGES = named("""
    Float8_e4m3fnStorage=float8_e4m3fn Float8_e4m3fnuzStorage=float8_e4m3fnuz Float8_e5m2Storage=float8_e5m2
    Float8_e5m2fnuzStorage=float8_e5m2fnuz Float8_e8m0fnuStorage=float8_e8m0fnu
    Float4_e2m1fn_x2Storage=float4_e2m1fn_x2 ComplexHalfStorage=complex32
    UInt16Storage=uint16 UInt32Storage=uint32 UInt64Storage=uint64
""")
_LAYOUTS = {1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc"}


def _as_torch_save(archive: Archive, name: str) -> Pickle:
    """A second copy of a pickle, with what only torch's C++ pickler writes replaced by what ``torch.save`` would write.

    Lists and dictionaries lose the call that sets their type, storages of the newer dtypes become untyped, and sparse
    tensors get their arguments in the usual order. The pickle that is judged stays unchanged.
    """
    payload = archive.get(name, pickle_machine.MAX_STREAM)
    pickle = pickle_machine.run(payload.data if payload else b"", name=name)
    odd: dict[int, str] = {}
    for held in pickle.persistent:
        pid = held.id
        if type(pid) is tuple and len(pid) > 4 and type(pid[1]) is Global and type(pid[4]) is int:
            dtype = _STORAGES.get(pid[1].name)
            if dtype:
                odd[id(held)] = dtype
                held.id = (pid[0], _UNTYPED, *pid[2:4], pid[4] * ITEMSIZE[dtype])
    for call in pickle.calls:
        callee = call.callee
        if type(callee) is not Global or type(call.args) is not tuple or not call.args:
            continue
        function, first = callee.full_name, call.args[0]
        if function in _WRAPPERS:
            if type(first) is list:
                call.args, call.appended = (), first
            elif type(first) is Dict:
                call.args, call.items = (), first.items
            else:
                call.args = (first,)
        elif id(first) in odd and function == "torch._utils._rebuild_tensor_v2" and len(call.args) > 5:
            call.callee, call.args = _REBUILD_V3, (*call.args[:6], Global("torch", odd[id(first)], 0))
        elif function == "torch._utils._rebuild_sparse_tensor" and type(first) is int and len(call.args) > 5:
            layout, size, _, *parts = call.args
            words = (f"torch.{_LAYOUTS.get(layout, 'unknown')}",)
            call.args = (Call(_GET_LAYOUT, words, "reduce", call.position), (*parts[:-1], size))
    return pickle


# -- TorchScript of 1.0 to 1.2: model.json, with the other attributes in attributes.pkl

_DATA_TYPES = named(
    "FLOAT=float32 DOUBLE=float64 FLOAT16=float16 INT64=int64 INT32=int32 INT16=int16 INT8=int8 UINT8=uint8 BOOL=bool"
)


def _read_old(out: Program) -> Tree:
    archive = out.archive
    model = fields(out.json("model.json"))
    tensors: list[Any] = []
    for entry in map(fields, entries(model.get("tensors"))):
        key, dtype = text(fields(entry.get("data")).get("key"), 255), _DATA_TYPES.get(text(entry.get("dataType")), "")
        layout = entry.get("offset"), entry.get("dims"), entry.get("strides")
        device, flag = text(entry.get("device")) or "cpu", entry.get("requiresGrad")
        tensors.append(tensor_call(archive, key, dtype, device, layout, requires_grad=flag))
    values: list[Any] = []
    if archive.find("attributes.pkl") is not None:
        main = read_pickle(archive, "attributes.pkl", out.problems, _SCRIPT_IDS)
        main.main = True
        out.pickles.append(main)
        held = _as_torch_save(archive, "attributes.pkl")
        for call in held.calls:
            if type(call.callee) is Global and call.callee.full_name == "torch.jit._pickle.build_tensor_from_id":
                known = _at(tensors, call.args[0]) if type(call.args) is tuple and call.args else None
                if known is not None:
                    call.callee, call.args = known.callee, known.args
        values = _members(held.root)
    # Make of the modules what they would be in today's data.pkl; not by recursion, since JSON may be deeply nested.
    top = Pickle("model.json")
    top.root = _module()
    todo = [(fields(model.get("mainModule")), top.root)]
    while todo:
        module, made = todo.pop()
        state: list[object] = []
        for group, key, table in (("parameters", "tensorId", tensors), ("attributes", "id", values)):
            for member in map(fields, entries(module.get(group))):
                state += [text(member.get("name"), 200), _at(table, _number(member.get(key)))]
        for submodule in map(fields, entries(module.get("submodules"))):
            child = _module()
            state += [text(submodule.get("name"), 200), child]
            todo.append((submodule, child))
        made.states = [Dict(state)]
    return read_tree(top, storage_table(archive, forms=(("", ""),)), separator=".")


def _module() -> Call:
    return Call(Global("__torch__", "Module", 0), (), "newobj", 0)


def _at(values: list[Any], index: object) -> Any:
    return values[index] if type(index) is int and 0 <= index < len(values) else None


# -- torch.package: Python source, pickles that refer to it, and the storages of all of them

MAX_LIST = 1 << 20
"""``.data/extern_modules`` is a list of module names."""

_PACKAGE_TEXT_RECORDS = (".data/version", ".data/python_version", "byteorder", ".data/serialization_id")
_SCRIPT = ".data/ts_code/"
_PACKAGE_IDS: dict[str, tuple[int, ...]] = {"storage": (5,), "reduce_package": (3, 4)}


def read_package(archive: Archive) -> Checkpoint:
    """Read a package. The names of tensors begin with that of their pickle: ``model/model.pkl/fc.weight``."""
    out = Program(archive, "torch-package")
    notes = container_facts(archive, _PACKAGE_TEXT_RECORDS, out.problems)
    out.facts += [fact for fact in notes if fact != ("folder", "")]
    payload = archive.get(".data/extern_modules", MAX_LIST)
    modules = payload.data.decode("utf-8", "backslashreplace").split() if payload else []
    if modules:
        out.facts.append(("extern modules", join_names(modules, 20)))
    for name, record in archive.records.items():
        # ``save_pickle`` accepts any name for a record, so its first bytes count, too.
        is_named, is_other = name.endswith((".pkl", ".debug_pkl")), name.endswith((".py", ".storage", "/"))
        if (is_named or (not is_other and looks_like_pickle(archive.head(record, 2)))) and out.affords(record):
            pickle = read_pickle(archive, name, out.problems, _PACKAGE_IDS)
            # The importer also makes the calls in persistent ids.
            pickle.calls += [call for held in pickle.persistent if (call := _package_call(held))]
            out.pickles.append(pickle)
    saved = [pickle for pickle in out.pickles if not pickle.name.startswith(".data/")]
    if len(saved) == 1:
        saved[0].main = True
    recorded = dict(out.facts)
    table = storage_table(archive, forms=((".data/", ".storage"),), big_endian=recorded.get("byteorder") == "big")
    root: list[object] = []
    for pickle in out.pickles:
        plain = pickle
        if pickle.name.startswith(_SCRIPT):
            plain = _as_torch_save(archive, pickle.name)
            for held in plain.persistent:
                # TorchScript calls a storage ``4.storage`` where Python's pickles call it ``4``.
                pid = held.id
                if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str:
                    held.id = (*pid[:2], pid[2].removesuffix(".storage"), *pid[3:])
        table.enter(plain.persistent)
        root += _package_objects(plain)
    out.add_tree(*find_tensors(Dict(root), table))
    out.problems += check_storages(out.storages, archive)
    for name, record in archive.records.items():
        if name.endswith(".py"):
            out.parts.append(Part(name, "source", record.size))
            if name.startswith(_SCRIPT) and out.affords(record, "code"):
                out.problems += code_problems(name, archive.read(record, MAX_CODE).data.decode("utf-8", "replace"))
        elif not name.startswith(".data/") and not name.endswith((".pkl", "/")) and name not in _PACKAGE_TEXT_RECORDS:
            out.parts.append(Part(name, "resource", record.size))
    python = recorded.get("python_version")
    return out.checkpoint(written_by=Origin(recorded=(("python", python),) if python else ()))


def _package_objects(pickle: Pickle) -> list[object]:
    """Alternating names and objects: the root under the name of the record, and the results of nested package calls."""
    if pickle.name.endswith(".debug_pkl"):
        return []
    calls = [(held, call) for held in pickle.persistent if (call := _package_call(held))]
    top = next((call for held, call in calls if held is pickle.root), None)
    made: list[object] = [] if top else [pickle.name, pickle.root]
    index = 0
    for _, call in sorted(calls, key=lambda pair: pair[1] is not top):
        # The result of the call. The first argument of a graph module is its ``__dict__``.
        args = call.args if type(call.args) is tuple else ()
        result = Call(call.callee, (), "reduce", call.position)
        if args and type(args[0]) is Dict:
            result.states = [args[0]]
        else:
            result.appended = list(args)
        made += [pickle.name if call is top else f"{pickle.name}/reduce_package {index}", result]
        index += call is not top
    return made


def _package_call(held: Persistent) -> Call | None:
    """The call that the importer makes for ``("reduce_package", id, function, arguments)``, or without the id."""
    pid = held.id
    if type(pid) is not tuple or pid[:1] != ("reduce_package",) or len(pid) not in (3, 4):
        return None
    return Call(pid[-2], pid[-1], "reduce", held.position)
