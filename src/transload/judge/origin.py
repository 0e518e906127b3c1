"""Which torch releases can have written a file, from the traces their writers leave.

torch stamps no version into a checkpoint (pytorch/pytorch#44295 has asked since 2020), but each change of the writer
shows. Every rule here narrows a range of releases and says by what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from transload.checkpoint import Checkpoint, Origin
from transload.nodes import Call, Dict, Global

__all__ = ["origin"]

_FLAG = " (or a later one told to write the old format)"


class _Clue(NamedTuple):
    """A trace: the first and last release that leave it, and what it is. An empty bound is open."""

    oldest: str
    newest: str
    text: str


def origin(checkpoint: Checkpoint) -> Origin:
    """The narrowest range all traces agree on, with the traces; and versions the file records of itself."""
    recorded = (*checkpoint.written_by.recorded, *_recorded(checkpoint))
    clues = [*_CONTAINERS.get(checkpoint.format, _none)(checkpoint), *_names(checkpoint)]
    release = ".".join(dict(checkpoint.written_by.recorded).get("torch", "").partition("+")[0].split(".")[:2])
    if release.replace(".", "", 1).isdecimal() and checkpoint.format == "torch-zip":
        clues = [_Clue(release, release, "transload recorded it")]
    oldest = max((clue.oldest for clue in clues if clue.oldest), key=_order, default="")
    newest = min((clue.newest for clue in clues if clue.newest), key=_order, default="")
    note = ""
    if checkpoint.format == "torch-legacy":
        note = _FLAG
        if oldest and newest and _order(oldest) > _order(newest):
            newest, note = "", ""  # a later torch, with the flag
    elif oldest and newest and _order(oldest) > _order(newest):
        newest = ""
    evidence = (*(clue.text for clue in clues), *_others(checkpoint))
    return Origin(oldest, newest, evidence, tuple(dict(recorded).items()), note)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _none(_: Checkpoint) -> Iterable[_Clue]:
    return ()


def _tar(_: Checkpoint) -> Iterable[_Clue]:
    yield _Clue("0.1.1", "0.1.9", "a tar archive")


def _legacy(_: Checkpoint) -> Iterable[_Clue]:
    yield _Clue("0.1.10", "1.5", "the magic-number stream")


def _zip(checkpoint: Checkpoint) -> Iterable[_Clue]:
    names = [record.name for record in checkpoint.records]
    keys = [name for name in names if name.startswith(("data/", "tensors/"))]
    facts = dict(checkpoint.facts)
    if "data.pkl" not in names:
        return  # a save that never got as far as its object shows nothing
    if names[:1] == ["version"]:
        old = "1.4" if any(name.startswith("tensors/") for name in names) or facts.get("version") == "1" else "1.5"
        yield _Clue(old, old, "the record `version` comes first")
        return
    if max(map(len, keys), default=0) > 13 and any(len(key.partition("/")[2]) > 8 for key in keys):
        yield _Clue("1.6", "1.8", "storages are named by memory address")
        return
    if ".format_version" in names:
        yield _Clue("2.7", "", "the record `.format_version`")
    elif _is_partial(checkpoint):
        if "byteorder" in names:
            yield _Clue("2.1", "", "the record `byteorder`")
    elif "byteorder" in names or ".data/serialization_id" in names:
        yield _Clue("2.1", "2.6", "the record `byteorder`, and no `.format_version`")
    elif facts.get("folder") == "archive":
        yield _Clue("1.9" if keys else "1.6", "2.0", "storages are numbered, and there is no record `byteorder`")
    else:
        yield _Clue("1.13", "2.0", "the top folder has the file's name, and there is no record `byteorder`")


# Where records may be lost, one that is not seen proves nothing.
_PARTIAL = frozenset({"zip-count", "zip-directory-broken", "zip-head-lost", "zip-no-directory", "zip-walked"})


def _is_partial(checkpoint: Checkpoint) -> bool:
    return any(problem.code in _PARTIAL for problem in checkpoint.problems)


def _script(checkpoint: Checkpoint) -> Iterable[_Clue]:
    names = {record.name for record in checkpoint.records}
    if "model.json" in names:
        yield _Clue("1.0", "1.2", "a TorchScript archive with `model.json`")
    elif "byteorder" in names or ".data/serialization_id" in names:
        yield _Clue("2.1", "", "the record `byteorder`")
    elif checkpoint.records and checkpoint.records[0].name == "version":
        yield _Clue("1.3", "1.5", "a TorchScript archive with `version` first")
    elif not _is_partial(checkpoint):
        yield _Clue("1.6", "2.0", "a TorchScript archive without `byteorder`")


def _export(checkpoint: Checkpoint) -> Iterable[_Clue]:
    names = {record.name for record in checkpoint.records}
    if "serialized_state_dict.json" in names:
        yield _Clue("2.1", "2.2", "the record `serialized_state_dict.json`")
    elif "serialized_state_dict.pt" in names:
        yield _Clue("2.3", "2.7", "the record `serialized_state_dict.pt`")
    elif any(name.startswith("data/weights/") and name.endswith(".pt") for name in names):
        yield _Clue("2.8", "2.8", "weights saved by torch.save")
    elif any(name.endswith("_weights_config.json") for name in names):
        yield _Clue("2.9", "", "weights with a table of their own")


_CONTAINERS: dict[str, Callable[[Checkpoint], Iterable[_Clue]]] = {
    "torch-zip": _zip,
    "torch-directory": _zip,
    "torch-legacy": _legacy,
    "torch-tar": _tar,
    "torchscript": _script,
    "torch-export": _export,
}

_NAMES: dict[str, _Clue] = {
    "torch._utils._rebuild_parameter_with_state": _Clue("2.0", "", "parameters with attributes"),
    "torch._utils._rebuild_tensor_v3": _Clue("2.2", "", "tensors of the newer dtypes"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Clue("2.6", "", "device tensors kept as CPU tensors"),
    "torch._utils._rebuild_device_tensor_from_numpy": _Clue("1.10", "2.5", "device tensors kept as numpy arrays"),
    "torch._utils._rebuild_wrapper_subclass": _Clue("1.12", "", "tensor subclasses that wrap others"),
    "torch._utils._rebuild_nested_tensor": _Clue("2.2", "", "nested tensors"),
    "torch._utils._rebuild_meta_tensor_no_storage": _Clue("1.10", "", "meta tensors"),
    "torch._utils._rebuild_sparse_csr_tensor": _Clue("1.11", "1.13", "sparse CSR tensors, as they were then"),
    "torch._utils._rebuild_xla_tensor": _Clue("1.3", "1.9", "XLA tensors, as they were then"),
    "torch._tensor._rebuild_from_type_v2": _Clue("1.10", "", "tensors with attributes"),
    "torch.tensor._rebuild_from_type": _Clue("1.7", "1.8", "the module name `torch.tensor`"),
    "torch._tensor._rebuild_from_type": _Clue("1.9", "1.9", "the module name `torch._tensor`"),
    "torch.storage.UntypedStorage": _Clue("1.13", "", "untyped storages"),
    "torch.storage._UntypedStorage": _Clue("1.12", "1.12", "untyped storages, as they were then"),
}


def _globals(checkpoint: Checkpoint) -> set[str]:
    return {f"{module}.{name}" for pickle in checkpoint.pickles for module, name in pickle.globals}


def _names(checkpoint: Checkpoint) -> list[_Clue]:
    present = _globals(checkpoint)
    return [clue for name, clue in _NAMES.items() if name in present]


def _others(checkpoint: Checkpoint) -> Iterable[str]:
    """What the file shows of other software."""
    present = _globals(checkpoint)
    if any(name.startswith("numpy.core.") for name in present):
        yield "numpy 1.x (numpy.core)"
    if any(name.startswith("numpy._core.") for name in present):
        yield "numpy 2.x (numpy._core)"
    if any(pickle.python2 for pickle in checkpoint.pickles):
        yield "Python 2 (its kind of text)"


_VERSION_KEYS = {
    "pytorch-lightning_version": "lightning",
    "pytorch_lightning_version": "lightning",
    "ds_version": "deepspeed",
    "transformers_version": "transformers",
    "torch_version": "torch",
    "pytorch_version": "torch",
}
_MAX_VERSION = 80


def _recorded(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    """Versions somebody stored in the file: under a well-known key, or as torch's own version object."""
    for pickle in checkpoint.pickles:
        root = pickle.root
        items = root.items if type(root) is Dict else root.items or [] if type(root) is Call else []
        for key, value in zip(items[::2], items[1::2], strict=False):
            if type(key) is str and key in _VERSION_KEYS and type(value) is str:
                yield _VERSION_KEYS[key], value[:_MAX_VERSION]
        versioned = any(name == "TorchVersion" for _, name in pickle.globals)
        for call in pickle.calls if versioned else ():
            callee = call.callee
            if type(callee) is not Global or callee.name != "TorchVersion" or type(call.args) is not tuple:
                continue
            if call.args and type(call.args[0]) is str:
                yield "torch", call.args[0][:_MAX_VERSION]
