"""The probes together: what one says, what becomes of one that fails, and who waits for whom."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.scenarios import World, host_of
from tests.diagnose.trees import TreeHost
from tests.elf_forge import LOADABLE
from tests.fake_driver import fake_libcuda, fake_nvml, hangs, segfaults

from transload._version import __version__
from transload.diagnose import probes as module
from transload.diagnose.children import Child
from transload.diagnose.host import Host
from transload.diagnose.loader import Loader
from transload.diagnose.probes import libraries, probe, system
from transload.diagnose.report import judge_machine
from transload.diagnose.saved import machine_from
from transload.machine import Answer, DriverLibraries, Hardware, Kernel

loadable = pytest.mark.skipif(not LOADABLE, reason="the forge cannot build libraries for this architecture")


def host(
    folder: Path, cuda: bytes = b"", nvml: bytes = b"", torch: str = "raise ImportError('none')", **environ: str
) -> Host:
    """This host, with another driver and another torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "_C.so").touch()  # as in an installed one
    for name, data in (("libcuda.so.1", cuda), ("libnvidia-ml.so.1", nvml), ("torch/__init__.py", torch.encode())):
        if data:
            (folder / name).write_bytes(data)
    return Host(environ={**os.environ, "LD_LIBRARY_PATH": str(folder), **environ}, cwd=str(folder))


def test_this_machine() -> None:
    machine = probe(torch=False)
    assert machine.problems == {}
    assert machine.transload == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", machine.taken)
    assert machine.driver.cuda.answer.state != "unasked"
    assert machine.driver.nvml.answer.state != "unasked"
    assert machine.torch_run.answer == Answer("unasked")
    assert machine_from(machine.to_dict()) == machine


@loadable
def test_a_tree_in_place_of_a_host(tmp_path: Path) -> None:
    host = host_of(World(""), "host", tmp_path, "aarch64")
    machine = probe(torch=False, host=host)
    assert machine.problems == {}
    assert machine.driver.cuda.works
    assert machine.driver.cuda.library == f"{host.twins}/usr/lib/aarch64-linux-gnu/libcuda.so.580.159.04"
    assert machine.driver.nvml.library == f"{host.twins}/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.580.159.04"
    assert machine_from(machine.to_dict()) == machine


def test_the_driver_of_this_machine_is_not_asked_about_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    machine = probe(torch=False, host=TreeHost(root=str(tmp_path)))
    assert machine.driver.cuda.answer.state == machine.driver.nvml.answer.state == "no-library"
    assert machine.driver.experiments == ()
    assert (machine.platform.machine, machine.platform.kernel, machine.platform.libc) == ("x86_64", "", "")
    assert not machine.platform.root
    assert machine.variables.values == {}
    assert machine.python.problem == "no Python was named"
    assert machine.problems == {}


@pytest.mark.skipif(sys.platform != "linux", reason="tests the Linux loader")
def test_the_loader_is_that_of_the_interpreter_behind_a_folder_or_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []

    def noted(loader: Loader) -> DriverLibraries:
        programs.append(loader.program.path if loader.program else "")
        return DriverLibraries()

    monkeypatch.setattr(libraries, "driver_libraries", noted)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    probe(str(script), torch=False)
    probe(str(tmp_path), torch=False)
    assert programs == [os.path.realpath(sys.executable)] * 2


@loadable
def test_all_at_work(tmp_path: Path) -> None:
    told: list[str] = []
    machine = probe(sys.executable, host=host(tmp_path, fake_libcuda(), fake_nvml()), progress=told.append)
    assert machine.driver.cuda.works
    assert machine.driver.nvml.count == 1
    assert machine.driver.experiments == ()
    assert [(step.name, step.error) for step in machine.torch_run.steps] == [("import", "ImportError: none")]
    assert told == ["asking the driver", "reading files", "waiting for the driver", "running torch"]


@loadable
def test_experiments_are_made_where_the_driver_refuses(tmp_path: Path) -> None:
    machine = probe(torch=False, host=host(tmp_path, fake_libcuda(init=100), CUDA_VISIBLE_DEVICES="7"))
    changes = [each.change for each in machine.driver.experiments]
    assert changes == [("CUDA_VISIBLE_DEVICES",), ("LD_LIBRARY_PATH",), ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")]


def test_a_probe_that_fails_is_named_and_the_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Host) -> Hardware:
        raise ZeroDivisionError("a host nobody thought of")

    monkeypatch.setattr(system, "hardware", broken)
    machine = probe(torch=False)
    assert machine.problems == {"hardware": "ZeroDivisionError: a host nobody thought of"}
    assert machine.hardware == Hardware()
    assert machine.kernel.loaded is not Kernel().loaded


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    machine = probe(str(tmp_path / "python"))
    assert machine.python.problem
    assert machine.torch_run.answer == Answer("unasked", machine.python.problem)
    assert machine.problems == {}


