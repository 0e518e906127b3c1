"""CUDA toolkits on the disk. Nothing of them is run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transload.diagnose.host import Host
from transload.machine import Toolkit

__all__ = ["toolkit"]

_LOCAL = "/usr/local"
_JSON = re.compile(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+\.\d+(?:\.\d+)?)')
_TEXT = re.compile(r"CUDA Version (\d+\.\d+(?:\.\d+)?)")
_HEADER = re.compile(r"^#define\s+CUDA_VERSION\s+(\d{4,6})\b", re.MULTILINE)
_FOLDER = re.compile(r"/cuda-(\d+\.\d+)(?:/|$)")


def toolkit(host: Host) -> Toolkit:
    """The compiler that a build would find first, its version by the files around it, and where toolkits lie."""
    home = host.environ.get("CUDA_HOME") or host.environ.get("CUDA_PATH") or ""
    nvcc = next((path for path in _candidates(host, home) if host.exists(path)), "")
    return Toolkit(
        nvcc=nvcc,
        version=_version(host, nvcc),
        home=home,
        folders=tuple(path for path in host.paths(_LOCAL, "cuda") if host.folder(path)),
    )


def _candidates(host: Host, home: str) -> Iterator[str]:
    folders = (folder for folder in host.environ.get("PATH", "").split(":") if folder.startswith("/"))
    yield from (f"{folder.rstrip('/')}/nvcc" for folder in folders)
    if home.startswith("/"):
        yield f"{home.rstrip('/')}/bin/nvcc"
    yield f"{_LOCAL}/cuda/bin/nvcc"


def _version(host: Host, nvcc: str) -> str:
    """Of the toolkit that nvcc belongs to: NVIDIA's own has a version file, those of Debian and conda a header."""
    if not nvcc:
        return ""
    home = _behind(host, nvcc).removesuffix("/bin/nvcc")
    for name, pattern in (("version.json", _JSON), ("version.txt", _TEXT)):
        if found := pattern.search(host.text(f"{home}/{name}", 1 << 16) or ""):
            return found[1]
    debian = ("/usr/include",) if nvcc.startswith("/usr/bin/") else ()
    targets = (host.uname[2], "sbsa") if host.uname[2] == "aarch64" else (host.uname[2],)  # Jetson, Arm servers
    for folder in (f"{home}/include", *(f"{home}/targets/{each}-linux/include" for each in targets), *debian):
        if found := _HEADER.search(host.text(f"{folder}/cuda.h", 1 << 16) or ""):
            return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    found = _FOLDER.search(home)
    return found[1] if found else ""


def _behind(host: Host, nvcc: str) -> str:
    """The compiler itself: in front of it there may be links, or a script that starts it."""
    path = host.target(nvcc)
    begin = host.data(path, 1024) or b""
    started = re.search(rb"(/[\w./-]+/bin/nvcc)\b", begin) if begin.startswith(b"#!") else None
    return host.target(started[1].decode()) if started else path
