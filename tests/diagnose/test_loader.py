"""The search for libraries, compared with the real loader of this machine, and tested with forged caches."""

from __future__ import annotations

import json
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.diagnose.trees import Content, Forged, Link, TreeHost, tree_host, write
from tests.each import each
from tests.elf_forge import LOADABLE, NATIVE, library

from transload.diagnose import elf as elf_module
from transload.diagnose.elf import Elf, Loader, Missing, Process, SharedObject, read_cache
from transload.diagnose.host import Host

GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
FOREIGN = "aarch64" if NATIVE == "x86_64" else "x86_64"

# -- compared with the real loader -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lib:
    """A library to build; ``@`` in its strings stands for the folder of the layout."""

    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: str = ""
    runpath: str = ""
    machine: str = NATIVE

    def build(self, root: str) -> bytes:
        needed = [name.replace("@", root) for name in self.needed]
        rpath, runpath = self.rpath.replace("@", root), self.runpath.replace("@", root)
        return library(soname=self.soname, needed=needed, rpath=rpath, runpath=runpath, machine=self.machine)


def top(*needed: str, rpath: str = "", runpath: str = "") -> dict[str, Lib]:
    return {"top.so": Lib("", needed, rpath, runpath)}


def mid(**paths: str) -> dict[str, Lib]:
    """``a/libmid.so.1``, which needs ``libx.so.1``."""
    return {"a/libmid.so.1": Lib("libmid.so.1", ("libx.so.1",), **paths)}


def x(*folders: str) -> dict[str, Lib]:
    return {f"{folder}/libx.so.1": Lib("libx.so.1") for folder in folders}


@dataclass(frozen=True)
class Layout:
    """Files, of which ``top.so`` is opened with LD_LIBRARY_PATH or LD_PRELOAD in the folder ``cwd``."""

    files: Mapping[str, Lib | bytes]
    path: str | None = None
    preload: str | None = None
    cwd: str = ""


TEXT = b"this is no library\n" * 8
WRONG_CLASS = b"\x7fELF" + bytes(200)
FOREIGN_LIBRARY = Lib("libx.so.1", machine=FOREIGN)

