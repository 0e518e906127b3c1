"""The kernel's half of the driver."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import (
    bare,
    card,
    changed,
    healthy,
    in_container,
    in_wsl,
    library,
    refused,
)
from tests.diagnose.rules.machine_rows import blind_nvml, cause, finding_of, node, relieved_by, seen, unloaded
from tests.each import each

from transload.machine import Kernel, Machine, Unknown

KERNEL = "6.8.0-45-generic"


def driven(device: int, version: str, flavour: str = "open") -> Machine:
    """A card under a driver that does not serve it."""
    return changed(
        blind_nvml(refused(healthy(), 100)),
        hardware__pci=(card(device),),
        kernel__version=version,
        kernel__flavour=flavour,
        kernel__gpus=(),
        driver__libraries__cuda=(library("libcuda.so.1", version),),
    )


# -- not loaded


def test_no_driver_is_installed() -> None:
    machine = unloaded(healthy())
    assert cause(machine) == "K01"
    found = finding_of("K01", machine)
    assert "there is no nvidia.ko under /lib/modules" in found.evidence
    assert found.fix[:2] == ("$ sudo apt install ubuntu-drivers-common", "$ sudo ubuntu-drivers install")
    assert cause(bare()) == ""


def test_a_driver_for_an_old_card_is_of_a_branch_that_knows_it() -> None:
    pascal = changed(unloaded(healthy()), hardware__pci=(card(0x1B06, ""),))
    assert any("nvidia-driver-580" in line and "open" not in line for line in finding_of("K01", pascal).fix)


def test_a_driver_that_is_installed_and_not_loaded() -> None:
    machine = unloaded(healthy(), built_for=(KERNEL,))
    assert cause(machine) == "K01"
    assert finding_of("K01", machine).title == "NVIDIA's kernel driver is installed but not loaded"
    assert "$ sudo modprobe nvidia" in finding_of("K01", machine).fix


def test_what_could_not_be_found_out_is_said() -> None:
    machine = unloaded(healthy(), built_for=Unknown("/lib/modules: permission denied"))
    assert "permission denied" in finding_of("K01", machine).evidence[-1]


def test_an_unknown_module_is_no_cause() -> None:
    assert seen("K01", unloaded(healthy(), loaded=Unknown("/sys is not mounted"))) is None


def test_in_a_container_the_driver_is_the_hosts() -> None:
    machine = in_container(unloaded(healthy()))
    assert cause(machine) == "K01"
    assert "on the host" in finding_of("K01", machine).title
    assert not any("apt" in line for line in finding_of("K01", machine).fix)


def test_a_driver_for_another_kernel() -> None:
    machine = unloaded(healthy(), built_for=("6.8.0-44-generic",))
    assert cause(machine) == "K02"
    assert "$ sudo dkms autoinstall" in finding_of("K02", machine).fix
    assert seen("K02", unloaded(healthy(), built_for=("6.8.0-44-generic", KERNEL))) is None
    assert seen("K02", changed(healthy(), kernel__built_for=("6.8.0-44-generic",))) is None  # loaded all the same


def test_an_update_without_a_reboot_wants_a_reboot_and_nothing_else() -> None:
    machine = changed(unloaded(healthy(), built_for=("6.12.4-arch1-1",)), platform__kernel="6.11.1-arch1-1")
    found = finding_of("K02", machine)
    assert [line for line in found.fix if line.startswith("$ ")] == ["$ sudo reboot"]
    assert "still running" in found.title


@each(
    ("distribution", "like", "manager", "command"),
    [
        ("fedora", (), "dnf", "$ sudo akmods --force"),
        ("rocky", ("rhel", "centos", "fedora"), "dnf", "$ sudo dkms autoinstall"),
        ("ubuntu", ("debian",), "apt", "$ apt search --names-only linux-modules-nvidia | grep $(uname -r)"),
    ],
)
def test_a_module_is_built_in_the_distributions_way(
    distribution: str, like: tuple[str, ...], manager: str, command: str
) -> None:
    machine = changed(
        unloaded(healthy(), built_for=("6.8.0-44-generic",)),
        platform__distribution=distribution,
        platform__distribution_like=like,
        platform__package_manager=manager,
    )
    assert command in finding_of("K02", machine).fix


def test_secure_boot_is_likely_until_the_log_says_so() -> None:
    machine = unloaded(healthy(), built_for=(KERNEL,), secure_boot=True)
    assert cause(machine) == "K03"
    assert finding_of("K03", machine).title.startswith("probably: ")
    log = ("nvidia: Loading of module with unavailable key is rejected",)
    assert not finding_of("K03", changed(machine, kernel__log=log)).title.startswith("probably: ")
    assert cause(changed(machine, kernel__secure_boot=False)) == "K01"
    assert cause(changed(machine, kernel__built_for=())) == "K01"


@each("driver", ["nouveau", "nova_core"])
def test_another_driver_holds_the_card(driver: str) -> None:
    machine = changed(unloaded(healthy()), hardware__pci=(card(0x2335, driver),))
    assert cause(machine) == "K04"
    assert f"bound to {driver}" in finding_of("K04", machine).evidence[0]
    installed = finding_of("K04", changed(machine, kernel__built_for=(KERNEL,)))
    assert any("blacklist-nouveau.conf" in line for line in installed.fix)
    assert "$ sudo update-initramfs -u" in installed.fix


def test_a_second_card_on_nouveau_does_not_matter() -> None:
    pci = (card(0x2335), card(0x1B06, "nouveau", "0000:01:00.0"))
    assert seen("K04", changed(healthy(), hardware__pci=pci)) is None
    assert seen("K04", changed(refused(healthy(), 999), hardware__pci=pci)) is None


def test_cards_set_aside_for_virtual_machines() -> None:
    pci = (card(0x2335, "vfio-pci"), card(0x2335, "vfio-pci", "0000:18:00.0"))
    machine = changed(unloaded(healthy()), hardware__pci=pci)
    assert cause(machine) == "K05"
    assert seen("K05", changed(machine, hardware__pci=(pci[0], card(0x2335)))) is None
    asleep = finding_of("K05", changed(machine, hardware__pci=(replace(pci[0], power="D3cold"), pci[1]))).evidence
    assert [line.endswith(", in power state D3cold") for line in asleep] == [True, False]


def test_none_of_it_applies_under_wsl() -> None:
    machine = refused(in_wsl(healthy()), 100)
    assert not any(seen(f"K{number:02}", machine) for number in range(1, 13))


# -- made for another card


@each(("device", "version"), [(0x1B06, "595.58.03"), (0x1DB1, "590.44.01"), (0x102D, "550.54.14")])
def test_a_driver_too_new_for_the_card(device: int, version: str) -> None:
    machine = driven(device, version, "proprietary")
    assert cause(machine) == "K06"
    assert not finding_of("K06", machine).title.startswith("probably")


def test_the_module_that_refused_to_load_is_known_by_its_libraries() -> None:
    loaded = driven(0x1B06, "595.58.03")
    machine = changed(loaded, kernel=Kernel(loaded=False, built_for=(KERNEL,), secure_boot=False))
    assert cause(machine) == "K06"
    assert cause(changed(machine, driver__libraries__cuda=(library("libcuda.so.1", "580.65.06"),))) == "K01"


def test_the_last_branch_that_knows_the_card_is_no_fault() -> None:
    assert seen("K06", driven(0x1B06, "580.159.04", "proprietary")) is None
    assert seen("K06", driven(0x2335, "595.58.03")) is None


def test_an_old_card_beside_one_that_works_is_a_note() -> None:
    pci = (card(0x2335), card(0x1B06, "", "0000:01:00.0"))
    machine = changed(healthy(), hardware__pci=pci, kernel__version="595.58.03")
    found = finding_of("K06", machine)
    assert found.severity == "note"
    assert any(line.startswith("The other cards work") for line in found.fix)


def test_a_driver_that_would_kill_the_card_at_work_is_not_recommended() -> None:
    pci = (card(0x2684), card(0x128B, "", "0000:01:00.0"))  # RTX 4090, GT 710
    found = finding_of("K06", changed(healthy(), hardware__pci=pci))
    assert found.severity == "note"
    assert found.fix == ("Leave it as it is: no driver supports both this card and Ada.",)


def test_no_driver_serves_blackwell_and_pascal_so_the_newer_card_is_chosen() -> None:
    pci = (card(0x2B85, ""), card(0x1B80, "", "0000:01:00.0"))
    found = finding_of("K01", unloaded(changed(healthy(), hardware__pci=pci)))
    assert "$ sudo apt install nvidia-driver-580-open" in found.fix
    assert found.fix[0] == "No driver supports both Blackwell and Pascal. This is the one for Blackwell:"


def test_the_open_module_on_a_card_before_turing() -> None:
    machine = driven(0x1BB3, "580.178.04", "open")
    assert cause(machine) == "K07"
    assert any("nvidia-driver-580" in line and "open" not in line for line in finding_of("K07", machine).fix)
    assert seen("K07", driven(0x1BB3, "580.178.04", "proprietary")) is None
    assert seen("K07", driven(0x2335, "580.178.04", "open")) is None


def test_the_log_of_the_open_module_runs_over_several_lines() -> None:
    log = (
        "NVRM: The NVIDIA GPU 0000:af:00.0 (PCI ID: 10de:1db5)",
        "NVRM: installed in this system is not supported by open",
        "NVRM: nvidia.ko because it does not include the required GPU",
        "NVRM: System Processor (GSP).",
    )
    machine = changed(driven(0x1DB5, "570.26", ""), kernel__loaded=False, kernel__log=log)
    assert cause(machine) == "K07"
    assert "the required GPU System Pro" in finding_of("K07", machine).evidence[-1]


def test_the_proprietary_module_on_blackwell() -> None:
    machine = driven(0x2B85, "570.124.06", "proprietary")
    assert cause(machine) == "K08"
    assert any("-open" in line for line in finding_of("K08", machine).fix)
    assert seen("K08", driven(0x2B85, "570.124.06", "open")) is None
    assert seen("K08", driven(0x2684, "570.124.06", "proprietary")) is None


def test_a_driver_too_old_for_the_card() -> None:
    assert cause(driven(0x2B85, "550.54.14", "open")) == "K09"
    assert cause(driven(0x2684, "515.43.04", "proprietary")) == "K09"
    assert seen("K09", driven(0x2684, "520.56.06")) is None


def test_a_card_that_no_table_knows_and_the_log_does() -> None:
    log = ("NVRM: installed in this system is not supported by the", "NVRM: NVIDIA 520.56.06 driver release.")
    machine = driven(0xFFF0, "520.56.06")
    assert seen("K09", machine) is None
    assert cause(changed(machine, kernel__log=log)) == "K09"


def test_a_card_that_nvml_sees_is_served() -> None:
    machine = changed(refused(healthy(), 100), hardware__pci=(card(0x1B06),), kernel__version="595.58.03")
    assert seen("K06", machine) is None


def test_missing_firmware() -> None:
    machine = changed(blind_nvml(refused(healthy(), 100)), kernel__gpus=(), kernel__firmware=False)
    assert cause(machine) == "K12"
    assert finding_of("K12", machine).title.startswith("probably: ")
    log = ("nvidia: loading /lib/firmware/nvidia/570.133.20/gsp_ga10x.bin failed with error -4",)
    assert not finding_of("K12", changed(machine, kernel__log=log)).title.startswith("probably: ")
    assert seen("K12", changed(machine, kernel__firmware=True)) is None
    assert seen("K12", in_container(machine)) is None
    assert seen("K12", changed(healthy(), kernel__firmware=False)) is None


# -- loaded, and ill


def test_heterogeneous_memory_management() -> None:
    machine = refused(healthy(), 3)
    assert cause(machine) == "K10"
    assert finding_of("K10", machine).title.startswith("probably: ")
    log = ("nvidia-uvm: uvm_pmm_gpu.c: request_free_mem_region() err -34",)
    assert not finding_of("K10", changed(machine, kernel__log=log)).title.startswith("probably: ")
    assert "uvm_disable_hmm=1" in " ".join(finding_of("K10", machine).fix)


@each("fact", [{"kernel__uvm_disable_hmm": "Y"}, {"kernel__flavour": "proprietary"}, {"kernel__kaslr": False}])
def test_what_speaks_against_it(fact: dict[str, object]) -> None:
    machine = changed(refused(healthy(), 3), **fact)
    assert cause(machine) == "X08"


def test_a_suspend_is_a_likely_reason_for_999() -> None:
    machine = changed(refused(healthy(), 999), platform__suspends=3)
    assert cause(machine) == "K11"
    assert finding_of("K11", machine).title.startswith("probably: ")
    assert "suspended 3 times" in " ".join(finding_of("K11", machine).evidence)
    assert cause(refused(healthy(), 999)) == "X08"
    assert seen("K11", node(machine, "/dev/nvidia-uvm", error="EACCES")) is None
    assert seen("K11", blind_nvml(machine)) is None


def test_a_variable_exonerates_the_kernel() -> None:
    machine = relieved_by(changed(refused(healthy(), 999), platform__suspends=3), "LD_LIBRARY_PATH")
    assert seen("K11", machine) is None
    assert seen("K10", relieved_by(refused(healthy(), 3), "LD_LIBRARY_PATH")) is None


def test_the_address_of_nvml_and_of_the_bus_are_the_same() -> None:
    gpu = replace(healthy().driver.nvml.gpus[0], address="00000000:17:00.0")
    machine = changed(refused(healthy(), 100), hardware__pci=(card(0x1B06),), driver__nvml__gpus=(gpu,))
    assert seen("K06", changed(machine, kernel__version="595.58.03")) is None
