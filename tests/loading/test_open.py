"""``transload.open``: every tensor equals that of torch.load, and only the bytes it needs are read."""

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
from tests import forge, makers
from tests.each import for_each, parametrize_groups
from tests.loading.equal import assert_same
from tests.loading.zoo import ZOO, registered_as_safe, saved

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
from transload.geometry import Box
from transload.loading.handles import Handle, TensorReader
from transload.loading.handles import open as open_
from transload.opening import fill

RELEASES = sorted((Path(__file__).parent.parent / "data" / "torch-releases").glob("torch-*"))


class CountingFile(io.BytesIO):
    """A file that counts the bytes read from it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self.bytes_read += count
        return count

    def count(self) -> int:
        """The bytes read since the last call."""
        bytes_read, self.bytes_read = self.bytes_read, 0
        return bytes_read


def file_of(value: Any, **options: Any) -> io.BytesIO:
    return io.BytesIO(makers.saved(value, **options))


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


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Plain tensors are equal to the byte and not parameters; others are compared as in the tests of ``load``."""
    if type(actual) is torch.Tensor and expected.layout is torch.strided and is_plain(expected):
        assert (actual.dtype, actual.shape, actual.layout) == (expected.dtype, expected.shape, expected.layout)
        assert not actual.requires_grad
        assert raw(actual) == raw(expected)
    else:
        assert_same(actual, expected.detach() if expected.requires_grad else expected)


def is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
@pytest.mark.filterwarnings("ignore::transload.errors.LandingWarning")
def test_tensors_of_every_release_are_equal_to_the_byte(folder: Path) -> None:
    files = json.loads((folder / "expected.json").read_text())["files"]
    compared = 0
    for name, description in files.items():
        with open_(folder / name, device="cpu") as handle:
            for path, expected in description.get("tensors", {}).items():
                key = path.removeprefix("/")
                known = hasattr(torch, expected["dtype"].removeprefix("torch."))
                plain = known and key in handle and handle.checkpoint.tensor(key).kind == "strided"
                if not plain or expected["sha256"] is None:
                    continue
                tensor = handle[key]
                assert (str(tensor.dtype), list(tensor.shape)) == (expected["dtype"], expected["shape"])
                assert hashlib.sha256(raw(tensor)).hexdigest() == expected["sha256"], (name, key)
                compared += 1
    assert compared > 60


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning", "ignore:BComplex32 support:UserWarning")
@parametrize_groups("names", [name for name, specimen in ZOO.items() if specimen.safe], 20)
def test_tensors_of_the_zoo_equal_torch_load(names: list[str]) -> None:
    for_each(itertools.product(names, ["zip", "legacy"]), lambda case: check_specimen(*case))


def check_specimen(name: str, form: str) -> None:
    specimen = ZOO[name]
    try:
        data = saved(specimen.make(), form)
        loaded = torch.load(io.BytesIO(data), weights_only=False)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        pytest.skip("torch itself cannot write or read it in this form")
    with registered_as_safe(specimen), open_(data) as handle:
        names: Any = handle
        expected = dict(tensors_in(loaded))
        assert not expected or len(handle)
        for path, tensor in expected.items():
            if path in names:
                assert_read(handle, path, tensor, data)


def assert_read(handle: Handle, path: tuple[Any, ...], tensor: torch.Tensor, data: bytes) -> None:
    try:
        actual = handle[path]
    except UnsafeError:  # a class that only some releases allow
        with pytest.raises(UnpicklingError):
            torch.load(io.BytesIO(data), weights_only=True)
    else:
        assert_equal(actual, tensor)


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

    def test_a_tensor_of_a_missing_shard(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "a.bin")
        index = {"weight_map": {"a": "a.bin", "b": "b.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with (
            open_(tmp_path) as handle,
            pytest.raises(KeyError, match=r"no tensor 'b'; files are missing or cannot be read: b\.bin"),
        ):
            handle["b"]

    def test_lookup_by_path(self, handle: Handle) -> None:
        assert torch.equal(handle["model", "fc.bias"], torch.ones(2))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("model/fc.wieght", "there is no tensor 'model/fc.wieght'; similar: model/fc.weight, model/fc.bias"),
            ("fc.bias", "there is no tensor 'fc.bias'; similar: model/fc.bias"),
            ("model", "there is no tensor 'model'; similar: model/fc.weight, model/fc.bias"),
            ("epoch", "'epoch' is not a tensor: its value is in metadata['epoch']"),
            ("zzz", "there is no tensor 'zzz'"),
        ],
    )
    def test_unknown_name_raises_key_error(self, handle: Handle, name: str, message: str) -> None:
        with pytest.raises(KeyError) as caught:
            handle[name]
        assert caught.value.args == (message,)
        assert handle.get(name) is None

    def test_handles_compare_by_identity(self, handle: Handle) -> None:
        assert handle == handle  # noqa: PLR0124 - a mapping would compare tensors, which fails
        assert handle != {}
        assert hash(handle) == hash(handle)

    def test_repr(self, handle: Handle) -> None:
        assert repr(handle) == "<<file object>: 2 tensors>"
        assert repr(handle.slice("model/fc.weight")) == "<model/fc.weight: float32 [2, 2], not read>"

    def test_single_tensor_has_the_empty_name(self) -> None:
        with open_(file_of(torch.arange(3))) as handle:
            assert torch.equal(handle[""], torch.arange(3))


