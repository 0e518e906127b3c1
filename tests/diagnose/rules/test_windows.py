"""Rules about the cards, the driver and the Python of a Windows machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import WINDOWS_SITE, healthy, in_windows, no_torch_run, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import alarms, cause, causes, find, finding_of, no_libcuda
from tests.diagnose.windows_scenarios import STORE

from transload.diagnose.report import judge_machine
from transload.machine import ChildAnswer, Cuda, Machine, PciDevice, Torch, TorchRun, Unknown


def broken(problem: int = 0, driver: str = "nvlddmkm", **facts: Any) -> Machine:
    """A PC whose card has a problem or another driver, and whose torch with CUDA finds no GPU."""
    machine = in_windows(no_libcuda(healthy()))
    cards = tuple(replace(card, problem=problem, driver=driver) for card in machine.hardware.pci or ())
    nvml = replace(machine.driver.nvml, answer=ChildAnswer("no-library"), init=-1, count=-1, gpus=())
    machine = with_facts(machine, hardware__pci=cards, kernel__loaded=False, driver__nvml=nvml)
    return with_facts(machine, **facts)


def test_healthy_windows_machines_raise_no_alarm() -> None:
    laptop = in_windows(healthy())
    intel = PciDevice("0000:00:02.0", 0x8086, 0x9A49, 0x030000, "igfxn", name="Intel(R) Iris(R) Xe Graphics")
    machines = {
        "WDDM": laptop,
        "laptop with two GPUs": with_facts(laptop, hardware__pci=(intel, *(laptop.hardware.pci or ()))),
        "TCC": in_windows(healthy(), model="TCC"),
        "MCDM": in_windows(healthy(), model="MCDM"),
        "torch not run": no_torch_run(laptop),
        "devices not confirmed": with_facts(laptop, hardware__unconfirmed="cfgmgr32 lists no device"),
        "card that was replaced": with_facts(laptop, hardware__absent=("NVIDIA GeForce GTX 1080",)),
        "no card": in_windows(without_gpu()),
        "Python of the Store": with_facts(laptop, python__environment="store"),
    }
    assert [(name, alarms(machine)) for name, machine in machines.items() if alarms(machine)] == []
    judged = {name: judge_machine(machine).findings for name, machine in machines.items()}
    assert [finding.code for finding in judged.pop("no card")] == ["H01"]
    assert [(name, findings) for name, findings in judged.items() if findings] == []


def test_machine_without_a_card_certainly_has_none() -> None:
    finding = finding_of("H01", in_windows(without_gpu()))
    assert finding.title == "there is no NVIDIA GPU in this machine"
    known = with_facts(in_windows(without_gpu()), hardware__absent=("NVIDIA GeForce RTX 4090",))
    assert finding_of("W08", known).severity == "note"
    assert find("W08", with_facts(in_windows(healthy()), hardware__absent=("NVIDIA GeForce GTX 1080",))) is None


def test_card_without_nvidias_driver() -> None:
    basic = broken(driver="BasicDisplay", kernel__provider="Microsoft", kernel__version="")
    assert cause(basic) == "W01"
    finding = finding_of("W01", basic)
    assert finding.title == "Windows has no NVIDIA driver"
    assert "its driver is BasicDisplay of Microsoft" in finding.evidence
    undriven = broken(28, driver="", kernel__provider="", kernel__version="")
    assert causes(undriven) == ["W01"]
    says = "the device manager shows code 28: The drivers for this device are not installed."
    assert says in finding_of("W01", undriven).evidence
    unsure = with_facts(basic, hardware__unconfirmed="cfgmgr32 lists no device")
    assert finding_of("W01", unsure).title.startswith("probably: ")
    assert find("W01", in_windows(healthy())) is None
    assert find("W01", with_facts(basic, platform__system="Linux")) is None


def test_missing_driver_is_named_before_the_torch_without_cuda() -> None:
    machine = broken(28, driver="", kernel__provider="", kernel__version="")
    machine = with_facts(machine, torch__installs=in_windows(without_gpu()).torch.installs)
    machine = with_facts(machine, torch_run=TorchRun(), torch_libraries=without_gpu().torch_libraries)
    assert sorted(causes(machine)) == ["T02", "W01"]


def test_problems_of_the_device_manager() -> None:
    codes = {22: "W03", 43: "W04", 14: "W06", 38: "W06"} | dict.fromkeys((10, 12, 31, 39, 48, 52, 77), "W05")
    assert {code: causes(broken(code)) for code in codes} == {code: [name] for code, name in codes.items()}
    assert "the device manager shows code 77" in finding_of("W05", broken(77)).evidence
    fixes = {code: finding_of("W05", broken(code)).fix[0] for code in (31, 12, 52)}
    assert len(set(fixes.values())) == 3
    assert "signed" in fixes[52]
    assert "firmware" in fixes[12]


def test_problem_of_one_card_does_not_hide_that_another_works() -> None:
    machine = in_windows(healthy())
    other = PciDevice("0000:02:00.0", 0x10DE, 0x1B80, 0x030000, "nvlddmkm", name="NVIDIA GeForce GTX 1080")
    for problem, severity in {22: "note", 43: "warning", 31: "warning"}.items():
        both = with_facts(machine, hardware__pci=(*(machine.hardware.pci or ()), replace(other, problem=problem)))
        diagnosis = judge_machine(both)
        assert [finding.severity for finding in diagnosis.findings] == [severity], problem


def test_branch_of_a_driver_is_not_its_number_on_windows() -> None:
    pascal = PciDevice("0000:02:00.0", 0x10DE, 0x1B80, 0x030000, "nvlddmkm", name="NVIDIA GeForce GTX 1080")
    machine = in_windows(healthy(), "581.80")
    both = with_facts(machine, hardware__pci=(*(machine.hardware.pci or ()), pascal))
    assert find("K06", both) is None  # the last branch for it is 580
    assert finding_of("K06", with_facts(both, kernel__version="591.44")).severity == "note"


def test_driver_without_its_cuda_library() -> None:
    machine = broken(kernel__loaded=True)
    assert cause(machine) == "U06"


def test_library_that_windows_cannot_load() -> None:
    machine = in_windows(healthy())
    answer = ChildAnswer("not-loadable", "[WinError 193] %1 is not a valid Win32 application")
    libraries = tuple(replace(lib, problem="not a Windows library") for lib in machine.driver.libraries.cuda or ())
    machine = with_facts(no_torch_run(machine), driver__cuda=Cuda(answer), driver__libraries__cuda=libraries)
    assert cause(machine) == "U13"
    own = finding_of("U13", machine).fix
    assert len(own) == 1
    assert own[0].startswith("Install the driver")
    stranger = replace(libraries[0], path="C:\\Python313\\nvcuda.dll", via="the folder of python.exe")
    beside = finding_of("U13", with_facts(machine, driver__libraries__cuda=(stranger, *libraries))).fix
    assert beside[0].startswith("C:\\Python313\\nvcuda.dll is found before the driver's")


def test_files_of_torch_with_too_long_paths() -> None:
    machine = in_windows(without_gpu())
    absent = with_facts(machine, torch=Torch(installs=()), torch_run=TorchRun())
    store = {"python__environment": "store", "python__user_site": STORE}
    finding = finding_of("W07", with_facts(absent, **store))
    assert finding.severity == "warning"
    assert finding.evidence[0] == "this Python is the Microsoft Store's"
    assert cause(with_facts(absent, **store)) == "P01"
    assert find("W07", absent) is None
    assert find("W07", with_facts(absent, **store, platform__long_paths=True)) is None
    assert find("W07", with_facts(absent, **store, platform__long_paths=Unknown("not readable"))) is None

    (first,) = machine.torch.installs or ()
    install = replace(first, location=f"{STORE}\\torch", missing=("lib/c10.dll: absent",))
    damaged = with_facts(machine, torch__installs=(install,), torch_run=TorchRun(), **store)
    assert causes(damaged) == ["W07"]
    short = replace(install, location=f"{WINDOWS_SITE}\\torch")
    assert causes(with_facts(damaged, torch__installs=(short,))) == ["T09"]
