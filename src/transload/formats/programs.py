"""Archives that contain programs: TorchScript, ``torch.package``, ``torch.export``, and what AOTInductor has compiled.

TorchScript code is searched for devices and for operators that reach beyond tensors. It is neither run nor compiled,
but split into tokens as TorchScript's lexer does; where the two could differ, it finds too much rather than too little.
Opening a package runs its Python source; here that is only listed. Of an exported program, the tensors are read, and
the graph is searched for devices, and for targets that no exporter writes; of a compiled one also the libraries and
kernels are read, and which GPU they need.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Key, Origin, Part, Record, Storage
from transload.dtypes import ITEMSIZE, SCALAR_TYPES, itemsize, named
from transload.findings import Problem, Problems, first_lines, join_names
from transload.formats import pickle_machine, torch_zip
from transload.formats.nested import moved_storage, moved_tensor
from transload.formats.pickle_streams import run_all
from transload.formats.tensors import StorageTable, Tree, find_tensors
from transload.formats.torch_zip import Archive, check_storages, container_facts, read_pickle, read_tree, storage_table
from transload.formats.zip import DEFLATED, FOLDER_PROBLEMS, read_index, starts_like_zip
from transload.frozen import replace
from transload.io.sources import BytesSource, Slice, Source
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
    """A checkpoint while its archive is read: at most as many bytes of records as the file has, plus ``ALLOWANCE``."""

    def __init__(self, archive: Archive, format_: str, texts: Iterable[str]) -> None:
        super().__init__(archive.path, format_, archive.nbytes, archive.problems)
        self.archive = archive
        self.records = tuple(archive.records.values())
        self.facts = container_facts(archive, texts, self.problems)
        self.big_endian = ("byteorder", "big") in self.facts
        self.left = {"records": archive.nbytes + ALLOWANCE, "code": MAX_CODE}  # bytes that may still be read

    def affords(self, record: Record, budget: str = "records") -> bool:
        """Whether to read a record. The first that exceeds the budget is noted, and no record is read after it."""
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
        strays, pickles = torch_zip.stray_records(self.archive, self.storages, known)
        self.problems += strays
        self.pickles += pickles


_PICKLED = tuple(b"\x80%c" % protocol for protocol in (2, 3, 4, 5))
"""How pickles of these protocols begin."""

# -- values of JSON, and the tensors they describe

_UNTYPED = Global("torch.storage", "UntypedStorage", 0)
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)
_GET_LAYOUT = Global("torch.serialization", "_get_layout", 0)


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
    """The devices and the dangerous operators in one source file, and tricks to hide the name of an operator.

    The compiler accepts ``torch.save``, ``ops.aten.save``, ``t = torch`` and then ``t.save``, ``(torch).save`` and
    ``getattr(torch, "save")``. In what torch itself writes, a dot always follows ``torch`` and ``ops``.

    >>> [problem.code for problem in code_problems("a.py", 't = torch; t.save(x, "f"); torch.device("cuda:0")')]
    ['script-dangerous-op', 'script-device']
    """
    bare = _QUOTED.sub(" ", code)
    if '"' in bare or "'" in bare:  # a quote is left over: strings may end elsewhere
        bare = code
    called: Counter[str] = Counter()
    for match in _DOTTED.finditer(bare.replace("\\\n", " ")):
        top, *parts = [part.strip() for part in match[0].split(".")]
        symbol = top
        if top == "torch" and parts:
            symbol = f"aten::{parts[0]}"
        elif top == "ops" and len(parts) > 1:
            symbol = f"{parts[0]}::{parts[1]}"
        if symbol in OPERATORS or symbol == top:
            called[symbol] += 1
    found = _operator_problems(name, called)
    devices = Counter(_DEVICE.findall(code)).most_common(8)
    shown = ", ".join(f'torch.device("{device}") {count}×' for device, count in devices)
    return [*found, Problem("script-device", name, shown)] if devices else found


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
    out = Program(archive, "torchscript", ("version", "byteorder", ".data/serialization_id"))
    found = out.problems
    out.facts = [("operator version" if name == "version" else name, value) for name, value in out.facts]
    version = dict(out.facts).get("operator version")
    if version is None:
        found.add("zip-no-version", detail="torch.jit.load needs the record `version`")
    elif not version.isdecimal() or int(version[:9]) > MAX_OPERATOR_VERSION:
        detail = f"it says {version[:40]!r}; torch reads up to {MAX_OPERATOR_VERSION}"
        found.add("zip-bad-version", "version", detail)
    old = archive.find("data.pkl") is None and archive.find("model.json") is not None
    if old:
        trees = [_read_old(out)]
    else:
        main = read_pickle(archive, "data.pkl", found, _SCRIPT_IDS)
        main.main = True
        out.pickles.append(main)
        table = storage_table(archive, big_endian=out.big_endian)
        trees = [read_tree(_as_torch_save(archive, "data.pkl"), table, separator=".")]
    if not old and archive.find("constants.pkl"):
        out.pickles.append(read_pickle(archive, "constants.pkl", found, _SCRIPT_IDS))
        constants = _as_torch_save(archive, "constants.pkl")
        constants.root = Dict([x for i, each in enumerate(_members(constants.root)) for x in (f"CONSTANTS.c{i}", each)])
        # The storages of constants are also numbered from zero, so they get other ids.
        prefix = "constants/"
        table = storage_table(archive, forms=((prefix, ""),), big_endian=out.big_endian)
        more = read_tree(constants, table, separator=".")
        tensors = tuple(moved_tensor(tensor, prefix) for tensor in more.tensors)
        storages = tuple(moved_storage(s, prefix)._replace(key=f"{prefix}{s.key}") for s in more.storages)
        trees.append(more._replace(tensors=tensors, storages=storages))
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
        detail = "`constants.pkl` makes torch take it for a program, but it has no code: a state dict in disguise?"
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
    for node in pickle.persistent:
        pid = node.id
        if type(pid) is tuple and len(pid) > 4 and type(pid[1]) is Global and type(pid[4]) is int:
            dtype = _STORAGES.get(pid[1].name)
            if dtype:
                odd[id(node)] = dtype
                node.id = (pid[0], _UNTYPED, *pid[2:4], pid[4] * ITEMSIZE[dtype])
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
        attributes = _as_torch_save(archive, "attributes.pkl")
        for call in attributes.calls:
            if type(call.callee) is Global and call.callee.full_name == "torch.jit._pickle.build_tensor_from_id":
                known = _at(tensors, call.args[0]) if type(call.args) is tuple and call.args else None
                if known is not None:
                    call.callee, call.args = known.callee, known.args
        values = _members(attributes.root)
    # Turn the modules into what they would be in today's data.pkl; not by recursion, since JSON may be deeply nested.
    top = Pickle("model.json")
    top.root = _module()
    pending = [(fields(model.get("mainModule")), top.root)]
    while pending:
        module, made = pending.pop()
        state: list[object] = []
        for group, key, table in (("parameters", "tensorId", tensors), ("attributes", "id", values)):
            for member in map(fields, entries(module.get(group))):
                state += [text(member.get("name"), 200), _at(table, _number(member.get(key)))]
        for submodule in map(fields, entries(module.get("submodules"))):
            child = _module()
            state += [text(submodule.get("name"), 200), child]
            pending.append((submodule, child))
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
    out = Program(archive, "torch-package", _PACKAGE_TEXT_RECORDS)
    out.facts = [fact for fact in out.facts if fact != ("folder", "")]
    payload = archive.get(".data/extern_modules", MAX_LIST)
    modules = payload.data.decode("utf-8", "backslashreplace").split() if payload else []
    if modules:
        out.facts.append(("extern modules", join_names(modules, 20)))
    for name, record in archive.records.items():
        # ``save_pickle`` accepts any name for a record, so its first bytes count, too.
        is_named, is_other = name.endswith((".pkl", ".debug_pkl")), name.endswith((".py", ".storage", "/"))
        if (is_named or (not is_other and archive.head(record, 2).startswith(_PICKLED))) and out.affords(record):
            pickle = read_pickle(archive, name, out.problems, _PACKAGE_IDS)
            # The importer also makes the calls in persistent ids.
            pickle.calls += [call for node in pickle.persistent if (call := _package_call(node))]
            out.pickles.append(pickle)
    saved = [pickle for pickle in out.pickles if not pickle.name.startswith(".data/")]
    if len(saved) == 1:
        saved[0].main = True
    table = storage_table(archive, forms=((".data/", ".storage"),), big_endian=out.big_endian)
    root: list[object] = []
    for pickle in out.pickles:
        plain = pickle
        if pickle.name.startswith(_SCRIPT):
            plain = _as_torch_save(archive, pickle.name)
            for node in plain.persistent:
                # TorchScript calls a storage ``4.storage`` where Python's pickles call it ``4``.
                pid = node.id
                if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str:
                    node.id = (*pid[:2], pid[2].removesuffix(".storage"), *pid[3:])
        table.enter(plain.persistent)
        if pickle.name.endswith(".debug_pkl"):
            continue
        # The root under the name of the record, and the results of nested package calls.
        calls = [(node, call) for node in plain.persistent if (call := _package_call(node))]
        top = next((call for node, call in calls if node is plain.root), None)
        root += [] if top else [pickle.name, plain.root]
        index = 0
        for _, call in sorted(calls, key=lambda pair: pair[1] is not top):
            # The result of the call. The first argument of a graph module is its ``__dict__``.
            args = call.args if type(call.args) is tuple else ()
            result = Call(call.callee, (), "reduce", call.position)
            if args and type(args[0]) is Dict:
                result.states = [args[0]]
            else:
                result.appended = list(args)
            root += [pickle.name if call is top else f"{pickle.name}/reduce_package {index}", result]
            index += call is not top
    out.add_tree(*find_tensors(Dict(root), table))
    out.problems += check_storages(out.storages, archive)
    for name, record in archive.records.items():
        if name.endswith(".py"):
            out.parts.append(Part(name, "source", record.size))
            if name.startswith(_SCRIPT) and out.affords(record, "code"):
                out.problems += code_problems(name, archive.read(record, MAX_CODE).data.decode("utf-8", "replace"))
        elif not name.startswith(".data/") and not name.endswith((".pkl", "/")) and name not in _PACKAGE_TEXT_RECORDS:
            out.parts.append(Part(name, "resource", record.size))
    python = dict(out.facts).get("python_version")
    return out.checkpoint(written_by=Origin(recorded=(("python", python),) if python else ()))


def _package_call(node: Persistent) -> Call | None:
    """The call that the importer makes for ``("reduce_package", id, function, arguments)``, or without the id."""
    pid = node.id
    if type(pid) is not tuple or pid[:1] != ("reduce_package",) or len(pid) not in (3, 4):
        return None
    return Call(pid[-2], pid[-1], "reduce", node.position)


# -- ``.pt2`` packages: programs of ``torch.export``, and those that AOTInductor has compiled

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

MAX_PACKED = 64 << 20
"""The largest compressed record that is unpacked, since that needs memory; torch never compresses."""


def _device(value: Any) -> str:
    """A device from the JSON of a program.

    >>> _device({"type": "cuda", "index": 1}), _device({"type": "cpu", "index": None})
    ('cuda:1', 'cpu')
    """
    index = fields(value).get("index")
    return (text(fields(value).get("type")) or "unknown") + (f":{index}" if type(index) is int else "")


def graph_problems(name: str, program: dict[str, Any]) -> list[Problem]:
    """The devices, dangerous operators and odd targets in a program, with the nodes they are in."""
    devices: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    odd: Counter[str] = Counter()
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
                odd[child[:200]] += 1
            stack.append((label, child, node))
    suspicious: Counter[str] = Counter()
    for target, count in targets.items():  # those that are not operators, or dangerous ones
        parts = target.split(".")
        if not _TARGETS.fullmatch(target) or (parts[:2] == ["torch", "ops"] and "::".join(parts[2:4]) in OPERATORS):
            suspicious[target] = count
    suspicious.update({f"{target}, which is Python": count for target, count in odd.items()})
    out = Problems()
    for code, counts in (("export-device", devices), ("export-dangerous-op", suspicious)):
        lines = [f"{what} {count}×" for what, count in counts.most_common()]
        if lines:
            out.add(code, name, "\n".join(first_lines(lines, _SHOWN)))
    return out


class _Package(Program):
    """The content of all programs of an archive; ``known`` are the names of the records that were read."""

    def __init__(self, archive: Archive, format_: str) -> None:
        super().__init__(archive, format_, _TEXT_RECORDS)
        self.facts = [fact for fact in self.facts if fact != ("folder", "")]  # the old form has none
        self.recorded: list[tuple[str, str]] = []
        self.known: set[str] = set()
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
        if record is None or not record.size or record.name in self.known:
            return None
        self.known.add(record.name)
        if not self.affords(record):
            return None
        source = self.open(record)
        if starts_like_zip(source):
            found = torch_zip.read_torch_zip(Archive.of_zip(source, read_index(source)))
        else:
            data = source.read(0, MAX_PACKED)
            bare = Draft(source.name, "pickle", source.size)
            bare.pickles = run_all(data, "pickle") if data.startswith(_PICKLED) else []
            for pickle in bare.pickles:
                bare.problems += torch_zip.pickle_problems(pickle, pickle.end)
            found = bare.checkpoint()
        for pickle in found.pickles:
            pickle.main = False
            pickle.name = f"{record.name} › {pickle.name}"
        self.pickles += found.pickles
        self.problems += [problem.within(record.name) for problem in found.problems]
        base = record.offset if record.method == 0 else None
        prefix = f"{record.name}/"
        return replace(
            found,
            tensors=tuple(moved_tensor(tensor, prefix, steps, base) for tensor in found.tensors),
            storages=tuple(moved_storage(s, prefix, steps, base)._replace(record=record.name) for s in found.storages),
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
        out.problems.add("export-no-program", "models/", "the archive contains no program")
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
        schema = program.get("schema_version")
        versions = [schema] if type(schema) is int else fields(schema).values()
        opsets = fields(program.get("opset_version")).items()
        graph = fields(fields(program.get("graph_module")).get("graph"))
        known = {
            "schema version": ".".join(str(part) for part in versions if type(part) is int),
            "opset version": ", ".join([f"{text(opset)} {n}" for opset, n in opsets if type(n) is int][:_SHOWN]),
            "nodes": str(len(entries(graph.get("nodes")))) if program else "",
        }
        facts = tuple((label, value) for label, value in known.items() if value)
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
        if name.startswith((_WEIGHTS, _CONSTANTS)) and name not in out.known:
            out.nested(name)
    ours = ("data/", "models/", "extra/", "extra_files/", "serialized_", ".data/")
    listed = [name for name in archive.records if name.startswith(ours)]
    out.note_strays((*listed, *_TEXT_RECORDS, "archive_format"))


def _read_tables(out: _Package) -> None:
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
            out.known.add(table)
            for name, raw in fields(fields(out.json(table)).get("config")).items():
                entry = fields(raw)
                record, meta = prefix + text(entry.get("path_name"), 200), entry.get("tensor_meta")
                if entry.get("use_pickle") is True or type(meta) is not dict:
                    out.take_nested(record, (*steps, name))
                    continue
                out.known.add(record)
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


# -- compiled code

HEADER = 64
"""Bytes to read for ``read_elf``: the longer, 64-bit header."""

_CUDA = 190
_MACHINES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv"}
_MACHINES |= {258: "loongarch", _CUDA: "NVIDIA GPU", 224: "AMD GPU"}


def read_elf(head: bytes) -> tuple[str, str] | None:
    r"""The machine of an ELF file with these first ``HEADER`` bytes, and the GPU of a cubin; ``None`` for another file.

    The numbers are those of LLVM's ``BinaryFormat/ELF.h``.

    >>> read_elf(b"\x7fELF" + bytes([2, 1, 1, 0x41, 8]) + bytes(9) + b"\xbe" + bytes(30) + b"\x5a")
    ('NVIDIA GPU', 'sm_90')
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
    parts: list[Part] = []
    for record in [archive.records[name] for name in compiled]:
        kind, target = _KINDS.get(record.name.rpartition(".")[2].lower(), "file"), ""
        about: list[tuple[str, str]] = []
        if kind == "PTX":  # the oldest GPU that it runs on
            found = re.search(rb"(?m)^[ \t]*\.target[ \t]+([^\s,]+)", archive.head(record, _PTX_HEAD))
            target = found[1].decode("ascii", "backslashreplace")[:20] if found else ""
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
        storage = base.storages[0]
        method = DEFLATED if storage.compressed else 0
        return Record(storage.record, storage.offset, storage.stored, storage.stored, storage.crc32, method)

    tree = find_tensors(root, StorageTable(locate))
    lost = [storage for storage in tree.storages if not storage.record]
    out.take_tree(tree, lost)
    out.problems += [Problem("storage-missing", f"storage {s.key}", torch_zip.needed_by(s)) for s in lost]
