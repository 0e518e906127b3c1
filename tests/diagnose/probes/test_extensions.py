"""Packages with CUDA extensions, as forged files: their architectures, and whether they fit the installed torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.diagnose.trees import Content, Tree, tree_host
from tests.diagnose.windows_torch import PYTHON, WHOLE
from tests.diagnose.windows_torch import TORCH as WINDOWS_TORCH
from tests.diagnose.windows_trees import SYSTEM, VENV, windows_host
from tests.each import each
from tests.elf_forge import CUBIN, PTX, fatbin, library
from tests.fake_driver import returns
from tests.pe_forge import dll

from transload.diagnose.elf import Loader
from transload.diagnose.probes.libraries import extensions
from transload.machine import ExtensionPackage, Python, TorchInstall

SITE = "/opt/venv/lib/python3.12/site-packages"
TORCH = f"{SITE}/torch"
SET_DEVICE, SET_DEVICE_OLD = "_ZN3c104cuda9SetDeviceEab", "_ZN3c104cuda9SetDeviceEi"


def lib(soname: str, *needed: str, **options: Any) -> bytes:
    return library(soname=soname, needed=needed, machine="x86_64", **options)


def torch() -> dict[str, Content]:
    defined = {name: returns(0) for name in (SET_DEVICE, "_ZTVN5torch8autograd4NodeE", "aoti_torch_empty")}
    return {
        f"{TORCH}/_C.cpython-312-x86_64-linux-gnu.so": lib("", "libtorch_python.so", rpath="$ORIGIN/lib"),
        f"{TORCH}/lib/libtorch_global_deps.so": lib("libtorch_global_deps.so"),
        f"{TORCH}/lib/libtorch_python.so": lib("libtorch_python.so", "libc10_cuda.so", rpath="$ORIGIN"),
        f"{TORCH}/lib/libc10_cuda.so": lib("libc10_cuda.so", functions=defined),
    }


def dist(name: str, version: str, *files: str, needs: str = "torch", site: str = SITE) -> dict[str, Content]:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {needs}\n\ntext\n"
    lines = "".join(f"{file},sha256=x,1\n" for file in (*files, f"{name}/__init__.py"))
    folder = f"{site}/{name}-{version}.dist-info"
    return {f"{folder}/METADATA": metadata, f"{folder}/RECORD": lines}


KERNELS = {".nv_fatbin": fatbin([(CUBIN, 80, b"a" * 8), (CUBIN, "90a", b"b" * 8), (PTX, 90, b"c" * 8)])}
INSTALL = TorchInstall(TORCH, "2.8.0+cu128", "12.8")


def probe(
    root: Path, tree: Mapping[str, Content], install: TorchInstall | None = INSTALL, path: tuple[str, ...] = (SITE,)
) -> tuple[ExtensionPackage, ...]:
    return extensions(Loader(tree_host(root, {**torch(), **tree})), Python("/usr/bin/python3", path=path), install)


def probe_one(root: Path, tree: Mapping[str, Content], install: TorchInstall | None = INSTALL) -> ExtensionPackage:
    (extension,) = probe(root, tree, install)
    return extension


FLASH = "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so"


def flash(**options: Any) -> dict[str, Content]:
    defaults: dict[str, Any] = {
        "undefined": [SET_DEVICE, "_ZTVN5torch8autograd4NodeE", "PyList_New"],
        "sections": KERNELS,
    }
    return {
        **dist("flash_attn", "2.8.3", FLASH),
        f"{SITE}/{FLASH}": lib("", "libc10_cuda.so", **{**defaults, **options}),
    }


def test_unrelated_package_is_not_an_extension(tmp_path: Path) -> None:
    assert probe(tmp_path, dist("numpy", "2.1", "numpy/_core.so")) == ()


def test_extension_that_fits(tmp_path: Path) -> None:
    assert probe_one(tmp_path, flash()) == ExtensionPackage(
        "flash-attn", "2.8.3", f"{SITE}/{FLASH}", architectures=("sm_80", "sm_90a", "compute_90")
    )


def test_symbols_missing_in_this_torch(tmp_path: Path) -> None:
    """Symbols of other libraries and weak symbols do not count."""
    extension = probe_one(
        tmp_path, flash(undefined=[SET_DEVICE_OLD, SET_DEVICE, "_ZN6vision3nmsE"], weak=["_ZN2at4weakE"])
    )
    assert extension.undefined == (SET_DEVICE_OLD,)


@each("name", ["_ZNK2at6Tensor3fooEv", "_ZTIN5torch3BarE", "_Z16THPVariable_Wrapv", "aoti_torch_new"])
def test_symbols_that_belong_to_torch(tmp_path: Path, name: str) -> None:
    assert probe_one(tmp_path, flash(undefined=[name])).undefined == (name,)


@each("name", ["_ZN10torchaudio3fooEv", "_ZNSt6vectorIN3c106DeviceEE3fooEv", "cudaMalloc", "_ZN4at_xE"])
def test_symbols_that_do_not_belong_to_torch(tmp_path: Path, name: str) -> None:
    assert probe_one(tmp_path, flash(undefined=[name])).undefined == ()


def test_symbols_defined_by_the_package_itself(tmp_path: Path) -> None:
    files = ("fbgemm_gpu/a.so", "fbgemm_gpu/b.so")
    tree: dict[str, Content] = {
        **dist("fbgemm_gpu", "1.3.0", *files),
        f"{SITE}/{files[0]}": lib("a.so", undefined=["_ZN2at3ownEv"], sections=KERNELS),
        f"{SITE}/{files[1]}": lib("b.so", functions={"_ZN2at3ownEv": returns(0)}),
    }
    assert probe_one(tmp_path, tree).undefined == ()


def test_missing_libraries(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        **dist("xformers", "0.0.35", "xformers/_C.so"),
        f"{SITE}/xformers/_C.so": lib("", "libcudart.so.12", "libc10_cuda.so", "libcuda.so.1", sections=KERNELS),
    }
    assert probe_one(tmp_path, tree).missing == ("libcudart.so.12",)


def test_cuda_extension_beside_a_cpu_build(tmp_path: Path) -> None:
    cpu_build = {f"{TORCH}/lib/libtorch_python.so": lib("libtorch_python.so"), f"{TORCH}/lib/libc10_cuda.so": b""}
    extension = probe_one(tmp_path, {**flash(), **cpu_build}, TorchInstall(TORCH, "2.8.0+cpu"))
    assert extension.missing == ("libc10_cuda.so",)
    assert SET_DEVICE in extension.undefined


def test_library_for_another_ffmpeg_is_ignored(tmp_path: Path) -> None:
    files = ("torchcodec/core4.so", "torchcodec/core.so")
    tree: dict[str, Content] = {
        **dist("torchcodec", "0.17.0", *files),
        f"{SITE}/{files[0]}": lib("", "libavcodec.so.58", "libc10_cuda.so", undefined=[SET_DEVICE_OLD]),
        f"{SITE}/{files[1]}": lib("", "libc10_cuda.so"),
    }
    extension = probe_one(tmp_path, tree)
    assert (extension.missing, extension.undefined) == ((), ())


def test_worst_of_several_libraries_and_architectures_of_all(tmp_path: Path) -> None:
    files = ("vllm/_C.so", "vllm/_moe_C.so")
    tree: dict[str, Content] = {
        **dist("vllm", "0.10.0", *files, needs="torch==2.7.1"),
        f"{SITE}/{files[0]}": lib("", sections=KERNELS),
        f"{SITE}/{files[1]}": lib(
            "", undefined=[SET_DEVICE_OLD], sections={".nv_fatbin": fatbin([(CUBIN, 75, b"x"), (CUBIN, 100, b"x")])}
        ),
    }
    extension = probe_one(tmp_path, tree)
    assert extension.library == f"{SITE}/vllm/_moe_C.so"
    assert extension.architectures == ("sm_75", "sm_80", "sm_90a", "sm_100", "compute_90")
    assert (extension.undefined, extension.wants_torch) == ((SET_DEVICE_OLD,), "==2.7.1")


# -- bitsandbytes has a library for every CUDA


def bitsandbytes(*numbers: int) -> dict[str, Content]:
    files = {f"bitsandbytes/libbitsandbytes_cuda{number}.so": number for number in numbers}
    others = ("bitsandbytes/libbitsandbytes_cpu.so", "bitsandbytes/libbitsandbytes_rocm64.so")
    tree = dist("bitsandbytes", "0.50.2", *files, *others)
    for file, number in files.items():
        tree[f"{SITE}/{file}"] = lib("", sections={".nv_fatbin": fatbin([(CUBIN, number - 100, b"x")])})
    return {**tree, f"{SITE}/{others[0]}": lib(""), f"{SITE}/{others[1]}": lib("", "libhipblas.so.2")}


@each(("cuda", "number"), [("12.8", 128), ("12.6", 124), ("12.0", 121), ("13.2", 130), ("11.8", 118)])
def test_bitsandbytes_uses_the_library_for_torchs_cuda(tmp_path: Path, cuda: str, number: int) -> None:
    extension = probe_one(tmp_path, bitsandbytes(118, 121, 124, 128, 130), TorchInstall(TORCH, "2.8.0", cuda))
    assert extension.library == f"{SITE}/bitsandbytes/libbitsandbytes_cuda{number}.so"
    assert (extension.architectures, extension.missing) == ((f"sm_{number - 100}",), ())


def test_bitsandbytes_without_a_library_for_this_cuda(tmp_path: Path) -> None:
    extension = probe_one(tmp_path, bitsandbytes(118, 126), TorchInstall(TORCH, "2.15.0+cu132", "13.2"))
    assert extension.missing == ("libbitsandbytes_cuda132.so",)


@each("install", [TorchInstall(TORCH, "2.8.0+cpu"), None])
def test_bitsandbytes_beside_a_cpu_build_or_without_torch(tmp_path: Path, install: TorchInstall | None) -> None:
    extension = probe_one(tmp_path, bitsandbytes(126), install)
    assert (extension.library, extension.missing) == (f"{SITE}/bitsandbytes/libbitsandbytes_cpu.so", ())


# -- metadata


@each(
    ("needs", "expected"),
    [
        ("torch==2.8.0", "==2.8.0"),
        ("torch (==2.8.0)", "==2.8.0"),
        ("torch >=2.4, <3", ">=2.4,<3"),
        ("torch", ""),
        ('torch==2.8.0 ; platform_system == "Linux"', "==2.8.0"),
        ('torch==2.8.0 ; extra == "gpu"', ""),
        ("torchvision==0.23", ""),
    ],
)
def test_required_torch_version(tmp_path: Path, needs: str, expected: str) -> None:
    assert probe_one(tmp_path, dist("torchvision", "0.23.0", needs=needs)).wants_torch == expected


def test_local_part_of_a_version(tmp_path: Path) -> None:
    assert probe_one(tmp_path, dist("torch_scatter", "2.1.2+pt28cu128")).local == "pt28cu128"


def test_local_part_from_the_version_file(tmp_path: Path) -> None:
    version_file = {f"{SITE}/torchvision/version.py": "__version__ = '0.23.0+cpu'\ngit_version = 'x'\n"}
    extension = probe_one(tmp_path, {**dist("torchvision", "0.23.0"), **version_file})
    assert (extension.version, extension.local) == ("0.23.0+cpu", "cpu")


def test_version_file_of_another_release_is_ignored(tmp_path: Path) -> None:
    version_file = {f"{SITE}/torchvision/version.py": "__version__ = '0.20.0+cpu'\n"}
    assert probe_one(tmp_path, {**dist("torchvision", "0.23.0"), **version_file}).version == "0.23.0"


# -- location


def test_first_copy_on_the_path_counts(tmp_path: Path) -> None:
    user = "/home/user/.local/lib/python3.12/site-packages"
    tree: dict[str, Content] = {**dist("xformers", "0.0.35"), **dist("xformers", "0.0.20", site=user)}
    assert [extension.version for extension in probe(tmp_path, tree, path=(user, SITE))] == ["0.0.20"]


def test_extension_without_a_record(tmp_path: Path) -> None:
    folder = f"{SITE}/causal_conv1d-1.4.0.egg-info"
    top = f"{SITE}/causal_conv1d_cuda.cpython-312-x86_64-linux-gnu.so"
    tree: dict[str, Content] = {
        f"{folder}/PKG-INFO": "Version: 1.4.0\n\n",
        top: lib("", sections=KERNELS),
        f"{SITE}/other.so": lib(""),
    }
    extension = probe_one(tmp_path, tree)
    assert (extension.package, extension.version, extension.library) == ("causal-conv1d", "1.4.0", top)


def test_extension_without_torch(tmp_path: Path) -> None:
    extension = probe_one(tmp_path, flash(undefined=[SET_DEVICE_OLD]), None)
    assert (extension.architectures, extension.undefined) == (("sm_80", "sm_90a", "compute_90"), ())
    assert extension.missing == ("libc10_cuda.so",)


def test_other_systems_report_only_the_metadata(tmp_path: Path) -> None:
    host = tree_host(tmp_path, flash(), uname=("Darwin", "25.1.0", "arm64"))
    python = Python("/usr/bin/python3", path=(SITE,))
    assert extensions(Loader(host), python, INSTALL) == (ExtensionPackage("flash-attn", "2.8.3"),)


# -- Windows

WINDOWS_SITE = f"{VENV}/Lib/site-packages"
ALLOCATE = "?alloc@c10@@YAPEAX_K@Z"
WINDOWS_KERNELS = {".nv_fatbin": KERNELS[".nv_fatbin"]}
PYD = "flash_attn_2_cuda.cp313-win_amd64.pyd"


def on_windows(root: Path, tree: Tree, install: TorchInstall | None = None) -> ExtensionPackage:
    host = windows_host(root, cards=(), more={**WHOLE, f"{SYSTEM}/msvcp140.dll": dll(exports=["lock"]), **tree})
    python = replace(PYTHON, path=(WINDOWS_SITE,))
    install = install or TorchInstall(WINDOWS_TORCH, "2.13.0+cu128", "12.8")
    (extension,) = extensions(Loader(host), python, install)
    return extension


def pyd(**options: Any) -> dict[str, Content]:
    needs = {"python313.dll": ["Py_New"], "c10.dll": ["alloc"], "MSVCP140.dll": ["lock"], "nvcuda.dll": ["cuInit"]}
    return {
        **dist("flash_attn", "2.8.3", PYD, site=WINDOWS_SITE),
        f"{WINDOWS_SITE}/{PYD}": dll(**{"imports": needs, "fatbins": WINDOWS_KERNELS, **options}),
    }


def test_extension_that_fits_on_windows(tmp_path: Path) -> None:
    assert on_windows(tmp_path, pyd()) == ExtensionPackage(
        "flash-attn", "2.8.3", f"{WINDOWS_SITE}/{PYD}", architectures=("sm_80", "sm_90a", "compute_90")
    )


def test_functions_missing_in_this_torch_on_windows(tmp_path: Path) -> None:
    """Only those of torch's own libraries count."""
    needs = {"c10.dll": [ALLOCATE, "alloc"], "torch_cpu.dll": ["gone"], "MSVCP140.dll": ["unlock"]}
    extension = on_windows(tmp_path, pyd(imports=needs))
    assert (extension.undefined, extension.missing) == ((ALLOCATE, "gone"), ())