class TestBytesRead:
    @pytest.fixture
    def file(self) -> CountingFile:
        counting = CountingFile()
        # A row of `wide` is 64 KiB, and one of `narrow` 40 bytes.
        state = {"wide": torch.arange(1 << 20).view(128, 8192).int(), "narrow": torch.arange(10_000.0).view(-1, 10)}
        torch.save({**state, "turned": state["narrow"].t().contiguous().t(), "rows": state["narrow"][::4]}, counting)
        counting.seek(0)
        return counting

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
            ("narrow", (slice(10, 20), 3), 9 * 40 + 4),  # from the first to the last element
            ("turned", (), 40_000),
            ("turned", (slice(None), 3), 4_000),  # columns are contiguous here
            ("wide", slice(2, 4), 2 << 15),
            ("wide", (slice(2, 6), slice(0, 100)), 4 * 400),  # rows far apart are read one by one
            ("wide", (slice(None), 5), 128 * 4),
            ("rows", 3, 40),
        ],
    )
    def test_slice_reads_only_its_bytes(self, file: CountingFile, name: str, index: Any, nbytes: int) -> None:
        full = torch.load(io.BytesIO(file.getvalue()))[name]
        with open_(file) as handle:
            file.count()
            result = handle.slice(name)[index]
            assert file.count() == nbytes
        assert torch.equal(result, full[index])

    def test_tensor_in_a_shared_storage_reads_only_its_range(self) -> None:
        file = CountingFile()
        flat = torch.arange(1000.0)
        torch.save({"a": flat[:10], "b": flat[500:700].view(10, 20)}, file)
        file.seek(0)
        with open_(file) as handle:
            file.count()
            assert torch.equal(handle["b"], flat[500:700].view(10, 20))
            assert file.count() == 800
            assert handle["b"].untyped_storage().nbytes() == 800

    def test_opening_reads_only_the_index(self) -> None:
        file = CountingFile()
        torch.save({"a": torch.zeros(1 << 22)}, file)
        file.seek(0)
        with open_(file) as handle:
            assert list(handle) == ["a"]
        assert file.count() < 100_000

    def test_meta_device_reads_nothing(self, file: CountingFile) -> None:
        with open_(file, device="meta") as handle:
            file.count()
            assert handle["narrow"].is_meta
            assert file.count() == 0

    def test_expanded_tensor_stays_expanded_in_memory(self) -> None:
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
def test_any_slice_equals_torch_indexing(shape: list[int], order: Any, index: list[Any], dots: int, start: int) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    base = torch.arange(4 + torch.Size(shape).numel())[start : start + torch.Size(shape).numel()]
    tensor = base.view([shape[d] for d in dims]).permute([dims.index(d) for d in range(len(shape))])
    full_index = tuple([*index[:dots], ..., *index[dots:]] if dots < 5 else index)
    handle = open_(file_of(tensor))
    try:
        expected = tensor[full_index]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            handle.slice("")[full_index]
        return
    assert torch.equal(handle.slice("")[full_index], expected)


