"""On a real device: the same tensors as torch loads, whatever else the device is doing, and all memory given back."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import transload
from transload.errors import BrokenFileError, DoesNotFitError
from transload.io import cuda_driver as driver
from transload.loading import engine
from transload.loading.engine import Choice
from transload.loading.jobs import SLOT_PAIR

BUSY = 400_000_000  # cycles: some tenths of a second
MIB = 1 << 20


def content(kind: str) -> dict[str, torch.Tensor]:
    """Of one tensor; of many small ones; of large ones; of all of these, with shared memory and views."""
    torch.manual_seed(4)
    if kind == "tiny":
        return {"w": torch.randn(100)}
    small = {f"small{index}": torch.randn(1 + index % 300) for index in range(3000)}
    large = {f"large{index}": torch.randn(index * 1_000_003) for index in range(1, 6)}
    if kind in ("small", "large"):
        return small if kind == "small" else large
    base = torch.randn(5_000_000)
    views = {"base": base, "view": base[1000:2_000_000], "turned": base[:10_000].view(100, 100).t()}
    others = {"half": torch.randn(3_000_001).to(torch.bfloat16), "int": torch.arange(1_000_001), "none": torch.empty(0)}
    return {**small, **large, **views, **others}


KINDS = ["tiny", "small", "large", "mixed"]


@pytest.fixture(scope="module", params=KINDS)
def any_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / f"{request.param}.pt"
    torch.save(content(request.param), path)
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "mixed.pt"
    torch.save(content("mixed"), path)
    return path


def assert_alike(made: dict[str, torch.Tensor], true: dict[str, torch.Tensor], device: str = "cuda:0") -> None:
    assert list(made) == list(true)
    for name, tensor in true.items():
        found = made[name]
        assert str(found.device) == device, name
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert found.storage_offset() == tensor.storage_offset(), name
        assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes(), name
        assert torch.equal(bits(found), bits(tensor)), name
    assert shared(made) == shared(true)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def shared(tensors: dict[str, torch.Tensor]) -> list[set[str]]:
    """The names of those that look at the same memory."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return list(groups.values())


def as_torch(path: Path) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return made


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """What was chosen for each transfer."""
    made: list[Choice] = []
    choose_really = engine.choose

    def choose(*arguments: Any) -> Choice:
        made.append(choose_really(*arguments))
        return made[-1]

    monkeypatch.setattr(engine, "choose", choose)
    return made


# -- the same tensors


@pytest.mark.parametrize(
    "options",
    [{}, {"threads": 1}, {"threads": 5}, {"pinned_mb": 8}, {"direct": True}, {"verify": True}],
    ids=["plain", "one thread", "five threads", "little pinned", "direct", "verified"],
)
def test_as_torch_loads_it(any_file: Path, options: dict[str, Any]) -> None:
    assert_alike(transload.load(any_file, map_location="cuda", **options), as_torch(any_file))


