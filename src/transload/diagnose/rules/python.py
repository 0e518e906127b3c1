"""The Python environment and its torch: which one is imported, what it is built for, and whether it is complete."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Case, is_nvidia_library, quoted
from transload.diagnose.rules.rule import Lines, Match, rule
from transload.diagnose.tables import INDEX, index_builds, numbers_of, releases
from transload.machine import AMD

if TYPE_CHECKING:
    from transload.diagnose.tables import Capability
    from transload.findings import Severity
    from transload.machine import Accelerator, TorchInstall

__all__ = ["jetson_wheel"]

_FIRST_MANYLINUX_2_28 = (2, 7)
_CUDA_ON_ARM_SINCE = (2, 11)
_OTHER_SYSTEM = ("Use a system or image with glibc 2.28 or newer: python:3.12-slim instead of python:3.12-alpine.",)
_JETSON = "https://pypi.jetson-ai-lab.io"
_JETSON_INDEXES = {36: f"{_JETSON}/jp6/cu126/+simple/", 38: f"{_JETSON}/sbsa/cu130/+simple/"}
# What the ROCm wheels have code for among AMD's own cards.
_ROCM_CARDS = frozenset(
    (
        *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"),
        *("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"),
    )
)


def _no_torch(m: Case) -> bool:
    """Whether the examined Python certainly has no torch at all."""
    return m.torch.installs == () and not (m.torch.shadow or m.torch.dangling or m.python.problem)


def _interpreter(m: Case) -> str:
    version = f" (Python {m.python.version})" if m.python.version else ""
    return f"{m.python.executable or 'the examined Python'}{version}"


@rule("P09", "python", "the Python interpreter does not respond")
def no_interpreter(m: Case) -> Match | None:
    """The interpreter did not respond, and torch was not seen to work in it either."""
    if not m.python.problem or m.imported:
        return None
    others = (f"another Python has torch: {other}" for other in m.python.others)
    return Match(
        (m.python.problem, *others), ("Name an interpreter that works:", "$ transload doctor --python /path/to/python")
    )


@rule("P03", "python", "another file is imported instead of torch")
def shadowed(m: Case) -> Match | None:
    """Something other than torch is found first, and the real one was not seen to be imported."""
    shadow, run = m.torch.shadow, m.torch_run
    if not shadow or (m.imported and run.version and run.file != shadow):
        return None
    via = f", through {m.torch.shadow_via}" if m.torch.shadow_via else ""
    evidence = (f"import torch finds {shadow}{via}", quoted(m.import_error))
    folder = shadow.rpartition("/")[0]
    if folder.endswith(("/site-packages", "/dist-packages")):
        fix = (f"Delete {shadow}, and install torch again:", *m.reinstall)
        return Match(evidence, fix, "the installed torch is incomplete")
    if m.torch.shadow_via == "PYTHONPATH":
        drop = fixes.drop_folder(m, "PYTHONPATH", folder)
        return Match(evidence, (f"Rename {shadow}, or remove its directory from PYTHONPATH:", *drop))
    if m.torch.shadow_kind == "source":
        return Match(evidence, ("Start Python in another directory, outside PyTorch's source tree.",))
    here = m.torch.shadow_via == "the current directory"
    return Match(evidence, (f"Rename {shadow}{', or start Python in another directory' if here else ''}.",))


@rule("P08", "python", "no torch wheel runs on this system")
def wrong_system(m: Case) -> Match | None:
    """torch is absent and could not be installed, or the C library rejected it."""
    libc = m.platform.libc
    lacking = [each for each in m.torch_libraries.unresolved if each.startswith("GLIBC_")]
    if re.search(r"version .GLIBC_[\d.]+. not found", m.import_error) or (lacking and m.torch_not_run):
        asked = (quoted(m.import_error),) if m.import_error else (f"not defined: {each}" for each in lacking[:3])
        return Match((*asked, f"this system has {libc or 'an older C library'}"), _OTHER_SYSTEM)
    if not _no_torch(m):
        return None
    if m.python.bits == 32:
        return Match(
            (f"{_interpreter(m)} is a 32-bit program",), ("Install a 64-bit Python, and install torch with it.",)
        )
    if libc.startswith("musl"):
        return Match((f"the C library is {libc}, and torch has no wheels for it",), _OTHER_SYSTEM)
    return _old_glibc(m)


def _old_glibc(m: Case) -> Match | None:
    """glibc is too old for every release that has wheels for this Python."""
    name, _, version = m.platform.libc.partition(" ")
    fitting = [each for each in releases() if _has_wheel(m, each)]
    if name != "glibc" or not numbers_of(version) or numbers_of(version) >= (2, 28) or not fitting:
        return None
    if any(numbers_of(each)[:2] < _FIRST_MANYLINUX_2_28 for each in fitting):
        return None
    needs = f"torch {fitting[0]}, the first for Python {m.python.version}, needs glibc 2.28"
    return Match((f"the C library is glibc {version}", needs), _OTHER_SYSTEM)


@rule("P07", "python", "torch has no wheel for this Python")
def wrong_python(m: Case) -> Match | None:
    """torch is absent, and no release in the table has a wheel for this Python."""
    python = m.python
    if not _no_torch(m) or not numbers_of(python.version) or python.bits != 64:
        return None
    if any(_has_wheel(m, release) for release in releases()):
        return None
    newest = index_builds(releases()[-1])[0]
    cpython = python.implementation == "cpython"
    kind = f"{'free-threaded ' if python.free_threaded else ''}{'CPython' if cpython else python.implementation}"
    low, high = (".".join(map(str, version)) for version in newest.python)
    evidence = (f"{_interpreter(m)} is {kind}", f"torch {newest.torch} has wheels for CPython {low} to {high}")
    fix = (f"Create an environment with Python {low} to {high}, and install torch there.",)
    return Match(evidence, fix, likely=cpython and numbers_of(python.version)[:2] > newest.python[1])


def _has_wheel(m: Case, release: str) -> bool:
    numbers = numbers_of(m.python.version)[:2]
    builds = index_builds(release)
    if m.python.implementation != "cpython" or not builds:
        return False
    if m.python.free_threaded:
        return f"{'.'.join(map(str, numbers))}t" in builds[0].free_threaded
    return builds[0].supports_python(numbers)


@rule("P02", "python", "a torch from outside this environment is imported first")
def hidden_install(m: Case) -> Match | None:
    """An error if a CPU-only torch hides one with CUDA on a machine with a GPU; else a note that there are two."""
    installs = m.torch.installs or ()
    if len(installs) < 2 or m.torch.shadow:
        return None
    named = [f"{each.location}: torch {each.version or each.dist_version or 'of unknown version'}" for each in installs]
    evidence = (f"import torch finds {named[0]}", *(f"it hides {name}" for name in named[1:]))
    remove = fixes.uninstall(m, "torch")
    if m.python.user_site and installs[0].location.startswith(m.python.user_site):
        without = fixes.set_variable(m, "PYTHONNOUSERSITE", "1")
        fix = (*without, "Or remove that torch permanently:", *remove)
    else:
        fix = ("Remove the one that is found first (pip removes the one that Python imports):", *remove)
    if installs[0].cpu_only and any(other.cuda for other in installs[1:]) and m.has_nvidia:
        return Match(evidence, fix)
    return Match(evidence, fix, "there are two installations of torch on the path", "note")


@rule("P04", "python", "files of two torch versions are mixed")
def mixed_versions(m: Case) -> Match | None:
    """An error if such a torch cannot be imported; a warning if it can; leftovers alone are a note."""
    first, error = m.torch.first, m.import_error
    if first is None or m.torch.shadow:
        return None
    files, metadata = numbers_of(first.version), numbers_of(first.dist_version)
    length = min(len(files), len(metadata), 3)
    differ = length >= 2 and files[:length] != metadata[:length]
    mixed = f"torch/version.py says {first.version}, but its metadata says {first.dist_version}" if differ else ""
    leftovers = tuple(f"left over from another version: {name}" for name in (*m.torch.leftovers, *m.torch.dangling))
    delete = "Delete the leftovers of the other version, then:" if m.torch.leftovers else ""
    repeat = "Repeat that until it finds nothing to uninstall."
    again = (*fixes.uninstall(m, "torch"), repeat, delete, *m.reinstall)
    library = re.search(r"(lib\S+?\.so[.\d]*): cannot open shared object file", error)
    of_cuda = library is not None and is_nvidia_library(library[1])  # torch's own files are not the reason
    if error and (mixed or first.unlisted or first.altered) and not of_cuda:
        unlisted = (f"not a file of this release: {name}" for name in (*first.unlisted, *first.altered)[:5])
        return Match((mixed, *unlisted, *leftovers, quoted(error)), again, likely=not mixed)
    if mixed:
        return Match((mixed, *leftovers), again, severity="warning")
    if leftovers:
        title = "parts of another torch were left behind"
        return Match(leftovers, ("Delete them: nothing uses them.",), title, "note")
    return None


@rule("P01", "python", "torch is not installed in this Python")
def not_installed(m: Case) -> Match | None:
    """Neither torch nor anything of that name is on the path of the examined Python."""
    if not _no_torch(m) or m.imported:
        return None
    elsewhere = m.python.others
    evidence = (
        f"{_interpreter(m)} has no torch",
        m.python.why,
        *(f"another Python has torch: {other}" for other in elsewhere),
    )
    install = fixes.install_torch(m, gpu=m.nvidia)
    either = "Run your program with a Python that has torch, or install it in this one:" if elsewhere else ""
    return Match(evidence, (either, *install))


@rule("W02", "python", "torch with CUDA needs a 64-bit Python for x64", likely=True)
def windows_arm(m: Case) -> Match | None:
    """Windows on ARM, and no torch in this Python."""
    arm = m.platform.machine.lower() in ("arm64", "aarch64")
    if m.platform.system != "Windows" or not arm or m.torch.installs != ():
        return None
    return Match((f"the processor is {m.platform.machine}",), ("Use an x64 Python, or torch on the CPU.",))


# -- the build


def _built(install: TorchInstall) -> str:
    return f"{install.location}/version.py says {install.version}: built without CUDA"


def _cpu_build(m: Case) -> TorchInstall | None:
    """The torch without CUDA that is imported on a machine whose NVIDIA card another build could use."""
    first = m.torch.first
    if first is None or m.torch.shadow or not first.cpu_only or not m.has_nvidia:
        return None
    if m.platform.system == "Darwin" or m.computes or _never_supported(m) or m.withheld:
        return None
    return first


def _never_supported(m: Case) -> bool:
    """Whether no torch ever supported any of the cards: then a build without CUDA is the right one."""
    return bool(m.cards) and not m.hardware.tegra and not any(_served(card.capability) for card in m.cards)


@cache
def _served(capability: Capability) -> bool:
    platforms = ("linux-x86_64", "linux-aarch64")
    builds = (build for each in releases() for platform in platforms for build in index_builds(each, platform))
    return any(build.supports_card(capability) for build in builds)


def _cpu_match(m: Case, first: TorchInstall, *more: str, fix: Lines = ()) -> Match:
    """A match for a build without CUDA, with a way to prevent the next installation from bringing it back."""
    beside = ", ".join(first.replaced_by[:4])
    together = f"it was installed together with {beside}" if beside else ""
    keep = "To keep this build, name torch and its index in a constraints file, and pass it with -c to later installs."
    # a card with an unknown chip may be one that CUDA never supported
    known = m.cards or m.hardware.dxg or m.driver.cuda.works
    gpus = tuple(map(str, m.cards[:4])) or ("there is an NVIDIA GPU",)
    install = fix or (*fixes.wheel(m, driver=not m.driver_misfit), keep if beside else "")
    return Match((_built(first), together, *gpus, *more), install, likely=not known and not fix)


@rule("J01", "build", "this torch is not built for Jetson")
def jetson(m: Case) -> Match | None:
    """A build without CUDA on a Tegra board."""
    first = _cpu_build(m)
    if first is None or not m.hardware.tegra:
        return None
    return Match((_built(first), f"this is a Jetson: {m.hardware.tegra}"), jetson_wheel(m))


def jetson_wheel(m: Case) -> Lines:
    """Where the wheels for this board are, by the release of Jetson Linux."""
    found = re.search(r"\bR(\d{2})\b", m.hardware.tegra)
    index = _JETSON_INDEXES.get(int(found[1]) if found else 0)
    if index is None:
        return (f"Install the torch that NVIDIA builds for this board's JetPack: {_JETSON}",)
    return fixes.install(m, "torch", index=index, force=True)


@rule("T02", "build", "pip installed a torch without CUDA, the default on Windows")
def windows_default(m: Case) -> Match | None:
    """A build without CUDA on Windows."""
    first = _cpu_build(m)
    return _cpu_match(m, first) if first and m.platform.system == "Windows" else None


@rule("T03", "build", "the aarch64 wheel of this torch release has no CUDA")
def arm_default(m: Case) -> Match | None:
    """A build without CUDA of a release that has none on PyPI for this processor."""
    first = _cpu_build(m)
    if first is None or m.platform.system != "Linux" or m.hardware.tegra:
        return None
    old = () < numbers_of(first.version)[:2] < _CUDA_ON_ARM_SINCE
    return _cpu_match(m, first) if old and m.platform.machine in ("aarch64", "arm64") else None


@rule("T05", "build", "conda installed a torch without CUDA", likely=True)
def conda_cpu(m: Case) -> Match | None:
    """A build without CUDA that conda installed."""
    first = _cpu_build(m)
    if first is None or "cpu" not in first.conda_build:
        return None
    return _cpu_match(m, first, f"conda's build is {first.conda_build}", fix=fixes.wheel(m))


def _unexplained(m: Case) -> TorchInstall | None:
    """A build without CUDA that none of the rules above explains."""
    first = _cpu_build(m)
    explained = first is None or m.hardware.tegra or "cpu" in first.conda_build or m.fires("T02", "T03")
    return None if explained else first


@rule("T04", "build", "installing another package brought in a torch without CUDA", likely=True)
def replaced(m: Case) -> Match | None:
    """A build without CUDA, installed together with something else, without a better explanation."""
    first = _unexplained(m)
    return _cpu_match(m, first) if first and first.replaced_by else None


@rule("T01", "build", "torch was built without CUDA")
def cpu_only(m: Case) -> Match | None:
    """A build without CUDA, for an unknown reason; a note if the card is too old or not for this process."""
    if _cpu_build(m) is not None:
        first = _unexplained(m)
        return _cpu_match(m, first) if first and not first.replaced_by else None
    found = m.torch.first
    if found is None or not found.cpu_only or not m.has_nvidia or m.computes:
        return None
    if m.withheld:
        title = "torch was built without CUDA, and this process has no GPU"
        get = "To use a GPU, request one first and run transload doctor again: it then names the torch to install."
        return Match((_built(found),), (f"Nothing is wrong if this is intended. {get}",), title, "note")
    if not _never_supported(m):
        return None
    title = "torch has no CUDA, and no build ever supported this card"
    return Match(tuple(map(str, m.cards)), ("The CPU build is the right one.",), title, "note")


@rule("T09", "build", "files of torch are missing or truncated")
def damaged(m: Case) -> Match | None:
    """An error if torch cannot be imported or was not run; a note if a library only has another size."""
    torch, first = m.torch, m.torch.first
    if first is None:
        gone = tuple(f"{name} exists, but the files it lists do not" for name in torch.dangling)
        return Match(gone, m.reinstall) if gone and not m.imported and torch.installs == () else None
    unread = "" if first.known or not m.import_error else f"torch/version.py: {first.problem}"
    if not m.imported and (first.missing or unread):
        return Match((*first.missing[:6], unread, quoted(m.import_error)), m.reinstall)
    if not (first.missing or first.altered) or m.computes:
        return None
    title = "files of torch were changed after the installation"
    return Match((*first.missing[:3], *first.altered[:3]), m.reinstall, title, "note")


# -- other vendors and systems


@rule("T06", "build", "this torch is built for another vendor's GPU")
def other_vendor(m: Case) -> Match | None:
    """A ROCm or XPU build where the only card is NVIDIA's."""
    first = m.torch.first
    if first is None or m.torch.shadow or first.cuda or not (first.hip or first.xpu) or not m.has_nvidia:
        return None
    rivals = any(card.display and card.vendor == AMD for card in m.hardware.pci or ()) or m.accelerators
    if rivals or m.torch_run.available or m.torch_run.backends:
        return None
    kind = f"ROCm {first.hip}" if first.hip else "Intel's XPU"
    gpus = tuple(map(str, m.cards[:4])) or ("the GPU is NVIDIA's",)
    return Match((f"{first.location}/version.py says {first.version}: built for {kind}", *gpus), fixes.wheel(m))


