"""What lies around a checkpoint, taken off: compression, and an archive it was put into."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from transload.errors import RescueError
from transload.io.sources import BytesSource, Slice, Source
from transload.rescuing.headers import LOCAL, is_sign
from transload.rescuing.inflated import Inflated
from transload.rescuing.judging import claim_of
from transload.rescuing.legacy import looks_like_a_stream
from transload.rescuing.mending import verdicts
from transload.rescuing.parts import Assembly, patched
from transload.rescuing.placing import Found
from transload.rescuing.survey import survey
from transload.rescuing.unpacking import Spool, most_of, unpacked

__all__ = ["MAX_LAYERS", "peeled"]

MAX_LAYERS = 3
"""A zip in a zip in a gzip is the most that ever was; a hostile file goes on for ever."""

_CHUNK = 1 << 20
_MARKS = (
    b"data.pkl",
    b"constants.pkl",
    b"model.json",
    b"archive_format",
    b"data/0",
    b"tensors/0",
    b"byteorder",
    b"version",
    b".data/extern_modules",
    b".data/python_version",
)
_ENDINGS = (b".pt", b".pth", b".ckpt", b".bin", b".safetensors", b".pt2", b".tar", b".gz", b".zip", b".pkl")


def peeled(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source:
    """What is inside a source, layer by layer; the source itself if there is nothing around it."""
    for _ in range(MAX_LAYERS):
        inner = unpacked(source, stack, notes) or _inside(source, member, stack, notes)
        if inner is None:
            break
        source = inner
    return source


def _inside(source: Source, member: str, stack: ExitStack, notes: list[str]) -> Source | None:
    """The checkpoint in an archive that is none itself."""
    if not is_sign(source.read(0, 4), LOCAL):
        return None
    records = [record for record in survey(source).records if record.names and not record.dead]
    names = [record.names[0] for record in records]
    if any(name == mark or name.endswith(b"/" + mark) for name in names for mark in _MARKS):
        return None
    held = [record for record in records if _is_checkpoint(source, record)]
    if member:
        held = [record for record in held if record.names[0].decode("utf-8", "backslashreplace") == member]
    if not held:
        return None
    if len(held) > 1:
        shown = ", ".join(record.names[0].decode("utf-8", "backslashreplace") for record in held[:8])
        what = f"{len(held)} checkpoints are in it: {shown}"
        raise RescueError(what, where=source.name, fix="Name one of them: --member NAME.")
    notes.append(f"taken out of an archive: {held[0].names[0].decode('utf-8', 'backslashreplace')}")
    return _taken(source, held[0], stack, notes)


def _plain(source: Source, record: Found, changes: Sequence[tuple[int, int]] = ()) -> Source:
    packed: Source = Slice(source, record.payload, record.present, source.name)
    if changes:
        packed = Assembly(patched(source, record.payload, record.present, changes), source.name)
    method = record.line.method if record.line else record.local.method if record.local else 0
    if method != 8:
        return packed
    size = record.line.size if record.line else record.described.size if record.described else 1 << 62
    return Inflated(packed, min(size, 1032 * record.present + 64), source.name)


def _is_checkpoint(source: Source, record: Found) -> bool:
    name = record.names[0]
    if name.startswith(b"__MACOSX/") or name.rpartition(b"/")[2].startswith(b"._"):
        return False
    head = BytesSource(_plain(source, record).read(0, 64))
    if is_sign(head.read(0, 4), LOCAL) or looks_like_a_stream(head):
        return True
    return name.lower().endswith(_ENDINGS) and record.present > 64


def _taken(source: Source, record: Found, stack: ExitStack, notes: list[str]) -> Source:
    """The bytes of a record, with a flipped bit undone. Where it has no checksums inside, its own speaks for them."""
    head = _plain(source, record).read(0, 4)
    if is_sign(head, LOCAL):
        return _unpacked(_plain(source, record), source, stack)
    method = record.line.method if record.line else record.local.method if record.local else 0
    (verdict,) = verdicts(source, [claim_of(record, method, summed=True)])
    changes = [(bit.byte, source.read(bit.byte, 1)[0] ^ 1 << bit.bit) for bit in verdict.bits]
    if verdict.state == "mended":
        notes.append(f"a flipped bit in it was undone, {verdict.certainty} by its checksum: byte {changes[0][0]:,}")
    taken = _unpacked(_plain(source, record, changes), source, stack)
    if verdict.state in ("damaged", "cut") or verdict.certainty == "ambiguous":
        return _Broken(taken)
    return taken


class _Broken(Slice):
    """What was taken out of a record that is not as it was saved."""

    whole = False

    def __init__(self, inner: Source) -> None:
        super().__init__(inner, 0, inner.size, inner.name)


def _unpacked(plain: Source, source: Source, stack: ExitStack) -> Source:
    if not isinstance(plain, Inflated):
        return plain
    spool = Spool(source.name)
    stack.callback(spool.close)
    most = most_of(source)
    while spool.size < most and (data := plain.read(spool.size, _CHUNK)):
        spool.write(data)
    return spool
