"""PCI devices, device nodes and accelerators, as the probes read them from a tree of files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.trees import (
    DEVICES,
    FOLDER,
    H200,
    MOUNTS,
    NODES,
    Content,
    Device,
    Link,
    Tree,
    TreeHost,
    bus,
    container,
    plain_host,
    slurm,
    tree_host,
    wsl,
)
from tests.each import each

from transload.diagnose.host import Host
from transload.diagnose.probes.system import accelerators, hardware, nodes
from transload.machine import Accelerator, Node, Nodes, PciDevice, Unknown

if TYPE_CHECKING:
    import pytest

CARD_FOLDER = "/sys/bus/pci/devices/0000:17:00.0"


def only_device(tmp_path: Path, tree: Tree) -> PciDevice:
    pci = hardware(tree_host(tmp_path, tree)).pci
    assert pci
    (device,) = pci
    return device


def test_working_card(tmp_path: Path) -> None:
    facts = hardware(plain_host(tmp_path))
    (card,) = facts.gpus
    assert (card.address, card.vendor, card.device, card.kind) == ("0000:17:00.0", 0x10DE, 0x2335, 0x030200)
    assert (card.driver, card.power, card.dead) == ("nvidia", "D0", False)
    assert card.bars == (1 << 24, 1 << 38, 1 << 25)
    assert (facts.present, facts.dxg, facts.tegra) == (True, False, "")


def test_display_devices_of_all_vendors_and_all_nvidia_devices_are_listed(tmp_path: Path) -> None:
    def device(address: str, vendor: int, kind: int) -> dict[str, Content]:
        return {
            f"/sys/bus/pci/devices/{address}/vendor": f"{vendor:#06x}\n",
            f"/sys/bus/pci/devices/{address}/class": f"{kind:#08x}\n",
        }

    tree = {
        **device("0000:00:00.0", 0x8086, 0x060000),
        **device("0000:00:02.0", 0x8086, 0x030000),
        **device("0000:05:00.0", 0x10DE, 0x068000),
        **device("0000:06:00.0", 0x1002, 0x120000),
        **device("0000:07:00.0", 0x144D, 0x010802),
    }
    facts = hardware(tree_host(tmp_path, tree))
    assert [(card.vendor, card.kind) for card in facts.pci or ()] == [
        (0x8086, 0x030000),
        (0x10DE, 0x068000),
        (0x1002, 0x120000),
    ]
    assert facts.gpus == ()


@each("driver", ["nouveau", "vfio-pci", ""])
def test_driver_bound_to_a_card(tmp_path: Path, driver: str) -> None:
    assert only_device(tmp_path, bus(H200, driver)).driver == driver


def test_card_that_reads_all_ones_is_dead(tmp_path: Path) -> None:
    tree = {**bus(H200), f"{CARD_FOLDER}/config": b"\xff" * 64}
    assert only_device(tmp_path, tree).dead


@each("asleep", [{f"{CARD_FOLDER}/power_state": "D3cold"}, {f"{CARD_FOLDER}/power/runtime_status": "suspended"}])
def test_sleeping_card_is_not_woken(tmp_path: Path, asleep: dict[str, Content]) -> None:
    """Reading its configuration would wake it: even a card that would read all ones is not called dead."""
    tree = {**bus(H200), f"{CARD_FOLDER}/config": b"\xff" * 64, **asleep}
    assert not only_device(tmp_path, tree).dead


def test_unassigned_region_has_size_zero(tmp_path: Path) -> None:
    lines = (
        "0x00000000b0000000 0x00000000b0ffffff 0x0000000000040200\n"
        "0x0000000000000000 0x0000003fffffffff 0x000000002014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
        "0x0000000000003000 0x000000000000307f 0x0000000000040101\n"
    )
    assert only_device(tmp_path, {**bus(H200), f"{CARD_FOLDER}/resource": lines}).bars == (1 << 24, 0)


@each(
    "broken",
    [
        {f"{CARD_FOLDER}/resource": b"\xff\xfe\x00garbage \x00 x\n" * 10},
        {f"{CARD_FOLDER}/resource": None},
        {f"{CARD_FOLDER}/config": None},
        {f"{CARD_FOLDER}/device": "0x" + "f" * 5000},
        {f"{CARD_FOLDER}/power_state": None},
        {f"{CARD_FOLDER}/driver": None, f"{CARD_FOLDER}/driver/x": ""},
    ],
)
def test_unreadable_attributes_do_not_hide_a_card(tmp_path: Path, broken: Tree) -> None:
    card = only_device(tmp_path, {**bus(H200), **broken})
    assert card.vendor == 0x10DE
    assert not card.dead


def test_garbage_on_the_bus_is_ignored(tmp_path: Path) -> None:
    tree: Tree = {
        "/sys/bus/pci/devices/x/vendor": b"\xff\0",
        "/sys/bus/pci/devices/y": Link("y"),
        "/sys/bus/pci/devices/z": "",
    }
    assert hardware(tree_host(tmp_path, tree)).pci == ()


def test_pci_devices_are_unknown_without_sysfs(tmp_path: Path) -> None:
    facts = hardware(tree_host(tmp_path, {}))
    assert facts.pci == Unknown("/sys/bus/pci/devices does not exist")
    assert not facts.present
    windows = tree_host(tmp_path, {}, uname=("Windows", "10.0.22631", "AMD64"))
    assert isinstance(hardware(windows).pci, Unknown)


def test_dxg_under_wsl(tmp_path: Path) -> None:
    facts = hardware(wsl(tmp_path))
    assert (facts.dxg, facts.present, facts.gpus) == (True, True, ())


@each(
    ("tree", "expected"),
    [
        (
            {
                "/proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",
                "/proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
                "/etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
            },
            "NVIDIA Jetson AGX Orin Developer Kit, R36 (release), REVISION: 4.3",
        ),
        ({"/proc/device-tree/model": "Raspberry Pi 5\0", "/proc/device-tree/compatible": "brcm,bcm2712\0"}, ""),
        ({"/proc/device-tree/compatible": FOLDER}, ""),
    ],
)
def test_jetson_model(tmp_path: Path, tree: Tree, expected: str) -> None:
    assert hardware(tree_host(tmp_path, tree)).tegra == expected


def test_jetson_is_recognized_by_its_kernel(tmp_path: Path) -> None:
    host = tree_host(tmp_path, {"/dev/nvmap": Device(10, 58)}, uname=("Linux", "5.15.148-tegra", "aarch64"))
    assert hardware(host).tegra == "Tegra"


def test_device_links_are_followed_as_in_a_real_sysfs(tmp_path: Path) -> None:
    real = {
        path.replace("/sys/bus/pci/devices", "/sys/devices/pci0000:00"): content for path, content in bus(H200).items()
    }
    link = {"/sys/bus/pci/devices/0000:17:00.0": Link("../../../devices/pci0000:00/0000:17:00.0")}
    assert replace(only_device(tmp_path, {**real, **link}), bars=()).driver == "nvidia"


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_nodes_of_a_working_driver(tmp_path: Path) -> None:
    facts = nodes(plain_host(tmp_path))
    assert [node.path for node in facts.found][:3] == ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"]
    assert facts.at("/dev/nvidiactl") == Node("/dev/nvidiactl", group="root", major=195, minor=255)
    assert facts.at("/dev/nvidia-uvm") == Node("/dev/nvidia-uvm", group="root", major=238, minor=0)
    assert facts.majors == {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 238, "nvidia-caps": 241, "drm": 226}


def test_main_nodes_are_listed_even_if_absent(tmp_path: Path) -> None:
    facts = nodes(tree_host(tmp_path, {}))
    assert [(node.path, node.exists, node.error) for node in facts.found] == [
        ("/dev/nvidiactl", False, "ENOENT"),
        ("/dev/nvidia0", False, "ENOENT"),
        ("/dev/nvidia-uvm", False, "ENOENT"),
    ]
    assert (facts.majors, facts.cgroup) == ({}, ())


@each("error", ["EACCES", "EPERM", "ENXIO", "ENODEV", "EIO"])
def test_errno_of_opening_a_node_is_reported(tmp_path: Path, error: str) -> None:
    facts = nodes(plain_host(tmp_path, errors={"/dev/nvidiactl": error}))
    assert facts.at("/dev/nvidiactl").error == error
    assert facts.at("/dev/nvidia0").error == ""


def test_mode_and_group_of_a_node_are_reported(tmp_path: Path) -> None:
    restricted = {"/dev/nvidia0": Device(195, 0, 0o660, gid=44, error="EACCES")}
    node = nodes(plain_host(tmp_path, nodes={**NODES, **restricted})).at("/dev/nvidia0")
    assert (node.mode, node.gid, node.group, node.error) == (0o660, 44, "video", "EACCES")


def test_readable_capability_node_is_not_an_error(tmp_path: Path) -> None:
    """The driver makes these nodes read-only and only reads them; the probe opens every node for writing too."""
    facts = nodes(plain_host(tmp_path))
    assert facts.at("/dev/nvidia-caps/nvidia-cap1").error == "EACCES"
    assert facts.at("/dev/nvidia-caps/nvidia-cap2").error == ""


def test_files_folders_and_links_in_place_of_nodes(tmp_path: Path) -> None:
    more: Tree = {
        "/dev/nvidiactl": "a file",
        "/dev/nvidia0/x": "in a folder",
        "/dev/nvidia-uvm": Link("/dev/gone"),
        "/dev/nvidia1": Link("../dev/nvidia1"),
    }
    facts = nodes(plain_host(tmp_path, nodes={}, more=more))
    assert (facts.at("/dev/nvidiactl").kind, facts.at("/dev/nvidiactl").major) == ("file", 0)
    assert (facts.at("/dev/nvidia0").kind, facts.at("/dev/nvidia0").error) == ("directory", "EISDIR")
    assert (facts.at("/dev/nvidia-uvm").kind, facts.at("/dev/nvidia-uvm").error) == ("link", "ENOENT")
    assert facts.at("/dev/nvidia1").kind == "link"


def test_link_to_a_node_is_followed(tmp_path: Path) -> None:
    facts = nodes(plain_host(tmp_path, nodes={}, more={"/dev/nvidia0": Link("char/a"), "/dev/char/a": Device(195, 0)}))
    assert (facts.at("/dev/nvidia0").kind, facts.at("/dev/nvidia0").major) == ("char", 195)


def test_dev_null_in_place_of_a_node_shows_in_its_major_number(tmp_path: Path) -> None:
    facts = nodes(plain_host(tmp_path, nodes={**NODES, "/dev/nvidia-uvm": Device(1, 3)}))
    assert (facts.at("/dev/nvidia-uvm").major, facts.majors["nvidia-uvm"]) == (1, 238)


def test_nodev_is_that_of_the_mount_of_the_node(tmp_path: Path) -> None:
    mounts = MOUNTS + "90 24 0:99 / /dev/nvidiactl rw,nosuid,nodev - tmpfs tmpfs rw\n"
    facts = nodes(plain_host(tmp_path, more={"/proc/self/mountinfo": mounts}, errors={"/dev/nvidiactl": "EACCES"}))
    assert (facts.at("/dev/nvidiactl").nodev, facts.at("/dev/nvidiactl").error) == (True, "EACCES")
    assert not facts.at("/dev/nvidia0").nodev


def test_nvidia_frontend_of_drivers_before_550_stands_for_both_majors(tmp_path: Path) -> None:
    old = DEVICES.replace("195 nvidia\n195 nvidiactl\n", "195 nvidia-frontend\n")
    majors = nodes(plain_host(tmp_path, more={"/proc/devices": old})).majors
    assert (majors["nvidia"], majors["nvidiactl"]) == (195, 195)


@each(
    ("cgroup", "folder"),
    [("5:devices:/docker/1\n", "/docker/1"), ("5:cpu,devices:/\n", ""), ("5:devices:/elsewhere\n", "")],
)
def test_device_rules_of_cgroup_v1(tmp_path: Path, cgroup: str, folder: str) -> None:
    rules = {f"/sys/fs/cgroup/devices{folder}/devices.list": "c 1:3 rwm\nc 195:* rw\n", "/proc/self/cgroup": cgroup}
    assert nodes(container(tmp_path, more=rules)).cgroup == ("c 1:3 rwm", "c 195:* rw")


def test_nodes_of_other_accelerators_are_listed(tmp_path: Path) -> None:
    more = {
        "/dev/kfd": Device(234, 0, 0o660, gid=992, error="EACCES"),
        "/dev/dri/renderD128": Device(226, 128),
        "/dev/dri/card0": Device(226, 0),
        "/dev/nvhost-gpu": Device(506, 1),
        "/dev/accel/accel0": Device(261, 0),
    }
    facts = nodes(plain_host(tmp_path, card=None, more=more))
    assert [node.path for node in facts.found][3:] == [
        "/dev/kfd",
        "/dev/nvhost-gpu",
        "/dev/dri/renderD128",
        "/dev/accel/accel0",
    ]
    assert (facts.at("/dev/kfd").error, facts.at("/dev/kfd").group) == ("EACCES", "render")


def test_nodes_in_containers_slurm_jobs_and_wsl(tmp_path: Path) -> None:
    assert not nodes(container(tmp_path / "none", gpu=False)).at("/dev/nvidia0").exists
    assert nodes(slurm(tmp_path / "job", gpus="")).at("/dev/nvidia0").error == "EPERM"
    assert nodes(wsl(tmp_path / "wsl")).at("/dev/dxg").exists


def test_node_that_blocks_does_not_block_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe blocks, as with a driver that hangs. Cards are opened last, so the other nodes are known."""
    monkeypatch.setattr("transload.diagnose.probes.system.PATIENCE", 1.0)

    class Hanging(TreeHost):
        def open_error(self, path: str) -> str:
            if path == "/dev/nvidia0":
                os.close(os.open(self.at("/pipe"), os.O_RDONLY))
            return super().open_error(path)

    host = plain_host(tmp_path, errors={"/dev/nvidia-uvm": "EPERM"})
    os.mkfifo(tmp_path / "pipe")
    hanging = Hanging(*(getattr(host, name) for name in host.__dataclass_fields__))
    facts = nodes(hanging)
    assert facts.at("/dev/nvidia-uvm").error == "EPERM"
    assert facts.at("/dev/nvidia0").error == ""


