"""The user's half of the driver: which libcuda.so.1 a process gets, and whether it fits the kernel's half."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import wsl
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    CONTROL,
    absent,
    answer_line,
    broken,
    code,
    fails,
    mismatched,
    nvml_line,
    relief_line,
    relieved,
    taken,
    works,
)
from transload.diagnose.rules.withheld import withheld
from transload.diagnose.tables import is_data_centre, numbers_of

if TYPE_CHECKING:
    from transload.machine import Library, Machine

__all__ = ["TABLE", "drop_library", "library_line"]

TABLE = Table("libraries")
TABLE.rows.extend(wsl.TABLE.rows)

Lines = tuple[str, ...]

_VERSION_MISMATCH = 18  # of NVML
_NO_JIT = 221


def _refused(machine: Machine) -> bool:
    """Whether libcuda.so.1 answered, and no."""
    return fails(machine) and machine.driver.cuda.answer.answered and not absent(machine) and not withheld(machine)


def library_line(lib: Library) -> str:
    """Which libcuda.so.1 a process gets, and how the loader comes to it."""
    leads = f" → {lib.target}" if lib.target and lib.target != lib.path else ""
    return f"libcuda.so.1 is {lib.path}{leads}, by {lib.via or 'the loader'}"


def _folder(lib: Library) -> str:
    return lib.path.rpartition("/")[0]


def _is_systems(path: str) -> bool:
    """Whether a folder is the system's own: to take it from the loader would break every program."""
    return bool(re.fullmatch(r"(?:/usr)?/lib(?:32|64|x32)?(?:/[\w-]+-linux-gnu\w*)?", path))


def drop_library(machine: Machine, lib: Library) -> Lines:
    """Keep the loader from taking a library."""
    if lib.via == "LD_LIBRARY_PATH":
        return fixes.drop_folder(machine, "LD_LIBRARY_PATH", _folder(lib))
    if lib.via == "LD_PRELOAD":
        return fixes.unset(machine, "LD_PRELOAD")
    if lib.via == "ld.so.preload":
        return (f"Take {lib.path} out of /etc/ld.so.preload, and leave what else stands there (needs root).",)
    if lib.via == "ld.so.cache" and not _is_systems(_folder(lib)):
        return (
            f"Take {_folder(lib)} out of the loader's configuration, where this finds it:",
            f"$ grep -rn {quote(_folder(lib))} /etc/ld.so.conf /etc/ld.so.conf.d",
            fixes.sudo(machine, "ldconfig"),
        )
    return (fixes.sudo(machine, f"rm {quote(lib.path)}"), fixes.sudo(machine, "ldconfig"))


def _better(machine: Machine, lib: Library) -> Lines:
    """Where the driver's own library is, as evidence that dropping the other one leaves a good one."""
    others = (each for each in machine.driver.libraries.cuda or () if each != lib and each.kind in ("driver", "wsl"))
    return tuple(f"the driver's own is {each.path}" for each in others if not each.problem)[:1]


@TABLE.row(
    "U04",
    "libcuda.so.1 is the toolkit's stub",
    about="""The CUDA toolkit holds a stub of libcuda for linking on machines without a driver, in …/lib64/stubs. It
has the functions and does nothing: cuInit answers 34, "CUDA driver is a stub library". A folder stubs on
LD_LIBRARY_PATH, put there for a build, is the usual way to it; torch.cuda.device_count() may still say 1, because
NVML is not stubbed.

It is told by the answer 34, or the folder of the libcuda.so.1 that the loader takes.""",
    fix="Take the stubs folder off LD_LIBRARY_PATH; for linking, LIBRARY_PATH or -L is enough.",
    sources=(
        "https://github.com/numba/numba/issues/8985",
        "https://github.com/NVIDIA/warp/issues/219",
        "https://github.com/pytorch/pytorch/issues/160179",
    ),
)
def stub(machine: Machine) -> Seen | None:
    """The driver answered 34, or the library in use is a stub."""
    lib = taken(machine)
    is_stub = lib is not None and lib.kind == "stub"
    if not _refused(machine) or not (code(machine) == 34 or is_stub):
        return None
    if lib is None:
        return Seen((answer_line(machine),), ("Take every folder named stubs off LD_LIBRARY_PATH.",))
    evidence = (library_line(lib), answer_line(machine), *_better(machine, lib), *relief_line(machine))
    return Seen(evidence, drop_library(machine, lib))


