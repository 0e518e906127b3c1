"""One flipped bit anywhere in an archive is found and undone, and the file is what it was, byte for byte."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from tests.forge import FUZZ
from tests.rescuing.makers import ARCHIVES, flipped, ident

import transload
from transload import inspect, rescue
from transload.io.sources import BytesSource
from transload.rescuing import bitflips
from transload.rescuing.archive import Recovered, recover_archive
from transload.rescuing.bitflips import flipped_bits

PLACES = 12 * FUZZ


# The recovered file and its repairs are looked at before anything is written: thousands of flips take too long else.
def recovered(data: bytes) -> Recovered:
    made = recover_archive(BytesSource(data))
    assert made is not None
    return made


def is_undone(whole: bytes, position: int, bit: int) -> bool:
    made = recovered(flipped(whole, position, bit))
    same = made.source.size == len(whole) and made.source.read(0, len(whole)) == whole
    return same and made.exact and [(repair.position, repair.bits) for repair in made.repairs] == [(position, (bit,))]


def test_a_bit_anywhere() -> None:
    wrong: list[tuple[str, int, int]] = []
    for path in ARCHIVES:
        whole, rng = path.read_bytes(), random.Random(path.name)  # noqa: S311 - no secret
        places = [(rng.randrange(len(whole)), rng.randrange(8)) for _ in range(PLACES)]
        wrong += [(ident(path), *place) for place in places if not is_undone(whole, *place)]
    assert wrong == []


def test_one_bit_in_the_file_that_is_written(tmp_path: Path) -> None:
    for path in [path for path in ARCHIVES if inspect(path).tensors][::8]:
        whole, out = path.read_bytes(), tmp_path / f"{path.parent.name} {path.name}"
        made = rescue(flipped(whole, len(whole) // 3, 5), out)
        assert (made.exit_code, made.how) == (0, "exact"), ident(path)
        assert out.read_bytes() == whole, ident(path)


def test_a_bit_in_the_number_of_a_storage() -> None:
    """The header says data/5, the directory data/1. The index names both; the order of the numbers settles it."""
    whole = by_torch()
    place = whole.index(b"data/1") + 5
    made = recovered(flipped(whole, place, 2))
    assert [(repair.position, repair.bits, repair.certainty) for repair in made.repairs] == [(place, (2,), "proven")]


def test_a_bit_in_the_size_of_a_compressed_record() -> None:
    """The directory and the descriptor then differ, and what the record inflates to decides."""
    path = next(path for path in ARCHIVES if path.match("torch-2.6.0*/traced_cpu.pt"))
    whole = path.read_bytes()
    sizes = [found.start() + 24 for found in re.finditer(b"PK\x01\x02.{6}\x08\0", whole, re.DOTALL)]
    assert len(sizes) == 3
    wrong = [(at, bit) for at in sizes for bit in range(32) if not is_undone(whole, at + bit // 8, bit % 8)]
    assert wrong == []


def test_a_name_that_reaches_into_the_padding() -> None:
    """The padding then begins like the field of sizes of eight bytes."""
    whole = next(path for path in ARCHIVES if path.match("h200/state_dict_cuda1.pt")).read_bytes()
    length = whole.find(b"state_dict_cuda1/.format_versionFB\x01\x00") - 4
    assert whole[length] == 32
    assert is_undone(whole, length, 1)


def test_nothing_is_repaired_that_is_whole() -> None:
    for path in ARCHIVES:
        whole = path.read_bytes()
        made = recovered(whole)
        assert made.source.read(0, len(whole) + 1) == whole, ident(path)
        assert (made.exact, made.repairs, made.lost_records, made.notes) == (True, (), (), ()), ident(path)


def saved(**options: Any) -> bytes:
    out = io.BytesIO()
    transload.save({"a": torch.arange(3), "b": torch.zeros(0)}, out, **options)
    return out.getvalue()


def by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.arange(3), "b": torch.zeros(0)}, out)
    return out.getvalue()


def without_checksums() -> bytes:
    """As after ``torch.serialization.set_crc32_options(False)``: all checksums are zero."""
    out = bytearray(by_torch())
    for sign, place in ((b"PK\x07\x08", 4), (b"PK\x01\x02", 16)):
        at = out.find(sign)
        while at >= 0:
            out[at + place : at + place + 4] = bytes(4)
            at = out.find(sign, at + 1)
    return bytes(out)


@pytest.mark.parametrize("make", [by_torch, saved, without_checksums], ids=["torch", "transload", "no checksums"])
def test_every_bit_of_every_header(make: Callable[[], bytes]) -> None:
    """All of them in a small file: two tensors, and all that is written around them."""
    whole = make()
    assert recovered(whole).source.read(0, len(whole) + 1) == whole
    assert recovered(whole).repairs == ()
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


def test_a_flip_in_a_large_record_is_probable(large: bytes) -> None:
    storage = max(inspect(large).storages, key=lambda each: each.nbytes)
    position = (storage.offset or 0) + 1_234_567
    made = recovered(flipped(large, position, 6))
    assert made.source.read(0, len(large)) == large
    assert [(repair.position, repair.certainty) for repair in made.repairs] == [(position, "probable")]
    result = rescue(flipped(large, position, 6), dry_run=True)
    assert (result.how, result.exit_code, result.to_dict()["complete"]) == ("exact", 1, False)
    assert ["not proven" in warning for warning in result.warnings] == [True]


def test_a_generated_file(large: bytes) -> None:
    rng = random.Random(5)  # noqa: S311 - no secret
    places = [(rng.randrange(len(large)), rng.randrange(8)) for _ in range(PLACES)]
    assert [place for place in places if not is_undone(large, *place)] == []


def test_damage_of_many_bits_is_not_repaired(large: bytes) -> None:
    storages = inspect(large).storages
    rng = random.Random(7)  # noqa: S311 - no secret
    for storage in storages[:10]:
        broken = bytearray(large)
        start = storage.offset or 0
        for place in rng.sample(range(start, start + storage.nbytes), 5):
            broken[place] ^= 0xFF
        made = recovered(bytes(broken))
        assert [lost.name for lost in made.lost_records] == [storage.record]
        assert made.repairs == ()


@pytest.mark.parametrize("length", [1, 2, 9, 1000, 65_537])
def test_a_flip_found_by_its_checksum(length: int) -> None:
    rng = random.Random(length)  # noqa: S311 - no secret
    whole = rng.randbytes(length)
    for position in {0, length - 1, *(rng.randrange(length) for _ in range(5))}:
        for bit in range(8):
            syndrome = crc32(whole) ^ crc32(flipped(whole, position, bit))
            assert flipped_bits(syndrome, length) == [(position, 1 << bit)]
            assert flipped_bits(syndrome, max(0, length - position - 1)) == []


def test_beyond_half_a_gigabyte_several_bits_explain_a_checksum() -> None:
    """Without such a file: the effect of a bit depends on how many follow, and repeats after 2^32 - 1."""
    found = flipped_bits(crc32(b"\0") ^ crc32(b"\1"), 1 << 30)
    assert found == [((1 << 30) - 1, 1), ((1 << 30) - 1 - (1 << 29), 2)]


def test_a_record_whose_damage_several_bits_explain(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had more than 2^32 bits."""
    storage = inspect(large).storages[3]
    monkeypatch.setattr(bitflips, "flipped_bits", lambda *_: [(3, 1), (900, 128)])
    made = recovered(flipped(large, (storage.offset or 0) + 3, 0))
    assert [lost.name for lost in made.lost_records] == [storage.record]
    places = [f"{(storage.offset or 0) + byte:,}" for byte in (3, 900)]
    assert all(place in made.lost_ranges[0].why for place in places)
