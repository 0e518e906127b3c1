"""Wrappers around a checkpoint are removed: compression, other archives, an unfinished retag."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import types
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.makers import ZstdStandIn
from tests.rescuing.makers import ROOT, flipped, hashes
from tests.rescuing.test_streams import SAFETENSORS

from transload import RescueError, rescue
from transload.errors import TransloadError
from transload.io.journal import Change, Changes, Journal
from transload.io.packed import decompressed, inflated, unpack
from transload.io.sources import BytesSource, FileSource, journal_path
from transload.retagging import TagMap, plan_of

DATA = (ROOT / "h200" / "train_cuda0.ckpt").read_bytes()
MIB = 1 << 20
LEGACY = (ROOT / "h200" / "state_dict_cuda0_legacy.pth").read_bytes()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


WRAPPED = {
    "gzip": gzip.compress(DATA),
    "bzip2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "gzip, then zeros": gzip.compress(DATA) + bytes(600),
    "gzip in two streams": gzip.compress(DATA[:999]) + gzip.compress(DATA[999:]),
    "zip": zipped({"readme.txt": b"weights", "model.pt": DATA}),
    "compressed zip": zipped({"model.pt": DATA}, zipfile.ZIP_DEFLATED),
    "zipped on macOS": zipped({"model.pt": DATA, "__MACOSX/._model.pt": b"PK\x03\x04 no"}),
    "zip in gzip": gzip.compress(zipped({"model.pt": DATA})),
    "a flipped bit in a zip": zipped({"model.pt": flipped(DATA, 5000, 5)}),
    "a flipped bit in gzip": gzip.compress(flipped(DATA, 5000, 5)),
    "junk before in gzip": gzip.compress(b"junk" + DATA),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_checkpoint_is_restored(name: str, tmp_path: Path) -> None:
    result = rescue(WRAPPED[name], tmp_path / "out.pt")
    assert result.exit_code == 0, str(result)
    assert (tmp_path / "out.pt").read_bytes() == DATA


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_truncated_compressed_file_is_rescued_up_to_the_cut(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """The data before the end is treated as a truncated file."""
    packed = pack(DATA)
    result = rescue(packed[:-200], tmp_path / "out.pt")
    assert result.exit_code in (0, 1)
    assert any("breaks off" in note for note in result.notes)
    assert hashes((tmp_path / "out.pt").read_bytes()).items() <= hashes(DATA).items()


def test_bad_gzip_checksum_around_a_file_without_checksums_gives_a_warning(tmp_path: Path) -> None:
    packed = gzip.compress(LEGACY)
    result = rescue(packed[:-8] + bytes(8), tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == LEGACY
    assert (result.exit_code, len(result.warnings)) == (1, 1)


def test_data_before_damage_in_a_compressed_file_is_rescued(tmp_path: Path) -> None:
    """Everything before it is kept, even in the same chunk."""
    pack = zlib.compressobj(0, wbits=31)  # stored blocks, so that the damaged range is known
    packed = pack.compress(DATA * 20) + pack.flush()
    place = 200_000
    broken = packed[:place] + bytes(200) + packed[place + 200 :]
    result = rescue(broken, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert [record.name for record in result.records] == ["another checkpoint"]


def test_legacy_stream_in_a_zip_is_unwrapped(tmp_path: Path) -> None:
    assert rescue(zipped({"old.pth": LEGACY}), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == LEGACY


def test_member_selects_one_of_several_checkpoints(tmp_path: Path) -> None:
    several = zipped({"a.pt": LEGACY, "b/c.pt": DATA})
    with pytest.raises(RescueError, match=r"2 checkpoints are in the archive: a.pt, b/c.pt"):
        rescue(several, tmp_path / "out.pt")
    assert rescue(several, tmp_path / "out.pt", member="b/c.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA


def test_xz_with_a_4_gib_dictionary_is_refused(tmp_path: Path) -> None:
    packed = bytearray(lzma.compress(DATA))
    end = 12 + 4 * packed[12]  # end of the first block header, followed by its checksum
    packed[packed.index(b"\x21\x01", 12, end) + 2] = 40  # a dictionary of 4 GiB
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    with pytest.raises(RescueError, match="compressed with xz, and none of it can be decompressed"):
        rescue(bytes(packed), tmp_path / "out.pt")


def test_compression_without_its_module_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RescueError, match="zstd"):
        rescue(b"\x28\xb5\x2f\xfd" + bytes(100), tmp_path / "out.pt")
    monkeypatch.setitem(sys.modules, "bz2", None)  # as in a Python built without it
    with pytest.raises(RescueError, match=r"compressed with bzip2, and no module(.|\n)*bzip2 -d FILE"):
        rescue(WRAPPED["bzip2"], tmp_path / "out.pt")


def test_zstd_is_decompressed_by_the_standard_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in with the interface of ``compression.zstd``."""
    module = types.ModuleType("compression.zstd")
    module.ZstdDecompressor = ZstdStandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    assert rescue(b"\x28\xb5\x2f\xfd" + zlib.compress(DATA), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA


def test_zstd_is_decompressed_by_zstandard_in_small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in with its interface, which cannot limit the output, so its input must be small."""
    input_sizes: list[int] = []

    class Stream(ZstdStandIn):
        def decompress(self, data: bytes, max_length: int = -1) -> bytes:
            input_sizes.append(len(data))
            return super().decompress(data, max_length)

    module = types.ModuleType("zstandard")
    module.ZstdDecompressor = lambda: types.SimpleNamespace(decompressobj=Stream)  # type: ignore[attr-defined]
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "zstandard", module)
    assert rescue(b"\x28\xb5\x2f\xfd" + zlib.compress(DATA), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert max(input_sizes) <= 1024
    packed = BytesSource(2 * (b"\x28\xb5\x2f\xfd" + zlib.compress(DATA)))
    assert b"".join(unpack(packed, "zstd", 1 << 30)) == 2 * DATA
    assert b"".join(unpack(packed, "zstd", 1000)) == DATA[:1000]


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
def test_all_streams_are_decompressed_up_to_the_limit(kind: str) -> None:
    two_streams = WRAPPED[kind] + WRAPPED[kind]
    for limit in (0, 1, len(DATA), len(DATA) + 1, 1 << 30):
        assert b"".join(unpack(BytesSource(two_streams), kind, limit)) == (2 * DATA)[:limit]
    assert list(decompressed(BytesSource(two_streams + bytes(5000)), kind, 1 << 30))  # padding is not damage
    for damaged in (two_streams[:-9], two_streams + b"junk"):
        with pytest.raises(EOFError):
            list(decompressed(BytesSource(damaged), kind, 1 << 30))


def test_number_of_compressed_streams_is_limited() -> None:
    few, many = gzip.compress(DATA) + 500 * gzip.compress(b""), 100_000 * gzip.compress(b"x")
    assert b"".join(unpack(BytesSource(few), "gzip", 1 << 30)) == DATA
    assert len(b"".join(unpack(BytesSource(many), "gzip", 1 << 30))) <= 1000


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "deflate"])
def test_decompression_does_not_read_all_trailing_data(kind: str) -> None:
    class Counted(BytesSource):
        count = 0

        def read(self, offset: int, count: int) -> bytes:
            self.count += count
            return super().read(offset, count)

    pack = zlib.compressobj(wbits=-15)
    data = pack.compress(DATA) + pack.flush() if kind == "deflate" else WRAPPED[kind]
    source = Counted(data + b"junk" * MIB)
    for limit in (1000, 1 << 30):
        source.count = 0
        for _ in inflated(source, 0, source.size, limit) if kind == "deflate" else unpack(source, kind, limit):
            pass
        assert source.count <= MIB


def unzip(data: bytes, folder: Path) -> Path:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
    return folder


def test_unzipped_directory_is_rescued(tmp_path: Path) -> None:
    folder = unzip(DATA, tmp_path / "unzipped")
    for source in (folder, next(folder.iterdir())):
        out = tmp_path / f"{source.name}.pt"
        assert rescue(source, out).exit_code == 0
        assert hashes(out.read_bytes()) == hashes(DATA)


def test_unzipped_directory_without_a_storage_loses_its_tensor(tmp_path: Path) -> None:
    folder = unzip(DATA, tmp_path / "unzipped")
    (folder / "train_cuda0" / "data" / "0").unlink()
    result = rescue(folder, tmp_path / "out.pt")
    assert result.exit_code == 1
    assert [tensor.name for tensor in result.lost] == ["model/conv.weight"]


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(RescueError, match="directory"):
        rescue(tmp_path, tmp_path.with_suffix(".pt"))


@pytest.mark.parametrize("part", ["none", "half", "all"])
def test_interrupted_retag_is_rescued_with_its_journal(part: str, tmp_path: Path) -> None:
    """The journal says what the file was before; neither is modified."""
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    source = FileSource(path)
    _, changes, _ = plan_of(source, TagMap("cpu"))
    source.close()
    changed = bytearray(DATA)
    assert len(changes.runs) > 1
    for run in changes.runs[: {"none": 0, "half": len(changes.runs) // 2}.get(part)]:
        changed[run.offset : run.offset + len(run.new)] = run.new
    path.write_bytes(changed)
    journal = Path(journal_path(str(path)))
    journal.write_bytes(Journal(changes, path.stat().st_ino).encoded())
    assert rescue(path, tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == (changed if part == "all" else DATA)
    assert path.read_bytes() == changed
    assert journal.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_in_place_of_a_journal_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    os.mkfifo(journal_path(str(path)))
    assert rescue(path, dry_run=True).how == "exact"


def test_invalid_journal_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    backward = Changes((Change(50, b"a", DATA[50:51]), Change(9, DATA[9:10], b"b")), len(DATA), len(DATA))
    for content in (b"", b"TLRETAG1", Journal(backward).encoded()):
        Path(journal_path(str(path))).write_bytes(content)
        assert rescue(path, tmp_path / "out.pt", overwrite=True).exit_code == 0
        assert (tmp_path / "out.pt").read_bytes() == DATA


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>404</html>", bytes(5000), b"\x1f\x8b\x08 no", b"PK\x03\x04", b"PK", b"\x80\x02}q\x00."],
    ids=["empty", "html", "zeros", "broken gzip", "signature", "half a signature", "pickle"],
)
def test_other_content_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TransloadError):
        rescue(content, tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_checksum_of_the_outer_zip_is_used(compression: int, tmp_path: Path) -> None:
    """A safetensors file has no checksum; that of the zip locates a flipped bit and reveals other damage."""
    plain = SAFETENSORS[:-540] + bytes(540)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("m.safetensors", plain)
    data = buffer.getvalue()
    at = data.index(SAFETENSORS[:1] + b"\2") if compression == zipfile.ZIP_STORED else 43
    at += 700 if compression == zipfile.ZIP_STORED else (data.index(b"PK\1\2") - 43) // 2
    out = tmp_path / "out.safetensors"
    result = rescue(flipped(data, at, 3), out)
    assert (result.exit_code, out.read_bytes()) == (0, plain)
    assert "flipped bit" in result.notes[-1]
    if compression == zipfile.ZIP_STORED:
        result = rescue(data[:at] + b"overwritten" + data[at + 11 :], out, overwrite=True)
        assert (result.exit_code, len(result.warnings)) == (1, 1)
