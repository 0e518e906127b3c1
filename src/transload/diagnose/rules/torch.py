"""The Python environment and its torch: which one is imported, what it is built for, and what it loads."""

from __future__ import annotations

import re
from posixpath import dirname

from transload.diagnose import fixes
from transload.diagnose.case import Case, Found, Lines, Match, is_nvidia_library, rules, torch_says
from transload.diagnose.tables import INDEX, Platform, index_builds, numbers_of, releases, table
from transload.findings import Severity
from transload.machine import AMD, Resolved

_FIRST_MANYLINUX_2_28 = (2, 7)
_CUDA_ON_ARM_SINCE = (2, 11)
# The AMD cards that the ROCm wheels have code for.
_ROCM_CARDS = re.compile(r"gfx(?:90[068a]|942|950|1030|110[0-2]|120[01])")


@rules("python", "P09", "P03", "P08", "P07", "P02", "P04", "P01", "W02", likely=("W02",))
def which_torch(m: Case) -> Found:
    """Which torch the examined Python imports, and why it has none."""
    python, torch, run, libc = m.python, m.torch, m.torch_run, m.platform.libc
    others = tuple(f"another Python has torch: {other}" for other in python.others)
    absent = torch.installs == () and not (torch.shadow or torch.dangling or python.problem)  # certainly

    if python.problem and not m.imported:
        yield "P09", Match((python.problem, *others))

    if torch.shadow and not (m.imported and run.version and run.file != torch.shadow):
        via, folder = torch.shadow_via, dirname(torch.shadow)
        through = f", through {via}" if via else ""
        if folder.endswith(("/site-packages", "/dist-packages")):
            fix = m.steps("P03 incomplete", delete=fixes.delete(m, torch.shadow))
        elif via == "PYTHONPATH":
            fix = m.steps("P03 path", drop=fixes.drop_folder(m, via, folder))
        elif torch.shadow_kind == "source":
            fix = m.steps("P03 source")
        else:
            fix = m.steps("P03 here" if via == "the current directory" else "P03")
        yield "P03", Match((f"import torch finds {torch.shadow}{through}", torch_says(m.import_error)), fix)

    lacking = [each for each in m.torch_libraries.unresolved if each.startswith("GLIBC_")]
    version, cpython = numbers_of(python.version), python.implementation == "cpython"
    builds = [index_builds(each)[0] for each in releases() if absent and cpython]  # one of each release
    suited = (build for build in builds if build.supports_python(version, free_threaded=python.free_threaded))
    with_wheel = [build.torch for build in suited]
    all_newer = all(numbers_of(each)[:2] >= _FIRST_MANYLINUX_2_28 for each in with_wheel)
    program = f"{python.executable or 'the examined Python'}{f' (Python {python.version})' if python.version else ''}"
    if re.search(r"version .GLIBC_[\d.]+. not found", m.import_error) or (lacking and m.torch_not_run):
        asked = (torch_says(m.import_error),) if m.import_error else (f"not defined: {each}" for each in lacking[:3])
        yield "P08", Match((*asked, f"this system has {libc or 'an older C library'}"))
    elif absent and python.bits == 32:
        yield "P08", Match((f"{program} is a 32-bit program",), m.steps("P08 bits"))
    elif absent and libc.startswith("musl"):
        yield "P08", Match((f"the C library is {libc}, and torch has no wheels for it",))
    elif with_wheel and libc.startswith("glibc ") and () < numbers_of(libc[6:]) < (2, 28) and all_newer:
        needs = f"torch {with_wheel[0]}, the first for Python {python.version}, needs glibc 2.28"
        yield "P08", Match((f"the C library is {libc}", needs))

    if absent and version and python.bits == 64 and not with_wheel:
        newest = index_builds(releases()[-1])[0]
        kind = f"{'free-threaded ' if python.free_threaded else ''}{'CPython' if cpython else python.implementation}"
        low, high = (".".join(map(str, version)) for version in newest.python)
        evidence: Lines = (f"{program} is {kind}", f"torch {newest.torch} has wheels for CPython {low} to {high}")
        fix = m.steps("P07", low=low, high=high)
        yield "P07", Match(evidence, fix, likely=cpython and version[:2] > newest.python[1])

    installs = torch.installs or ()
    if len(installs) > 1 and not torch.shadow:
        versions = ((each, each.version or each.dist_version or "of unknown version") for each in installs)
        named = [f"{each.location}: torch {version}" for each, version in versions]
        evidence = (f"import torch finds {named[0]}", *(f"it hides {name}" for name in named[1:]))
        fix = m.steps("P02")
        if python.user_site and installs[0].location.startswith(python.user_site):
            fix = m.steps("P02 user")
        elif fixes.in_search_path(m, "PYTHONPATH", dirname(installs[0].location)):  # pip removes nothing there
            fix = fixes.drop_folder(m, "PYTHONPATH", dirname(installs[0].location))
        # an error if a CPU-only torch hides one with CUDA on a machine with a GPU; else a note that there are two
        if installs[0].cpu_only and any(other.cuda for other in installs[1:]) and m.has_nvidia:
            yield "P02", Match(evidence, fix)
        else:
            yield "P02", Match(evidence, ("= there are two installations of torch on the path", *fix), "note")

    # an error if a torch of two versions cannot be imported; a warning if it can; leftovers alone are a note
    first = None if torch.shadow else torch.first
    leftovers = tuple(f"left over from another version: {name}" for name in (*torch.leftovers, *torch.dangling))
    files, metadata = (numbers_of(each) for each in ((first.version, first.dist_version) if first else ("", "")))
    length = min(len(files), len(metadata), 3)
    mixed = ""
    if first and length >= 2 and files[:length] != metadata[:length]:
        mixed = f"torch/version.py says {first.version}, but its metadata says {first.dist_version}"
    library = re.search(r"(lib\S+?\.so[.\d]*): cannot open shared object file", m.import_error)
    of_cuda = library is not None and is_nvidia_library(library[1])  # torch's own files are not the reason
    odd = (*first.unlisted, *first.altered) if first else ()
    if m.import_error and (mixed or odd) and not of_cuda:
        unlisted = (f"not a file of this release: {name}" for name in odd[:5])
        yield "P04", Match((mixed, *unlisted, *leftovers, torch_says(m.import_error)), likely=not mixed)
    elif mixed:
        yield "P04", Match((mixed, *leftovers), severity="warning")
    elif first and leftovers:
        yield "P04", Match(leftovers, m.steps("P04 leftovers"), "note")

    if absent and not m.imported:
        fix = m.steps("P01", install=fixes.install_torch(m, gpu=m.nvidia))
        yield "P01", Match((f"{program} has no torch", python.why, *others), fix)

    arm = m.platform.machine.lower() in ("arm64", "aarch64")
    if m.platform.system == "Windows" and arm and torch.installs == ():
        yield "W02", Match((f"the processor is {m.platform.machine}",))


