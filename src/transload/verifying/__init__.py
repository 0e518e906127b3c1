"""``transload.verify``: check that the bytes of a checkpoint are those that were saved, and hash its tensors.

``verify`` opens the checkpoint, lets ``tensors.damage`` read every byte and compare checksums, sizes and indices, reads
tensors one by one if their hashes or values are requested, and combines the results into a verdict. A manifest is a
file with the hashes of tensors, with which they can be compared later, in any container.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple

from transload._version import __version__
from transload.checkpoint import Record, Tensor
from transload.errors import CannotReadError, ContentError, ManifestError, TransloadError, UsageError
from transload.findings import Finding, Integrity, rescue_command
from transload.format import FORMATS, format_of
from transload.formats.record_checksums import Lost, mismatch, new_problems
from transload.formats.safetensors import header_metadata
from transload.frozen import Frozen, Reported
from transload.io import pool
from transload.io.atomic import AtomicFile, refuse_missing_directory
from transload.io.checksums import fastest_crc32
from transload.io.sources import FileSource, Progress, SourceLike
from transload.judge import integrity_of, judge
from transload.judge.problems import rule_of
from transload.opening import OpenCheckpoint, inspect
from transload.opening.damage import Damage, Key, damages, key_of, misplaced, records_of, sum_records
from transload.opening.elements import Allowance, ElementReader, FileRange
from transload.render.checkpoint import INTEGRITY, findings
from transload.render.lines import BLANK, Block, Prose, Table, Words, as_text, heading, note, row, tally
from transload.render.words import count, path_text, plural, printable, size
from transload.steps import has_command

__all__ = ["Damage", "Difference", "TensorSum", "Verification", "read_manifest", "refuse_target", "report", "several"]
__all__ += ["verify", "write_manifest", "written"]


class TensorSum(NamedTuple):
    """A tensor, with the hash of its elements, which docs/verify.md defines.

    ``sha256`` is empty if it was not requested, or if there are no elements to hash: ``note`` says why. ``nan`` and
    ``inf`` are ``None`` if they were not counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str = ""
    nan: int | None = None
    inf: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self._asdict(), "shape": list(self.shape), "sha256": self.sha256 or None}


