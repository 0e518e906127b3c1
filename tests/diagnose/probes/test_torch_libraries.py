"""Torch's binaries, in forged wheels: their architectures, and which of NVIDIA's libraries they would load."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.trees import Content, Link, tree_host
from tests.each import each
from tests.elf_forge import CUBIN, PTX, fatbin, library
from tests.fake_driver import returns

from transload.diagnose.elf import Loader
from transload.diagnose.host import Host
from transload.diagnose.probes.libraries import package_of, preloads, torch_libraries
from transload.machine import Python, Resolved, TorchInstall, TorchLibraries, Unknown

SITE = "/opt/venv/lib/python3.12/site-packages"
TORCH = f"{SITE}/torch"
NVIDIA = f"{SITE}/nvidia/cu13/lib"
CUDNN = f"{SITE}/nvidia/cudnn/lib"
SYSTEM = "/usr/lib/x86_64-linux-gnu"
RPATH = "$ORIGIN/../../nvidia/cudnn/lib:$ORIGIN/../../nvidia/cu13/lib:$ORIGIN"

PRELOAD_ON_ERROR = """
def _preload_cuda_deps(lib_folder, lib_name):
    pass
def _load_global_deps():
    try:
        ctypes.CDLL(path)
    except OSError as err:
        cuda_libs = {
            'cublas': 'libcublas.so.*[0-9]',
            'cuda_runtime': 'libcudart.so.*[0-9].*[0-9]',  # a comment
        }
        cuda_libs["cufile"] = "libcufile.so.*[0-9]"
if (USE_RTLD_GLOBAL_WITH_LIBTORCH or os.getenv('TORCH_USE_RTLD_GLOBAL')):
    pass
"""
PRELOAD_NVJITLINK = """
def _preload_cuda_deps(lib_folder, lib_name):
    pass
def _load_global_deps():
    try:
        ctypes.CDLL(path)
        if "nvidia/cuda_runtime/lib/libcudart.so" not in _maps:
            return
        _preload_cuda_deps("nvjitlink", "libnvJitLink.so.*[0-9]")
    except OSError as err:
        cuda_libs = {"cublas": "libcublas.so.*[0-9]"}
if (USE_RTLD_GLOBAL_WITH_LIBTORCH or os.getenv('TORCH_USE_RTLD_GLOBAL')):
    pass
"""
PRELOAD_ALL = """
def _preload_cuda_lib(lib_folder, lib_name, required=True):
    pass
def _preload_cuda_deps(err=None, required=True):
    cuda_libs = [
        ("cublas", "libcublasLt.so.*[0-9]"),
        ("nvjitlink", "libnvJitLink.so.*[0-9]"),
        ("cusparse", "libcusparse.so.*[0-9]"),
    ]
    _preload_cuda_lib("nvtx", "libnvToolsExt.so.*[0-9]", required=False)
def _load_global_deps():
    try:
        ctypes.CDLL(path)
        if "libcudart.so" not in _maps:
            return
        _preload_cuda_deps(required=False)
    except OSError as err:
        _preload_cuda_deps(err)
if (USE_RTLD_GLOBAL_WITH_LIBTORCH or os.getenv('TORCH_USE_RTLD_GLOBAL')):
    pass
