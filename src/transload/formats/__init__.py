"""Bytes to a ``Checkpoint``: which format a file has, and its reader. Nothing a file names is imported or run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint
from transload.findings import Problem, quoted
from transload.formats.zip import ZipIndex, ends_like_zip, read_index, starts_like_zip
from transload.frozen import replace
from transload.io.sources import Slice, Source

if TYPE_CHECKING:
    from transload.formats.foreign import Foreign
    from transload.formats.torch_zip import Archive

__all__ = ["read_source", "unpacked"]

# The modules that read each format, in torch's order. ``read`` of a stream returns ``None`` for another format; if all
# files of a format begin with the same bytes, its module is only imported for those.
_STREAMS = (
    ("torch_legacy", b""),
    ("safetensors", b""),
    ("gguf", b"GGUF"),
    ("arrays", b"\x93NUMPY"),
    ("plain_pickle", b""),
)
# An archive has the format of the first of these records that it has.
_ARCHIVES = (
    ("programs.torchscript", "constants.pkl"),
    ("torch_zip", "data.pkl"),
    ("programs.torchscript", "model.json"),  # torch 1.0 to 1.2
    ("programs.aotinductor", "data/aotinductor/*"),
    ("programs.export", "archive_format serialized_*"),
    ("programs.package", ".data/extern_modules .data/python_version"),
    # What is left of a torch.save archive whose index is lost.
    ("torch_zip", "version .data/serialization_id byteorder data/0 tensors/0"),
)


def archive_format(archive: Archive) -> str:
    """The module that reads an archive with these records; empty if none does."""
    for module, records in _ARCHIVES:
        for record in records.split():
            start = record.removesuffix("*")
            if archive.find(record) or (start != record and any(name.startswith(start) for name in archive.records)):
                return module
    return ""


def _module(name: str) -> Any:
    return import_module(f"transload.formats.{name}")


def unpacked(source: Source) -> Source:
    """The decompressed file if joblib wrote it, and it can be read; else the source itself."""
    if source.read(0, 1) not in (b"\x1f", b"B", b"\xfd", b"\x5d", b"\x78"):  # first bytes of compressed files
        return source
    from transload.formats import plain_pickle

    return plain_pickle.unpacked(source)


def read_source(source: Source, *, verify: bool = False, tree: bool = True, headers: bool = False) -> Checkpoint:
    """Detect the format by content, in torch's order (zip, tar, stream, then what torch does not read), and read it.

    Without ``tree``, the tensors of an ordinary archive without problems are only ``counted``, and its leaves left out:
    for a loader, which goes through all of them itself, and reads the file again if it needs their names. ``headers``
    is as for ``read_index``.
    """
    if source.name.endswith((".distcp", ".metadata")) and not isinstance(source, Slice):  # an item of such a file
        from transload.formats.foreign import Foreign
        from transload.formats.sets.dcp import folder_of_rank

        if folder := folder_of_rank(source.name):
            title = "one of the files of a torch.distributed.checkpoint directory"
            fix = ("Name the directory.", f"$ transload inspect {quoted(folder)}")
            return _not_a_checkpoint(source, Foreign("distcp", title, (), fix))
    if starts_like_zip(source):
        return _read_zip(source, verify=verify, tree=tree, headers=headers)
    for name, start in _STREAMS:
        if source.read(0, len(start)) == start and (checkpoint := _module(name).read(source)) is not None:
            return checkpoint  # type: ignore[no-any-return]
    from transload.formats.foreign import identify

    what = identify(source)
    if what.format == "zeros-first" and ends_like_zip(source):  # the directory may be undamaged
        checkpoint = _read_zip(source, verify=verify)
        return replace(checkpoint, problems=(Problem("zip-head-lost", detail=what.title), *checkpoint.problems))
    return _not_a_checkpoint(source, what)


def _not_a_checkpoint(source: Source, what: Foreign, index: ZipIndex | None = None) -> Checkpoint:
    problem = Problem("not-a-checkpoint", detail="\n".join(what.details), title=what.title, fix=what.fix)
    records = tuple(index.records.values()) if index else ()
    problems = (problem, *(index.problems if index else ()))
    return Checkpoint(source.name, what.format, source.size, records=records, problems=problems)


def _read_zip(source: Source, *, verify: bool, tree: bool = True, headers: bool = False) -> Checkpoint:
    index = read_index(source, headers=headers or verify, loading=not tree)
    if not index.ok:
        from transload.formats.foreign import Excerpt, mangled

        copied_as_text = mangled(Excerpt(source))
        if copied_as_text is not None:
            return _not_a_checkpoint(source, copied_as_text)
        from transload.formats.zip_scan import walk_index

        index = walk_index(source, index)
    from transload.formats.torch_zip import Archive

    archive = Archive.of_zip(source, index)
    name = archive_format(archive)
    if not name:
        from transload.formats.foreign import identify_zip

        what = identify_zip(index.names, source.name)
        if what.format != "npz":
            return _not_a_checkpoint(source, what, index)
    # The first bytes of a zip archive can be the header length of a safetensors file, which torch detects by its name.
    if b"{" in source.read(8, 64):
        from transload.formats.safetensors import looks_like_safetensors

        if looks_like_safetensors(source):
            archive.problems.add("zip-inside", detail="it is also a safetensors file, and torch goes by the name")
    if name == "torch_zip":
        checkpoint: Checkpoint = _module(name).read(archive, tree=tree)
    else:
        checkpoint = _module(name).read(archive) if name else _module("arrays").read_npz(archive)
    if not verify or all(record.crc32 is None for record in index.records.values()):
        return checkpoint
    from transload.formats.record_checksums import new_problems, verify_records

    bad = verify_records(source, index.records.values(), checkpoint.storages)
    problems = (*checkpoint.problems, *new_problems(bad, checkpoint.problems))
    checksummed = not bad and all(problem.code != "crc-mismatch" for problem in problems)
    return replace(checkpoint, problems=problems, checksummed=checksummed)
