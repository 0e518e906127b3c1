"""Properties that hold for every rule, on machines with several random oddities at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.diagnose.machines import (
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    library,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    RULES,
    alarms,
    driver_not_loaded,
    missing_node,
    no_libcuda,
    no_nodes,
    with_gpu,
    with_node,
    without_nvml_gpus,
    works_without,
)
from tests.each import each

from transload.diagnose.case import Case
from transload.diagnose.report import judge_machine
from transload.machine import ChildAnswer, Cuda, Hardware, Kernel, Machine, Nodes, Nvml, Surroundings, Unknown

Change = Callable[[Machine], Machine]
UNKNOWN = Unknown("not readable")


def fact(**facts: Any) -> Change:
    return lambda machine: with_facts(machine, **facts)


ENVIRONMENTS: tuple[Change, ...] = (
    lambda machine: machine,
    in_container,
    lambda machine: in_container(machine, "lxc"),
    lambda machine: in_container(machine, "apptainer"),
    in_slurm,
    in_wsl,
    fact(surroundings=Surroundings(service="x.service", private_dev=True)),
    fact(surroundings=Surroundings(container="containerd", kubernetes=True, sandbox="gvisor")),
)
ODDITIES: tuple[Change, ...] = (
    fact(hardware=Hardware(pci=UNKNOWN)),
    fact(hardware__pci=()),
    fact(hardware__pci=(pci_gpu(0x1B06, "nouveau"), replace(pci_gpu(0x2335, "vfio-pci", "0000:18:00.0"), dead=True))),
    fact(hardware__pci=(replace(pci_gpu(0xFFFF, ""), bars=(0, 0)),)),
    fact(hardware__tegra="Orin"),
    fact(kernel=Kernel(loaded=UNKNOWN, built_for=UNKNOWN)),
    fact(kernel=Kernel()),
    fact(kernel__version="595.58.03", kernel__flavour="proprietary", kernel__gpus=()),
    fact(kernel__version="nonsense"),
    fact(kernel__log=("NVRM: Xid 79, GPU has fallen off the bus", "RmInitAdapter failed! (0x1)", "BAR1 is 0M")),
    fact(kernel__firmware=False, kernel__secure_boot=True, kernel__stuck=("x (1)",)),
    fact(kernel__daemons=("nv-fabricmanager",), kernel__fabric_manager="1.2", kernel__mps_directory="/run/mps"),
    fact(nodes=Nodes()),
    no_nodes,
    lambda machine: missing_node(machine, "/dev/nvidia-uvm"),
    lambda machine: with_node(machine, "/dev/nvidiactl", error="EPERM"),
    lambda machine: with_node(machine, "/dev/nvidia0", error="EACCES", mode=0o600, nodev=True),
    lambda machine: with_node(machine, "/dev/nvidia-uvm", major=1),
    fact(driver__libraries__cuda=UNKNOWN, driver__libraries__nvml=UNKNOWN),
    fact(driver__libraries__cuda=(library("libcuda.so.1", "nonsense"),)),
    fact(driver__libraries__cuda=(replace(library("libcuda.so.1", "535.1"), kind="compat", via="LD_LIBRARY_PATH"),)),
    fact(driver__libraries__ptx_compiler=()),
    fact(driver__nvml=Nvml(ChildAnswer("crashed", "SIGSEGV"))),
    fact(driver__nvml=Nvml(ChildAnswer("answered"), init=18)),
    without_nvml_gpus,
    lambda machine: with_gpu(machine, mig="enabled", virtualization="vgpu", fabric="in-progress", remap_failure=True),
    fact(platform__root=True, platform__suspends=2, platform__address_space=1 << 30),
    fact(platform__package_manager="", platform__distribution="", platform__kernel="", platform__shell="fish"),
    fact(variables__values={"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}),
    fact(variables__values={"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/1/0,MIG-2", "LD_LIBRARY_PATH": ":/usr/local/x::"}),
    lambda machine: works_without(machine, "LD_LIBRARY_PATH"),
    lambda machine: works_without(machine, "CUDA_VISIBLE_DEVICES"),
)
FAILURES: tuple[Change, ...] = (
    *(
        lambda machine, code=code: cuinit_fails(machine, code)
        for code in (2, 3, 34, 35, 46, 100, 101, 304, 802, 803, 805)
    ),
    *(lambda machine, code=code: cuinit_fails(machine, code) for code in (804, 807, 999, 12345)),
    fact(driver__cuda=Cuda(ChildAnswer("hung"))),
    fact(driver__cuda=Cuda(ChildAnswer("crashed"))),
    fact(driver__cuda=Cuda(ChildAnswer("not-loadable", "file too short"))),
    no_libcuda,
    driver_not_loaded,
)


def with_random_oddities(seed: int, machine: Machine) -> Machine:
    random = Random(seed)  # noqa: S311
    for change in random.sample(ODDITIES, random.randint(1, 5)):
        machine = change(machine)
    return machine


@each("seed", range(60))
def test_no_rule_reports_an_error_where_cuda_works(seed: int) -> None:
    for environment in ENVIRONMENTS:
        machine = with_random_oddities(seed, environment(healthy()))
        assert machine.driver.cuda.works
        case = Case(machine)
        errors = [finding.code for rule in RULES if (finding := rule.finding(case)) and finding.severity == "error"]
        assert errors == []


@each("seed", range(60))
def test_findings_are_well_formed_whatever_is_wrong(seed: int) -> None:
    for number, environment in enumerate(ENVIRONMENTS):
        failure = FAILURES[(seed + number * 7) % len(FAILURES)]
        diagnosis = judge_machine(with_random_oddities(seed, failure(environment(healthy()))), RULES)
        lines = [line for finding in diagnosis.findings for line in (*finding.evidence, *finding.fix)]
        assert all(line and line == line.strip() and "\n" not in line for line in lines)
        assert len([finding for finding in diagnosis.findings if finding.code == "X08"]) <= 1


@each(
    "oddity",
    [
        fact(platform__root=True, platform__suspends=2, platform__address_space=1 << 30),
        fact(platform__package_manager="", platform__kernel=""),
        fact(variables__values={"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}),
        fact(driver__libraries__cuda=(library("libcuda.so.1", via="disk"),)),
        fact(driver__cuda=cuinit_fails(healthy(), 100).driver.cuda),
        fact(driver__cuda=cuinit_fails(healthy(), 34).driver.cuda),
        fact(driver__cuda=Cuda(ChildAnswer("crashed", "SIGABRT"))),
        fact(kernel__mps_directory="/run/mps", kernel__secure_boot=True),
    ],
)
def test_no_alarm_without_a_card(oddity: Change) -> None:
    for environment in ENVIRONMENTS[:5]:
        assert alarms(oddity(environment(without_gpu()))) == []


@each("text", ["²²²", "5" * 5000, "٣٣٣.1", "580"])
def test_no_rule_raises_on_malformed_numbers(text: str) -> None:
    machine = with_facts(
        cuinit_fails(healthy(), 100),
        kernel__version=text,
        kernel__parameters={"DeviceFileMode": text},
        nodes__found=tuple(replace(node, error="EACCES", mode=0o600) for node in healthy().nodes.found),
        python__version=f"{text}.{text}",
        torch_libraries__cubins={f"sm_{text}": 1},
        driver__nvml__count=0,
        driver__nvml__gpus=(),
    )
    case = Case(machine)
    for rule in RULES:
        rule.finding(case)
