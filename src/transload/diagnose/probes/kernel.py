"""NVIDIA's kernel driver: whether it is loaded, what could keep it from loading, what it logs, who waits for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from transload.diagnose.children import in_fork
from transload.diagnose.host import Host, reason
from transload.diagnose.probes.system import executable
from transload.machine import Kernel, ProcGpu, Unknown

__all__ = ["daemons_and_stuck", "kernel", "kernel_log"]

_PROC = "/proc/driver/nvidia"
_VERSION = re.compile(r"\b(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)\b")
_CONCERN = re.compile(r"nvidia(?:_\w+)?|nouveau|nova_\w+|nvgpu|vfio_pci|dxgkrnl|amdgpu|i915|xe|habanalabs", re.ASCII)
_MODULE_ROOTS = ("/lib/modules", "/usr/lib/modules", "/run/booted-system/kernel-modules/lib/modules")
# As a line of modules.dep names it. Debian adds the flavour: nvidia-current.ko, nvidia-tesla-470.ko.
_OBJECT = re.compile(rb"^(\S*/nvidia(?:-(?:current|open|tesla|legacy)[\w-]*)?\.ko(?:\.\w+)?):", re.MULTILINE)
_FIRMWARE = ("/lib/firmware", "/usr/lib/firmware", "/lib/firmware/updates", "/run/current-system/firmware")
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_MOST = 64  # cards, and kernels
_DEPENDENCIES = 8 << 20  # a modules.dep has about one megabyte
_STANZA = 1 << 14  # of a package
PATIENCE = 0.5


def kernel(host: Host) -> Kernel:
    """What the kernel says of NVIDIA's driver. On another system than Linux nothing is known."""
    if host.uname[0] != "Linux":
        return Kernel(loaded=Unknown(f"not looked at on {host.uname[0]}"))
    told, listed = host.text(f"{_PROC}/version", 4096) or "", host.text("/proc/modules")
    names = {line.partition(" ")[0] for line in (listed or "").split("\n")}
    modules = tuple(sorted(name for name in names if _CONCERN.fullmatch(name)))
    loaded: bool | Unknown = host.folder("/sys/module/nvidia") or "NVRM version" in told or "nvidia" in modules
    if not loaded and isinstance(listed, Unknown) and not host.names("/sys/module"):
        loaded = listed  # some containers hide all three
    stated = _VERSION.search(told.partition("\n")[0])
    version = host.line("/sys/module/nvidia/version") or (stated[1] if stated else "")
    line = host.text("/proc/cmdline", 1 << 14)
    daemons, stuck = daemons_and_stuck(host) if loaded else ((), ())
    mps = host.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108  where the daemon puts it
    return Kernel(
        loaded=loaded,
        version=version,
        flavour="open" if "Open Kernel Module" in told else "proprietary" if "Kernel Module" in told else "",
        modules=modules,
        built_for=_built_for(host),
        secure_boot=_secure_boot(host),
        uvm_disable_hmm=host.line("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"),
        kaslr=line if isinstance(line, Unknown) else "nokaslr" not in line.split(),
        parameters=_pairs(host.text(f"{_PROC}/params", 1 << 16) or ""),
        gpus=_gpus(host),
        firmware=_firmware(host, version),
        log=kernel_log(host),
        daemons=daemons,
        stuck=stuck,
        fabric_manager=_fabric_manager(host),
        mps_directory=mps if host.folder(mps) else "",
    )


def _built_for(host: Host) -> tuple[str, ...] | Unknown:
    """The kernels with a driver, by the list that depmod made: no other module is loaded. Its file must exist."""
    root = next((root for root in _MODULE_ROOTS if host.folder(root)), _MODULE_ROOTS[0])
    releases = host.names(root)
    if isinstance(releases, Unknown):
        return releases
    found = []
    for release in releases[:_MOST]:
        folder = f"{root}/{release}"
        dependencies = host.data(f"{folder}/modules.dep", _DEPENDENCIES) or b""
        objects = (match[1].decode("utf-8", "surrogateescape") for match in _OBJECT.finditer(dependencies))
        if any(host.exists(path if path.startswith("/") else f"{folder}/{path}") for path in objects):
            found.append(release)
    return tuple(found)


