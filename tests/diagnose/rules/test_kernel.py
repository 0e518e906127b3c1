"""Rules about the kernel driver: not loaded, made for other cards, or failing."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import (
    cuinit_fails,
    healthy,
    in_container,
    in_wsl,
    library,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    cause,
    driver_not_loaded,
    find,
    finding_of,
    with_node,
    without_nvml_gpus,
    works_without,
)
from tests.each import each

from transload.machine import Kernel, Machine, Unknown

KERNEL = "6.8.0-45-generic"


def card_under_driver(device: int, version: str, flavour: str = "open") -> Machine:
    """A card under a loaded kernel driver, where neither CUDA nor NVML sees it."""
    return with_facts(
        without_nvml_gpus(cuinit_fails(healthy(), 100)),
        hardware__pci=(pci_gpu(device),),
        kernel__version=version,
        kernel__flavour=flavour,
        kernel__gpus=(),
        driver__libraries__cuda=(library("libcuda.so.1", version),),
    )


# -- not loaded


def test_no_driver_is_installed() -> None:
    machine = driver_not_loaded(healthy())
    assert cause(machine) == "K01"
    finding = finding_of("K01", machine)
    assert "there is no nvidia.ko under /lib/modules" in finding.evidence
    assert finding.fix[:2] == ("$ sudo apt install ubuntu-drivers-common", "$ sudo ubuntu-drivers install")
    assert cause(without_gpu()) == ""


def test_fix_installs_a_driver_branch_that_supports_an_old_card() -> None:
    pascal = with_facts(driver_not_loaded(healthy()), hardware__pci=(pci_gpu(0x1B06, ""),))
    assert any("nvidia-driver-580" in line and "open" not in line for line in finding_of("K01", pascal).fix)


def test_driver_installed_but_not_loaded() -> None:
    machine = driver_not_loaded(healthy(), built_for=(KERNEL,))
    assert cause(machine) == "K01"
    assert finding_of("K01", machine).title == "NVIDIA's kernel driver is installed but not loaded"
    assert "$ sudo modprobe nvidia" in finding_of("K01", machine).fix


def test_unreadable_modules_folder_is_mentioned_in_the_evidence() -> None:
    machine = driver_not_loaded(healthy(), built_for=Unknown("/lib/modules: permission denied"))
    assert "permission denied" in finding_of("K01", machine).evidence[-1]


def test_unknown_module_state_is_not_a_cause() -> None:
    assert find("K01", driver_not_loaded(healthy(), loaded=Unknown("/sys is not mounted"))) is None


def test_fix_in_a_container_is_on_the_host() -> None:
    machine = in_container(driver_not_loaded(healthy()))
    assert cause(machine) == "K01"
    assert "on the host" in finding_of("K01", machine).title
    assert not any("apt" in line for line in finding_of("K01", machine).fix)


def test_driver_built_for_another_kernel() -> None:
    machine = driver_not_loaded(healthy(), built_for=("6.8.0-44-generic",))
    assert cause(machine) == "K02"
    assert "$ sudo dkms autoinstall" in finding_of("K02", machine).fix
    assert find("K02", driver_not_loaded(healthy(), built_for=("6.8.0-44-generic", KERNEL))) is None
    assert find("K02", with_facts(healthy(), kernel__built_for=("6.8.0-44-generic",))) is None  # loaded anyway


def test_fix_after_a_kernel_update_is_only_a_reboot() -> None:
    machine = with_facts(driver_not_loaded(healthy(), built_for=("6.12.4-arch1-1",)), platform__kernel="6.11.1-arch1-1")
    finding = finding_of("K02", machine)
    assert [line for line in finding.fix if line.startswith("$ ")] == ["$ sudo reboot"]
    assert "still running" in finding.title


@each(
    ("distribution", "like", "manager", "command"),
    [
        ("fedora", (), "dnf", "$ sudo akmods --force"),
        ("rocky", ("rhel", "centos", "fedora"), "dnf", "$ sudo dkms autoinstall"),
        ("ubuntu", ("debian",), "apt", "$ apt search --names-only linux-modules-nvidia | grep $(uname -r)"),
    ],
)
def test_fix_builds_the_module_with_the_distributions_tool(
    distribution: str, like: tuple[str, ...], manager: str, command: str
) -> None:
    machine = with_facts(
        driver_not_loaded(healthy(), built_for=("6.8.0-44-generic",)),
        platform__distribution=distribution,
        platform__distribution_like=like,
        platform__package_manager=manager,
    )
    assert command in finding_of("K02", machine).fix


def test_secure_boot_is_probable_until_the_kernel_log_proves_it() -> None:
    machine = driver_not_loaded(healthy(), built_for=(KERNEL,), secure_boot=True)
    assert cause(machine) == "K03"
    assert finding_of("K03", machine).title.startswith("probably: ")
    log = ("nvidia: Loading of module with unavailable key is rejected",)
    assert not finding_of("K03", with_facts(machine, kernel__log=log)).title.startswith("probably: ")
    assert cause(with_facts(machine, kernel__secure_boot=False)) == "K01"
    assert cause(with_facts(machine, kernel__built_for=())) == "K01"


@each("driver", ["nouveau", "nova_core"])
def test_card_bound_to_another_driver(driver: str) -> None:
    machine = with_facts(driver_not_loaded(healthy()), hardware__pci=(pci_gpu(0x2335, driver),))
    assert cause(machine) == "K04"
    assert f"bound to {driver}" in finding_of("K04", machine).evidence[0]
    installed = finding_of("K04", with_facts(machine, kernel__built_for=(KERNEL,)))
    assert any("blacklist-nouveau.conf" in line for line in installed.fix)
    assert "$ sudo update-initramfs -u" in installed.fix


def test_second_card_on_nouveau_is_ignored() -> None:
    pci = (pci_gpu(0x2335), pci_gpu(0x1B06, "nouveau", "0000:01:00.0"))
    assert find("K04", with_facts(healthy(), hardware__pci=pci)) is None
    assert find("K04", with_facts(cuinit_fails(healthy(), 999), hardware__pci=pci)) is None


def test_cards_reserved_for_virtual_machines() -> None:
    pci = (pci_gpu(0x2335, "vfio-pci"), pci_gpu(0x2335, "vfio-pci", "0000:18:00.0"))
    machine = with_facts(driver_not_loaded(healthy()), hardware__pci=pci)
    assert cause(machine) == "K05"
    assert find("K05", with_facts(machine, hardware__pci=(pci[0], pci_gpu(0x2335)))) is None
    asleep = finding_of("K05", with_facts(machine, hardware__pci=(replace(pci[0], power="D3cold"), pci[1]))).evidence
    assert [line.endswith(", in power state D3cold") for line in asleep] == [True, False]


def test_no_kernel_rule_applies_under_wsl() -> None:
    machine = cuinit_fails(in_wsl(healthy()), 100)
    assert not any(find(f"K{number:02}", machine) for number in range(1, 13))


# -- made for other cards


@each(("device", "version"), [(0x1B06, "595.58.03"), (0x1DB1, "590.44.01"), (0x102D, "550.54.14")])
def test_driver_too_new_for_the_card(device: int, version: str) -> None:
    machine = card_under_driver(device, version, "proprietary")
    assert cause(machine) == "K06"
    assert not finding_of("K06", machine).title.startswith("probably")


def test_version_of_a_module_that_did_not_load_is_taken_from_libcuda() -> None:
    loaded = card_under_driver(0x1B06, "595.58.03")
    machine = with_facts(loaded, kernel=Kernel(loaded=False, built_for=(KERNEL,), secure_boot=False))
    assert cause(machine) == "K06"
    assert cause(with_facts(machine, driver__libraries__cuda=(library("libcuda.so.1", "580.65.06"),))) == "K01"


def test_last_branch_that_supports_the_card_is_not_a_fault() -> None:
    assert find("K06", card_under_driver(0x1B06, "580.159.04", "proprietary")) is None
    assert find("K06", card_under_driver(0x2335, "595.58.03")) is None


def test_unsupported_card_beside_a_working_one_is_a_note() -> None:
    pci = (pci_gpu(0x2335), pci_gpu(0x1B06, "", "0000:01:00.0"))
    machine = with_facts(healthy(), hardware__pci=pci, kernel__version="595.58.03")
    finding = finding_of("K06", machine)
    assert finding.severity == "note"
    assert any(line.startswith("The other cards work") for line in finding.fix)


def test_fix_keeps_the_driver_that_the_working_card_needs() -> None:
    pci = (pci_gpu(0x2684), pci_gpu(0x128B, "", "0000:01:00.0"))  # RTX 4090, GT 710
    finding = finding_of("K06", with_facts(healthy(), hardware__pci=pci))
    assert finding.severity == "note"
    assert finding.fix == ("Leave it as it is: no driver supports both this card and Ada.",)


def test_fix_serves_the_newer_card_where_no_driver_supports_both() -> None:
    pci = (pci_gpu(0x2B85, ""), pci_gpu(0x1B80, "", "0000:01:00.0"))
    finding = finding_of("K01", driver_not_loaded(with_facts(healthy(), hardware__pci=pci)))
    assert "$ sudo apt install nvidia-driver-580-open" in finding.fix
    assert finding.fix[0] == "No driver supports both Blackwell and Pascal. This is the one for Blackwell:"


def test_open_module_on_a_card_older_than_turing() -> None:
    machine = card_under_driver(0x1BB3, "580.178.04", "open")
    assert cause(machine) == "K07"
    assert any("nvidia-driver-580" in line and "open" not in line for line in finding_of("K07", machine).fix)
    assert find("K07", card_under_driver(0x1BB3, "580.178.04", "proprietary")) is None
    assert find("K07", card_under_driver(0x2335, "580.178.04", "open")) is None


def test_kernel_log_message_over_several_lines_is_joined() -> None:
    log = (
        "NVRM: The NVIDIA GPU 0000:af:00.0 (PCI ID: 10de:1db5)",
        "NVRM: installed in this system is not supported by open",
        "NVRM: nvidia.ko because it does not include the required GPU",
        "NVRM: System Processor (GSP).",
    )
    machine = with_facts(card_under_driver(0x1DB5, "570.26", ""), kernel__loaded=False, kernel__log=log)
    assert cause(machine) == "K07"
    assert "the required GPU System Pro" in finding_of("K07", machine).evidence[-1]


def test_proprietary_module_on_blackwell() -> None:
    machine = card_under_driver(0x2B85, "570.124.06", "proprietary")
    assert cause(machine) == "K08"
    assert any("-open" in line for line in finding_of("K08", machine).fix)
    assert find("K08", card_under_driver(0x2B85, "570.124.06", "open")) is None
    assert find("K08", card_under_driver(0x2684, "570.124.06", "proprietary")) is None


def test_driver_too_old_for_the_card() -> None:
    assert cause(card_under_driver(0x2B85, "550.54.14", "open")) == "K09"
    assert cause(card_under_driver(0x2684, "515.43.04", "proprietary")) == "K09"
    assert find("K09", card_under_driver(0x2684, "520.56.06")) is None


def test_kernel_log_shows_that_an_unknown_card_is_unsupported() -> None:
    log = ("NVRM: installed in this system is not supported by the", "NVRM: NVIDIA 520.56.06 driver release.")
    machine = card_under_driver(0xFFF0, "520.56.06")
    assert find("K09", machine) is None
    assert cause(with_facts(machine, kernel__log=log)) == "K09"


def test_card_that_nvml_sees_is_supported() -> None:
    machine = with_facts(cuinit_fails(healthy(), 100), hardware__pci=(pci_gpu(0x1B06),), kernel__version="595.58.03")
    assert find("K06", machine) is None


def test_missing_firmware() -> None:
    machine = with_facts(without_nvml_gpus(cuinit_fails(healthy(), 100)), kernel__gpus=(), kernel__firmware=False)
    assert cause(machine) == "K12"
    assert finding_of("K12", machine).title.startswith("probably: ")
    log = ("nvidia: loading /lib/firmware/nvidia/570.133.20/gsp_ga10x.bin failed with error -4",)
    assert not finding_of("K12", with_facts(machine, kernel__log=log)).title.startswith("probably: ")
    assert find("K12", with_facts(machine, kernel__firmware=True)) is None
    assert find("K12", in_container(machine)) is None
    assert find("K12", with_facts(healthy(), kernel__firmware=False)) is None


# -- loaded but failing


def test_hmm_is_the_probable_cause_of_error_3() -> None:
    machine = cuinit_fails(healthy(), 3)
    assert cause(machine) == "K10"
    assert finding_of("K10", machine).title.startswith("probably: ")
    log = ("nvidia-uvm: uvm_pmm_gpu.c: request_free_mem_region() err -34",)
    assert not finding_of("K10", with_facts(machine, kernel__log=log)).title.startswith("probably: ")
    assert "uvm_disable_hmm=1" in " ".join(finding_of("K10", machine).fix)


@each("fact", [{"kernel__uvm_disable_hmm": "Y"}, {"kernel__flavour": "proprietary"}, {"kernel__kaslr": False}])
def test_hmm_is_ruled_out_by_other_facts(fact: dict[str, object]) -> None:
    machine = with_facts(cuinit_fails(healthy(), 3), **fact)
    assert cause(machine) == "X08"


def test_suspend_is_the_probable_cause_of_error_999() -> None:
    machine = with_facts(cuinit_fails(healthy(), 999), platform__suspends=3)
    assert cause(machine) == "K11"
    assert finding_of("K11", machine).title.startswith("probably: ")
    assert "suspended 3 times" in " ".join(finding_of("K11", machine).evidence)
    assert cause(cuinit_fails(healthy(), 999)) == "X08"
    assert find("K11", with_node(machine, "/dev/nvidia-uvm", error="EACCES")) is None
    assert find("K11", without_nvml_gpus(machine)) is None


def test_kernel_is_not_blamed_where_the_driver_works_without_a_variable() -> None:
    machine = works_without(with_facts(cuinit_fails(healthy(), 999), platform__suspends=3), "LD_LIBRARY_PATH")
    assert find("K11", machine) is None
    assert find("K10", works_without(cuinit_fails(healthy(), 3), "LD_LIBRARY_PATH")) is None


def test_nvml_and_pci_spellings_of_an_address_are_equal() -> None:
    gpu = replace(healthy().driver.nvml.gpus[0], address="00000000:17:00.0")
    machine = with_facts(cuinit_fails(healthy(), 100), hardware__pci=(pci_gpu(0x1B06),), driver__nvml__gpus=(gpu,))
    assert find("K06", with_facts(machine, kernel__version="595.58.03")) is None
