"""Checkpoints of several files that form one object: ``load`` gives what ``dcp_to_torch_save`` makes of them."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import shutil
import sys
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from tests.each import each
from tests.loading.equal import assert_same
from tests.makers import ZstdStandIn
from tests.release import RELEASE

from transload.converting import convert
from transload.errors import BrokenFileError, FileWarning, LoadError, TransloadError, UnsafeError
from transload.formats import sets
from transload.io.sources import FileSource
from transload.loading import load
from transload.loading.handles import open as open_
from transload.opening import inspect
from transload.rescuing import rescue

dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.skipif(RELEASE < (2, 3), reason="this torch cannot write or convert DCP without a process group"),
]


def save(value: Any, folder: Path) -> Path:
    try:
        dcp.save(value, checkpoint_id=folder, no_dist=True)
    except TypeError:  # in torch 2.3 to 2.6 that is implied
        dcp.save(value, checkpoint_id=folder)
    return folder


def converted(folder: Path) -> Any:
    """What torch makes of a directory."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = folder.with_suffix(".torch.pt")
    dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=False)


class Custom:
    """A class that no loader knows."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


def trained() -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}


OBJECTS: dict[str, Any] = {
    "a trained model": trained(),
    "flat names": {"a.b": torch.ones(2), "a.c": 1, "d": torch.zeros(())},
    "values first": {"epoch": 7, "w": torch.ones(3), "name": "x", "v": torch.zeros(1, dtype=torch.int8)},
    "integer keys": {"state": {0: {"step": torch.tensor(1.0)}, 12: {"step": torch.tensor(2.0)}}, "n": {3: "x"}},
    "nested lists": {"l": [torch.ones(1), [torch.zeros(2), {"a": torch.ones(3), "b": 4}], 5], "m": [1, [2, 3]]},
    "tuples": {"t": (1, (2.5, "x")), "pair": (torch.ones(2), torch.zeros(3)), "w": torch.ones(1)},
    "empty containers": {"e": {}, "l": [], "t": (), "in": {"e": {}, "w": torch.ones(1)}},
    "other values": {"none": None, "b": b"xy", "c": 1 + 2j, "f": float("inf"), "s": {1, 2}, "o": OrderedDict(a=1)},
    "dtypes": {
        str(dtype).removeprefix("torch."): torch.ones(3, 2).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int64)
    },
    "strides": {"t": torch.arange(6.0).view(2, 3).t(), "part": torch.arange(6.0)[2:4], "x": torch.ones(1).expand(5)},
    "conjugates": {"c": torch.tensor([1 + 2j, 3 + 4j]).conj(), "n": torch.tensor([1 + 2j]).conj().imag},
    "empty tensors": {"a": torch.zeros(0), "b": torch.zeros(2, 0), "c": torch.zeros(0, dtype=torch.int32)},
    "only values": {"a": 1, "b": {"c": [1, 2]}},
    "nothing": {},
}


@each("name", OBJECTS)
def test_load_gives_what_torch_converts_it_to(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(OBJECTS[name], tmp_path / "d")
    expected = converted(folder)
    assert_same(load(folder), expected)
    monkeypatch.setattr(sets.dcp, "FEW_ITEMS", -1)  # items are opened when they are read
    assert_same(load(folder), expected)
    convert(folder, tmp_path / "out.pt", overwrite=True) if has_tensors(expected) else None
    assert not has_tensors(expected) or same_values(torch.load(tmp_path / "out.pt"), expected)


def has_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def same_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    return bool(a == b)


def test_many_items_are_opened_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 64
    tensors = {f"w{number}": torch.arange(rows * 1000.0).view(rows, 1000) + number for number in range(8)}
    boxes = [((start, 0), (16, 1000)) for start in range(0, rows, 16)]
    folder = write_pieces(tmp_path / "d", {name: (tensor, boxes) for name, tensor in tensors.items()})
    monkeypatch.setattr(sets.dcp, "FEW_ITEMS", 10)
    checkpoint = inspect(folder)
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "unchecked")
    (finding,) = checkpoint.findings
    assert (finding.code, finding.evidence) == (
        "dcp-items-unread",
        ("32 pieces of tensors; objects and the index were read",),
    )
    assert len(checkpoint.pickles) == 1
    assert {(tensor.shape, tensor.nbytes) for tensor in checkpoint.tensors} == {((rows, 1000), rows * 4000)}
    opened = inspect(folder, verify=True)
    assert (opened.safety, len(opened.pickles)) == ("data-only", 33)
    reads: list[int] = []
    readinto = FileSource.readinto

    def counting(self: FileSource, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        reads.append(len(buffer))
        return readinto(self, offset, buffer, ahead=ahead)

    with open_(folder) as handle:
        before = handle.slice("w3")
        monkeypatch.setattr(FileSource, "readinto", counting)
        assert torch.equal(before[20:22], tensors["w3"][20:22])
        assert sum(reads) < 3 * 4000  # and not the other pieces, nor the rest of this one
        monkeypatch.undo()
        for name, tensor in tensors.items():
            assert torch.equal(handle[name], tensor)


def test_pieces_that_are_not_plain_arrays_are_the_same_among_few_and_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    folders = [save({"q": quantized, "w": torch.ones(2)}, tmp_path / "q")]
    sparse = torch.eye(3).to_sparse()
    for name, tensor in (("s", sparse), ("m", torch.empty(900, 900, device="meta"))):  # which torch does not write
        folder = write_pieces(tmp_path / name, {name: (torch.ones(tensor.shape), [((0, 0), (*tensor.shape,))])})
        torch.save(tensor, folder / "__0_0.distcp")
        rewritten(folder, lambda index: fit(index, folder))  # noqa: B023 - called at once
        if name == "s":
            raw = (folder / ".metadata").read_bytes()
            (folder / ".metadata").write_bytes(raw.replace(b"\x8c\rtorch.strided", b"\x8c\x10torch.sparse_coo"))
        folders.append(folder)
    for folder in folders:
        few = inspect(folder).tensor(folder.name)
        with monkeypatch.context() as patch:
            patch.setattr(sets.dcp, "FEW_ITEMS", -1)
            many = inspect(folder).tensor(folder.name)
        assert many == few
        assert few.kind in ("quantized", "sparse_coo", "meta")


def test_rows_of_a_piece_that_is_not_saved_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.arange(12.0).view(3, 4).t()  # torch saves the bytes of such a tensor as they are
    folder = save({"w": columns}, tmp_path / "d")
    monkeypatch.setattr(sets.dcp, "FEW_ITEMS", -1)
    with open_(folder) as handle:
        assert handle.slice("w")[1:3].tolist() == columns[1:3].tolist()
        assert torch.equal(handle["w"], columns)


def test_item_that_is_not_what_the_index_says_is_an_error_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets.dcp, "FEW_ITEMS", -1)
    folder = write_pieces(tmp_path / "d", {"w": (torch.ones(4), [((0,), (2,)), ((2,), (2,))])})
    for content, words in (
        (torch.ones(3), r"float32 \[3\], not float32 \[2\]"),
        ({"a": torch.ones(2)}, "no tensor at byte 0"),
        (torch.ones(2, dtype=torch.int32), "int32"),
    ):
        torch.save(content, folder / "__1_0.distcp")
        rewritten(folder, lambda index: fit(index, folder))
        with pytest.raises(BrokenFileError, match=words):
            load(folder)
        with open_(folder) as handle:
            assert handle.slice("w")[:2].tolist() == [1, 1]


def test_pieces_of_another_dtype_are_not_read_into_memory_for_the_one_in_the_index(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "d", {"w": (torch.ones(4), [((0,), (2,)), ((2,), (2,))])})
    for number in range(2):
        torch.save(torch.ones(2, dtype=torch.int32), folder / f"__{number}_0.distcp")
    rewritten(folder, lambda index: fit(index, folder))
    with (
        open_(folder) as handle,
        pytest.raises(BrokenFileError, match="a part of it has elements of int32, not float32"),
    ):
        handle["w"]


def test_piece_that_is_said_to_be_outside_its_tensor_is_not_all_of_it(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "d", {"w": (torch.ones(4), [((0,), (4,))])})

    def move(index: Any) -> None:
        index.state_dict_metadata["w"].chunks[0].offsets = torch.Size([4])
        index.storage_data = {type(key)("w", torch.Size([4])): info for key, info in index.storage_data.items()}

    rewritten(folder, move)
    with pytest.raises(BrokenFileError, match=r"missing: \[:\] of \[4\]"):
        load(folder)


def test_index_that_no_entry_has_is_none(tmp_path: Path) -> None:
    # torch itself fails to load this: an empty dictionary is not saved, and leaves a hole.
    folder = save({"h": [{}, torch.ones(2), {}]}, tmp_path / "d")
    assert_same([None if entry is None else entry.tolist() for entry in load(folder)["h"]], [None, [1.0, 1.0]])


def test_pieces_of_a_tensor_are_joined_where_they_are_in_it(tmp_path: Path) -> None:
    expected = torch.arange(24.0).view(4, 6)
    folder = write_pieces(tmp_path / "d", {"m.w": (expected, [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))])})
    (tensor,) = inspect(folder).tensors
    assert (tensor.kind, tensor.path, len(tensor.parts)) == ("sharded", ("m", "w"), 3)
    assert torch.equal(load(folder)["m"]["w"], expected)
    with open_(folder) as handle:
        assert torch.equal(handle["m.w"], expected)
        assert torch.equal(handle["m", "w"], expected)


def test_object_of_an_unknown_class_needs_trust(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(2), "a": {"x": Custom("x")}, "b": Custom("y"), "n": 1}, tmp_path / "d")
    with pytest.raises(UnsafeError, match=r"test_composed\.Custom") as raised:
        load(folder)
    assert "weights_only=False" in raised.value.fix
    assert inspect(folder).safety == "needs-trust"
    loaded = load(folder, weights_only=False)
    assert_same(loaded, converted(folder))
    assert loaded["a"]["x"] == Custom("x")
    with torch.serialization.safe_globals([Custom]):
        assert load(folder)["b"] == Custom("y")


def test_a_part_of_a_damaged_directory_is_converted_if_it_is_whole(tmp_path: Path) -> None:
    value = {"model": {"w": torch.arange(99.0), "t": (1,)}, "opt": {"m": torch.ones(2, 3), "o": "o"}, "step": (3,)}
    folder = save(value, tmp_path / "d")
    index, file = dcp.FileSystemReader(folder).read_metadata(), folder / "__0_0.distcp"
    ends = {key.fqn: info.offset + info.length for key, info in index.storage_data.items()}
    data = file.read_bytes()
    outcomes = set()
    for cut in sorted(
        {0, *range(1, len(data), 199), *ends.values(), *(end - 1 for end in ends.values())} - {len(data)}
    ):
        file.write_bytes(data[:cut])
        assert inspect(folder).integrity == "damaged"
        for key in ("model", "opt"):
            whole = all(end <= cut for name, end in ends.items() if name.startswith(f"{key}."))
            outcomes.add((key, whole))
            if not whole:
                with pytest.raises(TransloadError, match=f"{key}[./]|__0_0.distcp"):
                    convert(folder, tmp_path / "out.pt", key=key, overwrite=True)
                continue
            result = convert(folder, tmp_path / "out.pt", key=key, overwrite=True)
            assert "other parts of the source are damaged: transload verify names what is lost" in result.notes
            assert same_values(torch.load(tmp_path / "out.pt", weights_only=True), value[key])
    assert len(outcomes) > 2
    damaged = bytearray(data)
    damaged[data.index(b"X\x01\x00\x00\x00o")] ^= 1  # the pickle of an object: its checksum differs
    file.write_bytes(damaged)
    with pytest.raises(BrokenFileError):
        convert(folder, tmp_path / "out.pt", key="opt", overwrite=True)
    assert convert(folder, tmp_path / "out.pt", key="opt/m", overwrite=True).complete
    file.unlink()
    with pytest.raises(BrokenFileError, match=r"model\.t: no file has it"):
        convert(folder, tmp_path / "out.pt", key="model", overwrite=True)


def test_arguments_of_load_apply_to_a_directory(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(300, 1000), "pair": (torch.zeros(2),), "n": 1}, tmp_path / "d")
    on_meta = load(folder, map_location="meta")
    assert (on_meta["w"].device.type, on_meta["w"].shape, on_meta["pair"][0].device.type) == (
        "meta",
        (300, 1000),
        "meta",
    )
    seen: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] >= 1_200_000
    assert torch.equal(load(folder, mmap=True)["w"], torch.ones(300, 1000))  # there is nothing to map


def test_verify_finds_a_flipped_bit_in_a_directory(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(1000)}, tmp_path / "d")
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.ones(4).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    assert load(folder)["w"].shape == (1000,)
    with pytest.raises(BrokenFileError, match="checksum"):
        load(folder, verify=True)


def test_paths_that_are_not_those_of_the_names_are_not_used(tmp_path: Path) -> None:
    folder = save({"a": {"b": torch.ones(1)}, "c": torch.zeros(2), "d": [torch.ones(1)]}, tmp_path / "d")
    index = dcp.FileSystemReader(folder).read_metadata()
    hostile: list[dict[str, Any]] = [
        {"a.b": ("c", "b")},
        {"a.b": ()},
        {"a.b": ("a",) * 1000},
        {"a.b": (["a"], "b")},
        {"d.0": (0, 0)},
        {"d.0": ("d", 1 << 70)},
        {"d.0": ("d", -1)},
    ]
    for planned in hostile:
        index.planner_data = planned
        (folder / ".metadata").write_bytes(pickle.dumps(index))
        assert {name: tensor.tolist() for name, tensor in load(folder).items()} == {"a.b": [1], "c": [0, 0], "d.0": [1]}
    index.planner_data = {"d.0": ("d", 0), "a.b": ("a", "b"), "c": ("c",)}
    index.state_dict_metadata["d"] = index.state_dict_metadata.pop("c")  # "d.0" would be inside it
    for key in [key for key in index.storage_data if key.fqn == "c"]:
        index.storage_data[type(key)("d", key.offset, key.index)] = index.storage_data.pop(key)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert sorted(load(folder)) == ["a.b", "d", "d.0"]


def write_pieces(folder: Path, tensors: dict[str, tuple[torch.Tensor, Any]]) -> Path:
    """A directory with one file for each piece, as ranks write them: a tensor by name, with offsets and sizes."""
    import io

    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    described, places, paths = {}, {}, {}
    number = 0
    for name, (tensor, boxes) in tensors.items():
        chunks = []
        for offsets, sizes in boxes:
            piece = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
            stream = io.BytesIO()
            torch.save(piece, stream)
            (folder / f"__{number}_0.distcp").write_bytes(stream.getvalue())
            info = _StorageInfo(f"__{number}_0.distcp", 0, len(stream.getvalue()))
            places[meta.MetadataIndex(name, torch.Size(offsets), number)] = info
            chunks.append(meta.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            number += 1
        properties = meta.TensorProperties(dtype=tensor.dtype)
        described[name] = meta.TensorStorageMetadata(properties, tensor.size(), chunks)
        paths[name] = tuple(name.split("."))
    index = meta.Metadata(described, planner_data=paths, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index of a directory."""
    index = dcp.FileSystemReader(folder).read_metadata()
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def fit(index: Any, folder: Path) -> None:
    """Make each item as long as its file."""
    for info in index.storage_data.values():
        info.length = (folder / info.relative_path).stat().st_size


