"""A damaged legacy stream: its pickles come first, so what is before a cut is all there.

There is no checksum in it. What can be put right is what is there twice: the number at its beginning, which is always
the same, and the count before each storage, which the object names, too. A count that is not where it should be tells
that bytes were put in or taken out before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from transload.dtypes import ITEMSIZE
from transload.formats.tensors import Slot
from transload.formats.torch_legacy import claimed, run_at
from transload.io.sources import Source
from transload.nodes import Pickle
from transload.rescuing.mended import Gone, Mend, Mended
from transload.rescuing.parts import Assembly, Filler, Part, patched

__all__ = ["looks_like_a_stream", "recover_legacy"]

_OPENING = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
"""The magic number and the version of the protocol, as torch has always written them."""

_FLIPPED = 2  # bits in which the opening may differ
_STAGES = 5
_COUNT = 8


def looks_like_a_stream(source: Source) -> bool:
    """Whether a source begins like a legacy stream, but for a bit or two."""
    return _distance(source.read(0, len(_OPENING)), _OPENING) <= _FLIPPED


def _distance(one: bytes, other: bytes) -> int:
    """Bits that differ; many if one is shorter."""
    if len(one) != len(other):
        return 8 * len(other)
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()


def recover_legacy(source: Source) -> Mended | None:
    """The stream as it shall be; ``None`` if its pickles are not all there."""
    opening = _opened(source)
    view = Assembly(patched(source, 0, source.size, [(mend.position, mend.new) for mend in opening]), source.name)
    pickles, position = _pickles(view)
    if len(pickles) < _STAGES or pickles[-1].broken:
        return None
    keys = _keys(pickles[4].root)
    slots = claimed(pickles[3])
    if any(key not in slots for key in keys):
        return None
    end = position + sum(_COUNT + slots[key].nbytes for key in keys)
    held = [slots[key] for key in keys]
    mends = [*opening, *_counts(view, position, held)]
    parts = list(patched(source, 0, min(end, source.size), [(mend.position, mend.new) for mend in mends]))
    gone = list(_displaced(view, position, held, steady=end == source.size))
    if end > source.size:
        parts += _missing(source.size, position, held)
        gone.append(Gone(source.size, end, "the file ends before its last byte"))
    notes, warnings = _behind(source, end)
    made = Mended(Assembly(parts, source.name), not gone, tuple(gone), tuple(mends), notes=notes, all_unchecked=True)
    return made._replace(warnings=warnings)


def _behind(source: Source, end: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is to be said of bytes after the last storage, and what is not sure for their sake."""
    if source.size <= end:
        return (), ()
    notes = (f"{source.size - end:,} bytes after the last storage are left out",)
    follows = source.read(end, len(_OPENING)) == _OPENING  # another stream: whole ones end where they should
    return notes, () if follows else (
        "it is longer than its counts say: unless that is at its end, the last storage is wrong",
    )


def _opened(source: Source) -> list[Mend]:
    here = source.read(0, len(_OPENING))
    if _distance(here, _OPENING) > _FLIPPED:
        return []
    pairs = zip(here, _OPENING, strict=True)
    return [Mend(at, old, new, "", "proven") for at, (old, new) in enumerate(pairs) if old != new]


def _pickles(view: Source) -> tuple[list[Pickle], int]:
    pickles: list[Pickle] = []
    position = 0
    for stage in range(_STAGES):
        pickle, position = run_at(view, position, f"part {stage + 1}")
        pickles.append(pickle)
        if pickle.broken:
            break
    return pickles, position


def _keys(root: object) -> list[str]:
    if type(root) is not list:
        return []
    return [key.decode("latin-1") if type(key) is bytes else str(key) for key in root if type(key) in (str, bytes, int)]


def _count(slot: Slot) -> bytes:
    return (slot.nbytes // ITEMSIZE[slot.dtype]).to_bytes(_COUNT, "little")


def _counts(view: Source, position: int, slots: list[Slot]) -> Iterator[Mend]:
    """The counts that do not say what the object says."""
    for slot in slots:
        here, right = view.read(position, _COUNT), _count(slot)
        if here != right:
            for index, (old, new) in enumerate(zip(here, right, strict=False)):
                if old != new:
                    yield Mend(position + index, old, new, "", "proven")
        position += _COUNT + slot.nbytes


def _displaced(view: Source, position: int, slots: list[Slot], *, steady: bool) -> Iterator[Gone]:
    """Storages that do not lie between two counts that are right.

    In a ``steady`` file, as long as it should be, only these were overwritten, and a bit or two of a count may be
    others; else all that follows is displaced.
    """
    most = _FLIPPED if steady else 0
    starts: list[int] = []
    right: list[bool] = []
    for slot in slots:
        here = view.read(position, _COUNT)
        starts.append(position + _COUNT)
        right.append(len(here) < _COUNT or _distance(here, _count(slot)) <= most)
        position += _COUNT + slot.nbytes
    lost = False
    for index, slot in enumerate(slots):
        hurt = not all(right[index : index + 2])
        lost = hurt or (lost and not steady)
        end = min(starts[index] + slot.nbytes, view.size)
        if lost and starts[index] < end:
            yield Gone(starts[index], end, "its bytes are not where they should be")


def _missing(size: int, position: int, slots: list[Slot]) -> Iterator[Part]:
    """What comes after the end of the file: counts as they must be, and zeros."""
    from transload.rescuing.parts import literal

    for slot in slots:
        start = position + _COUNT
        if position + _COUNT > size:
            known = _count(slot)[max(0, size - position) :]
            yield literal(known)
        lack = start + slot.nbytes - max(size, start)
        if lack > 0:
            yield Part(Filler(lack), 0, lack)
        position = start + slot.nbytes
