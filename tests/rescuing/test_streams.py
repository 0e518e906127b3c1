"""Files without checksums: what is in them twice is repaired, and what is cut off is lost."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
from tests.rescuing.makers import ROOT, STREAMS, flipped, hashes, ident, index_end, there

from transload import UsageError, inspect, rescue
from transload.errors import TransloadError

LEGACY = (ROOT / "h200" / "state_dict_cuda0_legacy.pth").read_bytes()


def table(tensors: dict[str, tuple[str, list[int], bytes]], **more: object) -> bytes:
    """A safetensors file."""
    header: dict[str, object] = {**more}
    content = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + content


SAFE = table(
    {f"w{n}": ("F32", [5, 3], random.Random(n).randbytes(60)) for n in range(9)},  # noqa: S311 - no secret
    __metadata__={"format": "pt"},
)


def test_cut_streams(tmp_path: Path) -> None:
    for path in STREAMS:
        data = path.read_bytes()
        checkpoint, right = inspect(data), hashes(data)
        rng = random.Random(path.name)  # noqa: S311 - no secret
        for cut in sorted(rng.randrange(index_end(checkpoint), len(data)) for _ in range(4)):
            case, want = f"{ident(path)} cut at {cut}", there(checkpoint, cut)
            made = rescue(data[:cut], tmp_path / "out.pt", overwrite=True)
            assert sorted(each.name for each in made.tensors if each.state != "lost") == want, case
            if made.how == "nothing":
                assert not any(checkpoint.tensor(name).nbytes for name in want), case
                continue
            out = (tmp_path / "out.pt").read_bytes()
            assert (made.exit_code, inspect(out).integrity in ("whole", "unchecked")) == (1, True), case
            assert hashes(out) == {name: right[name] for name in want if name in right}, case


def test_a_stream_cut_in_its_pickles(tmp_path: Path) -> None:
    for cut in range(1, index_end(inspect(LEGACY)), 37):
        try:
            made = rescue(LEGACY[:cut], tmp_path / "out.pt")
        except TransloadError:
            continue
        assert made.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_flipped_bits_of_what_is_there_twice(tmp_path: Path) -> None:
    """The opening is always the same; the counts are also in the object."""
    counts = [s.offset - 8 + byte for s in inspect(LEGACY).storages if s.offset for byte in range(8)]
    for number, position in enumerate((*range(21), *counts)):
        out = tmp_path / f"{number}.pt"
        made = rescue(flipped(LEGACY, position, number % 8), out)
        assert out.read_bytes() == LEGACY, position
        assert [(mend.position, mend.bits) for mend in made.mends] == [(position, (number % 8,))]


def test_a_stream_with_something_around_it(tmp_path: Path) -> None:
    assert rescue(b"junk!" + LEGACY + LEGACY, tmp_path / "two.pt").exit_code == 0
    assert (tmp_path / "two.pt").read_bytes() == LEGACY


def test_bytes_after_the_end_may_have_been_inserted_before(tmp_path: Path) -> None:
    """Nothing tells: the file is cut to its size, with a warning."""
    for data, name in ((LEGACY, "out.pt"), (SAFE, "out.safetensors")):
        made = rescue(data + b"junk", tmp_path / name)
        assert (made.exit_code, "longer" in made.warnings[0]) == (1, True)
        assert (tmp_path / name).read_bytes() == data


def test_a_filled_stream_keeps_its_format(tmp_path: Path) -> None:
    cut = len(LEGACY) - 100
    made = rescue(LEGACY[:cut], tmp_path / "out.pt", fill="nan")
    out = (tmp_path / "out.pt").read_bytes()
    assert (made.how, made.exit_code) == ("filled", 1)
    assert len(out) == len(LEGACY)
    assert out[:cut][: -len(out) % 8 - 4 or None]
    assert inspect(out).format == "torch-legacy"


def test_cut_safetensors(tmp_path: Path) -> None:
    start = 8 + struct.unpack("<Q", SAFE[:8])[0]
    for cut in range(start, len(SAFE), 23):
        want = there(inspect(SAFE), cut)
        made = rescue(SAFE[:cut], tmp_path / "out.safetensors", overwrite=True)
        assert sorted(each.name for each in made.tensors if each.state != "lost") == want
        assert made.exit_code == (1 if want else 2)
        if want:
            out = (tmp_path / "out.safetensors").read_bytes()
            assert hashes(out) == {name: hashes(SAFE)[name] for name in want}
            assert inspect(out).facts[1:] == inspect(SAFE).facts[1:]
            assert inspect(out).integrity in ("whole", "unchecked")


def test_safetensors_in_a_library(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    rescue(SAFE[:-70], tmp_path / "out.safetensors")
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    assert sorted(loaded) == [f"w{n}" for n in range(7)]


def test_filled_safetensors(tmp_path: Path) -> None:
    rescue(SAFE[:-70], tmp_path / "out.safetensors", fill="zeros")
    assert (tmp_path / "out.safetensors").read_bytes() == SAFE[:-72] + bytes(72)


@pytest.mark.parametrize("entry", ['["F32",[1],[0,4]]', '{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}'])
def test_odd_entries_that_the_reference_accepts(entry: str, tmp_path: Path) -> None:
    header = f'{{"a":{entry},"b":["F32",[1],[4,8]]}}'.encode()
    made = rescue(struct.pack("<Q", len(header)) + header + b"whole!", tmp_path / "out.safetensors")
    assert [(each.name, each.state) for each in made.tensors] == [("a", "whole"), ("b", "lost")]
    out = (tmp_path / "out.safetensors").read_bytes()
    assert (inspect(out).tensor("a").shape, out[-4:]) == ((1,), b"whol")


def test_a_tensor_whose_size_does_not_match_its_shape_is_lost(tmp_path: Path) -> None:
    data = table({"a": ("F32", [1], b"good"), "b": ("F32", [2], b"four")})
    made = rescue(data, tmp_path / "out.safetensors")
    assert [(each.name, each.state) for each in made.tensors] == [("a", "whole"), ("b", "lost")]
    assert (made.how, made.exit_code, made.lost[0].why) == ("left-out", 1, "the file does not say where its bytes are")
    assert [tensor.name for tensor in inspect(tmp_path / "out.safetensors").tensors] == ["a"]
    made = rescue(data, tmp_path / "out.safetensors", fill="zeros", overwrite=True)
    assert made.exit_code == 1
    assert made.warnings[0] == "b: still broken in the new file, since there is nothing to fill"


def test_safetensors_with_something_around_it(tmp_path: Path) -> None:
    assert rescue(b"JUNK" * 5 + SAFE, tmp_path / "out.safetensors").exit_code == 0
    assert (tmp_path / "out.safetensors").read_bytes() == SAFE


def test_the_length_of_the_table(tmp_path: Path) -> None:
    for bit in range(24):
        made = rescue(flipped(SAFE, bit // 8, bit % 8), tmp_path / "out.safetensors", overwrite=True)
        assert made.exit_code == 0, bit
        assert (tmp_path / "out.safetensors").read_bytes() == SAFE, bit


def test_a_file_keeps_its_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torch-legacy"):
        rescue(LEGACY, tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match="safetensors"):
        rescue(SAFE, tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []
