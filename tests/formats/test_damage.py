"""Ordinary damage, row by row: what each accident does to a checkpoint, and what we say of it and of its tensors."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tests import forge
from tests.each import each
from tests.release import RELEASE

from transload.checkpoint import Checkpoint
from transload.judge import inspect

PAGE = 4096
LENGTHS_MATTER = RELEASE >= (2, 10)  # from then on torch compares the length of a storage with the index


def saved(**options: object) -> bytes:
    """Two large tensors, a small one and some values, as torch writes them."""
    torch.default_generator.manual_seed(0)
    held = {"a.weight": torch.randn(128, 128), "b.weight": torch.randn(128, 128), "c": torch.arange(4), "epoch": 3}
    buffer = io.BytesIO()
    torch.save(held, buffer, **options)
    return buffer.getvalue()


WHOLE = saved()
LEGACY = saved(_use_new_zipfile_serialization=False)
PLACES = {storage.key: storage.offset or 0 for storage in inspect(WHOLE).storages}
INDEX = next(record for record in inspect(WHOLE).records if record.name == "data.pkl")
DIRECTORY = WHOLE.index(b"PK\x01\x02", PLACES["2"])
SECOND_LINE = WHOLE.index(b"PK\x01\x02", DIRECTORY + 1)


def zeroed(data: bytes, begin: int, end: int) -> bytes:
    return data[:begin] + bytes(len(data[begin:end])) + data[end:]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def rezipped(
    rename: Callable[[str], str] = str,
    *,
    method: int = zipfile.ZIP_STORED,
    drop: str = "",
    change: Callable[[str, bytes], bytes] = lambda _, content: content,
    first: tuple[str, bytes] | None = None,
    last: tuple[str, bytes] | None = None,
) -> bytes:
    """The same records in an archive that ``zipfile`` wrote."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for name, content in ([first] if first else []) + [*forge.records(WHOLE).items()] + ([last] if last else []):
            if not drop or not name.endswith(drop):
                out.writestr(rename(name), change(name, content))
    return buffer.getvalue()


def resized(key: str, by: int) -> Callable[[str, bytes], bytes]:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith(f"data/{key}"):
            return content
        return content[:by] if by < 0 else content + bytes(by)

    return change


@dataclass(frozen=True)
class Row:
    """An accident: the file after it, what we say, by which codes, and which tensors are lost or wrong."""

    data: bytes
    integrity: str
    codes: frozenset[str]
    hurt: frozenset[str] = frozenset()
    safety: str = "data-only"
    loads: bool = False


def row(
    data: bytes, integrity: str, codes: str, hurt: str = "", safety: str = "data-only", *, loads: bool = False
) -> Row:
    return Row(data, integrity, frozenset(codes.split()), frozenset(hurt.split()), safety, loads)


ALL = "a.weight b.weight c"
MACOSX = ("__MACOSX/archive/._data.pkl", b"\0\5\x16\7")
WALKED = "zip-no-directory zip-walked"
UNTOLD = {"zip-walked", "zip-no-version"}  # where the directory is lost they say nothing more

