"""Errors that are related neither to checkpoints nor to a missing GPU: none of them may get an answer."""

from __future__ import annotations

import asyncio
import builtins
import io
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception

import numpy as np
import torch
from tests.explaining.wordings import sections

__all__ = ["PASTED", "PROVOKED", "SOURCES", "provoked"]


def _recursion() -> object:
    def again(depth: int) -> int:
        return again(depth + 1)

    return again(0)


def _user_map_location() -> object:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=lambda _, place: dict[str, str]()[place])


def _group() -> object:
    if sys.version_info < (3, 11):
        raise ValueError("a group of errors")
    raise vars(builtins)["ExceptionGroup"]("several", [ValueError("one"), KeyError("two")])


def _in_a_dataset() -> object:
    class Words(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return {"a": 1}[str(index)]

    return list(torch.utils.data.DataLoader(Words()))


def _handled() -> object:
    try:
        import zzz_not_there  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        raise RuntimeError("the extra for plotting is not installed") from None
    return None


def _chained() -> object:
    try:
        return dict[str, str]()["x"]
    except KeyError as error:
        raise ValueError("no such option: x") from error


PROVOKED: dict[str, Callable[[], object]] = {
    # Python
    "key": lambda: {"a": 1}["b"],
    "number-key": lambda: dict[int, str]()[1349217909],
    "index": lambda: list[int]()[0],
    "type": lambda: "a" + 1,  # type: ignore[operator]
    "attribute": lambda: None.cuda,  # type: ignore[attr-defined]
    "division": lambda: 1 / 0,
    "name": lambda: eval("undefined_name"),  # noqa: S307
    "import": lambda: __import__("zzz_not_there"),
    "value": lambda: int("three"),
    "unicode": lambda: b"\x80\x81".decode("utf-8"),
    "ascii": lambda: b"\x8c".decode("ascii"),
    "no-file": lambda: Path("/no/such/file.pt").read_bytes(),
    "directory": lambda: Path("/").read_bytes(),
    "seek": lambda: io.BytesIO().seek(-1),
    "recursion": _recursion,
    "json": lambda: json.loads("{nonsense"),
    "process": lambda: subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True),
    "timeout": lambda: asyncio.run(asyncio.wait_for(asyncio.sleep(1), 0)),
    "connection": lambda: socket.create_connection(("127.0.0.1", 1), 0.1),
    "assertion": lambda: exec("assert 1 == 2"),  # noqa: S102
    "syntax": lambda: compile("def f(:", "x.py", "exec"),
    "group": _group,
    "handled": _handled,
    "chained": _chained,
    "pickling": lambda: pickle.dumps(lambda: 0),
    # numpy
    "numpy-shapes": lambda: np.zeros((2, 3)) @ np.zeros((2, 3)),
    "numpy-broadcast": lambda: np.zeros(3) + np.zeros(4),
    "numpy-index": lambda: np.zeros(3)[5],
    "numpy-dtype": lambda: np.zeros(2, dtype="nonsense"),
    "numpy-load": lambda: np.load(io.BytesIO(b"")),
    "numpy-load-text": lambda: np.load(io.BytesIO(b"hello, this is a text")),
    "numpy-reshape": lambda: np.zeros(6).reshape(4),
    # torch, caused by the program itself
    "torch-shapes": lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "torch-size": lambda: torch.zeros(2) + torch.zeros(3),
    "torch-index": lambda: torch.zeros(3)[5],
    "torch-dtype": lambda: torch.nn.functional.linear(torch.zeros(1, 2, dtype=torch.float64), torch.zeros(2, 2)),
    "torch-cat": lambda: torch.cat([torch.zeros(2, 2), torch.zeros(3)]),
    "torch-view": lambda: torch.zeros(6).view(4),
    "torch-grad": lambda: torch.zeros(1).sum().backward(),
    "torch-twice": lambda: [loss.backward() for loss in [(torch.ones(1, requires_grad=True) ** 2).sum()] * 2],
    "torch-conv": lambda: torch.nn.Conv2d(3, 4, 3)(torch.zeros(1, 1, 8, 8)),
    "torch-module": lambda: torch.nn.Linear(2, 2).nonsense,
    "torch-argument": lambda: torch.zeros(2, device="cpu", nonsense=1),
    "torch-stack": lambda: torch.stack([torch.zeros(2), torch.zeros(3)]),
    "torch-collate": lambda: torch.utils.data.default_collate([torch.zeros(2), torch.zeros(3)]),
    "torch-map-location": _user_map_location,
    "torch-dataset": _in_a_dataset,
}

PASTED: dict[str, str] = {**dict(sections(Path(__file__).with_name("unrelated.txt"))), "empty-lines": "\n\n   \n"}
"""Errors as other machines and programs printed them."""


def _sources() -> dict[str, str]:
    listed = Path(__file__).with_name("unrelated_sources.txt").read_text(encoding="utf-8").splitlines()
    frame = 'Traceback (most recent call last):\n  File "/env/site-packages/{}", line 7, in call\n    raise\n'
    return {line: f"{frame.format(where)}{text}\n" for line in listed for where, _, text in [line.partition("\t")]}


SOURCES: dict[str, str] = _sources()
"""A sample of what other libraries raise, found in their sources by ``scripts/error_texts.py --every``."""


def provoked(name: str) -> str:
    """The traceback of the error in ``PROVOKED`` with this name."""
    try:
        PROVOKED[name]()
    except BaseException as error:  # noqa: BLE001  any exception is a result
        return "".join(format_exception(error))
    raise AssertionError(f"{name} raised nothing")
