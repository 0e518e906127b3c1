"""TorchScript programs: their tensors, and what their code shows.

The code is searched for devices written into it, and for operators that reach beyond tensors. It is never run and not
compiled either. It is split into tokens as TorchScript's own lexer does it; where the two could differ, too much is
seen rather than too little.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Checkpoint, Part, Tensor
from transload.dtypes import ITEMSIZE
from transload.findings import Problem
from transload.formats import pickle_machine
from transload.formats.nested import (
    Budget,
    Described,
    complaints,
    entries,
    items,
    load_json,
    node,
    number,
    read_stream,
    text,
    typed,
)
from transload.formats.tensors import Tree
from transload.formats.torch_zip import (
    Archive,
    check_storages,
    note,
    note_facts,
    read_tree,
    storage_table,
    stray_records,
)
from transload.nodes import Call, Dict, Global, Persistent, Pickle, Set

__all__ = ["MAX_CODE", "OPERATORS", "code_problems", "operators", "plain_form", "read_torchscript"]


MAX_CODE = 32 << 20
"""Source searched in one archive. Ten thousand operators are a megabyte; searching goes at five megabytes a second."""

OPERATORS: dict[str, str] = {
    # From the operator registry of torch 2.13: those that take a file name or start something elsewhere. With the first
    # two a program reads or writes any file, and does so inside torch.jit.load if it says so in a __setstate__.
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
# Comments and strings, as torch/csrc/jit/frontend/lexer.h has them: no prefixes, a newline only inside triple quotes.
_QUOTED = re.compile(
    r"""#[^\n]*|"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
_DOTTED = re.compile(r"(?<![\w.])(?:torch|ops)\b(?:\s*\.\s*[A-Za-z_]\w*)*")


def code_problems(name: str, code: str) -> list[Problem]:
    """The devices and the far-reaching operators in one source file.

    >>> [problem.code for problem in code_problems("a.py", 'torch.save(x, "f"); torch.device("cuda:0")')]
    ['script-dangerous-op', 'script-device']
    """
    out: list[Problem] = []
    called = operators(code)
    if called:
        out.append(Problem("script-dangerous-op", name, _lines(called)))
    devices = Counter(_DEVICE.findall(code))
    if devices:
        shown = ", ".join(f'torch.device("{device}") {count}×' for device, count in devices.most_common(8))
        out.append(Problem("script-device", name, shown))
    return out


def operators(code: str) -> Counter[str]:
    """The operators of ``OPERATORS`` that a program names, and any trick to name one out of sight.

    The compiler takes ``torch.save``, ``ops.aten.save``, ``t = torch`` and then ``t.save``, ``(torch).save`` and
    ``getattr(torch, "save")`` alike. What torch itself writes always has a dot after ``torch`` and ``ops``.

    >>> operators("t = torch; t.save(x, name)")
    Counter({'torch': 1})
    """
    found: Counter[str] = Counter()
    for match in _DOTTED.finditer(_bare(code)):
        parts = [part.strip() for part in match[0].split(".")]
        symbol = _symbol(parts)
        if symbol in OPERATORS or symbol == parts[0]:
            found[symbol] += 1
    return found


def _symbol(parts: list[str]) -> str:
    """``torch.save`` and ``ops.aten.save`` as ``aten::save``; ``torch`` or ``ops`` where no operator is named."""
    if parts[0] == "torch" and len(parts) > 1:
        return f"aten::{parts[1]}"
    if parts[0] == "ops" and len(parts) > 2:
        return f"{parts[1]}::{parts[2]}"
    return parts[0]


def _bare(code: str) -> str:
    """Code without comments and strings; all of it if a quote is left over, since then strings may end elsewhere."""
    rest = _QUOTED.sub(" ", code)
    return (code if '"' in rest or "'" in rest else rest).replace("\\\n", " ")


def bytecode_problems(pickle: Pickle) -> list[Problem]:
    """The far-reaching operators named in the bytecode of a lite interpreter program."""
    called = Counter(word for word in _words(pickle.root) if word in OPERATORS)
    return [Problem("script-dangerous-op", pickle.name, _lines(called))] if called else []


