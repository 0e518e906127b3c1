"""The operating system, and who asks."""

from __future__ import annotations

import os
import re

from transload.diagnose.host import Host
from transload.diagnose.probes.memory import memory
from transload.machine import Platform, Unknown

__all__ = ["platform"]

# Of SMBIOS: portable, laptop, notebook, sub-notebook, convertible, detachable.
_LAPTOPS = frozenset({8, 9, 10, 14, 31, 32})

_MANAGERS = {
    "apt": ("/usr/bin/apt-get",),
    "dnf": ("/usr/bin/dnf", "/usr/bin/dnf5", "/usr/bin/microdnf"),
    "zypper": ("/usr/bin/zypper",),
    "pacman": ("/usr/bin/pacman",),
    "apk": ("/sbin/apk", "/usr/sbin/apk", "/usr/bin/apk"),
    "nix": ("/run/current-system/sw/bin/nixos-rebuild", "/run/current-system/sw/bin/nix"),
}
_FAMILIES = {
    **dict.fromkeys(("debian", "ubuntu", "linuxmint", "pop", "raspbian", "kali"), "apt"),
    **dict.fromkeys(("fedora", "rhel", "centos", "rocky", "almalinux", "ol", "amzn", "azurelinux", "mariner"), "dnf"),
    **dict.fromkeys(("suse", "opensuse", "sles", "opensuse-leap", "opensuse-tumbleweed"), "zypper"),
    **dict.fromkeys(("arch", "archlinux", "manjaro", "endeavouros", "cachyos"), "pacman"),
    "alpine": "apk",
    "nixos": "nix",
}
_PRIME = {"on": "nvidia", "off": "intel", "integrated": "intel", "intel2": "intel"}


def platform(host: Host) -> Platform:
    """What system this is. On another system than Linux only what the kernel says of itself is known."""
    system, kernel, machine = host.uname
    if system != "Linux":
        return Platform(system, machine, kernel, root=host.uid == 0, shell=_shell(host))
    release = _os_release(host)
    like = tuple(release.get("ID_LIKE", "").split())
    total, free = memory(host)
    return Platform(
        system,
        machine,
        kernel,
        distribution=release.get("ID", ""),
        distribution_like=like,
        distribution_version=release.get("VERSION_ID", ""),
        distribution_name=release.get("PRETTY_NAME", ""),
        libc=_libc(host),
        package_manager=_package_manager(host, (release.get("ID", ""), *like)),
        shell=_shell(host),
        root=host.uid == 0,
        groups=_groups(host),
        laptop=_laptop(host),
        address_space=_address_space(host),
        memory=total,
        memory_free=free,
        suspends=_number(host.line("/sys/power/suspend_stats/success")),
        prime=_prime(host),
    )


def _number(text: str) -> int:
    """A number out of a file; 0 for anything else, however long or strange."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _os_release(host: Host) -> dict[str, str]:
    text = host.text("/etc/os-release") or host.text("/usr/lib/os-release") or ""
    pairs = (line.strip().partition("=") for line in text.split("\n") if not line.lstrip().startswith("#"))
    return {name: value.strip("\"'") for name, equals, value in pairs if equals}


def _libc(host: Host) -> str:
    """By the libc of this very process, where that is the host's; else by what lies in the tree."""
    if host.root == "/" and (told := _own_libc()):
        return told
    if any(host.paths("/lib", "ld-musl-", ".so.1")):
        version = re.search(r"^P:musl\nV:(\d+\.\d+)", host.text("/lib/apk/db/installed") or "", re.MULTILINE)
        return f"musl {version[1]}" if version else "musl"
    return _glibc_file(host)


def _own_libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):  # musl knows no such name, and Windows no such call
        return ""


def _glibc_file(host: Host) -> str:
    machine = host.uname[2]
    for folder in (f"/lib/{machine}-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib", "/lib"):
        data = host.data(host.target(f"{folder}/libc.so.6"), 8 << 20)
        if data and (found := re.search(rb"GNU C Library[^\n]{0,80} version (\d+\.\d+)", data)):
            return f"glibc {found[1].decode()}"
    return ""


def _package_manager(host: Host, family: tuple[str, ...]) -> str:
    """The distribution's own, where it is installed; else the first there is."""
    wanted = [_FAMILIES[name] for name in family if name in _FAMILIES]
    for manager in (*wanted, *_MANAGERS):
        if any(host.exists(program) for program in _MANAGERS[manager]):
            return manager
    return ""


def _shell(host: Host) -> str:
    return host.environ.get("SHELL", "").rstrip("/").rpartition("/")[2]


def _groups(host: Host) -> tuple[str, ...]:
    """From /proc and /etc/group: asking the system might go over the network, to a directory that is down."""
    status = host.text("/proc/self/status", 1 << 14) or ""
    numbers = re.findall(r"^(?:Groups|Gid):[ \t]*([\d \t]*)$", status, re.MULTILINE)
    mine = dict.fromkeys(number for each in numbers for number in each.split())
    lines = (line.split(":") for line in (host.text("/etc/group") or "").split("\n"))
    names = {line[2]: line[0] for line in lines if len(line) > 2}
    return tuple(sorted(names.get(number, number) for number in mine))


def _laptop(host: Host) -> bool | Unknown:
    path = "/sys/class/dmi/id/chassis_type"
    text = host.text(path, 64)
    if isinstance(text, Unknown):
        return text
    return _number(text.strip()) in _LAPTOPS


def _address_space(host: Host) -> int | None:
    found = re.search(r"^Max address space +(\d{1,19})\b", host.text("/proc/self/limits", 1 << 14) or "", re.MULTILINE)
    return int(found[1]) if found else None


def _prime(host: Host) -> str:
    """Of Ubuntu's prime-select, or of openSUSE's."""
    word = host.line("/etc/prime-discrete") or host.line("/etc/prime/current_type")
    return _PRIME.get(word, word)
