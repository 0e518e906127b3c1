"""Rules about the libraries that torch loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    SITE,
    cuinit_fails,
    healthy,
    install,
    no_torch_run,
    resolved_library,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import (
    crashed_or_hung,
    failing,
    finding_of,
    unimportable,
    with_variables,
    works_without,
)
from tests.each import each

from transload.machine import Machine, Resolved

CUDNN = resolved_library("libcudnn.so.9", "nvidia/cudnn/lib")
LINK = replace(resolved_library("libnvJitLink.so.13", "nvidia/cu13/lib"), package="nvidia-nvjitlink")
TOOLKIT = "/usr/local/cuda-12.0/lib64"
NO_CUDNN = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
NO_SYMBOL = (
    f"ImportError: {SITE}/torch/lib/../../nvidia/cu13/lib/libcusparse.so.12: undefined symbol: "
    "__nvJitLinkAddData_13_0, version libnvJitLink.so.13"
)
UNRESOLVED = "__nvJitLinkAddData_13_0 of libnvJitLink.so.13, needed by libcusparse.so.12"


def with_libraries(machine: Machine, *libraries: Resolved, **facts: Any) -> Machine:
    return with_facts(machine, torch_libraries__needed=libraries, **facts)


def loaded_from(lib: Resolved, folder: str, via: str, version: str = "") -> Resolved:
    return replace(lib, path=f"{folder}/{lib.name}", via=via, version=version)


# -- missing


def test_missing_library() -> None:
    missing = replace(CUDNN, path="", via="", package="nvidia-cudnn-cu13")
    machine = with_libraries(unimportable(healthy(), NO_CUDNN), missing)
    assert cause(machine) == "L04"
    finding = finding_of("L04", machine)
    assert "libcudnn.so.9, needed by libtorch_cuda.so, is not found anywhere" in finding.evidence
    assert finding.fix == (
        "$ /opt/venv/bin/python -m pip install --force-reinstall --no-deps nvidia-cudnn-cu13==9.20.0.48",
    )
    assert cause(with_libraries(no_torch_run(healthy()), missing)) == "L04"
    assert find("L04", with_libraries(healthy(), missing)) is None  # torch was imported, so the search is wrong


def test_import_error_alone_proves_a_missing_library() -> None:
    assert cause(unimportable(healthy(), NO_CUDNN)) == "L04"


def test_missing_driver_library_is_not_blamed_on_torch() -> None:
    error = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
    assert find("L04", unimportable(healthy(), error)) is None


def test_fix_for_a_missing_system_library() -> None:
    error = "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory"
    assert finding_of("L04", unimportable(healthy(), error)).fix == ("$ sudo apt install libgomp1",)
    odd = "ImportError: libodd.so.3: cannot open shared object file: No such file or directory"
    assert finding_of("L04", unimportable(healthy(), odd)).fix == (
        "Install the package that provides libodd.so.3 on this system.",
    )


def test_truncated_library() -> None:
    truncated = replace(CUDNN, problem="cut off", package="nvidia-cudnn-cu13")
    machine = with_libraries(unimportable(healthy(), f"ImportError: {CUDNN.path}: file too short"), truncated)
    assert cause(machine) == "L04"
    assert any("cannot be loaded: cut off" in line for line in finding_of("L04", machine).evidence)
    crashed = with_libraries(crashed_or_hung(healthy(), "crashed", "SIGBUS in import"), truncated)
    assert cause(crashed) == "L04"


# -- another library in its place


def test_older_library_from_ld_library_path() -> None:
    machine = with_variables(
        with_libraries(healthy(), loaded_from(LINK, TOOLKIT, "LD_LIBRARY_PATH")), LD_LIBRARY_PATH=TOOLKIT
    )
    broken = with_facts(unimportable(machine, NO_SYMBOL), torch_libraries__unresolved=(UNRESOLVED,))
    assert cause(broken) == "L01"
    finding = finding_of("L01", broken)
    assert (
        f"libnvJitLink.so.13 is taken from {TOOLKIT}/libnvJitLink.so.13, found through LD_LIBRARY_PATH"
        in finding.evidence
    )
    assert finding.fix[0] == "$ unset LD_LIBRARY_PATH"
    not_run = with_facts(no_torch_run(machine), torch_libraries__unresolved=(UNRESOLVED,))
    assert cause(not_run) == "L01"
    assert alarms(machine) == []  # torch works with it


def test_missing_symbols_without_a_shadowed_library() -> None:
    assert finding_of("L01", unimportable(healthy(), NO_SYMBOL)).title == (
        "the CUDA libraries of this environment do not match each other"
    )
    likely = with_variables(unimportable(healthy(), NO_SYMBOL), LD_LIBRARY_PATH="/opt/x")
    assert finding_of("L01", likely).title.startswith("probably: ")


@each("error", ["ImportError: x.so: undefined symbol: _ZN3c10", "ImportError: boom"])
def test_other_import_errors_are_not_blamed_on_cuda_libraries(error: str) -> None:
    assert find("L01", unimportable(healthy(), error)) is None


def test_torch_rejects_another_cudnn() -> None:
    error = (
        "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (8, 7, 0) but found runtime "
        "version (8, 2, 4)."
    )
    other = loaded_from(CUDNN, "/usr/lib/cudnn", "LD_LIBRARY_PATH", "9.1.0")
    machine = with_variables(with_libraries(healthy(), other), LD_LIBRARY_PATH="/opt/a:/usr/lib/cudnn")
    broken = failing(machine, "convolution", error)
    assert cause(broken) == "L02"
    assert finding_of("L02", broken).fix[0] == "$ export LD_LIBRARY_PATH=/opt/a"
    finding_of("L02", machine, "note")
    assert alarms(machine) == []


@each(("version", "severity"), [("9.1.0", "error"), ("9.20.0", "note"), ("9.30.0", "note"), ("", "note")])
def test_old_cudnn_is_reported_without_running_torch(version: str, severity: str) -> None:
    other = replace(loaded_from(CUDNN, "/usr/lib/cudnn", "LD_LIBRARY_PATH", version), package="nvidia-cudnn-cu13")
    finding = finding_of("L02", with_libraries(no_torch_run(healthy()), other), severity)
    assert finding.title.startswith("probably: ") == (severity == "error")


def test_sublibraries_of_two_cudnn_versions() -> None:
    parts = (
        "libcudnn_engines_tensor_ir.so.9: /usr/lib/x86_64-linux-gnu/libcudnn_engines_tensor_ir.so.9, by ld.so.cache",
    )
    error = "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"
    broken = with_facts(failing(healthy(), "convolution", error), torch_libraries__split_cudnn=parts)
    assert cause(broken) == "L03"
    assert any("'nvidia-cudnn-cu13>=9.21'" in line for line in finding_of("L03", broken).fix)
    not_run = with_facts(no_torch_run(healthy()), torch_libraries__split_cudnn=parts)
    assert finding_of("L03", not_run).title.startswith("probably: ")
    assert find("L03", with_facts(healthy(), torch_libraries__split_cudnn=parts)) is None


def test_cudnn_sublibraries_from_ld_library_path() -> None:
    parts = ("libcudnn_ops.so.9: /opt/cudnn/libcudnn_ops.so.9, by LD_LIBRARY_PATH",)
    machine = with_facts(no_torch_run(healthy()), torch_libraries__split_cudnn=parts)
    assert finding_of("L03", with_variables(machine, LD_LIBRARY_PATH="/opt/cudnn")).fix[0] == "$ unset LD_LIBRARY_PATH"


def test_system_library_replaces_a_missing_one() -> None:
    machine = with_libraries(
        healthy(), loaded_from(resolved_library("libcudart.so.13", "nvidia/cu13/lib"), "/usr/lib", "ld.so.cache")
    )
    assert alarms(machine) == ["L05"]
    assert f"{SITE}/nvidia/cu13/lib/libcudart.so.13 does not exist" in finding_of("L05", machine, "warning").evidence
    fine = with_libraries(
        healthy(), replace(resolved_library("libcudart.so.13", "x"), path="/usr/lib/libcudart.so.13", expected="")
    )
    assert alarms(fine) == []  # this torch is built to use the system's


def test_two_packages_own_one_library() -> None:
    overlap = (f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9: nvidia-cudnn-cu12 9.10.2.21, nvidia-cudnn-cu13 9.20.0.48",)
    machine = with_facts(healthy(), torch_libraries__overlaps=overlap)
    assert alarms(machine) == ["L06"]
    fix = finding_of("L06", machine, "warning").fix
    assert fix[0] == "$ /opt/venv/bin/python -m pip uninstall -y nvidia-cudnn-cu12 nvidia-cudnn-cu13"
    assert cause(failing(machine, "convolution", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")) == "L06"
    assert alarms(with_facts(healthy(), torch_libraries__overlaps=("nvidia/__init__.py: a 1, b 2",))) == []


def test_libraries_of_conda_and_pip_are_mixed() -> None:
    machine = with_facts(healthy(), python__environment="conda", python__prefix="/opt/conda")
    mixed = with_libraries(machine, loaded_from(LINK, "/opt/conda/lib", "LD_LIBRARY_PATH"))
    assert alarms(mixed) == []
    finding_of("L07", mixed, "note")
    finding_of("L07", unimportable(mixed, NO_SYMBOL))
    assert find("L07", with_libraries(healthy(), loaded_from(LINK, "/opt/conda/lib", "LD_LIBRARY_PATH"))) is None


# -- the loader


def test_experiment_proves_that_a_preloaded_library_breaks_cuda() -> None:
    machine = with_variables(cuinit_fails(healthy(), 999), LD_PRELOAD="/usr/lib/libvgpu.so")
    assert finding_of("L08", works_without(machine, "LD_PRELOAD")).title == "a preloaded library intercepts CUDA"
    assert finding_of("L08", machine).title.startswith("probably: ")


def test_fix_keeps_other_preloaded_libraries() -> None:
    listed = ("/usr/lib/libjemalloc.so.2", "/opt/vgpu/libvgpu.so")
    fix = finding_of("L08", with_facts(cuinit_fails(healthy(), 999), driver__libraries__preload=listed)).fix
    assert not any("rm " in line for line in fix)
    assert fix[0].startswith("Remove /opt/vgpu/libvgpu.so from /etc/ld.so.preload")
    in_both_lists = with_facts(cuinit_fails(healthy(), 999), driver__libraries__preload=listed[1:])
    finding = finding_of("L08", with_variables(in_both_lists, LD_PRELOAD=listed[0]))
    assert (finding.evidence[0], finding.fix) == ("/etc/ld.so.preload is /opt/vgpu/libvgpu.so", fix)


def test_fix_reinstalls_the_conda_package_of_a_missing_library() -> None:
    machine = with_facts(
        unimportable(healthy(), NO_CUDNN),
        python__tool="conda",
        torch__installs=(replace(install("2.5.1", "12.4"), installer="conda"),),
        torch_libraries__needed=(Resolved("libcudnn.so.9", needed_by="libtorch_cuda.so"),),
    )
    assert finding_of("L04", machine).fix[-1].endswith("-c conda-forge --force-reinstall cudnn")


@each(
    "machine",
    [
        with_variables(healthy(), LD_PRELOAD="/usr/lib/libvgpu.so"),
        with_variables(cuinit_fails(healthy(), 999), LD_PRELOAD="/usr/lib/libjemalloc.so.2"),
        with_variables(without_gpu(), LD_PRELOAD="/usr/lib/libjemalloc.so.2"),
        cuinit_fails(healthy(), 999),
    ],
)
def test_preloaded_library_is_not_blamed(machine: Machine) -> None:
    assert "L08" not in alarms(machine)


def test_empty_element_of_ld_library_path_is_a_note() -> None:
    reason = ("LD_LIBRARY_PATH has an empty element",)
    machine = with_variables(
        with_facts(healthy(), driver__libraries__cwd_searched=reason), LD_LIBRARY_PATH=":/usr/local/lib"
    )
    assert finding_of("L09", machine, "note").fix[0] == "$ export LD_LIBRARY_PATH=/usr/local/lib"
    assert alarms(machine) == []
    in_runpath = ("libcusparseLt.so.0: RUNPATH has an empty element",)
    assert find("L09", with_facts(healthy(), driver__libraries__cwd_searched=in_runpath)) is None


def test_fix_removes_a_relative_element_of_ld_library_path() -> None:
    machine = with_facts(healthy(), driver__libraries__cwd_searched=("LD_LIBRARY_PATH has the relative element lib",))
    for value, fix in (("lib:/opt/x;/opt/y", "export LD_LIBRARY_PATH=/opt/x:/opt/y"), ("lib", "unset LD_LIBRARY_PATH")):
        finding = finding_of("L09", with_variables(machine, LD_LIBRARY_PATH=value), "note")
        assert finding.fix[0] == f"$ {fix}"


def test_library_loaded_from_the_current_directory() -> None:
    reason = ("LD_LIBRARY_PATH has an empty element",)
    machine = with_variables(with_facts(healthy(), driver__libraries__cwd_searched=reason), LD_LIBRARY_PATH=":")
    library = replace(CUDNN, path="/home/user/project/libcudnn.so.9", via="LD_LIBRARY_PATH")
    finding_of("L09", with_libraries(unimportable(machine, "ImportError: boom"), library))
    assert alarms(with_libraries(machine, library)) == []


def test_old_libstdcpp() -> None:
    error = "ImportError: /opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by …/libtorch.so)"
    machine = unimportable(healthy(), error)
    assert cause(machine) == "L12"
    dropped = finding_of("L12", with_variables(machine, LD_LIBRARY_PATH="/opt/conda/lib")).fix
    assert dropped[0] == "$ unset LD_LIBRARY_PATH"
    by_conda = with_facts(machine, python__environment="conda", python__prefix="")
    assert finding_of("L12", by_conda).fix == ("$ conda install -c conda-forge libstdcxx-ng",)
    lacking = ("GLIBCXX_3.4.30 of libstdc++.so.6, needed by libtorch_cpu.so",)
    assert cause(with_facts(no_torch_run(healthy()), torch_libraries__unresolved=lacking)) == "L12"
    assert find("L12", with_facts(healthy(), torch_libraries__unresolved=lacking)) is None


def test_mkl_newer_than_torch_supports() -> None:
    error = "ImportError: …/libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent"
    assert cause(unimportable(healthy(), error)) == "L13"
    assert find("L13", unimportable(healthy(), "ImportError: boom")) is None


def test_windows_cannot_load_a_dll() -> None:
    error = (
        "OSError: [WinError 126] The specified module could not be found. "
        'Error loading "C:\\venv\\torch\\lib\\fbgemm.dll" or one of its dependencies.'
    )
    windows = with_facts(unimportable(healthy(), error), platform__system="Windows")
    assert cause(windows) == "L10"
    assert "vc_redist" in finding_of("L10", windows).fix[0]
    old = with_facts(windows, torch__installs=(replace(install("2.4.0+cu124", "12.4"), dist_version="2.4.0"),))
    assert any("torch>=2.4.1" in line for line in finding_of("L10", old).fix)


def test_windows_loaded_a_dll_from_path() -> None:
    windows = with_facts(failing(healthy(), "kernel", "RuntimeError: boom"), platform__system="Windows")
    other = with_facts(windows, torch_run__libraries=("C:\\cuda\\bin\\cudart64_12.dll",))
    assert finding_of("L11", other).title.startswith("probably: ")
    assert find("L11", windows) is None
    assert find("L11", with_facts(other, platform__system="Linux")) is None
