"""What people keep in checkpoints: user-defined classes, and one object for each ordinary kind of value.

Imported as the top-level module ``belongings``, as user training code would be, by the tests and by the processes they
start.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import random
import types
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self


class Colour(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 3


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    colour: Colour = Colour.RED

    def scaled(self) -> float:
        return 2 * self.lr


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str = "x"


class Point(NamedTuple):
    x: int
    y: int


class Registry(collections.OrderedDict[str, Any]):
    pass


class Keywords:
    """Protocol 2 writes it as ``partial(cls.__new__, cls, value=…)()``."""

    def __new__(cls, *, value: int = 0) -> Self:
        instance = object.__new__(cls)
        instance.value = value
        return instance

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"value": self.value}

    value: int


class Block(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    def __init__(self, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm_layer = norm
        self.norm = norm(4)
        self.inner = Block.Inner()
        self.activation = torch.relu


class Marked(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    """A tensor that wraps another, as in quantization libraries."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapped], inner: torch.Tensor) -> Wrapped:  # noqa: PYI034 - torch returns this type
        wrapper: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def schedule(step: int) -> float:
    return 1 / (step + 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def training() -> dict[str, Any]:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "history": [0.5, 0.25],
        "best": None,
        "name": "naïve",
    }


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, dtype=torch.qint8)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)


def distributed() -> torch.Tensor:
    """A DTensor over one process, without communication."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        destroy_process_group()


def attributed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "mine"
    return tensor


def attributed_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.sharded = True
    return parameter


def dtypes() -> dict[str, torch.Tensor]:
    names = (
        "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128 uint16 uint32 uint64"
    )
    names += " float8_e4m3fn float8_e5m2 complex32"
    return {name: torch.ones(2).to(getattr(torch, name)) for name in names.split()}


# What torch.load(weights_only=True) loads.
DATA: dict[str, Callable[[], Any]] = {
    "state dict": lambda: net().state_dict(),
    "training": training,
    "tensor": lambda: torch.ones(2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "views": lambda: [torch.arange(10)[2:5], torch.ones(2, 3).t()],
    "dtypes": dtypes,
    "conj and neg": lambda: [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ],
    "sizes, devices, dtypes, layouts": lambda: [
        torch.Size([1, 2]),
        torch.device("cuda", 1),
        torch.float16,
        torch.sparse_csr,
    ],
    "sets, complex, bytes, bytearray": lambda: [{1, 2}, set(), 1 + 2j, b"\x00\xff", bytearray(b"x"), bytearray()],
    "ordered and counted": lambda: [
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        collections.OrderedDict(),
    ],
    "numbers": lambda: [0, -1, 255, 65536, 2**31, -(2**31), 2**80, 1.5, float("nan"), True, None],
    "text": lambda: ["", "ä", "\ud800", "x" * 70_000],
    "tuples as keys": lambda: {(1, "a"): 1, 2: 3, None: 4, 1.5: 5, True: 6},
    "shared": lambda: [[tensor := torch.ones(2), tensor], {"again": tensor}],
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "per tensor quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "per channel quantized": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.quint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(2, device="meta"),
    "attributes on a tensor": attributed,
    "attributes on a parameter": attributed_parameter,
    "parametrized state dict": lambda: parametrized().state_dict(),
    "quantized state dict": lambda: quantized().state_dict(),
    "storages": lambda: [torch.ones(2).untyped_storage(), torch.ones(2).storage()],
    "random states": lambda: {"cpu": torch.get_rng_state(), "generator": torch.Generator().get_state()},
    "python random state": lambda: random.Random(0).getstate(),  # noqa: S311 - a state to save
    "buffers": lambda: nn.BatchNorm1d(2).state_dict(),
    "lbfgs": lambda: torch.optim.LBFGS(net().parameters()).state_dict(),
    "metadata": lambda: nn.Transformer(4, 2, 1, 1, 4).state_dict(),
}

# Ordinary objects that torch.load(weights_only=True) refuses: they need trust, but are not dangerous.
TRUST: dict[str, Callable[[], Any]] = {
    "namespace": lambda: {"args": argparse.Namespace(lr=0.1, device=torch.device("cpu")), "model": net().state_dict()},
    "simple namespace": lambda: types.SimpleNamespace(a=1),
    "numpy array": lambda: np.arange(6).reshape(2, 3),
    "numpy scalars": lambda: [np.float64(1.5), np.int64(3), np.float32(2), np.bool_(True)],
    "numpy random state": lambda: np.random.RandomState(0).get_state(),
    "numpy dtypes": lambda: [np.dtype("float16"), np.dtype("<U3"), np.dtype([("a", "i4")]), np.dtype("datetime64[s]")],
    "numpy text and objects": lambda: [np.array(["a"]), np.array([1, "x"], dtype=object)],
    "paths": lambda: [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("a"), pathlib.Path("c")],
    "dates": lambda: [
        dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc),
        dt.date(2024, 1, 2),
        dt.timedelta(3),
        dt.time(4),
    ],
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "deque": lambda: collections.deque([1.5], maxlen=3),
    "frozenset": lambda: frozenset({1}),
    "empty bytes": lambda: b"",
    "decimals and fractions": lambda: [decimal.Decimal("1.5"), fractions.Fraction(1, 3)],
    "uuid": lambda: uuid.UUID(int=5),
    "ranges and slices": lambda: [range(3), slice(1, 2)],
    "enums": lambda: [Colour.RED, Flags.A, Level.LOW, Flags.A | Flags.B],
    "dataclass": Config,
    "frozen dataclass": Frozen,
    "named tuple": lambda: Point(1, 2),
    "dictionary subclass": lambda: Registry(a=torch.ones(1)),
    "keyword arguments": lambda: Keywords(value=3),
    "classes and functions": lambda: [nn.Linear, schedule, len, int, type(None)],
    "bound method": lambda: Config().scaled,
    "partial": lambda: functools.partial(nn.LayerNorm, eps=1e-6),
    "exception": lambda: ValueError("x"),
    "torch version": lambda: torch.__version__,
    "generator": torch.Generator,
    "jagged": jagged,
    "distributed": distributed,
    "wrapper subclass": lambda: Wrapped(torch.ones(2)),
    "tensor subclass": lambda: torch.ones(2).as_subclass(Marked),
    "sequential": net,
    "user module": Block,
    "user module with a partial": lambda: Block(functools.partial(nn.LayerNorm, eps=1e-6)),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 4),
    "lstm": lambda: nn.LSTM(2, 3),
    "embedding and attention": lambda: nn.ModuleDict({"e": nn.Embedding(3, 4), "a": nn.MultiheadAttention(4, 2)}),
    "module list": lambda: nn.ModuleList([nn.Linear(1, 1), nn.Dropout(), nn.GELU(), nn.GroupNorm(1, 2)]),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    "quantized module": quantized,
    "optimizer": lambda: trained()[1],
    "sgd": lambda: torch.optim.SGD(net().parameters(), 0.1, momentum=0.9),
    "scheduler object": lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net().parameters(), 0.1), 3),
    "everything": lambda: {**training(), "args": argparse.Namespace(a=np.float64(1)), "net": Block(), "c": Colour.RED},
}  # fmt: skip
