"""Which DLLs Windows loads with torch, in forged trees."""

from __future__ import annotations

import importlib.util
import ntpath
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tests.diagnose.windows_torch import NEEDS_Z, PYTHON, TORCH, WHOLE, Files, Z
from tests.diagnose.windows_trees import BASE, SYSTEM, VENV, WindowsTree, windows_host
from tests.each import each
from tests.elf_forge import CUBIN, PTX, fatbin
from tests.pe_forge import dll

from transload.diagnose.elf import Loader
from transload.diagnose.host import Host
from transload.diagnose.probes.dlls import DllImport
from transload.diagnose.probes.libraries import torch_libraries
from transload.machine import Python, Resolved, TorchInstall, TorchLibraries, Unknown


def examined(root: Path, more: Files, cuda: str = "", **environ: str) -> TorchLibraries:
    host = windows_host(root, cards=(), more={**WHOLE, **more}, environ=environ)
    return torch_libraries(Loader(host), PYTHON, TorchInstall(TORCH, "2.13.0", cuda=cuda))


def found(root: Path, more: Files, cuda: str = "", **environ: str) -> list[Resolved]:
    """What is found for the DLLs of others than torch, Windows, Python and Visual C++."""
    usual = ("msvcp140.dll", "vcruntime140.dll")
    return [lib for lib in examined(root, more, cuda, **environ).needed if lib.name.lower() not in usual]


def test_whole_torch(tmp_path: Path) -> None:
    libraries = examined(tmp_path, {})
    assert libraries.needed == (
        Resolved(
            *("VCRUNTIME140.dll", f"{BASE}/vcruntime140.dll", "the folder of python.exe"),
            *("python313.dll", "14.42.34226.3"),
        ),
        Resolved("msvcp140.dll", f"{SYSTEM}/msvcp140.dll", "System32", "torch", "14.44.35211.0"),
    )
    assert libraries.unresolved == ()
    assert libraries.toolset == "14.42"
    assert 2 << 16 <= libraries.committed < 3 << 16


def test_architectures_of_torchs_kernels(tmp_path: Path) -> None:
    kernels = {".nv_fatbin": fatbin([(CUBIN, 75, b"x"), (CUBIN, 90, b"x"), (PTX, 120, b"x")])}
    more: Files = {
        f"{TORCH}/lib/torch_cuda.dll": dll(fatbins=kernels),
        f"{TORCH}/lib/torch_cuda_linalg.dll": dll(fatbins={".nv_fatbin": fatbin([(CUBIN, 50, b"x")])}),
    }
    assert examined(tmp_path / "1", more, "12.8").cubins == {"sm_75": 1, "sm_90": 1, "compute_120": 1}
    absent = examined(tmp_path / "2", {}, "12.8").cubins
    assert isinstance(absent, Unknown)
    assert absent.reason.startswith("torch_cuda.dll: ")


@each(
    "folder, via",
    [
        (BASE, "the folder of python.exe"),
        (f"{VENV}/Library/bin", "Library\\bin"),
        (f"{BASE}/Library/bin", "Library\\bin"),
        ("C:/Users/Jo Doe/AppData/Roaming/Python/Library/bin", "Library\\bin"),
        (f"{VENV}/bin", "bin"),
        ("C:/Program Files/NVIDIA Corporation/NvToolsExt/bin/x64", "NVTOOLSEXT_PATH"),
        ("C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA/v12.8/bin", "CUDA_PATH_V12_8"),
        ("C:/Windows", "the folder of Windows"),
        ("C:/Users/Jo Doe/project", "the current directory"),
        ("C:/tools/bin", "PATH: C:\\tools\\bin"),
    ],
)
def test_folder_in_which_a_dll_is_found(tmp_path: Path, folder: str, via: str) -> None:
    more: Files = {f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z, f"{folder}/z.DLL": Z}
    libraries = found(tmp_path, more, "12.8", PATH="C:\\other;C:\\tools\\bin\\")
    assert libraries == [Resolved("Z.dll", f"{folder}/z.DLL", via, "torch_cpu.dll", "1.2.3.4")]


