"""What is not ordinary in a pickle: tensors made by torch's rebuild functions, rarer values, allowed calls.

A ``Rebuilder`` checks the arguments and then does what torch's rebuild functions do. torch trusts those arguments. Here
a view that reaches beyond its storage (which torch would silently enlarge), parts of a nested tensor beyond its buffer,
or fewer scales than channels are reported as damage.

Values besides weights (numpy arrays, dates, paths, arguments) are data. Each is made by a constructor in ``VALUES``,
after the types of its arguments were checked; nothing that the file names is called. Arrays that could hold any object
(object arrays and structured ones) are not made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import pathlib
import types
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from transload.dtypes import ITEMSIZE, MAX_SIZE, STORAGES, itemsize
from transload.errors import LoadError, Malformed, UnsafeError
from transload.formats.arrays import NUMPY_CALLS, NUMPY_SCALARS, array_of, dtype_of, raw_bytes
from transload.formats.pieces import is_parameter
from transload.formats.tensors import MAX_RANK
from transload.geometry import View
from transload.judge.names import can_be_allowed
from transload.loading.placement import DeviceMap
from transload.loading.refusal import Allowed, name_of, weights_only_error
from transload.nodes import REBUILDS, Call, Global, Persistent, module_class, storage_id
from transload.opening import CheckpointFile
from transload.opening.elements import numpy_or_none

if TYPE_CHECKING:
    import torch

Args = tuple[Any, ...]
Entry = tuple[Any, int, tuple[Any, int, bool, Any, str]]
"""A storage as ``build.entries`` has it."""

_WRAPPERS: dict[type, tuple[str, type]] = {
    UserDict: ("data", dict),
    UserList: ("data", list),
    UserString: ("data", str),
    ChainMap: ("maps", list),
}
"""Classes with one attribute: its name and its type."""


class Rebuilder:
    """Makes the tensors and values of one load; ``call`` by the name of a function, ``persistent`` by an id.

    ``loaded`` are the storages that were read, by key. A tar archive also describes tensors outside its pickle.
    """

    def __init__(self, file: CheckpointFile, loaded: Mapping[str, Entry], device_map: DeviceMap, *, fake: bool) -> None:
        import torch

        self._torch = torch
        self._device_map = device_map
        self._allowed = Allowed()
        self._loaded = loaded
        self._built: dict[tuple[str, object], Any] = {}
        """Typed storages, their parts, and the tensors of a tar archive."""
        # What torch does with a loaded tensor under FakeTensorMode.
        self._faked = getattr(torch._utils, "_restore_device_fake_mode", None) if fake else None  # noqa: SLF001 - torch has no public way
        self._tar_tensors: Mapping[str, Any] = {}
        self._tar_storages: Mapping[str, Any] = {}
        if file.checkpoint.traits.container == "tar":
            from transload.formats.torch_legacy import TarReader

            reader = TarReader(file.open(""))  # as when its tensors were found
            reader.read_storages()
            reader.read_tensors()
            self._tar_tensors, self._tar_storages = reader.tensor_args, reader.storage_ids

    # -- calls

    def call(self, name: str, callee: Global, how: str, args: Args, kwargs: Any) -> Any:
        """The result of a call by name, with arguments that are built already."""
        if type(kwargs) is dict and not kwargs:
            if name in VALUES:
                return value_of(name, args)
            if name in self._MAKERS:
                return self._rebuild(name, args)
        target = self._allowed.user(callee)
        if target is None and self._allowed.is_known(callee):
            if args or not name.endswith("Tensor"):
                raise Malformed(f"a call of {name} that no checkpoint makes")
            kind = self.object_of(callee)  # torch.FloatTensor(), whose state is set later
            return self._run(name, kind.__new__, (kind,))
        return self._run(name, target, args, kwargs, how)

    def call_attribute(self, target: Any, how: str, args: Args, kwargs: Any) -> Any:
        """The result of calling what ``getattr`` found, if the program has allowed that too."""
        name = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__name__)}"
        if not self._allowed.allows(target):
            fix = "Only if you trust its author, allow it by torch.serialization.add_safe_globals."
            raise UnsafeError(weights_only_error(f"it calls {name}, which is not allowed"), fix=fix)
        return self._run(name, target, args, kwargs, how)

    def _rebuild(self, name: str, args: Args) -> Any:
        if not REBUILDS[name].least <= len(args) <= REBUILDS[name].most:
            raise Malformed(f"a call of {name} with {len(args)} arguments")
        return self._MAKERS[name](self, *args)

    def object_of(self, node: Global) -> Any:
        """The object of an allowed name; ``UnsafeError`` for any other name."""
        target = self._allowed.object_of(node)
        if target is None:
            raise UnsafeError(weights_only_error(f"it names {node.full_name}, which is not allowed", node))
        return target

    def _run(self, name: str, target: Any, args: Args, kwargs: Any = None, how: str = "reduce") -> Any:
        """Call what the program has allowed, as pickle would."""
        if target is None:
            raise UnsafeError(weights_only_error(f"it calls {name}, which is not allowed"))
        if how != "reduce" and not isinstance(target, type):
            raise Malformed(f"an object of {name}, which is not a class")
        if how in ("newobj", "newobj_ex") or (how != "reduce" and not args):
            target, args = target.__new__, (target, *args)
        try:
            return target(*args, **(kwargs or {}))
        except Exception as error:
            what = f"{name} failed on what the file gives it: {type(error).__name__}: {error}"
            raise LoadError(what) from error

    def append(self, target: Any, values: list[Any]) -> None:
        """Append values to the result of a call."""
        if type(target) not in (list, set, deque):
            self.check_type(target, "are appended to")
        add = getattr(target, "extend", None) or getattr(target, "update", None)
        self._run(f"appending to {type(target).__name__}", add, (values,))

    def set_state(self, target: Any, state: Any) -> None:
        """Do what the opcode BUILD does, for values and allowed classes."""
        kind = type(target)
        if kind in (self._torch.Tensor, self._torch.nn.Parameter):  # saved by releases before 0.4
            if type(state) is not tuple or len(state) not in (3, 4, 5):
                raise Malformed("a tensor whose state is not that of a tensor")
            if len(state) == 4:
                storage, dtype = self._storage(state[0])
                self._check(storage, dtype, *state[1:])
                target.set_(storage, *state[1:])
                return
            if len(state) == 5:
                target.data = self._tensor(state[0], "the data of a variable")
                state = (state[3], state[4], state[2])
            target.requires_grad = False
            self.finish(target, state[0], state[2])
        elif kind in (argparse.Namespace, types.SimpleNamespace):
            if type(state) is not dict or any(type(key) is not str for key in state):
                raise Malformed("a namespace whose values have no names")
            vars(target).update(state)
        elif kind in _WRAPPERS:
            name, expected = _WRAPPERS[kind]
            if type(state) is not dict or [*state] != [name] or type(state[name]) is not expected:
                raise Malformed(f"a {kind.__name__} with a state that Python does not write")
            vars(target).update(state)
        elif kind is uuid.UUID:
            number = state.get("int") if type(state) is dict else None
            if type(number) is not int or not 0 <= number < 1 << 128:
                raise Malformed("an identifier that is not a number of 128 bits")
            target.__setstate__({"int": number})
        else:
            self.check_type(target, "are given as state to")
            self._run(f"the state of {kind.__name__}", _set_object_state, (target, state))

    def check_type(self, target: Any, how: str) -> None:
        """Raise unless the program has allowed the class of an object, whose methods are about to be called."""
        kind = type(target)
        if self._allowed.allows(kind):
            return
        name = f"{kind.__module__}.{kind.__qualname__}"
        what = weights_only_error(f"values {how} an object of {name}, which is not allowed")
        fix = f"Only if you trust its author: torch.serialization.add_safe_globals([{name}])"
        fix = fix if can_be_allowed(kind.__module__, kind.__qualname__) else ""
        raise UnsafeError(what, fix=fix)

    def from_numpy(self, name: str, node: Call) -> Any:
        """An array, number or dtype of numpy, by its description in the file; ``None`` for any other name."""
        if name not in NUMPY_CALLS:
            return None
        np: Any = numpy_or_none()
        if np is None:
            raise LoadError("it holds numpy arrays, and numpy cannot be imported", fix="Install numpy.")
        array = None if name == "numpy.dtype" else array_of(node)
        dtype = dtype_of(node) if name == "numpy.dtype" else array and array.dtype
        if dtype is None or not dtype.plain:
            kind = "a numpy array of objects or records, or of a subclass"
            what = weights_only_error(f"it holds {kind}, which is more than plain data", node.callee)
            fix = "Only if you trust its author: pass weights_only=False, which runs whatever the file says."
            raise UnsafeError(what, fix=fix)
        stored = np.dtype(dtype.code).newbyteorder(">" if dtype.big_endian else "<")
        if array is None:
            return stored
        raw = raw_bytes(array.data)
        if raw is None or not dtype.itemsize or len(raw) != prod(array.shape) * dtype.itemsize:
            raise Malformed("an array with more or fewer bytes than its shape has")
        steps = tuple(step * dtype.itemsize for step in array.stride)
        try:
            values = np.ndarray(array.shape, stored, raw or bytearray(), 0, steps)
            if raw:  # numpy.core.multiarray._reconstruct gives native byte order
                native = np.dtype(dtype.code) if name.endswith("._reconstruct") else stored
                values = values.astype(native, "K") if native != stored else values.copy("K")
        except ValueError as error:  # an empty array may claim any size in the other dimensions
            raise Malformed(f"an array that numpy cannot make: {error}") from error
        return values[()] if name in NUMPY_SCALARS else values

    # -- persistent ids

    def persistent(self, node: Persistent) -> Any:
        """The typed storage that an id names, in older formats also a class or tensor; the same object each time."""
        name = "" if type(node.id) is tuple else str(node.id)
        if name in self._tar_tensors:
            if ("tensor", name) not in self._built:
                storage, *rest = self._tar_tensors[name]
                self._built["tensor", name] = self._make_tensor(self._storage_of(storage), *rest)
            return self._built["tensor", name]
        named = None if storage_id(node) else module_class(node)
        return self.object_of(named) if type(named) is Global else self._storage_of(node)

    def _storage_of(self, node: Any) -> Any:
        if type(node) is Persistent and not storage_id(node):
            node = self._tar_storages.get(str(node.id))
        pid = storage_id(node)
        if not pid:
            raise Malformed("an id that does not name a storage")
        key = pid[2].decode() if type(pid[2]) is bytes else str(pid[2])
        if key not in self._loaded:
            raise Malformed(f"an id that names the storage {key[:40]!r}, which is not in the file")
        storage, nbytes, (*_, dtype, name) = self._loaded[key]
        if not nbytes:  # an empty storage may have several dtypes: each id has one
            if type(pid[1]) is Global:
                name = STORAGES.get(pid[1].name.rpartition(".")[2], name)
                dtype = getattr(self._torch, name, None)
            dtype = getattr(pid[1], "dtype", dtype)
        if dtype is None:
            raise Malformed(f"a storage of {name}, which this torch does not have")
        view, untyped = pid[5] if len(pid) == 6 else None, storage
        if not nbytes:  # like torch, a new one for each tensor
            untyped = self._torch.UntypedStorage(0, device=storage.device)
        built_key: tuple[str, object] = ("whole", key)
        if view is not None:
            match view:  # a part of a storage: key, first element, elements
                case (str() | bytes() as part, int() as first, int() as count) if first >= 0 and count >= 0:
                    width = self._torch.empty((), dtype=dtype, device="meta").element_size()
                case _:
                    raise Malformed("a part of a storage that is not described by a key and two numbers")
            if (first + count) * width > storage.nbytes():
                raise Malformed("a part of a storage that reaches beyond it")
            built_key, untyped = ("view", part), storage[first * width : (first + count) * width]
        if built_key not in self._built or not nbytes:
            # TypedStorage is deprecated, and has no public constructor.
            self._built[built_key] = self._torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return self._built[built_key]

    # -- checked arguments

    def _storage(self, storage: object) -> tuple[torch.UntypedStorage, torch.dtype]:
        """The untyped storage and the dtype of a typed storage."""
        if not isinstance(storage, self._torch.storage.TypedStorage):
            raise Malformed("a tensor without a storage")
        return storage._untyped_storage, storage.dtype  # noqa: SLF001 - the public way warns

    def _dtype(self, dtype: object) -> torch.dtype:
        if not isinstance(dtype, self._torch.dtype):
            raise Malformed("a tensor whose dtype is not a dtype")
        return dtype

    def _tensor(self, value: object, what: str) -> torch.Tensor:
        if not isinstance(value, self._torch.Tensor):
            raise Malformed(f"{what} that is not a tensor")
        return value

    def _check(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.device:
        """Raise ``Malformed`` unless a view is within its storage; return the device of the storage."""
        if type(offset) is not int or offset < 0 or not are_sizes(size) or not are_sizes(stride):
            raise Malformed("a tensor whose offset, size or stride is not an integer")
        if len(size) != len(stride):
            raise Malformed(f"a tensor with {len(size)} sizes and {len(stride)} strides")
        view = View(size, stride)
        end, numel = offset + view.extent, view.numel
        if numel >= MAX_SIZE:
            raise Malformed("a tensor with more elements than torch can count")
        device, name = storage.device, str(dtype).removeprefix("torch.")
        # The size of a dtype that is newer than our list is torch's.
        newer = name not in ITEMSIZE
        nbytes = end * self._torch.empty((), dtype=dtype).element_size() if newer else itemsize(name, end)
        # A meta storage has no memory, and older releases of torch resize it with every view.
        if numel and nbytes > storage.nbytes() and device.type != "meta":
            raise Malformed(f"a tensor that reaches beyond its storage of {storage.nbytes():,} bytes")
        return device

    def strided(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.Tensor:
        """A tensor within a storage."""
        empty = self._torch.empty((0,), dtype=dtype, device=self._check(storage, dtype, offset, size, stride))
        return empty.set_(storage, offset, size, stride)

    def finish(self, tensor: Any, grad: object, hooks: object, flags: object = None) -> Any:
        """Set ``requires_grad``, the hooks, and the conjugate and negative bits."""
        if grad is True:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise Malformed(f"a tensor of {tensor.dtype} that requires gradients")
            tensor.requires_grad = True
        elif grad is not False:
            raise Malformed("a tensor whose requires_grad is not true or false")
        if flags:
            if type(flags) is not dict or any(type(flag) is not bool for flag in flags.values()):
                raise Malformed("a tensor with flags that are not true or false")
            self._torch._utils.set_tensor_metadata(tensor, flags)  # noqa: SLF001 - torch has no public way
        tensor._backward_hooks = hooks  # noqa: SLF001 - the same
        return tensor if self._faked is None else self._faked(tensor)

    def _with_state(self, tensor: Any, state: object) -> Any:
        """Set the attributes of a tensor: a dictionary, or a pair of them if its class has slots."""
        parts = state if type(state) is tuple else (state,)
        if len(parts) > 2 or any(part is not None and type(part) is not dict for part in parts):
            raise Malformed("a tensor whose state does not name attributes")
        names = [name for part in parts if part for name in part]
        for name in names:
            if type(name) is not str or name.startswith("__"):
                raise Malformed(f"a tensor whose state sets the attribute {str(name)[:60]!r}")
        return self._torch._utils._set_obj_state(tensor, state)  # noqa: SLF001 - as torch.load does

    def from_type(self, function: Args, values: list[Any]) -> Any:
        """``torch._tensor._rebuild_from_type_v2(function, class, arguments, state)``: a tensor of a subclass."""
        if len(values) != 3 or type(function[0]) is not Global:
            raise Malformed("a tensor made by something that is not a name")
        kind, args, state = values
        if type(args) is not tuple:
            raise Malformed("a tensor made of arguments that are not a tuple")
        name = name_of(function[0])
        if name in self._MAKERS:
            tensor = self._rebuild(name, args)
        else:
            tensor = self._run(name, self._allowed.user(function[0]), args)
        tensor_class: Any = self._torch.Tensor
        if not isinstance(tensor, tensor_class) or not isinstance(kind, type) or not issubclass(kind, tensor_class):
            raise Malformed("a tensor of a class that is not a tensor class")
        if type(tensor) is not kind:
            tensor = tensor.as_subclass(kind)
        if getattr(kind, "__setstate__", tensor_class.__setstate__) is tensor_class.__setstate__:
            return self._with_state(tensor, state)
        tensor.__setstate__(state)
        return tensor

    # -- torch's rebuild functions

    def _make_meta(self, dtype: object, size: Any, stride: Any, grad: object) -> torch.Tensor:
        if not are_sizes(size) or not are_sizes(stride) or len(size) != len(stride):
            raise Malformed("a meta tensor whose size or stride is not an integer")
        kind = self._dtype(dtype)
        return self._torch.empty_strided(size, stride, dtype=kind, device="meta", requires_grad=grad is True)

    def _make_wrapper(self, *args: Any) -> Any:
        """(class, dtype, size, stride, offset, layout, device, requires_grad)."""
        kind, dtype, size, stride, offset, layout, device, grad = args
        if not isinstance(kind, type) or not issubclass(kind, self._torch.Tensor):
            raise Malformed("a wrapper of a class that is not a tensor class")
        if not are_sizes(size) or not are_sizes(stride):
            raise Malformed("a wrapper whose size or stride is not an integer")
        return self._torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as torch.load does
            kind,
            size,
            strides=stride,
            dtype=self._dtype(dtype),
            storage_offset=offset,
            layout=layout,
            device=self._device_map.device(str(device)),
            requires_grad=grad is True,
        )

    def _make_quantized(self, *args: Any) -> Any:
        """(storage, offset, size, stride, quantizer, requires_grad, hooks).

        The quantizer is (scheme, scale, zero point), or (scheme, scales, zero points, axis).
        """
        storage, offset, size, stride, quantizer, grad, hooks = args
        self._check(*self._storage(storage), offset, size, stride)
        torch = self._torch
        if type(quantizer) is not tuple or not quantizer or not isinstance(quantizer[0], torch.qscheme):
            raise Malformed("a quantized tensor without a quantizer")
        scheme, *numbers = quantizer
        if scheme == torch.per_tensor_affine:
            if [type(number) for number in numbers] != [float, int]:
                raise Malformed("a quantized tensor whose scale is not a number")
        elif scheme not in (torch.per_channel_affine, torch.per_channel_affine_float_qparams) or len(numbers) != 3:
            raise Malformed("a quantized tensor of an unknown scheme")
        else:
            *parts, axis = numbers
            if type(axis) is not int or not 0 <= axis < len(size):
                raise Malformed("a quantized tensor whose axis is not one of its dimensions")
            for part in parts:  # tensors; lists in files of older releases
                is_list = type(part) is list and all(type(number) in (int, float) for number in part)
                count = len(part) if is_list else self._tensor(part, "a quantized tensor with a scale").numel()
                if count != size[axis]:
                    raise Malformed("a quantized tensor with more or fewer scales than channels")
        tensor = torch._utils._rebuild_qtensor(storage, offset, size, stride, quantizer, False, hooks)  # noqa: SLF001 - as torch.load does
        return self.finish(tensor, grad, hooks)

    def _make_sparse(self, layout: Any, data: Any) -> Any:
        parts = 2 if layout == self._torch.sparse_coo else 3
        most = 4  # the last item of a COO tensor may be whether it is coalesced
        if type(data) is not tuple or not parts < len(data) <= most or not are_sizes(data[parts]):
            raise Malformed("a sparse tensor whose parts are missing")
        for part in data[:parts]:
            self._tensor(part, "a sparse tensor with a part")
        try:
            return sparse_tensor(layout, data, validate=self._faked is None)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise Malformed(f"an invalid sparse tensor: {error}") from error

    def _make_nested(self, buffer: object, sizes: object, strides: object, offsets: object) -> Any:
        data = self._tensor(buffer, "a nested tensor with a buffer")
        numbers = [self._tensor(part, "a nested tensor with sizes") for part in (sizes, strides, offsets)]
        if data.device.type != "meta":
            try:
                for size, stride, offset in zip(*(part.tolist() for part in numbers), strict=True):
                    negative = any(type(number) is not int or number < 0 for number in (*size, *stride, offset))
                    extent = View(size, stride).extent
                    if negative or (extent and offset + extent > data.numel()):
                        raise Malformed("a nested tensor that reaches beyond its buffer")
            except (TypeError, ValueError) as error:
                raise Malformed("a nested tensor whose parts do not fit together") from error
        return self._torch._nested_view_from_buffer(data, *numbers)  # noqa: SLF001 - as torch.load does

    def _make_from_cpu(self, data: object, dtype: object, device: object, grad: object) -> torch.Tensor:
        where = self._device_map.device(str(device))
        tensor = self._tensor(data, "a device tensor made of something").to(dtype=self._dtype(dtype), device=where)
        tensor.requires_grad = grad is True
        return tensor

    def _make_from_numpy(self, data: Any, dtype: object, device: object, grad: object) -> torch.Tensor:
        try:
            tensor = self._torch.from_numpy(data)
        except TypeError as error:
            raise Malformed(f"a device tensor that is not made of an array: {error}") from error
        return self._make_from_cpu(tensor, dtype, device, grad)

    def _make_tensor(self, storage: object, offset: object, size: Any, stride: Any) -> torch.Tensor:
        return self.strided(*self._storage(storage), offset, size, stride)

    def _make_tensor_v2(self, *args: Any) -> Any:
        """(storage, offset, size, stride, requires_grad, hooks), and perhaps flags."""
        return self.finish(self._make_tensor(*args[:4]), *args[4:])

    def _make_tensor_v3(self, *args: Any) -> Any:
        """(storage, offset, size, stride, requires_grad, hooks, dtype), and perhaps flags."""
        tensor = self.strided(self._storage(args[0])[0], self._dtype(args[6]), *args[1:4])
        return self.finish(tensor, *args[4:6], *args[7:])

    def plain(self, node: Call, local: object) -> Any:
        """The plain tensor or parameter for a distributed tensor that is all in its local part."""
        tensor: Any = self._tensor(local, "a distributed tensor with a local part")
        args: Any = node.args
        grad = args[2][-1] is True
        if is_parameter(node):
            return self._torch.nn.Parameter(tensor, grad)
        return tensor.requires_grad_() if grad else tensor

    def _make_plain_parameter(self, data: object, grad: object = True) -> Any:
        return self._torch.nn.Parameter(self._tensor(data, "a Parameter made of something"), grad is not False)

    def _make_parameter(self, data: object, grad: object, hooks: object, state: object = None) -> Any:
        parameter = self._torch.nn.Parameter(self._tensor(data, "a Parameter made of something"), requires_grad=False)
        return self._with_state(self.finish(parameter, grad, hooks), state)

    _MAKERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "torch._utils._rebuild_tensor": _make_tensor,
        "torch._utils._rebuild_tensor_v2": _make_tensor_v2,
        "torch._utils._rebuild_tensor_v3": _make_tensor_v3,
        "torch._utils._rebuild_parameter": _make_parameter,
        "torch._utils._rebuild_parameter_with_state": _make_parameter,
        "torch.nn.parameter.Parameter": _make_plain_parameter,
        "torch._utils._rebuild_qtensor": _make_quantized,
        "torch._utils._rebuild_sparse_tensor": _make_sparse,
        "torch._utils._rebuild_sparse_csr_tensor": _make_sparse,
        "torch._utils._rebuild_nested_tensor": _make_nested,
        "torch._utils._rebuild_meta_tensor_no_storage": _make_meta,
        "torch._utils._rebuild_wrapper_subclass": _make_wrapper,
        "torch._utils._rebuild_device_tensor_from_numpy": _make_from_numpy,
        "torch._utils._rebuild_xla_tensor": _make_from_numpy,
        "torch._utils._rebuild_mlc_tensor": _make_from_numpy,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _make_from_cpu,
    }
    """The method for each of torch's functions."""


