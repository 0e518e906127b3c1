"""Ordinary damage, case by case: the integrity, the problems and the affected tensors that ``inspect`` reports."""

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
from tests import forge, makers
from tests.each import each
from tests.release import RELEASE

from transload.checkpoint import Checkpoint
from transload.opening import inspect

PAGE = 4096
LENGTHS_MATTER = RELEASE >= (2, 10)  # since then, torch compares the length of a storage with the index


def saved(**options: object) -> bytes:
    """Two large tensors, a small one and an integer, as ``torch.save`` writes them."""
    torch.default_generator.manual_seed(0)
    state = {"a.weight": torch.randn(128, 128), "b.weight": torch.randn(128, 128), "c": torch.arange(4), "epoch": 3}
    return makers.saved(state, **options)


INTACT = saved()
LEGACY = saved(_use_new_zipfile_serialization=False)
OFFSETS = {storage.key: storage.offset or 0 for storage in inspect(INTACT).storages}
INDEX = next(record for record in inspect(INTACT).records if record.name == "data.pkl")
DIRECTORY = INTACT.index(b"PK\x01\x02", OFFSETS["2"])
SECOND_ENTRY = INTACT.index(b"PK\x01\x02", DIRECTORY + 1)


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
    """The same records in an archive written by ``zipfile``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for name, content in ([first] if first else []) + [*forge.records(INTACT).items()] + ([last] if last else []):
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
class Case:
    """A damaged file, the verdict and the problem codes expected for it, and which tensors are lost or wrong."""

    data: bytes
    integrity: str
    codes: frozenset[str]
    affected: frozenset[str] = frozenset()
    safety: str = "data-only"
    loads: bool = False


def case(
    data: bytes, integrity: str, codes: str, affected: str = "", safety: str = "data-only", *, loads: bool = False
) -> Case:
    return Case(data, integrity, frozenset(codes.split()), frozenset(affected.split()), safety, loads)


ALL = "a.weight b.weight c"
MACOSX = ("__MACOSX/archive/._data.pkl", b"\0\5\x16\7")
WALKED = "zip-no-directory zip-walked"

CASES: dict[str, Case] = {
    "intact": case(INTACT, "whole", "", loads=True),
    "cut: 100 bytes left": case(INTACT[:100], "damaged", f"{WALKED} pickle-broken zip-no-version", safety="unknown"),
    "cut: inside the index": case(
        INTACT[: (INDEX.offset or 0) + 99], "damaged", f"{WALKED} pickle-broken zip-no-version", safety="unknown"
    ),
    "cut: after the index": case(
        INTACT[: (INDEX.offset or 0) + INDEX.size], "damaged", f"{WALKED} storage-missing zip-no-version", ALL
    ),
    "cut: half": case(
        INTACT[: len(INTACT) // 2],
        "damaged",
        f"{WALKED} storage-cut storage-missing zip-no-version",
        "b.weight c",
    ),
    "cut: 90 %": case(
        INTACT[: len(INTACT) * 9 // 10], "damaged", f"{WALKED} storage-cut storage-missing zip-no-version", "b.weight c"
    ),
    "cut: inside the last storage": case(
        INTACT[: OFFSETS["2"] + 31], "damaged", f"{WALKED} storage-cut zip-no-version", "c"
    ),
    "cut: right after the last storage": case(INTACT[: OFFSETS["2"] + 32], "repairable", f"{WALKED} zip-no-version"),
    "cut: before the directory": case(INTACT[:DIRECTORY], "repairable", WALKED),
    "cut: inside the directory": case(INTACT[: DIRECTORY + 99], "repairable", WALKED),
    "cut: the last 22 bytes": case(INTACT[:-22], "repairable", WALKED),
    "cut: the last 3 bytes": case(INTACT[:-3], "repairable", WALKED),
    "cut: the last byte": case(INTACT[:-1], "repairable", WALKED),
    "second half is zeros": case(
        zeroed(INTACT, len(INTACT) // 2, len(INTACT)),
        "damaged",
        f"{WALKED} zeros-at-end zip-no-descriptor storage-missing zip-no-version",
        "b.weight c",
    ),
    "last page is zeros": case(
        zeroed(INTACT, len(INTACT) - PAGE, len(INTACT)),
        "damaged",
        f"{WALKED} zeros-at-end zip-no-descriptor storage-missing zip-no-version",
        "b.weight c",
    ),
    "a page of a tensor is zeros": case(
        zeroed(INTACT, OFFSETS["0"] + PAGE, OFFSETS["0"] + 2 * PAGE), "damaged", "crc-mismatch", "a.weight", loads=True
    ),
    "a bit of a tensor flipped": case(
        flipped(INTACT, OFFSETS["1"] + 5), "damaged", "crc-mismatch", "b.weight", loads=True
    ),
    "a bit of a key flipped": case(flipped(INTACT, INTACT.index(b"a.weight")), "damaged", "crc-mismatch", loads=True),
    "index is zeros": case(
        zeroed(INTACT, INDEX.offset or 0, (INDEX.offset or 0) + INDEX.size),
        "damaged",
        "crc-mismatch pickle-broken record-unused",
        safety="unknown",
    ),
    "an entry of the directory is broken": case(zeroed(INTACT, SECOND_ENTRY, SECOND_ENTRY + 10), "repairable", WALKED),
    "a storage is missing": case(rezipped(drop="data/1"), "damaged", "storage-missing", "b.weight"),
    "a storage is 4 bytes too short": case(
        rezipped(change=resized("0", -4)), "damaged", "storage-size", "a.weight", loads=not LENGTHS_MATTER
    ),
    "a storage is 4 bytes too long": case(
        rezipped(change=resized("2", 4)), "damaged", "storage-size", "c", loads=not LENGTHS_MATTER
    ),
    "the index is missing": case(rezipped(drop="data.pkl"), "damaged", "zip-no-pickle record-unused", safety="unknown"),
    "the version is missing": case(rezipped(drop="version"), "repairable", "zip-no-version"),
    "the byte order is missing": case(rezipped(drop="byteorder"), "whole", "", loads=True),
    "junk appended": case(INTACT + b"junk" * 25, "repairable", "zip-trailing-bytes", loads=True),
    "file appended to itself": case(INTACT + INTACT, "damaged", "zip-more-archives", safety="dangerous", loads=True),
    "copied as text: line endings": case(
        INTACT.replace(b"\n", b"\r\n"), "not-a-checkpoint", "not-a-checkpoint", safety="unknown"
    ),
    "copied as text: re-encoded": case(
        INTACT.decode("latin-1").encode(), "not-a-checkpoint", "not-a-checkpoint", safety="unknown"
    ),
    "re-zipped, stored": case(rezipped(), "whole", "", loads=True),
    "re-zipped, compressed": case(rezipped(method=zipfile.ZIP_DEFLATED), "repairable", "zip-compressed", loads=True),
    "re-zipped, folder renamed": case(
        rezipped(lambda name: name.replace("archive/", "my model/")), "whole", "", loads=True
    ),
    "re-zipped without its folder": case(rezipped(lambda name: name.partition("/")[2]), "repairable", "zip-no-folder"),
    "re-zipped by macOS": case(rezipped(last=MACOSX), "repairable", "zip-two-folders record-foreign"),
    "re-zipped by macOS, its folder first": case(
        rezipped(first=MACOSX), "repairable", "zip-two-folders record-foreign"
    ),
    "legacy, intact": case(LEGACY, "unchecked", "", loads=True),
    "legacy, cut inside a storage": case(LEGACY[:-70_000], "damaged", "storage-cut", "b.weight c"),
    "legacy, the last byte lost": case(LEGACY[:-1], "damaged", "storage-cut"),
    "legacy, another object appended": case(LEGACY + LEGACY, "repairable", "legacy-more-objects", loads=True),
    "legacy, junk appended": case(LEGACY + b"junk", "repairable", "legacy-trailing-bytes", loads=True),
}


def affected_tensors(checkpoint: Checkpoint) -> set[str]:
    """Names of the tensors whose bytes are missing, have the wrong length, or changed."""
    bad = {problem.where for problem in checkpoint.problems if problem.code in ("crc-mismatch", "storage-size")}
    damaged = [s for s in checkpoint.storages if s.stored < s.nbytes or s.record in bad or f"storage {s.key}" in bad]
    unfinished = [
        s
        for s in checkpoint.storages
        if f"data/{s.key}" in {p.where for p in checkpoint.problems if p.code == "zip-no-descriptor"}
    ]
    return {name for storage in (*damaged, *unfinished) for name in storage.tensors}


def torch_can_load(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - torch raises many kinds
        return False
    return True


@each("damage", CASES)
def test_damage_is_reported(damage: str) -> None:
    expected = CASES[damage]
    checkpoint = inspect(expected.data, verify=True)
    assert {problem.code for problem in checkpoint.problems} >= expected.codes
    assert bool(checkpoint.findings) is bool(expected.codes)
    assert (checkpoint.safety, checkpoint.integrity) == (expected.safety, expected.integrity)


@each("damage", [damage for damage, expected in CASES.items() if expected.affected])
def test_affected_tensors_are_named(damage: str) -> None:
    expected = CASES[damage]
    checkpoint = inspect(expected.data, verify=True)
    if damage.startswith("legacy"):
        assert affected_tensors(checkpoint) >= expected.affected - {"c"}
    else:
        assert affected_tensors(checkpoint) == expected.affected
    text = "\n".join(line for finding in checkpoint.findings for line in finding.evidence)
    assert all(name in text for name in affected_tensors(checkpoint))


@each("damage", CASES)
def test_whether_torch_loads_the_file(damage: str) -> None:
    assert torch_can_load(CASES[damage].data) is CASES[damage].loads


@each("damage", [damage for damage, expected in CASES.items() if expected.integrity == "repairable"])
def test_repairable_file_has_every_byte_of_every_tensor(damage: str) -> None:
    """The reported offsets hold the bytes of the saved tensors."""
    data = CASES[damage].data
    checkpoint = inspect(data)
    expected = torch.load(io.BytesIO(INTACT))
    for tensor in checkpoint.tensors:
        storage = next(storage for storage in checkpoint.storages if storage.id == tensor.storage)
        content = expected[tensor.name].numpy().tobytes()
        if storage.compressed:
            assert storage.stored == len(content)
            continue
        assert storage.offset is not None
        assert data[storage.offset : storage.offset + storage.nbytes] == content
    assert {tensor.name for tensor in checkpoint.tensors} == {"a.weight", "b.weight", "c"}


def test_records_are_located_when_the_first_page_is_zeros() -> None:
    checkpoint = inspect(zeroed(INTACT, 0, PAGE))
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity) == ("torch-zip", "unknown", "damaged")
    assert {"data/1", "data/2", "version"} <= {
        record.name for record in checkpoint.records if record.offset is not None
    }


# Files that are not checkpoints, and the format reported for them.
FOREIGN: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "empty"),
    "zeros": (bytes(10_000), "zeros"),
    "a web page": (b"<!DOCTYPE html><html><title>404 Not Found</title>", "html"),
    "an error in XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ""),
    "an error in JSON": (b'{"error": "Repository not found"}', ""),
    "a line of text": (b"Entry not found", ""),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n", ""),
    "gzip": (gzip.compress(INTACT), "gzip"),
    "bzip2": (bz2.compress(INTACT), ""),
    "xz": (lzma.compress(INTACT), ""),
    "junk prepended": (b"JUNK" * 16 + INTACT, ""),
    "an HTTP response with its header": (b"HTTP/1.1 200 OK\r\n\r\n" + INTACT, ""),
    "a notebook": (json.dumps({"cells": [], "nbformat": 4}).encode(), ""),
    "a plain pickle": (pickle.dumps({"a": [1, 2, 3]}, 4), "pickle"),
    "a numpy array": (b"\x93NUMPY\1\0" + bytes(120), ""),
    "a zip of something else": (forge.archive([forge.Entry(b"word/document.xml", b"<w/>")]), ""),
}


@each("kind", FOREIGN)
def test_foreign_file_is_reported_as_not_a_checkpoint(kind: str) -> None:
    data, expected_format = FOREIGN[kind]
    checkpoint = inspect(data)
    assert checkpoint.integrity == "not-a-checkpoint"
    assert checkpoint.safety in ("unknown", "data-only") if kind == "a plain pickle" else checkpoint.safety == "unknown"
    assert not expected_format or checkpoint.format == expected_format
    assert not checkpoint.ok


def test_unpacked_archive_is_read_as_a_directory(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(INTACT)) as opened:
        opened.extractall(tmp_path)
    checkpoint = inspect(tmp_path / "archive")
    assert checkpoint.format == "torch-directory"
    assert {tensor.name for tensor in checkpoint.tensors} == {"a.weight", "b.weight", "c"}
    assert checkpoint.safety == "data-only"


def test_path_bytes_and_file_object_give_the_same_result(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(INTACT)
    with path.open("rb") as file:
        checkpoints = [inspect(path), inspect(str(path)), inspect(INTACT), inspect(memoryview(INTACT)), inspect(file)]
    first = [tensor.to_dict() for tensor in checkpoints[0].tensors]
    assert all([tensor.to_dict() for tensor in checkpoint.tensors] == first for checkpoint in checkpoints)
    assert len({(checkpoint.safety, checkpoint.integrity) for checkpoint in checkpoints}) == 1


def test_wrong_byte_in_the_index_gives_no_values_and_one_story() -> None:
    whole = forge.checkpoint(forge.pickled(forge.dictionary({"epoch": 3})))
    at = whole.index(b"epoch") - 5  # the opcode of the text
    checkpoint = inspect(whole[:at] + b"\xff" + whole[at + 1 :])
    assert (checkpoint.integrity, checkpoint.leaves) == ("damaged", ())
    assert checkpoint.prediction == "torch.load fails: the file is damaged"
    assert "values" not in str(checkpoint)
    fixes = [line for finding in checkpoint.findings for line in finding.fix]
    assert not any("torch loads it" in line and "If" not in line for line in fixes), fixes
