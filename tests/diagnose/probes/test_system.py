from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnose.trees import FOLDER, Content, Link, Tree, plain_host, tree_host
from tests.each import each

from transload.diagnose.host import Host, memory
from transload.diagnose.probes.system import Mount, mount_of, mounts, platform, toolkit
from transload.machine import Toolkit, Unknown


def test_every_fact_of_an_ubuntu_server(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path))
    assert (told.system, told.machine, told.kernel) == ("Linux", "x86_64", "6.8.0-45-generic")
    assert (told.distribution, told.distribution_like, told.distribution_version) == ("ubuntu", ("debian",), "24.04")
    assert told.distribution_name == "Ubuntu 24.04.1 LTS"
    assert (told.libc, told.package_manager, told.shell) == ("glibc 2.39", "apt", "bash")
    assert (told.root, told.groups) == (False, ("adm", "user"))
    assert (told.laptop, told.address_space, told.suspends, told.prime) == (False, None, 0, "")


def test_os_release_may_be_only_in_usr(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path, without=("/etc/os-release",)))
    assert told.distribution == "ubuntu"


@each(
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


@each(
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


@each(("type_", "laptop"), [("10\n", True), ("31", True), ("3", False), ("23", False), ("\udcff", False)])
def test_the_chassis_tells_a_laptop(tmp_path: Path, type_: str, *, laptop: bool) -> None:
    assert platform(plain_host(tmp_path, more={"/sys/class/dmi/id/chassis_type": type_})).laptop is laptop


def test_without_a_chassis_nobody_knows(tmp_path: Path) -> None:
    told = platform(plain_host(tmp_path, without=("/sys/class/dmi",)))
    assert told.laptop == Unknown("/sys/class/dmi/id/chassis_type does not exist")


def test_limits_suspends_and_groups_without_a_name(tmp_path: Path) -> None:
    more = {
        "/proc/self/limits": "Max address space         8589934592           unlimited            bytes     \n",
        "/sys/power/suspend_stats/success": "7\n",
        "/proc/self/status": "Gid:\t1000\t1000\t1000\t1000\nGroups:\t44 60001 1000 \n",
    }
    told = platform(plain_host(tmp_path, more=more))
    assert (told.address_space, told.suspends) == (8589934592, 7)
    assert told.groups == ("60001", "user", "video")


@each(
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


def test_this_host_can_be_examined() -> None:
    assert platform(Host()).system


# -- memory ------------------------------------------------------------------------------------------------------------


GB = 1 << 30
MEMINFO = (
    f"MemTotal:       {64 * GB // 1024} kB\nMemFree:        {1 * GB // 1024} kB\nMemAvailable:   {40 * GB // 1024} kB\n"
)
GROUP = "/sys/fs/cgroup/kubepods/pod1"


@each(
    ("tree", "expected"),
    [
        ({}, (-1, -1)),
        ({"/proc/meminfo": b"\xff\xfe garbage: x\n"}, (-1, -1)),
        ({"/proc/meminfo": MEMINFO}, (64 * GB, 40 * GB)),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "max\n"}, (64 * GB, 40 * GB)),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/kubepods/pod1\n",
                f"{GROUP}/memory.max": f"{8 * GB}\n",
                f"{GROUP}/memory.current": f"{6 * GB}\n",
                f"{GROUP}/memory.stat": f"anon 1\ninactive_file {1 * GB}\n",
            },
            (8 * GB, 3 * GB),
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GB}\n",
            },
            (4 * GB, 0),
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": f"{16 * GB}\n",
                "/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": f"{6 * GB}\n",
                "/sys/fs/cgroup/memory/slurm/job_7/memory.stat": f"total_inactive_file {2 * GB}\n",
            },
            (16 * GB, 12 * GB),
        ),
        (
            {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (64 * GB, 40 * GB),
        ),
    ],
)
def test_memory_is_the_machines_or_the_containers_where_that_is_less(
    tree: Tree, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert memory(tree_host(tmp_path, tree)) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc")
def test_this_machine_has_some() -> None:
    total, free = memory(Host())
    assert 0 < free <= total


# -- mounts ------------------------------------------------------------------------------------------------------------


TEXT = """\
27 1 0:25 /@ / rw,relatime shared:1 - btrfs /dev/nvme0n1p2 rw,subvol=/@
24 27 0:6 / /dev rw,nosuid shared:2 master:1 - devtmpfs udev rw,mode=755
25 24 0:23 / /dev/a\\040b rw,nodev - tmpfs tmpfs rw
26 27 0:24 / /devices rw - tmpfs tmpfs rw
30 24 0:99 / /dev ro,nodev - tmpfs over rw
garbage
1 2 3 / /dev
"""


def test_the_root_and_what_is_at_or_below_dev(tmp_path: Path) -> None:
    assert mounts(tree_host(tmp_path, {"/proc/self/mountinfo": TEXT})) == (
        Mount("/", "btrfs", ("rw", "relatime"), "rw,subvol=/@"),
        Mount("/dev", "devtmpfs", ("rw", "nosuid"), "rw,mode=755"),
        Mount("/dev/a b", "tmpfs", ("rw", "nodev"), "rw"),
        Mount("/dev", "tmpfs", ("ro", "nodev"), "rw"),
    )


@each(
    ("path", "kind", "nodev"),
    [("/dev/nvidia0", "tmpfs", True), ("/devices", "btrfs", False), ("/", "btrfs", False), ("/dev/a b", "tmpfs", True)],
)
def test_the_deepest_and_last_is_the_one(tmp_path: Path, path: str, kind: str, *, nodev: bool) -> None:
    mount = mount_of(mounts(tree_host(tmp_path, {"/proc/self/mountinfo": TEXT})), path)
    assert (mount.kind, "nodev" in mount.options) == (kind, nodev)


def test_none_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert mount_of(mounts(tree_host(tmp_path, {})), "/dev") == Mount("", "")


# -- toolkit -----------------------------------------------------------------------------------------------------------


CUDA: Tree = {
    "/usr/local/cuda": Link("cuda-12"),
    "/usr/local/cuda-12": Link("/usr/local/cuda-12.4"),
    "/usr/local/cuda-12.4/bin/nvcc": b"\x7fELF",
}
JSON = '{\n  "cuda" : {\n    "name" : "CUDA SDK",\n    "version" : "12.4.1"\n  },\n  "cudart": {"version": "12.4.127"}}'
HEADER = "/* long */\n#define CUDA_VERSION 13000\n"


def test_none_is_no_fault(tmp_path: Path) -> None:
    assert toolkit(tree_host(tmp_path, {}, {"PATH": "/usr/bin"})) == Toolkit()


def test_the_usual_place_without_any_variable(tmp_path: Path) -> None:
    told = toolkit(tree_host(tmp_path, {**CUDA, "/usr/local/cuda-12.4/version.json": JSON}))
    assert told == Toolkit(
        "/usr/local/cuda/bin/nvcc",
        "12.4.1",
        folders=("/usr/local/cuda", "/usr/local/cuda-12", "/usr/local/cuda-12.4"),
    )


def test_the_path_goes_before_the_home(tmp_path: Path) -> None:
    tree = {**CUDA, "/opt/cuda/bin/nvcc": b"", "/opt/cuda/version.txt": "CUDA Version 10.2.89\n"}
    environ = {"PATH": ":relative:/opt/cuda/bin/:/usr/bin", "CUDA_HOME": "/usr/local/cuda"}
    told = toolkit(tree_host(tmp_path, tree, environ))
    assert (told.nvcc, told.version, told.home) == ("/opt/cuda/bin/nvcc", "10.2.89", "/usr/local/cuda")


@each(
    ("nvcc", "tree", "version"),
    [
        ("/usr/bin/nvcc", {"/usr/bin/nvcc": b"\x7fELF", "/usr/include/cuda.h": HEADER}, "13.0"),
        (
            "/usr/bin/nvcc",
            {
                "/usr/bin/nvcc": '#!/bin/sh\nexec /usr/lib/nvidia-cuda-toolkit/bin/nvcc "$@"\n',
                "/usr/include/cuda.h": "#define CUDA_VERSION 12020\n",
            },
            "12.2",
        ),
        ("/c/bin/nvcc", {"/c/bin/nvcc": b"", "/c/targets/x86_64-linux/include/cuda.h": HEADER}, "13.0"),
        ("/u/cuda-11.8/bin/nvcc", {"/u/cuda-11.8/bin/nvcc": b"", "/u/cuda-11.8/version.json": b"\xff{"}, "11.8"),
    ],
)
def test_the_version_by_the_files_around_it(tmp_path: Path, nvcc: str, tree: Tree, version: str) -> None:
    told = toolkit(tree_host(tmp_path, tree, {"PATH": nvcc.removesuffix("/nvcc")}))
    assert (told.nvcc, told.version) == (nvcc, version)


@each("nvcc", [Link("nvcc"), FOLDER])
def test_what_cannot_be_a_compiler(tmp_path: Path, nvcc: Content) -> None:
    assert toolkit(tree_host(tmp_path, {"/c/bin/nvcc": nvcc}, {"PATH": "/c/bin"})).nvcc == ""


@each("target", ["sbsa", "aarch64"])
def test_toolkits_for_arm_servers_and_for_jetson(tmp_path: Path, target: str) -> None:
    tree: Tree = {"/c/bin/nvcc": b"", f"/c/targets/{target}-linux/include/cuda.h": HEADER}
    host = tree_host(tmp_path, tree, {"PATH": "/c/bin"}, uname=("Linux", "6.8", "aarch64"))
    assert toolkit(host).version == "13.0"


def test_a_home_that_is_not_there_is_shown(tmp_path: Path) -> None:
    told = toolkit(tree_host(tmp_path, {}, {"CUDA_PATH": "/gone"}))
    assert told == Toolkit(home="/gone")
