"""Rules about which libcuda.so.1 a process loads, and whether it matches the kernel driver."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    cuda_fails,
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    library,
    no_torch_run,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import (
    NO_LIBRARY,
    alarms,
    cause,
    causes,
    driver_not_loaded,
    find,
    finding_of,
    no_libcuda,
    with_gpu,
    works_without,
)
from tests.each import each

from transload.machine import ChildAnswer, Cuda, Library, Machine, Nvml, Step

STUBS = "/usr/local/cuda/lib64/stubs"
COMPAT = "/usr/local/cuda/compat"


def loading(machine: Machine, lib: Library, *others: Library) -> Machine:
    """The machine whose processes load ``lib``."""
    return with_facts(machine, driver__libraries__cuda=(lib, *others), driver__cuda__library=lib.target or lib.path)


def stub(via: str = "LD_LIBRARY_PATH") -> Library:
    return Library("libcuda.so.1", f"{STUBS}/libcuda.so.1", f"{STUBS}/libcuda.so", via, "", "stub")


def compat(version: str = "570.26", via: str = "LD_LIBRARY_PATH") -> Library:
    return replace(library("libcuda.so.1", version, via, COMPAT), kind="compat")


def with_library_path(machine: Machine, value: str) -> Machine:
    return with_facts(machine, variables__values={**machine.variables.values, "LD_LIBRARY_PATH": value})


# -- U04: stubs


@each("environment", [lambda m: m, in_container, in_slurm])
def test_stub_from_ld_library_path(environment: Any) -> None:
    machine = with_library_path(
        environment(loading(cuinit_fails(healthy(), 34), stub(), library("libcuda.so.1"))), f"/opt/x:{STUBS}"
    )
    assert causes(machine) == ["U04"]
    finding = finding_of("U04", machine)
    assert (
        f"libcuda.so.1 is {STUBS}/libcuda.so.1 → {STUBS}/libcuda.so, found through LD_LIBRARY_PATH" in finding.evidence
    )
    assert "cuInit returned 34 CUDA_ERROR_STUB_LIBRARY" in finding.evidence
    assert finding.fix[0] == "$ export LD_LIBRARY_PATH=/opt/x"


def test_experiment_without_ld_library_path_proves_the_stub() -> None:
    machine = works_without(loading(cuinit_fails(healthy(), 34), stub()), "LD_LIBRARY_PATH")
    assert causes(machine) == ["U04"]
    assert "without LD_LIBRARY_PATH the driver starts and finds 1 GPU" in finding_of("U04", machine).evidence


def test_stub_in_the_loader_cache() -> None:
    machine = loading(cuinit_fails(healthy(), 34), stub("ld.so.cache"))
    assert "$ sudo ldconfig" in finding_of("U04", machine).fix


def test_code_34_proves_a_stub_without_its_file() -> None:
    assert cause(with_facts(cuinit_fails(healthy(), 34), driver__libraries__cuda=(), driver__cuda__library="")) == "U04"


def test_stub_without_a_card_raises_no_alarm() -> None:
    machine = with_facts(
        without_gpu(), driver__cuda=cuinit_fails(healthy(), 34).driver.cuda, driver__libraries__cuda=(stub(),)
    )
    assert alarms(machine) == []


# -- U02, U03: compatibility libraries


def test_compat_library_that_does_not_match_the_kernel_driver() -> None:
    machine = with_library_path(
        in_container(loading(cuinit_fails(healthy(), 803), compat(), library("libcuda.so.1"))), COMPAT
    )
    assert causes(machine) == ["U02"]
    finding = finding_of("U02", machine)
    assert "it is version 570.26, but the kernel driver is 580.159.04" in finding.evidence
    assert finding.fix[0] == "$ unset LD_LIBRARY_PATH"


def test_compat_library_is_blamed_where_the_driver_works_without_it() -> None:
    machine = loading(cuinit_fails(healthy(), 999), compat())
    assert find("U02", machine) is None
    assert causes(works_without(machine, "LD_LIBRARY_PATH")) == ["U02"]


def test_working_compat_library_is_not_an_error() -> None:
    assert causes(loading(healthy(), compat())) == []


def test_forward_compatibility_on_a_consumer_card() -> None:
    machine = with_gpu(loading(cuinit_fails(healthy(), 804), compat("595.58.03")), name="NVIDIA GeForce RTX 4090")
    assert causes(machine) == ["U03"]
    assert "NVIDIA GeForce RTX 4090 is not a data-center card" in finding_of("U03", machine).evidence
    assert not finding_of("U03", machine).title.startswith("probably")


def test_804_without_a_compat_library_is_probably_forward_compatibility() -> None:
    machine = cuinit_fails(healthy(), 804)
    assert cause(machine) == "U03"
    assert finding_of("U03", machine).title.startswith("probably: ")


# -- U01: another release than the module


@each("code", [803, 804, 999, 100])
def test_libraries_of_another_release_than_the_module(code: int) -> None:
    machine = loading(cuinit_fails(healthy(), code), library("libcuda.so.1", "580.178.04"))
    assert causes(machine) == ["U01"]
    assert finding_of("U01", machine).fix[0] == "$ sudo reboot"


def test_nvml_reports_the_version_mismatch() -> None:
    machine = with_facts(cuinit_fails(healthy(), 804), driver__nvml=Nvml(ChildAnswer("answered"), init=18))
    assert causes(machine) == ["U01"]
    assert "nvmlInit returned 18 NVML_ERROR_LIB_RM_VERSION_MISMATCH" in finding_of("U01", machine).evidence


def test_803_means_a_version_mismatch_whatever_the_files_are() -> None:
    unknown = replace(library("libcuda.so.1"), version="", target="/opt/shim/libcuda.so.1")
    assert cause(loading(cuinit_fails(healthy(), 803), unknown)) == "U01"


def test_fix_updates_libraries_older_than_the_module() -> None:
    machine = loading(cuinit_fails(healthy(), 803), library("libcuda.so.1", "570.26"))
    assert "$ sudo reboot" not in finding_of("U01", machine).fix[:1]
    assert "580.159.04" in finding_of("U01", machine).fix[0]


def test_fix_removes_a_second_driver_from_the_search_path() -> None:
    old = library("libcuda.so.1", "570.26", "LD_LIBRARY_PATH", "/opt/old")
    machine = with_library_path(loading(cuinit_fails(healthy(), 803), old, library("libcuda.so.1")), "/opt/old")
    assert causes(machine) == ["U01"]
    assert finding_of("U01", machine).fix[0] == "$ unset LD_LIBRARY_PATH"


def test_same_release_is_not_a_mismatch() -> None:
    assert find("U01", cuinit_fails(healthy(), 999)) is None
    assert causes(loading(healthy(), library("libcuda.so.1", "570.26"))) == []
    tegra = replace(library("libcuda.so.1"), version="1.1")
    assert find("U01", loading(cuinit_fails(healthy(), 999), tegra)) is None


def test_variable_that_hides_the_card_is_not_a_mismatch() -> None:
    machine = loading(cuinit_fails(healthy(), 100), library("libcuda.so.1", "570.26"))
    assert find("U01", works_without(machine, "CUDA_VISIBLE_DEVICES")) is None


# -- U13: not a usable library


@each(("state", "problem"), [("not-loadable", "not an ELF file"), ("not-loadable", "empty"), ("no-symbol", "")])
@each("environment", [lambda m: m, in_container, in_slurm, in_wsl])
def test_file_that_is_not_a_usable_library(state: Any, problem: str, environment: Any) -> None:
    machine = environment(healthy())
    lib = replace(machine.driver.libraries.libcuda, problem=problem)
    answer = ChildAnswer(state, "libcuda.so.1: file too short")
    machine = cuda_fails(with_facts(machine, driver__libraries__cuda=(lib,), driver__cuda=Cuda(answer)))
    assert causes(machine) == ["U13"]
    assert "libcuda.so.1 could not be used: libcuda.so.1: file too short" in finding_of("U13", machine).evidence


@each("answer", [ChildAnswer("answered"), ChildAnswer("crashed", "SIGABRT"), ChildAnswer("hung", "in cuInit")])
def test_other_library_named_libcuda_on_the_search_path(answer: ChildAnswer) -> None:
    other = replace(library("libcuda.so.1", "", "LD_LIBRARY_PATH", "/opt/shim"), kind="other")
    cuda = Cuda(answer, other.target, 999 if answer.answered else -1)
    machine = loading(cuda_fails(with_facts(healthy(), driver__cuda=cuda)), other, library("libcuda.so.1"))
    machine = works_without(with_library_path(machine, "/opt/shim"), "LD_LIBRARY_PATH")
    assert causes(machine) == ["U13"]
    assert "instead of the driver's" in finding_of("U13", machine).title
    assert finding_of("U13", machine).fix[0] == "$ unset LD_LIBRARY_PATH"
    assert find("U13", with_facts(machine, driver__experiments=())) is None


# -- U05, U06: not found or not installed


def test_library_outside_the_search_path() -> None:
    hidden = library("libcuda.so.1", via="disk", folder="/opt/nvidia/lib64")
    machine = with_facts(no_libcuda(healthy()), driver__libraries__cuda=(hidden,))
    assert causes(machine) == ["U05"]
    assert "$ echo /opt/nvidia/lib64 | sudo tee /etc/ld.so.conf.d/nvidia.conf" in finding_of("U05", machine).fix
    nixos = finding_of("U05", with_facts(machine, platform__distribution="nixos"))
    assert nixos.fix[0] == "$ export LD_LIBRARY_PATH=/opt/nvidia/lib64"


@each("facts", [{"kind": "stub"}, {"kind": "compat"}, {"problem": "empty"}])
def test_stub_compat_or_empty_file_on_the_disk_is_not_the_driver(facts: dict[str, Any]) -> None:
    hidden = replace(library("libcuda.so.1", via="disk"), **facts)
    machine = with_facts(no_libcuda(healthy()), driver__libraries__cuda=(hidden,))
    assert cause(machine) == "U06"


def test_only_part_of_the_driver_is_installed() -> None:
    machine = no_libcuda(healthy())
    assert causes(machine) == ["U06"]
    assert finding_of("U06", machine).fix[0] == "$ sudo apt install libnvidia-compute-580 nvidia-utils-580"
    neither = with_facts(machine, driver__libraries__nvml=(), driver__nvml=Nvml(NO_LIBRARY))
    assert finding_of("U06", neither).title == "the driver's libraries are not installed"
    assert find("U06", no_libcuda(driver_not_loaded(healthy()))) is None


def test_missing_nvml_is_a_note_while_cuda_works() -> None:
    machine = with_facts(healthy(), driver__libraries__nvml=(), driver__nvml=Nvml(NO_LIBRARY))
    assert finding_of("U06", machine).severity == "note"
    assert alarms(machine) == []
    assert find("U06", with_facts(machine, hardware__tegra="Orin")) is None


# -- U07: the PTX compiler


def test_missing_ptx_compiler_is_a_note_until_a_kernel_needs_it() -> None:
    machine = with_facts(healthy(), driver__libraries__ptx_compiler=())
    assert finding_of("U07", machine).severity == "note"
    error = "RuntimeError: CUDA error: PTX JIT compiler library not found"
    died = with_facts(machine, torch_run__steps=(Step("import", ok=True), Step("kernel", ok=False, error=error)))
    assert finding_of("U07", died).severity == "error"
    assert cause(cuinit_fails(healthy(), 221)) == "U07"
    assert find("U07", in_wsl(machine)) is None


# -- WSL


def test_wsl_with_a_linux_driver_inside() -> None:
    machine = cuinit_fails(in_wsl(healthy()), 803)
    wsl_library = machine.driver.libraries.libcuda
    assert wsl_library is not None
    machine = loading(machine, library("libcuda.so.1", "535.104.05"), replace(wsl_library, via="disk"))
    assert causes(machine) == ["U09"]
    purge = finding_of("U09", machine).fix[0]
    pattern = purge.partition("'")[2].rstrip("'")
    assert purge.startswith("$ sudo apt purge '")
    purged = ("nvidia-driver-580-open", "libnvidia-compute-580", "nvidia-utils-580", "libcuda1")
    kept = ("nvidia-cuda-toolkit", "nvidia-container-toolkit", "libnvidia-container1")
    assert [bool(re.search(pattern, name)) for name in (*purged, *kept)] == [True] * 4 + [False] * 3
    for via in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        by_variable = library("libcuda.so.1", "535.104.05", via, "/opt/driver")
        loaded = with_facts(loading(machine, by_variable), variables__values={via: "/opt/driver"})
        assert finding_of("U09", loaded).fix[0] == f"$ unset {via}"
    assert causes(loading(in_wsl(healthy()), library("libcuda.so.1", "535.104.05"))) == []


def test_wsl_library_outside_the_search_path() -> None:
    machine = in_wsl(healthy())
    wsl_library = machine.driver.libraries.libcuda
    assert wsl_library is not None
    hidden = with_facts(no_libcuda(machine), driver__libraries__cuda=(replace(wsl_library, via="disk"),))
    assert causes(hidden) == ["U08"]
    assert any("/usr/lib/wsl/lib" in line and "LD_LIBRARY_PATH" in line for line in finding_of("U08", hidden).fix)


def test_wsl_without_dev_dxg() -> None:
    machine = with_facts(cuinit_fails(in_wsl(healthy()), 100), hardware__dxg=False)
    assert causes(machine) == ["U08"]
    assert "$ wsl --update" in finding_of("U08", machine).fix


def test_wsl_driver_that_finds_no_device_is_a_probable_cause() -> None:
    machine = cuinit_fails(in_wsl(healthy()), 100)
    assert causes(machine) == ["U08"]
    assert finding_of("U08", machine).title.startswith("probably: ")
    assert cause(cuinit_fails(in_wsl(healthy()), 999)) == "X08"
    assert find("U08", works_without(machine, "CUDA_VISIBLE_DEVICES")) is None


def test_wsl_without_a_driver_is_an_error_only_for_a_cuda_build() -> None:
    machine = no_libcuda(in_wsl(healthy()))
    assert causes(machine) == ["U08"]
    assert "no NVIDIA card" in finding_of("U08", machine).title
    assert finding_of("U08", with_facts(machine, torch=without_gpu().torch)).severity == "note"


def test_wsl_1_is_a_note() -> None:
    machine = no_libcuda(with_facts(in_wsl(without_gpu()), surroundings__wsl=1, hardware__dxg=False))
    assert finding_of("U11", machine).severity == "note"
    assert "$ wsl --set-version DISTRIBUTION 2" in finding_of("U11", machine).fix
    assert find("U11", in_wsl(healthy())) is None
    assert find("U08", machine) is None


# -- what a fix must not break


def unloadable(machine: Machine, detail: str, **facts: Any) -> Machine:
    """A machine whose libcuda.so.1 in the system's library folder cannot be loaded."""
    lib = replace(library("libcuda.so.1"), **facts)
    answer = ChildAnswer("not-loadable", detail)
    return cuda_fails(with_facts(machine, driver__libraries__cuda=(lib,), driver__cuda=Cuda(answer)))


