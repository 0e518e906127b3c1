"""Checkpoints that are directories: shards with an index, DCP, DeepSpeed, Megatron, unpacked archives, single files.

``read_directory`` lists one level, decides by the names what kind of checkpoint it is, and also reads the pickles of
other files in it. A ``Merger`` reads the files and merges their checkpoints into one.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import product
from math import prod
from pathlib import Path
from typing import TypeGuard

from transload.checkpoint import Checkpoint, Draft, Key, Leaf, Origin, Part, Record, Tensor, contiguous
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, Problems, join_names
from transload.formats.nested import joined, moved_storage, moved_tensor
from transload.formats.pickle_machine import run
from transload.formats.safetensors import looks_like_safetensors
from transload.formats.torch_zip import Archive, pickle_problems, read_torch_zip
from transload.formats.zip import Payload, ZipIndex
from transload.frozen import NamedTuple, replace
from transload.io.sources import FileSource, Slice, Source
from transload.nodes import Call, Dict, Global, short
from transload.render.words import plural

ReadFile = Callable[[str], Checkpoint]
"""Reads the file at a path. Bad content is a problem of the checkpoint, never an error."""

# A directory of ten million files must not be listed to its end before anything is reported.
MAX_ENTRIES = 10_000


class Listing(NamedTuple):
    """One level of a directory: files with their sizes, folders, and dangling links.

    ``cut`` is whether entries are missing: there are more than ``MAX_ENTRIES``, or they could not be listed.
    """

    path: str
    files: dict[str, int]
    folders: tuple[str, ...]
    dangling: tuple[str, ...] = ()
    cut: bool = False

    def join(self, name: str) -> str:
        """The path of an entry."""
        return str(Path(self.path, name))

    def read_text(self, name: str) -> str:
        """The text of a small file such as ``latest``; empty if it does not exist or cannot be read."""
        try:
            with closing(FileSource(self.join(name))) as source:
                return source.read(0, 4096).decode("utf-8", "replace").strip()
        except CannotReadError:
            return ""


def list_directory(path: str, where: str = "", noted: LimitedProblems | None = None) -> Listing:
    """List a directory, sorted by name. If that fails, add a problem to ``noted``, or raise ``CannotReadError``.

    Only one level is listed, so a loop of symbolic links is harmless.
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
        if noted is None:
            raise CannotReadError(what, where=path, errno=getattr(error, "errno", None)) from error
        noted.add("directory-unreadable", where, what)
        return Listing(path, {}, (), cut=True)
    ordered = dict(sorted(files.items()))
    return Listing(path, ordered, tuple(sorted(folders)), tuple(sorted(dangling)), count > MAX_ENTRIES)


def relative_path(name: object) -> str:
    """A path from a file, normalized; empty if it would lead out of the directory.

    >>> relative_path("a/./b.bin"), relative_path("../b.bin"), relative_path("/etc/passwd")
    ('a/b.bin', '', '')

    Links may lead out of it: a download cache is made of them, and whoever could plant one could have planted the file.
    """
    if type(name) is not str or not name or "\0" in name or "\\" in name or name[1:2] == ":" or name[0] == "/":
        return ""
    steps = [step for step in name.split("/") if step not in ("", ".")]
    return "" if ".." in steps else "/".join(steps)


