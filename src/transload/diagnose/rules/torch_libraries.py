"""The libraries torch loads: which files the loader finds, and whether they belong together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Case, is_nvidia_library, quoted
from transload.diagnose.rules.rule import Lines, Match, rule
from transload.diagnose.tables import numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transload.machine import Resolved

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
    if lib.via == "LD_LIBRARY_PATH":
        return fixes.drop_folder(m, "LD_LIBRARY_PATH", _folder(lib.path))
    if lib.via == "LD_PRELOAD":
        return fixes.unset(m, "LD_PRELOAD")
    return _bring(m, [lib])


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
