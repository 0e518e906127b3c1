"""The new file of a rescue: the recovered one with its missing records, with lost bytes filled, or without the lost.

``completed`` adds the records that an archive lacks, and rebuilds a damaged index from what ``damaged_index`` reads;
``filled``, ``without_lost`` and ``rebuilt`` lay out what is written. All are sources: nothing is copied.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from math import nan
from operator import attrgetter, itemgetter
from struct import pack

from transload.checkpoint import Checkpoint, Record, Tensor
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import RescueError
from transload.formats import pickle_machine, read_source
from transload.formats.graph import Tree, find_tensors
from transload.formats.pickle_streams import run_at
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.formats.safetensors import FIELDS, PREFIX
from transload.formats.tensors import Locate, StorageTable, declared_storages
from transload.io.packed import Assembly, SourceRange
from transload.io.sources import Source
from transload.nodes import REBUILDS, Call, Dict, called, is_unread, walk_nodes
from transload.render.words import plural
from transload.rescuing.archive import (
    FEW,
    INDEX,
    NOT_IN_FILE,
    ArchiveRecord,
    Filler,
    LostRange,
    LostRecord,
    RebuiltArchive,
    Recovered,
    checksum,
    literal,
    name_below_root,
    replaced,
    stored_record,
    with_records,
)
from transload.rescuing.damaged_index import discard, is_ordered, read_damaged_index
from transload.rescuing.report import Fill
from transload.writing.to_torch import TensorCalls

_MAX_STORAGE = 1 << 45  # the largest size of a missing storage that is believed: 32 TB
_MAX_INDEX = 64 << 20  # the largest damaged index that is read: enough for half a million tensors
# Filling may make the file this many times larger, or a gigabyte large: a file of a kilobyte can claim petabytes.
_MAX_GROWTH = 1000
_MIN_GROWTH_LIMIT = 1 << 30
_NAN = {
    **dict.fromkeys(("float64", "complex128"), pack("<d", nan)),
    **dict.fromkeys(("float32", "complex64"), pack("<f", nan)),
    **dict.fromkeys(("float16", "complex32"), pack("<e", nan)),
    **dict.fromkeys(("bfloat16", "bcomplex32"), pack("<f", nan)[2:]),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), b"\x7f"),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), b"\x80"),
    "float8_e8m0fnu": b"\xff",
}


def is_program(checkpoint: Checkpoint) -> bool:
    """Whether its tensors belong to a program, from which none can be removed, even if its code is lost."""
    pickles = [pickle for pickle in checkpoint.pickles if pickle.main]
    scripted = any(name.module.split(".")[0] == "__torch__" for pickle in pickles for name in pickle.globals.values())
    return checkpoint.traits.program or scripted


# -- records that an archive lacks


def completed(recovered: Recovered, *, fill: bool) -> tuple[Recovered, Checkpoint]:
    """Add records for missing storages to a recovered file, and read its content.

    Without ``fill`` only empty storages get a record. The tensors of a program whose code is lost have the names that
    they would have in the program.
    """
    checkpoint = read_source(recovered.source)
    if not recovered.records or checkpoint.traits.container != "zip":
        return recovered, checkpoint
    if not is_program(checkpoint) and _is_index_damaged(recovered, checkpoint):
        recovered = _with_rebuilt_index(recovered)
        checkpoint = read_source(recovered.source)
    records, name = recovered.records, recovered.source.name
    root = records[0].name.partition(b"/")[0]
    order = 1 + max(record.order for record in records)
    if is_program(checkpoint):
        empty_tuple = stored_record(root + b"/constants.pkl", literal(b"\x80\x02)."), order=order)
        return recovered, read_source(RebuiltArchive([*records, empty_tuple], name))
    folder = b"/tensors/" if any(record.name.startswith(root + b"/tensors/") for record in records) else b"/data/"
    added: dict[bytes, ArchiveRecord] = {}
    for storage in checkpoint.storages:
        missing = not storage.record and storage.device != "meta" and storage.nbytes < _MAX_STORAGE
        if missing and (fill or not storage.nbytes):
            key = root + folder + storage.key.encode("utf-8", "backslashreplace")
            content = SourceRange(Filler(storage.nbytes), 0, storage.nbytes)
            record = stored_record(key, content, order=order + len(added), crc32=0)
            added[key] = record._replace(lost=(LostRange(0, storage.nbytes, NOT_IN_FILE),) if storage.nbytes else ())
    if not added:
        return recovered, checkpoint
    lost = tuple(LostRecord(name_below_root(record.name), NOT_IN_FILE) for record in added.values() if record.stored)
    recovered = with_records(recovered, (*records, *added.values()))
    recovered = recovered._replace(exact=False, lost_records=recovered.lost_records + lost)
    return recovered, read_source(recovered.source)


# -- a damaged index


def _is_index_damaged(recovered: Recovered, checkpoint: Checkpoint) -> bool:
    """Whether the index is so damaged that tensors are lost."""
    listed = any(record.name == INDEX for record in recovered.lost_records)
    if not (listed or recovered.all_unchecked or INDEX in recovered.unchecked):
        return False  # any problem was already there when it was saved
    if any(pickle.main and pickle.broken for pickle in checkpoint.pickles):
        return True
    if not listed and all(problem.code != "tensor-broken" for problem in checkpoint.problems):
        return False
    sizes = {storage.key: storage.nbytes for storage in checkpoint.storages if storage.tensors}
    return any(sizes.get(key) != record.stored for key, record in _storage_records(recovered.records).items())


def _storage_records(records: Sequence[ArchiveRecord]) -> dict[str, ArchiveRecord]:
    """The uncompressed records of storages, by key."""
    stored = {name_below_root(record.name): record for record in records if not record.method}
    return {name.partition("/")[2]: record for name, record in stored.items() if name.startswith(("data/", "tensors/"))}


def _with_rebuilt_index(recovered: Recovered) -> Recovered:
    """The archive with a new index, made of what is left of the old one.

    It contains each tensor whose storage has a record of the right size. Storages without tensors become flat tensors,
    named ``storage-12`` after their key.
    """
    index = next((record for record in recovered.records if name_below_root(record.name) == INDEX), None)
    if index is None or index.method or index.stored > _MAX_INDEX:
        return recovered
    content, persistent, broken = read_damaged_index(Assembly(index.content, "").read(0, index.stored))
    stored = _storage_records(recovered.records)

    def locate(key: str, nbytes: int) -> Record | None:
        fits = key in stored and stored[key].stored == nbytes
        return Record(key, 0, nbytes, nbytes) if fits else None

    _prune(content, locate, lambda tree: any(slot.nbytes and slot.offset is None for slot in tree.storages))
    root = content if type(content) is Dict or is_ordered(content) else Dict([])
    items = root.items = root.items or []
    if root is not content and content is not None:
        items += ("object", content)
    tree = find_tensors(root, StorageTable(locate))
    used = {storage.key for storage in tree.storages if storage.tensors}
    # Each id gets a new table, since some are misread and would conflict.
    slots = filter(None, (StorageTable(locate).resolve(node) for node in persistent))
    dtypes = {slot.key: slot.dtype for slot, _, _ in slots if slot.record}
    flat: list[str] = []
    calls = TensorCalls([], ())
    for key, record in stored.items():
        if key not in used and record.stored:
            dtype = dtypes.get(key, "uint8")
            flat.append(f"storage-{key}")
            size = record.stored // ITEMSIZE[dtype]
            items += (flat[-1], calls.strided(key, record.stored, dtype, 0, (size,), (1,)))
    try:
        data = dumps(root)
    except CannotPickleGraphError:
        return recovered
    records = [_with_content(record, data) if record is index else _realigned(record) for record in recovered.records]
    names = {tensor.name for tensor in tree.tensors}
    ends = {name.rpartition("/")[2] for name in names}
    gone = [name for name in dict.fromkeys(broken) if name not in ends]
    notes = [f"the index is damaged: {plural(len(names), 'tensor')} could be read from what is left of it"]
    if flat:
        names_shown = ", ".join(flat[:FEW]) + (" …" if len(flat) > FEW else "")
        notes.append(f"{plural(len(flat), 'storage')} without name and shape became flat tensors: {names_shown}")
    lost = [record for record in recovered.lost_records if record.name != INDEX]
    lost += [LostRecord(INDEX, "its bytes are damaged")]
    lost += [LostRecord(name, "its entry in the index is damaged") for name in gone]
    recovered = with_records(recovered, records)._replace(lost_records=tuple(lost), notes=(*recovered.notes, *notes))
    return recovered._replace(exact=False, index_rebuilt=True)


# -- files with all tensors


def refuse_growth(nbytes: int, recovered: Recovered) -> None:
    """Refuse to write far more bytes than the damaged file has."""
    if nbytes > max(_MIN_GROWTH_LIMIT, _MAX_GROWTH * recovered.nbytes):
        what = f"the file claims to have {nbytes:,} bytes and has {recovered.nbytes:,}"
        fix = "The tensor sizes in it are wrong."
        raise RescueError(what, where=recovered.source.name, fix=fix)


def rebuilt(recovered: Recovered, records: Sequence[ArchiveRecord]) -> Source:
    """An archive of these records; checksums are computed for those that are filled, or have none."""
    refuse_growth(sum(record.stored for record in records), recovered)
    summed = [
        record if record.crc32 or record.method else record._replace(crc32=checksum(record.content))
        for record in records
    ]
    return RebuiltArchive(summed, recovered.source.name)


def filler(dtype: str, fill: Fill) -> bytes:
    """The bytes of one element that stands for a lost one: of a dtype without NaN, zero."""
    width = itemsize(dtype)
    nan_bytes = _NAN.get(dtype, bytes(width)) if fill == "nan" else bytes(width)
    return nan_bytes * (width // len(nan_bytes))  # both halves of a complex number


def filled(recovered: Recovered, checkpoint: Checkpoint, fill: Fill) -> Source:
    """The recovered file with a pattern in place of lost bytes; only whole elements are filled."""
    dtypes: dict[str | None, str] = {}  # of the first tensor in each storage: newer files have untyped storages
    for tensor in checkpoint.tensors:
        dtypes.setdefault(tensor.storage, tensor.dtype)
    ranges = sorted(recovered.lost_ranges)
    fills: list[tuple[int, SourceRange]] = []
    for storage in checkpoint.storages:
        if storage.offset is None:
            continue
        dtype = dtypes.get(storage.id, storage.dtype)
        pattern = filler(dtype, fill)
        if storage.big_endian:
            pattern = pattern[::-1]
        begin, end = storage.offset, storage.offset + storage.nbytes
        index = bisect_right(ranges, begin, key=attrgetter("end"))
        for lost in ranges[index : bisect_left(ranges, end, key=attrgetter("start"))]:
            first = max(lost.start - begin, 0)
            last = min(lost.end, end) - begin
            if first < last:
                first -= first % len(pattern)
                run = Filler(last - first, pattern)
                fills.append((begin + first, SourceRange(run, 0, run.size)))
    fills.sort(key=itemgetter(0))
    source = recovered.source
    whole = Assembly(replaced(source, 0, source.size, fills), source.name)
    if not recovered.records:
        return whole
    starts = RebuiltArchive(recovered.records, "").starts
    records = [*recovered.records]
    for index, record in enumerate(records):
        if record.lost:
            content = SourceRange(whole, starts[record.name], record.stored)
            records[index] = record._replace(content=(content,), crc32=0)
    return rebuilt(recovered, records)


# -- files without the lost tensors


def without_lost(recovered: Recovered, checkpoint: Checkpoint, is_lost: Callable[[Tensor], bool]) -> Source:
    """The recovered file without the lost tensors. Of a program only a dictionary of the other tensors is left."""
    source = recovered.source
    lost = {tensor.name for tensor in checkpoint.tensors if is_lost(tensor)}
    kept = [tensor for tensor in checkpoint.tensors if tensor.name not in lost]
    form = checkpoint.traits
    if form.named:
        return _safetensors_of(source, checkpoint, kept)
    if is_program(checkpoint):
        return _weights_of(source, checkpoint, kept)
    pickle = next((pickle for pickle in checkpoint.pickles if pickle.main), None)
    if pickle is None or form.container not in ("zip", "stream"):
        what = "tensors cannot be left out of a file of this format"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).")
    by_key = {storage.key: storage for storage in checkpoint.storages}

    def locate(key: str, _: int) -> Record | None:
        storage = by_key.get(key)
        return None if storage is None else Record(storage.record, storage.offset, storage.stored, storage.stored)

    try:
        _prune(pickle.root, locate, lambda tree: any(map(is_lost, tree.tensors)))
        index = dumps(pickle.root, pickle.protocol)
    except CannotPickleGraphError as error:
        what = f"the index cannot be written without them ({error.what})"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).") from error
    needed = declared_storages(pickle_machine.run(index, name=INDEX).persistent)
    if form.container == "stream":  # the first three pickles, the new object, and the storages it needs
        position = 0
        for _ in range(3):
            _, position = run_at(source, position, "")
        places = sorted((s.offset, s.key, s.nbytes) for s in checkpoint.storages if s.key in needed and s.offset)
        parts = [SourceRange(source, 0, position), literal(index + dumps([key for _, key, _ in places]))]
        parts += [SourceRange(source, offset - 8, nbytes + 8) for offset, _, nbytes in places]
        return Assembly(parts, source.name)
    gone = {record.name for record in recovered.lost_records}
    records: list[ArchiveRecord] = []
    for record in recovered.records:
        key = name_below_root(record.name)
        unused = key.startswith(("data/", "tensors/")) and key.partition("/")[2] not in needed
        if key == INDEX:
            records.append(_with_content(record, index))
        elif not (key in gone and unused):
            records.append(_realigned(record))
    return rebuilt(recovered, records)


def _with_content(record: ArchiveRecord, data: bytes) -> ArchiveRecord:
    return stored_record(record.name, literal(data), order=record.order)._replace(time=record.time, date=record.date)


def _realigned(record: ArchiveRecord) -> ArchiveRecord:
    """The record without the padding that fitted its old offset."""
    return record._replace(padding=None, before=())


def _prune(root: object, locate: Locate, is_lost: Callable[[Tree], bool]) -> None:
    """Discard lost tensors in a graph, in place, and remove them from its dictionaries."""
    every = {id(node): node for node in walk_nodes([root]) if type(node) in (Call, Dict)}.values()
    for node in every:
        if type(node) is Call and called(node) in REBUILDS:
            tree = find_tensors(node, StorageTable(locate))
            if not tree.tensors or is_lost(tree):
                discard(node)
    for node in every:
        items = node.items or []
        kept = [pair for pair in zip(items[::2], items[1::2], strict=False) if not is_unread(pair[1])]
        items[:] = [part for pair in kept for part in pair]
        pairs = node.args[0] if is_ordered(node) and type(node.args) is tuple and node.args else None
        if type(pairs) is list:  # how Python 2 writes an OrderedDict
            pairs[:] = [pair for pair in pairs if type(pair) not in (list, tuple) or not any(map(is_unread, pair))]


def _safetensors_of(source: Source, checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Source:
    """A safetensors file with some of its tensors."""
    length = int.from_bytes(source.read(0, PREFIX), "little")
    table = json.loads(source.read(PREFIX, length))
    storages = {storage.id: storage for storage in checkpoint.storages}
    kept: dict[str, object] = {"__metadata__": table["__metadata__"]} if "__metadata__" in table else {}
    parts: list[SourceRange] = []
    at = 0
    for tensor in tensors:
        storage = storages.get(tensor.storage or "")
        if tensor.name in table and storage is not None and storage.offset is not None:
            entry = table[tensor.name]  # the reference also accepts a list of the fields
            fields = dict(zip(FIELDS, entry, strict=True)) if isinstance(entry, list) else entry
            kept[tensor.name] = {**fields, "data_offsets": [at, at + storage.nbytes]}
            parts.append(SourceRange(source, storage.offset, storage.nbytes))
            at += storage.nbytes
    header = json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return Assembly([literal(len(header).to_bytes(PREFIX, "little") + header), *parts], source.name)


def _weights_of(source: Source, checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Source:
    """An archive with a dictionary of tensors by name, on the CPU, which share storages as before."""
    storages = {storage.id: storage for storage in checkpoint.storages}
    plain = [
        t for t in tensors if t.kind == "strided" and t.dtype in ITEMSIZE and not t.flags and t.storage in storages
    ]
    if not plain:
        what = "none of its tensors can be saved by itself"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).")
    used = {ident: storages[ident] for ident in (tensor.storage or "" for tensor in plain)}
    keys = {ident: str(number) for number, ident in enumerate(used)}
    items: list[object] = []
    calls = TensorCalls([], ())
    for tensor in plain:
        storage = used[tensor.storage or ""]
        view = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride)
        items += (tensor.name, calls.strided(keys[storage.id], storage.nbytes, *view))
    big_endian = any(storage.big_endian for storage in used.values())
    contents = {INDEX.encode(): literal(dumps(Dict(items))), b"byteorder": literal(b"big" if big_endian else b"little")}
    for ident, storage in used.items():
        contents[b"data/" + keys[ident].encode()] = SourceRange(source, storage.offset or 0, storage.nbytes)
    contents[b"version"] = literal(b"3\n")
    return RebuiltArchive([stored_record(b"archive/" + name, part) for name, part in contents.items()], source.name)
