"""Zip archives: tricks that make two readers see two files, archives beyond four gigabytes, agreement of readers.

For many tricks, the tests also show what torch and ``zipfile`` read, so that a trick that does not work is noticed.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, Entry, Tail, archive, entries, ordered, pickled, tensor, with_changes

from transload.formats.zip import read_index
from transload.io.sources import BytesSource
from transload.opening import inspect

HOSTILE = pickled(ordered({"w0": tensor("0"), "w1": DANGEROUS}))
OTHER = pickled(ordered({"z0": tensor("0"), "z1": tensor("1")}))
PLAIN = entries()


def by_torch(data: bytes, name: str) -> bytes:
    """Read a record with torch."""
    return bytes(torch._C.PyTorchFileReader(io.BytesIO(data)).get_record(name))


def by_zipfile(data: bytes, name: str) -> bytes:
    """Read a record with ``zipfile``."""
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        return opened.read(name)


def attempt(read: Callable[[bytes, str], bytes], data: bytes, name: str) -> bytes | None:
    try:
        return read(data, name)
    except Exception:  # noqa: BLE001 - readers raise errors of many types
        return None


def both(data: bytes, name: str = "data.pkl", root: str = "archive") -> tuple[bytes | None, bytes | None]:
    """The same record as read by torch and by ``zipfile``, or ``None`` on an error."""
    return attempt(by_torch, data, name), attempt(by_zipfile, data, f"{root}/{name}")


def with_pickle(pickle: bytes, **changes: Any) -> bytes:
    return archive(with_changes(entries(pickle), "data.pkl", **changes))


def renamed(old: bytes, new: bytes) -> list[Entry]:
    return [replace(entry, name=entry.name.replace(old, new, 1)) for entry in PLAIN]


def shifted() -> bytes:
    """Two archives of the same layout in a row: the end record of the second points into the first."""
    return archive(entries(OTHER)) + archive(entries(forge.state_dict()))


def unicode_path(name: bytes, other: bytes) -> bytes:
    """The extra field 0x7075, from which ``zipfile`` (Python 3.12 and later) takes another name."""
    return struct.pack("<2HBL", 0x7075, 5 + len(other), 1, zlib.crc32(name)) + other


def end_record(count: int = 0) -> bytes:
    return forge.END.pack(b"PK\x05\x06", 0, 0, count, count, 0, 0, 0)


def macosx() -> Entry:
    return Entry(b"__MACOSX/archive/._data.pkl", b"\0\5\x16\7")


# The file, its safety, its integrity, and the code of the finding.
TRICKS: dict[str, tuple[bytes, str, str, str]] = {
    "wrong checksum (CVE-2025-10156)": (with_pickle(OTHER, crc32=1), "data-only", "damaged", "crc-mismatch"),
    "wrong checksum, hostile": (with_pickle(HOSTILE, crc32=1), "dangerous", "damaged", "crc-mismatch"),
    "checksum of one record zero": (with_pickle(OTHER, crc32=0), "data-only", "damaged", "crc-mismatch"),
    "two names (CVE-2025-1944)": (
        with_pickle(OTHER, local_name=b"archive/data.txt"), "dangerous", "damaged", "zip-names-differ",
    ),
    "encrypted only in the local header (CVE-2025-1945)": (
        with_pickle(OTHER, local_flags=0x809), "dangerous", "damaged", "zip-headers-differ",
    ),
    "patch data only in the local header": (
        with_pickle(OTHER, local_flags=0x828), "dangerous", "damaged", "zip-headers-differ",
    ),
    "strongly encrypted only in the local header": (
        with_pickle(OTHER, local_flags=0x848), "dangerous", "damaged", "zip-headers-differ",
    ),
    "encrypted": (with_pickle(OTHER, flags=0x809), "unknown", "damaged", "zip-unreadable-entry"),
    "two methods": (with_pickle(OTHER, local_method=8), "dangerous", "damaged", "zip-headers-differ"),
    "two sizes": (with_pickle(OTHER, local_stored=3, local_size=3), "dangerous", "damaged", "zip-headers-differ"),
    "two sizes, one of them zero": (
        with_pickle(OTHER, flags=0x800, local_stored=0, local_size=0), "dangerous", "damaged", "zip-headers-differ",
    ),
    "two sizes, one of them wide": (
        with_pickle(
            OTHER, flags=0x800, local_stored=forge.ALL32, local_size=forge.ALL32, local_extra=forge.zip64_sizes(9)
        ),
        "dangerous", "damaged", "zip-headers-differ",
    ),
    "two checksums": (with_pickle(OTHER, flags=0x800, local_crc32=7), "data-only", "damaged", "zip-crc-differs"),
    "one name twice": (
        archive([*PLAIN, replace(PLAIN[0], data=OTHER)]), "dangerous", "damaged", "zip-duplicate-name",
    ),
    "one name in two cases": (
        archive([*PLAIN, Entry(b"archive/DATA.PKL", OTHER)]), "dangerous", "damaged", "zip-duplicate-name",
    ),
    "the index in capitals": (
        archive(renamed(b"data.pkl", b"DATA.PKL")), "needs-trust", "repairable", "zip-name-case",
    ),
    "the index in capitals, hostile": (
        with_pickle(HOSTILE, name=b"archive/Data.Pkl"), "dangerous", "repairable", "zip-name-case",
    ),
    "shifted directory": (shifted(), "dangerous", "damaged", "zip-shifted"),
    "directory at another offset": (
        archive(PLAIN, Tail(start=1)), "unknown", "damaged", "zip-misplaced",
    ),
    "NUL in a name": (
        archive(with_changes(PLAIN, "data/1", name=b"archive/data/1\0.txt")), "dangerous", "damaged", "zip-nul-name",
    ),
    "an end record in the comment": (
        archive(PLAIN, Tail(comment=end_record())), "dangerous", "damaged", "zip-two-ends",
    ),
    "count too small": (archive(PLAIN, Tail(count=3)), "unknown", "damaged", "zip-count"),
    "count too large": (archive(PLAIN, Tail(count=300)), "unknown", "damaged", "zip-count"),
    "several disks": (archive(PLAIN, Tail(disk=1)), "unknown", "damaged", "zip-multi-disk"),
    "an entry on another disk": (with_pickle(OTHER, disk=1), "unknown", "damaged", "zip-unreadable-entry"),
    "a pickle under any name (CVE-2025-1889)": (
        archive(entries(extra={"notes.txt": b"cos\ngetcwd\n(tR."})), "dangerous", "whole", "record-foreign",
    ),
    "a pickle among the storages": (
        archive(entries(extra={"data/7": b"cos\ngetcwd\n(tR."})), "dangerous", "whole", "record-unused",
    ),
    "constants.pkl added": (
        archive(entries(extra={"constants.pkl": pickled(b")")})), "unknown", "repairable", "script-no-code",
    ),
    "another pickle": (
        archive(entries(extra={"extra.pkl": pickled(DANGEROUS)})), "dangerous", "whole", "record-foreign",
    ),
    "a folder above": (archive(renamed(b"archive", b"..")), "dangerous", "whole", "zip-odd-name"),
    "the folder /": (archive(renamed(b"archive", b"")), "dangerous", "whole", "zip-odd-name"),
    "a backslash": (
        archive(with_changes(PLAIN, "data/1", name=b"archive/data\\1")), "dangerous", "damaged", "zip-odd-name",
    ),
    "two folders": (archive([*PLAIN, macosx()]), "data-only", "repairable", "zip-two-folders"),
    "two folders, the other one first": (
        archive([macosx(), *PLAIN]), "data-only", "repairable", "zip-two-folders",
    ),
    "another index in the other folder": (
        archive([*PLAIN, Entry(b"other/data.pkl", HOSTILE)]), "dangerous", "repairable", "zip-two-folders",
    ),
    "another index in no folder": (
        archive([*PLAIN, Entry(b"data.pkl", HOSTILE)]), "dangerous", "repairable", "zip-two-folders",
    ),
    "a storage marked as a folder": (
        archive(with_changes(PLAIN, "data/0", attributes=0x10)), "dangerous", "damaged", "zip-directory-record",
    ),
    "a storage named as a folder": (
        archive(with_changes(PLAIN, "data/0", name=b"archive/data/0/")), "dangerous", "damaged", "zip-directory-record",
    ),
    "stored in fewer bytes than it has": (
        archive(with_changes(PLAIN, "data/0", stored=4, time=1, crc32=zlib.crc32(bytes(4)))),
        "dangerous", "damaged", "zip-headers-differ",
    ),
    "a name in an extra field": (
        with_pickle(OTHER, extra=unicode_path(b"archive/data.pkl", b"archive/data.txt")),
        "dangerous", "damaged", "zip-names-differ",
    ),
    "an unknown version of zip": (with_pickle(OTHER, needed=99), "data-only", "repairable", "zip-one-reader"),
    "a name that is not UTF-8": (
        archive(renamed(b"archive", b"arch\xffve")), "data-only", "repairable", "zip-name-encoding",
    ),
    "one payload under two names (CVE-2024-0450)": (
        archive([*PLAIN, Entry(b"archive/data/2", in_file=False, header=0)]), "dangerous", "damaged", "zip-overlap",
    ),
    "a record that overlaps the directory": (
        archive(with_changes(PLAIN, "serialization_id", stored=200, size=200)), "dangerous", "damaged", "zip-overlap",
    ),
    "zip64: two counts": (
        archive(PLAIN, Tail(zip64=True, wide_count=3)), "dangerous", "damaged", "zip-two-sizes",
    ),
    "zip64: a wrong locator": (
        archive(PLAIN, Tail(zip64=True, locator=3), gap=b""), "dangerous", "damaged", "zip-shifted",
    ),
    "zip64: a locator beyond the file": (
        archive(PLAIN, Tail(zip64=True, locator=1 << 40)), "dangerous", "damaged", "zip-shifted",
    ),
    "zip64: invalid end record": (
        archive(PLAIN, Tail(zip64=True, wide_signature=b"PK\6\5", start=1)), "unknown", "damaged", "zip-misplaced",
    ),
    "zip64: several disks": (archive(PLAIN, Tail(zip64=True, disks=2)), "unknown", "damaged", "zip-multi-disk"),
    "zip64: an end record that is too short": (
        archive(PLAIN, Tail(zip64=True, wide_length=4)), "unknown", "damaged", "zip-multi-disk",
    ),
    "zip64: four billion entries": (
        archive(PLAIN, Tail(zip64=True, count=0xFFFF, wide_count=1 << 32)), "unknown", "damaged", "zip-count",
    ),
    "zip64: a missing size": (
        with_pickle(OTHER, stored=forge.ALL32, size=forge.ALL32, extra=forge.zip64_sizes(9)[:12]),
        "dangerous", "damaged", "zip-headers-differ",
    ),
    "zip64: two sizes for one record": (
        with_pickle(
            OTHER, stored=forge.ALL32, size=forge.ALL32, extra=forge.zip64_sizes(len(OTHER)) + forge.zip64_sizes(9)
        ),
        "dangerous", "damaged", "zip-headers-differ",
    ),
}  # fmt: skip


@each("trick", TRICKS)
def test_trick_is_reported(trick: str) -> None:
    data, safety, integrity, code = TRICKS[trick]
    checkpoint = inspect(data, verify=True)
    assert (checkpoint.safety, checkpoint.integrity) == (safety, integrity)
    assert code in {finding.code for finding in checkpoint.findings}


@each("trick", [trick for trick, checkpoint in TRICKS.items() if checkpoint[1] == "dangerous"])
def test_dangerous_trick_is_dangerous_without_verify(trick: str) -> None:
    assert inspect(TRICKS[trick][0]).safety == "dangerous"


def test_ordinary_archive_has_no_problems() -> None:
    checkpoint = inspect(archive(PLAIN), verify=True)
    assert (checkpoint.safety, checkpoint.integrity, checkpoint.problems) == ("data-only", "whole", ())
    assert both(archive(PLAIN)) == (forge.state_dict(),) * 2


# -- what torch and zipfile read ---------------------------------------------------------------------------------------


def test_torch_and_zipfile_read_two_different_indexes() -> None:
    assert both(shifted()) == (OTHER, forge.state_dict())


def test_torch_reads_either_of_two_records_of_one_name() -> None:
    def winner(fillers: int) -> bytes:
        more = [Entry(b"archive/filler%d" % i) for i in range(fillers)]
        return by_torch(archive([*PLAIN, replace(PLAIN[0], data=OTHER), *more]), "data.pkl")

    assert {winner(fillers) for fillers in range(24)} == {forge.state_dict(), OTHER}


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL", "dAtA.pKl"])
def test_torch_ignores_the_case_of_names(name: str) -> None:
    assert by_torch(archive(renamed(b"data.pkl", b"DATA.PKL")), name) == forge.state_dict()


@each(
    ("trick", "expected"),
    [
        ("wrong checksum (CVE-2025-10156)", (OTHER, None)),
        ("two names (CVE-2025-1944)", (OTHER, None)),
        ("encrypted only in the local header (CVE-2025-1945)", (OTHER, OTHER)),
        ("two methods", (OTHER, OTHER)),
        ("count too small", (None, forge.state_dict())),
        ("several disks", (None, forge.state_dict())),
        ("an unknown version of zip", (OTHER, None)),
        ("zip64: a wrong locator", (forge.state_dict(), forge.state_dict())),
        ("zip64: a locator beyond the file", (None, forge.state_dict())),
        ("zip64: two counts", (None, forge.state_dict())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torch_and_zipfile_on_the_tricks(trick: str, expected: tuple[bytes | None, bytes | None]) -> None:
    torch_read, zipfile_read = both(TRICKS[trick][0])
    assert torch_read == expected[0]
    assert zipfile_read in (expected[1], None)  # newer versions refuse more


def test_torch_does_not_read_a_storage_marked_as_a_folder() -> None:
    numel = 10 << 20  # large enough for fresh memory from the system instead of reused memory
    weights = struct.pack("<f", 1.5) * numel
    records = entries(pickled(ordered({"w": tensor("0", (numel,), (1,), numel=numel)})), {"0": weights})
    data = archive(with_changes(records, "data/0", attributes=0x10))
    assert by_zipfile(data, "archive/data/0") == weights
    assert not torch.load(io.BytesIO(data))["w"].eq(1.5).any()


def test_torch_reads_a_stored_record_by_its_size_and_zipfile_by_its_stored_size() -> None:
    torch_read, zipfile_read = both(TRICKS["stored in fewer bytes than it has"][0], "data/0")
    assert torch_read is not None
    assert zipfile_read is not None
    assert (len(torch_read), len(zipfile_read)) == (16, 4)


@pytest.mark.parametrize(("after", "ok"), [(69_000, True), (70_000, False)])
def test_torch_finds_an_end_record_further_from_the_end_than_zipfile(after: int, ok: bool) -> None:
    padded = entries(storages={"0": bytes(16), "1": bytes(16), "2": bytes(100_000)})
    data = archive(padded, Tail(after=b"x" * after))
    assert both(data) == (forge.state_dict() if ok else None, None)
    assert read_index(BytesSource(data)).ok is ok


# -- nested containers and polyglots -----------------------------------------------------------------------------------

CONTAINERS: dict[str, tuple[bytes, set[str]]] = {
    "a zip with another first signature": (b"PK\7\x08" + forge.checkpoint(HOSTILE), {"unknown", "dangerous"}),
    "a checkpoint in a zip": (archive([Entry(b"a/model.pt", forge.checkpoint(HOSTILE))]), {"unknown", "dangerous"}),
    "a checkpoint in a checkpoint": (
        forge.checkpoint(extra={"inner.pt": forge.checkpoint(HOSTILE)}),
        {"data-only", "unknown", "dangerous"},
    ),
    "a gzip": (gzip.compress(pickled(DANGEROUS)), {"unknown", "dangerous"}),
    "a 7z": (b"7z\xbc\xaf\x27\x1c\0\4" + bytes(64), {"unknown"}),
    "a tar": (forge.tar({"pickle": pickled(DANGEROUS)}), {"dangerous"}),
    "a computed magic number": (pickled(DANGEROUS) + forge.legacy(), {"dangerous"}),
    "a stream with an archive behind it": (forge.legacy(after=forge.checkpoint(HOSTILE)), {"dangerous"}),
    "a stream with a wide archive behind it": (
        forge.legacy(
            after=archive(entries(HOSTILE), Tail(zip64=True, count=0xFFFF, size=forge.ALL32, start=forge.ALL32))
        ),
        {"dangerous"},
    ),
    "a tar with an archive behind it": (forge.tar(end=bytes(1024) + forge.checkpoint(HOSTILE)), {"dangerous"}),
    "a pickle with an archive behind it": (pickled(b"]") + forge.checkpoint(), {"dangerous"}),
}


@each("trick", CONTAINERS)
def test_safety_of_containers_and_polyglots(trick: str) -> None:
    data, verdicts = CONTAINERS[trick]
    assert inspect(data).safety in verdicts


@pytest.mark.parametrize("trick", [trick for trick in CONTAINERS if "behind it" in trick])
def test_zipfile_reads_an_archive_behind_another_format(trick: str) -> None:
    assert by_zipfile(CONTAINERS[trick][0], "archive/data.pkl") in (HOSTILE, forge.state_dict())


@each("suffix", [".bin", ".pt", ".txt", ".safetensors", ".ckpt", ""])
def test_file_suffix_does_not_change_the_safety(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(forge.checkpoint(HOSTILE))
    assert inspect(path).safety == "dangerous"
    path.write_bytes(pickled(DANGEROUS))
    assert inspect(path).safety == "dangerous"


# -- the directory -----------------------------------------------------------------------------------------------------


def test_record_offsets_of_real_files_agree_with_zipfile(data: Path) -> None:
    for path in sorted(data.glob("torch-releases/*/state_dict_cpu.pt")):
        raw = path.read_bytes()
        index = read_index(BytesSource(raw))
        if raw[:2] != b"PK":
            continue
        for name, payload in forge.records(raw).items():
            record = index.records[name.removeprefix(f"{index.root}/")]
            assert record.offset is not None
            assert raw[record.offset : record.offset + record.size] == payload
        assert index.problems == ()


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
def test_rezipped_archive_has_no_problems(deflated: bool) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as out:
        for entry in PLAIN:
            out.writestr(entry.name.decode(), entry.data)
    index = read_index(BytesSource(buffer.getvalue()))
    assert index.problems == ()


def test_archive_without_checksums_is_unchecked() -> None:
    data = archive([replace(entry, crc32=0) for entry in PLAIN])
    checkpoint = inspect(data, verify=True)
    assert (checkpoint.safety, checkpoint.integrity) == ("data-only", "unchecked")
    assert [finding.code for finding in checkpoint.findings] == ["no-checksums"]
    assert [finding.code for finding in inspect(data).findings] == ["no-checksums"]


@pytest.mark.parametrize("order", ["little", "big"])
def test_byte_order_is_read_from_its_record(order: str) -> None:
    checkpoint = inspect(archive(with_changes(PLAIN, "byteorder", data=order.encode())))
    assert {storage.big_endian for storage in checkpoint.storages} == {order == "big"}
    assert checkpoint.integrity == "unchecked"


# -- beyond four gigabytes ---------------------------------------------------------------------------------------------

FAR = (1 << 32) + (1 << 28)
FAR_CRC = 0x8E9B8BF4  # of that many zeros


def big_pickle() -> bytes:
    state = {"far": tensor("1"), "big": tensor(storage=forge.storage_id("0", FAR, "ByteStorage"), shape=(FAR,))}
    return pickled(ordered(state))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse checkpoint of 4.3 GiB, which takes a few kilobytes on the disk."""
    path: Path = tmp_path_factory.mktemp("big") / "big.pt"
    forge.sparse_archive(path, FAR, FAR_CRC, big_pickle())
    if not forge.is_sparse(path):
        pytest.skip("the file system does not support sparse files")
    return path


