"""What goes into a target, and what does not: decided before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting import to_npz, to_raw, to_safetensors, to_torch
from transload.converting.entries import Sorted, sorted_out
from transload.converting.names import with_true_names
from transload.converting.selection import Named, Selection, module_paths, select
from transload.converting.ties import metadata_of, with_second_names
from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key
    from transload.converting.structure import Dropped, Slot, Structure
    from transload.converting.wish import Wish
    from transload.tensors import Content

__all__ = ["PROGRAMS", "Plan", "planned"]

PROGRAMS = frozenset({"torchscript", "torch-export", "aotinductor", "torch-package"})
"""Formats of which only the weights are converted."""

_HOLDS: dict[str, Callable[[str], bool]] = {
    "safetensors": to_safetensors.holds,
    "torch": to_torch.holds,
    "npz": to_npz.holds,
    "raw": to_raw.holds,
}


class Plan(NamedTuple):
    """What is written, what is dropped, what a safetensors source said of itself; and how a torch zip is laid out."""

    selection: Selection
    found: Sorted
    dropped: tuple[Dropped, ...]
    metadata: dict[str, str]
    structure: Structure | None = None
    layout: to_torch.Layout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        held = self.layout.nbytes if self.layout else sum(entry.nbytes for entry in self.found.entries)
        return held + sum(slot.named.tensor.nbytes for slot in self.carried)

    @property
    def carried(self) -> list[Slot]:
        """Tensors that are taken over as they are."""
        return [slot for slot in self.structure.slots if slot.call is not None] if self.structure else []


def planned(content: Content, format_: str, wish: Wish) -> Plan:
    """What becomes of a checkpoint; ``TransloadError`` if nothing can."""
    checkpoint, metadata = with_second_names(with_true_names(content.checkpoint), metadata_of(content))
    selection = select(checkpoint, wish)
    if not selection.tensors:
        raise ConvertError("there is no tensor to convert", where=checkpoint.path)
    if format_ == "torch":
        plan = _planned_torch(content, checkpoint, selection, metadata, wish)
    else:
        tied = format_ in ("safetensors", "raw")
        found = sorted_out(selection.tensors, content, wish, _HOLDS[format_], tied=tied)
        if format_ == "npz":
            spelled = [(entry.name, to_npz.member_name(entry.name)) for entry in found.entries]
            found = found._replace(renamed=(*found.renamed, *(pair for pair in spelled if pair[0] != pair[1])))
        plan = Plan(selection, found, _everything(checkpoint, selection, wish), metadata)
    if not plan.found.entries and not plan.carried:
        first = plan.found.left[0]
        raise ConvertError(f"{format_} can hold no tensor of it: {first.name}: {first.why}", where=checkpoint.path)
    return plan


def _planned_torch(
    content: Content, checkpoint: Checkpoint, selection: Selection, metadata: dict[str, str], wish: Wish
) -> Plan:
    """The object of a torch zip: the source's own where it has one, else a dictionary."""
    from transload.converting.carried import carried
    from transload.converting.structure import flat

    kept = _structured(content, checkpoint, selection, wish)
    if kept is not None:
        found, made = kept
        dropped = made.dropped
    else:
        calls = carried(checkpoint, selection.tensors) if _are_told_apart(checkpoint) else {}
        whole = [each for each in selection.tensors if each.tensor.path in calls]
        simple = [each for each in selection.tensors if each.tensor.path not in calls]
        found = sorted_out(simple, content, wish, to_torch.holds, views=True)
        made = flat((*(Named(entry.name, entry.tensor) for entry in found.entries), *whole), calls)
        dropped = _everything(checkpoint, selection, wish)
    return Plan(selection, found, dropped, metadata, made, to_torch.laid_out(made, content, wish.dtype))


def _structured(
    content: Content, checkpoint: Checkpoint, selection: Selection, wish: Wish
) -> tuple[Sorted, Structure] | None:
    """The source's own object, if it has one that can be kept."""
    from transload.converting.carried import carried
    from transload.converting.structure import structured

    root, path = _root(checkpoint, selection, wish)
    if root is None or checkpoint.format in {*PROGRAMS, "sharded", "dcp"}:
        return None
    if not _are_told_apart(checkpoint):
        return None
    calls = carried(checkpoint, selection.tensors)
    simple = [each for each in selection.tensors if each.tensor.path not in calls]
    found = sorted_out(simple, content, wish, to_torch.holds, views=True)
    held = {entry.name for entry in found.entries}
    named = tuple(each for each in selection.tensors if each.name in held or each.tensor.path in calls)
    paths, modules = frozenset(tensor.path for tensor in checkpoint.tensors), module_paths(checkpoint.tensors)
    made = structured(root, named, known=paths, modules=modules, start=path, calls=calls)
    return (found, made) if len(made.slots) == len(named) and not found.in_parts else None


def _are_told_apart(checkpoint: Checkpoint) -> bool:
    """Whether each tensor has a path of its own: ``1.0`` and ``"1.0"``, or huge keys that begin alike, share one."""
    return len({tensor.path for tensor in checkpoint.tensors}) == len(checkpoint.tensors)


def _everything(checkpoint: Checkpoint, selection: Selection, wish: Wish) -> tuple[Dropped, ...]:
    """All of the source's object, or what is below the key: its tensors are kept, the rest is looked through."""
    from transload.converting.structure import Dropped

    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    if not wish.key and (len(main) > 1 or any(pickle.path for pickle in main)):
        return tuple(Dropped(path, root) for path, root in _items(checkpoint))
    root, path = _root(checkpoint, selection, wish)
    return () if root is None or checkpoint.format in PROGRAMS else (Dropped(path, root),)


def _items(checkpoint: Checkpoint) -> Iterator[tuple[tuple[Key, ...], object]]:
    """The object of each file, or item, of a checkpoint of many, with its path; without the table of the container."""
    for pickle in checkpoint.pickles:
        steps = len(pickle.path)
        values = any(leaf.path[:steps] == pickle.path for leaf in checkpoint.leaves)
        if pickle.main and values and (steps or checkpoint.format != "dcp"):
            yield pickle.path, pickle.root


def _root(checkpoint: Checkpoint, selection: Selection, wish: Wish) -> tuple[Any, tuple[Any, ...]]:
    """The object that is converted, and its path; ``None`` where there is none."""
    from transload.converting.below import below

    if not wish.key:
        return checkpoint.root, ()
    return below(checkpoint.root, wish.key, [each.tensor.path for each in selection.tensors])
