"""Directories: which kind of checkpoint one is, by what it holds, and the reader for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transload.checkpoint import Checkpoint, Part, Storage
from transload.errors import CannotReadError
from transload.read.distributed import METADATA, read_dcp_into
from transload.read.nodes import Pickle
from transload.read.noted import Noted, some
from transload.read.parts import MAX_ENTRIES, Listing, Merger, Readers, list_directory, try_list, try_read
from transload.read.ranks import is_deepspeed, is_megatron, read_deepspeed, read_megatron
from transload.read.sharded import INDEX_SUFFIX, numbered_shards, read_numbered, read_sharded

__all__ = ["read_directory", "read_sharded"]

# The files that hold a model's weights, best first; what else looks like a checkpoint belongs to the training.
WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
    "pytorch_lora_weights.safetensors",
    "consolidated.safetensors",
)
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pt2", ".pth.tar", ".pkl")
# How far an unknown directory is searched for something to read.
MAX_DEPTH = 3


def read_directory(
    path: str,
    *,
    verify: bool = False,
    read_file: Callable[[str], Checkpoint],
    read_unzipped: Callable[[str], Checkpoint],
) -> Checkpoint:
    """What a directory holds, read with the callables given for single files and unpacked archives.

    ``verify`` is passed on to the small archives inside ``.distcp`` files. Bad content is a problem, never an error;
    ``CannotReadError`` only if the directory itself cannot be listed.
    """
    from transload.read import read_source
    from transload.read.pickle_machine import run

    readers = Readers(
        file=read_file,
        unzipped=read_unzipped,
        item=lambda source: read_source(source, verify=verify),
        pickle=lambda data, name: run(data, name=name),
    )
    listing = list_directory(path)
    checkpoint = next(read(listing, readers) for fits, read in _KINDS if fits(listing))
    return _with_surroundings(checkpoint, listing, readers)


def _with_surroundings(checkpoint: Checkpoint, listing: Listing, readers: Readers) -> Checkpoint:
    """What the kind's own reader does not look at: loose ends, and files that are not part of the checkpoint."""
    noted = Noted()
    noted.extend(checkpoint.problems)
    if listing.cut:
        noted.add("directory-too-long", "", f"only its first {MAX_ENTRIES:,} entries were looked at")
    if listing.dangling:
        noted.add("link-dangling", "", f"{len(listing.dangling):,} links lead nowhere: {some(listing.dangling)}")
    known = {part.name for part in checkpoint.parts}
    unpacked = "unpacked" in dict(checkpoint.facts)
    others = [] if unpacked else [name for name in _likely(listing) if name not in known]
    pickles: list[Pickle] = []
    for name in others[:_MAX_OTHERS]:
        pickles += _pickles_beside(listing, name, readers, noted)
    if others:
        noted.add("directory-others", "", f"{len(others):,} files: {some(others)}")
    if len(others) > _MAX_OTHERS:
        noted.add("directory-others-unread", "", f"{len(others) - _MAX_OTHERS:,} of them")
    parts = tuple(Part(name, "beside the checkpoint", listing.files[name]) for name in others)
    pickles = [*checkpoint.pickles, *pickles]
    return replace(checkpoint, problems=noted.problems(), parts=(*checkpoint.parts, *parts), pickles=tuple(pickles))


_MAX_OTHERS = 20


def _pickles_beside(listing: Listing, name: str, readers: Readers, noted: Noted) -> list[Pickle]:
    """The pickles of a file that is no part of the checkpoint: a program that loads the directory may load it too."""
    try:
        found = readers.file(listing.join(name))
    except CannotReadError as error:
        noted.add("part-unreadable", name, error.what)
        return []
    for pickle in found.pickles:
        pickle.main = False
        pickle.name = f"{name} › {pickle.name}"
    noted.extend(tuple(replace(p, where=f"{name} › {p.where}") for p in found.problems if p.code in _TELLING))
    return list(found.pickles)


# Problems of such a file that bear on safety; whether its own tensors are whole is nobody's question here.
_TELLING = frozenset({"zip-shifted", "zip-duplicate-name", "zip-names-differ", "pickle-broken", "pickle-unreadable"})


def _is_dcp(listing: Listing) -> bool:
    return METADATA in listing.files or any(name.endswith(".distcp") for name in listing.files)


def _dcp(listing: Listing, readers: Readers) -> Checkpoint:
    """``torch.distributed.checkpoint``, alone or in Lightning's sharded form with ``meta.pt`` beside it."""
    merger = Merger(Noted())
    facts = read_dcp_into(merger, listing, readers)
    lightning = "meta.pt" in listing.files
    if lightning:
        meta = try_read(listing.join("meta.pt"), "meta.pt", readers.file, merger.noted)
        if meta is not None:
            merger.add("meta.pt", meta, kind="trainer state", steps=("meta.pt",))
    return merger.checkpoint(listing.path, "dcp", facts, "Lightning" if lightning else "")


