"""The libraries torch loads: which files the loader takes for them, and whether these belong together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import torch_loader
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import again, complaint, failed, import_error, is_nvidia_library, said, unrun
from transload.diagnose.rules.torch_loader import folder, line
from transload.diagnose.tables import numbers_of

if TYPE_CHECKING:
    from transload.machine import Machine, Resolved

__all__ = ["TABLE"]

TABLE = Table("torch-libraries")

Lines = tuple[str, ...]

_MISSING = re.compile(r"(?P<name>[^\s/:]+\.so[.\d]*): cannot open shared object file")
_SYMBOL = re.compile(r"(?P<user>\S+): undefined symbol: (?P<symbol>\w+)(?:, version (?P<library>[^\s,]+))?")
_SYMBOL_OF = re.compile(r" of (?P<library>\S+), needed by ")
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
_TORCH = "https://github.com/pytorch/pytorch/issues"


def means(lib: Resolved) -> Lines:
    """What the wheel brought for it."""
    return (f"torch's own is {lib.expected}",) if lib.shadowed else ()


def aside(machine: Machine, lib: Resolved) -> Lines:
    """How to keep the loader from taking a file that is not torch's own."""
    if lib.via == "LD_LIBRARY_PATH":
        return fixes.drop_folder(machine, "LD_LIBRARY_PATH", folder(lib.path))
    if lib.via == "LD_PRELOAD":
        return fixes.unset(machine, "LD_PRELOAD")
    return _bring(machine, [lib])


@TABLE.row(
    "L04",
    "a library that torch needs is missing",
    about="""torch's wheels for CUDA leave cuDNN, cuBLAS, NCCL and others to packages named nvidia-…. One of their
files is gone: a package was uninstalled, or the removal of another took a shared folder along. The import fails
with "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory", and everything that
asks torch for a report fails with it.

It is told by following what each library needs through the loader's search path.""",
    fix="Install the package that holds the file again: pip install --force-reinstall nvidia-cudnn-cu13, for example.",
    avoid="""Installing the distribution's cuDNN or CUDA toolkit to fill the gap, or linking a file of another
version to the missing name: torch is built against the very versions it asks pip for.""",
    sources=("https://github.com/sgl-project/sglang/issues/22719",),
)
def missing(machine: Machine) -> Seen | None:
    """The import failed over it; or torch was not run, and the loader would find it nowhere."""
    told = _MISSING.search(import_error(machine))
    name = told["name"] if told else ""
    if name.startswith(("libcuda.so", "libnvidia-ml.so")):
        return None  # the driver's, and no fault of torch's
    gone = [lib for lib in machine.torch_libraries.needed if not lib.path or lib.problem]
    words = r"file too short|invalid ELF header|SIGBUS"  # the last where pages of a file are not there
    spoilt = complaint(machine, words) if import_error(machine) else ""
    if not (name or spoilt) and not (unrun(machine) and gone):
        return None
    blamed = [lib for lib in gone if lib.name == name or (spoilt and lib.problem)] or ([] if name or spoilt else gone)
    foreign = bool(name) and not is_nvidia_library(name) and not name.startswith(_OF_TORCH)
    fix = _system(machine, name) if foreign else _bring(machine, blamed)
    return Seen((*said(import_error(machine)), *map(_gone, blamed[:6])), fix)


def _gone(lib: Resolved) -> str:
    if lib.path:
        return f"{lib.path}, for {lib.name}, cannot be loaded: {lib.problem}"
    return f"{lib.name}, needed by {lib.needed_by}, is nowhere to be found"


def _bring(machine: Machine, blamed: list[Resolved]) -> Lines:
    """Install the packages that should hold some libraries."""
    packages = sorted({lib.package for lib in blamed if lib.package})
    versions = machine.python.packages
    if not packages or "torch" in packages:
        return fixes.bring(machine, *(lib.name for lib in blamed)) or again(machine)
    pinned = (f"{name}=={versions[name]}" if versions.get(name) else name for name in packages)
    return fixes.install(machine, "--no-deps", *pinned, force=True)


def _system(machine: Machine, name: str) -> Lines:
    """A library that no Python package brings."""
    packages = _SYSTEM.get(name)
    return fixes.system_package(machine, **packages) if packages else (f"Install what provides {name} on this system.",)


