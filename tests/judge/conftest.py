from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tests import forks
from tests.shared import once

import transload
from transload.checkpoint import Checkpoint

DATA = Path(__file__).parent.parent / "data"
FILES = sorted(path for path in DATA.glob("*/**/*") if path.suffix in (".pt", ".pth", ".pt2", ".ckpt"))
ALONE = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch._weights_only_unpickler as unpickler
allowed = [*unpickler._get_allowed_globals(), *getattr(unpickler, "_get_user_allowed_globals", dict)()]  # from 2.4 on

def outcome(path, **how):
    try:
        torch.load(path, **how)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "needs" if "CUDA device" in text else "refuses" if "Weights only load failed" in text else "fails"
    return "loads"
outcomes = {path: [outcome(path), outcome(path, map_location="cpu")] for path in json.load(sys.stdin)}

import torch.utils.data, torch.distributed, torch.fx, numpy
import argparse, asyncio, inspect, logging.config, random, shutil, sqlite3, unittest, uuid, xml.etree.ElementTree
from transload.judge.names import classify, is_dangerous
roots = sys.stdlib_module_names | {"torch", "numpy"}
pairs, missed, dangerous = 0, [], {}
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in roots:
        continue
    for alias, found in list(vars(module).items()):
        if isinstance(found, types.ModuleType):
            pairs += 1
            if found not in dangerous:
                dangerous[found] = [each for each in list(vars(found)) if is_dangerous(found.__name__, each)]
            ends = dangerous[found]
            missed += [(name, alias, each) for each in ends if classify(name, f"{alias}.{each}")[0] != "dangerous"]
json.dump([allowed, outcomes, pairs, missed[:20]], sys.stdout)
"""


class Alone(NamedTuple):
    """Answers of a fresh process that has imported nothing but torch."""

    allowed: list[str]
    """The names that ``weights_only`` allows."""
    outcomes: dict[str, list[str]]
    """Outcome of ``torch.load`` without a GPU for each file of ``FILES``: plain, and with ``map_location="cpu"``."""
    pairs: int
    """The number of modules that are attributes of other modules of Python, torch and numpy."""
    missed: list[list[str]]
    """Dangerous names reached through such an attribute that are not classified as dangerous (at most 20)."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One process answers several questions, because importing torch takes most of the time."""

    def query(_: Path) -> object:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        names = json.dumps([str(path) for path in FILES])
        process = forks.run("-c", ALONE, stdin=names, env={**env, "PYTHONPATH": str(forks.SOURCE)})
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return Alone(*once(tmp_path_factory, "alone", query)[1])


def torch_zip(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    """An archive in the layout of ``torch.save``, around any pickle."""
    records = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    records |= {f"data/{key}": raw for key, raw in (storages or {}).items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, raw in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), raw)
    return out.getvalue()


Inspect = Callable[..., Checkpoint]


@pytest.fixture
def archive_of() -> Callable[[bytes, dict[str, bytes]], bytes]:
    """The bytes of a torch archive around a pickle, with its storages."""
    return torch_zip


@pytest.fixture
def inspect_zip() -> Inspect:
    """Inspect a pickle (opcodes without STOP) in a torch archive."""

    def inspect(body: bytes, storages: Mapping[str, bytes] | None = None, *, protocol: int = 2) -> Checkpoint:
        return transload.inspect(torch_zip(b"\x80" + bytes([protocol]) + body + b".", storages))

    return inspect
