"""Rules about the start of the CUDA driver: fabric, MPS, vGPU, MIG, hangs, and failures that no rule explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    cuda_fails,
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    nvml_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    alarms,
    cause,
    causes,
    find,
    finding_of,
    missing_node,
    no_libcuda,
    with_gpu,
    without_nvml_gpus,
    works_without,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import (
    ChildAnswer,
    Cuda,
    Hardware,
    Library,
    Machine,
    Node,
    Nodes,
    Nvml,
    PciDevice,
    Step,
    TorchRun,
    Unknown,
)

NVSWITCH = PciDevice("0000:07:00.0", 0x10DE, 0x22A3, 0x068000, "nvidia-nvswitch")


def with_variables(machine: Machine, **values: str) -> Machine:
    return with_facts(machine, variables__values={**machine.variables.values, **values})


# -- 802: the system is not ready


def not_ready() -> Machine:
    return cuinit_fails(healthy(), 802)


def test_fabric_is_down_according_to_nvml() -> None:
    machine = with_gpu(not_ready(), fabric="in-progress")
    assert causes(machine) == ["S01"]
    assert "NVML reports that the fabric is in-progress" in finding_of("S01", machine).evidence
    rejected = replace(nvml_gpu(), fabric="completed", fabric_status=6)
    lines = finding_of("S01", with_facts(machine, driver__nvml__gpus=(*machine.driver.nvml.gpus, rejected))).evidence
    assert any(line.startswith("registering NVIDIA H200 with the fabric: ") for line in lines)
    assert not finding_of("S01", machine).title.startswith("probably")


def test_fabric_is_down_where_nvswitches_exist() -> None:
    machine = with_facts(not_ready(), hardware__pci=(*healthy().hardware.gpus, NVSWITCH))
    assert not finding_of("S01", machine).title.startswith("probably")
    assert "$ sudo systemctl enable --now nvidia-fabricmanager" in finding_of("S01", machine).fix
    assert any("nvidia-fabricmanager-580=580.159.04" in line for line in finding_of("S01", machine).fix)


def test_802_alone_makes_a_fabric_fault_probable() -> None:
    assert cause(not_ready()) == "S01"
    assert finding_of("S01", not_ready()).title.startswith("probably: ")
    assert cause(cuinit_fails(in_wsl(healthy()), 802)) == "X08"


def test_fix_restarts_a_running_fabric_manager() -> None:
    machine = with_gpu(with_facts(not_ready(), kernel__daemons=("nv-fabricmanager",)), fabric="in-progress")
    assert "although the fabric manager is running" in finding_of("S01", machine).title
    assert "$ sudo systemctl restart nvidia-fabricmanager" in finding_of("S01", machine).fix


def test_fabric_manager_of_another_version_than_the_driver() -> None:
    machine = with_facts(not_ready(), kernel__fabric_manager="570.26")
    assert causes(machine) == ["S02"]
    assert find("S02", with_facts(not_ready(), kernel__fabric_manager="580.159.04")) is None
    assert causes(with_facts(healthy(), kernel__fabric_manager="570.26")) == []


def test_confidential_computing_is_not_ready() -> None:
    machine = with_facts(not_ready(), driver__nvml__confidential="not-ready", kernel__fabric_manager="570.26")
    assert causes(machine) == ["S03"]
    assert "$ sudo nvidia-smi conf-compute -srs 1" in finding_of("S03", machine).fix
    assert cause(with_facts(not_ready(), driver__nvml__confidential="ready")) == "S01"


# -- MPS


@each("code", range(805, 811))
@each("environment", [lambda m: m, in_container, in_slurm])
def test_mps_error_codes(code: int, environment: Any) -> None:
    machine = environment(cuinit_fails(healthy(), code))
    assert causes(machine) == ["S04"]


def test_mps_fix_unsets_the_pipe_directory_variable() -> None:
    machine = with_variables(cuinit_fails(healthy(), 805), CUDA_MPS_PIPE_DIRECTORY="/run/mps")
    machine = works_without(machine, "CUDA_MPS_PIPE_DIRECTORY")
    finding = finding_of("S04", machine)
    assert finding.fix[1] == "$ unset CUDA_MPS_PIPE_DIRECTORY"
    assert "without CUDA_MPS_PIPE_DIRECTORY the driver starts and finds 1 GPU" in finding.evidence
    assert causes(machine) == ["S04"]


def test_mps_fix_removes_a_leftover_directory() -> None:
    machine = with_facts(cuinit_fails(healthy(), 805), kernel__mps_directory="/var/run/mps")
    assert "$ sudo rm -r /var/run/mps" in finding_of("S04", machine).fix
    assert causes(with_facts(healthy(), kernel__mps_directory="/var/run/mps")) == []


# -- vGPU, MIG


@each("code", [35, 100])
def test_guest_driver_does_not_match_the_vgpu(code: int) -> None:
    machine = with_gpu(cuinit_fails(healthy(), code), virtualization="vgpu")
    assert cause(machine) == "S07"
    assert finding_of("S07", machine).title.startswith("probably: ")
    assert cause(with_gpu(machine, virtualization="passthrough")) == "X08"


def test_mig_without_instances() -> None:
    machine = with_gpu(cuinit_fails(healthy(), 100), mig="enabled")
    assert causes(machine) == ["M01"]
    assert "$ sudo nvidia-smi mig -cgi 0 -C" in finding_of("M01", machine).fix
    started = with_facts(machine, driver__cuda=replace(healthy().driver.cuda, count=0, gpus=()))
    assert causes(started) == ["M01"]
    assert find("M01", with_gpu(machine, mig_devices=("MIG-1",))) is None
    assert find("M01", with_gpu(machine, mig="disabled")) is None
    assert causes(with_gpu(healthy(), mig="enabled")) == []


def test_mig_capability_node_that_cannot_be_opened() -> None:
    machine = with_gpu(cuinit_fails(healthy(), 100), mig="enabled")
    cap = Node("/dev/nvidia-caps/nvidia-cap21", major=241, minor=21, mode=0o400, error="EACCES")
    denied = with_facts(machine, nodes__found=(*machine.nodes.found, cap))
    assert causes(denied) == ["M03"]
    config = replace(cap, path="/dev/nvidia-caps/nvidia-cap1")
    assert causes(with_facts(machine, nodes__found=(*machine.nodes.found, config))) == ["M01"]


def test_mig_name_in_the_old_format() -> None:
    machine = with_variables(cuinit_fails(healthy(), 100), CUDA_VISIBLE_DEVICES="MIG-GPU-6e1b1a3c/1/0")
    assert causes(machine) == ["M03"]
    assert causes(works_without(machine, "CUDA_VISIBLE_DEVICES")) == ["M03"]
    old = with_facts(machine, driver__nvml__driver="460.32.03")
    assert find("M03", old) is None


def test_several_mig_names_give_only_one_device() -> None:
    machine = with_variables(healthy(), CUDA_VISIBLE_DEVICES="MIG-1, MIG-2")
    assert finding_of("M02", machine).severity == "warning"
    assert find("M02", with_variables(healthy(), CUDA_VISIBLE_DEVICES="MIG-1")) is None
    assert find("M02", with_facts(machine, driver__cuda__count=2)) is None


# -- memory, hangs, NVML alone


def test_address_space_limit_where_cuinit_runs_out_of_memory() -> None:
    machine = with_facts(cuinit_fails(healthy(), 2), platform__address_space=8 << 30)
    assert causes(machine) == ["X04"]
    assert "limited to 8192 MB" in finding_of("X04", machine).evidence[0]
    assert not finding_of("X04", machine).title.startswith("probably")
    assert finding_of("X04", with_facts(machine, platform__address_space=256 << 30)).title.startswith("probably: ")
    assert cause(cuinit_fails(healthy(), 2)) == "X08"
    assert causes(with_facts(healthy(), platform__address_space=8 << 30)) == []


def test_address_space_limit_where_the_first_kernel_runs_out_of_memory() -> None:
    error = "torch.AcceleratorError: CUDA error: out of memory"
    steps = (Step("import", ok=True), Step("init", ok=True), Step("kernel", ok=False, error=error))
    machine = with_facts(healthy(), platform__address_space=16 << 30, torch_run__steps=steps)
    assert finding_of("X04", machine).severity == "error"
    assert find("X04", with_facts(machine, platform__address_space=None)) is None
    assert find("X04", with_facts(machine, platform__address_space=256 << 30)) is None


def test_cuinit_runs_out_of_memory_with_several_cards_under_wsl() -> None:
    machine = with_facts(cuinit_fails(in_wsl(healthy()), 2), driver__nvml__count=2)
    assert cause(machine) == "U10"
    assert finding_of("U10", machine).title.startswith("probably: ")
    assert find("U10", with_facts(machine, driver__nvml__count=1)) is None
    assert cause(with_facts(machine, platform__address_space=8 << 30)) == "X04"


def hung(machine: Machine) -> Machine:
    return cuda_fails(with_facts(machine, driver__cuda=Cuda(ChildAnswer("hung", "in cuInit", 5.0))))


@each("environment", [lambda m: m, in_container, in_slurm, in_wsl])
def test_hung_driver(environment: Any) -> None:
    machine = with_facts(hung(environment(healthy())), kernel__stuck=("python (4711)",))
    assert causes(machine) == ["X02"]
    finding = finding_of("X02", machine)
    assert "the CUDA driver gave no answer within 5 s: in cuInit" in finding.evidence
    assert "python (4711) is stuck in the driver, in state D" in finding.evidence


def test_hung_nvml_is_a_warning_while_cuda_works() -> None:
    machine = with_facts(healthy(), driver__nvml=Nvml(ChildAnswer("hung", "in nvmlInit_v2", 5.0)))
    assert finding_of("X02", machine).severity == "warning"


def test_hang_caused_by_a_variable_is_not_blamed_on_the_driver() -> None:
    assert find("X02", works_without(hung(healthy()), "LD_PRELOAD")) is None


@each("code", [9, 4, 18, 999])
def test_nvml_failure_under_wsl_is_a_note_while_cuda_works(code: int) -> None:
    machine = with_facts(in_wsl(healthy()), driver__nvml=Nvml(ChildAnswer("answered"), init=code))
    assert finding_of("U12", machine).severity == "note"
    assert alarms(machine) == []
    assert find("U12", cuinit_fails(machine, 100)) is None


# -- failures that no rule explains


@each("code", [1, 46, 101, 102, 222, 304, 999, 12345])
def test_unexplained_cuinit_code_is_reported_with_everything_that_works(code: int) -> None:
    machine = cuinit_fails(healthy(), code)
    assert causes(machine) == ["X08"]
    finding = finding_of("X08", machine)
    assert finding.evidence[0].startswith(f"cuInit returned {code}")
    assert "the kernel driver is loaded (580.159.04)" in finding.evidence
    assert "the device nodes exist and can be opened" in finding.evidence
    assert "NVML works and sees 1 GPU" in finding.evidence
    assert "the kernel log could not be read: /dev/kmsg: operation not permitted" in finding.evidence


def test_evidence_of_an_unexplained_failure_omits_what_does_not_work() -> None:
    machine = with_facts(
        without_nvml_gpus(missing_node(cuinit_fails(healthy(), 46), "/dev/nvidia-uvm")),
        kernel__loaded=Unknown("no /sys"),
    )
    text = " ".join(finding_of("X08", machine).evidence)
    assert "the device nodes" not in text
    assert "is loaded" not in text


def test_crash_in_cuinit_is_reported_as_a_crash() -> None:
    machine = cuda_fails(with_facts(healthy(), driver__cuda=Cuda(ChildAnswer("crashed", "SIGSEGV in cuInit", 0.2))))
    assert causes(machine) == ["X08"]
    assert "crashes" in finding_of("X08", machine).title


def test_symptom_is_muted_by_a_cause() -> None:
    assert causes(works_without(cuinit_fails(healthy(), 100), "CUDA_VISIBLE_DEVICES")) == ["X08"]  # no rule explains it
    machine = with_gpu(cuinit_fails(healthy(), 100), mig="enabled")
    assert find("X08", machine) is not None
    assert causes(machine) == ["M01"]


def test_missing_libcuda_for_an_unknown_reason() -> None:
    machine = with_facts(no_libcuda(healthy()), kernel__loaded=Unknown("/sys is not mounted"))
    assert causes(machine) == ["X08"]
    assert causes(no_libcuda(without_gpu())) == []


def test_no_device_is_not_a_fault_without_any_sign_of_a_card() -> None:
    no_sign = with_facts(
        cuinit_fails(healthy(), 100),
        hardware=Hardware(pci=Unknown("/sys is not mounted")),
        kernel__loaded=Unknown("/sys is not mounted"),
        kernel__gpus=(),
        nodes=Nodes(),
        driver__nvml=Nvml(ChildAnswer("answered"), init=9),
    )
    assert alarms(no_sign) == []
    assert find("H01", no_sign) is not None
    assert causes(cuinit_fails(no_sign, 999)) == ["X08"]


# -- another library in place of the driver's


def shimmed(state: Any) -> Machine:
    """A machine without a card, whose libcuda.so.1 is a shim that crashes or hangs, in our probe and in torch."""
    lib = Library("libcuda.so.1", "/opt/shim/libcuda.so.1", "", "LD_LIBRARY_PATH", "", "other")
    machine = with_facts(
        without_gpu(), driver__libraries__cuda=(lib,), driver__cuda=Cuda(ChildAnswer(state, "in cuInit"), lib.path)
    )
    machine = with_variables(machine, LD_LIBRARY_PATH="/opt/shim")
    return with_facts(machine, torch_run=TorchRun(ChildAnswer(state, "in available")))


@each(("state", "code"), [("crashed", "X08"), ("hung", "X02")])
def test_library_in_place_of_libcuda_is_blamed_instead_of_torch(state: str, code: str) -> None:
    machine = shimmed(state)
    assert judge_machine(machine).cause == finding_of(code, machine)
    finding = finding_of(code, machine)
    assert "libcuda.so.1 is /opt/shim/libcuda.so.1, found through LD_LIBRARY_PATH" in finding.evidence
    assert "$ unset LD_LIBRARY_PATH" in finding.fix
    assert not any("reboot" in line for line in finding.fix)


def test_mig_fix_disables_mig_on_all_cards() -> None:
    machine = with_gpu(cuinit_fails(healthy(), 100), mig="enabled")
    assert "$ sudo nvidia-smi -mig 0" in finding_of("M01", machine).fix
