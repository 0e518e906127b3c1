"""``transload.retag``: change the device tags of a checkpoint in place.

No tensor is read or written, torch is not needed, the time does not depend on the size of the file, and a crash at any
moment loses nothing. ``plan_of`` reads the file, finds the bytes to change, using the tags that ``tags`` finds in its
pickle, and proves the plan: it reads the file as it would become, which must differ from the original only in its tags.
``transload.io.journal`` changes the file, or writes a copy.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

from transload.checkpoint import Checkpoint, Record
from transload.devices import KINDS, closest_kind
from transload.errors import ForbiddenWriteError, RetagError, UsageError
from transload.findings import SEVERITIES, Problems, quoted, rescue_command
from transload.format import SAVE_AGAIN
from transload.formats import read_source
from transload.formats.zip import CENTRAL, END, LOCAL, find_directory, read_entry
from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.frozen import Plain, replace
from transload.io import gc_paused, journal
from transload.io.atomic import target_path
from transload.io.journal import Change, Changes
from transload.io.paths import folder_of, is_set
from transload.io.sources import FileSource, Source, is_url, shown
from transload.judge import judge
from transload.judge.problems import command_lines
from transload.nodes import Pickle
from transload.opening import inspect
from transload.render import Reported
from transload.render.lines import Block, Prose, Table, Words, heading, row
from transload.render.words import path_text, plural, printable, size
from transload.retagging.tags import edits_inside, same_but_tags, spliced, tag_edits, tag_of

__all__ = ["Retag", "report", "retag", "several", "undo"]


class TagChange(Plain):
    """A tag of a file, its new value (the same if it stays), and the storages that have it."""

    old: str
    new: str
    storages: int
    nbytes: int


class Retag(Plain, Reported):
    """What was done to a file, or would be.

    ``method`` is ``none``, ``patch`` (as many bytes as before), ``append`` (a new index at the end of the archive),
    ``rewrite`` (into a copy) or ``undo``; ``tags`` are the tags of the file, old and new. ``written`` counts bytes;
    ``grown`` is how many bytes longer the file is. ``how`` is how a copy was made. ``recovered`` is what was done first
    about an earlier retag that was interrupted: ``restored`` or ``finished``.
    """

    path: str
    out: str = ""
    format: str = ""
    method: str = "undo"
    done: bool = False
    undo: bool = False
    written: int = 0
    grown: int = 0
    how: str = ""
    recovered: str = ""
    tags: tuple[TagChange, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any tag changes."""
        return self.method != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": 1, **super().to_dict(), "out": self.out or None}

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def retag(
    path: str | os.PathLike[str],
    to: str | Mapping[str, str],
    *,
    out: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    keep_undo: bool = False,
    hard_links: bool = False,
) -> Retag:
    """Change the device tags of a checkpoint, so that plain ``torch.load(path)`` loads it to another device.

    ``to`` is the device for all tags, or a mapping from tags to devices, in which ``"*"`` stands for all other tags.
    The file is changed in place, or copied to ``out`` with the new tags. ``dry_run`` only plans; ``keep_undo`` keeps
    what ``undo`` needs; ``hard_links`` also changes a file that has several names.

    >>> transload.retag("model.pt", "cpu")  # doctest: +SKIP
    >>> transload.retag("model.pt", {"cuda:1": "cuda:0"}, out="other.pt")  # doctest: +SKIP
    """
    wanted, path = TagMap(to), _path(path)
    target = "" if out is None else target_path(_path(out))
    several = is_set(path)
    if target:
        journal.refuse_target(path, target)
        if keep_undo:
            raise UsageError("a copy needs no undo: the file itself stays as it is")
    elif not several:
        journal.refuse_in_place(path, hard_links=hard_links)
    if several:
        refuse_file(inspect(path), to if isinstance(to, str) else "cpu")
    recovered = journal.recover(path)
    if recovered == "stale":
        raise journal.stale_journal(path)
    source, how = FileSource(path), ""
    try:
        if not target:
            journal.refuse_written_by_others(source.descriptor, path)
        with gc_paused():
            plan, changes, seen = plan_of(source, wanted, target)
        if target and not dry_run:
            how = journal.copy_changed(source.descriptor, target, changes, seen)
        elif changes.runs and not dry_run:
            journal.apply(source.name, changes, seen, keep=keep_undo)
    except ForbiddenWriteError as error:
        if not target:
            error.fix = "Write a copy to a place where you are allowed to: -o COPY (out= in Python)."
        raise
    finally:
        source.close()
    kept = keep_undo and bool(changes.runs)
    return replace(plan, done=not dry_run, undo=kept, how=how, recovered=recovered)


