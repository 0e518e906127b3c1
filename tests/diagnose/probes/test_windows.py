"""The parts of a Windows machine, from its registry, its configuration manager and its files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.trees import GTX_1080, H200, Card
from tests.diagnose.windows_trees import (
    BASE,
    MACHINE_VARIABLES,
    SYSTEM,
    USER_VARIABLES,
    VENV,
    Adapter,
    basic,
    undriven,
    windows_host,
)
from tests.each import each
from tests.pe_forge import dll

from transload.diagnose.probes import _native, on_windows, probe, python, system
from transload.diagnose.report import judge_machine
from transload.diagnose.saved import machine_from
from transload.machine import (
    Library,
    Machine,
    PciDevice,
    Platform,
    Python,
    Surroundings,
    Torch,
    TorchInstall,
    TorchRun,
    Unknown,
)

CARD = PciDevice("0000:01:00.0", 0x10DE, 0x2684, 0x030000, "nvlddmkm", name="NVIDIA GeForce RTX 4090")
AMD = Adapter(Card("AMD Radeon RX 7900 XTX", 0x744C, kind=0x030000), 0x1002, "amdwddmg", "Advanced Micro Devices, Inc.")


def test_whole_machine_is_examined_and_its_facts_have_paths_of_windows(tmp_path: Path) -> None:
    machine = probe(torch=False, host=windows_host(tmp_path))
    assert machine.problems == {}
    assert machine.hardware.pci == (CARD,)
    assert machine.surroundings == Surroundings()
    assert machine.nodes.found == ()
    assert machine.driver.libraries.smi == "C:\\Windows\\System32\\nvidia-smi.exe"
    assert machine.python.executable == VENV.replace("/", "\\") + "\\Scripts\\python.exe"
    assert machine_from(machine.to_dict()) == machine


def test_facts_of_a_windows_machine_keep_what_comes_from_outside(tmp_path: Path) -> None:
    host = windows_host(tmp_path, environ={"PYTHONPATH": "C:/lib;D:\\x"})
    assert probe(torch=False, host=host).variables.values == {"PYTHONPATH": "C:/lib;D:\\x"}


def test_paths_in_facts_are_written_as_windows_does() -> None:
    first = TorchInstall("C:/v/torch", missing=("lib/c10.dll: absent",), origin="file:///C:/x", problem="C:/v: gone")
    machine = Machine(
        platform=Platform("Windows", long_paths=Unknown("HKLM/SYSTEM/x does not exist")),
        python=Python("//server/share/python.exe", others=("D:/p y/python.exe: torch 2.13.0",)),
        torch=Torch((first,), shadow_via="the folder C:/a/b"),
        torch_run=TorchRun(warnings=("see https://pytorch.org/a/b and C:/x/y",)),
    )
    native = _native(machine)
    (install,) = native.torch.installs
    assert (install.location, install.missing, install.problem) == (
        "C:\\v\\torch",
        ("lib\\c10.dll: absent",),
        "C:\\v: gone",
    )
    assert (install.origin, native.torch.shadow_via) == ("file:///C:/x", "the folder C:\\a\\b")
    assert native.python.executable == "\\\\server\\share\\python.exe"
    assert native.python.others == ("D:\\p y\\python.exe: torch 2.13.0",)
    assert native.platform.long_paths == Unknown("HKLM\\SYSTEM\\x does not exist")
    assert native.torch_run == machine.torch_run


def test_card_with_its_driver(tmp_path: Path) -> None:
    host = windows_host(tmp_path, cards=(AMD, Adapter(replace(H200, address="0000:3b:00.0")), Adapter()))
    radeon, h200, card = system.hardware(host).pci or ()
    assert (radeon.vendor, radeon.driver, radeon.name) == (0x1002, "amdwddmg", "AMD Radeon RX 7900 XTX")
    assert (h200.address, h200.device, h200.kind, h200.display) == ("0000:3b:00.0", 0x2335, 0x030200, True)
    assert card == CARD
    kernel = system.kernel(host)
    assert (kernel.loaded, kernel.version, kernel.provider) == (True, "581.80", "NVIDIA")
    (accelerator,) = system.accelerators(host, system.hardware(host))
    assert (accelerator.kind, accelerator.name, accelerator.usable) == ("rocm", "AMD Radeon RX 7900 XTX", True)


def driver_facts(host_folder: Path, *cards: Adapter) -> tuple[object, ...]:
    host = windows_host(host_folder, cards=cards)
    kernel, gpus = system.kernel(host), system.hardware(host).gpus
    return kernel.loaded, kernel.version, kernel.provider, *((gpu.driver, gpu.problem) for gpu in gpus)


def test_card_whose_driver_is_absent_or_stopped(tmp_path: Path) -> None:
    stopped, disabled = Adapter(problem=43), Adapter(problem=22)
    other = Adapter(replace(GTX_1080, address="0000:02:00.0"))
    cases = {
        (basic(),): (False, "", "Microsoft", ("BasicDisplay", 0)),
        (undriven(),): (False, "", "", ("", 28)),
        (stopped,): (False, "581.80", "NVIDIA", ("nvlddmkm", 43)),
        (disabled, other): (True, "581.80", "NVIDIA", ("nvlddmkm", 22), ("nvlddmkm", 0)),
        (other, undriven()): (True, "581.80", "NVIDIA", ("nvlddmkm", 0), ("", 28)),
        (): (False, "", ""),
    }
    folders = {cards: tmp_path / str(number) for number, cards in enumerate(cases)}
    assert {cards: driver_facts(folders[cards], *cards) for cards in cases} == cases


def test_card_that_was_removed_is_not_listed(tmp_path: Path) -> None:
    gone, here = Adapter(GTX_1080, present=False), Adapter()
    assert system.hardware(windows_host(tmp_path, cards=(gone, here))).pci == (CARD,)


def test_registry_lists_the_cards_if_the_configuration_manager_does_not_answer(tmp_path: Path) -> None:
    hardware = system.hardware(windows_host(tmp_path, confirmed=False))
    assert hardware.pci == (CARD,)
    assert hardware.unconfirmed == "cfgmgr32 returned 29"
    nothing = system.hardware(windows_host(tmp_path / "none", cards=(), confirmed=False))
    assert (nothing.pci, nothing.unconfirmed) == ((), "")
    host = replace(windows_host(tmp_path / "mute", confirmed=False), keys={})
    assert isinstance(system.hardware(host).pci, Unknown)


def test_libraries_of_the_driver_in_the_order_of_the_search(tmp_path: Path) -> None:
    old = "C:/Program Files/NVIDIA Corporation/NVSMI"
    library = dll("nvml.dll", version="23.21.13.9135")
    more = {f"{BASE}/nvcuda.dll": dll(machine="x86"), f"{old}/nvml.dll": library, f"{SYSTEM}/nvcuda.dll": b"no library"}
    host = windows_host(tmp_path, more=more, without=(f"{SYSTEM}/nvml.dll",))
    libraries = on_windows.driver_libraries(host, Python(base_prefix=BASE))
    assert [(lib.path, lib.via, lib.problem) for lib in libraries.cuda or ()] == [
        (f"{BASE}/nvcuda.dll", "the folder of python.exe", "for another machine (x86)"),
        (f"{SYSTEM}/nvcuda.dll", "System32", "not a Windows library"),
    ]
    assert libraries.nvml == (Library("nvml.dll", f"{old}/nvml.dll", f"{old}/nvml.dll", "disk", "391.35"),)
    assert on_windows.nvml_library(host) == f"{old}/nvml.dll"
    assert on_windows.nvml_library(windows_host(tmp_path / "new")) == "nvml.dll"


def test_32_bit_python_uses_other_libraries(tmp_path: Path) -> None:
    host = windows_host(tmp_path, more={"C:/Windows/SysWOW64/nvcuda.dll": dll(machine="x86")})
    found = on_windows.driver_libraries(host, Python(bits=32)).cuda or ()
    assert [(lib.path, lib.via, lib.problem) for lib in found] == [("C:/Windows/SysWOW64/nvcuda.dll", "SysWOW64", "")]


def test_variables_have_the_keys_that_set_them(tmp_path: Path) -> None:
    host = windows_host(
        tmp_path,
        environ={"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": "C:\\x"},
        registry={USER_VARIABLES: {"Cuda_Visible_Devices": "-1"}, MACHINE_VARIABLES: {"CUDA_VISIBLE_DEVICES": "-1"}},
    )
    keys = ("HKCU\\Environment", "HKLM\\SYSTEM\\CurrentControlSet\\Control\\Session Manager\\Environment")
    assert system.variables(host).origins == {"CUDA_VISIBLE_DEVICES": keys}
    overridden = replace(host, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert system.variables(overridden).origins == {}


def test_release_memory_and_shell(tmp_path: Path) -> None:
    version = {
        "HKLM/SOFTWARE/Microsoft/Windows NT/CurrentVersion": {"CurrentBuildNumber": "26100", "DisplayVersion": "24H2"}
    }
    platform = system.platform(windows_host(tmp_path, registry=version, environ={"PROMPT": "$P$G"}))
    assert (platform.system, platform.distribution_name, platform.shell) == ("Windows", "Windows 11 24H2", "cmd")
    assert (platform.memory, platform.memory_free) == (32 << 30, 20 << 30)
    assert (platform.commit_limit, platform.commit_free, platform.long_paths) == (48 << 30, 30 << 30, False)


MODULES = "C:\\Program Files\\WindowsPowerShell\\Modules;C:\\WINDOWS\\system32\\WindowsPowerShell\\v1.0\\Modules"
OWN_MODULES = f"D:\\Dokumente\\WindowsPowerShell\\Modules;{MODULES}"
BASH = "C:\\Program Files\\Git\\usr\\bin\\bash.exe"


@each(
    ("environ", "shell"),
    [
        ({"PSMODULEPATH": OWN_MODULES}, "powershell"),
        ({"PSModulePath": f"C:\\Users\\Jo Doe\\Documents\\PowerShell\\Modules;{MODULES}"}, "powershell"),
        ({"PSMODULEPATH": MODULES, "PROMPT": "(env) $P$G"}, "cmd"),
        ({"PSMODULEPATH": OWN_MODULES, "PROMPT": "$P$G"}, ""),  # one was started from the other
        ({"PSMODULEPATH": MODULES}, ""),  # an IDE
        ({"SHELL": BASH}, "bash"),
        ({"SHELL": BASH, "PROMPT": "$P$G"}, ""),
        ({}, ""),
    ],
)
def test_shell_by_the_variables_that_it_sets(environ: dict[str, str], shell: str, tmp_path: Path) -> None:
    assert system.platform(windows_host(tmp_path, environ=environ)).shell == shell


def test_toolkit_of_windows(tmp_path: Path) -> None:
    root = "C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA"
    more = {f"{root}/v12.8/bin/nvcc.exe": b"", f"{root}/v11.8/bin/nvcc.exe": b""}
    host = windows_host(tmp_path, environ={"CUDA_PATH": f"{root}/v12.8".replace("/", "\\")}, more=more)
    toolkit = system.toolkit(host)
    assert (toolkit.nvcc, toolkit.version) == (f"{root}/v12.8/bin/nvcc.exe", "12.8")
    assert toolkit.folders == (f"{root}/v11.8", f"{root}/v12.8")


def test_kinds_of_environments(tmp_path: Path) -> None:
    store = "C:/Program Files/WindowsApps/PythonSoftwareFoundation.Python.3.13_3.13.752.0_x64__qbz5n2kfra8p0"
    host = windows_host(tmp_path, more={"C:/conda/conda-meta/history": ""})
    cases = {
        store: ("store", "pip"),
        BASE: ("system", "pip"),
        VENV: ("venv", "pip"),
        "C:/conda": ("conda", "conda"),
        "C:/Users/Jo Doe/.pyenv/pyenv-win/versions/3.12.4": ("pyenv", "pip"),
    }
    bases = {VENV: BASE}
    assert {prefix: python.environment(host, prefix, bases.get(prefix, prefix)) for prefix in cases} == cases


def test_other_pythons_are_those_that_py_lists(tmp_path: Path) -> None:
    torch = {"version.py": "__version__ = '2.13.0+cu130'\ncuda = '13.0'\n", "__init__.py": ""}
    more = {f"{BASE}/Lib/site-packages/torch/{name}": text for name, text in torch.items()}
    core = "Software/Python/PythonCore"
    place = {"": BASE.replace("/", "\\") + "\\", "ExecutablePath": BASE.replace("/", "\\") + "\\python.exe"}
    registry = {f"HKCU/{core}/3.13/InstallPath": place, f"HKLM/{core}/3.9/InstallPath": {"": "C:\\Python39\\"}}
    host = windows_host(tmp_path, more=more, registry=registry, environ={"PATH": ""})
    assert [*on_windows.pythons(host)] == [f"{BASE}/python.exe", "C:/Python39/python.exe"]
    assert [*python.others(host, VENV, ())] == [f"{BASE}/python.exe: torch 2.13.0+cu130"]


def test_alias_that_opens_the_store_is_not_an_interpreter(tmp_path: Path) -> None:
    folder = "C:/Users/Jo Doe/AppData/Local/Microsoft/WindowsApps"
    alias = f"{folder}/python.exe"
    assert python.interpreter(windows_host(tmp_path / "none", more={alias: b""}), alias) is None
    installed = f"{folder}/PythonSoftwareFoundation.Python.3.13_qbz5n2kfra8p0/python.exe"
    assert python.interpreter(windows_host(tmp_path / "some", more={alias: b"", installed: b""}), alias) is not None


def test_environment_in_the_current_folder_is_found(tmp_path: Path) -> None:
    host = windows_host(tmp_path)
    assert (f"{VENV}/Scripts/python.exe", "./.venv") in [*python.likely(host)]
    assert python.interpreter(host, f"{VENV}/Scripts/python.exe") == (f"{VENV}/Scripts/python.exe", VENV, "")
    assert python.interpreter(host, f"{BASE}/python.exe") == (f"{BASE}/python.exe", BASE, "")


@pytest.mark.parametrize("name", [VENV, VENV.replace("/", "\\"), ".venv\\Scripts\\python.exe", "~\\project\\.venv"])
def test_python_is_found_as_a_user_of_windows_names_it(tmp_path: Path, name: str) -> None:
    assert python.located(windows_host(tmp_path, python=name)) == (f"{VENV}/Scripts/python.exe", "")


@pytest.mark.skipif(os.name == "nt", reason="Windows itself may load the forged library")
def test_library_that_windows_finds_but_cannot_load_is_not_absent(tmp_path: Path) -> None:
    host = windows_host(tmp_path)
    (tmp_path / "C/Windows/System32/nvml.dll").unlink()
    machine = probe(torch=False, host=host)
    assert machine.driver.cuda.answer.state == "not-loadable"
    assert machine.driver.nvml.answer.state == "no-library"
    assert judge_machine(machine).machine.problems == {}