@each(
    ("name", "missing"),
    [("cudart64_12.dll", ("cudart64_12.dll",)), ("python312.dll", ("python312.dll",)), ("nvml.dll", ())],
)
def test_dlls_missing_for_an_extension(tmp_path: Path, name: str, missing: tuple[str, ...]) -> None:
    assert on_windows(tmp_path, pyd(imports={name: ["f"]})).missing == missing


@each("place", [f"{WINDOWS_SITE}/flash_attn.libs/own.dll", f"{WINDOWS_SITE}/own.dll", f"{WINDOWS_TORCH}/lib/own.dll"])
def test_dlls_beside_an_extension_are_found(tmp_path: Path, place: str) -> None:
    """Packages add the folders of their own DLLs to the search."""
    files = (PYD, place.removeprefix(f"{WINDOWS_SITE}/"))
    tree = {**pyd(imports={"own.dll": ["f"]}), **dist("flash_attn", "2.8.3", *files, site=WINDOWS_SITE)}
    assert on_windows(tmp_path, {**tree, place: dll(exports=["f"])}).missing == ()


def test_library_of_bitsandbytes_on_windows(tmp_path: Path) -> None:
    names = [f"bitsandbytes/libbitsandbytes_cuda{number}.dll" for number in (118, 126, 130)]
    tree = dist("bitsandbytes", "0.50.2", *names, site=WINDOWS_SITE)
    tree |= {f"{WINDOWS_SITE}/{name}": dll(imports={"cudart64_12.dll": ["f"]}) for name in names}
    extension = on_windows(tmp_path / "1", tree)
    assert (extension.library, extension.missing) == (f"{WINDOWS_SITE}/{names[1]}", ("cudart64_12.dll",))
    newer = TorchInstall(WINDOWS_TORCH, "2.13.0+cu140", "14.0")
    assert on_windows(tmp_path / "2", tree, newer).missing == ("libbitsandbytes_cuda140.dll",)


def test_garbage_in_packages(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        **dist("xformers", "0.0.35", "xformers/text.so", "xformers/none.so", "../../../escape.so", "a\0b.so"),
        f"{SITE}/xformers/text.so": "text",
        f"{SITE}/vllm-.dist-info/RECORD": b"\xff\xfe\0",
        f"{SITE}/apex-0.1.dist-info/METADATA": b"\xff" * 100,
    }
    extensions_by_name = {extension.package: extension for extension in probe(tmp_path, tree)}
    assert extensions_by_name["xformers"] == ExtensionPackage("xformers", "0.0.35")
    assert extensions_by_name["apex"].version == "0.1"
