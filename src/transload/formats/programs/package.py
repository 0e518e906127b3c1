"""``torch.package`` archives: Python source, pickles that refer to it, and the storages of all of them.

Opening a package runs its source; here that is only listed.
"""

from __future__ import annotations

from transload.checkpoint import Checkpoint, Origin, Part
from transload.findings import join_names
from transload.formats.graph import find_tensors
from transload.formats.programs import MAX_CODE, PICKLED, Program
from transload.formats.programs.torchscript import as_torch_save, code_problems
from transload.formats.torch_zip import Archive, check_storages, read_pickle, storage_table
from transload.nodes import Call, Dict, Persistent

MAX_LIST = 1 << 20  # ``.data/extern_modules`` is a list of module names
_TEXT_RECORDS = (".data/version", ".data/python_version", "byteorder", ".data/serialization_id")
_SCRIPT = ".data/ts_code/"
_IDS: dict[str, tuple[int, ...]] = {"storage": (5,), "reduce_package": (3, 4)}


def read(archive: Archive) -> Checkpoint:
    """Read a package. The names of tensors begin with that of their pickle: ``model/model.pkl/fc.weight``."""
    out = Program(archive, "torch-package", _TEXT_RECORDS)
    out.facts = [fact for fact in out.facts if fact != ("folder", "")]
    payload = archive.get(".data/extern_modules", MAX_LIST)
    modules = payload.data.decode("utf-8", "backslashreplace").split() if payload else []
    if modules:
        out.facts.append(("extern modules", join_names(modules, 20)))
    for name, record in archive.records.items():
        # ``save_pickle`` accepts any name for a record, so its first bytes count, too.
        is_named, is_other = name.endswith((".pkl", ".debug_pkl")), name.endswith((".py", ".storage", "/"))
        if (is_named or (not is_other and archive.head(record, 2).startswith(PICKLED))) and out.affords(record):
            pickle = read_pickle(archive, name, out.problems, _IDS)
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
            plain = as_torch_save(archive, pickle.name)
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
        elif not name.startswith(".data/") and not name.endswith((".pkl", "/")) and name not in _TEXT_RECORDS:
            out.parts.append(Part(name, "resource", record.size))
    python = dict(out.facts).get("python_version")
    return out.checkpoint(written_by=Origin(recorded=(("python", python),) if python else ()))


def _package_call(node: Persistent) -> Call | None:
    """The call that the importer makes for ``("reduce_package", id, function, arguments)``, or without the id."""
    pid = node.id
    if type(pid) is not tuple or pid[:1] != ("reduce_package",) or len(pid) not in (3, 4):
        return None
    return Call(pid[-2], pid[-1], "reduce", node.position)