def test_other_systems_have_no_nodes(tmp_path: Path) -> None:
    assert nodes(tree_host(tmp_path, {}, uname=("Windows", "10", "AMD64"))) == Nodes()


def test_garbage_in_devices_and_groups(tmp_path: Path) -> None:
    more = {"/proc/devices": b"\xff\n999999999999 nvidia\nx nvidia\n", "/etc/group": b"\xff:x\nroot:x:\xb2:\n" * 9}
    facts = nodes(plain_host(tmp_path, more=more))
    assert (facts.majors, facts.at("/dev/nvidia0").group) == ({}, "")


# -- accelerators ------------------------------------------------------------------------------------------------------


def detect(host: Host) -> tuple[Accelerator, ...]:
    return accelerators(host, hardware(host))


def pci(address: str, vendor: int, device: int, kind: int, driver: str = "") -> dict[str, Content]:
    folder = f"/sys/bus/pci/devices/{address}"
    files: dict[str, Content] = {
        f"{folder}/vendor": f"{vendor:#06x}\n",
        f"{folder}/device": f"{device:#06x}\n",
        f"{folder}/class": f"{kind:#08x}\n",
    }
    return {**files, f"{folder}/driver": Link(f"../drivers/{driver}")} if driver else files


def kfd(node: int, simd: int, version: int, location: int) -> dict[str, Content]:
    text = f"cpu_cores_count 0\nsimd_count {simd}\ngfx_target_version {version}\nlocation_id {location}\ndomain 0\n"
    return {f"/sys/class/kfd/kfd/topology/nodes/{node}/properties": text}


