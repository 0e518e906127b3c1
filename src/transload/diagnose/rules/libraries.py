"""The driver's libraries: which libcuda.so.1 a process gets, and whether it matches the kernel driver."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, Case
from transload.diagnose.rules.rule import Lines, Match, rule
from transload.diagnose.tables import is_data_centre, numbers_of

if TYPE_CHECKING:
    from transload.machine import Library

__all__ = ["drop_library", "library_line"]

_VERSION_MISMATCH = 18  # of NVML
_NO_JIT = 221
_UPDATE_WSL = ("$ wsl --update", "$ wsl --shutdown")


def _folder(lib: Library) -> str:
    return lib.path.rpartition("/")[0]


def library_line(lib: Library | None) -> str:
    """Which libcuda.so.1 a process gets, and how the loader finds it."""
    if lib is None:
        return ""
    leads = f" → {lib.target}" if lib.target and lib.target != lib.path else ""
    return f"libcuda.so.1 is {lib.path}{leads}, found through {lib.via or 'the loader'}"


def drop_library(m: Case, lib: Library) -> Lines:
    """Prevent the loader from using a library."""
    folder = _folder(lib)
    systems = re.fullmatch(r"(?:/usr)?/lib(?:32|64|x32)?(?:/[\w-]+-linux-gnu\w*)?", folder)  # every program needs it
    if lib.via == "LD_LIBRARY_PATH":
        return fixes.drop_folder(m, "LD_LIBRARY_PATH", folder)
    if lib.via == "LD_PRELOAD":
        return fixes.unset(m, "LD_PRELOAD")
    if lib.via == "ld.so.preload":
        return (f"Remove {lib.path} from /etc/ld.so.preload, and keep the other lines (needs root).",)
    if lib.via == "ld.so.cache" and not systems:
        return (
            f"Remove {folder} from the loader's configuration; this finds it:",
            f"$ grep -rn {quote(folder)} /etc/ld.so.conf /etc/ld.so.conf.d",
            fixes.sudo(m, "ldconfig"),
        )
    return (fixes.sudo(m, f"rm {quote(lib.path)}"), fixes.sudo(m, "ldconfig"))


def _better(m: Case, lib: Library) -> str:
    """Where the driver's own library is, as evidence that dropping the other one leaves a good one."""
    others = (each for each in m.driver.libraries.cuda or () if each != lib and each.kind in ("driver", "wsl"))
    return next((f"the driver's own is {each.path}" for each in others if not each.problem), "")


def _versions(m: Case, lib: Library | None) -> str:
    if lib is None or not (lib.version and m.kernel.version):
        return ""
    return f"it is version {lib.version}, but the kernel driver is {m.kernel.version}"


def _search(m: Case, folder: str, file: str) -> Lines:
    """Let the loader look into a folder; for this shell only on NixOS, which has no file for it."""
    value = ":".join(filter(None, (folder, m.env("LD_LIBRARY_PATH"))))
    shell = fixes.set_variable(m, "LD_LIBRARY_PATH", value)
    if m.platform.distribution == "nixos":
        return shell
    write = fixes.write_line(m, folder, file=f"/etc/ld.so.conf.d/{file}")
    return (write, fixes.sudo(m, "ldconfig"), "Or, for this shell only:", *shell)


# -- the Windows Subsystem for Linux: the driver is Windows', and only its libraries are visible


@rule("U11", "libraries", "WSL 1 does not support GPUs")
def first_wsl(m: Case) -> Match | None:
    """WSL 1: a note, since whether Windows has a card cannot be seen."""
    if m.surroundings.wsl != 1 or m.works:
        return None
    fix = ("If Windows has an NVIDIA card, in PowerShell:", "$ wsl -l -v", "$ wsl --set-version DISTRIBUTION 2")
    return Match((f"the kernel is {m.platform.kernel}, which is WSL 1",), fix, severity="note")


@rule("U09", "libraries", "a Linux driver inside WSL hides the Windows driver")
def second_driver(m: Case) -> Match | None:
    """WSL 2, and the libcuda.so.1 in use is that of a Linux driver."""
    lib = m.libcuda
    if m.surroundings.wsl != 2 or not m.fails or lib is None or lib.kind != "driver":
        return None
    own = (f"the Windows driver's own is {each.path}" for each in m.driver.libraries.cuda or () if each.kind == "wsl")
    purge = {
        "apt": "apt purge '^(lib)?nvidia-(compute|cfg1|gl|driver|dkms|kernel|utils).*|^libcuda1$'",
        "dnf": "dnf remove '*nvidia*'",
    }
    command = purge.get(m.platform.package_manager, f"rm {lib.path}")
    fix: Lines = (fixes.sudo(m, command), fixes.sudo(m, "ldconfig"))
    if lib.via == "LD_LIBRARY_PATH":
        fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", _folder(lib))
    return Match(
        (f"libcuda.so.1 → {lib.target or lib.path}, found through {lib.via}", next(own, ""), m.answer, m.relief), fix
    )


