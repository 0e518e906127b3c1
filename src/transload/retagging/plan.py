"""Plan a retag: which tags change, and which bytes of the file.

``plan_of`` reads the file, finds the bytes to change, and proves the plan: it reads the file as it would become, which
must differ from the original only in its tags.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from transload.checkpoint import Checkpoint, Record
from transload.devices import KINDS, closest_kind
from transload.errors import RetagError, UsageError
from transload.findings import Problems, quoted, rescue_command
from transload.formats import read_source
from transload.formats.zip import CENTRAL, END, LOCAL, find_directory, read_entry
from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.frozen import Plain
from transload.io.journal import Change, Changes
from transload.io.sources import FileSource, Source
from transload.judge import judge
from transload.judge.problems import command_lines
from transload.nodes import Pickle
from transload.retagging.tags import Edit, edits_inside, same_but_tags, spliced, tag_edits, tag_of

OTHERS = "*"
"""In a mapping, the key for every tag that is not named."""

_DEVICE = re.compile(r"[a-z][a-z_]*(?::(?:0|[1-9][0-9]{0,5}))?")
_SINGLE = ("cpu", "mps")
_NEVER = {
    "meta": "torch.load(path) would then give tensors without numbers",
    "xla": "torch restores no storages on xla: load with map_location='cpu' and move the tensors",
}


class TagMap(dict[str, str]):
    """The new tags, by old tag or ``OTHERS``."""

    def new(self, tag: str) -> str:
        """The new tag for an old one. ``meta`` is kept unless it is named: such a storage has no bytes.

        >>> TagMap({"cuda:1": "cuda:0"}).new("cuda:1"), TagMap({OTHERS: "cpu"}).new("meta")
        ('cuda:0', 'meta')
        """
        return self.get(tag) or (tag if tag == "meta" else self.get(OTHERS, tag))


def tag_map_of(to: str | Mapping[str, str]) -> TagMap:
    """The new tags, from a device or a mapping of tags to devices.

    >>> tag_map_of("cpu").new("cuda:3"), tag_map_of({"cuda:1": "cuda:0", "*": "cpu"}).new("cuda:2")
    ('cpu', 'cpu')
    """
    if isinstance(to, str):
        return TagMap({OTHERS: _device(to)})
    if not isinstance(to, Mapping):
        raise UsageError(f"expected a device or a mapping of devices, not {type(to).__name__}")
    tags = TagMap({_tag(old): _device(new) for old, new in to.items() if new or old != OTHERS})
    if not tags:
        raise UsageError("no device is named to change the tags to")
    return tags


def _device(name: object) -> str:
    if not isinstance(name, str):
        name = str(name)  # a torch.device
    kind, colon, _ = name.partition(":")
    if kind in _NEVER:
        raise UsageError(f"{name!r} makes no sense as a tag: {_NEVER[kind]}")
    if kind in _SINGLE and colon:
        raise UsageError(f"torch does not read a tag {name!r}, only {kind!r}", fix=f"Write {kind}.")
    if not _DEVICE.fullmatch(name) or kind not in KINDS:
        near = closest_kind(kind[:40])
        meant = f" Did you mean {near}{':0' if near == 'cuda' else ''}?" if near else ""
        fix = f"Write it as torch does: cpu, cuda:0, mps, xpu:1.{meant}"
        raise UsageError(f"{name[:80]!r} is not a device", fix=fix)
    return name


def _tag(name: object) -> str:
    """A tag that a file may have: any string, since an invalid one may be the reason for the retag."""
    if not isinstance(name, str) or not name or name == "meta":
        raise UsageError(f"{name!r} is not a tag that can be changed")
    return name


# -- which files cannot be retagged

_AGAIN = "Load it with transload.load and save it again."

# By format: why not, and what to do; {each} is what to do with the files of a directory.
_UNSUPPORTED: dict[str, tuple[str, str]] = {
    "torchscript": (
        "it is a TorchScript program: its code names devices, too",
        "Move it with torch: torch.jit.load(path, map_location='cpu').save(other)",
    ),
    "torch-export": (
        "it is a torch.export program: its graph names devices, too",
        "Move it so: torch.export.save(transload.load(path, weights_only=False), other)",
    ),
    "aotinductor": ("it is a compiled AOTInductor package, for one kind of device", "Compile it for the other device."),
    "torch-package": ("it is a torch.package archive, with code that may name devices", "Export the package again."),
    "safetensors": ("a safetensors file carries no device", "There is nothing to change: it loads anywhere."),
    **dict.fromkeys(
        ("gguf", "npz", "npy"),
        ("this format carries no device", "There is nothing to change: transload.load reads it."),
    ),
    "torch-tar": ("it has the tar format of torch 0.1", _AGAIN),
    "torch-directory": ("it is an unpacked archive", "Make a file of it, and retag that."),
    "sharded": ("it is a checkpoint of several files", "{each}"),
    "dcp": ("torch.distributed.checkpoint names no device to load to", "There is nothing to change."),
    "deepspeed": ("it is a directory of several files", "{each}"),
    "megatron": ("it is a directory of several files", "{each}"),
    "directory": ("it is a directory", "Name a file in it."),
}


def refuse_file(checkpoint: Checkpoint, to: str = "cpu") -> None:
    """Refuse a file that has no tags to change, or is damaged; ``to`` is the requested device."""
    path, kind, findings = checkpoint.path, checkpoint.format, checkpoint.findings
    severities = ("error", "warning", "note")
    worst = min(findings, key=lambda finding: severities.index(finding.severity), default=None)
    why = worst.title if worst else "it is damaged"
    repair = "\n".join(command_lines(findings))
    if checkpoint.integrity == "not-a-checkpoint":
        raise RetagError(f"it is not a checkpoint: {why}", where=path, fix=repair)
    if kind not in ("torch-zip", "torch-legacy", "pickle"):
        why, fix = _UNSUPPORTED.get(kind, (f"its format is {kind}", _AGAIN))
        if kind == "torch-directory":
            fix = f"{fix}\n{rescue_command(path)}"
        raise RetagError(why, where=path, fix=fix.replace("{each}", _each(checkpoint, to)))
    if kind == "torch-zip" and any(record.method for record in checkpoint.records):
        raise RetagError("it was zipped again with compression", where=path, fix=repair or _AGAIN)
    if checkpoint.integrity not in ("whole", "unchecked"):
        see = f"See all of it: transload inspect {quoted(path)}"
        raise RetagError(f"it is not whole: {why}", where=path, fix=repair or see)


def _each(checkpoint: Checkpoint, to: str) -> str:
    """How to retag the files of a directory."""
    from pathlib import Path

    folder = checkpoint.path if Path(checkpoint.path).is_dir() else str(Path(checkpoint.path).parent)
    endings = {Path(part.name).suffix for part in checkpoint.parts} - {"", ".json"}
    if endings == {".safetensors"}:
        return "Its files are safetensors, which carry no device: they load anywhere."
    return f"Retag each of its files, by their directory: transload retag {quoted(folder)} --to {quoted(to)}"


# -- which bytes change

_GAP = 4096
"""Edits closer than this are merged into one change, since a disk writes whole pages."""

_CRC_IN_CENTRAL, _CRC_IN_LOCAL = 16, 14
_FOLLOWS = 8  # the zip flag for a data descriptor: size and checksum follow the bytes
_ODD = "the central directory of the archive is inconsistent"


class TagChange(Plain):
    """A tag of a file, its new value (the same if it stays), and the storages that have it."""

    old: str
    new: str
    storages: int
    nbytes: int


class Plan(NamedTuple):
    """What to write.

    ``method`` is ``none`` (all tags are already as requested), ``patch`` (the same number of bytes), ``append`` (a new
    index after the records of an archive) or ``rewrite`` (only into a copy). ``seen`` is the ``stat`` of the file that
    was read.
    """

    format: str
    method: str
    tags: tuple[TagChange, ...]
    changes: Changes
    warnings: tuple[str, ...]
    seen: os.stat_result


def plan_of(source: FileSource, wanted: TagMap, *, copy: bool) -> Plan:
    """Read a file and plan what to write, into a ``copy`` or in place; nothing is written."""
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
        method, changes = _prove_changes(source, checkpoint, main, wanted, copy=copy)
    return Plan(checkpoint.format, method, tags, changes, tuple(_warnings(checkpoint, wanted, tags)), seen)


def _prove_changes(
    source: Source, checkpoint: Checkpoint, main: Pickle, wanted: TagMap, *, copy: bool
) -> tuple[str, Changes]:
    """The method and the changes; ``RetagError`` unless the changed file would differ only in its tags."""
    record = None  # data.pkl of an archive; in the legacy format the pickles follow one another
    plain = checkpoint.format == "pickle"
    offset, size = 0 if plain else sum(pickle.end for pickle in checkpoint.pickles[:3]), main.end
    if checkpoint.format == "torch-zip":
        record = {each.name.lower(): each for each in reversed(checkpoint.records)}["data.pkl"]
        offset, size = record.offset or 0, record.size
    data = source.read(offset, size)
    edits = edits_inside(main, data, wanted.new) if plain else tag_edits(main, data, wanted.new)
    if edits is not None:
        if not any(edit.grown for edit in edits):
            method, changes = "patch", _overwritten(source, record, offset, data, edits)
        elif record is not None:
            method, changes = "append", _appended(source, record, spliced(data, edits))
        elif copy:
            runs = tuple(Change(offset + at, data[at:end], new) for at, end, new in sorted(edits))
            grown = sum(edit.grown for edit in edits)
            method, changes = "rewrite", Changes(runs, source.size, source.size + grown)
        else:
            which = "a plain pickle" if plain else "the legacy format"
            what = f"the new tags do not fit in place of the old ones, and {which} cannot grow in place"
            raise RetagError(what, where=source.name, fix="Write a copy: -o COPY.")
        # Tensors and values follow from the pickle and the storages, so comparing these two is enough.
        again = read_source(changes.made(source), tree=bool(checkpoint.problems))
        pickle = next((each for each in again.pickles if each.main), None)
        # Outside an archive, storages move if something before them grows.
        runs = changes.runs if record is None else ()
        begins, shifts = [run.offset for run in runs], [0, *accumulate(len(run.new) - len(run.old) for run in runs)]
        storages = [
            storage._replace(
                device=wanted.new(storage.device),
                offset=storage.offset and storage.offset + shifts[bisect_right(begins, storage.offset)],
            )[:-1]  # without the names of tensors
            for storage in checkpoint.storages
        ]
        if (
            pickle is not None
            and again.format == checkpoint.format
            and [problem.code for problem in again.problems] == [problem.code for problem in checkpoint.problems]
            and [storage[:-1] for storage in again.storages] == storages
            and same_but_tags(main, pickle, wanted.new)
        ):
            return method, changes
    raise RetagError("its storages are not named as torch names them", where=source.name, fix=_AGAIN)


def _overwritten(source: Source, record: Record | None, offset: int, data: bytes, edits: list[Edit]) -> Changes:
    """Changes to a pickle that keep its size, and to every copy of the checksum of its record."""
    new = spliced(data, edits)
    spans: list[list[int]] = []
    for at, end, _ in sorted(edits):
        if spans and at - spans[-1][1] < _GAP:
            spans[-1][1] = end
        else:
            spans.append([at, end])
    runs = [Change(offset + at, data[at:end], new[at:end]) for at, end in spans]
    if record is not None and record.crc32 is not None:  # else the archive has zeros instead of checksums
        before, after = (crc32(each).to_bytes(4, "little") for each in (data, new))
        runs += [Change(at, before, after) for at in _find_record(source, record)[0]]
    return Changes(tuple(sorted(run for run in runs if run.old != run.new)), source.size, source.size)


def _appended(source: Source, record: Record, data: bytes) -> Changes:
    """Changes that append a new version of a record, and the central directory after it."""
    _, name, begin, before, behind, entries = _find_record(source, record)
    crc = crc32(data) if record.crc32 is not None else 0
    directory = before + central_entry(name, len(data), crc, begin) + behind
    head = local_header(name, len(data), begin) + data + descriptor(len(data), crc, begin)
    new = head + directory + end_of_archive(entries, begin + len(head), len(directory))
    return Changes((Change(begin, source.read(begin, source.size - begin), new),), source.size, begin + len(new))


def _find_record(source: Source, record: Record) -> tuple[list[int], bytes, int, bytes, bytes, int]:
    """Find an uncompressed record in an archive without problems.

    The positions of its checksum, its name, where its replacement can begin, the central directory before and after its
    entry, and the number of all entries.
    """
    if source.read(source.size - END.size, 4) != b"PK\x05\x06":  # something follows the end record
        raise RetagError(_ODD, where=source.name)
    start, size, count = find_directory(source, Problems())
    directory = source.read(start, size)
    after = 0
    while after + CENTRAL.size <= len(directory):
        at = after
        entry, after = read_entry(directory, at, Problems())
        if entry.raw_name.rpartition(b"/")[2].lower() == b"data.pkl":
            local = source.read(entry.header, LOCAL.size)
            payload = entry.header + LOCAL.size + sum(LOCAL.unpack(local)[9:11]) if len(local) == LOCAL.size else -1
            if payload == record.offset:
                break
    else:
        raise RetagError(_ODD, where=source.name)
    _, _, flags, _, _, _, crc, _, _, _, _ = LOCAL.unpack(local)
    sums = [start + at + _CRC_IN_CENTRAL]
    if crc or not flags & _FOLLOWS:
        sums.append(entry.header + _CRC_IN_LOCAL)
    end = payload + record.stored
    if flags & _FOLLOWS:
        behind = source.read(end, 24)
        signed = 4 if behind[:4] == b"PK\x07\x08" else 0
        if behind[signed : signed + 4] == (record.crc32 or 0).to_bytes(4, "little"):
            sums.append(end + signed)
            wide = behind[signed + 4 : signed + 20] == record.stored.to_bytes(8, "little") * 2
            end += signed + (20 if wide else 12)
    begin = entry.header if end == start else start  # a record that an earlier retag appended is overwritten
    return sums, entry.raw_name, begin, directory[:at], directory[after:], count


def _warnings(checkpoint: Checkpoint, wanted: TagMap, tags: tuple[TagChange, ...]) -> Iterator[str]:
    """Warn about named tags that do not exist, devices that stay as they are, and dangerous files."""
    existing = [tag.old for tag in tags]
    missing = [old for old in wanted if old != OTHERS and old not in existing]
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
