"""``torch.package`` archives: Python source, pickles that refer to it, and the storages of all of them.

Opening one runs its source. Here the pickles are read like any other, and the source is listed.
"""

from __future__ import annotations

from collections.abc import Iterable

from transload.checkpoint import Checkpoint, Origin, Part, Record
from transload.findings import Problem, some
from transload.formats import pickle_machine
from transload.formats.nested import Budget, head, looks_like_pickle, read_stream
from transload.formats.tensors import find_tensors
from transload.formats.torch_zip import Archive, check_storages, note_facts, storage_table
from transload.formats.torchscript import MAX_CODE, code_problems, plain_form
from transload.nodes import Call, Dict, Persistent, Pickle

__all__ = ["read_package"]


MAX_LIST = 1 << 20
"""``.data/extern_modules`` is a list of module names."""

_NOTES = (".data/version", ".data/python_version", "byteorder", ".data/serialization_id")
_SCRIPT = ".data/ts_code/"
_IDS: dict[str, tuple[int, ...]] = {"storage": (5,), "reduce_package": (3, 4)}


def read_package(archive: Archive, problems: Iterable[Problem], *, path: str, nbytes: int) -> Checkpoint:
    """A checkpoint out of a package: the tensors of each pickle are named after it, ``model/model.pkl/fc.weight``."""
    found = list(problems)
    budget = Budget(nbytes)
    facts = _facts(archive, found)
    python = dict(facts).get("python_version")
    pickles = _read_pickles(archive, found, budget)
    table = storage_table(archive, forms=((".data/", ".storage"),), big_endian=dict(facts).get("byteorder") == "big")
    plain = [_plain(archive, pickle) for pickle in pickles]
    for pickle in plain:
        for held in pickle.persistent:
            table.resolve(held)
    tree = find_tensors(Dict([part for pickle in plain for part in _entries(pickle)]), table)
    found += [*tree.problems, *check_storages(tree.storages, archive)]
    return Checkpoint(
        path=path,
        format="torch-package",
        nbytes=nbytes,
        tensors=tree.tensors,
        storages=tree.storages,
        leaves=tree.leaves,
        records=tuple(archive.records.values()),
        parts=tuple(_parts(archive, found)),
        facts=tuple(facts),
        written_by=Origin(recorded=(("python", python),) if python else ()),
        problems=tuple(found),
        pickles=tuple(pickles),
    )


def _facts(archive: Archive, problems: list[Problem]) -> list[tuple[str, str]]:
    notes = note_facts(archive, _NOTES, problems)
    facts = [
        (name, value if name == "folder" else value[:80]) for name, value in notes if (name, value) != ("folder", "")
    ]
    payload = archive.get(".data/extern_modules", MAX_LIST)
    modules = payload.data.decode("utf-8", "backslashreplace").split() if payload else []
    if modules:
        facts.append(("extern modules", some(modules, 20)))
    return facts


# -- the pickles


def _read_pickles(archive: Archive, problems: list[Problem], budget: Budget) -> list[Pickle]:
    """Every pickle of the package. The calls that only its persistent ids make are put among the others."""
    pickles: list[Pickle] = []
    for name, record in archive.records.items():
        if not _is_pickle(archive, name, record) or not budget.take(record, problems):
            continue
        pickle = read_stream(archive, name, problems, _IDS)
        pickle.calls += [call for held in pickle.persistent if (call := _package_call(held))]
        pickles.append(pickle)
    saved = [pickle for pickle in pickles if not pickle.name.startswith(".data/")]
    if len(saved) == 1:
        saved[0].main = True
    return pickles


def _is_pickle(archive: Archive, name: str, record: Record) -> bool:
    """Whether a record is one. ``save_pickle`` may give it any name, so the first bytes count too."""
    if name.endswith((".pkl", ".debug_pkl")):
        return True
    return not name.endswith((".py", ".storage", "/")) and looks_like_pickle(head(archive, record, 2))


def _plain(archive: Archive, pickle: Pickle) -> Pickle:
    """The pickle as its tensors are to be read: those of TorchScript in the usual form, on a copy."""
    if not pickle.name.startswith(_SCRIPT):
        return pickle
    payload = archive.get(pickle.name, pickle_machine.MAX_STREAM)
    copy = plain_form(pickle_machine.run(payload.data if payload else b"", name=pickle.name))
    for held in copy.persistent:
        # TorchScript calls a storage ``4.storage`` where Python's pickles call it ``4``.
        pid = held.id
        if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str:
            held.id = (*pid[:2], pid[2].removesuffix(".storage"), *pid[3:])
    return copy


def _entries(pickle: Pickle) -> list[object]:
    """Names and objects in turn: the root under the record's name, and what package calls make deeper in, beside it."""
    if pickle.name.endswith(".debug_pkl"):
        return []
    calls = [(held, call) for held in pickle.persistent if (call := _package_call(held))]
    top = next((call for held, call in calls if held is pickle.root), None)
    entries: list[object] = [pickle.name, _as_object(top) if top else pickle.root]
    for index, call in enumerate(call for _, call in calls if call is not top):
        entries += [f"{pickle.name}/reduce_package {index}", _as_object(call)]
    return entries


def _package_call(held: Persistent) -> Call | None:
    """``("reduce_package", id, function, arguments)``, or without the id: a call the importer makes while it loads."""
    pid = held.id
    if type(pid) is not tuple or pid[:1] != ("reduce_package",) or len(pid) not in (3, 4):
        return None
    return Call(pid[-2], pid[-1], "reduce", held.position)


def _as_object(call: Call) -> Call:
    """The object such a call makes. A graph module's first argument is its ``__dict__``."""
    args = call.args if type(call.args) is tuple else ()
    made = Call(call.callee, (), "reduce", call.position)
    if args and type(args[0]) is Dict:
        made.states = [args[0]]
    else:
        made.appended = list(args)
    return made


# -- everything else


def _parts(archive: Archive, problems: list[Problem]) -> list[Part]:
    parts: list[Part] = []
    budget = Budget(0, MAX_CODE)
    for name, record in archive.records.items():
        if name.endswith(".py"):
            parts.append(Part(name, "source", record.size))
            if name.startswith(_SCRIPT) and budget.take(record, problems):
                payload = archive.read(record, MAX_CODE)
                problems += code_problems(name, payload.data.decode("utf-8", "replace"))
        elif not name.startswith(".data/") and not name.endswith((".pkl", "/")) and name not in _NOTES:
            parts.append(Part(name, "resource", record.size))
    return parts
