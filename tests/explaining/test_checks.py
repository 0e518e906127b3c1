"""Checks of the file that a text names, and of this machine, only where they matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests import forge
from tests.diagnose.machines import cuinit_fails, healthy, install, no_torch_run, with_facts, without_gpu

import transload
from transload.diagnose.report import judge_machine
from transload.explaining import Answer, MachineCheck, files_in, remaining_steps
from transload.machine import Machine, Resolved

NO_CUDA = (
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you"
)
HTML = b"<!DOCTYPE html><html><body>login</body></html>"
UNKNOWN = "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env"
UNKNOWN += " variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."


def explained(text: str | BaseException, machine: Machine) -> transload.Explanation:
    with mock.patch("transload.diagnose.doctor", return_value=judge_machine(no_torch_run(machine))) as doctor:
        explanation = transload.explain(text)
    assert doctor.call_count <= 1
    return explanation


def test_machine_without_gpu_is_not_a_fault() -> None:
    (answer,) = explained(NO_CUDA, without_gpu()).answers
    assert answer.machine is not None
    assert (answer.machine.status, answer.machine.fits, answer.machine.code) == ("no-gpu", False, "")
    assert "map_location" in " ".join(answer.fix)
    assert "there is no GPU in this machine" in str(explained(NO_CUDA, without_gpu()))


def test_matching_fault_of_this_machine_is_shown_with_its_fix() -> None:
    broken = with_facts(healthy(), variables__values={"CUDA_VISIBLE_DEVICES": ""})
    text = "RuntimeError: No CUDA GPUs are available"
    (answer,) = explained(text, with_facts(broken, driver=cuinit_fails(broken, 100).driver)).answers
    assert answer.machine is not None
    assert (answer.machine.code, answer.machine.fits) == ("E01", True)
    shown = str(explained(text, with_facts(broken, driver=cuinit_fails(broken, 100).driver)))
    assert "this machine has this fault" in shown
    assert "$ unset CUDA_VISIBLE_DEVICES" in shown


def test_healthy_machine_is_reported_as_not_broken() -> None:
    (answer,) = explained(UNKNOWN, healthy()).answers
    assert answer.machine is not None
    assert not answer.machine.fits
    assert "nothing is broken on this machine now" in answer.machine.title
    assert answer.fix
    assert "CUDA_VISIBLE_DEVICES: that is hardly ever the cause" in answer.wrong


def test_other_fault_of_this_machine_is_not_the_cause() -> None:
    text = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    (answer,) = explained(text, cuinit_fails(healthy(), 802)).answers
    assert answer.machine is not None
    assert not answer.machine.fits
    assert "this machine has another fault" in str(explained(text, cuinit_fails(healthy(), 802)))


def without_torch(machine: Machine) -> Machine:
    return with_facts(machine, torch__installs=(), python__executable="/pipx/bin/python", extensions=())


@pytest.mark.parametrize("machine", [without_gpu(), healthy()], ids=["without GPU", "with GPU"])
def test_python_without_torch_is_not_the_cause_of_a_torch_error(machine: Machine) -> None:
    torchless = without_torch(machine)
    assert judge_machine(no_torch_run(torchless)).cause is not None
    explanation = explained(NO_CUDA, torchless)
    (answer,) = explanation.answers
    assert answer.machine is not None
    assert (answer.machine.fits, answer.machine.code) == (False, "")
    assert "comes from another Python" in answer.machine.title
    assert ("no GPU" in answer.machine.title) == (not machine.hardware.present)
    shown = str(explanation)
    assert 'map_location="cpu"' in shown
    assert "transload retag" in shown
    assert "pip install torch" not in shown


def test_python_without_torch_is_the_cause_of_module_not_found() -> None:
    (answer,) = explained("ModuleNotFoundError: No module named 'torch'", without_torch(healthy())).answers
    assert answer.machine is not None
    assert (answer.machine.code, answer.machine.fits) == ("P01", True)


def test_system_python_that_forbids_pip_gets_no_pip_command() -> None:
    facts = {"python__externally_managed": True, "python__executable": "/usr/bin/python3"}
    machine = with_facts(without_torch(healthy()), **facts, python__others=("/opt/python: torch 2.8.0",))
    shown = str(explained("ModuleNotFoundError: No module named 'torch'", machine))
    assert "$ .venv/bin/python -m pip install" in shown
    assert "python3 -m pip" not in shown
    assert "$ python -m pip" not in shown
    assert "in this one" not in shown


def test_driver_fault_is_found_without_torch() -> None:
    text = "RuntimeError: CUDA error: system not yet initialized"
    (answer,) = explained(text, without_torch(cuinit_fails(healthy(), 802))).answers
    assert answer.machine is not None
    assert answer.machine.fits
    assert answer.machine.code in answer.causes


def cpu_only(location: str) -> Machine:
    build = replace(install("2.13.0+cpu", ""), location=location)
    return with_facts(healthy(), torch__installs=(build,))


def test_torch_outside_the_traceback_is_not_the_cause(tmp_path: Path) -> None:
    """transload's environment has a torch for the CPU; the traceback names the torch of another environment."""
    folders = [tmp_path / name / "lib" / "python3.11" / "site-packages" / "torch" for name in ("ours", "a b")]
    for folder in folders:
        folder.mkdir(parents=True)
    ours, theirs = (
        f'Traceback (most recent call last):\n  File "{folder}/serialization.py", line 1, in load\n{NO_CUDA}\n'
        for folder in folders
    )
    (answer_ours,) = explained(ours, cpu_only(str(folders[0]))).answers
    assert answer_ours.machine is not None
    assert (answer_ours.machine.code, answer_ours.machine.fits) == ("T01", True)
    assert 'map_location="cpu"' in str(explained(ours, cpu_only(str(folders[0]))))
    (answer_theirs,) = explained(theirs, cpu_only(str(folders[0]))).answers
    assert answer_theirs.machine is not None
    assert (answer_theirs.machine.code, answer_theirs.machine.fits) == ("", False)
    assert f"transload doctor --python '{tmp_path / 'a b'}'" in answer_theirs.machine.title


