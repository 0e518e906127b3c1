"""``transload.open``: every tensor as torch.load gives it, and no byte more than it takes."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import json
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from tests import forge
from tests.each import for_each, grouped
from tests.loading.equal import same
from tests.loading.zoo import ZOO, allowed, saved

from transload.errors import (
    BrokenFileError,
    LandingWarning,
    LoadError,
    NoDeviceError,
    NotACheckpointError,
    TransloadError,
    UnsafeError,
    UsageError,
)
from transload.loading.handles import Handle
from transload.loading.handles import open as open_

RELEASES = sorted((Path(__file__).parent.parent / "data" / "torch-releases").glob("torch-*"))


class Counting(io.BytesIO):
    """A file that knows how many bytes were read of it."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self.taken += count
        return count

    def count(self) -> int:
        """The bytes read since the last time it was asked."""
        taken, self.taken = self.taken, 0
        return taken


def file_of(value: Any, **options: Any) -> io.BytesIO:
    held = io.BytesIO()
    torch.save(value, held, **options)
    return held


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in dictionaries and lists, with their paths; not too deep, since some contain themselves."""
    if len(path) > 4:
        return
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from tensors_in(inner, (*path, key))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Plain ones to the byte, without the class that marks them; those made of parts as ``load`` is compared."""
    if type(found) is torch.Tensor and wanted.layout is torch.strided and is_plain(wanted):
        assert (found.dtype, found.shape, found.layout) == (wanted.dtype, wanted.shape, wanted.layout)
        assert not found.requires_grad
        assert raw(found) == raw(wanted)
    else:
        same(found, wanted.detach() if wanted.requires_grad else wanted)


def is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
@pytest.mark.filterwarnings("ignore::transload.errors.LandingWarning")
def test_every_tensor_of_every_release_to_the_byte(folder: Path) -> None:
    truth = json.loads((folder / "expected.json").read_text())["files"]
    seen = 0
    for name, about in truth.items():
        with open_(folder / name, device="cpu") as handle:
            for path, wanted in about.get("tensors", {}).items():
                key = path.removeprefix("/")
                known = hasattr(torch, wanted["dtype"].removeprefix("torch."))
                plain = known and key in handle and handle.checkpoint.tensor(key).kind == "strided"
                if not plain or wanted["sha256"] is None:
                    continue
                found = handle[key]
                assert (str(found.dtype), list(found.shape)) == (wanted["dtype"], wanted["shape"])
                assert hashlib.sha256(raw(found)).hexdigest() == wanted["sha256"], (name, key)
                seen += 1
    assert seen > 60


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning", "ignore:BComplex32 support:UserWarning")
@grouped("names", [name for name, specimen in ZOO.items() if specimen.safe], 20)
def test_the_zoo(names: list[str]) -> None:
    for_each(itertools.product(names, ["zip", "legacy"]), lambda case: reads_alike(*case))


def reads_alike(name: str, form: str) -> None:
    specimen = ZOO[name]
    try:
        data = saved(specimen.make(), form)
        wanted = torch.load(io.BytesIO(data), weights_only=False)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        pytest.skip("torch itself cannot write or read it in this form")
    with allowed(specimen), open_(data) as handle:
        names: Any = handle
        held = dict(tensors_in(wanted))
        assert not held or len(handle)
        for path, tensor in held.items():
            if path in names:
                assert_read(handle, path, tensor, data)


def assert_read(handle: Handle, path: tuple[Any, ...], tensor: torch.Tensor, data: bytes) -> None:
    try:
        found = handle[path]
    except UnsafeError:  # a class that only some releases allow
        with pytest.raises(UnpicklingError):
            torch.load(io.BytesIO(data), weights_only=True)
    else:
        assert_equal(found, tensor)


