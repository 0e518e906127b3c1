"""Whether the driver fits the torch that is installed; the rows for the cards follow at the end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import card_fit
from transload.diagnose.rules.card_fit import codes, torch_version
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import build_cuda, cards, complaint, computes, failed, said, unrun, wheel_cuda
from transload.diagnose.tables import (
    branch_of,
    covers,
    cuda_text,
    driver_floor,
    toolkit_driver,
)

if TYPE_CHECKING:
    from transload.diagnose.tables import System
    from transload.machine import Machine

__all__ = ["TABLE"]

TABLE = Table("fit")

Lines = tuple[str, ...]

_TOO_OLD = re.compile(r"NVIDIA driver on your system is too old \(found version (\d+)\)")
_TORCH = "https://github.com/pytorch/pytorch/issues"


def driver_cuda(machine: Machine) -> int:
    """The CUDA version that the driver announces, 12080 for 12.8; 0 where nobody told."""
    return machine.driver.cuda.version or machine.driver.nvml.cuda


def enough(driver: int, wheel: tuple[int, int]) -> bool:
    """Whether a driver runs what was built with a CUDA version: from 11 on the same major version suffices.

    >>> enough(12000, (12, 8)), enough(12080, (13, 0)), enough(10010, (10, 2)), enough(11040, (10, 2))
    (True, False, False, True)
    """
    if wheel[0] >= 11:
        return driver // 1000 >= wheel[0]
    return driver >= wheel[0] * 1000 + wheel[1] * 10


def found_version(machine: Machine) -> int:
    """The version in torch's own complaint of a driver that is too old; 0 where it did not complain."""
    told = _TOO_OLD.search(complaint(machine, _TOO_OLD.pattern))
    return int(told[1]) if told else 0


def system(machine: Machine) -> System:
    """Whose driver it is: under WSL that of Windows."""
    return "windows" if machine.platform.system == "Windows" or machine.surroundings.wsl else "linux"


@TABLE.row(
    "V05",
    "a library stands in for the driver",
    likely=True,
    about="""torch says "The NVIDIA driver on your system is too old (found version 13020)", and that version is new
enough. The message is false: libcudart says so too where it meets a libcuda.so.1 that does not have the driver's
inner tables, such as a layer for sharing GPUs, a tracing shim or a fake.""",
    fix="""Find out what is loaded in the driver's place: LD_PRELOAD, LD_LIBRARY_PATH, /etc/ld.so.preload; and
remove it.""",
    avoid="Updating the driver: it is new enough.",
)
def stand_in(machine: Machine) -> Seen | None:
    """torch calls a driver too old that is not."""
    found, wheel = found_version(machine), build_cuda(machine)
    if not found or wheel is None or not enough(found, wheel) or computes(machine):
        return None
    loaded = [path for path in machine.torch_run.libraries if "/libcuda.so" in path] or [machine.driver.cuda.library]
    paths = tuple(f"libcuda.so.1 is {path}" for path in loaded if path)
    preload = machine.variables.get("LD_PRELOAD") or " ".join(machine.driver.libraries.preload)
    more = (f"preloaded is {preload}",) if preload else ()
    fit = f"torch calls CUDA {cuda_text(found)} too old, and was built with {wheel_cuda(machine)}"
    fix = (
        fixes.unset(machine, "LD_PRELOAD")
        if preload
        else ("Remove what is loaded in the place of NVIDIA's libcuda.so.1.",)
    )
    return Seen((fit, *paths, *more), fix)


@TABLE.row(
    "V01",
    "the driver is too old for this torch",
    about="""A torch built with CUDA 13 needs a driver for CUDA 13: 580.65.06 or newer on Linux. One built with CUDA
12 needs 525.60.13, and any of that major version will do. torch says "The NVIDIA driver on your system is too old
(found version 12080)", where 12080 means that the driver is for CUDA 12.8.

It is told by asking the driver, and by the CUDA version in torch/version.py. The CUDA toolkit, nvcc and CUDA_HOME
have no part in it.""",
    fix="Install a torch that is built with the driver's major version of CUDA, or update the driver.",
    avoid="Installing an older or newer CUDA toolkit: torch's wheels bring their own.",
    sources=(f"{_TORCH}/162531", "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"),
)
def too_old(machine: Machine) -> Seen | None:
    """The driver announces a lower major version than torch was built with, and torch was not seen to work."""
    driver, wheel = driver_cuda(machine), build_cuda(machine)
    if not driver or wheel is None or enough(driver, wheel) or machine.torch_run.cuda_works:
        return None
    floor = driver_floor(wheel_cuda(machine), system(machine))
    version = machine.driver.nvml.driver or machine.kernel.version
    name = f"driver {version}" if version else "the driver"
    needs = f", which needs driver {floor} or newer" if floor else ""
    told = f"{name} is for CUDA {cuda_text(driver)}"
    torch = f"torch {torch_version(machine)} was built with CUDA {wheel_cuda(machine)}{needs}"
    return Seen((told, torch, *said(complaint(machine, _TOO_OLD.pattern))), _either(machine, floor))


