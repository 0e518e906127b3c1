"""Checkpoints that are directories: shards with an index, DCP, DeepSpeed, Megatron, unpacked archives, single files.

``read_directory`` lists one level, takes the first kind of ``_KINDS`` that fits, and looks at what lies beside it.
A ``Merger`` puts the checkpoints of many files together into one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from transload.checkpoint import Checkpoint, GlobalUse, Key, Leaf, Origin, Part, Record, Storage, Tensor, contiguous
from transload.errors import CannotReadError
from transload.findings import Noted, Problem, some
from transload.formats.safetensors import looks_like
from transload.formats.torch_zip import Archive, read_torch_zip
from transload.formats.zip import Payload
from transload.io.sources import FileSource, Slice, Source
from transload.nodes import Call, Dict, Global, Pickle

__all__ = ["inner_name", "list_directory", "open_directory", "read_directory", "read_sharded", "read_unzipped"]


# A directory of ten million files must not be listed to its end before anything is said.
MAX_ENTRIES = 10_000
# `latest` and its like hold one word.
MAX_NOTE = 4096


@dataclass(frozen=True, slots=True)
class Readers:
    """How to read what a directory is made of. None of them raises for content."""

    file: Callable[[str], Checkpoint]
    item: Callable[[Source], Checkpoint]


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a directory: files with their sizes, folders, and links that lead nowhere."""

    path: str
    files: dict[str, int]
    folders: tuple[str, ...]
    dangling: tuple[str, ...] = ()
    cut: bool = False

    def join(self, name: str) -> str:
        """The path of an entry."""
        return str(Path(self.path, name))


