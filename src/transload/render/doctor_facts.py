"""Every fact about a machine, layer by layer, with where it was found: ``transload doctor --verbose``."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from transload.machine import Machine, Unknown
from transload.render.escape import printable
from transload.render.lines import Block, Line, Prose, heading, note

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SOURCES", "facts", "source_of"]

# Field → where a fact of it comes from. The longest beginning of a fact's name counts.
SOURCES: dict[str, str] = {
    "transload": "",
    "taken": "",
    "platform": "uname, /etc/os-release",
    "platform.libc": "the loader's file",
    "platform.package_manager": "the programs there are",
    "platform.shell": "SHELL",
    "platform.root": "the user's number",
    "platform.groups": "/etc/group",
    "platform.laptop": "/sys/class/dmi/id/chassis_type",
    "platform.address_space": "/proc/self/limits",
    "platform.suspends": "/sys/power/suspend_stats",
    "platform.prime": "/etc/prime-discrete, /etc/prime/current_type",
    "surroundings": "/proc, the environment, and the evidence named",
    "hardware": "/sys/bus/pci/devices",
    "hardware.dxg": "/dev/dxg",
    "hardware.tegra": "/proc/device-tree/model, /etc/nv_tegra_release",
    "kernel": "/sys/module/nvidia, /proc/driver/nvidia/version",
    "kernel.modules": "/proc/modules",
    "kernel.built_for": "/lib/modules",
    "kernel.secure_boot": "/sys/firmware/efi/efivars",
    "kernel.uvm_disable_hmm": "/sys/module/nvidia_uvm/parameters",
    "kernel.kaslr": "/proc/cmdline",
    "kernel.parameters": "/proc/driver/nvidia/params",
    "kernel.gpus": "/proc/driver/nvidia/gpus",
    "kernel.firmware": "/lib/firmware/nvidia",
    "kernel.log": "/dev/kmsg, /var/log",
    "kernel.daemons": "/proc/*/comm",
    "kernel.stuck": "/proc/*/stat",
    "kernel.fabric_manager": "its package or program",
    "kernel.mps_directory": "CUDA_MPS_PIPE_DIRECTORY, /tmp/nvidia-mps",
    "nodes": "opening each under /dev",
    "nodes.majors": "/proc/devices",
    "nodes.cgroup": "/sys/fs/cgroup/devices",
    "driver.libraries": "LD_LIBRARY_PATH, /etc/ld.so.cache, the default folders",
    "driver.nvml": "libnvidia-ml, in a child process",
    "driver.cuda": "libcuda, in a child process",
    "driver.experiments": "libcuda, in a child process with a changed environment",
    "toolkit": "PATH, CUDA_HOME, /usr/local",
    "variables": "the environment",
    "variables.origins": "the files named",
    "python": "the interpreter itself",
    "python.packages": "the dist-info folders on its path",
    "python.others": "PATH, environments nearby",
    "torch": "version.py, dist-info and RECORD on the path",
    "torch_libraries": "the binaries of torch and the loader's search",
    "extensions": "their binaries and metadata",
    "accelerators": "/sys, /dev",
    "torch_run": "torch itself, in a child process",
    "problems": "",
}

_TITLES = {
    "": "report",
    "platform": "system",
    "surroundings": "container, scheduler, service",
    "hardware": "hardware",
    "kernel": "kernel driver",
    "nodes": "device nodes",
    "driver": "the driver's libraries and their answers",
    "toolkit": "CUDA toolkit",
    "variables": "environment variables",
    "python": "Python",
    "torch": "torch, by its files",
    "torch_libraries": "torch's binaries",
    "extensions": "packages beside torch",
    "accelerators": "other accelerators",
    "torch_run": "torch, run",
    "problems": "what stopped a probe",
}
_REMARKS = {"toolkit": "a torch wheel brings its own libraries and uses none of it"}
_NUMBERS = {"vendor": "0x{:04x}", "device": "0x{:04x}", "kind": "0x{:06x}", "mode": "{:#o}"}
_LABEL = 30
_VALUE = 2000
_PLAIN = (str, int, float, bool, type(None))

Fact = tuple[str, Any]


def facts(machine: Machine) -> Iterator[Block]:
    """All facts, a section a layer. What is empty or was not told is left to ``--json``."""
    for section in fields(Machine):
        value = getattr(machine, section.name)
        told = [fact for fact in _flat(section.name, value) if not _empty(fact[1])]
        if isinstance(value, str) or not told:
            continue
        yield from heading(_TITLES.get(section.name, section.name), _REMARKS.get(section.name, ""))
        yield from _section(section.name, told)


def _section(section: str, told: list[Fact]) -> Iterator[Block]:
    """Facts under the places they came from."""
    labels = {name: printable(name.removeprefix(section).lstrip(".") or section) for name, _ in told}
    width = min(_LABEL, max(map(len, labels.values())))
    for source in dict.fromkeys(source_of(name) for name, _ in told):
        if source:
            yield note(f"from {source}")
        for name, value in told:
            if source_of(name) == source:
                yield Prose(_shown(value), lead=(("    ", ""), (f"{labels[name]:<{width}}  ", "dim")))


def source_of(name: str) -> str:
    """Where the fact of that name comes from.

    >>> source_of("kernel.gpus[0].model"), source_of("kernel.version")
    ('/proc/driver/nvidia/gpus', '/sys/module/nvidia, /proc/driver/nvidia/version')
    """
    path = name.replace("[", ".[").split(".")
    places = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((SOURCES[place] for place in places if place in SOURCES), "")


def _flat(name: str, value: Any) -> Iterator[Fact]:
    """Each fact by its full name; things of the same kind are numbered, and those that hold no others told at once."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    elif isinstance(value, tuple) and not all(isinstance(each, _PLAIN) for each in value):
        for place, each in enumerate(value):
            yield from ([(f"{name}[{place}]", each)] if _is_record(each) else _flat(f"{name}[{place}]", each))
    elif is_dataclass(value) and not isinstance(value, Unknown):
        for each in fields(value):
            yield from _flat(f"{name}.{each.name}", getattr(value, each.name))
    else:
        yield name, value


def _is_record(value: Any) -> bool:
    values = [getattr(value, each.name) for each in fields(value)]
    return all(isinstance(each, (*_PLAIN, tuple)) for each in values)


def _empty(value: Any) -> bool:
    """Whether there is nothing to tell: text or numbers that stand for "not told"."""
    return not isinstance(value, bool | Unknown) and value in ("", (), -1, None, {})


def _shown(value: Any) -> Line:
    if isinstance(value, Unknown):
        return (("? ", "trust"), (printable(value.reason, _VALUE), ""))
    return ((printable(_words(value), _VALUE), ""),)


def _words(value: Any, field: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(_words(each) for each in value)
    if is_dataclass(value):
        told = ((each, getattr(value, each.name)) for each in fields(value))
        return "; ".join(f"{each.name} {_words(part, each.name)}" for each, part in told if _worth_telling(each, part))
    return _NUMBERS[field].format(value) if field in _NUMBERS and isinstance(value, int) else str(value)


def _worth_telling(field: Field[Any], value: Any) -> bool:
    return not _empty(value) and value != field.default
