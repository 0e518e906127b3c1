"""TorchScript archives: ``torch.jit.save`` from 1.0's ``model.json`` to today's ``data.pkl``, and the lite form.

What is listed is what the program holds: parameters and buffers under the names ``state_dict()`` gives them, other
tensor attributes in the same way, and the constants of its code as the code calls them, ``CONSTANTS.c0``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Checkpoint, Part, Storage, Tensor
from transload.dtypes import ITEMSIZE
from transload.findings import Problem
from transload.read import pickle_machine
from transload.read.described import Described, complaints, entries, items, load_json, node, number, text, typed
from transload.read.nested import Budget, read_stream
from transload.read.nodes import Call, Dict, Global, Persistent, Pickle
from transload.read.script_code import MAX_CODE, bytecode_problems, code_problems
from transload.read.tensors import Tree
from transload.read.torch_zip import Archive, check_storages, note, read_tree, storage_table, stray_records

__all__ = ["plain_form", "read_torchscript"]

MAX_OPERATOR_VERSION = 10
"""The newest set of operators that torch 2.13 reads (``caffe2/serialize/versions.h``)."""

_NOTES = ("version", "byteorder", ".data/serialization_id")
_FACTS = {"version": "operator version"}
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
    facts = [("folder", archive.root)]
    for name in _NOTES:
        value = note(archive, name, problems)
        if value is not None:
            facts.append((_FACTS.get(name, name.rpartition("/")[2]), value))
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
        (*tree.storages, *(_constant_storage(storage) for storage in constants.storages)),
        (*tree.leaves, *constants.leaves),
        (*tree.problems, *constants.problems),
    )


def _constant_tensor(tensor: Tensor) -> Tensor:
    storage = None if tensor.storage is None else f"constants/{tensor.storage}"
    return tensor._replace(storage=storage, parts=tuple(_constant_tensor(part) for part in tensor.parts))


def _constant_storage(storage: Storage) -> Storage:
    return storage._replace(id=f"constants/{storage.id}", key=f"constants/{storage.key}")


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