@TABLE.row(
    "U02",
    "a CUDA compatibility library does not fit the driver",
    about="""CUDA images carry libcuda.so.1 of a newer driver in /usr/local/cuda/compat, for hosts with an older
one. Where the host's driver is as new or newer, or the compat library is not made for it, it takes the place of the
right one: "Error 803: system has unsupported display driver / cuda driver combination".

It is told by the folder of the libcuda.so.1 that was loaded, and by the driver starting without it.""",
    fix="""Take the compat folder off LD_LIBRARY_PATH and out of /etc/ld.so.conf.d (a file of the package
cuda-compat-…), or use an image that is not newer than the host's driver.""",
    avoid="Updating torch: its CUDA version is not the one that clashes.",
    sources=(
        "https://github.com/NVIDIA/nvidia-docker/issues/1256",
        "https://github.com/llm-d/llm-d/issues/706",
        "https://github.com/easydiffusion/easydiffusion/issues/379",
    ),
)
def compat(machine: Machine) -> Seen | None:
    """A compat library, and 803 or a driver that starts without it."""
    lib = taken(machine)
    if lib is None or lib.kind != "compat" or not _refused(machine) or code(machine) == 804:
        return None
    proven = "LD_LIBRARY_PATH" in relieved(machine)
    if code(machine) != 803 and not proven:
        return None
    versions = _versions(machine, lib)
    evidence = (library_line(lib), *versions, answer_line(machine), *_better(machine, lib), *relief_line(machine))
    return Seen(evidence, drop_library(machine, lib))


def _versions(machine: Machine, lib: Library) -> Lines:
    kernel = machine.kernel.version
    return (f"it is of {lib.version}, the kernel driver of {kernel}",) if lib.version and kernel else ()


@TABLE.row(
    "U03",
    "forward compatibility does not work on this card",
    about="""A compat libcuda, of a newer driver than the kernel's, works on data-centre cards only, on some RTX
servers and on Jetson. On a GeForce card cuInit answers 804, "forward compatibility was attempted on non supported
HW". The same answer comes from libraries that were updated while the old kernel driver is still loaded.

It is told by the answer 804 and the libcuda.so.1 that was loaded.""",
    fix="""Take the compat library out of the way, as for U02, and update the host's driver instead. After a driver
update: reboot.""",
    sources=(
        "https://github.com/NVIDIA/TensorRT-LLM/issues/1806",
        "https://github.com/SYSTRAN/faster-whisper/issues/653",
        "https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html",
    ),
)
def forward(machine: Machine) -> Seen | None:
    """804, by a compat library or by one that is not known."""
    lib = taken(machine)
    if not _refused(machine) or code(machine) != 804 or mismatch(machine):
        return None
    names = [*(gpu.name for gpu in machine.driver.nvml.gpus), *(gpu.model for gpu in machine.kernel.gpus)]
    plain = tuple(f"{name} is no data-centre card" for name in names if name and not is_data_centre(name))[:1]
    driver = ("Or update the host's driver, which needs no compat library then:", *fixes.install_driver(machine))
    if lib is None or lib.kind != "compat":
        which = (library_line(lib),) if lib else ()
        restart = (fixes.reboot(machine),)
        return Seen((answer_line(machine), *which, *plain, *relief_line(machine)), (*restart, *driver), likely=True)
    evidence = (library_line(lib), *_versions(machine, lib), answer_line(machine), *plain, *relief_line(machine))
    return Seen(evidence, (*drop_library(machine, lib), *driver))


