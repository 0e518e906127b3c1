"""The kernel driver, the kernel log and the processes, as the probes read them from a tree of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.trees import (
    FOLDER,
    H200,
    KERNEL,
    VERSION,
    Content,
    Link,
    Tree,
    TreeHost,
    container,
    module,
    module_file,
    plain_host,
    tree_host,
    wsl,
)
from tests.each import each

from transload.diagnose.host import Host
from transload.diagnose.probes.system import daemons_and_stuck, kernel, kernel_log
from transload.machine import ProcGpu, Unknown

if TYPE_CHECKING:
    import pytest

SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def test_working_driver(tmp_path: Path) -> None:
    facts = kernel(plain_host(tmp_path))
    assert (facts.loaded, facts.version, facts.flavour) == (True, VERSION, "open")
    assert facts.modules == ("nvidia", "nvidia_uvm")
    assert facts.gpus == (ProcGpu("0000:17:00.0", "NVIDIA H200", 0, VERSION),)
    assert facts.parameters["DeviceFileMode"] == "438"
    assert (facts.built_for, facts.firmware) == ((KERNEL,), True)
    assert (facts.secure_boot, facts.kaslr, facts.uvm_disable_hmm) == (False, True, "N")
    assert (facts.daemons, facts.stuck, facts.fabric_manager, facts.mps_directory) == ((), (), "", "")


@each(
    ("line", "version", "flavour"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  ",
            "580.159.04",
            "open",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
            "550.54.15",
            "proprietary",
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  390.157  Wed Oct 12", "390.157", "proprietary"),
        ("garbage", "", ""),
    ],
)
def test_version_and_flavour_from_the_version_file(tmp_path: Path, line: str, version: str, flavour: str) -> None:
    facts = kernel(tree_host(tmp_path, {"/proc/driver/nvidia/version": f"{line}\nGCC version:  gcc version 15.3.0\n"}))
    assert (facts.version, facts.flavour) == (version, flavour)


def test_not_loaded_is_known_only_where_modules_are_listed(tmp_path: Path) -> None:
    assert kernel(plain_host(tmp_path / "1", driver="")).loaded is False
    assert kernel(wsl(tmp_path / "2")).loaded is False
    assert kernel(tree_host(tmp_path / "3", {"/sys/module/ext4": FOLDER})).loaded is False
    assert kernel(tree_host(tmp_path / "4", {})).loaded == Unknown("/proc/modules does not exist")


def test_container_without_a_gpu_still_shows_the_hosts_module(tmp_path: Path) -> None:
    facts = kernel(container(tmp_path, gpu=False))
    assert (facts.loaded, facts.version, facts.flavour, facts.gpus) == (True, VERSION, "", ())
    assert facts.built_for == Unknown("/lib/modules does not exist")
    assert facts.firmware == Unknown("/lib/firmware/nvidia does not exist")
    assert isinstance(facts.secure_boot, Unknown)


def test_only_gpu_related_modules_are_listed(tmp_path: Path) -> None:
    names = ("nouveau", "nova_core", "snd_hda", "vfio_pci", "nvidia_modeset", "video", "xenfs")
    modules = "".join(f"{name} 16384 0 - Live 0x0\n" for name in names)
    facts = kernel(plain_host(tmp_path, driver="", more={"/proc/modules": modules}))
    assert facts.modules == ("nouveau", "nova_core", "nvidia_modeset", "vfio_pci")


@each(
    "name",
    [
        "updates/dkms/nvidia.ko.zst",
        "updates/dkms/nvidia-current.ko.xz",
        "kernel/nvidia-580/nvidia.ko",
        "extra/nvidia/nvidia.ko.gz",
        "weak-updates/nvidia-tesla-470.ko",
        "kernel/drivers/video/nvidia.ko.xz",
    ],
)
def test_kernels_for_which_the_module_is_built(tmp_path: Path, name: str) -> None:
    """Of three kernels, one has the module, one does not, and one lists a file that does not exist."""
    stale: Tree = {"/usr/lib/modules/6.8.0-50/modules.dep": f"{name}:\n", "/usr/lib/modules/6.8.0-50/kernel": FOLDER}
    other = {"/usr/lib/modules/6.8.0-60/modules.dep": "kernel/drivers/hid/hid-nvidia-shield.ko:\nextra/nvidia-fs.ko:\n"}
    host = plain_host(tmp_path, driver="", more={**module_file("6.8.0-40", name), **stale, **other})
    assert kernel(host).built_for == ("6.8.0-40",)


@each(
    ("tree", "secure"),
    [
        ({SECURE_BOOT: b"\6\0\0\0\1"}, True),
        ({SECURE_BOOT: b"\6\0\0\0\0"}, False),
        ({SECURE_BOOT: b"\6"}, Unknown(f"{SECURE_BOOT} is too short")),
        ({"/sys/firmware/acpi": FOLDER}, False),
        ({"/sys/firmware/efi/efivars": FOLDER}, Unknown(f"{SECURE_BOOT} does not exist")),
        ({"/sys/firmware": FOLDER}, Unknown(f"{SECURE_BOOT} does not exist")),
        ({}, Unknown(f"{SECURE_BOOT} does not exist")),
    ],
)
def test_secure_boot(tmp_path: Path, tree: Tree, secure: bool | Unknown) -> None:
    assert kernel(tree_host(tmp_path, tree)).secure_boot == secure


def test_kernel_started_with_nokaslr(tmp_path: Path) -> None:
    assert kernel(plain_host(tmp_path / "1", more={"/proc/cmdline": "ro nokaslr quiet\n"})).kaslr is False
    assert kernel(plain_host(tmp_path / "2", without=("/proc/cmdline",))).kaslr == Unknown(
        "/proc/cmdline does not exist"
    )


def test_firmware_of_another_version_does_not_count(tmp_path: Path) -> None:
    tree = {**module(H200, "570.133.20"), "/usr/lib/firmware/nvidia/560.35.03/gsp_ga10x.bin": b""}
    without = {path: content for path, content in tree.items() if "570.133.20/" not in path}
    assert kernel(plain_host(tmp_path, driver="", more=without)).firmware is False


def test_excluded_card_and_unreadable_information(tmp_path: Path) -> None:
    more: Tree = {
        "/proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t A\nDevice Minor: \t x\nGPU Excluded:\t Yes\n",
        "/proc/driver/nvidia/gpus/0000:65:00.0/information": b"\xff\xfe",
        "/proc/driver/nvidia/gpus/0000:ca:00.0": FOLDER,
    }
    assert kernel(plain_host(tmp_path, more=more)).gpus == (
        ProcGpu("0000:17:00.0", "A", excluded=True),
        ProcGpu("0000:65:00.0"),
        ProcGpu("0000:ca:00.0"),
    )


def test_file_that_blocks_does_not_block_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.probes.system.PATIENCE", 1.0)

    class Hanging(TreeHost):
        def data(self, path: str, limit: int = 1 << 20, start: int = 0) -> bytes | Unknown:
            if path.endswith("/information"):
                os.close(os.open(self.at("/pipe"), os.O_RDONLY))
            return super().data(path, limit, start)

    host = plain_host(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    facts = kernel(Hanging(*(getattr(host, name) for name in host.__dataclass_fields__)))
    assert facts.gpus == (ProcGpu("0000:17:00.0"),)
    assert facts.version == VERSION


DPKG = """\
Package: nvidia-fabricmanager-570
Status: deinstall ok config-files
Version: 570.10.01-1