def undo(path: str | os.PathLike[str], *, dry_run: bool = False) -> Retag:
    """Undo the last retag of a file: one that was interrupted, or made with ``keep_undo``.

    Raises an error if nothing was kept, or the file has changed since.
    """
    path = _path(path)
    journal.refuse_in_place(path, hard_links=True)
    recovered = journal.recover(path, anywhere=True)
    if recovered == "stale":
        raise journal.stale_journal(path, tried=True)
    if recovered == "restored":
        return Retag(path, done=True, recovered=recovered)
    changes, seen = journal.undo_changes(path)
    if changes.runs and not dry_run:
        journal.apply(path, changes, seen)
    written, grown = _amounts(changes)
    return Retag(path, done=not dry_run, written=written, grown=grown, recovered=recovered)


def _amounts(changes: Changes) -> tuple[int, int]:
    """How many bytes are written, and how many bytes longer the file gets."""
    return sum(len(run.new) for run in changes.runs), changes.new_size - changes.old_size


def _path(path: object) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}", fix="Save it to a file first.")
    if is_url(name):
        fix = "Download it, and retag that; or leave it, and load it with transload.load, which needs no tags."
        raise UsageError("the tags of a file elsewhere cannot be changed", where=shown(name), fix=fix)
    return name


# -- which tags are wanted

OTHERS = "*"
"""In a mapping, the key for every tag that is not named."""

_DEVICE = re.compile(r"[a-z][a-z_]*(?::(?:0|[1-9][0-9]{0,5}))?")
_NEVER = {
    "meta": "torch.load(path) would then return tensors without data",
    "xla": "torch restores no storages on xla: load with map_location='cpu' and move the tensors",
}


class TagMap(dict[str, str]):
    """The new tags, by old tag or ``OTHERS``, from a device or a mapping of tags to devices."""

    def __init__(self, to: object) -> None:
        if isinstance(to, str):
            self[OTHERS] = _device(to)
            return
        if not isinstance(to, Mapping):
            raise UsageError(f"expected a device or a mapping of devices, not {type(to).__name__}")
        for old, new in to.items():
            # A tag in a file may be any string: an invalid one may be the reason for the retag.
            if not isinstance(old, str) or not old or old == "meta":
                raise UsageError(f"{old!r} is not a tag that can be changed")
            if new or old != OTHERS:
                self[old] = _device(new)
        if not self:
            raise UsageError("no device is named to change the tags to")

    def new(self, tag: str) -> str:
        """The new tag for an old one. ``meta`` is kept unless it is named: such a storage has no bytes.

        >>> TagMap({"cuda:1": "cuda:0"}).new("cuda:1"), TagMap("cpu").new("cuda:3"), TagMap("cpu").new("meta")
        ('cuda:0', 'cpu', 'meta')
        """
        return self.get(tag) or (tag if tag == "meta" else self.get(OTHERS, tag))


def _device(name: object) -> str:
    if not isinstance(name, str):
        name = str(name)  # a torch.device
    kind, colon, _ = name.partition(":")
    if kind in _NEVER:
        raise UsageError(f"{name!r} cannot be used as a tag: {_NEVER[kind]}")
    if kind in ("cpu", "mps") and colon:
        raise UsageError(f"torch does not read a tag {name!r}, only {kind!r}", fix=f"Write {kind}.")
    if not _DEVICE.fullmatch(name) or kind not in KINDS:
        near = closest_kind(kind[:40])
        meant = f" Did you mean {near}{':0' if near == 'cuda' else ''}?" if near else ""
        fix = f"Write it as torch does: cpu, cuda:0, mps, xpu:1.{meant}"
        raise UsageError(f"{name[:80]!r} is not a device", fix=fix)
    return name


# -- which files cannot be retagged


def refuse_file(checkpoint: Checkpoint, to: str = "cpu") -> None:
    """Refuse a file that has no tags to change, or is damaged; ``to`` is the requested device."""
    path, form, findings = checkpoint.path, checkpoint.traits, checkpoint.findings
    worst = min(findings, key=lambda finding: SEVERITIES.index(finding.severity), default=None)
    why = worst.title if worst else "it is damaged"
    repair = "\n".join(command_lines(findings))
    if checkpoint.integrity == "not-a-checkpoint":
        what = why if why.startswith("not a checkpoint") else f"it is not a checkpoint: {why}"
        raise RetagError(what.removesuffix(", not a checkpoint"), where=path, fix=repair)
    if form.retag[0]:
        why, fix = form.retag
        if not fix:
            folder = folder_of(path)[0].name or "."
            fix = f"Retag all its files by naming their directory: transload retag {quoted(folder)} --to {quoted(to)}"
            saved = [part.name for part in checkpoint.parts if part.role != "index"]
            if {os.path.splitext(name)[1] for name in saved} - {"", ".json"} == {".safetensors"}:
                fix = "Its files are safetensors, which carry no device: they load anywhere."
        raise RetagError(why, where=path, fix=fix.replace("{rescue}", rescue_command(path).removeprefix("$ ")))
    if form.container == "zip" and any(record.method for record in checkpoint.records):
        raise RetagError("it was zipped again with compression", where=path, fix=repair or SAVE_AGAIN)
    if checkpoint.integrity not in ("whole", "unchecked"):
        see = f"See all findings: transload inspect {quoted(path)}"
        raise RetagError(f"it is damaged: {why}", where=path, fix=repair or see)


