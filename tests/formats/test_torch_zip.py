"""The zip format of torch.save: its records, its index, its storages, and the small records around them."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, Entry, archive, entries, ordered, pickled, remade, storage_id, tensor, tuple_of
from tests.release import RELEASE

from transload.checkpoint import Checkpoint
from transload.formats import torch_zip
from transload.judge import inspect


def codes(told: Checkpoint) -> set[str]:
    return {problem.code for problem in told.problems}


def loads(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - torch raises whatever it meets
        return False
    return True


def test_what_torch_saves_has_no_problem() -> None:
    buffer = io.BytesIO()
    held = {"weight": torch.ones(3, 4), "epoch": 3, "names": ["a", "b"]}
    torch.save(held, buffer)
    told = inspect(buffer.getvalue(), verify=True)
    assert (told.safety, told.integrity, told.problems) == ("data-only", "whole", ())
    assert dict(told.facts)["version"] == "3"
    assert [(t.name, t.dtype, t.shape, t.stride) for t in told.tensors] == [("weight", "float32", (3, 4), (4, 1))]
    assert {(leaf.name, leaf.text) for leaf in told.leaves} == {("epoch", "3"), ("names/0", "a"), ("names/1", "b")}


# A change to the small records, the code we give it, and whether torch loads the file all the same.
NOTES = {
    "no version": ([entry for entry in entries() if b"version" not in entry.name[8:16]], "zip-no-version", False),
    "version 0": (remade(entries(), "version", data=b"0\n"), "zip-bad-version", False),
    "version 11": (remade(entries(), "version", data=b"11\n"), "zip-bad-version", False),
    "version abc": (remade(entries(), "version", data=b"abc"), "zip-bad-version", False),
    "version empty": (remade(entries(), "version", data=b""), "zip-bad-version", False),
    "version with more": (remade(entries(), "version", data=b"3abc"), "zip-bad-version", True),
    "version of 30 digits": (remade(entries(), "version", data=b"9" * 30), "zip-bad-version", False),
    "byte order with a line end": (remade(entries(), "byteorder", data=b"little\n"), "zip-bad-byteorder", False),
    "byte order in capitals": (remade(entries(), "byteorder", data=b"LITTLE"), "zip-bad-byteorder", False),
    "byte order no text": (remade(entries(), "byteorder", data=b"\xff\xfe"), "zip-bad-byteorder", False),
    "alignment no number": (remade(entries(), ".storage_alignment", data=b"abc"), "zip-bad-note", RELEASE < (2, 7)),
    "alignment of 30 digits": (remade(entries(), ".storage_alignment", data=b"9" * 30), "zip-bad-note", True),
    "id no text": (remade(entries(), ".data/serialization_id", data=b"\xff" * 40), "zip-bad-note", False),
    "a long version": (remade(entries(), "version", data=b"3" + b" " * 5000), "record-unreadable", True),
}  # fmt: skip


@each("note", NOTES)
def test_a_small_record_that_torch_fails_on_is_told(note: str) -> None:
    held, code, works = NOTES[note]
    told = inspect(archive(held))
    assert code in codes(told)
    assert loads(archive(held)) is works
    assert not told.ok


@pytest.mark.parametrize("missing", ["byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"])
def test_small_records_that_older_releases_lack_are_not_missed(missing: str) -> None:
    held = [entry for entry in entries() if not entry.name.endswith(missing.encode())]
    assert len(held) == len(entries()) - 1
    assert inspect(archive(held)).problems == ()
    assert loads(archive(held))


@pytest.mark.parametrize(("wanted", "stored"), [(16, 12), (16, 20), (16, 0), (0, 16)])
def test_a_record_must_be_as_long_as_the_index_says_cve_2026_24747(wanted: int, stored: int) -> None:
    held = pickled(ordered({"w": tensor("0", (wanted // 4,), (1,), numel=wanted // 4)}))
    data = forge.checkpoint(held, {"0": bytes(stored)})
    told = inspect(data)
    assert told.integrity == "damaged"
    problem = next(problem for problem in told.problems if problem.code == "storage-size")
    assert f"has {stored} bytes, the index needs {wanted}" in problem.detail
    assert "needed by w" in problem.detail
    assert loads(data) is (RELEASE < (2, 10) and stored > 0)


@pytest.mark.skipif(not hasattr(torch.serialization, "skip_data"), reason="needs a newer torch")
def test_numbers_that_were_never_written_are_told_without_reading_them() -> None:
    buffer = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(1000)}, buffer)
    told = inspect(buffer.getvalue())
    assert (told.integrity, [problem.code for problem in told.problems]) == ("damaged", ["storage-skipped"])
    assert "needed by w" in told.problems[0].detail
    assert torch.load(io.BytesIO(buffer.getvalue()))["w"].tolist() != [1.0] * 1000


def test_a_missing_storage_is_named_with_what_needs_it() -> None:
    told = inspect(forge.checkpoint(storages={"0": bytes(16)}))
    assert [(p.where, p.detail) for p in told.problems] == [("storage 1", "needed by w1")]
    assert told.integrity == "damaged"
    assert {storage.key: storage.offset is None for storage in told.storages} == {"0": False, "1": True}


@each("key", ["../data/0", "/etc/passwd", "0/../1", "", "\0", "x" * 5000])
def test_a_key_leads_to_a_record_or_nowhere(key: str) -> None:
    told = inspect(forge.checkpoint(pickled(ordered({"w": tensor(key)})), {"0": bytes(16)}))
    assert told.integrity == "damaged"
    assert "storage-missing" in codes(told)
    assert all(storage.offset is None for storage in told.storages)


def test_a_key_may_be_a_number() -> None:
    data = forge.checkpoint(pickled(ordered({"w": tensor(0)})), {"0": bytes(16)})
    assert inspect(data).tensors[0].storage == "0"
    assert loads(data)


def test_one_key_with_two_sizes_is_a_conflict() -> None:
    held = pickled(ordered({"a": tensor("0", numel=4), "b": tensor("0", (2,), numel=2)}))
    told = inspect(forge.checkpoint(held, {"0": bytes(16)}))
    assert (told.safety, told.integrity) == ("unknown", "damaged")
    assert "storage-conflict" in codes(told)


@pytest.mark.parametrize("index", ["data.pkl", "Data.pkl", "DATA.PKL"])
def test_the_index_is_found_as_torch_finds_it(index: str) -> None:
    data = archive(remade(entries(), "data.pkl", name=f"archive/{index}".encode()))
    told = inspect(data)
    assert [tensor.name for tensor in told.tensors] == ["w0", "w1"]
    assert ("zip-name-case" in codes(told)) is (index != "data.pkl")
    assert loads(data)


def test_without_an_index_only_bytes_are_left() -> None:
    held = [entry for entry in entries() if not entry.name.endswith(b"data.pkl")]
    told = inspect(archive(held))
    assert (told.format, told.safety, told.integrity) == ("torch-zip", "unknown", "damaged")
    assert "zip-no-pickle" in codes(told)
    assert {record.name for record in told.records} >= {"data/0", "data/1"}


@pytest.mark.parametrize("junk", [b"N.", b"\0", b"cos\ngetcwd\n)R."], ids=["a pickle", "a byte", "a call"])
def test_bytes_after_the_index_are_never_data_only(junk: bytes) -> None:
    told = inspect(forge.checkpoint(forge.state_dict() + junk))
    assert told.safety in ("unknown", "dangerous")
    assert "pickle-trailing-bytes" in codes(told)


def test_the_index_may_be_empty() -> None:
    told = inspect(forge.checkpoint(b"", {}))
    assert (told.safety, told.integrity) == ("unknown", "damaged")


def test_records_that_nobody_reads_are_noted_and_looked_at() -> None:
    told = inspect(forge.checkpoint(extra={"data/9": bytes(4), "readme.md": b"# hello", "a.bin": bytes(9)}))
    assert codes(told) == {"record-unused", "record-foreign"}
    assert (told.safety, told.ok) == ("data-only", True)


@pytest.mark.parametrize("count", [1, 65, 300])
def test_a_hostile_pickle_hides_behind_no_number_of_others(count: int) -> None:
    extra = {f"note{i}": b"x" for i in range(count)} | {"z.pkl": b"cos\ngetcwd\n)R."}
    assert inspect(forge.checkpoint(extra=extra)).safety == "dangerous"


def test_what_is_too_large_to_look_at_is_not_called_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "_STRAY_WINDOWS", (1 << 10, 1 << 12, 1 << 20))
    huge = Entry(b"archive/huge.bin", bytes(1 << 20), method=8, flags=0x800)
    lying = replace(huge, size=1 << 30, local_size=1 << 30)
    assert inspect(archive([*entries(), huge])).safety == "data-only"
    told = inspect(archive([*entries(), lying]))
    assert (told.safety, "record-unseen" in codes(told)) == ("unknown", True)
    for content, safety in ((bytes(2 << 20), "data-only"), (b"N0" * (1 << 20), "unknown")):
        assert inspect(archive([*entries(), Entry(b"archive/long", content)])).safety == safety


@pytest.mark.parametrize("filler", [70_000, 600_000])
def test_a_hostile_pickle_may_begin_late(filler: int) -> None:
    content = b"\x80\x02" + b"N0" * filler + DANGEROUS + b"."
    assert inspect(archive([*entries(), Entry(b"archive/late", content)])).safety == "dangerous"


def test_the_first_form_of_the_zip_format_is_read() -> None:
    """torch 1.4: ``version`` first, storages under ``tensors/``; no later torch reads it."""
    held = [Entry(b"archive/version", b"1\n"), Entry(b"archive/data.pkl", forge.state_dict(1))]
    data = archive([*held, Entry(b"archive/tensors/0", struct.pack("<4f", 1, 2, 3, 4))])
    told = inspect(data, verify=True)
    assert (told.safety, told.integrity, told.problems) == ("data-only", "whole", ())
    offset = told.tensors[0].file_offset
    assert offset is not None
    assert struct.unpack_from("<4f", data, offset) == (1, 2, 3, 4)
    assert not loads(data)


def test_compressed_storages_have_no_place_in_the_file() -> None:
    data = archive([replace(entry, method=8, flags=0x800) for entry in entries()])
    told = inspect(data, verify=True)
    assert codes(told) == {"zip-compressed"}
    assert (told.safety, told.integrity) == ("data-only", "repairable")
    assert [(s.offset, s.compressed, s.stored) for s in told.storages] == [(None, True, 16)] * 2
    assert [tensor.file_offset for tensor in told.tensors] == [None, None]
    assert loads(data)


@each(
    ("pid", "code"),
    [
        (tuple_of("storage", forge.name("torch", "FloatStorage"), "0", "cpu") + b"Q", "storage-malformed"),
        (tuple_of("stowage", forge.name("torch", "FloatStorage"), "0", "cpu", 4) + b"Q", "pickle-odd-id"),
        (tuple_of("storage", forge.name("os", "getcwd"), "0", "cpu", 4) + b"Q", "storage-malformed"),
        (tuple_of("storage", "FloatStorage", "0", "cpu", 4) + b"Q", "storage-malformed"),
        (storage_id("0", "4"), "storage-malformed"),
        (storage_id(None, 4), "storage-malformed"),
        (b"P0\n", "pickle-odd-id"),
        (forge.number(7) + b"Q", "pickle-odd-id"),
    ],
    ids=["short", "no storage", "other class", "no class", "text for a number", "no key", "text", "number"],
)
def test_a_persistent_id_of_another_shape_is_never_data_only(pid: bytes, code: str) -> None:
    told = inspect(forge.checkpoint(pickled(ordered({"w": tensor(storage=pid)})), {"0": bytes(16)}))
    assert told.safety in ("unknown", "dangerous")
    assert told.integrity == "damaged"
    assert codes(told) & {code, "tensor-broken"}
