"""Archives that contain programs: one module per format, and here what they share.

``Program`` is the draft of any of them. The JSON that describes tensors becomes the calls that ``torch.save`` would
have pickled, so that one reader (``formats.graph``) finds the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transload.checkpoint import Draft, Record, Storage
from transload.dtypes import itemsize
from transload.formats.graph import Tree
from transload.formats.torch_zip import Archive, container_facts, stray_records
from transload.geometry import View
from transload.nodes import Call, Global, Persistent

# Bytes to unpack beyond the size of the file. A megabyte of deflated records, or a thousand directory entries for the
# same bytes, would otherwise cost gigabytes of work.
ALLOWANCE = 256 << 20
# The graph of a program of ten thousand layers has tens of megabytes; as objects it takes twenty times as much.
MAX_JSON = 128 << 20
MAX_PACKED_JSON = 16 << 20  # torch does not compress JSON, and half a megabyte can unpack to half a gigabyte
# Source searched in one archive. Ten thousand operators are a megabyte, and a second is enough for five megabytes.
MAX_CODE = 32 << 20


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

    def note_strays(self, expected: Iterable[str]) -> None:
        """Note records that are neither ``expected`` nor storages; keep those that are pickles."""
        strays, pickles = stray_records(self.archive, self.storages, expected)
        self.problems += strays
        self.pickles += pickles


PICKLED = tuple(b"\x80%c" % protocol for protocol in (2, 3, 4, 5))  # how pickles of these protocols begin


# -- values of JSON, and the tensors they describe

UNTYPED = Global("torch.storage", "UntypedStorage", 0)
REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)


def fields(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    return value if type(value) is dict else {}


def entries(value: Any) -> list[Any]:
    """A JSON array; an empty one for anything else."""
    return value if type(value) is list else []


def text(value: Any, longest: int = 80) -> str:
    """A JSON string, cut to ``longest`` characters; empty for anything else."""
    return value[:longest] if type(value) is str else ""


def number(value: Any) -> Any:
    """An integer, which these files also write as ``{"as_int": 3}`` or as text. Anything else is returned unchanged.

    >>> number(3), number({"as_int": 3}), number("3"), number({"as_expr": "s0"})
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
    shape, steps = (tuple(number(n) for n in entries(part)) for part in layout[1:])
    first = number(layout[0])
    record = archive.find(name)
    if nbytes is None:
        nbytes = record.size if record is not None else 0
    sized = 0 not in shape and len(shape) == len(steps)
    if not nbytes and sized and all(type(n) is int and 0 <= n < 1 << 63 for n in (first, *shape, *steps)):
        nbytes = itemsize(dtype, first + View(shape, steps).extent)
    storage = Persistent(("storage", UNTYPED, name, device, nbytes), 0)
    kind = Global("torch", dtype or "unknown", 0)
    call = Call(REBUILD_V3, (storage, first, shape, steps, requires_grad, None, kind), "reduce", 0)
    return Call(_PARAMETER, (call, requires_grad, None), "reduce", 0) if parameter else call
