"""Which records and tensors of an open checkpoint differ from what was saved.

``records_of`` lists the records of every file, ``sum_records`` reads them and compares their checksums, ``damages``
names the affected tensors. ``misplaced`` checks the indices of sparse tensors.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any

from transload.checkpoint import Record, Storage, Tensor
from transload.contents import with_parts
from transload.errors import TransloadError
from transload.findings import LimitedProblems, Problem
from transload.formats.record_checksums import Lost, checksums, mismatch
from transload.formats.zip import read_index, starts_like_zip
from transload.frozen import NamedTuple
from transload.opening.elements import Allowance, ElementReader

_PIECE = 1 << 20
_DESCRIPTOR = 24  # the most bytes after a record that hold its checksum
_NAMED = {"tensor-broken": "broken", "dcp-piece-missing": "missing"}
_CODES = {"int64": "q", "int32": "i"}
_COMPRESSED = {"sparse_csr": 1, "sparse_bsr": 1, "sparse_csc": 0, "sparse_bsc": 0}  # the axis plain indices run along

Records = dict[str, tuple[Record, ...]]
"""The records of each file that have a position."""

Key = tuple[str, str, int]
"""File, name and position, which identify a record of a checkpoint."""


def key_of(file: str, record: Record) -> Key:
    """The key of a record."""
    return file, record.name, record.offset or 0


class Damage(NamedTuple):
    """A tensor whose bytes are not those that were saved, and how that was found.

    ``kind`` is ``checksum`` (its record is not what was saved), ``unreadable`` (the disk fails to read it), ``cut``
    (some of its bytes are missing), ``missing`` (an index names it, but it is not there) or ``broken`` (its description
    makes no sense, or its indices point outside of it).
    """

    name: str
    kind: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


# -- records


def records_of(reader: ElementReader) -> Records:
    """The records of each file: those of its archive, or the storages themselves where there is none."""
    archives = {name: checkpoint.records for name, checkpoint in reader.files}
    storages: dict[str, list[Storage]] = {name: [] for name in archives}
    for storage in reader.storages():
        storages.setdefault(storage.file, []).append(storage)
    out: Records = {}
    for file, inside in storages.items():
        records: Iterable[Record] = archives.get(file) or ()
        # A rank's file is an archive; a .distcp file is many archives in a row, known from its storages.
        if not records and not file.endswith(".distcp"):
            source = reader.open_file(file)
            records = read_index(source).records.values() if starts_like_zip(source) else ()
        if not records:
            records = [Record(one.record or one.key, one.offset, one.stored, one.stored, one.crc32) for one in inside]
        out[file] = tuple(record for record in records if record.offset is not None)
    return out


def sum_records(
    reader: ElementReader,
    every: Records,
    skip: Collection[Key] = (),
    report_progress: Callable[[int], None] | None = None,
) -> dict[Key, Problem]:
    """Read all records except those in ``skip``; return those that are not what was saved."""
    bad: dict[Key, Problem] = {}
    for file, records in every.items():
        unread = [record for record in records if key_of(file, record) not in skip] if skip else records
        for index, value in checksums(reader.open_file(file), unread, report_progress).items():
            record = unread[index]
            if value != record.crc32 and (record.crc32 is not None or isinstance(value, Lost)):
                bad[key_of(file, record)] = mismatch(record, value)
    return bad


# -- tensors


def damages(
    reader: ElementReader, every: Records, bad: Mapping[Key, Problem], failed: Mapping[str, tuple[str, str]]
) -> tuple[Damage, ...]:
    """Every damaged tensor once, in the order of the file; then those that are missing altogether.

    ``failed`` has the kind and detail of other damage, by tensor name.
    """
    checkpoint = reader.checkpoint
    storages = bad_storages(reader, every, bad)
    sound = {
        storage.id
        for storage in checkpoint.storages
        if storage.stored >= storage.nbytes and (storage.offset is not None or storage.compressed)
    } - storages.keys()
    out: dict[str, Damage] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage in sound and not failed and not tensor.parts:  # the usual case
            continue
        for part in with_parts(tensor):
            if part.storage in storages:
                damage = storages[part.storage]._replace(name=tensor.name)
                break
            if part.name in failed:
                damage = Damage(tensor.name, *failed[part.name])
                break
        else:
            pieces = tensor.parts if reader.has_pieces and tensor.is_sharded else (tensor,)
            damage = Damage(tensor.name, "cut", next(filter(None, map(reader.missing, pieces)), ""))
        if damage.detail:
            out.setdefault(tensor.name, damage)
    for problem in checkpoint.problems:
        kind = _NAMED.get(problem.code)
        if kind and problem.where:
            out.setdefault(problem.where, Damage(problem.where, kind, problem.detail))
    existing = {tensor.name for tensor in checkpoint.tensors}
    for index in checkpoint.parts:
        if index.role == "index" and index.name.endswith(".json"):  # the .metadata of DCP is a pickle
            from transload.formats.sets.sharded import read_weight_map

            weights, _ = read_weight_map(reader.open_file(index.name), LimitedProblems())
            for name, shard in weights.items():
                if name not in existing:
                    out.setdefault(name, Damage(name, "missing", f"the index puts it into {shard}"))
    return tuple(out.values())


def bad_storages(reader: ElementReader, every: Records, bad: Mapping[Key, Problem]) -> dict[str, Damage]:
    """The damage of each storage whose record is not what was saved, or has a different length than it should."""
    records = {key_of(file, record): record for file, inside in every.items() for record in inside}
    named = {key[:2]: key for key in records}
    # Files whose storages all had checksums when they were saved: torch writes them for all records, or for none. If
    # one .distcp file has any, all had: one program wrote all of them.
    with_checksums = {file for file, inside in every.items() if any(record.crc32 is not None for record in inside)}
    distcp = {file for file in every if file.endswith(".distcp")}
    summed = with_checksums & {name for name, checkpoint in reader.files if checkpoint.records} | (
        distcp if with_checksums & distcp else set()
    )
    out: dict[str, Damage] = {}
    for file, checkpoint in reader.files:
        if checkpoint.traits.container == "stream" and any(p.code == "storage-size" for p in checkpoint.problems):
            # The next storage does not begin where the last one that was found ends. So that one is damaged, too.
            placed = [each for each in reader.checkpoint.storages if each.file == file and each.offset is not None]
            for last in sorted(placed, key=lambda each: each.offset or 0)[-1:]:
                detail = f"{_where(last, last.record)}: no other begins where it ends"
                out[last.id] = Damage("", "broken", detail)
    for storage in reader.checkpoint.storages:
        name = storage.record or storage.key
        here = storage.file, name, storage.offset or 0
        key = here
        if here not in records and (storage.compressed or (storage.record and storage.offset is not None)):
            # A compressed storage does not know its position; the numbers of an .npz member begin after its header.
            key = named.get(here[:2], here)
        problem, record, where = bad.get(key), records.get(key), _where(storage, name)
        if problem is not None:
            kind = "unreadable" if problem.code == "record-unreadable" else "checksum"
            out[storage.id] = Damage("", kind, f"{where}: {problem.detail}")
        elif record is None:
            continue
        elif (
            storage.file in summed
            and record.crc32 is None
            and record.size
            # If the file ends before the checksum, the record itself may be complete.
            and (record.offset or 0) + record.stored + _DESCRIPTOR <= reader.open_file(storage.file).size
        ):
            out[storage.id] = Damage("", "checksum", f"{where}: its checksum is overwritten")
        elif (
            storage.record
            and (storage.compressed or key == here)
            and record.size != storage.nbytes
            and record.stored >= record.size
        ):
            detail = f"{where} holds {record.size:,} bytes, the index expects {storage.nbytes:,}"
            out[storage.id] = Damage("", "cut" if record.size < storage.nbytes else "broken", detail)
    return out


def _where(storage: Storage, name: str) -> str:
    return f"{storage.file} › {name}" if storage.file and storage.file != name else name


# -- the indices of sparse tensors


def misplaced(reader: ElementReader) -> dict[str, str]:
    """What is wrong with each sparse tensor whose parts do not fit together, by name; without unreadable ones."""
    allowance = Allowance(reader.checkpoint)
    wrong: dict[str, str] = {}
    waiting = list(reader.checkpoint.tensors)
    for tensor in waiting:  # grows during the loop
        if tensor.kind != "sparse_coo" and tensor.kind not in _COMPRESSED:
            waiting += tensor.parts
            continue
        if any(part.dtype not in _CODES for part in tensor.parts[:-1]):
            wrong[tensor.name] = "its indices are not integers"
            continue
        try:
            for part in tensor.parts[:-1]:
                allowance.spend(part)
            check = _check_coordinates if tensor.kind == "sparse_coo" else _check_compressed
            if why := check(reader, tensor):
                wrong[tensor.name] = why
        except TransloadError as error:  # the bytes cannot be read, which is reported as for any other tensor
            reader.refuse_fault(error)
    return wrong


def _check_coordinates(reader: ElementReader, tensor: Tensor) -> str:
    """What is wrong with the indices of a COO tensor; empty if nothing is."""
    indices, values = tensor.parts
    size = tensor.shape
    if len(indices.shape) != 2 or indices.shape[0] > len(size):
        return f"its indices have the shape {indices.shape}, but its own shape is {size}"
    axes, count = indices.shape
    if values.shape != (count, *size[axes:]):
        return f"it has {count:,} indices, but values of the shape {values.shape}"
    numbers = _numbers(reader, indices)
    for axis, length in enumerate(size[:axes]):
        outside = next((number for number in islice(numbers, count) if not 0 <= number < length), None)
        if outside is not None:
            return f"an index is {outside}, but the size of axis {axis} is {length:,}"
    return ""


def _check_compressed(reader: ElementReader, tensor: Tensor) -> str:
    """The same for a CSR tensor, and for layouts that compress columns, or rows or columns of blocks."""
    compressed, plain, values = tensor.parts
    batch, count = plain.shape[:-1], plain.shape[-1] if plain.shape else 0
    rank = len(batch)
    along = _COMPRESSED[tensor.kind]
    size = tensor.shape[rank : rank + 2]
    block = values.shape[rank + 1 : rank + 3] if tensor.kind in ("sparse_bsr", "sparse_bsc") else (1, 1)
    if len(size) != 2 or len(block) != 2 or 0 in block or values.shape[: rank + 1] != plain.shape:
        return "its parts do not fit together"
    rows, columns = size[1 - along] // block[1 - along], size[along] // block[along]
    if compressed.shape != (*batch, rows + 1):
        return f"it has {rows:,} rows, but its row pointers have the shape {compressed.shape}"
    ends, places = _numbers(reader, compressed), _numbers(reader, plain)
    for _ in range(prod(batch)):
        begin = next(ends)
        if begin:
            return f"its first row begins at {begin}"
        for end in islice(ends, rows):
            if not begin <= end <= min(begin + columns, count):
                return f"a row reaches from {begin:,} to {end:,}, with {columns:,} columns and {count:,} values"
            last = -1
            for place in islice(places, end - begin):
                if not last < place < columns:
                    return f"an index is {place}, after {last}, in a row of {columns:,}"
                last = place
            begin = end
        if begin != count:
            return f"its rows contain {begin:,} of its {count:,} values"
    return ""


def _numbers(reader: ElementReader, tensor: Tensor) -> Iterator[int]:
    for piece in reader.chunks(tensor, _PIECE):
        numbers = array(_CODES[tensor.dtype], bytes(piece))
        if sys.byteorder == "big":
            numbers.byteswap()
        yield from numbers
