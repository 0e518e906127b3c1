"""The Python environment and its torch: which one is imported, what it is built for, and what it loads."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Case, Lines, Match, is_nvidia_library, quoted, rule, rules
from transload.diagnose.tables import INDEX, index_builds, numbers_of, releases
from transload.machine import AMD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.diagnose.tables import Capability
    from transload.machine import Resolved

_FIRST_MANYLINUX_2_28 = (2, 7)
_CUDA_ON_ARM_SINCE = (2, 11)
_OTHER_SYSTEM = ("Use a system or image with glibc 2.28 or newer: python:3.12-slim instead of python:3.12-alpine.",)
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
    # glibc is too old for every release that has wheels for this Python
    name, _, version = libc.partition(" ")
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


@cache
def _ever_supported(capability: Capability) -> bool:
    """Whether any torch has code for a card: where none has, a build without CUDA is the right one."""
    platforms = ("linux-x86_64", "linux-aarch64")
    builds = (build for each in releases() for platform in platforms for build in index_builds(each, platform))
    return any(build.supports_card(capability) for build in builds)


@rules(
    "build",
    {
        "J01": "this torch is not built for Jetson",
        "T02": "pip installed a torch without CUDA, the default on Windows",
        "T03": "the aarch64 wheel of this torch release has no CUDA",
        "T05": "conda installed a torch without CUDA",
        "T04": "installing another package brought in a torch without CUDA",
        "T01": "torch was built without CUDA",
    },
    likely=("T05", "T04"),
)
def cpu_build(m: Case) -> Iterator[tuple[str, Match]]:
    """A torch without CUDA, on a machine whose NVIDIA card another build could use, and how it got there."""
    first, tegra = m.torch.first, m.hardware.tegra
    if first is None or not first.cpu_only or not m.has_nvidia or m.computes:
        return
    built = f"{first.location}/version.py says {first.version}: built without CUDA"
    if m.withheld:
        title = "torch was built without CUDA, and this process has no GPU"
        get = "To use a GPU, request one first and run transload doctor again: it then names the torch to install."
        yield "T01", Match((built,), (f"Nothing is wrong if this is intended. {get}",), title, "note")
        return
    if m.cards and not tegra and not any(_ever_supported(card.capability) for card in m.cards):
        title = "torch has no CUDA, and no build ever supported this card"
        yield "T01", Match(tuple(map(str, m.cards)), ("The CPU build is the right one.",), title, "note")
        return
    if m.torch.shadow or m.platform.system == "Darwin":
        return
    if tegra:
        yield "J01", Match((built, f"this is a Jetson: {tegra}"), fixes.jetson_torch(m))
    beside = ", ".join(first.replaced_by[:4])
    together = f"it was installed together with {beside}" if beside else ""
    # to prevent the next installation from bringing it back
    keep = "To keep this build, name torch and its index in a constraints file, and pass it with -c to later installs."
    gpus = tuple(map(str, m.cards[:4])) or ("there is an NVIDIA GPU",)
    install = (*fixes.wheel(m, driver=not m.driver_misfit), keep if beside else "")
    # a card with an unknown chip may be one that CUDA never supported
    unknown = not (m.cards or m.hardware.dxg or m.driver.cuda.works)
    evidence = (built, together, *gpus)
    old = () < numbers_of(first.version)[:2] < _CUDA_ON_ARM_SINCE
    arm = m.platform.system == "Linux" and m.platform.machine in ("aarch64", "arm64") and not tegra
    if m.platform.system == "Windows":
        yield "T02", Match(evidence, install, likely=unknown)
    elif arm and old:
        yield "T03", Match(evidence, install, likely=unknown)
    if "cpu" in first.conda_build:
        yield "T05", Match((*evidence, f"conda's build is {first.conda_build}"), fixes.wheel(m))
    elif not (tegra or m.platform.system == "Windows" or (arm and old)):
        yield ("T04" if first.replaced_by else "T01"), Match(evidence, install, likely=unknown)


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
    gpu = amd or intel
    if gpu is None or (gpu is intel and (first.xpu or "xpu" in m.torch_run.backends)):
        return None
    sure = gpu is amd and gpu.detail in _ROCM_CARDS and not gpu.integrated and m.platform.system == "Linux"
    builds = [build.build for each in releases() for build in index_builds(each) if build.build.startswith(gpu.kind)]
    install = fixes.install(m, "torch", index=f"{INDEX}/{builds[-1]}") if builds else ()
    name = " ".join(filter(None, (gpu.name, gpu.detail)))
    evidence = (f"torch is {first.version}", f"the GPU is {name}, for {gpu.kind}")
    return Match(evidence, (*fixes.uninstall(m, "torch"), *install), severity="error" if sure else "note")


@rule("T08", "build", "macOS has no CUDA")
def macos(m: Case) -> Match | None:
    """A note on every Mac."""
    if m.platform.system != "Darwin" or m.torch.first is None:
        return None
    kind, use = "an Intel processor", "torch uses the CPU here."
    if m.platform.machine == "arm64":
        kind, use = "Apple silicon", 'Use the device "mps".'
    return Match((f"this is a Mac with {kind}",), (use,), severity="note")


# -- the libraries torch loads: which files the loader finds, and whether they belong together

_MISSING = re.compile(r"(?P<name>[^\s/:]+\.so[.\d]*): cannot open shared object file")
_SYMBOL = re.compile(r"(?P<user>\S+): undefined symbol: (?P<symbol>\w+)(?:, version (?P<library>[^\s,]+))?")
_SYMBOL_OF = re.compile(r" of (?P<library>\S+), needed by ")
_STDCPP = re.compile(r"(?P<library>\S+): version .(?:GLIBCXX|CXXABI)_[\d.]+. not found")
_DLL = re.compile(r"\[WinError (?:126|127|193|1114)\].*?Error loading \"(?P<dll>[^\"]+)\"", re.DOTALL)
_ABOUT_GPUS = re.compile(r"cuda|cublas|cudnn|nccl|nvidia|vgpu|hami|nvml", re.IGNORECASE)
_OF_TORCH = ("libtorch", "libc10", "libshm")
_SYSTEM = {
    "libgomp.so.1": {"apt": "libgomp1", "dnf": "libgomp", "apk": "libgomp", "pacman": "gcc-libs", "zypper": "libgomp1"},
    "libopenblas.so.0": {
        "apt": "libopenblas0",
        "dnf": "openblas",
        "pacman": "openblas",
        "zypper": "libopenblas_pthreads0",
    },
    "libstdc++.so.6": {"apt": "libstdc++6", "dnf": "libstdc++", "apk": "libstdc++", "pacman": "gcc-libs"},
}
_BEHIND = ("ld.so.cache", "default folder")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _line(lib: Resolved) -> str:
    """Which file the loader finds, and how."""
    via = f", found through {lib.via}" if lib.via else ""
    version = f" ({lib.version})" if lib.version else ""
    return f"{lib.name} is taken from {lib.path}{version}{via}"


def _own(lib: Resolved) -> str:
    """What the wheel brought for it."""
    return f"torch's own is {lib.expected}" if lib.shadowed else ""


def _drop(m: Case, lib: Resolved) -> Lines:
    """Prevent the loader from using a file that is not torch's own."""
    return fixes.drop_library(m, lib.path, lib.via) or _bring(m, [lib])


