"""Packages beside torch with compiled code of their own: whether that fits this torch and these cards.

What is wrong with them leaves torch alone, so it is a warning.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import build_cuda, cards, wheel_cuda
from transload.diagnose.tables import covers, numbers_of

if TYPE_CHECKING:
    from transload.machine import Extension, Machine

__all__ = ["TABLE"]

TABLE = Table("extensions")

Lines = tuple[str, ...]

_TRIO = ("torchvision", "torchaudio", "torchtext", "torchcodec")
_PIN = re.compile(r"==\s*(?P<version>\d[\w.]*)")
_BITSANDBYTES = re.compile(r"_cuda(?P<cuda>\d+)\w*\.(?:so|dll)$")
_OF_DRIVER = ("libcuda.so", "libnvidia-")
_ALONE = ("--no-deps", "--upgrade")
_COMPILE = ("--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-binary", ":all:")
"""Without its dependencies: an installer that may touch torch would replace the build that works."""
_UNSTABLE = re.compile(r"dev|git|a\d|b\d|rc\d|nv\d")


def torch_release(machine: Machine) -> str:
    """The version of torch without its local part."""
    first = machine.torch.first
    return (machine.torch_run.version or (first.version if first else "")).partition("+")[0]


def examined(machine: Machine) -> tuple[Extension, ...]:
    """The packages whose examined library is one that this torch would load."""
    return tuple(each for each in machine.extensions if _concerns(machine, each))


def _concerns(machine: Machine, extension: Extension) -> bool:
    """bitsandbytes has a library for each CUDA version, and loads the one of torch's."""
    found = _BITSANDBYTES.search(extension.library)
    return not (found and extension.package == "bitsandbytes") or found["cuda"] == wheel_cuda(machine).replace(".", "")


def _named(extension: Extension) -> str:
    return f"{extension.package} {extension.version}".rstrip()


@TABLE.row(
    "P05",
    "torchvision or torchaudio is made for another torch",
    about="""torchvision and torchaudio are compiled against one release of torch, and need that one: "RuntimeError:
operator torchvision::nms does not exist". A CPU build of them beside a CUDA build of torch imports, and fails on
the GPU: "Could not run 'torchvision::nms' with arguments from the 'CUDA' backend".""",
    fix="Install all of them together, from one index: pip install torch torchvision torchaudio --index-url …",
    sources=(
        "https://github.com/pytorch/vision/issues/8985",
        "https://github.com/pytorch/pytorch/issues/157648",
    ),
)
def companions(machine: Machine) -> Seen | None:
    """The pinned release differs, or one is a CPU build and torch is not."""
    lines = [line for each in machine.extensions if each.package in _TRIO for line in _misfit(machine, each)]
    if not lines:
        return None
    names = sorted({each.package for each in machine.extensions if each.package in _TRIO})
    return Seen(tuple(lines), _together(machine, names), severity="warning")


def _misfit(machine: Machine, extension: Extension) -> Lines:
    torch = torch_release(machine)
    pin = _PIN.search(extension.wants_torch)
    if pin and torch and _differ(pin["version"], torch):
        return (f"{_named(extension)} needs torch {pin['version']}, and {torch} is installed",)
    if extension.local == "cpu" and wheel_cuda(machine) and extension.package == "torchvision":
        return (f"{_named(extension)} is a build without CUDA, and torch has CUDA {wheel_cuda(machine)}",)
    return ()


def _differ(one: str, other: str) -> bool:
    """Whether two releases differ; of versions between releases only the numbers are compared."""
    if _UNSTABLE.search(one) or _UNSTABLE.search(other):
        return numbers_of(one)[:2] != numbers_of(other)[:2]
    first, second = numbers_of(one), numbers_of(other)
    length = min(len(first), len(second))
    return first[:length] != second[:length]


