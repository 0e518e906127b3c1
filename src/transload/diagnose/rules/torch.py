"""Which torch Python imports, what it is built for, what it loads, whether driver and cards suit it, how it runs."""

from __future__ import annotations

import re
import sys
from posixpath import dirname

from transload.diagnose import fixes, tables
from transload.diagnose.case import Case, Lines, Match, Matches, rules, torch_says
from transload.diagnose.tables import CUDA_LIBRARY, index_builds, numbers_of, releases
from transload.findings import Severity
from transload.machine import AMD, ExtensionPackage, Resolved
from transload.render.words import plural
from transload.steps import Step, Steps

_FIRST_MANYLINUX_2_28 = (2, 7)
_CUDA_ON_ARM_SINCE = (2, 11)
# The AMD cards that the ROCm wheels have code for.
_ROCM_CARDS = re.compile(r"gfx(?:90[068a]|942|950|1030|110[0-2]|120[01])")


def _absent(m: Case) -> bool:
    """Whether the examined Python certainly has no torch."""
    return m.torch.installs == () and not (m.torch.shadow or m.torch.dangling or m.python.problem)


def _python_line(m: Case) -> str:
    version = f" (Python {m.python.version})" if m.python.version else ""
    return f"{m.python.executable or 'the examined Python'}{version}"


def _other_pythons(m: Case) -> Lines:
    return tuple(f"another Python has torch: {other}" for other in m.python.others)


@rules("python", "P09")
def unusable_python(m: Case) -> Matches:
    """The examined Python cannot be run."""
    if m.python.problem and not m.torch_imported:
        yield "P09", Match((m.python.problem, *_other_pythons(m)))


@rules("python", "P03")
def shadowed_torch(m: Case) -> Matches:
    """Another file or folder is imported as torch."""
    shadow, via, run = m.torch.shadow, m.torch.shadow_via, m.torch_run
    if not shadow or (m.torch_imported and run.version and run.file != shadow):
        return
    folder, through = fixes.folder_of(m, shadow), f", through {via}" if via else ""
    if fixes.in_site_packages(folder):
        fix = m.steps("P03 incomplete", delete=fixes.delete(m, shadow))
    elif via == "PYTHONPATH":
        fix = m.steps("P03 path", drop=fixes.drop_folder(m, via, folder))
    elif m.torch.shadow_kind == "source":
        fix = m.steps("P03 source")
    else:
        fix = m.steps("P03 here" if via == "the current directory" else "P03")
    yield "P03", Match((f"import torch finds {shadow}{through}", torch_says(m.import_error)), fix)


@rules("python", "P08", "P07")
def no_wheel(m: Case) -> Matches:
    """No wheel of torch suits this system's C library (P08), or this Python (P07)."""
    python, libc, absent = m.python, m.platform.libc, _absent(m)
    lacking = [symbol for symbol in m.torch_libraries.unresolved if symbol.startswith("GLIBC_")]
    version, cpython = numbers_of(python.version), python.implementation == "cpython"
    here = [index_builds(release, fixes.wheel_platform(m)) for release in releases()]
    builds = [every[0] for every in here if every and absent and cpython]  # one of each release
    suited = (build for build in builds if build.supports_python(version, free_threaded=python.free_threaded))
    with_wheel = [build.torch for build in suited]
    all_newer = all(numbers_of(release)[:2] >= _FIRST_MANYLINUX_2_28 for release in with_wheel)
    if re.search(r"version .GLIBC_[\d.]+. not found", m.import_error) or (lacking and m.torch_not_run):
        missing = (f"not defined: {symbol}" for symbol in lacking[:3])
        error = (torch_says(m.import_error),) if m.import_error else missing
        yield "P08", Match((*error, f"this system has {libc or 'an older C library'}"))
    elif absent and python.bits == 32:
        yield "P08", Match((f"{_python_line(m)} is a 32-bit program",), m.steps("P08 bits"))
    elif absent and libc.startswith("musl"):
        yield "P08", Match((f"the C library is {libc}, for which torch has no wheels",))
    elif with_wheel and libc.startswith("glibc ") and () < numbers_of(libc[6:]) < (2, 28) and all_newer:
        needs = f"torch {with_wheel[0]}, the first for Python {python.version}, needs glibc 2.28"
        yield "P08", Match((f"the C library is {libc}", needs))

    if absent and version and python.bits == 64 and not with_wheel:
        newest = next(every[0] for every in reversed(here) if every)
        kind = f"{'free-threaded ' if python.free_threaded else ''}{'CPython' if cpython else python.implementation}"
        low, high = (".".join(map(str, version)) for version in newest.python)
        wheels = f"torch {newest.torch} has wheels for CPython {low} to {high}"
        fix = m.steps("P07", low=low, high=high)
        likely = cpython and version[:2] > newest.python[1]
        yield "P07", Match((f"{_python_line(m)} is {kind}", wheels), fix, likely=likely)


@rules("python", "P02")
def two_torches(m: Case) -> Matches:
    """A CPU-only torch hides one with CUDA, on a machine with a GPU; a note if there are just two."""
    installs = m.torch.installs or ()
    if len(installs) < 2 or m.torch.shadow:
        return
    first = installs[0]
    versions = (install.version or install.dist_version or "of unknown version" for install in installs)
    imported, *hidden = (f"{at.location}: torch {version}" for at, version in zip(installs, versions, strict=True))
    evidence = (f"import torch finds {imported}", *(f"it hides {name}" for name in hidden))
    fix, folder = m.steps("P02"), fixes.folder_of(m, first.location)
    if m.python.user_site and first.location.startswith(m.python.user_site):
        fix = m.steps("P02 user")
    elif fixes.in_search_path(m, "PYTHONPATH", folder):  # pip removes nothing there
        fix = fixes.drop_folder(m, "PYTHONPATH", folder)
    if first.cpu_only and any(other.cuda for other in installs[1:]) and m.has_nvidia:
        yield "P02", Match(evidence, fix)
    else:
        yield "P02", Match(evidence, m.steps("P02 choice", imported=imported, other=fix), "note")


