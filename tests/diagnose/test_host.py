"""The host as the probes see it: files below a root, and no exception for any state of the host."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from tests.diagnose.trees import TreeHost
from tests.diagnose.windows_trees import SYSTEM, windows_host
from tests.each import each

from transload.diagnose.host import Host, memory
from transload.diagnose.windows import Registry
from transload.io.limits import MemoryStatus
from transload.machine import Unknown


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_bytes(b"ID=ubuntu\nNAME=x\n")
    return TreeHost(root=str(tmp_path))


def test_absolute_links_to_folders_stay_inside_the_root(host: Host, tmp_path: Path) -> None:
    (tmp_path / "opt" / "kept").mkdir(parents=True)
    (tmp_path / "opt" / "kept" / "link").symlink_to("there")
    (tmp_path / "to").symlink_to("/opt/kept")
    assert host.listdir("/to") == ("link",)
    assert [*host.paths("/to")] == ["/to/link"]
    assert host.readlink("/to/link") == "there"
    assert (host.is_dir("/to"), host.exists("/to/link")) == (True, False)


def test_text_reads_a_file_and_line_its_first_line(host: Host) -> None:
    assert host.text("/etc/os-release") == "ID=ubuntu\nNAME=x\n"
    assert host.text("/etc/os-release", 3) == "ID="
    assert host.line("/etc/os-release") == "ID=ubuntu"
    assert host.line("/nowhere") == ""


def test_invalid_utf8_is_kept_as_surrogates(host: Host, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\xfe\0")
    text = host.text("/odd")
    assert isinstance(text, str)
    assert text.encode("utf-8", "surrogateescape") == b"\xff\xfe\0"


@pytest.mark.parametrize("path", ["/nowhere", "/etc/os-release/below", "/etc", "/a\0b", "/pipe", "/loop"])
def test_unreadable_file_is_unknown_with_a_reason(host: Host, tmp_path: Path, path: str) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # opening it would block
    (tmp_path / "loop").symlink_to("loop")
    text = host.text(path)
    assert isinstance(text, Unknown)
    assert text.reason.startswith(path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_proc_file_is_read_to_its_end() -> None:
    text = Host().text("/proc/self/maps")
    assert isinstance(text, str)
    assert len(text) > 4096
    assert text.endswith("\n")


def test_listing_of_a_folder(host: Host) -> None:
    assert host.listdir("/etc") == ("os-release",)
    assert not host.listdir("/nowhere")
    assert list(host.paths("/etc", "os-", "se")) == ["/etc/os-release"]
    assert host.is_dir("/etc")
    assert not host.is_dir("/etc/os-release")


def test_absolute_links_stay_inside_the_root(host: Host, tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/libcuda.so.580.65.06").write_text("lib")
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "usr/lib/libcuda.so.1").symlink_to("libcuda.so.580.65.06")
    assert host.target("/lib/libcuda.so.1") == "/usr/lib/libcuda.so.580.65.06"
    assert host.text("/lib/libcuda.so.1") == "lib"
    assert host.readlink("/lib") == "/usr/lib"
    assert host.readlink("/usr") == ""


def test_dangling_link_does_not_exist_and_link_loop_ends(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert not host.exists("/dangling")
    assert host.exists("/etc/os-release")
    host.target("/a")  # must not loop forever


@each("path", ["/a\0b", "/\ud800"])
def test_invalid_path_does_not_exist(path: str) -> None:
    assert not Host().exists(path)
    assert not Host().is_dir(path)


def test_open_error_is_the_name_of_the_errno(host: Host, tmp_path: Path) -> None:
    assert host.open_error("/etc/os-release") == ""
    assert host.open_error("/dev/nvidiactl") == "ENOENT"
    assert host.open_error("/etc") == "EISDIR"
    if os.name == "posix" and os.geteuid() != 0:
        (tmp_path / "secret").touch(mode=0)
        assert host.open_error("/secret") == "EACCES"


def test_defaults_describe_this_host() -> None:
    host = Host()
    assert (host.environ, host.uname[2]) == (dict(os.environ), platform.machine())
    assert (host.python, host.cwd) == (Path(sys.executable).as_posix(), Path.cwd().as_posix())
    assert host.real("/etc/os-release") == "/etc/os-release"
    assert all(host.uname)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not delete a current directory")
def test_deleted_current_directory_is_an_empty_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert Host().cwd == ""


# -- Windows


def test_search_path_and_programs_of_windows(tmp_path: Path) -> None:
    path = '"C:\\Program Files\\Py";relative;\\\\server\\tools;C:\\windows\\SYSTEM32\\;C:'
    host = windows_host(tmp_path, environ={"PATH": path})
    assert host.search_path() == ["C:/Program Files/Py", "//server/tools", "C:/windows/SYSTEM32"]
    assert host.program("nvidia-smi", host.search_path()) == "C:/windows/SYSTEM32/nvidia-smi.exe"
    assert host.target("c:/windows/system32/NVCUDA.DLL") == f"{SYSTEM}/nvcuda.dll"
    assert host.home == "C:/Users/Jo Doe"
    assert [host.absolute(path) for path in ("D:/x", "x/y", "")] == ["D:/x", f"{host.cwd}/x/y", host.cwd]


def test_registry_of_a_tree_has_keys_and_values_of_any_case(tmp_path: Path) -> None:
    host = windows_host(tmp_path, registry={"HKCU/A/b": {"Name": "x\0", "List": ("y", "z"), "Number": 1}})
    key = host.registry("hkcu/a/B")
    assert isinstance(key, Registry)
    assert [key.text(name) for name in ("NAME", "list", "Number", "absent")] == ["x", "y", "", ""]
    assert host.registry("HKCU/A") == Registry({}, ("b",))
    assert host.registry("HKCU/C") == Unknown("HKCU/C does not exist")


def test_memory_of_windows(tmp_path: Path) -> None:
    assert memory(windows_host(tmp_path)) == (32 << 30, 20 << 30)


@pytest.mark.skipif(sys.platform == "win32", reason="tests other systems")
def test_host_without_windows_has_no_registry() -> None:
    host = Host()
    assert not host.registry("HKLM/SOFTWARE")
    assert not host.devices()
    assert host.memory_status() == MemoryStatus()
