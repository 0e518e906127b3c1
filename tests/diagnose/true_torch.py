"""The installed torch, where it is built with CUDA, on drivers that are forged: what it says of them is genuine.

One process imports it and is forked for each question, so that every driver meets a torch that has seen none before it.
And environments of Python with the same packages, but for a file that is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.elf_forge import LOADABLE

DRIVERS: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""Where there is one of these, there is a true driver."""

ASKED: Final = """
import json, os, signal, sys, warnings

def build():
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__}
    return {**facts, "architectures": torch._C._cuda_getArchFlags().split()}

def told(**environ):
    os.environ.update(environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = {"available": torch.cuda.is_available(), "count": torch.cuda.device_count()}
    try:
        torch.zeros(1, device="cuda")
        facts["error"] = ""
    except Exception as error:
        facts["error"] = type(error).__name__ + ": " + str(error)
    return {**facts, "warnings": [str(each.message) for each in caught]}

def apart(function, **arguments):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.write(1, json.dumps(function(**arguments)).encode() + b"\\n")
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        print(json.dumps({"error": "ended with status " + str(status)}), flush=True)

signal.alarm(120)  # nothing here may outlive the tests
import torch
signal.alarm(0)
apart(build)
for line in sys.stdin:
    apart(told, **json.loads(line))
"""


SPEC: Final = find_spec("torch")
SITE: Final = Path(SPEC.origin).parent.parent if SPEC and SPEC.origin else Path()
"""The folder that holds the installed torch, which is not imported here."""


def built_with() -> str:
    """The CUDA that it is built with, as its version.py says; empty for none."""
    file = SITE / "torch" / "version.py"
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^cuda\b.*= '([\d.]+)'$", text, re.MULTILINE)
    return found[1] if found else ""


CUDA: Final = built_with()
MAJOR, MINOR = (int(part) for part in (CUDA or "0.0").split("."))
NUMBER: Final = 1000 * MAJOR + 10 * MINOR
"""``13020``, as a driver says it."""


def why_not() -> str:
    """Why a true torch cannot be shown forged drivers here; empty where it can."""
    if not CUDA:
        return "needs a torch that is built with CUDA: make test-cuda-build"
    if any(map(os.path.exists, DRIVERS)):
        return "a true driver is here, and a torch that would find it"
    return "" if LOADABLE else "no driver can be forged for this machine"


@dataclass(frozen=True)
class Build:
    version: str
    cuda: str
    file: str
    architectures: list[str]


@dataclass(frozen=True)
class Told:
    """What became of ``is_available()``, ``device_count()`` and a tensor on the GPU."""

    available: bool = False
    count: int = -1
    error: str = ""
    warnings: tuple[str, ...] = ()


class TrueTorch:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.build = Build(**self.line())

    def ask(self, *, libcuda: bytes = b"", nvml: bytes = b"", **environ: str) -> Told:
        """What it says, with these libraries for the loader to find, or without them."""
        for name, image in (("libcuda.so.1", libcuda), ("libnvidia-ml.so.1", nvml)):
            (self.folder / name).unlink(missing_ok=True)
            if image:
                (self.folder / name).write_bytes(image)
        assert self.process.stdin
        self.process.stdin.write(json.dumps(environ) + "\n")
        self.process.stdin.flush()
        facts = self.line()
        return Told(**{**facts, "warnings": tuple(facts.get("warnings", ()))})

    def line(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


@contextmanager
def true_torch(folder: Path) -> Iterator[TrueTorch]:
    """A torch whose loader looks into ``folder`` first; nothing of the user's environment disturbs it.

    It is to be empty: a driver that is there when torch is imported stays.
    """
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "LD_LIBRARY_PATH": str(folder)}
    command, pipe = [sys.executable, "-c", ASKED], subprocess.PIPE
    with subprocess.Popen(command, env=environ, cwd=folder, text=True, stdin=pipe, stdout=pipe) as process:
        yield TrueTorch(process, folder)


def environment(root: Path, *, without: Path) -> Path:
    """A virtual environment with links to our own packages, all but the file ``without``; its interpreter.

    Folders from which a library looks for others by its own place are no links, but filled with them.
    """
    venv.create(root, symlinks=True)
    theirs = root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    link(SITE, theirs, {SITE / "torch" / "lib", without.parent}, without)
    return root / "bin" / "python"


def link(source: Path, target: Path, filled: Collection[Path], without: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for each in source.iterdir():
        if any(each in (folder, *folder.parents) for folder in filled):
            link(each, target / each.name, filled, without)
        elif each != without:
            (target / each.name).symlink_to(each)