class Merger(Draft):
    """Reads files of a directory, and merges their checkpoints into one.

    Storages of part ``a.bin`` get ids ``a.bin:…`` and ``file="a.bin"``. In a format with ranks the names of its tensors
    begin with ``a.bin``, too: the ranks of a parallel run use the same names. ``listing`` is the folder being read, and
    ``prefix`` its path below the directory.
    """

    def __init__(self, listing: Listing, read_file: ReadFile, format_: str = "sharded") -> None:
        super().__init__(listing.path, format_, 0)
        self.listing = listing
        self.prefix = ""
        self.read_file = read_file
        self.noted = LimitedProblems()
        self.origins: list[Origin] = []
        self.checksummed = True
        self.flavour = ""

    def note(self, code: str, detail: str, name: str = "") -> None:
        """Note a problem with a file of the folder, or with the folder itself."""
        self.noted.add(code, self.prefix + name if name else self.prefix.rstrip("/"), detail)

    def open(self, name: str) -> Checkpoint | None:
        """The checkpoint in a file of the folder; ``None``, with a problem, if it cannot be read.

        Only plain files are read: with directories as shards, or an index that names itself, this might never end.
        """
        path = self.listing.join(name)
        # Unlike pathlib, os.path answers "no" for a name that is too long, and where access is denied.
        if not os.path.isfile(path) or name.endswith(INDEX_SUFFIX):
            exists = os.path.exists(path)
            self.note("part-unreadable", "it is not a plain file" if exists else "it does not exist", name)
            return None
        try:
            return self.read_file(path)
        except CannotReadError as error:
            self.note("part-unreadable", error.what, name)
            return None

    def read(self, name: str, kind: str, *, steps: tuple[Key, ...] = (), required: bool = True) -> Checkpoint | None:
        """Merge a file of the folder as a part; if it cannot be read and is ``required``, as a missing part."""
        checkpoint = self.open(name)
        part = self.prefix + name
        if checkpoint is None:
            if required:
                self.add_missing(name, kind)
            return None
        ranked = self.format in ("megatron", "deepspeed")
        self.merge(part, checkpoint, steps=(part, *steps) if ranked else steps)
        facts = (("format", checkpoint.format), ("tensors", f"{len(checkpoint.tensors):,}"))
        self.parts.append(Part(part, kind, checkpoint.nbytes, facts))
        return checkpoint

    def merge(
        self, part: str, checkpoint: Checkpoint, *, steps: tuple[Key, ...] = (), shift: int = 0, label: str = ""
    ) -> list[Tensor]:
        """Merge a checkpoint whose bytes begin ``shift`` bytes into the file ``part``; return the new tensors.

        ``label`` replaces ``part`` in the ids of storages and in problems.
        """
        prefix = label or part
        tensors = [moved_tensor(tensor, f"{prefix}:", steps, shift) for tensor in checkpoint.tensors]
        self.tensors += tensors
        self.storages += [moved_storage(s, f"{prefix}:", steps, shift, part) for s in checkpoint.storages]
        self.leaves += [
            Leaf((*steps, *leaf.path), joined(steps, leaf.name), leaf.kind, leaf.text) for leaf in checkpoint.leaves
        ]
        for pickle in checkpoint.pickles:
            pickle.path = (*steps, *pickle.path)
        self.pickles += checkpoint.pickles
        self.origins.append(checkpoint.written_by)
        self.checksummed &= checkpoint.checksummed
        self.noted.extend(problem.within(prefix) for problem in checkpoint.problems)
        return tensors

    def add_missing(self, name: str, kind: str) -> None:
        """Add a part that should exist and does not."""
        self.parts.append(Part(self.prefix + name, f"missing {kind}", 0))

    def merged(self) -> Checkpoint:
        """The merged checkpoint."""
        same = bool(self.origins) and all(origin == self.origins[0] for origin in self.origins)
        return self.checkpoint(
            nbytes=sum(part.nbytes for part in self.parts),
            written_by=self.origins[0] if same else Origin(),
            problems=self.noted.problems(),
            checksummed=self.checksummed and bool(self.origins),
        )


# -- shards

INDEX_SUFFIX = ".index.json"
# The index of a model with 100,000 tensors is 10 MB.
MAX_INDEX = 100_000_000
SHARD_NAME = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d{2,5})-of-(?P<total>\d{2,5})(?P<suffix>\.[A-Za-z0-9]+)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def read_sharded(index_path: str, read_file: ReadFile) -> Checkpoint:
    """Read an index (``model.safetensors.index.json``), merge its shards, and compare them with it.

    Shards must be in the directory of the index. ``CannotReadError`` if the index itself cannot be read.
    """
    index = Path(index_path)
    listing = list_directory(str(index.parent), noted=LimitedProblems())
    merger = Merger(listing, read_file)
    noted = merger.noted
    with closing(FileSource(index)) as source:
        weights, total = read_weight_map(source, noted)
    shards: dict[str, list[str]] = {}
    outside: Counter[str] = Counter()
    for tensor, shard in weights.items():
        if inner := relative_path(shard):
            shards.setdefault(inner, []).append(tensor)
        else:
            outside[shard] += 1
    for shard, count in outside.items():
        noted.add("shard-outside", shard[:200], f"the index puts {plural(count, 'tensor')} into it; it was not opened")
    for shard, expected in sorted(shards.items()):
        path = index.parent / shard
        if not os.path.exists(path):
            link = "a link that leads nowhere; " if os.path.islink(path) else ""
            detail = f"{link}{plural(len(expected), 'tensor')} should be in it: {join_names(expected, 3)}"
            noted.add("shard-missing", shard, detail)
            merger.add_missing(shard, "shard")
        elif (checkpoint := merger.read(shard, "shard")) is not None:
            present = {tensor.name for tensor in checkpoint.tensors}
            absent = [name for name in expected if name not in present]
            if absent:
                detail = f"{plural(len(absent), 'tensor')} that the index puts here: {join_names(absent, 3)}"
                noted.add("shard-tensor-missing", shard, detail)
    if not any(noted.has(code) for code in ("shard-missing", "part-unreadable", "index-invalid", "shard-outside")):
        # Some writers count shared memory once in ``total_size``, others once for each tensor.
        tensors = sum(tensor.nbytes for tensor in merger.tensors)
        storages = sum(storage.nbytes for storage in merger.storages)
        if total is not None and total not in (tensors, storages):
            noted.add("index-total-size", "", f"the index says {total:,} bytes, the tensors take {tensors:,}")
        # Tensors that are in two shards, or not in the index.
        names = Counter(each.name for each in merger.tensors)
        twice = [*(names - Counter(names.keys())).elements()]
        unlisted = sorted(names.keys() - weights.keys())
        for code, odd in (("shard-tensor-twice", twice), ("shard-tensor-unlisted", unlisted)):
            if odd:
                noted.add(code, "", f"{plural(len(odd), 'tensor')}: {join_names(odd, 3)}")
    # Shards that the index does not name: either they or the index are left over from another save.
    families = {found.group("stem", "suffix") for shard in shards if (found := SHARD_NAME.fullmatch(shard))}
    others = [(name, SHARD_NAME.fullmatch(name)) for name in listing.files if name not in shards]
    strays = [name for name, found in others if found and found.group("stem", "suffix") in families]
    if strays:
        noted.add("shard-stray", "", f"{len(strays):,} files: {join_names(strays, 3)}")
    merger.parts.append(Part(index.name, "index", index.stat().st_size))
    merger.facts += [("index", index.name), ("shards", f"{len(shards):,}")]
    merger.facts.append(("tensors in the index", f"{len(weights):,}"))
    return replace(merger.merged(), path=index_path)


