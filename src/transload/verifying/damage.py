"""Which tensors are not what they were, each by its name: from records, sizes, indexes and what could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from transload.verifying.records import key_of
from transload.verifying.result import Damage

if TYPE_CHECKING:
    from transload.checkpoint import Record, Storage, Tensor
    from transload.content import Content
    from transload.findings import Problem
    from transload.verifying.records import Key, Region

__all__ = ["damages"]

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
        for each in _of_tensor(content, tensor, storages, failed):
            found.setdefault(tensor.name, each)
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