def split_by_rank(folder: Path) -> None:
    """Make a directory one of ``use_collectives=False``: each rank has the index of its own file, and all objects."""
    index = dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").unlink()
    files = sorted({info.relative_path for info in index.storage_data.values()})
    for rank, file in enumerate(files):
        own = copy.deepcopy(index)
        own.storage_data = {key: info for key, info in index.storage_data.items() if info.relative_path == file}
        kept = {(key.fqn, key.offset) for key in own.storage_data}
        for name, entry in own.state_dict_metadata.items():
            entry.chunks = [chunk for chunk in entry.chunks if (name, chunk.offsets) in kept]
        own.state_dict_metadata = {name: entry for name, entry in own.state_dict_metadata.items() if entry.chunks}
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(own))


def test_path_that_an_index_repeats_is_compared_once() -> None:
    path = tuple("x" * 10_000 for _ in range(100))
    name = ".".join(path)
    before = process_time()
    assert sets.dcp._paths([(name, path)] * 100_000, [name]) == {name: path}
    assert process_time() - before < 3  # each comparison takes a tenth of a millisecond
    assert sets.dcp._paths([("a.b", ("a", "b")), ("a.b.c", ("a", "b", "c"))], ["a.b", "a.b.c"]) == {}


def test_list_of_pieces_that_tensors_share_is_refused(tmp_path: Path) -> None:
    boxes = [((row,), (1,)) for row in range(100)]
    folder = write_pieces(tmp_path / "d", {"w": (torch.arange(100.0), boxes)})

    def share(index: Any) -> None:
        index.state_dict_metadata = {f"w{n}": index.state_dict_metadata["w"] for n in range(100)}

    assert "dcp-metadata-invalid" not in [problem.code for problem in inspect(folder).problems]
    rewritten(folder, share)
    details = [problem.detail for problem in inspect(folder).problems if problem.code == "dcp-metadata-invalid"]
    assert details[0] == "several tensors have the same list of pieces"


