"""The plan of a retag: which tags change, and which bytes of the file.

``plan_of`` reads the file, finds the bytes to change, and proves the plan: the file as it would be is read again, and
must be the same but for its tags.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import Struct
from typing import TYPE_CHECKING, Any
from zlib import crc32

from transload.checkpoint import Record
from transload.errors import RetagError
from transload.findings import quoted, rescue_command
from transload.formats.zip import central_entry, descriptor, end_of_archive, local_header, widen
from transload.frozen import facts
from transload.io.journal import Change, Changes
from transload.io.sources import Source
from transload.judge.problems import command_lines
from transload.retagging.tags import (
    Edit,
    Sites,
    find_sites,
    find_torch_sites,
    in_stream,
    patched,
    rewritten,
    same_but_tags,
    spliced,
    tag_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transload.checkpoint import Checkpoint, Record
    from transload.io.sources import FileSource, Source
    from transload.nodes import Pickle
    from transload.retagging import TagMap

__all__ = ["Planned", "TagChange", "plan_of", "refuse_file"]


class _Overlay:
    """A source with changes made: what follows a run of another length is moved."""

    def __init__(self, base: Source, changes: Changes) -> None:
        self._base = base
        self._parts = list(_parts(changes))
        self.name = base.name
        self.size = changes.new_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        found: list[bytes] = []
        for at, length, old, new in self._parts:
            first, last = max(at, offset), min(at + length, offset + count)
            if first < last:
                whole = new[first - at : last - at] if new else self._base.read(old + first - at, last - first)
                found.append(whole)
        return b"".join(found)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing to give back: the base is closed by its owner."""


def _parts(changes: Changes) -> Iterator[tuple[int, int, int, bytes]]:
    """The new file in order: where a part begins, its length, and where it was before, or what it is."""
    at = old = 0
    for run in changes.runs:
        yield at, run.offset - old, old, b""
        at += run.offset - old
        yield at, len(run.new), 0, run.new
        at, old = at + len(run.new), run.offset + len(run.old)
    yield at, changes.old_size - old, old, b""


_TAIL = 22 + 0xFFFF + 20 + 56
_CENTRAL = Struct("<4s6H3L5H2L")
_LOCAL = Struct("<4s5H3L2H")
_END = Struct("<4s4H2LH")
_END64 = Struct("<4sQ2H2L4Q")
_LOCATOR64 = Struct("<4sLQL")
_CRC_IN_CENTRAL, _CRC_IN_LOCAL = 16, 14
_FOLLOWS = 8  # the flag that the size and the checksum follow the bytes
_ODD = "its directory is not as the reader of the file understood it"


@facts(frozen=True)
class _Place:
    """The place of a record in its archive.

    ``header`` and ``payload`` are where its own header and its bytes begin, ``end`` where the next record may begin;
    ``sums`` are the positions of its checksum. The ``directory`` begins at ``start`` and has ``count`` entries; that of
    the record begins at ``entry`` in it.
    """

    name: bytes
    header: int
    payload: int
    end: int
    sums: tuple[int, ...]
    directory: bytes
    start: int
    count: int
    entry: int
    entry_size: int


def _find_record(source: Source, record: Record) -> _Place:
    """Find a stored record. The archive was read without complaint."""
    start, size, count = _directory(source)
    directory = source.read(start, size)
    entry = 0
    while entry + _CENTRAL.size <= len(directory):
        fields = _CENTRAL.unpack_from(directory, entry)
        n_name, n_extra, n_comment = fields[10:13]
        name_at = entry + _CENTRAL.size
        name = directory[name_at : name_at + n_name]
        after = name_at + n_name + n_extra + n_comment
        if name.rpartition(b"/")[2].lower() == b"data.pkl":
            extra = directory[name_at + n_name : name_at + n_name + n_extra]
            header = widen(extra, *fields[9:7:-1], fields[16])[2]
            local = source.read(header, _LOCAL.size)
            payload = header + _LOCAL.size + sum(_LOCAL.unpack(local)[9:11]) if len(local) == _LOCAL.size else -1
            if payload == record.offset:
                end, sums = _checksums(source, record, header, payload)
                sums = (*sums, start + entry + _CRC_IN_CENTRAL)
                return _Place(name, header, payload, end, sums, directory, start, count, entry, after - entry)
        entry = after
    raise RetagError(_ODD, where=source.name)


