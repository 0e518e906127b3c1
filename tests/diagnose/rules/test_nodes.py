"""Device nodes: each fault of each node, and who it is a fault for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.diagnose.machines import bare, changed, healthy, in_container, in_wsl, refused
from tests.diagnose.rules.machine_rows import blind_nvml, cause, causes, finding_of, missing, node, relieved_by, seen
from tests.each import each

from transload.machine import Hardware, Machine, Node

CONTROL, CARD, UVM = "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"
ANSWERS = {CONTROL: 100, CARD: 100, UVM: 999}


def spoilt(path: str, **facts: Any) -> Machine:
    """A machine with one bad node, and the answers that a live card gives for it."""
    machine = refused(healthy(), ANSWERS[path])
    if path == CONTROL:
        machine = blind_nvml(machine, 17 if facts.get("major") else 4)
    elif path == CARD:
        machine = blind_nvml(machine)
    return node(machine, path, **facts)


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize(
    ("facts", "code"),
    [
        pytest.param({"error": "EACCES", "mode": 0o600}, "D03", id="0600"),
        pytest.param({"error": "EACCES", "nodev": True}, "D03", id="nodev"),
        pytest.param({"major": 1, "minor": 3}, "D02", id="null"),
        pytest.param({"kind": "file", "major": 0}, "D02", id="file"),
        pytest.param({"kind": "directory", "major": 0}, "D02", id="directory"),
        pytest.param({"error": "EPERM"}, "D04", id="EPERM"),
        pytest.param({"error": "ENXIO"}, "D02", id="ENXIO"),
        pytest.param({"exists": False, "kind": "", "error": "ENOENT", "major": 0}, "D01", id="missing"),
    ],
)
def test_each_fault_of_each_node(path: str, facts: dict[str, Any], code: str) -> None:
    machine = spoilt(path, **facts)
    assert causes(machine) == [code]
    assert finding_of(code, machine).evidence[0].startswith(path)
    assert causes(in_container(machine)) == [code]


@each("path", ANSWERS)
def test_as_root_the_library_makes_a_missing_node(path: str) -> None:
    root = changed(missing(refused(healthy(), ANSWERS[path]), path), platform__root=True)
    assert seen("D01", root) is None
    assert cause(root) == "X08"
    works = changed(missing(healthy(), path), platform__root=True)
    assert causes(works) == []


def test_in_a_container_root_cannot_make_it() -> None:
    machine = in_container(missing(refused(healthy(), 999), UVM))
    assert cause(machine) == "D01"
    assert "$ sudo nvidia-modprobe -u -c=0" in finding_of("D01", machine).fix
    assert finding_of("D01", machine).fix[0] == "On the host, not in this container:"


def test_without_the_module_even_root_cannot_make_it() -> None:
    machine = changed(missing(refused(healthy(), 999), UVM), platform__root=True, nodes__majors={"nvidia": 195})
    machine = changed(machine, kernel__modules=("nvidia", "nvidia_modeset"))
    assert cause(machine) == "D01"
    assert "the module nvidia_uvm is not loaded" in finding_of("D01", machine).evidence


def test_a_node_of_another_major_than_the_modules() -> None:
    machine = node(refused(healthy(), 999), UVM, major=511)
    assert cause(machine) == "D02"
    assert "/proc/devices gives nvidia-uvm the number 238" in finding_of("D02", machine).evidence
    lxc = finding_of("D02", in_container(machine, "lxc"))
    assert "| lxc.cgroup2.devices.allow: c 238:* rwm" in lxc.fix
    assert any("cdi generate" in line for line in finding_of("D02", in_container(machine)).fix)


def test_without_proc_devices_only_memory_devices_are_surely_wrong() -> None:
    machine = changed(refused(healthy(), 999), nodes__majors={})
    assert seen("D02", node(machine, UVM, major=511)) is None
    assert cause(node(machine, UVM, major=1, minor=3)) == "D02"


def test_the_answer_must_be_the_one_that_the_node_gives() -> None:
    denied = {"error": "EACCES", "mode": 0o600}
    assert seen("D03", node(refused(healthy(), 100), UVM, **denied)) is None
    assert seen("D03", node(refused(healthy(), 999), CARD, **denied)) is None
    assert seen("D03", node(refused(healthy(), 34), CONTROL, **denied)) is None
    assert causes(node(healthy(), UVM, **denied)) == []


def test_one_good_card_is_enough() -> None:
    other = Node("/dev/nvidia3", major=195, minor=3)
    machine = changed(refused(healthy(), 100), nodes__found=(*healthy().nodes.found, other))
    assert seen("D01", missing(machine, CARD)) is None
    assert seen("D03", node(machine, CARD, error="EACCES", mode=0o600)) is None


def test_a_variable_exonerates_the_nodes() -> None:
    assert seen("D03", relieved_by(spoilt(CONTROL, error="EACCES", mode=0o600), "CUDA_VISIBLE_DEVICES")) is None


# -- D03: who is let in, and how


def test_a_group_to_join() -> None:
    machine = spoilt(CONTROL, error="EACCES", mode=0o660, gid=44, group="video")
    assert finding_of("D03", machine).fix[0] == "$ sudo usermod -aG video $USER"
    for allowed in (changed(machine, platform__groups=("video",)), node(machine, CONTROL, mode=0o666)):
        assert finding_of("D03", allowed).fix[1:] == ("$ sudo dmesg | grep -i denied",)


def test_a_mode_to_change() -> None:
    machine = changed(spoilt(UVM, error="EACCES", mode=0o600), kernel__parameters={"DeviceFileMode": "384"})
    found = finding_of("D03", machine)
    assert "$ sudo chmod 0666 /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*" in found.fix
    unload = found.fix.index("$ sudo modprobe -r nvidia_modeset nvidia_uvm nvidia")
    assert found.fix[unload - 1] == "$ sudo systemctl stop nvidia-persistenced"
    assert any("NVreg_DeviceFileMode=0666" in line for line in found.fix)
    assert "the module has DeviceFileMode=0600" in found.evidence


def test_a_card_that_was_pulled_is_no_missing_node() -> None:
    machine = changed(missing(refused(healthy(), 100), CARD), hardware__pci=bare().hardware.pci, kernel__gpus=())
    machine = blind_nvml(machine)
    assert causes(machine) == []
    assert causes(missing(missing(machine, CONTROL), UVM)) == []
    assert causes(changed(machine, hardware__pci=healthy().hardware.pci)) == ["D01"]


def test_a_mount_without_devices() -> None:
    machine = spoilt(CARD, error="EACCES", nodev=True)
    assert "nodev" in finding_of("D03", machine).title
    assert "$ sudo mount -o remount,dev /dev" in finding_of("D03", machine).fix
    assert any("--gpus all" in line for line in finding_of("D03", in_container(machine)).fix)


def test_a_refusal_against_the_mode_is_not_understood() -> None:
    assert finding_of("D03", spoilt(CONTROL, error="EACCES")).title.startswith("probably: ")
    assert not finding_of("D03", spoilt(CONTROL, error="EACCES", mode=0o600)).title.startswith("probably: ")


def test_selinux_against_the_mode() -> None:
    machine = changed(spoilt(CONTROL, error="EACCES"), surroundings__selinux="enforcing")
    assert causes(machine) == ["D06"]
    assert finding_of("D06", machine).title.startswith("probably: ")
    assert cause(changed(machine, surroundings__selinux="permissive")) == "D03"
    assert cause(node(machine, CONTROL, mode=0o600)) == "D03"
    assert cause(node(machine, CONTROL, nodev=True)) == "D03"


# -- D04


def test_a_cgroup_that_took_the_right_away() -> None:
    machine = changed(in_container(spoilt(CONTROL, error="EPERM")), nodes__cgroup=("c 195:* m", "c 1:3 rwm"))
    assert cause(machine) == "D04"
    assert "the devices cgroup allows: c 195:* m, c 1:3 rwm" in finding_of("D04", machine).evidence
    assert "create-dev-char-symlinks" in " ".join(finding_of("D04", machine).fix)


# -- other drivers' nodes


def test_wsl_has_one_node() -> None:
    machine = refused(in_wsl(healthy()), 100)
    assert cause(node(machine, "/dev/dxg", error="EACCES", mode=0o600)) == "D03"
    assert cause(machine) == "U08"


def test_a_jetson_has_nodes_of_its_own() -> None:
    orin = changed(refused(healthy(), 999), hardware=Hardware(pci=(), tegra="Orin"))
    denied = Node("/dev/nvhost-gpu", mode=0o660, gid=44, group="video", error="EACCES")
    machine = changed(orin, nodes__found=(*missing(orin, CONTROL).nodes.found, denied))
    assert cause(machine) == "D03"
    assert cause(changed(machine, nodes__found=missing(orin, CONTROL).nodes.found)) == "X08"
