"""What is to be said of a conversion beside what was left out: what is in the target in another way than it was."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from transload.converting import to_npz, to_safetensors
from transload.converting.casting import FLOATING, is_cast
from transload.converting.old_set import other_shards
from transload.converting.planning import PROGRAMS, Plan
from transload.converting.wish import named_format
from transload.dtypes import itemsize

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Tensor
    from transload.converting.job import Job
    from transload.converting.rest import Rest
    from transload.converting.wish import Wish

__all__ = ["notes_of"]

_SHOWN = 20
_Held = tuple[str, "Tensor", object]  # the name, the tensor, and what tells where its numbers are in the target


def notes_of(checkpoint: Checkpoint, format_: str, plan: Plan, job: Job, rest: Rest) -> Iterator[str]:
    """The notes, each a sentence."""
    yield from _beside(format_, job)
    if checkpoint.format in PROGRAMS:
        yield "the program itself is not converted, only its weights"
    for prefix in plan.selection.unmatched:
        yield f"no name begins with {prefix!r}, which was to be taken off"
    yield from _first(plan.found.in_parts, "{} is kept as the tensors it is made of")
    yield from _dtypes(format_, plan, job.wish)
    apart = _parted(_held(plan))
    if apart:
        yield f"views that overlap in memory, and have numbers of their own now: {_some(apart)}"
    if rest.odd:
        yield f"named by how its key looks, which is neither text nor number: {_some(rest.odd)}"
    if rest.versions:
        yield "the versions of its modules, which state_dict() records (_metadata), are not kept"


def _beside(format_: str, job: Job) -> Iterator[str]:
    """What others may take the target for, or find beside it."""
    named = named_format(job.dst)
    if named and named != format_:
        yield f"it is {format_}, though its name is that of {named}"
    if format_ != "safetensors":
        return
    index = to_safetensors.index_name(job.dst)
    if index not in job.bundle.paths and os.path.lexists(index):
        yield f"the index of other shards is still there, which some loaders prefer: {index}"
    if others := other_shards(index, job.bundle.paths):
        yield f"other shards of that name are still there: {_some(others)}"


def _dtypes(format_: str, plan: Plan, wish: Wish) -> Iterator[str]:
    kept = [slot.named for slot in plan.carried if is_cast(slot.named.tensor.dtype, wish.dtype)]
    yield from _first([f"{each.name} keeps its dtype: it is {each.tensor.kind}" for each in kept], "{}")
    if wish.dtype:
        small = Counter(entry.dtype for entry in plan.found.entries if _is_small(entry.dtype))
        yield from (f"--dtype is not for {dtype}: {count:,} of them stay" for dtype, count in sorted(small.items()))
    opaque = sorted({entry.dtype for entry in plan.found.entries if to_npz.is_opaque(entry.dtype)})
    if format_ == "npz" and opaque:
        hint = "; --dtype float32 makes numbers of bfloat16" if "bfloat16" in opaque else ""
        yield f"numpy has no {' and no '.join(opaque)}: kept as raw bytes{hint}"


def _is_small(dtype: str) -> bool:
    return dtype.startswith("float") and dtype not in FLOATING


def _first(found: Iterable[str], sentence: str) -> Iterator[str]:
    told = list(found)
    yield from (sentence.format(each) for each in told[:_SHOWN])
    if len(told) > _SHOWN:
        yield f"{sentence.format('…')}, and so are {len(told) - _SHOWN:,} more"


def _some(names: Iterable[str]) -> str:
    told = list(names)
    more = f" and {len(told) - _SHOWN:,} more" if len(told) > _SHOWN else ""
    return ", ".join(name[:_LONGEST] for name in told[:_SHOWN]) + more


_LONGEST = 200


# -- views that are no views of each other any more


def _held(plan: Plan) -> Iterator[_Held]:
    if plan.structure is None or plan.layout is None:
        yield from ((entry.name, entry.tensor, entry.name) for entry in plan.found.entries)
        return
    for slot in plan.structure.slots:
        if slot.call is None:
            yield slot.named.name, slot.named.tensor, plan.layout.views[id(slot)].stored.key


def _parted(held: Iterable[_Held]) -> list[str]:
    """Tensors that reached into the same part of a storage, and are held in different places."""
    by_storage: dict[str, list[_Held]] = {}
    for each in held:
        if each[1].kind == "strided" and each[1].storage is not None and each[1].numel:
            by_storage.setdefault(each[1].storage, []).append(each)
    found: list[str] = []
    for sharing in by_storage.values():
        if len(sharing) > 1:
            for cluster in _clusters(sharing):
                if len({place for _, _, place in cluster}) > 1:
                    found += [name for name, _, _ in cluster]
    return found


def _clusters(sharing: list[_Held]) -> Iterator[list[_Held]]:
    spans = sorted(((*_reach(each[1]), at) for at, each in enumerate(sharing)), key=lambda span: span[:2])
    cluster: list[_Held] = []
    reached = 0
    for low, high, at in spans:
        if low >= reached and cluster:
            yield cluster
            cluster = []
        cluster.append(sharing[at])
        reached = max(reached, high)
    yield cluster


def _reach(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to the last that a tensor looks at."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return itemsize(tensor.dtype, tensor.offset), itemsize(tensor.dtype, tensor.offset + last + 1)
