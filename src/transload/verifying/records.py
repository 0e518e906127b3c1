"""Every record of every file of a checkpoint, read and compared with its checksum; and every tensor that is asked for.

``regions`` lists the records, ``sum_regions`` compares them. ``plan_of`` lists the tensors to be hashed or searched for
NaN, ``sum_tensors`` reads them, and compares the records that consist of one tensor on the way. ``damages`` names the
tensors that are concerned by what was found; ``misplaced`` checks the indices of sparse tensors.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Record
from transload.errors import CannotReadError, TransloadError
from transload.findings import Problem
from transload.formats.safetensors import header_metadata
from transload.formats.tensors import MAX_SIZE
from transload.formats.verify import Lost, checksums, mismatch
from transload.io.checksums import fastest_crc32
from transload.io.pool import each, threads
from transload.nodes import Call, Dict, Global, Persistent
from transload.tensors.content import Allowance, ContentError
from transload.verifying import Damage, TensorSum
from transload.verifying.values import FLOATING, counted

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.tensors.content import Content

__all__ = [
    "Key",
    "Options",
    "Plan",
    "Region",
    "Sums",
    "damages",
    "key_of",
    "misplaced",
    "plan_of",
    "regions",
    "sum_regions",
    "sum_tensors",
    "tensor_count",
    "with_aliases",
]


def with_aliases(content: Content, entries: list[TensorSum]) -> list[TensorSum]:
    """The entries, and one for each further name of a tensor that a safetensors file records.

    ``{"lm_head.weight": "embed.weight"}`` in ``__metadata__`` says that ``lm_head.weight`` is ``embed.weight``, as
    ``safetensors.torch.save_model`` writes it and ``load_model`` reads it.
    """
    known = {entry.name: entry for entry in entries}
    more: dict[str, TensorSum] = {}  # each shard may have the metadata of all
    for file, checkpoint in content.parts:
        if checkpoint.format == "safetensors":
            pairs = header_metadata(content.open_file(file)).items()
            found = {alias: name for alias, name in pairs if name in known and alias not in known and alias != "format"}
            more.update({alias: known[name]._replace(name=alias) for alias, name in found.items()})
    return [*entries, *more.values()]


_PIECE = 1 << 20
_CODES = {"int64": "q", "int32": "i"}
_COMPRESSED = {"sparse_csr": 1, "sparse_bsr": 1, "sparse_csc": 0, "sparse_bsc": 0}  # the axis plain indices run along


class _OutsideError(Exception):
    """What is wrong with the indices."""


def misplaced(content: Content) -> dict[str, tuple[str, str]]:
    """The sparse tensors, by name, whose parts do not fit together, and why. Those that cannot be read are left out."""
    allowance = Allowance(content.checkpoint)
    wrong = {}
    for tensor in _sparse(content.checkpoint.tensors):
        try:
            for part in tensor.parts[:-1]:
                allowance.spend(part)
            (_check_coordinates if tensor.kind == "sparse_coo" else _check_compressed)(content, tensor)
        except _OutsideError as error:  # noqa: PERF203 - one tensor does not stop the others
            wrong[tensor.name] = "broken", str(error)
        except TransloadError:  # the bytes cannot be read, which is reported as for any other tensor
            continue
    return wrong


def _sparse(tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.kind == "sparse_coo" or tensor.kind in _COMPRESSED:
            yield tensor
        elif tensor.parts:
            yield from _sparse(tensor.parts)


def _check_integers(*parts: Tensor) -> None:
    if any(part.dtype not in _CODES for part in parts):
        raise _OutsideError("its indices are not integers")


def _check_coordinates(content: Content, tensor: Tensor) -> None:
    indices, values = tensor.parts
    _check_integers(indices)
    size = tensor.shape
    if len(indices.shape) != 2 or indices.shape[0] > len(size):
        raise _OutsideError(f"its indices have the shape {indices.shape}, and it the shape {size}")
    axes, count = indices.shape
    if values.shape != (count, *size[axes:]):
        raise _OutsideError(f"it has {count:,} indices, and values of the shape {values.shape}")
    numbers = _numbers(content, indices)
    for axis, length in enumerate(size[:axes]):
        outside = next((number for number in islice(numbers, count) if not 0 <= number < length), None)
        if outside is not None:
            raise _OutsideError(f"an index is {outside}, and axis {axis} has {length:,} places")


def _check_compressed(content: Content, tensor: Tensor) -> None:
    """The rows of a CSR tensor; of the others what corresponds to them: columns, or rows and columns of blocks."""
    compressed, plain, values = tensor.parts
    _check_integers(compressed, plain)
    batch, count = plain.shape[:-1], plain.shape[-1] if plain.shape else 0
    rank = len(batch)
    along = _COMPRESSED[tensor.kind]
    size = tensor.shape[rank : rank + 2]
    block = values.shape[rank + 1 : rank + 3] if tensor.kind in ("sparse_bsr", "sparse_bsc") else (1, 1)
    if len(size) != 2 or len(block) != 2 or 0 in block or values.shape[: rank + 1] != plain.shape:
        raise _OutsideError("its parts do not fit together")
    rows, columns = size[1 - along] // block[1 - along], size[along] // block[along]
    if compressed.shape != (*batch, rows + 1):
        raise _OutsideError(f"it has {rows:,} rows, and their ends have the shape {compressed.shape}")
    ends, places = _numbers(content, compressed), _numbers(content, plain)
    for _ in range(prod(batch)):
        _check_rows(islice(ends, rows + 1), islice(places, count), count, columns)


def _check_rows(ends: Iterator[int], places: Iterator[int], count: int, columns: int) -> None:
    begin = next(ends)
    if begin:
        raise _OutsideError(f"its first row begins at {begin}")
    for end in ends:
        if not begin <= end <= min(begin + columns, count):
            raise _OutsideError(
                f"a row reaches from {begin:,} to {end:,}, with {columns:,} columns and {count:,} values"
            )
        last = -1
        for place in islice(places, end - begin):
            if not last < place < columns:
                raise _OutsideError(f"an index is {place}, after {last}, in a row of {columns:,}")
            last = place
        begin = end
    if begin != count:
        raise _OutsideError(f"its rows have {begin:,} values of {count:,}")


def _numbers(content: Content, tensor: Tensor) -> Iterator[int]:
    for piece in content.pieces(tensor, _PIECE):
        numbers = array(_CODES[tensor.dtype], bytes(piece))
        if sys.byteorder == "big":
            numbers.byteswap()
        yield from numbers


Key = tuple[str, str, int]
"""File, name and position, which identify a record of a checkpoint."""


class Region(NamedTuple):
    """A file, and the records in it that have a position."""

    file: str
    records: tuple[Record, ...]


class Sums(NamedTuple):
    """How many records were compared, how many have no checksum, and which are not what was saved."""

    compared: int
    unsummed: int
    bad: dict[Key, Problem]


def regions(content: Content) -> list[Region]:
    """The records of each file: those of its archive, or the storages themselves where there is none."""
    from transload.formats.zip import read_index, starts_like_zip

    known = {name: checkpoint.records for name, checkpoint in content.parts}
    storages: dict[str, list[Storage]] = {name: [] for name in known}
    for storage in content.checkpoint.storages:
        storages.setdefault(storage.file, []).append(storage)
    out = []
    for file, inside in storages.items():
        records: Iterable[Record] = known.get(file) or ()
        # The file of a rank is an archive; one of torch.distributed.checkpoint is a row of them, known by its storages.
        if not records and content.checkpoint.format in ("deepspeed", "megatron") and not file.endswith(".distcp"):
            source = content.open_file(file)
            records = read_index(source).records.values() if starts_like_zip(source) else ()
        if not records:
            records = [Record(one.record or one.key, one.offset, one.stored, one.stored, one.crc32) for one in inside]
        out.append(Region(file, tuple(record for record in records if record.offset is not None)))
    return out


def sum_regions(
    content: Content, every: Iterable[Region], skip: Collection[Key], tell: Callable[[int], None] | None = None
) -> Sums:
    """Read and compare all records but those to ``skip``, which ``sum_tensors`` compares."""
    compared = unsummed = 0
    bad: dict[Key, Problem] = {}
    for file, records in every:
        compared += sum(record.crc32 is not None for record in records)
        unsummed += sum(record.crc32 is None and record.size > 0 for record in records)
        todo = [record for record in records if key_of(file, record) not in skip] if skip else records
        for index, value in checksums(content.open_file(file), todo, tell).items():
            record = todo[index]
            if value != record.crc32 and (record.crc32 is not None or isinstance(value, Lost)):
                bad[key_of(file, record)] = mismatch(record, value)
    return Sums(compared, unsummed, bad)


def key_of(file: str, record: Record) -> Key:
    """The key of a record."""
    return file, record.name, record.offset or 0


_TENSOR = "torch._utils._rebuild_tensor_v2"
_ORDERED_DICT = "collections.OrderedDict"
_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})
_MOST_AXES = 8


class _OddError(Exception):
    """Something that may be in order, or not: the tensors have to be listed."""


def tensor_count(checkpoint: Checkpoint) -> int | None:
    """The number of tensors; ``None`` if they were only counted and one may be broken, so they have to be listed.

    Not listing them halves the time for 10,000 small tensors. ``checkpoint.counted`` is the number of storages.
    """
    if checkpoint.tensors or checkpoint.format != "torch-zip" or not checkpoint.pickles:
        return len(checkpoint.tensors)
    pickle = checkpoint.pickles[0]
    most, count = pickle.end - pickle.start, 0
    waiting: list[Any] = [(pickle.root,)]
    try:
        for values in waiting:  # which grows meanwhile
            most -= len(values)
            if most < 0:  # more values than the stream has bytes: a cycle
                return None
            below = [value for value in values if type(value) not in _ATOMS]
            containers = [value for value in below if not _is_tensor(value)]
            waiting += map(_values, containers)
            count += len(below) - len(containers)
    except _OddError:
        return None
    return count


def _values(node: Any) -> Any:
    """What is in a container."""
    kind = type(node)
    if kind is list or kind is tuple:
        return node
    ordered = (
        kind is Call
        and type(node.callee) is Global
        and node.callee.full_name == _ORDERED_DICT
        and node.args == ()
        and not (node.states or node.appended)
    )
    if not ordered and kind is not Dict:
        raise _OddError
    items = node.items or []
    texts = [key for key in items[::2] if type(key) is str]
    if len(set(texts)) < len(texts):  # of the same key the last one counts
        raise _OddError
    return items[1::2]


def _is_tensor(node: Any) -> bool:
    """Whether a node is a tensor; ``_OddError`` if it is not a plain one, or reaches beyond its storage."""
    if type(node) is not Call or type(node.callee) is not Global or node.callee.full_name != _TENSOR:
        return False
    args = node.args
    if type(args) is not tuple or len(args) != 6:
        raise _OddError
    storage, last, shape, stride, requires_grad, _ = args
    if type(storage) is not Persistent or not (type(shape) is type(stride) is tuple) or len(shape) != len(stride):
        raise _OddError
    if type(last) is not int or not 0 <= last < MAX_SIZE or requires_grad is not False or len(shape) > _MOST_AXES:
        raise _OddError
    numel = 1
    for size, step in zip(shape, stride):  # noqa: B905 - as long as each other, and a keyword costs as much as a pair
        if not (type(size) is type(step) is int) or size < 0 or not 0 <= step < MAX_SIZE:
            raise _OddError
        numel *= size
        if numel >= MAX_SIZE:
            raise _OddError
        last += (size - 1) * step
    pid: Any = storage.id  # of five parts, the last the number of elements: checked when storages were counted
    if numel and last >= pid[4]:
        raise _OddError
    return True


_NAMED = {"tensor-broken": "broken", "dcp-piece-missing": "missing"}
_MAX_INDEX = 100_000_000
_DESCRIPTOR = 24  # bytes behind a record, at most, that hold its checksum


def damages(
    content: Content, every: list[Region], bad: Mapping[Key, Problem], failed: Mapping[str, tuple[str, str]]
) -> tuple[Damage, ...]:
    """Every damaged tensor once, in the order of the file; then those that are missing altogether."""
    checkpoint = content.checkpoint
    if checkpoint.counted and not bad:  # all sizes were compared when the storages were counted
        return ()
    storages = _bad_storages(content, every, bad)
    sound = {
        each.id
        for each in checkpoint.storages
        if each.stored >= each.nbytes and (each.offset is not None or each.compressed) and each.id not in storages
    }
    out: dict[str, Damage] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage in sound and not failed and not tensor.parts:  # nearly all of them, nearly always
            continue
        damage = _damage(content, tensor, storages, failed)
        if damage is not None:
            out.setdefault(tensor.name, damage)
    for problem in checkpoint.problems:
        kind = _NAMED.get(problem.code)
        if kind and problem.where:
            out.setdefault(problem.where, Damage(problem.where, kind, problem.detail))
    existing = {tensor.name for tensor in checkpoint.tensors}
    for name, shard in _weight_map(content).items():
        if name not in existing:
            out.setdefault(name, Damage(name, "missing", f"the index puts it into {shard}"))
    return tuple(out.values())


def _damage(
    content: Content, tensor: Tensor, storages: dict[str, Damage], failed: Mapping[str, tuple[str, str]]
) -> Damage | None:
    for part in _with_parts(tensor):
        if part.storage in storages:
            return storages[part.storage]._replace(name=tensor.name)
        if part.name in failed:
            return Damage(tensor.name, *failed[part.name])
    why = content.missing(tensor)
    return Damage(tensor.name, "cut", why) if why else None


def _with_parts(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for part in tensor.parts:
        yield from _with_parts(part)


def _bad_storages(content: Content, every: list[Region], bad: Mapping[Key, Problem]) -> dict[str, Damage]:
    """The damage of each storage whose record is not what was saved, or has another length than it should."""
    records = {key_of(region.file, record): record for region in every for record in region.records}
    packed = {key[:2]: key for key in records}  # a compressed storage does not know its position
    # Files whose storages all had checksums when they were saved: torch writes them all, or none.
    some = {file for file, held in every if any(record.crc32 is not None for record in held)}
    rows = {file for file, _ in every if file.endswith(".distcp")}  # rows of archives, written by one program
    summed = some & {name for name, checkpoint in content.parts if checkpoint.records} | (
        rows if some & rows else set()
    )
    out = dict(_displaced(content))
    for storage in content.checkpoint.storages:
        name = storage.record or storage.key
        key = packed.get((storage.file, name)) if storage.compressed else (storage.file, name, storage.offset or 0)
        if key is None:
            continue
        problem, record = bad.get(key), records.get(key)
        where = _where(storage, name)
        if problem is not None:
            kind = "unreadable" if problem.code == "record-unreadable" else "checksum"
            out[storage.id] = Damage("", kind, f"{where}: {problem.detail}")
        elif record is None:
            continue
        elif storage.file in summed and _lost_its_checksum(content, storage.file, record):
            out[storage.id] = Damage("", "checksum", f"{where}: its checksum is overwritten")
        elif storage.record and record.size != storage.nbytes and record.stored >= record.size:
            detail = f"{where} holds {record.size:,} bytes, the index wants {storage.nbytes:,}"
            out[storage.id] = Damage("", "cut" if record.size < storage.nbytes else "broken", detail)
    return out


def _lost_its_checksum(content: Content, file: str, record: Record) -> bool:
    """Whether a checksum is missing though the file reaches beyond it; if it ends before, all bytes may be there."""
    if record.crc32 is not None or not record.size:
        return False
    return (record.offset or 0) + record.stored + _DESCRIPTOR <= content.open_file(file).size


def _displaced(content: Content) -> Iterator[tuple[str, Damage]]:
    """The last storage of each legacy stream in which a storage does not begin where it should."""
    for file, checkpoint in content.parts:
        if checkpoint.format == "torch-legacy" and any(p.code == "storage-size" for p in checkpoint.problems):
            storages = [each for each in content.checkpoint.storages if each.file == file and each.offset is not None]
            for last in sorted(storages, key=lambda each: each.offset or 0)[-1:]:
                yield last.id, Damage("", "broken", f"{_where(last, last.record)}: no other begins where it ends")


def _where(storage: Storage, name: str) -> str:
    return f"{storage.file} › {name}" if storage.file and storage.file != name else name


def _weight_map(content: Content) -> dict[str, str]:
    """The shard of each tensor, as the index of a sharded checkpoint has it."""
    import json

    index = next((part.name for part in content.checkpoint.parts if part.kind == "index"), "")
    if content.checkpoint.format != "sharded" or not index:
        return {}
    try:
        table = json.loads(content.open_file(index).read(0, _MAX_INDEX))
    except (CannotReadError, ValueError, RecursionError):
        return {}
    weights = table.get("weight_map") if isinstance(table, dict) else None
    return {key: value for key, value in weights.items() if type(value) is str} if isinstance(weights, dict) else {}


_ALONE = 4 << 20  # fewer bytes are not worth starting threads
_TINY = (
    8 << 10
)  # nor are tensors of so few: finding them takes longer than hashing them, and is done by one thread at a time


class Options(NamedTuple):
    """What to find out about each tensor."""

    hashes: bool = False
    values: bool = False


class Job(NamedTuple):
    """Elements to be read, under all the names they have, and the record that consists of them alone, if one does."""

    tensor: Tensor
    places: list[int]
    nbytes: int
    key: Key | None = None
    record: Record | None = None


class Plan(NamedTuple):
    """All entries of a list of tensors, and the jobs that fill some of them."""

    entries: list[TensorSum]
    jobs: list[Job]


def plan_of(content: Content, options: Options, every: Sequence[Region]) -> Plan:
    """Every tensor, and the parts of those that are made of others; each view of a storage is read once."""
    plan = Plan([], [])
    if not any(options):
        return plan
    records = {(region.file, record.offset): record for region in every for record in region.records if record.size}
    seen: dict[tuple[object, ...], Job] = {}
    allowance = Allowance(content.checkpoint)
    for tensor, note in _leaves(content.checkpoint.tensors):
        place = len(plan.entries)
        plan.entries.append(_entry(tensor, note))
        view = (tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts)
        if note or not (options.hashes or tensor.dtype in FLOATING):
            continue
        if view in seen:
            seen[view].places.append(place)
            continue
        try:
            allowance.spend(tensor)
        except ContentError as error:
            plan.entries[place] = plan.entries[place]._replace(note=error.what)
            continue
        run = content.run(tensor)
        record = records.get((run.file, run.offset)) if run is not None else None
        alone = run is not None and record is not None and not record.method and record.stored == run.nbytes
        if run is None or record is None or record.crc32 is None or not alone:
            seen[view] = Job(tensor, [place], tensor.nbytes)
        else:
            seen[view] = Job(tensor, [place], tensor.nbytes, key_of(run.file, record), record)

    def position(job: Job) -> tuple[str, int]:
        storage = content.storage(job.tensor)
        return (storage.file, job.tensor.file_offset or 0) if storage is not None else ("", 0)

    plan.jobs.extend(sorted(seen.values(), key=position))
    return plan


def _leaves(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """Tensors with elements of their own; and those without, with the reason."""
    for tensor in tensors:
        if tensor.kind in ("strided", "sharded") or (tensor.kind == "device" and len(tensor.parts) == 1):
            yield tensor, ""
        elif tensor.kind == "quantized":
            yield tensor._replace(kind="strided"), ""
        else:
            yield tensor, f"it is made of {len(tensor.parts)} others" if tensor.parts else "it has no elements here"
            yield from _leaves(tensor.parts)


def _entry(tensor: Tensor, note: str) -> TensorSum:
    dtype = f"{tensor.dtype} {tensor.kind}" if note else tensor.dtype
    return TensorSum(tensor.name, dtype, tensor.shape, 0 if note else tensor.nbytes, note=note)


def sum_tensors(
    content: Content, plan: Plan, options: Options, tell: Callable[[int], None] | None
) -> tuple[dict[Key, Problem], dict[str, tuple[str, str]]]:
    """Do all jobs of a plan and complete its entries.

    Returns the records that are not what was saved, and the tensors that could not be read, with kind and reason.
    """
    bad: dict[Key, Problem] = {}
    failed: dict[str, tuple[str, str]] = {}
    lock = Lock()

    def count(nbytes: int) -> None:
        if tell is not None:
            with lock:
                tell(nbytes)

    def do(job: Job) -> None:
        try:
            result = _read(content, job, options, bad, count)
        except TransloadError as error:
            kind = "unreadable" if isinstance(error, CannotReadError) else "cut"
            for place in job.places:
                plan.entries[place] = plan.entries[place]._replace(note=error.what)
                failed[plan.entries[place].name] = kind, error.what
            if job.key is not None and job.record is not None:
                bad[job.key] = mismatch(job.record, Lost(error.what, "record-unreadable"))
            return
        for place in job.places:
            known = plan.entries[place]
            plan.entries[place] = result._replace(name=known.name, note=known.note)

    shared = sum(job.nbytes for job in plan.jobs if job.nbytes > _TINY)
    each(plan.jobs, lambda: do, threads() if shared >= _ALONE else 1)
    return bad, failed


def _read(
    content: Content, job: Job, options: Options, bad: dict[Key, Problem], tell: Callable[[int], None]
) -> TensorSum:
    from hashlib import sha256

    tensor, record = job.tensor, job.record
    digest = sha256() if options.hashes else None
    compute, value = fastest_crc32(), 0
    nan, inf = (0, 0) if options.values and tensor.dtype in FLOATING else (None, None)
    for piece in content.pieces(tensor, _PIECE):
        if digest is not None:
            digest.update(piece)
        if nan is not None and inf is not None:
            more = counted(bytes(piece), tensor.dtype)
            nan, inf = nan + more.nan, inf + more.inf
        if record is not None:
            value = compute(piece, value)
        tell(len(piece))
    if job.key is not None and record is not None and value != record.crc32:
        bad[job.key] = mismatch(record, value)
    return _entry(tensor, "")._replace(sha256=digest.hexdigest() if digest else "", nan=nan, inf=inf)
