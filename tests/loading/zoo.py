"""Specimens of everything that people pass to ``torch.save``, and the forms in which torch writes them.

``ZOO`` contains only what the installed torch supports.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import io
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

# The legacy form includes the source of each module class; to find it torch parses the whole file. Cache the result.
torch.serialization.get_source_lines_and_file = functools.cache(torch.serialization.get_source_lines_and_file)

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Sparse invariant checks are implicitly disabled",
        "Validating sparse tensor invariants because weights_only=True",
        "BComplex32 support is experimental",
        "backward hook .* on tensor will not be serialized",
        "Lazy modules are a new feature",
        "`torch.jit",
        "pickle_load_args only works if",
        "Detected pickle protocol",
    )
]
"""Warnings of torch to ignore while a specimen is built, saved or loaded."""

Build = Callable[[], Any]


@dataclass(frozen=True)
class Specimen:
    """An object to save. ``safe``: it is plain data; any other must be refused unless the caller trusts the file.

    ``classes`` must be registered with ``torch.serialization.add_safe_globals`` for it to count as data.
    """

    build: Build
    safe: bool = True
    classes: tuple[Any, ...] = ()

    def make(self) -> Any:
        """Build the object: the same every time, without changing the global random state."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.build()


ZOO: dict[str, Specimen] = {}


def specimen(name: str, *classes: Any, safe: bool = True) -> Callable[[Build], Build]:
    """Register the decorated builder in ``ZOO`` under a name."""

    def register(build: Build) -> Build:
        ZOO[name] = Specimen(build, safe, classes)
        return build

    return register


DATA_TORCH_REFUSES = frozenset({"trusted: namespace", "trusted: library objects"})
"""Specimens that torch refuses with ``weights_only`` and transload loads, since they are only data."""

BUILT_FROM_BYTES = frozenset({"nested", "trusted: generator"})
"""Specimens that read their numbers while they are rebuilt. In a legacy stream the numbers come later, and torch reads
uninitialized memory."""


# -- file forms --------------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    **{f"zip, protocol {n}": {"pickle_protocol": n} for n in (3, 4, 5)},
    "legacy, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


def saved(value: Any, form: str = "zip", tag: str = "") -> bytes:
    """The bytes of a saved file. With a ``tag``, every storage in it is tagged with that device."""
    buffer = io.BytesIO()
    with save_with_tag(tag):
        torch.save(value, buffer, **FORMS[form])
    return buffer.getvalue()


@contextlib.contextmanager
def save_with_tag(tag: str) -> Iterator[None]:
    """Make ``torch.save`` tag every storage with this device, whichever device it is on."""
    original = torch.serialization.location_tag
    if tag:
        torch.serialization.location_tag = lambda *_, **__: tag
    try:
        yield
    finally:
        torch.serialization.location_tag = original


@contextlib.contextmanager
def registered_as_safe(specimen: Specimen) -> Iterator[None]:
    """Register the classes of a specimen as safe globals, if this torch has such a registry."""
    registered = torch.serialization.get_safe_globals() if hasattr(torch.serialization, "get_safe_globals") else None
    if registered is not None:
        torch.serialization.add_safe_globals(list(specimen.classes))
    try:
        yield
    finally:
        if registered is not None:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(list(registered))


# -- every dtype -------------------------------------------------------------------------------------------------------


def noise(count: int) -> torch.Tensor:
    """Random bytes: read as numbers they include every kind, NaN too."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def of_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor of any dtype that is not quantized, even one this torch cannot compute with, and a view of it."""
    data = noise(96).view(torch.int8).remainder(2).bool() if dtype is torch.bool else noise(96).view(dtype)
    return [data, data[1:3]]


def _dtypes() -> dict[str, torch.dtype]:
    dtypes = {
        str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
    }
    return {name: dtype for name, dtype in sorted(dtypes.items()) if not name.startswith("q") and _can_save(dtype)}


def _can_save(dtype: torch.dtype) -> bool:
    """Whether torch.save accepts tensors of this dtype; some dtypes are only reserved names."""
    try:
        saved(of_dtype(dtype))
    except (RuntimeError, NotImplementedError, TypeError, KeyError):
        return False
    return True


