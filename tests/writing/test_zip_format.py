"""The archive's bytes are those of torch's own writer, also where 32 bits do not hold a size or an offset."""

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
    made, entries = b"", b""
    for name, data in records:
        at, raw = len(made), name.encode()
        entries += central_entry(raw, len(data), crc32(data), at)
        header = local_header(raw, len(data), at, alignment)
        made += header + data + descriptor(len(data), crc32(data), at)
    return made + entries + end_of_archive(len(records), len(made), len(entries))


def framing_of(path: Path) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Every run of bytes of a file that is no record's content: as it should be by our writer, and as it is."""
    ours, entries, at = [], b"", 0
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        infos = archive.infolist()
        alignment = int(archive.read(infos[0].filename.split("/")[0] + "/.storage_alignment"))
        for info in infos:
            raw, size = info.filename.encode(), info.file_size
            assert info.header_offset == at
            header = local_header(raw, size, at, alignment)
            ours.append((at, header))
            ours.append((at + len(header) + size, descriptor(size, info.CRC, at)))
            entries += central_entry(raw, size, info.CRC, at)
            at += len(header) + size + len(descriptor(size, 0, at))
        ours.append((at, entries + end_of_archive(len(infos), at, len(entries))))
        assert at + len(ours[-1][1]) == path.stat().st_size
        theirs = [(at, os.pread(file.fileno(), len(part), at)) for at, part in ours]
    return ours, theirs


def test_zipfile_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(archive_of(TINY))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert [(info.filename, archive.read(info)) for info in archive.infolist()] == TINY


@pytest.mark.parametrize("alignment", [1, 64, 4096, 16384])
def test_bytes_begin_at_multiples_of_the_alignment(alignment: int) -> None:
    archive = archive_of(TINY, alignment)
    assert archive.index(TINY[1][1]) % alignment == 0
    assert archive.index(b"3\n") % alignment == 0


def test_an_archive_of_torch_rebuilt_from_its_records_is_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "an archive.with dots.pt"
    torch.save({"a": torch.arange(300.0), "none": torch.empty(0), "b": torch.ones(5), "0": torch.tensor(1)}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert path.read_bytes() == archive_of(records)


def test_more_entries_than_16_bits_count() -> None:
    made, entries, at = [], [], 0
    for number in range(0x10001):
        name, data = b"a/data/%d" % number, b"ab"[: number % 3]
        entries.append(central_entry(name, len(data), crc32(data), at))
        made.append(local_header(name, len(data), at) + data + descriptor(len(data), crc32(data), at))
        at += len(made[-1])
    directory = b"".join(entries)
    archive = b"".join(made) + directory + end_of_archive(len(entries), at, len(directory))
    assert archive[-22:-10] == b"PK\5\6" + bytes(4) + b"\xff" * 4
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert len(opened.infolist()) == 0x10001
        assert opened.read("a/data/65536") == b"a"


@pytest.mark.parametrize(
    "sizes",
    [[0xFFFF_FFFF, 5, 0, 7], [5, 0xFFFF_FFFF + 9, 0x1_0000_0000, 0, 3], [0xFFFF_FFFF - 2000, 5, 9]],
    ids=["first", "two", "just below"],
)
def test_past_4_gib_the_framing_is_that_of_torch(tmp_path: Path, sizes: list[int]) -> None:
    """torch leaves out the content on request, so the file is all holes and takes no room."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.serialization, "skip_data") or not hasattr(torch.utils, "serialization"):
        pytest.skip("this torch has no skip_data")
    path = tmp_path / "wide.pt"
    with torch.serialization.skip_data():
        torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], path)
    ours, theirs = framing_of(path)
    assert ours == theirs
    assert path.stat().st_blocks * 512 < 1 << 20
