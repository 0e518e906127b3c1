"""The file that is written: the mended one as it is, with lost bytes filled, or without the tensors that are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from transload.checkpoint import Checkpoint, Storage
from transload.errors import RescueError
from transload.formats import pickle_machine
from transload.formats.tensors import Place, StorageTable, find_tensors
from transload.formats.torch_legacy import claimed, run_at
from transload.io.sources import Source
from transload.nodes import Call
from transload.rescuing.fates import Fate, Fates
from transload.rescuing.filling import Fill, pattern_of
from transload.rescuing.layout import Item, laid_out
from transload.rescuing.leaving import leave_out
from transload.rescuing.parts import Assembly, Filler, Part, literal

if TYPE_CHECKING:
    from transload.rescuing.mended import Mended

__all__ = ["filled", "is_program", "laid", "left_out", "refuse_growth"]

_PROGRAMS = frozenset({"torchscript", "torch-export", "aotinductor", "torch-package"})
_CHUNK = 1 << 20
_MAX_GROWTH = 1000
_MOST_GROWN = 1 << 30
"""What is lost may be filled to so many times the size of the file, or to this: a kilobyte can claim petabytes."""


def is_program(checkpoint: Checkpoint) -> bool:
    """Whether its tensors belong to a program, out of which none can be taken; or to what is left of one."""
    pickles = [pickle for pickle in checkpoint.pickles if pickle.main]
    scripted = any(name.module.split(".")[0] == "__torch__" for pickle in pickles for name in pickle.globals.values())
    return checkpoint.format in _PROGRAMS or scripted


# -- filled


def filled(mended: Mended, checkpoint: Checkpoint, fill: Fill) -> Source:
    """The same file with a pattern in the place of every byte that is gone."""
    places = sorted(_fillers(mended, checkpoint, fill), key=lambda each: each[0])
    if not mended.items:
        return Assembly(_laid_over(mended.source, places), mended.source.name)
    at = 0
    starts: dict[bytes, int] = {}
    for part, _, item in laid_out(mended.items):
        if item is not None:
            starts.setdefault(item.name, at)
        at += part.length
    return laid(mended, [_item_over(item, starts.get(item.name, 0), places) for item in mended.items])


def laid(mended: Mended, items: Sequence[Item]) -> Source:
    """An archive of these records; the checksums of those that are filled, or have none, are computed now."""
    refuse_growth(sum(item.stored for item in items), mended)
    name = mended.source.name
    return Assembly((part for part, _, _ in laid_out([_summed(item) for item in items])), name)


def refuse_growth(nbytes: int, mended: Mended) -> None:
    """Refuse to fill up what the file only claims to hold."""
    if nbytes > max(_MOST_GROWN, _MAX_GROWTH * mended.nbytes):
        what = f"it claims to hold {nbytes:,} bytes, and has {mended.nbytes:,}"
        raise RescueError(what, where=mended.source.name, fix="What it says of the sizes of its tensors is not true.")


def _summed(item: Item) -> Item:
    if item.crc32 or item.method or not item.stored:
        return item
    return item._replace(crc32=_checksum(Assembly(item.content, "")))


def _fillers(mended: Mended, checkpoint: Checkpoint, fill: Fill) -> Iterator[tuple[int, int, bytes]]:
    """From which byte to which, and with what. An element of which a byte is gone is filled as a whole."""
    dtypes = _dtypes(checkpoint)
    for storage in checkpoint.storages:
        if storage.offset is None:
            continue
        pattern = pattern_of(storage, dtypes.get(storage.id, storage.dtype), fill)
        for gone in mended.gone:
            first = max(gone.start, storage.offset) - storage.offset
            last = min(gone.end, storage.offset + storage.nbytes) - storage.offset
            if first < last:
                yield storage.offset + first - first % len(pattern), storage.offset + last, pattern


def _dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """The dtype that the first tensor sees in a storage: newer files name bytes only."""
    out: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage is not None:
            out.setdefault(tensor.storage, tensor.dtype)
    return out


def _laid_over(source: Source, places: Sequence[tuple[int, int, bytes]]) -> Iterator[Part]:
    at = 0
    for start, end, pattern in places:
        if at <= start < end:
            yield Part(source, at, start - at)
            yield Part(Filler(end - start, pattern), 0, end - start)
            at = end
    yield Part(source, at, source.size - at)


def _item_over(item: Item, start: int, places: Sequence[tuple[int, int, bytes]]) -> Item:
    inside = [(a - start, b - start, pattern) for a, b, pattern in places if a >= start and b <= start + item.stored]
    if not inside:
        return item
    content = tuple(_laid_over(Assembly(item.content, ""), inside))
    return item._replace(content=content, crc32=0)


def _checksum(source: Source) -> int:
    value = 0
    for start in range(0, source.size, _CHUNK):
        value = crc32(source.read(start, _CHUNK), value)
    return value


# -- left out


def left_out(mended: Mended, checkpoint: Checkpoint, fates: Fates, lost: Sequence[Fate]) -> Source:
    """The same file without the tensors that are lost. Of a program the whole tensors, by name, are what is left."""
    if checkpoint.format == "safetensors":
        from transload.rescuing.safetensors import without

        return without(mended.source, checkpoint, {fate.name for fate in lost})
    if is_program(checkpoint):
        from transload.rescuing.weights import weights_of

        names = {fate.name for fate in lost}
        return weights_of(mended.source, checkpoint, [t for t in checkpoint.tensors if t.name not in names])
    pickle = next((pickle for pickle in checkpoint.pickles if pickle.main), None)
    if pickle is None or checkpoint.format not in ("torch-zip", "torch-legacy"):
        what = "tensors cannot be left out of a file of this format"
        raise RescueError(what, where=mended.source.name, fix="Have them filled: --fill zeros.")
    index = _index_without(pickle.root, checkpoint.storages, fates, mended.source.name)
    if checkpoint.format == "torch-legacy":
        return _legacy_without(mended.source, checkpoint, index)
    return _archive_without(mended, index)


def _index_without(root: object, storages: Sequence[Storage], fates: Fates, where: str) -> bytes:
    from transload.formats.pickle_writer import CannotPickleGraphError, dumps

    by_key = {storage.key: storage for storage in storages}

    def locate(key: str, _: int) -> Place:
        storage = by_key.get(key)
        return Place(None, 0) if storage is None else Place(storage.offset, storage.stored, storage.record)

    def is_lost(node: Call) -> bool:
        tree = find_tensors(node, StorageTable(locate))
        return not tree.tensors or any(fates.of(tensor).state == "lost" for tensor in tree.tensors)

    try:
        return dumps(leave_out(root, is_lost))
    except CannotPickleGraphError as error:
        what = f"the index cannot be written without them ({error.what})"
        raise RescueError(what, where=where, fix="Have them filled: --fill zeros.") from error


def _archive_without(mended: Mended, index: bytes) -> Source:
    """The records again, with the new index, and without those nothing needs any more."""
    needed = claimed(pickle_machine.run(index, name="data.pkl"))
    gone = {lost.name for lost in mended.lost}
    items: list[Item] = []
    for item in mended.items:
        below = item.name.partition(b"/")[2].decode("utf-8", "backslashreplace")
        if below == "data.pkl":
            content = (literal(index),)
            items.append(
                item._replace(
                    content=content, size=len(index), stored=len(index), crc32=crc32(index), method=0, flags=0x0808
                )
            )
        elif below in gone and below.startswith(("data/", "tensors/")) and below.partition("/")[2] not in needed:
            continue
        else:
            items.append(item)
    plain = [item._replace(padding=None, before=()) for item in items]
    return laid(mended, plain)


def _legacy_without(source: Source, checkpoint: Checkpoint, index: bytes) -> Source:
    """The stream again, with the new object, the keys it needs, and their storages."""
    from transload.formats.pickle_writer import dumps

    position = 0
    for _ in range(3):
        _, position = run_at(source, position, "")
    needed = claimed(pickle_machine.run(index, name="object"))
    kept = [s for s in checkpoint.storages if s.key in needed and s.offset is not None]
    kept.sort(key=lambda storage: storage.offset or 0)
    keys = dumps([storage.key for storage in kept])
    parts = [Part(source, 0, position), literal(index + keys)]
    parts += [Part(source, (storage.offset or 0) - 8, storage.nbytes + 8) for storage in kept]
    return Assembly(parts, source.name)