def read_weight_map(source: Source, noted: LimitedProblems) -> tuple[dict[str, str], int | None]:
    """The weight map and the total size of an index; invalid entries are left out, with a problem."""
    import json

    name = Path(source.name).name
    table: object = None
    try:
        if source.size > MAX_INDEX:
            noted.add("index-invalid", name, f"it is {source.size:,} bytes long; the limit is {MAX_INDEX:,}")
        else:
            table = json.loads(source.read(0, source.size))
    except (ValueError, RecursionError):
        from transload.formats.foreign import identify

        # Often a Git LFS pointer.
        noted.add("index-invalid", name, f"it is not JSON but {identify(source).title}")
    fields = table if isinstance(table, dict) else {}
    raw = fields.get("weight_map")
    if not isinstance(raw, dict) or not raw:
        if not noted.has("index-invalid"):
            noted.add("index-invalid", name, "it has no weight_map")
        return {}, None
    odd = [key for key, value in raw.items() if type(value) is not str]
    if odd:
        noted.add("index-invalid", f"{name} › weight_map", f"no file name for {join_names(odd)}")
    metadata = fields.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers give it as a float.
    known = int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else None
    return {key: value for key, value in raw.items() if type(value) is str}, known


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


def _read_numbered(merger: Merger) -> None:
    """Read numbered shards without an index. Of several families safetensors are preferred, then the most complete."""
    families = numbered_shards(merger.listing)
    key = min(families, key=lambda family: (_WEIGHT_SUFFIXES.index(family[1]), -len(families[family]), family))
    stem, suffix, total = key
    shards = families[key]
    merger.note("index-missing", f"{stem}{suffix}{INDEX_SUFFIX} is missing: no list of tensors to compare with")
    # Hugging Face counts from 1, some others from 0.
    first = 0 if 0 in shards else 1
    for number in range(first, first + total):
        if number in shards:
            merger.read(shards[number], "shard", required=False)
        else:
            missing = f"{stem}-{number:05d}-of-{total:05d}{suffix}"
            merger.note("shard-missing", "no file has its number", missing)
    others = [f"{other[0]}-…-of-{other[2]:05d}{other[1]}" for other in families if other != key]
    merger.facts.append(("shards", f"{len(shards):,} of {total:,}"))
    if others:
        merger.facts.append(("also here, not read", join_names(others)))


# -- the ranks of a parallel run