# -- who waits for whom ------------------------------------------------------------------------------------------------

PATIENT = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
raise ImportError("at last")
"""


@loadable
def test_a_driver_that_hangs_takes_torch_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRIVER", 1.0)
    machine = probe(host=host(tmp_path, fake_libcuda(overrides={"cuInit": hangs()}), fake_nvml(), PATIENT))
    assert machine.driver.cuda.answer.state == "hung"
    assert machine.driver.experiments == ()
    assert machine.torch_run.answer.state == "hung"
    assert machine.problems == {}


@loadable
def test_an_nvml_that_hangs_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def go(words: str) -> None:
        if words == "running torch":  # by now the driver has been given up, and torch would have been, too
            (tmp_path / "go").touch()

    monkeypatch.setattr(module, "_DRIVER", 2.0)
    nvml = fake_nvml(overrides={"nvmlInit_v2": hangs()})
    machine = probe(host=host(tmp_path, fake_libcuda(), nvml, PATIENT), progress=go)
    assert machine.driver.nvml.answer.state == "hung"
    assert machine.driver.cuda.works
    assert [step.error for step in machine.torch_run.steps] == ["ImportError: at last"]


@loadable
def test_a_driver_that_crashes_is_a_fact_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # which would be tried without as well
    machine = probe(torch=False, host=host(tmp_path, fake_libcuda(overrides={"cuInit": segfaults()}), fake_nvml()))
    assert machine.driver.cuda.answer.detail == "SIGSEGV in cuInit"
    assert [each.change for each in machine.driver.experiments] == [("LD_LIBRARY_PATH",)]


def test_where_torch_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.children._POLL", 0.05)
    monkeypatch.setattr("transload.diagnose.children._SLOW", 0.0)
    told: list[str] = []
    patient = host(tmp_path, torch=PATIENT)
    for timeout in (1.0, 10.0):  # a busy machine may not even start it in a second
        machine = probe(host=patient, timeout=timeout, progress=told.append)
        assert machine.torch_run.answer.state == "hung"
        if f"running torch: import, at {tmp_path}/torch/__init__.py:4" in told:
            return
    pytest.fail(f"nobody was told: {told}")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_idle_torch_is_given_up_though_its_time_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.children._POLL", 0.05)
    machine = probe(host=host(tmp_path, torch="import time; time.sleep(600)"), timeout=300.0, idle=0.5)
    assert "idle for the last" in machine.torch_run.answer.detail


def test_what_is_imported_in_place_of_torch_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('was-run', 'w')", encoding="utf-8")
    machine = probe(host=Host(cwd=str(tmp_path)), timeout=10.0)
    assert (machine.torch.shadow, (tmp_path / "was-run").exists()) == (f"{tmp_path}/torch.py", False)
    assert machine.torch_run.answer == Answer("unasked", f"import torch finds {tmp_path}/torch.py")
    codes = [finding.code for finding in judge_machine(machine).findings]
    assert (codes[0], "X13" in codes) == ("P03", False)


def test_all_children_are_ended_when_the_user_has_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Recorded(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    def interrupt(words: str) -> None:
        if words == "waiting for the driver":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "Child", Recorded)
    with pytest.raises(KeyboardInterrupt):
        probe(host=host(tmp_path, torch=PATIENT), progress=interrupt)
    assert len(started) == 3
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_our_own_children_are_not_reported_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Recorded(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    def stuck(_: Host) -> Kernel:
        return Kernel(stuck=("python (1)", *(f"python ({child.pid})" for child in started), "nvidia-smi (2)"))

    monkeypatch.setattr(module, "Child", Recorded)
    monkeypatch.setattr(system, "kernel", stuck)
    assert probe(torch=False).kernel.stuck == ("python (1)", "nvidia-smi (2)")
    assert len(started) >= 2  # a driver that fails is asked again


def test_the_usual_times_keep_the_promise() -> None:
    """Ten seconds with a driver that hangs: the driver's time, then a moment for each child that does not die."""
    assert module._DRIVER + 5 * 0.2 < 10
    assert module._EXPERIMENTS + 5 * 0.2 <= 10
    assert module._DRIVER < module._EXPERIMENTS < module._TORCH
    assert module.IDLE < module._TORCH
