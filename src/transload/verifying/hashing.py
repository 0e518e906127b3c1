"""Count and hash the tensors of an open checkpoint, and search them for NaN and infinities.

``plan_of`` lists the tensors to read, and ``sum_tensors`` reads them; on the way it compares the checksums of records
that consist of one tensor. ``counted`` finds NaN without numpy, in many elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint, Record, Tensor
from transload.errors import CannotReadError, ContentError, TransloadError
from transload.findings import Problem
from transload.formats.safetensors import header_metadata
from transload.formats.tensors import MAX_SIZE, BadTensor, reach
from transload.formats.verify import Lost, mismatch
from transload.io.checksums import fastest_crc32
from transload.io.pool import each, threads
from transload.nodes import Call, Dict, Global, Persistent
from transload.tensors.content import Allowance, Content, FileRange
from transload.tensors.damage import Key, Records, key_of
from transload.verifying.manifest import TensorSum

_PIECE = 1 << 20
_ALONE = 4 << 20  # for fewer bytes it does not pay to start threads
_TINY = 8 << 10  # nor for tensors this small: finding them, one thread at a time, takes longer than hashing them


class HashJob(NamedTuple):
    """A tensor to read, and the record that consists of it alone, if there is one.

    ``places`` are the indices of all its names in the list of tensors.
    """

    tensor: Tensor
    places: list[int]
    key: Key | None = None
    record: Record | None = None


def plan_of(content: Content, every: Records, *, hashes: bool, values: bool) -> tuple[list[TensorSum], list[HashJob]]:
    """Every tensor, or the parts of those that consist of others, and what to read: each view of a storage once."""
    entries: list[TensorSum] = []
    if not hashes and not values:
        return entries, []
    whole: dict[FileRange | None, tuple[Key | None, Record | None]] = {
        FileRange(file, record.offset or 0, record.stored): (key_of(file, record), record)
        for file, inside in every.items()
        for record in inside
        if record.size and record.crc32 is not None and not record.method
    }
    seen: dict[tuple[object, ...], HashJob] = {}
    allowance = Allowance(content.checkpoint)
    for tensor, note in _leaves(content.checkpoint.tensors):
        place = len(entries)
        dtype = f"{tensor.dtype} {tensor.kind}" if note else tensor.dtype
        entries.append(TensorSum(tensor.name, dtype, tensor.shape, 0 if note else tensor.nbytes, note=note))
        view = (tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts)
        if note or not (hashes or tensor.dtype in FLOATING):
            continue
        if view in seen:
            seen[view].places.append(place)
            continue
        try:
            allowance.spend(tensor)
        except ContentError as error:
            entries[place] = entries[place]._replace(note=error.what)
            continue
        seen[view] = HashJob(tensor, [place], *whole.get(content.file_range(tensor), (None, None)))

    def position(job: HashJob) -> tuple[str, int]:
        storage = content.storage(job.tensor)
        return (storage.file, job.tensor.file_offset or 0) if storage is not None else ("", 0)

    return entries, sorted(seen.values(), key=position)


def _leaves(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """Tensors that have elements, with an empty note; and those that do not, with the reason."""
    for tensor in tensors:
        if tensor.kind in ("strided", "sharded") or (tensor.kind == "device" and len(tensor.parts) == 1):
            yield tensor, ""
        elif tensor.kind == "quantized":
            yield tensor._replace(kind="strided"), ""
        else:
            yield tensor, f"it is made of {len(tensor.parts)} others" if tensor.parts else "it has no elements here"
            yield from _leaves(tensor.parts)


def sum_tensors(
    content: Content,
    entries: list[TensorSum],
    jobs: list[HashJob],
    progress: Callable[[int], None],
    *,
    hashes: bool,
    values: bool,
) -> tuple[dict[Key, Problem], dict[str, tuple[str, str]]]:
    """Do all jobs and complete the entries.

    Returns the records with wrong checksums, and the tensors that could not be read, with kind and reason.
    """
    bad: dict[Key, Problem] = {}
    failed: dict[str, tuple[str, str]] = {}
    lock = Lock()

    def do(job: HashJob) -> None:
        tensor, places, key, record = job
        digest = sha256() if hashes else None
        numbers = (0, 0) if values and tensor.dtype in FLOATING else None
        compute, value = fastest_crc32(), 0
        try:
            for piece in content.pieces(tensor, _PIECE):
                if digest is not None:
                    digest.update(piece)
                if numbers is not None:
                    more = counted(bytes(piece), tensor.dtype)
                    numbers = numbers[0] + more[0], numbers[1] + more[1]
                if record is not None:
                    value = compute(piece, value)
                with lock:
                    progress(len(piece))
        except TransloadError as error:
            kind = "unreadable" if isinstance(error, CannotReadError) else "cut"
            for place in places:
                entries[place] = entries[place]._replace(note=error.what)
                failed[entries[place].name] = kind, error.what
            if key is not None and record is not None:
                bad[key] = mismatch(record, Lost(error.what, "record-unreadable"))
            return
        if key is not None and record is not None and value != record.crc32:
            bad[key] = mismatch(record, value)
        nan, inf = numbers or (None, None)
        for place in places:
            entries[place] = entries[place]._replace(sha256=digest.hexdigest() if digest else "", nan=nan, inf=inf)

    shared = sum(job.tensor.nbytes for job in jobs if job.tensor.nbytes > _TINY)
    each(jobs, lambda: do, threads() if shared >= _ALONE else 1)
    return bad, failed


def with_aliases(content: Content, entries: list[TensorSum]) -> list[TensorSum]:
    """The entries, and one for each alias that a safetensors file records.

    ``{"lm_head.weight": "embed.weight"}`` in ``__metadata__`` says that ``lm_head.weight`` is ``embed.weight``, as
    ``safetensors.torch.save_model`` writes it and ``load_model`` reads it.
    """
    known = {entry.name: entry for entry in entries}
    more: dict[str, TensorSum] = {}  # every shard may have the metadata of all shards
    for file, checkpoint in content.parts:
        if checkpoint.format == "safetensors":
            for alias, name in header_metadata(content.open_file(file)).items():
                if name in known and alias not in known and alias != "format":
                    more[alias] = known[name]._replace(name=alias)
    return [*entries, *more.values()]


# -- how many tensors there are

_TENSOR = "torch._utils._rebuild_tensor_v2"
_ORDERED_DICT = "collections.OrderedDict"
_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})
_MOST_AXES = 8


def tensor_count(checkpoint: Checkpoint) -> int | None:
    """The number of tensors; ``None`` if one may be broken, so that they have to be listed.

    Not listing them halves the time for 10,000 small tensors. ``checkpoint.counted`` is the number of storages.
    """
    if checkpoint.tensors or checkpoint.format != "torch-zip" or not checkpoint.pickles:
        return len(checkpoint.tensors)
    pickle = checkpoint.pickles[0]
    most, count = pickle.end - pickle.start, 0
    waiting: list[Any] = [(pickle.root,)]
    for values in waiting:  # grows during the loop
        most -= len(values)
        if most < 0:  # more values than the stream has bytes: a cycle
            return None
        for node in values:
            kind = type(node)
            if kind in _ATOMS:
                continue
            name = node.callee.full_name if kind is Call and type(node.callee) is Global else ""
            if name == _TENSOR:
                if not _is_ordinary(node.args):
                    return None
                count += 1
            elif kind is list or kind is tuple:
                waiting.append(node)
            elif kind is Dict or (name == _ORDERED_DICT and node.args == () and not (node.states or node.appended)):
                items = node.items or []
                texts = [key for key in items[::2] if type(key) is str]
                if len(set(texts)) < len(texts):  # a repeated key replaces the earlier value
                    return None
                waiting.append(items[1::2])
            else:
                return None
    return count


def _is_ordinary(args: Any) -> bool:
    """Whether these are arguments of a plain tensor that does not reach beyond its storage."""
    if type(args) is not tuple or len(args) != 6:
        return False
    storage, offset, shape, stride, requires_grad, _ = args
    if type(storage) is not Persistent or not (type(shape) is type(stride) is tuple) or len(shape) > _MOST_AXES:
        return False
    if type(offset) is not int or not 0 <= offset < MAX_SIZE or requires_grad is not False:
        return False
    pid: Any = storage.id  # a 5-tuple that ends with the number of elements: checked when storages were counted
    try:
        return bool(reach(offset, shape, stride) <= pid[4])
    except BadTensor:
        return False


# -- how many elements are NaN or infinite
#
# Without its sign bit, a number is infinite if exactly the bits of its exponent are set, and NaN if all of them and
# further ones are set. So adding 1 at the end of the exponent of either carries into the sign bit, and adding one less
# carries for NaN alone. All elements together form one long integer; no carry reaches the next element.


# By dtype: bytes of a number, and bits of its mantissa.
_FORMS = {
    **dict.fromkeys(("float64", "complex128"), (8, 52)),
    **dict.fromkeys(("float32", "complex64"), (4, 23)),
    **dict.fromkeys(("float16", "complex32"), (2, 10)),
    **dict.fromkeys(("bfloat16", "bcomplex32"), (2, 7)),
    "float8_e5m2": (1, 2),
}

# One-byte dtypes that do not follow IEEE 754: no infinity, and few NaNs.
_NANS: dict[str, bytes] = {
    "float8_e4m3fn": b"\x7f\xff",
    "float8_e4m3fnuz": b"\x80",
    "float8_e5m2fnuz": b"\x80",
    "float8_e8m0fnu": b"\xff",
    "float4_e2m1fn_x2": b"",
}

FLOATING = frozenset({*_FORMS, *_NANS})
"""The dtypes that can have NaN or infinities."""


def counted(data: bytes, dtype: str) -> tuple[int, int]:
    """How many numbers are NaN, and how many infinite; ``dtype`` is in ``FLOATING``, a complex element is two numbers.

    >>> import struct
    >>> counted(struct.pack("<3f", 1, float("nan"), float("-inf")), "float32")
    (1, 1)
    """
    if dtype in _NANS:
        return sum(data.count(code) for code in _NANS[dtype]), 0
    width, fraction = _FORMS[dtype]
    sign, count = 1 << 8 * width - 1, len(data) // width
    highest, least = data[width - 1 :: width], sign - (1 << fraction) >> 8 * (width - 1)
    if not any(code in highest or code | 128 in highest for code in range(least, 128)):  # true for nearly all data
        return 0, 0
    signs = _repeated(sign, width, count)
    numbers = int.from_bytes(data, "little")
    numbers ^= numbers & signs
    special = (numbers + _repeated(1 << fraction, width, count) & signs).bit_count()
    nan = (numbers + _repeated((1 << fraction) - 1, width, count) & signs).bit_count()
    return nan, special - nan


@lru_cache(8)
def _repeated(value: int, width: int, count: int) -> int:
    return int.from_bytes(value.to_bytes(width, "little") * count, "little")
