from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.release import needs_torch

import transload
from transload.patching.torch_patches import _REPLACED

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_cards")


patched = pytest.mark.usefixtures("_patched")

X = torch.ones(3)
CALLS: dict[str, Callable[[], Any]] = {
    "to": lambda: X.to("cuda:1"),
    "to-device": lambda: X.to(torch.device("cuda:1")),
    "to-index": lambda: X.to(1),
    "to-by-name": lambda: X.to(device="cuda:1", non_blocking=True),
    "cuda": lambda: X.cuda(None),
    "cuda-index": lambda: X.cuda(1, non_blocking=True),
    "cuda-by-name": lambda: X.cuda(device="cuda:1", memory_format=torch.preserve_format),
    "zeros": lambda: torch.zeros(3, device="cuda:1"),
    "tensor": lambda: torch.tensor([1.0], device=torch.device("cuda")),
    "index": lambda: torch.rand(3, device=1),
    "like": lambda: torch.empty_like(X, device="cuda:1"),
    "new": lambda: X.new_full((2,), 1.0, device="cuda:1"),
    "as_tensor": lambda: torch.as_tensor([1, 2], device="cuda:0"),
    "sparse": lambda: torch.sparse_coo_tensor([[0]], [1.0], device="cuda:1"),
    "frequencies": lambda: torch.fft.fftfreq(4, device="cuda:1"),
    "module": lambda: torch.nn.Linear(2, 2).to("cuda:1").weight,
    "module-cuda": lambda: torch.nn.Linear(2, 2).cuda(1).bias,
    "module-created-there": lambda: torch.nn.Linear(2, 2, device="cuda:1").weight,
    "module-to-empty": lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda:1").weight,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)).cuda(),
    "storage": lambda: X.untyped_storage().cuda(1),
    "script": lambda: torch.jit.script(torch.nn.Linear(2, 2)).to("cuda:1").weight,
}


@patched
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_with_an_absent_device_uses_the_cpu(call: Callable[[], Any]) -> None:
    assert str(call().device) == "cpu"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_with_an_absent_device_fails_without_the_patch(call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, AssertionError, TypeError)):
        call()


@patched
def test_other_arguments_are_kept() -> None:
    assert X.to("cuda:1", torch.float64).dtype == torch.float64
    assert X.to(device="cuda:1", dtype=torch.float16, copy=True).data_ptr() != X.data_ptr()
    assert X.to(torch.int8).dtype == torch.int8
    assert X.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert X.to("cuda:1") is X
    tensor = torch.full((2, 3), 7, dtype=torch.int16, device="cuda:1", requires_grad=False)
    assert tensor.tolist() == [[7] * 3] * 2
    assert torch.rand(2, device="cuda:1", requires_grad=True).requires_grad


@patched
def test_gradients_flow_through_patched_calls() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight.to("cuda:1") * weight.cuda()).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


@patched
def test_absent_default_device_becomes_the_cpu() -> None:
    with torch.device("cuda:1"):
        assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device("cuda:1")
    try:
        assert torch.ones(2).device.type == "cpu"
        torch.set_default_device("meta")
        assert torch.ones(2).device.type == "meta"
    finally:
        torch.set_default_device(None)


@patched
def test_selecting_an_absent_gpu_does_nothing() -> None:
    torch.cuda.set_device(1)
    torch.cuda.set_device("cuda:1")
    torch.cuda.synchronize()
    torch.cuda.synchronize(1)
    with torch.cuda.device(1), torch.cuda.device("cuda:1"), torch.cuda.device_of(X):
        assert X.pin_memory() is X


@patched
def test_tensor_subclass_keeps_its_torch_function() -> None:
    seen = []

    class Logged(torch.Tensor):  # type: ignore[name-defined]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    assert type(torch.ones(2).as_subclass(Logged).to("cuda:1")) is Logged
    assert "to" in seen


@patched
def test_torch_function_mode_sees_the_substituted_device() -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            seen.append((func.__name__, str((kwargs or {}).get("device"))))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.zeros(2, device="cuda:1")
    assert ("zeros", "cpu") in seen


@patched
def test_patched_functions_can_be_pickled_and_keep_their_metadata() -> None:
    assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
    assert copy.deepcopy(torch.zeros) is torch.zeros
    assert (torch.zeros.__name__, torch.zeros.__module__) == ("zeros", "torch")
    assert torch.zeros.__doc__
    assert torch.Tensor.to.__doc__
    assert "map_location" in inspect.signature(torch.jit.load).parameters


