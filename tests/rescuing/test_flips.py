"""One flipped bit anywhere in an archive is found and undone, and the file is what it was, byte for byte."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forge import FUZZ
from tests.rescuing.makers import ARCHIVES, flipped, ident

import transload
from transload.io.sources import BytesSource
from transload.judge import inspect
from transload.rescuing import mending
from transload.rescuing.archive import recover_archive
from transload.rescuing.bits import Bit, flipped_bits
from transload.rescuing.deflate import style_of
from transload.rescuing.mended import Mended

PLACES = 12 * FUZZ


def recovered(data: bytes) -> Mended:
    made = recover_archive(BytesSource(data))
    assert made is not None
    return made


def is_undone(whole: bytes, position: int, bit: int) -> bool:
    made = recovered(flipped(whole, position, bit))
    same = made.source.size == len(whole) and made.source.read(0, len(whole)) == whole
    return same and made.exact and [(mend.position, mend.bits) for mend in made.mends] == [(position, (bit,))]


@pytest.mark.parametrize("path", ARCHIVES, ids=ident)
def test_a_bit_anywhere(path: Path) -> None:
    whole = path.read_bytes()
    rng = random.Random(path.name)  # noqa: S311 - no secret
    places = [(rng.randrange(len(whole)), rng.randrange(8)) for _ in range(PLACES)]
    assert [place for place in places if not is_undone(whole, *place)] == []


def test_a_name_that_reaches_into_what_follows_it() -> None:
    """The filling then begins as the field does that stands for sizes of eight bytes."""
    whole = next(path for path in ARCHIVES if path.match("h200/state_dict_cuda1.pt")).read_bytes()
    length = whole.find(b"state_dict_cuda1/.format_versionFB\x01\x00") - 4
    assert whole[length] == 32
    assert is_undone(whole, length, 1)


@pytest.mark.parametrize("path", ARCHIVES, ids=ident)
def test_nothing_is_mended_that_is_whole(path: Path) -> None:
    whole = path.read_bytes()
    made = recovered(whole)
    assert made.source.read(0, len(whole) + 1) == whole
    assert (made.exact, made.mends, made.lost, made.notes) == (True, (), (), ())


def saved(**options: Any) -> bytes:
    out = io.BytesIO()
    transload.save({"a": torch.arange(3), "b": torch.zeros(0)}, out, **options)
    return out.getvalue()


def by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.arange(3), "b": torch.zeros(0)}, out)
    return out.getvalue()


def unsummed() -> bytes:
    """As ``torch.serialization.set_crc32_options(False)`` has it: zeros in the place of all checksums."""
    out = bytearray(by_torch())
    for sign, place in ((b"PK\x07\x08", 4), (b"PK\x01\x02", 16)):
        at = out.find(sign)
        while at >= 0:
            out[at + place : at + place + 4] = bytes(4)
            at = out.find(sign, at + 1)
    return bytes(out)


@pytest.mark.parametrize("make", [by_torch, saved, unsummed], ids=["torch", "transload", "no checksums"])
def test_every_bit_of_every_header(make: Callable[[], bytes]) -> None:
    """All of them in a small file: two tensors, and all that is written around them."""
    whole = make()
    assert recovered(whole).source.read(0, len(whole) + 1) == whole
    assert recovered(whole).mends == ()
    inside = {place for record in inspect(whole).records for place in _places(record.offset, record.size)}
    outside = [place for place in range(len(whole)) if place not in inside]
    step = max(1, 5 // FUZZ)
    assert [place for place in outside[::step] if not is_undone(whole, place, place // step % 8)] == []


def _places(offset: int | None, size: int) -> range:
    return range(offset or 0, (offset or 0) + size)


@pytest.fixture(scope="module")
def large() -> bytes:
    generator = torch.Generator().manual_seed(0)
    out = io.BytesIO()
    state = {f"w{n}": torch.randn(1000, generator=generator) for n in range(50)}
    torch.save({**state, "big": torch.randn(1 << 19, generator=generator)}, out)
    return out.getvalue()


def test_a_large_record_is_less_sure(large: bytes) -> None:
    storage = max(inspect(large).storages, key=lambda each: each.nbytes)
    position = (storage.offset or 0) + 1_234_567
    made = recovered(flipped(large, position, 6))
    assert made.source.read(0, len(large)) == large
    assert [(mend.position, mend.certainty) for mend in made.mends] == [(position, "probable")]


def test_a_generated_file(large: bytes) -> None:
    rng = random.Random(5)  # noqa: S311 - no secret
    places = [(rng.randrange(len(large)), rng.randrange(8)) for _ in range(PLACES)]
    assert [place for place in places if not is_undone(large, *place)] == []


def test_more_than_a_bit_is_not_taken_for_one(large: bytes) -> None:
    storages = inspect(large).storages
    rng = random.Random(7)  # noqa: S311 - no secret
    for storage in storages[:10]:
        broken = bytearray(large)
        start = storage.offset or 0
        for place in rng.sample(range(start, start + storage.nbytes), 5):
            broken[place] ^= 0xFF
        made = recovered(bytes(broken))
        assert [lost.name for lost in made.lost] == [storage.record]
        assert made.mends == ()


@pytest.mark.parametrize("length", [1, 2, 9, 1000, 65_537])
def test_the_logarithm(length: int) -> None:
    from zlib import crc32

    rng = random.Random(length)  # noqa: S311 - no secret
    whole = rng.randbytes(length)
    for position in {0, length - 1, *(rng.randrange(length) for _ in range(5))}:
        for bit in range(8):
            syndrome = crc32(whole) ^ crc32(flipped(whole, position, bit))
            assert flipped_bits(syndrome, length) == [Bit(position, bit)]
            assert flipped_bits(syndrome, max(0, length - position - 1)) == []


def test_beyond_half_a_gigabyte_there_are_several() -> None:
    """Found without such a file: the effect of a bit depends on how many follow, and comes again after 2^32 - 1."""
    from zlib import crc32

    found = flipped_bits(crc32(b"\0") ^ crc32(b"\1"), 1 << 30)
    assert [(bit.byte, bit.bit) for bit in found] == [((1 << 30) - 1, 0), ((1 << 30) - 1 - (1 << 29), 1)]


def test_a_record_for_which_several_bits_would_do(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had more than 2^32 bits."""
    storage = inspect(large).storages[3]
    monkeypatch.setattr(mending, "flipped_bits", lambda *_: [Bit(3, 0), Bit(900, 7)])
    made = recovered(flipped(large, (storage.offset or 0) + 3, 0))
    assert [lost.name for lost in made.lost] == [storage.record]
    places = [f"{(storage.offset or 0) + byte:,}" for byte in (3, 900)]
    assert all(place in made.gone[0].why for place in places)


def test_how_a_writer_packs() -> None:
    from zlib import Z_FIXED, compressobj

    text = b"the cat and the hat and the bat" * 20
    for strategy in (0, Z_FIXED):
        pack = compressobj(wbits=-15, strategy=strategy)
        style = style_of(pack.compress(text) + pack.flush())
        assert 0 < style.reach < len(text) * 32
        assert 0 < -sum(style.lengths) < len(text)
    pack = compressobj(level=0, wbits=-15)
    assert style_of(pack.compress(text) + pack.flush()) == (0, 0, ())
