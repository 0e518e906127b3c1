"""Verdicts on records: overlapping ones each get their own; an unreadable place costs only what is there."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rescuing.makers import flipped

from transload import rescue
from transload.errors import CannotReadError
from transload.io.sources import BytesSource, FileSource
from transload.rescuing.bitflips import Claim, Repair, Verdict, check_records

NOISE = random.Random(7).randbytes(300_000)  # noqa: S311 - a test


def claim(start: int, end: int, *checksums: int, method: int = 0, size: int | None = None) -> Claim:
    return Claim(start, end - start, end - start if size is None else size, method, checksums)


def whole(start: int, end: int) -> Claim:
    return claim(start, end, zlib.crc32(NOISE[start:end]))


def test_overlapping_records() -> None:
    """Together they are longer than the file, many times."""
    claims = [whole(start, len(NOISE)) for start in (0, 0, 1, 2, 299_999, 300_000)]
    found = check_records(BytesSource(NOISE), [*claims, claim(5, 290_000, 1), claim(7, 8)])
    assert [verdict.state for verdict in found] == ["whole"] * 6 + ["damaged", "unchecked"]
    assert [verdict.crc32 for verdict in found[:6]] == [each.checksums[0] for each in claims]
    assert found[7] == Verdict("unchecked", zlib.crc32(NOISE[7:8]), size=1)


def test_either_of_two_checksums() -> None:
    (found,) = check_records(BytesSource(NOISE), [claim(0, 1000, 5, zlib.crc32(NOISE[:1000]))])
    assert found.state == "whole"


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
@pytest.mark.parametrize("size", [0, 300, 200_000])
def test_stored_and_deflated_records_side_by_side(method: int, size: int) -> None:
    plain = NOISE[:size]
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = packer.compress(plain) + packer.flush() if method else plain
    source = BytesSource(b"before" + raw)
    right = claim(6, 6 + len(raw), zlib.crc32(plain), method=method, size=size)
    claims = [right, right._replace(stored=len(raw) + 1), whole(0, 6)._replace(checksums=()), right]
    found = check_records(source, claims)
    assert [verdict.state for verdict in found] == ["whole", "cut", "unchecked", "whole"]
    assert (found[0].crc32, found[0].size) == (zlib.crc32(plain), size)


def test_a_flip_in_a_record_that_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_BUFFER": 1024, "_PART": 4096, "_SMALL": 512, "_ALONE": 0}.items():
        monkeypatch.setattr(f"transload.formats.verify.{name}", value)
    data = bytearray(NOISE)
    data[123_456] ^= 8
    (found,) = check_records(BytesSource(data), [whole(9, 250_000)])
    assert (found.state, found.repairs) == (
        "mended",
        (Repair(123_456, NOISE[123_456] ^ 8, NOISE[123_456], "", "proven"),),
    )


def test_flips_in_a_compressed_record() -> None:
    """Where several bits give the same content, the one is taken without which it is what zlib makes of it."""
    rng = random.Random(4)  # noqa: S311 - a test
    words = [rng.randbytes(rng.randrange(2, 9)).hex().encode() for _ in range(5)]
    text = b" ".join(rng.choice(words) for _ in range(300))
    packer = zlib.compressobj(9, wbits=-15)
    raw = packer.compress(text) + packer.flush()
    assert raw[0] >> 1 & 3 == 2, "a block with codes of its own"
    right = claim(0, len(raw), zlib.crc32(text), method=8, size=len(text))
    certainties = set()
    for _ in range(60):
        position, bit = rng.randrange(len(raw)), rng.randrange(8)
        (found,) = check_records(BytesSource(flipped(raw, position, bit)), [right])
        assert (found.state, found.crc32) == ("mended", zlib.crc32(text))
        (repair,) = found.repairs
        assert (repair.position, repair.bits, repair.new) == (position, (bit,), raw[position])
        certainties.add(repair.certainty)
    assert certainties == {"proven", "probable"}


def test_padding_bits_of_a_compressed_record_are_cleared() -> None:
    """They change nothing in its content, so only what writers do says that they were flipped."""
    packer = zlib.compressobj(wbits=-15)
    parts = [packer.compress(b"first"), packer.flush(zlib.Z_SYNC_FLUSH), packer.compress(b"last"), packer.flush()]
    raw = b"".join(parts)
    right = claim(0, len(raw), zlib.crc32(b"firstlast"), method=8, size=9)
    for position in (len(raw) - 1, raw.index(b"\0\0\xff\xff") - 1):
        (found,) = check_records(BytesSource(flipped(raw, position, 7)), [right])
        assert found.state == "whole"
        assert [(each.position, each.new, each.certainty) for each in found.repairs] == [
            (position, raw[position], "proven")
        ]


class Scratched(BytesSource):
    """A disk with a bad place at byte 1,000."""

    def readinto(self, offset: int, buffer: memoryview) -> int:
        if offset <= 1000 < offset + len(buffer):
            raise CannotReadError("Input/output error", where="disk")
        return super().readinto(offset, buffer)


def test_an_unreadable_place_damages_only_what_is_there() -> None:
    claims = [whole(0, 500), whole(900, 1100), claim(990, 1010), whole(2000, 100_000)]
    states = [verdict.state for verdict in check_records(Scratched(NOISE), claims)]
    assert states == ["whole", "damaged", "damaged", "whole"]


def scratched(method: Any, bad: int) -> Any:
    def read(source: FileSource, offset: int, wanted: Any) -> Any:
        if offset <= bad < offset + (wanted if isinstance(wanted, int) else len(wanted)):
            raise CannotReadError("Input/output error", where="disk")
        return method(source, offset, wanted)

    return read


def test_an_unreadable_place_on_the_disk_costs_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{index}": torch.randn(200_000) for index in range(4)}
    torch.save(state, tmp_path / "model.pt")
    bad = (tmp_path / "model.pt").read_bytes().index(state["w2"].numpy().tobytes()) + 400_000
    for name in ("read", "readinto"):
        monkeypatch.setattr(FileSource, name, scratched(getattr(FileSource, name), bad))
    found = rescue(tmp_path / "model.pt", tmp_path / "new.pt")
    assert [each.name for each in found.lost] == ["w2"]
    monkeypatch.undo()
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())