@rules("python", "P04")
def mixed_torch(m: Case) -> Matches:
    """Files of two versions: an error if torch cannot be imported, a warning if it can; leftovers alone are a note."""
    torch, first = m.torch, None if m.torch.shadow else m.torch.first
    leftovers = tuple(f"left over from another version: {name}" for name in (*torch.leftovers, *torch.dangling))
    files, metadata = (numbers_of(text) for text in ((first.version, first.dist_version) if first else ("", "")))
    length = min(len(files), len(metadata), 3)
    mixed = ""
    if first and length >= 2 and files[:length] != metadata[:length]:
        mixed = f"torch/version.py says {first.version}, but its metadata says {first.dist_version}"
    missing = _MISSING.search(m.import_error)
    of_cuda = missing is not None and CUDA_LIBRARY.fullmatch(missing["name"])  # torch's own files are not the reason
    foreign = (*first.unlisted, *first.altered) if first else ()
    if m.import_error and (mixed or foreign) and not of_cuda:
        unlisted = (f"not a file of this release: {name}" for name in foreign[:5])
        yield "P04", Match((mixed, *unlisted, *leftovers, torch_says(m.import_error)), likely=not mixed)
    elif mixed:
        yield "P04", Match((mixed, *leftovers), severity="warning")
    elif first and leftovers:
        yield "P04", Match(leftovers, m.steps("P04 leftovers"), "note")


@rules("python", "P01", "W02", likely=("W02",))
def no_torch(m: Case) -> Matches:
    """The examined Python has no torch (P01), and there are few wheels for Windows on Arm (W02)."""
    if _absent(m) and not m.torch_imported:
        install = fixes.install_torch(m, gpu=m.has_nvidia_if_known)
        others = [gpu for gpu in (*m.usable("xpu"), *m.usable("rocm")) if fixes.on_windows(m) and not gpu.integrated]
        if others and not m.has_nvidia:
            install = fixes.install_for(m, others[0]) or (*install, *m.steps(f"T07 {others[0].kind}"))
        fix = m.steps("P01", install=install)
        yield "P01", Match((f"{_python_line(m)} has no torch", m.python.why, *_other_pythons(m)), fix)
    arm = m.platform.machine.lower() in ("arm64", "aarch64")
    if m.platform.system == "Windows" and arm and m.torch.installs == ():
        yield "W02", Match((f"the processor is {m.platform.machine}",))


@rules("build", "J01", "T02", "T03", "T05", "T04", "T01", likely=("T05", "T04"))
def cpu_build(m: Case) -> Matches:
    """A torch without CUDA on a machine whose NVIDIA card another build could use, and how it got there."""
    first, tegra = m.torch.first, m.hardware.tegra
    if first is None or not first.cpu_only or not m.has_nvidia or m.torch_computes:
        return
    built = f"{fixes.inside(m, first.location)}version.py says {first.version}: built without CUDA"
    if m.withheld:
        yield "T01", Match((built,), m.steps("T01 withheld"), "note")
        return
    platforms: tuple[tables.Platform, ...] = ("linux-x86_64", "linux-aarch64")
    builds = [build for release in releases() for platform in platforms for build in index_builds(release, platform)]
    supported = any(build.supports_card(card.capability) for card in m.cards for build in builds)
    if m.cards and not tegra and not supported:  # no torch has code for them: one without CUDA is the right one
        yield "T01", Match(tuple(map(str, m.cards)), m.steps("T01 unsupported"), "note")
        return
    if m.torch.shadow or m.platform.system == "Darwin" or m.python.machine == "ARM64":  # which have no CUDA build
        return
    if tegra:
        yield "J01", Match((built, f"this is a Jetson: {tegra}"))
    packages = ", ".join(first.replaced_by[:4])
    together = f"it was installed together with {packages}" if packages else ""
    # so that the next installation does not replace it again
    keep = "To keep this build, name torch and its index in a constraints file, and pass it with -c to later installs."
    gpus = tuple(map(str, m.cards[:4])) or ("there is an NVIDIA GPU",)
    install = (*fixes.install_wheel(m, driver=not m.driver_misfit), keep if packages else "")
    # a card with an unknown chip may be one that CUDA never supported
    unknown = not (m.cards or m.hardware.dxg or m.driver.cuda.works)
    evidence = (built, together, *gpus)
    old = () < numbers_of(first.version)[:2] < _CUDA_ON_ARM_SINCE
    arm = m.platform.system == "Linux" and m.platform.machine in ("aarch64", "arm64") and not tegra
    by_conda = "cpu" in first.conda_build
    usual = "T02" if m.platform.system == "Windows" else "T03" if arm and old else ""
    if usual or not (tegra or by_conda):
        yield usual or ("T04" if first.replaced_by else "T01"), Match(evidence, install, likely=unknown)
    if by_conda:
        yield "T05", Match((*evidence, f"conda's build is {first.conda_build}"))