class Difference(NamedTuple):
    """A tensor that differs from the manifest: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


class Verification(Frozen, Reported):
    """Whether the bytes of a checkpoint are those that were saved, as far as that can be known.

    ``integrity`` is the verdict: ``whole`` if every record has the checksum it was saved with, ``unchecked`` if there
    are none to compare and nothing else is wrong. ``damaged`` are the tensors whose bytes are not those that were
    saved. ``checksums`` counts the records that were compared, ``unsummed`` those without a checksum; ``nbytes_read``
    bytes were read in ``seconds``. ``sha256`` is the hash of all tensors; ``tensors`` is filled if hashes or values are
    requested. ``manifest`` is the path of the manifest, ``differences`` what differs from it.
    """

    path: str
    format: str
    nbytes: int
    integrity: Integrity
    tensor_count: int
    checksums: int
    unsummed: int
    nbytes_read: int
    seconds: float
    damaged: tuple[Damage, ...] = ()
    findings: tuple[Finding, ...] = ()
    tensors: tuple[TensorSum, ...] = ()
    sha256: str = ""
    manifest: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it and nothing differs from the manifest: the condition for exit code 0."""
        return self.integrity in ("whole", "unchecked") and not self.damaged and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what ``--json`` prints."""
        names = ("path", "format", "nbytes", "ok", "integrity", "tensor_count", "checksums", "unsummed", "nbytes_read")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 6),
            "damaged": [each.to_dict() for each in self.damaged],
            "findings": [finding.to_dict() for finding in self.findings],
            "sha256": self.sha256 or None,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "manifest": self.manifest or None,
            "differences": [each.to_dict() for each in self.differences],
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        return as_text(report(self))


def verify(
    f: SourceLike,
    *,
    hashes: bool = False,
    values: bool = False,
    against: str | os.PathLike[str] | Manifest | None = None,
    progress: Progress = None,
) -> Verification:
    """Read every byte of a checkpoint, compare all checksums, and name the tensors whose bytes have changed.

    ``f`` is a path (of a file or a directory), bytes, or a seekable binary file object; torch is not needed, and
    nothing in the file is run. ``hashes`` computes a sha256 of each tensor and of all together, the same in every
    container; ``against`` compares them with a manifest. ``values`` counts NaN and infinities. ``progress`` is a
    function of the bytes done and the total, or True for a line on the terminal.

    >>> verify(b"<html>").integrity
    'not-a-checkpoint'

    Raises ``CannotReadError`` if it cannot be read at all; whatever else is wrong is in the result.
    """
    start = time.perf_counter()
    manifest = against if isinstance(against, Manifest) else None
    if against is not None and manifest is None:
        if not isinstance(against, str | os.PathLike):
            raise UsageError(f"expected the path of a manifest, not {type(against).__name__}")
        manifest = read_manifest(os.fspath(against))
    hashes = hashes or manifest is not None
    with OpenCheckpoint(f) as opened:
        result = _Scan(opened.elements, progress, hashes=hashes, values=values).verification(opened.elements)
    if manifest is not None:
        differences = compare(manifest.of(result.path), result.tensors)
        result = replace(result, manifest=manifest.path, differences=differences)
    return replace(result, seconds=time.perf_counter() - start)


_REMARKS = frozenset({"no-checksums", "index-missing", "index-total-size", "shard-tensor-unlisted", "shard-stray"})
_PIECE = 1 << 20
_ALONE = 4 << 20  # for fewer bytes it does not pay to start threads
_TINY = 8 << 10  # nor for tensors this small: finding them, one thread at a time, takes longer than hashing them


class _HashJob(NamedTuple):
    """A tensor to read, and the record that consists of it alone, if there is one.

    ``places`` are the indices of all its names in the list of tensors.
    """

    tensor: Tensor
    places: list[int]
    key: Key | None = None
    record: Record | None = None


class _Scan:
    """Reads every byte of a checkpoint, and keeps the bad records, the tensors that failed, and the bytes read."""

    def __init__(self, reader: ElementReader, progress: Progress, *, hashes: bool, values: bool) -> None:
        self._hashes, self._values = hashes, values
        self._records = records_of(reader)
        self._entries: list[TensorSum] = []
        self._failed: dict[str, tuple[str, str]] = {}  # tensors that could not be read, with kind and reason
        jobs = self._plan(reader) if hashes or values else []
        total = sum(record.stored for records in self._records.values() for record in records)
        total += sum(job.tensor.nbytes for job in jobs if job.key is None)
        line = pool.ProgressLine(pool.terminal() if progress is True else None, "verifying", passing=True)
        show = line if progress is None or isinstance(progress, bool) else progress
        self._nbytes = 0

        def count_bytes(nbytes: int) -> None:
            self._nbytes += nbytes  # includes the gaps between records, which are not part of the total
            show(self._nbytes, total)

        try:
            with_tensors = {job.key for job in jobs if job.key is not None}
            self.bad = sum_records(reader, self._records, with_tensors, count_bytes)
            self._sum_tensors(reader, jobs, count_bytes)
        finally:
            line.end()

    def _plan(self, reader: ElementReader) -> list[_HashJob]:
        """What to read: each view of a storage once. Tensors that consist of others are listed with their parts."""
        whole: dict[FileRange | None, tuple[Key | None, Record | None]] = {
            FileRange(file, record.offset or 0, record.stored): (key_of(file, record), record)
            for file, inside in self._records.items()
            for record in inside
            if record.size and record.crc32 is not None and not record.method
        }
        seen: dict[tuple[object, ...], _HashJob] = {}
        allowance = Allowance(reader.checkpoint)
        for tensor, why in _leaves(reader.checkpoint.tensors):
            place = len(self._entries)
            dtype = f"{tensor.dtype} {tensor.kind}" if why else tensor.dtype
            self._entries.append(TensorSum(tensor.name, dtype, tensor.shape, 0 if why else tensor.nbytes, note=why))
            view = tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts
            if why or not (self._hashes or tensor.dtype in FLOATING):
                continue
            if view in seen:
                seen[view].places.append(place)
                continue
            try:
                allowance.spend(tensor)
            except ContentError as error:
                self._entries[place] = self._entries[place]._replace(note=error.what)
                continue
            seen[view] = _HashJob(tensor, [place], *whole.get(reader.file_range(tensor), (None, None)))

        def position(job: _HashJob) -> tuple[str, int]:
            storage = reader.storage(job.tensor)
            return (storage.file, job.tensor.file_offset or 0) if storage is not None else ("", 0)

        return sorted(seen.values(), key=position)

    def _sum_tensors(self, reader: ElementReader, jobs: list[_HashJob], progress: Callable[[int], None]) -> None:
        """Do all jobs, complete the entries, and compare the checksums of records that consist of one tensor."""
        entries = self._entries
        lock = Lock()

        def do(job: _HashJob) -> None:
            tensor, places, key, record = job
            digest = sha256() if self._hashes else None
            numbers = (0, 0) if self._values and tensor.dtype in FLOATING else None
            compute, value = fastest_crc32(), 0
            try:
                for piece in reader.chunks(tensor, _PIECE):
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
                    self._failed[entries[place].name] = kind, error.what
                if key is not None and record is not None:
                    self.bad[key] = mismatch(record, Lost(error.what, "record-unreadable"))
                return
            if key is not None and record is not None and value != record.crc32:
                self.bad[key] = mismatch(record, value)
            nan, inf = numbers or (None, None)
            for place in places:
                entries[place] = entries[place]._replace(sha256=digest.hexdigest() if digest else "", nan=nan, inf=inf)

        shared = sum(job.tensor.nbytes for job in jobs if job.tensor.nbytes > _TINY)
        pool.each(jobs, lambda: do, pool.threads() if shared >= _ALONE else 1)

    def verification(self, reader: ElementReader) -> Verification:
        """The verdict, with the tensors that are damaged."""
        every = [record for records in self._records.values() for record in records]
        compared = sum(record.crc32 is not None for record in every)
        unsummed = sum(record.crc32 is None and record.size > 0 for record in every)
        checkpoint = reader.checkpoint
        unsummed += sum(part.name.endswith(".metadata") for part in checkpoint.parts)  # torch.distributed.checkpoint
        bad = (problem.within(file) if file else problem for (file, _, _), problem in self.bad.items())
        new = tuple(new_problems(bad, checkpoint.problems))
        noted = any(problem.code == "crc-mismatch" for problem in checkpoint.problems)
        checksummed = bool(compared) and not unsummed and not self.bad and not noted
        judged = replace(checkpoint, problems=(*checkpoint.problems, *new), checksummed=checksummed)
        judged = judge(judged, describe=False) if new else replace(judged, integrity=integrity_of(judged))
        broken = {name: ("broken", why) for name, why in misplaced(reader).items()}
        damaged = damages(reader, self._records, self.bad, {**broken, **self._failed})
        # {"lm_head.weight": "embed.weight"} in the metadata of a safetensors file makes the first name an alias of the
        # second: safetensors.torch.save_model writes it, load_model reads it. Each shard may list those of all shards.
        known, aliases = {entry.name: entry for entry in self._entries}, dict[str, TensorSum]()
        for file, part in reader.files if self._hashes else ():
            if part.traits.metadata == "text":
                for alias, name in header_metadata(reader.open_file(file)).items():
                    if name in known and alias not in known and alias != "format":
                        aliases[alias] = known[name]._replace(name=alias)
        entries = (*self._entries, *aliases.values())
        # A tensor that claims more bytes than the file has is not hashed; then there is no hash of all tensors.
        complete = all(entry.sha256 or entry.nbytes == 0 for entry in self._entries) and not self._failed
        hashed = self._hashes and complete and judged.integrity != "not-a-checkpoint"
        return Verification(
            path=judged.path,
            format=judged.format,
            nbytes=judged.nbytes,
            integrity=judged.integrity if not damaged or judged.integrity == "not-a-checkpoint" else "damaged",
            tensor_count=len(checkpoint.tensors),
            checksums=compared,
            unsummed=unsummed,
            nbytes_read=self._nbytes,
            seconds=0.0,
            damaged=damaged,
            findings=tuple(
                finding  # about the bytes: what loading would run does not matter here
                for finding in judged.findings
                if rule_of(finding.code).integrity != "whole" or finding.code in _REMARKS
            ),
            tensors=entries,
            sha256=hash_of_all(entries) if hashed else "",
        )


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


# -- manifests

_MAX = 1 << 30
_FIX = "This writes one: transload verify FILE --write m.json"


def hash_of_all(tensors: Iterable[TensorSum]) -> str:
    """One sha256 for all tensors: of their names, dtypes, shapes and hashes, sorted by name.

    >>> hash_of_all([])
    'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    whole = sha256()
    for line in sorted([tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256] for tensor in tensors):
        whole.update(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
    return whole.hexdigest()


class ManifestEntry(NamedTuple):
    """The hashes of a checkpoint in a manifest."""

    path: str
    sha256: str
    tensors: tuple[TensorSum, ...]


class Manifest(NamedTuple):
    """A file of hashes."""

    path: str
    files: tuple[ManifestEntry, ...]

    def of(self, path: str) -> ManifestEntry:
        """The entry of a file, by its path, else by its file name, else the only one; ``ManifestError`` if unclear."""

        def name(path: str) -> str:
            return os.path.basename(os.path.normpath(path))

        same = [entry for entry in self.files if os.path.normpath(entry.path) == os.path.normpath(path)]
        named = [entry for entry in self.files if name(entry.path) == name(path)]
        for entries in (same, named, self.files):
            if len(entries) == 1:
                return entries[0]
        what = f"it has {len(named)} files named {name(path)}" if named else f"it has no entry for {path}"
        raise ManifestError(what, where=self.path, fix="Name the file as it was named when the manifest was written.")


def refuse_target(path: str, *, overwrite: bool) -> None:
    """Refuse a path where no manifest can be written, before gigabytes are read for it."""
    if not overwrite and os.path.lexists(path):
        raise ManifestError("already exists", where=path, fix="Replace it: --force (overwrite=True in Python).")
    if os.path.exists(path):
        # It may be the checkpoint itself.
        try:
            read_manifest(path)
        except TransloadError:
            what = "it is not a manifest, and --force replaces only manifests"
            raise ManifestError(what, where=path, fix="Name another file.") from None
    refuse_missing_directory(path)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK):
        raise ManifestError("this directory is not writable", where=folder, fix="Name another place.")