def _set_object_state(target: Any, state: Any) -> None:
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(target).update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def sparse_tensor(layout: Any, data: Any, *, validate: bool = True) -> Any:
    """What ``torch._utils._rebuild_sparse_tensor`` makes, without appending it to torch's global list.

    It is validated here, since its bytes have been read. ``RuntimeError`` if its parts do not fit together.

    ``check_invariants`` is the program's setting. Any other value sets a global switch for the duration of the call,
    which two loads at a time could leave set; without the argument, torch warns. Without ``device``, the tensor would
    go to the default device, and under ``torch.device("meta")`` lose its values.
    """
    import torch

    device = data[0].device
    switch = device.type != "meta" and torch.sparse.check_sparse_tensor_invariants.is_enabled()
    is_coo = layout == torch.sparse_coo
    if is_coo:
        coalesced = data[3] if len(data) > 3 else None
        tensor = torch.sparse_coo_tensor(*data[:3], device=device, check_invariants=switch, is_coalesced=coalesced)
    else:
        tensor = torch.sparse_compressed_tensor(*data, device=device, layout=layout, check_invariants=switch)
    if not validate or device.type == "meta":
        return tensor
    if is_coo:
        check_arguments = torch._validate_sparse_coo_tensor_args  # noqa: SLF001 - torch has no public function for it
        indices: tuple[Any, ...] = (tensor._indices(),)  # noqa: SLF001 - the public way wants it coalesced
        rest = (tensor._values(), tensor.size(), tensor.is_coalesced())  # noqa: SLF001 - the same
    else:
        check_arguments = torch._validate_sparse_compressed_tensor_args  # noqa: SLF001 - as above
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            indices = tensor.crow_indices(), tensor.col_indices()
        else:
            indices = tensor.ccol_indices(), tensor.row_indices()
        rest = (tensor.values(), tensor.size(), layout)
    try:
        check_arguments(*indices, *rest, check_pinning=False)  # checking it would initialise CUDA
    except TypeError:  # older releases have no such argument
        check_arguments(*indices, *rest)
    return tensor