def test_fix_never_removes_the_system_folder_from_the_loader() -> None:
    for machine in (healthy(), in_container(healthy())):
        empty = unloadable(machine, "file too short", target="", version="", kind="other", problem="empty")
        fix = finding_of("U13", empty).fix
        assert not any("ld.so.conf" in line for line in fix)
        assert any(line.endswith("rm /usr/lib/x86_64-linux-gnu/libcuda.so.1") for line in fix)


def test_fix_does_not_remove_the_drivers_library_that_lacks_a_dependency() -> None:
    machine = unloadable(healthy(), "libnvidia-gpucomp.so.580.159.04: cannot open shared object file")
    fix = finding_of("U13", machine).fix
    assert not any(" rm " in line or "ld.so.conf" in line for line in fix)
    assert fix[0] == "$ sudo apt install --reinstall libnvidia-compute-580 nvidia-utils-580"
    noexec = finding_of("U13", unloadable(healthy(), "failed to map segment: Operation not permitted")).fix
    assert not any(line.startswith("$") for line in noexec)


def test_fix_removes_a_preloaded_library_from_the_list_not_from_the_disk() -> None:
    lib = replace(stub("ld.so.preload"), path="/opt/vgpu/libvgpu.so", target="")
    fix = finding_of("U04", loading(cuinit_fails(healthy(), 34), lib)).fix
    assert not any(line.startswith("$") for line in fix)
    assert "/opt/vgpu/libvgpu.so from /etc/ld.so.preload" in fix[0]