Package: nvidia-fabricmanager-580
Status: install ok installed
Priority: optional
Version: 580.159.04-1

Package: zlib1g
Status: install ok installed
Version: 1:1.3
"""


@each(
    ("tree", "version"),
    [
        ({"/usr/bin/nv-fabricmanager": b"", "/var/lib/dpkg/status": DPKG}, "580.159.04"),
        ({"/var/lib/dpkg/info/nvidia-fabricmanager-580.list": "", "/var/lib/dpkg/status": DPKG}, "580.159.04"),
        ({"/usr/bin/nv-fabricmanager": b"\x7fELF\0Fabric Manager version is : %s\n\x00575.57.08\0"}, "575.57.08"),
        ({"/usr/bin/nv-fabricmanager": b"\x7fELF\x00575.57.08\x00580.65.06\0"}, ""),
        ({"/var/lib/dpkg/status": DPKG}, ""),
    ],
)
def test_fabric_manager_version(tmp_path: Path, tree: Tree, version: str) -> None:
    assert kernel(plain_host(tmp_path, more=tree)).fabric_manager == version


def test_mps_directory(tmp_path: Path) -> None:
    default = "/tmp/nvidia-mps"  # noqa: S108  where the daemon puts it
    assert kernel(plain_host(tmp_path / "1", more={f"{default}/control": ""})).mps_directory == default
    environ = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    assert kernel(plain_host(tmp_path / "2", more={"/run/mps/log": ""}, environ=environ)).mps_directory == "/run/mps"
    assert kernel(plain_host(tmp_path / "3", environ=environ)).mps_directory == ""


def test_other_systems_are_not_examined(tmp_path: Path) -> None:
    facts = kernel(tree_host(tmp_path, {}, uname=("Darwin", "24.1.0", "arm64")))
    assert facts.loaded == Unknown("not examined on Darwin")


# -- kernel log --------------------------------------------------------------------------------------------------------


FELL_OFF_THE_BUS = "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
INIT_FAILED = "NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x62:0x40:2168)"


def line(message: str, second: int = 5) -> str:
    return f"2026-11-15T04:57:{second:02}.123456+00:00 node17 kernel: [    {second}.140900] {message}\n"


def test_only_messages_about_the_gpu_are_kept(tmp_path: Path) -> None:
    log = line("usb 1-1: new high-speed USB device") + line(FELL_OFF_THE_BUS, 7) + line(INIT_FAILED, 8)
    assert kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log})) == (FELL_OFF_THE_BUS, INIT_FAILED)


def test_messages_before_the_last_boot_are_left_out(tmp_path: Path) -> None:
    log = (
        line(FELL_OFF_THE_BUS)
        + line("Linux version 6.8.0-45-generic", 0)
        + line("nvidia: module license 'NVIDIA' taints kernel.")
    )
    messages = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert messages == ("nvidia: module license 'NVIDIA' taints kernel.",)


def test_log_file_older_than_the_boot_is_not_read(tmp_path: Path) -> None:
    host = plain_host(
        tmp_path, more={"/var/log/kern.log": line(FELL_OFF_THE_BUS), "/proc/stat": "cpu 1 2\nbtime 1763000000\n"}
    )
    os.utime(tmp_path / "var/log/kern.log", (1762990000, 1762990000))
    assert isinstance(kernel_log(host), Unknown)
    os.utime(tmp_path / "var/log/kern.log", (1763000001, 1763000001))
    assert kernel_log(host) == (FELL_OFF_THE_BUS,)


def test_equal_messages_are_kept_once_and_only_the_last_forty(tmp_path: Path) -> None:
    log = (
        "".join(line(FELL_OFF_THE_BUS) for _ in range(500))
        + "".join(line(f"NVRM: {n}") for n in range(45))
        + line(FELL_OFF_THE_BUS)
    )
    messages = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert messages == (*(f"NVRM: {n}" for n in range(6, 45)), FELL_OFF_THE_BUS)


def test_unrelated_messages_are_left_out(tmp_path: Path) -> None:
    noise = (
        'audit: type=1400 audit(1.1:2): apparmor="STATUS" operation="profile_load" name="nvidia_modprobe"',
        "Command line: BOOT_IMAGE=/vmlinuz nvidia-drm.modeset=1",
        "python[29948]: segfault at 0 ip 7f sp 7f error 6 in libnvidia-ml.so.1[7bf]",
    )
    log = "".join(map(line, noise)) + line('audit: type=1400: apparmor="DENIED" name="/dev/nvidiactl" nvidia')
    messages = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert messages == ('audit: type=1400: apparmor="DENIED" name="/dev/nvidiactl" nvidia',)


def test_log_with_garbage_is_read_to_its_end(tmp_path: Path) -> None:
    log = b"\xff\0\n" * 400_000 + line(FELL_OFF_THE_BUS).encode()
    assert kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log})) == (FELL_OFF_THE_BUS,)


def test_overlong_line_is_truncated(tmp_path: Path) -> None:
    messages = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": line(FELL_OFF_THE_BUS + "x" * 100_000)}))
    assert isinstance(messages, tuple)
    assert messages[0].startswith(FELL_OFF_THE_BUS)
    assert len(messages[0]) < 2100


def test_missing_log_is_unknown(tmp_path: Path) -> None:
    assert isinstance(kernel_log(plain_host(tmp_path)), Unknown)


def test_log_of_this_host_is_read_or_unknown() -> None:
    messages = kernel_log(Host())
    assert isinstance(messages, tuple) or messages.reason


# -- processes ---------------------------------------------------------------------------------------------------------


def process(
    number: int, name: str, state: str = "S", *, command: str = "", files: Tree | None = None
) -> dict[str, Content | None]:
    folder = f"/proc/{number}"
    return {
        f"{folder}/stat": f"{number} ({name[:15]}) {state} 1 1 1 0 -1 4194560\n",
        f"{folder}/cmdline": f"{command or name}\0-d\0",
        **{f"{folder}/{path}": content for path, content in (files or {}).items()},
    }


def test_running_daemons(tmp_path: Path) -> None:
    tree = {
        **process(1, "systemd"),
        **process(700, "nvidia-persistenced"),
        **process(701, "nv-fabricmanager"),
        **process(702, "nvidia-gridd", "Z"),
        **process(703, "nvidia-persist"),
    }
    assert daemons_and_stuck(plain_host(tmp_path, more=tree)) == (("nv-fabricmanager", "nvidia-persistenced"), ())


@each(
    ("command", "daemon"),
    [
        ("nvidia-cuda-mps-control", "nvidia-cuda-mps-control"),
        ("/usr/bin/nvidia-cuda-mps-server", "nvidia-cuda-mps-server"),
    ],
)
def test_mps_daemons_are_distinguished_by_their_command_line(tmp_path: Path, command: str, daemon: str) -> None:
    tree = process(80, "nvidia-cuda-mps-x", command=command)
    assert daemons_and_stuck(plain_host(tmp_path, more=tree))[0] == (daemon,)


@each(
    ("files", "stuck"),
    [
        ({"stack": "[<0>] os_acquire_mutex+0x35/0x60 [nvidia]\n[<0>] nvidia_open+0x1 [nvidia]\n"}, True),
        ({"stack": "[<0>] io_schedule+0x46/0x80\n", "fd/5": Link("/dev/nvidia0")}, False),
        ({"wchan": "os_acquire_rwlock_write"}, True),
        ({"wchan": "0", "fd/5": Link("/dev/nvidiactl")}, True),
        ({"wchan": "folio_wait_bit_common", "fd/5": Link("/data/set.bin")}, False),
        ({}, False),
    ],
)
def test_processes_stuck_in_the_driver(tmp_path: Path, files: Tree, *, stuck: bool) -> None:
    tree = {**process(4242, "train (1) x", "D", files=files), **process(4243, "sleeps", files=files)}
    assert daemons_and_stuck(plain_host(tmp_path, more=tree))[1] == (("train (1) x (4242)",) if stuck else ())


@each("tree", [{"/proc/5/stat": b"\xff\0"}, {"/proc/5": ""}, {"/proc/5/stat/x": ""}, {"/proc/5": Link("5")}])
def test_unreadable_process_is_skipped(tmp_path: Path, tree: Tree) -> None:
    assert daemons_and_stuck(plain_host(tmp_path, more=tree)) == ((), ())
