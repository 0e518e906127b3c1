"""Files without checksums: redundant fields are repaired, truncated tensors are lost."""

from __future__ import annotations

import io
import json
import random
import struct
from pathlib import Path

import pytest
from tests.rescuing.makers import ROOT, STREAMS, complete_before, flipped, hashes, ident, index_end

from transload import UsageError, inspect, rescue
from transload.errors import TransloadError

LEGACY = (ROOT / "h200" / "state_dict_cuda0_legacy.pth").read_bytes()


def safetensors_file(tensors: dict[str, tuple[str, list[int], bytes]], **header_fields: object) -> bytes:
    """A safetensors file."""
    header: dict[str, object] = {**header_fields}
    content = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + content


SAFETENSORS = safetensors_file(
    {f"w{n}": ("F32", [5, 3], random.Random(n).randbytes(60)) for n in range(9)},  # noqa: S311 - not for cryptography
    __metadata__={"format": "pt"},
)


def test_truncated_legacy_streams_yield_the_tensors_before_the_cut(tmp_path: Path) -> None:
    for path in STREAMS:
        data = path.read_bytes()
        checkpoint, original = inspect(data), hashes(data)
        rng = random.Random(path.name)  # noqa: S311 - not for cryptography
        for cut in sorted(rng.randrange(index_end(checkpoint), len(data)) for _ in range(4)):
            case, expected = f"{ident(path)} cut at {cut}", complete_before(checkpoint, cut)
            result = rescue(data[:cut], tmp_path / "out.pt", overwrite=True)
            assert sorted(tensor.name for tensor in result.tensors if tensor.state != "lost") == expected, case
            if result.how == "nothing":
                assert not any(checkpoint.tensor(name).nbytes for name in expected), case
                continue
            out = (tmp_path / "out.pt").read_bytes()
            assert (result.exit_code, inspect(out).integrity in ("whole", "unchecked")) == (1, True), case
            assert hashes(out) == {name: original[name] for name in expected if name in original}, case


def test_stream_cut_in_its_pickles_writes_nothing(tmp_path: Path) -> None:
    for cut in range(1, index_end(inspect(LEGACY)), 37):
        try:
            result = rescue(LEGACY[:cut], tmp_path / "out.pt")
        except TransloadError:
            continue
        assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_flipped_bits_in_redundant_fields_are_repaired(tmp_path: Path) -> None:
    """The first bytes are always the same; the counts are also in the object."""
    counts = [s.offset - 8 + byte for s in inspect(LEGACY).storages if s.offset for byte in range(8)]
    for number, position in enumerate((*range(21), *counts)):
        out = tmp_path / f"{number}.pt"
        result = rescue(flipped(LEGACY, position, number % 8), out)
        assert out.read_bytes() == LEGACY, position
        assert [(repair.position, repair.bits) for repair in result.repairs] == [(position, (number % 8,))]


def test_junk_before_a_stream_is_removed(tmp_path: Path) -> None:
    assert rescue(b"junk!" + LEGACY, tmp_path / "one.pt").exit_code == 0
    assert (tmp_path / "one.pt").read_bytes() == LEGACY


@pytest.mark.parametrize("junk", [b"", b"junk!"], ids=["", "after junk"])
def test_another_checkpoint_that_follows_counts_as_lost(junk: bytes, tmp_path: Path) -> None:
    two = junk + LEGACY + LEGACY
    result = rescue(two, tmp_path / "two.pt")
    assert (result.exit_code, result.how, len(result.records)) == (1, "left-out", 1)
    assert (tmp_path / "two.pt").read_bytes() == LEGACY
    position = len(junk) + len(LEGACY)
    assert f"begins at byte {position:,}" in result.records[0].why
    file = io.BytesIO(two)
    file.seek(position)
    assert inspect(file).tensors == inspect(LEGACY).tensors


def test_surplus_bytes_are_cut_off_with_a_warning(tmp_path: Path) -> None:
    """They may have been inserted earlier, and nothing shows where."""
    for data, name in ((LEGACY, "out.pt"), (SAFETENSORS, "out.safetensors")):
        result = rescue(data + b"junk", tmp_path / name)
        assert (result.exit_code, "longer" in result.warnings[0]) == (1, True)
        assert (tmp_path / name).read_bytes() == data


