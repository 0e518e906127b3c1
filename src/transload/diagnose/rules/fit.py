"""Whether the driver, the cards and other packages are compatible with the installed torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transload.diagnose import fixes
from transload.diagnose.case import Card, Case, quoted
from transload.diagnose.rules.python import jetson_wheel
from transload.diagnose.rules.rule import Lines, Match, page_only, rule
from transload.diagnose.tables import (
    INDEX,
    TEGRA,
    branch_of,
    build_of,
    covers,
    cuda_text,
    driver_floor,
    numbers_of,
    toolkit_driver,
)

if TYPE_CHECKING:
    from transload.diagnose.tables import System
    from transload.machine import Extension

_TOO_OLD = re.compile(r"NVIDIA driver on your system is too old \(found version (\d+)\)")
_NO_KERNEL = r"no kernel image is available"
_NO_CODE = rf"{_NO_KERNEL}|not compatible with the current PyTorch|which is of (?:compute|cuda) capability"


# -- the driver


def _enough(driver: int, wheel: tuple[int, int]) -> bool:
    """Whether a driver runs what was built with a CUDA version: from 11 on the same major version suffices.

    >>> _enough(12000, (12, 8)), _enough(12080, (13, 0)), _enough(10010, (10, 2)), _enough(11040, (10, 2))
    (True, False, False, True)
    """
    if wheel[0] >= 11:
        return driver // 1000 >= wheel[0]
    return driver >= wheel[0] * 1000 + wheel[1] * 10


def _system(m: Case) -> System:
    """Whose driver it is: under WSL it is the Windows driver."""
    return "windows" if m.platform.system == "Windows" or m.surroundings.wsl else "linux"


@rule("V05", "fit", "another library replaces the driver's libcuda.so.1", likely=True)
def stand_in(m: Case) -> Match | None:
    """torch calls a driver too old although it is new enough."""
    told, wheel = _TOO_OLD.search(m.complaint(_TOO_OLD.pattern)), m.built_with
    if told is None or wheel is None or not _enough(int(told[1]), wheel) or m.computes:
        return None
    loaded = [path for path in m.torch_run.libraries if "/libcuda.so" in path] or [m.driver.cuda.library]
    preload = m.env("LD_PRELOAD") or " ".join(m.driver.libraries.preload)
    evidence = (
        f"torch calls a driver for CUDA {cuda_text(int(told[1]))} too old, but was built with CUDA {m.torch_cuda}",
        *(f"libcuda.so.1 is {path}" for path in loaded if path),
        f"preloaded: {preload}" if preload else "",
    )
    remove = ("Remove the library that is loaded instead of NVIDIA's libcuda.so.1.",)
    return Match(evidence, fixes.unset(m, "LD_PRELOAD") if preload else remove)


@rule("V01", "fit", "the driver is too old for this torch")
def too_old(m: Case) -> Match | None:
    """The driver supports only an older major version than torch was built with, and torch was not seen to work."""
    wheel = m.built_with
    if not m.driver_cuda or wheel is None or _enough(m.driver_cuda, wheel) or m.torch_run.cuda_works:
        return None
    floor = driver_floor(m.torch_cuda, _system(m))
    version = m.driver.nvml.driver or m.kernel.version
    needs = f", which needs driver {floor} or newer" if floor else ""
    evidence = (
        f"{f'driver {version}' if version else 'the driver'} supports CUDA up to {cuda_text(m.driver_cuda)}",
        f"torch {m.torch_version} was built with CUDA {m.torch_cuda}{needs}",
        quoted(m.complaint(_TOO_OLD.pattern)),
    )
    install = fixes.wheel(m)
    # if the card needs a newer driver anyway, or this torch has no code for it, there is only one solution
    if not floor or fixes.wheel_choice(m).needs_driver or _misfit(m):
        return Match(evidence, install)
    update = (f"Or update the driver to {floor} or newer:", *fixes.install_driver(m, at_least=branch_of(floor)))
    return Match(evidence, ("Either install a torch that works with this driver:", *install, *update))


def _toolkit_driver(m: Case) -> str:
    return toolkit_driver(m.torch_cuda, _system(m)) if m.built_with else ""


@rule("V02", "fit", "the driver cannot compile this PTX")
def newer_ptx(m: Case) -> Match | None:
    """torch failed in this way; or it was not run, has only PTX for the card, and the driver is older."""
    told = m.complaint(r"unsupported toolchain")
    if not told and not (m.torch_not_run and _ptx_only(m)):
        return None
    wanted, driver, torch = _toolkit_driver(m), m.driver_cuda, m.torch_cuda
    known = (
        f"the driver supports CUDA up to {cuda_text(driver)}, torch was built with {torch}" if driver and torch else ""
    )
    update = f"Update the driver{f' to {wanted} or newer' if wanted else ''}:"
    fix = (update, *fixes.install_driver(m, at_least=branch_of(wanted) if wanted else 0))
    return Match((quoted(told), known), fix, likely=not told)


def _ptx_only(m: Case) -> bool:
    cuda, (known, proven) = m.built_with, _codes(m)
    if cuda is None or not proven or not 0 < m.driver_cuda < cuda[0] * 1000 + cuda[1] * 10:
        return False
    compiled = [code for code in known if code.startswith("sm_")]
    with_ptx, without = (any(covers(codes, card.capability, cuda) for card in m.cards) for codes in (known, compiled))
    return with_ptx and not without


@rule("V03", "fit", "the driver lacks a function that torch calls")
def missing_call(m: Case) -> Match | None:
    """torch failed in this way."""
    told = m.complaint(r"API call is not supported in the installed CUDA driver")
    if not told or not m.failed():
        return None
    wanted = _toolkit_driver(m)
    return Match((quoted(told),), fixes.install_driver(m, at_least=branch_of(wanted) if wanted else 0))


page_only("V04", "fit", "the driver no longer supports this Kepler card")


# -- the cards


class _Misfit(NamedTuple):
    """Cards that the build has no code for; ``codes`` is what it has, ``proven`` if read from its binaries."""

    cards: tuple[Card, ...]
    codes: Lines
    proven: bool
    all: bool
    """Whether no card is left that it has code for."""

    @property
    def newer(self) -> bool:
        highest = max(map(_numbers, self.codes))
        return any(card.capability > highest for card in self.cards)


def _misfit(m: Case) -> _Misfit | None:
    """The cards that this torch has no code for, by its binaries or else the tables; ``None`` if unknown."""
    cuda, (known, proven) = m.built_with, _codes(m)
    if cuda is None or not known or not m.cards or m.torch.shadow:
        return None
    bad = tuple(card for card in m.cards if not covers(known, card.capability, cuda))
    # torch computes on its first card: whatever the lists say, there is code for that one
    overruled = m.torch_run.cuda_works and m.cards[0] in bad
    return _Misfit(bad, known, proven, len(bad) == len(m.cards)) if bad and not overruled else None


def _codes(m: Case) -> tuple[Lines, bool]:
    """What torch has code for: its kernels, else its own list, else what the tables say of that build."""
    told = tuple(m.torch_libraries.cubins or ()) or m.torch_libraries.architectures or m.torch_run.architectures
    if told:
        return told, True
    version = m.torch_version
    build = build_of(version, version.partition("+")[2], fixes.wheel_platform(m)) if numbers_of(version) else None
    return (build.archs, False) if build else ((), False)


def _numbers(code: str) -> tuple[int, int]:
    found = re.search(r"[0-9]{1,4}", code.partition("_")[2])
    number = int(found[0]) if found else 0
    return number // 10, number % 10


def _no_code(m: Case, found: _Misfit, fix: Lines) -> Match:
    """A match for cards without code: an error, but a warning if torch works on another card."""
    spared = m.torch_run.cuda_works or (not found.all and not m.complaint(_NO_KERNEL))
    listed = " ".join(sorted(set(found.codes), key=_numbers))
    source = "has code for" if found.proven else "should have code for"
    evidence = (*map(str, found.cards), f"torch {m.torch_version} {source} {listed}", quoted(m.complaint(_NO_CODE)))
    sure = found.proven and all(card.sure for card in found.cards)
    return Match(evidence, fix, severity="warning" if spared else "error", likely=not sure)


def _on_jetson(m: Case, found: _Misfit) -> bool:
    return bool(m.hardware.tegra) or any(card.capability in TEGRA for card in found.cards)


@rule("A05", "fit", "this torch has no code for the GPU of a Jetson")
def jetson(m: Case) -> Match | None:
    """The card without code is a Jetson's."""
    found = _misfit(m)
    return _no_code(m, found, jetson_wheel(m)) if found and _on_jetson(m, found) else None