@TABLE.row(
    "L01",
    "an older CUDA library stands before torch's own",
    about="""The loader searches the folders of LD_LIBRARY_PATH before those that torch's libraries name. A toolkit
or module on it gives torch an older libnvJitLink, libcublasLt or libnccl, which lacks a function: "ImportError:
…/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version libnvJitLink.so.12".

It is told by which file the loader takes for each name, and by the symbols that file defines.""",
    fix="Take the folder out of LD_LIBRARY_PATH, or unset it: a torch wheel needs no CUDA on it.",
    avoid="Reinstalling torch: its own files are right, and are not what is loaded.",
    sources=(
        f"{_TORCH}/111469",
        f"{_TORCH}/131312",
        f"{_TORCH}/134929",
    ),
)
def older(machine: Machine) -> Seen | None:
    """The import failed over a symbol of CUDA's; or torch was not run, and a symbol would be missing."""
    told = _SYMBOL.search(import_error(machine))
    library = (told["library"] or "") if told else ""
    unresolved = cuda_symbols(machine)
    if not (is_nvidia_library(library) or (told and unresolved) or (unrun(machine) and unresolved)):
        return None
    blamed = _blamed(machine, library)
    symbols = tuple(f"not defined: {symbol}" for symbol in unresolved[:3])
    evidence = (*said(import_error(machine)), *symbols, *(x for lib in blamed for x in (line(lib), *means(lib))))
    if blamed:
        return Seen(evidence, aside(machine, blamed[0]))
    if machine.variables.get("LD_LIBRARY_PATH"):
        return Seen(evidence, fixes.unset(machine, "LD_LIBRARY_PATH"), likely=True)
    title = "the CUDA libraries of this environment do not fit one another"
    return Seen(evidence, again(machine), title=title)


def cuda_symbols(machine: Machine) -> list[str]:
    """The symbols of CUDA's libraries that the files to be taken do not define."""
    found = ((each, _SYMBOL_OF.search(each)) for each in machine.torch_libraries.unresolved)
    return [each for each, words in found if words and is_nvidia_library(words["library"])]


def _blamed(machine: Machine, library: str) -> list[Resolved]:
    """Of the libraries that a symbol is missing in: those that are not the wheel's own."""
    words = " ".join(cuda_symbols(machine))
    found = [lib for lib in machine.torch_libraries.needed if lib.name == library or f" of {lib.name}," in words]
    return [lib for lib in found if lib.shadowed]


@TABLE.row(
    "L03",
    "parts of two cuDNN versions are mixed",
    about="""cuDNN is a dozen libraries that load one another by name. Where the wheel's lacks one which the system
has, or an older cuDNN is found for one of them, the first convolution fails:
"CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH" or "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED". nvidia-cudnn-cu13 9.20.0.48,
of torch 2.12 and 2.13, has no libcudnn_engines_tensor_ir, and takes that of an installed libcudnn9.""",
    fix="""Remove the system's cuDNN (sudo apt remove libcudnn9-cuda-12), or install a newer one:
nvidia-cudnn-cu13>=9.21.""",
    sources=(f"{_TORCH}/188892", f"{_TORCH}/185512", f"{_TORCH}/187824"),
)
def split_cudnn(machine: Machine) -> Seen | None:
    """A convolution failed that way; or torch was not run, and the parts would be mixed."""
    parts = machine.torch_libraries.split_cudnn
    told = complaint(machine, r"CUDNN_STATUS_SUBLIBRARY")
    if not told and not (parts and unrun(machine)):
        return None
    lines = tuple(f"of another release would be taken {part}" for part in parts[:4])
    return Seen((*said(told), *lines), _one_cudnn(machine), likely=not told)


def _one_cudnn(machine: Machine) -> Lines:
    by_path = next((part for part in machine.torch_libraries.split_cudnn if part.endswith(", by LD_LIBRARY_PATH")), "")
    if by_path:
        path = by_path.partition(": ")[2].removesuffix(", by LD_LIBRARY_PATH")
        return fixes.drop_folder(machine, "LD_LIBRARY_PATH", folder(path))
    newer: Lines = ()
    if "nvidia-cudnn-cu13" in machine.python.packages:
        install = fixes.install(machine, "nvidia-cudnn-cu13>=9.21")
        newer = ("Install a cuDNN that has all its parts:", *install, "Or remove the system's cuDNN:")
    if machine.platform.package_manager == "apt":
        return (*newer, fixes.sudo(machine, "apt remove 'libcudnn9-*'"))
    return (*newer, "Remove the cuDNN that the system has beside the one in Python.")


@TABLE.row(
    "L02",
    "another cuDNN is loaded than torch was built with",
    about="""A cuDNN of the system, found by LD_LIBRARY_PATH, comes before the wheel's. torch refuses one that is
older than the one it was built with: "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8,
7, 0) but found runtime version (8, 2, 4)". A newer one of the same major version works, and is only mentioned.""",
    fix="Take the folder of the other cuDNN out of LD_LIBRARY_PATH.",
    avoid="Copying cuDNN's files into torch's folder or a toolkit's.",
    sources=("https://github.com/bmaltais/kohya_ss/issues/1096", f"{_TORCH}/80877"),
)
def other_cudnn(machine: Machine) -> Seen | None:
    """torch complained; or was not run, and the one it would take is too old. A note where it works."""
    told = complaint(machine, r"cuDNN version incompatibility|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)")
    lib = next((lib for lib in machine.torch_libraries.needed if lib.name.startswith("libcudnn.so")), None)
    if lib and lib.shadowed and lib.via in _BEHIND:
        return None  # the wheel's own is gone, which is L05
    shadowed = lib if lib and lib.shadowed else None
    if "incompatibility" in told or (told and shadowed):
        evidence = (*said(told), *((line(lib), *means(lib)) if lib and lib.path else ()))
        return Seen(evidence, aside(machine, shadowed or lib) if lib else fixes.unset(machine, "LD_LIBRARY_PATH"))
    if shadowed is None:
        return None
    lines = (line(shadowed), *means(shadowed))
    if unrun(machine) and _too_old(machine, shadowed):
        return Seen(lines, aside(machine, shadowed), likely=True)
    return Seen(lines, aside(machine, shadowed), severity="note")


