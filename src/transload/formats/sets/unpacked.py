"""Archives of ``torch.save``, TorchScript programs and packages that were unpacked into a folder.

A link that leads out of the folder is not followed: an untrusted archive could pass off any file of this machine as its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

from transload.checkpoint import Checkpoint, Record
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, Problems
from transload.formats import archive_format
from transload.formats.sets.merger import Merger, listed
from transload.formats.torch_zip import Archive
from transload.formats.zip import Payload, ZipIndex
from transload.frozen import replace
from transload.io.folder import Folder, Listing
from transload.io.sources import refuse_fault

MAX_UNPACKED_FILES = 200_000
"""There is a limit since somebody may pass their home directory. Large models have twenty thousand storages."""

MAX_NESTED_FOLDERS = 32
"""The folders of a program's source are nested ten deep at most."""


def matches(listing: Listing) -> bool:
    """Whether the records are in the folder, or in the only one in it, which unzipping made."""
    return _has_records(listing) or (
        len(listing.folders) == 1 and not listing.files and _has_records(_inner(listing, listing.folders[0]))
    )


def _has_records(listing: Listing) -> bool:
    """Whether a folder has the records of a ``torch.save`` archive, or of a package."""
    if "data.pkl" in listing.files and ("data" in listing.folders or "version" in listing.files):
        return True
    return ".data" in listing.folders and "extern_modules" in _inner(listing, ".data").files


def _inner(listing: Listing, name: str) -> Listing:
    return listed(listing.folder, listing.prefix + name, LimitedProblems())


def read(merger: Merger) -> Checkpoint:
    """Read the records; ``file`` of a storage is relative to the folder."""
    listing = merger.listing
    inside = len(listing.folders) == 1 and not listing.files and listing.folders[0] not in listing.links
    below = listing.folders[0] if inside else ""
    archive = open_archive(listing.folder, below)
    checkpoint: Checkpoint = import_module(f"transload.formats.{archive_format(archive) or 'torch_zip'}").read(archive)
    prefix = f"{below}/" if below else ""
    storages = tuple(s._replace(file=f"{prefix}{s.record}" if s.record else "") for s in checkpoint.storages)
    kind = "torch-directory" if checkpoint.format == "torch-zip" else checkpoint.format
    facts = (*checkpoint.facts, ("unpacked", "yes"))
    return replace(checkpoint, format=kind, storages=storages, facts=facts, index=f"{prefix}data.pkl")


def open_archive(folder: Folder, below: str = "") -> Archive:
    """The files of a folder as the records of an archive; those that cannot be records are noted as problems."""
    problems = Problems()
    records: dict[str, Record] = {}
    prefix = f"{below}/" if below else ""
    for name, size, is_link in _files_below(folder, prefix, problems):
        kind = folder.kind(prefix + name)
        if is_link and folder.leads_out(prefix + name):
            problems.add("link-outside", name, "a link that leads out of the directory is not followed")
        elif kind == "file":
            records[name] = Record(name, 0, size, size)
        else:
            problems.add("record-unreadable", name, "it does not exist" if kind == "link" else "it is not a plain file")

    def read(record: Record, limit: int) -> Payload:
        if record.size > limit:
            return Payload(b"", intact=False, problem=f"{record.size} bytes are more than the limit of {limit}")
        try:
            with closing(folder.open(prefix + record.name)) as source:
                return Payload(source.read(record.offset or 0, record.size), intact=True)
        except CannotReadError as error:
            refuse_fault(error, folder.name)
            return Payload(b"", intact=False, problem=error.what)

    nbytes = sum(record.size for record in records.values())
    return Archive(folder.name, nbytes, ZipIndex(below or folder.title, records, tuple(problems)), read)


def _files_below(folder: Folder, prefix: str, problems: Problems) -> Iterator[tuple[str, int, bool]]:
    """The files below a folder: name, size, and whether it is a link.

    Numbers are in numerical order, as torch writes storages.
    """
    waiting, left = [""], MAX_UNPACKED_FILES
    while waiting:
        here = waiting.pop()
        try:
            listing = folder.list((prefix + here).rstrip("/"), MAX_UNPACKED_FILES + 1)
        except CannotReadError as error:
            refuse_fault(error, folder.name)
            problems.add("directory-unreadable", here.rstrip("/"), error.what)
            continue
        for name in listing.folders:
            if name in listing.links:  # it may lead anywhere, even in circles
                problems.add("link-outside", here + name, "a linked directory is not read")
        inner = [f"{here}{name}/" for name in reversed(listing.folders) if name not in listing.links]
        if inner and here.count("/") >= MAX_NESTED_FOLDERS:
            problems.add("directory-too-long", detail=f"nested deeper than {MAX_NESTED_FOLDERS} directories")
        else:
            waiting += inner
        names = [*listing.files, *listing.dangling]
        numbers = [name for name in names if name.isascii() and name.isdecimal() and len(name) < 20]
        if listing.cut or len(names) > left:
            problems.add("directory-too-long", detail=f"only its first {MAX_UNPACKED_FILES:,} files were read")
            waiting.clear()
        for name in [*sorted(numbers, key=int), *sorted(set(names).difference(numbers))][:left]:
            yield here + name, listing.files.get(name, 0), name in listing.links
        left -= len(names)