def test_nvidia_card_is_not_listed_as_another_accelerator(tmp_path: Path) -> None:
    assert detect(plain_host(tmp_path)) == ()


def test_working_amd_card(tmp_path: Path) -> None:
    tree = {
        **pci("0000:03:00.0", 0x1002, 0x744C, 0x030000, "amdgpu"),
        "/sys/bus/pci/devices/0000:03:00.0/product_name": "Radeon RX 7900 XTX\n",
        **kfd(0, 0, 0, 0),
        **kfd(1, 192, 110000, 0x300),
        "/dev/kfd": Device(234, 0),
    }
    assert detect(tree_host(tmp_path, tree)) == (Accelerator("rocm", "Radeon RX 7900 XTX", "gfx1100", usable=True),)


def test_amd_card_comes_before_integrated_graphics(tmp_path: Path) -> None:
    tree = {**kfd(1, 4, 100306, 0x7500), **kfd(2, 1216, 90402, 0x300), "/dev/kfd": Device(234, 0)}
    assert [(accelerator.detail, accelerator.integrated) for accelerator in detect(tree_host(tmp_path, tree))] == [
        ("gfx942", False),
        ("gfx1036", True),
    ]


def test_amd_card_without_its_driver(tmp_path: Path) -> None:
    tree = pci("0000:03:00.0", 0x1002, 0x744C, 0x030000)
    assert detect(tree_host(tmp_path / "1", tree)) == (Accelerator("rocm", "AMD GPU", "1002:744c"),)
    in_container = {**tree, **kfd(1, 192, 110000, 0x300)}
    assert detect(tree_host(tmp_path / "2", in_container)) == (Accelerator("rocm", "AMD GPU", "gfx1100"),)


