"""The operating system, its mounts and CUDA toolkits; the containers and variables around the process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from transload.diagnose.host import Host, int_or, memory, pairs
from transload.diagnose.tables import cuda_text, sections, shown_variables, table
from transload.machine import Platform, Surroundings, Toolkit, Unknown, Variables

# Chassis types of SMBIOS: portable, laptop, notebook, sub-notebook, convertible, detachable.
_LAPTOPS = frozenset({8, 9, 10, 14, 31, 32})

_PRIME = {"on": "nvidia", "off": "intel", "integrated": "intel", "intel2": "intel"}
PROGRAMS = ("/usr/bin", "/usr/local/bin", "/bin", "/run/current-system/sw/bin", "/usr/local/nvidia/toolkit")


def platform(host: Host) -> Platform:
    """The operating system and the user. On systems other than Linux only ``uname`` and the user are known."""
    system, kernel, machine = host.uname
    shell = host.environ.get("SHELL", "").rstrip("/").rpartition("/")[2]
    if system != "Linux":
        return Platform(system, machine, kernel, root=host.uid == 0, shell=shell)
    release = pairs(host.text("/etc/os-release") or host.text("/usr/lib/os-release") or "", "=")
    distribution, like = release.get("ID", ""), tuple(release.get("ID_LIKE", "").split())
    # The distribution's own package manager if it is installed, else the first that is.
    known = table("packages")["managers"]
    wanted = [each for name in (distribution, *like) for each in known if name in known[each]["distributions"].split()]
    managers = (each for each in (*wanted, *known) if any(map(host.exists, known[each]["programs"])))
    numbers = host.findall(r"^(?:Groups|Gid):[ \t]*([\d \t]*)$", "/proc/self/status")
    groups = group_names(host)
    chassis = host.text("/sys/class/dmi/id/chassis_type", 64)
    limit = host.findall(r"^Max address space +(\d{1,19})\b", "/proc/self/limits")
    prime = host.line("/etc/prime-discrete") or host.line("/etc/prime/current_type")  # Ubuntu's, openSUSE's
    total, free = memory(host)
    return Platform(
        system,
        machine,
        kernel,
        distribution=distribution,
        distribution_like=like,
        distribution_version=release.get("VERSION_ID", ""),
        distribution_name=release.get("PRETTY_NAME", ""),
        libc=_libc(host),
        package_manager=next(managers, ""),
        shell=shell,
        root=host.uid == 0,
        groups=tuple(sorted(groups.get(number, number) for number in {*" ".join(numbers).split()})),
        laptop=chassis if isinstance(chassis, Unknown) else int_or(chassis.strip(), 0) in _LAPTOPS,
        address_space=int(limit[0]) if limit else None,
        memory=total,
        memory_free=free,
        suspends=int_or(host.line("/sys/power/suspend_stats/success"), 0),
        prime=_PRIME.get(prime, prime),
    )


def _libc(host: Host) -> str:
    """The libc of this process, else of the machine."""
    if host.libc:
        return host.libc
    if any(host.paths("/lib", "ld-musl-", ".so.1")):
        return " ".join(("musl", *host.findall(r"^P:musl\nV:(\d+\.\d+)", "/lib/apk/db/installed")[:1]))
    for folder in (f"/lib/{host.uname[2]}-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib", "/lib"):
        data = host.data(f"{folder}/libc.so.6", 8 << 20)
        if data and (found := re.search(rb"GNU C Library[^\n]{0,80} version (\d+\.\d+)", data)):
            return f"glibc {found[1].decode()}"
    return ""


def group_names(host: Host) -> dict[str, str]:
    """Number → name, from /etc/group: ``grp`` might ask a directory server over the network, which may be down."""
    return {number: name for name, number in host.findall(r"^([^:\n]*):[^:\n]*:([^:\n]*)", "/etc/group")}


# -- file systems mounted where device nodes live, and at the root -----------------------------------------------------

_OCTAL = re.compile(r"\\([0-7]{3})")  # how whitespace in a path is escaped
_MOUNTINFO = 16 << 20  # hosts with many containers have thousands of lines


class Mount(NamedTuple):
    """A line of mountinfo: mount point, type and options; ``detail`` are the options of the file system."""

    point: str
    kind: str
    options: tuple[str, ...] = ()
    detail: str = ""


def mounts(host: Host) -> tuple[Mount, ...]:
    """What is mounted at /, at /dev and below it, in the order of mounting."""
    found = []
    for line in (host.text("/proc/self/mountinfo", _MOUNTINFO) or "").split("\n"):
        fields = line.split(" ", 6)
        if len(fields) == 7 and (fields[4] == "/" or f"{fields[4]}/".startswith("/dev/")):
            kind, _, rest = fields[6].partition("- ")[2].partition(" ")
            point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
            found.append(Mount(point, kind, tuple(fields[5].split(",")), rest.partition(" ")[2]))
    return tuple(found)


def mount_of(found: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount that ``path`` is on: the deepest, and of several at one place the last.

    >>> mount_of((Mount("/", "ext4"), Mount("/dev", "devtmpfs")), "/dev/nvidia0").kind
    'devtmpfs'
    """
    over = [each for each in found if path == each.point or path.startswith(each.point.rstrip("/") + "/")]
    return max(reversed(over), key=lambda each: len(each.point), default=None)


