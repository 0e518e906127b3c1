"""A damaged archive put together again: every record judged, flipped bits undone, headers and directory made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from transload.io.sources import Source
from transload.rescuing.inflated import Inflated
from transload.rescuing.judging import Judged, are_summed, judged_records
from transload.rescuing.layout import Item, laid_out
from transload.rescuing.mended import Gone, Lost, Mend, Mended
from transload.rescuing.mending import Certainty, Verdict
from transload.rescuing.parts import Assembly, Filler, Part, patched
from transload.rescuing.placing import Found
from transload.rescuing.small import with_byteorder, with_version
from transload.rescuing.survey import Survey, survey
from transload.rescuing.tidy import tidied

__all__ = ["MINOR", "assembled", "recover_archive"]

_MOST_MENDS = 4096
MINOR = frozenset({"version", ".data/serialization_id", ".data/version", ".transload/origin.json"})
"""Records that say nothing of the content: one can be made anew, torch does not need the others."""


def recover_archive(source: Source) -> Mended | None:
    """The archive that begins at byte 0 of a source; ``None`` if there is no record in it."""
    found = survey(source)
    judged = judged_records(source, found)
    if not judged:
        return None
    by_torch = _by_torch(found.records)
    items, lost = _items(source, found, judged, by_torch=by_torch)
    if by_torch and not are_summed(found.records):
        items = [item._replace(crc32=0) for item in items]
    notes: list[str] = []
    after: list[Part] = []
    if by_torch:
        after = _gap(source, found, _directory_start(found)) if found.directory.start > 0 else []
    else:
        items = tidied(items, notes)
    items = with_version(with_byteorder(items, lost), notes)
    lost += [Lost(_below(line.name), "it is not in the file") for line in found.missing]
    made = assembled(source, items, {each.name: each for each in judged}, lost, after)
    if not found.directory.lines and not made.exact:
        notes.insert(0, "the file ends before the directory of the archive: the records were found one by one")
    return made._replace(notes=(*notes, *made.notes))


def _by_torch(records: Sequence[Found]) -> bool:
    padded = sum(record.local is not None and record.local.padded for record in records)
    return 2 * padded > len(records)


def _items(source: Source, found: Survey, judged: Sequence[Judged], *, by_torch: bool) -> tuple[list[Item], list[Lost]]:
    """What is laid out again, and what is not."""
    time, date = _times(found.records) if by_torch else (0, 0)
    items: list[Item] = []
    lost: list[Lost] = []
    orders = _orders(judged)
    root = Counter(each.name.partition(b"/")[0] for each in judged).most_common(1)[0][0]
    reached = 0
    for each in judged:
        record = each.found
        if not each.usable:
            why = "the file ends within it" if each.verdict.state == "cut" else "its bytes are damaged"
            lost.append(Lost(each.text, why))
        named = not by_torch or _is_named(each.name, root)
        if each.usable and not named:
            lost.append(Lost(each.text, "its name is damaged"))
        content = _content(source, each, keep=by_torch)
        if content is None or not named or (each.text in MINOR and not each.usable):
            continue
        kept = by_torch and each.method in (0, 8)
        stored = sum(part.length for part in content)
        size = each.verdict.size if each.method and each.verdict.size >= 0 else stored
        items.append(
            Item(
                each.name,
                content,
                size if kept else stored,
                stored,
                each.verdict.crc32 or 0,
                each.method if kept else 0,
                _flags(record, by_torch=by_torch),
                time,
                date,
                _padding(each) if by_torch else None,
                tuple(_gap(source, found, record.header, reached)) if by_torch else (),
                orders[each.name],
                record.header,
                each.name,
            )
        )
        reached = record.end
    return items, lost


def _is_named(name: bytes, root: bytes) -> bool:
    """Whether a record has a name as torch gives it, below the folder of all: others are the work of damage."""
    below = name[len(root) + 1 :].decode("utf-8", "backslashreplace")
    return name.startswith(root + b"/") and below.isprintable() and "\\" not in below


def _orders(judged: Sequence[Judged]) -> dict[bytes, int]:
    """The place of each record in the directory: as they lie in the file, as torch has it, unless it is another."""
    lined = sorted((each for each in judged if each.found.line), key=lambda each: each.found.line.position)  # type: ignore[union-attr]
    if lined == [each for each in judged if each.found.line]:
        return {each.name: number for number, each in enumerate(judged)}
    rest = [each for each in judged if not each.found.line]
    return {each.name: number for number, each in enumerate([*lined, *rest])}


def _times(records: Sequence[Found]) -> tuple[int, int]:
    told = Counter((each.time, each.date) for record in records for each in (record.local, record.line) if each)
    return told.most_common(1)[0][0] if told else (0, 0)


def _flags(record: Found, *, by_torch: bool) -> int:
    usual = 0x0808 if record.stored else 0x0800
    told = {each.flags for each in (record.local, record.line) if each is not None}
    return told.pop() if by_torch and len(told) == 1 and record.local is not None and record.line is not None else usual


def _padding(each: Judged) -> int | None:
    wide = 12 if each.found.wide and each.found.stored < 0xFFFFFFFF else 20 if each.found.wide else 0
    padding = each.found.payload - each.found.header - 34 - len(each.name) - wide
    return padding if 0 <= padding < 0xFFFF else None


def _directory_start(found: Survey) -> int:
    """Where the directory begins: before the first line that was found, if the end record says so."""
    start, stated = found.directory.start, found.directory.stated
    reached = max((record.end for record in found.records), default=0)
    return stated if reached <= stated < start else start


def _gap(source: Source, found: Survey, until: int, since: int | None = None) -> list[Part]:
    """Bytes between records that belong to none, as a retagged file has where its index was before."""
    if since is None:
        since = max((record.end for record in found.records if not record.dead and record.end <= until), default=until)
    return [Part(source, since, until - since)] if since < until else []


def _content(source: Source, each: Judged, *, keep: bool) -> tuple[Part, ...] | None:
    """The bytes of a record: as they are, mended, unpacked, or filled up; ``None`` if nobody knows how many."""
    record, verdict = each.found, each.verdict
    if not each.usable:
        if each.method or record.endless:
            return None
        fill = Part(Filler(record.stored), 0, record.stored - record.present)
        return (Part(source, record.payload, record.present), fill)
    changes = [(bit.byte, source.read(bit.byte, 1)[0] ^ 1 << bit.bit) for bit in verdict.bits]
    parts = tuple(part for part in patched(source, record.payload, record.stored, changes) if part.length)
    if not each.method or keep:
        return parts
    return (Part(Inflated(Assembly(parts, each.text), verdict.size, each.text), 0, verdict.size),)


def assembled(
    source: Source, items: Sequence[Item], judged: dict[bytes, Judged], lost: list[Lost], after: Sequence[Part]
) -> Mended:
    """Lay the items out, and compare with what is in the file."""
    laid = list(laid_out(items, after))
    whole = Assembly((part for part, _, _ in laid), source.name)
    gone = tuple(_gone(laid, judged))
    in_place = _in_place(items, laid) and not lost
    mends = [*_flips(source, judged), *(_differing(source, laid, _certainty(judged)) if in_place else ())]
    unchecked = frozenset(
        each.text for each in judged.values() if each.verdict.state == "unchecked" and each.found.stored
    )
    return Mended(
        whole,
        in_place,
        gone,
        tuple(mends[:_MOST_MENDS]),
        tuple(lost),
        tuple(_notes(source, whole, in_place=in_place, mends=len(mends))),
        tuple(items),
        unchecked,
        touched=tuple(_touched(laid, judged)),
    )


def _touched(laid: Sequence[tuple[Part, bool, Item | None]], judged: dict[bytes, Judged]) -> Iterator[int]:
    """Where in the new file the bytes lie that were mended."""
    at, seen = 0, b""
    for part, _, item in laid:
        if item is not None and item.origin != seen:
            seen = item.origin
            each = judged.get(item.origin)
            if each is not None:
                yield from (at + bit.byte - each.found.payload for bit in each.verdict.bits)
        at += part.length


def _gone(laid: Sequence[tuple[Part, bool, Item | None]], judged: dict[bytes, Judged]) -> Iterator[Gone]:
    at = 0
    for part, _, item in laid:
        each = judged.get(item.origin) if item is not None else None
        if each is not None and not each.usable:
            if each.verdict.state == "damaged":
                yield Gone(at, at + part.length, _damage(each.verdict))
            elif isinstance(part.source, Filler):
                yield Gone(at, at + part.length, "the file ends before its last byte")
        at += part.length


def _damage(verdict: Verdict) -> str:
    places = " or ".join(f"{place:,}" for place in verdict.maybe)
    said = "its bytes do not have the checksum they were saved with"
    return f"{said}; a flipped bit of byte {places} would explain it" if len(verdict.maybe) > 1 else said


def _in_place(items: Sequence[Item], laid: Sequence[tuple[Part, bool, Item | None]]) -> bool:
    """Whether all records lie where they lay."""
    at, headers = 0, {item.header for item in items}
    begins: set[int] = set()
    for part, ours, _ in laid:
        if ours:
            begins.add(at)
        at += part.length
    return -1 not in headers and headers <= begins


def _flips(source: Source, judged: dict[bytes, Judged]) -> Iterator[Mend]:
    for each in judged.values():
        for bit in each.verdict.bits:
            old = source.read(bit.byte, 1)[0]
            yield Mend(bit.byte, old, old ^ 1 << bit.bit, each.text, each.verdict.certainty)


def _certainty(judged: dict[bytes, Judged]) -> Certainty:
    """How sure the headers and the directory are: no surer than the names in them."""
    return "proven" if all(each.settled for each in judged.values()) else "probable"


def _differing(source: Source, laid: Sequence[tuple[Part, bool, Item | None]], certainty: Certainty) -> Iterator[Mend]:
    """The bytes of headers, filling and directory that are not what they must be."""
    at = 0
    for part, ours, _ in laid:
        if ours and part.length:
            right = part.source.read(0, part.length)
            here = source.read(at, part.length)
            if here != right:
                for index, (old, new) in enumerate(zip(here, right, strict=False)):
                    if old != new:
                        yield Mend(at + index, old, new, "", certainty)
        at += part.length


def _notes(source: Source, whole: Assembly, *, in_place: bool, mends: int) -> Iterator[str]:
    if mends > _MOST_MENDS:
        yield f"{mends:,} bytes of headers and directory were made anew; the first {_MOST_MENDS:,} are listed"
    if in_place and whole.size > source.size:
        yield f"the last {whole.size - source.size:,} bytes, of the directory, were missing and were made anew"
    if in_place and whole.size < source.size:
        extra = source.size - whole.size
        what = (
            "another archive begins there" if source.read(whole.size, 4) == b"PK\x03\x04" else "they belong to nothing"
        )
        yield f"{extra:,} bytes from byte {whole.size:,} on are left out: {what}"


def _below(name: bytes) -> str:
    """A name without the folder of the archive."""
    return (name.partition(b"/")[2] or name).decode("utf-8", "backslashreplace")