def _directory(source: Source) -> tuple[int, int, int]:
    """The position of the directory, its length, and its number of entries."""
    tail = source.read(max(0, source.size - _TAIL), _TAIL)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size != len(tail):
        raise RetagError(_ODD, where=source.name)
    _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    locator = tail[at - _LOCATOR64.size : at] if at >= _LOCATOR64.size else b""
    if locator[:4] == b"PK\x06\x07":
        end64 = source.read(_LOCATOR64.unpack(locator)[2], _END64.size)
        if len(end64) == _END64.size and end64[:4] == b"PK\x06\x06":
            count, size, start = _END64.unpack(end64)[7:10]
    return start, size, count


def _checksums(source: Source, record: Record, header: int, payload: int) -> tuple[int, tuple[int, ...]]:
    """Where a record ends with its descriptor, and the positions of its checksum before and behind its bytes."""
    _, _, flags, _, _, _, crc, _, _, _, _ = _LOCAL.unpack(source.read(header, _LOCAL.size))
    places = [header + _CRC_IN_LOCAL] if crc or not flags & _FOLLOWS else []
    end = payload + record.stored
    if flags & _FOLLOWS:
        behind = source.read(end, 24)
        signed = 4 if behind[:4] == b"PK\x07\x08" else 0
        if behind[signed : signed + 4] == (record.crc32 or 0).to_bytes(4, "little"):
            places.append(end + signed)
            wide = behind[signed + 4 : signed + 20] == record.stored.to_bytes(8, "little") * 2
            end += signed + (20 if wide else 12)
    return end, tuple(places)


def _overwritten(source: Source, record: Record, data: bytes, edits: list[Edit]) -> Changes:
    """A record changed without a change of its size, and its checksum with it, everywhere."""
    place = _find_record(source, record)
    runs = in_stream(data, edits, place.payload)
    if record.crc32 is not None:  # else the archive has none, and zeros in their place
        old, new = (crc32(each).to_bytes(4, "little") for each in (data, spliced(data, edits)))
        for at in place.sums:
            if source.read(at, 4) != old:
                raise RetagError(_ODD, where=source.name)
            runs.append(Change(at, old, new))
    return Changes(tuple(sorted(run for run in runs if run.old != run.new)), source.size, source.size)


def _appended(source: Source, record: Record, data: bytes) -> Changes:
    """A record with other bytes, after all others, and the directory after it."""
    place = _find_record(source, record)
    begin = place.header if place.end == place.start else place.start  # one that was appended before is overwritten
    crc = crc32(data) if record.crc32 is not None else 0
    old, entry = place.directory, central_entry(place.name, len(data), crc, begin)
    directory = old[: place.entry] + entry + old[place.entry + place.entry_size :]
    head = local_header(place.name, len(data), begin) + data + descriptor(len(data), crc, begin)
    new = head + directory + end_of_archive(place.count, begin + len(head), len(directory))
    return Changes((Change(begin, source.read(begin, source.size - begin), new),), source.size, begin + len(new))


_AGAIN = "Load it with transload.load and save it again."

# By format: why not, and what to do; {each} is what to do with each file of a directory.
_OTHERS: dict[str, tuple[str, str]] = {
    "torchscript": (
        "it is a TorchScript program: its code names devices, too",
        "Move it with torch: torch.jit.load(path, map_location='cpu').save(other)",
    ),
    "torch-export": (
        "it is a torch.export program: its graph names devices, too",
        "Move it so: torch.export.save(transload.load(path, weights_only=False), other)",
    ),
    "aotinductor": (
        "it is a compiled AOTInductor package, for one kind of device",
        "Compile it for the other device.",
    ),
    "torch-package": ("it is a torch.package archive, with code that may name devices", "Export the package again."),
    "safetensors": ("a safetensors file carries no device", "There is nothing to change: it loads anywhere."),
    "torch-tar": ("it has the tar format of torch 0.1", _AGAIN),
    "torch-directory": (
        "it is an unpacked archive",
        "Make a file of it, and retag that.",
    ),
    "sharded": ("it is a checkpoint of several files", "{each}"),
    "dcp": ("torch.distributed.checkpoint names no device to load to", "There is nothing to change."),
    "deepspeed": ("it is a directory of several files", "{each}"),
    "megatron": ("it is a directory of several files", "{each}"),
    "directory": ("it is a directory", "Name a file in it."),
    "pickle": ("it is a plain pickle, which holds no storages of torch", ""),
}


