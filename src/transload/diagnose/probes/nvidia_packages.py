"""NVIDIA's libraries as pip installs them: which distribution brought which file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transload.diagnose.host import Host
from transload.diagnose.probes.distributions import distributions

__all__ = ["NVIDIA", "Owned", "overlaps", "owned", "package_of"]

NVIDIA = re.compile(
    r"lib(?P<stem>cudart|cublas(?:Lt)?|cudnn\w*|cufft|cufile|cupti|curand|cusolver|cusparse(?:Lt)?|cudss|cutensor|nccl|npp\w*"
    r"|nvJitLink|nvToolsExt|nvtx3interop|nvrtc(?:-builtins)?|nvshmem_host|nvjpeg)(?:-[0-9a-f]{8})?\.so.*"
)
"""Names of NVIDIA's libraries for programs. Those of the driver, libcuda and libnvidia-*, are not among them."""

_LINE = re.compile(rb"^([^,\n\"]*/lib/[^/,\n]+\.so[.\d]*),", re.MULTILINE)
_LIMIT = 1 << 20
_WITHOUT_LIBRARIES = frozenset({"nvidia-cuda-cccl", "nvidia-ml-py"})

_PACKAGES = {
    "cudart": "cuda-runtime",
    "cublasLt": "cublas",
    "cusparseLt": "cusparselt",
    "cupti": "cuda-cupti",
    "nvrtc": "cuda-nvrtc",
    "nvrtc-builtins": "cuda-nvrtc",
    "nvJitLink": "nvjitlink",
    "nvToolsExt": "nvtx",
    "nvtx3interop": "nvtx",
    "nvshmem_host": "nvshmem",
}
"""Where the package of a library is not called as the library is."""
_WITH_MAJOR = frozenset({"cudnn", "nccl", "nvshmem", "cusparselt"})
"""Packages that still have the CUDA version in their names with CUDA 13."""


class Owned(NamedTuple):
    """A library of an installed distribution; the file itself may be gone."""

    path: str
    package: str
    version: str

    @property
    def name(self) -> str:
        """Of the file: ``libcudnn.so.9``."""
        return self.path.rpartition("/")[2]


def owned(host: Host, path: Sequence[str]) -> tuple[Owned, ...]:
    """The libraries that NVIDIA's distributions on the import path list in their RECORDs."""
    return tuple(each for folder in dict.fromkeys(path) for each in _owned(host, folder))


def _owned(host: Host, folder: str) -> Iterator[Owned]:
    names = (name for name in host.names(folder) or () if name.lower().startswith("nvidia"))
    for each in distributions(folder, names):
        data = b"" if each.name in _WITHOUT_LIBRARIES else host.data(f"{each.path}/RECORD", _LIMIT)
        for line in _LINE.findall(data or b""):
            place = line.decode("utf-8", "surrogateescape")
            yield Owned(f"{folder.rstrip('/')}/{place}", each.name, each.version)


def overlaps(libraries: Sequence[Owned]) -> Iterator[str]:
    """Files that more than one distribution lists: ``…/nvidia/cudnn/lib/libcudnn.so.9: nvidia-cudnn-cu12 9.1, …``."""
    owners: dict[str, dict[str, str]] = {}
    for each in libraries:
        owners.setdefault(each.path, {})[each.package] = each.version
    for path, packages in owners.items():
        if len(packages) > 1:
            yield f"{path}: {', '.join(f'{name} {version}' for name, version in packages.items())}"


def package_of(name: str, cuda: str) -> str:
    """The distribution that should bring a library for that CUDA version; empty for one of no known package.

    >>> package_of("libcudart.so.12", "12.6"), package_of("libcufft.so.12", "13.0"), package_of("libcudnn.so.9", "13.0")
    ('nvidia-cuda-runtime-cu12', 'nvidia-cufft', 'nvidia-cudnn-cu13')
    """
    found = NVIDIA.fullmatch(name)
    major = cuda.partition(".")[0]
    if not found or not major.isdecimal():
        return ""
    stem = "cudnn" if found["stem"].startswith("cudnn") else found["stem"]
    package = _PACKAGES.get(stem, stem.lower())
    return f"nvidia-{package}" if int(major) >= 13 and package not in _WITH_MAJOR else f"nvidia-{package}-cu{major}"