@rules("build", "T09", "T06", "T07")
def other_build(m: Case) -> Matches:
    """A torch that is damaged, or built for another vendor's GPU than this machine's."""
    torch, first, run = m.torch, m.torch.first, m.torch_run
    if first is None:
        gone = tuple(f"{name} exists, but the files it lists do not" for name in torch.dangling)
        if gone and not m.torch_imported and torch.installs == ():
            yield "T09", Match(gone, (*fixes.delete(m, *torch.dangling), *m.reinstall))
        return
    # an error if torch cannot be imported or was not run; a note if a library only has another size
    unread = "" if first.known or not m.import_error else f"torch/version.py: {first.problem}"
    if not m.torch_imported and (first.missing or unread):
        yield "T09", Match((*first.missing[:6], unread, torch_says(m.import_error)))
    elif (first.missing or first.altered) and not m.torch_computes:
        yield "T09", Match((*first.missing[:3], *first.altered[:3]), m.steps("T09 changed"), "note")

    foreign = (first.hip or first.xpu) and not first.cuda and not torch.shadow
    rivals = any(card.display and card.vendor == AMD for card in m.hardware.pci or ()) or m.accelerators
    if foreign and m.has_nvidia and not (rivals or run.available or run.backends):
        kind = f"ROCm {first.hip}" if first.hip else "Intel's XPU"
        gpus = tuple(map(str, m.cards[:4])) or ("the GPU is NVIDIA's",)
        built = f"{fixes.inside(m, first.location)}version.py says {first.version}: built for {kind}"
        yield "T06", Match((built, *gpus))

    amd, intel = m.usable("rocm"), [] if first.xpu or "xpu" in run.backends else m.usable("xpu")
    if (amd or intel) and first.known and not (first.hip or m.has_nvidia or torch.shadow):
        gpu = (amd or intel)[0]
        sure = amd and _ROCM_CARDS.fullmatch(gpu.detail) and not gpu.integrated and m.platform.system == "Linux"
        name = " ".join(filter(None, (gpu.name, gpu.detail)))
        evidence: Lines = (f"torch is {first.version}", f"the GPU is {name}, which needs {gpu.kind}")
        install = fixes.install_for(m, gpu)
        fix = (*fixes.uninstall(m, "torch"), *install) if install else m.steps(f"T07 {gpu.kind}")
        yield "T07", Match(evidence, fix, severity="error" if sure else "note")


# -- the libraries torch loads: which files the loader finds, and whether they belong together

_MISSING = re.compile(r"(?P<name>[^\s/:]+\.so[.\d]*): cannot open shared object file")
_SYMBOL = re.compile(r"(?P<user>\S+): undefined symbol: (?P<symbol>\w+)(?:, version (?P<library>[^\s,]+))?")
_SYMBOL_OF = re.compile(r" of (?P<library>\S+), needed by ")
_STDCPP = re.compile(r"(?P<library>\S+): version .(?:GLIBCXX|CXXABI)_[\d.]+. not found")
_ABOUT_GPUS = re.compile(r"cuda|cublas|cudnn|nccl|nvidia|vgpu|hami|nvml", re.IGNORECASE)
_BEHIND = ("ld.so.cache", "default folder")


def _line(lib: Resolved) -> str:
    """Which file the loader finds, and how."""
    version = f" ({lib.version})" if lib.version else ""
    return f"{lib.name} is taken from {lib.path}{version}, found through {lib.via}"


def _drop(m: Case, lib: Resolved) -> Steps:
    """Prevent the loader from using a file that is not torch's own."""
    return fixes.drop_library(m, lib.path, lib.via) or _install_libraries(m, [lib])


def _install_libraries(m: Case, blamed: list[Resolved]) -> Steps:
    packages = sorted({lib.package for lib in blamed if lib.package})
    if not packages or "torch" in packages:
        return fixes.reinstall_conda_libraries(m, *(lib.name for lib in blamed)) or m.reinstall
    versions = m.python.packages
    pinned = (f"{name}=={versions[name]}" if versions.get(name) else name for name in packages)
    return fixes.install(m, "--no-deps", *pinned, force=True)


@rules("torch-libraries", "L04", "L01")
def not_loadable(m: Case) -> Matches:
    """The import failed because of a library or a symbol; or torch was not run, and it would fail."""
    error, libraries, not_run = m.import_error, m.torch_libraries, m.torch_not_run
    if m.platform.system == "Windows":  # see rules/dlls.py
        return
    missing = _MISSING.search(error)
    name = missing["name"] if missing else ""
    gone = [lib for lib in libraries.needed if not lib.path or lib.problem]
    # SIGBUS means that pages of a file are missing
    spoilt = m.complaint(r"file too short|invalid ELF header|SIGBUS") if error else ""
    of_driver = name.startswith(("libcuda.so", "libnvidia-ml.so"))
    if (name or spoilt or (not_run and gone)) and not of_driver:
        blamed = [lib for lib in gone if lib.name == name or (spoilt and lib.problem)]
        blamed = blamed or ([] if name or spoilt else gone)
        lines = (
            f"{lib.path}, for {lib.name}, cannot be loaded: {lib.problem}"
            if lib.path
            else f"{lib.name}, needed by {lib.needed_by}, is not found anywhere"
            for lib in blamed[:6]
        )
        fix = m.steps("L04", name=name)
        if not name or CUDA_LIBRARY.fullmatch(name) or name.startswith(("libtorch", "libc10", "libshm")):
            fix = _install_libraries(m, blamed)
        elif name in tables.table("packages")["packages"]:
            fix = fixes.install_package(m, name)
        yield "L04", Match((torch_says(error), *lines), fix)

    symbol = _SYMBOL.search(error)
    library = (symbol["library"] or "") if symbol else ""
    origins = ((symbol, _SYMBOL_OF.search(symbol)) for symbol in libraries.unresolved)
    unresolved = [symbol for symbol, words in origins if words and CUDA_LIBRARY.fullmatch(words["library"])]
    if CUDA_LIBRARY.fullmatch(library) or (unresolved and (symbol or not_run)):
        words = " ".join(unresolved)
        lacking = [lib for lib in libraries.needed if lib.name == library or f" of {lib.name}," in words]
        older = [lib for lib in lacking if lib.shadowed]
        symbols = (f"not defined: {symbol}" for symbol in unresolved[:3])
        files = (line for lib in older for line in (_line(lib), f"torch's own is {lib.expected}"))
        evidence = (torch_says(error), *symbols, *files)
        if older:
            yield "L01", Match(evidence, _drop(m, older[0]))
        elif m.env("LD_LIBRARY_PATH"):
            yield "L01", Match(evidence, fixes.unset(m, "LD_LIBRARY_PATH"), likely=True)
        else:
            yield "L01", Match(evidence)


