"""The Windows Subsystem for Linux, where the driver is Windows' and only its libraries are to be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import answer_line, broken, code, fails, relief_line, taken, works

if TYPE_CHECKING:
    from transload.machine import Library, Machine

__all__ = ["TABLE"]

TABLE = Table("libraries")

Lines = tuple[str, ...]

_FOLDER = "/usr/lib/wsl/lib"
_WSL = "https://github.com/microsoft/WSL/issues"


@TABLE.row(
    "U11",
    "WSL 1 has no GPU",
    about="""Version 1 of the Windows Subsystem for Linux translates system calls and knows no GPU; CUDA needs
version 2. It is told by "Microsoft" without "WSL2" in /proc/version. If the Windows machine has no NVIDIA card,
nothing is wrong.""",
    fix="In PowerShell: wsl --set-version <distribution> 2 (wsl -l -v lists them), and an NVIDIA driver in Windows.",
    sources=("https://learn.microsoft.com/windows/wsl/compare-versions",),
)
def first_version(machine: Machine) -> Seen | None:
    """WSL 1: a note, since whether Windows has a card cannot be seen."""
    if machine.surroundings.wsl != 1 or works(machine):
        return None
    fix = (
        "If Windows has an NVIDIA card, in PowerShell:",
        "$ wsl -l -v",
        "$ wsl --set-version DISTRIBUTION 2",
    )
    return Seen((f"the kernel is {machine.platform.kernel}, that of WSL 1",), fix, severity="note")


def _own(machine: Machine) -> tuple[Library, ...]:
    """The libcuda.so.1 of Windows' driver, whether the loader sees it or not."""
    return tuple(lib for lib in machine.driver.libraries.cuda or () if lib.kind == "wsl")


@TABLE.row(
    "U09",
    "a Linux driver inside WSL hides the one of Windows",
    about="""Under WSL libcuda.so.1 comes from Windows, in /usr/lib/wsl/lib. A driver package installed inside (apt
install nvidia-driver-…, cuda, nvidia-cuda-toolkit with its recommendations) puts a second one before it, which
finds no kernel driver to talk to: torch says "No CUDA GPUs are available" or 803.

It is told by the libcuda.so.1 that the loader takes, which is not Windows'.""",
    fix="""Remove every driver package inside WSL, then run ldconfig: sudo apt purge
'^(lib)?nvidia-(compute|cfg1|gl|driver|dkms|kernel|utils).*' && sudo ldconfig.""",
    avoid="Installing any Linux driver inside WSL. The toolkit alone (cuda-toolkit-…) is harmless.",
    sources=(f"{_WSL}/7056",),
)
def second_driver(machine: Machine) -> Seen | None:
    """WSL 2, and the libcuda.so.1 in use is that of a Linux driver."""
    lib = taken(machine)
    if machine.surroundings.wsl != 2 or not fails(machine) or lib is None or lib.kind != "driver":
        return None
    own = tuple(f"Windows' own is {each.path}" for each in _own(machine)[:1])
    purge = {
        "apt": "apt purge '^(lib)?nvidia-(compute|cfg1|gl|driver|dkms|kernel|utils).*|^libcuda1$'",
        "dnf": "dnf remove '*nvidia*'",
    }
    command = purge.get(machine.platform.package_manager, f"rm {lib.path}")
    first = fixes.drop_folder(machine, "LD_LIBRARY_PATH", lib.path.rpartition("/")[0])
    remove = first if lib.via == "LD_LIBRARY_PATH" else (fixes.sudo(machine, command), fixes.sudo(machine, "ldconfig"))
    evidence = (f"libcuda.so.1 → {lib.target or lib.path}, by {lib.via}", *own, answer_line(machine))
    return Seen((*evidence, *relief_line(machine)), remove)


@TABLE.row(
    "U08",
    "WSL does not get the GPU from Windows",
    about="""Under WSL 2 the GPU comes through /dev/dxg and the libraries that the Windows driver puts into
/usr/lib/wsl/lib. An old WSL kernel has no /dev/dxg; an old or missing Windows driver gives no libcuda.so.1; a
service or a cleaned environment may not look into /usr/lib/wsl/lib. The message "/usr/lib/wsl/lib/libcuda.so.1 is
not a symbolic link" of ldconfig is harmless.

Where Windows has no NVIDIA card there is nothing to repair; that cannot be seen from inside.""",
    fix="""Update the driver in Windows and WSL itself (wsl --update, then wsl --shutdown); let the loader look into
/usr/lib/wsl/lib.""",
    avoid="Installing a Linux driver inside WSL.",
    sources=(f"{_WSL}/5663", f"{_WSL}/8587", f"{_WSL}/9254"),
)
def not_given(machine: Machine) -> Seen | None:
    """WSL 2 outside a container: a library the loader misses, no /dev/dxg, or a driver that has no device."""
    around, own = machine.surroundings, _own(machine)
    if around.wsl != 2 or around.container or not broken(machine) or second_driver(machine):
        return None
    none = machine.driver.cuda.answer.state == "no-library"
    if none and own:
        return _unlisted(machine, own[0])
    update = ("In Windows, update the NVIDIA driver (https://www.nvidia.com/drivers), then in PowerShell:",)
    steps = (*update, "$ wsl --update", "$ wsl --shutdown")
    if none:
        return _without_driver(machine, steps)
    if not machine.hardware.dxg:
        return Seen(("/dev/dxg is not there", answer_line(machine)), steps)
    if code(machine) == 100:
        return Seen(("/dev/dxg is there", answer_line(machine)), steps, likely=True)
    return None


def _without_driver(machine: Machine, steps: Lines) -> Seen:
    """No library of Windows' driver: a fault only where torch was installed to use one."""
    first = machine.torch.first
    meant = first is not None and not first.cpu_only
    title = "Windows gives WSL no CUDA driver: it has no NVIDIA card, or not its driver"
    fix = ("If Windows has an NVIDIA card:", *steps)
    return Seen((f"no libcuda.so.1 is in {_FOLDER}",), fix, title, "error" if meant else "note", likely=meant)


def _unlisted(machine: Machine, lib: Library) -> Seen:
    folder = lib.path.rpartition("/")[0]
    value = ":".join(filter(None, (folder, machine.variables.get("LD_LIBRARY_PATH"))))
    fix = (
        fixes.write_line(machine, folder, file="/etc/ld.so.conf.d/ld.wsl.conf"),
        fixes.sudo(machine, "ldconfig"),
        "Or, for this shell only:",
        *fixes.set_variable(machine, "LD_LIBRARY_PATH", value),
    )
    return Seen((f"{lib.path} is there, and the loader does not look into {folder}",), fix)