# -- which bytes change

_GAP = 4096
"""Edits closer than this are merged into one change, since a disk writes whole pages."""

_CRC_IN_CENTRAL, _CRC_IN_LOCAL = 16, 14
_FOLLOWS = 8  # the zip flag for a data descriptor: size and checksum follow the bytes
_ODD = "the central directory of the archive is inconsistent"


def plan_of(source: FileSource, wanted: TagMap, target: str = "") -> tuple[Retag, Changes, os.stat_result]:
    """Read a file and plan what to write, into the copy ``target`` or in place; nothing is written.

    Returns what would be done, the changes, and the ``stat`` of the file that was read.
    """
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
        method, changes = _proven(source, checkpoint, main, wanted, copy=bool(target))
    # Named tags that do not exist, devices that stay as they are, and dangerous files.
    warnings: list[str] = []
    existing = [tag.old for tag in tags]
    missing = [old for old in wanted if old != OTHERS and old not in existing]
    if missing:
        warnings.append(f"nothing is tagged {', '.join(missing)}; the file has {', '.join(existing) or 'no tags'}")
    objects = [leaf.name for leaf in checkpoint.leaves if leaf.kind == "torch.device" and leaf.text != "cpu"]
    if objects:
        more = " …" if objects[4:] else ""
        warnings.append(f"torch.device values stay as they are: {', '.join(objects[:4])}{more}")
    rebuilt = [tensor.name for tensor in checkpoint.tensors if tensor.kind == "device"]
    if rebuilt:
        warnings.append(f"tensors that name their device themselves stay there: {', '.join(rebuilt[:4])}")
    if checkpoint.safety == "dangerous":
        warnings.append("nothing in it was run, but loading it would run code that can do harm: see transload inspect")
    written, grown = _amounts(changes)
    planned = Retag(source.name, target, checkpoint.format, method, written=written, grown=grown, tags=tags)
    return replace(planned, warnings=tuple(warnings)), changes, seen


def _proven(source: Source, checkpoint: Checkpoint, main: Pickle, wanted: TagMap, *, copy: bool) -> tuple[str, Changes]:
    """The method and the changes; ``RetagError`` unless the changed file would differ only in its tags."""
    record = None  # data.pkl of an archive; in the legacy format the pickles follow one another
    container = checkpoint.traits.container
    plain = container == "bare"
    offset, size = 0 if plain else sum(pickle.end for pickle in checkpoint.pickles[:3]), main.end
    if container == "zip":
        record = {record.name.lower(): record for record in reversed(checkpoint.records)}["data.pkl"]
        offset, size = record.offset or 0, record.size
    data = source.read(offset, size)
    edits = edits_inside(main, data, wanted.new) if plain else tag_edits(main, data, wanted.new)
    unusual = RetagError("its storages are not named as torch names them", where=source.name, fix=SAVE_AGAIN)
    if edits is None:
        raise unusual
    edits.sort()
    if not any(edit.grown for edit in edits):
        method, new = "patch", spliced(data, edits)
        spans: list[list[int]] = []
        for at, end, _ in edits:
            if spans and at - spans[-1][1] < _GAP:
                spans[-1][1] = end
            else:
                spans.append([at, end])
        runs = [Change(offset + at, data[at:end], new[at:end]) for at, end in spans]
        if record is not None and record.crc32 is not None:  # else the archive has zeros instead of checksums
            before, after = (crc32(content).to_bytes(4, "little") for content in (data, new))
            runs += [Change(at, before, after) for at in _find_record(source, record)[0]]
        changes = Changes(tuple(sorted(run for run in runs if run.old != run.new)), source.size, source.size)
    elif record is not None:  # append a new version of the record, and the central directory after it
        method, new = "append", spliced(data, edits)
        _, name, begin, before, behind, entries = _find_record(source, record)
        crc = crc32(new) if record.crc32 is not None else 0
        directory = before + central_entry(name, len(new), crc, begin) + behind
        new = local_header(name, len(new), begin) + new + descriptor(len(new), crc, begin)
        new += directory + end_of_archive(entries, begin + len(new), len(directory))
        changed = Change(begin, source.read(begin, source.size - begin), new)
        changes = Changes((changed,), source.size, begin + len(new))
    elif copy:
        method, grown = "rewrite", sum(edit.grown for edit in edits)
        runs = [Change(offset + at, data[at:end], new) for at, end, new in edits]
        changes = Changes(tuple(runs), source.size, source.size + grown)
    else:
        which = "a plain pickle" if plain else "the legacy format"
        what = f"the new tags do not fit in place of the old ones, and {which} cannot grow in place"
        raise RetagError(what, where=source.name, fix="Write a copy: -o COPY (out= in Python).")
    # Tensors and values follow from the pickle and the storages, so comparing these two is enough.
    again = read_source(changes.applied(source), tree=bool(checkpoint.problems))
    pickle = next((pickle for pickle in again.pickles if pickle.main), None)
    # Outside an archive, storages move if something before them grows.
    moving = changes.runs if record is None else ()
    begins, shifts = [run.offset for run in moving], [0, *accumulate(len(run.new) - len(run.old) for run in moving)]
    storages = [
        storage._replace(
            device=wanted.new(storage.device),
            offset=storage.offset and storage.offset + shifts[bisect_right(begins, storage.offset)],
        )[:-1]  # without the names of tensors
        for storage in checkpoint.storages
    ]
    if (
        pickle is None
        or again.format != checkpoint.format
        or [problem.code for problem in again.problems] != [problem.code for problem in checkpoint.problems]
        or [storage[:-1] for storage in again.storages] != storages
        or not same_but_tags(main, pickle, wanted.new)
    ):
        raise unusual
    return method, changes