"""


def lib(soname: str, *needed: str, **options: Any) -> bytes:
    return library(soname=soname, needed=needed, machine="x86_64", **options)


def record(name: str, version: str, *paths: str) -> dict[str, Content]:
    lines = "".join(f"{path.removeprefix(f'{SITE}/')},sha256=x,1\n" for path in paths)
    return {f"{SITE}/{name}-{version}.dist-info/RECORD": lines}


def wheel(init: str = PRELOAD_ON_ERROR, rpath: str = RPATH) -> dict[str, Content | None]:
    """A torch with CUDA 13, and NVIDIA's wheels beside it."""
    kernels = fatbin([(CUBIN, 75, b"a" * 8), (CUBIN, 90, b"b" * 8), (PTX, 90, b"c" * 8)])
    constants = b"x\0sm_75 sm_90 compute_90\0sm_\0sm_75 and more\0"
    dependencies = ("libcudart.so.13", "libcusparse.so.12", "libcudnn.so.9", "libc10.so")
    return {
        f"{TORCH}/__init__.py": init,
        f"{TORCH}/_C.cpython-312-x86_64-linux-gnu.so": lib("", "libtorch_python.so", rpath="$ORIGIN/lib"),
        f"{TORCH}/lib/libtorch_global_deps.so": lib("libtorch_global_deps.so", "libcudart.so.13", rpath=rpath),
        f"{TORCH}/lib/libtorch_python.so": lib(
            "libtorch_python.so", "libtorch_cuda.so", rpath=rpath, sections={".rodata": constants}
        ),
        f"{TORCH}/lib/libtorch_cuda.so": lib(
            "libtorch_cuda.so",
            *dependencies,
            rpath=rpath,
            sections={".nv_fatbin": kernels},
            undefined=["run@libcudart.so.13"],
        ),
        f"{TORCH}/lib/libc10.so": lib("libc10.so"),
        f"{NVIDIA}/libcudart.so.13": lib("libcudart.so.13", functions={"run@@libcudart.so.13": returns(0)}),
        f"{NVIDIA}/libcusparse.so.12": lib(
            *("libcusparse.so.12", "libnvJitLink.so.13"),
            runpath="$ORIGIN",
            undefined=["__link_13_1@libnvJitLink.so.13"],
        ),
        f"{NVIDIA}/libnvJitLink.so.13": lib(
            "libnvJitLink.so.13", functions={"__link_13_1@@libnvJitLink.so.13": returns(0)}
        ),
        f"{CUDNN}/libcudnn.so.9": lib("libcudnn.so.9", runpath="$ORIGIN", sections={".rodata": b"libcudnn_ops.so\0"}),
        **record("nvidia_cuda_runtime", "13.2.86", f"{NVIDIA}/libcudart.so.13"),
        **record("nvidia_cusparse", "12.7.10", f"{NVIDIA}/libcusparse.so.12"),
        **record("nvidia_nvjitlink", "13.5.37", f"{NVIDIA}/libnvJitLink.so.13"),
        **record("nvidia_cudnn_cu13", "9.20.0.48", f"{CUDNN}/libcudnn.so.9"),
    }


INSTALL = TorchInstall(TORCH, "2.15.0+cu132", "13.2")
SYS_PATH = ("/usr/lib/python3.12", SITE)


def probe(
    root: Path, tree: Mapping[str, Content | None], *, install: TorchInstall = INSTALL, **environ: str
) -> TorchLibraries:
    return torch_libraries(Loader(tree_host(root, tree, environ)), Python(path=SYS_PATH), install)


def by_name(facts: TorchLibraries) -> dict[str, Resolved]:
    return {resolved.name: resolved for resolved in facts.needed}


# -- a complete wheel


def test_complete_wheel(tmp_path: Path) -> None:
    facts = probe(tmp_path, wheel())
    assert facts.architectures == ("sm_75", "sm_90", "compute_90")
    assert facts.cubins == {"sm_75": 1, "sm_90": 1, "compute_90": 1}
    assert (facts.unresolved, facts.overlaps, facts.split_cudnn, facts.cwd_searched) == ((), (), (), ())
    path = f"{NVIDIA}/libcudart.so.13"
    assert by_name(facts)["libcudart.so.13"] == Resolved(
        *("libcudart.so.13", path, "RPATH", "libtorch_global_deps.so", "13.2.86", path, "nvidia-cuda-runtime")
    )
    assert by_name(facts)["libnvJitLink.so.13"].via == "RUNPATH"
    assert by_name(facts)["libnvJitLink.so.13"].needed_by == "libcusparse.so.12"
    assert set(by_name(facts)) == {"libcudart.so.13", "libcusparse.so.12", "libcudnn.so.9", "libnvJitLink.so.13"}
    assert not any(resolved.shadowed for resolved in facts.needed)


