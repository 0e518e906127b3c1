"""All rules, helpers that apply them to a machine, and helpers that break one part of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import cuda_fails, cuinit_fails, healthy, with_facts

from transload.diagnose.case import Case
from transload.diagnose.report import judge_machine
from transload.diagnose.rules import BY_CODE
from transload.findings import Finding
from transload.machine import ChildAnswer, Cuda, Experiment, Kernel, Machine, Node, Nvml

RULES = list(BY_CODE.values())
NO_LIBRARY = ChildAnswer("no-library", "libcuda.so.1: cannot open shared object file: No such file or directory")


def find(code: str, machine: Machine) -> Finding | None:
    """The finding of one rule on a machine, or None where the rule does not match."""
    return BY_CODE[code].finding(Case(machine))


def finding_of(code: str, machine: Machine) -> Finding:
    """The finding of one rule on a machine on which it must match."""
    finding = find(code, machine)
    assert finding is not None
    assert finding.evidence
    assert all(line and line == line.strip() for line in (*finding.evidence, *finding.fix))
    return finding


def cause(machine: Machine) -> str:
    """The code of the one cause; empty where there is none."""
    finding = judge_machine(machine, RULES).cause
    return finding.code if finding else ""


def causes(machine: Machine) -> list[str]:
    """Codes of all errors."""
    return [finding.code for finding in judge_machine(machine, RULES).findings if finding.severity == "error"]


def alarms(machine: Machine) -> list[str]:
    """Codes of all errors and warnings."""
    return [finding.code for finding in judge_machine(machine, RULES).findings if finding.severity != "note"]


def no_libcuda(machine: Machine) -> Machine:
    """The machine without libcuda.so.1: the loader does not find it, and it is not on the disk."""
    return cuda_fails(with_facts(machine, driver__cuda=Cuda(NO_LIBRARY), driver__libraries__cuda=()))


def driver_not_loaded(machine: Machine, **kernel_facts: Any) -> Machine:
    """The machine whose kernel driver is not loaded."""
    cards = tuple(replace(card, driver="") for card in machine.hardware.pci or ())
    absent = tuple(Node(f"/dev/{name}", exists=False, kind="", error="ENOENT") for name in _NODES)
    machine = with_facts(
        cuinit_fails(machine, 100),
        hardware__pci=cards,
        kernel=Kernel(loaded=False, built_for=(), secure_boot=False),
        nodes__found=absent,
        nodes__majors={},
        driver__nvml=Nvml(ChildAnswer("answered"), init=9),
    )
    return with_facts(machine, **{f"kernel__{name}": value for name, value in kernel_facts.items()})


def no_nodes(machine: Machine) -> Machine:
    return with_facts(
        machine, nodes__found=tuple(Node(f"/dev/{name}", exists=False, kind="", error="ENOENT") for name in _NODES)
    )


def with_node(machine: Machine, path: str, **facts: Any) -> Machine:
    """The machine with some facts of one device node changed."""
    nodes = tuple(replace(node, **facts) if node.path == path else node for node in machine.nodes.found)
    return with_facts(machine, nodes__found=nodes)


def missing_node(machine: Machine, path: str) -> Machine:
    return with_node(machine, path, exists=False, kind="", error="ENOENT", major=0, minor=0)


def works_without(machine: Machine, *variables: str) -> Machine:
    """The machine on which an experiment showed that the driver works without some variables."""
    return with_facts(machine, driver__experiments=(Experiment(variables, healthy().driver.cuda),))


def without_nvml_gpus(machine: Machine, init: int = 0) -> Machine:
    """The machine on which NVML sees no GPU."""
    nvml = replace(machine.driver.nvml, init=init, count=0, gpus=())
    return with_facts(machine, driver__nvml=nvml)


def with_gpu(machine: Machine, **facts: Any) -> Machine:
    """The machine with some of the facts changed that NVML reports about its GPUs."""
    gpus = tuple(replace(gpu, **facts) for gpu in machine.driver.nvml.gpus)
    return with_facts(machine, driver__nvml__gpus=gpus)


_NODES = ("nvidiactl", "nvidia0", "nvidia-uvm")