DTYPES = _dtypes()
for _name, _dtype in DTYPES.items():
    ZOO[f"dtype {_name}"] = Specimen(functools.partial(of_dtype, _dtype))


@specimen("dtypes in one file")
def dtypes_together() -> Any:
    return {name: of_dtype(dtype)[0] for name, dtype in DTYPES.items()}


@specimen("quantized per tensor")
def quantized() -> Any:
    data = torch.rand(3, 4)
    return [torch.quantize_per_tensor(data, 0.1, 10, dtype) for dtype in (torch.qint8, torch.quint8, torch.qint32)]


@specimen("quantized per channel")
def quantized_per_channel() -> Any:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([1, 2, 3])
    return {"w": torch.quantize_per_channel(torch.rand(3, 4), scales, zeros, 0, torch.qint8)}


@specimen("quantized per channel with float zero points")
def quantized_with_float_zero_points() -> Any:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.5])
    return torch.quantize_per_channel(torch.rand(3, 4), scales, zeros, 0, torch.quint8)


@specimen("quantized to four bits")
def quantized_to_four_bits() -> Any:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.5])
    return torch.quantize_per_channel(torch.rand(3, 4), scales, zeros, 0, torch.quint4x2)


# -- every kind of tensor ----------------------------------------------------------------------------------------------

STRIDED: dict[str, Build] = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0),
    "empty with shape": lambda: torch.zeros(2, 0, 3),
    "one element of a storage": lambda: torch.rand(1000)[500],
    "large": lambda: torch.rand(300, 1000),
    "transposed": lambda: torch.rand(3, 4).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.rand(3, 1).expand(3, 1000),
    "far strides": lambda: torch.rand(1000).as_strided((2, 3), (500, 7), 11),
    "overlapping": lambda: torch.rand(10).as_strided((4, 3), (2, 1), 1),
    "slice with step": lambda: torch.rand(100)[3:90:7],
    "conjugate": lambda: torch.view_as_complex(torch.rand(3, 2)).conj(),
    "conjugate complex128": lambda: torch.view_as_complex(torch.rand(3, 2).double()).conj().t(),
    "negative": lambda: torch.view_as_complex(torch.rand(3, 2)).conj().imag,
    "negated view": lambda: torch._neg_view(torch.rand(3)),
    "requires grad": lambda: torch.rand(3, requires_grad=True),
    "not a number": lambda: torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0]),
    "meta": lambda: torch.empty(3, 4, device="meta").t(),
    "meta parameter": lambda: nn.Parameter(torch.empty(3, device="meta")),
    "parameter": lambda: nn.Parameter(torch.rand(3)),
    "parameter without grad": lambda: nn.Parameter(torch.rand(3), requires_grad=False),
}
for _name, _build in STRIDED.items():
    ZOO[_name] = Specimen(_build)


@specimen("detached result")
def detached() -> Any:
    return (torch.rand(3, requires_grad=True) * 2).detach().requires_grad_()


@specimen("parameter with attributes")
def parameter_with_attributes() -> Any:
    parameter = nn.Parameter(torch.rand(3))
    parameter.group, parameter.decay = "head", 0.1
    return {"w": parameter}


@specimen("tensor with attributes")
def tensor_with_attributes() -> Any:
    tensor = torch.rand(3)
    tensor.group, tensor.beside = "head", torch.rand(2)
    return {"w": tensor}


if hasattr(nn, "Buffer"):  # since torch 2.5

    @specimen("buffer")
    def buffer() -> Any:
        return {"b": nn.Buffer(torch.rand(3)), "c": nn.Buffer(torch.rand(3), persistent=False)}


@specimen("views of one storage")
def views() -> Any:
    base = torch.rand(10)
    return {"head": base[:3], "tail": base.narrow(0, 5, 5), "all": base, "turned": base.view(2, 5).t()}


@specimen("a view without its base")
def view_alone() -> Any:
    return torch.rand(1000)[10:20]