# -- the build


@rules("build", "J01", "T02", "T03", "T05", "T04", "T01", likely=("T05", "T04"))
def cpu_build(m: Case) -> Found:
    """A torch without CUDA on a machine whose NVIDIA card another build could use, and how it got there."""
    first, tegra = m.torch.first, m.hardware.tegra
    if first is None or not first.cpu_only or not m.has_nvidia or m.computes:
        return
    built = f"{first.location}/version.py says {first.version}: built without CUDA"
    if m.withheld:
        yield "T01", Match((built,), m.steps("T01 withheld"), "note")
        return
    platforms: tuple[Platform, ...] = ("linux-x86_64", "linux-aarch64")
    builds = [build for each in releases() for platform in platforms for build in index_builds(each, platform)]
    supported = any(build.supports_card(card.capability) for card in m.cards for build in builds)
    if m.cards and not tegra and not supported:  # no torch has code for them: one without CUDA is the right one
        yield "T01", Match(tuple(map(str, m.cards)), m.steps("T01 unsupported"), "note")
        return
    if m.torch.shadow or m.platform.system == "Darwin":
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
    if m.platform.system == "Windows":
        yield "T02", Match(evidence, install, likely=unknown)
    elif arm and old:
        yield "T03", Match(evidence, install, likely=unknown)
    if "cpu" in first.conda_build:
        yield "T05", Match((*evidence, f"conda's build is {first.conda_build}"))
    elif not (tegra or m.platform.system == "Windows" or (arm and old)):
        yield ("T04" if first.replaced_by else "T01"), Match(evidence, install, likely=unknown)