def test_steps_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(forge.checkpoint()[:-100])
    text = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory: 'model.pt'"
    explanation = explained(text, without_gpu())
    (answer,) = explanation.answers
    assert answer.file is not None
    assert any("again" in line for line in answer.file.fix)
    assert any("again" in line for line in answer.fix)
    shown = str(explanation)
    assert shown.lower().count("download or copy") == 1
    assert shown.count("transload rescue") == 1


def test_similar_step_with_another_command_is_kept() -> None:
    machine = MachineCheck("broken", fits=True, code="E01", fix=("Look at the variable, and unset it:", "$ a"))
    fix = ("Look at the variable and unset it:", "$ b", "Look at the variable, then unset it:", "$ a")
    assert remaining_steps(Answer("no-gpus", "cause", "", fix, machine=machine)) == fix[:2]
    assert remaining_steps(Answer("no-gpus", "cause", "", fix, machine=replace(machine, fits=False))) == fix


def test_file_named_in_the_traceback_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(HTML)
    text = (
        "Traceback (most recent call last):\n"
        '  File "run.py", line 3, in <module>\n    torch.load("model.pt", weights_only=False)\n'
        "_pickle.UnpicklingError: invalid load key, '<'.\n"
    )
    (answer,) = explained(text, without_gpu()).answers
    assert answer.file is not None
    assert (answer.file.path, answer.file.ok) == ("model.pt", False)
    assert "a web page" in answer.file.verdict
    assert answer.file.fix


def test_path_is_read_from_the_frames_of_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    path.write_bytes(
        forge.checkpoint(forge.pickled(forge.ordered({"w": forge.tensor(storage=forge.storage_id(device="cuda:0"))})))
    )
    with pytest.raises(RuntimeError, match="deserialize") as caught:
        torch.load(path)
    (answer,) = explained(caught.value, without_gpu()).answers
    assert answer.file is not None
    assert (answer.file.path, answer.file.ok, answer.file.same) == (str(path), True, True)
    assert "torch.load gives the same error for it" in str(explained(caught.value, without_gpu()))


def test_intact_file_does_not_give_the_same_error(tmp_path: Path) -> None:
    path = tmp_path / "fine.pt"
    path.write_bytes(forge.checkpoint())
    (answer,) = explained(f"{NO_CUDA} from '{path}'", without_gpu()).answers
    assert answer.file is not None
    assert answer.file.ok
    assert not answer.file.same