@specimen("empty views of one storage")
def empty_views() -> Any:
    base = torch.rand(4)
    return [base[:0], base[2:2], base]


@specimen("the same tensor twice")
def same_twice() -> Any:
    tensor = torch.rand(3)
    return {"a": tensor, "b": tensor, "c": [tensor, tensor.view(3)]}


@specimen("sparse")
def sparse() -> Any:
    indices = torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]])
    uncoalesced = torch.sparse_coo_tensor(indices, torch.rand(4), (2, 3))
    hybrid = torch.sparse_coo_tensor(indices, torch.rand(4, 5), (2, 3, 5))
    empty = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (2, 3))
    return {"loose": uncoalesced, "coalesced": uncoalesced.coalesce(), "hybrid": hybrid, "nothing": empty}


@specimen("sparse requires grad")
def sparse_with_grad() -> Any:
    return torch.eye(3).to_sparse().requires_grad_()


def compressed(layout: str) -> Any:
    dense = torch.rand(4, 4) * torch.eye(4)
    matrix = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout in ("bsr", "bsc") else []))
    return {"w": matrix, "beside": dense}


for _name in ("csr", "csc", "bsr", "bsc"):
    ZOO[f"sparse {_name}"] = Specimen(functools.partial(compressed, _name))


if hasattr(torch._utils, "_rebuild_nested_tensor"):  # since torch 2.2

    @specimen("nested")
    def nested() -> Any:
        return {"n": torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])}


if hasattr(torch, "jagged"):  # since torch 2.2

    @specimen("jagged")
    def jagged() -> Any:
        tensor = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)
        return {"n": tensor, "again": tensor}


class Marked(torch.Tensor):
    """A subclass that adds nothing."""


