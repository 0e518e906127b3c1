"""A damaged safetensors file: its table comes first, so what is before a cut is all there. It has no checksum."""

from __future__ import annotations

import json
from collections.abc import Container

from transload.checkpoint import Checkpoint
from transload.formats.safetensors import MAX_COUNT, MAX_HEADER, PREFIX
from transload.io.sources import Source
from transload.rescuing.mended import Gone, Mend, Mended
from transload.rescuing.parts import Assembly, Filler, Part, literal, patched

__all__ = ["recover_safetensors", "without"]


def recover_safetensors(source: Source) -> Mended | None:
    """The file as it shall be; ``None`` if its table is not all there."""
    length = _length(source)
    if length is None:
        return None
    right = length.to_bytes(PREFIX, "little")
    here = source.read(0, PREFIX)
    mends = [
        Mend(at, old, new, "", "proven") for at, (old, new) in enumerate(zip(here, right, strict=True)) if old != new
    ]
    changes = [(mend.position, mend.new) for mend in mends]
    end = PREFIX + length + _data_size(json.loads(source.read(PREFIX, length)))
    parts = list(patched(source, 0, min(end, source.size), changes))
    gone: tuple[Gone, ...] = ()
    if end > source.size:
        parts.append(Part(Filler(end - source.size), 0, end - source.size))
        gone = (Gone(source.size, end, "the file ends before its last byte"),)
    made = Mended(Assembly(parts, source.name), not gone, gone, tuple(mends), all_unchecked=True)
    if source.size <= end:
        return made
    notes = (f"{source.size - end:,} bytes after the last tensor are left out",)
    return made._replace(
        notes=notes, warnings=("it is longer than its table says: unless that is at its end, tensors are wrong",)
    )


def _data_size(table: dict[str, object]) -> int:
    """Where the last tensor ends, as far as the table makes sense."""
    most = 0
    for entry in table.values():
        match entry:
            case {"data_offsets": [int() as begin, int() as end]} if 0 <= begin <= end < MAX_COUNT:
                most = max(most, end)
    return most


def _length(source: Source) -> int | None:
    """The length of the table: what the file says, or where the table really ends."""
    stated = int.from_bytes(source.read(0, PREFIX), "little")
    if 1 < stated <= min(MAX_HEADER, source.size - PREFIX) and _is_table(source.read(PREFIX, stated)):
        return stated
    head = source.read(PREFIX, min(MAX_HEADER, source.size - PREFIX))
    text = head.decode("latin-1")  # one character for each byte; the table itself is read again as what it is
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    length = end + len(text[end:]) - len(text[end:].lstrip(" "))
    return length if _is_table(head[:length]) and (stated ^ length).bit_count() <= 2 else None


def _is_table(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def without(source: Source, checkpoint: Checkpoint, lost: Container[str]) -> Source:
    """The same file without some of its tensors."""
    length = int.from_bytes(source.read(0, PREFIX), "little")
    table = json.loads(source.read(PREFIX, length))
    storages = {storage.id: storage for storage in checkpoint.storages}
    kept: dict[str, object] = {"__metadata__": table["__metadata__"]} if "__metadata__" in table else {}
    parts: list[Part] = []
    at = 0
    for tensor in checkpoint.tensors:
        storage = storages.get(tensor.storage or "")
        if tensor.name in lost or tensor.name not in table or storage is None or storage.offset is None:
            continue
        begin, end = storage.offset - PREFIX - length, storage.offset - PREFIX - length + storage.nbytes
        kept[tensor.name] = {**table[tensor.name], "data_offsets": [at, at + end - begin]}
        parts.append(Part(source, PREFIX + length + begin, end - begin))
        at += end - begin
    header = json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return Assembly([literal(len(header).to_bytes(PREFIX, "little") + header), *parts], source.name)