# -- CUDA toolkits, of which nothing is run ----------------------------------------------------------------------------

_LOCAL = "/usr/local"
_JSON = r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+\.\d+(?:\.\d+)?)'
_TEXT = r"CUDA Version (\d+\.\d+(?:\.\d+)?)"
_HEADER = r"^#define\s+CUDA_VERSION\s+(\d{4,6})\b"
_FOLDER = re.compile(r"/cuda-(\d+\.\d+)(?:/|$)")


def toolkit(host: Host) -> Toolkit:
    """The compiler that a build would find first, its version from files next to it, and the folders of toolkits."""
    home = host.environ.get("CUDA_HOME") or host.environ.get("CUDA_PATH") or ""
    homes = [each.rstrip("/") for each in (home, f"{_LOCAL}/cuda") if each.startswith("/")]
    nvcc = host.program("nvcc", (*host.search_path(), *(f"{each}/bin" for each in homes)))
    installed = tuple(path for path in host.paths(_LOCAL, "cuda") if host.is_dir(path))
    return Toolkit(nvcc, next(_toolkit_versions(host, nvcc), "") if nvcc else "", home, installed)


def _toolkit_versions(host: Host, nvcc: str) -> Iterator[str]:
    """The versions of the toolkit of an nvcc: NVIDIA's has a version file, those of Debian and conda a header."""
    path = host.target(nvcc)
    begin = host.data(path, 1024) or b""  # it may be a script that starts the real one
    started = re.search(rb"(/[\w./-]+/bin/nvcc)\b", begin) if begin.startswith(b"#!") else None
    home = (host.target(started[1].decode()) if started else path).removesuffix("/bin/nvcc")
    yield from host.findall(_JSON, f"{home}/version.json")
    yield from host.findall(_TEXT, f"{home}/version.txt")
    debian = ("/usr/include",) if nvcc.startswith("/usr/bin/") else ()
    targets = (host.uname[2], "sbsa") if host.uname[2] == "aarch64" else (host.uname[2],)  # Jetson, Arm servers
    for folder in (f"{home}/include", *(f"{home}/targets/{each}-linux/include" for each in targets), *debian):
        for number in host.findall(_HEADER, f"{folder}/cuda.h", 1 << 16):
            yield cuda_text(int(number))
    yield from _FOLDER.findall(home)


_GVISOR = "Sun Jan 10 15:06:54 PST 2016"  # the constant build date that every release of gVisor reports
_CDI = r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)"
_CONTAINER_TOOLKIT = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")


