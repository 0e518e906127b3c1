"""Checkpoint directories: recognised by their files, merged, checked against their index, and no path leads outside."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable, Sequence
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import forge

import transload
from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.findings import Problem
from transload.formats import read_source, sets
from transload.formats.sets.merger import Merger
from transload.io.folder import MAX_ENTRIES, Folder, Listing, relative_path
from transload.io.paths import folder_of
from transload.io.sources import BytesSource, FileSource, Source
from transload.loading import load
from transload.opening import inspect
from transload.opening import inspect as read

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

not_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root can read everything")


def read_dir(path: Path, *, verify: bool = False) -> Checkpoint:
    return read_folder(path, read, verify=verify)


def read_folder(path: Path, read: Callable[[str], Checkpoint], *, verify: bool = False) -> Checkpoint:
    folder, index = folder_of(path)
    read_item = partial(read_source, verify=verify)
    reopened = partial(folder.open, keep=False)
    return sets.read(folder, lambda name: read(folder.path(name)), reopened, read_item, index=index)


def codes(checkpoint: Checkpoint) -> list[str]:
    return sorted(problem.code for problem in checkpoint.problems)


def problem(checkpoint: Checkpoint, code: str) -> Problem:
    (match,) = [problem for problem in checkpoint.problems if problem.code == code]
    return match


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(n % 251 for n in range(at)))


def write_index(path: Path, weights: dict[str, Any], total: object = None) -> None:
    metadata = {} if total is None else {"total_size": total}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weights}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / ONE, {"a": (2, 3), "b": (4,)})
    write_safetensors(tmp_path / TWO, {"c": (5,)})
    write_index(tmp_path / "model.safetensors.index.json", {"a": ONE, "b": ONE, "c": TWO}, 60)
    return tmp_path


class TestSharded:
    def test_shards_are_merged(self, sharded: Path) -> None:
        checkpoint = read_dir(sharded)
        assert (checkpoint.format, codes(checkpoint), checkpoint.path) == ("sharded", [], str(sharded))
        assert [tensor.name for tensor in checkpoint.tensors] == ["a", "b", "c"]
        assert [storage.id for storage in checkpoint.storages] == [f"{ONE}:a", f"{ONE}:b", f"{TWO}:c"]
        assert [tensor.storage for tensor in checkpoint.tensors] == [storage.id for storage in checkpoint.storages]
        assert {storage.file for storage in checkpoint.storages} == {ONE, TWO}
        assert [part.name for part in checkpoint.parts] == [ONE, TWO, "model.safetensors.index.json"]
        assert checkpoint.nbytes == sum(path.stat().st_size for path in sharded.iterdir())

    def test_storage_offsets_point_at_the_bytes(self, sharded: Path) -> None:
        load_file = pytest.importorskip("safetensors.torch").load_file
        for storage in read_dir(sharded).storages:
            assert storage.offset is not None
            data = (sharded / storage.file).read_bytes()[storage.offset : storage.offset + storage.nbytes]
            assert data == load_file(sharded / storage.file)[storage.tensors[0]].numpy().tobytes()

    def test_index_file_is_read_without_its_directory(self, sharded: Path) -> None:
        checkpoint = read_dir(sharded / "model.safetensors.index.json")
        assert (checkpoint.format, codes(checkpoint), len(checkpoint.tensors)) == ("sharded", [], 3)

    def test_pickled_shards(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
        torch.save({"b": torch.ones(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
        write_index(
            tmp_path / "pytorch_model.bin.index.json",
            {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"},
            20.0,
        )
        checkpoint = read_dir(tmp_path)
        assert (codes(checkpoint), [tensor.name for tensor in checkpoint.tensors], len(checkpoint.pickles)) == (
            [],
            ["a", "b"],
            2,
        )
        assert len({storage.id for storage in checkpoint.storages}) == 2

    def test_conj_flag_of_a_tensor_in_a_shard(self, tmp_path: Path) -> None:
        torch.save({"z": torch.tensor([1 + 2j]).conj()}, tmp_path / "one.bin")
        write_index(tmp_path / "pytorch_model.bin.index.json", {"z": "one.bin"})
        assert read_dir(tmp_path).tensor("z").flags == ("conj",)

    def test_missing_shard_is_reported(self, sharded: Path) -> None:
        (sharded / TWO).unlink()
        checkpoint = read_dir(sharded)
        assert codes(checkpoint) == ["shard-missing"]
        assert problem(checkpoint, "shard-missing").where == TWO
        assert "c" in problem(checkpoint, "shard-missing").detail
        assert [tensor.name for tensor in checkpoint.tensors] == ["a", "b"]

    def test_dangling_link_to_a_shard_is_reported(self, sharded: Path) -> None:
        (sharded / TWO).unlink()
        (sharded / TWO).symlink_to("../../blobs/gone")
        assert codes(read_dir(sharded)) == ["link-dangling", "shard-missing"]

    def test_links_out_of_the_directory_are_followed(
        self, sharded: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        blob = tmp_path_factory.mktemp("blobs") / "0123"
        shutil.move(sharded / TWO, blob)
        (sharded / TWO).symlink_to(blob)
        assert codes(read_dir(sharded)) == []

    def test_tensor_missing_from_its_shard(self, sharded: Path) -> None:
        write_index(sharded / "model.safetensors.index.json", {"a": ONE, "b": TWO, "c": TWO})
        assert codes(read_dir(sharded)) == ["shard-tensor-missing"]
        assert problem(read_dir(sharded), "shard-tensor-missing").where == TWO

    def test_tensor_missing_from_the_index(self, sharded: Path) -> None:
        write_index(sharded / "model.safetensors.index.json", {"a": ONE, "c": TWO})
        assert codes(read_dir(sharded)) == ["shard-tensor-unlisted"]

    def test_tensor_in_two_shards(self, sharded: Path) -> None:
        write_safetensors(sharded / TWO, {"c": (5,), "a": (1,)})
        assert codes(read_dir(sharded)) == ["index-total-size", "shard-tensor-twice"]

    def test_wrong_total_size_in_the_index(self, sharded: Path) -> None:
        write_index(sharded / "model.safetensors.index.json", {"a": ONE, "b": ONE, "c": TWO}, 61)
        assert problem(read_dir(sharded), "index-total-size").detail == "the index says 61 bytes, the tensors take 60"

    def test_total_size_may_count_tied_weights_once_or_twice(self, tmp_path: Path) -> None:
        weight = torch.ones(4)
        torch.save({"a": weight, "tied": weight}, tmp_path / "m.bin")
        for total in (16, 32):
            write_index(tmp_path / "m.bin.index.json", {"a": "m.bin", "tied": "m.bin"}, total)
            assert codes(read_dir(tmp_path)) == []

    def test_stray_shard_of_an_older_save(self, sharded: Path) -> None:
        write_safetensors(sharded / "model-00003-of-00003.safetensors", {"old": (1,)})
        assert codes(read_dir(sharded)) == ["directory-others", "shard-stray"]

    def test_damaged_shard_is_named(self, sharded: Path) -> None:
        data = (sharded / TWO).read_bytes()
        (sharded / TWO).write_bytes(data[:-4])
        assert problem(read_dir(sharded), "safetensors-truncated").where == TWO

    def test_git_lfs_pointer_instead_of_a_shard(self, sharded: Path) -> None:
        (sharded / TWO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
        checkpoint = read_dir(sharded)
        unread = problem(checkpoint, "part-unreadable")
        assert unread.where == TWO
        assert "Git LFS" in unread.detail
        assert any("git lfs" in line for line in unread.fix)
        assert "shard-tensor-missing" in codes(checkpoint)

    @pytest.mark.parametrize(
        "name", ["../secret.bin", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", "a\0b", "\\\\host\\x"]
    )
    def test_shard_name_outside_the_directory_is_not_opened(self, tmp_path: Path, name: str) -> None:
        inside = tmp_path / "inside"
        inside.mkdir()
        torch.save({"a": torch.ones(1)}, tmp_path / "secret.bin")
        write_index(inside / "m.index.json", {"a": name})
        opened: list[str] = []

        def recording_read(path: str) -> Checkpoint:
            opened.append(path)
            return read(path)

        checkpoint = read_folder(inside / "m.index.json", recording_read)
        assert codes(checkpoint) == ["shard-outside"]
        assert opened == []

    def test_shard_name_too_long_for_a_file(self, tmp_path: Path) -> None:
        long = "x" * 300
        write_index(tmp_path / "m.index.json", {"a": long})
        assert codes(read_dir(tmp_path)) == ["shard-missing"]
        merger = Merger(Folder(str(tmp_path)).list(), read, FileSource, read_source)
        assert merger.open(long) is None
        assert [(reported.code, reported.detail) for reported in merger.noted.problems()] == [
            ("part-unreadable", "it does not exist")
        ]

    def test_index_that_names_indexes_or_a_directory(self, tmp_path: Path) -> None:
        write_index(tmp_path / "m.index.json", {"a": "m.index.json", "b": "./sub", "c": "other.index.json"})
        write_index(tmp_path / "other.index.json", {"a": "m.index.json"})
        (tmp_path / "sub").mkdir()
        assert codes(read_dir(tmp_path)) == ["part-unreadable"] * 3

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            "{",
            '{"weight_map": []}',
            '{"weight_map": {}}',
            "[" * 100_000,
            '{"weight_map": {"a": 1}}',
            "\x00",
            '{"weight_map": null}',
        ],
    )
    def test_invalid_index_is_reported(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "m.index.json").write_text(text)
        assert "index-invalid" in codes(read_dir(tmp_path))

    def test_index_that_is_a_git_lfs_pointer(self, tmp_path: Path) -> None:
        (tmp_path / "m.index.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
        assert "Git LFS pointer" in problem(read_dir(tmp_path), "index-invalid").detail

    def test_safetensors_index_is_preferred_over_a_pickle_index(self, sharded: Path) -> None:
        write_index(sharded / "pytorch_model.bin.index.json", {"a": "gone.bin"})
        checkpoint = read_dir(sharded)
        assert codes(checkpoint) == []
        assert ("also here, not read", "pytorch_model.bin.index.json") in checkpoint.facts

    def test_numbered_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        checkpoint = read_dir(sharded)
        assert (checkpoint.format, codes(checkpoint), len(checkpoint.tensors)) == ("sharded", ["index-missing"], 3)
        (sharded / ONE).unlink()
        checkpoint = read_dir(sharded)
        assert codes(checkpoint) == ["index-missing", "shard-missing"]
        assert problem(checkpoint, "shard-missing").where == ONE

    def test_ten_thousand_missing_shards_are_summarised(self, tmp_path: Path) -> None:
        write_index(tmp_path / "m.index.json", {str(n): f"{n}.bin" for n in range(10_000)})
        checkpoint = read_dir(tmp_path)
        assert len(checkpoint.problems) < 50
        assert any("more like this" in problem.detail for problem in checkpoint.problems)


# What transformers.Trainer saves, with fewer arguments.
TRAINING_ARGS = (
    b"\x80\x02ctransformers.training_args\nTrainingArguments\n)\x81}("
    b"X\x02\0\0\0lrG?\xb9\x99\x99\x99\x99\x99\x9a"
    b"X\x04\0\0\0evalctransformers.trainer_utils\nIntervalStrategy\nX\x02\0\0\0no\x85R"
    b"X\x06\0\0\0configctransformers.trainer_pt_utils\nAcceleratorConfig\n)\x81}X\x01\0\0\0a\x88sb"
    b"X\x03\0\0\0outcpathlib\nPosixPath\nX\x01\0\0\0x\x85R"
    b"X\x05\0\0\0statecaccelerate.state\nPartialState\n)\x81}(X\x04\0\0\0_cpu\x88"
    b"X\x06\0\0\0devicectorch\ndevice\nX\x03\0\0\0cpu\x85R"
    b"X\x04\0\0\0typecaccelerate.utils.dataclasses\nDistributedType\nX\x02\0\0\0NO\x85Rubub."
)


def save_file(path: Path, pickled: bytes) -> None:
    path.write_bytes(forge.checkpoint(pickled))


class TestOneFile:
    def test_weights_file_among_other_files(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        (tmp_path / "config.json").write_text("{}")
        torch.save({"lr": 0.1}, tmp_path / "optimizer.pt")
        checkpoint = read_dir(tmp_path)
        assert (checkpoint.format, checkpoint.path) == ("safetensors", str(tmp_path))
        assert [storage.file for storage in checkpoint.storages] == ["model.safetensors"]
        assert codes(checkpoint) == ["directory-others"]
        assert "optimizer.pt" in problem(checkpoint, "directory-others").detail
        assert [(part.name, part.kind) for part in checkpoint.parts] == [
            ("model.safetensors", "weights"),
            ("optimizer.pt", "beside the checkpoint"),
        ]

    def test_code_in_a_file_beside_the_weights_is_reported(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        assert inspect(tmp_path).safety == "data-only"
        (tmp_path / "training_args.bin").write_bytes(b"\x80\x02cos\ngetcwd\n)R.")
        checkpoint = inspect(tmp_path)
        assert checkpoint.safety == "dangerous"
        assert [use.full_name for use in checkpoint.globals] == ["os.getcwd"]

    def test_arguments_of_the_training_run_beside_the_weights_need_no_trust(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        save_file(tmp_path / "training_args.bin", TRAINING_ARGS)
        torch.save({"numpy": np.random.get_state()}, tmp_path / "rng_state.pth")
        checkpoint = inspect(tmp_path)
        assert (checkpoint.safety, [finding.code for finding in checkpoint.findings]) == (
            "data-only",
            ["directory-others"],
        )
        assert {use.verdict for use in checkpoint.globals} == {"data", "harmless"}
        assert inspect(tmp_path / "training_args.bin").safety == "needs-trust"
        assert transload.load(tmp_path)["a"].shape == (2,)

    @pytest.mark.parametrize(
        ("old", "new", "safety"),
        [
            (b"AcceleratorConfig", b"Accelerator_config", "needs-trust"),  # a name that is not on the list
            (b"ctransformers.trainer_pt_utils\nAcceleratorConfig", b"c__main__\nConfig", "needs-trust"),
            (b"caccelerate.state\nPartialState\n)\x81", b"caccelerate.state\nPartialState\n(I1\nI2\ntR", "needs-trust"),
            (b"caccelerate.state\nPartialState\n)\x81", b"caccelerate.state\nPartialState\n(]tR", "needs-trust"),
            (b"caccelerate.state\nPartialState\n)\x81", b"caccelerate.state\nPartialState.load\n)R", "needs-trust"),
            (b"caccelerate.state\nPartialState\n)\x81", b"cos\ngetcwd\n)R", "dangerous"),
            (b"cpathlib\nPosixPath", b"cbuiltins\nprint", "dangerous"),
        ],
    )
    def test_anything_else_in_the_arguments_counts(self, tmp_path: Path, old: bytes, new: bytes, safety: str) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        assert old in TRAINING_ARGS
        save_file(tmp_path / "training_args.bin", TRAINING_ARGS.replace(old, new))
        checkpoint = inspect(tmp_path)
        assert checkpoint.safety == safety
        if safety == "needs-trust":
            (fix,) = [finding.fix for finding in checkpoint.findings if finding.code == "needs-trust"]
            assert fix[-1] == f"$ transload inspect {tmp_path / 'training_args.bin'}"

    def test_two_readings_of_a_file_beside_the_weights_are_dangerous(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        frame = b"\x80\x04\x95" + struct.pack("<Q", 4) + b"cmac" + b"os\ngetcwd\n)R."
        save_file(tmp_path / "training_args.bin", frame)
        assert inspect(tmp_path).safety == "dangerous"

    def test_lines_for_a_directory_load_it_with_transload(self, tmp_path: Path) -> None:
        save_file(tmp_path / "pytorch_model.bin", TRAINING_ARGS)
        (fix,) = [finding.fix for finding in inspect(tmp_path).findings if finding.code == "needs-trust"]
        assert [line.strip() for line in fix if "load(" in line] == ["obj = transload.load(path)"]

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "whatever.ckpt"])
    def test_weights_file_is_found_by_name_or_as_the_only_candidate(self, tmp_path: Path, name: str) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / name)
        checkpoint = read_dir(tmp_path)
        assert (checkpoint.format, codes(checkpoint), len(checkpoint.tensors)) == ("torch-zip", [], 1)
        assert name in dict(checkpoint.facts)["read"]

    def test_safetensors_file_is_preferred_over_a_pickle(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
        write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
        assert read_dir(tmp_path).format == "safetensors"


class TestUnpackedArchive:
    def test_unpacked_archive_is_read_directly_or_from_its_parent(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "x.zip")
        shutil.unpack_archive(tmp_path / "x.zip", tmp_path / "out", "zip")
        assert read(tmp_path / "out" / "x").format == "torch-directory"
        outer = read(tmp_path / "out")
        assert (outer.format, outer.path) == ("torch-directory", str(tmp_path / "out"))
        assert [storage.file for storage in outer.storages] == ["x/data/0"]


def save_dcp(path: Path, state: dict[str, Any]) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not hasattr(dcp, "save"):  # before torch 2.2
            dcp.save_state_dict(state, dcp.FileSystemWriter(path), no_dist=True)
        else:
            dcp.save(state, checkpoint_id=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("dcp") / "step-1"
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "step": 7,
        "note": "hi",
    }
    save_dcp(path, state)
    return path, state


@pytest.fixture
def dcp(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


class TestDcp:
    def test_tensors_storages_and_parts(self, dcp: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        checkpoint = read_dir(dcp)
        assert (checkpoint.format, codes(checkpoint), checkpoint.flavour) == ("dcp", [], "")
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors} == {
            "model.w": ("float32", (3, 4)),
            "model.b": ("bfloat16", (3,)),
        }
        assert {leaf.name: leaf.kind for leaf in checkpoint.leaves} == {"step": "int", "note": "str"}
        expected = saved[1]["model"]["w"].numpy().tobytes()
        (storage,) = [storage for storage in checkpoint.storages if storage.tensors == ("model.w",)]
        assert storage.offset is not None
        assert (dcp / storage.file).read_bytes()[storage.offset : storage.offset + storage.nbytes] == expected
        assert checkpoint.tensor("model.w").storage == storage.id
        assert [(part.name, part.kind) for part in checkpoint.parts] == [
            ("__0_0.distcp", "rank file"),
            (".metadata", "index"),
        ]

    def test_one_of_its_files_leads_to_the_directory(self, dcp: Path) -> None:
        for name in ("__0_0.distcp", ".metadata"):
            (finding,) = inspect(dcp / name).findings
            assert finding.code == "not-a-checkpoint", name
            assert finding.fix == ("Name the directory.", f"$ transload inspect {dcp}"), name

    def test_every_pickle_is_listed(self, dcp: Path) -> None:
        names = {name for pickled in read_dir(dcp).pickles for name in pickled.globals}
        assert ("torch.distributed.checkpoint.metadata", "Metadata") in names
        assert ("torch._utils", "_rebuild_tensor_v2") in names
        assert len(read_dir(dcp).pickles) == 5

    def test_its_own_index_needs_no_trust(self, dcp: Path) -> None:
        checkpoint = inspect(dcp)
        assert (checkpoint.safety, checkpoint.ok, checkpoint.findings) == ("data-only", True, ())

    def test_nor_does_one_that_python_3_11_2_wrote(self, dcp: Path) -> None:
        """It looks up the members of enumerations by ``getattr``, which is accepted for nothing else."""
        from torch.distributed._shard.sharded_tensor import metadata
        from torch.distributed.checkpoint.metadata import Metadata

        index = pickle.loads((dcp / ".metadata").read_bytes())
        owners: list[tuple[Any, str]] = [
            (metadata.MEM_FORMAT_ENCODING, "data-only"),
            (Metadata, "data-only"),
            (Merger, "needs-trust"),
        ]
        for owner, safety in owners:

            class ByName:
                def __init__(self, owner: type, name: str) -> None:
                    self.parts = owner, name

                def __reduce__(self) -> tuple[Callable[..., Any], tuple[type, str]]:
                    return getattr, self.parts

            index.planner_data = ByName(owner, "TORCH_CONTIGUOUS_FORMAT")
            (dcp / ".metadata").write_bytes(pickle.dumps(index))
            assert inspect(dcp).safety == safety, owner

    @pytest.mark.parametrize(
        ("function", "safety"), [(Merger, "needs-trust"), (print, "dangerous"), (os.getcwd, "dangerous")]
    )
    def test_other_names_in_its_index_count(self, dcp: Path, function: Callable[..., Any], safety: str) -> None:
        index = pickle.loads((dcp / ".metadata").read_bytes())
        index.planner_data = function
        (dcp / ".metadata").write_bytes(pickle.dumps(index))
        assert inspect(dcp).safety == safety

    def test_code_in_an_item_is_listed(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
                return os.system, ("echo",)

        save_dcp(tmp_path / "evil", {"a": torch.ones(1), "x": Evil()})
        names = {name[1] for pickled in read_dir(tmp_path / "evil").pickles for name in pickled.globals}
        assert "system" in names

    def test_unfinished_save_without_metadata(self, dcp: Path) -> None:
        (dcp / ".metadata").rename(dcp / ".metadata.tmp")
        checkpoint = read_dir(dcp)
        assert codes(checkpoint) == ["dcp-metadata-missing"]
        assert ".metadata.tmp" in problem(checkpoint, "dcp-metadata-missing").detail
        assert [part.name for part in checkpoint.parts] == ["__0_0.distcp"]

    def test_missing_rank_file(self, dcp: Path) -> None:
        (dcp / "__0_0.distcp").unlink()
        checkpoint = read_dir(dcp)
        assert sorted(set(codes(checkpoint))) == ["dcp-file-missing", "dcp-object-missing", "dcp-piece-missing"]
        assert {tensor.name for tensor in checkpoint.tensors} == {"model.w", "model.b"}
        assert all(tensor.storage is None for tensor in checkpoint.tensors)

    def test_truncated_rank_file(self, dcp: Path) -> None:
        data = (dcp / "__0_0.distcp").read_bytes()
        (dcp / "__0_0.distcp").write_bytes(data[:-200])
        checkpoint = read_dir(dcp)
        assert "dcp-file-cut" in codes(checkpoint)
        assert "before 1 of its entries do" in problem(checkpoint, "dcp-file-cut").detail

    @pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04N."])
    def test_unusable_metadata_gives_no_tensors(self, dcp: Path, data: bytes) -> None:
        (dcp / ".metadata").write_bytes(data)
        checkpoint = read_dir(dcp)
        assert checkpoint.tensors == ()
        assert checkpoint.format == "dcp"

    @pytest.mark.parametrize(
        "word", ["state_dict_metadata", "storage_data", "TensorStorageMetadata", "BytesStorageMetadata", "_StorageInfo"]
    )
    def test_flipped_bit_in_an_attribute_or_a_class_of_metadata_is_reported(self, dcp: Path, word: str) -> None:
        data = (dcp / ".metadata").read_bytes()
        assert word.encode() in data
        (dcp / ".metadata").write_bytes(data.replace(word.encode(), word[:-1].encode() + bytes([ord(word[-1]) ^ 1])))
        assert "dcp-metadata-invalid" in codes(read_dir(dcp))
        assert "dcp-path-outside" not in codes(read_dir(dcp))

    def test_metadata_that_lists_nothing_beside_full_rank_files_is_reported(self, dcp: Path) -> None:
        meta = pytest.importorskip("torch.distributed.checkpoint.metadata")
        (dcp / ".metadata").write_bytes(pickle.dumps(meta.Metadata({}, storage_data={})))
        assert "lists nothing" in problem(read_dir(dcp), "dcp-metadata-invalid").detail
        (dcp / "__0_0.distcp").write_bytes(b"")
        assert codes(read_dir(dcp)) == []

    def test_metadata_without_checksum_is_never_whole(self, dcp: Path) -> None:
        assert read_dir(dcp, verify=True).checksummed is False

    def test_flipped_bit_is_found_with_verify(self, dcp: Path) -> None:
        (storage,) = [storage for storage in read_dir(dcp).storages if storage.tensors == ("model.w",)]
        data = bytearray((dcp / storage.file).read_bytes())
        assert storage.offset is not None
        data[storage.offset] ^= 1
        (dcp / storage.file).write_bytes(data)
        assert "crc-mismatch" in codes(read_dir(dcp, verify=True))
        assert read_dir(dcp, verify=True).checksummed is False

    def test_safetensors_serialization_is_read(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
        if not hasattr(filesystem, "SerializationFormat"):
            pytest.skip("needs a newer torch")
        form = filesystem.SerializationFormat.SAFETENSORS
        for number, state in enumerate(({"w": torch.arange(3.0), "v": torch.ones(2, 2)}, {"w": torch.ones(3), "n": 1})):
            writer = filesystem.FileSystemWriter(tmp_path / f"s{number}", serialization_format=form)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
            assert codes(read_dir(tmp_path / f"s{number}")) == []
            loaded = load(tmp_path / f"s{number}")
            assert {name: torch.as_tensor(value).tolist() for name, value in loaded.items()} == {
                name: torch.as_tensor(value).tolist() for name, value in state.items()
            }

    def test_lightning_directory(self, dcp: Path) -> None:
        torch.save({"epoch": 3}, dcp / "meta.pt")
        checkpoint = read_dir(dcp)
        assert (checkpoint.format, checkpoint.flavour, codes(checkpoint)) == ("dcp", "Lightning", [])
        assert [value.path for value in checkpoint.values if value.file == "meta.pt"] == [("epoch",)]


def write_dcp(
    path: Path, pieces: Sequence[tuple[str, Any, tuple[int, ...], str]], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Write a directory as several ranks would: each piece is a tensor, its offset in the full tensor, and a file."""
    meta = pytest.importorskip("torch.distributed.checkpoint.metadata")
    info = pytest.importorskip("torch.distributed.checkpoint.filesystem")._StorageInfo
    path.mkdir()
    chunks: dict[str, list[Any]] = {name: [] for name in shapes}
    storage_data = {}
    for name, tensor, offset, file in pieces:
        chunks[name].append(meta.ChunkStorageMetadata(torch.Size(offset), tensor.shape))
        target = path / Path(file).name
        with target.open("ab") as out:
            start = out.tell()
            torch.save(tensor, out)
            storage_data[meta.MetadataIndex(name, offset)] = info(file, start, out.tell() - start)
    properties = meta.TensorProperties(dtype=torch.float32)
    state = {
        name: meta.TensorStorageMetadata(properties, torch.Size(shape), chunks[name]) for name, shape in shapes.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(meta.Metadata(state, storage_data=storage_data)))