def test_current_directory_in_a_runpath(tmp_path: Path) -> None:
    path = f"{NVIDIA}/libnvJitLink.so.13"
    facts = probe(tmp_path, {**wheel(), path: lib("libnvJitLink.so.13", runpath="$ORIGIN:")})
    assert facts.cwd_searched == ("libnvJitLink.so.13: RUNPATH has an empty element",)


# -- missing and broken libraries


def test_missing_library_and_its_package(tmp_path: Path) -> None:
    cudnn = by_name(probe(tmp_path, {**wheel(), f"{CUDNN}/libcudnn.so.9": None}))["libcudnn.so.9"]
    assert (cudnn.path, cudnn.needed_by) == ("", "libtorch_cuda.so")
    assert (cudnn.expected, cudnn.package) == (f"{CUDNN}/libcudnn.so.9", "nvidia-cudnn-cu13")


def test_package_that_was_never_installed(tmp_path: Path) -> None:
    removed = {f"{CUDNN}/libcudnn.so.9": None, f"{SITE}/nvidia_cudnn_cu13-9.20.0.48.dist-info": None}
    cudnn = by_name(probe(tmp_path, {**wheel(), **removed}))["libcudnn.so.9"]
    assert (cudnn.path, cudnn.expected, cudnn.package) == ("", "", "nvidia-cudnn-cu13")


TRUNCATED = lib("libcudnn.so.9", section_headers=False)[:-1]


@each(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"text", "not an ELF file"),
        (TRUNCATED, f"cut off after {len(TRUNCATED)} of {len(TRUNCATED) + 1} bytes"),
    ],
)
def test_broken_library(tmp_path: Path, content: bytes, problem: str) -> None:
    cudnn = by_name(probe(tmp_path, {**wheel(), f"{CUDNN}/libcudnn.so.9": content}))["libcudnn.so.9"]
    assert (cudnn.path, cudnn.problem, cudnn.shadowed) == (f"{CUDNN}/libcudnn.so.9", problem, False)


def test_missing_library_that_is_not_nvidias(tmp_path: Path) -> None:
    c10 = by_name(probe(tmp_path, {**wheel(), f"{TORCH}/lib/libc10.so": None}))["libc10.so"]
    assert (c10.path, c10.package, c10.needed_by) == ("", "", "libtorch_cuda.so")


def test_libraries_of_the_driver_are_not_listed(tmp_path: Path) -> None:
    lazy = {f"{TORCH}/lib/libcaffe2_nvrtc.so": lib("libcaffe2_nvrtc.so", "libcuda.so.1", "libnvrtc.so.13")}
    needed = by_name(probe(tmp_path, {**wheel(), **lazy}))
    assert "libcuda.so.1" not in needed
    assert (needed["libnvrtc.so.13"].path, needed["libnvrtc.so.13"].package) == ("", "nvidia-cuda-nvrtc")


def test_torch_folder_without_libraries(tmp_path: Path) -> None:
    facts = probe(tmp_path, {f"{TORCH}/version.py": ""})
    assert isinstance(facts.architectures, Unknown)
    assert facts.cubins == Unknown("libtorch_cuda.so: not there, or not for this machine")
    assert [resolved.name for resolved in facts.needed] == ["libtorch_global_deps.so"]


def test_library_for_another_machine(tmp_path: Path) -> None:
    tree = {**wheel(), f"{TORCH}/lib/libtorch_cuda.so": library(machine="aarch64")}
    facts = probe(tmp_path, tree)
    assert isinstance(facts.cubins, Unknown)
    assert by_name(facts)["libtorch_cuda.so"].path == ""


# -- libraries from elsewhere


