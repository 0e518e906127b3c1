"""Retagged files: what torch loads from them, what they contain, and what stays unchanged."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import each
from tests.retagging.makers import fresh, same, save, state
from tests.retagging.power import journals

from transload.checkpoint import Checkpoint
from transload.errors import RetagError, UsageError
from transload.io.journal import recover
from transload.io.sources import has_journal
from transload.opening import inspect
from transload.retagging import retag, undo

DATA = Path(__file__).parent.parent / "data"
FILES = [
    path
    for path in sorted(DATA.rglob("*"))
    if path.suffix in (".pt", ".pth", ".ckpt") and inspect(path).format in ("torch-zip", "torch-legacy")
]
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"weights_only": True},
    {"weights_only": False},
    {"mmap": True},
    {"mmap": True, "weights_only": False},
)
each_file = each("path", FILES, ids=lambda path: str(path.relative_to(DATA)))


def load_or_error(path: Path, **options: Any) -> Any:
    """What torch loads from a file, or the error it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch issues some only once, so two loads would differ
            return torch.load(str(path), **options)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is compared
        getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()  # otherwise the next load would fail on them
        return type(error).__name__, str(error).replace(str(path), "FILE")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tags(path: Path) -> set[str]:
    return {storage.device for storage in inspect(path).storages}


def without_tags(checkpoint: Checkpoint) -> list[object]:
    """Everything that must stay the same."""
    return [
        checkpoint.leaves,
        [tensor._replace(device="", file_offset=None) for tensor in checkpoint.tensors if not tensor.parts],
        [storage._replace(device="", offset=None) for storage in checkpoint.storages],
        [(use.full_name, use.imported, use.called, use.built) for use in checkpoint.globals],
        checkpoint.safety,
        checkpoint.integrity,
        [finding.code for finding in checkpoint.findings],
    ]


def assert_intact(path: Path) -> None:
    """Check all checksums of an archive, with zipfile and with transload."""
    if inspect(path).format == "torch-zip":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        assert inspect(path, verify=True).integrity == "whole"