@rule("A01", "fit", "the card is too new for this torch")
def newer_card(m: Case) -> Match | None:
    """A card is newer than everything the build has code for."""
    found = _misfit(m)
    return _no_code(m, found, fixes.wheel(m)) if found and not _on_jetson(m, found) and found.newer else None


@rule("A02", "fit", "the card is too old for this torch")
def older_card(m: Case) -> Match | None:
    """A card is older than what the build has code for, or in between."""
    found = _misfit(m)
    return _no_code(m, found, fixes.wheel(m)) if found and not _on_jetson(m, found) and not found.newer else None


@rule("R02", "fit", "this torch has no code for the AMD card")
def other_gfx(m: Case) -> Match | None:
    """The chip is not in the list, nothing overrides its name, and torch was not seen to compute."""
    codes = m.torch_libraries.architectures or m.torch_run.architectures
    known = {code.partition(":")[0] for code in codes if code.startswith("gfx")}
    found = [other for other in m.accelerators if other.kind == "rocm" and other.detail.startswith("gfx")]
    chips = [other.detail for other in found if other.usable]
    override = m.env("HSA_OVERRIDE_GFX_VERSION")
    if not known or not chips or override or set(chips) & known or m.torch_run.cuda_works:
        return None
    near = {"gfx103": "10.3.0", "gfx110": "11.0.0"}.get(chips[0][:6], "")
    fix: Lines = ("Install a build of torch that supports this chip, or use the CPU.",)
    if near:
        set_near = fixes.set_variable(m, "HSA_OVERRIDE_GFX_VERSION", near)
        fix = ("Treat it as the closest supported chip:", *set_near)
    return Match((f"the card is {chips[0]}", f"torch has code for {' '.join(sorted(known))}"), fix)