def _either(machine: Machine, floor: str) -> Lines:
    """The two ways out; only one, where the card needs a newer driver anyway or has no code in this torch."""
    wheel = fixes.wheel(machine)
    if not floor or fixes.wheel_choice(machine).needs_driver or card_fit.misfit(machine):
        return wheel
    update = (f"Or update the driver to {floor} or newer:", *fixes.install_driver(machine, at_least=branch_of(floor)))
    return ("Either install the torch that fits this driver:", *wheel, *update)


@TABLE.row(
    "V02",
    "the driver cannot compile this PTX",
    about="""Code that comes as PTX is compiled by the driver, and PTX of a newer toolkit than the driver's is
refused: "the provided PTX was compiled with an unsupported toolchain" (222). Compiled code of the same major
version runs, so torch itself works: it is an extension, or a card that torch has only PTX for.""",
    fix="""Update the driver to the toolkit's own version or newer, or install a build that has compiled code for
the card.""",
    sources=("https://github.com/ggml-org/llama.cpp/issues/1648",),
)
def newer_ptx(machine: Machine) -> Seen | None:
    """torch failed that way; or was not run, the card is served by PTX alone, and the driver is older than it."""
    told = complaint(machine, r"unsupported toolchain")
    if not told and not (unrun(machine) and _ptx_only(machine)):
        return None
    wanted = toolkit_driver(wheel_cuda(machine), system(machine)) if build_cuda(machine) else ""
    driver, wheel = driver_cuda(machine), wheel_cuda(machine)
    known = f"the driver is for CUDA {cuda_text(driver)}, torch was built with {wheel}" if driver and wheel else ""
    update = f"Update the driver{f' to {wanted} or newer' if wanted else ''}:"
    fix = (update, *fixes.install_driver(machine, at_least=branch_of(wanted) if wanted else 0))
    return Seen(tuple(filter(None, (*said(told), known))), fix, likely=not told)


def _ptx_only(machine: Machine) -> bool:
    cuda, found = build_cuda(machine), cards(machine)
    known, proven = codes(machine)
    if cuda is None or not proven or not found or driver_cuda(machine) >= cuda[0] * 1000 + cuda[1] * 10:
        return False
    if not driver_cuda(machine) or not any(covers(known, card.capability, cuda) for card in found):
        return False
    compiled = [code for code in known if code.startswith("sm_")]
    return not any(covers(compiled, card.capability, cuda) for card in found)


@TABLE.row(
    "V03",
    "the driver lacks a function that torch calls",
    about="""A driver of the same major version runs a newer torch, but not every function of it: "API call is not
supported in the installed CUDA driver" (36).""",
    fix="Update the driver to the version of torch's CUDA toolkit or newer.",
    sources=("https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",),
)
def missing_call(machine: Machine) -> Seen | None:
    """torch failed that way."""
    told = complaint(machine, r"API call is not supported in the installed CUDA driver")
    if not told or not failed(machine):
        return None
    wanted = toolkit_driver(wheel_cuda(machine), system(machine)) if build_cuda(machine) else ""
    return Seen(said(told), fixes.install_driver(machine, at_least=branch_of(wanted) if wanted else 0))


TABLE.page(
    "V04",
    "the driver no longer drives this Kepler card",
    likely=True,
    about="""Branch 470 is the last driver for Kepler cards (GTX 6xx and 7xx, K40, K80), and torch 2.0 the last
release with code for any of them, for 3.7 alone (K80). A newer driver installs, and finds no card. On the machine
itself that is told as K06.""",
    fix="Install a driver of branch 470 and torch 2.0.1 from https://download.pytorch.org/whl/cu118.",
)


TABLE.rows.extend(card_fit.TABLE.rows)