def test_indexes_of_all_ranks_are_merged(tmp_path: Path) -> None:
    expected = torch.arange(24.0).view(6, 4)
    pieces = [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (2, 4))]
    folder = write_pieces(tmp_path / "d", {"m.w": (expected, pieces)})
    split_by_rank(folder)
    checkpoint = inspect(folder)
    assert (checkpoint.findings, checkpoint.safety, checkpoint.integrity) == ((), "data-only", "unchecked")
    assert ("indexes", "one for each of 3 ranks") in checkpoint.facts
    assert torch.equal(load(folder)["m"]["w"], expected)
    (folder / "__1.metadata").rename(folder / "__1.metadata.tmp")
    evidence = {finding.code: finding.evidence for finding in inspect(folder).findings}
    assert evidence == {
        "rank-missing": ("1 of 3 ranks: __1.metadata",),
        "dcp-piece-missing": ("m.w: 2 of 2 pieces were found; missing: [2:4] of [6, 4]",),
    }
    with pytest.raises(BrokenFileError, match=r"__1\.metadata"):
        load(folder)


def test_objects_that_ranks_saved_under_one_name_are_compared(tmp_path: Path) -> None:
    folder = save({"rng": 1, "w": torch.ones(2)}, tmp_path / "d")
    index = dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").unlink()
    (folder / "__0.metadata").write_bytes(pickle.dumps(index))
    other = save({"rng": 2, "w": torch.ones(2)}, tmp_path / "other")
    text = pickle.dumps(dcp.FileSystemReader(other).read_metadata()).replace(b"__0_0.distcp", b"__1_0.distcp")
    (folder / "__1.metadata").write_bytes(text)
    (other / "__0_0.distcp").rename(folder / "__1_0.distcp")
    (finding,) = inspect(folder).findings
    assert (finding.code, finding.evidence) == (
        "dcp-objects-differ",
        ("1 objects: rng in __0_0.distcp and __1_0.distcp",),
    )
    with pytest.warns(FileWarning, match="ranks saved different objects or pieces"):
        assert load(folder)["rng"] == 1


