"""The driver's libraries: which libcuda.so.1 a process gets, which others lie about, and of which release they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from transload.diagnose.elf import Elf, contents, read_elf
from transload.diagnose.host import Host
from transload.diagnose.loader import Loader, elements
from transload.machine import DriverLibraries, Kind, Library, Unknown

__all__ = ["driver_libraries"]

_CUDA, _NVML, _PTX = "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"

_FOLDERS = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/run/opengl-driver/lib",
    "/run/nvidia/driver/usr/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "/opt/nvidia/lib64",
    "/opt/nvidia/lib",
    "/home/kubernetes/bin/nvidia/lib64",
    "/.singularity.d/libs",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib",
    "/usr/local/lib",
)
_BELOW = (
    ("/usr/local", "cuda", "/compat"),
    ("/usr/local", "cuda", "/lib64/stubs"),
    ("/usr/lib", "nvidia-", ""),
    ("/usr/lib64", "nvidia", ""),
)
"""(folder, how the name of a folder in it begins, where in that)."""

_SUFFIX = re.compile(r"\.so\.(\d{3,4}\.\d+(?:\.\d+)*)$")
_RELEASE = re.compile(rb"Version (\d{3,4}(?:\.\d+){1,2})\. Copyright \(C\)|\0\d\d\.(\d{3,4}(?:\.\d+){1,2})\0")
"""As libcuda and NVML say it among their constants."""
_CONSTANTS = 1 << 21
_PROGRAMS = ("/usr/bin", "/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/opt/nvidia/bin")


def driver_libraries(host: Host, loader: Loader | None = None) -> DriverLibraries:
    """The files of the driver's libraries. ``loader`` is one that has already looked at this host."""
    if host.uname[0] != "Linux":
        why = Unknown(f"the loader of {host.uname[0] or 'this system'} is not known")
        return DriverLibraries(why, why, why)
    loader = loader or Loader(host)
    return DriverLibraries(
        cuda=tuple(_libraries(loader, _CUDA)),
        nvml=tuple(_libraries(loader, _NVML)),
        ptx_compiler=tuple(_libraries(loader, _PTX)),
        smi=_smi(host),
        preload=loader.preload_file,
        cwd_searched=tuple(_cwd_searched(loader)),
    )


def _libraries(loader: Loader, name: str) -> Iterator[Library]:
    """Every file of that name, each once: those the loader sees, in its order, then the others."""
    seen: dict[str, Library] = {}
    unseen: dict[str, Library] = {}
    for via, path in (
        *_preloaded(loader, name),
        *loader.places(name),
        *(("disk", path) for path in _disk(loader, name)),
    ):
        elf = loader.examine(path)
        if elf is None and not (loader.host.link(path) or os.path.lexists(loader.host.real(path))):
            continue
        target = loader.host.target(path)
        found = _library(loader, name, path, target, "disk" if elf is None else via)
        (unseen if found.via == "disk" else seen).setdefault(target, found)
    yield from seen.values()
    yield from (found for target, found in unseen.items() if target not in seen)


def _preloaded(loader: Loader, name: str) -> Iterator[tuple[str, str]]:
    """What is preloaded and goes by that name."""
    for via, names in (("LD_PRELOAD", loader.preload), ("ld.so.preload", loader.preload_file)):
        for each in names:
            found = next(loader.search(each), None)
            if found and isinstance(found.elf, Elf) and name in (found.elf.soname, each):
                yield via, found.path


def _disk(loader: Loader, name: str) -> Iterator[str]:
    """Paths where installers, containers and distributions put drivers, whether the loader looks there or not."""
    yield from (f"{folder}/{name}" for folder in _FOLDERS)
    for folder, start, rest in _BELOW:
        yield from (f"{path}{rest}/{name}" for path in loader.host.paths(folder, start))
    for path in loader.host.paths("/usr/local", "cuda"):
        yield f"{path}/lib64/stubs/{name.removesuffix('.1')}"


def _library(loader: Loader, name: str, path: str, target: str, via: str) -> Library:
    elf = read_elf(loader.host.real(path))
    suffix = _SUFFIX.search(target)
    version = suffix[1] if suffix else _inside(elf)
    return Library(name, path, target, via, version, _kind(path, target, version), _problem(loader, path, elf))


def _inside(elf: Elf | Unknown) -> str:
    """The release that the file itself tells: a container may have bound it under its bare name."""
    constants = contents(elf, ".rodata", _CONSTANTS) if isinstance(elf, Elf) else b""
    found = _RELEASE.search(constants or b"")
    return (found[1] or found[2]).decode() if found else ""


def _kind(path: str, target: str, version: str) -> Kind:
    folders = {*path.split("/")[:-1], *target.split("/")[:-1]}
    if "stubs" in folders:
        return "stub"
    if any(folder == "compat" or folder.startswith("cuda-compat") for folder in folders):
        return "compat"
    if path.startswith("/usr/lib/wsl/") or target.startswith("/usr/lib/wsl/"):
        return "wsl"
    return "driver" if version or folders & {"tegra", "nvidia"} else "other"


def _problem(loader: Loader, path: str, elf: Elf | Unknown) -> str:
    if isinstance(elf, Elf):
        named = f"{elf.machine}, {elf.bits} bits" if elf.bits != 64 else elf.machine
        return f"for another machine ({named})" if loader.foreign(elf) else ""
    if not loader.host.exists(path):
        return f"a link to {loader.host.link(path)}, which is not there"
    return elf.reason


def _cwd_searched(loader: Loader) -> Iterator[str]:
    value = loader.host.environ.get("LD_LIBRARY_PATH", "")
    if loader.system.musl:
        return
    if "" in elements(value):
        yield "LD_LIBRARY_PATH has an empty element"
    relative = [each for each in elements(value) if each and not each.startswith(("/", "$"))]
    if relative:
        yield f"LD_LIBRARY_PATH has a relative element: {relative[0]}"


def _smi(host: Host) -> str:
    folders = (*_PROGRAMS, *host.environ.get("PATH", "").split(":"))
    searched = (
        each for each in folders if each.startswith("/") and not each.startswith("/mnt/")
    )  # WSL: slow, and Windows'
    paths = (f"{folder.rstrip('/')}/nvidia-smi" for folder in searched)
    return next((path for path in paths if host.exists(path)), "")
