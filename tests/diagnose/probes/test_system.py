"""Platform, memory, mounts and CUDA toolkit, as the probes read them from a tree of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnose.trees import FOLDER, Content, Link, Tree, plain_host, tree_host
from tests.each import each

from transload.diagnose.host import Host, memory
from transload.diagnose.probes.system import Mount, mount_of, mounts, platform, toolkit
from transload.machine import Toolkit, Unknown


def test_ubuntu_server(tmp_path: Path) -> None:
    facts = platform(plain_host(tmp_path))
    assert (facts.system, facts.machine, facts.kernel) == ("Linux", "x86_64", "6.8.0-45-generic")
    assert (facts.distribution, facts.distribution_like, facts.distribution_version) == ("ubuntu", ("debian",), "24.04")
    assert facts.distribution_name == "Ubuntu 24.04.1 LTS"
    assert (facts.libc, facts.package_manager, facts.shell) == ("glibc 2.39", "apt", "bash")
    assert (facts.root, facts.groups) == (False, ("adm", "user"))
    assert (facts.laptop, facts.address_space, facts.suspends, facts.prime) == (False, None, 0, "")


def test_os_release_only_below_usr(tmp_path: Path) -> None:
    facts = platform(plain_host(tmp_path, without=("/etc/os-release",)))
    assert facts.distribution == "ubuntu"


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
def test_package_manager_of_the_distribution(
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
def test_libc_is_read_from_files(tmp_path: Path, tree: Tree, libc: str) -> None:
    assert platform(tree_host(tmp_path, tree)).libc == libc


@each(("chassis_type", "laptop"), [("10\n", True), ("31", True), ("3", False), ("23", False), ("\udcff", False)])
def test_laptop_is_recognized_by_its_chassis_type(tmp_path: Path, chassis_type: str, *, laptop: bool) -> None:
    assert platform(plain_host(tmp_path, more={"/sys/class/dmi/id/chassis_type": chassis_type})).laptop is laptop


def test_laptop_is_unknown_without_a_chassis_type(tmp_path: Path) -> None:
    facts = platform(plain_host(tmp_path, without=("/sys/class/dmi",)))
    assert facts.laptop == Unknown("/sys/class/dmi/id/chassis_type does not exist")


def test_limits_suspends_and_groups_without_a_name(tmp_path: Path) -> None:
    more = {
        "/proc/self/limits": "Max address space         8589934592           unlimited            bytes     \n",
        "/sys/power/suspend_stats/success": "7\n",
        "/proc/self/status": "Gid:\t1000\t1000\t1000\t1000\nGroups:\t44 60001 1000 \n",
    }
    facts = platform(plain_host(tmp_path, more=more))
    assert (facts.address_space, facts.suspends) == (8589934592, 7)
    assert facts.groups == ("60001", "user", "video")


@each(
    ("path", "text", "prime"),
    [
        ("/etc/prime-discrete", "on\n", "nvidia"),
        ("/etc/prime-discrete", "off\n", "intel"),
        ("/etc/prime-discrete", "on-demand\n", "on-demand"),
        ("/etc/prime/current_type", "intel\n", "intel"),
    ],
)
def test_prime_mode_is_read_from_its_file(tmp_path: Path, path: str, text: str, prime: str) -> None:
    assert platform(plain_host(tmp_path, more={path: text})).prime == prime


def test_root_in_an_empty_tree(tmp_path: Path) -> None:
    facts = platform(tree_host(tmp_path, {}, uid=0))
    assert facts.root
    assert (facts.shell, facts.distribution, facts.groups, facts.package_manager) == ("", "", (), "")


def test_other_systems_report_their_names(tmp_path: Path) -> None:
    facts = platform(tree_host(tmp_path, {}, {"SHELL": "/bin/zsh"}, uname=("Darwin", "24.1.0", "arm64")))
    assert (facts.system, facts.machine, facts.kernel, facts.shell) == ("Darwin", "arm64", "24.1.0", "zsh")


def test_this_host_can_be_probed() -> None:
    assert platform(Host()).system


# -- memory ------------------------------------------------------------------------------------------------------------


GB = 1 << 30
MEMINFO = (
    f"MemTotal:       {64 * GB // 1024} kB\nMemFree:        {1 * GB // 1024} kB\nMemAvailable:   {40 * GB // 1024} kB\n"
)
CGROUP = "/sys/fs/cgroup/kubepods/pod1"


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
                f"{CGROUP}/memory.max": f"{8 * GB}\n",
                f"{CGROUP}/memory.current": f"{6 * GB}\n",
                f"{CGROUP}/memory.stat": f"anon 1\ninactive_file {1 * GB}\n",
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
def test_memory_is_that_of_the_machine_or_less_by_a_cgroup_limit(
    tree: Tree, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert memory(tree_host(tmp_path, tree)) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc")
def test_memory_of_this_machine() -> None:
    total, free = memory(Host())
    assert 0 < free <= total


# -- mounts ------------------------------------------------------------------------------------------------------------


MOUNTINFO = """\
27 1 0:25 /@ / rw,relatime shared:1 - btrfs /dev/nvme0n1p2 rw,subvol=/@
24 27 0:6 / /dev rw,nosuid shared:2 master:1 - devtmpfs udev rw,mode=755
25 24 0:23 / /dev/a\\040b rw,nodev - tmpfs tmpfs rw
26 27 0:24 / /devices rw - tmpfs tmpfs rw
30 24 0:99 / /dev ro,nodev - tmpfs over rw
garbage
1 2 3 / /dev
"""


def test_mounts_of_the_root_and_below_dev(tmp_path: Path) -> None:
    assert mounts(tree_host(tmp_path, {"/proc/self/mountinfo": MOUNTINFO})) == (
        Mount("/", "btrfs", ("rw", "relatime"), "rw,subvol=/@"),
        Mount("/dev", "devtmpfs", ("rw", "nosuid"), "rw,mode=755"),
        Mount("/dev/a b", "tmpfs", ("rw", "nodev"), "rw"),
        Mount("/dev", "tmpfs", ("ro", "nodev"), "rw"),
    )


@each(
    ("path", "kind", "nodev"),
    [("/dev/nvidia0", "tmpfs", True), ("/devices", "btrfs", False), ("/", "btrfs", False), ("/dev/a b", "tmpfs", True)],
)
def test_deepest_and_last_mount_wins(tmp_path: Path, path: str, kind: str, *, nodev: bool) -> None:
    mount = mount_of(mounts(tree_host(tmp_path, {"/proc/self/mountinfo": MOUNTINFO})), path)
    assert (mount.kind, "nodev" in mount.options) == (kind, nodev)


def test_no_mount_without_mountinfo(tmp_path: Path) -> None:
    assert mount_of(mounts(tree_host(tmp_path, {})), "/dev") == Mount("", "")


# -- toolkit -----------------------------------------------------------------------------------------------------------


CUDA: Tree = {
    "/usr/local/cuda": Link("cuda-12"),
    "/usr/local/cuda-12": Link("/usr/local/cuda-12.4"),
    "/usr/local/cuda-12.4/bin/nvcc": b"\x7fELF",
}
VERSION_JSON = (
    '{\n  "cuda" : {\n    "name" : "CUDA SDK",\n    "version" : "12.4.1"\n  },\n  "cudart": {"version": "12.4.127"}}'
)
HEADER = "/* long */\n#define CUDA_VERSION 13000\n"


def test_no_toolkit(tmp_path: Path) -> None:
    assert toolkit(tree_host(tmp_path, {}, {"PATH": "/usr/bin"})) == Toolkit()


def test_toolkit_in_the_usual_folder_without_variables(tmp_path: Path) -> None:
    facts = toolkit(tree_host(tmp_path, {**CUDA, "/usr/local/cuda-12.4/version.json": VERSION_JSON}))
    assert facts == Toolkit(
        "/usr/local/cuda/bin/nvcc",
        "12.4.1",
        folders=("/usr/local/cuda", "/usr/local/cuda-12", "/usr/local/cuda-12.4"),
    )


def test_path_comes_before_cuda_home(tmp_path: Path) -> None:
    tree = {**CUDA, "/opt/cuda/bin/nvcc": b"", "/opt/cuda/version.txt": "CUDA Version 10.2.89\n"}
    environ = {"PATH": ":relative:/opt/cuda/bin/:/usr/bin", "CUDA_HOME": "/usr/local/cuda"}
    facts = toolkit(tree_host(tmp_path, tree, environ))
    assert (facts.nvcc, facts.version, facts.home) == ("/opt/cuda/bin/nvcc", "10.2.89", "/usr/local/cuda")


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
def test_toolkit_version_from_files_around_nvcc(tmp_path: Path, nvcc: str, tree: Tree, version: str) -> None:
    facts = toolkit(tree_host(tmp_path, tree, {"PATH": nvcc.removesuffix("/nvcc")}))
    assert (facts.nvcc, facts.version) == (nvcc, version)


@each("nvcc", [Link("nvcc"), FOLDER])
def test_link_loop_or_folder_is_not_nvcc(tmp_path: Path, nvcc: Content) -> None:
    assert toolkit(tree_host(tmp_path, {"/c/bin/nvcc": nvcc}, {"PATH": "/c/bin"})).nvcc == ""


@each("target", ["sbsa", "aarch64"])
def test_toolkits_for_arm_servers_and_for_jetson(tmp_path: Path, target: str) -> None:
    tree: Tree = {"/c/bin/nvcc": b"", f"/c/targets/{target}-linux/include/cuda.h": HEADER}
    host = tree_host(tmp_path, tree, {"PATH": "/c/bin"}, uname=("Linux", "6.8", "aarch64"))
    assert toolkit(host).version == "13.0"


def test_cuda_path_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    facts = toolkit(tree_host(tmp_path, {}, {"CUDA_PATH": "/gone"}))
    assert facts == Toolkit(home="/gone")
