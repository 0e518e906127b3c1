"""The builds of each torch release: from PyPI and from the PyTorch index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from transload.diagnose.tables._data import (
    Capability,
    Sure,
    Version,
    numbers_of,
    parse_capability,
    parse_version,
    table,
)
from transload.diagnose.tables.cubins import covers

__all__ = ["PLATFORMS", "Build", "Platform", "build_of", "default_build", "index_builds", "releases"]

Platform = Literal["linux-x86_64", "linux-aarch64", "windows", "macos-arm64", "macos-x86_64"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)


@dataclass(frozen=True, slots=True)
class Build:
    """One build of one release for one platform; ``sure`` is how the list of architectures is known.

    ``cuda`` is the CUDA version as people write it, empty for a build without; ``toolkit`` has all the numbers that are
    known. ``cudnn``, ``nccl`` and ``triton`` are empty where not known or not there.
    """

    torch: str
    platform: str
    build: str
    cuda: str
    toolkit: str
    archs: tuple[str, ...]
    on_pypi: bool
    python: tuple[Version, Version]
    free_threaded: tuple[str, ...]
    cudnn: str
    nccl: str
    triton: str
    sure: Sure

    def supports_python(self, python: Version) -> bool:
        """Whether the release has wheels for this CPython, by its first two numbers."""
        return self.python[0] <= python[:2] <= self.python[1]

    def supports_card(self, capability: Capability) -> bool:
        """Whether the build has code for a card, and a cuDNN that still runs on it."""
        cuda = parse_version(self.cuda or "0.0")
        return covers(self.archs, capability, (cuda[0], cuda[1])) and _cudnn_runs(self.cudnn, capability)


def _cudnn_runs(cudnn: str, capability: Capability) -> bool:
    return not any(
        cudnn
        and parse_version(cudnn) >= parse_version(row["cudnn"])
        and capability < parse_capability(row["capability"])
        for row in table("torch_builds")["cudnn_floors"]
    )


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return {version: row for row in table("torch_builds")["releases"] for version in row["versions"]}


def releases() -> tuple[str, ...]:
    """The releases in the table, oldest first.

    >>> releases()[0], releases()[-1]
    ('1.13.0', '2.15.0')
    """
    return tuple(_rows())


def _release(torch_version: str) -> str:
    """The release meant by ``2.13.0``, ``2.13.0+cu130`` or ``2.13`` (its newest); empty if not in the table."""
    wanted = numbers_of(torch_version)
    same = (release for release in reversed(_rows()) if parse_version(release)[: len(wanted)] == wanted)
    return next(same, "") if wanted else ""


@cache
def _builds(release: str, platform: str) -> tuple[Build, ...]:
    row = _rows()[release]
    found = [
        _build(release, row, platform, entry) for entry in row["builds"] + row["others"] if platform in entry["on"]
    ]
    return tuple(found)


def _build(release: str, row: dict[str, Any], platform: str, entry: dict[str, Any]) -> Build:
    toolkit = entry.get("cuda", "")
    low, high = row["python"]
    linux_cuda = bool(toolkit) and platform.startswith("linux")
    return Build(
        torch=release,
        platform=platform,
        build=entry["build"],
        cuda=".".join(toolkit.split(".")[:2]),
        toolkit=toolkit,
        archs=tuple(f"sm_{number}" for number in entry.get("archs", "").split()),
        on_pypi=row["pypi"].get(platform) == entry["build"],
        python=(parse_version(low), parse_version(high)),
        free_threaded=tuple(row["free_threaded"]),
        cudnn=entry.get("cudnn", ""),
        nccl=row["nccl"] if linux_cuda else "",
        triton=row["triton"] if linux_cuda else "",
        sure=entry["sure"],
    )


def index_builds(torch_version: str, platform: str = "linux-x86_64") -> tuple[Build, ...]:
    """Every build of a release for a platform, CUDA ones first; none for a release or platform not in the table.

    >>> [build.build for build in index_builds("2.15.0")]
    ['cu126', 'cu130', 'cu132', 'cpu', 'xpu']
    """
    release = _release(torch_version)
    return _builds(release, platform) if release else ()


def default_build(torch_version: str, platform: str) -> Build | None:
    """What a bare ``pip install torch==…`` takes from PyPI.

    >>> default_build("2.15.0", "linux-x86_64").archs
    ('sm_75', 'sm_80', 'sm_86', 'sm_90', 'sm_100', 'sm_120')
    >>> default_build("2.15.0", "windows").build
    'cpu'
    """
    return next((build for build in index_builds(torch_version, platform) if build.on_pypi), None)


def build_of(torch_version: str, build: str, platform: str) -> Build | None:
    """One build by its name.

    >>> build_of("2.15", "cu126", "linux-x86_64").archs[0]
    'sm_50'
    """
    return next((found for found in index_builds(torch_version, platform) if found.build == build), None)