def read_manifest(path: str) -> Manifest:
    """Read a manifest; ``ManifestError`` if it is something else, ``CannotReadError`` if it cannot be read."""
    source = FileSource(path)
    try:
        if source.size > _MAX:
            raise _not_a_manifest(path, f"it has {source.size:,} bytes")
        text = source.read(0, source.size)
    finally:
        source.close()
    try:
        return Manifest(path, tuple(_entries(json.loads(text))))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        invalid = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        why = "it is not JSON" if invalid else f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise _not_a_manifest(path, why) from error


def _not_a_manifest(path: str, why: str) -> ManifestError:
    form = FORMATS.get(inspect(path).format)
    what = f"this is a checkpoint ({form.words}), not a manifest" if form else f"this is not a manifest: {why}"
    return ManifestError(what, where=path, fix=_FIX)


def _entries(table: dict[str, Any]) -> Iterator[ManifestEntry]:
    if table["schema"] != 1:
        raise ValueError("it has another schema version")
    for each in table["files"]:
        path = _text(each["path"])
        if b"\0" in os.fsencode(path):
            raise ValueError(f"{path!r:.40} cannot be the name of a file")
        tensors = tuple(
            TensorSum(_text(t["name"]), _text(t["dtype"]), tuple(map(int, t["shape"])), 0, _text(t["sha256"]))
            for t in each["tensors"]
        )
        yield ManifestEntry(path, _text(each["sha256"]), tensors)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value