def test_fix_finds_the_stubs_folder_in_the_loader_configuration() -> None:
    fix = finding_of("U04", loading(cuinit_fails(healthy(), 34), stub("ld.so.cache"))).fix
    assert f"$ grep -rn {STUBS} /etc/ld.so.conf /etc/ld.so.conf.d" in fix


def test_nvml_on_the_disk_is_not_missing() -> None:
    on_disk = library("libnvidia-ml.so.1", via="disk", folder="/run/opengl-driver/lib")
    machine = with_facts(healthy(), driver__nvml=Nvml(NO_LIBRARY), driver__libraries__nvml=(on_disk,))
    assert find("U06", machine) is None
    assert find("U06", with_facts(machine, driver__libraries__nvml=())) is not None


def test_library_outside_the_search_path_is_only_probable_where_torch_was_not_run() -> None:
    lib = library("libcuda.so.1", via="disk", folder="/run/opengl-driver/lib")
    machine = with_facts(no_libcuda(healthy()), driver__libraries__cuda=(lib,))
    assert not finding_of("U05", machine).title.startswith("probably: ")
    assert finding_of("U05", no_torch_run(machine)).title.startswith("probably: ")


def test_fix_stops_the_persistence_daemon_before_unloading_the_modules() -> None:
    machine = with_facts(cuinit_fails(healthy(), 803), driver__libraries__cuda=(library("libcuda.so.1", "595.58.03"),))
    machine = with_facts(machine, driver__nvml=Nvml(ChildAnswer("answered"), init=18))
    fix = finding_of("U01", machine).fix
    assert fix.index("$ sudo systemctl stop nvidia-persistenced") + 1 == fix.index(
        "$ sudo modprobe -r nvidia_modeset nvidia_uvm nvidia"
    )
