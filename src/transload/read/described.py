"""Tensors that a container describes in JSON, turned into the calls by which ``torch.save`` would have written them.

So there is one reading of a tensor: the bounds, the sharing and the names are checked where those of a pickle are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transload.checkpoint import Storage, Tensor
from transload.dtypes import itemsize
from transload.findings import Problem
from transload.read.nested import Budget
from transload.read.nodes import Call, Global, Persistent
from transload.read.tensors import Tree
from transload.read.torch_zip import Archive

__all__ = ["Described", "complaints", "device", "entries", "items", "load_json", "node", "number", "text", "typed"]

MAX_JSON = 128 << 20
"""The graph of a program of ten thousand layers is some tens of megabytes; as objects it takes twenty times as much."""

MAX_PACKED_JSON = 16 << 20
"""torch stores JSON as it is. A compressed one is somebody else's work: half a megabyte unpacks to half a gigabyte."""

_UNTYPED = Global("torch.storage", "UntypedStorage", 0)
_REBUILD = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)


def load_json(archive: Archive, name: str, problems: list[Problem], budget: Budget) -> Any:
    """The value of a JSON record; ``None`` if there is no such record, or if it cannot be read, which is noted."""
    import json

    record = archive.find(name)
    if record is None or not budget.take(record, problems):
        return None
    payload = archive.read(record, MAX_PACKED_JSON if record.method else MAX_JSON)
    if payload.problem:
        problems.append(Problem("record-unreadable", name, payload.problem))
        return None
    if not payload.intact:
        problems.append(Problem("crc-mismatch", name, "it does not have the checksum it was saved with"))
    try:
        return json.loads(payload.data)
    except ValueError as error:
        problems.append(Problem("json-broken", name, str(error)[:200]))
    except RecursionError:
        problems.append(Problem("json-broken", name, "it is nested too deeply"))
    return None


def items(value: Any) -> list[tuple[str, Any]]:
    """The entries of a JSON object; none of anything else."""
    return list(value.items()) if type(value) is dict else []


def entries(value: Any) -> list[Any]:
    """The members of a JSON array; none of anything else."""
    return value if type(value) is list else []


def text(value: Any, longest: int = 80) -> str:
    """A JSON text, not too long; empty for anything else."""
    return value[:longest] if type(value) is str else ""


def number(value: Any) -> Any:
    """An integer as these files write one: plain, as ``{"as_int": 3}``, or as text. Anything else is left as it is.

    >>> number(3), number({"as_int": 3}), number("3"), number({"as_expr": "s0"})
    (3, 3, 3, {'as_expr': 's0'})
    """
    if type(value) is dict and "as_int" in value:
        return value["as_int"]
    if type(value) is str and value.isdecimal() and len(value) < 20:
        return int(value)
    return value


def device(value: Any) -> str:
    """A device as torch's own JSON writes it.

    >>> device({"type": "cuda", "index": 1}), device({"type": "cpu", "index": None})
    ('cuda:1', 'cpu')
    """
    fields = dict(items(value))
    index = fields.get("index")
    return (text(fields.get("type")) or "unknown") + (f":{index}" if type(index) is int else "")


class Described(NamedTuple):
    """A tensor as JSON has it.

    ``record`` is the name of the record that holds its storage, ``nbytes`` how long that is if not the whole record.
    """

    record: str
    dtype: str
    device: str
    offset: Any
    sizes: Any
    strides: Any
    requires_grad: Any = False
    parameter: bool = False
    nbytes: int | None = None


def node(what: Described, archive: Archive) -> Call:
    """The rebuild call for a described tensor. A storage without bytes is taken to be as long as the tensor needs."""
    sizes, strides = (tuple(number(n) for n in entries(part)) for part in (what.sizes, what.strides))
    offset = number(what.offset)
    record = archive.find(what.record)
    nbytes = what.nbytes if what.nbytes is not None else record.size if record is not None else 0
    nbytes = nbytes or _reach(what.dtype, offset, sizes, strides)
    storage = Persistent(("storage", _UNTYPED, what.record, what.device, nbytes), 0)
    dtype = Global("torch", what.dtype or "unknown", 0)
    call = Call(_REBUILD, (storage, offset, sizes, strides, what.requires_grad, None, dtype), "reduce", 0)
    return Call(_PARAMETER, (call, what.requires_grad, None), "reduce", 0) if what.parameter else call


def _reach(dtype: str, offset: Any, sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> int:
    numbers = (offset, *sizes, *strides)
    if 0 in sizes or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        return 0
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=False))
    return itemsize(dtype, offset + last + 1)


def complaints(tree: Tree, hollow: Iterable[Storage]) -> list[Problem]:
    """The problems of a tree, less disputes over how long a storage is that is not there: each tensor has to guess."""
    unknown = {f"storage {storage.key}" for storage in hollow}
    return [p for p in tree.problems if p.code != "storage-conflict" or p.where not in unknown]


def typed(storages: Iterable[Storage], tensors: Iterable[Tensor]) -> tuple[Storage, ...]:
    """Storages with the dtype of the first tensor that looks at each, for containers that name it only there."""
    first: dict[str | None, str] = {}
    for tensor in tensors:
        first.setdefault(tensor.storage, tensor.dtype)
    return tuple(storage._replace(dtype=first.get(storage.id, storage.dtype)) for storage in storages)
