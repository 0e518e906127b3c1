"""Archives without their directory: what can still be found, and that no more is claimed than that."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import Entry, archive, entries, ordered, pickled, remade, tensor

from transload.checkpoint import Checkpoint
from transload.formats.zip import read_index
from transload.formats.zip_scan import walk_index
from transload.io.sources import BytesSource
from transload.judge import inspect

SIZES = (40, 0, 7, 300)


def saved() -> bytes:
    """A state dict of four storages as torch writes it, one of them empty."""
    buffer = io.BytesIO()
    held = {f"w{i}": torch.arange(count, dtype=torch.float32) for i, count in enumerate(SIZES)}
    torch.save(held, buffer)
    return buffer.getvalue()


def places(told: Checkpoint) -> dict[str, tuple[int | None, int, int]]:
    return {record.name: (record.offset, record.size, record.stored) for record in told.records}


def lost(told: Checkpoint) -> set[str]:
    """Names of the tensors whose bytes are not all in the file."""
    return {name for storage in told.storages if storage.stored < storage.nbytes for name in storage.tensors}


def without_directory(data: bytes) -> bytes:
    return data[: data.index(b"PK\x01\x02")]


@each("release", ["1.6.0-py3.7.16", "1.12.1-py3.10.13", "2.1.2-py3.10.13", "2.13.0-py3.11.7"])
@each("name", ["state_dict_cpu.pt", "train_cuda0.ckpt", "whole_custom_cuda0.pt", "traced_cpu.pt"])
def test_the_walk_finds_what_the_directory_says(data: Path, release: str, name: str) -> None:
    raw = (data / "torch-releases" / f"torch-{release}" / name).read_bytes()
    index = read_index(BytesSource(raw))
    walked = walk_index(BytesSource(without_directory(raw)), index)
    assert walked.root == index.root
    assert walked.records == index.records


@pytest.mark.parametrize("name", ["state_dict_cuda0_other_format.pt"])
def test_the_walk_reads_the_first_zip_form_too(data: Path, name: str) -> None:
    raw = (data / "torch-releases" / "torch-1.4.0-py3.7.16" / name).read_bytes()
    told = inspect(without_directory(raw), verify=True)
    assert told.integrity == "repairable"
    assert places(told) == places(inspect(raw))


def test_a_file_cut_anywhere_claims_exactly_what_it_holds() -> None:
    whole = saved()
    truth = {storage.key: storage for storage in inspect(whole).storages}
    for length in range(len(b"PK..") + 26 + len("archive/data.pkl"), len(whole)):
        told = inspect(whole[:length])
        assert told.integrity in ("repairable", "damaged"), length
        assert told.safety in ("data-only", "unknown"), length
        for storage in told.storages:
            mine = truth[storage.key]
            assert mine.offset is not None
            assert storage.stored == max(0, min(mine.nbytes, length - mine.offset)), (length, storage.key)
        if told.integrity == "repairable":
            assert len(told.storages) == len(truth)
            assert not lost(told), length
        elif told.storages and "pickle-broken" not in {p.code for p in told.problems}:
            assert lost(told), length


@pytest.mark.parametrize("missing", [1, 3, 22, 100])
def test_a_file_without_its_last_bytes_is_repairable(missing: int) -> None:
    whole = saved()
    told = inspect(whole[:-missing], verify=True)
    assert (told.safety, told.integrity) == ("data-only", "repairable")
    assert [tensor.name for tensor in told.tensors] == ["w0", "w1", "w2", "w3"]
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(io.BytesIO(whole[:-missing]))


def test_an_empty_storage_has_no_bytes_to_lose() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(9), "e": torch.empty(0)}, buffer)
    whole = buffer.getvalue()
    offset = next(s.offset for s in inspect(whole).storages if s.key == "0")
    assert offset is not None
    told = inspect(whole[: offset + 36])
    assert told.integrity == "repairable"
    assert "storage-empty-missing" in {problem.code for problem in told.problems}


def test_a_cut_storage_is_named_and_the_others_are_whole() -> None:
    whole = saved()
    offset = next(s.offset for s in inspect(whole).storages if s.key == "2")
    assert offset is not None
    told = inspect(whole[: offset + 5])
    assert told.integrity == "damaged"
    assert lost(told) == {"w2", "w3"}
    text = "\n".join(line for finding in told.findings for line in finding.evidence)
    assert "storage 2: 5 of 28 bytes are in the file; needed by w2" in text
    assert "storage 3: needed by w3" in text


def test_a_flipped_byte_is_found_by_the_descriptors_alone() -> None:
    whole = saved()
    offset = next(s.offset for s in inspect(whole).storages if s.key == "3")
    assert offset is not None
    bad = bytearray(without_directory(whole))
    bad[offset + 11] ^= 1
    told = inspect(bytes(bad), verify=True)
    assert [problem.where for problem in told.problems if problem.code == "crc-mismatch"] == ["data/3"]


def test_signatures_inside_a_tensor_do_not_lead_astray() -> None:
    trap = b"PK\x07\x08" + bytes(12) + b"PK\x03\x04" + bytes(28)
    held = pickled(ordered({"w": tensor("0", (len(trap) // 4,), (1,), numel=len(trap) // 4)}))
    whole = forge.checkpoint(held, {"0": trap})
    told = inspect(without_directory(whole), verify=True)
    assert told.integrity == "repairable"
    assert places(told) == places(inspect(whole))


@each("length", [1, 4095, 4096, (1 << 20) - 8, (1 << 20) - 1, 1 << 20, (1 << 20) + 3, 3 << 20])
def test_a_record_of_unknown_length_ends_at_its_own_checksum(length: int) -> None:
    """TorchScript writes tensors before it says how large they are."""
    data = (b"PK\x07\x08\0\0\0\0" * (length // 8 + 1))[:length]
    whole = archive([Entry(b"m/data/0", data), Entry(b"m/constants.pkl", pickled(b")")), Entry(b"m/version", b"3\n")])
    walked = walk_index(BytesSource(without_directory(whole)), read_index(BytesSource(whole)))
    assert [(name, record.size) for name, record in walked.records.items()] == [
        ("data/0", length), ("constants.pkl", 4), ("version", 2),
    ]  # fmt: skip


def test_rezipped_records_carry_their_sizes() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in entries():
            out.writestr(entry.name.decode(), entry.data)
    whole = buffer.getvalue()
    told = inspect(without_directory(whole), verify=True)
    assert told.integrity == "repairable"
    assert places(told) == places(inspect(whole))


def test_a_record_found_twice_is_judged_twice() -> None:
    hostile = pickled(forge.DANGEROUS)
    twice = archive([replace(entries()[0], data=hostile), *entries()])
    told = inspect(without_directory(twice))
    assert told.safety == "dangerous"
    assert "zip-found-twice" in {problem.code for problem in told.problems}
    harmless = archive([entries()[0], *entries()])
    assert inspect(without_directory(harmless)).safety == "unknown"


def test_hostile_or_not_is_told_from_what_is_left() -> None:
    hostile = forge.checkpoint(pickled(ordered({"w0": tensor("0"), "w1": forge.DANGEROUS})))
    first = hostile.index(b"getcwd\n") + 7
    assert inspect(hostile[:first]).safety == "dangerous"
    for length in range(first, len(hostile)):
        assert inspect(hostile[:length]).safety == "dangerous", length


def test_a_descriptor_inside_a_pickle_hides_nothing_behind_it() -> None:
    fake = struct.pack("<4s3L", b"PK\x07\x08", 0, 4, 4)
    hidden = pickled(b"U" + bytes([len(fake)]) + fake + b"0" + forge.DANGEROUS)
    assert hidden.index(fake) == 4
    for end in (b"", b"."):
        whole = archive(remade(entries(), "data.pkl", data=hidden.removesuffix(b".") + end))
        assert inspect(without_directory(whole)).safety == "dangerous"


class CountingSource(BytesSource):
    """Counts the bytes that are read."""

    nbytes_read = 0

    def read(self, offset: int, count: int) -> bytes:
        out = super().read(offset, count)
        self.nbytes_read += len(out)
        return out


def test_bytes_behind_many_false_ends_are_run_once() -> None:
    """A thousand records that end soon, by what they say, and whose pickles all go on to the end of the file."""
    head = forge.LOCAL.pack(b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, 5, 0) + b"a.pkl"
    fake = struct.pack("<4s3L", b"PK\x07\x08", 0, 3, 3)
    data = head + b"\x80\x02B" + (fake[:4] + struct.pack("<3L", 0, 3, 3) + head + b"\x80\x02V") * 1000 + b"N" * 100_000
    source = CountingSource(data)
    walk_index(source, read_index(BytesSource(b"PK\x03\x04")))
    assert source.nbytes_read < 100 * len(data)


def test_a_packed_record_ends_where_it_says_in_the_last_bytes_of_a_file(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-2.13.0-py3.11.7" / "traced_cpu.pt").read_bytes()
    index = read_index(BytesSource(raw))
    packed = next(record for record in index.records.values() if record.method)
    end = (packed.offset or 0) + packed.stored + 16
    walked = walk_index(BytesSource(raw[: end + 5]), read_index(BytesSource(b"PK\x03\x04")))
    assert walked.records[packed.name] == packed
    assert f"up to byte {end} of" in walked.problems[-1].detail


def test_zeros_at_the_end_are_told() -> None:
    whole = saved()
    told = inspect(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert "zeros-at-end" in {problem.code for problem in told.problems}
    assert told.integrity == "damaged"


def test_a_million_empty_headers_are_not_walked_for_ever() -> None:
    header = forge.LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    walked = walk_index(BytesSource(header * 20_000), read_index(BytesSource(b"PK\x03\x04")))
    assert 0 < len(walked.records) <= 20_000


def test_pickles_one_after_another_are_each_read_once() -> None:
    """A megabyte read for each of a hundred thousand tiny pickles would be a hundred gigabytes."""
    data = archive([Entry(b"m/%d.pkl" % i, pickled(b"N")) for i in range(2000)])
    source = CountingSource(without_directory(data))
    walk_index(source, read_index(BytesSource(b"PK\x03\x04")))
    assert source.nbytes_read < 1000 * len(data)


@each("size", [0, 1, 4, 29, 30, 31])
def test_a_few_bytes_are_no_reason_to_fail(size: int) -> None:
    told = inspect(forge.checkpoint()[:size])
    assert told.integrity in ("damaged", "repairable", "not-a-checkpoint")
    assert told.safety == "unknown"


def test_sizes_that_are_absurd_end_the_walk() -> None:
    held = pickled(ordered({"w": tensor("0", (4,), (1,), numel=1 << 70)}))
    whole = forge.checkpoint(held, {"0": struct.pack("<4f", 1, 2, 3, 4)})
    told = inspect(without_directory(whole))
    assert (told.safety, told.integrity) == ("unknown", "damaged")


def test_a_header_that_lies_about_its_size_is_not_believed() -> None:
    lying = remade(entries(), "data/0", flags=0x800, local_stored=1 << 31, local_size=1 << 31)
    told = inspect(without_directory(archive(lying)))
    assert told.integrity == "damaged"
    assert all(storage.stored <= storage.nbytes for storage in told.storages)
