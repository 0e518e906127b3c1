"""The machine around the interpreter: the operating system, containers, variables, cards, and the kernel driver."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from transload import machine as facts
from transload.diagnose.children import in_fork
from transload.diagnose.host import Host, int_or, memory, pairs
from transload.diagnose.probes import on_windows
from transload.diagnose.tables import cuda_text, is_listed, table, word_lists
from transload.frozen import NamedTuple
from transload.machine import AMD, NVIDIA, Unknown

# Chassis types of SMBIOS: portable, laptop, notebook, sub-notebook, convertible, detachable.
_LAPTOPS = frozenset({8, 9, 10, 14, 31, 32})
_PRIME = {"on": "nvidia", "off": "intel", "integrated": "intel", "intel2": "intel"}
PROGRAMS = ("/usr/bin", "/usr/local/bin", "/bin", "/run/current-system/sw/bin", "/usr/local/nvidia/toolkit")


def platform(host: Host) -> facts.Platform:
    """The operating system and the user."""
    if host.windows:
        return on_windows.platform(host)
    system, kernel, machine = host.uname
    shell = host.environ.get("SHELL", "").rstrip("/").rpartition("/")[2]
    if system == "Darwin":
        pattern = r"<key>ProductVersion</key>\s*<string>([\d.]{1,20})</string>"
        version = "".join(host.findall(pattern, "/System/Library/CoreServices/SystemVersion.plist")[:1])
        return facts.Platform(
            system,
            machine,
            kernel,
            distribution_version=version,
            distribution_name=f"macOS {version}".strip(),
            shell=shell,
            root=host.uid == 0,
            memory=host.sysctl("hw.memsize"),
            translator="Rosetta" if host.sysctl("sysctl.proc_translated") == 1 else "",
        )
    if system != "Linux":
        return facts.Platform(system, machine, kernel, root=host.uid == 0, shell=shell)
    release = pairs(host.text("/etc/os-release") or host.text("/usr/lib/os-release") or "", "=")
    distribution, like = release.get("ID", ""), tuple(release.get("ID_LIKE", "").split())
    # The distribution's own package manager if it is installed, else the first that is.
    listed = table("packages")["managers"]
    wanted = [key for name in (distribution, *like) for key in listed if name in listed[key]["distributions"].split()]
    managers = (key for key in (*wanted, *listed) if any(map(host.exists, listed[key]["programs"])))
    numbers = host.findall(r"^(?:Groups|Gid):[ \t]*([\d \t]*)$", "/proc/self/status")
    groups = group_names(host)
    chassis = host.text("/sys/class/dmi/id/chassis_type", 64)
    limit = host.findall(r"^Max address space +(\d{1,19})\b", "/proc/self/limits")
    prime = host.line("/etc/prime-discrete") or host.line("/etc/prime/current_type")  # Ubuntu's, openSUSE's
    total, free = memory(host)
    return facts.Platform(
        system,
        machine,
        kernel,
        distribution=distribution,
        distribution_like=like,
        distribution_version=release.get("VERSION_ID", ""),
        distribution_name=release.get("PRETTY_NAME", ""),
        libc=host.libc or _libc(host),
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
    if any(host.paths("/lib", "ld-musl-", ".so.1")):
        return " ".join(("musl", *host.findall(r"^P:musl\nV:(\d+\.\d+)", "/lib/apk/db/installed")[:1]))
    for folder in (f"/lib/{host.uname[2]}-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib", "/lib"):
        data = host.data(f"{folder}/libc.so.6", 8 << 20)
        if data and (stated := re.search(rb"GNU C Library[^\n]{0,80} version (\d+\.\d+)", data)):
            return f"glibc {stated[1].decode()}"
    return ""


def group_names(host: Host) -> dict[str, str]:
    """Number → name, from /etc/group: ``grp`` might ask a directory server over the network, which may be down."""
    return {number: name for name, number in host.findall(r"^([^:\n]*):[^:\n]*:([^:\n]*)", "/etc/group")}


# -- file systems mounted where device nodes live, and at the root -----------------------------------------------------

_MOUNTINFO = 16 << 20  # hosts with many containers have thousands of lines


class Mount(NamedTuple):
    """A line of mountinfo: mount point, type and options; ``detail`` are the options of the file system."""

    point: str
    kind: str
    options: tuple[str, ...] = ()
    detail: str = ""


def mounts(host: Host) -> tuple[Mount, ...]:
    """What is mounted at /, at /dev and below it, in the order of mounting."""
    mounted = []
    for line in (host.text("/proc/self/mountinfo", _MOUNTINFO) or "").split("\n"):
        fields = line.split(" ", 6)
        if len(fields) == 7 and (fields[4] == "/" or f"{fields[4]}/".startswith("/dev/")):
            kind, _, rest = fields[6].partition("- ")[2].partition(" ")
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # escaped whitespace
            mounted.append(Mount(point, kind, tuple(fields[5].split(",")), rest.partition(" ")[2]))
    return tuple(mounted)


def mount_of(mounted: tuple[Mount, ...], path: str) -> Mount:
    """The mount that ``path`` is on: the deepest, and of several at one point the last; an empty one if unknown."""
    over = [mount for mount in mounted if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(over), key=lambda mount: len(mount.point), default=Mount("", ""))


# -- CUDA toolkits, of which nothing is run ----------------------------------------------------------------------------


def toolkit(host: Host) -> facts.Toolkit:
    """The compiler that a build would find first, its version from files next to it, and the folders of toolkits."""
    home = host.environ.get("CUDA_HOME") or host.environ.get("CUDA_PATH") or ""
    home = host.slashed(home)
    homes = [folder.rstrip("/") for folder in (home, "/usr/local/cuda") if host.is_absolute(folder)]
    nvcc = host.program("nvcc", (*host.search_path(), *(f"{folder}/bin" for folder in homes)))
    root, start = "/usr/local", "cuda"
    if host.windows:
        root = f"{host.slashed(host.environ.get('PROGRAMFILES', 'C:/Program Files'))}/NVIDIA GPU Computing Toolkit/CUDA"
        start = "v"
    installed = tuple(path for path in host.paths(root, start) if host.is_dir(path))
    return facts.Toolkit(nvcc, next(_toolkit_versions(host, nvcc), "") if nvcc else "", home, installed)


def _toolkit_versions(host: Host, nvcc: str) -> Iterator[str]:
    """The versions of the toolkit of an nvcc: NVIDIA's has a version file, those of Debian and conda a header."""
    path = host.target(nvcc)
    begin = host.data(path, 1024) or b""  # it may be a script that starts the real one
    started = re.search(rb"(/[\w./-]+/bin/nvcc)\b", begin) if begin.startswith(b"#!") else None
    home = (host.target(started[1].decode()) if started else path).removesuffix(".exe").removesuffix("/bin/nvcc")
    yield from host.findall(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+\.\d+(?:\.\d+)?)', f"{home}/version.json")
    yield from host.findall(r"CUDA Version (\d+\.\d+(?:\.\d+)?)", f"{home}/version.txt")
    debian = ("/usr/include",) if nvcc.startswith("/usr/bin/") else ()
    targets = (host.uname[2], "sbsa") if host.uname[2] == "aarch64" else (host.uname[2],)  # Jetson, Arm servers
    for folder in (f"{home}/include", *(f"{home}/targets/{target}-linux/include" for target in targets), *debian):
        for number in host.findall(r"^#define\s+CUDA_VERSION\s+(\d{4,6})\b", f"{folder}/cuda.h", 1 << 16):
            yield cuda_text(int(number))
    yield from re.findall(r"/(?:cuda-|CUDA/v)(\d+\.\d+)(?:/|$)", home)