@TABLE.row(
    "U01",
    "the driver's libraries and its kernel module are of different versions",
    about="""After a driver update the new libraries are on the disk and the old module is still loaded, until a
reboot. nvidia-smi says "Failed to initialize NVML: Driver/library version mismatch"; torch shows Error 803 or 804.
Unattended upgrades do it over night. It also comes from a second driver installed in another way (a .run file
beside packages), and from a libcuda.so.1 copied somewhere.

It is told by NVML's answer 18, by cuInit 803, and by the version in the file's name against
/sys/module/nvidia/version.""",
    fix="""Reboot; or with no program on the GPU unload the modules and load them again. Where the libraries are the
older half, reinstall the driver. To keep updates from surprising you: sudo apt-mark hold nvidia-driver-….""",
    avoid="Reinstalling torch or CUDA: neither holds any part of the driver.",
    sources=(
        "https://github.com/pytorch/pytorch/issues/40671",
        "https://github.com/rapidsai/cusignal/issues/398",
    ),
)
def mismatch(machine: Machine) -> Seen | None:
    """NVML 18, libraries of another release, or 803 without a compat library."""
    lib, other = taken(machine), mismatched(machine)
    told = machine.driver.nvml.init == _VERSION_MISMATCH
    if not _refused(machine) or machine.surroundings.wsl or (lib is not None and lib.kind in ("compat", "stub")):
        return None
    if not told and code(machine) != 803 and (other is None or not _telling(machine)):
        return None
    which = (library_line(lib), *_versions(machine, lib)) if lib else ()
    evidence = (*which, answer_line(machine), nvml_line(machine), *relief_line(machine))
    return Seen(evidence, _align(machine, other or lib))


def _telling(machine: Machine) -> bool:
    """Whether nothing but the version explains the answer: no variable does, or it is the one that names the folder."""
    return not relieved(machine) or "LD_LIBRARY_PATH" in relieved(machine)


def _align(machine: Machine, lib: Library | None) -> Lines:
    if lib is not None and lib.via.startswith("LD_"):
        return drop_library(machine, lib)
    kernel, library = numbers_of(machine.kernel.version), numbers_of(lib.version) if lib else ()
    if machine.surroundings.container:
        return ("Start the container anew, so that it gets the host's libraries:", *fixes.give_gpu(machine))
    if kernel and library and library < kernel:
        return (
            f"The libraries are older than the loaded module {machine.kernel.version}: bring them to its version.",
            *fixes.install_driver(machine, exactly=kernel[0]),
        )
    again = fixes.reload_module(machine)
    return (fixes.reboot(machine), "Or, with no program and no desktop on the GPU:", *again)


@TABLE.row(
    "U13",
    "libcuda.so.1 is not a usable library",
    about="""What the loader finds under the name libcuda.so.1 cannot be used: an empty file (left in images made by
docker commit from a GPU container), a text file, a library of another processor, one that lacks the driver's
functions, or an interposer that takes the driver's place and fails.

It is told by the loader's own words, by a function that every driver has and this file lacks, or by the driver
starting as soon as the folder is off LD_LIBRARY_PATH.""",
    fix="Remove the file, or its folder from LD_LIBRARY_PATH; then the driver's own is found, or must be installed.",
)
def unusable(machine: Machine) -> Seen | None:
    """The library cannot be loaded or lacks its functions; or the driver works once its folder is not searched."""
    lib, answer = taken(machine), machine.driver.cuda.answer
    if not fails(machine) or absent(machine) or withheld(machine):
        return None
    if answer.state not in ("not-loadable", "no-symbol"):
        return _impostor(machine, lib)
    problem = (f"{lib.path}: {lib.problem}",) if lib and lib.problem else ()
    evidence = (*((library_line(lib),) if lib else ()), *problem, answer_line(machine), *relief_line(machine))
    if lib is None:
        return Seen(evidence, fixes.install_driver(machine))
    if lib.kind == "driver" and lib.version and not lib.problem and not lib.via.startswith("LD_"):
        return Seen(evidence, _complete(machine))  # the driver's own, and whole: something else is missing
    left = _better(machine, lib)
    own = machine.kernel.loaded is True or machine.surroundings.container
    inside = _packages(machine, again=True) if own else fixes.install_driver(machine)
    return Seen((*evidence, *left), (*drop_library(machine, lib), *(() if left else inside)))