LATEST = "latest"
ITERATION = "latest_checkpointed_iteration.txt"
# The names that deepspeed/utils/zero_to_fp32.py (https://github.com/deepspeedai/DeepSpeed) looks for. The number is the
# data-parallel rank in the first two, the tensor-parallel rank in the others.
DEEPSPEED_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer states", re.compile(r"(?:\w+_)?zero_pp_rank_(\d{1,6})_mp_rank_\d{1,6}_optim_states\.pt")),
    ("partitioned model", re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_\d{1,6}_model_states\.pt")),
    ("model states", re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")),
    ("expert", re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d{1,6})_(?:model|optim)_states\.pt")),
    ("layer", re.compile(r"layer_\d+-model_(\d{1,6})-model_states\.pt")),
)
MEGATRON_FOLDER = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")
STEP = re.compile(r"(?:global_step|iter_)(\d{1,12})")
# A file named after rank one million would make a million files missing; nobody trains on that many GPUs.
MAX_RANKS = 100_000


def _deepspeed_ranks(listing: Listing) -> list[tuple[str, str, int]]:
    """DeepSpeed's files in a folder: the name, the kind and the rank of each."""
    found = ((name, kind, form.fullmatch(name)) for name in listing.files for kind, form in DEEPSPEED_FILES)
    return [(name, kind, int(match[1])) for name, kind, match in found if match]


def _enter_latest(merger: Merger, wanted: str, file: str, fact: str) -> str:
    """Enter the folder of the latest step, and note it as a fact: the one ``file`` names, else the highest number."""
    listing = merger.listing
    steps = {name: int(found[1]) for name in listing.folders if (found := STEP.fullmatch(name))}
    tag = relative_path(wanted)
    if tag not in listing.folders:
        if wanted:
            here = f"; there are {join_names(sorted(steps))}" if steps else ""
            merger.note("latest-missing", f"it names {wanted[:80]!r}, which is not here{here}", file)
        tag = max(steps, key=lambda name: (steps[name], name), default="")
    if tag:
        merger.listing, merger.prefix = list_directory(listing.join(tag), tag, merger.noted), f"{tag}/"
        merger.facts.append((fact, tag))
    return tag


def _read_deepspeed(merger: Merger) -> None:
    """Merge the files of every rank from the latest step, and note missing ranks."""
    top = merger.listing
    tag = "" if _deepspeed_ranks(top) else _enter_latest(merger, top.read_text(LATEST), LATEST, "step")
    kinds: dict[str, set[int]] = {}
    for name, kind, rank in _deepspeed_ranks(merger.listing):
        kinds.setdefault(kind, set()).add(rank)
        merger.read(name, kind)
    # Gaps among the data-parallel ranks. Their number is in the model states, if anywhere.
    sizes = (leaf.text for leaf in merger.leaves if leaf.path[-1:] == ("dp_world_size",))
    recorded = next((int(size[:6]) for size in sizes if size.isdecimal()), 0)
    for kind in ("optimizer states", "partitioned model"):
        ranks = kinds.get(kind, set())
        world = min(max(recorded, max(ranks) + 1), MAX_RANKS) if ranks else 0
        missing = [str(rank) for rank in range(world) if rank not in ranks]
        if missing:
            merger.note("rank-missing", f"{kind} of {len(missing):,} of {world:,} ranks: {join_names(missing, 8)}")
    if not kinds:
        merger.note("directory-unknown", "a DeepSpeed directory without any rank's file")
    stage = "3" if "partitioned model" in kinds else "1 or 2" if "optimizer states" in kinds else "0"
    found = kinds.get("optimizer states") or kinds.get("partitioned model") or kinds.get("model states") or ()
    merger.facts += [("ZeRO stage", stage), ("ranks found", f"{len(found):,}")]
    if "zero_to_fp32.py" in top.files:
        script = "zero_to_fp32.py puts the weights together; like any program, it can do anything when it runs"
        merger.facts.append(("script", script))
    if tag == "checkpoint" or "checkpoint" in top.folders:  # what Lightning calls the step
        merger.flavour = "Lightning"


def _read_megatron(merger: Merger, read_item: Callable[[Source], Checkpoint]) -> None:
    """Merge the latest iteration: every rank's folder, or the distributed checkpoint that newer releases write."""
    top = merger.listing
    inside = METADATA in top.files or any(MEGATRON_FOLDER.fullmatch(name) for name in top.folders)
    # ``10`` means the folder ``iter_0000010``; ``release`` is a folder of that name.
    wanted = top.read_text(ITERATION)
    wanted = f"iter_{int(wanted[:12]):07d}" if re.fullmatch(r"[0-9]{1,12}", wanted) else wanted
    found_step = inside or _enter_latest(merger, wanted, ITERATION, "iteration")
    if not found_step or merger.noted.has("directory-unreadable"):
        merger.note("directory-unknown", "a Megatron directory without any iteration")
        return
    listing = merger.listing
    if {METADATA, "common.pt"} & listing.files.keys():
        _read_dcp(merger, read_item)
        if "common.pt" in listing.files:
            merger.read("common.pt", "common")
        return
    # Folders ``mp_rank_TT_PPP``, each with one rank's files.
    ranks: set[tuple[int, ...]] = set()
    for folder in listing.folders:
        found = MEGATRON_FOLDER.fullmatch(folder)
        if not found:
            continue
        ranks.add(tuple(int(number) for number in found.groups() if number is not None))
        inner = list_directory(listing.join(folder), merger.prefix + folder, merger.noted)
        files = [name for name in inner.files if name.endswith(".pt")]
        if not files and not inner.cut:
            merger.note("part-unreadable", f"{folder} contains no .pt file")
        for name in files:
            merger.read(f"{folder}/{name}", "rank")
    if not ranks:
        merger.note("directory-unknown", "it contains no rank's folder")
        return
    sizes = tuple(max(rank[axis] for rank in ranks if axis < len(rank)) + 1 for axis in range(max(map(len, ranks))))
    grid = product(*map(range, sizes)) if prod(sizes) <= MAX_RANKS else ()
    missing = [str(rank) for rank in grid if rank not in ranks]
    if missing:
        merger.note("rank-missing", f"{len(missing):,} of {prod(sizes):,} ranks: {join_names(missing, 8)}")
    merger.facts += [("parallel layout", " × ".join(map(str, sizes))), ("ranks found", f"{len(ranks):,}")]


# -- torch.distributed.checkpoint

METADATA = ".metadata"
# Enough for a million tensors.
MAX_METADATA = 512 << 20
# Reading an item takes about a millisecond. Where some are left out, the safety verdict has to be "unknown".
MAX_ITEMS = 20_000
# torch allows 64. A million dimensions of 2**62 would take hours to multiply out.
MAX_DIMENSIONS = 64


def _read_dcp(merger: Merger, read_item: Callable[[Source], Checkpoint]) -> None:
    """Merge a folder with ``.metadata``, which is a pickled object."""
    files = merger.listing.files
    ranks = [name for name in files if name.endswith(".distcp")]
    merger.parts += [Part(merger.prefix + name, "rank file", files[name]) for name in ranks]
    merger.facts.append(("rank files", f"{len(ranks):,}"))
    size = files.get(METADATA)
    if size is None:
        left = [name for name in files if name.endswith((".metadata", ".metadata.tmp"))]
        detail = f"only {join_names(left)} is there" if left else "it is written last, when every rank is done"
        merger.note("dcp-metadata-missing", detail, METADATA)
        return
    if size > MAX_METADATA:
        merger.note("dcp-metadata-too-large", f"{size:,} bytes; the limit is {MAX_METADATA:,}", METADATA)
        return
    data = b""
    try:
        with closing(FileSource(merger.listing.join(METADATA))) as source:
            data = source.read(0, source.size)
    except CannotReadError as error:
        merger.note("part-unreadable", error.what, METADATA)
    pickle = run(data, name=merger.prefix + METADATA)
    pickle.main = True
    merger.pickles.append(pickle)
    merger.parts.append(Part(merger.prefix + METADATA, "index", size))
    merger.noted.extend(pickle_problems(pickle, len(data)))
    fields = _state(pickle.root, "Metadata")
    if not fields and not pickle.broken:
        merger.note("dcp-metadata-invalid", "it is a pickle, but not of the metadata of a checkpoint", METADATA)
    if not fields:
        return
    merger.checksummed = False  # nothing protects the names and places of all tensors
    # The items of each file: archives, each with a piece of a tensor or with an object. An entry is the item's name,
    # the position of the piece in its tensor, its offset and length in the file, and whether it is transformed. A path
    # that leads out of the directory is never opened.
    items: dict[str, list[tuple[str, tuple[int, ...], int, int, bool]]] = {}
    count = 0
    listed: set[str] = set()
    odd: list[str] = []
    for key, value in _pairs(fields.get("storage_data")):
        index, info = _state(key, "MetadataIndex"), _state(value, "StorageInfo")
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        file, fqn = relative_path(path), index.get("fqn")
        if path is None or not isinstance(fqn, str):
            odd.append(short(fqn)[:200])
        elif not file:
            merger.note("dcp-path-outside", f"{short(path)[:200]!r} was not opened", METADATA)
        elif type(offset) is int and type(length) is int and min(offset, length) >= 0:
            listed.add(fqn)
            count += 1
            if count <= MAX_ITEMS:
                at = _size(index.get("offset")) or ()
                item = (fqn, at, offset, length, bool(info.get("transform_descriptors")))
                items.setdefault(file, []).append(item)
    if count > MAX_ITEMS:
        merger.note("dcp-items-unread", f"{count - MAX_ITEMS:,} of {count:,}", METADATA)
    # The tensors found in the items: by name, then by their position in the whole tensor.
    pieces: dict[str, dict[tuple[int, ...], list[Tensor]]] = {}
    for file, file_items in sorted(items.items()):
        try:
            source = FileSource(merger.listing.join(file))
        except CannotReadError as error:
            names = join_names([fqn for fqn, *_ in file_items], 3)
            merger.note("dcp-file-missing", f"{error.what}; {len(file_items):,} entries need it: {names}", file)
            merger.add_missing(file, "rank file")
            continue
        with closing(source):
            cut = [fqn for fqn, _, offset, length, _ in file_items if offset + length > source.size]
            if cut:
                detail = f"it ends at byte {source.size:,}, before {len(cut):,} of its entries do: {join_names(cut, 3)}"
                merger.note("dcp-file-cut", detail, file)
            present = sum(max(0, min(length, source.size - offset)) for _, _, offset, length, _ in file_items)
            if present > source.size:
                # Verifying a thousand entries for the same gigabyte would read a terabyte.
                merger.note("dcp-items-overlap", f"{len(file_items):,} entries together are longer than the file", file)
                continue
            opaque: list[str] = []
            part = merger.prefix + file
            for fqn, at, offset, length, transformed in file_items:
                if transformed or looks_like_safetensors(Slice(source, offset, source.size, "")):
                    opaque.append(fqn)
                elif offset < source.size:
                    found = read_item(Slice(source, offset, length, f"{part} › {fqn}"))
                    # Two items of one file may both call their storage "0".
                    tensors = merger.merge(part, found, steps=(fqn,), shift=offset, label=f"{part}@{offset}")
                    pieces.setdefault(fqn, {})[at] = tensors
            if opaque:
                merger.note("dcp-transformed", f"{len(opaque):,} entries: {join_names(opaque, 3)}", file)
    # Assemble tensors from their pieces, under their own names; what is not a tensor stays as it was read.
    whole: list[Tensor] = []
    entries = {name: value for name, value in _pairs(fields.get("state_dict_metadata")) if type(name) is str}
    odd += sorted(listed - entries.keys())
    objects = 0
    for name, entry in entries.items():
        own = pieces.get(name, {})
        tensor = _assembled(name, _state(entry, "TensorStorageMetadata"), own, merger.noted)
        whole += [tensor] if tensor else [tensor for tensors in own.values() for tensor in tensors]
        objects += tensor is None
        if tensor is None and not (name in listed and _is_a(entry, "BytesStorageMetadata")):
            odd.append(name)
    if odd:
        detail = f"{len(odd):,} entries lack a description or a place: {join_names(odd, 3)}"
        merger.note("dcp-metadata-invalid", detail, METADATA)
    elif not entries and any(files[name] for name in ranks):
        merger.note("dcp-metadata-invalid", "it lists nothing, but the files of the ranks are not empty", METADATA)
    merger.tensors = whole
    count_words = f"{plural(len(entries) - objects, 'tensor')}, {plural(objects, 'other object')}"
    merger.facts.append(("entries", count_words))
    version = fields.get("version")
    if isinstance(version, str):
        merger.facts.append(("metadata version", version))


def _is_a(node: object, kind: str) -> TypeGuard[Call]:
    """Whether a node is an object of a class whose name ends in ``kind``: Megatron has its own ``MCoreMetadata``."""
    return isinstance(node, Call) and isinstance(node.callee, Global) and node.callee.name.endswith(kind)


def _state(node: object, kind: str) -> dict[str, object]:
    """The attributes that a pickled object of a class gets: its last BUILD argument, if that is a dictionary."""
    if _is_a(node, kind) and node.states:
        return {key: value for key, value in _pairs(node.states[-1]) if isinstance(key, str)}
    return {}


def _pairs(node: object) -> list[tuple[object, object]]:
    return node.pairs() if isinstance(node, Dict) else []


def _size(node: object) -> tuple[int, ...] | None:
    """A ``torch.Size``, which pickles as a call with a tuple."""
    if _is_a(node, "Size") and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, tuple | list) or len(node) > MAX_DIMENSIONS:
        return None
    return tuple(node) if all(type(size) is int and 0 <= size < 1 << 63 for size in node) else None


