"""Files are written and read back in one pass, and appear completely or not at all, whatever fails."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import threading
import zipfile
from contextlib import nullcontext
from pathlib import Path
from struct import pack
from typing import Any
from zlib import crc32

import pytest
import torch
from tests.each import each
from tests.shared import open_elements

import transload
from transload.converting import convert
from transload.errors import (
    CannotWriteError,
    ConvertError,
    FullDiskError,
    NoDirectoryError,
    OverflowRefusedError,
    TransloadError,
    UsageError,
)
from transload.io import pool
from transload.opening import inspect
from transload.writing import output, transfer
from transload.writing.output import Bundle
from transload.writing.plan import member_name
from transload.writing.transfer import ConversionJob, TargetTensor

DATA = Path(__file__).parent.parent / "data"
STATE = DATA / "h200" / "state_dict_cuda0.pt"


def safetensors(sizes: dict[str, int]) -> bytes:
    """A safetensors file whose bytes have few repetitions."""
    table, at = {}, 0
    for name, size in sizes.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + bytes(number * number % 251 for number in range(at))


SIZES = {"a": 5, "b": 70_001, "c": 0, "d": 4096, "e": 200_000, "f": 1}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def written(source: bytes, path: Path, head: bytes) -> tuple[bytes, list[int | None], list[int]]:
    progress: list[int] = []
    with open_elements(source) as content, path.open("w+b") as file:
        entries = [TargetTensor(tensor.name, tensor, tensor.dtype) for tensor in content.checkpoint.tensors]
        transfer.write_file(file.fileno(), head, entries, ConversionJob(content, progress=progress.append), "x")
    return path.read_bytes(), [entry.crc32 for entry in entries], progress


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("chunk", [4096, 3 * 4096, 1 << 20])
@pytest.mark.parametrize("head", [b"", b"12345678", bytes(4096)], ids=["no head", "short head", "page-sized head"])
def test_write_file_writes_head_and_tensors_with_checksums(
    tmp_path: Path, chunk: int, head: bytes, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    monkeypatch.setattr(transfer, "_DIRECT_FROM", 0 if direct else 1 << 60)
    source = safetensors(SIZES)
    body = source[8 + int.from_bytes(source[:8], "little") :]
    data, sums, progress = written(source, tmp_path / "a", head)
    assert data == head + body
    ends = [sum(list(SIZES.values())[: number + 1]) for number in range(len(SIZES))]
    assert sums == [crc32(body[end - size : end]) for end, size in zip(ends, SIZES.values(), strict=True)]
    assert sum(progress) == 2 * sum(SIZES.values())  # written and compared


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_write_file_falls_back_when_direct_io_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    import fcntl

    real = getattr(os, call)
    refused: list[int] = []
    barrier = threading.Barrier(2)  # two threads are refused before either can turn direct I/O off

    def refusing_direct_io(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            refused.append(offset)
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(2)
            raise OSError(errno.EINVAL, "not aligned")
        return int(real(descriptor, data, offset))

    monkeypatch.setattr(transfer, "CHUNK", 8192)
    monkeypatch.setattr(transfer, "_DIRECT_FROM", 0)
    source = safetensors(SIZES)
    monkeypatch.setattr(os, call, refusing_direct_io)
    data, _, _ = written(source, tmp_path / "a", b"head")
    assert data == b"head" + source[8 + int.from_bytes(source[:8], "little") :]
    assert len(refused) <= 8  # at most once per thread; never where the file system has no O_DIRECT


def test_write_file_works_when_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusingThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transfer, "CHUNK", 4096)
    monkeypatch.setattr(pool, "Thread", RefusingThread)
    source = safetensors(SIZES)
    data, _, progress = written(source, tmp_path / "a", b"head")
    assert data == b"head" + source[8 + int.from_bytes(source[:8], "little") :]
    assert sum(progress) == 2 * sum(SIZES.values())  # written and compared


def test_corruption_on_disk_is_detected_by_reading_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def corrupting(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = real(descriptor, buffers, offset, *flags)
        if offset <= 65536 < offset + count:
            buffers[0][65536 - offset] ^= 1
        return count

    source = tmp_path / "a.safetensors"
    source.write_bytes(safetensors(SIZES))
    with open_elements(source) as content:  # so that the source is read before the patch
        content.checkpoint  # noqa: B018
    monkeypatch.setattr(os, "preadv", corrupting)
    raw = source.read_bytes()
    with pytest.raises(ConvertError, match="read back differ"):
        convert(raw, tmp_path / "b.safetensors")
    assert files(tmp_path) == {"a.safetensors"}


@pytest.mark.parametrize("to", ["torch", "npz", "raw"])
def test_every_other_format_is_read_back_unless_verify_is_off(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = safetensors({"a": 5, "e": 200_000})
    real, mark = os.preadv, raw[-150_000:-149_000]

    def corrupting(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = real(descriptor, buffers, offset, *flags)
        at = bytes(buffers[0]).find(mark)
        if at >= 0:
            buffers[0][at] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", corrupting)
    with pytest.raises(ConvertError, match="read back differ") as caught:
        convert(raw, tmp_path / "b", to=to)
    assert "e" in (caught.value.what[0], caught.value.where[-1])
    assert files(tmp_path) == set()
    convert(raw, tmp_path / "b", to=to, verify=False)
    assert files(tmp_path) == {"b"}


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz", "b/"])
def test_damaged_record_in_the_source_is_refused_unless_verify_is_off(tmp_path: Path, name: str) -> None:
    raw = bytearray(STATE.read_bytes())
    with open_elements(STATE) as content:
        storage = next(storage for storage in content.checkpoint.storages if "conv.weight" in storage.tensors)
    assert storage.offset is not None
    raw[storage.offset + 5] ^= 0x10
    with pytest.raises(ConvertError, match=r"it has 1 damaged record: .*conv\.weight"):
        convert(bytes(raw), f"{tmp_path}/{name}")
    assert files(tmp_path) == set()
    convert(bytes(raw), f"{tmp_path}/{name}", verify=False)


def test_unreadable_source_leaves_no_target(tmp_path: Path) -> None:
    for raw in (STATE.read_bytes()[:-500], b"<html>", b""):
        with pytest.raises(TransloadError):
            convert(raw, tmp_path / "b.safetensors")
    with pytest.raises(transload.CannotReadError):
        convert(tmp_path / "absent", tmp_path / "b.safetensors")
    assert files(tmp_path) == set()
    (tmp_path / "b.safetensors").write_bytes(b"old")
    with pytest.raises(transload.CannotReadError):
        convert(tmp_path / "absent", tmp_path / "b.safetensors", overwrite=True)


# -- all or nothing


def raise_disk_full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz", "b/"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_full_disk_leaves_the_old_target(
    tmp_path: Path, name: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "b/":
        (tmp_path / name).write_bytes(b"old")
    for function in ("write", "writev", "pwrite", "copy_file_range"):
        monkeypatch.setattr(os, function, raise_disk_full, raising=False)
    with pytest.raises(FullDiskError, match="disk is full"):
        convert(STATE, f"{tmp_path}/{name}", overwrite=True, verify=verify)
    monkeypatch.undo()
    assert [(tmp_path / file).read_bytes() for file in files(tmp_path)] == ([] if name == "b/" else [b"old"])


def test_failed_rename_removes_all_new_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, renamed = os.replace, []

    def failing_at_the_third(source: str, target: str) -> None:
        renamed.append(target)
        if len(renamed) == 3:
            raise OSError(errno.EIO, "failing")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing_at_the_third)
    with pytest.raises(CannotWriteError):
        convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    monkeypatch.undo()
    assert len(renamed) == 3
    assert files(tmp_path) == set()
    convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    assert "m.safetensors.index.json" in files(tmp_path)


@pytest.mark.parametrize("at", range(1, 8))
def test_failed_rename_restores_all_old_shards(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = safetensors({"a": 100, "b": 100, "c": 100, "d": 100})
    second = first[:-400] + bytes(400)
    convert(first, tmp_path / "m.safetensors", max_shard_size=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, renamed = os.replace, []

    def failing_once(source: str, target: str) -> None:
        renamed.append(target)
        if len(renamed) == at:
            raise OSError(errno.EIO, "failing")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing_once)
    fails = 2 <= at <= 6  # rename 1 is of the temporary index, which is optional; 6 is of the index itself
    with pytest.raises(CannotWriteError) if fails else nullcontext():
        convert(second, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert (after == before) == fails


@pytest.mark.parametrize("fails", [False, True], ids=["done", "fails"])
def test_without_hard_links_no_index_exists_while_shards_are_replaced(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    before, index, seen = files(tmp_path), tmp_path / "m.safetensors.index.json", []
    old, replace = index.read_bytes(), os.replace

    def watched(source: str, target: str) -> None:
        seen.append(index.exists())
        if fails:
            raise OSError(5, "no")
        replace(source, target)

    def refuse(*_: str) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", watched)
    with pytest.raises(CannotWriteError) if fails else nullcontext():
        convert(STATE, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
    assert seen
    assert not any(seen)
    assert files(tmp_path) == before
    assert index.read_bytes() == old


def test_malformed_index_is_replaced(tmp_path: Path) -> None:
    for text in ("[", "[]", '{"weight_map": {"a": 1}}'):
        (tmp_path / "m.safetensors.index.json").write_text(text, encoding="utf-8")
        convert(STATE, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
        assert inspect(tmp_path / "m.safetensors.index.json").tensors


def test_temporary_index_is_loadable_and_can_be_undone(tmp_path: Path) -> None:
    result = convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    index, shards = result.files[-1], list(result.files[:-1])
    text, before = Path(index).read_bytes(), inspect(index)
    old_shards = output._OldShards(index, shards)
    for shard in shards:
        Path(shard).unlink()
    temporary = inspect(index)
    assert temporary.ok
    assert [tensor.name for tensor in temporary.tensors] == [tensor.name for tensor in before.tensors]
    assert {Path(name).suffix for name in json.loads(Path(index).read_bytes())["weight_map"].values()} == {
        ".safetensors"
    }
    old_shards.restore(touched=True)
    assert files(tmp_path) == {Path(name).name for name in result.files}
    assert Path(index).read_bytes() == text


def test_shards_replace_a_single_file(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "m.safetensors")
    result = convert(STATE, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
    assert files(tmp_path) == {Path(name).name for name in result.files}
    assert "m.safetensors" not in files(tmp_path)


def test_interrupt_leaves_no_files(tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    for name in ("b.safetensors", "b.pt", "b.npz", "b/"):
        with pytest.raises(KeyboardInterrupt):
            convert(STATE, f"{tmp_path}/{name}", progress=stop)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_progress_increases_up_to_the_total(tmp_path: Path, verify: bool) -> None:
    source = tmp_path / "a.pt"
    shared = torch.ones(100_000)
    torch.save({"a": shared, "b": shared[5:10], "c": torch.eye(300).to_sparse(), "epoch": "x" * 10_000}, source)
    for name in ("b.safetensors", "b.pt", "b.npz", "b/"):
        reported: list[tuple[int, int]] = []
        record = lambda done, total: reported.append((done, total))  # noqa: B023, E731 - called before the next round
        convert(source, f"{tmp_path}/{name}", verify=verify, progress=record)
        assert reported == sorted(reported)
        assert len({total for _, total in reported}) == 1
        assert reported[-1][0] == reported[-1][1] > 0


# -- existing targets


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_existing_target_is_kept_without_overwrite(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(UsageError, match="already") as caught:
        convert(STATE, tmp_path / name)
    assert "--force" in caught.value.fix
    assert (tmp_path / name).read_bytes() == b"old"
    convert(STATE, tmp_path / name, overwrite=True)
    assert (tmp_path / name).stat().st_size > 100


@pytest.mark.parametrize("name", ["b.safetensors", "b/"])
def test_leftovers_file_is_replaced_only_if_a_conversion_wrote_it(tmp_path: Path, name: str) -> None:
    leftovers = tmp_path / f"{name.rstrip('/')}.leftovers.json"
    leftovers.write_bytes(b'{\n "from": "a.pt",\n "data": 1\n}\n')
    with pytest.raises(UsageError, match="already"):
        convert(STATE, f"{tmp_path}/{name}")
    convert(STATE, f"{tmp_path}/{name}", overwrite=True)
    assert not leftovers.exists()
    leftovers.write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="not written by a conversion"):
        convert(STATE, f"{tmp_path}/{name}", overwrite=True)
    assert leftovers.read_text(encoding="utf-8") == '{"mine": 1}'


def test_directory_is_replaced_only_if_a_conversion_wrote_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert(STATE, f"{folder}/")
    first = files(folder)
    with pytest.raises(UsageError, match="not empty"):
        convert(STATE, f"{folder}/")
    convert(STATE, f"{folder}/", overwrite=True)
    assert files(folder) == first
    (folder / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="not empty"):
        convert(STATE, f"{folder}/", overwrite=True)
    assert files(tmp_path) == {"out"}


def test_source_is_refused_as_target(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    source.write_bytes(STATE.read_bytes())
    (tmp_path / "link.pt").symlink_to(source)
    for name in ("a.pt", "link.pt"):
        with pytest.raises(UsageError, match="the source itself"):
            convert(source, tmp_path / name, overwrite=True)
    assert source.read_bytes() == STATE.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "link.safetensors"])
def test_file_of_the_source_is_refused_as_target(tmp_path: Path, name: str) -> None:
    convert(STATE, tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").hardlink_to(tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    for source, why in ((tmp_path, "lies in the source"), (tmp_path / "model.safetensors", "the source itself")):
        with pytest.raises(UsageError, match=why):
            convert(source, tmp_path / name, overwrite=True, dtype="float16")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert files(tmp_path) == {"model.safetensors", "link.safetensors"}


def test_open_source_file_is_refused_as_target(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(STATE.read_bytes())
    with (tmp_path / "a.pt").open("rb") as opened, pytest.raises(UsageError, match="the source itself"):
        convert(opened, tmp_path / "a.pt", overwrite=True)
    assert (tmp_path / "a.pt").read_bytes() == STATE.read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace a file of the source, which is open")
def test_unrelated_file_beside_the_source_can_be_replaced(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "model.safetensors")
    convert(STATE, tmp_path / "other.pt")
    result = convert(tmp_path / "model.safetensors", tmp_path / "other.pt", overwrite=True, dtype="float16")
    assert result.cast


def test_shard_of_the_source_is_refused_as_target(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) > 2
    index, options = tmp_path / "m.safetensors.index.json", {"max_shard_size": 100, "dtype": "float16"}
    for source, why in ((index, "the source itself"), (tmp_path, "lies in the source")):
        with pytest.raises(UsageError, match=why):
            convert(source, tmp_path / "m.safetensors", overwrite=True, **options)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_that_is_read_gets_no_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(STATE, tmp_path / "dcp", to="dcp")
    before = files(tmp_path / "dcp")
    (tmp_path / "link").symlink_to("dcp")
    monkeypatch.chdir(tmp_path)
    for source, target, to in (
        ("dcp", "dcp/new", "dcp"),
        (tmp_path / "dcp", "dcp/new", "raw"),
        ("dcp/", "./x/../dcp/new", "universal"),
        ("dcp", "link/new.pt", ""),
        ("link", "dcp/new.safetensors", ""),
    ):
        with pytest.raises(UsageError, match="lies in the source"):
            convert(source, target, to=to)
    with pytest.raises(UsageError, match="lies in the source"):
        transload.rescue("dcp", "link/new.pt")
    monkeypatch.chdir("dcp")
    with pytest.raises(UsageError, match="lies in the source"):
        convert(".", "new.pt")
    assert files(tmp_path / "dcp") == before
    assert convert(".", "../dcp2", to="dcp").complete


def test_failed_directory_rename_restores_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(STATE, f"{tmp_path}/out/")
    before = files(tmp_path / "out")
    rename = os.rename

    def refuse(old: str, new: str) -> None:
        if old.endswith(".part"):
            raise PermissionError(13, "no")
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(output, "swap", lambda *_: False)
    with pytest.raises(CannotWriteError):
        convert(STATE, f"{tmp_path}/out/", overwrite=True)
    assert files(tmp_path) == {"out"}
    assert files(tmp_path / "out") == before


def test_directory_behind_a_symlink_is_replaced_and_the_link_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    for _ in range(2):
        convert(STATE, f"{tmp_path}/out/", overwrite=True)
    assert files(tmp_path) == {"out", "real"}
    assert (tmp_path / "out").is_symlink()
    assert "index.json" in files(tmp_path / "real")


def test_concurrent_conversions_do_not_share_temporary_directories(tmp_path: Path) -> None:
    first = output.AtomicFolder(f"{tmp_path}/out/", overwrite=False)
    second = output.AtomicFolder(f"{tmp_path}/out/", overwrite=False)
    assert len(files(tmp_path)) == 2
    first.discard()
    second.commit()
    assert files(tmp_path) == {"out"}


def test_target_that_cannot_be_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="not a regular file"):
        convert(STATE, tmp_path / "b.safetensors", overwrite=True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CannotWriteError, match="cannot be written"):
        convert(STATE, tmp_path / "file" / "deep" / "b.safetensors")


def test_directory_target_gets_the_default_file_name(tmp_path: Path) -> None:
    result = convert(STATE, tmp_path, to="safetensors")
    assert files(tmp_path) == {"model.safetensors"}
    assert result.out == str(tmp_path / "model.safetensors")


def one_number(number: float) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(text).to_bytes(8, "little") + text + pack("<f", number)


@each("target", ["one/two/a.safetensors", "one/a.pt", "one/a.npz", "one/raw/", "link.npz", "one"])
def test_missing_directory_is_not_created(tmp_path: Path, target: str) -> None:
    (tmp_path / "link.npz").symlink_to(tmp_path / "one" / "a.npz")
    with pytest.raises(NoDirectoryError, match="its directory does not exist") as caught:
        convert(STATE, f"{tmp_path}/{target}{'/' * (target == 'one')}", to="safetensors" * (target == "one"))
    missing = tmp_path / ("one/two" if "two" in target else "one")
    assert f"$ mkdir {'-p ' * (os.name != 'nt')}{missing}".replace("\\", "/") in caught.value.fix.replace("\\", "/")
    assert files(tmp_path) == {"link.npz"}


@each("name", ["a.safetensors", "a.pt", "a.npz", "raw/"])
def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OverflowRefusedError):
        convert(one_number(1e30), f"{tmp_path}/{name}", dtype="float16")
    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(FullDiskError):
        convert(STATE, f"{tmp_path}/{name}")
    assert files(tmp_path) == set()


def test_empty_bundle_has_no_paths() -> None:
    with Bundle(overwrite=False) as bundle:
        assert bundle.paths == []


@pytest.mark.parametrize(
    "name", [1, b"x", "", "a\0b.pt", "a\ud800b.pt"], ids=["number", "bytes", "empty", "NUL", "lone surrogate"]
)
def test_invalid_target_names_are_usage_errors(name: Any) -> None:
    with pytest.raises(UsageError):
        convert(STATE, name)


def test_arrays_that_numpy_cannot_read_are_refused(tmp_path: Path) -> None:
    many_dimensions = {"a": {"dtype": "U8", "shape": [1] * 70, "data_offsets": [0, 1]}}
    long_name = {"n" * 70_000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    for table, message in ((many_dimensions, "70 dimensions"), (long_name, "too long")):
        text = json.dumps(table).encode()
        source = len(text).to_bytes(8, "little") + text + b"x"
        with pytest.raises(ConvertError, match=message):
            convert(source, tmp_path / "b.npz")
    assert files(tmp_path) == set()


def test_member_names_are_unique() -> None:
    names = ["a", "a/b", "a//b", "/a", "../a", "%2E%2E/a", "a\\b", "..", "a/", "\n", "a:b", "a/../b", "%2Fa"]
    members = [member_name(name) for name in names]
    assert len(set(members)) == len(names)
    assert members[:2] == ["a", "a/b"]


def test_npz_is_a_valid_zip_and_reproducible(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "b.npz") as archive:
        assert archive.testzip() is None
        assert "fc.weight.npy" in archive.namelist()
    convert(io.BytesIO(STATE.read_bytes()), tmp_path / "c.npz")
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
