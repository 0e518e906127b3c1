"""The ordinary tensor, of which a file has tens of thousands: checked and made in one step.

Only what is beyond doubt is made here. The rest, and all that is wrong, is left to the general way, which is the one
that knows what to say of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transload.nodes import Call, Global, Persistent

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Storage
    from transload.loading.arrival import Arrival

__all__ = ["Entry", "Kind", "entries", "kind_of", "ordinary", "view"]

Kind = tuple[Any, int, bool, Any, str]
"""An empty tensor of some dtype and device (``None`` if there is none), the bytes of an element, whether it can have
gradients; the dtype (``None`` if this torch has it not) and its name. The ``data`` of the empty tensor is a new one
with a version counter of its own, at a tenth of the price of ``torch.empty``."""
Entry = tuple[Any, int, Kind]
"""An untyped storage, its bytes, and what is in it."""

Make = Callable[..., Any]

_ABSENT = object()
_MAX_RANK = 64
_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"


def kind_of(name: str, device: torch.device) -> Kind:
    """The kind of tensors of a dtype, by its name, on a device."""
    import torch

    dtype = getattr(torch, name, None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    return (*_maker(dtype, device), dtype, name)


def entries(
    storages: Iterable[Storage], held: Mapping[str, torch.UntypedStorage], arrival: Arrival
) -> dict[str, Entry]:
    """What there is to know of each storage, by id."""
    by_tag = bool(arrival.locations)  # a function of the caller's may put those of one tag on several devices
    kinds: dict[tuple[str, Any], Kind] = {}
    found: dict[str, Entry] = {}
    for each in storages:
        storage = held[each.id]
        key = each.dtype, each.device if by_tag else storage.device
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = kind_of(each.dtype, storage.device)
        found[each.id] = storage, storage.nbytes(), kind
    return found


def _maker(dtype: torch.dtype | None, device: torch.device) -> tuple[Any, int, bool]:
    import torch

    if dtype is None or device.type == "meta":  # some releases of torch change a meta storage with every view of it
        return None, 1, False
    try:
        empty = torch.empty((0,), dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        return None, 1, False
    usable = type(empty) is torch.Tensor and empty.dtype == dtype and empty.device == device and not empty.is_quantized
    floats = dtype.is_floating_point or dtype.is_complex
    return (empty if usable else None), empty.element_size(), floats


def view(entry: Entry, offset: Any, size: Any, stride: Any) -> torch.Tensor | None:
    """A view of a storage, none of it outside; ``None`` where that, or that these are numbers, is not plain to see."""
    storage, nbytes, kind = entry
    empty = kind[0]
    if type(size) is not tuple or type(stride) is not tuple or type(offset) is not int or offset < 0 or empty is None:
        return None
    left = rank = len(size)
    if len(stride) != rank or rank > _MAX_RANK:
        return None
    numel = 1
    while left:  # zip() would take as long as torch does
        left -= 1
        count, step = size[left], stride[left]
        if type(count) is not int or type(step) is not int or step != numel or count < 1:
            return empty.data.set_(storage, offset, size, stride) if _is_within(entry, offset, size, stride) else None
        numel *= count
    end = (offset + numel) * kind[1]
    if rank == 1 and end == nbytes and not offset:
        return empty.data.set_(storage)  # the whole of it, as it lies there
    return empty.data.set_(storage, offset, size, stride) if end <= nbytes else None


def _is_within(entry: Entry, offset: int, size: Any, stride: Any) -> bool:
    """Whether a view that is not contiguous is one of numbers, has elements, and lies in its storage."""
    _, nbytes, kind = entry
    last, numel = offset, 1
    for count, step in zip(size, stride, strict=True):
        if type(count) is not int or type(step) is not int or count < 1 or not 0 <= step <= nbytes:
            return False
        last += (count - 1) * step
        numel *= count
    return (last + 1) * kind[1] <= nbytes and numel <= nbytes


def ordinary(known: Mapping[str, Entry], made: dict[int, Any], names: Mapping[Global, str]) -> Make:
    """A function that makes the tensor of a call, and notes its hooks in ``made``; ``None`` if it is not so ordinary.

    ``names`` are what the names in the file stand for. With a second argument, that function gets the entry and the
    arguments of a tensor that is ordinary but for its numbers.
    """
    nodes = {name: node for node, name in names.items()}
    make = _tensors(known, made, names, nodes)
    return _with_parameters(make, made, nodes) if _PARAMETER in nodes else make


def _tensors(
    known: Mapping[str, Entry], made: dict[int, Any], names: Mapping[Global, str], nodes: Mapping[str, Global]
) -> Make:
    v2, v3, hooked = (nodes.get(name, _ABSENT) for name in (_V2, _V3, _ORDERED))
    newer = _newer(names)

    # A file has this by the ten thousand: taken apart into functions it takes half as long again.
    def make(node: Any, otherwise: Callable[..., Any] | None = None) -> Any:
        args: Any = node.args if type(node) is Call else None
        if type(args) is not tuple or node.states or node.items or node.appended or node.kwargs is not None:
            return None
        dtype = None
        if node.callee is v3 and len(args) == 7:
            args, dtype = args[:6], args[6]
        elif node.callee is not v2 or len(args) != 6:
            return None
        storage, offset, size, stride, grad, hooks = args
        pid = storage.id if type(storage) is Persistent else None
        if type(pid) is not tuple or not (len(pid) == 5 or (len(pid) == 6 and pid[5] is None)):
            return None
        entry = known.get(pid[2]) if pid[0] == "storage" and type(pid[2]) is str else None
        if entry is None or id(hooks) in made or not _is_fresh(hooks, hooked):
            return None
        if dtype is not None:
            entry = newer(entry, dtype)
        tensor: Any = view(entry, offset, size, stride) if grad is False or (grad is True and entry[2][2]) else None
        if tensor is None:
            return None if otherwise is None else otherwise(entry, args)
        if grad:
            tensor.requires_grad = True
        made[id(hooks)] = tensor._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return tensor

    return make


def _is_fresh(hooks: Any, hooked: object) -> bool:
    """Whether hooks are none: an empty dictionary that nothing is put into."""
    if type(hooks) is not Call or hooks.callee is not hooked or hooks.args != () or hooks.kwargs is not None:
        return False
    return not (hooks.states or hooks.items or hooks.appended)


def _newer(names: Mapping[Global, str]) -> Callable[[Entry, Any], Entry]:
    """A function that gives an entry the dtype that is named beside it."""
    kinds: dict[tuple[Any, Any], Kind] = {}

    def newer(entry: Entry, dtype: Any) -> Entry:
        storage, nbytes, _ = entry
        name = names.get(dtype, "") if type(dtype) is Global else ""
        key = name, storage.device
        if key not in kinds:
            kinds[key] = kind_of(name.removeprefix("torch."), storage.device)
        return storage, nbytes, kinds[key]

    return newer


def _with_parameters(make: Make, made: dict[int, Any], nodes: Mapping[str, Global]) -> Make:
    """A function that also makes parameters of ordinary tensors."""
    from torch.nn import Parameter

    callee, hooked = nodes[_PARAMETER], nodes.get(_ORDERED, _ABSENT)

    def single(node: Any, otherwise: Callable[..., Any] | None = None) -> Any:
        if type(node) is not Call or node.callee is not callee:
            return make(node, otherwise)
        args: Any = node.args
        if type(args) is not tuple or len(args) != 3 or node.states or node.items or node.appended:
            return None
        data, grad, hooks = args
        if type(grad) is not bool or not _is_fresh(hooks, hooked) or id(hooks) in made or node.kwargs is not None:
            return None
        tensor = None if id(data) in made else make(data)
        if tensor is None:
            return None
        made[id(data)] = tensor
        if grad and not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        parameter: Any = Parameter(tensor, grad)
        made[id(hooks)] = parameter._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return parameter

    return single
