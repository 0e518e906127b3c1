"""What goes into the target and what does not, decided before anything is written; and the notes about it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.casting import FLOATING, is_cast
from transload.converting.leftovers import Dropped, Leftovers
from transload.converting.output import index_name, other_shards
from transload.converting.selection import (
    Named,
    Options,
    Selection,
    TargetContents,
    byte_span,
    module_paths,
    named_format,
    node_below,
    overlapping,
    safetensors_metadata,
    select,
    target_contents,
    with_full_names,
    with_second_names,
)
from transload.converting.to_torch import Layout, Slot, Structure, carried_calls, flat, laid_out, structured
from transload.converting.writers import holds, is_opaque, member_name
from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Tensor
    from transload.converting.output import Job
    from transload.tensors.content import Content

__all__ = ["Plan", "make_plan", "notes"]

_PROGRAMS = frozenset({"torchscript", "torch-export", "aotinductor", "torch-package"})  # only weights are converted
_WITHOUT_OBJECT = frozenset({*_PROGRAMS, "sharded", "dcp"})  # no object of their own that a torch zip could keep


class Plan(NamedTuple):
    """What is written and what is dropped; ``structure`` and ``layout`` are those of a torch zip.

    ``metadata`` is what safetensors files say besides second names.
    """

    format: str
    options: Options
    selection: Selection
    contents: TargetContents
    dropped: tuple[Dropped, ...]
    metadata: dict[str, str]
    structure: Structure | None = None
    layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        entries = self.layout.nbytes if self.layout else sum(entry.nbytes for entry in self.contents.entries)
        return entries + sum(slot.named.tensor.nbytes for slot in self.carried)

    @property
    def carried(self) -> list[Slot]:
        """Tensors that a torch zip takes over by the calls that make them."""
        return [slot for slot in self.structure.slots if slot.call is not None] if self.structure else []


def make_plan(content: Content, format_: str, options: Options) -> Plan:
    """Plan a conversion; ``TransloadError`` if there is nothing to convert."""
    metadata = safetensors_metadata(content)
    checkpoint, metadata = with_second_names(with_full_names(content.checkpoint), metadata)
    selection = select(checkpoint, options)
    if not selection.tensors:
        raise ConvertError("there is no tensor to convert", where=checkpoint.path)
    if format_ == "torch":
        plan = _torch_plan(content, checkpoint, selection, metadata, options)
    else:
        tied = format_ in ("safetensors", "raw")
        contents = target_contents(selection.tensors, content, options, partial(holds, format_), tied=tied)
        if format_ == "npz":
            spelled = [(entry.name, member_name(entry.name)) for entry in contents.entries]
            contents = contents._replace(renamed=(*contents.renamed, *(pair for pair in spelled if pair[0] != pair[1])))
        dropped = _everything(checkpoint, selection, options)
        plan = Plan(format_, options, selection, contents, dropped, metadata)
    if not plan.contents.entries and not plan.carried:
        name, why, _ = plan.contents.omitted[0]
        raise ConvertError(f"{format_} cannot hold any of its tensors: {name}: {why}", where=checkpoint.path)
    return plan


def _torch_plan(
    content: Content, checkpoint: Checkpoint, selection: Selection, metadata: dict[str, str], options: Options
) -> Plan:
    """Plan a torch zip: with the source's own object where it has one that can be kept, else with a dictionary."""
    # 1.0 and "1.0", or huge keys that begin alike, share a path: then no tensor can be found by it.
    paths = frozenset(tensor.path for tensor in checkpoint.tensors)
    distinct = len(paths) == len(checkpoint.tensors)
    calls = carried_calls(checkpoint, selection.tensors) if distinct else {}
    simple = [each for each in selection.tensors if each.tensor.path not in calls]
    contents = target_contents(simple, content, options, partial(holds, "torch"), views=True)
    root, start = _root(checkpoint, selection, options)
    if root is not None and distinct and checkpoint.format not in _WITHOUT_OBJECT and not contents.in_parts:
        names = {entry.name for entry in contents.entries}
        named = tuple(each for each in selection.tensors if each.name in names or each.tensor.path in calls)
        modules = module_paths(checkpoint.tensors)
        structure = structured(root, named, known=paths, modules=modules, start=start, calls=calls)
        kept = len(structure.slots) == len(named)
    else:
        kept = False
    if not kept:
        carried = (each for each in selection.tensors if each.tensor.path in calls)
        structure = flat((*(Named(entry.name, entry.tensor) for entry in contents.entries), *carried), calls)
    dropped = structure.dropped if kept else _everything(checkpoint, selection, options)
    layout = laid_out(structure, content, options.dtype)
    return Plan("torch", options, selection, contents, dropped, metadata, structure, layout)


