"""The driver's libraries: which one the loader takes, which others are on the disk, and what each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.diagnose.trees import FOLDER, Content, Link, tree_host
from tests.each import each
from tests.elf_forge import library

from transload.diagnose.elf import Loader
from transload.diagnose.probes.libraries import driver_libraries
from transload.machine import DriverLibraries, Library, Unknown

DEBIAN = "/usr/lib/x86_64-linux-gnu"
VERSION = "580.65.06"


def driver(name: str = "libcuda.so.1", **options: str) -> bytes:
    return library(soname=name, machine=options.get("machine", "x86_64"))


def installed(folder: str = DEBIAN, version: str = VERSION) -> dict[str, Content]:
    """The files of a driver, as its installer places them."""
    tree: dict[str, Content] = {}
    for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        tree[f"{folder}/{stem}.so.{version}"] = driver(f"{stem}.so.1")
        tree[f"{folder}/{stem}.so.1"] = Link(f"{stem}.so.{version}")
    return tree


def probe(root: Path, tree: Mapping[str, Content], **environ: str) -> DriverLibraries:
    return driver_libraries(Loader(tree_host(root, tree, environ)))


def cuda_candidates(root: Path, tree: Mapping[str, Content], **environ: str) -> tuple[Library, ...]:
    candidates = probe(root, tree, **environ).cuda
    assert isinstance(candidates, tuple)
    return candidates


def test_installed_driver(tmp_path: Path) -> None:
    facts = probe(tmp_path, {**installed(), "/usr/bin/nvidia-smi": b""}, PATH="/nowhere:/usr/bin")
    target = f"{DEBIAN}/libcuda.so.{VERSION}"
    assert facts.cuda == (Library("libcuda.so.1", f"{DEBIAN}/libcuda.so.1", target, "default folder", VERSION),)
    assert facts.nvml
    assert facts.nvml[0].version == VERSION
    assert isinstance(facts.ptx_compiler, tuple)
    assert len(facts.ptx_compiler) == 1
    assert (facts.smi, facts.preload, facts.cwd_searched) == ("/usr/bin/nvidia-smi", (), ())


def test_no_driver(tmp_path: Path) -> None:
    assert probe(tmp_path, {}) == DriverLibraries((), (), ())


def test_folder_with_two_names_counts_once(tmp_path: Path) -> None:
    candidates = cuda_candidates(tmp_path, {**installed(), "/lib": Link("usr/lib")})
    assert [candidate.path for candidate in candidates] == ["/lib/x86_64-linux-gnu/libcuda.so.1"]


def test_stub_on_ld_library_path_wins(tmp_path: Path) -> None:
    stubs = "/usr/local/cuda-12.8/targets/x86_64-linux/lib/stubs"
    tree: dict[str, Content] = {
        **installed(),
        f"{stubs}/libcuda.so": driver(),
        "/opt/build/libcuda.so.1": Link(f"{stubs}/libcuda.so"),
    }
    candidates = cuda_candidates(tmp_path, tree, LD_LIBRARY_PATH="/opt/build")
    assert [(candidate.kind, candidate.via, candidate.version) for candidate in candidates] == [
        ("stub", "LD_LIBRARY_PATH", ""),
        ("driver", "default folder", VERSION),
    ]
    assert candidates[0].target == f"{stubs}/libcuda.so"


def test_stub_and_compat_outside_the_search_path_come_last(tmp_path: Path) -> None:
    compat = "/usr/local/cuda-13.0/compat"
    tree: dict[str, Content] = {
        **installed(),
        **installed(compat, "580.95.05"),
        "/usr/local/cuda": Link("cuda-13.0"),
        "/usr/local/cuda-13.0/lib64/stubs/libcuda.so": driver(),
    }
    candidates = cuda_candidates(tmp_path, tree)
    assert [(candidate.kind, candidate.via, candidate.version) for candidate in candidates] == [
        ("driver", "default folder", VERSION),
        ("compat", "disk", "580.95.05"),
        ("stub", "disk", ""),
    ]


def test_compat_library_on_ld_library_path_wins(tmp_path: Path) -> None:
    tree: dict[str, Content] = {**installed(), **installed("/usr/local/cuda/compat", "570.124.06")}
    facts = probe(tmp_path, tree, LD_LIBRARY_PATH="/usr/local/cuda/compat")
    assert facts.libcuda
    assert (facts.libcuda.kind, facts.libcuda.version) == ("compat", "570.124.06")


@each(
    "folder",
    ["/usr/lib64", "/opt/nvidia/lib64", "/run/opengl-driver/lib", "/usr/lib/nvidia-470", "/usr/local/nvidia/lib64"],
)
def test_driver_outside_the_search_path(tmp_path: Path, folder: str) -> None:
    loader = {
        "/lib64/ld-linux-x86-64.so.2": b"\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0"
    }
    facts = probe(tmp_path, {**installed(folder), **loader})
    assert facts.libcuda is None
    assert [(candidate.path, candidate.via) for candidate in facts.cuda or ()] == [(f"{folder}/libcuda.so.1", "disk")]


def test_wsl_library_and_nvidia_smi(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/usr/lib/wsl/lib/libcuda.so.1": driver(),
        "/usr/lib/wsl/lib/nvidia-smi": b"",
        **installed(),
    }
    facts = probe(tmp_path, tree, LD_LIBRARY_PATH="/usr/lib/wsl/lib")
    assert [candidate.kind for candidate in facts.cuda or ()] == ["wsl", "driver"]
    assert facts.smi == "/usr/lib/wsl/lib/nvidia-smi"


def test_jetson_library(tmp_path: Path) -> None:
    folder = "/usr/lib/aarch64-linux-gnu/tegra"
    tree: dict[str, Content] = {
        f"{folder}/libcuda.so.1.1": driver(machine="aarch64"),
        f"{folder}/libcuda.so.1": Link("libcuda.so.1.1"),
    }
    host = tree_host(tmp_path, tree, {"LD_LIBRARY_PATH": folder}, uname=("Linux", "5.15.148-tegra", "aarch64"))
    libcuda = driver_libraries(Loader(host)).libcuda
    assert libcuda
    assert (libcuda.kind, libcuda.version, libcuda.problem) == ("driver", "", "")


@each(("content", "problem"), [(b"", "empty"), (b"ELF? No.\n", "not an ELF file"), (FOLDER, "not a regular file")])
def test_loader_stops_at_a_broken_file(tmp_path: Path, content: Content, problem: str) -> None:
    candidates = cuda_candidates(tmp_path, {**installed(), "/opt/libcuda.so.1": content}, LD_LIBRARY_PATH="/opt")
    assert [(candidate.via, candidate.problem) for candidate in candidates] == [
        ("LD_LIBRARY_PATH", problem),
        ("default folder", ""),
    ]


def test_loader_skips_foreign_and_dangling_files(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        **installed(),
        "/opt/a/libcuda.so.1": driver(machine="aarch64"),
        "/opt/b/libcuda.so.1": Link("libcuda.so.550.54"),
        "/opt/c/libcuda.so.1": b"\x7fELF\x01\x01" + bytes(12) + b"\x03" + bytes(60),
    }
    candidates = cuda_candidates(tmp_path, tree, LD_LIBRARY_PATH="/opt/a:/opt/b:/opt/c")
    assert [(candidate.path, candidate.via, candidate.problem) for candidate in candidates] == [
        (f"{DEBIAN}/libcuda.so.1", "default folder", ""),
        ("/opt/a/libcuda.so.1", "disk", "for another machine (aarch64)"),
        ("/opt/b/libcuda.so.1", "disk", "a link to libcuda.so.550.54, which does not exist"),
        ("/opt/c/libcuda.so.1", "disk", "for another machine (i386, 32 bits)"),
    ]


def test_preloaded_libcuda(tmp_path: Path) -> None:
    tree: dict[str, Content] = {**installed(), "/opt/shim.so": driver(), "/opt/other.so": driver("libother.so")}
    candidates = cuda_candidates(tmp_path, tree, LD_PRELOAD="/opt/other.so:/opt/shim.so")
    assert [(candidate.path, candidate.via, candidate.kind) for candidate in candidates[:1]] == [
        ("/opt/shim.so", "LD_PRELOAD", "other")
    ]


def test_libraries_listed_in_ld_so_preload(tmp_path: Path) -> None:
    facts = probe(tmp_path, {"/etc/ld.so.preload": "/opt/vgpu.so\n"})
    assert facts.preload == ("/opt/vgpu.so",)


@each(
    ("name", "constants"),
    [
        ("libcuda.so.1", b"x\0Version 580.159.04. Copyright (C) 2026 NVIDIA Corporation. All rights reserved.\0"),
        ("libnvidia-ml.so.1", b"x\0" + b"13.580.159.04\0" + b"535.54.02\0"),
    ],
)
def test_version_of_a_file_without_a_version_in_its_name(tmp_path: Path, name: str, constants: bytes) -> None:
    data = library(soname=name, sections={".rodata": constants}, machine="x86_64")
    facts = probe(tmp_path, {f"/.singularity.d/libs/{name}": data}, LD_LIBRARY_PATH="/.singularity.d/libs")
    candidates = facts.cuda if name == "libcuda.so.1" else facts.nvml
    assert [(candidate.version, candidate.kind) for candidate in candidates or ()] == [("580.159.04", "driver")]


@each(
    ("value", "reasons"),
    [
        ("/opt:", ("LD_LIBRARY_PATH has an empty element",)),
        (":", ("LD_LIBRARY_PATH has an empty element",)),
        ("/opt::/usr", ("LD_LIBRARY_PATH has an empty element",)),
        ("lib", ("LD_LIBRARY_PATH has a relative element: lib",)),
        ("/opt;/usr", ()),
        ("", ()),
        ("$ORIGIN/lib", ()),
    ],
)
def test_search_path_elements_that_mean_the_current_directory(
    tmp_path: Path, value: str, reasons: tuple[str, ...]
) -> None:
    assert probe(tmp_path, {}, LD_LIBRARY_PATH=value).cwd_searched == reasons


def test_driver_in_the_current_directory(tmp_path: Path) -> None:
    candidates = cuda_candidates(
        tmp_path, {**installed(), "/home/user/project/libcuda.so.1": driver()}, LD_LIBRARY_PATH="/opt:"
    )
    assert (candidates[0].path, candidates[0].via, candidates[0].kind) == (
        "/home/user/project/libcuda.so.1",
        "LD_LIBRARY_PATH",
        "other",
    )


def test_search_path_element_that_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "\udcff"
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("needs names that are not text, which Wine and macOS lack")
    (folder / "libcuda.so.1").write_bytes(driver())
    candidates = cuda_candidates(tmp_path, {}, LD_LIBRARY_PATH="/opt/\udcff")
    assert [candidate.path for candidate in candidates] == ["/opt/\udcff/libcuda.so.1"]


def test_loader_of_another_system_is_unknown(tmp_path: Path) -> None:
    facts = driver_libraries(Loader(tree_host(tmp_path, {}, uname=("Windows", "10", "AMD64"))))
    assert facts.cuda == Unknown("the loader of Windows is not known")
    assert facts.libcuda is None
