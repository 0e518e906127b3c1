"""Rules about the card itself: absent, switched off, lost, with memory errors, or not starting."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import (
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    alarms,
    cause,
    driver_not_loaded,
    find,
    finding_of,
    with_gpu,
    with_node,
    without_nvml_gpus,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Hardware, Machine, Step, Unknown

NO_DEVICE = without_nvml_gpus(cuinit_fails(healthy(), 100))


@each(
    "machine",
    [
        healthy(),
        in_container(healthy()),
        in_container(healthy(), "podman"),
        in_container(healthy(), "apptainer"),
        in_container(healthy(), "lxc"),
        in_slurm(healthy()),
        in_wsl(healthy()),
        without_gpu(),
        in_container(without_gpu()),
        in_slurm(without_gpu()),
        Machine(),
    ],
)
def test_machine_without_a_fault_raises_no_alarm(machine: Machine) -> None:
    assert alarms(machine) == []


def test_absent_card_is_a_note() -> None:
    finding = finding_of("H01", without_gpu())
    assert finding.severity == "note"
    assert finding.evidence == ("display devices on the PCI bus: 0000:00:02.0 Intel",)
    assert judge_machine(without_gpu()).status == "no-gpu"
    assert [each_finding.code for each_finding in judge_machine(without_gpu()).findings] == ["H01"]


def test_login_node_with_driver_libraries_and_no_card_raises_no_alarm() -> None:
    machine = cuinit_fails(with_facts(without_gpu(), driver__cuda=healthy().driver.cuda), 100)
    assert alarms(machine) == []
    assert alarms(cuinit_fails(machine, 999)) == []
    assert find("H01", machine) is not None


def test_unreadable_bus_does_not_prove_that_there_is_no_card() -> None:
    unreadable = with_facts(
        without_gpu(), hardware=Hardware(pci=Unknown("/sys is not mounted")), kernel__loaded=Unknown("no /sys")
    )
    finding = finding_of("H01", unreadable)
    assert "could not determine" in finding.title
    assert "/sys is not mounted" in finding.evidence[0]
    assert alarms(unreadable) == []
    assert find("H01", with_facts(unreadable, kernel__loaded=True)) is None


def test_note_in_a_slurm_job_says_how_to_get_a_gpu() -> None:
    assert "$ srun --gres=gpu:1 --pty bash" in finding_of("H01", in_slurm(without_gpu())).fix


def test_wsl_and_macos_are_left_to_other_rules() -> None:
    assert find("H01", with_facts(in_wsl(without_gpu()), hardware__dxg=False)) is None
    assert find("H01", with_facts(without_gpu(), platform__system="Darwin")) is None


def test_sandbox_without_a_card_is_named_in_the_title() -> None:
    assert "gvisor sandbox" in finding_of("H01", with_facts(without_gpu(), surroundings__sandbox="gvisor")).title


@each(("service", "word"), [("colab", "Runtime"), ("kaggle", "Accelerator")])
def test_fix_for_a_notebook_without_a_gpu_is_its_setting(service: str, word: str) -> None:
    machine = with_facts(without_gpu(), surroundings__notebook=service)
    finding = finding_of("N01", machine)
    assert finding.severity == "note"
    assert word in finding.fix[0]
    assert find("H01", machine) is None
    assert find("N01", with_facts(healthy(), surroundings__notebook=service)) is None


# -- H06: switched off


def test_card_switched_off_by_prime_select() -> None:
    off = cuinit_fails(with_facts(without_gpu(), platform__prime="intel", torch=healthy().torch), 100)
    assert cause(off) == "H06"
    assert "prime-select is set to intel" in finding_of("H06", off).evidence
    assert cause(with_facts(off, platform__prime="on-demand")) == ""
    assert (
        finding_of("H06", with_facts(without_gpu(), platform__prime="intel")).severity == "note"
    )  # its torch is a CPU build


def test_card_kept_from_its_driver_by_prime_select() -> None:
    kernel = "6.8.0-45-generic"
    machine = with_facts(driver_not_loaded(healthy(), built_for=(kernel,)), platform__prime="intel")
    assert cause(machine) == "H06"
    assert cause(with_facts(machine, kernel__built_for=())) == "K01"


# -- H02: lost


def test_card_that_reads_all_ones_is_lost() -> None:
    machine = with_facts(cuinit_fails(healthy(), 999), hardware__pci=(replace(pci_gpu(0x2335), dead=True),))
    assert cause(machine) == "H02"


def test_nvml_reports_a_lost_card() -> None:
    lost = with_gpu(cuinit_fails(healthy(), 999), code=15)
    assert cause(lost) == "H02"
    assert "NVML returns 15 NVML_ERROR_GPU_IS_LOST for GPU 0" in finding_of("H02", lost).evidence


def test_lost_card_beside_a_working_one_is_a_warning() -> None:
    gpu = healthy().driver.nvml.gpus[0]
    machine = with_facts(healthy(), driver__nvml__gpus=(gpu, replace(gpu, index=1, code=15)))
    assert finding_of("H02", machine).severity == "warning"


def test_kernel_log_counts_only_where_cuda_fails() -> None:
    log = ("[  83.1] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.",)
    assert cause(with_facts(cuinit_fails(healthy(), 999), kernel__log=log)) == "H02"
    assert find("H02", with_facts(healthy(), kernel__log=log)) is None


# -- H03: memory errors


@each("fact", ["remap_pending", "remap_failure", "retired_pending"])
def test_memory_errors_are_a_warning_while_cuda_works(fact: str) -> None:
    finding = finding_of("H03", with_gpu(healthy(), **{fact: True}))
    assert finding.severity == "warning"
    assert any("nvidia-smi -r -i 0" in line for line in finding.fix)
    assert ("replaced" in finding.fix[-1]) is (fact == "remap_failure")


def test_memory_errors_are_an_error_where_a_kernel_or_cuinit_fails() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    steps = (Step("import", ok=True), Step("kernel", ok=False, error=error))
    assert finding_of("H03", with_facts(healthy(), torch_run__steps=steps)).severity == "error"
    assert cause(cuinit_fails(healthy(), 214)) == "H03"


# -- H04, H05: does not start


def test_kernel_log_proves_that_the_card_does_not_start() -> None:
    log = ("NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x62:0x40:2168)",)
    machine = with_facts(NO_DEVICE, kernel__log=log)
    assert cause(machine) == "H04"
    finding = finding_of("H04", machine)
    assert not finding.title.startswith("probably")
    assert "the kernel log says: RmInitAdapter failed! (0x62:0x40:2168)" in finding.evidence


def test_eio_proves_that_the_card_does_not_start() -> None:
    machine = with_node(NO_DEVICE, "/dev/nvidia0", error="EIO")
    assert cause(machine) == "H04"
    assert "opening /dev/nvidia0 fails with EIO" in finding_of("H04", machine).evidence


def test_card_listed_by_the_module_but_not_by_nvml_probably_does_not_start() -> None:
    assert finding_of("H04", NO_DEVICE).title.startswith("probably: ")
    assert cause(NO_DEVICE) == "H04"
    assert find("H04", cuinit_fails(healthy(), 100)) is None  # NVML sees the card: it has started
    assert find("H04", with_node(NO_DEVICE, "/dev/nvidia0", error="EACCES")) is None


def test_card_without_an_assigned_address_range() -> None:
    machine = with_facts(NO_DEVICE, hardware__pci=(replace(pci_gpu(0x2335), bars=(1 << 24, 0, 1 << 25)),))
    assert cause(machine) == "H05"
    assert "Above 4G" in finding_of("H05", machine).fix[0]
    assert find("H05", with_facts(healthy(), hardware__pci=machine.hardware.pci)) is None


def test_missing_address_range_by_the_kernel_log() -> None:
    log = ("NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:", "NVRM: BAR1 is 0M @ 0x0")
    assert cause(with_facts(NO_DEVICE, kernel__log=log)) == "H05"


def test_open_module_on_an_old_card_explains_a_failed_start() -> None:
    log = ("NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x24:0x72:1603)",)
    pascal = with_facts(NO_DEVICE, hardware__pci=(pci_gpu(0x1BB3),), kernel__log=log)
    assert cause(pascal) == "K07"