def test_system_library_replaces_a_missing_one(tmp_path: Path) -> None:
    tree = {
        **wheel(),
        f"{NVIDIA}/libcudart.so.13": None,
        f"{SYSTEM}/libcudart.so.13": Link("libcudart.so.13.0.96"),
        f"{SYSTEM}/libcudart.so.13.0.96": lib("libcudart.so.13", functions={"run@@libcudart.so.13": returns(0)}),
    }
    cudart = by_name(probe(tmp_path, tree))["libcudart.so.13"]
    assert (cudart.path, cudart.via, cudart.version) == (f"{SYSTEM}/libcudart.so.13", "default folder", "13.0.96")
    assert cudart.shadowed
    assert cudart.expected == f"{NVIDIA}/libcudart.so.13"


OLD_LINKER = {
    "/opt/cuda/lib64/libnvJitLink.so.13": lib(
        "libnvJitLink.so.13", functions={"__link_13_0@@libnvJitLink.so.13": returns(0)}
    )
}
UNRESOLVED = ("__link_13_1 of libnvJitLink.so.13, needed by libcusparse.so.12",)


def test_ld_library_path_shadows_a_library_found_by_runpath(tmp_path: Path) -> None:
    facts = probe(tmp_path, {**wheel(), **OLD_LINKER}, LD_LIBRARY_PATH="/opt/cuda/lib64")
    linker = by_name(facts)["libnvJitLink.so.13"]
    assert (linker.path, linker.via, linker.shadowed) == ("/opt/cuda/lib64/libnvJitLink.so.13", "LD_LIBRARY_PATH", True)
    assert facts.unresolved == UNRESOLVED


def test_ld_library_path_does_not_affect_a_torch_that_preloads(tmp_path: Path) -> None:
    facts = probe(tmp_path, {**wheel(PRELOAD_ALL), **OLD_LINKER}, LD_LIBRARY_PATH="/opt/cuda/lib64")
    linker = by_name(facts)["libnvJitLink.so.13"]
    assert (linker.path, linker.via) == (f"{NVIDIA}/libnvJitLink.so.13", "loaded")
    assert facts.unresolved == ()


def test_preloading_ends_at_the_first_library_that_fails(tmp_path: Path) -> None:
    broken = {f"{NVIDIA}/libcublasLt.so.13": lib("libcublasLt.so.13", "libnowhere.so")}
    facts = probe(tmp_path, {**wheel(PRELOAD_ALL), **OLD_LINKER, **broken}, LD_LIBRARY_PATH="/opt/cuda/lib64")
    assert facts.unresolved == UNRESOLVED


def test_torch_that_preloads_only_beside_its_own_runtime(tmp_path: Path) -> None:
    """The path of this libcudart has no ``nvidia/cuda_runtime`` in it, so this torch does not preload."""
    facts = probe(tmp_path, {**wheel(PRELOAD_NVJITLINK), **OLD_LINKER}, LD_LIBRARY_PATH="/opt/cuda/lib64")
    assert facts.unresolved == UNRESOLVED
    runtime = f"{SITE}/nvidia/cuda_runtime/lib/libcudart.so.13"
    tree = {
        **wheel(PRELOAD_NVJITLINK, rpath=f"$ORIGIN/../../nvidia/cuda_runtime/lib:{RPATH}"),
        runtime: lib("libcudart.so.13", functions={"run@@libcudart.so.13": returns(0)}),
        **OLD_LINKER,
    }
    assert probe(tmp_path / "other", tree, LD_LIBRARY_PATH="/opt/cuda/lib64").unresolved == ()


def test_torch_preloads_libraries_that_its_rpath_does_not_find(tmp_path: Path) -> None:
    """Its RPATH finds nothing if torch and NVIDIA's packages are in different folders of sys.path."""
    tree = wheel(rpath="$ORIGIN")
    tree[f"{TORCH}/lib/libtorch_global_deps.so"] = lib("", "libcudart.so.13", rpath="$ORIGIN")
    source = PRELOAD_ON_ERROR.replace("'cublas': 'libcublas.so.*[0-9]',", "")
    tree[f"{TORCH}/__init__.py"] = source.replace("libcudart.so.*[0-9].*[0-9]", "libcudart.so.*[0-9]")
    tree[f"{NVIDIA}/libcufile.so.0"] = lib("libcufile.so.0")
    needed = by_name(probe(tmp_path, tree))
    assert (needed["libcudart.so.13"].path, needed["libcudart.so.13"].via) == (f"{NVIDIA}/libcudart.so.13", "loaded")