def _bring(m: Case, blamed: Iterable[Resolved]) -> Lines:
    """Install the packages that contain some libraries."""
    blamed = list(blamed)
    packages = sorted({lib.package for lib in blamed if lib.package})
    if not packages or "torch" in packages:
        return fixes.bring(m, *(lib.name for lib in blamed)) or m.reinstall
    versions = m.python.packages
    pinned = (f"{name}=={versions[name]}" if versions.get(name) else name for name in packages)
    return fixes.install(m, "--no-deps", *pinned, force=True)


@rule("L04", "torch-libraries", "a library that torch needs is missing")
def missing(m: Case) -> Match | None:
    """The import failed because of it; or torch was not run, and the loader would not find it."""
    told = _MISSING.search(m.import_error)
    name = told["name"] if told else ""
    if name.startswith(("libcuda.so", "libnvidia-ml.so")):
        return None  # the driver's library, not torch's
    gone = [lib for lib in m.torch_libraries.needed if not lib.path or lib.problem]
    words = r"file too short|invalid ELF header|SIGBUS"  # the last if pages of a file are missing
    spoilt = m.complaint(words) if m.import_error else ""
    if not (name or spoilt) and not (m.torch_not_run and gone):
        return None
    blamed = [lib for lib in gone if lib.name == name or (spoilt and lib.problem)] or ([] if name or spoilt else gone)
    lines = (
        f"{lib.path}, for {lib.name}, cannot be loaded: {lib.problem}"
        if lib.path
        else f"{lib.name}, needed by {lib.needed_by}, is not found anywhere"
        for lib in blamed[:6]
    )
    if not name or is_nvidia_library(name) or name.startswith(_OF_TORCH):
        fix = _bring(m, blamed)
    elif name in _SYSTEM:
        fix = fixes.system_package(m, **_SYSTEM[name])
    else:
        fix = (f"Install the package that provides {name} on this system.",)
    return Match((quoted(m.import_error), *lines), fix)