def list_directory(path: str) -> Listing:
    """What a directory holds, sorted by name; ``CannotReadError`` if the system does not say.

    Only one level is listed, so that a loop of symbolic links has nothing to loop through.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    dangling: list[str] = []
    count = 0
    try:
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries, 1):
                if count > MAX_ENTRIES:
                    break
                try:
                    if entry.is_dir():
                        folders.append(entry.name)
                    else:
                        files[entry.name] = entry.stat().st_size
                except OSError:
                    # A link to nothing or to itself: what is left in a cache after its blobs were deleted.
                    dangling.append(entry.name)
    except (OSError, ValueError) as error:
        what = f"cannot list the directory: {getattr(error, 'strerror', None) or error}"
        raise CannotReadError(what, where=path, errno=getattr(error, "errno", None)) from error
    ordered = dict(sorted(files.items()))
    return Listing(path, ordered, tuple(sorted(folders)), tuple(sorted(dangling)), count > MAX_ENTRIES)


def try_list(path: str, where: str, noted: Noted) -> Listing | None:
    """A listing, or a problem."""
    try:
        return list_directory(path)
    except CannotReadError as error:
        noted.add("directory-unreadable", where, error.what)
        return None


def read_note(path: str) -> str:
    """The first word or line of a small text file; empty if it cannot be read."""
    try:
        source = FileSource(path)
        try:
            return source.read(0, MAX_NOTE).decode("utf-8", "replace").strip()
        finally:
            source.close()
    except CannotReadError:
        return ""


def inner_name(name: object) -> str:
    """A name from a file as a relative path that cannot leave the directory; empty if it could.

    >>> inner_name("a/./b.bin"), inner_name("../b.bin"), inner_name("/etc/passwd")
    ('a/b.bin', '', '')

    Links are another matter: a download cache is made of links out of the directory, and whoever could plant
    one could have planted the file.
    """
    if type(name) is not str or not name or "\0" in name or "\\" in name or name[1:2] == ":" or name[0] == "/":
        return ""
    steps = [step for step in name.split("/") if step not in ("", ".")]
    return "" if ".." in steps else "/".join(steps)


def try_read(path: str, where: str, read_file: Callable[[str], Checkpoint], noted: Noted) -> Checkpoint | None:
    """Read one file of a directory; a problem instead of an error.

    Only plain files: a shard that is a directory, or an index that names itself, would be read for ever.
    """
    if not Path(path).is_file() or path.endswith(".index.json"):
        noted.add("part-unreadable", where, "it is not a plain file" if Path(path).exists() else "it is not there")
        return None
    try:
        return read_file(path)
    except CannotReadError as error:
        noted.add("part-unreadable", where, error.what)
        return None


class Merger:
    """Puts checkpoints together into one.

    Storages of part ``a.bin`` get ids ``a.bin:…`` and ``file="a.bin"``; with ``named`` the tensors' names get the
    part in front, for parts that hold the same names (the ranks of a parallel run).
    """

    def __init__(self, noted: Noted, *, named: bool = False) -> None:
        self.noted = noted
        self.named = named
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.leaves: list[Leaf] = []
        self.globals: list[GlobalUse] = []
        self.pickles: list[Pickle] = []
        self.parts: list[Part] = []
        self.origins: list[Origin] = []
        self.checksummed = True

    def add(self, part: str, checkpoint: Checkpoint, *, kind: str = "shard", steps: tuple[Key, ...] = ()) -> None:
        """Take in a whole file."""
        if self.named:
            steps = (part, *steps)
        self.take(part, checkpoint, steps=steps)
        facts = (("format", checkpoint.format), ("tensors", f"{len(checkpoint.tensors):,}"))
        self.parts.append(Part(part, kind, checkpoint.nbytes, facts))

    def take(
        self, part: str, checkpoint: Checkpoint, *, steps: tuple[Key, ...] = (), shift: int = 0, label: str = ""
    ) -> tuple[Tensor, ...]:
        """Take in what a checkpoint holds, without a part of its own; its bytes lie ``shift`` into the file."""
        prefix = label or part
        tensors = tuple(_tensor(tensor, prefix, steps, shift) for tensor in checkpoint.tensors)
        self.tensors += tensors
        self.storages += [_storage(storage, part, prefix, steps, shift) for storage in checkpoint.storages]
        self.leaves += [
            Leaf((*steps, *leaf.path), _named(steps, leaf.name), leaf.kind, leaf.text) for leaf in checkpoint.leaves
        ]
        self.globals += [replace(use, stream=_within(prefix, use.stream)) for use in checkpoint.globals]
        for pickle in checkpoint.pickles:
            pickle.path = (*steps, *pickle.path)
        self.pickles += checkpoint.pickles
        self.origins.append(checkpoint.written_by)
        self.checksummed &= checkpoint.checksummed
        self.noted.extend(
            tuple(replace(problem, where=_within(prefix, problem.where)) for problem in checkpoint.problems)
        )
        return tensors

    def lost(self, name: str, kind: str) -> None:
        """Enter a part that should be there and is not."""
        self.parts.append(Part(name, f"missing {kind}", 0))

    def checkpoint(
        self, path: str, format_: str, facts: tuple[tuple[str, str], ...] = (), flavour: str = ""
    ) -> Checkpoint:
        """Everything taken in, as one."""
        same = bool(self.origins) and all(origin == self.origins[0] for origin in self.origins)
        return Checkpoint(
            path=path,
            format=format_,
            nbytes=sum(part.nbytes for part in self.parts),
            flavour=flavour,
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            globals=tuple(self.globals),
            leaves=tuple(self.leaves),
            parts=tuple(self.parts),
            facts=facts,
            written_by=self.origins[0] if same else Origin(),
            problems=self.noted.problems(),
            pickles=tuple(self.pickles),
            checksummed=self.checksummed and bool(self.origins),
        )


def _within(part: str, where: str) -> str:
    return f"{part} › {where}" if where else part


def _named(steps: tuple[Key, ...], name: str) -> str:
    return "/".join([*map(str, steps), name] if name else map(str, steps))


def _tensor(tensor: Tensor, prefix: str, steps: tuple[Key, ...], shift: int) -> Tensor:
    """The same tensor in its new place. Spelled out, since ``replace`` takes five times as long."""
    return Tensor(
        (*steps, *tensor.path),
        _named(steps, tensor.name),
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.device,
        None if tensor.storage is None else f"{prefix}:{tensor.storage}",
        tensor.offset,
        tensor.requires_grad,
        tensor.kind,
        tensor.cls,
        tuple(_tensor(part, prefix, steps, shift) for part in tensor.parts),
        None if tensor.file_offset is None else tensor.file_offset + shift,
        tensor.flags,
    )


def _storage(storage: Storage, part: str, prefix: str, steps: tuple[Key, ...], shift: int) -> Storage:
    return Storage(
        f"{prefix}:{storage.id}",
        storage.key,
        storage.device,
        storage.dtype,
        storage.nbytes,
        storage.stored,
        None if storage.offset is None else storage.offset + shift,
        storage.record,
        part,
        storage.crc32,
        storage.compressed,
        storage.big_endian,
        tuple(_named(steps, name) for name in storage.tensors) if steps else storage.tensors,
    )


INDEX_SUFFIX = ".index.json"
# The index of a model with 100,000 tensors is 10 MB.
MAX_INDEX = 100_000_000
SHARD_NAME = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d{2,5})-of-(?P<total>\d{2,5})(?P<suffix>\.[A-Za-z0-9]+)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def read_sharded(index_path: str, read_file: Callable[[str], Checkpoint]) -> Checkpoint:
    """The checkpoint behind an index (``model.safetensors.index.json``): its shards read, merged, compared with it.

    Shards are looked for beside the index and nowhere else. ``CannotReadError`` if the index itself cannot be read.
    """
    noted = Noted()
    index = Path(index_path)
    folder, name = index.parent, index.name
    weights, total = _index(index_path, name, noted)
    shards = _by_shard(weights, noted)
    merger = Merger(noted)
    for shard, expected in shards.items():
        _read_shard(folder / shard, shard, expected, read_file, merger)
    whole = not any(noted.has(code) for code in ("shard-missing", "part-unreadable", "index-invalid", "shard-outside"))
    if whole:
        # ``total_size`` counts tensors or, where they share memory, storages: writers differ, so either will do.
        tensors = sum(tensor.nbytes for tensor in merger.tensors)
        storages = sum(storage.nbytes for storage in merger.storages)
        if total is not None and total not in (tensors, storages):
            merger.noted.add("index-total-size", "", f"the index says {total:,} bytes, the tensors take {tensors:,}")
        # Tensors that the index does not know, or that stand in two shards.
        seen: set[str] = set()
        twice: list[str] = []
        for tensor in merger.tensors:
            (twice.append if tensor.name in seen else seen.add)(tensor.name)
        if twice:
            merger.noted.add("shard-tensor-twice", "", f"{len(twice):,} tensors: {some(twice, 3)}")
        unlisted = [name for name in seen if name not in weights]
        if unlisted:
            merger.noted.add("shard-tensor-unlisted", "", f"{len(unlisted):,} tensors: {some(sorted(unlisted), 3)}")
    _check_strays(folder, set(shards), noted)
    merger.parts.append(Part(name, "index", index.stat().st_size))
    facts = (("index", name), ("shards", f"{len(shards):,}"), ("tensors in the index", f"{len(weights):,}"))
    return merger.checkpoint(index_path, "sharded", facts)


def _index(path: str, name: str, noted: Noted) -> tuple[dict[str, str], int | None]:
    """The weight map and the total size that the index gives, as far as they are what they should be."""
    source = FileSource(path)
    try:
        table = _json(source, name, noted)
    finally:
        source.close()
    raw = table.get("weight_map")
    if not isinstance(raw, dict) or not raw:
        if not noted.has("index-invalid"):
            noted.add("index-invalid", name, "it has no weight_map")
        return {}, None
    odd = [key for key, value in raw.items() if type(value) is not str]
    if odd:
        noted.add("index-invalid", f"{name} › weight_map", f"no file name for {some(odd)}")
    metadata = table.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers give it as a float.
    known = int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else None
    return {key: value for key, value in raw.items() if type(value) is str}, known


def _json(source: Source, name: str, noted: Noted) -> dict[str, object]:
    """The index as a dictionary; if it is none, a problem that says what it is instead (often a Git LFS pointer)."""
    import json

    if source.size > MAX_INDEX:
        noted.add("index-invalid", name, f"it is {source.size:,} bytes long; the limit is {MAX_INDEX:,}")
        return {}
    try:
        table = json.loads(source.read(0, source.size))
    except (ValueError, RecursionError):
        from transload.formats.foreign import identify

        noted.add("index-invalid", name, f"it is not JSON but {identify(source).title}")
        return {}
    return table if isinstance(table, dict) else {}


def _by_shard(weights: dict[str, str], noted: Noted) -> dict[str, list[str]]:
    """Tensor names by shard. A name that leads out of the directory is noted and never opened."""
    shards: dict[str, list[str]] = {}
    outside: dict[str, int] = {}
    for tensor, shard in weights.items():
        inner = inner_name(shard)
        if inner:
            shards.setdefault(inner, []).append(tensor)
        else:
            outside[shard] = outside.get(shard, 0) + 1
    for shard, count in outside.items():
        noted.add("shard-outside", shard[:200], f"{count:,} tensors are said to be in it; it was not opened")
    return dict(sorted(shards.items()))


def _read_shard(
    path: Path, shard: str, expected: list[str], read_file: Callable[[str], Checkpoint], merger: Merger
) -> None:
    if not path.exists():
        link = "a link that leads nowhere; " if path.is_symlink() else ""
        detail = f"{link}{len(expected):,} tensors should be in it: {some(expected, 3)}"
        merger.noted.add("shard-missing", shard, detail)
        merger.lost(shard, "shard")
        return
    checkpoint = try_read(str(path), shard, read_file, merger.noted)
    if checkpoint is None:
        merger.lost(shard, "shard")
        return
    merger.add(shard, checkpoint)
    held = {tensor.name for tensor in checkpoint.tensors}
    absent = [name for name in expected if name not in held]
    if absent:
        detail = f"{len(absent):,} tensors that the index puts here: {some(absent, 3)}"
        merger.noted.add("shard-tensor-missing", shard, detail)


def _check_strays(folder: Path, known: set[str], noted: Noted) -> None:
    """Shards beside the index that it does not name: left over from another save, or the index is."""
    try:
        listing = list_directory(str(folder))
    except CannotReadError:
        return
    families = {_family(shard) for shard in known}
    strays = [name for name in listing.files if name not in known and (family := _family(name)) and family in families]
    if strays:
        noted.add("shard-stray", "", f"{len(strays):,} files: {some(strays, 3)}")


def _family(name: str) -> tuple[str, str] | None:
    found = SHARD_NAME.fullmatch(name)
    return (found["stem"], found["suffix"]) if found else None


def numbered_shards(listing: Listing) -> dict[tuple[str, str, int], dict[int, str]]:
    """Files named ``stem-00001-of-00003.suffix``, by stem, suffix and total.

    >>> numbered_shards(Listing(".", {"model-00002-of-00003.safetensors": 8}, ()))
    {('model', '.safetensors', 3): {2: 'model-00002-of-00003.safetensors'}}
    """
    families: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in listing.files:
        found = SHARD_NAME.fullmatch(name)
        if found and found["suffix"] in _WEIGHT_SUFFIXES:
            key = (found["stem"], found["suffix"], int(found["total"]))
            families.setdefault(key, {})[int(found["number"])] = name
    return families


def read_numbered(listing: Listing, read_file: Callable[[str], Checkpoint]) -> Checkpoint:
    """Numbered shards without an index; of several families safetensors first, then the fullest."""
    families = numbered_shards(listing)
    key = min(families, key=lambda family: (_WEIGHT_SUFFIXES.index(family[1]), -len(families[family]), family))
    stem, suffix, total = key
    shards = families[key]
    noted = Noted()
    merger = Merger(noted)
    noted.add("index-missing", "", f"{stem}{suffix}{INDEX_SUFFIX} is not there: no list of tensors to compare with")
    # Numbers run from 1 in Hugging Face's files and from 0 in some others'.
    first = 0 if 0 in shards else 1
    for number in range(first, first + total):
        name = shards.get(number)
        if name is None:
            missing = f"{stem}-{number:05d}-of-{total:05d}{suffix}"
            noted.add("shard-missing", missing, "its number is not among the files")
        elif (checkpoint := try_read(listing.join(name), name, read_file, noted)) is not None:
            merger.add(name, checkpoint)
    others = [f"{other[0]}-…-of-{other[2]:05d}{other[1]}" for other in families if other != key]
    facts = (("shards", f"{len(shards):,} of {total:,}"), *((("also here, not read", some(others)),) if others else ()))
    return merger.checkpoint(listing.path, "sharded", facts)


LATEST = "latest"
ITERATION = "latest_checkpointed_iteration.txt"
# https://github.com/deepspeedai/DeepSpeed, deepspeed/utils/zero_to_fp32.py: the names it looks for. ``rank`` is the
# data-parallel one, ``model`` the tensor-parallel one.
DEEPSPEED_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer states", re.compile(r"(?:\w+_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")),
    ("partitioned model", re.compile(r"zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")),
    ("model states", re.compile(r"mp_rank_(?P<model>\d{1,6})_model_states\.pt")),
    ("expert", re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(?P<model>\d{1,6})_(?:model|optim)_states\.pt")),
    ("layer", re.compile(r"layer_\d+-model_(?P<model>\d{1,6})-model_states\.pt")),
)
MEGATRON_FOLDER = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")
STEP = re.compile(r"(?:global_step|iter_)(\d{1,12})")
# A rank number of a million asks for a million missing files; nobody trains on so many.
MAX_RANKS = 100_000


def is_deepspeed(listing: Listing) -> bool:
    """Whether a directory is DeepSpeed's, or one of its steps."""
    if "zero_to_fp32.py" in listing.files or _has_step(listing, "global_step"):
        return True
    if any(_deepspeed_kind(name) for name in listing.files):
        return True
    # `latest` is too common a word to mean much by itself.
    tag = read_note(listing.join(LATEST)) if LATEST in listing.files else ""
    return bool(STEP.fullmatch(tag)) or inner_name(tag) in listing.folders