class TestDcpPieces:
    def test_tensor_in_two_files(self, tmp_path: Path) -> None:
        pieces = [("w", torch.ones(2, 4), (0, 0), "__0_0.distcp"), ("w", torch.ones(1, 4), (2, 0), "__1_0.distcp")]
        write_dcp(tmp_path / "d", pieces, {"w": (3, 4)})
        checkpoint = read_dir(tmp_path / "d")
        assert codes(checkpoint) == []
        (tensor,) = checkpoint.tensors
        assert (tensor.kind, tensor.shape, tensor.nbytes, tensor.storage) == ("sharded", (3, 4), 48, None)
        assert [(part.shape, part.storage) for part in tensor.parts] == [
            ((2, 4), "__0_0.distcp@0:0"),
            ((1, 4), "__1_0.distcp@0:0"),
        ]
        assert {storage.file for storage in checkpoint.storages} == {"__0_0.distcp", "__1_0.distcp"}

    def test_missing_piece(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(2, 4), (0, 0), "__0_0.distcp")], {"w": (3, 4)})
        assert codes(read_dir(tmp_path / "d")) == ["dcp-piece-missing"]

    def test_piece_of_another_dtype(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3, dtype=torch.float64), (0,), "__0_0.distcp")], {"w": (3,)})
        assert codes(read_dir(tmp_path / "d")) == ["dcp-piece-mismatch"]

    @pytest.mark.parametrize("file", ["../x.distcp", "/etc/x.distcp"])
    def test_path_outside_the_directory_is_not_read(self, tmp_path: Path, file: str) -> None:
        torch.save(torch.ones(3), tmp_path / "x.distcp")
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), file)], {"w": (3,)})
        checkpoint = read_dir(tmp_path / "d")
        assert codes(checkpoint) == ["dcp-path-outside", "dcp-piece-missing"]
        assert checkpoint.storages == ()

    def test_entries_that_share_bytes_are_reported(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
        (entry,) = metadata.storage_data.values()
        index_type = type(next(iter(metadata.storage_data)))
        metadata.storage_data = {index_type("w", (n,)): entry for n in range(1000)}
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "dcp-items-overlap" in codes(read_dir(tmp_path / "d"))
        metadata.storage_data[index_type("v", (0,))] = type(entry)(entry.relative_path, entry.offset, 1 << 40)
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert {"dcp-file-cut", "dcp-items-overlap"} <= {*codes(read_dir(tmp_path / "d"))}

    def test_truncated_file_with_several_pieces(self, tmp_path: Path) -> None:
        """The entries add up to more bytes than the file has, but they do not overlap."""
        pieces = [(name, torch.ones(3), (0,), "__0_0.distcp") for name in "abc"]
        write_dcp(tmp_path / "d", pieces, dict.fromkeys("abc", (3,)))
        file = tmp_path / "d" / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        checkpoint = read_dir(tmp_path / "d")
        assert "dcp-file-cut" in codes(checkpoint)
        assert "dcp-items-overlap" not in codes(checkpoint)
        assert next(storage.stored for storage in checkpoint.storages) == 12

    def test_path_that_is_not_a_string(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        data = (tmp_path / "d" / ".metadata").read_bytes()
        pickled_name = pickle.dumps("__0_0.distcp", 4)[11:-2]  # without PROTO, FRAME, MEMOIZE and STOP
        assert pickled_name in data
        (tmp_path / "d" / ".metadata").write_bytes(data[:2] + data[11:].replace(pickled_name, b")" + b"\x85" * 100_000))
        assert "dcp-path-outside" in codes(read_dir(tmp_path / "d"))

    def test_verify_of_dcp_does_not_read_a_weight_map(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        monkeypatch.setattr("transload.formats.sets.sharded.read_weight_map", None)
        file = tmp_path / "d" / "__0_0.distcp"
        data = file.read_bytes()
        file.write_bytes(data.replace(struct.pack("<3f", 1, 1, 1), struct.pack("<3f", 1, 2, 1)))
        assert [tensor.name for tensor in transload.verify(tmp_path / "d").damaged] == ["w"]

    def test_shape_with_a_thousand_dimensions_is_rejected(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        data = (tmp_path / "d" / ".metadata").read_bytes()
        metadata = pickle.loads(data)
        metadata.state_dict_metadata["w"].size = (1 << 62,) * 1000
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert all(len(tensor.shape) <= 64 for tensor in read_dir(tmp_path / "d").tensors)


def write_rank_file(path: Path, **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"module": {"w": torch.ones(2)}, **more}, path)


class TestDeepSpeed:
    @pytest.fixture
    def stage2(self, tmp_path: Path) -> Path:
        (tmp_path / "latest").write_text("global_step20\n")
        (tmp_path / "zero_to_fp32.py").write_text("")
        write_rank_file(tmp_path / "global_step20" / "mp_rank_00_model_states.pt", dp_world_size=2)
        for rank in range(2):
            write_rank_file(tmp_path / "global_step20" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        write_rank_file(tmp_path / "global_step9" / "mp_rank_00_model_states.pt")
        return tmp_path

    def test_step_named_in_latest_is_read(self, stage2: Path) -> None:
        checkpoint = read_dir(stage2)
        assert (checkpoint.format, codes(checkpoint)) == ("deepspeed", ["ranks-unmerged"])
        facts = dict(checkpoint.facts)
        assert (facts["step"], facts["ZeRO stage"], facts["ranks found"]) == ("global_step20", "1 or 2", "2")
        assert [part.kind for part in checkpoint.parts] == ["optimizer states"] * 2 + ["model states"]
        assert checkpoint.tensor("global_step20/mp_rank_00_model_states.pt/module/w").shape == (2,)
        assert len({storage.id for storage in checkpoint.storages}) == len(checkpoint.pickles) == 3

    def test_step_directory_is_read(self, stage2: Path) -> None:
        assert (read_dir(stage2 / "global_step20").format, len(read_dir(stage2 / "global_step20").parts)) == (
            "deepspeed",
            3,
        )

    def test_missing_rank_by_the_world_size_of_the_model_file(self, stage2: Path) -> None:
        (stage2 / "global_step20" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        assert "1 of 2 ranks: 1" in problem(read_dir(stage2), "rank-missing").detail

    def test_gap_in_the_ranks_of_stage_three(self, tmp_path: Path) -> None:
        for rank in (0, 2):
            write_rank_file(tmp_path / "global_step5" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        checkpoint = read_dir(tmp_path)
        assert dict(checkpoint.facts)["ZeRO stage"] == "3"
        assert "1 of 3 ranks: 1" in problem(checkpoint, "rank-missing").detail

    def test_missing_step_named_in_latest(self, stage2: Path) -> None:
        (stage2 / "latest").write_text("global_step30")
        checkpoint = read_dir(stage2)
        assert codes(checkpoint) == ["latest-missing", "ranks-unmerged"]
        assert dict(checkpoint.facts)["step"] == "global_step20"

    @pytest.mark.parametrize("tag", ["../other", "/etc", "..", "a/b", "\0", "x" * 10_000])
    def test_latest_cannot_lead_outside(self, stage2: Path, tag: str) -> None:
        (stage2 / "latest").write_text(tag)
        assert dict(read_dir(stage2).facts)["step"] == "global_step20"

    def test_lightning_directory(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("checkpoint")
        write_rank_file(tmp_path / "checkpoint" / "mp_rank_00_model_states.pt")
        checkpoint = read_dir(tmp_path)
        assert (checkpoint.format, checkpoint.flavour, len(checkpoint.tensors)) == ("deepspeed", "Lightning", 1)

    def test_huge_rank_number_gives_a_short_message(self, tmp_path: Path) -> None:
        write_rank_file(tmp_path / "zero_pp_rank_999999_mp_rank_00_model_states.pt")
        assert len(problem(read_dir(tmp_path), "rank-missing").detail) < 300


class TestMegatron:
    def test_ranks_in_folders(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
        for tensor, pipe in ((0, 0), (0, 1), (1, 0)):
            write_rank_file(tmp_path / "iter_0000010" / f"mp_rank_{tensor:02d}_{pipe:03d}" / "model_optim_rng.pt")
        checkpoint = read_dir(tmp_path)
        assert (checkpoint.format, codes(checkpoint), len(checkpoint.parts)) == (
            "megatron",
            ["rank-missing", "ranks-unmerged"],
            3,
        )
        assert dict(checkpoint.facts)["parallel layout"] == "2 × 2"
        assert "(1, 1)" in problem(checkpoint, "rank-missing").detail
        assert checkpoint.tensor("iter_0000010/mp_rank_00_001/model_optim_rng.pt/module/w").shape == (2,)

    def test_megatron_with_dcp(self, tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
        shutil.copytree(saved[0], tmp_path / "iter_0000010")
        torch.save({"iteration": 10}, tmp_path / "iter_0000010" / "common.pt")
        for path in (tmp_path, tmp_path / "iter_0000010"):
            checkpoint = read_dir(path)
            assert (checkpoint.format, codes(checkpoint)) == ("megatron", [])
            assert {"model.w", "model.b"} <= {tensor.name for tensor in checkpoint.tensors}
            assert any(part.name.endswith("common.pt") for part in checkpoint.parts)
            assert {part.name for part in checkpoint.parts} == {
                *(storage.file for storage in checkpoint.storages),
                *_unsharded_parts(path),
            }

    def test_missing_iteration(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("99")
        assert codes(read_dir(tmp_path)) == ["directory-unknown", "latest-missing"]


def _unsharded_parts(path: Path) -> set[str]:
    prefix = "" if path.name.startswith("iter_") else "iter_0000010/"
    return {f"{prefix}.metadata", f"{prefix}common.pt"}


class TestUnrecognised:
    def test_files_are_listed(self, tmp_path: Path) -> None:
        (tmp_path / "unet").mkdir()
        write_safetensors(tmp_path / "unet" / "a.safetensors", {"a": (1,)})
        torch.save({}, tmp_path / "one.pt")
        torch.save({}, tmp_path / "two.pt")
        (tmp_path / "readme.md").write_text("hi")
        checkpoint = read_dir(tmp_path)
        assert (checkpoint.format, codes(checkpoint)) == ("directory", ["directory-unknown"])
        assert {part.name for part in checkpoint.parts} == {"one.pt", "two.pt", "unet/a.safetensors"}
        assert "readme.md" in checkpoint.problems[0].detail

    def test_raw_tensors_are_said_to_be_an_output_only(self, tmp_path: Path) -> None:
        """Their files do not say what is in them, and may look like anything."""
        torch.save({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "ab.pt")
        for names in ("ab", "a"):  # with one file, that would be the checkpoint
            transload.convert(tmp_path / "ab.pt", tmp_path / names, to="raw", only=f"[{names}]")
            unknown = problem(inspect(tmp_path / names), "directory-unknown")
            assert unknown.detail == "it holds raw tensors, which transload convert writes and does not read"
            with pytest.raises(IsADirectoryError, match="Name the checkpoint that they were converted from"):
                transload.convert(tmp_path / names, tmp_path / "out.npz")
        (tmp_path / "ab.pt").unlink()
        assert not read_dir(tmp_path).parts

    def test_pickle_beside_a_checkpoint_does_not_pass_as_a_raw_tensor(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", {"a": (1,)})
        (tmp_path / "index.json").write_text('{"format": "transload-raw"}')
        (tmp_path / "000000.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        assert inspect(tmp_path).safety == "dangerous"

    def test_checkpoint_subdirectories_are_listed(self, tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        for name in ("epoch1", "epoch2"):
            shutil.copytree(saved[0], tmp_path / name)
        assert {part.name for part in read_dir(tmp_path).parts} == {"epoch1", "epoch2"}

    def test_empty_directory(self, tmp_path: Path) -> None:
        empty = problem(read_dir(tmp_path), "directory-unknown")
        assert (empty.detail, empty.fix) == ("it is empty", ("Check the path.",))

    def test_symlink_loops_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
        (tmp_path / "self").symlink_to(tmp_path / "self")
        assert codes(read_dir(tmp_path)) == ["directory-unknown", "link-dangling"]

    def test_directory_with_too_many_entries(self, tmp_path: Path) -> None:
        for n in range(MAX_ENTRIES + 1):
            (tmp_path / str(n)).touch()
        assert codes(read_dir(tmp_path)) == ["directory-too-long", "directory-unknown"]

    def test_checkpoint_of_more_files_than_other_directories_may_have(
        self, dcp: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = read_dir(dcp)
        for n in range(MAX_ENTRIES + 1):
            (dcp / f"__9_{n}.distcp").touch()
        checkpoint = read_dir(dcp)
        assert (checkpoint.tensors, codes(checkpoint)) == (expected.tensors, codes(expected))
        monkeypatch.setattr(sets, "MAX_MEMBERS", MAX_ENTRIES + 1)
        assert f"first {MAX_ENTRIES + 1:,} entries" in problem(read_dir(dcp), "directory-too-long").detail

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
    def test_named_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.safetensors")
        assert codes(read_dir(tmp_path)) == ["directory-others", "part-unreadable", "part-unreadable"]

    @not_root
    def test_unreadable_directory(self, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0)
        assert "directory-unreadable" in codes(read_dir(tmp_path))
        with pytest.raises(CannotReadError):
            read_dir(tmp_path / "locked")

    def test_permission_error_while_listing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "locked").mkdir()
        real = os.scandir

        def scandir(path: str) -> Any:
            if str(path).endswith("locked"):
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        assert codes(read_dir(tmp_path)) == ["directory-unknown", "directory-unreadable"]
        with pytest.raises(CannotReadError, match="Permission denied"):
            read_dir(tmp_path / "locked")

    def test_path_that_is_missing_or_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(CannotReadError):
            read_dir(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(CannotReadError):
            read_dir(tmp_path / "file")


@given(st.text(alphabet="ab./\\:\0 ", max_size=12))
def test_relative_path_stays_inside_or_is_rejected(name: str) -> None:
    inner = relative_path(name)
    if inner:
        assert not any(step.rstrip(". ") == "" for step in inner.split("/"))  # to Windows, ".. " is ".."
        root = Path("/some/dir").resolve()
        assert root in (root / inner).resolve().parents
        assert relative_path(inner) == inner


@pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
def test_relative_path_rejects_non_strings(name: object) -> None:
    assert relative_path(name) == ""


def test_list_directory_is_sorted(tmp_path: Path) -> None:
    for name in "bca":
        (tmp_path / name).touch()
    assert list(Folder(str(tmp_path)).list().files) == ["a", "b", "c"]


def test_rank_file_is_not_reported_as_dangerous(tmp_path: Path) -> None:
    """A rank file is a sequence of archives. Anywhere else, readers could disagree about which one to read."""
    for _ in range(2):
        with (tmp_path / "__0_0.distcp").open("ab") as file:
            torch.save(torch.ones(3), file)
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "a.pt")
    assert inspect(tmp_path / "a.pt").safety == "dangerous"
    for _ in range(2):  # alone, as it is elsewhere, and beside its metadata
        alone = inspect(tmp_path / "__0_0.distcp")
        assert (alone.safety, alone.integrity) == ("unknown", "not-a-checkpoint")
        assert alone.findings[0].fix[-1] == f"$ transload inspect {tmp_path}"
        (tmp_path / ".metadata").write_bytes(b"")


class InMemory(Folder):
    """The files of a directory, which need not be on disk any more."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        files = [file for file in path.rglob("*") if file.is_file()]
        self.contents = {file.relative_to(path).as_posix(): file.read_bytes() for file in files}

    def list(self, below: str = "", most: int = MAX_ENTRIES) -> Listing:
        prefix = f"{below}/" if below else ""
        names = {name.removeprefix(prefix): data for name, data in self.contents.items() if name.startswith(prefix)}
        files = {name: len(data) for name, data in sorted(names.items()) if "/" not in name}
        folders = sorted({name.partition("/")[0] for name in names if "/" in name})
        return Listing(self, prefix, dict(list(files.items())[:most]), tuple(folders))

    def open(self, name: str, *, keep: bool = True) -> Source:
        assert keep
        if name not in self.contents:
            raise CannotReadError("No such file or directory", where=name, errno=ENOENT)
        return BytesSource(self.contents[name], self.path(name))

    def kind(self, name: str) -> Literal["file", "folder", "link", "other", ""]:
        return "file" if name in self.contents else ""

    def read(self, name: str) -> Checkpoint:
        return read_source(self.open(name))


def write_kinds(path: Path) -> None:
    (path / "shards").mkdir()
    write_safetensors(path / "shards" / ONE, {"a": (2, 3), "b": (4,)})
    write_index(path / "shards" / "model.safetensors.index.json", {"a": ONE, "b": ONE, "c": TWO}, 60)
    write_dcp(path / "dcp", [("w", torch.ones(2, 4), (0, 0), "__0_0.distcp")], {"w": (3, 4)})
    for name in ("deepspeed/global_step20/mp_rank_00_model_states.pt", "megatron/iter_0000010/mp_rank_00/model.pt"):
        (path / name).parent.mkdir(parents=True)
        torch.save({"module": {"w": torch.ones(3)}}, path / name)
    (path / "deepspeed" / "latest").write_text("global_step20")
    torch.save({"w": torch.ones(2)}, path / "archive.pt")
    shutil.unpack_archive(path / "archive.pt", path / "unpacked", "zip")


def test_no_kind_opens_a_file_except_through_its_folder(tmp_path: Path) -> None:
    write_kinds(tmp_path)
    kinds = [name for name in os.listdir(tmp_path) if name != "archive.pt"]
    expected = {name: inspect(tmp_path / name) for name in kinds}
    folders = {name: InMemory(tmp_path / name) for name in kinds}
    shutil.rmtree(tmp_path)
    for name, folder in folders.items():
        checkpoint = sets.read(folder, folder.read, folder.open, read_source)
        assert checkpoint.tensors, name
        for field in ("format", "tensors", "storages", "parts", "problems", "index"):
            assert getattr(checkpoint, field) == getattr(expected[name], field), (name, field)