class TestNames:
    @pytest.fixture
    def handle(self) -> Handle:
        return open_(file_of({"model": {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, "epoch": 7}))

    def test_order_and_membership(self, handle: Handle) -> None:
        assert list(handle) == list(handle.keys()) == ["model/fc.weight", "model/fc.bias"]
        assert len(handle) == 2
        names: Any = handle
        assert "model/fc.bias" in names
        assert ("model", "fc.bias") in names
        assert "fc.bias" not in names
        assert ("fc.bias",) not in names
        assert 3 not in names

    def test_by_path(self, handle: Handle) -> None:
        assert torch.equal(handle["model", "fc.bias"], torch.ones(2))

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("model/fc.wieght", "there is no tensor 'model/fc.wieght'; similar: model/fc.weight, model/fc.bias"),
            ("fc.bias", "there is no tensor 'fc.bias'; similar: model/fc.bias"),
            ("model", "there is no tensor 'model'; similar: model/fc.weight, model/fc.bias"),
            ("epoch", "'epoch' is not a tensor: its value is in metadata['epoch']"),
            ("zzz", "there is no tensor 'zzz'"),
        ],
    )
    def test_a_name_that_is_not_there(self, handle: Handle, name: str, words: str) -> None:
        with pytest.raises(KeyError) as caught:
            handle[name]
        assert caught.value.args == (words,)
        assert handle.get(name) is None

    def test_comparing_reads_nothing(self, handle: Handle) -> None:
        assert handle == handle  # noqa: PLR0124 - a mapping would compare tensors, which cannot be
        assert handle != {}
        assert hash(handle) == hash(handle)

    def test_repr(self, handle: Handle) -> None:
        assert repr(handle) == "<<file object>: 2 tensors>"
        assert repr(handle.slice("model/fc.weight")) == "<model/fc.weight: float32 [2, 2], not read>"

    def test_a_tensor_alone_has_the_empty_name(self) -> None:
        with open_(file_of(torch.arange(3))) as handle:
            assert torch.equal(handle[""], torch.arange(3))


class TestOnlyTheBytesNeeded:
    @pytest.fixture
    def file(self) -> Counting:
        held = Counting()
        # A row of `wide` is 64 KiB, and one of `narrow` 40 bytes.
        state = {"wide": torch.arange(1 << 20).view(128, 8192).int(), "narrow": torch.arange(10_000.0).view(-1, 10)}
        torch.save({**state, "turned": state["narrow"].t().contiguous().t(), "rows": state["narrow"][::4]}, held)
        return held

    @pytest.mark.parametrize(
        ("name", "index", "nbytes"),
        [
            ("narrow", (), 40_000),
            ("narrow", slice(10, 20), 400),
            ("narrow", 7, 40),
            ("narrow", (7, 3), 4),
            ("narrow", (slice(10, 20), slice(None)), 400),
            ("narrow", (..., slice(None)), 40_000),
            ("narrow", (7, slice(2, 5)), 12),
            ("narrow", slice(0, 0), 0),
            ("narrow", (slice(10, 20), 3), 9 * 40 + 4),  # from the first to the last of them
            ("turned", (), 40_000),
            ("turned", (slice(None), 3), 4_000),  # a column lies together here
            ("wide", slice(2, 4), 2 << 15),
            ("wide", (slice(2, 6), slice(0, 100)), 4 * 400),  # rows far apart are read one by one
            ("wide", (slice(None), 5), 128 * 4),
            ("rows", 3, 40),
        ],
    )
    def test_slices(self, file: Counting, name: str, index: Any, nbytes: int) -> None:
        whole = torch.load(io.BytesIO(file.getvalue()))[name]
        with open_(file) as handle:
            file.count()
            found = handle.slice(name)[index]
            assert file.count() == nbytes
        assert torch.equal(found, whole[index])

    def test_a_tensor_is_its_range_of_a_shared_storage(self) -> None:
        file = Counting()
        flat = torch.arange(1000.0)
        torch.save({"a": flat[:10], "b": flat[500:700].view(10, 20)}, file)
        with open_(file) as handle:
            file.count()
            assert torch.equal(handle["b"], flat[500:700].view(10, 20))
            assert file.count() == 800
            assert handle["b"].untyped_storage().nbytes() == 800

    def test_opening_reads_the_index_alone(self) -> None:
        file = Counting()
        torch.save({"a": torch.zeros(1 << 22)}, file)
        with open_(file) as handle:
            assert list(handle) == ["a"]
        assert file.count() < 100_000

    def test_nothing_for_the_meta_device(self, file: Counting) -> None:
        with open_(file, device="meta") as handle:
            file.count()
            assert handle["narrow"].is_meta
            assert file.count() == 0

    def test_an_expanded_tensor_takes_no_more_memory_than_it_had(self) -> None:
        with open_(file_of({"a": torch.ones(1).expand(1 << 40)})) as handle:
            assert (handle["a"].shape, handle["a"].stride()) == ((1 << 40,), (0,))
            assert handle["a"].untyped_storage().nbytes() == 4


