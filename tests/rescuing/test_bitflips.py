"""Verdicts on records: overlapping records are judged separately; an unreadable sector damages only its records."""

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

NOISE = random.Random(7).randbytes(300_000)  # noqa: S311 - not for cryptography


def claim(start: int, end: int, *checksums: int, method: int = 0, size: int | None = None) -> Claim:
    return Claim(start, end - start, end - start if size is None else size, method, checksums)


def intact_claim(start: int, end: int) -> Claim:
    return claim(start, end, zlib.crc32(NOISE[start:end]))


def test_overlapping_records_are_checked_independently() -> None:
    """Their total length is several times that of the file."""
    claims = [intact_claim(start, len(NOISE)) for start in (0, 0, 1, 2, 299_999, 300_000)]
    verdicts = check_records(BytesSource(NOISE), [*claims, claim(5, 290_000, 1), claim(7, 8)])
    assert [verdict.state for verdict in verdicts] == ["whole"] * 6 + ["damaged", "unchecked"]
    assert [verdict.crc32 for verdict in verdicts[:6]] == [claim_.checksums[0] for claim_ in claims]
    assert verdicts[7] == Verdict("unchecked", zlib.crc32(NOISE[7:8]), size=1)


def test_record_is_intact_if_either_checksum_matches() -> None:
    (verdict,) = check_records(BytesSource(NOISE), [claim(0, 1000, 5, zlib.crc32(NOISE[:1000]))])
    assert verdict.state == "whole"


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
@pytest.mark.parametrize("size", [0, 300, 200_000])
def test_intact_cut_and_unchecked_records_are_distinguished(method: int, size: int) -> None:
    plain = NOISE[:size]
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = packer.compress(plain) + packer.flush() if method else plain
    source = BytesSource(b"before" + raw)
    correct = claim(6, 6 + len(raw), zlib.crc32(plain), method=method, size=size)
    claims = [correct, correct._replace(stored=len(raw) + 1), intact_claim(0, 6)._replace(checksums=()), correct]
    verdicts = check_records(source, claims)
    assert [verdict.state for verdict in verdicts] == ["whole", "cut", "unchecked", "whole"]
    assert (verdicts[0].crc32, verdicts[0].size) == (zlib.crc32(plain), size)


def test_flipped_bit_is_repaired_in_a_record_checksummed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_BUFFER": 1024, "_PART": 4096, "_SMALL": 512, "_ALONE": 0}.items():
        monkeypatch.setattr(f"transload.formats.record_checksums.{name}", value)
    data = bytearray(NOISE)
    data[123_456] ^= 8
    (verdict,) = check_records(BytesSource(data), [intact_claim(9, 250_000)])
    assert (verdict.state, verdict.repairs) == (
        "repaired",
        (Repair(123_456, NOISE[123_456] ^ 8, NOISE[123_456], "", "proven"),),
    )


def test_flipped_bits_in_a_deflated_record_are_repaired() -> None:
    """If several bits give the same content, the repair is chosen that yields what zlib would have written."""
    rng = random.Random(4)  # noqa: S311 - not for cryptography
    words = [rng.randbytes(rng.randrange(2, 9)).hex().encode() for _ in range(5)]
    text = b" ".join(rng.choice(words) for _ in range(300))
    packer = zlib.compressobj(9, wbits=-15)
    raw = packer.compress(text) + packer.flush()
    assert raw[0] >> 1 & 3 == 2, "a block with dynamic Huffman codes"
    correct = claim(0, len(raw), zlib.crc32(text), method=8, size=len(text))
    certainties = set()
    for _ in range(60):
        position, bit = rng.randrange(len(raw)), rng.randrange(8)
        (verdict,) = check_records(BytesSource(flipped(raw, position, bit)), [correct])
        assert (verdict.state, verdict.crc32) == ("repaired", zlib.crc32(text))
        (repair,) = verdict.repairs
        assert (repair.position, repair.bits, repair.new) == (position, (bit,), raw[position])
        certainties.add(repair.certainty)
    assert certainties == {"proven", "probable"}


def test_flipped_padding_bits_of_a_deflated_record_are_cleared() -> None:
    """They do not affect the content; writers always leave them clear, so a set bit was flipped."""
    packer = zlib.compressobj(wbits=-15)
    parts = [packer.compress(b"first"), packer.flush(zlib.Z_SYNC_FLUSH), packer.compress(b"last"), packer.flush()]
    raw = b"".join(parts)
    correct = claim(0, len(raw), zlib.crc32(b"firstlast"), method=8, size=9)
    for position in (len(raw) - 1, raw.index(b"\0\0\xff\xff") - 1):
        (verdict,) = check_records(BytesSource(flipped(raw, position, 7)), [correct])
        assert verdict.state == "whole"
        assert [(repair.position, repair.new, repair.certainty) for repair in verdict.repairs] == [
            (position, raw[position], "proven")
        ]


class UnreadableSource(BytesSource):
    """A disk with an unreadable sector at byte 1,000."""

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        if offset <= 1000 < offset + len(buffer):
            raise CannotReadError("Input/output error", where="disk")
        return super().readinto(offset, buffer, ahead=ahead)


def test_unreadable_sector_damages_only_the_records_that_contain_it() -> None:
    claims = [intact_claim(0, 500), intact_claim(900, 1100), claim(990, 1010), intact_claim(2000, 100_000)]
    states = [verdict.state for verdict in check_records(UnreadableSource(NOISE), claims)]
    assert states == ["whole", "damaged", "damaged", "whole"]


def failing_at(method: Any, bad: int) -> Any:
    def read(source: FileSource, offset: int, size_or_buffer: Any) -> Any:
        if offset <= bad < offset + (size_or_buffer if isinstance(size_or_buffer, int) else len(size_or_buffer)):
            raise CannotReadError("Input/output error", where="disk")
        return method(source, offset, size_or_buffer)

    return read


def test_unreadable_sector_loses_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{index}": torch.randn(200_000) for index in range(4)}
    torch.save(state, tmp_path / "model.pt")
    bad = (tmp_path / "model.pt").read_bytes().index(state["w2"].numpy().tobytes()) + 400_000
    for name in ("read", "readinto"):
        monkeypatch.setattr(FileSource, name, failing_at(getattr(FileSource, name), bad))
    result = rescue(tmp_path / "model.pt", tmp_path / "new.pt")
    assert [tensor.name for tensor in result.lost] == ["w2"]
    monkeypatch.undo()
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())
