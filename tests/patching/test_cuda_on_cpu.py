"""What ``torch.cuda`` answers under the patch on a machine without CUDA. ``bench/run.py`` runs complete programs."""

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
from transload.patching import changes, devices, script

if TYPE_CHECKING:
    from tests.patching.conftest import Cards

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("no_cards"),
    pytest.mark.filterwarnings("ignore:.*(set_default_tensor_type|[Ss]parse)", "ignore:.*(CUDA|cuda) is not available"),
]

X = torch.ones(3)


def step(optimizer_class: Any, **options: Any) -> Any:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = optimizer_class([weight], **options)
    optimizer.step()
    return optimizer


def attend_with_gpu_kernels_only() -> None:
    """What ``sdpa_kernel`` and ``sdp_kernel`` do to select kernels that only GPUs have."""
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
    "torch.cuda.memory": lambda: torch.cuda.memory.reset_peak_memory_stats(*()),
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
    "type by name": lambda: X.type("torch.cuda.DoubleTensor"),
    "type": lambda: X.type(torch.cuda.HalfTensor),
    "pin_memory": lambda: torch.empty(3, pin_memory=True),
    "record_stream": lambda: X.record_stream(torch.cuda.current_stream()),
    "synchronize the device of a tensor": lambda: torch.cuda.synchronize(X.device),
    "context of the device of a tensor": lambda: torch.cuda.device(X.device).__enter__(),
    "index from get_device": lambda: torch.zeros(2, device=X.get_device()),
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
    "attention kernels": attend_with_gpu_kernels_only,
    "profile of the GPU only": profile,
}
IN_NEWER_RELEASES: dict[str, Callable[[], Any]] = {
    "torch.Stream": lambda: torch.Stream(device="cuda").record_event(),
    "accelerator": lambda: torch.accelerator.current_stream(*()),
    "accelerator.memory": lambda: torch.accelerator.get_memory_info(*()),
    "accelerator.device_index": lambda: torch.accelerator.device_index(0).__enter__(),
}
FAILS |= {
    name: call for name, call in IN_NEWER_RELEASES.items() if hasattr(getattr(torch, "accelerator", None), "memory")
}

MAY_FAIL: dict[str, Callable[[], Any]] = {  # depends on the build of torch and on the driver
    "get_allocator_backend": lambda: torch.cuda.get_allocator_backend(*()),
    "is_current_stream_capturing": lambda: torch.cuda.is_current_stream_capturing(*()),
    "_record_memory_history": lambda: torch.cuda.memory._record_memory_history(max_entries=9),
    "nccl": lambda: torch.cuda.nccl.version(*()),
    "sparse": lambda: torch.cuda.sparse.FloatTensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1)),
}
if hasattr(getattr(torch, "accelerator", None), "memory"):
    MAY_FAIL["torch.Event"] = lambda: torch.Event(device="cuda", enable_timing=True).record()


@each("name", FAILS)
def test_cuda_call_fails_without_the_patch_and_works_with_it(name: str) -> None:
    with pytest.raises(Exception, match=r".+"):  # NVMLError is an Exception, not a RuntimeError
        FAILS[name]()
    with quiet_patch():
        FAILS[name]()


@each("name", MAY_FAIL)
def test_cuda_call_works_with_the_patch(name: str) -> None:
    with quiet_patch():
        MAY_FAIL[name]()


def quiet_patch(device: str = "auto") -> Any:
    warnings.simplefilter("ignore", transload.LandingWarning)
    return transload.patch(device)


def test_cuda_properties_and_types_describe_the_cpu() -> None:
    with quiet_patch():
        properties = torch.cuda.get_device_properties("cuda:0")
        assert properties.total_memory > 0
        assert properties.name.startswith("CPU (")
        assert torch.cuda.get_device_capability() == (0, 0)
        tensor = torch.cuda.DoubleTensor(2, 3)
        assert (tensor.dtype, tensor.device.type, tensor.shape) == (torch.float64, "cpu", (2, 3))
        assert isinstance(X, torch.cuda.FloatTensor)
        assert not isinstance(X, torch.cuda.DoubleTensor)
        assert torch.cuda.FloatTensor.dtype == torch.float32
        assert X.type(torch.cuda.IntTensor).dtype == torch.int32
        assert X.type() == "torch.FloatTensor"
        torch.set_default_tensor_type("torch.cuda.FloatTensor")  # CUDA builds of torch accept this without a GPU, too
        assert torch.ones(1).device.type == "cpu"


def test_nvtx_ranges_do_nothing() -> None:
    """They fail where torch is built without CUDA."""
    with quiet_patch(), torch.cuda.nvtx.range("a"):
        assert torch.cuda.nvtx.range_push("b") == 0