@patched
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_patched_functions_can_be_scripted(tmp_path: Path) -> None:
    source = tmp_path / "scripted.py"  # TorchScript reads the source of what it compiles
    source.write_text(
        "import torch\n\n\ndef total(n: int):\n"
        "    return torch.zeros(n, device='cpu') + torch.arange(n).to('cpu') + torch.ones(n)\n",
        encoding="utf-8",
    )
    names: dict[str, Any] = {"__name__": "scripted"}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), names)  # noqa: S102
    assert torch.jit.script(names["total"])(3).tolist() == [1.0, 2.0, 3.0]


def test_compile_works_with_and_after_the_patch() -> None:
    def moved(x: Any) -> Any:
        return torch.zeros(3, device="cpu") + x.to("cpu") + torch.ones_like(x, device=x.device)

    def compiled() -> list[float]:
        torch._dynamo.reset()
        result: list[float] = torch.compile(moved, backend="eager", fullgraph=True)(X).tolist()
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with transload.patch():
            assert compiled() == [2.0] * 3
        assert compiled() == [2.0] * 3
        with transload.patch():
            assert compiled() == [2.0] * 3


@patched
def test_torchscript_file_of_an_absent_device_loads_on_the_cpu(data: Path) -> None:
    path = data / "h200" / "torchscript_cuda0.pt"
    for location in (None, "cuda:1", torch.device("cuda:0"), "cpu"):
        loaded = torch.jit.load(path, map_location=location)
        assert {str(parameter.device) for parameter in loaded.parameters()} == {"cpu"}
    with path.open("rb") as file:
        assert {str(parameter.device) for parameter in torch.jit.load(file, "cuda:1").parameters()} == {"cpu"}


LACKING = SimpleNamespace()  # stands for what this release does not have


def resolve(path: str) -> Any:
    import_module("torch.utils._device")
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part, None) or LACKING
    return owner


def test_unpatch_restores_every_attribute() -> None:
    paths = [(path, name) for _, path, names in _REPLACED for name in names.split()]
    before = {(path, name): getattr(resolve(path), name, None) for path, name in paths}
    defined = {(path, name): name in vars(resolve(path)) for path, name in paths}
    table = dict(torch.jit._builtins._get_builtin_table())
    with transload.patch():
        assert torch.zeros is not before["torch", "zeros"]
    assert {(path, name): getattr(resolve(path), name, None) for path, name in paths} == before
    assert {(path, name): name in vars(resolve(path)) for path, name in paths} == defined
    assert torch.jit._builtins._get_builtin_table() == table


@needs_torch(2, 13)
def test_replaced_names_exist_in_torch() -> None:
    """A name that torch never had would be a mistake."""
    missing = {path for _, path, names in _REPLACED for name in names.split() if not hasattr(resolve(path), name)}
    assert missing <= {"torch.accelerator.random", "torch.cuda.amp.grad_scaler"}  # since 2.15; until 2.2


def test_every_device_constructor_of_torch_is_replaced() -> None:
    from torch.utils._device import _device_constructors

    replaced = {getattr(resolve(path), name, None) for _, path, names in _REPLACED for name in names.split()}
    missing = {constructor.__name__ for constructor in _device_constructors() if constructor not in replaced}
    assert missing <= {"fill", "normal", "vander"}  # listed by older releases; they take no device


def test_wrapper_around_a_patched_function_survives_unpatch() -> None:
    real = torch.zeros
    with transload.patch():
        patched_zeros = torch.zeros

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return patched_zeros(*args, **kwargs)

        torch.zeros = wrapper
    try:
        assert torch.zeros is wrapper
        assert torch.zeros(2).tolist() == [0, 0]
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda:1")
    finally:
        torch.zeros = real


def test_arguments_are_unchanged_where_the_gpu_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    calls = []
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.Tensor, "to", lambda _, *args, **kwargs: calls.append((args, kwargs)), raising=False)
    with transload.patch():
        torch.zeros(2, device="cuda:1")
        torch.cuda.set_device(1)
        X.to("cuda:1", non_blocking=True)
    assert calls == [((2,), {"device": "cuda:1"}), 1, (("cuda:1",), {"non_blocking": True})]
