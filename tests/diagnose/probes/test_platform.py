from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import Link, Tree, plain_host, tree_host

from transload.diagnose.host import Host
from transload.diagnose.probes.system import platform
from transload.machine import Unknown


def test_an_ubuntu_server_is_told_in_full(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path))
    assert (told.system, told.machine, told.kernel) == ("Linux", "x86_64", "6.8.0-45-generic")
    assert (told.distribution, told.distribution_like, told.distribution_version) == ("ubuntu", ("debian",), "24.04")
    assert told.distribution_name == "Ubuntu 24.04.1 LTS"
    assert (told.libc, told.package_manager, told.shell) == ("glibc 2.39", "apt", "bash")
    assert (told.root, told.groups) == (False, ("adm", "user"))
    assert (told.laptop, told.address_space, told.suspends, told.prime) == (False, None, 0, "")


def test_os_release_may_lie_in_usr_alone(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path, without=("/etc/os-release",)))
    assert told.distribution == "ubuntu"


@cases(
    ("release", "programs", "manager"),
    [
        ("ID=fedora", ("/usr/bin/apt-get", "/usr/bin/dnf5"), "dnf"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', ("/usr/bin/dnf",), "dnf"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"', ("/usr/bin/zypper",), "zypper"),
        ("ID=manjaro\nID_LIKE=arch", ("/usr/bin/pacman",), "pacman"),
        ("ID=alpine", ("/sbin/apk",), "apk"),
        ("ID=nixos", ("/run/current-system/sw/bin/nix",), "nix"),
        ("ID=mine", ("/usr/bin/pacman",), "pacman"),
        ("ID=ubuntu", (), ""),
    ],
)
def test_the_package_manager_is_the_distributions_own(
    tmp_path: Path, release: str, programs: tuple[str, ...], manager: str
) -> None:
    tree = {"/etc/os-release": release, **dict.fromkeys(programs, "")}
    assert platform(tree_host(tmp_path, tree)).package_manager == manager


@cases(
    ("tree", "libc"),
    [
        ({"/lib/ld-musl-x86_64.so.1": "", "/lib/apk/db/installed": "P:musl\nV:1.2.5-r0\n\nP:zlib\n"}, "musl 1.2"),
        ({"/lib/ld-musl-x86_64.so.1": ""}, "musl"),
        ({"/lib64/libc.so.6": b"\x7fELF\xff GNU C Library (GNU libc) stable release version 2.34.\n"}, "glibc 2.34"),
        ({"/lib64/libc.so.6": Link("libc.so.6")}, ""),
        ({"/lib64/libc.so.6": b"no library"}, ""),
    ],
)
def test_the_libc_of_a_tree_is_read_from_its_files(tmp_path: Path, tree: Tree, libc: str) -> None:
    assert platform(tree_host(tmp_path, tree)).libc == libc


@cases(("type_", "laptop"), [("10\n", True), ("31", True), ("3", False), ("23", False), ("\udcff", False)])
def test_the_chassis_tells_a_laptop(tmp_path: Path, type_: str, *, laptop: bool) -> None:
    assert platform(plain_host(tmp_path, more={"/sys/class/dmi/id/chassis_type": type_})).laptop is laptop


def test_without_a_chassis_nobody_knows(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path, without=("/sys/class/dmi",)))
    assert told.laptop == Unknown("/sys/class/dmi/id/chassis_type is not there")


def test_limits_suspends_and_groups_without_a_name(tmp_path: Path) -> None:
    more = {
        "/proc/self/limits": "Max address space         8589934592           unlimited            bytes     \n",
        "/sys/power/suspend_stats/success": "7\n",
        "/proc/self/status": "Gid:\t1000\t1000\t1000\t1000\nGroups:\t44 60001 1000 \n",
    }
    told = platform(plain_host(tmp_path, more=more))
    assert (told.address_space, told.suspends) == (8589934592, 7)
    assert told.groups == ("60001", "user", "video")


@cases(
    ("path", "word", "prime"),
    [
        ("/etc/prime-discrete", "on\n", "nvidia"),
        ("/etc/prime-discrete", "off\n", "intel"),
        ("/etc/prime-discrete", "on-demand\n", "on-demand"),
        ("/etc/prime/current_type", "intel\n", "intel"),
    ],
)
def test_prime_is_read_from_its_file(tmp_path: Path, path: str, word: str, prime: str) -> None:
    assert platform(plain_host(tmp_path, more={path: word})).prime == prime


def test_root_and_a_machine_without_a_shell(tmp_path: Path) -> None:
    told = platform(tree_host(tmp_path, {}, uid=0))
    assert told.root
    assert (told.shell, told.distribution, told.groups, told.package_manager) == ("", "", (), "")


def test_other_systems_say_their_names(tmp_path: Path) -> None:
    told = platform(tree_host(tmp_path, {}, {"SHELL": "/bin/zsh"}, uname=("Darwin", "24.1.0", "arm64")))
    assert (told.system, told.machine, told.kernel, told.shell) == ("Darwin", "arm64", "24.1.0", "zsh")


def test_this_very_host_can_be_told() -> None:
    assert platform(Host()).system