@rule("U08", "libraries", "WSL does not get the GPU from Windows")
def not_given(m: Case) -> Match | None:
    """WSL 2 outside a container: a library the loader does not find, no /dev/dxg, or a driver without a device."""
    if m.surroundings.wsl != 2 or m.surroundings.container or not m.broken or m.fires("U09"):
        return None
    own = next((lib for lib in m.driver.libraries.cuda or () if lib.kind == "wsl"), None)
    update = "In Windows, update the NVIDIA driver (https://www.nvidia.com/drivers), then in PowerShell:"
    steps = (update, *_UPDATE_WSL)
    if m.no_libcuda and own:
        there = f"{own.path} exists, but the loader does not search {_folder(own)}"
        return Match((there,), _search(m, _folder(own), "ld.wsl.conf"))
    if m.no_libcuda:  # only an error if torch was installed to use one
        meant = m.torch.first is not None and not m.torch.first.cpu_only
        title = "Windows provides no CUDA driver to WSL: it has no NVIDIA card, or no driver for it"
        evidence = ("there is no libcuda.so.1 in /usr/lib/wsl/lib",)
        fix = ("If Windows has an NVIDIA card:", *steps)
        return Match(evidence, fix, title, "error" if meant else "note", likely=meant)
    if not m.hardware.dxg:
        return Match(("/dev/dxg does not exist", m.answer), steps)
    if m.code == 100:
        return Match(("/dev/dxg exists", m.answer), steps, likely=True)
    return None


# -- the wrong libcuda.so.1


@rule("U04", "libraries", "libcuda.so.1 is the toolkit's stub")
def stub(m: Case) -> Match | None:
    """The driver returned 34, or the library in use is a stub."""
    lib = m.libcuda
    if not m.refused or not (m.code == 34 or (lib is not None and lib.kind == "stub")):
        return None
    if lib is None:
        return Match((m.answer,), ("Remove every stubs directory from LD_LIBRARY_PATH.",))
    return Match((library_line(lib), m.answer, _better(m, lib), m.relief), drop_library(m, lib))


@rule("U02", "libraries", "a CUDA compatibility library does not match the driver")
def compat(m: Case) -> Match | None:
    """A compat library, and 803 or a driver that starts without it."""
    lib = m.libcuda
    if lib is None or lib.kind != "compat" or not m.refused or m.code == 804:
        return None
    if m.code != 803 and "LD_LIBRARY_PATH" not in m.works_without:
        return None
    evidence = (library_line(lib), _versions(m, lib), m.answer, _better(m, lib), m.relief)
    return Match(evidence, drop_library(m, lib))


@rule("U03", "libraries", "forward compatibility does not work on this card")
def forward(m: Case) -> Match | None:
    """804, with a compat library or an unknown one."""
    lib = m.libcuda
    if not m.refused or m.code != 804 or m.fires("U01"):
        return None
    names = [*(gpu.name for gpu in m.driver.nvml.gpus), *(gpu.model for gpu in m.kernel.gpus)]
    plain = next((f"{name} is not a data-center card" for name in names if name and not is_data_centre(name)), "")
    driver = ("Or update the host's driver, so that no compat library is needed:", *fixes.install_driver(m))
    if lib is None or lib.kind != "compat":
        return Match((m.answer, library_line(lib), plain, m.relief), (fixes.reboot(m), *driver), likely=True)
    evidence = (library_line(lib), _versions(m, lib), m.answer, plain, m.relief)
    return Match(evidence, (*drop_library(m, lib), *driver))


@rule("U01", "libraries", "the driver's libraries and its kernel module have different versions")
def mismatch(m: Case) -> Match | None:
    """NVML 18, libraries of another release, or 803 without a compat library."""
    lib, other = m.libcuda, m.mismatched
    if not m.refused or m.surroundings.wsl or (lib is not None and lib.kind in ("compat", "stub")):
        return None
    told = m.driver.nvml.init == _VERSION_MISMATCH or m.code == 803
    # only the version explains the error: no variable does, or it is the one that names the directory
    telling = not m.works_without or "LD_LIBRARY_PATH" in m.works_without
    if not told and (other is None or not telling):
        return None
    evidence = (library_line(lib), _versions(m, lib), m.answer, m.nvml_answer, m.relief)
    return Match(evidence, _align(m, other or lib))


def _align(m: Case, lib: Library | None) -> Lines:
    if lib is not None and lib.via.startswith("LD_"):
        return drop_library(m, lib)
    kernel, library = numbers_of(m.kernel.version), numbers_of(lib.version) if lib else ()
    if m.surroundings.container:
        return ("Recreate the container, so that it gets the host's libraries:", *fixes.give_gpu(m))
    if kernel and library and library < kernel:
        older = f"The libraries are older than the loaded module {m.kernel.version}: install its version of them."
        return (older, *fixes.install_driver(m, exactly=kernel[0]))
    return (fixes.reboot(m), "Or, while no program and no desktop uses the GPU:", *fixes.reload_module(m))


