"""Directories: recognised by what they hold, merged, compared with their own index, never left."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transload
from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.findings import Problem
from transload.formats import read, read_source
from transload.formats.directory import (
    MAX_ENTRIES,
    Merger,
    list_directory,
    read_directory,
    read_sharded,
    relative_path,
)
from transload.judge import inspect

torch = pytest.importorskip("torch")

needs_users = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root can read everything")


def look(path: Path, *, verify: bool = False) -> Checkpoint:
    return read_directory(str(path), read, lambda source: read_source(source, verify=verify))


def codes(checkpoint: Checkpoint) -> list[str]:
    return sorted(problem.code for problem in checkpoint.problems)


def problem(checkpoint: Checkpoint, code: str) -> Problem:
    (only,) = [problem for problem in checkpoint.problems if problem.code == code]
    return only


def safetensors_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(n % 251 for n in range(at)))


def index(path: Path, weights: dict[str, Any], total: object = None) -> None:
    metadata = {} if total is None else {"total_size": total}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weights}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    safetensors_file(tmp_path / ONE, {"a": (2, 3), "b": (4,)})
    safetensors_file(tmp_path / TWO, {"c": (5,)})
    index(tmp_path / "model.safetensors.index.json", {"a": ONE, "b": ONE, "c": TWO}, 60)
    return tmp_path


class TestSharded:
    def test_shards_are_merged(self, sharded: Path) -> None:
        whole = look(sharded)
        assert (whole.format, codes(whole), whole.path) == ("sharded", [], str(sharded))
        assert [tensor.name for tensor in whole.tensors] == ["a", "b", "c"]
        assert [storage.id for storage in whole.storages] == [f"{ONE}:a", f"{ONE}:b", f"{TWO}:c"]
        assert [tensor.storage for tensor in whole.tensors] == [storage.id for storage in whole.storages]
        assert {storage.file for storage in whole.storages} == {ONE, TWO}
        assert [part.name for part in whole.parts] == [ONE, TWO, "model.safetensors.index.json"]
        assert whole.nbytes == sum(path.stat().st_size for path in sharded.iterdir())

    def test_the_bytes_lie_where_they_are_said_to(self, sharded: Path) -> None:
        load_file = pytest.importorskip("safetensors.torch").load_file
        for storage in look(sharded).storages:
            assert storage.offset is not None
            data = (sharded / storage.file).read_bytes()[storage.offset : storage.offset + storage.nbytes]
            assert data == load_file(sharded / storage.file)[storage.tensors[0]].numpy().tobytes()

    def test_the_index_alone_will_do(self, sharded: Path) -> None:
        whole = read_sharded(str(sharded / "model.safetensors.index.json"), read)
        assert (whole.format, codes(whole), len(whole.tensors)) == ("sharded", [], 3)

    def test_pickled_shards(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
        torch.save({"b": torch.ones(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
        index(
            tmp_path / "pytorch_model.bin.index.json",
            {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"},
            20.0,
        )
        whole = look(tmp_path)
        assert (codes(whole), [tensor.name for tensor in whole.tensors], len(whole.pickles)) == ([], ["a", "b"], 2)
        assert len({storage.id for storage in whole.storages}) == 2

    def test_what_is_still_to_be_conjugated_is_so_in_a_shard(self, tmp_path: Path) -> None:
        torch.save({"z": torch.tensor([1 + 2j]).conj()}, tmp_path / "one.bin")
        index(tmp_path / "pytorch_model.bin.index.json", {"z": "one.bin"})
        assert look(tmp_path).tensor("z").flags == ("conj",)

    def test_a_missing_shard(self, sharded: Path) -> None:
        (sharded / TWO).unlink()
        whole = look(sharded)
        assert codes(whole) == ["shard-missing"]
        assert problem(whole, "shard-missing").where == TWO
        assert "c" in problem(whole, "shard-missing").detail
        assert [tensor.name for tensor in whole.tensors] == ["a", "b"]

    def test_a_link_to_nothing(self, sharded: Path) -> None:
        (sharded / TWO).unlink()
        (sharded / TWO).symlink_to("../../blobs/gone")
        assert codes(look(sharded)) == ["link-dangling", "shard-missing"]

    def test_links_out_of_the_directory_are_how_caches_are_made(
        self, sharded: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        blob = tmp_path_factory.mktemp("blobs") / "0123"
        shutil.move(sharded / TWO, blob)
        (sharded / TWO).symlink_to(blob)
        assert codes(look(sharded)) == []

    def test_a_tensor_that_is_not_in_its_shard(self, sharded: Path) -> None:
        index(sharded / "model.safetensors.index.json", {"a": ONE, "b": TWO, "c": TWO})
        assert codes(look(sharded)) == ["shard-tensor-missing"]
        assert problem(look(sharded), "shard-tensor-missing").where == TWO

    def test_a_tensor_the_index_does_not_know(self, sharded: Path) -> None:
        index(sharded / "model.safetensors.index.json", {"a": ONE, "c": TWO})
        assert codes(look(sharded)) == ["shard-tensor-unlisted"]

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        safetensors_file(sharded / TWO, {"c": (5,), "a": (1,)})
        assert codes(look(sharded)) == ["index-total-size", "shard-tensor-twice"]

    def test_a_wrong_total(self, sharded: Path) -> None:
        index(sharded / "model.safetensors.index.json", {"a": ONE, "b": ONE, "c": TWO}, 61)
        assert problem(look(sharded), "index-total-size").detail == "the index says 61 bytes, the tensors take 60"

    def test_shared_memory_may_be_counted_once(self, tmp_path: Path) -> None:
        weight = torch.ones(4)
        torch.save({"a": weight, "tied": weight}, tmp_path / "m.bin")
        for total in (16, 32):
            index(tmp_path / "m.bin.index.json", {"a": "m.bin", "tied": "m.bin"}, total)
            assert codes(look(tmp_path)) == []

    def test_a_shard_of_an_older_save(self, sharded: Path) -> None:
        safetensors_file(sharded / "model-00003-of-00003.safetensors", {"old": (1,)})
        assert codes(look(sharded)) == ["directory-others", "shard-stray"]

    def test_a_damaged_shard_keeps_its_name_in_the_report(self, sharded: Path) -> None:
        data = (sharded / TWO).read_bytes()
        (sharded / TWO).write_bytes(data[:-4])
        assert problem(look(sharded), "safetensors-truncated").where == TWO

    def test_a_pointer_instead_of_a_shard(self, sharded: Path) -> None:
        (sharded / TWO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
        whole = look(sharded)
        assert problem(whole, "not-a-checkpoint").where == TWO
        assert "shard-tensor-missing" in codes(whole)

    @pytest.mark.parametrize(
        "name", ["../secret.bin", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", "a\0b", "\\\\host\\x"]
    )
    def test_no_name_leads_out(self, tmp_path: Path, name: str) -> None:
        inside = tmp_path / "inside"
        inside.mkdir()
        torch.save({"a": torch.ones(1)}, tmp_path / "secret.bin")
        index(inside / "m.index.json", {"a": name})
        opened: list[str] = []

        def watch(path: str) -> Checkpoint:
            opened.append(path)
            return read(path)

        whole = read_sharded(str(inside / "m.index.json"), watch)
        assert codes(whole) == ["shard-outside"]
        assert opened == []

    def test_a_name_that_no_file_can_have(self, tmp_path: Path) -> None:
        long = "x" * 300
        index(tmp_path / "m.index.json", {"a": long})
        assert codes(look(tmp_path)) == ["shard-missing"]
        merger = Merger(list_directory(str(tmp_path)), read)
        assert merger.open(long) is None
        assert [(each.code, each.detail) for each in merger.noted.problems()] == [
            ("part-unreadable", "it does not exist")
        ]

    def test_an_index_that_names_itself_or_its_directory(self, tmp_path: Path) -> None:
        index(tmp_path / "m.index.json", {"a": "m.index.json", "b": "./sub", "c": "other.index.json"})
        index(tmp_path / "other.index.json", {"a": "m.index.json"})
        (tmp_path / "sub").mkdir()
        assert codes(look(tmp_path)) == ["part-unreadable"] * 3

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
    def test_an_index_that_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "m.index.json").write_text(text)
        assert "index-invalid" in codes(look(tmp_path))

    def test_an_index_that_is_a_pointer_is_called_one(self, tmp_path: Path) -> None:
        (tmp_path / "m.index.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
        assert "Git LFS pointer" in problem(look(tmp_path), "index-invalid").detail

    def test_safetensors_before_pickles(self, sharded: Path) -> None:
        index(sharded / "pytorch_model.bin.index.json", {"a": "gone.bin"})
        whole = look(sharded)
        assert codes(whole) == []
        assert ("also here, not read", "pytorch_model.bin.index.json") in whole.facts

    def test_numbered_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        whole = look(sharded)
        assert (whole.format, codes(whole), len(whole.tensors)) == ("sharded", ["index-missing"], 3)
        (sharded / ONE).unlink()
        whole = look(sharded)
        assert codes(whole) == ["index-missing", "shard-missing"]
        assert problem(whole, "shard-missing").where == ONE

    def test_ten_thousand_missing_shards_make_a_short_report(self, tmp_path: Path) -> None:
        index(tmp_path / "m.index.json", {str(n): f"{n}.bin" for n in range(10_000)})
        whole = look(tmp_path)
        assert len(whole.problems) < 50
        assert any("more like this" in problem.detail for problem in whole.problems)


class TestOneFile:
    def test_the_weights_among_other_files(self, tmp_path: Path) -> None:
        safetensors_file(tmp_path / "model.safetensors", {"a": (2,)})
        (tmp_path / "config.json").write_text("{}")
        torch.save({"lr": 0.1}, tmp_path / "optimizer.pt")
        whole = look(tmp_path)
        assert (whole.format, whole.path) == ("safetensors", str(tmp_path))
        assert [storage.file for storage in whole.storages] == ["model.safetensors"]
        assert codes(whole) == ["directory-others"]
        assert "optimizer.pt" in problem(whole, "directory-others").detail
        assert [(part.name, part.kind) for part in whole.parts] == [
            ("model.safetensors", "weights"),
            ("optimizer.pt", "beside the checkpoint"),
        ]

    def test_what_lies_beside_the_weights_is_judged_with_them(self, tmp_path: Path) -> None:
        safetensors_file(tmp_path / "model.safetensors", {"a": (2,)})
        assert inspect(tmp_path).safety == "data-only"
        (tmp_path / "training_args.bin").write_bytes(b"\x80\x02cos\ngetcwd\n)R.")
        whole = inspect(tmp_path)
        assert whole.safety == "dangerous"
        assert [use.full_name for use in whole.globals] == ["os.getcwd"]

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "whatever.ckpt"])
    def test_by_its_usual_name_or_as_the_only_one(self, tmp_path: Path, name: str) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / name)
        whole = look(tmp_path)
        assert (whole.format, codes(whole), len(whole.tensors)) == ("torch-zip", [], 1)
        assert name in dict(whole.facts)["read"]

    def test_safetensors_before_pickle(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
        safetensors_file(tmp_path / "model.safetensors", {"a": (2,)})
        assert look(tmp_path).format == "safetensors"


class TestUnpacked:
    def test_in_place_and_one_folder_down(self, tmp_path: Path) -> None:
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


class TestDistributed:
    def test_tensors_to_the_byte(self, dcp: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        whole = look(dcp)
        assert (whole.format, codes(whole), whole.flavour) == ("dcp", [], "")
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in whole.tensors} == {
            "model.w": ("float32", (3, 4)),
            "model.b": ("bfloat16", (3,)),
        }
        assert {leaf.name: leaf.kind for leaf in whole.leaves} == {"step": "int", "note": "str"}
        wanted = saved[1]["model"]["w"].numpy().tobytes()
        (storage,) = [storage for storage in whole.storages if storage.tensors == ("model.w",)]
        assert storage.offset is not None
        assert (dcp / storage.file).read_bytes()[storage.offset : storage.offset + storage.nbytes] == wanted
        assert whole.tensor("model.w").storage == storage.id
        assert [(part.name, part.kind) for part in whole.parts] == [
            ("__0_0.distcp", "rank file"),
            (".metadata", "index"),
        ]

    def test_every_pickle_is_there_to_be_judged(self, dcp: Path) -> None:
        names = {name for pickled in look(dcp).pickles for name in pickled.globals}
        assert ("torch.distributed.checkpoint.metadata", "Metadata") in names
        assert ("torch._utils", "_rebuild_tensor_v2") in names
        assert len(look(dcp).pickles) == 5

    def test_code_in_an_item_is_seen(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
                return os.system, ("echo",)

        save_dcp(tmp_path / "evil", {"a": torch.ones(1), "x": Evil()})
        names = {name[1] for pickled in look(tmp_path / "evil").pickles for name in pickled.globals}
        assert "system" in names

    def test_a_save_that_never_finished(self, dcp: Path) -> None:
        (dcp / ".metadata").rename(dcp / ".metadata.tmp")
        whole = look(dcp)
        assert codes(whole) == ["dcp-metadata-missing"]
        assert ".metadata.tmp" in problem(whole, "dcp-metadata-missing").detail
        assert [part.name for part in whole.parts] == ["__0_0.distcp"]

    def test_a_rank_file_that_is_gone(self, dcp: Path) -> None:
        (dcp / "__0_0.distcp").unlink()
        whole = look(dcp)
        assert codes(whole) == ["dcp-file-missing", "dcp-piece-missing", "dcp-piece-missing"]
        assert {tensor.name for tensor in whole.tensors} == {"model.w", "model.b"}
        assert all(tensor.storage is None for tensor in whole.tensors)

    def test_a_rank_file_cut_short(self, dcp: Path) -> None:
        data = (dcp / "__0_0.distcp").read_bytes()
        (dcp / "__0_0.distcp").write_bytes(data[:-200])
        whole = look(dcp)
        assert "dcp-file-cut" in codes(whole)
        assert "before 1 of its entries do" in problem(whole, "dcp-file-cut").detail

    @pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04N."])
    def test_an_index_that_says_nothing(self, dcp: Path, data: bytes) -> None:
        (dcp / ".metadata").write_bytes(data)
        whole = look(dcp)
        assert whole.tensors == ()
        assert whole.format == "dcp"

    def test_a_bit_that_flipped_is_found_on_request(self, dcp: Path) -> None:
        (storage,) = [storage for storage in look(dcp).storages if storage.tensors == ("model.w",)]
        data = bytearray((dcp / storage.file).read_bytes())
        assert storage.offset is not None
        data[storage.offset] ^= 1
        (dcp / storage.file).write_bytes(data)
        assert "crc-mismatch" in codes(look(dcp, verify=True))
        assert look(dcp, verify=True).checksummed is False

    def test_forms_that_cannot_be_read_are_said(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
        if not hasattr(filesystem, "SerializationFormat"):
            pytest.skip("needs a newer torch")
        form = filesystem.SerializationFormat.SAFETENSORS
        writer = filesystem.FileSystemWriter(tmp_path / "s", serialization_format=form)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.checkpoint.save({"w": torch.ones(3), "n": 1}, storage_writer=writer, no_dist=True)
        whole = look(tmp_path / "s")
        assert codes(whole) == ["dcp-piece-missing", "dcp-transformed"]
        assert whole.tensor("w").shape == (3,)

    def test_lightning(self, dcp: Path) -> None:
        torch.save({"epoch": 3}, dcp / "meta.pt")
        whole = look(dcp)
        assert (whole.format, whole.flavour, codes(whole)) == ("dcp", "Lightning", [])
        assert ("meta.pt", "epoch") in {leaf.path for leaf in whole.leaves}


def write_dcp(
    path: Path, pieces: Sequence[tuple[str, Any, tuple[int, ...], str]], shapes: dict[str, tuple[int, ...]]
) -> None:
    """A directory as several ranks would write it: each piece a tensor, its place in the whole, and a file."""
    meta = pytest.importorskip("torch.distributed.checkpoint.metadata")
    info = pytest.importorskip("torch.distributed.checkpoint.filesystem")._StorageInfo
    path.mkdir()
    chunks: dict[str, list[Any]] = {name: [] for name in shapes}
    where = {}
    for name, tensor, at, file in pieces:
        chunks[name].append(meta.ChunkStorageMetadata(torch.Size(at), tensor.shape))
        target = path / Path(file).name
        with target.open("ab") as out:
            start = out.tell()
            torch.save(tensor, out)
            where[meta.MetadataIndex(name, at)] = info(file, start, out.tell() - start)
    properties = meta.TensorProperties(dtype=torch.float32)
    state = {
        name: meta.TensorStorageMetadata(properties, torch.Size(shape), chunks[name]) for name, shape in shapes.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(meta.Metadata(state, storage_data=where)))


class TestPieces:
    def test_a_tensor_in_pieces(self, tmp_path: Path) -> None:
        pieces = [("w", torch.ones(2, 4), (0, 0), "__0_0.distcp"), ("w", torch.ones(1, 4), (2, 0), "__1_0.distcp")]
        write_dcp(tmp_path / "d", pieces, {"w": (3, 4)})
        whole = look(tmp_path / "d")
        assert codes(whole) == []
        (tensor,) = whole.tensors
        assert (tensor.kind, tensor.shape, tensor.nbytes, tensor.storage) == ("sharded", (3, 4), 48, None)
        assert [(part.shape, part.storage) for part in tensor.parts] == [
            ((2, 4), "__0_0.distcp@0:0"),
            ((1, 4), "__1_0.distcp@0:0"),
        ]
        assert {storage.file for storage in whole.storages} == {"__0_0.distcp", "__1_0.distcp"}

    def test_a_piece_too_few(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(2, 4), (0, 0), "__0_0.distcp")], {"w": (3, 4)})
        assert codes(look(tmp_path / "d")) == ["dcp-piece-missing"]

    def test_a_piece_of_another_type(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3, dtype=torch.float64), (0,), "__0_0.distcp")], {"w": (3,)})
        assert codes(look(tmp_path / "d")) == ["dcp-piece-mismatch"]

    @pytest.mark.parametrize("file", ["../x.distcp", "/etc/x.distcp"])
    def test_no_path_leads_out(self, tmp_path: Path, file: str) -> None:
        torch.save(torch.ones(3), tmp_path / "x.distcp")
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), file)], {"w": (3,)})
        whole = look(tmp_path / "d")
        assert codes(whole) == ["dcp-path-outside", "dcp-piece-missing"]
        assert whole.storages == ()

    def test_one_piece_a_thousand_times(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
        (only,) = metadata.storage_data.values()
        index_type = type(next(iter(metadata.storage_data)))
        metadata.storage_data = {index_type("w", (n,)): only for n in range(1000)}
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "dcp-items-overlap" in codes(look(tmp_path / "d"))
        metadata.storage_data[index_type("v", (0,))] = type(only)(only.relative_path, only.offset, 1 << 40)
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert {"dcp-file-cut", "dcp-items-overlap"} <= {*codes(look(tmp_path / "d"))}

    def test_what_is_left_of_a_file_with_several_pieces(self, tmp_path: Path) -> None:
        """All entries together are longer than it; none of those that are left shares bytes with another."""
        pieces = [(name, torch.ones(3), (0,), "__0_0.distcp") for name in "abc"]
        write_dcp(tmp_path / "d", pieces, dict.fromkeys("abc", (3,)))
        file = tmp_path / "d" / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        whole = look(tmp_path / "d")
        assert "dcp-file-cut" in codes(whole)
        assert "dcp-items-overlap" not in codes(whole)
        assert next(each.stored for each in whole.storages) == 12

    def test_a_path_that_is_not_text(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        data = (tmp_path / "d" / ".metadata").read_bytes()
        named = pickle.dumps("__0_0.distcp", 4)[11:-2]  # without PROTO, FRAME, MEMOIZE and STOP
        assert named in data
        (tmp_path / "d" / ".metadata").write_bytes(data[:2] + data[11:].replace(named, b")" + b"\x85" * 100_000))
        assert "dcp-path-outside" in codes(look(tmp_path / "d"))

    def test_only_an_index_of_shards_is_read_as_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        monkeypatch.setattr("transload.formats.directory.read_weight_map", None)
        file = tmp_path / "d" / "__0_0.distcp"
        data = file.read_bytes()
        file.write_bytes(data.replace(struct.pack("<3f", 1, 1, 1), struct.pack("<3f", 1, 2, 1)))
        assert [each.name for each in transload.verify(tmp_path / "d").damaged] == ["w"]

    def test_a_shape_beyond_all_bounds(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "d", [("w", torch.ones(3), (0,), "__0_0.distcp")], {"w": (3,)})
        data = (tmp_path / "d" / ".metadata").read_bytes()
        metadata = pickle.loads(data)
        metadata.state_dict_metadata["w"].size = (1 << 62,) * 1000
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        assert all(len(tensor.shape) <= 64 for tensor in look(tmp_path / "d").tensors)


def rank_file(path: Path, **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"module": {"w": torch.ones(2)}, **more}, path)


class TestDeepSpeed:
    @pytest.fixture
    def stage2(self, tmp_path: Path) -> Path:
        (tmp_path / "latest").write_text("global_step20\n")
        (tmp_path / "zero_to_fp32.py").write_text("")
        rank_file(tmp_path / "global_step20" / "mp_rank_00_model_states.pt", dp_world_size=2)
        for rank in range(2):
            rank_file(tmp_path / "global_step20" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        rank_file(tmp_path / "global_step9" / "mp_rank_00_model_states.pt")
        return tmp_path

    def test_the_step_it_names(self, stage2: Path) -> None:
        whole = look(stage2)
        assert (whole.format, codes(whole)) == ("deepspeed", [])
        facts = dict(whole.facts)
        assert (facts["step"], facts["ZeRO stage"], facts["ranks found"]) == ("global_step20", "1 or 2", "2")
        assert [part.kind for part in whole.parts] == ["optimizer states"] * 2 + ["model states"]
        assert whole.tensor("global_step20/mp_rank_00_model_states.pt/module/w").shape == (2,)
        assert len({storage.id for storage in whole.storages}) == len(whole.pickles) == 3

    def test_the_step_itself(self, stage2: Path) -> None:
        assert (look(stage2 / "global_step20").format, len(look(stage2 / "global_step20").parts)) == ("deepspeed", 3)

    def test_a_rank_that_the_model_file_counts(self, stage2: Path) -> None:
        (stage2 / "global_step20" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        assert "1 of 2 ranks: 1" in problem(look(stage2), "rank-missing").detail

    def test_a_gap_in_stage_three(self, tmp_path: Path) -> None:
        for rank in (0, 2):
            rank_file(tmp_path / "global_step5" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        whole = look(tmp_path)
        assert dict(whole.facts)["ZeRO stage"] == "3"
        assert "1 of 3 ranks: 1" in problem(whole, "rank-missing").detail

    def test_a_step_that_is_not_there(self, stage2: Path) -> None:
        (stage2 / "latest").write_text("global_step30")
        whole = look(stage2)
        assert codes(whole) == ["latest-missing"]
        assert dict(whole.facts)["step"] == "global_step20"

    @pytest.mark.parametrize("tag", ["../other", "/etc", "..", "a/b", "\0", "x" * 10_000])
    def test_latest_leads_nowhere_else(self, stage2: Path, tag: str) -> None:
        (stage2 / "latest").write_text(tag)
        assert dict(look(stage2).facts)["step"] == "global_step20"

    def test_lightning(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("checkpoint")
        rank_file(tmp_path / "checkpoint" / "mp_rank_00_model_states.pt")
        whole = look(tmp_path)
        assert (whole.format, whole.flavour, len(whole.tensors)) == ("deepspeed", "Lightning", 1)

    def test_a_huge_rank_number(self, tmp_path: Path) -> None:
        rank_file(tmp_path / "zero_pp_rank_999999_mp_rank_00_model_states.pt")
        assert len(problem(look(tmp_path), "rank-missing").detail) < 300


class TestMegatron:
    def test_ranks_in_folders(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
        for tensor, pipe in ((0, 0), (0, 1), (1, 0)):
            rank_file(tmp_path / "iter_0000010" / f"mp_rank_{tensor:02d}_{pipe:03d}" / "model_optim_rng.pt")
        whole = look(tmp_path)
        assert (whole.format, codes(whole), len(whole.parts)) == ("megatron", ["rank-missing"], 3)
        assert dict(whole.facts)["parallel layout"] == "2 × 2"
        assert "(1, 1)" in problem(whole, "rank-missing").detail
        assert whole.tensor("iter_0000010/mp_rank_00_001/model_optim_rng.pt/module/w").shape == (2,)

    def test_the_distributed_form(self, tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
        shutil.copytree(saved[0], tmp_path / "iter_0000010")
        torch.save({"iteration": 10}, tmp_path / "iter_0000010" / "common.pt")
        for path in (tmp_path, tmp_path / "iter_0000010"):
            whole = look(path)
            assert (whole.format, codes(whole)) == ("megatron", [])
            assert {"model.w", "model.b"} <= {tensor.name for tensor in whole.tensors}
            assert any(part.name.endswith("common.pt") for part in whole.parts)
            assert {part.name for part in whole.parts} == {*(storage.file for storage in whole.storages), *_extra(path)}

    def test_an_iteration_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("99")
        assert codes(look(tmp_path)) == ["directory-unknown", "latest-missing"]


def _extra(path: Path) -> set[str]:
    prefix = "" if path.name.startswith("iter_") else "iter_0000010/"
    return {f"{prefix}.metadata", f"{prefix}common.pt"}


class TestUnknown:
    def test_what_is_there_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "unet").mkdir()
        safetensors_file(tmp_path / "unet" / "a.safetensors", {"a": (1,)})
        torch.save({}, tmp_path / "one.pt")
        torch.save({}, tmp_path / "two.pt")
        (tmp_path / "readme.md").write_text("hi")
        whole = look(tmp_path)
        assert (whole.format, codes(whole)) == ("directory", ["directory-unknown"])
        assert {part.name for part in whole.parts} == {"one.pt", "two.pt", "unet/a.safetensors"}
        assert "readme.md" in whole.problems[0].detail

    def test_checkpoint_directories_inside(self, tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
        for name in ("epoch1", "epoch2"):
            shutil.copytree(saved[0], tmp_path / name)
        assert {part.name for part in look(tmp_path).parts} == {"epoch1", "epoch2"}

    def test_empty(self, tmp_path: Path) -> None:
        assert problem(look(tmp_path), "directory-unknown").detail == "it is empty"

    def test_loops_of_links_end(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
        (tmp_path / "self").symlink_to(tmp_path / "self")
        assert codes(look(tmp_path)) == ["directory-unknown", "link-dangling"]

    def test_too_many_entries(self, tmp_path: Path) -> None:
        for n in range(MAX_ENTRIES + 1):
            (tmp_path / str(n)).touch()
        assert codes(look(tmp_path)) == ["directory-too-long", "directory-unknown"]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.safetensors")
        assert codes(look(tmp_path)) == ["directory-others", "part-unreadable", "part-unreadable"]

    @needs_users
    def test_a_folder_that_may_not_be_listed(self, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0)
        assert "directory-unreadable" in codes(look(tmp_path))
        with pytest.raises(CannotReadError):
            look(tmp_path / "locked")

    def test_listing_failures(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "locked").mkdir()
        real = os.scandir

        def scandir(path: str) -> Any:
            if str(path).endswith("locked"):
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        assert codes(look(tmp_path)) == ["directory-unknown", "directory-unreadable"]
        with pytest.raises(CannotReadError, match="Permission denied"):
            look(tmp_path / "locked")

    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CannotReadError):
            look(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(CannotReadError):
            look(tmp_path / "file")


@given(st.text(alphabet="ab./\\:\0 ", max_size=12))
def test_a_name_stays_inside_or_is_refused(name: str) -> None:
    inner = relative_path(name)
    if inner:
        root = Path("/some/dir")
        assert root in (root / inner).resolve().parents
        assert relative_path(inner) == inner


@pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
def test_only_text_is_a_name(name: object) -> None:
    assert relative_path(name) == ""


def test_a_listing_is_sorted(tmp_path: Path) -> None:
    for name in "bca":
        (tmp_path / name).touch()
    assert list(list_directory(str(tmp_path)).files) == ["a", "b", "c"]


def test_one_file_of_a_distributed_checkpoint_is_no_attack(tmp_path: Path) -> None:
    """It is a row of archives, which would be two readings of one file anywhere else."""
    for _ in range(2):
        with (tmp_path / "__0_0.distcp").open("ab") as file:
            torch.save(torch.ones(3), file)
    alone = inspect(tmp_path / "__0_0.distcp")
    (tmp_path / ".metadata").write_bytes(b"")
    told = inspect(tmp_path / "__0_0.distcp")
    assert (alone.safety, told.safety, told.integrity) == ("dangerous", "unknown", "not-a-checkpoint")
    assert told.findings[0].fix[-1] == f"$ transload inspect {tmp_path}"
