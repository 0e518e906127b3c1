"""The host as probes see it: under a root, and never raising for what a host may be."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from tests.diagnose.trees import TreeHost
from tests.each import each

from transload.diagnose.host import Host
from transload.machine import Unknown


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_text("ID=ubuntu\nNAME=x\n")
    return TreeHost(root=str(tmp_path))


def test_absolute_links_to_folders_stay_inside_the_root(host: Host, tmp_path: Path) -> None:
    (tmp_path / "opt" / "kept").mkdir(parents=True)
    (tmp_path / "opt" / "kept" / "link").symlink_to("there")
    (tmp_path / "to").symlink_to("/opt/kept")
    assert host.listdir("/to") == ("link",)
    assert [*host.paths("/to")] == ["/to/link"]
    assert host.readlink("/to/link") == "there"
    assert (host.is_dir("/to"), host.exists("/to/link")) == (True, False)


def test_text_and_its_first_line(host: Host) -> None:
    assert host.text("/etc/os-release") == "ID=ubuntu\nNAME=x\n"
    assert host.text("/etc/os-release", 3) == "ID="
    assert host.line("/etc/os-release") == "ID=ubuntu"
    assert host.line("/nowhere") == ""


def test_bytes_that_are_no_text_survive(host: Host, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\xfe\0")
    text = host.text("/odd")
    assert isinstance(text, str)
    assert text.encode("utf-8", "surrogateescape") == b"\xff\xfe\0"


@pytest.mark.parametrize("path", ["/nowhere", "/etc/os-release/below", "/etc", "/a\0b", "/pipe", "/loop"])
def test_what_cannot_be_read_is_unknown_with_a_reason(host: Host, tmp_path: Path, path: str) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # opened, it would never answer
    (tmp_path / "loop").symlink_to("loop")
    found = host.text(path)
    assert isinstance(found, Unknown)
    assert found.reason.startswith(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_file_of_the_kernel_is_read_to_its_end() -> None:
    text = Host().text("/proc/self/maps")
    assert isinstance(text, str)
    assert len(text) > 4096
    assert text.endswith("\n")


def test_a_folder_and_what_is_in_it(host: Host) -> None:
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


def test_a_link_that_leads_nowhere_does_not_exist(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert not host.exists("/dangling")
    assert host.exists("/etc/os-release")
    host.target("/a")  # ends


@each("path", ["/a\0b", "/\ud800"])
def test_a_name_that_no_file_can_have_is_not_there(path: str) -> None:
    assert not Host().exists(path)
    assert not Host().is_dir(path)


def test_opening_a_device_tells_the_errno_by_name(host: Host, tmp_path: Path) -> None:
    assert host.open_error("/etc/os-release") == ""
    assert host.open_error("/dev/nvidiactl") == "ENOENT"
    assert host.open_error("/etc") == "EISDIR"
    if os.name == "posix" and os.geteuid() != 0:
        (tmp_path / "secret").touch(mode=0)
        assert host.open_error("/secret") == "EACCES"


def test_the_defaults_are_this_host() -> None:
    host = Host()
    assert (host.environ, host.python, host.uname[2]) == (dict(os.environ), sys.executable, platform.machine())
    assert host.cwd == str(Path.cwd())
    assert host.real("/etc/os-release") == "/etc/os-release"
    assert all(host.uname)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not delete a current directory")
def test_a_current_directory_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert Host().cwd == ""
