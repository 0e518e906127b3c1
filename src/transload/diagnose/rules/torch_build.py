"""The torch that is installed: whether it was built for the accelerator of this machine, and whether it is whole."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.kernel_card import misfit
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import again, cards, computes, has_nvidia, import_error, imported, said
from transload.diagnose.rules.withheld import withheld
from transload.diagnose.tables import index_builds, numbers_of, releases

if TYPE_CHECKING:
    from transload.diagnose.tables import Capability
    from transload.machine import Machine, TorchInstall

__all__ = ["TABLE"]

TABLE = Table("build")

Lines = tuple[str, ...]

_CUDA_ON_ARM_SINCE = (2, 11)
_JETSON = "https://pypi.jetson-ai-lab.io"
_JETSON_INDEXES = {36: f"{_JETSON}/jp6/cu126/+simple/", 38: f"{_JETSON}/sbsa/cu130/+simple/"}


def cpu_build(machine: Machine) -> TorchInstall | None:
    """The torch without CUDA that an import takes on a machine whose NVIDIA card some torch could use."""
    first = machine.torch.first
    if first is None or machine.torch.shadow or not first.cpu_only or not has_nvidia(machine):
        return None
    if machine.platform.system == "Darwin" or computes(machine) or _hopeless(machine) or withheld(machine):
        return None
    return first


def _hopeless(machine: Machine) -> bool:
    """Whether no torch has ever had code for any of the cards: then a build without CUDA is the right one."""
    found = cards(machine)
    return bool(found) and not machine.hardware.tegra and not any(_served(card.capability) for card in found)


@cache
def _served(capability: Capability) -> bool:
    platforms = ("linux-x86_64", "linux-aarch64")
    builds = (build for each in releases() for platform in platforms for build in index_builds(each, platform))
    return any(build.supports_card(capability) for build in builds)


def _evidence(machine: Machine, first: TorchInstall) -> Lines:
    beside = ", ".join(first.replaced_by[:4])
    together = (f"it was installed together with {beside}",) if beside else ()
    gpus = tuple(map(str, cards(machine)[:4])) or ("there is an NVIDIA GPU",)
    return (f"{first.location}/version.py says {first.version}: built without CUDA", *together, *gpus)


def _pinned(first: TorchInstall) -> Lines:
    """How to keep the next installation from bringing the CPU build back."""
    if not first.replaced_by:
        return ()
    return (
        "To keep it, put torch and its index into a constraints file, and pass -c constraints.txt to later installs.",
    )


def _seen(machine: Machine, first: TorchInstall) -> Seen:
    # a card of no known chip may be one that CUDA never drove
    known = cards(machine) or machine.hardware.dxg or machine.driver.cuda.works
    fix = (*fixes.wheel(machine, driver=not misfit(machine)), *_pinned(first))
    return Seen(_evidence(machine, first), fix, likely=not known)


@TABLE.row(
    "J01",
    "this torch is not for a Jetson",
    about="""On a Jetson board the driver and CUDA come with JetPack, and torch needs wheels made for it. Before
torch 2.11 the aarch64 wheels on PyPI have no CUDA at all: "AssertionError: Torch not compiled with CUDA enabled".
Wheels for ARM servers import, and their kernels do not run on boards before Thor.""",
    fix=f"""Install torch from NVIDIA's index for the JetPack of the board: {_JETSON}/jp6/cu126/+simple/ for
