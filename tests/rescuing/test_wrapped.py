"""What is around a checkpoint is taken off: compression, other archives, an unfinished retag."""

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
from tests.rescuing.makers import ROOT, flipped, hashes
from tests.rescuing.test_streams import SAFE

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
    "gzip in two runs": gzip.compress(DATA[:999]) + gzip.compress(DATA[999:]),
    "zip": zipped({"readme.txt": b"weights", "model.pt": DATA}),
    "compressed zip": zipped({"model.pt": DATA}, zipfile.ZIP_DEFLATED),
    "by a mac": zipped({"model.pt": DATA, "__MACOSX/._model.pt": b"PK\x03\x04 no"}),
    "zip in gzip": gzip.compress(zipped({"model.pt": DATA})),
    "a flipped bit in a zip": zipped({"model.pt": flipped(DATA, 5000, 5)}),
    "a flipped bit in gzip": gzip.compress(flipped(DATA, 5000, 5)),
    "junk before in gzip": gzip.compress(b"junk" + DATA),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_unwrapped(name: str, tmp_path: Path) -> None:
    made = rescue(WRAPPED[name], tmp_path / "out.pt")
    assert made.exit_code == 0, str(made)
    assert (tmp_path / "out.pt").read_bytes() == DATA


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_cut_compressed_data(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """What was decompressed before the end is a file that was cut."""
    packed = pack(DATA)
    made = rescue(packed[:-200], tmp_path / "out.pt")
    assert made.exit_code in (0, 1)
    assert any("breaks off" in note for note in made.notes)
    assert hashes((tmp_path / "out.pt").read_bytes()).items() <= hashes(DATA).items()


def test_damaged_compression_around_a_file_without_checksums(tmp_path: Path) -> None:
    packed = gzip.compress(LEGACY)
    made = rescue(packed[:-8] + bytes(8), tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == LEGACY
    assert (made.exit_code, len(made.warnings)) == (1, 1)


def test_damage_in_the_middle_of_compressed_data(tmp_path: Path) -> None:
    """Everything before it is there, also what is in the same piece."""
    pack = zlib.compressobj(0, wbits=31)  # stored blocks: what is damaged is known
    packed = pack.compress(DATA * 20) + pack.flush()
    place = 200_000
    broken = packed[:place] + bytes(200) + packed[place + 200 :]
    made = rescue(broken, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert made.exit_code == 0


def test_a_legacy_stream_in_a_zip(tmp_path: Path) -> None:
    assert rescue(zipped({"old.pth": LEGACY}), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == LEGACY


def test_one_of_several(tmp_path: Path) -> None:
    several = zipped({"a.pt": LEGACY, "b/c.pt": DATA})
    with pytest.raises(RescueError, match=r"2 checkpoints are in the archive: a.pt, b/c.pt"):
        rescue(several, tmp_path / "out.pt")
    assert rescue(several, tmp_path / "out.pt", member="b/c.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA


def test_xz_that_asks_for_gigabytes_of_memory(tmp_path: Path) -> None:
    packed = bytearray(lzma.compress(DATA))
    end = 12 + 4 * packed[12]  # of the header of its first block, after which its checksum follows
    packed[packed.index(b"\x21\x01", 12, end) + 2] = 40  # a dictionary of 4 GiB
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    with pytest.raises(RescueError, match="compressed with xz, and none of it can be decompressed"):
        rescue(bytes(packed), tmp_path / "out.pt")


def test_zstd_needs_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RescueError, match="zstd"):
        rescue(b"\x28\xb5\x2f\xfd" + bytes(100), tmp_path / "out.pt")
    monkeypatch.setitem(sys.modules, "bz2", None)  # as in a Python that was built without it
    with pytest.raises(RescueError, match=r"compressed with bzip2, and no module(.|\n)*bzip2 -d FILE"):
        rescue(WRAPPED["bzip2"], tmp_path / "out.pt")


def test_zstd_by_the_module_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in with the interface of Python's own module."""

    class Decompressor:
        def __init__(self) -> None:
            self._inner = zlib.decompressobj()
            self.needs_input = True

        @property
        def eof(self) -> bool:
            return self._inner.eof

        @property
        def unused_data(self) -> bytes:
            return self._inner.unused_data

        def decompress(self, data: bytes, max_length: int = -1) -> bytes:  # noqa: ARG002 - gives all it has
            return self._inner.decompress(data.removeprefix(b"\x28\xb5\x2f\xfd"))

    module = types.ModuleType("compression.zstd")
    module.ZstdDecompressor = Decompressor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    assert rescue(b"\x28\xb5\x2f\xfd" + zlib.compress(DATA), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA


def test_zstd_by_the_module_zstandard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in with its interface: it has no limit on what it gives at once, and so is fed little."""
    fed: list[int] = []

    class Stream:
        def __init__(self) -> None:
            self._inner = zlib.decompressobj()

        @property
        def eof(self) -> bool:
            return self._inner.eof

        @property
        def unused_data(self) -> bytes:
            return self._inner.unused_data

        def decompress(self, data: bytes) -> bytes:
            fed.append(len(data))
            return self._inner.decompress(data.removeprefix(b"\x28\xb5\x2f\xfd"))

    module = types.ModuleType("zstandard")
    module.ZstdDecompressor = lambda: types.SimpleNamespace(decompressobj=Stream)  # type: ignore[attr-defined]
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "zstandard", module)
    assert rescue(b"\x28\xb5\x2f\xfd" + zlib.compress(DATA), tmp_path / "out.pt").exit_code == 0
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert max(fed) <= 1024
    packed = BytesSource(2 * (b"\x28\xb5\x2f\xfd" + zlib.compress(DATA)))
    assert b"".join(unpack(packed, "zstd", 1 << 30)) == 2 * DATA
    assert b"".join(unpack(packed, "zstd", 1000)) == DATA[:1000]


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
def test_all_streams_are_decompressed_up_to_the_limit(kind: str) -> None:
    whole = WRAPPED[kind] + WRAPPED[kind]
    for limit in (0, 1, len(DATA), len(DATA) + 1, 1 << 30):
        assert b"".join(unpack(BytesSource(whole), kind, limit)) == (2 * DATA)[:limit]
    assert list(decompressed(BytesSource(whole + bytes(5000)), kind, 1 << 30))  # padding is not damage
    for cut in (whole[:-9], whole + b"junk"):
        with pytest.raises(EOFError):
            list(decompressed(BytesSource(cut), kind, 1 << 30))


def test_streams_without_content_end_early() -> None:
    few, many = gzip.compress(DATA) + 500 * gzip.compress(b""), 100_000 * gzip.compress(b"x")
    assert b"".join(unpack(BytesSource(few), "gzip", 1 << 30)) == DATA
    assert len(b"".join(unpack(BytesSource(many), "gzip", 1 << 30))) <= 1000


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "deflate"])
def test_nothing_is_read_after_the_last_byte_that_is_needed(kind: str) -> None:
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


def unpacked(data: bytes, folder: Path) -> Path:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
    return folder


def test_an_unzipped_directory(tmp_path: Path) -> None:
    folder = unpacked(DATA, tmp_path / "unzipped")
    for place in (folder, next(folder.iterdir())):
        out = tmp_path / f"{place.name}.pt"
        assert rescue(place, out).exit_code == 0
        assert hashes(out.read_bytes()) == hashes(DATA)


def test_an_unzipped_directory_without_a_storage(tmp_path: Path) -> None:
    folder = unpacked(DATA, tmp_path / "unzipped")
    (folder / "train_cuda0" / "data" / "0").unlink()
    made = rescue(folder, tmp_path / "out.pt")
    assert made.exit_code == 1
    assert [each.name for each in made.lost] == ["model/conv.weight"]


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(RescueError, match="directory"):
        rescue(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize("part", ["none", "half", "all"])
def test_an_interrupted_retag(part: str, tmp_path: Path) -> None:
    """The journal beside a file tells what it was, and both stay as they are."""
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
def test_a_pipe_in_place_of_a_journal_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    os.mkfifo(journal_path(str(path)))
    assert rescue(path, dry_run=True).how == "exact"


def test_a_journal_of_nonsense(tmp_path: Path) -> None:
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
    ids=["empty", "html", "zeros", "no gzip", "signature", "two letters", "pickle"],
)
def test_not_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TransloadError):
        rescue(content, tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_the_checksum_of_the_archive_around_it(compression: int, tmp_path: Path) -> None:
    """A safetensors file has none: that of the zip tells which bit was flipped, and of other damage."""
    plain = SAFE[:-540] + bytes(540)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", compression) as archive:
        archive.writestr("m.safetensors", plain)
    data = held.getvalue()
    at = data.index(SAFE[:1] + b"\2") if compression == zipfile.ZIP_STORED else 43
    at += 700 if compression == zipfile.ZIP_STORED else (data.index(b"PK\1\2") - 43) // 2
    out = tmp_path / "out.safetensors"
    made = rescue(flipped(data, at, 3), out)
    assert (made.exit_code, out.read_bytes()) == (0, plain)
    assert "flipped bit" in made.notes[-1]
    if compression == zipfile.ZIP_STORED:
        made = rescue(data[:at] + b"overwritten" + data[at + 11 :], out, overwrite=True)
        assert (made.exit_code, len(made.warnings)) == (1, 1)