# -- other packages: torch works without them, so these are warnings

_TRIO = ("torchvision", "torchaudio", "torchtext", "torchcodec")
_PIN = re.compile(r"==\s*(?P<version>\d[\w.]*)")
_BITSANDBYTES = re.compile(r"_cuda(?P<cuda>\d+)\w*\.(?:so|dll)$")
_OF_DRIVER = ("libcuda.so", "libnvidia-")
# Without dependencies: an installer that may change torch would replace the build that works.
_COMPILE = ("--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-binary", ":all:")
_UNSTABLE = re.compile(r"dev|git|a\d|b\d|rc\d|nv\d")


def _named(extension: Extension) -> str:
    return f"{extension.package} {extension.version}".rstrip()


def _examined(m: Case) -> list[Extension]:
    """The packages whose examined library is one that this torch would load.

    bitsandbytes has a library for each CUDA version, and loads the one of torch's.
    """
    found = ((each, _BITSANDBYTES.search(each.library)) for each in m.extensions)
    ours = m.torch_cuda.replace(".", "")
    return [each for each, of in found if each.package != "bitsandbytes" or not of or of["cuda"] == ours]


@rule("P05", "extensions", "torchvision or torchaudio is built for another torch")
def companions(m: Case) -> Match | None:
    """The pinned release differs, or one is a CPU build and torch is not."""
    trio = [each for each in m.extensions if each.package in _TRIO]
    release = m.torch_version.partition("+")[0]
    lines = []
    for each in trio:
        pin = _PIN.search(each.wants_torch)
        if pin and release and _differ(pin["version"], release):
            lines.append(f"{_named(each)} needs torch {pin['version']}, and {release} is installed")
        elif each.local == "cpu" and m.torch_cuda and each.package == "torchvision":
            lines.append(f"{_named(each)} is a build without CUDA, and torch has CUDA {m.torch_cuda}")
    if not lines:
        return None
    return Match(tuple(lines), _with_torch(m, {each.package for each in trio}), severity="warning")


