"""What ``torch.cuda`` answers where there is no CUDA, so that a program written for a GPU runs to its end on the CPU.

Each answer is given only where what is meant for CUDA goes to the CPU; on a machine with a GPU torch answers itself.
Questions of whether CUDA is there (``is_available``, ``device_count``) are answered truthfully, unless the program is
to be told that it is (``devices.pretending``): one GPU, then.
"""

from __future__ import annotations

import os
import sys
import time
from functools import wraps

from transload.patching import devices
from transload.patching.devices import on_cpu, substitute

TYPE_CHECKING = False  # as in install.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Replace = Callable[[object, str, object], None]


def patch_cuda(torch: Any, replace: Replace) -> None:
    """Replace what only a GPU can answer, by ``replace(owner, name, value)``."""
    for path, answers in _ANSWERS.items():
        owner = _named(torch, path)
        for name, answer in answers.items():
            if hasattr(owner, name):  # not every release of torch has all of them
                replace(owner, name, _answering(f"{path}.{name}", getattr(owner, name), answer))
    for name, pretended in (("is_available", True), ("device_count", 1)):
        replace(torch.cuda, name, _pretending(name, getattr(torch.cuda, name), pretended))
    for name, make in _CLASSES.items():
        replace(torch.cuda, name, _standing_in(f"torch.cuda.{name}", getattr(torch.cuda, name), make))
    replace(torch, "Generator", _standing_in("", torch.Generator, _generator(torch.Generator)))
    for name in dir(torch.cuda):
        if name.endswith("Tensor") and isinstance(host := getattr(torch, name, None), type(torch.FloatTensor)):
            replace(torch.cuda, name, _TensorType(name, (), {"real": getattr(torch.cuda, name), "host": host}))
    replace(torch.Tensor, "type", _typing(torch.Tensor.type))
    replace(torch, "set_default_tensor_type", _default_type(torch.set_default_tensor_type))
    _patch_training(torch, replace)


def _named(torch: Any, path: str) -> Any:
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part, None)
    return owner


# -- questions


def _answering(name: str, real: Any, answer: Callable[..., Any]) -> Any:
    @wraps(real)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if devices.looking or not on_cpu():
            return real(*args, **kwargs)
        if name in _EFFECTS:
            devices.noted[_EFFECTS[name]] = None
        else:
            devices.answered[name] = None
        return answer(*args, **kwargs)

    return answered


def _pretending(name: str, real: Any, answer: Any) -> Any:
    """``is_available`` and ``device_count``: the truth, which a program that dies may have been told."""

    @wraps(real)
    def asked() -> Any:
        found = real()
        if found or not devices.requested or devices.looking:
            return found
        devices.asked.add(name)
        return answer if devices.pretending and on_cpu() else found

    return asked


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to do."""


def _refuse_graphs(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA graphs record the kernels of a GPU, and there is none here: run this part without them")


class Properties:
    """Of a processor, under the names of those of a GPU."""

    def __init__(self) -> None:
        self.name = _cpu_name()
        self.major = self.minor = 0
        self.total_memory = _memory()[1]
        self.multi_processor_count = os.cpu_count() or 1
        self.is_integrated = self.is_multi_gpu_board = 0
        self.warp_size = 1
        self.gcnArchName = self.uuid = ""

    def __repr__(self) -> str:
        return f"transload.run.Properties(name={self.name!r}, total_memory={self.total_memory >> 20}MB)"


def _cpu_name() -> str:
    from platform import machine

    return f"CPU ({machine()}, {os.cpu_count()} cores)"


def _memory() -> tuple[int, int]:
    """Free and all memory of the host, in bytes."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0


def _rng_state(*_: Any, **__: Any) -> Any:
    import torch

    return torch.get_rng_state()


def _initial_seed() -> Any:
    import torch

    return torch.initial_seed()


class Event:
    """``torch.cuda.Event``: all work is done when a call returns, so it is the time at which it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        del stream
        self._at = time.perf_counter_ns()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another event."""
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) / 1e6

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    wait = synchronize = _nothing


