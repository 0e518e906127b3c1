"""Each record of a damaged archive: its name, how it is packed, and whether its bytes are those that were saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from transload.io.sources import Source
from transload.rescuing.mending import Claim, Verdict, verdicts
from transload.rescuing.names import Knowledge, chosen_names
from transload.rescuing.placing import Found
from transload.rescuing.survey import Survey

__all__ = ["Judged", "are_summed", "claim_of", "judged_records"]

_MOST_SEARCHED = 1 << 30
_LARGEST_TEXT = 8 << 20
_DEFLATE = 1032  # no compressed byte unpacks to more
_FOLLOWS = 8  # the flag that says that checksum and sizes follow the bytes
_DESCRIPTOR = 24  # bytes of one, at most
_ALIGNMENT = 64
_FLIPPED = 2  # bits in which two copies of a checksum may differ


class Judged(NamedTuple):
    """A record, what it is called, and what became of it."""

    found: Found
    name: bytes
    method: int
    verdict: Verdict
    settled: bool = True
    """Whether the name is the right one of two for a reason that the file gives."""

    @property
    def text(self) -> str:
        """Its name without the folder."""
        return self.name.partition(b"/")[2].decode("utf-8", "backslashreplace") or self.name.decode(
            "utf-8", "backslashreplace"
        )

    @property
    def usable(self) -> bool:
        """Whether its bytes are those that were saved, as far as can be told."""
        return self.verdict.state in ("whole", "mended", "unchecked")


def judged_records(source: Source, found: Survey) -> list[Judged]:
    """A verdict on every record that is not dead, in the order they lie in."""
    records = [record for record in found.records if not record.dead]
    knowledge = Knowledge(lambda: found.measure.slots, _Texts(source, records).occurs)
    chosen = chosen_names([record.names for record in records], knowledge)
    unsettled = {each.name for each in chosen if not each.settled}
    records, names = _last_of_each(records, [each.name for each in chosen])
    methods = [_method(record) for record in records]
    summed = are_summed(records)
    claims = [claim_of(record, method, summed=summed) for record, method in zip(records, methods, strict=True)]
    made = [_other_size(source, *each) for each in zip(records, claims, verdicts(source, claims), strict=True)]
    made = [_vouched(source, *each) for each in zip(records, made, strict=True)]
    fitted = [_fitted(source, found, *each) for each in zip(records, names, made, strict=True)]
    records, made = [record for record, _ in fitted], [verdict for _, verdict in fitted]
    settled = [name not in unsettled for name in names]
    return [Judged(*each) for each in zip(records, names, methods, made, settled, strict=True)]


def _last_of_each(records: list[Found], names: list[bytes]) -> tuple[list[Found], list[bytes]]:
    """Of records of one name the last: an index that was written anew lies behind the old one."""
    last = {name: index for index, name in enumerate(names)}
    kept = [index for index, name in enumerate(names) if last[name] == index]
    return [records[index] for index in kept], [names[index] for index in kept]


class _Texts:
    """The records that are small enough to be texts, searched for words; a hostile file has a million odd names."""

    def __init__(self, source: Source, records: Sequence[Found]) -> None:
        self._source, self._records = source, records
        self._left = _MOST_SEARCHED
        self._known: dict[bytes, bool] = {}

    def occurs(self, word: bytes) -> bool:
        """Whether a word is in one of them."""
        if word not in self._known:
            self._known[word] = len(word) > 1 and self._search(word)
        return self._known[word]

    def _search(self, word: bytes) -> bool:
        for record in self._records:
            if record.present <= _LARGEST_TEXT and self._left > 0:
                self._left -= record.present + 1000
                if word in self._source.read(record.payload, record.present):
                    return True
        return False


def are_summed(records: Sequence[Found]) -> bool:
    """Whether an archive has checksums: torch can be told to write none, and zeros are in their place."""
    told = [value for record in records if record.stored for value in _checksums(record)]
    return 2 * sum(map(bool, told)) > len(told)


def _method(record: Found) -> int:
    told = {each.method for each in (record.local, record.line) if each is not None}
    if len(told) == 1:
        return told.pop()
    sizes = {(each.stored == each.size) for each in (record.line, record.described) if each is not None}
    return 0 if sizes == {True} or 8 not in told else 8


def _checksums(record: Found) -> tuple[int, ...]:
    """The copies of its checksum: in the directory, behind its bytes, and in its header if that has one.

    What lies by its bytes moves with them: where it is another one altogether, and the line of the directory is right
    about everything else, these are the bytes of another record. An index may be so, too, if it was being edited.
    """
    line, described, local = record.line, record.described, record.local
    told = [each.crc32 for each in (line, described) if each is not None]
    if local is not None and local.crc32 and not local.flags & _FOLLOWS:
        told.append(local.crc32)
    if line is None or described is None or line.name.endswith(b".pkl") or not line.crc32:
        return tuple(told)
    sized = (line.stored, line.size) == (described.stored, described.size)
    renamed = local is not None and local.name != line.name
    moved = (line.crc32 ^ described.crc32).bit_count() > _FLIPPED
    return (line.crc32,) if moved and (sized or renamed) else tuple(told)


def claim_of(record: Found, method: int, *, summed: bool) -> Claim:
    """What is said of the bytes of a record; ``summed`` is whether its checksums mean something."""
    sizes = [each.size for each in (record.line, record.described, record.local) if each is not None and each.size]
    size = record.stored
    if method:
        size = min(Counter(sizes).most_common(1)[0][0] if sizes else 0, _DEFLATE * record.stored + 64)
    checksums = _checksums(record) if summed and record.stored else ()
    return Claim(record.payload, record.stored, record.present, size, method, checksums)


def _vouched(source: Source, record: Found, verdict: Verdict) -> Verdict:
    """The verdict; on a record without a checksum, only if what must follow its bytes does, or the file ends before.

    Else that was overwritten, or lies elsewhere; and so may the bytes.
    """
    told = record.described or (record.local and not record.local.flags & _FOLLOWS)
    if verdict.state == "unchecked" and record.stored and not told and record.end + _DESCRIPTOR < source.size:
        return Verdict("damaged")
    return verdict


def _fitted(source: Source, found: Survey, record: Found, name: bytes, verdict: Verdict) -> tuple[Found, Verdict]:
    """A storage that no checksum vouches for, as long as the index says.

    One that has none, and is not so long or not where its header ends, is damaged: bytes were put in or taken out.
    """
    folder, _, key = name.decode("utf-8", "backslashreplace").rpartition("/")
    if verdict.state in ("whole", "mended") or record.endless or not folder.endswith(("/data", "/tensors")):
        return record, verdict
    slot = found.measure.slots.get(key)
    placed = record.payload % _ALIGNMENT == 0 or (record.local is not None and record.local.payload == record.payload)
    if slot is None or (placed and slot.nbytes == record.stored):
        return record, verdict
    present = max(0, min(slot.nbytes, source.size - record.payload))
    return record._replace(stored=slot.nbytes, present=present), Verdict("damaged")


def _other_size(source: Source, record: Found, claim: Claim, verdict: Verdict) -> Verdict:
    """The verdict on a compressed record, if need be with the other one of the sizes that are given for it."""
    if verdict.state != "damaged" or not claim.method:
        return verdict
    for size in {each.size for each in (record.line, record.described) if each is not None} - {claim.size}:
        again = verdicts(source, [claim._replace(size=min(size, _DEFLATE * record.stored + 64))])[0]
        if again.state == "whole":
            return again
    return verdict
