"""The driver's libraries: who wins, who lies about, and what each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.diagnose.trees import FOLDER, Content, Link, tree_host
from tests.each import each
from tests.elf_forge import library

from transload.diagnose.loader import Loader
from transload.diagnose.probes.libraries import driver_libraries
from transload.machine import DriverLibraries, Library, Unknown

DEBIAN = "/usr/lib/x86_64-linux-gnu"
VERSION = "580.65.06"


def driver(name: str = "libcuda.so.1", **more: str) -> bytes:
    return library(soname=name, machine=more.get("machine", "x86_64"))


def installed(folder: str = DEBIAN, version: str = VERSION) -> dict[str, Content]:
    """A driver as its installer lays it out."""
    tree: dict[str, Content] = {}
    for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        tree[f"{folder}/{stem}.so.{version}"] = driver(f"{stem}.so.1")
        tree[f"{folder}/{stem}.so.1"] = Link(f"{stem}.so.{version}")
    return tree


def libraries(root: Path, tree: Mapping[str, Content], **environ: str) -> DriverLibraries:
    return driver_libraries(Loader(tree_host(root, tree, environ)))


def cuda(root: Path, tree: Mapping[str, Content], **environ: str) -> tuple[Library, ...]:
    found = libraries(root, tree, **environ).cuda
    assert isinstance(found, tuple)
    return found


def test_an_installed_driver(tmp_path: Path) -> None:
    found = libraries(tmp_path, {**installed(), "/usr/bin/nvidia-smi": b""}, PATH="/nowhere:/usr/bin")
    target = f"{DEBIAN}/libcuda.so.{VERSION}"
    assert found.cuda == (Library("libcuda.so.1", f"{DEBIAN}/libcuda.so.1", target, "default folder", VERSION),)
    assert found.nvml
    assert found.nvml[0].version == VERSION
    assert isinstance(found.ptx_compiler, tuple)
    assert len(found.ptx_compiler) == 1
    assert (found.smi, found.preload, found.cwd_searched) == ("/usr/bin/nvidia-smi", (), ())


def test_no_driver_at_all(tmp_path: Path) -> None:
    assert libraries(tmp_path, {}) == DriverLibraries((), (), ())


def test_a_folder_reached_by_two_names_is_one_library(tmp_path: Path) -> None:
    found = cuda(tmp_path, {**installed(), "/lib": Link("usr/lib")})
    assert [each.path for each in found] == ["/lib/x86_64-linux-gnu/libcuda.so.1"]


def test_the_stub_on_the_library_path_wins(tmp_path: Path) -> None:
    stubs = "/usr/local/cuda-12.8/targets/x86_64-linux/lib/stubs"
    tree: dict[str, Content] = {
        **installed(),
        f"{stubs}/libcuda.so": driver(),
        "/opt/build/libcuda.so.1": Link(f"{stubs}/libcuda.so"),
    }
    found = cuda(tmp_path, tree, LD_LIBRARY_PATH="/opt/build")
    assert [(each.kind, each.via, each.version) for each in found] == [
        ("stub", "LD_LIBRARY_PATH", ""),
        ("driver", "default folder", VERSION),
    ]
    assert found[0].target == f"{stubs}/libcuda.so"


def test_stubs_and_compat_that_nobody_searches(tmp_path: Path) -> None:
    compat = "/usr/local/cuda-13.0/compat"
    tree: dict[str, Content] = {
        **installed(),
        **installed(compat, "580.95.05"),
        "/usr/local/cuda": Link("cuda-13.0"),
        "/usr/local/cuda-13.0/lib64/stubs/libcuda.so": driver(),
    }
    found = cuda(tmp_path, tree)
    assert [(each.kind, each.via, each.version) for each in found] == [
        ("driver", "default folder", VERSION),
        ("compat", "disk", "580.95.05"),
        ("stub", "disk", ""),
    ]


def test_compat_that_wins(tmp_path: Path) -> None:
    tree: dict[str, Content] = {**installed(), **installed("/usr/local/cuda/compat", "570.124.06")}
    found = libraries(tmp_path, tree, LD_LIBRARY_PATH="/usr/local/cuda/compat")
    assert found.libcuda
    assert (found.libcuda.kind, found.libcuda.version) == ("compat", "570.124.06")


@each(
    "folder",
    ["/usr/lib64", "/opt/nvidia/lib64", "/run/opengl-driver/lib", "/usr/lib/nvidia-470", "/usr/local/nvidia/lib64"],
)
def test_a_driver_where_the_loader_does_not_look(tmp_path: Path, folder: str) -> None:
    loader = {
        "/lib64/ld-linux-x86-64.so.2": b"\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0"
    }
    found = libraries(tmp_path, {**installed(folder), **loader})
    assert found.libcuda is None
    assert [(each.path, each.via) for each in found.cuda or ()] == [(f"{folder}/libcuda.so.1", "disk")]


def test_wsl(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/usr/lib/wsl/lib/libcuda.so.1": driver(),
        "/usr/lib/wsl/lib/nvidia-smi": b"",
        **installed(),
    }
    found = libraries(tmp_path, tree, LD_LIBRARY_PATH="/usr/lib/wsl/lib")
    assert [each.kind for each in found.cuda or ()] == ["wsl", "driver"]
    assert found.smi == "/usr/lib/wsl/lib/nvidia-smi"


def test_a_jetson(tmp_path: Path) -> None:
    folder = "/usr/lib/aarch64-linux-gnu/tegra"
    tree: dict[str, Content] = {
        f"{folder}/libcuda.so.1.1": driver(machine="aarch64"),
        f"{folder}/libcuda.so.1": Link("libcuda.so.1.1"),
    }
    host = tree_host(tmp_path, tree, {"LD_LIBRARY_PATH": folder}, uname=("Linux", "5.15.148-tegra", "aarch64"))
    found = driver_libraries(Loader(host)).libcuda
    assert found
    assert (found.kind, found.version, found.problem) == ("driver", "", "")


@each(("content", "problem"), [(b"", "empty"), (b"ELF? No.\n", "not an ELF file"), (FOLDER, "not a regular file")])
def test_the_loader_stops_at_what_is_broken(tmp_path: Path, content: Content, problem: str) -> None:
    found = cuda(tmp_path, {**installed(), "/opt/libcuda.so.1": content}, LD_LIBRARY_PATH="/opt")
    assert [(each.via, each.problem) for each in found] == [("LD_LIBRARY_PATH", problem), ("default folder", "")]


def test_the_loader_passes_over_what_is_foreign_or_gone(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        **installed(),
        "/opt/a/libcuda.so.1": driver(machine="aarch64"),
        "/opt/b/libcuda.so.1": Link("libcuda.so.550.54"),
        "/opt/c/libcuda.so.1": b"\x7fELF\x01\x01" + bytes(12) + b"\x03" + bytes(60),
    }
    found = cuda(tmp_path, tree, LD_LIBRARY_PATH="/opt/a:/opt/b:/opt/c")
    assert [(each.path, each.via, each.problem) for each in found] == [
        (f"{DEBIAN}/libcuda.so.1", "default folder", ""),
        ("/opt/a/libcuda.so.1", "disk", "for another machine (aarch64)"),
        ("/opt/b/libcuda.so.1", "disk", "a link to libcuda.so.550.54, which does not exist"),
        ("/opt/c/libcuda.so.1", "disk", "for another machine (i386, 32 bits)"),
    ]


def test_a_preloaded_one(tmp_path: Path) -> None:
    tree: dict[str, Content] = {**installed(), "/opt/shim.so": driver(), "/opt/other.so": driver("libother.so")}
    found = cuda(tmp_path, tree, LD_PRELOAD="/opt/other.so:/opt/shim.so")
    assert [(each.path, each.via, each.kind) for each in found[:1]] == [("/opt/shim.so", "LD_PRELOAD", "other")]


def test_what_the_preload_file_lists(tmp_path: Path) -> None:
    found = libraries(tmp_path, {"/etc/ld.so.preload": "/opt/vgpu.so\n"})
    assert found.preload == ("/opt/vgpu.so",)


@each(
    ("name", "constants"),
    [
        ("libcuda.so.1", b"x\0Version 580.159.04. Copyright (C) 2026 NVIDIA Corporation. All rights reserved.\0"),
        ("libnvidia-ml.so.1", b"x\0" + b"13.580.159.04\0" + b"535.54.02\0"),
    ],
)
def test_the_release_of_a_file_bound_under_its_bare_name(tmp_path: Path, name: str, constants: bytes) -> None:
    data = library(soname=name, sections={".rodata": constants}, machine="x86_64")
    found = libraries(tmp_path, {f"/.singularity.d/libs/{name}": data}, LD_LIBRARY_PATH="/.singularity.d/libs")
    listed = found.cuda if name == "libcuda.so.1" else found.nvml
    assert [(each.version, each.kind) for each in listed or ()] == [("580.159.04", "driver")]


@each(
    ("value", "why"),
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
def test_the_current_directory_is_searched(tmp_path: Path, value: str, why: tuple[str, ...]) -> None:
    assert libraries(tmp_path, {}, LD_LIBRARY_PATH=value).cwd_searched == why


def test_a_driver_in_the_current_directory(tmp_path: Path) -> None:
    found = cuda(tmp_path, {**installed(), "/home/user/project/libcuda.so.1": driver()}, LD_LIBRARY_PATH="/opt:")
    assert (found[0].path, found[0].via, found[0].kind) == (
        "/home/user/project/libcuda.so.1",
        "LD_LIBRARY_PATH",
        "other",
    )


def test_elements_that_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "\udcff"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").write_bytes(driver())
    found = cuda(tmp_path, {}, LD_LIBRARY_PATH="/opt/\udcff")
    assert [each.path for each in found] == ["/opt/\udcff/libcuda.so.1"]


def test_other_systems_have_other_loaders(tmp_path: Path) -> None:
    found = driver_libraries(Loader(tree_host(tmp_path, {}, uname=("Windows", "10", "AMD64"))))
    assert found.cuda == Unknown("the loader of Windows is not known")
    assert found.libcuda is None