def are_sizes(value: Any) -> bool:
    """Whether a value is a tuple of integers that are not negative (``torch.Size`` is one)."""
    if not isinstance(value, tuple) or len(value) > MAX_RANK:
        return False
    for number in value:  # noqa: SIM110 - it runs twice for each tensor, and all() takes twice as long
        if type(number) is not int or not 0 <= number < MAX_SIZE:
            return False
    return True


# -- values


def value_of(name: str, args: Args) -> Any:
    """A value by the name of its class or function; ``Malformed`` for arguments that Python never pickles."""
    maker, *kinds = VALUES[name]
    if len(args) > len(kinds) or any(not isinstance(*pair) for pair in zip(args, kinds, strict=False)):
        raise Malformed(f"a call of {name} with unexpected arguments")
    try:
        return maker(*args)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise Malformed(f"a call of {name} that fails: {error}") from error


# -- constructors

_FACTORIES = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, OrderedDict, Counter)


def _latin(text: str, codec: str) -> bytes:
    if codec not in ("latin1", "latin-1"):
        raise ValueError(f"the codec is {codec!r}")
    return str.encode(text, "latin1")


def _bytearray(content: Any = b"", *codec: str) -> bytearray:
    return bytearray(_latin(content, *codec) if codec else content)


def _counter(content: Any = ()) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    dict.update(counted, content)  # Counter.update would count
    return counted


