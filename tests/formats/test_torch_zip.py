"""The zip format of ``torch.save``: the index, the storages, and the small records beside them."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, Entry, archive, entries, ordered, pickled, storage_id, tensor, tuple_of, with_changes
from tests.makers import codes, saved
from tests.release import RELEASE

from transload.formats import torch_zip
from transload.opening import inspect


def loads(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - torch raises errors of many types
        return False
    return True


def test_file_saved_by_torch_has_no_problems() -> None:
    state = {"weight": torch.ones(3, 4), "epoch": 3, "names": ["a", "b"]}
    checkpoint = inspect(saved(state), verify=True)
    assert (checkpoint.safety, checkpoint.integrity, checkpoint.problems) == ("data-only", "whole", ())
    assert dict(checkpoint.facts)["version"] == "3"
    assert [(t.name, t.dtype, t.shape, t.stride) for t in checkpoint.tensors] == [("weight", "float32", (3, 4), (4, 1))]
    assert {(leaf.name, leaf.text) for leaf in checkpoint.leaves} == {
        ("epoch", "3"),
        ("names/0", "a"),
        ("names/1", "b"),
    }


# A changed small record, the code of the problem, and whether torch loads the file anyway.
SMALL_RECORDS = {
    "no version": ([entry for entry in entries() if b"version" not in entry.name[8:16]], "zip-no-version", False),
    "version 0": (with_changes(entries(), "version", data=b"0\n"), "zip-bad-version", False),
    "version 11": (with_changes(entries(), "version", data=b"11\n"), "zip-bad-version", False),
    "version abc": (with_changes(entries(), "version", data=b"abc"), "zip-bad-version", False),
    "version empty": (with_changes(entries(), "version", data=b""), "zip-bad-version", False),
    "version with trailing letters": (with_changes(entries(), "version", data=b"3abc"), "zip-bad-version", True),
    "version of 30 digits": (with_changes(entries(), "version", data=b"9" * 30), "zip-bad-version", False),
    "byte order with a line feed": (with_changes(entries(), "byteorder", data=b"little\n"), "zip-bad-byteorder", False),
    "byte order in capitals": (with_changes(entries(), "byteorder", data=b"LITTLE"), "zip-bad-byteorder", False),
    "byte order is not text": (with_changes(entries(), "byteorder", data=b"\xff\xfe"), "zip-bad-byteorder", False),
    "alignment not a number": (
        with_changes(entries(), ".storage_alignment", data=b"abc"), "zip-bad-note", RELEASE < (2, 7),
    ),
    "alignment of 30 digits": (with_changes(entries(), ".storage_alignment", data=b"9" * 30), "zip-bad-note", True),
    "id is not text": (with_changes(entries(), ".data/serialization_id", data=b"\xff" * 40), "zip-bad-note", False),
    "a long version": (with_changes(entries(), "version", data=b"3" + b" " * 5000), "record-unreadable", True),
}  # fmt: skip


@each("case", SMALL_RECORDS)
def test_invalid_small_record_is_reported(case: str) -> None:
    records, code, torch_loads = SMALL_RECORDS[case]
    checkpoint = inspect(archive(records))
    assert code in codes(checkpoint)
    assert loads(archive(records)) is torch_loads
    assert not checkpoint.ok


@pytest.mark.parametrize("missing", ["byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"])
def test_small_records_that_older_releases_lack_are_optional(missing: str) -> None:
    records = [entry for entry in entries() if not entry.name.endswith(missing.encode())]
    assert len(records) == len(entries()) - 1
    assert inspect(archive(records)).problems == ()
    assert loads(archive(records))


@pytest.mark.parametrize(("needed", "stored"), [(16, 12), (16, 20), (16, 0), (0, 16)])
def test_storage_record_of_wrong_length_is_damage_cve_2026_24747(needed: int, stored: int) -> None:
    index = pickled(ordered({"w": tensor("0", (needed // 4,), (1,), numel=needed // 4)}))
    data = forge.checkpoint(index, {"0": bytes(stored)})
    checkpoint = inspect(data)
    assert checkpoint.integrity == "damaged"
    problem = next(problem for problem in checkpoint.problems if problem.code == "storage-size")
    assert f"has {stored} bytes, the index needs {needed}" in problem.detail
    assert "needed by w" in problem.detail
    assert loads(data) is (RELEASE < (2, 10) and stored > 0)


@pytest.mark.skipif(not hasattr(torch.serialization, "skip_data"), reason="needs a newer torch")
def test_file_saved_with_skip_data_is_damaged() -> None:
    buffer = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(1000)}, buffer)
    checkpoint = inspect(buffer.getvalue())
    assert (checkpoint.integrity, [problem.code for problem in checkpoint.problems]) == ("damaged", ["storage-skipped"])
    assert "needed by w" in checkpoint.problems[0].detail
    assert torch.load(io.BytesIO(buffer.getvalue()))["w"].tolist() != [1.0] * 1000


def test_missing_storage_is_reported_with_its_tensors() -> None:
    checkpoint = inspect(forge.checkpoint(storages={"0": bytes(16)}))
    assert [(p.where, p.detail) for p in checkpoint.problems] == [("storage 1", "needed by w1")]
    assert checkpoint.integrity == "damaged"
    assert {storage.key: storage.offset is None for storage in checkpoint.storages} == {"0": False, "1": True}


@each("key", ["../data/0", "/etc/passwd", "0/../1", "", "\0", "x" * 5000])
def test_storage_key_cannot_lead_outside_the_archive(key: str) -> None:
    checkpoint = inspect(forge.checkpoint(pickled(ordered({"w": tensor(key)})), {"0": bytes(16)}))
    assert checkpoint.integrity == "damaged"
    assert "storage-missing" in codes(checkpoint)
    assert all(storage.offset is None for storage in checkpoint.storages)


def test_storage_key_may_be_a_number() -> None:
    data = forge.checkpoint(pickled(ordered({"w": tensor(0)})), {"0": bytes(16)})
    assert inspect(data).tensors[0].storage == "0"
    assert loads(data)


def test_storage_key_with_two_sizes_is_a_conflict() -> None:
    index = pickled(ordered({"a": tensor("0", numel=4), "b": tensor("0", (2,), numel=2)}))
    checkpoint = inspect(forge.checkpoint(index, {"0": bytes(16)}))
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")
    assert "storage-conflict" in codes(checkpoint)


@pytest.mark.parametrize("index", ["data.pkl", "Data.pkl", "DATA.PKL"])
def test_index_name_is_case_insensitive_as_in_torch(index: str) -> None:
    data = archive(with_changes(entries(), "data.pkl", name=f"archive/{index}".encode()))
    checkpoint = inspect(data)
    assert [tensor.name for tensor in checkpoint.tensors] == ["w0", "w1"]
    assert ("zip-name-case" in codes(checkpoint)) is (index != "data.pkl")
    assert loads(data)


def test_archive_without_an_index_is_damaged() -> None:
    records = [entry for entry in entries() if not entry.name.endswith(b"data.pkl")]
    checkpoint = inspect(archive(records))
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity) == ("torch-zip", "unknown", "damaged")
    assert "zip-no-pickle" in codes(checkpoint)
    assert {record.name for record in checkpoint.records} >= {"data/0", "data/1"}


@pytest.mark.parametrize("junk", [b"N.", b"\0", b"cos\ngetcwd\n)R."], ids=["a pickle", "a byte", "a call"])
def test_bytes_after_the_index_are_never_data_only(junk: bytes) -> None:
    checkpoint = inspect(forge.checkpoint(forge.state_dict() + junk))
    assert checkpoint.safety in ("unknown", "dangerous")
    assert "pickle-trailing-bytes" in codes(checkpoint)


def test_empty_index_is_damage() -> None:
    checkpoint = inspect(forge.checkpoint(b"", {}))
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")


def test_unused_records_are_reported_but_data_only() -> None:
    checkpoint = inspect(forge.checkpoint(extra={"data/9": bytes(4), "readme.md": b"# hello", "a.bin": bytes(9)}))
    assert set(codes(checkpoint)) == {"record-unused", "record-foreign"}
    assert (checkpoint.safety, checkpoint.ok) == ("data-only", True)


@pytest.mark.parametrize("count", [1, 65, 300])
def test_hostile_pickle_after_many_records_is_dangerous(count: int) -> None:
    extra = {f"note{i}": b"x" for i in range(count)} | {"z.pkl": b"cos\ngetcwd\n)R."}
    assert inspect(forge.checkpoint(extra=extra)).safety == "dangerous"


def test_record_too_large_to_examine_has_unknown_safety(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "_STRAY_WINDOWS", (1 << 10, 1 << 12, 1 << 20))
    huge = Entry(b"archive/huge.bin", bytes(1 << 20), method=8, flags=0x800)
    oversized = replace(huge, size=1 << 30, local_size=1 << 30)
    assert inspect(archive([*entries(), huge])).safety == "data-only"
    checkpoint = inspect(archive([*entries(), oversized]))
    assert (checkpoint.safety, "record-unseen" in codes(checkpoint)) == ("unknown", True)
    for content, safety in ((bytes(2 << 20), "data-only"), (b"N0" * (1 << 20), "unknown")):
        assert inspect(archive([*entries(), Entry(b"archive/long", content)])).safety == safety


@pytest.mark.parametrize("filler", [70_000, 600_000])
def test_call_late_in_an_unused_record_is_dangerous(filler: int) -> None:
    content = b"\x80\x02" + b"N0" * filler + DANGEROUS + b"."
    assert inspect(archive([*entries(), Entry(b"archive/late", content)])).safety == "dangerous"


def test_first_version_of_the_zip_format_is_read() -> None:
    """torch 1.4: ``version`` comes first, storages are in ``tensors/``. Later releases of torch cannot read it."""
    records = [Entry(b"archive/version", b"1\n"), Entry(b"archive/data.pkl", forge.state_dict(1))]
    data = archive([*records, Entry(b"archive/tensors/0", struct.pack("<4f", 1, 2, 3, 4))])
    checkpoint = inspect(data, verify=True)
    assert (checkpoint.safety, checkpoint.integrity, checkpoint.problems) == ("data-only", "whole", ())
    offset = checkpoint.tensors[0].file_offset
    assert offset is not None
    assert struct.unpack_from("<4f", data, offset) == (1, 2, 3, 4)
    assert not loads(data)


def test_compressed_storages_have_no_offset() -> None:
    data = archive([replace(entry, method=8, flags=0x800) for entry in entries()])
    checkpoint = inspect(data, verify=True)
    assert set(codes(checkpoint)) == {"zip-compressed"}
    assert (checkpoint.safety, checkpoint.integrity) == ("data-only", "repairable")
    assert [(s.offset, s.compressed, s.stored) for s in checkpoint.storages] == [(None, True, 16)] * 2
    assert [tensor.file_offset for tensor in checkpoint.tensors] == [None, None]
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
    ids=[
        "too short",
        "not a storage",
        "other class",
        "class is a string",
        "count is a string",
        "no key",
        "text",
        "number",
    ],
)
def test_malformed_persistent_id_is_never_data_only(pid: bytes, code: str) -> None:
    checkpoint = inspect(forge.checkpoint(pickled(ordered({"w": tensor(storage=pid)})), {"0": bytes(16)}))
    assert checkpoint.safety in ("unknown", "dangerous")
    assert checkpoint.integrity == "damaged"
    assert set(codes(checkpoint)) & {code, "tensor-broken"}
