"""Rules about containers, Slurm, systemd services and sandboxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    library,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    NO_LIBRARY,
    alarms,
    cause,
    causes,
    driver_not_loaded,
    find,
    finding_of,
    missing_node,
    no_libcuda,
    no_nodes,
    with_node,
    works_without,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import ChildAnswer, Cuda, Hardware, Machine, Nodes, Nvml, Surroundings, Unknown


def container_without_gpu(kind: str = "docker") -> Machine:
    """A container on a machine with a card, started without the card."""
    machine = no_libcuda(no_nodes(in_container(healthy(), kind)))
    return with_facts(machine, driver__nvml=Nvml(NO_LIBRARY), driver__libraries__nvml=())


def with_variables(machine: Machine, **values: str) -> Machine:
    return with_facts(machine, variables__values={**machine.variables.values, **values})


# -- C01: no GPU in the container


@each("kind", ["docker", "podman", "containerd", "container"])
def test_container_started_without_a_gpu(kind: str) -> None:
    assert causes(container_without_gpu(kind)) == ["C01"]
    finding = finding_of("C01", container_without_gpu(kind))
    assert "there is no /dev/nvidia*" in finding.evidence
    assert any("run" in line for line in finding.fix)


def test_container_on_a_machine_without_a_card_raises_no_alarm() -> None:
    assert alarms(in_container(without_gpu())) == []
    assert find("C01", in_container(without_gpu())) is None


def test_kernel_module_of_the_host_proves_that_there_is_a_card() -> None:
    hidden = with_facts(container_without_gpu(), hardware=Hardware(pci=Unknown("/sys/bus/pci does not exist")))
    assert cause(hidden) == "C01"
    assert find("C01", with_facts(hidden, kernel__loaded=Unknown("no /sys"), kernel__gpus=())) is None


def test_driver_not_loaded_on_the_host_is_the_cause_in_a_container() -> None:
    assert cause(in_container(driver_not_loaded(healthy()))) == "K01"


def test_nodes_that_were_not_examined_are_not_absent() -> None:
    assert find("C01", with_facts(container_without_gpu(), nodes=Nodes())) is None


def test_control_node_alone_is_not_a_gpu() -> None:
    machine = missing_node(missing_node(in_container(cuinit_fails(healthy(), 100)), "/dev/nvidia0"), "/dev/nvidia-uvm")
    assert cause(with_node(machine, "/dev/nvidiactl", error="EPERM")) == "C01"


def test_variable_that_no_runtime_applied_is_evidence() -> None:
    machine = with_variables(container_without_gpu(), NVIDIA_VISIBLE_DEVICES="all")
    assert any("no NVIDIA container runtime applied" in line for line in finding_of("C01", machine).evidence)


def test_jetson_container_without_driver_libraries() -> None:
    machine = with_facts(
        container_without_gpu(), hardware=Hardware(pci=(), tegra="NVIDIA Jetson AGX Orin"), kernel__loaded=False
    )
    assert finding_of("C01", machine).title.startswith("probably: ")


def test_wsl_container_without_dxg_is_a_note() -> None:
    machine = no_libcuda(with_facts(in_wsl(healthy()), hardware__dxg=False))
    inside = with_facts(machine, surroundings=Surroundings(container="docker", wsl=2))
    assert finding_of("C01", inside).severity == "note"
    assert alarms(inside) == []


# -- C03: no compute libraries


def test_driver_capabilities_without_compute() -> None:
    machine = with_variables(no_libcuda(in_container(healthy())), NVIDIA_DRIVER_CAPABILITIES="utility,video")
    assert cause(machine) == "C03"
    assert any("compute,utility" in line for line in finding_of("C03", machine).fix)


@each("value", ["all", "compute,utility", " Compute , utility", ""])
def test_driver_capabilities_with_compute_are_not_blamed(value: str) -> None:
    machine = with_variables(no_libcuda(in_container(healthy())), NVIDIA_DRIVER_CAPABILITIES=value)
    assert find("C03", machine) is None
    assert cause(machine) == "U06"


def test_driver_capabilities_are_ignored_outside_a_container() -> None:
    assert find("C03", with_variables(no_libcuda(healthy()), NVIDIA_DRIVER_CAPABILITIES="utility")) is None


# -- C04, C05: hidden or not requested


@each("value", ["void", "none", "", " None"])
def test_nvidia_visible_devices_hides_the_cards(value: str) -> None:
    machine = with_variables(container_without_gpu(), NVIDIA_VISIBLE_DEVICES=value)
    assert cause(machine) == "C04"
    assert find("C01", machine) is None


def test_nvidia_visible_devices_none_keeps_libraries_and_control_node() -> None:
    machine = missing_node(in_container(cuinit_fails(healthy(), 100)), "/dev/nvidia0")
    assert cause(with_variables(machine, NVIDIA_VISIBLE_DEVICES="none")) == "C04"
    assert cause(with_variables(machine, NVIDIA_VISIBLE_DEVICES="all")) == "D01"


def test_nvidia_visible_devices_void_is_ignored_where_the_cards_exist() -> None:
    assert (
        find("C04", with_variables(in_container(cuinit_fails(healthy(), 999)), NVIDIA_VISIBLE_DEVICES="void")) is None
    )
    assert alarms(with_variables(in_container(healthy()), NVIDIA_VISIBLE_DEVICES="void")) == []


def test_pod_that_requested_no_gpu() -> None:
    machine = with_variables(
        with_facts(container_without_gpu("containerd"), surroundings__kubernetes=True), NVIDIA_VISIBLE_DEVICES="void"
    )
    assert causes(machine) == ["C05"]
    assert "| resources: {limits: {nvidia.com/gpu: 1}}" in finding_of("C05", machine).fix
    assert find("C05", with_facts(in_container(cuinit_fails(healthy(), 999)), surroundings__kubernetes=True)) is None


# -- C07, C10: libraries of another release


def old_libraries(kind: str) -> Machine:
    machine = cuinit_fails(in_container(healthy(), kind), 803)
    old = library("libcuda.so.1", "550.54.14")
    return with_facts(machine, driver__libraries__cuda=(old,), driver__cuda__library=old.target, driver__nvml__init=18)


@each(("kind", "code"), [("docker", "C07"), ("podman", "C07"), ("lxc", "C10"), ("nspawn", "C10")])
def test_libraries_of_another_release_than_the_hosts_driver(kind: str, code: str) -> None:
    machine = old_libraries(kind)
    assert causes(machine) == [code]
    assert "is version 550.54.14, but the host's kernel driver is 580.159.04" in finding_of(code, machine).evidence[1]


def test_old_library_from_ld_library_path_is_not_blamed_on_the_runtime() -> None:
    old = replace(library("libcuda.so.1", "550.54.14"), via="LD_LIBRARY_PATH")
    machine = with_facts(old_libraries("docker"), driver__libraries__cuda=(old,), driver__cuda__library=old.target)
    assert cause(machine) == "U01"


def test_cdi_file_for_another_driver_is_a_note_on_the_host() -> None:
    machine = with_facts(healthy(), surroundings__cdi=("570.26",))
    assert finding_of("C07", machine).severity == "note"
    assert find("C07", with_facts(healthy(), surroundings__cdi=("580.159.04",))) is None


# -- C08: Apptainer


@each("kind", ["apptainer", "singularity"])
def test_apptainer_without_nv(kind: str) -> None:
    machine = no_libcuda(in_container(healthy(), kind))
    assert causes(machine) == ["C08"]
    assert any("--nv" in line for line in finding_of("C08", machine).fix)


def test_apptainer_with_nv_and_a_lost_search_path() -> None:
    hidden = replace(library("libcuda.so.1", folder="/.singularity.d/libs"), via="disk")
    machine = with_facts(no_libcuda(in_container(healthy(), "apptainer")), driver__libraries__cuda=(hidden,))
    assert cause(machine) == "U05"
    assert find("C08", no_libcuda(in_container(without_gpu(), "apptainer"))) is None


# -- C09: Slurm


def job_without_grant(**values: str) -> Machine:
    """A Slurm job with no variable that grants it a GPU."""
    return with_facts(in_slurm(cuinit_fails(healthy(), 100)), variables__values={"SLURM_JOB_ID": "4711", **values})


def test_slurm_job_whose_nodes_are_denied() -> None:
    machine = with_node(with_node(job_without_grant(), "/dev/nvidiactl", error="EPERM"), "/dev/nvidia0", error="EPERM")
    assert causes(machine) == ["C09"]
    assert not finding_of("C09", machine).title.startswith("probably")
    assert "$ srun --gres=gpu:1 --pty bash" in finding_of("C09", machine).fix


def test_slurm_step_without_a_gpu_in_a_job_that_has_one() -> None:
    machine = with_node(in_slurm(cuinit_fails(healthy(), 100)), "/dev/nvidia0", error="EPERM")
    assert causes(machine) == ["C09"]


@each("value", ["", "NoDevFiles", "-1"])
def test_slurm_job_with_an_empty_device_list(value: str) -> None:
    machine = works_without(job_without_grant(CUDA_VISIBLE_DEVICES=value), "CUDA_VISIBLE_DEVICES")
    assert cause(machine) == "C09"
    assert finding_of("C09", machine).title.startswith("probably: ")


def test_slurm_is_not_blamed_for_other_failures() -> None:
    assert find("C09", in_slurm(cuinit_fails(healthy(), 100))) is None
    assert find("C09", job_without_grant()) is None  # nothing is denied or hidden: another cause
    assert find("C09", job_without_grant(CUDA_VISIBLE_DEVICES="", SLURM_JOB_GPUS="3")) is None


def test_slurm_job_on_a_node_without_cards_raises_no_alarm() -> None:
    assert alarms(in_slurm(without_gpu())) == []


# -- C11: sandboxes


@each("code", [100, 304, 999])
def test_sandbox_is_the_probable_cause(code: int) -> None:
    machine = with_facts(in_container(cuinit_fails(healthy(), code)), surroundings__sandbox="gvisor")
    assert cause(machine) == "C11"
    assert finding_of("C11", machine).title.startswith("probably: ")
    assert cause(with_facts(machine, surroundings__sandbox="")) == "X08"


def test_sandbox_is_ignored_where_cuda_works() -> None:
    assert find("C11", with_facts(in_container(healthy()), surroundings__sandbox="gvisor")) is None


# -- D05: systemd services


def test_service_with_private_devices() -> None:
    machine = no_nodes(cuinit_fails(healthy(), 100))
    machine = with_facts(machine, surroundings=Surroundings(service="jupyter.service", private_dev=True))
    assert causes(machine) == ["D05"]
    assert "$ sudo systemctl edit jupyter.service" in finding_of("D05", machine).fix
    assert "| PrivateDevices=no" in finding_of("D05", machine).fix
    assert find("D05", with_facts(machine, surroundings__service="")) is None


def test_service_whose_cgroup_denies_the_nodes() -> None:
    machine = with_node(cuinit_fails(healthy(), 100), "/dev/nvidiactl", error="EPERM")
    machine = with_facts(machine, surroundings=Surroundings(service="jupyter.service"))
    assert causes(machine) == ["D05"]
    assert find("D05", with_facts(healthy(), surroundings=machine.surroundings)) is None
    assert find("D05", with_facts(cuinit_fails(healthy(), 999), surroundings=machine.surroundings)) is None


# -- C02, N02: Docker and images


@each(
    ("facts", "expected"),
    [
        ({"docker": "installed", "container_toolkit": False}, True),
        ({"docker": "snap", "container_toolkit": True}, True),
        ({"docker": "installed", "container_toolkit": True}, False),
        ({"docker": "installed", "container_toolkit": Unknown("PATH is not set")}, False),
        ({"docker": "", "container_toolkit": False}, False),
        ({"docker": "installed", "container_toolkit": False, "wsl": 2}, False),
    ],
)
def test_docker_without_the_toolkit_is_a_note(facts: dict[str, Any], expected: bool) -> None:
    machine = with_facts(healthy(), surroundings=Surroundings(**facts))
    finding = find("C02", machine)
    assert (finding is not None) is expected
    assert alarms(machine) == []


def test_cpu_build_chosen_while_the_image_was_built() -> None:
    cpu = without_gpu().torch.first
    assert cpu is not None
    by_uv = replace(cpu, installer="uv")
    machine = with_facts(in_container(healthy()), torch__installs=(by_uv,))
    assert finding_of("N02", machine).severity == "note"
    assert find("N02", with_facts(machine, torch__installs=(replace(by_uv, installer="pip"),))) is None
    assert find("N02", with_facts(healthy(), torch__installs=(by_uv,))) is None


def test_no_cause_where_the_driver_was_not_queried() -> None:
    not_queried = with_facts(container_without_gpu(), driver__cuda=Cuda(ChildAnswer("unasked")))
    assert causes(with_facts(not_queried, torch_run=healthy().torch_run)) == []
    assert cause(not_queried) == ""


# -- a CPU build where the process has no GPU


def with_cpu_build(machine: Machine) -> Machine:
    """The machine with a working CPU build of torch."""
    cpu = without_gpu()
    return replace(machine, torch=cpu.torch, torch_libraries=cpu.torch_libraries, torch_run=cpu.torch_run)


def in_pod(machine: Machine) -> Machine:
    return with_facts(machine, surroundings__kubernetes=True)


def job_with_denied_nodes() -> Machine:
    """A Slurm job that requested no GPU, so that it may not open the nodes."""
    denied = tuple(replace(node, error="EPERM") for node in healthy().nodes.found)
    machine = with_facts(cuinit_fails(in_slurm(healthy()), 100), nodes__found=denied)
    return with_facts(machine, variables__values={"SLURM_JOB_ID": "1"})


def reserved_for_vms() -> Machine:
    """A host that reserves its card for virtual machines."""
    machine = driver_not_loaded(healthy())
    return with_facts(machine, hardware__pci=tuple(replace(gpu, driver="vfio-pci") for gpu in machine.hardware.gpus))


@each(
    ("machine", "code"),
    [
        (container_without_gpu(), "C01"),
        (container_without_gpu("podman"), "C01"),
        (in_pod(container_without_gpu()), "C05"),
        (with_variables(container_without_gpu(), NVIDIA_VISIBLE_DEVICES="void"), "C04"),
        (no_libcuda(in_container(healthy(), "apptainer")), "C08"),
        (job_with_denied_nodes(), "C09"),
        (reserved_for_vms(), "K05"),
    ],
)
def test_missing_gpu_is_a_note_for_a_cpu_build(machine: Machine, code: str) -> None:
    assert cause(machine) == code
    diagnosis = judge_machine(with_cpu_build(machine))
    assert {finding.severity for finding in diagnosis.findings} == {"note"}
    assert {"T01", code} <= {finding.code for finding in diagnosis.findings}
    assert diagnosis.ok


def test_fix_requests_the_gpu_from_slurm_and_then_passes_it_to_the_container() -> None:
    machine = with_facts(job_with_denied_nodes(), surroundings__container="apptainer")
    fix = finding_of("C09", machine).fix
    assert fix.index("$ srun --gres=gpu:1 --pty bash") < fix.index("$ apptainer exec --nv IMAGE COMMAND")


def test_fix_for_podman_does_not_use_docker() -> None:
    machine = with_variables(container_without_gpu("podman"), NVIDIA_VISIBLE_DEVICES="void")
    finding = finding_of("C04", machine)
    assert finding.title.startswith("probably: ")
    assert not any("docker" in line for line in finding.fix)
    assert "$ podman run --device nvidia.com/gpu=all …" in finding.fix


def test_cpu_build_in_a_container_without_a_gpu_is_not_a_fault() -> None:
    plain = without_gpu()
    machine = with_facts(
        in_container(healthy()),
        nodes=plain.nodes,
        driver=plain.driver,
        torch=plain.torch,
        torch_libraries=plain.torch_libraries,
        torch_run=plain.torch_run,
        kernel__gpus=(),
        kernel__version="",
    )
    diagnosis = judge_machine(machine)
    assert diagnosis.status == "no-gpu"
    assert {finding.severity for finding in diagnosis.findings} == {"note"}