@rule("U13", "libraries", "libcuda.so.1 is not a usable library")
def unusable(m: Case) -> Match | None:
    """The library cannot be loaded or lacks its functions; or the driver works once its directory is not searched."""
    lib, answer = m.libcuda, m.driver.cuda.answer
    if not m.fails or m.no_gpu or m.withheld:
        return None
    if answer.state not in ("not-loadable", "no-symbol"):
        proven = "LD_LIBRARY_PATH" in m.works_without and lib is not None and lib.via == "LD_LIBRARY_PATH"
        if lib is None or not proven or m.fires("U04", "U02", "U03", "U01"):
            return None
        title = "another libcuda.so.1 is loaded instead of the driver's"
        return Match((library_line(lib), m.answer, m.relief), drop_library(m, lib), title)
    problem = f"{lib.path}: {lib.problem}" if lib and lib.problem else ""
    evidence = (library_line(lib), problem, m.answer, m.relief)
    if lib is None:
        return Match(evidence, fixes.install_driver(m))
    if lib.kind == "driver" and lib.version and not lib.problem and not lib.via.startswith("LD_"):
        # the driver's own, and complete: something else is missing
        noexec = (
            "Its file system is mounted noexec, or a security policy (SELinux, AppArmor) forbids running code from it."
        )
        return Match(evidence, (noexec,) if "map segment" in answer.detail else _packages(m, again=True))
    left = _better(m, lib)
    own = m.kernel.loaded is True or m.surroundings.container
    inside = _packages(m, again=True) if own else fixes.install_driver(m)
    return Match((*evidence, left), (*drop_library(m, lib), *(() if left else inside)))


# -- no libcuda.so.1


def _on_disk(m: Case) -> Library | None:
    """A usable libcuda.so.1 that the loader does not find."""
    found = m.driver.libraries.cuda or ()
    return next((lib for lib in found if lib.via == "disk" and lib.kind == "driver" and not lib.problem), None)


def _not_found(m: Case) -> bool:
    return m.no_libcuda and m.broken and not m.no_gpu and not m.surroundings.wsl and not m.withheld


@rule("U05", "libraries", "libcuda.so.1 is installed where the loader does not look")
def unlisted(m: Case) -> Match | None:
    """The loader finds no libcuda.so.1, but a usable one is on the disk."""
    lib = _on_disk(m)
    if lib is None or not _not_found(m):
        return None
    there = f"{lib.path} exists, but the loader does not search {_folder(lib)}"
    # a torch of NixOS or conda may have that directory in its own RUNPATH
    return Match((there, m.answer), _search(m, _folder(lib), "nvidia.conf"), likely=m.torch_not_run)


@rule("U06", "libraries", "only part of the driver is installed")
def partial(m: Case) -> Match | None:
    """The module is loaded, but there is no libcuda.so.1; or CUDA works without libnvidia-ml.so.1, a note."""
    own_nvml = m.surroundings.wsl or m.hardware.tegra
    no_nvml = m.driver.nvml.answer.state == "no-library" and not m.driver.libraries.nvml
    if m.works and no_nvml and not own_nvml:
        missing = "libnvidia-ml.so.1 is not found: nvidia-smi and tools that use NVML do not work"
        return Match((missing, "CUDA works"), _packages(m), "the driver's NVML library is not installed", "note")
    given = not m.surroundings.container or m.nodes.at(CONTROL).exists
    if not _not_found(m) or not m.kernel.loaded or _on_disk(m) or not given:
        return None
    title = "" if m.driver.libraries.nvml else "the driver's libraries are not installed"
    loaded = f"the kernel driver {m.kernel.version} is loaded"
    return Match((loaded, "libcuda.so.1 is not found", m.nvml_answer), _packages(m), title)


def _packages(m: Case, *, again: bool = False) -> Lines:
    """Install the driver's libraries, or do so again where files of an installed package are missing."""
    if m.surroundings.container:
        return ("The container runtime provides the libraries:", *fixes.give_gpu(m))
    number = next(iter(numbers_of(m.kernel.version)), "BRANCH")
    debian = m.platform.distribution == "debian"
    names = "libcuda1 libnvidia-ml1" if debian else f"libnvidia-compute-{number} nvidia-utils-{number}"
    packages = fixes.system_package(
        m,
        apt=f"--reinstall {names}" if again else names,
        dnf="xorg-x11-drv-nvidia-cuda",
        pacman="nvidia-utils",
        zypper="nvidia-compute-utils-G06",
    )
    return (*packages, f"Install the version of the loaded module, {m.kernel.version}." if m.kernel.version else "")


@rule("U07", "libraries", "the driver's PTX compiler is missing")
def no_compiler(m: Case) -> Match | None:
    """There is no compiler: a note, or an error if something failed without it."""
    errors = " ".join(step.error for step in m.torch_run.steps)
    failed = "PTX JIT compiler library not found" in errors or m.code == _NO_JIT
    gone = m.driver.libraries.ptx_compiler == () and m.driver.cuda.works and not m.hardware.tegra
    if not failed and (not gone or m.surroundings.wsl):
        return None
    nowhere = "libnvidia-ptxjitcompiler.so.1 is not found" if gone else ""
    died = "CUDA returned 221: PTX JIT compiler library not found" if failed else ""
    return Match((nowhere, died), _packages(m), severity="error" if failed else "note")