@rules("torch-libraries", "L03", "L02", "L07", "L06", "L05")
def mixed_libraries(m: Case) -> Matches:
    """CUDA libraries of two origins: an error only if torch fails because of them, or was not run and would."""
    libraries, prefix, parts = m.torch_libraries, m.python.prefix, m.torch_libraries.split_cudnn
    shadowed = [lib for lib in libraries.needed if lib.shadowed]
    symbol, step = _SYMBOL.search(m.import_error), m.failed("matmul", "convolution")
    complaint = m.complaint(r"CUDNN_STATUS_SUBLIBRARY")
    if complaint or (parts and m.torch_not_run):
        evidence = (torch_says(complaint), *(f"from another release: {part}" for part in parts[:4]))
        apt = m.platform.package_manager == "apt"
        fix: Steps = (fixes.sudo(m, "apt remove 'libcudnn9-*'") if apt else "Remove the system's cuDNN.",)
        by_path = next((part for part in parts if part.endswith(", by LD_LIBRARY_PATH")), "")
        if by_path:
            path = by_path.partition(": ")[2].removesuffix(", by LD_LIBRARY_PATH")
            fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", dirname(path))
        elif "nvidia-cudnn-cu13" in m.python.packages:
            fix = m.steps("L03", remove=fix)
        yield "L03", Match(evidence, fix, likely=not complaint)

    complaint = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)")
    incompatible = "incompatibility" in complaint
    lib = next((lib for lib in libraries.needed if lib.name.startswith("libcudnn.so")), None)
    lines = (_line(lib), f"torch's own is {lib.expected}" if lib.shadowed else "") if lib and lib.path else ()
    if lib is None and incompatible:
        fix = fixes.unset(m, "LD_LIBRARY_PATH") if m.env("LD_LIBRARY_PATH") else m.reinstall
        yield "L02", Match((torch_says(complaint),), fix)
    elif lib is None or (lib.shadowed and lib.via in _BEHIND):
        pass  # the wheel's own is gone, which is L05
    elif incompatible or (complaint and lib.shadowed):
        yield "L02", Match((torch_says(complaint), *lines), _drop(m, lib))
    elif lib.shadowed:  # a note if it works
        version, wanted = numbers_of(lib.version)[:2], numbers_of(m.python.packages.get(lib.package, ""))[:2]
        too_old = m.torch_not_run and len(version) == 2 and version < wanted
        yield "L02", Match(lines, _drop(m, lib), severity="error" if too_old else "note", likely=too_old)

    conda = m.python.environment in fixes.CONDAS and prefix
    from_conda = [lib for lib in shadowed if conda and dirname(lib.path) == f"{prefix}/lib"]
    if from_conda:
        broken = bool(symbol or step)
        packages = sorted({lib.package for lib in from_conda if lib.package})
        pip = f"pip installed {', '.join(packages)}" if packages else ""
        evidence = (torch_says(m.import_error), *map(_line, from_conda[:4]), pip)
        fix = m.steps("L07", packages=fixes.conda(m, "cuda", action="List"))
        yield "L07", Match(evidence, fix, severity="error" if broken else "note", likely=broken)

    if shared := [overlap for overlap in libraries.overlaps if ".so" in overlap or ".dll" in overlap]:
        named = (part.split() for overlap in shared for part in overlap.partition(": ")[2].split(","))
        owners = sorted({words[0] for words in named if words})
        error = step.error if step else m.import_error if symbol else ""
        fix = (*fixes.uninstall(m, *owners), *m.reinstall)
        yield "L06", Match((*shared[:4], torch_says(error)), fix, severity="error" if error else "warning")

    # the loader did not find the wheel's own file, which it looks for before the system's
    if lost := [lib for lib in shadowed if lib.via in _BEHIND and lib not in from_conda]:
        complaint = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_|undefined symbol|version .* not found")
        gone = (line for lib in lost[:4] for line in (_line(lib), f"{lib.expected} does not exist"))
        severity: Severity = "error" if complaint else "warning"
        yield "L05", Match((torch_says(complaint), *gone), _install_libraries(m, lost), severity)


def _preloaded(m: Case) -> tuple[str, Steps, bool, bool]:
    """Which libraries are preloaded, how to remove them, whether CUDA works without them, whether they are suspect.

    They are suspect if their names are about GPUs. Those of LD_PRELOAD come first, unless only those listed in
    /etc/ld.so.preload are suspect.
    """
    value, listed = m.env("LD_PRELOAD") or "", m.driver.libraries.preload
    proof = any(tried.change == ("LD_PRELOAD",) and tried.cuda.works for tried in m.driver.experiments)
    both = (value.replace(":", " ").split(), listed)
    named, in_file = ([name for name in names if _ABOUT_GPUS.search(name.rpartition("/")[2])] for names in both)
    if value and (proof or named or not in_file):
        return f"LD_PRELOAD is {value}", fixes.unset(m, "LD_PRELOAD"), proof, bool(named)
    if not listed:
        return "", (), False, False
    fix = m.steps("Remove from ld.so.preload", listed=", ".join(in_file or listed))
    return f"/etc/ld.so.preload is {' '.join(listed)}", fix, proof, bool(in_file)


@rules("torch-libraries", "L08")
def preloaded_library(m: Case) -> Matches:
    """The driver works without a preloaded library; or torch fails, and the library is about GPUs."""
    where, fix, proof, suspect = _preloaded(m)
    if (proof or suspect) and m.has_nvidia and not m.torch_computes:
        fails = proof or m.driver_fails or m.import_error or m.failed("init", "kernel")
        evidence = (where, "without it the driver works" if proof else "", torch_says(m.import_error))
        yield "L08", Match(evidence, fix, severity="error" if fails else "note", likely=not proof)


