"""NVIDIA's kernel driver: whether it is loaded, which it is, and what could keep it from loading."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transload.diagnose.host import Host
from transload.diagnose.probes.apart import apart
from transload.diagnose.probes.kernel_log import kernel_log
from transload.diagnose.probes.processes import daemons_and_stuck
from transload.diagnose.probes.surroundings import executable
from transload.machine import Kernel, ProcGpu, Unknown

__all__ = ["kernel"]

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
_PATIENCE = 0.5


def kernel(host: Host) -> Kernel:
    """What the kernel says of NVIDIA's driver. On another system than Linux nothing is known."""
    if host.uname[0] != "Linux":
        return Kernel(loaded=Unknown(f"not looked at on {host.uname[0]}"))
    told, modules = host.text(f"{_PROC}/version", 4096) or "", _modules(host)
    loaded = _loaded(host, told, modules)
    version = host.line("/sys/module/nvidia/version") or _version(told)
    daemons, stuck = daemons_and_stuck(host) if loaded else ((), ())
    return Kernel(
        loaded=loaded,
        version=version,
        flavour=_flavour(told),
        modules=modules or (),
        built_for=_built_for(host),
        secure_boot=_secure_boot(host),
        uvm_disable_hmm=host.line("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"),
        kaslr=_kaslr(host),
        parameters=_parameters(host),
        gpus=_gpus(host),
        firmware=_firmware(host, version),
        log=kernel_log(host),
        daemons=daemons,
        stuck=stuck,
        fabric_manager=_fabric_manager(host),
        mps_directory=_mps_directory(host),
    )


def _modules(host: Host) -> tuple[str, ...] | Unknown:
    text = host.text("/proc/modules")
    if isinstance(text, Unknown):
        return text
    names = {line.partition(" ")[0] for line in text.split("\n")}
    return tuple(sorted(name for name in names if _CONCERN.fullmatch(name)))


def _loaded(host: Host, told: str, modules: tuple[str, ...] | Unknown) -> bool | Unknown:
    """Known not to be only where a list of modules could be read: some containers hide all three."""
    if host.folder("/sys/module/nvidia") or "NVRM version" in told or "nvidia" in (modules or ()):
        return True
    return modules if isinstance(modules, Unknown) and not host.names("/sys/module") else False


def _version(told: str) -> str:
    """Out of /proc/driver/nvidia/version.

    >>> _version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024")
    '550.54.15'
    """
    found = _VERSION.search(told.partition("\n")[0])
    return found[1] if found else ""


def _flavour(told: str) -> str:
    """The open one says so: ``NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build``."""
    return "open" if "Open Kernel Module" in told else "proprietary" if "Kernel Module" in told else ""


def _built_for(host: Host) -> tuple[str, ...] | Unknown:
    root = next((root for root in _MODULE_ROOTS if host.folder(root)), _MODULE_ROOTS[0])
    releases = host.names(root)
    if isinstance(releases, Unknown):
        return releases
    return tuple(release for release in releases[:_MOST] if _has_driver(host, f"{root}/{release}"))


def _has_driver(host: Host, folder: str) -> bool:
    """By the list depmod made, as a module that is not in it is not loaded; and the file must be there."""
    dependencies = host.data(f"{folder}/modules.dep", _DEPENDENCIES) or b""
    objects = (match[1].decode("utf-8", "surrogateescape") for match in _OBJECT.finditer(dependencies))
    return any(host.exists(path if path.startswith("/") else f"{folder}/{path}") for path in objects)


def _secure_boot(host: Host) -> bool | Unknown:
    data = host.data(_SECURE_BOOT, 16)
    if isinstance(data, Unknown):
        firmware = host.names("/sys/firmware")
        # A container is shown an empty folder. A machine that was not started by EFI has other things in it.
        return False if firmware and "efi" not in firmware else data
    return data[4] == 1 if len(data) > 4 else Unknown(f"{_SECURE_BOOT} is too short")


def _kaslr(host: Host) -> bool | Unknown:
    line = host.text("/proc/cmdline", 1 << 14)
    return line if isinstance(line, Unknown) else "nokaslr" not in line.split()


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip().strip('"')


def _parameters(host: Host) -> dict[str, str]:
    return dict(_pairs(host.text(f"{_PROC}/params", 1 << 16) or ""))


def _gpus(host: Host) -> tuple[ProcGpu, ...]:
    """The driver's own list. A driver in trouble may keep us waiting for a card's page."""
    addresses = (host.names(f"{_PROC}/gpus") or ())[:_MOST]
    pages = [f"{_PROC}/gpus/{address}/information" for address in addresses]
    texts = apart([lambda path=page: host.text(path, 1 << 14) or "" for page in pages], _PATIENCE)  # type: ignore[misc]
    return tuple(_gpu(address, dict(_pairs(text or ""))) for address, text in zip(addresses, texts, strict=True))


def _gpu(address: str, told: dict[str, str]) -> ProcGpu:
    minor = told.get("Device Minor", "")
    return ProcGpu(
        address,
        model=told.get("Model", ""),
        minor=int(minor) if re.fullmatch(r"\d{1,6}", minor, re.ASCII) else None,
        firmware=told.get("GPU Firmware", ""),
        excluded=told.get("GPU Excluded") == "Yes",
    )


def _firmware(host: Host, version: str) -> bool | Unknown:
    """Drivers from 465 on bring firmware. Without any firmware folder this is a container, which shows the host's."""
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
    listed = any(host.paths("/var/lib/dpkg/info", "nvidia-fabricmanager", ".list")) if not program else True
    if listed and (version := _dpkg_version(host.text("/var/lib/dpkg/status", 64 << 20) or "")):
        return version
    data = host.data(host.target(program), 32 << 20) if program else b""
    versions = set(re.findall(rb"\b\d{3}\.\d{2,3}\.\d{2}\b", data or b""))
    return versions.pop().decode() if len(versions) == 1 else ""


def _dpkg_version(status: str) -> str:
    for start in re.finditer(r"^Package: nvidia-fabricmanager(?:-\d+)?$", status, re.MULTILINE):
        stanza = status[start.start() : start.start() + _STANZA].partition("\n\n")[0]
        found = re.search(r"^Version: (?:\d+:)?(\d+(?:\.\d+)+)", stanza, re.MULTILINE)
        if found and re.search(r"^Status: .* installed$", stanza, re.MULTILINE):
            return found[1]
    return ""


def _mps_directory(host: Host) -> str:
    folder = host.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108  where the daemon puts it
    return folder if host.folder(folder) else ""