@rule("T07", "build", "this torch is not built for this machine's GPU")
def other_gpu(m: Case) -> Match | None:
    """Error for an AMD card that ROCm wheels support; a note for what torch might use otherwise."""
    first = m.torch.first
    if first is None or not first.known or first.hip or m.has_nvidia or m.torch.shadow:
        return None
    usable = [other for other in m.accelerators if other.usable]
    amd = next((other for other in usable if other.kind == "rocm"), None)
    intel = next((other for other in usable if other.kind == "xpu"), None)
    if amd:
        sure = amd.detail in _ROCM_CARDS and not amd.integrated and m.platform.system == "Linux"
        return _for_vendor(m, first, amd, "error" if sure else "note")
    if intel and not first.xpu and "xpu" not in m.torch_run.backends:
        return _for_vendor(m, first, intel, "note")
    return None


def _for_vendor(m: Case, first: TorchInstall, gpu: Accelerator, severity: Severity) -> Match:
    builds = [build.build for each in releases() for build in index_builds(each) if build.build.startswith(gpu.kind)]
    install = fixes.install(m, "torch", index=f"{INDEX}/{builds[-1]}") if builds else ()
    name = " ".join(filter(None, (gpu.name, gpu.detail)))
    evidence = (f"torch is {first.version}", f"the GPU is {name}, for {gpu.kind}")
    return Match(evidence, (*fixes.uninstall(m, "torch"), *install), severity=severity)


@rule("T08", "build", "macOS has no CUDA")
def macos(m: Case) -> Match | None:
    """A note on every Mac."""
    if m.platform.system != "Darwin" or m.torch.first is None:
        return None
    if m.platform.machine == "arm64":
        return Match(("this is a Mac with Apple silicon",), ('Use the device "mps".',), severity="note")
    return Match(("this is a Mac with an Intel processor",), ("torch uses the CPU here.",), severity="note")
