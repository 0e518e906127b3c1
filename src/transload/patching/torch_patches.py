"""What is patched in torch: how ``torch.load`` restores a storage, and the functions that take a device.

torch has a public registry of functions that restore a storage to the device that the file, or ``map_location``, names.
Ours come first, before torch looks for a device that is missing, and last, before it gives up. So ``torch.load`` itself
is not replaced, and works with all its arguments and wherever it was imported. Every other function is replaced by a
wrapper that substitutes the device and calls it.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial, wraps

from transload.patching import devices
from transload.patching.cuda_on_cpu import REPLACED, REPLACED_IN_FSDP, replace_classes
from transload.patching.devices import is_missing, on_cpu, substitute

TYPE_CHECKING = False  # as in install.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from transload.patching.cuda_on_cpu import Replace, Replaced

_FIRST, _LAST = -1_000_003, 1_000_003  # priorities in the registry must be unique
_DEVICE = re.compile(r"[a-z]\w{0,30}(:\d{1,3})?")


def patch_torch(
    torch: Any, replace: Replace, at_undo: Callable[[Callable[[], None]], None], when_imported: Any
) -> None:
    """Patch torch. ``replace`` sets an attribute until the patches are removed; what ``at_undo`` got is called then.

    ``when_imported`` calls a function after a module is imported.
    """
    _register_restore(torch.serialization, at_undo)
    replace_classes(torch, replace)

    # torch fills these tables of its functions at first use: let it do so before they are replaced.
    from torch.utils._device import _device_constructors

    builtins = torch.jit._builtins  # noqa: SLF001 - there is no public way
    _device_constructors()
    builtins._find_builtin(None)  # noqa: SLF001
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
                operator = builtins._find_builtin(real)  # noqa: SLF001
                if operator is not None:
                    builtins._register_builtin(ours, operator)  # noqa: SLF001
                    at_undo(partial(builtins._get_builtin_table().pop, id(ours), None))  # noqa: SLF001

    patch(torch, _REPLACED)
    when_imported("torch.distributed.fsdp", lambda module: patch(module, REPLACED_IN_FSDP))


def _wrapped(real: Any, instead: Any) -> Any:
    @wraps(real)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return instead(real, *args, **kwargs)

    return ours


def _register_restore(serialization: Any, at_undo: Callable[[Callable[[], None]], None]) -> None:
    """Add two entries to the registry of ``torch.load``."""

    def restored(storage: Any, tag: str) -> Any:
        device = devices.substitute_name(tag)
        return serialization.default_restore_location(storage, device) if device and device != tag else None

    def restore_missing(storage: Any, location: Any) -> Any:
        tag = location.decode("ascii", "replace") if isinstance(location, bytes) else location
        return restored(storage, tag) if isinstance(tag, str) and is_missing(tag) else None

    def restore_unknown(storage: Any, location: Any) -> Any:
        known = devices.requested and isinstance(location, str) and _DEVICE.fullmatch(location)
        return restored(storage, location) if known else None

    ours = {restore_missing: _FIRST, restore_unknown: _LAST}
    for restore, priority in ours.items():
        serialization.register_package(priority, lambda _: None, restore)

    def unregister() -> None:  # torch has no public function for it; without the patch our entries do nothing
        registry = getattr(serialization, "_package_registry", [])
        registry[:] = [entry for entry in registry if entry[2] not in ours]

    at_undo(unregister)


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
    if wanted is None and isinstance(f, str | os.PathLike) and os.path.isfile(f):  # noqa: PTH113
        from transload.judge import inspect
        from transload.loading.placement import tags_of

        wanted = next(filter(is_missing, tags_of(inspect(f))), None)
    return real(f, substitute(wanted), *args, **kwargs)


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
    *REPLACED,
)
