"""What the installed release of torch asks of CUDA, compared with what the patch answers.

These tests read the installed torch, so that they show what a new release adds and the patch lacks.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.each import each, for_each

import transload
from transload.patching import devices, torch_patches

torch = pytest.importorskip("torch")

ROOT = Path(torch.__file__).parent


@pytest.fixture
def _pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "pretending", True)
    with warnings.catch_warnings(), transload.patch():
        warnings.simplefilter("ignore")
        yield


pretending = pytest.mark.usefixtures("_pretending")


def declared(name: str) -> set[str]:
    """What torch's stub declares for a class of ``torch._C``, which builds without CUDA do not have."""
    stub = (ROOT / "_C" / "__init__.pyi").read_text(encoding="utf-8")
    text = re.search(rf"^class {name}\b.*\n(?:    .*\n|\n)*", stub, re.MULTILINE)
    assert text, f"torch has no {name} any more"
    (definition,) = ast.parse(text[0]).body
    assert isinstance(definition, ast.ClassDef)
    members = [getattr(each, "target", each) for each in definition.body]
    return {getattr(each, "id", "") or getattr(each, "name", "") for each in members}


HANDLES = {"_as_parameter_", "__cuda_stream__", "from_ipc_handle", "ipc_handle"}
"""They hand an object of a GPU to C code or to another process."""


@each(
    ("ours", "stub", "paths"),
    [
        (torch_patches._Stream, "_CudaStreamBase", ("torch.Stream", "torch.cuda.Stream")),
        (torch_patches._Event, "_CudaEventBase", ("torch.Event", "torch.cuda.Event")),
        (torch_patches._properties, "_CudaDeviceProperties", ("torch._C._CudaDeviceProperties",)),
    ],
)
def test_stand_in_has_every_attribute_of_what_it_replaces(
    ours: Callable[[], object], stub: str, paths: tuple[str, ...]
) -> None:
    names = declared(stub)
    for path in paths:
        owner, _, name = path.rpartition(".")
        names |= set(dir(getattr(sys.modules[owner], name, None)))
    special = {name for name in names if re.fullmatch(r"__(?!enter|exit)\w+__|_pybind11\w+", name)}
    assert sorted(names - set(dir(ours())) - special - HANDLES) == []


ASKED = """torch.cuda torch.cuda.memory torch.cuda.random torch.cuda.nvtx torch.accelerator torch.accelerator.memory
torch.accelerator.random torch.backends.cuda"""
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "debug_mode": lambda: "warn",
    "device": lambda: 0,
    "enabled": lambda: True,
    "fraction": lambda: 0.5,
    "msg": lambda: "a range",
    "new_state": torch.get_rng_state,
    "new_states": lambda: [torch.get_rng_state()],
    "peer_device": lambda: 1,
    "range_id": lambda: 0,
    "seed": lambda: 1,
    "stream": lambda: torch.cuda.Stream(*()),
}
FOR_GPUS = """allow_fp16_bf16_reduction_math_sdp caching_allocator_alloc caching_allocator_delete
can_use_cudnn_attention can_use_efficient_attention can_use_flash_attention change_current_allocator check_error
current_blas_handle current_solver_handle export_dot export_graph_data get_stream_from_external graph_pool_handle
make_graphed_callables use_mem_pool"""
"""Functions without an answer: graphs are refused, and the others need what only a GPU or its libraries have."""


@pretending
def test_every_public_function_of_cuda_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(nvmlInit=lambda: None, NVMLError_DriverNotLoaded=RuntimeError)  # as beside a hidden GPU
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def call(name: str) -> None:
        function = functions[name]
        parameters = inspect.signature(function).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
        function(*[ARGUMENTS[each]() for each in needed])

    functions = {}
    for path in ASKED.split():
        module = sys.modules.get(path)  # older releases have fewer
        for name in set(getattr(module, "__all__", ())) - set(FOR_GPUS.split()):
            value = getattr(module, name)
            if inspect.isroutine(value):
                functions[f"{path}.{name}"] = value
    assert len(functions) > 90
    with torch.random.fork_rng(devices=[]):
        for_each(sorted(functions), call)


KNOWN = """torch._C._accelerator_getAccelerator torch._C._cuda_getArchFlags torch.cuda._is_compiled
torch.cuda._is_in_bad_fork torch.cuda._lazy_call torch.cuda._lazy_init torch.cuda._memory_viz torch.cuda._utils
torch.cuda.memory._record_memory_history torch.cuda.memory._snapshot"""
"""Private names that work without a GPU, or that the patch replaces, or that only a program with one reaches."""