@rule("L01", "torch-libraries", "an older CUDA library is loaded instead of torch's own")
def older(m: Case) -> Match | None:
    """The import failed because of a CUDA symbol; or torch was not run, and a symbol would be missing."""
    told = _SYMBOL.search(m.import_error)
    library = (told["library"] or "") if told else ""
    found = ((each, _SYMBOL_OF.search(each)) for each in m.torch_libraries.unresolved)
    unresolved = [each for each, words in found if words and is_nvidia_library(words["library"])]
    if not (is_nvidia_library(library) or (unresolved and (told or m.torch_not_run))):
        return None
    words = " ".join(unresolved)
    lacking = [lib for lib in m.torch_libraries.needed if lib.name == library or f" of {lib.name}," in words]
    blamed = [lib for lib in lacking if lib.shadowed]
    symbols = (f"not defined: {symbol}" for symbol in unresolved[:3])
    evidence = (quoted(m.import_error), *symbols, *(line for lib in blamed for line in (_line(lib), _own(lib))))
    if blamed:
        return Match(evidence, _drop(m, blamed[0]))
    if m.env("LD_LIBRARY_PATH"):
        return Match(evidence, fixes.unset(m, "LD_LIBRARY_PATH"), likely=True)
    return Match(evidence, m.reinstall, "the CUDA libraries of this environment do not match each other")


@rule("L03", "torch-libraries", "parts of two cuDNN versions are mixed")
def split_cudnn(m: Case) -> Match | None:
    """A convolution failed in this way; or torch was not run, and the parts would be mixed."""
    parts = m.torch_libraries.split_cudnn
    told = m.complaint(r"CUDNN_STATUS_SUBLIBRARY")
    if not told and not (parts and m.torch_not_run):
        return None
    evidence = (quoted(told), *(f"from another release: {part}" for part in parts[:4]))
    by_path = next((part for part in parts if part.endswith(", by LD_LIBRARY_PATH")), "")
    if by_path:
        path = by_path.partition(": ")[2].removesuffix(", by LD_LIBRARY_PATH")
        return Match(evidence, fixes.drop_folder(m, "LD_LIBRARY_PATH", _folder(path)), likely=not told)
    newer: Lines = ()
    if "nvidia-cudnn-cu13" in m.python.packages:
        install = fixes.install(m, "nvidia-cudnn-cu13>=9.21")
        newer = ("Install a complete cuDNN:", *install, "Or remove the system's cuDNN:")
    apt = m.platform.package_manager == "apt"
    remove = "Remove the system's cuDNN."
    return Match(evidence, (*newer, fixes.sudo(m, "apt remove 'libcudnn9-*'") if apt else remove), likely=not told)


