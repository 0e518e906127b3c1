"""Each record of a damaged archive: its name, how it is packed, and whether its bytes are those that were saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from transload.read.source import Source
from transload.rescuing.mending import Claim, Verdict, verdicts
from transload.rescuing.names import Knowledge, chosen_names
from transload.rescuing.placing import Found
from transload.rescuing.survey import Survey

__all__ = ["Judged", "are_summed", "judged_records"]

_MOST_SEARCHED = 1 << 30
_LARGEST_TEXT = 8 << 20
_DEFLATE = 1032  # no compressed byte unpacks to more


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
    claims = [_claim(record, method, summed=summed) for record, method in zip(records, methods, strict=True)]
    made = [_other_size(source, *each) for each in zip(records, claims, verdicts(source, claims), strict=True)]
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
    """The copies of its checksum: in the directory, behind its bytes, and in its header if that has one."""
    told = [each.crc32 for each in (record.line, record.described) if each is not None]
    if record.local is not None and record.local.crc32 and not record.local.flags & 8:
        told.append(record.local.crc32)
    return tuple(told)


def _claim(record: Found, method: int, *, summed: bool) -> Claim:
    sizes = [each.size for each in (record.line, record.described, record.local) if each is not None and each.size]
    size = record.stored
    if method:
        size = min(Counter(sizes).most_common(1)[0][0] if sizes else 0, _DEFLATE * record.stored + 64)
    checksums = _checksums(record) if summed and record.stored else ()
    return Claim(record.payload, record.stored, record.present, size, method, checksums)


def _other_size(source: Source, record: Found, claim: Claim, verdict: Verdict) -> Verdict:
    """The verdict on a compressed record, if need be with the other one of the sizes that are given for it."""
    if verdict.state != "damaged" or not claim.method:
        return verdict
    for size in {each.size for each in (record.line, record.described) if each is not None} - {claim.size}:
        again = verdicts(source, [claim._replace(size=min(size, _DEFLATE * record.stored + 64))])[0]
        if again.state == "whole":
            return again
    return verdict