def is_megatron(listing: Listing) -> bool:
    """Whether a directory is Megatron's, or one of its iterations."""
    if ITERATION in listing.files or _has_step(listing, "iter_"):
        return True
    return any(MEGATRON_FOLDER.fullmatch(name) for name in listing.folders) or (
        "common.pt" in listing.files and METADATA in listing.files
    )


def _has_step(listing: Listing, start: str) -> bool:
    return any(name.startswith(start) and STEP.fullmatch(name) for name in listing.folders)


def _newest(listing: Listing, wanted: str, note: str, noted: Noted) -> str:
    """The folder that holds the newest step: the one the directory names, else the one with the highest number."""
    steps = {name: int(found[1]) for name in listing.folders if (found := STEP.fullmatch(name))}
    if inner_name(wanted) in listing.folders:
        return inner_name(wanted)
    if wanted:
        detail = f"it names {wanted[:80]!r}, which is not here" + (f"; here are {some(sorted(steps))}" if steps else "")
        noted.add("latest-missing", note, detail)
    return max(steps, key=lambda name: (steps[name], name), default="")


def _deepspeed_kind(name: str) -> tuple[str, re.Match[str]] | None:
    for kind, pattern in DEEPSPEED_FILES:
        found = pattern.fullmatch(name)
        if found:
            return kind, found
    return None


