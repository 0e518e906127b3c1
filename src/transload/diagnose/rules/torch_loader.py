"""How the loader finds torch's libraries: what is preloaded, what the C++ library is, and the ways of Windows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import fails
from transload.diagnose.rules.torch_facts import (
    again,
    computes,
    failed,
    has_nvidia,
    import_error,
    imported,
    said,
    unrun,
)

if TYPE_CHECKING:
    from transload.findings import Severity
    from transload.machine import Machine, Resolved

__all__ = ["TABLE", "folder", "line"]

TABLE = Table("torch-libraries")

Lines = tuple[str, ...]

_STDCPP = re.compile(r"(?P<library>\S+): version .(?:GLIBCXX|CXXABI)_[\d.]+. not found")
_DLL = re.compile(r"\[WinError (?:126|127|193|1114)\].*?Error loading \"(?P<dll>[^\"]+)\"", re.DOTALL)
_ABOUT_GPUS = re.compile(r"cuda|cublas|cudnn|nccl|nvidia|vgpu|hami|nvml", re.IGNORECASE)
_TORCH = "https://github.com/pytorch/pytorch/issues"


def folder(path: str) -> str:
    """Where a file lies."""
    return path.rpartition("/")[0]


def line(lib: Resolved) -> str:
    """Which file the loader takes, and why."""
    via = f", by {lib.via}" if lib.via else ""
    version = f" ({lib.version})" if lib.version else ""
    return f"{lib.name} is taken from {lib.path}{version}{via}"


@TABLE.row(
    "L08",
    "a preloaded library comes between torch and CUDA",
    about="""LD_PRELOAD or /etc/ld.so.preload puts a library before all others: a CUDA runtime, a GPU sharing layer
such as HAMi's libvgpu.so, a profiler. It answers in CUDA's name, and torch fails or sees something else than the
driver gives.""",
    fix="Unset LD_PRELOAD, or take the library's line out of /etc/ld.so.preload, and try again.",
)
def preloaded(machine: Machine) -> Seen | None:
    """Without it the driver works; or torch fails and what is preloaded is about GPUs. Silent where torch works."""
    value = machine.variables.get("LD_PRELOAD") or ""
    names = [*value.replace(":", " ").split(), *machine.driver.libraries.preload]
    proof = any(tried.change == ("LD_PRELOAD",) and tried.cuda.works for tried in machine.driver.experiments)
    suspect = any(_ABOUT_GPUS.search(name.rpartition("/")[2]) for name in names)
    if not names or computes(machine) or not has_nvidia(machine) or not (proof or suspect):
        return None
    odd = fails(machine) or import_error(machine) or failed(machine, "init", "kernel")
    severity: Severity = "error" if proof or odd else "note"
    where = "LD_PRELOAD" if value else "/etc/ld.so.preload"
    proven = ("without it the driver works",) if proof else ()
    fix = fixes.unset(machine, "LD_PRELOAD") if value else _unlist(names)
    evidence = (f"{where} is {value or ' '.join(names)}", *proven, *said(import_error(machine)))
    return Seen(evidence, fix, severity=severity, likely=not proof)


def _unlist(names: list[str]) -> tuple[str, ...]:
    suspects = [name for name in names if _ABOUT_GPUS.search(name.rpartition("/")[2])] or names
    return (f"Take {', '.join(suspects)} out of /etc/ld.so.preload, and leave what else stands there (needs root).",)


@TABLE.row(
    "L12",
    "an older libstdc++ stands before the one torch needs",
    about="""torch is compiled with a newer C++ library than the one that is loaded: "ImportError: …/libstdc++.so.6:
