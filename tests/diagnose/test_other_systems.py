"""What the doctor says on Windows and macOS speaks of nothing that only Linux has."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.diagnose.machines import healthy
from tests.diagnose.macs import MACS, machine_of
from tests.diagnose.rules.torch_machines import finding_of
from tests.diagnose.translated import on_windows, translated
from tests.diagnose.trees import RTX_4090 as RTX
from tests.diagnose.windows_trees import Adapter, windows_host
from tests.diagnose.words import OF_LINUX
from tests.each import each

from transload.diagnose.case import exists_on
from transload.diagnose.probes import probe
from transload.diagnose.report import Diagnosis, facts, judge_machine, report
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import page
from transload.diagnose.tables import steps as sections
from transload.findings import Finding
from transload.machine import Machine, Python, Torch, TorchInstall, TorchRun
from transload.render.lines import as_text


@cache
def diagnoses() -> list[Diagnosis]:
    """The diagnoses of all machines with Windows."""
    return [judge_machine(machine) for machine in translated()]


@cache
def findings_on_windows() -> dict[str, set[Finding]]:
    """Code → what is found on them."""
    found = defaultdict(set)
    for diagnosis in diagnoses():
        for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
            found[finding.code].add(finding)
    return found


def test_no_finding_on_windows_speaks_of_linux() -> None:
    wrong = {
        (code, text)
        for code, findings in findings_on_windows().items()
        for finding in findings
        for text in (finding.title, *finding.evidence, *finding.fix)
        if OF_LINUX.search(text)
    }
    assert wrong == set()
    assert len(findings_on_windows()) > 45


def test_no_step_of_a_cause_that_exists_on_windows_speaks_of_linux() -> None:
    pages = {name: steps for name, steps in sections().items() if re.match(r"[A-Z]\d\d\b", name)}
    general = {name for name in pages if f"{name} on Windows" not in pages}
    # variants for what Windows does not have; P08 alone is about the C library
    elsewhere = re.compile("P08|.* (?:on macOS|container|host|wsl|limit|rocm)")
    shown = {name for name in general if exists_on("Windows", name[:3]) and not elsewhere.fullmatch(name)}
    assert {name: step.text for name in shown for step in pages[name] if OF_LINUX.search(step.text)} == {}


def test_no_report_on_windows_speaks_of_linux() -> None:
    texts = {line for diagnosis in diagnoses() for line in as_text(report(diagnosis)).splitlines()}
    assert {line for line in texts if OF_LINUX.search(line)} == set()


def test_no_fact_on_windows_or_a_mac_is_said_to_come_from_a_file_of_linux(tmp_path: Path) -> None:
    for machine in (on_windows(healthy()), machine_of(MACS["Apple silicon"], tmp_path)):
        labels = [line for line in as_text(facts(machine)).splitlines() if line.strip().startswith("from ")]
        assert [line for line in labels if OF_LINUX.search(line)] == []


@each(("system", "platform"), [("Windows", "win32"), ("Darwin", "darwin")])
def test_no_page_of_a_cause_that_exists_there_speaks_of_linux(system: str, platform: str) -> None:
    pages = {code: page(code, platform) for code in BY_CODE if exists_on(system, code)}
    said = {code: OF_LINUX.findall(text.partition("\n## Sources")[0]) for code, text in pages.items()}
    assert {code: words for code, words in said.items() if words} == {}
    assert "LD_LIBRARY_PATH" in page("U13", "linux")
    assert "System32" not in page("U13", "linux")


# -- macOS


@each("name", MACS)
def test_doctor_names_what_holds_on_a_mac_without_a_word_of_linux(name: str, tmp_path: Path) -> None:
    diagnosis = judge_machine(machine_of(MACS[name], tmp_path))
    muted = {consequence.finding.code for consequence in diagnosis.muted}
    found = tuple(finding.code for finding in diagnosis.findings)
    assert (found, diagnosis.machine.problems) == (MACS[name].codes, {}), muted
    text = as_text(report(diagnosis))
    assert not OF_LINUX.search(text)
    assert diagnosis.cause or text.startswith("There is no CUDA on a Mac; torch ")
    assert not muted & {"H01", "T01", "X08"}


def fix_on(tmp_path: Path, name: str, code: str) -> str:
    diagnosis = judge_machine(machine_of(MACS[name], tmp_path))
    every = (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted))
    return "\n".join(next(finding.fix for finding in every if finding.code == code))


def test_a_mac_gets_the_torch_that_exists_for_it(tmp_path: Path) -> None:
    assert fix_on(tmp_path / "1", "Apple silicon without torch", "P01").endswith("-m pip install torch")
    assert fix_on(tmp_path / "2", "Intel without torch", "P01").endswith("-m pip install torch==2.2.2 'numpy<2'")
    assert "Python 3.8 to 3.12" in fix_on(tmp_path / "3", "Intel with a new Python", "P07")
    assert "torch==2.9.1" in fix_on(tmp_path / "4", "macOS 13 with a new torch", "Y02")
    assert "torch==2.4.1" in fix_on(tmp_path / "5", "macOS 12 with a new torch", "Y02")
    assert "torch==" not in fix_on(tmp_path / "6", "macOS before mps", "Y02")
    assert "arm64" in fix_on(tmp_path / "7", "Rosetta", "Y01")


def test_mps_is_named_with_what_it_lacks_where_it_works(tmp_path: Path) -> None:
    apple = fix_on(tmp_path / "1", "Apple silicon", "T08")
    assert '"mps"' in apple
    assert "float64" in apple
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in apple
    assert '"mps"' in fix_on(tmp_path / "2", "Intel with a GPU of AMD", "T08")
    for name in ("Intel", "Rosetta", "macOS 13 with a new torch"):
        assert '"cpu"' in fix_on(tmp_path / name, name, "T08")


def test_the_facts_of_a_mac(tmp_path: Path) -> None:
    platform = machine_of(MACS["Rosetta"], tmp_path).platform
    assert (platform.distribution_name, platform.translator, platform.memory) == ("macOS 14.5", "Rosetta", 16 << 30)
    assert machine_of(MACS["Apple silicon"], tmp_path / "2").accelerators[0].kind == "mps"


# -- what to install on Windows


GTX_1080, RX_7900, ARC = 0x1B80, 0x744C, 0x56A0


def windows_without_torch(root: Path, *cards: Adapter) -> Machine:
    machine = probe(torch=False, host=windows_host(root, cards=cards))
    python = Python(r"C:\py\python.exe", "3.12.4", prefix=r"C:\py")
    return replace(machine, python=python, torch=Torch(()), torch_run=TorchRun(), problems={})


def commands_of(machine: Machine, code: str) -> tuple[str, ...]:
    return tuple(line[2:] for line in finding_of(code, machine).fix if line.startswith("$ "))


def test_without_torch_the_command_names_the_cuda_build_for_driver_and_card(tmp_path: Path) -> None:
    new, old = Adapter(), Adapter(card=replace(RTX, device=GTX_1080))
    install = r"C:\py\python.exe -m pip install torch==2.15.0 --index-url https://download.pytorch.org/whl/"
    assert commands_of(windows_without_torch(tmp_path / "1", new), "P01") == (f"{install}cu130",)
    assert commands_of(windows_without_torch(tmp_path / "2", old), "P01") == (f"{install}cu126",)
    older = replace(new, version="31.0.15.3623")  # driver 536.23
    assert commands_of(windows_without_torch(tmp_path / "3", older), "P01")[-1] == f"{install}cu126"


def test_other_vendors_get_what_exists_for_windows(tmp_path: Path) -> None:
    amd = Adapter(
        replace(RTX, device=RX_7900, name="AMD Radeon RX 7900 XTX"), 0x1002, "amdkmdag", "Advanced Micro Devices"
    )
    arc = Adapter(
        replace(RTX, device=ARC, name="Intel(R) Arc(TM) A770 Graphics"), 0x8086, "igfxnd", "Intel Corporation"
    )
    with_amd, with_arc = windows_without_torch(tmp_path / "1", amd), windows_without_torch(tmp_path / "2", arc)
    assert commands_of(with_arc, "P01")[-1].endswith("install torch --index-url https://download.pytorch.org/whl/xpu")
    assert commands_of(with_amd, "P01") == (r"C:\py\python.exe -m pip install torch",)
    assert "rocm.docs.amd.com" in " ".join(finding_of("P01", with_amd).fix)
    cpu = Torch((TorchInstall(r"C:\py\Lib\site-packages\torch", "2.13.0+cpu", dist_version="2.13.0"),))
    assert "rocm.docs.amd.com" in " ".join(finding_of("T07", replace(with_amd, torch=cpu), "note").fix)
    assert commands_of_note(replace(with_arc, torch=cpu))[-1].endswith("whl/xpu")
    undriven = replace(amd, service="BasicDisplay", provider="Microsoft")
    assert "rocm" not in " ".join(finding_of("P01", windows_without_torch(tmp_path / "3", undriven)).fix)


def commands_of_note(machine: Machine) -> tuple[str, ...]:
    return tuple(line for line in finding_of("T07", machine, "note").fix if line.startswith("$ "))