def _everything(checkpoint: Checkpoint, selection: Selection, options: Options) -> tuple[Dropped, ...]:
    """All of the source's object, or what is below the key; its tensors are kept elsewhere."""
    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    if not options.key and (len(main) > 1 or any(pickle.path for pickle in main)):
        return tuple(  # the object of each file or item, without the table of a DCP directory
            Dropped(pickle.path, pickle.root)
            for pickle in main
            if (pickle.path or checkpoint.format != "dcp")
            and any(leaf.path[: len(pickle.path)] == pickle.path for leaf in checkpoint.leaves)
        )
    root, path = _root(checkpoint, selection, options)
    return () if root is None or checkpoint.format in _PROGRAMS else (Dropped(path, root),)


def _root(checkpoint: Checkpoint, selection: Selection, options: Options) -> tuple[Any, tuple[Any, ...]]:
    """The object that is converted, and its path; ``None`` where there is none."""
    if not options.key:
        return checkpoint.root, ()
    return node_below(checkpoint.root, options.key, [each.tensor.path for each in selection.tensors])


# -- what is in the target in another way than it was

_SHOWN = 20
_MAX_NAME = 200


def notes(checkpoint: Checkpoint, plan: Plan, job: Job, leftovers: Leftovers) -> Iterator[str]:
    """What there is to know besides what was left out, each a sentence."""
    named = named_format(job.dst)
    if named and named != plan.format:
        yield f"it is {plan.format}, although its name says {named}"
    if plan.format == "safetensors":
        index = index_name(job.dst)
        if index not in job.bundle.paths and os.path.lexists(index):
            yield f"the index of other shards still exists, and some loaders prefer it: {index}"
        if others := other_shards(index, job.bundle.paths):
            yield f"other shards of that name still exist: {_some(others)}"
    if checkpoint.format in _PROGRAMS:
        yield "the program itself is not converted, only its weights"
    for prefix in plan.selection.unmatched:
        yield f"no name begins with the prefix {prefix!r}"
    yield from _first(plan.contents.in_parts, "{} is stored as the tensors it consists of")
    yield from _dtype_notes(plan)
    if separated := _separated_views(plan):
        yield f"views that shared memory are separate tensors now: {_some(separated)}"
    if leftovers.odd:
        yield f"named after the printed form of a key that is neither a string nor a number: {_some(leftovers.odd)}"
    if leftovers.versions:
        yield "the module versions that state_dict() records (_metadata) are not kept"


def _dtype_notes(plan: Plan) -> Iterator[str]:
    wanted, dtypes = plan.options.dtype, Counter(entry.dtype for entry in plan.contents.entries)
    kept = [slot.named for slot in plan.carried if is_cast(slot.named.tensor.dtype, wanted)]
    yield from _first([f"{each.name} keeps its dtype: it is {each.tensor.kind}" for each in kept], "{}")
    for dtype, count in sorted(dtypes.items()) if wanted else ():
        if dtype.startswith("float") and dtype not in FLOATING:
            yield f"--dtype does not apply to {dtype} (tensors: {count:,})"
    opaque = sorted(filter(is_opaque, dtypes))
    if plan.format == "npz" and opaque:
        hint = "; --dtype float32 converts bfloat16" if "bfloat16" in opaque else ""
        yield f"numpy has no {' and no '.join(opaque)}: stored as raw bytes{hint}"


def _first(names: Iterable[str], sentence: str) -> Iterator[str]:
    names = list(names)
    yield from (sentence.format(name) for name in names[:_SHOWN])
    if len(names) > _SHOWN:
        yield f"{sentence.format('…')}, and so are {len(names) - _SHOWN:,} more"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:_MAX_NAME] for name in names[:_SHOWN]) + more


def _separated_views(plan: Plan) -> list[str]:
    """Tensors that overlapped in a storage, and are in different places of the target."""
    held: Iterable[tuple[str, Tensor, object]]  # the name, the tensor, and its place in the target
    if plan.structure is None or plan.layout is None:
        held = ((entry.name, entry.tensor, entry.name) for entry in plan.contents.entries)
    else:
        views, slots = plan.layout.views, (slot for slot in plan.structure.slots if slot.call is None)
        held = ((slot.named.name, slot.named.tensor, views[id(slot)].stored.key) for slot in slots)
    by_storage: dict[str, list[tuple[str, Tensor, object]]] = {}
    for each in held:
        if each[1].kind == "strided" and each[1].storage is not None and each[1].numel:
            by_storage.setdefault(each[1].storage, []).append(each)
    separated: list[str] = []
    for sharing in by_storage.values():
        if len(sharing) > 1:
            for group in overlapping((*byte_span(tensor), (name, place)) for name, tensor, place in sharing):
                if len({place for _, _, (_, place) in group}) > 1:
                    separated += [name for _, _, (name, _) in group]
    return separated