def test_events_measure_time() -> None:
    with quiet_patch():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with pytest.raises(ValueError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        torch.cuda.current_stream().record_event(end)
        assert 0 <= start.elapsed_time(end) < 60_000
        assert end.query()
        assert isinstance(end, torch.cuda.Event)


def test_streams_behave_as_one_stream() -> None:
    with quiet_patch():
        assert torch.cuda.current_stream() == torch.cuda.default_stream("cuda:0")
        side = torch.cuda.Stream()
        assert isinstance(side, torch.cuda.Stream)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
        context = torch.cuda.stream(side)
        assert isinstance(context, torch.cuda.StreamContext)
        assert context.stream is side


def test_cuda_generator_is_a_torch_generator() -> None:
    real = torch.Generator
    with quiet_patch():
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert type(generator) is real
        assert isinstance(generator, torch.Generator)
        assert issubclass(real, torch.Generator)
        assert torch.rand(2, generator=generator, device="cuda").shape == (2,)
        assert torch.Generator().device.type == "cpu"
    assert torch.Generator is real


def test_cuda_random_state_is_that_of_the_cpu() -> None:
    with quiet_patch():
        torch.manual_seed(3)
        state, drawn = torch.cuda.get_rng_state(), torch.randn(1, device="cuda")
        ways: tuple[Callable[[], Any], ...] = (
            lambda: torch.cuda.manual_seed(3),
            lambda: torch.cuda.manual_seed_all(3),
            lambda: torch.cuda.default_generators[0].manual_seed(3),
            lambda: torch.cuda.set_rng_state(state, "cuda:0"),
            lambda: torch.cuda.set_rng_state_all([state, torch.zeros(16, dtype=torch.uint8)]),  # as from a GPU
        )
        for reseed in ways:
            reseed()
            assert torch.equal(torch.randn(1, device="cuda"), drawn)
        assert torch.cuda.initial_seed() == 3


def test_manual_seed_is_not_a_request_for_cuda() -> None:
    with warnings.catch_warnings(), transload.patch():
        warnings.simplefilter("error")
        torch.manual_seed(3)
    assert "answered" not in {kind for kind, _, _ in changes.noted}


def test_data_parallel_functions_split_the_work_without_gpus() -> None:
    from torch.nn import parallel

    x = torch.arange(12.0).view(4, 3)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval()
    with quiet_patch():
        parts = parallel.scatter(x, [0, 1])
        copies = parallel.replicate(layers, [0, 1])
        out = parallel.gather(parallel.parallel_apply(copies, parts, devices=[0, 1]), 0)
        assert torch.equal(out, layers(x))
        assert torch.equal(out, parallel.data_parallel(layers, x, [0, 1]))
        out.pow(2).sum().backward()
        split, layers[0].weight.grad = layers[0].weight.grad, None
        layers(x).pow(2).sum().backward()
        assert torch.allclose(split, layers[0].weight.grad)
        assert [len(part) for part in parallel.comm.scatter(x, [0, 1], chunk_sizes=[1, 3])] == [1, 3]
        assert torch.equal(parallel.comm.gather(parts, dim=0, destination=0), x)
        assert torch.equal(parallel.comm.reduce_add([x, x, x], destination=0), 3 * x)
        assert torch.equal(parallel.comm.reduce_add_coalesced([[x], [x]])[0], 2 * x)
        assert parallel.gather([x.sum(), x.sum()], 0).tolist() == [66.0, 66.0]


def test_capturable_optimizer_of_a_gpu_works_on_the_cpu() -> None:
    with quiet_patch():
        optimizer = step(torch.optim.AdamW, capturable=True, fused=True)
        states = optimizer.state_dict()
        states["param_groups"][0]["capturable"] = True  # as saved on a GPU
        optimizer.load_state_dict(states)
        optimizer.step()
        assert not optimizer.param_groups[0]["capturable"]


def test_pretending_makes_tensors_report_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_patch():
        assert not X.is_cuda
        assert X.get_device() == -1
        monkeypatch.setattr(devices, "pretending", True)
        assert X.is_cuda
        assert torch.nn.Parameter(X).is_cuda
        assert X.get_device() == 0
        assert torch.nn.LSTM(2, 2).cuda()(torch.ones(1, 2).cuda())[0].shape == (1, 2)
    assert not X.is_cuda


def test_pretending_does_not_change_cpu_tensors_where_a_gpu_exists(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(1)
    monkeypatch.setattr(devices, "pretending", True)
    with transload.patch():
        assert not X.is_cuda
        assert X.get_device() == -1
    assert not devices.asked


def test_cuda_graph_raises_an_error_with_the_reason() -> None:
    with quiet_patch(), pytest.raises(RuntimeError, match="CUDA graphs record the kernels of a GPU"):
        torch.cuda.CUDAGraph()
    with quiet_patch():  # libraries name the class in annotations
        assert torch.cuda.CUDAGraph | None


def test_compiling_a_cuda_kernel_raises_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")  # cpp_extension imports it
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    for compile_step in ("_get_cuda_arch_flags", "_join_cuda_home"):
        with (
            quiet_patch(),
            pytest.raises(RuntimeError, match="compiled with nvcc and runs on a GPU, and there is none"),
        ):
            getattr(cpp_extension, compile_step)()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    with quiet_patch():
        assert "-gencode=arch=compute_90,code=sm_90" in cpp_extension._get_cuda_arch_flags()


def test_is_available_is_false_unless_pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_patch():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert list(devices.asked.values()) == ["torch.cuda.is_available()", "torch.cuda.device_count()"]
        monkeypatch.setattr(devices, "pretending", True)
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert str(X.to("cuda").device) == "cpu"
        assert isinstance(torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda())(torch.ones(1, 2)), torch.Tensor)
    assert not torch.cuda.is_available()


def test_pretending_works_where_is_available_calls_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # As CUDA builds do with PYTORCH_NVML_BASED_CUDA_CHECK=1, which Lightning sets.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "of this test")  # so that devices are counted again
    monkeypatch.setattr(devices, "pretending", True)
    with quiet_patch():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1


def test_cuda_calls_are_not_replaced_where_a_gpu_exists(cards: Cards) -> None:
    cards(1)
    with transload.patch(), pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.Stream()
    assert "answered" not in {kind for kind, _, _ in changes.noted}


@pytest.mark.parametrize(("name", "expected"), [("cuda:0", "cuda:0"), ("cuda:2", "cuda:0"), ("cuda:5", "cuda:1")])
def test_spread_distributes_absent_devices_over_the_gpus(name: str, expected: str, cards: Cards) -> None:
    cards(2)
    with quiet_patch("spread"):
        assert str(devices.substitute(name)) == expected


def test_device_index_of_5000_digits_is_not_missing(cards: Cards) -> None:
    cards(0)
    with quiet_patch():
        assert not devices.is_missing(f"cuda:{'9' * 5000}")


TRAINING = """
import sys, torch
from torch import distributed as dist
meeting = {"init_method": "file://" + sys.argv[1], "rank": 0, "world_size": 1}
dist.init_process_group("nccl", device_id=torch.device("cuda:0"), **meeting)
assert dist.get_backend() == dist.get_backend(dist.new_group(backend="nccl")) == "gloo"
try:
    from torch.distributed.device_mesh import DeviceMesh
except ImportError:  # torch 2.1
    from torch.distributed._tensor.device_mesh import DeviceMesh
assert DeviceMesh("cuda", [0]).device_type == "cpu"
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
model(torch.ones(4, 2).cuda()).sum().backward()
dist.destroy_process_group()
print("done", torch.cuda.is_available())
sys.exit(int(sys.argv[2]))
"""


@each(("options", "exit_code"), [((), "3"), (("--pretend-cuda",), "0"), (("--quiet", "--pretend-cuda"), "0")])
def test_nccl_program_runs_on_gloo_and_changes_are_reported_at_exit(
    tmp_path: Path, options: tuple[str, ...], exit_code: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    process = forks.run("-m", "transload", "run", *options, script, tmp_path / "meeting", exit_code, env=env)
    assert process.returncode == int(exit_code), process.stderr
    assert process.stdout == f"done {'--pretend-cuda' in options}\n"
    reported = "transload run changed: cuda → cpu, nccl → gloo, SyncBatchNorm stays BatchNorm" in process.stderr
    assert reported == ("--quiet" not in options), process.stderr
    assert ("--pretend-cuda pretends that there is one" in process.stderr) == (not options)
    pretended = "calls that pretended there is a GPU: torch.cuda.is_available()" in process.stderr
    assert pretended == (options == ("--pretend-cuda",)), process.stderr


EXITS = {
    "assert torch.cuda.is_available()": True,
    "if not torch.cuda.is_available():\n    print('sorry')\n    raise SystemExit(1)": True,
    "if torch.cuda.is_available() is False:\n    exit(2)": True,
    "rank = 3 % torch.cuda.device_count()": True,
    "assert torch.ones(1).cuda().is_cuda": True,
    "torch.cuda.is_available()\n" + "\n" * 9 + "raise RuntimeError('No GPU was found')": True,
    "torch.cuda.is_available()\n" + "\n" * 9 + "{}['x']": False,
    "torch.cuda.is_available()\n" + "\n" * 9 + "open('no/cuda.pt')": False,
    "torch.cuda.is_available()\ntorch.cuda.CUDAGraph()": False,
    "torch.cuda.is_available()\ntorch.zeros(2, 3) @ torch.zeros(2, 3)": True,  # it had just queried CUDA
    "torch.utils.data.DataLoader([1], pin_memory=True)\nassert False": False,  # torch queried CUDA, not the program
    "exit(3)": False,
}


@each("text", EXITS)
def test_pretend_cuda_is_advised_only_where_it_would_help(text: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import torch\n" + text)
    with quiet_patch(), pytest.raises(BaseException) as raised:  # noqa: PT011
        runpy.run_path(str(tmp_path / "ends.py"))
    assert script._was_refused(raised.value) == EXITS[text]
    devices.asked.clear()
