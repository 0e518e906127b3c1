"""Archives have the same bytes as from torch's writer, even where a size or an offset exceeds 32 bits."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from zlib import crc32

import pytest

from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header

TINY = [("a/data.pkl", b"\x80\x02}."), ("a/data/0", bytes(range(200))), ("a/data/1", b""), ("a/version", b"3\n")]


def archive_of(records: list[tuple[str, bytes]], alignment: int = 64) -> bytes:
    body, entries = b"", b""
    for name, data in records:
        at, raw = len(body), name.encode()
        entries += central_entry(raw, len(data), crc32(data), at)
        header = local_header(raw, len(data), at, alignment)
        body += header + data + descriptor(len(data), crc32(data), at)
    return body + entries + end_of_archive(len(records), len(body), len(entries))


def framing_of(path: Path) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """All bytes of a file outside the contents of records: as this writer writes them, and as they are."""
    expected, entries, at = [], b"", 0
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        infos = archive.infolist()
        alignment = int(archive.read(infos[0].filename.split("/")[0] + "/.storage_alignment"))
        for info in infos:
            raw, size = info.filename.encode(), info.file_size
            assert info.header_offset == at
            header = local_header(raw, size, at, alignment)
            expected.append((at, header))
            expected.append((at + len(header) + size, descriptor(size, info.CRC, at)))
            entries += central_entry(raw, size, info.CRC, at)
            at += len(header) + size + len(descriptor(size, 0, at))
        expected.append((at, entries + end_of_archive(len(infos), at, len(entries))))
        assert at + len(expected[-1][1]) == path.stat().st_size
        actual = [(at, os.pread(file.fileno(), len(part), at)) for at, part in expected]
    return expected, actual


def test_zipfile_reads_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(archive_of(TINY))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert [(info.filename, archive.read(info)) for info in archive.infolist()] == TINY


@pytest.mark.parametrize("alignment", [1, 64, 4096, 16384])
def test_records_are_aligned(alignment: int) -> None:
    archive = archive_of(TINY, alignment)
    assert archive.index(TINY[1][1]) % alignment == 0
    assert archive.index(b"3\n") % alignment == 0


def test_archive_rebuilt_from_torch_records_is_identical(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "an archive.with dots.pt"
    torch.save({"a": torch.arange(300.0), "none": torch.empty(0), "b": torch.ones(5), "0": torch.tensor(1)}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert path.read_bytes() == archive_of(records)


def test_more_than_65535_entries_are_written() -> None:
    records, entries, at = [], [], 0
    for number in range(0x10001):
        name, data = b"a/data/%d" % number, b"ab"[: number % 3]
        entries.append(central_entry(name, len(data), crc32(data), at))
        records.append(local_header(name, len(data), at) + data + descriptor(len(data), crc32(data), at))
        at += len(records[-1])
    directory = b"".join(entries)
    archive = b"".join(records) + directory + end_of_archive(len(entries), at, len(directory))
    assert archive[-22:-10] == b"PK\5\6" + bytes(4) + b"\xff" * 4
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert len(opened.infolist()) == 0x10001
        assert opened.read("a/data/65536") == b"a"


@pytest.mark.parametrize(
    "sizes",
    [[0xFFFF_FFFF, 5, 0, 7], [5, 0xFFFF_FFFF + 9, 0x1_0000_0000, 0, 3], [0xFFFF_FFFF - 2000, 5, 9]],
    ids=["first", "two", "just below"],
)
def test_headers_beyond_4_gib_equal_those_of_torch(tmp_path: Path, sizes: list[int]) -> None:
    """``skip_data`` leaves out the contents, so the file is sparse and needs no disk space."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.serialization, "skip_data") or not hasattr(torch.utils, "serialization"):
        pytest.skip("this torch has no skip_data")
    path = tmp_path / "wide.pt"
    with torch.serialization.skip_data():
        torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], path)
    expected, actual = framing_of(path)
    assert expected == actual
    assert path.stat().st_blocks * 512 < 1 << 20
