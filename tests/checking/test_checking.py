"""What ``check`` reports: it agrees with ``load``, and names what is missing on machines of every kind."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.diagnose.machines import (
    cuda_gpu,
    cuinit_fails,
    healthy,
    install,
    no_torch_run,
    nvml_gpu,
    with_facts,
    without_gpu,
)
from tests.each import each, for_each, parametrize_groups
from tests.release import needs_torch
from tests.schema import validate

from transload.checking import Check, check, several
from transload.diagnose.probes import probe
from transload.loading import load
from transload.machine import Machine, Torch, Variables
from transload.render.lines import as_text

DATA = Path(__file__).parent.parent / "data"
SCHEMA = Path(__file__).parent.parent.parent / "docs" / "check.schema.json"
FILES = sorted(path for path in DATA.glob("*/**/*") if path.suffix in (".pt", ".pth", ".pt2", ".ckpt", ".md", ".json"))
TRAIN = DATA / "h200" / "train_cuda0.ckpt"
SERVER = no_torch_run(healthy())
LAPTOP = no_torch_run(without_gpu())


def saved(folder: Path, body: bytes) -> Path:
    path = folder / "model.pt"
    path.write_bytes(forge.checkpoint(forge.pickled(body)))
    return path


def codes(result: Check) -> list[str]:
    return [finding.code for finding in result.findings]


def valid(result: Check) -> Check:
    validate(result.to_dict(), SCHEMA)
    json.dumps(result.to_dict(), allow_nan=False)
    return result


# -- load agrees with check -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def this_machine() -> Machine:
    """The machine that runs the tests."""
    return probe(sys.executable, torch=False)


def loads(path: Path, device: str | None = "auto") -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(path, device)
        except Exception:  # noqa: BLE001  any error means that it did not load
            return False
    return True


@parametrize_groups("paths", FILES, 20)
def test_load_does_what_check_predicts_for_a_fixture(paths: list[Path], this_machine: Machine) -> None:
    def check_agreement(path: Path) -> None:
        result = valid(check(path, machine=this_machine))
        assert result.ok == loads(path), result.refusal

    for_each(paths, check_agreement)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:63", "gpu", None, ["cuda:63", "cpu"], ["gpu"]], ids=str)
def test_load_does_what_check_predicts_for_a_device(device: Any, this_machine: Machine) -> None:
    for path in (TRAIN, DATA / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cpu.pt"):
        assert check(path, device, machine=this_machine).ok == loads(path, device)


BODIES = {
    "plain": forge.ordered({"w": forge.tensor()}),
    "dangerous": forge.DANGEROUS,
    "a global": forge.call(forge.name("models.net", "Net")),
    "numpy": forge.call(forge.name("numpy.ma.core", "_mareconstruct")),
    "a global not called": forge.name("builtins", "getattr"),
    "an old opcode": forge.list_of(b"I1\n"),
    "a missing storage": forge.ordered({"w": forge.tensor("77")}),
    "an unknown device": forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "qpu:3"))}),
}


@pytest.mark.parametrize("title", BODIES)
def test_load_does_what_check_predicts_for_a_forged_file(title: str, tmp_path: Path, this_machine: Machine) -> None:
    path = saved(tmp_path, BODIES[title])
    assert valid(check(path, machine=this_machine)).ok == loads(path)


@needs_torch(2, 6)
def test_load_does_what_check_predicts_for_a_nested_tensor(tmp_path: Path, this_machine: Machine) -> None:
    for layout in (torch.jagged, torch.strided):
        torch.save(
            {"n": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)}, tmp_path / "n.pt"
        )
        result = valid(check(tmp_path / "n.pt", machine=this_machine))
        assert result.ok == loads(tmp_path / "n.pt"), result.refusal
        newest = check(tmp_path / "n.pt", machine=with_facts(SERVER, torch__installs=(install("2.15.0", "13.0"),)))
        assert newest.ok == (layout is torch.strided)


def test_dangerous_file_beside_the_shards_is_reported_but_not_loaded(tmp_path: Path, this_machine: Machine) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.bin"}}
    (tmp_path / "model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "evil.pt").write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS)))
    result = valid(check(tmp_path, machine=this_machine))
    assert loads(tmp_path)
    assert (result.ok, result.checkpoint.safety) == (True, "dangerous")
    found = {finding.code: finding for finding in result.findings}["dangerous-globals"]
    assert found.severity == "warning"
    assert "evil.pt › data.pkl" in found.title
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "model-00001-of-00001.bin").write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS)))
    assert not check(tmp_path, machine=this_machine).ok
    assert not loads(tmp_path)


def test_arrays_that_load_leaves_out_are_counted_and_not_planned(tmp_path: Path, this_machine: Machine) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "a.npz"
    numpy.savez(path, a=numpy.ones(3), s=numpy.array(["x", "y"]), o=numpy.array([None]))
    with pytest.warns(UserWarning, match="left out"):
        assert [*load(path)] == ["a"]
    result = valid(check(path, machine=this_machine))
    assert result.ok
    assert [(move.tensors, move.nbytes) for move in result.plan.moves] == [(1, 24)]
    assert "it loads without 2 of its 3 tensors, see below" in str(result)
    assert "loads in part" in as_text(several([result], 1))


def test_table_has_the_sizes_of_files_as_that_of_inspect(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_bytes(b"<html>" * 50)
    assert "300 B" in as_text(several([check(tmp_path / "page.pt", machine=LAPTOP)], 1))


def test_check_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from transload.checking import check; "
        f"print(check({str(TRAIN)!r}).ok, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert process.stdout.split() == ["True", "False", "False"]


# -- machines ---------------------------------------------------------------------------------------------------------


def test_storages_stay_on_their_devices_on_a_server() -> None:
    result = valid(check(TRAIN, machine=SERVER))
    assert result.ok
    assert (result.plan.device_of("cuda:0"), result.plan.device_of("cpu")) == ("cuda:0", "cpu")
    assert (result.torch.outcome, result.torch.exact) == ("loads", True)
    assert [(finding.code, finding.severity) for finding in result.findings] == [("device-objects", "note")]


def test_storages_go_to_the_cpu_on_a_laptop_where_torch_would_fail() -> None:
    result = valid(check(TRAIN, machine=LAPTOP))
    assert result.ok
    assert result.plan.device_of("cuda:0") == "cpu"
    assert result.torch.text.startswith(
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available()"
    )
    findings = [(finding.code, finding.severity) for finding in result.findings]
    assert findings == [("device-objects", "warning"), ("tags-elsewhere", "note")]
    assert "it loads" in str(result)
    assert result.torch.text in str(result)


@pytest.mark.parametrize("name", ["state_dict_cuda0.pt", "state_dict_cuda1.pt", "state_dict_cuda0_legacy.pth"])
def test_retag_command_is_printed_and_works(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"it's a {name}"
    path.write_bytes((DATA / "h200" / name).read_bytes())
    (finding,) = [candidate for candidate in check(path, machine=LAPTOP).findings if candidate.code == "tags-elsewhere"]
    command = shlex.split(finding.fix[-1].removeprefix("$ transload "))
    process = subprocess.run([sys.executable, "-m", "transload", *command], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert torch.load(path)
    assert "tags-elsewhere" not in codes(check(path, machine=LAPTOP))


def test_no_retag_advice_for_a_file_that_does_not_load() -> None:
    result = check(DATA / "h200" / "whole_custom_module_cuda0.pt", machine=LAPTOP)
    assert "needs-trust" in codes(result)
    assert "tags-elsewhere" not in codes(result)
    assert "transload retag" not in str(result)


def test_problems_of_the_file_come_before_those_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_text("<html><title>404</title></html>")
    result = check(tmp_path / "page.pt", machine=with_facts(SERVER, torch=Torch(installs=())))
    assert codes(result) == ["not-a-checkpoint", "no-torch"]


DOCTOR = "transload doctor shows how to get the GPU to work"


def test_doctor_is_recommended_only_where_a_missing_gpu_matters(tmp_path: Path) -> None:
    machine = no_torch_run(cuinit_fails(healthy(), 999))
    (tmp_path / "page.pt").write_text("<html><title>404</title></html>")
    cpu_file = DATA / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cpu.pt"
    assert DOCTOR in str(check(TRAIN, machine=machine))
    assert DOCTOR in str(check(cpu_file, "cuda:0", machine=machine))
    assert DOCTOR not in str(check(cpu_file, machine=machine))
    assert DOCTOR not in str(check(tmp_path / "page.pt", machine=machine))


def test_rescue_command_is_printed_once_on_a_separate_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2000), "b": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:12_000])
    lines = str(check(path, machine=LAPTOP)).split("\n")
    assert lines.count(f"    $ transload rescue {path} NEW.pt") == 1


def test_safe_globals_lines_come_before_the_convert_command() -> None:
    path = DATA / "h200" / "whole_custom_module_cuda0.pt"
    text = str(check(path, machine=LAPTOP))
    lines = text.split("\n")
    assert "Only if you trust the file, from torch 2.5 on:" in text
    assert lines.index("import torch") < lines.index(
        f"    $ transload convert {path} {path.with_suffix('.safetensors')}"
    )


def test_tags_of_existing_devices_are_not_reported() -> None:
    assert "tags-elsewhere" not in codes(check(DATA / "h200" / "state_dict_cuda0.pt", machine=SERVER))


def test_predicted_message_has_the_device_index_and_count() -> None:
    result = check(DATA / "h200" / "state_dict_cuda1.pt", None, machine=SERVER)
    assert not result.ok
    assert result.refusal == "there is no cuda:1 here, only cpu and cuda:0"
    assert "on CUDA device 1 but torch.cuda.device_count() is 1." in result.torch.text
    assert codes(result) == ["no-such-device"]


def test_broken_driver_is_reported_with_its_cause() -> None:
    result = check(TRAIN, machine=no_torch_run(cuinit_fails(healthy(), 999)))
    assert result.ok
    assert result.plan.warning.endswith("]")
    assert "transload doctor" in str(result)


def test_prediction_is_not_exact_if_torch_may_not_support_the_gpu() -> None:
    pascal = {"driver__cuda__gpus": (cuda_gpu(0, "NVIDIA GTX 1080", (6, 1)),)}
    nvml = {"driver__nvml__gpus": (nvml_gpu(0, "NVIDIA GTX 1080", (6, 1)),)}
    result = check(TRAIN, machine=with_facts(SERVER, **pascal, **nvml))
    assert result.diagnosis.status == "broken"
    assert not result.torch.exact


def test_missing_torch_is_refused_but_the_plan_is_shown() -> None:
    result = valid(check(TRAIN, machine=with_facts(SERVER, torch=Torch(installs=()))))
    assert not result.ok
    assert result.refusal == "torch is not installed here"
    assert any(line.startswith("$ ") for line in result.findings[0].fix)
    assert result.plan.device_of("cuda:0") == "cuda:0"
    assert result.torch.outcome == "unknown"


def test_shadowed_torch_cannot_be_imported() -> None:
    shadow = Torch(installs=(install(),), shadow="/home/user/torch.py", shadow_kind="file")
    assert check(TRAIN, machine=with_facts(SERVER, torch=shadow)).refusal == "torch cannot be imported here"


def test_full_gpu_has_too_little_memory() -> None:
    full = (replace(nvml_gpu(), free=100),)
    result = valid(check(TRAIN, machine=with_facts(SERVER, driver__nvml__gpus=full, platform__memory_free=10**9)))
    assert not result.ok
    assert codes(result)[0] == "too-little-memory"
    assert result.refusal.startswith("cuda:0 has 100 B free and would need ")
    assert "map_location='cpu'" in str(result)


def test_rank_of_another_machine_comes_from_its_variables() -> None:
    cards = {"driver__cuda__gpus": (cuda_gpu(0), cuda_gpu(1)), "driver__nvml__gpus": (nvml_gpu(0), nvml_gpu(1))}
    machine = with_facts(SERVER, **cards, driver__cuda__count=2, variables=Variables({"LOCAL_RANK": "1"}))
    assert check(TRAIN, machine=machine).plan.device_of("cuda:0") == "cuda:1"


def test_rank_of_this_machine_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert check(TRAIN).devices.rank == 3


# -- missing packages -------------------------------------------------------------------------------------------------


def with_packages(machine: Machine, folder: Path, *files: str) -> Machine:
    """The machine with these files in a folder of its path; importing one would exit."""
    folder.mkdir(exist_ok=True)
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported')", encoding="utf-8")
    return with_facts(machine, python__path=(*machine.python.path, str(folder)))


def test_missing_well_known_package_gets_a_pip_command(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("flash_attn.modules.mha", "MHA")))
    result = valid(check(path, machine=with_packages(LAPTOP, tmp_path / "site")))
    assert codes(result) == ["needs-trust", "missing-package", "cuda-only-package"]
    missing, cuda = result.findings[1:]
    assert missing.title == "it needs flash_attn, which is not installed"
    assert missing.evidence == ("for flash_attn.modules.mha.MHA",)
    assert missing.fix[-1].endswith("pip install flash-attn")
    assert cuda.title == "flash_attn runs on NVIDIA GPUs only, and there is none here"
    assert "flash-attn" in str(result)


@each("module, package", [("cv2.cv2", "opencv-python"), ("PIL.Image", "pillow")])
def test_pip_command_has_the_name_on_pypi(module: str, package: str, tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    path = saved(tmp_path, forge.call(forge.name(module, "Thing")))
    findings = check(path, machine=with_packages(LAPTOP, tmp_path / "site")).findings
    assert (
        next(finding for finding in findings if finding.code == "missing-package")
        .fix[-1]
        .endswith(f"pip install {package}")
    )


def test_installed_package_is_not_imported(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("flash_attn.modules.mha", "MHA")))
    files = ("flash_attn/__init__.py", "flash_attn/modules/__init__.py", "flash_attn/modules/mha.py")
    machine = with_packages(SERVER, tmp_path / "site", *files)
    assert codes(check(path, machine=machine)) == ["needs-trust"]
    assert "cuda-only-package" in codes(check(path, machine=with_packages(LAPTOP, tmp_path / "site", *files)))


def test_no_pip_command_for_a_name_that_is_not_well_known(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("utils.layers", "Net")))
    finding = check(path, machine=with_packages(SERVER, tmp_path / "site")).findings[1]
    assert finding.title == "it needs utils, which is not installed"
    assert not any("pip" in line or line.startswith("$") for line in finding.fix)


def test_module_that_the_installed_release_lacks_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("transformers.models.newest", "Config")))
    machine = with_packages(SERVER, tmp_path / "site", "transformers/__init__.py", "transformers/models/__init__.py")
    titles = [finding.title for finding in check(path, machine=machine).findings]
    assert "it needs transformers.models.newest, which this release of transformers does not have" in titles


@pytest.mark.parametrize(("dtype", "loads"), [("f4", True), (object, False)])
def test_arrays_need_numpy_but_not_its_internal_modules(dtype: Any, loads: bool, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2), "a": numpy.ones(2, dtype)}, path)
    numpy_1 = with_packages(SERVER, tmp_path / "site", "numpy/__init__.py", "numpy/core/__init__.py")
    result = check(path, machine=numpy_1)
    assert codes(result) == ([] if loads else ["needs-trust"])
    missing = check(path, machine=with_packages(SERVER, tmp_path / "none")).findings[-1]
    assert (missing.code, missing.title) == ("missing-package", "it needs numpy, which is not installed")


def test_names_of_the_saving_script_are_not_a_package(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("__main__", "Net")))
    result = check(path, machine=SERVER)
    assert codes(result) == ["needs-trust"]
    assert [(package.name, package.found) for package in result.packages] == [("__main__", False)]


def test_editable_package_is_found_by_its_finder(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("project.net", "Net")))
    site = tmp_path / "site"
    machine = with_packages(SERVER, site)
    assert "missing-package" in codes(check(path, machine=machine))
    (site / "__editable___project_1_0_finder.py").write_text("MAPPING = {'project': '/src/project'}", encoding="utf-8")
    assert "missing-package" not in codes(check(path, machine=machine))


def test_modules_in_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, forge.call(forge.name("zzz_models", "Net")))
    monkeypatch.chdir(tmp_path)
    assert "missing-package" in codes(check(path))
    (tmp_path / "zzz_models.py").write_text("raise SystemExit", encoding="utf-8")
    importlib.invalidate_caches()  # within a few milliseconds, the time of the folder may be the same
    assert "missing-package" not in codes(check(path))


def test_no_package_is_missing_if_the_import_path_is_unknown(tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name("zzz_models", "Net")))
    assert codes(check(path, machine=with_facts(SERVER, python__path=()))) == ["needs-trust"]


@pytest.mark.parametrize("module", ["../../etc", "a\0b", "a..b", ".", "x" * 5000, "é.ü", "con/../os"])
def test_odd_module_names_do_not_break_the_check(module: str, tmp_path: Path) -> None:
    path = saved(tmp_path, forge.call(forge.name(module, "Net")))
    valid(check(path, machine=with_packages(SERVER, tmp_path / "site")))


def test_bitsandbytes_weights_load_but_need_a_gpu(tmp_path: Path) -> None:
    name = "layers.0.weight.quant_state.bitsandbytes__nf4"
    path = saved(tmp_path, forge.ordered({name: forge.tensor()}))
    for machine, severity in ((SERVER, "note"), (LAPTOP, "warning")):
        (finding,) = check(path, machine=machine).findings
        assert (finding.code, finding.severity) == ("cuda-only-package", severity)
        assert check(path, machine=machine).ok


def test_plan_for_a_safetensors_file_says_that_it_names_no_device(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (move,) = check(path, machine=LAPTOP).plan.moves
    assert (move.device, move.reason, move.why) == ("cpu", "saved", "the file names no device")


# -- programs ---------------------------------------------------------------------------------------------------------


def test_program_is_reported_with_its_loader() -> None:
    result = check(DATA / "h200" / "torchscript_cuda0.pt", machine=SERVER)
    assert codes(result) == ["is-a-program"]
    assert "torch.jit.load" in result.findings[0].fix[0]
    assert "weights_only=True`` with TorchScript archives" in result.torch.text


def test_exported_program_is_reported_with_its_loader_and_what_that_needs() -> None:
    path = next(path for path in FILES if path.suffix == ".pt2" and "aoti" not in path.name)
    (fix,) = check(path, machine=SERVER).findings[0].fix
    assert fix.startswith("Load it with torch.export.load(path), which needs the devices it names")


class Baked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(2, device=torch.device("cuda:0"))


def test_device_in_torchscript_code_is_a_warning_where_it_is_absent(tmp_path: Path) -> None:
    path = str(tmp_path / "baked.pt")
    torch.jit.script(Baked()).save(path)
    for machine, severity in ((SERVER, "note"), (LAPTOP, "warning")):
        findings = {finding.code: finding for finding in check(path, machine=machine).findings}
        assert findings["script-device"].severity == severity


def test_compiled_code_is_compared_with_the_gpu() -> None:
    package = DATA / "h200" / "aoti_cuda0.pt2"
    assert codes(check(package, machine=SERVER)) == ["is-a-program"]
    assert codes(check(package, machine=LAPTOP)) == ["is-a-program", "other-architecture"]


# -- text, dtypes and sparse tensors ----------------------------------------------------------------------------------


def test_control_characters_of_a_file_are_not_printed(tmp_path: Path) -> None:
    body = forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "\x1b[2Jcuda\n"))})
    path = saved(tmp_path, forge.list_of(body, forge.call(forge.name("a\x1b[31m", "b\x07"))))
    text = str(check(path, machine=LAPTOP))
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize(("release", "loads"), [("2.1.2+cu121", False), ("2.13.0+cu130", True), ("nonsense", True)])
def test_dtypes_that_an_old_torch_lacks_are_named(release: str, loads: bool) -> None:
    path = next(path for path in FILES if "torch-2.6" in str(path) and path.name == "zoo_cuda0.pt")
    result = check(path, machine=with_facts(no_torch_run(healthy()), torch__installs=(install(release, "12.1"),)))
    assert ("torch-too-old" not in codes(result)) == loads
    if not loads:
        assert not result.ok
        assert "uint16" in result.refusal


@pytest.mark.parametrize("index", [2, 3])
def test_sparse_indices_out_of_range_are_refused_as_by_load(tmp_path: Path, this_machine: Machine, index: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[index]]), torch.ones(1), (3,), check_invariants=False)
    torch.save({"s": tensor}, tmp_path / "model.pt")
    result = valid(check(tmp_path / "model.pt", machine=this_machine))
    assert result.ok is (index < 3)
    assert ("sparse-outside" in codes(result)) is (index >= 3)
    if result.ok:
        assert load(tmp_path / "model.pt")["s"].to_dense()[2] == 1
    else:
        with pytest.raises(RuntimeError, match="invalid sparse tensor"):
            load(tmp_path / "model.pt")