@rule("L02", "torch-libraries", "the cuDNN that is loaded is not the one torch was built with")
def other_cudnn(m: Case) -> Match | None:
    """torch complained; or was not run, and the one it would load is too old. A note if it works."""
    told = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)")
    lib = next((lib for lib in m.torch_libraries.needed if lib.name.startswith("libcudnn.so")), None)
    if lib is None:
        match = Match((quoted(told),), fixes.unset(m, "LD_LIBRARY_PATH"))
        return match if "incompatibility" in told else None
    if lib.shadowed and lib.via in _BEHIND:
        return None  # the wheel's own is gone, which is L05
    lines = (_line(lib), _own(lib)) if lib.path else ()
    if "incompatibility" in told or (told and lib.shadowed):
        return Match((quoted(told), *lines), _drop(m, lib))
    if not lib.shadowed:
        return None
    found, wanted = numbers_of(lib.version)[:2], numbers_of(m.python.packages.get(lib.package, ""))[:2]
    if m.torch_not_run and len(found) == 2 and found < wanted:
        return Match(lines, _drop(m, lib), likely=True)
    return Match(lines, _drop(m, lib), severity="note")


@rule("L07", "torch-libraries", "CUDA libraries from conda and pip are mixed")
def conda_mix(m: Case) -> Match | None:
    """A library is loaded from conda's directory instead of pip's; an error only if torch fails because of it."""
    mixed = _from_conda(m)
    if not mixed:
        return None
    broken = bool(_SYMBOL.search(m.import_error) or m.failed("matmul", "convolution"))
    packages = sorted({lib.package for lib in mixed if lib.package})
    pip = f"pip installed {', '.join(packages)}" if packages else ""
    fix = (
        "Keep only one of the two. With torch from pip, remove the conda packages that this lists:",
        "$ conda list cuda",
    )
    evidence = (quoted(m.import_error), *map(_line, mixed[:4]), pip)
    return Match(evidence, fix, severity="error" if broken else "note", likely=broken)


def _from_conda(m: Case) -> list[Resolved]:
    prefix = m.python.prefix
    if m.python.environment not in ("conda", "pixi") or not prefix:
        return []
    return [lib for lib in m.torch_libraries.needed if lib.shadowed and _folder(lib.path) == f"{prefix}/lib"]


@rule("L06", "torch-libraries", "two packages own the same CUDA library")
def overlaps(m: Case) -> Match | None:
    """An error if torch fails with them; else a warning."""
    shared = [each for each in m.torch_libraries.overlaps if ".so" in each or ".dll" in each]
    if not shared:
        return None
    parts = (part.split() for each in shared for part in each.partition(": ")[2].split(","))
    owners = sorted({words[0] for words in parts if words})
    step = m.failed("matmul", "convolution")
    error = step.error if step else m.import_error if _SYMBOL.search(m.import_error) else ""
    fix = (*fixes.uninstall(m, *owners), *m.reinstall)
    return Match((*shared[:4], quoted(error)), fix, severity="error" if error else "warning")


@rule("L05", "torch-libraries", "a system library replaces a missing library of torch")
def filled_in(m: Case) -> Match | None:
    """The loader did not find the wheel's own file, which it looks for before the system's."""
    ours = [lib for lib in m.torch_libraries.needed if lib.shadowed and is_nvidia_library(lib.name)]
    lost = [lib for lib in ours if lib.via in _BEHIND and lib not in _from_conda(m)]
    if not lost:
        return None
    told = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_|undefined symbol|version .* not found")
    lines = (line for lib in lost[:4] for line in (_line(lib), f"{lib.expected} does not exist"))
    return Match((quoted(told), *lines), _bring(m, lost), severity="error" if told else "warning")


@rule("L08", "torch-libraries", "a preloaded library intercepts CUDA")
def preloaded(m: Case) -> Match | None:
    """Without it the driver works; or torch fails and the library is about GPUs. Silent if torch works."""
    value = m.env("LD_PRELOAD") or ""
    names = [*value.replace(":", " ").split(), *m.driver.libraries.preload]
    proof = any(tried.change == ("LD_PRELOAD",) and tried.cuda.works for tried in m.driver.experiments)
    suspects = [name for name in names if _ABOUT_GPUS.search(name.rpartition("/")[2])]
    if not names or m.computes or not m.has_nvidia or not (proof or suspects):
        return None
    where = f"{'LD_PRELOAD' if value else '/etc/ld.so.preload'} is {value or ' '.join(names)}"
    listed = ", ".join(suspects or names)
    unlist = (f"Remove {listed} from /etc/ld.so.preload, and keep the other lines (needs root).",)
    return Match(
        (where, "without it the driver works" if proof else "", quoted(m.import_error)),
        fixes.unset(m, "LD_PRELOAD") if value else unlist,
        severity="error" if proof or m.fails or m.import_error or m.failed("init", "kernel") else "note",
        likely=not proof,
    )