def test_runtime_from_ld_preload(tmp_path: Path) -> None:
    tree = {**wheel(), "/opt/libcudart.so.13": lib("libcudart.so.13")}
    facts = probe(tmp_path, tree, LD_PRELOAD="/opt/libcudart.so.13")
    assert (by_name(facts)["libcudart.so.13"].via, by_name(facts)["libcudart.so.13"].shadowed) == ("LD_PRELOAD", True)


def test_conda_uses_its_own_library_although_wheels_exist(tmp_path: Path) -> None:
    tree = {**wheel(rpath="$ORIGIN/../../../..:$ORIGIN"), "/opt/venv/lib/libcudart.so.13": lib("libcudart.so.13")}
    cudart = by_name(probe(tmp_path, tree))["libcudart.so.13"]
    assert (cudart.path, cudart.expected, cudart.shadowed) == ("/opt/venv/lib/libcudart.so.13", "", False)


def test_libraries_bundled_with_torch(tmp_path: Path) -> None:
    tree = wheel()
    name = "libcudart-e409450e.so.11.0"
    tree[f"{TORCH}/lib/libtorch_global_deps.so"] = lib("", name, rpath="$ORIGIN")
    tree[f"{TORCH}/lib/{name}"] = lib(name)
    cudart = by_name(probe(tmp_path, tree))[name]
    assert (cudart.path, cudart.expected, cudart.package) == (f"{TORCH}/lib/{name}",) * 2 + ("torch",)


def test_system_library_that_is_too_old(tmp_path: Path) -> None:
    tree = {
        **wheel(),
        f"{TORCH}/lib/libc10.so": lib("libc10.so", "libstdc++.so.6", undefined=["f@GLIBCXX_3.4.32@libstdc++.so.6"]),
        f"{SYSTEM}/libstdc++.so.6": lib("libstdc++.so.6", functions={"f@@GLIBCXX_3.4.28": returns(0)}),
    }
    assert probe(tmp_path, tree).unresolved == ("GLIBCXX_3.4.32 of libstdc++.so.6, needed by libc10.so",)


def test_library_without_symbol_versions_is_accepted(tmp_path: Path) -> None:
    tree = {
        **wheel(),
        f"{TORCH}/lib/libc10.so": lib("libc10.so", "libstdc++.so.6", undefined=["f@GLIBCXX_3.4.32@libstdc++.so.6"]),
        f"{SYSTEM}/libstdc++.so.6": lib("libstdc++.so.6", functions={"f": returns(0)}),
    }
    assert probe(tmp_path, tree).unresolved == ()


def test_two_packages_with_the_same_files(tmp_path: Path) -> None:
    tree = {
        **wheel(),
        **record("nvidia_cudnn_cu12", "9.1.0.70", f"{CUDNN}/libcudnn.so.9", f"{CUDNN}/libcudnn_adv.so.9"),
    }
    assert probe(tmp_path, tree).overlaps == (
        f"{CUDNN}/libcudnn.so.9: nvidia-cudnn-cu12 9.1.0.70, nvidia-cudnn-cu13 9.20.0.48",
    )


# -- sub-libraries of cuDNN


def test_cudnn_sublibraries_from_ld_library_path(tmp_path: Path) -> None:
    parts: dict[str, Content] = {
        f"{CUDNN}/libcudnn_ops.so.9": lib("libcudnn_ops.so.9"),
        "/opt/cudnn/libcudnn_ops.so.9": Link("libcudnn_ops.so.9.5.1"),
        "/opt/cudnn/libcudnn_ops.so.9.5.1": lib("libcudnn_ops.so.9"),
        "/opt/cudnn/libcudnn_adv.so.9": lib("libcudnn_adv.so.9"),  # unknown to this release
    }
    facts = probe(tmp_path, {**wheel(), **parts}, LD_LIBRARY_PATH="/opt/cudnn")
    assert facts.split_cudnn == ("libcudnn_ops.so.9: /opt/cudnn/libcudnn_ops.so.9, by LD_LIBRARY_PATH",)


