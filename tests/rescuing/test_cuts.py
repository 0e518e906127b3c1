"""A file that ends early: exactly the tensors are found whose bytes are all there, and the new file has them."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors_torch
from tests.forge import FUZZ
from tests.release import needs_torch
from tests.rescuing.makers import ARCHIVES, ROOT, hashes, ident, index_end, there

from transload import inspect, rescue
from transload.checkpoint import Checkpoint
from transload.errors import RescueError, TransloadError
from transload.formats.zip_scan import find_directory
from transload.io.sources import BytesSource

PLACES = 6 * FUZZ
DESCRIPTOR = 16
STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()
TRAIN = (ROOT / "h200" / "train_cuda0.ckpt").read_bytes()


def found_at(data: bytes, cut: int) -> list[str]:
    try:
        made = rescue(data[:cut], dry_run=True)
    except TransloadError:
        return []
    return [] if made.how == "nothing" else sorted(each.name for each in made.tensors if each.state != "lost")


def wanted_at(checkpoint: Checkpoint, cut: int) -> list[str]:
    names = there(checkpoint, cut) if cut >= index_end(checkpoint) else []
    return names if any(checkpoint.tensor(name).nbytes for name in names) else []


def wrong_cuts(data: bytes, cuts: list[int]) -> list[int]:
    """The cuts after which other tensors are found than those that are there."""
    checkpoint = inspect(data)
    end = index_end(checkpoint)
    clear = [cut for cut in cuts if not end <= cut < end + DESCRIPTOR]  # there the index may look whole or cut
    return [cut for cut in clear if found_at(data, cut) != wanted_at(checkpoint, cut)]


def test_every_fixture() -> None:
    wrong: dict[str, list[int]] = {}
    for path in ARCHIVES:
        data, rng = path.read_bytes(), random.Random(path.name)  # noqa: S311 - no secret
        wrong[ident(path)] = wrong_cuts(data, sorted(rng.randrange(1, len(data)) for _ in range(PLACES)))
    assert {name: cuts for name, cuts in wrong.items() if cuts} == {}


def test_a_generated_file() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5000, generator=generator)
    state = {f"w{n}": torch.randn(100 * n, generator=generator) for n in range(40)}
    out = io.BytesIO()
    torch.save(
        {**state, "base": base, "head": base[:50], "tail": base[-50:], "turned": base[:100].view(10, 10).t()}, out
    )
    data = out.getvalue()
    rng = random.Random(3)  # noqa: S311 - no secret
    assert wrong_cuts(data, sorted(rng.randrange(1, len(data)) for _ in range(20 * FUZZ))) == []


def test_a_cut_in_the_index_is_not_taken_for_another_format() -> None:
    with pytest.raises(RescueError, match="the part of the file that names its tensors is lost"):
        rescue(STATE[: index_end(inspect(STATE)) // 2], dry_run=True)


@pytest.mark.parametrize("fill", [None, "zeros", "nan"])
@pytest.mark.parametrize("data", [STATE, TRAIN], ids=["state dict", "training"])
def test_the_new_file(data: bytes, fill: str | None, tmp_path: Path) -> None:
    checkpoint, right = inspect(data), hashes(data)
    for cut in range(index_end(checkpoint) + DESCRIPTOR, len(data), 997):
        want = wanted_at(checkpoint, cut)
        made = rescue(data[:cut], tmp_path / "out.pt", fill=fill, overwrite=True)  # type: ignore[arg-type]
        assert made.exit_code == (0 if len(want) == len(checkpoint.tensors) else 1 if want else 2), cut
        if not want:
            continue
        out = (tmp_path / "out.pt").read_bytes()
        assert inspect(out, verify=True).integrity == "whole"
        kept = hashes(out)
        assert {name: kept[name] for name in want} == {name: right[name] for name in want}, cut
        assert sorted(kept) == (sorted(right) if fill else want), cut


@pytest.mark.parametrize("fill", ["zeros", "nan"])
def test_filled_elements(fill: str, tmp_path: Path) -> None:
    weight = torch.arange(100, dtype=torch.float32)
    out = io.BytesIO()
    torch.save({"w": weight, "n": torch.arange(4), "z": torch.ones(3, dtype=torch.bfloat16)}, out)
    data = out.getvalue()
    storage = inspect(data).storages[0]
    made = rescue(data[: (storage.offset or 0) + 42], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert made.exit_code == 2, "not one tensor is whole"
    head = rescue(data[: (inspect(data).storages[1].offset or 0) + 9], tmp_path / "o.pt", fill=fill)  # type: ignore[arg-type]
    assert head.exit_code == 1
    loaded = torch.load(tmp_path / "o.pt")
    assert torch.equal(loaded["w"], weight)
    assert loaded["n"].tolist() == [0, 0, 0, 0]
    assert loaded["z"].isnan().all() if fill == "nan" else loaded["z"].eq(0).all()


def test_torch_loads_the_new_file(tmp_path: Path) -> None:
    cut = inspect(TRAIN).tensor("optimizer/state/3/exp_avg").file_offset or 0
    made = rescue(TRAIN[:cut], tmp_path / "out.pt")
    whole = torch.load(ROOT / "h200" / "train_cuda0.ckpt", map_location="cpu", weights_only=False)
    loaded = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=False)
    assert made.lost
    assert loaded["epoch"] == whole["epoch"]
    assert sorted(loaded["model"]) == sorted(whole["model"])
    assert "exp_avg" not in loaded["optimizer"]["state"][3]
    assert loaded["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]


def test_a_cut_program_becomes_a_dictionary(tmp_path: Path) -> None:
    path = ROOT / "h200" / "torchscript_cuda0.pt"
    data = path.read_bytes()
    made = rescue(data[: index_end(inspect(data)) + 100], tmp_path / "out.pt")
    assert (made.how, made.exit_code) == ("weights", 1)
    loaded = torch.load(tmp_path / "out.pt")
    whole = torch.jit.load(str(path), map_location="cpu").state_dict()
    assert sorted(loaded) == sorted(whole)
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_none_replaces_lost_members_of_lists(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save([torch.ones(2), (torch.ones(3), 7), {"k": [torch.ones(4)]}], out)
    data = out.getvalue()
    cut = inspect(data).storages[1].offset
    rescue(data[:cut], tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded[0].tolist() == [1, 1]
    assert loaded[1:] == [(None, 7), {"k": [None]}]


def test_an_index_damaged_in_several_bits(tmp_path: Path) -> None:
    """Its names may be wrong: a warning says so, and the rescue is not complete."""
    place = TRAIN.index(b"conv.weight")
    made = rescue(TRAIN[:place] + b"CONW" + TRAIN[place + 4 :], tmp_path / "out.pt")
    assert made.exit_code == 1
    assert made.warnings


@needs_torch(2, 3)  # for uint16
@pytest.mark.filterwarnings("ignore")  # torch warns of quantized tensors, and of traces
def test_the_tensors_of_a_damaged_program_have_any_dtype(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    others = {"f8": torch.ones(8).to(torch.float8_e4m3fn), "u16": torch.arange(6).to(torch.uint16)}
    quantized = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
    for name, tensor in {**others, "quantized": quantized}.items():
        model.register_buffer(name, tensor)
    torch.jit.save(torch.jit.trace(model, torch.ones(2, 4)), tmp_path / "model.pt")
    found = inspect(tmp_path / "model.pt")
    damaged = bytearray((tmp_path / "model.pt").read_bytes())
    at = next(each.offset or 0 for each in found.storages if "weight" in each.tensors)
    damaged[at : at + 8] = b"XYZWXYZW"
    made = rescue(bytes(damaged), tmp_path / "out.pt")
    assert (made.how, {each.name for each in made.lost}) == ("weights", {"weight", "quantized"})
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved.keys() == {"bias", *others}
    for name, tensor in others.items():
        assert saved[name].dtype == tensor.dtype
        assert torch.equal(saved[name].view(torch.uint8), tensor.view(torch.uint8))


class Outer:
    class Inner:
        pass


def test_an_object_of_a_nested_class_is_kept(tmp_path: Path) -> None:
    """Only a pickle that says that it has protocol 4 may name such a class."""
    torch.save({"of": Outer.Inner(), "w": torch.ones(9), "v": torch.ones(9)}, tmp_path / "a.pt", pickle_protocol=4)
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = inspect(bytes(data)).storages[0].offset or 0
    data[at : at + 4] = b"????"
    rescue(bytes(data), tmp_path / "out.pt")
    kept = torch.load(tmp_path / "out.pt", weights_only=False)
    assert (type(kept["of"]), list(kept)) == (Outer.Inner, ["of", "v"])


def test_a_tensor_of_an_unknown_dtype_is_not_called_whole_if_it_is_left_out(tmp_path: Path) -> None:
    data = safetensors_torch.save({name: torch.ones(300) for name in ("a", "b", "c")})
    made = rescue(data.replace(b"F32", b"V32", 1)[:-8], tmp_path / "out.safetensors")
    assert [(each.name, each.state, each.checked) for each in made.tensors] == [
        ("a", "lost", False),
        ("b", "whole", False),
        ("c", "lost", False),
    ]
    assert list(safetensors_torch.load_file(tmp_path / "out.safetensors")) == ["b"]


@pytest.mark.parametrize("name", [".storage_alignment", ".data/serialization_id", "version"])
def test_torch_loads_a_file_with_a_number_that_was_damaged(tmp_path: Path, name: str) -> None:
    out = io.BytesIO()
    torch.save({"w": torch.ones(4)}, out)
    data = bytearray(out.getvalue())
    record = next((record for record in inspect(bytes(data)).records if record.name == name), None)
    if record is None:
        pytest.skip("this torch does not write the record")
    at = record.offset or 0
    data[at : at + record.size] = b"?" * record.size
    made = rescue(bytes(data), tmp_path / "out.pt")
    assert (made.exit_code, made.how) == (0, "rebuilt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], torch.ones(4))


def test_an_archive_inside_a_record_is_not_taken_for_the_file() -> None:
    """An exported program keeps its sample inputs as an archive of their own."""
    data = (ROOT / "h200" / "export_cuda0.pt2").read_bytes()
    record = next(record for record in inspect(data).records if record.name == "data/sample_inputs/model.pt")
    for cut in range(record.size - 300, record.size, 25):
        assert found_at(data, (record.offset or 0) + cut) == []


def test_a_directory_that_is_cut_is_read_backwards_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 3,500 tensors is longer than what is read of the end of a file: so is this one, of a shorter end."""
    out = io.BytesIO()
    torch.save({f"w{n}": torch.zeros(1) for n in range(20)}, out)
    data = out.getvalue()
    whole = find_directory(BytesSource(data))
    monkeypatch.setattr("transload.formats.zip_scan._TAIL", 300)
    for cut in (whole.entries[15].end, whole.entries[15].end + 20):
        found = find_directory(BytesSource(data[:cut]))
        assert (found.start, found.entries) == (whole.start, whole.entries[:16])
