"""``probe()``: all probes together, probes that fail, and how long child processes are waited for."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.scenarios import Scenario, make_host
from tests.diagnose.trees import TreeHost
from tests.elf_forge import LOADABLE
from tests.fake_driver import fake_libcuda, fake_nvml, hangs, segfaults

from transload._version import __version__
from transload.diagnose import probes as probes_module
from transload.diagnose.children import Child
from transload.diagnose.elf import Loader
from transload.diagnose.host import Host
from transload.diagnose.probes import libraries, probe, system
from transload.diagnose.report import judge_machine
from transload.diagnose.saved import machine_from
from transload.machine import ChildAnswer, DriverLibraries, Hardware, Kernel

needs_forge = pytest.mark.skipif(not LOADABLE, reason="the forge cannot build libraries for this system")


def host(
    folder: Path, cuda: bytes = b"", nvml: bytes = b"", torch: str = "raise ImportError('none')", **environ: str
) -> Host:
    """This host with another driver and another torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "_C.so").touch()  # as in an installed torch
    for name, data in (("libcuda.so.1", cuda), ("libnvidia-ml.so.1", nvml), ("torch/__init__.py", torch.encode())):
        if data:
            (folder / name).write_bytes(data)
    return Host(environ={**os.environ, "LD_LIBRARY_PATH": str(folder), **environ}, cwd=str(folder))


def test_probe_of_this_machine_has_no_problems() -> None:
    machine = probe(torch=False)
    assert machine.problems == {}
    assert machine.transload == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", machine.taken)
    assert machine.driver.cuda.answer.state != "unasked"
    assert machine.driver.nvml.answer.state != "unasked"
    assert machine.torch_run.answer == ChildAnswer("unasked")
    assert machine_from(machine.to_dict()) == machine


@needs_forge
def test_tree_of_another_architecture_is_probed_like_a_host(tmp_path: Path) -> None:
    host = make_host(Scenario(""), "host", tmp_path, "aarch64")
    machine = probe(torch=False, host=host)
    assert machine.problems == {}
    assert machine.driver.cuda.works
    assert machine.driver.cuda.library == f"{host.native}/usr/lib/aarch64-linux-gnu/libcuda.so.580.159.04"
    assert machine.driver.nvml.library == f"{host.native}/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.580.159.04"
    assert machine_from(machine.to_dict()) == machine


def test_probing_a_tree_does_not_query_the_driver_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    machine = probe(torch=False, host=TreeHost(root=str(tmp_path)))
    # Windows says the same of a library that is absent and of one that lacks another.
    absent = "not-loadable" if sys.platform == "win32" else "no-library"
    assert machine.driver.cuda.answer.state == machine.driver.nvml.answer.state == absent
    assert machine.driver.experiments == ()
    assert (machine.platform.machine, machine.platform.kernel, machine.platform.libc) == ("x86_64", "", "")
    assert not machine.platform.root
    assert machine.variables.values == {}
    assert machine.python.problem == "no Python was named"
    assert machine.problems == {}


@pytest.mark.skipif(sys.platform != "linux", reason="tests the Linux loader")
def test_loader_starts_from_the_interpreter_behind_a_folder_or_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []

    def record_program(loader: Loader) -> DriverLibraries:
        programs.append(loader.program.path if loader.program else "")
        return DriverLibraries()

    monkeypatch.setattr(libraries, "driver_libraries", record_program)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    probe(str(script), torch=False)
    probe(str(tmp_path), torch=False)
    assert programs == [os.path.realpath(sys.executable)] * 2


@needs_forge
def test_working_driver_and_progress_messages(tmp_path: Path) -> None:
    messages: list[str] = []
    machine = probe(sys.executable, host=host(tmp_path, fake_libcuda(), fake_nvml()), progress=messages.append)
    assert machine.driver.cuda.works
    assert machine.driver.nvml.count == 1
    assert machine.driver.experiments == ()
    assert [(step.name, step.error) for step in machine.torch_run.steps] == [("import", "ImportError: none")]
    assert messages == ["asking the driver", "reading files", "waiting for the driver", "running torch"]


@needs_forge
def test_experiments_run_when_cuinit_fails(tmp_path: Path) -> None:
    machine = probe(torch=False, host=host(tmp_path, fake_libcuda(init=100), CUDA_VISIBLE_DEVICES="7"))
    changes = [experiment.change for experiment in machine.driver.experiments]
    assert changes == [("CUDA_VISIBLE_DEVICES",), ("LD_LIBRARY_PATH",), ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")]


def test_failing_probe_is_reported_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Host) -> Hardware:
        raise ZeroDivisionError("a host nobody thought of")

    monkeypatch.setattr(system, "hardware", broken)
    machine = probe(torch=False)
    assert machine.problems == {"hardware": "ZeroDivisionError: a host nobody thought of"}
    assert machine.hardware == Hardware()
    assert machine.kernel.loaded is not Kernel().loaded


