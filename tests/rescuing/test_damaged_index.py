"""Destroyed bytes in ``data.pkl`` lose the entries they are in, not every tensor."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tests.forge import FUZZ
from tests.makers import saved
from tests.rescuing.makers import hashes

from transload import inspect, rescue
from transload.rescuing.bitflips import destroyed_bytes
from transload.rescuing.damaged_index import read_damaged_index

GENERATOR = torch.Generator().manual_seed(0)
STATE = {
    f"layer{number}.{name}": torch.randn(shape, generator=GENERATOR)
    for number in range(6)
    for name, shape in {"weight": (4, 3), "bias": (4,)}.items()
}
FLAT = saved({**STATE, "steps": torch.arange(3)})
NESTED = saved(
    {
        "model": OrderedDict(STATE),
        "optimizer": {"state": {n: {"exp_avg": torch.randn(4, generator=GENERATOR)} for n in range(4)}},
        "epoch": 3,
    }
)


def index_range(data: bytes) -> range:
    """The byte range of the index."""
    record = next(record for record in inspect(data).records if record.name == "data.pkl")
    return range(record.offset or 0, (record.offset or 0) + record.size)


def without_checksums(data: bytes) -> bytes:
    out = bytearray(data)
    for signature, at in ((b"PK\x07\x08", 4), (b"PK\x01\x02", 16)):
        header = out.find(signature)
        while header >= 0:
            out[header + at : header + at + 4] = bytes(4)
            header = out.find(signature, header + 1)
    return bytes(out)


def overwritten(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def position_of(data: bytes, name: str) -> int:
    return data.index(name.encode(), index_range(data).start)


def test_destroyed_byte_in_the_index_is_repaired(tmp_path: Path) -> None:
    """A byte with many flipped bits: only one repair explains the checksum and gives a pickle."""
    index = index_range(NESTED)
    for number, at in enumerate(index[:: max(1, 67 // FUZZ)]):
        out = tmp_path / f"{number}.pt"
        result = rescue(overwritten(NESTED, at, bytes([NESTED[at] ^ 0xE7])), out)
        assert (result.exit_code, result.how) == (0, "exact"), at
        assert [(repair.position, repair.new, repair.certainty) for repair in result.repairs] == [
            (at, NESTED[at], "proven")
        ]
        assert out.read_bytes() == NESTED, at


def test_destroyed_bytes_locates_a_byte_by_checksum() -> None:
    from zlib import crc32

    rng = random.Random(3)  # noqa: S311 - not for cryptography
    data = rng.randbytes(5000)
    for at in (0, 1, 2500, 4999):
        broken = overwritten(data, at, bytes([data[at] ^ 0x5A]))
        assert destroyed_bytes(crc32(data) ^ crc32(broken), len(data)) == [(at, 0x5A)]


def test_storage_of_a_destroyed_entry_becomes_a_flat_tensor(tmp_path: Path) -> None:
    """The dtype comes from the persistent id; all other tensors keep their names and shapes."""
    out = tmp_path / "out.pt"
    result = rescue(overwritten(FLAT, position_of(FLAT, "layer3.weight") - 6, b"\xff" * 12), out)
    assert (result.exit_code, result.how) == (1, "left-out"), str(result)
    before, after = hashes(FLAT), hashes(out.read_bytes())
    assert {name: value for name, value in before.items() if name != "layer3.weight"}.items() <= after.items()
    loaded = torch.load(out)
    assert torch.equal(loaded["storage-6"], STATE["layer3.weight"].flatten())
    assert after.keys() - before.keys() == {"storage-6"}
    assert "data.pkl" in [record.name for record in result.records]
    assert any("12 tensors could be read" in note for note in result.notes)
    assert any("storage-6" in note for note in result.notes)


def test_storage_with_a_destroyed_persistent_id_becomes_bytes(tmp_path: Path) -> None:
    """The name is known, so it is reported as lost; the dtype is unknown, so the storage becomes bytes."""
    out = tmp_path / "out.pt"
    result = rescue(overwritten(FLAT, position_of(FLAT, "layer3.weight") + 20, b"\xff" * 16), out)
    assert result.exit_code == 1
    assert "layer3.weight" in [record.name for record in result.records]
    raw = torch.load(out)["storage-6"]
    assert raw.dtype == torch.uint8
    assert torch.equal(raw.view(torch.float32), STATE["layer3.weight"].flatten())


def test_destroyed_entry_in_a_nested_dict_leaves_the_rest_in_place(tmp_path: Path) -> None:
    """Other values, and entries after the damage, keep their places."""
    out = tmp_path / "out.pt"
    result = rescue(overwritten(NESTED, position_of(NESTED, "layer2.bias") - 6, b"\xff" * 12), out)
    assert result.exit_code == 1
    loaded = torch.load(out)
    assert loaded["epoch"] == 3
    assert list(loaded["model"]) == [name for name in STATE if name != "layer2.bias"]
    assert [*loaded["optimizer"]["state"]] == [0, 1, 2, 3]
    assert torch.equal(loaded["storage-5"], STATE["layer2.bias"])


def test_top_level_list_is_kept_under_a_key(tmp_path: Path) -> None:
    """It is stored as ``object`` in a dict, beside the storages without names."""
    data = saved([{"w": torch.ones(3), "b": torch.zeros(2)}, {"w": torch.ones(4), "b": torch.zeros(5)}])
    second = position_of(data, "b") + data[position_of(data, "b") :].index(b"K\x05")
    for at, length, names in ((second - 20, 12, ["w"]), (index_range(data).stop - 3, 3, ["w", "b"])):
        rescue(overwritten(data, at, b"\xff" * length), tmp_path / "out.pt", overwrite=True)
        first, last = torch.load(tmp_path / "out.pt")["object"]
        assert (list(first), list(last)) == (["w", "b"], names)


def test_without_an_index_every_storage_becomes_bytes(tmp_path: Path) -> None:
    index = index_range(FLAT)
    result = rescue(overwritten(FLAT, index.start, bytes(len(index))), tmp_path / "out.pt")
    assert result.exit_code == 1
    loaded = torch.load(tmp_path / "out.pt")
    assert sorted(loaded) == sorted(f"storage-{number}" for number in range(13))
    assert torch.equal(loaded["storage-1"].view(torch.float32), STATE["layer0.bias"])


def test_damaged_storage_is_lost_beside_a_damaged_index(tmp_path: Path) -> None:
    storage = next(storage for storage in inspect(FLAT).storages if storage.key == "4")
    broken = overwritten(FLAT, storage.offset or 0, b"\xa5" * 9)
    result = rescue(overwritten(broken, position_of(FLAT, "layer3.weight") - 6, b"\xff" * 12), tmp_path / "out.pt")
    assert [tensor.name for tensor in result.lost] == list(storage.tensors)
    kept = hashes((tmp_path / "out.pt").read_bytes())
    assert len(kept) == 12
    assert {name: kept[name] for name in kept if name in STATE}.items() <= hashes(FLAT).items()


@pytest.mark.parametrize("data", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize("length", [1, 16])
def test_most_tensors_keep_their_names_without_checksums(data: bytes, length: int) -> None:
    """Wherever the index is destroyed, the rescue succeeds, and on average most tensors are found by name."""
    rng = random.Random(length)  # noqa: S311 - not for cryptography
    data = without_checksums(data)
    originals = {(tensor.name, tensor.dtype, tensor.shape) for tensor in inspect(data).tensors}
    index = index_range(data)
    shares: list[float] = []
    for at in range(index.start, index.stop - length, max(1, 67 // FUZZ)):
        result = rescue(overwritten(data, at, rng.randbytes(length)), dry_run=True)
        assert result.exit_code < 2, at
        names = {outcome.name for outcome in result.whole}
        shares.append(sum(name in names for name, _, _ in originals) / len(originals))
    assert sum(shares) / len(shares) > (0.8 if length == 1 else 0.7)


def test_read_damaged_index_never_raises() -> None:
    rng = random.Random(9)  # noqa: S311 - not for cryptography
    index = index_range(NESTED)
    original = NESTED[index.start : index.stop]
    for _ in range(200):
        data = bytearray(original)
        for at in rng.sample(range(len(data)), rng.randrange(1, 200)):
            data[at] = rng.randrange(256)
        read_damaged_index(bytes(data))
        read_damaged_index(bytes(data[rng.randrange(len(data)) :]))
    assert read_damaged_index(b"")[2] == []
