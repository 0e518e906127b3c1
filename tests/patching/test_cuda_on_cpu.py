"""What ``torch.cuda`` answers under the patch on a machine without CUDA. ``bench/run.py`` runs whole programs."""

from __future__ import annotations

import os
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import forks
from tests.each import each

import transload
from transload.patching import devices, script

if TYPE_CHECKING:
    from tests.patching.conftest import Cards

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("no_cards"),
    pytest.mark.filterwarnings("ignore:.*(set_default_tensor_type|[Ss]parse)", "ignore:.*(CUDA|cuda) is not available"),
]

X = torch.ones(3)


def step(kind: Any, **options: Any) -> Any:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    made = kind([weight], **options)
    made.step()
    return made


def attend() -> None:
    """As ``sdpa_kernel`` and ``sdp_kernel`` do for kernels of GPUs only."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    try:
        torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 8))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_math_sdp(True)


def profile() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of some releases
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            torch.ones(1)


FAILS: dict[str, Callable[[], Any]] = {
    "current_stream": lambda: torch.cuda.current_stream(*()),
    "default_stream": lambda: torch.cuda.default_stream(*()),
    "get_device_capability": lambda: torch.cuda.get_device_capability(*()),
    "get_device_properties": lambda: torch.cuda.get_device_properties(0),
    "get_rng_state": lambda: torch.cuda.get_rng_state(*()),
    "init": lambda: torch.cuda.init(*()),
    "initial_seed": lambda: torch.cuda.initial_seed(*()),
    "ipc_collect": lambda: torch.cuda.ipc_collect(*()),
    "reset_peak_memory_stats": lambda: torch.cuda.reset_peak_memory_stats(*()),
    "memory_stats": lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"],
    "a name in its own module": lambda: torch.cuda.memory.reset_peak_memory_stats(*()),
    "cudart": lambda: torch.cuda.cudart().cudaProfilerStart(),
    "profiler": lambda: torch.cuda.profiler.start(*()),
    "emit_nvtx": lambda: torch.autograd.profiler.emit_nvtx(record_shapes=True).__enter__(),
    "cufft_plan_cache": lambda: torch.backends.cuda.cufft_plan_cache.clear(*()),
    "set_sync_debug_mode": lambda: torch.cuda.set_sync_debug_mode("warn"),
    "utilization": lambda: torch.cuda.utilization(*()),
    "set_per_process_memory_fraction": lambda: torch.cuda.set_per_process_memory_fraction(0.5),
    "Event": lambda: torch.cuda.Event(enable_timing=True).record(),
    "Stream": lambda: torch.cuda.Stream(*()),
    "Generator": lambda: torch.Generator("cuda"),
    "FloatTensor": lambda: torch.cuda.FloatTensor([1.0]),
    "type of a name": lambda: X.type("torch.cuda.DoubleTensor"),
    "type": lambda: X.type(torch.cuda.HalfTensor),
    "pin_memory": lambda: torch.empty(3, pin_memory=True),
    "record_stream": lambda: X.record_stream(torch.cuda.current_stream()),
    "synchronize where a tensor is": lambda: torch.cuda.synchronize(X.device),
    "device where a tensor is": lambda: torch.cuda.device(X.device).__enter__(),
    "an index of get_device": lambda: torch.zeros(2, device=X.get_device()),
    "a model to a rank": lambda: torch.nn.Linear(2, 2).to(1),
    "default_generators": lambda: torch.cuda.default_generators[0],
    "get_rng_state_all": lambda: torch.cuda.get_rng_state_all()[0],
    "normal": lambda: torch.normal(0.0, 1.0, (2,), device="cuda"),
    "FloatStorage": lambda: torch.cuda.FloatStorage(3),
    "comm": lambda: torch.nn.parallel.comm.broadcast(X, [0, 1]),
    "scatter": lambda: torch.nn.parallel.scatter(X, [0, 1]),
    "replicate": lambda: torch.nn.parallel.replicate(torch.nn.Linear(2, 2), [0, 1]),
    "data_parallel": lambda: torch.nn.parallel.data_parallel(torch.nn.Linear(3, 2), X, [0, 1]),
    "capturable": lambda: step(torch.optim.Adam, capturable=True),
    "kernels of attention": attend,
    "a profile of the GPU alone": profile,
}
OF_LATER_RELEASES: dict[str, Callable[[], Any]] = {
    "torch.Stream": lambda: torch.Stream(device="cuda").record_event(),
    "accelerator": lambda: torch.accelerator.current_stream(*()),
    "accelerator.memory": lambda: torch.accelerator.get_memory_info(*()),
    "accelerator.device_index": lambda: torch.accelerator.device_index(0).__enter__(),
}
FAILS |= {
    name: each for name, each in OF_LATER_RELEASES.items() if hasattr(getattr(torch, "accelerator", None), "memory")
}

MAY_FAIL: dict[str, Callable[[], Any]] = {  # by the build of torch, and by the driver
    "get_allocator_backend": lambda: torch.cuda.get_allocator_backend(*()),
    "is_current_stream_capturing": lambda: torch.cuda.is_current_stream_capturing(*()),
    "_record_memory_history": lambda: torch.cuda.memory._record_memory_history(max_entries=9),
    "nccl": lambda: torch.cuda.nccl.version(*()),
    "sparse": lambda: torch.cuda.sparse.FloatTensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1)),
}
if hasattr(getattr(torch, "accelerator", None), "memory"):
    MAY_FAIL["torch.Event"] = lambda: torch.Event(device="cuda", enable_timing=True).record()


@each("name", FAILS)
def test_it_fails_without_the_patch_and_works_under_it(name: str) -> None:
    with pytest.raises(Exception, match=r".+"):  # NVMLError is an Exception, not a RuntimeError
        FAILS[name]()
    with quiet():
        FAILS[name]()


@each("name", MAY_FAIL)
def test_it_works_under_the_patch(name: str) -> None:
    with quiet():
        MAY_FAIL[name]()


def quiet(device: str = "auto") -> Any:
    warnings.simplefilter("ignore", transload.LandingWarning)
    return transload.patch(device)


def test_answers_are_those_of_the_cpu() -> None:
    with quiet():
        properties = torch.cuda.get_device_properties("cuda:0")
        assert properties.total_memory > 0
        assert properties.name.startswith("CPU (")
        assert torch.cuda.get_device_capability() == (0, 0)
        made = torch.cuda.DoubleTensor(2, 3)
        assert (made.dtype, made.device.type, made.shape) == (torch.float64, "cpu", (2, 3))
        assert isinstance(X, torch.cuda.FloatTensor)
        assert not isinstance(X, torch.cuda.DoubleTensor)
        assert torch.cuda.FloatTensor.dtype == torch.float32
        assert X.type(torch.cuda.IntTensor).dtype == torch.int32
        assert X.type() == "torch.FloatTensor"
        torch.set_default_tensor_type("torch.cuda.FloatTensor")  # a torch for CUDA takes this without a GPU, too
        assert torch.ones(1).device.type == "cpu"


def test_ranges_for_a_profiler_are_left_out() -> None:
    """They fail where torch is built without CUDA."""
    with quiet(), torch.cuda.nvtx.range("a"):
        assert torch.cuda.nvtx.range_push("b") == 0


def test_events_measure_time() -> None:
    with quiet():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with pytest.raises(ValueError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        torch.cuda.current_stream().record_event(end)
        assert 0 <= start.elapsed_time(end) < 60_000
        assert end.query()
        assert isinstance(end, torch.cuda.Event)


def test_there_is_one_stream() -> None:
    with quiet():
        assert torch.cuda.current_stream() == torch.cuda.default_stream("cuda:0")
        side = torch.cuda.Stream()
        assert isinstance(side, torch.cuda.Stream)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
        context = torch.cuda.stream(side)
        assert isinstance(context, torch.cuda.StreamContext)
        assert context.stream is side


def test_a_generator_is_one_of_torch() -> None:
    real = torch.Generator
    with quiet():
        made = torch.Generator(device="cuda").manual_seed(3)
        assert type(made) is real
        assert isinstance(made, torch.Generator)
        assert issubclass(real, torch.Generator)
        assert torch.rand(2, generator=made, device="cuda").shape == (2,)
        assert torch.Generator().device.type == "cpu"
    assert torch.Generator is real


def test_the_generator_of_a_gpu_is_that_of_the_cpu() -> None:
    with quiet():
        torch.manual_seed(3)
        state, drawn = torch.cuda.get_rng_state(), torch.randn(1, device="cuda")
        ways: tuple[Callable[[], Any], ...] = (
            lambda: torch.cuda.manual_seed(3),
            lambda: torch.cuda.manual_seed_all(3),
            lambda: torch.cuda.default_generators[0].manual_seed(3),
            lambda: torch.cuda.set_rng_state(state, "cuda:0"),
            lambda: torch.cuda.set_rng_state_all([state, torch.zeros(16, dtype=torch.uint8)]),  # as a GPU has it
        )
        for again in ways:
            again()
            assert torch.equal(torch.randn(1, device="cuda"), drawn)
        assert torch.cuda.initial_seed() == 3


def test_to_seed_torch_is_not_to_ask_for_cuda() -> None:
    with warnings.catch_warnings(), transload.patch():
        warnings.simplefilter("error")
        torch.manual_seed(3)
    assert not devices.answered


def test_what_several_gpus_do_is_done_in_as_many_parts() -> None:
    from torch.nn import parallel

    x = torch.arange(12.0).view(4, 3)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval()
    with quiet():
        parts = parallel.scatter(x, [0, 1])
        copies = parallel.replicate(layers, [0, 1])
        out = parallel.gather(parallel.parallel_apply(copies, parts, devices=[0, 1]), 0)
        assert torch.equal(out, layers(x))
        assert torch.equal(out, parallel.data_parallel(layers, x, [0, 1]))
        out.pow(2).sum().backward()
        split, layers[0].weight.grad = layers[0].weight.grad, None
        layers(x).pow(2).sum().backward()
        assert torch.allclose(split, layers[0].weight.grad)
        assert [len(each) for each in parallel.comm.scatter(x, [0, 1], chunk_sizes=[1, 3])] == [1, 3]
        assert torch.equal(parallel.comm.gather(parts, dim=0, destination=0), x)
        assert torch.equal(parallel.comm.reduce_add([x, x, x], destination=0), 3 * x)
        assert torch.equal(parallel.comm.reduce_add_coalesced([[x], [x]])[0], 2 * x)
        assert parallel.gather([x.sum(), x.sum()], 0).tolist() == [66.0, 66.0]


def test_an_optimizer_of_a_gpu_goes_on_on_the_cpu() -> None:
    with quiet():
        made = step(torch.optim.AdamW, capturable=True, fused=True)
        states = made.state_dict()
        states["param_groups"][0]["capturable"] = True  # as a GPU saves it
        made.load_state_dict(states)
        made.step()
        assert not made.param_groups[0]["capturable"]


def test_a_tensor_believes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        assert not X.is_cuda
        assert X.get_device() == -1
        monkeypatch.setattr(devices, "pretending", True)
        assert X.is_cuda
        assert torch.nn.Parameter(X).is_cuda
        assert X.get_device() == 0
        assert torch.nn.LSTM(2, 2).cuda()(torch.ones(1, 2).cuda())[0].shape == (1, 2)
    assert not X.is_cuda


def test_a_tensor_that_is_not_on_the_gpu_is_not_told_of_one(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(1)
    monkeypatch.setattr(devices, "pretending", True)
    with transload.patch():
        assert not X.is_cuda
        assert X.get_device() == -1
    assert not devices.asked


def test_graphs_are_refused_with_the_reason() -> None:
    with quiet(), pytest.raises(RuntimeError, match="CUDA graphs record the kernels of a GPU"):
        torch.cuda.CUDAGraph()
    with quiet():  # libraries name the class in annotations
        assert torch.cuda.CUDAGraph | None


def test_whether_cuda_is_there_is_answered_truthfully(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert list(devices.asked.values()) == ["torch.cuda.is_available()", "torch.cuda.device_count()"]
        monkeypatch.setattr(devices, "pretending", True)
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert str(X.to("cuda").device) == "cpu"
        assert isinstance(torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda())(torch.ones(1, 2)), torch.Tensor)
    assert not torch.cuda.is_available()


def test_torch_may_ask_one_question_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # As its CUDA builds do with PYTORCH_NVML_BASED_CUDA_CHECK=1, which Lightning sets.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "of this test")  # so that it is asked again
    monkeypatch.setattr(devices, "pretending", True)
    with quiet():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1


def test_nothing_is_answered_where_there_is_a_gpu(cards: Cards) -> None:
    cards(1)
    with transload.patch(), pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.Stream()
    assert not devices.answered


@pytest.mark.parametrize(("name", "lands"), [("cuda:0", "cuda:0"), ("cuda:2", "cuda:0"), ("cuda:5", "cuda:1")])
def test_devices_beyond_the_last_are_spread(name: str, lands: str, cards: Cards) -> None:
    cards(2)
    with quiet("spread"):
        assert str(devices.substitute(name)) == lands


def test_a_tag_that_no_device_can_have(cards: Cards) -> None:
    cards(0)
    with quiet():
        assert not devices.is_missing(f"cuda:{'9' * 5000}")


TRAINING = """
import sys, torch
from torch import distributed as dist
meeting = {"init_method": "file://" + sys.argv[1], "rank": 0, "world_size": 1}
dist.init_process_group("nccl", device_id=torch.device("cuda:0"), **meeting)
assert dist.get_backend() == dist.get_backend(dist.new_group(backend="nccl")) == "gloo"
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
model(torch.ones(4, 2).cuda()).sum().backward()
dist.destroy_process_group()
print("done", torch.cuda.is_available())
sys.exit(int(sys.argv[2]))
"""


@each(("options", "ending"), [((), "3"), (("--pretend-cuda",), "0"), (("--quiet", "--pretend-cuda"), "0")])
def test_a_program_for_nccl_and_what_is_told_at_its_end(tmp_path: Path, options: tuple[str, ...], ending: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    done = forks.run("-m", "transload", "run", *options, script, tmp_path / "meeting", ending, env=env)
    assert done.returncode == int(ending), done.stderr
    assert done.stdout == f"done {'--pretend-cuda' in options}\n"
    told = "transload run changed: cuda → cpu, nccl → gloo, SyncBatchNorm stays BatchNorm" in done.stderr
    assert told == ("--quiet" not in options), done.stderr
    assert ("--pretend-cuda pretends that there is one" in done.stderr) == (not options)
    pretended = "calls that pretended there is a GPU: torch.cuda.is_available()" in done.stderr
    assert pretended == (options == ("--pretend-cuda",)), done.stderr


ENDS = {
    "assert torch.cuda.is_available()": True,
    "if not torch.cuda.is_available():\n    print('sorry')\n    raise SystemExit(1)": True,
    "if torch.cuda.is_available() is False:\n    exit(2)": True,
    "rank = 3 % torch.cuda.device_count()": True,
    "assert torch.ones(1).cuda().is_cuda": True,
    "torch.cuda.is_available()\n" + "\n" * 9 + "raise RuntimeError('No GPU was found')": True,
    "torch.cuda.is_available()\n" + "\n" * 9 + "{}['x']": False,
    "torch.cuda.is_available()\n" + "\n" * 9 + "open('no/cuda.pt')": False,
    "torch.cuda.is_available()\ntorch.cuda.CUDAGraph()": False,
    "torch.cuda.is_available()\ntorch.zeros(2, 3) @ torch.zeros(2, 3)": True,  # it had just asked
    "torch.utils.data.DataLoader([1], pin_memory=True)\nassert False": False,  # torch asked
    "exit(3)": False,
}


@each("text", ENDS)
def test_pretending_is_advised_where_it_would_help(text: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import torch\n" + text)
    with quiet(), pytest.raises(BaseException) as ended:  # noqa: PT011
        runpy.run_path(str(tmp_path / "ends.py"))
    assert script._was_refused(ended.value) == ENDS[text]
    devices.asked.clear()
