"""safetensors: one file, or shards of a largest size with the index that Hugging Face's loaders expect."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from transload.converting.comparing import Back
from transload.converting.moving import Descriptor, Writer
from transload.converting.old_set import clear_parts
from transload.converting.pouring import can_pour, pour
from transload.dtypes import ITEMSIZE, SAFETENSORS
from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry, Sorted
    from transload.converting.job import Job
    from transload.io.atomic import AtomicFile

__all__ = ["holds", "index_name", "shard_names", "write_safetensors"]

_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
_RESERVED = "__metadata__"
_MAX_HEADER = 100_000_000


class _Shard(NamedTuple):
    entries: list[Entry]
    header: bytes


def holds(dtype: str) -> bool:
    """Whether the format has a dtype."""
    return dtype in _NAMES


def write_safetensors(job: Job, found: Sorted, data: Data, metadata: dict[str, str]) -> list[Back]:
    """Write the file, or the shards and their index; where everything is now."""
    shards = [_shard(entries, found.aliases, metadata) for entries in _cut(found.entries, job.wish.max_shard)]
    names = shard_names(job.dst, len(shards))
    clear_parts(index_name(job.dst))
    places: list[Back] = []
    for name, shard in zip(names, shards, strict=True):
        file = job.bundle.add(name)
        if job.verify and can_pour():
            _pour(job, file, shard, data)
            _found(file, shard)
            continue
        writer = Writer(file.descriptor, job.tell)
        writer.write(shard.header)
        for entry in shard.entries:
            writer.put(entry, data)
        writer.flush()
        job.copied += writer.copied
        places += _found(file, shard)
    if len(shards) > 1:
        _write_index(job, names, shards)
        if os.path.isfile(job.dst) and job.dst not in job.bundle.paths:  # noqa: PTH113 - texts throughout, as given
            job.bundle.remove(job.dst)  # loaders would take it for the weights, rather than the shards
    return places


def _pour(job: Job, file: AtomicFile, shard: _Shard, data: Data) -> None:
    def tell(nbytes: int) -> None:
        if job.tell is not None:
            job.tell(2 * nbytes)

    poured = pour(file.descriptor, shard.header, shard.entries, data, where=file.path, tell=tell)
    job.summed.update({id(entry): value for entry, value in zip(shard.entries, poured.checksums, strict=True)})


def shard_names(dst: str, count: int) -> list[str]:
    """The names of the shards of a file.

    >>> shard_names("m.safetensors", 1), shard_names("m.safetensors", 2)
    (['m.safetensors'], ['m-00001-of-00002.safetensors', 'm-00002-of-00002.safetensors'])
    """
    stem = dst.removesuffix(".index.json").removesuffix(".safetensors")
    if count == 1:
        return [dst.removesuffix(".index.json")]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_name(dst: str) -> str:
    """The name of the index of shards."""
    return f"{dst.removesuffix('.index.json').removesuffix('.safetensors')}.safetensors.index.json"


def _cut(entries: tuple[Entry, ...], most: int) -> list[list[Entry]]:
    """Entries in shards of ``most`` bytes at most, in their order; a larger one has a shard for itself."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if most and shards[-1] and size + entry.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _shard(entries: list[Entry], aliases: tuple[tuple[str, str], ...], metadata: dict[str, str]) -> _Shard:
    """The table of a file. Wide numbers come first, so that all begin at a multiple of their width."""
    entries = sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype])
    here = {entry.name for entry in entries}
    said = {"format": "pt", **metadata, **{name: kept for name, kept in aliases if kept in here}}
    lines = [f'"{_RESERVED}":{_json(said)}']
    at = 0
    for entry in entries:  # line by line: a dictionary of all of them takes five times as much
        shape = list(entry.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # counted in pairs by torch, one by one here
            shape[-1] *= 2
        held = f'"dtype":"{_NAMES[entry.dtype]}","shape":[{",".join(map(str, shape))}]'
        lines.append(f'{_json(entry.name)}:{{{held},"data_offsets":[{at},{(at := at + entry.nbytes)}]}}')
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConvertError(f"its table would take {len(text):,} bytes: safetensors allows {_MAX_HEADER:,}")
    return _Shard(entries, len(text).to_bytes(8, "little") + text)


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _found(file: AtomicFile, shard: _Shard) -> list[Back]:
    """Where the reader finds the entries of a file that was just written; it must find just them."""
    from transload.formats.safetensors import read_safetensors

    source = Descriptor(file.descriptor, file.path)
    read = read_safetensors(source)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    places = []
    for entry in shard.entries:
        tensor = tensors.pop(entry.name, None)
        same = tensor is not None and (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape)
        if tensor is None or not same or (tensor.file_offset is None and entry.nbytes):
            raise ConvertError(f"{entry.name} is not read back as it was written", where=file.path)
        places.append(Back(entry, source, tensor.file_offset or 0))
    if tensors or read.problems:
        raise ConvertError("it is not read back as it was written", where=file.path)
    return places


def _write_index(job: Job, names: list[str], shards: list[_Shard]) -> None:
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    base = [os.path.basename(name) for name in names]  # noqa: PTH119 - as above
    held = {entry.name: name for name, shard in zip(base, shards, strict=True) for entry in shard.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(held.items()))}
    file = job.bundle.add(index_name(job.dst), leads=True)
    Writer(file.descriptor, None).whole(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