class Pair(torch.Tensor):
    """A wrapper subclass: it holds two tensors and has no storage."""

    first: torch.Tensor
    second: torch.Tensor

    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:  # noqa: PYI034 - Self is newer
        pair: Pair = torch.Tensor._make_wrapper_subclass(
            cls, first.size(), dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        pair.first, pair.second = first, second
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not needed to save it")


@specimen("subclass", Marked)
def subclass() -> Any:
    tensor = torch.rand(3).as_subclass(Marked)
    tensor.label = "a"
    return {"w": tensor, "parameter": nn.Parameter(torch.rand(2).as_subclass(Marked))}


@specimen("wrapper subclass", Pair)
def wrapper_subclass() -> Any:
    return [Pair(torch.rand(3), torch.rand(3))]


@specimen("storages")
def storages() -> Any:
    tensor = torch.rand(5)
    return {"typed": tensor.storage(), "tensor": tensor, "ints": torch.arange(3).storage(), "again": tensor.storage()}


@specimen("untyped storage")
def untyped_storage() -> Any:
    return [torch.rand(5).untyped_storage()]


# -- values ------------------------------------------------------------------------------------------------------------


@specimen("plain values")
def plain_values() -> Any:
    numbers = [0, 1, -1, 255, 256, 65535, 65536, 1 << 31, -(1 << 31), 1 << 63, 1 << 200, -(1 << 200)]
    floats = [0.0, -0.0, 1.5, float("inf"), float("nan"), 5e-324]
    texts = ["", "a", "é", "日本", "\U0001f600", "a" * 300, "cpu"]
    return {
        "none": None,
        "bools": (True, False),
        "numbers": numbers,
        "floats": floats,
        "texts": texts,
        "bytes": [b"abc", bytes(range(256)), b"x" * 300],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
    }


@specimen("empty bytes")
def empty_bytes() -> Any:
    return b""


@specimen("complex numbers")
def complex_numbers() -> Any:
    return {"c": 1 - 2j, "zero": complex(-0.0, 0.0)}


@specimen("bytearray")
def byte_array() -> Any:
    return {"b": bytearray(b"abc"), "empty": bytearray()}


@specimen("sets")
def sets() -> Any:
    return {"s": {1, 2, "a"}, "empty": set()}


@specimen("frozen sets")
def frozen_sets() -> Any:
    return {"f": frozenset({1, (2, 3)}), "empty": frozenset()}


@specimen("torch types")
def torch_types() -> Any:
    return {
        "dtype": [torch.float16, torch.int64],
        "device": [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda"), torch.device("mps")],
        "size": torch.Size([2, 3]),
        "layout": [torch.strided, torch.sparse_coo],
        "shape": torch.rand(2, 3).shape,
    }


@specimen("qscheme")
def quantization_schemes() -> Any:
    return [torch.per_tensor_affine, torch.per_channel_affine]


@specimen("version")
def version() -> Any:
    return {"torch": torch.__version__, "w": torch.rand(2)}


@specimen("dictionaries")
def dictionaries() -> Any:
    ordered = OrderedDict(b=1, a=torch.rand(2))
    ordered._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": 2}})  # type: ignore[attr-defined]
    return {
        "ordered": ordered,
        "empty": OrderedDict(),
        "counter": Counter("abca"),
        "order": {"z": 1, "a": 2, "m": 3},
    }


@specimen("default dictionaries")
def default_dictionaries() -> Any:
    return [defaultdict(list, a=[1]), defaultdict(None, b=2)]


@specimen("keys")
def keys() -> Any:
    return {1: "int", "1": "text", (1, "a"): "tuple", None: "none", 2.5: "float", b"k": "bytes", False: "bool"}


@specimen("nested default dictionaries", safe=False)
def nested_default_dictionaries() -> Any:
    return defaultdict(functools.partial(defaultdict, int), a=defaultdict(int, b=1))


@specimen("deep")
def deep() -> Any:
    value: Any = torch.rand(2)
    for depth in range(150):
        value = [value] if depth % 2 else {"d": value}
    return value


@specimen("wide")
def wide() -> Any:
    return [*range(1200), *(str(i) for i in range(400)), *({"i": i} for i in range(300))]


@specimen("shared containers")
def shared_containers() -> Any:
    one, two = [1, torch.rand(2)], {"a": 1}
    return {"a": one, "b": one, "c": (one, two), "d": [two, two]}


@specimen("cycles")
def cycles() -> Any:
    ring: list[Any] = [torch.rand(2)]
    ring.append(ring)
    root: dict[str, Any] = {"ring": ring}
    root["self"] = root
    root["tuple"] = (root, ring)
    return root


@specimen("a cycle through a tuple")
def tuple_cycle() -> Any:
    inner: list[Any] = []
    outer = (inner, torch.rand(2))
    inner.append(outer)
    return outer


@specimen("root is a number")
def number_as_root() -> Any:
    return 5


@specimen("root is a string")
def string_as_root() -> Any:
    return "cuda:0"


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small model with buffers, tied weights and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.note = {"made": "for tests"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embed(x))))


def hook(*_: object) -> None:
    """A hook that pickle can save by name."""


def trained(optimizer: str, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    net = Net()
    stepped: torch.optim.Optimizer = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options)
    for _ in range(2):
        stepped.zero_grad()
        net(torch.randint(0, 7, (3,))).sum().backward()
        stepped.step()
    return net, stepped


@specimen("state dict")
def state_dict() -> Any:
    return Net().state_dict()


@specimen("state dict with grad")
def state_dict_with_vars() -> Any:
    return Net().state_dict(keep_vars=True)


@specimen("tied parameters")
def tied() -> Any:
    net = Net()
    return {"a": net.embed.weight, "b": net.head.weight, "data": net.head.weight.data}