def _together(machine: Machine, names: list[str]) -> Lines:
    from transload.diagnose.tables.wheels import INDEX

    first = machine.torch.first
    version = machine.torch_run.version or (first.version if first else "")
    release, _, build = version.partition("+")
    index = f"{INDEX}/{build}" if re.fullmatch(r"cu\d+|cpu|xpu|rocm[\d.]+", build) else ""
    return (*fixes.uninstall(machine, *names), *fixes.install(machine, f"torch=={release}", *names, index=index))


@TABLE.row(
    "P06",
    "a package is compiled against another torch",
    about="""flash-attn, xformers, mmcv and others call torch's C++ functions, whose names change between releases:
"ImportError: flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi". It is
also so with a wheel for the other C++ ABI (cxx11abiTRUE or FALSE in its name).

It is told by the symbols that the package needs and torch's libraries do not have.""",
    fix="""Install a wheel of the package made for this torch release, CUDA and ABI, or compile it here: pip install
--no-build-isolation --no-cache-dir flash-attn""",
    sources=(
        "https://github.com/Dao-AILab/flash-attention/issues/931",
        "https://github.com/Dao-AILab/flash-attention/issues/1832",
    ),
)
def other_torch(machine: Machine) -> Seen | None:
    """Symbols of torch's, or whole libraries, that a package needs are not there."""
    lines, packages = [], []
    for each in examined(machine):
        name, missing = each.library or _named(each), [lib for lib in each.missing if not lib.startswith(_OF_DRIVER)]
        what = [f"{name} needs {symbol}, which torch has not" for symbol in each.undefined[:2]]
        what += [f"{name} needs {lib}, which is nowhere to be found" for lib in missing[:2]]
        lines += what
        packages += [each.package] if what else []
    if not packages:
        return None
    return Seen(tuple(lines[:8]), _rebuild(machine, packages), severity="warning")


def _rebuild(machine: Machine, packages: list[str]) -> Lines:
    cuda = f" and CUDA {wheel_cuda(machine)}" if wheel_cuda(machine) else ""
    return (
        f"Install wheels made for torch {torch_release(machine)}{cuda}; or compile, with that CUDA toolkit:",
        *fixes.install(machine, *_COMPILE, *sorted(set(packages)), force=True),
    )


@TABLE.row(
    "A03",
    "a package has no code for this card",
    about="""torch works on the card, and an extension (flash-attn, xformers, bitsandbytes …) has compiled code for
others only: "CUDA error: no kernel image is available for execution on the device" from inside that package.

It is told by the architectures in the package's own libraries.""",
    fix="""Install a newer release of the package, or compile it for the card: TORCH_CUDA_ARCH_LIST="12.0" pip
install --no-build-isolation --no-cache-dir flash-attn""",
    sources=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1715",),
)
def no_code(machine: Machine) -> Seen | None:
    """None of a package's architectures runs on any card that this process gets."""
    found = [card for card in cards(machine) if card.sure]
    cuda = build_cuda(machine)
    if not found or cuda is None:
        return None
    poor = [
        each
        for each in examined(machine)
        if each.architectures and not any(covers(each.architectures, card.capability, cuda) for card in found)
    ]
    if not poor:
        return None
    lines = tuple(f"{_named(each)} has code for {' '.join(each.architectures)}" for each in poor)
    return Seen((*lines, *map(str, found)), _compile(machine, poor), severity="warning")


def _compile(machine: Machine, poor: list[Extension]) -> Lines:
    names = sorted({each.package for each in poor})
    wanted = ";".join(sorted({f"{a}.{b}" for a, b in (card.capability for card in cards(machine))}))
    return (
        "Try the newest release:",
        *fixes.install(machine, *_ALONE, *names, force=True),
        "Or compile it for this card, with a CUDA toolkit of torch's version installed:",
        *fixes.set_variable(machine, "TORCH_CUDA_ARCH_LIST", wanted),
        *fixes.install(machine, *_COMPILE, *names, force=True),
    )