def compare(entry: ManifestEntry, tensors: Iterable[TensorSum]) -> tuple[Difference, ...]:
    """The differences between a manifest and the tensors of a checkpoint, by name."""

    def by_name(tensors: Iterable[TensorSum]) -> dict[str, list[TensorSum]]:
        """Two tensors may have the same name: a key may contain the slash that joins keys."""
        out: dict[str, list[TensorSum]] = {}
        for tensor in tensors:
            out.setdefault(tensor.name, []).append(tensor)
        return out

    def shown(tensors: list[TensorSum]) -> str:
        return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:2])

    before, now = by_name(entry.tensors), by_name(tensors)
    out = [Difference(name, "missing") for name in before if name not in now]
    out += [Difference(name, "added") for name in now if name not in before]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if Counter((t.dtype, t.shape) for t in old) != Counter((t.dtype, t.shape) for t in new):
            out.append(Difference(name, "retyped", f"{shown(new)}, was {shown(old)}"))
        elif sorted(t.sha256 for t in old) != sorted(t.sha256 for t in new):
            out.append(Difference(name, "changed", f"sha256 {new[0].sha256 or 'unknown'}, was {old[0].sha256}"))
    return tuple(sorted(out))


def write_manifest(path: str, verifications: Sequence[Verification], *, overwrite: bool = False) -> None:
    """Write the hashes of checkpoints atomically; ``ManifestError`` if one of them is damaged or has no hash."""
    for each in verifications:
        if not each.ok or not each.sha256:
            raise ManifestError("not written, since a file has a problem", where=path, fix=f"See {each.path}.")
    refuse_target(path, overwrite=overwrite)
    files = []
    for each in verifications:
        entries = ({"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256} for t in each.tensors)
        tensors = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        head = json.dumps({"path": each.path, "format": each.format, "nbytes": each.nbytes, "sha256": each.sha256})
        files.append(f'{head[:-1]}, "tensors": [\n{tensors}\n]}}')
    head = json.dumps({"schema": 1, "transload": __version__})
    text = f'{head[:-1]}, "files": [\n' + ",\n".join(files) + "\n]}\n"
    with AtomicFile(path) as file:
        file.write([text.encode("ascii")])


# -- the report

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_UNSUMMED = "none in this format, so a changed bit cannot be detected; --write keeps hashes to compare with next time"


def report(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """Everything ``transload verify`` says about one file."""
    yield Prose(((path_text(verification.path, None), "strong"),))
    role, reason = INTEGRITY[verification.integrity]
    yield row("bytes", f"{verification.integrity}: {reason}", role)
    words = printable(format_of(verification.format).words)
    yield row("file", f"{words}, {plural(verification.tensor_count, 'tensor')}, {size(verification.nbytes)}")
    if verification.integrity != "not-a-checkpoint":
        yield from _summary(verification)
    yield from _details(verification, hashes=hashes)


def _details(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """The lists: damaged tensors, differences, findings, values, hashes."""
    if verification.damaged:
        yield from heading("damaged", plural(len(verification.damaged), "tensor"))
        for damage in verification.damaged:
            yield Prose(((printable(damage.detail, 400), "dim"),), lead=((f"  {_named(damage.name)}  ", "bad"),))
    if verification.differences:
        yield from heading("differs", f"from {path_text(verification.manifest)}")
        for each in verification.differences:
            lead = ((f"  {each.what}  ", "bad"), (f"{_named(each.name)}  ", ""))
            yield Prose(((_HASH.sub(r"\1…", printable(each.detail, 200)), "dim"),), lead=lead)
    shown = {damage.detail for damage in verification.damaged}
    for finding in verification.findings:
        rest = tuple(line for line in finding.evidence if line not in shown)
        yield BLANK
        yield from next(findings([replace(finding, evidence=rest)]))
    # Suggest a rescue if it can help and no finding has suggested it.
    suggested = any(has_command(finding.fix) for finding in verification.findings)
    useless = verification.damaged and all(damage.kind == "broken" for damage in verification.damaged)
    rescuable = verification.integrity in ("damaged", "repairable") and format_of(verification.format).rescued
    if rescuable and not suggested and not useless:
        command = rescue_command(verification.path, format_of(verification.format).suffix)
        yield BLANK
        yield note("to save everything that is intact or provably repairable as a new file:")
        yield Prose(((printable(command, None), ""),), lead=(("    ", ""),), whole=True)
    odd = [tensor for tensor in verification.tensors if tensor.nan or tensor.inf]
    if odd:
        yield from heading("NaN or infinite", plural(len(odd), "tensor"))
        rows: list[tuple[Words, ...]] = []
        for tensor in odd:
            counts = (f"{tensor.nan:,} NaN" if tensor.nan else ""), (f"{tensor.inf:,} inf" if tensor.inf else "")
            rows.append((_named(tensor.name), printable(tensor.dtype), *(((text, "trust"),) for text in counts)))
        yield Table(rows, right=(2, 3), dim=(1,), drops=(1,))
    hashed = [tensor for tensor in verification.tensors if tensor.sha256]
    if hashes and hashed and not verification.manifest:
        yield from heading("sha256 of tensors", count(len(hashed)))
        yield Table([(tensor.sha256, _named(tensor.name)) for tensor in hashed], dim=(0,))
        left = len(verification.tensors) - len(hashed)
        if left:
            one = "1 further entry without elements of its own"
            yield note(one if left == 1 else f"{count(left)} further entries without elements of their own")


def _summary(verification: Verification) -> Iterator[Block]:
    if verification.checksums:
        bad = any(damage.kind == "checksum" for damage in verification.damaged)
        records = f"{plural(verification.checksums, 'record')} compared"
        if verification.unsummed:
            records += f", {count(verification.unsummed)} {'has' if verification.unsummed == 1 else 'have'} none"
        if verification.integrity == "whole" or bad:
            records += ", see below" if bad else ", all agree"
        yield row("checksums", records, "bad" if bad else "")
    elif verification.manifest or verification.sha256:
        yield row("checksums", "none in this format")
    else:
        yield row("checksums", _UNSUMMED, "trust")
    read = size(verification.nbytes_read)
    if verification.seconds and verification.nbytes_read >= 1_000_000:
        read += f" in {verification.seconds:.2f} s, {size(round(verification.nbytes_read / verification.seconds))}/s"
    yield row("read", read)
    if verification.sha256:
        yield row("sha256", verification.sha256)
    counted = [tensor for tensor in verification.tensors if tensor.nan is not None]
    if counted:
        odd = sum(bool(tensor.nan or tensor.inf) for tensor in counted)
        words = f"NaN or infinite in {odd:,} of {plural(len(counted), 'tensor')}"
        yield row("values", words, "trust" if odd else "")
    if verification.manifest:
        outcome = "all tensors match it" if not verification.differences else "not all tensors match it"
        yield row("manifest", f"{path_text(verification.manifest, None)}: {outcome}", "" if verification.ok else "bad")


def written(path: str, tensors: int) -> Block:
    """The line that says that a manifest was written."""
    return row("written", f"{path_text(path, None)}: the hashes of {plural(tensors, 'tensor')}, for --against")


def _named(name: str) -> str:
    return printable(name, None) or "the tensor itself"


def several(results: Sequence[Verification], total: int, *, hashes: bool = True) -> Iterator[Block]:
    """A table of several files, then the details of those that have any."""
    rows: list[tuple[Words, ...]] = []
    for each in results:
        verdict = "differs" if each.differences and each.integrity in ("whole", "unchecked") else each.integrity
        role = "bad" if not each.ok else INTEGRITY[each.integrity][0]
        columns = printable(format_of(each.format).words), count(each.tensor_count), size(each.nbytes)
        checksums: Words = count(each.checksums) if each.checksums else (("none", "dim"),)
        rows.append((path_text(each.path), *columns, checksums, ((verdict, role),)))
    if results:
        titles = ("file", "format", "tensors", "size", "checksums", "bytes")
        yield Table(rows, right=(2, 3, 4), dim=(1,), titles=titles, drops=(1, 2), indent=0)
    for each in results:
        lists = list(_details(each, hashes=hashes))
        if lists:
            yield from heading(path_text(each.path, None), each.sha256)
            yield from lists
    yield from tally(total, len(results), sum(not each.ok for each in results))
