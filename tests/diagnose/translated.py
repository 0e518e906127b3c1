"""The machines of the tests with Windows in place of Linux: its paths, its names of files, and none of Linux's parts.

So each cause that can exist there meets every machine on which it is found, with a user name and folders that need
quotes in every shell.
"""

from __future__ import annotations

import ntpath
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.diagnose.commands import variants
from tests.golden.record import machines

from transload.diagnose.saved import machine_from
from transload.machine import DriverLibraries, Hardware, Kernel, Library, Machine, Nodes, Platform, Surroundings

HOME = r"C:\Users\Jo O'Neil & Söhne (50%)"
SITE = rf"{HOME}\my env\Lib\site-packages"
SYSTEM32 = r"C:\Windows\System32"
SHELLS = ("powershell", "cmd", "", "bash")

_TEXTS = (
    (r"lib(?:cuda)\.so[.\d]*", "nvcuda.dll"),
    (r"libnvidia-ml\.so[.\d]*", "nvml.dll"),
    (r"\blib([\w+-]+)\.so[.\d]*", r"\1.dll"),
    (r"(\w)\.so\b", r"\1.pyd"),
    (r"cannot open shared object file(?:: No such file or directory)?", "The specified module could not be found"),
    (r"undefined symbol: \S+", "The specified procedure could not be found"),
    (r"not an ELF file", "not a Windows library"),
)
_FOLDERS = (
    (r"^/opt/venv/lib/python3\.\d+/site-packages", SITE),
    (r"^/opt/venv/bin/python$", rf"{HOME}\my env\Scripts\python.exe"),
    (r"^/opt/venv|^/opt/conda", rf"{HOME}\my env"),
    (r"^/usr/bin/python3", r"C:\Python 3.13\python.exe"),
    (r"^/usr/(?:lib/x86_64-linux-gnu|lib|bin)(?=/|$)", SYSTEM32),
    (r"^/home/user", HOME),
    (r"^/", r"C:\\"),
)


def translated() -> Iterator[Machine]:
    """Every machine of the tests as one of Windows."""
    for machine in (*map(machine_from, machines().values()), *variants()):
        yield on_windows(machine)


def on_windows(machine: Machine) -> Machine:
    """The machine with Windows; it keeps its card, its driver, its Python and its torch."""
    same = machine_from(_translate(machine.to_dict()))
    known = [lib for lib in same.driver.libraries.cuda or () if lib.kind in ("driver", "other")]
    cuda = tuple(Library("nvcuda.dll", lib.path, via="System32", problem=lib.problem) for lib in known[:1])
    driver = replace(
        same.driver,
        libraries=DriverLibraries(cuda=cuda, nvml=(), smi=rf"{SYSTEM32}\nvidia-smi.exe"),
        experiments=tuple(
            tried for tried in same.driver.experiments if not any("LD_" in name for name in tried.change)
        ),
    )
    through = {"RUNPATH": r"torch\lib", "ld.so.cache": "System32", "default folder": "System32"}
    needed = tuple(
        replace(lib, via=through.get(lib.via, f"PATH: {ntpath.dirname(lib.path)}") if lib.path else "")
        for lib in same.torch_libraries.needed
    )
    services = {"nvidia": "nvlddmkm", "nouveau": "BasicDisplay"}
    pci = same.hardware.pci
    if isinstance(pci, tuple):
        pci = tuple(replace(card, driver=services.get(card.driver, "")) for card in pci)
    values = {name: value for name, value in same.variables.values.items() if not name.startswith("LD_")}
    return replace(
        same,
        platform=Platform("Windows", "AMD64", "10.0.22631"),
        surroundings=Surroundings(),
        hardware=Hardware(pci),
        kernel=Kernel(loaded=same.kernel.loaded, version=same.kernel.version),
        nodes=Nodes(),
        driver=driver,
        torch_libraries=replace(same.torch_libraries, needed=needed),
        variables=replace(same.variables, values=values, origins={}),
    )


def _translate(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _translate(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_translate(member) for member in value]
    if not isinstance(value, str):
        return value
    for pattern, text in _TEXTS:
        value = re.sub(pattern, text, value)
    return " ".join(map(_path, re.split(" (?=/)", value)))


def _path(text: str) -> str:
    if not text.startswith("/"):
        return text
    for pattern, folder in _FOLDERS:
        text = re.sub(pattern, folder.replace("\\", "\\\\") if folder != r"C:\\" else folder, text)
    return text.replace("/", "\\")
