"""Rules for child processes that cannot be started, so that CUDA and torch are unknown, or that crash in libcuda."""

from __future__ import annotations

from tests.diagnose.machines import (
    LIB,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    library,
    no_torch_run,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.findings import Finding
from transload.machine import ChildAnswer, Cuda, Hardware, Library, Machine, Nvml, Step, TorchRun

REASON = "could not be started: /usr/bin/python3: permission denied"
NOT_STARTED = ChildAnswer("unasked", REASON)
ENVIRONMENTS = {"host": lambda machine: machine, "docker": in_container, "slurm": in_slurm, "wsl": in_wsl}


def without_answers(machine: Machine) -> Machine:
    """The machine whose driver and torch gave no answer, since no child could be started."""
    return with_facts(
        machine,
        driver__cuda=Cuda(NOT_STARTED),
        driver__nvml=Nvml(NOT_STARTED),
        driver__experiments=(),
        torch_run__answer=NOT_STARTED,
    )


def no_child_started(machine: Machine) -> Machine:
    """The machine on which no child could be started, and nothing is known about running torch."""
    return with_facts(without_answers(machine), torch_run=TorchRun(NOT_STARTED))


def alarms(machine: Machine) -> list[str]:
    """Codes of all errors and warnings."""
    return [finding.code for finding in judge_machine(machine).findings if finding.severity != "note"]


def finding_of(code: str, machine: Machine) -> Finding:
    """The finding with this code, muted or not."""
    diagnosis = judge_machine(machine)
    findings = (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted))
    return next(finding for finding in findings if finding.code == code)


@each("environment", ENVIRONMENTS)
def test_only_x13_is_reported_where_no_child_can_start(environment: str) -> None:
    diagnosis = judge_machine(ENVIRONMENTS[environment](no_child_started(healthy())))
    assert (diagnosis.status, alarms(diagnosis.machine)) == ("broken", ["X13"])
    assert diagnosis.cause is not None
    assert diagnosis.cause.evidence == (f"the CUDA driver was not asked: {REASON}", f"torch was not run: {REASON}")
    assert not diagnosis.cuda_usable


def test_error_in_our_own_probe_is_reported_too() -> None:
    machine = with_facts(no_child_started(healthy()), driver__cuda=Cuda(), problems={"cuda": "KeyError: 'capability'"})
    assert finding_of("X13", machine).evidence[0] == "the CUDA driver was not asked: KeyError: 'capability'"


def test_report_says_that_the_state_is_unknown_and_why() -> None:
    text = str(judge_machine(no_child_started(healthy())))
    assert text.startswith("It is unknown whether CUDA works: the machine could not be examined  [X13]\n")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("? CUDA driver not asked: could not be started") for line in lines)
    assert any(line.startswith("? running torch not run: could not be started") for line in lines)


def test_cause_proven_by_files_is_still_reported() -> None:
    machine = with_facts(
        no_child_started(healthy()),
        hardware=Hardware(pci=(pci_gpu(0x2684, "nouveau"),)),
        kernel=without_gpu().kernel,
        nodes=without_gpu().nodes,
        driver__libraries=without_gpu().driver.libraries,
    )
    diagnosis = judge_machine(machine)
    assert alarms(machine) == ["K04"]
    assert ("X13", "K04") in [(muted.finding.code, muted.because) for muted in diagnosis.muted]


def test_torch_not_run_is_a_warning_where_the_driver_answers_or_there_is_no_gpu() -> None:
    for machine in (with_facts(healthy(), torch_run=TorchRun(NOT_STARTED)), no_child_started(without_gpu())):
        assert judge_machine(machine).status == "degraded"
        assert finding_of("X13", machine).title == "torch could not be run, so whether it works is unknown"


@each("machine", [no_torch_run(healthy()), no_torch_run(without_gpu()), without_answers(without_gpu()), Machine()])
def test_probes_that_were_not_requested_are_not_reported(machine: Machine) -> None:
    not_requested = with_facts(machine, torch_run__answer=ChildAnswer())
    assert "X13" not in alarms(not_requested)


def test_working_torch_is_enough_without_answers_of_the_driver() -> None:
    machine = with_facts(healthy(), driver__cuda=Cuda(NOT_STARTED), driver__nvml=Nvml(NOT_STARTED))
    assert judge_machine(machine).status == "ok"


@each(
    ("reason", "line"),
    [
        ("permission denied", "Run it as a user who may execute that interpreter."),
        ("resource temporarily unavailable", "$ ulimit -u"),
        ("can't start new thread", "$ ulimit -u"),
        ("/home/me/memory-net/.venv/bin/python does not exist", "Repair what is described above, and run it again."),
        ("embedded null byte", "Repair what is described above, and run it again."),
    ],
)
def test_fix_depends_on_the_reason(reason: str, line: str) -> None:
    machine = with_facts(
        no_child_started(healthy()), driver__cuda=Cuda(ChildAnswer("unasked", reason)), torch_run=TorchRun()
    )
    assert line in finding_of("X13", machine).fix


CRASHED = ChildAnswer("crashed", "SIGSEGV in cuInit", 0.2)
STEPS = (Step("import", ok=True), Step("available", ok=False, error="SIGSEGV in available"))


def crashing(lib: Library) -> Machine:
    run = TorchRun(ChildAnswer("crashed", "SIGSEGV in available"), "2.13.0+cu130", steps=STEPS)
    return with_facts(without_gpu(), driver__libraries__cuda=(lib,), driver__cuda=Cuda(CRASHED), torch_run=run)


def test_fix_does_not_reinstall_torch_where_the_driver_crashes_without_it() -> None:
    machine = crashing(Library("libcuda.so.1", "/opt/shim/libcuda.so.1", via="LD_LIBRARY_PATH", kind="other"))
    machine = with_facts(machine, variables__values={"LD_LIBRARY_PATH": "/opt/shim:/opt/x"})
    finding = finding_of("X11", machine)
    assert "also without torch: the CUDA driver crashed: SIGSEGV in cuInit" in finding.evidence
    assert "libcuda.so.1 is /opt/shim/libcuda.so.1, found through LD_LIBRARY_PATH" in finding.evidence
    assert "$ export LD_LIBRARY_PATH=/opt/x" in finding.fix
    assert not any("pip" in line for line in finding.fix)


def test_fix_unsets_ld_preload_or_blames_the_drivers_library() -> None:
    preloaded = crashing(Library("libcuda.so.1", "/opt/shim/libcuda.so.1", via="LD_PRELOAD", kind="other"))
    assert "$ unset LD_PRELOAD" in finding_of("X11", with_facts(preloaded, variables__values={"LD_PRELOAD": "x"})).fix
    of_driver = finding_of("X11", crashing(library("libcuda.so.1")))
    assert of_driver.evidence[-1] == f"libcuda.so.1 is {LIB}/libcuda.so.1, found through ld.so.cache"
    assert of_driver.fix[0].startswith("The driver's library crashes, not torch")
