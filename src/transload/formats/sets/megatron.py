"""Megatron directories: a folder for every rank, or the distributed checkpoint that newer releases write."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from transload.checkpoint import Checkpoint
from transload.findings import join_names
from transload.formats.sets import dcp
from transload.formats.sets.merger import MAX_RANKS, Merger, listed, steps_in
from transload.io.folder import Listing

_ITERATION = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")


def matches(listing: Listing) -> bool:
    """Whether a folder has Megatron's iterations, or one of them."""
    files, folders = listing.files, listing.folders
    if any(_RANK.fullmatch(name) for name in folders) or steps_in(listing, "iter_"):
        return True
    return _ITERATION in files or {"common.pt", dcp.METADATA} <= files.keys()


def read(merger: Merger) -> Checkpoint:
    """Merge the latest iteration."""
    merger.format, merger.ranked = "megatron", True
    _merge(merger)
    return merger.merged()


def _merge(merger: Merger) -> None:
    top = merger.listing
    inside = dcp.METADATA in top.files or any(_RANK.fullmatch(name) for name in top.folders)
    # ``10`` means the folder ``iter_0000010``; ``release`` is a folder of that name.
    wanted = top.text(_ITERATION)
    wanted = f"iter_{int(wanted[:12]):07d}" if re.fullmatch(r"[0-9]{1,12}", wanted) else wanted
    found_step = inside or merger.enter_latest(wanted, _ITERATION, "iteration")
    if not found_step or merger.noted.has("directory-unreadable"):
        merger.note("directory-unknown", "a Megatron directory without any iteration")
        return
    listing = merger.listing
    if {dcp.METADATA, "common.pt"} & listing.files.keys():
        dcp.merge_items(merger)
        if "common.pt" in listing.files:
            merger.read("common.pt", "common")
        return
    # Folders ``mp_rank_TT_PPP``, each with one rank's files.
    ranks: set[tuple[int, ...]] = set()
    for folder in listing.folders:
        match = _RANK.fullmatch(folder)
        if not match:
            continue
        ranks.add(tuple(int(number) for number in match.groups() if number is not None))
        inner = listed(listing.folder, listing.prefix + folder, merger.noted)
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
