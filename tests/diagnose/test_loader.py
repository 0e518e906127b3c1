"""The search for libraries, held against the real loader of this machine, and against caches made by hand."""

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

from transload.diagnose import loader as loader_module
from transload.diagnose.host import Host
from transload.diagnose.loader import Elf, Loader, Missing, Process, SharedObject, read_cache

GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
FOREIGN = "aarch64" if NATIVE == "x86_64" else "x86_64"

# -- held against the real loader --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lib:
    """A library to be built; in its texts ``@`` stands for the folder of the layout."""

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
    """Files of which ``top.so`` is opened, with LD_LIBRARY_PATH or LD_PRELOAD, in the folder ``cwd``."""

    files: Mapping[str, Lib | bytes]
    path: str | None = None
    preload: str | None = None
    cwd: str = ""


TEXT = b"this is no library\n" * 8
WRONG_CLASS = b"\x7fELF" + bytes(200)
PASSED_OVER = Lib("libx.so.1", machine=FOREIGN)

LAYOUTS = {
    "nothing tells where": Layout({**top("libx.so.1"), **x("a")}),
    "runpath": Layout({**top("libx.so.1", runpath="@/a"), **x("a", "b")}),
    "rpath": Layout({**top("libx.so.1", rpath="@/a"), **x("a", "b")}),
    "the first folder that has it": Layout({**top("libx.so.1", runpath="@/none:@/b:@/a"), **x("a", "b")}),
    "library path before runpath": Layout({**top("libx.so.1", runpath="@/a"), **x("a", "b")}, "@/b"),
    "rpath before library path": Layout({**top("libx.so.1", rpath="@/a"), **x("a", "b")}, "@/b"),
    "runpath after a library path without it": Layout({**top("libx.so.1", runpath="@/a"), **x("a")}, "@/b"),
    "runpath switches rpath off": Layout({**top("libx.so.1", rpath="@/a", runpath="@/none"), **x("a", "b")}, "@/b"),
    "rpath beside runpath, alone": Layout({**top("libx.so.1", rpath="@/a", runpath="@/none"), **x("a")}),
    "rpath is inherited": Layout({**top("libmid.so.1", rpath="@/a"), **mid(), **x("a")}),
    "runpath is not inherited": Layout({**top("libmid.so.1", runpath="@/a"), **mid(), **x("a")}),
    "runpath shuts out inheritance": Layout({**top("libmid.so.1", rpath="@/a"), **mid(runpath="@/b"), **x("a", "b")}),
    "runpath shuts out all inheritance": Layout({**top("libmid.so.1", rpath="@/a"), **mid(runpath="@/b"), **x("a")}),
    "one's own rpath first": Layout({**top("libmid.so.1", rpath="@/a"), **mid(rpath="@/b"), **x("a", "b")}),
    "origin": Layout({**top("libx.so.1", runpath="$ORIGIN/a"), **x("a")}),
    "origin in braces": Layout({**top("libx.so.1", rpath="${ORIGIN}/a/../b"), **x("a", "b")}),
    "the origin of another": Layout({**top("libmid.so.1", runpath="@/a"), **mid(runpath="$ORIGIN/../b"), **x("b")}),
    "origin in the variable": Layout({**top("libx.so.1"), **x("a", "b")}, "$ORIGIN/a:@/b"),
    "an empty element is the current directory": Layout({**top("libx.so.1"), **x("a", "b")}, ":@/b", cwd="a"),
    "an empty element at the end": Layout({**top("libx.so.1"), **x("a")}, "@/none:", cwd="a"),
    "an empty element of a runpath": Layout({**top("libx.so.1", runpath="@/none:"), **x("b")}, cwd="b"),
    "an empty variable has no element": Layout({**top("libx.so.1"), **x("a")}, "", cwd="a"),
    "a relative element": Layout({**top("libx.so.1"), **x("a", "b")}, "../b", cwd="a"),
    "semicolons": Layout({**top("libx.so.1"), **x("a", "b")}, "@/none;@/b;@/a"),
    "no semicolons in a runpath": Layout({**top("libx.so.1", runpath="@/none;@/b"), **x("b")}),
    "an element that is not UTF-8": Layout({**top("libx.so.1"), **x("\udcff")}, "@/\udcff"),
    "another machine is passed over": Layout({**top("libx.so.1"), "a/libx.so.1": PASSED_OVER, **x("b")}, "@/a:@/b"),
    "another class is passed over": Layout({**top("libx.so.1"), "a/libx.so.1": WRONG_CLASS, **x("b")}, "@/a:@/b"),
    "a text stops the search": Layout({**top("libx.so.1"), "a/libx.so.1": TEXT, **x("b")}, "@/a:@/b"),
    "an empty file stops the search": Layout({**top("libx.so.1"), "a/libx.so.1": b"", **x("b")}, "@/a:@/b"),
    "a folder stops the search": Layout({**top("libx.so.1"), "a/libx.so.1/file": b"", **x("b")}, "@/a:@/b"),
    "what came in first keeps the name": Layout(
        {
            **top("libp.so", "libq.so", runpath="@"),
            "libp.so": Lib("libp.so", ("libx.so.1",), runpath="@/b"),
            "libq.so": Lib("libq.so", ("libx.so.1",), runpath="@/a"),
            **x("a", "b"),
        }
    ),
    "a soname stands for another file": Layout(
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
    "a name with a slash": Layout({**top("@/b/libx.so.1"), **x("a", "b")}, "@/a"),
    "a library that needs itself": Layout(
        {**top("libx.so.1", runpath="@"), "libx.so.1": Lib("libx.so.1", ("libx.so.1",))}
    ),
    "folders for a processor": Layout(
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


def placed(layout: Layout, root: Path) -> dict[str, str]:
    """Write the files below ``root``; the environment, with what this interpreter itself may need at its end."""
    for name, content in layout.files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.build(str(root)))
    kept = os.environ.get("LD_LIBRARY_PATH")
    library_path = [each for each in (layout.path, kept) if each is not None]
    variables = {"LD_LIBRARY_PATH": ":".join(library_path)} if library_path else {}
    if layout.preload is not None:
        variables["LD_PRELOAD"] = layout.preload
    return {name: value.replace("@", str(root)) for name, value in variables.items()}


def really_mapped(root: Path, variables: Mapping[str, str], cwd: Path) -> list[str] | None:
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(root / "top.so")]
    others = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    done = subprocess.run(command, env={**others, **variables}, cwd=cwd, capture_output=True, check=True)
    told: list[str] | None = json.loads(done.stdout.decode())
    return told and sorted({path for path in told if path.startswith(f"{root}/")})


def simulated(root: Path, variables: Mapping[str, str], cwd: Path) -> list[str] | None:
    process = Process(Loader(Host(environ=variables, cwd=str(cwd))))
    if process.open(str(root / "top.so")):
        return None
    return sorted({os.path.realpath(each.path) for each in process.files.values() if str(root) in each.path})


@pytest.mark.skipif(not (GLIBC and LOADABLE), reason="needs glibc on an architecture the forge can build for")
@each("name", LAYOUTS)
def test_as_the_real_loader(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    root = Path(os.path.realpath(tmp_path))
    variables = placed(layout, root)
    cwd = root / layout.cwd
    assert simulated(root, variables, cwd) == really_mapped(root, variables, cwd)


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_the_libraries_of_this_very_process() -> None:
    process = Process(Loader(Host()))
    mapped = {
        line.split(None, 5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    real = {os.path.realpath(path) for path in mapped}
    assert "libc.so.6" in process.names
    assert {os.path.realpath(each.path) for each in process.names.values()} <= real


# -- what the search of a tree tells -----------------------------------------------------------------------------------

FOLDERS = b"\0junk\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0more/\0"
LD_SO = "/lib64/ld-linux-x86-64.so.2"
CPU = "processor\t: 0\nflags\t\t: fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3\n"


def forged(name: str = "libx.so.1") -> bytes:
    return library(soname=name, machine="x86_64")


def _made(machine: str) -> bytes:
    return library(soname="libx.so.1", machine=machine)


def found(root: Path, tree: Mapping[str, Content], name: str = "libx.so.1", **environ: str) -> list[tuple[str, str]]:
    loader = Loader(tree_host(root, tree, environ))
    return [(each.via, each.path) for each in loader.search(name)]


def opened(process: Process) -> list[str]:
    return [each.path for each in process.opened]


def test_the_folders_are_those_compiled_into_the_loader(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: FOLDERS, "/usr/lib64/libx.so.1": forged(), "/usr/lib/libx.so.1": forged()}
    assert Loader(tree_host(tmp_path, tree)).default_folders == (
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib",
        "/usr/lib",
    )
    assert found(tmp_path, tree) == [("default folder", "/usr/lib/libx.so.1")]


def test_the_usual_folders_where_no_loader_was_found(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/usr/lib64/libx.so.1": forged(), "/usr/lib/x86_64-linux-gnu/libx.so.1": forged()}
    assert found(tmp_path, tree) == [
        ("default folder", "/usr/lib/x86_64-linux-gnu/libx.so.1"),
        ("default folder", "/usr/lib64/libx.so.1"),
    ]


def test_a_machine_of_another_kind_has_folders_of_its_own(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        f"{folder}/libx.so.1": Forged(_made) for folder in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu")
    }
    for machine in ("x86_64", "aarch64"):
        host = tree_host(tmp_path / machine, tree, uname=("Linux", "6.8", machine))
        assert [(each.via, each.path) for each in Loader(host).search("libx.so.1")] == [
            ("default folder", f"/usr/lib/{machine}-linux-gnu/libx.so.1"),
            ("default folder", "/usr/lib64/libx.so.1"),
        ]


def test_a_machine_whose_loader_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, {LD_SO: FOLDERS})
    stated = TreeHost(root=str(tmp_path), uname=("Linux", "6.8", "ppc64le"))
    assert (Loader(stated).machine, Loader(stated).path) == ("ppc64le", "")


def test_a_store_with_one_folder_and_a_cache_of_its_own(tmp_path: Path) -> None:
    own = "/nix/store/abc-glibc-2.40"
    tree: dict[str, Content] = {
        LD_SO: f"\0{own}/lib/\0x\0{own}/etc/ld.so.cache\0".encode(),
        f"{own}/etc/ld.so.cache": cache(("libx.so.1", "/opt/x/libx.so.1")),
        "/etc/ld.so.cache": cache(("libx.so.1", "/usr/lib/libx.so.1")),
        "/opt/x/libx.so.1": forged(),
        "/usr/lib/libx.so.1": forged(),
    }
    assert found(tmp_path, tree) == [("ld.so.cache", "/opt/x/libx.so.1")]


def test_the_cache_comes_before_the_folders_and_what_it_names_may_be_gone(tmp_path: Path) -> None:
    entries = (("libx.so.1", "/opt/gone/libx.so.1"), ("libx.so.1", "/opt/a/libx.so.1"), ("liby.so.1", "/opt/y"))
    tree: dict[str, Content] = {
        "/etc/ld.so.cache": cache(*entries),
        "/opt/a/libx.so.1": Link("/opt/b/libx.so.1"),
        "/opt/b/libx.so.1": forged(),
        "/usr/lib/libx.so.1": forged(),
    }
    assert found(tmp_path, tree) == [("ld.so.cache", "/opt/a/libx.so.1"), ("default folder", "/usr/lib/libx.so.1")]
    assert found(tmp_path, {}, LD_LIBRARY_PATH="/opt/b")[0] == ("LD_LIBRARY_PATH", "/opt/b/libx.so.1")


def test_what_the_loader_passes_over_and_where_it_stops(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/a/libx.so.1": library(soname="libx.so.1", machine="aarch64"),
        "/b/libx.so.1": b"text",
        "/c/libx.so.1": Link("/nowhere"),
        "/d/libx.so.1": b"\x7fELF\x01\x01\x01" + bytes(11) + b"\x3e" + bytes(60),  # x86_64 with 32 bits
    }
    loader = Loader(tree_host(tmp_path, tree, {"LD_LIBRARY_PATH": "/a:/d:/b:/c"}))
    assert loader.examine("/a/libx.so.1") is None
    assert loader.examine("/c/libx.so.1") is None
    (stop,) = loader.search("libx.so.1")
    assert stop == Missing("libx.so.1", None, "/b/libx.so.1", "LD_LIBRARY_PATH", "not an ELF file")


def test_the_lib_and_platform_of_a_run_path(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: FOLDERS, "/opt/lib/x86_64-linux-gnu/x86_64/libx.so.1": forged()}
    host = tree_host(tmp_path, {**tree, "/top.so": library(runpath="/opt/$LIB/${PLATFORM}", machine="x86_64")})
    loader = Loader(host)
    elf = loader.examine("/top.so")
    assert isinstance(elf, Elf)
    assert [each.via for each in loader.search("libx.so.1", SharedObject("/top.so", elf))] == ["RUNPATH"]


def test_levels_of_the_processor(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/proc/cpuinfo": CPU,
        LD_SO: FOLDERS + b"glibc-hwcaps\0",
        "/a/glibc-hwcaps/x86-64-v3/libx.so.1": forged(),
        "/a/glibc-hwcaps/x86-64-v2/libx.so.1": forged(),
        "/a/libx.so.1": forged(),
    }
    assert found(tmp_path, tree, LD_LIBRARY_PATH="/a") == [
        ("LD_LIBRARY_PATH", "/a/glibc-hwcaps/x86-64-v2/libx.so.1"),
        ("LD_LIBRARY_PATH", "/a/libx.so.1"),
    ]


def test_the_cache_leads_to_the_levels_of_the_processor(tmp_path: Path) -> None:
    level, path = "x86-64-v2", "/b/glibc-hwcaps/x86-64-v2/libx.so.1"
    tree: dict[str, Content] = {
        "/proc/cpuinfo": CPU,
        LD_SO: FOLDERS + b"glibc-hwcaps\0",
        "/etc/ld.so.cache": cache(("libx.so.1", path, level), levels=(level,)),
        path: forged(),
    }
    assert found(tmp_path, tree) == [("ld.so.cache", path)], "which has no other entry for it"


def test_a_loader_older_than_the_levels(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/proc/cpuinfo": CPU, LD_SO: FOLDERS}
    assert Loader(tree_host(tmp_path, tree)).hwcaps == ()


def test_the_file_of_preloads(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/etc/ld.so.preload": "# comment\n/opt/a.so /opt/b.so:/opt/c.so # more\n\n",
        "/opt/a.so": forged(),
    }
    loader = Loader(tree_host(tmp_path, tree))
    assert loader.preload_file == ("/opt/a.so", "/opt/b.so", "/opt/c.so")
    process = Process(loader)
    assert process.names["libx.so.1"].via == "ld.so.preload"


def test_garbage_for_a_loader_a_cache_and_a_processor(tmp_path: Path) -> None:
    tree: dict[str, Content] = {LD_SO: b"\xff/\0" * 5000, "/etc/ld.so.cache": b"\0" * 100, "/proc/cpuinfo": b"\xff\xfe"}
    system = Loader(tree_host(tmp_path, tree))
    assert (system.cache, system.hwcaps) == ({}, ())
    assert system.default_folders


def test_names_no_file_can_have(tmp_path: Path) -> None:
    assert found(tmp_path, {}, "lib\0x.so") == []
    assert found(tmp_path, {}, "libx.so", LD_LIBRARY_PATH="/a\0b:\ud800") == []


# -- musl


def test_musl_takes_the_variable_first_and_inherits_every_run_path(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/lib/ld-musl-x86_64.so.1": b"musl",
        "/top.so": library(needed=("libmid.so.1",), rpath="/r", machine="x86_64"),
        "/r/libmid.so.1": library(soname="libmid.so.1", needed=("libx.so.1",), runpath="/none", machine="x86_64"),
        "/r/libx.so.1": forged(),
        "/e/libx.so.1": forged(),
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    assert (process.open("/top.so"), opened(process)) == ([], ["/top.so", "/r/libmid.so.1", "/r/libx.so.1"])
    process = Process(Loader(tree_host(tmp_path, {}, {"LD_LIBRARY_PATH": ":/e"})))
    assert (process.open("/top.so"), opened(process)[-1]) == ([], "/e/libx.so.1")


def test_musl_reads_its_folders_from_a_file(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/lib/ld-musl-x86_64.so.1": b"",
        "/etc/ld-musl-x86_64.path": "/opt/a\n/opt/b:/opt/c\n",
        "/opt/c/libx.so.1": forged(),
    }
    assert found(tmp_path, tree) == [("default folder", "/opt/c/libx.so.1")]
    assert Loader(tree_host(tmp_path / "bare", {"/lib/ld-musl-x86_64.so.1": b""})).default_folders[0] == "/lib"


def test_an_empty_element_means_nothing_to_musl(tmp_path: Path) -> None:
    tree: dict[str, Content] = {"/lib/ld-musl-x86_64.so.1": b"", "/home/user/project/libx.so.1": forged()}
    assert found(tmp_path, tree, LD_LIBRARY_PATH=":") == []


# -- processes


def test_what_cannot_be_had_and_what_stays(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/top.so": library(needed=("liba.so", "libb.so", "libc.so"), runpath="/l", machine="x86_64"),
        "/l/liba.so": forged("liba.so"),
        "/l/libb.so": b"",
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    missing = process.open("/top.so")
    assert [(each.name, each.path, each.via, each.problem) for each in missing] == [
        ("libb.so", "/l/libb.so", "RUNPATH", "empty"),
        ("libc.so", "", "", ""),
    ]
    assert all(each.needed_by and each.needed_by.path == "/top.so" for each in missing)
    assert process.names == {}
    process.open("/top.so", anyway=True)
    assert list(process.names) == ["liba.so"]


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    process = Process(Loader(tree_host(tmp_path, {"/text.so": "text"})))
    assert [each.name for each in process.open("/none.so")] == ["none.so"]
    assert [each.problem for each in process.open("/text.so")] == ["not an ELF file"]


def test_a_file_under_two_names_is_one_library(tmp_path: Path) -> None:
    tree: dict[str, Content] = {
        "/top.so": library(needed=("liba.so", "libb.so"), runpath="/l", machine="x86_64"),
        "/l/liba.so": forged("libreal.so"),
        "/l/libb.so": Link("liba.so"),
    }
    process = Process(Loader(tree_host(tmp_path, tree)))
    assert (process.open("/top.so"), opened(process)) == ([], ["/top.so", "/l/liba.so"])
    assert {process.names[name].path for name in ("liba.so", "libb.so", "libreal.so")} == {"/l/liba.so"}


def test_a_path_is_opened_beside_one_of_the_same_soname(tmp_path: Path) -> None:
    """By its path a library comes in although another has its name, which keeps it."""
    tree: dict[str, Content] = {"/a/libx.so.1": forged(), "/b/libx.so.1": forged()}
    process = Process(Loader(tree_host(tmp_path, tree)))
    for path in (*tree, "/b/libx.so.1"):
        assert process.open(path) == []
    assert opened(process) == list(tree)
    assert process.names["libx.so.1"].path == "/a/libx.so.1"


def test_needs_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_MOST_NAMES", 50)
    many = [f"lib{index}.so" for index in range(40)]
    tree: dict[str, Content] = {
        f"/l/{name}": library(needed=many[::-1], rpath="/l", machine="x86_64") for name in many[:3]
    }
    assert len(Process(Loader(tree_host(tmp_path, tree))).open("/l/lib0.so")) < 50


# -- the cache ---------------------------------------------------------------------------------------------------------


def cache(
    *entries: tuple[str, str] | tuple[str, str, str],
    flags: int = 0x0303,
    levels: Sequence[str] = (),
    legacy: int = 0,
) -> bytes:
    """A cache of (name, path) or (name, path, level); ``levels`` are those it knows."""
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


def test_a_cache() -> None:
    data = cache(("libx.so.1", "/b/libx.so.1"), ("libx.so.1", "/a/libx.so.1"), ("liby.so", "/a/liby.so"))
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/b/libx.so.1", "/a/libx.so.1"), "liby.so": ("/a/liby.so",)}


def test_a_cache_behind_one_of_the_old_format() -> None:
    old = b"ld.so-1.7.0\0" + struct.pack("<I3i", 1, 3, 0, 0)
    data = old + bytes(-len(old) % 8) + cache(("libx.so.1", "/x"))
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/x",)}


def test_a_cache_holds_libraries_of_other_machines() -> None:
    assert read_cache(cache(("libx.so.1", "/x"), flags=0x0003), "x86_64") == {}
    assert read_cache(cache(("libx.so.1", "/x"), flags=0x0A03), "aarch64") == {"libx.so.1": ("/x",)}


def test_a_cache_with_levels_of_the_processor() -> None:
    levels = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
    entries = (("libx.so.1", "/plain"), ("libx.so.1", "/v2", levels[0]), ("libx.so.1", "/v4", levels[2]))
    data = cache(*entries, levels=levels)
    assert read_cache(data, "x86_64", ("x86-64-v3", "x86-64-v2")) == {"libx.so.1": ("/v2", "/plain")}
    assert read_cache(data, "x86_64") == {"libx.so.1": ("/plain",)}
    assert read_cache(cache(("libx.so.1", "/old"), legacy=4), "x86_64") == {}


def test_every_prefix_and_every_changed_byte_of_a_cache() -> None:
    whole = cache(("libx.so.1", "/a/libx.so.1"), ("liby.so", "/y", "v2"), levels=("v2",))
    for at in range(len(whole)):
        assert isinstance(read_cache(whole[:at], "x86_64", ("v2",)), dict)
        changed = whole[:at] + b"\xff" + whole[at + 1 :]
        assert isinstance(read_cache(changed, "x86_64", ("v2",)), dict)


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_the_cache_of_this_machine() -> None:
    data = Path("/etc/ld.so.cache").read_bytes() if Path("/etc/ld.so.cache").exists() else b""
    machine = platform.machine()
    if not data or machine not in ("x86_64", "aarch64"):
        pytest.skip("needs /etc/ld.so.cache on x86-64 or aarch64")
    paths = read_cache(data, machine).get("libc.so.6", ())
    assert any(os.path.exists(path) for path in paths)  # noqa: PTH110