def _complete(machine: Machine) -> Lines:
    """What to do about a driver's library that is in order and cannot be loaded."""
    if "map segment" in machine.driver.cuda.answer.detail:
        return (
            "Its file system is mounted noexec, or a security policy (SELinux, AppArmor) forbids to run code from it.",
        )
    return _packages(machine, again=True)


def _impostor(machine: Machine, lib: Library | None) -> Seen | None:
    proven = "LD_LIBRARY_PATH" in relieved(machine) and lib is not None and lib.via == "LD_LIBRARY_PATH"
    if lib is None or not proven or any(check(machine) for check in (stub, compat, forward, mismatch)):
        return None
    title = "another libcuda.so.1 takes the place of the driver's"
    return Seen((library_line(lib), answer_line(machine), *relief_line(machine)), drop_library(machine, lib), title)


def _on_disk(machine: Machine) -> Library | None:
    """A good libcuda.so.1 that the loader does not see."""
    found = machine.driver.libraries.cuda or ()
    return next((lib for lib in found if lib.via == "disk" and lib.kind == "driver" and not lib.problem), None)


def _no_library(machine: Machine) -> bool:
    none = machine.driver.cuda.answer.state == "no-library"
    here = not absent(machine) and not machine.surroundings.wsl and not withheld(machine)
    return none and broken(machine) and here


@TABLE.row(
    "U05",
    "libcuda.so.1 is installed where the loader does not look",
    about="""The driver's library is on the disk and its folder is neither in the loader's cache nor on
LD_LIBRARY_PATH: torch says "Found no NVIDIA driver on your system" while nvidia-smi works. Usual on NixOS
(/run/opengl-driver/lib), on Google's container-optimised system (/home/kubernetes/bin/nvidia,
/usr/local/nvidia/lib64) and after a .run installation without ldconfig.

It is told by looking for the file where drivers put it.""",
    fix="Name the folder in /etc/ld.so.conf.d and run ldconfig; on NixOS or without root set LD_LIBRARY_PATH.",
    sources=(
        "https://github.com/vllm-project/vllm/issues/27268",
        "https://github.com/NixOS/nixpkgs/issues/278976",
    ),
)
def unlisted(machine: Machine) -> Seen | None:
    """No libcuda.so.1 for the loader, and a good one on the disk."""
    lib = _on_disk(machine)
    if lib is None or not _no_library(machine):
        return None
    value = ":".join(filter(None, (_folder(lib), machine.variables.get("LD_LIBRARY_PATH"))))
    shell = fixes.set_variable(machine, "LD_LIBRARY_PATH", value)
    line = fixes.write_line(machine, _folder(lib), file="/etc/ld.so.conf.d/nvidia.conf")
    cache = (line, fixes.sudo(machine, "ldconfig"))
    fix = shell if machine.platform.distribution == "nixos" else (*cache, "Or, for this shell only:", *shell)
    there = f"{lib.path} is there, and the loader does not look into {_folder(lib)}"
    # a torch of NixOS or conda may have that folder in its own RUNPATH
    return Seen((there, answer_line(machine)), fix, likely=machine.torch_run.answer.state == "unasked")