def surroundings(host: Host) -> Surroundings:
    """The container, scheduler and service of this process, and the evidence for them."""
    around = mounts(host)
    signs: dict[str, tuple[Any, str]] = {}
    for name, value, why in _signs(host, around):
        signs.setdefault(name, (value, why))
    dev = mount_of(around, "/dev/null")
    own_dev = dev is not None and dev.point == "/dev" and dev.kind == "tmpfs"
    devices = set(host.listdir("/dev") or ("unknown",)) - {*table("containers")["private_dev"].split()}
    folders = ("/etc/cdi", "/var/run/cdi", "/run/cdi")
    specifications = (path for at in folders for end in (".yaml", ".json") for path in host.paths(at, end=end))
    drivers = {version for path in specifications for version in host.findall(_CDI, path)}
    toolkit: bool | Unknown = any(host.program(name, PROGRAMS) for name in _CONTAINER_TOOLKIT)
    programs = host.listdir("/usr/bin")
    docker = "snap" if host.exists("/snap/bin/docker") else ""
    for path in ("/usr/bin/docker", "/usr/local/bin/docker"):
        begin = host.data(path, 256)
        if begin and b"podman" not in begin and not host.readlink(path).endswith("/snap"):  # podman-docker is a script
            docker = "installed"
    return Surroundings(
        **{name: value for name, (value, _) in signs.items()},
        selinux={"1": "enforcing", "0": "permissive"}.get(host.line("/sys/fs/selinux/enforce"), ""),
        private_dev=own_dev and not devices,
        cdi=tuple(sorted(drivers)),
        container_toolkit=programs if isinstance(programs, Unknown) else toolkit,
        docker=docker,
        evidence=tuple(why for _, why in signs.values()),
    )


def _signs(host: Host, around: tuple[Mount, ...]) -> Iterator[tuple[str, Any, str]]:
    """Fields of ``Surroundings`` with values and evidence; the first of each field counts."""
    environ, secrets = host.environ, "/var/run/secrets/kubernetes.io"
    kubernetes = f"{secrets} exists" if host.is_dir(secrets) else ""
    if environ.get("KUBERNETES_SERVICE_HOST"):
        kubernetes = "KUBERNETES_SERVICE_HOST is set"
    for kind, why in _containers(host, around):
        yield "container", "container" if kubernetes and kind == "podman" else kind, why  # CRI-O looks like Podman
    if kubernetes:
        yield "container", "container", "Kubernetes runs containers"
        yield "kubernetes", True, kubernetes
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        if environ.get(name):
            yield "slurm", True, f"{name} is set"

    version, words = host.line("/proc/version"), host.line("/proc/cmdline").split()
    if re.search(r"microsoft-standard|wsl2", f"{host.uname[1]} {version}", re.IGNORECASE):
        yield "wsl", 2, "the kernel is that of WSL 2"
    if re.search(r"-Microsoft\b", f"{host.uname[1]} {version}"):
        yield "wsl", 1, "the kernel is that of WSL 1"
    if environ.get("WSL_DISTRO_NAME") and host.exists("/dev/dxg"):  # with a custom kernel
        yield "wsl", 2, "WSL_DISTRO_NAME is set and /dev/dxg exists"
    for kind, names in table("containers")["notebooks"].items():
        yield from (("notebook", kind, f"{name} is set") for name in names if name in environ)
    if _GVISOR in version or "gvisor" in version.lower():
        yield "sandbox", "gvisor", "/proc/version is gVisor's"
    if any("kata-containers" in word or word.startswith("agent.log=") for word in words):
        yield "sandbox", "kata", "the kernel was started by Kata"
    if {"reboot=k", "panic=1"} <= set(words) and not host.is_dir("/sys/class/dmi/id"):
        yield "sandbox", "firecracker", "the kernel was started as Firecracker does, on a board without a name"
    if service := service_of(host):
        yield "service", service, f"/proc/self/cgroup names {service}"


def _containers(host: Host, around: tuple[Mount, ...]) -> Iterator[tuple[str, str]]:
    """Kinds of container and the evidence for each, from the surest to the weakest."""
    signs = table("containers")["signs"]
    yield from ((kind, f"{name} is set") for name, kind in signs["variables"].items() if host.environ.get(name))
    yield from ((kind, f"{path} exists") for path, kind in signs["paths"].items() if host.exists(path))
    # What the container manager declares to us or to the first process of the container.
    first = host.findall(r"(?:^|\0)container=([^\0]*)", "/proc/1/environ")
    declared = (
        (host.environ.get("container", ""), "the variable container is {}"),
        (host.line("/run/systemd/container"), "/run/systemd/container says {}"),
        ("".join(first[:1]), "the variable container of process 1 is {}"),
    )
    for name, why in declared:
        if kind := signs["names"].get(name, name):
            yield kind, why.format(name)
    for path in ("/proc/self/cgroup", "/proc/1/cgroup"):
        if found := re.search(signs["cgroup"], host.text(path, 1 << 14) or ""):
            yield found.lastgroup or "", f"{path} names one of {found.lastgroup}"
    root = mount_of(around, "/") or Mount("/", "")
    if root.kind in ("overlay", "fuse-overlayfs", "aufs") and (found := re.search(signs["layer"], root.detail)):
        yield found.lastgroup or "", f"/ is a layer of {found.lastgroup}"