class _Folder(NamedTuple):
    """A directory being read: where it goes, what it holds, how to read it, and its place below the root."""

    merger: Merger
    listing: Listing
    readers: Readers
    prefix: str = ""

    def read(self, name: str, kind: str) -> None:
        """Read one rank's file."""
        where = self.prefix + name
        checkpoint = try_read(self.listing.join(name), where, self.readers.file, self.merger.noted)
        if checkpoint is None:
            self.merger.lost(where, kind)
        else:
            self.merger.add(where, checkpoint, kind=kind)

    def note(self, code: str, detail: str, name: str = "") -> None:
        """Note a problem with one of its files, or with the folder itself."""
        self.merger.noted.add(code, self.prefix + name if name else self.prefix.rstrip("/"), detail)


def _open_step(merger: Merger, listing: Listing, readers: Readers, tag: str) -> _Folder | None:
    """The folder of that name, or the directory itself for an empty one."""
    here = try_list(listing.join(tag), tag, merger.noted) if tag else listing
    return _Folder(merger, here, readers, f"{tag}/" if tag else "") if here is not None else None


def read_deepspeed(listing: Listing, readers: Readers) -> Checkpoint:
    """Every rank's file of the newest step; which ranks there are, and which are missing."""
    merger = Merger(Noted(), named=True)
    wanted = read_note(listing.join(LATEST)) if LATEST in listing.files else ""
    inside = any(_deepspeed_kind(name) for name in listing.files)
    tag = "" if inside else _newest(listing, wanted, LATEST, merger.noted)
    step = _open_step(merger, listing, readers, tag)
    kinds = _read_states(step) if step else {}
    if not kinds:
        merger.noted.add("directory-unknown", tag, "a DeepSpeed directory without any rank's file")
    stage = "3" if "partitioned model" in kinds else "1 or 2" if "optimizer states" in kinds else "0"
    ranks = len(kinds.get("optimizer states") or kinds.get("partitioned model") or kinds.get("model states") or ())
    facts = [("step", tag), ("ZeRO stage", stage), ("ranks found", f"{ranks:,}")]
    if "zero_to_fp32.py" in listing.files:
        facts.append(("script", "zero_to_fp32.py is there to put the weights together; it runs as any program does"))
    lightning = tag == "checkpoint" or "checkpoint" in listing.folders  # what Lightning calls the step
    facts = [fact for fact in facts if fact[1]]
    return merger.checkpoint(listing.path, "deepspeed", tuple(facts), "Lightning" if lightning else "")


