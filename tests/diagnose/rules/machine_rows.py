"""The rows of the machine's chain, and short ways to ask them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import changed, dead, healthy, refused

from transload.diagnose.case import Case
from transload.diagnose.report import judge_machine
from transload.diagnose.rules import BY_CODE
from transload.findings import Finding
from transload.machine import Answer, Cuda, Experiment, Kernel, Machine, Node, Nvml

ROWS = list(BY_CODE.values())
NO_LIBRARY = Answer("no-library", "libcuda.so.1: cannot open shared object file: No such file or directory")


def seen(code: str, machine: Machine) -> Finding | None:
    """What one rule finds on a machine."""
    return BY_CODE[code].finding(Case(machine))


def finding_of(code: str, machine: Machine) -> Finding:
    """What one rule finds on a machine on which it must match."""
    found = seen(code, machine)
    assert found is not None
    assert found.evidence
    assert all(line and line == line.strip() for line in (*found.evidence, *found.fix))
    return found


def cause(machine: Machine) -> str:
    """The code of the one cause among the rows of the machine; empty where there is none."""
    found = judge_machine(machine, ROWS).cause
    return found.code if found else ""


def causes(machine: Machine) -> list[str]:
    return [found.code for found in judge_machine(machine, ROWS).findings if found.severity == "error"]


def alarms(machine: Machine) -> list[str]:
    """Codes of all errors and warnings."""
    return [found.code for found in judge_machine(machine, ROWS).findings if found.severity != "note"]


def no_libcuda(machine: Machine) -> Machine:
    """The machine without libcuda.so.1, neither for the loader nor on the disk."""
    return dead(changed(machine, driver__cuda=Cuda(NO_LIBRARY), driver__libraries__cuda=()))


def unloaded(machine: Machine, **kernel_facts: Any) -> Machine:
    """The machine whose card has no kernel driver."""
    cards = tuple(replace(card, driver="") for card in machine.hardware.pci or ())
    absent = tuple(Node(f"/dev/{name}", exists=False, kind="", error="ENOENT") for name in _NAMES)
    machine = changed(
        refused(machine, 100),
        hardware__pci=cards,
        kernel=Kernel(loaded=False, built_for=(), secure_boot=False),
        nodes__found=absent,
        nodes__majors={},
        driver__nvml=Nvml(Answer("answered"), init=9),
    )
    return changed(machine, **{f"kernel__{name}": value for name, value in kernel_facts.items()})


def no_nodes(machine: Machine) -> Machine:
    return changed(
        machine, nodes__found=tuple(Node(f"/dev/{name}", exists=False, kind="", error="ENOENT") for name in _NAMES)
    )


def node(machine: Machine, path: str, **facts: Any) -> Machine:
    """The machine with one node changed."""
    found = tuple(replace(each, **facts) if each.path == path else each for each in machine.nodes.found)
    return changed(machine, nodes__found=found)


def missing(machine: Machine, path: str) -> Machine:
    return node(machine, path, exists=False, kind="", error="ENOENT", major=0, minor=0)


def relieved_by(machine: Machine, *variables: str) -> Machine:
    """The machine whose driver was seen to work without some variables."""
    return changed(machine, driver__experiments=(Experiment(variables, healthy().driver.cuda),))


def blind_nvml(machine: Machine, init: int = 0) -> Machine:
    """The machine whose NVML sees no card."""
    nvml = replace(machine.driver.nvml, init=init, count=0, gpus=())
    return changed(machine, driver__nvml=nvml)


def with_gpu(machine: Machine, **facts: Any) -> Machine:
    """The machine with NVML's word on its card changed."""
    gpus = tuple(replace(gpu, **facts) for gpu in machine.driver.nvml.gpus)
    return changed(machine, driver__nvml__gpus=gpus)


_NAMES = ("nvidiactl", "nvidia0", "nvidia-uvm")