def test_dll_that_is_nowhere(tmp_path: Path) -> None:
    more: Files = {f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z}
    assert found(tmp_path, more) == [Resolved("Z.dll", needed_by="torch_cpu.dll")]


def test_runtime_that_is_nowhere(tmp_path: Path) -> None:
    libraries = examined(tmp_path, {f"{SYSTEM}/msvcp140.dll": None})
    assert libraries.needed[1:] == (Resolved("MSVCP140.dll", needed_by="c10.dll"),)


def test_first_file_of_a_name_is_taken(tmp_path: Path) -> None:
    """Folders that torch adds come before PATH, and PATH is searched only for what they do not have."""
    more: Files = {
        f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z,
        f"{VENV}/Library/bin/z.dll": Z,
        "C:/tools/z.dll": Z,
        "C:/Users/Jo Doe/project/z.dll": Z,
    }
    assert [lib.via for lib in found(tmp_path / "1", more, PATH="C:\\tools")] == ["Library\\bin"]
    del more[f"{VENV}/Library/bin/z.dll"]
    assert [lib.via for lib in found(tmp_path / "2", more, PATH="C:\\tools")] == ["the current directory"]


def test_second_try_takes_a_stranger_instead_of_torchs_own(tmp_path: Path) -> None:
    """Without flags, the current directory comes before the folders that torch puts into PATH."""
    more: Files = {
        f"{TORCH}/lib/a.dll": dll(imports={"later.dll": ["f"], "Z.dll": ["deflate"]}),
        f"{TORCH}/lib/later.dll": dll(exports=["f"]),
        "C:/Users/Jo Doe/project/later.dll": dll(exports=["f"]),
        "C:/tools/z.dll": Z,
    }
    stranger = found(tmp_path, more, PATH="C:\\tools")[0]
    assert stranger.path == "C:/Users/Jo Doe/project/later.dll"
    assert stranger.expected == f"{TORCH}/lib/later.dll"
    assert stranger.shadowed


def test_dll_for_another_processor_is_skipped(tmp_path: Path) -> None:
    more: Files = {f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z, "C:/a/z.dll": dll(machine="x86")}
    assert found(tmp_path / "1", more, PATH="C:\\a;C:\\b") == [
        Resolved("Z.dll", "C:/a/z.dll", "PATH: C:\\a", "torch_cpu.dll", problem="for another machine (x86)")
    ]
    assert [lib.path for lib in found(tmp_path / "2", {**more, "C:/b/z.dll": Z}, PATH="C:\\a;C:\\b")] == ["C:/b/z.dll"]
    own = found(tmp_path / "3", {f"{TORCH}/lib/libomp.dll": dll(machine="ARM64")})
    assert [(lib.name, lib.problem) for lib in own] == [("libomp.dll", "for another machine (ARM64)")]


def test_search_ends_at_a_damaged_dll(tmp_path: Path) -> None:
    more: Files = {
        f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z,
        "C:/a/z.dll": Z[:-100],
        "C:/b/z.dll": Z,
    }
    (lib,) = found(tmp_path, more, PATH="C:\\a;C:\\b")
    assert (lib.path, lib.problem) == ("C:/a/z.dll", f"cut off after {len(Z) - 100} of {len(Z)} bytes")


def test_functions_that_are_missing(tmp_path: Path) -> None:
    more: Files = {
        f"{TORCH}/lib/c10.dll": dll(exports=["other"]),
        f"{TORCH}/lib/libomp.dll": dll(imports={"Z.dll": ["deflate", "inflate", "#1", "#9"]}),
        f"{VENV}/Library/bin/z.dll": Z,
        f"{BASE}/python313.dll": dll(exports=["Py_Main"]),
    }
    assert sorted(examined(tmp_path, more).unresolved) == [
        "#9 of Z.dll, needed by libomp.dll",
        "Py_New of python313.dll, needed by _C.cp313-win_amd64.pyd",
        "Py_New of python313.dll, needed by torch_python.dll",
        "alloc of c10.dll, needed by torch_cpu.dll",
        "alloc of c10.dll, needed by torch_python.dll",
        "inflate of Z.dll, needed by libomp.dll",
    ]


