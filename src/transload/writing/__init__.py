"""Write the tensors of an open checkpoint in another format, and read them back to be sure; torch is not needed.

``write_content`` does it all: a ``ConversionPlan`` decides what is written, with ``to_torch`` for a torch zip; one of
``_WRITERS`` writes it into a ``Bundle`` (``output``), and checks that a reader finds every tensor there; ``transfer``
moves and compares the bytes; ``objects`` keeps everything that is not a tensor.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from transload.checkpoint import Record as Stored
from transload.checkpoint import Tensor
from transload.dtypes import ITEMSIZE, NUMPY
from transload.errors import ConvertError, UsageError
from transload.findings import join_names
from transload.formats import read_source
from transload.formats.safetensors import MAX_HEADER, read_safetensors
from transload.formats.sets.single import RAW_TENSORS
from transload.formats.zip import read_index
from transload.formats.zip_writer import PIECE, SMALL, Chunk, NewRecord, write_archive, write_checkpoint
from transload.frozen import Frozen
from transload.geometry import MAX_DIMENSIONS
from transload.io import gc_paused
from transload.io.atomic import refuse_missing_directory, remove_leftovers
from transload.io.paths import folder_of
from transload.io.pool import progress_counter
from transload.io.sources import FileSource, Progress, SourceLike
from transload.opening.elements import ElementReader
from transload.render import Reported
from transload.render.lines import Block, Prose, row
from transload.render.words import path_text, plural, printable, size
from transload.writing.objects import Leftovers, Omission
from transload.writing.output import (
    PART,
    Bundle,
    begins_with,
    file_identity,
    index_name,
    refuse_existing,
    sibling_files,
)
from transload.writing.plan import SAFETENSORS_DTYPES, TARGETS, ConversionPlan, Options, member_name, notes
from transload.writing.transfer import ConversionJob, TargetTensor, check_source, read_back, write_file

__all__ = ["Conversion", "report", "write_content"]

_LEFTOVERS_START = b'{\n "from": '
"""How every file of leftovers begins; no other file is replaced."""


def write_content(
    reader: ElementReader,
    dst: str,
    format_: str,
    options: Options,
    *,
    src: SourceLike | None = None,
    more: Sequence[tuple[ElementReader, SourceLike]] = (),
    verify: bool,
    overwrite: bool,
    progress: Progress,
    check_unchanged: Callable[[], None] = lambda: None,
) -> Conversion:
    """Write an open checkpoint, damaged or not; ``src`` is what it was opened from, if not its path.

    ``more`` are others to write with it, and what they were opened from. If this raises, nothing is left behind.
    """
    start = time.monotonic()
    refuse_missing_directory(dst)
    leftovers_path = f"{dst.rstrip('/' + os.sep)}.leftovers.json"
    refuse_existing(leftovers_path, overwrite=overwrite)
    if os.path.lexists(leftovers_path) and not begins_with(leftovers_path, _LEFTOVERS_START):
        what = "the existing file was not written by a conversion"
        raise UsageError(what, where=leftovers_path, fix="Choose another name.")
    if TARGETS[format_].file:
        refuse_existing(dst, overwrite=overwrite)
    with gc_paused():
        plan = ConversionPlan([reader, *(other for other, _ in more)], format_, options)
    checkpoint, others = reader.checkpoint, [other.checkpoint for other, _ in more]
    total = sum(entry.nbytes for entry in (plan.storages if format_ == "torch" else plan.entries))
    report_progress = progress_counter(progress, 2 * total if verify else total, "converting")
    sources = _identities(reader, checkpoint.path if src is None else src)
    sources = sources.union(*(_identities(other, path) for other, path in more))
    with Bundle(overwrite=overwrite, sources=sources) as bundle:
        job = ConversionJob(plan.reader, dst, bundle, options.allow_inf, verify, report_progress or (lambda _: None))
        _WRITERS[format_](job, plan)
        if verify:
            read = plan.lora.tensors if plan.lora else ()
            of_adapter = [TargetTensor(tensor.name, tensor, tensor.dtype) for tensor in read]
            paths = [checkpoint.path, *(other.path for other in others)]
            check_source([*plan.entries, *plan.carried, *of_adapter], job, paths)
        leftovers = Leftovers(plan.dropped, frozenset(tensor.path for tensor in plan.checkpoint.tensors))
        table: dict[str, Any] = {}
        if leftovers.data not in (None, {}, []):
            table["data"] = leftovers.data
        if plan.metadata and not plan.target.metadata:
            table["metadata"] = plan.metadata
        if table:
            table = {"from": ", ".join(os.path.basename(each.path) for each in (checkpoint, *others)), **table}
            text = json.dumps(table, indent=1).encode() + b"\n"
            bundle.add(leftovers_path).write([text])
        check_unchanged()
    written = Conversion(
        path=checkpoint.path,
        inputs=tuple((each.path, each.format, len(each.tensors)) for each in (checkpoint, *others)) if more else (),
        out=dst,
        format=checkpoint.format,
        to=format_,
        files=tuple(bundle.paths),
        tensors=len(plan.entries) + len(plan.aliases) + len(plan.carried),
        nbytes=plan.nbytes,
        cast=sum(entry.is_cast for entry in plan.entries),
        infinite=sum(entry.infinite for entry in plan.entries),
        aliases=tuple(plan.aliases),
        left=tuple(plan.omitted),
        listed=tuple(leftovers.listed),
        leftovers=leftovers_path if table else "",
        others=plan.others,
        renamed=tuple(plan.renamed),
        verified=verify,
        seconds=time.monotonic() - start,
        notes=tuple(notes(plan, job, leftovers)),
        merged=sum(entry.delta is not None for entry in plan.entries),
        replaced=sum(entry.tensor in plan.lora.replaced.values() for entry in plan.entries) if plan.lora else 0,
    )
    if overwrite and not table:
        with suppress(OSError):  # leftovers of an earlier conversion do not belong to this target
            if begins_with(leftovers_path, _LEFTOVERS_START):
                os.unlink(leftovers_path)
    return written


def _identities(reader: ElementReader, source: Any) -> set[tuple[int, int]]:
    """The identities of all files that a checkpoint is read from."""
    if isinstance(source, str | os.PathLike):
        path = os.fsdecode(source)
        folder = folder_of(path)[0]
        names = {*(name for name, _ in reader.files), *(storage.file for storage in reader.checkpoint.storages)}
        names |= {part.name for part in reader.checkpoint.parts if part.role == "index"}
        return file_identity(path).union(*(file_identity(folder.path(name)) for name in names if name))
    with suppress(AttributeError, OSError, ValueError):
        return file_identity(source.fileno())
    return set()


# -- the result


class Conversion(Frozen, Reported):
    """What was converted, and what was not.

    ``files`` are those written; the first contains the weights, or is the directory. ``nbytes`` is the size of all
    tensors; ``copied`` is always 0. ``aliases`` are further names of tensors that are stored once. ``left`` are tensors
    that are not in the target; those with ``lost`` because it cannot store them. ``listed`` is everything else that it
    cannot store and is not plain data, such as functions; no file has it. Plain data is in the file ``leftovers``.
    ``others`` counts tensors outside the key, or not chosen by name. ``notes`` also names the tensors that are numpy
    arrays in the source. ``inputs`` are the path, the format and the number of tensors of each source, if there are
    several; ``path`` and ``format`` are those of the first. ``merged`` counts the tensors that an adapter changed, and
    ``replaced`` those that it has whole.
    """

    path: str
    out: str
    format: str
    to: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    copied: int = 0
    cast: int = 0
    infinite: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    left: tuple[Omission, ...] = ()
    listed: tuple[Omission, ...] = ()
    leftovers: str = ""
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    verified: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    inputs: tuple[tuple[str, str, int], ...] = ()
    merged: int = 0
    replaced: int = 0

    @property
    def complete(self) -> bool:
        """Whether every requested tensor is in the target."""
        return not any(omission.lost for omission in self.left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("path", "out", "format", "to", "complete", "verified", "files", "tensors", "nbytes", "copied", "cast")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in (*names, "infinite", "others")},
            "files": list(self.files),
            "seconds": round(self.seconds, 3),
            "aliases": dict(self.aliases),
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "left": [omission._asdict() for omission in self.left],
            "leftovers": self.leftovers or None,
            "listed": [{"name": omission.name, "what": omission.why} for omission in self.listed],
            "notes": list(self.notes),
            **(self._several() if self.inputs else {}),
        }

    def _blocks(self) -> Iterator[Block]:
        return report(self)

    def _several(self) -> dict[str, Any]:
        inputs = [{"path": path, "format": format_, "tensors": count} for path, format_, count in self.inputs]
        return {"inputs": inputs, "merged": self.merged, "replaced": self.replaced}


# -- the report

_SHOWN = 16


def report(conversion: Conversion) -> Iterator[Block]:
    """Everything ``transload convert`` says."""
    yield Prose(((path_text(conversion.out, None), "strong"),))
    shards = sum(name.endswith(".safetensors") for name in conversion.files)
    files = f", {plural(shards, 'shard')} and an index" if shards > 1 else ""
    nbytes, seconds = conversion.nbytes, conversion.seconds
    speed = f", {size(round(nbytes / seconds))}/s" if nbytes >= 1e8 and seconds else ""
    checked = "read back and compared" if conversion.verified else "not read back"
    tensors = f"{plural(conversion.tensors, 'tensor')}, {size(nbytes)}"
    if conversion.inputs:
        read = [f"{path_text(path)} ({plural(count, 'tensor')})" for path, _, count in conversion.inputs]
        yield row("read", join_names(read, _SHOWN, 1000))
    yield row("written", f"{TARGETS[conversion.to].words}: {tensors}{files}{speed}; {checked}")
    if conversion.merged:
        whole = f"; {plural(conversion.replaced, 'tensor')} of the adapter as they are" if conversion.replaced else ""
        yield row("merged", f"the adapter into {plural(conversion.merged, 'tensor')}{whole}")
    if conversion.cast:
        infinite = f", {plural(conversion.infinite, 'number')} became infinite" if conversion.infinite else ""
        converted = f"{plural(conversion.cast, 'tensor')} to another dtype{infinite}"
        yield row("converted", converted, "trust" if infinite else "")
    if conversion.aliases:
        tied = [f"{printable(name)} is {printable(kept)}" for name, kept in conversion.aliases]
        yield row("tied", join_names(tied, _SHOWN, 1000))
    if conversion.renamed:
        renamed = [(printable(old) or '""') + f" → {printable(new)}" for old, new in conversion.renamed]
        yield row("renamed", join_names(renamed, _SHOWN, 1000), "trust")
    if conversion.others:
        yield row("not chosen", plural(conversion.others, "other tensor"), "dim")
    yield from _omissions("lost", [omission for omission in conversion.left if omission.lost], "bad")
    yield from _omissions("left out", [omission for omission in conversion.left if not omission.lost], "")
    if conversion.leftovers:
        yield row("leftovers", f"everything else, as plain data: {printable(conversion.leftovers, None)}")
    yield from _omissions("not kept", conversion.listed, "bad", "; --json names them")
    for note in conversion.notes:
        yield row("note", printable(note, None), "dim")


def _omissions(label: str, omissions: Sequence[Omission], role: str, hint: str = "") -> Iterator[Block]:
    for name, why, _ in omissions[:_SHOWN]:
        yield row(label, f"{printable(name) or 'the root'}: {printable(why)}", role)
        label = ""  # only before the first
    if len(omissions) > _SHOWN:
        yield row("", f"… and {len(omissions) - _SHOWN:,} more{hint}", "dim")


def _not_as_written(path: str, name: str = "it") -> ConvertError:
    return ConvertError(f"{name} does not read back as it was written", where=path)


# -- archives

_Member = tuple[bytes, bytes, TargetTensor]
"""A name in the archive, the header before the bytes of an entry, and the entry."""


def _records(members: Iterable[_Member], job: ConversionJob) -> Iterator[NewRecord]:
    for name, head, entry in members:
        size = len(head) + entry.nbytes
        chunks = partial(_chunks, head, entry, job)
        yield name, size, b"".join(chunk.view for chunk in chunks()) if size <= SMALL else chunks


def _chunks(head: bytes, entry: TargetTensor, job: ConversionJob) -> Iterator[Chunk]:
    yield from [Chunk(head)] if head else []
    for piece in job.chunks(entry, PIECE):
        yield Chunk(bytes(piece))  # a copy: the writer reads some pieces ahead
        job.progress(len(piece))


def _write_torch(job: ConversionJob, plan: ConversionPlan) -> None:
    """Write a zip archive like that of ``torch.save``, and check that our reader finds the same tensors in it."""
    storages = plan.storages
    file = job.bundle.add(job.dst)
    members = ((b"data/%d" % number, b"", entry) for number, entry in enumerate(storages))
    nbytes = sum(entry.nbytes for entry in storages)
    write_checkpoint(file, plan.opening, _records(members, job), nbytes)

    source = FileSource(file.path, file.descriptor)
    read = read_source(source)
    problems = [problem for problem in read.problems if problem.code != "leaves-uncounted"]  # e.g. a long loss history
    if len(read.tensors) != len(plan.placed) or problems:
        raise _not_as_written(source.name)
    for tensor, entry in zip(read.tensors, plan.placed, strict=True):
        before = entry.tensor
        if entry.call is not None:  # carried over with its storages
            same = _geometry(tensor) == _geometry(before)
        else:
            view = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.storage)
            same = view == (entry.dtype, entry.offset, before.shape, entry.stride, str(entry.storage))
        if not same:
            raise _not_as_written(source.name, entry.name)
    if job.verify:
        written = {storage.key: storage for storage in read.storages}
        pairs = [(entry, written[str(number)]) for number, entry in enumerate(storages) if entry.nbytes]
        records = [Stored(entry.name, at.offset, at.nbytes, at.stored, at.crc32) for entry, at in pairs]
        read_back(source, records, nbytes, job)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    parts = tuple(_geometry(part) for part in tensor.parts)
    return tensor.kind, tensor.dtype, tensor.offset, tensor.shape, tensor.stride, parts


# -- safetensors: one file, or shards with the index that Hugging Face's loaders expect

_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _write_safetensors(job: ConversionJob, plan: ConversionPlan) -> None:
    """Write one file, or shards of at most ``max_shard_size`` bytes and their index."""
    max_size = plan.options.max_shard_size
    shards: list[list[TargetTensor]] = [[]]
    size = 0
    for entry in plan.entries:  # an entry larger than a shard gets its own shard
        if max_size and shards[-1] and size + entry.nbytes > max_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    for shard in shards:  # wide dtypes first, so that every tensor is aligned
        shard.sort(key=lambda entry: -ITEMSIZE[entry.dtype])
    headers = [_header(shard, plan) for shard in shards]  # they may fail: build all before writing anything
    names = [job.dst.removesuffix(".index.json")]
    if (count := len(shards)) > 1:
        stem = names[0].removesuffix(".safetensors")
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for path, match in sibling_files(index_name(job.dst), PART):  # of killed conversions, of any number of shards
        remove_leftovers(os.path.join(os.path.dirname(path), match["shard"]))
    for name, shard, header in zip(names, shards, headers, strict=True):
        file = job.bundle.add(name)
        write_file(file.descriptor, header, shard, job, file.path)
        # Our reader must find exactly the entries, at their offsets.
        source = FileSource(file.path, file.descriptor)
        read = read_safetensors(source)
        places = {(tensor.name, tensor.dtype, tensor.shape, tensor.file_offset) for tensor in read.tensors}
        at = len(header)
        for entry in shard:
            if entry.nbytes and (entry.name, entry.dtype, entry.tensor.shape, at) not in places:
                raise _not_as_written(source.name, entry.name)
            at += entry.nbytes
        if len(read.tensors) != len(shard) or read.problems:
            raise _not_as_written(source.name)
    if len(shards) > 1:
        files = [os.path.basename(name) for name in names]
        weights = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in plan.entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
        job.bundle.add(index_name(job.dst), is_index=True).write([text])
        if os.path.isfile(job.dst) and job.dst not in job.bundle.paths:
            job.bundle.remove(job.dst)  # loaders would prefer it to the shards


def _header(entries: list[TargetTensor], plan: ConversionPlan) -> bytes:
    names = {entry.name for entry in entries}
    metadata = {"format": "pt", **plan.metadata, **{name: kept for name, kept in plan.aliases if kept in names}}
    lines = [f"{_json(plan.target.metadata)}:{_json(metadata)}"]
    at = 0
    for entry in entries:  # as text: a dictionary of all entries takes five times as much memory
        shape = list(entry.tensor.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # torch counts pairs, safetensors counts numbers
            shape[-1] *= 2
        described = f'"dtype":"{SAFETENSORS_DTYPES[entry.dtype]}","shape":[{",".join(map(str, shape))}]'
        lines.append(f'{_json(entry.name)}:{{{described},"data_offsets":[{at},{(at := at + entry.nbytes)}]}}')
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ConvertError(f"its header would take {len(text):,} bytes: safetensors allows {MAX_HEADER:,}")
    return len(text).to_bytes(8, "little") + text


# -- npz: one .npy for each tensor, not compressed, each at a multiple of 64 bytes

_MAX_NAME = 0xFFFF


def _write_npz(job: ConversionJob, plan: ConversionPlan) -> None:
    """Write the archive, and check that our reader finds the arrays in it."""
    members: list[_Member] = []
    for entry in plan.entries:
        name, shape = f"{member_name(entry.name)}.npy".encode(), entry.tensor.shape
        if len(name) > _MAX_NAME:
            raise ConvertError(f"the name {entry.name[:40]}… is too long for a zip archive", where=job.dst)
        if len(shape) > MAX_DIMENSIONS:
            what = f"{entry.name} has {len(shape):,} dimensions: numpy allows {MAX_DIMENSIONS}"
            raise ConvertError(what, where=job.dst)
        # The header of a .npy file, padded like numpy's to a multiple of 64 bytes.
        dtype = NUMPY.get(entry.dtype, f"|V{ITEMSIZE[entry.dtype]}")
        text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
        text += b" " * (-(len(text) + 11) % 64) + b"\n"
        members.append((name, b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text, entry))
    file = job.bundle.add(job.dst)
    write_archive(file, b"", _records(members, job), lambda _: ())

    source = FileSource(file.path, file.descriptor)
    index = read_index(source)
    if len(index.records) != len(members):
        raise _not_as_written(source.name)
    records = []
    for member, record, (name, head, entry) in zip(index.names, index.records.values(), members, strict=True):
        same = member.encode() == name and record.size == len(head) + entry.nbytes
        if not same or source.read(record.offset or 0, len(head)) != head:
            raise _not_as_written(source.name, entry.name)
        records.append(record._replace(name=entry.name))
    if job.verify:
        read_back(source, records, plan.nbytes, job)


# -- raw: a directory with the bytes of each tensor in a numbered file, and an index in JSON
#
# Tensor names are only in the index: nothing that a file says becomes a path.


def _write_raw(job: ConversionJob, plan: ConversionPlan) -> None:
    """Write the files and their index."""
    folder = job.bundle.add_folder(job.dst).hidden
    tensors: dict[str, Any] = {}
    for number, entry in enumerate(plan.entries):
        name = f"{number:06d}.bin"
        with open(os.path.join(folder, name), "x+b", buffering=0) as file:
            write_file(file.fileno(), b"", [entry], job, f"{job.dst} › {entry.name}")
            os.fsync(file.fileno())
        shape = list(entry.tensor.shape)
        tensors[entry.name] = {"file": name, "dtype": entry.dtype, "shape": shape, "nbytes": entry.nbytes}
    index = {
        "format": RAW_TENSORS,
        "version": 1,
        "byteorder": "little",
        "order": "row-major",
        "tensors": tensors,
        "aliases": dict(plan.aliases),
    }
    with open(os.path.join(folder, "index.json"), "xb") as table:
        table.write(json.dumps(index, indent=1).encode() + b"\n")
        table.flush()
        os.fsync(table.fileno())


def _write_dcp(job: ConversionJob, plan: ConversionPlan) -> None:
    from transload.writing.to_dcp import write_dcp

    write_dcp(job, plan.flattened.leaves if plan.flattened else {})


def _write_universal(job: ConversionJob, plan: ConversionPlan) -> None:
    from transload.writing.to_universal import write_universal

    if plan.universal is not None:
        write_universal(job, plan.universal)


_WRITERS = {
    "torch": _write_torch,
    "safetensors": _write_safetensors,
    "npz": _write_npz,
    "raw": _write_raw,
    "dcp": _write_dcp,
    "universal": _write_universal,
}