def test_filled_stream_keeps_its_format(tmp_path: Path) -> None:
    cut = len(LEGACY) - 100
    result = rescue(LEGACY[:cut], tmp_path / "out.pt", fill="nan")
    out = (tmp_path / "out.pt").read_bytes()
    assert (result.how, result.exit_code) == ("filled", 1)
    assert len(out) == len(LEGACY)
    assert out[:cut][: -len(out) % 8 - 4 or None]
    assert inspect(out).format == "torch-legacy"


def test_truncated_safetensors_yields_the_tensors_before_the_cut(tmp_path: Path) -> None:
    start = 8 + struct.unpack("<Q", SAFETENSORS[:8])[0]
    for cut in range(start, len(SAFETENSORS), 23):
        expected = complete_before(inspect(SAFETENSORS), cut)
        result = rescue(SAFETENSORS[:cut], tmp_path / "out.safetensors", overwrite=True)
        assert sorted(tensor.name for tensor in result.tensors if tensor.state != "lost") == expected
        assert result.exit_code == (1 if expected else 2)
        if expected:
            out = (tmp_path / "out.safetensors").read_bytes()
            assert hashes(out) == {name: hashes(SAFETENSORS)[name] for name in expected}
            assert inspect(out).facts[1:] == inspect(SAFETENSORS).facts[1:]
            assert inspect(out).integrity in ("whole", "unchecked")


def test_safetensors_library_loads_the_rescued_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    rescue(SAFETENSORS[:-70], tmp_path / "out.safetensors")
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    assert sorted(loaded) == [f"w{n}" for n in range(7)]


def test_fill_zeroes_lost_tensors_of_safetensors(tmp_path: Path) -> None:
    rescue(SAFETENSORS[:-70], tmp_path / "out.safetensors", fill="zeros")
    assert (tmp_path / "out.safetensors").read_bytes() == SAFETENSORS[:-72] + bytes(72)


@pytest.mark.parametrize("entry", ['["F32",[1],[0,4]]', '{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}'])
def test_unusual_entries_accepted_by_the_reference_reader_are_rescued(entry: str, tmp_path: Path) -> None:
    header = f'{{"a":{entry},"b":["F32",[1],[4,8]]}}'.encode()
    result = rescue(struct.pack("<Q", len(header)) + header + b"whole!", tmp_path / "out.safetensors")
    assert [(tensor.name, tensor.state) for tensor in result.tensors] == [("a", "whole"), ("b", "lost")]
    out = (tmp_path / "out.safetensors").read_bytes()
    assert (inspect(out).tensor("a").shape, out[-4:]) == ((1,), b"whol")


def test_tensor_whose_size_does_not_match_its_shape_is_lost(tmp_path: Path) -> None:
    data = safetensors_file({"a": ("F32", [1], b"good"), "b": ("F32", [2], b"four")})
    result = rescue(data, tmp_path / "out.safetensors")
    assert [(tensor.name, tensor.state) for tensor in result.tensors] == [("a", "whole"), ("b", "lost")]
    assert (result.how, result.exit_code, result.lost[0].why) == (
        "left-out",
        1,
        "the file does not say where its bytes are",
    )
    assert [tensor.name for tensor in inspect(tmp_path / "out.safetensors").tensors] == ["a"]
    result = rescue(data, tmp_path / "out.safetensors", fill="zeros", overwrite=True)
    assert result.exit_code == 1
    assert result.warnings[0] == "b: still broken in the new file, since there is nothing to fill"


def test_junk_before_safetensors_is_removed(tmp_path: Path) -> None:
    assert rescue(b"JUNK" * 5 + SAFETENSORS, tmp_path / "out.safetensors").exit_code == 0
    assert (tmp_path / "out.safetensors").read_bytes() == SAFETENSORS


def test_flipped_bit_in_the_safetensors_header_length_is_repaired(tmp_path: Path) -> None:
    for bit in range(24):
        result = rescue(flipped(SAFETENSORS, bit // 8, bit % 8), tmp_path / "out.safetensors", overwrite=True)
        assert result.exit_code == 0, bit
        assert (tmp_path / "out.safetensors").read_bytes() == SAFETENSORS, bit


def test_output_name_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torch-legacy"):
        rescue(LEGACY, tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match="safetensors"):
        rescue(SAFETENSORS, tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []
