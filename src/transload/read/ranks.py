"""Checkpoints of parallel training, one file a rank: DeepSpeed's and Megatron's directories."""

from __future__ import annotations

import re
from itertools import product
from math import prod
from typing import NamedTuple

from transload.checkpoint import Checkpoint
from transload.read.distributed import METADATA, read_dcp_into
from transload.read.noted import Noted, some
from transload.read.parts import Listing, Merger, Readers, inner_name, read_note, try_list, try_read

__all__ = ["is_deepspeed", "is_megatron", "read_deepspeed", "read_megatron"]

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


class _Step(NamedTuple):
    """The folder of one step: where it goes, what it holds, how to read it, and its place below the root."""

    merger: Merger
    listing: Listing
    readers: Readers
    prefix: str

    def read(self, name: str, kind: str) -> None:
        """Read one rank's file."""
        where = self.prefix + name
        checkpoint = try_read(self.listing.join(name), where, self.readers.file, self.merger.noted)
        if checkpoint is None:
            self.merger.lost(where, kind)
        else:
            self.merger.add(where, checkpoint, kind=kind)

    def note(self, code: str, detail: str) -> None:
        """Note a problem with the step."""
        self.merger.noted.add(code, self.prefix.rstrip("/"), detail)


def _open_step(merger: Merger, listing: Listing, readers: Readers, tag: str) -> _Step | None:
    """The folder of that name, or the directory itself for an empty one."""
    here = try_list(listing.join(tag), tag, merger.noted) if tag else listing
    return _Step(merger, here, readers, f"{tag}/" if tag else "") if here is not None else None


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
    return merger.checkpoint(listing.path, "deepspeed", _deepspeed_facts(tag, kinds, listing), _flavour(listing, tag))


def _read_states(step: _Step) -> dict[str, set[int]]:
    """Every rank's file; the ranks found, by kind of file."""
    kinds: dict[str, set[int]] = {}
    for name in step.listing.files:
        kind = _deepspeed_kind(name)
        if kind:
            kinds.setdefault(kind[0], set()).add(int(kind[1].groupdict().get("rank") or kind[1]["model"]))
            step.read(name, kind[0])
    _check_ranks(kinds, step)
    return kinds


def _check_ranks(kinds: dict[str, set[int]], step: _Step) -> None:
    """Gaps among the data-parallel ranks; how many there were is in the model file, if anywhere."""
    claimed = _world_size(step.merger)
    for kind in ("optimizer states", "partitioned model"):
        ranks = kinds.get(kind)
        if ranks:
            world = min(max(claimed, max(ranks) + 1), MAX_RANKS)
            missing = [str(rank) for rank in range(world) if rank not in ranks]
            if missing:
                step.note("rank-missing", f"{kind} of {len(missing):,} of {world:,} ranks: {some(missing, 8)}")


def _world_size(merger: Merger) -> int:
    for leaf in merger.leaves:
        if leaf.path[-1:] == ("dp_world_size",) and leaf.text.isdecimal():
            return int(leaf.text[:6])
    return 0


def _deepspeed_facts(tag: str, kinds: dict[str, set[int]], listing: Listing) -> tuple[tuple[str, str], ...]:
    stage = "3" if "partitioned model" in kinds else "1 or 2" if "optimizer states" in kinds else "0"
    ranks = len(kinds.get("optimizer states") or kinds.get("partitioned model") or kinds.get("model states") or ())
    facts = [("step", tag), ("ZeRO stage", stage), ("ranks found", f"{ranks:,}")]
    if "zero_to_fp32.py" in listing.files:
        facts.append(("script", "zero_to_fp32.py is there to put the weights together; it runs as any program does"))
    return tuple(fact for fact in facts if fact[1])


def _flavour(listing: Listing, tag: str) -> str:
    """Lightning calls the step ``checkpoint``."""
    return "Lightning" if tag == "checkpoint" or "checkpoint" in listing.folders else ""


def read_megatron(listing: Listing, readers: Readers) -> Checkpoint:
    """The newest iteration: every rank's folder, or the distributed checkpoint that newer releases write."""
    merger = Merger(Noted(), named=True)
    inside = METADATA in listing.files or any(MEGATRON_FOLDER.fullmatch(name) for name in listing.folders)
    tag = "" if inside else _newest(listing, _iteration(listing), ITERATION, merger.noted)
    step = _open_step(merger, listing, readers, tag) if tag or inside else None
    facts: tuple[tuple[str, str], ...] = (("iteration", tag),) if tag else ()
    if step is None:
        merger.noted.add("directory-unknown", tag, "a Megatron directory without any iteration")
    elif {METADATA, "common.pt"} & step.listing.files.keys():
        facts += read_dcp_into(merger, step.listing, readers, step.prefix)
        if "common.pt" in step.listing.files:
            step.read("common.pt", "common")
    else:
        facts += _read_grid(step)
    return merger.checkpoint(listing.path, "megatron", facts)


def _iteration(listing: Listing) -> str:
    """The folder that the note names: ``10`` is ``iter_0000010``, ``release`` is itself."""
    text = read_note(listing.join(ITERATION)) if ITERATION in listing.files else ""
    return f"iter_{int(text[:12]):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else text


def _read_grid(step: _Step) -> tuple[tuple[str, str], ...]:
    """Folders ``mp_rank_TT_PPP``, each with one rank's files."""
    ranks: set[tuple[int, ...]] = set()
    for folder in step.listing.folders:
        found = MEGATRON_FOLDER.fullmatch(folder)
        if found:
            ranks.add(tuple(int(number) for number in found.groups() if number is not None))
            _read_folder(step, folder)
    if not ranks:
        step.note("directory-unknown", "no rank's folder is in it")
        return ()
    sizes = tuple(max(rank[axis] for rank in ranks if axis < len(rank)) + 1 for axis in range(max(map(len, ranks))))
    grid = product(*map(range, sizes)) if prod(sizes) <= MAX_RANKS else ()
    missing = [str(rank) for rank in grid if rank not in ranks]
    if missing:
        step.note("rank-missing", f"{len(missing):,} of {prod(sizes):,} ranks: {some(missing, 8)}")
    return (("parallel layout", " × ".join(map(str, sizes))), ("ranks found", f"{len(ranks):,}"))


def _read_folder(step: _Step, folder: str) -> None:
    inner = try_list(step.listing.join(folder), step.prefix + folder, step.merger.noted)
    files = [name for name in inner.files if name.endswith(".pt")] if inner else []
    if inner and not files:
        step.note("part-unreadable", f"{folder} holds no .pt file")
    for name in files:
        step.read(f"{folder}/{name}", "rank")
