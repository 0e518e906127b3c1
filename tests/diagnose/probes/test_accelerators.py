from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import FOLDER, Content, Device, Link, Tree, plain_host, tree_host

from transload.diagnose.host import Host
from transload.diagnose.probes.hardware import accelerators, hardware
from transload.machine import Accelerator


def found(host: Host) -> tuple[Accelerator, ...]:
    return accelerators(host, hardware(host))


def pci(address: str, vendor: int, device: int, kind: int, driver: str = "") -> dict[str, Content]:
    folder = f"/sys/bus/pci/devices/{address}"
    made: dict[str, Content] = {
        f"{folder}/vendor": f"{vendor:#06x}\n",
        f"{folder}/device": f"{device:#06x}\n",
        f"{folder}/class": f"{kind:#08x}\n",
    }
    return {**made, f"{folder}/driver": Link(f"../drivers/{driver}")} if driver else made


def kfd(node: int, simd: int, version: int, place: int) -> dict[str, Content]:
    text = f"cpu_cores_count 0\nsimd_count {simd}\ngfx_target_version {version}\nlocation_id {place}\ndomain 0\n"
    return {f"/sys/class/kfd/kfd/topology/nodes/{node}/properties": text}


def test_a_machine_with_nvidias_card_has_no_other(tmp_path: Path) -> None:
    assert found(plain_host(tmp_path)) == ()


def test_a_card_of_amd_at_work(tmp_path: Path) -> None:
    tree = {
        **pci("0000:03:00.0", 0x1002, 0x744C, 0x030000, "amdgpu"),
        "/sys/bus/pci/devices/0000:03:00.0/product_name": "Radeon RX 7900 XTX\n",
        **kfd(0, 0, 0, 0),
        **kfd(1, 192, 110000, 0x300),
        "/dev/kfd": Device(234, 0),
    }
    assert found(tree_host(tmp_path, tree)) == (Accelerator("rocm", "Radeon RX 7900 XTX", "gfx1100", usable=True),)


def test_a_card_of_amd_comes_before_the_processors_graphics(tmp_path: Path) -> None:
    tree = {**kfd(1, 4, 100306, 0x7500), **kfd(2, 1216, 90402, 0x300), "/dev/kfd": Device(234, 0)}
    assert [(each.detail, each.integrated) for each in found(tree_host(tmp_path, tree))] == [
        ("gfx942", False),
        ("gfx1036", True),
    ]


def test_a_card_of_amd_without_its_driver(tmp_path: Path) -> None:
    tree = pci("0000:03:00.0", 0x1002, 0x744C, 0x030000)
    assert found(tree_host(tmp_path / "1", tree)) == (Accelerator("rocm", "AMD GPU", "1002:744c"),)
    in_a_container = {**tree, **kfd(1, 192, 110000, 0x300)}
    assert found(tree_host(tmp_path / "2", in_a_container)) == (Accelerator("rocm", "AMD GPU", "gfx1100"),)


LEVEL_ZERO = {"/usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1": b""}


@cases(
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
def test_intel(tmp_path: Path, device: int, driver: str, library: Tree, expected: tuple[Accelerator, ...]) -> None:
    tree = {**pci("0000:00:02.0", 0x8086, device, 0x030000, driver), **library}
    assert found(tree_host(tmp_path, tree)) == expected


def test_apple(tmp_path: Path) -> None:
    mac = tree_host(tmp_path, {}, uname=("Darwin", "24.1.0", "arm64"))
    assert [(each.kind, each.usable) for each in found(mac)] == [("mps", True)]
    assert found(tree_host(tmp_path, {}, uname=("Darwin", "22.6.0", "x86_64"))) == ()


@cases(
    ("tree", "kind", "usable"),
    [
        ({"/dev/davinci0": Device(236, 0), "/dev/davinci1": Device(236, 1), "/dev/davinci_manager": ""}, "npu", True),
        ({**pci("0000:33:00.0", 0x1DA3, 0x1020, 0x120000, "habanalabs"), "/dev/accel/accel0": ""}, "hpu", True),
        ({**pci("0000:33:00.0", 0x1DA3, 0x1020, 0x120000), "/dev/null": ""}, "hpu", False),
        ({**pci("0000:00:04.0", 0x1AE0, 0x005E, 0x120000), "/dev/accel0": ""}, "tpu", True),
        ({"/dev/neuron0": Device(246, 0)}, "neuron", True),
    ],
)
def test_others(tmp_path: Path, tree: Tree, kind: str, *, usable: bool) -> None:
    (only,) = found(tree_host(tmp_path, tree))
    assert (only.kind, only.usable) == (kind, usable)


def test_garbage_in_the_topology_is_no_card(tmp_path: Path) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    tree: Tree = {f"{nodes}/0/properties": b"\xff\nsimd_count x\n", f"{nodes}/1/properties": FOLDER, f"{nodes}/2": ""}
    assert found(tree_host(tmp_path, tree)) == ()