def test_storage_beyond_four_gigabytes_is_found(big: Path) -> None:
    checkpoint = inspect(big)
    assert (checkpoint.safety, checkpoint.integrity) == ("data-only", "unchecked")
    storage = next(storage for storage in checkpoint.storages if storage.key == "1")
    assert storage.offset is not None
    assert storage.offset > FAR
    with big.open("rb") as file:
        file.seek(storage.offset)
        assert struct.unpack("<4f", file.read(16)) == (1, 2, 3, 4)


def test_records_beyond_four_gigabytes_agree_with_torch_and_zipfile(big: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(big))
    with zipfile.ZipFile(big) as opened:
        for record in inspect(big).records:
            assert reader.get_record_offset(record.name) == record.offset
            assert opened.getinfo(f"archive/{record.name}").file_size == record.size
        assert opened.read("archive/data/1") == reader.get_record("data/1")


def test_records_beyond_four_gigabytes_are_found_without_the_directory(big: Path, tmp_path: Path) -> None:
    complete = {record.name: record for record in inspect(big).records}
    cut = tmp_path / "cut.pt"
    forge.sparse_archive(cut, FAR, FAR_CRC, big_pickle())
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 22)
    checkpoint = inspect(cut)
    assert checkpoint.integrity == "repairable"
    extents = {record.name: (record.offset, record.size, record.stored) for record in checkpoint.records}
    assert extents == {name: (record.offset, record.size, record.stored) for name, record in complete.items()}


