"""Files of installed torch packages and of interpreters, for trees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'd0f2af8b66b20da4baa50644c0cd3f887a2eae2e'
hip: Optional[str] = {hip!r}
rocm: Optional[str] = {hip!r}
xpu: Optional[str] = None
"""


def write_files(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files under a root, by their paths on the host; a path that ends in a slash is an empty folder."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        folder = path if name.endswith("/") else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(content if isinstance(content, bytes) else os.fsencode(content))
    return root


def wheel(
    site: str, version: str = "2.15.0+cu132", cuda: str | None = "13.2", hip: str | None = None
) -> dict[str, str | bytes]:
    """The files of a torch installed by pip: the important ones, each of the size that RECORD says."""
    release = version.partition("+")[0]
    dist = f"torch-{release}.dist-info"
    libraries = ["libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libgomp.so.1"]
    libraries += ["libtorch_cuda.so", "libc10_cuda.so"] if cuda else []
    torch: dict[str, str | bytes] = {
        "torch/__init__.py": "raise SystemExit('imported')\n",
        "torch/version.py": VERSION.format(version=version, cuda=cuda, hip=hip),
        "torch/_C.cpython-311-x86_64-linux-gnu.so": b"\x7fELF",
        "torch/_C/__init__.pyi": "",
        **{f"torch/lib/{name}": b"\x7fELF" + b"\0" * 96 for name in libraries},
    }
    record = "".join(f"{name},sha256=x,{len(content)}\n" for name, content in torch.items())
    return {f"{site}/{name}": content for name, content in torch.items()} | {
        f"{site}/{dist}/METADATA": f"Metadata-Version: 2.4\nName: torch\nVersion: {release}\n\nText\n",
        f"{site}/{dist}/WHEEL": "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n",
        f"{site}/{dist}/INSTALLER": "pip\n",
        f"{site}/{dist}/REQUESTED": "",
        f"{site}/{dist}/RECORD": f"{record}{dist}/RECORD,,\n",
    }


def shell_script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
