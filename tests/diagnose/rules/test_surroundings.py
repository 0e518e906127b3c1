"""Containers, schedulers, services, sandboxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import bare, changed, healthy, in_container, in_slurm, in_wsl, library, refused
from tests.diagnose.rules.machine_rows import (
    NO_LIBRARY,
    alarms,
    cause,
    causes,
    finding_of,
    missing,
    no_libcuda,
    no_nodes,
    node,
    relieved_by,
    seen,
    unloaded,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Answer, Cuda, Hardware, Machine, Nodes, Nvml, Surroundings, Unknown


def forgotten(kind: str = "docker") -> Machine:
    """A container on a machine with a card, started without it."""
    machine = no_libcuda(no_nodes(in_container(healthy(), kind)))
    return changed(machine, driver__nvml=Nvml(NO_LIBRARY), driver__libraries__nvml=())


def variables(machine: Machine, **values: str) -> Machine:
    return changed(machine, variables__values={**machine.variables.values, **values})


# -- C01


@each("kind", ["docker", "podman", "containerd", "container"])
def test_a_container_without_a_gpu(kind: str) -> None:
    assert causes(forgotten(kind)) == ["C01"]
    found = finding_of("C01", forgotten(kind))
    assert "there is no /dev/nvidia*" in found.evidence
    assert any("run" in line for line in found.fix)


def test_on_a_machine_without_a_card_a_container_without_nodes_is_no_fault() -> None:
    assert alarms(in_container(bare())) == []
    assert seen("C01", in_container(bare())) is None


def test_the_hosts_module_is_proof_enough_of_a_card() -> None:
    hidden = changed(forgotten(), hardware=Hardware(pci=Unknown("/sys/bus/pci does not exist")))
    assert cause(hidden) == "C01"
    assert seen("C01", changed(hidden, kernel__loaded=Unknown("no /sys"), kernel__gpus=())) is None


def test_a_host_whose_driver_is_not_loaded_comes_first() -> None:
    assert cause(in_container(unloaded(healthy()))) == "K01"


def test_nodes_that_nobody_looked_at_are_not_absent() -> None:
    assert seen("C01", changed(forgotten(), nodes=Nodes())) is None


def test_a_node_that_the_library_made_itself_is_no_gpu() -> None:
    machine = missing(missing(in_container(refused(healthy(), 100)), "/dev/nvidia0"), "/dev/nvidia-uvm")
    assert cause(node(machine, "/dev/nvidiactl", error="EPERM")) == "C01"


def test_a_variable_that_no_runtime_acted_on_is_shown() -> None:
    machine = variables(forgotten(), NVIDIA_VISIBLE_DEVICES="all")
    assert any("no NVIDIA container runtime applied" in line for line in finding_of("C01", machine).evidence)


def test_a_jetson_in_a_container_without_libraries() -> None:
    machine = changed(forgotten(), hardware=Hardware(pci=(), tegra="NVIDIA Jetson AGX Orin"), kernel__loaded=False)
    assert finding_of("C01", machine).title.startswith("probably: ")


def test_under_wsl_a_container_without_dxg_is_a_note() -> None:
    machine = no_libcuda(changed(in_wsl(healthy()), hardware__dxg=False))
    inside = changed(machine, surroundings=Surroundings(container="docker", wsl=2))
    assert finding_of("C01", inside).severity == "note"
    assert alarms(inside) == []


# -- C03


def test_a_container_without_the_compute_libraries() -> None:
    machine = variables(no_libcuda(in_container(healthy())), NVIDIA_DRIVER_CAPABILITIES="utility,video")
    assert cause(machine) == "C03"
    assert any("compute,utility" in line for line in finding_of("C03", machine).fix)


@each("value", ["all", "compute,utility", " Compute , utility", ""])
def test_capabilities_that_hold_compute(value: str) -> None:
    machine = variables(no_libcuda(in_container(healthy())), NVIDIA_DRIVER_CAPABILITIES=value)
    assert seen("C03", machine) is None
    assert cause(machine) == "U06"


def test_on_a_host_the_variable_means_nothing() -> None:
    assert seen("C03", variables(no_libcuda(healthy()), NVIDIA_DRIVER_CAPABILITIES="utility")) is None


# -- C04, C05


@each("value", ["void", "none", "", " None"])
def test_a_variable_keeps_the_cards_out(value: str) -> None:
    machine = variables(forgotten(), NVIDIA_VISIBLE_DEVICES=value)
    assert cause(machine) == "C04"
    assert seen("C01", machine) is None


def test_none_leaves_the_libraries_and_the_control_node() -> None:
    machine = missing(in_container(refused(healthy(), 100)), "/dev/nvidia0")
    assert cause(variables(machine, NVIDIA_VISIBLE_DEVICES="none")) == "C04"
    assert cause(variables(machine, NVIDIA_VISIBLE_DEVICES="all")) == "D01"


def test_void_where_the_cards_are_there_is_how_cdi_sets_it() -> None:
    assert seen("C04", variables(in_container(refused(healthy(), 999)), NVIDIA_VISIBLE_DEVICES="void")) is None
    assert alarms(variables(in_container(healthy()), NVIDIA_VISIBLE_DEVICES="void")) == []


def test_a_pod_that_asked_for_no_gpu() -> None:
    machine = variables(changed(forgotten("containerd"), surroundings__kubernetes=True), NVIDIA_VISIBLE_DEVICES="void")
    assert causes(machine) == ["C05"]
    assert "| resources: {limits: {nvidia.com/gpu: 1}}" in finding_of("C05", machine).fix
    assert seen("C05", changed(in_container(refused(healthy(), 999)), surroundings__kubernetes=True)) is None


# -- C07, C10


def old_libraries(kind: str) -> Machine:
    machine = refused(in_container(healthy(), kind), 803)
    old = library("libcuda.so.1", "550.54.14")
    return changed(machine, driver__libraries__cuda=(old,), driver__cuda__library=old.target, driver__nvml__init=18)


@each(("kind", "code"), [("docker", "C07"), ("podman", "C07"), ("lxc", "C10"), ("nspawn", "C10")])
def test_libraries_of_another_release_than_the_hosts(kind: str, code: str) -> None:
    machine = old_libraries(kind)
    assert causes(machine) == [code]
    assert "is version 550.54.14, but the host's kernel driver is 580.159.04" in finding_of(code, machine).evidence[1]


def test_a_library_from_a_variables_folder_is_not_the_runtimes() -> None:
    old = replace(library("libcuda.so.1", "550.54.14"), via="LD_LIBRARY_PATH")
    machine = changed(old_libraries("docker"), driver__libraries__cuda=(old,), driver__cuda__library=old.target)
    assert cause(machine) == "U01"


def test_a_cdi_file_of_another_driver_is_a_note_on_the_host() -> None:
    machine = changed(healthy(), surroundings__cdi=("570.26",))
    assert finding_of("C07", machine).severity == "note"
    assert seen("C07", changed(healthy(), surroundings__cdi=("580.159.04",))) is None


# -- C08


@each("kind", ["apptainer", "singularity"])
def test_apptainer_without_its_flag(kind: str) -> None:
    machine = no_libcuda(in_container(healthy(), kind))
    assert causes(machine) == ["C08"]
    assert any("--nv" in line for line in finding_of("C08", machine).fix)


def test_apptainer_with_its_flag_and_a_lost_search_path() -> None:
    hidden = replace(library("libcuda.so.1", folder="/.singularity.d/libs"), via="disk")
    machine = changed(no_libcuda(in_container(healthy(), "apptainer")), driver__libraries__cuda=(hidden,))
    assert cause(machine) == "U05"
    assert seen("C08", no_libcuda(in_container(bare(), "apptainer"))) is None


# -- C09


def ungranted(**values: str) -> Machine:
    return changed(in_slurm(refused(healthy(), 100)), variables__values={"SLURM_JOB_ID": "4711", **values})


def test_a_job_whose_nodes_are_forbidden() -> None:
    machine = node(node(ungranted(), "/dev/nvidiactl", error="EPERM"), "/dev/nvidia0", error="EPERM")
    assert causes(machine) == ["C09"]
    assert not finding_of("C09", machine).title.startswith("probably")
    assert "$ srun --gres=gpu:1 --pty bash" in finding_of("C09", machine).fix


def test_a_step_without_a_gpu_in_a_job_that_has_one() -> None:
    machine = node(in_slurm(refused(healthy(), 100)), "/dev/nvidia0", error="EPERM")
    assert causes(machine) == ["C09"]


@each("value", ["", "NoDevFiles", "-1"])
def test_a_job_that_slurm_gave_an_empty_list(value: str) -> None:
    machine = relieved_by(ungranted(CUDA_VISIBLE_DEVICES=value), "CUDA_VISIBLE_DEVICES")
    assert cause(machine) == "C09"
    assert finding_of("C09", machine).title.startswith("probably: ")


def test_a_job_with_a_gpu_is_not_blamed() -> None:
    assert seen("C09", in_slurm(refused(healthy(), 100))) is None
    assert seen("C09", ungranted()) is None  # nothing is forbidden or hidden: another reason
    assert seen("C09", ungranted(CUDA_VISIBLE_DEVICES="", SLURM_JOB_GPUS="3")) is None


def test_a_job_on_a_node_without_cards_is_no_fault() -> None:
    assert alarms(in_slurm(bare())) == []


# -- C11


@each("code", [100, 304, 999])
def test_a_sandbox_between_the_process_and_the_driver(code: int) -> None:
    machine = changed(in_container(refused(healthy(), code)), surroundings__sandbox="gvisor")
    assert cause(machine) == "C11"
    assert finding_of("C11", machine).title.startswith("probably: ")
    assert cause(changed(machine, surroundings__sandbox="")) == "X08"


def test_a_sandbox_where_cuda_works() -> None:
    assert seen("C11", changed(in_container(healthy()), surroundings__sandbox="gvisor")) is None


# -- D05


def test_a_service_with_a_private_dev() -> None:
    machine = no_nodes(refused(healthy(), 100))
    machine = changed(machine, surroundings=Surroundings(service="jupyter.service", private_dev=True))
    assert causes(machine) == ["D05"]
    assert "$ sudo systemctl edit jupyter.service" in finding_of("D05", machine).fix
    assert "| PrivateDevices=no" in finding_of("D05", machine).fix
    assert seen("D05", changed(machine, surroundings__service="")) is None


def test_a_service_whose_cgroup_forbids_the_nodes() -> None:
    machine = node(refused(healthy(), 100), "/dev/nvidiactl", error="EPERM")
    machine = changed(machine, surroundings=Surroundings(service="jupyter.service"))
    assert causes(machine) == ["D05"]
    assert seen("D05", changed(healthy(), surroundings=machine.surroundings)) is None
    assert seen("D05", changed(refused(healthy(), 999), surroundings=machine.surroundings)) is None


# -- C02, N02


@each(
    ("facts", "fires"),
    [
        ({"docker": "installed", "container_toolkit": False}, True),
        ({"docker": "snap", "container_toolkit": True}, True),
        ({"docker": "installed", "container_toolkit": True}, False),
        ({"docker": "installed", "container_toolkit": Unknown("PATH is not set")}, False),
        ({"docker": "", "container_toolkit": False}, False),
        ({"docker": "installed", "container_toolkit": False, "wsl": 2}, False),
    ],
)
def test_docker_without_the_toolkit_is_a_note(facts: dict[str, Any], fires: bool) -> None:
    machine = changed(healthy(), surroundings=Surroundings(**facts))
    found = seen("C02", machine)
    assert (found is not None) is fires
    assert alarms(machine) == []


def test_a_cpu_build_chosen_while_the_image_was_built() -> None:
    cpu = bare().torch.first
    assert cpu is not None
    first = replace(cpu, installer="uv")
    machine = changed(in_container(healthy()), torch__installs=(first,))
    assert finding_of("N02", machine).severity == "note"
    assert seen("N02", changed(machine, torch__installs=(replace(first, installer="pip"),))) is None
    assert seen("N02", changed(healthy(), torch__installs=(first,))) is None


def test_a_question_that_was_not_asked_makes_no_cause() -> None:
    unasked = changed(forgotten(), driver__cuda=Cuda(Answer("unasked")))
    assert causes(changed(unasked, torch_run=healthy().torch_run)) == []
    assert cause(unasked) == ""


# -- a torch without CUDA where no GPU was given


def on_purpose(machine: Machine) -> Machine:
    """The machine with a torch that was built without CUDA, and works."""
    cpu = bare()
    return replace(machine, torch=cpu.torch, torch_libraries=cpu.torch_libraries, torch_run=cpu.torch_run)


def in_pod(machine: Machine) -> Machine:
    return changed(machine, surroundings__kubernetes=True)


def without_grant() -> Machine:
    """A job of Slurm that asked for no GPU."""
    forbidden = tuple(replace(each, error="EPERM") for each in healthy().nodes.found)
    machine = changed(refused(in_slurm(healthy()), 100), nodes__found=forbidden)
    return changed(machine, variables__values={"SLURM_JOB_ID": "1"})


def set_aside() -> Machine:
    """A host that keeps its card for virtual machines."""
    machine = unloaded(healthy())
    return changed(machine, hardware__pci=tuple(replace(each, driver="vfio-pci") for each in machine.hardware.gpus))


@each(
    ("machine", "code"),
    [
        (forgotten(), "C01"),
        (forgotten("podman"), "C01"),
        (in_pod(forgotten()), "C05"),
        (variables(forgotten(), NVIDIA_VISIBLE_DEVICES="void"), "C04"),
        (no_libcuda(in_container(healthy(), "apptainer")), "C08"),
        (without_grant(), "C09"),
        (set_aside(), "K05"),
    ],
)
def test_a_torch_without_cuda_and_a_process_without_a_gpu_agree(machine: Machine, code: str) -> None:
    assert cause(machine) == code
    diagnosis = judge_machine(on_purpose(machine))
    assert {found.severity for found in diagnosis.findings} == {"note"}
    assert {"T01", code} <= {found.code for found in diagnosis.findings}
    assert diagnosis.ok


def test_slurm_gives_the_gpu_and_the_container_hands_it_on() -> None:
    machine = changed(without_grant(), surroundings__container="apptainer")
    fix = finding_of("C09", machine).fix
    assert fix.index("$ srun --gres=gpu:1 --pty bash") < fix.index("$ apptainer exec --nv IMAGE COMMAND")


def test_podman_is_not_told_to_use_docker() -> None:
    machine = variables(forgotten("podman"), NVIDIA_VISIBLE_DEVICES="void")
    found = finding_of("C04", machine)
    assert found.title.startswith("probably: ")
    assert not any("docker" in line for line in found.fix)
    assert "$ podman run --device nvidia.com/gpu=all …" in found.fix


def test_a_torch_without_cuda_in_a_container_without_a_gpu_is_meant_so() -> None:
    plain = bare()
    machine = changed(
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
    assert {found.severity for found in diagnosis.findings} == {"note"}