def test_missing_python_is_reported_and_torch_is_not_run(tmp_path: Path) -> None:
    machine = probe(str(tmp_path / "python"))
    assert machine.python.problem
    assert machine.torch_run.answer == ChildAnswer("unasked", machine.python.problem)
    assert machine.problems == {}


# -- timeouts and interrupts -------------------------------------------------------------------------------------------

WAITS_FOR_GO = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
raise ImportError("at last")
"""


@needs_forge
def test_hanging_driver_also_ends_the_torch_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_module, "_DRIVER", 1.0)
    machine = probe(host=host(tmp_path, fake_libcuda(overrides={"cuInit": hangs()}), fake_nvml(), WAITS_FOR_GO))
    assert machine.driver.cuda.answer.state == "hung"
    assert machine.driver.experiments == ()
    assert machine.torch_run.answer.state == "hung"
    assert machine.problems == {}


@needs_forge
def test_hanging_nvml_does_not_end_the_torch_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def release_torch(message: str) -> None:
        if message == "running torch":  # the driver has timed out by now, and has not taken torch with it
            (tmp_path / "go").touch()

    monkeypatch.setattr(probes_module, "_DRIVER", 2.0)
    nvml = fake_nvml(overrides={"nvmlInit_v2": hangs()})
    machine = probe(host=host(tmp_path, fake_libcuda(), nvml, WAITS_FOR_GO), progress=release_torch)
    assert machine.driver.nvml.answer.state == "hung"
    assert machine.driver.cuda.works
    assert [step.error for step in machine.torch_run.steps] == ["ImportError: at last"]


@needs_forge
def test_driver_crash_is_recorded_and_experiments_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # else it would be the subject of an experiment, too
    machine = probe(torch=False, host=host(tmp_path, fake_libcuda(overrides={"cuInit": segfaults()}), fake_nvml()))
    assert machine.driver.cuda.answer.detail == "SIGSEGV in cuInit"
    assert [experiment.change for experiment in machine.driver.experiments] == [("LD_LIBRARY_PATH",)]


def test_progress_names_the_line_where_torch_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.children._POLL", 0.05)
    monkeypatch.setattr("transload.diagnose.children._SLOW", 0.0)
    messages: list[str] = []
    waiting_host = host(tmp_path, torch=WAITS_FOR_GO)
    for timeout in (1.0, 10.0):  # a busy machine may need more than a second to start it
        machine = probe(host=waiting_host, timeout=timeout, progress=messages.append)
        assert machine.torch_run.answer.state == "hung"
        if f"running torch: import, at {tmp_path / 'torch' / '__init__.py'}:4" in messages:
            return
    pytest.fail(f"no message names the line: {messages}")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_idle_torch_is_ended_before_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.children._POLL", 0.05)
    machine = probe(host=host(tmp_path, torch="import time; time.sleep(600)"), timeout=300.0, idle=0.5)
    assert "idle for the last" in machine.torch_run.answer.detail


def test_module_that_shadows_torch_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('was-run', 'w')", encoding="utf-8")
    machine = probe(host=Host(cwd=str(tmp_path)), timeout=10.0)
    assert (machine.torch.shadow, (tmp_path / "was-run").exists()) == (f"{tmp_path}/torch.py", False)
    assert machine.torch_run.answer == ChildAnswer("unasked", f"import torch finds {tmp_path}/torch.py")
    codes = [finding.code for finding in judge_machine(machine).findings]
    assert (codes[0], "X13" in codes) == ("P03", False)


def test_keyboard_interrupt_ends_all_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Recorded(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    def interrupt(message: str) -> None:
        if message == "waiting for the driver":
            raise KeyboardInterrupt

    monkeypatch.setattr(probes_module, "Child", Recorded)
    with pytest.raises(KeyboardInterrupt):
        probe(host=host(tmp_path, torch=WAITS_FOR_GO), progress=interrupt)
    assert len(started) == 3
    for child in started:
        assert child.ended()
        if os.name == "posix":  # on Windows, signal 0 is Ctrl-C
            with pytest.raises(ProcessLookupError):
                os.kill(child.pid, 0)


def test_own_children_are_not_reported_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Recorded(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    def stuck(_: Host) -> Kernel:
        return Kernel(stuck=("python (1)", *(f"python ({child.pid})" for child in started), "nvidia-smi (2)"))

    monkeypatch.setattr(probes_module, "Child", Recorded)
    monkeypatch.setattr(system, "kernel", stuck)
    assert probe(torch=False).kernel.stuck == ("python (1)", "nvidia-smi (2)")
    assert len(started) >= 2  # a driver that fails is queried again


def test_default_timeouts_add_up_to_at_most_ten_seconds() -> None:
    """A run with a hanging driver takes the driver's timeout and 0.2 s for each child that does not die."""
    assert probes_module._DRIVER + 5 * 0.2 < 10
    assert probes_module._EXPERIMENTS + 5 * 0.2 <= 10
    assert probes_module._DRIVER < probes_module._EXPERIMENTS < probes_module._TORCH
    assert probes_module.IDLE < probes_module._TORCH
