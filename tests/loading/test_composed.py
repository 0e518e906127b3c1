"""Checkpoints of several files that form one object: ``load`` gives what ``dcp_to_torch_save`` makes of them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import each
from tests.loading.equal import assert_same
from tests.release import RELEASE

from transload.errors import BrokenFileError, UnsafeError
from transload.loading import load
from transload.loading.handles import open as open_
from transload.opening import inspect

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
    "empty tensors": {"a": torch.zeros(0), "b": torch.zeros(2, 0), "c": torch.zeros(0, dtype=torch.int32)},
    "only values": {"a": 1, "b": {"c": [1, 2]}},
    "nothing": {},
}


@each("name", OBJECTS)
def test_load_gives_what_torch_converts_it_to(name: str, tmp_path: Path) -> None:
    folder = save(OBJECTS[name], tmp_path / "d")
    assert_same(load(folder), converted(folder))


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


def write_pieces(
    folder: Path, tensors: dict[str, tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]]
) -> Path:
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