@rules("torch-libraries", "L12", "L13")
def unsuitable_library(m: Case) -> Matches:
    """A C++ library that is too old for torch (L12), or an MKL that is too new (L13)."""
    error, of_conda = torch_says(m.import_error), m.python.environment in fixes.CONDAS
    too_old = _STDCPP.search(m.import_error)
    lacking = [symbol for symbol in m.torch_libraries.unresolved if symbol.startswith(("GLIBCXX_", "CXXABI_"))]
    if too_old or (lacking and m.torch_not_run):
        fix = fixes.conda(m, "libstdcxx-ng") if of_conda else m.steps("L12")
        folder = dirname(too_old["library"]) if too_old else ""
        if folder and folder in fixes.elements(m, "LD_LIBRARY_PATH"):
            fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", folder)
        yield "L12", Match((error, *(f"not defined: {symbol}" for symbol in lacking[:3])), fix)
    if "undefined symbol: iJIT_" in m.import_error:
        fix = fixes.conda(m, '"mkl<2024.1"') if of_conda else fixes.install(m, "mkl<2024.1")
        yield "L13", Match((error,), fix)


@rules("torch-libraries", "L09")
def current_directory(m: Case) -> Matches:
    """The loader searches the current directory; a note unless torch cannot be imported because of it."""
    if reasons := tuple(reason for reason in m.driver.libraries.cwd_searched if "LD_LIBRARY_PATH" in reason):
        path = fixes.elements(m, "LD_LIBRARY_PATH")
        named = {element.rstrip("/") for element in path}
        taken = [lib for lib in m.torch_libraries.needed if lib.via == "LD_LIBRARY_PATH"]
        from_here = [lib for lib in taken if dirname(lib.path) not in named]
        clean = ":".join(element for element in path if element.startswith(("/", "$")))
        fix = fixes.set_variable(m, "LD_LIBRARY_PATH", clean) if clean else fixes.unset(m, "LD_LIBRARY_PATH")
        broken = bool(from_here) and not m.torch_imported
        evidence = (*reasons, *map(_line, from_here[:3]))
        yield "L09", Match(evidence, fix, severity="error" if broken else "note")


# -- the driver and the cards

_TOO_OLD = re.compile(r"NVIDIA driver on your system is too old \(found version (\d+)\)")
_NO_KERNEL = r"no kernel image is available"
_NO_CODE = rf"{_NO_KERNEL}|not compatible with the current PyTorch|which is of (?:compute|cuda) capability"


def _numbers(code: str) -> tuple[int, int]:
    """The capability that an architecture is named after, for comparing."""
    digits = re.search(r"[0-9]{1,4}", code.partition("_")[2])
    number = int(digits[0]) if digits else 0
    return number // 10, number % 10


@rules("fit", "V05", "V01", "V02", "V03", "A05", "A01", "A02", likely=("V05",))
def driver_and_cards(m: Case) -> Matches:
    """The driver against the CUDA version that torch was built with, and the cards against its architectures."""
    wheel, torch_cuda, libraries = m.torch_cuda_numbers, m.torch_cuda, m.torch_libraries
    driver = m.driver.cuda.version or m.driver.nvml.cuda  # the CUDA version that it reports, 12080 for 12.8
    # under WSL it is the Windows driver
    system: tables.System = "windows" if m.platform.system == "Windows" or m.surroundings.wsl else "linux"
    floor, shipped = tables.driver_floor(torch_cuda, system), tables.toolkit_driver(torch_cuda, system)
    complaint = m.complaint(_TOO_OLD.pattern)
    too_old = _TOO_OLD.search(complaint)

    # the architectures torch has code for: proven by its binaries or its own list, or what the tables say
    codes = tuple(libraries.cubins or ()) or libraries.architectures or m.torch_run.architectures
    proven, local = bool(codes), m.torch_version.partition("+")[2]
    if local and not proven:
        build = tables.build_of(m.torch_version, fixes.wheel_platform(m), local)
        codes = build.archs if build else ()
    # the cards that it has no code for; but torch has code for its first card if it computes
    comparable = wheel and codes and not m.torch.shadow
    bad = [card for card in m.cards if comparable and not tables.covers(codes, card.capability, wheel)]
    bad = [] if bad and m.torch_run.cuda_works and m.cards[0] in bad else bad

    if too_old and wheel and tables.driver_runs(int(too_old[1]), wheel) and not m.torch_computes:  # it is new enough
        loaded = [path for path in m.torch_run.libraries if "/libcuda.so" in path] or [m.driver.cuda.library]
        preload, remove, *_ = _preloaded(m)
        named = tables.cuda_text(int(too_old[1]))
        evidence: Lines = (
            f"torch calls a driver for CUDA {named} too old, but was built with CUDA {torch_cuda}",
            *(f"{m.cuda_name} is {path}" for path in loaded if path),
            preload,
        )
        yield "V05", Match(evidence, remove or None)

    if driver and wheel and not tables.driver_runs(driver, wheel) and not m.torch_run.cuda_works:
        version = m.driver.nvml.driver or m.kernel.version
        needs = f", which needs driver {floor} or newer" if floor else ""
        evidence = (
            f"{f'driver {version}' if version else 'the driver'} supports CUDA up to {tables.cuda_text(driver)}",
            f"torch {m.torch_version} was built with CUDA {torch_cuda}{needs}",
            torch_says(complaint),
        )
        fix = fixes.install_wheel(m)
        # if the card needs a newer driver anyway, or this torch has no code for it, there is only one solution
        if floor and not fixes.wheel_choice(m).needs_driver and not bad:
            update = fixes.install_driver(m, at_least=tables.branch_of(floor))
            fix = m.steps("V01", wheel=fix, floor=floor, update=update)
        yield "V01", Match(evidence, fix)

    # torch says so; or it was not run, has only PTX for the cards, and the driver is older than the PTX
    compiled = [code for code in codes if code.startswith("sm_")]
    ptx, native = (any(tables.covers(some, card.capability, wheel) for card in m.cards) for some in (codes, compiled))
    older = m.torch_not_run and wheel and proven and 0 < driver < wheel[0] * 1000 + wheel[1] * 10
    if (toolchain := m.complaint(r"unsupported toolchain")) or (older and ptx and not native):
        supports = f"the driver supports CUDA up to {tables.cuda_text(driver)}, torch was built with {torch_cuda}"
        evidence = (torch_says(toolchain), supports if driver and torch_cuda else "")
        least = f" to {shipped} or newer" if shipped else ""
        fix = m.steps("V02", least=least, update=fixes.install_driver(m, at_least=tables.branch_of(shipped)))
        yield "V02", Match(evidence, fix, likely=not toolchain)

    if (lacks := m.complaint(r"API call is not supported in the installed CUDA driver")) and m.failed():
        yield "V03", Match((torch_says(lacks),), fixes.install_driver(m, at_least=tables.branch_of(shipped)))

    if bad:  # an error, or a warning if torch works on another card
        spared = m.torch_run.cuda_works or (len(bad) < len(m.cards) and not m.complaint(_NO_KERNEL))
        listed = " ".join(sorted(dict.fromkeys(codes), key=_numbers))
        source = "has code for" if proven else "should have code for"
        evidence = (*map(str, bad), f"torch {m.torch_version} {source} {listed}", torch_says(m.complaint(_NO_CODE)))
        jetson = m.hardware.tegra or any(card.capability in tables.TEGRA for card in bad)
        newer = any(card.capability > max(map(_numbers, codes)) for card in bad)
        sure = proven and all(card.sure for card in bad)
        fix = fixes.jetson_torch(m) if jetson else fixes.install_wheel(m)
        code = "A05" if jetson else "A01" if newer else "A02"
        yield code, Match(evidence, fix, severity="warning" if spared else "error", likely=not sure)