version `GLIBCXX_3.4.30' not found". It comes from an old environment of conda, from LD_LIBRARY_PATH, or from
another package that was imported first and brought its own.""",
    fix="""Take the folder of the old libstdc++.so.6 out of LD_LIBRARY_PATH; in conda: conda install -c conda-forge
libstdcxx-ng. Importing torch before the other package also helps.""",
)
def old_stdcpp(machine: Machine) -> Seen | None:
    """The import failed over it; or torch was not run, and a version would be missing."""
    told = _STDCPP.search(import_error(machine))
    lacking = [each for each in machine.torch_libraries.unresolved if each.startswith(("GLIBCXX_", "CXXABI_"))]
    if told is None and not (lacking and unrun(machine)):
        return None
    evidence = (*said(import_error(machine)), *(f"not defined: {each}" for each in lacking[:3]))
    place = folder(told["library"]) if told else ""
    if place and place in (machine.variables.get("LD_LIBRARY_PATH") or "").split(":"):
        return Seen(evidence, fixes.drop_folder(machine, "LD_LIBRARY_PATH", place))
    fix = ("In an environment of conda:", "$ conda install -c conda-forge libstdcxx-ng")
    return Seen(evidence, (*fix, "Else use a newer system or image: its libstdc++ is too old."))


@TABLE.row(
    "L13",
    "MKL is newer than this torch can use",
    about="""Some releases of conda's pytorch call a function that MKL lost with 2024.1: "ImportError:
…/libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent".""",
    fix='conda install "mkl<2024.1", or a newer pytorch.',
    sources=(f"{_TORCH}/123097",),
)
def newer_mkl(machine: Machine) -> Seen | None:
    """The import failed over that very symbol."""
    error = import_error(machine)
    if "undefined symbol: iJIT_" not in error:
        return None
    return Seen(said(error), ('$ conda install "mkl<2024.1"',))


@TABLE.row(
    "L10",
    "Windows cannot load a library of torch",
    about="""OSError: [WinError 126] The specified module could not be found. Error loading
"…\\torch\\lib\\fbgemm.dll" or one of its dependencies. The file named is there as a rule: what is missing is a
library that it needs. For torch 2.4.0 that is libomp140.x86_64.dll; else it is most often the runtime of Visual C++
(vcruntime140_1.dll, msvcp140.dll).""",
    fix="""Install Microsoft's Visual C++ runtime, https://aka.ms/vs/17/release/vc_redist.x64.exe, and restart; use
torch 2.4.1 or newer in place of 2.4.0.""",
    avoid="Downloading single DLLs from sites that offer them.",
    sources=(f"{_TORCH}/131662", f"{_TORCH}/133076"),
)
def missing_dll(machine: Machine) -> Seen | None:
    """The import failed that way."""
    told = _DLL.search(import_error(machine))
    first = machine.torch.first
    if told is None:
        return None
    if first and first.version.startswith("2.4.0") and "fbgemm" in told["dll"]:
        return Seen(said(import_error(machine)), fixes.install(machine, "torch>=2.4.1"))
    redist = "Install Microsoft's Visual C++ runtime, then restart: https://aka.ms/vs/17/release/vc_redist.x64.exe"
    return Seen(said(import_error(machine)), (redist, "If that does not help, install torch again:", *again(machine)))


@TABLE.row(
    "L11",
    "a CUDA library from PATH is loaded in place of torch's",
    likely=True,
    about="""On Windows torch's own folder is searched first, but a library that was loaded earlier by another
package, or one found by PATH for a name torch does not bring, wins: several cudart64_*.dll or cudnn64_*.dll in one
process.""",
    fix="Take other CUDA versions out of PATH, and import torch before packages that bring their own CUDA.",
)
def dll_from_path(machine: Machine) -> Seen | None:
    """On Windows a CUDA library was mapped from outside of torch, and torch fails."""
    first = machine.torch.first
    if machine.platform.system != "Windows" or first is None or computes(machine) or not failed(machine):
        return None
    names = ("cudart64_", "cudnn", "cublas")
    outside = [
        path
        for path in machine.torch_run.libraries
        if path.replace("\\", "/").rpartition("/")[2].lower().startswith(names) and not path.startswith(first.location)
    ]
    fix = ("Take these folders out of PATH, and try again.",)
    return Seen(tuple(f"loaded: {path}" for path in outside[:4]), fix) if outside else None


@TABLE.row(
    "L09",
    "the loader also searches the current directory",
    about="""An empty element in LD_LIBRARY_PATH (a colon at its beginning or end, or two in a row) means the
current directory: a library that lies there by chance, or by intent, is loaded into every program. It comes of
lines such as export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/local/cuda/lib64 where the variable was empty before.""",
    fix="Set the variable without empty elements: ${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/the/folder.",
)
def current_directory(machine: Machine) -> Seen | None:
    """A note; an error where torch fails and took a library from there."""
    reasons = tuple(reason for reason in machine.driver.libraries.cwd_searched if "LD_LIBRARY_PATH" in reason)
    if not reasons or machine.platform.system != "Linux":
        return None
    value = machine.variables.get("LD_LIBRARY_PATH") or ""
    named = {folder.rstrip("/") for folder in value.split(":")}
    taken = [lib for lib in machine.torch_libraries.needed if lib.via == "LD_LIBRARY_PATH"]
    from_here = [lib for lib in taken if lib.path.rpartition("/")[0] not in named]
    clean = ":".join(filter(None, value.split(":")))
    fix = fixes.set_variable(machine, "LD_LIBRARY_PATH", clean) if clean else fixes.unset(machine, "LD_LIBRARY_PATH")
    broken = bool(from_here) and not imported(machine)
    return Seen((*reasons, *map(line, from_here[:3])), fix, severity="error" if broken else "note")
