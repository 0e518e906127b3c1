"""What is looked at here: the file that a text names, and this machine, only where they matter."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from tests import forge
from tests.diagnose.machines import bare, changed, healthy, no_torch_run, refused

import transload
from transload.diagnose import judge_machine
from transload.explaining.naming import files_in
from transload.machine import Machine

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


def test_a_machine_without_a_gpu_is_no_fault() -> None:
    (answer,) = explained(NO_CUDA, bare()).answers
    assert answer.machine is not None
    assert (answer.machine.status, answer.machine.fits, answer.machine.code) == ("no-gpu", False, "")
    assert "map_location" in " ".join(answer.fix)
    assert "there is no GPU in this machine" in str(explained(NO_CUDA, bare()))


def test_a_machine_that_shows_the_cause_gives_its_fix() -> None:
    broken = changed(healthy(), variables__values={"CUDA_VISIBLE_DEVICES": ""})
    text = "RuntimeError: No CUDA GPUs are available"
    (answer,) = explained(text, changed(broken, driver=refused(broken, 100).driver)).answers
    assert answer.machine is not None
    assert (answer.machine.code, answer.machine.fits) == ("E01", True)
    shown = str(explained(text, changed(broken, driver=refused(broken, 100).driver)))
    assert "this machine shows it" in shown
    assert "$ unset CUDA_VISIBLE_DEVICES" in shown


def test_a_healthy_machine_is_said_not_to_show_it() -> None:
    (answer,) = explained(UNKNOWN, healthy()).answers
    assert answer.machine is not None
    assert not answer.machine.fits
    assert "nothing is broken on this machine now" in answer.machine.title
    assert answer.fix
    assert "CUDA_VISIBLE_DEVICES: that is hardly ever it" in answer.wrong


def test_a_machine_with_another_fault_is_not_blamed() -> None:
    cut = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    (answer,) = explained(cut, refused(healthy(), 802)).answers
    assert answer.machine is not None
    assert not answer.machine.fits
    assert "this machine has another fault" in str(explained(cut, refused(healthy(), 802)))


def test_a_file_that_the_traceback_names_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(HTML)
    text = (
        "Traceback (most recent call last):\n"
        '  File "run.py", line 3, in <module>\n    torch.load("model.pt", weights_only=False)\n'
        "_pickle.UnpicklingError: invalid load key, '<'.\n"
    )
    (answer,) = explained(text, bare()).answers
    assert answer.file is not None
    assert (answer.file.path, answer.file.ok) == ("model.pt", False)
    assert "a web page" in answer.file.verdict
    assert answer.file.fix


def test_the_path_of_an_exception_is_known_from_its_frames(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    path.write_bytes(
        forge.checkpoint(forge.pickled(forge.ordered({"w": forge.tensor(storage=forge.storage_id(device="cuda:0"))})))
    )
    with pytest.raises(RuntimeError, match="deserialize") as caught:
        torch.load(path)
    (answer,) = explained(caught.value, bare()).answers
    assert answer.file is not None
    assert (answer.file.path, answer.file.ok, answer.file.same) == (str(path), True, True)
    assert "torch.load of it says the same" in str(explained(caught.value, bare()))


def test_a_file_of_another_error_does_not_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "fine.pt"
    path.write_bytes(forge.checkpoint())
    (answer,) = explained(f"{NO_CUDA} from '{path}'", bare()).answers
    assert answer.file is not None
    assert answer.file.ok
    assert not answer.file.same


def test_without_checks_nothing_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(HTML)
    with mock.patch("transload.diagnose.doctor") as doctor, mock.patch("transload.read.inspect") as inspect:
        (answer,) = transload.explain(f"{NO_CUDA} '{path}'", checks=False).answers
    assert not doctor.called
    assert not inspect.called
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
def test_the_doctor_is_not_called_where_the_machine_does_not_matter(text: str) -> None:
    with mock.patch("transload.diagnose.doctor") as doctor:
        transload.explain(text)
    assert not doctor.called


def test_paths_are_found_quoted_and_bare_and_only_where_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_path_on_another_machine_is_not_touched() -> None:
    with mock.patch("pathlib.Path.is_file") as is_file:
        assert list(files_in(["'//host/share/model.pt' '\\\\\\\\host\\\\share\\\\model.pt'"])) == []
    assert not is_file.called
