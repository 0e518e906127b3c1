"""Every record of every file of a checkpoint, read and compared with its checksum where it has one."""

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
from transload.tensors import Allowance, ContentError
from transload.verifying import Damage, TensorSum
from transload.verifying.values import FLOATING, counted

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.tensors import Content

__all__ = [
    "Key",
    "Plan",
    "Region",
    "Sums",
    "Wish",
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
    """The sparse tensors, by name, whose parts do not go together, and why. Those that cannot be read are not here."""
    allowance = Allowance(content.checkpoint)
    found = ((tensor.name, _wrong(content, tensor, allowance)) for tensor in _sparse(content.checkpoint.tensors))
    return {name: ("broken", why) for name, why in found if why}


def _wrong(content: Content, tensor: Tensor, allowance: Allowance) -> str:
    try:
        for part in tensor.parts[:-1]:
            allowance.spend(part)
        _check(content, tensor)
    except _OutsideError as error:
        return str(error)
    except TransloadError:  # a matter of the bytes, which are looked at as of any other tensor
        return ""
    return ""


def _sparse(tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.kind == "sparse_coo" or tensor.kind in _COMPRESSED:
            yield tensor
        elif tensor.parts:
            yield from _sparse(tensor.parts)


def _check(content: Content, tensor: Tensor) -> None:
    if any(part.dtype not in _CODES for part in tensor.parts[:-1]):
        raise _OutsideError("its indices are no whole numbers")
    if tensor.kind == "sparse_coo":
        _check_coordinates(content, tensor)
    else:
        _check_compressed(content, tensor)


def _check_coordinates(content: Content, tensor: Tensor) -> None:
    indices, values = tensor.parts
    size = tensor.shape
    if len(indices.shape) != 2 or indices.shape[0] > len(size):
        raise _OutsideError(f"its indices have the shape {indices.shape}, and it the shape {size}")
    axes, count = indices.shape
    if values.shape != (count, *size[axes:]):
        raise _OutsideError(f"it has {count:,} indices, and values of the shape {values.shape}")
    numbers = _numbers(content, indices)
    for axis in range(axes):
        _check_range(islice(numbers, count), size[axis], axis)


def _check_range(numbers: Iterator[int], size: int, axis: int) -> None:
    odd = next((number for number in numbers if not 0 <= number < size), None)
    if odd is not None:
        raise _OutsideError(f"an index is {odd}, and axis {axis} has {size:,} places")


def _check_compressed(content: Content, tensor: Tensor) -> None:
    """Rows of a CSR tensor; of the others what stands for them: columns, or rows and columns of blocks."""
    compressed, plain, values = tensor.parts
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
        held = array(_CODES[tensor.dtype], bytes(piece))
        if sys.byteorder == "big":
            held.byteswap()
        yield from held


Key = tuple[str, str, int]
"""File, name and position: what tells a record from all others of a checkpoint."""


class Region(NamedTuple):
    """A file, and the records in it that lie somewhere."""

    file: str
    records: tuple[Record, ...]


class Sums(NamedTuple):
    """What came of comparing: how many were, how many have no checksum, and which are not what was saved."""

    compared: int
    unsummed: int
    bad: dict[Key, Problem]


def regions(content: Content) -> list[Region]:
    """The records of each file: those of its archive, or the storages themselves where there is none."""
    known = {name: checkpoint.records for name, checkpoint in content.parts}
    storages: dict[str, list[Storage]] = {name: [] for name in known}
    for storage in content.checkpoint.storages:
        storages.setdefault(storage.file, []).append(storage)
    out = []
    for file, held in storages.items():
        records = known.get(file) or _archived(content, file) or _as_records(held)
        out.append(Region(file, tuple(record for record in records if record.offset is not None)))
    return out


def _archived(content: Content, file: str) -> Iterable[Record]:
    """The records of a rank's file. One of distributed checkpoints is a row of archives, and told by its storages."""
    from transload.formats.zip import read_index, starts_like_zip

    if content.checkpoint.format not in ("deepspeed", "megatron") or file.endswith(".distcp"):
        return ()
    source = content.open_file(file)
    return read_index(source).records.values() if starts_like_zip(source) else ()


def _as_records(storages: Iterable[Storage]) -> Iterable[Record]:
    return [Record(each.record or each.key, each.offset, each.stored, each.stored, each.crc32) for each in storages]


def sum_regions(
    content: Content, every: Iterable[Region], skip: Collection[Key], tell: Callable[[int], None] | None = None
) -> Sums:
    """Read and compare all records but those to ``skip``, which somebody else does."""
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


class _Odd(Exception):  # noqa: N818 - a signal inside this module
    """Something that may be in order, or not: the long way tells."""


def tensor_count(checkpoint: Checkpoint) -> int | None:
    """Of a checkpoint whose tensors were only counted, how many names have one; ``None`` if any may be broken.

    The same number as of tensors that are listed. ``counted`` itself is of storages, and has looked at those alone.
    """
    pickle = checkpoint.pickles[0]
    try:
        return sum(_counts(pickle.root, pickle.end - pickle.start))
    except _Odd:
        return None


def _counts(root: object, most: int) -> Iterator[int]:
    """The tensors in each container. Whoever visits more values than the stream has bytes goes in circles."""
    waiting: list[Any] = [(root,)]
    for values in waiting:  # which grows meanwhile
        most -= len(values)
        if most < 0:
            raise _Odd
        below = [value for value in values if type(value) not in _ATOMS]
        held = [value for value in below if not _is_tensor(value)]
        waiting += map(_values, held)
        yield len(below) - len(held)


def _values(node: Any) -> Any:
    """What lies in a container."""
    kind = type(node)
    if kind is list or kind is tuple:
        return node
    if kind is Call and _is_dictionary(node):
        return _of_items(node.items or [])
    if kind is Dict:
        return _of_items(node.items)
    raise _Odd


def _of_items(items: list[Any]) -> list[Any]:
    texts = [key for key in items[::2] if type(key) is str]
    if len(set(texts)) < len(texts):  # of the same key the last one counts
        raise _Odd
    return items[1::2]


def _is_dictionary(node: Call) -> bool:
    callee = node.callee
    ordered = type(callee) is Global and callee.full_name == _ORDERED_DICT
    return ordered and node.args == () and not (node.states or node.appended)


def _is_tensor(node: Any) -> bool:
    """Whether a node is a tensor; ``_Odd`` if it is one that is not plain, or reaches beyond its storage."""
    if type(node) is not Call or type(node.callee) is not Global or node.callee.full_name != _TENSOR:
        return False
    args = node.args
    if type(args) is not tuple or len(args) != 6:
        raise _Odd
    storage, last, shape, stride, requires_grad, _ = args
    if type(storage) is not Persistent or not (type(shape) is type(stride) is tuple) or len(shape) != len(stride):
        raise _Odd
    if type(last) is not int or not 0 <= last < MAX_SIZE or requires_grad is not False or len(shape) > _MOST_AXES:
        raise _Odd
    numel = 1
    for size, step in zip(shape, stride):  # noqa: B905 - as long as each other, and a keyword costs as much as a pair
        if not (type(size) is type(step) is int) or size < 0 or not 0 <= step < MAX_SIZE:
            raise _Odd
        numel *= size
        if numel >= MAX_SIZE:
            raise _Odd
        last += (size - 1) * step
    held: Any = storage.id  # five parts, the last the number of elements: those were looked at when they were counted
    if numel and last >= held[4]:
        raise _Odd
    return True


_NAMED = {"tensor-broken": "broken", "dcp-piece-missing": "missing"}
_MAX_INDEX = 100_000_000
_DESCRIPTOR = 24  # bytes behind a record, at most, that hold its checksum


def damages(
    content: Content, every: list[Region], bad: Mapping[Key, Problem], failed: Mapping[str, tuple[str, str]]
) -> tuple[Damage, ...]:
    """Every damaged tensor once, in the order of the file; then those that are not there at all."""
    if content.checkpoint.counted and not bad:  # of what is ordinary, all sizes were compared when it was counted
        return ()
    storages = _bad_storages(content, every, bad)
    sound = {each.id for each in content.checkpoint.storages if _is_there(each) and each.id not in storages}
    found: dict[str, Damage] = {}
    for tensor in content.checkpoint.tensors:
        if tensor.storage in sound and not failed and not tensor.parts:  # nearly all of them, nearly always
            continue
        for damage in _of_tensor(content, tensor, storages, failed):
            found.setdefault(tensor.name, damage)
    for problem in content.checkpoint.problems:
        kind = _NAMED.get(problem.code)
        if kind and problem.where:
            found.setdefault(problem.where, Damage(problem.where, kind, problem.detail))
    for name, shard in _expected(content).items():
        found.setdefault(name, Damage(name, "missing", f"the index puts it into {shard}"))
    return tuple(found.values())


def _is_there(storage: Storage) -> bool:
    return storage.stored >= storage.nbytes and (storage.offset is not None or storage.compressed)


def _bad_storages(content: Content, every: list[Region], bad: Mapping[Key, Problem]) -> dict[str, Damage]:
    """What is wrong with each storage whose record is not what was saved, or not as long as it should be."""
    records = {key_of(region.file, record): record for region in every for record in region.records}
    packed = {key[:2]: key for key in records}  # a packed storage does not know where it lies
    summed = _summed(content, every)
    out = dict(_displaced(content))
    for storage in content.checkpoint.storages:
        name = storage.record or storage.key
        key = packed.get((storage.file, name)) if storage.compressed else (storage.file, name, storage.offset or 0)
        if key is None:
            continue
        problem, record = bad.get(key), records.get(key)
        if problem is not None:
            kind = "unreadable" if problem.code == "record-unreadable" else "checksum"
            out[storage.id] = Damage("", kind, f"{_within(storage, name)}: {problem.detail}")
        elif record is not None and storage.file in summed and _is_unvouched(content, storage.file, record):
            out[storage.id] = Damage("", "checksum", f"{_within(storage, name)}: its checksum is overwritten")
        elif record is not None and _misfits(record, storage):
            detail = f"{_within(storage, name)} holds {record.size:,} bytes, the index wants {storage.nbytes:,}"
            out[storage.id] = Damage("", "cut" if record.size < storage.nbytes else "broken", detail)
    return out


def _summed(content: Content, every: list[Region]) -> set[str]:
    """The files whose storages all have checksums where those are not overwritten: torch writes them all, or none."""
    archives = {name for name, checkpoint in content.parts if checkpoint.records}
    found = {file for file, records in every if any(record.crc32 is not None for record in records)}
    rows = {file for file, _ in every if file.endswith(".distcp")}  # of archives, by one program
    return (found & archives) | (rows if found & rows else set())


def _is_unvouched(content: Content, file: str, record: Record) -> bool:
    """Whether its checksum is not where it was; of one that the file ends before, all bytes may be there."""
    if record.crc32 is not None or not record.size:
        return False
    return (record.offset or 0) + record.stored + _DESCRIPTOR <= content.open_file(file).size


def _displaced(content: Content) -> Iterator[tuple[str, Damage]]:
    """Of each legacy stream in which a storage does not begin where it should, the one that ends there."""
    for file, checkpoint in content.parts:
        if checkpoint.format == "torch-legacy" and any(p.code == "storage-size" for p in checkpoint.problems):
            held = [each for each in content.checkpoint.storages if each.file == file and each.offset is not None]
            for last in sorted(held, key=lambda each: each.offset or 0)[-1:]:
                yield last.id, Damage("", "broken", f"{_within(last, last.record)}: no other begins where it ends")


def _misfits(record: Record, storage: Storage) -> bool:
    return bool(storage.record) and record.size != storage.nbytes and record.stored >= record.size


def _within(storage: Storage, name: str) -> str:
    return f"{storage.file} › {name}" if storage.file and storage.file != name else name


def _of_tensor(
    content: Content, tensor: Tensor, storages: dict[str, Damage], failed: Mapping[str, tuple[str, str]]
) -> Iterator[Damage]:
    for part in _flat(tensor):
        if part.storage in storages:
            yield storages[part.storage]._replace(name=tensor.name)
        if part.name in failed:
            yield Damage(tensor.name, *failed[part.name])
    why = content.missing(tensor)
    if why:
        yield Damage(tensor.name, "cut", why)


def _flat(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for part in tensor.parts:
        yield from _flat(part)


def _expected(content: Content) -> dict[str, str]:
    """Tensors that an index of shards names and nobody has, and the shard they should be in."""
    checkpoint = content.checkpoint
    index = next((part.name for part in checkpoint.parts if part.kind == "index"), "")
    if checkpoint.format != "sharded" or not index:
        return {}
    from transload.errors import CannotReadError

    try:
        source = content.open_file(index)
        weights = _weights(source.read(0, _MAX_INDEX))
    except CannotReadError:
        return {}
    held = {tensor.name for tensor in checkpoint.tensors}
    return {name: shard for name, shard in weights.items() if name not in held}


def _weights(text: bytes) -> dict[str, str]:
    import json

    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    weights = table.get("weight_map") if isinstance(table, dict) else None
    return {key: value for key, value in weights.items() if type(value) is str} if isinstance(weights, dict) else {}


_ALONE = 4 << 20  # fewer bytes are not worth starting threads
_TINY = 8 << 10  # nor are tensors of so few: they take longer to find than to hash, and one at a time does that
_View = tuple[object, ...]


class Wish(NamedTuple):
    """What is wanted of each tensor."""

    hashes: bool = False
    values: bool = False


class Job(NamedTuple):
    """Elements to be read, under all the names they have, and the record that is just them."""

    tensor: Tensor
    places: list[int]
    nbytes: int
    key: Key | None = None
    record: Record | None = None


class Plan(NamedTuple):
    """All entries of a list of tensors, and the jobs that fill some of them."""

    entries: list[TensorSum]
    jobs: list[Job]

    @property
    def nbytes(self) -> int:
        """How much the jobs read."""
        return sum(job.nbytes for job in self.jobs)

    @property
    def summed(self) -> set[Key]:
        """The records that are compared on the way."""
        return {job.key for job in self.jobs if job.key is not None}


def plan_of(content: Content, wish: Wish, every: Sequence[Region]) -> Plan:
    """Every tensor, and the parts of those that are made of others; each view of a storage is read once."""
    plan = Plan([], [])
    if not any(wish):
        return plan
    records = {(region.file, record.offset): record for region in every for record in region.records if record.size}
    seen: dict[_View, Job] = {}
    allowance = Allowance(content.checkpoint)
    for tensor, note in _leaves(content.checkpoint.tensors):
        place = len(plan.entries)
        plan.entries.append(_entry(tensor, note))
        view = (tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts)
        if note or not (wish.hashes or tensor.dtype in FLOATING):
            continue
        if view in seen:
            seen[view].places.append(place)
            continue
        try:
            allowance.spend(tensor)
        except ContentError as error:
            plan.entries[place] = plan.entries[place]._replace(note=error.what)
            continue
        seen[view] = _job(content, tensor, place, records)
    plan.jobs.extend(sorted(seen.values(), key=lambda job: _where(content, job.tensor)))
    return plan


def _leaves(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """Tensors with elements of their own; and those without, with a word on why."""
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


def _job(content: Content, tensor: Tensor, place: int, records: dict[tuple[str, int | None], Record]) -> Job:
    run, nbytes = content.run(tensor), tensor.nbytes
    record = records.get((run.file, run.offset)) if run is not None else None
    if run is None or record is None or record.method or record.stored != run.nbytes or record.crc32 is None:
        return Job(tensor, [place], nbytes)
    return Job(tensor, [place], nbytes, key_of(run.file, record), record)


def _where(content: Content, tensor: Tensor) -> tuple[str, int]:
    storage = content.storage(tensor)
    return (storage.file, tensor.file_offset or 0) if storage is not None else ("", 0)


class Found(NamedTuple):
    """What the jobs have found: records that are not what was saved, and tensors that could not be read, and why."""

    bad: dict[Key, Problem]
    failed: dict[str, tuple[str, str]]


def sum_tensors(content: Content, plan: Plan, wish: Wish, tell: Callable[[int], None] | None) -> Found:
    """Do all jobs of a plan, and enter in it what came out."""
    found, lock = Found({}, {}), Lock()

    def do(job: Job) -> None:
        try:
            made = _read(content, job, wish, found.bad, told)
        except TransloadError as error:
            kind = "unreadable" if isinstance(error, CannotReadError) else "cut"
            for place in job.places:
                plan.entries[place] = plan.entries[place]._replace(note=error.what)
                found.failed[plan.entries[place].name] = kind, error.what
            if job.key is not None and job.record is not None:
                found.bad[job.key] = mismatch(job.record, Lost(error.what, "record-unreadable"))
            return
        for place in job.places:
            known = plan.entries[place]
            plan.entries[place] = made._replace(name=known.name, note=known.note)

    def told(count: int) -> None:
        if tell is not None:
            with lock:
                tell(count)

    shared = sum(job.nbytes for job in plan.jobs if job.nbytes > _TINY)
    each(plan.jobs, lambda: do, threads() if shared >= _ALONE else 1)
    return found


def _read(content: Content, job: Job, wish: Wish, bad: dict[Key, Problem], tell: Callable[[int], None]) -> TensorSum:
    from hashlib import sha256

    tensor, record = job.tensor, job.record
    digest = sha256() if wish.hashes else None
    compute, value = fastest_crc32(), 0
    nan, inf = (0, 0) if wish.values and tensor.dtype in FLOATING else (None, None)
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