def refuse_file(checkpoint: Checkpoint) -> None:
    """Refuse a file that has no tags to change, or that is damaged."""
    path, kind = checkpoint.path, checkpoint.format
    if checkpoint.integrity == "not-a-checkpoint":
        raise RetagError(f"it is not a checkpoint: {_worst(checkpoint)}", where=path, fix=_repair(checkpoint))
    if kind not in ("torch-zip", "torch-legacy"):
        why, fix = _OTHERS.get(kind, (f"its format is {kind}", _AGAIN))
        if kind == "torch-directory":
            fix = f"{fix}\n{rescue_command(path)}"
        raise RetagError(why, where=path, fix=fix.replace("{each}", _each(checkpoint)))
    if any(record.method for record in checkpoint.records):
        raise RetagError("it was zipped again with compression", where=path, fix=_repair(checkpoint) or _AGAIN)
    if checkpoint.integrity not in ("whole", "unchecked"):
        raise RetagError(
            f"it is not whole: {_worst(checkpoint)}",
            where=path,
            fix=_repair(checkpoint) or f"See all of it: transload inspect {quoted(path)}",
        )


def _each(checkpoint: Checkpoint) -> str:
    """What to do with the files of a directory."""
    from pathlib import Path

    folder = checkpoint.path if Path(checkpoint.path).is_dir() else str(Path(checkpoint.path).parent)
    endings = {Path(part.name).suffix for part in checkpoint.parts} - {"", ".json"}
    if endings == {".safetensors"}:
        return "Its files are safetensors, which carry no device: they load anywhere."
    ending = min(endings - {".safetensors"}, default=".bin")
    loop = f'for f in {quoted(folder.rstrip("/"))}/*{ending}; do transload retag "$f" --to cpu; done'
    return f"Retag each of its files: {loop}"


def _repair(checkpoint: Checkpoint) -> str:
    """The command that repairs the file, after the sentence that introduces it; empty if there is none."""
    return "\n".join(command_lines(checkpoint.findings))


def _worst(checkpoint: Checkpoint) -> str:
    for severity in ("error", "warning", "note"):
        for finding in checkpoint.findings:
            if finding.severity == severity:
                return finding.title
    return "it is damaged"


@facts(frozen=True)
class TagChange:
    """One tag of a file, its new value, which is equal where it stays, and the storages that have it."""

    old: str
    new: str
    storages: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"old": self.old, "new": self.new, "storages": self.storages, "nbytes": self.nbytes}


@facts(frozen=True)
class Planned:
    """A plan.

    ``method`` is ``none`` (all tags are as asked), ``patch`` (the same number of bytes), ``append`` (a new index
    after the records of an archive) or ``rewrite`` (only into a copy). ``seen`` is the state of the file that was read.
    """

    format: str
    method: str
    tags: tuple[TagChange, ...]
    changes: Changes
    warnings: tuple[str, ...]
    seen: os.stat_result


def plan_of(source: FileSource, wanted: TagMap, *, copy: bool) -> Planned:
    """Read a file and plan what to write, into a ``copy`` or in place; nothing is written.

    The plan is proven: the file as it would be is read by the same reader, and is the same but for the tags.
    """
    from transload.formats import read_source
    from transload.judge import judge

    seen = os.fstat(source.descriptor)
    checkpoint = judge(read_source(source))
    refuse_file(checkpoint)
    main = next(pickle for pickle in checkpoint.pickles if pickle.main)
    counts: dict[str, list[int]] = {tag: [0, 0] for node in main.persistent if (tag := tag_of(node)) is not None}
    for storage in checkpoint.storages:
        count = counts.setdefault(storage.device, [0, 0])
        count[0] += 1
        count[1] += storage.nbytes
    changed = (TagChange(tag, wanted.new(tag), *count) for tag, count in counts.items())
    tags = tuple(sorted(changed, key=lambda tag: (-tag.nbytes, tag.old)))
    method, changes = "none", Changes((), source.size, source.size)
    if any(tag.old != tag.new for tag in tags):
        record = None
        if checkpoint.format == "torch-zip":
            names = {each.name.lower(): each for each in reversed(checkpoint.records) if each.offset is not None}
            record = names.get("data.pkl")
            if record is None:
                raise RetagError("its data.pkl is missing", where=checkpoint.path)
        method, changes = _proven(_File(source, checkpoint, main, record, wanted.new, copy))
    warnings = tuple(_warnings(checkpoint, wanted, tags))
    return Planned(checkpoint.format, method, tags, changes, warnings, seen)


