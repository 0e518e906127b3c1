"""Checkpoints cut into shards: by an index that says which tensor is where, or by numbered names alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from transload.checkpoint import Checkpoint, Part
from transload.errors import CannotReadError
from transload.read.noted import Noted, some
from transload.read.parts import Listing, Merger, inner_name, list_directory, try_read
from transload.read.source import FileSource, Source

__all__ = ["INDEX_SUFFIX", "numbered_shards", "read_numbered", "read_sharded"]

INDEX_SUFFIX = ".index.json"
# The index of a model with 100,000 tensors is 10 MB.
MAX_INDEX = 100_000_000
SHARD_NAME = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d{2,5})-of-(?P<total>\d{2,5})(?P<suffix>\.[A-Za-z0-9]+)")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


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
        _check_total(merger, total)
        _check_names(merger, weights)
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
        from transload.read.foreign import identify

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


def _check_names(merger: Merger, weights: dict[str, str]) -> None:
    """Tensors that the index does not know, or that stand in two shards."""
    seen: set[str] = set()
    twice: list[str] = []
    for tensor in merger.tensors:
        (twice.append if tensor.name in seen else seen.add)(tensor.name)
    if twice:
        merger.noted.add("shard-tensor-twice", "", f"{len(twice):,} tensors: {some(twice, 3)}")
    unlisted = [name for name in seen if name not in weights]
    if unlisted:
        merger.noted.add("shard-tensor-unlisted", "", f"{len(unlisted):,} tensors: {some(sorted(unlisted), 3)}")


def _check_total(merger: Merger, total: int | None) -> None:
    """``total_size`` counts tensors or, where they share memory, storages: writers differ, so either will do."""
    tensors = sum(tensor.nbytes for tensor in merger.tensors)
    storages = sum(storage.nbytes for storage in merger.storages)
    if total is not None and total not in (tensors, storages):
        merger.noted.add("index-total-size", "", f"the index says {total:,} bytes, the tensors take {tensors:,}")


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
        if found and found["suffix"] in WEIGHTS:
            key = (found["stem"], found["suffix"], int(found["total"]))
            families.setdefault(key, {})[int(found["number"])] = name
    return families


def read_numbered(listing: Listing, read_file: Callable[[str], Checkpoint]) -> Checkpoint:
    """Numbered shards without an index; of several families safetensors first, then the fullest."""
    families = numbered_shards(listing)
    key = min(families, key=lambda family: (WEIGHTS.index(family[1]), -len(families[family]), family))
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
