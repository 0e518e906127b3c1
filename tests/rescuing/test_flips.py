"""One flipped bit anywhere in an archive is found and undone, which restores the file byte for byte."""

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
from tests.makers import saved
from tests.rescuing.makers import ARCHIVES, flipped, ident

import transload
from transload import inspect, rescue
from transload.io.sources import BytesSource
from transload.rescuing import bitflips
from transload.rescuing.archive import Recovered, recover_archive
from transload.rescuing.bitflips import flipped_bits

FLIPS_PER_FILE = 12 * FUZZ


# Tests check the recovery before anything is written, since writing thousands of files would take too long.
def recovered(data: bytes) -> Recovered:
    result = recover_archive(BytesSource(data))
    assert result is not None
    return result


def is_undone(original: bytes, position: int, bit: int) -> bool:
    result = recovered(flipped(original, position, bit))
    equal = result.source.size == len(original) and result.source.read(0, len(original)) == original
    return (
        equal and result.exact and [(repair.position, repair.bits) for repair in result.repairs] == [(position, (bit,))]
    )


def test_flipped_bit_anywhere_in_a_fixture_is_undone() -> None:
    wrong: list[tuple[str, int, int]] = []
    for path in ARCHIVES:
        original, rng = path.read_bytes(), random.Random(path.name)  # noqa: S311 - not for cryptography
        places = [(rng.randrange(len(original)), rng.randrange(8)) for _ in range(FLIPS_PER_FILE)]
        wrong += [(ident(path), *place) for place in places if not is_undone(original, *place)]
    assert wrong == []


