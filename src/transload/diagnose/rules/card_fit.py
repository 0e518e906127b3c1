"""Whether torch has code for the cards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_build import jetson_wheel
from transload.diagnose.rules.torch_facts import Card, build_cuda, cards, complaint, said
from transload.diagnose.tables import TEGRA, build_of, covers, numbers_of

if TYPE_CHECKING:
    from transload.findings import Severity
    from transload.machine import Machine

__all__ = ["TABLE", "codes", "torch_version"]

TABLE = Table("fit")

Lines = tuple[str, ...]

_NO_KERNEL = r"no kernel image is available"
_TORCH = "https://github.com/pytorch/pytorch/issues"


def torch_version(machine: Machine) -> str:
    """The version of the torch that is imported."""
    first = machine.torch.first
    return machine.torch_run.version or (first.version if first else "")


@dataclass(frozen=True, slots=True)
class Misfit:
    """Cards that the build has no code for; ``codes`` is what it has, ``proven`` if read from its binaries."""

    cards: tuple[Card, ...]
    codes: Lines
    proven: bool
    all: bool
    """Whether no card is left that it has code for."""


def misfit(machine: Machine) -> Misfit | None:
    """The cards without code in this torch, by its binaries or else by the tables; nothing where that is not known."""
    cuda, found = build_cuda(machine), cards(machine)
    known, proven = codes(machine)
    if cuda is None or not known or not found or machine.torch.shadow:
        return None
    bad = tuple(card for card in found if not covers(known, card.capability, cuda))
    # torch computes on its first card: whatever the lists say, there is code for that one
    overruled = machine.torch_run.cuda_works and found[0] in bad
    return Misfit(bad, known, proven, len(bad) == len(found)) if bad and not overruled else None


def codes(machine: Machine) -> tuple[Lines, bool]:
    """What torch has code for: its kernels, else its own list, else what the tables say of that build."""
    libraries = machine.torch_libraries
    told = tuple(libraries.cubins or ()) or libraries.architectures or machine.torch_run.architectures
    if told:
        return told, True
    version = torch_version(machine)
    build = build_of(version, version.partition("+")[2], fixes.wheel_platform(machine)) if numbers_of(version) else None
    return (build.archs, False) if build else ((), False)


def _numbers(code: str) -> tuple[int, int]:
    found = re.search(r"[0-9]{1,4}", code.partition("_")[2])
    number = int(found[0]) if found else 0
    return number // 10, number % 10


def no_code(machine: Machine, found: Misfit, fix: Lines) -> Seen:
    """What to say of cards without code: an error, but a warning where torch works on another card."""
    told = complaint(
        machine, rf"{_NO_KERNEL}|not compatible with the current PyTorch|which is of (?:compute|cuda) capability"
    )
    spared = machine.torch_run.cuda_works or (not found.all and not complaint(machine, _NO_KERNEL))
    severity: Severity = "warning" if spared else "error"
    listed = " ".join(sorted(set(found.codes), key=_numbers))
    source = "has code for" if found.proven else "should have code for"
    evidence = (*map(str, found.cards), f"torch {torch_version(machine)} {source} {listed}", *said(told))
    sure = found.proven and all(card.sure for card in found.cards)
    return Seen(evidence, fix, severity=severity, likely=not sure)


@TABLE.row(
    "A05",
    "this torch has no code for the GPU of a Jetson",
    about="""The GPUs of Jetson boards (Xavier 7.2, Orin 8.7) do not run the code of the cards of their generation,
unless it was built with CUDA 13.2 or newer. A wheel for ARM servers imports, torch.cuda.is_available() is True, and
the first kernel fails: "CUDA error: no kernel image is available for execution on the device".""",
    fix="Install the torch that NVIDIA makes for the board's JetPack, or one that is built with CUDA 13.2 or newer.",
    sources=("https://github.com/conda-forge/pytorch-cpu-feedstock/issues/303",),
)
def jetson(machine: Machine) -> Seen | None:
    """The card without code is a Tegra's."""
    found = misfit(machine)
    if found is None or not any(_is_jetson(machine, card) for card in found.cards):
        return None
    return no_code(machine, found, jetson_wheel(machine))


def _is_jetson(machine: Machine, card: Card) -> bool:
    return bool(machine.hardware.tegra) or card.capability in TEGRA


@TABLE.row(
    "A01",
    "the card is newer than this torch",
    about="""torch has compiled code for certain compute capabilities, and none that can be compiled later. For a
newer card is_available() is True; torch warns "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not
compatible with the current PyTorch installation", and the first kernel fails: "CUDA error: no kernel image is
available for execution on the device".

It is told by the architectures in torch's own libraries. Code for 8.6 also runs on 8.9, for 12.0 on 12.1: the same
major version and a minor version at least as high.""",
    fix="Install a newer torch, built with a newer CUDA: for Blackwell 2.7 or newer with CUDA 12.8 or newer.",
    avoid="Setting TORCH_CUDA_ARCH_LIST: it concerns only what is compiled from source.",
    sources=(f"{_TORCH}/150733", f"{_TORCH}/167244"),
)
def newer_card(machine: Machine) -> Seen | None:
    """A card is beyond all that the build has code for."""
    found = misfit(machine)
    if found is None or jetson(machine) or not _newer(found):
        return None
    return no_code(machine, found, fixes.wheel(machine))


def _newer(found: Misfit) -> bool:
    highest = max(map(_numbers, found.codes))
    return any(card.capability > highest for card in found.cards)


@TABLE.row(
    "A02",
    "the card is older than this torch supports",
    about="""Builds with CUDA 12.8 and newer leave out old cards: Maxwell, Pascal and Volta (GTX 9xx and 10xx, V100;
compute capability below 7.5). is_available() is True, and the first kernel fails: "CUDA error: no kernel image is
available for execution on the device". The builds with CUDA 12.6 still have their code.""",
    fix="Install torch from https://download.pytorch.org/whl/cu126; for Kepler no later one than torch 2.0.",
    sources=(
        "https://github.com/jhj0517/Whisper-WebUI/issues/653",
        "https://github.com/Kaggle/kaggle-cli/issues/1151",
    ),
)
def older_card(machine: Machine) -> Seen | None:
    """A card is below, or between, what the build has code for."""
    found = misfit(machine)
    if found is None or jetson(machine) or _newer(found):
        return None
    return no_code(machine, found, fixes.wheel(machine))