def _find_record(source: Source, record: Record) -> tuple[list[int], bytes, int, bytes, bytes, int]:
    """Find an uncompressed record in an archive without problems.

    Returns the positions of its checksum, its name, where its replacement can begin, the central directory before and
    after its entry, and the number of all entries.
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


# -- the report

_TAGS = 32
_METHODS = {
    "none": "nothing: all tags are already as requested",
    "patch": "over the old tags, in the same number of bytes",
    "append": "a new index at the end of the archive",
    "rewrite": "a copy with a new index",
    "undo": "what was there before the last retag",
}


def report(retag: Retag) -> Iterator[Block]:
    """Everything ``transload retag`` says."""
    yield Prose(((path_text(retag.out or retag.path, None), "strong"),))
    if retag.recovered:
        yield row("before", journal.RECOVERED[retag.recovered], "trust")
    rows: list[tuple[Words, ...]] = []
    for tag in retag.tags[:_TAGS]:
        stays, amount = tag.old == tag.new, (plural(tag.storages, "storage"), size(tag.nbytes))
        new = ("stays", "dim") if stays else (printable(tag.new), "good")
        rows.append((((printable(tag.old), "dim" if stays else ""),), "" if stays else "→", (new,), *amount))
    if rows:
        yield Table(rows, right=(3, 4), dim=(1, 3, 4))
    if len(retag.tags) > _TAGS:
        yield row("", f"… and {len(retag.tags) - _TAGS:,} more tags", "dim")
    words = _METHODS[retag.method]
    if retag.written:
        words = f"{size(retag.written)}, {words}"
        if retag.grown:
            words += f", the file is {size(abs(retag.grown))} {'longer' if retag.grown > 0 else 'shorter'}"
    yield row("written" if retag.done else "would write", words, "" if retag.done else "trust")
    if retag.out:
        shared = ", sharing its bytes on the disk" if retag.how == "shared" else ""
        yield row("copy of", path_text(retag.path, None) + shared)
    if retag.undo and retag.done:
        yield row("undo", "transload retag FILE --undo undoes it")
    for warning in retag.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def several(results: Sequence[Retag], total: int) -> Iterator[Block]:
    """A table of several files; ``total`` includes those that failed."""
    rows: list[tuple[Words, ...]] = []
    for result in results:
        tags = [f"{tag.old} → {tag.new}" for tag in result.tags if tag.old != tag.new]
        more = f" and {len(tags) - 3} more" if len(tags) > 3 else ""
        words = ", ".join(map(printable, tags[:3])) + more or _METHODS[result.method]
        written = size(result.written) if result.done else f"would be {size(result.written)}"
        rows.append((path_text(result.path), ((words, "" if tags else "dim"),), written))
    if results:
        yield Table(rows, right=(2,), titles=("file", "tags", "written"), indent=0)
    failed = f", {total - len(results):,} could not be retagged" if len(results) < total else ""
    changed = sum(result.changed for result in results)
    verb = "changed" if all(result.done for result in results) else "would be changed"
    yield from heading(f"{plural(total, 'file')}: {changed:,} {verb}{failed}")