def _read_states(step: _Folder) -> dict[str, set[int]]:
    """Every rank's file; the ranks found, by kind of file."""
    kinds: dict[str, set[int]] = {}
    for name in step.listing.files:
        kind = _deepspeed_kind(name)
        if kind:
            kinds.setdefault(kind[0], set()).add(int(kind[1].groupdict().get("rank") or kind[1]["model"]))
            step.read(name, kind[0])
    _check_ranks(kinds, step)
    return kinds


def _check_ranks(kinds: dict[str, set[int]], step: _Folder) -> None:
    """Gaps among the data-parallel ranks; how many there were is in the model file, if anywhere."""
    sizes = (leaf.text for leaf in step.merger.leaves if leaf.path[-1:] == ("dp_world_size",))
    claimed = next((int(size[:6]) for size in sizes if size.isdecimal()), 0)
    for kind in ("optimizer states", "partitioned model"):
        ranks = kinds.get(kind)
        if ranks:
            world = min(max(claimed, max(ranks) + 1), MAX_RANKS)
            missing = [str(rank) for rank in range(world) if rank not in ranks]
            if missing:
                step.note("rank-missing", f"{kind} of {len(missing):,} of {world:,} ranks: {some(missing, 8)}")


def read_megatron(listing: Listing, readers: Readers) -> Checkpoint:
    """The newest iteration: every rank's folder, or the distributed checkpoint that newer releases write."""
    merger = Merger(Noted(), named=True)
    inside = METADATA in listing.files or any(MEGATRON_FOLDER.fullmatch(name) for name in listing.folders)
    # The folder that the note names: ``10`` is ``iter_0000010``, ``release`` is itself.
    wanted = read_note(listing.join(ITERATION)) if ITERATION in listing.files else ""
    wanted = f"iter_{int(wanted[:12]):07d}" if re.fullmatch(r"[0-9]{1,12}", wanted) else wanted
    tag = "" if inside else _newest(listing, wanted, ITERATION, merger.noted)
    step = _open_step(merger, listing, readers, tag) if tag or inside else None
    facts: tuple[tuple[str, str], ...] = (("iteration", tag),) if tag else ()
    if step is None:
        merger.noted.add("directory-unknown", tag, "a Megatron directory without any iteration")
    elif {METADATA, "common.pt"} & step.listing.files.keys():
        facts += _read_dcp(step)
        if "common.pt" in step.listing.files:
            step.read("common.pt", "common")
    else:
        facts += _read_grid(step)
    return merger.checkpoint(listing.path, "megatron", facts)


def _read_grid(step: _Folder) -> tuple[tuple[str, str], ...]:
    """Folders ``mp_rank_TT_PPP``, each with one rank's files."""
    ranks: set[tuple[int, ...]] = set()
    for folder in step.listing.folders:
        found = MEGATRON_FOLDER.fullmatch(folder)
        if found:
            ranks.add(tuple(int(number) for number in found.groups() if number is not None))
            inner = try_list(step.listing.join(folder), step.prefix + folder, step.merger.noted)
            files = [name for name in inner.files if name.endswith(".pt")] if inner else []
            if inner and not files:
                step.note("part-unreadable", f"{folder} holds no .pt file")
            for name in files:
                step.read(f"{folder}/{name}", "rank")
    if not ranks:
        step.note("directory-unknown", "no rank's folder is in it")
        return ()
    sizes = tuple(max(rank[axis] for rank in ranks if axis < len(rank)) + 1 for axis in range(max(map(len, ranks))))
    grid = product(*map(range, sizes)) if prod(sizes) <= MAX_RANKS else ()
    missing = [str(rank) for rank in grid if rank not in ranks]
    if missing:
        step.note("rank-missing", f"{len(missing):,} of {prod(sizes):,} ranks: {some(missing, 8)}")
    return (("parallel layout", " × ".join(map(str, sizes))), ("ranks found", f"{len(ranks):,}"))


METADATA = ".metadata"
# As for any pickle: this is room for a million tensors.
MAX_METADATA = 512 << 20
# Each item costs about a millisecond; beyond this the safety verdict has to be "unknown".
MAX_ITEMS = 20_000
# torch allows 64. A million dimensions of 2**62 would take hours to multiply out.
MAX_DIMENSIONS = 64


class _Item(NamedTuple):
    """One archive in a ``.distcp`` file."""

    fqn: str
    at: tuple[int, ...]
    file: str
    offset: int
    length: int
    transformed: bool