def _secure_boot(host: Host) -> bool | Unknown:
    data = host.data(_SECURE_BOOT, 16)
    if isinstance(data, Unknown):
        firmware = host.names("/sys/firmware")
        # A container is shown an empty folder. A machine that was not started by EFI has other things in it.
        return False if firmware and "efi" not in firmware else data
    return data[4] == 1 if len(data) > 4 else Unknown(f"{_SECURE_BOOT} is too short")


def _pairs(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.split("\n"))
    return {name.strip(): value.strip().strip('"') for name, colon, value in lines if colon}


def _gpus(host: Host) -> tuple[ProcGpu, ...]:
    """The driver's own list. A driver in trouble may keep us waiting for a card's page."""
    addresses = (host.names(f"{_PROC}/gpus") or ())[:_MOST]
    pages = [f"{_PROC}/gpus/{address}/information" for address in addresses]
    texts = in_fork([lambda path=page: host.text(path, 1 << 14) or "" for page in pages], PATIENCE)  # type: ignore[misc]
    found = []
    for address, text in zip(addresses, texts, strict=True):
        told = _pairs(text or "")
        minor = told.get("Device Minor", "")
        gpu = ProcGpu(
            address,
            model=told.get("Model", ""),
            minor=int(minor) if re.fullmatch(r"\d{1,6}", minor, re.ASCII) else None,
            firmware=told.get("GPU Firmware", ""),
            excluded=told.get("GPU Excluded") == "Yes",
        )
        found.append(gpu)
    return tuple(found)


def _firmware(host: Host, version: str) -> bool | Unknown:
    """Drivers from 465 on bring firmware. Without any firmware folder this is a container, which uses the host's."""
    if not version:
        return Unknown("the driver's version is not known")
    own = host.line("/sys/module/firmware_class/parameters/path")
    folders = [folder for folder in (own, *_FIRMWARE) if folder and host.folder(f"{folder}/nvidia")]
    if not folders:
        return Unknown("/lib/firmware/nvidia is not there")
    return any(host.folder(f"{folder}/nvidia/{version}") for folder in folders)


def _fabric_manager(host: Host) -> str:
    """From the list of installed packages, else from the program itself, where it names one version only."""
    program = executable(host, "nv-fabricmanager")
    if program or any(host.paths("/var/lib/dpkg/info", "nvidia-fabricmanager", ".list")):
        status = host.text("/var/lib/dpkg/status", 64 << 20) or ""
        for start in re.finditer(r"^Package: nvidia-fabricmanager(?:-\d+)?$", status, re.MULTILINE):
            stanza = status[start.start() : start.start() + _STANZA].partition("\n\n")[0]
            found = re.search(r"^Version: (?:\d+:)?(\d+(?:\.\d+)+)", stanza, re.MULTILINE)
            if found and re.search(r"^Status: .* installed$", stanza, re.MULTILINE):
                return found[1]
    data = host.data(program, 32 << 20) if program else b""
    versions = set(re.findall(rb"\b\d{3}\.\d{2,3}\.\d{2}\b", data or b""))
    return versions.pop().decode() if len(versions) == 1 else ""


# -- its log -----------------------------------------------------------------------------------------------------------

_WORDS = ("NVRM", "nvidia", "nouveau", "Xid", "nova_core", "fallen off the bus", "request_free_mem_region")
_NOISE = re.compile(
    r"audit: .*apparmor=.(?:STATUS|ALLOWED)|ommand line:|input: .*HDMI|systemd\[\d+\]:|\]: segfault at |\btraps: "
)
_BEFORE = re.compile(r"^(?:<\d+>)?(?:.{0,80}? kernel: )?(?:\[ *[\d.]+\] ?)?")
_BANNER = "Linux version "
_LINES = 40
_TAIL = 512 << 10  # bytes: most rings are smaller, and a log file is longer than anybody asked for
_LINE = 1 << 11  # letters: the kernel itself writes no more than half of that at once
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
_FILES = ("/var/log/kern.log", "/var/log/dmesg", "/var/log/messages")


def kernel_log(host: Host) -> tuple[str, ...] | Unknown:
    """The last lines about a GPU since the machine started: from the kernel, else from a file that keeps them.

    A line is the message alone, and appears once however often it came: times and the host's name are left out.
    """
    ring = _ring() if host.root == "/" else Unknown("the log of a tree is in its files")
    if isinstance(ring, str):
        return _concerning(ring)
    booted = re.search(r"^btime (\d{1,12})$", host.text("/proc/stat") or "", re.MULTILINE)
    for path in _FILES:
        status = host.status(path)
        if isinstance(status, Unknown) or status.st_mtime < int(booted[1] if booted else 0):
            continue  # written before this start of the machine
        try:
            with open(host.real(path), "rb") as stream:
                stream.seek(max(0, status.st_size - _TAIL))
                text = stream.read(_TAIL).decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        if text:
            return _concerning(text[max(text.rfind(_BANNER), 0) :])
    return ring


