"""What is patched in torch: restoring a storage in ``torch.load``, functions that take a device, and ``torch.cuda``.

torch has a public registry of functions that restore a storage to the device that the file, or ``map_location``, names.
Ours come first, before torch looks for a device that is missing, and last, before it gives up. So ``torch.load`` itself
is not replaced, and works with all its arguments and wherever it was imported. Every other function that takes a device
is replaced by a wrapper that substitutes the device and calls it.

``torch.cuda`` answers for the CPU, so that a program written for a GPU runs to its end there; but only if the CPU is
used instead of CUDA. On a machine with a GPU, torch itself answers. Whether there is a GPU (``is_available``,
``device_count``) is answered truthfully, unless we pretend that there is one (``devices.pretending``).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial, wraps
from inspect import signature
from itertools import chain
from platform import machine
from types import SimpleNamespace
from typing import Any

from transload.patching import changes, devices
from transload.patching.devices import is_missing, on_cpu, substitute

Replace = Callable[[object, str, object], None]
Replaced = tuple[tuple[Callable[..., Any], str, str], ...]
_FIRST, _LAST = -1_000_003, 1_000_003  # priorities in the registry must be unique
_DEVICE = re.compile(r"[a-z]\w{0,30}(:\d{1,3})?")


def patch_torch(
    torch: Any, replace: Replace, at_undo: Callable[[Callable[[], None]], None], when_imported: Any
) -> None:
    """Patch torch. ``replace`` sets an attribute until the patches are removed; ``at_undo`` gets functions to run then.

    ``when_imported`` calls a function after a module is imported.
    """
    serialization = torch.serialization

    def restored(storage: Any, tag: str) -> Any:
        device = devices.substitute_name(tag)
        return serialization.default_restore_location(storage, device) if device and device != tag else None

    def restore_missing(storage: Any, location: Any) -> Any:
        tag = location.decode("ascii", "replace") if isinstance(location, bytes) else location
        return restored(storage, tag) if isinstance(tag, str) and is_missing(tag) else None

    def restore_unknown(storage: Any, location: Any) -> Any:
        is_device = devices.requested and isinstance(location, str) and _DEVICE.fullmatch(location)
        return restored(storage, location) if is_device else None

    def unregister() -> None:  # torch has no public function for it; without the patch our entries do nothing
        registry = getattr(serialization, "_package_registry", [])
        registry[:] = [entry for entry in registry if entry[2] not in (restore_missing, restore_unknown)]

    serialization.register_package(_FIRST, lambda _: None, restore_missing)
    serialization.register_package(_LAST, lambda _: None, restore_unknown)
    at_undo(unregister)
    _replace_classes(torch, replace)

    # torch fills these tables of its functions at first use: let it do so before they are replaced.
    from torch.utils._device import _device_constructors

    builtins = torch.jit._builtins
    _device_constructors()
    builtins._find_builtin(None)
    _clear_compiler_tables()
    at_undo(_clear_compiler_tables)

    def patch(module: Any, replaced: Replaced) -> None:
        for instead, path, names in replaced:
            owner = module
            for part in path.removeprefix(module.__name__).split(".")[1:]:
                owner = getattr(owner, part, None)
            for name in names.split():
                real = getattr(owner, name, None)
                if owner is None or real is None:  # not every release of torch has all of them
                    continue
                bound = isinstance(vars(owner).get(name), classmethod)
                # It must pickle under torch's name, and TorchScript must find its operator.
                ours = _wrapped(real.__func__ if bound else real, instead)
                within = isinstance(owner, type)
                ours.__module__ = owner.__module__ if within else owner.__name__
                ours.__name__, ours.__qualname__ = name, f"{owner.__qualname__}.{name}" if within else name
                replace(owner, name, classmethod(ours) if bound else ours)
                home = sys.modules.get(getattr(real, "__module__", None) or "", owner)
                if vars(home).get(name) is real:  # torch.cuda.memory.empty_cache is torch.cuda.empty_cache
                    replace(home, name, ours)
                operator = builtins._find_builtin(real)
                if operator is not None:
                    builtins._register_builtin(ours, operator)
                    at_undo(partial(builtins._get_builtin_table().pop, id(ours), None))

    patch(torch, _REPLACED)
    for path, replaced in _REPLACED_LATER.items():
        when_imported(path, partial(patch, replaced=replaced))


def _wrapped(real: Any, instead: Any) -> Any:
    @wraps(real)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return instead(real, *args, **kwargs)

    return ours


def _clear_compiler_tables() -> None:
    """Clear the compiler's tables of torch functions, so that the next compilation fills them again."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    for name in ("get_torch_obj_rule_map", "get_tensor_method"):
        table: Any = getattr(rules, name, None)
        if hasattr(table, "cache_clear"):
            table.cache_clear()
    older: Any = getattr(sys.modules.get("torch._dynamo.allowed_functions"), "_allowed_function_ids", None)
    if hasattr(older, "function_ids"):  # before torch 2.2
        older.function_ids = None