for _name, _options in (("Adam", {}), ("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})):
    ZOO[f"state of {_name}"] = Specimen(lambda name=_name, more=_options: trained(name, **more)[1].state_dict())  # type: ignore[misc]


def _schedulers() -> Any:
    optimizer = trained("SGD", momentum=0.9)[1]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    return [scheduler.state_dict() for scheduler in schedulers]


ZOO["state of schedulers"] = Specimen(_schedulers)


@specimen("random states")
def random_states() -> Any:
    return {
        "torch": torch.get_rng_state(),
        "python": random.Random(0).getstate(),  # noqa: S311 - for tests
        "cuda": [torch.get_rng_state()],
    }


@specimen("training checkpoint")
def training() -> Any:
    net, optimizer = trained("Adam")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "epoch": 3,
        "global_step": 400,
        "pytorch-lightning_version": "2.2.0",
        "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 4, "done": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "kth": {}}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "betas": (0.9, 0.999), "name": "net"},
        "rng": torch.get_rng_state(),
        "best": (float("inf"), None),
    }


@specimen("data set")
def data_set() -> Any:
    return (torch.rand(10, 3), torch.arange(10))


# -- objects that need a trusted file ----------------------------------------------------------------------------------


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


@dataclass
class Options:
    """A dataclass with a tensor field."""

    rate: float
    weight: torch.Tensor


class Slotted:
    """An object with slots and no ``__dict__``."""

    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, torch.rand(2)


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: torch.Tensor


class Keeper:
    """An object whose ``__reduce__`` returns everything it can: state, list items and dictionary items."""

    def __init__(self, made: str = "by hand") -> None:
        self.made, self.listed, self.mapped = made, [], {}  # type: ignore[var-annotated]

    def __reduce__(self) -> Any:
        return Keeper, ("by pickle",), {"w": torch.rand(2)}, iter([1, torch.rand(1)]), iter([("k", torch.rand(1))])

    def append(self, value: Any) -> None:
        """Used by pickle for the list items."""
        self.listed.append(value)

    def extend(self, values: Any) -> None:
        """Used by pickle for the list items."""
        self.listed.extend(values)

    def __setitem__(self, key: str, value: Any) -> None:
        self.mapped[key] = value


def _module() -> Any:
    net = Net()
    net.register_forward_hook(hook)
    net.train(mode=False)
    return net


@specimen("parameter with hooks")
def parameter_with_hooks() -> Any:
    """Its hooks are not saved; torch.save warns about that."""
    parameter = nn.Parameter(torch.rand(3))
    parameter._backward_hooks = OrderedDict({7: hook})
    return parameter


def _generator() -> Any:
    generator = torch.Generator()
    generator.manual_seed(5)
    torch.rand(3, generator=generator)
    return {"generator": generator, "again": generator}


TRUSTED: dict[str, Build] = {
    "module": _module,
    "sequential": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.LSTM(3, 2)),
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "lazy module": lambda: nn.LazyLinear(3),
    "module in a dictionary": lambda: {"model": Net(), "epoch": 1},
    "optimizer": lambda: trained("Adam")[1],
    "loss": lambda: nn.CrossEntropyLoss(weight=torch.rand(3)),
    **({"generator": _generator} if hasattr(torch.Generator, "__setstate__") else {}),  # since torch 2.4
    "functions": lambda: {"f": hook, "c": Net, "p": functools.partial(hook, 1), "m": torch.rand(2).sum},
    "objects": lambda: [Options(0.1, torch.rand(2)), Slotted(), Point(1, torch.rand(2)), Keeper(), Colour.RED],
    "namespace": lambda: argparse.Namespace(lr=0.1, device=torch.device("cuda", 0)),
    "library objects": lambda: {
        "path": pathlib.PurePosixPath("a/b"),
        "when": datetime(2024, 1, 2, tzinfo=timezone.utc),
        "long": timedelta(1),
        "exact": Decimal("1.10"),
        "queue": deque([1, 2], 5),
        "range": range(3),
        "slice": slice(1, 2),
    },
    "arrays": lambda: {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "scalar": np.float64(0.5),
        "bool": np.bool_(1),
        "text": np.array(["a", "bc"]),
        "objects": np.array([1, None], dtype=object),
        "big": np.arange(3, dtype=">i4"),
        "dtype": np.dtype("f4"),
        "random": np.random.RandomState(0).get_state(),
    },
    "data set object": lambda: torch.utils.data.TensorDataset(torch.rand(3, 2), torch.arange(3)),
}
for _name, _build in TRUSTED.items():
    ZOO[f"trusted: {_name}"] = Specimen(_build, safe=False)