def _unpacked(listing: Listing) -> str:
    """Where an unpacked ``torch.save`` archive lies: here, or in the one folder that unzipping made; else empty."""
    if _is_archive(listing):
        return listing.path
    if len(listing.folders) == 1 and not listing.files:
        inner = try_list(listing.join(listing.folders[0]), "", Noted())
        if inner is not None and _is_archive(inner):
            return inner.path
    return ""


def _is_archive(listing: Listing) -> bool:
    if ".data" in listing.folders and Path(listing.path, ".data", "extern_modules").is_file():
        return True  # an unpacked torch.package
    return "data.pkl" in listing.files and ("data" in listing.folders or "version" in listing.files)


def _unzipped(listing: Listing, readers: Readers) -> Checkpoint:
    return readers.unzipped(listing.path)


def _indexes(listing: Listing) -> list[str]:
    """Indexes of shards, safetensors before pickles, plain before variants."""
    found = [name for name in listing.files if name.endswith(INDEX_SUFFIX)]
    return sorted(found, key=lambda name: ("safetensors" not in name, len(name), name))


def _indexed(listing: Listing, readers: Readers) -> Checkpoint:
    first, *others = _indexes(listing)
    checkpoint = read_sharded(listing.join(first), readers.file)
    note = (("also here, not read", some(others)),) if others else ()
    return replace(checkpoint, path=listing.path, facts=(*checkpoint.facts, *note))


def _numbered(listing: Listing, readers: Readers) -> Checkpoint:
    return read_numbered(listing, readers.file)


def _main_file(listing: Listing) -> str:
    """The one file to read: by its usual name, or because no other looks like a checkpoint."""
    usual = next((name for name in WEIGHTS if name in listing.files), "")
    likely = _likely(listing)
    return usual or (likely[0] if len(likely) == 1 else "")


def _likely(listing: Listing) -> list[str]:
    return [name for name in listing.files if name.lower().endswith(SUFFIXES)]


def _single(listing: Listing, readers: Readers) -> Checkpoint:
    """A directory around one file of weights: that file, and a word on what lies beside it."""
    name = _main_file(listing)
    noted = Noted()
    checkpoint = try_read(listing.join(name), name, readers.file, noted)
    if checkpoint is None:
        return Checkpoint(listing.path, "directory", 0, problems=noted.problems())
    return replace(
        checkpoint,
        path=listing.path,
        storages=tuple(_in_file(storage, name) for storage in checkpoint.storages),
        parts=(Part(name, "weights", listing.files[name]), *checkpoint.parts),
        facts=(("read", f"{name}, of the {len(listing.files):,} files in the directory"), *checkpoint.facts),
    )


def _in_file(storage: Storage, name: str) -> Storage:
    return storage._replace(file=name)


def _unknown(listing: Listing, _readers: Readers) -> Checkpoint:
    """No kind we know: say what is there and what in it could be read by itself."""
    noted = Noted()
    found = _search(listing, noted)
    held = [*(f"{name}/" for name in listing.folders), *listing.files]
    detail = f"it holds {some(held, 8)}" if held else "it is empty"
    if found:
        detail += f"; these look like checkpoints: {some(found, 8)}"
    noted.add("directory-unknown", "", detail)
    parts = tuple(Part(name, "looks like a checkpoint", _size_of(listing.join(name))) for name in found)
    return Checkpoint(listing.path, "directory", sum(listing.files.values()), parts=parts, problems=noted.problems())


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _search(listing: Listing, noted: Noted) -> list[str]:
    """Files and directories below that look like checkpoints. Links to directories are not followed: they may loop."""
    found: list[str] = []
    waiting = [("", listing)]
    budget = MAX_ENTRIES
    while waiting and budget > 0:
        prefix, here = waiting.pop(0)
        budget -= len(here.files) + len(here.folders) + 1
        if prefix and any(fits(here) for fits, _ in _WHOLE):
            found.append(prefix.rstrip("/"))
            continue
        found += [prefix + name for name in _likely(here)]
        if prefix.count("/") < MAX_DEPTH:
            waiting += _below(prefix, here, noted)
    return found


def _below(prefix: str, here: Listing, noted: Noted) -> list[tuple[str, Listing]]:
    out: list[tuple[str, Listing]] = []
    for folder in here.folders:
        path = here.join(folder)
        inner = None if Path(path).is_symlink() else try_list(path, prefix + folder, noted)
        if inner is not None:
            out.append((f"{prefix}{folder}/", inner))
    return out


_Kind = tuple[Callable[[Listing], object], Callable[[Listing, Readers], Checkpoint]]

# The order matters: Megatron's newer form holds a distributed checkpoint, and any of them may hold loose files.
_WHOLE: tuple[_Kind, ...] = (
    (is_megatron, read_megatron),
    (_is_dcp, _dcp),
    (is_deepspeed, read_deepspeed),
    (_unpacked, _unzipped),
    (_indexes, _indexed),
    (numbered_shards, _numbered),
)
_KINDS: tuple[_Kind, ...] = (*_WHOLE, (_main_file, _single), (lambda _: True, _unknown))