# -- replacements of functions, which get the original as their first argument


def _make(real: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.zeros`` and all others that take ``device=``."""
    if kwargs.get("device") is not None:
        kwargs["device"] = substitute(kwargs["device"])
    if kwargs.get("pin_memory") and on_cpu():
        kwargs["pin_memory"] = False
    return real(*args, **kwargs)


def _move(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``.to``, whose device is its first argument, or a keyword, or missing; and ``with torch.device(...)``."""
    return real(self, substitute(args[0]), *args[1:], **kwargs) if args else _make(real, self, **kwargs)


def _send(real: Any, self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``.cuda`` and the like; without an argument, the current device of that kind."""
    kind = real.__name__
    wanted = kind if device is None else device
    target = substitute(wanted)
    if target is wanted:
        return real(self, device, *args, **kwargs)
    if target.type == kind:
        return real(self, target.index, *args, **kwargs)
    kwargs.pop("non_blocking", None)
    return self.cpu(**kwargs) if target.type == "cpu" else self.to(device=target, **kwargs)


def _ask(real: Any, device: Any = None) -> None:
    """``torch.cuda.set_device`` and ``synchronize``: nothing to do where the substitute is not a GPU."""
    wanted = "cuda" if device is None else device
    target = substitute(wanted)
    if target is wanted and not on_cpu():  # else it is the device of a tensor that is on the CPU instead
        real(device)
    elif getattr(target, "type", "") == "cuda":
        real(target)


def _select(real: Any, self: Any, device: Any) -> None:
    """``torch.cuda.device``, which does nothing for -1."""
    target = substitute(device)
    real(self, -1 if on_cpu() or (target is not device and target.type != "cuda") else target)


def _load(real: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.jit.load``, which does not use the registry of ``torch.load``: one device for the whole file."""
    wanted = map_location
    if wanted is None and isinstance(f, str | os.PathLike) and os.path.isfile(f):
        from transload.loading.placement import tags_of
        from transload.opening import inspect

        wanted = next(filter(is_missing, tags_of(inspect(f))), None)
    return real(f, substitute(wanted), *args, **kwargs)


# -- answers


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _refuse_graphs(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA graphs record the kernels of a GPU, and there is none here: run this part without them")


def _refuse_kernels(real: Any, *args: Any, **kwargs: Any) -> Any:
    """What only the compilation of a CUDA kernel calls; with this variable it can be for another machine."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST") or not on_cpu():
        return real(*args, **kwargs)
    raise RuntimeError(
        "a CUDA kernel is compiled with nvcc and runs on a GPU, and there is none here: run this part without it, or "
        "set TORCH_CUDA_ARCH_LIST to compile it for another machine"
    )


def _cpu_name(*_: Any, **__: Any) -> str:
    return f"CPU ({machine()}, {os.cpu_count()} cores)"


def _memory(*_: Any, **__: Any) -> tuple[int, int]:
    """Free and total host memory, in bytes; 0 if unknown."""
    from transload.loading.placement import devices_here

    (host,) = devices_here(["cpu"]).available
    return max(0, host.free), max(0, host.total)


def _properties(*_: Any, **__: Any) -> Any:
    """The properties of the CPU, under the names of those of a GPU."""
    numbers = {"total_memory": _memory()[1], "multi_processor_count": os.cpu_count() or 1, "warp_size": 1}
    of_gpus = dict.fromkeys(_PROPERTIES.split(), 0)
    return SimpleNamespace(name=_cpu_name(), **of_gpus, **numbers, gcnArchName="", uuid="")


def _dtypes(*_: Any, **__: Any) -> dict[str, Any]:
    import torch

    return {"supported_dtypes": {value for value in vars(torch).values() if isinstance(value, torch.dtype)}}


def _generator(method: str) -> Callable[..., Any]:
    """A function that calls a method of the CPU's generator, which is used for every GPU."""

    def call(*args: Any, **__: Any) -> Any:
        import torch

        return getattr(torch.default_generator, method)(*(args if method == "manual_seed" else ()))

    return call


def _set_rng_state(state: Any, *_: Any, **__: Any) -> None:
    import torch

    if state.numel() == torch.get_rng_state().numel():  # a state saved on a GPU is much smaller
        torch.set_rng_state(state)


def _cuda() -> Any:
    import torch

    return torch.device("cuda")


class _Generators(tuple[Any, ...]):
    """``torch.cuda.default_generators``, which is empty until torch finds a GPU."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        import torch

        return (torch.default_generator,)[index] if on_cpu() else super().__getitem__(index)


class _Runtime:
    """``torch.cuda.cudart()``: each call of the CUDA runtime succeeds."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


class _Event:
    """``torch.cuda.Event``: work is done when a call returns, so an event is the time when it was recorded."""

    cuda_event = event_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cpu")
        self._at: int | None = None

    def record(self, stream: Any = None) -> None:
        del stream
        self._at = time.perf_counter_ns()

    def elapsed_time(self, end: _Event) -> float:
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) / 1e6

    def query(self) -> bool:
        return True

    wait = synchronize = _nothing


class _Stream(nullcontext[Any]):
    """``torch.cuda.Stream``: there is only one, on which all work is done."""

    cuda_stream = device_index = device_type = native_handle = priority = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        super().__init__(self)
        self.device = torch.device("cpu")

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    wait_event = wait_stream = synchronize = _nothing


@cache
def _the_stream() -> _Stream:
    return _Stream()


def _copies(tensors: Any, devices: Any, *_: Any, **__: Any) -> list[Any]:
    return [
        [tensor.clone() if index else tensor.view_as(tensor) for tensor in tensors] for index in range(len(devices))
    ]


def _scatter(tensor: Any, devices: Any, chunk_sizes: Any = None, dim: int = 0, *_: Any, **__: Any) -> Any:
    parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return tuple(part.clone() for part in parts)


def _gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
    import torch

    del destination
    return torch.cat([tensor if tensor.dim() else tensor.view(1) for tensor in tensors], dim, out=out)


def _sum(inputs: Any, *_: Any, **__: Any) -> Any:
    return sum(inputs[1:], inputs[0])


def _apply_each(modules: Any, inputs: Any, kwargs_tup: Any = None, *_: Any, **__: Any) -> list[Any]:
    given = [value if isinstance(value, tuple | list) else (value,) for value in inputs]
    return [module(*given[index], **(kwargs_tup[index] if kwargs_tup else {})) for index, module in enumerate(modules)]


def _apply_whole(module: Any, inputs: Any, *_: Any, module_kwargs: Any = None, **__: Any) -> Any:
    return _apply_each([module], [inputs], [module_kwargs or {}])[0]


_NOTHING_TO_DO = """empty_cache init ipc_collect reset_accumulated_host_memory_stats reset_accumulated_memory_stats
reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats reset_peak_memory_stats
set_per_process_memory_fraction set_stream set_sync_debug_mode"""
_NOTHING_TO_ACCELERATE = """empty_cache empty_host_cache reset_accumulated_memory_stats reset_peak_memory_stats
set_device_idx set_device_index set_stream synchronize"""
_ZERO = """clock_rate current_device device_memory_used get_sync_debug_mode memory_usage power_draw temperature
utilization"""
_PROPERTIES = """L2_cache_size clock_rate is_integrated is_multi_gpu_board major max_threads_per_block
max_threads_per_multi_processor memory_bus_width memory_clock_rate minor pci_bus_id pci_device_id pci_domain_id
regs_per_multiprocessor shared_memory_per_block shared_memory_per_block_optin shared_memory_per_multiprocessor"""
_WORKSPACES = "blas_workspace_size cublas_workspace_size cublaslt_workspace_size"
_RANDOM: dict[str, Callable[..., Any]] = {
    "get_rng_state": _generator("get_state"),
    "get_rng_state_all": lambda: [_generator("get_state")()],
    "initial_seed": _generator("initial_seed"),
}
_ANSWERS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.cuda": {
        **dict.fromkeys(_NOTHING_TO_DO.split(), _nothing),
        **dict.fromkeys(_ZERO.split(), lambda *_, **__: 0),
        "can_device_access_peer": lambda *_: False,
        "cudart": _Runtime,
        "current_stream": lambda *_, **__: _the_stream(),
        "default_stream": lambda *_, **__: _the_stream(),
        "get_allocator_backend": lambda: "native",
        "get_device_capability": lambda *_, **__: (0, 0),
        "get_device_name": _cpu_name,
        "get_device_properties": _properties,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        **_RANDOM,
        "is_current_stream_capturing": lambda: False,
        "list_gpu_processes": lambda *_, **__: "GPU:0\nno processes are running",
        "mem_get_info": _memory,
        "memory_snapshot": lambda *_, **__: [],
        "memory_stats": lambda *_, **__: defaultdict(int),
        "memory_summary": lambda *_, **__: "",
        **dict.fromkeys(("graph_pool_handle", "make_graphed_callables"), _refuse_graphs),
        "manual_seed": _generator("manual_seed"),
        **dict.fromkeys(("seed", "seed_all"), _generator("seed")),
        "set_rng_state": _set_rng_state,
    },
    "torch.backends.cuda": {
        **dict.fromkeys(("preferred_blas_library", "preferred_linalg_library"), _nothing),
        **dict.fromkeys(_WORKSPACES.split(), lambda *_, **__: 0),
    },
    "torch.backends.cuda.cuFFTPlanCacheManager": {
        "__getitem__": lambda *_: SimpleNamespace(size=0, max_size=0, clear=_nothing)
    },
    "torch.cuda.memory": {
        **dict.fromkeys(("_dump_snapshot", "_record_memory_history"), _nothing),
        "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
    },
    "torch.cuda.nccl": {"version": lambda: (0, 0, 0)},
    "torch.cuda.profiler": {"cudart": _Runtime, "start": _nothing, "stop": _nothing},
    "torch.cuda.nvtx": dict.fromkeys(("mark", "range_end", "range_pop", "range_push", "range_start"), lambda *_: 0),
    "torch.accelerator": {
        **dict.fromkeys(_NOTHING_TO_ACCELERATE.split(), _nothing),
        **dict.fromkeys(("current_device_idx", "current_device_index"), lambda: 0),
        "current_stream": lambda *_, **__: _the_stream(),
        "get_device_capability": _dtypes,
        "get_memory_info": _memory,
        "memory_stats": lambda *_, **__: defaultdict(int),
    },
    "torch.accelerator.random": _RANDOM,
    "torch.accelerator.device_index": dict.fromkeys(("__enter__", "__exit__"), _nothing),
    # What a program spreads over several GPUs becomes as many parts on the CPU: copies that autograd tracks.
    "torch.nn.parallel": {"data_parallel": _apply_whole, "parallel_apply": _apply_each},
    "torch.nn.parallel._functions.Broadcast": {"apply": lambda to, *given: tuple(chain(*_copies(given, to)))},
    "torch.nn.parallel._functions.Gather": {"apply": lambda _, dim, *given: _gather(given, dim)},
    "torch.nn.parallel._functions.Scatter": {"apply": lambda to, sizes, dim, given: _scatter(given, to, sizes, dim)},
    "torch.nn.parallel.comm": {
        "broadcast": lambda tensor, devices: tuple(copy for (copy,) in _copies([tensor], devices)),
        "broadcast_coalesced": _copies,
        "gather": _gather,
        "reduce_add": _sum,
        "reduce_add_coalesced": lambda inputs, *_, **__: tuple(map(_sum, zip(*inputs, strict=True))),
        "scatter": _scatter,
    },
    "torch.Tensor": {"pin_memory": lambda self, *_, **__: self, "record_stream": _nothing},
}


