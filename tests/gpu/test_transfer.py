"""Transfers to a real GPU: the same tensors as with torch, whatever else the GPU is doing, and no memory leaked."""

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
from transload.opening import engine
from transload.opening.engine import Choice
from transload.opening.jobs import SLOT_PAIR

BUSY_CYCLES = 400_000_000  # some tenths of a second
MIB = 1 << 20


def content(kind: str) -> dict[str, torch.Tensor]:
    """One tiny tensor, many small ones, some large ones, or a mixture with shared storages and views."""
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


def assert_same_tensors(
    loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], device: str = "cuda:0"
) -> None:
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        result = loaded[name]
        assert str(result.device) == device, name
        assert (result.dtype, result.shape, result.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert result.storage_offset() == tensor.storage_offset(), name
        assert result.untyped_storage().nbytes() == tensor.untyped_storage().nbytes(), name
        assert torch.equal(bits(result), bits(tensor)), name
    assert shared_storages(loaded) == shared_storages(expected)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def shared_storages(tensors: dict[str, torch.Tensor]) -> list[set[str]]:
    """The names of the tensors of each storage."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return list(groups.values())


def loaded_by_torch(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choice of the engine for each transfer."""
    made_choices: list[Choice] = []
    real_choose = engine.choose

    def choose(*arguments: Any) -> Choice:
        made_choices.append(real_choose(*arguments))
        return made_choices[-1]

    monkeypatch.setattr(engine, "choose", choose)
    return made_choices


# -- the same tensors


@pytest.mark.parametrize(
    "options",
    [{}, {"threads": 1}, {"threads": 5}, {"pinned_mb": 8}, {"direct": True}, {"verify": True}],
    ids=["plain", "one thread", "five threads", "small pinned limit", "direct", "verified"],
)
def test_load_onto_the_gpu_equals_torch_load(any_file: Path, options: dict[str, Any]) -> None:
    assert_same_tensors(transload.load(any_file, map_location="cuda", **options), loaded_by_torch(any_file))


@pytest.mark.parametrize("cores", [1, 2])
def test_pages_are_mapped_for_the_gpu_with_few_cores(
    cores: int, mixed: Path, choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = driver.cuda_driver()
    torch.zeros(1, device="cuda")
    if cuda is None or not cuda.can_pin_read_only(0):
        pytest.skip("this GPU or its driver cannot read file-backed pages")
    monkeypatch.setattr("transload.io.limits.cores", lambda: cores)
    monkeypatch.setattr(engine, "cached_fraction", lambda *_: 1.0)
    for _ in range(3):
        assert_same_tensors(transload.load(mixed, map_location="cuda"), loaded_by_torch(mixed))
    assert all(choice.mapped for choice in choices)


@pytest.mark.parametrize("form", ["legacy", "safetensors", "bytes", "object"])
def test_other_formats_and_sources_load_on_the_gpu(form: str, mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if form == "legacy":
        torch.save(content("mixed"), path, _use_new_zipfile_serialization=False)
        assert_same_tensors(transload.load(path, map_location="cuda"), loaded_by_torch(path))
    elif form == "safetensors":
        tensors = content("large")
        save_file(tensors, path)
        assert_same_tensors(transload.load(path, map_location="cuda"), tensors)
    elif form == "bytes":
        assert_same_tensors(transload.load(mixed.read_bytes(), map_location="cuda"), loaded_by_torch(mixed))
    else:
        with mixed.open("rb") as file:
            assert_same_tensors(transload.load(file, map_location="cuda"), loaded_by_torch(mixed))


def test_mixed_file_loads_on_cpu_and_gpu_as_saved_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    expected = content("mixed")
    torch.save(
        {name: tensor.cuda() if index % 3 else tensor for index, (name, tensor) in enumerate(expected.items())}, path
    )
    loaded, by_torch = transload.load(path), torch.load(path)
    assert all(loaded[name].device == by_torch[name].device for name in expected)
    assert all(torch.equal(loaded[name].cpu(), expected[name]) for name in expected)
    moved = transload.load(path, map_location={"cuda:0": "cpu", "cpu": "cuda:0"})
    assert all(torch.equal(moved[name].cpu(), expected[name]) for name in expected)


def test_progress_increases_to_the_total(any_file: Path) -> None:
    reported: list[tuple[int, int]] = []
    transload.load(any_file, map_location="cuda", progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported)
    assert reported[-1][0] == reported[-1][1]


@pytest.mark.parametrize("name", ["large5", "small7", "int"])
def test_flipped_bit_is_found_with_verify(name: str, mixed: Path, tmp_path: Path) -> None:
    offset = transload.inspect(mixed).tensor(name).file_offset
    assert offset is not None
    data = bytearray(mixed.read_bytes())
    data[offset + 5] ^= 16
    path = tmp_path / "flipped.pt"
    path.write_bytes(data)
    transload.load(path, map_location="cuda")
    with pytest.raises(BrokenFileError, match=name):
        transload.load(path, map_location="cuda", verify=True)


def test_tensors_have_separate_storages(mixed: Path) -> None:
    loaded = transload.load(mixed, map_location="cuda")
    for name in ("small10", "large1", "int"):
        tensor, buffer = loaded[name], io.BytesIO()
        torch.save(tensor, buffer)
        assert len(buffer.getvalue()) < tensor.numel() * tensor.element_size() + 4096
    loaded["small10"].fill_(-1)
    expected = loaded_by_torch(mixed)
    assert torch.equal(loaded["small11"].cpu(), expected["small11"])
    assert torch.equal(loaded["small9"].cpu(), expected["small9"])


def test_deleting_a_tensor_frees_its_memory(mixed: Path) -> None:
    loaded = transload.load(mixed, map_location="cuda")
    before = torch.cuda.memory_allocated()
    nbytes = loaded["large5"].untyped_storage().nbytes()
    del loaded["large5"]
    assert before - torch.cuda.memory_allocated() >= nbytes


# -- streams


@pytest.mark.parametrize("count", [1000, 700_000, 20_000_000], ids=["small", "one lane", "many lanes"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_freed_memory_is_not_overwritten_before_pending_work_ends(count: int, tmp_path: Path, *, side: bool) -> None:
    """Work that its last owner has queued still reads the old values."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.full((count,), 2.0)}, path)
    transload.load(path, map_location="cuda")  # creates all lanes, so that nothing else waits for the device
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        block, copied = torch.full((count,), 1.0, device="cuda"), torch.empty(count, device="cuda")
        address = block.data_ptr()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        copied.copy_(block)
        del block
        loaded = transload.load(path, map_location="cuda")
    torch.cuda.synchronize()
    assert loaded["w"].data_ptr() == address  # otherwise this shows nothing
    assert bool((copied == 1.0).all())
    assert bool((loaded["w"] == 2.0).all())


def test_parameter_is_not_overwritten_before_pending_work_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    model = nn.Linear(4000, 4000, device="cuda")
    torch.save({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}, path)
    with torch.no_grad():
        model.weight.fill_(1.0)
        copied = torch.empty_like(model.weight)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        copied.copy_(model.weight)
        transload.load_into(model, path)
    assert bool((copied == 1.0).all())
    assert bool((model.weight == 2.0).all())


def test_loaded_tensors_can_be_used_on_other_streams_at_once(mixed: Path) -> None:
    expected = loaded_by_torch(mixed)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        loaded = transload.load(mixed, map_location="cuda")
    doubled = loaded["large5"] * 2  # on the default stream
    with torch.cuda.stream(torch.cuda.Stream()):
        tripled = loaded["large4"] * 3
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), expected["large5"] * 2)
    assert torch.equal(tripled.cpu(), expected["large4"] * 3)
    assert_same_tensors(loaded, expected)


def test_load_inside_a_device_context(mixed: Path) -> None:
    with torch.cuda.device(0):
        loaded = transload.load(mixed, map_location="cuda")
    assert_same_tensors(loaded, loaded_by_torch(mixed))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["tiny", "mixed"])
@pytest.mark.parametrize("current", [0, 1])
def test_load_keeps_the_current_device(kind: str, current: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(content(kind), path)
    with torch.cuda.device(current):
        other = transload.load(path, map_location=f"cuda:{1 - current}")
        assert torch.cuda.current_device() == current
        assert torch.empty(1, device="cuda").device.index == current
        assert_same_tensors(transload.load(path, map_location="cuda"), loaded_by_torch(path), f"cuda:{current}")
    assert_same_tensors(other, loaded_by_torch(path), f"cuda:{1 - current}")


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_file_of_two_gpus_loads_on_both(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    expected = content("mixed")
    torch.save({name: tensor.cuda(index % 2) for index, (name, tensor) in enumerate(expected.items())}, path)
    loaded = transload.load(path)
    assert all(loaded[name].device.index == index % 2 for index, name in enumerate(expected))
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


# -- threads


def test_four_threads_can_load_at_the_same_time(mixed: Path) -> None:
    expected = loaded_by_torch(mixed)
    errors: list[BaseException] = []

    def load() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    loaded = transload.load(mixed, map_location="cuda")
                    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(engine._idle) <= engine.KEPT


# -- errors


class Stop(Exception):  # noqa: N818 - a signal of these tests
    """The error that the progress callback raises."""


def load_is_stopped(path: Path, error: type[BaseException], threads: int | None) -> bool:
    def stop(*_: int) -> None:
        raise error

    try:
        transload.load(path, map_location="cuda", progress=stop, threads=threads)
    except error:
        return True
    return False


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt], ids=["error", "interrupt"])
def test_memory_of_a_stopped_load_is_freed_at_once(
    error: type[BaseException], threads: int | None, mixed: Path
) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        assert load_is_stopped(mixed, error, threads)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()
    assert_same_tensors(transload.load(mixed, map_location="cuda", threads=threads), loaded_by_torch(mixed))


def test_file_truncated_during_load_is_a_broken_file_error(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(mixed.read_bytes())
    before = torch.cuda.memory_allocated()

    class TruncatingMap(dict[str, str]):
        def get(self, tag: str, default: Any = None) -> Any:
            os.truncate(path, mixed.stat().st_size // 2)
            return super().get(tag, default)

    def load() -> str:
        try:
            transload.load(path, TruncatingMap({"cpu": "cuda:0"}))
        except BrokenFileError as error:
            return error.what
        return ""

    assert "bytes before they do" in load()
    assert torch.cuda.memory_allocated() == before


def does_not_fit_message(path: Path) -> str:
    try:
        transload.load(path, map_location="cuda")
    except DoesNotFitError as error:
        return error.what
    return ""


def test_load_onto_a_full_gpu_is_an_error_and_frees_its_memory(tmp_path: Path) -> None:
    """The storages that fit are freed."""
    path = tmp_path / "x.pt"
    expected = {str(index): torch.full((4 * MIB,), float(index)) for index in range(12)}
    torch.save(expected, path)
    torch.cuda.empty_cache()
    gc.collect()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * MIB) / total)
    try:
        assert "no memory for" in does_not_fit_message(path)
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_tensors(transload.load(path, map_location="cuda"), expected)


# -- load_into


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(3000, 3000)
        self.tall = nn.Linear(3000, 500)
        self.norms = nn.ModuleList(nn.LayerNorm(17) for _ in range(200))
        self.register_buffer("count", torch.tensor(seed))


def test_load_into_fills_a_model_in_place_without_a_second_copy(tmp_path: Path) -> None:
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


# -- in separate processes

LOAD_THREE_TIMES = """
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
def test_load_works_with_other_allocator_settings(config: str, mixed: Path) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        [sys.executable, "-c", LOAD_THREE_TIMES, str(mixed)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert process.stdout == "the same\n", process.stderr


LOAD_BEFORE_IMPORTING_TORCH = """
import sys
import transload

made = transload.load(sys.argv[1], map_location="cuda", threads=int(sys.argv[2]))
import torch
true = torch.load(sys.argv[1], map_location="cpu")
assert all(torch.equal(made[name].cpu(), true[name]) for name in true)
print("the same")
"""


@pytest.mark.parametrize("threads", [1, 6])
def test_load_works_as_first_use_of_cuda_in_a_process(threads: int, mixed: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LOAD_BEFORE_IMPORTING_TORCH, str(mixed), str(threads)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert process.stdout == "the same\n", process.stderr


PEAK_MEMORY = """
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


def test_host_memory_of_a_load_is_limited_by_the_ring(tmp_path: Path) -> None:
    """Loading 1 GiB onto the GPU may take 96 MiB of pinned slots and 64 MiB more of host memory."""
    little, much = tmp_path / "little.pt", tmp_path / "much.pt"
    torch.save({"w": torch.ones(1000)}, little)
    torch.save({str(index): torch.zeros(4 * MIB) for index in range(64)}, much)
    process = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, str(little), str(much)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "clear_refs" in process.stderr:
        pytest.skip("this system cannot reset the peak memory of a process")
    grown, count = map(int, process.stdout.split() or pytest.fail(process.stderr))
    assert count == 256 * MIB
    assert grown < engine.MOST_RING * SLOT_PAIR + 64 * MIB


GROUPS = """
import sys
import torch
import transload

path, mib = sys.argv[1], 1 << 20
loaded = transload.load(path, map_location="cuda")
first = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["segment.all.current"]
assert torch.cuda.memory_allocated() == 40 * 12 * mib
assert first[0] <= 40 * 12 * mib + 2 * mib and first[1] <= 2, first
for name in [*loaded][::2]:
    del loaded[name]
assert torch.cuda.memory_allocated() == 20 * 12 * mib
again = transload.load(path, map_location="cuda")
assert torch.cuda.memory_reserved() <= 2 * first[0], "unused memory is used before more is taken"
loaded.clear()
again.clear()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
torch.load(path, map_location="cuda", weights_only=True)
kept = torch.cuda.memory_reserved()
transload.load(path, map_location="cuda")
assert torch.cuda.memory_reserved() == kept
"""


def test_device_memory_is_taken_in_few_pieces_of_the_right_size(tmp_path: Path) -> None:
    """480 MiB in 40 tensors take two pieces; each tensor is freed on its own, and no more is taken than is used."""
    path = tmp_path / "much.pt"
    torch.save({str(index): torch.zeros(3 * MIB) for index in range(40)}, path)
    process = subprocess.run(
        [sys.executable, "-c", GROUPS, str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert not process.returncode, process.stderr