def _assembled(
    name: str, fields: dict[str, object], found: dict[tuple[int, ...], list[Tensor]], noted: LimitedProblems
) -> Tensor | None:
    """A tensor that ``.metadata`` describes: its only piece under the name of the tensor, or all pieces as parts."""
    shape, raw = _size(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(raw, list):
        return None
    # ``TensorProperties`` pickles as a tuple that begins with the dtype; in old releases that is an attribute.
    properties = fields.get("properties")
    state = properties.states[-1] if _is_a(properties, "TensorProperties") and properties.states else None
    first = state[0] if isinstance(state, tuple) and state else _state(properties, "TensorProperties").get("dtype")
    dtype = first.name if isinstance(first, Global) and first.module == "torch" else "unknown"
    parts: list[Tensor] = []
    count = numel = 0
    for chunk in (_state(each, "ChunkStorageMetadata") for each in raw):
        at, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if at is None or sizes is None:
            continue
        count, numel = count + 1, numel + prod(sizes)
        for part in found.get(at, ())[:1]:
            parts.append(part._replace(path=(name, *at), start=at))
            if (part.dtype, part.shape) != (dtype, sizes):
                detail = f"{part.dtype} {list(part.shape)} where .metadata says {dtype} {list(sizes)}"
                noted.add("dcp-piece-mismatch", name, detail)
    if len(parts) < count or numel < prod(shape):
        noted.add("dcp-piece-missing", name, f"{len(parts):,} of {count:,} pieces were found")
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]._replace(path=(name,), name=name, start=None)
    return Tensor((name,), name, dtype, shape, contiguous(shape), "cpu", None, kind="sharded", parts=tuple(parts))