LAYOUTS = {
    "no search path": Layout({**top("libx.so.1"), **x("a")}),
    "runpath": Layout({**top("libx.so.1", runpath="@/a"), **x("a", "b")}),
    "rpath": Layout({**top("libx.so.1", rpath="@/a"), **x("a", "b")}),
    "first folder with the library": Layout({**top("libx.so.1", runpath="@/none:@/b:@/a"), **x("a", "b")}),
    "LD_LIBRARY_PATH before runpath": Layout({**top("libx.so.1", runpath="@/a"), **x("a", "b")}, "@/b"),
    "rpath before LD_LIBRARY_PATH": Layout({**top("libx.so.1", rpath="@/a"), **x("a", "b")}, "@/b"),
    "runpath after LD_LIBRARY_PATH": Layout({**top("libx.so.1", runpath="@/a"), **x("a")}, "@/b"),
    "runpath disables rpath": Layout({**top("libx.so.1", rpath="@/a", runpath="@/none"), **x("a", "b")}, "@/b"),
    "rpath disabled by runpath is not used at all": Layout(
        {**top("libx.so.1", rpath="@/a", runpath="@/none"), **x("a")}
    ),
    "rpath is inherited": Layout({**top("libmid.so.1", rpath="@/a"), **mid(), **x("a")}),
    "runpath is not inherited": Layout({**top("libmid.so.1", runpath="@/a"), **mid(), **x("a")}),
    "runpath disables inherited rpath": Layout(
        {**top("libmid.so.1", rpath="@/a"), **mid(runpath="@/b"), **x("a", "b")}
    ),
    "inherited rpath disabled by runpath is not used at all": Layout(
        {**top("libmid.so.1", rpath="@/a"), **mid(runpath="@/b"), **x("a")}
    ),
    "own rpath before inherited rpath": Layout({**top("libmid.so.1", rpath="@/a"), **mid(rpath="@/b"), **x("a", "b")}),
    "origin": Layout({**top("libx.so.1", runpath="$ORIGIN/a"), **x("a")}),
    "origin in braces": Layout({**top("libx.so.1", rpath="${ORIGIN}/a/../b"), **x("a", "b")}),
    "origin of a dependency": Layout({**top("libmid.so.1", runpath="@/a"), **mid(runpath="$ORIGIN/../b"), **x("b")}),
    "origin in LD_LIBRARY_PATH": Layout({**top("libx.so.1"), **x("a", "b")}, "$ORIGIN/a:@/b"),
    "empty element is the current directory": Layout({**top("libx.so.1"), **x("a", "b")}, ":@/b", cwd="a"),
    "empty element at the end": Layout({**top("libx.so.1"), **x("a")}, "@/none:", cwd="a"),
    "empty element of a runpath": Layout({**top("libx.so.1", runpath="@/none:"), **x("b")}, cwd="b"),
    "empty variable has no elements": Layout({**top("libx.so.1"), **x("a")}, "", cwd="a"),
    "relative element": Layout({**top("libx.so.1"), **x("a", "b")}, "../b", cwd="a"),
    "semicolons in LD_LIBRARY_PATH": Layout({**top("libx.so.1"), **x("a", "b")}, "@/none;@/b;@/a"),
    "no semicolons in runpath": Layout({**top("libx.so.1", runpath="@/none;@/b"), **x("b")}),
    "element that is not UTF-8": Layout({**top("libx.so.1"), **x("\udcff")}, "@/\udcff"),
    "library for another machine is skipped": Layout(
        {**top("libx.so.1"), "a/libx.so.1": FOREIGN_LIBRARY, **x("b")}, "@/a:@/b"
    ),
    "library of another ELF class is skipped": Layout(
        {**top("libx.so.1"), "a/libx.so.1": WRONG_CLASS, **x("b")}, "@/a:@/b"
    ),
    "text file stops the search": Layout({**top("libx.so.1"), "a/libx.so.1": TEXT, **x("b")}, "@/a:@/b"),
    "empty file stops the search": Layout({**top("libx.so.1"), "a/libx.so.1": b"", **x("b")}, "@/a:@/b"),
    "folder stops the search": Layout({**top("libx.so.1"), "a/libx.so.1/file": b"", **x("b")}, "@/a:@/b"),
    "first loaded library keeps the name": Layout(
        {
            **top("libp.so", "libq.so", runpath="@"),
            "libp.so": Lib("libp.so", ("libx.so.1",), runpath="@/b"),
            "libq.so": Lib("libq.so", ("libx.so.1",), runpath="@/a"),
            **x("a", "b"),
        }
    ),
    "soname of a loaded library satisfies a need": Layout(
        {**top("libother.so", "libx.so.1", runpath="@/a"), "a/libother.so": Lib("libx.so.1"), **x("a")}
    ),
    "breadth first": Layout(
        {
            **top("libp.so", "libx.so.1", runpath="@:@/a"),
            "libp.so": Lib("libp.so", ("libx.so.1",), runpath="@/b"),
            **x("a", "b"),
        }
    ),
    "preloaded": Layout({**top("libx.so.1", rpath="@/a"), **x("a", "b")}, preload="@/b/libx.so.1"),
    "several preloaded": Layout(
        {**top("libx.so.1", rpath="@/a"), **x("a", "b")}, preload="@/none.so:@/b/libx.so.1 @/a/libx.so.1"
    ),
    "name with a slash": Layout({**top("@/b/libx.so.1"), **x("a", "b")}, "@/a"),
    "library that needs itself": Layout(
        {**top("libx.so.1", runpath="@"), "libx.so.1": Lib("libx.so.1", ("libx.so.1",))}
    ),
    "glibc-hwcaps folders": Layout(
        {**top("libx.so.1", runpath="@/a"), **x("a", *(f"a/glibc-hwcaps/x86-64-v{level}" for level in (2, 3, 4)))}
    ),
}

CHILD = """
import ctypes, json, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError:
    print("null")
else:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        print(json.dumps([line.split(None, 5)[5].rstrip() for line in maps if "/" in line]))
"""


def write_layout(layout: Layout, root: Path) -> dict[str, str]:
    """Write the files below ``root`` and return the variables; LD_LIBRARY_PATH ends with that of this process."""
    for name, content in layout.files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.build(str(root)))
    inherited = os.environ.get("LD_LIBRARY_PATH")
    library_path = [value for value in (layout.path, inherited) if value is not None]
    variables = {"LD_LIBRARY_PATH": ":".join(library_path)} if library_path else {}
    if layout.preload is not None:
        variables["LD_PRELOAD"] = layout.preload
    return {name: value.replace("@", str(root)) for name, value in variables.items()}