def test_pieces_that_ranks_saved_at_one_place_are_compared(tmp_path: Path) -> None:
    """Of large ones too: the directory of an archive has checksums of all records."""
    size = 1 << 19
    first, second = torch.zeros(size), torch.zeros(size)
    second[-1] = 1
    folder = write_pieces(tmp_path / "d", {"w": (first, [((0,), (size,))])})
    split_by_rank(folder)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    text = (folder / "__0.metadata").read_bytes()
    (folder / "__1.metadata").write_bytes(text.replace(b"__0_0.distcp", b"__1_0.distcp"))
    assert not inspect(folder).findings
    other = write_pieces(tmp_path / "other", {"w": (second, [((0,), (size,))])})
    shutil.copy(other / "__0_0.distcp", folder / "__1_0.distcp")
    (finding,) = inspect(folder).findings
    assert (finding.code, finding.evidence) == (
        "dcp-objects-differ",
        ("1 pieces of tensors: w in __0_0.distcp and __1_0.distcp",),
    )


def test_a_tensor_that_is_an_object_for_another_rank_is_a_problem(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(2)}, tmp_path / "d")
    (folder / ".metadata").rename(folder / "__0.metadata")
    other = save({"w": 1}, tmp_path / "other")
    text = (other / ".metadata").read_bytes().replace(b"__0_0.distcp", b"__1_0.distcp")
    (folder / "__1.metadata").write_bytes(text)
    (other / "__0_0.distcp").rename(folder / "__1_0.distcp")
    for first, second in (("a tensor", "an object"), ("an object", "a tensor")):
        words = f"w: {first} in __0.metadata, {second} in __1.metadata"
        assert words in str(inspect(folder).findings)
        with pytest.raises(BrokenFileError):
            load(folder)
        for old, new in (("__0", "other"), ("__1", "__0"), ("other", "__1")):
            (folder / f"{old}.metadata").rename(folder / f"{new}.metadata")