def _with_torch(m: Case, packages: set[str]) -> Lines:
    """Reinstall companions of torch, from the index of torch's own build."""
    release, _, build = m.torch_version.partition("+")
    index = f"{INDEX}/{build}" if re.fullmatch(r"cu\d+|cpu|xpu|rocm[\d.]+", build) else ""
    names = sorted(packages)
    return (*fixes.uninstall(m, *names), *fixes.install(m, f"torch=={release}", *names, index=index))


def _differ(one: str, other: str) -> bool:
    """Whether two releases differ; for development versions only major and minor numbers count."""
    first, second = numbers_of(one), numbers_of(other)
    unstable = _UNSTABLE.search(one) or _UNSTABLE.search(other)
    length = 2 if unstable else min(len(first), len(second))
    return first[:length] != second[:length]


@rule("P06", "extensions", "a package was compiled against another torch")
def other_torch(m: Case) -> Match | None:
    """Symbols of torch, or libraries, that a package needs do not exist."""
    lines: list[str] = []
    packages = set()
    for each in _examined(m):
        name, missing = each.library or _named(each), [lib for lib in each.missing if not lib.startswith(_OF_DRIVER)]
        what = [f"{name} needs {symbol}, which torch does not define" for symbol in each.undefined[:2]]
        what += [f"{name} needs {lib}, which is not found anywhere" for lib in missing[:2]]
        lines += what
        packages |= {each.package} if what else set()
    if not packages:
        return None
    companions = packages & {*_TRIO}  # they have no source distribution
    others = sorted(packages - companions)
    fix = _with_torch(m, companions) if companions else ()
    if others:
        release = m.torch_version.partition("+")[0]
        cuda = f" and CUDA {m.torch_cuda}" if m.torch_cuda else ""
        wheels = f"Install wheels of {', '.join(others)} built for torch {release}{cuda}; or compile with that toolkit:"
        fix = (*fix, wheels, *fixes.install(m, *_COMPILE, *others, force=True))
    return Match(tuple(lines[:8]), fix, severity="warning")


@rule("A03", "extensions", "a package has no code for this card")
def no_code(m: Case) -> Match | None:
    """None of a package's architectures runs on any card of this process."""
    found, cuda = [card for card in m.cards if card.sure], m.built_with
    if not found or cuda is None:
        return None
    poor = [
        each
        for each in _examined(m)
        if each.architectures and not any(covers(each.architectures, card.capability, cuda) for card in found)
    ]
    if not poor:
        return None
    lines = (f"{_named(each)} has code for {' '.join(each.architectures)}" for each in poor)
    names = sorted({each.package for each in poor})
    wanted = ";".join(sorted({f"{a}.{b}" for a, b in (card.capability for card in m.cards)}))
    fix = (
        "Try the newest release:",
        *fixes.install(m, "--no-deps", "--upgrade", *names, force=True),
        "Or compile it for this card, with a CUDA toolkit of torch's version installed:",
        *fixes.set_variable(m, "TORCH_CUDA_ARCH_LIST", wanted),
        *fixes.install(m, *_COMPILE, *names, force=True),
    )
    return Match((*lines, *map(str, found)), fix, severity="warning")
