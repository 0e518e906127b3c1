"""The operating system: what it is, its memory, what is mounted where, and the CUDA toolkits on its disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from transload.diagnose.host import Host
from transload.machine import Platform, Toolkit, Unknown

__all__ = ["Mount", "executable", "memory", "mount_of", "mounts", "platform", "toolkit"]

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


_BINARIES = ("/usr/bin", "/usr/local/bin", "/bin", "/run/current-system/sw/bin", "/usr/local/nvidia/toolkit")
_DIGITS = 20  # a longer number is nonsense


def platform(host: Host) -> Platform:
    """What system this is. On another system than Linux only what the kernel says of itself is known."""
    system, kernel, machine = host.uname
    shell = host.environ.get("SHELL", "").rstrip("/").rpartition("/")[2]
    if system != "Linux":
        return Platform(system, machine, kernel, root=host.uid == 0, shell=shell)
    text = host.text("/etc/os-release") or host.text("/usr/lib/os-release") or ""
    pairs = (line.strip().partition("=") for line in text.split("\n") if not line.lstrip().startswith("#"))
    release = {name: value.strip("\"'") for name, equals, value in pairs if equals}
    like = tuple(release.get("ID_LIKE", "").split())
    chassis = host.text("/sys/class/dmi/id/chassis_type", 64)
    limit = re.search(r"^Max address space +(\d{1,19})\b", host.text("/proc/self/limits", 1 << 14) or "", re.MULTILINE)
    prime = host.line("/etc/prime-discrete") or host.line("/etc/prime/current_type")  # Ubuntu's, openSUSE's
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
        shell=shell,
        root=host.uid == 0,
        groups=_groups(host),
        laptop=chassis if isinstance(chassis, Unknown) else _number(chassis.strip(), 0) in _LAPTOPS,
        address_space=int(limit[1]) if limit else None,
        memory=total,
        memory_free=free,
        suspends=_number(host.line("/sys/power/suspend_stats/success"), 0),
        prime=_PRIME.get(prime, prime),
    )


def _number(text: str, otherwise: int) -> int:
    """A number from a file; ``otherwise`` for anything else, however long or strange."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else otherwise


def _libc(host: Host) -> str:
    """From the libc of this very process, where that is the host's; else from the files of the tree."""
    if host.root == "/":
        try:
            if told := os.confstr("CS_GNU_LIBC_VERSION"):
                return told
        except (ValueError, OSError, AttributeError):  # musl knows no such name, and Windows no such call
            pass
    if any(host.paths("/lib", "ld-musl-", ".so.1")):
        version = re.search(r"^P:musl\nV:(\d+\.\d+)", host.text("/lib/apk/db/installed") or "", re.MULTILINE)
        return f"musl {version[1]}" if version else "musl"
    for folder in (f"/lib/{host.uname[2]}-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib", "/lib"):
        data = host.data(f"{folder}/libc.so.6", 8 << 20)
        if data and (found := re.search(rb"GNU C Library[^\n]{0,80} version (\d+\.\d+)", data)):
            return f"glibc {found[1].decode()}"
    return ""


def _package_manager(host: Host, family: tuple[str, ...]) -> str:
    """The distribution's own, where it is installed; else the first there is."""
    wanted = [_FAMILIES[name] for name in family if name in _FAMILIES]
    there = (each for each in (*wanted, *_MANAGERS) if any(host.exists(program) for program in _MANAGERS[each]))
    return next(there, "")


def _groups(host: Host) -> tuple[str, ...]:
    """From /proc and /etc/group: asking the system might go over the network, to a directory that is down."""
    status = host.text("/proc/self/status", 1 << 14) or ""
    numbers = re.findall(r"^(?:Groups|Gid):[ \t]*([\d \t]*)$", status, re.MULTILINE)
    mine = dict.fromkeys(number for each in numbers for number in each.split())
    lines = (line.split(":") for line in (host.text("/etc/group") or "").split("\n"))
    names = {line[2]: line[0] for line in lines if len(line) > 2}
    return tuple(sorted(names.get(number, number) for number in mine))


def executable(host: Host, name: str) -> str:
    """The path of a program of that name, in the folders that hold programs; empty where there is none."""
    return next((path for folder in _BINARIES if host.exists(path := f"{folder}/{name}")), "")


# -- memory ------------------------------------------------------------------------------------------------------------

_V1 = "/sys/fs/cgroup/memory/memory"
_NO_LIMIT = 1 << 60  # what version 1 writes for none is a little less than 2**63


