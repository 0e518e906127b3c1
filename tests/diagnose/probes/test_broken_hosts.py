"""All system probes on hosts that are broken throughout: facts or ``Unknown``, never an exception."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.trees import FOLDER, Content, Folder, Link, Tree, TreeHost, container, plain_host, tree_host

from transload.diagnose.host import Host
from transload.diagnose.probes.system import (
    accelerators,
    hardware,
    kernel,
    nodes,
    platform,
    surroundings,
    toolkit,
    variables,
)
from transload.diagnose.saved import machine_from
from transload.machine import Machine, Unknown

ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "\udcff",
    "LD_LIBRARY_PATH": "::",
    "HOME": "/home/user",
    "PATH": ":\0:/usr/bin",
    "CUDA_HOME": "/\0",
    "CONDA_PREFIX": "/\0",
    "CUDA_MPS_PIPE_DIRECTORY": "/\0",
    "SHELL": "/",
}
PATHS = (
    "/etc/os-release",
    "/etc/group",
    "/etc/environment",
    "/etc/cdi/nvidia.yaml",
    "/etc/prime-discrete",
    "/etc/nv_tegra_release",
    "/lib64/libc.so.6",
    "/proc/self/status",
    "/proc/self/limits",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/proc/1/environ",
    "/proc/1/stat",
    "/proc/version",
    "/proc/cmdline",
    "/proc/modules",
    "/proc/devices",
    "/proc/stat",
    "/proc/device-tree/compatible",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/0000:17:00.0/information",
    "/sys/bus/pci/devices/0000:17:00.0/vendor",
    "/sys/bus/pci/devices/0000:17:00.0/resource",
    "/sys/class/dmi/id/chassis_type",
    "/sys/class/kfd/kfd/topology/nodes/1/properties",
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "/sys/fs/cgroup/devices/devices.list",
    "/sys/module/nvidia/version",
    "/lib/modules/6.8.0/modules.dep",
    "/usr/bin/docker",
    "/usr/bin/nvcc",
    "/usr/bin/nv-fabricmanager",
    "/usr/include/cuda.h",
    "/var/lib/dpkg/status",
    "/var/log/kern.log",
    "/home/user/.bashrc",
    "/dev/nvidia0",
    "/dev/kfd",
)


def probe_all(host: Host) -> Machine:
    devices = hardware(host)
    return Machine(
        platform=platform(host),
        surroundings=surroundings(host),
        hardware=devices,
        kernel=kernel(host),
        nodes=nodes(host),
        toolkit=toolkit(host),
        variables=variables(host),
        accelerators=accelerators(host, devices),
    )


def uniform_tree(content: Content) -> Tree:
    """A tree in which every path that a probe reads has the same content."""
    return dict.fromkeys(PATHS, content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00\x01" * 1000,
        b"\0" * 3_000_000,
        ("9" * 100 + "\n") * 20_000,
        "nvidia: = ( \0 [ \n" * 1000,
        "195 nvidia\nVersion: 1.1.1\nPackage: nvidia-fabricmanager\nsimd_count 9\n0x10de" * 100,
        FOLDER,
        Link("/dev/nvidia0"),
        Link("/gone"),
        Link("/" + "a" * 300),
    ],
    ids=lambda content: content.to[:20] if isinstance(content, Link) else str(content)[:20],
)
def test_every_file_with_the_same_garbage(tmp_path: Path, content: Content) -> None:
    machine = probe_all(tree_host(tmp_path, uniform_tree(content), ENVIRON, uid=0))
    assert machine_from(machine.to_dict()) == machine
    assert machine.kernel.version == "" or not isinstance(content, Folder | Link)
    assert machine.hardware.gpus == ()


def test_empty_tree_and_environment(tmp_path: Path) -> None:
    machine = probe_all(tree_host(tmp_path / "gone", {}, {}, cwd="", python=""))
    assert machine.kernel.loaded == Unknown("/proc/modules does not exist")
    assert machine.hardware.pci == Unknown("/sys/bus/pci/devices does not exist")
    assert machine.accelerators == ()
    assert machine_from(machine.to_dict()) == machine


class DeniedHost(TreeHost):
    """A host on which nothing below some folders can be read or listed."""

    where: tuple[str, ...] = ()

    def data(self, path: str, limit: int = 1 << 20, start: int = 0) -> bytes | Unknown:
        return (
            Unknown(f"{path}: permission denied") if path.startswith(self.where) else super().data(path, limit, start)
        )

    def listdir(self, path: str) -> tuple[str, ...] | Unknown:
        return Unknown(f"{path}: permission denied") if path.startswith(self.where) else super().listdir(path)


@pytest.mark.parametrize("where", [("/proc",), ("/sys",), ("/dev",), ("/proc", "/sys", "/etc", "/dev", "/usr", "/lib")])
@pytest.mark.parametrize("make_host", [plain_host, container], ids=["host", "container"])
def test_unreadable_folders(tmp_path: Path, make_host: Callable[..., TreeHost], where: tuple[str, ...]) -> None:
    host = make_host(tmp_path, environ=ENVIRON)
    denied = type("Here", (DeniedHost,), {"where": where})(*(getattr(host, name) for name in host.__dataclass_fields__))
    machine = probe_all(denied)
    assert machine_from(machine.to_dict()) == machine
    if "/sys" in where:
        assert isinstance(machine.hardware.pci, Unknown)
        assert "permission denied" in machine.hardware.pci.reason


def test_loops_of_links_end(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"/proc": Link("sys"), "/sys": Link("proc"), "/dev": Link("dev"), "/etc": Link("/etc")}
    machine = probe_all(tree_host(tmp_path, tree, ENVIRON))
    assert isinstance(machine.hardware.pci, Unknown)
    assert isinstance(machine.kernel.loaded, Unknown)


def test_this_host_is_probed_and_saved() -> None:
    machine = probe_all(Host())
    assert machine_from(machine.to_dict()) == machine