@rules("fit", "R02")
def other_amd_cards(m: Case) -> Matches:
    """torch has no code for this AMD card."""
    architectures = m.torch_libraries.architectures or m.torch_run.architectures
    amd = {code.partition(":")[0] for code in architectures if code.startswith("gfx")}
    chips = [other.detail for other in m.usable("rocm") if other.detail.startswith("gfx")]
    override = "HSA_OVERRIDE_GFX_VERSION"
    if amd and chips and not m.env(override) and not set(chips) & amd and not m.torch_run.cuda_works:
        near = {"gfx103": "10.3.0", "gfx110": "11.0.0"}.get(chips[0][:6], "")
        fix = m.steps("R02 near", override=fixes.set_variable(m, override, near)) if near else m.steps("R02")
        yield "R02", Match((f"the card is {chips[0]}", f"torch has code for {' '.join(sorted(amd))}"), fix)


# -- other packages: torch works without them, so these are warnings

_RELEASED_WITH_TORCH = ("torchvision", "torchaudio", "torchtext", "torchcodec")
_OF_DRIVER = ("libcuda.so", "libnvidia-")
_PIN = re.compile(r"==\s*(?P<version>\d[\w.]*)")
_BITSANDBYTES = re.compile(r"bitsandbytes_cuda(?P<cuda>\d+)\w*\.(?:so|dll)$")
# Without dependencies: the installer might replace the torch build that works.
_COMPILE = ("--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-binary", ":all:")
# Compiling needs these, which environments of uv lack, as do those of venv since Python 3.12.
_COMPILE_WITH = ("--no-deps", "setuptools", "wheel", "packaging", "ninja")
_NEWEST = ("--no-deps", "--upgrade")
_UNSTABLE = re.compile(r"dev|git|a\d|b\d|rc\d|nv\d")


def _named(extension: ExtensionPackage) -> str:
    return f"{extension.package} {extension.version}".rstrip()


