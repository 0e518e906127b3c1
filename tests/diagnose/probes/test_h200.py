"""A real machine: a container on a node with one H200, driver 580.159.04, as its /proc and /dev showed it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.diagnose.trees import Device, Tree, TreeHost, tree_host
from tests.each import each

from transload.diagnose.probes.system import hardware, kernel, nodes, variables
from transload.machine import ProcGpu

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    "GCC version:  gcc version 15.3.0 (GCC) \n"
)
DEVICES = """\
Character devices:
195 nvidia
195 nvidiactl
238 nvidia-uvm
239 nvidia-nvswitch
240 nvidia-nvlink
241 nvidia-caps
242 nvidia-caps-imex-channels
"""
INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 41
GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000
Video BIOS: \t 96.00.a5.00.1a
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:00:06.0
Device Minor: \t 0
GPU Firmware: \t 580.159.04
GPU Excluded:\t No
"""
PARAMETERS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
EnableUserNUMAManagement: 1
NvLinkDisable: 1
DynamicPowerManagement: 3
OpenRmEnableUnsupportedGpus: 1
CoherentGPUMemoryMode: ""
RegistryDwords: ""
"""
TREE: Tree = {
    "/proc/driver/nvidia/version": VERSION,
    "/proc/driver/nvidia/params": PARAMETERS,
    "/proc/driver/nvidia/gpus/0000:00:06.0/information": INFORMATION,
    "/proc/driver/nvidia/registry": 'Binary: ""\n',
    "/proc/devices": DEVICES,
    "/dev/nvidia0": Device(195, 0),
    "/dev/nvidiactl": Device(195, 255),
    "/dev/nvidia-uvm": Device(238, 0),
    "/dev/nvidia-uvm-tools": Device(238, 1),
    "/dev/nvidia-caps/nvidia-cap1": Device(241, 1, 0o400),
    "/dev/nvidia-caps/nvidia-cap2": Device(241, 2, 0o444),
}
ENVIRON = {
    "NVIDIA_VISIBLE_DEVICES": "0",
    "TORCH_CUDA_ARCH_LIST": "9.0a",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "NVIDIA_PRODUCT_NAME": "CUDA",
    "CUDA_VERSION": "13.0.2",
    "LIBRARY_PATH": "/usr/local/cuda/lib64/stubs",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
    "CUDA_HOME": "/usr/local/cuda",
}


def host(tmp_path: Path, **errors: str) -> TreeHost:
    open_errors = {f"/dev/{name.replace('_', '-')}": error for name, error in errors.items()}
    return tree_host(tmp_path, TREE, ENVIRON, errors=open_errors, uid=0)


def test_kernel_driver(tmp_path: Path) -> None:
    facts = kernel(host(tmp_path))
    assert (facts.loaded, facts.version, facts.flavour) == (True, "580.159.04", "open")
    assert facts.gpus == (ProcGpu("0000:00:06.0", "NVIDIA H200", 0, "580.159.04"),)
    assert facts.parameters["NvLinkDisable"] == "1"
    assert facts.parameters["RegistryDwords"] == ""


def test_device_nodes(tmp_path: Path) -> None:
    facts = nodes(host(tmp_path))
    assert {node.path: (node.major, node.minor, node.mode) for node in facts.found} == {
        "/dev/nvidiactl": (195, 255, 0o666),
        "/dev/nvidia0": (195, 0, 0o666),
        "/dev/nvidia-uvm": (238, 0, 0o666),
        "/dev/nvidia-uvm-tools": (238, 1, 0o666),
        "/dev/nvidia-caps/nvidia-cap1": (241, 1, 0o400),
        "/dev/nvidia-caps/nvidia-cap2": (241, 2, 0o444),
    }
    assert {node.error for node in facts.found} == {""}
    assert facts.majors["nvidia-nvswitch"] == 239


@pytest.mark.skipif(not hasattr(os, "makedev"), reason="needs the numbers of device nodes")
@each("node", ["nvidiactl", "nvidia0", "nvidia_uvm"])
@each("error", ["ENOENT", "EACCES"])
def test_node_that_is_missing_or_denied(tmp_path: Path, node: str, error: str) -> None:
    path = f"/dev/{node.replace('_', '-')}"
    if error == "ENOENT":
        tree = {entry: content for entry, content in TREE.items() if entry != path}
        facts = nodes(tree_host(tmp_path, tree, ENVIRON))
    else:
        facts = nodes(host(tmp_path, **{node: error}))
    assert {each_node.path: each_node.error for each_node in facts.found if each_node.error} == {path: error}


def test_variables_and_hidden_pci_bus(tmp_path: Path) -> None:
    assert variables(host(tmp_path)).values == ENVIRON
    assert not hardware(host(tmp_path)).present