def memory(host: Host) -> tuple[int, int]:
    """Bytes in all and bytes free; -1 where they are not known. A container's limit counts where it is lower."""
    told = {}
    for line in (host.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        amount = _number("".join(rest.split()[:1]), -1)
        if amount >= 0:
            told[name] = amount * 1024
    total, free = told.get("MemTotal", -1), told.get("MemAvailable", told.get("MemFree", -1))
    for limit, used in _limits(host):
        if 0 <= limit < _NO_LIMIT:
            total = min(total, limit) if total >= 0 else limit
            free = min(free, max(0, limit - used)) if free >= 0 else max(0, limit - used)
    return total, free


def _limits(host: Host) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group above this process that has one. The page cache can be given back."""
    lines = (host.text("/proc/self/cgroup") or "").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    steps = [step for step in path.split("/") if step and step != ".."]
    groups = ["/".join(["/sys/fs/cgroup", *steps[:depth]]) for depth in range(len(steps) + 1)]
    files = [(f"{group}/memory.max", f"{group}/memory.current", f"{group}/memory.stat") for group in groups]
    for most, used, statistics in (*files, (f"{_V1}.limit_in_bytes", f"{_V1}.usage_in_bytes", f"{_V1}.stat")):
        name = "total_inactive_file" if statistics == f"{_V1}.stat" else "inactive_file"
        cached = 0
        for line in (host.text(statistics) or "").splitlines():
            key, _, value = line.partition(" ")
            cached = cached or (_number(value, 0) if key == name else 0)
        yield _number(host.line(most), -1), max(0, _number(host.line(used), -1) - cached)


# -- file systems mounted where device nodes live, and at the root -----------------------------------------------------

_OCTAL = re.compile(r"\\([0-7]{3})")  # a space in a path, and what else would divide fields
_MOUNTINFO = 16 << 20  # hosts of many containers have thousands of lines


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: where, of what kind, with which options; ``detail`` are those of the file system."""

    point: str
    kind: str
    options: tuple[str, ...] = ()
    detail: str = ""


def mounts(host: Host) -> tuple[Mount, ...]:
    """What is mounted at / and at or below /dev, in the order in which it was mounted."""
    found = []
    for line in (host.text("/proc/self/mountinfo", _MOUNTINFO) or "").split("\n"):
        fields = line.split(" ", 6)
        if len(fields) == 7 and (fields[4] == "/" or f"{fields[4]}/".startswith("/dev/")):
            kind, _, rest = fields[6].partition("- ")[2].partition(" ")
            point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
            found.append(Mount(point, kind, tuple(fields[5].split(",")), rest.partition(" ")[2]))
    return tuple(found)


def mount_of(found: tuple[Mount, ...], path: str) -> Mount | None:
    """The one that ``path`` lies on: the deepest, and of several at one place the last.

    >>> mount_of((Mount("/", "ext4"), Mount("/dev", "devtmpfs")), "/dev/nvidia0").kind
    'devtmpfs'
    """
    over = [each for each in found if path == each.point or path.startswith(each.point.rstrip("/") + "/")]
    return max(reversed(over), key=lambda each: len(each.point), default=None)


# -- CUDA toolkits; nothing of them is run -----------------------------------------------------------------------------

_LOCAL = "/usr/local"
_JSON = re.compile(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+\.\d+(?:\.\d+)?)')
_TEXT = re.compile(r"CUDA Version (\d+\.\d+(?:\.\d+)?)")
_HEADER = re.compile(r"^#define\s+CUDA_VERSION\s+(\d{4,6})\b", re.MULTILINE)
_FOLDER = re.compile(r"/cuda-(\d+\.\d+)(?:/|$)")


def toolkit(host: Host) -> Toolkit:
    """The compiler that a build would find first, its version by the files around it, and the folders of toolkits."""
    home = host.environ.get("CUDA_HOME") or host.environ.get("CUDA_PATH") or ""
    folders = [each.rstrip("/") for each in host.environ.get("PATH", "").split(":") if each.startswith("/")]
    folders += [f"{home.rstrip('/')}/bin"] if home.startswith("/") else []
    nvcc = next((path for each in (*folders, f"{_LOCAL}/cuda/bin") if host.exists(path := f"{each}/nvcc")), "")
    return Toolkit(
        nvcc=nvcc,
        version=_toolkit_version(host, nvcc) if nvcc else "",
        home=home,
        folders=tuple(path for path in host.paths(_LOCAL, "cuda") if host.folder(path)),
    )


def _toolkit_version(host: Host, nvcc: str) -> str:
    """Of the toolkit that nvcc belongs to: NVIDIA's own has a version file, those of Debian and conda a header."""
    path = host.target(nvcc)
    begin = host.data(path, 1024) or b""  # it may be a script that starts the compiler itself
    started = re.search(rb"(/[\w./-]+/bin/nvcc)\b", begin) if begin.startswith(b"#!") else None
    home = (host.target(started[1].decode()) if started else path).removesuffix("/bin/nvcc")
    for name, pattern in (("version.json", _JSON), ("version.txt", _TEXT)):
        if found := pattern.search(host.text(f"{home}/{name}", 1 << 16) or ""):
            return found[1]
    debian = ("/usr/include",) if nvcc.startswith("/usr/bin/") else ()
    targets = (host.uname[2], "sbsa") if host.uname[2] == "aarch64" else (host.uname[2],)  # Jetson, Arm servers
    for folder in (f"{home}/include", *(f"{home}/targets/{each}-linux/include" for each in targets), *debian):
        if found := _HEADER.search(host.text(f"{folder}/cuda.h", 1 << 16) or ""):
            return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    found = _FOLDER.search(home)
    return found[1] if found else ""