@each_file
@pytest.mark.parametrize("to", ["cpu", "cuda:11"])
def test_only_tags_change_in_every_fixture_and_undo_restores_it(path: Path, to: str, tmp_path: Path) -> None:
    before = inspect(path)
    copy, output = tmp_path / path.name, tmp_path / "made.pt"
    shutil.copyfile(path, copy)
    result = retag(copy, to, out=output)
    assert copy.read_bytes() == path.read_bytes()
    assert tags(output) == ({to} if before.storages else set())
    assert without_tags(inspect(output)) == without_tags(before)
    assert_intact(output)
    if result.method != "rewrite":  # in place, the result has the same bytes
        assert retag(copy, to, keep_undo=True).method == result.method
        assert copy.read_bytes() == output.read_bytes()
        if result.changed:
            undo(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([copy.name, output.name])


@each_file
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_torch_loads_retagged_fixtures_without_map_location(path: Path, mode: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / path.name
    shutil.copyfile(path, copy)
    retag(copy, "cpu")
    expected, actual = load_or_error(path, map_location="cpu", **mode), load_or_error(copy, **mode)
    if isinstance(expected, torch.nn.Module):
        expected, actual = expected.state_dict(), actual.state_dict()
    if isinstance(expected, dict) and "custom" in path.name:
        expected = {key: value for key, value in expected.items() if isinstance(value, torch.Tensor)}
    assert comparable(expected) == comparable(actual)


def comparable(value: Any) -> Any:
    """A value that can be compared with ``==``."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor, which has no list
        dense = (
            value.dequantize() if value.is_quantized else value.to_dense() if value.layout != torch.strided else value
        )
        if getattr(dense, "is_nested", False):
            return [comparable(part) for part in dense.unbind()]
        return str(value.dtype), str(value.device), tuple(value.shape), repr(dense.tolist())
    if isinstance(value, dict):
        return {key: comparable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(inner) for inner in value]
    return type(value).__name__, repr(value) if isinstance(value, str | int | float | bool | None) else ""


@pytest.mark.parametrize("mode", MODES, ids=str)
@each("tag", ["cuda:0", "xpu:100"])
@each("shared", [False, True], ids=["separate tags", "one shared tag"])
@each("user", [False, True], ids=["separate string", "string shared with tags"])
def test_user_strings_equal_to_a_tag_are_unchanged(
    *, tag: str, mode: dict[str, Any], shared: bool, user: bool, tmp_path: Path
) -> None:
    shared_tag = fresh(tag)
    obj = {"before": shared_tag if user else fresh(tag), "state": state(), "after": [shared_tag, fresh(tag)], tag: tag}
    path = save(obj, tmp_path / "model.pt", (lambda _: shared_tag) if shared else tag)
    assert retag(path, "cpu").method == ("append" if shared else "patch")
    assert same(torch.load(str(path), **mode), obj)
    assert tags(path) == {"cpu"}
    assert_intact(path)


@each("entries", [0, 5, 300], ids="{} memo entries before".format)
@each("legacy", [False, True], ids=["zip", "legacy"])
def test_many_tensors_are_patched_in_place(entries: int, legacy: bool, tmp_path: Path) -> None:
    """Memo indexes of one and four bytes, sizes of one, two and four bytes, and a storage used twice."""
    numels = (1, 255, 256, 70_000)
    tensors = {f"t{i}": torch.full((numels[i % 4],), float(i)) for i in range(120)}
    obj = {"config": {f"k{i}": f"v{i}" for i in range(entries)}, **tensors, "again": tensors["t7"], "cuda:0": "cuda:0"}
    path = save(obj, tmp_path / "many.pt", _use_new_zipfile_serialization=not legacy)
    result = retag(path, "cpu")
    assert (result.method, result.grown) == ("patch", 0)
    assert same(torch.load(path), obj)
    reloaded = torch.load(path)
    assert reloaded["again"].data_ptr() == reloaded["t7"].data_ptr()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols_2_to_5_are_retagged(protocol: int, tmp_path: Path) -> None:
    obj = {"text": "cuda:0", **state(20)}
    path = save(obj, tmp_path / "model.pt", pickle_protocol=protocol)
    assert retag(path, "cpu").method == "patch"
    assert same(torch.load(path, weights_only=False), obj)
    assert retag(path, "privateuseone:7").method == "append"
    assert tags(path) == {"privateuseone:7"}
    assert retag(path, "cpu").changed
    assert same(torch.load(path, weights_only=False), obj)
    assert_intact(path)


def test_tag_map_changes_tags_by_name(tmp_path: Path) -> None:
    order = iter(["cuda:0", "cuda:1", "cpu", "cuda:1", "cuda:2"])
    path = save(list(map(torch.tensor, ([1], [2], [3], [4], [5]))), tmp_path / "model.pt", lambda _: fresh(next(order)))
    result = retag(path, {"cuda:1": "cuda:0", "cuda:7": "cpu"})
    assert "cuda:1  →  cuda:0  2 storages" in str(result)
    assert {(tag.old, tag.new, tag.storages) for tag in result.tags} == {
        ("cuda:0", "cuda:0", 1),
        ("cuda:1", "cuda:0", 2),
        ("cpu", "cpu", 1),
        ("cuda:2", "cuda:2", 1),
    }
    assert [storage.device for storage in inspect(path).storages] == ["cuda:0", "cuda:0", "cpu", "cuda:0", "cuda:2"]
    retag(path, {"cuda:2": "cuda:1", "*": "cpu"})
    assert [storage.device for storage in inspect(path).storages] == ["cpu", "cpu", "cpu", "cpu", "cuda:1"]


def test_file_with_the_requested_tags_is_not_written(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt", "cpu")
    before = path.stat()
    result = retag(path, "cpu", keep_undo=True)
    assert (result.method, result.changed, result.written, result.done) == ("none", False, 0, True)
    assert (path.stat().st_mtime_ns, names_in(tmp_path)) == (before.st_mtime_ns, ["model.pt"])


def test_meta_tensors_keep_their_tag(tmp_path: Path) -> None:
    path = save(
        {"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.pt", lambda s: ("meta", "cuda:0")[len(s) > 8]
    )
    assert tags(path) == {"meta", "cuda:0"}
    retag(path, "cpu")
    assert tags(path) == {"meta", "cpu"}


@pytest.mark.parametrize("to", ["cpu", "privateuseone:10"])
def test_dry_run_changes_nothing_and_predicts_the_result(to: str, tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    before = path.read_bytes(), path.stat().st_mtime_ns
    plan = retag(path, to, dry_run=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns, names_in(tmp_path)) == (*before, ["model.pt"])
    result = retag(path, to)
    assert not plan.done
    assert {**plan.to_dict(), "done": True} == result.to_dict()
    assert path.stat().st_size == len(before[0]) + result.grown
    assert retag(path, to, out=tmp_path / "other.pt", dry_run=True).method == "none"
    assert names_in(tmp_path) == ["model.pt"]


def test_appended_index_is_overwritten_by_the_next_retag(tmp_path: Path) -> None:
    """Retagging back and forth does not grow the file."""
    path = save(state(), tmp_path / "model.pt", "cpu")
    sizes = []
    for to in ("cuda:0", "privateuseone:0", "cuda:0", "privateuseone:0", "cpu"):
        retag(path, to)
        sizes.append(path.stat().st_size)
        assert_intact(path)
    assert sizes[1] == sizes[3]
    assert same(torch.load(path), state())


def test_archive_without_checksums_stays_without(tmp_path: Path) -> None:
    """torch can be configured to write none."""
    path = tmp_path / "model.pt"
    body = forge.pickled(forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "cuda:0"))}))
    records = [replace(entry, crc32=0) for entry in forge.entries(body, {"0": forge.FLOATS})]
    path.write_bytes(forge.archive(records))
    assert "no-checksums" in {problem.code for problem in inspect(path).problems}
    for to in ("cpu", "cuda:10"):
        retag(path, to)
        assert "no-checksums" in {problem.code for problem in inspect(path).problems}
        assert tags(path) == {to}


@pytest.mark.parametrize("to", ["cuda:1", "cuda:10"])
def test_archive_beyond_four_gigabytes_is_retagged(to: str, tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large.pt", (4 << 30) + 64
    storages = {
        key: forge.storage_id(key, numel, "FloatStorage", "cuda:0") for key, numel in (("0", nbytes // 4), ("1", 4))
    }
    body = forge.pickled(forge.ordered({key: forge.tensor(storage=storage) for key, storage in storages.items()}))
    forge.sparse_archive(path, nbytes, 1, body)
    if not forge.is_sparse(path):
        pytest.skip("the file system does not support sparse files")
    result = retag(path, to)
    assert result.method == ("patch" if to == "cuda:1" else "append")
    assert forge.is_sparse(path)
    assert tags(path) == {to}
    assert not [problem for problem in inspect(path).problems if problem.code.startswith("zip")]
    with zipfile.ZipFile(path) as archive:
        assert to.encode() in archive.read("archive/data.pkl")  # zipfile checks the checksum
        assert archive.read("archive/data/1") == forge.FLOATS
    copy = tmp_path / "copy.pt"
    retag(path, "mps", out=copy)
    assert forge.is_sparse(copy)
    assert tags(copy) == {"mps"}


def test_torch_maps_a_retagged_archive_beyond_four_gigabytes(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large.pt", (4 << 30) + 64
    storages = {
        key: forge.storage_id(key, numel, "FloatStorage", "cpu") for key, numel in (("0", nbytes // 4), ("1", 4))
    }
    body = forge.pickled(forge.ordered({key: forge.tensor(storage=storage) for key, storage in storages.items()}))
    forge.sparse_archive(path, nbytes, 1, body)
    if not forge.is_sparse(path):
        pytest.skip("the file system does not support sparse files")
    retag(path, "privateuseone:0")
    record = next(record for record in inspect(path).records if record.name == "data.pkl")
    assert record.offset is not None
    assert record.offset > 1 << 32
    assert record.offset % 64 == 0
    retag(path, "cpu")
    assert torch.load(str(path), mmap=True)["1"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("to", ["cpu", "privateuseone:10"])
def test_copy_has_the_new_tags_and_the_source_is_unchanged(legacy: bool, to: str, tmp_path: Path) -> None:
    obj = {"name": "cuda:0", **state()}
    path = save(obj, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    before, copy = path.read_bytes(), tmp_path / "copy.pt"
    result = retag(path, to, out=copy)
    assert (path.read_bytes(), tags(copy)) == (before, {to})
    assert result.how in ("shared", "copied by the kernel", "copied")
    assert names_in(tmp_path) == ["copy.pt", "model.pt"]
    assert same(torch.load(copy, map_location="cpu"), obj)
    assert_intact(copy)
    again = tmp_path / "again.pt"
    assert not retag(copy, to, out=again).changed
    assert again.read_bytes() == copy.read_bytes()


def test_copy_without_reflinks_and_copy_file_range_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", out=tmp_path / "one.pt")
    monkeypatch.setattr("transload.io.journal._FICLONE", 0)
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    assert retag(path, "cpu", out=tmp_path / "two.pt").how == "copied"
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_hostile_file_is_retagged_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    storage = forge.storage_id("0", 4, "FloatStorage", "cuda:0")
    dangerous = forge.call(forge.name("os", "getcwd"))
    body = forge.pickled(forge.list_of(dangerous, forge.tensor(storage=storage)))
    path.write_bytes(forge.checkpoint(body, {"0": forge.FLOATS}))
    result = retag(path, "cpu")
    assert "can do harm" in result.warnings[0]
    assert tags(path) == {"cpu"}


def test_torch_device_values_are_reported_and_kept(tmp_path: Path) -> None:
    obj = {"where": torch.device("cuda", 1), "state": state()}
    result = retag(save(obj, tmp_path / "model.pt"), "cpu")
    assert result.warnings == ("torch.device values stay as they are: where",)
    assert torch.load(tmp_path / "model.pt")["where"] == torch.device("cuda:1")


def test_undo_restores_the_file(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    old = path.read_bytes()
    with pytest.raises(RetagError, match="no journal was kept"):
        undo(path)
    retag(path, "privateuseone:10", keep_undo=True)
    new = path.read_bytes()
    assert undo(path, dry_run=True).grown == len(old) - len(new)
    assert path.read_bytes() == new
    assert undo(path).method == "undo"
    assert path.read_bytes() == old
    assert names_in(tmp_path) == ["model.pt"]
    retag(path, "cpu", keep_undo=True)
    retag(path, "mps")  # the undo journal no longer matches
    assert names_in(tmp_path) == ["model.pt"]


def test_undo_is_refused_if_the_file_changed_since(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    save(state(4), path)
    with pytest.raises(RetagError, match="changed since"):
        undo(path)


def test_journal_of_a_replaced_file_is_not_applied(tmp_path: Path) -> None:
    """An interrupted retag left a journal, and another file has replaced the file it belongs to."""
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    journal, undo_journal = journals(path)
    undo_journal.rename(journal)
    save(state(5), path)
    other = path.read_bytes()
    assert has_journal(path)
    with pytest.raises(RetagError, match="replaced or copied") as caught:
        retag(path, "cpu")
    assert str(journal) in caught.value.fix
    assert path.read_bytes() == other
    with pytest.raises(RetagError, match="journal beside it belongs to another file"):
        undo(path)
    journal.write_bytes(b"no journal at all")
    with pytest.raises(RetagError, match="replaced or copied"):
        retag(path, "cpu")


def test_copied_journal_is_applied_only_by_an_explicit_undo(tmp_path: Path) -> None:
    """It belongs to another file, however well it matches."""
    path = save(state(), tmp_path / "model.pt")
    old = path.read_bytes()
    retag(path, "privateuseone:10", keep_undo=True)
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    copy.write_bytes(path.read_bytes()[:-100])
    journals(copy)[0].write_bytes(journals(path)[1].read_bytes())
    torn = copy.read_bytes()
    assert recover(copy) == "stale"
    with pytest.raises(RetagError, match="replaced or copied") as caught:
        retag(copy, "cpu")
    assert f"transload retag {copy} --undo" in caught.value.fix
    assert copy.read_bytes() == torn
    assert undo(copy).recovered == "restored"
    assert copy.read_bytes() == old
    assert names_in(copy.parent) == [copy.name]


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="only root can create files of other users")
def test_journal_of_another_user_is_ignored(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    journal, undo_journal = journals(path)
    undo_journal.rename(journal)
    try:
        os.chown(journal, 12345, 12345)
    except OSError:
        pytest.skip("root cannot change file owners here, as in a user namespace without other users")
    assert recover(path) == "stale"
    os.chown(path, 12345, 12345)
    assert recover(path) == "finished"
    assert not has_journal(path)


def test_next_retag_recovers_an_interrupted_one(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "privateuseone:10", keep_undo=True)
    journal, undo_journal = journals(path)
    undo_journal.rename(journal)
    retagged = path.read_bytes()
    path.write_bytes(retagged[:-100])  # the last write is incomplete
    result = retag(path, "cpu")
    assert result.recovered == "restored"
    assert same(torch.load(path), state())


@each(
    ("to", "message"),
    [
        ("cpu:0", "only 'cpu'"),
        ("mps:0", "only 'mps'"),
        ("meta", "without data"),
        ("xla:0", "no storages on xla"),
        ("cuda:01", "not a device"),
        ("", "not a device"),
        ("CPU", "not a device"),
        ("cuda:-1", "not a device"),
        ({}, "no device is named"),
        ({"cuda:0": "cpu:1"}, "only 'cpu'"),
        ({"": "cpu"}, "not a tag"),
        ({"meta": "cpu"}, "not a tag"),
        (3, "expected a device"),
    ],
    ids=str,
)
def test_invalid_devices_are_usage_errors(to: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        retag(tmp_path / "absent.pt", to)


def test_torch_device_is_accepted(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, {"cuda:0": torch.device("cpu")})
    assert tags(path) == {"cpu"}


def test_retagged_file_equals_the_cpu_file_of_the_same_release(tmp_path: Path) -> None:
    """The CPU file was saved by the same torch release."""
    for folder in sorted((DATA / "torch-releases").iterdir()):
        if not folder.is_dir() or not (folder / "expected.json").exists():
            continue
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        assert expected
        copy = tmp_path / "model.pt"
        shutil.copyfile(folder / "state_dict_cuda0.pt", copy)
        retag(copy, "cpu")
        assert same(dict(torch.load(copy)), dict(torch.load(folder / "state_dict_cpu.pt")))