def test_a_file_of_another_save_is_named_and_not_used(tmp_path: Path) -> None:
    halves = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    tensor = torch.arange(24.0).view(6, 4)
    for number, other in enumerate((tensor.double(), torch.ones(400, 40))):
        folder = write_pieces(tmp_path / str(number), {"w": (tensor, halves), "v": (tensor, [((0, 0), (6, 4))])})
        boxes = [((0, 0), (3, other.shape[1])), ((3, 0), (3, other.shape[1]))]
        shutil.copy(write_pieces(tmp_path / f"other{number}", {"w": (other, boxes)}) / "__1_0.distcp", folder)
        evidence = {finding.code: finding.evidence for finding in inspect(folder).findings}
        assert evidence.keys() == {"dcp-piece-mismatch", "dcp-piece-missing"}, number
        assert evidence["dcp-piece-mismatch"] == (
            "__1_0.distcp: it is of another save: w is not where .metadata says",
        ), number
        assert evidence["dcp-piece-missing"] == ("w: 1 of 2 pieces were found; missing: [3:6] of [6, 4]",)
        with pytest.raises(BrokenFileError, match="it is of another save"):
            load(folder)
        rescue(folder, tmp_path / f"{number}.pt")
        assert torch.equal(load(tmp_path / f"{number}.pt")["v"], tensor)