def test_delayed_dll_is_needed_later(tmp_path: Path) -> None:
    """The driver's may be missing, and is not torch's matter."""
    more: Files = {f"{TORCH}/lib/libomp.dll": dll(delayed=["late.dll", "nvcuda.dll"])}
    assert found(tmp_path / "1", more) == [Resolved("late.dll", via="delayed", needed_by="libomp.dll")]
    assert found(tmp_path / "2", {**more, f"{SYSTEM}/late.dll": b""}) == []


def test_known_dll_is_taken_from_system32(tmp_path: Path) -> None:
    more: Files = {
        **WHOLE,
        f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z,
        f"{BASE}/z.dll": Z,
        f"{SYSTEM}/z.dll": b"",
    }
    assert [lib.via for lib in found(tmp_path / "1", more)] == ["the folder of python.exe"]
    key = "HKLM/SYSTEM/CurrentControlSet/Control/Session Manager/KnownDLLs"
    host = windows_host(tmp_path / "2", cards=(), more=more, registry={key: {"z": "z.dll"}})
    needed = torch_libraries(Loader(host), PYTHON, TorchInstall(TORCH)).needed
    assert [lib.name for lib in needed] == ["VCRUNTIME140.dll", "msvcp140.dll"]


def test_files_without_windows_say_nothing(tmp_path: Path) -> None:
    more: Files = {f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z, f"{SYSTEM}/kernel32.dll": None}
    assert found(tmp_path, more) == []


def test_python_that_runs_has_its_own_dlls(tmp_path: Path) -> None:
    """Programs that embed Python keep them elsewhere."""
    assert found(tmp_path / "1", {f"{BASE}/python313.dll": None, f"{BASE}/vcruntime140.dll": None}) == []
    other: Files = {f"{TORCH}/lib/libomp.dll": dll(imports={"python312.dll": ["Py_New"]})}
    assert [lib.name for lib in found(tmp_path / "2", other)] == ["python312.dll"]


def test_what_is_in_a_folder_that_may_not_be_listed_is_not_missing(tmp_path: Path) -> None:
    host = windows_host(tmp_path, cards=(), more={**WHOLE, f"{TORCH}/lib/torch_cpu.dll": NEEDS_Z, f"{BASE}/bin/x": ""})
    host = replace(host, environ={**host.environ, "PATH": f"{BASE}/bin"})

    def listdir(self: WindowsTree, path: str) -> tuple[str, ...] | Unknown:
        return Unknown(f"{path}: permission denied") if path == f"{BASE}/bin" else Host.listdir(self, path)

    with mock.patch.object(WindowsTree, "listdir", listdir):
        needed = torch_libraries(Loader(host), PYTHON, TorchInstall(TORCH)).needed
    assert [lib.name for lib in needed if not lib.path] == []
    assert [lib.name for lib in torch_libraries(Loader(host), PYTHON, TorchInstall(TORCH)).needed if not lib.path] == [
        "Z.dll"
    ]


MAPPED = """
import torch
from transload.diagnose.probes.ask import mapped
for *_, path in mapped():
    print(path)
"""


@pytest.mark.skipif(sys.platform != "win32", reason="needs Windows")
def test_windows_loads_the_same_files(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs torch")
    asked = subprocess.run([sys.executable, "-c", MAPPED], cwd=tmp_path, capture_output=True, text=True, check=True)
    real = {ntpath.basename(path).lower(): ntpath.normcase(path) for path in asked.stdout.splitlines()}
    host = Host()
    prefixes = (prefix.replace("\\", "/") for prefix in (sys.prefix, sys.base_prefix))
    python = Python(host.python, platform.python_version(), prefix=next(prefixes), base_prefix=next(prefixes))
    imported = DllImport(host, python, TorchInstall(ntpath.dirname(spec.origin).replace("\\", "/")))
    loaded = {name: ntpath.normcase(dll.path) for name, dll in imported.process.loaded.items() if dll.path}
    assert "torch_cpu.dll" in loaded
    assert {name: real.get(name) for name in loaded} == loaded
    assert [dll for dll in imported.needed() if not dll.path or dll.problem] == []
    assert list(imported.unresolved()) == []