class _Entry(NamedTuple):
    """A tensor as ``.metadata`` describes it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def _read_dcp(folder: _Folder) -> tuple[tuple[str, str], ...]:
    """Read a directory with ``.metadata`` into the folder's merger; facts come back."""
    merger, listing, prefix = folder.merger, folder.listing, folder.prefix
    ranks = [name for name in listing.files if name.endswith(".distcp")]
    merger.parts += [Part(prefix + name, "rank file", listing.files[name]) for name in ranks]
    fields = _state(_metadata(folder))
    if not fields:
        return (("rank files", f"{len(ranks):,}"),)
    entries = _entries(fields.get("state_dict_metadata"))
    pieces = _read_items(_items(fields.get("storage_data"), folder), folder)
    _assemble(entries, pieces, merger)
    version = fields.get("version")
    objects = sum(entry is None for entry in entries.values())
    return (
        ("rank files", f"{len(ranks):,}"),
        ("entries", f"{len(entries) - objects:,} tensors, {objects:,} other objects"),
        *((("metadata version", version),) if isinstance(version, str) else ()),
    )


def _metadata(folder: _Folder) -> object:
    """The root of ``.metadata``; ``None``, with a problem, if there is none."""
    files = folder.listing.files
    size = files.get(METADATA)
    if size is None:
        left = [name for name in files if name.endswith((".metadata", ".metadata.tmp"))]
        detail = f"only {some(left)} is there" if left else "it is written last, when every rank is done"
        folder.note("dcp-metadata-missing", detail, METADATA)
        return None
    if size > MAX_METADATA:
        folder.note("dcp-metadata-too-large", f"{size:,} bytes; the limit is {MAX_METADATA:,}", METADATA)
        return None
    from transload.formats.pickle_machine import run
    from transload.formats.torch_zip import pickle_problems

    data = _contents(folder)
    pickle = run(data, name=folder.prefix + METADATA)
    pickle.main = True
    folder.merger.pickles.append(pickle)
    folder.merger.parts.append(Part(folder.prefix + METADATA, "index", size))
    folder.merger.noted.extend(tuple(pickle_problems(pickle, len(data))))
    if not _state(pickle.root) and not pickle.broken:
        folder.note("dcp-metadata-invalid", "it is a pickle, but not of the metadata of a checkpoint", METADATA)
    return pickle.root


def _contents(folder: _Folder) -> bytes:
    try:
        source = FileSource(folder.listing.join(METADATA))
        try:
            return source.read(0, source.size)
        finally:
            source.close()
    except CannotReadError as error:
        folder.note("part-unreadable", error.what, METADATA)
        return b""


def _state(node: object) -> dict[str, object]:
    """The attributes that a pickled object gets: its last BUILD argument, if that is a dictionary."""
    if isinstance(node, Call) and node.states and isinstance(node.states[-1], Dict):
        return {key: value for key, value in node.states[-1].pairs() if isinstance(key, str)}
    return {}


