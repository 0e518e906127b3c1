"""Small files for the commands of the manual: with the names and the properties that the pages say."""

from __future__ import annotations

import io
import itertools
import json
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests import makers
from tests.diagnose.machines import healthy
from tests.test_doctor_pages import README_MACHINE

import transload
from transload.machine import Machine

DATA = Path(__file__).parent / "data" / "h200"
STATE_DICT = DATA / "state_dict_cuda0.pt"
INFER = """\
import torch

state = torch.load("model_cuda0.pt")
"""
PAGE = "<html><title>Sign in</title></html>"


class Net(torch.nn.Module):
    """The model whose parameters are in model.pt."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.fc, self.head = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2, bias=False)
        self.head.weight = self.fc.weight


class Greeting:
    """A call in a pickle, as in a file from an untrusted source; this one is harmless."""

    def __reduce__(self) -> Any:
        return eval, ("'hello'",)


def saved(content: object, tag: Callable[[Any], str] = lambda _: "cuda:0") -> bytes:
    """What ``torch.save`` writes, with the location tags that ``tag`` returns."""
    stream = io.BytesIO()
    with mock.patch("torch.serialization.location_tag", tag):
        torch.save(content, stream)
    return stream.getvalue()


@cache
def spread() -> bytes:
    """A checkpoint whose storages are spread over eight GPUs."""
    numbers = itertools.count()
    return saved({f"layer{at}": torch.zeros(64) for at in range(16)}, lambda _: f"cuda:{next(numbers) % 8}")


@cache
def damaged() -> bytes:
    """A checkpoint whose first two storages are corrupted."""
    data = bytearray((DATA / "mixed_cpu_cuda.pt").read_bytes())
    for storage in transload.inspect(bytes(data)).storages[:2]:
        assert storage.offset is not None
        data[storage.offset] ^= 0x40
    return bytes(data)


@cache
def flipped() -> bytes:
    """A checkpoint with two flipped bits."""
    data = bytearray((DATA / "train_cuda0.ckpt").read_bytes())
    data[3000] ^= 4
    data[9000] ^= 1
    return bytes(data)


@cache
def other_model() -> bytes:
    """model.pt after some training: with other weights, a tensor in another dtype, and one less."""
    state = transload.load(STATE_DICT, map_location="cpu")
    state["conv.weight"] = state["conv.weight"] * 1.01
    state["fc.bias"] = state["fc.bias"].bfloat16()
    del state["bn.num_batches_tracked"]
    return saved(state)


@cache
def random_state() -> bytes:
    """The state of the random number generators, as the Trainer of transformers saves it."""
    numbers = np.random.get_state()  # noqa: NPY002 - as the Trainer does
    return makers.saved({"python": random.getstate(), "numpy": numbers, "cpu": torch.get_rng_state()})


def machine(examined: Machine | None = None) -> bytes:
    """A JSON report of the doctor; of a healthy machine, unless another is given."""
    return json.dumps({"schema": 1, "machine": (examined or healthy()).to_dict()}).encode()


COMMON: dict[str, Callable[[], bytes]] = {
    "model.pt": STATE_DICT.read_bytes,
    "model_cuda0.pt": STATE_DICT.read_bytes,
    "FILE": STATE_DICT.read_bytes,
    "train.ckpt": (DATA / "train_cuda0.ckpt").read_bytes,
    "whole.pt": (DATA / "whole_custom_module_cuda0.pt").read_bytes,
    "model.pt2": (DATA / "aoti_cuda0.pt2").read_bytes,
    "spread.pt": spread,
    "stranger.pt": lambda: saved({"weight": torch.zeros(4), "note": Greeting()}),
    "broken.pt": lambda: STATE_DICT.read_bytes()[:-100],
    "download.pt": lambda: STATE_DICT.read_bytes()[:3000],
    "page.pt": PAGE.encode,
    "rng_state.pth": random_state,
    "infer.py": INFER.encode,
    "train.py": bytes,
}
LORA = {
    "base_model.model.fc.lora_A.weight": torch.ones(1, 4),
    "base_model.model.fc.lora_B.weight": torch.ones(2, 1),
}
"""The matrices of an adapter for a linear module."""


def safetensors(tensors: dict[str, Any]) -> bytes:
    """A safetensors file, which needs no package to be written."""
    stream, header, at = io.BytesIO(), {}, 0
    for name, tensor in tensors.items():
        data = tensor.numpy().tobytes()
        stream.write(data)
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [at, at := at + len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + stream.getvalue()


PAGE_FILES: dict[tuple[str, str], dict[str, Callable[[], bytes]]] = {
    ("overview.md", ""): {"train.py": INFER.encode},
    ("convert.md", ""): {
        "base.safetensors": lambda: safetensors({"fc.weight": torch.ones(2, 4), "fc.bias": torch.zeros(2)}),
        "adapter/adapter_model.safetensors": lambda: safetensors(LORA),
        "adapter/adapter_config.json": json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2}).encode,
    },
    ("diff.md", ""): {"other.pt": other_model},
    ("index.md", "A machine"): {"machine.json": lambda: machine(README_MACHINE)},
    ("doctor.md", "Several machines"): dict.fromkeys(("machine.json", "other.json"), machine),
    ("rescue.md", "transload rescue"): {"broken.pt": flipped},
    ("retag.md", ""): {"model.pt": (DATA / "mixed_cpu_cuda.pt").read_bytes},
    ("verify.md", "transload verify"): {"model.pt": damaged},
}
"""Files that are different on a page, or in a section of it."""
RECREATED = {("rescue.md", "python"): ("repaired.pt",)}
"""Files that blocks of a kind create although earlier ones did: the page shows two ways, and a reader takes one."""


def lay_out(folder: Path, page: str, section: str) -> None:
    """Write the files that the pages name, as they are at the start of a section; files that a page created stay."""
    page_files = PAGE_FILES.get((page, section), PAGE_FILES.get((page, ""), {}))
    for name, content in {**COMMON, **page_files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content())
    if page in ("recipes.md", "ranks.md") and not (folder / "step-1000").exists():
        distributed(folder / "step-1000")


def clear(folder: Path, page: str, kind: str) -> None:
    """Remove the files that blocks of this kind create themselves."""
    for name in RECREATED.get((page, kind), ()):
        (folder / name).unlink(missing_ok=True)


def distributed(folder: Path) -> None:
    """Write a checkpoint with ``torch.distributed.checkpoint``."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing process group
        state = {"model": Net().state_dict()}
        if not hasattr(checkpoint, "save"):  # before torch 2.2
            checkpoint.save_state_dict(state, checkpoint.FileSystemWriter(folder), no_dist=True)
        else:
            checkpoint.save(state, checkpoint_id=folder)