def test_cudnn_sublibraries_of_the_same_release_are_accepted(tmp_path: Path) -> None:
    parts: dict[str, Content] = {
        "/opt/cudnn/libcudnn_ops.so.9": Link("libcudnn_ops.so.9.20.0"),
        "/opt/cudnn/libcudnn_ops.so.9.20.0": lib("libcudnn_ops.so.9"),
    }
    assert probe(tmp_path, {**wheel(), **parts}, LD_LIBRARY_PATH="/opt/cudnn").split_cudnn == ()


def test_cudnn_with_an_rpath_finds_its_own_sublibraries(tmp_path: Path) -> None:
    parts: dict[str, Content] = {
        f"{CUDNN}/libcudnn.so.9": lib("libcudnn.so.9", rpath="$ORIGIN", sections={".rodata": b"libcudnn_ops.so\0"}),
        f"{CUDNN}/libcudnn_ops.so.9": lib("libcudnn_ops.so.9"),
        "/opt/cudnn/libcudnn_ops.so.9": lib("libcudnn_ops.so.9"),
    }
    assert probe(tmp_path, {**wheel(), **parts}, LD_LIBRARY_PATH="/opt/cudnn").split_cudnn == ()


@each("knows", [True, False])
def test_cudnn_sublibrary_missing_in_the_wheel_but_on_the_system(tmp_path: Path, *, knows: bool) -> None:
    constants = b"libcudnn_engines_tensor_ir.so\0" if knows else b"nothing\0"
    parts: dict[str, Content] = {
        f"{CUDNN}/libcudnn_graph.so.9": lib("libcudnn_graph.so.9", runpath="$ORIGIN", sections={".rodata": constants}),
        f"{SYSTEM}/libcudnn_engines_tensor_ir.so.9": lib("libcudnn_engines_tensor_ir.so.9"),
    }
    name = "libcudnn_engines_tensor_ir.so.9"
    expected = (f"{name}: {SYSTEM}/{name}, by default folder",) if knows else ()
    assert probe(tmp_path, {**wheel(), **parts}).split_cudnn == expected


# -- other builds and other systems


def test_cpu_build(tmp_path: Path) -> None:
    facts = probe(tmp_path, wheel(), install=TorchInstall(TORCH, "2.13.0+cpu"))
    assert (facts.architectures, facts.cubins) == ((), {})


def test_build_for_one_architecture(tmp_path: Path) -> None:
    python = {f"{TORCH}/lib/libtorch_python.so": lib("", sections={".rodata": b"\0sm_90a\0"})}
    assert probe(tmp_path, {**wheel(), **python}).architectures == ("sm_90a",)


def test_rocm_build(tmp_path: Path) -> None:
    python = {f"{TORCH}/lib/libtorch_python.so": lib("", sections={".rodata": b"\0gfx906 gfx90a gfx1100\0"})}
    facts = probe(tmp_path, {**wheel(), **python}, install=TorchInstall(TORCH, "2.13.0+rocm7.1", hip="7.1"))
    assert facts.architectures == ("gfx906", "gfx90a", "gfx1100")
    assert facts.cubins == {}


def test_kernels_in_several_libraries(tmp_path: Path) -> None:
    """torch 1.13 had its kernels in three libraries."""
    libraries = {
        f"{TORCH}/lib/libtorch_cuda.so": lib("libtorch_cuda.so"),
        f"{TORCH}/lib/libtorch_cuda_cu.so": lib("", sections={".nv_fatbin": fatbin([(CUBIN, 37, b"x")])}),
        f"{TORCH}/lib/libtorch_cuda_cpp.so": lib("", sections={".nv_fatbin": fatbin([(CUBIN, 37, b"x")])}),
        f"{TORCH}/lib/libtorch_cuda_linalg.so": lib("", sections={".nv_fatbin": fatbin([(CUBIN, 20, b"x")])}),
    }
    assert probe(tmp_path, {**wheel(), **libraries}).cubins == {"sm_37": 2}


