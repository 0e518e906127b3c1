"""Rules about device nodes: missing, wrong, or not allowed to be opened."""

from __future__ import annotations

from typing import Any

import pytest
from tests.diagnose.machines import cuinit_fails, healthy, in_container, in_wsl, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import (
    cause,
    causes,
    find,
    finding_of,
    missing_node,
    with_node,
    without_nvml_gpus,
    works_without,
)
from tests.each import each

from transload.machine import Hardware, Machine, Node

CONTROL, CARD, UVM = "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"
CUINIT_CODES = {CONTROL: 100, CARD: 100, UVM: 999}


def with_bad_node(path: str, **facts: Any) -> Machine:
    """A machine with one bad node, and the codes that CUDA and NVML return for it on a real machine."""
    machine = cuinit_fails(healthy(), CUINIT_CODES[path])
    if path == CONTROL:
        machine = without_nvml_gpus(machine, 17 if facts.get("major") else 4)
    elif path == CARD:
        machine = without_nvml_gpus(machine)
    return with_node(machine, path, **facts)


@pytest.mark.parametrize("path", CUINIT_CODES)
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
def test_every_fault_of_every_node(path: str, facts: dict[str, Any], code: str) -> None:
    machine = with_bad_node(path, **facts)
    assert causes(machine) == [code]
    assert finding_of(code, machine).evidence[0].startswith(path)
    assert causes(in_container(machine)) == [code]


@each("path", CUINIT_CODES)
def test_missing_node_is_not_a_cause_where_root_can_create_it(path: str) -> None:
    root = with_facts(missing_node(cuinit_fails(healthy(), CUINIT_CODES[path]), path), platform__root=True)
    assert find("D01", root) is None
    assert cause(root) == "X08"
    works = with_facts(missing_node(healthy(), path), platform__root=True)
    assert causes(works) == []


def test_root_in_a_container_cannot_create_a_missing_node() -> None:
    machine = in_container(missing_node(cuinit_fails(healthy(), 999), UVM))
    assert cause(machine) == "D01"
    assert "$ sudo nvidia-modprobe -u -c=0" in finding_of("D01", machine).fix
    assert finding_of("D01", machine).fix[0] == "On the host, not in this container:"


def test_root_cannot_create_a_node_whose_module_is_not_loaded() -> None:
    machine = with_facts(
        missing_node(cuinit_fails(healthy(), 999), UVM), platform__root=True, nodes__majors={"nvidia": 195}
    )
    machine = with_facts(machine, kernel__modules=("nvidia", "nvidia_modeset"))
    assert cause(machine) == "D01"
    assert "the module nvidia_uvm is not loaded" in finding_of("D01", machine).evidence


def test_node_with_another_major_number_than_its_module() -> None:
    machine = with_node(cuinit_fails(healthy(), 999), UVM, major=511)
    assert cause(machine) == "D02"
    assert "/proc/devices gives nvidia-uvm the number 238" in finding_of("D02", machine).evidence
    lxc = finding_of("D02", in_container(machine, "lxc"))
    assert "| lxc.cgroup2.devices.allow: c 238:* rwm" in lxc.fix
    assert any("cdi generate" in line for line in finding_of("D02", in_container(machine)).fix)


def test_without_proc_devices_only_memory_devices_are_known_to_be_wrong() -> None:
    machine = with_facts(cuinit_fails(healthy(), 999), nodes__majors={})
    assert find("D02", with_node(machine, UVM, major=511)) is None
    assert cause(with_node(machine, UVM, major=1, minor=3)) == "D02"


def test_node_is_blamed_only_for_the_cuinit_code_it_causes() -> None:
    denied = {"error": "EACCES", "mode": 0o600}
    assert find("D03", with_node(cuinit_fails(healthy(), 100), UVM, **denied)) is None
    assert find("D03", with_node(cuinit_fails(healthy(), 999), CARD, **denied)) is None
    assert find("D03", with_node(cuinit_fails(healthy(), 34), CONTROL, **denied)) is None
    assert causes(with_node(healthy(), UVM, **denied)) == []


def test_bad_node_is_ignored_where_another_card_has_a_good_one() -> None:
    other = Node("/dev/nvidia3", major=195, minor=3)
    machine = with_facts(cuinit_fails(healthy(), 100), nodes__found=(*healthy().nodes.found, other))
    assert find("D01", missing_node(machine, CARD)) is None
    assert find("D03", with_node(machine, CARD, error="EACCES", mode=0o600)) is None


