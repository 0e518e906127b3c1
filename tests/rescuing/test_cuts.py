"""A truncated file: exactly the tensors whose bytes are all present are found and written to the new file."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors_torch
from tests.forge import FUZZ
from tests.makers import saved
from tests.release import needs_torch
from tests.rescuing.makers import ARCHIVES, ROOT, complete_before, hashes, ident, index_end

from transload import inspect, rescue
from transload.checkpoint import Checkpoint
from transload.errors import RescueError, TransloadError
from transload.formats.zip_scan import find_directory
from transload.io.sources import BytesSource

CUTS_PER_FILE = 6 * FUZZ
DESCRIPTOR = 16
STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()
TRAIN = (ROOT / "h200" / "train_cuda0.ckpt").read_bytes()


def rescued_names(data: bytes, cut: int) -> list[str]:
    try:
        result = rescue(data[:cut], dry_run=True)
    except TransloadError:
        return []
    return [] if result.how == "nothing" else sorted(tensor.name for tensor in result.tensors if tensor.state != "lost")


def expected_names(checkpoint: Checkpoint, cut: int) -> list[str]:
    names = complete_before(checkpoint, cut) if cut >= index_end(checkpoint) else []
    return names if any(checkpoint.tensor(name).nbytes for name in names) else []


def wrong_cuts(data: bytes, cuts: list[int]) -> list[int]:
    """The cuts after which a rescue finds other tensors than those before the cut."""
    checkpoint = inspect(data)
    end = index_end(checkpoint)
    clear = [
        cut for cut in cuts if not end <= cut < end + DESCRIPTOR
    ]  # inside the descriptor, the index may look complete or truncated
    return [cut for cut in clear if rescued_names(data, cut) != expected_names(checkpoint, cut)]


def test_truncated_fixtures_yield_the_tensors_before_the_cut() -> None:
    wrong: dict[str, list[int]] = {}
    for path in ARCHIVES:
        data, rng = path.read_bytes(), random.Random(path.name)  # noqa: S311 - not for cryptography
        wrong[ident(path)] = wrong_cuts(data, sorted(rng.randrange(1, len(data)) for _ in range(CUTS_PER_FILE)))
    assert {name: cuts for name, cuts in wrong.items() if cuts} == {}


def test_truncated_file_with_views_yields_the_tensors_before_the_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5000, generator=generator)
    state = {f"w{n}": torch.randn(100 * n, generator=generator) for n in range(40)}
    out = io.BytesIO()
    torch.save(
        {**state, "base": base, "head": base[:50], "tail": base[-50:], "turned": base[:100].view(10, 10).t()}, out
    )
    data = out.getvalue()
    rng = random.Random(3)  # noqa: S311 - not for cryptography
    assert wrong_cuts(data, sorted(rng.randrange(1, len(data)) for _ in range(20 * FUZZ))) == []


def test_truncated_index_is_reported_as_lost() -> None:
    with pytest.raises(RescueError, match="the part of the file that names its tensors is lost"):
        rescue(STATE[: index_end(inspect(STATE)) // 2], dry_run=True)


@pytest.mark.parametrize("fill", [None, "zeros", "nan"])
@pytest.mark.parametrize("data", [STATE, TRAIN], ids=["state dict", "training"])
def test_new_file_contains_the_tensors_before_the_cut(data: bytes, fill: str | None, tmp_path: Path) -> None:
    checkpoint, original = inspect(data), hashes(data)
    for cut in range(index_end(checkpoint) + DESCRIPTOR, len(data), 997):
        expected = expected_names(checkpoint, cut)
        result = rescue(data[:cut], tmp_path / "out.pt", fill=fill, overwrite=True)  # type: ignore[arg-type]
        assert result.exit_code == (0 if len(expected) == len(checkpoint.tensors) else 1 if expected else 2), cut
        if not expected:
            continue
        out = (tmp_path / "out.pt").read_bytes()
        assert inspect(out, verify=True).integrity == "whole"
        kept = hashes(out)
        assert {name: kept[name] for name in expected} == {name: original[name] for name in expected}, cut
        assert sorted(kept) == (sorted(original) if fill else expected), cut


@pytest.mark.parametrize("fill", ["zeros", "nan"])
def test_fill_replaces_lost_tensors_if_another_is_intact(fill: str, tmp_path: Path) -> None:
    weight = torch.arange(100, dtype=torch.float32)
    data = saved({"w": weight, "n": torch.arange(4), "z": torch.ones(3, dtype=torch.bfloat16)})
    storage = inspect(data).storages[0]
    none_intact = rescue(data[: (storage.offset or 0) + 42], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert none_intact.exit_code == 2, "no tensor is intact"
    one_intact = rescue(data[: (inspect(data).storages[1].offset or 0) + 9], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert one_intact.exit_code == 1
    loaded = torch.load(tmp_path / "o.pt")
    assert torch.equal(loaded["w"], weight)
    assert loaded["n"].tolist() == [0, 0, 0, 0]
    assert loaded["z"].isnan().all() if fill == "nan" else loaded["z"].eq(0).all()


def test_torch_loads_the_new_file(tmp_path: Path) -> None:
    cut = inspect(TRAIN).tensor("optimizer/state/3/exp_avg").file_offset or 0
    result = rescue(TRAIN[:cut], tmp_path / "out.pt")
    original = torch.load(ROOT / "h200" / "train_cuda0.ckpt", map_location="cpu", weights_only=False)
    loaded = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=False)
    assert result.lost
    assert loaded["epoch"] == original["epoch"]
    assert sorted(loaded["model"]) == sorted(original["model"])
    assert "exp_avg" not in loaded["optimizer"]["state"][3]
    assert loaded["optimizer"]["param_groups"] == original["optimizer"]["param_groups"]


def test_truncated_torchscript_becomes_a_state_dict(tmp_path: Path) -> None:
    path = ROOT / "h200" / "torchscript_cuda0.pt"
    data = path.read_bytes()
    result = rescue(data[: index_end(inspect(data)) + 100], tmp_path / "out.pt")
    assert (result.how, result.exit_code) == ("weights", 1)
    loaded = torch.load(tmp_path / "out.pt")
    original = torch.jit.load(str(path), map_location="cpu").state_dict()
    assert sorted(loaded) == sorted(original)
    assert all(torch.equal(loaded[name], original[name]) for name in original)


def test_none_replaces_lost_tensors_in_lists(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save([torch.ones(2), (torch.ones(3), 7), {"k": [torch.ones(4)]}], out)
    data = out.getvalue()
    cut = inspect(data).storages[1].offset
    rescue(data[:cut], tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded[0].tolist() == [1, 1]
    assert loaded[1:] == [(None, 7), {"k": [None]}]


def test_index_damaged_in_several_bits_gives_a_warning(tmp_path: Path) -> None:
    """Names may be wrong, so there is a warning and the rescue is not complete."""
    place = TRAIN.index(b"conv.weight")
    result = rescue(TRAIN[:place] + b"CONW" + TRAIN[place + 4 :], tmp_path / "out.pt")
    assert result.exit_code == 1
    assert result.warnings


@needs_torch(2, 3)  # for uint16
@pytest.mark.filterwarnings("ignore")  # torch warns about quantized tensors and traces
def test_tensors_of_damaged_torchscript_keep_any_dtype_but_quantized(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    buffers = {"f8": torch.ones(8).to(torch.float8_e4m3fn), "u16": torch.arange(6).to(torch.uint16)}
    quantized = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
    for name, tensor in {**buffers, "quantized": quantized}.items():
        model.register_buffer(name, tensor)
    torch.jit.save(torch.jit.trace(model, torch.ones(2, 4)), tmp_path / "model.pt")
    checkpoint = inspect(tmp_path / "model.pt")
    damaged = bytearray((tmp_path / "model.pt").read_bytes())
    at = next(storage.offset or 0 for storage in checkpoint.storages if "weight" in storage.tensors)
    damaged[at : at + 8] = b"XYZWXYZW"
    result = rescue(bytes(damaged), tmp_path / "out.pt")
    assert (result.how, {lost.name for lost in result.lost}) == ("weights", {"weight", "quantized"})
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == {"bias", *buffers}
    for name, tensor in buffers.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


class Outer:
    class Inner:
        pass


def test_object_of_a_nested_class_is_kept(tmp_path: Path) -> None:
    """Only pickle protocol 4 and later can name such a class."""
    torch.save({"of": Outer.Inner(), "w": torch.ones(9), "v": torch.ones(9)}, tmp_path / "a.pt", pickle_protocol=4)
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = inspect(bytes(data)).storages[0].offset or 0
    data[at : at + 4] = b"????"
    rescue(bytes(data), tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    assert (type(loaded["of"]), list(loaded)) == (Outer.Inner, ["of", "v"])


def test_left_out_tensor_of_unknown_dtype_is_reported_as_lost(tmp_path: Path) -> None:
    data = safetensors_torch.save({name: torch.ones(300) for name in ("a", "b", "c")})
    result = rescue(data.replace(b"F32", b"V32", 1)[:-8], tmp_path / "out.safetensors")
    assert [(tensor.name, tensor.state, tensor.checked) for tensor in result.tensors] == [
        ("a", "lost", False),
        ("b", "whole", False),
        ("c", "lost", False),
    ]
    assert list(safetensors_torch.load_file(tmp_path / "out.safetensors")) == ["b"]


@pytest.mark.parametrize("name", [".storage_alignment", ".data/serialization_id", "version"])
def test_damaged_metadata_record_is_rebuilt(tmp_path: Path, name: str) -> None:
    out = io.BytesIO()
    torch.save({"w": torch.ones(4)}, out)
    data = bytearray(out.getvalue())
    record = next((record for record in inspect(bytes(data)).records if record.name == name), None)
    if record is None:
        pytest.skip("this torch does not write the record")
    at = record.offset or 0
    data[at : at + record.size] = b"?" * record.size
    result = rescue(bytes(data), tmp_path / "out.pt")
    assert (result.exit_code, result.how) == (0, "rebuilt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], torch.ones(4))


def test_archive_inside_a_record_is_not_mistaken_for_the_file() -> None:
    """An exported program stores its sample inputs as a separate archive."""
    data = (ROOT / "h200" / "export_cuda0.pt2").read_bytes()
    record = next(record for record in inspect(data).records if record.name == "data/sample_inputs/model.pt")
    for cut in range(record.size - 300, record.size, 25):
        assert rescued_names(data, (record.offset or 0) + cut) == []


def test_truncated_directory_longer_than_the_tail_is_read_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of 3,500 tensors exceeds the tail that is read at once; this test shortens the tail instead."""
    data = saved({f"w{n}": torch.zeros(1) for n in range(20)})
    complete = find_directory(BytesSource(data))
    monkeypatch.setattr("transload.formats.zip_scan._TAIL", 300)
    for cut in (complete.entries[15].end, complete.entries[15].end + 20):
        directory = find_directory(BytesSource(data[:cut]))
        assert (directory.start, directory.entries) == (complete.start, complete.entries[:16])
