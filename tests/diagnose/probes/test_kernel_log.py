from __future__ import annotations

import os
from pathlib import Path

from tests.diagnose.trees import plain_host

from transload.diagnose.host import Host
from transload.diagnose.probes.kernel import kernel_log
from transload.machine import Unknown

FELL = "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
WEDGED = "NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x62:0x40:2168)"


def line(message: str, second: int = 5) -> str:
    return f"2026-11-15T04:57:{second:02}.123456+00:00 node17 kernel: [    {second}.140900] {message}\n"


def test_messages_alone_are_told(tmp_path: Path) -> None:
    log = line("usb 1-1: new high-speed USB device") + line(FELL, 7) + line(WEDGED, 8)
    assert kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log})) == (FELL, WEDGED)


def test_what_was_before_the_last_start_is_not_told(tmp_path: Path) -> None:
    log = (
        line(FELL) + line("Linux version 6.8.0-45-generic", 0) + line("nvidia: module license 'NVIDIA' taints kernel.")
    )
    told = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert told == ("nvidia: module license 'NVIDIA' taints kernel.",)


def test_a_file_nobody_wrote_since_the_start_is_not_read(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/var/log/kern.log": line(FELL), "/proc/stat": "cpu 1 2\nbtime 1763000000\n"})
    os.utime(tmp_path / "var/log/kern.log", (1762990000, 1762990000))
    assert isinstance(kernel_log(host), Unknown)
    os.utime(tmp_path / "var/log/kern.log", (1763000001, 1763000001))
    assert kernel_log(host) == (FELL,)


def test_the_same_is_told_once_and_the_last_forty(tmp_path: Path) -> None:
    log = "".join(line(FELL) for _ in range(500)) + "".join(line(f"NVRM: {n}") for n in range(45)) + line(FELL)
    told = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert told == (*(f"NVRM: {n}" for n in range(6, 45)), FELL)


def test_noise_is_left_out(tmp_path: Path) -> None:
    noise = (
        'audit: type=1400 audit(1.1:2): apparmor="STATUS" operation="profile_load" name="nvidia_modprobe"',
        "Command line: BOOT_IMAGE=/vmlinuz nvidia-drm.modeset=1",
        "python[29948]: segfault at 0 ip 7f sp 7f error 6 in libnvidia-ml.so.1[7bf]",
    )
    log = "".join(map(line, noise)) + line('audit: type=1400: apparmor="DENIED" name="/dev/nvidiactl" nvidia')
    told = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log}))
    assert told == ('audit: type=1400: apparmor="DENIED" name="/dev/nvidiactl" nvidia',)


def test_a_log_of_garbage_is_read_to_its_end(tmp_path: Path) -> None:
    log = b"\xff\0\n" * 400_000 + line(FELL).encode()
    assert kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": log})) == (FELL,)


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    told = kernel_log(plain_host(tmp_path, more={"/var/log/kern.log": line(FELL + "x" * 100_000)}))
    assert isinstance(told, tuple)
    assert told[0].startswith(FELL)
    assert len(told[0]) < 2100


def test_no_log_is_said(tmp_path: Path) -> None:
    assert isinstance(kernel_log(plain_host(tmp_path)), Unknown)


def test_this_very_host_answers_or_says_why_not() -> None:
    told = kernel_log(Host())
    assert isinstance(told, tuple) or told.reason