JetPack 6. Thor with JetPack 7 runs the wheels for servers built with CUDA 13: {_JETSON}/sbsa/cu130/+simple/.""",
    avoid="Installing a driver or a CUDA toolkit for servers on the board: JetPack brings both.",
    sources=(
        "https://github.com/dusty-nv/jetson-containers/issues/1495",
        "https://github.com/pollen-robotics/microduck_rl/pull/39",
    ),
)
def jetson(machine: Machine) -> Seen | None:
    """A build without CUDA on a Tegra board."""
    first = cpu_build(machine)
    if first is None or not machine.hardware.tegra:
        return None
    board = f"this is a Jetson: {machine.hardware.tegra}"
    return Seen((f"{first.location}/version.py says {first.version}: built without CUDA", board), jetson_wheel(machine))


def jetson_wheel(machine: Machine) -> Lines:
    """Where the wheels for this board are, by the release of Jetson Linux."""
    found = re.search(r"\bR(\d{2})\b", machine.hardware.tegra)
    release = int(found[1]) if found else 0
    index = _JETSON_INDEXES.get(release)
    if index is None:
        return (f"Install the torch that NVIDIA makes for this board's JetPack: {_JETSON}",)
    return fixes.install(machine, "torch", index=index, force=True)


@TABLE.row(
    "T02",
    "on Windows pip installed a torch without CUDA",
    about="""For Windows PyPI has only CPU builds of torch: a plain "pip install torch" cannot give any other. torch
then says "AssertionError: Torch not compiled with CUDA enabled", and its version ends in +cpu.""",
    fix="""Uninstall it and install from PyTorch's own index, for example: pip install torch --index-url
https://download.pytorch.org/whl/cu126""",
    avoid="Installing a CUDA toolkit: torch brings its own libraries, and a CPU build uses none.",
    sources=("https://github.com/astral-sh/uv/issues/11532",),
)
def windows_default(machine: Machine) -> Seen | None:
    """A build without CUDA on Windows."""
    first = cpu_build(machine)
    return _seen(machine, first) if first and machine.platform.system == "Windows" else None


@TABLE.row(
    "T03",
    "the aarch64 wheel of this torch release has no CUDA",
    about="""Before torch 2.11 the wheels on PyPI for ARM servers (GH200, GB200) are CPU builds, whatever their
metadata says of nvidia packages. torch says "AssertionError: Torch not compiled with CUDA enabled".""",
    fix="Install torch 2.11 or newer from PyPI, or an older one from https://download.pytorch.org/whl/cu128.",
    sources=("https://github.com/pytorch/pytorch/issues/168065",),
)
def arm_default(machine: Machine) -> Seen | None:
    """A build without CUDA of a release that has none on PyPI for this processor."""
    first = cpu_build(machine)
    if first is None or machine.platform.system != "Linux" or machine.hardware.tegra:
        return None
    old = () < numbers_of(first.version)[:2] < _CUDA_ON_ARM_SINCE
    return _seen(machine, first) if old and machine.platform.machine in ("aarch64", "arm64") else None


@TABLE.row(
    "T05",
    "conda chose a torch without CUDA",
    likely=True,
    about="""conda picks a CPU build (its build string begins with cpu) where it sees no GPU while it solves: on a
login node, in an image being built, or where cpuonly or pytorch-cpu was asked for.""",
    fix="""Install pytorch-gpu from conda-forge, on the machine with the GPU or with CONDA_OVERRIDE_CUDA=12.6 set to
the CUDA version of the driver.""",
)
def conda_cpu(machine: Machine) -> Seen | None:
    """A build without CUDA that conda installed."""
    first = cpu_build(machine)
    if first is None or "cpu" not in first.conda_build:
        return None
    return Seen((*_evidence(machine, first), f"conda's build is {first.conda_build}"), fixes.wheel(machine))


@TABLE.row(
    "T04",
    "another package's installation brought a torch without CUDA",
    likely=True,
    about="""An installer that is asked for a package which needs torch may replace the torch that is there: by a
newer release from PyPI, or by a CPU build from another index. It worked yesterday, and today torch says "Torch not
compiled with CUDA enabled".

It is concluded from what was installed in the same minute as this torch.""",
    fix="""Install the CUDA build again, and name torch with its index in a constraints file (pip install -c) or,
with uv, in tool.uv.sources, so that the next installation leaves it alone.""",
    sources=(
        "https://github.com/comfyanonymous/ComfyUI/issues/2427",
        "https://github.com/comfyanonymous/ComfyUI/issues/9887",
    ),
)
def replaced(machine: Machine) -> Seen | None:
    """A build without CUDA, installed together with something else, and no better reason for it."""
    first = cpu_build(machine)
    if first is None or not first.replaced_by or _has_reason(machine, first):
        return None
    return _seen(machine, first)