def test_file_with_invalid_sparse_indices_is_not_ok(tmp_path: Path) -> None:
    path = tmp_path / "outside.pt"
    torch.save(torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (3,), check_invariants=False), path)
    (answer,) = explained(f"{NO_CUDA} from '{path}'", without_gpu()).answers
    assert answer.file is not None
    assert not answer.file.ok
    assert "sparse" in answer.file.verdict


def test_checks_false_examines_neither_file_nor_machine(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(HTML)
    with mock.patch("transload.diagnose.doctor") as doctor, mock.patch("transload.checking.check_here") as check:
        (answer,) = transload.explain(f"{NO_CUDA} '{path}'", checks=False).answers
    assert not doctor.called
    assert not check.called
    assert answer.machine is None
    assert answer.file is None


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: You can only torch.load from a file that is seekable. Please pre-load",
        "ZeroDivisionError: division by zero",
        "ValueError: loaded state dict has a different number of parameter groups",
    ],
)
def test_doctor_is_not_called_where_the_machine_does_not_matter(text: str) -> None:
    with mock.patch("transload.diagnose.doctor") as doctor:
        transload.explain(text)
    assert not doctor.called


def test_existing_paths_are_found_quoted_or_bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a b.pt", "last.ckpt", "notes.txt", "run.py"):
        Path(name).touch()
    Path("step-1").mkdir()
    Path("step-1/.metadata").touch()
    Path("other").mkdir()
    text = (
        "'a b.pt' (last.ckpt) \"notes.txt\" run.py gone.pt 'step-1' 'other' '\x00.pt' '~nobody-here/x.pt' " + "x" * 5000
    )
    assert set(files_in([text])) == {"a b.pt", "last.ckpt", "step-1"}


def test_network_path_is_not_accessed() -> None:
    with mock.patch("pathlib.Path.is_file") as is_file:
        assert list(files_in(["'//host/share/model.pt' '\\\\\\\\host\\\\share\\\\model.pt'"])) == []
    assert not is_file.called


# -- errors of Windows


def windows_error(number: int, words: str = "找不到指定的模块。") -> str:
    path = "C:\\env\\Lib\\site-packages\\torch\\lib\\c10.dll"
    return f'OSError: [WinError {number}] {words} Error loading "{path}" or one of its dependencies.'


def windows_machine(**facts: object) -> Machine:
    machine = with_facts(without_gpu(), platform__system="Windows", torch_libraries__toolset="14.42")
    return with_facts(machine, platform__commit_limit=24 * 10**9, platform__commit_free=8 * 10**9, **facts)


def test_missing_dll_of_this_windows_is_named() -> None:
    missing = windows_machine(torch_libraries__needed=(Resolved("MSVCP140.dll", needed_by="c10.dll"),))
    (answer,) = explained(windows_error(126), missing).answers
    assert answer.machine is not None
    assert (answer.machine.code, answer.machine.fits) == ("W10", True)
    assert "MSVCP140.dll, needed by c10.dll, is not found anywhere" in answer.machine.evidence
    (other,) = explained(windows_error(1114), missing).answers  # which means something else
    assert other.machine is not None
    assert not other.machine.fits


def test_each_number_has_its_own_cause() -> None:
    for number, code in ((126, "W10"), (127, "W14"), (182, "W14"), (193, "W15"), (1114, "W11"), (1455, "W16")):
        (answer,) = explained(windows_error(number), windows_machine()).answers
        assert answer.causes[0] == code, number
    text = windows_error(126).replace("c10.dll", "fbgemm.dll")
    assert explained(text, windows_machine()).answers[0].causes[0] == "W12"


def test_commit_limit_of_this_windows() -> None:
    (answer,) = explained(windows_error(1455), windows_machine(torch_libraries__committed=3 * 10**9)).answers
    assert answer.machine is not None
    assert "8.00 GB of the commit limit of 24.0 GB are free" in answer.machine.title
    assert "takes 3.00 GB" in answer.machine.title


def test_text_of_windows_is_not_about_another_system() -> None:
    (answer,) = explained(windows_error(126), without_gpu()).answers
    assert answer.machine is not None
    assert answer.machine.title == "the text comes from Windows: run transload doctor there"