# -- which kind of directory

# The usual names of a model's weights, best first. Other files that look like checkpoints belong to the training.
_USUAL_NAMES = (
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", "pytorch_lora_weights.safetensors"),
    "consolidated.safetensors",
)
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pt2", ".pth.tar", ".pkl")
# How far an unknown directory is searched for something to read.
MAX_DEPTH = 3
_MAX_OTHERS = 20
# The problems of a file beside the checkpoint that concern safety: whether its tensors are whole does not matter.
_SAFETY_PROBLEMS = {
    *("pickle-ambiguous", "pickle-broken", "pickle-unreadable", "tar-ambiguous", "zip-directory-record"),
    *("zip-duplicate-name", "zip-headers-differ", "zip-inside", "zip-names-differ", "zip-nul-name", "zip-odd-name"),
    *("zip-overlap", "zip-shifted", "zip-two-ends", "zip-two-sizes"),
}


def _kind(listing: Listing) -> str:
    """Which kind of checkpoint a directory is as a whole; empty if it only contains files.

    The order matters: Megatron's newer form contains a distributed checkpoint, and any kind may contain other files.
    """
    files, folders = listing.files, listing.folders
    steps = {found[0][:4] for name in folders if (found := STEP.fullmatch(name))}
    ranks = any(MEGATRON_FOLDER.fullmatch(name) for name in folders)
    if ranks or ITERATION in files or "iter" in steps or {"common.pt", METADATA} <= files.keys():
        return "megatron"
    if any(name == METADATA or name.endswith(".distcp") for name in files):
        return "dcp"
    if "zero_to_fp32.py" in files or "glob" in steps or _deepspeed_ranks(listing):
        return "deepspeed"
    # Not every file `latest` is DeepSpeed's.
    tag = listing.read_text(LATEST)
    if STEP.fullmatch(tag) or relative_path(tag) in folders:
        return "deepspeed"
    places = [listing]
    if len(folders) == 1 and not files:  # the one folder that unzipping made
        places.append(list_directory(listing.join(folders[0]), noted=LimitedProblems()))
    for here in places:  # a torch.save archive, or a torch.package
        if "data.pkl" in here.files and ("data" in here.folders or "version" in here.files):
            return "unpacked"
        if ".data" in here.folders and Path(here.path, ".data", "extern_modules").is_file():
            return "unpacked"
    if any(name.endswith(INDEX_SUFFIX) for name in files):
        return "indexed"
    return "numbered" if numbered_shards(listing) else ""


