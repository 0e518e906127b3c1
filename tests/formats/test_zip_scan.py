"""Archives without their directory: what is left is found, and nothing more is claimed."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import forge, makers
from tests.each import each
from tests.forge import Entry, archive, entries, ordered, pickled, tensor, with_changes

from transload.checkpoint import Checkpoint
from transload.formats.zip import read_index
from transload.formats.zip_scan import walk_index
from transload.io.sources import BytesSource
from transload.opening import inspect

SIZES = (40, 0, 7, 300)


def saved() -> bytes:
    """A state dict with four storages, one of them empty, as torch saves it."""
    state = {f"w{i}": torch.arange(count, dtype=torch.float32) for i, count in enumerate(SIZES)}
    return makers.saved(state)


def extents(checkpoint: Checkpoint) -> dict[str, tuple[int | None, int, int]]:
    return {record.name: (record.offset, record.size, record.stored) for record in checkpoint.records}


def incomplete_tensors(checkpoint: Checkpoint) -> set[str]:
    """Names of the tensors whose bytes are not all in the file."""
    return {name for storage in checkpoint.storages if storage.stored < storage.nbytes for name in storage.tensors}


def without_directory(data: bytes) -> bytes:
    return data[: data.index(b"PK\x01\x02")]


@each("release", ["1.6.0-py3.7.16", "1.12.1-py3.10.13", "2.1.2-py3.10.13", "2.13.0-py3.11.7"])
@each("name", ["state_dict_cpu.pt", "train_cuda0.ckpt", "whole_custom_cuda0.pt", "traced_cpu.pt"])
def test_walk_finds_the_records_of_the_directory(data: Path, release: str, name: str) -> None:
    raw = (data / "torch-releases" / f"torch-{release}" / name).read_bytes()
    index = read_index(BytesSource(raw))
    walked = walk_index(BytesSource(without_directory(raw)), index)
    assert walked.root == index.root
    assert walked.records == index.records


@pytest.mark.parametrize("name", ["state_dict_cuda0_other_format.pt"])
def test_walk_reads_the_first_version_of_the_zip_format(data: Path, name: str) -> None:
    raw = (data / "torch-releases" / "torch-1.4.0-py3.7.16" / name).read_bytes()
    checkpoint = inspect(without_directory(raw), verify=True)
    assert checkpoint.integrity == "repairable"
    assert extents(checkpoint) == extents(inspect(raw))


def test_every_prefix_reports_exactly_the_bytes_it_has() -> None:
    complete = saved()
    complete_storages = {storage.key: storage for storage in inspect(complete).storages}
    for length in range(len(b"PK..") + 26 + len("archive/data.pkl"), len(complete)):
        checkpoint = inspect(complete[:length])
        assert checkpoint.integrity in ("repairable", "damaged"), length
        assert checkpoint.safety in ("data-only", "unknown"), length
        for storage in checkpoint.storages:
            complete_storage = complete_storages[storage.key]
            assert complete_storage.offset is not None
            assert storage.stored == max(0, min(complete_storage.nbytes, length - complete_storage.offset)), (
                length,
                storage.key,
            )
        if checkpoint.integrity == "repairable":
            assert len(checkpoint.storages) == len(complete_storages)
            assert not incomplete_tensors(checkpoint), length
        elif checkpoint.storages and "pickle-broken" not in {p.code for p in checkpoint.problems}:
            assert incomplete_tensors(checkpoint), length


@pytest.mark.parametrize("missing", [1, 3, 22, 100])
def test_file_without_its_last_bytes_is_repairable(missing: int) -> None:
    complete = saved()
    checkpoint = inspect(complete[:-missing], verify=True)
    assert (checkpoint.safety, checkpoint.integrity) == ("data-only", "repairable")
    assert [tensor.name for tensor in checkpoint.tensors] == ["w0", "w1", "w2", "w3"]
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(io.BytesIO(complete[:-missing]))


def test_missing_empty_storage_is_repairable() -> None:
    complete = makers.saved({"w": torch.ones(9), "e": torch.empty(0)})
    offset = next(s.offset for s in inspect(complete).storages if s.key == "0")
    assert offset is not None
    checkpoint = inspect(complete[: offset + 36])
    assert checkpoint.integrity == "repairable"
    assert "storage-empty-missing" in {problem.code for problem in checkpoint.problems}


def test_truncated_and_missing_storages_are_named() -> None:
    complete = saved()
    offset = next(s.offset for s in inspect(complete).storages if s.key == "2")
    assert offset is not None
    checkpoint = inspect(complete[: offset + 5])
    assert checkpoint.integrity == "damaged"
    assert incomplete_tensors(checkpoint) == {"w2", "w3"}
    text = "\n".join(line for finding in checkpoint.findings for line in finding.evidence)
    assert "storage 2: 5 of 28 bytes are in the file; needed by w2" in text
    assert "storage 3: needed by w3" in text


def test_flipped_bit_is_found_without_the_directory() -> None:
    intact = saved()
    offset = next(s.offset for s in inspect(intact).storages if s.key == "3")
    assert offset is not None
    damaged = bytearray(without_directory(intact))
    damaged[offset + 11] ^= 1
    checkpoint = inspect(bytes(damaged), verify=True)
    assert [problem.where for problem in checkpoint.problems if problem.code == "crc-mismatch"] == ["data/3"]


def test_zip_signatures_inside_a_tensor_are_ignored() -> None:
    trap = b"PK\x07\x08" + bytes(12) + b"PK\x03\x04" + bytes(28)
    index = pickled(ordered({"w": tensor("0", (len(trap) // 4,), (1,), numel=len(trap) // 4)}))
    complete = forge.checkpoint(index, {"0": trap})
    checkpoint = inspect(without_directory(complete), verify=True)
    assert checkpoint.integrity == "repairable"
    assert extents(checkpoint) == extents(inspect(complete))


@each("length", [1, 4095, 4096, (1 << 20) - 8, (1 << 20) - 1, 1 << 20, (1 << 20) + 3, 3 << 20])
def test_record_of_unknown_length_ends_at_its_descriptor(length: int) -> None:
    """TorchScript writes the sizes of tensors after their bytes."""
    data = (b"PK\x07\x08\0\0\0\0" * (length // 8 + 1))[:length]
    complete = archive(
        [Entry(b"m/data/0", data), Entry(b"m/constants.pkl", pickled(b")")), Entry(b"m/version", b"3\n")]
    )
    walked = walk_index(BytesSource(without_directory(complete)), read_index(BytesSource(complete)))
    assert [(name, record.size) for name, record in walked.records.items()] == [
        ("data/0", length), ("constants.pkl", 4), ("version", 2),
    ]  # fmt: skip


def test_walk_of_a_rezipped_archive() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in entries():
            out.writestr(entry.name.decode(), entry.data)
    complete = buffer.getvalue()
    checkpoint = inspect(without_directory(complete), verify=True)
    assert checkpoint.integrity == "repairable"
    assert extents(checkpoint) == extents(inspect(complete))


def test_both_copies_of_a_duplicate_record_are_judged() -> None:
    hostile = pickled(forge.DANGEROUS)
    twice = archive([replace(entries()[0], data=hostile), *entries()])
    checkpoint = inspect(without_directory(twice))
    assert checkpoint.safety == "dangerous"
    assert "zip-found-twice" in {problem.code for problem in checkpoint.problems}
    harmless = archive([entries()[0], *entries()])
    assert inspect(without_directory(harmless)).safety == "unknown"


def test_call_in_a_truncated_file_is_dangerous() -> None:
    hostile = forge.checkpoint(pickled(ordered({"w0": tensor("0"), "w1": forge.DANGEROUS})))
    first = hostile.index(b"getcwd\n") + 7
    assert inspect(hostile[:first]).safety == "dangerous"
    for length in range(first, len(hostile)):
        assert inspect(hostile[:length]).safety == "dangerous", length


def test_descriptor_inside_a_pickle_does_not_hide_a_call() -> None:
    fake = struct.pack("<4s3L", b"PK\x07\x08", 0, 4, 4)
    hidden = pickled(b"U" + bytes([len(fake)]) + fake + b"0" + forge.DANGEROUS)
    assert hidden.index(fake) == 4
    for end in (b"", b"."):
        complete = archive(with_changes(entries(), "data.pkl", data=hidden.removesuffix(b".") + end))
        assert inspect(without_directory(complete)).safety == "dangerous"


class CountingSource(BytesSource):
    """Counts the bytes that are read."""

    nbytes_read = 0

    def read(self, offset: int, count: int) -> bytes:
        out = super().read(offset, count)
        self.nbytes_read += len(out)
        return out


def test_many_false_ends_do_not_multiply_the_bytes_read() -> None:
    """A thousand records that claim to end soon, while their pickles all go on to the end of the file."""
    head = forge.LOCAL.pack(b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, 5, 0) + b"a.pkl"
    fake = struct.pack("<4s3L", b"PK\x07\x08", 0, 3, 3)
    data = head + b"\x80\x02B" + (fake[:4] + struct.pack("<3L", 0, 3, 3) + head + b"\x80\x02V") * 1000 + b"N" * 100_000
    source = CountingSource(data)
    walk_index(source, read_index(BytesSource(b"PK\x03\x04")))
    assert source.nbytes_read < 100 * len(data)


def test_end_of_a_deflated_record_near_the_end_of_the_file(data: Path) -> None:
    raw = (data / "torch-releases" / "torch-2.13.0-py3.11.7" / "traced_cpu.pt").read_bytes()
    index = read_index(BytesSource(raw))
    deflated = next(record for record in index.records.values() if record.method)
    end = (deflated.offset or 0) + deflated.stored + 16
    walked = walk_index(BytesSource(raw[: end + 5]), read_index(BytesSource(b"PK\x03\x04")))
    assert walked.records[deflated.name] == deflated
    assert f"up to byte {end} of" in walked.problems[-1].detail


def test_zeros_at_the_end_are_reported() -> None:
    complete = saved()
    checkpoint = inspect(complete[: len(complete) // 2] + bytes(len(complete) - len(complete) // 2))
    assert "zeros-at-end" in {problem.code for problem in checkpoint.problems}
    assert checkpoint.integrity == "damaged"


def test_walk_over_thousands_of_empty_headers_ends() -> None:
    header = forge.LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    walked = walk_index(BytesSource(header * 20_000), read_index(BytesSource(b"PK\x03\x04")))
    assert 0 < len(walked.records) <= 20_000


def test_many_small_pickles_do_not_multiply_the_bytes_read() -> None:
    """Reading a megabyte for each of a hundred thousand tiny pickles would take a hundred gigabytes."""
    data = archive([Entry(b"m/%d.pkl" % i, pickled(b"N")) for i in range(2000)])
    source = CountingSource(without_directory(data))
    walk_index(source, read_index(BytesSource(b"PK\x03\x04")))
    assert source.nbytes_read < 1000 * len(data)


@each("size", [0, 1, 4, 29, 30, 31])
def test_first_few_bytes_are_inspected_without_an_error(size: int) -> None:
    checkpoint = inspect(forge.checkpoint()[:size])
    assert checkpoint.integrity in ("damaged", "repairable", "not-a-checkpoint")
    assert checkpoint.safety == "unknown"


def test_absurd_storage_size_is_damage() -> None:
    index = pickled(ordered({"w": tensor("0", (4,), (1,), numel=1 << 70)}))
    complete = forge.checkpoint(index, {"0": struct.pack("<4f", 1, 2, 3, 4)})
    checkpoint = inspect(without_directory(complete))
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")


def test_wrong_size_in_a_header_is_damage() -> None:
    wrong = with_changes(entries(), "data/0", flags=0x800, local_stored=1 << 31, local_size=1 << 31)
    checkpoint = inspect(without_directory(archive(wrong)))
    assert checkpoint.integrity == "damaged"
    assert all(storage.stored <= storage.nbytes for storage in checkpoint.storages)