LEVEL_ZERO = {"/usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1": b""}


@each(
    ("device", "driver", "library", "expected"),
    [
        (0x56A0, "xe", LEVEL_ZERO, (Accelerator("xpu", "Intel GPU", "8086:56a0", usable=True),)),
        (0xE20B, "xe", {}, (Accelerator("xpu", "Intel GPU", "8086:e20b"),)),
        (0x0BD5, "", LEVEL_ZERO, (Accelerator("xpu", "Intel GPU", "8086:0bd5"),)),
        (
            0x64A0,
            "xe",
            LEVEL_ZERO,
            (Accelerator("xpu", "Intel Core Ultra graphics", "8086:64a0", usable=True, integrated=True),),
        ),
        (0x9A49, "i915", LEVEL_ZERO, ()),
    ],
)
def test_intel_gpus(tmp_path: Path, device: int, driver: str, library: Tree, expected: tuple[Accelerator, ...]) -> None:
    tree = {**pci("0000:00:02.0", 0x8086, device, 0x030000, driver), **library}
    assert detect(tree_host(tmp_path, tree)) == expected


def test_apple_mps(tmp_path: Path) -> None:
    mac = tree_host(tmp_path, {}, uname=("Darwin", "24.1.0", "arm64"))
    assert [(accelerator.kind, accelerator.usable) for accelerator in detect(mac)] == [("mps", True)]
    assert detect(tree_host(tmp_path, {}, uname=("Darwin", "22.6.0", "x86_64"))) == ()