def test_architectures_on_windows(tmp_path: Path) -> None:
    tree = {f"{TORCH}/lib/torch_python.dll": b"MZ\0\0sm_75 sm_120\0"}
    host = tree_host(tmp_path, tree, uname=("Windows", "10", "AMD64"))
    assert torch_libraries(Loader(host), Python(path=SYS_PATH), INSTALL).architectures == ("sm_75", "sm_120")


def test_architectures_are_unknown_in_constants_with_prefixes_only(tmp_path: Path) -> None:
    python = {f"{TORCH}/lib/libtorch_python.so": lib("", sections={".rodata": b"\0sm_" * 100_000})}
    assert isinstance(probe(tmp_path, {**wheel(), **python}).architectures, Unknown)


# -- what torch preloads


def test_preloads_are_read_from_the_source_of_torch() -> None:
    runtime = ("cuda_runtime", "libcudart.so.*[0-9].*[0-9]", True)
    rescue = [("cublas", "libcublas.so.*[0-9]", True), runtime, ("cufile", "libcufile.so.*[0-9]", True)]
    assert preloads(PRELOAD_ON_ERROR) == ([], "", rescue)
    linker = ("nvjitlink", "libnvJitLink.so.*[0-9]", True)
    assert preloads(PRELOAD_NVJITLINK) == ([linker], "nvidia/cuda_runtime/lib/libcudart.so", rescue[:1])
    always, _, rescue = preloads(PRELOAD_ALL)
    assert [name.partition(".")[0] for _, name, _ in always] == [
        "libcublasLt",
        "libnvJitLink",
        "libcusparse",
        "libnvToolsExt",
    ]
    assert [required for _, _, required in always] == [False] * 4
    assert [required for _, _, required in rescue] == [True, True, True, False]


@each("source", ["", "import torch", "def _preload_cuda_deps(", "\0" * 100])
def test_source_without_preloads(source: str) -> None:
    assert preloads(source) == ([], "", [])


def test_preloads_of_the_installed_torch_are_understood() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs torch")
    source = Path(spec.origin).read_text(encoding="utf-8")
    _, marker, rescue = preloads(source)
    expected = {"libcublas", "libcudnn", "libnccl", *(["libnvJitLink"] if "libnvJitLink" in source else [])}
    assert expected <= {name.partition(".")[0] for _, name, _ in rescue}
    assert marker.endswith("libcudart.so") or "not in _maps" not in source


@each(
    ("name", "cuda", "package"),
    [
        ("libcudart.so.12", "12.6", "nvidia-cuda-runtime-cu12"),
        ("libcufft.so.12", "13.0", "nvidia-cufft"),
        ("libcudnn.so.9", "13.0", "nvidia-cudnn-cu13"),
        ("libcudnn_ops_infer.so.8", "12.1", "nvidia-cudnn-cu12"),
        ("libnvToolsExt.so.1", "12.4", "nvidia-nvtx-cu12"),
        ("libnvshmem_host.so.3", "13.2", "nvidia-nvshmem-cu13"),
        ("libgomp.so.1", "13.2", ""),
        ("libcudart.so.13", "", ""),
    ],
)
def test_package_of_a_library(name: str, cuda: str, package: str) -> None:
    assert package_of(name, cuda) == package


def test_installed_torch_lacks_no_library() -> None:
    """A real torch of any build: nothing it needs is missing, since these tests import it."""
    spec = importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        pytest.skip("needs a Linux build of torch")
    facts = torch_libraries(
        Loader(Host()), Python(path=tuple(sys.path)), TorchInstall(str(Path(spec.origin).parent), known=False)
    )
    assert [resolved for resolved in facts.needed if not resolved.path or resolved.problem] == []
    assert facts.unresolved == ()