def mapped_by_loader(root: Path, variables: Mapping[str, str], cwd: Path) -> list[str] | None:
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(root / "top.so")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    process = subprocess.run(command, env={**environ, **variables}, cwd=cwd, capture_output=True, check=True)
    paths: list[str] | None = json.loads(process.stdout.decode())
    return paths and sorted({path for path in paths if path.startswith(f"{root}/")})


def mapped_by_simulation(root: Path, variables: Mapping[str, str], cwd: Path) -> list[str] | None:
    process = Process(Loader(Host(environ=variables, cwd=str(cwd))))
    if process.open(str(root / "top.so")):
        return None
    return sorted({os.path.realpath(loaded.path) for loaded in process.files.values() if str(root) in loaded.path})


@pytest.mark.skipif(not (GLIBC and LOADABLE), reason="needs glibc on an architecture the forge can build for")
@each("name", LAYOUTS)
def test_search_matches_the_real_loader(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    root = Path(os.path.realpath(tmp_path))
    variables = write_layout(layout, root)
    cwd = root / layout.cwd
    assert mapped_by_simulation(root, variables, cwd) == mapped_by_loader(root, variables, cwd)


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_initial_libraries_are_mapped_in_this_process() -> None:
    process = Process(Loader(Host()))
    mapped = {
        line.split(None, 5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    real = {os.path.realpath(path) for path in mapped}
    assert "libc.so.6" in process.names
    assert {os.path.realpath(shared_object.path) for shared_object in process.names.values()} <= real


# -- search in a tree --------------------------------------------------------------------------------------------------

FOLDERS = b"\0junk\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0more/\0"
LD_SO = "/lib64/ld-linux-x86-64.so.2"
CPU = "processor\t: 0\nflags\t\t: fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3\n"


def forged(name: str = "libx.so.1") -> bytes:
    return library(soname=name, machine="x86_64")


def forged_for(machine: str) -> bytes:
    return library(soname="libx.so.1", machine=machine)


def search_tree(
    root: Path, tree: Mapping[str, Content], name: str = "libx.so.1", **environ: str
) -> list[tuple[str, str]]:
    loader = Loader(tree_host(root, tree, environ))
    return [(candidate.via, candidate.path) for candidate in loader.search(name)]


def opened_paths(process: Process) -> list[str]:
    return [shared_object.path for shared_object in process.opened]


def test_default_folders_are_those_compiled_into_the_loader(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: FOLDERS, "/usr/lib64/libx.so.1": forged(), "/usr/lib/libx.so.1": forged()}
    assert Loader(tree_host(tmp_path, tree)).default_folders == (
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib",
        "/usr/lib",
    )
    assert search_tree(tmp_path, tree) == [("default folder", "/usr/lib/libx.so.1")]


def test_usual_default_folders_without_a_loader(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/usr/lib64/libx.so.1": forged(), "/usr/lib/x86_64-linux-gnu/libx.so.1": forged()}
    assert search_tree(tmp_path, tree) == [
        ("default folder", "/usr/lib/x86_64-linux-gnu/libx.so.1"),
        ("default folder", "/usr/lib64/libx.so.1"),
    ]


def test_default_folders_depend_on_the_architecture(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        f"{folder}/libx.so.1": Forged(forged_for) for folder in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu")
    }
    for machine in ("x86_64", "aarch64"):
        host = tree_host(tmp_path / machine, tree, uname=("Linux", "6.8", machine))
        assert [(candidate.via, candidate.path) for candidate in Loader(host).search("libx.so.1")] == [
            ("default folder", f"/usr/lib/{machine}-linux-gnu/libx.so.1"),
            ("default folder", "/usr/lib64/libx.so.1"),
        ]


def test_architecture_without_its_loader(tmp_path: Path) -> None:
    write(tmp_path, {LD_SO: FOLDERS})
    host = TreeHost(root=str(tmp_path), uname=("Linux", "6.8", "ppc64le"))
    assert (Loader(host).machine, Loader(host).path) == ("ppc64le", "")


def test_nix_loader_has_its_own_cache(tmp_path: Path) -> None:
    own = "/nix/store/abc-glibc-2.40"
    tree: dict[str, Content] = {
        LD_SO: f"\0{own}/lib/\0x\0{own}/etc/ld.so.cache\0".encode(),
        f"{own}/etc/ld.so.cache": make_cache(("libx.so.1", "/opt/x/libx.so.1")),
        "/etc/ld.so.cache": make_cache(("libx.so.1", "/usr/lib/libx.so.1")),
        "/opt/x/libx.so.1": forged(),
        "/usr/lib/libx.so.1": forged(),
    }
    assert search_tree(tmp_path, tree) == [("ld.so.cache", "/opt/x/libx.so.1")]


def test_cache_comes_before_default_folders_and_may_name_missing_files(tmp_path: Path) -> None:
    entries = (("libx.so.1", "/opt/gone/libx.so.1"), ("libx.so.1", "/opt/a/libx.so.1"), ("liby.so.1", "/opt/y"))
    tree: dict[str, Content] = {
        "/etc/ld.so.cache": make_cache(*entries),
        "/opt/a/libx.so.1": Link("/opt/b/libx.so.1"),
        "/opt/b/libx.so.1": forged(),
        "/usr/lib/libx.so.1": forged(),
    }
    assert search_tree(tmp_path, tree) == [
        ("ld.so.cache", "/opt/a/libx.so.1"),
        ("default folder", "/usr/lib/libx.so.1"),
    ]
    assert search_tree(tmp_path, {}, LD_LIBRARY_PATH="/opt/b")[0] == ("LD_LIBRARY_PATH", "/opt/b/libx.so.1")


def test_foreign_libraries_are_skipped_and_an_invalid_file_stops_the_search(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/a/libx.so.1": library(soname="libx.so.1", machine="aarch64"),
        "/b/libx.so.1": b"text",
        "/c/libx.so.1": Link("/nowhere"),
        "/d/libx.so.1": b"\x7fELF\x01\x01\x01" + bytes(11) + b"\x3e" + bytes(60),  # x86_64, but 32-bit
    }
    loader = Loader(tree_host(tmp_path, tree, {"LD_LIBRARY_PATH": "/a:/d:/b:/c"}))
    assert loader.examine("/a/libx.so.1") is None
    assert loader.examine("/c/libx.so.1") is None
    (stop,) = loader.search("libx.so.1")
    assert stop == Missing("libx.so.1", None, "/b/libx.so.1", "LD_LIBRARY_PATH", "not an ELF file")


def test_lib_and_platform_are_expanded_in_a_runpath(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: FOLDERS, "/opt/lib/x86_64-linux-gnu/x86_64/libx.so.1": forged()}
    host = tree_host(tmp_path, {**tree, "/top.so": library(runpath="/opt/$LIB/${PLATFORM}", machine="x86_64")})
    loader = Loader(host)
    elf = loader.examine("/top.so")
    assert isinstance(elf, Elf)
    assert [candidate.via for candidate in loader.search("libx.so.1", SharedObject("/top.so", elf))] == ["RUNPATH"]


def test_hwcaps_folders_of_the_processor_level_come_first(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/proc/cpuinfo": CPU,
        LD_SO: FOLDERS + b"glibc-hwcaps\0",
        "/a/glibc-hwcaps/x86-64-v3/libx.so.1": forged(),
        "/a/glibc-hwcaps/x86-64-v2/libx.so.1": forged(),
        "/a/libx.so.1": forged(),
    }
    assert search_tree(tmp_path, tree, LD_LIBRARY_PATH="/a") == [
        ("LD_LIBRARY_PATH", "/a/glibc-hwcaps/x86-64-v2/libx.so.1"),
        ("LD_LIBRARY_PATH", "/a/libx.so.1"),
    ]


def test_cache_entry_for_a_processor_level_is_used(tmp_path: Path) -> None:
    level, path = "x86-64-v2", "/b/glibc-hwcaps/x86-64-v2/libx.so.1"
    tree: dict[str, Content] = {
        "/proc/cpuinfo": CPU,
        LD_SO: FOLDERS + b"glibc-hwcaps\0",
        "/etc/ld.so.cache": make_cache(("libx.so.1", path, level), levels=(level,)),
        path: forged(),
    }
    assert search_tree(tmp_path, tree) == [("ld.so.cache", path)], "the cache has no other entry for it"


def test_old_loader_has_no_hwcaps(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/proc/cpuinfo": CPU, LD_SO: FOLDERS}
    assert Loader(tree_host(tmp_path, tree)).hwcaps == ()


def test_preload_file_is_read(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/etc/ld.so.preload": "# comment\n/opt/a.so /opt/b.so:/opt/c.so # more\n\n",
        "/opt/a.so": forged(),
    }
    loader = Loader(tree_host(tmp_path, tree))
    assert loader.preload_file == ("/opt/a.so", "/opt/b.so", "/opt/c.so")
    process = Process(loader)
    assert process.names["libx.so.1"].via == "ld.so.preload"


def test_garbage_in_loader_cache_and_cpuinfo_is_ignored(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: b"\xff/\0" * 5000, "/etc/ld.so.cache": b"\0" * 100, "/proc/cpuinfo": b"\xff\xfe"}
    loader = Loader(tree_host(tmp_path, tree))
    assert (loader.cache, loader.hwcaps) == ({}, ())
    assert loader.default_folders


def test_invalid_names_are_not_found(tmp_path: Path) -> None:
    assert search_tree(tmp_path, {}, "lib\0x.so") == []
    assert search_tree(tmp_path, {}, "libx.so", LD_LIBRARY_PATH="/a\0b:\ud800") == []


# -- musl


def test_musl_searches_the_variable_first_and_inherits_run_paths(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/lib/ld-musl-x86_64.so.1": b"musl",
        "/top.so": library(needed=("libmid.so.1",), rpath="/r", machine="x86_64"),
        "/r/libmid.so.1": library(soname="libmid.so.1", needed=("libx.so.1",), runpath="/none", machine="x86_64"),
        "/r/libx.so.1": forged(),
        "/e/libx.so.1": forged(),
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    assert (process.open("/top.so"), opened_paths(process)) == ([], ["/top.so", "/r/libmid.so.1", "/r/libx.so.1"])
    process = Process(Loader(tree_host(tmp_path, {}, {"LD_LIBRARY_PATH": ":/e"})))
    assert (process.open("/top.so"), opened_paths(process)[-1]) == ([], "/e/libx.so.1")


def test_musl_reads_its_folders_from_a_file(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/lib/ld-musl-x86_64.so.1": b"",
        "/etc/ld-musl-x86_64.path": "/opt/a\n/opt/b:/opt/c\n",
        "/opt/c/libx.so.1": forged(),
    }
    assert search_tree(tmp_path, tree) == [("default folder", "/opt/c/libx.so.1")]
    assert Loader(tree_host(tmp_path / "bare", {"/lib/ld-musl-x86_64.so.1": b""})).default_folders[0] == "/lib"


def test_musl_ignores_empty_elements(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/lib/ld-musl-x86_64.so.1": b"", "/home/user/project/libx.so.1": forged()}
    assert search_tree(tmp_path, tree, LD_LIBRARY_PATH=":") == []


# -- processes


def test_failed_open_lists_missing_libraries_and_loads_nothing(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/top.so": library(needed=("liba.so", "libb.so", "libc.so"), runpath="/l", machine="x86_64"),
        "/l/liba.so": forged("liba.so"),
        "/l/libb.so": b"",
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    missing = process.open("/top.so")
    assert [(entry.name, entry.path, entry.via, entry.problem) for entry in missing] == [
        ("libb.so", "/l/libb.so", "RUNPATH", "empty"),
        ("libc.so", "", "", ""),
    ]
    assert all(entry.needed_by and entry.needed_by.path == "/top.so" for entry in missing)
    assert process.names == {}
    process.open("/top.so", anyway=True)
    assert list(process.names) == ["liba.so"]


def test_opening_a_missing_or_invalid_file(tmp_path: Path) -> None:
    process = Process(Loader(tree_host(tmp_path, {"/text.so": "text"})))
    assert [missing.name for missing in process.open("/none.so")] == ["none.so"]
    assert [missing.problem for missing in process.open("/text.so")] == ["not an ELF file"]


def test_file_under_two_names_is_loaded_once(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/top.so": library(needed=("liba.so", "libb.so"), runpath="/l", machine="x86_64"),
        "/l/liba.so": forged("libreal.so"),
        "/l/libb.so": Link("liba.so"),
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    assert (process.open("/top.so"), opened_paths(process)) == ([], ["/top.so", "/l/liba.so"])
    assert {process.names[name].path for name in ("liba.so", "libb.so", "libreal.so")} == {"/l/liba.so"}


def test_library_opened_by_path_is_loaded_beside_one_of_the_same_soname(tmp_path: Path) -> None:
    """A library is loaded by its path although another has the same soname, and the first one keeps the name."""
    tree: dict[str, Content] = {"/a/libx.so.1": forged(), "/b/libx.so.1": forged()}
    process = Process(Loader(tree_host(tmp_path, tree)))
    for path in (*tree, "/b/libx.so.1"):
        assert process.open(path) == []
    assert opened_paths(process) == list(tree)
    assert process.names["libx.so.1"].path == "/a/libx.so.1"


def test_number_of_needed_libraries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf_module, "_MOST_NAMES", 50)
    many = [f"lib{index}.so" for index in range(40)]
    tree: dict[str, Content] = {
        f"/l/{name}": library(needed=many[::-1], rpath="/l", machine="x86_64") for name in many[:3]
    }
    assert len(Process(Loader(tree_host(tmp_path, tree))).open("/l/lib0.so")) < 50


# -- ld.so.cache -------------------------------------------------------------------------------------------------------


def make_cache(
    *entries: tuple[str, str] | tuple[str, str, str],
    flags: int = 0x0303,
    levels: Sequence[str] = (),
    legacy: int = 0,
) -> bytes:
    """An ld.so.cache of entries (name, path) or (name, path, level), with the names of all ``levels``."""
    head, size = 48, 24 * len(entries)
    strings, table, places = b"", b"", {}
    for text in dict.fromkeys((*(part for entry in entries for part in entry), *levels)):
        places[text] = head + size + len(strings)
        strings += text.encode() + b"\0"
    for name, path, *level in entries:
        hwcap = 1 << 62 | levels.index(level[0]) if level else legacy
        table += struct.pack("<iIIIQ", flags, places[name], places[path], 0, hwcap)
    extension = -(-(head + size + len(strings)) // 4) * 4
    body = struct.pack("<20sII4xI12x", b"glibc-ld.so.cache1.1", len(entries), len(strings), extension) + table + strings
    body += bytes(extension - len(body))
    body += struct.pack("<II4I", 0xEAA42174, 1, 1, 0, extension + 24, 4 * len(levels))
    return body + b"".join(struct.pack("<I", places[level]) for level in levels)


def test_cache_lists_paths_by_name() -> None:
    data = make_cache(("libx.so.1", "/b/libx.so.1"), ("libx.so.1", "/a/libx.so.1"), ("liby.so", "/a/liby.so"))
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/b/libx.so.1", "/a/libx.so.1"), "liby.so": ("/a/liby.so",)}


def test_cache_after_one_in_the_old_format() -> None:
    old = b"ld.so-1.7.0\0" + struct.pack("<I3i", 1, 3, 0, 0)
    data = old + bytes(-len(old) % 8) + make_cache(("libx.so.1", "/x"))
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/x",)}


def test_cache_entries_for_other_machines_are_skipped() -> None:
    assert read_cache(make_cache(("libx.so.1", "/x"), flags=0x0003), "x86_64") == {}
    assert read_cache(make_cache(("libx.so.1", "/x"), flags=0x0A03), "aarch64") == {"libx.so.1": ("/x",)}


def test_cache_entries_with_processor_levels() -> None:
    levels = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
    entries = (("libx.so.1", "/plain"), ("libx.so.1", "/v2", levels[0]), ("libx.so.1", "/v4", levels[2]))
    data = make_cache(*entries, levels=levels)
    assert read_cache(data, "x86_64", ("x86-64-v3", "x86-64-v2")) == {"libx.so.1": ("/v2", "/plain")}
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/plain",)}
    assert read_cache(make_cache(("libx.so.1", "/old"), legacy=4), "x86_64") == {}


def test_damaged_cache_causes_no_exception() -> None:
    valid = make_cache(("libx.so.1", "/a/libx.so.1"), ("liby.so", "/y", "v2"), levels=("v2",))
    for at in range(len(valid)):
        assert isinstance(read_cache(valid[:at], "x86_64", ("v2",)), dict)
        changed = valid[:at] + b"\xff" + valid[at + 1 :]
        assert isinstance(read_cache(changed, "x86_64", ("v2",)), dict)


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_cache_of_this_machine_lists_libc() -> None:
    data = Path("/etc/ld.so.cache").read_bytes() if Path("/etc/ld.so.cache").exists() else b""
    machine = platform.machine()
    if not data or machine not in ("x86_64", "aarch64"):
        pytest.skip("needs /etc/ld.so.cache on x86-64 or aarch64")
    paths = read_cache(data, machine).get("libc.so.6", ())
    assert any(os.path.exists(path) for path in paths)