def test_nodes_are_not_blamed_where_the_driver_works_without_a_variable() -> None:
    assert (
        find("D03", works_without(with_bad_node(CONTROL, error="EACCES", mode=0o600), "CUDA_VISIBLE_DEVICES")) is None
    )


# -- D03: permissions


def test_fix_adds_the_user_to_the_group_of_the_node() -> None:
    machine = with_bad_node(CONTROL, error="EACCES", mode=0o660, gid=44, group="video")
    assert finding_of("D03", machine).fix[0] == "$ sudo usermod -aG video $USER"
    for allowed in (with_facts(machine, platform__groups=("video",)), with_node(machine, CONTROL, mode=0o666)):
        assert finding_of("D03", allowed).fix[1:] == ("$ sudo dmesg | grep -i denied",)


def test_fix_changes_the_mode_of_the_nodes() -> None:
    machine = with_facts(with_bad_node(UVM, error="EACCES", mode=0o600), kernel__parameters={"DeviceFileMode": "384"})
    finding = finding_of("D03", machine)
    assert "$ sudo chmod 0666 /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*" in finding.fix
    unload = finding.fix.index("$ sudo modprobe -r nvidia_modeset nvidia_uvm nvidia")
    assert finding.fix[unload - 1] == "$ sudo systemctl stop nvidia-persistenced"
    assert any("NVreg_DeviceFileMode=0666" in line for line in finding.fix)
    assert "the module has DeviceFileMode=0600" in finding.evidence


def test_nodes_of_a_removed_card_are_not_missing() -> None:
    machine = with_facts(
        missing_node(cuinit_fails(healthy(), 100), CARD), hardware__pci=without_gpu().hardware.pci, kernel__gpus=()
    )
    machine = without_nvml_gpus(machine)
    assert causes(machine) == []
    assert causes(missing_node(missing_node(machine, CONTROL), UVM)) == []
    assert causes(with_facts(machine, hardware__pci=healthy().hardware.pci)) == ["D01"]


def test_nodev_mount() -> None:
    machine = with_bad_node(CARD, error="EACCES", nodev=True)
    assert "nodev" in finding_of("D03", machine).title
    assert "$ sudo mount -o remount,dev /dev" in finding_of("D03", machine).fix
    assert any("--gpus all" in line for line in finding_of("D03", in_container(machine)).fix)


def test_refusal_despite_the_mode_is_only_probable() -> None:
    assert finding_of("D03", with_bad_node(CONTROL, error="EACCES")).title.startswith("probably: ")
    assert not finding_of("D03", with_bad_node(CONTROL, error="EACCES", mode=0o600)).title.startswith("probably: ")


def test_selinux_is_the_probable_cause_of_a_refusal_despite_the_mode() -> None:
    machine = with_facts(with_bad_node(CONTROL, error="EACCES"), surroundings__selinux="enforcing")
    assert causes(machine) == ["D06"]
    assert finding_of("D06", machine).title.startswith("probably: ")
    assert cause(with_facts(machine, surroundings__selinux="permissive")) == "D03"
    assert cause(with_node(machine, CONTROL, mode=0o600)) == "D03"
    assert cause(with_node(machine, CONTROL, nodev=True)) == "D03"


# -- D04: cgroups


def test_devices_cgroup_denies_a_node() -> None:
    machine = with_facts(in_container(with_bad_node(CONTROL, error="EPERM")), nodes__cgroup=("c 195:* m", "c 1:3 rwm"))
    assert cause(machine) == "D04"
    assert "the devices cgroup allows: c 195:* m, c 1:3 rwm" in finding_of("D04", machine).evidence
    assert "create-dev-char-symlinks" in " ".join(finding_of("D04", machine).fix)


# -- nodes of WSL and Jetson


def test_wsl_node_that_cannot_be_opened() -> None:
    machine = cuinit_fails(in_wsl(healthy()), 100)
    assert cause(with_node(machine, "/dev/dxg", error="EACCES", mode=0o600)) == "D03"
    assert cause(machine) == "U08"


def test_jetson_node_that_cannot_be_opened() -> None:
    orin = with_facts(cuinit_fails(healthy(), 999), hardware=Hardware(pci=(), tegra="Orin"))
    denied = Node("/dev/nvhost-gpu", mode=0o660, gid=44, group="video", error="EACCES")
    machine = with_facts(orin, nodes__found=(*missing_node(orin, CONTROL).nodes.found, denied))
    assert cause(machine) == "D03"
    assert cause(with_facts(machine, nodes__found=missing_node(orin, CONTROL).nodes.found)) == "X08"