def test_training_code_of_torch_calls_no_other_private_function_of_cuda() -> None:
    private = re.compile(r"\btorch\.cuda(?:\.\w+)?\._\w+|\btorch\._C\._(?:cuda|accelerator)_\w+")
    called: dict[str, set[str]] = {}
    for folder in ("amp", "autograd", "nn", "optim", "utils"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in private.findall(path.read_text(encoding="utf-8")):
                called.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in called.items() if name not in KNOWN.split()} == {}


KEPT = {
    "torch.cuda.random.current_device": "the functions there that call it are replaced",
    "torch.cuda.random.device_count": "as above",
    "torch.cuda.amp.amp_definitely_not_available": "re-exported, and called by nobody there",
    "torch.distributed._tensor.device_mesh.init_process_group": "called without a backend; only in torch 2.1",
    "torch.distributed._tensor.device_mesh.new_group": "as above",
    "torch.nn.parallel.data_parallel.parallel_apply": "all parts are on the CPU",
    "torch.utils.data.dataset.randperm": "called without a device",
}


@pretending
def test_no_module_of_torch_keeps_the_function_that_was_replaced() -> None:
    """Such as one that says ``from torch.cuda import current_stream``."""
    for name in ("amp", "distributed", "nn.parallel", "optim", "profiler", "utils.checkpoint", "utils.data"):
        import_module(f"torch.{name}")
    with suppress(ImportError):
        import_module("torch.distributed._tensor.device_mesh")  # of torch 2.1
    real = {}
    for _, path, names in torch_patches._REPLACED:
        owner = sys.modules.get(path)
        for name in names.split() if owner else ():
            ours = getattr(owner, name, None)
            real[id(getattr(ours, "__wrapped__", None))] = ours
    real.pop(id(None), None)
    kept = {
        f"{path}.{name}"
        for path, module in sys.modules.items()
        if path.startswith("torch.") and not path.startswith("torch._C")
        for name, value in vars(module).items()
        if id(value) in real
    }
    assert sorted(kept - set(KEPT)) == []


# -- training


def train(name: str, *, scaled: bool = False, **options: Any) -> Any:
    """Two steps of an optimizer on a model that is sent to CUDA; the parameter afterwards."""
    torch.manual_seed(0)
    sparse = name == "SparseAdam"
    model = torch.nn.Embedding(2, 2, sparse=True) if sparse else torch.nn.Linear(2, 2, bias=False)
    if devices.requested:
        model.cuda()
    x = torch.tensor([0, 1]) if sparse else torch.tensor([[1.0, 2.0]])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    scaler = torch.cuda.amp.GradScaler() if scaled else None

    def closure() -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaled):
            loss = model(x.cuda() if devices.requested else x).pow(2).sum()
        (scaler.scale(loss) if scaler else loss).backward()
        return loss

    for _ in range(2):
        if name == "LBFGS":
            optimizer.step(closure)
            continue
        closure()
        if scaler is None:
            optimizer.step()
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())
    return model.weight.detach()


def optimizers() -> list[tuple[str, dict[str, bool]]]:
    """Every optimizer, alone and with each of the options that choose how it steps."""
    classes = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    del classes["Optimizer"]
    optional = [{}, {"foreach": True}, {"fused": True}, {"capturable": True}]
    return [
        (name, options)
        for name, value in classes.items()
        for options in optional
        if options.keys() <= inspect.signature(value).parameters.keys()
    ]


@each("pretend", [False, True])
def test_every_optimizer_steps_as_on_the_cpu(pretend: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pretending", pretend)

    def check(case: tuple[str, dict[str, bool]]) -> None:
        name, options = case
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = train(name)
            with transload.patch():
                trained = [train(name, **options)]
                if name not in ("LBFGS", "SparseAdam"):
                    trained.append(train(name, scaled=True, **options))
            for weight in trained:
                torch.testing.assert_close(weight, expected)

    for_each(optimizers(), check)


@pretending
def test_lightning_trains_with_mixed_precision() -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    model = Model()
    before = model.layer.weight.detach().clone()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 2}
    trainer = lightning.Trainer(accelerator="gpu", devices=1, precision="16-mixed", **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 2), pin_memory=True))
    assert trainer.global_step == 2
    assert not torch.equal(model.layer.weight, before)
