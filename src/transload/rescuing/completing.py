"""Records that an archive needs and lacks: those of storages of which nothing is there."""

from __future__ import annotations

from zlib import crc32

from transload.checkpoint import Checkpoint, Storage
from transload.rescuing.layout import Item, laid_out
from transload.rescuing.mended import Gone, Lost, Mended
from transload.rescuing.output import is_program
from transload.rescuing.parts import Assembly, Filler, Part, literal

__all__ = ["completed", "with_program"]

_NOTHING = b"\x80\x02)."  # an empty tuple
_LOST = "its bytes are not in the file"
_MOST = 1 << 45
"""Bytes that a missing storage may claim to have; one of 32 TB is no storage."""


def completed(mended: Mended, checkpoint: Checkpoint, *, fill: bool) -> Mended | None:
    """The same archive with a record for each storage that has none: only the empty ones, unless they shall be filled.

    ``None`` if there is nothing to add.
    """
    if not mended.items or checkpoint.format != "torch-zip":
        return None
    missing = [s for s in checkpoint.storages if not s.record and s.device != "meta" and s.nbytes < _MOST]
    wanted = [storage for storage in missing if fill or not storage.nbytes]
    if not wanted:
        return None
    lead = _lead(mended)
    order = 1 + max(item.order for item in mended.items)
    added = [_item(lead, storage, order + number) for number, storage in enumerate(wanted)]
    items = (*mended.items, *added)
    names = {item.name for item in added}
    gone = list(mended.gone)
    at = 0
    parts: list[Part] = []
    for part, _, item in laid_out(items):
        parts.append(part)
        if item is not None and item.name in names and part.length:
            gone.append(Gone(at, at + part.length, _LOST))
        at += part.length
    lost = [Lost(item.name.partition(b"/")[2].decode(), _LOST) for item in added if item.stored]
    whole = Assembly(parts, mended.source.name)
    return mended._replace(source=whole, exact=False, items=items, gone=tuple(gone), lost=(*mended.lost, *lost))


def _lead(mended: Mended) -> bytes:
    """The folder of storages."""
    names = [item.name for item in mended.items]
    root = names[0].partition(b"/")[0]
    older = any(name.startswith(root + b"/tensors/") for name in names)
    return root + (b"/tensors/" if older else b"/data/")


def _item(lead: bytes, storage: Storage, order: int) -> Item:
    content = (Part(Filler(storage.nbytes), 0, storage.nbytes),) if storage.nbytes else ()
    flags = 0x0808 if storage.nbytes else 0x0800
    name = lead + storage.key.encode("utf-8", "backslashreplace")
    return Item(name, content, storage.nbytes, storage.nbytes, 0, flags=flags, order=order)


def with_program(mended: Mended, checkpoint: Checkpoint) -> Assembly | None:
    """The tensors of a program of which the code is lost, as the reader of programs reads them, by name."""
    if checkpoint.format != "torch-zip" or not mended.items or not is_program(checkpoint):
        return None
    root = mended.items[0].name.partition(b"/")[0]
    order = 1 + max(item.order for item in mended.items)
    stub = Item(
        root + b"/constants.pkl", (literal(_NOTHING),), len(_NOTHING), len(_NOTHING), crc32(_NOTHING), order=order
    )
    return Assembly((part for part, _, _ in laid_out([*mended.items, stub])), mended.source.name)