# -- the container, scheduler and service around the process -----------------------------------------------------------

_GVISOR = "Sun Jan 10 15:06:54 PST 2016"  # the constant build date that every release of gVisor reports
_CONTAINER_TOOLKIT = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")


def surroundings(host: Host) -> facts.Surroundings:
    """The container, scheduler and service of this process, and the evidence for them. Windows has none of these."""
    if host.windows:
        return facts.Surroundings()
    mounted = mounts(host)
    signs: dict[str, Any] = {}
    evidence = []
    for name, value, why in _signs(host, mounted):
        if name not in signs:
            signs[name] = value
            evidence.append(why)
    if "kubernetes" in signs and signs["container"] == "podman":
        signs["container"] = "container"  # CRI-O looks like Podman
    dev = mount_of(mounted, "/dev/null")
    devices = set(host.listdir("/dev") or ("unknown",)) - {*table("containers")["private_dev"].split()}
    folders = ("/etc/cdi", "/var/run/cdi", "/run/cdi")
    specifications = (path for at in folders for end in (".yaml", ".json") for path in host.paths(at, end=end))
    drivers = (host.findall(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", path) for path in specifications)
    toolkit = any(host.program(name, PROGRAMS) for name in _CONTAINER_TOOLKIT)
    programs = host.listdir("/usr/bin")
    docker = "snap" if host.exists("/snap/bin/docker") else ""
    for path in ("/usr/bin/docker", "/usr/local/bin/docker"):
        begin = host.data(path, 256)
        if begin and b"podman" not in begin and not host.readlink(path).endswith("/snap"):  # podman-docker is a script
            docker = "installed"
    return facts.Surroundings(
        **signs,
        selinux={"1": "enforcing", "0": "permissive"}.get(host.line("/sys/fs/selinux/enforce"), ""),
        private_dev=(dev.point, dev.kind) == ("/dev", "tmpfs") and not devices,
        cdi=tuple(sorted({version for versions in drivers for version in versions})),
        container_toolkit=programs if isinstance(programs, Unknown) else toolkit,
        docker=docker,
        evidence=tuple(evidence),
    )


def _signs(host: Host, mounted: tuple[Mount, ...]) -> Iterator[tuple[str, Any, str]]:
    """Fields of ``Surroundings`` with values and evidence, the surest first; the first value of each field counts."""
    environ, signs = host.environ, table("containers")["signs"]
    yield from (("container", kind, f"{name} is set") for name, kind in signs["variables"].items() if environ.get(name))
    yield from (("container", kind, f"{path} exists") for path, kind in signs["paths"].items() if host.exists(path))
    # What the container manager declares to us or to the first process of the container.
    first = host.findall(r"(?:^|\0)container=([^\0]*)", "/proc/1/environ")
    declared = (
        (environ.get("container", ""), "the variable container is {}"),
        (host.line("/run/systemd/container"), "/run/systemd/container says {}"),
        ("".join(first[:1]), "the variable container of process 1 is {}"),
    )
    for name, why in declared:
        if kind := signs["names"].get(name, name):
            yield "container", kind, why.format(name)
    for path in ("/proc/self/cgroup", "/proc/1/cgroup"):
        if match := re.search(signs["cgroup"], host.text(path, 1 << 14) or ""):
            yield "container", match.lastgroup, f"{path} names a container ({match.lastgroup})"
    root = mount_of(mounted, "/")
    if root.kind in ("overlay", "fuse-overlayfs", "aufs") and (match := re.search(signs["layer"], root.detail)):
        yield "container", match.lastgroup, f"/ is a layer of {match.lastgroup}"

    secrets = "/var/run/secrets/kubernetes.io"
    kubernetes = f"{secrets} exists" if host.is_dir(secrets) else ""
    if environ.get("KUBERNETES_SERVICE_HOST"):
        kubernetes = "KUBERNETES_SERVICE_HOST is set"
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
        yield "sandbox", "firecracker", "the kernel was started as Firecracker starts it, on a board without a name"
    if service := service_of(host):
        yield "service", service, f"/proc/self/cgroup names {service}"


def service_of(host: Host) -> str:
    """The system service of systemd that this process belongs to; empty if it is in none."""
    for path in host.findall(r"^[^:\n]*:(?:name=systemd)?:(.*)", "/proc/self/cgroup"):
        units = [step for step in path.split("/") if step.endswith(".service")]
        if units and "/user@" not in path:  # a user's session, where terminals of a desktop are services too
            return str(units[0])
    return ""


# -- environment variables that matter, and the files that set them ----------------------------------------------------

_LONGEST = 1 << 14
_FILE = 256 << 10
_MOST_ORIGINS = 8  # the most places listed for one variable
_NOT_SET = re.compile(r"\s*(?:#|;|//|alias\b|echo\b|unset\b)")  # lines that do not set a variable


def variables(host: Host) -> facts.Variables:
    """The values that may be shown, and where those that can break CUDA or torch are set: ``/etc/environment:3``."""
    deciding, others, files, _ = word_lists().values()
    shown = (deciding.keys() | others) & host.environ.keys()
    values = {name: host.environ[name][:_LONGEST] for name in sorted(shown)}
    names = deciding.keys() & values.keys()
    if host.windows:
        return facts.Variables(values, on_windows.origins(host, names))
    # NAME= of shells, systemd and Dockerfiles, setenv NAME, set -gx NAME, NAME DEFAULT= of PAM
    name = f"(?:{'|'.join(sorted(names))})"
    words = r"(?:setenv|ENV|set(?:\s+-\S+)+)"
    setting = re.compile(
        rf"(?<![\w$./{{-])({name})=|^\s*{words}\s+({name})\s|^({name})\s+(?:DEFAULT|OVERRIDE)=|\"({name})\":"
    )
    # The files that may set one. An unknown variable in their names becomes a character that no path contains.
    environ = {**host.environ, "PWD": host.cwd, "UNIT": service_of(host)}

    def value(variable: re.Match[str]) -> str:
        return environ.get(variable[1], "").rstrip("/") or "\0"

    places = (re.sub(r"\$(\w+)", value, pattern) for pattern in files)
    paths = (path for place in places if place.startswith("/") for path in host.glob(place))
    origins: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths) if names else ():
        text = host.text(path, _FILE) or ""
        for number, line in enumerate(text.split("\n") if any(name in text for name in names) else (), 1):
            for assignment in () if _NOT_SET.match(line) else setting.finditer(line):
                origins.setdefault(next(filter(None, assignment.groups())), []).append(f"{path}:{number}")

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
    first = {name: tuple(lines[:_MOST_ORIGINS]) for name, lines in sorted(origins.items())}
    return facts.Variables(values, first, problem)


# -- the cards on the buses --------------------------------------------------------------------------------------------

_BUS = "/sys/bus/pci/devices"
_MEMORY, _UNSET = 0x00000200, 0x20000000  # IORESOURCE_MEM, IORESOURCE_UNSET of the kernel


def hardware(host: Host) -> facts.Hardware:
    """The cards on the PCI bus, and GPUs that are not on it: Windows' under WSL, and those of a Jetson."""
    if host.windows:
        return on_windows.hardware(host)
    compatible = host.text("/proc/device-tree/compatible", 4096) or ""
    release = host.line("/etc/nv_tegra_release").lstrip("# ").partition(", GCID")[0]
    tegra = ""
    if release or "nvidia,tegra" in compatible or host.uname[1].endswith("-tegra"):
        tegra = ", ".join(part for part in (host.line("/proc/device-tree/model"), release) if part) or "Tegra"
    on_linux = host.uname[0] == "Linux"
    addresses = host.listdir(_BUS) if on_linux else Unknown(f"the PCI bus is not examined on {host.uname[0]}")
    devices = []
    for address in addresses or ():
        folder = f"{_BUS}/{address}"
        vendor, kind = _hex(host.line(f"{folder}/vendor")), _hex(host.line(f"{folder}/class"))
        if vendor != NVIDIA and kind >> 16 not in (0x03, 0x12):  # display, accelerator
            continue
        power = host.line(f"{folder}/power_state")
        # Reading the configuration space would wake a suspended card, so it is left alone. Of others only four bytes
        # are read: every word comes from the card, and a page takes 20 ms in a virtual machine.
        asleep = power == "D3cold" or host.line(f"{folder}/power/runtime_status") == "suspended"
        begin = host.data(f"{folder}/config", 4) if vendor == NVIDIA and not asleep else b""
        bars = []  # sizes of the memory regions in the first six lines: start, end, flags
        for line in (host.text(f"{folder}/resource", 4096) or "").split("\n")[:6]:
            start, end, flags = (_hex(word) for word in line.split()) if line.count(" ") == 2 else (0, 0, 0)
            if flags & _MEMORY:
                bars.append(max(0, end - start + 1) if start and not flags & _UNSET else 0)
        card = facts.PciDevice(
            address,
            vendor,
            _hex(host.line(f"{folder}/device")),
            kind,
            driver=host.readlink(f"{folder}/driver").rpartition("/")[2],
            power=power,
            bars=tuple(bars),
            dead=begin == b"\xff\xff\xff\xff",
        )
        devices.append(card)
    pci = addresses if isinstance(addresses, Unknown) else tuple(devices)
    return facts.Hardware(pci, dxg=host.exists("/dev/dxg"), tegra=tegra)


def _hex(text: str) -> int:
    """A hexadecimal number of sysfs, such as ``0x10de``; 0 for anything else."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else 0


# -- NVIDIA's kernel driver: whether it is loaded, and what could keep it from loading ---------------------------------

_PROC = "/proc/driver/nvidia"
_MODULES = re.compile(r"nvidia(?:_\w+)?|nouveau|nova_\w+|nvgpu|vfio_pci|dxgkrnl|amdgpu|i915|xe|habanalabs", re.ASCII)
_MODULE_ROOTS = ("/lib/modules", "/usr/lib/modules", "/run/booted-system/kernel-modules/lib/modules")
# A line of modules.dep. Debian adds the flavour to the name: nvidia-current.ko, nvidia-tesla-470.ko.
_OBJECT = re.compile(rb"^(\S*/nvidia(?:-(?:current|open|tesla|legacy)[\w-]*)?\.ko(?:\.\w+)?):", re.MULTILINE)
_FIRMWARE = ("/lib/firmware", "/usr/lib/firmware", "/lib/firmware/updates", "/run/current-system/firmware")
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_MOST = 64  # the most cards, kernels, and nodes of a folder: every MIG instance of every card can have its own
_DEPENDENCIES = 8 << 20  # a modules.dep has about one megabyte
_STANZA = 1 << 14  # characters about one package in dpkg's status
PATIENCE = 0.5
"""Seconds for the files of all cards, and for the nodes. A broken driver may never answer. A refusal is immediate; an
open that takes longer was allowed, and initializes a card."""


def kernel(host: Host) -> facts.Kernel:
    """What the kernel reports about NVIDIA's driver. Nothing is known on macOS."""
    if host.windows:
        return on_windows.kernel(host)
    if host.uname[0] != "Linux":
        return facts.Kernel(loaded=Unknown(f"not examined on {host.uname[0]}"))
    banner, listed = host.text(f"{_PROC}/version", 4096) or "", host.text("/proc/modules")
    names = {line.partition(" ")[0] for line in (listed or "").split("\n")}
    modules = tuple(sorted(name for name in names if _MODULES.fullmatch(name)))
    loaded: bool | Unknown = host.is_dir("/sys/module/nvidia") or "NVRM version" in banner or "nvidia" in modules
    if not loaded and isinstance(listed, Unknown) and not host.listdir("/sys/module"):
        loaded = listed  # some containers hide all three
    stated = re.search(r"\b(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)\b", banner.partition("\n")[0])
    version = host.line("/sys/module/nvidia/version") or (stated[1] if stated else "")

    # Drivers have firmware since 465. Without any firmware folder this is a container, which uses the host's.
    firmware: bool | Unknown = Unknown("the driver's version is not known")
    if version:
        configured = host.line("/sys/module/firmware_class/parameters/path")
        folders = [folder for folder in (configured, *_FIRMWARE) if folder and host.is_dir(f"{folder}/nvidia")]
        has_firmware = any(host.is_dir(f"{folder}/nvidia/{version}") for folder in folders)
        firmware = has_firmware if folders else Unknown("/lib/firmware/nvidia does not exist")

    data, entries = host.data(_SECURE_BOOT, 16), host.listdir("/sys/firmware")
    secure_boot: bool | Unknown = Unknown(f"{_SECURE_BOOT} is too short")
    if isinstance(data, Unknown):
        # A container sees an empty folder. A machine that did not boot with EFI has other things in it.
        secure_boot = False if entries and "efi" not in entries else data
    elif len(data) > 4:
        secure_boot = data[4] == 1

    # The kernels with a driver, according to depmod: modprobe loads nothing else. The file must exist.
    root = next((root for root in _MODULE_ROOTS if host.is_dir(root)), _MODULE_ROOTS[0])
    releases, built = host.listdir(root), []
    for release in (releases or ())[:_MOST]:
        folder = f"{root}/{release}"
        dependencies = host.data(f"{folder}/modules.dep", _DEPENDENCIES) or b""
        objects = (match[1].decode("utf-8", "surrogateescape") for match in _OBJECT.finditer(dependencies))
        if any(host.exists(path if path.startswith("/") else f"{folder}/{path}") for path in objects):
            built.append(release)

    # The driver's own list of cards. A broken driver may hang while it is read.
    addresses = (host.listdir(f"{_PROC}/gpus") or ())[:_MOST]
    questions = [lambda at=address: host.text(f"{_PROC}/gpus/{at}/information", 1 << 14) or "" for address in addresses]
    gpus = []
    for address, text in zip(addresses, in_fork(questions, PATIENCE), strict=True):
        values = pairs(text or "", ":")
        minor = values.get("Device Minor", "")
        gpu = facts.ProcGpu(
            address,
            model=values.get("Model", ""),
            minor=int(minor) if re.fullmatch(r"\d{1,6}", minor, re.ASCII) else None,
            firmware=values.get("GPU Firmware", ""),
            excluded=values.get("GPU Excluded") == "Yes",
        )
        gpus.append(gpu)

    line = host.text("/proc/cmdline", 1 << 14)
    daemons, stuck = daemons_and_stuck(host) if loaded else ((), ())
    mps = host.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108  where the daemon puts it
    return facts.Kernel(
        loaded=loaded,
        version=version,
        flavour="open" if "Open Kernel Module" in banner else "proprietary" if "Kernel Module" in banner else "",
        modules=modules,
        built_for=releases if isinstance(releases, Unknown) else tuple(built),
        secure_boot=secure_boot,
        uvm_disable_hmm=host.line("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"),
        kaslr=line if isinstance(line, Unknown) else "nokaslr" not in line.split(),
        parameters=pairs(host.text(f"{_PROC}/params", 1 << 16) or "", ":"),
        gpus=tuple(gpus),
        firmware=firmware,
        log=kernel_log(host),
        daemons=daemons,
        stuck=stuck,
        fabric_manager=_fabric_manager(host),
        mps_directory=mps if host.is_dir(mps) else "",
    )


def _fabric_manager(host: Host) -> str:
    """The version of the fabric manager: from the list of packages, else from the program, if that names only one."""
    program = host.program("nv-fabricmanager", PROGRAMS)
    if program or any(host.paths("/var/lib/dpkg/info", "nvidia-fabricmanager", ".list")):
        status = host.text("/var/lib/dpkg/status", 64 << 20) or ""
        for start in re.finditer(r"^Package: nvidia-fabricmanager(?:-\d+)?$", status, re.MULTILINE):
            stanza = status[start.start() : start.start() + _STANZA].partition("\n\n")[0]
            stated = re.search(r"^Version: (?:\d+:)?(\d+(?:\.\d+)+)", stanza, re.MULTILINE)
            if stated and re.search(r"^Status: .* installed$", stanza, re.MULTILINE):
                return stated[1]
    data = host.data(program, 32 << 20) if program else b""
    versions = set(re.findall(rb"\b\d{3}\.\d{2,3}\.\d{2}\b", data or b""))
    return versions.pop().decode() if len(versions) == 1 else ""


# -- the kernel log ----------------------------------------------------------------------------------------------------

_WORDS = ("NVRM", "nvidia", "nouveau", "Xid", "nova_core", "fallen off the bus", "request_free_mem_region")
_NOISE = re.compile(
    r"audit: .*apparmor=.(?:STATUS|ALLOWED)|ommand line:|input: .*HDMI|systemd\[\d+\]:|\]: segfault at |\btraps: "
)
_BEFORE = re.compile(r"^(?:<\d+>)?(?:.{0,80}? kernel: )?(?:\[ *[\d.]+\] ?)?")
_LINES = 40
_TAIL = 512 << 10  # bytes: most ring buffers are smaller, and log files may be huge
_LINE = 1 << 11  # characters: the kernel itself writes at most half of that at once


def kernel_log(host: Host) -> tuple[str, ...] | Unknown:
    """The last messages about a GPU since boot, each once, without time and host: from the kernel or a log file."""
    log = host.kernel_ring(_TAIL)
    booted = host.findall(r"^btime (\d{1,12})$", "/proc/stat")
    for path in ("/var/log/kern.log", "/var/log/dmesg", "/var/log/messages") if isinstance(log, Unknown) else ():
        status = host.stat(path)
        if isinstance(status, Unknown) or status.st_mtime < int(booted[0] if booted else 0):
            continue  # written before the last boot
        if data := host.data(path, _TAIL, max(0, status.st_size - _TAIL)):
            text = data.decode("utf-8", "replace")
            log = text[max(text.rfind("Linux version "), 0) :]
            break
    if isinstance(log, Unknown):
        return log
    lines = (line for line in log.split("\n") if any(word in line for word in _WORDS) and not _NOISE.search(line))
    messages = [_BEFORE.sub("", line[:_LINE].strip(), count=1) for line in lines]
    newest = tuple(dict.fromkeys(reversed(messages)))[:_LINES]  # the last one of equal messages is kept
    return newest[::-1]


# -- other processes that use a GPU ------------------------------------------------------------------------------------

_DAEMONS = (
    *("nv-fabricmanager", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    *("nvidia-gridd",),
)
_COMM = 15  # characters of a process name that the kernel keeps: the same for both daemons of MPS
_STAT = re.compile(r"\d+ \((.*)\) (\S)", re.DOTALL)
_MOST_PROCESSES = 4096
_MOST_FILES = 256


def daemons_and_stuck(host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The running daemons, and the processes in uninterruptible sleep that wait for an NVIDIA device."""

    def name_and_state(folder: str) -> tuple[str, str]:
        fields = _STAT.match(host.text(f"{folder}/stat", 512) or "")
        return (fields[1], fields[2]) if fields else ("", "")

    def waits_for_nvidia(folder: str) -> bool:
        """Whether its kernel stack shows that it waits in the driver, or, if that is hidden, it has a device open."""
        if stack := host.text(f"{folder}/stack", 1 << 14):
            return "[nvidia" in stack
        if re.match(r"_*(?:nv|uvm|rm_|os_acquire)", host.line(f"{folder}/wchan")):
            return True
        files = (host.listdir(f"{folder}/fd") or ())[:_MOST_FILES]
        return any(host.readlink(f"{folder}/fd/{number}").startswith("/dev/nvidia") for number in files)

    numbers = [name for name in host.listdir("/proc") or () if name.isascii() and name.isdigit()]
    running, stuck = set(), []
    for number in numbers[:_MOST_PROCESSES]:
        folder = f"/proc/{number}"
        name, state = name_and_state(folder)
        alike = [daemon for daemon in _DAEMONS if name == daemon[:_COMM]] if state not in ("Z", "X") else []
        if len(alike) > 1 and state != "D":  # reading the command line of a hanging process may hang as well
            program = (host.text(f"{folder}/cmdline", 4096) or "").partition("\0")[0].rpartition("/")[2]
            alike = [program] if program in alike else alike
        running.update(alike[:1])
        if state == "D" and name_and_state(folder)[1] == "D" and waits_for_nvidia(folder):
            stuck.append(f"{name} ({number})")
    return tuple(name for name in _DAEMONS if name in running), tuple(stuck)


# -- device nodes ------------------------------------------------------------------------------------------------------

_NAMES = re.compile(r"nvidia\d+|nvidiactl|nvidia-(?:uvm|uvm-tools|modeset|nvswitchctl|nvlink)|dxg|nvmap|nvhost-.*|kfd")
_MAJORS = re.compile(r"^ *(\d{1,4}) (nvidia\S*|kfd|drm|accel)$", re.MULTILINE)
_CGROUP = r"^\d+:(?:\w+,)*devices(?:,\w+)*:(/.*)$"


def nodes(host: Host) -> facts.Nodes:
    """The nodes of NVIDIA's driver and of other compute drivers, and their device numbers."""
    if host.uname[0] != "Linux":
        return facts.Nodes()
    present = [f"/dev/{name}" for name in host.listdir("/dev") or () if _NAMES.fullmatch(name)]
    for folder, start in (("/dev/nvidia-caps", "nvidia-cap"), ("/dev/dri", "renderD"), ("/dev/accel", "accel")):
        present += tuple(host.paths(folder, start))[:_MOST]
    statuses = {path: host.stat(path) for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", *present)}
    # Cards are opened last: initializing one takes a while.
    existing = sorted(filter(statuses.get, statuses), key=lambda path: bool(re.fullmatch(r"/dev/nvidia\d+", path)))
    answers = in_fork([lambda path=path: host.open_error(path) for path in existing], PATIENCE)  # type: ignore[misc]
    errors = dict(zip(existing, answers, strict=True))
    groups, mounted = group_names(host), mounts(host)
    listed = []
    for path, status in statuses.items():
        nodev = "nodev" in mount_of(mounted, path).options
        if isinstance(status, Unknown):
            kind = "link" if host.readlink(path) else ""
            listed.append(facts.Node(path, bool(kind), kind, mode=0, error="ENOENT", nodev=nodev))
            continue
        mode, device, error = status.st_mode, getattr(status, "st_rdev", 0), errors[path]
        if isinstance(error, Unknown):
            error = "" if os.access(host.real(path), os.R_OK | os.W_OK) else "EACCES"
        elif error == "EACCES" and "/nvidia-caps/" in path and mode & stat.S_IROTH:
            error = ""  # the driver only reads these
        node = facts.Node(
            path,
            kind="char" if stat.S_ISCHR(mode) else "directory" if stat.S_ISDIR(mode) else "file",
            mode=stat.S_IMODE(mode),
            uid=status.st_uid,
            gid=status.st_gid,
            group=groups.get(str(status.st_gid), ""),
            major=os.major(device),
            minor=os.minor(device),
            error=error,
            nodev=nodev,
        )
        listed.append(node)

    characters = (host.text("/proc/devices", 1 << 16) or "").partition("Block devices")[0]
    majors = {name: int(number) for number, name in _MAJORS.findall(characters)}
    if "nvidia-frontend" in majors:  # its name in drivers before 550
        majors = {"nvidia": majors["nvidia-frontend"], "nvidiactl": majors["nvidia-frontend"]} | majors

    # cgroup v1 has a list of rules; those of v2 are a BPF program that only root can see.
    folders = [path.rstrip("/") for path in (*host.findall(_CGROUP, "/proc/self/cgroup")[:1], "/")]
    lists = (host.text(f"/sys/fs/cgroup/devices{folder}/devices.list", 1 << 14) for folder in folders)
    rules = next((text for text in lists if isinstance(text, str)), "")
    allowed = tuple(line.strip() for line in rules.split("\n") if line.strip())
    return facts.Nodes(tuple(listed), majors, allowed)


# -- accelerators of other vendors, each with the torch build it needs -------------------------------------------------

_PROPERTY = r"^(simd_count|gfx_target_version|location_id|domain) (\d{1,12})$"
# Integrated graphics of AMD: Raven, Renoir, Van Gogh, Rembrandt, Raphael, Phoenix, Strix.
_APU = re.compile(r"gfx(?:90[29c]|103[3567]|1103|115\d)")
_INTEL, _HABANA, _GOOGLE = 0x8086, 0x1DA3, 0x1AE0


def accelerators(host: Host, on_bus: facts.Hardware) -> tuple[facts.Accelerator, ...]:
    """Accelerators other than NVIDIA's, the usable ones first."""
    listed, cards = [], on_bus.pci or ()
    if host.uname[0] == "Darwin" and host.uname[2] == "arm64":
        listed.append(facts.Accelerator("mps", "Apple GPU", usable=True, integrated=True))

    # The GPUs of AMD's compute driver, then cards on the bus that it does not list.
    ready, driven = host.exists("/dev/kfd"), set()
    for folder in host.paths("/sys/class/kfd/kfd/topology/nodes"):
        values = {name: int(value) for name, value in host.findall(_PROPERTY, f"{folder}/properties")}
        if values.get("simd_count"):
            version, place = values.get("gfx_target_version", 0), values.get("location_id", 0)
            # 90402 is gfx942, 90010 is gfx90a
            gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
            address = f"{values.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            driven.add(address)
            name = host.line(f"{_BUS}/{address}/product_name") or "AMD GPU"
            listed.append(facts.Accelerator("rocm", name, gfx, usable=ready, integrated=bool(_APU.fullmatch(gfx))))

    ids = {card.address: f"{card.vendor:04x}:{card.device:04x}" for card in cards}
    unlisted = [card for card in cards if card.vendor == AMD and card.address not in driven]
    driven_by_windows = {card.address for card in cards if host.windows and on_windows.has_own_driver(card)}
    for card in unlisted:
        usable = card.address in driven_by_windows
        listed.append(facts.Accelerator("rocm", card.name or "AMD GPU", ids[card.address], usable=usable))

    # Intel's are usable only with both parts of the driver: the kernel's, and the Level Zero library.
    intel = [card for card in cards if card.vendor == _INTEL]
    folders = (f"/usr/lib/{host.uname[2]}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
    library = bool(intel) and any(any(host.paths(folder, "libze_intel_gpu.so")) for folder in folders)
    for card in intel:
        usable = card.address in driven_by_windows or (library and card.driver in ("xe", "i915"))
        integrated = is_listed(card.device, "intel_processors")
        if integrated or is_listed(card.device, "intel_cards"):
            name = card.name or ("Intel Core Ultra graphics" if integrated else "Intel GPU")
            listed.append(facts.Accelerator("xpu", name, ids[card.address], usable=usable, integrated=integrated))

    # Others by the nodes that their drivers create, or by the bus if their vendor makes nothing else.
    names = () if host.windows else host.listdir("/dev") or ()
    for kind, (name, pattern) in table("chips")["other_nodes"].items():
        if count := sum(bool(re.fullmatch(pattern, node)) for node in names):
            listed.append(facts.Accelerator(kind, name, f"{count} in /dev", usable=True))
    for card in cards:
        if card.vendor == _HABANA and not any(node.startswith("hl") for node in names):
            usable = card.driver == "habanalabs"
            listed.append(facts.Accelerator("hpu", "Intel Gaudi", ids[card.address], usable=usable))
        elif card.vendor == _GOOGLE:
            usable = any(node.startswith("accel") for node in names)
            listed.append(facts.Accelerator("tpu", "Google TPU", ids[card.address], usable=usable))
    return tuple(sorted(listed, key=lambda accelerator: (not accelerator.usable, accelerator.integrated)))
