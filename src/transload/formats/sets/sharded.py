"""Shards with an index (``model.safetensors.index.json``), or only numbered (``model-00001-of-00003.safetensors``)."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import closing

from transload.checkpoint import Checkpoint, Part
from transload.findings import LimitedProblems, join_names
from transload.formats.sets.merger import INDEX_SUFFIX, Merger
from transload.frozen import replace
from transload.io.folder import Listing, relative_path
from transload.io.sources import Source
from transload.render.words import plural

# The index of a model with 100,000 tensors is 10 MB.
MAX_INDEX = 100_000_000
SHARD_NAME = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d{2,5})-of-(?P<total>\d{2,5})(?P<suffix>\.[A-Za-z0-9]+)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def matches(listing: Listing) -> bool:
    """Whether a folder has an index, or numbered shards."""
    return any(name.endswith(INDEX_SUFFIX) for name in listing.files) or bool(numbered_shards(listing))


def read(merger: Merger) -> Checkpoint:
    """Read the shards of the best index, else those of the best numbered family."""
    indexes = [name for name in merger.listing.files if name.endswith(INDEX_SUFFIX)]
    if not indexes:
        return _read_numbered(merger)
    # Safetensors before pickles, plain before variants.
    first, *others = sorted(indexes, key=lambda name: ("safetensors" not in name, len(name), name))
    checkpoint = read_index(merger, first)
    note = (("also here, not read", join_names(others)),) if others else ()
    return replace(checkpoint, facts=(*checkpoint.facts, *note))


def read_index(merger: Merger, index: str) -> Checkpoint:
    """Read an index, merge its shards, and compare them with it.

    Shards must be in the directory of the index. ``CannotReadError`` if the index itself cannot be read.
    """
    listing, noted = merger.listing, merger.noted
    with closing(listing.folder.open(index)) as source:
        weights, total = read_weight_map(source, noted)
        nbytes = source.size
    shards: dict[str, list[str]] = {}
    outside: Counter[str] = Counter()
    for tensor, shard in weights.items():
        if inner := relative_path(shard):
            shards.setdefault(inner, []).append(tensor)
        else:
            outside[shard] += 1
    for shard, count in outside.items():
        noted.add("shard-outside", shard[:200], f"the index puts {plural(count, 'tensor')} into it; it was not opened")
    listing.folder.prepare(sorted(shards))
    for shard, expected in sorted(shards.items()):
        kind = listing.folder.kind(shard)
        if kind in ("", "link"):
            link = "a link that leads nowhere; " if kind else ""
            detail = f"{link}{plural(len(expected), 'tensor')} should be in it: {join_names(expected, 3)}"
            noted.add("shard-missing", shard, detail)
            merger.add_missing(shard, "shard")
        elif (checkpoint := merger.read(shard, "shard", role="member")) is not None:
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
        names = Counter(tensor.name for tensor in merger.tensors)
        twice = [*(names - Counter(names.keys())).elements()]
        unlisted = sorted(names.keys() - weights.keys())
        for code, doubtful in (("shard-tensor-twice", twice), ("shard-tensor-unlisted", unlisted)):
            if doubtful:
                noted.add(code, "", f"{plural(len(doubtful), 'tensor')}: {join_names(doubtful, 3)}")
    # Shards that the index does not name: either they or the index are left over from another save.
    families = {match.group("stem", "suffix") for shard in shards if (match := SHARD_NAME.fullmatch(shard))}
    others = [(name, SHARD_NAME.fullmatch(name)) for name in listing.files if name not in shards]
    strays = [name for name, match in others if match and match.group("stem", "suffix") in families]
    if strays:
        noted.add("shard-stray", "", f"{len(strays):,} files: {join_names(strays, 3)}")
    merger.parts.append(Part(index, "index", nbytes, role="index"))
    merger.facts += [("index", index), ("shards", f"{len(shards):,}")]
    merger.facts.append(("tensors in the index", f"{len(weights):,}"))
    return merger.merged()


def read_weight_map(source: Source, noted: LimitedProblems) -> tuple[dict[str, str], int | None]:
    """The weight map and the total size of an index; invalid entries are left out, with a problem."""
    import json

    name = os.path.basename(source.name)
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
    unplaced = [key for key, value in raw.items() if type(value) is not str]
    if unplaced:
        noted.add("index-invalid", f"{name} › weight_map", f"no file name for {join_names(unplaced)}")
    metadata = fields.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers give it as a float.
    nbytes = int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else None
    return {key: value for key, value in raw.items() if type(value) is str}, nbytes


def numbered_shards(listing: Listing) -> dict[tuple[str, str, int], dict[int, str]]:
    """Files named ``stem-00001-of-00003.suffix``, by stem, suffix and total.

    >>> from transload.io.folder import Folder
    >>> numbered_shards(Listing(Folder("."), "", {"model-00002-of-00003.safetensors": 8}))
    {('model', '.safetensors', 3): {2: 'model-00002-of-00003.safetensors'}}
    """
    families: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in listing.files:
        match = SHARD_NAME.fullmatch(name)
        if match and match["suffix"] in _WEIGHT_SUFFIXES:
            key = (match["stem"], match["suffix"], int(match["total"]))
            families.setdefault(key, {})[int(match["number"])] = name
    return families


def _read_numbered(merger: Merger) -> Checkpoint:
    """Read numbered shards without an index. Of several families safetensors are preferred, then the most complete."""
    families = numbered_shards(merger.listing)
    key = min(families, key=lambda family: (_WEIGHT_SUFFIXES.index(family[1]), -len(families[family]), family))
    stem, suffix, total = key
    shards = families[key]
    merger.note("index-missing", f"{stem}{suffix}{INDEX_SUFFIX} is missing: no list of tensors to compare with")
    # Hugging Face counts from 1, some others from 0.
    first = 0 if 0 in shards else 1
    merger.listing.folder.prepare([merger.listing.prefix + name for name in shards.values()])
    for number in range(first, first + total):
        if number in shards:
            merger.read(shards[number], "shard", role="member", required=False)
        else:
            missing = f"{stem}-{number:05d}-of-{total:05d}{suffix}"
            merger.note("shard-missing", "no file has its number", missing)
    others = [f"{other[0]}-…-of-{other[2]:05d}{other[1]}" for other in families if other != key]
    merger.facts.append(("shards", f"{len(shards):,} of {total:,}"))
    if others:
        merger.facts.append(("also here, not read", join_names(others)))
    return merger.merged()