@each(
    ("tree", "kind", "usable"),
    [
        ({"/dev/davinci0": Device(236, 0), "/dev/davinci1": Device(236, 1), "/dev/davinci_manager": ""}, "npu", True),
        ({**pci("0000:33:00.0", 0x1DA3, 0x1020, 0x120000, "habanalabs"), "/dev/accel/accel0": ""}, "hpu", True),
        ({**pci("0000:33:00.0", 0x1DA3, 0x1020, 0x120000), "/dev/null": ""}, "hpu", False),
        ({**pci("0000:00:04.0", 0x1AE0, 0x005E, 0x120000), "/dev/accel0": ""}, "tpu", True),
        ({"/dev/neuron0": Device(246, 0)}, "neuron", True),
    ],
)
def test_other_accelerators(tmp_path: Path, tree: Tree, kind: str, *, usable: bool) -> None:
    (accelerator,) = detect(tree_host(tmp_path, tree))
    assert (accelerator.kind, accelerator.usable) == (kind, usable)


def test_garbage_in_the_kfd_topology_is_ignored(tmp_path: Path) -> None:
    topology = "/sys/class/kfd/kfd/topology/nodes"
    tree: Tree = {
        f"{topology}/0/properties": b"\xff\nsimd_count x\n",
        f"{topology}/1/properties": FOLDER,
        f"{topology}/2": "",
    }
    assert detect(tree_host(tmp_path, tree)) == ()