@rule("L12", "torch-libraries", "the libstdc++ that is loaded is too old for torch")
def old_stdcpp(m: Case) -> Match | None:
    """The import failed because of it; or torch was not run, and a version would be missing."""
    told = _STDCPP.search(m.import_error)
    lacking = [each for each in m.torch_libraries.unresolved if each.startswith(("GLIBCXX_", "CXXABI_"))]
    if told is None and not (lacking and m.torch_not_run):
        return None
    evidence = (quoted(m.import_error), *(f"not defined: {each}" for each in lacking[:3]))
    place = _folder(told["library"]) if told else ""
    if place and place in (m.env("LD_LIBRARY_PATH") or "").split(":"):
        return Match(evidence, fixes.drop_folder(m, "LD_LIBRARY_PATH", place))
    fix = ("In a conda environment:", "$ conda install -c conda-forge libstdcxx-ng")
    return Match(evidence, (*fix, "Otherwise use a newer system or image: the libstdc++ of this one is too old."))


@rule("L13", "torch-libraries", "MKL is newer than this torch can use")
def newer_mkl(m: Case) -> Match | None:
    """The import failed because of exactly this symbol."""
    if "undefined symbol: iJIT_" not in m.import_error:
        return None
    return Match((quoted(m.import_error),), ('$ conda install "mkl<2024.1"',))


@rule("L10", "torch-libraries", "Windows cannot load one of torch's libraries")
def missing_dll(m: Case) -> Match | None:
    """The import failed in this way."""
    told, first = _DLL.search(m.import_error), m.torch.first
    if told is None:
        return None
    if first and first.version.startswith("2.4.0") and "fbgemm" in told["dll"]:
        return Match((quoted(m.import_error),), fixes.install(m, "torch>=2.4.1"))
    redist = "Install Microsoft's Visual C++ runtime, then restart: https://aka.ms/vs/17/release/vc_redist.x64.exe"
    return Match((quoted(m.import_error),), (redist, "If that does not help, install torch again:", *m.reinstall))


@rule("L11", "torch-libraries", "a CUDA library from PATH is loaded instead of torch's", likely=True)
def dll_from_path(m: Case) -> Match | None:
    """On Windows a CUDA library was mapped from outside of torch, and torch fails."""
    first = m.torch.first
    if m.platform.system != "Windows" or first is None or m.computes or not m.failed():
        return None
    names = ("cudart64_", "cudnn", "cublas")
    outside = [
        path
        for path in m.torch_run.libraries
        if path.replace("\\", "/").rpartition("/")[2].lower().startswith(names) and not path.startswith(first.location)
    ]
    fix = ("Remove these directories from PATH, and try again.",)
    return Match(tuple(f"loaded: {path}" for path in outside[:4]), fix) if outside else None


@rule("L09", "torch-libraries", "the loader also searches the current directory")
def current_directory(m: Case) -> Match | None:
    """A note; an error if torch fails and loaded a library from there."""
    reasons = tuple(reason for reason in m.driver.libraries.cwd_searched if "LD_LIBRARY_PATH" in reason)
    if not reasons or m.platform.system != "Linux":
        return None
    folders = (m.env("LD_LIBRARY_PATH") or "").split(":")
    named = {each.rstrip("/") for each in folders}
    taken = [lib for lib in m.torch_libraries.needed if lib.via == "LD_LIBRARY_PATH"]
    from_here = [lib for lib in taken if _folder(lib.path) not in named]
    clean = ":".join(filter(None, folders))
    fix = fixes.set_variable(m, "LD_LIBRARY_PATH", clean) if clean else fixes.unset(m, "LD_LIBRARY_PATH")
    broken = bool(from_here) and not m.imported
    return Match((*reasons, *map(_line, from_here[:3])), fix, severity="error" if broken else "note")
