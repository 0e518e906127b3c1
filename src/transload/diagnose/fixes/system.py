"""What root does: packages, drivers, kernel modules, a reboot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["install_driver", "modprobe_option", "on_host", "reboot", "sudo", "system_package"]

Lines = tuple[str, ...]

DOWNLOAD = "https://www.nvidia.com/drivers"
_INSTALL = {
    "apt": "apt install",
    "dnf": "dnf install",
    "pacman": "pacman -S",
    "zypper": "zypper install",
    "apk": "apk add",
}


def sudo(machine: Machine, command: str) -> str:
    """A command that needs root, as this user must type it.

    >>> from transload.machine import Machine
    >>> sudo(Machine(), "modprobe nvidia")
    '$ sudo modprobe nvidia'
    """
    return f"$ {command}" if machine.platform.root else f"$ sudo {command}"


def on_host(machine: Machine) -> Lines:
    """The line that sends the reader out of a container; nothing outside one."""
    return ("On the host, not in this container:",) if machine.surroundings.container else ()


def reboot(machine: Machine) -> str:
    """How to start the machine again."""
    if machine.surroundings.wsl:
        return "Then, in Windows, run 'wsl --shutdown' and open the terminal again."
    if machine.surroundings.container:
        return "Then reboot the host."
    return sudo(machine, "reboot")


def system_package(machine: Machine, **names: str) -> Lines:
    """Install a package by this distribution's name for it: ``apt=…``, ``dnf=…``, ``pacman=…`` and so on.

    >>> from transload.machine import Machine, Platform
    >>> system_package(Machine(platform=Platform(package_manager="dnf", root=True)), dnf="nvidia-modprobe")
    ('$ dnf install nvidia-modprobe',)
    """
    manager = machine.platform.package_manager
    if manager in names and manager in _INSTALL:
        return (sudo(machine, f"{_INSTALL[manager]} {names[manager]}"),)
    known = next(iter(names.values()), "")
    return (f"Install your distribution's counterpart of the package {known}.",)


def install_driver(machine: Machine, branch: int = 0, *, open_module: bool | None = None) -> Lines:
    """Install NVIDIA's driver, of a branch such as 580 where one is named, with the open kernel module or without."""
    if machine.surroundings.wsl:
        return (
            f"Install or update the driver in Windows: {DOWNLOAD}",
            "Never install a Linux driver inside WSL: its libcuda would hide the one Windows provides.",
        )
    if machine.platform.system == "Windows":
        return (f"Install the driver{f' of branch {branch}' if branch else ''}: {DOWNLOAD}",)
    if machine.surroundings.container:
        which = f" of branch {branch}" if branch else ""
        return (
            "On the host, not in this container:",
            f"Install or update NVIDIA's driver{which}, then reboot the host.",
        )
    steps = _DRIVER.get(_distribution(machine), _other_driver)(machine, branch, open_module)
    return (*steps, reboot(machine))


def _distribution(machine: Machine) -> str:
    names = (machine.platform.distribution, *machine.platform.distribution_like)
    return next((name for name in names if name in _DRIVER), machine.platform.package_manager)


def _ubuntu(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    if not branch and open_module is None:
        return (sudo(machine, "ubuntu-drivers install"),)
    flavour = "" if open_module is False else "-open"
    return (sudo(machine, "apt update"), sudo(machine, f"apt install nvidia-driver-{branch or 580}{flavour}"))


def _debian(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    if branch or open_module is not None:
        package = "cuda-drivers" if open_module is False else "nvidia-open"
        pinned = f"{package}-{branch}" if branch else package
        return (
            "From NVIDIA's own repository (developer.nvidia.com/cuda-downloads):",
            sudo(machine, f"apt install {pinned}"),
        )
    return (
        "With the component non-free enabled in /etc/apt/sources.list:",
        sudo(machine, "apt install linux-headers-$(uname -r) nvidia-driver firmware-misc-nonfree"),
    )


def _fedora(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    package = f"akmod-nvidia-{branch}xx" if branch and branch <= _LAST_LEGACY else "akmod-nvidia"
    cuda = package.replace("akmod-nvidia", "xorg-x11-drv-nvidia") + "-cuda"
    steps = ("With the RPM Fusion repositories enabled:", sudo(machine, f"dnf install {package} {cuda}"))
    if open_module is False:
        return (*steps, sudo(machine, "sh -c 'echo \"%_without_kmod_nvidia_detect 1\" > /etc/rpm/macros.nvidia-kmod'"))
    return (*steps, "Wait until 'modinfo nvidia' prints a version: the module is being built.")


def _rhel(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    package = "cuda-drivers" if open_module is False else "nvidia-open"
    pinned = f"{package}-{branch}" if branch else package
    return (
        "With NVIDIA's repository enabled (developer.nvidia.com/cuda-downloads):",
        sudo(machine, f"dnf install {pinned}"),
    )


def _arch(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    if (branch and branch <= _LAST_LEGACY) or open_module is False:
        return (f"From the AUR: nvidia-{branch or _LAST_LEGACY}xx-dkms and nvidia-{branch or _LAST_LEGACY}xx-utils",)
    return (sudo(machine, "pacman -Syu nvidia-open nvidia-utils"),)


def _suse(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    del branch
    package = "nvidia-driver-G06-kmp-default" if open_module is False else "nvidia-open-driver-G06-signed-kmp-default"
    return (
        "With NVIDIA's repository for openSUSE or SLES enabled:",
        sudo(machine, f"zypper install {package} nvidia-compute-utils-G06"),
    )


def _nixos(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    del machine
    package = f" hardware.nvidia.package = config.boot.kernelPackages.nvidiaPackages.legacy_{branch};" if branch else ""
    flavour = "false" if open_module is False else "true"
    return (
        "In configuration.nix:",
        f'| services.xserver.videoDrivers = [ "nvidia" ]; hardware.nvidia.open = {flavour};{package}',
        "$ sudo nixos-rebuild switch",
    )


def _alpine(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    del machine, branch, open_module
    return ("NVIDIA publishes no driver for musl: use a distribution with glibc on this machine.",)


def _other_driver(machine: Machine, branch: int, open_module: bool | None) -> Lines:
    del machine
    flavour = {True: " with the open kernel module", False: " with the proprietary kernel module", None: ""}[
        open_module
    ]
    which = f" of branch {branch}" if branch else ""
    return (f"Install NVIDIA's driver{which}{flavour} by your distribution's packages, or from {DOWNLOAD}",)


_LAST_LEGACY = 580  # the last branch for Maxwell, Pascal and Volta
_DRIVER = {
    "ubuntu": _ubuntu,
    "debian": _debian,
    "fedora": _fedora,
    "rhel": _rhel,
    "centos": _rhel,
    "arch": _arch,
    "suse": _suse,
    "opensuse": _suse,
    "sles": _suse,
    "nixos": _nixos,
    "alpine": _alpine,
}


def modprobe_option(machine: Machine, line: str, file: str) -> Lines:
    """Give a kernel module an option that lasts. ``line`` is ``options MODULE name=value``."""
    module = line.split()[1]
    steps = (
        f"echo '{line}' | tee /etc/modprobe.d/{file}",
        "With no program using the GPU:",
        f"modprobe -r {module}",
        f"modprobe {module}",
    )
    # Root in a container is nobody on its host.
    rooted = machine.platform.root and not machine.surroundings.container
    with_sudo = [
        step if rooted else step.replace("modprobe ", "sudo modprobe ").replace("| tee", "| sudo tee") for step in steps
    ]
    return (*on_host(machine), *(step if step.startswith("With") else f"$ {step}" for step in with_sudo))
