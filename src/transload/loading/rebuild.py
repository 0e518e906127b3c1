"""Tensors from storages: what torch's rebuild functions do, after their arguments have been checked.

torch trusts those arguments. Here a view that reaches beyond its storage (which torch would silently enlarge), parts of
a nested tensor beyond its buffer, or scales that are fewer than the channels are damage, and are said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from transload.dtypes import ITEMSIZE, itemsize
from transload.loading.objects import Args, Wrong

if TYPE_CHECKING:
    import torch

    from transload.loading.arrival import Arrival

__all__ = ["Rebuilder", "are_sizes", "is_fake_mode", "sparse_tensor", "validate"]

_MAX_SIZE = 1 << 63
_MAX_RANK = 1024


class Rebuilder:
    """Makes tensors for one load; ``make`` by the name of torch's function."""

    def __init__(self, arrival: Arrival) -> None:
        import torch

        self.torch = torch
        self.arrival = arrival
        self._makers = _makers()
        self._names: dict[Any, str] = {}
        # What torch does with a tensor it loads while tensors are only pretended.
        self._faked = getattr(torch._utils, "_restore_device_fake_mode", None) if is_fake_mode() else None  # noqa: SLF001 - torch has no public way
        self._sparse: list[torch.Tensor] = []

    def has(self, name: str) -> bool:
        """Whether tensors are made by that name."""
        return name in self._makers

    def make(self, name: str, args: Args) -> Any:
        """What the function of that name makes of arguments that are built already."""
        maker, least, most = self._makers[name]
        if not least <= len(args) <= most:
            raise Wrong(f"{name} is called with {len(args)} arguments")
        return maker(self, *args)

    # -- checked arguments

    def storage(self, storage: object) -> tuple[torch.UntypedStorage, torch.dtype]:
        """A storage and the dtype it has."""
        if not isinstance(storage, self.torch.storage.TypedStorage):
            raise Wrong("a tensor without a storage")
        return storage._untyped_storage, storage.dtype  # noqa: SLF001 - the public way warns

    def dtype(self, dtype: object) -> torch.dtype:
        """A dtype."""
        if not isinstance(dtype, self.torch.dtype):
            raise Wrong("a tensor whose dtype is none")
        return dtype

    def tensor(self, value: object, what: str) -> torch.Tensor:
        """A tensor."""
        if not isinstance(value, self.torch.Tensor):
            raise Wrong(f"{what} that is no tensor")
        return value

    def check(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.device:
        """That a view lies in a storage; the device of that."""
        if type(offset) is not int or offset < 0 or not are_sizes(size) or not are_sizes(stride):
            raise Wrong("a tensor whose offset, size or stride is no number")
        if len(size) != len(stride):
            raise Wrong(f"a tensor with {len(size)} sizes and {len(stride)} strides")
        end, numel = offset + 1, 1
        for count, step in zip(size, stride, strict=True):
            numel *= count
            end += (count - 1) * step
        if numel >= _MAX_SIZE:
            raise Wrong("a tensor with more elements than torch can count")
        device = storage.device
        # A meta storage has no memory, and older releases of torch change its size with every view of it.
        if numel and self._nbytes(dtype, end) > storage.nbytes() and device.type != "meta":
            raise Wrong(f"a tensor that reaches beyond its storage of {storage.nbytes():,} bytes")
        return device

    def _nbytes(self, dtype: torch.dtype, count: int) -> int:
        """The bytes of so many elements; of a dtype that is newer than our list, as torch counts them."""
        name = self._names.get(dtype)
        if name is None:
            name = self._names[dtype] = str(dtype).removeprefix("torch.")
        return itemsize(name, count) if name in ITEMSIZE else count * self.torch.empty((), dtype=dtype).element_size()

    # -- strided tensors

    def strided(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.Tensor:
        """A view of a storage, none of it outside."""
        empty = self.torch.empty((0,), dtype=dtype, device=self.check(storage, dtype, offset, size, stride))
        return empty.set_(storage, offset, size, stride)

    def finish(self, made: Any, grad: object, hooks: object, flags: object = None) -> Any:
        """Gradients, hooks, and the conjugate and negative bits."""
        if grad is True:
            self._ask_for_grad(made)
        elif grad is not False:
            raise Wrong("a tensor that does not say whether it wants gradients")
        if flags:
            if type(flags) is not dict or any(type(flag) is not bool for flag in flags.values()):
                raise Wrong("a tensor with flags that are none")
            self.torch._utils.set_tensor_metadata(made, flags)  # noqa: SLF001 - torch has no public way
        made._backward_hooks = hooks  # noqa: SLF001 - the same
        return made if self._faked is None else self._faked(made)

    def _ask_for_grad(self, made: Any) -> None:
        if not (made.is_floating_point() or made.is_complex()):
            raise Wrong(f"a tensor of {made.dtype} that asks for gradients")
        made.requires_grad = True

    # -- attributes and classes

    def with_state(self, made: Any, state: object) -> Any:
        """Attributes of a tensor: a dictionary, or a pair of them where its class has slots."""
        parts = state if type(state) is tuple else (state,)
        if len(parts) > 2 or any(part is not None and type(part) is not dict for part in parts):
            raise Wrong("a tensor that is given a state which names no attributes")
        names = [name for part in parts if part for name in part]
        odd = next((name for name in names if type(name) is not str or name.startswith("__")), None)
        if odd is not None:
            raise Wrong(f"a tensor that is given the attribute {str(odd)[:60]!r}")
        return self.torch._utils._set_obj_state(made, state)  # noqa: SLF001 - as torch.load does

    def as_type(self, made: Any, kind: Any, state: object) -> Any:
        """A tensor as one of a subclass, with its state: ``torch._tensor._rebuild_from_type_v2``."""
        tensor: Any = self.torch.Tensor
        if not isinstance(made, tensor) or not isinstance(kind, type) or not issubclass(kind, tensor):
            raise Wrong("a tensor of a class that is none of tensors")
        if type(made) is not kind:
            made = made.as_subclass(kind)
        if getattr(kind, "__setstate__", tensor.__setstate__) is not tensor.__setstate__:
            made.__setstate__(state)
            return made
        return self.with_state(made, state)

    def build(self, made: Any, state: Any) -> None:
        """The state that releases before 0.4 gave to a tensor or parameter."""
        if type(state) is not tuple or len(state) not in (3, 4, 5):
            raise Wrong("a tensor that is given a state no tensor has")
        if len(state) == 4:
            storage, dtype = self.storage(state[0])
            self.check(storage, dtype, *state[1:])
            made.set_(storage, *state[1:])
            return
        if len(state) == 5:
            made.data = self.tensor(state[0], "the data of a variable")
            state = (state[3], state[4], state[2])
        made.requires_grad = False
        self.finish(made, state[0], state[2])

    # -- sparse tensors, whose indices can be looked at only when their bytes are there

    def sparse(self, made: torch.Tensor) -> torch.Tensor:
        """A sparse tensor, noted for ``check_sparse``."""
        self._sparse.append(made)
        return made

    def check_sparse(self) -> None:
        """That the indices of all sparse tensors lie inside them."""
        if self._faked is not None:
            return
        try:
            for made in self._sparse:
                validate(made)
        except RuntimeError as error:
            raise Wrong(f"a sparse tensor that makes no sense: {error}") from error


def _v1(maker: Rebuilder, storage: object, offset: object, size: Any, stride: Any) -> torch.Tensor:
    return maker.strided(*maker.storage(storage), offset, size, stride)


def _v2(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, requires_grad, hooks), and perhaps flags."""
    return maker.finish(_v1(maker, *args[:4]), *args[4:])


def _v3(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, requires_grad, hooks, dtype), and perhaps flags."""
    made = maker.strided(maker.storage(args[0])[0], maker.dtype(args[6]), *args[1:4])
    return maker.finish(made, *args[4:6], *args[7:])


def _plain_parameter(maker: Rebuilder, data: object, grad: object = True) -> Any:
    return maker.torch.nn.Parameter(maker.tensor(data, "a Parameter made of something"), grad is not False)


def _parameter(maker: Rebuilder, data: object, grad: object, hooks: object, state: object = None) -> Any:
    made = maker.torch.nn.Parameter(maker.tensor(data, "a Parameter made of something"), requires_grad=False)
    return maker.with_state(maker.finish(made, grad, hooks), state)


_MAKERS: dict[str, tuple[Callable[..., Any], int, int]] = {
    # function: ours, least and most arguments
    "torch._utils._rebuild_tensor": (_v1, 4, 4),
    "torch._utils._rebuild_tensor_v2": (_v2, 6, 7),
    "torch._utils._rebuild_tensor_v3": (_v3, 7, 8),
    "torch._utils._rebuild_parameter": (_parameter, 3, 3),
    "torch._utils._rebuild_parameter_with_state": (_parameter, 4, 4),
    "torch.nn.parameter.Parameter": (_plain_parameter, 1, 2),
}


@cache
def _makers() -> Mapping[str, tuple[Callable[..., Any], int, int]]:
    from transload.loading.kinds import KINDS

    return {**_MAKERS, **KINDS}


def is_fake_mode() -> bool:
    """Whether tensors are only pretended at the moment (``FakeTensorMode``)."""
    import torch

    active = getattr(torch._guards, "active_fake_mode", None)  # noqa: SLF001 - torch has no public way
    return active is not None and active() is not None


def sparse_tensor(layout: Any, data: Any) -> Any:
    """What ``torch._utils._rebuild_sparse_tensor`` makes, without the list of the whole process that it puts it on.

    ``check_invariants`` is as the program has it: any other value turns a switch of the whole process for a while, and
    two loads at a time would leave it so; left out, torch warns of that.
    """
    import torch

    switch = data[0].device.type != "meta" and torch.sparse.check_sparse_tensor_invariants.is_enabled()
    if layout == torch.sparse_coo:
        coalesced = data[3] if len(data) > 3 else None
        return torch.sparse_coo_tensor(*data[:3], check_invariants=switch, is_coalesced=coalesced)
    return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=switch)


def validate(made: Any) -> None:
    """``RuntimeError`` for a sparse tensor whose parts do not go together; torch has no public way to ask."""
    import torch

    if made.device.type == "meta":
        return
    if made.layout == torch.sparse_coo:
        look = torch._validate_sparse_coo_tensor_args  # noqa: SLF001 - the same
        indices: tuple[Any, ...] = (made._indices(),)  # noqa: SLF001 - the public way wants it coalesced
        rest = (made._values(), made.size(), made.is_coalesced())  # noqa: SLF001 - the same
    else:
        look = torch._validate_sparse_compressed_tensor_args  # noqa: SLF001 - the same
        rows = made.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (made.crow_indices(), made.col_indices()) if rows else (made.ccol_indices(), made.row_indices())
        rest = (made.values(), made.size(), made.layout)
    try:
        look(*indices, *rest, check_pinning=False)  # which would start CUDA
    except TypeError:  # older releases have no such argument
        look(*indices, *rest)


def are_sizes(value: Any) -> bool:
    """A tuple of numbers from 0 on (``torch.Size`` is one)."""
    if not isinstance(value, tuple) or len(value) > _MAX_RANK:
        return False
    for number in value:  # noqa: SIM110 - this runs twice for each tensor, and all() takes twice as long
        if type(number) is not int or not 0 <= number < _MAX_SIZE:
            return False
    return True