@rules("extensions", "P05", "P06", "A03")
def other_packages(m: Case) -> Matches:
    """Packages that were built for another torch, another CUDA or other cards."""
    release, _, build = m.torch_version.partition("+")
    cuda = m.torch_cuda_numbers
    if not release:  # none of them can work without torch
        return

    # the pinned release differs, or the package is a CPU build and torch is not
    companions = [extension for extension in m.extensions if extension.package in _RELEASED_WITH_TORCH]
    lines = []
    for extension in companions:
        pin = _PIN.search(extension.wants_torch)
        wanted, installed = numbers_of(pin["version"]) if pin else (), numbers_of(release)
        # only major and minor numbers of development versions count
        unstable = pin and (_UNSTABLE.search(pin["version"]) or _UNSTABLE.search(release))
        length = 2 if unstable else min(len(wanted), len(installed))
        if pin and wanted[:length] != installed[:length]:
            lines.append(f"{_named(extension)} needs torch {pin['version']}, but {release} is installed")
        elif extension.local == "cpu" and m.torch_cuda and extension.package == "torchvision":
            lines.append(f"{_named(extension)} is a build without CUDA, but torch has CUDA {m.torch_cuda}")

    def with_torch(packages: set[str]) -> Steps:
        """Reinstall companions of torch, from the index of torch's own build."""
        index = f"{tables.INDEX}/{build}" if tables.BUILD.fullmatch(build) else ""
        names = sorted(packages)
        return (*fixes.uninstall(m, *names), *fixes.install(m, f"torch=={release}", *names, index=index))

    def compiled(purpose: str, packages: list[str], *first: Step | str) -> Steps:
        """Compile the packages that have sources, which needs the toolkit that torch was built with."""
        names = [name for name in packages if name in tables.table("packages")["with_sources"].split()]
        here = m.toolkit.version
        toolkit = f", but {m.toolkit.nvcc} is from {here}" if here else ", but no nvcc was found"
        needs = f" (that needs the toolkit of CUDA {m.torch_cuda}{toolkit})" if m.torch_cuda else ""
        words = f"Or compile {', '.join(names)}{purpose}{'' if here and here.startswith(m.torch_cuda) else needs}:"
        commands = (*fixes.install(m, *_COMPILE_WITH), *fixes.install(m, *_COMPILE, *names, force=True))
        return (words, *first, *dict.fromkeys(commands)) if names else ()

    if lines:
        fix = with_torch({companion.package for companion in companions})
        yield "P05", Match(tuple(lines), fix, severity="warning")

    # symbols of torch, or libraries, that a package needs do not exist
    libraries = ((extension, _BITSANDBYTES.search(extension.library)) for extension in m.extensions)
    # bitsandbytes has a library for each CUDA version, and loads one of torch's major version
    ours = m.torch_cuda.partition(".")[0] or "no CUDA"
    examined = [extension for extension, of in libraries if not of or of["cuda"].startswith(ours)]
    lines, packages = [], set()
    for extension in examined:
        name = extension.library or _named(extension)
        missing = [lib for lib in extension.missing if not lib.startswith(_OF_DRIVER)]
        what = [f"{name} needs {symbol}, which torch does not define" for symbol in extension.undefined[:2]]
        what += [f"{name} needs {lib}, which is not found anywhere" for lib in missing[:2]]
        lines += what
        packages |= {extension.package} if what else set()
    if packages:
        fix = with_torch(packages & {*_RELEASED_WITH_TORCH}) if packages & {*_RELEASED_WITH_TORCH} else ()
        if "bitsandbytes" in packages:
            fix = (*fix, "Install a bitsandbytes for this CUDA version:", *fixes.install(m, *_NEWEST, "bitsandbytes"))
        if others := sorted(packages - {*_RELEASED_WITH_TORCH, "bitsandbytes"}):
            fits = f"built for torch {release}{f' and CUDA {m.torch_cuda}' if m.torch_cuda else ''}"
            fix = (*fix, f"Install wheels of {', '.join(others)} {fits}.", *compiled("", others))
        yield "P06", Match(tuple(lines[:8]), fix, severity="warning")

    # none of a package's architectures runs on any card of this process
    cards = [card for card in m.cards if card.sure]
    with_code = ((extension, extension.architectures) for extension in examined if extension.architectures)
    poor = [at for at, codes in with_code if not any(tables.covers(codes, card.capability, cuda) for card in cards)]
    if cards and cuda and poor:
        has = (f"{_named(extension)} has code for {' '.join(extension.architectures)}" for extension in poor)
        names = sorted({extension.package for extension in poor})
        levels = ";".join(sorted({"{}.{}".format(*card.capability) for card in m.cards}))
        only = fixes.set_variable(m, "TORCH_CUDA_ARCH_LIST", levels)
        newest = fixes.install(m, *_NEWEST, *names, force=True)
        fix = ("Try the newest release:", *newest, *compiled(" for this card", names, *only))
        yield "A03", Match((*has, *map(str, cards)), fix, severity="warning")


# -- what goes wrong although the driver and the build are right

_BUSY = r"busy or unavailable"
_STICKY = r"device-side assert|illegal memory access|unspecified launch failure|misaligned address"
_ENOUGH = 1 << 30  # free bytes that suffice for a small tensor: a context takes half of them
_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_WORK = ("kernel", "matmul", "convolution")


@rules("run", "S06", "S05", "X06", "X05", "X07")
def not_allowed_to_work(m: Case) -> Matches:
    """What prevents even small operations on the card."""
    # the cards of this process, as NVML sees them; all of them if CUDA did not say which
    given = {gpu.uuid for gpu in m.driver.cuda.gpus if gpu.uuid}
    gpus = [gpu for gpu in m.driver.nvml.gpus if gpu.uuid in given] or m.driver.nvml.gpus
    step, work = m.failed("init", *_WORK), m.failed(*_WORK)
    error = step.error if step else ""

    if unlicensed := [gpu for gpu in gpus if gpu.licence == "unlicensed"]:
        lines = (f"{gpu.name} is a virtual GPU without a licence" for gpu in unlicensed)
        complaint = m.complaint(rf"{_BUSY}|Grid license")
        yield "S06", Match((*lines, torch_says(complaint)), severity="error" if complaint else "warning")

    # torch was refused and the mode explains it; or it was not run, and no card is usable
    complaint = m.complaint(_BUSY)
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    taken = [gpu for gpu in gpus if gpu.compute_mode.startswith("exclusive") and gpu.processes]
    mode = [f"{gpu.name} is in compute mode {gpu.compute_mode}" for gpu in (*closed, *taken)]
    none_left = mode and len(mode) == len(gpus) and m.torch_not_run
    mode = mode or [f"{gpu.name} is in compute mode prohibited" for gpu in m.driver.cuda.gpus if gpu.compute_mode == 2]
    if mode and (complaint or none_left):
        users = (f"in use by {process}" for gpu in taken for process in gpu.processes)
        likely = not complaint and not closed
        yield "S05", Match((torch_says(complaint), *mode, *users), m.steps("S05", taken=taken), likely=likely)

    if "out of memory" in error.lower():  # for a small tensor; only likely if some memory seems to be free
        measured, limit = [gpu for gpu in gpus if gpu.free >= 0], m.platform.address_space
        if limit and measured and min(gpu.free for gpu in measured) > _ENOUGH:
            evidence: Lines = (f"ulimit -v is {limit >> 30} GB", torch_says(error))
            yield "X06", Match(evidence, m.steps("X06 limit"))
        else:
            free = (f"{gpu.name} has {gpu.free >> 20} MB free of {gpu.memory >> 20}" for gpu in measured)
            holders = [f"{process} is using {gpu.name}" for gpu in gpus for process in gpu.processes]
            full = any(gpu.free < _ENOUGH for gpu in measured)
            yield "X06", Match((torch_says(error), *free, *holders[:6]), likely=not full)

    if step and re.search(_STICKY, error):
        yield "X05", Match((f"the step {step.name} failed", torch_says(error)))

    by_name: dict[str, list[str]] = {}
    for path in m.torch_run.libraries:
        name = path.rpartition("/")[2]
        if CUDA_LIBRARY.fullmatch(name):
            by_name.setdefault(name.partition(".so")[0], []).append(path)
    double = [path for paths in by_name.values() if len(set(paths)) > 1 for path in paths]
    if double and not m.torch_computes:  # an error only if torch fails
        evidence = (*(f"loaded: {path}" for path in double[:6]), torch_says(work.error if work else ""))
        yield "X07", Match(evidence, severity="error" if work else "note", likely=bool(work))


