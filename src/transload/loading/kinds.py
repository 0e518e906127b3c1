"""Tensors that are more than a view of a storage: quantized, sparse, nested, meta, wrappers, of other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.loading.allowed import Unknown
from transload.loading.objects import Args, Wrong
from transload.loading.rebuild import Rebuilder, are_sizes, sparse_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS"]


def _meta(maker: Rebuilder, dtype: object, size: Any, stride: Any, grad: object) -> torch.Tensor:
    if not are_sizes(size) or not are_sizes(stride) or len(size) != len(stride):
        raise Wrong("a meta tensor whose size or stride is no number")
    kind = maker.dtype(dtype)
    return maker.torch.empty_strided(size, stride, dtype=kind, device="meta", requires_grad=grad is True)


def _wrapper(maker: Rebuilder, *args: Any) -> torch.Tensor:
    """(class, dtype, size, stride, offset, layout, device, requires_grad)."""
    kind, dtype, size, stride, offset, layout, device, grad = args
    if not isinstance(kind, type) or not issubclass(kind, maker.torch.Tensor):
        raise Wrong("a wrapper of a class that is none of tensors")
    if not are_sizes(size) or not are_sizes(stride):
        raise Wrong("a wrapper whose size or stride is no number")
    made: torch.Tensor = maker.torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as torch.load does
        kind,
        size,
        strides=stride,
        dtype=maker.dtype(dtype),
        storage_offset=offset,
        layout=layout,
        device=maker.arrival.device(str(device)),
        requires_grad=grad is True,
    )
    return made


# -- quantized


def _quantized(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
    storage, offset, size, stride, quantizer, grad, hooks = args
    held, dtype = maker.storage(storage)
    device = maker.check(held, dtype, offset, size, stride)
    if type(quantizer) is not tuple or not quantizer:
        raise Wrong("a quantized tensor without a quantizer")
    affine = quantizer[0] == maker.torch.per_tensor_affine
    made = (_by_tensor if affine else _by_channel)(maker, size, quantizer, dtype, device)
    made.set_(held, offset, size, stride)
    return maker.finish(made, grad, hooks)


def _by_tensor(maker: Rebuilder, size: Any, quantizer: Args, dtype: Any, device: Any) -> Any:
    """(scheme, scale, zero point)."""
    if len(quantizer) != 3 or type(quantizer[1]) is not float or type(quantizer[2]) is not int:
        raise Wrong("a quantized tensor whose scale is no number")
    empty: Any = maker.torch._empty_affine_quantized  # noqa: SLF001 - as torch.load does
    return empty(size, scale=quantizer[1], zero_point=quantizer[2], dtype=dtype, device=device)


def _by_channel(maker: Rebuilder, size: Any, quantizer: Args, dtype: Any, device: Any) -> Any:
    """(scheme, scales, zero points, axis)."""
    torch = maker.torch
    kinds = {
        torch.per_channel_affine: (torch.double, torch.long),
        torch.per_channel_affine_float_qparams: (torch.float, torch.float),
    }.get(quantizer[0])
    if kinds is None or len(quantizer) != 4:
        raise Wrong("a quantized tensor of no known scheme")
    axis = quantizer[3]
    if type(axis) is not int or not 0 <= axis < len(size):
        raise Wrong("a quantized tensor whose axis is none of its dimensions")
    parts = [_channels(maker, part, kind, device) for part, kind in zip(quantizer[1:3], kinds, strict=True)]
    if any(part.numel() != size[axis] for part in parts):
        raise Wrong("a quantized tensor with more or fewer scales than channels")
    empty: Any = torch._empty_per_channel_affine_quantized  # noqa: SLF001 - as torch.load does
    return empty(size, scales=parts[0], zero_points=parts[1], axis=axis, dtype=dtype, device=device)


def _channels(maker: Rebuilder, part: Any, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Scales or zero points, one for each channel: a tensor, or a list as older releases wrote it."""
    if type(part) is list and all(type(number) in (int, float) for number in part):
        return maker.torch.tensor(part, dtype=kind, device=device)
    return maker.tensor(part, "a quantized tensor with a scale")