def _defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and factory not in _FACTORIES:
        raise ValueError("the factory does not make plain values")
    return defaultdict(factory)


def _size(sizes: tuple[Any, ...] = ()) -> Any:
    if any(type(size) is not int or not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise ValueError("a size is not an integer of 64 bits")
    return _late("torch", "Size", sizes)


def _layout(name: str) -> Any:
    import torch

    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise ValueError(f"there is no layout {name[:80]!r}")  # noqa: TRY004 - the name is wrong, not its type
    return layout


def _path(kind: str) -> Callable[..., Any]:
    """The class for a path; a pure one for a path of another operating system."""
    windows = "Windows" in kind
    if not kind.startswith("Pure") and windows == (os.name == "nt"):
        return pathlib.Path
    return pathlib.PureWindowsPath if windows else pathlib.PurePosixPath


def _late(module: str, name: str, *args: Any) -> Any:
    """Call a class of a module that is imported only now."""
    return getattr(import_module(module), name)(*args)


def _zone(key: str, cached: object = True) -> Any:
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(key) if cached else ZoneInfo.no_cache(key)
    except (LookupError, OSError) as error:
        raise LoadError(f"the time zone {key[:80]!r} is not known here", fix="pip install tzdata") from error


def _bare(kind: Any) -> Callable[..., Any]:
    """A function that makes an object whose state is set later."""
    return lambda *_: kind.__new__(kind)


_ZONE = (dt.tzinfo, type(None))
_INDEX = (int, type(None))
_NUMBER = (float, int)
_LIST = (list, tuple)
_ITEMS = (dict, list)  # Python 2 writes a list of pairs
VALUES: dict[str, tuple[Any, ...]] = {
    "_codecs.encode": (_latin, str, str),  # bytes, as protocol 2 writes them
    "builtins.bytearray": (_bytearray, (bytes, str), str),
    "builtins.bytes": (bytes,),
    "builtins.complex": (complex, _NUMBER, _NUMBER),
    "builtins.frozenset": (frozenset, _LIST),
    "builtins.set": (set, _LIST),
    "collections.Counter": (_counter, _ITEMS),
    "collections.OrderedDict": (OrderedDict, _ITEMS),
    "collections.defaultdict": (_defaultdict, object),
    "torch.Size": (_size, tuple),
    "torch.device": (partial(_late, "torch", "device"), (str, int), int),
    "torch.serialization._get_layout": (_layout, str),
    "torch.torch_version.TorchVersion": (partial(_late, "torch.torch_version", "TorchVersion"), str),
    "argparse.Namespace": (argparse.Namespace,),
    "types.SimpleNamespace": (types.SimpleNamespace,),
    "builtins.range": (range, int, int, int),
    "builtins.slice": (slice, _INDEX, _INDEX, _INDEX),
    "collections.deque": (deque, _LIST, _INDEX),
    **{f"collections.{kind.__name__}": (_bare(kind), *((str,) if kind is UserString else ())) for kind in _WRAPPERS},
    "datetime.date": (dt.date, (bytes, int), int, int),
    "datetime.datetime": (dt.datetime, bytes, _ZONE),
    "datetime.time": (dt.time, bytes, _ZONE),
    "datetime.timedelta": (dt.timedelta, int, int, int),
    "datetime.timezone": (dt.timezone, dt.timedelta, str),
    "zoneinfo.ZoneInfo._unpickle": (_zone, str, (bool, int)),
    "decimal.Decimal": (partial(_late, "decimal", "Decimal"), str),
    "fractions.Fraction": (partial(_late, "fractions", "Fraction"), (str, int), int),
    "uuid.UUID": (_bare(uuid.UUID),),
    **{
        f"{module}.{kind}": (_path(kind), *(str,) * 64)
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""For each name the function to call, and the types of its arguments. A call may have fewer arguments."""
