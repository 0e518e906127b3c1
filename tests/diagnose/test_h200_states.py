"""Recorded states of a real H200: the output of the driver, NVML and torch, and the cause that the doctor names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.machines import ANSWERED, LIB, healthy, library, no_torch_run, with_facts

from transload.diagnose.report import judge_machine
from transload.machine import Cuda, Experiment, Machine, Node, Nvml, Step, Variables

DATA = Path(__file__).parent.parent / "data" / "doctor"
HIDING_VALUES = {
    "cvd_empty": "",
    "cvd_minus1": "-1",
    "cvd_7": "7",
    "cvd_garbage": "gpu0",
    "cvd_baduuid": "GPU-deadbeef",
}
# How each state was produced, as facts of the machine, and the correct causes.
STATES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "healthy": ({}, set()),
    "cvd_empty": ({}, {"E01"}),
    "cvd_minus1": ({}, {"E01"}),
    "cvd_7": ({}, {"E01", "E02"}),
    "cvd_0_7": ({"variables": Variables({"CUDA_VISIBLE_DEVICES": "0,7"})}, set()),
    "cvd_0_0": ({"variables": Variables({"CUDA_VISIBLE_DEVICES": "0,0"})}, {"E03"}),
    "cvd_garbage": ({}, {"E01"}),
    "cvd_baduuid": ({}, {"E01", "E04"}),
    "cvd_quote": ({"variables": Variables({"CUDA_VISIBLE_DEVICES": '"0"'})}, {"E01"}),
    "stub_libcuda": (
        {
            "driver__libraries__cuda": (
                replace(
                    library("libcuda.so.1", "", "LD_LIBRARY_PATH", "/usr/local/cuda/lib64/stubs"),
                    target="/usr/local/cuda/lib64/stubs/libcuda.so",
                    kind="stub",
                ),
                library("libcuda.so.1"),
            ),
            "variables": Variables({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"}),
        },
        {"U04"},
    ),
    "no_uvm": ({"nodes": "/dev/nvidia-uvm"}, {"D02"}),
    "no_ctl": ({"nodes": "/dev/nvidiactl"}, {"D02"}),
    "no_dev0": ({"nodes": "/dev/nvidia0"}, {"D02"}),
    "dev_hidden": ({}, set()),
    "ulimit": ({}, set()),
    "nobody": ({}, set()),
}


def sections(name: str) -> Iterator[tuple[str, str]]:
    for part in (DATA / name).read_text(encoding="utf-8").split("=== ")[1:]:
        head, _, body = part.partition("\n")
        yield head.strip(), body


def numbers(pattern: str, text: str) -> list[int]:
    match = re.search(pattern, text)
    return [int(number) for number in match.groups()] if match else []


def machine_of(body: str, facts: dict[str, Any]) -> Machine:
    """The healthy machine with the recorded results and messages."""
    machine = healthy()
    init, count_code, count, version = numbers(r"cuInit (\d+) count (\d+) (-?\d+) drv (\d+)", body)
    nvml_init, nvml_code, nvml_count = numbers(r"nvmlInit (\d+) count (\d+) (\d+)", body)
    gpus = machine.driver.cuda.gpus if init == 0 else ()
    cuda = Cuda(ANSWERED, f"{LIB}/libcuda.so.1", init, version, count, count_code, gpus)
    nvml_gpus = machine.driver.nvml.gpus[:nvml_count] if nvml_init == 0 else ()
    nvml = Nvml(ANSWERED, f"{LIB}/libnvidia-ml.so.1", nvml_init, "580.159.04", 13000, nvml_count, nvml_code, nvml_gpus)
    machine = with_facts(machine, driver__cuda=cuda, driver__nvml=nvml, torch_run=recorded_run(machine, body))
    if isinstance(facts.get("nodes"), str):
        facts = {**facts, "nodes": with_null_device(machine, facts["nodes"])}
    return with_facts(machine, **facts)


def recorded_run(machine: Machine, body: str) -> Any:
    error = re.search(r"INIT (.*)", body)
    warning = re.search(r"UserWarning: (.*)", body)
    available = "avail True" in body
    failed = (Step("init", ok=False, error=error.group(1).replace(" ", ": ", 1)),) if error else ()
    steps = (Step("import", ok=True), Step("available", ok=True), *failed) if failed else machine.torch_run.steps
    warnings = (warning.group(1),) if warning else ()
    return replace(machine.torch_run, available=available, steps=steps, warnings=warnings)


def with_null_device(machine: Machine, path: str) -> Any:
    """The device nodes, with one of them replaced by /dev/null."""
    null = Node(path, major=1, minor=3)
    return replace(machine.nodes, found=tuple(null if n.path == path else n for n in machine.nodes.found))


@pytest.mark.parametrize("name", STATES)
def test_cause_of_each_recorded_state_is_named(name: str) -> None:
    body = dict(sections("h200-states.txt"))[name]
    facts, causes = STATES[name]
    if name in HIDING_VALUES:
        facts = {"variables": Variables({"CUDA_VISIBLE_DEVICES": HIDING_VALUES[name]})}
    diagnosis = judge_machine(machine_of(body, facts))
    named = {finding.code for finding in diagnosis.findings if finding.severity == "error"}
    assert len(named) == (1 if causes else 0)
    assert named <= causes
    assert diagnosis.status in (("broken",) if causes else ("ok", "degraded"))


@pytest.mark.parametrize("name", sorted(HIDING_VALUES))
def test_experiment_without_the_variable_is_evidence(name: str) -> None:
    machine = machine_of(dict(sections("h200-states.txt"))[name], {})
    experiment = Experiment(("CUDA_VISIBLE_DEVICES",), healthy().driver.cuda)
    variables = Variables({"CUDA_VISIBLE_DEVICES": HIDING_VALUES[name]})
    diagnosis = judge_machine(with_facts(machine, variables=variables, driver__experiments=(experiment,)))
    assert diagnosis.cause is not None
    assert any("without CUDA_VISIBLE_DEVICES" in line for line in diagnosis.cause.evidence)


def test_every_state_recorded_with_cuinit_is_judged() -> None:
    recorded = {name for name, body in sections("h200-states.txt") if "cuInit" in body}
    assert recorded == set(STATES)


# -- device nodes: the library creates a missing node again for root, but not for other users


def node_states() -> list[Any]:
    states = []
    for name, body in sections("h200-device-nodes.txt"):
        if name != "no libcuda":
            states.append(pytest.param(name, body, id=name.replace(" ", "-")))
    return states


@pytest.mark.parametrize(("name", "body"), node_states())
def test_cause_of_each_recorded_state_of_device_nodes_is_named(name: str, body: str) -> None:
    machine = no_torch_run(healthy())
    node_name = name.rsplit(maxsplit=1)[-1] if "as nobody" not in name else name.split()[2]
    init, _, count = numbers(r"cuInit (\d+) count rc (\d+) (-?\d+)", body)
    nvml_init, _, nvml_count = numbers(r"nvmlInit (\d+) count rc (\d+) (\d+)", body)
    error = re.search(rf"^{re.escape(node_name)} (\w+)$", body, re.MULTILINE)
    assert error is not None
    mode = 0o600 if "0600" in name else 0o666
    missing = error.group(1) == "ENOENT"
    path = f"/dev/{node_name}"
    node = replace(
        machine.nodes.at(path), exists=not missing, mode=mode, error=error.group(1), nodev=name.startswith("nodev")
    )
    machine = with_facts(
        machine,
        nodes__found=tuple(node if n.path == path else n for n in machine.nodes.found),
        platform__root="as nobody" not in name,
        driver__cuda=replace(
            machine.driver.cuda, init=init, count=count, gpus=machine.driver.cuda.gpus if count > 0 else ()
        ),
        driver__nvml=replace(
            machine.driver.nvml, init=nvml_init, count=nvml_count, gpus=machine.driver.nvml.gpus[:nvml_count]
        ),
    )
    diagnosis = judge_machine(machine)
    assert [f.code for f in diagnosis.findings if f.severity == "error"] == ([] if init == 0 else ["D03"])