def _too_old(machine: Machine, lib: Resolved) -> bool:
    wanted = numbers_of(machine.python.packages.get(lib.package, ""))[:2]
    found = numbers_of(lib.version)[:2]
    return len(found) == 2 and found < wanted


@TABLE.row(
    "L07",
    "conda's CUDA libraries and pip's are mixed",
    about="""An environment of conda holds CUDA libraries in its lib folder, and pip put torch with nvidia-…
packages into the same environment. Which of the two a name leads to depends on LD_LIBRARY_PATH and on what was
loaded first; the import fails with an undefined symbol, or cuDNN complains of its version.""",
    fix="""Use one source: install torch by conda (pytorch-gpu of conda-forge), or by pip in an environment without
conda's cuda-…, cudnn and nccl packages.""",
    sources=(f"{_TORCH}/134929",),
)
def conda_mix(machine: Machine) -> Seen | None:
    """A library of torch's is taken from conda's folder in place of pip's; error only where torch fails over it."""
    mixed = _from_conda(machine)
    if not mixed:
        return None
    broken = _SYMBOL.search(import_error(machine)) or failed(machine, "matmul", "convolution")
    evidence = (*said(import_error(machine)), *(line(lib) for lib in mixed[:4]))
    packages = sorted({lib.package for lib in mixed if lib.package})
    fix = ("Keep one of the two. With pip's torch, remove from this environment what this lists:", "$ conda list cuda")
    pip = (f"pip's are {', '.join(packages)}",) if packages else ()
    return Seen((*evidence, *pip), fix, severity="error" if broken else "note", likely=bool(broken))


def _from_conda(machine: Machine) -> list[Resolved]:
    prefix = machine.python.prefix
    if machine.python.environment not in ("conda", "pixi") or not prefix:
        return []
    return [lib for lib in machine.torch_libraries.needed if lib.shadowed and folder(lib.path) == f"{prefix}/lib"]


@TABLE.row(
    "L06",
    "two packages own the same CUDA library",
    about="""nvidia-cudnn-cu12 and nvidia-cudnn-cu13 (and so nccl, nvshmem and cusparselt) install into one folder:
the one that came last has overwritten the other's files. torch then loads a library for the other CUDA, and fails
at the first convolution or collective; and uninstalling either removes the files of both.

It is told by two installed packages that list the same file.""",
    fix="Uninstall both and install the one that torch asks for; pip install torch --force-reinstall brings it.",
)
def overlaps(machine: Machine) -> Seen | None:
    """Error where torch fails with them; else a warning."""
    shared = [each for each in machine.torch_libraries.overlaps if ".so" in each or ".dll" in each]
    if not shared:
        return None
    parts = (part.split() for each in shared for part in each.partition(": ")[2].split(","))
    owners = sorted({words[0] for words in parts if words})
    step = failed(machine, "matmul", "convolution")
    error = step.error if step else import_error(machine) if _SYMBOL.search(import_error(machine)) else ""
    fix = (*fixes.uninstall(machine, *owners), *again(machine))
    return Seen((*shared[:4], *said(error)), fix, severity="error" if error else "warning")


@TABLE.row(
    "L05",
    "a system library fills in for one that torch lost",
    about="""A library of the wheel's nvidia-… packages is gone, and the loader found one of the same name in the
system's CUDA toolkit. torch imports without a word and runs on a mixture that nobody tested, until a function is
missing.

It is told by the path that the loader takes: outside of Python's packages, for a library the wheel brings.""",
    fix="Install the package that holds the library again.",
)
def filled_in(machine: Machine) -> Seen | None:
    """The loader passed over the wheel's own place, which is searched before the system's: the file is gone."""
    ours = [lib for lib in machine.torch_libraries.needed if lib.shadowed and is_nvidia_library(lib.name)]
    lost = [lib for lib in ours if lib.via in _BEHIND and lib not in _from_conda(machine)]
    if not lost:
        return None
    told = complaint(machine, r"cuDNN version incompatibility|CUDNN_STATUS_|undefined symbol|version .* not found")
    evidence = tuple(words for lib in lost[:4] for words in (line(lib), f"{lib.expected} is not there"))
    return Seen((*said(told), *evidence), _bring(machine, lost), severity="error" if told else "warning")


TABLE.rows.extend(torch_loader.TABLE.rows)