def _has_reason(machine: Machine, first: TorchInstall) -> bool:
    return bool(
        machine.hardware.tegra or windows_default(machine) or arm_default(machine) or "cpu" in first.conda_build
    )


@TABLE.row(
    "T01",
    "torch was built without CUDA",
    about="""A CPU build of torch is installed on a machine with an NVIDIA GPU. torch.cuda.is_available() is False
without any warning, and the first use says "AssertionError: Torch not compiled with CUDA enabled". No driver and no
CUDA toolkit can change that.

It is told by torch/version.py: the version ends in +cpu, and cuda is None. The package's metadata does not tell.""",
    fix="Uninstall torch and install a build with CUDA that fits both the driver and the card.",
    avoid="Installing a CUDA toolkit or a newer driver: a build without CUDA uses neither.",
    sources=(
        "https://github.com/comfyanonymous/ComfyUI/issues/7433",
        "https://github.com/pytorch/pytorch/issues/49325",
    ),
)
def cpu_only(machine: Machine) -> Seen | None:
    """A build without CUDA, and no reason known for it; a note where the card is too old, or not for this process."""
    first = cpu_build(machine)
    if first is not None:
        return None if first.replaced_by or _has_reason(machine, first) else _seen(machine, first)
    found = machine.torch.first
    if found is None or not found.cpu_only or not has_nvidia(machine) or computes(machine):
        return None
    if withheld(machine):
        return _agrees(found)
    if not _hopeless(machine):
        return None
    title = "torch has no CUDA, and none was ever made for this card"
    return Seen(tuple(map(str, cards(machine))), ("The CPU build is the right one.",), title=title, severity="note")


def _agrees(found: TorchInstall) -> Seen:
    title = "torch was built without CUDA, and no GPU was given to it"
    fix = "Nothing is wrong if that is meant. To use a GPU, get one first; then this names the torch to install for it."
    built = f"{found.location}/version.py says {found.version}: built without CUDA"
    return Seen((built,), (fix,), title=title, severity="note")


@TABLE.row(
    "T09",
    "files of torch are missing or cut off",
    about="""The installation was interrupted, the disk was full, or another package's removal took files along. The
import fails with "cannot open shared object file", "file too short" or "invalid ELF header", or there is a package
torch in pip's list and no folder torch.

It is told by holding the libraries against RECORD, the list of files that pip keeps: by presence and size.""",
    fix="""Install torch again without the cache: pip install --force-reinstall --no-cache-dir torch, with the same
index.""",
    sources=("https://github.com/sgl-project/sglang/issues/22719",),
)
def damaged(machine: Machine) -> Seen | None:
    """Error where torch cannot be imported or was not tried; a note where a whole library only has another size."""
    torch, first = machine.torch, machine.torch.first
    if first is None:
        gone = tuple(f"{name} is there, and the files it lists are not" for name in torch.dangling)
        return Seen(gone, again(machine)) if gone and not imported(machine) and torch.installs == () else None
    unread = () if first.known or not import_error(machine) else (f"torch/version.py: {first.problem}",)
    if imported(machine) or not (first.missing or unread):
        return _altered(machine, first)
    return Seen((*first.missing[:6], *unread, *said(import_error(machine))), again(machine))


def _altered(machine: Machine, first: TorchInstall) -> Seen | None:
    if not (first.missing or first.altered) or computes(machine):
        return None
    title = "files of torch are not as they were installed"
    return Seen((*first.missing[:3], *first.altered[:3]), again(machine), title=title, severity="note")