def _words(root: object) -> Iterable[str]:
    """All texts in a graph of nodes."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if type(node) is str:
            yield node
        elif id(node) not in seen and type(node) in (tuple, list, Dict, Set, Call):
            seen.add(id(node))
            stack += _inside(node)


def _inside(node: object) -> list[object]:
    if type(node) is Call:
        return [node.args, node.states, node.items, node.appended]
    if type(node) is Dict or type(node) is Set:
        return node.items
    return list(node) if isinstance(node, tuple | list) else []


def _lines(called: Counter[str]) -> str:
    return "\n".join(f"{name} {count}×: {OPERATORS.get(name, _HIDDEN)}" for name, count in called.most_common())


MAX_OPERATOR_VERSION = 10
"""The newest set of operators that torch 2.13 reads (``caffe2/serialize/versions.h``)."""

_NOTES = ("version", "byteorder", ".data/serialization_id")
_MAIN = ("data.pkl", "constants.pkl", "attributes.pkl")


def read_torchscript(archive: Archive, problems: Iterable[Problem], *, path: str, nbytes: int) -> Checkpoint:
    """A checkpoint out of a TorchScript archive. Its code is looked at, never run."""
    found = list(problems)
    budget = Budget(nbytes)
    facts = _facts(archive, found)
    old = archive.find("data.pkl") is None and archive.find("model.json") is not None
    tree, pickles = (_read_old if old else _read_new)(archive, found, budget)
    others = _other_pickles(archive)
    pickles += [_read(archive, name, found) for name in others if budget.take(archive.records[name], found)]
    parts = _read_code(archive, found)
    facts += _about(pickles)
    found += [problem for pickle in pickles if pickle.name == "bytecode.pkl" for problem in bytecode_problems(pickle)]
    found += complaints(tree, [s for s in tree.storages if old and not s.record])
    found += check_storages(tree.storages, archive)
    known = {*others, *_MAIN, "model.json", *(part.name for part in parts), *_sample_records(archive)}
    strays, more = stray_records(archive, tree.storages, known)
    return Checkpoint(
        path=path,
        format="torchscript",
        nbytes=nbytes,
        tensors=tree.tensors,
        storages=typed(tree.storages, tree.tensors),
        leaves=tree.leaves,
        records=tuple(archive.records.values()),
        parts=tuple(parts),
        facts=tuple(facts),
        problems=(*found, *strays),
        pickles=(*pickles, *more),
    )


def _facts(archive: Archive, problems: list[Problem]) -> list[tuple[str, str]]:
    facts = note_facts(archive, _NOTES, problems)
    facts = [("operator version" if name == "version" else name, value) for name, value in facts]
    version = dict(facts).get("operator version")
    if version is None:
        problems.append(Problem("zip-no-version", detail="torch.jit.load wants the record `version`"))
    elif not version.isdecimal() or int(version[:9]) > MAX_OPERATOR_VERSION:
        detail = f"it says {version[:40]!r}; torch reads up to {MAX_OPERATOR_VERSION}"
        problems.append(Problem("zip-bad-version", "version", detail))
    return facts


def _about(pickles: list[Pickle]) -> list[tuple[str, str]]:
    """What the pickles tell of the program itself."""
    by_name = {pickle.name: pickle for pickle in pickles}
    facts: list[tuple[str, str]] = []
    root = pickles[0].root if pickles else None
    if type(root) is Call and type(root.callee) is Global:
        facts.append(("class", f"{root.callee.module}.{root.callee.name}"[:200]))
    bytecode = by_name.get("bytecode.pkl")
    if bytecode is not None:
        root = bytecode.root
        version = root[0] if type(root) is tuple and root and type(root[0]) is int else "unknown"
        facts.append(("lite interpreter", f"bytecode version {version}"))
    return facts


_IDS: dict[str, tuple[int, ...]] = {"storage": (5, 6)}  # up to 1.5 with the view of another storage, always None


def _read(archive: Archive, name: str, problems: list[Problem]) -> Pickle:
    return read_stream(archive, name, problems, _IDS)


# -- 1.3 and later: data.pkl and constants.pkl


def _read_new(archive: Archive, problems: list[Problem], _: Budget) -> tuple[Tree, list[Pickle]]:
    big_endian = note(archive, "byteorder", []) == "big"
    main = _read(archive, "data.pkl", problems)
    main.main = True
    tree = read_tree(_plain(archive, "data.pkl"), storage_table(archive, big_endian=big_endian), separator=".")
    if archive.find("constants.pkl") is None:
        return tree, [main]
    constants = _read(archive, "constants.pkl", problems)
    held = _plain(archive, "constants.pkl")
    named = [part for i, value in enumerate(_members(held.root)) for part in (f"CONSTANTS.c{i}", value)]
    held.root = Dict(named)
    more = read_tree(held, storage_table(archive, forms=(("constants/", ""),), big_endian=big_endian), separator=".")
    return _joined(tree, more), [main, constants]


def _members(root: object) -> list[Any]:
    return list(root) if type(root) in (tuple, list) else []  # type: ignore[call-overload]


def _joined(tree: Tree, constants: Tree) -> Tree:
    """Both trees as one. Constants count their storages from zero again, so theirs get other ids."""
    return Tree(
        (*tree.tensors, *(_constant_tensor(tensor) for tensor in constants.tensors)),
        (*tree.storages, *(s._replace(id=f"constants/{s.id}", key=f"constants/{s.key}") for s in constants.storages)),
        (*tree.leaves, *constants.leaves),
        (*tree.problems, *constants.problems),
    )


def _constant_tensor(tensor: Tensor) -> Tensor:
    storage = None if tensor.storage is None else f"constants/{tensor.storage}"
    return tensor._replace(storage=storage, parts=tuple(_constant_tensor(part) for part in tensor.parts))


def _plain(archive: Archive, name: str) -> Pickle:
    """A pickle once more, for us to change: the one that is judged stays as the file has it."""
    payload = archive.get(name, pickle_machine.MAX_STREAM)
    return plain_form(pickle_machine.run(payload.data if payload else b"", name=name))


# -- the dialect of torch's C++ pickler

_WRAPPERS = frozenset(
    f"torch.jit._pickle.{name}"
    for name in ("restore_type_tag", "build_intlist", "build_tensorlist", "build_doublelist", "build_boollist")
)
_STORAGES = {
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e4m3fnuzStorage": "float8_e4m3fnuz",
    "Float8_e5m2Storage": "float8_e5m2",
    "Float8_e5m2fnuzStorage": "float8_e5m2fnuz",
    "Float8_e8m0fnuStorage": "float8_e8m0fnu",
    "Float4_e2m1fn_x2Storage": "float4_e2m1fn_x2",
    "ComplexHalfStorage": "complex32",
    "UInt16Storage": "uint16",
    "UInt32Storage": "uint32",
    "UInt64Storage": "uint64",
}
_LAYOUTS = {1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc"}
_UNTYPED = Global("torch.storage", "UntypedStorage", 0)
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3", 0)
_GET_LAYOUT = Global("torch.serialization", "_get_layout", 0)


def plain_form(pickle: Pickle) -> Pickle:
    """The pickle with what only torch's C++ pickler writes put as ``torch.save`` would: changed in place, given back.

    Lists and dictionaries lose the call that tells their type, storages of the newer dtypes become untyped, and sparse
    tensors get their arguments in the usual order.
    """
    odd = {id(held): dtype for held in pickle.persistent if (dtype := _untype(held))}
    for call in pickle.calls:
        callee = call.callee
        if type(callee) is not Global or type(call.args) is not tuple or not call.args:
            continue
        name = f"{callee.module}.{callee.name}"
        if name in _WRAPPERS:
            _unwrap(call, call.args[0])
        elif id(call.args[0]) in odd and name == "torch._utils._rebuild_tensor_v2" and len(call.args) > 5:
            call.callee, call.args = _REBUILD_V3, (*call.args[:6], Global("torch", odd[id(call.args[0])], 0))
        elif name == "torch._utils._rebuild_sparse_tensor" and type(call.args[0]) is int and len(call.args) > 5:
            layout, size, _, *parts = call.args
            words = (f"torch.{_LAYOUTS.get(layout, 'unknown')}",)
            call.args = (Call(_GET_LAYOUT, words, "reduce", call.position), (*parts[:-1], size))
    return pickle


def _untype(held: Persistent) -> str:
    """The dtype of a storage whose class only the C++ pickler names; such a storage becomes one of bytes."""
    pid = held.id
    if type(pid) is not tuple or len(pid) < 5 or type(pid[1]) is not Global or type(pid[4]) is not int:
        return ""
    dtype = _STORAGES.get(pid[1].name, "")
    if dtype:
        held.id = (pid[0], _UNTYPED, *pid[2:4], pid[4] * ITEMSIZE[dtype])
    return dtype


def _unwrap(call: Call, value: object) -> None:
    if type(value) is list:
        call.args, call.appended = (), value
    elif type(value) is Dict:
        call.args, call.items = (), value.items
    else:
        call.args = (value,)


# -- 1.0 to 1.2: model.json, with the other attributes in attributes.pkl

_DATA_TYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}
_BY_ID = ("torch.jit._pickle", "build_tensor_from_id")


def _read_old(archive: Archive, problems: list[Problem], budget: Budget) -> tuple[Tree, list[Pickle]]:
    model = load_json(archive, "model.json", problems, budget)
    model = model if type(model) is dict else {}
    tensors = [_old_tensor(entry, archive) for entry in entries(model.get("tensors"))]
    pickles: list[Pickle] = []
    values: list[Any] = []
    if archive.find("attributes.pkl") is not None:
        pickles.append(_read(archive, "attributes.pkl", problems))
        pickles[0].main = True
        values = _old_attributes(archive, tensors)
    root = Pickle("model.json")
    root.root = _old_module(model.get("mainModule"), tensors, values)
    return read_tree(root, storage_table(archive, forms=(("", ""),)), separator="."), pickles


def _old_tensor(entry: Any, archive: Archive) -> Call:
    get = entry.get if type(entry) is dict else {}.get
    what = Described(
        record=text(dict(items(get("data"))).get("key"), 255),
        dtype=_DATA_TYPES.get(text(get("dataType")), ""),
        device=text(get("device")) or "cpu",
        offset=get("offset"),
        sizes=get("dims", []),
        strides=get("strides", []),
        requires_grad=get("requiresGrad"),
    )
    return node(what, archive)


def _old_attributes(archive: Archive, tensors: list[Call]) -> list[Any]:
    held = _plain(archive, "attributes.pkl")
    for call in held.calls:
        callee, args = call.callee, call.args
        if type(callee) is Global and (callee.module, callee.name) == _BY_ID and type(args) is tuple:
            known = _at(tensors, args[0] if args else None)
            if known is not None:
                call.callee, call.args = known.callee, known.args
    return _members(held.root)


def _old_module(top: Any, tensors: list[Call], values: list[Any]) -> Call:
    """The modules as the objects they would be in today's ``data.pkl``; not by recursion, since JSON may nest deep."""
    root = _object()
    todo = [(top, root)]
    while todo:
        module, made = todo.pop()
        state: list[object] = []
        get = module.get if type(module) is dict else {}.get
        for entry in entries(get("parameters")):
            state += _old_member(entry, "tensorId", tensors)
        for entry in entries(get("attributes")):
            state += _old_member(entry, "id", values)
        for entry in entries(get("submodules")):
            child = _object()
            state += [text(dict(items(entry)).get("name"), 200), child]
            todo.append((entry, child))
        made.states = [Dict(state)]
    return root


