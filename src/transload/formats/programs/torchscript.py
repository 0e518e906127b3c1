"""TorchScript programs, from the ``model.json`` of torch 1.0 on.

The code is searched for devices and for operators that reach beyond tensors. It is neither run nor compiled, but split
into tokens as TorchScript's lexer does; where the two could differ, it finds too much rather than too little.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from transload.checkpoint import Checkpoint, Part
from transload.dtypes import ITEMSIZE, named
from transload.findings import Problem
from transload.formats import pickle_machine
from transload.formats.graph import Tree
from transload.formats.nested import moved_storage, moved_tensor
from transload.formats.programs import (
    MAX_CODE,
    REBUILD_V3,
    UNTYPED,
    Program,
    entries,
    fields,
    number,
    tensor_call,
    text,
)
from transload.formats.torch_zip import Archive, check_storages, read_pickle, read_tree, storage_table
from transload.nodes import Call, Dict, Global, Pickle, walk_nodes

MAX_OPERATOR_VERSION = 10  # the newest operator version that torch 2.13 reads (``caffe2/serialize/versions.h``)
_MAIN = ("data.pkl", "constants.pkl", "attributes.pkl")
_SCRIPT_IDS: dict[str, tuple[int, ...]] = {"storage": (5, 6)}  # up to 1.5 with the view of another storage, always None


def read(archive: Archive) -> Checkpoint:
    """Read a TorchScript archive. Its code is searched, never run."""
    out = Program(archive, "torchscript", ("version", "byteorder", ".data/serialization_id"))
    problems = out.problems
    out.facts = [("operator version" if name == "version" else name, value) for name, value in out.facts]
    version = dict(out.facts).get("operator version")
    if version is None:
        problems.add("zip-no-version", detail="torch.jit.load needs the record `version`")
    elif not version.isdecimal() or int(version[:9]) > MAX_OPERATOR_VERSION:
        detail = f"it says {version[:40]!r}; torch reads up to {MAX_OPERATOR_VERSION}"
        problems.add("zip-bad-version", "version", detail)
    old = archive.find("data.pkl") is None and archive.find("model.json") is not None
    if old:
        trees = [_read_old(out)]
    else:
        main = read_pickle(archive, "data.pkl", problems, _SCRIPT_IDS)
        main.main = True
        out.pickles.append(main)
        table = storage_table(archive, big_endian=out.big_endian)
        trees = [read_tree(as_torch_save(archive, "data.pkl"), table, separator=".")]
    if not old and archive.find("constants.pkl"):
        out.pickles.append(read_pickle(archive, "constants.pkl", problems, _SCRIPT_IDS))
        constants = as_torch_save(archive, "constants.pkl")
        constants.root = Dict([x for i, node in enumerate(_members(constants.root)) for x in (f"CONSTANTS.c{i}", node)])
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
    out.pickles += [read_pickle(archive, name, problems, _SCRIPT_IDS) for name in affordable]
    for name, record in archive.records.items():
        if name.startswith("extra/") and not name.endswith("/"):
            out.parts.append(Part(name, "extra file", record.size))
        elif name.startswith("code/") and name.endswith(".py"):
            out.parts.append(Part(name, "source", record.size))
            if out.affords(record, "code"):
                raw = out.bytes_of(record, name, MAX_CODE, "its text is not the one that was saved")
                problems += code_problems(name, (raw or b"").decode("utf-8", "replace"))
    if archive.find("constants.pkl") and not any(part.kind == "source" for part in out.parts):
        detail = "`constants.pkl` makes torch take it for a program, but it has no code: a state dict in disguise?"
        problems.add("script-no-code", "code/", detail)
    root = out.pickles[0].root if out.pickles else None
    if type(root) is Call and type(root.callee) is Global:
        out.facts.append(("class", f"{root.callee.module}.{root.callee.name}"[:200]))
    bytecode = next((pickle for pickle in reversed(out.pickles) if pickle.name == "bytecode.pkl"), None)
    if bytecode is not None:
        root = bytecode.root
        number = root[0] if type(root) is tuple and root and type(root[0]) is int else "unknown"
        out.facts.append(("lite interpreter", f"bytecode version {number}"))
        named_in_it = Counter(word for word in walk_nodes([root]) if type(word) is str and word in OPERATORS)
        problems += _operator_problems(bytecode.name, named_in_it)
    for tree in trees:
        out.take_tree(tree, [s for s in tree.storages if old and not s.record])
    problems += check_storages(out.storages, archive)
    # Storages of the inputs a program was traced with: torch writes empty ones and never reads them.
    samples = [name for name in archive.records if name.startswith(("traced_inputs/", "bytecode/"))]
    out.note_strays({*others, *_MAIN, "model.json", *(part.name for part in out.parts), *samples})
    return out.checkpoint()


def _members(root: object) -> list[Any]:
    return list(root) if type(root) in (tuple, list) else []  # type: ignore[call-overload]


# -- what TorchScript code shows

OPERATORS: dict[str, str] = {
    # From the operator registry of torch 2.13: those that take a file name or call something elsewhere. With the first
    # two a program can read or write any file, already inside torch.jit.load if they are in a __setstate__.
    "aten::from_file": "reads or maps a file",
    "aten::save": "writes a file",
    "prim::PythonOp": "calls back into Python",
    **dict.fromkeys(("prim::rpc_async", "prim::rpc_remote", "prim::rpc_sync"), "calls a function on another machine"),
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
    problems = _operator_problems(name, called)
    devices = Counter(_DEVICE.findall(code)).most_common(8)
    shown = ", ".join(f'torch.device("{device}") {count}×' for device, count in devices)
    return [*problems, Problem("script-device", name, shown)] if devices else problems


def _operator_problems(where: str, called: Counter[str]) -> list[Problem]:
    lines = [f"{name} {count}×: {OPERATORS.get(name, _HIDDEN)}" for name, count in called.most_common()]
    return [Problem("script-dangerous-op", where, "\n".join(lines))] if called else []


# -- the dialect of torch's C++ pickler

_GET_LAYOUT = Global("torch.serialization", "_get_layout", 0)
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


def as_torch_save(archive: Archive, name: str) -> Pickle:
    """A second copy of a pickle, with what only torch's C++ pickler writes replaced by what ``torch.save`` would write.

    Lists and dictionaries lose the call that sets their type, storages of the newer dtypes become untyped, and sparse
    tensors get their arguments in the usual order. The pickle that is judged stays unchanged.
    """
    payload = archive.get(name, pickle_machine.MAX_STREAM)
    pickle = pickle_machine.run(payload.data if payload else b"", name=name)
    newer: dict[int, str] = {}
    for node in pickle.persistent:
        pid = node.id
        if type(pid) is tuple and len(pid) > 4 and type(pid[1]) is Global and type(pid[4]) is int:
            dtype = _STORAGES.get(pid[1].name)
            if dtype:
                newer[id(node)] = dtype
                node.id = (pid[0], UNTYPED, *pid[2:4], pid[4] * ITEMSIZE[dtype])
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
        elif id(first) in newer and function == "torch._utils._rebuild_tensor_v2" and len(call.args) > 5:
            call.callee, call.args = REBUILD_V3, (*call.args[:6], Global("torch", newer[id(first)], 0))
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
        attributes = as_torch_save(archive, "attributes.pkl")
        for call in attributes.calls:
            if type(call.callee) is Global and call.callee.full_name == "torch.jit._pickle.build_tensor_from_id":
                tensor = _at(tensors, call.args[0]) if type(call.args) is tuple and call.args else None
                if tensor is not None:
                    call.callee, call.args = tensor.callee, tensor.args
        values = _members(attributes.root)
    # Turn the modules into what they would be in today's data.pkl; not by recursion, since JSON may be deeply nested.
    top = Pickle("model.json")
    top.root = _module()
    pending = [(fields(model.get("mainModule")), top.root)]
    while pending:
        module, target = pending.pop()
        state: list[object] = []
        for group, key, table in (("parameters", "tensorId", tensors), ("attributes", "id", values)):
            for member in map(fields, entries(module.get(group))):
                state += [text(member.get("name"), 200), _at(table, number(member.get(key)))]
        for submodule in map(fields, entries(module.get("submodules"))):
            child = _module()
            state += [text(submodule.get("name"), 200), child]
            pending.append((submodule, child))
        target.states = [Dict(state)]
    return read_tree(top, storage_table(archive, forms=(("", ""),)), separator=".")


def _module() -> Call:
    return Call(Global("__torch__", "Module", 0), (), "newobj", 0)


def _at(values: list[Any], index: object) -> Any:
    return values[index] if type(index) is int and 0 <= index < len(values) else None