def _checkpoint_files(listing: Listing) -> list[str]:
    return [name for name in listing.files if name.lower().endswith(SUFFIXES)]


def read_directory(path: str, read_file: ReadFile, read_item: Callable[[Source], Checkpoint]) -> Checkpoint:
    """Read a directory; ``read_file`` reads the files in it, ``read_item`` the archives inside ``.distcp`` files.

    Bad content is a problem, never an error; ``CannotReadError`` only if the directory itself cannot be listed.
    """
    listing = list_directory(path)
    kind = _kind(listing)
    merger = Merger(listing, read_file, kind if kind in ("megatron", "deepspeed", "dcp") else "sharded")
    # The one file to read: it has a usual name, or is the only one that looks like a checkpoint.
    found = _checkpoint_files(listing)
    main = next((name for name in _USUAL_NAMES if name in listing.files), found[0] if len(found) == 1 else "")
    checkpoint: Checkpoint | None = None  # for most kinds, what the merger has merged
    if kind == "megatron":
        _read_megatron(merger, read_item)
    elif kind == "dcp":
        _read_dcp(merger, read_item)
        if "meta.pt" in listing.files:  # Lightning's sharded form
            merger.read("meta.pt", "trainer state", steps=("meta.pt",), required=False)
            merger.flavour = "Lightning"
    elif kind == "deepspeed":
        _read_deepspeed(merger)
    elif kind == "unpacked":
        checkpoint = read_unzipped(path)
    elif kind == "indexed":  # safetensors before pickles, plain before variants
        indexes = [name for name in listing.files if name.endswith(INDEX_SUFFIX)]
        first, *others = sorted(indexes, key=lambda name: ("safetensors" not in name, len(name), name))
        checkpoint = read_sharded(listing.join(first), read_file)
        note = (("also here, not read", join_names(others)),) if others else ()
        checkpoint = replace(checkpoint, path=path, facts=(*checkpoint.facts, *note))
    elif kind == "numbered":
        _read_numbered(merger)
    elif main:
        checkpoint = merger.open(main) or Checkpoint(path, "directory", 0, problems=merger.noted.problems())
        if checkpoint.format != "directory":
            checkpoint = replace(
                checkpoint,
                path=path,
                storages=tuple(storage._replace(file=main) for storage in checkpoint.storages),
                parts=(Part(main, "weights", listing.files[main]), *checkpoint.parts),
                facts=(("read", f"{main}, of the {len(listing.files):,} files in the directory"), *checkpoint.facts),
            )
    else:
        checkpoint = _describe_unknown(listing)
    checkpoint = checkpoint or merger.merged()
    # Add dangling links, and files that are not part of the checkpoint: a program that loads the directory may load
    # those, too, so their pickles are read.
    noted = LimitedProblems()
    noted.extend(checkpoint.problems)
    if listing.cut:
        noted.add("directory-too-long", "", f"only its first {MAX_ENTRIES:,} entries were looked at")
    if listing.dangling:
        noted.add("link-dangling", "", f"{len(listing.dangling):,} links lead nowhere: {join_names(listing.dangling)}")
    known = {part.name for part in checkpoint.parts}
    beside = [] if "unpacked" in dict(checkpoint.facts) else [name for name in found if name not in known]
    pickles = [*checkpoint.pickles]
    for name in beside[:_MAX_OTHERS]:
        try:
            other = read_file(listing.join(name))
        except CannotReadError as error:
            noted.add("part-unreadable", name, error.what)
            continue
        for pickle in other.pickles:
            pickle.main = False
            pickle.name = f"{name} › {pickle.name}"
        noted.extend(problem.within(name) for problem in other.problems if problem.code in _SAFETY_PROBLEMS)
        pickles += other.pickles
    if beside:
        noted.add("directory-others", "", f"{len(beside):,} files: {join_names(beside)}")
    if len(beside) > _MAX_OTHERS:
        noted.add("directory-others-unread", "", f"{len(beside) - _MAX_OTHERS:,} of them")
    parts = (*checkpoint.parts, *(Part(name, "beside the checkpoint", listing.files[name]) for name in beside))
    return replace(checkpoint, problems=noted.problems(), parts=parts, pickles=tuple(pickles))