def test_rescue_writes_the_original_bytes_after_one_flipped_bit(tmp_path: Path) -> None:
    for path in [path for path in ARCHIVES if inspect(path).tensors][::8]:
        original, out = path.read_bytes(), tmp_path / f"{path.parent.name} {path.name}"
        result = rescue(flipped(original, len(original) // 3, 5), out)
        assert (result.exit_code, result.how) == (0, "exact"), ident(path)
        assert out.read_bytes() == original, ident(path)


def test_flipped_bit_in_a_storage_key_is_undone() -> None:
    """The header says data/5, the directory data/1. The index names both; the order of the keys decides."""
    original = saved_by_torch()
    place = original.index(b"data/1") + 5
    recovery = recovered(flipped(original, place, 2))
    assert [(repair.position, repair.bits, repair.certainty) for repair in recovery.repairs] == [
        (place, (2,), "proven")
    ]


def test_flipped_bit_in_the_size_of_a_compressed_record_is_undone() -> None:
    """The directory and the descriptor then differ; the inflated size decides."""
    path = next(path for path in ARCHIVES if path.match("torch-2.6.0*/traced_cpu.pt"))
    original = path.read_bytes()
    sizes = [match.start() + 24 for match in re.finditer(b"PK\x01\x02.{6}\x08\0", original, re.DOTALL)]
    assert len(sizes) == 3
    wrong = [(at, bit) for at in sizes for bit in range(32) if not is_undone(original, at + bit // 8, bit % 8)]
    assert wrong == []


def test_flipped_bit_in_a_name_length_is_undone() -> None:
    """The name then reaches into the padding, the rest of which looks like a zip64 field."""
    original = next(path for path in ARCHIVES if path.match("h200/state_dict_cuda1.pt")).read_bytes()
    length = original.find(b"state_dict_cuda1/.format_versionFB\x01\x00") - 4
    assert original[length] == 32
    assert is_undone(original, length, 1)


def test_intact_archives_need_no_repairs() -> None:
    for path in ARCHIVES:
        original = path.read_bytes()
        recovery = recovered(original)
        assert recovery.source.read(0, len(original) + 1) == original, ident(path)
        assert (recovery.exact, recovery.repairs, recovery.lost_records, recovery.notes) == (True, (), (), ()), ident(
            path
        )


def saved_by_transload(**options: Any) -> bytes:
    out = io.BytesIO()
    transload.save({"a": torch.arange(3), "b": torch.zeros(0)}, out, **options)
    return out.getvalue()


def saved_by_torch() -> bytes:
    return saved({"a": torch.arange(3), "b": torch.zeros(0)})


def without_checksums() -> bytes:
    """As after ``torch.serialization.set_crc32_options(False)``: all checksums are zero."""
    out = bytearray(saved_by_torch())
    for signature, place in ((b"PK\x07\x08", 4), (b"PK\x01\x02", 16)):
        at = out.find(signature)
        while at >= 0:
            out[at + place : at + place + 4] = bytes(4)
            at = out.find(signature, at + 1)
    return bytes(out)


@pytest.mark.parametrize(
    "make", [saved_by_torch, saved_by_transload, without_checksums], ids=["torch", "transload", "no checksums"]
)
def test_flipped_bits_in_headers_are_undone(make: Callable[[], bytes]) -> None:
    """A bit in every fifth byte outside the records of a small file, or in every byte if ``FUZZ`` is 5 or more."""
    original = make()
    assert recovered(original).source.read(0, len(original) + 1) == original
    assert recovered(original).repairs == ()
    inside = {place for record in inspect(original).records for place in _places(record.offset, record.size)}
    outside = [place for place in range(len(original)) if place not in inside]
    step = max(1, 5 // FUZZ)
    assert [place for place in outside[::step] if not is_undone(original, place, place // step % 8)] == []


def _places(offset: int | None, size: int) -> range:
    return range(offset or 0, (offset or 0) + size)


@pytest.fixture(scope="module")
def large() -> bytes:
    generator = torch.Generator().manual_seed(0)
    state = {f"w{n}": torch.randn(1000, generator=generator) for n in range(50)}
    return saved({**state, "big": torch.randn(1 << 19, generator=generator)})


def test_repair_in_a_large_record_is_only_probable(large: bytes) -> None:
    storage = max(inspect(large).storages, key=lambda storage: storage.nbytes)
    position = (storage.offset or 0) + 1_234_567
    recovery = recovered(flipped(large, position, 6))
    assert recovery.source.read(0, len(large)) == large
    assert [(repair.position, repair.certainty) for repair in recovery.repairs] == [(position, "probable")]
    result = rescue(flipped(large, position, 6), dry_run=True)
    assert (result.how, result.exit_code, result.to_dict()["complete"]) == ("exact", 1, False)
    assert ["not proven" in warning for warning in result.warnings] == [True]


def test_flipped_bit_anywhere_in_a_large_file_is_undone(large: bytes) -> None:
    rng = random.Random(5)  # noqa: S311 - not for cryptography
    places = [(rng.randrange(len(large)), rng.randrange(8)) for _ in range(FLIPS_PER_FILE)]
    assert [place for place in places if not is_undone(large, *place)] == []


def test_damage_of_many_bits_is_not_repaired(large: bytes) -> None:
    storages = inspect(large).storages
    rng = random.Random(7)  # noqa: S311 - not for cryptography
    for storage in storages[:10]:
        broken = bytearray(large)
        start = storage.offset or 0
        for place in rng.sample(range(start, start + storage.nbytes), 5):
            broken[place] ^= 0xFF
        recovery = recovered(bytes(broken))
        assert [lost.name for lost in recovery.lost_records] == [storage.record]
        assert recovery.repairs == ()


@pytest.mark.parametrize("length", [1, 2, 9, 1000, 65_537])
def test_flipped_bits_locates_a_bit_by_checksum(length: int) -> None:
    rng = random.Random(length)  # noqa: S311 - not for cryptography
    original = rng.randbytes(length)
    for position in {0, length - 1, *(rng.randrange(length) for _ in range(5))}:
        for bit in range(8):
            syndrome = crc32(original) ^ crc32(flipped(original, position, bit))
            assert flipped_bits(syndrome, length) == [(position, 1 << bit)]
            assert flipped_bits(syndrome, max(0, length - position - 1)) == []


def test_flipped_bits_is_ambiguous_beyond_half_a_gigabyte() -> None:
    """No such file is needed: the effect of a bit depends on the number of bits after it, with period 2^32 - 1."""
    candidates = flipped_bits(crc32(b"\0") ^ crc32(b"\1"), 1 << 30)
    assert candidates == [((1 << 30) - 1, 1), ((1 << 30) - 1 - (1 << 29), 2)]


def test_record_with_ambiguous_damage_is_lost(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a record of more than 2^32 bits."""
    storage = inspect(large).storages[3]
    monkeypatch.setattr(bitflips, "flipped_bits", lambda *_: [(3, 1), (900, 128)])
    recovery = recovered(flipped(large, (storage.offset or 0) + 3, 0))
    assert [lost.name for lost in recovery.lost_records] == [storage.record]
    places = [f"{(storage.offset or 0) + byte:,}" for byte in (3, 900)]
    assert all(place in recovery.lost_ranges[0].why for place in places)