def test_two_runs_in_one_folder_are_a_problem_of_the_tensor(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "d", {"w": (torch.ones(4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])})
    split_by_rank(folder)
    other = write_pieces(tmp_path / "other", {"w": (torch.ones(4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))])})
    split_by_rank(other)
    (other / "__1.metadata").replace(folder / "__1.metadata")
    found = {finding.code: finding.evidence[0] for finding in inspect(folder).findings}
    expected = "w: float32 [4, 3] in __1.metadata, float32 [4, 2] in that of another rank"
    assert found["dcp-piece-mismatch"] == expected
    assert found["dcp-piece-missing"] == "w: 1 of 1 pieces were found; missing: [2:4] of [4, 2]"


def test_findings_name_the_rows_that_are_missing_or_twice_there(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    halves = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    other = torch.ones(3)
    cases: list[tuple[list[Any], list[str], str]] = [
        (halves, ["__1_0.distcp"], "dcp-piece-missing: w: 1 of 2 pieces were found; missing: [3:6] of [6, 4]"),
        (halves[:1], [], "dcp-piece-missing: w: 1 of 1 pieces were found; missing: [3:6] of [6, 4]"),
        (
            [((0, 0), (6, 1)), ((0, 1), (6, 3))],
            ["__1_0.distcp"],
            "missing: [:, 1:4] of [6, 4]",
        ),
        ([((0, 0), (4, 4)), ((2, 0), (4, 4))], [], "dcp-pieces-overlap: w: [2:6] of [6, 4] overlaps"),
        ([((0, 0), (4, 4)), ((2, 0), (2, 4))], [], "dcp-pieces-overlap"),
    ]
    for number, (boxes, lost, words) in enumerate(cases):
        folder = write_pieces(tmp_path / str(number), {"w": (tensor, boxes), "other": (other, [((0,), (3,))])})
        for name in lost:
            (folder / name).unlink()
        texts = [f"{finding.code}: {'; '.join(finding.evidence)}" for finding in inspect(folder).findings]
        assert any(words in text for text in texts), (number, texts)
        with pytest.raises(BrokenFileError):
            load(folder)
        with open_(folder) as handle:
            assert torch.equal(handle["other"], other)
            with pytest.raises(BrokenFileError, match="w are incomplete"):
                handle["w"]


def test_items_of_zstd_are_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"w": torch.arange(600.0).view(20, 30), "n": {"pair": (torch.ones(2), 5)}, "t": torch.ones(2, 3).t()}
    folder = save(value, tmp_path / "d")
    expected = load(folder)
    data = (folder / "__0_0.distcp").read_bytes()
    packed = bytearray()

    def compress(index: Any) -> None:
        for info in index.storage_data.values():
            item = b"\x28\xb5\x2f\xfd" + zlib.compress(data[info.offset : info.offset + info.length])
            info.offset, info.length = len(packed), len(item)
            info.transform_descriptors = ["stream.zstd/1"]
            packed.extend(item)

    rewritten(folder, compress)
    (folder / "__0_0.distcp").write_bytes(packed)
    for name in ("compression.zstd", "backports.zstd", "zstandard", "pyzstd"):
        monkeypatch.setitem(sys.modules, name, None)
    (finding,) = inspect(folder).findings
    assert (finding.code, inspect(folder).integrity) == ("dcp-transformed", "unchecked")
    assert (
        finding.evidence
        == ("__0_0.distcp: no module that decompresses zstd is installed: 4 entries: n.pair, w, t and 1 more",)
        or "no module that decompresses zstd is installed" in finding.evidence[0]
    )
    with pytest.raises(LoadError, match="no module that decompresses zstd"):
        load(folder)
    module = types.ModuleType("pyzstd")
    module.ZstdDecompressor = ZstdStandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyzstd", module)
    assert (inspect(folder).findings, inspect(folder).safety) == ((), "data-only")
    assert_same(load(folder), expected)
    with open_(folder) as handle:
        assert torch.equal(handle.slice("w")[3:5], value["w"][3:5])
        assert handle["n.pair/0"].tolist() == [1, 1]
    convert(folder, tmp_path / "out.pt")
    assert same_values(torch.load(tmp_path / "out.pt"), expected)

    def name_another(index: Any) -> None:
        for info in index.storage_data.values():
            info.transform_descriptors = ["x.y/2"]

    rewritten(folder, name_another)
    (finding,) = inspect(folder).findings
    assert (finding.code, "x.y/2, which transload does not know" in finding.evidence[0]) == (
        "dcp-transformed",
        True,
    )


