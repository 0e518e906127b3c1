"""DeepSpeed directories: the files of every rank, in the folder of a step."""

from __future__ import annotations

import re

from transload.checkpoint import Checkpoint
from transload.findings import join_names
from transload.formats.sets.merger import MAX_RANKS, STEP, Merger, steps_in
from transload.io.folder import Listing, relative_path

_LATEST = "latest"
# The names that deepspeed/utils/zero_to_fp32.py (https://github.com/deepspeedai/DeepSpeed) looks for. The number is the
# data-parallel rank in the first two, the tensor-parallel rank in the others.
_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer states", re.compile(r"(?:\w+_)?zero_pp_rank_(\d{1,6})_mp_rank_\d{1,6}_optim_states\.pt")),
    ("partitioned model", re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_\d{1,6}_model_states\.pt")),
    ("model states", re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")),
    ("expert", re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d{1,6})_(?:model|optim)_states\.pt")),
    ("layer", re.compile(r"layer_\d+-model_(\d{1,6})-model_states\.pt")),
)


def matches(listing: Listing) -> bool:
    """Whether a folder has DeepSpeed's script, its files, or those of its steps."""
    if "zero_to_fp32.py" in listing.files or steps_in(listing, "global_step") or _ranks(listing):
        return True
    # Not every file `latest` is DeepSpeed's.
    tag = listing.text(_LATEST)
    return bool(STEP.fullmatch(tag)) or relative_path(tag) in listing.folders


def _ranks(listing: Listing) -> list[tuple[str, str, int]]:
    """DeepSpeed's files in a folder: the name, the kind and the rank of each."""
    matches = ((name, kind, form.fullmatch(name)) for name in listing.files for kind, form in _FILES)
    return [(name, kind, int(match[1])) for name, kind, match in matches if match]


def read(merger: Merger) -> Checkpoint:
    """Merge the files of every rank from the latest step, and note missing ranks."""
    merger.format, merger.ranked = "deepspeed", True
    top = merger.listing
    tag = "" if _ranks(top) else merger.enter_latest(top.text(_LATEST), _LATEST, "step")
    kinds: dict[str, set[int]] = {}
    for name, kind, rank in _ranks(merger.listing):
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
    ranks = kinds.get("optimizer states") or kinds.get("partitioned model") or kinds.get("model states", set())
    merger.facts += [("ZeRO stage", stage), ("ranks found", f"{len(ranks):,}")]
    if "zero_to_fp32.py" in top.files:
        script = "zero_to_fp32.py joins the weights, and can do anything"
        merger.facts.append(("script", script))
    if tag == "checkpoint" or "checkpoint" in top.folders:  # what Lightning calls the step
        merger.flavour = "Lightning"
    return merger.merged()
