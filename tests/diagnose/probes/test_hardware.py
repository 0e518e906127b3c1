from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import FOLDER, H200, Content, Device, Link, Tree, bus, plain_host, tree_host, wsl

from transload.diagnose.probes.hardware import hardware
from transload.machine import PciDevice, Unknown

FOLDER_OF = "/sys/bus/pci/devices/0000:17:00.0"


def only(tmp_path: Path, tree: Tree) -> PciDevice:
    pci = hardware(tree_host(tmp_path, tree)).pci
    assert pci
    (device,) = pci
    return device


def test_a_card_at_work(tmp_path: Path) -> None:
    there = hardware(plain_host(tmp_path))
    (card,) = there.gpus
    assert (card.address, card.vendor, card.device, card.kind) == ("0000:17:00.0", 0x10DE, 0x2335, 0x030200)
    assert (card.driver, card.power, card.dead) == ("nvidia", "D0", False)
    assert card.bars == (1 << 24, 1 << 38, 1 << 25)
    assert (there.present, there.dxg, there.tegra) == (True, False, "")


def test_display_devices_of_all_and_everything_of_nvidia(tmp_path: Path) -> None:
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
    there = hardware(tree_host(tmp_path, tree))
    assert [(card.vendor, card.kind) for card in there.pci or ()] == [
        (0x8086, 0x030000),
        (0x10DE, 0x068000),
        (0x1002, 0x120000),
    ]
    assert there.gpus == ()


@cases("driver", ["nouveau", "vfio-pci", ""])
def test_the_driver_bound_to_it(tmp_path: Path, driver: str) -> None:
    assert only(tmp_path, bus(H200, driver)).driver == driver


def test_one_that_fell_off_the_bus_reads_all_ones(tmp_path: Path) -> None:
    tree = {**bus(H200), f"{FOLDER_OF}/config": b"\xff" * 64}
    assert only(tmp_path, tree).dead


@cases("asleep", [{f"{FOLDER_OF}/power_state": "D3cold"}, {f"{FOLDER_OF}/power/runtime_status": "suspended"}])
def test_one_that_sleeps_is_let_sleep(tmp_path: Path, asleep: dict[str, Content]) -> None:
    """Its configuration is not read, which would wake it: even one that reads all ones is not called dead."""
    tree = {**bus(H200), f"{FOLDER_OF}/config": b"\xff" * 64, **asleep}
    assert not only(tmp_path, tree).dead


def test_regions_that_were_not_assigned_count_nothing(tmp_path: Path) -> None:
    lines = (
        "0x00000000b0000000 0x00000000b0ffffff 0x0000000000040200\n"
        "0x0000000000000000 0x0000003fffffffff 0x000000002014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
        "0x0000000000003000 0x000000000000307f 0x0000000000040101\n"
    )
    assert only(tmp_path, {**bus(H200), f"{FOLDER_OF}/resource": lines}).bars == (1 << 24, 0)


@cases(
    "broken",
    [
        {f"{FOLDER_OF}/resource": b"\xff\xfe\x00garbage \x00 x\n" * 10},
        {f"{FOLDER_OF}/resource": None},
        {f"{FOLDER_OF}/config": None},
        {f"{FOLDER_OF}/device": "0x" + "f" * 5000},
        {f"{FOLDER_OF}/power_state": None},
        {f"{FOLDER_OF}/driver": None, f"{FOLDER_OF}/driver/x": ""},
    ],
)
def test_what_cannot_be_read_of_a_card_does_not_hide_it(tmp_path: Path, broken: Tree) -> None:
    card = only(tmp_path, {**bus(H200), **broken})
    assert card.vendor == 0x10DE
    assert not card.dead


def test_a_bus_of_garbage_is_empty(tmp_path: Path) -> None:
    tree: Tree = {
        "/sys/bus/pci/devices/x/vendor": b"\xff\0",
        "/sys/bus/pci/devices/y": Link("y"),
        "/sys/bus/pci/devices/z": "",
    }
    assert hardware(tree_host(tmp_path, tree)).pci == ()


def test_no_sysfs_is_said(tmp_path: Path) -> None:
    there = hardware(tree_host(tmp_path, {}))
    assert there.pci == Unknown("/sys/bus/pci/devices is not there")
    assert not there.present
    windows = tree_host(tmp_path, {}, uname=("Windows", "10.0.22631", "AMD64"))
    assert isinstance(hardware(windows).pci, Unknown)


def test_the_road_under_wsl(tmp_path: Path) -> None:
    there = hardware(wsl(tmp_path))
    assert (there.dxg, there.present, there.gpus) == (True, True, ())


@cases(
    ("tree", "told"),
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
def test_a_jetson_says_what_it_is(tmp_path: Path, tree: Tree, told: str) -> None:
    assert hardware(tree_host(tmp_path, tree)).tegra == told


def test_the_kernel_of_a_jetson_is_enough(tmp_path: Path) -> None:
    host = tree_host(tmp_path, {"/dev/nvmap": Device(10, 58)}, uname=("Linux", "5.15.148-tegra", "aarch64"))
    assert hardware(host).tegra == "Tegra"


def test_links_of_devices_are_followed_as_in_a_real_sysfs(tmp_path: Path) -> None:
    real = {path.replace("/sys/bus/pci/devices", "/sys/devices/pci0000:00"): what for path, what in bus(H200).items()}
    link = {"/sys/bus/pci/devices/0000:17:00.0": Link("../../../devices/pci0000:00/0000:17:00.0")}
    assert replace(only(tmp_path, {**real, **link}), bars=()).driver == "nvidia"
