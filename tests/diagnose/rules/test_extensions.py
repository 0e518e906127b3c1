"""Rules about packages beside torch: torchvision, flash-attn, bitsandbytes and others."""

from __future__ import annotations

from typing import Any

from tests.diagnose.machines import healthy, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import alarms, find
from tests.diagnose.rules.torch_machines import finding_of
from tests.each import each

from transload.machine import ExtensionPackage, Machine, Toolkit, Torch, TorchRun

SYMBOL = "_ZN3c104cuda9SetDeviceEi"


def with_extension(package: str, version: str = "1.0", machine: Machine | None = None, **facts: Any) -> Machine:
    return with_facts(machine or healthy(), extensions=(ExtensionPackage(package, version, **facts),))


def test_torchvision_for_another_torch() -> None:
    machine = with_extension("torchvision", "0.23.0", wants_torch="==2.8.0")
    assert alarms(machine) == ["P05"]
    finding = finding_of("P05", machine, "warning")
    assert finding.evidence == ("torchvision 0.23.0 needs torch 2.8.0, but 2.13.0 is installed",)
    assert any(
        "torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cu130" in line for line in finding.fix
    )


@each(
    ("wants", "local"),
    [
        ("==2.13.0", "cu130"),
        ("==2.13.0", ""),
        ("==2.13", ""),
        ("==2.13.0+cu130", "cu130"),
        (">=2.0", ""),
        ("", ""),
        ("==2.13.0", "cu126"),
        ("==2.13.0.dev20260101", ""),
    ],
)
def test_matching_torchvision_raises_no_alarm(wants: str, local: str) -> None:
    assert alarms(with_extension("torchvision", wants_torch=wants, local=local)) == []


def test_cpu_build_of_torchvision_beside_a_cuda_build_of_torch() -> None:
    machine = with_extension("torchvision", "0.28.0", wants_torch="==2.13.0", local="cpu")
    assert alarms(machine) == ["P05"]
    assert alarms(with_extension("torchvision", wants_torch="==2.13.0", local="cpu", machine=without_gpu())) == []


def test_package_compiled_against_another_torch() -> None:
    machine = with_extension("flash-attn", "2.8.3", library="flash_attn_2_cuda.so", undefined=(SYMBOL,))
    assert alarms(machine) == ["P06"]
    finding = finding_of("P06", machine, "warning")
    assert finding.evidence == (f"flash_attn_2_cuda.so needs {SYMBOL}, which torch does not define",)
    assert any("--no-deps" in line and "--no-build-isolation" in line for line in finding.fix)


def test_packages_are_not_blamed_where_torch_is_missing() -> None:
    machine = with_extension("torchvision", "0.28.0", missing=("libc10.so",))
    assert find("P06", machine) is not None
    assert find("P06", with_facts(machine, torch=Torch(installs=()), torch_run=TorchRun())) is None


def test_fix_installs_torchvision_from_the_index_of_torchs_build() -> None:
    machine = with_extension("torchvision", "0.28.0", without_gpu(), local="cu132", missing=("libcudart.so.13",))
    fix = finding_of("P06", machine, "warning").fix
    assert not any("--no-binary" in line for line in fix)
    assert any("torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu" in line for line in fix)
    two = (*machine.extensions, ExtensionPackage("flash-attn", undefined=(SYMBOL,)))
    both = finding_of("P06", with_facts(machine, extensions=two), "warning").fix
    assert next(line for line in both if "--no-binary" in line).endswith("flash-attn")


def test_fix_compiles_only_packages_with_a_source_distribution() -> None:
    fix = finding_of("P06", with_extension("bitsandbytes", missing=("libcudart.so.12",)), "warning").fix
    assert fix[-1].endswith("-m pip install --no-deps --upgrade bitsandbytes")
    fix = finding_of("P06", with_extension("detectron2", missing=("libcudart.so.12",)), "warning").fix
    assert fix == ("Install wheels of detectron2 built for torch 2.13.0 and CUDA 13.0.",)


def test_fix_that_compiles_names_the_toolkit_it_needs() -> None:
    machine = with_extension("flash-attn", undefined=(SYMBOL,))
    needs = "that needs the toolkit of CUDA 13.0, but"
    for toolkit, line in (
        (Toolkit(), f"Or compile flash-attn ({needs} no nvcc was found):"),
        (Toolkit("/usr/bin/nvcc", "12.4"), f"Or compile flash-attn ({needs} /usr/bin/nvcc is from 12.4):"),
        (Toolkit("/usr/bin/nvcc", "13.0.1"), "Or compile flash-attn:"),
    ):
        assert line in finding_of("P06", with_facts(machine, toolkit=toolkit), "warning").fix


def test_package_that_needs_a_missing_library() -> None:
    assert alarms(with_extension("xformers", missing=("libcudart.so.12",))) == ["P06"]
    assert alarms(with_extension("xformers", missing=("libcuda.so.1",))) == []  # belongs to the driver


@each(
    ("architectures", "lacks_code"),
    [
        (("sm_80", "sm_86"), True),
        (("sm_120",), True),
        (("sm_80", "sm_90"), False),
        (("sm_90a",), False),
        (("sm_80", "compute_80"), False),
        ((), False),
    ],
)
def test_package_without_code_for_the_card(architectures: tuple[str, ...], lacks_code: bool) -> None:
    machine = with_extension("flash-attn", "2.8.3", architectures=architectures)
    assert alarms(machine) == (["A03"] if lacks_code else [])
    if lacks_code:
        finding = finding_of("A03", machine, "warning")
        assert "$ export TORCH_CUDA_ARCH_LIST=9.0" in finding.fix
        assert "NVIDIA H200 has compute capability 9.0" in finding.evidence


@each(("cuda", "judged"), [(130, True), (129, False), (128, False), (132, True)])
def test_bitsandbytes_is_judged_by_the_library_it_loads(cuda: int, judged: bool) -> None:
    """It loads the library for torch's CUDA, here 13.0, or the nearest of the same major version."""
    library, missing = f"libbitsandbytes_cuda{cuda}.so", ("libcublas.so.12",)
    machine = with_extension("bitsandbytes", "0.50.2", library=library, architectures=("sm_75",), missing=missing)
    assert alarms(machine) == (["P06", "A03"] if judged else [])


def test_architectures_are_not_judged_without_a_card() -> None:
    assert find("A03", with_extension("flash-attn", architectures=("sm_80",), machine=without_gpu())) is None