# -- sparse


def _sparse(maker: Rebuilder, layout: Any, data: Any) -> Any:
    parts = 2 if layout == maker.torch.sparse_coo else 3
    most = 4  # of a COO tensor perhaps also whether it is coalesced
    if type(data) is not tuple or not parts < len(data) <= most or not are_sizes(data[parts]):
        raise Wrong("a sparse tensor whose parts are missing")
    for part in data[:parts]:
        maker.tensor(part, "a sparse tensor with a part")
    try:
        return maker.sparse(sparse_tensor(layout, data))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise Wrong(f"a sparse tensor that makes no sense: {error}") from error


def _sparse_csr(maker: Rebuilder, rows: object, columns: object, values: object, size: Any, _: object = None) -> Any:
    return _sparse(maker, maker.torch.sparse_csr, (rows, columns, values, size))


# -- nested


def _nested(maker: Rebuilder, buffer: object, sizes: object, strides: object, offsets: object) -> Any:
    held = maker.tensor(buffer, "a nested tensor with a buffer")
    numbers = [maker.tensor(part, "a nested tensor with sizes") for part in (sizes, strides, offsets)]
    if held.device.type != "meta":
        _check_nested(held.numel(), *(part.tolist() for part in numbers))
    view: Any = getattr(maker.torch, "_nested_view_from_buffer", None)
    if view is None:
        raise Unknown("torch.nested: a nested tensor")
    return view(held, *numbers)


def _check_nested(numel: int, sizes: Any, strides: Any, offsets: Any) -> None:
    """That every part of a nested tensor lies in its buffer."""
    try:
        for size, stride, offset in zip(sizes, strides, offsets, strict=True):
            numbers = (*size, *stride, offset)
            last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
            if any(type(number) is not int or number < 0 for number in numbers) or (0 not in size and last >= numel):
                raise Wrong("a nested tensor that reaches beyond its buffer")
    except (TypeError, ValueError) as error:
        raise Wrong("a nested tensor whose parts do not fit together") from error


# -- other devices


def _from_cpu(maker: Rebuilder, data: object, dtype: object, device: object, grad: object) -> torch.Tensor:
    where = maker.arrival.device(str(device))
    made = maker.tensor(data, "a device tensor made of something").to(dtype=maker.dtype(dtype), device=where)
    made.requires_grad = grad is True
    return made


def _from_numpy(maker: Rebuilder, data: Any, dtype: object, device: object, grad: object) -> torch.Tensor:
    try:
        held = maker.torch.from_numpy(data)
    except TypeError as error:
        raise Wrong(f"a device tensor that is made of no array: {error}") from error
    return _from_cpu(maker, held, dtype, device, grad)


KINDS: dict[str, tuple[Callable[..., Any], int, int]] = {
    # function: ours, least and most arguments
    "torch._utils._rebuild_qtensor": (_quantized, 7, 7),
    "torch._utils._rebuild_sparse_tensor": (_sparse, 2, 2),
    "torch._utils._rebuild_sparse_csr_tensor": (_sparse_csr, 4, 5),
    "torch._utils._rebuild_nested_tensor": (_nested, 4, 4),
    "torch._utils._rebuild_meta_tensor_no_storage": (_meta, 4, 4),
    "torch._utils._rebuild_wrapper_subclass": (_wrapper, 8, 8),
    "torch._utils._rebuild_device_tensor_from_numpy": (_from_numpy, 4, 4),
    "torch._utils._rebuild_xla_tensor": (_from_numpy, 4, 4),
    "torch._utils._rebuild_mlc_tensor": (_from_numpy, 4, 4),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (_from_cpu, 4, 4),
}