def _describe_unknown(listing: Listing) -> Checkpoint:
    """A directory of no known kind: list what looks like a checkpoint in it, a few levels down."""
    noted = LimitedProblems()
    found: list[str] = []
    waiting = [("", listing)]
    budget = MAX_ENTRIES
    while waiting and budget > 0:
        prefix, here = waiting.pop(0)
        budget -= len(here.files) + len(here.folders) + 1
        if prefix and _kind(here):
            found.append(prefix.rstrip("/"))
            continue
        found += [prefix + name for name in _checkpoint_files(here)]
        folders = here.folders if prefix.count("/") < MAX_DEPTH else ()
        real = [prefix + name for name in folders if not Path(here.path, name).is_symlink()]  # links may form circles
        waiting += [(f"{name}/", list_directory(listing.join(name), name, noted)) for name in real]
    names = [*(f"{name}/" for name in listing.folders), *listing.files]
    detail = f"it contains {join_names(names, 8)}" if names else "it is empty"
    if found:
        detail += f"; these look like checkpoints: {join_names(found, 8)}"
    noted.add("directory-unknown", "", detail)
    out = Draft(listing.path, "directory", sum(listing.files.values()), noted.problems())
    for name in found:
        size = 0
        with suppress(OSError):
            size = Path(listing.path, name).stat().st_size
        out.parts.append(Part(name, "looks like a checkpoint", size))
    return out.checkpoint()


# -- unpacked archives

MAX_UNPACKED_FILES = 200_000
"""There is a limit since somebody may pass their home directory. Large models have twenty thousand storages."""

MAX_NESTED_FOLDERS = 32
"""The folders of a program's source are nested ten deep at most."""


def read_unzipped(path: str) -> Checkpoint:
    """Read an unpacked ``torch.save`` archive, TorchScript program or package.

    ``file`` of a storage is relative to ``path``. A link that leads out of the directory is not followed: an untrusted
    archive could pass off any file of this machine as its own.
    """
    from transload.formats.programs import package, torchscript

    listing = list_directory(path)
    # Unzipping makes a folder for the records; the path may be that folder, or the one around it.
    inside = len(listing.folders) == 1 and not listing.files and not Path(path, listing.folders[0]).is_symlink()
    prefix = f"{listing.folders[0]}/" if inside else ""
    archive = open_directory(str(Path(path, prefix)))
    archive.path = path
    if archive.find("constants.pkl") or (archive.find("model.json") and not archive.find("data.pkl")):
        found = torchscript.read(archive)
    else:
        found = package.read(archive) if archive.find(".data/extern_modules") else read_torch_zip(archive)
    storages = tuple(s._replace(file=f"{prefix}{s.record}" if s.record else "") for s in found.storages)
    kind = "torch-directory" if found.format == "torch-zip" else found.format
    return replace(found, format=kind, storages=storages, facts=(*found.facts, ("unpacked", "yes")))


def open_directory(path: str) -> Archive:
    """The files of a directory as the records of an archive; those that cannot be records are noted as problems."""
    top, problems = Path(os.path.realpath(path)), Problems()
    records: dict[str, Record] = {}
    for count, file in enumerate(_files_below(top, problems)):
        if count >= MAX_UNPACKED_FILES:
            problems.add("directory-too-long", detail=f"only its first {MAX_UNPACKED_FILES:,} files were read")
            break
        where = file.relative_to(top).as_posix()
        if file.is_symlink() and top not in Path(os.path.realpath(file)).parents:
            problems.add("link-outside", where, "a link that leads out of the directory is not followed")
            continue
        try:
            status = file.stat()
        except OSError as error:
            problems.add("record-unreadable", where, error.strerror or str(error))
            continue
        if stat.S_ISREG(status.st_mode):
            records[where] = Record(where, 0, status.st_size, status.st_size)
        else:
            problems.add("record-unreadable", where, "it is not a regular file")

    def read(record: Record, limit: int) -> Payload:
        if record.size > limit:
            return Payload(b"", intact=False, problem=f"{record.size} bytes are more than the limit of {limit}")
        try:
            with closing(FileSource(top / record.name)) as source:
                return Payload(source.read(record.offset or 0, record.size), intact=True)
        except CannotReadError as error:
            return Payload(b"", intact=False, problem=error.what)

    nbytes = sum(record.size for record in records.values())
    return Archive(path, nbytes, ZipIndex(top.name, records, tuple(problems)), read)


def _files_below(top: Path, problems: Problems) -> Iterator[Path]:
    """The files below a directory; numbers in numerical order, as torch writes storages."""
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        # Linked directories may lead anywhere, even in circles.
        for name in [name for name in folders if (here / name).is_symlink()]:
            folders.remove(name)
            problems.add("link-outside", (here / name).relative_to(top).as_posix(), "a linked directory is not read")
        folders.sort()
        if len(here.relative_to(top).parts) >= MAX_NESTED_FOLDERS and folders:
            folders.clear()
            problems.add("directory-too-long", detail=f"nested deeper than {MAX_NESTED_FOLDERS} directories")
        numbers = [name for name in files if name.isascii() and name.isdecimal() and len(name) < 20]
        for name in (*sorted(numbers, key=int), *sorted(set(files).difference(numbers))):
            yield here / name