# -- agreement of readers ----------------------------------------------------------------------------------------------


def every_record(data: bytes) -> tuple[dict[str, bytes | None], dict[str, bytes | None]]:
    """All records as read by torch and by ``zipfile``, without the root folder in their names; ``None`` on an error."""
    torch_records: dict[str, bytes | None] = {}
    try:
        names = torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records()
        torch_records = {name: attempt(by_torch, data, name) for name in names}
    except Exception:  # noqa: BLE001 - as above
        torch_records = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            names = opened.namelist()
    except Exception:  # noqa: BLE001 - as above
        names = []
    root = names[0].partition("/")[0] if names else ""
    zipfile_records = {name.removeprefix(f"{root}/"): attempt(by_zipfile, data, name) for name in names}
    return torch_records, zipfile_records


NUMBERS = st.sampled_from([0, 1, 3, 4, 12, 16, 17, 64, 0xFFFF, forge.ALL32])
FLAGS = st.sampled_from([0, 8, 0x800, 0x808, 0x809, 0x828, 0x2808])
NAMES = st.sampled_from(
    [
        b"archive/data.pkl",
        b"archive/DATA.PKL",
        b"archive/data/0",
        b"archive/data/0/",
        b"data/0",
        b"b/data.pkl",
        b"archive/x\0y",
    ]
)
EXTRAS = st.sampled_from(
    [
        b"",
        forge.zip64_sizes(16),
        forge.zip64_sizes(16) * 2,
        forge.zip64_sizes(9)[:12],
        b"\1\0",
        unicode_path(b"archive/data/0", b"archive/q"),
    ]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("crc32", "stored", "size", "header", "attributes"), NUMBERS),
    **dict.fromkeys(("disk", "needed", "time"), st.sampled_from([0, 1, 20, 0xFFFF])),
    **dict.fromkeys(("local_crc32", "local_stored", "local_size"), NUMBERS),
    **dict.fromkeys(("flags", "local_flags"), FLAGS),
    **dict.fromkeys(("method", "local_method"), st.sampled_from([0, 8, 12])),
    **dict.fromkeys(("name", "local_name"), NAMES),
    **dict.fromkeys(("extra", "local_extra"), EXTRAS),
    "data": st.sampled_from([b"", bytes(16), OTHER, HOSTILE]),
    "comment": st.sampled_from([b"", b"PK\5\6", end_record()]),
    "in_file": st.booleans(),
    "listed": st.booleans(),
}
TAILS: dict[str, st.SearchStrategy[Any]] = {
    "zip64": st.booleans(),
    **dict.fromkeys(("disk", "wide_disk", "disks"), st.sampled_from([0, 1, 2])),
    **dict.fromkeys(("here", "count", "wide_count"), st.sampled_from([0, 7, 8, 9, 0xFFFF])),
    **dict.fromkeys(("size", "start", "wide_size", "wide_start", "locator"), NUMBERS | st.integers(400, 1500)),
    "wide_signature": st.sampled_from([b"PK\6\6", b"PK\6\7"]),
    "wide_length": st.sampled_from([0, 44, 100]),
    "comment": st.sampled_from([b"", b"note", b"PK\5\6", end_record(), end_record(8)]),
    "comment_length": st.sampled_from([0, 4, 22]),
    "after": st.sampled_from([b"", b"x", b"PK\5\6", end_record(), bytes(100)]),
}


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    """An archive with changed header fields, repeated or missing records, and extra bytes before or between."""
    records = list(PLAIN)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(records) - 1))
        keys = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True))
        changed = replace(records[at], **{key: draw(FIELDS[key]) for key in keys})
        records[at : at + draw(st.integers(0, 1))] = [changed]
    keys = draw(st.lists(st.sampled_from(sorted(TAILS)), max_size=3, unique=True))
    tail = Tail(**{key: draw(TAILS[key]) for key in keys})
    before = draw(st.sampled_from([b"", b"", b"", b"PK\3\4", bytes(8)]))
    gap = draw(st.sampled_from([b"", b"", b"x", forge.central_entry(PLAIN[0], 0)]))
    return archive(records, tail, before=before, gap=gap)


@settings(max_examples=400 * forge.FUZZ, suppress_health_check=[HealthCheck.too_slow])
@given(forged())
def test_readers_agree_on_any_archive_that_is_data_only(data: bytes) -> None:
    checkpoint = inspect(data, verify=True)
    if checkpoint.safety != "data-only":
        return
    torch_records, zipfile_records = every_record(data)
    for name in torch_records.keys() & zipfile_records.keys():
        assert (
            torch_records[name] is None or zipfile_records[name] is None or torch_records[name] == zipfile_records[name]
        ), name
    if checkpoint.integrity == "whole":
        assert torch_records == zipfile_records
        assert None not in torch_records.values()
