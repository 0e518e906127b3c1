"""Children that cannot be started, or crash in the driver's library: what is said where nobody could be asked."""

from __future__ import annotations

from tests.diagnose.machines import (
    LIB,
    bare,
    card,
    changed,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    library,
    no_torch_run,
)
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.findings import Finding
from transload.machine import Answer, Cuda, Hardware, Library, Machine, Nvml, Step, TorchRun

WHY = "could not be started: /usr/bin/python3: permission denied"
REFUSED = Answer("unasked", WHY)
AROUND = {"host": lambda machine: machine, "docker": in_container, "slurm": in_slurm, "wsl": in_wsl}


def unheard(machine: Machine) -> Machine:
    return changed(
        machine,
        driver__cuda=Cuda(REFUSED),
        driver__nvml=Nvml(REFUSED),
        driver__experiments=(),
        torch_run__answer=REFUSED,
    )


def silenced(machine: Machine) -> Machine:
    """The machine on which no child could be started."""
    return changed(unheard(machine), torch_run=TorchRun(REFUSED))


def causes(machine: Machine) -> list[str]:
    return [found.code for found in judge_machine(machine).findings if found.severity != "note"]


def the(code: str, machine: Machine) -> Finding:
    diagnosis = judge_machine(machine)
    found = (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted))
    return next(finding for finding in found if finding.code == code)


@each("around", AROUND)
def test_where_nobody_could_be_asked_nothing_else_is_said(around: str) -> None:
    diagnosis = judge_machine(AROUND[around](silenced(healthy())))
    assert (diagnosis.status, causes(diagnosis.machine)) == ("broken", ["X13"])
    assert diagnosis.cause is not None
    assert diagnosis.cause.evidence == (f"the CUDA driver was not asked: {WHY}", f"torch was not run: {WHY}")
    assert not diagnosis.cuda_usable


def test_a_probe_of_ours_that_broke_is_no_all_clear_either() -> None:
    machine = changed(silenced(healthy()), driver__cuda=Cuda(), problems={"cuda": "KeyError: 'capability'"})
    assert the("X13", machine).evidence[0] == "the CUDA driver was not asked: KeyError: 'capability'"


def test_the_report_says_that_it_does_not_know_and_why() -> None:
    text = str(judge_machine(silenced(healthy())))
    assert text.startswith("It is unknown whether CUDA works: the machine could not be examined  [X13]\n")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("? CUDA driver not asked: could not be started") for line in lines)
    assert any(line.startswith("? running torch not run: could not be started") for line in lines)


def test_what_files_prove_is_still_reported() -> None:
    machine = changed(
        silenced(healthy()),
        hardware=Hardware(pci=(card(0x2684, "nouveau"),)),
        kernel=bare().kernel,
        nodes=bare().nodes,
        driver__libraries=bare().driver.libraries,
    )
    diagnosis = judge_machine(machine)
    assert causes(machine) == ["K04"]
    assert ("X13", "K04") in [(muted.finding.code, muted.because) for muted in diagnosis.muted]


def test_torch_that_could_not_be_run_is_a_warning_where_the_driver_answers_or_no_gpu_is() -> None:
    for machine in (changed(healthy(), torch_run=TorchRun(REFUSED)), silenced(bare())):
        assert judge_machine(machine).status == "degraded"
        assert the("X13", machine).title == "torch could not be run, so whether it works is unknown"


@each("machine", [no_torch_run(healthy()), no_torch_run(bare()), unheard(bare()), Machine()])
def test_not_to_ask_is_a_choice(machine: Machine) -> None:
    said = changed(machine, torch_run__answer=Answer())
    assert "X13" not in causes(said)


def test_torch_at_work_needs_no_word_of_the_driver() -> None:
    machine = changed(healthy(), driver__cuda=Cuda(REFUSED), driver__nvml=Nvml(REFUSED))
    assert judge_machine(machine).status == "ok"


@each(
    ("why", "advice"),
    [
        ("permission denied", "Run it as a user who may execute that interpreter."),
        ("resource temporarily unavailable", "$ ulimit -u"),
        ("can't start new thread", "$ ulimit -u"),
        ("/home/me/memory-net/.venv/bin/python does not exist", "Repair what is described above, and run it again."),
        ("embedded null byte", "Repair what is described above, and run it again."),
    ],
)
def test_the_fix_fits_the_reason(why: str, advice: str) -> None:
    machine = changed(silenced(healthy()), driver__cuda=Cuda(Answer("unasked", why)), torch_run=TorchRun())
    assert advice in the("X13", machine).fix


CRASHED = Answer("crashed", "SIGSEGV in cuInit", 0.2)
STEPS = (Step("import", ok=True), Step("available", ok=False, error="SIGSEGV in available"))


def crashing(lib: Library) -> Machine:
    run = TorchRun(Answer("crashed", "SIGSEGV in available"), "2.13.0+cu130", steps=STEPS)
    return changed(bare(), driver__libraries__cuda=(lib,), driver__cuda=Cuda(CRASHED), torch_run=run)


def test_a_driver_that_crashes_without_torch_too_is_no_reason_to_install_torch() -> None:
    machine = crashing(Library("libcuda.so.1", "/opt/shim/libcuda.so.1", via="LD_LIBRARY_PATH", kind="other"))
    machine = changed(machine, variables__values={"LD_LIBRARY_PATH": "/opt/shim:/opt/x"})
    found = the("X11", machine)
    assert "also without torch: the CUDA driver crashed: SIGSEGV in cuInit" in found.evidence
    assert "libcuda.so.1 is /opt/shim/libcuda.so.1, found through LD_LIBRARY_PATH" in found.evidence
    assert "$ export LD_LIBRARY_PATH=/opt/x" in found.fix
    assert not any("pip" in line for line in found.fix)


def test_a_preloaded_library_is_dropped_and_the_drivers_own_is_reinstalled() -> None:
    preloaded = crashing(Library("libcuda.so.1", "/opt/shim/libcuda.so.1", via="LD_PRELOAD", kind="other"))
    assert "$ unset LD_PRELOAD" in the("X11", changed(preloaded, variables__values={"LD_PRELOAD": "x"})).fix
    own = the("X11", crashing(library("libcuda.so.1")))
    assert own.evidence[-1] == f"libcuda.so.1 is {LIB}/libcuda.so.1, found through ld.so.cache"
    assert own.fix[0].startswith("The driver's library crashes, not torch")