class Stream:
    """``torch.cuda.Stream``: there is one, and everything on it is done."""

    cuda_stream = stream_id = device_index = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    def record_event(self, event: Any = None) -> Any:
        """An event that is recorded now."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether all work on it is done."""
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to go back to."""

    wait_event = wait_stream = synchronize = _nothing


class _StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    __exit__ = _nothing


_ANSWERS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.cuda": {
        "empty_cache": _nothing,
        "init": _nothing,
        "ipc_collect": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "reset_max_memory_cached": _nothing,
        "reset_peak_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "set_stream": _nothing,
        "can_device_access_peer": lambda *_: False,
        "current_device": lambda: 0,
        "current_stream": Stream,
        "default_stream": Stream,
        "get_device_capability": lambda *_, **__: (0, 0),
        "get_device_name": lambda *_, **__: _cpu_name(),
        "get_device_properties": lambda *_, **__: Properties(),
        "get_rng_state": _rng_state,
        "initial_seed": _initial_seed,
        "mem_get_info": lambda *_, **__: _memory(),
        "memory_snapshot": lambda *_, **__: [],
        "memory_summary": lambda *_, **__: "",
        "stream": _StreamContext,
        "make_graphed_callables": _refuse_graphs,
    },
    "torch.cuda.nvtx": dict.fromkeys(("mark", "range_end", "range_pop", "range_push", "range_start"), lambda *_: 0),
    "torch.accelerator": dict.fromkeys(("empty_cache", "synchronize"), _nothing),
    "torch.Tensor": {"record_stream": _nothing},
    "torch.cuda.amp.common": {"amp_definitely_not_available": lambda: True},
}


_CLASSES: dict[str, Callable[..., Any]] = {
    "CUDAGraph": _refuse_graphs,
    "Event": Event,
    "Stream": Stream,
    "graph": _refuse_graphs,
}
_EFFECTS = {"torch.cuda.amp.common.amp_definitely_not_available": "no mixed precision"}


# -- classes


class _StandIn(type):
    """A class of torch, whose instances are made by somebody else where there is no GPU."""

    real: Any
    make: Any
    label: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.label and on_cpu():
            devices.answered[cls.label] = None
        elif cls.label:
            return cls.real(*args, **kwargs)
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.real, cls.make) if isinstance(cls.make, type) else cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)


def _standing_in(label: str, real: Any, make: Any) -> Any:
    inside = {"real": real, "make": staticmethod(make), "label": label, "__doc__": real.__doc__}
    return _StandIn(real.__name__, (), inside)


def _generator(real: Any) -> Callable[..., Any]:
    def generator(device: Any = "cpu") -> Any:
        return real(substitute(device))

    return generator


class _TensorType(type):
    """``torch.cuda.FloatTensor`` and its like."""

    real: Any
    host: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.chosen()(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.chosen())

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.chosen(), name)

    def chosen(cls) -> Any:
        """The type of tensors of the CPU, where there is no GPU."""
        return cls.host if on_cpu() else cls.real


def _host_type(given: Any) -> Any:
    """A type of CUDA tensors, or its name, as that of the CPU; anything else unchanged."""
    if isinstance(given, _TensorType):
        return given.chosen()
    if isinstance(given, str) and given.startswith("torch.cuda.") and on_cpu():
        return given.replace("torch.cuda.", "torch.", 1)
    return given


def _typing(real: Any) -> Any:
    @wraps(real)
    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **kwargs) if dtype is None else real(self, _host_type(dtype), *args, **kwargs)

    return type_


def _default_type(real: Any) -> Any:
    @wraps(real)
    def set_default_tensor_type(given: Any) -> None:
        real(_host_type(given))

    return set_default_tensor_type


# -- training on several devices


def _patch_training(torch: Any, replace: Replace) -> None:
    """NCCL becomes gloo, and a model on the CPU needs no list of GPUs."""
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    sync: Any = torch.nn.SyncBatchNorm
    replace(parallel, "__init__", _wrapping(parallel.__init__))
    replace(torch.nn.DataParallel, "__init__", _splitting(torch.nn.DataParallel.__init__))
    convert = sync.convert_sync_batchnorm.__func__

    def convert_sync_batchnorm(cls: Any, module: Any, process_group: Any = None) -> Any:
        if not on_cpu():
            return convert(cls, module, process_group)
        devices.noted["SyncBatchNorm stays BatchNorm"] = None  # it computes on GPUs only
        return module

    replace(sync, "convert_sync_batchnorm", classmethod(convert_sync_batchnorm))
    distributed = torch.distributed
    if not distributed.is_available():
        return
    core = sys.modules["torch.distributed.distributed_c10d"]
    for name, at in (("init_process_group", 0), ("new_group", 2)):
        ours = _grouping(getattr(core, name), at)
        for owner in (core, distributed):
            replace(owner, name, ours)


def _grouping(real: Any, at: int) -> Any:
    """A function whose argument ``backend``, the one ``at`` this position, may say nccl."""

    @wraps(real)
    def group(*args: Any, **kwargs: Any) -> Any:
        if on_cpu():
            kwargs.pop("device_id", None)
            backend = args[at] if len(args) > at else kwargs.get("backend")
            if "nccl" in str(backend).lower():
                devices.noted["nccl → gloo"] = None
                args = (*args[:at], "gloo", *args[at + 1 :]) if len(args) > at else args
                kwargs |= {} if len(args) > at else {"backend": "gloo"}
        return real(*args, **kwargs)

    return group


def _splitting(real: Any) -> Any:
    """``DataParallel``, which without a GPU is the model itself, also where the program believes in one."""

    @wraps(real)
    def init(*args: Any, **kwargs: Any) -> Any:
        if not on_cpu():
            return real(*args, **kwargs)
        devices.noted["DataParallel on one device"] = None
        devices.looking.append("cuda")
        try:
            return real(*args, **kwargs)
        finally:
            devices.looking.pop()

    return init


def _wrapping(real: Any) -> Any:
    """``DistributedDataParallel``: the devices are those of its parameters."""

    @wraps(real)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if on_cpu():
            device_ids = output_device = None
        real(self, module, device_ids, output_device, *args, **kwargs)

    return init
