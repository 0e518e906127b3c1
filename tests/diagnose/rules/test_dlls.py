"""Rules about the DLLs that torch loads on Windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import ANSWERED, healthy, no_torch_run, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import cause, find
from tests.diagnose.rules.torch_machines import crashed_or_hung, failing, finding_of, unimportable
from tests.diagnose.words import OF_LINUX
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Machine, Platform, Python, Resolved, TorchInstall

TORCH = "C:\\venv\\Lib\\site-packages\\torch"
WORDS = {
    126: "The specified module could not be found.",
    127: "Die angegebene Prozedur wurde nicht gefunden.",
    182: "The operating system cannot run %1.",
    193: "%1 不是有效的 Win32 应用程序。",
    1114: "动态链接库(DLL)初始化例程失败。",
    1455: "Die Auslagerungsdatei ist zu klein, um diesen Vorgang durchzuführen.",
}
SYSTEM = "C:\\Windows\\System32"
MSVCP = Resolved("MSVCP140.dll", f"{SYSTEM}\\msvcp140.dll", "System32", "c10.dll", "14.44.35211.0")
VCRUNTIME = Resolved(
    "VCRUNTIME140.dll", "C:\\Python\\vcruntime140.dll", "the folder of python.exe", "python.exe", "14.38.33130.0"
)
HELPER = Resolved("zlibwapi.dll", "C:\\it's old\\zlibwapi.dll", "PATH: C:\\it's old", "torch_cpu.dll")


def windows(*needed: Resolved, error: int | str = 0, dll: str = "c10.dll", **facts: Any) -> Machine:
    """A PC without a GPU, with torch in a venv; its import fails with an error of Windows, or is not tried for 0."""
    install = TorchInstall(TORCH, "2.13.0+cpu", tags=("cp313-cp313-win_amd64",))
    words = f"OSError: [WinError {error}] {WORDS.get(int(error), '')}" if isinstance(error, int) else error
    machine = no_torch_run(without_gpu())
    if error:
        said = f'{words} Error loading "{TORCH}\\lib\\{dll}" or one of its dependencies.'
        machine = unimportable(without_gpu(), said if isinstance(error, int) else error)
    machine = with_facts(
        machine,
        platform=Platform("Windows", "AMD64", "10.0.26100", shell="powershell"),
        python=Python(
            "C:\\venv\\Scripts\\python.exe", "3.13.2", prefix="C:\\venv", environment="venv", machine="AMD64"
        ),
        torch__installs=(install,),
        torch_libraries__needed=needed,
        torch_libraries__toolset="14.42",
    )
    return with_facts(machine, **facts)


def absent(name: str, needed_by: str = "c10.dll") -> Resolved:
    return Resolved(name, needed_by=needed_by)


NO_MSVCP = absent("MSVCP140.dll")
NO_OPENMP = absent("libomp140.x86_64.dll", "fbgemm.dll")
NO_OTHER = absent("zlibwapi.dll", "torch_cpu.dll")
X86 = replace(HELPER, problem="for another machine (x86)")
OWN_X86 = Resolved("uv.dll", f"{TORCH}\\lib\\uv.dll", "torch\\lib", "torch", problem="for another machine (x86)")
OLD = replace(MSVCP, version="14.29.30133.0")
LACKING = ("_Thrd_sleep_for of MSVCP140.dll, needed by c10.dll",)
IN_ZLIB = ("deflate of zlibwapi.dll, needed by torch_cpu.dll",)
IN_TORCH = ("?a@c10@@YAXXZ of c10.dll, needed by torch_cpu.dll",)
IN_PYTHON = ("PyType_GetQualName of python311.dll, needed by torch_python.dll",)
NO_NUMBER = "ImportError: DLL load failed while importing _C: 找不到指定的模块。"


@each(
    "machine, code",
    [
        (windows(NO_MSVCP, error=126), "W10"),
        (windows(NO_MSVCP, error=NO_NUMBER), "W10"),
        (windows(NO_MSVCP), "W10"),
        (windows(NO_MSVCP, NO_OTHER, error=126), "W10"),
        (windows(NO_OPENMP, error=126), "W12"),
        (windows(NO_OPENMP), "W12"),
        (windows(OLD, error=1114), "W11"),
        (windows(OLD), "W11"),
        (windows(replace(MSVCP, version="14.40.1.0"), error=1114), "W11"),
        (windows(MSVCP, error=127, torch_libraries__unresolved=LACKING), "W11"),
        (windows(HELPER, error=127, torch_libraries__unresolved=IN_ZLIB), "W13"),
        (windows(HELPER, error=1114), "W13"),
        (windows(HELPER, torch_libraries__unresolved=IN_ZLIB), "W13"),
        (windows(MSVCP, error=127, torch_libraries__unresolved=IN_TORCH), "W14"),
        (windows(MSVCP, error=182, torch_libraries__unresolved=IN_TORCH), "W14"),
        (windows(MSVCP, torch_libraries__unresolved=IN_PYTHON), "W14"),
        (windows(X86, error=193), "W15"),
        (windows(OWN_X86, error=193), "W15"),
        (windows(OWN_X86), "W15"),
        (windows(error=1455), "W16"),
        (windows(NO_OTHER, error=126), "L10"),
        (windows(replace(OWN_X86, problem="not a Windows library"), error=193), "L10"),
        (windows(MSVCP, error=126), "L10"),
        (windows(MSVCP, error=1114), "L10"),
        (windows(NO_MSVCP, error=1114), "L10"),  # what is missing gives another number
        (windows(HELPER, error=126), "L10"),
    ],
)
def test_cause_by_the_number_of_the_error_and_the_files(machine: Machine, code: str) -> None:
    assert cause(machine) == code
    assert not OF_LINUX.search(str(judge_machine(machine)))


def test_healthy_windows_has_no_finding() -> None:
    late = Resolved("cudnn64_9.dll", via="delayed", needed_by="torch_cuda.dll")
    works = replace(without_gpu().torch_run, answer=ANSWERED)
    for machine in (
        windows(MSVCP, VCRUNTIME),
        windows(MSVCP, HELPER),
        windows(late),
        windows(OLD, torch_libraries__toolset="14.29"),
        with_facts(windows(OLD, NO_MSVCP, X86, torch_libraries__unresolved=IN_TORCH), torch_run=works),
    ):
        assert [code for code in ("L10", "L11", *(f"W{n}" for n in range(10, 17))) if find(code, machine)] == []


def test_nothing_of_it_is_said_on_linux() -> None:
    broken = with_facts(windows(OLD, NO_OPENMP, X86, torch_libraries__unresolved=IN_TORCH), platform__system="Linux")
    assert [code for code in ("L10", *(f"W{n}" for n in range(10, 17))) if find(code, broken)] == []


def test_the_missing_dll_is_named() -> None:
    finding = finding_of("W10", windows(NO_MSVCP, error=126))
    assert finding.evidence[1] == "MSVCP140.dll, needed by c10.dll, is not found anywhere"
    assert "https://aka.ms/vs/17/release/vc_redist.x64.exe" in finding.fix[2]
    assert "$ winget install Microsoft.VCRedist.2015+.x64" in finding.fix
    arm = finding_of("W10", windows(NO_MSVCP, error=126, python__machine="ARM64"))
    assert "$ winget install Microsoft.VCRedist.2015+.arm64" in arm.fix
    conda = finding_of("W10", windows(NO_MSVCP, error=126, python__environment="conda", python__tool="conda"))
    assert any("vc14_runtime" in line for line in conda.fix)
    assert (
        finding_of("L10", windows(NO_OTHER, error=126)).evidence[1].startswith("zlibwapi.dll, needed by torch_cpu.dll")
    )
    assert any("torch>=2.4.1" in line for line in finding_of("W12", windows(NO_OPENMP, error=126)).fix)


def test_runtime_that_is_too_old() -> None:
    finding = finding_of("W11", windows(VCRUNTIME, OLD, error=1114))
    assert (
        f"MSVCP140.dll is taken from {SYSTEM}\\msvcp140.dll (14.29.30133.0), found through System32" in finding.evidence
    )
    assert not finding.title.startswith("probably")
    assert finding_of("W11", windows(OLD)).title.startswith("probably")
    assert finding_of("W11", windows(replace(OLD, version="14.40.1.0"), error=1114)).title.startswith("probably")
    assert find("W11", crashed_or_hung(windows(OLD), "crashed", "access violation"))
    copy = replace(OLD, path="C:\\Python\\msvcp140.dll", via="the folder of python.exe")
    assert any("C:\\Python\\msvcp140.dll" in line for line in finding_of("W11", windows(copy, error=1114)).fix)


def test_dll_of_another_program() -> None:
    finding = finding_of("W13", windows(HELPER, error=127, torch_libraries__unresolved=IN_ZLIB))
    assert finding.evidence[1:] == (
        "zlibwapi.dll is taken from C:\\it's old\\zlibwapi.dll, found through PATH: C:\\it's old",
        "zlibwapi.dll has no deflate, which torch_cpu.dll needs",
    )
    assert not finding.title.startswith("probably")
    assert any("-ne 'C:\\it''s old'" in line for line in finding.fix)
    assert finding_of("W13", windows(HELPER, error=1114)).title.startswith("probably")
    runtime = replace(
        MSVCP, path="C:\\app\\msvcp140.dll", via="PATH: C:\\app"
    )  # once installed, System32's comes first
    assert any("winget" in line for line in finding_of("W13", windows(runtime, error=1114)).fix)
    here = replace(HELPER, via="the current directory")
    assert finding_of("W13", windows(here, error=1114)).fix[0].startswith("Rename C:\\it's old\\zlibwapi.dll")


def test_function_of_python_needs_a_newer_python() -> None:
    python = windows(MSVCP, error=127, torch_libraries__unresolved=IN_PYTHON, python__version="3.11.0")
    assert "Python 3.11," in finding_of("W14", python).fix[0]
    own = finding_of("W14", windows(MSVCP, error=127, torch_libraries__unresolved=IN_TORCH))
    assert any("--force-reinstall" in line for line in own.fix)


def test_commit_limit() -> None:
    facts: dict[str, Any] = {
        "platform__commit_limit": 24 * 10**9,
        "platform__commit_free": 10**9,
        "torch_libraries__committed": 3 * 10**9,
    }
    finding = finding_of("W16", windows(error=1455, **facts))
    assert "1.00 GB of the commit limit of 24.0 GB are free" in finding.evidence
    assert "every process that imports this torch takes 3.00 GB of it for DLLs" in finding.evidence
    assert finding_of("W16", windows(**facts)).title.startswith("probably")
    assert find("W16", windows(**{**facts, "platform__commit_free": 4 * 10**9})) is None
    later = with_facts(failing(healthy(), "init", "OSError: [WinError 1455] x"), platform__system="Windows")
    assert find("W16", later)


def test_dll_that_was_removed_is_torchs_own() -> None:
    lost = replace(TorchInstall(TORCH, "2.13.0+cpu"), missing=("lib/uv.dll: absent",))
    machine = windows(absent("uv.dll", "torch_cpu.dll"), error=126, torch__installs=(lost,))
    assert cause(machine) == "T09"
    assert "quarantine" in finding_of("T09", machine).fix[-1]
    assert find("L10", machine) is None