def _size(node: object) -> tuple[int, ...] | None:
    """A ``torch.Size``, which pickles as a call with a tuple."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, tuple | list) or len(node) > MAX_DIMENSIONS:
        return None
    return tuple(node) if all(type(size) is int and 0 <= size < 1 << 63 for size in node) else None


def _pairs(node: object) -> list[tuple[object, object]]:
    return node.pairs() if isinstance(node, Dict) else []


def _entries(node: object) -> dict[str, _Entry | None]:
    """What the state dict held: a description for each tensor, ``None`` for any other object."""
    entries: dict[str, _Entry | None] = {}
    for name, value in _pairs(node):
        if isinstance(name, str):
            entries[name] = _entry(_state(value))
    return entries


def _entry(fields: dict[str, object]) -> _Entry | None:
    shape, chunks = _size(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(chunks, list):
        return None
    pieces = []
    for chunk in map(_state, chunks):
        at, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if at is not None and sizes is not None:
            pieces.append((at, sizes))
    return _Entry(_dtype(fields.get("properties")), shape, tuple(pieces))


def _dtype(node: object) -> str:
    """The dtype: first of the tuple that ``TensorProperties`` pickles to, in old releases an attribute."""
    state: object = None
    if isinstance(node, Call) and node.states:
        state = node.states[-1]
    first = state[0] if isinstance(state, tuple) and state else _state(node).get("dtype")
    return first.name if isinstance(first, Global) and first.module == "torch" else "unknown"


def _items(node: object, folder: _Folder) -> list[_Item]:
    """Where each piece lies. A path that leads out of the directory is noted and never opened."""
    items: list[_Item] = []
    for key, value in _pairs(node):
        index, info = _state(key), _state(value)
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        file, fqn = inner_name(name), index.get("fqn")
        if not file:
            folder.note("dcp-path-outside", f"{str(name)[:200]!r} was not opened", METADATA)
        elif type(offset) is int and type(length) is int and isinstance(fqn, str) and min(offset, length) >= 0:
            at = _size(index.get("offset")) or ()
            items.append(_Item(fqn, at, file, offset, length, bool(info.get("transform_descriptors"))))
    return items


_Pieces = dict[str, dict[tuple[int, ...], tuple[Tensor, ...]]]
"""Tensors found in the items: by name, then by where in the whole they belong."""


def _read_items(items: list[_Item], folder: _Folder) -> _Pieces:
    """Read every item, file by file, as far as the files reach."""
    pieces: _Pieces = {}
    files: dict[str, list[_Item]] = {}
    for item in items[:MAX_ITEMS]:
        files.setdefault(item.file, []).append(item)
    if len(items) > MAX_ITEMS:
        folder.note("dcp-items-unread", f"{len(items) - MAX_ITEMS:,} of {len(items):,}", METADATA)
    for file, held in sorted(files.items()):
        try:
            source = FileSource(folder.listing.join(file))
        except CannotReadError as error:
            names = some([item.fqn for item in held], 3)
            folder.note("dcp-file-missing", f"{error.what}; {len(held):,} entries need it: {names}", file)
            folder.merger.lost(folder.prefix + file, "rank file")
            continue
        try:
            _read_file(source, held, folder, pieces)
        finally:
            source.close()
    return pieces


def _read_file(source: FileSource, held: list[_Item], folder: _Folder, pieces: _Pieces) -> None:
    file = held[0].file
    cut = [item.fqn for item in held if item.offset + item.length > source.size]
    if cut:
        detail = f"it ends at byte {source.size:,}, before {len(cut):,} of its entries do: {some(cut, 3)}"
        folder.note("dcp-file-cut", detail, file)
    elif sum(item.length for item in held) > source.size:
        # A thousand entries that are all the same gigabyte would be a thousand gigabytes to verify.
        folder.note("dcp-items-overlap", f"{len(held):,} entries are longer together than the file", file)
        return
    opaque: list[str] = []
    for item in held:
        if item.transformed or looks_like(Slice(source, item.offset, source.size, "")):
            opaque.append(item.fqn)
        elif item.offset < source.size:
            pieces.setdefault(item.fqn, {})[item.at] = _read_item(source, item, folder)
    if opaque:
        folder.note("dcp-transformed", f"{len(opaque):,} entries: {some(opaque, 3)}", file)


def _read_item(source: FileSource, item: _Item, folder: _Folder) -> tuple[Tensor, ...]:
    file = folder.prefix + item.file
    found = folder.readers.item(Slice(source, item.offset, item.length, f"{file} › {item.fqn}"))
    # Two items of one file may both call their storage "0".
    return folder.merger.take(file, found, steps=(item.fqn,), shift=item.offset, label=f"{file}@{item.offset}")


def _assemble(entries: dict[str, _Entry | None], pieces: _Pieces, merger: Merger) -> None:
    """Tensors by their own names, put together from their pieces; what is no tensor stays as it was read."""
    whole: list[Tensor] = []
    for name, entry in entries.items():
        found = pieces.get(name, {})
        if entry is None:
            whole += [tensor for tensors in found.values() for tensor in tensors]
        else:
            whole.append(_joined(name, entry, found, merger.noted))
    merger.tensors = whole


def _joined(name: str, entry: _Entry, found: dict[tuple[int, ...], tuple[Tensor, ...]], noted: Noted) -> Tensor:
    """One tensor: its only piece under its own name, or all its pieces as parts."""
    parts: list[Tensor] = []
    for at, sizes in entry.chunks:
        for part in found.get(at, ())[:1]:
            parts.append(part._replace(path=(name, *at)))
            if (part.dtype, part.shape) != (entry.dtype, sizes):
                detail = f"{part.dtype} {list(part.shape)} where .metadata says {entry.dtype} {list(sizes)}"
                noted.add("dcp-piece-mismatch", name, detail)
    if len(parts) < len(entry.chunks) or sum(prod(sizes) for _, sizes in entry.chunks) < prod(entry.shape):
        noted.add("dcp-piece-missing", name, f"{len(parts):,} of {len(entry.chunks):,} pieces were found")
    if len(parts) == 1 and parts[0].shape == entry.shape:
        return parts[0]._replace(path=(name,), name=name)
    stride = contiguous(entry.shape)
    return Tensor((name,), name, entry.dtype, entry.shape, stride, "cpu", None, kind="sharded", parts=tuple(parts))


# The files that hold a model's weights, best first; what else looks like a checkpoint belongs to the training.
_USUAL_NAMES = (
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


def read_directory(path: str, *, verify: bool = False, read_file: Callable[[str], Checkpoint]) -> Checkpoint:
    """What a directory holds; ``read_file`` reads the files in it.

    ``verify`` is passed on to the small archives inside ``.distcp`` files. Bad content is a problem, never an error;
    ``CannotReadError`` only if the directory itself cannot be listed.
    """
    from transload.formats import read_source

    readers = Readers(read_file, lambda source: read_source(source, verify=verify))
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


def _dcp(listing: Listing, readers: Readers) -> Checkpoint:
    """``torch.distributed.checkpoint``, alone or in Lightning's sharded form with ``meta.pt`` beside it."""
    merger = Merger(Noted())
    facts = _read_dcp(_Folder(merger, listing, readers))
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


def _indexes(listing: Listing) -> list[str]:
    """Indexes of shards, safetensors before pickles, plain before variants."""
    found = [name for name in listing.files if name.endswith(INDEX_SUFFIX)]
    return sorted(found, key=lambda name: ("safetensors" not in name, len(name), name))


def _indexed(listing: Listing, readers: Readers) -> Checkpoint:
    first, *others = _indexes(listing)
    checkpoint = read_sharded(listing.join(first), readers.file)
    note = (("also here, not read", some(others)),) if others else ()
    return replace(checkpoint, path=listing.path, facts=(*checkpoint.facts, *note))


