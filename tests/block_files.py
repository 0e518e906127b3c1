"""The files that the manual names, so that its commands can be run: small, and what the pages say they are."""

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
from tests.diagnose.machines import healthy

import transload

DATA = Path(__file__).parent / "data" / "h200"
WHOLE = DATA / "state_dict_cuda0.pt"
INFER = """\
import torch

state = torch.load("model_cuda0.pt")
"""
PAGE = "<html><title>Sign in</title></html>"


class Net(torch.nn.Module):
    """The model whose parameters model.pt has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.fc, self.head = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2, bias=False)
        self.head.weight = self.fc.weight


class Greeting:
    """What a stranger may put into a file; this one is harmless."""

    def __reduce__(self) -> Any:
        return eval, ("'hello'",)


def saved(content: object, tag: Callable[[Any], str] = lambda _: "cuda:0") -> bytes:
    """What ``torch.save`` writes of it, with tags as wanted."""
    stream = io.BytesIO()
    with mock.patch("torch.serialization.location_tag", tag):
        torch.save(content, stream)
    return stream.getvalue()


@cache
def spread() -> bytes:
    """A checkpoint over eight GPUs."""
    numbers = itertools.count()
    return saved({f"layer{at}": torch.zeros(64) for at in range(16)}, lambda _: f"cuda:{next(numbers) % 8}")


@cache
def damaged() -> bytes:
    """A checkpoint in which the first two storages are not what was saved."""
    data = bytearray((DATA / "mixed_cpu_cuda.pt").read_bytes())
    for storage in transload.inspect(bytes(data)).storages[:2]:
        assert storage.offset is not None
        data[storage.offset] ^= 0x40
    return bytes(data)


@cache
def flipped() -> bytes:
    """A checkpoint with two bits that are not what was saved."""
    data = bytearray((DATA / "train_cuda0.ckpt").read_bytes())
    data[3000] ^= 4
    data[9000] ^= 1
    return bytes(data)


@cache
def random_state() -> bytes:
    """What the Trainer of transformers keeps of the random numbers."""
    stream = io.BytesIO()
    numbers = np.random.get_state()  # noqa: NPY002 - as it does
    torch.save({"python": random.getstate(), "numpy": numbers, "cpu": torch.get_rng_state()}, stream)
    return stream.getvalue()


def machine() -> bytes:
    """A report of the doctor."""
    return json.dumps({"schema": 1, "machine": healthy().to_dict()}).encode()


COMMON: dict[str, Callable[[], bytes]] = {
    "model.pt": WHOLE.read_bytes,
    "model_cuda0.pt": WHOLE.read_bytes,
    "FILE": WHOLE.read_bytes,
    "train.ckpt": (DATA / "train_cuda0.ckpt").read_bytes,
    "whole.pt": (DATA / "whole_custom_module_cuda0.pt").read_bytes,
    "model.pt2": (DATA / "aoti_cuda0.pt2").read_bytes,
    "spread.pt": spread,
    "stranger.pt": lambda: saved({"weight": torch.zeros(4), "note": Greeting()}),
    "broken.pt": lambda: WHOLE.read_bytes()[:-100],
    "download.pt": lambda: WHOLE.read_bytes()[:3000],
    "page.pt": PAGE.encode,
    "rng_state.pth": random_state,
    "infer.py": INFER.encode,
    "train.py": bytes,
}
OF_PAGES: dict[tuple[str, str], dict[str, Callable[[], bytes]]] = {
    ("README.md", "Use it"): {"train.py": INFER.encode},
    ("doctor.md", "Several machines"): dict.fromkeys(("machine.json", "other.json"), machine),
    ("rescue.md", "transload rescue"): {"broken.pt": flipped},
    ("retag.md", ""): {"model.pt": (DATA / "mixed_cpu_cuda.pt").read_bytes},
    ("verify.md", "transload verify"): {"model.pt": damaged},
}
"""What a page, or a section of it, has under a name instead."""
ANEW = {("rescue.md", "python"): ("repaired.pt",)}
"""What blocks of a kind make though others before them have: a page shows two ways, and a reader goes one of them."""


def lay_out(folder: Path, page: str, section: str) -> None:
    """Put what the pages name into a folder, as it was when a section began; what a page has made there stays."""
    own = OF_PAGES.get((page, section), OF_PAGES.get((page, ""), {}))
    for name, content in {**COMMON, **own}.items():
        (folder / name).write_bytes(content())
    if page == "recipes.md" and not (folder / "step-1000").exists():
        distributed(folder / "step-1000")


def clear(folder: Path, page: str, kind: str) -> None:
    """Take away what the blocks of a kind are to make themselves."""
    for name in ANEW.get((page, kind), ()):
        (folder / name).unlink(missing_ok=True)


def distributed(folder: Path) -> None:
    """What ``torch.distributed.checkpoint`` writes."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state = {"model": Net().state_dict()}
        if not hasattr(checkpoint, "save"):  # before torch 2.2
            checkpoint.save_state_dict(state, checkpoint.FileSystemWriter(folder), no_dist=True)
        else:
            checkpoint.save(state, checkpoint_id=folder)