TABLE: dict[str, Row] = {
    "sound": row(WHOLE, "whole", "", loads=True),
    "cut: 100 bytes left": row(WHOLE[:100], "damaged", f"{WALKED} pickle-broken zip-no-version", safety="unknown"),
    "cut: inside the index": row(
        WHOLE[: (INDEX.offset or 0) + 99], "damaged", f"{WALKED} pickle-broken zip-no-version", safety="unknown"
    ),
    "cut: after the index": row(
        WHOLE[: (INDEX.offset or 0) + INDEX.size], "damaged", f"{WALKED} storage-missing zip-no-version", ALL
    ),
    "cut: half": row(
        WHOLE[: len(WHOLE) // 2],
        "damaged",
        f"{WALKED} storage-cut storage-missing zip-no-version",
        "b.weight c",
    ),
    "cut: 90 %": row(
        WHOLE[: len(WHOLE) * 9 // 10], "damaged", f"{WALKED} storage-cut storage-missing zip-no-version", "b.weight c"
    ),
    "cut: inside the last storage": row(
        WHOLE[: PLACES["2"] + 31], "damaged", f"{WALKED} storage-cut zip-no-version", "c"
    ),
    "cut: right after the last storage": row(WHOLE[: PLACES["2"] + 32], "repairable", f"{WALKED} zip-no-version"),
    "cut: before the directory": row(WHOLE[:DIRECTORY], "repairable", WALKED),
    "cut: inside the directory": row(WHOLE[: DIRECTORY + 99], "repairable", WALKED),
    "cut: the last 22 bytes": row(WHOLE[:-22], "repairable", WALKED),
    "cut: the last 3 bytes": row(WHOLE[:-3], "repairable", WALKED),
    "cut: the last byte": row(WHOLE[:-1], "repairable", WALKED),
    "the second half never arrived": row(
        zeroed(WHOLE, len(WHOLE) // 2, len(WHOLE)),
        "damaged",
        f"{WALKED} zeros-at-end zip-no-descriptor storage-missing zip-no-version",
        "b.weight c",
    ),
    "the last page never arrived": row(
        zeroed(WHOLE, len(WHOLE) - PAGE, len(WHOLE)),
        "damaged",
        f"{WALKED} zeros-at-end zip-no-descriptor storage-missing zip-no-version",
        "b.weight c",
    ),
    "a page of a tensor is zero": row(
        zeroed(WHOLE, PLACES["0"] + PAGE, PLACES["0"] + 2 * PAGE), "damaged", "crc-mismatch", "a.weight", loads=True
    ),
    "a bit of a tensor flipped": row(
        flipped(WHOLE, PLACES["1"] + 5), "damaged", "crc-mismatch", "b.weight", loads=True
    ),
    "a bit of a key flipped": row(flipped(WHOLE, WHOLE.index(b"a.weight")), "damaged", "crc-mismatch", loads=True),
    "the index is zero": row(
        zeroed(WHOLE, INDEX.offset or 0, (INDEX.offset or 0) + INDEX.size),
        "damaged",
        "crc-mismatch pickle-broken record-unused",
        safety="unknown",
    ),
    "a line of the directory is broken": row(zeroed(WHOLE, SECOND_LINE, SECOND_LINE + 10), "repairable", WALKED),
    "a storage is missing": row(rezipped(drop="data/1"), "damaged", "storage-missing", "b.weight"),
    "a storage is 4 bytes short": row(
        rezipped(change=resized("0", -4)), "damaged", "storage-size", "a.weight", loads=not LENGTHS_MATTER
    ),
    "a storage is 4 bytes long": row(
        rezipped(change=resized("2", 4)), "damaged", "storage-size", "c", loads=not LENGTHS_MATTER
    ),
    "the index is missing": row(rezipped(drop="data.pkl"), "damaged", "zip-no-pickle record-unused", safety="unknown"),
    "the version is missing": row(rezipped(drop="version"), "repairable", "zip-no-version"),
    "the byte order is missing": row(rezipped(drop="byteorder"), "whole", "", loads=True),
    "junk after it": row(WHOLE + b"junk" * 25, "repairable", "zip-trailing-bytes", loads=True),
    "twice the same file": row(WHOLE + WHOLE, "damaged", "zip-shifted", safety="dangerous", loads=True),
    "copied as text: line ends": row(
        WHOLE.replace(b"\n", b"\r\n"), "not-a-checkpoint", "not-a-checkpoint", safety="unknown"
    ),
    "copied as text: re-encoded": row(
        WHOLE.decode("latin-1").encode(), "not-a-checkpoint", "not-a-checkpoint", safety="unknown"
    ),
    "re-zipped, stored": row(rezipped(), "whole", "", loads=True),
    "re-zipped, compressed": row(rezipped(method=zipfile.ZIP_DEFLATED), "repairable", "zip-compressed", loads=True),
    "re-zipped, other folder": row(
        rezipped(lambda name: name.replace("archive/", "my model/")), "whole", "", loads=True
    ),
    "re-zipped without its folder": row(rezipped(lambda name: name.partition("/")[2]), "repairable", "zip-no-folder"),
    "re-zipped by macOS": row(rezipped(last=MACOSX), "repairable", "zip-two-folders record-foreign"),
    "re-zipped by macOS, its folder first": row(rezipped(first=MACOSX), "repairable", "zip-two-folders record-foreign"),
    "legacy, sound": row(LEGACY, "unchecked", "", loads=True),
    "legacy, cut inside a storage": row(LEGACY[:-70_000], "damaged", "storage-cut", "b.weight c"),
    "legacy, the last byte lost": row(LEGACY[:-1], "damaged", "storage-cut"),
    "legacy, junk after it": row(LEGACY + b"junk", "repairable", "legacy-trailing-bytes", loads=True),
}


def tensors_hurt(told: Checkpoint) -> set[str]:
    """Tensors whose bytes are missing, of another length, or not those that were saved."""
    bad = {problem.where for problem in told.problems if problem.code in ("crc-mismatch", "storage-size")}
    hurt = [s for s in told.storages if s.stored < s.nbytes or s.record in bad or f"storage {s.key}" in bad]
    late = [
        s for s in told.storages if f"data/{s.key}" in {p.where for p in told.problems if p.code == "zip-no-descriptor"}
    ]
    return {name for storage in (*hurt, *late) for name in storage.tensors}


def loaded(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - torch raises whatever it meets
        return False
    return True


@each("accident", TABLE)
def test_what_we_say_of_an_accident(accident: str) -> None:
    wanted = TABLE[accident]
    told = inspect(wanted.data, verify=True)
    assert {problem.code for problem in told.problems} >= wanted.codes
    assert bool(told.findings) is bool(wanted.codes)
    assert (told.safety, told.integrity) == (wanted.safety, wanted.integrity)


@each("accident", [accident for accident, wanted in TABLE.items() if wanted.hurt])
def test_the_tensors_that_are_lost_are_named_and_no_others(accident: str) -> None:
    wanted = TABLE[accident]
    told = inspect(wanted.data, verify=True)
    if accident.startswith("legacy"):
        assert tensors_hurt(told) >= wanted.hurt - {"c"}
    else:
        assert tensors_hurt(told) == wanted.hurt
    text = "\n".join(line for finding in told.findings for line in finding.evidence)
    assert all(name in text for name in tensors_hurt(told))


@each("accident", TABLE)
def test_what_torch_says_of_it(accident: str) -> None:
    assert loaded(TABLE[accident].data) is TABLE[accident].loads


@each("accident", [accident for accident, wanted in TABLE.items() if wanted.integrity == "repairable"])
def test_what_is_repairable_has_every_byte_of_every_tensor(accident: str) -> None:
    """The claim made good: at the places we name lie the bytes of the tensors that were saved."""
    data = TABLE[accident].data
    told = inspect(data)
    wanted = torch.load(io.BytesIO(WHOLE))
    for tensor in told.tensors:
        storage = next(storage for storage in told.storages if storage.id == tensor.storage)
        content = wanted[tensor.name].numpy().tobytes()
        if storage.compressed:
            assert storage.stored == len(content)
            continue
        assert storage.offset is not None
        assert data[storage.offset : storage.offset + storage.nbytes] == content
    assert {tensor.name for tensor in told.tensors} == {"a.weight", "b.weight", "c"}


def test_the_first_page_may_be_gone_and_the_rest_still_tell() -> None:
    told = inspect(zeroed(WHOLE, 0, PAGE))
    assert (told.format, told.safety, told.integrity) == ("torch-zip", "unknown", "damaged")
    assert {"data/1", "data/2", "version"} <= {record.name for record in told.records if record.offset is not None}


# Files that are no checkpoints, and what they are.
FOREIGN: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "empty"),
    "zeros": (bytes(10_000), "zeros"),
    "a web page": (b"<!DOCTYPE html><html><title>404 Not Found</title>", "html"),
    "an error in XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ""),
    "an error in JSON": (b'{"error": "Repository not found"}', ""),
    "a line of text": (b"Entry not found", ""),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n", ""),
    "gzip": (gzip.compress(WHOLE), "gzip"),
    "bzip2": (bz2.compress(WHOLE), ""),
    "xz": (lzma.compress(WHOLE), ""),
    "junk before it": (b"JUNK" * 16 + WHOLE, ""),
    "a response with its header": (b"HTTP/1.1 200 OK\r\n\r\n" + WHOLE, ""),
    "a notebook": (json.dumps({"cells": [], "nbformat": 4}).encode(), ""),
    "a plain pickle": (pickle.dumps({"a": [1, 2, 3]}, 4), "pickle"),
    "a numpy array": (b"\x93NUMPY\1\0" + bytes(120), ""),
    "a zip of something else": (forge.archive([forge.Entry(b"word/document.xml", b"<w/>")]), ""),
}


@each("thing", FOREIGN)
def test_what_is_no_checkpoint_is_said_to_be_none(thing: str) -> None:
    data, kind = FOREIGN[thing]
    told = inspect(data)
    assert told.integrity == "not-a-checkpoint"
    assert told.safety in ("unknown", "data-only") if thing == "a plain pickle" else told.safety == "unknown"
    assert not kind or told.format == kind
    assert not told.ok


def test_an_unpacked_archive_is_read_in_place(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as opened:
        opened.extractall(tmp_path)
    told = inspect(tmp_path / "archive")
    assert told.format == "torch-directory"
    assert {tensor.name for tensor in told.tensors} == {"a.weight", "b.weight", "c"}
    assert told.safety == "data-only"


def test_a_file_is_read_the_same_from_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(WHOLE)
    with path.open("rb") as file:
        tellings = [inspect(path), inspect(str(path)), inspect(WHOLE), inspect(memoryview(WHOLE)), inspect(file)]
    first = [tensor.to_dict() for tensor in tellings[0].tensors]
    assert all([tensor.to_dict() for tensor in told.tensors] == first for told in tellings)
    assert len({(told.safety, told.integrity) for told in tellings}) == 1
