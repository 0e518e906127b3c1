"""Bytes to a ``Checkpoint``: which format a file has, and its reader. Nothing a file names is imported or run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transload.findings import Problem, Problems
from transload.frozen import replace

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.formats.foreign import Foreign
    from transload.formats.torch_zip import Archive
    from transload.formats.zip import ZipIndex
    from transload.io.sources import Source, SourceLike


@contextmanager
def no_collecting(*, strangers: bool = False) -> Iterator[None]:
    """Hold the garbage collector off while a graph is built.

    The graph of a large checkpoint is half a million objects, none of which is garbage until we return: collecting
    meanwhile takes as long as the reading itself. Nor is it worth a look right afterwards, so what is young is handed
    to the oldest generation: freezing and thawing moves it there without looking (not where somebody else has
    frozen). What comes there so is not counted, and garbage in it may never be looked for. So the program's own is
    collected before; and with ``strangers``, objects that may hold one another, nothing is moved.
    """
    collecting = gc.isenabled()
    if collecting:
        gc.collect(1)
        _holding.append(None)
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            if not (strangers or _others_freeze()):
                gc.freeze()
                gc.unfreeze()
            gc.enable()
            del _holding[-1:]


_frozen_by_others = not hasattr(gc, "freeze")


def _others_freeze() -> bool:
    """Whether the program has frozen objects. Counting them takes long, so a program that has is not asked again."""
    global _frozen_by_others  # noqa: PLW0603 - one answer for the process
    _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
    return _frozen_by_others


_holding: list[None] = []
"""One for each that holds the garbage collector off at the moment."""


def _collect_again() -> None:
    """In a child process, which has none of the threads that held the collector off and would let it go."""
    if _holding:
        _holding.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_again)


def read(f: SourceLike, *, verify: bool = False) -> Checkpoint:
    """The facts of a checkpoint, not yet judged."""
    if isinstance(f, str | os.PathLike):
        path = os.fspath(f)
        if os.path.isdir(path):  # noqa: PTH112 - pathlib costs ten milliseconds to import
            from transload.formats.directory import read_directory

            return read_directory(
                path, lambda name: read(name, verify=verify), lambda source: read_source(source, verify=verify)
            )
        if path.endswith(".index.json"):
            from transload.formats.directory import read_sharded

            return read_sharded(path, lambda name: read(name, verify=verify))
    from transload.io.sources import open_source

    source = open_source(f)
    try:
        return read_source(unpacked(source), verify=verify)
    finally:
        source.close()


def unpacked(source: Source) -> Source:
    """What a compressed file holds where that can be read as it is: as joblib writes tensors. Else the source."""
    if source.read(0, 1) not in (b"\x1f", b"B", b"\xfd", b"\x5d", b"\x78"):  # no compressor begins otherwise
        return source
    from transload.formats import plain_pickle

    return plain_pickle.unpacked(source)


def read_source(source: Source, *, verify: bool = False, tree: bool = True) -> Checkpoint:
    """Tell the format by content, in torch's own order (zip, tar, stream, then what torch does not know); read it.

    Without ``tree``, the tensors of an ordinary archive with nothing wrong about it are ``counted`` and not listed, nor
    are its leaves: for a loader, which goes through all of them itself, and comes back for names where it must.
    """
    from transload.formats.zip import ends_like_zip, starts_like_zip

    if starts_like_zip(source):
        folder, name = os.path.split(source.name)
        if name.endswith(".distcp") and os.path.exists(os.path.join(folder, ".metadata")):  # noqa: PTH110, PTH118 - as above
            # A row of small archives, which another file describes.
            from transload.findings import quoted
            from transload.formats.foreign import Foreign

            title = "one of the files of a torch.distributed.checkpoint directory"
            fix = ("Name the directory.", f"$ transload inspect {quoted(folder or '.')}")
            return _named(source, Foreign("distcp", title, (), fix))
        return _read_zip(source, verify=verify, tree=tree)
    from transload.formats import torch_legacy
    from transload.formats.safetensors import looks_like, read_safetensors

    if (tar := torch_legacy.read_tar(source)) is not None:
        return tar
    if torch_legacy.looks_like_legacy(source):
        return torch_legacy.read_legacy(source)
    if looks_like(source):
        return read_safetensors(source)
    head = source.read(0, 6)
    if head.startswith(b"GGUF"):
        from transload.formats import gguf

        if gguf.looks_like(source):
            return gguf.read_gguf(source)
    if head == b"\x93NUMPY":
        from transload.formats import npz

        if npz.looks_like(source):
            return npz.read_npy(source)
    from transload.formats.plain_pickle import read_plain_pickle

    plain = read_plain_pickle(source)
    if plain is not None:
        return plain
    from transload.formats.foreign import identify

    what = identify(source)
    if what.format == "zeros-first" and ends_like_zip(source):  # the directory is whole, and tells what was there
        checkpoint = _read_zip(source, verify=verify)
        return replace(checkpoint, problems=(Problem("zip-head-lost", detail=what.title), *checkpoint.problems))
    return _named(source, what)


def _named(source: Source, what: Foreign, index: ZipIndex | None = None) -> Checkpoint:
    """A file that is not a checkpoint, with the name of what it is."""
    from transload.checkpoint import Checkpoint

    problem = Problem("not-a-checkpoint", detail="\n".join(what.details), title=what.title, fix=what.fix)
    records = tuple(index.records.values()) if index else ()
    problems = (problem, *(index.problems if index else ()))
    return Checkpoint(source.name, what.format, source.size, records=records, problems=problems)


def _read_zip(source: Source, *, verify: bool, tree: bool = True) -> Checkpoint:
    from transload.formats.torch_zip import Archive
    from transload.formats.zip import read_index

    index = read_index(source)
    if not index.ok:
        from transload.formats.foreign import mangled

        copied_as_text = mangled(source)
        if copied_as_text:
            return _named(source, copied_as_text)
        from transload.formats.zip_scan import walk_index

        index = walk_index(source, index)
    archive = Archive.of_zip(source, index)
    reader = _zip_reader(archive)
    if reader is None:
        from transload.formats.foreign import identify_zip

        what = identify_zip(index.names, source.name)
        if what.format != "npz":
            return _named(source, what, index)
        from transload.formats.npz import read_npz

        reader = read_npz
    problems = Problems(index.problems)
    # The first bytes of a zip archive can be the header length of a safetensors file, which torch knows by name.
    if b"{" in source.read(8, 64):
        from transload.formats.safetensors import looks_like

        if looks_like(source):
            problems.add("zip-inside", detail="it is also a safetensors file, and torch goes by the name")
    light = {"tree": False} if not tree and reader.__name__ == "read_torch_zip" else {}
    checkpoint = reader(archive, problems, path=source.name, nbytes=source.size, **light)
    if not verify or index.unsummed:
        return checkpoint
    from transload.formats.verify import verify_records

    bad = verify_records(source, index.records.values(), checkpoint.storages)
    known = {problem.where for problem in checkpoint.problems if problem.code == "crc-mismatch"}
    found = (*checkpoint.problems, *(problem for problem in bad if problem.where not in known))
    return replace(checkpoint, problems=found, checksummed=not bad and not known)


def _zip_reader(archive: Archive) -> Callable[..., Checkpoint] | None:
    """The reader for an archive, by its records; the first that fits, and only its module is imported."""
    has_pickle = archive.find("data.pkl")
    if archive.find("constants.pkl") or (archive.find("model.json") and not has_pickle):  # the latter 1.0 to 1.2
        from transload.formats.programs import read_torchscript

        return read_torchscript
    from transload.formats.torch_zip import read_torch_zip

    if has_pickle:
        return read_torch_zip
    if any(name.startswith("data/aotinductor/") for name in archive.records):
        from transload.formats.torch_export import read_aotinductor

        return read_aotinductor
    if archive.find("archive_format") or any(name.startswith("serialized_") for name in archive.records):
        from transload.formats.torch_export import read_export

        return read_export
    if archive.find(".data/extern_modules") or archive.find(".data/python_version"):
        from transload.formats.programs import read_package

        return read_package
    # What is left of a torch.save archive whose index is lost.
    left = ("version", ".data/serialization_id", "byteorder", "data/0", "tensors/0")
    return read_torch_zip if any(archive.find(name) for name in left) else None