@facts(frozen=True)
class _File:
    """A file that was read. ``record`` is its index in an archive, ``None`` in the legacy format."""

    source: Source
    checkpoint: Checkpoint
    main: Pickle
    record: Record | None
    renamed: Callable[[str], str]
    copy: bool


def _proven(file: _File) -> tuple[str, Changes]:
    """The method and the changes. Tags are searched for as torch writes them, and if that fails, opcode by opcode."""
    main, renamed = file.main, file.renamed
    if file.record is not None:
        offset, size = file.record.offset or 0, file.record.size
    else:
        offset, size = sum(pickle.end for pickle in file.checkpoint.pickles[:3]), main.end
    data = file.source.read(offset, size)
    sites = find_torch_sites(main, data, renamed)
    if sites is not None:
        method, changes = _changes(file, sites, offset, data)
        if _is_right(file, changes):
            return method, changes
    sites = find_sites(main, data)
    if all(renamed(tag_of(node) or "") == tag_of(node) for node in sites.unclear):
        method, changes = _changes(file, sites, offset, data)
        if _is_right(file, changes):
            return method, changes
    raise RetagError("its storages are not named as torch names them", where=file.source.name, fix=_AGAIN)


def _changes(file: _File, sites: Sites, offset: int, data: bytes) -> tuple[str, Changes]:
    source, record = file.source, file.record
    edits = patched(file.main, data, sites, file.renamed)
    if edits is not None:
        if record is not None:
            return "patch", _overwritten(source, record, data, edits)
        return "patch", Changes(tuple(in_stream(data, edits, offset)), source.size, source.size)
    new = spliced(data, rewritten(file.main, data, sites, file.renamed))
    if record is not None:
        return "append", _appended(source, record, new)
    if not file.copy:
        what = "the new tags do not fit into the place of the old ones, and the legacy format has no other"
        raise RetagError(what, where=source.name, fix="Write a copy: -o COPY.")
    return "rewrite", Changes((Change(offset, data, new),), source.size, source.size - len(data) + len(new))


def _is_right(file: _File, changes: Changes) -> bool:
    """Read the file as it would be: the same pickle but for the tags, the same storages, and no new problem."""
    from transload.formats import read_source

    old, new = file.checkpoint, read_source(_Overlay(file.source, changes))
    pickle = next((each for each in new.pickles if each.main), None)
    # In a legacy stream the storages follow the pickle, and move with its end.
    shift = changes.new_size - changes.old_size if file.record is None else 0
    storages = [
        storage._replace(
            device=file.renamed(storage.device), offset=None if storage.offset is None else storage.offset + shift
        )
        for storage in old.storages
    ]
    return (
        pickle is not None
        and new.format == old.format
        and [problem.code for problem in new.problems] == [problem.code for problem in old.problems]
        and list(new.storages) == storages
        and same_but_tags(file.main, pickle, file.renamed)
    )


def _warnings(checkpoint: Checkpoint, wanted: TagMap, tags: tuple[TagChange, ...]) -> Iterator[str]:
    """Tags that were named and do not exist, devices that stay, and danger in loading the file."""
    existing = [tag.old for tag in tags]
    missing = [old for old, _ in wanted.named if old not in existing]
    if missing:
        yield f"nothing is tagged {', '.join(missing)}; the file has {', '.join(existing) or 'no tags'}"
    objects = [leaf.name for leaf in checkpoint.leaves if leaf.kind == "torch.device" and leaf.text != "cpu"]
    if objects:
        yield f"torch.device values stay as they are: {', '.join(objects[:4])}" + (" …" if objects[4:] else "")
    rebuilt = [tensor.name for tensor in checkpoint.tensors if tensor.kind == "device"]
    if rebuilt:
        yield f"tensors that name their device themselves stay there: {', '.join(rebuilt[:4])}"
    if checkpoint.safety == "dangerous":
        yield "nothing of it was run, but loading it would run code that can do harm: see transload inspect"
