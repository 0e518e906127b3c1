"""Megatron directories: a folder for every rank, or the distributed checkpoint that newer releases write."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.findings import join_names
from transload.formats.sets import dcp
from transload.formats.sets.merger import MAX_RANKS, Merger, listed, steps_in
from transload.formats.sets.pieces import (
    Composition,
    MixedError,
    RankFile,
    UnmergedError,
    can_be_joined,
    concatenated,
    entries,
    plain,
)
from transload.io.folder import Listing
from transload.nodes import short

_ITERATION = "latest_checkpointed_iteration.txt"
_CLASSES = ("argparse.Namespace", "megatron.")
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
        merger.ranked = False
        dcp.merge_items(merger)
        if "common.pt" in listing.files:
            dcp.merge_beside(merger, "common.pt", "common")
        merger.values = [value._replace(node=plain(value.node, _CLASSES)) for value in merger.values]
        return
    # Folders ``mp_rank_TT_PPP``, each with one rank's files.
    whole = Composition(merger)
    ranks: dict[tuple[int, ...], list[RankFile]] = {}
    for folder in listing.folders:
        match = _RANK.fullmatch(folder)
        if not match:
            continue
        rank = tuple(int(number) for number in match.groups() if number is not None)
        inner = listed(listing.folder, listing.prefix + folder, merger.noted)
        files = [name for name in inner.files if name.endswith(".pt")]
        if not files and not inner.cut:
            merger.note("part-unreadable", f"{folder} contains no .pt file")
        ranks[rank] = [file for name in files if (file := whole.read(f"{folder}/{name}", "rank")) is not None]
    if not ranks:
        merger.note("directory-unknown", "it contains no rank's folder")
        return
    sizes = tuple(max(rank[axis] for rank in ranks if axis < len(rank)) + 1 for axis in range(max(map(len, ranks))))
    grid = product(*map(range, sizes)) if prod(sizes) <= MAX_RANKS else ()
    missing = [str(rank) for rank in grid if rank not in ranks]
    if missing:
        merger.note("rank-missing", f"{len(missing):,} of {prod(sizes):,} ranks: {join_names(missing, 8)}")
    merger.facts += [("parallel layout", " × ".join(map(str, sizes))), ("ranks found", f"{len(ranks):,}")]
    try:
        _compose(whole, dict(sorted(ranks.items())))
    except UnmergedError as why:
        whole.keep_apart(why, _CLASSES)


# -- the object
#
# How each parameter is cut, from Megatron's tools/checkpoint/loader_base.py and core/transformer/mlp.py
# (https://github.com/NVIDIA/Megatron-LM). Shapes do not show it: slices of a square matrix look the same either way.

_LAYER = re.compile(r"(?:^|(?<=\.))layers\.(\d{1,6})(?=\.)")
_EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d{1,6}(?=\.)"
    r"|(?:(?<=\.experts\.linear_fc[12]\.weight)|(?<=\.experts\.linear_fc[12]\.bias))\d{1,6}$"
)
_QKV = frozenset({"key_value", "linear_kv", "linear_q", "linear_qkv", "query", "query_key_value"})
_GATED = frozenset({"dense_h_to_4h", "linear_fc1"})
_BY_ROWS = _QKV | _GATED | {"output_layer", "word_embeddings"}
_BY_COLUMNS = frozenset({"attention.dense", "dense_4h_to_h", "linear_fc2", "linear_proj", "self_attention.dense"})
_ALIKE = frozenset({"position_embeddings", "router", "tokentype_embeddings"})
_ALIKE_LEAVES = frozenset({"expert_bias", "gate_weight", "inv_freq", "layer_norm_bias", "layer_norm_weight"})
_GATES = ("swiglu", "geglu", "reglu", "quick_geglu", "gated_linear_unit")
_OF_A_RANK = ("optimizer", "rng_state")
_EXTRA = "_extra_state"


def _dimension(name: str) -> int | None:
    """The dimension along which the tensor-parallel ranks have slices of a parameter; -1 if each has all of it.

    ``None`` if that is not known.

    >>> [_dimension(f"decoder.layers.0.{name}.weight") for name in ("mlp.linear_fc1", "mlp.linear_fc2", "norm", "x")]
    [0, 1, -1, None]
    """
    *before, owner, leaf = ("", "", *name.split("."))
    leaf = leaf.rstrip("0123456789")
    owner = f"{before[-1]}.{owner}" if owner == "dense" else owner
    if owner in _BY_ROWS and leaf in ("weight", "bias"):
        return 0
    if owner in _BY_COLUMNS and leaf in ("weight", "bias"):
        return 1 if leaf == "weight" else -1
    return -1 if owner in _ALIKE or leaf in _ALIKE_LEAVES or "norm" in owner else None


class _Run:
    """What the arguments of a run say about its ranks."""

    def __init__(self, whole: Composition, ranks: dict[tuple[int, ...], RankFile]) -> None:
        first = next(iter(ranks.values()))
        self.args = entries(first.root.get("args"))
        if not self.args:
            raise UnmergedError("the files do not have the arguments of the run (args), which say how it was split")
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        self.sizes = self._sizes(first, names)
        for rank, file in ranks.items():
            if self._sizes(file, names) != self.sizes or file.at(("iteration",)) != first.at(("iteration",)):
                raise MixedError(f"rank {rank} is of another iteration, or was split in another way, than the first")
        # A number is in the name of a folder only if there are several: of two, the second may be that of the expert.
        axes = [axis for axis in range(3) if axis == 0 or self.sizes[axis] > 1]
        self.files: dict[tuple[int, ...], RankFile] = {}
        for rank, file in ranks.items():
            if len(rank) != len(axes):
                raise UnmergedError(f"the names of the ranks do not fit the sizes in args ({self.words})")
            self.files[tuple(rank[axes.index(axis)] if axis in axes else 0 for axis in range(3))] = file
        wanted = set(product(*map(range, self.sizes))) if prod(self.sizes) <= MAX_RANKS else set()
        if self.files.keys() != wanted:
            if not whole.merger.noted.has("rank-missing"):
                missing = [str(rank) for rank in sorted(wanted - self.files.keys())]
                whole.merger.note("rank-missing", f"args say {self.words}; there is no {join_names(missing, 8)}")
            raise UnmergedError("not all ranks are there")

    @property
    def words(self) -> str:
        """The sizes of its groups."""
        return "tensor × pipeline × expert parallel: " + " × ".join(map(str, self.sizes))

    def _sizes(self, file: RankFile, names: tuple[str, ...]) -> tuple[int, ...]:
        args = entries(file.root.get("args"))
        sizes = [args.get(name, args.get("model_parallel_size") if name[0] == "t" else None) for name in names]
        return tuple(size if type(size) is int and size > 0 else 1 for size in sizes)

    def layers(self) -> dict[tuple[int, str], int]:
        """The number of the first layer of each chunk of each pipeline stage, by stage and key.

        Layers count from 0 in each chunk. The chunks of all stages follow each other, then the second ones of all.
        """
        counts: dict[tuple[str, int], int] = {}
        for stage in range(self.sizes[1]):
            file = self.files[0, stage, 0]
            for key in (key for key in file.root if re.fullmatch(r"model\d{0,3}", str(key))):
                found = [_LAYER.search(_dotted(path[1:])) for path in file.tensors if path[0] == key]
                numbers = {int(match[1]) for match in found if match}
                if numbers != set(range(len(numbers))):
                    raise UnmergedError(f"the layers of {file.name} are not numbered from 0")
                counts[str(key), stage] = len(numbers)
        total = sum(counts.values())
        if self.sizes[1] > 1 and self.args.get("num_layers") != total:
            raise UnmergedError(f"the stages have {total:,} layers, args say {short(self.args.get('num_layers'))}")
        starts, at = {}, 0
        for chunk, stage in sorted(counts, key=lambda each: (int(each[0][5:] or 0), each[1])):
            starts[stage, chunk] = at
            at += counts[chunk, stage]
        return starts

    def stacks(self, name: str) -> int:
        """How many tensors are stacked in each slice; ``UnmergedError`` if slices do not simply follow each other."""
        owner = name.split(".")[-2]
        if owner in _QKV:
            grouped = self.args.get("group_query_attention")
            groups = self.args.get("num_query_groups" if grouped else "num_attention_heads")
            version = next(iter(self.files.values())).root.get("checkpoint_version")
            if type(version) not in (int, float) or version < 2:  # type: ignore[operator]
                raise UnmergedError("before checkpoint_version 2, queries, keys and values were in another order")
            if type(groups) is not int or groups < 1 or groups % self.sizes[0]:
                raise UnmergedError(f"{short(groups)} groups of queries are split over {self.sizes[0]} ranks")
        return 2 if owner in _GATED and any(self.args.get(gate) is True for gate in _GATES) else 1


def _dotted(steps: tuple[Key, ...]) -> str:
    return ".".join(map(str, steps))


def _compose(whole: Composition, ranks: dict[tuple[int, ...], list[RankFile]]) -> None:
    """Form the object of all ranks; ``UnmergedError`` if the files do not say how."""
    main = {rank: file for rank, files in ranks.items() for file in files if {"model", "model0"} & file.root.keys()}
    if not main:
        raise UnmergedError("no rank has a file with a model")
    run = _Run(whole, main)
    slices: dict[tuple[Key, ...], dict[int, Tensor]] = {}
    left_out: set[str] = set()
    for (stage, key), start in run.layers().items():
        for tensor_rank, expert_rank in product(range(run.sizes[0]), range(run.sizes[2])):
            file = run.files[tensor_rank, stage, expert_rank]
            inside = {path[1:]: tensor for path, tensor in file.tensors.items() if path[0] == key}
            left_out |= {f"{stage}.{name}" for name in entries(file.root[key]) if str(name).endswith(_EXTRA)}
            experts = {int(found[0]) for path in inside if (found := _EXPERT.search(_dotted(path)))}
            for path, tensor in inside.items():
                name = _dotted(path)
                if name.endswith(_EXTRA):
                    continue
                is_expert = ".experts." in f".{name}."
                if is_expert and run.sizes[2] > 1 and not _EXPERT.search(name):
                    raise UnmergedError(f"no rule says how the expert-parallel ranks have {name}")
                if expert_rank and not is_expert:
                    continue
                # Numbers of layers and experts are in one of the keys of a path.
                named = tuple(_renumbered(step, start, expert_rank * len(experts)) for step in path)
                slices.setdefault(named, {}).setdefault(tensor_rank, tensor)
    for path, by_rank in slices.items():
        whole.put(("model", *path), _joined(run, _dotted(path), ("model", *path), [*by_rank.values()]))
    if left_out:
        whole.merger.facts.append(("left out", f"{len(left_out):,} × {_EXTRA}, which means nothing in the whole"))
    first = next(iter(main.values()))
    for entry, node in first.root.items():
        if re.fullmatch(r"model\d{0,3}", str(entry)):
            continue
        if entry in _OF_A_RANK and len(main) > 1:
            for file in main.values():
                whole.put_node((entry, file.name.split("/")[-2]), file, (entry,))
        else:
            whole.put_node((entry,), first, (entry,), plain(node, _CLASSES))
    for files in ranks.values():
        for file in files:
            if not any(file is other for other in main.values()):
                whole.put_node((file.name.split("/")[-1], file.name.split("/")[-2]), file, ())
    whole.finish()


def _renumbered(step: Key, layers: int, experts: int) -> Key:
    """A key of a path with the numbers that a layer and an expert have in the whole."""
    if type(step) is not str:
        return step
    step = _LAYER.sub(lambda match: f"layers.{int(match[1]) + layers}", step, count=1)
    return _EXPERT.sub(lambda match: str(int(match[0]) + experts), step, count=1)


def _joined(run: _Run, name: str, path: tuple[Key, ...], slices: list[Tensor]) -> Tensor:
    """A tensor of which each tensor-parallel rank has a slice, or all."""
    if run.sizes[0] == 1:
        return slices[0]
    dimension = _dimension(name)
    if dimension is None:
        raise UnmergedError(f"no rule says how the tensor-parallel ranks have {name}")
    if dimension < 0:
        return slices[0]
    if run.args.get("expert_tensor_parallel_size") not in (None, run.sizes[0]) and ".experts." in f".{name}.":
        raise UnmergedError("experts are split over another number of tensor-parallel ranks")
    stacks = run.stacks(name)
    odd = any(each.shape[:1] and each.shape[0] % stacks for each in slices)
    if len(slices) != run.sizes[0] or odd or not can_be_joined(slices, dimension):
        raise UnmergedError(f"the slices of {name} do not fit together")
    return concatenated(path, slices, dimension, stacks)
