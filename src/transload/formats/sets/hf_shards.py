"""Safetensors files of ranks, as ``HuggingFaceStorageWriter`` saves them: ``shard-00001-model-….safetensors``.

The header of each says where its pieces begin (``DCP_SHARDING_INFO``), but nothing says how large the tensors are: they
end where the last piece does. torch reads such a folder in the same way.
"""

from __future__ import annotations

import json
import re

from transload.checkpoint import Checkpoint, Part, Tensor
from transload.findings import join_names
from transload.formats.safetensors import SHARDING_INFO, header_metadata
from transload.formats.sets.merger import MAX_RANKS, Merger, listed
from transload.formats.sets.pieces import assembled, lost_words, overlap_words
from transload.geometry import Box, hull
from transload.io.folder import Listing
from transload.render.words import plural

_SHARD = re.compile(r"shard-(\d{1,6})-.+\.safetensors")
_FOLDER = "sharded"


def matches(listing: Listing) -> bool:
    """Whether a folder has such files, or only a folder of them."""
    if any(name.endswith(".safetensors") for name in listing.files):
        return any(map(_SHARD.fullmatch, listing.files))
    return _FOLDER in listing.folders


def read(merger: Merger) -> Checkpoint | None:
    """Merge the files of all ranks; ``None`` if they are not of this kind."""
    merger.format, merger.flavour = "dcp", "safetensors of ranks"
    if not any(map(_SHARD.fullmatch, merger.listing.files)):
        merger.listing = listed(merger.listing.folder, _FOLDER, merger.noted)
    numbers = {name: int(match[1]) for name in merger.listing.files if (match := _SHARD.fullmatch(name))}
    pieces: dict[str, list[Tensor]] = {}
    for name in numbers:
        checkpoint = merger.open(name)
        part = merger.listing.prefix + name
        if checkpoint is None:
            merger.add_missing(name, "rank file")
            continue
        starts = starts_in(header_metadata(merger.open_file(part))) if checkpoint.tensors else {}
        if starts is None:
            return None
        for tensor in merger.merge(part, checkpoint):
            rank = len(tensor.shape)
            start = starts.get(tensor.name, (0,) * rank)
            if len(start) == rank:
                pieces.setdefault(tensor.name, []).append(tensor._replace(path=(tensor.name, *start), start=start))
            else:
                merger.note(
                    "dcp-piece-mismatch", f"{tensor.name} has {plural(rank, 'dimension')}, not {len(start)}", name
                )
        merger.parts.append(Part(part, "rank file", checkpoint.nbytes, (("tensors", f"{len(checkpoint.tensors):,}"),)))
    if not pieces:
        return None
    missing = sorted(set(range(1, min(max(numbers.values()), MAX_RANKS) + 1)) - set(numbers.values()))
    if missing:
        merger.note("rank-missing", f"{len(missing):,} ranks: {join_names([f'shard-{each:05}' for each in missing])}")
    merger.facts.append(("rank files", f"{len(numbers):,}"))
    merger.tensors = [_assembled(merger, name, parts) for name, parts in pieces.items()]
    merger.note("dcp-shape-inferred", f"{plural(len(pieces), 'tensor')} in {plural(len(numbers), 'file')}")
    return merger.merged()


def starts_in(metadata: dict[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Where the piece of each tensor begins; ``None`` if the metadata does not say."""
    try:
        table = json.loads(metadata.get(SHARDING_INFO, ""))
        starts = {name: tuple(entry["saved_offsets"]) for name, entry in table.items()}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    whole = all(type(each) is int and 0 <= each < 1 << 63 for start in starts.values() for each in start)
    return starts if whole else None


def _assembled(merger: Merger, name: str, parts: list[Tensor]) -> Tensor:
    """A tensor of its pieces, each listed once."""
    parts = [part for part in parts if part.numel] or parts[:1]  # an empty one says nothing
    first = parts[0]
    unique = {part.start: part for part in reversed(parts) if part.start is not None}
    ordered, shape = [unique[start] for start in sorted(unique)], first.shape
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1 or any(
        part.shape != unique[part.start].shape for part in parts if part.start is not None
    ):
        merger.note("dcp-piece-mismatch", f"the pieces of {name} differ in their dtypes, or in shapes at one place")
        ordered = []  # any of them may be of another run
    else:
        shape = hull(Box(start, part.shape) for start, part in unique.items())
    tensor, covered = assembled((name,), shape, ordered, dtype=first.dtype)
    if covered.lost and ordered:
        detail = f"{plural(len(ordered), 'piece')} found; missing: {lost_words(covered, shape)}"
        merger.noted.add("dcp-piece-missing", name, detail)
    if covered.twice:
        merger.noted.add("dcp-pieces-overlap", name, overlap_words(covered, shape))
    return tensor
