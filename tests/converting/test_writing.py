"""Files are written and compared in one pass, and appear completely or not at all, whatever goes wrong."""

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

import transload
from transload.converting import convert
from transload.errors import (
    CannotWriteError,
    ConvertError,
    FullDiskError,
    OverflowRefusedError,
    TransloadError,
    UsageError,
)
from transload.io import pool
from transload.judge import inspect
from transload.tensors.content import open_content
from transload.writing import output, transfer
from transload.writing.output import Bundle
from transload.writing.plan import member_name
from transload.writing.transfer import Entry, Job

DATA = Path(__file__).parent.parent / "data"
STATE = DATA / "h200" / "state_dict_cuda0.pt"


def safetensors(sizes: dict[str, int]) -> bytes:
    """A file of bytes that are all different, more or less."""
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
    told: list[int] = []
    with open_content(source) as content, path.open("w+b") as file:
        entries = [Entry(tensor.name, tensor, tensor.dtype) for tensor in content.checkpoint.tensors]
        transfer.write_file(file.fileno(), head, entries, Job(content, progress=told.append), "x")
    return path.read_bytes(), [entry.crc32 for entry in entries], told


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("chunk", [4096, 3 * 4096, 1 << 20])
@pytest.mark.parametrize("head", [b"", b"12345678", bytes(4096)], ids=["no head", "a head", "a page"])
def test_the_file_written_is_the_file_asked_for(
    tmp_path: Path, chunk: int, head: bytes, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    monkeypatch.setattr(transfer, "_DIRECT_FROM", 0 if direct else 1 << 60)
    source = safetensors(SIZES)
    body = source[8 + int.from_bytes(source[:8], "little") :]
    made, sums, told = written(source, tmp_path / "a", head)
    assert made == head + body
    ends = [sum(list(SIZES.values())[: number + 1]) for number in range(len(SIZES))]
    assert sums == [crc32(body[end - size : end]) for end, size in zip(ends, SIZES.values(), strict=True)]
    assert sum(told) == 2 * sum(SIZES.values())  # written and compared


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_file_system_that_only_says_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    import fcntl

    true = getattr(os, call)
    refused: list[int] = []
    together = threading.Barrier(2)  # two threads are refused before either of them can turn it off

    def picky(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            refused.append(offset)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(2)
            raise OSError(errno.EINVAL, "not aligned")
        return int(true(descriptor, data, offset))

    monkeypatch.setattr(transfer, "CHUNK", 8192)
    monkeypatch.setattr(transfer, "_DIRECT_FROM", 0)
    source = safetensors(SIZES)
    monkeypatch.setattr(os, call, picky)
    made, _, _ = written(source, tmp_path / "a", b"head")
    assert made == b"head" + source[8 + int.from_bytes(source[:8], "little") :]
    assert len(refused) <= 8  # each thread once at most, and none where the file system takes no such flag


def test_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transfer, "CHUNK", 4096)
    monkeypatch.setattr(pool, "Thread", Refusing)
    source = safetensors(SIZES)
    made, _, told = written(source, tmp_path / "a", b"head")
    assert made == b"head" + source[8 + int.from_bytes(source[:8], "little") :]
    assert sum(told) == 2 * sum(SIZES.values())  # written and compared


def test_a_disk_that_lies_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.preadv

    def lying(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = true(descriptor, buffers, offset, *flags)
        if offset <= 65536 < offset + count:
            buffers[0][65536 - offset] ^= 1
        return count

    source = tmp_path / "a.safetensors"
    source.write_bytes(safetensors(SIZES))
    with open_content(source) as content:  # what is read of the source is read before
        content.checkpoint  # noqa: B018
    monkeypatch.setattr(os, "preadv", lying)
    raw = source.read_bytes()
    with pytest.raises(ConvertError, match="read back differ"):
        convert(raw, tmp_path / "b.safetensors")
    assert files(tmp_path) == {"a.safetensors"}


@pytest.mark.parametrize("to", ["torch", "npz", "raw"])
def test_others_are_read_back_too(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = safetensors({"a": 5, "e": 200_000})
    true, mark = os.preadv, raw[-150_000:-149_000]

    def lying(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = true(descriptor, buffers, offset, *flags)
        at = bytes(buffers[0]).find(mark)
        if at >= 0:
            buffers[0][at] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lying)
    with pytest.raises(ConvertError, match="read back differ") as caught:
        convert(raw, tmp_path / "b", to=to)
    assert "e" in (caught.value.what[0], caught.value.where[-1])
    assert files(tmp_path) == set()
    convert(raw, tmp_path / "b", to=to, verify=False)
    assert files(tmp_path) == {"b"}


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz", "b/"])
def test_a_damaged_source_is_refused(tmp_path: Path, name: str) -> None:
    raw = bytearray(STATE.read_bytes())
    with open_content(STATE) as content:
        storage = next(each for each in content.checkpoint.storages if "conv.weight" in each.tensors)
    assert storage.offset is not None
    raw[storage.offset + 5] ^= 0x10
    with pytest.raises(ConvertError, match=r"1 of its records are damaged: .*conv\.weight"):
        convert(bytes(raw), f"{tmp_path}/{name}")
    assert files(tmp_path) == set()
    convert(bytes(raw), f"{tmp_path}/{name}", verify=False)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
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


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz", "b/"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, name: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "b/":
        (tmp_path / name).write_bytes(b"old")
    for function in ("write", "writev", "pwrite", "copy_file_range"):
        monkeypatch.setattr(os, function, full, raising=False)
    with pytest.raises(FullDiskError, match="disk is full"):
        convert(STATE, f"{tmp_path}/{name}", overwrite=True, verify=verify)
    monkeypatch.undo()
    assert [(tmp_path / each).read_bytes() for each in files(tmp_path)] == ([] if name == "b/" else [b"old"])


def test_shards_are_all_there_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, renamed = os.replace, []

    def some(source: str, target: str) -> None:
        renamed.append(target)
        if len(renamed) == 3:
            raise OSError(errno.EIO, "failing")
        true(source, target)

    monkeypatch.setattr(os, "replace", some)
    with pytest.raises(CannotWriteError):
        convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    monkeypatch.undo()
    assert len(renamed) == 3
    assert files(tmp_path) == set()
    convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    assert "m.safetensors.index.json" in files(tmp_path)


@pytest.mark.parametrize("at", range(1, 8))
def test_shards_that_cannot_all_be_replaced_stay_what_they_were(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = safetensors({"a": 100, "b": 100, "c": 100, "d": 100})
    second = first[:-400] + bytes(400)
    convert(first, tmp_path / "m.safetensors", max_shard_size=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    true, renamed = os.replace, []

    def some(source: str, target: str) -> None:
        renamed.append(target)
        if len(renamed) == at:
            raise OSError(errno.EIO, "failing")
        true(source, target)

    monkeypatch.setattr(os, "replace", some)
    fails = 2 <= at <= 6  # the first is that of the index in between, without which it goes as well; the last the index
    with pytest.raises(CannotWriteError) if fails else nullcontext():
        convert(second, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert (after == before) == fails


@pytest.mark.parametrize("fails", [False, True], ids=["done", "fails"])
def test_where_files_have_one_name_only_no_index_leads_to_old_and_new_shards(
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


def test_an_index_that_is_none_is_replaced(tmp_path: Path) -> None:
    for text in ("[", "[]", '{"weight_map": {"a": 1}}'):
        (tmp_path / "m.safetensors.index.json").write_text(text, encoding="utf-8")
        convert(STATE, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
        assert inspect(tmp_path / "m.safetensors.index.json").tensors


def test_the_index_in_between_is_one_that_loaders_take(tmp_path: Path) -> None:
    made = convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    index, shards = made.files[-1], list(made.files[:-1])
    text, before = Path(index).read_bytes(), inspect(index)
    kept = output._OldShards(index, shards)
    for shard in shards:
        Path(shard).unlink()
    between = inspect(index)
    assert between.ok
    assert [tensor.name for tensor in between.tensors] == [tensor.name for tensor in before.tensors]
    assert {Path(name).suffix for name in json.loads(Path(index).read_bytes())["weight_map"].values()} == {
        ".safetensors"
    }
    kept.restore(touched=True)
    assert files(tmp_path) == {Path(name).name for name in made.files}
    assert Path(index).read_bytes() == text


def test_a_file_that_shards_replace_is_gone(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "m.safetensors")
    made = convert(STATE, tmp_path / "m.safetensors", max_shard_size=100, overwrite=True)
    assert files(tmp_path) == {Path(name).name for name in made.files}
    assert "m.safetensors" not in files(tmp_path)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    for name in ("b.safetensors", "b.pt", "b.npz", "b/"):
        with pytest.raises(KeyboardInterrupt):
            convert(STATE, f"{tmp_path}/{name}", progress=stop)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_progress_adds_up(tmp_path: Path, verify: bool) -> None:
    source = tmp_path / "a.pt"
    shared = torch.ones(100_000)
    torch.save({"a": shared, "b": shared[5:10], "c": torch.eye(300).to_sparse(), "epoch": "x" * 10_000}, source)
    for name in ("b.safetensors", "b.pt", "b.npz", "b/"):
        told: list[tuple[int, int]] = []
        count = lambda done, total: told.append((done, total))  # noqa: B023, E731 - called before the next round
        convert(source, f"{tmp_path}/{name}", verify=verify, progress=count)
        assert told == sorted(told)
        assert len({total for _, total in told}) == 1
        assert told[-1][0] == told[-1][1] > 0


# -- what is there already


@pytest.mark.parametrize("name", ["b.safetensors", "b.pt", "b.npz"])
def test_nothing_is_written_over_unless_asked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(UsageError, match="already") as caught:
        convert(STATE, tmp_path / name)
    assert "--force" in caught.value.fix
    assert (tmp_path / name).read_bytes() == b"old"
    convert(STATE, tmp_path / name, overwrite=True)
    assert (tmp_path / name).stat().st_size > 100


@pytest.mark.parametrize("name", ["b.safetensors", "b/"])
def test_only_what_was_left_over_is_replaced(tmp_path: Path, name: str) -> None:
    beside = tmp_path / f"{name.rstrip('/')}.leftovers.json"
    beside.write_text('{\n "from": "a.pt",\n "data": 1\n}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="already"):
        convert(STATE, f"{tmp_path}/{name}")
    convert(STATE, f"{tmp_path}/{name}", overwrite=True)
    assert not beside.exists()
    beside.write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="not written by a conversion"):
        convert(STATE, f"{tmp_path}/{name}", overwrite=True)
    assert beside.read_text(encoding="utf-8") == '{"mine": 1}'


def test_directories_are_only_replaced_where_they_are_ours(tmp_path: Path) -> None:
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


def test_a_source_is_never_its_own_target(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    source.write_bytes(STATE.read_bytes())
    (tmp_path / "link.pt").symlink_to(source)
    for name in ("a.pt", "link.pt"):
        with pytest.raises(UsageError, match="the source itself"):
            convert(source, tmp_path / name, overwrite=True)
    assert source.read_bytes() == STATE.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "link.safetensors"])
def test_no_file_of_a_source_is_written_over(tmp_path: Path, name: str) -> None:
    convert(STATE, tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").hardlink_to(tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UsageError, match="the source itself"):
            convert(source, tmp_path / name, overwrite=True, dtype="float16")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert files(tmp_path) == {"model.safetensors", "link.safetensors"}


def test_an_open_source_is_not_written_over_either(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(STATE.read_bytes())
    with (tmp_path / "a.pt").open("rb") as opened, pytest.raises(UsageError, match="the source itself"):
        convert(opened, tmp_path / "a.pt", overwrite=True)
    assert (tmp_path / "a.pt").read_bytes() == STATE.read_bytes()


def test_what_lies_beside_a_source_can_be_replaced(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "model.safetensors")
    convert(STATE, tmp_path / "other.pt")
    made = convert(tmp_path, tmp_path / "other.pt", overwrite=True, dtype="float16")
    assert made.cast


def test_a_shard_of_the_source_is_not_written_over(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "m.safetensors", max_shard_size=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) > 2
    with pytest.raises(UsageError, match="the source itself"):
        convert(tmp_path, tmp_path / "m.safetensors", overwrite=True, max_shard_size=100, dtype="float16")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_cannot_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_directory_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    for _ in range(2):
        convert(STATE, f"{tmp_path}/out/", overwrite=True)
    assert files(tmp_path) == {"out", "real"}
    assert (tmp_path / "out").is_symlink()
    assert "index.json" in files(tmp_path / "real")


def test_what_another_conversion_is_writing_stays(tmp_path: Path) -> None:
    first = output.Folder(f"{tmp_path}/out/", overwrite=False)
    second = output.Folder(f"{tmp_path}/out/", overwrite=False)
    assert len(files(tmp_path)) == 2
    first.discard()
    second.commit()
    assert files(tmp_path) == {"out"}


def test_a_target_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="not a regular file"):
        convert(STATE, tmp_path / "b.safetensors", overwrite=True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CannotWriteError, match="cannot be written"):
        convert(STATE, tmp_path / "file" / "deep" / "b.safetensors")


def test_in_a_directory_the_file_has_its_usual_name(tmp_path: Path) -> None:
    made = convert(STATE, tmp_path, to="safetensors")
    assert files(tmp_path) == {"model.safetensors"}
    assert made.out == str(tmp_path / "model.safetensors")


def one_number(number: float) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(text).to_bytes(8, "little") + text + pack("<f", number)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.npz", "raw/", "link/a.npz"])
def test_directories_that_are_missing_are_made(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    target = f"{tmp_path}/new/{name}" if name.startswith("link") else f"{tmp_path}/new/one/two/{name}"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OverflowRefusedError):
        convert(one_number(1e30), target, dtype="float16")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FullDiskError):
            convert(STATE, target)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is there that was not before
    assert all(Path(file).exists() for file in convert(STATE, target).files)


def test_shards_in_a_directory_that_is_missing(tmp_path: Path) -> None:
    made = convert(STATE, tmp_path / "out" / "model.safetensors", max_shard_size=200)
    assert len(made.files) > 2
    assert files(tmp_path / "out") == {Path(file).name for file in made.files}
    convert(STATE, f"{tmp_path}/other/", to="safetensors")
    assert files(tmp_path / "other") == {"model.safetensors"}


def test_a_directory_that_somebody_else_uses_meanwhile_stays(tmp_path: Path) -> None:
    def fail(done: int, _: int) -> None:
        if done:
            (tmp_path / "a" / "theirs").write_bytes(b"")
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        convert(STATE, tmp_path / "a" / "b" / "c.pt", progress=fail)
    assert files(tmp_path / "a") == {"theirs"}


def test_directories_that_another_conversion_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(path: str) -> None:
        monkeypatch.undo()
        Path(path).mkdir(parents=True)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "mkdir", slower)
    convert(STATE, tmp_path / "a" / "b" / "c.pt")
    assert files(tmp_path / "a" / "b") == {"c.pt"}


def test_a_bundle_of_nothing() -> None:
    with Bundle(overwrite=False) as bundle:
        assert bundle.paths == []


@pytest.mark.parametrize(
    "name", [1, b"x", "", "a\0b.pt", "a\ud800b.pt"], ids=["number", "bytes", "none", "NUL", "half"]
)
def test_targets_that_make_no_sense(name: Any) -> None:
    with pytest.raises(UsageError):
        convert(STATE, name)


def test_what_numpy_could_not_read(tmp_path: Path) -> None:
    many = {"a": {"dtype": "U8", "shape": [1] * 70, "data_offsets": [0, 1]}}
    long = {"n" * 70_000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    for table, words in ((many, "70 dimensions"), (long, "too long")):
        text = json.dumps(table).encode()
        source = len(text).to_bytes(8, "little") + text + b"x"
        with pytest.raises(ConvertError, match=words):
            convert(source, tmp_path / "b.npz")
    assert files(tmp_path) == set()


def test_members_have_names_of_their_own() -> None:
    names = ["a", "a/b", "a//b", "/a", "../a", "%2E%2E/a", "a\\b", "..", "a/", "\n", "a:b", "a/../b", "%2Fa"]
    made = [member_name(name) for name in names]
    assert len(set(made)) == len(names)
    assert made[:2] == ["a", "a/b"]


def test_a_zip_that_any_program_reads(tmp_path: Path) -> None:
    convert(STATE, tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "b.npz") as archive:
        assert archive.testzip() is None
        assert "fc.weight.npy" in archive.namelist()
    convert(io.BytesIO(STATE.read_bytes()), tmp_path / "c.npz")
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
