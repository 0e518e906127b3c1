"""Lists in full: every tensor, every global, every part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.escape import printable
from transload.render.lines import Block, Line, Prose, Table, heading, note
from transload.render.sizes import count, shape_text, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.checkpoint import Checkpoint, GlobalUse, Storage, Tensor

__all__ = ["globals_by_verdict", "parts", "tensors_listed"]

_PARTS = 40

# Worst first: that is what one looks for.
_VERDICTS: dict[str, tuple[str, str]] = {
    "dangerous": ("bad", "runs code of the file's choosing"),
    "unknown": ("trust", "not part of plain checkpoints: what it does depends on who made it"),
    "harmless": ("trust", "known and harmless, but torch does not load it by default"),
    "data": ("good", "part of plain checkpoints"),
}


def tensors_listed(checkpoint: Checkpoint) -> Iterator[Block]:
    """One line a tensor: name, dtype, shape, device, bytes, storage, and what is special about it."""
    yield from heading("tensors", count(len(checkpoint.tensors)))
    storages = {storage.id: storage for storage in checkpoint.storages}
    rows = [_tensor_row(tensor, storages.get(tensor.storage or "")) for tensor in checkpoint.tensors]
    yield Table(rows, right=frozenset({4}), drops=(5, 6, 3))


def _tensor_row(tensor: Tensor, storage: Storage | None) -> tuple[Line, ...]:
    where = f"storage {printable(tensor.storage, 40)}" if tensor.storage is not None else ""
    return (
        ((printable(tensor.name, None) or '""', ""),),
        ((printable(tensor.dtype, 40), "dim"),),
        ((shape_text(tensor.shape), ""),),
        ((printable(tensor.device, 40), "dim"),),
        ((size(tensor.nbytes), ""),),
        ((where, "dim"),),
        ((", ".join(_flags(tensor, storage)), "dim"),),
    )


def _flags(tensor: Tensor, storage: Storage | None) -> Iterator[str]:
    if tensor.kind != "strided":
        yield printable(tensor.kind, 40)
    if tensor.cls:
        yield printable(tensor.cls, 60)
    if tensor.requires_grad:
        yield "requires_grad"
    if storage is not None and len(storage.tensors) > 1:
        yield "shared"
    if storage is not None and storage.stored < storage.nbytes and not storage.compressed:
        yield "incomplete"


def globals_by_verdict(checkpoint: Checkpoint) -> Iterator[Block]:
    """The names the file asks a loader to import, the worst first."""
    yield from heading("globals", count(len(checkpoint.globals)))
    if not checkpoint.globals:
        yield note("it asks for nothing to be imported")
    for verdict, (role, words) in _VERDICTS.items():
        uses = [use for use in checkpoint.globals if use.verdict == verdict]
        if uses:
            yield Prose(((verdict, role), (f": {words}", "dim")), lead=(("  ", ""),))
            yield Table([_global_row(use) for use in uses], indent=4, shrinks=(2, 0), drops=(3,))


def _global_row(use: GlobalUse) -> tuple[Line, ...]:
    spelled = f" (written {printable(use.spelling)})" if use.spelling else ""
    verb, number = next(((v, n) for v, n in (("called", use.called), ("built", use.built)) if n), ("imported", 1))
    times = f"{verb} {count(number)}×" if number > 1 else verb
    return (
        ((printable(use.full_name), ""), (spelled, "dim")),
        ((times, "dim"),),
        ((printable(use.purpose), "dim"),),
        ((printable(use.stream, 40), "dim"),),
    )


def parts(checkpoint: Checkpoint) -> Iterator[Block]:
    """The files of a directory, or the pieces of a package."""
    if not checkpoint.parts:
        return
    yield from heading("parts", count(len(checkpoint.parts)))
    rows: list[tuple[Line, ...]] = []
    for part in checkpoint.parts[:_PARTS]:
        facts = ", ".join(f"{name} {value}" for name, value in part.facts)
        name: Line = ((printable(part.name), ""),)
        rows.append((name, ((printable(part.kind), "dim"),), ((size(part.nbytes), ""),), ((printable(facts), "dim"),)))
    yield Table(rows, right=frozenset({2}), drops=(3, 1))
    if len(checkpoint.parts) > _PARTS:
        yield note(f"… and {len(checkpoint.parts) - _PARTS:,} more")