indices = st.one_of(
    st.integers(-5, 4),
    st.slices(5),
    st.none(),
)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    order=st.randoms(use_true_random=False),
    index=st.lists(indices, max_size=4),
    dots=st.integers(0, 5),
    start=st.integers(0, 3),
)
def test_any_slice_is_what_torch_makes_of_the_whole(
    shape: list[int], order: Any, index: list[Any], dots: int, start: int
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    base = torch.arange(4 + torch.Size(shape).numel())[start : start + torch.Size(shape).numel()]
    whole = base.view([shape[d] for d in dims]).permute([dims.index(d) for d in range(len(shape))])
    full = tuple([*index[:dots], ..., *index[dots:]] if dots < 5 else index)
    handle = open_(file_of(whole))
    try:
        wanted = whole[full]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            handle.slice("")[full]
        return
    assert torch.equal(handle.slice("")[full], wanted)


@pytest.mark.parametrize("stage", [8, 24, 100, 1000])
def test_a_buffer_of_any_size_will_do(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.loading.handles.STAGE", stage)
    base = torch.randn(7, 5, 6, dtype=torch.float64)
    state = {
        "plain": base,
        "turned": base.permute(2, 0, 1),
        "steps": base[::2, :, 1::3],
        "wide": base[:1].expand(3, 5, 6),
    }
    state |= {"line": torch.randn(999, dtype=torch.float64), "none": base[:0], "one": base[0, 0, 0]}
    with open_(file_of(state), dtype=torch.float32) as handle:
        for name, tensor in state.items():
            assert torch.equal(handle[name], tensor.float()), name
            assert handle[name].is_contiguous()


class TestIndices:
    @pytest.fixture
    def lazy(self) -> Any:
        return open_(file_of({"a": torch.arange(12).view(3, 4), "n": torch.tensor(1)})).slice("a")

    @pytest.mark.parametrize(
        "index", [[0, 1], torch.tensor([0, 1]), True, torch.tensor(True), "a", 1.0, torch.tensor([True, False, True])]
    )
    def test_only_basic_ones(self, lazy: Any, index: Any) -> None:
        with pytest.raises(TypeError, match=r"only numbers, slices, \.\.\. and None can be read from a file, not "):
            lazy[index]

    @pytest.mark.parametrize("index", [3, -4, (0, 4), (0, 0, 0)])
    def test_outside(self, lazy: Any, index: Any) -> None:
        with pytest.raises(IndexError):
            lazy[index]

    def test_backwards(self, lazy: Any) -> None:
        with pytest.raises(ValueError, match="step must be greater than zero"):
            lazy[::-1]

    def test_numbers_of_other_libraries(self, lazy: Any) -> None:
        assert torch.equal(lazy[torch.tensor(1)], torch.arange(4, 8))

    def test_what_is_known_without_reading(self, lazy: Any) -> None:
        assert (lazy.shape, lazy.dtype, len(lazy)) == ((3, 4), "int64", 3)

    def test_no_length_without_dimensions(self) -> None:
        with pytest.raises(TypeError, match="no length"):
            len(open_(file_of(torch.tensor(1))).slice(""))


def save_pieces(folder: Path, name: str, whole: torch.Tensor, windows: Mapping[Any, torch.Tensor]) -> None:
    """A distributed checkpoint of one tensor, each window of it in the file of another rank."""
    parts = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    chunks, places = [], {}
    for rank, (at, window) in enumerate(windows.items()):
        file = folder / f"__{rank}_0.distcp"
        torch.save(window.clone(), file)
        chunks.append(parts.ChunkStorageMetadata(torch.Size(at), window.shape))
        place = filesystem._StorageInfo(file.name, 0, file.stat().st_size)
        places[parts.MetadataIndex(name, torch.Size(at))] = place
    about = parts.TensorStorageMetadata(parts.TensorProperties(whole.dtype), whole.shape, chunks)
    metadata = parts.Metadata({name: about}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class TestForms:
    """What a file can be beside the ordinary zip archive."""

    def test_deflated_archives(self, tmp_path: Path) -> None:
        state = {"a": torch.arange(300_000.0), "b": torch.ones(7)}
        state["part"] = state["a"][1000:2000]
        with zipfile.ZipFile(file_of(state)) as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
        with open_(tmp_path / "x.pt") as handle:
            for name in ("part", "a", "b", "part"):  # back to the beginning of a record, too
                assert torch.equal(handle[name], state[name])
            assert torch.equal(handle.slice("a")[299_990:], state["a"][299_990:])

    def test_a_deflated_record_that_is_damaged(self) -> None:
        records = forge.remade(forge.entries(), "data/1", method=8, raw=b"\xff" * 20)
        with open_(forge.archive(records)) as handle:
            name, other = list(handle)
            assert handle[name].numel() == 4
            with pytest.raises(BrokenFileError, match="damaged"):
                handle[other]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8])
    def test_big_endian(self, dtype: torch.dtype) -> None:
        wanted = torch.arange(40).view(5, 8).to(dtype)
        storage = wanted.clone().untyped_storage()
        storage.byteswap(dtype)
        out = io.BytesIO()
        with zipfile.ZipFile(file_of({"a": wanted, "b": wanted[1:, ::3]})) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                swapped = {"byteorder": b"big", "0": bytes(storage)}
                new.writestr(entry.filename, swapped.get(entry.filename.rpartition("/")[2], old.read(entry)))
        with open_(out) as handle:
            assert torch.equal(handle["a"], wanted)
            assert torch.equal(handle["b"], wanted[1:, ::3])
            assert torch.equal(handle.slice("a")[2:4], wanted[2:4])

    def test_conjugated_and_negated(self) -> None:
        number, other = torch.randn(2, 4, 3, dtype=torch.complex64).clone()
        state = {"conj": number.conj(), "part": number.conj()[1:], "neg": other.clone().conj().imag}
        with open_(file_of(state)) as handle:
            for name, tensor in state.items():
                assert torch.equal(handle[name], tensor)
                assert torch.equal(handle.slice(name)[1:], tensor[1:])

    @pytest.mark.parametrize("kind", ["index", "directory"])
    def test_shards(self, tmp_path: Path, kind: str) -> None:
        state = {f"layers.{i}.weight": torch.randn(4, 4) for i in range(4)}
        names = list(state)
        for number in (1, 2):
            shard = {name: state[name] for name in names[2 * number - 2 : 2 * number]}
            torch.save(shard, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
        weights = {name: f"pytorch_model-0000{1 + i // 2}-of-00002.bin" for i, name in enumerate(names)}
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 256}, "weight_map": weights}))
        with open_(index if kind == "index" else tmp_path) as handle:
            assert list(handle) == names
            for name, tensor in state.items():
                assert torch.equal(handle[name], tensor)

    def test_safetensors_and_its_metadata_whole(self, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        state = {"b": torch.randn(3, 4).bfloat16(), "a": torch.arange(6).view(2, 3)}
        about = {"format": "pt", "long": "x" * 10_000, **{f"key{i}": str(i) for i in range(100)}}
        save_file(state, tmp_path / "x.safetensors", metadata=about)
        with open_(tmp_path / "x.safetensors") as handle:
            assert handle.metadata == about
            for name, tensor in state.items():
                assert torch.equal(handle[name], tensor)
                assert torch.equal(handle.slice(name)[1:, :2], tensor[1:, :2])

    def test_metadata_of_a_directory_without_tensors(self, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with open_(tmp_path) as handle:
            assert (list(handle), handle.metadata) == ([], {"format": "pt"})

    def test_metadata_of_shards_together(self, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        for number in (1, 2):
            name = f"model-0000{number}-of-00002.safetensors"
            save_file({f"w{number}": torch.ones(number)}, tmp_path / name, metadata={"format": "pt", name: "here"})
        with open_(tmp_path) as handle:
            assert sorted(handle.metadata) == [
                "format",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ]
            assert handle["w2"].shape == (2,)

    def test_an_unpacked_archive(self, tmp_path: Path) -> None:
        torch.save({"a": torch.arange(5), "b": torch.ones(2)}, tmp_path / "x.zip")
        shutil.unpack_archive(tmp_path / "x.zip", tmp_path / "out", "zip")
        with open_(tmp_path / "out") as handle:
            assert torch.equal(handle["a"], torch.arange(5))

    def test_a_directory_around_one_file(self, tmp_path: Path) -> None:
        torch.save({"a": torch.arange(5)}, tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text("{}")
        with open_(tmp_path) as handle:
            assert torch.equal(handle["a"], torch.arange(5))

    def test_a_distributed_checkpoint(self, tmp_path: Path) -> None:
        if not hasattr(dcp := pytest.importorskip("torch.distributed.checkpoint"), "save"):
            pytest.skip("this torch has no dcp.save")
        state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, "step": 7}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=tmp_path / "step-1")
        with open_(tmp_path / "step-1") as handle:
            assert torch.equal(handle["model.w"], state["model"]["w"])  # type: ignore[index]
            assert torch.equal(handle["model.b"], state["model"]["b"])  # type: ignore[index]
            assert torch.equal(handle.slice("model.w")[1:], state["model"]["w"][1:])  # type: ignore[index]

    def test_a_tensor_in_pieces_over_several_files(self, tmp_path: Path) -> None:
        whole = torch.arange(30.0).view(5, 6)
        windows = {(0, 0): whole[:3, :4], (0, 4): whole[:3, 4:], (3, 0): whole[3:]}
        save_pieces(tmp_path, "w", whole, windows)
        with open_(tmp_path) as handle:
            assert handle.checkpoint.tensor("w").kind == "sharded"
            assert torch.equal(handle["w"], whole)
            assert torch.equal(handle.slice("w")[2:4, ::2], whole[2:4, ::2])

    def test_a_piece_that_is_missing(self, tmp_path: Path) -> None:
        whole = torch.arange(30.0).view(5, 6)
        save_pieces(tmp_path, "w", whole, {(0, 0): whole[:3], (3, 0): whole[3:]})
        (tmp_path / "__1_0.distcp").unlink()
        handle = open_(tmp_path)
        with pytest.raises(BrokenFileError, match="some pieces of w are missing"):
            handle["w"]

    def test_pieces_that_overlap_do_not_stand_for_one_that_is_missing(self, tmp_path: Path) -> None:
        """The rest would be what was in memory before."""
        whole = torch.arange(30.0).view(5, 6)
        save_pieces(tmp_path, "w", whole, {(0, 0): whole[:3], (2, 0): whole[2:4]})
        with pytest.raises(BrokenFileError, match="some pieces of w are missing"):
            open_(tmp_path)["w"]

    def test_tar(self) -> None:
        with open_(forge.tar()) as handle:
            assert handle["w0"].tolist() == list(struct.unpack("<4f", forge.FLOATS))

    @pytest.mark.filterwarnings("ignore:.torch.jit.load. is:FutureWarning")
    def test_programs(self, data: Path) -> None:
        with open_(data / "h200" / "torchscript_cuda0.pt", device="cpu") as handle:
            wanted = torch.jit.load(data / "h200" / "torchscript_cuda0.pt", map_location="cpu").state_dict()
            for name, tensor in wanted.items():
                assert torch.equal(handle[name], tensor)


class TestTrust:
    """Tensors are read without running anything, so no trust is asked for."""

    def test_a_pickled_module(self, data: Path) -> None:
        with open_(data / "h200" / "whole_custom_module_cuda0.pt", device="cpu") as handle:
            assert handle.checkpoint.safety == "needs-trust"
            assert handle["fc.weight"].shape == handle.checkpoint.tensor("fc.weight").shape

    def test_a_file_that_would_run_a_program(self, capfd: pytest.CaptureFixture[str]) -> None:
        shout = forge.call(forge.name("builtins", "print"), "ran")
        pickle = forge.pickled(forge.dictionary({"w": forge.tensor(), "x": shout}))
        with open_(forge.checkpoint(pickle)) as handle:
            assert handle.checkpoint.safety != "data-only"
            assert handle["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert capfd.readouterr().out == ""

    def test_a_tensor_whose_class_nobody_allowed(self) -> None:
        specimen = ZOO["wrapper subclass"]
        with open_(saved(specimen.make())) as handle:
            name = next(name for name in handle if handle.checkpoint.tensor(name).kind == "subclass")
            with pytest.raises(UnsafeError, match="not allowed"):
                handle[name]


class TestDamage:
    def test_what_is_there_can_be_read(self) -> None:
        data = forge.legacy()
        with open_(data[:-8]) as handle:
            assert handle.checkpoint.integrity == "damaged"
            first, last = list(handle)
            assert handle[first].tolist() == [1.0, 2.0, 3.0, 4.0]
            with pytest.raises(BrokenFileError, match=f"the bytes of {last} are incomplete: 8 of 16 bytes"):
                handle[last]
            assert torch.equal(handle.slice(last)[:2], torch.tensor([1.0, 2.0]))

    def test_a_record_that_is_missing(self) -> None:
        records = [entry for entry in forge.entries() if not entry.name.endswith(b"data/1")]
        with open_(forge.archive(records)) as handle:
            first, last = list(handle)
            assert handle[first].numel() == 4
            with pytest.raises(BrokenFileError, match=last):
                handle[last]

    def test_a_shard_that_shrank_after_it_was_opened(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "x.pt")
        with open_(tmp_path / "x.pt") as handle:
            with (tmp_path / "x.pt").open("r+b") as file:
                file.truncate(500)
            with pytest.raises(BrokenFileError, match="the file ends 4,000 bytes before this tensor does"):
                handle["b"]

    @pytest.mark.parametrize("content", [b"<html></html>", b"", b"version https://git-lfs.github.com/spec/v1\n"])
    def test_no_checkpoint_at_all(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(NotACheckpointError):
            open_(tmp_path / "x.pt")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            open_(tmp_path / "x.pt")
        assert isinstance(caught.value, TransloadError)

    def test_a_dtype_this_torch_does_not_have(self) -> None:
        header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
        handle = open_(struct.pack("<Q", len(header)) + header + b"abc")
        with pytest.raises(LoadError, match=r"a has the dtype F6_E2M3, which torch .* does not have"):
            handle["a"]


class TestClosing:
    def test_reading_after_closing(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
        handle = open_(tmp_path / "x.pt")
        lazy = handle.slice("a")
        with handle:
            kept = handle["a"]
        handle.close()
        for read in (lambda: handle["a"], lambda: lazy[0], lambda: handle.slice("a"), lambda: handle.metadata):
            with pytest.raises(UsageError, match="this checkpoint was closed") as caught:
                read()
            assert isinstance(caught.value, ValueError)
        assert kept.tolist() == [1.0, 1.0]
        assert list(handle) == ["a"]
        assert repr(handle).endswith("1 tensor, closed>")

    def test_a_file_object_stays_open_and_where_it_was(self) -> None:
        file = file_of({"a": torch.ones(2)})
        home = file.tell()
        with open_(file) as handle:
            assert handle["a"].tolist() == [1.0, 1.0]
        assert (file.closed, file.tell()) == (False, home)


class TestMetadata:
    def test_values_of_a_training_checkpoint(self) -> None:
        long = "x" * 5000
        state = {"epoch": 7, "best": 0.25, "name": long, "done": None, "raw": b"\0\1", "on": torch.device("cuda", 1)}
        state |= {"list": [1, "two"], "model": torch.nn.Linear(1, 1).state_dict(), 3: "number"}  # type: ignore[dict-item]
        with open_(file_of(state)) as handle:
            assert handle.metadata == {
                "epoch": 7,
                "best": 0.25,
                "name": long,
                "done": None,
                "raw": b"\0\1",
                "on": "cuda:1",
                "list/0": 1,
                "list/1": "two",
                "3": "number",
            }

    def test_it_is_a_copy(self) -> None:
        handle = open_(file_of({"epoch": 7}))
        handle.metadata["epoch"] = 8
        assert handle.metadata == {"epoch": 7}


class TestLanding:
    def test_a_tag_that_is_not_here_goes_to_the_cpu_with_one_warning(self, data: Path) -> None:
        with open_(data / "h200" / "state_dict_cuda1.pt") as handle:
            with pytest.warns(LandingWarning, match="10 tensors saved on cuda:1 ") as caught:
                first = handle["fc.weight"]
            assert [warning.filename for warning in caught] == [__file__]
            assert first.device.type in ("cpu", "cuda")
            handle["conv.weight"]  # warnings are errors here: there is no second one

    def test_looking_at_names_warns_of_nothing(self, data: Path) -> None:
        with open_(data / "h200" / "state_dict_cuda1.pt") as handle:
            assert handle.checkpoint.tensor("fc.weight").device == "cuda:1"
            assert "fc.weight" in handle

    def test_a_device_that_was_asked_for_needs_no_warning(self, data: Path) -> None:
        path = data / "h200" / "state_dict_cuda1.pt"
        for wish in ("cpu", torch.device("cpu"), {"cuda:1": "cpu"}, ["cuda:1", "cpu"], lambda storage, _tag: storage):
            assert open_(path, device=wish)["fc.weight"].device == torch.device("cpu")

    @pytest.mark.parametrize("wish", [None, "cuda:1", "cuda", ["cuda:1", "cuda:0"]])
    def test_a_device_that_is_not_here(self, data: Path, wish: Any) -> None:
        with open_(data / "h200" / "state_dict_cuda1.pt", device=wish) as handle:
            with pytest.raises(NoDeviceError, match="there is no cuda") as caught:
                handle["fc.weight"]
            assert "map_location" not in str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
    def test_a_dtype_casts_what_is_floating(self, dtype: Any) -> None:
        state = {"a": torch.randn(3, 4), "n": torch.arange(3), "s": torch.randn(3, 4)[:, ::2]}
        with open_(file_of(state), dtype=dtype) as handle:
            assert torch.equal(handle["a"], state["a"].bfloat16())
            assert torch.equal(handle["s"], state["s"].bfloat16())
            assert handle["n"].dtype == torch.int64

    def test_what_is_no_dtype(self) -> None:
        with pytest.raises(UsageError, match="'half-ish' is not a dtype"):
            open_(file_of({}), dtype="half-ish")


def test_reading_from_many_threads(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(5_000) for i in range(16)}
    torch.save(state, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "packed.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    for source in (tmp_path / "plain.pt", tmp_path / "packed.pt", io.BytesIO((tmp_path / "plain.pt").read_bytes())):
        with open_(source) as handle, ThreadPoolExecutor(8) as pool:
            names = list(state) * 4
            for name, tensor in zip(names, pool.map(handle.__getitem__, names), strict=True):
                assert torch.equal(tensor, state[name])


def test_names_of_any_length_are_kept_whole() -> None:
    names = ["x" * 1500, "x" * 1499 + "y"]
    with open_(file_of({name: torch.full((2,), at) for at, name in enumerate(names)})) as handle:
        assert [(name, int(handle[name][0])) for name in handle] == [(names[0], 0), (names[1], 1)]


def test_a_sparse_tensor_under_any_key() -> None:
    state: dict[Any, Any] = {("a", 1): torch.eye(3).to_sparse(), "n": {None: torch.eye(2).to_sparse()}}
    with open_(file_of(state)) as handle:
        assert torch.equal(handle["('a', 1)"].to_dense(), torch.eye(3))
        assert torch.equal(handle["n/None"].to_dense(), torch.eye(2))


@pytest.mark.parametrize("left", [12, 40, 100])
def test_a_header_that_is_cut_off_is_not_an_empty_file(left: int) -> None:
    data = save({"weight": torch.ones(400), "bias": torch.zeros(300)})
    with pytest.raises(BrokenFileError, match="ends inside its header"):
        open_(data[:left])
    with open_(save({})) as empty:
        assert list(empty) == []
