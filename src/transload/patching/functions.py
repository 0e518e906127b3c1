"""The functions of torch that take a device, each replaced by one that lands it first and is else the same."""

from __future__ import annotations

import os
import sys
from functools import wraps

from transload.patching.landing import land, lands_elsewhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from transload.patching.changes import Changes

    Wrap = Callable[[Any], Any]

__all__ = ["replace"]


def _making(real: Any) -> Any:
    """``torch.zeros`` and whatever else takes ``device=``."""

    @wraps(real)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = land(kwargs["device"])
        return real(*args, **kwargs)

    return make


def _moving(real: Any) -> Any:
    """``.to``, which takes a device first, or by name, or none."""

    @wraps(real)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return real(self, land(args[0]), *args[1:], **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = land(kwargs["device"])
        return real(self, **kwargs)

    return to


def _sending(real: Any) -> Any:
    """``.cuda`` and its like: without an argument, to the current device of that kind."""
    kind = real.__name__

    @wraps(real)
    def send(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = kind if device is None else device
        landing = land(wanted)
        if landing is wanted:
            return real(self, device, *args, **kwargs)
        if landing.type == kind:
            return real(self, landing.index, *args, **kwargs)
        kwargs.pop("non_blocking", None)
        return self.cpu(**kwargs) if landing.type == "cpu" else self.to(device=landing, **kwargs)

    return send


def _asking(real: Any) -> Any:
    """``torch.cuda.set_device`` and ``synchronize``: nothing is to be done for what does not land on a GPU."""

    @wraps(real)
    def ask(device: Any = None) -> None:
        wanted = "cuda" if device is None else device
        landing = land(wanted)
        if landing is wanted:
            real(device)
        elif landing.type == "cuda":
            real(landing)

    return ask


def _pinning(real: Any) -> Any:
    """``.pin_memory``: there is nothing to pin it for where all lands on the CPU."""

    @wraps(real)
    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        landing = land("cuda")
        here = isinstance(landing, str) or landing.type != "cpu"
        return real(self, *args, **kwargs) if here else self

    return pin_memory


def _selecting(real: Any) -> Any:
    """``torch.cuda.device``, which does nothing for -1."""

    @wraps(real)
    def init(self: Any, device: Any) -> None:
        landing = land(device)
        real(self, landing if landing is device or landing.type == "cuda" else -1)

    return init


def _entering(real: Any) -> Any:
    """What ``with torch.device(...)`` and ``torch.set_default_device`` make."""

    @wraps(real)
    def init(self: Any, device: Any) -> None:
        real(self, land(device))

    return init


def _reading(real: Any) -> Any:
    """``torch.jit.load``, which does not ask the registry of ``torch.load``: one device is for all of the file."""

    @wraps(real)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = _absent_tag(f) if map_location is None else map_location
        return real(f, land(wanted), *args, **kwargs)

    return load


def _absent_tag(f: Any) -> str | None:
    """A device that is named in a TorchScript file and is not here."""
    from transload.judge import inspect
    from transload.loading.placement import tags_of

    if not isinstance(f, str | os.PathLike) or not os.path.isfile(f):  # noqa: PTH113
        return None
    return next(filter(lands_elsewhere, tags_of(inspect(f))), None)


_REPLACED: tuple[tuple[Wrap, str, str], ...] = (
    (
        _making,
        "torch",
        """arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized
        empty_strided eye from_file full full_like hamming_window hann_window kaiser_window linspace logspace ones
        ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor sparse_bsc_tensor
        sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor
        tril_indices triu_indices zeros zeros_like""",
    ),
    (_making, "torch.fft", "fftfreq rfftfreq"),
    (_making, "torch.nested", "as_nested_tensor nested_tensor"),
    (_making, "torch.Tensor", "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"),
    (_moving, "torch.Tensor", "to"),
    (_moving, "torch.UntypedStorage", "to"),
    (_sending, "torch.Tensor", "cuda xpu"),
    (_sending, "torch.UntypedStorage", "cuda"),
    (_pinning, "torch.Tensor", "pin_memory"),
    (_asking, "torch.cuda", "set_device synchronize"),
    (_selecting, "torch.cuda.device", "__init__"),
    (_entering, "torch.utils._device.DeviceContext", "__init__"),
    (_reading, "torch.jit", "load"),
)


def replace(torch: Any, changes: Changes) -> None:
    """Replace those that this release of torch has."""
    _fill_tables(torch)
    _empty_tables()
    changes.then(_empty_tables)
    for wrap, path, names in _REPLACED:
        owner = torch
        for part in path.split(".")[1:]:
            owner = getattr(owner, part, None)
        for name in names.split():
            real = getattr(owner, name, None)
            if real is not None:
                _put(torch, changes, owner, name, wrap(real))


def _fill_tables(torch: Any) -> None:
    """torch keeps tables of its own functions, filled at first use: that must not be when ours are in their place."""
    from torch.utils._device import _device_constructors

    _device_constructors()
    torch.jit._builtins._find_builtin(None)  # noqa: SLF001 - there is no public way


def _empty_tables() -> None:
    """The compiler keeps some more, and fills them when it first compiles: it shall do so again with torch's own."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    for name in ("get_torch_obj_rule_map", "get_tensor_method"):
        table: Any = getattr(rules, name, None)
        if hasattr(table, "cache_clear"):
            table.cache_clear()
    older: Any = getattr(sys.modules.get("torch._dynamo.allowed_functions"), "_allowed_function_ids", None)
    if hasattr(older, "function_ids"):  # before torch 2.2
        older.function_ids = None


def _put(torch: Any, changes: Changes, owner: Any, name: str, ours: Any) -> None:
    """Lay one over torch's; it pickles by its name, and a script that is compiled finds the operator behind it."""
    within = isinstance(owner, type)
    ours.__module__ = owner.__module__ if within else owner.__name__
    ours.__name__, ours.__qualname__ = name, f"{owner.__qualname__}.{name}" if within else name
    changes.set(owner, name, ours)
    builtins = torch.jit._builtins  # noqa: SLF001 - there is no public way
    operator = builtins._find_builtin(ours.__wrapped__)  # noqa: SLF001
    if operator is not None:
        builtins._register_builtin(ours, operator)  # noqa: SLF001
        changes.then(lambda: builtins._get_builtin_table().pop(id(ours), None))  # noqa: SLF001