@rules("build", "T09", "T06", "T07", "T08")
def other_build(m: Case) -> Found:
    """A torch that is damaged, or built for another vendor's GPU than this machine's."""
    torch, first, run = m.torch, m.torch.first, m.torch_run
    if first is None:
        gone = tuple(f"{name} exists, but the files it lists do not" for name in torch.dangling)
        if gone and not m.imported and torch.installs == ():
            yield "T09", Match(gone, (*fixes.delete(m, *torch.dangling), *m.reinstall))
        return
    # an error if torch cannot be imported or was not run; a note if a library only has another size
    unread = "" if first.known or not m.import_error else f"torch/version.py: {first.problem}"
    if not m.imported and (first.missing or unread):
        yield "T09", Match((*first.missing[:6], unread, torch_says(m.import_error)))
    elif (first.missing or first.altered) and not m.computes:
        yield "T09", Match((*first.missing[:3], *first.altered[:3]), m.steps("T09 changed"), "note")

    foreign = (first.hip or first.xpu) and not first.cuda and not torch.shadow
    rivals = any(card.display and card.vendor == AMD for card in m.hardware.pci or ()) or m.accelerators
    if foreign and m.has_nvidia and not (rivals or run.available or run.backends):
        kind = f"ROCm {first.hip}" if first.hip else "Intel's XPU"
        gpus = tuple(map(str, m.cards[:4])) or ("the GPU is NVIDIA's",)
        built = f"{first.location}/version.py says {first.version}: built for {kind}"
        yield "T06", Match((built, *gpus))

    amd, intel = m.usable("rocm"), [] if first.xpu or "xpu" in run.backends else m.usable("xpu")
    if (amd or intel) and first.known and not (first.hip or m.has_nvidia or torch.shadow):
        gpu = (amd or intel)[0]
        sure = amd and _ROCM_CARDS.fullmatch(gpu.detail) and not gpu.integrated and m.platform.system == "Linux"
        names = [build.build for each in releases() for build in index_builds(each)]
        builds = [name for name in names if name.startswith(gpu.kind)]
        install = fixes.install(m, "torch", index=f"{INDEX}/{builds[-1]}") if builds else ()
        name = " ".join(filter(None, (gpu.name, gpu.detail)))
        evidence: Lines = (f"torch is {first.version}", f"the GPU is {name}, for {gpu.kind}")
        fix = (*fixes.uninstall(m, "torch"), *install)
        yield "T07", Match(evidence, fix, severity="error" if sure else "note")

    if m.platform.system == "Darwin":
        apple = m.platform.machine == "arm64"
        evidence = (f"this is a Mac with {'Apple silicon' if apple else 'an Intel processor'}",)
        yield "T08", Match(evidence, m.steps("T08 apple" if apple else "T08"), severity="note")


# -- the libraries torch loads: which files the loader finds, and whether they belong together

_MISSING = re.compile(r"(?P<name>[^\s/:]+\.so[.\d]*): cannot open shared object file")
_SYMBOL = re.compile(r"(?P<user>\S+): undefined symbol: (?P<symbol>\w+)(?:, version (?P<library>[^\s,]+))?")
_SYMBOL_OF = re.compile(r" of (?P<library>\S+), needed by ")
_STDCPP = re.compile(r"(?P<library>\S+): version .(?:GLIBCXX|CXXABI)_[\d.]+. not found")
_DLL = re.compile(r"\[WinError (?:126|127|193|1114)\].*?Error loading \"(?P<dll>[^\"]+)\"", re.DOTALL)
_ABOUT_GPUS = re.compile(r"cuda|cublas|cudnn|nccl|nvidia|vgpu|hami|nvml", re.IGNORECASE)
_BEHIND = ("ld.so.cache", "default folder")


def _line(lib: Resolved) -> str:
    """Which file the loader finds, and how."""
    version = f" ({lib.version})" if lib.version else ""
    return f"{lib.name} is taken from {lib.path}{version}, found through {lib.via}"


def _drop(m: Case, lib: Resolved) -> Lines:
    """Prevent the loader from using a file that is not torch's own."""
    return fixes.drop_library(m, lib.path, lib.via) or _install_libraries(m, [lib])


def _install_libraries(m: Case, blamed: list[Resolved]) -> Lines:
    packages = sorted({lib.package for lib in blamed if lib.package})
    if not packages or "torch" in packages:
        return fixes.reinstall_conda_libraries(m, *(lib.name for lib in blamed)) or m.reinstall
    versions = m.python.packages
    pinned = (f"{name}=={versions[name]}" if versions.get(name) else name for name in packages)
    return fixes.install(m, "--no-deps", *pinned, force=True)