# -- other writers


@each("folder", ["torch-2.1.2", "torch-2.15.0"])
def test_directory_of_another_release(folder: str, data: Path) -> None:
    """Written by two ranks: tests/data/dcp/recipe.py. Releases before 2.4 save ``param_groups`` as one object."""
    checkpoint = inspect(data / "dcp" / folder)
    assert (checkpoint.safety, checkpoint.integrity, checkpoint.findings) == ("data-only", "unchecked", ())
    loaded = load(data / "dcp" / folder)
    assert same_values(
        loaded,
        {
            "model": {
                "rows": torch.arange(15.0).view(5, 3),
                "columns": torch.arange(8).view(2, 4),
                "scalar": torch.tensor(2.5),
            },
            "optim": {"state": {"0": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "epoch": 7,
        },
    )


def test_metadata_class_of_megatron(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "dcp" / "torch-2.15.0", tmp_path / "d")
    index = tmp_path / "d" / ".metadata"
    # MCoreMetadata is a subclass in a module of Megatron, and has one attribute more.
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata"
    other = b"megatron.core.dist_checkpointing.strategies.torch"
    raw = pickletools.optimize(index.read_bytes())
    old = b"\x8c" + bytes([len(module)]) + module
    at = raw.index(old)
    protocol = raw[:2]
    body = raw[at:]
    new = b"\x8c" + bytes([len(other)]) + other
    body = body.replace(old, new, 1).replace(b"\x8c\x08" + name, b"\x8c\x0dMCoreMetadata", 1)
    index.write_bytes(protocol + body)
    assert "MCoreMetadata" in str([use.full_name for use in inspect(tmp_path / "d").globals])
    assert load(tmp_path / "d")["model"]["rows"].shape == (5, 3)


def write_shard(path: Path, tensors: dict[str, tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """A file of ``HuggingFaceStorageWriter``: pieces of tensors, and where they begin."""
    header: dict[str, Any] = {}
    body = b""
    for name, (tensor, _) in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    starts = {name: {"saved_offsets": list(start)} for name, (_, start) in tensors.items()}
    header["__metadata__"] = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts), "format": "pt"}
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_pieces_of_safetensors_files_that_overlap_are_found_without_reading_them(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"w": (torch.zeros(3, 2), (0, 0))})
    write_shard(tmp_path / "shard-00002-model-00001-of-00001.safetensors", {"w": (torch.ones(3, 2), (2, 0))})
    evidence = {finding.code: finding.evidence[0] for finding in inspect(tmp_path).findings}
    assert evidence["dcp-pieces-overlap"].startswith("w: [2:5] of [5, 2] overlaps other pieces")
    with pytest.raises(BrokenFileError, match="overlap"):
        load(tmp_path)


@each("below", ["", "sharded"])
def test_safetensors_files_of_ranks_are_put_together(below: str, tmp_path: Path) -> None:
    whole, other = torch.arange(21.0).view(7, 3), torch.ones(2)
    folder = tmp_path / below
    write_shard(folder / "shard-00001-model-00001-of-00001.safetensors", {"w": (whole[:4], (0, 0)), "v": (other, (0,))})
    write_shard(folder / "shard-00002-model-00001-of-00001.safetensors", {"w": (whole[4:], (4, 0))})
    checkpoint = inspect(tmp_path)
    assert [(tensor.name, tensor.shape) for tensor in checkpoint.tensors] == [("w", (7, 3)), ("v", (2,))]
    assert [finding.code for finding in checkpoint.findings] == ["dcp-shape-inferred"]
    with pytest.warns(FileWarning, match="inferred"):  # a file of a last rank may be missing
        assert same_values(load(tmp_path), {"w": whole, "v": other})
    with open_(tmp_path) as handle:
        assert torch.equal(handle.slice("w")[3:6], whole[3:6])
    written = convert(tmp_path, tmp_path.with_suffix(".safetensors"))
    assert any("too small" in note for note in written.notes)
    assert same_values(load(tmp_path.with_suffix(".safetensors")), {"w": whole, "v": other})
    (finding,) = inspect(folder / "shard-00002-model-00001-of-00001.safetensors").findings
    assert (finding.code, '"saved_offsets": [4, 0]' in finding.evidence[0]) == ("rank-file", True)


def test_missing_safetensors_file_of_a_rank_is_named(tmp_path: Path) -> None:
    whole = torch.arange(21.0).view(7, 3)
    for number, (start, end) in {1: (0, 2), 3: (4, 7)}.items():
        path = tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors"
        write_shard(path, {"w": (whole[start:end], (start, 0))})
    evidence = {finding.code: finding.evidence[0] for finding in inspect(tmp_path).findings}
    assert evidence["rank-missing"] == "1 ranks: shard-00002"
    assert evidence["dcp-piece-missing"] == "w: 2 pieces found; missing: [2:4] of [7, 3]"
    with pytest.raises(BrokenFileError):
        load(tmp_path)


def test_safetensors_files_of_several_runs_are_not_mixed(tmp_path: Path) -> None:
    ones, zeros = torch.ones(2, 2), torch.zeros(3, 2)
    for number, (other, start, code) in enumerate(
        [
            (torch.zeros(2), (2,), "dcp-piece-mismatch"),  # of another number of dimensions
            (zeros, (0, 0), "dcp-piece-mismatch"),  # at the same place, but larger
            (None, (2, 0), "dcp-piece-missing"),  # only the second piece is there
        ]
    ):
        folder = tmp_path / str(number)
        first = (ones, (0, 0)) if other is not None else (zeros, start)
        write_shard(folder / "shard-00001-model-00001-of-00001.safetensors", {"w": first})
        if other is not None:
            write_shard(folder / "shard-00002-model-00001-of-00001.safetensors", {"w": (other, start)})
        assert code in [finding.code for finding in inspect(folder).findings]
        with open_(folder) as handle, pytest.raises(BrokenFileError, match=r"no file has (any of it|\[.*\] of)"):
            handle["w"]


def test_folders_of_accelerate_are_one_object(tmp_path: Path) -> None:
    model, optimizer = (
        {"model": {"w": torch.ones(3)}},
        {"optimizer": {"state": {"w": {"step": torch.ones(())}}, "n": 1}},
    )
    save(model, tmp_path / "pytorch_model_fsdp_0")
    save(optimizer, tmp_path / "optimizer_0")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    checkpoint = inspect(tmp_path)
    assert (checkpoint.format, checkpoint.flavour) == ("dcp", "accelerate")
    assert [finding.code for finding in checkpoint.findings] == ["directory-others"]
    assert same_values(load(tmp_path), {**optimizer, **model})
    save({"model": {"w": torch.zeros(3)}}, tmp_path / "pytorch_model_fsdp_1")
    loaded = load(tmp_path)
    assert sorted(loaded) == ["optimizer", "pytorch_model_fsdp_0", "pytorch_model_fsdp_1"]
    assert loaded["pytorch_model_fsdp_1"]["model"]["w"].tolist() == [0, 0, 0]


def test_a_folder_of_accelerate_without_its_index_is_one_whose_save_did_not_finish(tmp_path: Path) -> None:
    folder = save({"model": {"w": torch.ones(3)}}, tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0")
    assert "Name one of these: checkpoint-5." in str(inspect(tmp_path).findings)
    (folder / ".metadata").unlink()
    (finding,) = inspect(tmp_path / "checkpoint-5").findings
    assert (finding.code, finding.evidence[0].partition(":")[0]) == (
        "dcp-metadata-missing",
        "pytorch_model_fsdp_0/.metadata",
    )


# -- hostile indexes


def test_hostile_indexes_are_findings(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import metadata as meta

    folder = save({"w": torch.ones(4, 2), "n": 1}, tmp_path / "d")
    good = (folder / ".metadata").read_bytes()

    def huge(index: Any) -> None:
        index.state_dict_metadata["w"].size = torch.Size((1 << 60, 1 << 60))

    def negative(index: Any) -> None:
        for info in index.storage_data.values():
            info.offset = -1

    def far(index: Any) -> None:
        for info in index.storage_data.values():
            info.offset = 1 << 62

    def strange(index: Any) -> None:
        index.state_dict_metadata["w"].chunks = [meta.ChunkStorageMetadata(torch.Size((0,)), torch.Size((4, 2, 2)))]

    def cyclic(index: Any) -> None:
        index.planner_data = {}
        index.planner_data["w"] = index.planner_data
        index.state_dict_metadata["w"].chunks.append(index.state_dict_metadata["w"].chunks)

    def deep(index: Any) -> None:
        path: Any = ("w",)
        for _ in range(50):
            path = (path,)
        index.planner_data = {"w": path}

    for change in (huge, negative, far, strange, cyclic):
        (folder / ".metadata").write_bytes(good)
        rewritten(folder, change)
        checkpoint = inspect(folder)
        if change is not cyclic:
            assert checkpoint.integrity == "damaged", change
            with pytest.raises(BrokenFileError):
                load(folder)
    (folder / ".metadata").write_bytes(good)
    rewritten(folder, deep)
    assert load(folder)["w"].shape == (4, 2)
