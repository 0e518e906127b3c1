"""The card itself: absent, asleep, lost, stillborn."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import bare, card, changed, healthy, in_container, in_slurm, in_wsl, refused
from tests.diagnose.rules.machine_rows import alarms, blind_nvml, cause, finding_of, node, seen, unloaded, with_gpu
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Hardware, Machine, Step, Unknown

DEAD = blind_nvml(refused(healthy(), 100))


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
        bare(),
        in_container(bare()),
        in_slurm(bare()),
        Machine(),
    ],
)
def test_a_machine_without_fault_raises_no_alarm(machine: Machine) -> None:
    assert alarms(machine) == []


def test_without_a_card_there_is_a_note_and_no_fault() -> None:
    found = finding_of("H01", bare())
    assert found.severity == "note"
    assert found.evidence == ("display devices on the PCI bus: 0000:00:02.0 Intel",)
    assert judge_machine(bare()).status == "no-gpu"
    assert [each.code for each in judge_machine(bare()).findings] == ["H01"]


def test_a_login_node_with_the_drivers_libraries_and_no_card_has_no_fault() -> None:
    machine = refused(changed(bare(), driver__cuda=healthy().driver.cuda), 100)
    assert alarms(machine) == []
    assert alarms(refused(machine, 999)) == []
    assert seen("H01", machine) is not None


def test_a_bus_that_cannot_be_read_is_no_proof() -> None:
    blind = changed(bare(), hardware=Hardware(pci=Unknown("/sys is not mounted")), kernel__loaded=Unknown("no /sys"))
    found = finding_of("H01", blind)
    assert "could not determine" in found.title
    assert "/sys is not mounted" in found.evidence[0]
    assert alarms(blind) == []
    assert seen("H01", changed(blind, kernel__loaded=True)) is None


def test_in_a_job_the_note_says_how_to_get_a_node_with_a_gpu() -> None:
    assert "$ srun --gres=gpu:1 --pty bash" in finding_of("H01", in_slurm(bare())).fix


def test_wsl_and_macos_have_rows_of_their_own() -> None:
    assert seen("H01", changed(in_wsl(bare()), hardware__dxg=False)) is None
    assert seen("H01", changed(bare(), platform__system="Darwin")) is None


def test_a_sandbox_without_a_card_is_named_in_the_title() -> None:
    assert "gvisor sandbox" in finding_of("H01", changed(bare(), surroundings__sandbox="gvisor")).title


@each(("service", "word"), [("colab", "Runtime"), ("kaggle", "Accelerator")])
def test_the_fix_for_a_notebook_without_a_gpu_is_its_setting(service: str, word: str) -> None:
    machine = changed(bare(), surroundings__notebook=service)
    found = finding_of("N01", machine)
    assert found.severity == "note"
    assert word in found.fix[0]
    assert seen("H01", machine) is None
    assert seen("N01", changed(healthy(), surroundings__notebook=service)) is None


# -- H06


def test_a_card_that_prime_select_switched_off() -> None:
    off = refused(changed(bare(), platform__prime="intel", torch=healthy().torch), 100)
    assert cause(off) == "H06"
    assert "prime-select is set to intel" in finding_of("H06", off).evidence
    assert cause(changed(off, platform__prime="on-demand")) == ""
    assert finding_of("H06", changed(bare(), platform__prime="intel")).severity == "note"  # its torch is a CPU build


def test_a_card_kept_from_its_driver_by_prime_select() -> None:
    kernel = "6.8.0-45-generic"
    machine = changed(unloaded(healthy(), built_for=(kernel,)), platform__prime="intel")
    assert cause(machine) == "H06"
    assert cause(changed(machine, kernel__built_for=())) == "K01"


# -- H02


def test_a_card_that_reads_all_ones_is_lost() -> None:
    machine = changed(refused(healthy(), 999), hardware__pci=(replace(card(0x2335), dead=True),))
    assert cause(machine) == "H02"


def test_nvml_calls_a_card_lost() -> None:
    lost = with_gpu(refused(healthy(), 999), code=15)
    assert cause(lost) == "H02"
    assert "NVML returns 15 NVML_ERROR_GPU_IS_LOST for GPU 0" in finding_of("H02", lost).evidence


def test_a_lost_card_beside_one_that_works_is_a_warning() -> None:
    gpu = healthy().driver.nvml.gpus[0]
    machine = changed(healthy(), driver__nvml__gpus=(gpu, replace(gpu, index=1, code=15)))
    assert finding_of("H02", machine).severity == "warning"


def test_the_log_is_believed_only_where_cuda_fails() -> None:
    log = ("[  83.1] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.",)
    assert cause(changed(refused(healthy(), 999), kernel__log=log)) == "H02"
    assert seen("H02", changed(healthy(), kernel__log=log)) is None


# -- H03


@each("fact", ["remap_pending", "remap_failure", "retired_pending"])
def test_memory_with_errors_is_a_warning_while_cuda_works(fact: str) -> None:
    found = finding_of("H03", with_gpu(healthy(), **{fact: True}))
    assert found.severity == "warning"
    assert any("nvidia-smi -r -i 0" in line for line in found.fix)
    assert ("replaced" in found.fix[-1]) is (fact == "remap_failure")


def test_a_program_that_died_of_it_makes_it_an_error() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    steps = (Step("import", ok=True), Step("kernel", ok=False, error=error))
    assert finding_of("H03", changed(healthy(), torch_run__steps=steps)).severity == "error"
    assert cause(refused(healthy(), 214)) == "H03"


# -- H04, H05


def test_a_card_that_does_not_start_by_the_log() -> None:
    log = ("NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x62:0x40:2168)",)
    machine = changed(DEAD, kernel__log=log)
    assert cause(machine) == "H04"
    found = finding_of("H04", machine)
    assert not found.title.startswith("probably")
    assert "the kernel log says: RmInitAdapter failed! (0x62:0x40:2168)" in found.evidence


def test_a_card_that_does_not_start_by_eio() -> None:
    machine = node(DEAD, "/dev/nvidia0", error="EIO")
    assert cause(machine) == "H04"
    assert "opening /dev/nvidia0 fails with EIO" in finding_of("H04", machine).evidence


def test_a_card_that_the_module_lists_and_nvml_does_not_is_likely_dead() -> None:
    assert finding_of("H04", DEAD).title.startswith("probably: ")
    assert cause(DEAD) == "H04"
    assert seen("H04", refused(healthy(), 100)) is None  # NVML sees the card: it lives
    assert seen("H04", node(DEAD, "/dev/nvidia0", error="EACCES")) is None


def test_a_card_without_addresses() -> None:
    machine = changed(DEAD, hardware__pci=(replace(card(0x2335), bars=(1 << 24, 0, 1 << 25)),))
    assert cause(machine) == "H05"
    assert "Above 4G" in finding_of("H05", machine).fix[0]
    assert seen("H05", changed(healthy(), hardware__pci=machine.hardware.pci)) is None


def test_the_log_tells_of_missing_addresses() -> None:
    log = ("NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:", "NVRM: BAR1 is 0M @ 0x0")
    assert cause(changed(DEAD, kernel__log=log)) == "H05"


def test_a_driver_not_made_for_the_card_explains_its_failing_start() -> None:
    log = ("NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x24:0x72:1603)",)
    pascal = changed(DEAD, hardware__pci=(card(0x1BB3),), kernel__log=log)
    assert cause(pascal) == "K07"
