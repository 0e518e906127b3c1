"""The installed torch, if it is built with CUDA, run with forged drivers: its messages are real.

One process imports torch and forks for each query, so that no query sees the driver of an earlier one. Also virtual
environments with the installed packages, except for one file.
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
"""Any of these paths means that a real driver is installed."""

PROGRAM: Final = """
import json, os, signal, sys, warnings

def build():
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__}
    return {**facts, "architectures": torch._C._cuda_getArchFlags().split()}

def use_cuda(**environ):
    os.environ.update(environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = {"available": torch.cuda.is_available(), "count": torch.cuda.device_count()}
    try:
        torch.zeros(1, device="cuda")
        facts["error"] = ""
    except Exception as error:
        facts["error"] = type(error).__name__ + ": " + str(error)
    return {**facts, "warnings": [str(warning.message) for warning in caught]}

def in_fork(function, **arguments):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.write(1, json.dumps(function(**arguments)).encode() + b"\\n")
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        print(json.dumps({"error": "ended with status " + str(status)}), flush=True)

signal.alarm(120)  # end this process even if the tests are gone
import torch
signal.alarm(0)
in_fork(build)
for line in sys.stdin:
    in_fork(use_cuda, **json.loads(line))
"""


SPEC: Final = find_spec("torch")
SITE: Final = Path(SPEC.origin).parent.parent if SPEC and SPEC.origin else Path()
"""The site-packages folder of the installed torch, which is not imported in this process."""


def cuda_of_build() -> str:
    """The CUDA version that torch is built with, from its version.py; empty for none."""
    file = SITE / "torch" / "version.py"
    text = file.read_text() if file.exists() else ""
    match = re.search(r"^cuda\b.*= '([\d.]+)'$", text, re.MULTILINE)
    return match[1] if match else ""


CUDA: Final = cuda_of_build()
MAJOR, MINOR = (int(part) for part in (CUDA or "0.0").split("."))
CUDA_NUMBER: Final = 1000 * MAJOR + 10 * MINOR
"""``13020``, as a driver reports it."""


def skip_reason() -> str:
    """Why the installed torch cannot be run with forged drivers; empty if it can."""
    if not CUDA:
        return "needs a torch that is built with CUDA: make test-cuda-build"
    if any(map(os.path.exists, DRIVERS)):
        return "torch would find the real driver of this machine"
    return "" if LOADABLE else "no driver can be forged for this machine"


@dataclass(frozen=True)
class Build:
    version: str
    cuda: str
    file: str
    architectures: list[str]


@dataclass(frozen=True)
class CudaResult:
    """The results of ``is_available()``, ``device_count()`` and creating a tensor on the GPU."""

    available: bool = False
    count: int = -1
    error: str = ""
    warnings: tuple[str, ...] = ()


class TorchProcess:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.build = Build(**self.read_line())

    def query(self, *, libcuda: bytes = b"", nvml: bytes = b"", **environ: str) -> CudaResult:
        """Use CUDA with these driver libraries in the search path of the loader; empty for none."""
        for name, image in (("libcuda.so.1", libcuda), ("libnvidia-ml.so.1", nvml)):
            (self.folder / name).unlink(missing_ok=True)
            if image:
                (self.folder / name).write_bytes(image)
        assert self.process.stdin
        self.process.stdin.write(json.dumps(environ) + "\n")
        self.process.stdin.flush()
        facts = self.read_line()
        return CudaResult(**{**facts, "warnings": tuple(facts.get("warnings", ()))})

    def read_line(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


@contextmanager
def start_torch(folder: Path) -> Iterator[TorchProcess]:
    """Start a torch whose loader searches ``folder`` first, without the variables of the user's environment.

    The folder must be empty: a driver that is there when torch is imported stays loaded.
    """
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "LD_LIBRARY_PATH": str(folder)}
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, env=environ, cwd=folder, text=True, stdin=pipe, stdout=pipe) as process:
        yield TorchProcess(process, folder)


def make_venv(root: Path, *, without: Path) -> Path:
    """Create a virtual environment with links to the installed packages, except the file ``without``.

    Returns its interpreter. Folders in which libraries look for each other relative to their own path are real folders
    filled with links.
    """
    venv.create(root, symlinks=True)
    site_packages = root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    link_tree(SITE, site_packages, {SITE / "torch" / "lib", without.parent}, without)
    return root / "bin" / "python"


def link_tree(source: Path, target: Path, real_folders: Collection[Path], without: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if any(path in (folder, *folder.parents) for folder in real_folders):
            link_tree(path, target / path.name, real_folders, without)
        elif path != without:
            (target / path.name).symlink_to(path)