def _main_file(listing: Listing) -> str:
    """The one file to read: by its usual name, or because no other looks like a checkpoint."""
    usual = next((name for name in _USUAL_NAMES if name in listing.files), "")
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
        storages=tuple(storage._replace(file=name) for storage in checkpoint.storages),
        parts=(Part(name, "weights", listing.files[name]), *checkpoint.parts),
        facts=(("read", f"{name}, of the {len(listing.files):,} files in the directory"), *checkpoint.facts),
    )


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
    (lambda listing: any(name == METADATA or name.endswith(".distcp") for name in listing.files), _dcp),
    (is_deepspeed, read_deepspeed),
    (_unpacked, lambda listing, _: read_unzipped(listing.path)),
    (_indexes, _indexed),
    (numbered_shards, lambda listing, readers: read_numbered(listing, readers.file)),
)
_KINDS: tuple[_Kind, ...] = (*_WHOLE, (_main_file, _single), (lambda _: True, _unknown))


MAX_UNPACKED_FILES = 200_000
"""Files listed: somebody may point at their home directory. Twenty thousand tensors are twenty thousand files."""

MAX_NESTED_FOLDERS = 32
"""Directories below one another: a program's source lies ten deep at most."""


def read_unzipped(path: str) -> Checkpoint:
    """A checkpoint out of an unpacked ``torch.save`` archive; of a TorchScript program or a package, if it was one.

    ``file`` of a storage is relative to ``path``. A link that leads out of the directory is not followed: a stranger's
    archive could show any file of this machine as its own.
    """
    problems: list[Problem] = []
    home = _home(path)
    archive = open_directory(home, problems)
    nbytes = sum(record.size for record in archive.records.values())
    found = _reader(archive)(archive, problems, path=path, nbytes=nbytes)
    lead = "" if home == path else f"{Path(home).name}/"
    storages = tuple(s._replace(file=f"{lead}{s.record}" if s.record else "") for s in found.storages)
    kind = "torch-directory" if found.format == "torch-zip" else found.format
    return replace(found, format=kind, storages=storages, facts=(*found.facts, ("unpacked", "yes")))


def _home(path: str) -> str:
    """The directory of the records: the one given, or the only thing in it, since unzipping makes a folder."""
    try:
        entries = list(os.scandir(path))
    except OSError as error:
        raise CannotReadError(error.strerror or str(error), where=path, errno=error.errno) from error
    return entries[0].path if len(entries) == 1 and entries[0].is_dir(follow_symlinks=False) else path


def _reader(archive: Archive) -> Callable[..., Checkpoint]:
    if archive.find("constants.pkl") or (archive.find("model.json") and not archive.find("data.pkl")):
        from transload.formats.torchscript import read_torchscript

        return read_torchscript
    if archive.find(".data/extern_modules"):
        from transload.formats.torch_package import read_package

        return read_package
    return read_torch_zip


def open_directory(path: str, problems: list[Problem]) -> Archive:
    """The files of a directory as the records of an archive; those that cannot be are noted in ``problems``."""
    top = Path(os.path.realpath(path))
    records = {name: Record(name, 0, size, size) for name, size in _files(top, problems)}

    def read(record: Record, limit: int) -> Payload:
        if record.size > limit:
            return Payload(b"", intact=False, problem=f"{record.size} bytes are more than the {limit} we read")
        try:
            source = FileSource(top / record.name)
            data = source.read(record.offset or 0, record.size)
            source.close()
        except CannotReadError as error:
            return Payload(b"", intact=False, problem=error.what)
        return Payload(data, intact=True)

    return Archive(records, read, top.name)


def _files(top: Path, problems: list[Problem]) -> Iterator[tuple[str, int]]:
    """Relative name, with slashes, and size of every file; numbers in order, as torch writes storages."""
    count = 0
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        _prune(top, here, folders, problems)
        for name in sorted(files, key=_numeric):
            count += 1
            if count > MAX_UNPACKED_FILES:
                problems.append(
                    Problem("directory-too-long", detail=f"only its first {MAX_UNPACKED_FILES:,} files were read")
                )
                return
            size = _size_inside(top, here / name, problems)
            if size is not None:
                yield (here / name).relative_to(top).as_posix(), size


def _numeric(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isascii() and name.isdecimal() and len(name) < 20 else (1 << 64, name)


def _prune(top: Path, here: Path, folders: list[str], problems: list[Problem]) -> None:
    """Do not go into linked directories, which may lead anywhere and round in circles, nor too deep."""
    for name in [name for name in folders if (here / name).is_symlink()]:
        folders.remove(name)
        where = (here / name).relative_to(top).as_posix()
        problems.append(Problem("link-outside", where, "a linked directory is not read"))
    folders.sort()
    if len(here.relative_to(top).parts) >= MAX_NESTED_FOLDERS and folders:
        folders.clear()
        problems.append(Problem("directory-too-long", detail=f"nested deeper than {MAX_NESTED_FOLDERS} directories"))


def _size_inside(top: Path, file: Path, problems: list[Problem]) -> int | None:
    """The size of a plain file inside the directory; ``None``, with a problem, for anything else."""
    where = file.relative_to(top).as_posix()
    if file.is_symlink() and top not in Path(os.path.realpath(file)).parents:
        problems.append(Problem("link-outside", where, "a link that leads out of the directory is not followed"))
        return None
    try:
        status = file.stat()
    except OSError as error:
        problems.append(Problem("record-unreadable", where, error.strerror or str(error)))
        return None
    if not stat.S_ISREG(status.st_mode):
        problems.append(Problem("record-unreadable", where, "it is no regular file"))
        return None
    return status.st_size
