"""Destroyed bytes in ``data.pkl``: they cost the entries they are in, not every tensor."""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tests.forge import FUZZ
from tests.rescuing.makers import hashes

from transload import inspect, rescue
from transload.rescuing.bitflips import destroyed_bytes
from transload.rescuing.damaged_index import read_damaged_index


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


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


def place(data: bytes) -> range:
    """Where the index is."""
    record = next(record for record in inspect(data).records if record.name == "data.pkl")
    return range(record.offset or 0, (record.offset or 0) + record.size)


def without_checksums(data: bytes) -> bytes:
    out = bytearray(data)
    for sign, at in ((b"PK\x07\x08", 4), (b"PK\x01\x02", 16)):
        found = out.find(sign)
        while found >= 0:
            out[found + at : found + at + 4] = bytes(4)
            found = out.find(sign, found + 1)
    return bytes(out)


def destroyed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def entry(data: bytes, name: str) -> int:
    return data.index(name.encode(), place(data).start)


def test_a_destroyed_byte_is_repaired_by_its_checksum(tmp_path: Path) -> None:
    """A byte with many flipped bits: one byte explains the checksum and gives a pickle."""
    index = place(NESTED)
    for number, at in enumerate(index[:: max(1, 67 // FUZZ)]):
        out = tmp_path / f"{number}.pt"
        made = rescue(destroyed(NESTED, at, bytes([NESTED[at] ^ 0xE7])), out)
        assert (made.exit_code, made.how) == (0, "exact"), at
        assert [(repair.position, repair.new, repair.certainty) for repair in made.mends] == [
            (at, NESTED[at], "proven")
        ]
        assert out.read_bytes() == NESTED, at


def test_a_destroyed_byte_by_its_checksum_alone() -> None:
    from zlib import crc32

    rng = random.Random(3)  # noqa: S311 - no secret
    data = rng.randbytes(5000)
    for at in (0, 1, 2500, 4999):
        broken = destroyed(data, at, bytes([data[at] ^ 0x5A]))
        assert destroyed_bytes(crc32(data) ^ crc32(broken), len(data)) == [(at, 0x5A)]


def test_a_destroyed_entry(tmp_path: Path) -> None:
    """Its storage becomes a flat tensor, with the dtype of its persistent id; all others keep names and shapes."""
    out = tmp_path / "out.pt"
    made = rescue(destroyed(FLAT, entry(FLAT, "layer3.weight") - 6, b"\xff" * 12), out)
    assert (made.exit_code, made.how) == (1, "left-out"), str(made)
    before, after = hashes(FLAT), hashes(out.read_bytes())
    assert {name: value for name, value in before.items() if name != "layer3.weight"}.items() <= after.items()
    loaded = torch.load(out)
    assert torch.equal(loaded["storage-6"], STATE["layer3.weight"].flatten())
    assert after.keys() - before.keys() == {"storage-6"}
    assert "data.pkl" in [record.name for record in made.records]
    assert any("12 tensors could be read" in note for note in made.notes)
    assert any("storage-6" in note for note in made.notes)


def test_a_destroyed_id(tmp_path: Path) -> None:
    """The name is known and lost; the dtype of the storage is not known, so it is bytes."""
    out = tmp_path / "out.pt"
    made = rescue(destroyed(FLAT, entry(FLAT, "layer3.weight") + 20, b"\xff" * 16), out)
    assert made.exit_code == 1
    assert "layer3.weight" in [record.name for record in made.records]
    raw = torch.load(out)["storage-6"]
    assert raw.dtype == torch.uint8
    assert torch.equal(raw.view(torch.float32), STATE["layer3.weight"].flatten())


def test_names_lead_through_dictionaries(tmp_path: Path) -> None:
    """What is not a tensor, and what is behind the damage, keeps its place."""
    out = tmp_path / "out.pt"
    made = rescue(destroyed(NESTED, entry(NESTED, "layer2.bias") - 6, b"\xff" * 12), out)
    assert made.exit_code == 1
    loaded = torch.load(out)
    assert loaded["epoch"] == 3
    assert list(loaded["model"]) == [name for name in STATE if name != "layer2.bias"]
    assert [*loaded["optimizer"]["state"]] == [0, 1, 2, 3]
    assert torch.equal(loaded["storage-5"], STATE["layer2.bias"])


def test_a_list_of_dictionaries(tmp_path: Path) -> None:
    """It is put into a dictionary, beside the storages without names."""
    data = saved([{"w": torch.ones(3), "b": torch.zeros(2)}, {"w": torch.ones(4), "b": torch.zeros(5)}])
    second = entry(data, "b") + data[entry(data, "b") :].index(b"K\x05")
    for at, length, names in ((second - 20, 12, ["w"]), (place(data).stop - 3, 3, ["w", "b"])):
        rescue(destroyed(data, at, b"\xff" * length), tmp_path / "out.pt", overwrite=True)
        first, last = torch.load(tmp_path / "out.pt")["object"]
        assert (list(first), list(last)) == (["w", "b"], names)


def test_no_index_at_all(tmp_path: Path) -> None:
    index = place(FLAT)
    made = rescue(destroyed(FLAT, index.start, bytes(len(index))), tmp_path / "out.pt")
    assert made.exit_code == 1
    loaded = torch.load(tmp_path / "out.pt")
    assert sorted(loaded) == sorted(f"storage-{number}" for number in range(13))
    assert torch.equal(loaded["storage-1"].view(torch.float32), STATE["layer0.bias"])


def test_a_damaged_storage_beside_a_damaged_index(tmp_path: Path) -> None:
    storage = next(storage for storage in inspect(FLAT).storages if storage.key == "4")
    broken = destroyed(FLAT, storage.offset or 0, b"\xa5" * 9)
    made = rescue(destroyed(broken, entry(FLAT, "layer3.weight") - 6, b"\xff" * 12), tmp_path / "out.pt")
    assert [each.name for each in made.lost] == list(storage.tensors)
    kept = hashes((tmp_path / "out.pt").read_bytes())
    assert len(kept) == 12
    assert {name: kept[name] for name in kept if name in STATE}.items() <= hashes(FLAT).items()


@pytest.mark.parametrize("data", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize("length", [1, 16])
def test_destroyed_anywhere(data: bytes, length: int) -> None:
    """Without checksums: never an exception, never a tensor that is not whole, and most come back by their names."""
    rng = random.Random(length)  # noqa: S311 - no secret
    data = without_checksums(data)
    whole = {(tensor.name, tensor.dtype, tensor.shape) for tensor in inspect(data).tensors}
    index = place(data)
    shares: list[float] = []
    for at in range(index.start, index.stop - length, max(1, 67 // FUZZ)):
        made = rescue(destroyed(data, at, rng.randbytes(length)), dry_run=True)
        assert made.exit_code < 2, at
        names = {outcome.name for outcome in made.whole}
        shares.append(sum(name in names for name, _, _ in whole) / len(whole))
    assert sum(shares) / len(shares) > (0.8 if length == 1 else 0.7)


def test_nonsense() -> None:
    rng = random.Random(9)  # noqa: S311 - no secret
    index = place(NESTED)
    whole = NESTED[index.start : index.stop]
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.sample(range(len(data)), rng.randrange(1, 200)):
            data[at] = rng.randrange(256)
        read_damaged_index(bytes(data))
        read_damaged_index(bytes(data[rng.randrange(len(data)) :]))
    assert read_damaged_index(b"")[2] == []
