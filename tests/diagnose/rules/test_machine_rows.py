"""What holds for every row of the machine's chain, on machines with many things odd at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.diagnose.machines import bare, card, changed, healthy, in_container, in_slurm, in_wsl, library, refused
from tests.diagnose.rules.machine_rows import (
    ROWS,
    alarms,
    blind_nvml,
    missing,
    no_libcuda,
    no_nodes,
    node,
    relieved_by,
    unloaded,
    with_gpu,
)
from tests.each import each

from transload.diagnose.case import Case
from transload.diagnose.report import judge_machine
from transload.machine import Answer, Cuda, Hardware, Kernel, Machine, Nodes, Nvml, Surroundings, Unknown

Change = Callable[[Machine], Machine]
UNKNOWN = Unknown("not readable")


def fact(**facts: Any) -> Change:
    return lambda machine: changed(machine, **facts)


AROUND: tuple[Change, ...] = (
    lambda machine: machine,
    in_container,
    lambda machine: in_container(machine, "lxc"),
    lambda machine: in_container(machine, "apptainer"),
    in_slurm,
    in_wsl,
    fact(surroundings=Surroundings(service="x.service", private_dev=True)),
    fact(surroundings=Surroundings(container="containerd", kubernetes=True, sandbox="gvisor")),
)
ODD: tuple[Change, ...] = (
    fact(hardware=Hardware(pci=UNKNOWN)),
    fact(hardware__pci=()),
    fact(hardware__pci=(card(0x1B06, "nouveau"), replace(card(0x2335, "vfio-pci", "0000:18:00.0"), dead=True))),
    fact(hardware__pci=(replace(card(0xFFFF, ""), bars=(0, 0)),)),
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
    lambda machine: missing(machine, "/dev/nvidia-uvm"),
    lambda machine: node(machine, "/dev/nvidiactl", error="EPERM"),
    lambda machine: node(machine, "/dev/nvidia0", error="EACCES", mode=0o600, nodev=True),
    lambda machine: node(machine, "/dev/nvidia-uvm", major=1),
    fact(driver__libraries__cuda=UNKNOWN, driver__libraries__nvml=UNKNOWN),
    fact(driver__libraries__cuda=(library("libcuda.so.1", "nonsense"),)),
    fact(driver__libraries__cuda=(replace(library("libcuda.so.1", "535.1"), kind="compat", via="LD_LIBRARY_PATH"),)),
    fact(driver__libraries__ptx_compiler=()),
    fact(driver__nvml=Nvml(Answer("crashed", "SIGSEGV"))),
    fact(driver__nvml=Nvml(Answer("answered"), init=18)),
    blind_nvml,
    lambda machine: with_gpu(machine, mig="enabled", virtualization="vgpu", fabric="in-progress", remap_failure=True),
    fact(platform__root=True, platform__suspends=2, platform__address_space=1 << 30),
    fact(platform__package_manager="", platform__distribution="", platform__kernel="", platform__shell="fish"),
    fact(variables__values={"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}),
    fact(variables__values={"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/1/0,MIG-2", "LD_LIBRARY_PATH": ":/usr/local/x::"}),
    lambda machine: relieved_by(machine, "LD_LIBRARY_PATH"),
    lambda machine: relieved_by(machine, "CUDA_VISIBLE_DEVICES"),
)
FAILING: tuple[Change, ...] = (
    *(lambda machine, code=code: refused(machine, code) for code in (2, 3, 34, 35, 46, 100, 101, 304, 802, 803, 805)),
    *(lambda machine, code=code: refused(machine, code) for code in (804, 807, 999, 12345)),
    fact(driver__cuda=Cuda(Answer("hung"))),
    fact(driver__cuda=Cuda(Answer("crashed"))),
    fact(driver__cuda=Cuda(Answer("not-loadable", "file too short"))),
    no_libcuda,
    unloaded,
)


def draw(seed: int, machine: Machine) -> Machine:
    random = Random(seed)  # noqa: S311
    for change in random.sample(ODD, random.randint(1, 5)):
        machine = change(machine)
    return machine


@each("seed", range(60))
def test_where_cuda_works_no_row_sees_an_error(seed: int) -> None:
    for around in AROUND:
        machine = draw(seed, around(healthy()))
        assert machine.driver.cuda.works
        case = Case(machine)
        found = [each.code for row in ROWS if (each := row.finding(case)) and each.severity == "error"]
        assert found == []


@each("seed", range(60))
def test_whatever_is_odd_there_is_a_verdict(seed: int) -> None:
    for number, around in enumerate(AROUND):
        failing = FAILING[(seed + number * 7) % len(FAILING)]
        diagnosis = judge_machine(draw(seed, failing(around(healthy()))), ROWS)
        lines = [line for found in diagnosis.findings for line in (*found.evidence, *found.fix)]
        assert all(line and line == line.strip() and "\n" not in line for line in lines)
        assert len([found for found in diagnosis.findings if found.code == "X08"]) <= 1


@each(
    "odd",
    [
        fact(platform__root=True, platform__suspends=2, platform__address_space=1 << 30),
        fact(platform__package_manager="", platform__kernel=""),
        fact(variables__values={"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}),
        fact(driver__libraries__cuda=(library("libcuda.so.1", via="disk"),)),
        fact(driver__cuda=refused(healthy(), 100).driver.cuda),
        fact(driver__cuda=refused(healthy(), 34).driver.cuda),
        fact(driver__cuda=Cuda(Answer("crashed", "SIGABRT"))),
        fact(kernel__mps_directory="/run/mps", kernel__secure_boot=True),
    ],
)
def test_without_a_card_nothing_is_a_fault(odd: Change) -> None:
    for around in AROUND[:5]:
        assert alarms(odd(around(bare()))) == []


@each("number", ["²²²", "5" * 5000, "٣٣٣.1", "580"])
def test_what_only_looks_like_a_number_stops_no_row(number: str) -> None:
    machine = changed(
        refused(healthy(), 100),
        kernel__version=number,
        kernel__parameters={"DeviceFileMode": number},
        nodes__found=tuple(replace(each, error="EACCES", mode=0o600) for each in healthy().nodes.found),
        python__version=f"{number}.{number}",
        torch_libraries__cubins={f"sm_{number}": 1},
        driver__nvml__count=0,
        driver__nvml__gpus=(),
    )
    case = Case(machine)
    for row in ROWS:
        row.finding(case)