@rules("torch-libraries", "L04", "L01")
def not_loadable(m: Case) -> Found:
    """The import failed because of a library or a symbol; or torch was not run, and the loader would not find it."""
    error, libraries, not_run = m.import_error, m.torch_libraries, m.torch_not_run
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
        if not name or is_nvidia_library(name) or name.startswith(("libtorch", "libc10", "libshm")):
            fix = _install_libraries(m, blamed)
        elif name in table("packages")["packages"]:
            fix = fixes.install_package(m, name)
        yield "L04", Match((torch_says(error), *lines), fix)

    symbol = _SYMBOL.search(error)
    library = (symbol["library"] or "") if symbol else ""
    found = ((each, _SYMBOL_OF.search(each)) for each in libraries.unresolved)
    unresolved = [each for each, words in found if words and is_nvidia_library(words["library"])]
    if is_nvidia_library(library) or (unresolved and (symbol or not_run)):
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


@rules("torch-libraries", "L03", "L02")
def wrong_cudnn(m: Case) -> Found:
    """A convolution failed because of cuDNN; or torch was not run, and would load parts that are mixed or too old."""
    parts = m.torch_libraries.split_cudnn
    complaint = m.complaint(r"CUDNN_STATUS_SUBLIBRARY")
    if complaint or (parts and m.torch_not_run):
        evidence = (torch_says(complaint), *(f"from another release: {part}" for part in parts[:4]))
        apt = m.platform.package_manager == "apt"
        fix: Lines = (fixes.sudo(m, "apt remove 'libcudnn9-*'") if apt else "Remove the system's cuDNN.",)
        by_path = next((part for part in parts if part.endswith(", by LD_LIBRARY_PATH")), "")
        if by_path:
            path = by_path.partition(": ")[2].removesuffix(", by LD_LIBRARY_PATH")
            fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", dirname(path))
        elif "nvidia-cudnn-cu13" in m.python.packages:
            fix = m.steps("L03", remove=fix)
        yield "L03", Match(evidence, fix, likely=not complaint)

    complaint = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)")
    incompatible = "incompatibility" in complaint
    lib = next((lib for lib in m.torch_libraries.needed if lib.name.startswith("libcudnn.so")), None)
    if lib is None:
        if incompatible:
            yield "L02", Match((torch_says(complaint),), fixes.unset(m, "LD_LIBRARY_PATH"))
        return
    lines = (_line(lib) if lib.path else "", f"torch's own is {lib.expected}" if lib.path and lib.shadowed else "")
    if lib.shadowed and lib.via in _BEHIND:
        return  # the wheel's own is gone, which is L05
    if incompatible or (complaint and lib.shadowed):
        yield "L02", Match((torch_says(complaint), *lines), _drop(m, lib))
    elif lib.shadowed:  # a note if it works
        found, wanted = numbers_of(lib.version)[:2], numbers_of(m.python.packages.get(lib.package, ""))[:2]
        too_old = m.torch_not_run and len(found) == 2 and found < wanted
        yield "L02", Match(lines, _drop(m, lib), severity="error" if too_old else "note", likely=too_old)


@rules("torch-libraries", "L07", "L06", "L05")
def mixed_libraries(m: Case) -> Found:
    """CUDA libraries of two origins: an error only if torch fails because of them."""
    libraries, prefix = m.torch_libraries, m.python.prefix
    shadowed = [lib for lib in libraries.needed if lib.shadowed]
    symbol, step = _SYMBOL.search(m.import_error), m.failed("matmul", "convolution")

    conda = m.python.environment in ("conda", "pixi") and prefix
    from_conda = [lib for lib in shadowed if conda and dirname(lib.path) == f"{prefix}/lib"]
    if from_conda:
        broken = bool(symbol or step)
        packages = sorted({lib.package for lib in from_conda if lib.package})
        pip = f"pip installed {', '.join(packages)}" if packages else ""
        evidence = (torch_says(m.import_error), *map(_line, from_conda[:4]), pip)
        yield "L07", Match(evidence, severity="error" if broken else "note", likely=broken)

    if shared := [each for each in libraries.overlaps if ".so" in each or ".dll" in each]:
        parts = (part.split() for each in shared for part in each.partition(": ")[2].split(","))
        owners = sorted({words[0] for words in parts if words})
        error = step.error if step else m.import_error if symbol else ""
        fix = (*fixes.uninstall(m, *owners), *m.reinstall)
        yield "L06", Match((*shared[:4], torch_says(error)), fix, severity="error" if error else "warning")

    # the loader did not find the wheel's own file, which it looks for before the system's
    if lost := [lib for lib in shadowed if lib.via in _BEHIND and lib not in from_conda]:
        complaint = m.complaint(r"cuDNN version incompatibility|CUDNN_STATUS_|undefined symbol|version .* not found")
        lines = (line for lib in lost[:4] for line in (_line(lib), f"{lib.expected} does not exist"))
        severity: Severity = "error" if complaint else "warning"
        yield "L05", Match((torch_says(complaint), *lines), _install_libraries(m, lost), severity)


