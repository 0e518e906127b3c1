"""What root does: packages, kernel modules, a reboot."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["modprobe_option", "on_host", "reboot", "reload_module", "sudo", "system_package", "write_line"]

Lines = tuple[str, ...]

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


def _outside(machine: Machine) -> str:
    """``sudo`` where it is needed on the machine itself: root in a container is nobody on its host."""
    return "" if machine.platform.root and not machine.surroundings.container else "sudo "


def write_line(machine: Machine, *lines: str, file: str) -> str:
    """Write a line, or several, into a file that is root's.

    >>> from transload.machine import Machine
    >>> write_line(Machine(), "/opt/lib", file="/etc/ld.so.conf.d/opt.conf")
    '$ echo /opt/lib | sudo tee /etc/ld.so.conf.d/opt.conf'
    """
    text = " ".join(map(quote, lines))
    write = f"echo {text}" if len(lines) == 1 else f"printf '%s\\n' {text}"
    return f"$ {write} | {'' if machine.platform.root else 'sudo '}tee {file}"


_MODULES = {"nvidia": "nvidia_drm nvidia_modeset nvidia_uvm nvidia"}  # what uses a module has to go before it


def reload_module(machine: Machine, module: str = "nvidia") -> Lines:
    """Unload a module of the driver and load it again, on the machine itself."""
    loaded = machine.kernel.modules
    first = [name for name in _MODULES.get(module, module).split() if name in (*loaded, module) or not loaded]
    persisted = module == "nvidia" and "nvidia-persistenced" in machine.kernel.daemons
    commands = (
        *(("systemctl stop nvidia-persistenced",) if persisted else ()),
        f"modprobe -r {' '.join(first)}",
        f"modprobe {module}",
        *(("systemctl start nvidia-persistenced",) if persisted else ()),
    )
    return tuple(f"$ {_outside(machine)}{command}" for command in commands)


def modprobe_option(machine: Machine, line: str, file: str) -> Lines:
    """Give a kernel module an option that lasts. ``line`` is ``options MODULE name=value``."""
    write = f"$ echo {quote(line)} | {_outside(machine)}tee /etc/modprobe.d/{file}"
    again = reload_module(machine, line.split()[1])
    return (*on_host(machine), write, "With no program using the GPU, or else by a reboot:", *again)