def _object() -> Call:
    return Call(Global("__torch__", "Module", 0), (), "newobj", 0)


def _old_member(entry: Any, key: str, values: list[Any]) -> list[object]:
    """Name and value of a parameter or attribute, by its number in a table."""
    fields = dict(items(entry))
    return [text(fields.get("name"), 200), _at(values, number(fields.get(key)))]


def _at(values: list[Any], index: object) -> Any:
    return values[index] if type(index) is int and 0 <= index < len(values) else None


# -- everything beside the tensors


def _other_pickles(archive: Archive) -> list[str]:
    """Further pickles: bytecode, debug information, traced inputs; not the files a user put into ``extra/``."""
    names = (name for name in archive.records if name.endswith((".pkl", ".debug_pkl")) and name not in _MAIN)
    return [name for name in names if not name.startswith("extra/")]


def _sample_records(archive: Archive) -> list[str]:
    """Storages of the inputs a program was traced with: torch writes them, empty, and never reads them."""
    return [name for name in archive.records if name.startswith(("traced_inputs/", "bytecode/"))]


def _read_code(archive: Archive, problems: list[Problem]) -> list[Part]:
    parts: list[Part] = []
    budget = Budget(0, MAX_CODE)
    for name, record in archive.records.items():
        if name.startswith("extra/") and not name.endswith("/"):
            parts.append(Part(name, "extra file", record.size))
        elif name.startswith("code/") and name.endswith(".py"):
            parts.append(Part(name, "source", record.size))
            if budget.take(record, problems):
                problems += _read_source(archive, name)
    if archive.find("constants.pkl") and not any(part.kind == "source" for part in parts):
        detail = "for its `constants.pkl` torch takes it for a program, and there is no code: a state dict in disguise?"
        problems.append(Problem("script-no-code", "code/", detail))
    return parts


def _read_source(archive: Archive, name: str) -> list[Problem]:
    payload = archive.get(name, MAX_CODE)
    if payload is None or payload.problem:
        return [Problem("record-unreadable", name, payload.problem if payload else "")]
    damage = [] if payload.intact else [Problem("crc-mismatch", name, "its text is not the one that was saved")]
    return damage + code_problems(name, payload.data.decode("utf-8", "replace"))