@rules("torch-libraries", "L08", "L12", "L13", "L10", "L11", "L09", likely=("L11",))
def other_libraries(m: Case) -> Found:
    """Libraries other than CUDA's that torch loads, and where the loader finds them."""
    first, error = m.torch.first, torch_says(m.import_error)
    value, path = m.env("LD_PRELOAD") or "", (m.env("LD_LIBRARY_PATH") or "").split(":")

    # without it the driver works; or torch fails and the library is about GPUs. Silent if torch works.
    names = [*value.replace(":", " ").split(), *m.driver.libraries.preload]
    proof = any(tried.change == ("LD_PRELOAD",) and tried.cuda.works for tried in m.driver.experiments)
    suspects = [name for name in names if _ABOUT_GPUS.search(name.rpartition("/")[2])]
    if names and m.has_nvidia and (proof or suspects) and not m.computes:
        where = f"{'LD_PRELOAD' if value else '/etc/ld.so.preload'} is {value or ' '.join(names)}"
        listed = ", ".join(suspects or names)
        fix = fixes.unset(m, "LD_PRELOAD") if value else m.steps("Remove from ld.so.preload", listed=listed)
        fails = proof or m.fails or m.import_error or m.failed("init", "kernel")
        evidence: Lines = (where, "without it the driver works" if proof else "", error)
        yield "L08", Match(evidence, fix, severity="error" if fails else "note", likely=not proof)

    found = _STDCPP.search(m.import_error)
    lacking = [each for each in m.torch_libraries.unresolved if each.startswith(("GLIBCXX_", "CXXABI_"))]
    if found or (lacking and m.torch_not_run):
        fix = m.steps("L12")
        if m.python.environment in ("conda", "pixi"):
            fix = fixes.conda(m, "libstdcxx-ng")
        place = dirname(found["library"]) if found else ""
        if place and place in path:
            fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", place)
        yield "L12", Match((error, *(f"not defined: {each}" for each in lacking[:3])), fix)

    if "undefined symbol: iJIT_" in m.import_error:
        of_conda = m.python.environment in ("conda", "pixi")
        yield "L13", Match((error,), fixes.conda(m, '"mkl<2024.1"') if of_conda else fixes.install(m, "mkl<2024.1"))

    if found := _DLL.search(m.import_error):
        fbgemm = first and first.version.startswith("2.4.0") and "fbgemm" in found["dll"]
        yield "L10", Match((error,), m.steps("L10 fbgemm" if fbgemm else "L10"))

    if m.platform.system == "Windows" and first and m.failed() and not m.computes:
        mapped = ((file, file.replace("\\", "/").rpartition("/")[2].lower()) for file in m.torch_run.libraries)
        dlls = (file for file, name in mapped if name.startswith(("cudart64_", "cudnn", "cublas")))
        if outside := [file for file in dlls if not file.startswith(first.location)]:
            yield "L11", Match(tuple(f"loaded: {file}" for file in outside[:4]))

    if reasons := tuple(reason for reason in m.driver.libraries.cwd_searched if "LD_LIBRARY_PATH" in reason):
        named = {each.rstrip("/") for each in path}
        taken = [lib for lib in m.torch_libraries.needed if lib.via == "LD_LIBRARY_PATH"]
        from_here = [lib for lib in taken if dirname(lib.path) not in named]
        clean = ":".join(filter(None, path))
        fix = fixes.set_variable(m, "LD_LIBRARY_PATH", clean) if clean else fixes.unset(m, "LD_LIBRARY_PATH")
        broken = bool(from_here) and not m.imported
        evidence = (*reasons, *map(_line, from_here[:3]))
        yield "L09", Match(evidence, fix, severity="error" if broken else "note")