# -- symptoms: reported as they were seen, and only if no rule explains them


def _lines(error: str) -> Lines:
    return tuple(line.strip() for line in error.splitlines() if line.strip())[:4]


@rules("run", "X11", "X10", symptom=True)
def torch_ends(m: Case) -> Matches:
    """torch hangs or crashes (X11), or cannot be imported (X10)."""
    run, cuda, lib = m.torch_run, m.driver.cuda, m.libcuda
    state, step = run.answer.state, m.failed()
    if state in ("hung", "crashed"):
        hung, detail = state == "hung", run.answer.detail or state
        title = Step("title", f"torch {'hangs' if hung else 'crashes'}{f' in {step.name}' if step else ''}")
        if cuda.answer.state == "crashed" and step and step.name != "import":
            # torch is not the reason, so reinstalling it does not help
            where = f"{m.cuda_name} is {lib.path}{f', found through {lib.via}' if lib.via else ''}" if lib else ""
            fix = m.steps("X11 driver")
            if lib and (drop := fixes.drop_library(m, lib.path, lib.via)):
                fix = m.steps("X11 library", path=lib.path, drop=drop)
            yield "X11", Match((detail, f"also without torch: {m.driver_result_line}", where), (title, *fix))
        else:
            fix = m.steps("X11 hung" if hung else "X11", waits=" at " in detail)
            yield "X11", Match((detail,), (title, *fix), likely=hung)
    elif m.import_error:
        module = _MODULE.search(m.import_error)
        name = module["name"].partition(".")[0] if module else "torch"
        package = tables.table("packages")["imported_from_pypi"].get(name, "")
        fix = fixes.install(m, package) if package else m.steps("X10 module", name=name)
        if m.import_error.endswith("[Errno 2] No such file or directory"):  # without a file name: from os.getcwd()
            fix = m.steps("X10 directory")
        elif name == "torch":
            fix = m.reinstall
        elif name.startswith("_") or (name in sys.stdlib_module_names and not package):
            fix = m.steps("X10", name=name)  # a part of Python, which no package provides
        yield "X10", Match(_lines(m.import_error), fix)


@rules("run", "X09", symptom=True)
def torch_without_gpu(m: Case) -> Matches:
    """The driver works, and torch sees no GPU."""
    run, cuda, start = m.torch_run, m.driver.cuda, m.failed("init")
    error = start.error if start else ""
    if m.torch_imported and (run.available is False or start) and cuda.works and m.torch_cuda:
        other = [path for path in run.libraries if "/libcuda.so" in path and cuda.library not in ("", path)]
        names = [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if m.env(name)]
        unset = fixes.unset(m, *names) if names else ()
        evidence = (
            f"the driver starts and finds {plural(cuda.count, 'GPU')}",
            torch_says(error if start else m.complaint(r"CUDA")),
            *(f"torch loaded {path}, but the driver's library is {cuda.library}" for path in other),
        )
        yield (
            "X09",
            Match(
                evidence,
                m.steps("X09", unset=unset, python=fixes.quote(m, m.python.executable or "python", program=True)),
            ),
        )
    elif run.hip and run.available is False and m.usable("rocm"):
        yield (
            "X09",
            Match((f"AMD's driver has a GPU: {m.usable('rocm')[0].name}", torch_says(error)), m.steps("X09 rocm")),
        )


@rules("run", "X12", symptom=True)
def failed_step(m: Case) -> Matches:
    """A step after the import fails, on a machine whose driver works, or on the CPU."""
    work = m.failed("available", "count", *_WORK, "cpu")
    if work and m.torch_run.answer.state not in ("hung", "crashed"):
        wrong = work.name in _WORK and "the result is" in work.error
        yield "X12", Match(_lines(work.error), m.steps("X12 wrong" if wrong else f"X12 {work.name}"))


@rules("run", "X13", symptom=True)
def not_asked(m: Case) -> Matches:
    """A child could not be started: an error if there is a GPU and it is unknown whether it works; else a warning."""
    driver_detail = m.driver.cuda.answer.detail or m.problems.get("cuda", "")
    torch_detail = m.torch_run.answer.detail or m.problems.get("torch run", "")
    driver = m.driver_unasked and m.hardware.present and not m.cuda_works
    torch = m.torch_not_run and bool(torch_detail) and not (m.python.problem or m.torch.shadow)
    if driver or torch:
        evidence = (
            f"the CUDA driver was not asked: {driver_detail}" if driver else "",
            f"torch was not run: {torch_detail}" if torch else "",
        )
        reasons = " ".join(evidence).lower()
        how = "X13 limit" if re.search("temporarily unavailable|allocate memory|start new thread", reasons) else "X13"
        how = "X13 forbidden" if re.search("permission denied|not permitted", reasons) else how
        fix = m.steps(how, driver_known=not driver)
        yield "X13", Match(evidence, fix, "error" if driver else "warning")
