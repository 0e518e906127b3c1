"""The lines of the kernel's log that speak of a GPU."""

from __future__ import annotations

import os
import re

from transload.diagnose.host import Host, reason
from transload.machine import Unknown

__all__ = ["kernel_log"]

_SPEAKS = ("NVRM", "nvidia", "nouveau", "Xid", "nova_core", "fallen off the bus", "request_free_mem_region")
_NOISE = re.compile(
    r"audit: .*apparmor=.(?:STATUS|ALLOWED)|ommand line:|input: .*HDMI|systemd\[\d+\]:|\]: segfault at |\btraps: "
)
_BEFORE = re.compile(r"^(?:<\d+>)?(?:.{0,80}? kernel: )?(?:\[ *[\d.]+\] ?)?")
_BANNER = "Linux version "
_LINES = 40
_TAIL = 512 << 10  # bytes: most rings are smaller, and a log file is longer than anybody asked for
_LINE = 1 << 11  # letters: the kernel itself writes no more than half of that at once
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
_FILES = ("/var/log/kern.log", "/var/log/dmesg", "/var/log/messages")


def kernel_log(host: Host) -> tuple[str, ...] | Unknown:
    """The last lines that concern us, since the machine started: from the kernel, else from a file that keeps them.

    A line is the message alone, and told once however often it came: times and the host's name are left out.
    """
    ring = _ring() if host.root == "/" else Unknown("the log of a tree is in its files")
    if isinstance(ring, str):
        return _concerning(ring)
    kept = (_kept(host, path) for path in _FILES)
    return next((_concerning(text) for text in kept if text), ring)


def _ring() -> str | Unknown:
    """The kernel's own buffer. Read in one call: /dev/kmsg gives a line a time, oldest first, of perhaps 100 000."""
    import ctypes

    try:
        ask = ctypes.CDLL(None, use_errno=True).klogctl
    except (OSError, AttributeError, TypeError):
        return Unknown("this system has no klogctl")
    buffer = ctypes.create_string_buffer(_TAIL)
    length = ask(_READ_ALL, buffer, _TAIL)
    if length < 0:
        code = ctypes.get_errno()
        return Unknown(reason("the kernel's log", OSError(code, os.strerror(code))))
    return ctypes.string_at(buffer, length).decode("utf-8", "replace")


def _kept(host: Host, path: str) -> str:
    """What a log file has of this start of the machine: nothing, where it was last written before."""
    status = host.status(path)
    if isinstance(status, Unknown) or status.st_mtime < _started(host):
        return ""
    text = _tail(host.at(host.target(path)), status.st_size)
    return text[max(text.rfind(_BANNER), 0) :]


def _started(host: Host) -> int:
    found = re.search(r"^btime (\d{1,12})$", host.text("/proc/stat") or "", re.MULTILINE)
    return int(found[1]) if found else 0


def _tail(real: str, size: int) -> str:
    try:
        with open(real, "rb") as stream:
            stream.seek(max(0, size - _TAIL))
            return stream.read(_TAIL).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _concerning(text: str) -> tuple[str, ...]:
    r"""Of lines that say the same, the last is kept.

    >>> _concerning("<6>[ 5.1] NVRM: loading\n<6>[ 5.2] usb 1-1: new\n<4>[ 9.0] NVRM: Xid (PCI:0000:17:00): 79")
    ('NVRM: loading', 'NVRM: Xid (PCI:0000:17:00): 79')
    """
    last: dict[str, None] = {}
    for line in text.split("\n"):
        if not any(word in line for word in _SPEAKS) or _NOISE.search(line):
            continue
        message = _BEFORE.sub("", line[:_LINE].strip(), count=1)
        last.pop(message, None)
        last[message] = None
    return tuple(last)[-_LINES:]