def _ring() -> str | Unknown:
    """The kernel's own buffer. Read in one call: /dev/kmsg gives one line at a time, oldest first, of up to 100,000."""
    import ctypes

    try:
        ask = ctypes.CDLL(None, use_errno=True).klogctl
    except (OSError, AttributeError, TypeError):
        return Unknown("this system has no klogctl")
    buffer = ctypes.create_string_buffer(_TAIL)
    length = ask(_READ_ALL, buffer, _TAIL)
    if length < 0:
        code = ctypes.get_errno()
        return Unknown(reason("the kernel's log", OSError(code, os.strerror(code))))
    return ctypes.string_at(buffer, length).decode("utf-8", "replace")


def _concerning(text: str) -> tuple[str, ...]:
    r"""The lines about a GPU. Of several that say the same, the last is kept.

    >>> _concerning("<6>[ 5.1] NVRM: loading\n<6>[ 5.2] usb 1-1: new\n<4>[ 9.0] NVRM: Xid (PCI:0000:17:00): 79")
    ('NVRM: loading', 'NVRM: Xid (PCI:0000:17:00): 79')
    """
    last: dict[str, None] = {}
    for line in text.split("\n"):
        if any(word in line for word in _WORDS) and not _NOISE.search(line):
            message = _BEFORE.sub("", line[:_LINE].strip(), count=1)
            last.pop(message, None)
            last[message] = None
    return tuple(last)[-_LINES:]


# -- other processes that matter to a GPU ------------------------------------------------------------------------------

_DAEMONS = (
    *("nv-fabricmanager", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    *("nvidia-gridd",),
)
_SHORT = 15  # characters of a name that the kernel keeps: not enough to tell the two of MPS apart
_STAT = re.compile(r"\d+ \((.*)\) (\S)", re.DOTALL)
_WAITS = re.compile(r"_*(?:nv|uvm|rm_|os_acquire)")
_MOST_PROCESSES = 4096
_MOST_FILES = 256


def daemons_and_stuck(host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The daemons that run; and the processes in uninterruptible sleep that wait for an NVIDIA device."""
    numbers = [name for name in host.names("/proc") or () if name.isascii() and name.isdigit()]
    running, stuck = set(), []
    for number in numbers[:_MOST_PROCESSES]:
        name, state = _name_and_state(host, number)
        if state not in ("Z", "X"):
            running.add(_daemon(host, number, name, state))
        if state == "D" and _name_and_state(host, number)[1] == "D" and _waits_for_nvidia(host, f"/proc/{number}"):
            stuck.append(f"{name} ({number})")
    return tuple(name for name in _DAEMONS if name in running), tuple(stuck)


def _name_and_state(host: Host, number: str) -> tuple[str, str]:
    found = _STAT.match(host.text(f"/proc/{number}/stat", 512) or "")
    return (found[1], found[2]) if found else ("", "")


def _daemon(host: Host, number: str, name: str, state: str) -> str:
    """Which daemon it is, if any. Only for those is the command line read, and not for one that hangs."""
    alike = [each for each in _DAEMONS if name == each[:_SHORT]]
    if len(alike) < 2 or state == "D":
        return alike[0] if alike else ""
    program = (host.text(f"/proc/{number}/cmdline", 4096) or "").partition("\0")[0].rpartition("/")[2]
    return program if program in alike else alike[0]


def _waits_for_nvidia(host: Host, folder: str) -> bool:
    """Whether it waits in the driver, as far as that can be seen; else whether it has a device of it open."""
    stack = host.text(f"{folder}/stack", 1 << 14)
    if stack:
        return "[nvidia" in stack
    if _WAITS.match(host.line(f"{folder}/wchan")):
        return True
    files: Iterator[str] = iter((host.names(f"{folder}/fd") or ())[:_MOST_FILES])
    return any(host.link(f"{folder}/fd/{number}").startswith("/dev/nvidia") for number in files)