@TABLE.row(
    "U06",
    "only a part of the driver is installed",
    about="""Distributions split the driver into packages: the kernel module, libcuda (compute), nvidia-smi and NVML
(utils). With the module and without libcuda.so.1 torch says "Found no NVIDIA driver on your system" although
nvidia-smi may work; without libnvidia-ml.so.1 CUDA works and nvidia-smi and tools that ask NVML do not.

It is told by the loaded module and the library that is found nowhere.""",
    fix="Install the missing package in the module's exact version: libnvidia-compute-580 or nvidia-utils-580, say.",
    sources=(
        "https://github.com/NVIDIA/nvidia-docker/issues/1163",
        "https://github.com/NVIDIA/nvidia-docker/issues/876",
    ),
)
def partial(machine: Machine) -> Seen | None:
    """The module is loaded and libcuda.so.1 is nowhere; or CUDA works and libnvidia-ml.so.1 is nowhere, a note."""
    loaded = f"the kernel driver {machine.kernel.version} is loaded"
    own_nvml = machine.surroundings.wsl or machine.hardware.tegra
    no_nvml = machine.driver.nvml.answer.state == "no-library" and not machine.driver.libraries.nvml
    if works(machine) and no_nvml and not own_nvml:
        missing = "libnvidia-ml.so.1 is found nowhere: nvidia-smi and tools that ask NVML will not work"
        return Seen((missing, "CUDA works"), _packages(machine), "the driver's NVML library is not installed", "note")
    given = not machine.surroundings.container or machine.nodes.at(CONTROL).exists
    if not _no_library(machine) or not machine.kernel.loaded or _on_disk(machine) or not given:
        return None
    title = "" if machine.driver.libraries.nvml else "the driver's libraries are not installed"
    return Seen((loaded, "libcuda.so.1 is found nowhere", nvml_line(machine)), _packages(machine), title)


def _packages(machine: Machine, *, again: bool = False) -> Lines:
    """Install the driver's libraries, or do so again where files of an installed package are missing."""
    if machine.surroundings.container:
        return ("The runtime brings the libraries in:", *fixes.give_gpu(machine))
    branch = numbers_of(machine.kernel.version)[:1]
    number = branch[0] if branch else "BRANCH"
    debian = machine.platform.distribution == "debian"
    names = "libcuda1 libnvidia-ml1" if debian else f"libnvidia-compute-{number} nvidia-utils-{number}"
    same = f"Take the version of the loaded module, {machine.kernel.version}." if machine.kernel.version else ""
    packages = fixes.system_package(
        machine,
        apt=f"--reinstall {names}" if again else names,
        dnf="xorg-x11-drv-nvidia-cuda",
        pacman="nvidia-utils",
        zypper="nvidia-compute-utils-G06",
    )
    return (*packages, *filter(None, (same,)))


@TABLE.row(
    "U07",
    "the driver's PTX compiler is missing",
    about="""libnvidia-ptxjitcompiler.so.1 turns PTX into code for the card. torch's wheels rarely need it, since
they hold code for the common cards; extensions that ship PTX, Triton and new cards do: "PTX JIT compiler library
not found" (221).

It is told by the file, which is nowhere.""",
    fix="Install the whole compute part of the driver; in a container, the capability compute brings it.",
)
def no_compiler(machine: Machine) -> Seen | None:
    """The compiler is nowhere: a note, or an error where something failed for want of it."""
    errors = " ".join(step.error for step in machine.torch_run.steps)
    failed = "PTX JIT compiler library not found" in errors or code(machine) == _NO_JIT
    gone = machine.driver.libraries.ptx_compiler == () and machine.driver.cuda.works and not machine.hardware.tegra
    if not failed and (not gone or machine.surroundings.wsl):
        return None
    evidence = ("libnvidia-ptxjitcompiler.so.1 is found nowhere",) if gone else ()
    died = ("CUDA answered 221: PTX JIT compiler library not found",) if failed else ()
    return Seen((*evidence, *died), _packages(machine), severity="error" if failed else "note")