def _answering(name: str, answer: Callable[..., Any], kind: str = "answered") -> Callable[..., Any]:
    """A replacement that gives this answer on the CPU; ``name`` is listed at the end of the program."""

    def answered(real: Any, *args: Any, **kwargs: Any) -> Any:
        if devices.looking or not on_cpu():
            return real(*args, **kwargs)
        changes.note(kind, name)
        return answer(*args, **kwargs)

    return answered


def _pretending(question: str, answer: Any) -> Callable[..., Any]:
    """A replacement for ``is_available`` and others: records the call, and answers truthfully unless we pretend."""

    def asked(real: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            truth = real(*args, **kwargs)
        except RuntimeError:  # torch.accelerator.current_accelerator() of torch 2.6 raises one where there is none
            if not devices.pretending:
                raise
            truth = None
        if truth not in (0, -1, None) or devices.looking or not is_missing("cuda"):
            return truth
        caller = sys._getframe(2)
        if not caller.f_globals.get("__name__", "").startswith("torch."):
            devices.asked[caller.f_code, caller.f_lineno] = question
            if devices.pretending:
                changes.note("pretended", question)
        elif not question.startswith("torch.cuda."):  # torch itself must know where a tensor is
            return truth
        return answer() if devices.pretending and on_cpu() else truth

    return asked


# -- classes


class _StandIn(type):
    """Replaces a class of torch: without a GPU it makes instances of ``ours``; without a ``label``, always."""

    real: Any
    ours: Any
    label: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        maker = cls.chosen()
        if maker is cls.ours and cls.label:
            changes.note("answered", cls.label)
        return maker(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        is_ours = isinstance(cls.ours, type) and isinstance(instance, cls.ours) and on_cpu()
        return is_ours or isinstance(instance, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)

    def chosen(cls) -> Any:
        """The class or function that makes the instances."""
        return cls.ours if not cls.label or on_cpu() else cls.real


def _replace_classes(torch: Any, replace: Replace) -> None:
    """Put stand-ins into torch: events, streams, graphs, generators, ``torch.cuda.FloatTensor`` and the like."""

    def stand_in(owner: Any, name: str, ours: Any, label: str | None = None) -> None:
        real = getattr(owner, name, None)
        if real is None:  # in an older release
            return
        label = f"{owner.__name__}.{name}" if label is None else label
        kept = staticmethod(ours) if not isinstance(ours, type) else ours
        as_real = {"real": real, "__doc__": real.__doc__, "__module__": real.__module__}
        replace(owner, name, _StandIn(name, (), {**as_real, "ours": kept, "label": label}))

    def generator(device: Any = "cpu", real: Any = torch.Generator) -> Any:
        return real(substitute(device))

    for name in ("CUDAGraph", "graph"):
        stand_in(torch.cuda, name, _refuse_graphs)
    stand_in(getattr(torch, "accelerator", None), "Graph", _refuse_graphs)
    for owner in (torch, torch.cuda):
        stand_in(owner, "Event", _Event)
        stand_in(owner, "Stream", _Stream)
    stand_in(torch, "Generator", generator, "")
    is_cuda, asked = torch.Tensor.is_cuda, _pretending("Tensor.is_cuda", lambda: True)
    replace(torch.Tensor, "is_cuda", property(lambda self: asked(is_cuda.__get__, self)))
    replace(torch.cuda, "default_generators", _Generators(torch.cuda.default_generators))
    for owner, hosts in ((torch.cuda, torch), (torch.cuda.sparse, torch.sparse)):
        for name in dir(owner):
            host = getattr(hosts, name, None)
            if isinstance(host, type(torch.FloatTensor)) or (name.endswith("Storage") and isinstance(host, type)):
                stand_in(owner, name, host)


def _host_type(given: Any) -> Any:
    """The CPU's tensor type for a CUDA tensor type, or its name; anything else unchanged."""
    if isinstance(given, _StandIn):
        return given.chosen()
    if isinstance(given, str) and given.startswith("torch.cuda.") and on_cpu():
        return given.replace("torch.cuda.", "torch.", 1)
    return given


def _type(real: Any, *args: Any, **kwargs: Any) -> Any:
    return real(*map(_host_type, args), **{name: _host_type(value) for name, value in kwargs.items()})


# -- training on several devices: NCCL becomes gloo, and a model on the CPU needs no list of GPUs


def _group(real: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a function whose argument ``backend`` may be nccl."""
    if not on_cpu():
        return real(*args, **kwargs)
    kwargs.pop("device_id", None)  # torch 2.1 does not know it
    bound = signature(real).bind(*args, **kwargs)
    bound.arguments.pop("device_id", None)
    if "nccl" in str(bound.arguments.get("backend")).lower():
        changes.note("feature", "nccl", "gloo")
        bound.arguments["backend"] = "gloo"
    return real(*bound.args, **bound.kwargs)


def _split(real: Any, *args: Any, **kwargs: Any) -> Any:
    """``DataParallel``, which without a GPU is the model itself, even if we pretend that there is one."""
    if not on_cpu():
        return real(*args, **kwargs)
    changes.note("feature", "DataParallel on one device")
    devices.looking.append("cuda")
    try:
        return real(*args, **kwargs)
    finally:
        devices.looking.pop()


def _giving(**values: Any) -> Callable[..., None]:
    """A replacement for a function whose arguments must have these values on the CPU."""

    def give(real: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature(real).bind(*args, **kwargs)
        bound.apply_defaults()
        wanted = {name: value for name, value in values.items() if bound.arguments.get(name, value) != value}
        if wanted and on_cpu():
            bound.arguments.update(wanted)
        real(*bound.args, **bound.kwargs)

    return give


def _mesh(real: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    real(self, getattr(substitute(device_type), "type", device_type), *args, **kwargs)


def _optimize(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make an optimizer, add parameters, or load its state, without the options that torch refuses on the CPU."""
    import torch

    fused = "cpu" not in torch.utils._foreach_utils._get_fused_kernels_supported_devices()  # until 2.3
    if fused and kwargs.get("fused") and on_cpu():
        kwargs["fused"] = False
    real(self, *args, **kwargs)
    for group in self.param_groups:
        group.update({name: False for name in ("capturable", "fused")[: 1 + fused] if group.get(name) and on_cpu()})


def _seed(real: Any, seed: int) -> None:
    """``torch.cuda.manual_seed_all``. ``torch.manual_seed`` calls it too, but seeds the CPU itself."""
    if sys._getframe(2).f_globals.get("__name__") == "torch.random":
        real(seed)
    else:
        _answering("torch.cuda.manual_seed_all", _generator("manual_seed"))(real, seed)


_GROUPS = "init_process_group new_group"
_REPLACED: Replaced = (
    (
        _make,
        "torch",
        """arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized
        empty_strided eye from_file full full_like hamming_window hann_window kaiser_window linspace logspace normal
        ones ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
        sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor
        sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like""",
    ),
    (_make, "torch.fft", "fftfreq rfftfreq"),
    (_make, "torch.nested", "as_nested_tensor nested_tensor"),
    (_make, "torch.Tensor", "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"),
    (_move, "torch.Tensor", "to"),
    (_move, "torch.nn.Module", "to"),
    (_move, "torch.UntypedStorage", "to"),
    (_send, "torch.Tensor", "cuda xpu"),
    (_send, "torch.UntypedStorage", "cuda"),
    (_ask, "torch.cuda", "set_device synchronize"),
    (_select, "torch.cuda.device", "__init__"),
    (_move, "torch.utils._device.DeviceContext", "__init__"),
    (_load, "torch.jit", "load"),
    *(
        (_answering(f"{path}.{name}", answer), path, name)
        for path in _ANSWERS
        for name, answer in _ANSWERS[path].items()
    ),
    *(
        (_pretending(f"{path}.{name}()", answer), path, name)
        for path in ("torch.cuda", "torch.accelerator")
        for name, answer in (("is_available", lambda: True), ("device_count", lambda: 1))
    ),
    (_pretending("torch.accelerator.current_accelerator()", _cuda), "torch.accelerator", "current_accelerator"),
    (_pretending("Tensor.get_device()", lambda: 0), "torch.Tensor", "get_device"),
    (_seed, "torch.cuda", "manual_seed_all"),
    (_type, "torch.Tensor", "type"),
    (_type, "torch", "set_default_tensor_type"),
    # It uses the devices of its parameters.
    (_giving(device_ids=None, output_device=None), "torch.nn.parallel.DistributedDataParallel", "__init__"),
    (_split, "torch.nn.DataParallel", "__init__"),
    (  # it computes on GPUs only
        _answering("SyncBatchNorm stays BatchNorm", lambda _, module, *__, **___: module, "feature"),
        "torch.nn.SyncBatchNorm",
        "convert_sync_batchnorm",
    ),
    (_group, "torch.distributed", _GROUPS),
    (_group, "torch.distributed.device_mesh", _GROUPS),  # a mesh of the CPU asks for NCCL, too, if there is CUDA
    (_mesh, "torch.distributed.device_mesh.DeviceMesh", "__init__"),
    # The only kernel of attention that works everywhere stays enabled.
    (lambda real, enabled: real(enabled or on_cpu()), "torch._C", "_set_sdp_use_math"),
    *((_optimize, f"torch.optim.{name}", "__init__") for name in ("Adam", "AdamW")),
    (_optimize, "torch.optim.Optimizer", "add_param_group load_state_dict"),
    (_giving(use_cpu=True), "torch.autograd.profiler.profile", "__init__"),
    (_giving(enabled=False), "torch.autograd.profiler.emit_nvtx", "__init__"),
    *(
        (_answering("no mixed precision", lambda: True, "feature"), path, "amp_definitely_not_available")
        for path in ("torch.cuda.amp.common", "torch.cuda.amp.grad_scaler")  # the latter until 2.2
    ),
)
"""The replacement, which gets the original as its first argument; the owner of the function, and its names."""

_FSDP = "torch.distributed.fsdp"
_MESH_OF_2_1 = "torch.distributed._tensor.device_mesh"
_CHECK = "_check_module_states_for_sync_module_states"
_REPLACED_LATER: dict[str, Replaced] = {
    _FSDP: (
        (_giving(device_id="cpu"), f"{_FSDP}.FullyShardedDataParallel", "__init__"),
        (_giving(offload_to_cpu=False), f"{_FSDP}.FullStateDictConfig", "__init__"),
        (_answering(_CHECK, _nothing), f"{_FSDP}._init_utils", _CHECK),
    ),
    _MESH_OF_2_1: ((_mesh, f"{_MESH_OF_2_1}.DeviceMesh", "__init__"),),
    "torch.utils.cpp_extension": (
        (_refuse_kernels, "torch.utils.cpp_extension", "_get_cuda_arch_flags _join_cuda_home"),
    ),
}
"""The same for modules that ``import torch`` does not import."""