@pytest.mark.parametrize("stage", [8, 24, 100, 1000])
def test_staging_buffer_may_have_any_size(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_unsupported_index_is_a_type_error(self, lazy: Any, index: Any) -> None:
        with pytest.raises(TypeError, match=r"only numbers, slices, \.\.\. and None can be read from a file, not "):
            lazy[index]

    @pytest.mark.parametrize("index", [3, -4, (0, 4), (0, 0, 0)])
    def test_index_out_of_range_is_an_index_error(self, lazy: Any, index: Any) -> None:
        with pytest.raises(IndexError):
            lazy[index]

    def test_negative_step_is_a_value_error(self, lazy: Any) -> None:
        with pytest.raises(ValueError, match="step must be greater than zero"):
            lazy[::-1]

    def test_empty_list_selects_nothing(self, lazy: Any) -> None:
        assert lazy[[]].shape == torch.arange(12).view(3, 4)[[]].shape == (0, 4)

    def test_integer_tensor_is_an_index(self, lazy: Any) -> None:
        assert torch.equal(lazy[torch.tensor(1)], torch.arange(4, 8))

    def test_shape_dtype_and_length(self, lazy: Any) -> None:
        assert (lazy.shape, lazy.dtype, len(lazy)) == ((3, 4), "int64", 3)

    def test_scalar_has_no_length(self) -> None:
        with pytest.raises(TypeError, match="no length"):
            len(open_(file_of(torch.tensor(1))).slice(""))


def save_pieces(folder: Path, name: str, tensor: torch.Tensor, windows: Mapping[Any, torch.Tensor]) -> None:
    """A distributed checkpoint of one tensor, with each window in the file of a different rank."""
    metadata_types = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    chunks, storage_data = [], {}
    for rank, (offsets, window) in enumerate(windows.items()):
        file = folder / f"__{rank}_0.distcp"
        torch.save(window.clone(), file)
        chunks.append(metadata_types.ChunkStorageMetadata(torch.Size(offsets), window.shape))
        info = filesystem._StorageInfo(file.name, 0, file.stat().st_size)
        storage_data[metadata_types.MetadataIndex(name, torch.Size(offsets))] = info
    tensor_metadata = metadata_types.TensorStorageMetadata(
        metadata_types.TensorProperties(tensor.dtype), tensor.shape, chunks
    )
    metadata = metadata_types.Metadata({name: tensor_metadata}, storage_data=storage_data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class TestFormats:
    """Formats other than the ordinary zip archive."""

    def test_deflated_archive(self, tmp_path: Path) -> None:
        state = {"a": torch.arange(300_000.0), "b": torch.ones(7)}
        state["part"] = state["a"][1000:2000]
        with zipfile.ZipFile(file_of(state)) as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
        with open_(tmp_path / "x.pt") as handle:
            for name in ("part", "a", "b", "part"):  # including a return to the start of a record
                assert torch.equal(handle[name], state[name])
            assert torch.equal(handle.slice("a")[299_990:], state["a"][299_990:])

    def test_damaged_deflated_record_is_an_error(self) -> None:
        records = forge.with_changes(forge.entries(), "data/1", method=8, raw=b"\xff" * 20)
        with open_(forge.archive(records)) as handle:
            name, other = list(handle)
            assert handle[name].numel() == 4
            with pytest.raises(BrokenFileError, match="damaged"):
                handle[other]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8])
    def test_big_endian_archive(self, dtype: torch.dtype) -> None:
        expected = torch.arange(40).view(5, 8).to(dtype)
        storage = expected.clone().untyped_storage()
        storage.byteswap(dtype)
        out = io.BytesIO()
        with zipfile.ZipFile(file_of({"a": expected, "b": expected[1:, ::3]})) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                swapped = {"byteorder": b"big", "0": bytes(storage)}
                new.writestr(entry.filename, swapped.get(entry.filename.rpartition("/")[2], old.read(entry)))
        with open_(out.getvalue()) as handle:
            assert torch.equal(handle["a"], expected)
            assert torch.equal(handle["b"], expected[1:, ::3])
            assert torch.equal(handle.slice("a")[2:4], expected[2:4])

    def test_conjugated_and_negated_tensors(self) -> None:
        number, other = torch.randn(2, 4, 3, dtype=torch.complex64).clone()
        state = {"conj": number.conj(), "part": number.conj()[1:], "neg": other.clone().conj().imag}
        with open_(file_of(state)) as handle:
            for name, tensor in state.items():
                assert torch.equal(handle[name], tensor)
                assert torch.equal(handle.slice(name)[1:], tensor[1:])

    @pytest.mark.parametrize("kind", ["index", "directory"])
    def test_sharded_checkpoint(self, tmp_path: Path, kind: str) -> None:
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

    def test_safetensors_with_complete_metadata(self, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        state = {"b": torch.randn(3, 4).bfloat16(), "a": torch.arange(6).view(2, 3)}
        metadata = {"format": "pt", "long": "x" * 10_000, **{f"key{i}": str(i) for i in range(100)}}
        save_file(state, tmp_path / "x.safetensors", metadata=metadata)
        with open_(tmp_path / "x.safetensors") as handle:
            assert handle.metadata == metadata
            for name, tensor in state.items():
                assert torch.equal(handle[name], tensor)
                assert torch.equal(handle.slice(name)[1:, :2], tensor[1:, :2])

    def test_metadata_of_a_directory_without_tensors(self, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with open_(tmp_path) as handle:
            assert (list(handle), handle.metadata) == ([], {"format": "pt"})

    def test_metadata_of_shards_is_merged(self, tmp_path: Path) -> None:
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

    def test_extracted_archive(self, tmp_path: Path) -> None:
        torch.save({"a": torch.arange(5), "b": torch.ones(2)}, tmp_path / "x.zip")
        shutil.unpack_archive(tmp_path / "x.zip", tmp_path / "out", "zip")
        with open_(tmp_path / "out") as handle:
            assert torch.equal(handle["a"], torch.arange(5))

    def test_directory_with_one_checkpoint(self, tmp_path: Path) -> None:
        torch.save({"a": torch.arange(5)}, tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text("{}")
        with open_(tmp_path) as handle:
            assert torch.equal(handle["a"], torch.arange(5))

    def test_distributed_checkpoint(self, tmp_path: Path) -> None:
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

    def test_tensor_split_over_several_files(self, tmp_path: Path) -> None:
        tensor = torch.arange(30.0).view(5, 6)
        windows = {(0, 0): tensor[:3, :4], (0, 4): tensor[:3, 4:], (3, 0): tensor[3:]}
        save_pieces(tmp_path, "w", tensor, windows)
        with open_(tmp_path) as handle:
            assert handle.checkpoint.tensor("w").kind == "sharded"
            assert torch.equal(handle["w"], tensor)
            assert torch.equal(handle.slice("w")[2:4, ::2], tensor[2:4, ::2])

    def test_slice_of_a_sharded_tensor_reads_only_the_bytes_of_its_box(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = torch.arange(240.0).view(4, 10, 6)
        windows = {(0, 0, 0): tensor[:, :4], (0, 4, 0): tensor[:3, 4:], (3, 4, 0): tensor[3:, 4:]}
        save_pieces(tmp_path, "w", tensor, windows)
        handle, sizes = open_(tmp_path), list[int]()

        def recorded(ranges: Any, *arguments: Any) -> None:
            sizes.extend(nbytes for _, _, nbytes, _ in ranges)
            fill(ranges, *arguments)

        monkeypatch.setattr("transload.loading.handles.fill", recorded)
        cases: list[tuple[Any, int]] = [
            (0, 240),
            ((3, slice(4, None)), 144),
            ((slice(1, 3), 5), 48),
            ((3, slice(2, 6)), 96),
            ((..., slice(None)), 960),
            ((slice(0, 0), 1), 0),
            ((-1, None, -1, slice(None, None, 2)), 20),
            ((2, slice(None, None, 3), ...), 240),
        ]
        for index, nbytes in cases:
            sizes.clear()
            assert torch.equal(handle.slice("w")[index], tensor[index]), index
            assert sum(sizes) <= nbytes, index
        with pytest.raises(IndexError):
            handle.slice("w")[4]
        with pytest.raises(TypeError, match="only numbers, slices"):
            handle.slice("w")[[0, 1]]

    def test_missing_piece_is_an_error(self, tmp_path: Path) -> None:
        tensor = torch.arange(30.0).view(5, 6)
        save_pieces(tmp_path, "w", tensor, {(0, 0): tensor[:3], (3, 0): tensor[3:]})
        (tmp_path / "__1_0.distcp").unlink()
        handle = open_(tmp_path)
        with (
            handle,
            pytest.raises(BrokenFileError, match=r"no file has \[3:5\] of \[5, 6\]\n.*\n.*\n\$ transload verify "),
        ):
            handle["w"]
        (tmp_path / "__0_0.distcp").unlink()
        with pytest.raises(BrokenFileError, match="no file has any of it"):
            open_(tmp_path)["w"]

    def test_overlapping_pieces_do_not_hide_a_missing_one(self, tmp_path: Path) -> None:
        """Otherwise the rest of the tensor would be uninitialized memory."""
        tensor = torch.arange(30.0).view(5, 6)
        save_pieces(tmp_path, "w", tensor, {(0, 0): tensor[:3], (2, 0): tensor[2:4]})
        with pytest.raises(BrokenFileError, match=r"no file has|overlap"):
            open_(tmp_path)["w"]

    def test_tar_archive(self) -> None:
        with open_(forge.tar()) as handle:
            assert handle["w0"].tolist() == list(struct.unpack("<4f", forge.FLOATS))

    @pytest.mark.filterwarnings("ignore:.torch.jit.load. is:FutureWarning")
    def test_torchscript_program(self, data: Path) -> None:
        with open_(data / "h200" / "torchscript_cuda0.pt", device="cpu") as handle:
            expected = torch.jit.load(data / "h200" / "torchscript_cuda0.pt", map_location="cpu").state_dict()
            for name, tensor in expected.items():
                assert torch.equal(handle[name], tensor)


class TestTrust:
    """Tensors are read without running code, so they need no trust."""

    def test_tensor_of_a_pickled_module(self, data: Path) -> None:
        with open_(data / "h200" / "whole_custom_module_cuda0.pt", device="cpu") as handle:
            assert handle.checkpoint.safety == "needs-trust"
            assert handle["fc.weight"].shape == handle.checkpoint.tensor("fc.weight").shape

    def test_reading_a_tensor_runs_no_code_of_the_file(self, capfd: pytest.CaptureFixture[str]) -> None:
        print_call = forge.call(forge.name("builtins", "print"), "ran")
        pickle = forge.pickled(forge.dictionary({"w": forge.tensor(), "x": print_call}))
        with open_(forge.checkpoint(pickle)) as handle:
            assert handle.checkpoint.safety != "data-only"
            assert handle["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert capfd.readouterr().out == ""

    def test_tensor_subclass_that_is_not_allowed_is_an_error(self) -> None:
        specimen = ZOO["wrapper subclass"]
        with open_(saved(specimen.make())) as handle:
            name = next(name for name in handle if handle.checkpoint.tensor(name).kind == "subclass")
            with pytest.raises(UnsafeError, match="not allowed"):
                handle[name]


class TestDamage:
    def test_intact_tensors_of_a_truncated_file_can_be_read(self) -> None:
        data = forge.legacy()
        with open_(data[:-8]) as handle:
            assert handle.checkpoint.integrity == "damaged"
            first, last = list(handle)
            assert handle[first].tolist() == [1.0, 2.0, 3.0, 4.0]
            with pytest.raises(BrokenFileError, match=f"the bytes of {last} are incomplete: 8 of 16 bytes"):
                handle[last]
            assert torch.equal(handle.slice(last)[:2], torch.tensor([1.0, 2.0]))

    def test_missing_record_is_an_error_for_its_tensor_only(self) -> None:
        records = [entry for entry in forge.entries() if not entry.name.endswith(b"data/1")]
        with open_(forge.archive(records)) as handle:
            first, last = list(handle)
            assert handle[first].numel() == 4
            with pytest.raises(BrokenFileError, match=last):
                handle[last]

    def test_file_truncated_after_opening_is_an_error(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "x.pt")
        with open_(tmp_path / "x.pt") as handle:
            with (tmp_path / "x.pt").open("r+b") as file:
                file.truncate(500)
            with pytest.raises(BrokenFileError, match="it was changed while it was read"):
                handle["b"]

    @pytest.mark.parametrize("content", [b"<html></html>", b"", b"version https://git-lfs.github.com/spec/v1\n"])
    def test_file_that_is_not_a_checkpoint_is_an_error(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(NotACheckpointError):
            open_(tmp_path / "x.pt")

    def test_missing_file_is_a_file_not_found_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            open_(tmp_path / "x.pt")
        assert isinstance(caught.value, TransloadError)

    def test_dtype_that_torch_lacks_is_an_error(self) -> None:
        header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
        handle = open_(struct.pack("<Q", len(header)) + header + b"abc")
        with pytest.raises(LoadError, match=r"a has the dtype F6_E2M3, which torch .* does not have"):
            handle["a"]


class TestClosing:
    def test_reading_after_close_is_an_error(self, tmp_path: Path) -> None:
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
        with pytest.raises(UsageError, match="this checkpoint was closed"):
            handle.keys()
        assert list(handle) == ["a"]
        assert repr(handle).endswith("1 tensor, closed>")

    def test_file_object_stays_open_at_its_position(self) -> None:
        file = file_of({"a": torch.ones(2)})
        position = file.tell()
        with open_(file) as handle:
            assert handle["a"].tolist() == [1.0, 1.0]
        assert (file.closed, file.tell()) == (False, position)


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

    def test_metadata_is_a_copy(self) -> None:
        handle = open_(file_of({"epoch": 7}))
        handle.metadata["epoch"] = 8
        assert handle.metadata == {"epoch": 7}


class TestPlacement:
    def test_tensors_of_an_absent_device_give_one_warning(self, data: Path) -> None:
        with open_(data / "h200" / "state_dict_cuda1.pt") as handle:
            with pytest.warns(LandingWarning, match="10 tensors saved on cuda:1 ") as caught:
                first = handle["fc.weight"]
            assert [warning.filename for warning in caught] == [__file__]
            assert first.device.type in ("cpu", "cuda")
            handle["conv.weight"]  # warnings are errors here: there is no second one

    def test_inspecting_names_does_not_warn(self, data: Path) -> None:
        with open_(data / "h200" / "state_dict_cuda1.pt") as handle:
            assert handle.checkpoint.tensor("fc.weight").device == "cuda:1"
            assert "fc.weight" in handle

    def test_requested_device_gives_no_warning(self, data: Path) -> None:
        path = data / "h200" / "state_dict_cuda1.pt"
        for device in ("cpu", torch.device("cpu"), {"cuda:1": "cpu"}, ["cuda:1", "cpu"], lambda storage, _tag: storage):
            assert open_(path, device=device)["fc.weight"].device == torch.device("cpu")

    @pytest.mark.parametrize("device", [None, "cuda:1", "cuda", ["cuda:1", "cuda:0"]])
    def test_requested_device_that_is_absent_is_an_error(self, data: Path, device: Any) -> None:
        with pytest.raises(NoDeviceError, match="there is no cuda") as caught:
            open_(data / "h200" / "state_dict_cuda1.pt", device=device)
        assert "map_location" not in str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
    def test_dtype_casts_floating_point_tensors_only(self, dtype: Any) -> None:
        state = {"a": torch.randn(3, 4), "n": torch.arange(3), "s": torch.randn(3, 4)[:, ::2]}
        with open_(file_of(state), dtype=dtype) as handle:
            assert torch.equal(handle["a"], state["a"].bfloat16())
            assert torch.equal(handle["s"], state["s"].bfloat16())
            assert handle["n"].dtype == torch.int64

    def test_unknown_dtype_is_an_error(self) -> None:
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


def test_long_names_are_not_truncated() -> None:
    names = ["x" * 1500, "x" * 1499 + "y"]
    with open_(file_of({name: torch.full((2,), index) for index, name in enumerate(names)})) as handle:
        assert [(name, int(handle[name][0])) for name in handle] == [(names[0], 0), (names[1], 1)]


def test_sparse_tensor_under_a_key_that_is_not_a_string() -> None:
    state: dict[Any, Any] = {("a", 1): torch.eye(3).to_sparse(), "n": {None: torch.eye(2).to_sparse()}}
    with open_(file_of(state)) as handle:
        assert torch.equal(handle["('a', 1)"].to_dense(), torch.eye(3))
        assert torch.equal(handle["n/None"].to_dense(), torch.eye(2))


@pytest.mark.parametrize("size", [12, 40, 100])
def test_truncated_safetensors_header_is_not_an_empty_file(size: int) -> None:
    data = save({"weight": torch.ones(400), "bias": torch.zeros(300)})
    with pytest.raises(BrokenFileError, match="ends inside its header"):
        open_(data[:size])
    with open_(save({})) as empty:
        assert list(empty) == []


def test_long_rows_of_a_box_are_read_by_the_engine_and_short_ones_through_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(2 * 6 * 8 * 4.0).view(2, 6, 8, 4)
    torch.save({"w": whole}, tmp_path / "w.pt")
    box = Box((0, 2, 1, 0), (2, 3, 5, 4))
    staged: list[str] = []
    monkeypatch.setattr(TensorReader, "_read_staged", lambda _, tensor, *__: staged.append(tensor.name))
    opened = TensorReader(tmp_path / "w.pt", "cpu")
    with opened:
        (tensor,) = opened.checkpoint.tensors
        for limit in (5 * 4 * 4, 5 * 4 * 4 + 1):
            monkeypatch.setattr("transload.loading.handles.LONG_ROW", limit)
            target = torch.zeros(box.shape)
            opened.fill([(tensor, target, box)])
            assert torch.equal(target, whole[box.slices]) == (not staged)
    assert staged == ["w"]
