"""Windows machines with one fault each, or none, from the registry and the files to the diagnosis.

As in ``scenarios``, child processes query forged drivers, which are native copies outside the tree of the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tests.diagnose.machines import healthy, in_windows, install, with_facts, without_gpu
from tests.diagnose.trees import GTX_1080, H200, RTX_5090, Card, Content, write
from tests.diagnose.windows_torch import NEEDS_Z, PYTHON, TORCH, WHOLE
from tests.diagnose.windows_trees import (
    BASE,
    MACHINE_VARIABLES,
    MEMORY,
    SYSTEM,
    USER_VARIABLES,
    Adapter,
    Value,
    WindowsTree,
    basic,
    undriven,
    windows_host,
)
from tests.diagnose.words import OF_LINUX
from tests.elf_forge import NATIVE
from tests.fake_driver import Device as Gpu
from tests.fake_driver import fake_libcuda, fake_nvml, hangs, numbers
from tests.pe_forge import dll

from transload.diagnose.elf import Loader
from transload.diagnose.probes import _native as native
from transload.diagnose.probes import probe
from transload.diagnose.probes.libraries import torch_libraries
from transload.diagnose.report import Diagnosis, judge_machine, report
from transload.io.limits import MemoryStatus
from transload.machine import ExtensionPackage, Machine, Torch, TorchLibraries, TorchRun
from transload.render.lines import as_text

ADA = (Gpu("NVIDIA GeForce RTX 4090", (8, 9)),)
INTEL = Adapter(Card("Intel(R) UHD Graphics 770", 0x4680, "0000:00:02.0", 0x030000), 0x8086, "igfxn", "Intel")
RADEON = Adapter(Card("AMD Radeon RX 7900 XTX", 0x744C, "0000:03:00.0", 0x030000), 0x1002, "amdwddmg", "AMD")
STORE = (
    "C:\\Users\\user\\AppData\\Local\\Packages\\PythonSoftwareFoundation.Python.3.13_qbz5n2kfra8p0"
    "\\LocalCache\\local-packages\\Python313\\site-packages"
)
"""Where the Store's Python installs packages."""
XFORMERS = ExtensionPackage(
    "xformers", "0.0.35", rf"{TORCH}/../xformers/_C.pyd".replace("/", "\\"), undefined=("torch_library_impl",)
)
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class WindowsScenario:
    """How a machine differs from a PC with an RTX 4090, its driver and a torch for it."""

    truth: str
    """The codes of all causes, in order, joined with ``+``; empty if nothing is wrong."""
    cards: tuple[Adapter, ...] = (Adapter(),)
    init: int = 0
    nvml: int = 0
    version: int = 13000
    driver: str = "581.80"
    gpus: tuple[Gpu, ...] = ADA
    model: int = 0
    """The driver model: 0 for WDDM, 1 for TCC, 2 for MCDM."""
    hangs: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    registry: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    more: Mapping[str, Content] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    faulty_variable: str = ""
    confirmed: bool = True
    torch: str = "13.0"
    """The CUDA version of torch: empty for a CPU build, ``-`` for no torch."""
    memory: MemoryStatus = MEMORY
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the machine, its Python or its torch, as ``with_facts`` takes them."""


@dataclass(frozen=True)
class WindowsScenarioHost(WindowsTree):
    """A host whose child processes load the libraries in the folder ``native``."""

    faulty_variable: str = ""
    native: str = ""

    def real(self, path: str) -> str:
        if "/" in path:
            return super().real(path)
        repaired = self.faulty_variable and self.faulty_variable not in self.environ
        return f"{self.native}/{'repaired/' if repaired else ''}{path}"


def make_host(scenario: WindowsScenario, root: Path) -> WindowsScenarioHost:
    host = windows_host(
        root / "tree",
        cards=scenario.cards,
        environ=scenario.environ,
        registry=scenario.registry,
        more={**WHOLE, **scenario.more},
        without=scenario.without,
        confirmed=scenario.confirmed,
    )
    model = {"nvmlDeviceGetDriverModel_v2": numbers(scenario.model, scenario.model)}
    overrides = {"cuInit": hangs()} if scenario.hangs else {}
    cuda = fake_libcuda(
        init=scenario.init, version=scenario.version, devices=scenario.gpus, overrides=overrides, machine=NATIVE
    )
    nvml = fake_nvml(
        init=scenario.nvml,
        driver=scenario.driver,
        cuda=scenario.version,
        devices=scenario.gpus,
        overrides=model,
        machine=NATIVE,
    )
    libraries = {"nvcuda.dll": cuda, "nvml.dll": nvml}
    for name, library in libraries.items():
        if host.exists(f"{SYSTEM}/{name}"):
            broken = scenario.more.get(f"{SYSTEM}/{name}")
            write(root / "native", {f"/{name}": broken if isinstance(broken, bytes) else library})
    if scenario.faulty_variable:
        works = fake_libcuda(devices=scenario.gpus, machine=NATIVE)
        write(root / "native", {"/repaired/nvcuda.dll": works, "/repaired/nvml.dll": nvml})
    values = {item.name: getattr(host, item.name) for item in fields(host)} | {"status": scenario.memory}
    return WindowsScenarioHost(**values, faulty_variable=scenario.faulty_variable, native=str(root / "native"))


def windows_machine(scenario: WindowsScenario, root: Path) -> Machine:
    """The facts from the probes, with a Python and a torch of Windows."""
    host = make_host(scenario, root)
    machine = probe(torch=False, host=host)
    reference = in_windows(healthy())
    installed, libraries = reference.torch, reference.torch_libraries
    if scenario.torch in ("", "-"):
        installed = in_windows(without_gpu()).torch if scenario.torch == "" else Torch(installs=())
        libraries = TorchLibraries(architectures=(), cubins={})
    elif installed.first:
        version = f"2.13.0+cu{scenario.torch.replace('.', '')}"
        build = replace(installed.first, location=TORCH, version=version, cuda=scenario.torch)
        installed = native(Torch(installs=(build,)))
        dlls: TorchLibraries = native(torch_libraries(Loader(host), PYTHON, build))
        libraries = replace(dlls, architectures=libraries.architectures, cubins=libraries.cubins)
    machine = replace(
        machine,
        python=reference.python,
        torch=installed,
        torch_libraries=libraries,
        torch_run=TorchRun(),
        extensions=(),
    )
    return with_facts(machine, **scenario.facts)


def diagnose_windows(scenario: WindowsScenario, root: Path) -> Diagnosis:
    return judge_machine(windows_machine(scenario, root))


def wrong_windows_diagnosis(name: str, folder: Path) -> list[str]:
    """A message if the scenario ``name`` is diagnosed wrongly or has findings it should not; words of Linux."""
    scenario = WINDOWS_SCENARIOS[name]
    diagnosis = diagnose_windows(scenario, folder)
    named = "+".join(finding.code for finding in diagnosis.findings if finding.severity != "note")
    findings = [(finding.code, finding.title, finding.evidence) for finding in diagnosis.findings]
    right = named == scenario.truth and not diagnosis.machine.problems
    words = [line for line in as_text(report(diagnosis)).splitlines() if OF_LINUX.search(line)]
    return [*words, *([] if right else [f"not {scenario.truth!r} but {findings} {diagnosis.machine.problems}"])]


def problem(code: int) -> WindowsScenario:
    """A card for which the device manager shows this code: its driver answers that there is no card."""
    truth = {22: "W03", 43: "W04", 14: "W06"}.get(code, "W05")
    return WindowsScenario(truth, (Adapter(problem=code),), init=100, nvml=9, gpus=())


NO_DRIVER = WindowsScenario("W01", (undriven(),))
WINDOWS_SCENARIOS: dict[str, WindowsScenario] = {
    # nothing is wrong
    "WDDM": WindowsScenario(""),
    "laptop with two GPUs": WindowsScenario("", (INTEL, Adapter())),
    "TCC server": WindowsScenario("", (INTEL, Adapter(H200)), gpus=(Gpu(),), model=1),
    "MCDM server": WindowsScenario("", (Adapter(H200),), gpus=(Gpu(),), model=2),
    "devices that cannot be confirmed": WindowsScenario("", confirmed=False),
    "card that was replaced": WindowsScenario("", (Adapter(GTX_1080, present=False), Adapter())),
    "WSL beside": WindowsScenario("", environ={"WSLENV": "WT_SESSION", "WT_SESSION": "1"}),
    "toolkit beside": WindowsScenario("", environ={"CUDA_PATH": "C:\\Program Files\\CUDA", "CUDA_PATH_V12_8": "C:\\x"}),
    "AMD card": WindowsScenario("", (RADEON,), torch=""),
    "no card, CPU build": WindowsScenario("", (INTEL,), torch=""),
    "no card, CUDA build": WindowsScenario("", (INTEL,)),
    "external card that is not connected": WindowsScenario(
        "", (INTEL, Adapter(present=False)), init=100, nvml=9, gpus=(), torch=""
    ),
    "no card at all": WindowsScenario("", (), torch=""),
    "one of two cards chosen": WindowsScenario("", environ={"CUDA_VISIBLE_DEVICES": "0"}),
    # the card
    "disabled": problem(22),
    "stopped": problem(43),
    "restart needed": problem(14),
    "driver that does not load": problem(31),
    "damaged driver": problem(39),
    "unsigned driver": problem(52),
    "too few resources": problem(12),
    "disabled, CPU build": replace(problem(22), truth="T02+W03", torch=""),
    # its driver
    "no driver": NO_DRIVER,
    "no driver, CPU build": replace(NO_DRIVER, truth="T02+W01", torch=""),
    "no driver, no torch": replace(NO_DRIVER, truth="P01+W01", torch="-"),
    "Microsoft's driver": WindowsScenario("W01", (basic(),)),
    "Microsoft's driver, unconfirmed": WindowsScenario("W01", (basic(),), confirmed=False),
    "driver without nvcuda.dll": WindowsScenario("U06", without=(f"{SYSTEM}/nvcuda.dll",)),
    "nvcuda.dll is not a library": WindowsScenario("U13", more={f"{SYSTEM}/nvcuda.dll": b"this is no library"}),
    "nvcuda.dll is empty": WindowsScenario("U13", more={f"{SYSTEM}/nvcuda.dll": b""}),
    "driver too old for torch": WindowsScenario(
        "V01", (Adapter(version="31.0.15.2849"),), version=12000, driver="528.49"
    ),
    "driver too old for the card": WindowsScenario(
        "K09", (Adapter(RTX_5090, version="32.0.15.6094"),), init=100, nvml=9, version=12070, driver="560.94", gpus=()
    ),
    "driver hangs": WindowsScenario("X02", hangs=True),
    "cuInit 999": WindowsScenario("X08", init=999),
    # variables
    "hidden by a variable of the process": WindowsScenario(
        "E01", init=100, environ=HIDDEN, faulty_variable="CUDA_VISIBLE_DEVICES"
    ),
    "hidden by a variable of the user": WindowsScenario(
        "E01", init=100, environ=HIDDEN, faulty_variable="CUDA_VISIBLE_DEVICES", registry={USER_VARIABLES: HIDDEN}
    ),
    "hidden by a variable of the machine": WindowsScenario(
        "E01", init=100, environ=HIDDEN, faulty_variable="CUDA_VISIBLE_DEVICES", registry={MACHINE_VARIABLES: HIDDEN}
    ),
    # its DLLs
    "no Visual C++ runtime": WindowsScenario("W10", without=(f"{SYSTEM}/msvcp140.dll",)),
    "old Visual C++ runtime": WindowsScenario(
        "W11", more={f"{SYSTEM}/msvcp140.dll": dll(exports=["lock"], version="14.29.30133.0")}
    ),
    "Visual C++ runtime that lacks a function": WindowsScenario(
        "W11", more={f"{SYSTEM}/msvcp140.dll": dll(exports=["other"], version="14.0.24215.1")}
    ),
    "OpenMP of Visual Studio": WindowsScenario(
        "W12", more={f"{TORCH}/lib/fbgemm.dll": dll(imports={"libomp140.x86_64.dll": ["omp_get_num_threads"]})}
    ),
    "DLL of another program": WindowsScenario(
        "W13",
        more={f"{TORCH}/lib/libomp.dll": NEEDS_Z, "C:/tools/z.dll": dll(exports=["old"])},
        environ={"PATH": "C:\\tools"},
    ),
    "DLLs of two releases": WindowsScenario("W14", more={f"{TORCH}/lib/c10.dll": dll(exports=["other"])}),
    "early release of Python": WindowsScenario("W14", more={f"{BASE}/python313.dll": dll(exports=["Py_Main"])}),
    "DLL for ARM64": WindowsScenario("W15", more={f"{TORCH}/lib/libomp.dll": dll(machine="ARM64")}),
    "32-bit DLL in PATH": WindowsScenario(
        "W15",
        more={f"{TORCH}/lib/libomp.dll": NEEDS_Z, "C:/tools/z.dll": dll(machine="x86")},
        environ={"PATH": "C:\\tools"},
    ),
    "commit limit": WindowsScenario(
        "W16",
        more={f"{TORCH}/lib/libomp.dll": dll(writable=1 << 30)},
        memory=MemoryStatus(32 << 30, 20 << 30, 32 << 30, 1 << 29),
    ),
    "DLL that is nowhere": WindowsScenario("L10", more={f"{TORCH}/lib/libomp.dll": NEEDS_Z}),
    "DLL that is not one": WindowsScenario("L10", more={f"{TORCH}/lib/libomp.dll": b"404 Not Found"}),
    # Python
    "32-bit Python": WindowsScenario("P08", torch="-", facts={"python__bits": 32, "python__machine": "x86"}),
    "Windows on Arm": WindowsScenario("P01", (), torch="-", facts={"platform__machine": "ARM64"}),
    "Python of the Store, torch cut off": WindowsScenario(
        "W07",
        torch="",
        facts={
            "python__environment": "store",
            "torch__installs": (replace(install(), location=f"{STORE}\\torch", missing=("lib/c10.dll: absent",)),),
        },
    ),
    # packages beside torch
    "package for another torch": WindowsScenario("P06", facts={"extensions": (XFORMERS,)}),
    "package without code for the card": WindowsScenario(
        "A03",
        facts={"extensions": (ExtensionPackage("xformers", "0.0.35", architectures=("sm_75", "sm_80")),)},
        cards=(Adapter(RTX_5090),),
        gpus=(Gpu("NVIDIA GeForce RTX 5090", (12, 0)),),
    ),
    # torch
    "CPU build": WindowsScenario("T02", torch=""),
    "no torch": WindowsScenario("P01", torch="-"),
}