@pytest.mark.parametrize("cores", [1, 2])
def test_the_device_fetches_where_there_are_few_cores(
    cores: int, mixed: Path, chosen: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = driver.cuda_driver()
    torch.zeros(1, device="cuda")
    if cuda is None or not cuda.can_pin_read_only(0):
        pytest.skip("this GPU or its driver cannot read file-backed pages")
    monkeypatch.setattr("transload.io.pool.cores", lambda: cores)
    monkeypatch.setattr(engine, "cached_fraction", lambda *_: 1.0)
    for _ in range(3):
        assert_alike(transload.load(mixed, map_location="cuda"), as_torch(mixed))
    assert all(each.mapped for each in chosen)


@pytest.mark.parametrize("form", ["legacy", "safetensors", "bytes", "object"])
def test_other_forms(form: str, mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if form == "legacy":
        torch.save(content("mixed"), path, _use_new_zipfile_serialization=False)
        assert_alike(transload.load(path, map_location="cuda"), as_torch(path))
    elif form == "safetensors":
        tensors = content("large")
        save_file(tensors, path)
        assert_alike(transload.load(path, map_location="cuda"), tensors)
    elif form == "bytes":
        assert_alike(transload.load(mixed.read_bytes(), map_location="cuda"), as_torch(mixed))
    else:
        with mixed.open("rb") as file:
            assert_alike(transload.load(file, map_location="cuda"), as_torch(mixed))


def test_some_go_to_the_device_and_some_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    true = content("mixed")
    torch.save(
        {name: tensor.cuda() if index % 3 else tensor for index, (name, tensor) in enumerate(true.items())}, path
    )
    made, other = transload.load(path), torch.load(path)
    assert all(made[name].device == other[name].device for name in true)
    assert all(torch.equal(made[name].cpu(), true[name]) for name in true)
    moved = transload.load(path, map_location={"cuda:0": "cpu", "cpu": "cuda:0"})
    assert all(torch.equal(moved[name].cpu(), true[name]) for name in true)


def test_progress_comes_to_an_end(any_file: Path) -> None:
    told: list[tuple[int, int]] = []
    transload.load(any_file, map_location="cuda", progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("name", ["large5", "small7", "int"])
def test_a_flipped_bit_is_found_when_asked_for(name: str, mixed: Path, tmp_path: Path) -> None:
    offset = transload.inspect(mixed).tensor(name).file_offset
    assert offset is not None
    data = bytearray(mixed.read_bytes())
    data[offset + 5] ^= 16
    path = tmp_path / "flipped.pt"
    path.write_bytes(data)
    transload.load(path, map_location="cuda")
    with pytest.raises(BrokenFileError, match=name):
        transload.load(path, map_location="cuda", verify=True)


def test_each_tensor_has_memory_of_its_own(mixed: Path) -> None:
    made = transload.load(mixed, map_location="cuda")
    for name in ("small10", "large1", "int"):
        tensor, written = made[name], io.BytesIO()
        torch.save(tensor, written)
        assert len(written.getvalue()) < tensor.numel() * tensor.element_size() + 4096
    made["small10"].fill_(-1)
    true = as_torch(mixed)
    assert torch.equal(made["small11"].cpu(), true["small11"])
    assert torch.equal(made["small9"].cpu(), true["small9"])


def test_memory_comes_back_tensor_by_tensor(mixed: Path) -> None:
    made = transload.load(mixed, map_location="cuda")
    before = torch.cuda.memory_allocated()
    nbytes = made["large5"].untyped_storage().nbytes()
    del made["large5"]
    assert before - torch.cuda.memory_allocated() >= nbytes


# -- streams


@pytest.mark.parametrize("count", [1000, 700_000, 20_000_000], ids=["small", "one lane", "many lanes"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_memory_that_was_just_freed_is_not_written_too_early(count: int, tmp_path: Path, *, side: bool) -> None:
    """What its last owner has started, and what still waits, reads what was there."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.full((count,), 2.0)}, path)
    transload.load(path, map_location="cuda")  # all lanes are made, so that nothing else waits for the device
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        block, out = torch.full((count,), 1.0, device="cuda"), torch.empty(count, device="cuda")
        address = block.data_ptr()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        out.copy_(block)
        del block
        made = transload.load(path, map_location="cuda")
    torch.cuda.synchronize()
    assert made["w"].data_ptr() == address  # else nothing is shown
    assert bool((out == 1.0).all())
    assert bool((made["w"] == 2.0).all())


def test_a_parameter_in_use_is_not_written_too_early(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    model = nn.Linear(4000, 4000, device="cuda")
    torch.save({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}, path)
    with torch.no_grad():
        model.weight.fill_(1.0)
        out = torch.empty_like(model.weight)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        out.copy_(model.weight)
        transload.load_into(model, path)
    assert bool((out == 1.0).all())
    assert bool((model.weight == 2.0).all())


def test_other_streams_can_use_it_at_once(mixed: Path) -> None:
    true = as_torch(mixed)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = transload.load(mixed, map_location="cuda")
    doubled = made["large5"] * 2  # on the default stream
    with torch.cuda.stream(torch.cuda.Stream()):
        tripled = made["large4"] * 3
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), true["large5"] * 2)
    assert torch.equal(tripled.cpu(), true["large4"] * 3)
    assert_alike(made, true)


def test_under_a_device(mixed: Path) -> None:
    with torch.cuda.device(0):
        made = transload.load(mixed, map_location="cuda")
    assert_alike(made, as_torch(mixed))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["tiny", "mixed"])
@pytest.mark.parametrize("here", [0, 1])
def test_the_device_of_the_program_stays(kind: str, here: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(content(kind), path)
    with torch.cuda.device(here):
        other = transload.load(path, map_location=f"cuda:{1 - here}")
        assert torch.cuda.current_device() == here
        assert torch.empty(1, device="cuda").device.index == here
        assert_alike(transload.load(path, map_location="cuda"), as_torch(path), f"cuda:{here}")
    assert_alike(other, as_torch(path), f"cuda:{1 - here}")


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_two_devices_in_one_load(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    true = content("mixed")
    torch.save({name: tensor.cuda(index % 2) for index, (name, tensor) in enumerate(true.items())}, path)
    made = transload.load(path)
    assert all(made[name].device.index == index % 2 for index, name in enumerate(true))
    assert all(torch.equal(made[name].cpu(), tensor) for name, tensor in true.items())


# -- several at once


def test_from_four_threads(mixed: Path) -> None:
    true = as_torch(mixed)
    errors: list[BaseException] = []

    def load() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    made = transload.load(mixed, map_location="cuda")
                    assert all(torch.equal(made[name].cpu(), tensor) for name, tensor in true.items())
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(engine._idle) <= engine.KEPT


# -- when something goes wrong


class Stop(Exception):  # noqa: N818 - a signal of these tests
    """What the one who is told raises."""


def stopped(path: Path, error: type[BaseException], threads: int | None) -> bool:
    def stop(*_: int) -> None:
        raise error

    try:
        transload.load(path, map_location="cuda", progress=stop, threads=threads)
    except error:
        return True
    return False


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt], ids=["error", "interrupt"])
def test_all_memory_is_given_back_when_it_is_stopped(
    error: type[BaseException], threads: int | None, mixed: Path
) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        assert stopped(mixed, error, threads)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()
    assert_alike(transload.load(mixed, map_location="cuda", threads=threads), as_torch(mixed))


def test_a_file_cut_while_it_is_loaded(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(mixed.read_bytes())
    before = torch.cuda.memory_allocated()

    class Wish(dict[str, str]):
        def get(self, tag: str, default: Any = None) -> Any:
            os.truncate(path, mixed.stat().st_size // 2)
            return super().get(tag, default)

    def load() -> str:
        try:
            transload.load(path, Wish({"cpu": "cuda:0"}))
        except BrokenFileError as error:
            return error.what
        return ""

    assert "the file ends after" in load()
    assert torch.cuda.memory_allocated() == before


def full(path: Path) -> str:
    try:
        transload.load(path, map_location="cuda")
    except DoesNotFitError as error:
        return error.what
    return ""


def test_a_full_device(tmp_path: Path) -> None:
    """Some storages fit: they are given back."""
    path = tmp_path / "x.pt"
    true = {str(index): torch.full((4 * MIB,), float(index)) for index in range(12)}
    torch.save(true, path)
    torch.cuda.empty_cache()
    gc.collect()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * MIB) / total)
    try:
        assert "no memory for" in full(path)
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_alike(transload.load(path, map_location="cuda"), true)


# -- load_into


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(3000, 3000)
        self.tall = nn.Linear(3000, 500)
        self.norms = nn.ModuleList(nn.LayerNorm(17) for _ in range(200))
        self.register_buffer("count", torch.tensor(seed))


def test_into_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(Model(1).state_dict(), path)
    model = Model(2).cuda()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    transload.load_into(model, path)
    assert torch.cuda.max_memory_allocated() - allocated < MIB  # no second copy
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(torch.equal(model.state_dict()[name].cpu(), value) for name, value in torch.load(path).items())


# -- in processes of their own

CHILD = """
import sys
import torch
import transload

path = sys.argv[1]
true = torch.load(path, map_location="cpu")
for _ in range(3):
    made = transload.load(path, map_location="cuda")
    assert all(torch.equal(made[name].cpu(), true[name]) for name in true)
    del made["large5"]
print("the same")
"""


@pytest.mark.parametrize(
    "config",
    ["expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:32"],
    ids=["expandable", "async", "split"],
)
def test_other_allocators(config: str, mixed: Path) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTHONWARNINGS": "ignore"}
    made = subprocess.run(
        [sys.executable, "-c", CHILD, str(mixed)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert made.stdout == "the same\n", made.stderr


FIRST = """
import sys
import transload

made = transload.load(sys.argv[1], map_location="cuda", threads=int(sys.argv[2]))
import torch
true = torch.load(sys.argv[1], map_location="cpu")
assert all(torch.equal(made[name].cpu(), true[name]) for name in true)
print("the same")
"""


@pytest.mark.parametrize("threads", [1, 6])
def test_the_first_thing_a_process_does(threads: int, mixed: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", FIRST, str(mixed), str(threads)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert made.stdout == "the same\n", made.stderr


PEAK = """
import sys
import torch
import transload

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

transload.load(sys.argv[1], map_location="cuda")  # everything is imported, and the device is awake
torch.cuda.synchronize()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = memory("VmRSS")
made = transload.load(sys.argv[2], map_location="cuda")
print(memory("VmHWM") - before, sum(tensor.numel() for tensor in made.values()))
"""


def test_the_host_needs_no_more_than_the_ring(tmp_path: Path) -> None:
    """A gibibyte goes to the device; 96 MiB of pinned slots and 64 MiB are the most it may take here."""
    little, much = tmp_path / "little.pt", tmp_path / "much.pt"
    torch.save({"w": torch.ones(1000)}, little)
    torch.save({str(index): torch.zeros(4 * MIB) for index in range(64)}, much)
    made = subprocess.run(
        [sys.executable, "-c", PEAK, str(little), str(much)], capture_output=True, text=True, timeout=200, check=False
    )
    if "clear_refs" in made.stderr:
        pytest.skip("this system cannot reset the peak memory of a process")
    grown, count = map(int, made.stdout.split() or pytest.fail(made.stderr))
    assert count == 256 * MIB
    assert grown < engine.MOST_RING * SLOT_PAIR + 64 * MIB