def service_of(host: Host) -> str:
    """The system service of systemd that this process belongs to; empty if it is in none.

    ``user@1000.service`` is a user's session, where terminals of a desktop are services too.
    """
    for path in host.findall(r"^[^:\n]*:(?:name=systemd)?:(.*)", "/proc/self/cgroup"):
        units = [step for step in path.split("/") if step.endswith(".service")]
        if units and "/user@" not in path:
            return str(units[0])
    return ""


# -- environment variables that matter, and the files that set them ----------------------------------------------------


_LONGEST = 1 << 14
_FILE = 256 << 10
_MOST = 8  # files that set one variable
_NOT_SET = re.compile(r"\s*(?:#|;|//|alias\b|echo\b|unset\b)")  # lines that set no variable


def variables(host: Host) -> Variables:
    """The values that may be shown, and where those that can break CUDA or torch are set: ``/etc/environment:3``."""
    deciding, shown = shown_variables()
    values = {name: host.environ[name][:_LONGEST] for name in sorted(shown & host.environ.keys())}
    names = deciding & values.keys()
    origins: dict[str, list[str]] = {}
    setting = _setting(names)
    for path in dict.fromkeys(_files(host)) if names else ():
        text = host.text(path, _FILE) or ""
        for number, line in enumerate(text.split("\n") if any(name in text for name in names) else (), 1):
            for found in () if _NOT_SET.match(line) else setting.finditer(line):
                origins.setdefault(next(filter(None, found.groups())), []).append(f"{path}:{number}")

    # CUDA's cache: its folder, or the nearest parent, in which CUDA would create it.
    problem = ""
    if host.uname[0] == "Linux" and host.environ.get("CUDA_CACHE_DISABLE") != "1":
        home = host.environ.get("HOME")
        cache = host.environ.get("CUDA_CACHE_PATH") or (f"{home}/.nv/ComputeCache" if home else "")
        folder = cache if cache.startswith("/") else f"{host.cwd}/{cache}"
        while len(folder) > 1 and not host.exists(folder):
            folder = folder.rpartition("/")[0] or "/"
        if not cache:
            problem = "neither HOME nor CUDA_CACHE_PATH is set"
        elif not host.is_dir(folder):
            problem = f"{folder}: not a folder"
        elif not os.access(real := host.real(folder), os.W_OK | os.X_OK):
            read_only = os.statvfs(real).f_flag & os.ST_RDONLY
            problem = f"{folder}: {'read-only file system' if read_only else 'EACCES'}"
    return Variables(values, {name: tuple(found[:_MOST]) for name, found in sorted(origins.items())}, problem)


def _setting(names: frozenset[str]) -> re.Pattern[str]:
    """Match ``NAME=`` of shells, systemd and Dockerfiles, ``setenv NAME``, ``set -gx NAME``, ``NAME DEFAULT=`` of PAM.

    >>> _setting(frozenset({"CUDA_VISIBLE_DEVICES"})).search("export A=1 CUDA_VISIBLE_DEVICES=0")[1]
    'CUDA_VISIBLE_DEVICES'
    """
    name = f"(?:{'|'.join(sorted(names))})"
    words = r"(?:setenv|ENV|set(?:\s+-\S+)+)"
    return re.compile(
        rf"(?<![\w$./{{-])({name})=|^\s*{words}\s+({name})\s|^({name})\s+(?:DEFAULT|OVERRIDE)=|\"({name})\":"
    )


def _files(host: Host) -> Iterator[str]:
    """The files that may set a variable, from ``variables.md``."""
    named = {**host.environ, "PWD": host.cwd, "UNIT": service_of(host)}
    *_, files = sections("variables").values()
    for pattern in " ".join(files).split():
        # an unknown variable becomes a character that no path contains
        path = re.sub(r"\$(\w+)", lambda name: named.get(name[1], "").rstrip("/") or "\0", pattern)
        if path.startswith("/"):
            yield from host.glob(path)
