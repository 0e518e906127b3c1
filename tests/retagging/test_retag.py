"""Retagged files: what torch makes of them, what they hold, and what is not touched."""

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
from transload.judge import inspect
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


def loaded(path: Path, **options: Any) -> Any:
    """What torch makes of a file; why not where it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are told once only, which would make the second load another one
            return torch.load(str(path), **options)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is compared
        getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()  # or the next load fails on them
        return type(error).__name__, str(error).replace(str(path), "FILE")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tags(path: Path) -> set[str]:
    return {storage.device for storage in inspect(path).storages}


def but_tags(checkpoint: Checkpoint) -> list[object]:
    """All that must be as before."""
    return [
        checkpoint.leaves,
        [tensor._replace(device="", file_offset=None) for tensor in checkpoint.tensors if not tensor.parts],
        [storage._replace(device="", offset=None) for storage in checkpoint.storages],
        [(use.full_name, use.imported, use.called, use.built) for use in checkpoint.globals],
        checkpoint.safety,
        checkpoint.integrity,
        [finding.code for finding in checkpoint.findings],
    ]


def is_sound(path: Path) -> None:
    """zipfile finds no fault, and tensors are aligned for mmap."""
    if inspect(path).format == "torch-zip":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        assert inspect(path, verify=True).integrity == "whole"


@each_file
@pytest.mark.parametrize("to", ["cpu", "cuda:11"])
def test_every_file_of_every_release(path: Path, to: str, tmp_path: Path) -> None:
    before = inspect(path)
    copy, made = tmp_path / path.name, tmp_path / "made.pt"
    shutil.copyfile(path, copy)
    in_copy = retag(copy, to, out=made)
    assert copy.read_bytes() == path.read_bytes()
    assert tags(made) == ({to} if before.storages else set())
    assert but_tags(inspect(made)) == but_tags(before)
    is_sound(made)
    if in_copy.method != "rewrite":  # and in place the same bytes
        assert retag(copy, to, keep_undo=True).method == in_copy.method
        assert copy.read_bytes() == made.read_bytes()
        if in_copy.changed:
            undo(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(name.name for name in tmp_path.iterdir()) == sorted([copy.name, made.name])


@each_file
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_torch_loads_it_without_a_map_location(path: Path, mode: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / path.name
    shutil.copyfile(path, copy)
    retag(copy, "cpu")
    expected, found = loaded(path, map_location="cpu", **mode), loaded(copy, **mode)
    if isinstance(expected, torch.nn.Module):
        expected, found = expected.state_dict(), found.state_dict()
    if isinstance(expected, dict) and "custom" in path.name:
        expected = {key: value for key, value in expected.items() if isinstance(value, torch.Tensor)}
    assert plain(expected) == plain(found)


def plain(value: Any) -> Any:
    """Values that can be compared."""
    if isinstance(value, torch.Tensor):
        dense = (
            value.dequantize() if value.is_quantized else value.to_dense() if value.layout != torch.strided else value
        )
        if getattr(dense, "is_nested", False):
            return [plain(part) for part in dense.unbind()]
        return str(value.dtype), str(value.device), tuple(value.shape), repr(dense.tolist())
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return type(value).__name__, repr(value) if isinstance(value, str | int | float | bool | None) else ""


@pytest.mark.parametrize("mode", MODES, ids=str)
@each("tag", ["cuda:0", "xpu:100"])
@each("shared", [False, True], ids=["each its own", "one for all"])
@each("user", [False, True], ids=["alone", "shared with the user"])
def test_a_users_text_stays(*, tag: str, mode: dict[str, Any], shared: bool, user: bool, tmp_path: Path) -> None:
    one = fresh(tag)
    obj = {"before": one if user else fresh(tag), "state": state(), "after": [one, fresh(tag)], tag: tag}
    path = save(obj, tmp_path / "model.pt", (lambda _: one) if shared else tag)
    assert retag(path, "cpu").method == ("append" if shared else "patch")
    assert same(torch.load(str(path), **mode), obj)
    assert tags(path) == {"cpu"}
    is_sound(path)


@each("entries", [0, 5, 300], ids="{} memo entries before".format)
@each("legacy", [False, True], ids=["zip", "legacy"])
def test_many_tensors(entries: int, legacy: bool, tmp_path: Path) -> None:
    """Memo indexes of one byte and of four, sizes of one, two and four, and storages that are named twice."""
    numels = (1, 255, 256, 70_000)
    tensors = {f"t{i}": torch.full((numels[i % 4],), float(i)) for i in range(120)}
    obj = {"config": {f"k{i}": f"v{i}" for i in range(entries)}, **tensors, "again": tensors["t7"], "cuda:0": "cuda:0"}
    path = save(obj, tmp_path / "many.pt", _use_new_zipfile_serialization=not legacy)
    made = retag(path, "cpu")
    assert (made.method, made.grown) == ("patch", 0)
    assert same(torch.load(path), obj)
    back = torch.load(path)
    assert back["again"].data_ptr() == back["t7"].data_ptr()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_pickle_protocols(protocol: int, tmp_path: Path) -> None:
    obj = {"text": "cuda:0", **state(20)}
    path = save(obj, tmp_path / "model.pt", pickle_protocol=protocol)
    assert retag(path, "cpu").method == "patch"
    assert same(torch.load(path, weights_only=False), obj)
    assert retag(path, "privateuseone:7").method == "append"
    assert tags(path) == {"privateuseone:7"}
    assert retag(path, "cpu").changed
    assert same(torch.load(path, weights_only=False), obj)
    is_sound(path)


def test_tags_by_name(tmp_path: Path) -> None:
    order = iter(["cuda:0", "cuda:1", "cpu", "cuda:1", "cuda:2"])
    path = save(list(map(torch.tensor, ([1], [2], [3], [4], [5]))), tmp_path / "model.pt", lambda _: fresh(next(order)))
    made = retag(path, {"cuda:1": "cuda:0", "cuda:7": "cpu"})
    assert "cuda:1  →  cuda:0  2 storages" in str(made)
    assert {(tag.old, tag.new, tag.storages) for tag in made.tags} == {
        ("cuda:0", "cuda:0", 1),
        ("cuda:1", "cuda:0", 2),
        ("cpu", "cpu", 1),
        ("cuda:2", "cuda:2", 1),
    }
    assert [storage.device for storage in inspect(path).storages] == ["cuda:0", "cuda:0", "cpu", "cuda:0", "cuda:2"]
    retag(path, {"cuda:2": "cuda:1", "*": "cpu"})
    assert [storage.device for storage in inspect(path).storages] == ["cpu", "cpu", "cpu", "cpu", "cuda:1"]


def test_what_is_right_already_is_not_touched(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt", "cpu")
    before = path.stat()
    made = retag(path, "cpu", keep_undo=True)
    assert (made.method, made.changed, made.written, made.done) == ("none", False, 0, True)
    assert (path.stat().st_mtime_ns, names_in(tmp_path)) == (before.st_mtime_ns, ["model.pt"])


def test_tensors_on_meta_stay_there(tmp_path: Path) -> None:
    path = save(
        {"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.pt", lambda s: ("meta", "cuda:0")[len(s) > 8]
    )
    assert tags(path) == {"meta", "cuda:0"}
    retag(path, "cpu")
    assert tags(path) == {"meta", "cpu"}


@pytest.mark.parametrize("to", ["cpu", "privateuseone:10"])
def test_a_plan_changes_nothing(to: str, tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    before = path.read_bytes(), path.stat().st_mtime_ns
    plan = retag(path, to, dry_run=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns, names_in(tmp_path)) == (*before, ["model.pt"])
    done = retag(path, to)
    assert not plan.done
    assert {**plan.to_dict(), "done": True} == done.to_dict()
    assert path.stat().st_size == len(before[0]) + done.grown
    assert retag(path, to, out=tmp_path / "other.pt", dry_run=True).method == "none"
    assert names_in(tmp_path) == ["model.pt"]


def test_an_index_that_was_appended_is_written_over(tmp_path: Path) -> None:
    """Going to and fro does not make the file longer and longer."""
    path = save(state(), tmp_path / "model.pt", "cpu")
    sizes = []
    for to in ("cuda:0", "privateuseone:0", "cuda:0", "privateuseone:0", "cpu"):
        retag(path, to)
        sizes.append(path.stat().st_size)
        is_sound(path)
    assert sizes[1] == sizes[3]
    assert same(torch.load(path), state())


def test_an_archive_without_checksums(tmp_path: Path) -> None:
    """torch can be told to write none: then there are none afterwards."""
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
def test_beyond_four_gigabytes(to: str, tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large.pt", (4 << 30) + 64
    held = {
        key: forge.storage_id(key, numel, "FloatStorage", "cuda:0") for key, numel in (("0", nbytes // 4), ("1", 4))
    }
    body = forge.pickled(forge.ordered({key: forge.tensor(storage=storage) for key, storage in held.items()}))
    forge.sparse_archive(path, nbytes, 1, body)
    if not forge.is_sparse(path):
        pytest.skip("the file system does not support sparse files")
    made = retag(path, to)
    assert made.method == ("patch" if to == "cuda:1" else "append")
    assert forge.is_sparse(path)
    assert tags(path) == {to}
    assert not [problem for problem in inspect(path).problems if problem.code.startswith("zip")]
    with zipfile.ZipFile(path) as archive:
        assert to.encode() in archive.read("archive/data.pkl")  # and its checksum is right
        assert archive.read("archive/data/1") == forge.FLOATS
    copy = tmp_path / "copy.pt"
    retag(path, "mps", out=copy)
    assert forge.is_sparse(copy)
    assert tags(copy) == {"mps"}


def test_torch_maps_what_lies_beyond_four_gigabytes(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large.pt", (4 << 30) + 64
    held = {key: forge.storage_id(key, numel, "FloatStorage", "cpu") for key, numel in (("0", nbytes // 4), ("1", 4))}
    body = forge.pickled(forge.ordered({key: forge.tensor(storage=storage) for key, storage in held.items()}))
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
def test_a_copy(legacy: bool, to: str, tmp_path: Path) -> None:
    obj = {"name": "cuda:0", **state()}
    path = save(obj, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    before, copy = path.read_bytes(), tmp_path / "copy.pt"
    made = retag(path, to, out=copy)
    assert (path.read_bytes(), tags(copy)) == (before, {to})
    assert made.how in ("shared", "copied by the kernel", "copied")
    assert names_in(tmp_path) == ["copy.pt", "model.pt"]
    assert same(torch.load(copy, map_location="cpu"), obj)
    is_sound(copy)
    again = tmp_path / "again.pt"
    assert not retag(copy, to, out=again).changed
    assert again.read_bytes() == copy.read_bytes()


def test_a_copy_where_the_system_cannot_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", out=tmp_path / "one.pt")
    monkeypatch.setattr("transload.io.journal._FICLONE", 0)
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    assert retag(path, "cpu", out=tmp_path / "two.pt").how == "copied"
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_a_stranger_s_file_is_retagged_without_being_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    storage = forge.storage_id("0", 4, "FloatStorage", "cuda:0")
    evil = forge.call(forge.name("os", "getcwd"))
    body = forge.pickled(forge.listing(evil, forge.tensor(storage=storage)))
    path.write_bytes(forge.checkpoint(body, {"0": forge.FLOATS}))
    made = retag(path, "cpu")
    assert "can do harm" in made.warnings[0]
    assert tags(path) == {"cpu"}


def test_devices_elsewhere_are_told_of(tmp_path: Path) -> None:
    obj = {"where": torch.device("cuda", 1), "state": state()}
    made = retag(save(obj, tmp_path / "model.pt"), "cpu")
    assert made.warnings == ("torch.device values stay as they are: where",)
    assert torch.load(tmp_path / "model.pt")["where"] == torch.device("cuda:1")


def test_undo(tmp_path: Path) -> None:
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
    retag(path, "mps")  # what was kept no longer fits
    assert names_in(tmp_path) == ["model.pt"]


def test_a_file_that_was_changed_since_is_not_undone(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    save(state(4), path)
    with pytest.raises(RetagError, match="changed since"):
        undo(path)


def test_a_file_that_was_replaced_since_is_left_alone(tmp_path: Path) -> None:
    """The journal of an interrupted retag, and another file in the place of the one it belongs to."""
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    journal, kept = journals(path)
    kept.rename(journal)
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


def test_a_journal_that_came_with_a_download_changes_nothing(tmp_path: Path) -> None:
    """It speaks of another file, however well it fits; who knows better can say so."""
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create files of other users")
def test_the_journal_of_a_stranger_changes_nothing(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "cpu", keep_undo=True)
    journal, kept = journals(path)
    kept.rename(journal)
    try:
        os.chown(journal, 12345, 12345)
    except OSError:
        pytest.skip("root cannot change file owners here, as in a user namespace without other users")
    assert recover(path) == "stale"
    os.chown(path, 12345, 12345)
    assert recover(path) == "finished"
    assert not has_journal(path)


def test_an_interrupted_retag_is_put_right_by_the_next(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, "privateuseone:10", keep_undo=True)
    journal, kept = journals(path)
    kept.rename(journal)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])  # the last write is not all there
    made = retag(path, "cpu")
    assert made.recovered == "restored"
    assert same(torch.load(path), state())


@each(
    ("to", "said"),
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
def test_devices_that_make_no_sense(to: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        retag(tmp_path / "absent.pt", to)


def test_a_device_of_torch_is_a_device(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt")
    retag(path, {"cuda:0": torch.device("cpu")})
    assert tags(path) == {"cpu"}


def test_the_expected_values_are_those_of_the_release(tmp_path: Path) -> None:
    """What was written down when the files were made, not only what torch makes of the original."""
    for folder in sorted((DATA / "torch-releases").iterdir()):
        if not folder.is_dir() or not (folder / "expected.json").exists():
            continue
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        assert expected
        copy = tmp_path / "model.pt"
        shutil.copyfile(folder / "state_dict_cuda0.pt", copy)
        retag(copy, "cpu")
        assert same(dict(torch.load(copy)), dict(torch.load(folder / "state_dict_cpu.pt")))
